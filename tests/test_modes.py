"""Every way of reading gives the bytes that NumPy gives: exact, merged, remote, decoded, streamed, and shared between ranks."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tensorstore

import meshload
from meshload.array import Array, concatenate
from meshload.exchange import exchange_of, read_shared
from meshload.frameworks import World
from meshload.pieces import piece
from meshload.planning import Plan, plan_array
from meshload.reading import buffers_for, read, values_of
from meshload.source import ChunkedArray, KeyValueFile, KeyValueFolder, LocalFile
from meshload.testing import ramp, same_bits

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

HEAD = 12
"""Bytes in front of the array, so that nothing is aligned."""


def local(values: Any, folder: str | Path) -> Array:
    path = Path(folder) / "f"
    path.write_bytes(bytes(HEAD) + values.tobytes())
    source = LocalFile(path, "f", path.stat().st_size)
    return Array("w", values.dtype, values.shape, piece(source, HEAD, values.shape, values.itemsize))


def remote(values: Any, folder: str | Path) -> Array:
    store = tensorstore.KvStore.open("memory://").result()
    store.write("f", bytes(HEAD) + values.tobytes()).result()
    return Array("w", values.dtype, values.shape, piece(KeyValueFile(store, "f", "f"), HEAD, values.shape, values.itemsize))


def decoded(values: Any, folder: str | Path) -> Array:
    metadata = {"compressor": {"id": "zlib"}}
    store = tensorstore.open(
        {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": metadata},
        create=True,
        dtype=values.dtype,
        shape=values.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=[min(3, n) for n in values.shape]),
    ).result()
    store[...] = values
    return Array("w", values.dtype, values.shape, ChunkedArray(store, "zarr").pieces())


# --- ranks that are threads -------------------------------------------------------------------------------------------


class Ranks:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.told: list[Any] = [None] * size

    def all(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        found = list(self.told)
        self.barrier.wait()
        return found

    def run(self, action: Callable[[Member], Any]) -> list[Any]:
        """Return what an action gives on each rank, or the error that it raised."""
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                found[rank] = action(Member(rank, self))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@dataclass(frozen=True)
class Member:
    """A group of processes, seen from one of them."""

    rank: int
    ranks: Ranks

    @property
    def size(self) -> int:
        return self.ranks.size

    def gather(self, data: bytes) -> list[bytes]:
        return self.ranks.all(self.rank, data)

    def swap(self, parts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        found = [given[self.rank].copy() for given in self.ranks.all(self.rank, list(parts))]
        assert [len(part) for part in found] == list(sizes)
        return found


def filled(plan: Plan, fill: Callable[[Plan, Any], None]) -> Any:
    buffers = buffers_for(plan)
    for buffer in buffers.values():
        buffer[:] = 0xA5  # memory that is given out again may hold the right bytes already
    fill(plan, buffers)
    return values_of(buffers[0], plan.targets[0])


def together(plans: Sequence[Plan]) -> list[Any]:
    """Let ranks read their plans, sharing what several want."""

    def one(member: Member) -> Any:
        exchange = exchange_of(plans[member.rank], member)
        return filled(plans[member.rank], lambda plan, buffers: read_shared(plan, buffers, exchange))

    return Ranks(len(plans)).run(one)


# --- the same bytes ---------------------------------------------------------------------------------------------------


@dataclass
class _Device:
    """A device that keeps what comes in an array."""

    dtype: Any
    shape: tuple[int, ...]
    name: str = "w"
    tensor: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tensor = np.zeros(self.shape, self.dtype)

    def write(self, start: int, values: Any) -> Callable[[], None]:
        self.tensor.reshape(-1)[start : start + len(values)] = values
        return lambda: None

    def flush(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def memory(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)


def streamed(plan: Plan) -> Any:
    from meshload.streaming import stream

    device: Any = _Device(plan.targets[0].dtype, plan.targets[0].shape)
    stream(plan, {0: device}, device).run({})
    return device.tensor


@settings(max_examples=40)
@given(st.data())
def test_all_ways_of_reading_give_what_numpy_gives(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9)))
    values = ramp("w", shape, data.draw(st.sampled_from([np.uint8, np.float16, np.float32, np.int64])))
    order = data.draw(st.permutations(range(3)))
    boxes = []
    for _ in range(data.draw(st.integers(2, 4))):
        starts = [data.draw(st.integers(0, n - 1)) for n in shape]
        boxes.append(tuple(slice(a, data.draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True)))
    ceiling = data.draw(st.sampled_from([200, 4096, 256 << 20]))
    with TemporaryDirectory() as folder:
        check(values, boxes, order, ceiling, folder)


def check(values: Any, boxes: Sequence[tuple[slice, ...]], order: Sequence[int], ceiling: int, folder: str) -> None:
    expected = [np.ascontiguousarray(values[box].transpose(order)) for box in boxes]
    for kind, gap in (*itertools.product((local, remote), (0, None, 16, 1 << 30)), (decoded, None)):
        made = kind(values, folder)
        most = max(ceiling, 3 * 27 * values.itemsize if kind is decoded else 0)
        plans = [plan_array(made[box].transpose(*order), merge_gap=gap, max_bytes=most) for box in boxes]
        for plan, wanted in zip(plans, expected, strict=True):
            assert same_bits(filled(plan, read), wanted), (kind.__name__, gap)
            if kind is not decoded:
                assert same_bits(streamed(plan), wanted), (kind.__name__, gap)
        for found, wanted in zip(together(plans), expected, strict=True):
            assert isinstance(found, np.ndarray), found
            assert same_bits(found, wanted), (kind.__name__, gap)


@pytest.mark.parametrize("strides", [(0, 0), (0, 4), (4, 0), (-8, -4)])
def test_elements_that_are_stored_once_for_many_or_backwards_are_shared_too(strides: tuple[int, int], tmp_path: Path) -> None:
    """As torch saves what is expanded."""
    stored = ramp("w", (30,))
    source = local(stored, tmp_path).pieces.sources[0]
    values = np.ndarray((5, 2), stored.dtype, stored, 80, strides)
    array = Array("w", stored.dtype, (5, 2), piece(source, HEAD + 80, (5, 2), 4, strides=strides))
    assert all(same_bits(found, values) for found in together([plan_array(array), plan_array(array)]))


# --- a rank that fails ------------------------------------------------------------------------------------------------


@contextmanager
def breaking(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[list[int]]:
    """Let reading fail once, behind a number of runs."""
    read_into, read_runs, lock = LocalFile.read_into, LocalFile.read_runs, threading.Lock()
    reads: list[int] = []

    def note(name: str, starts: list[int]) -> None:
        with lock:
            before = len(reads)
            reads.extend(starts)
            if before <= after < len(reads):
                raise meshload.SourceError(f"{name}: the cable was pulled")

    def into(self: LocalFile, start: int, out: Any) -> None:
        note(self.name, [start])
        read_into(self, start, out)

    def runs(self: LocalFile, ranges: Any, runs: Any, buffers: Any) -> None:
        note(self.name, runs[:, 1].tolist())
        read_runs(self, ranges, runs, buffers)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFile, "read_into", into)
        patched.setattr(LocalFile, "read_runs", runs)
        yield reads


@pytest.mark.parametrize("after", [0, 5, 17])
def test_a_rank_that_fails_in_the_middle_stops_all_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    values = ramp("w", (256, 64))
    array = local(values, tmp_path)
    plans = [plan_array(array[:, 16 * r : 16 * r + 16], max_bytes=1 << 13) for r in range(4)]
    with breaking(monkeypatch, after) as reads:
        found = together(plans)
    assert [type(error) for error in found] == [meshload.SourceError] * 4
    words = sorted(str(error) for error in found)
    assert words[0] == "f: the cable was pulled"
    assert len(set(words[1:])) == 1
    assert words[1].endswith("failed, so all do: SourceError: f: the cable was pulled")
    assert after < len(reads) <= after + 8  # of 41, four a round


def test_a_rank_that_fails_alone_stops_the_others_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each wants for itself is read in steps, as many on each rank."""
    monkeypatch.setattr("meshload.exchange.STEP", 1 << 12)
    array = local(ramp("w", (256, 64)), tmp_path)
    plans = [plan_array(concatenate([array[4 * n + r : 4 * n + r + 1] for n in range(64)], 0)) for r in range(4)]
    with breaking(monkeypatch, 1 << 20) as reads:
        found = together(plans)
    assert len(reads) == 256
    assert all(same_bits(part, ramp("w", (256, 64))[r::4]) for r, part in enumerate(found))
    with breaking(monkeypatch, 70) as reads:
        found = together(plans)
    assert [type(error) for error in found] == [meshload.SourceError] * 4
    assert len(reads) <= 128  # each step is 16 rows of each rank


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_files_are_closed_after_they_are_shared(tmp_path: Path) -> None:
    array = local(ramp("w", (64, 64)), tmp_path)
    together([plan_array(array), plan_array(array)])
    assert str(tmp_path / "f") not in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("at", [1, 1 << 14, 1 << 16])  # the last is all of it
