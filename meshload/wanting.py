"""What is wanted: which slices of which arrays a rank holds, as targets in memory and the jobs that fill them.

Two ways lead here. With a model table and a layout, a rank's tensor is the array's pattern at the rank's local sizes. With boxes
of an array as its naming shows it (a JAX sharding, DTensor placements, a dict of name patterns) the rows mean themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .array import Array, Step
from .box import Box, Shape, row_major, whole
from .errors import LayoutError
from .layout import Layout, Local
from .mesh import Mesh, Sharding
from .naming import Inventory, Kind, Model, Stored, between, rename
from .pattern import Line, Pattern, find, shown_box, shown_shape
from .pieces import Ints, Pieces, table, union
from .planning import Job, Target, Targets

Slices = tuple[tuple[int, tuple[Box, ...]], ...]
"""Ranks with the boxes that each holds."""


@dataclass
class Wanted:
    """Targets and jobs while they are collected."""

    targets: Targets = field(default_factory=Targets)
    aliases: list[tuple[str, int]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    """Wanted names that are stored nowhere -> a rank that wants them."""
    notes: list[str] = field(default_factory=list)
    copies: str = "first"
    """What becomes of replicated copies, where the format does not say what they are."""
    _tables: dict[tuple[str, int, int, str], list[Pieces]] = field(default_factory=dict)
    _stored: dict[tuple[str, int, int, str], Pieces] = field(default_factory=dict)
    _held: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def jobs(self) -> Iterator[Job]:
        """Return the joins that fill the targets."""
        for key, tables in self._tables.items():
            label, _, itemsize, copies = key
            yield Job(label, itemsize, union(tables), self._stored[key], copies)

    def policy(self, copies: str) -> str:
        """Return what becomes of an array's stored copies: what the format says of them, else what the caller asked for."""
        return self.copies if copies == "first" else copies

    def add(self, label: str, itemsize: int, wanted: Pieces, stored: Pieces, copies: str = "first") -> None:
        """Want some pieces of what is stored, both in the same dims."""
        key = (label, id(stored.source), itemsize, copies)
        self._stored[key] = stored
        self._tables.setdefault(key, []).append(wanted)


class _Block(Sequence[Target]):
    """The targets of one line on one rank: alike but for their names."""

    def __init__(self, model: Target, line: Line, indices: Sequence[tuple[int, ...]], prefix: str) -> None:
        self.model, self.line, self.indices, self.prefix = model, line, indices, prefix

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: Any) -> Any:
        m = self.model
        name = self.prefix + rename(self.line, self.indices[i])
        return Target(name, m.ranks, m.dtype, m.shape, m.whole, m.box, m.filled, m.step, m.stored, m.copies)


class _Ranks(Sequence[Target]):
    """The targets of one array on many ranks."""

    def __init__(self, array: Array, name: str, ranks: Ints, start: Ints, shape: Ints, copies: str) -> None:
        self.array, self.name, self.ranks, self.start, self.shape, self.copies = array, name, ranks, start, shape, copies

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, i: Any) -> Any:
        shape = tuple(self.shape[i].tolist())
        box = Box(tuple(self.start[i].tolist()), shape)
        a = self.array
        rank = (int(self.ranks[i]),)
        return Target(self.name, rank, a.dtype, shape, a.shape, box, box.size, a.step, a.stored, self.copies)


# --- by table and layout ----------------------------------------------------------------------------------------------


def want_lines(
    wanted: Wanted,
    model: Model,
    inventory: Inventory,
    layout: Layout,
    mesh: Mesh,
    ranks: Iterable[int],
    keep: Callable[[str], bool] | None,
    *,
    prefix: str = "",
    step_of: Callable[[Step | None], Step | None] = lambda step: step,
) -> None:
    """Want every array of a model that `keep`, if it is there, admits, as a layout gives it to each rank."""
    for line in model.table.lines:
        _check_cuts(model, line, layout, mesh)
    _check_siblings(model, layout, mesh)
    for rank in ranks:
        local = layout.at(mesh, rank, model.sizes, model.joints)
        for line in model.table.lines:
            if (line.where == "first" and not local.is_first) or (line.where == "last" and not local.is_last):
                continue
            over = {d: _counted(local, d) for d in line.counted}
            indices = [i for i in model.indices(line, over) if keep is None or keep(rename(line, i))]
            _want_line(wanted, model, inventory, line, local, indices, prefix, step_of)


