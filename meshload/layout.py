"""A layout says which mesh axes cut which dim: a whole parallel plan in a few words.

`{"layer": "pp", "heads": "tp", "ffn": "tp", "vocab": "tp"}` is pipeline and tensor parallelism; what is not named is replicated.
For a rank it gives each elementary dim its extent, from which parts get their boxes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .errors import LayoutError
from .mesh import Axes, Mesh, axes_of, even_parts, parts

MOST_LAYERS = 1 << 17
"""More of them are a hostile config."""

CUT_BY_TP = ("heads", "ffn", "moe_ffn", "shared_ffn", "vocab")


@dataclass(frozen=True, slots=True)
class Extent:
    """What a rank holds of a dim: `count` elements from `start` on, in memory for `held` (more where it is padded)."""

    start: int
    count: int
    held: int


@dataclass(frozen=True)
class Layout:
    """Dims to mesh axes.

    `rows` are axes that cut dim 0 of each local array, as FSDP2 and ZeRO cut over dp. `pad` rounds a dim up to a multiple,
    filled with zeros. `stages` are the layers' counts per pipeline stage, where they are not even; `virtual` interleaves that
    many chunks of layers per stage.
    """

    axes: Mapping[str, Axes]
    rows: Axes = None
    pad: Mapping[str, int] = field(default_factory=dict)
    stages: Sequence[int] | None = None
    virtual: int = 1
    needs_axes: bool = True
    """Whether an axis that the mesh lacks is an error; the default layout cuts by the axes that are there."""

    def __post_init__(self) -> None:
        for what, axes in (*self.axes.items(), ("rows", self.rows)):
            if not (axes is None or isinstance(axes, (str, list, tuple))) or not all(isinstance(a, str) for a in axes_of(axes)):
                raise LayoutError(f"{what}: {axes!r} is no mesh axis, several of them or None")
            if len(set(axes_of(axes))) != len(axes_of(axes)):
                raise LayoutError(f"{what}: {axes!r} cuts by one axis twice")
        if not _is_count(self.virtual) or not all(map(_is_count, self.pad.values())):
            raise LayoutError(f"virtual={self.virtual!r}, pad={dict(self.pad)!r}: numbers of at least 1 were expected")
        if self.stages is not None and not (
            isinstance(self.stages, (list, tuple)) and all(n == 0 or _is_count(n) for n in self.stages)
        ):
            raise LayoutError(f"stages={self.stages!r}: a number of layers per stage was expected")

    @staticmethod
    def default(
        dp: str = "replicate",
        *,
        pad: Mapping[str, int] | None = None,
        stages: Sequence[int] | None = None,
        virtual: int = 1,
    ) -> Layout:
        """Return `layer` over pp, `heads`, `ffn` and `vocab` over tp, `expert` over ep, and dp replicated or `cut`.

        >>> Layout.default(dp="cut").rows
        'dp'
        """
        if dp not in ("replicate", "cut"):
            raise LayoutError(f"dp={dp!r}: 'replicate' or 'cut' was expected")
        axes: dict[str, Axes] = {"layer": "pp", "expert": "ep", **dict.fromkeys(CUT_BY_TP, "tp")}
        return Layout(axes, "dp" if dp == "cut" else None, pad or {}, stages, virtual, needs_axes=False)

    def cutting(self, dim: str, mesh: Mesh) -> tuple[str, ...]:
        """Return the mesh axes that cut a dim."""
        return self._there(axes_of(self.axes.get(dim)), mesh)

    def row_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the mesh axes that cut dim 0 of each local array."""
        return self._there(axes_of(self.rows), mesh)

    def _there(self, axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
        missing = [a for a in axes if a not in mesh]
        if missing and self.needs_axes:
            raise LayoutError(f"the layout cuts by axis {missing[0]!r}, the mesh has {', '.join(mesh.names) or 'no axes'}")
        return tuple(a for a in axes if a in mesh)

    def at(self, mesh: Mesh, rank: int, sizes: Mapping[str, int], joints: Mapping[str, Sequence[str]]) -> Local:
        """Return what a rank holds of each dim."""
        known = {*sizes, *joints}
        strange = [d for d in self.axes if d not in known] if self.needs_axes else []
        if strange:
            raise LayoutError(
                f"the layout cuts {', '.join(strange)}, no dims of this model; its dims are {', '.join(sorted(known))}"
            )
        inside = {"layer", *joints, *(d for dims in joints.values() for d in dims)}
        odd = [d for d in self.pad if d not in sizes or d in inside]
        if odd:
            raise LayoutError(f"pad: {', '.join(odd)} cannot be padded; {', '.join(sorted({*sizes} - inside))} can")
        return Local(self, mesh, rank, sizes, joints)


def _is_count(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 40


@dataclass(frozen=True)
class Local:
    """What one rank holds of each dim of a model."""

    layout: Layout
    mesh: Mesh
    rank: int
    sizes: Mapping[str, int]
    joints: Mapping[str, Sequence[str]]

    def extent(self, dim: str) -> Extent:
        """Return what the rank holds of an elementary dim, or of blocks of dims (`embed/128`)."""
        found = self._extents.get(dim)
        if found is None:
            found = self._extents[dim] = self._blocks(dim) if "/" in dim else self._plain(dim)
        return found

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of this rank's stage, in order."""
        n, axes = self._size("layer"), self.layout.cutting("layer", self.mesh)
        stage, count = self._place(axes)
        if n > MOST_LAYERS:
            raise LayoutError(f"the config says {n} layers, at most {MOST_LAYERS} are planned")
        if self.layout.stages is not None:
            counts = list(self.layout.stages)
            if len(counts) != count or sum(counts) != n:
                raise LayoutError(f"stages {counts} are {len(counts)} with {sum(counts)} layers; {count} with {n} were expected")
            start = sum(counts[:stage])
            return tuple(range(start, start + counts[stage]))
        if self.layout.virtual == 1:
            return tuple(range(*even_parts(n, count, stage)))
        chunks = count * self.layout.virtual
        if n % chunks:
            raise LayoutError(
                f"{n} layers over {count} stages with {self.layout.virtual} chunks each: {n} is not a multiple of {chunks}"
            )
        size = n // chunks
        return tuple(
            layer
            for chunk in range(self.layout.virtual)
            for layer in range((chunk * count + stage) * size, (chunk * count + stage + 1) * size)
        )

    @cached_property
    def is_first(self) -> bool:
        """Whether this is the first pipeline stage."""
        return self._place(self.layout.cutting("layer", self.mesh))[0] == 0

    @cached_property
    def is_last(self) -> bool:
        """Whether this is the last pipeline stage."""
        stage, count = self._place(self.layout.cutting("layer", self.mesh))
        return stage == count - 1

    def rows(self, n: int) -> tuple[int, int]:
        """Return the range of dim 0 of a local array of `n` rows that this rank keeps."""
        start, stop = 0, n
        at = self.mesh.coordinates(self.rank)
        for axis in self.layout.row_axes(self.mesh):
            low, high = parts(stop - start, self.mesh.size_of(axis), at[axis])
            start, stop = start + low, start + high
        return start, stop

    @cached_property
    def _extents(self) -> dict[str, Extent]:
        found: dict[str, Extent] = {}
        for joint, dims in self.joints.items():
            if self.layout.cutting(joint, self.mesh) and all(d in self.sizes for d in self._fine(joint)):
                both = [d for d in dims if self.layout.cutting(d, self.mesh)]
                if both:
                    raise LayoutError(f"the layout cuts {joint} and its part {both[0]}; cut one of them")
                found.update(self._cut_joint(joint))
        return found

    def _fine(self, dim: str) -> list[str]:
        return [f for d in self.joints[dim] for f in self._fine(d)] if dim in self.joints else [dim]

    def _cut_joint(self, joint: str) -> dict[str, Extent]:
        dims = self._fine(joint)
        sizes = [self._size(d) for d in dims]
        start, stop = self._cut(math.prod(sizes), self.layout.cutting(joint, self.mesh))
        found: dict[str, Extent] = {}
        low, high, inner = start, stop, math.prod(sizes)
        for i, (dim, n) in enumerate(zip(dims, sizes, strict=True)):
            inner //= n or 1
            if high <= low:
                found[dim] = Extent(0, 0, 0) if i == 0 else Extent(0, n, n)
            elif low // inner == (high - 1) // inner:
                found[dim] = Extent(low // inner, 1, 1)
                low, high = low % inner, (high - 1) % inner + 1
            elif low % inner == 0 and high % inner == 0:
                found[dim] = Extent(low // inner, (high - low) // inner, (high - low) // inner)
                found.update({d: Extent(0, m, m) for d, m in zip(dims[i + 1 :], sizes[i + 1 :], strict=True)})
                return found
            else:
                ranks = self._place(self.layout.cutting(joint, self.mesh))[1]
                of = " x ".join(f"{n} {d}" for d, n in zip(dims, sizes, strict=True))
                raise LayoutError(
                    f"{joint} {start} to {stop} of rank {self.rank} are no box of {of}: the cut must take whole {dim}, "
                    f"each {inner}, or lie within one; {math.prod(sizes)} {joint} over {ranks} ranks"
                )
        return found

    def _plain(self, dim: str) -> Extent:
        n = self._size(dim)
        axes = self.layout.cutting(dim, self.mesh)
        multiple = self.layout.pad.get(dim)
        padded = n if not multiple else -(-n // multiple) * multiple
        if dim == "layer":
            layers = self.layers
            if layers and layers[-1] - layers[0] + 1 != len(layers):
                raise LayoutError("interleaved stages hold no run of layers, so a stacked layer dim cannot be cut that way")
            return Extent(layers[0] if layers else n, len(layers), len(layers))
        start, stop = self._cut(padded, axes)
        if multiple and axes and padded % self._place(axes)[1]:
            raise LayoutError(
                f"{dim} padded to {padded} does not divide into {self._place(axes)[1]} equal parts; pad to a multiple of it"
            )
        return Extent(min(start, n), max(0, min(stop, n) - start), stop - start)

    def _blocks(self, dim: str) -> Extent:
        """Blocks of a run of elements: a rank has the blocks that its elements meet, where they count alike from its start."""
        if dim.endswith("@"):
            n = size_of_blocks(dim, self.sizes, self.joints)
            return Extent(0, n, n)
        names, slashes, k = block_dims(dim)
        start, n, total = self._run([f for name in names for f in self._fine(name)])
        block, end = int(k), start + n
        aligned = start % block == 0
        if slashes == "//":
            fits = aligned and (end % block == 0 or end == total)
        else:
            inside = start // block == max(end - 1, start) // block
            fits = n == 0 or aligned or inside
        if not fits:
            raise LayoutError(
                f"{dim}: rank {self.rank} holds elements {start} to {end} of {total}, which cuts a block of {block}; "
                f"choose a mesh whose cut is a multiple of {block}, or dequantise first"
            )
        if n == 0:
            return Extent(start // block, 0, 0)
        first, last = start // block, (end - 1) // block
        return Extent(first, last - first + 1, last - first + 1)

    def _run(self, dims: Sequence[str]) -> tuple[int, int, int]:
        """Return start, count and total of what the rank holds of a row-major run of dims."""
        start, count, total = 0, 1, 1
        for dim in dims:
            extent, n = self.extent(dim), self._size(dim)
            if count > 1 and extent.count != n:
                raise LayoutError(f"rank {self.rank} holds no run of {' x '.join(dims)}; blocks over it cannot be cut")
            start, count, total = start * n + extent.start, count * extent.count, total * n
        return start, count, total

    def _cut(self, n: int, axes: Sequence[str]) -> tuple[int, int]:
        start, stop, at = 0, n, self.mesh.coordinates(self.rank)
        for axis in axes:
            low, high = parts(stop - start, self.mesh.size_of(axis), at[axis])
            start, stop = start + low, start + high
        return start, stop

    def _place(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this rank's place and the number of places along several axes."""
        place, count, at = 0, 1, self.mesh.coordinates(self.rank)
        for axis in axes:
            place, count = place * self.mesh.size_of(axis) + at[axis], count * self.mesh.size_of(axis)
        return place, count

    def _size(self, dim: str) -> int:
        if dim not in self.sizes:
            raise LayoutError(f"the size of {dim} is not known; give it in config=")
        return self.sizes[dim]


def block_dims(dim: str) -> tuple[list[str], str, str]:
    """Take `(heads head_dim)/128` apart into its dims, its slashes and its number."""
    match = re.fullmatch(r"\(?([\w ]+)\)?(//?)(\d+)@?", dim)
    if not match:
        raise LayoutError(f"{dim!r} counts blocks of something that is not a product of dims")
    return match[1].split(), match[2], match[3]


def size_of_blocks(dim: str, sizes: Mapping[str, int], joints: Mapping[str, Sequence[str]]) -> int:
    """Return how many blocks there are in all."""
    names, _, k = block_dims(dim)

    def size(name: str) -> int:
        if name in joints:
            return math.prod(size(d) for d in joints[name])
        if name not in sizes:
            raise LayoutError(f"the size of {name} is not known; give it in config=")
        return sizes[name]

    return -(-math.prod(size(name) for name in names) // int(k))
