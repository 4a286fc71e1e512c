"""Hugging Face checkpoints; `_hf.py` tells their files."""

from __future__ import annotations

from dataclasses import dataclass

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._hf_find import STEMS, has_magic, index_name, is_consolidated, is_index, numbered, single_name, stem_of


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The format of Hugging Face folders and of single safetensors files."""

    index: str = "index"
    """Who decides: the `index`; the `union` of it and of what else its files hold; or the files' `headers` alone."""
    variant: str | None = None
    """Such as `fp16`."""
    max_shard_size: int | str = "5GB"
    """In writing: bytes per file, or such as `"500MB"`; a larger array has a file of its own."""
    name = "hf"
    order = 80
    naming = "hf"

    def __post_init__(self) -> None:
        _bytes_of(self.max_shard_size)
        if self.index not in ("index", "union", "headers"):
            raise LayoutError(f"index={self.index!r}: 'index', 'union' or 'headers' was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether the file is a safetensors file or an index of such, or whether the folder has one of the known names."""
        if folder.entry is not None:
            return folder.entry.endswith(".safetensors") or is_index(folder.entry) or has_magic(folder)
        listed = folder.names()
        stem = stem_of(folder, listed, self.variant)
        if stem is not None or any(n.startswith("pytorch_model") for n in listed):
            return stem == STEMS[0]
        return is_consolidated(listed, self.variant) or bool(numbered(listed, STEMS[0], self.variant))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the index and the headers. Damage is collected, where the rest stays usable."""
        from .._hf import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out `model.safetensors`, or numbered shards; whole arrays, however the mesh cuts them. Aliases are not stored."""
        import json

        from meshload.writing import lay_out, put

        from .._safetensors_files import head, shards

        found = shards(like.arrays.values(), _bytes_of(self.max_shard_size))
        single = single_name(STEMS[0], self.variant)
        stem, n = single.removesuffix(".safetensors"), len(found)
        files = [single] if n == 1 else [f"{stem}-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        for file, arrays in zip(files, found, strict=True):
            lay_out(folder, file, *head(arrays))
        if n > 1:
            total = sum(a.nbytes for a in like.arrays.values())
            file_of = {a.name: file for file, arrays in zip(files, found, strict=True) for a in arrays}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            put(folder, index_name(STEMS[0], self.variant), json.dumps(index, indent=2).encode() + b"\n")

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: the format has no marker, its index is there already."""


_UNITS = {f"{k}{i}": base**n for base, i in ((1000, ""), (1024, "I")) for n, k in enumerate(("", "K", "M", "G", "T"))}


def _bytes_of(size: int | str) -> int:
    """Return a size in bytes: `5GB` is 5,000,000,000, as transformers has it; `5GiB` is 5 * 2**30."""
    text = "" if isinstance(size, bool) else str(size).strip().upper().removesuffix("B")
    number = text.rstrip("KMGTI")
    unit = text.removeprefix(number)
    found = int(number) * _UNITS.get(unit, 0) if number.rstrip().isdecimal() else 0
    if found <= 0:
        raise LayoutError(f"max_shard_size={size!r}: a number of bytes, or such as '500MB', was expected")
    return found
