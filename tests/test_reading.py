"""Reading: what is asked of the sources is what the plan says; failures, memory, and other stores than disks."""

from __future__ import annotations

import errno
import http.server
import itertools
import json
import math
import mmap
import os
import re
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorstore

import meshload
import meshload.scheduling
import meshload.source
from meshload.array import Array, concatenate
from meshload.checkpoint import Checkpoint
from meshload.pieces import piece, table
from meshload.planning import Plan, Target, plan_array
from meshload.reading import buffer_for, buffers_for, fragments, read, read_array, values_of
from meshload.scheduling import REQUEST, merged
from meshload.source import PROBES, START, ChunkedArray, KeyValueFile, KeyValueFolder, LocalFile, open_folder, plain_runs
from meshload.testing import (
    Counted,
    InMemory,
    Log,
    counted,
    llama_shapes,
    ramp,
    read_safetensors,
    same_bits,
    write_checkpoint,
    write_safetensors,
)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

F4 = np.dtype("f4")
MiB = 1 << 20

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
}


def llama(config: Mapping[str, Any] = CONFIG, dtype: Any = np.float32) -> dict[str, Any]:
    """Return a Llama's arrays, in the order in which files have them: by name."""
    shapes = llama_shapes(config)
    return {name: ramp(name, shapes[name], dtype) for name in sorted(shapes)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), llama(), CONFIG, shards=3)


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [meshload.scheduling.PART, 7])
@pytest.mark.parametrize("gap", [0, None, 100, 1 << 20])
@pytest.mark.parametrize(("mesh", "rank"), [("tp=1", 0), ("tp=2", 1), ("pp=2,tp=2", 2), ("tp=4", 3)])
def test_the_plans_counts_are_what_the_sources_see(
    folder: Path, mesh: str, rank: int, gap: int | None, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshload.scheduling, "PART", part)
    checkpoint, log = counted(meshload.open(folder))
    made = meshload.plan(checkpoint, mesh=mesh, rank=rank, merge_gap=gap)
    assert log.reads == []
    meshload.restore(checkpoint, mesh=mesh, rank=rank, into="numpy", merge_gap=gap)
    assert sorted(log.reads) == sorted(fragments(made))
    assert (len(log.reads), log.nbytes) == (made.reads, made.read_bytes)
    if gap == 0:
        assert log.nbytes == made.wanted_bytes
        asked = sorted((name, start, start + n) for name, start, n in log.reads)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(asked)), "bytes are asked for twice"


