"""The safetensors header: which tensors a file holds, where, and whether the file is what its header says.

```
u64 little endian N | N bytes of UTF-8 JSON | data
{"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [97, 32], "data_offsets": [begin, end]}, ...}
```

Offsets are relative to the data's start; the data is little endian, row-major, without gaps, to the file's end. Each rule of
https://github.com/huggingface/safetensors is checked before anything is believed.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.errors import FormatError, MeshloadError, SourceError
from meshload.pieces import Ints, Pieces, empty, table
from meshload.source import ByteSource, Folder, read_bytes

from ._hf_find import HEADER_LIMIT
from ._json import parsed, short, unique

HEADERS_AT_ONCE = 8

MAX_NDIM = 32
"""NumPy 1 has no arrays of more dims."""

TOO_LARGE = 1 << 60
"""Elements: more of them make NumPy's byte counts overflow."""

SHARDING = "DCP_SHARDING_INFO"

BYTE = np.dtype(np.uint8)

DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "U8": (BYTE, 8),
    "I8": (np.dtype(np.int8), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F8_E4M3FNUZ": (np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    "F8_E5M2FNUZ": (np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    "U16": (np.dtype("<u2"), 16),
    "I16": (np.dtype("<i2"), 16),
    "F16": (np.dtype("<f2"), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "U32": (np.dtype("<u4"), 32),
    "I32": (np.dtype("<i4"), 32),
    "F32": (np.dtype("<f4"), 32),
    "U64": (np.dtype("<u8"), 64),
    "I64": (np.dtype("<i8"), 64),
    "F64": (np.dtype("<f8"), 64),
    "C64": (np.dtype("<c8"), 64),
    "F4": (BYTE, 4),
    "F6_E2M3": (BYTE, 6),
    "F6_E3M2": (BYTE, 6),
}
"""The format's dtypes: NumPy's dtype, and bits per element; below 8 bits the array is one of bytes."""


Entry = tuple[str, Shape, int, int]
"""One tensor as the header describes it: dtype, shape, begin and end; relative to the data. A plain tuple costs the garbage
collector nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of one file, checked against the format and against the file's size."""

    source: ByteSource
    start: int
    """Where the data begins, in bytes."""
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    offsets: Mapping[str, Shape]
    """Where in its array each piece lies; empty where the tensors are whole."""


def read_headers(folder: Folder, files: Sequence[str]) -> dict[str, Header | MeshloadError]:
    """Read several headers at a time; a file that is absent or damaged gives its error."""

    def attempt(file: str) -> Header | MeshloadError:
        try:
            return read_header(folder.file(file))
        except (FormatError, SourceError) as error:
            return error

    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="meshload") as pool:
        return dict(zip(files, pool.map(attempt, files), strict=True))


def read_header(source: ByteSource) -> Header:
    """Read a header in two reads. Its lengths are hostile until they fit the file."""
    file, size = source.name, source.size
    if size < 8:
        raise FormatError(f"{file}: truncated: it has {size} bytes, a safetensors file begins with 8 that give its header's length")
    (n,) = struct.unpack("<Q", read_bytes(source, 0, 8))
    if n > HEADER_LIMIT:
        raise FormatError(
            f"{file}: no safetensors file: its first 8 bytes would be a header of {n} bytes, at most {HEADER_LIMIT} are allowed"
        )
    if 8 + n > size:
        raise FormatError(
            f"{file}: truncated within its header: the header declares {n} bytes, so at least {8 + n} in all, the file has {size}"
        )
    described = parsed(read_bytes(source, 8, 8 + n), file, _object)
    metadata = described.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{file}: __metadata__ is to map strings to strings, found {short(metadata)}")
    for name, entry in described.items():
        if type(entry) is not tuple:
            raise FormatError(f"{file}: {name!r} {_unsound(entry)}")
    entries: dict[str, Entry] = described
    _check_coverage(entries, 8 + n, size, file)
    return Header(source, 8 + n, entries, metadata, _offsets(metadata, entries, file) if SHARDING in metadata else {})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Entry:
    """Return a JSON object of a header: a sound description of a tensor as an `Entry`, anything else as a dict.

    A header may have 100,000 tensors, so they are checked while it is parsed, and no dict or list outlives its check.
    """
    found = unique(pairs)
    try:
        kind, shape, (begin, end) = found["dtype"], found["shape"], found["data_offsets"]
        sound = (
            type(shape) is list
            and {type(begin), type(end), *map(type, shape)} == {int}  # a bool is none here
            and len(shape) <= MAX_NDIM
            and min((begin, *shape)) >= 0
            and math.prod(shape) * (bits := DTYPES[kind][1]) == 8 * (end - begin)
            and (bits >= 8 or shape[-1] * bits % 8 == 0)
            and (begin < end or math.prod(n or 1 for n in shape) < TOO_LARGE)
        )
    except (TypeError, KeyError, ValueError):
        return found
    return (kind, tuple(shape), begin, end) if sound else found


