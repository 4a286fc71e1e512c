"""Compare restoring with meshload to other ways and to plain copying, on one generated checkpoint.

    python tests/bench/restore.py FOLDER [--layers 12] [--shards 2] [--rounds 7] [--only tp4 rows] [--cold] [--json FILE]

FOLDER is made and kept: 122 MB a layer and 262 MB. Questions over a network have servers of their own on this machine, which share
its cores; there a checkpoint of `--layers 1` does. Each run is a fresh process, which has imported its libraries before the clock
starts; all sides of a question take turns within a round. Columns: median and least seconds, their ratio to the fastest floor (or
the first row), CPU seconds, the peak of resident memory beside the result, bytes asked by read calls (rows that meshload queues are
not among them), bytes that came from the disk (with --cold, which drops the files from the page cache before each run), and the
whole process with its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import checkpoint
from servers import served
from sides import COMPARED, CONVERTED, ORBAX, PARTS, PROCESSES, SERVED, SIDES, nbytes

MiB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--convert", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.convert:
        CONVERTED[told.convert](told.folder)
        return
    if told.side:
        print(json.dumps(measured(told.place or told.folder, *told.side, check=told.check)))
        return
    folder = checkpoint.write(told.folder, told.layers, told.shards)
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e9
    print(f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(f"{size:.2f} GB in {told.shards} files, {told.rounds} rounds")
    everything = {}
    for question in told.only:
        everything[question] = asked(question, folder, told.rounds, told.cold)
        print(table(question, everything[question], told.cold), flush=True)
    if told.json:
        told.json.write_text(json.dumps(everything, indent=1))


def asked(question: str, folder: Path, rounds: int, cold: bool) -> dict[str, list[dict[str, Any]]]:
    """Run all sides of a question in turns; the first round warms the page cache, compares the bytes, and is not counted."""
    if question in CONVERTED:
        subprocess.run([sys.executable, __file__, str(folder), "--convert", question], check=True, capture_output=True)
        folder = folder / ORBAX
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    sums: dict[str, Any] = {}
    with SERVED.get(question, lambda _: nullcontext())(folder) as place:
        for n in range(rounds + 1):
            for side in SIDES[question]:
                if found.get(side) and "failed" in found[side][-1]:
                    continue
                if cold:
                    drop(folder)
                one = run(question, side, folder, place, check=n == 0)
                if n == 0 and "failed" not in one:
                    sums[side] = one.get("sum")
                    continue
                found[side].append(one)
    if len({s for s in sums.values() if s is not None}) > 1:
        raise SystemExit(f"{question}: the sides give different bytes: {sums}")
    return found


def run(question: str, side: str, folder: Path, place: str | None, *, check: bool) -> dict[str, Any]:
    """Run one side in a fresh process, or in several; the slowest of them counts."""
    processes = PROCESSES.get(question, 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, str(folder), "--side", question, side] + ["--check"] * check
    command += ["--place", place] if place else []
    before = served(place) if place else 0
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if processes > 1 else {}
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        children = []
        for rank in map(str, range(processes)):
            env = {**plain, **group, **({"RANK": rank, "LOCAL_RANK": rank} if group else {})}
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env))
        out = [child.communicate(timeout=600)[0] for child in children]
        if any(child.returncode for child in children):
            errors.seek(0)
            return {"failed": (errors.read().decode().strip().splitlines() or ["no word"])[-1][:150]}
    results = [json.loads(text.splitlines()[-1]) for text in out]
    worst = max(results, key=lambda r: r["seconds"])
    return {
        **worst,
        "whole": time.perf_counter() - begin,
        "asked": served(place) - before if place else sum(r["asked"] for r in results),
        "disk": sum(r["disk"] for r in results),
    }


def measured(place: Any, question: str, side: str, *, check: bool) -> dict[str, Any]:
    """Run one side here."""
    call = SIDES[question][side](place)
    if PROCESSES.get(question, 1) > 1:
        import torch

        torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, asked = memory("VmRSS"), counts()
    cpu, begin = time.process_time(), time.perf_counter()
    found = call()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    seconds = getattr(call, "seconds", seconds)
    peak, after = memory("VmHWM"), counts()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "result": nbytes(found),
        "beside": peak - before - nbytes(found),
        "asked": after["rchar"] - asked["rchar"],
        "disk": after["read_bytes"] - asked["read_bytes"],
        **({"sum": checksum(found)} if check and question in COMPARED else {}),
    }


def checksum(found: Mapping[str, Any]) -> int:
    """Return a sum over names and bits, in order."""
    total = 0
    for name in sorted(found):
        tensor = found[name]
        if hasattr(tensor, "untyped_storage"):
            import torch

            tensor = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(tensor.reshape(-1).view("u1"), zlib.crc32(name.encode(), total))
    return total


def memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def counts() -> dict[str, int]:
    return {key: int(n) for key, n in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())}


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.fsync(opened)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def table(question: str, found: Mapping[str, Sequence[Mapping[str, Any]]], cold: bool) -> str:
    """Return the answer as a Markdown table."""
    good = {side: runs for side, runs in found.items() if "failed" not in runs[-1]}
    median = {side: statistics.median(r["seconds"] for r in runs) for side, runs in good.items()}
    least = {side: min(r["seconds"] for r in runs) for side, runs in good.items()}
    floors = [side for side in good if side.startswith("floor")] or list(good)[:1]
    lines = [
        f"\n**{question}**{', cold' if cold else ''}: {next(iter(good.values()))[-1]['result'] / MiB:.0f} MiB a process\n",
        "| side | median s | least s | x floor | x least | CPU s | beside MiB | asked MiB | x wanted | disk MiB | process s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for side, runs in found.items():
        if side not in good:
            lines.append(f"| {side} | skipped: {runs[-1]['failed']} |" + " |" * 9)
            continue
        middle = {key: statistics.median(r[key] for r in runs) for key in ("cpu", "beside", "asked", "disk", "whole")}
        wanted = runs[-1]["result"] * PARTS.get(question, 1)
        ratios = [min(of[f] for f in floors) / of[side] for of in (median, least)]
        lines.append(
            f"| {side} | {median[side]:.3f} | {least[side]:.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {middle['cpu']:.2f} "
            f"| {middle['beside'] / MiB:.0f} | {middle['asked'] / MiB:.0f} | {middle['asked'] / wanted:.2f} "
            f"| {middle['disk'] / MiB:.0f} | {middle['whole']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
