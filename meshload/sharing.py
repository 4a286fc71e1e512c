"""Sharing out reads: of what several ranks want, each reads a contiguous part, and hands on what the others want of it.

Ranks want the same bytes (replicas, norms under tp) or interleaved ones of the same range (row-parallel slices). The copies of
all ranks are cut at the edges of slabs; each slab is read once, by one of the ranks that want some of it. All of this is worked
out from the copies alone, by every rank for itself, and alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .pieces import Ints, repeated
from .scheduling import Copies, divided

SLAB = 8 << 20
"""Bytes that are read at once."""
SMALL = 256 << 10
"""Less than this is not worth a read of its own."""
HANDED = 16 << 10
"""Nor is it worth so many readers that each hands on less than this to each rank: the table of parts grows with their square."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What is exchanged between ranks; everything else each rank reads for itself."""

    slabs: Ints
    """`(n, 4)`: source, start, length, and the rank that reads it."""
    turn: Ints
    """`(n,)`: when a slab is held by the rank that reads it: all that it holds in one turn is within the budget."""
    parts: Copies
    """Copies cut at the edges of slabs; `target` is the rank that wants them. Those of a turn are together, in such an order that
    at each moment all ranks send and all take."""
    slab: Ints
    """`(m,)`: the slab of each part."""
    row: Ints
    """`(m,)`: the copy that each part was cut from."""
    last: Ints
    """`(n,)`: the last part of each slab."""
    alone: NDArray[np.bool_]
    """Which copies are not exchanged."""
    budget: int
    """Bytes that a rank may hold, send and take in one round, each."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read, each once."""
        return int(self.slabs[:, 2].sum())

    def rounds(self) -> Iterator[Ints]:
        """Go through the parts in rounds, which end with each turn.

        What one rank wants of one slab is the least that a round moves, and a slab may come up in several rounds of a turn.
        """
        sizes = self.parts.sizes * self.parts.itemsize
        first = np.flatnonzero(np.diff(self.slab, prepend=-1) | np.diff(self.parts.target, prepend=-1))
        slab, to, nbytes = self.slab[first], self.parts.target[first], np.add.reduceat(sizes, first) if len(first) else first
        turn, reader = self.turn[slab], self.slabs[slab, 3]
        sums = [(key, _running(key, nbytes)) for key in (reader, to)]
        before = np.zeros((2, 1 + max(reader.max(initial=0), to.max(initial=0))), np.int64)  # by rank, up to the round
        ends = np.append(first, len(self.slab))
        at, width = 0, 1024
        while at < len(first):
            here = slice(at, at + width)
            over = turn[here] != turn[at]
            for rank, (key, n) in zip(before, sums, strict=True):
                over |= n[here] - rank[key[here]] > self.budget
            if not over.any() and at + width < len(first):
                width *= 2
                continue
            stop = at + max(1, int(over.argmax()) if over.any() else len(over))
            yield np.arange(ends[at], ends[stop])
            for rank, (key, n) in zip(before, sums, strict=True):
                rank[key[at:stop]] = n[at:stop]  # of several the last counts
            at, width = stop, 2 * (stop - at)


def _running(key: Ints, values: Ints) -> Ints:
    """Return the sums of values so far, those of each key for itself."""
    order = np.argsort(key, kind="stable")
    sums = np.cumsum(values[order])
    found = np.empty_like(sums)
    found[order] = sums - (sums - values[order])[np.searchsorted(key[order], key[order], side="left")]
    return found


