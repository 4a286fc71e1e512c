"""A digest proves arrays equal without bringing them together: digests of slices add up to that of the whole array.

The digest of an array is the CRC-32 (zlib's, of zip and PNG) of its elements' bytes, little endian and row-major, whatever
file or process they lie in: `zlib.crc32(values.tobytes())`. A CRC is linear over GF(2), so an array is the sum (exclusive or) of
its slices, each in an array of zeros; and what a run of bytes adds depends on its value and on its distance from the array's end
alone. So each rank digests what it holds, and the sum of four bytes per array and rank is compared.

It finds damage and misplaced elements, all but one in 2**32; it is no protection against forgery.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import Box, Shape, row_major, whole
from .errors import FormatError, LayoutError, SourceError, listing

ONES = 0xFFFFFFFF
POLYNOMIAL = 0xEDB88320
"""CRC-32's, lowest bit first: bit 31 is the coefficient of x**0."""

LIMIT = 256 << 20
"""Bytes of a digest's file, at most: that of a million arrays takes about this."""
DIMS = 64
"""NumPy's arrays have no more."""

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Entry:
    """The digest of an array, or of a part of it."""

    dtype: str
    shape: Shape
    sum: int
    """Of the parts so far, without the constants that CRC-32 begins and ends with."""
    size: int
    """How many elements were added."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * dtype_named(self.dtype).itemsize

    @property
    def is_whole(self) -> bool:
        return self.size == int(np.prod(self.shape, dtype=object))

    @property
    def crc32(self) -> int:
        """What `zlib.crc32` gives of the whole array's bytes."""
        return self.sum ^ int(shifted(np.asarray([ONES], np.uint32), self.nbytes)[0]) ^ ONES

    def __add__(self, other: Entry) -> Entry:
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise LayoutError(f"digests of {self.dtype} {self.shape} and {other.dtype} {other.shape} are not of one array")
        return Entry(self.dtype, self.shape, self.sum ^ other.sum, self.size + other.size)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of numbers that has this name, NumPy's or ml_dtypes', or raise `TypeError`."""
    import ml_dtypes

    found = np.dtype(getattr(ml_dtypes, name, name))
    if found.hasobject or found.name != name:
        raise TypeError(f"{name!r} is no dtype of numbers")
    return found


@dataclass(frozen=True)
class Digest:
    """The digests of a checkpoint's arrays, or of one rank's slices of them; those of disjoint slices add up.

    >>> import numpy as np, zlib
    >>> values = np.arange(6, dtype=np.int32).reshape(2, 3)
    >>> left = of_slice("a", values[:, :2], Box((0, 0), (2, 2)), (2, 3))
    >>> right = of_slice("a", values[:, 2:], Box((0, 2), (2, 1)), (2, 3))
    >>> (left + right).arrays["a"].crc32 == zlib.crc32(values.tobytes())
    True
    """

    arrays: Mapping[str, Entry] = field(default_factory=dict)

    def __add__(self, other: Digest) -> Digest:
        found = dict(self.arrays)
        for name, entry in other.arrays.items():
            found[name] = found[name] + entry if name in found else entry
        return Digest(found)

    def __str__(self) -> str:
        return "\n".join(
            f"{e.crc32:08x}  {e.dtype} {'x'.join(map(str, e.shape)) or 'scalar'}  {n}" if e.is_whole else f"{'part':8}  {n}"
            for n, e in self.arrays.items()
        )

    def save(self, path: Any) -> None:
        """Write a JSON file; an older one of this name is there until all of it is written."""
        text, place = json.dumps(self.to_json(), indent=1), os.fsdecode(path)
        try:
            if os.path.exists(place) and not os.path.isfile(place):  # a pipe, or a terminal
                _write(place, text)
                return
            place = os.path.realpath(place)
            unfinished = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.meshload-unfinished")
            try:
                _write(unfinished, text)
                os.replace(unfinished, place)
            except OSError:
                with suppress(OSError):
                    os.unlink(unfinished)
                raise
        except OSError as error:
            raise SourceError(f"{os.fsdecode(path)}: cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Any) -> Digest:
        """Read what `save` wrote."""
        name = os.fspath(path)
        try:
            with open(path, "rb") as file:
                data = file.read(LIMIT + 1)
            if len(data) > LIMIT:
                raise ValueError(f"it has more than {LIMIT} bytes")
            found = json.loads(data, object_pairs_hook=_unique)
        except OSError as error:
            raise SourceError(f"{name}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{name}: it is no digest: not JSON as expected: {error}") from error
        return Digest.from_json(found, name)

    @staticmethod
    def from_json(found: Any, name: str = "a digest") -> Digest:
        """Return what `to_json` gave; `name` is what messages call it."""
        arrays = found.get("arrays") if isinstance(found, dict) and found.get("digest") == "crc32" else None
        if not isinstance(arrays, dict):
            raise FormatError(f'{name}: it is no digest: {{"digest": "crc32", "arrays": {{...}}}} was expected')
        return Digest({array: _entry(described, f"{name}: {array}") for array, described in arrays.items()})

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `crc32` is there where the array is whole, for people and other programs."""
        return {
            "digest": "crc32",
            "arrays": {
                name: {"dtype": e.dtype, "shape": list(e.shape), "sum": f"{e.sum:08x}", "size": e.size}
                | ({"crc32": f"{e.crc32:08x}"} if e.is_whole else {})
                for name, e in self.arrays.items()
            },
        }

    @property
    def partial(self) -> list[str]:
        """The arrays of which only a part was added."""
        return [name for name, entry in self.arrays.items() if not entry.is_whole]

    def differences(self, other: Digest) -> list[tuple[str, str]]:
        """Return the arrays that the other digest says to be different, with what is different; only those that both hold."""
        found = []
        for name, entry in self.arrays.items():
            wanted = other.arrays.get(name)
            if wanted is None:
                continue
            if (entry.dtype, entry.shape) != (wanted.dtype, wanted.shape):
                found.append((name, f"is {entry.dtype} {entry.shape}, the digest is of {wanted.dtype} {wanted.shape}"))
            elif entry.is_whole and wanted.is_whole and entry.sum != wanted.sum:
                found.append((name, f"has the CRC-32 {entry.crc32:08x}, the digest says {wanted.crc32:08x}"))
        return found


