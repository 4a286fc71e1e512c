"""What is written for DeepSpeed's engine of a chosen topology: each rank's file, and that all together are what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Checkpoint, Layout
from meshload.loading import with_views
from meshload.naming import model_of
from meshload.testing import ramp, same_bits, write_checkpoint
from meshload_adapters._torch_file import TorchFile
from meshload_adapters.formats.deepspeed import DeepSpeed

_USUAL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 12, "vocab_size": 26}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_USUAL, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", **_USUAL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **_USUAL, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False},
    "gpt_neox": {"model_type": "gpt_neox", **_USUAL, "tie_word_embeddings": False},
    "opt": {
        "model_type": "opt",
        **{k: v for k, v in _USUAL.items() if k != "intermediate_size"},
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 10,
        "do_layer_norm_before": True,
        "tie_word_embeddings": True,
    },
}
COPIES = {"*.dense.bias": None, "*.linear2.bias": None}
"""What GPT-NeoX has without `gpt_j_residual`."""
GOLDEN = Path(__file__).parent / "golden/deepspeed"
KINDS = ("master", "exp_avg", "exp_avg_sq")
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"lr": 0.2, "betas": (0.9, 0.95), "weight_decay": 0.0}]


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    model = model_of("hf", CONFIGS[family])
    assert model is not None
    return {name: model.whole_shape(line) for name, line, _ in model.arrays() if name not in model.ties}


def source(folder: Path, family: str, dtype: Any = np.float32) -> Path:
    """Write a Hugging Face checkpoint whose values tell their places."""
    arrays = {name: ramp(name, shape, np.dtype(dtype)) for name, shape in shapes_of(family).items()}
    return write_checkpoint(folder, arrays, CONFIGS[family])


def trained(folder: Path, family: str, dtype: Any = np.float32, names: str = "hf") -> Checkpoint:
    """Return a checkpoint with masters, moments of step 7, and two groups: matrices, and vectors without decay."""
    weights = meshload.open(source(folder / "weights", family, dtype))
    moments = {}
    for kind in KINDS:
        arrays = {name: ramp(f"{kind}/{name}", shape, np.dtype(np.float32)) for name, shape in shapes_of(family).items()}
        held = meshload.open(write_checkpoint(folder / kind, arrays))
        moments[kind] = dict(held.arrays)
    made = with_views(replace(weights, optimizer=moments, names="native")).with_names(names)
    ordered = (
        sorted(made, key=lambda n: -1 if n.startswith("tied") else int(n.split(".")[0])) if names == "gpt_neox" else list(made)
    )
    groups = [[n for n in ordered if (made[n].ndim > 1) is is_matrix] for is_matrix in (True, False)]
    return replace(made, meta={**made.meta, "groups": groups, "optimizer": {"step": 7, "param_groups": GROUPS}})


def stored(path: Path, tag: str = "global_step7") -> Mapping[str, Any]:
    """Return every tensor of every file, by the file's name and its path in it."""
    return meshload.open(path / tag, format="deepspeed").with_names("stored")


def root_of(file: Path) -> Any:
    from meshload.source import LocalFolder

    return TorchFile.open(LocalFolder(file.parent).file(file.name)).root


def differing(one: Checkpoint, other: Checkpoint, kinds: Sequence[str] = KINDS) -> list[str]:
    """Return the names of which two checkpoints have other bits, in weights or in a kind of the optimizer's arrays."""
    assert sorted(one.arrays) == sorted(other.arrays)
    found = [n for n, a in one.arrays.items() if not same_bits(other.arrays[n], a)]
    for kind in kinds:
        assert sorted(one.optimizer[kind]) == sorted(other.optimizer[kind])
        found += [f"{kind} {n}" for n, a in one.optimizer[kind].items() if not same_bits(other.optimizer[kind][n], a)]
    return found


