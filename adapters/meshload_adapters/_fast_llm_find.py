"""Which folders are Fast-LLM's, by their metadata and the names of their files."""

from __future__ import annotations

import re

from meshload.errors import FormatError, SourceError
from meshload.source import Folder, read_bytes

METADATA = "metadata.yaml"


def is_ours(folder: Folder) -> bool:
    """Say whether a folder has Fast-LLM's metadata, or files of ranks that have it."""
    if folder.has(METADATA):
        source = folder.file(METADATA)
        start = read_bytes(source, 0, min(source.size, 1 << 20))
        return re.search(rb"^fast_llm_version:", start, re.MULTILINE) is not None
    files = rank_files(folder)
    if not files:
        return False
    from ._safetensors import read_header

    try:
        return "fast_llm_version" in read_header(folder.file(files[0])).metadata
    except (FormatError, SourceError):
        return False


def rank_files(folder: Folder) -> list[str]:
    """Return the files of ranks, by rank."""
    names = (name for name in folder.names() if name.startswith("rank_"))
    found = [(int(m[1]), name) for name in names if (m := re.fullmatch(r"rank_(0|[1-9]\d*)\.safetensors", name))]
    return [file for _, file in sorted(found)]


def steps_in(folder: Folder) -> list[int]:
    """Return the steps of which a folder holds the folders, in order."""
    names = [name[:-1] for name in folder.names() if name.endswith("/") and name[:-1].isdecimal()]
    return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,17}", name) and folder.has(f"{name}/{METADATA}"))
