"""Exchange is how the processes of one call act together: they share reads, tell each other what they hold, and fail together."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .errors import SourceError
from .frameworks import Group, installed
from .pieces import Ints
from .planning import Plan
from .reading import Progress, read, word_of
from .scheduling import NETWORK_THREADS, THREADS, Copies, compacted
from .sharing import Shared, share_out
from .source import Bytes, ByteSource, ChunkedSource, Source, closing_files

T = TypeVar("T")

STEP = 2 << 30
"""Bytes that take seconds to read, even from a cold disk."""
COLUMNS = ("source", "offset", "strides", "target", "target_offset", "target_strides", "shape", "itemsize")


@dataclass(frozen=True, slots=True)
class Alone:
    """A group of one process."""

    rank: int = 0
    size: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def swap(self, parts: Sequence[NDArray[np.uint8]], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        return list(parts)


def running() -> Group:
    """Return the group of processes that runs: torch's or JAX's, else this process alone."""
    groups = (framework.group() for framework in installed().values())
    return next((group for group in groups if group is not None), Alone())


def shared(group: Group, value: Any) -> list[Any]:
    """Return what each process gave, by rank: plain values, as JSON has them."""
    return [json.loads(data) for data in group.gather(json.dumps(value).encode())]


def together(group: Group, action: Callable[[], T], *, only: int | None = None) -> T | None:
    """Let all processes act, or only one; where one fails all raise, the others with the first one's words."""
    failed: BaseException | None = None
    result = None
    if only is None or group.rank == only:
        try:
            result = action()
        except Exception as error:
            failed = error
    words = shared(group, None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, text in enumerate(words):
        if text is not None:
            raise SourceError(f"rank {rank} failed, so all do: {text}")
    return result


# --- sharing reads ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Exchange:
    """How the reads of a plan are shared out between the processes that each have one."""

    group: Group
    mine: Copies
    """This process's copies, compact."""
    first: int
    """The number of the first of them, among those of all."""
    sources: Sequence[Source | None]
    """Those of all processes; None where this one has no part in it."""
    shared: Shared
    steps: int
    """In so many parts each process reads what it reads for itself, and hears of the others' failures in between."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read once between all."""
        return self.shared.nbytes


def exchange_of(plan: Plan, group: Group) -> Exchange:
    """Tell the other processes what this one reads, and share it out; all call it, each with its own plan."""
    mine = compacted(plan.copies)
    told = [_unpacked(data) for data in group.gather(_packed(mine, plan.max_bytes))]
    own = dict(zip(_keys(mine.sources), mine.sources, strict=True))
    keys = list(dict.fromkeys(key for of_rank, _, _ in told for key in of_rank))
    number = {key: n for n, key in enumerate(keys)}
    twice = {key for of_rank, _, _ in told for key, n in Counter(of_rank).items() if n > 1}
    once = [key not in twice for key in keys]
    places = tuple(_Place(*key) for key in keys)
    tables = []
    for rank, (of_rank, _, columns) in enumerate(told):
        renumber = np.asarray([number[key] for key in of_rank], np.int64)
        source = renumber[columns["source"]] if len(renumber) else columns["source"]
        target = np.full(len(source), rank, np.int64)
        tables.append(Copies(places, **{**columns, "source": source, "target": target}))
    # slabs stay while what is sent is put together, joined and swapped, and the next ones come; and all must mean the same rounds
    budget = max(1, min(ceiling for _, ceiling, _ in told) // 6)
    table = Copies.union(tables)
    shared = share_out(table, budget=budget, shareable=once)
    first = sum(len(columns["source"]) for _, _, columns in told[: group.rank])
    rest = table.take(shared.alone)
    most = np.bincount(rest.target, rest.sizes * rest.itemsize, 1).max()
    return Exchange(group, mine, first, [own.get(key) for key in keys], shared, max(1, math.ceil(most / STEP)))


@closing_files()
def read_shared(plan: Plan, buffers: Mapping[int, Bytes], exchange: Exchange, *, progress: Progress | None = None) -> None:
    """Fill buffers as `read` does; what several processes want is read once between them. Where one fails all raise."""
    group, shared = exchange.group, exchange.shared
    handed = shared.parts.take(shared.parts.target == group.rank).nbytes
    alone = [replace(plan, copies=copies) for copies in _alone(exchange)]
    total = sum(part.schedule.nbytes for part in alone) + handed
    done = 0
    for part in alone:
        together(group, partial(read, part, buffers, progress=progress and _advance(progress, done, total)))
        done += part.schedule.nbytes
    slabs = _Slabs(exchange)
    given: list[tuple[Ints, Bytes]] = []

    def place() -> None:
        """Put what came in a round where it belongs."""
        nonlocal done
        for rows, data in given:
            _place(exchange, rows, data, buffers)
            done += len(data)
        if progress and any(len(data) for _, data in given):
            progress(done, total)
        given.clear()

    def sent(rows: Ints) -> list[Bytes]:
        place()
        return _sent(exchange, rows, slabs)

    try:
        for rows, following in pairwise([*shared.rounds(), None]):
            assert rows is not None
            out = together(group, partial(sent, rows)) or []
            if following is not None:
                slabs.ask(following)
            taken = rows[shared.parts.target[rows] == group.rank]
            reader, parts = shared.slabs[shared.slab[taken], 3], shared.parts.take(taken)
            sizes = np.zeros(group.size, np.int64)
            np.add.at(sizes, reader, parts.sizes * parts.itemsize)
            for rank, data in enumerate(group.swap(out, sizes.tolist())):
                given.append((taken[reader == rank], data))
        together(group, place)
    finally:
        slabs.pool.shutdown(cancel_futures=True)


def _advance(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def _alone(exchange: Exchange) -> list[Copies]:
    """Return what this process reads for itself, in the order of where it lies, in steps of about as many bytes."""
    rest = exchange.mine.take(exchange.shared.alone[exchange.first : exchange.first + len(exchange.mine)])
    rest = rest.take(np.lexsort((rest.offset, rest.source)))
    ends = np.cumsum(rest.sizes * rest.itemsize)
    edges = np.searchsorted(ends, np.arange(1, exchange.steps) * (rest.nbytes / exchange.steps), side="right")
    return [rest.take(slice(a, b)) for a, b in pairwise([0, *edges.tolist(), len(rest)])]


class _Slabs:
    """The slabs that this process reads, asked for a round ahead: they come while those before are handed on."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        far = any(getattr(s, "holds", False) or getattr(s, "is_far", False) for s in exchange.sources)
        self.pool = ThreadPoolExecutor(NETWORK_THREADS if far else THREADS, thread_name_prefix="meshload")
        self.coming: dict[int, Future[Bytes]] = {}

    def ask(self, rows: Ints) -> Ints:
        """Ask for the slabs of some parts that are not on their way yet; return the parts that are this process's to send."""
        shared = self.exchange.shared
        of_mine: Ints = rows[shared.slabs[shared.slab[rows], 3] == self.exchange.group.rank]
        for n in np.unique(shared.slab[of_mine]).tolist():
            if n not in self.coming:
                self.coming[n] = self.pool.submit(_read, self.exchange, n)
        return of_mine

    def drop(self, row: int) -> None:
        """Let go of slabs of which no part after this one is sent."""
        for n in [n for n in self.coming if self.exchange.shared.last[n] <= row]:
            del self.coming[n]


def _sent(exchange: Exchange, rows: Ints, slabs: _Slabs) -> list[Bytes]:
    """Wait for this process's slabs, and return what goes to each process, part by part, row-major."""
    shared = exchange.shared
    of_mine = slabs.ask(rows)
    parts = shared.parts.take(of_mine)
    sizes = parts.sizes * parts.itemsize
    found = []
    for rank in range(exchange.group.size):
        numbers = np.flatnonzero(parts.target == rank)
        data, at = np.empty(int(sizes[numbers].sum()), np.uint8), 0
        for row in numbers.tolist():
            n = int(shared.slab[of_mine[row]])
            slab = slabs.coming[n].result()
            here = _view(parts, row, slab, int(parts.offset[row]) - int(shared.slabs[n, 1]), parts.strides)
            data[at : at + here.nbytes].view(here.dtype).reshape(here.shape)[...] = here
            at += here.nbytes
        found.append(data)
    slabs.drop(int(rows[-1]))
    return found


def _read(exchange: Exchange, n: int) -> Bytes:
    number, start, length, _ = exchange.shared.slabs[n].tolist()
    source = exchange.sources[number]
    assert source is not None, "a slab is read by a rank that wants some of it"
    if source.unit != 1:
        (chunk,) = cast(ChunkedSource, source).read_chunks([start // source.unit])
        return np.asarray(chunk.reshape(-1).view(np.uint8))
    widest = int(exchange.shared.parts.itemsize.max(initial=1))
    memory = np.empty(min(length + widest - 1, source.size - start), np.uint8)  # an element may straddle the slab's end
    cast(ByteSource, source).read_into(start, memory)
    return memory


def _place(exchange: Exchange, rows: Ints, data: Bytes, buffers: Mapping[int, Bytes]) -> None:
    """Put what one process gave where it belongs."""
    parts, at = exchange.shared.parts, 0
    for row in rows.tolist():
        target = int(exchange.mine.target[int(exchange.shared.row[row]) - exchange.first])
        there = _view(parts, row, buffers[target], int(parts.target_offset[row]), parts.target_strides)
        there[...] = data[at : at + there.nbytes].view(there.dtype).reshape(there.shape)
        at += there.nbytes


def _view(parts: Copies, row: int, memory: Bytes, offset: int, strides: Ints) -> NDArray[Any]:
    word = word_of(int(parts.itemsize[row]))
    return np.ndarray(tuple(parts.shape[row].tolist()), word, memory, offset, tuple(strides[row].tolist()))


@dataclass(frozen=True, slots=True)
class _Place:
    """A source as all processes know it."""

    name: str
    size: int
    unit: int


def _keys(sources: Sequence[Source]) -> list[tuple[str, int, int]]:
    """Name sources so that those of two ranks are taken for one only where they are: files of one name lie in many folders."""
    return [(f"{_where(s)}: {s.name}", int(s.size), int(s.unit)) for s in sources]


def _where(source: Any) -> str:
    """Return the path or key of what a source is read from in the end."""
    while hasattr(source, "source"):
        source = source.source
    store = getattr(source, "store", source)
    return f"{getattr(getattr(store, 'kvstore', None), 'path', '')}{getattr(source, 'path', getattr(source, 'key', ''))}"


def _packed(copies: Copies, max_bytes: int) -> bytes:
    out = io.BytesIO()
    told = np.frombuffer(json.dumps([_keys(copies.sources), max_bytes]).encode(), np.uint8)
    np.savez_compressed(out, told=told, **{column: getattr(copies, column) for column in COLUMNS})
    return out.getvalue()


def _unpacked(data: bytes) -> tuple[list[tuple[str, int, int]], int, dict[str, Ints]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        keys, max_bytes = json.loads(found["told"].tobytes())
        of_rank = [(str(name), int(size), int(unit)) for name, size, unit in keys]
        return of_rank, int(max_bytes), {column: np.asarray(found[column]) for column in COLUMNS}