def _check_siblings(model: Model, layout: Layout, mesh: Mesh) -> None:
    """Raise where any rank's cut is none, so that all ranks fail alike instead of some waiting for those that did."""
    joint_dims = {fine for dims in model.joints.values() for fine in dims}
    shown = {d for line in model.table.lines for part in line.parts for d in model.pattern(line).dims_of(part)}
    delicate = sorted(d for d in shown if "/" in d or d in joint_dims)
    axes = [a for a in mesh.names if any(a in layout.cutting(d, mesh) for d in layout.axes if d not in ("layer", "expert"))]
    for at in _corners(axes, mesh):
        local = layout.at(mesh, _rank(mesh, at), model.sizes, model.joints)
        for dim in delicate:
            local.extent(dim)


def _check_cuts(model: Model, line: Line, layout: Layout, mesh: Mesh) -> None:
    """Raise where one mesh axis cuts an array twice: each rank would hold a part of a part, and no rank the rest."""
    pattern = model.pattern(line)
    joint_of = {fine: joint for joint, dims in model.joints.items() for fine in dims}
    for part in line.parts:
        cut_by: dict[str, str] = {}
        dims = {*line.counted, *pattern.dims_of(part), *([] if line.where == "layers" else ["layer"])}
        dims |= {joint_of[d] for d in dims if d in joint_of}
        dims |= {joint_of[d] for d in dims if d in joint_of}  # a joint of joints
        for dim, axes in [
            *((d, layout.cutting(d, mesh)) for d in sorted(dims)),
            ("dim 0 of the local array", layout.row_axes(mesh)),
        ]:
            for axis in axes:
                if cut_by.setdefault(axis, dim) != dim:
                    raise LayoutError(
                        f"{line.name}: mesh axis {axis!r} cuts both {cut_by[axis]} and {dim}; an axis cuts an array once"
                    )


def _counted(local: Local, dim: str) -> Sequence[int]:
    if dim == "layer":
        return local.layers
    extent = local.extent(dim)
    return range(extent.start, extent.start + extent.count)


def _want_line(
    wanted: Wanted,
    model: Model,
    inventory: Inventory,
    line: Line,
    local: Local,
    indices: Sequence[tuple[int, ...]],
    prefix: str,
    step_of: Callable[[Step | None], Step | None],
) -> None:
    pattern = model.pattern(line)
    for kind, members in _by_kind(wanted, inventory, line, indices, local.rank).items():
        copies = wanted.policy(kind.copies)
        held = shown_shape(pattern, line.parts, lambda _, d: local.extent(d).held)
        start, stop = local.rows(held[0]) if held else (0, 0)
        shape = (stop - start, *held[1:]) if held else held
        tie = (tuple(id(inventory.parts[p]) for p in line.parts), tuple(members), local.rank, prefix, shape, start)
        if tie in wanted._held:
            first = wanted._held[tie]
            wanted.aliases += [(prefix + rename(line, index), first + i) for i, index in enumerate(members)]
            continue
        first = len(wanted.targets)
        memory = _memory(first, members, [((start, *(0,) * (len(held) - 1)) if held else (), shape)], shape, kind.dtype.itemsize)
        filled = 0
        for part in line.parts:
            sizes = (lambda _, d: local.extent(d).count), (lambda _, d: local.extent(d).held)
            pieces = find(pattern, part, memory, len(line.counted), held, *sizes)
            dims = line_dims(line, pattern, part)
            at = [0 if i < len(line.counted) else local.extent(d).start for i, d in enumerate(dims)]
            filled += int(pieces.sizes.sum()) // max(len(members), 1)
            stored = inventory.parts[part]
            pieces = pieces.place(at).transpose([dims.index(d) for d in stored.dims])
            wanted.add(line.name, kind.dtype.itemsize, pieces, stored.groups[_same(stored, kind)], copies)
        step = step_of(between(kind.step, pattern.step_at(model.values)))
        box = _box_of(model, line, local, start, shape)
        sample = Target("", (local.rank,), kind.dtype, shape, model.whole_shape(line), box, filled, step, kind.stored, copies)
        wanted._held[tie] = wanted.targets.add(_Block(sample, line, members, prefix))