@pytest.mark.parametrize(
    ("family", "stage", "meshes"),
    [
        ("llama", 3, ("dp=3", "tp=2,dp=2")),
        ("llama", 1, ("tp=2,dp=2", "dp=4")),
        ("gpt_neox", 2, ("tp=4,dp=2", "tp=2,dp=3")),
        ("gpt_neox", 3, ("tp=2", "dp=5")),
    ],
)
def test_weights_masters_and_moments_come_back_from_any_topology(
    tmp_path: Path, family: str, stage: int, meshes: Sequence[str]
) -> None:
    src = trained(tmp_path / "src", family) if "tp=4" not in meshes[0] else even(tmp_path / "src", family)
    src = replace(src, arrays={n: replace(a, name=n) for n, a in src.optimizer["master"].items()}) if stage == 3 else src
    for i, mesh in enumerate(meshes):
        made = meshload.open(tmp_path / str(i - 1)) if i else src
        meshload.convert(made, tmp_path / str(i), to=DeepSpeed(stage=stage), mesh=mesh, optimizer=True)
        back = meshload.open(tmp_path / str(i))
        assert back.problems == ()
        assert differing(src, back) == []
        assert back.meta["optimizer"]["step"] == back.meta["step"] == 7
        assert back.meta["optimizer"]["param_groups"] == GROUPS
        assert back.meta["groups"] == src.meta["groups"]
        sizes = dict(word.split("=") for word in mesh.split(","))
        assert back.meta["ranks"] == {"pp": 1, "tp": int(sizes.get("tp", 1)), "dp": int(sizes.get("dp", 1))}


