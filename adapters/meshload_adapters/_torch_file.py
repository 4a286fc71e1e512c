"""A torch file is what `torch.save` writes: an object tree whose tensors lie, as storages, in the same file.

Read from torch 2.13 (https://github.com/pytorch/pytorch/blob/main/torch/serialization.py), and without torch: the pickle by the
inert unpickler, the zip's directory by hand. Nothing of the storages is read.

Zip files (since torch 1.6), all members stored, under one root folder whose name is free:

    {root}/data.pkl            the pickle, protocol 2 unless another was asked for
    {root}/data/{key}          a storage: raw bytes, at a multiple of 64 in the file
    {root}/byteorder           `little` or `big`; older files lack it
    {root}/version, .format_version, .storage_alignment, .data/serialization_id

A member's data begins behind its *local* header (30 bytes, name, extra field), whose extra field is longer than the directory's,
since it holds the padding. Above 4 GiB the zip64 fields are used. CRCs are not checked, as they are of the payload.

Legacy files are pickles one after another: magic 0x1950a86a20f9469cfc6c, protocol 1001, a dict with `little_endian`, the
object, the list of storage keys; then for each key, in the list's order, an int64 count of elements and the raw bytes.

In the pickle, `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)` is a tensor and
`('storage', class, key, location, count)` a storage; offsets, strides and counts are in elements of the storage's class.
`_rebuild_tensor_v3`, for dtypes without a class, has an untyped storage and the dtype. Tensors may share storages, overlap and
repeat (stride 0). Before torch 0.1.10 the file was a tar; that is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.errors import FormatError
from meshload.pieces import empty, table
from meshload.source import Bytes, ByteSource, read_bytes

from ._pickle import Global, Known, Record, unpickle, unpickle_at
from ._torch_find import LEGACY_MAGIC, container_of

LEGACY_PROTOCOL = 1001

HEADERS_AT_ONCE = 16

NETWORK = 1 << 14
"""A source that rather reads so many bytes than skips them answers slowly: few reads, and small ones at once."""

MAX_NDIM = 32
"""NumPy 1 has no arrays of more dims."""

TOO_LARGE = 1 << 60
"""Elements: more of them make NumPy's byte counts overflow."""

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "float4_e2m1fn_x2": np.dtype(np.uint8),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype("<u8"),
    "uint32": np.dtype("<u4"),
    "uint16": np.dtype("<u2"),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""torch's dtypes that arrays can have. Two `float4_e2m1fn_x2` elements are one byte, and one element of torch's shape."""

PACKED = {"float4_e2m1fn_x2": "F4"}
"""Those that are stored as bytes -> what all formats call them, safetensors' word."""

STORAGES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
"""The dtypes of torch's classes of storages."""

