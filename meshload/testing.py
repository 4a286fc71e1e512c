"""What tests of meshload and of its adapters share: sources that count what is asked of them, values that encode their place,
a writer of tiny safetensors folders, and the suites that every format and every framework runs.

A suite is a plain class of `test_` methods. An adapter's tests subclass it and say what it is run on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import Shape, whole
from .checkpoint import Checkpoint
from .errors import SourceError
from .frameworks import Framework, Placement, Slice
from .pieces import Pieces
from .planning import plan_array
from .source import Bytes, Folder, open_folder

# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """What was asked of some sources: `(name, start, length)` in the order of asking, in bytes."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(n for _, _, n in self.reads)

    def of(self, name: str) -> list[tuple[int, int]]:
        """Return the `(start, length)` asked of one source."""
        return [(start, n) for source, start, n in self.reads if source == name]


@dataclass(eq=False)
class Counted:
    """A source that notes each request in a log before it passes it on."""

    source: Any
    log: Log = field(default_factory=Log)

    @property
    def name(self) -> str:
        return str(self.source.name)

    @property
    def unit(self) -> int:
        return int(self.source.unit)

    @property
    def size(self) -> int:
        return int(self.source.size)

    @property
    def gap(self) -> int:
        return int(getattr(self.source, "gap", 0))

    def read_into(self, start: int, out: Bytes) -> None:
        self.log.reads.append((self.name, start, len(out)))
        self.source.read_into(start, out)

    @property
    def holds(self) -> bool:
        return bool(getattr(self.source, "holds", False))

    @property
    def read_runs(self) -> Any:
        """As the source has it, which may lack it."""
        own = self.source.read_runs

        def read(ranges: NDArray[np.int64], *rest: Any) -> None:
            self.log.reads.extend((self.name, start, length) for _, start, length, _, _ in ranges.tolist())
            own(ranges, *rest)

        return read

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.source.dtype
        return found

    def slices(self, k: int) -> tuple[slice, ...]:
        found: tuple[slice, ...] = self.source.slices(k)
        return found

    @property
    def decode_into(self) -> Any:
        """As the source has it, which may lack it."""
        own = self.source.decode_into

        def decode(outs: Mapping[int, NDArray[Any]]) -> None:
            self.log.reads.extend((self.name, k * self.unit, self.unit) for k in outs)
            own(outs)

        return decode

    def read_chunks(self, ks: Sequence[int]) -> list[NDArray[Any]]:
        self.log.reads.extend((self.name, k * self.unit, self.unit) for k in ks)
        found: list[NDArray[Any]] = self.source.read_chunks(ks)
        return found


@dataclass(eq=False)
class CountedFolder:
    """A folder whose files are counted."""

    folder: Folder
    log: Log = field(default_factory=Log)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def entry(self) -> str | None:
        return self.folder.entry

    @property
    def kvstore(self) -> Any:
        return self.folder.kvstore

    @property
    def is_remote(self) -> bool:
        return self.folder.is_remote

    def names(self, under: str = "") -> list[str]:
        return self.folder.names(under)

    def has(self, file: str) -> bool:
        return self.folder.has(file)

    def file(self, file: str) -> Counted:
        return Counted(self.folder.file(file), self.log)

    def inside(self, under: str) -> CountedFolder:
        return CountedFolder(self.folder.inside(under), self.log)


def counted(checkpoint: Checkpoint) -> tuple[Checkpoint, Log]:
    """Return a checkpoint whose payload reads are noted, and the log that notes them."""
    log, made = Log(), dict[int, Counted]()

    def sources(pieces: Pieces) -> Pieces:
        wrapped = tuple(made.setdefault(id(s), Counted(s, log)) for s in pieces.sources)
        return replace(pieces, sources=wrapped)

    def arrays(of: Mapping[str, Array]) -> dict[str, Array]:
        return {name: replace(a, pieces=sources(a.pieces)) for name, a in of.items()}

    moments = {kind: arrays(of) for kind, of in checkpoint.optimizer.items()}
    return replace(checkpoint, arrays=arrays(checkpoint.arrays), optimizer=moments, views={}), log


@dataclass(eq=False)
class InMemory:
    """A byte source over memory, which serves at most `at_most` bytes of its contents: a file that is cut while being read."""

    name: str
    data: bytes
    at_most: int | None = None
    gap: int = 0
    unit: int = 1

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, start: int, out: Bytes) -> None:
        stop = start + len(out)
        if stop > (len(self.data) if self.at_most is None else self.at_most):
            raise SourceError(f"{self.name}: ends before byte {stop}")
        out[:] = np.frombuffer(self.data, np.uint8, len(out), start)


@dataclass(eq=False)
class Nothing:
    """A byte source of some size that holds no bytes, for plans that nobody reads."""

    name: str
    size: int
    gap: int = 0
    unit: int = 1

    def read_into(self, start: int, out: Bytes) -> None:
        raise SourceError(f"{self.name}: there is nothing to be read")


# --- values that encode their place -----------------------------------------------------------------------------------


