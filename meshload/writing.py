"""Writing is reading backwards: the pieces of a laid-out, still empty checkpoint are filled from those of another.

A format lays out new files with all their headers and none of their payload; opened by the same format, their pieces say where
each element belongs. The core cuts these pieces into items, joins the items to the stored pieces, and moves a few at a time
under a memory ceiling. Everything happens in a sibling folder that takes the target's name at the very end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import Box
from .errors import FormatError, LayoutError, LimitError, SourceError, listing
from .pieces import Ints, Pieces, repeated
from .planning import Job, Joined, Plan, Target, Targets
from .planning import plan as join
from .reading import ALIGNMENT, Progress, read, values_of
from .scheduling import UNIT_COST, Copies
from .source import WRITING, Bytes, ChunkedArray, LocalFile, LocalFolder, lies_in

MAX_BYTES = 512 << 20
ITEM = 8 << 20
"""Bytes of a file that are moved as one; as large as a good read."""
WRITE = 512 << 10
"""Bytes that the system is asked to write at once: here 8 MiB took twice as long, in system calls."""
MOVERS = 2
"""Groups of items in flight: one is written while another is read."""


class Sink(Protocol):
    """The mirror of a source: it takes any range where its unit is 1, else whole units."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        """Begin to put values, row-major, at `start`; return what ends it. The values must not change in between."""

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        """Say whether values are there already, put there by an earlier, interrupted writing."""

    def flush(self) -> None:
        """Return once all that was written is on the disk."""


@dataclass(frozen=True, eq=False)
class FileSink:
    """A laid-out file on a local disk."""

    path: Path
    name: str

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        self.put([(start, _bytes(values))])
        return nothing

    def put(self, runs: Iterable[tuple[int, memoryview]]) -> None:
        """Write bytes, each run at its start."""
        with self._open(os.O_WRONLY) as descriptor:
            for start, view in runs:
                while len(view):
                    try:
                        n = os.pwrite(descriptor, view[:WRITE], start)
                    except OSError as error:
                        raise _said(error, self.name, f"writing {len(view)} bytes at {start}") from error
                    view, start = view[n:], start + n

    def copy(self, start: int, source: LocalFile, at: int, nbytes: int) -> bool:
        """Let the system copy a range of another file; say no where it cannot, with nothing lost."""
        with self._open(os.O_WRONLY) as descriptor, FileSink(source.path, source.name)._open(os.O_RDONLY) as other:
            while nbytes:
                try:
                    n = os.copy_file_range(other, descriptor, nbytes, at, start)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                        raise _said(error, self.name, f"writing {nbytes} bytes at {start}") from error
                    return False
                if n == 0:
                    raise SourceError(f"{source.name}: ends at byte {at}, expected {at + nbytes}; it was cut while being read")
                at, start, nbytes = at + n, start + n, nbytes - n
        return True

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        wanted = _bytes(values)
        with self._open(os.O_RDONLY) as descriptor:
            return os.pread(descriptor, len(wanted), start) == wanted

    def flush(self) -> None:
        with self._open(os.O_RDONLY) as descriptor:
            os.fdatasync(descriptor)

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise _said(error, self.name, "opening it") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class Commit(threading.local):
    """The transaction of each thread, in which its writes to a database wait, to share a commit.

    A commit writes each leaf anew that it changes, and there may be thousands of chunks in a leaf.
    """

    pending: Any = None

    def transaction(self) -> Any:
        """Return the one that is open; one is begun where there is none."""
        import tensorstore

        if self.pending is None:
            self.pending = tensorstore.Transaction()
        return self.pending

    def end(self, name: str) -> None:
        """Commit what is open; errors call it `name`."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.commit_async().result()
        except (ValueError, OSError) as error:
            raise SourceError(f"{name}: writing it, or chunks beside it, failed: {error}") from error


