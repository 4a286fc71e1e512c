"""Restoring golden checkpoints as the ranks of many meshes, against slices cut by plain NumPy rules."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Layout
from meshload.naming import model_of
from meshload.testing import counted, llama_shapes, ramp, read_safetensors, same_bits, write_checkpoint

HERE = Path(__file__).resolve().parent
ROOTS = [HERE / "golden", HERE.parent.parent / "shared" / "fixtures"]
Values = Any


def case(*path: str) -> Path:
    found = next((root.joinpath(*path) for root in ROOTS if root.joinpath(*path).is_dir()), None)
    if found is None:
        pytest.skip(f"{'/'.join(path)} is not there")
    return found


def golden(*path: str) -> dict[str, Values]:
    return read_safetensors(case(*path) / "golden.safetensors")


def config_of(*path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((case(*path) / "checkpoint" / "config.json").read_text())
    return found


# --- the rules of parallel plans, said in NumPy -----------------------------------------------------------------------


def by_ceil(n: int, count: int, i: int) -> slice:
    size = math.ceil(n / count)
    return slice(min(i * size, n), min((i + 1) * size, n))


def stage_of(layer: int, layers: int, stages: int) -> int:
    counts = [layers // stages + (i < layers % stages) for i in range(stages)]
    return next(i for i in range(stages) if layer < sum(counts[: i + 1]))


class Rules:
    """What rank `tp` of `count` holds of each array of a model."""

    def __init__(self, config: Mapping[str, Any], tp: int, count: int) -> None:
        self.heads = config["num_attention_heads"]
        self.kv = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.layers = config["num_hidden_layers"]
        self.tp, self.count = tp, count

    def query_rows(self, w: Values) -> Values:
        n = self.heads // self.count * self.head_dim
        return w[self.tp * n : (self.tp + 1) * n]

    def kv_rows(self, w: Values) -> Values:
        if self.kv >= self.count:
            n = self.kv // self.count * self.head_dim
            return w[self.tp * n : (self.tp + 1) * n]
        head = self.tp * self.kv // self.count
        return w[head * self.head_dim : (head + 1) * self.head_dim]

    def fused(self, w: Values) -> Values:
        """GPT-NeoX: rows are `[head, (q, k, v), head_dim]`."""
        per_head = 3 * self.head_dim
        n = self.heads // self.count
        return np.concatenate([w[h * per_head : (h + 1) * per_head] for h in range(self.tp * n, (self.tp + 1) * n)])

    def rows(self, w: Values) -> Values:
        return w[by_ceil(w.shape[0], self.count, self.tp)]

    def columns(self, w: Values) -> Values:
        return w[..., by_ceil(w.shape[-1], self.count, self.tp)]

    def pair(self, w: Values) -> Values:
        """Experts `[expert, (gate, up), embed]`."""
        half = w.shape[1] // 2
        cut = by_ceil(half, self.count, self.tp)
        return np.concatenate([w[:, :half][:, cut], w[:, half:][:, cut]], axis=1)

    def local(self, name: str, w: Values) -> Values:
        last = name.rsplit(".", 2)
        module, leaf = (last[-2], last[-1]) if last[-1] in ("weight", "bias") else (last[-1], "weight")
        match module:
            case "embed_tokens" | "lm_head" | "embed_in" | "embed_out":
                return self.rows(w)
            case "q_proj":
                return self.query_rows(w)
            case "k_proj" | "v_proj":
                return self.kv_rows(w)
            case "o_proj":
                return self.query_rows(w.T).T
            case "query_key_value":
                return self.fused(w)
            case "gate_proj" | "up_proj" | "w1" | "w3" | "dense_h_to_4h":
                return self.rows(w)
            case "down_proj" | "w2" | "dense_4h_to_h" | "dense" if leaf == "weight":
                return self.columns(w)
            case "gate_up_proj":
                return self.pair(w)
        return w

    def stage(self, name: str, stages: int) -> set[int]:
        if ".layers." in name:
            return {stage_of(int(name.split(".layers.")[1].split(".")[0]), self.layers, stages)}
        return {0} if "embed_tokens" in name or "embed_in" in name else {stages - 1}


def expected(
    arrays: Mapping[str, Values], config: Mapping[str, Any], mesh: Mapping[str, int], rank: int, cut: bool = False
) -> dict[str, Values]:
    """Return a rank's slices; ranks count row-major over the axes of `mesh`."""
    at = dict(zip(mesh, np.unravel_index(rank, tuple(mesh.values())), strict=True))
    rules = Rules(config, int(at.get("tp", 0)), mesh.get("tp", 1))
    found = {}
    for name, w in arrays.items():
        if int(at.get("pp", 0)) in rules.stage(name, mesh.get("pp", 1)):
            local = rules.local(name, w)
            if cut and local.ndim:
                local = local[by_ceil(local.shape[0], mesh["dp"], int(at["dp"]))]
            found[name] = np.ascontiguousarray(local)
    return found