@contextmanager
def in_parts(data: st.DataObject) -> Iterator[None]:
    """Let schedules be made in parts of few runs, or of many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshload.scheduling, "PART", data.draw(st.sampled_from([1, 5, meshload.scheduling.PART])))
        yield


def spoilt(made: Plan) -> dict[int, Any]:
    """Return memory for the targets of a plan that holds nothing right yet, as memory that is given out again may."""
    buffers = buffers_for(made)
    for buffer in buffers.values():
        buffer[:] = 0xA5
    return buffers


def test_interleaved_arrays_are_read_once_in_parts_of_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshload.scheduling, "PART", 8)
    values = ramp("w", (64, 3, 16))
    source = Counted(InMemory("f", values.tobytes()), Log())
    array = Array("w", F4, values.shape, piece(source, 0, values.shape, 4))
    thirds = concatenate([array[:, n] for n in range(3)])  # three copies, each of 64 rows that lie between those of the others
    made = plan_array(thirds, merge_gap=0)
    assert len(list(made.schedule.parts())) == 8
    assert np.array_equal(read_array(thirds), np.concatenate([values[:, n] for n in range(3)]))
    assert source.log.nbytes == values.nbytes == made.read_bytes


@settings(max_examples=60)
@given(st.data())
def test_without_a_gap_exactly_the_wanted_bytes_are_read(data: st.DataObject) -> None:
    values = ramp("w", data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))))
    log = Log()
    source = Counted(InMemory("f", b"head" + values.tobytes()), log)
    array = Array("w", F4, values.shape, piece(source, 4, values.shape, 4))
    box = []
    for n in values.shape:
        start = data.draw(st.integers(0, n))
        box.append(slice(start, data.draw(st.integers(start, n))))
    order = data.draw(st.permutations(range(3)))
    made = plan_array(array[tuple(box)].transpose(*order), merge_gap=0, max_bytes=data.draw(st.sampled_from([1 << 10, 256 << 20])))
    buffers = spoilt(made)
    with in_parts(data):
        read(made, buffers)
    assert same_bits(values_of(buffers[0], made.targets[0]), values[tuple(box)].transpose(order))
    assert sorted(log.reads) == sorted(fragments(made))
    assert log.nbytes == made.read_bytes == made.wanted_bytes


@settings(max_examples=60)
@given(st.data())
def test_whatever_gap_and_ceiling_the_bits_are_the_same(data: st.DataObject) -> None:
    values = ramp("w", (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))))
    log = Log()
    array = Array("w", F4, values.shape, piece(Counted(InMemory("f", values.tobytes()), log), 0, values.shape, 4))
    columns = slice(data.draw(st.integers(0, values.shape[1] - 1)), None)
    gap, ceiling = data.draw(st.sampled_from([0, 8, 64, 5000])), data.draw(st.sampled_from([64, 600, 1 << 12, 1 << 28]))
    made = plan_array(array[:, columns].T, merge_gap=gap, max_bytes=ceiling)
    buffers = spoilt(made)
    with in_parts(data):
        read(made, buffers)
    assert same_bits(values_of(buffers[0], made.targets[0]), values[:, columns].T)
    assert (len(log.reads), log.nbytes) == (made.reads, made.read_bytes)
    assert made.peak_bytes <= ceiling


@settings(max_examples=60)
@given(st.data())
def test_any_strides_are_read_overlapping_ones_too(data: st.DataObject) -> None:
    """Sliding windows, what is expanded, and what runs backwards, in targets of any order."""
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 5)))
    strides = tuple(2 * data.draw(st.integers(-60, 60)) for _ in shape)
    stored = ramp("w", (5000,), np.uint16)
    values = np.ndarray(shape, stored.dtype, stored, 5000, strides)
    source = InMemory("f", stored.tobytes(), gap=data.draw(st.sampled_from([0, 8, 4096])))
    array = Array("w", stored.dtype, shape, piece(source, 5000, shape, 2, strides=strides))
    order = data.draw(st.permutations(range(3)))
    made = plan_array(array.transpose(*order), max_bytes=data.draw(st.sampled_from([64, 600, 1 << 12, 1 << 28])))
    buffers = spoilt(made)
    with in_parts(data):
        read(made, buffers)
    assert same_bits(values_of(buffers[0], made.targets[0]), np.ascontiguousarray(values.transpose(order)))


def test_neighbours_within_the_gap_share_a_read() -> None:
    values = ramp("w", (64, 16))
    array = Array("w", F4, (64, 16), piece(InMemory("f", values.tobytes()), 0, (64, 16), 4))
    assert plan_array(array[:, :8], merge_gap=0).reads == 64
    assert plan_array(array[:, :8], merge_gap=31).reads == 64
    one = plan_array(array[:, :8], merge_gap=32)
    assert (one.reads, one.read_bytes, one.wanted_bytes) == (1, 63 * 64 + 32, 64 * 32)


def chunked(values: Any, chunk: tuple[int, ...], log: Log) -> Array:
    store = tensorstore.open(
        {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": {"compressor": {"id": "zlib"}}},
        create=True,
        dtype="float32",
        shape=values.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
    ).result()
    store[...] = values
    pieces = ChunkedArray(store, "zarr").pieces()
    return Array(
        "w",
        F4,
        values.shape,
        table((Counted(pieces.sources[0], log),), pieces.source, pieces.offset, pieces.start, pieces.shape, pieces.strides),
    )


def test_each_chunk_is_decoded_once_however_many_want_of_it() -> None:
    values, log = ramp("w", (12, 10)), Log()
    array = chunked(values, (4, 5), log)
    made = plan_array(concatenate([array[1:6].T, array[4:9].T], 1))
    buffers = spoilt(made)
    read(made, buffers)
    expected = np.concatenate([values[1:6].T, values[4:9].T], 1)
    assert same_bits(values_of(buffers[0], made.targets[0]), expected)
    assert sorted(log.reads) == [("zarr", k * 80, 80) for k in range(6)]
    assert (made.reads, made.read_bytes) == (6, 480)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_chunks_decoded_in_place_are_those_that_are_decoded_and_cut(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 4))
    shape = tuple(data.draw(st.integers(1, 7)) for _ in range(ndim))
    chunk = [data.draw(st.integers(1, n)) for n in shape]
    values = np.arange(math.prod(shape), dtype=data.draw(st.sampled_from([np.uint8, np.int16, np.float32, np.float64]))).reshape(
        shape
    )
    store = tensorstore.open(
        {"driver": "zarr", "kvstore": "memory://", "metadata": {"chunks": chunk, "compressor": None}},
        create=True,
        dtype=values.dtype,
        shape=shape,
    ).result()
    store.write(values).result()
    array = Array("w", values.dtype, shape, ChunkedArray(store, "w").pieces())
    box = tuple(slice(a := data.draw(st.integers(0, n - 1)), data.draw(st.integers(a + 1, n))) for n in shape)
    order = data.draw(st.permutations(range(ndim)))
    array, expected = array[box].transpose(*order), values[box].transpose(order)
    dim = data.draw(st.integers(0, ndim - 1))
    factors = [(k, array.shape[dim] // k) for k in range(1, array.shape[dim] + 1) if array.shape[dim] % k == 0]
    outer, inner = data.draw(st.sampled_from(factors))
    array = array.split(dim, (outer, inner))
    expected = expected.reshape(*expected.shape[:dim], outer, inner, *expected.shape[dim + 1 :])
    swap = data.draw(st.permutations(range(ndim + 1)))
    array, expected = array.transpose(*swap), expected.transpose(swap)
    found = np.asarray(array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshload.reading._Work, "_whole", lambda self, chunk, source: None)
        plain = np.asarray(array)
    assert same_bits(found, expected)
    assert same_bits(plain, expected)


def test_a_chunk_that_is_missing_raises_and_is_not_zeros() -> None:
    store = tensorstore.open(
        {"driver": "zarr", "kvstore": {"driver": "memory"}, "fill_missing_data_reads": False},
        create=True,
        dtype="float32",
        shape=(4,),
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=(2,)),
    ).result()
    store[:2] = 1
    array = Array("w", F4, (4,), ChunkedArray(store, "w.zarr").pieces())
    assert np.asarray(array[:2]).tolist() == [1, 1]
    with pytest.raises(meshload.SourceError, match=r"w.zarr: chunk 1 cannot be read"):
        np.asarray(array)


# --- order and size of reads, B78 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 64 MiB in one file, and no config."""
    place = tmp_path_factory.mktemp("large")
    arrays = {f"w{i}": (np.arange(2 * MiB, dtype=np.uint32) + i * 7).astype(np.uint32).reshape(2048, 1024) for i in range(8)}
    write_safetensors(place / "model.safetensors", arrays)
    return place


