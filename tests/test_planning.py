"""Plans without files: what is filled, what is missing, what is twice, and what planning costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshload
from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.mesh import Mesh, sharding
from meshload.pieces import Pieces, piece, table, union
from meshload.planning import Job, Plan, Targets, meetings, plan, plan_array
from meshload.testing import InMemory, Nothing, ramp, same_bits
from meshload.wanting import Wanted, want_sharded

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

F4 = np.dtype("f4")


def sharded(name: str, shape: tuple[int, int], counts: tuple[int, int], at: int = 0) -> Array:
    """Return an array whose boxes lie in one file per rank of a grid."""
    values = ramp(name, shape)
    tables = []
    for i, rows in enumerate(np.array_split(np.arange(shape[0]), counts[0])):
        for j, columns in enumerate(np.array_split(np.arange(shape[1]), counts[1])):
            box = values[np.ix_(rows, columns)]
            start = (int(rows[0]) if len(rows) else 0, int(columns[0]) if len(columns) else 0)
            source = InMemory(f"rank-{i * counts[1] + j}", bytes(at) + box.tobytes())
            tables.append(piece(source, at, box.shape, 4).place(start))
    return Array(name, F4, shape, union(tables))


def wanted_on(array: Array, mesh: Mesh, *axes: str | None) -> Plan:
    wanted = Wanted()
    want_sharded(wanted, array.name, array, sharding(axes), mesh, range(mesh.size))
    return Plan(wanted.targets, plan(wanted.jobs(), wanted.targets).copies)


# --- exactly once -----------------------------------------------------------------------------------------------------


@given(st.data())
def test_every_wanted_element_is_copied_once_from_where_it_is_stored(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(0, 9), st.integers(1, 9)))
    stored = sharded("w", shape, data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3))), at=data.draw(st.integers(0, 5)))
    mesh = Mesh(("a", "b"), (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))))
    made = wanted_on(stored, mesh, *data.draw(st.permutations(["a", "b"])))
    copies = made.copies
    buffers = [np.full(t.shape, -1, np.float32) for t in made.targets]
    times = [np.zeros(t.size, int) for t in made.targets]
    for n in range(len(copies)):
        for index in np.ndindex(tuple(copies.shape[n])):
            source = copies.sources[copies.source[n]]
            at = int(copies.offset[n] + np.dot(index, copies.strides[n]))
            to = int(copies.target_offset[n] + np.dot(index, copies.target_strides[n])) // 4
            buffers[copies.target[n]].reshape(-1)[to] = np.frombuffer(source.data, F4, 1, at)[0]  # type: ignore[attr-defined]
            times[copies.target[n]][to] += 1
    assert all((t == 1).all() for t in times)
    values = ramp("w", shape)
    for buffer, target in zip(buffers, made.targets, strict=True):
        assert target.box is not None
        assert same_bits(buffer, values[target.box.slices])


@given(st.data())
def test_meetings_are_all_pairs_of_rows_that_meet(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 3))

    def rows() -> Pieces:
        n = data.draw(st.integers(0, 6))
        start = np.asarray([[data.draw(st.integers(0, 5)) for _ in range(ndim)] for _ in range(n)]).reshape(n, ndim)
        shape = np.asarray([[data.draw(st.integers(1, 4)) for _ in range(ndim)] for _ in range(n)]).reshape(n, ndim)
        return table(("f",), np.zeros(n, int), np.zeros(n, int), start, shape, np.ones_like(shape))

    one, other = rows(), rows()
    plain = {
        (i, j)
        for i in range(len(one))
        for j in range(len(other))
        if all(max(one.start[i, d], other.start[j, d]) < min(one.stop[i, d], other.stop[j, d]) for d in range(ndim))
    }
    found = list(zip(*(c.tolist() for c in meetings(one, other)), strict=True))
    assert sorted(found) == sorted(plain)


def many(count: int, seed: int) -> tuple[Checkpoint, dict[str, tuple[str | None, ...]]]:
    """Return a checkpoint of many small arrays of 1 to 3 dims, some of them in several files, and a layout for them."""
    rng = np.random.default_rng(seed)
    arrays, layout = {}, {}
    for i in range(count):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        name = f"w{i}"
        if len(shape) == 2 and rng.random() < 0.5:
            arrays[name] = sharded(name, shape, (int(rng.integers(1, 3)), int(rng.integers(1, 3))))
        else:
            arrays[name] = Array(name, F4, shape, piece(InMemory(name, ramp(name, shape).tobytes()), 0, shape, 4))
        layout[name] = tuple(rng.permutation(["tp", None, None])[: len(shape)].tolist())
    return Checkpoint(arrays, "memory"), layout


@given(count=st.integers(2, 12), seed=st.integers(0, 1 << 30), rank=st.integers(0, 2))
def test_arrays_joined_together_are_those_joined_one_by_one(count: int, seed: int, rank: int) -> None:
    checkpoint, layout = many(count, seed)

    def found() -> set[tuple[object, ...]]:
        c = meshload.plan(checkpoint, mesh="tp=3", rank=rank, layout=layout).copies
        columns = (c.offset, c.strides, c.target, c.target_offset, c.target_strides, c.shape, c.itemsize)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {(id(c.sources[s]), *map(str, row)) for s, row in zip(c.source.tolist(), rows, strict=True)}

    together = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshload.planning.SMALL", 0)
        assert found() == together


def test_a_thousand_arrays_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(a: Pieces, b: Pieces) -> object:
        calls.append(len(a))
        return meetings(a, b)

    monkeypatch.setattr("meshload.planning.meetings", counted)
    checkpoint, layout = many(1000, 1)
    made = meshload.plan(checkpoint, mesh="tp=3", rank=1, layout=layout)
    assert len(calls) == 6  # wanted with stored, and stored with itself, for 1, 2 and 3 dims
    assert made.wanted_bytes == sum(t.nbytes for t in made.targets)


def test_of_arrays_joined_together_those_with_a_hole_are_named() -> None:
    checkpoint, layout = many(50, 2)
    broken = {"w7", "w31"}
    holes = {n: Array(n, F4, (8,), table((Nothing("f", 64),), [0], [0], [[0]], [[3]], [[4]])) for n in broken}
    lacking = Checkpoint({**checkpoint.arrays, **holes}, "memory")
    with pytest.raises(meshload.MissingPieces) as caught:
        meshload.plan(lacking, layout={**layout, **dict.fromkeys(broken, (None,))}, mesh="tp=3", rank=0)
    assert {word for word in str(caught.value).replace(":", " ").replace(",", " ").split() if word.startswith("w")} == broken


# --- holes, overlaps, copies ------------------------------------------------------------------------------------------


def test_a_hole_names_array_rank_and_both_numbers() -> None:
    stored = sharded("layers.7.mlp.up", (8, 4), (4, 1))
    lacking = Array(stored.name, F4, stored.shape, stored.pieces.take(stored.pieces.start[:, 0] != 6))
    with pytest.raises(meshload.MissingPieces) as caught:
        wanted_on(lacking, Mesh(("tp",), (2,)), "tp", None)
    assert str(caught.value) == ("layers.7.mlp.up: rank 1 needs 16 elements of layers.7.mlp.up, the checkpoint holds 8 of them")


def test_a_hole_that_a_rank_does_not_need_is_none_for_it() -> None:
    stored = sharded("w", (8, 4), (4, 1))
    lacking = Array("w", F4, (8, 4), stored.pieces.take(stored.pieces.start[:, 0] != 6))
    wanted = Wanted()
    want_sharded(wanted, "w", lacking, sharding(["tp", None]), Mesh(("tp",), (2,)), [0])
    assert plan(wanted.jobs(), wanted.targets).copies.nbytes == 64


def test_several_holes_are_one_error_with_all_names() -> None:
    nothing = table((Nothing("f", 8),), [0], [0], [[0]], [[2]], [[4]])
    checkpoint = Checkpoint({f"w{i}": Array(f"w{i}", F4, (4,), nothing) for i in range(12)}, "memory")
    with pytest.raises(meshload.MissingPieces, match=r"w0: rank 0 needs 4 .*holds 2.*w9: .* and 2 more \(12 in all\)"):
        meshload.plan(checkpoint)


def overlapping(*boxes: tuple[int, int]) -> Array:
    """Return an array of 8 elements, stored in one file per `(start, stop)`."""
    tables = [piece(InMemory(f"f{i}", bytes(range(64)) * 4), 0, (b - a,), 4).place((a,)) for i, (a, b) in enumerate(boxes)]
    return Array("w", F4, (8,), union(tables))


@pytest.mark.parametrize("boxes", [[(0, 5), (3, 8)], [(0, 8), (2, 4)], [(0, 4), (4, 8), (3, 5)]])
def test_elements_stored_twice_in_different_boxes_raise_and_name_both_files(boxes: list[tuple[int, int]]) -> None:
    with pytest.raises(
        meshload.Overlap, match=r"w .*: elements are stored twice, in f\d \(start .*\) and in f\d .*not the same box"
    ):
        plan_array(overlapping(*boxes))


def test_a_hole_beside_an_overlap_is_found_though_the_sum_is_right() -> None:
    with pytest.raises((meshload.MissingPieces, meshload.Overlap)):
        plan_array(overlapping((0, 4), (2, 6)))


def test_b04_equal_copies_are_read_once_from_the_first() -> None:
    values = ramp("norm", (16,))
    copies = [piece(InMemory(f"rank-{i}", values.tobytes()), 0, (16,), 4) for i in range(8)]
    made = plan_array(Array("norm", F4, (16,), union(copies)))
    assert (made.read_bytes, made.wanted_bytes, len(made.copies)) == (64, 64, 1)
    assert made.files() == {"rank-0": 64}


def test_b04_scalars_have_copies_too() -> None:
    copies = union([piece(InMemory(f"rank-{i}", bytes(4)), 0, (), 4) for i in range(3)])
    assert plan_array(Array("step", F4, (), copies)).read_bytes == 4


def test_b53_arrays_of_no_elements_take_no_reads() -> None:
    for shape, expected in (((2, 0), (1, 0)), ((0, 4), (0, 4))):
        made = wanted_on(Array("w", F4, shape, piece(Nothing("f", 0), 0, shape, 4)), Mesh(("tp",), (2,)), "tp", None)
        assert [t.shape for t in made.targets] == [expected] * 2
        assert (made.reads, made.read_bytes, made.wanted_bytes) == (0, 0, 0)


def test_a_truncated_source_is_found_before_it_is_read() -> None:
    array = Array("w", F4, (8,), piece(Nothing("model.safetensors", 30), 0, (8,), 4))
    with pytest.raises(meshload.FormatError, match=r"w: bytes 0 to 32 are wanted of model.safetensors, which has 30"):
        plan_array(array)
    assert plan_array(array[:7]).read_bytes == 28
    before = Array("w", F4, (8,), piece(Nothing("f", 99), -4, (8,), 4))
    with pytest.raises(meshload.FormatError, match=r"bytes -4 to 28 are wanted of f, which has 99"):
        plan_array(before)


def test_a_reversed_array_lies_inside_its_source() -> None:
    backwards = Array("w", F4, (4,), table((InMemory("f", ramp("w", (4,)).tobytes()),), [0], [12], [[0]], [[4]], [[-4]]))
    assert same_bits(backwards, ramp("w", (4,))[::-1])


def test_one_element_may_be_wanted_by_many() -> None:
    made = wanted_on(sharded("w", (4, 4), (2, 2)), Mesh(("tp", "dp"), (2, 4)), "tp", None)
    assert len(made.targets) == 8
    assert made.wanted_bytes == 4 * 64


# --- missing and unexpected -------------------------------------------------------------------------------------------


def toy() -> Checkpoint:
    arrays = {name: Array(name, F4, (4, 4), piece(Nothing("f", 1 << 10), 64 * i, (4, 4), 4)) for i, name in enumerate("abc")}
    return Checkpoint(arrays, "memory", unavailable={"d": "the index puts it in x.safetensors, which is not there"})


def test_missing_names_come_with_their_reasons_and_ranks() -> None:
    like = {name: np.zeros((4, 4), np.float32) for name in ("a", "d", "e")}
    with pytest.raises(meshload.MissingArray) as caught:
        meshload.plan(toy(), like=like, into="numpy")
    text = str(caught.value)
    assert "d: the index puts it in x.safetensors, which is not there (wanted by rank 0)" in text
    assert "e: the checkpoint (memory, 3 arrays) never lists this name (wanted by rank 0)" in text
    assert "missing='ignore'" in text


def test_missing_and_unexpected_are_listed() -> None:
    like = {name: np.zeros((4, 4), np.float32) for name in ("a", "d", "e")}
    made = meshload.plan(toy(), like=like, into="numpy", missing="ignore")
    assert (made.missing, made.unexpected) == (("d", "e"), ("b", "c"))
    assert [t.name for t in made.targets] == ["a"]


def test_what_is_listed_and_not_there_is_missed_where_all_is_wanted() -> None:
    with pytest.raises(meshload.MissingArray, match=r"d: the index puts it in x\.safetensors"):
        meshload.plan(toy())
    assert meshload.plan(toy(), missing="ignore").missing == ("d",)


def test_what_missing_may_be_is_said() -> None:
    with pytest.raises(meshload.LayoutError, match="'error' or 'ignore' was expected"):
        meshload.plan(toy(), missing="skip")


# --- a plan is a value ------------------------------------------------------------------------------------------------


def test_a_plan_of_all_ranks_is_the_sum_of_each() -> None:
    array = sharded("w", (12, 8), (3, 2))
    layout = {"w": ("dp", "tp")}
    whole = meshload.plan(Checkpoint({"w": array}, "memory"), mesh="dp=3,tp=2", rank="all", layout=layout)
    one = [
        meshload.plan(Checkpoint({"w": array}, "memory"), mesh="dp=3,tp=2", rank=r, layout=layout, into="numpy") for r in range(6)
    ]
    assert whole.wanted_bytes == sum(p.wanted_bytes for p in one) == 12 * 8 * 4
    assert whole.reads == sum(p.reads for p in one)
    assert whole.read_bytes == sum(p.read_bytes for p in one)
    assert sorted(whole.each()) == list(range(6))
    for rank, made in whole.each().items():
        assert [t.box for t in made.targets] == [t.box for t in one[rank].targets]
        assert made.wanted_bytes == one[rank].wanted_bytes


def test_counts_per_array_add_up() -> None:
    made = meshload.plan(toy(), merge_gap=0, exclude="d")
    assert [made.of(name).wanted_bytes for name in "abc"] == [64, 64, 64]
    assert "3 arrays, 192 bytes wanted" in str(made)
    assert made.result_bytes == 192


def test_ranks_without_anything_have_no_targets() -> None:
    wanted = Wanted()
    made = Plan(wanted.targets, plan(wanted.jobs(), wanted.targets).copies)
    assert (made.reads, made.read_bytes, made.peak_bytes, made.wanted_bytes) == (0, 0, 0, 0)


def test_jobs_that_want_nothing_are_passed_over() -> None:
    nothing = Job("w", 4, piece(0, 0, (0, 3), 4), piece(Nothing("f", 0), 0, (0, 3), 4))
    assert len(plan([nothing], Targets()).copies) == 0


# --- cost -------------------------------------------------------------------------------------------------------------

B41 = """
import sys, time
import numpy as np
import meshload
from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.pieces import table
from meshload.testing import Nothing