def assert_same(found: Mapping[str, Values], wanted: Mapping[str, Values]) -> None:
    assert sorted(found) == sorted(wanted)
    assert [f"{name}: {found[name].shape}, expected {w.shape}" for name, w in wanted.items() if not same_bits(found[name], w)] == []


MESHES: list[tuple[dict[str, int], bool]] = [
    ({}, False),
    ({"tp": 2}, False),
    ({"tp": 4}, False),
    ({"pp": 2}, False),
    ({"pp": 3}, False),
    ({"pp": 2, "tp": 2}, False),
    ({"tp": 2, "pp": 2}, False),
    ({"dp": 2}, False),
    ({"dp": 2}, True),
    ({"dp": 3}, True),
    ({"pp": 2, "tp": 2, "dp": 2}, False),
    ({"pp": 2, "tp": 2, "dp": 2}, True),
]


def check_all_ranks(
    path: Any, arrays: Mapping[str, Values], config: Mapping[str, Any], mesh: dict[str, int], cut: bool, **options: Any
) -> None:
    layout = Layout.default(dp="cut") if cut else None
    for rank in range(math.prod(mesh.values())):
        found = meshload.restore(path, mesh=mesh, rank=rank, layout=layout, into="numpy", **options)
        assert_same(found, expected(arrays, config, mesh, rank, cut))


@pytest.mark.parametrize(
    ("mesh", "cut"), MESHES, ids=lambda m: ",".join(f"{k}{n}" for k, n in m.items()) if isinstance(m, dict) else str(m)
)
class TestGolden:
    """Every rank of every mesh, bit for bit."""

    def test_llama_with_grouped_heads_in_shards(self, mesh: dict[str, int], cut: bool) -> None:
        name = ("hf", "llama_gqa_sharded_bf16")
        check_all_ranks(case(*name) / "checkpoint", golden(*name), config_of(*name), mesh, cut)

    def test_qwen2_with_a_tied_head(self, mesh: dict[str, int], cut: bool) -> None:
        name = ("hf", "qwen2_tied_single")
        check_all_ranks(case(*name) / "checkpoint", golden(*name), config_of(*name), mesh, cut)

    def test_gpt_neox_with_fused_heads(self, mesh: dict[str, int], cut: bool) -> None:
        name = ("hf", "gpt_neox_fused_qkv")
        on_disk = {n.replace("lm_head", "embed_out"): w for n, w in golden(*name).items()}
        check_all_ranks(case(*name) / "checkpoint", on_disk, config_of(*name), mesh, cut)
        check_all_ranks(case(*name) / "checkpoint", golden(*name), config_of(*name), mesh, cut, names="transformers")

    def test_mixtral_under_its_live_names(self, mesh: dict[str, int], cut: bool) -> None:
        name = ("hf", "mixtral_sharded")
        check_all_ranks(case(*name) / "checkpoint", golden(*name), config_of(*name), mesh, cut, names="transformers")

    def test_mixtral_under_its_names_on_disk(self, mesh: dict[str, int], cut: bool) -> None:
        name = ("hf", "mixtral_sharded")
        check_all_ranks(case(*name) / "checkpoint", mixtral_on_disk(golden(*name)), config_of(*name), mesh, cut)

    @pytest.mark.parametrize("folder", ["checkpoint", "checkpoint/sharded"])
    def test_what_the_hugging_face_writer_of_dcp_wrote(self, mesh: dict[str, int], cut: bool, folder: str) -> None:
        name = ("dcp", "llama_bf16_hf_writer")
        config = json.loads((case(*name) / "config" / "config.json").read_text())
        if folder.endswith("sharded"):
            with pytest.warns(meshload.MeshloadWarning, match="hold pieces"):
                path = meshload.open(case(*name) / folder, config=case(*name) / "config")
        else:
            path = meshload.open(case(*name) / folder, config=case(*name) / "config")
        check_all_ranks(path, golden(*name), config, mesh, cut)


def mixtral_on_disk(live: Mapping[str, Values]) -> dict[str, Values]:
    found = {}
    for name, w in live.items():
        head = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            for e in range(len(w)):
                half = w.shape[1] // 2
                found[head.replace("gate_up_proj", f"{e}.w1.weight")] = w[e, :half]
                found[head.replace("gate_up_proj", f"{e}.w3.weight")] = w[e, half:]
        elif name.endswith("experts.down_proj"):
            found |= {head.replace("down_proj", f"{e}.w2.weight"): w[e] for e in range(len(w))}
        else:
            found[head] = w
    return found