def test_b78_contiguous_slices_are_read_in_large_sequential_reads(large: Path) -> None:
    checkpoint, log = counted(meshload.open(large))
    found = meshload.restore(checkpoint, mesh="tp=2", rank=1, layout={"*": ("tp",)}, into="numpy")
    expected = read_safetensors(large / "model.safetensors")
    assert all(same_bits(found[name], expected[name][1024:]) for name in expected)
    assert log.nbytes == 32 * MiB
    assert log.nbytes / len(log.reads) >= MiB
    made = meshload.plan(checkpoint, mesh="tp=2", rank=1, layout={"*": ("tp",)})
    starts = [start for _, start, _ in fragments(made)]
    assert starts == sorted(starts)


def test_b78_strided_slices_are_read_in_large_reads_too(large: Path) -> None:
    checkpoint, log = counted(meshload.open(large))
    found = meshload.restore(checkpoint, mesh="tp=2", rank=1, layout={"*": (None, "tp")}, into="numpy")
    expected = read_safetensors(large / "model.safetensors")
    assert all(same_bits(found[name], expected[name][:, 512:]) for name in expected)
    assert log.nbytes / len(log.reads) >= MiB
    assert log.nbytes <= 64 * MiB


def test_b78_files_are_read_and_not_mapped(large: Path) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("there is no /proc/self/maps here")
    seen = []
    meshload.restore(large, into="numpy", progress=lambda done, total: seen.append(Path("/proc/self/maps").read_text()))
    assert seen
    assert not any(str(large) in text for text in seen)


def test_several_files_are_read_in_turns(folder: Path) -> None:
    made = meshload.plan(folder, merge_gap=0)
    per_file: dict[str, list[int]] = {}
    for name, start, _ in fragments(made):
        per_file.setdefault(name, []).append(start)
    assert len(per_file) == 3
    assert all(starts == sorted(starts) for starts in per_file.values())
    assert len({name for name, _, _ in list(fragments(made))[:3]}) == 3


def test_a_long_run_is_read_in_requests_of_bounded_size() -> None:
    log, size = Log(), 2 * REQUEST + 4
    data = InMemory("f", bytes(size))
    made = plan_array(Array("w", np.dtype("u1"), (size,), piece(Counted(data, log), 0, (size,), 1)))
    read(made, buffers_for(made))
    assert sorted(log.reads) == [("f", 0, REQUEST), ("f", REQUEST, REQUEST), ("f", 2 * REQUEST, 4)]
    assert made.reads == 3


def test_a_run_within_a_long_one_is_read_where_it_lies() -> None:
    """As of torch's views: the long one is cut into requests, of which the last is short enough to share a range."""
    data = np.random.default_rng(0).integers(0, 256, REQUEST + 9000, np.uint8)
    source = InMemory("f", data.tobytes(), gap=4096)
    places = [(0, 1000), (100, 200), (1000, REQUEST + 5000), (REQUEST + 500, 100)]
    arrays = [Array("w", data.dtype, (n,), piece(source, at, (n,), 1)) for at, n in places]
    assert same_bits(read_array(concatenate(arrays)), np.concatenate([data[at : at + n] for at, n in places]))


def test_a_run_that_is_cut_may_lie_within_another() -> None:
    values = ramp("w", (20, 10), np.uint16)
    array = Array("w", values.dtype, values.shape, piece(InMemory("f", values.tobytes()), 0, values.shape, 2))
    found = read_array(concatenate([array.T, array[5:7].T], 1))
    assert same_bits(found, np.concatenate([values.T, values[5:7].T], 1))


class _Into(InMemory):
    """Notes where the bytes are asked into."""

    def read_into(self, start: int, out: Any) -> None:
        self.at = [*getattr(self, "at", []), (out.ctypes.data, len(out))]
        super().read_into(start, out)


def test_contiguous_slices_go_straight_into_the_final_buffer() -> None:
    values = ramp("w", (512, 1024))
    source = _Into("f", values.tobytes())
    made = plan_array(Array("w", F4, values.shape, piece(source, 0, values.shape, 4))[128:256])
    buffers = buffers_for(made)
    read(made, buffers)
    assert source.at == [(buffers[0].ctypes.data, buffers[0].nbytes)]
    [part] = made.schedule.parts()
    assert (len(part.straight), len(part.staged), made.peak_bytes) == (1, 0, 0)
    assert buffers[0].ctypes.data % 64 == 0


def test_columns_are_cut_out_of_staging_memory() -> None:
    values = ramp("w", (512, 64))
    source = _Into("f", values.tobytes(), gap=4096)
    made = plan_array(Array("w", F4, values.shape, piece(source, 0, values.shape, 4))[:, 3:9])
    buffers = buffers_for(made)
    read(made, buffers)
    assert [len(part.straight) for part in made.schedule.parts()] == [0]
    assert made.peak_bytes > 0
    assert all(not buffers[0].ctypes.data <= at < buffers[0].ctypes.data + buffers[0].nbytes for at, _ in source.at)


# --- failures ---------------------------------------------------------------------------------------------------------


