"""Megatron checkpoints, legacy and torch_dist, against what the running models held, and in the ways that hurt users."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import FormatError, Layout, MeshloadWarning
from meshload.errors import LayoutError, MissingPieces
from meshload.formats import installed
from meshload.pattern import find, parse, parse_table
from meshload.pieces import piece, union
from meshload.source import LocalFolder, open_folder
from meshload.testing import (
    CountedFolder,
    FormatSuite,
    InMemory,
    counted,
    ramp,
    read_safetensors,
    same_bits,
    write_checkpoint,
)
from meshload_adapters._distcp import read_listing
from meshload_adapters._megatron import config_of, layers_of
from meshload_adapters._megatron_buffers import buckets, laid_out, module_order, spelled_by
from meshload_adapters._megatron_shards import GATED, Fusion, Part, cut_runs, join_runs, taken_apart
from meshload_adapters.formats.megatron import Megatron
from meshload_adapters.formats.megatron_core import MegatronCore
from meshload_adapters.models import hf, megatron

GOLDEN = Path(__file__).resolve().parent / "golden" / "megatron"
SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "fixtures"

Values = Any
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

FAMILIES = {
    "legacy-tp2-dp2-bf16-distopt": "llama",
    "legacy-pp2-vp2-bf16-tied": "llama",
    "legacy-tp2-pp2-fp32": "llama",
    "legacy-ep2-fp32-moe": "mixtral",
    "td-tp2-dp2-fp32-distopt-dpre-qwen2": "qwen2",
    "td-ep2-fp32-moe": "mixtral",
    "td-tp2-pp2-fp32": "llama",
    "td-pp2-dp2-bf16-distopt-full": "llama",
    "td-tp2-dp2-bf16-distopt-modelspace": "llama",
    "td-tp2-pp2-fp32-nonhomogeneous-qwen3": "qwen3",
}
"""The fixtures: those kept here, and those that stand beside the project."""


def fixture(name: str) -> Path:
    found = next((at / name for at in (GOLDEN, SHARED / "megatron") if (at / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} stands beside the project only")
    return found


def golden(name: str, kind: str = "param") -> dict[str, Values]:
    found = read_safetensors(fixture(name) / "golden.safetensors")
    return {n.removeprefix(f"{kind}/"): v for n, v in found.items() if n.startswith(f"{kind}/")}


def restored(path: Any, **options: Any) -> dict[str, Values]:
    found: dict[str, Values] = meshload.restore(path, into="numpy", **options)
    return found


# --- what the frameworks wrote ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_is_equal_bit_for_bit(name: str) -> None:
    checkpoint = meshload.open(fixture(name))
    expected = golden(name)
    assert set(checkpoint) == set(expected)
    assert [n for n in expected if not same_bits(checkpoint[n], expected[n])] == []
    assert checkpoint.format == ("megatron" if name.startswith("legacy") else "megatron_core")
    assert (checkpoint.problems, dict(checkpoint.unavailable)) == ((), {})
    assert checkpoint.meta["iteration"] == 2


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "master"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_moment_is_equal_bit_for_bit(name: str, kind: str) -> None:
    optimizer = meshload.open(fixture(name)).optimizer
    expected = golden(name, "fp32" if kind == "master" else kind)
    if kind == "master" and not expected:  # the weights are the masters, and a distributed optimizer has them once more
        expected = golden(name) if "distopt" in name else {}
    found = optimizer.get(kind, {})
    assert set(found) == set(expected)
    assert [n for n in expected if not same_bits(found[n], expected[n])] == []


@pytest.mark.parametrize("name", [n for n in FAMILIES if "tied" in n or "distopt" in n or "qwen2" in n])
def test_a_tied_head_is_an_alias(name: str) -> None:
    checkpoint = meshload.open(fixture(name))
    tied = HEAD not in golden(name)
    assert (dict(checkpoint.aliases) == {HEAD: EMBEDDING}) == tied
    if tied:
        assert same_bits(checkpoint[HEAD], golden(name)[EMBEDDING])


def as_hugging_face(params: Mapping[str, Values], config: Mapping[str, Any], *, moe: str) -> dict[str, Values]:
    """Rename and split by hand: the plain twin of the tables."""
    d, kv, vocab = config["head_dim"], config["num_key_value_heads"], config["vocab_size"]
    group = config["num_attention_heads"] // kv
    found: dict[str, Values] = {}
    for name, w in params.items():
        last = name.rpartition(".")[2]
        words = name.split(".")
        layer = f"model.layers.{words[2]}." if words[0] == "decoder" and words[1] == "layers" else ""
        if name in (EMBEDDING, HEAD):
            found["model.embed_tokens.weight" if name == EMBEDDING else "lm_head.weight"] = w[:vocab]
        elif name == "decoder.final_layernorm.weight":
            found["model.norm.weight"] = w
        elif "linear_qkv" in name:
            parts = w.reshape(kv, group + 2, d, *w.shape[1:])
            for n, part in (("q", parts[:, :group]), ("k", parts[:, group]), ("v", parts[:, group + 1])):
                found[f"{layer}self_attn.{n}_proj.{last}"] = np.ascontiguousarray(part).reshape(-1, *w.shape[1:])
        elif "linear_proj" in name:
            found[f"{layer}self_attn.o_proj.{last}"] = w
        elif "q_layernorm" in name or "k_layernorm" in name:
            found[f"{layer}self_attn.{words[-2][0]}_norm.{last}"] = w
        elif "input_layernorm" in name:
            found[f"{layer}input_layernorm.{last}"] = w
        elif "pre_mlp_layernorm" in name:
            found[f"{layer}post_attention_layernorm.{last}"] = w
        elif "router" in name:
            found[f"{layer}{moe}.gate.{last}"] = w
        elif "experts" in name:
            at = f"{layer}{moe}.experts.{words[6]}."
            half = w.shape[0] // 2
            if "linear_fc1" in name:
                found |= {f"{at}w1.weight": w[:half], f"{at}w3.weight": w[half:]}
            else:
                found[f"{at}w2.weight"] = w
        elif "linear_fc1" in name:
            half = w.shape[0] // 2
            found |= {f"{layer}mlp.gate_proj.weight": w[:half], f"{layer}mlp.up_proj.weight": w[half:]}
        else:
            found[f"{layer}mlp.down_proj.weight"] = w
    return found


def meshes(name: str) -> list[str]:
    more = ["ep=2", "tp=2,ep=2"] if "moe" in name else ["tp=4"]
    return ["tp=1", "tp=2", "pp=2", "tp=2,pp=2", "dp=3", "pp=2,tp=2,dp=2", *more]


def assert_same(one: Mapping[str, Values], other: Mapping[str, Values]) -> None:
    assert set(one) == set(other)
    assert [n for n in other if not same_bits(one[n], other[n])] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_moments_are_those_of_the_same_model_in_hugging_face_files(name: str, tmp_path: Path) -> None:
    told = {"model_type": FAMILIES[name]}
    checkpoint = meshload.open(fixture(name), config=told)
    config = {**told, **dict(checkpoint.config or {})}
    files = {}
    for kind in ("param", *checkpoint.optimizer):
        arrays = golden(name, "fp32" if kind == "master" else kind) or golden(name)
        of = as_hugging_face(arrays, config, moe="block_sparse_moe")
        files[kind] = meshload.open(write_checkpoint(tmp_path / kind, of, config))
    assert {"param", "exp_avg", "exp_avg_sq"} <= set(files)
    twin = replace(files.pop("param"), optimizer={kind: dict(of) for kind, of in files.items()})
    for mesh in meshes(name):
        for rank in range(math.prod(int(axis[3:]) for axis in mesh.split(","))):
            here: dict[str, Any] = {"mesh": mesh, "rank": rank, "layout": Layout.default(dp="cut")}
            assert_same(restored(checkpoint, optimizer=True, **here), restored(twin, optimizer=True, **here))


def test_b22_a_ranks_native_tensors_are_those_of_its_own_file() -> None:
    path = fixture("legacy-tp2-dp2-bf16-distopt")
    stored = meshload.open(path).with_names("stored")
    for rank in range(2):
        layout = Layout.default(pad={"vocab": 112})  # as Megatron pads it; the rows behind the vocabulary have no meaning
        found = restored(path, mesh="tp=2", rank=rank, names="native", layout=layout, config={"model_type": "llama"})
        at = f"mp_rank_{rank:02}/model_optim_rng.pt/model."
        for name in (n.removeprefix(at) for n in stored if n.startswith(at)):
            expected = np.asarray(stored[at + name])
            values = found[name]
            if name == EMBEDDING:
                expected, values = expected[: 101 - 56 * rank], values[: 101 - 56 * rank]
            assert same_bits(values, expected), name


@pytest.mark.parametrize("name", ["td-tp2-pp2-fp32", "td-pp2-dp2-bf16-distopt-full", "legacy-tp2-dp2-bf16-distopt"])
def test_no_byte_is_read_twice(name: str) -> None:
    checkpoint, log = counted(meshload.open(fixture(name)))
    plan = meshload.plan(checkpoint, layout="replicated")
    assert plan.read_bytes < 1.2 * plan.wanted_bytes + (1 << 17)
    restored(checkpoint, layout="replicated", merge_gap=0)
    assert log.nbytes == plan.wanted_bytes or name.startswith("td")


@pytest.mark.parametrize("name", ["legacy-tp2-pp2-fp32", "legacy-tp2-dp2-bf16-distopt", "td-tp2-dp2-fp32-distopt-dpre-qwen2"])
def test_a_rank_that_wants_an_eighth_reads_an_eighth(name: str) -> None:
    """Over all ranks each byte is read once, weights and moments; rows that do not divide make the last rank's part smaller."""
    whole = meshload.open(fixture(name))
    kinds = [whole.arrays, *whole.optimizer.values()]
    rows = [-(-a.shape[0] // 8) * a.nbytes // a.shape[0] for arrays in kinds for a in arrays.values()]
    total = sum(a.nbytes for arrays in kinds for a in arrays.values())
    read = 0
    for rank in range(8):
        checkpoint, log = counted(whole)
        options: dict[str, Any] = {"mesh": "dp=8", "rank": rank, "layout": {"*": ("dp",)}, "optimizer": True, "merge_gap": 0}
        made = meshload.plan(checkpoint, **options)
        restored(checkpoint, **options)
        assert log.nbytes == made.read_bytes == made.wanted_bytes <= sum(rows)
        read += log.nbytes
    assert read == total
    assert sum(rows) < 1.2 * total / 8


def test_files_are_not_read_whole(tmp_path: Path) -> None:
    large = {f"decoder.layers.{i}.mlp.linear_fc2.weight": ramp(f"{i}", (256, 512)) for i in range(2)}
    ranks = {f"mp_rank_{t:02}": {"model": {n: w[:, 256 * t : 256 * (t + 1)] for n, w in large.items()}} for t in range(2)}
    root = write_legacy(tmp_path, ranks, {**ARGS, "tensor_model_parallel_size": 2})
    folder = CountedFolder(open_folder(root))
    checkpoint = Megatron().open(folder)
    assert 0 < folder.log.nbytes < sum(file.stat().st_size for file in root.rglob("*.pt")) / 20
    before = folder.log.nbytes
    name = next(iter(large))
    assert same_bits(checkpoint[name][7], large[name][7])
    assert folder.log.nbytes - before == 512 * 4


# --- stored names -----------------------------------------------------------------------------------------------------


class Stub:
    """What a class of Megatron is to torch's own unpickler."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith("megatron") else super().find_class(module, name)


class Pickle:
    """A pickle module whose unpickler needs no Megatron."""

    Unpickler = Unpickler
    load = staticmethod(lambda file, **options: Unpickler(file, **options).load())
    __name__ = "pickle"


def tensors(found: Any, path: str) -> Iterator[tuple[str, Values]]:
    if hasattr(found, "numpy"):
        import torch

        bits = found.contiguous().view(torch.uint8) if found.dtype == torch.bfloat16 else None
        yield path, found.numpy() if bits is None else bits.numpy().view(ml_dtypes.bfloat16)
    elif isinstance(found, dict):
        for key, value in found.items():
            shown = f"({key[0]}, {key[1]})" if isinstance(key, tuple) else str(key)
            yield from tensors(value, f"{path}.{shown}" if path else shown)
    elif isinstance(found, (list, tuple)):
        for i, value in enumerate(found):
            yield from tensors(value, f"{path}.{i}" if path else str(i))


class TestMegatron(FormatSuite):
    format = Megatron()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Values]]]:
        torch = pytest.importorskip("torch")
        for name in ("legacy-tp2-dp2-bf16-distopt", "legacy-pp2-vp2-bf16-tied", "legacy-tp2-pp2-fp32"):
            expected: dict[str, Values] = {}
            for file in sorted((GOLDEN / name).glob("iter_*/*/*.pt")):
                root = torch.load(file, weights_only=False, pickle_module=Pickle)
                at = f"{file.parent.name}/{file.name}"
                expected |= {f"{at}/{path}": values for path, values in tensors(root, "")}
            yield GOLDEN / name, expected


class TestMegatronCore(FormatSuite):
    format = MegatronCore()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Values]]]:
        name = "td-ep2-fp32-moe"
        expected: dict[str, Values] = {}
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            found = golden(name, kind)
            prefix = "" if kind == "param" else f"optimizer.state.{kind}."
            for key in found:
                stem = key.replace("layers.0.", "layers.{}.").replace("local_experts.0.", "local_experts.{}.")
                if stem.count("{}") == 2:
                    values = np.stack([np.stack([found[stem.format(i, k)] for k in range(4)]) for i in range(2)])
                elif stem.count("{}") == 1 and "local_experts" not in stem:
                    values = np.stack([found[stem.format(i)] for i in range(2)])
                elif "layers" in stem:
                    continue
                else:
                    values = found[key]
                stacked = stem.replace("layers.{}.", "layers.").replace("local_experts.{}.", "experts.")
                stacked = stacked.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
                expected[prefix + stacked.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")] = values
        yield GOLDEN / name, expected


# --- who opens what ---------------------------------------------------------------------------------------------------


def test_each_fixture_of_another_format_is_refused() -> None:
    folders = [p for at in (GOLDEN.parent, SHARED) if at.is_dir() for kind in at.iterdir() if kind.is_dir() for p in kind.iterdir()]
    folders += [p / "checkpoint" for p in folders if (p / "checkpoint").is_dir()]
    for path in (p for p in folders if p.is_dir()):
        legacy, core = (f.matches(open_folder(path)) for f in (Megatron(), MegatronCore()))
        of = path.parent.name if path.name != "checkpoint" else path.parent.parent.name
        expected = (path.name.startswith("legacy"), path.name.startswith("td-")) if of == "megatron" else (False, False)
        assert (legacy, core) == expected, path


def test_other_formats_come_after_these_where_they_too_would_open_it() -> None:
    for name in FAMILIES:
        path = next((at / name for at in (GOLDEN, SHARED / "megatron") if (at / name).is_dir()), None)
        if path is not None:
            fitting = [f.name for f in installed().values() if f.matches(open_folder(path))]
            assert fitting[0] == ("megatron" if name.startswith("legacy") else "megatron_core")


def test_an_iteration_or_a_file_in_it_opens_too() -> None:
    for name in ("legacy-tp2-pp2-fp32", "td-ep2-fp32-moe"):
        root = fixture(name)
        inside = [root / "iter_0000002", root / "latest_checkpointed_iteration.txt"]
        if name.startswith("td"):
            inside += [root / "iter_0000002" / f for f in ("metadata.json", ".metadata", "common.pt")]
        assert all(set(meshload.open(p)) == set(golden(name)) for p in inside)


def test_one_ranks_folder_of_several_is_refused() -> None:
    with pytest.raises(FormatError, match="is one rank's folder of tp 2, pp 2, ep 1; open the folder above it"):
        meshload.open(fixture("legacy-tp2-pp2-fp32") / "iter_0000002" / "mp_rank_00_000")


def test_opening_reads_no_payload_of_a_container() -> None:
    folder = CountedFolder(open_folder(fixture("td-tp2-dp2-fp32-distopt-dpre-qwen2")))
    opened = MegatronCore().open(folder)
    (file,) = {name for name, _, _ in folder.log.reads if name.endswith(".distcp")}
    listed = read_listing([LocalFolder(fixture("td-tp2-dp2-fp32-distopt-dpre-qwen2") / "iter_0000002").file(".metadata")])
    groups = listed.objects["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"][0]
    assert file.endswith(groups.file)
    read = [(start, start + n) for name, start, n in folder.log.reads if name == file]
    assert all(groups.offset <= start and stop <= groups.offset + groups.length for start, stop in read)
    assert opened.meta["optimizer"]["step"] == 2


# --- checkpoints made here --------------------------------------------------------------------------------------------

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 2,
    "ffn_hidden_size": 8,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 13,
    "padded_vocab_size": 16,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "transformer_impl": "local",
}


def full(layers: int = 2, experts: int = 0) -> dict[str, Values]:
    """Return a full model's arrays, in module order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (16, 8)}
    for i in range(layers):
        at = f"decoder.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (8,), at + "self_attention.linear_proj.weight": (8, 8)}
        shapes |= {at + "self_attention.linear_qkv.weight": (16, 8), at + "pre_mlp_layernorm.weight": (8,)}
        if experts:
            shapes[at + "mlp.router.weight"] = (experts, 8)
        for k in range(experts):
            shapes |= {at + f"mlp.experts.local_experts.{k}.linear_fc{n}.weight": s for n, s in ((1, (16, 8)), (2, (8, 8)))}
        if not experts:
            shapes |= {at + "mlp.linear_fc1.weight": (16, 8), at + "mlp.linear_fc2.weight": (8, 8)}
    shapes |= {"decoder.final_layernorm.weight": (8,), HEAD: (16, 8)}
    return {name: ramp(name, shape) for name, shape in shapes.items()}


def rows(w: Values, t: int, tp: int) -> Values:
    n = w.shape[0] // tp
    return w[t * n : (t + 1) * n]


def shard(name: str, w: Values, t: int, tp: int) -> Values:
    """Cut an array as Megatron does: the plain twin of the rules."""
    if "linear_fc1" in name:
        gate, up = np.split(w, 2)
        return np.concatenate([rows(gate, t, tp), rows(up, t, tp)])
    if "linear_fc2" in name or "linear_proj" in name:
        return rows(w.T, t, tp).T
    return rows(w, t, tp) if any(n in name for n in ("linear_qkv", "word_embeddings", "output_layer")) else w


def state_of(
    arrays: Mapping[str, Values], tp: int, t: int, mine: Sequence[int], *, first: bool = True, last: bool = True
) -> dict[str, Values]:
    """Return the state dict of one chunk: layers `mine`, numbered from 0."""
    state = {}
    for name, w in arrays.items():
        words = name.split(".")
        if words[1] == "layers":
            if int(words[2]) not in mine:
                continue
            words[2] = str(mine.index(int(words[2])))
        elif (name == EMBEDDING and not first) or (name != EMBEDDING and not last):
            continue
        state[".".join(words)] = shard(name, w, t, tp)
    return state


def as_torch(found: Any) -> Any:
    import torch

    if isinstance(found, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(found).copy())
    if isinstance(found, dict):
        return {k: as_torch(v) for k, v in found.items()}
    return [as_torch(v) for v in found] if isinstance(found, list) else found


def write_legacy(
    root: Path, ranks: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any] | None, *, version: float | None = 3.0
) -> Path:
    """Write rank folders, each with what it maps to beside `args`."""
    torch = pytest.importorskip("torch")
    for folder, content in ranks.items():
        saved = as_torch(dict(content))
        if args is not None:
            saved["args"] = argparse.Namespace(**args)
        if version is not None:
            saved["checkpoint_version"] = version
        (root / "iter_0000001" / folder).mkdir(parents=True, exist_ok=True)
        torch.save({**saved, "iteration": 1}, root / "iter_0000001" / folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def write_tp(root: Path, tp: int, **more: Any) -> dict[str, Values]:
    arrays = full()
    args = {**ARGS, "tensor_model_parallel_size": tp, **more}
    write_legacy(root, {f"mp_rank_{t:02}": {"model": state_of(arrays, tp, t, [0, 1])} for t in range(tp)}, args)
    return arrays


def resave(file: Path, change: Callable[[Any], None]) -> None:
    import torch

    root = torch.load(file, weights_only=False)
    change(root)
    torch.save(root, file)


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_b01_equal_norms_of_tensor_ranks_are_one_array(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2)
    found = meshload.open(tmp_path)
    name = "decoder.layers.0.input_layernorm.weight"
    assert same_bits(found[name], arrays[name])
    assert meshload.check(tmp_path, copies=True).problems == ()


def test_b01_norms_that_differ_are_told_and_the_first_is_read(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2)
    name = "decoder.layers.0.input_layernorm.weight"

    def change(root: Any) -> None:
        root["model"][name][3] += 1

    resave(tmp_path / "iter_0000001/mp_rank_01/model_optim_rng.pt", change)
    (problem,) = meshload.check(tmp_path, copies=True).problems
    assert (problem.array, problem.file) == (name, "mp_rank_01/model_optim_rng.pt")
    assert "by 1 at most" in problem.text
    assert same_bits(meshload.open(tmp_path)[name], arrays[name])


def test_b02_without_one_ranks_file_replicas_are_there_and_its_shards_are_not(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 4)
    shutil.rmtree(tmp_path / "iter_0000001/mp_rank_02")
    found = meshload.open(tmp_path)
    assert [p.file for p in found.problems] == ["mp_rank_02/model_optim_rng.pt"]
    assert "tensor rank 2 of 4" in found.problems[0].text
    assert same_bits(found["decoder.final_layernorm.weight"], arrays["decoder.final_layernorm.weight"])
    for name in (n for n in arrays if "layernorm" not in n):
        with pytest.raises(MissingPieces):
            np.asarray(found[name])
    config = {"model_type": "llama"}
    with pytest.raises(MissingPieces, match=r"the checkpoint is damaged: mp_rank_02/model_optim_rng\.pt is not there"):
        restored(tmp_path, mesh="tp=4", rank=2, config=config)
    for rank in (0, 1, 3):
        kept = restored(
            tmp_path,
            mesh="tp=4",
            rank=rank,
            config=config,
            names="native",
            layout={"*fc2*": (None, "tp"), "*": ()},
            include=["*fc2*", "*norm*"],
        )
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        assert same_bits(kept[name], shard(name, arrays[name], rank, 4))


@pytest.mark.parametrize("keep", [0, 900])
def test_b02_a_damaged_ranks_file_is_told(tmp_path: Path, keep: int) -> None:
    write_tp(tmp_path, 2)
    file = tmp_path / "iter_0000001/mp_rank_01/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:keep])
    (problem,) = meshload.open(tmp_path).problems
    assert problem.file == "mp_rank_01/model_optim_rng.pt"
    assert "tensor rank 1 of 2" in problem.text


def test_b04_one_of_eight_copies_is_read(tmp_path: Path) -> None:
    norm = {"decoder.final_layernorm.weight": ramp("n", (64,)), "decoder.layers.0.input_layernorm.weight": ramp("i", (64,))}
    args = {**ARGS, "num_layers": 1, "tensor_model_parallel_size": 8}
    write_legacy(tmp_path, {f"mp_rank_{t:02}": {"model": norm} for t in range(8)}, args)
    checkpoint, log = counted(meshload.open(tmp_path))
    assert all(len(a.pieces) == 8 for a in checkpoint.values())
    for name, values in norm.items():
        assert same_bits(checkpoint[name], values)
    assert log.nbytes == 2 * 64 * 4


# --- the pipeline -----------------------------------------------------------------------------------------------------


def write_stages(root: Path, chunks: Mapping[tuple[int, int], Sequence[int]], **more: Any) -> dict[str, Values]:
    """Write a pipeline: `chunks[p, v]` are the layers of chunk `v` of stage `p`."""
    layers = sum(map(len, chunks.values()))
    arrays = full(layers)
    pp, virtual = 1 + max(p for p, _ in chunks), 1 + max(v for _, v in chunks)
    ranks = {}
    for p in range(pp):
        states = [
            state_of(arrays, 1, 0, list(chunks[p, v]), first=(p, v) == (0, 0), last=(p, v) == (pp - 1, virtual - 1))
            for v in range(virtual)
        ]
        ranks[f"mp_rank_00_{p:03}"] = {f"model{v}" if virtual > 1 else "model": s for v, s in enumerate(states)}
    write_legacy(root, ranks, {**ARGS, "num_layers": layers, "pipeline_model_parallel_size": pp, **more})
    return arrays


@pytest.mark.parametrize(
    "chunks",
    [
        {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]},
        {(0, 0): [0, 1], (1, 0): [2], (0, 1): [3, 4], (1, 1): [5]},
        {(0, 0): [0], (1, 0): [1, 2], (2, 0): [3, 4, 5]},
        {(0, 0): [], (1, 0): [0, 1]},
    ],
)
def test_b09_layers_are_numbered_by_chunk_then_stage(tmp_path: Path, chunks: dict[tuple[int, int], list[int]]) -> None:
    arrays = write_stages(tmp_path, chunks)
    assert_same({n: np.asarray(a) for n, a in meshload.open(tmp_path).items()}, arrays)


def test_b09_another_number_of_layers_than_args_say_is_an_error(tmp_path: Path) -> None:
    write_stages(tmp_path, {(0, 0): [0, 1], (1, 0): [2]})
    for file in tmp_path.rglob("model_optim_rng.pt"):
        resave(file, lambda root: setattr(root["args"], "num_layers", 4))
    with pytest.raises(FormatError, match=r"hold 3 layers \(2, 1 in order\), args say 4"):
        meshload.open(tmp_path)


def test_a_lost_stage_is_counted_by_args_or_refused(tmp_path: Path) -> None:
    arrays = write_stages(tmp_path, {(0, 0): [0, 1], (1, 0): [2, 3], (2, 0): [4, 5]})
    shutil.rmtree(tmp_path / "iter_0000001/mp_rank_00_001")
    found = meshload.open(tmp_path)
    assert "pipeline rank 1 of 3" in found.problems[0].text
    assert same_bits(found["decoder.layers.5.mlp.linear_fc2.weight"], arrays["decoder.layers.5.mlp.linear_fc2.weight"])
    assert not any(".layers.2." in n or ".layers.3." in n for n in found)
    for file in tmp_path.rglob("model_optim_rng.pt"):
        resave(file, lambda root: setattr(root["args"], "pipeline_model_parallel_layout", "Et*2|t*2|t*2L"))
    with pytest.raises(FormatError, match="args do not say how many layers it has"):
        meshload.open(tmp_path)


def test_layers_per_chunk_follow_megatrons_options() -> None:
    def told(pp: int, virtual: int = 1, **args: Any) -> list[int] | None:
        found = layers_of({"num_layers": 8, **args}, pp, virtual)
        return None if found is None else [found[k] for k in sorted(found)]

    assert told(2, 2) == [2, 2, 2, 2]
    assert told(4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=3) == [1, 2, 2, 3]
    assert told(2, decoder_last_pipeline_num_layers=2) == [6, 2]
    assert told(2, num_layers=6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True) == [3, 3]
    assert told(3, num_layers=7, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True) == [2, 3, 2]
    assert told(3) is None
    assert told(2, pipeline_model_parallel_layout="Ettt|tttttL") is None


def test_ranks_that_count_layers_differently_are_an_error(tmp_path: Path) -> None:
    write_tp(tmp_path, 2)

    def change(root: Any) -> None:
        root["model"] = {n: t for n, t in root["model"].items() if ".layers.1." not in n}

    resave(tmp_path / "iter_0000001/mp_rank_01/model_optim_rng.pt", change)
    with pytest.raises(FormatError, match="chunk 0 of pipeline rank 0 has 1 layers, in another rank's file 2"):
        meshload.open(tmp_path)


def test_a_tied_copy_on_the_last_stage_is_a_copy_of_the_embedding(tmp_path: Path) -> None:
    arrays = write_stages(tmp_path, {(0, 0): [0], (1, 0): [1]}, untie_embeddings_and_output_weights=False)
    found = meshload.open(tmp_path)
    assert same_bits(found[HEAD], arrays[EMBEDDING])
    assert len(found[EMBEDDING].pieces) == 2
    (problem,) = meshload.check(tmp_path, copies=True).problems
    assert (problem.array, problem.file) == (EMBEDDING, "mp_rank_00_001/model_optim_rng.pt")


# --- fused q, k and v -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("order", "dims"),
    [
        ("per head", "(kv_heads (q group + k + v) head_dim) embed"),
        ("all q, all k, all v", "((q kv_heads group + k kv_heads + v kv_heads) head_dim) embed"),
        ("four groups of q, v, k", "(kv_four (q kv_two group + v kv_two + k kv_two) head_dim) embed"),
    ],
)
def test_b17_the_declared_order_gives_the_same_q_k_and_v(order: str, dims: str, tp: int) -> None:
    heads, d, embed = 8, 2, 3
    q, k, v = (ramp(n, (heads, d, embed)) for n in "qkv")
    if order == "per head":
        fused = np.stack([q, k, v], axis=1)
    elif order.startswith("all"):
        fused = np.stack([q, k, v])
    else:
        fused = np.stack([w.reshape(4, 2, d, embed) for w in (q, v, k)], axis=1)
    source = InMemory("w", np.ascontiguousarray(fused).tobytes())
    sizes = {"kv_heads": heads, "group": 1, "kv_four": 4, "kv_two": 2, "head_dim": d, "embed": embed}
    pattern = parse(dims)
    pieces = piece(source, 0, (3 * heads * d, embed), 4)
    for part, values in (("q", q), ("k", k), ("v", v)):
        found = find(pattern, part, pieces, 0, (3 * heads * d, embed), lambda _, dim: sizes[dim])
        shape = tuple(sizes[n] for n in pattern.dims_of(part))
        array = meshload.Array(part, np.dtype("f4"), shape, found)
        assert same_bits(np.asarray(array).reshape(heads, d, embed), values)
        merged = array.merge(0, array.ndim - 2)
        for t in range(tp):
            n = heads * d // tp
            assert same_bits(
                merged.merge(0, merged.ndim - 1)[t * n : (t + 1) * n], values.reshape(heads * d, embed)[t * n : (t + 1) * n]
            )