def test_a_rank_whose_caller_raises_in_progress_lets_all_fail(tmp_path: Path, at: int) -> None:
    array = local(ramp("w", (256, 64)), tmp_path)
    plans = [plan_array(array, max_bytes=1 << 13) for _ in range(3)]

    def one(member: Member) -> Any:
        def stop(done: int, total: int) -> None:
            if member.rank == 1 and done >= at:
                raise ValueError("enough")

        plan = plans[member.rank]
        return read_shared(plan, buffers_for(plan), exchange_of(plan, member), progress=stop)

    words = [str(error) for error in Ranks(3).run(one)]
    assert words == ["rank 1 failed, so all do: ValueError: enough", "enough", "rank 1 failed, so all do: ValueError: enough"]


def test_a_rank_that_cannot_open_the_path_lets_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, me = Ranks(2), threading.local()
    monkeypatch.setattr("meshload.loading.running", lambda: me.group)
    monkeypatch.setattr("meshload.ranks.launched", lambda: World(me.group.rank, 2, 2))
    monkeypatch.setattr(KeyValueFolder, "is_remote", True)
    store = tensorstore.KvStore.open("memory://").result()
    store.write("model.safetensors", b"\2" + bytes(7) + b"{}").result()

    def one(member: Member) -> Any:
        me.group = member
        return meshload.restore([store, "nosuch://x/y"][member.rank], mesh="dp=2", layout="replicated", into="numpy")

    words = [str(error) for error in ranks.run(one)]
    assert words[1].startswith("nosuch://x/y: TensorStore cannot open it")
    assert words[0] == f"rank 1 failed, so all do: FormatError: {words[1]}"


def test_row_parallel_ranks_read_each_byte_once_in_many_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ramp("w", (256, 64))
    array = local(values, tmp_path)
    plans = [plan_array(array[:, 16 * r : 16 * r + 16], max_bytes=1 << 13) for r in range(4)]
    with breaking(monkeypatch, 1 << 20) as reads:
        found = together(plans)
    assert all(same_bits(part, np.ascontiguousarray(values[:, 16 * r : 16 * r + 16])) for r, part in enumerate(found))
    assert len(reads) == len(set(reads)) == 49
