"""A schedule turns a plan's copies into the reads that they take: which ranges, in which order, straight or through staging.

Runs that are contiguous at both ends are read straight into their targets. Others are read in blocks through staging memory
and cut there; runs whose gap is at most `merge_gap` share a read. Decoded chunks are read one at a time. The schedule is a
value: its counts are those that the sources see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .box import boxes_of_run
from .pieces import Ints
from .source import Source

REQUEST = 8 << 20
"""Reads of 2-16 MiB reach the rate of the page cache and of disks; smaller ones pay per call."""
BLOCK = 4 << 20
"""Runs that share a read are grouped up to this; small enough to stay near the caches while they are cut."""
SMALL_BLOCK = 256 << 10
"""Under a low ceiling, fewer threads come before smaller blocks than this."""
STRAIGHT = 256 << 10
"""A contiguous run of this length or more is read straight into its target."""
THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A table of copies; `n` rows, `d` dims."""

    sources: tuple[Source, ...]
    source: Ints
    offset: Ints
    strides: Ints
    """`(n, d)`, in bytes, in the source."""
    target: Ints
    target_offset: Ints
    target_strides: Ints
    shape: Ints
    itemsize: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sizes(self) -> Ints:
        """`(n,)`: elements per copy."""
        found: Ints = self.shape.prod(axis=1, dtype=np.int64)
        return found

    @property
    def nbytes(self) -> int:
        return int((self.sizes * self.itemsize).sum())

    def take(self, rows: Ints | NDArray[np.bool_] | slice) -> Copies:
        return Copies(
            self.sources,
            self.source[rows],
            self.offset[rows],
            self.strides[rows],
            self.target[rows],
            self.target_offset[rows],
            self.target_strides[rows],
            self.shape[rows],
            self.itemsize[rows],
        )

    @staticmethod
    def union(tables: Sequence[Copies]) -> Copies:
        """Join tables, with their sources renumbered and their dims filled up in front with extents of 1."""
        if not tables:
            none, wide = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
            return Copies((), none, none, wide, none, none, wide, wide, none)
        number: dict[int, int] = {}
        sources: list[Source] = []
        columns = []
        maps: dict[int, Ints] = {}
        for t in tables:
            found = maps.get(id(t.sources))
            if found is None:
                for s in t.sources:
                    if id(s) not in number:
                        number[id(s)] = len(sources)
                        sources.append(s)
                found = maps[id(t.sources)] = np.asarray([number[id(s)] for s in t.sources], np.int64)
            columns.append(found[t.source] if len(t) else t.source)
        ndim = max(t.shape.shape[1] for t in tables)
        return Copies(
            tuple(sources),
            np.concatenate(columns),
            np.concatenate([t.offset for t in tables]),
            np.concatenate([_wide(t.strides, ndim, 0) for t in tables]),
            np.concatenate([t.target for t in tables]),
            np.concatenate([t.target_offset for t in tables]),
            np.concatenate([_wide(t.target_strides, ndim, 0) for t in tables]),
            np.concatenate([_wide(t.shape, ndim, 1) for t in tables]),
            np.concatenate([t.itemsize for t in tables]),
        )


def _wide(columns: Ints, ndim: int, value: int) -> Ints:
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0)), constant_values=value) if missing else columns


@dataclass(frozen=True, slots=True)
class Straight:
    """One contiguous run, read into its target without staging."""

    source: int
    start: int
    length: int
    target: int
    target_offset: int


@dataclass(frozen=True, slots=True)
class Staged:
    """One range read into staging memory; its `cuts` are copied from there."""

    source: int
    start: int
    length: int
    cuts: slice
    """Rows of `Schedule.cuts`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One decoded chunk; its `copies` are cut out of it."""

    source: int
    k: int
    copies: Ints
    """Rows of `Schedule.copies`."""
    nbytes: int


