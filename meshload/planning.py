"""A plan joins wanted pieces to stored pieces: a table of copies, and the targets that they fill. It is a value.

Each copy moves one box: element `i` of it from byte `offset + i . strides` of a source to byte `target_offset + i .
target_strides` of a target. Every wanted element is filled exactly once, or planning raises before any payload is read.
A plan knows no meshes and no formats; it can be counted, printed and tested without a file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .array import Array, Step
from .box import Box, Shape
from .errors import FormatError, LimitError, MissingPieces, Overlap, listing
from .pieces import Ints, Pieces, piece, repeated, stacked
from .scheduling import Copies, Schedule, schedule
from .source import Source

MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to be filled: one array's slice on one rank."""

    name: str
    ranks: tuple[int, ...]
    """The ranks that hold it; several where one process serves devices that hold the same."""
    dtype: np.dtype[Any]
    shape: Shape
    whole: Shape
    """The shape of the array that it is a slice of, as its naming shows it."""
    box: Box | None
    """Where in that array it lies; None where it is no single box."""
    filled: int
    """How many elements are read; the rest is padding, zeros."""
    step: Step | None = None
    stored: str | None = None
    copies: str = "first"
    """What is made of its stored copies: see `COPIES`."""

    @property
    def rank(self) -> int:
        """The first of its ranks."""
        return self.ranks[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Targets(Sequence[Target]):
    """Targets in blocks of equal rank or name, so that a million of them are cheap; target `i` is made when asked for."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._blocks: list[Sequence[Target]] = []
        self._count = 0

    def add(self, block: Sequence[Target]) -> int:
        """Append targets, and return the number of the first."""
        first = self._count
        if len(block):
            self._first.append(first)
            self._blocks.append(block)
            self._count += len(block)
        return first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._count))]
        if not 0 <= i < self._count:
            raise IndexError(i)
        block = bisect_right(self._first, i) - 1
        return self._blocks[block][int(i) - self._first[block]]

    def __iter__(self) -> Any:
        for block in self._blocks:
            yield from block


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why."""

    chosen: bool
    why: str


@dataclass(frozen=True, eq=False)
class Plan:
    """What has to be read for some targets, and where it goes."""

    targets: Sequence[Target]
    copies: Copies
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Target -> the targets that take its other stored copies, where all of them are read."""
    aliases: tuple[tuple[str, int], ...] = ()
    """Names that share a target: tied weights that this rank holds under both names."""
    unexpected: tuple[str, ...] = ()
    """Names in the checkpoint that nobody wants."""
    missing: tuple[str, ...] = ()
    """Wanted names that the checkpoint lacks, where the caller ignores that."""
    notes: tuple[str, ...] = ()
    """What was chosen by default, and what is tied, padded or repeated."""
    max_bytes: int = MAX_BYTES
    merge_gap: int | None = None
    """Unwanted bytes that are read rather than skipped; None: as each source says."""
    apart: bool = False
    """Whether its ranks read each for themselves, so that counts add up over `each()`; else one process reads for all."""
    exchange: Choice = Choice(False, "not asked")
    """Whether processes that restore their ranks at once share these reads; counts are those of ranks that do not."""

    def __repr__(self) -> str:
        missing = f", {len(self.missing)} missing" if self.missing else ""
        return f"Plan({len(self.targets)} targets, {self.wanted_bytes} bytes wanted in {len(self.copies)} copies{missing})"

    def each(self) -> dict[int, Plan]:
        """Return the plan of each rank."""
        if not self.apart:
            return {self.targets[0].rank if len(self.targets) else 0: self}
        targets = list(self.targets)
        rank_of = np.fromiter((t.rank for t in targets), np.int64, len(targets))
        copy_rank = rank_of[self.copies.target]
        order = np.argsort(copy_rank, kind="stable")
        ranks = np.unique(rank_of)
        low, high = (np.searchsorted(copy_rank[order], ranks, side=side) for side in ("left", "right"))
        found = {}
        for rank, first, end in zip(ranks.tolist(), low.tolist(), high.tolist(), strict=True):
            numbers = np.flatnonzero(rank_of == rank)
            place = {n: i for i, n in enumerate(numbers.tolist())}
            copies = self.copies.take(order[first:end])
            copies = replace(copies, target=np.searchsorted(numbers, copies.target))
            aliases = tuple((a, place[i]) for a, i in self.aliases if i in place)
            others = {place[i]: tuple(place[n] for n in more) for i, more in self.others.items() if i in place}
            mine = [targets[n] for n in place]
            found[rank] = replace(self, targets=mine, copies=copies, others=others, aliases=aliases, apart=False)
        return found

    @property
    def sources(self) -> Sequence[Source]:
        return self.copies.sources

    @cached_property
    def schedule(self) -> Schedule:
        """The reads that the plan takes, in order."""
        return schedule(self.copies, merge_gap=self.merge_gap, max_bytes=self.max_bytes)

    @cached_property
    def wanted_bytes(self) -> int:
        """Bytes that are copied into targets."""
        return self.copies.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes that are asked of the sources; decoded ones where they are chunked."""
        return sum(p.schedule.nbytes for p in self._each.values())

    @property
    def reads(self) -> int:
        """Requests to the sources."""
        return sum(p.schedule.requests for p in self._each.values())

    @property
    def peak_bytes(self) -> int:
        """Memory beside the targets, at most, in one process."""
        return max((p.schedule.peak_bytes for p in self._each.values()), default=0)

    @cached_property
    def _each(self) -> dict[int, Plan]:
        return self.each()

    @cached_property
    def result_bytes(self) -> int:
        """Memory of the targets, those of further copies included."""
        return sum(t.nbytes for t in self.targets)

    @cached_property
    def spare(self) -> frozenset[int]:
        """The targets that take further copies, and are no results of their own."""
        return frozenset(n for more in self.others.values() for n in more)

    def of(self, name: str) -> Plan:
        """Return the plan of one array alone, for its counts."""
        numbers = [i for i, t in enumerate(self.targets) if t.name == name]
        return replace(self, copies=self.copies.take(np.isin(self.copies.target, numbers)))

    def summary(self) -> dict[str, Any]:
        """Return what `meshload plan` shows, as plain values: per rank, in total, and which names are held how."""
        per_rank = {
            rank: {
                "arrays": len(p.targets) - len(p.spare) + len(p.aliases),
                "wanted_bytes": p.wanted_bytes,
                "read_bytes": p.read_bytes,
                "reads": p.reads,
                "result_bytes": p.result_bytes,
                "peak_bytes": p.peak_bytes,
            }
            for rank, p in self._each.items()
        }
        held: dict[str, list[Target]] = {}
        for i, target in enumerate(self.targets):
            if i not in self.spare:
                held.setdefault(target.name, []).append(target)
        times = {n: sum(t.filled * len(t.ranks) for t in ts) / max(math.prod(ts[0].whole), 1) for n, ts in held.items()}
        replicas = max(1, int(min((k for n, k in times.items() if held[n][0].size), default=1)))
        more = {n for n, k in times.items() if k > replicas}
        whole = {n for n in more if all(t.shape == t.whole for t in held[n])}
        return {
            "ranks": per_rank,
            "total": {key: getattr(self, key) for key in ("wanted_bytes", "read_bytes", "reads", "result_bytes", "peak_bytes")},
            "files": self.files(),
            "replicas": replicas,
            "replicated": sorted(whole),
            "repeated": sorted(more - whole),
            "padded": sorted(n for n, ts in held.items() if any(t.filled < t.size for t in ts)),
            "tied": sorted({alias for alias, _ in self.aliases}),
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "exchange": {"shared": self.exchange.chosen, "why": self.exchange.why},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return (
            f"{len(self.targets)} arrays, {self.wanted_bytes} bytes wanted, {self.read_bytes} read in {self.reads} requests, "
            f"{self.peak_bytes} bytes beside the result; {self.sharing}"
        )

    @property
    def sharing(self) -> str:
        """What the plan prints of `exchange`."""
        what = "processes share reads, each byte once" if self.exchange.chosen else "each process reads for itself"
        return f"{what} ({self.exchange.why})"

    def files(self) -> dict[str, int]:
        """Return the bytes wanted of each file."""
        totals = np.zeros(len(self.sources), np.int64)
        np.add.at(totals, self.copies.source, self.copies.sizes * self.copies.itemsize)
        return {s.name: int(n) for s, n in zip(self.sources, totals, strict=True) if n}


@dataclass(frozen=True, slots=True)
class Job:
    """One join: what is wanted of an array (or part), and where it is stored, in the same dims."""

    label: str
    itemsize: int | Ints
    """Of all wanted rows, or of each."""
    wanted: Pieces
    """Its `source` counts targets."""
    stored: Pieces
    copies: str = "first"
    """What rows of one box are: see `COPIES`."""


COPIES = ("first", "check", "mean", "sum")
"""`first`: copies of which one is read; `check`: all are read and must be equal; `mean`, `sum`: addends, all are read."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What joining gives: the copies to make, and the further targets that take the other stored copies of a target."""

    copies: Copies
    others: Mapping[int, tuple[int, ...]]


def plan(jobs: Iterable[Job], targets: Targets) -> Joined:
    """Join every job, or raise `MissingPieces`, `Overlap` or `FormatError`, naming arrays, ranks and both numbers.

    Where all copies of a box are to be read, targets for the others are added.
    """
    tables: list[Copies] = []
    problems: list[MissingPieces | Overlap] = []
    others: dict[int, list[int]] = {}
    kept: dict[int, Any] = {}  # id() of a source tuple is only good while the tuple lives
    for group in _groups(jobs):
        kept.update((id(job.stored.sources), job.stored.sources) for job in group)
        together = _joined_together(group, targets) if len(group) > 1 else None
        if together is not None:
            tables.append(together)
            continue
        for job in group:
            try:
                number = copy_numbers(job.stored)
                tables.append(_joined(replace(job, stored=job.stored.take(number == 0)), targets))
                if job.copies != "first":
                    for n in range(1, int(number.max(initial=0)) + 1):
                        again = replace(job, stored=job.stored.take(number == n))
                        tables += _joined_again(again, targets, n, others)
            except (MissingPieces, Overlap) as error:
                problems.append(error)
    if problems:
        kind = type(problems[0])
        raise kind(listing((str(p) for p in problems), 10) if len(problems) > 1 else str(problems[0]))
    copies = Copies.union(tables)
    _check_inside(copies, targets)
    return Joined(copies, {i: tuple(more) for i, more in others.items()})


SMALL = 64
"""Jobs with no more pairs of rows than this are joined many at a time: each for itself costs some 30 array operations."""


def _groups(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Go through jobs in groups that can be joined together: small ones of as many dims, the others alone."""
    small: dict[int, list[Job]] = {}
    for job in jobs:
        if not len(job.wanted):
            continue
        if job.copies == "first" and job.wanted.ndim and len(job.wanted) * len(job.stored) <= SMALL:
            small.setdefault(job.wanted.ndim, []).append(job)
        else:
            yield [job]
    yield from small.values()


def _joined_together(jobs: Sequence[Job], targets: Sequence[Target]) -> Copies | None:
    """Join many jobs as one whose first dim counts them; None where something is wrong, which each job alone can name."""
    at = np.arange(len(jobs))[:, None]
    wanted = stacked([replace(job.wanted, sources=()) for job in jobs], at)  # targets, counted over all jobs
    stored = stacked([job.stored for job in jobs], at)
    itemsize = np.fromiter((job.itemsize for job in jobs), np.int64, len(jobs))[wanted.start[:, 0]]
    try:
        found = _joined(Job("", itemsize, wanted, stored.take(copy_numbers(stored) == 0)), targets)
    except (MissingPieces, Overlap):
        return None
    columns = {name: getattr(found, name)[:, 1:] for name in ("strides", "target_strides", "shape")}
    return replace(found, **columns)


def _joined_again(job: Job, targets: Targets, n: int, others: dict[int, list[int]]) -> list[Copies]:
    """Join the `n`-th further copy of what a job wants, into targets of its own, for the targets that have one."""
    w, _ = meetings(job.wanted, job.stored)
    having = np.unique(job.wanted.source[w])
    if not len(having):
        return []
    for i in having.tolist():
        more = others.setdefault(i, [])
        if len(more) < n:
            more.append(targets.add([targets[i]]))
    numbers = np.asarray([others[i][n - 1] for i in having.tolist()], np.int64)
    rows = job.wanted.take(np.isin(job.wanted.source, having))
    wanted = replace(rows, source=numbers[np.searchsorted(having, rows.source)])
    return [_joined(replace(job, wanted=wanted), targets)]


def plan_array(array: Array, *, max_bytes: int = MAX_BYTES, merge_gap: int | None = None) -> Plan:
    """Plan reading one array whole."""
    whole = Box((0,) * array.ndim, array.shape)
    targets = Targets()
    targets.add(
        [Target(array.name, (0,), array.dtype, array.shape, array.shape, whole, array.size, array.step, copies=array.copies)]
    )
    wanted = piece(0, 0, array.shape, array.dtype.itemsize)
    joined = plan([Job(array.name, array.dtype.itemsize, wanted, array.pieces, array.copies)], targets)
    return Plan(targets, joined.copies, joined.others, max_bytes=max_bytes, merge_gap=merge_gap)


def _joined(job: Job, targets: Sequence[Target]) -> Copies:
    stored = job.stored
    w, s = meetings(job.wanted, stored)
    wanted, found = job.wanted.take(w), stored.take(s)
    start = np.maximum(wanted.start, found.start)
    shape = np.minimum(wanted.stop, found.stop) - start
    filled = np.bincount(w, weights=shape.prod(axis=1, dtype=np.int64), minlength=len(job.wanted)).astype(np.int64)
    _check_filled(job, targets, filled, stored, s)
    return Copies(
        tuple(stored.sources),
        found.source,
        found.offset + ((start - found.start) * found.strides).sum(axis=1),
        found.strides,
        wanted.source,
        wanted.offset + ((start - wanted.start) * wanted.strides).sum(axis=1),
        wanted.strides,
        shape,
        np.broadcast_to(np.asarray(job.itemsize, np.int64), (len(job.wanted),))[w],
    )


def meetings(a: Pieces, b: Pieces) -> tuple[Ints, Ints]:
    """Return the pairs of rows whose boxes meet, as two columns of row numbers.

    Sorted by the dim that leaves the fewest candidates, so that the work grows with the rows and the pairs found.
    """
    none = np.zeros(0, np.int64)
    if not len(a) or not len(b):
        return none, none
    if a.ndim == 0:
        return np.repeat(np.arange(len(a)), len(b)), np.tile(np.arange(len(b)), len(a))
    best: tuple[int, Ints, Ints, Ints] | None = None
    for a_start, a_shape, b_start, b_shape in _sides(a, b):
        order = np.argsort(b_start, kind="stable")
        starts = b_start[order]
        low = np.searchsorted(starts, a_start - int(b_shape.max()), side="right")
        high = np.searchsorted(starts, a_start + a_shape, side="left")
        count = int((high - low).sum())
        if best is None or count < best[0]:
            best = (count, order, low, high - low)
        if count <= len(a):
            break
    assert best is not None
    _, order, low, counts = best
    rows, step = repeated(counts)
    columns = order[low[rows] + step]
    keep = np.ones(len(rows), bool)
    for d in range(a.ndim):
        a_start, b_start = a.start[rows, d], b.start[columns, d]
        keep &= (a_start < b_start + b.shape[columns, d]) & (b_start < a_start + a.shape[rows, d])
    return rows[keep], columns[keep]


def _sides(a: Pieces, b: Pieces) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """Go through what two tables can be sorted by: start and extent of both, first of all dims together in which both have single
    indices, such as layer and expert, then of each dim.
    """
    single = [d for d in range(a.ndim) if (a.shape[:, d] == 1).all() and (b.shape[:, d] == 1).all()]
    if len(single) > 1:
        last = np.maximum(a.start.max(axis=0), b.start.max(axis=0))[single] + 1
        if np.prod(last.astype(float)) < 2**62:
            places = np.cumprod(np.append(last[1:], 1)[::-1])[::-1]
            yield (
                (a.start[:, single] * places).sum(axis=1),
                np.ones(len(a), np.int64),
                (b.start[:, single] * places).sum(axis=1),
                np.ones(len(b), np.int64),
            )
    for d in range(a.ndim):
        yield a.start[:, d], a.shape[:, d], b.start[:, d], b.shape[:, d]


def copy_numbers(stored: Pieces) -> Ints:
    """Number the rows that store the same box, each box from 0 on, in the order in which they stand."""
    n = len(stored)
    if n < 2:
        return np.zeros(n, np.int64)
    if stored.ndim == 0:
        return np.arange(n)
    keys = np.concatenate([stored.shape, stored.start], axis=1)
    order = np.lexsort(keys.T)  # stable, so that the first copy stays in front
    same = np.concatenate([[False], (keys[order[1:]] == keys[order[:-1]]).all(axis=1)])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(n)))
    numbers = np.empty(n, np.int64)
    numbers[order] = np.arange(n) - first
    return numbers


def _check_filled(job: Job, targets: Sequence[Target], filled: Ints, stored: Pieces, met: Ints) -> None:
    sizes = job.wanted.sizes
    bad = np.flatnonzero(filled < sizes)
    if len(bad):
        ids = np.unique(job.wanted.source[bad])
        lines = []
        for i in ids[:10]:
            rows = job.wanted.source == i
            target = targets[int(i)]
            lines.append(
                f"{target.name}: rank {target.rank} needs {int(sizes[rows].sum())} elements of {job.label}, "
                f"the checkpoint holds {int(filled[rows].sum())} of them"
            )
        more = f" and {len(ids) - 10} more arrays" if len(ids) > 10 else ""
        raise MissingPieces("; ".join(lines) + more)
    used_rows = np.zeros(len(stored), bool)
    used_rows[met] = True
    rows = np.flatnonzero(used_rows)
    used = stored if len(rows) == len(stored) else stored.take(rows)
    first, second = meetings(used, used)
    twice = first < second
    if twice.any() or (filled > sizes).any():
        i, j = int(first[twice][0]), int(second[twice][0])
        one, other = _where(used, i), _where(used, j)
        name = targets[int(job.wanted.source[0])].name
        raise Overlap(f"{name} ({job.label}): elements are stored twice, in {one} and in {other}, which are not the same box")


def _where(pieces: Pieces, row: int) -> str:
    box = Box(tuple(map(int, pieces.start[row])), tuple(map(int, pieces.shape[row])))
    source = pieces.sources[int(pieces.source[row])]
    return f"{getattr(source, 'name', source)} (start {box.start}, shape {box.shape})"


def _check_inside(copies: Copies, targets: Sequence[Target]) -> None:
    """Check that every copy lies within its source: a truncated or lying file is found before it is read."""
    if not len(copies):
        return
    sizes = np.asarray([s.size for s in copies.sources], np.int64)[copies.source]
    start, end = copies.spans
    for i in np.flatnonzero((end > sizes) | (start < 0))[:1]:
        source, name = copies.sources[int(copies.source[i])], targets[int(copies.target[i])].name
        raise FormatError(f"{name}: bytes {int(start[i])} to {int(end[i])} are wanted of {source.name}, which has {source.size}")


def check_limit(made: Plan) -> Plan:
    """Raise `LimitError` where one unit that must be held at once exceeds the plan's `max_bytes`."""
    need, name = made.schedule.largest_unit
    if need > made.max_bytes:
        raise LimitError(f"{name}: one unit of it takes {need} bytes at once, max_bytes is {made.max_bytes}; allow at least {need}")
    return made