def _entry(described: Any, where: str) -> Entry:
    """Return an entry of a file; what no digest can be raises."""
    try:
        dtype, shape, text, size = (described[key] for key in ("dtype", "shape", "sum", "size"))
        entry = Entry(dtype, tuple(shape), int(text, 16), size)
        counts = (*entry.shape, entry.size)
        is_one = isinstance(shape, list) and len(shape) <= DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in counts)
        is_one = is_one and re.fullmatch("[0-9a-f]{8}", text) is not None and dtype_named(dtype).itemsize > 0
    except (KeyError, TypeError, ValueError, AttributeError):
        is_one = False
    if not is_one:
        raise FormatError(
            f"{where}: dtype, shape, sum (8 hex digits) and size of an array were expected, found {str(described)[:200]}"
        )
    said = described.get("crc32")
    if said is not None and entry.is_whole and said != f"{entry.crc32:08x}":
        raise FormatError(f"{where}: its sum {text} is that of the CRC-32 {entry.crc32:08x}, crc32 says {said!r:.40}")
    return entry


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"one of the names {listing(dict.fromkeys(name for name, _ in pairs))} stands twice")
    return found


def of_slice(name: str, values: NDArray[Any], box: Box, shape: Shape) -> Digest:
    """Return what one slice adds to an array's digest: `values` are those in `box` of an array of `shape`."""
    return Digest({name: Entry(values.dtype.name, tuple(shape), sum_of(values, box, shape), values.size)})


def of_arrays(arrays: Mapping[str, NDArray[Any]]) -> Digest:
    """Return the digest of arrays in memory."""
    found = Digest()
    for name, values in arrays.items():
        found += of_slice(name, values, whole(values.shape), values.shape)
    return found


def sum_of_run(values: NDArray[Any], behind: int) -> int:
    """Return what a contiguous run adds to the sum of an array that goes on for `behind` bytes."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return int(shifted(np.asarray([zlib.crc32(data.data, ONES) ^ ONES], np.uint32), behind)[0])


def sum_of(values: NDArray[Any], box: Box, shape: Shape) -> int:
    """Return what a slice adds to the sum, from the runs that it is made of in the whole array."""
    if not values.size:
        return 0
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    itemsize = values.dtype.itemsize
    inner = values.ndim  # dims from here on are one run of the whole array
    while inner > 0 and (inner == values.ndim or box.shape[inner] == shape[inner]):
        inner -= 1
    strides = row_major(shape, itemsize)
    data = values.reshape(-1).view(np.uint8)
    count = int(np.prod(box.shape[:inner], dtype=np.int64))
    rows = data.reshape(count, -1)
    sums = np.fromiter((zlib.crc32(row.data, ONES) ^ ONES for row in rows), np.uint32, count).reshape(box.shape[:inner])
    for d in range(inner - 1, -1, -1):  # the last index of a dim stands nearest to the end
        factors = _powers(strides[d], box.shape[d])[::-1]
        sums = np.bitwise_xor.reduce(_times(sums, factors), axis=-1)
    last = sum((b - 1) * s for b, s in zip(box.stop[:inner], strides, strict=False))
    rest = sum(a * s for a, s in zip(box.start[inner:], strides[inner:], strict=True))
    end = last + rest + rows.shape[1]
    total = int(np.prod(shape, dtype=np.int64)) * itemsize
    return int(shifted(sums.reshape(1), total - end)[0])


# --- polynomials over GF(2), modulo CRC-32's ------------------------------------------------------------------------


def shifted(sums: Words, nbytes: int) -> Words:
    """Return the sums of the same bytes, followed by `nbytes` zeros."""
    return _times(sums, np.asarray(_power(nbytes), np.uint32))


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """Return x**(8 * nbytes)."""
    found, square = 1 << 31, 1 << 23  # x**0, x**8
    while nbytes:
        if nbytes & 1:
            found = _product(found, square)
        square = _product(square, square)
        nbytes >>= 1
    return found


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def _powers(nbytes: int, count: int) -> Words:
    """Return x**(8 * nbytes * i) for `i` from 0 on."""
    found = np.asarray([1 << 31], np.uint32)
    while len(found) < count:
        found = np.concatenate([found, shifted(found, nbytes * len(found))])
    return found[:count]


def _times(a: Words, b: Any) -> Words:
    """Return the products of polynomials, element by element."""
    a, b = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    product, factor = np.zeros(a.shape, np.uint32), b.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((a >> np.uint32(bit)) & np.uint32(1), factor, np.uint32(0))
        factor = (factor >> np.uint32(1)) ^ np.where(factor & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return product


def total(digests: Iterable[Digest]) -> Digest:
    """Add digests up."""
    found = Digest()
    for one in digests:
        found += one
    return found
