"""Boxes, and runs cut into boxes, against flat indices in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshload.box import Box, boxes_of_run, row_major, whole

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(start), tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))


@given(st.data(), SHAPES)
def test_a_run_is_cut_into_boxes_that_hold_its_elements_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = np.arange(size).reshape(shape)
    found = list(boxes_of_run(shape, start, stop))
    elements = [int(i) for box in found for i in flat[box.slices].ravel()]
    assert elements == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_the_bound_of_a_run_is_met() -> None:
    assert len(list(boxes_of_run((3, 3, 3, 3), 1, 80))) == 7


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_a_run_outside_the_array_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"run \[.*\(2, 3\)"):
        list(boxes_of_run((2, 3), start, stop))


def test_a_run_inside_one_row_is_one_box() -> None:
    assert list(boxes_of_run((3, 4), 5, 7)) == [Box((1, 1), (1, 2))]


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of_run((4, 3, 2), 6, 18)) == [Box((1, 0, 0), (2, 3, 2))]


@given(st.data(), SHAPES)
def test_boxes_meet_where_both_have_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = np.zeros(shape, int)
    both[one.slices] += 1
    both[other.slices] += 1
    met = one.meet(other)
    expected = np.zeros(shape, bool)
    if met is not None:
        assert met.size > 0
        expected[met.slices] = True
    assert np.array_equal(both == 2, expected)
    assert met == other.meet(one)


@given(st.data(), SHAPES)
def test_a_box_is_inside_its_array(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    assert box.inside(shape)
    assert box.size == np.empty(shape)[box.slices].size
    assert whole(shape).slices == tuple(slice(0, n) for n in shape)


def test_a_box_that_reaches_out_is_not_inside() -> None:
    assert not Box((1, 0), (2, 3)).inside((2, 3))
    assert not Box((0,), (2,)).inside((2, 3))


@pytest.mark.parametrize(("start", "shape"), [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))])
def test_a_box_without_meaning_is_refused(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a box has"):
        Box(start, shape)


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_row_major_strides_are_those_of_numpy(shape: tuple[int, ...], itemsize: int) -> None:
    assert row_major(shape, itemsize) == np.empty(shape, f"V{itemsize}").strides