n = int(sys.argv[1])
rows = 4 * n
sources = tuple(Nothing(f"rank-{i}", 1 << 40) for i in range(n))
starts = np.stack([np.arange(n) * 4, np.zeros(n, int)], axis=1)
shape, strides = np.broadcast_to([4, 8], (n, 2)), np.broadcast_to([32, 4], (n, 2))
arrays = {
    f"w{i}": Array(f"w{i}", np.dtype("f4"), (rows, 8), table(sources, np.arange(n), np.full(n, 128 * i), starts, shape, strides))
    for i in range(n)
}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak, which a fork of a large process brings with it
before = time.process_time()
made = meshload.plan(Checkpoint(arrays, "memory"), mesh=f"dp={n}", rank="all", layout={"*": ("dp",)})
seconds = time.process_time() - before
assert made.wanted_bytes == n * rows * 32, made.wanted_bytes
assert len(made.targets) == len(made.copies) == n * n
if n == 256:
    before = time.process_time()
    assert made.read_bytes == made.wanted_bytes
    assert time.process_time() - before < 10, "counting what each rank reads"
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) * 1024)
"""


def test_b41_a_plan_of_1024_arrays_on_1024_ranks_costs_what_its_rows_cost(run_python: Callable[..., str]) -> None:
    def cost(n: int) -> tuple[float, int]:
        runs = [run_python(B41, n).split() for _ in range(2)]
        return min(float(r[0]) for r in runs), min(int(r[1]) for r in runs)

    found = {n: cost(n) for n in (256, 512, 1024)}
    assert found[1024][0] < 5
    assert found[1024][1] < 1 << 30
    per_row = {n: seconds / n**2 for n, (seconds, _) in found.items()}
    assert per_row[1024] < 3 * per_row[512]
    assert per_row[1024] < 3 * per_row[256]


def test_one_rank_costs_what_it_wants_not_what_is_stored() -> None:
    n = 20_000
    starts = np.stack([np.arange(n) * 4, np.zeros(n, int)], axis=1)
    stored = table(
        (Nothing("f", 1 << 40),), np.zeros(n, int), np.arange(n) * 128, starts, np.full((n, 2), [4, 8]), np.full((n, 2), [32, 4])
    )
    made = plan_array(Array("w", F4, (4 * n, 8), stored)[40_000:40_010])
    assert len(made.copies) <= 4