_QUANTISED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
"""Bytes per element of storages that no array can have."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A run of bytes in the file that tensors are views of."""

    key: str
    dtype: str
    count: int
    """Elements of its dtype."""
    offset: int = 0
    """Bytes before it in the storage that the file holds; legacy files may store a view."""

    @property
    def itemsize(self) -> int:
        return _QUANTISED.get(self.dtype) or DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as the pickle describes it. `TorchFile.array` makes an array of it."""

    dtype: str
    """torch's name: `bfloat16`."""
    shape: Shape
    strides: Shape = ()
    """In bytes; 0 where the tensor was expanded."""
    key: str = ""
    """Which storage it is a view of. Tensors of one key, offset, dtype, shape and strides are the same bytes."""
    offset: int = 0
    """Where in the storage it begins, in bytes."""
    storage_nbytes: int = 0
    """What the pickle says; the file may hold another number, and is then damaged."""
    requires_grad: bool = False
    is_parameter: bool = False
    refused: str = ""
    """Why it cannot be given as an array; empty where it can."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """What tensors that are the same bytes share; None where there are no bytes to share."""
        if self.refused or 0 in self.shape:
            return None
        return self.key, self.offset, self.dtype, self.shape, self.strides


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """A torch file, or one that lies in a larger file, whose tree was read and whose storages were found."""

    source: ByteSource
    container: str
    """`zip` or `legacy`."""
    root: Any
    """The object that was saved: plain values, `Record` and `Global` of what is not known, a `Tensor` for each tensor."""
    extents: Mapping[str, tuple[int, int]]
    """Where each storage lies in the source: its first byte and its length."""
    sources: tuple[ByteSource, ...] = field(repr=False)
    """The source alone, one tuple for all arrays."""

    @staticmethod
    def open(source: ByteSource, start: int = 0, stop: int | None = None, *, known: Known | None = None) -> TorchFile:
        """Read the tree of the file between two places of a source; `known` makes more than the tensors, see `unpickle`."""
        stop = source.size if stop is None else stop
        if not 0 <= start <= stop <= source.size:
            raise FormatError(f"{source.name}: a torch file is said to be at bytes {start} to {stop} of {source.size}")
        near = _Ends.of(source, start, stop) if source.gap >= NETWORK else source
        head = read_bytes(near, start, min(stop, start + 32))
        kind = container_of(head)
        makers = {**_REBUILD, **(known or {})}
        if kind == "zip":
            root, extents = _open_zip(near, start, stop, makers)
        elif kind == "legacy":
            root, extents = _open_legacy(near, start, stop, makers)
        else:
            raise FormatError(f"{source.name}: {_what_else(near, start, stop, head)}")
        return TorchFile(source, kind, root, extents, (source,))

    def refusal(self, tensor: Tensor) -> str:
        """Say why a tensor cannot be given as an array; nothing where it can."""
        if tensor.refused:
            return tensor.refused
        if tensor.key not in self.extents:
            return f"its storage {tensor.key!r} is not in {self.source.name}"
        held = self.extents[tensor.key][1]
        if held != tensor.storage_nbytes:
            return f"its storage {tensor.key!r} in {self.source.name} has {held} bytes, expected are {tensor.storage_nbytes}"
        if 0 in tensor.shape:
            return ""
        stop = tensor.offset + tensor.itemsize + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if stop > held:
            return f"it ends at byte {stop} of its storage {tensor.key!r} in {self.source.name}, which has {held}"
        return ""

    def array(self, tensor: Tensor, name: str) -> Array:
        """Return the array of a tensor, lazy; one that cannot be given raises `FormatError`."""
        why = self.refusal(tensor)
        if why:
            raise FormatError(f"{name}: {why}")
        dtype, ndim = DTYPES[tensor.dtype], len(tensor.shape)
        stored = PACKED.get(tensor.dtype)
        if 0 in tensor.shape:
            return Array(name, dtype, tensor.shape, empty(ndim, self.sources), stored)
        offset = self.extents[tensor.key][0] + tensor.offset
        pieces = table(self.sources, [0], [offset], [(0,) * ndim], [tensor.shape], [tensor.strides])
        return Array(name, dtype, tensor.shape, pieces, stored)


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """A source that answers slowly, with the ends of a file in it at hand: there lie the pickle and the zip's directory."""

    source: ByteSource
    start: int
    head: bytes
    stop: int
    tail: bytes

    @staticmethod
    def of(source: ByteSource, start: int, stop: int) -> _Ends:
        head = read_bytes(source, start, min(stop, start + source.gap))
        reach = min(source.gap, stop - start - len(head))
        return _Ends(source, start, head, stop, read_bytes(source, stop - reach, stop) if reach else head)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def unit(self) -> int:
        return self.source.unit

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def gap(self) -> int:
        return self.source.gap

    def read_into(self, start: int, out: Bytes) -> None:
        for begin, held in ((self.start, self.head), (self.stop - len(self.tail), self.tail)):
            if begin <= start and start + len(out) <= begin + len(held):
                out[:] = np.frombuffer(held, np.uint8, len(out), start - begin)
                return
        self.source.read_into(start, out)


def _what_else(source: ByteSource, start: int, stop: int, head: bytes) -> str:
    if stop - start > 262 and read_bytes(source, start + 257, start + 262) == b"ustar":
        return "a tar, as torch wrote before 0.1.10; load it with a torch that can, and save it again"
    if head.startswith(b"PK"):
        return "an empty zip, not one that torch.save wrote"
    if not any(head):
        return f"no torch file: its first {len(head)} bytes are zeros, as of a download or save that did not finish"
    return f"no torch file: it begins with {head[:8].hex(' ')}, expected is a zip or the pickle of torch's magic number"


# --- zip --------------------------------------------------------------------------------------------------------------

_Extents = dict[str, tuple[int, int]]

_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")

_SATURATED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    name: bytes
    header: int
    """Where its local header begins, in the source."""
    nbytes: int
    limit: int
    """Where the next member, or the directory, begins."""
    compressed: bool