def shortened(monkeypatch: pytest.MonkeyPatch, *, fails: int = 0) -> list[int]:
    """Make each read give a third of what is asked at most, or fail with an error number; return the offsets that are asked."""
    plain, asked = os.preadv, []

    def short(descriptor: int, views: list[memoryview], at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "is it in memory?")
        asked.append(at)
        if fails:
            raise OSError(fails, os.strerror(fails))
        return plain(descriptor, [views[0][: max(1, len(views[0]) // 3)]], at)

    monkeypatch.setattr(meshload.source.os, "preadv", short)
    monkeypatch.setattr(meshload.kernel, "_queue", lambda: None)
    return asked


def test_short_reads_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = meshload.restore(folder, mesh="tp=2", rank=1, into="numpy")
    asked = shortened(monkeypatch)
    found = meshload.restore(folder, mesh="tp=2", rank=1, into="numpy")
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert len(asked) > meshload.plan(folder, mesh="tp=2", rank=1).reads


def test_a_read_error_names_file_and_range(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = meshload.open(folder)
    shortened(monkeypatch, fails=errno.EIO)
    with pytest.raises(
        meshload.SourceError, match=r"model-0000\d-of-00003.safetensors: reading \d+ bytes at \d+ failed: Input/output"
    ):
        meshload.restore(checkpoint, into="numpy")


def cut(file: Path, size: int) -> None:
    """Cut a file, as between the look at when it was changed and the read."""
    changed = file.stat().st_mtime_ns
    os.truncate(file, size)
    os.utime(file, ns=(changed, changed))


def test_a_file_that_is_cut_while_being_read_names_file_and_range(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (1024, 64))})
    file = tmp_path / "model.safetensors"
    checkpoint = meshload.open(tmp_path)
    cut(file, 5000)
    with pytest.raises(
        meshload.SourceError, match=r"model.safetensors: ends at byte 5000, expected \d+; it was cut while being read"
    ):
        np.asarray(checkpoint["w"])


@pytest.mark.parametrize("way", ["queued", "one by one"])
def test_rows_of_a_file_that_is_cut_while_being_read_name_file_and_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (1024, 1024))})
    checkpoint = meshload.open(tmp_path)
    cut(tmp_path / "model.safetensors", 3 << 20)
    if way != "queued":
        monkeypatch.setattr(meshload.kernel, "_queue", lambda: None)
    with pytest.raises(
        meshload.SourceError, match=r"model.safetensors: ends at byte \d+, expected \d+; it was cut while being read"
    ):
        np.asarray(checkpoint["w"][:, :256])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (4,))})
    checkpoint = meshload.open(tmp_path)
    array = checkpoint["w"]
    source = meshload.source.LocalFile(tmp_path / "gone", "gone", 100)
    moved = Array("w", F4, (4,), piece(source, 0, (4,), 4))
    with pytest.raises(meshload.SourceError, match="gone: cannot be opened: No such file"):
        np.asarray(moved)
    assert array.shape == (4,)


# --- many short runs at once ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalFile, bytes]:
    """Return a file of 3 MiB whose every word tells its place, and its bytes."""
    file = tmp_path_factory.mktemp("rows") / "rows"
    data = np.arange(3 * MiB // 4, dtype=np.uint32).tobytes()
    file.write_bytes(data)
    return LocalFile(file, "rows", len(data)), data


@pytest.mark.parametrize("way", ["queued", "from the disk", "one by one"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_are_those_that_are_read_one_by_one(
    rows: tuple[LocalFile, bytes], monkeypatch: pytest.MonkeyPatch, way: str, data: st.DataObject
) -> None:
    if way == "from the disk":
        on_disk(monkeypatch, from_byte=MiB)
    if way == "one by one":
        monkeypatch.setattr(meshload.kernel, "_queue", lambda: None)
    file, content = rows
    count = data.draw(st.integers(1, 1300))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    skips = rng.choice([0, 0, 1, 7, 1500, 4096, 4097, 33_000], count, p=data.draw(st.sampled_from([SPREAD, DENSE])))
    lengths = rng.integers(1, 700, count)
    starts = np.cumsum(skips + lengths) - lengths
    keep = starts + lengths <= len(content)
    starts, lengths = starts[keep], lengths[keep]
    which = rng.integers(0, 3, len(starts))
    offsets = np.asarray([lengths[:i][which[:i] == t].sum() for i, t in enumerate(which)], np.int64)
    runs = np.stack([np.zeros_like(starts), starts, lengths, which, offsets], axis=1)
    ranges = merged(runs, np.full(len(runs), 4096), MiB)
    sizes = {t: int(lengths[which == t].sum()) for t in range(3)}
    found, plain = ({t: np.zeros(n, np.uint8) for t, n in sizes.items()} for _ in range(2))
    file.read_runs(ranges, runs, found)
    plain_runs(file, ranges, runs, plain)
    for t in range(3):
        expected = b"".join(content[a : a + n] for a, n in zip(starts[which == t], lengths[which == t], strict=True))
        assert found[t].tobytes() == plain[t].tobytes() == expected


SPREAD = (0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.1, 0.1)
DENSE = (0.4, 0.4, 0.1, 0.1, 0, 0, 0, 0)


def test_runs_in_memory_are_read_by_a_queue_and_the_others_are_told(rows: tuple[LocalFile, bytes]) -> None:
    file, content = rows
    out = np.zeros(3000, np.uint8)
    start = np.asarray([100, 5000, len(content) - 10, 0])  # the third goes beyond the end
    length = np.asarray([1000, 500, 20, 8])
    to = out.ctypes.data + np.asarray([0, 1000, 1500, 2000])
    descriptor = os.open(file.path, os.O_RDONLY)
    done = meshload.kernel.read_queued(descriptor, start, length, to, cached=True)
    os.close(descriptor)
    if not done.any():
        pytest.skip("the kernel has no such queue")
    assert done.tolist() == [True, True, False, True]
    assert out[:1500].tobytes() == content[100:1100] + content[5000:5500]
    assert out[2000:2008].tobytes() == content[:8]


def test_queues_are_used_again_and_not_by_a_forked_child(rows: tuple[LocalFile, bytes]) -> None:
    file, content = rows
    runs = np.stack([np.zeros(4, int), np.arange(4) * 5000, np.full(4, 100), np.zeros(4, int), np.arange(4) * 100], axis=1)
    ranges = merged(runs, np.full(4, 4096), MiB)
    expected = b"".join(content[a : a + 100] for a in range(0, 20_000, 5000))
    for _ in range(3):
        out = np.zeros(400, np.uint8)
        file.read_runs(ranges, runs, {0: out})
        assert out.tobytes() == expected
    assert len(meshload.kernel._queues) <= meshload.scheduling.THREADS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that others have left
        child = os.fork()
    if child == 0:
        out = np.zeros(400, np.uint8)
        file.read_runs(ranges, runs, {0: out})
        os._exit(0 if out.tobytes() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def on_disk(monkeypatch: pytest.MonkeyPatch, *, from_byte: int) -> list[tuple[int, int]]:
    """Make bytes from some offset on seem not to be in memory; return what is asked of the disk, `(start, length)`."""
    queued, asked = meshload.kernel.read_queued, []

    def told(file: int, start: Any, length: Any, to: Any, *, cached: bool) -> Any:
        done = np.zeros(len(start), bool)
        some = start + length <= from_byte if cached else np.ones(len(start), bool)
        done[some] = queued(file, start[some], length[some], to[some], cached=cached)
        return done

    monkeypatch.setattr(meshload.source, "read_queued", told)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, length, advice: asked.append((start, length)))
    return asked


@pytest.mark.parametrize("from_byte", [0, 1 << 20, 1 << 40])
def test_of_rows_that_are_not_in_memory_the_disk_is_asked_for_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_byte: int
) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (600, 4096))})
    array = meshload.open(tmp_path)["w"][:, 1024:2048]
    asked = on_disk(monkeypatch, from_byte=from_byte)
    assert same_bits(np.asarray(array), ramp("w", (600, 4096))[:, 1024:2048])
    assert {n for _, n in asked} <= {4096}
    assert len(asked) == len({at for at, _ in asked})
    assert abs(len(asked) - (600 - min(from_byte >> 14, 600))) <= 1