def test_experts_are_cut_over_ep() -> None:
    name = ("hf", "mixtral_sharded")
    live, path = golden(*name), case(*name) / "checkpoint"
    disk = mixtral_on_disk(live)
    for rank in range(4):
        ep, tp = divmod(rank, 2)
        rules = Rules(config_of(*name), tp, 2)
        found = meshload.restore(path, mesh="ep=2,tp=2", rank=rank, into="numpy")
        mine = {n: w for n, w in disk.items() if ".experts." not in n or int(n.split(".experts.")[1].split(".")[0]) // 2 == ep}
        assert_same(found, {n: np.ascontiguousarray(rules.local(n, w)) for n, w in mine.items()})
        found = meshload.restore(path, mesh="ep=2,tp=2", rank=rank, into="numpy", names="transformers")
        cut = {n: w[2 * ep : 2 * ep + 2] if ".experts." in n else w for n, w in live.items()}
        assert_same(found, {n: np.ascontiguousarray(rules.local(n, w)) for n, w in cut.items()})


def test_all_ranks_together_hold_everything() -> None:
    name = ("hf", "llama_gqa_sharded_bf16")
    made = meshload.plan(case(*name) / "checkpoint", mesh="pp=2,tp=2", rank="all", merge_gap=0)
    norms = sum(w.nbytes for w in golden(*name).values() if w.ndim == 1)
    total = sum(w.nbytes for w in golden(*name).values())
    assert made.wanted_bytes == total + norms


@pytest.mark.parametrize("into", ["torch", "jax"])
def test_other_frameworks_hold_the_same_bits(into: str) -> None:
    module = pytest.importorskip(into)
    name = ("hf", "llama_gqa_sharded_bf16")
    found = meshload.restore(case(*name) / "checkpoint", mesh="tp=2", rank=1, into=into)
    for n, w in expected(golden(*name), config_of(*name), {"tp": 2}, 1).items():
        if into == "torch":
            assert found[n].dtype == module.bfloat16
            assert found[n].contiguous().view(module.uint16).numpy().tobytes() == w.tobytes()
        else:
            assert same_bits(np.asarray(found[n]), w)


# --- views ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_shown_under_its_live_names() -> None:
    name = ("hf", "mixtral_sharded")
    shown = meshload.open(case(*name) / "checkpoint").with_names("transformers")
    assert_same({n: np.asarray(a) for n, a in shown.items()}, golden(*name))
    back = shown.with_names("hf")
    assert_same({n: np.asarray(a) for n, a in back.items()}, mixtral_on_disk(golden(*name)))


def test_a_tied_name_answers_and_is_not_iterated() -> None:
    checkpoint = meshload.open(case("hf", "qwen2_tied_single") / "checkpoint")
    assert "lm_head.weight" not in list(checkpoint)
    shown = checkpoint.with_names("hf")
    assert "lm_head.weight" in shown
    assert "lm_head.weight" not in list(shown)
    assert shown.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert same_bits(shown["lm_head.weight"], golden("hf", "qwen2_tied_single")["lm_head.weight"])


def test_a_naming_that_is_not_there_is_refused_with_those_that_are() -> None:
    checkpoint = meshload.open(case("hf", "llama_gqa_sharded_bf16") / "checkpoint")
    with pytest.raises(meshload.LayoutError, match=r"no naming 'megatron2'.*hf, .*native"):
        checkpoint.with_names("megatron2")


# --- Orbax, through MaxText's table -----------------------------------------------------------------------------------

MAXTEXT = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
ORBAX = [
    ("standard_1dev", 4, False),
    ("pytree_8dev_zarr2_files", 4, False),
    ("pytree_8dev_zarr3_ocdbt", 4, True),
    ("two_processes_4dev_adamw", 2, False),
    ("manager_8dev_adamw", 2, False),
]


def hf_of_maxtext(
    tree: Mapping[str, Values], layers: int, scanned: bool, family: str, pairs: bool, power: int = 0
) -> dict[str, Values]:
    """Return Hugging Face's arrays; `power` is that of sqrt(head_dim) by which moments scale: -1 and -2."""
    root = "params." if any(n.startswith("params.") for n in tree) else ""

    def heads(w: Values) -> Values:
        if pairs:  # adjacent pairs of a head become its two halves
            w = np.concatenate([w[..., 0::2], w[..., 1::2]], axis=-1)
        return w.reshape(w.shape[0], -1).T

    def q(w: Values) -> Values:
        if family == "llama":
            factor = np.float32(math.sqrt(w.shape[-1]) ** (power or 1))
            w = (w.astype(np.float32) * factor).astype(w.dtype)
        return heads(w)

    found = {
        "model.embed_tokens.weight": tree[root + "token_embedder.embedding"],
        "model.norm.weight": tree[root + "decoder.decoder_norm.scale"],
        "lm_head.weight": tree[root + "decoder.logits_dense.kernel"].T,
    }
    for i in range(layers):

        def at(leaf: str, layer: int = i) -> Values:
            if scanned:
                return tree[f"{root}decoder.layers.{leaf}"].take(layer, axis=1)
            return tree[f"{root}decoder.layers_{layer}.{leaf}"]

        name = f"model.layers.{i}."
        found |= {
            name + "input_layernorm.weight": at("pre_self_attention_layer_norm.scale"),
            name + "post_attention_layernorm.weight": at("post_self_attention_layer_norm.scale"),
            name + "self_attn.q_proj.weight": q(at("self_attention.query.kernel")),
            name + "self_attn.k_proj.weight": heads(at("self_attention.key.kernel")),
            name + "self_attn.v_proj.weight": at("self_attention.value.kernel").reshape(32, -1).T,
            name + "self_attn.o_proj.weight": at("self_attention.out.kernel").reshape(-1, 32).T,
            name + "mlp.gate_proj.weight": at("mlp.wi_0.kernel").T,
            name + "mlp.up_proj.weight": at("mlp.wi_1.kernel").T,
            name + "mlp.down_proj.weight": at("mlp.wo.kernel").T,
        }
    return {n: np.ascontiguousarray(w) for n, w in found.items()}


def weights(tree: Mapping[str, Values], prefix: str = "params.") -> dict[str, Values]:
    return {n: w for n, w in tree.items() if n.startswith(prefix)}


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2, "tp": 2}, {"tp": 4}], ids=str)
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(("name", "layers", "scanned"), ORBAX)
def test_maxtext_llama_as_ranks(name: str, layers: int, scanned: bool, pairs: bool, mesh: dict[str, int]) -> None:
    config = {**MAXTEXT, "num_hidden_layers": layers, "rope_type": "llama3.1" if pairs else "default"}
    wanted = hf_of_maxtext(weights(golden("orbax", name)), layers, scanned, "llama", pairs)
    checkpoint = meshload.open(case("orbax", name) / "checkpoint", config=config)
    for rank in range(math.prod(mesh.values())):
        found = meshload.restore(checkpoint, mesh=mesh, rank=rank, into="numpy")
        assert_same(found, expected(wanted, config, mesh, rank))


