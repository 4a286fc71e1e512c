"""Where a folder has a tree of Orbax, by the names in it: in an item, a step, or a step of a root."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from meshload.errors import FormatError
from meshload.source import Folder, LocalFolder, read_bytes

from ._orbax_record import MANIFEST, RECORD, is_beside

TEMPORARY = ".orbax-checkpoint-tmp"
TREE = "_METADATA"
STEP = "_CHECKPOINT_METADATA"
VERSION_1 = "orbax.checkpoint"
OLD = "checkpoint"


def is_temporary(folder: Folder) -> bool:
    """Say whether the folder, or that around it, has the name of an unfinished save."""
    path = os.path.abspath(folder.path) if isinstance(folder, LocalFolder) else folder.kvstore.path
    return any(TEMPORARY in part for part in path.rstrip("/").split("/")[-2:])


def is_mark(name: str) -> bool:
    return name in (STEP, VERSION_1, MANIFEST) or name.startswith("ocdbt.process_") or TEMPORARY in name


def is_old(folder: Folder, file: str) -> bool:
    """Say whether a file is msgpack of a flax state: a map whose first key is a string."""
    if not (file.startswith(OLD) and re.fullmatch(r"checkpoint(_\d+)?", file)) or not folder.has(file):
        return False
    source = folder.file(file)
    head = read_bytes(source, 0, min(6, source.size))
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1) if head else 0
    is_map = bool(head) and (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))
    return is_map and len(head) > at and (0xA0 <= head[at] <= 0xBF or head[at] in (0xD9, 0xDA))


def trees_in(folder: Folder, names: Iterable[str]) -> list[str]:
    """Return the tree items in a folder."""
    found = [n[:-1] for n in names if n.endswith("/") and TEMPORARY not in n and holds(folder, f"{n}{TREE}")]
    return [n for n in found if not is_others(folder, n)]


def is_others(folder: Folder, name: str) -> bool:
    """Say whether a folder in this one is of another format, with an index of its files."""
    inside = folder.inside(name)
    return is_beside(inside, [RECORD]) if holds(inside, RECORD) else False


def holds(folder: Folder, file: str) -> bool:
    try:
        return folder.has(file)
    except FormatError:
        return False  # a name that no folder of Orbax has


def number_of(name: str) -> int | None:
    """Return the number of a step's folder, finished or not."""
    found = re.fullmatch(r"(?:.*_)?(\d{1,18})/?", name.partition(TEMPORARY)[0])
    return int(found[1]) if found else None


def steps_in(folder: Folder, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the steps in a folder by their prefix, latest first; a prefix without any mark of Orbax is none."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name.endswith("/") and number_of(name) is not None:
            prefix = name.partition(TEMPORARY)[0].rstrip("0123456789/")
            groups.setdefault(prefix, []).append(name[:-1])
    for group in groups.values():
        group.sort(key=lambda n: (number_of(n), TEMPORARY not in n), reverse=True)
    return {prefix: group for prefix, group in groups.items() if any(is_step(folder, n) for n in group)}


def is_step(folder: Folder, name: str) -> bool:
    inside = folder.names(name)
    if RECORD in inside and is_others(folder, name):
        return False
    return TEMPORARY in name or TREE in inside or any(is_mark(n) for n in inside) or bool(trees_in(folder.inside(name), inside))