def _open_zip(source: ByteSource, start: int, stop: int, known: Known) -> tuple[Any, _Extents]:
    members = _directory(source, start, stop)
    pickles = [m for m in members if m.endswith(b"/data.pkl") and m.count(b"/") == 1]
    if len(pickles) != 1:
        raise FormatError(f"{source.name}: a zip with {len(pickles)} members named ROOT/data.pkl, a file of torch.save has one")
    root = pickles[0].removesuffix(b"data.pkl")
    if root + b"constants.pkl" in members:
        raise FormatError(f"{source.name}: a TorchScript program, not a file of torch.save; save its state_dict() instead")
    _check_byteorder(source, members.get(root + b"byteorder"))
    storages: dict[str, Storage] = {}
    pickle = memoryview(read_bytes(source, *_extent(source, members[pickles[0]])))
    tree = unpickle(pickle, persistent=_persistent(storages), known=known, name=source.name)
    wanted = {key: members[name] for key in storages if (name := root + b"data/" + key.encode()) in members}
    found = _mapped(source, lambda member: _extent(source, member), wanted.values())
    return tree, {key: (begin, end - begin) for key, (begin, end) in zip(wanted, found, strict=True)}


def _check_byteorder(source: ByteSource, member: _Member | None) -> None:
    if member is None:
        return
    begin, end = _extent(source, member)
    order = read_bytes(source, begin, min(end, begin + 16))
    if order != b"little":
        raise FormatError(f"{source.name}: its byteorder is {order.decode(errors='replace')!r}, only 'little' can be read")