@dataclass(frozen=True, eq=False)
class ChunkSink:
    """A TensorStore array, written by whole chunks."""

    source: ChunkedArray
    context: Any
    """TensorStore's, shared by the sinks of one writing."""
    commit: Commit
    """Shared, too."""

    @property
    def name(self) -> str:
        return self.source.name

    @cached_property
    def store(self) -> Any:
        import tensorstore

        spec = self.source.store.spec(retain_context=False).to_json()  # else each array has a context, and a database, of its own
        spec["kvstore"]["cache_pool"] = "cache_pool#ocdbt"
        try:
            return tensorstore.open(spec, context=self.context, read=True, write=True, open=True).result()
        except (ValueError, OSError) as error:
            raise SourceError(f"{self.name}: cannot be opened for writing: {error}") from error

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        if values.dtype == np.bool_ and (values.view(np.uint8) > 1).any():
            raise FormatError(f"{self.name}: chunk {start // self.source.unit} holds bytes that are neither false (0) nor true (1)")
        store = self.store.with_transaction(self.commit.transaction())
        writing = store[self._box(start)].write(values, can_reference_source_data_indefinitely=True)

        def end() -> None:
            try:
                writing.result()
            except (ValueError, OSError) as error:
                raise SourceError(f"{self.name}: writing chunk {start // self.source.unit} failed: {error}") from error

        return end

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        try:
            found = self.store[self._box(start)].read(order="C").result()
        except (ValueError, OSError):
            return False  # a chunk that is not there
        return bool(_bytes(np.asarray(found, order="C")) == _bytes(values))

    def flush(self) -> None:
        """Commit what this thread wrote; a database is synced whole, in the end."""
        self.commit.end(self.name)

    def _box(self, start: int) -> tuple[slice, ...]:
        return self.source.slices(start // self.source.unit)


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def nothing() -> None:
    """Do nothing: the write has ended already."""


@runtime_checkable
class Located(Protocol):
    """A source whose bytes lie in another one, at places of their own."""

    def located(self, start: int, nbytes: int) -> tuple[Any, int]:
        """Return a source, and where in it the bytes of a run lie; itself and `start` where they are no run there."""


def _located(source: Any, start: int, nbytes: int) -> tuple[Any, int]:
    return source.located(start, nbytes) if isinstance(source, Located) else (source, start)


def sink_of(source: Any, context: Any, commit: Commit) -> Sink:
    """Return the sink at the place of a source; what is both is its own."""
    if hasattr(source, "write"):
        return cast(Sink, source)
    if isinstance(source, LocalFile):
        return FileSink(source.path, source.name)
    if isinstance(source, ChunkedArray):
        return ChunkSink(source, context, commit)
    raise LayoutError(f"{getattr(source, 'name', source)}: only local files and TensorStore arrays can be written")


def _said(error: OSError, name: str, what: str) -> SourceError:
    full = "; the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return SourceError(f"{name}: {what} failed: {error.strerror}{full}")


# --- new files --------------------------------------------------------------------------------------------------------


def put(folder: LocalFolder, file: str, data: bytes) -> None:
    """Write a small file whole."""
    lay_out(folder, file, data, len(data))


def lay_out(folder: LocalFolder, file: str, head: bytes | Iterable[tuple[int, bytes]], size: int) -> None:
    """Make a file of `size` bytes that begins with `head`, or holds each of several at its place; the rest are holes, zeros."""
    path = folder.path / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            for at, data in [(0, head)] if isinstance(head, bytes) else head:
                view = memoryview(data)
                while len(view):
                    n = os.pwrite(descriptor, view, at)
                    view, at = view[n:], at + n
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _said(error, file, f"laying out {size} bytes") from error


def remove(folder: LocalFolder, files: Iterable[str]) -> None:
    """Remove files that were written and are of no use."""
    for file in files:
        try:
            os.unlink(folder.path / file)
        except OSError as error:
            raise _said(error, file, "removing it") from error


# --- filling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One contiguous part of a sink: a box of one array."""

    array: str
    sink: Sink
    start: int
    """Where in the sink, in bytes."""
    box: Box
    dtype: np.dtype[Any]
    """As it is written; the source's may differ."""

    @property
    def nbytes(self) -> int:
        return self.box.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Filling:
    """What has to be moved: items, joined to where their elements are stored."""

    items: Sequence[Item]
    targets: Targets
    joined: Joined
    groups: Sequence[Ints]
    """Numbers of items that are moved together, in the order of where they are stored."""
    rows: Ints
    """Numbers of copies, those of each target together ..."""
    bounds: Ints
    """... which begin here, by target."""
    runs: Ints
    """The copy that is an item whole, in one run of its source and unchanged; -1 where there is none."""
    movers: int
    """How many groups are in flight."""
    reading: int
    """Bytes that each may take in reading, beside its items."""
    memory: Callable[[int], Bytes] = field(default_factory=lambda: _Held())
    """Gives each thread memory of so many bytes to read into, again and again the same: new memory costs as much as reading."""

    @staticmethod
    def of(items: Sequence[Item], targets: Targets, joined: Joined, room: int, movers: int, reading: int) -> Filling:
        """Group items, which are the first of the targets, so that each group takes `room` bytes at most."""
        count = len(items)
        sizes = np.fromiter((_aligned(t.nbytes) for t in targets), np.int64, len(targets))[:count]
        rows = np.argsort(joined.copies.target, kind="stable")
        bounds = np.searchsorted(joined.copies.target[rows], np.arange(len(targets) + 1))
        runs = _runs(items, targets, joined, rows, bounds)
        return Filling(items, targets, joined, _groups(joined, sizes, room), rows, bounds, runs, movers, reading)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


def filling(pairs: Sequence[tuple[Array, Array]], *, max_bytes: int = MAX_BYTES) -> Filling:
    """Join laid-out arrays to stored ones of the same shape, or raise what a plan raises, before anything is written."""
    items: list[Item] = []
    jobs: list[Job] = []
    targets = Targets()
    sinks: dict[int, Sink] = {}
    context, commit = _context(), Commit()
    room = max(1, max_bytes // (4 * MOVERS))
    movers, reading = _movers(pairs, max_bytes, room)
    for made, stored in pairs:
        if made.shape != stored.shape:
            raise LayoutError(f"{made.name}: laid out as {made.shape}, stored as {stored.shape}")
        boxes = _cut(made.pieces, made.dtype.itemsize, min(ITEM, room), made.name)
        block = []
        for number, start, first, shape in zip(
            boxes.source.tolist(), boxes.offset.tolist(), boxes.start.tolist(), boxes.shape.tolist(), strict=True
        ):
            source, start = _located(boxes.sources[number], start, math.prod(shape) * made.dtype.itemsize)
            sink = sinks.get(id(source)) or sinks.setdefault(id(source), sink_of(source, context, commit))
            box = Box(tuple(first), tuple(shape))
            items.append(Item(made.name, sink, start, box, made.dtype))
            block.append(
                Target(made.name, (0,), stored.dtype, box.shape, made.shape, box, box.size, stored.step, copies=stored.copies)
            )
        first_number = targets.add(block)
        jobs.append(Job(made.name, stored.dtype.itemsize, _in_memory(boxes, first_number, stored), stored.pieces, stored.copies))
    return Filling.of(items, targets, join(jobs, targets), room, movers, reading)


class _Held(threading.local):
    """Memory of each thread, as large as was ever asked for."""

    memory: Bytes = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> Bytes:
        if len(self.memory) < nbytes:
            self.memory = np.empty(nbytes, np.uint8)
        return self.memory


def _movers(pairs: Sequence[tuple[Array, Array]], max_bytes: int, room: int) -> tuple[int, int]:
    """Return how many groups of `room` bytes may be in flight, and what each may take in reading; a larger unit raises.

    Reading a chunk takes `UNIT_COST` times its size, and so does writing one, which is beyond the ceiling where it must be.
    """
    need, name = max(((UNIT_COST * unit_of(stored), stored.name) for _, stored in pairs), default=(0, ""))
    if need > max_bytes:
        raise LimitError(f"{name}: one unit of it takes {need} bytes at once, max_bytes is {max_bytes}; allow at least {need}")
    written = UNIT_COST * max((unit_of(made) for made, _ in pairs), default=0)
    movers = MOVERS if MOVERS * max(need + 2 * room, written) <= max_bytes else 1
    return movers, max(1, need, max_bytes // (2 * movers))


def unit_of(array: Array) -> int:
    """Return the size of the largest chunk in which an array is stored; 0 where any bytes can be read."""
    return max((int(s.unit) for s in array.pieces.sources if s.unit != 1), default=0)


def _runs(items: Sequence[Item], targets: Targets, joined: Joined, rows: Ints, bounds: Ints) -> Ints:
    """Find the items that are one run of their source, bit for bit."""
    count, copies = len(items), joined.copies
    found = np.full(count, -1, np.int64)
    single = np.flatnonzero(np.diff(bounds)[:count] == 1)
    row = rows[bounds[single]]
    dense, run = np.ones(len(row), bool), copies.itemsize[row].copy()
    for d in range(copies.shape.shape[1] - 1, -1, -1):
        dense &= (copies.strides[row, d] == run) | (copies.shape[row, d] == 1)
        run = run * copies.shape[row, d]
    found[single[dense]] = row[dense]
    for i in np.flatnonzero(found >= 0).tolist():
        target = targets[i]
        if target.step is not None or target.dtype != items[i].dtype or i in joined.others:
            found[i] = -1
    return found


def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"file_io_sync": False, "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})


def _in_memory(rows: Pieces, first: int, stored: Array) -> Pieces:
    """Return the wanted pieces: each row is a target of its own, row-major at its start."""
    inner = np.ones_like(rows.shape)
    for d in range(rows.ndim - 2, -1, -1):
        inner[:, d] = inner[:, d + 1] * rows.shape[:, d + 1]
    numbers = np.arange(first, first + len(rows))
    return Pieces((), numbers, np.zeros(len(rows), np.int64), rows.start, rows.shape, inner * stored.dtype.itemsize)


def _cut(pieces: Pieces, itemsize: int, limit: int, name: str) -> Pieces:
    """Cut rows of files into boxes of at most `limit` bytes, each one contiguous run; whole chunks stay as they are."""
    if not len(pieces):
        return pieces
    if any(s.unit != 1 for s in pieces.sources):
        return pieces
    dense = itemsize * np.ones(len(pieces), np.int64)
    for d in range(pieces.ndim - 1, -1, -1):
        if ((pieces.strides[:, d] != dense) & (pieces.shape[:, d] > 1)).any():
            raise LayoutError(f"{name}: it is laid out in pieces that are not contiguous, which cannot be written")
        dense = dense * pieces.shape[:, d]
    for d in range(pieces.ndim):
        inner = pieces.shape[:, d + 1 :].prod(axis=1, dtype=np.int64) * itemsize
        extent = np.maximum(1, limit // inner)
        parts = -(-pieces.shape[:, d] // extent)
        if (parts == 1).all():
            continue
        rows, at = repeated(parts)
        at = at * extent[rows]
        part = pieces.take(rows)
        start, shape = part.start.copy(), part.shape.copy()
        start[:, d] += at
        shape[:, d] = np.minimum(extent[rows], shape[:, d] - at)
        pieces = Pieces(part.sources, part.source, part.offset + at * part.strides[:, d], start, shape, part.strides)
    return pieces


def _groups(joined: Joined, sizes: Ints, room: int) -> list[Ints]:
    """Put items in the order of where they are stored, so that sources are read once and forward, and into groups that fit."""
    copies = joined.copies
    count = len(sizes)
    place = np.full((count, 2), -1, np.int64)
    mine = copies.target < count
    order = np.lexsort((copies.offset, copies.source))
    order = order[mine[order]][::-1]  # the first copy of each item is assigned last
    place[copies.target[order], 0] = copies.source[order]
    place[copies.target[order], 1] = copies.offset[order]
    ranked = np.lexsort((place[:, 1], place[:, 0]))
    ends = np.cumsum(sizes[ranked])
    groups, first, base = [], 0, 0
    while first < count:
        last = max(first + 1, int(np.searchsorted(ends, base + room, side="right")))
        groups.append(ranked[first:last])
        first, base = last, int(ends[last - 1])
    return groups


def share(made: Filling, rank: int, size: int) -> list[Ints]:
    """Return one process's part of the groups: neighbours, so that each reads its own part of the source; about as many bytes."""
    sizes = np.fromiter((item.nbytes for item in made.items), np.int64, len(made.items))
    order = np.concatenate([*made.groups, np.zeros(0, np.int64)])
    ends = np.cumsum(sizes[order])
    owner = np.zeros(len(sizes), np.int64)
    owner[order] = (ends - sizes[order] / 2) * size // max(1, int(sizes.sum()))
    parts = (group[owner[group] == rank] for group in made.groups)
    return [part for part in parts if len(part)]


def fill(
    made: Filling,
    *,
    groups: Sequence[Ints] | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
    resume: bool = False,
    lossy: bool = False,
) -> None:
    """Move groups of items, all by default; the first failure ends the rest and is raised.

    `check` is called before each group, and may raise. With `resume`, what is there already is compared, and written where it
    differs. `lossy` allows steps (norm + 1) that cannot be undone exactly.
    """
    mine = [group.tolist() for group in (made.groups if groups is None else groups)]
    total = sum(_nbytes(made, group) for group in mine)
    done = 0
    if progress:
        progress(0, total)
    with ThreadPoolExecutor(made.movers, thread_name_prefix="meshload-write") as pool:
        waiting: list[Any] = []
        try:
            for group in mine:
                if len(waiting) >= made.movers:
                    done = _advance(done + waiting.pop(0).result(), total, progress)
                if check is not None:
                    check()
                waiting.append(pool.submit(_move, made, group, resume, lossy))
            for future in waiting:
                done = _advance(done + future.result(), total, progress)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def scatter(made: Filling, items: Sequence[int], rows: Ints, *, check: Callable[[], None] | None = None) -> None:
    """Write of some items of files only what some copies bring, run by run: other processes write the rest of the same items.

    `check` is called before each item, and may raise.
    """
    for i in items:
        if check is not None:
            check()
        item = made.items[i]
        plan = _plan_of(made, [i])
        keep = np.isin(made.rows[made.bounds[i] : made.bounds[i + 1]], rows)
        plan = replace(plan, copies=plan.copies.take(keep))
        buffers = _buffers(made, plan)
        buffers[0][:] = 0  # what others write takes part in a step, too
        read(plan, buffers)
        data = _bytes(values_of(buffers[0], plan.targets[0]))
        cast(FileSink, item.sink).put((item.start + start, data[start : start + n]) for start, n in _target_runs(plan.copies))
    for sink in {id(made.items[i].sink): made.items[i].sink for i in items}.values():
        sink.flush()


def _target_runs(copies: Copies) -> Iterator[tuple[int, int]]:
    """Return start and length of the contiguous runs that copies fill, in bytes."""
    for row in range(len(copies)):
        shape, strides = copies.shape[row].tolist(), copies.target_strides[row].tolist()
        run, inner = int(copies.itemsize[row]), len(shape)
        while inner > 0 and (shape[inner - 1] == 1 or strides[inner - 1] == run):
            inner -= 1
            run *= shape[inner]
        starts = np.full((), int(copies.target_offset[row]), np.int64)
        for d in range(inner):
            starts = starts[..., None] + np.arange(shape[d]) * strides[d]
        for start in starts.reshape(-1).tolist():
            yield start, run


def _move(made: Filling, group: Sequence[int], resume: bool, lossy: bool) -> int:
    """Fill some items, and return their bytes."""
    left = group if resume else [i for i in group if not _copied(made, i)]
    if left:
        plan = _plan_of(made, left)
        buffers = _buffers(made, plan)
        read(plan, buffers)
        written = [_written(made.items[i], plan, place, buffers, resume, lossy) for place, i in enumerate(left)]
        for end in written:
            end()
    for sink in {id(made.items[i].sink): made.items[i].sink for i in group}.values():
        sink.flush()
    return _nbytes(made, group)


def _buffers(made: Filling, plan: Plan) -> dict[int, Bytes]:
    """Return memory for the targets; zeros where they are padded."""
    bounds = np.cumsum([0, *(_aligned(t.nbytes) for t in plan.targets)])
    held = made.memory(int(bounds[-1]))
    found = {i: held[at : at + t.nbytes] for i, (at, t) in enumerate(zip(bounds.tolist(), plan.targets, strict=False))}
    for i, target in enumerate(plan.targets):
        if target.filled != target.size:
            found[i][:] = 0
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copied(made: Filling, i: int) -> bool:
    """Let the system copy an item that lies in one run of a local file, as it is to lie in another; say whether it did."""
    item, row = made.items[i], made.runs[i]
    copies = made.joined.copies
    if row < 0 or not isinstance(item.sink, FileSink):
        return False
    source, start = _located(copies.sources[copies.source[row]], int(copies.offset[row]), item.nbytes)
    if not isinstance(source, LocalFile):
        return False
    source.check()
    return item.sink.copy(item.start, source, start, item.nbytes)


def _advance(done: int, total: int, progress: Progress | None) -> int:
    if progress:
        progress(done, total)
    return done


def _nbytes(made: Filling, group: Sequence[int]) -> int:
    return sum(made.items[i].nbytes for i in group)


def _plan_of(made: Filling, items: Sequence[int]) -> Plan:
    """Return the plan that fills some items alone, and the further copies that they need."""
    numbers = list(items)
    others: dict[int, tuple[int, ...]] = {}
    for place, i in enumerate(items):
        more = made.joined.others.get(i, ())
        if more:
            others[place] = tuple(range(len(numbers), len(numbers) + len(more)))
            numbers += more
    rows = np.concatenate([made.rows[made.bounds[i] : made.bounds[i + 1]] for i in numbers])
    target = np.repeat(np.arange(len(numbers)), [made.bounds[i + 1] - made.bounds[i] for i in numbers])
    copies = replace(made.joined.copies.take(rows), target=target)
    targets = [made.targets[i] for i in numbers]
    return Plan(targets, copies, others, max_bytes=made.reading)


def _written(item: Item, plan: Plan, place: int, buffers: dict[int, Bytes], resume: bool, lossy: bool) -> Callable[[], None]:
    """Begin to write an item, and return what ends the writing."""
    target = plan.targets[place]
    stored = buffers.pop(place)
    values = values_of(stored, target, [buffers.pop(n) for n in plan.others.get(place, ())], item.dtype)
    if target.step is not None and not lossy:
        back = target.step.inverse.apply(values)
        if back.tobytes() != stored.tobytes():
            raise LayoutError(
                f"{item.array}: stored values {target.step.operator} {target.step.number:g} in {values.dtype.name} cannot be "
                f"undone exactly; convert with dtype='float32', or say that rounding is meant by dtype={values.dtype.name!r}"
            )
    values = values if values.dtype == item.dtype else values.astype(item.dtype)
    if resume and item.sink.holds(item.start, values):
        return nothing
    return item.sink.write(item.start, values)


# --- in a folder beside the target, until all is there ----------------------------------------------------------------


FAILED = ".meshload-failed"
"""A file in the unfinished folder by which a process tells the others that it failed."""


def remember(staging: LocalFolder, what: Mapping[str, Any]) -> None:
    """Note what is being written; an unfinished folder of something else raises."""
    text = json.dumps(what, sort_keys=True)
    path = staging.path / WRITING
    try:
        if path.exists() and path.read_text(errors="replace") not in ("", text):  # empty: killed before it was written
            raise LayoutError(
                f"{staging.path}: what was begun there is of another source, or with other options; "
                f"remove it, or convert without resume=True, which does"
            )
        path.write_text(text)
    except OSError as error:
        raise _said(error, str(path), "noting what is written") from error


def staging_of(target: Path) -> Path:
    """Return the folder in which a target is made: hidden, beside it, so that a rename publishes it."""
    return target.with_name(f".{target.name}.meshload-unfinished")


def prepare(target: Path, *, resume: bool) -> LocalFolder:
    """Return the folder to write into; a target that is there already, or cannot be made, raises."""
    try:
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise LayoutError(f"{target}: it exists already, and nothing is overwritten; remove it, or choose another name")
        staging = staging_of(target)
        if staging.is_symlink() or (staging.exists() and not staging.is_dir()):
            raise LayoutError(f"{staging}: a folder was expected there, to write into until all is written; remove what it is")
        if staging.exists():
            with locked(staging):
                if not resume:
                    shutil.rmtree(staging)
        (staging / FAILED).unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
    except OSError as error:
        raise _said(error, str(target), "making the folder") from error
    return LocalFolder(staging)


@contextmanager
def locked(staging: Path) -> Iterator[None]:
    """Keep other processes from writing into an unfinished folder; raise where one does."""
    try:
        descriptor = os.open(staging, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _said(error, str(staging), "keeping others from it") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LayoutError(f"{staging}: another process is writing there; wait for it, or choose another target") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def publish(staging: LocalFolder, target: Path) -> None:
    """Give a finished folder its name, once all of it is on the disk."""
    try:
        (staging.path / WRITING).unlink(missing_ok=True)
        for path, folders, files in os.walk(staging.path, topdown=False):
            for name in files:
                if not os.path.islink(os.path.join(path, name)):
                    _sync(os.path.join(path, name))
            for name in folders:
                _sync(os.path.join(path, name))
        _sync(str(staging.path))
        os.rename(staging.path, target)
        _sync(str(target.parent))
    except OSError as error:
        raise _said(error, str(target), "publishing it") from error


def prepare_within(folder: Path) -> LocalFolder:
    """Return a new folder to write into, inside one that holds other files, which are left alone."""
    staging = staging_of(folder / "index")
    try:
        if staging.is_dir() and not staging.is_symlink():
            with locked(staging):
                shutil.rmtree(staging)
        staging.mkdir()
    except OSError as error:
        raise _said(error, str(folder), "making a folder in it") from error
    return LocalFolder(staging)


@contextmanager
def discarding(staging: LocalFolder) -> Iterator[None]:
    """Remove a folder that is written into where that fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(staging.path, ignore_errors=True)
        raise


def link(folder: LocalFolder, file: str, path: Path) -> None:
    """Make a link to a file."""
    place = folder.path / file
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.abspath(path))
    except OSError as error:
        raise _said(error, file, f"making a link to {path}") from error


def move_in(staging: LocalFolder, folder: Path, files: Sequence[str], replaced: Sequence[str]) -> None:
    """Give finished files their names in a folder that holds others too; the last of them says that all are there.

    So the last of those that they replace goes first. Other files of these names raise, and nothing is changed.
    """
    taken = [file for file in files if os.path.lexists(folder / file) and file not in replaced]
    if taken:
        raise LayoutError(f"{folder}: {listing(taken)} exist already, and are of somebody else; name another folder")
    leading = [file for file in (*files, *replaced) if not lies_in(folder, file)]
    if leading:
        raise LayoutError(f"{folder}: {listing(leading)} would come to lie elsewhere, as a folder on the way is a link; remove it")
    try:
        for file in files:
            if not os.path.islink(staging.path / file):
                _sync(str(staging.path / file))
        if replaced:
            (folder / replaced[-1]).unlink(missing_ok=True)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.rename(staging.path / file, folder / file)
        _sync(str(folder))
        for file in set(replaced) - set(files):
            (folder / file).unlink(missing_ok=True)
        shutil.rmtree(staging.path)
    except OSError as error:
        raise _said(error, str(folder), "publishing in it") from error


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