@pytest.mark.parametrize(("to", "size"), [(5, 104), (-1, 200)])
def test_scattered_runs_stay_inside_their_buffers(rows: tuple[LocalFile, bytes], to: int, size: int) -> None:
    file, _ = rows
    runs = np.asarray([[0, 0, 10, 0, 0], [0, 20, 100, 0, to]])
    with pytest.raises(ValueError, match="rows: runs leave their buffers"):
        file.read_runs(merged(runs, np.zeros(2, int), MiB), runs, {0: np.zeros(size, np.uint8)})
    frozen = np.zeros(200, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"writeable|read-only"):
        file.read_runs(merged(runs, np.zeros(2, int), MiB), np.abs(runs), {0: frozen})


def test_a_file_stays_open_while_its_rows_are_read(rows: tuple[LocalFile, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    file, content = rows
    monkeypatch.setattr(meshload.source, "_descriptor", meshload.source._descriptor.__wrapped__)  # others had it closed at once
    monkeypatch.setattr(meshload.source, "plain_runs", None)
    on_disk(monkeypatch, from_byte=MiB)
    count = len(content) // 5000
    runs = np.stack(
        [np.zeros(count, int), np.arange(count) * 5000, np.full(count, 100), np.zeros(count, int), np.arange(count) * 100], 1
    )
    out = np.zeros(count * 100, np.uint8)
    file.read_runs(merged(runs, np.full(count, 4096), MiB), runs, {0: out})
    assert out.tobytes() == b"".join(content[a : a + 100] for a in range(0, count * 5000, 5000))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
@pytest.mark.parametrize("call", ["open", "plan", "restore", "check", "verify", "digest", "convert", "index"])
def test_files_are_closed_in_the_end(tmp_path: Path, call: str) -> None:
    folder = write_checkpoint(tmp_path / "hf", {f"w{i}": ramp(f"w{i}", (8, 8)) for i in range(6)}, shards=6)
    more: dict[str, Any] = {"restore": {"into": "numpy"}, "convert": {"to": "hf"}}
    others = {"verify": [folder], "convert": [tmp_path / "out"], "index": [tmp_path / "index"]}
    getattr(meshload, call)(folder, *others.get(call, []), **more.get(call, {}))
    assert opened(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
def test_files_are_closed_after_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read fails while others have not opened their files yet."""
    folder = write_checkpoint(tmp_path, {f"w{i}": ramp(f"w{i}", (300, 300)) for i in range(6)}, shards=6)
    checkpoint, read_into = meshload.open(folder), LocalFile.read_into

    def failing(self: LocalFile, start: int, out: Any) -> None:
        if "00001" in self.name:
            raise meshload.SourceError("the cable was pulled")
        threading.Event().wait(0.2)
        read_into(self, start, out)

    monkeypatch.setattr(LocalFile, "expect", lambda *_: None)
    monkeypatch.setattr(LocalFile, "read_into", failing)
    with pytest.raises(meshload.SourceError, match="the cable was pulled"):
        meshload.restore(checkpoint, into="numpy", layout="replicated")
    assert opened(tmp_path) == []


def opened(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    links = (os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    return [link for link in links if link.startswith(str(folder))]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "posix_fadvise"), reason="needs Linux's calls")
@pytest.mark.parametrize("is_cached", [True, False])
def test_the_disk_is_asked_for_whole_requests_that_are_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    values = ramp("w", (3 * REQUEST // 4 + 1000,))
    write_checkpoint(tmp_path, {"w": values})
    array = meshload.open(tmp_path)["w"]
    plain, asked = os.preadv, []

    def cold(descriptor: int, views: list[Any], at: int, flags: int = 0) -> int:
        if flags and not is_cached:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return plain(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", cold)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, length, advice: asked.append(length))
    assert same_bits(np.asarray(array), values)
    assert sorted(asked) == ([] if is_cached else [4000, REQUEST, REQUEST, REQUEST])


@pytest.mark.parametrize("columns", [4096, 1024])
def test_a_disk_that_takes_no_advice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (600, 4096))})
    array = meshload.open(tmp_path)["w"][:, :columns]
    on_disk(monkeypatch, from_byte=0)
    plain = os.preadv

    def cold(descriptor: int, views: list[Any], at: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return plain(descriptor, views, at)

    def refuse(*_: int) -> None:
        asked.append(1)
        raise OSError(errno.ENOSYS, "no advice")

    asked: list[int] = []
    monkeypatch.setattr(os, "preadv", cold)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert same_bits(np.asarray(array), ramp("w", (600, 4096))[:, :columns])
    assert asked


@pytest.mark.parametrize("begun", [-1, 0, 7])
def test_rows_that_the_queue_did_not_take_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (600, 4096))})
    array, call = meshload.open(tmp_path)["w"][:, :1024], meshload.kernel._syscall
    submit = (meshload.kernel._NUMBERS or (0, 0, 0))[2]

    def few(number: int, context: int, count: int, *rest: int) -> int:
        if number != submit:
            return int(call(number, context, count, *rest))
        return int(call(number, context, begun, *rest)) if begun > 0 else begun

    monkeypatch.setattr(meshload.kernel, "_syscall", few)
    assert same_bits(np.asarray(array), ramp("w", (600, 4096))[:, :1024])


# --- the first failure ------------------------------------------------------------------------------------------------


class _Failing(Counted):
    """The first read fails at once, the others take their time."""

    def read_into(self, start: int, out: Any) -> None:
        super().read_into(start, out)
        if start == 0:
            raise meshload.SourceError("f: byte 0 is broken")
        threading.Event().wait(0.2)


RUN = 300 << 10
"""Long enough that no two share a batch."""


def many(source: Any, n: int = 400) -> Plan:
    """Plan `n` reads, of overlapping bytes."""
    at = np.arange(n)[:, None] * RUN
    pieces = table((source,), np.zeros(n, int), np.arange(n) * 8, at, np.full((n, 1), RUN), np.ones((n, 1), int))
    return plan_array(Array("w", np.dtype("u1"), (n * RUN,), pieces), merge_gap=0)


def test_the_first_failure_stops_the_rest() -> None:
    source = _Failing(InMemory("f", bytes(2 * RUN)))
    made = many(source)
    assert made.reads == 400
    with pytest.raises(meshload.SourceError, match="f: byte 0 is broken"):
        read(made, buffers_for(made))
    assert len(source.log.reads) <= 2 * made.schedule.threads  # those that had begun, of 32 that waited
    assert not [t for t in threading.enumerate() if t.name.startswith("meshload")]


def test_a_caller_that_raises_in_progress_stops_the_rest() -> None:
    source = Counted(InMemory("f", bytes(2 * RUN)))
    made = many(source)

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(made, buffers_for(made), progress=stop)
    assert len(source.log.reads) < 200
    assert not [t for t in threading.enumerate() if t.name.startswith("meshload")]


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_adds_up_to_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    meshload.restore(folder, mesh="tp=2", rank=0, into="numpy", progress=lambda *now: seen.append(now))
    total = meshload.plan(folder, mesh="tp=2", rank=0).read_bytes
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- memory -----------------------------------------------------------------------------------------------------------


def sparse(file: Path, arrays: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a safetensors file of float32 zeros that takes no room on the disk."""
    empty = {name: np.zeros((0,), np.float32) for name in arrays}
    write_safetensors(file, empty)
    at, header = 0, {}
    for name, shape in arrays.items():
        n = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
    return file


GROWTH = """
import sys, threading
import psutil
import meshload

path, mesh, rank, axis, ceiling = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
layout = {"*": ("tp",) if axis == 0 else (None, "tp")}
me = psutil.Process()
small = meshload.restore(path, mesh=mesh, rank=rank, layout=layout, into="numpy", include="tiny")
before, peak, done = me.memory_info().rss, 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, me.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
found = meshload.restore(path, mesh=mesh, rank=rank, layout=layout, into="numpy", max_bytes=ceiling or None)
peak = max(peak, me.memory_info().rss)
done.set()
watcher.join()
made = meshload.plan(path, mesh=mesh, rank=rank, layout=layout, max_bytes=ceiling or None)
assert made.peak_bytes <= made.max_bytes
print(peak - before, sum(a.nbytes for a in found.values()), sum(len(p.cuts) + len(p.straight) for p in made.schedule.parts()))
"""

SLACK = 12 * MiB
"""The interpreter, threads' stacks and malloc's own keeping; measured below 5 MiB."""

METADATA = 8 * MiB
"""Of the parts that are being read; the columns of all 65,536 runs would be four times as many."""


@pytest.mark.parametrize(("axis", "ceiling"), [(0, 0), (1, 0), (1, 16 * MiB), (1, 2 * MiB), (0, 2 * MiB)])
def test_memory_beside_the_slices_stays_under_the_ceiling(
    run_python: Callable[..., str], tmp_path: Path, axis: int, ceiling: int
) -> None:
    pytest.importorskip("psutil")
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": (4096, 2048) for i in range(16)}
    sparse(tmp_path / "model.safetensors", {"tiny": (4, 4), **shapes})
    growth, slices, _ = map(int, run_python(GROWTH, tmp_path, "tp=4", 3, axis, ceiling).split())
    assert slices == 128 * MiB + 16
    assert growth <= slices + (ceiling or 256 * MiB) + METADATA + SLACK


def test_b77_each_of_4_processes_grows_by_its_slices_alone(run_python: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": (4096, 1024) for i in range(16)}
    sparse(tmp_path / "model.safetensors", {"tiny": (4, 4), **shapes})
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run_python, GROWTH, tmp_path, "tp=4", rank, 0, 16 * MiB) for rank in range(4)]
    for run in runs:
        growth, slices, _ = map(int, run.result().split())
        assert slices == 64 * MiB + 16
        assert growth <= slices + 16 * MiB + SLACK


@pytest.mark.parametrize("filled", [1 << 20, (1 << 20) - 3])
@pytest.mark.parametrize("itemsize", [1, 4, 8])
def test_new_memory_is_aligned_writeable_and_zero_where_it_is_padded(filled: int, itemsize: int) -> None:
    dtype = np.dtype(f"u{itemsize}")
    target = Target("w", (0,), dtype, (1 << 20,), (1 << 20,), None, filled)
    buffer = buffer_for(target)
    assert (buffer.nbytes, buffer.ctypes.data % 64, buffer.flags.writeable) == (itemsize << 20, 0, True)
    if filled < target.size:
        assert not buffer.any()


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1024)])
@pytest.mark.parametrize("way", ["fast", "slow", "unknown"])
def test_however_the_kernel_gives_pages_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, columns: slice
) -> None:
    write_checkpoint(tmp_path, {"w": ramp("w", (1024, 2048))})
    advised, advise = [], meshload.kernel._madvise

    def noted(address: int, size: int, advice: int) -> int:
        advised.append(advice)
        return 0 if advise is None else int(advise(address, size, advice))

    monkeypatch.setattr(meshload.kernel, "_madvise", None if way == "unknown" else noted)
    monkeypatch.setattr(meshload.kernel, "SLOW", {"slow": 0}.get(way, 1 << 60))
    assert same_bits(np.asarray(meshload.open(tmp_path)["w"][:, columns]), ramp("w", (1024, 2048))[:, columns])
    if way != "unknown" and hasattr(mmap, "MADV_NOHUGEPAGE"):
        assert advised.count(mmap.MADV_HUGEPAGE) == 1
        assert advised.count(mmap.MADV_NOHUGEPAGE) == (way == "slow")


