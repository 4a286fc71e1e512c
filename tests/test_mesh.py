"""Meshes and shardings, against `jax.sharding` and torch's DTensor."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from meshload.box import Box
from meshload.errors import LayoutError
from meshload.mesh import Cut, Mesh, Sharding, even_parts, fitted, mesh_of, parse_mesh, parts, sharding

# --- oracles ----------------------------------------------------------------------------------------------------------

MESHES = [{"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 1, "y": 8}]


def specs(axes: list[str], ndim: int) -> Iterator[list[list[str]]]:
    """Return every way to cut `ndim` dims by some axes, each used once, in every order."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for dims in itertools.combinations_with_replacement(range(ndim), count):
                yield [[a for a, d in zip(chosen, dims, strict=True) if d == dim] for dim in range(ndim)]


JAX_PROGRAM = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
found = []
for sizes, shape, spec in json.load(open(sys.argv[1])):
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    where = NamedSharding(mesh, P(*(tuple(axes) or None for axes in spec))).devices_indices_map(tuple(shape))
    boxes = {d.id: [s.indices(n)[:2] for s, n in zip(where[d], shape)] for d in where}
    found.append([boxes[d.id] for d in mesh.devices.flat])
print(json.dumps(found))
"""


def test_boxes_are_those_of_jax(run_python: Callable[..., str], tmp_path: Any) -> None:
    pytest.importorskip("jax")
    cases = []
    for sizes in MESHES:
        for shape in [(8,), (16, 8), (8, 8, 16)]:
            for spec in specs(list(sizes), len(shape)):
                if all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, spec, strict=True)):
                    cases.append((sizes, shape, spec))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    expected = json.loads(run_python(JAX_PROGRAM, tmp_path / "cases.json", env=env))
    assert len(cases) > 150
    for (sizes, shape, spec), boxes in zip(cases, expected, strict=True):
        mesh = mesh_of(sizes)
        assert mesh is not None
        cut = sharding(spec)
        ranks = np.arange(mesh.size)
        start, size = cut.boxes_of_ranks(shape, mesh, ranks)
        for rank in range(8):
            ours = cut.boxes(shape, mesh, rank)
            assert [[s.start, s.stop] for s in ours[0].slices] == boxes[rank], (sizes, shape, spec, rank)
            assert len(ours) == 1
            assert Box(tuple(start[rank].tolist()), tuple(size[rank].tolist())) == ours[0]


def dtensor_cases() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[int | None]]]:
    """Return a shape, mesh sizes, and which dim each mesh dim cuts."""
    for sizes in [(2,), (3,), (8,), (2, 4), (3, 2), (2, 2, 2), (2, 1, 3)]:
        for shape in [(8,), (13,), (1,), (0,), (5, 7), (8, 1), (3, 4, 10)]:
            yield from ((shape, sizes, list(cut)) for cut in itertools.product([None, *range(len(shape))], repeat=len(sizes)))


def test_boxes_are_those_of_dtensor_uneven_ones_too() -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    from torch.distributed.tensor import Replicate, Shard

    count = 0
    for shape, sizes, cut in dtensor_cases():
        names = tuple(f"a{i}" for i in range(len(sizes)))
        mesh = Mesh(names, sizes)
        placements = [Replicate() if d is None else Shard(d) for d in cut]
        ours = sharding([[names[i] for i, c in enumerate(cut) if c == d] for d in range(len(shape))])
        start, size = ours.boxes_of_ranks(shape, mesh, np.arange(mesh.size))
        for rank in range(mesh.size):
            at = list(mesh.coordinates(rank).values())
            local, offset = utils._compute_local_shape_and_global_offset(shape, sizes, at, placements)
            (box,) = ours.boxes(shape, mesh, rank)
            assert (box.shape, tuple(size[rank])) == (tuple(local), tuple(local)), (shape, sizes, cut, rank)
            if 0 not in local:
                assert (box.start, tuple(start[rank])) == (tuple(offset), tuple(offset)), (shape, sizes, cut, rank)
            count += 1
    assert count > 2000


def test_strided_boxes_hold_what_dtensor_holds() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    count = 0
    for n, sizes, factors in itertools.product(
        (8, 16, 24, 13, 5, 1), [(2,), (4,), (2, 2), (3, 2), (2, 2, 2)], [(2,), (1, 2), (4, 2), (2, 1, 3)]
    ):
        names = tuple(f"a{i}" for i in range(len(sizes)))
        mesh = Mesh(names, sizes)
        used = [factors[i % len(factors)] for i in range(len(sizes))]
        ours = Sharding((tuple(Cut(a, f) for a, f in zip(names, used, strict=True)),))
        for rank in range(mesh.size):
            local = torch.arange(n)
            for i, f in enumerate(used):
                placement = Shard(0) if f == 1 else _StridedShard(0, split_factor=f)
                pieces, _ = placement._split_tensor(local, sizes[i], with_padding=False)
                local = pieces[mesh.coordinates(rank)[names[i]]]
            boxes = ours.boxes((n,), mesh, rank)
            found = [int(i) for box in boxes for i in np.arange(n)[box.slices]]
            assert found == local.tolist(), (n, sizes, used, rank)
            count += 1
    assert count > 300


def test_b37_a_strided_shard_is_two_boxes() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    cut = Sharding(((Cut("dp", 2), Cut("tp")),))
    held = {rank: [i for box in cut.boxes((8,), mesh, rank) for i in range(box.start[0], box.stop[0])] for rank in range(4)}
    assert held == {0: [0, 1], 2: [2, 3], 1: [4, 5], 3: [6, 7]}
    values = np.arange(10, 18)
    boxes = Sharding(((Cut("dp", 2),),)).boxes((8,), Mesh(("dp",), (2,)), 0)
    assert boxes == (Box((0,), (2,)), Box((4,), (2,)))
    assert np.concatenate([values[b.slices] for b in boxes]).tolist() == [10, 11, 14, 15]
    with pytest.raises(ValueError, match="several boxes"):
        cut.boxes_of_ranks((8,), mesh, np.arange(4))


def test_strided_shards_of_two_dims_are_boxes_in_local_order() -> None:
    mesh = Mesh(("a", "b"), (2, 2))
    cut = Sharding(((Cut("a", 2),), (Cut("b", 2),)))
    values = np.arange(64).reshape(8, 8)
    boxes = cut.boxes((8, 8), mesh, 3)
    assert [b.start for b in boxes] == [(2, 2), (2, 6), (6, 2), (6, 6)]
    local = np.block([[values[boxes[0].slices], values[boxes[1].slices]], [values[boxes[2].slices], values[boxes[3].slices]]])
    assert np.array_equal(local, values[[2, 3, 6, 7]][:, [2, 3, 6, 7]])


# --- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "count", "expected"),
    [
        (13, 4, [4, 4, 4, 1]),
        (13, 5, [3, 3, 3, 3, 1]),
        (16, 6, [3, 3, 3, 3, 3, 1]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (9, 4, [3, 3, 3, 0]),
    ],
)
def test_parts_are_by_ceil_and_cover_all(n: int, count: int, expected: list[int]) -> None:
    found = [parts(n, count, i) for i in range(count)]
    assert [b - a for a, b in found] == expected
    assert [i for a, b in found for i in range(a, b)] == list(range(n))


@pytest.mark.parametrize(
    ("n", "count", "expected"), [(30, 4, [8, 8, 7, 7]), (7, 4, [2, 2, 2, 1]), (10, 3, [4, 3, 3]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])]
)
def test_even_parts_differ_by_at_most_one(n: int, count: int, expected: list[int]) -> None:
    found = [even_parts(n, count, i) for i in range(count)]
    assert [b - a for a, b in found] == expected
    assert [i for a, b in found for i in range(a, b)] == list(range(n))


def test_several_axes_cut_outermost_first() -> None:
    mesh = Mesh(("a", "b"), (2, 3))
    rows = [sharding([["a", "b"]]).boxes((12,), mesh, r)[0].start[0] for r in range(6)]
    columns = [sharding([["b", "a"]]).boxes((12,), mesh, r)[0].start[0] for r in range(6)]
    assert (rows, columns) == ([0, 2, 4, 6, 8, 10], [0, 4, 8, 2, 6, 10])


def test_an_axis_is_used_once() -> None:
    with pytest.raises(LayoutError, match="each mesh axis once"):
        sharding(["tp", "tp"])


def test_a_sharding_of_other_dims_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"sharding of 1 dims does not fit an array of shape \(2, 3\)"):
        sharding(["tp"]).boxes((2, 3), Mesh(("tp",), (2,)), 0)


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(LayoutError, match="the mesh has no axis 'ep'; its axes are tp"):
        sharding(["ep"]).boxes((2,), Mesh(("tp",), (2,)), 0)


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_ranks_count_row_major() -> None:
    mesh = parse_mesh("pp=2,tp=3")
    assert [tuple(mesh.coordinates(r).values()) for r in range(6)] == list(itertools.product(range(2), range(3)))
    assert mesh.along("tp", np.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]
    assert mesh.along("pp", np.arange(6)).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_mesh_is_read_from_text_dict_and_mesh() -> None:
    assert mesh_of("pp=2, tp=4") == mesh_of({"pp": 2, "tp": np.int64(4)}) == Mesh(("pp", "tp"), (2, 4))
    assert mesh_of(Mesh(("a",), (3,))) == Mesh(("a",), (3,))
    assert mesh_of("tp") is None
    assert mesh_of(("pp", "tp")) is None


@pytest.mark.parametrize("text", ["tp=", "=2", "tp=2,", "tp=-1", "tp=2.0", "tp=2,tp=3", "t p=2", "tp=2;pp=1", "tp=²"])
def test_a_text_that_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="mesh"):
        mesh_of(text)


@pytest.mark.parametrize("sizes", [{"tp": 2.0}, {"tp": "2"}, {"tp": True}, {1: 2}])
def test_a_dict_that_is_no_mesh_is_refused(sizes: Any) -> None:
    with pytest.raises(LayoutError, match="axis names with whole sizes"):
        mesh_of(sizes)


def test_an_axis_of_no_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="'tp' has size 0"):
        mesh_of("tp=0")


def test_a_rank_outside_is_refused_with_both_numbers() -> None:
    for rank in (-1, 4):
        with pytest.raises(LayoutError, match=f"rank {rank} is not in mesh tp=4, which has 4 ranks"):
            Mesh(("tp",), (4,)).coordinates(rank)


@pytest.mark.parametrize(
    ("names", "world", "per_node", "sizes"),
    [
        (("pp", "tp", "dp"), 1, 1, (1, 1, 1)),
        (("tp",), 6, 2, (6,)),
        (("dp",), 16, 8, (16,)),
        (("pp", "tp"), 16, 8, (2, 8)),
        (("pp", "tp", "dp"), 16, 8, (2, 8, 1)),
        (("dp", "tp"), 8, 8, (1, 8)),
    ],
)
def test_axes_without_sizes_take_the_rule_of_thumb(
    names: tuple[str, ...], world: int, per_node: int, sizes: tuple[int, ...]
) -> None:
    assert fitted(names, world, per_node).sizes == sizes


@pytest.mark.parametrize(("names", "world", "per_node"), [(("dp", "tp"), 16, 8), (("dp", "ep"), 4, 4), (("pp", "tp"), 6, 4)])
def test_axes_that_do_not_fill_the_world_raise_and_show_how(names: tuple[str, ...], world: int, per_node: int) -> None:
    with pytest.raises(LayoutError, match=f"do not fill the {world} processes.*as in mesh='{names[0]}={world}"):
        fitted(names, world, per_node)
