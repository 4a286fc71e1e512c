"""Compare converting with meshload to `cp` and `sync` of what it writes, on one generated checkpoint and the same disk.

    python tests/bench/convert.py FOLDER [--layers 12] [--shards 2] [--rounds 3] [--only hf orbax]

FOLDER is made and kept (see `restore.py`); what is converted lies beside it, and is removed. Each conversion is a fresh process,
which has imported its libraries before the clock starts; copying its result follows at once, as disks change from minute to minute.
Columns: median seconds of both, the median of their ratios (2 at most is the aim), the peak of resident memory that came on top,
files, and GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint

TARGETS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "hf": ("HuggingFace", {}, None),
    "dcp": ("DCP", {}, None),
    "orbax": ("Orbax", {"compress": False}, "tp=4"),
    "orbax-zstd": ("Orbax", {}, "tp=4"),
    "megatron": ("Megatron", {}, "pp=2,tp=4"),
    "torch_dist": ("MegatronCore", {}, None),
    "universal": ("Universal", {}, None),
    "deepspeed": ("DeepSpeed", {"stage": 1}, "dp=4"),
    "fast_llm": ("FastLLM", {}, None),
}
"""Each with its format, its options, and the mesh it is cut for. Not compared: FlexGen, which has no place for this family."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--to", help=argparse.SUPPRESS)
    told = parser.parse_args()
    out = told.folder.with_name(told.folder.name + ".converted")
    if told.to:
        print(json.dumps(converted(told.folder, out, told.to)))
        return
    folder = checkpoint.write(told.folder, told.layers, told.shards)
    print(f"{'':12}{'meshload':>10}{'cp, sync':>10}{'ratio':>7}{'MiB':>6}{'files':>7}{'GB':>6}")
    for name in told.only:
        found = [compared(folder, out, name) for _ in range(told.rounds)]
        convert, copy, ratio = (
            statistics.median(f(r) for r in found) for f in (seconds, copying, lambda r: seconds(r) / copying(r))
        )
        peak, files, size = (max(r[key] for r in found) for key in ("peak", "files", "bytes"))
        print(f"{name:12}{convert:10.2f}{copy:10.2f}{ratio:7.2f}{peak >> 20:6}{files:7}{size / 1e9:6.2f}", flush=True)


def seconds(run: dict[str, Any]) -> float:
    return float(run["seconds"])


def copying(run: dict[str, Any]) -> float:
    return float(run["copying"])


def compared(folder: Path, out: Path, name: str) -> dict[str, Any]:
    """Convert, copy what came of it, and remove both; what was written before is on the disk when a clock starts."""
    copy = out.with_name(out.name + ".copy")
    try:
        os.sync()
        told = subprocess.run([sys.executable, __file__, str(folder), "--to", name], check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
        files = [path for path in out.rglob("*") if path.is_file()]
        found |= {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
        os.sync()
        start = time.perf_counter()
        subprocess.run(["cp", "-r", str(out), str(copy)], check=True)
        os.sync()
        return found | {"copying": time.perf_counter() - start}
    finally:
        for made in (out, copy):
            shutil.rmtree(made, ignore_errors=True)


def converted(folder: Path, out: Path, name: str) -> dict[str, Any]:
    """Convert in this process."""
    import tensorstore  # noqa: F401

    import meshload
    from meshload_adapters import formats

    format, options, mesh = TARGETS[name]
    if format == "DeepSpeed":
        options["parameters"] = list(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    to = getattr(formats, format)(**options)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    meshload.convert(folder, out, to=to, mesh=mesh)
    return {
        "seconds": time.perf_counter() - start,
        "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) << 10,
    }


if __name__ == "__main__":
    main()
