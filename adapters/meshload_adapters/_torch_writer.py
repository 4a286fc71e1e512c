"""New files of `torch.save`, laid out without torch and without payload: the bytes of the storages are holes, to be filled later.

The zip of `_torch_file.py`, member by member as torch 2.13 writes it: one root folder, here `archive`; a local header whose extra
field `FB` pads, so that the data begins at a multiple of 64; a descriptor behind the data; a directory; its end twice, as zip64
and as before. A tensor is `torch._utils._rebuild_tensor_v2`, or `_rebuild_tensor_v3` for dtypes whose storages have no class.

The checksums of storages are zero, since they are not known before the payload is, and to know them all of it would have to be
read again. torch's own loader checks none, and `torch.save` writes the same zeros under `set_crc32_options(False)`. Python's
`zipfile.ZipFile.testzip` names the storages as damaged, as it does for those files.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.errors import LayoutError

from ._pickle import Global
from ._pickle_writer import Call, Instance, Persistent, pickled
from ._torch_file import DTYPES, PACKED, STORAGES

ROOT = "archive"
ALIGNMENT = 64
SATURATED = 0xFFFFFFFF

CLASSES = {dtype: name for name, dtype in STORAGES.items() if dtype in DTYPES and not name.lstrip("_").startswith("Untyped")}
"""The storage classes of dtypes that have one."""

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items() if name not in PACKED}
FROM_BYTES = {stored: name for name, stored in PACKED.items()}


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """A run of elements that tensors of one file are views of."""

    dtype: str
    """torch's name."""
    count: int
    data: bytes | None = None
    """The elements, where they are known; else a hole is left."""

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor in a new file: a row-major view of a storage."""

    storage: NewStorage
    shape: Shape
    offset: int = 0
    """In elements."""

    @property
    def dtype(self) -> str:
        """Torch's name."""
        return self.storage.dtype


def new_tensor(dtype: str, shape: Shape) -> NewTensor:
    """Return a tensor with a storage of its own."""
    return NewTensor(NewStorage(dtype, _size(shape)), shape)


def new_scalar(value: float) -> NewTensor:
    """Return a tensor of no dims that holds a number, as torch's optimizers count their steps."""
    return NewTensor(NewStorage("float32", 1, np.float32(value).tobytes()), ())


def dtype_of(array: Array) -> str:
    """Return torch's name of an array's dtype."""
    name = NAMES.get(np.dtype(array.dtype).newbyteorder("<")) if array.stored is None else FROM_BYTES.get(array.stored)
    if name is None:
        raise LayoutError(f"{array.name}: torch has no dtype {array.stored or array.dtype.name}; give dtype=")
    return name


Parts = list[tuple[int, bytes]]
"""Bytes of a file, each with its place; between them are holes."""


def laid_out(root: Any) -> tuple[Parts, int]:
    """Return what a file holds beside its storages, and its size; `root` is what was saved: plain values with `NewTensor` in it."""
    storages: dict[int, tuple[str, NewStorage]] = {}
    tree = _described(root, storages)
    zipped = _Zip()
    zipped.add("data.pkl", pickled(tree))
    zipped.add(".format_version", b"1")
    zipped.add(".storage_alignment", str(ALIGNMENT).encode())
    zipped.add("byteorder", b"little")
    for key, storage in storages.values():
        zipped.leave(f"data/{key}", storage.nbytes) if storage.data is None else zipped.add(f"data/{key}", storage.data)
    zipped.add("version", b"3\n")
    digest = hashlib.sha256(repr(zipped.parts).encode()).digest()
    zipped.add(".data/serialization_id", f"{int.from_bytes(digest, 'little') % 10**40:040d}".encode())
    return zipped.ended()


@lru_cache(maxsize=1024)
def laid_out_tensor(dtype: str, shape: Shape) -> tuple[Parts, int]:
    """Return the same for a file that holds one tensor and nothing else."""
    return laid_out(new_tensor(dtype, shape))


def joined(parts: Sequence[tuple[int, bytes]]) -> Parts:
    """Join what lies side by side."""
    found: list[tuple[int, list[bytes]]] = []
    stop = -1
    for at, data in parts:
        if at == stop:
            found[-1][1].append(data)
        else:
            found.append((at, [data]))
        stop = at + len(data)
    return [(at, b"".join(pieces)) for at, pieces in found]


