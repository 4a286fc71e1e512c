"""Make a ZeRO-3 checkpoint of many ranks, and say how long opening it and planning one rank take.

    python tests/bench/zero3.py [--ranks 64] [--params 300] [--rows 256] [--columns 64]

The files are those that DeepSpeed writes, with ramps for values, so that every element tells its place.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]
KINDS = ("master", "exp_avg", "exp_avg_sq")


def value(shapes: Shapes, name: str, kind: str) -> Any:
    """Return what an array of the checkpoint holds: exact in fp32 for small numbers."""
    base = (list(shapes).index(name) * len(KINDS) + KINDS.index(kind)) * 1000
    return (base + np.arange(math.prod(shapes[name]), dtype=np.float32)).reshape(shapes[name])


def write_zero3(root: Path, shapes: Shapes, ranks: int, *, sub_groups: int = 1, step: int = 2, **client: Any) -> Path:
    """Write `ROOT/latest` and `ROOT/global_step{step}` of as many ranks."""
    import torch

    tag = root / f"global_step{step}"
    tag.mkdir(parents=True, exist_ok=True)
    (root / "latest").write_text(tag.name)
    names = list(shapes)
    cut = math.ceil(len(names) / sub_groups)
    groups = [{n: torch.Size(shapes[n]) for n in names[i : i + cut]} for i in range(0, len(names), cut)]
    state = {
        "module": {n: torch.zeros(0) for n in names},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": step,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        **client,
    }
    for r in range(ranks):
        flat = {kind: [_part(shapes, list(g), kind, r, ranks) for g in groups] for kind in KINDS}
        moments = {
            i: {"step": torch.tensor(float(step)), "exp_avg": flat["exp_avg"][i], "exp_avg_sq": flat["exp_avg_sq"][i]}
            for i in range(len(groups))
        }
        inner = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(len(groups)))}]},
            "fp32_flat_groups": flat["master"],
        }
        torch.save(state, tag / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": inner}, tag / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt")
    return root


def _part(shapes: Shapes, names: list[str], kind: str, rank: int, ranks: int) -> Any:
    """Return a rank's flat tensor: its part of each parameter, padded with numbers that must never be seen."""
    import torch

    parts = []
    for name in names:
        flat = value(shapes, name, kind).reshape(-1)
        size = math.ceil(flat.size / ranks)
        mine = flat[rank * size : (rank + 1) * size]
        parts.append(np.concatenate([mine, np.full(size - mine.size, -1, np.float32)]))
    return torch.from_numpy(np.concatenate(parts))


def main() -> None:
    """Make one, and print the times."""
    import meshload

    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 64), ("params", 300), ("rows", 256), ("columns", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    told = parser.parse_args()
    shapes = {f"layers.{i // 10}.w{i % 10}.weight": (told.rows, told.columns) for i in range(told.params)}
    with tempfile.TemporaryDirectory() as folder:
        path = write_zero3(Path(folder) / "zero3", shapes, told.ranks)
        for _ in range(3):  # seconds of this process, since others take their part of the wall's
            start = time.process_time()
            checkpoint = meshload.open(path, format="deepspeed")
            opened = time.process_time()
            plan = meshload.plan(path, mesh="dp=8", rank=3, layout={"*": ("dp",)}, optimizer=True, into="numpy")
            planned = time.process_time() - opened
            pieces = sum(len(a.pieces) for a in checkpoint.values())
            print(
                f"open {opened - start:.2f} s of CPU, {pieces} pieces; open and plan 1/8 {planned:.2f} s, {plan.read_bytes} bytes"
            )


if __name__ == "__main__":
    main()
