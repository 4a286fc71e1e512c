"""A Megatron folder: which iteration is meant, and how it was saved.

ROOT/latest_checkpointed_iteration.txt   `2000`, or the word `release`: written when a save is complete
ROOT/iter_0002000/, ROOT/release/        one save each: legacy rank folders, or a torch_dist container
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from meshload.errors import listing
from meshload.source import Folder, read_bytes

TRACKER = "latest_checkpointed_iteration.txt"

RANK_FOLDER = r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/"
"""A text, compiled for folders that have such a one."""

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")

OLD_OPTIMIZER = "optim.pt"
"""Where old releases keep the optimizer: beside `model_rng.pt`, or in a folder per data-parallel rank."""

LEGACY, CORE, UNFINISHED = "legacy", "core", "unfinished"


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """One iteration's folder, and how it was saved."""

    kind: str
    """`LEGACY` or `CORE`; `UNFINISHED` where nothing of either is there."""
    folder: Folder
    name: str
    """What messages call it: `iter_0002000`, or the path where the user named it himself."""
    why: str = ""
    """Why it cannot be opened; empty where it can."""


def find_save(folder: Folder) -> Save | None:
    """Return the save that a folder, or a file in it, means; None where no mark of Megatron is there."""
    if folder.entry is not None and folder.entry not in (TRACKER, "metadata.json", ".metadata", "common.pt", *MODEL_FILES):
        return None
    listed = folder.names()
    if not listed:
        return None  # there is nothing, or it cannot be listed, as over HTTP
    found = _iteration(folder, listed, folder.name)
    if found is not None:
        return found
    saves = [n.rstrip("/") for n in listed if n == "release/" or (n.startswith("iter_") and re.fullmatch(r"iter_\d{7,}/", n))]
    if TRACKER in listed:
        return _tracked(folder, listed, saves)
    opened = {name: _iteration(folder.inside(name), None, name) for name in saves}
    known = {name: save for name, save in opened.items() if save is not None}
    if not known:
        return None
    why = (
        f"{folder.name}: {TRACKER}, which Megatron writes when a save is complete, is not there; "
        f"open one of {listing(known)} by its own path"
    )
    return Save(next(iter(known.values())).kind, folder, folder.name, why)


def is_rank(name: str) -> bool:
    """Say whether this is the folder of a rank."""
    return name.startswith("mp_rank_") and re.fullmatch(RANK_FOLDER, name) is not None


def _iteration(folder: Folder, listed: list[str] | None, name: str) -> Save | None:
    """Return the save of an iteration's own folder. NeMo puts it into `weights/`."""
    listed = folder.names() if listed is None else listed
    for inner, names in ((folder, listed), (folder.inside("weights"), None)) if "weights/" in listed else ((folder, listed),):
        if "metadata.json" in (names or inner.names()):
            backend = _backend(inner)
            if backend is not None:
                return Save(CORE, inner, name)
    if any(map(is_rank, listed)):
        return Save(LEGACY, folder, name) if _has_models(folder, listed) else None
    if any(n in listed for n in MODEL_FILES) and re.search(r"mp_rank_\d+(_\d+)*$", folder.name.removesuffix(f"/{folder.entry}")):
        return Save(LEGACY, folder, name)
    return None


def _has_models(folder: Folder, listed: list[str]) -> bool:
    """Say whether any rank folder holds a model: DeepSpeed has folders of such names, too."""
    ranks = [n for n in listed if is_rank(n)]
    return any(set(MODEL_FILES) & set(folder.names(n.rstrip("/"))) for n in ranks)


def _backend(folder: Folder) -> str | None:
    """Return `sharded_backend` of a `metadata.json`, None where it has none."""
    source = folder.file("metadata.json")
    try:
        found = json.loads(read_bytes(source, 0, min(source.size, 1 << 16)))
    except (ValueError, RecursionError):
        return None
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _tracked(folder: Folder, listed: list[str], saves: list[str]) -> Save | None:
    """Return the save that the tracker names."""
    source = folder.file(TRACKER)
    word = read_bytes(source, 0, min(source.size, 64)).decode(errors="replace").strip()
    kinds = {name: save for name in saves if (save := _iteration(folder.inside(name), None, name)) is not None}
    kind = next((save.kind for save in kinds.values()), UNFINISHED)
    if word != "release" and not re.fullmatch(r"\d{1,18}", word):
        return Save(kind, folder, folder.name, f"{TRACKER}: an iteration or the word 'release' was expected, found {word[:40]!r}")
    name = word if word == "release" else f"iter_{int(word):07d}"
    complete = [n for n in sorted(kinds) if not lacking(kinds[n])]
    hint = f"the last complete save is {complete[-1]}; open it by its own path" if complete else "no complete save is there"
    if name in kinds:
        absent = lacking(kinds[name]) if kinds[name].kind == CORE else ""
        why = f"{TRACKER} names {name}, in which {absent}: its save did not finish; {hint}"
        return replace(kinds[name], why=why) if absent else kinds[name]
    if not saves and any(n == "latest" or n.startswith("global_step") for n in listed):
        return None  # Megatron-DeepSpeed keeps this tracker beside DeepSpeed's folders
    what = "holds no checkpoint" if name in saves else "is not there"
    return Save(kind, folder, name, f"{TRACKER} names {name}, which {what}: its save did not finish, or it was moved; {hint}")


def lacking(save: Save) -> str:
    """Say which file that every finished save has is not there, from the names alone; nothing where all are."""
    if save.kind == CORE:
        absent = [n for n in (".metadata", "metadata.json") if not save.folder.has(n)]
        return f"{listing(absent)} {'is' if len(absent) == 1 else 'are'} not there" if absent else ""
    ranks = [n for n in save.folder.names() if is_rank(n)]
    empty = [n for n in ranks if not {*MODEL_FILES, OLD_OPTIMIZER} & set(save.folder.names(n.rstrip("/")))]
    return f"{listing(empty)} {'has' if len(empty) == 1 else 'have'} no {MODEL_FILES[0]}" if empty else ""
