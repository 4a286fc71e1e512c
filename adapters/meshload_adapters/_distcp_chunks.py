"""A `.distcp` file (`_distcp.py`) as a source of its tensors: where in its entry a tensor lies is looked up when it is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.box import Shape, boxes_of_run, row_major
from meshload.errors import FormatError
from meshload.pieces import Ints
from meshload.source import Bytes, ByteSource, read_bytes

from ._pickle import Global, Record
from ._torch_file import DTYPES, Tensor, TorchFile

TOGETHER = 1 << 20
"""Neighbouring entries are read at once, headers and all, up to this many bytes."""

EDGE = 1 << 10
"""What stands before the tensor in an entry of torch's, and what behind it, is shorter."""

BLOCK = 4 << 20
"""Tensors whose strides are not row-major are read by ranges of this many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How a tensor lies in its entry."""

    begin: int
    """Its first element, in bytes behind the entry's first."""
    strides: Shape | None
    """In bytes; None where they are row-major."""


@dataclass(frozen=True, slots=True, eq=False)
class _Twin:
    """The bytes around the tensor of one entry, but for checksums. Where those of another are the same, so is its layout."""

    layout: _Layout
    head: bytes
    tail: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    """Which bytes of the tail are compared."""


@dataclass(eq=False)
class Chunks:
    """A data file whose tensors begin where their entries do, row-major: byte `i` of a tensor is byte `offset + i` here.

    That is never beyond its entry. Where in the entry it is in truth, the entry's own pickle and zip directory tell: they are
    read when bytes of the tensor are, compared with what `.metadata` says, and the place is kept. Beside `out`, a read takes
    at most `TOGETHER` bytes, and `2 * BLOCK` where strides are not row-major.
    """

    source: ByteSource
    offset: Ints
    """Where each entry begins; ascending."""
    length: Ints
    nbytes: Ints
    """Bytes of its tensor."""
    tensor: Ints
    shape: Ints
    ndim: Ints
    """Dims of the tensor; more in `shape` are filled up."""
    names: Sequence[str]
    """Of all tensors, in this file or not, as `dtypes`."""
    dtypes: Sequence[str]

    unit = 1

    def __post_init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}
        self._twins: dict[tuple[str, Shape, int], _Twin] = {}

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def gap(self) -> int:
        return self.source.gap

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out`; what lies between tensors is left as it is."""
        stop = start + len(out)
        first = max(0, int(np.searchsorted(self.offset, start, side="right")) - 1)
        end = int(np.searchsorted(self.offset, stop, side="left"))
        while first < end:
            last = self._together(first, end, len(out))
            view: ByteSource = self.source
            if last > first:
                view = _held(view, int(self.offset[first]), int(self.offset[last - 1] + self.length[last - 1]))
            for k in range(first, max(last, first + 1)):
                begin = int(self.offset[k])
                low, high = max(start, begin), min(stop, begin + int(self.nbytes[k]))
                if low < high:
                    self._read(k, view, low - begin, out[low - start : high - start])
            first = max(last, first + 1)

    def located(self, start: int, nbytes: int) -> tuple[Any, int]:
        """Return the data file, and where in it bytes of one tensor lie; this source itself where they are no run there."""
        k = int(np.searchsorted(self.offset, start, side="right")) - 1
        layout = self._layout(k, self.source) if k >= 0 and start + nbytes <= self.offset[k] + self.nbytes[k] else None
        return (self, start) if layout is None or layout.strides is not None else (self.source, start + layout.begin)

    def _together(self, first: int, end: int, wanted: int) -> int:
        """Return the end of the entries from `first` on that are worth reading whole; `first` where none is."""
        reach = np.searchsorted(self.offset[first:end] + self.length[first:end], self.offset[first] + TOGETHER, side="right")
        last = first + int(reach)
        if last == first or (last == first + 1 and (first in self._layouts or 2 * wanted < self.length[first])):
            return first
        return last

    def _read(self, k: int, view: ByteSource, skip: int, out: Bytes) -> None:
        layout = self._layout(k, view)
        begin = int(self.offset[k]) + layout.begin
        if layout.strides is None:
            view.read_into(begin + skip, out)
        else:
            itemsize = DTYPES[self.dtypes[int(self.tensor[k])]].itemsize
            _gather(view, begin, layout.strides, self._shape(k), itemsize, skip, out)

    def _shape(self, k: int) -> Shape:
        return tuple(self.shape[k, : int(self.ndim[k])].tolist())

    def _layout(self, k: int, view: ByteSource) -> _Layout:
        found = self._layouts.get(k)
        if found is None:
            found = self._layouts[k] = self._look_up(k, view)
        return found

    def _look_up(self, k: int, view: ByteSource) -> _Layout:
        begin, length, nbytes = int(self.offset[k]), int(self.length[k]), int(self.nbytes[k])
        kind = (self.dtypes[int(self.tensor[k])], self._shape(k), length)
        if not isinstance(view, _Held):
            middle = begin + length - EDGE
            view = _held(_held(view, begin, min(begin + EDGE, begin + length)), max(begin, middle), begin + length)
        twin = self._twins.get(kind)
        if twin is not None:
            head = read_bytes(view, begin, begin + len(twin.head))
            tail = read_bytes(view, begin + length - len(twin.tail), begin + length)
            if head == twin.head and np.array_equal(np.frombuffer(tail, np.uint8)[twin.kept], twin.tail[twin.kept]):
                return twin.layout
        layout = self._parsed(k, view)
        tail_length = length - layout.begin - nbytes
        if twin is None and layout.strides is None and layout.begin <= EDGE and 0 <= tail_length <= EDGE:
            head = read_bytes(view, begin, begin + layout.begin)
            self._twins[kind] = _twin(layout, head, read_bytes(view, begin + length - tail_length, begin + length))
        return layout

    def _parsed(self, k: int, view: ByteSource) -> _Layout:
        """Read an entry's own description of its tensor."""
        begin, length, shape = int(self.offset[k]), int(self.length[k]), self._shape(k)
        tensor = int(self.tensor[k])
        what = f"{self.names[tensor]}: its entry at bytes {begin} to {begin + length} of {self.name}"
        try:
            file = TorchFile.open(view, begin, begin + length)
        except FormatError as error:
            raise FormatError(f"{what} cannot be used: {error}") from error
        found, dtype = file.root, self.dtypes[tensor]
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (dtype, shape):
            kind = f"{found.dtype} {found.shape}" if isinstance(found, Tensor) else f"{_kind(found)}, no tensor"
            raise FormatError(f"{what} is {kind}, expected is {dtype} {shape}")
        pieces = file.array(found, what).pieces
        strides = tuple(pieces.strides[0].tolist())
        usual = row_major(shape, DTYPES[dtype].itemsize)
        is_usual = all(n == 1 or s == u for n, s, u in zip(shape, strides, usual, strict=True))
        return _Layout(int(pieces.offset[0]) - begin, None if is_usual else strides)


def _kind(found: Any) -> str:
    return f"{found.module}.{found.name}" if isinstance(found, Record | Global) else type(found).__name__


_CHECKSUMS = re.compile(rb"(?<=PK\x07\x08).{4}|(?<=PK\x01\x02.{12}).{4}|\d{40}", re.DOTALL)
"""What differs between entries of one layout: checksums behind the data and in the directory, and the hash of the whole."""


def _twin(layout: _Layout, head: bytes, tail: bytes) -> _Twin:
    kept = np.ones(len(tail), bool)
    for match in _CHECKSUMS.finditer(tail):
        kept[match.start() : match.end()] = False
    return _Twin(layout, head, np.frombuffer(tail, np.uint8), kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A source of which a range was read already."""

    source: ByteSource
    start: int
    held: Bytes
    unit: int = 1
    gap: int = 0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int:
        return self.source.size

    def read_into(self, start: int, out: Bytes) -> None:
        at = start - self.start
        if at >= 0 and at + len(out) <= len(self.held):
            out[:] = self.held[at : at + len(out)]
        else:
            self.source.read_into(start, out)


def _held(source: ByteSource, start: int, stop: int) -> _Held:
    held = np.empty(stop - start, np.uint8)
    source.read_into(start, held)
    return _Held(source, start, held)


def _gather(view: ByteSource, begin: int, strides: Shape, shape: Shape, itemsize: int, skip: int, out: Bytes) -> None:
    """Fill `out` with the row-major bytes from `skip` on of a tensor that is stored with other strides."""
    first, last = skip // itemsize, -(-(skip + len(out)) // itemsize)
    word = np.dtype((np.void, itemsize))
    values = np.empty(last - first, word)
    at = 0
    for box in boxes_of_run(shape, first, last):
        offset = begin + sum(i * s for i, s in zip(box.start, strides, strict=True))
        _fill(view, offset, strides, values[at : at + box.size].reshape(box.shape))
        at += box.size
    out[:] = values.view(np.uint8)[skip - first * itemsize :][: len(out)]


def _fill(view: ByteSource, offset: int, strides: Shape, values: NDArray[Any]) -> None:
    """Fill an array from a strided box: by the range that it spans, or in two halves where that is long."""
    reach = [(n - 1) * s for n, s in zip(values.shape, strides, strict=True)]
    span = sum(reach) + values.itemsize
    if span <= BLOCK or values.size == 1:
        held = np.empty(span, np.uint8)
        view.read_into(offset, held)
        values[...] = np.ndarray(values.shape, values.dtype, held, 0, strides)
        return
    dim = int(np.argmax(reach))
    half = values.shape[dim] // 2
    low, high = np.split(values, [half], axis=dim)
    _fill(view, offset, strides, low)
    _fill(view, offset + half * strides[dim], strides, high)
