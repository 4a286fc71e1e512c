"""DeepSpeed's checkpoints and its universal ones: golden folders, small ones that tests write, cuts over ranks, and damage."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LayoutError, MeshloadError, MissingArray
from meshload.layout import Layout
from meshload.source import open_folder
from meshload.testing import CountedFolder, FormatSuite, counted, ramp, read_safetensors, same_bits, write_checkpoint
from meshload_adapters._cuts import Cut, matches
from meshload_adapters._zero import Refused, consecutive, each_alone
from meshload_adapters.formats.deepspeed import DeepSpeed
from meshload_adapters.formats.universal import Universal

torch: Any = pytest.importorskip("torch", reason="its files are written by torch")

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "fixtures"
GOLDEN = {d.name: d for root in (SHARED, HERE / "golden") for d in sorted(root.glob("deepspeed/*")) if d.is_dir()}
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 101,
}
Values = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_zero3", HERE / "bench" / "zero3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ZERO3 = bench()


def opened(path: Path, **options: Any) -> Checkpoint:
    return DeepSpeed(**options).open(open_folder(path))


def universal(path: Path, **options: Any) -> Checkpoint:
    return Universal(**options).open(open_folder(path))


def format_of(name: str) -> type[Any]:
    return Universal if name.startswith("ucp") else DeepSpeed


def is_equal(found: Any, expected: Any) -> bool:
    return same_bits(np.asarray(found), expected)


# --- the classes that DeepSpeed pickles, for tests that write or change files -----------------------------------------


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:  # noqa: N801 - DeepSpeed's name
    numel: int
    start: int


class LossScaler:
    pass


@pytest.fixture
def deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for DeepSpeed's classes, so that torch can write and read files that name them."""
    for name, kind in (
        ("deepspeed.runtime.zero.config", ZeroStageEnum),
        ("deepspeed.utils.tensor_fragment", fragment_address),
        ("deepspeed.runtime.fp16.loss_scaler", LossScaler),
    ):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        monkeypatch.setattr(sys.modules[name], kind.__name__, kind, raising=False)
        monkeypatch.setattr(kind, "__module__", name)


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    """Read a file with torch, change what it holds, and write it again."""
    tree = torch.load(path, weights_only=False)
    found = change(tree)
    torch.save(tree if found is None else found, path)


# --- small checkpoints that tests write -------------------------------------------------------------------------------


def tensor(values: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values))


def state(**more: Any) -> dict[str, Any]:
    base = {"module": {}, "buffer_names": [], "optimizer": None, "param_shapes": None, "frozen_param_shapes": None}
    return {**base, "shared_params": {}, "global_steps": 3, "dp_world_size": 1, "mp_world_size": 1, **more}


def write_states(tag: Path, states: Sequence[Mapping[str, Any]]) -> Path:
    """Write the model states of model-parallel ranks; no optimizer."""
    tag.mkdir(parents=True, exist_ok=True)
    for mp, found in enumerate(states):
        torch.save({**found, "mp_world_size": len(states)}, tag / f"mp_rank_{mp:02d}_model_states.pt")
    return tag