def test_a_shape_that_no_memory_holds_is_refused_by_name() -> None:
    with pytest.raises(meshload.LimitError, match=r"w: \(1152921504606846976,\) of float32, \d+ bytes, find no memory"):
        buffer_for(Target("w", (0,), F4, (1 << 60,), (1 << 60,), None, 1 << 60))


def test_a_chunk_above_the_ceiling_is_refused_before_reading() -> None:
    log = Log()
    made = plan_array(chunked(ramp("w", (64, 64)), (32, 64), log), max_bytes=20_000)
    with pytest.raises(
        meshload.LimitError, match=r"zarr: one unit of it takes 24576 bytes at once, max_bytes is 20000; allow at least"
    ):
        read(made, buffers_for(made))
    assert log.reads == []
    enough = plan_array(chunked(ramp("w", (64, 64)), (32, 64), log), max_bytes=24576)
    read(enough, buffers_for(enough))
    assert enough.peak_bytes <= 24576


def test_chunks_that_come_over_a_network_are_asked_for_by_many_threads() -> None:
    store = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, create=True, dtype=np.float32, shape=(64, 64)).result()
    far, near = (
        plan_array(Array("w", F4, (64, 64), ChunkedArray(store, "w", is_far).pieces())).schedule.threads for is_far in (True, False)
    )
    assert far == meshload.scheduling.NETWORK_THREADS
    assert near == meshload.scheduling.THREADS