def _mapped(source: ByteSource, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Apply a function that makes one small read to each item; at once where each takes a round trip."""
    if source.gap < NETWORK:
        return [function(item) for item in items]
    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="meshload") as pool:
        return list(pool.map(function, items))


def _directory(source: ByteSource, start: int, stop: int) -> dict[bytes, _Member]:
    """Read the directory of a zip: its members by name. Offsets in it count from the zip's start."""
    begin, size, count = _directory_extent(source, start, stop)
    if not 1 <= count <= size // _CENTRAL.size:
        raise FormatError(f"{source.name}: a zip directory of {size} bytes is said to list {count} members")
    raw = read_bytes(source, begin, begin + size)
    listed: list[tuple[int, bytes, int, int, int]] = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise FormatError(f"{source.name}: the zip directory ends within member {len(listed)} of {count}")
        magic, _, _, flags, method, _, _, _, packed, nbytes, n, extra, comment, _, _, _, offset = _CENTRAL.unpack_from(raw, at)
        at += _CENTRAL.size
        if magic != 0x02014B50 or at + n + extra + comment > size:
            raise FormatError(f"{source.name}: the zip directory is damaged at member {len(listed)} of {count}")
        name = raw[at : at + n]
        if _SATURATED in (packed, nbytes, offset):
            nbytes, packed, offset = _zip64(raw[at + n : at + n + extra], nbytes, packed, offset, source.name)
        if flags & 1:
            raise FormatError(f"{source.name}: member {name.decode(errors='replace')!r} is encrypted")
        listed.append((offset, name, nbytes, packed, method))
        at += n + extra + comment
    if at != size:
        raise FormatError(f"{source.name}: the zip directory has {size} bytes, its {count} members take {at}")
    return _checked_members(sorted(listed), start, begin, source.name)


def _checked_members(listed: list[tuple[int, bytes, int, int, int]], start: int, directory: int, file: str) -> dict[bytes, _Member]:
    """Return members in the order of their offsets, each within its own bytes."""
    found: dict[bytes, _Member] = {}
    limits = [start + offset for offset, *_ in listed[1:]] + [directory]
    for (offset, name, nbytes, packed, method), limit in zip(listed, limits, strict=True):
        compressed = method != 0
        shown = name.decode(errors="replace")
        if name in found:
            raise FormatError(f"{file}: the zip directory lists {shown!r} twice")
        if not compressed and packed != nbytes:
            raise FormatError(f"{file}: member {shown!r} is stored, but has {packed} bytes for {nbytes}")
        if start + offset + _LOCAL.size + len(name) + packed > limit:
            raise FormatError(
                f"{file}: member {shown!r} of {packed} bytes at {start + offset} overlaps what begins at byte {limit}"
            )
        found[name] = _Member(name, start + offset, nbytes, limit, compressed)
    return found


def _directory_extent(source: ByteSource, start: int, stop: int) -> tuple[int, int, int]:
    """Return where the directory begins, its size, and its count of members."""
    at, record = _end_record(source, start, stop)
    _, _, _, _, count, size, offset, _ = record
    before = at
    if 0xFFFF in (count, record[1]) or _SATURATED in (size, offset) or _has_locator(source, start, at):
        locator = at - _LOCATOR.size
        if locator < start or not _has_locator(source, start, at):
            raise FormatError(f"{source.name}: the zip64 record that its end refers to is not there")
        _, _, offset64, _ = _LOCATOR.unpack(read_bytes(source, locator, at))
        if start + offset64 + _END64.size > locator:
            raise FormatError(f"{source.name}: the zip64 record is said to be at {offset64}, behind its locator")
        before = start + offset64
        magic, _, _, _, _, _, _, count, size, offset = _END64.unpack(read_bytes(source, before, before + _END64.size))
        if magic != 0x06064B50:
            raise FormatError(f"{source.name}: there is no zip64 record at {offset64}; the zip was cut or lies behind other data")
    if start + offset + size > before:
        raise FormatError(
            f"{source.name}: the zip directory of {size} bytes at {offset} does not fit before its end at {before - start}; "
            f"the zip was cut or lies behind other data"
        )
    return start + offset, size, count


def _has_locator(source: ByteSource, start: int, at: int) -> bool:
    locator = at - _LOCATOR.size
    return locator >= start and read_bytes(source, locator, locator + 4) == b"PK\x06\x07"


def _end_record(source: ByteSource, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
    """Find the record that ends a zip: its last bytes, but for a comment, which torch writes none of."""
    for reach in (_END.size, _END.size + 0xFFFF):
        begin = max(start, stop - reach)
        tail = read_bytes(source, begin, stop)
        at = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
        while at >= 0:
            record = _END.unpack_from(tail, at)
            if begin + at + _END.size + record[7] == stop:
                return begin + at, record
            at = tail.rfind(b"PK\x05\x06", 0, at)
    raise FormatError(f"{source.name}: truncated: a zip of {stop - start} bytes that does not end with its directory")


def _zip64(extra: bytes, nbytes: int, packed: int, offset: int, file: str) -> tuple[int, int, int]:
    """Return the numbers that were too large for the directory's own fields."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            large = [next(numbers, -1) if n == _SATURATED else n for n in (nbytes, packed, offset)]
            if min(large) >= 0:
                return large[0], large[1], large[2]
        at += 4 + size
    raise FormatError(f"{file}: the zip directory says zip64, but the numbers are not there")


def _extent(source: ByteSource, member: _Member) -> tuple[int, int]:
    """Return where a member's data begins and ends: behind its local header."""
    shown = member.name.decode(errors="replace")
    if member.compressed:
        raise FormatError(
            f"{source.name}: member {shown!r} is compressed, so it cannot be read in ranges; torch.save stores: save it again"
        )
    end = member.header + _LOCAL.size + len(member.name)
    raw = read_bytes(source, member.header, end)
    magic, _, flags, method, _, _, _, _, _, n, extra = _LOCAL.unpack_from(raw)
    if magic != 0x04034B50 or flags & 1 or method or raw[_LOCAL.size :] != member.name or n != len(member.name):
        raise FormatError(f"{source.name}: the header of member {shown!r} at {member.header} is not what the directory says")
    begin = end + extra
    if begin + member.nbytes > member.limit:
        raise FormatError(
            f"{source.name}: member {shown!r} would end at byte {begin + member.nbytes}, and overlaps what begins at {member.limit}"
        )
    return begin, begin + member.nbytes


# --- legacy -----------------------------------------------------------------------------------------------------------


def _open_legacy(source: ByteSource, start: int, stop: int, known: Known) -> tuple[Any, _Extents]:
    magic, at = unpickle_at(source, start, stop)
    protocol, at = unpickle_at(source, at, stop)
    info, at = unpickle_at(source, at, stop)
    if magic != int.from_bytes(LEGACY_MAGIC, "little") or protocol != LEGACY_PROTOCOL or type(info) is not dict:
        raise FormatError(f"{source.name}: magic {magic!r} and protocol {protocol!r}, expected are torch's, and {LEGACY_PROTOCOL}")
    if info.get("little_endian") is not True:
        raise FormatError(f"{source.name}: little_endian is {info.get('little_endian')!r}, only little-endian files can be read")
    storages: dict[str, Storage] = {}
    tree, at = unpickle_at(source, at, stop, persistent=_persistent(storages), known=known)
    keys, at = unpickle_at(source, at, stop)
    if type(keys) is not list or not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise FormatError(f"{source.name}: its storage keys are {str(keys)[:80]}, expected is a list of different strings")
    extents: _Extents = {}
    for key in keys:
        if key not in storages:
            raise FormatError(f"{source.name}: storage {key!r} is listed, but nothing says how large its elements are")
        extents[key] = (at + 8, storages[key].nbytes)
        at += 8 + storages[key].nbytes
    if at != stop:
        what = "truncated" if at > stop else f"{stop - at} trailing bytes"
        raise FormatError(f"{source.name}: {what}: its storages end at byte {at}, the file at {stop}")
    counts = _mapped(
        source, lambda extent: int.from_bytes(read_bytes(source, extent[0] - 8, extent[0]), "little"), extents.values()
    )
    for key, count in zip(keys, counts, strict=True):
        if count != storages[key].count:
            raise FormatError(f"{source.name}: storage {key!r} has {count} elements, expected are {storages[key].count}")
    return tree, extents


# --- tensors ----------------------------------------------------------------------------------------------------------


def _persistent(storages: dict[str, Storage]) -> Callable[[Any], Any]:
    """Return what makes the object of a persistent id, and notes the first storage of each key."""

    def made(found: Any) -> Any:
        if type(found) is tuple and len(found) == 4 and found[0] == "module":  # legacy: a class with its source text
            return found[1]
        if type(found) is not tuple or len(found) not in (5, 6) or found[0] != "storage":
            raise FormatError(f"a persistent id is {_short(found)}, expected is a storage")
        _, kind, key, _, count, *view = found
        if type(kind) is not Global or kind.name not in STORAGES or kind.module.partition(".")[0] != "torch":
            raise FormatError(f"a storage has the class {_short(kind)}, known are {', '.join(STORAGES)}")
        if type(key) is not str or not _is_size(count):
            raise FormatError(f"a storage has the key {_short(key)} and {_short(count)} elements")
        storage = Storage(key, STORAGES[kind.name], count)
        storages.setdefault(key, storage)
        return _viewed(storage, view[0]) if view and view[0] is not None else storage

    return made


def _viewed(root: Storage, view: Any) -> Storage:
    """Return the part of a storage that a legacy file names as one of its own; `count` stays that of the whole."""
    if type(view) is not tuple or len(view) != 3 or not _is_size(view[1]) or not _is_size(view[2]):
        raise FormatError(f"a view of storage {root.key!r} is {_short(view)}, expected are a key, an offset and a size")
    if view[1] + view[2] > root.count:
        raise FormatError(f"a view of storage {root.key!r} ends at element {view[1] + view[2]} of {root.count}")
    return replace(root, offset=view[1] * root.itemsize)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _tensor(storage, offset, size, stride)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None, metadata: Any = None
) -> Tensor:
    return _tensor(storage, offset, size, stride, requires_grad is True, metadata=metadata)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    return _tensor(storage, offset, size, stride, requires_grad is True, _dtype_name(dtype), metadata)


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: bool = False,
    dtype: str | None = None,
    metadata: Any = None,
) -> Tensor:
    if type(storage) is not Storage or not _is_size(offset) or not _are_sizes(size) or not _are_sizes(stride):
        raise FormatError(f"a tensor has the offset {_short(offset)}, size {_short(size)} and stride {_short(stride)}")
    if len(size) != len(stride):
        raise FormatError(f"a tensor has the size {_short(size)} and the stride {_short(stride)}, of other dims")
    kind = dtype or storage.dtype
    refused = ""
    if kind not in DTYPES:
        refused = f"its dtype is {kind}, which no array can have"
    elif len(size) > MAX_NDIM or math.prod(n or 1 for n in size) > TOO_LARGE:
        refused = f"its shape {_short(size)} is larger than an array can be"
    elif type(metadata) is dict and any(metadata.values()):
        refused = (
            f"it is stored with the bits {_short(metadata)} still to be applied; resolve_conj() or resolve_neg() it, and save again"
        )
    if refused:
        return Tensor(kind, size, refused=refused)
    width = DTYPES[kind].itemsize
    return Tensor(
        kind,
        size,
        tuple([s * width for s in stride]),  # a list is faster than a generator, and there may be 100,000
        storage.key,
        storage.offset + offset * width,
        storage.nbytes,
        requires_grad,
    )