def _unsound(found: Any) -> str:
    """Say what is wrong with a tensor's description, and what was expected."""
    if not isinstance(found, dict):
        return f"is to be described by a JSON object, found {short(found)}"
    kind, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPES:
        return f"has the dtype {short(kind)}, known are {', '.join(DTYPES)}"
    if not _are_sizes(shape) or len(shape) > MAX_NDIM:
        return f"has the shape {short(shape)}, expected is a list of at most {MAX_NDIM} sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"has the data_offsets {short(offsets)}, expected are a begin and an end"
    bits, held = math.prod(shape) * DTYPES[kind][1], 8 * (offsets[1] - offsets[0])
    if bits != held:
        return f"of {kind} {shape} needs {bits} bits, its data_offsets {offsets} hold {held}"
    if DTYPES[kind][1] < 8 and shape[-1] * DTYPES[kind][1] % 8:
        return (
            f"of {kind} {shape} has rows of {shape[-1] * DTYPES[kind][1]} bits, which end within a byte; no library has such arrays"
        )
    return f"has the shape {shape}, which overflows though it has no elements"


def _are_sizes(found: Any) -> TypeGuard[list[int]]:
    return type(found) is list and all(type(n) is int and 0 <= n < 1 << 63 for n in found)  # bool is an int, too


def _check_coverage(entries: Mapping[str, Entry], start: int, size: int, file: str) -> None:
    """Raise unless the tensors cover the data without hole or overlap, to the file's end."""
    at = 0
    for entry in sorted(entries.values(), key=itemgetter(2, 3)):
        _, _, begin, end = entry
        if begin != at:
            name = next(n for n, e in entries.items() if e is entry)
            what = "leaves a hole after" if begin > at else "overlaps"
            raise FormatError(f"{file}: {name!r} begins at byte {begin} of the data, and {what} the one that ends at {at}")
        at = end
    if start + at > size:
        raise FormatError(f"{file}: truncated: the header declares {start + at} bytes, the file has {size}")
    if start + at < size:
        raise FormatError(
            f"{file}: {size - start - at} trailing bytes: the header declares {start + at} bytes, the file has {size}"
        )


def _offsets(metadata: Mapping[str, str], entries: Mapping[str, Entry], file: str) -> dict[str, Shape]:
    """Return the offsets that torch.distributed.checkpoint saved with its pieces."""
    found: dict[str, Shape] = {}
    for name, info in parsed(metadata[SHARDING].encode(errors="surrogatepass"), f"{file}: {SHARDING}").items():
        at = info.get("saved_offsets") if isinstance(info, dict) else None
        if name not in entries:
            continue
        shape = entries[name][1]
        if not _are_sizes(at) or len(at) != len(shape) or any(a + n >= TOO_LARGE for a, n in zip(at, shape, strict=True)):
            raise FormatError(f"{file}: {SHARDING} of {name!r}: {short(info)} has no saved_offsets of {len(shape)} dims")
        found[name] = tuple(at)
    return found


class Arrays(Mapping[str, Array]):
    """Arrays that are stored whole, each made when it is asked for. Making 100,000 takes longer than reading their header.

    The pieces of one file's arrays that have as many dims are rows of one table; all tables share one tuple of sources.
    """

    def __init__(self, headers: Sequence[Header], number_of: Mapping[str, int]) -> None:
        self._headers = headers
        self._number_of = number_of
        """The number of the header that each array is in."""
        self._sources = tuple(h.source for h in headers)
        self._tables: dict[int, tuple[dict[int, Pieces], dict[str, int]]] = {}

    def __getitem__(self, name: str) -> Array:
        number = self._number_of[name]
        tables, rows = self._tables.get(number) or self._tables.setdefault(number, self._made(number))
        dtype, shape, stored = _shown(self._headers[number].entries[name])
        row = rows.get(name)
        pieces = empty(len(shape), self._sources) if row is None else tables[len(shape)].take(slice(row, row + 1))
        return Array(name, dtype, shape, pieces, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, name: object) -> bool:
        return name in self._number_of

    def _made(self, number: int) -> tuple[dict[int, Pieces], dict[str, int]]:
        """Return a file's tables by their number of dims, and each tensor's row; one without elements has none."""
        header = self._headers[number]
        rows: dict[str, int] = {}
        columns: dict[int, list[tuple[int, int, Shape]]] = defaultdict(list)
        for name, entry in header.entries.items():
            dtype, shape, _ = _shown(entry)
            if 0 not in shape:
                rows[name] = len(columns[len(shape)])
                columns[len(shape)].append((header.start + entry[2], dtype.itemsize, shape))
        tables = {}
        for ndim, column in columns.items():
            offset, itemsize, shapes = zip(*column, strict=True)
            sizes = np.asarray(shapes, np.int64).reshape(len(column), ndim)
            strides = strides_of(sizes, np.asarray(itemsize, np.int64)[:, None])
            number_column = np.full(len(column), number, np.int64)
            tables[ndim] = table(self._sources, number_column, offset, np.zeros_like(sizes), sizes, strides)
        return tables, rows


def _shown(entry: Entry) -> tuple[np.dtype[Any], Shape, str | None]:
    """Return dtype and shape of the array, and the format's dtype where NumPy has none: such are arrays of bytes."""
    kind, shape, _, _ = entry
    dtype, bits = DTYPES[kind]
    if bits >= 8:
        return dtype, shape, None
    return dtype, (*shape[:-1], shape[-1] * bits // 8), kind


def strides_of(shape: Ints, itemsize: Any) -> Ints:
    """Return row-major strides, in bytes, of each row's shape."""
    found = np.ones_like(shape)
    for d in range(shape.shape[1] - 2, -1, -1):
        found[:, d] = found[:, d + 1] * shape[:, d + 1]
    return np.asarray(found * itemsize, np.int64)