def ramp(name: str, shape: Shape, dtype: Any = np.float32) -> NDArray[Any]:
    """Return values that tell the array's name and each element's flat index, so that a misplaced row shows itself.

    >>> ramp("w", (2, 2)).ravel() - ramp("w", (2, 2))[0, 0]
    array([0., 1., 2., 3.], dtype=float32)
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    first = zlib.crc32(name.encode()) % 8192
    if kind.itemsize >= 4 and kind.kind in "fiu":
        return (first * 1000 + np.arange(count)).astype(kind).reshape(shape)
    bits = np.dtype(f"u{kind.itemsize}")
    if kind.kind == "b":
        return np.asarray((first + np.arange(count) * 7) % 3 == 0).reshape(shape)
    return np.asarray((first + np.arange(count)).astype(bits).view(kind)).reshape(shape)


def llama_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the arrays of a Llama, or of a Qwen3, by a Hugging Face config."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = config.get("head_dim") or e // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,), "lm_head.weight": (v, e)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (e,), at + "post_attention_layernorm.weight": (e,)}
        shapes |= {at + f"self_attn.{p}_proj.weight": (n, e) for p, n in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {at + "self_attn.o_proj.weight": (e, q)}
        shapes |= {at + f"mlp.{p}_proj.weight": (f, e) for p in ("gate", "up")} | {at + "mlp.down_proj.weight": (e, f)}
        if config["model_type"] == "qwen3":
            shapes |= {at + f"self_attn.{p}_norm.weight": (d,) for p in "qk"}
    return shapes


def same_bits(found: Any, expected: Any) -> bool:
    """Say whether two arrays have the same dtype, shape and bits, in order."""
    one, other = np.asarray(found), np.asarray(expected)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


# --- safetensors ------------------------------------------------------------------------------------------------------

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def write_safetensors(file: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Path:
    """Write arrays to one safetensors file, row-major, in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, parts = 0, []
    for name, array in arrays.items():
        values = np.asarray(array)
        data = values.tobytes()
        shape, kind = list(values.shape), _NAMES[values.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return file


def read_safetensors(file: Path) -> dict[str, NDArray[Any]]:
    """Read a safetensors file whole, without meshload's own reading: the plain truth to compare with."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            values = np.frombuffer(data[start + low : start + high], np.dtype(_DTYPES[entry["dtype"]]))
            found[name] = values.reshape(entry["shape"])
    return found


def write_checkpoint(folder: Path, arrays: Mapping[str, Any], config: Mapping[str, Any] | None = None, *, shards: int = 1) -> Path:
    """Write a Hugging Face folder: `config.json` and safetensors, in several shards with an index where `shards` says so."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
        return folder
    names, file_of = list(arrays), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mine = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        write_safetensors(folder / file, {n: arrays[n] for n in mine}, {"format": "pt"})
        file_of.update(dict.fromkeys(mine, file))
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --- suites -----------------------------------------------------------------------------------------------------------


class FormatSuite:
    """What every format does. Subclass it as `TestX`, and give `format`, and `cases`: folders with the truth in each."""

    format: Any

    def cases(self) -> Iterator[tuple[Path, Mapping[str, NDArray[Any]]]]:
        """Return checkpoints with all their arrays under stored names."""
        raise NotImplementedError

    def _opened(self, path: Path) -> Checkpoint:
        found: Checkpoint = self.format.open(open_folder(path))
        return found.views["stored"]() if "stored" in found.views else found

    def test_its_own_folders_are_recognised(self) -> None:
        assert [str(path) for path, _ in self.cases() if not self.format.matches(open_folder(path))] == []

    def test_a_folder_of_something_else_is_not_recognised(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("no checkpoint")
        (tmp_path / "model").mkdir()
        assert not self.format.matches(open_folder(tmp_path))

    def test_every_array_is_equal_bit_for_bit(self) -> None:
        for path, expected in self.cases():
            found = self._opened(path)
            assert set(found) == set(expected)
            assert [name for name in expected if not same_bits(found[name], expected[name])] == []

    def test_boxes_are_equal_bit_for_bit(self) -> None:
        chance = np.random.default_rng(0)
        for path, expected in self.cases():
            found = self._opened(path)
            for name, values in expected.items():
                low = [int(chance.integers(0, n + 1)) for n in values.shape]
                box = tuple(slice(a, int(chance.integers(a, n + 1))) for a, n in zip(low, values.shape, strict=True))
                assert same_bits(found[name][box], values[box]), (name, box)

    def test_opening_reads_no_payload(self) -> None:
        for path, _ in self.cases():
            folder = CountedFolder(open_folder(path))
            opened = self.format.open(folder)
            before = folder.log.nbytes
            for array in opened.values():
                plan_array(array)
            assert folder.log.nbytes == before

    def test_opening_changes_nothing(self) -> None:
        for path, _ in self.cases():
            before = _listing(path)
            self._opened(path)
            assert _listing(path) == before


def _listing(path: Path) -> list[tuple[str, int]]:
    return sorted((str(p.relative_to(path)), p.stat().st_mtime_ns) for p in path.rglob("*"))


class FrameworkSuite:
    """What every framework does with filled buffers. Give `framework`, and `back`: a tensor's values as NumPy's, bit for bit."""

    framework: Framework
    back: Callable[[Any], NDArray[Any]]
    dtypes: Sequence[Any] = (np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16)

    def _through(self, values: NDArray[Any]) -> NDArray[Any]:
        box = whole(values.shape)
        tensor = self.framework.tensor([Slice(0, box, values)], Placement(values.shape))
        found: NDArray[Any] = type(self).back(tensor)
        return found

    def test_every_dtype_keeps_its_bits(self) -> None:
        assert [np.dtype(d) for d in self.dtypes if not same_bits(self._through(ramp("w", (3, 5), d)), ramp("w", (3, 5), d))] == []

    def test_shapes_of_no_dims_and_no_elements_stay(self) -> None:
        for shape in ((), (0,), (2, 0), (0, 4), (1, 4), (3, 1, 6, 2)):
            assert same_bits(self._through(ramp("w", shape)), ramp("w", shape)), shape

    def test_a_dtype_that_is_not_its_own_is_none(self) -> None:
        assert self.framework.dtype("no such dtype") is None

    def test_a_thing_that_is_not_its_own_is_not_owned(self) -> None:
        assert not self.framework.owns(object())
