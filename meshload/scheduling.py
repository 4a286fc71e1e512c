"""A schedule turns a plan's copies into the reads that they take: which ranges, in which order, straight or through staging.

Runs that are contiguous at both ends go straight into their targets: long ones in requests of their own, shorter ones, such as
the rows of a row-parallel weight, many at a time. Others are read in blocks through staging memory and cut there. Runs whose gap
is at most `merge_gap` share a range of the source. Decoded chunks are read whole. The schedule is a value: its counts are those
that the sources see. It names runs part by part, as they are read or counted, since a large model has millions.

What is read that nobody wants follows from one number per source, its `gap`: so many unwanted bytes cost as much as one request.
`merge_gap=` is the knob in its place: 0 reads exactly what is wanted, a large one whole ranges that are cut in memory.

- Local and warm: a row costs some 0.6 us in a queue of hundreds, as much as copying some 8 KiB out of the page cache (measured on 2
  cores). Ranges do not matter there: rows are taken one by one, and nothing that lies between them (`LocalFile.read_runs`).
- Local and cold: a disk reads whole pages, and some 20 to 60 KiB while it finds a place; it is asked for all ranges of a batch at
  once and finds one while it reads others, so that the gap is a page (`LocalFile.gap`). Of row-parallel weights at tp=4 it then
  reads half of what plain reading through the gaps does, in the same time.
- Over a network: a request costs as much as some hundred kilobytes (`KeyValueFile.gap`).

Mapped files are no third way: reading rows of them is a fifth faster, and ends the process where another cuts the file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from .box import boxes_of_run
from .pieces import Ints, renumbered, repeated
from .source import Source

REQUEST = 8 << 20
"""Reads of 2-16 MiB reach the rate of the page cache and of disks; smaller ones pay per call."""
BLOCK = 2 << 20
"""Runs that share a range are grouped up to this; small enough to stay near the caches while they are cut (1-2 MiB were best)."""
SMALL_BLOCK = 256 << 10
"""Under a low ceiling, fewer threads come before smaller blocks than this."""
LONG = 256 << 10
"""A contiguous run of this length or more is a request of its own."""
SHORT = 512
"""A row of many shorter than this costs more to name to the kernel, some 20 ns, than to copy out of staging memory."""
TASK = 2 << 20
"""Shorter runs are handed to a thread together, up to this: handing each costs more than the read."""
THREADS = min(8, 1 + len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1 + (os.cpu_count() or 1))
"""One more than the cores, since reading waits: on 2 cores 3 threads were the fastest of 2, 3, 4 and 8, warm and cold, and 8 up to
half slower, since they wait for each other's Python.
"""
NETWORK_THREADS = 32
"""A request over a network takes some 20 to 100 ms, whatever its size."""


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

    @property
    def spans(self) -> tuple[Ints, Ints]:
        """`(n,)` each: the first byte of a copy in its source, and the one behind its last."""
        reach = (self.shape - 1) * self.strides
        return self.offset + reach.clip(max=0).sum(axis=1), self.offset + reach.clip(min=0).sum(axis=1) + self.itemsize

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
        sources, source = renumbered(tables)
        ndim = max(t.shape.shape[1] for t in tables)
        return Copies(
            sources,
            source,
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


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """Ranges of one source, ascending, whose runs go straight into their targets."""

    source: int
    ranges: Ints
    """Rows of `Part.ranges`."""
    runs: Ints
    """Rows of `Part.straight`, from that on with which the first range begins."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Ranges of one source, each read into staging memory, from where its cuts are copied."""

    source: int
    ranges: Ints
    """Rows of `Part.staged`."""
    cuts: Ints
    """All of `Part.cuts`."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One decoded chunk; its `copies` are cut out of it."""

    source: int
    k: int
    copies: Ints
    """Rows of `Schedule.copies`."""
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Some chunks of one source, small ones together."""

    source: int
    chunks: tuple[Chunk, ...]


Batch = Straight | Staged | Decoded
"""What is handed to a thread at once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of a copy's source runs that one read holds."""

    copy: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The runs of some copies, and the ranges that they are read by."""

    straight: Ints
    """`(m, 5)`, ascending: source, start, length, target and target offset of the runs that need no staging."""
    ranges: Ints
    """`(m, 5)`: source, start, length, first row and end row of `straight`."""
    staged: Ints
    """`(m, 5)`: source, start, length, first row and end row of `cuts`."""
    cuts: Ints
    """`(m, 3)`: the columns of `Cut`."""

    def batches(self, block: int) -> list[Batch]:
        """Return the reads in batches, ascending."""
        found: list[tuple[int, int, Batch]] = []
        for rows in _tasks(self.ranges, block):
            source, start = rows[0, :2].tolist()
            found.append((source, start, Straight(source, rows, self.straight[rows[0, 3] : rows[-1, 4]])))
        for rows in _tasks(self.staged, block):
            source, start = rows[0, :2].tolist()
            found.append((source, start, Staged(source, rows, self.cuts)))
        return [batch for _, _, batch in sorted(found, key=itemgetter(0, 1))]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The reads of a plan. Runs are named part by part as they are read: a large model has millions."""

    copies: Copies
    """Compact: extents of 1 in front, dims by falling source stride, neighbours merged where both ends allow it."""
    inner: Ints
    """`(n,)`: how many of a copy's last dims are one contiguous run in the source."""
    groups: Sequence[Ints]
    """The copies of each part, ascending, by number."""
    gaps: Ints
    """Per source: unwanted bytes that are read rather than skipped."""
    chunks: tuple[Chunk, ...]
    largest_unit: tuple[int, str]
    """The bytes of the largest single unit that must be held, and its source's name."""
    block: int
    threads: int

    def parts(self) -> Iterator[Part]:
        """Go through the parts, each made when it is asked for."""
        return iter(self._all) if len(self.groups) == 1 else map(self._part, self.groups)

    @cached_property
    def _all(self) -> list[Part]:
        return [self._part(rows) for rows in self.groups]

    def _part(self, rows: Ints) -> Part:
        return _ranges(self.copies, rows, self.inner, self.gaps, self.block)

    @cached_property
    def nbytes(self) -> int:
        """Bytes asked of the sources."""
        return self._counts[0]

    @property
    def requests(self) -> int:
        """Requests to the sources."""
        return self._counts[1]

    @property
    def peak_bytes(self) -> int:
        """Memory beside the targets, at most, that all threads hold."""
        return self.threads * self._counts[2]

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        """Bytes, requests, and the most that a batch holds."""
        nbytes, requests, held = sum(c.nbytes for c in self.chunks), len(self.chunks), 0
        for decoded in _decoded(self.chunks, self.block):
            held = max(held, self._held_by(decoded))
        for part in self.parts():
            nbytes += int(part.ranges[:, 2].sum() + part.staged[:, 2].sum())
            requests += len(part.ranges) + len(part.staged)
            held = max(held, self._held_in(part))
        return nbytes, requests, held

    def _held_in(self, part: Part) -> int:
        """Return the most that a batch of a part holds; where no source holds what it hands over, a range of it."""
        if _holding(self.copies.sources).any():
            return max(map(self._held_by, part.batches(self.block)), default=0)
        several = part.ranges[:, 4] - part.ranges[:, 3] > 1
        return max(int(part.staged[:, 2].max(initial=0)), int(part.ranges[several, 2].max(initial=0)))

    def _held_by(self, batch: Batch) -> int:
        """Return the memory that a batch takes while it is read."""
        if isinstance(batch, Decoded):
            return UNIT_COST * sum(c.nbytes for c in batch.chunks)
        holds = getattr(self.copies.sources[batch.source], "holds", False)
        length, runs = batch.ranges[:, 2], batch.ranges[:, 4] - batch.ranges[:, 3]
        if isinstance(batch, Staged):
            return int(length.max()) * (2 if holds else 1)
        return int(length.sum() if holds else length[runs > 1].max(initial=0))

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Go through the requests, in the order of `batches`: number of the source, start, length."""
        for batch in self.batches():
            if isinstance(batch, Decoded):
                units = self.copies.sources[batch.source].unit
                yield from ((batch.source, c.k * units, c.nbytes) for c in batch.chunks)
            else:
                yield from (tuple(row) for row in batch.ranges[:, :3].tolist())

    def batches(self) -> Iterator[Batch]:
        """Go through the reads in batches, each for one thread: ascending within a source, a few sources taken in turns."""
        yield from _in_turns(_decoded(self.chunks, self.block), self.threads)
        for part in self.parts():
            yield from _in_turns(part.batches(self.block), self.threads)


def _in_turns(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Take batches from up to so many sources in turns."""
    of_source: dict[int, list[Batch]] = {}
    for batch in batches:
        of_source.setdefault(batch.source, []).append(batch)
    waiting = deque(iter(found) for _, found in sorted(of_source.items()))
    turns: deque[Iterator[Batch]] = deque()
    while waiting or turns:
        while waiting and len(turns) < most:
            turns.append(waiting.popleft())
        batches_left = turns.popleft()
        next_one = next(batches_left, None)
        if next_one is not None:
            yield next_one
            turns.append(batches_left)


