"""Sharing out reads: copies cut at edges of slabs, against NumPy; what is read once, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from meshload.box import row_major
from meshload.scheduling import Copies, compacted
from meshload.sharing import Shared, clipped, share_out


@dataclass(frozen=True)
class File:
    name: str = "file"
    unit: int = 1
    size: int = 1 << 40


def copies(*rows: tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], itemsize: int = 1, source: Any = None) -> Copies:
    """Return copies of boxes of an array that lies row-major at byte 0: (rank, array's shape, start, box's shape)."""
    tables = []
    for rank, whole, start, shape in rows:
        strides = row_major(whole, itemsize)
        offset = sum(a * s for a, s in zip(start, strides, strict=True))
        columns = [[offset], [strides], [rank], [0], [row_major(shape, itemsize)], [shape], [itemsize]]
        tables.append(Copies((source or FILE,), np.zeros(1, np.int64), *(np.asarray(c, np.int64) for c in columns)))
    return compacted(Copies.union(tables))


FILE = File()
PLENTY = 1 << 40


def shared_out(table: Copies, *, budget: int = PLENTY, **options: Any) -> Shared:
    return share_out(table, budget=budget, **options)


def elements(table: Copies, row: int) -> list[tuple[int, int]]:
    """Return where each element lies in source and target."""
    ndim = table.shape.shape[1]
    index = np.asarray(list(np.ndindex(*table.shape[row].tolist())), np.int64).reshape(int(table.sizes[row]), ndim)
    at = (table.offset[row] + index @ table.strides[row], table.target_offset[row] + index @ table.target_strides[row])
    return sorted(zip(at[0].tolist(), at[1].tolist(), strict=True))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    whole = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in whole)
    return whole, start, tuple(draw(st.integers(1, n - a)) for n, a in zip(whole, start, strict=True))


@given(boxes(), st.sampled_from([1, 2, 3, 8]), st.integers(-5, 300), st.integers(0, 300))
def test_clipping_keeps_each_element_that_begins_in_the_range(box: Any, itemsize: int, low: int, length: int) -> None:
    table = copies((0, *box), itemsize=itemsize)
    parts, which = clipped(table, np.asarray([low]), np.asarray([low + length]))
    found = sorted(e for row in range(len(parts)) for e in elements(parts, row))
    assert found == [e for e in elements(table, 0) if low <= e[0] < low + length]
    assert set(which.tolist()) <= {0}
    assert len(parts) <= 2 * len(box[0]) + 1


def check_complete(table: Copies, shared: Shared) -> None:
    """Each element of each copy that is exchanged is in exactly one part, inside the slab that the part belongs to."""
    for row in range(len(table)):
        parts = np.flatnonzero(shared.row == row)
        if shared.alone[row]:
            assert not len(parts)
            continue
        found = sorted(e for p in parts.tolist() for e in elements(shared.parts, p))
        assert found == elements(table, row)
    for p in range(len(shared.parts)):
        _, start, length, _ = shared.slabs[shared.slab[p]].tolist()
        assert all(start <= at < start + length for at, _ in elements(shared.parts, p))


@given(st.lists(st.tuples(st.integers(0, 3), boxes()), min_size=1, max_size=6), st.sampled_from([7, 64, 4096]))
def test_every_element_is_handed_on_once_or_read_alone(rows: Any, slab: int) -> None:
    table = copies(*((rank, *box) for rank, box in rows), itemsize=2)
    check_complete(table, shared_out(table, slab=slab))


def test_row_parallel_slices_are_read_once_each_rank_a_contiguous_part() -> None:
    whole = (2048, 2048)
    table = copies(*((rank, whole, (0, 512 * rank), (2048, 512)) for rank in range(4)))
    shared = shared_out(table)
    assert shared.nbytes == 2048 * 2048
    assert not shared.alone.any()
    assert sorted(shared.slabs[:, 1:].tolist()) == [[1048576 * r, 1048576, r] for r in range(4)]


def test_replicas_are_read_once() -> None:
    table = copies(*((rank, (64,), (0,), (64,)) for rank in range(4)))
    shared = shared_out(table)
    assert (shared.nbytes, len(shared.slabs), len(shared.parts)) == (64, 1, 4)


def test_what_one_rank_wants_it_reads_alone() -> None:
    table = copies(*((rank, (4, 8), (rank, 0), (1, 8)) for rank in range(4)))
    shared = shared_out(table)
    assert shared.alone.all()
    assert shared.nbytes == 0


def test_a_range_is_not_read_for_a_little_of_it() -> None:
    whole = (100, 100)
    table = copies((0, whole, (0, 0), (100, 1)), (1, whole, (0, 5), (100, 1)))
    assert shared_out(table).alone.all()


def test_small_replicas_are_spread_over_the_ranks() -> None:
    rows = [(rank, (40, 8), (n, 0), (1, 8)) for n in range(0, 40, 2) for rank in range(4)]
    readers = shared_out(copies(*rows)).slabs[:, 3].tolist()
    assert [readers.count(rank) for rank in range(4)] == [5, 5, 5, 5]


def test_chunks_are_never_cut() -> None:
    chunked = File(unit=32)
    table = copies((0, (4, 32), (0, 0), (4, 16)), (1, (4, 32), (0, 16), (4, 16)), source=chunked)
    rows = [copies((r, (4, 32), (n, 16 * r), (1, 16)), source=chunked) for n in range(4) for r in range(2)]
    shared = shared_out(Copies.union(rows), slab=5)
    assert shared.slabs[:, 1:3].tolist() == [[0, 32], [32, 32], [64, 32], [96, 32]]
    assert sorted(shared.slabs[:, 3].tolist()) == [0, 0, 1, 1]
    assert len(table) == 2


def moved(shared: Shared, parts: Any) -> int:
    """Return the most bytes that a rank holds, sends or takes in one round."""
    slabs = shared.slabs[np.unique(shared.slab[parts])]
    sizes = shared.parts.sizes[parts] * shared.parts.itemsize[parts]
    counts = np.zeros((3, 8), np.int64)
    np.add.at(counts[0], slabs[:, 3], slabs[:, 2])
    np.add.at(counts[1], shared.slabs[shared.slab[parts], 3], sizes)
    np.add.at(counts[2], shared.parts.target[parts], sizes)
    return int(counts.max())


def check_rounds(shared: Shared) -> list[Any]:
    """Return the rounds, which go through all parts in order, and in none of which a rank holds, sends or takes too much."""
    rounds = list(shared.rounds())
    assert [i for parts in rounds for i in parts.tolist()] == list(range(len(shared.parts)))
    for parts in rounds:
        units = set(zip(shared.slab[parts].tolist(), shared.parts.target[parts].tolist(), strict=True))
        assert moved(shared, parts) <= shared.budget or len(units) == 1
        assert len(set(shared.turn[shared.slab[parts]].tolist())) == 1
    for of_reader in (np.flatnonzero(shared.slabs[:, 3] == r) for r in range(8)):
        for turn in set(shared.turn[of_reader].tolist()):
            held = of_reader[shared.turn[of_reader] == turn]
            assert shared.slabs[held, 2].sum() <= shared.budget or len(held) == 1
    assert shared.last.tolist() == [np.flatnonzero(shared.slab == n).max(initial=0) for n in range(len(shared.slabs))]
    return rounds


def test_rounds_stay_within_the_budget() -> None:
    whole = (2048, 2048)
    table = copies(*((rank, whole, (0, 512 * rank), (2048, 512)) for rank in range(4)))
    shared = shared_out(table, slab=1 << 16, budget=1 << 17)
    rounds = check_rounds(shared)
    assert {moved(shared, parts) for parts in rounds} == {1 << 17}
    assert len(rounds) == 8


def test_a_slab_that_many_want_takes_several_rounds() -> None:
    shared = shared_out(copies(*((rank, (1 << 16,), (0,), (1 << 16,)) for rank in range(8))), budget=3 << 16)
    assert [len(parts) for parts in check_rounds(shared)] == [3, 3, 2]


def test_all_send_and_all_take_in_each_round() -> None:
    """Eight replicas of 64 MiB, 4 MiB a round: none sends while the others wait, and none is sent to by all at once."""
    shared = shared_out(copies(*((rank, (64 << 20,), (0,), (64 << 20,)) for rank in range(8))), slab=4 << 20, budget=4 << 20)
    rounds = check_rounds(shared)
    assert len(rounds) == 64 // 4
    for parts in rounds:
        assert sorted(shared.slabs[shared.slab[parts], 3].tolist()) == sorted(shared.parts.target[parts].tolist()) == list(range(8))


def test_parts_stay_few_where_ranks_are_many() -> None:
    """Each rank wants some columns of 32 MiB: with a reader per rank there would be a million parts."""
    table = copies(*((rank, (4096, 8192), (0, 8 * rank), (4096, 8)) for rank in range(1024)))
    shared = shared_out(table, budget=50 << 20)
    assert shared.nbytes == 4096 * 8192
    assert len(shared.parts) <= 4096


@given(st.lists(st.tuples(st.integers(0, 7), boxes()), min_size=2, max_size=9), st.integers(1, 400))
def test_rounds_go_through_all_parts_in_order(rows: Any, budget: int) -> None:
    check_rounds(shared_out(copies(*((rank, *box) for rank, box in rows), itemsize=2), slab=64, budget=budget))


def test_sources_that_ranks_may_mean_differently_are_not_shared() -> None:
    table = copies(*((rank, (64,), (0,), (64,)) for rank in range(4)))
    assert shared_out(table, shareable=[False]).alone.all()