def test_maxtext_llama_without_its_rotary_order_asks() -> None:
    config = {**MAXTEXT, "num_hidden_layers": 4}
    with pytest.raises(meshload.LayoutError, match="rope"):
        meshload.restore(case("orbax", "standard_1dev") / "checkpoint", config=config, into="numpy")


@pytest.mark.parametrize(("name", "layers", "scanned"), ORBAX[:3])
def test_maxtext_without_a_scale_of_queries_as_ranks(name: str, layers: int, scanned: bool) -> None:
    config = {**MAXTEXT, "model_type": "qwen3", "num_hidden_layers": layers}
    wanted = hf_of_maxtext(weights(golden("orbax", name)), layers, scanned, "qwen3", pairs=False)
    checkpoint = meshload.open(case("orbax", name) / "checkpoint", config=config)
    for rank in range(2):
        # the trees have no norms of heads
        found = meshload.restore(checkpoint, mesh="tp=2", rank=rank, into="numpy", exclude=["*.q_norm.weight", "*.k_norm.weight"])
        assert_same(found, expected(wanted, config, {"tp": 2}, rank))


@pytest.mark.parametrize("name", ["two_processes_4dev_adamw", "manager_8dev_adamw"])
@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2}], ids=str)
def test_moments_are_cut_like_their_weights_and_scale_inversely(name: str, mesh: dict[str, int]) -> None:
    tree, layers = golden("orbax", name), 2
    config = {**MAXTEXT, "num_hidden_layers": layers, "rope_type": "llama3.1"}
    all_wanted = hf_of_maxtext(weights(tree), layers, False, "llama", True)
    moments = {}
    for kind, field, power in (("exp_avg", "mu", -1), ("exp_avg_sq", "nu", -2)):
        inner = {n.removeprefix(f"opt_state.0.{field}."): w for n, w in tree.items() if n.startswith(f"opt_state.0.{field}.")}
        moments[kind] = hf_of_maxtext(inner, layers, False, "llama", True, power)
    checkpoint = meshload.open(case("orbax", name) / "checkpoint", config=config)
    for rank in range(math.prod(mesh.values())):
        found = meshload.restore(checkpoint, mesh=mesh, rank=rank, into="numpy", optimizer=True)
        wanted = expected(all_wanted, config, mesh, rank)
        for kind, arrays in moments.items():
            cut = expected(arrays, config, mesh, rank)
            wanted |= {f"optimizer.{kind}.{n}": w for n, w in cut.items()}
        assert sorted(found) == sorted(wanted)
        for n, w in wanted.items():
            if "q_proj" in n and n.startswith("optimizer"):
                assert np.allclose(found[n], w, rtol=1e-6, atol=0), n  # the power of sqrt(8) is rounded here as there
            else:
                assert same_bits(found[n], w), n


def test_moments_that_are_not_there_are_missing() -> None:
    with pytest.raises(meshload.MissingArray, match="holds no optimizer state; leave out optimizer=True"):
        meshload.restore(case("hf", "llama_gqa_sharded_bf16") / "checkpoint", optimizer=True, into="numpy")


