"""DeepSpeed's engine goes on, on another topology, from what meshload made of its checkpoint, as if nothing had been in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload import Layout
from meshload_adapters.formats.deepspeed import DeepSpeed
from meshload_adapters.formats.universal import Universal

PROGRAM = Path(__file__).with_name("runs_deepspeed.py")
ROOT = PROGRAM.parent.parent.parent


def launched(folder: Path, ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Let some processes perform runs, and return what their ranks saw, together."""
    told = [{"out": str(folder / "seen" / name), **run} for name, run in runs.items()]
    (folder / "runs.json").write_text(json.dumps(told))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]
    done = subprocess.run(
        [*command, str(folder / "runs.json")], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-12000:]
    return {name: seen(folder / "seen" / name) for name in runs}


def seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as arrays:
            for name in arrays:
                values = arrays[name]
                assert np.array_equal(found.setdefault(name, values), values), f"{name}: ranks disagree"
    return found


def states(found: dict[str, Any], when: str) -> dict[str, Any]:
    return {n.removeprefix(f"{when}/"): v for n, v in found.items() if n.startswith(f"{when}/")}


NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
CUT = {"*.dense.weight": 1, "*.linear2.weight": 1, "*.query_key_value.*": 0, "*.linear1.*": 0}
CUT = {**CUT, "*.word_embeddings.*": 0, "*.final_linear.*": 0, "*": None}
"""How the ranks of `runs_deepspeed.py` share a GPT-NeoX: their checkpoint does not say it."""

TIED_NEOX = {**NEOX, "tie_word_embeddings": True}
LLAMA_CONFIG = {**NEOX, "model_type": "llama", "num_key_value_heads": 2}
COPIES = {"*.dense.bias": None, "*.linear2.bias": None}


@dataclass(frozen=True)
class Journey:
    """A run that is broken off twice, goes on after a conversion, and is compared with one that is not."""

    first: Mapping[str, Any]
    """What its two processes train, who save after three steps ..."""
    there: Mapping[str, Any]
    """... how their checkpoint is converted ..."""
    second: Mapping[str, Any]
    """... for a process that takes a step and saves ..."""
    back: Mapping[str, Any]
    """... and whose checkpoint is converted ..."""
    third: Mapping[str, Any]
    """... for two processes that take another step."""
    near: float = 0
    """How far losses, weights and moments may be off after a step, relative to the largest of their array. It is 0 where engines do
    the same sums: the gradients of two micro-batches are added by one rank, or by two."""
    ranks: int = 2
    """How many processes go on in the end."""


LLAMA = {"model": "llama"}
SUMS = 1e-5
"""Where sums have another order: in ZeRO-3's linear layers, of a tie over stages, of rows over tensor-parallel ranks."""
PIPELINE = DeepSpeed(stage=1, pipeline=True, cut=COPIES)
TIED = {"model": "neox", "tied": True}