def _rebuild_parameter(data: Any, requires_grad: Any = False, *more: Any) -> Any:
    return replace(data, requires_grad=requires_grad is True, is_parameter=True) if type(data) is Tensor else data


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """Return the tensor of a subclass, or of one with attributes: both are dropped. Subclasses that hold others are refused."""
    if type(function) is not Global or type(args) is not tuple:
        raise FormatError(f"a tensor is made by {_short(function)}")
    rebuild = _REBUILD.get((function.module, function.name))
    if rebuild is not None and rebuild is not _rebuild_from_type:
        return rebuild(*args)
    return Record(function.module, function.name, args, state=state)


def _rebuild_device_tensor(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    if type(data) is Tensor and data.dtype == _dtype_name(dtype):
        return replace(data, requires_grad=requires_grad is True)
    return Tensor(_dtype_name(dtype), (), refused="it was saved by a device, in another dtype, or within the pickle")


def _rebuild_meta_tensor(dtype: Any, size: Any, *more: Any) -> Tensor:
    shape = size if _are_sizes(size) else ()
    return Tensor(_dtype_name(dtype), shape, refused="it was saved from the meta device, so it has no data")


def _rebuild_wrapper_subclass(kind: Any, dtype: Any, size: Any, *more: Any) -> Tensor:
    name = f"{kind.module}.{kind.name}" if type(kind) is Global else "its class"
    shape = size if _are_sizes(size) else ()
    return Tensor(_dtype_name(dtype), shape, refused=f"it is a {name}, which holds other tensors; save plain tensors instead")


def _rebuild_qtensor(storage: Any, offset: Any, size: Any, *more: Any) -> Tensor:
    kind = storage.dtype if type(storage) is Storage else "unknown"
    return Tensor(
        kind, size if _are_sizes(size) else (), refused=f"it is quantised by torch ({kind}); dequantize() it, and save again"
    )


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Tensor:
    inner = next((t for t in data[::-1] if type(t) is Tensor), None) if type(data) is tuple else None
    return Tensor(inner.dtype if inner else "unknown", (), refused="it is sparse; to_dense() it, and save again")


def _rebuild_nested_tensor(buffer: Any, *more: Any) -> Tensor:
    return Tensor(buffer.dtype if type(buffer) is Tensor else "unknown", (), refused="it is a nested tensor; save its parts")


_UTILS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
    "_rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "_rebuild_device_tensor_from_numpy": _rebuild_device_tensor,
    "_rebuild_xla_tensor": _rebuild_device_tensor,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
    "_rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "_rebuild_qtensor": _rebuild_qtensor,
    "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "_rebuild_sparse_csr_tensor": _rebuild_sparse_tensor,
    "_rebuild_nested_tensor": _rebuild_nested_tensor,
}