Read = Straight | Staged | Chunk


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of a copy's source runs that one read holds."""

    copy: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The reads of a plan."""

    copies: Copies
    """Compact: extents of 1 in front, dims by falling source stride, neighbours merged where both ends allow it."""
    inner: Ints
    """`(n,)`: how many of a copy's last dims are one contiguous run in the source."""
    straight: Ints
    """`(m, 5)`: the columns of `Straight`, in order."""
    staged: Ints
    """`(m, 5)`: source, start, length, first row and end row of `cuts`."""
    cuts: Ints
    """`(m, 3)`: the columns of `Cut`."""
    chunks: tuple[Chunk, ...]
    block: int
    threads: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes asked of the sources."""
        return int(self.straight[:, 2].sum() + self.staged[:, 2].sum()) + sum(c.nbytes for c in self.chunks)

    @cached_property
    def requests(self) -> int:
        """Requests to the sources."""
        return int((-(-self.straight[:, 2] // REQUEST)).sum()) + len(self.staged) + len(self.chunks)

    @property
    def largest_unit(self) -> tuple[int, str]:
        """The bytes of the largest single unit that must be held, and its source's name."""
        units = [(UNIT_COST * c.nbytes, c.source) for c in self.chunks]
        if len(self.staged):
            units.append((int(self.staged[:, 2].max()), int(self.staged[self.staged[:, 2].argmax(), 0])))
        need, source = max(units, default=(0, -1))
        return need, self.copies.sources[source].name if need else ""

    @property
    def peak_bytes(self) -> int:
        """Staging memory, at most."""
        staging = int(self.staged[:, 2].max()) if len(self.staged) else 0
        chunk = max((UNIT_COST * c.nbytes for c in self.chunks), default=0)
        return self.threads * max(staging, chunk) if len(self) else 0

    def __len__(self) -> int:
        return len(self.straight) + len(self.staged) + len(self.chunks)

    def __iter__(self) -> Iterator[Read]:
        """Go through the reads, as `batches` does."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Read]]:
        """Go through the reads in batches, each for one thread: ascending within a source, a few sources taken in turns."""
        of_chunks: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            of_chunks.setdefault(chunk.source, []).append(chunk)
        waiting = deque(_batched(iter(sorted(chunks, key=lambda c: c.k))) for chunks in of_chunks.values())
        waiting.extend(_batched(self._ranges(rows)) for rows in self._ranges_by_source())
        turns: deque[Iterator[list[Read]]] = deque()
        while waiting or turns:
            while waiting and len(turns) < self.threads:
                turns.append(waiting.popleft())
            reads = turns.popleft()
            batch = next(reads, None)
            if batch is not None:
                yield batch
                turns.append(reads)

    def _ranges_by_source(self) -> list[Ints]:
        """Return, per source, its straight and staged reads by ascending start: numbers of rows, the staged ones behind."""
        source = np.concatenate([self.straight[:, 0], self.staged[:, 0]])
        order = np.lexsort((np.concatenate([self.straight[:, 1], self.staged[:, 1]]), source))
        bounds = np.flatnonzero(np.diff(source[order])) + 1
        return [rows for rows in np.split(order, bounds) if len(rows)]

    def _ranges(self, rows: Ints) -> Iterator[Read]:
        """Go through some reads. They are made a few thousand at a time: there may be millions."""
        for first in range(0, len(rows), 4096):
            for row in rows[first : first + 4096].tolist():
                if row < len(self.straight):
                    source, start, length, target, at = self.straight[row].tolist()
                    for skip in range(0, length, REQUEST):
                        yield Straight(source, start + skip, min(REQUEST, length - skip), target, at + skip)
                else:
                    source, start, length, begin, end = self.staged[row - len(self.straight)].tolist()
                    yield Staged(source, start, length, slice(begin, end))


def _batched(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Let small reads share a batch: handing each to a thread costs more than the read."""
    batch: list[Read] = []
    nbytes = 0
    for read in reads:
        size = read.nbytes if isinstance(read, Chunk) else read.length
        if batch and nbytes + size > STRAIGHT:
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += size
    if batch:
        yield batch


UNIT_COST = 3
"""A chunk is held encoded, decoded and handed over: three times its size, at most."""