# --- the pickle -------------------------------------------------------------------------------------------------------


def _described(value: Any, storages: dict[int, tuple[str, NewStorage]]) -> Any:
    """Return a value with each tensor as the call that makes it."""
    kind = type(value)
    if kind is NewTensor:
        return _rebuilt(value, storages)
    if kind in (dict, OrderedDict):
        return kind((key, _described(v, storages)) for key, v in value.items())
    if kind in (list, tuple):
        return kind([_described(v, storages) for v in value])
    if kind is Instance:
        return Instance(value.kind, _described(value.state, storages))
    if kind is Call:
        return Call(value.function, _described(value.args, storages))
    return value


def _rebuilt(tensor: NewTensor, storages: dict[int, tuple[str, NewStorage]]) -> Call:
    storage = tensor.storage
    if tensor.offset < 0 or tensor.offset + _size(tensor.shape) > storage.count:
        raise LayoutError(f"a tensor of shape {tensor.shape} at element {tensor.offset} of a storage of {storage.count}")
    key, _ = storages.setdefault(id(storage), (str(len(storages)), storage))
    name = CLASSES.get(storage.dtype)
    place = (tensor.offset, tensor.shape, _strides(tensor.shape), False, OrderedDict[Any, Any]())
    if name is not None:
        held = Persistent(("storage", Global("torch", name), key, "cpu", storage.count))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (held, *place))
    held = Persistent(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", storage.nbytes))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (held, *place, Global("torch", storage.dtype)))


def _size(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _strides(shape: Shape) -> Shape:
    """Return strides in elements, as torch has them: dims of extent 0 count as 1."""
    strides, run = [], 1
    for n in reversed(shape):
        strides.append(run)
        run *= max(1, n)
    return tuple(reversed(strides))


# --- the zip ----------------------------------------------------------------------------------------------------------


class _Zip:
    """The members of a zip, all stored, one behind the other."""

    def __init__(self) -> None:
        self.parts: Parts = []
        self._at = 0
        self._directory: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        self._begin(name, len(data), zlib.crc32(data))
        self._write(data)
        self._end(len(data), zlib.crc32(data))

    def leave(self, name: str, nbytes: int) -> None:
        """Add a member whose data is a hole."""
        self._begin(name, nbytes, 0)
        self._at += nbytes
        self._end(nbytes, 0)

    def _begin(self, name: str, nbytes: int, crc: int) -> None:
        raw = f"{ROOT}/{name}".encode()
        header = self._at
        long = b"".join(struct.pack("<Q", n) for n in (nbytes, nbytes, header) if n >= SATURATED)
        zip64 = struct.pack("<HH", 1, len(long)) + long if long else b""
        padding = -(header + 30 + len(raw) + len(zip64) + 4) % ALIGNMENT
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = 0x808 if nbytes else 0x800  # bit 3: a descriptor follows the data
        self._write(struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra)
        shown, offset = min(nbytes, SATURATED), min(header, SATURATED)
        fields = (0x02014B50, 0, 0, flags, 0, 0, 0, crc, shown, shown, len(raw), len(zip64), 0, 0, 0, 0, offset)
        self._directory.append(struct.pack("<IHHHHHHIIIHHHHHII", *fields) + raw + zip64)
        self._is_long = bool(long)

    def _end(self, nbytes: int, crc: int) -> None:
        """Write the descriptor, which torch leaves out behind nothing."""
        if nbytes:
            self._write(struct.pack("<IIQQ" if self._is_long else "<IIII", 0x08074B50, crc, nbytes, nbytes))

    def _write(self, data: bytes) -> None:
        if data:
            self.parts.append((self._at, data))
            self._at += len(data)

    def ended(self) -> tuple[Parts, int]:
        begin, count, directory = self._at, len(self._directory), b"".join(self._directory)
        end = begin + len(directory)
        n, size, at = min(count, 0xFFFF), min(len(directory), SATURATED), min(begin, SATURATED)
        self._write(directory)
        self._write(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, count, count, len(directory), begin))
        self._write(struct.pack("<IIQI", 0x07064B50, 0, end, 1))
        self._write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, n, n, size, at, 0))
        return joined(self.parts), self._at