_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    **{("torch._utils", name): rebuild for name, rebuild in _UTILS.items()},
    **{
        (module, name): _rebuild_from_type
        for module in ("torch._tensor", "torch.tensor")
        for name in ("_rebuild_from_type", "_rebuild_from_type_v2")
    },
}


def _dtype_name(found: Any) -> str:
    if type(found) is not Global or found.module != "torch":
        raise FormatError(f"a tensor has the dtype {_short(found)}, expected is one of torch's")
    return found.name


_INTEGERS = frozenset({int})


def _is_size(found: Any) -> bool:
    return type(found) is int and 0 <= found < 1 << 63  # bool is an int, too


def _are_sizes(found: Any) -> bool:
    if type(found) is not tuple or not found:
        return found == () and type(found) is tuple
    return _INTEGERS.issuperset(map(type, found)) and min(found) >= 0 and max(found) < 1 << 63


def _short(found: Any) -> str:
    """Show a value that may be anything: what is not plain, by its type."""
    plain = type(found) in (str, int, float, bool, type(None), Global)
    if type(found) is tuple and len(found) <= MAX_NDIM and all(type(n) in (str, int, bool) for n in found):
        plain = True
    if type(found) is dict and len(found) <= 4:
        plain = all(type(n) in (str, int, bool) for item in found.items() for n in item)
    text = repr(found) if plain and not (type(found) is int and found.bit_length() > 128) else type(found).__name__
    return text if len(text) < 100 else f"{text[:100]} ..."