def _tasks(ranges: Ints, block: int) -> list[Ints]:
    """Cut a table of ranges into tasks: ranges of one source that follow each other, up to `TASK` or a block of bytes."""
    if not len(ranges):
        return []
    full, long = min(TASK, block), ranges[:, 2] >= min(LONG, block)
    before = np.cumsum(ranges[:, 2]) - ranges[:, 2]
    new = np.diff(before // full, prepend=-1) != 0
    new[1:] |= long[1:] | long[:-1] | (np.diff(ranges[:, 0]) != 0)
    return np.split(ranges, np.flatnonzero(new)[1:])


def _decoded(chunks: Iterable[Chunk], block: int) -> Iterator[Decoded]:
    """Let small chunks of a source share a batch: handing each to a thread costs more than decoding it."""
    batch: list[Chunk] = []
    nbytes = 0
    for chunk in chunks:
        if batch and (nbytes + chunk.nbytes > min(LONG, block // 2) or chunk.source != batch[0].source):
            yield Decoded(batch[0].source, tuple(batch))
            batch, nbytes = [], 0
        batch.append(chunk)
        nbytes += chunk.nbytes
    if batch:
        yield Decoded(batch[0].source, tuple(batch))


UNIT_COST = 3
"""A chunk is held encoded, decoded and handed over: three times its size, at most."""


def schedule(copies: Copies, *, merge_gap: int | None, max_bytes: int) -> Schedule:
    """Order the reads of some copies under a memory ceiling."""
    units = np.asarray([s.unit for s in copies.sources], np.int64)
    held = _holding(copies.sources)
    compact = compacted(copies)
    in_chunks = units[compact.source] > 1
    largest = UNIT_COST * int(units[compact.source[in_chunks]].max(initial=0))
    parts = 4 if held.any() else 2  # a range that begins in a block may reach as far behind it; some sources hold it twice
    is_far = held.any() or any(getattr(s, "is_far", False) for s in copies.sources)
    threads = max(1, min(NETWORK_THREADS if is_far else THREADS, max_bytes // max(largest, parts * SMALL_BLOCK)))
    block = max(1, min(BLOCK, max_bytes // (parts * threads)))
    compact = _shortened(compact, ~in_chunks, block)
    in_chunks = units[compact.source] > 1
    chunks, rows = _chunks(compact, np.flatnonzero(in_chunks)), np.flatnonzero(~in_chunks)
    inner, run = _source_runs(compact, block)
    counts = _outer(compact, inner).prod(axis=1, dtype=np.int64)
    gaps = np.asarray([getattr(s, "gap", 0) if merge_gap is None else merge_gap for s in copies.sources], np.int64)
    held_whole = [(UNIT_COST * c.nbytes, c.source) for c in chunks]
    cut = rows[~_is_straight(compact, inner)[rows] | ((run[rows] < min(SHORT, block)) & (counts[rows] > 1))]
    held_whole += [(int(run[i]), int(compact.source[i])) for i in cut[run[cut].argsort()[-1:]]]
    need, source = max(held_whole, default=(0, -1))
    largest_unit = need, compact.sources[source].name if need else ""
    return Schedule(compact, inner, _groups(compact, rows, counts), gaps, chunks, largest_unit, block, threads)


PART = 1 << 12
"""Runs that are named at once: their columns, some 1 MB in all, stay in a core's cache, and the first are soon there to be read."""


def _shortened(copies: Copies, which: NDArray[np.bool_], block: int) -> Copies:
    """Cut those of some copies that have more runs than a part along their first dims."""
    for d in range(copies.shape.shape[1]):
        outer = _outer(copies, _source_runs(copies, block)[0])
        slabs = np.where(which, np.minimum(-(-outer.prod(axis=1, dtype=np.int64) // PART), outer[:, d]), 1)
        if (slabs > 1).any():
            rows, k = repeated(slabs)
            n = slabs[rows]
            copies, which, extent = copies.take(rows), which[rows], copies.shape[rows, d]
            first, end = k * extent // n, (k + 1) * extent // n
            copies.shape[:, d] = end - first
            copies.offset[:] += first * copies.strides[:, d]
            copies.target_offset[:] += first * copies.target_strides[:, d]
    return copies


def _groups(copies: Copies, rows: Ints, counts: Ints) -> list[Ints]:
    """Divide copies into groups of so many runs as a part has; those that share bytes of a source stay together."""
    start, stop = copies.spans
    rows = rows[np.lexsort((start[rows], copies.source[rows]))]
    if counts[rows].sum() <= PART:
        return [rows]
    source = copies.source[rows]
    apart = np.ones(len(rows), bool)
    apart[1:] = (source[1:] != source[:-1]) | (start[rows][1:] >= _running_maximum(source, stop[rows])[:-1])
    first = np.flatnonzero(apart)  # of those that share bytes
    before = (np.cumsum(counts[rows]) - counts[rows])[first]
    return np.split(rows, first[np.flatnonzero(np.diff(before // PART)) + 1])


def _holding(sources: Sequence[Source]) -> NDArray[np.bool_]:
    """Say of each source whether it holds what it reads in memory of its own, before it hands it over."""
    return np.asarray([getattr(s, "holds", False) for s in sources], bool)


def compacted(copies: Copies) -> Copies:
    """Return the same copies with as few and as long dims as both ends allow; extents of 1 stand in front, as few as can be."""
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
    empty = min(int((shape == 1).all(axis=0).sum()), shape.shape[1] - 1)
    return Copies(
        copies.sources,
        copies.source,
        copies.offset,
        strides[:, empty:],
        copies.target,
        copies.target_offset,
        target[:, empty:],
        shape[:, empty:],
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


def _ranges(copies: Copies, rows: Ints, inner: Ints, gaps: Ints, block: int) -> Part:
    """Return the ranges of some copies."""
    copies, inner = copies.take(rows), inner[rows]
    copy, index, start = _expanded(copies, inner)
    length = (copies.sizes * copies.itemsize // _outer(copies, inner).prod(axis=1, dtype=np.int64).clip(1))[copy]
    order = np.lexsort((start, copies.source[copy]))
    copy, index, start, length = copy[order], index[order], start[order], length[order]
    source = copies.source[copy]

    plain = _is_straight(copies, inner)
    runs = np.bincount(copy, minlength=len(copies))
    straight = plain[copy] & ((length >= min(SHORT, block)) | (runs[copy] == 1))
    lines = _lines(copies, inner, copy[straight], index[straight], start[straight], length[straight])
    rest = ~straight
    staged, cuts = _grouped(source[rest], start[rest], length[rest], copy[rest], index[rest], gaps[source[rest]], block)
    single = (staged[:, 4] - staged[:, 3] == 1) if len(staged) else np.zeros(0, bool)
    if single.any():  # a lone run that is contiguous at both ends needs no staging, however short
        alone = cuts[staged[single, 3]]
        fits = plain[alone[:, 0]] & (alone[:, 2] == 1)
        which = np.flatnonzero(single)[fits]
        more = _lines(copies, inner, alone[fits, 0], alone[fits, 1], staged[which, 1], staged[which, 2])
        lines = _ascending(np.concatenate([lines, more]))
        staged = np.delete(staged, which, axis=0)
    cuts[:, 0] = rows[cuts[:, 0]]
    held = _holding(copies.sources)[lines[:, 0]]
    lines = _requests(lines, np.where(held, min(REQUEST, 2 * block), REQUEST))
    return Part(lines, merged(lines, gaps[lines[:, 0]], block), staged, cuts)


def _lines(copies: Copies, inner: Ints, copy: Ints, index: Ints, start: Ints, length: Ints) -> Ints:
    """Return runs as rows of `Schedule.straight`."""
    to = copies.target_offset[copy] + _skipped(_outer(copies, inner), copies.target_strides, copy, index)
    return np.stack([copies.source[copy], start, length, copies.target[copy], to], axis=1)


def _ascending(lines: Ints) -> Ints:
    found: Ints = lines[np.lexsort((lines[:, 1], lines[:, 0]))]
    return found


def _requests(lines: Ints, most: Ints) -> Ints:
    """Cut runs that are longer than a request; others may begin within them."""
    if (lines[:, 2] <= most).all():
        return lines
    row, skip, length = divided(lines[:, 2], most)
    source, start, _, target, to = lines[row].T
    return _ascending(np.stack([source, start + skip, length, target, to + skip], axis=1))


def divided(length: Ints, most: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut ranges into parts of so many bytes at most: the range that each is of, where in it the part begins, and its length."""
    row, at = repeated(-(-length // most))
    skip = at * most[row]
    return row, skip, np.minimum(most[row], length[row] - skip)


def merged(lines: Ints, gap: Ints, block: int) -> Ints:
    """Return the ranges that runs share, as `Schedule.ranges`; a long run has its own."""
    if not len(lines):
        return np.zeros((0, 5), np.int64)
    source, start, stop = lines[:, 0], lines[:, 1], lines[:, 1] + lines[:, 2]
    new = _begins(source, start, stop, gap, block)
    long = lines[:, 2] >= min(LONG, block)
    new[1:] |= long[1:] | long[:-1]
    first = np.flatnonzero(new)
    end = np.append(first[1:], len(lines))
    low, high = start[first], np.maximum.reduceat(stop, first)
    return np.stack([source[first], low, high - low, first, end], axis=1)


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


def _outer(copies: Copies, inner: Ints) -> Ints:
    """Return `(n, d)`: the extents of the dims that count a copy's runs, 1 for those inside a run."""
    ndim = copies.shape.shape[1]
    found: Ints = np.where(np.arange(ndim)[None, :] < (ndim - inner)[:, None], copies.shape, 1)
    return found


def _expanded(copies: Copies, inner: Ints) -> tuple[Ints, Ints, Ints]:
    """Return one row per source run: its copy, its number in the copy, and its start."""
    outer = _outer(copies, inner)
    copy, index = repeated(outer.prod(axis=1, dtype=np.int64))
    return copy, index, copies.offset[copy] + _skipped(outer, copies.strides, copy, index)


def _skipped(outer: Ints, strides: Ints, copy: Ints, index: Ints) -> Ints:
    """Return the bytes from a copy's start to its run `index`; `outer` are the extents that count its runs."""
    skip, rest = np.zeros(len(copy), np.int64), index
    for d in range(outer.shape[1] - 1, -1, -1):
        if (outer[:, d] > 1).any():
            rest, at = np.divmod(rest, outer[copy, d])
            skip += at * strides[copy, d]
    return skip


def _grouped(source: Ints, start: Ints, length: Ints, copy: Ints, index: Ints, gap: Ints, block: int) -> tuple[Ints, Ints]:
    """Group sorted runs into ranges: `(m, 5)` source, start, length, first and end row of the cuts; and the `(m, 3)` cuts."""
    if not len(start):
        return np.zeros((0, 5), np.int64), np.zeros((0, 3), np.int64)
    stop = start + length
    new = _begins(source, start, stop, gap, block)
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


def _begins(source: Ints, start: Ints, stop: Ints, gap: Ints, block: int) -> NDArray[np.bool_]:
    """Say of each of some sorted runs whether it begins a range: behind a gap, or a block after the one before began."""
    reach = _running_maximum(source, stop)
    new = np.ones(len(start), bool)
    new[1:] = (source[1:] != source[:-1]) | (start[1:] > reach[:-1] + gap[1:])
    begin = start[np.maximum.accumulate(np.where(new, np.arange(len(start)), 0))]
    part = (start - begin) // block
    new[1:] |= part[1:] != part[:-1]  # every run of a block starts less than `block` behind its first
    return new


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