def write_tp(tag: Path, shards: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Write the weights of tensor-parallel ranks, without ZeRO."""
    return write_states(tag, [state(module={n: tensor(v) for n, v in s.items()}, **more) for s in shards])


MOMENTS = ("master", "exp_avg", "exp_avg_sq")


def write_zero12(root: Path, groups: Sequence[Shapes], ranks: int, *, stage: int = 1, **options: Any) -> Path:
    """Write a ZeRO-1 or 2 checkpoint: values by name and kind, padding of -1, cut off the fp32 partitions as DeepSpeed does."""
    step, tag = options.pop("step", 3), root / options.pop("tag", "global_step3")
    pads, align = options.pop("pads", None), options.pop("align", 2)
    shapes = {n: s for g in groups for n, s in g.items()}
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    module = {n: tensor(value(n, "module", s)) for n, s in shapes.items()}
    torch.save(
        state(module=module, param_shapes=[dict(g) for g in groups], dp_world_size=ranks, **options),
        tag / "mp_rank_00_model_states.pt",
    )
    flat: dict[str, list[Any]] = {kind: [] for kind in MOMENTS}
    ends = []
    for number, group in enumerate(groups):
        for kind in MOMENTS:
            parts = []
            for i, (n, s) in enumerate(group.items()):
                parts += [value(n, kind, s).reshape(-1), np.full(pads[number][i] if pads else 0, -2, np.float32)]
            joined = np.concatenate(parts)
            size = math.ceil(joined.size / (align * ranks)) * align
            flat[kind].append(np.concatenate([joined, np.full(size * ranks - joined.size, -1, np.float32)]).reshape(ranks, size))
        ends.append(joined.size)
    for r in range(ranks):
        held = [max(0, min(len(f[r]), end - r * len(f[r]))) for f, end in zip(flat["master"], ends, strict=True)]
        inner = {
            "zero_stage": stage,
            "single_partition_of_fp32_groups": [tensor(f[r][:n]) for f, n in zip(flat["master"], held, strict=True)],
            "base_optimizer_state": {
                "state": {
                    g: {"step": torch.tensor(float(step)), **{k: tensor(flat[k][g][r]) for k in MOMENTS[1:]}}
                    for g in range(len(groups))
                },
                "param_groups": [{"lr": 0.1, "params": [g]} for g in range(len(groups))],
            },
            "group_paddings": [len(f[r]) - n for f, n in zip(flat["master"], held, strict=True)],
            "partition_count": [ranks] * len(groups),
            **({"param_alignment_paddings": pads} if pads else {}),
        }
        torch.save({"optimizer_state_dict": inner}, tag / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt")
    return root


def value(name: str, kind: str, shape: tuple[int, ...]) -> Any:
    return ramp(f"{name}/{kind}", shape)


SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": (2, 2)}


# --- golden folders ---------------------------------------------------------------------------------------------------


def test_golden_folders_are_there() -> None:
    kinds = ("moe", "pp2", "tp2", "ucp", "z0", "z2", "z3")
    assert all(any(name.startswith(kind) for name in GOLDEN) for kind in kinds)


@pytest.mark.parametrize("name", GOLDEN)
def test_weights_masters_moments_and_buffers_are_equal_bit_for_bit(name: str) -> None:
    golden = read_safetensors(GOLDEN[name] / "golden.safetensors")
    checkpoint = format_of(name)().open(open_folder(GOLDEN[name]))
    masters = format_of(name)(weights="master").open(open_folder(GOLDEN[name]))
    wrong, names = [], set()
    for key, expected in golden.items():
        kind, _, weight = key.partition("/")
        if kind in ("exp_avg", "exp_avg_sq"):
            found = [checkpoint.optimizer[kind][weight]]
        elif kind == "fp32":
            names.add(weight)
            found = [masters[weight]] + ([checkpoint[weight]] if f"param/{weight}" not in golden else [])
            found += [checkpoint.optimizer["master"][weight]] if "master" in checkpoint.optimizer else []
        else:
            names.add(weight)
            found = [checkpoint[weight]]
            if found[0].dtype != expected.dtype:  # ZeRO-3 stores trained weights as fp32 masters alone
                assert name.startswith(("z3", "ucp-z3"))
                expected = golden[f"fp32/{weight}"]
        wrong += [key for array in found if not is_equal(array, expected)]
    assert wrong == []
    assert set(checkpoint) == set(masters) == names
    assert not checkpoint.unavailable
    assert checkpoint.problems == ()
    assert checkpoint.meta["step"] == 2
    assert checkpoint.meta["optimizer"]["step"] == 2


@pytest.mark.parametrize("name", [n for n in GOLDEN if ("tied" in n and not n.startswith("pp")) or n == "z0-fp32-dp2"])
def test_a_tied_weight_is_an_alias(name: str) -> None:
    checkpoint = format_of(name)().open(open_folder(GOLDEN[name]))
    assert checkpoint.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in set(checkpoint)
    assert checkpoint["lm_head.weight"] is checkpoint["model.embed_tokens.weight"]


def test_no_other_formats_folder_is_recognised() -> None:
    roots = [HERE / "golden", SHARED]
    folders = {f for root in roots for f in (*root.glob("*/*"), *root.glob("*/*/checkpoint")) if f.is_dir()}
    assert folders
    for folder in sorted(folders):
        is_ours, is_universal = folder.parent.name == "deepspeed", folder.name.startswith("ucp")
        assert DeepSpeed().matches(open_folder(folder)) == (is_ours and not is_universal), folder
        assert Universal().matches(open_folder(folder)) == (is_ours and is_universal), folder


def test_open_finds_the_format_of_a_root_and_of_a_tag() -> None:
    root = GOLDEN["z3-bf16-dp2-frozen"]
    assert meshload.open(root).format == meshload.open(root / "global_step2").format == "deepspeed"
    root = GOLDEN["ucp-tp2-dp1-z1-bf16"]
    assert meshload.open(root).format == meshload.open(root / "global_step2_universal").format == "universal"


def torch_leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Go through the tensors of a tree that torch has read, by their keys."""
    if isinstance(tree, torch.Tensor):
        dtype = {torch.bfloat16: ml_dtypes.bfloat16}.get(tree.dtype)
        flat = tree.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        kind = np.dtype(dtype or str(tree.dtype).removeprefix("torch."))
        yield path, raw.view(kind).reshape(tuple(tree.shape)) if flat.numel() else np.zeros(tuple(tree.shape), kind)
    elif isinstance(tree, dict):
        for key, found in tree.items():
            yield from torch_leaves(found, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for i, found in enumerate(tree):
            yield from torch_leaves(found, f"{path}.{i}")


class _Suite(FormatSuite):
    folders: Sequence[str]

    @pytest.fixture(autouse=True)
    def _classes(self, deepspeed_classes: None) -> None:
        pass

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        for name in self.folders:
            expected: Values = {}
            (tag,) = (d for d in GOLDEN[name].iterdir() if d.is_dir())
            for file in sorted(tag.rglob("*.pt")):
                stem = str(file.relative_to(tag)).removesuffix(".pt")
                expected |= dict(torch_leaves(torch.load(file, weights_only=False), stem))
            yield GOLDEN[name], expected


class TestDeepSpeed(_Suite):
    format = DeepSpeed()
    folders = ("z3-bf16-dp2-frozen", "pp2-dp2-bf16opt-tied", "moe-ep2-dp2-z2-fp32", "z0-fp32-dp2")


class TestUniversal(_Suite):
    format = Universal()
    folders = ("ucp-tp2-dp1-z1-bf16",)


# --- ranks ------------------------------------------------------------------------------------------------------------

MESHES = ("tp=2", "pp=2", "tp=2,pp=2", "dp=3", "pp=2,tp=2,dp=2")
LLAMAS = [n for n in GOLDEN if n.startswith(("z0", "z1", "z2", "z3", "ucp-z"))]
"""Those whose names are Hugging Face's; the others have no table."""


def config_of(whole: Mapping[str, Any], is_tied: bool) -> dict[str, Any]:
    """Return the config of a model of which tests know its heads."""
    (vocab, hidden), ffn = whole["model.embed_tokens.weight"].shape, whole["model.layers.0.mlp.gate_proj.weight"].shape[0]
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "head_dim": hidden // 4, "intermediate_size": ffn}
    layers = 1 + max(int(n.split(".")[2]) for n in whole if n.startswith("model.layers."))
    family = "qwen2" if "model.layers.0.self_attn.q_proj.bias" in whole else "llama"
    return {**TINY, **sizes, "model_type": family, "num_hidden_layers": layers, "tie_word_embeddings": is_tied}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LLAMAS)
def test_each_rank_gets_what_it_gets_of_a_plain_checkpoint(name: str, mesh: str, tmp_path: Path) -> None:
    source = format_of(name)()
    whole = source.open(open_folder(GOLDEN[name]))
    config = config_of(whole, bool(whole.aliases))
    kinds: dict[str, Mapping[str, Any]] = {"weights": {n: a for n, a in whole.items() if n != "model.position_scale"}}
    kinds |= whole.optimizer
    files = {
        kind: meshload.open(write_checkpoint(tmp_path / kind, {n: np.asarray(a) for n, a in arrays.items()}, config=config))
        for kind, arrays in kinds.items()
    }
    plain = replace(files.pop("weights"), optimizer={kind: dict(of) for kind, of in files.items()})
    found = meshload.open(GOLDEN[name], format=source, config=config)
    want = {"layout": Layout.default(dp="cut"), "into": "numpy", "mesh": mesh, "optimizer": len(kinds) > 1}
    for rank in range(math.prod(int(axis.split("=")[1]) for axis in mesh.split(","))):
        mine = meshload.restore(found, rank=rank, exclude="*position_scale", **want)
        expected = meshload.restore(plain, rank=rank, **want)
        assert set(mine) == set(expected)
        assert [n for n in expected if not same_bits(mine[n], expected[n])] == []


def test_a_rank_that_wants_an_eighth_reads_an_eighth(tmp_path: Path) -> None:
    shapes = {f"layers.{i}.weight": (64, 16) for i in range(8)}
    path = ZERO3.write_zero3(tmp_path, shapes, 16)
    total = sum(math.prod(s) * 4 for s in shapes.values())
    for rank in range(8):
        plan = meshload.plan(path, mesh="dp=8", rank=rank, layout={"*": ("dp",)}, into="numpy")
        assert plan.read_bytes == total // 8
        checkpoint, log = counted(meshload.open(path))
        mine = meshload.restore(checkpoint, mesh="dp=8", rank=rank, layout={"*": ("dp",)}, into="numpy")
        assert log.nbytes == total // 8
        assert all(same_bits(mine[n], ZERO3.value(shapes, n, "master")[rank * 8 : rank * 8 + 8]) for n in shapes)


def test_b36_as_many_ranks_as_saved_read_each_its_own_file(tmp_path: Path) -> None:
    shapes = {"a": (8, 6), "b": (4,), "c": (12, 2)}
    path = ZERO3.write_zero3(tmp_path, shapes, 4)
    for rank in range(4):
        checkpoint, log = counted(meshload.open(path))
        mine = meshload.restore(checkpoint, mesh="dp=4", rank=rank, layout={"*": ("dp",)}, into="numpy", optimizer=True)
        assert {file for file, _, _ in log.reads} == {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"}
        rows = shapes["a"][0] // 4
        assert same_bits(mine["optimizer.exp_avg.a"], ZERO3.value(shapes, "a", "exp_avg")[rank * rows :][:rows])


def test_b36_a_rank_opens_only_the_files_that_hold_its_elements(tmp_path: Path) -> None:
    """Rows of 5 elements over 4 ranks: DeepSpeed's partitions end inside rows, so that a rank may need its neighbour's file."""
    shapes, ranks = {"a": (9, 5), "b": (6, 5)}, 4
    path = ZERO3.write_zero3(tmp_path, shapes, ranks)
    files = []
    for rank in range(ranks):
        needed = set()
        for rows, columns in shapes.values():
            cut, share = math.ceil(rows / ranks), math.ceil(rows * columns / ranks)
            needed |= {
                e // share for row in range(rows)[rank * cut : (rank + 1) * cut] for e in range(row * columns, (row + 1) * columns)
            }
        checkpoint, log = counted(meshload.open(path))
        mine = meshload.restore(checkpoint, mesh="dp=4", rank=rank, layout={"*": ("dp",)}, into="numpy")
        assert {f for f, _, _ in log.reads} == {f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in needed}
        assert all(
            same_bits(v, ZERO3.value(shapes, n, "master")[rank * math.ceil(shapes[n][0] / 4) :][: len(v)]) for n, v in mine.items()
        )
        files.append(needed)
    assert [len(f) for f in files] == [2, 2, 2, 0]


@pytest.mark.parametrize("stage", [2, 3])
def test_files_are_not_read_whole(stage: int, tmp_path: Path) -> None:
    shapes = {f"w{i}": (256, 1024) for i in range(2)}
    path = ZERO3.write_zero3(tmp_path, shapes, 2) if stage == 3 else write_zero12(tmp_path, [shapes], 2, stage=2)
    stored = sum(file.stat().st_size for file in path.rglob("*.pt"))
    folder = CountedFolder(open_folder(path))
    checkpoint = DeepSpeed().open(folder)
    assert 0 < folder.log.nbytes < stored / 20
    before = folder.log.nbytes
    np.asarray(checkpoint.optimizer["exp_avg"]["w1"][7])
    assert folder.log.nbytes - before == 1024 * 4


def test_sixty_four_ranks_open_in_two_seconds(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, {f"layers.{i}.weight": (64, 8) for i in range(300)}, 64)
    times = []
    for _ in range(2):
        start = time.process_time()  # of the wall's, other processes take their part
        checkpoint = opened(path)
        times.append(time.process_time() - start)
    assert sum(len(a.pieces) for a in checkpoint.values()) == 64 * 300
    assert min(times) < 2


# --- ZeRO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 11])
def test_b31_partitions_of_any_world_give_exact_moments(ranks: int, tmp_path: Path) -> None:
    three = ZERO3.write_zero3(tmp_path / "3", SHAPES, ranks, sub_groups=2)
    one = write_zero12(tmp_path / "1", [SHAPES], ranks)
    for path, truth in ((three, lambda n, kind: ZERO3.value(SHAPES, n, kind)), (one, lambda n, kind: value(n, kind, SHAPES[n]))):
        checkpoint = opened(path)
        for kind in MOMENTS:
            assert all(is_equal(checkpoint.optimizer[kind][n], truth(n, kind)) for n in SHAPES), (path, kind)
        assert checkpoint.meta["optimizer"]["step"] == checkpoint.meta["step"]
        assert checkpoint.problems == ()


@pytest.mark.usefixtures("deepspeed_classes")
@pytest.mark.parametrize("ranks", [2, 6])
@pytest.mark.parametrize("source", ["zero1", "zero3"])
def test_b31_partitions_are_written_for_another_world_with_its_own_padding(source: str, ranks: int, tmp_path: Path) -> None:
    if source == "zero3":
        src = opened(ZERO3.write_zero3(tmp_path / "src", SHAPES, 4))
    else:
        src = opened(write_zero12(tmp_path / "src", [SHAPES], 4))  # whose moments are padded by -1
    order = DeepSpeed(stage=1) if source == "zero1" else DeepSpeed(stage=1, parameters=list(SHAPES))
    to = replace(order, step=src.meta["optimizer"]["step"])
    with_groups = replace(src, meta={**src.meta, "optimizer": {**src.meta["optimizer"], "param_groups": [{"lr": 0.1}]}})
    meshload.convert(with_groups, tmp_path / "out", to=to, mesh=f"dp={ranks}", layout="replicated", optimizer=True)
    size = {2: 14, 6: 6}[ranks]  # 26 elements, padded to a multiple of 2 ranks
    flat = {k: np.concatenate([np.asarray(src.optimizer[k][n]).reshape(-1) for n in SHAPES]) for k in MOMENTS}
    tag = next((tmp_path / "out").glob("global_step*"))
    assert len(list(tag.glob("zero_pp_rank_*_optim_states.pt"))) == ranks
    for r in range(ranks):
        inner = torch.load(tag / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", weights_only=False)["optimizer_state_dict"]
        kept = max(0, min(size, 26 - r * size))
        assert inner["group_paddings"] == [size - kept]
        assert is_equal(inner["single_partition_of_fp32_groups"][0], flat["master"][r * size :][:kept])
        for kind in MOMENTS[1:]:
            found = inner["base_optimizer_state"]["state"][0][kind].numpy()
            assert is_equal(found, np.concatenate([flat[kind][r * size :][:kept], np.zeros(size - kept, np.float32)]))
        assert inner["base_optimizer_state"]["state"][0]["step"].item() == src.meta["optimizer"]["step"]
        assert inner["base_optimizer_state"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
        assert inner["partition_count"] == [ranks]
    back = opened(tmp_path / "out")
    assert back.problems == ()
    assert all(is_equal(back.optimizer[k][n], np.asarray(src.optimizer[k][n])) for k in MOMENTS for n in SHAPES)
    assert all(is_equal(back[n], np.asarray(src[n])) for n in SHAPES)


def test_what_is_written_for_the_same_world_is_what_deepspeed_wrote(tmp_path: Path) -> None:
    src = opened(GOLDEN["z2-fp32-dp2-frozen"])
    meshload.convert(src, tmp_path / "out", to="deepspeed", mesh="dp=2", layout="replicated", optimizer=True)
    one, other = (opened(path).with_names("stored") for path in (tmp_path / "out", GOLDEN["z2-fp32-dp2-frozen"]))
    assert {n for n in other if "frozen_param_fragments" not in n} == set(one)
    assert [n for n in one if not is_equal(one[n], np.asarray(other[n]))] == []
    told = [opened(path).meta["optimizer"] for path in (tmp_path / "out", GOLDEN["z2-fp32-dp2-frozen"])]
    left = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")  # to the engine
    assert told[0] == {k: v for k, v in told[1].items() if k not in left}
    files = [sorted(f.name for f in path.rglob("*.pt")) for path in (tmp_path / "out", GOLDEN["z2-fp32-dp2-frozen"])]
    assert files[0] == files[1]


def test_several_groups_are_written_as_they_were(tmp_path: Path) -> None:
    groups: list[Shapes] = [{"a": (3, 5), "c": (2, 2)}, {"b": (1,)}]
    src = opened(write_zero12(tmp_path / "src", groups, 3))
    meshload.convert(src, tmp_path / "out", to="deepspeed", mesh="dp=2", layout="replicated", optimizer=True)
    back = opened(tmp_path / "out")
    assert back.meta["groups"] == [["a", "c"], ["b"]]
    assert all(is_equal(back.optimizer[k][n], np.asarray(src.optimizer[k][n])) for k in MOMENTS for n in ("a", "b", "c"))


def test_what_cannot_be_written_as_deepspeeds_own_files_is_refused(tmp_path: Path) -> None:
    src = opened(write_zero12(tmp_path / "src", [SHAPES], 2))
    plain = write_checkpoint(tmp_path / "hf", {n: value(n, "module", s) for n, s in SHAPES.items()})

    def refused(why: str, source: Any = src, to: Any = "deepspeed", **options: Any) -> None:
        with pytest.raises(meshload.LayoutError, match=why):
            meshload.convert(source, tmp_path / "out", to=to, layout="replicated", **options)

    refused("cp=2: only pp, tp, dp and ep can be written as DeepSpeed's own files", mesh="cp=2,dp=2")
    refused("3 parameters by their order, and the source does not tell it; say it with DeepSpeed", plain, mesh="dp=2")
    refused("what is given lacks c", plain, DeepSpeed(parameters=["a", "b"]), mesh="dp=2")
    dealt = replace(src, meta={**src.meta, "ds_config": {"zero_optimization": {"round_robin_gradients": True}}})
    refused("the source does not tell it", dealt, mesh="dp=2")
    untold = replace(src, meta={**src.meta, "optimizer": {"step": 3}})
    refused("hyperparameters of their 1 groups from the file, and the source tells those of 0", untold, mesh="dp=2", optimizer=True)
    refused("weights='master' says what is read", src, DeepSpeed(weights="master"), mesh="dp=2")
    with pytest.raises(meshload.LayoutError, match=r"stage=4: 1, 2 or 3 was expected"):
        DeepSpeed(stage=4)
    assert not (tmp_path / "out").exists()
    meshload.convert(plain, tmp_path / "out", to=DeepSpeed(parameters=["b", "a", "c"]), mesh="dp=2", layout="replicated")
    back = opened(tmp_path / "out")
    assert back.meta["groups"] == [["b", "a", "c"]]
    for n in SHAPES:
        assert is_equal(back[n], value(n, "module", SHAPES[n]))
        assert is_equal(back.optimizer["master"][n], value(n, "module", SHAPES[n]))


def test_a_config_beside_latest_tells_the_family(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["z2-fp32-dp2-frozen"], tmp_path / "copy")
    (path / "config.json").write_text(json.dumps(TINY))
    mine = meshload.restore(path, mesh="tp=2", rank=1, into="numpy", exclude="model.position_scale")
    whole = np.asarray(opened(path)["model.layers.0.self_attn.q_proj.weight"])
    assert same_bits(mine["model.layers.0.self_attn.q_proj.weight"], whole[16:])
    (path / "config.json").write_text("{")
    assert [p.file for p in opened(path).problems] == ["config.json"]


def test_tensors_that_no_parameter_has_a_part_of_are_no_moments(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [SHAPES], 2)

    def more(tree: Any) -> None:
        of = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        of |= {"worker_error": torch.zeros(99), "coefficients": torch.zeros(3), "row": torch.zeros(2, 2), "other": torch.zeros(99)}

    for r in range(2):
        changed(path / "global_step3" / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", more)
    checkpoint = opened(path)
    assert set(checkpoint.optimizer) == {*MOMENTS, "other"}
    assert checkpoint.meta["optimizer"]["others"] == ["coefficients", "row"]
    assert not checkpoint.unavailable


def test_several_groups_paddings_between_parameters_and_ranks_of_padding_alone(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [{"a": (3, 5), "c": (2, 2)}, {"b": (1,)}], 5, pads=[[1, 0], [0]], stage=2)
    checkpoint = opened(path)
    assert all(is_equal(checkpoint.optimizer["master"][n], value(n, "master", s)) for n, s in {**SHAPES, "b": (1,)}.items())
    assert list(opened(path, weights="master")) == ["a", "c", "b"]


def test_numbers_of_ranks_are_no_text(tmp_path: Path) -> None:
    checkpoint = opened(ZERO3.write_zero3(tmp_path, {"a": (24, 2)}, 12))
    assert is_equal(checkpoint["a"], ZERO3.value({"a": (24, 2)}, "a", "master"))


def test_b35_zero3_weights_are_the_masters_and_have_the_shapes_of_param_shapes(tmp_path: Path) -> None:
    checkpoint = opened(ZERO3.write_zero3(tmp_path, SHAPES, 2))
    assert {n: a.shape for n, a in checkpoint.items()} == SHAPES
    assert {a.dtype for a in checkpoint.values()} == {np.dtype(np.float32)}


def test_b32_b33_frozen_weights_of_zero3_keep_their_dtype_and_lose_the_padding() -> None:
    checkpoint = opened(GOLDEN["z3-bf16-dp2-frozen"])
    frozen = checkpoint["model.embed_tokens.weight"]
    assert (frozen.dtype, frozen.shape) == (np.dtype(ml_dtypes.bfloat16), (97, 32))
    assert "model.embed_tokens.weight" not in checkpoint.optimizer["master"]
    tensors = meshload.restore(checkpoint, mesh={}, into="numpy", dtype="float32", layout="replicated")
    assert {a.dtype for a in tensors.values()} == {np.dtype(np.float32)}


def test_b12_a_shared_parameter_is_tied_to_the_one_that_is_named(tmp_path: Path) -> None:
    shapes = {"a": (4, 2), "b": (3,), "wte": (6, 2)}
    module = {n: torch.zeros(0) for n in (*shapes, "lm_head")}
    path = ZERO3.write_zero3(tmp_path, shapes, 2, shared_params={"lm_head": "wte"}, module=module)
    checkpoint = opened(path)
    assert checkpoint.aliases == {"lm_head": "wte"}
    assert is_equal(checkpoint["lm_head"], ZERO3.value(shapes, "wte", "master"))
    assert all(is_equal(checkpoint[n], ZERO3.value(shapes, n, "master")) for n in "ab")


def test_a_tied_name_is_not_guessed_where_rank_0_is_lost(tmp_path: Path) -> None:
    shapes = {"a": (4, 2), "wte": (6, 2)}
    path = ZERO3.write_zero3(tmp_path, shapes, 2, module={n: torch.zeros(0) for n in (*shapes, "lm_head")})
    assert "rank 0" in opened(path).unavailable["lm_head"]


def test_fragments_are_followed_where_there_are_no_shapes(deepspeed_classes: None, tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["z2-bf16-dp2-roundrobin-aligned"], tmp_path / "copy")
    expected = opened(path)
    file = path / "global_step2" / "mp_rank_00_model_states.pt"
    changed(file, lambda tree: tree.update(param_shapes=None, optimizer={"clip_grad": 1.0}))  # as bf16 pipelines without ZeRO
    found = opened(path)
    assert found.problems == ()
    for kind, arrays in expected.optimizer.items():
        assert set(found.optimizer[kind]) == set(arrays)
        assert all(is_equal(found.optimizer[kind][n], np.asarray(a)) for n, a in arrays.items())


def test_fragments_that_contradict_the_shapes_are_an_error_that_names_the_file(deepspeed_classes: None, tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["z2-bf16-dp2-roundrobin-aligned"], tmp_path / "copy")
    file = path / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def moved(tree: Any) -> None:
        first = next(iter(tree["optimizer_state_dict"]["param_slice_mappings"][0].values()))
        first.start += 1

    changed(file, moved)
    checkpoint = opened(path)
    (reason,) = {why for name, why in checkpoint.unavailable.items() if name.startswith("optimizer.master.")}
    assert file.name in reason
    assert "contradict" in reason
    assert set(checkpoint) == set(opened(GOLDEN["z2-bf16-dp2-roundrobin-aligned"]))


def test_old_files_have_one_dict_of_shapes_beside_the_optimizer(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [SHAPES], 2)
    tag = path / "global_step3"
    changed(tag / "mp_rank_00_model_states.pt", lambda tree: tree.update(param_shapes=None))
    for r in range(2):
        file = tag / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        changed(file, lambda tree: tree.update(param_shapes=SHAPES))
        changed(file, lambda tree: tree["optimizer_state_dict"].update(partition_count=2))
        file.rename(tag / f"zero_pp_rank_{r}_mp_rank_00optim_states.pt")
    checkpoint = opened(path)
    assert all(is_equal(checkpoint.optimizer["exp_avg"][n], value(n, "exp_avg", s)) for n, s in SHAPES.items())


def test_sub_groups_of_fewer_dicts_follow_each_other(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2, sub_groups=3)
    for r in range(2):
        changed(path / "global_step2" / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt", lambda t: t.update(param_shapes=[SHAPES]))
    checkpoint = opened(path)
    assert all(is_equal(checkpoint[n], ZERO3.value(SHAPES, n, "master")) for n in SHAPES)


def test_elastic_states_have_no_padding(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [SHAPES], 3)

    def elastic(tree: Any) -> None:
        inner = tree["optimizer_state_dict"]
        pad = inner["group_paddings"][0]
        of = inner["base_optimizer_state"]["state"][0]
        inner["base_optimizer_state"] = [{k: v[: len(v) - pad] if v.ndim else v for k, v in of.items()}]

    for r in range(3):
        changed(path / "global_step3" / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", elastic)
    checkpoint = opened(path)
    assert all(is_equal(checkpoint.optimizer["exp_avg_sq"][n], value(n, "exp_avg_sq", s)) for n, s in SHAPES.items())


def test_a_group_without_a_gradient_has_no_moments(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [{"a": (3, 5)}, {"b": (7,)}], 2)
    for r in range(2):
        file = path / "global_step3" / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        changed(file, lambda tree: tree["optimizer_state_dict"]["base_optimizer_state"]["state"].pop(1) and None)
    checkpoint = opened(path)
    assert set(checkpoint.optimizer["exp_avg"]) == {"a"}
    assert set(checkpoint.optimizer["master"]) == {"a", "b"}
    assert not checkpoint.unavailable


def test_wrappers_are_stripped_from_weights_and_moments_alike(tmp_path: Path) -> None:
    checkpoint = meshload.open(write_zero12(tmp_path, [{"module._orig_mod.a": (2,), "module.b": (3,)}], 2))
    assert set(checkpoint) == set(checkpoint.optimizer["exp_avg"]) == {"a", "b"}
    assert checkpoint.meta["stripped"]["module._orig_mod.a"] == "a"


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1), (7, 0, 9, 2), (64,), ()])
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_partitions_hold_each_element_once(sizes: tuple[int, ...], ranks: int) -> None:
    shapes = {str(i): (n,) for i, n in enumerate(sizes)}
    size = math.ceil(max(sum(sizes), 1) / (2 * ranks)) * 2
    for made in (consecutive(shapes, [0] * len(sizes), size, ranks), each_alone(shapes, ranks)):
        for i, n in enumerate(sizes):
            rows = slice(int(made.row[i]), int(made.row[i + 1]))
            spans = [range(a, a + c) for a, c in zip(made.at[rows].tolist(), made.count[rows].tolist(), strict=True)]
            assert [e for span in spans for e in span] == list(range(n))
        runs = zip(made.rank.tolist(), made.local.tolist(), made.count.tolist(), strict=True)
        taken = [(r, e) for r, a, c in runs for e in range(a, a + c)]
        assert len(set(taken)) == len(taken) == sum(sizes)


# --- an optimizer without ZeRO ----------------------------------------------------------------------------------------


def test_states_without_names_in_several_groups_need_the_names(tmp_path: Path) -> None:
    module = {"a": tensor(ramp("a", (2, 2))), "b": tensor(ramp("b", (3,))), "c": tensor(ramp("c", (2, 2)))}
    moments = {
        i: {"step": torch.tensor(4.0), "exp_avg": tensor(ramp(f"m{n}", tuple(module[n].shape)))} for i, n in enumerate("cab")
    }
    optimizer = {"state": moments, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
    tag = write_states(tmp_path / "tag", [state(module=module, optimizer=optimizer)])
    checkpoint = opened(tag)
    assert not checkpoint.optimizer
    assert "parameters=" in checkpoint.problems[0].text
    checkpoint = opened(tag, parameters=["c", "a", "b"])
    assert all(is_equal(checkpoint.optimizer["exp_avg"][n], ramp(f"m{n}", a.shape)) for n, a in checkpoint.items())
    assert checkpoint.meta["optimizer"]["step"] == 4


def test_states_whose_shapes_do_not_fit_the_order_are_left_out(tmp_path: Path) -> None:
    module = {"a": tensor(ramp("a", (2, 2))), "b": tensor(ramp("b", (3,)))}
    moments = {i: {"exp_avg": torch.zeros(tuple(module[n].shape))} for i, n in enumerate("ba")}
    optimizer = {"state": moments, "param_groups": [{"params": [0, 1]}]}
    checkpoint = opened(write_states(tmp_path / "tag", [state(module=module, optimizer=optimizer)]))
    assert not checkpoint.optimizer
    assert "(3,)" in checkpoint.problems[0].text


@pytest.mark.parametrize("is_flat", [True, False])
def test_sixteen_bit_runs_without_zero_keep_masters(is_flat: bool, tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    module = {n: tensor(ramp(n, s, np.float16)) for n, s in shapes.items()}
    kinds = {k: {n: value(n, k, s) for n, s in shapes.items()} for k in MOMENTS}
    if is_flat:
        flat = {k: tensor(np.concatenate([v.reshape(-1) for v in of.values()])) for k, of in kinds.items()}
        inner = {"state": {0: {"step": 3, **{k: flat[k] for k in MOMENTS[1:]}}}, "param_groups": [{"params": [0]}]}
        optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": [flat["master"]]}
    else:
        of = {i: {k: tensor(kinds[k][n]) for k in MOMENTS[1:]} for i, n in enumerate(shapes)}
        inner = {"state": of, "param_groups": [{"params": [0, 1]}]}
        optimizer = {"optimizer_state_dict": inner, "fp32_groups": [[tensor(v) for v in kinds["master"].values()]]}
    checkpoint = opened(write_states(tmp_path / "tag", [state(module=module, optimizer=optimizer)]))
    assert all(is_equal(checkpoint[n], ramp(n, s, np.float16)) for n, s in shapes.items())
    assert all(is_equal(checkpoint.optimizer[k][n], v) for k, of in kinds.items() for n, v in of.items())


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def info(**rules: Any) -> dict[str, Any]:
    return {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4, **rules}}


FUSED = np.arange(9 * 4, dtype=np.float32).reshape(9, 4)
UNEVEN = [{"qkv": FUSED[[0, 1, 2, 3, 6, 7]]}, {"qkv": FUSED[[4, 5, 8]]}]
WIDTHS = [[4, 2], [2, 1]]


def sub_parameters(sizes: Any, **more: Any) -> dict[str, Any]:
    return info(parameter_with_sub_params=[{"patterns": ["^qkv$"], "shape": [sizes, 4], "partition_dim": 0}], **more)


def test_b03_uneven_shards_of_sub_parameters_are_joined_by_their_recorded_widths(tmp_path: Path) -> None:
    tag = write_tp(tmp_path / "tag", UNEVEN, **sub_parameters((6, 3), sub_param_shard_widths={"^qkv$": WIDTHS}))
    assert is_equal(opened(tag)["qkv"], FUSED)


def test_b03_sub_parameters_without_widths_are_not_cut_evenly(tmp_path: Path) -> None:
    tag = write_tp(tmp_path / "tag", UNEVEN, **sub_parameters((6, 3)))
    assert "sub_param_shard_widths" in opened(tag).unavailable["qkv"]
    older = sub_parameters((6, 3), universal_checkpoint_version=0.3)
    assert "3 cannot be cut evenly over 2 ranks" in opened(write_tp(tmp_path / "old", UNEVEN, **older)).unavailable["qkv"]


@pytest.mark.parametrize("widths", [[[4, 2], [1, 2]], [[4, 2]], [[4, 2], [2, 2]], [[5, 1], [2, 1]], "none", [[4, -2], [2, 1]]])
def test_widths_that_do_not_fit_are_refused(widths: Any, tmp_path: Path) -> None:
    tag = write_tp(tmp_path / "tag", UNEVEN, **sub_parameters((6, 3), sub_param_shard_widths={"^qkv$": widths}))
    assert "qkv" in opened(tag).unavailable


def test_a_count_of_sub_parameters_is_of_equal_ones(tmp_path: Path) -> None:
    whole = np.arange(12 * 2, dtype=np.float32).reshape(12, 2)
    shards = [{"qkv": whole[[0, 1, 4, 5, 8, 9]]}, {"qkv": whole[[2, 3, 6, 7, 10, 11]]}]
    tag = write_tp(tmp_path / "tag", shards, **sub_parameters(3, universal_checkpoint_version=0.2))
    assert is_equal(opened(tag)["qkv"], whole)


HEADS, HEAD = 8, 2


def fused(order: str, ranks: int) -> list[Any]:
    """Return the shards of a fused weight of 8 heads in one of three orders; rows tell q, k or v, head and place."""
    row = {(part, h, i): 100 * p + 10 * h + i for p, part in enumerate("qkv") for h in range(HEADS) for i in range(HEAD)}
    mine = HEADS // ranks
    shards = []
    for r in range(ranks):
        heads = range(r * mine, (r + 1) * mine)
        if order == "heads":
            rows = [row[p, h, i] for h in heads for p in "qkv" for i in range(HEAD)]
        elif order == "parts":
            rows = [row[p, h, i] for p in "qkv" for h in heads for i in range(HEAD)]
        else:  # CodeGen: four groups, in each q, v, k of its heads
            groups = [heads[i : i + 2] for i in range(0, mine, 2)]
            rows = [row[p, h, i] for g in groups for p in "qvk" for h in g for i in range(HEAD)]
        shards.append({"attention.qkv": np.asarray(rows, np.float32)[:, None] + np.asarray([0, 0.5], np.float32)})
    return shards


def unfused(array: Any, order: str) -> tuple[Any, Any, Any]:
    if order == "heads":
        split = array.split(0, (HEADS, 3, HEAD))
        return tuple(np.asarray(split[:, p].merge(0, 2)) for p in range(3))  # type: ignore[return-value]  # three
    if order == "parts":
        return tuple(np.asarray(array[p * 16 : (p + 1) * 16]) for p in range(3))  # type: ignore[return-value]  # three
    split = array.split(0, (4, 3, 2, HEAD))
    return tuple(np.asarray(split[:, p].merge(0, 3)) for p in (0, 2, 1))  # type: ignore[return-value]  # three


@pytest.mark.parametrize("ranks", [2, 4])
def test_b17_three_orders_of_a_fused_weight_give_the_same_parts_once_declared(ranks: int, tmp_path: Path) -> None:
    found = []
    for order, cut in (("heads", 0), ("parts", Cut(0, parts=3)), ("groups", 0)):
        tag = write_tp(tmp_path / order, fused(order, ranks))
        assert "cut=" in opened(tag).unavailable["attention.qkv"]
        found.append(unfused(opened(tag, cut={"*.qkv": cut})["attention.qkv"], order))
    rows = np.asarray([10 * h + i for h in range(HEADS) for i in range(HEAD)], np.float32)
    for parts in found:
        for p, part in enumerate(parts):
            assert same_bits(part, rows[:, None] + np.float32(100 * p) + np.asarray([0, 0.5], np.float32))


def test_copies_on_tensor_parallel_ranks_are_one_array_and_can_be_compared(tmp_path: Path) -> None:
    norm = np.arange(8, dtype=np.float32)
    rules = info(tp_replicated_parameter_patterns=["norm"])
    tag = write_tp(tmp_path / "equal", [{"norm.weight": norm}] * 8, **rules)
    assert opened(tag)["norm.weight"].shape == (8,)
    assert meshload.plan(tag, mesh={}, layout="replicated", into="numpy").read_bytes == norm.nbytes
    assert meshload.check(tag, copies=True).ok
    tag = write_tp(tmp_path / "apart", [{"norm.weight": norm}, {"norm.weight": norm + 2**-6}], **rules)
    (problem,) = meshload.check(tag, copies=True).problems
    assert (problem.array, "0.015625" in problem.text) == ("norm.weight", True)
    assert is_equal(opened(tag)["norm.weight"], norm)


def test_addends_are_summed_and_averages_averaged(tmp_path: Path) -> None:
    shards = [{"bias": np.asarray([1, 2], np.float32)}, {"bias": np.asarray([3, 6], np.float32)}]
    tag = write_tp(tmp_path / "tag", shards)
    assert is_equal(opened(tag, cut={"bias": "sum"})["bias"], np.asarray([4, 8], np.float32))
    assert is_equal(opened(tag, cut={"bias": "mean"})["bias"], np.asarray([2, 4], np.float32))
    tag = write_tp(tmp_path / "told", shards, **info(parameter_to_average_patterns=["bias"]))
    assert meshload.check(tag, copies=True).ok
    assert is_equal(opened(tag)["bias"], np.asarray([2, 4], np.float32))


NEOX = {"args": {"model_parallel_size": 2, "make_vocab_size_divisible_by": 1, "hidden_size": 4}}


def test_gpt_neox_sums_row_parallel_biases_and_its_moments_do_not(tmp_path: Path) -> None:
    root = tmp_path / "run"
    names = {"2.attention.dense.bias": (4,)}
    for mp in range(2):
        write_zero12(tmp_path / str(mp), [names], 1, **NEOX, mp_world_size=2)
        for file in sorted((tmp_path / str(mp) / "global_step3").iterdir()):
            changed(file, lambda tree, mp=mp: _plus(tree, mp))
            root.mkdir(exist_ok=True)
            file.rename(root / file.name.replace("mp_rank_00", f"mp_rank_{mp:02d}"))
    checkpoint = opened(root)
    assert checkpoint.meta["rules"] == "gpt_neox"
    (name,) = names
    for kind, found in (("module", checkpoint[name]), ("master", checkpoint.optimizer["master"][name])):
        assert is_equal(found, 2 * value(name, kind, (4,)) + 1)
    assert is_equal(checkpoint.optimizer["exp_avg"][name], value(name, "exp_avg", (4,)))


def _plus(tree: Any, number: float) -> None:
    """Add a number to all vectors of a tree."""
    for key, found in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(found, torch.Tensor) and found.ndim:
            tree[key] = found + number
        elif isinstance(found, (dict, list)):
            _plus(found, number)


def test_b19_gpt_neox_does_not_tell_the_order_of_grouped_queries(tmp_path: Path) -> None:
    def shards(rows: int) -> list[Values]:
        return [{"2.attention.query_key_value.weight": np.zeros((rows, 4), np.float32)}] * 2

    assert opened(write_tp(tmp_path / "all", shards(6), **NEOX))["2.attention.query_key_value.weight"].shape == (12, 4)
    assert "2.attention.query_key_value.weight" in opened(write_tp(tmp_path / "few", shards(4), **NEOX)).unavailable


def test_megatron_names_are_followed_where_the_client_says_so(tmp_path: Path) -> None:
    rows_of = [np.asarray([[r], [r], [10 + r], [10 + r]], np.float32) for r in range(2)]
    gate_up = [{"layers.0.mlp.dense_h_to_4h.weight": rows} for rows in rows_of]
    for gated in (True, False):
        client = {"checkpoint_version": 3.0, "args": argparse.Namespace(swiglu=gated)}
        found = opened(write_tp(tmp_path / str(gated), gate_up, **client))["layers.0.mlp.dense_h_to_4h.weight"]
        rows = [0, 0, 1, 1, 10, 10, 11, 11] if gated else [0, 0, 10, 10, 1, 1, 11, 11]
        assert np.asarray(found)[:, 0].tolist() == rows
    unsaid = opened(write_tp(tmp_path / "unsaid", gate_up, checkpoint_version=3.0, args=argparse.Namespace(layers=1)))
    assert "layers.0.mlp.dense_h_to_4h.weight" in unsaid.unavailable
    old = opened(write_tp(tmp_path / "old", gate_up, checkpoint_version=0, args=argparse.Namespace(swiglu=True)))
    assert "cut=" in old.unavailable["layers.0.mlp.dense_h_to_4h.weight"]


def test_a_vocabulary_loses_its_padding_and_row_parallel_weights_join_on_dim_1(tmp_path: Path) -> None:
    words, row = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8, dtype=np.float32).reshape(2, 4)
    shards = [{"embed.weight": words[4 * r : 4 * r + 4], "o.weight": row[:, 2 * r : 2 * r + 2]} for r in range(2)]
    rules = info(
        vocabulary_parameter_patterns=["embed"], original_vocab_size=7, parameter_with_row_parallelism_patterns=[r"o\.weight"]
    )
    checkpoint = opened(write_tp(tmp_path / "tag", shards, **rules))
    assert is_equal(checkpoint["embed.weight"], words[:7])
    assert is_equal(checkpoint["o.weight"], row)
    rules = info(vocabulary_parameter_patterns=["embed"], original_vocab_size=9)
    assert "9 rows" in opened(write_tp(tmp_path / "large", shards, **rules)).unavailable["embed.weight"]


def test_a_buffer_is_each_ranks_own_copy(tmp_path: Path) -> None:
    tag = write_tp(tmp_path / "tag", [{"scale": np.ones(3, np.float32)}] * 2, buffer_names=["scale"], **info())
    assert opened(tag)["scale"].shape == (3,)


def affine(logical: Sequence[int], *ranks: tuple[Sequence[int], Sequence[Mapping[str, Any]]], version: int = 1) -> dict[str, Any]:
    of = {r: {"shard_shape": list(shape), "pieces": list(pieces)} for r, (shape, pieces) in enumerate(ranks)}
    return info(affine_map={"version": version, "params": {"^w$": {"logical_shape": list(logical), "ranks": of}}})


def piece(shape: Sequence[int], source: Any, dest: Any, ranks: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"shape": list(shape), "source": source, "dest": dest, "locations": list(ranks), **more}


def segmented(**more: Any) -> list[tuple[Sequence[int], list[dict[str, Any]]]]:
    """Rows 0 to 3 are shared out, row 4 is on both ranks."""
    return [
        (
            (3, 2),
            [piece((2, 2), [4 * r, [2, 1]], [0, [2, 1]], [r], **more), piece((1, 2), [8, [2, 1]], [4, [2, 1]], [0, 1], **more)],
        )
        for r in range(2)
    ]


def test_affine_maps_tell_where_boxes_lie(tmp_path: Path) -> None:
    whole = np.arange(10, dtype=np.float32).reshape(5, 2)
    shards = [{"w": whole[[0, 1, 4]]}, {"w": whole[[2, 3, 4]]}]
    assert is_equal(opened(write_tp(tmp_path / "tag", shards, **affine((5, 2), *segmented())))["w"], whole)
    scaled = [{"w": s["w"] * 2} for s in shards]
    assert is_equal(opened(write_tp(tmp_path / "scaled", scaled, **affine((5, 2), *segmented(scale=2.0))))["w"], whole)


@pytest.mark.parametrize(
    "rules",
    [
        affine((5, 2), *segmented(), version=2),
        affine((6, 2), *segmented()),
        affine((5, 2), *[((3, 2), [piece((2, 2), [0, [4, 1]], [0, [2, 1]], [0])])] * 2),
        affine((5, 2), *[((3, 2), [piece((2, 2), [10**9, [2, 1]], [0, [2, 1]], [0])])] * 2),
        affine((5, 2), *[((3, 2), [{"shape": "no"}])] * 2),
        affine((10**18, 10**18), *segmented()),
        info(affine_map={"params": {"^w$": None}}),
    ],
)
def test_an_affine_map_that_cannot_be_followed_is_refused(rules: Any, tmp_path: Path) -> None:
    shards = [{"w": np.zeros((3, 2), np.float32)}] * 2
    assert "affine map" in opened(write_tp(tmp_path / "tag", shards, **rules)).unavailable["w"]


def test_what_autotp_cannot_tell_is_refused_with_its_reason(tmp_path: Path) -> None:
    rules = info(autotp_unsupported_parameter_patterns={"^w$": "interleaved"})
    shards = [{"w": np.zeros(2, np.float32)}] * 2
    assert "interleaved" in opened(write_tp(tmp_path / "tag", shards, **rules)).unavailable["w"]
    assert opened(write_tp(tmp_path / "said", shards, **rules), cut={"w": 0})["w"].shape == (4,)


def test_a_lost_rank_takes_its_shards_and_leaves_the_copies(tmp_path: Path) -> None:
    shards = [{"w": np.full((2, 2), r, np.float32), "norm": np.ones(2, np.float32)} for r in range(4)]
    tag = write_tp(tmp_path / "tag", shards, **info(tp_replicated_parameter_patterns=["norm"]))
    (tag / "mp_rank_02_model_states.pt").unlink()
    checkpoint = opened(tag)
    assert is_equal(checkpoint["norm"], np.ones(2, np.float32))
    assert "mp_rank_02_model_states.pt" in checkpoint.unavailable["w"]
    with pytest.raises(MissingArray, match="mp_rank_02_model_states"):
        meshload.restore(tag, mesh={}, layout="replicated", into="numpy")


@pytest.mark.parametrize("pattern", ["(a+)+$", "a*a*a*a*a*b", "[", "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)", 3, "a" * 2000])
def test_regular_expressions_that_take_ages_or_are_none_are_refused(pattern: Any) -> None:
    with pytest.raises(Refused):
        matches(pattern, "a" * 100)


# --- pipelines and experts --------------------------------------------------------------------------------------------


def write_pipeline(tag: Path, layers: Mapping[int, Mapping[str, Any]], **more: Any) -> Path:
    write_states(tag, [state(module=None, **more)])
    for number, found in layers.items():
        torch.save({k: tensor(v) for k, v in found.items()}, tag / f"layer_{number:02d}-model_states.pt")
    return tag


@pytest.mark.parametrize(("count", "stages", "expected"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])])
def test_b06_layers_of_a_pipeline_go_to_other_stages(count: int, stages: int, expected: list[int], tmp_path: Path) -> None:
    config = {**TINY, "num_hidden_layers": count, "tie_word_embeddings": False}
    golden = read_safetensors(GOLDEN["z2-fp32-dp2-frozen"] / "golden.safetensors")
    names = {k: k.partition("/")[2].removeprefix("model.layers.1.") for k in golden if "/model.layers.1." in k}
    block = {name: golden[k] for k, name in names.items()}
    layers = {i + 2: {n: np.full_like(v, i) for n, v in block.items()} for i in range(count)}
    shapes: dict[int, tuple[int, ...]] = {0: (101, 32), count + 3: (32,), count + 4: (101, 32)}
    ends = {number: {"weight": np.ones(shape, np.float32)} for number, shape in shapes.items()}
    stored = opened(write_pipeline(tmp_path / "tag", {**ends, **layers}))
    assert len(stored) == count * len(block) + 3
    end_of = {0: "model.embed_tokens", count + 3: "model.norm", count + 4: "lm_head"}
    renamed = {}
    for name, array in stored.items():
        number, _, key = name.partition(".")
        renamed[f"{end_of.get(int(number), f'model.layers.{int(number) - 2}')}.{key}"] = array
    model = Checkpoint(renamed, "deepspeed", config=config)
    held = []
    for rank in range(stages):
        mine = meshload.restore(model, mesh={"pp": stages}, rank=rank, into="numpy")
        numbers = sorted({int(n.split(".")[2]) for n in mine if ".layers." in n})
        assert all((mine[f"model.layers.{i}.mlp.up_proj.weight"] == i).all() for i in numbers)
        held.append(numbers)
    assert [len(n) for n in held] == expected
    assert [i for n in held for i in n] == list(range(count))


def test_which_layer_holds_a_tie_is_asked_for_where_several_could(tmp_path: Path) -> None:
    embed = {0: {"weight": np.zeros((3, 2), np.float32)}, 4: {"weight": np.ones((3, 2), np.float32)}}
    layers = {**embed, 1: {"norm": np.ones(2, np.float32)}}
    shapes = {"tied_modules.embed.weight": (3, 2), "1.norm": (2,)}
    tag = write_pipeline(tmp_path / "tag", layers, param_shapes=[shapes])
    checkpoint = opened(tag)
    assert "tied={'embed'" in checkpoint.unavailable["tied_modules.embed.weight"]
    checkpoint = opened(tag, tied={"embed": 4})
    assert is_equal(checkpoint["tied_modules.embed.weight"], embed[4]["weight"])
    assert set(checkpoint) == {"tied_modules.embed.weight", "1.norm", "0.weight"}


def test_a_tie_to_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    tag = write_pipeline(tmp_path / "tag", {0: {"weight": np.zeros((3, 2), np.float32)}})
    assert set(opened(tag)) == {"0.weight"}
    assert set(opened(tag, tied={"embed": 0})) == {"tied_modules.embed.weight"}
    with pytest.raises(LayoutError, match="has no layer 7"):
        opened(tag, tied={"embed": 7})


def test_model_states_that_a_pipeline_lost_are_told_by_fragments_and_layers(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["pp2-dp2-bf16opt-tied"], tmp_path / "copy")
    expected = opened(path)
    (path / "global_step2" / "mp_rank_01_model_states.pt").unlink()
    found = opened(path / "global_step2")
    assert not found.unavailable
    assert set(found.optimizer["exp_avg"]) == set(expected.optimizer["exp_avg"])
    assert all(is_equal(a, np.asarray(expected.optimizer["exp_avg"][n])) for n, a in found.optimizer["exp_avg"].items())


def test_a_lost_layer_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["pp2-dp2-bf16opt-tied"], tmp_path / "copy")
    (path / "global_step2" / "layer_02-model_states.pt").unlink()
    checkpoint = opened(path / "global_step2")
    lost = {n for n in checkpoint.unavailable if not n.startswith("optimizer.")}
    assert lost == {n for n in checkpoint.optimizer["master"] if n.startswith("2.")}
    assert "layer_02-model_states.pt" in checkpoint.unavailable["2.mlp.up_proj.weight"]
    assert "weights='master'" in checkpoint.unavailable["2.mlp.up_proj.weight"]
    assert not opened(path / "global_step2", weights="master").unavailable
    with pytest.raises(FormatError, match="layer_02-model_states"):
        opened(path)


def test_layers_of_tensor_parallel_pipelines_are_joined(tmp_path: Path) -> None:
    tag = write_states(tmp_path / "tag", [state(module=None, **NEOX)] * 4)
    word = np.arange(8, dtype=np.float32).reshape(4, 2)
    for t in range(2):
        torch.save({"word_embeddings.weight": tensor(word[2 * t : 2 * t + 2])}, tag / f"layer_00-model_{t:02d}-model_states.pt")
        torch.save({"attention.dense.bias": torch.ones(2)}, tag / f"layer_10-model_{t:02d}-model_states.pt")
    checkpoint = opened(tag)
    assert checkpoint.meta["ranks"] == {"pp": 2, "tp": 2, "dp": 1}
    assert is_equal(checkpoint["0.word_embeddings.weight"], word)
    assert is_equal(checkpoint["10.attention.dense.bias"], np.full(2, 2, np.float32))


def test_a_lost_expert_is_named_and_others_stay(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["moe-ep2-dp2-z2-fp32"], tmp_path / "copy")
    (path / "global_step2" / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    checkpoint = opened(path / "global_step2")
    prefix = "model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts"
    lost = {n for n in checkpoint.unavailable if not n.startswith("optimizer.")}
    assert lost == {f"{prefix}.3.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert f"{prefix}.2.up_proj.weight" in checkpoint


def test_more_ranks_than_expert_parallel_ones_take_turns(tmp_path: Path) -> None:
    prefix = "moe.deepspeed_experts"
    names = {f"{prefix}.0.w": (6,)}
    for before in (False, True):
        root = tmp_path / str(before)
        whole = {e: value(str(e), "w", (6,)) for e in range(2)}
        rank_of = (lambda e, d: e * 2 + d) if before else (lambda e, d: d * 2 + e)
        tag = write_states(
            root / "tag",
            [
                state(
                    param_shapes=[names], dp_world_size=4, ds_config={"use_data_before_expert_parallelism": before}, num_experts=[2]
                )
            ],
        )
        for e in range(2):
            torch.save({f"{prefix}.{e}.w": tensor(whole[e])}, tag / f"layer_0_expert_{e}_mp_rank_00_model_states.pt")
            for d in range(2):
                flat = np.concatenate([whole[e], [-1, -1]]).astype(np.float32)[4 * d : 4 * d + 4]
                inner = {
                    "zero_stage": 2,
                    "single_partition_of_fp32_groups": [tensor(flat[: 4 - 2 * d])],
                    "base_optimizer_state": {
                        "state": {0: {"exp_avg": tensor(flat)}},
                        "param_groups": [{"params": [0], "moe": True}],
                    },
                    "group_paddings": [2 * d],
                    "partition_count": [2],
                }
                torch.save({"optimizer_state_dict": inner}, tag / f"zero_pp_rank_{rank_of(e, d)}_mp_rank_00_optim_states.pt")
        checkpoint = opened(tag)
        for e in range(2):
            assert is_equal(checkpoint[f"{prefix}.{e}.w"], whole[e])
            assert is_equal(checkpoint.optimizer["exp_avg"][f"{prefix}.{e}.w"], whole[e])


# --- unfinished and damaged -------------------------------------------------------------------------------------------


def test_b51_an_unfinished_tag_that_latest_names_is_refused_and_the_last_complete_one_told(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        ZERO3.write_zero3(tmp_path, SHAPES, 2, step=step)
    (tmp_path / "latest").write_text("global_step10\n")
    assert opened(tmp_path).meta["step"] == 10
    lost = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "global_step10" / lost).unlink()
    with pytest.raises(FormatError, match=rf"global_step10, which is not complete: {lost}.*last complete one is global_step9"):
        meshload.open(tmp_path)
    assert opened(tmp_path, tag="global_step9").meta["tag"] == "global_step9"
    as_it_is = opened(tmp_path, tag="global_step10")
    assert lost in as_it_is.unavailable["a"]
    assert meshload.open(tmp_path / "global_step10").unavailable.keys() == as_it_is.unavailable.keys()


def test_latest_that_names_nothing_is_refused(tmp_path: Path) -> None:
    ZERO3.write_zero3(tmp_path, SHAPES, 2)
    (tmp_path / "latest").write_text("global_step77")
    with pytest.raises(FormatError, match=r"global_step77.*last complete one is global_step2"):
        meshload.open(tmp_path, format="deepspeed")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(FormatError):
        opened(tmp_path)


def test_without_latest_the_only_tag_is_opened_and_several_are_asked_for(tmp_path: Path) -> None:
    ZERO3.write_zero3(tmp_path, SHAPES, 2)
    (tmp_path / "latest").unlink()
    assert meshload.open(tmp_path).meta["tag"] == "global_step2"
    ZERO3.write_zero3(tmp_path, SHAPES, 2, step=5)
    (tmp_path / "latest").unlink()
    with pytest.raises(FormatError, match=r"global_step2, global_step5.*tag="):
        meshload.open(tmp_path)


def test_a_lost_partition_leaves_the_weights_and_names_the_moments(tmp_path: Path) -> None:
    path = write_zero12(tmp_path, [{"a": (8,), "b": (8,)}], 2)
    (path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    tag = path / "global_step3"
    checkpoint = opened(tag)
    assert set(checkpoint) == {"a", "b"}
    assert set(checkpoint.optimizer["exp_avg"]) == {"a"}
    assert set(checkpoint.unavailable) == {f"optimizer.{kind}.b" for kind in MOMENTS}
    assert set(meshload.restore(tag, mesh={}, layout="replicated", into="numpy")) == {"a", "b"}
    with pytest.raises(MissingArray, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt: not there"):
        meshload.restore(tag, mesh={}, layout="replicated", into="numpy", optimizer=True)


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2)
    file = path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    with pytest.raises(FormatError, match=file.name):
        opened(path)
    assert file.name in opened(path / "global_step2").unavailable["a"]
    assert not meshload.check(path / "global_step2").ok


def test_files_of_ranks_that_the_save_does_not_have_are_not_used(tmp_path: Path) -> None:
    ZERO3.write_zero3(tmp_path, SHAPES, 4)
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2)
    checkpoint = opened(path)
    assert is_equal(checkpoint["a"], ZERO3.value(SHAPES, "a", "master"))
    assert len(checkpoint.meta["unused"]) == 4
    assert all("not of this save" in p.text for p in checkpoint.problems)


def test_files_of_different_saves_are_refused(tmp_path: Path) -> None:
    path = write_zero12(tmp_path / "one", [SHAPES], 2, step=3)
    other = write_zero12(tmp_path / "other", [SHAPES], 2, step=4)
    name = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, path / name)
    with pytest.raises(FormatError, match=r"different saves: step 3.*step 4"):
        opened(path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 1)
    file = path / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(file, file.with_name(f"bf16_{file.name}"))
    with pytest.raises(FormatError, match="same rank"):
        opened(path)


def test_without_model_states_nothing_can_be_found(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2)
    for file in (path / "global_step2").glob("*model_states.pt"):
        file.unlink()
    with pytest.raises(FormatError, match="no file of model states"):
        opened(path / "global_step2")


def test_b34_shared_state_comes_from_any_rank_that_is_there(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 3)
    (path / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    checkpoint = opened(path / "global_step2")
    assert all(is_equal(checkpoint[n], ZERO3.value(SHAPES, n, "master")) for n in SHAPES)


@pytest.mark.parametrize(
    "shapes",
    [
        [{"a": (3, -5)}],
        [{"a": (1 << 40, 1 << 40)}],
        [{"a": (2,) * 40}],
        [{"a": "no"}],
        [{5: (2,)}],
        "no",
        [3],
    ],
)
def test_shapes_that_could_not_be_are_refused(shapes: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="param_shapes"):
        opened(ZERO3.write_zero3(tmp_path, SHAPES, 2, param_shapes=shapes))


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.update(fp32_flat_groups=[torch.zeros(3)]),
        lambda inner: inner.update(fp32_flat_groups=[torch.zeros(40, 2)]),
        lambda inner: inner.update(fp32_flat_groups=[torch.zeros(80)[::2]]),
        lambda inner: inner.update(fp32_flat_groups=["no"]),
        lambda inner: inner.update(fp32_flat_groups=[]),
        lambda inner: inner.update(fp32_flat_groups=[torch.zeros(40, dtype=torch.float16)]),
        lambda inner: inner.pop("fp32_flat_groups") and None,
    ],
)
def test_partitions_that_do_not_fit_make_their_weights_unavailable(change: Any, tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2)
    changed(path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda t: change(t["optimizer_state_dict"]))
    checkpoint = opened(path)
    assert set(checkpoint.unavailable) >= set(SHAPES)
    assert not len(checkpoint)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("dp_world_size", 10**7),
        ("mp_world_size", 10**7),
        ("dp_world_size", -1),
        ("dp_world_size", "two"),
        ("module", 3),
        ("module", {"a": {"b": 1}}),
        ("buffer_names", {"a": 1}),
        ("shared_params", {"x": "y", "y": "x"}),
        ("shared_params", 7),
        ("frozen_param_shapes", {"f": (2,)}),
        ("num_experts", [10**9, "x"]),
        ("ds_config", None),
        ("checkpoint_parallel_dimensions", {"tp_degree": 7}),
        ("universal_checkpoint_info", []),
        ("args", [1]),
    ],
)
def test_states_of_strangers_end_in_arrays_or_a_meshload_error(key: str, found: Any, tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path, SHAPES, 2, **{key: found})
    try:
        checkpoint = opened(path / "global_step2")
    except MeshloadError:
        return
    for array in checkpoint.values():
        np.asarray(array)