# --- arguments --------------------------------------------------------------------------------------------------------

TOY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}


def toy(dtype: Any = np.float32) -> dict[str, Values]:
    return {name: ramp(name, shape, dtype) for name, shape in llama_shapes(TOY).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "toy", toy(), TOY)


def restored(path: Any, **options: Any) -> dict[str, Values]:
    found: dict[str, Values] = meshload.restore(path, into="numpy", **options)
    return found


def test_without_a_mesh_one_rank_holds_all(folder: Path) -> None:
    assert_same(restored(folder), toy())


def test_a_mesh_is_text_dict_or_mesh(folder: Path) -> None:
    for mesh in ("tp=2", {"tp": 2}, meshload.Mesh(("tp",), (2,))):
        assert_same(restored(folder, mesh=mesh, rank=1), expected(toy(), TOY, {"tp": 2}, 1))


def test_names_without_sizes_are_one_rank_in_a_single_process(folder: Path) -> None:
    assert_same(restored(folder, mesh=("pp", "tp", "dp")), toy())
    made = meshload.plan(folder, mesh=("pp", "tp", "dp"), into="numpy")
    assert any("pp=1,tp=1,dp=1" in note and "single process" in note for note in made.notes)


def test_the_launcher_says_which_rank_this_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert_same(restored(folder, mesh=("pp", "tp")), expected(toy(), TOY, {"pp": 2, "tp": 2}, 3))
    assert_same(restored(folder, mesh="tp=4"), expected(toy(), TOY, {"tp": 4}, 3))
    with pytest.raises(meshload.LayoutError, match="mesh tp=2 has 2 ranks, 4 processes run"):
        restored(folder, mesh="tp=2")


def test_a_mesh_of_several_ranks_needs_a_rank(folder: Path) -> None:
    with pytest.raises(
        meshload.LayoutError, match="mesh tp=2 has 2 ranks and no group of processes runs here; say which with rank="
    ):
        restored(folder, mesh="tp=2")


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_outside_the_mesh_is_refused(folder: Path, rank: int) -> None:
    with pytest.raises(meshload.LayoutError, match=f"rank {rank} is not in mesh tp=2, which has 2 ranks"):
        restored(folder, mesh="tp=2", rank=rank)


@pytest.mark.parametrize("rank", ["0", True, 1.0])
def test_a_rank_that_is_no_number_is_refused(folder: Path, rank: Any) -> None:
    with pytest.raises(meshload.LayoutError, match="a number"):
        restored(folder, mesh="tp=2", rank=rank)


def test_a_mesh_that_is_none_is_refused(folder: Path) -> None:
    for mesh in (7, [1, 2], "tp=x"):
        with pytest.raises(meshload.LayoutError, match="mesh"):
            restored(folder, mesh=mesh, rank=0)


def test_include_and_exclude_are_globs(folder: Path) -> None:
    kept = {n: w for n, w in toy().items() if ".layers.1." in n and "norm" not in n}
    assert_same(restored(folder, include="model.layers.1.*", exclude="*norm*"), kept)
    assert_same(
        restored(folder, include=["lm_head.*", "*.norm.weight"]), {n: toy()[n] for n in ("lm_head.weight", "model.norm.weight")}
    )
    assert restored(folder, include=[]) == {}


def test_what_is_excluded_is_not_read(folder: Path) -> None:
    checkpoint, log = counted(meshload.open(folder))
    found = restored(checkpoint, include="model.norm.weight")
    assert log.nbytes == found["model.norm.weight"].nbytes