JOURNEYS = {
    "from ZeRO-1 to one rank, and ZeRO-3 of two": Journey(
        {**LLAMA, "grouped": True},
        {"to": DeepSpeed(stage=1), "mesh": "dp=1"},
        {**LLAMA, "grouped": True},
        {"to": DeepSpeed(stage=3, sub_group_size=300), "mesh": "dp=2"},
        {**LLAMA, "grouped": True, "stage": 3, "zero": {"sub_group_size": 300}},
        SUMS,
    ),
    "from ZeRO-1 in bf16 by a universal checkpoint and back by its own files": Journey(
        {**LLAMA, "dtype": "bf16", "tied": True},
        {"to": "universal"},
        {**LLAMA, "dtype": "bf16", "tied": True, "universal": True},
        {"to": DeepSpeed(stage=1), "mesh": "dp=2"},
        {**LLAMA, "dtype": "bf16", "tied": True},
    ),
    "from ZeRO-3 in bf16 of two ranks to one and back": Journey(
        {**LLAMA, "dtype": "bf16", "grouped": True, "stage": 3},
        {"to": DeepSpeed(stage=3), "mesh": "dp=1"},
        {**LLAMA, "dtype": "bf16", "grouped": True, "stage": 3},
        {"to": DeepSpeed(stage=3), "mesh": "dp=2"},
        {**LLAMA, "dtype": "bf16", "grouped": True, "stage": 3},
    ),
    "from ZeRO-3 to ZeRO-1 and back by universal checkpoints": Journey(
        {**LLAMA, "stage": 3},
        {"to": Universal(stage=1)},
        {**LLAMA, "universal": True},
        {"to": Universal(stage=3)},
        {**LLAMA, "stage": 3, "universal": True},
        SUMS,
    ),
    "from two expert-parallel ranks to one and back": Journey(
        {**LLAMA, "stage": 2, "ep": 2},
        {"to": DeepSpeed(stage=1), "mesh": "dp=1"},
        {**LLAMA, "ep": 1},
        {"to": DeepSpeed(stage=2), "mesh": "ep=2"},
        {**LLAMA, "stage": 2, "ep": 2},
        SUMS,
    ),
    "from two ranks to one, and four tensor-parallel ranks of two kv heads": Journey(
        LLAMA,
        {"to": DeepSpeed(stage=1), "mesh": "dp=1"},
        LLAMA,
        {"to": DeepSpeed(stage=1), "mesh": "tp=4", "config": LLAMA_CONFIG, "layout": Layout({"heads": "tp"})},
        {**LLAMA, "tp": 4},
        SUMS,
        ranks=4,
    ),
    "from two stages with a tie to one, and back by a universal checkpoint": Journey(
        {"model": "neox", "pp": 2, "tied": True},
        {"to": DeepSpeed(stage=1, pipeline=True), "mesh": "dp=1"},
        {"model": "neox", "tied": True},
        {"to": "universal"},
        {"model": "neox", "pp": 2, "tied": True, "universal": True},
        SUMS,
    ),
    "from two tensor-parallel ranks to one, and two stages": Journey(
        {"model": "neox", "tp": 2},
        {"to": DeepSpeed(stage=1, pipeline=True), "format": DeepSpeed(cut=CUT), "mesh": "dp=1"},
        {"model": "neox"},
        {"to": DeepSpeed(stage=1, pipeline=True), "mesh": "pp=2", "config": NEOX},
        {"model": "neox", "pp": 2},
        SUMS,
    ),
    "from two stages to one, and two tensor-parallel ranks": Journey(
        {"model": "neox", "pp": 2},
        {"to": DeepSpeed(stage=1, pipeline=True), "mesh": "dp=1"},
        {"model": "neox"},
        {"to": DeepSpeed(stage=1, pipeline=True, cut=COPIES), "mesh": "tp=2", "config": NEOX},
        {"model": "neox", "tp": 2},
        SUMS,
    ),
    "from two stages with a tie to one, and two of two ranks each": Journey(
        {**TIED, "pp": 2},
        {"to": PIPELINE, "mesh": "dp=1"},
        TIED,
        {"to": PIPELINE, "mesh": "pp=2,dp=2", "config": TIED_NEOX},
        {**TIED, "pp": 2},
        SUMS,
        ranks=4,
    ),
    "from two tensor-parallel ranks with a tie to one, and two stages of two": Journey(
        {**TIED, "tp": 2},
        {"to": PIPELINE, "format": DeepSpeed(cut=CUT), "mesh": "dp=1"},
        TIED,
        {"to": PIPELINE, "mesh": "pp=2,tp=2", "config": TIED_NEOX},
        {**TIED, "pp": 2, "tp": 2},
        SUMS,
        ranks=4,
    ),
}
JOURNEYS["from two tensor-parallel ranks without a pipeline to ZeRO-3 of one, and of two"] = Journey(
    {"model": "flat", "tp": 2},
    {"to": DeepSpeed(stage=3), "format": DeepSpeed(cut=CUT), "mesh": "dp=1"},
    {"model": "flat", "stage": 3},
    {
        "to": DeepSpeed(stage=3),
        "mesh": "tp=2",
        "layout": {name: () if dim is None else (None,) * dim + ("tp",) for name, dim in CUT.items()},
    },
    {"model": "flat", "tp": 2, "stage": 3},
    SUMS,
)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], ...]]:
    """What was seen on each journey: of the unbroken run, of the process that went on, and of the two that did."""
    folder = tmp_path_factory.mktemp("journeys")

    def leg(name: str, ranks: int, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        (folder / name).mkdir()
        return launched(folder / name, ranks, runs)

    def converted(name: str, leg: int, how: Mapping[str, Any]) -> str:
        options = {"layout": "replicated", **how} if "config" not in how else how
        meshload.convert(folder / f"saved {name}.{leg}", folder / f"{name}.{leg}", optimizer=True, **options)
        return str(folder / f"{name}.{leg}")

    runs = {n: {**j.first, "steps": 3, "more": 2, "save": str(folder / f"saved {n}.1")} for n, j in JOURNEYS.items()}
    found = [leg("1", 2, runs)]
    runs = {n: {**j.second, "load": converted(n, 1, j.there), "save": str(folder / f"saved {n}.2")} for n, j in JOURNEYS.items()}
    found.append(leg("2", 1, {n: {**run, "first": 3, "steps": 1} for n, run in runs.items()}))
    runs = {n: {**j.third, "load": converted(n, 2, j.back)} for n, j in JOURNEYS.items()}
    runs = {n: {**run, "first": 4, "steps": 1} for n, run in runs.items()}
    found.append({})
    for ranks in (2, 4):
        found[-1] |= leg(f"3 of {ranks}", ranks, {n: run for n, run in runs.items() if JOURNEYS[n].ranks == ranks})
    return {n: tuple(leg[n] for leg in found) for n in JOURNEYS}


@pytest.mark.timeout(1000)  # the first waits for all
@pytest.mark.parametrize("name", list(JOURNEYS))
def test_the_engine_goes_on(travelled: dict[str, tuple[dict[str, Any], ...]], name: str) -> None:
    unbroken, second, third = travelled[name]
    before = states(unbroken, "3")
    del before["loss"]
    assert differing(before, states(second, "start"), 0) == []
    assert differing(states(unbroken, "4"), states(second, "1"), JOURNEYS[name].near) == []
    after = states(second, "1")
    del after["loss"]
    assert differing(after, states(third, "start"), 0) == []
    assert differing(states(unbroken, "5"), states(third, "1"), 10 * JOURNEYS[name].near) == []
    assert differing(states(unbroken, "4"), states(unbroken, "5"), 10 * SUMS) == list(states(unbroken, "5"))


def differing(expected: Mapping[str, Any], found: Mapping[str, Any], near: float) -> list[str]:
    """Return the names of what differs; its bits where `near` is 0."""
    assert expected.keys() == found.keys()
    bits = [n for n in expected if near == 0 and expected[n].tobytes() != found[n].tobytes()]
    return bits or [n for n in expected if np.abs(found[n] - expected[n]).max() > near * np.abs(expected[n]).max()]