def test_fewer_threads_hold_large_chunks_under_a_low_ceiling() -> None:
    array = chunked(ramp("w", (64, 64)), (8, 64), Log())
    assert plan_array(array, max_bytes=1 << 28).schedule.threads == meshload.scheduling.THREADS
    made = plan_array(array, max_bytes=2 * 3 * 8 * 64 * 4)
    assert made.peak_bytes <= made.max_bytes


# --- other stores -----------------------------------------------------------------------------------------------------


def same_as_local(path: Any, folder: Path) -> None:
    for rank in range(4):
        found = meshload.restore(path, mesh="pp=2,tp=2", rank=rank, into="numpy")
        local = meshload.restore(folder, mesh="pp=2,tp=2", rank=rank, into="numpy")
        assert set(found) == set(local)
        assert all(same_bits(found[name], local[name]) for name in local)


def test_a_memory_store_is_read(folder: Path) -> None:
    store = tensorstore.KvStore.open("memory://").result()
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes()).result()
    same_as_local(store, folder)


def test_a_folder_in_a_memory_store_is_read(folder: Path) -> None:
    store = tensorstore.KvStore.open("memory://models/llama/").result()
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes()).result()
    same_as_local(store, folder)


def test_a_file_url_is_read(folder: Path) -> None:
    same_as_local(f"file://{folder}", folder)