def test_floating_arrays_are_cast_and_integers_are_not(tmp_path: Path) -> None:
    arrays = {"w": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), "ids": ramp("ids", (4,), np.int64)}
    path = write_checkpoint(tmp_path, arrays)
    for dtype in ("bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        found = restored(path, dtype=dtype)
        assert same_bits(found["w"], arrays["w"].astype(ml_dtypes.bfloat16))
        assert same_bits(found["ids"], arrays["ids"])
    assert restored(path, dtype="fp16")["w"].dtype == np.float16


@pytest.mark.parametrize("dtype", ["int8", "nonsense", np.int32])
def test_a_cast_to_no_floating_dtype_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(meshload.LayoutError, match="dtype="):
        restored(folder, dtype=dtype)


def test_missing_is_an_error_or_ignored(tmp_path: Path) -> None:
    arrays = toy()
    del arrays["model.layers.1.mlp.up_proj.weight"], arrays["model.norm.weight"]
    path = write_checkpoint(tmp_path, arrays, TOY)
    with pytest.raises(meshload.MissingArray, match=r"model.layers.1.mlp.up_proj.weight, model.norm.weight: .*never lists"):
        restored(path)
    assert_same(restored(path, missing="ignore"), arrays)
    assert meshload.plan(path, missing="ignore").missing == ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")


def test_what_one_stage_lacks_another_does_not_miss(tmp_path: Path) -> None:
    arrays = toy()
    del arrays["model.norm.weight"]
    path = write_checkpoint(tmp_path, arrays, TOY)
    assert_same(restored(path, mesh="pp=2", rank=0), expected(arrays, TOY, {"pp": 2}, 0))
    with pytest.raises(meshload.MissingArray, match=r"model.norm.weight: .*\(wanted by rank 1\)"):
        restored(path, mesh="pp=2", rank=1)


def test_unexpected_names_are_one_warning_and_stand_in_the_plan(tmp_path: Path) -> None:
    arrays = {**toy(), "vision.weight": ramp("v", (3,)), "extra": ramp("e", (2,))}
    path = write_checkpoint(tmp_path, arrays, TOY)
    with pytest.warns(meshload.MeshloadWarning, match=r"2 arrays .* nothing that is wanted: .*vision.weight") as caught:
        found = restored(path)
    assert len(caught) == 1
    assert_same(found, toy())
    assert sorted(meshload.plan(path).unexpected) == ["extra", "vision.weight"]
    assert restored(path, exclude=["vision.*", "extra"]).keys() == toy().keys()


def test_buffers_that_a_model_computes_are_neither_wanted_nor_unexpected(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {**toy(), "model.layers.0.self_attn.rotary_emb.inv_freq": ramp("i", (2,))}, TOY)
    assert_same(restored(path), toy())


def test_names_may_be_native(folder: Path) -> None:
    assert_same(restored(folder, names="native", mesh="tp=2", rank=0), expected(toy(), TOY, {"tp": 2}, 0))


def test_live_names_are_those_of_the_disk_where_no_table_says_otherwise(folder: Path) -> None:
    assert_same(restored(folder, names="transformers"), toy())
    assert set(meshload.open(folder).with_names("transformers")) == set(toy())


def test_a_naming_without_a_table_is_refused(folder: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="no flexgen table for model_type 'llama'"):
        restored(folder, names="flexgen")


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_a_layout_of_ones_own_says_what_is_cut(folder: Path) -> None:
    found = restored(folder, mesh="x=2,y=3", rank=4, layout=Layout({"ffn": "y", "vocab": "x"}))
    wanted = dict(toy())
    for n, w in toy().items():
        if "gate_proj" in n or "up_proj" in n:
            wanted[n] = w[8:16]
        if "down_proj" in n:
            wanted[n] = np.ascontiguousarray(w[:, 8:16])
        if "embed_tokens" in n or "lm_head" in n:
            wanted[n] = w[7:13]
    assert_same(found, wanted)


def test_embed_may_be_cut(folder: Path) -> None:
    found = restored(folder, mesh="dp=2", rank=1, layout=Layout({"embed": "dp"}))
    for n, w in toy().items():
        if "down_proj" in n or "o_proj" in n or w.ndim == 1:
            assert same_bits(found[n], w[8:]), n
        else:
            assert same_bits(found[n], np.ascontiguousarray(w[:, 8:])), n


def test_replicated_is_everything_on_each_rank(folder: Path) -> None:
    assert_same(restored(folder, mesh="pp=2,tp=2", rank=3, layout="replicated"), toy())


def test_name_patterns_mean_the_rows_as_they_are_shown(folder: Path) -> None:
    layout = {"*.o_proj.weight": (None, "tp"), "*_proj.weight": (("tp",),), "*": ()}
    found = restored(folder, mesh="tp=2", rank=1, layout=layout)
    for n, w in toy().items():
        if "o_proj" in n:
            assert same_bits(found[n], np.ascontiguousarray(w[:, 8:])), n
        elif "_proj" in n:
            assert same_bits(found[n], w[by_ceil(w.shape[0], 2, 1)]), n
        else:
            assert same_bits(found[n], w), n


def test_a_name_that_no_pattern_matches_is_refused(folder: Path) -> None:
    with pytest.raises(meshload.LayoutError, match=r"model.embed_tokens.weight: no pattern of the layout matches"):
        restored(folder, mesh="tp=2", rank=0, layout={"*_proj.weight": ("tp",)})


@pytest.mark.parametrize("layout", [{"*": "tp"}, {"*": ("tp", None, None)}])
def test_a_pattern_with_wrong_dims_is_refused(folder: Path, layout: Any) -> None:
    with pytest.raises(meshload.LayoutError, match="one entry per dim was expected"):
        restored(folder, mesh="tp=2", rank=0, layout=layout)


def test_a_layout_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="layout='megatron': 'replicated', a Layout or a dict of name patterns"):
        restored(folder, mesh="tp=2", rank=0, layout="megatron")


def test_stages_of_ones_own(folder: Path) -> None:
    layout = Layout.default(stages=(0, 2))
    first = restored(folder, mesh="pp=2", rank=0, layout=layout)
    assert list(first) == ["model.embed_tokens.weight"]
    assert set(restored(folder, mesh="pp=2", rank=1, layout=layout)) == set(toy()) - set(first)


