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

from .pieces import Ints
from .scheduling import Copies

SLAB = 8 << 20
"""Bytes that are read at once."""
SMALL = 256 << 10
"""Less than this per rank is not worth cutting: one of the ranks reads all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What is exchanged between ranks; everything else each rank reads for itself."""

    slabs: Ints
    """`(n, 4)`: source, start, length, and the rank that reads it; in the order in which they are read."""
    parts: Copies
    """Copies cut at the edges of slabs, those of one slab together, by rank; `target` is the rank that wants them."""
    slab: Ints
    """`(m,)`: the slab of each part."""
    row: Ints
    """`(m,)`: the copy that each part was cut from."""
    alone: NDArray[np.bool_]
    """Which copies are not exchanged."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read, each once."""
        return int(self.slabs[:, 2].sum())

    def rounds(self, ranks: int, budget: int) -> Iterator[tuple[Ints, Ints]]:
        """Go through slabs and parts in rounds, in none of which a rank reads, sends or takes more than `budget` bytes.

        A single slab may be more.
        """
        sizes = self.parts.sizes * self.parts.itemsize
        bounds = np.searchsorted(self.slab, np.arange(len(self.slabs) + 1))
        held = np.zeros((3, ranks), np.int64)
        begin = 0
        for n, (_, _, length, reader) in enumerate(self.slabs.tolist()):
            mine = slice(int(bounds[n]), int(bounds[n + 1]))
            more = np.zeros_like(held)
            more[0, reader], more[1, reader] = length, int(sizes[mine].sum())
            np.add.at(more[2], self.parts.target[mine], sizes[mine])
            if n > begin and (held + more).max() > budget:
                yield np.arange(begin, n), np.arange(bounds[begin], bounds[n])
                begin, held = n, np.zeros_like(held)
            held += more
        if begin < len(self.slabs):
            yield np.arange(begin, len(self.slabs)), np.arange(bounds[begin], bounds[-1])


def share_out(copies: Copies, *, slab: int = SLAB, shareable: Sequence[bool] | None = None) -> Shared:
    """Share out the copies of all ranks; `target` is the rank. They are compact, as `compacted` makes them."""
    low, high = _spans(copies)
    units = np.asarray([s.unit for s in copies.sources], np.int64)[copies.source] if len(copies) else np.zeros(0, np.int64)
    is_plain = units == 1
    low = np.where(is_plain, low, low // np.maximum(units, 1) * units)
    high = np.where(is_plain, high, low + units)
    may: NDArray[np.bool_] = np.all(copies.strides >= 0, axis=1)
    if shareable is not None and len(copies):
        may = may & np.asarray(shareable, bool)[copies.source]
    region = _regions(copies.source, low, high, may)
    edges = []
    count = 0
    for rows in _grouped(region):
        ranks = np.unique(copies.target[rows])
        start, stop = int(low[rows].min()), int(high[rows].max())
        wanted = int((copies.sizes[rows] * copies.itemsize[rows]).sum())
        if len(ranks) < 2 or (wanted < stop - start and is_plain[rows[0]]):
            continue
        source, whole = int(copies.source[rows[0]]), not is_plain[rows[0]]
        for a, b, reader in _slabs(start, stop, ranks.tolist(), count, 0 if whole else slab):
            edges.append((source, a, b - a, reader, int(region[rows[0]])))
        count += 1
    found = np.asarray(edges, np.int64).reshape(-1, 5)
    order = _in_turns(found[:, 3])
    found = found[order]
    return _cut(copies, region, low, high, found)


def _in_turns(reader: Ints) -> Ints:
    """Return an order in which readers take turns, so that all have something to do in each round."""
    turn = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader):
        mine = reader == rank
        turn[mine] = np.arange(int(mine.sum()))
    return np.lexsort((reader, turn))


def _spans(copies: Copies) -> tuple[Ints, Ints]:
    reach = (copies.shape - 1) * copies.strides
    low = copies.offset + reach.clip(max=0).sum(axis=1)
    high = copies.offset + reach.clip(min=0).sum(axis=1) + copies.itemsize
    return low, high


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


def _grouped(region: Ints) -> list[Ints]:
    order = np.argsort(region, kind="stable")
    order = order[region[order] >= 0]
    return np.split(order, np.flatnonzero(np.diff(region[order])) + 1) if len(order) else []


def _slabs(start: int, stop: int, ranks: Sequence[int], turn: int, slab: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range into one contiguous part per rank, and these into slabs; a small range, or a chunk, stays whole."""
    n = stop - start
    if not slab or n < SMALL * len(ranks):
        yield start, stop, ranks[turn % len(ranks)]
        return
    share = -(-n // len(ranks) // 4096) * 4096
    for i, rank in enumerate(ranks):
        end = min(start + (i + 1) * share, stop)
        for at in range(start + i * share, end, slab):
            yield at, min(at + slab, end), rank


def _cut(copies: Copies, region: Ints, low: Ints, high: Ints, edges: Ints) -> Shared:
    """Cut the copies of the regions that are exchanged at the edges of the slabs."""
    alone = ~np.isin(region, edges[:, 4])
    rows = np.flatnonzero(~alone)
    by_region = np.argsort(region[rows], kind="stable")
    rows = rows[by_region]
    begin = np.searchsorted(region[rows], edges[:, 4], side="left")
    end = np.searchsorted(region[rows], edges[:, 4], side="right")
    counts = end - begin
    slab = np.repeat(np.arange(len(edges)), counts)
    row = rows[np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(len(slab))]
    meet = (low[row] < edges[slab, 1] + edges[slab, 2]) & (high[row] > edges[slab, 1])
    slab, row = slab[meet], row[meet]
    parts, which = clipped(copies.take(row), edges[slab, 1], edges[slab, 1] + edges[slab, 2])
    order = np.lexsort((parts.target_offset, parts.offset, row[which], parts.target, slab[which]))
    which = which[order]
    return Shared(edges[:, :4], parts.take(order), slab[which], row[which], alone)


def clipped(copies: Copies, low: Ints, high: Ints) -> tuple[Copies, Ints]:
    """Return the parts of copies whose elements begin in `[low, high)` of their source, and the copy that each is a part of.

    Dims stand by falling stride. Of each dim at most two indices straddle an edge; these go on to the next dim.
    """
    made: list[tuple[Copies, Ints]] = []
    which = np.arange(len(copies))
    rest, low, high = copies, np.asarray(low, np.int64), np.asarray(high, np.int64)
    for d in range(copies.shape.shape[1]):
        if not len(rest):
            break
        extent = rest.shape[:, d]
        step = np.where((extent == 1) | (rest.strides[:, d] == 0), 1 << 62, rest.strides[:, d])
        reach = rest.itemsize + ((rest.shape[:, d + 1 :] - 1) * rest.strides[:, d + 1 :]).sum(axis=1)
        from_low, to_high = low - rest.offset, high - rest.offset
        first = np.maximum(0, (from_low - reach) // step + 1)  # the first index that is not all before `low`
        last = np.minimum(extent - 1, -(-to_high // step) - 1)  # the last that begins before `high`
        full_first = np.maximum(first, -(-from_low // step))
        full_last = np.minimum(last, (to_high - reach) // step)
        body = full_first <= full_last
        made.append((_narrowed(rest, d, full_first, full_last - full_first + 1, body), which[body]))
        counts = np.where(last >= first, last - first + 1, 0) - np.where(body, full_last - full_first + 1, 0)
        row = np.repeat(np.arange(len(rest)), counts)
        at = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
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