def test_zero3_of_tensor_parallel_ranks_is_joined_and_a_lost_rank_named(tmp_path: Path) -> None:
    """AutoTP with ZeRO-3: each tensor-parallel rank partitions its own shards."""
    shapes, root = {"w": (5, 2), "norm": (3,)}, tmp_path / "run"
    root.mkdir()
    rules = info(tp_replicated_parameter_patterns=["norm"])
    for t in range(2):
        tag = ZERO3.write_zero3(tmp_path / str(t), shapes, 2, **rules, mp_world_size=2) / "global_step2"
        for file in sorted(tag.iterdir()):
            if t == 1 and "optim" in file.name:
                changed(file, lambda tree: _plus(tree, 500))
            file.rename(root / file.name.replace("mp_rank_00", f"mp_rank_{t:02d}"))
    whole = np.concatenate([ZERO3.value(shapes, "w", "master") + 500 * t for t in range(2)])
    checkpoint = opened(root)
    assert is_equal(checkpoint["w"], whole)
    assert is_equal(checkpoint["norm"], ZERO3.value(shapes, "norm", "master"))
    for d in range(2):
        (root / f"zero_pp_rank_{d}_mp_rank_01_model_states.pt").unlink()
    checkpoint = opened(root)
    assert set(checkpoint) == {"norm"}
    assert "mp_rank_01_model_states.pt" in checkpoint.unavailable["w"]