def share_out(copies: Copies, *, budget: int, slab: int = SLAB, shareable: Sequence[bool] | None = None) -> Shared:
    """Share out the copies of all ranks; `target` is the rank. They are compact, as `compacted` makes them."""
    low, high = copies.spans
    units = np.asarray([s.unit for s in copies.sources], np.int64)[copies.source] if len(copies) else np.zeros(0, np.int64)
    is_plain = units == 1
    low = np.where(is_plain, low, low // np.maximum(units, 1) * units)
    high = np.where(is_plain, high, low + units)
    may: NDArray[np.bool_] = np.all((copies.strides > 0) | (copies.shape == 1), axis=1)  # forward, each element once
    if shareable is not None and len(copies):
        may = may & np.asarray(shareable, bool)[copies.source]
    region = _regions(copies.source, low, high, may)
    edges = _slabs(copies, region, low, high, is_plain, min(slab, budget))
    return _cut(copies, region, low, high, edges, budget)


def _turns(edges: Ints, budget: int) -> Ints:
    """Return for each slab the turn in which its reader holds it, with as many of those that follow as the budget allows."""
    held: dict[int, int] = {}
    turn: dict[int, int] = {}
    found = []
    for length, reader in edges[:, 2:4].tolist():
        held[reader] = held.get(reader, 0) + length
        if held[reader] > budget and held[reader] > length:
            turn[reader] = turn.get(reader, 0) + 1
            held[reader] = length
        found.append(turn.get(reader, 0))
    return np.asarray(found, np.int64)


def _regions(source: Ints, low: Ints, high: Ints, may: NDArray[np.bool_]) -> Ints:
    """Number the ranges that copies span together, where these overlap; -1 for copies that are left out."""
    found = np.full(len(source), -1, np.int64)
    rows = np.flatnonzero(may)
    if not len(rows):
        return found
    order = rows[np.lexsort((low[rows], source[rows]))]
    base = source[order] * (int(high.max()) + 1)
    reach = np.maximum.accumulate(high[order] + base)
    new = np.ones(len(order), bool)
    new[1:] = low[order][1:] + base[1:] >= reach[:-1]
    found[order] = np.cumsum(new) - 1
    return found


def _slabs(copies: Copies, region: Ints, low: Ints, high: Ints, is_plain: NDArray[np.bool_], slab: int) -> Ints:
    """Return the slabs of the regions that are worth exchanging: source, start, length, reader and region.

    These are regions that several ranks want, and in all at least as many bytes of them as they span. A region is cut into one
    contiguous share per rank, or fewer where they would be small, and these into slabs; the ranks take turns. A chunk stays whole.
    """
    rows = np.argsort(region, kind="stable")
    rows = rows[region[rows] >= 0]
    if not len(rows):
        return np.zeros((0, 5), np.int64)
    first = np.flatnonzero(np.diff(region[rows], prepend=-1))  # the regions' first rows: they count from 0 without a gap
    start, stop = np.minimum.reduceat(low[rows], first), np.maximum.reduceat(high[rows], first)
    wanted = np.add.reduceat(copies.sizes[rows] * copies.itemsize[rows], first)
    ranks = int(copies.target.max()) + 1
    pairs = np.unique(region[rows] * ranks + copies.target[rows])
    wanting = np.bincount(pairs // ranks, minlength=len(first))
    plain = is_plain[rows[first]]
    good = np.flatnonzero((wanting >= 2) & (~plain | (wanted >= stop - start)))
    n, count = (stop - start)[good], wanting[good]
    readers = np.where(plain[good], np.clip(n // np.maximum(SMALL, HANDED * count), 1, count), 1)
    share = np.where(readers > 1, -(-n // readers // 4096) * 4096, n)
    region_of, begin, length = divided(n, share)
    place = np.arange(len(region_of)) - np.searchsorted(region_of, region_of, side="left")
    place = (place + (np.cumsum(readers) - readers)[region_of]) % count[region_of]
    reader = pairs[(np.cumsum(wanting) - wanting)[good][region_of] + place] % ranks
    part, skip, length = divided(length, np.where(plain[good][region_of], slab, length))
    which = good[region_of[part]]
    return np.stack([copies.source[rows[first[which]]], start[which] + begin[part] + skip, length, reader[part], which], axis=1)


def _cut(copies: Copies, region: Ints, low: Ints, high: Ints, edges: Ints, budget: int) -> Shared:
    """Cut the copies of the regions that are exchanged at the edges of the slabs.

    In a turn each rank hands on to itself first, then to the next, and so on: so no rank is sent to by all at once.
    """
    alone = ~np.isin(region, edges[:, 4])
    rows = np.flatnonzero(~alone)
    by_region = np.argsort(region[rows], kind="stable")
    rows = rows[by_region]
    begin = np.searchsorted(region[rows], edges[:, 4], side="left")
    end = np.searchsorted(region[rows], edges[:, 4], side="right")
    slab, at = repeated(end - begin)
    row = rows[begin[slab] + at]
    meet = (low[row] < edges[slab, 1] + edges[slab, 2]) & (high[row] > edges[slab, 1])
    slab, row = slab[meet], row[meet]
    parts, which = clipped(copies.take(row), edges[slab, 1], edges[slab, 1] + edges[slab, 2])
    slab, row = slab[which], row[which]
    turn, reader = _turns(edges, budget), edges[slab, 3]
    step = (parts.target - reader) % (int(copies.target.max(initial=0)) + 1)
    order = np.lexsort((parts.target_offset, parts.offset, row, slab, reader, step, turn[slab]))
    slab, last = slab[order], np.zeros(len(edges), np.int64)
    last[slab] = np.arange(len(slab))  # of several the last counts
    return Shared(edges[:, :4], turn, parts.take(order), slab, row[order], last, alone, budget)


def clipped(copies: Copies, low: Ints, high: Ints) -> tuple[Copies, Ints]:
    """Return the parts of copies whose elements begin in `[low, high)` of their source, and the copy that each is a part of.

    Dims stand by falling stride, above 0 where there are several indices. Of each dim at most two indices straddle an edge; these
    go on to the next dim.
    """
    made: list[tuple[Copies, Ints]] = []
    which = np.arange(len(copies))
    rest, low, high = copies, np.asarray(low, np.int64), np.asarray(high, np.int64)
    for d in range(copies.shape.shape[1]):
        if not len(rest):
            break
        extent = rest.shape[:, d]
        step = np.where(extent == 1, 1 << 62, rest.strides[:, d])
        reach = rest.itemsize + ((rest.shape[:, d + 1 :] - 1) * rest.strides[:, d + 1 :]).sum(axis=1)
        from_low, to_high = low - rest.offset, high - rest.offset
        first = np.maximum(0, (from_low - reach) // step + 1)  # the first index that is not all before `low`
        last = np.minimum(extent - 1, -(-to_high // step) - 1)  # the last that begins before `high`
        full_first = np.maximum(first, -(-from_low // step))
        full_last = np.minimum(last, (to_high - reach) // step)
        body = full_first <= full_last
        made.append((_narrowed(rest, d, full_first, full_last - full_first + 1, body), which[body]))
        counts = np.where(last >= first, last - first + 1, 0) - np.where(body, full_last - full_first + 1, 0)
        row, at = repeated(counts)
        before = np.where(body, full_first - first, counts)[row]
        index = np.where(at < before, first[row] + at, full_last[row] + 1 + at - before)
        ones = np.ones(len(row), np.int64)
        rest = _narrowed(rest.take(row), d, index, ones, np.ones(len(row), bool))
        which, low, high = which[row], low[row], high[row]
    begins = (rest.offset >= low) & (rest.offset < high)
    made.append((rest.take(begins), which[begins]))
    return Copies.union([part for part, _ in made]), np.concatenate([numbers for _, numbers in made])


def _narrowed(copies: Copies, d: int, first: Ints, count: Ints, rows: NDArray[np.bool_]) -> Copies:
    found = copies.take(rows)
    first, shape = first[rows], found.shape.copy()
    shape[:, d] = count[rows]
    return replace(
        found,
        offset=found.offset + first * found.strides[:, d],
        target_offset=found.target_offset + first * found.target_strides[:, d],
        shape=shape,
    )