def _box_of(model: Model, line: Line, local: Local, start: int, shape: Shape) -> Box | None:
    """Return where a rank's tensor, of which it keeps the rows from `start` on, lies in the whole array, if that is one box."""

    def held(dim: str) -> tuple[int, int]:
        return local.extent(dim).start, local.extent(dim).count

    found = shown_box(model.pattern(line), line.parts, model.size, held)
    if found is None or not shape:
        return Box((), ()) if found else None
    first, extents = found
    rows = max(0, min(shape[0], extents[0] - start))  # less where the end is padding
    return Box((first[0] + start, *first[1:]), (rows, *extents[1:]))


def line_dims(line: Line, pattern: Pattern, part: str) -> list[str]:
    """Return the dims of a part in a refined line: the counted ones, then those of the pattern."""
    return [*line.counted, *pattern.dims_of(part)]


def _same(stored: Stored, kind: Kind) -> Kind:
    return kind if kind in stored.groups else next(k for k in stored.groups if k[:2] == kind[:2])


def _by_kind(
    wanted: Wanted, inventory: Inventory, line: Line, indices: Sequence[tuple[int, ...]], rank: int
) -> dict[Kind, list[tuple[int, ...]]]:
    """Group the indices at which a line's parts are stored by what they are stored as; note those that are missing."""
    found: dict[Kind, list[tuple[int, ...]]] = {}
    stored = [inventory.parts.get(part) for part in line.parts]
    for index in indices:
        kinds = {s.kind(line.counted, index) if s else None for s in stored}
        if None in kinds:
            if not line.optional:
                wanted.missing.setdefault(rename(line, index), rank)
        elif len(kinds) > 1:
            raise LayoutError(f"{rename(line, index)}: its parts are stored in different dtypes or with different steps")
        else:
            found.setdefault(next(k for k in kinds if k), []).append(index)
    return found


def _memory(
    first: int, indices: Sequence[tuple[int, ...]], boxes: Sequence[tuple[Shape, Shape]], local: Shape, itemsize: int
) -> Pieces:
    """Return the pieces of `len(indices)` tensors of local shape `local`, each holding `boxes` of the array, in order."""
    found = _memory_of(tuple(indices), tuple(boxes), local, itemsize)
    return replace(found, source=found.source + first)


@lru_cache(maxsize=256)
def _memory_of(indices: tuple[tuple[int, ...], ...], boxes: tuple[tuple[Shape, Shape], ...], local: Shape, itemsize: int) -> Pieces:
    """Return the pieces of tensors that count from 0: most arrays of a model have the shape of another."""
    n, k, ndim = len(indices), len(indices[0]) if indices else 0, len(local)
    strides = row_major(local, itemsize)
    skips = _skips([Box(start, shape) for start, shape in boxes], strides)
    m = len(boxes)
    lead = np.repeat(np.asarray(indices, np.int64).reshape(n, k), m, axis=0)
    start = np.tile(np.asarray([b[0] for b in boxes], np.int64).reshape(m, ndim), (n, 1))
    shape = np.tile(np.asarray([b[1] for b in boxes], np.int64).reshape(m, ndim), (n, 1))
    step = np.tile(np.asarray(strides, np.int64).reshape(1, ndim), (n * m, 1))
    return table(
        (),
        np.repeat(np.arange(n), m),
        np.tile(np.asarray(skips, np.int64), n),
        np.concatenate([lead, start], axis=1),
        np.concatenate([np.ones_like(lead), shape], axis=1),
        np.concatenate([np.zeros_like(lead), step], axis=1),
    )


def _skips(boxes: Sequence[Box], strides: Shape) -> list[int]:
    """Return the byte offset of each box in a local array that holds their runs, dim by dim, one after another."""
    at: list[dict[int, int]] = []
    for d in range(len(strides)):
        places: dict[int, int] = {}
        held = 0
        for box in boxes:
            if box.start[d] not in places:
                places[box.start[d]] = held
                held += box.shape[d]
        at.append(places)
    return [sum(at[d][box.start[d]] * strides[d] for d in range(len(strides))) for box in boxes]


def local_shape(boxes: Sequence[Box]) -> Shape:
    """Return the shape of the local array that holds these boxes.

    >>> local_shape([Box((0, 0), (2, 3)), Box((4, 0), (2, 3))])
    (4, 3)
    """
    ndim = len(boxes[0].shape)
    return tuple(sum({box.start[d]: box.shape[d] for box in boxes}.values()) for d in range(ndim))


# --- by boxes of the shown arrays -------------------------------------------------------------------------------------


