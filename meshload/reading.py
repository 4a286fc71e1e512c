"""Reading executes a plan: ranged reads with several threads, straight into the buffers where it can, under a memory ceiling.

This is the only place that owns threads and staging memory on the way in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import row_major
from .errors import CopiesDiffer, LimitError
from .kernel import new_memory, touch, use_plain_pages
from .planning import MAX_BYTES, Plan, Target, check_limit, plan_array
from .scheduling import Batch, Chunk, Cut, Decoded, Schedule, Staged, boxes_of_cut
from .source import Bytes, ByteSource, ChunkedSource, DecodingSource, LocalFile, RunSource, closing_files, plain_runs

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read."""

ALIGNMENT = 64
"""What XLA's CPU backend wants of memory that it takes without a copy; also a cache line."""
HUGE = 4 << 20
"""From this size on, memory is mapped for itself, so that the kernel may give it huge pages."""
STEP = 512 << 10
"""New memory is touched and filled in steps that stay in a core's cache meanwhile: a tenth faster than 8 MiB at once."""


def read(plan: Plan, buffers: Mapping[int, Bytes], *, progress: Progress | None = None) -> None:
    """Fill buffers, by target number, each with the bytes of its target. The first failure ends the rest and is raised."""
    check_limit(plan)
    for source in plan.sources:
        if isinstance(source, LocalFile):
            source.check()
    schedule = plan.schedule
    work = _Work(plan, buffers)
    done, total = 0, schedule.nbytes if progress else 0  # counting takes as long as naming all runs
    if progress:
        progress(0, total)
    with closing_files(), ThreadPoolExecutor(max_workers=schedule.threads, thread_name_prefix="meshload") as pool:
        waiting: set[Future[int]] = set()
        try:
            for batch in schedule.batches():
                waiting.add(pool.submit(work.do, batch))
                if len(waiting) >= 4 * schedule.threads:  # a queue short enough to stop soon after a failure
                    finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    done = _advance(finished, done, total, progress)
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                done = _advance(finished, done, total, progress)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def _advance(finished: set[Future[int]], done: int, total: int, progress: Progress | None) -> int:
    done += sum(future.result() for future in finished)
    if progress:
        progress(done, total)
    return done


def buffers_for(plan: Plan, *, without: Container[int] = ()) -> dict[int, Bytes]:
    """Return memory for each target of a plan, but those that are named; zeros where it is padded."""
    return {i: buffer_for(target) for i, target in enumerate(plan.targets) if i not in without}


def buffer_for(target: Target) -> Bytes:
    """Return memory for a target, aligned to 64 bytes; zeros where the target is padded. Reading touches it first."""
    try:
        if target.nbytes >= HUGE:
            return new_memory(target.nbytes)
        raw = (np.empty if target.filled == target.size else np.zeros)(target.nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError, OSError, OverflowError) as error:  # a hostile shape; what has no size is a ValueError
        raise LimitError(f"{target.name}: {target.shape} of {target.dtype.name}, {target.nbytes} bytes, find no memory") from error
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + target.nbytes]


