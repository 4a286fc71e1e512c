"""The record in a virtual Orbax checkpoint (`_orbax_index.py`): which files it shows, and what it consists of."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from meshload.checkpoint import Problem
from meshload.errors import FormatError, MeshloadError, listing
from meshload.source import Folder, LocalFolder, lies_in, read_bytes

RECORD = "meshload_index.json"
MANIFEST = "manifest.ocdbt"
ALWAYS = (RECORD, "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt", MANIFEST)
"""In the order of writing, but for the nodes, which come second."""
NODES = r"index\.[0-9a-f]{16}\.ocdbt"
VERSION = 1
LIMIT = 64 << 20
"""A hundred thousand files take about a fifth of this."""


def _record(folder: Folder) -> dict[str, Any] | None:
    """Return what is said of an index in a folder; None where there is none."""
    if folder.entry not in (None, "_METADATA", "_CHECKPOINT_METADATA") or not folder.has(RECORD):
        return None
    source = folder.file(RECORD)
    try:
        found: Any = json.loads(read_bytes(source)) if source.size <= LIMIT else None
        files, written = found["files"], found["written"]
        known = found["version"] == VERSION and isinstance(found["beside"], bool)
        numbers = all(len(said) == 2 and all(isinstance(n, int | None) for n in said) for said in files.values())
        if known and numbers and all(isinstance(name, str) for name in written):
            return dict(found)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    raise FormatError(f"{folder.name}: {RECORD} is damaged, or of another version; remove it, and make the index again")


def is_beside(folder: Folder, names: Sequence[str]) -> bool:
    """Say whether a folder has an index of its own files, so that it is of their format; `names` are those in it."""
    if RECORD not in names:
        return False
    try:
        record = _record(folder)
    except MeshloadError:
        return False
    return record is not None and bool(record["beside"])


def indexed(folder: LocalFolder, *, beside: bool) -> list[str]:
    """Return the files of the index in a folder, and its links; nothing where it is of the other kind.

    They are going to be replaced, so what the record says is believed of no file but ours.
    """
    record = _record(folder)
    if record is None or record["beside"] != beside:
        return []
    allowed = {*ALWAYS, *(() if beside else ("config.json",))}
    links = [] if beside else [name for name in record["files"] if _is_link(folder, name)]
    return [*links, *(name for name in record["written"] if name in allowed or re.fullmatch(NODES, name))]


def _is_link(folder: LocalFolder, name: str) -> bool:
    inside = name.startswith("files/") and ".." not in name.split("/") and lies_in(folder.path, name)
    return inside and (folder.path / name).is_symlink()


def stale(folder: Folder) -> list[Problem]:
    """Say which files have changed since they were indexed."""
    record = _record(folder)
    problems = []
    for name, (size, changed) in record["files"].items() if record else ():
        try:
            file = folder.file(name)
        except MeshloadError as error:
            problems.append(Problem(f"the index in {folder.name} shows it, and it cannot be opened: {error}", file=name))
            continue
        if file.size != size:
            problems.append(Problem(f"it had {size} bytes when the index in {folder.name} was made, it has {file.size}", file=name))
        elif changed is not None and changed != getattr(file, "changed", changed):
            problems.append(Problem(f"it was changed after the index in {folder.name} was made", file=name))
    return problems


def refuse_stale(folder: Folder) -> None:
    """Raise where an index shows files that have changed."""
    found = stale(folder)
    if found:
        told = listing(f"{p.file}: {p.text}" for p in found)
        raise FormatError(
            f"{folder.name}: an index of files that are no longer the same; make it again with meshload.index: {told}"
        )