def want_boxes(
    wanted: Wanted,
    model: Model | None,
    inventory: Inventory | None,
    lines: Mapping[str, tuple[Line, tuple[int, ...]]],
    arrays: Mapping[str, Array],
    slices: Mapping[str, Slices],
    *,
    prefix: str = "",
    step_of: Callable[[Step | None], Step | None] = lambda step: step,
    pad: Mapping[str, int] | None = None,
) -> None:
    """Want boxes of arrays as their naming shows them: those in `lines` through their parts, the others as they are stored.

    The boxes are those of arrays whose dims are padded to multiples, as `pad` says.
    """
    groups: dict[tuple[int, Slices], list[tuple[int, ...]]] = {}
    by_id: dict[int, Line] = {}
    for name, held in slices.items():
        if name in lines and model is not None and inventory is not None:
            line, index = lines[name]
            by_id[id(line)] = line
            groups.setdefault((id(line), held), []).append(index)
        else:
            _want_array(wanted, arrays, name, held, prefix)
    for (key, held), indices in groups.items():
        assert model is not None
        assert inventory is not None
        _want_line_boxes(wanted, model, inventory, by_id[key], held, indices, prefix, step_of, pad or {})


def _want_array(wanted: Wanted, arrays: Mapping[str, Array], name: str, held: Slices, prefix: str) -> None:
    array = arrays.get(name)
    if array is None:
        wanted.missing.setdefault(name, held[0][0] if held else 0)
        return
    for ranks, boxes in _by_boxes(held):
        shape = local_shape(boxes)
        box = boxes[0] if len(boxes) == 1 else None
        copies = wanted.policy(array.copies)
        target = Target(
            prefix + name, ranks, array.dtype, shape, array.shape, box, math.prod(shape), array.step, array.stored, copies
        )
        memory = _memory(len(wanted.targets), [()], [(b.start, b.shape) for b in boxes], shape, array.dtype.itemsize)
        wanted.targets.add([target])
        wanted.add(name, array.dtype.itemsize, memory, array.pieces, copies)


def _want_line_boxes(
    wanted: Wanted,
    model: Model,
    inventory: Inventory,
    line: Line,
    held: Slices,
    indices: Sequence[tuple[int, ...]],
    prefix: str,
    step_of: Callable[[Step | None], Step | None],
    pad: Mapping[str, int],
) -> None:
    pattern, sizes = model.pattern(line), padded_sizes(model, pad)
    full = shown_shape(pattern, line.parts, sizes)
    for kind, members in _by_kind(wanted, inventory, line, indices, held[0][0] if held else 0).items():
        copies = wanted.policy(kind.copies)
        for ranks, boxes in _by_boxes(held):
            shape = local_shape(boxes)
            tie = (tuple(id(inventory.parts[p]) for p in line.parts), tuple(members), ranks, prefix, boxes)
            if tie in wanted._held:
                first = wanted._held[tie]
                wanted.aliases += [(prefix + rename(line, index), first + i) for i, index in enumerate(members)]
                continue
            memory = _memory(len(wanted.targets), members, [(b.start, b.shape) for b in boxes], shape, kind.dtype.itemsize)
            filled = 0
            for part in line.parts:
                pieces = find(pattern, part, memory, len(line.counted), full, model.size, sizes)
                filled += int(pieces.sizes.sum()) // len(members)
                stored = inventory.parts[part]
                dims = line_dims(line, pattern, part)
                pieces = pieces.transpose([dims.index(d) for d in stored.dims])
                wanted.add(line.name, kind.dtype.itemsize, pieces, stored.groups[_same(stored, kind)], copies)
            step = step_of(between(kind.step, pattern.step_at(model.values)))
            box = boxes[0] if len(boxes) == 1 else None
            sample = Target("", ranks, kind.dtype, shape, full, box, filled, step, kind.stored, copies)
            wanted._held[tie] = wanted.targets.add(_Block(sample, line, members, prefix))


