"""Streaming to a device: the same bytes as read and moved whole, with a stand-in for CUDA whose copies wait to be waited for.

The stand-in takes copies in a stream's order, and makes them when an event is waited for, no sooner: staging memory that is filled
again too early gives wrong bytes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.array import Array, Step
from meshload.box import row_major
from meshload.pieces import table
from meshload.planning import Plan, plan_array
from meshload.reading import values_of
from meshload.source import LocalFile
from meshload.testing import Counted, InMemory, llama_shapes, ramp, same_bits, write_checkpoint, write_safetensors

pytest.importorskip("torch")
pytest.importorskip("hypothesis")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshload.streaming import Stream, stream
from meshload_adapters import _cuda

GOLDEN = Path(__file__).parent / "golden"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
}


class Streams:
    """CUDA as the stand-in has it: main memory, and copies that wait."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.waiting: list[_Stream] = []
        self.begun: list[str] = []
        self.pinned: list[int] = []
        self.copied = 0

    def new(self, device: Any) -> _Stream:
        self.waiting.append(_Stream(self))
        return self.waiting[-1]

    def current_stream(self, device: Any) -> str:
        return f"what the caller does on {device}"

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.current.stream = stream
        yield
        self.current.stream = None

    def pin(self, nbytes: int) -> np.ndarray[Any, Any]:
        self.pinned.append(nbytes)
        return np.full(nbytes, 0xEE, np.uint8)

    @property
    def left(self) -> int:
        return sum(len(stream.copies) for stream in self.waiting)


class _Stream:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.copies: list[Callable[[], Any]] = []
        self.taken = 0

    def wait_stream(self, other: str) -> None:
        self.streams.begun.append(other)


class _Event:
    def __init__(self) -> None:
        self.at: tuple[_Stream, int] | None = None

    def record(self, stream: _Stream) -> None:
        self.at = stream, stream.taken

    def synchronize(self) -> None:
        if self.at is not None:
            stream, end = self.at
            while stream.copies and stream.taken - len(stream.copies) < end:
                stream.copies.pop(0)()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    names = {"Stream": streams.new, "Event": _Event, "current_stream": streams.current_stream, "stream": streams.stream}
    for name, stand_in in {**names, "is_available": lambda: True}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(_cuda, "pinned", streams.pin)
    monkeypatch.setattr(_cuda, "STREAMED", {"cpu"})
    copy = torch.Tensor.copy_

    def delayed(there: Any, here: Any, non_blocking: bool = False) -> Any:
        stream = getattr(streams.current, "stream", None)
        if stream is None or not non_blocking:
            return copy(there, here)
        stream.taken += 1
        streams.copied += there.nbytes
        stream.copies.append(lambda: copy(there, here))
        return there

    monkeypatch.setattr(torch.Tensor, "copy_", delayed)
    return streams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = {name: ramp(name, shape) for name, shape in llama_shapes(CONFIG).items()}
    return write_checkpoint(tmp_path_factory.mktemp("llama"), arrays, CONFIG, shards=3)


