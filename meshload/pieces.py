"""Pieces tell where an array's elements lie: a table with one row per stored box.

Element `i` of a row's box is at byte `offset + i . strides` of the row's source, `i` counted from the box's start. That
covers row-major files, shards, transposed and fused weights, stacked layers, flat fragments and memory. The columns are
NumPy arrays, so that a million rows cost array work, not a million objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import Box, Shape, row_major

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Where elements lie. Rows with no element are never kept."""

    sources: Sequence[Any]
    """What the column `source` counts: files, chunked arrays, or places in memory."""
    source: Ints
    offset: Ints
    """`(n,)`, in bytes."""
    start: Ints
    """`(n, d)`, in elements."""
    shape: Ints
    strides: Ints
    """`(n, d)`, in bytes."""

    @property
    def ndim(self) -> int:
        return int(self.start.shape[1])

    def __len__(self) -> int:
        return len(self.source)

    @property
    def stop(self) -> Ints:
        return self.start + self.shape

    @property
    def sizes(self) -> Ints:
        """`(n,)`: the number of elements per row."""
        found: Ints = self.shape.prod(axis=1, dtype=np.int64)
        return found

    def take(self, rows: Ints | NDArray[np.bool_] | slice) -> Pieces:
        """Return some of the rows: numbers, a mask or a slice."""
        return Pieces(self.sources, self.source[rows], self.offset[rows], self.start[rows], self.shape[rows], self.strides[rows])

    def narrow(self, dim: int, start: int, stop: int) -> Pieces:
        """Keep the elements with `start <= i[dim] < stop`, and count from `start`."""
        low = np.maximum(self.start[:, dim], start)
        high = np.minimum(self.start[:, dim] + self.shape[:, dim], stop)
        keep = high > low
        if not keep.all():
            return self.take(keep).narrow(dim, start, stop)
        offset = self.offset + (low - self.start[:, dim]) * self.strides[:, dim]
        return Pieces(
            self.sources,
            self.source,
            offset,
            _with(self.start, dim, low - start),
            _with(self.shape, dim, high - low),
            self.strides,
        )

    def index(self, dim: int, i: int) -> Pieces:
        """Keep the elements with `i[dim] == i`, and drop the dim."""
        cut = self.narrow(dim, i, i + 1)
        columns = [c for c in range(self.ndim) if c != dim]
        return cut._columns(columns)

    def transpose(self, order: Sequence[int]) -> Pieces:
        """Reorder the dims: new dim `d` is old dim `order[d]`."""
        return self._columns(list(order))

    def _columns(self, order: list[int]) -> Pieces:
        return Pieces(self.sources, self.source, self.offset, self.start[:, order], self.shape[:, order], self.strides[:, order])

    def place(self, start: Sequence[int]) -> Pieces:
        """Move the rows to `start`: they become part of a larger array."""
        moved = self.start + np.asarray(start, np.int64)
        return Pieces(self.sources, self.source, self.offset, moved, self.shape, self.strides)

    def insert(self, dim: int, at: int | Ints = 0) -> Pieces:
        """Add a dim of extent 1 before `dim`, at index `at` (one for all rows, or one per row)."""
        starts = np.broadcast_to(np.asarray(at, np.int64), (len(self),))
        return Pieces(
            self.sources,
            self.source,
            self.offset,
            np.insert(self.start, dim, starts, axis=1),
            np.insert(self.shape, dim, 1, axis=1),
            np.insert(self.strides, dim, 0, axis=1),
        )

    def split(self, dim: int, sizes: Sequence[int]) -> Pieces:
        """Split a dim into row-major finer dims. A row whose run is not aligned becomes at most `2k - 1` rows for `k` dims."""
        if not sizes:
            return self._columns([c for c in range(self.ndim) if c != dim])
        table, position = self, dim
        for inner in _inner_sizes(sizes):
            table = table._split_two(position, inner)
            position += 1
        return table

    def _split_two(self, dim: int, inner: int) -> Pieces:
        """Split a dim into (outer, inner): head and tail of a run that is not aligned become rows of their own."""
        if len(self) == 0 or inner == 0:
            return empty(self.ndim + 1, self.sources)
        start, count = self.start[:, dim], self.shape[:, dim]
        row, column = np.divmod(start, inner)
        last = (start + count - 1) // inner
        single = row == last
        head = ~single & (column > 0)
        end = (start + count) - last * inner  # 1..inner elements in the last row
        tail = ~single & (end < inner)
        first_full = row + head
        full = np.where(single, 0, last + 1 - tail - first_full)
        body = full > 0
        parts = []
        for mask, outer, outer_n, inner_at, inner_n in (
            (single, row, 1, column, count),
            (head, row, 1, column, inner - column),
            (body, first_full, full, 0, inner),
            (tail, last, 1, 0, end),
        ):
            if mask.any():
                parts.append(self._rows_of_split(dim, inner, mask, outer, outer_n, inner_at, inner_n))
        return union(parts)

    def _rows_of_split(
        self,
        dim: int,
        inner: int,
        mask: NDArray[np.bool_],
        outer: Ints,
        outer_n: int | Ints,
        inner_at: int | Ints,
        inner_n: int | Ints,
    ) -> Pieces:
        n = len(self)

        def chosen(value: int | Ints) -> Ints:
            return np.broadcast_to(np.asarray(value, np.int64), (n,))[mask]

        rows = self.take(mask)
        outer_at, column_at = chosen(outer), chosen(inner_at)
        stride = rows.strides[:, dim]
        skipped = outer_at * inner + column_at - rows.start[:, dim]
        return Pieces(
            rows.sources,
            rows.source,
            rows.offset + skipped * stride,
            _replaced(rows.start, dim, outer_at, column_at),
            _replaced(rows.shape, dim, chosen(outer_n), chosen(inner_n)),
            _replaced(rows.strides, dim, stride * inner, stride),
        )

    def merge(self, dim: int, sizes: Sequence[int]) -> Pieces:
        """Merge `len(sizes)` dims from `dim` on into one row-major dim; `sizes` are those of the array's dims.

        A row stays one where its outer extent is 1, or its inner dim is whole and the strides fit; else one row per outer index.
        """
        if not sizes:
            return self.insert(dim)
        table = self
        inner = sizes[-1]
        for n in range(len(sizes) - 2, -1, -1):
            table = table._merge_two(dim + n, inner)
            inner *= sizes[n]
        return table

    def _merge_two(self, dim: int, inner: int) -> Pieces:
        fits: NDArray[np.bool_] = self.shape[:, dim] == 1
        whole = self.shape[:, dim + 1] == inner
        follows = self.strides[:, dim] == inner * self.strides[:, dim + 1]
        fits = fits | (whole & follows) | (inner == 1)
        table = self if fits.all() else union([self.take(fits), self.take(~fits)._one_row_per_index(dim)])
        one = table.shape[:, dim] == 1
        stride = np.where(one | (inner > 1), table.strides[:, dim + 1], table.strides[:, dim])
        return Pieces(
            table.sources,
            table.source,
            table.offset,
            _merged(table.start, dim, table.start[:, dim] * inner + table.start[:, dim + 1]),
            _merged(table.shape, dim, table.shape[:, dim] * table.shape[:, dim + 1]),
            _merged(table.strides, dim, stride),
        )

    def _one_row_per_index(self, dim: int) -> Pieces:
        counts = self.shape[:, dim]
        rows, step = repeated(counts)
        table = self.take(rows)
        return Pieces(
            table.sources,
            table.source,
            table.offset + step * table.strides[:, dim],
            _with(table.start, dim, table.start[:, dim] + step),
            _with(table.shape, dim, np.ones(len(rows), np.int64)),
            table.strides,
        )