def schedule(copies: Copies, *, merge_gap: int | None, max_bytes: int) -> Schedule:
    """Order the reads of some copies under a memory ceiling."""
    chunked = np.asarray([s.unit != 1 for s in copies.sources], bool)
    compact = compacted(copies)
    in_chunks = chunked[compact.source] if len(compact) else np.zeros(0, bool)
    chunks = _chunks(compact, np.flatnonzero(in_chunks))
    largest = max((UNIT_COST * c.nbytes for c in chunks), default=0)
    threads = max(1, min(THREADS, max_bytes // max(largest, 2 * SMALL_BLOCK)))
    block = max(1, min(BLOCK, max_bytes // (2 * threads)))  # runs that begin in a block may reach as far behind it
    inner, straight, staged, cuts = _ranges(compact, np.flatnonzero(~in_chunks), merge_gap, block)
    return Schedule(compact, inner, straight, staged, cuts, chunks, block, threads)


def compacted(copies: Copies) -> Copies:
    """Return the same copies with as few and as long dims as both ends allow; extents of 1 stand in front."""
    if not len(copies) or copies.shape.shape[1] == 0:
        return copies
    one = copies.shape == 1
    strides, target = np.where(one, 0, copies.strides), np.where(one, 0, copies.target_strides)
    order = np.argsort(np.where(one, np.iinfo(np.int64).min, -strides), axis=1, kind="stable")
    shape, strides, target = (np.take_along_axis(c, order, axis=1) for c in (copies.shape, strides, target))
    for d in range(shape.shape[1] - 1, 0, -1):
        for _ in range(d):
            fits = (
                (shape[:, d - 1] > 1)
                & (shape[:, d] > 1)
                & (strides[:, d - 1] == shape[:, d] * strides[:, d])
                & (target[:, d - 1] == shape[:, d] * target[:, d])
            )
            if not fits.any():
                break
            shape[fits, d] *= shape[fits, d - 1]
            for columns, fill in ((shape, 1), (strides, 0), (target, 0)):
                columns[fits, 1:d] = columns[fits, : d - 1]
                columns[fits, 0] = fill
    return Copies(
        copies.sources,
        copies.source,
        copies.offset,
        strides,
        copies.target,
        copies.target_offset,
        target,
        shape,
        copies.itemsize,
    )


def _chunks(copies: Copies, rows: Ints) -> tuple[Chunk, ...]:
    if not len(rows):
        return ()
    units = np.asarray([s.unit for s in copies.sources], np.int64)[copies.source[rows]]
    k = copies.offset[rows] // units
    order = np.lexsort((k, copies.source[rows]))
    rows, k, units = rows[order], k[order], units[order]
    source = copies.source[rows]
    new = np.flatnonzero((np.diff(source, prepend=-1) != 0) | (np.diff(k, prepend=-1) != 0))
    ends = np.append(new[1:], len(rows))
    return tuple(
        Chunk(int(source[a]), int(k[a]), rows[a:b], int(units[a])) for a, b in zip(new.tolist(), ends.tolist(), strict=True)
    )


def _ranges(copies: Copies, rows: Ints, merge_gap: int | None, block: int) -> tuple[Ints, Ints, Ints, Ints]:
    inner, run = _source_runs(copies, block)
    if not len(rows):
        return inner, np.zeros((0, 5), np.int64), np.zeros((0, 5), np.int64), np.zeros((0, 3), np.int64)
    copy, index, start = _expanded(copies, rows, inner)
    length = run[copy]
    order = np.lexsort((start, copies.source[copy]))
    copy, index, start, length = copy[order], index[order], start[order], length[order]
    source = copies.source[copy]
    straight = _is_straight(copies, inner)[copy] & (length >= min(STRAIGHT, block))
    gaps = np.asarray([getattr(s, "gap", 0) if merge_gap is None else merge_gap for s in copies.sources], np.int64)[source]

    lines = np.stack(
        [source, start, length, copies.target[copy], copies.target_offset[copy] + _target_skip(copies, copy, index, inner)], axis=1
    )[straight]
    rest = ~straight
    staged, cuts = _grouped(source[rest], start[rest], length[rest], copy[rest], index[rest], gaps[rest], block)
    single = (staged[:, 4] - staged[:, 3] == 1) if len(staged) else np.zeros(0, bool)
    if single.any():  # a lone run that is contiguous at both ends needs no staging, however short
        alone = cuts[staged[single, 3]]
        plain = _is_straight(copies, inner)[alone[:, 0]] & (alone[:, 2] == 1)
        which = np.flatnonzero(single)[plain]
        more = alone[plain]
        found = np.stack(
            [
                staged[which, 0],
                staged[which, 1],
                staged[which, 2],
                copies.target[more[:, 0]],
                copies.target_offset[more[:, 0]] + _target_skip(copies, more[:, 0], more[:, 1], inner),
            ],
            axis=1,
        )
        lines = np.concatenate([lines, found])
        staged = np.delete(staged, which, axis=0)
    return inner, lines, staged, cuts


def _source_runs(copies: Copies, block: int) -> tuple[Ints, Ints]:
    """Return how many last dims form one contiguous run of the source, and its bytes; runs that must be cut stay below a block."""
    n, ndim = copies.shape.shape
    count, run = np.zeros(n, np.int64), copies.itemsize.copy()
    both = np.ones(n, bool)
    target_run = copies.itemsize.copy()
    growing = np.ones(n, bool)
    for d in range(ndim - 1, -1, -1):
        extent = copies.shape[:, d]
        contiguous = growing & ((extent == 1) | (copies.strides[:, d] == run))
        target_too = (extent == 1) | (copies.target_strides[:, d] == target_run)
        contiguous &= (both & target_too) | (run * extent <= block)
        run = np.where(contiguous, run * extent, run)
        target_run = np.where(contiguous & target_too, target_run * extent, target_run)
        both &= ~contiguous | target_too
        count += contiguous
        growing &= contiguous
    return count, run


def _is_straight(copies: Copies, inner: Ints) -> NDArray[np.bool_]:
    """Say of each copy whether its source runs are contiguous in the target too."""
    n, ndim = copies.shape.shape
    fits, run = np.ones(n, bool), copies.itemsize.copy()
    for d in range(ndim - 1, -1, -1):
        within = (ndim - 1 - d) < inner
        fits &= ~within | (copies.shape[:, d] == 1) | (copies.target_strides[:, d] == run)
        run = np.where(within, run * copies.shape[:, d], run)
    return fits


def _expanded(copies: Copies, rows: Ints, inner: Ints) -> tuple[Ints, Ints, Ints]:
    """Return one row per source run: its copy, its number in the copy, and its start."""
    ndim = copies.shape.shape[1]
    outer = np.where(np.arange(ndim)[None, :] < (ndim - inner[rows])[:, None], copies.shape[rows], 1)
    counts = outer.prod(axis=1, dtype=np.int64)
    copy = np.repeat(rows, counts)
    index = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts, counts)
    start, rest = copies.offset[copy].copy(), index.copy()
    which = np.repeat(np.arange(len(rows)), counts)
    for d in range(ndim - 1, -1, -1):
        rest, at = np.divmod(rest, outer[which, d])
        start += at * copies.strides[copy, d]
    return copy, index, start


def _target_skip(copies: Copies, copy: Ints, index: Ints, inner: Ints) -> Ints:
    """Return the target bytes from a copy's start to its run `index`."""
    ndim = copies.shape.shape[1]
    skip, rest = np.zeros(len(copy), np.int64), index.copy()
    for d in range(ndim - 1, -1, -1):
        outer = np.where(d < ndim - inner[copy], copies.shape[copy, d], 1)
        rest, at = np.divmod(rest, outer)
        skip += at * copies.target_strides[copy, d]
    return skip


def _grouped(source: Ints, start: Ints, length: Ints, copy: Ints, index: Ints, gap: Ints, block: int) -> tuple[Ints, Ints]:
    """Group sorted runs into ranges: `(m, 5)` source, start, length, first and end row of the cuts; and the `(m, 3)` cuts."""
    if not len(start):
        return np.zeros((0, 5), np.int64), np.zeros((0, 3), np.int64)
    stop = start + length
    reach = _running_maximum(source, stop)
    new = np.ones(len(start), bool)
    new[1:] = (source[1:] != source[:-1]) | (start[1:] > reach[:-1] + gap[1:])
    begin = start[np.maximum.accumulate(np.where(new, np.arange(len(start)), 0))]
    part = (start - begin) // block
    # within one block every run starts less than `block` behind its first; a block begins only where no run before reaches in
    new[1:] |= (part[1:] != part[:-1]) & (start[1:] >= reach[:-1])
    first = np.flatnonzero(new)
    end = np.append(first[1:], len(start))
    low, high = start[first], np.maximum.reduceat(stop, first)
    group = np.repeat(np.arange(len(first)), end - first)
    order = np.lexsort((index, copy, group))
    group, copy, index = group[order], copy[order], index[order]
    fresh = np.ones(len(group), bool)
    fresh[1:] = (group[1:] != group[:-1]) | (copy[1:] != copy[:-1]) | (index[1:] != index[:-1] + 1)
    rows = np.flatnonzero(fresh)
    counts = np.diff(np.append(rows, len(group)))
    cuts = np.stack([copy[rows], index[rows], counts], axis=1)
    bounds = np.searchsorted(group[rows], np.arange(len(first) + 1))
    return np.stack([source[first], low, high - low, bounds[:-1], bounds[1:]], axis=1), cuts


def _running_maximum(source: Ints, stop: Ints) -> Ints:
    """Return the largest stop so far within the same source."""
    base = np.concatenate([[0], np.cumsum(np.diff(source) != 0)]) * (int(stop.max()) + 1)
    found: Ints = np.maximum.accumulate(stop + base) - base
    return found


def boxes_of_cut(
    copies: Copies, inner: Ints, cut: Cut
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return the source offset, target offset, shape, source and target strides of the boxes that a cut copies."""
    copy, ndim = cut.copy, copies.shape.shape[1]
    lead = ndim - int(inner[copy])
    shape = tuple(copies.shape[copy].tolist())
    strides, target = tuple(copies.strides[copy].tolist()), tuple(copies.target_strides[copy].tolist())
    for box in boxes_of_run(shape[:lead], cut.first, cut.first + cut.count):
        yield (
            int(copies.offset[copy]) + _dot(box.start, strides),
            int(copies.target_offset[copy]) + _dot(box.start, target),
            (*box.shape, *shape[lead:]),
            strides,
            target,
        )


def _dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * step for i, step in zip(index, strides, strict=False))
