"""Arrays against NumPy: any chain of operations reads the same bits from files, scattered pieces and compressed chunks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore

import meshload
from meshload.array import Array, Step, concatenate, interleave, stack, stored_whole
from meshload.box import row_major
from meshload.pieces import piece, table, union
from meshload.source import ChunkedArray, LocalFile
from meshload.testing import InMemory, ramp, same_bits

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

Values = Any
DTYPES = [np.uint8, np.bool_, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.int64, np.complex64]


@dataclass
class Pair:
    """An array and what it is in NumPy."""

    array: Array
    values: Values


def of_file(folder: Path, values: Values, name: str = "w") -> Array:
    """Store an array in a file of its own, behind 5 bytes of something else."""
    file = folder / f"{name}-{next(_numbers)}"
    file.write_bytes(b"other" + values.tobytes() + b"more")
    return stored_whole(name, values.dtype, values.shape, LocalFile(file, file.name, file.stat().st_size), 5)


_numbers = itertools.count()


def of_pieces(values: Values, cuts: list[int], name: str = "w") -> Array:
    """Store an array as boxes, one after another in memory, each with its dims in reverse order and a gap behind it."""
    rows: list[tuple[slice, ...]] = [()]
    for n, at in zip(values.shape, cuts, strict=True):
        rows = [(*row, part) for row in rows for part in (slice(0, at), slice(at, n))]
    data, tables = b"", []
    source = InMemory("memory", b"")
    for row in rows:
        box = values[row]
        start = [s.start for s in row]
        strides = tuple(reversed(row_major(tuple(reversed(box.shape)), values.itemsize)))
        tables.append(piece(source, len(data), box.shape, values.itemsize, strides=strides).place(start))
        data += box.T.tobytes() + b"gap"
    source.data = data
    return Array(name, values.dtype, values.shape, union(tables))


def of_chunks(values: Values, chunk: list[int], name: str = "w") -> Array:
    """Store an array as compressed zarr chunks."""
    store = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "memory"},
            "metadata": {"codecs": [{"name": "gzip", "configuration": {"level": 1}}]},
        },
        create=True,
        dtype=tensorstore.dtype(values.dtype),
        shape=values.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
    ).result()
    store[...] = values
    source = ChunkedArray(store, name)
    return Array(name, values.dtype, values.shape, source.pieces())


class Chain:
    """Draws arrays and operations, and does each to both."""

    def __init__(self, data: st.DataObject, folder: Path) -> None:
        self.data, self.folder, self.count = data, folder, 0
        self.dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))

    def new(self, shape: tuple[int, ...]) -> Pair:
        self.count += 1
        if self.dtype.kind == "c":
            values = ramp(f"w{self.count}", shape).astype(self.dtype)
        else:
            values = ramp(f"w{self.count}", shape, self.dtype)
        match self.data.draw(st.sampled_from(["file", "pieces", "chunks"])):
            case "file":
                return Pair(of_file(self.folder, values), values)
            case "pieces":
                return Pair(of_pieces(values, [self.data.draw(st.integers(0, n)) for n in shape]), values)
            case _:
                return Pair(of_chunks(values, [self.data.draw(st.integers(1, max(n, 1))) for n in shape]), values)

    def first(self) -> Pair:
        return self.new(tuple(self.data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, 6, 6]), max_size=4))))

    def next(self, pair: Pair) -> Pair:
        names = ["index", "transpose", "stack"] + ["split", "split", "merge", "concatenate", "interleave"] * (pair.array.ndim > 0)
        return getattr(self, self.data.draw(st.sampled_from(names)))(pair)  # type: ignore[no-any-return]

    def index(self, pair: Pair) -> Pair:
        key = self.data.draw(keys(pair.values.shape))
        return Pair(pair.array[key], pair.values[key])

    def transpose(self, pair: Pair) -> Pair:
        order = self.data.draw(st.permutations(range(pair.array.ndim)))
        return Pair(pair.array.transpose(*order), pair.values.transpose(order))

    def split(self, pair: Pair) -> Pair:
        dim = self.data.draw(st.integers(0, pair.array.ndim - 1))
        n, shape = pair.values.shape[dim], pair.values.shape
        sizes = self.data.draw(st.sampled_from(factors(n)))
        return Pair(pair.array.split(dim, sizes), pair.values.reshape(*shape[:dim], *sizes, *shape[dim + 1 :]))

    def merge(self, pair: Pair) -> Pair:
        shape = pair.values.shape
        dim = self.data.draw(st.integers(0, len(shape) - 1))
        count = self.data.draw(st.integers(1, len(shape) - dim))
        merged = (*shape[:dim], math.prod(shape[dim : dim + count]), *shape[dim + count :])
        return Pair(pair.array.merge(dim, count), pair.values.reshape(merged))

    def concatenate(self, pair: Pair) -> Pair:
        shape = list(pair.values.shape)
        dim = self.data.draw(st.integers(-len(shape), len(shape) - 1))
        shape[dim] = self.data.draw(st.integers(0, 3))
        other = self.new(tuple(shape))
        pairs = self.data.draw(st.sampled_from([[pair, other], [other, pair], [pair, other, pair], [pair]]))
        return Pair(concatenate([p.array for p in pairs], dim), np.concatenate([p.values for p in pairs], dim))

    def stack(self, pair: Pair) -> Pair:
        dim = self.data.draw(st.integers(-pair.array.ndim - 1, pair.array.ndim))
        pairs = [pair, self.new(pair.values.shape)]
        return Pair(stack([p.array for p in pairs], dim), np.stack([p.values for p in pairs], dim))

    def interleave(self, pair: Pair) -> Pair:
        dim = self.data.draw(st.integers(-pair.array.ndim, pair.array.ndim - 1))
        pairs = [pair, self.new(pair.values.shape), pair]
        shape = list(pair.values.shape)
        at = dim % len(shape)
        shape[at] *= 3
        expected = np.stack([p.values for p in pairs], at + 1).reshape(shape)
        return Pair(interleave([p.array for p in pairs], dim), expected)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Return an index that NumPy takes: integers, slices of step 1, perhaps an Ellipsis, perhaps not for all dims."""
    items: list[Any] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        ends = st.none() | st.integers(-n - 2, n + 2)
        whole = st.builds(slice, ends, ends, st.sampled_from([None, 1]))
        items.append(draw(whole | st.integers(-n, n - 1) | st.integers(0, n - 1).map(np.int64) if n else whole))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(items)))
        items = [*items[:at], Ellipsis, *items[at:]] if at == len(items) else items
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def factors(n: int) -> list[tuple[int, ...]]:
    if n == 0:
        return [(0,), (0, 3), (2, 0), (1, 0, 2)]
    return [(a, b, n // a // b) for a in range(1, n + 1) for b in range(1, n + 1) if n % (a * b) == 0] + [(n,), (1, n)]


@settings(max_examples=400)
@given(st.data())
def test_a_chain_of_operations_reads_what_numpy_has(tmp_path: Path, data: st.DataObject) -> None:
    chain = Chain(data, tmp_path)
    pair = chain.first()
    for _ in range(data.draw(st.integers(0, 5))):
        if pair.values.size > 400 or pair.values.ndim > 5:
            break
        pair = chain.next(pair)
        assert pair.array.shape == pair.values.shape
    assert same_bits(pair.array, pair.values)


@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(1, 2))
def test_runs_that_end_anywhere_are_split_and_merged_again(data: st.DataObject, sizes: list[int], width: int) -> None:
    values = ramp("w", (math.prod(sizes), width))
    ends = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    parts = [values[a:b] for a, b in itertools.pairwise([0, *ends, len(values)])]
    fine = concatenate([of_pieces(p, [0, 0]) for p in parts]).split(0, sizes)
    assert same_bits(fine, values.reshape(*sizes, width))
    assert same_bits(fine.merge(0, len(sizes)), values)
    assert same_bits(fine.merge(len(sizes) - 1, 2), values.reshape(*sizes[:-1], sizes[-1] * width))


@settings(max_examples=40)
@given(st.data())
def test_a_tensorstore_view_reads_what_numpy_has(tmp_path: Path, data: st.DataObject) -> None:
    chain = Chain(data, tmp_path)
    pair = chain.first()
    for _ in range(data.draw(st.integers(0, 2))):
        pair = chain.next(pair)
    view = pair.array.tensorstore()
    assert view.shape == pair.values.shape
    key = data.draw(keys(pair.values.shape).filter(lambda k: all(type(i) is not slice for i in (k if type(k) is tuple else (k,)))))
    assert same_bits(np.asarray(view.read().result()), pair.values)
    assert np.asarray(view[key].read().result()).tobytes() == pair.values[key].tobytes()


def test_ravel_of_a_transposed_array_is_in_its_own_order(tmp_path: Path) -> None:
    values = ramp("w", (3, 4))
    assert same_bits(of_file(tmp_path, values).T.merge(0, 2), values.T.reshape(-1))


# --- indexing like NumPy, B56 -----------------------------------------------------------------------------------------

VALUES = ramp("w", (3, 4, 5))


@pytest.fixture
def w(tmp_path: Path) -> Array:
    return of_file(tmp_path, VALUES)


@pytest.mark.parametrize(
    "key",
    [
        2,
        -1,
        np.int64(1),
        slice(None),
        slice(1, 3),
        slice(-2, None),
        slice(5, 1),
        slice(-100, 100),
        slice(0, 3, 1),
        ...,
        (),
        (0, 1, 2),
        (0, slice(1, 2)),
        (..., 0),
        (0, ..., 0),
        (slice(1, 2), ..., slice(2, 4)),
        (0, 1, 2, ...),
    ],
    ids=repr,
)
def test_b56_an_index_means_what_it_means_in_numpy(w: Array, key: Any) -> None:
    assert same_bits(w[key], np.asarray(VALUES[key]))


@pytest.mark.parametrize("key", [3, -4, (0, 4), (0, 0, 5), (0, 0, 0, 0), (..., ...), (..., 0, 0, 0, 0)], ids=repr)
def test_b56_an_index_out_of_bounds_raises_like_numpy(w: Array, key: Any) -> None:
    with pytest.raises(IndexError):
        VALUES[key]
    with pytest.raises(IndexError, match=r"^w: "):
        w[key]


@pytest.mark.parametrize("step", [2, -1, 3])
def test_b56_a_step_other_than_1_is_refused_with_what_to_do(w: Array, step: int) -> None:
    with pytest.raises(ValueError, match=rf"step 1, found {step}; read first"):
        w[::step]


@pytest.mark.parametrize("key", [None, 1.0, "a", True, [0, 1], np.asarray([0, 1])], ids=repr)
def test_b56_an_index_of_another_kind_is_refused(w: Array, key: Any) -> None:
    with pytest.raises(TypeError, match=r"an integer, a slice or an Ellipsis"):
        w[key]


def test_an_array_of_0_dims_has_no_length_and_no_rows(tmp_path: Path) -> None:
    scalar = of_file(tmp_path, np.asarray(3.5, np.float32))
    assert same_bits(scalar[...], np.asarray(3.5, np.float32))
    with pytest.raises(TypeError):
        len(scalar)
    with pytest.raises(IndexError):
        scalar[0]


def test_rows_are_gone_through_like_in_numpy(w: Array) -> None:
    assert [same_bits(row, VALUES[i]) for i, row in enumerate(w)] == [True] * 3


def test_numpy_functions_take_it(w: Array) -> None:
    assert np.array_equal(np.asarray(w, np.float64), VALUES.astype(np.float64))
    with pytest.raises(ValueError, match="makes a copy"):
        np.asarray(w, copy=False)


# --- operations that do not fit ---------------------------------------------------------------------------------------


def test_sizes_that_do_not_make_the_dim_are_refused_with_both_numbers(w: Array) -> None:
    with pytest.raises(ValueError, match=r"dim 1 has 4 elements, \(2, 3\) make 6"):
        w.split(1, (2, 3))


def test_merging_more_dims_than_there_are_is_refused(w: Array) -> None:
    with pytest.raises(ValueError, match="cannot merge 3 dims from dim 1 of 3"):
        w.merge(1, 3)


def test_an_order_that_is_none_is_refused(w: Array) -> None:
    for order in ((0, 1), (0, 0, 1), (0, 1, 3)):
        with pytest.raises(ValueError, match="is not an order of 3 dims"):
            w.transpose(*order)


def test_dims_are_counted_from_the_end_too(w: Array) -> None:
    assert w.split(-1, (5, 1)).shape == (3, 4, 5, 1)
    assert w.merge(-2, 2).shape == (3, 20)
    assert w.transpose(-1, 0, 1).shape == (5, 3, 4)
    with pytest.raises(IndexError, match="dim -4 is out of bounds for 3 dims"):
        w.split(-4, (3,))
    with pytest.raises(IndexError, match="dim 3 is out of bounds"):
        concatenate([w, w], 3)
    with pytest.raises(IndexError, match="dim 5 is out of bounds"):
        stack([w, w], 5)


def test_arrays_that_differ_are_not_joined(tmp_path: Path, w: Array) -> None:
    wide = of_file(tmp_path, ramp("x", (3, 4, 5), np.float64), "x")
    long = of_file(tmp_path, ramp("y", (3, 4, 6)), "y")
    for other in (wide, long):
        with pytest.raises(ValueError, match="do not fit together"):
            concatenate([w, other])
        with pytest.raises(ValueError, match="do not fit together"):
            stack([w, other])
    with pytest.raises(ValueError, match="at least one array"):
        stack([])


def test_pieces_of_another_number_of_dims_are_no_array() -> None:
    with pytest.raises(ValueError, match="has 2 dims, its pieces have 1"):
        Array("w", np.dtype("f4"), (2, 2), piece("a", 0, (4,), 4))


# --- what is not stored, or stored twice ------------------------------------------------------------------------------


def test_a_hole_raises_and_names_both_numbers() -> None:
    half = table((InMemory("f", bytes(32)),), [0], [0], [[0, 0]], [[1, 4]], [[16, 4]])
    with pytest.raises(meshload.MissingPieces, match=r"w: rank 0 needs 8 elements of w, the checkpoint holds 4"):
        np.asarray(Array("w", np.dtype("f4"), (2, 4), half))
    assert np.asarray(Array("w", np.dtype("f4"), (2, 4), half)[:1]).shape == (1, 4)


def test_a_step_applies_to_what_is_read(tmp_path: Path) -> None:
    values = ramp("w", (4,), np.float32)
    array = replace(of_file(tmp_path, values), step=Step("+", 1.0))
    assert same_bits(array[1:3], values[1:3] + 1)
    assert Step("*", 3.0).inverse.apply(Step("*", 3.0).apply(np.float32([1, 2]))).tolist() == [1, 2]


def test_a_step_rounds_once() -> None:
    w = np.asarray([2**-10], ml_dtypes.bfloat16)
    assert Step("+", 1.0).apply(w).astype(np.float32).tolist() == [1.0]
    assert Step("+", 1.0).apply(w.astype(np.float32)).tolist() == [1.0009765625]


def test_arrays_with_different_steps_are_not_joined(w: Array) -> None:
    with pytest.raises(ValueError, match="different steps"):
        concatenate([w, replace(w, step=Step("+", 1.0))])