def piece(source: Any, offset: int, shape: Shape, itemsize: int, *, strides: Shape | None = None) -> Pieces:
    """Return the pieces of an array stored whole at one place, row-major unless `strides` say otherwise.

    >>> piece("file", 8, (2, 3), 4).strides.tolist()
    [[12, 4]]
    """
    if 0 in shape:
        return empty(len(shape), (source,))
    return table([source], [0], [offset], [(0,) * len(shape)], [shape], [strides or row_major(shape, itemsize)])


def table(
    sources: Sequence[Any],
    source: Sequence[int] | Ints,
    offset: Sequence[int] | Ints,
    start: Sequence[Sequence[int]] | Ints,
    shape: Sequence[Sequence[int]] | Ints,
    strides: Sequence[Sequence[int]] | Ints,
) -> Pieces:
    """Return pieces from columns; rows without elements are dropped. `start`, `shape` and `strides` are `(n, d)`."""
    columns = [np.asarray(c, np.int64) for c in (source, offset, start, shape, strides)]
    n = len(columns[0])
    if n == 0:
        return empty(columns[2].shape[1] if columns[2].ndim == 2 else 0, sources)
    columns[2:] = [c.reshape(n, -1) for c in columns[2:]]
    if not columns[2].shape == columns[3].shape == columns[4].shape or len(columns[1]) != n:
        raise ValueError(f"columns do not fit: {[c.shape for c in columns]}")
    made = Pieces(tuple(sources), *columns)
    full: NDArray[np.bool_] = np.all(made.shape > 0, axis=1)
    return made if full.all() else made.take(full)


