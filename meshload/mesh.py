"""A mesh is named axes with sizes; a sharding says which mesh axes cut which dim of an array.

A sharding answers one question: the boxes of rank r. A dim is cut by its axes one after another, outermost first, each into
`ceil` parts, so that the last may be short or empty. That is DTensor's rule, and JAX's wherever JAX allows the cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .box import Box, Shape
from .errors import LayoutError
from .pieces import Ints

Axes = str | Sequence[str] | None
"""What cuts one dim: a mesh axis, several of them, outermost first, or none."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first; ranks count row-major.

    >>> Mesh(("pp", "tp"), (2, 4)).coordinates(5)
    {'pp': 1, 'tp': 1}
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    chosen: str = "sizes were given"
    """How the sizes came about, for the plan and the log."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise LayoutError(f"a mesh has distinct axes with one size each: {self.names}, {self.sizes}")
        for name, n in zip(self.names, self.sizes, strict=True):
            if n < 1:
                raise LayoutError(f"mesh axis {name!r} has size {n}, at least 1 was expected")
        if math.prod(self.sizes) >= 1 << 62:
            raise LayoutError(f"mesh {self} has {math.prod(self.sizes)} ranks, more than can be counted")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def __contains__(self, axis: object) -> bool:
        return axis in self.names

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in zip(self.names, self.sizes, strict=True))

    def size_of(self, axis: str) -> int:
        return self.sizes[self._axis(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is not in mesh {self}, which has {self.size} ranks")
        return dict(zip(self.names, map(int, np.unravel_index(rank, self.sizes)), strict=True)) if self.names else {}

    def along(self, axis: str, ranks: Ints) -> Ints:
        """Return the places of many ranks along one axis."""
        d = self._axis(axis)
        places: Ints = (ranks // math.prod(self.sizes[d + 1 :])) % self.sizes[d]
        return places

    def _axis(self, axis: str) -> int:
        if axis not in self.names:
            raise LayoutError(f"the mesh has no axis {axis!r}; its axes are {', '.join(self.names) or 'none'}")
        return self.names.index(axis)


def parse_mesh(text: str) -> Mesh:
    """Read a mesh.

    >>> str(parse_mesh("pp=2, tp=4"))
    'pp=2,tp=4'
    """
    sizes: dict[str, int] = {}
    for word in text.split(","):
        name, equals, n = (w.strip() for w in word.partition("="))
        if not equals or not name.isidentifier() or not n.isascii() or not n.isdigit():
            raise LayoutError(f"mesh {text!r}: {word.strip()!r} is not AXIS=SIZE, as in pp=2,tp=4,dp=1")
        if name in sizes:
            raise LayoutError(f"mesh {text!r} names axis {name!r} twice")
        sizes[name] = int(n)
    return Mesh(tuple(sizes), tuple(sizes.values()))


def parts(n: int, count: int, i: int) -> tuple[int, int]:
    """Return the range of part `i` when `n` elements are cut into `count` parts by ceil.

    >>> [parts(13, 4, i) for i in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 13)]
    """
    size = -(-n // count)
    return min(i * size, n), min((i + 1) * size, n)


def even_parts(n: int, count: int, i: int) -> tuple[int, int]:
    """Return the range of part `i` of sizes that differ by at most 1, the larger ones first: pipeline stages.

    >>> [even_parts(7, 3, i) for i in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    small, larger = divmod(n, count)
    start = i * small + min(i, larger)
    return start, start + small + (i < larger)


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis cutting a dim. `factor` > 1 is DTensor's strided shard: a rank takes its part of each of `factor` blocks."""

    axis: str
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which mesh axes cut which dim of an array, in the order of cutting."""

    cuts: tuple[tuple[Cut, ...], ...]
    """One entry per dim."""

    def boxes(self, shape: Shape, mesh: Mesh, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a rank, in the order in which its local array holds them; none where it holds nothing."""
        self._fits(shape)
        return _boxes(self, tuple(shape), mesh, int(rank))

    def boxes_of_ranks(self, shape: Shape, mesh: Mesh, ranks: Ints) -> tuple[Ints, Ints]:
        """Return `(n, d)` starts and shapes of the one box of each of `n` ranks; not for strided shards."""
        self._fits(shape)
        start = np.zeros((len(ranks), len(shape)), np.int64)
        size = np.broadcast_to(np.asarray(shape, np.int64), start.shape).copy()
        for d, cuts in enumerate(self.cuts):
            for cut in cuts:
                if cut.factor != 1:
                    raise ValueError("a strided shard has several boxes")
                part = -(-size[:, d] // mesh.size_of(cut.axis))
                skip = np.minimum(mesh.along(cut.axis, ranks) * part, size[:, d])
                start[:, d] += skip
                size[:, d] = np.minimum(part, size[:, d] - skip)
        return start, size

    @property
    def is_strided(self) -> bool:
        return any(cut.factor != 1 for cuts in self.cuts for cut in cuts)

    def parts_of(self, dim: int, mesh: Mesh) -> int:
        """Return into how many parts a dim is cut."""
        return math.prod(mesh.size_of(cut.axis) for cut in self.cuts[dim])

    def _fits(self, shape: Shape) -> None:
        if len(shape) != len(self.cuts):
            raise LayoutError(f"a sharding of {len(self.cuts)} dims does not fit an array of shape {shape}")


@lru_cache(maxsize=1024)
def _boxes(sharding: Sharding, shape: Shape, mesh: Mesh, rank: int) -> tuple[Box, ...]:
    """Return what `Sharding.boxes` does: most arrays of a model are cut as another is."""
    at = mesh.coordinates(rank)
    runs = [_runs(n, cuts, mesh, at) for n, cuts in zip(shape, sharding.cuts, strict=True)]
    return tuple(Box(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in itertools.product(*runs))


def sharding(dims: Iterable[Axes]) -> Sharding:
    """Return a sharding from one axis, several or None per dim.

    >>> sharding(["tp", None]).boxes((4, 3), Mesh(("tp",), (2,)), 1)
    (Box(start=(2, 0), shape=(2, 3)),)
    """
    cuts = tuple(tuple(Cut(axis) for axis in axes_of(axes)) for axes in dims)
    used = [cut.axis for dim in cuts for cut in dim]
    if len(set(used)) != len(used):
        raise LayoutError(f"a sharding uses each mesh axis once: {used}")
    return Sharding(cuts)


def axes_of(axes: Axes) -> tuple[str, ...]:
    """Return what cuts a dim as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _runs(n: int, cuts: Sequence[Cut], mesh: Mesh, at: Mapping[str, int]) -> list[tuple[int, int]]:
    runs = [(0, n)]
    for cut in cuts:
        held = sum(b - a for a, b in runs)
        count = mesh.size_of(cut.axis)
        wanted = []
        for block in range(cut.factor):  # uneven: DTensor cuts into blocks first, then each block into parts
            low, high = parts(held, cut.factor, block)
            start, stop = parts(high - low, count, at[cut.axis])
            wanted.append((low + start, low + stop))
        runs = [piece for start, stop in wanted for piece in _clip(runs, start, stop)]
    joined: list[tuple[int, int]] = []
    for a, b in runs:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif b > a:
            joined.append((a, b))
    return joined or [(n, n)]


def _clip(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of a list of runs, counted through all of them."""
    found, at = [], 0
    for a, b in runs:
        low, high = max(start - at, 0), min(stop - at, b - a)
        if high > low:
            found.append((a + low, a + high))
        at += b - a
    return found


def mesh_of(value: Any) -> Mesh | None:
    """Return the mesh that sizes mean: a `Mesh`, `{"pp": 2}` or `"pp=2,tp=4"`; None for names alone or foreign objects."""
    if isinstance(value, Mesh):
        return value
    if isinstance(value, str):
        return parse_mesh(value) if "=" in value else None
    if isinstance(value, Mapping):
        for name, n in value.items():
            if not isinstance(name, str) or isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise LayoutError(f"mesh {dict(value)!r}: axis names with whole sizes were expected, as in {{'pp': 2, 'tp': 4}}")
        return Mesh(tuple(value), tuple(int(n) for n in value.values()))
    return None


def fitted(names: Sequence[str], world: int, per_node: int) -> Mesh:
    """Return a mesh for axes without sizes: one axis takes all; else `tp` the processes of a node, `pp` the nodes, the rest 1."""
    names = tuple(names)
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise LayoutError(f"mesh {names!r}: names of axes were expected, as in ('pp', 'tp', 'dp'), or sizes, as in 'pp=2,tp=4'")
    if len(names) == 1:
        return Mesh(names, (world,), f"its one axis takes all {world} processes")
    if world == 1:
        return Mesh(names, (1,) * len(names), "there is a single process")
    nodes = world // per_node if world % per_node == 0 else 0
    rule = {"tp": per_node, "pp": nodes}
    sizes = tuple(rule.get(name, 1) for name in names)
    if math.prod(sizes) != world or not nodes:
        example = ",".join(f"{name}={world if i == 0 else 1}" for i, name in enumerate(names))
        raise LayoutError(
            f"mesh {', '.join(names)}: tp = {per_node} processes per node and pp = {nodes} nodes do not fill the {world} processes "
            f"with these axes; give the sizes, as in mesh={example!r}"
        )
    return Mesh(names, sizes, f"tp = {per_node} processes per node, pp = {nodes} nodes")
