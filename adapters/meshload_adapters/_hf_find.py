"""The files of weights in a Hugging Face folder, found by their names; and what a safetensors file begins with."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from meshload.source import Folder, read_bytes

STEMS = ("model", "consolidated")

HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header: the reference library's own limit; an index is bounded by it too."""


def single_name(stem: str, variant: str | None) -> str:
    return f"{stem}{f'.{variant}' if variant else ''}.safetensors"


def index_name(stem: str, variant: str | None) -> str:
    return f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json"


def is_index(file: str) -> bool:
    return ".safetensors.index." in file and re.search(r"\.safetensors\.index(\.[^.]+)?\.json$", file) is not None


def is_there(folder: Folder, listed: Collection[str], file: str) -> bool:
    """Say whether a name is there, be it a dead link; where nothing could be listed, the file is asked for."""
    return file in listed or f"{file}/" in listed or (not listed and folder.has(file))


def stem_of(folder: Folder, listed: Sequence[str], variant: str | None) -> str | None:
    names = (index_name(STEMS[0], variant), single_name(STEMS[0], variant))
    return STEMS[0] if any(is_there(folder, listed, n) for n in names) else None


def has_magic(folder: Folder) -> bool:
    """Say whether the file begins as safetensors files do. The first bytes of zips and pickles make no such length."""
    source = folder.file(folder.entry or "")
    start = read_bytes(source, 0, min(source.size, 64))
    if len(start) < 10:
        return False
    (n,) = struct.unpack("<Q", start[:8])
    return n <= min(HEADER_LIMIT, source.size - 8) and start[8:].lstrip(b" \t\r\n").startswith(b"{")


def numbering(file: str) -> re.Match[str] | None:
    """Return the rank or None, the stem, the variant or None, `i` and `n` of a file that is numbered `i of n`."""
    if not file.endswith(".safetensors"):
        return None
    return re.fullmatch(r"(?:shard-(\d+)-)?([^.]+?)(?:\.([^.]+?))?-(\d{1,9})-of-(\d{1,9})\.safetensors", file)


Kind = tuple[bool, int]
"""Whether the files hold pieces of several ranks, and how many files make the whole."""


def numbered(listed: Iterable[str], stem: str, variant: str | None) -> dict[Kind, list[str]]:
    """Return the files that are numbered `i of n`."""
    found: dict[Kind, list[str]] = defaultdict(list)
    for file in listed:
        if match := numbering(file):
            rank, of_stem, of_variant, _, total = match.groups()
            if (of_stem, of_variant) == (stem, variant):
                found[rank is not None, int(total)].append(file)
    return found


def is_consolidated(listed: Sequence[str], variant: str | None) -> bool:
    """Say whether only Mistral's names are there; asked for where there is a listing, so that HTTP is spared the requests."""
    names = (single_name(STEMS[1], variant), index_name(STEMS[1], variant))
    return any(n in listed for n in names) or bool(numbered(listed, STEMS[1], variant))
