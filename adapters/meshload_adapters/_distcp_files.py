"""New files of torch.distributed.checkpoint (`_distcp.py`), laid out without torch: entries without payload, and `.metadata`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.box import Box, Shape
from meshload.errors import LayoutError
from meshload.source import LocalFolder
from meshload.writing import lay_out, put

from ._distcp_runs import METADATA, STORAGE
from ._pickle import Global
from ._pickle_writer import Call, Instance, pickled
from ._torch_writer import ALIGNMENT, Parts, dtype_of, laid_out, laid_out_tensor, new_scalar

VERSION = "1.0.0"

Chunk = tuple[int, Box]
"""A box of a tensor, and the rank in whose file it lies."""


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A tensor that is to be stored."""

    key: str
    dtype: str
    """torch's name."""
    shape: Shape
    chunks: Sequence[Chunk]
    value: float | None = None
    """The number, where the tensor is one of float32 without dims that is known already."""


def new_entry(array: Array, parts: Sequence[Chunk], key: str | None = None) -> NewEntry:
    """Return an array's entry, in the chunks that ranks hold; its key is its name, if no other is given."""
    return NewEntry(key or array.name, dtype_of(array), array.shape, chunks_of(array.shape, parts))


def chunks_of(shape: Shape, parts: Sequence[Chunk]) -> list[Chunk]:
    """Return each box once, with the lowest rank that holds it; the whole where the boxes are no tiling, as chunks have to be.

    >>> half = [Box((0,), (2,)), Box((2,), (2,))]
    >>> chunks_of((4,), [(0, half[0]), (1, half[1]), (2, half[0]), (3, half[1])])
    [(0, Box(start=(0,), shape=(2,))), (1, Box(start=(2,), shape=(2,)))]
    """
    whole = Box((0,) * len(shape), shape)
    owner: dict[Box, int] = {}
    for rank, box in sorted(parts, key=lambda part: part[0]):
        if box.size:
            owner.setdefault(box, rank)
    if _is_tiling(shape, tuple(sorted(owner, key=lambda box: box.start))):
        return sorted(((rank, box) for box, rank in owner.items()), key=lambda chunk: chunk[1].start)
    return [(min(owner.values(), default=0), whole)]


@lru_cache(maxsize=4096)
def _is_tiling(shape: Shape, boxes: tuple[Box, ...]) -> bool:
    """Say whether boxes, none of them twice, hold each element once."""
    if not boxes or sum(box.size for box in boxes) != Box((0,) * len(shape), shape).size:
        return False
    start, stop = np.asarray([b.start for b in boxes], np.int64), np.asarray([b.stop for b in boxes], np.int64)
    if not len(shape) or (start < 0).any() or (stop > np.asarray(shape)).any():
        return not len(shape)
    meets = (((start[i] < stop[:i]) & (start[:i] < stop[i])).all(axis=1).any() for i in range(1, len(boxes)))
    return not any(meets)


def lay_out_entries(
    folder: LocalFolder,
    entries: Iterable[NewEntry],
    *,
    paths: Mapping[str, Sequence[str | int]] | None = None,
    objects: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Make `__{rank}_0.distcp` for each rank that has something to store, and `.metadata`.

    `paths` say which keys of the nested dict that was saved are joined in a key. `objects`, by their keys, are no tensors.
    """
    files: dict[int, _File] = {}
    described: dict[str, Instance] = {}
    stored: dict[Instance, Instance] = {}
    for key, value in objects.items():
        described[key] = Instance(Global(METADATA, "BytesStorageMetadata"))
        index = Instance(Global(METADATA, "MetadataIndex"), {"fqn": key, "index": None, "offset": None})
        stored[index] = files.setdefault(0, _File("__0_0.distcp")).add(*laid_out(value))
    for entry in entries:
        if entry.key in described:
            raise LayoutError(f"{entry.key}: two tensors have this key")
        described[entry.key] = _tensor(entry)
        for i, (rank, box) in enumerate(entry.chunks):
            file = files.setdefault(rank, _File(f"__{rank}_0.distcp"))
            parts = laid_out_tensor(entry.dtype, box.shape) if entry.value is None else laid_out(new_scalar(entry.value))
            stored[_index(entry.key, box, i)] = file.add(*parts)
    for file in files.values():
        lay_out(folder, file.name, file.parts(), file.size)
    put(folder, ".metadata", pickled(_metadata(described, stored, paths), protocol=4))


class _File:
    """A data file: entries one behind another. Each begins at a multiple of 64, so that its tensor does, too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self._entries: list[tuple[int, Parts]] = []

    def add(self, parts: Parts, length: int) -> Instance:
        at = self.size + -self.size % ALIGNMENT
        self._entries.append((at, parts))
        self.size = at + length
        return Instance(Global(STORAGE, "_StorageInfo"), {"relative_path": self.name, "offset": at, "length": length})

    def parts(self) -> Iterator[tuple[int, bytes]]:
        for at, parts in self._entries:
            for offset, data in parts:
                yield at + offset, data


# --- .metadata --------------------------------------------------------------------------------------------------------

_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(METADATA, "_MEM_FORMAT_ENCODING"), (0,))


def _metadata(
    tensors: Mapping[str, Instance], stored: Mapping[Instance, Instance], paths: Mapping[str, Sequence[str | int]] | None
) -> Instance:
    state = {
        "state_dict_metadata": dict(tensors),
        "planner_data": {key: tuple(path) for key, path in paths.items()} if paths is not None else None,
        "storage_data": dict(stored),
        "storage_meta": None,
        "version": VERSION,
    }
    return Instance(Global(METADATA, "Metadata"), state)


def _tensor(entry: NewEntry) -> Instance:
    properties = (Global("torch", entry.dtype), _STRIDED, False, _CONTIGUOUS, False)
    state: dict[str, Any] = {
        "properties": Instance(Global(METADATA, "TensorProperties"), properties),
        "size": _size(entry.shape),
        "chunks": [
            Instance(Global(METADATA, "ChunkStorageMetadata"), {"offsets": _size(box.start), "sizes": _size(box.shape)})
            for _, box in entry.chunks
        ],
    }
    return Instance(Global(METADATA, "TensorStorageMetadata"), state)


def _index(key: str, box: Box, number: int) -> Instance:
    return Instance(Global(METADATA, "MetadataIndex"), {"fqn": key, "index": number, "offset": _size(box.start)})


def _size(shape: Shape) -> Call:
    return Call(Global("torch", "Size"), (shape,))
