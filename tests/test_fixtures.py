"""Every checkpoint that a framework wrote, whole and as every rank of other meshes, under its native names, bit for bit.

The slices are cut by NumPy from the golden file; what `hf` shows on these meshes is tested beside each format.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.testing import read_safetensors, same_bits

HERE = Path(__file__).resolve().parent
ROOTS = (HERE.parent.parent / "shared" / "fixtures", HERE / "golden")
KINDS = ("exp_avg", "exp_avg_sq", "master")

MESHES: dict[str, dict[str, int]] = {
    "whole": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2,pp2": {"tp": 2, "pp": 2},
    "dp3": {"dp": 3},
    "pp2,tp2,dp2": {"pp": 2, "tp": 2, "dp": 2},
}

Values = Any
Named = Mapping[str, Values]


@dataclass(frozen=True)
class Fixture:
    """A checkpoint, and the truth: what its golden file says of the names that it is to have."""

    path: Path
    truth: Callable[[], dict[str, Values]]
    """Names, moments as `optimizer.<kind>.<name>`, to values."""
    config: Mapping[str, Any] | None = None
    """What the checkpoint itself does not tell of its sizes."""


def folders(kind: str) -> dict[str, Path]:
    """Return the fixtures of a format, those beside the project first."""
    found = {d.name: d for root in reversed(ROOTS) for d in sorted(root.glob(f"{kind}/*"))}
    return {name: d for name, d in found.items() if (d / "golden.safetensors").exists() or (d / "fast_llm").exists()}


def moments(golden: Named, spelled: Callable[[str], str]) -> dict[str, Values]:
    """Return a golden file's moments and masters, whose keys begin with a kind's spelling."""
    found = {}
    for kind in KINDS:
        head = spelled(kind)
        found |= {f"optimizer.{kind}.{key.removeprefix(head)}": v for key, v in golden.items() if key.startswith(head)}
    return found


def deepspeed(folder: Path) -> dict[str, Values]:
    golden = read_safetensors(folder / "golden.safetensors")
    found = moments(golden, lambda kind: f"{kind.replace('master', 'fp32')}/")
    weights = {key.partition("/")[2]: v for key, v in golden.items() if key.startswith(("param/", "buffer/"))}
    masters = {n.removeprefix("optimizer.master."): v for n, v in found.items() if n.startswith("optimizer.master.")}
    if folder.name.startswith("z0"):  # without ZeRO, fp32 weights are their own masters
        found = {n: v for n, v in found.items() if not n.startswith("optimizer.master.")}
    if folder.name.startswith(("z3", "ucp-z3")):  # trained weights are stored as masters alone
        return {**weights, **masters, **found}
    return {**masters, **weights, **found}


def megatron(folder: Path) -> dict[str, Values]:
    golden = read_safetensors(folder / "golden.safetensors")
    weights = {key.removeprefix("param/"): v for key, v in golden.items() if key.startswith("param/")}
    found = {**weights, **moments(golden, lambda kind: f"{kind.replace('master', 'fp32')}/")}
    if "distopt" in folder.name and not any(key.startswith("fp32/") for key in golden):  # it has fp32 weights once more
        found |= {f"optimizer.master.{name}": v for name, v in weights.items()}
    return found


def fast_llm(folder: Path) -> dict[str, Values]:
    found = {}
    golden = folder.parent / "golden.safetensors"
    files = [golden] if golden.exists() else sorted((folder.parent / "fast_llm").glob("*.safetensors"))
    for key, values in (item for file in files for item in read_safetensors(file).items()):
        name, _, state = key.rpartition("/")
        kind = {"weights": "master", "exp_avgs": "exp_avg", "exp_avgs_sq": "exp_avg_sq"}[state]
        found[f"optimizer.{kind}.{name}"] = values
        if state == "weights":
            found[name] = values
    return found


def flexgen(folder: Path) -> dict[str, Values]:
    golden = read_safetensors(folder.parent / "golden.safetensors")
    return {
        key.removeprefix("model.").replace("final_layer_norm.", "layer_norm.", "layers" not in key): v for key, v in golden.items()
    }


def dcp(folder: Path) -> dict[str, Values]:
    """Return a DCP save's tensors: moments by the name of the weight that they belong to."""
    golden = read_safetensors(folder.parent / "golden.safetensors")
    states = [key for key in golden if key.startswith(("optim.", "optimizer.")) or key == "train_state.step"]
    found = {key: v for key, v in golden.items() if key not in states}
    for key in states:
        stem, _, kind = key.partition(".state.")[2].rpartition(".")
        if kind in KINDS:
            found[f"optimizer.{kind}.{stem if stem in found else f'model.{stem}'}"] = golden[key]
    return found


