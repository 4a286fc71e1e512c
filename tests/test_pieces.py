"""Pieces: each operation moves addresses as NumPy moves elements, and cuts no more rows than it must."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from meshload.pieces import Pieces, empty, piece, stacked, table, union

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

Addresses = Any


def addresses(pieces: Pieces, shape: tuple[int, ...]) -> Addresses:
    """Return the byte address of each element, -1 where there is none: the table's meaning, said plainly."""
    found = np.full(shape, -1, np.int64)
    for n in range(len(pieces)):
        box = tuple(slice(a, a + m) for a, m in zip(pieces.start[n], pieces.shape[n], strict=True))
        assert (found[box] == -1).all(), "an element lies in two rows"
        at = np.full(tuple(pieces.shape[n]), pieces.offset[n])
        for d, step in enumerate(pieces.strides[n]):
            at = at + np.arange(at.shape[d]).reshape([-1 if e == d else 1 for e in range(at.ndim)]) * step
        found[box] = at + 10_000 * pieces.source[n]
    return found


@st.composite
def tables(draw: st.DrawFn, max_dims: int = 4, min_dims: int = 0) -> tuple[Pieces, tuple[int, ...]]:
    """Return an array cut into boxes along each dim, some of them left out, each with an offset and strides of its own."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=min_dims, max_size=max_dims)))
    rows: list[list[tuple[int, int]]] = [[]]
    for n in shape:
        at = draw(st.integers(0, n))
        rows = [[*row, part] for row in rows for part in ((0, at), (at, n)) if part[1] > part[0]]
    kept = [row for row in rows if draw(st.integers(0, 9))]
    return table(
        ("a", "b"),
        [draw(st.integers(0, 1)) for _ in kept],
        [draw(st.integers(0, 50)) for _ in kept],
        np.asarray([[a for a, _ in row] for row in kept], np.int64).reshape(len(kept), len(shape)),
        np.asarray([[b - a for a, b in row] for row in kept], np.int64).reshape(len(kept), len(shape)),
        np.asarray([[draw(st.integers(-3, 30)) for _ in row] for row in kept], np.int64).reshape(len(kept), len(shape)),
    ), shape


@given(st.data(), tables(min_dims=1))
def test_narrow_clips_and_counts_from_its_start(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    stop = data.draw(st.integers(start, shape[dim]))
    cut = tuple(slice(start, stop) if d == dim else slice(None) for d in range(len(shape)))
    expected = addresses(pieces, shape)[cut]
    found = pieces.narrow(dim, start, stop)
    assert np.array_equal(addresses(found, expected.shape), expected)
    assert len(found) <= len(pieces)


@given(st.data(), tables(min_dims=1))
def test_index_drops_the_dim(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    dim = data.draw(st.integers(0, len(shape) - 1))
    if not shape[dim]:
        return
    i = data.draw(st.integers(0, shape[dim] - 1))
    expected = addresses(pieces, shape).take(i, axis=dim)
    assert np.array_equal(addresses(pieces.index(dim, i), expected.shape), expected)


@given(st.data(), tables())
def test_transpose_reorders(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    order = data.draw(st.permutations(range(len(shape))))
    expected = addresses(pieces, shape).transpose(order)
    assert np.array_equal(addresses(pieces.transpose(order), expected.shape), expected)


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_run_that_is_split_becomes_at_most_2k_minus_1_rows(data: st.DataObject, sizes: list[int]) -> None:
    n = math.prod(sizes)
    start = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(1, n - start))
    run = table(("a",), [0], [7], [[start]], [[count]], [[3]])
    found = run.split(0, sizes)
    assert np.array_equal(addresses(found, tuple(sizes)), addresses(run, (n,)).reshape(sizes))
    assert len(found) <= 2 * len(sizes) - 1
    if start % math.prod(sizes[1:]) == 0 and count % math.prod(sizes[1:]) == 0:
        assert len(found) == 1


def test_the_bound_of_split_is_met() -> None:
    assert len(table(("a",), [0], [0], [[1]], [[79]], [[1]]).split(0, (3, 3, 3, 3))) == 7


@given(st.data(), tables(min_dims=1, max_dims=3))
def test_split_keeps_addresses(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    dim = data.draw(st.integers(0, len(shape) - 1))
    n = shape[dim]
    sizes = data.draw(st.sampled_from([[n], [1, n], [n, 1], [n, 3, 0] if n == 0 else [1, n, 1], *([[2, 2]] if n == 4 else [])]))
    expected = addresses(pieces, shape).reshape(*shape[:dim], *sizes, *shape[dim + 1 :])
    assert np.array_equal(addresses(pieces.split(dim, sizes), expected.shape), expected)


@given(st.data(), tables(min_dims=1))
def test_merge_keeps_addresses(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    dim = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(0, len(shape) - dim))
    sizes = shape[dim : dim + count]
    expected = addresses(pieces, shape).reshape(*shape[:dim], math.prod(sizes), *shape[dim + count :])
    assert np.array_equal(addresses(pieces.merge(dim, sizes), expected.shape), expected)


@pytest.mark.parametrize(
    ("start", "shape", "strides", "rows"),
    [
        ((1, 2), (1, 3), (99, 4), 1),  # the outer extent is 1
        ((0, 0), (3, 5), (20, 4), 1),  # the inner dim is whole, the strides fit
        ((0, 0), (3, 5), (24, 4), 3),  # they do not
        ((0, 1), (3, 4), (20, 4), 3),  # the inner dim is not whole
    ],
)
def test_merge_makes_one_row_where_it_can_else_one_per_outer_index(
    start: tuple[int, int], shape: tuple[int, int], strides: tuple[int, int], rows: int
) -> None:
    pieces = table(("a",), [0], [0], [start], [shape], [strides])
    assert len(pieces.merge(0, (4, 5))) == rows


def test_merge_of_an_inner_dim_of_one_element_is_one_row() -> None:
    pieces = table(("a",), [0], [0], [(0, 0)], [(3, 1)], [(20, 4)])
    merged = pieces.merge(0, (3, 1))
    assert len(merged) == 1
    assert merged.strides.tolist() == [[20]]


@given(tables(min_dims=2, max_dims=2))
def test_merge_undoes_split(made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    back = pieces.merge(0, shape).split(0, shape)
    assert np.array_equal(addresses(back, shape), addresses(pieces, shape))


@given(st.data(), tables(max_dims=3))
def test_place_and_union_make_a_larger_array(data: st.DataObject, made: tuple[Pieces, tuple[int, ...]]) -> None:
    pieces, shape = made
    if not shape:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = [shape[d] if d == dim else 0 for d in range(len(shape))]
    both = union([pieces, pieces.place(start)])
    expected = np.concatenate([addresses(pieces, shape)] * 2, axis=dim)
    assert np.array_equal(addresses(both, expected.shape), expected)


def test_union_renumbers_sources_by_identity() -> None:
    x, y, z = object(), object(), object()
    one = table((x, y), [1, 0], [0, 0], [[0], [1]], [[1], [1]], [[1], [1]])
    other = table((z, y), [0, 1], [0, 0], [[2], [3]], [[1], [1]], [[1], [1]])
    both = union([one, other])
    assert [both.sources[i] for i in both.source] == [y, x, z, y]
    assert len(both.sources) == 3


def test_union_of_tables_without_rows_has_none() -> None:
    assert len(union([empty(2), empty(2)])) == 0


def test_insert_adds_a_dim_at_one_index_or_at_one_per_row() -> None:
    two = table(("a",), [0, 0], [0, 9], [[0], [2]], [[2], [1]], [[1], [1]])
    assert two.insert(1, 3).start.tolist() == [[0, 3], [2, 3]]
    assert two.insert(0, np.asarray([4, 5])).start.tolist() == [[4, 0], [5, 2]]


@given(st.lists(tables(min_dims=2, max_dims=2), min_size=1, max_size=3))
def test_stacked_is_insert_and_union(made: list[tuple[Pieces, tuple[int, ...]]]) -> None:
    found = stacked([p for p, _ in made], np.asarray([[i, 2 * i] for i in range(len(made))]))
    plain = union([p.insert(0, 2 * i).insert(0, i) for i, (p, _) in enumerate(made)])
    for column in ("source", "offset", "start", "shape", "strides"):
        assert np.array_equal(getattr(found, column), getattr(plain, column))


def test_rows_without_elements_are_dropped() -> None:
    assert len(table(("a",), [0, 0], [0, 8], [[0, 0], [1, 0]], [[1, 0], [1, 2]], [[2, 1], [2, 1]])) == 1
    assert len(piece("a", 0, (3, 0), 4)) == 0
    assert len(piece("a", 0, (), 4)) == 1


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="columns do not fit"):
        table(("a",), [0, 0], [0], [[0], [1]], [[1], [1]], [[1], [1]])


def test_a_million_rows_are_array_work() -> None:
    n = 1_000_000
    wide = np.arange(n)[:, None]
    rows = table(("a",), np.zeros(n, int), np.arange(n) * 4, wide, np.ones_like(wide), np.ones_like(wide) * 4)
    assert len(rows.narrow(0, 10, n - 10).split(0, (n // 20 - 1, 20)).transpose((1, 0)).merge(0, (20, n // 20 - 1))) == n - 20
