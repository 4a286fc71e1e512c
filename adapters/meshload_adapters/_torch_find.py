"""Files of weights that `torch.save` wrote, by the names that programs give them, or by what they begin with."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshload.source import Folder, read_bytes

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")


def single_name(variant: str | None) -> str:
    return f"pytorch_model{f'.{variant}' if variant else ''}.bin"


def index_name(variant: str | None) -> str:
    return f"pytorch_model.bin.index{f'.{variant}' if variant else ''}.json"


def is_index(file: str) -> bool:
    return ".bin.index." in file and re.search(r"\.bin\.index(\.[^.]+)?\.json$", file) is not None


def is_there(folder: Folder, listed: Sequence[str], file: str) -> bool:
    """Say whether a name is there, be it a dead link; where nothing could be listed, the file is asked for."""
    return file in listed or f"{file}/" in listed or (not listed and folder.has(file))


def numbered(listed: Sequence[str], variant: str | None) -> list[str]:
    return [n for n in listed if (match := shard(n)) and match[1] == variant]


def shard(file: str) -> re.Match[str] | None:
    """Return the variant or None, `i` and `n` of a file of Hugging Face's that is `i` of `n`."""
    if not file.startswith("pytorch_model"):
        return None
    return re.fullmatch(r"pytorch_model(?:\.([^.]+?))?-(\d{1,9})-of-(\d{1,9})\.bin", file)


def consolidated(file: str) -> re.Match[str] | None:
    """Return the number of a file of Meta's."""
    return re.fullmatch(r"consolidated\.(\d{2,4})\.pth", file) if file.startswith("consolidated.") else None


def has_magic(folder: Folder, file: str) -> bool:
    """Say whether a file begins as torch's do: with the pickle of the magic number, or with a zip's member `ROOT/data.pkl`."""
    source = folder.file(file)
    head = read_bytes(source, 0, min(source.size, 512))
    kind = container_of(head[:32])
    if kind == "zip":
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return name.endswith(b"/data.pkl") or file.endswith(SUFFIXES)
    return kind == "legacy"


def container_of(head: bytes) -> str | None:
    """Say from its first 32 bytes how a file that torch may have saved is packed: `zip`, `legacy`, or None for neither.

    Other things are zips too.
    """
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    return "legacy" if head.startswith(b"\x80") and LEGACY_MAGIC in head else None
