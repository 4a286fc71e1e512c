"""Make the `.metadata` of a checkpoint of many chunks, and say how long opening it and planning one rank take.

    python tests/bench/dcp_metadata.py [--chunks 100000] [--ranks 256] [--plan]

The data files are as long as `.metadata` says, and hold nothing: opening asks for their sizes alone. torch's own `pickle.load` of
the same file is timed beside, as a measure of the machine.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

OVERHEAD = 1600
"""Bytes of an entry beside its tensor."""


def write(folder: Path, tensors: int, ranks: int, rows: int = 4, columns: int = 64) -> None:
    """Write a checkpoint of as many tensors, each cut over all ranks as FSDP2 cuts them."""
    length = rows * columns * 2 + OVERHEAD
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for t in range(tensors):
        name = f"model.layers.{t}.self_attn.q_proj.weight"
        starts = [torch.Size([rows * r, 0]) for r in range(ranks)]
        chunks = [metadata.ChunkStorageMetadata(start, torch.Size([rows, columns])) for start in starts]
        properties = metadata.TensorProperties(torch.bfloat16)
        described[name] = metadata.TensorStorageMetadata(properties, torch.Size([rows * ranks, columns]), chunks)
        for r in range(ranks):
            at = torch.Size([rows * r, 0])  # the results come from the ranks, so that nothing is shared with the chunks
            own = "".join(list(name))
            places[metadata.MetadataIndex(own, at, r)] = filesystem._StorageInfo(f"__{r}_0.distcp", t * length, length)
    for r in range(ranks):
        with open(folder / f"__{r}_0.distcp", "wb") as file:
            file.truncate(tensors * length)
    paths = {name: (name,) for name in described}
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata.Metadata(described, paths, places, metadata.StorageMeta(str(folder)), "1.0.0"), file)


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Print the seconds of the second run, when modules are imported and files are in the cache."""
    work()
    start, cpu = time.perf_counter(), time.process_time()
    found = work()
    print(f"{what:24} {time.perf_counter() - start:6.2f} s, {time.process_time() - cpu:6.2f} s of CPU")
    return found


def main() -> None:
    import meshload

    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--plan", action="store_true", help="also plan rank 0 of tp=8, dim 0 cut")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, max(1, asked.chunks // asked.ranks), asked.ranks)
        size = (folder / ".metadata").stat().st_size
        timed("pickle.load, with torch", lambda: pickle.loads((folder / ".metadata").read_bytes()))
        checkpoint = timed("meshload.open", lambda: meshload.open(folder))
        pieces = sum(len(a.pieces) for a in checkpoint.values())
        print(f"{len(checkpoint)} arrays, {pieces} chunks, {size} bytes of .metadata")
        if asked.plan:
            timed("meshload.plan", lambda: meshload.plan(checkpoint, mesh="tp=8", rank=0, layout={"*": ("tp",)}))


if __name__ == "__main__":
    main()