class _Ranges(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder by ranges, and notes what is asked."""

    root: Path
    asked: list[tuple[str, int, int]]
    refused = 0
    fail = 0

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        kind = type(self)
        if kind.refused < kind.fail:
            kind.refused += 1
            self.send_response(503)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        file = self.root / self.path.lstrip("/")
        if not file.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = file.read_bytes()
        start, stop, status = 0, len(data), 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match:
            start, stop, status = int(match[1]), min(int(match[2] or len(data) - 1) + 1, len(data)), 206
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        kind.asked.append((file.name, start, stop - start))
        self.send_response(status)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(data[start:stop])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, type[_Ranges]]]:
    with serving(folder) as found:
        yield found


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, type[_Ranges]]]:
    handler = type("Handler", (_Ranges,), {"root": folder, "asked": []})
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}/", handler
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def test_http_is_read_by_ranges(folder: Path, server: tuple[str, type[_Ranges]]) -> None:
    url, handler = server
    same_as_local(url, folder)
    handler.asked.clear()
    checkpoint = meshload.open(url)
    made = meshload.plan(checkpoint, mesh="tp=2", rank=1, merge_gap=0)
    handler.asked.clear()
    meshload.restore(checkpoint, mesh="tp=2", rank=1, into="numpy", merge_gap=0)
    assert sorted(handler.asked) == sorted(fragments(made))


@pytest.mark.parametrize("size", [0, 1, 2, 4095, START - 1, START, START + 1, 2 * START, 1_000_003, 5_000_000])
def test_a_size_over_http_is_found_in_a_few_rounds(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    with serving(tmp_path) as (url, handler):
        rounds = []
        file = open_folder(url).file("x")
        handler.asked.clear()
        told = type(file)._told
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(file), "_told", lambda self, ranges: (rounds.append(len(ranges)), told(self, ranges))[1])
            assert file.size == size
        assert len(rounds) <= 6
        assert sum(rounds) <= 6 * PROBES
        assert sum(length for _, _, length in handler.asked) <= START + 2 * file.gap


def test_the_size_of_an_object_is_found_whatever_the_store_tells() -> None:
    """Servers tell it where a range reaches over the end; S3 of a range behind it too; a store may tell nothing, or nonsense."""
    for told in (None, "size 99999999999"):
        for size in (0, 1, 5, 70_000, (1 << 40) + 12_345):
            file = KeyValueFile(_Silent(size, told), "x", "x")
            assert file.size == size


class _Silent:
    """A store with one object of a size, whose errors say what they are told to."""

    def __init__(self, size: int, words: str | None) -> None:
        self.size, self.words = size, words

    def read(self, key: str, byte_range: slice) -> Any:
        future: Any = SimpleNamespace(result=lambda: None)
        if byte_range.stop > self.size:
            future.result = self.refuse
        return future

    def refuse(self) -> None:
        raise ValueError(f"OUT_OF_RANGE: {self.words or ''}")


def test_b79_a_remote_folder_is_listed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tensorstore.KvStore.open("memory://").result()
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes()).result()
    listed = []
    names = KeyValueFolder._names
    monkeypatch.setattr(KeyValueFolder, "_names", lambda self, under: (listed.append(self.name + under), names(self, under))[1])
    monkeypatch.setattr(KeyValueFolder, "is_remote", True)
    meshload.open(store)
    assert len(listed) == len(set(listed))
    assert len(listed) > 0


def test_what_comes_from_a_store_is_copied_out_once() -> None:
    copies = []

    class Result:
        state = "value"

        @property
        def value(self) -> bytes:
            copies.append(1)
            return b"abc"

    store = SimpleNamespace(read=lambda key, byte_range: SimpleNamespace(result=Result))
    out = np.empty(3, np.uint8)
    KeyValueFile(store, "x", "x").read_into(0, out)
    assert out.tobytes() == b"abc"
    assert len(copies) == 1


def test_one_file_over_http_is_read(folder: Path, server: tuple[str, type[_Ranges]]) -> None:
    url, _ = server
    name = "model-00001-of-00003.safetensors"
    found = meshload.open(url + name)
    expected = read_safetensors(folder / name)
    assert set(found) == set(expected)
    assert all(same_bits(found[n], expected[n]) for n in expected)


def test_b79_a_busy_server_is_asked_again(folder: Path, server: tuple[str, type[_Ranges]]) -> None:
    url, handler = server
    checkpoint = meshload.open(url)
    handler.refused, handler.fail = 0, 2
    found = meshload.restore(checkpoint, include="model.norm.weight", into="numpy")
    assert handler.refused == 2
    assert same_bits(found["model.norm.weight"], llama()["model.norm.weight"])


def test_b79_a_server_that_stays_busy_is_an_error_and_no_empty_folder(server: tuple[str, type[_Ranges]]) -> None:
    url, handler = server
    tries = {"initial_delay": "1ms", "max_delay": "1ms", "max_retries": 2}
    spec = {"driver": "http", "base_url": url.rstrip("/"), "path": "/", "context": {"http_request_retries": tries}}
    store = tensorstore.KvStore.open(spec).result()
    handler.refused, handler.fail = 0, 1 << 30
    for call in (meshload.open, meshload.check):
        with pytest.raises(meshload.SourceError, match=rf"{url}\S+: cannot be read: .* 503"):
            call(store)
    assert handler.refused < 100


def test_what_is_not_there_over_http_is_an_error(server: tuple[str, type[_Ranges]]) -> None:
    with pytest.raises(meshload.FormatError, match="no installed format"):
        meshload.open(server[0] + "nothing/")


MOTO = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print('port', server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def s3() -> Iterator[str]:
    pytest.importorskip("moto", reason="moto plays S3")
    pytest.importorskip("flask", reason="moto's server needs flask")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = next(line for line in process.stdout if line.startswith("port ")).split()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            process.wait(20)


def test_s3_is_read(folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    put(f"{s3}/models", b"")
    for file in folder.iterdir():
        put(f"{s3}/models/llama/{file.name}", file.read_bytes())
    spec = {
        "driver": "s3",
        "bucket": "models",
        "path": "llama/",
        "endpoint": s3,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }
    store = tensorstore.KvStore.open(spec).result()
    same_as_local(store, folder)


def put(url: str, data: bytes) -> None:
    kind = {"Content-Type": "application/octet-stream"}  # else moto takes it for a form
    urllib.request.urlopen(urllib.request.Request(url, data, kind, method="PUT"), timeout=60).close()


def test_a_url_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(meshload.FormatError, match="nosuch://x/y: TensorStore cannot open it"):
        meshload.open("nosuch://x/y")


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(meshload.FormatError, match="nothing: there is no such file or folder"):
        meshload.open(tmp_path / "nothing")


def test_an_empty_checkpoint_is_read() -> None:
    assert meshload.restore(Checkpoint({}, "memory"), into="numpy") == {}