def torch_or_hf(folder: Path) -> dict[str, Values]:
    golden = read_safetensors(folder.parent / "golden.safetensors")
    if folder.parent.name == "gpt_neox_fused_qkv":
        return {key.replace("lm_head", "embed_out"): v for key, v in golden.items()}
    return {key: v for name, values in golden.items() for key, v in on_disk(name, values).items()}


def on_disk(name: str, values: Values) -> dict[str, Values]:
    """Return what a live name of transformers 5 is on disk: fused experts are there one by one."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): values}
    head = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
    if name.endswith("down_proj"):
        return {f"{head}.{e}.w2.weight": w for e, w in enumerate(values)}
    return {
        f"{head}.{e}.{n}.weight": part for e, w in enumerate(values) for n, part in zip(("w1", "w3"), np.split(w, 2), strict=True)
    }


def fixtures() -> dict[str, Fixture]:
    found: dict[str, Fixture] = {}

    def add(kind: str, name: str, path: Path, truth: Callable[[Path], dict[str, Values]], **config: Any) -> None:
        found[f"{kind} {name}"] = Fixture(path, lambda: truth(path), config or None)

    for name, folder in folders("deepspeed").items():
        add("deepspeed", name, folder, deepspeed)
    for name, folder in folders("megatron").items():
        add("megatron", name, folder, megatron)
    for name, folder in folders("fast_llm").items():
        add("fast_llm", name, folder / "distributed", fast_llm)
        if name == "qwen2_tied_pp2_dp2":  # one is enough of the format that safetensors read
            add("fast_llm", f"{name} by names", folder / "fast_llm", fast_llm)
    for name, folder in folders("flexgen").items():
        add("flexgen", name, folder / "opt-tiny-np", flexgen, num_attention_heads=4)
    for name, folder in folders("dcp").items():
        if name != "strided":  # whole numbers, on one mesh axis
            add("dcp", name, folder / "checkpoint", dcp)
    for kind in ("hf", "torch"):
        for name, folder in folders(kind).items():
            add("hf", name, folder / "checkpoint", torch_or_hf)
    return found


FIXTURES = fixtures()


def axes_of(shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[Any, ...]:
    """Return which mesh axes cut which dim: tp the last, the others the first."""
    if len(shape) < 2:
        return (tuple(mesh),)[: len(shape)]
    return (tuple(a for a in mesh if a != "tp"), *(None,) * (len(shape) - 2), "tp" if "tp" in mesh else None)


def part(full: Values, mesh: Mapping[str, int], rank: int) -> Values:
    """Cut by hand: each axis cuts what the one before it left, into parts of the same size but for the last."""
    at = dict(zip(mesh, np.unravel_index(rank, tuple(mesh.values())) if mesh else (), strict=True))
    for dim, axes in enumerate(axes_of(full.shape, mesh)):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            size = math.ceil(full.shape[dim] / mesh[axis])
            full = full[(slice(None),) * dim + (slice(int(at[axis]) * size, (int(at[axis]) + 1) * size),)]
    return full


def test_the_fixtures_of_every_format_are_there() -> None:
    assert {name.split()[0] for name in FIXTURES} == {"deepspeed", "megatron", "fast_llm", "flexgen", "dcp", "hf"}


@pytest.mark.parametrize("name", FIXTURES)
def test_every_rank_of_every_mesh_has_its_slices_bit_for_bit(name: str) -> None:
    truth = FIXTURES[name].truth()
    checkpoint = meshload.open(FIXTURES[name].path, config=FIXTURES[name].config)
    optimizer = any(n.startswith("optimizer.") for n in truth)
    assert bool(checkpoint.optimizer) == optimizer
    tied = {a: n for a, n in checkpoint.aliases.items() if a not in truth}
    truth |= {a: truth[n] for a, n in tied.items()}
    heads = [f"optimizer.{kind}." for kind in checkpoint.optimizer]
    same = {f"{head}{a}": truth[f"{head}{n}"] for a, n in tied.items() for head in heads if f"{head}{n}" in truth}
    shapes = {n.split(".", 2)[2] if n.startswith("optimizer.") else n: v.shape for n, v in truth.items()}
    for mesh in MESHES.values():
        layout = {n: axes_of(shape, mesh) for n, shape in shapes.items()}
        for rank in range(math.prod(mesh.values())):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", meshload.MeshloadWarning)
                found = meshload.restore(
                    checkpoint, mesh=mesh, rank=rank, layout=layout, names="native", into="numpy", optimizer=optimizer
                )
            assert set(found) - set(same) == set(truth), (mesh, rank)
            expected = {n: v for n, v in {**truth, **same}.items() if n in found}  # a table gives a tied name its moments, too
            assert [n for n, v in expected.items() if not same_bits(found[n], part(v, mesh, rank))] == [], (mesh, rank)