def reordered(w: Values, order: str, heads: int, kv: int, d: int) -> Values:
    """Return a rank's rows, given in groups, in another order."""
    rest = w.shape[1:]
    groups = w.reshape(kv, heads // kv + 2, d, *rest)
    parts = [groups[:, :-2].reshape(-1, *rest), groups[:, -2].reshape(-1, *rest), groups[:, -1].reshape(-1, *rest)]
    return np.concatenate(parts) if order == "concatenated" else np.stack(parts, axis=1).reshape(w.shape)


def write_reordered(root: Path, tp: int, order: str, kv: int, *, old: bool, version: float | None) -> dict[str, Values]:
    arrays = full()
    args = {**ARGS, "tensor_model_parallel_size": tp, "num_query_groups": kv, "group_query_attention": kv != 4}
    arrays |= {n: ramp(n, ((4 + 2 * kv) * 2, 8)) for n in arrays if "linear_qkv" in n}
    ranks = {}
    for t in range(tp):
        state = state_of(arrays, tp, t, [0, 1])
        for n in (n for n in state if "linear_qkv" in n):
            state[n] = reordered(state[n], order, 4 // tp, kv // tp, 2)
        ranks[f"mp_rank_{t:02}"] = {"model": before_mcore(state) if old else state}
    write_legacy(root, ranks, args, version=version)
    return arrays


def before_mcore(state: Mapping[str, Values]) -> dict[str, Any]:
    """Return a state dict nested and named as before megatron-core."""
    names = (
        ("pre_mlp_layernorm", "post_attention_layernorm"),
        ("self_attention.linear_qkv", "self_attention.query_key_value"),
        ("self_attention.linear_proj", "self_attention.dense"),
        ("linear_fc1", "dense_h_to_4h"),
        ("linear_fc2", "dense_4h_to_h"),
    )
    encoder, rest = {}, {}
    for name, values in state.items():
        for ours, theirs in names:
            name = name.replace(ours, theirs)
        if name.startswith("decoder."):
            encoder[name.removeprefix("decoder.")] = values
        else:
            rest[name] = values
    found: dict[str, Any] = {"encoder": encoder}
    if EMBEDDING in rest:
        found["embedding"] = {"word_embeddings": {"weight": rest[EMBEDDING]}}
    if HEAD in rest:
        found["output_layer"] = {"weight": rest[HEAD]}
    return {"language_model": found}


@pytest.mark.parametrize(("version", "order"), [(None, "concatenated"), (0, "concatenated"), (1.0, "trailing"), (2.0, "grouped")])
@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoint_versions_tell_the_order_of_old_files(tmp_path: Path, version: float | None, order: str, tp: int) -> None:
    arrays = full()
    if order == "grouped":
        states = {f"mp_rank_{t:02}": {"model": before_mcore(state_of(arrays, tp, t, [0, 1]))} for t in range(tp)}
        write_legacy(tmp_path, states, {**ARGS, "tensor_model_parallel_size": tp}, version=version)
    else:
        arrays = write_reordered(tmp_path, tp, order, 4, old=True, version=version)
    assert_same({n: np.asarray(a) for n, a in meshload.open(tmp_path).items()}, arrays)


@pytest.mark.parametrize("kv", [2, 4])
def test_b19_the_caller_declares_an_order_that_no_version_tells(tmp_path: Path, kv: int) -> None:
    arrays = write_reordered(tmp_path, 2, "concatenated", kv, old=False, version=3.0)
    declared = meshload.open(tmp_path, format=Megatron(qkv_order="concatenated"))
    assert_same({n: np.asarray(a) for n, a in declared.items()}, arrays)
    taken = meshload.open(tmp_path)  # the version's word for it; with one group per rank both are the same
    assert (kv == 2) == same_bits(
        taken["decoder.layers.0.self_attention.linear_qkv.weight"], arrays["decoder.layers.0.self_attention.linear_qkv.weight"]
    )
    with pytest.raises(LayoutError, match="'grouped' or 'concatenated' was expected"):
        Megatron(qkv_order="codegen")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_b18_shards_of_qkv_follow_one_another_in_order(tmp_path: Path, tp: int) -> None:
    arrays = write_tp(tmp_path, tp)  # 2 kv heads: with 4 and 8 ranks a shard is a part of a group
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert same_bits(meshload.open(tmp_path)[name], arrays[name])


# --- gated MLPs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b22_gate_and_up_of_all_ranks_are_joined_apart(tmp_path: Path, tp: int) -> None:
    arrays = write_tp(tmp_path, tp)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert same_bits(meshload.open(tmp_path)[name], arrays[name])
    for rank in range(4):
        found = restored(tmp_path, mesh="tp=4", rank=rank, names="native", config={"model_type": "llama"})
        assert same_bits(found[name], shard(name, arrays[name], rank, 4))


def test_a_plain_mlp_is_joined_by_rows(tmp_path: Path) -> None:
    arrays = full()
    fc1 = "decoder.layers.{}.mlp.linear_fc1.weight"
    arrays |= {fc1.format(i): ramp(fc1.format(i), (8, 8)) for i in range(2)}
    ranks = {}
    for t in range(2):
        state = state_of(arrays, 2, t, [0, 1]) | {fc1.format(i): rows(arrays[fc1.format(i)], t, 2) for i in range(2)}
        ranks[f"mp_rank_{t:02}"] = {"model": state}
    write_legacy(tmp_path, ranks, {**ARGS, "tensor_model_parallel_size": 2, "swiglu": False})
    assert_same({n: np.asarray(a) for n, a in meshload.open(tmp_path).items()}, arrays)


def test_whether_a_gate_is_there_is_asked_for(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2)
    for file in tmp_path.rglob("model_optim_rng.pt"):
        resave(file, lambda root: delattr(root["args"], "swiglu"))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    with pytest.raises(meshload.MissingArray, match=r"not in args \(swiglu\); open it with the format's option gated="):
        meshload.open(tmp_path)[name]
    assert same_bits(meshload.open(tmp_path, format=Megatron(gated=True))[name], arrays[name])
    with pytest.raises(meshload.MissingArray, match=r"it has 16 rows; linear_fc2 and args .* give 8"):
        meshload.open(tmp_path, format=Megatron(gated=False))[name]


def in_turns(w: Values, block: int) -> Values:
    gate, up = np.split(w, 2)
    return np.stack([gate.reshape(-1, block, 8), up.reshape(-1, block, 8)], axis=1).reshape(w.shape)


@pytest.mark.parametrize("tp", [1, 2])
def test_b23_gate_and_up_in_turns_are_taken_apart_where_it_is_declared(tmp_path: Path, tp: int) -> None:
    arrays, ranks = full(), {}
    for t in range(tp):
        state = state_of(arrays, tp, t, [0, 1])
        ranks[f"mp_rank_{t:02}"] = {"model": {n: in_turns(w, 2) if "fc1" in n else w for n, w in state.items()}}
    write_legacy(tmp_path, ranks, {**ARGS, "tensor_model_parallel_size": tp})
    found = meshload.open(tmp_path, format=Megatron(glu_interleave=2))
    assert_same({n: np.asarray(a) for n, a in found.items()}, arrays)
    assert not same_bits(
        meshload.open(tmp_path)["decoder.layers.0.mlp.linear_fc1.weight"], arrays["decoder.layers.0.mlp.linear_fc1.weight"]
    )
    wrong = meshload.open(tmp_path, format=Megatron(glu_interleave=3)).unavailable
    assert "no multiple of 2 x 3" in wrong["decoder.layers.0.mlp.linear_fc1.weight"]


def test_b24_dp_cuts_the_pair_that_a_tensor_rank_holds(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = np.split(arrays[name], 2)
    held = []
    for rank in range(4):  # ranks (tp, dp)
        options = {"mesh": "tp=2,dp=2", "rank": rank, "layout": Layout.default(dp="cut"), "names": "native"}
        held.append(restored(tmp_path, config={"model_type": "llama"}, **options)[name])
    assert [same_bits(h, w) for h, w in zip(held, (gate[:4], up[:4], gate[4:], up[4:]), strict=True)] == [True] * 4


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def test_b26_the_padding_of_a_vocabulary_is_cut_and_made_anew(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 4)
    config = {"model_type": "llama"}
    native = meshload.open(tmp_path, config=config)
    assert native[EMBEDDING].shape == (16, 8)
    assert same_bits(native.with_names("hf")["model.embed_tokens.weight"], arrays[EMBEDDING][:13])
    layout = Layout.default(pad={"vocab": 4})
    found = restored(tmp_path, mesh="tp=4", rank=3, layout=layout, config=config)["lm_head.weight"]
    assert same_bits(found, np.concatenate([arrays[HEAD][12:13], np.zeros((3, 8), np.float32)]))


def test_b28_a_vocabulary_without_padding_stays(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2, vocab_size=16)
    for rank in range(2):
        found = restored(tmp_path, mesh="tp=2", rank=rank, config={"model_type": "llama"})["lm_head.weight"]
        assert same_bits(found, arrays[HEAD][8 * rank : 8 * rank + 8])


def test_a_vocabulary_that_args_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    write_tp(tmp_path, 2, vocab_size=None)
    with pytest.raises(LayoutError, match=r"the size of vocab .* give it in config="):
        restored(tmp_path, config={"model_type": "llama"})
    found = restored(tmp_path, config={"model_type": "llama", "vocab_size": 11})
    assert found["lm_head.weight"].shape == (11, 8)


# --- experts ----------------------------------------------------------------------------------------------------------


def write_experts(
    root: Path, tp: int, ep: int, etp: int, spelled: Callable[[dict[str, Values]], dict[str, Values]] = dict, **more: Any
) -> dict[str, Values]:
    """Write a folder per tensor and expert rank."""
    arrays = full(experts=4)
    local = 4 // ep
    ranks = {}
    for t in range(tp):
        for e in range(ep):
            state = {}
            for name, w in state_of({n: w for n, w in arrays.items() if "local_experts" not in n}, tp, t, [0, 1]).items():
                state[name] = w
                if name.endswith("router.weight"):
                    for k in range(local):
                        for fc in ("linear_fc1", "linear_fc2"):
                            end = f"mlp.experts.local_experts.{{}}.{fc}.weight"
                            at = name.removesuffix("mlp.router.weight")
                            state[at + end.format(k)] = shard(fc, arrays[at + end.format(e * local + k)], t % etp, etp)
            folder = f"mp_rank_{t:02}" + (f"_{e:03}" if ep > 1 else "")
            ranks[folder] = {"model": spelled(state)}
    args = {**ARGS, "tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    write_legacy(root, ranks, {**args, "num_experts": 4, **more})
    return arrays


def numbered(state: dict[str, Values]) -> dict[str, Values]:
    """Return experts as Transformer Engine's grouped linears name them, and norms within linears."""
    found = {}
    for name, w in state.items():
        head, mark, tail = name.partition(".local_experts.")
        if mark:
            k, fc, _ = tail.split(".")
            name = f"{head}.{fc}.weight{k}"
        found[name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")] = w
    return found


def in_one_array(state: dict[str, Values]) -> dict[str, Values]:
    """Return experts as `GroupedMLP` keeps them: transposed, in one array."""
    found = {n: w for n, w in state.items() if "local_experts" not in n}
    for i in range(2):
        at = f"decoder.layers.{i}.mlp.experts."
        for fc, name in (("linear_fc1", "weight1"), ("linear_fc2", "weight2")):
            experts = [w.T for n, w in state.items() if n.startswith(at) and fc in n]
            shape = (experts[0].shape[0], -1) if name == "weight1" else (-1, experts[0].shape[1])
            found[at + name] = np.stack(experts).reshape(shape)
    return found


@pytest.mark.parametrize("spelled", [dict, numbered, in_one_array])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (2, 2, 2), (2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_b65_experts_are_found_in_every_spelling_and_mesh(
    tmp_path: Path, tp: int, ep: int, etp: int, spelled: Callable[..., Any]
) -> None:
    arrays = write_experts(tmp_path, tp, ep, etp, spelled)
    checkpoint, log = counted(meshload.open(tmp_path))
    assert_same({n: np.asarray(a) for n, a in checkpoint.items()}, arrays)
    assert log.nbytes == sum(w.nbytes for w in arrays.values())  # copies of tensor or expert ranks are not read


def test_b65_copies_of_experts_that_differ_are_told(tmp_path: Path) -> None:
    write_experts(tmp_path, 2, 2, 1)
    name = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc2.weight"

    def change(root: Any) -> None:
        root["model"][name.format(0)][0, 0] += 1

    resave(tmp_path / "iter_0000001/mp_rank_01_001/model_optim_rng.pt", change)
    (problem,) = meshload.check(tmp_path, copies=True).problems
    assert (problem.array, problem.file) == (name.format(2), "mp_rank_01_001/model_optim_rng.pt")


def test_with_other_expert_ranks_only_the_files_that_hold_something_are_needed(tmp_path: Path) -> None:
    arrays = write_experts(tmp_path, 2, 2, 1)
    for folder in ("mp_rank_00_001", "mp_rank_01_000"):  # 2 processes: tensor rank and expert rank go together
        shutil.rmtree(tmp_path / "iter_0000001" / folder)
    found = meshload.open(tmp_path)
    assert found.problems == ()
    assert_same({n: np.asarray(a) for n, a in found.items()}, arrays)


def test_a_lost_file_of_experts_is_told(tmp_path: Path) -> None:
    write_experts(tmp_path, 2, 2, 2)
    shutil.rmtree(tmp_path / "iter_0000001/mp_rank_01_001")
    (problem,) = meshload.open(tmp_path).problems
    assert problem.file == "mp_rank_01_001/model_optim_rng.pt"


def test_one_number_of_a_folder_is_the_pipelines_or_the_experts(tmp_path: Path) -> None:
    arrays = write_experts(tmp_path / "experts", 1, 2, 1)
    stages = write_stages(tmp_path / "stages", {(0, 0): [0], (1, 0): [1]})
    for file in tmp_path.rglob("model_optim_rng.pt"):
        resave(file, lambda root: root.pop("args"))
    for path, expected in ((tmp_path / "experts", arrays), (tmp_path / "stages", stages)):
        assert_same({n: np.asarray(a) for n, a in meshload.open(path).items()}, expected)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_b51_a_tracker_that_leads_nowhere_names_the_last_complete_save(tmp_path: Path) -> None:
    write_tp(tmp_path, 1)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for word, name in (("release", "release"), ("2000", "iter_0002000")):
        tracker.write_text(word)
        with pytest.raises(FormatError, match=f"names {name}, which is not there: .*the last complete save is iter_0000001"):
            meshload.open(tmp_path)
    tracker.write_text("soon")
    with pytest.raises(FormatError, match="an iteration or the word 'release' was expected, found 'soon'"):
        meshload.open(tmp_path)
    tracker.unlink()
    with pytest.raises(FormatError, match="is not there; open one of iter_0000001 by its own path"):
        meshload.open(tmp_path)
    (tmp_path / "iter_0000001").rename(tmp_path / "release")
    tracker.write_text("release\n")
    assert meshload.open(tmp_path).meta["save"] == "release"


def test_b51_an_unfinished_container_is_refused(tmp_path: Path) -> None:
    name = "td-ep2-fp32-moe"
    for iteration in ("iter_0000002", "iter_0000004"):
        shutil.copytree(fixture(name) / "iter_0000002", tmp_path / iteration)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    (tmp_path / "iter_0000004" / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"iter_0000004, in which \.metadata is not there: .* last complete save is iter_0000002"):
        meshload.open(tmp_path)
    with pytest.raises(FormatError, match=r"\.metadata is not there: the save did not finish"):
        meshload.open(tmp_path / "iter_0000004", format="megatron_core")


def test_files_of_an_older_larger_mesh_are_passed_over(tmp_path: Path) -> None:
    write_tp(tmp_path, 4)
    arrays = write_tp(tmp_path, 2)
    with pytest.warns(MeshloadWarning, match="is of tp 2, pp 1, ep 1; mp_rank_02, mp_rank_03 belong to another"):
        found = meshload.open(tmp_path)
    assert found.problems == ()
    assert_same({n: np.asarray(a) for n, a in found.items()}, arrays)


def test_files_of_two_meshes_of_which_none_is_complete_are_refused(tmp_path: Path) -> None:
    write_tp(tmp_path, 4)
    write_tp(tmp_path, 2)
    shutil.rmtree(tmp_path / "iter_0000001/mp_rank_01")
    with pytest.raises(FormatError, match=r"files of several meshes, .* of which 0 are complete"):
        meshload.open(tmp_path)


def test_a_folder_of_no_readable_file_is_refused(tmp_path: Path) -> None:
    write_tp(tmp_path, 1)
    file = tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    file.write_bytes(b"nothing")
    with pytest.raises(FormatError, match="no rank's file can be read: mp_rank_00"):
        meshload.open(tmp_path)
    import torch

    torch.save([1], file)
    with pytest.raises(FormatError, match="holds list, a dict with 'model' was expected"):
        meshload.open(tmp_path)
    torch.save({"weights": {}}, file)
    with pytest.raises(FormatError, match="has no 'model'"):
        meshload.open(tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_not_known_is_told_and_never_guessed(tmp_path: Path, tp: int) -> None:
    arrays = full()
    name = "decoder.layers.0.mixer.in_proj.weight"
    ranks = {f"mp_rank_{t:02}": {"model": state_of(arrays, tp, t, [0, 1]) | {name: ramp("m", (4, 8))}} for t in range(tp)}
    write_legacy(tmp_path, ranks, {**ARGS, "tensor_model_parallel_size": tp})
    found = meshload.open(tmp_path)
    if tp == 1:
        assert same_bits(found[name], ramp("m", (4, 8)))
    else:
        assert "how tensor-parallel ranks share it is not known" in found.unavailable[name]


def test_shards_of_other_shapes_or_dtypes_are_told(tmp_path: Path) -> None:
    write_tp(tmp_path, 2)
    fc2, norm = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"

    def change(root: Any) -> None:
        root["model"][fc2] = root["model"][fc2][:, :3]
        root["model"][norm] = root["model"][norm].double()

    resave(tmp_path / "iter_0000001/mp_rank_01/model_optim_rng.pt", change)
    with pytest.raises(meshload.MissingArray, match=r"layers\.0\.mlp\.down_proj\.weight: ranks disagree: float32"):
        restored(tmp_path, config={"model_type": "llama"})
    found = meshload.open(tmp_path).unavailable
    assert found[fc2] == "ranks disagree: float32 (8, 8) in one file, float32 (8, 6) in another"
    assert found[norm] == "ranks disagree: float32 (8,) in one file, float64 (8,) in another"


# --- optimizers -------------------------------------------------------------------------------------------------------


def plain_optimizer(state: Mapping[str, Values]) -> tuple[dict[str, Any], dict[str, Values]]:
    """Return what torch saves of Adam over Megatron's two param groups, and the moments by name."""
    groups = [[n for n, w in state.items() if (w.ndim > 1) == decays] for decays in (True, False)]
    moments = {n: ramp(f"moment {n}", w.shape) for n, w in state.items()}
    saved, i, described = {}, 0, []
    for wd, names in zip((1.0, 0.0), groups, strict=True):
        described.append({"wd_mult": wd, "is_expert_parallel": False, "params": list(range(i, i + len(names)))})
        for n in names:
            saved[i] = {"step": np.float32(1), "exp_avg": moments[n], "exp_avg_sq": moments[n] + 1}
            i += 1
    return {"state": saved, "param_groups": described}, moments


def write_with_optimizer(root: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Values]:
    arrays = full()
    optimizer, moments = plain_optimizer(arrays)
    change(optimizer)
    write_legacy(root, {"mp_rank_00": {"model": arrays, "optimizer": optimizer}}, ARGS)
    return moments


def test_states_are_named_by_their_order(tmp_path: Path) -> None:
    moments = write_with_optimizer(tmp_path)
    found = meshload.open(tmp_path).optimizer
    assert_same({n: np.asarray(a) for n, a in found["exp_avg"].items()}, moments)
    assert_same({n: np.asarray(a) for n, a in found["exp_avg_sq"].items()}, {n: m + 1 for n, m in moments.items()})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda o: o["param_groups"][0].pop("wd_mult"), "wd_mult is neither 0 nor 1"),
        (lambda o: o["param_groups"][0].update(wd_mult=0.0), "param groups differ by more than weight decay"),
        (lambda o: o["param_groups"][0]["params"].pop(), "has 9 parameters, the model 10 of its kind; some may be frozen"),
        (lambda o: o["state"][0].update(exp_avg=ramp("m", (2, 8))), r"the exp_avg in the place of embedding.* has shape \(2, 8\)"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    write_with_optimizer(tmp_path, change)
    found = meshload.open(tmp_path)
    assert found.optimizer == {}
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.unavailable["optimizer.states"])
    assert len(found) == len(full())


def test_a_lost_buffers_file_is_told(tmp_path: Path) -> None:
    root = shutil.copytree(fixture("legacy-tp2-dp2-bf16-distopt"), tmp_path / "c")
    (root / "iter_0000002/mp_rank_01/distrib_optim.pt").unlink()
    found = meshload.open(root, config={"model_type": "llama"})
    assert (found.optimizer, found.unavailable["optimizer.states"]) == ({}, "mp_rank_01/distrib_optim.pt is not there")
    with pytest.raises(meshload.MissingArray, match=r"an optimizer state that cannot be used: mp_rank_01/distrib_optim\.pt is not"):
        restored(found, optimizer=True)
    assert restored(found)
    assert set(found) == set(golden("legacy-tp2-dp2-bf16-distopt"))


@pytest.mark.parametrize("folders", [["mp_rank_00"], ["mp_rank_00_000_000", "mp_rank_00_000_001"]])
def test_an_optimizer_of_old_releases_is_told_and_not_read(tmp_path: Path, folders: Sequence[str]) -> None:
    arrays = write_tp(tmp_path, 1)
    save = tmp_path / "iter_0000001"
    (save / "mp_rank_00/model_optim_rng.pt").rename(save / "mp_rank_00/model_rng.pt")
    for name in folders:
        (save / name).mkdir(exist_ok=True)
        (save / name / "optim.pt").write_bytes(b"what is never opened")
    found = meshload.open(tmp_path, config={"model_type": "llama"})
    assert (set(found), found.optimizer, found.problems) == (set(arrays), {}, ())
    why = f"the optimizer is in {folders[0]}/optim.pt, as old releases wrote it, which is not read"
    assert found.unavailable == {"optimizer.states": why}
    assert restored(found)
    with pytest.raises(meshload.MissingArray, match=why):
        restored(found, optimizer=True)


def test_a_buffer_of_another_length_is_refused(tmp_path: Path) -> None:
    root = shutil.copytree(fixture("legacy-tp2-dp2-bf16-distopt"), tmp_path / "c")
    file = root / "iter_0000002/mp_rank_01/distrib_optim.pt"

    def change(found: Any) -> None:
        (buffer,) = found[0].values()
        buffer["numel_unpadded"] -= 1

    resave(file, change)
    found = meshload.open(root)
    assert "a buffer has [7487] elements, its 14 parameters have" in found.unavailable["optimizer.states"]


def plain_buckets(sizes: Sequence[int], limit: int | None, alone: set[int], dp: int) -> list[list[tuple[int, int]]]:
    """Lay parameters out in global positions, as Megatron does: the plain twin of `buckets`."""
    found: list[list[tuple[int, int]]] = [[]]
    at = begin = 0
    divisor = math.lcm(dp, 128)

    def close(end: int) -> int:
        nonlocal begin
        found.append([])
        begin = -(-end // divisor) * divisor
        return begin

    for n in reversed(range(len(sizes))):
        at = -(-at // 64) * 64
        if n in alone and found[-1]:
            at = close(at)
        found[-1].append((n, at - begin))
        at += sizes[n]
        if n in alone or (limit is not None and at - begin >= limit):
            at = close(at)
    return [b for b in found if b]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_lie_where_megatron_puts_them(seed: int) -> None:
    chance = np.random.default_rng(seed)
    sizes = chance.integers(1, 400, chance.integers(1, 12)).tolist()
    limit = [None, 300, 700][seed % 3]
    alone = {0} if seed % 2 else set()
    expected = plain_buckets(sizes, limit, alone, dp=int(chance.integers(1, 6)))
    made = buckets(sizes, limit=limit, alone=alone)
    assert [list(zip(b.numbers, b.starts, strict=True)) for b in made] == expected
    told = {"limit": limit, "alone": alone}
    total = sum(b.size for b in made)
    together = laid_out(sizes, [total], coalesced=True, **told)
    assert together is not None
    assert positions(together) == positions(made)
    assert laid_out(sizes, [total + 1], coalesced=True, **told) is None
    apart = laid_out(sizes, [b.size for b in made], coalesced=False, **told)
    assert apart in (made, None)  # None where another version's layout has the same lengths


def positions(made: Sequence[Any]) -> list[tuple[int, int]]:
    before = itertools.accumulate((b.size for b in made), initial=0)
    return [(n, at + start) for b, at in zip(made, before, strict=False) for n, start in zip(b.numbers, b.starts, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_flat_buffers_are_joined_like_numpy_would(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tp = int(chance.integers(1, 4))
    whole = {
        "gated": ramp("g", (4 * tp, 3)),
        "rows": ramp("r", (2 * tp, 5)),
        "columns": ramp("c", (3, 2 * tp)),
        "whole": ramp("w", (7,)),
    }
    parts, memory, starts = [], [], []
    at = 0
    for t in range(tp):
        for cut, w in whole.items():
            held = shard({"gated": "linear_fc1", "rows": "linear_qkv", "columns": "linear_fc2"}.get(cut, "norm"), w, t, tp)
            parts.append(Part(cut, cut, t, tp, held.shape))
            starts.append(at)
            memory.append(np.ascontiguousarray(held).ravel())
            at += held.size
    flat = np.concatenate(memory)
    edges = sorted({0, flat.size, *chance.integers(0, flat.size, 5).tolist()})
    source = InMemory("flat", flat.tobytes())
    pieces = union([piece(source, a * 4, (b - a,), 4).place((a,)) for a, b in itertools.pairwise(edges)])
    sizes = [math.prod(p.shape) for p in parts]
    runs = cut_runs(pieces, starts, sizes, range(len(parts)), 4)
    found = join_runs(parts, runs, np.dtype("f4"), Fusion(True))
    assert_same({n: np.asarray(a) for n, a in found.items()}, whole)


def test_modules_are_ordered_as_each_layer_spec_makes_them() -> None:
    names = [n for n in full(layers=1, experts=2) if n != HEAD] + ["decoder.layers.0.self_attention.linear_qkv.bias"]
    local = module_order(spelled_by("local", names, is_grouped=False, is_legacy_grouped=False) or {})
    at = "decoder.layers.0."
    attention = [at + f"self_attention.linear_{n}" for n in ("proj.weight", "qkv.weight", "qkv.bias")]
    experts = [at + f"mlp.experts.local_experts.{k}.linear_fc{i}.weight" for k in range(2) for i in (1, 2)]
    around = [EMBEDDING, at + "input_layernorm.weight", at + "pre_mlp_layernorm.weight", at + "mlp.router.weight"]
    assert local == [*around[:2], *attention, *around[2:], *experts, "decoder.final_layernorm.weight"]
    engine = module_order(spelled_by("transformer_engine", names, is_grouped=True, is_legacy_grouped=False) or {})
    attention.insert(1, at + "self_attention.linear_qkv.layer_norm_weight")
    experts = [at + f"mlp.experts.linear_fc{i}.weight{k}" for i in (1, 2) for k in range(2)]
    assert engine == [EMBEDDING, *attention, *around[2:], *experts, "decoder.final_layernorm.weight"]
    assert module_order(["decoder.layers.0.mixer.in_proj.weight"]) is None
    assert spelled_by("inference_optimized", names, is_grouped=False, is_legacy_grouped=False) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda args: delattr(args, "transformer_impl"), "transformer_impl"),
        (lambda args: delattr(args, "swiglu"), "are not in common.pt"),
        (lambda args: setattr(args, "tensor_model_parallel_size", 1), "states of 2 groups of ranks, tp 1, pp 1, ep 1 give 1"),
        (lambda args: setattr(args, "transformer_impl", "mine"), "the layer spec 'mine'"),
        (lambda args: setattr(args, "untie_embeddings_and_output_weights", True), ""),
    ],
)
def test_b43_flat_states_are_refused_where_their_order_is_not_known(tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    pytest.importorskip("torch")
    name = "td-tp2-dp2-fp32-distopt-dpre-qwen2"
    root = shutil.copytree(fixture(name), tmp_path / "c")
    stub(root / "iter_0000002/common.pt", change)
    found = meshload.open(root)
    assert set(found) == set(golden(name))
    assert why in found.unavailable.get("optimizer.states", "")
    assert bool(found.optimizer) == (not why)


def stub(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the args of a file without Megatron's classes."""
    import torch

    root = torch.load(file, weights_only=False, pickle_module=Pickle)
    for key, value in list(vars(root["args"]).items()):
        if isinstance(value, Stub):
            delattr(root["args"], key)
    change(root["args"])
    torch.save(root, file)


def test_b43_the_caller_can_say_the_layer_spec(tmp_path: Path) -> None:
    name = "td-tp2-dp2-fp32-distopt-dpre-qwen2"
    root = shutil.copytree(fixture(name), tmp_path / "c")
    stub(root / "iter_0000002/common.pt", lambda args: delattr(args, "transformer_impl"))
    found = meshload.open(root, format=MegatronCore(transformer_impl="local")).optimizer["exp_avg"]
    assert_same({n: np.asarray(a) for n, a in found.items()}, golden(name, "exp_avg"))


def test_b43_a_parameter_that_a_boundary_of_dp_cuts_is_whole() -> None:
    name = "td-tp2-dp2-bf16-distopt-modelspace"
    found = meshload.open(fixture(name)).optimizer["exp_avg"]
    expected = golden(name, "exp_avg")
    cut = [n for n, a in found.items() if len(a.pieces) > meshload.open(fixture(name))[n].pieces.start.shape[0]]
    assert cut
    assert all(same_bits(found[n], expected[n]) for n in cut)


# --- containers made here ---------------------------------------------------------------------------------------------


def write_container(root: Path, arrays: Mapping[str, Values], args: Mapping[str, Any] | None = None, **common: Any) -> Path:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(as_torch(dict(arrays)), checkpoint_id=folder, no_dist=True)
    saved = {"iteration": 1, **common} | ({"args": argparse.Namespace(**args)} if args is not None else {})
    torch.save(saved, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def stacked(arrays: Mapping[str, Values], layers: int, experts: int) -> dict[str, Values]:
    """Return a full model's arrays as a homogeneous container has them."""
    found: dict[str, Values] = {}
    for name in arrays:
        stem = name.replace("layers.0.", "layers.{i}.").replace("local_experts.0.", "local_experts.{k}.")
        if "{k}" in stem and "{i}" in stem:
            values = [np.stack([arrays[stem.format(i=i, k=k)] for k in range(experts)]) for i in range(layers)]
        elif "{i}" in stem and "local_experts" not in stem:
            values = [arrays[stem.format(i=i)] for i in range(layers)]
        elif "layers" in stem:
            continue
        else:
            found[name] = arrays[name]
            continue
        found[stem.replace("layers.{i}.", "layers.").replace("local_experts.{k}.", "experts.")] = np.stack(values)
    return found


def test_b64_stacked_layers_and_experts_are_views_of_one_array(tmp_path: Path) -> None:
    arrays = full(layers=3, experts=4)
    root = write_container(tmp_path, stacked(arrays, 3, 4), {**ARGS, "num_layers": 3, "num_experts": 4})
    checkpoint, log = counted(meshload.open(root))
    assert set(checkpoint) == set(arrays)
    name = "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"
    assert same_bits(checkpoint[name], arrays[name])
    assert log.nbytes == arrays[name].nbytes
    assert_same({n: np.asarray(a) for n, a in checkpoint.items()}, arrays)


def test_keys_per_layer_and_expert_with_halves_of_their_own(tmp_path: Path) -> None:
    arrays = full(layers=2, experts=2)
    saved: dict[str, Values] = {}
    for name, w in arrays.items():
        key = name.replace("local_experts", "experts").replace(
            "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
        )
        if "linear_fc1" in name:
            saved[f"module.{key}_w"], saved[f"module.{key}_v"] = np.split(w, 2)
        else:
            saved[f"module.{key}"] = w
    found = meshload.open(write_container(tmp_path, saved, {**ARGS, "num_experts": 2}))
    assert_same({n: np.asarray(a) for n, a in found.items()}, arrays)
    assert "stripped" not in found.meta


def test_a_gate_without_its_up_is_told(tmp_path: Path) -> None:
    arrays = full(layers=1)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    arrays[f"{name}_w"] = arrays.pop(name)[:8]
    found = meshload.open(write_container(tmp_path, arrays, {**ARGS, "num_layers": 1}))
    assert found.unavailable[name] == "its gate and up do not fit together: w (8, 8)"


def test_b23_a_container_whose_args_have_gate_and_up_in_turns_asks(tmp_path: Path) -> None:
    arrays = full(layers=1, experts=2)
    turned = {n: in_turns(w, 4) if "linear_fc1" in n else w for n, w in arrays.items()}
    args = {**ARGS, "num_layers": 1, "num_experts": 2, "moe_mlp_glu_interleave_size": 4}
    root = write_container(tmp_path, stacked(turned, 1, 2), args)
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    with pytest.raises(meshload.MissingArray, match=r"take turns of 4 rows; .*open it with MegatronCore\(glu_interleave="):
        meshload.open(root)[name]
    assert same_bits(meshload.open(root, format=MegatronCore(glu_interleave=4))[name], arrays[name])
    assert same_bits(meshload.open(root, format=MegatronCore(glu_interleave=0))[name], turned[name])


def test_another_number_of_stacked_layers_than_args_say_is_told(tmp_path: Path) -> None:
    found = meshload.open(write_container(tmp_path, stacked(full(), 2, 0), {**ARGS, "num_layers": 3}))
    assert found.unavailable["decoder.layers.mlp.linear_fc2.weight"] == "it holds 2 layers, args say 3"


def test_a_container_without_args_gives_arrays_and_asks_for_a_config(tmp_path: Path) -> None:
    arrays = full()
    root = write_container(tmp_path, stacked(arrays, 2, 0))
    found = meshload.open(root)
    assert found.config is None
    assert_same({n: np.asarray(a) for n, a in found.items()}, arrays)
    (root / "iter_0000001/common.pt").unlink()
    assert [p.file for p in meshload.open(root).problems] == ["common.pt"]


def test_a_lost_data_file_is_told_by_name(tmp_path: Path) -> None:
    root = shutil.copytree(fixture("td-ep2-fp32-moe"), tmp_path / "c")
    (root / "iter_0000002/__1_1.distcp").unlink()
    found = meshload.open(root)
    assert "__1_1.distcp" in {p.file for p in found.problems}
    assert found.unavailable
    assert all("__1_1.distcp" in why for why in found.unavailable.values())


def test_a_zarr_container_is_refused_by_name(tmp_path: Path) -> None:
    root = write_container(tmp_path, full(), ARGS)
    (root / "iter_0000001/metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match="is a zarr container, which megatron-core wrote before"):
        meshload.open(root)


def test_nemo_keeps_the_container_in_a_folder_of_its_own(tmp_path: Path) -> None:
    arrays = full()
    write_container(tmp_path / "x", stacked(arrays, 2, 0), ARGS)
    (tmp_path / "nemo" / "context").mkdir(parents=True)
    shutil.move(tmp_path / "x" / "iter_0000001", tmp_path / "nemo" / "weights")
    assert set(meshload.open(tmp_path / "nemo")) == set(arrays)


# --- names, tables and configs ----------------------------------------------------------------------------------------


def test_names_of_both_layer_specs_are_the_local_ones() -> None:
    def whole(name: str) -> str:
        return taken_apart(name).whole(10, 100)

    assert whole("decoder.layers.1.self_attention.linear_qkv.layer_norm_bias") == "decoder.layers.11.input_layernorm.bias"
    assert (
        whole("decoder.layers.0.mlp.experts.linear_fc1.weight3")
        == "decoder.layers.10.mlp.experts.local_experts.103.linear_fc1.weight"
    )
    assert whole("mtp.layers.0.enorm.weight") == "mtp.layers.0.enorm.weight"
    assert whole("a.{b}.c") == "a.{b}.c"
    assert taken_apart("decoder.layers.0.mlp.shared_experts.linear_fc1.weight").cut == GATED
    assert not taken_apart("decoder.layers.0.mlp.shared_experts.linear_fc1.weight").is_expert


def test_each_part_has_the_dims_that_it_has_on_hugging_faces_disk() -> None:
    ours = {t.families: t for t in map(parse_table, megatron.TABLES)}
    theirs = {family: t for t in map(parse_table, hf.TABLES) for family in t.families}
    assert {f for families in ours for f in families} == {
        *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_neox", "gpt2")
    }
    for families, table in ours.items():
        for family in families:
            expected = {p: set(line.dims_of(p)) for line in theirs[family].lines for p in line.parts}
            joints = {"heads": {"kv_heads", "group"}}

            def fine(dims: set[str], joints: dict[str, set[str]] = joints) -> set[str]:
                return {f for d in dims for f in joints.get(d, {d})}

            found = {p: fine(set(line.dims_of(p))) for line in table.lines for p in line.parts}
            assert found == {p: fine(dims) for p, dims in expected.items()}, family


def test_a_norm_around_zero_is_shifted_once(tmp_path: Path) -> None:
    arrays = write_tp(tmp_path, 2, apply_layernorm_1p=True)
    found = restored(tmp_path, config={"model_type": "llama"})
    for ours, theirs in (
        ("decoder.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
    ):
        assert same_bits(found[theirs], arrays[ours] + np.float32(1))
    assert same_bits(meshload.open(tmp_path)["decoder.final_layernorm.weight"], arrays["decoder.final_layernorm.weight"])


def test_the_config_says_what_args_say_exactly() -> None:
    assert config_of({}) is None
    told = config_of(ARGS)
    assert told is not None
    assert {k: told[k] for k in ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")} == {
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 13,
        "tie_word_embeddings": False,
    }
    alone = config_of({**ARGS, "group_query_attention": False, "num_query_groups": 1, "vocab_size": 99, "add_qkv_bias": True})
    assert alone is not None
    assert alone["num_key_value_heads"] == 4
    assert {"vocab_size", "attention_bias", "model_type", "num_local_experts"} & set(alone) == set()
    sparse = config_of({**ARGS, "num_experts": 4, "moe_ffn_hidden_size": 3, "moe_layer_freq": 1})
    assert sparse is not None
    assert (sparse["moe_intermediate_size"], sparse["num_local_experts"], sparse.get("intermediate_size")) == (3, 4, None)


def test_the_config_says_what_no_array_shows() -> None:
    rope = {"position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 0.5}
    llama = config_of({**ARGS, **rope, "normalization": "RMSNorm", "norm_epsilon": 1e-5, "use_rope_scaling": True})
    assert llama is not None
    assert (llama["rms_norm_eps"], llama["rope_theta"], llama["rope_scaling"]["rope_type"]) == (1e-5, 5e5, "llama3")
    assert {"layer_norm_eps", "rotary_pct", "num_experts_per_tok"} & set(llama) == set()
    gpt = config_of({**ARGS, **rope, "normalization": "LayerNorm", "norm_epsilon": 1e-6, "num_experts": 4, "moe_router_topk": 3})
    assert gpt is not None
    assert (gpt["layer_norm_eps"], gpt["rotary_pct"], gpt["num_experts_per_tok"]) == (1e-6, 0.5, 3)
    assert {"rms_norm_eps", "rope_scaling"} & set(gpt) == set()


def test_a_config_that_contradicts_args_is_an_error(tmp_path: Path) -> None:
    write_tp(tmp_path, 1)
    assert restored(tmp_path, config={"model_type": "llama", "head_dim": None, "num_local_experts": None})
    with pytest.raises(LayoutError, match="num_key_value_heads is 2 and 4"):
        meshload.open(tmp_path, config={"model_type": "llama", "num_key_value_heads": 4})


# --- families of which no fixture is there ----------------------------------------------------------------------------


def spelled_as_megatron(found: Mapping[str, Values], heads: int, kv: int, d: int) -> dict[str, Values]:
    """Rename and fuse Hugging Face arrays by hand: the plain twin of the tables of GPT-NeoX, GPT-2 and Qwen3 MoE."""
    made: dict[str, Values] = {}

    def group(q: Values, k: Values, v: Values) -> Values:
        rest = q.shape[1:]
        parts = [w.reshape(kv, -1, d, *rest) for w in (q, k, v)]
        return np.concatenate(parts, axis=1).reshape(-1, *rest)

    plain = {
        "gpt_neox.embed_in": "embedding.word_embeddings",
        "transformer.wte": "embedding.word_embeddings",
        "model.embed_tokens": "embedding.word_embeddings",
        "transformer.wpe": "embedding.position_embeddings",
        "gpt_neox.final_layer_norm": "decoder.final_layernorm",
        "transformer.ln_f": "decoder.final_layernorm",
        "model.norm": "decoder.final_layernorm",
        "embed_out": "output_layer",
        "lm_head": "output_layer",
        "ln_1": "input_layernorm",
        "input_layernorm": "input_layernorm",
        "ln_2": "pre_mlp_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "attention.query_key_value": "self_attention.linear_qkv",
        "attention.dense": "self_attention.linear_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.gate": "mlp.router",
    }
    transposed = {"attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
    for name, w in found.items():
        module, _, last = name.rpartition(".")
        words = module.split(".")
        layer = next((f"decoder.layers.{word}." for word in words[:3] if word.isdigit()), "")
        inner = module.partition(f".{layer.split('.')[2]}.")[2] if layer else module
        experts = inner.split(".")[2] if inner.startswith("mlp.experts.") else None
        at = f"{layer}mlp.experts.local_experts.{experts}." if experts else f"{layer}mlp."
        if inner in plain:
            made[f"{layer}{plain[inner]}.{last}"] = w
        elif inner in transposed:
            made[f"{layer}{transposed[inner]}.{last}"] = w.T
        elif inner == "attn.c_attn":
            made[f"{layer}self_attention.linear_qkv.{last}"] = group(*np.split(w.T, 3))
        elif inner == "self_attn.q_proj":
            others = (found[name.replace("q_proj", f"{n}_proj")] for n in "kv")
            made[f"{layer}self_attention.linear_qkv.{last}"] = group(w, *others)
        elif inner.endswith("gate_proj"):
            made[f"{at}linear_fc1.{last}"] = np.concatenate([w, found[name.replace("gate_proj", "up_proj")]])
        elif experts and inner.endswith("down_proj"):
            made[f"{at}linear_fc2.{last}"] = w
    return {name: np.ascontiguousarray(w) for name, w in made.items()}


def shapes_of(family: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of a tiny model in Hugging Face names, and its config."""
    shapes: dict[str, tuple[int, ...]] = {}
    if family == "qwen3_moe":
        shapes |= {"model.embed_tokens.weight": (13, 8), "model.norm.weight": (8,), "lm_head.weight": (13, 8)}
        for i in range(2):
            at = f"model.layers.{i}."
            shapes |= {at + f"{n}.weight": (8,) for n in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {at + f"self_attn.{n}_norm.weight": (6,) for n in "qk"}
            shapes |= {at + f"self_attn.{n}_proj.weight": (r, 8) for n, r in (("q", 24), ("k", 12), ("v", 12))}
            shapes[at + "self_attn.o_proj.weight"] = (8, 24)
            units = [(at + "mlp.", 10)] if i == 0 else [(at + f"mlp.experts.{k}.", 3) for k in range(4)]
            for unit, n in units:
                shapes |= {unit + f"{p}_proj.weight": (n, 8) for p in ("gate", "up")} | {unit + "down_proj.weight": (8, n)}
        shapes["model.layers.1.mlp.gate.weight"] = (4, 8)
        config = {"head_dim": 6, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 3, "mlp_only_layers": [0]}
        return shapes, {**config, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 10}
    neox = family == "gpt_neox"
    root = "gpt_neox" if neox else "transformer"
    norms = ("input_layernorm", "post_attention_layernorm") if neox else ("ln_1", "ln_2")
    linears = {
        "attention.query_key_value": (24, 8),
        "attention.dense": (8, 8),
        "mlp.dense_h_to_4h": (32, 8),
        "mlp.dense_4h_to_h": (8, 32),
    }
    if not neox:
        linears = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}
    for i in range(2):
        at = f"{root}.{'layers' if neox else 'h'}.{i}."
        shapes |= {at + f"{n}.{last}": (8,) for n in norms for last in ("weight", "bias")}
        for n, (a, b) in linears.items():
            shapes |= {at + f"{n}.weight": (a, b), at + f"{n}.bias": (a if neox else b,)}
    last_norm = "final_layer_norm" if neox else "ln_f"
    shapes |= {f"{root}.{last_norm}.{last}": (8,) for last in ("weight", "bias")}
    shapes |= {"gpt_neox.embed_in.weight" if neox else "transformer.wte.weight": (13, 8)}
    shapes |= {"embed_out.weight" if neox else "lm_head.weight": (13, 8)}
    if neox:
        return shapes, {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    shapes["transformer.wpe.weight"] = (9, 8)
    return shapes, {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 9, "tie_word_embeddings": False}


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "qwen3_moe"])
def test_a_family_is_the_same_in_both_namings(family: str, tmp_path: Path) -> None:
    shapes, config = shapes_of(family)
    config |= {"model_type": family, "vocab_size": 13}
    arrays = {name: ramp(name, shape) for name, shape in shapes.items()}
    heads, kv, d = 4, config.get("num_key_value_heads", 4), config.get("head_dim", 2)
    expected = spelled_as_megatron(arrays, heads, kv, d)
    shown = meshload.open(write_checkpoint(tmp_path / "hf", arrays, config)).with_names("megatron")
    assert_same({n: np.asarray(a) for n, a in shown.items()}, expected)
    args = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": kv,
        "kv_channels": d,
        "group_query_attention": kv != 4,
        "swiglu": family == "qwen3_moe",
        "tensor_model_parallel_size": 1,
        "add_bias_linear": family != "qwen3_moe",
        "untie_embeddings_and_output_weights": True,
        "num_experts": None,
    }
    if family == "qwen3_moe":
        args |= {"num_experts": 4, "moe_layer_freq": [0, 1], "ffn_hidden_size": 10, "moe_ffn_hidden_size": 3}
    padded = {n: np.pad(w, [(0, 3), (0, 0)]) if "word" in n or "output" in n else w for n, w in expected.items()}
    root = write_legacy(tmp_path / "megatron", {"mp_rank_00": {"model": padded}}, args)
    assert_same(restored(root, config=config), arrays)


# --- the logits of the models that were saved -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["legacy-tp2-pp2-fp32", "td-tp2-dp2-fp32-distopt-dpre-qwen2", "td-ep2-fp32-moe"])
def test_transformers_gives_the_logits_that_megatron_gave(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    checkpoint = meshload.open(fixture(name), config={"model_type": FAMILIES[name]})
    told = {k: v for k, v in (checkpoint.config or {}).items() if k not in ("decoder_sparse_step", "mlp_only_layers")}
    assert told["rms_norm_eps"] == 1e-5  # Hugging Face takes 1e-6 where nothing is told
    more = {"num_experts_per_tok": 2, "use_sliding_window": False}  # the golden files' args do not tell how many
    config = transformers.AutoConfig.for_model(**{**told, **more, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = meshload.restore(checkpoint, like=model)
    with torch.no_grad():
        probe = golden(name, "probe")
        logits = model(torch.from_numpy(probe["input_ids"].copy())).logits.numpy()
    assert np.abs(logits - probe["logits"]).max() < 1e-4


# --- hostile files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_model_parallel_size": 1 << 40},
        {"num_experts": 1 << 50},
        {"num_layers": 1 << 60},
        {"num_layers": -1},
        {"kv_channels": 0, "num_attention_heads": "4"},
        {"virtual_pipeline_model_parallel_size": 1 << 40, "pipeline_model_parallel_size": 1 << 10},
        {"moe_mlp_glu_interleave_size": 1 << 40, "glu": None},
    ],
)
def test_numbers_without_sense_end_soon(tmp_path: Path, args: dict[str, Any]) -> None:
    write_legacy(tmp_path / "legacy", {"mp_rank_00": {"model": full()}}, {**ARGS, **args})
    write_container(tmp_path / "core", stacked(full(), 2, 0), {**ARGS, **args})
    for path in (tmp_path / "legacy", tmp_path / "core"):
        try:
            found = meshload.open(path)
        except FormatError:
            continue
        assert len(found) + len(found.unavailable) > 0


@pytest.mark.parametrize("seed", range(8))
def test_changed_bytes_of_a_header_are_an_error_or_told(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for name, file in (
        ("legacy-tp2-dp2-bf16-distopt", "mp_rank_01/model_optim_rng.pt"),
        ("td-tp2-dp2-fp32-distopt-dpre-qwen2", [".metadata", "common.pt"][seed % 2]),
    ):
        root = shutil.copytree(fixture(name), tmp_path / name)
        path = root / "iter_0000002" / file
        data = bytearray(path.read_bytes())
        for at in chance.integers(0, min(len(data), 6000), 6):
            data[at] = int(chance.integers(0, 256))
        path.write_bytes(bytes(data))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MeshloadWarning)
                meshload.open(root)
        except meshload.MeshloadError:
            pass