def both(path: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is streamed to the device, and what is read whole."""
    return meshload.restore(path, into="torch", device="cpu", **options), meshload.restore(path, into="torch", **options)


def check_same(streamed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert list(streamed) == list(whole)
    for name, tensor in whole.items():
        other = streamed[name]
        assert (other.dtype, other.shape, other.is_contiguous()) == (tensor.dtype, tensor.shape, True), name
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def nbytes(tensors: dict[str, Any]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors.values()}.values())


# --- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1 << 12, None])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize(("mesh", "rank"), [("tp=1", 0), ("tp=4", 3), ("pp=2,tp=2", 2), ("dp=2,tp=2", 1)])
def test_what_is_streamed_is_what_is_read_whole(
    cuda: Streams, folder: Path, mesh: str, rank: int, dtype: str | None, max_bytes: int | None
) -> None:
    streamed, whole = both(folder, mesh=mesh, rank=rank, dtype=dtype, max_bytes=max_bytes)
    check_same(streamed, whole)
    assert cuda.copied == nbytes(whole)
    assert cuda.left == 0


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("hf/qwen2_tied_single/checkpoint", {"mesh": "tp=2", "rank": 1}),
        ("hf/qwen2_tied_single/checkpoint", {"mesh": "tp=2", "rank": 1, "layout": meshload.Layout.default(pad={"vocab": 256})}),
        ("hf/gpt_neox_fused_qkv/checkpoint", {"mesh": "tp=2", "rank": 1, "names": "gpt_neox"}),
        ("hf/gpt_neox_fused_qkv/checkpoint", {"mesh": "tp=2", "rank": 0, "names": "transformers"}),
        ("megatron/legacy-tp2-pp2-fp32", {"copies": "mean"}),
        ("megatron/legacy-tp2-pp2-fp32", {"copies": "check", "dtype": "bfloat16"}),
        ("orbax/standard_1dev/checkpoint", {"layout": "replicated"}),
    ],
)
def test_golden_checkpoints_are_streamed_alike(cuda: Streams, path: str, options: dict[str, Any]) -> None:
    streamed, whole = both(GOLDEN / path, max_bytes=1 << 20, **options)
    check_same(streamed, whole)
    assert (cuda.copied == 0) == path.startswith("orbax")  # chunks are decoded whole, into main memory


def test_every_dtype_is_streamed_bit_by_bit(cuda: Streams, tmp_path: Path) -> None:
    import ml_dtypes

    kinds = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
    arrays: dict[str, Any] = {kind: (np.arange(231) % 100).reshape(7, 33).astype(kind) for kind in kinds}
    for kind in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        width = np.dtype(getattr(ml_dtypes, kind)).itemsize
        arrays[kind] = np.arange(256**width).astype(f"u{width}").view(getattr(ml_dtypes, kind)).reshape(2, -1)
    write_safetensors(tmp_path / "model.safetensors", arrays)
    check_same(*both(tmp_path, max_bytes=1 << 12))


@pytest.mark.parametrize("to", sorted(_cuda.CAST))
@pytest.mark.parametrize("of", sorted(_cuda.CAST))
def test_torch_casts_as_numpy_does(of: str, to: str) -> None:
    """All of 16 bits, and of 32 those whose low bits make rounding hard; what is NaN stays NaN."""
    import ml_dtypes

    dtypes = [np.dtype(getattr(ml_dtypes, kind, kind)) for kind in (of, to)]
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.asarray([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (high[:, None] | low).reshape(-1) if of == "float32" else np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = bits.view(dtypes[0]).astype(dtypes[1])
    found = torch.from_numpy(bits).view(getattr(torch, of)).to(getattr(torch, to))
    found = found.view(getattr(torch, f"uint{8 * expected.itemsize}")).numpy().view(expected.dtype)
    nan = np.isnan(expected.astype(np.float32))
    assert same_bits(found[~nan], expected[~nan])
    assert np.isnan(found[nan].astype(np.float32)).all()


def test_a_module_is_filled_from_the_device(cuda: Streams, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ramp("weight", (5, 3)), "bias": ramp("bias", (5,))})
    module = meshload.restore(tmp_path, like=torch.nn.Linear(3, 5, device="meta"), device="cpu", dtype="bfloat16")
    assert cuda.copied == 20 * 2
    assert torch.equal(module.weight, torch.from_numpy(ramp("weight", (5, 3))).bfloat16())


def test_dtensors_are_streamed_by_their_mesh(cuda: Streams, folder: Path, pretend: Callable[..., Any]) -> None:
    mesh = pretend(1, (2,), ("tp",))
    streamed = meshload.restore(folder, mesh=mesh, into="dtensor", device="cpu")
    assert cuda.copied > 0
    whole = meshload.restore(folder, mesh=mesh, into="dtensor")
    assert [tensor.placements for tensor in streamed.values()] == [tensor.placements for tensor in whole.values()]
    check_same(*({name: tensor.to_local() for name, tensor in found.items()} for found in (streamed, whole)))


def test_what_is_compared_with_a_digest_is_read_whole(cuda: Streams, folder: Path) -> None:
    digest = meshload.digest(folder)
    check_same(*both(folder, digest=digest))
    assert cuda.copied == 0


class _Memory:
    """A device that takes what it is given, into arrays."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.tensor = "w", np.dtype(dtype), np.zeros(shape, dtype)

    def write(self, start: int, values: Any) -> Callable[[], None]:
        self.tensor.reshape(-1)[start : start + len(values)] = values
        return lambda: None

    def flush(self) -> None:
        pass


class _Staging:
    def memory(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def wait(self) -> None:
        pass


def open_array(data: bytes, dtype: Any, shape: tuple[int, ...], source: Any = None) -> Array:
    strides = [row_major(shape, np.dtype(dtype).itemsize)]
    pieces = table((source or InMemory("f", data),), [0], [0], [[0] * len(shape)], [shape], strides)
    return Array("w", np.dtype(dtype), shape, pieces)


def streamed(plan: Plan, dtype: Any = None) -> Any:
    target = plan.targets[0]
    landing = _Memory(dtype or target.dtype, target.shape)
    stream(plan, {0: landing}, _Staging()).run({})  # type: ignore[arg-type,dict-item]
    return landing.tensor


@settings(max_examples=60)
@given(st.data())
def test_any_array_is_streamed_in_parts_as_numpy_has_it(data: st.DataObject) -> None:
    """Transposed, cut and split arrays, in parts that end anywhere."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    values = ramp("w", shape, np.uint16)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    array, expected = open_array(values.tobytes(), values.dtype, shape).transpose(*order), values.transpose(order)
    cut = tuple(slice(a := data.draw(st.integers(0, n - 1)), data.draw(st.integers(a + 1, n))) for n in expected.shape)
    plan = plan_array(array[cut], max_bytes=data.draw(st.sampled_from([8, 24, 100, 1000])))
    assert same_bits(streamed(plan), np.ascontiguousarray(expected[cut]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_is_rounded_once_to_what_is_wanted(dtype: str) -> None:
    values = (np.arange(300) / 7).astype(np.float16)
    array = open_array(values.tobytes(), values.dtype, values.shape)
    plan = plan_array(replace(array, step=Step("+", 1.0)), max_bytes=100)
    expected = values_of(values.view(np.uint8), plan.targets[0], (), np.dtype(dtype))
    assert same_bits(streamed(plan, dtype), expected)


# --- staging memory ---------------------------------------------------------------------------------------------------


def test_staging_memory_is_allocated_once_and_stays_under_the_ceiling(cuda: Streams, folder: Path) -> None:
    meshload.restore(folder, into="torch", device="cpu", max_bytes=1 << 14)
    assert cuda.pinned in ([1 << 11], [1 << 11] * 2)  # one per thread, an eighth of the ceiling each
    assert cuda.copied > 8 * sum(cuda.pinned)


def test_a_streams_copies_begin_behind_what_the_caller_does(cuda: Streams, folder: Path) -> None:
    meshload.restore(folder, into="torch", device="cpu")
    assert set(cuda.begun) == {"what the caller does on cpu"}
    assert len(cuda.begun) == len(cuda.waiting) == len(cuda.pinned)


def test_a_copy_is_only_begun_and_waited_for_before_its_memory_is_used_again(cuda: Streams) -> None:
    ring = _cuda.Ring(lambda _: "cpu", lambda dtype, _: getattr(torch, dtype.name))
    landed = ring.landing("w", (2, 2), np.dtype("float32"), None, None)  # type: ignore[arg-type]
    assert landed is not None
    memory = ring.memory(16)[:8]
    memory.view("f4")[:] = 1, 2
    landed.write(2, memory.view("f4"))
    assert cuda.left == 1
    assert ring.memory(16)[:8].base is memory.base
    assert cuda.left == 0
    assert landed.tensor[1].tolist() == [1, 2]


def test_what_is_copied_is_kept_until_it_has_arrived(cuda: Streams) -> None:
    ring = _cuda.Ring(lambda _: "cpu", lambda dtype, _: getattr(torch, dtype.name))
    landed = ring.landing("w", (8,), np.dtype("float32"), None, None)  # type: ignore[arg-type]
    assert landed is not None
    values = np.arange(8, dtype=np.float32)
    there = weakref.ref(values)
    landed.write(0, values)
    cuda.waiting[0].copies.clear()  # which hold it, as a device does not
    del values
    assert there() is not None
    ring.wait()
    assert there() is None


def test_a_copy_is_waited_for_even_where_what_follows_it_fails(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = _cuda.Ring(lambda _: "cpu", lambda dtype, _: getattr(torch, dtype.name))
    landed = ring.landing("w", (8,), np.dtype("float32"), None, None)  # type: ignore[arg-type]
    assert landed is not None
    delayed = torch.Tensor.copy_

    def full(there: Any, here: Any, non_blocking: bool = False) -> None:
        delayed(there, here, non_blocking=non_blocking)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "copy_", full)
    with pytest.raises(torch.OutOfMemoryError):
        landed.write(0, np.arange(8, dtype=np.float32))
    assert cuda.left == 1
    ring.wait()
    assert cuda.left == 0


def test_memory_that_is_filled_again_too_early_gives_wrong_bytes(
    cuda: Streams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the stand-in would not see it."""
    monkeypatch.setattr(_cuda._Piece, "wait", lambda self: None)
    broken = meshload.restore(folder, into="torch", device="cpu", max_bytes=1 << 14)
    for one in cuda.waiting:
        for copy in one.copies:
            copy()
    whole = meshload.restore(folder, into="torch")
    assert not all(torch.equal(broken[name], tensor) for name, tensor in whole.items())


def test_main_memory_holds_no_targets(cuda: Streams, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[dict[int, Any]] = []
    run = Stream.run
    monkeypatch.setattr(
        Stream, "run", lambda self, buffers, progress: (held.append(dict(buffers)), run(self, buffers, progress))[1]
    )
    meshload.restore(folder, into="torch", device="cpu")
    assert held == [{}]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_in_the_middle_is_raised_when_no_copy_is_left(
    cuda: Streams, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read_into = itertools.count(), LocalFile.read_into

    def torn(self: LocalFile, start: int, out: Any) -> None:
        if cuda.copied > 4096 and next(count) == 0:
            raise meshload.SourceError(f"{self.name}: the cable was pulled")
        read_into(self, start, out)

    monkeypatch.setattr(LocalFile, "read_into", torn)
    made = meshload.open(folder)
    with pytest.raises(meshload.SourceError, match="the cable was pulled"):
        meshload.restore(made, into="torch", device="cpu", max_bytes=1 << 12)
    assert cuda.copied > 4096
    assert cuda.left == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("meshload")]


def test_a_device_without_room_is_refused_before_reading(cuda: Streams, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*size: Any, device: Any = None, **options: Any) -> Any:
        if device is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*size, **options)

    empty = torch.empty
    made, log = meshload.testing.counted(meshload.open(folder))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(meshload.LimitError, match=r"(?s)97, 32.* no memory on cpu"):
        meshload.restore(made, into="torch", device="cpu")
    assert log.reads == []


def test_progress_adds_up_over_what_is_streamed_and_what_is_not(cuda: Streams, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    meshload.restore(folder, into="torch", device="cpu", max_bytes=1 << 14, progress=lambda *now: seen.append(now))
    assert {total for _, total in seen} == {seen[-1][0]}
    assert seen == sorted(seen)


def test_reads_stay_few_and_in_order(folder: Path) -> None:
    """Parts are read in the order of where they are stored, each byte once."""
    source = Counted(InMemory("f", ramp("w", (512, 64)).tobytes()))
    plan = plan_array(open_array(b"", "f4", (512, 64), source), max_bytes=1 << 16)
    assert same_bits(streamed(plan), ramp("w", (512, 64)))
    assert sum(length for _, length in ((r[-2], r[-1]) for r in source.log.reads)) == 512 * 256
    assert len(source.log.reads) <= 2 * (512 * 256 // (1 << 13))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_on_cuda_itself(folder: Path, dtype: str | None) -> None:
    whole = meshload.restore(folder, into="torch", dtype=dtype)
    streamed = meshload.restore(folder, into="torch", dtype=dtype, device="cuda", max_bytes=1 << 16)
    assert {tensor.device.type for tensor in streamed.values()} == {"cuda"}
    check_same({name: tensor.cpu() for name, tensor in streamed.items()}, whole)


def test_without_cuda_none_of_it_is_loaded(run_python: Callable[..., str], folder: Path) -> None:
    program = """
import sys, meshload, torch
meshload.restore(sys.argv[1], into="torch", device="cpu")
print([m for m in ("meshload.streaming", "meshload_adapters._cuda") if m in sys.modules], torch.cuda.is_initialized())
"""
    if torch.cuda.is_available():
        pytest.skip("it has CUDA")
    assert run_python(program, folder).split("\n")[0] == "[] False"