def values_of(buffer: Bytes, target: Target, others: Sequence[Bytes] = (), dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return a filled buffer as the values that its target means: a view, or new memory where copies or a step ask for it.

    `others` are the buffers of the target's further copies. A step rounds to `dtype`, where the caller is going to cast to it.
    """
    found = buffer.view(target.dtype).reshape(target.shape)
    if others:
        found = _joined(found, [b.view(target.dtype).reshape(target.shape) for b in others], target)
    return target.step.apply(found, dtype) if target.step else found


def _joined(first: NDArray[Any], others: Sequence[NDArray[Any]], target: Target) -> NDArray[Any]:
    """Make one array of all stored copies; sums and means are computed in float32 (float64 for 64 bits) and rounded once."""
    if target.copies == "check":
        for n, other in enumerate(others, 1):
            if first.tobytes() != other.tobytes():
                far = np.nanmax(np.abs(first.astype(np.float64) - other.astype(np.float64)))
                raise CopiesDiffer(
                    f"{target.name}: rank {target.rank} finds that stored copies 0 and {n} differ, by {far:g} at most; "
                    f"check(copies=True) names their files; copies='first' takes the first, copies='mean' their mean"
                )
        return first
    wide: np.dtype[Any] = np.dtype(np.float64 if first.dtype.itemsize == 8 else np.float32)
    total = np.sum([a.astype(wide) for a in (first, *others)], axis=0, dtype=wide)
    return np.asarray((total / wide.type(1 + len(others)) if target.copies == "mean" else total).astype(first.dtype))


def read_array(array: Array, *, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """Read one array whole."""
    return _whole(plan_array(array, max_bytes=max_bytes), read)


def read_here(array: Array) -> NDArray[Any]:
    """Read one array whole, in the thread that asks."""

    def in_turn(plan: Plan, buffers: Mapping[int, Bytes]) -> None:
        work = _Work(plan, buffers)
        for batch in plan.schedule.batches():
            work.do(batch)

    return _whole(plan_array(array), in_turn)


def _whole(plan: Plan, fill: Callable[[Plan, Mapping[int, Bytes]], None]) -> NDArray[Any]:
    """Return the one array that a plan wants, from buffers that are filled so."""
    buffers = buffers_for(plan)
    fill(plan, buffers)
    return values_of(buffers[0], plan.targets[0], [buffers[n] for n in plan.others.get(0, ())])


def tensorstore_view(array: Array, *, max_bytes: int | None = None) -> Any:
    """Return a read-only TensorStore whose reads are meshload's reads of exactly what is asked."""
    import tensorstore

    def fill(domain: Any, out: NDArray[Any], parameters: Any) -> None:
        box = tuple(slice(int(d.inclusive_min), int(d.exclusive_max)) for d in domain)
        out[...] = read_array(array[box], max_bytes=max_bytes or MAX_BYTES)

    return tensorstore.virtual_chunked(
        fill, dtype=tensorstore.dtype(array.dtype), domain=tensorstore.IndexDomain(shape=array.shape)
    )


class _Work:
    """What the threads of one call share."""

    def __init__(self, plan: Plan, buffers: Mapping[int, Bytes]) -> None:
        self.sources = plan.sources
        self.schedule: Schedule = plan.schedule
        self.buffers = buffers
        self.staging = threading.local()
        self.huge = True

    def do(self, batch: Batch) -> int:
        """Read a batch, and return the bytes that were asked for."""
        if isinstance(batch, Decoded):
            return self._chunks(batch)
        if isinstance(batch, Staged):
            return self._cuts(batch)
        source = cast(ByteSource, self.sources[batch.source])
        runs = batch.runs
        if len(runs) == 1:
            _, start, length, target, to = runs[0].tolist()
            step = length
            if isinstance(source, LocalFile):
                source.expect(start, length)
                step = STEP
            for at in range(0, length, step):
                memory = self.buffers[target][to + at : to + min(at + step, length)]
                self._touch(memory)
                source.read_into(start + at, memory)
        elif hasattr(source, "read_runs") and (runs[1:, 1] >= runs[:-1, 1] + runs[:-1, 2]).all():
            for target in np.unique(runs[:, 3]).tolist():
                own = runs[runs[:, 3] == target]
                self._touch(self.buffers[target][own[:, 4].min() : (own[:, 4] + own[:, 2]).max()])
            cast(RunSource, source).read_runs(batch.ranges, runs, self.buffers)
        else:
            plain_runs(source, batch.ranges, runs, self.buffers)
        return int(batch.ranges[:, 2].sum())

    def _touch(self, memory: Bytes) -> None:
        """Touch memory that is to be filled; once that is slow, all memory is touched in plain pages."""
        if not touch(memory) and self.huge:
            self.huge = False
            for buffer in self.buffers.values():
                if len(buffer) >= HUGE:
                    use_plain_pages(buffer)

    def _cuts(self, batch: Staged) -> int:
        done = 0
        for _, start, length, first, end in batch.ranges.tolist():
            memory = self._staging(length)
            cast(ByteSource, self.sources[batch.source]).read_into(start, memory)
            for row in batch.cuts[first:end].tolist():
                self._cut(Cut(*row), memory, start)
            done += length
        return done

    def _staging(self, nbytes: int) -> Bytes:
        """Return memory that the thread uses again and again."""
        found: Bytes | None = getattr(self.staging, "memory", None)
        if found is None or len(found) < nbytes:
            found = self.staging.memory = np.empty(nbytes, np.uint8)
        return found[:nbytes]

    def _chunks(self, batch: Decoded) -> int:
        source = self.sources[batch.source]
        outs: dict[int, NDArray[Any]] = {}
        if hasattr(source, "decode_into"):
            whole = {c.k: self._whole(c, cast(DecodingSource, source)) for c in batch.chunks}
            outs = {k: out for k, out in whole.items() if out is not None}
            cast(DecodingSource, source).decode_into(outs)
        rest = [c for c in batch.chunks if c.k not in outs]
        found = cast(ChunkedSource, source).read_chunks([c.k for c in rest]) if rest else []
        for chunk, values in zip(rest, found, strict=True):
            self._cut_chunk(chunk, values.reshape(-1).view(np.uint8), chunk.k * source.unit)
        return sum(c.nbytes for c in batch.chunks)

    def _whole(self, chunk: Chunk, source: DecodingSource) -> NDArray[Any] | None:
        """Return where a chunk goes, in its clipped shape; None where it is wanted in part, or in several places."""
        copies, dtype = self.schedule.copies, source.dtype
        copy = int(chunk.copies[0])
        shape = tuple(s.stop - s.start for s in source.slices(chunk.k))
        wanted, strides, target = (c[copy].tolist() for c in (copies.shape, copies.strides, copies.target_strides))
        if len(chunk.copies) > 1 or copies.itemsize[copy] != dtype.itemsize or math.prod(wanted) != math.prod(shape):
            return None
        there = []
        for n, stride in zip(shape, row_major(shape, dtype.itemsize), strict=True):
            # a dim of the copy may be several of the chunk's, as long as none of these is several of the copy's
            dims = zip(wanted, strides, target, strict=True)
            fits = [t * (stride // s) for w, s, t in dims if 0 < s <= stride and (n - 1) * stride < w * s]
            if n > 1 and not fits:
                return None
            there.append(fits[0] if n > 1 else 0)
        memory = self.buffers[int(copies.target[copy])]
        return np.ndarray(shape, dtype, memory, int(copies.target_offset[copy]), tuple(there))

    def _cut_chunk(self, chunk: Chunk, memory: Bytes, start: int) -> None:
        copies, inner = self.schedule.copies, self.schedule.inner
        for copy in chunk.copies.tolist():
            runs = int(copies.shape[copy, : copies.shape.shape[1] - int(inner[copy])].prod())
            self._cut(Cut(copy, 0, runs), memory, start)

    def _cut(self, cut: Cut, memory: Bytes, start: int) -> None:
        copies = self.schedule.copies
        word = word_of(int(copies.itemsize[cut.copy]))
        target = self.buffers[int(copies.target[cut.copy])]
        for offset, to, shape, strides, target_strides in boxes_of_cut(copies, self.schedule.inner, cut):
            here = np.ndarray(shape, word, memory, offset - start, strides)
            there = np.ndarray(shape, word, target, to, target_strides)
            there[...] = here


def word_of(itemsize: int) -> np.dtype[Any]:
    """Return the dtype of elements of which only the size is known."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype((np.void, itemsize))


def fragments(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Go through the reads of a plan as (file, start, length), for printing."""
    for source, start, length in plan.schedule:
        yield plan.sources[source].name, start, length