def even(folder: Path, family: str) -> Checkpoint:
    """Return a checkpoint whose vocabulary four ranks can share."""
    before = CONFIGS[family]
    CONFIGS[family] = {**before, "vocab_size": 28}
    try:
        return trained(folder, family)
    finally:
        CONFIGS[family] = before


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_of_zero3_has_its_part_of_each_parameter(tmp_path: Path, ranks: int) -> None:
    src = trained(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=3), mesh={"dp": ranks}, optimizer=True)
    files = stored(tmp_path / "out")
    for rank in range(ranks):
        file = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.optimizer_state_dict"
        for g, names in enumerate(src.meta["groups"]):
            for kind in KINDS:
                parts = []
                for name in names:
                    whole = np.asarray(src.optimizer[kind][name]).reshape(-1)
                    part = -(-whole.size // ranks)
                    parts.append(np.resize(np.concatenate([whole, np.zeros(ranks * part - whole.size, np.float32)]), ranks * part))
                    parts[-1] = parts[-1][rank * part : (rank + 1) * part]
                key = f"fp32_flat_groups.{g}" if kind == "master" else f"optimizer_state_dict.state.{g}.{kind}"
                assert same_bits(files[f"{file}.{key}"], np.concatenate(parts))
        states = root_of(tmp_path / f"out/global_step7/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        assert [list(group) for group in states["param_shapes"]] == src.meta["groups"]
        assert {t.shape for t in states["module"].values()} == {(0,)}
        assert states["dp_world_size"] == ranks
        inner = root_of(tmp_path / f"out/global_step7/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        assert inner["partition_count"] == ranks
        assert [g["params"] for g in inner["optimizer_state_dict"]["param_groups"]] == [[0], [1]]
        assert (inner["loss_scaler"].name, inner["overflow"]) == ("LossScaler", False)


def test_zero3_begins_another_flat_tensor_where_a_group_reaches_the_size_of_a_sub_group(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=3, sub_group_size=256), mesh="dp=2", optimizer=True)
    states = root_of(tmp_path / "out/global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt")
    counts = [sum(np.prod(shape) // 2 for shape in group.values()) for group in states["param_shapes"]]
    last = {sum(len(g) for g in src.meta["groups"][: i + 1]) for i in range(2)}  # a group's last one may be smaller
    at = 0
    for group, count in zip(states["param_shapes"], counts, strict=True):
        at += len(group)
        *_, end = (np.prod(shape) // 2 for shape in group.values())
        assert count - end < 256
        assert count >= 256 or at in last
    assert len(counts) > 4
    back = meshload.open(tmp_path / "out")
    assert differing(replace(src, arrays=src.optimizer["master"]), back) == []
    assert back.meta["groups"] == src.meta["groups"]


def test_zero3_has_weights_in_its_masters_alone(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", "llama", ml_dtypes.bfloat16)
    meshload.convert(src, tmp_path / "masters", to=DeepSpeed(stage=3), mesh="dp=2", optimizer=True)
    meshload.convert(src, tmp_path / "weights", to=DeepSpeed(stage=3), mesh="dp=2")
    masters, weights = (meshload.open(tmp_path / name) for name in ("masters", "weights"))
    for name, array in src.items():
        assert same_bits(masters[name], src.optimizer["master"][name])
        assert same_bits(weights[name], np.asarray(array).astype(np.float32))
    assert (tmp_path / "masters/global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").exists()
    half = trained(tmp_path / "half", "llama", np.float16)
    with pytest.raises(meshload.LayoutError, match="float16 has a loss scale, which is told nowhere"):
        meshload.convert(half, tmp_path / "out", to=DeepSpeed(stage=3), mesh="dp=2")


def test_integers_are_in_the_model_states_of_each_rank_of_zero3(tmp_path: Path) -> None:
    arrays = {"a": ramp("a", (3, 5)), "positions": np.arange(7)}
    src = write_checkpoint(tmp_path / "src", arrays)
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=3, parameters=["a"]), mesh="dp=3", layout="replicated")
    files = stored(tmp_path / "out", "global_step0")
    for rank in range(3):
        assert same_bits(files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.module.positions"], arrays["positions"])
    assert meshload.open(tmp_path / "out").meta["buffers"] == ["positions"]


def test_frozen_weights_and_buffers_of_zero3_are_in_the_model_states_of_each_rank(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", "llama")
    frozen, buffer = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"
    rest = {k: {n: a for n, a in arrays.items() if n not in (frozen, buffer)} for k, arrays in src.optimizer.items()}
    groups = [[n for n in group if n not in (frozen, buffer)] for group in src.meta["groups"]]
    src = replace(src, optimizer=rest, meta={**src.meta, "groups": groups, "buffers": [buffer]})
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=3), mesh="dp=3", optimizer=True)
    back, files = meshload.open(tmp_path / "out"), stored(tmp_path / "out")
    assert same_bits(back[frozen], src[frozen])
    assert same_bits(back[buffer], src[buffer])
    whole = np.concatenate([np.asarray(src[frozen]).reshape(-1), np.zeros(2, np.float32)])
    for rank in range(3):
        states = f"zero_pp_rank_{rank}_mp_rank_00_model_states"
        assert same_bits(files[f"{states}.frozen_param_fragments.{frozen}"], whole[86 * rank : 86 * rank + 86])
        assert same_bits(files[f"{states}.module.{buffer}"], src[buffer])
    assert back.meta["buffers"] == [buffer]


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_ranks_have_their_slices_and_what_is_not_cut(tmp_path: Path, stage: int) -> None:
    src = trained(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=stage), mesh="dp=2,tp=2", optimizer=True)
    at = "model.layers.2."
    for t in range(2):
        mine = meshload.restore(src, mesh="tp=2", rank=t, into="numpy")
        prefix = "zero_pp_rank_1_" if stage == 3 else ""
        states = root_of(tmp_path / f"out/global_step7/{prefix}mp_rank_{t:02d}_model_states.pt")
        shapes = {n: tuple(s) for group in states["param_shapes"] for n, s in group.items()}
        assert shapes == {n: a.shape for n, a in mine.items()}
        assert shapes[f"{at}self_attn.o_proj.weight"] == (16, 8)
        assert (states["mp_world_size"], states["dp_world_size"]) == (2, 2)
        if stage == 1:
            files = stored(tmp_path / "out")
            wrong = [n for n, a in mine.items() if not same_bits(files[f"mp_rank_{t:02d}_model_states.module.{n}"], a)]
            assert wrong == []
    info = states["universal_checkpoint_info"]
    assert r"model\.layers\.[0-9]+\.mlp\.down_proj\.weight$" in info["parameter_with_row_parallelism_patterns"]
    assert r"model\.norm\.weight$" in info["tp_replicated_parameter_patterns"]


@pytest.mark.parametrize("mesh", ["pp=1,dp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=4,tp=2,dp=3"])
def test_pipelines_have_a_file_for_each_layer_and_a_partition_for_each_stage(tmp_path: Path, mesh: str) -> None:
    src = trained(tmp_path / "src", "gpt_neox", names="gpt_neox")
    to = DeepSpeed(stage=1, pipeline=True, cut=COPIES)
    meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, optimizer=True)
    back = meshload.open(tmp_path / "out", config=CONFIGS["gpt_neox"])
    assert back.problems == ()
    assert differing(src, back) == []
    assert back.meta["groups"] == src.meta["groups"]
    sizes = {"pp": 1, "tp": 1, "dp": 1} | {k: int(n) for k, n in (word.split("=") for word in mesh.split(","))}
    assert back.meta["ranks"] == sizes
    tag = tmp_path / "out/global_step7"
    layers = [0, *range(2, 6), 7, 8]
    expected = [f"layer_{n:02d}-model_{t:02d}-model_states.pt" for n in layers for t in range(sizes["tp"])]
    assert sorted(f.name for f in tag.glob("layer_*")) == expected
    for p in range(sizes["pp"]):
        states = root_of(tag / f"mp_rank_{p * sizes['tp']:02d}_model_states.pt")
        assert states["module"] is None
        numbers = {int(n.split(".")[0]) for group in states["param_shapes"] for n in group}
        count = 4 // sizes["pp"]
        first, last = [0] if p == 0 else [], [7, 8] if p == sizes["pp"] - 1 else []
        assert numbers == {*first, *range(2 + p * count, 2 + (p + 1) * count), *last}
    meshload.convert(tmp_path / "out", tmp_path / "back", to="hf", config=CONFIGS["gpt_neox"])
    found, hf = meshload.open(tmp_path / "back"), meshload.open(tmp_path / "src/weights")
    assert [n for n in hf if not same_bits(found[n], hf[n])] == []


def test_pipelines_are_read_and_written_with_other_stages(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", "gpt_neox", names="gpt_neox")
    for i, mesh in enumerate(("pp=2,dp=2", "pp=4,tp=2", "pp=1,dp=3")):
        made = meshload.open(tmp_path / str(i - 1), config=CONFIGS["gpt_neox"]) if i else src
        meshload.convert(made, tmp_path / str(i), to=DeepSpeed(stage=1, pipeline=True, cut=COPIES), mesh=mesh, optimizer=True)
    assert differing(src, meshload.open(tmp_path / "2")) == []
    uneven = DeepSpeed(stage=1, pipeline=True)
    meshload.convert(src, tmp_path / "3", to=uneven, mesh="pp=2", layout=Layout.default(stages=[3, 1]), optimizer=True)
    assert differing(src, meshload.open(tmp_path / "3")) == []
    states = root_of(tmp_path / "3/global_step7/mp_rank_01_model_states.pt")
    assert {n.split(".")[0] for group in states["param_shapes"] for n in group} == {"5", "7", "8"}


def test_a_tie_of_a_pipeline_is_written_where_its_layer_is_told(tmp_path: Path) -> None:
    golden = meshload.open(GOLDEN / "pp2-dp2-bf16opt-tied")
    assert golden.meta["tied"] == {"embed": 0}
    meshload.convert(
        golden, tmp_path / "out", to=DeepSpeed(stage=1, pipeline=True), mesh="dp=3", layout="replicated", optimizer=True
    )
    back = meshload.open(tmp_path / "out")
    assert back.problems == ()
    assert differing(golden, back) == []
    assert back.meta["groups"] == golden.meta["groups"]
    assert back.meta["groups"][0][0].startswith("tied_modules.embed.")
    untold = replace(golden, meta={**golden.meta, "tied": {}})
    with pytest.raises(
        meshload.LayoutError, match=r"tied_modules.embed.weight: which layer's file is to hold it\? say it with DeepSpeed\(tied="
    ):
        meshload.convert(untold, tmp_path / "not", to=DeepSpeed(stage=1, pipeline=True), layout="replicated", mesh="dp=2")


def tied_neox(folder: Path) -> Checkpoint:
    """Return a GPT-NeoX whose head is its embedding, in its library's names."""
    CONFIGS["tied"] = {**CONFIGS["gpt_neox"], "tie_word_embeddings": True}
    return trained(folder, "tied", names="gpt_neox")


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=16", "pp=4,tp=2,dp=3", "pp=1,dp=5"])
def test_a_tie_over_stages_is_in_the_file_of_its_layer_and_in_the_partitions_of_each_stage_that_uses_it(
    tmp_path: Path, mesh: str
) -> None:
    src, tie = tied_neox(tmp_path / "src"), "tied_modules.embed.word_embeddings.weight"
    assert src.aliases == {"8.final_linear.weight": tie}
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=1, pipeline=True, cut=COPIES), mesh=mesh, optimizer=True)
    back = meshload.open(tmp_path / "out", config=CONFIGS["tied"])
    assert back.problems == ()
    assert differing(src, back) == []
    assert (back.meta["groups"], back.meta["tied"]) == (src.meta["groups"], {"embed": 0})
    assert meshload.check(tmp_path / "out", copies=True).ok
    ranks, tag = back.meta["ranks"], tmp_path / "out/global_step7"
    assert {f.name[:8] for f in tag.glob("layer_*")} == {f"layer_{n:02d}" for n in (0, 2, 3, 4, 5, 7)}
    files = stored(tmp_path / "out")
    for mp in range(ranks["pp"] * ranks["tp"]):
        (stage, t), rows = divmod(mp, ranks["tp"]), 26 // ranks["tp"]
        shapes = root_of(tag / f"mp_rank_{mp:02d}_model_states.pt")["param_shapes"][0]
        assert (next(iter(shapes)) == tie) is (stage in (0, ranks["pp"] - 1))
        if tie in shapes:
            key = f"_mp_rank_{mp:02d}_optim_states.optimizer_state_dict.single_partition_of_fp32_groups.0"
            flat = np.concatenate([np.asarray(files[f"zero_pp_rank_{d}{key}"]) for d in range(ranks["dp"])])
            master = np.asarray(src.optimizer["master"][tie])[t * rows : (t + 1) * rows]
            assert same_bits(flat[: master.size], master.reshape(-1))


def test_tensor_parallel_ranks_may_share_an_array_in_any_boxes(tmp_path: Path) -> None:
    src = trained(tmp_path / "src", "llama")  # 26 rows of the vocabulary, two kv heads
    for stage in (1, 3):
        out = tmp_path / str(stage)
        made = replace(src, arrays=src.optimizer["master"]) if stage == 3 else src
        meshload.convert(made, out, to=DeepSpeed(stage=stage), mesh="tp=4,dp=3", optimizer=True)
        assert differing(made, meshload.open(out)) == []
        assert meshload.check(out, copies=True).ok  # norms are cut otherwise by the last rank's partitions
    files, k = stored(tmp_path / "1"), "model.layers.1.self_attn.k_proj.weight"
    whole = np.asarray(src[k])
    for t in range(4):
        states = root_of(tmp_path / f"1/global_step7/mp_rank_{t:02d}_model_states.pt")
        assert same_bits(files[f"mp_rank_{t:02d}_model_states.module.{k}"], whole[4 * (t // 2) : 4 * (t // 2) + 4])
    maps = states["universal_checkpoint_info"]["affine_map"]["params"]
    told = maps[r"model\.layers\.[0-9]+\.self_attn\.k_proj\.weight$"]
    assert [told["ranks"][t]["pieces"][0]["locations"] for t in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert maps[r"lm_head\.weight$"]["ranks"][3] == {
        "shard_shape": [5, 16],
        "pieces": [{"shape": [5, 16], "source": [336, [16, 1]], "dest": [0, [16, 1]], "locations": [3]}],
    }


def test_experts_are_written_as_deepspeed_writes_them_and_come_back_from_other_ranks(tmp_path: Path) -> None:
    golden = GOLDEN / "moe-ep2-dp2-z2-fp32"
    src = meshload.open(golden)
    assert [n.split(".")[-3] for n in src.meta["groups"][1]] == list("000111222333")
    for i, mesh in enumerate(("dp=1,ep=2", "dp=2,ep=4", "dp=3,ep=1", "ep=2")):
        made = meshload.open(tmp_path / str(i - 1)) if i else src
        to = DeepSpeed(stage=2 - i % 2)
        meshload.convert(made, tmp_path / str(i), to=to, mesh=mesh, layout="replicated", optimizer=True)
        back = meshload.open(tmp_path / str(i))
        assert back.problems == ()
        assert differing(src, back) == []
        assert back.meta["groups"] == src.meta["groups"]
        experts = back.meta["optimizer"]["param_groups"][1]
        assert (experts["name"], experts["moe"]) == (f"ep_size_{mesh[-1]}", True)
    theirs, tag = golden / "global_step2", tmp_path / "0/global_step2"
    assert sorted(f.name for f in tag.iterdir()) == sorted(f.name for f in theirs.iterdir())
    expected = stored(golden, "global_step2")
    for out in (tmp_path / "0", tmp_path / "3"):
        found = stored(out, "global_step2")
        assert sorted(found) == sorted(expected)
        assert [n for n, a in expected.items() if not same_bits(found[n], a)] == []
    ours, its = (root_of(folder / "mp_rank_00_model_states.pt") for folder in (tag, theirs))
    assert [list(ours[k]) for k in ("param_shapes", "num_experts", "module")] == [
        list(its[k]) for k in ("param_shapes", "num_experts", "module")
    ]
    for rank in range(2):
        file = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        one, other = (root_of(folder / file)["optimizer_state_dict"] for folder in (tag, theirs))
        assert [(k, one[k]) for k in ("partition_count", "group_paddings", "param_alignment_paddings")] == [
            (k, other[k]) for k in ("partition_count", "group_paddings", "param_alignment_paddings")
        ]
        for mine, its in zip(one["param_slice_mappings"], other["param_slice_mappings"], strict=True):
            assert {n: f.state for n, f in mine.items()} == {n: f.state for n, f in its.items()}


def test_what_no_engine_could_have_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    llama, neox = trained(tmp_path / "llama", "llama"), trained(tmp_path / "neox", "gpt_neox")

    def refused(why: str, src: Checkpoint, to: DeepSpeed, mesh: str, **options: Any) -> None:
        with pytest.raises(meshload.LayoutError, match=why):
            meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, **options)

    refused("stages are those of a PipelineModule", llama, DeepSpeed(stage=1), "pp=2")
    refused("gpt_neox", llama, DeepSpeed(stage=1, pipeline=True), "pp=2")
    refused("a pipeline's arrays are called LAYER.KEY", llama, DeepSpeed(stage=1, pipeline=True), "pp=2", names="hf")
    shown = trained(tmp_path / "shown", "gpt_neox", names="gpt_neox")
    refused("engines of pipelines have stage 1", shown, DeepSpeed(stage=3, pipeline=True), "pp=2")
    beyond = r"embed_tokens.weight: the 16 ranks of tp hold .*\(2, 16\) at \(0, 0\).* of \(26, 16\)"  # its last ranks have none
    refused(beyond, llama, DeepSpeed(), "tp=16", layout=Layout({"vocab": "tp"}))
    refused("the layout cuts it over dp, which ZeRO itself does", neox, DeepSpeed(), "tp=2,dp=2", layout=Layout.default(dp="cut"))
    refused("ep=2: no array is an expert's of DeepSpeed's MoE", llama, DeepSpeed(parameters=list(llama)), "ep=2")
    refused("cp=2: only pp, tp, dp and ep", llama, DeepSpeed(), "cp=2")
    moe = meshload.open(GOLDEN / "moe-ep2-dp2-z2-fp32")
    refused("engines of stage 1 or 2 without a pipeline can have experts", moe, DeepSpeed(stage=3), "ep=2", layout="replicated")
    refused("are 4 experts, of which ranks have equal numbers", moe, DeepSpeed(), "ep=3", layout="replicated")
    refused("which cannot be written, and one of which all have copies without", shown, DeepSpeed(stage=1, pipeline=True), "tp=2")
    tied = trained(tmp_path / "qwen2", "qwen2")
    refused("gpt_neox", tied, DeepSpeed(stage=1, pipeline=True), "pp=2")
    assert not (tmp_path / "out").exists()


# --- cases of saving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_b15_a_tie_is_written_once_and_told(tmp_path: Path, stage: int) -> None:
    src = source(tmp_path / "src", "qwen2")
    meshload.convert(src, tmp_path / "out", to=DeepSpeed(stage=stage, parameters=list(shapes_of("qwen2"))), mesh="dp=2")
    prefix = "zero_pp_rank_{}_" if stage == 3 else ""
    states = [root_of(tmp_path / f"out/global_step0/{prefix.format(r)}mp_rank_00_model_states.pt") for r in range(2)]
    owner, alias = "model.embed_tokens.weight", "lm_head.weight"
    assert states[0]["shared_params"] == {alias: owner}
    assert states[0]["module"][alias].identity == states[0]["module"][owner].identity
    assert alias not in states[0]["param_shapes"][0]
    if stage == 3:
        assert states[1]["shared_params"] == {}


def test_b16_heads_that_ranks_repeat_are_written_for_each_and_others_once(tmp_path: Path) -> None:
    config = {**CONFIGS["llama"], "vocab_size": 28, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = model_of("hf", config)
    assert model is not None
    shapes = {name: model.whole_shape(line) for name, line, _ in model.arrays()}
    src = write_checkpoint(tmp_path / "src", {n: ramp(n, s) for n, s in shapes.items()}, config)
    to = DeepSpeed(stage=1, parameters=list(shapes))
    whole = np.asarray(meshload.open(src)["model.layers.1.self_attn.k_proj.weight"])
    for ranks in (8, 4):
        meshload.convert(src, tmp_path / str(ranks), to=to, mesh={"tp": ranks}, layout=Layout({"heads": "tp"}))
        found = stored(tmp_path / str(ranks), "global_step0")
        for t in range(ranks):
            shard, head = found[f"mp_rank_{t:02d}_model_states.module.model.layers.1.self_attn.k_proj.weight"], 4 * t // ranks
            assert same_bits(shard, whole[2 * head : 2 * head + 2])
        assert same_bits(meshload.open(tmp_path / str(ranks))["model.layers.1.self_attn.k_proj.weight"], whole)


def test_b51_nothing_is_there_until_all_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = source(tmp_path / "src", "llama")

    def broken(*_: Any, **__: Any) -> None:
        raise meshload.SourceError("the disk is gone")

    monkeypatch.setattr("meshload.converting.fill", broken)
    to = DeepSpeed(stage=3, parameters=list(shapes_of("llama")))
    with pytest.raises(meshload.SourceError, match="the disk is gone"):
        meshload.convert(src, tmp_path / "out", to=to, mesh="dp=2")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    meshload.convert(src, tmp_path / "out", to=to, mesh="dp=2", resume=True)
    assert (tmp_path / "out/latest").read_text() == "global_step0"
    assert meshload.open(tmp_path / "out").problems == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_b53_what_has_no_elements_is_not_the_optimizers_and_comes_back(tmp_path: Path, stage: int) -> None:
    arrays = {"a": ramp("a", (3, 5)), "n": np.zeros((2, 0), np.float32), "m": np.zeros((0, 4), np.float32), "s": np.float32(3.5)}
    arrays = {n: np.asarray(a) for n, a in arrays.items()}
    src = write_checkpoint(tmp_path / "src", arrays)
    to = DeepSpeed(stage=stage, parameters=list(arrays))
    meshload.convert(src, tmp_path / "out", to=to, mesh="dp=2", layout="replicated")
    back = meshload.open(tmp_path / "out")
    assert {n: same_bits(back[n], a) for n, a in arrays.items()} == dict.fromkeys(arrays, True)
    assert (back.meta["groups"], list(back.optimizer["master"])) == ([["a", "s"]], ["a", "s"])


def test_b55_live_tensors_that_are_not_contiguous_are_written_row_major(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {"turned": torch.arange(6.0).view(2, 3).t(), "expanded": torch.arange(3.0).expand(2, 3)}
    meshload.save(tmp_path / "out", tensors, to=DeepSpeed(stage=3, parameters=list(tensors)))
    back = meshload.open(tmp_path / "out")
    assert {n: np.asarray(a).tolist() for n, a in back.items()} == {n: t.tolist() for n, t in tensors.items()}
    flat = stored(tmp_path / "out", "global_step0")[
        "zero_pp_rank_0_mp_rank_00_optim_states.optimizer_state_dict.fp32_flat_groups.0"
    ]
    assert np.asarray(flat).tolist() == [0, 3, 1, 4, 2, 5, 0, 1, 2, 0, 1, 2]
