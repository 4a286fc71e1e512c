"""Which folders are checkpoints of torch.distributed.checkpoint, by the names in them; and which hold such of several steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from meshload.source import Folder, read_bytes

METADATA = ".metadata"
SUFFIX = ".distcp"
STEP = r"(?:.*[-_.])?(\d{1,18})/"

LOOKED_INTO = 8
"""Steps in a folder of steps that are listed to tell whose they are; each may be a request over a network."""


def is_metadata(file: str) -> bool:
    return file == METADATA or rank_of(file) >= 0


def is_checkpoint(folder: Folder, names: Sequence[str]) -> bool:
    """Say whether a folder is a checkpoint, finished or not."""
    mine = any(is_metadata(n) or n == f"{METADATA}.tmp" or n.endswith(SUFFIX) for n in names)
    return (mine or (not names and folder.has(METADATA))) and not is_megatron(folder, names)  # http cannot list


def is_megatron(folder: Folder, names: Sequence[str]) -> bool:
    """Say whether Megatron-Core wrote the folder: in DCP's files, but with names and shapes of its own."""
    there = [n for n in ("common.pt", "metadata.json") if n in names or (not names and folder.has(n))]
    if "common.pt" in there:
        return True
    if "metadata.json" not in there:
        return False
    source = folder.file("metadata.json")
    return b'"sharded_backend"' in read_bytes(source, 0, min(source.size, 4096))


def rank_of(file: str) -> int:
    """Return the rank whose own metadata a file holds; -1 where it is no such file."""
    found = re.fullmatch(r"__(\d{1,9})\.metadata", file) if file.startswith("__") else None
    return int(found[1]) if found else -1


def steps_in(folder: Folder, names: Iterable[str]) -> dict[str, int]:
    """Return the folders of steps, by ascending number; nothing where none of them holds a checkpoint."""
    found = {n[:-1]: int(match[1]) for n in names if n.endswith("/") and (match := re.fullmatch(STEP, n))}
    found = dict(sorted(found.items(), key=lambda item: item[1]))
    last = list(found)[-LOOKED_INTO:]
    return found if any(is_checkpoint(inside := folder.inside(name), inside.names()) for name in last) else {}