def test_mics_has_copies_of_the_first_shard_group(tmp_path: Path) -> None:
    path = ZERO3.write_zero3(tmp_path / "two", SHAPES, 2, dp_world_size=4)
    tag = path / "global_step2"
    for file in sorted(tag.glob("zero_pp_rank_*")):
        rank = int(file.name.split("_")[3])
        shutil.copy(file, tag / file.name.replace(f"rank_{rank}_", f"rank_{rank + 2}_", 1))
    assert is_equal(opened(path)["a"], ZERO3.value(SHAPES, "a", "master"))
    for file in tag.glob("*model_states.pt"):
        changed(file, lambda tree: tree.update(dp_world_size=3))
    with pytest.raises(FormatError, match="3 ranks cannot share 2 partitions"):
        opened(tag)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "fp32"},
        {"cut": "meta"},
        {"cut": {"a": "max"}},
        {"cut": {"a": -1}},
        {"cut": [0]},
        {"tied": {"embed": "0"}},
        {"parameters": "abc"},
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any) -> None:
    with pytest.raises(LayoutError):
        DeepSpeed(**options)


# --- universal --------------------------------------------------------------------------------------------------------


def write_flat_universal(root: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int = 2) -> Path:
    """Write what the converter makes of ZeRO-3: bare flat tensors, whose shapes are in the model states alone."""
    ZERO3.write_zero3(root, shapes, ranks)
    tag = (root / "global_step2").rename(root / "global_step2_universal")
    (root / "latest_universal").write_text(tag.name)
    (tag / "zero").mkdir()
    first = torch.load(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    torch.save({**first, "param_groups": [{"lr": 0.1}]}, tag / "zero" / "optimizer_state.pt")
    for file in tag.glob("*optim_states.pt"):
        file.unlink()
    for name in shapes:
        (tag / "zero" / name).mkdir()
        for kind in MOMENTS:
            flat = tensor(ZERO3.value(shapes, name, kind).reshape(-1))
            torch.save(flat, tag / "zero" / name / f"{'fp32' if kind == 'master' else kind}.pt")
    return root


def test_flat_universal_files_take_their_shapes_from_any_model_states(tmp_path: Path) -> None:
    path = write_flat_universal(tmp_path, SHAPES)
    (path / "global_step2_universal" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    checkpoint = meshload.open(path)
    assert (checkpoint.format, checkpoint.meta["optimizer"]["step"], checkpoint.meta["zero_stage"]) == ("universal", 2, 3)
    for kind in MOMENTS:
        assert all(is_equal(checkpoint.optimizer[kind][n], ZERO3.value(SHAPES, n, kind)) for n in SHAPES)
    for file in path.glob("*/*model_states.pt"):
        file.unlink()
    assert "shape is told in the model states alone" in universal(path).unavailable["a"]


def test_a_lost_file_of_a_universal_parameter_is_named(tmp_path: Path) -> None:
    path = write_flat_universal(tmp_path, SHAPES)
    zero = path / "global_step2_universal" / "zero"
    (zero / "a" / "exp_avg.pt").write_bytes(b"PK\x03\x04")
    shutil.rmtree(zero / "b")
    changed(zero / "c" / "fp32.pt", lambda flat: flat[:3].clone())
    checkpoint = universal(path)
    assert set(checkpoint) == {"a"}
    assert "zero/b/fp32.pt" in checkpoint.unavailable["b"]
    assert "(3,)" in checkpoint.unavailable["c"]
    assert "zero/a/exp_avg.pt" in checkpoint.unavailable["optimizer.exp_avg.a"]
    assert not meshload.check(path).ok


def test_a_root_with_a_tag_of_its_own_is_deepspeeds(tmp_path: Path) -> None:
    write_flat_universal(tmp_path, SHAPES)
    ZERO3.write_zero3(tmp_path, SHAPES, 2, step=7)
    assert meshload.open(tmp_path).meta["tag"] == "global_step7"
    assert meshload.open(tmp_path, format="universal").meta["tag"] == "global_step2_universal"


def test_latest_universal_that_names_nothing_is_refused(tmp_path: Path) -> None:
    path = write_flat_universal(tmp_path, SHAPES)
    (path / "latest_universal").write_text("gone")
    with pytest.raises(FormatError, match=r"'gone'.*global_step2_universal"):
        meshload.open(path)


def test_universal_masters_are_there_where_the_module_is_lost(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN["ucp-tp2-dp1-z1-bf16"], tmp_path / "copy")
    (path / "global_step2_universal" / "mp_rank_01_model_states.pt").unlink()
    name = "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight"
    checkpoint = universal(path)
    assert "mp_rank_01_model_states.pt" in checkpoint.unavailable[name]
    assert "weights='master'" in checkpoint.unavailable[name]
    assert universal(path, weights="master")[name].shape == (48, 32)