# --- families that have no table --------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing_is_told(folder: Path) -> None:
    with pytest.warns(meshload.MeshloadWarning, match=r"layout=: '\*\.oproj\.weight' matches no name"):
        meshload.restore(folder, mesh="tp=2", rank=0, into="numpy", layout={"*.oproj.weight": (None, "tp"), "*": ()})


@pytest.mark.parametrize("word", ["include", "exclude"])
def test_a_choice_that_matches_nothing_is_told(folder: Path, word: str) -> None:
    globs: Any = {word: ["*.norm.weight", "*.nrom.weight"]}
    with pytest.warns(meshload.MeshloadWarning, match=rf"{word}=: '\*\.nrom\.weight' matches no name; there are "):
        found = meshload.restore(folder, mesh="tp=2", rank=0, **globs)
    assert ("model.norm.weight" in found) == (word == "include")


def test_messages_say_what_there_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match=r"sizes, as in 'pp=2,tp=4'"):
        meshload.restore(folder, mesh="tp:2", rank=0)
    with pytest.raises(meshload.LayoutError, match=r"there is no naming 'hff'; there are native, stored, .*transformers"):
        meshload.restore(folder, mesh="tp=2", rank=0, names="hff")
    with pytest.raises(meshload.LayoutError, match="make `like` of the checkpoint's sizes"):
        meshload.restore(folder, like={"model.norm.weight": np.zeros(3, np.float32)})
    with pytest.raises(meshload.FormatError, match=r"id of the Hugging Face Hub is fetched first"):
        meshload.open("some-one/A-model-7b")
    other = write_checkpoint(tmp_path / "a", {"w": np.zeros(2, np.float32)})
    with pytest.raises(meshload.MissingArray, match=r"it holds w, which config= \(the model's config.json\) may show"):
        meshload.restore(other, like={"v": np.zeros(2, np.float32)})
    assert repr(meshload.plan(folder, mesh="tp=2", rank=0)).startswith("Plan(")


def test_a_rank_that_holds_nothing_of_a_weight_is_told(folder: Path) -> None:
    with pytest.warns(meshload.MeshloadWarning, match=r"some ranks hold nothing of .*q_proj.*fewer parts"):
        found = meshload.restore(folder, mesh="tp=8", rank=7, into="numpy")
    assert found["model.layers.0.self_attn.q_proj.weight"].shape[0] == 0


def test_an_unknown_family_tells_how_to_give_a_layout(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, toy(), {**TOY, "model_type": "llamba"})
    with pytest.raises(
        meshload.LayoutError, match=r"model_type 'llamba'.*layout='replicated'.*layout=\{'\*.o_proj.weight': \(None, 'tp'\)"
    ):
        restored(path, mesh="tp=2", rank=0)
    assert_same(restored(path), toy())
    assert_same(restored(path, mesh="tp=2", rank=1, layout="replicated"), toy())
    found = restored(path, mesh="tp=2", rank=1, layout={"*.down_proj.weight": (None, "tp"), "*": ()})
    assert same_bits(
        found["model.layers.0.mlp.down_proj.weight"], np.ascontiguousarray(toy()["model.layers.0.mlp.down_proj.weight"][:, 12:])
    )


def test_without_a_config_the_message_asks_for_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, toy())
    with pytest.raises(meshload.LayoutError, match=r"no config.json beside the arrays.*give it with config="):
        restored(path, mesh="tp=2", rank=0)
    assert_same(restored(path, mesh="tp=2", rank=1, config=TOY), expected(toy(), TOY, {"tp": 2}, 1))


# --- config -----------------------------------------------------------------------------------------------------------


def test_config_is_a_dict_a_file_or_a_folder(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "weights", toy())
    (tmp_path / "config.json").write_text(json.dumps(TOY))
    for config in (TOY, tmp_path / "config.json", str(tmp_path)):
        assert_same(restored(path, mesh="tp=2", rank=1, config=config), expected(toy(), TOY, {"tp": 2}, 1))


def test_config_completes_what_the_checkpoint_leaves_out(tmp_path: Path) -> None:
    bare = {k: v for k, v in TOY.items() if k != "num_key_value_heads"}
    path = write_checkpoint(tmp_path, toy(), bare)
    with pytest.raises(meshload.LayoutError, match=r"k_proj.weight: its shape is \(8, 16\); llama's config gives \(16, 16\)"):
        restored(path)
    assert_same(restored(path, config={"num_key_value_heads": 2}), toy())


def test_a_config_that_contradicts_is_refused_with_both_values(folder: Path) -> None:
    with pytest.raises(meshload.LayoutError, match=r"contradicts.*num_attention_heads is 4 and 8"):
        restored(folder, config={"num_attention_heads": 8})