def empty(ndim: int, sources: Sequence[Any] = ()) -> Pieces:
    """Return a table without rows."""
    none, wide = np.zeros(0, np.int64), np.zeros((0, ndim), np.int64)
    return Pieces(sources, none, none, wide, wide, wide)


def union(tables: Sequence[Pieces]) -> Pieces:
    """Join the rows of tables of one array, their sources renumbered."""
    if len(tables) == 1:
        return tables[0]
    if not tables:
        raise ValueError("a union needs at least one table")
    if all(t.sources is tables[0].sources for t in tables):
        sources, source = tables[0].sources, np.concatenate([t.source for t in tables])
    else:
        sources, source = renumbered(tables)
    return Pieces(
        sources,
        source,
        np.concatenate([t.offset for t in tables]),
        np.concatenate([t.start for t in tables]),
        np.concatenate([t.shape for t in tables]),
        np.concatenate([t.strides for t in tables]),
    )


def stacked(tables: Sequence[Pieces], at: Ints) -> Pieces:
    """Join tables of arrays of one shape as parts of a larger array: table `i` at index `at[i]` of new dims in front.

    `at` is `(n, k)` for `n` tables and `k` new dims; cheap for many small tables.
    """
    rows = union(tables)
    counts = np.fromiter((len(t) for t in tables), np.int64, len(tables))
    lead = np.repeat(at, counts, axis=0)
    return Pieces(
        rows.sources,
        rows.source,
        rows.offset,
        np.concatenate([lead, rows.start], axis=1),
        np.concatenate([np.ones_like(lead), rows.shape], axis=1),
        np.concatenate([np.zeros_like(lead), rows.strides], axis=1),
    )


def renumbered(tables: Sequence[Any]) -> tuple[tuple[Any, ...], Ints]:
    """Return the sources of all tables, each once, and the `source` columns one after another, counted over these."""
    number: dict[int, int] = {}
    sources: list[Any] = []
    maps: dict[int, Ints] = {}
    columns = []
    for t in tables:
        renumber = maps.get(id(t.sources))
        if renumber is None:
            for s in t.sources:
                if id(s) not in number:
                    number[id(s)] = len(sources)
                    sources.append(s)
            renumber = maps[id(t.sources)] = np.asarray([number[id(s)] for s in t.sources], np.int64)
        columns.append(renumber[t.source] if len(t) else t.source)
    return tuple(sources), np.concatenate(columns)


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Return the number of each row, as often as it counts, and the place of each among those of its row.

    >>> repeated(np.asarray([2, 0, 3]))
    (array([0, 0, 2, 2, 2]), array([0, 1, 0, 1, 2]))
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)


def boxes(pieces: Pieces) -> list[Box]:
    """Return the rows' boxes as objects, for small tables and messages."""
    return [Box(tuple(a), tuple(n)) for a, n in zip(pieces.start.tolist(), pieces.shape.tolist(), strict=True)]


def _inner_sizes(sizes: Sequence[int]) -> list[int]:
    """Return, for each but the last of the new dims, the product of those behind it."""
    inner, found = 1, []
    for n in reversed(sizes[1:]):
        inner *= n
        found.append(inner)
    return found[::-1]


def _with(columns: Ints, dim: int, values: Ints) -> Ints:
    changed = columns.copy()
    changed[:, dim] = values
    return changed


def _replaced(columns: Ints, dim: int, outer: Ints, inner: Ints) -> Ints:
    return np.concatenate([columns[:, :dim], outer[:, None], inner[:, None], columns[:, dim + 1 :]], axis=1)


def _merged(columns: Ints, dim: int, values: Ints) -> Ints:
    return np.concatenate([columns[:, :dim], values[:, None], columns[:, dim + 2 :]], axis=1)