def padded_sizes(model: Model, pad: Mapping[str, int]) -> Callable[[str, str], int]:
    """Return the sizes of a model's dims, each padded to its multiple."""
    return lambda part, dim: -(-model.size(part, dim) // pad.get(dim, 1)) * pad.get(dim, 1)


def _by_boxes(held: Slices) -> list[tuple[tuple[int, ...], tuple[Box, ...]]]:
    """Group ranks that hold the same boxes: their memory is filled once."""
    groups: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in held:
        groups.setdefault(boxes, []).append(rank)
    return [(tuple(ranks), boxes) for boxes, ranks in groups.items()]


def want_sharded(wanted: Wanted, name: str, array: Array, sharding: Sharding, mesh: Mesh, ranks: Sequence[int]) -> None:
    """Want one array on many ranks, as a sharding cuts it."""
    numbers = np.asarray(ranks, np.int64)
    start, shape = sharding.boxes_of_ranks(array.shape, mesh, numbers)
    first = wanted.targets.add(_Ranks(array, name, numbers, start, shape, wanted.policy(array.copies)))
    n, ndim = shape.shape
    strides = np.full((n, ndim), array.dtype.itemsize, np.int64)
    for d in range(ndim - 2, -1, -1):
        strides[:, d] = strides[:, d + 1] * shape[:, d + 1]
    pieces = table((), np.arange(first, first + n), np.zeros(n, np.int64), start, shape, strides)
    wanted.add(name, array.dtype.itemsize, pieces, array.pieces, wanted.policy(array.copies))


def shown_axes(pattern: Pattern, layout: Layout, mesh: Mesh, joints: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return which mesh axes cut each dim of a shown array, where its rows mean themselves, as in JAX."""
    parent = {fine: joint for joint, dims in joints.items() for fine in dims}
    found = []
    used: set[str] = set()
    for product in pattern.dims:
        axes: list[str] = []
        for dim in _names(product):
            name: str | None = dim
            while name is not None:
                axes += [a for a in layout.cutting(name, mesh) if a not in axes and a not in used]
                name = parent.get(name)
        used |= set(axes)
        found.append(tuple(axes))
    if found:
        found[0] = (*found[0], *(a for a in layout.row_axes(mesh) if a not in used))
    return tuple(found)


@dataclass(frozen=True)
class Homes:
    """Where a layout keeps the arrays of each layer and expert, and of the outer stages: places on the axes that cut them."""

    layers: Mapping[int, Mapping[str, int]]
    experts: Mapping[int, Mapping[str, int]]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, line: Line, index: Sequence[int]) -> dict[str, int]:
        """Return the places on mesh axes outside of which nothing of an array is held."""
        if line.where != "layers":
            return dict(self.first if line.where == "first" else self.last)
        where = dict(zip(line.counted, index, strict=True))
        layer = self.layers.get(where["layer"], {}) if "layer" in where else {}
        expert = self.experts.get(where["expert"], {}) if "expert" in where else {}
        return {**layer, **expert}


def homes(model: Model, layout: Layout, mesh: Mesh) -> Homes:
    """Work out once where a layout keeps what names count."""
    layers: dict[int, dict[str, int]] = {}
    experts: dict[int, dict[str, int]] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at in _corners(layout.cutting("layer", mesh), mesh):
        local = layout.at(mesh, _rank(mesh, at), model.sizes, model.joints)
        layers.update(dict.fromkeys(local.layers, at))
        first = at if local.is_first else first
        last = at if local.is_last else last
    if "expert" in model.sizes:
        for at in _corners(layout.cutting("expert", mesh), mesh):
            extent = layout.at(mesh, _rank(mesh, at), model.sizes, model.joints).extent("expert")
            experts.update(dict.fromkeys(range(extent.start, extent.start + extent.count), at))
    return Homes(layers, experts, first, last)


def _corners(axes: Sequence[str], mesh: Mesh) -> Iterator[dict[str, int]]:
    for places in itertools.product(*(range(mesh.size_of(a)) for a in axes)):
        yield dict(zip(axes, places, strict=True))


def _rank(mesh: Mesh, at: Mapping[str, int]) -> int:
    rank = 0
    for name, n in zip(mesh.names, mesh.sizes, strict=True):
        rank = rank * n + at.get(name, 0)
    return rank


def _names(node: Any) -> Iterator[str]:
    from .pattern import Blocks, Product, Sum

    match node:
        case Product(factors):
            for factor in factors:
                yield from _names(factor)
        case Sum(terms):
            for _, product in terms:
                yield from _names(product)
        case Blocks(of):
            yield from _names(of)
        case _:
            yield node.name


def whole_box(shape: Shape, ranks: Sequence[int]) -> Slices:
    """Return slices in which every rank holds all of an array."""
    return tuple((rank, (whole(shape),)) for rank in ranks)