def test_a_config_that_does_not_fit_the_shapes_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, toy(), {**TOY, "intermediate_size": 25})
    with pytest.raises(
        meshload.LayoutError, match=r"its shape is \(\d+, \d+\); llama's config gives \((25, 16|16, 25)\).*one of the two is wrong"
    ):
        restored(path)


def test_layers_beyond_the_config_are_unexpected(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, toy(), {**TOY, "num_hidden_layers": 1})
    with pytest.warns(meshload.MeshloadWarning, match="9 arrays .*model.layers.1.input_layernorm.weight"):
        found = restored(path)
    assert_same(found, {n: w for n, w in toy().items() if ".layers.1." not in n})


# --- wrappers, B83, B42 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "module._orig_mod.", "module.module.", "_forward_module.", "module."])
def test_b83_known_wrappers_are_stripped(tmp_path: Path, prefix: str) -> None:
    path = write_checkpoint(tmp_path, {prefix + n: w for n, w in toy().items()}, TOY)
    checkpoint = meshload.open(path)
    assert checkpoint.meta["stripped"][prefix + "model.norm.weight"] == "model.norm.weight"
    assert_same(restored(checkpoint, mesh="tp=2", rank=1), expected(toy(), TOY, {"tp": 2}, 1))
    assert set(checkpoint.with_names("stored")) == {prefix + n for n in toy()}


def test_b83_a_layer_that_is_called_module_stays(tmp_path: Path) -> None:
    arrays = {"module.a.weight": ramp("a", (2,)), "b.module.weight": ramp("b", (2,)), "c._orig_mod.weight": ramp("c", (2,))}
    checkpoint = meshload.open(write_checkpoint(tmp_path, arrays))
    assert list(checkpoint) == ["module.a.weight", "b.module.weight", "c.weight"]
    assert checkpoint.meta["stripped"] == {"c._orig_mod.weight": "c.weight"}
    assert "stripped" not in meshload.open(write_checkpoint(tmp_path / "2", {"b.module.weight": ramp("b", (2,))})).meta


def test_b83_a_transformer_prefix_may_be_there_or_not(tmp_path: Path) -> None:
    bare = {n.removeprefix("model."): w for n, w in toy().items()}
    found = restored(write_checkpoint(tmp_path, bare, TOY), mesh="tp=2", rank=1)
    assert_same(found, expected(toy(), TOY, {"tp": 2}, 1))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bloom", "falcon", "llama"])
def test_names_under_the_key_model_are_those_of_the_family(tmp_path: Path, family: str) -> None:
    """As DCP has them of `{"model": model.state_dict()}`."""
    config = {"model_type": family, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 6}
    config |= {"intermediate_size": 12, "n_positions": 5, "tie_word_embeddings": False}
    model = model_of("hf", config)
    assert model is not None
    arrays = {name: ramp(name, model.whole_shape(line)) for name, line, _ in model.arrays()}
    found = restored(write_checkpoint(tmp_path, {f"model.{n}": a for n, a in arrays.items()}, config))
    assert_same(found, arrays)


def test_b42_two_spellings_of_one_name_are_refused(tmp_path: Path) -> None:
    arrays = {"a.wq.weight": ramp("a", (2,)), "a._orig_mod.wq.weight": ramp("b", (2,))}
    with pytest.raises(meshload.LayoutError, match=r"a.wq.weight and a._orig_mod.wq.weight are both a.wq.weight"):
        meshload.open(write_checkpoint(tmp_path, arrays))


def test_two_spellings_with_and_without_a_prefix_are_refused(tmp_path: Path) -> None:
    arrays = {**toy(), "norm.weight": ramp("n", (16,))}
    with pytest.raises(meshload.LayoutError, match=r"are the same array of the model: model.norm.weight"):
        restored(write_checkpoint(tmp_path, arrays, TOY))


def test_b33_a_plan_shows_what_a_cast_costs() -> None:
    path = Path(__file__).parent / "golden" / "hf" / "llama_gqa_sharded_bf16" / "checkpoint"
    plain = meshload.plan(path, mesh="tp=2", rank=0)
    cast = meshload.plan(path, mesh="tp=2", rank=0, dtype="float32")
    assert not any("cast" in note for note in plain.notes)
    count = len(plain.targets)
    text = f"dtype=float32: {count} arrays are cast, and take {2 * plain.result_bytes} bytes in place of {plain.result_bytes}"
    assert text in cast.notes


def test_a_config_beside_serves_a_format_that_has_none(tmp_path: Path) -> None:
    source = Path(__file__).parent / "golden" / "hf" / "llama_gqa_sharded_bf16" / "checkpoint"
    meshload.convert(source, tmp_path / "out", to="megatron", mesh="tp=2")
    assert set(meshload.open(tmp_path / "out").with_names("hf")) == set(meshload.open(source))
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.warns(meshload.MeshloadWarning, match="of another model"):
        found = meshload.open(tmp_path / "out")
    with pytest.raises(meshload.LayoutError):
        found.with_names("hf")
