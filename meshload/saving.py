"""Saving writes the live tensors of all processes as one checkpoint: each process its own slices, at their final places.

What a process holds becomes pieces whose source is its memory, or another process's. So the laid-out arrays are joined to them as
to any stored checkpoint, holes and overlaps are found before anything is written, and each process moves what is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import Box, Shape, row_major
from .checkpoint import Checkpoint
from .converting import Draft, config_file, local, processes, writer_of
from .errors import LayoutError, listing
from .exchange import shared, together
from .formats import Format, Parts, described
from .frameworks import Framework, Group, Wish, framework_of
from .loading import plan, shown_progress, with_views
from .mesh import Mesh, axes_of
from .naming import CANONICAL, model_of
from .pieces import piece, table
from .ranks import resolved
from .reading import Progress
from .requesting import LayoutLike, axes_by_pattern
from .source import Bytes
from .writing import MAX_BYTES, Filling, fill, filling, scatter

LARGE = 1 << 62


def save(
    path: Any,
    tensors: Any,
    *,
    to: str | Format,
    mesh: Any = None,
    layout: LayoutLike = None,
    config: Any = None,
    max_bytes: int | None = None,
    progress: Progress | bool | None = None,
) -> None:
    """Write what all processes hold as one checkpoint; every process calls it with its own slices.

    Args:
        path: A new local folder, the same for all processes, on a disk that they share.
        tensors: A module, a state dict, or a pytree of arrays, under canonical names: DTensors and sharded `jax.Array`s, which
            know what they are slices of, or plain tensors, for which `mesh` and `layout` tell it, as `restore` returned them.
            Slices that several processes hold are written once, by the first of them.
        to: A format that can be written, or a format object with options.
        mesh, layout: As for `restore`. Not needed where no plain tensor is cut.
        config: The model's config, as for `open`; written beside the weights. With it, the model's own table says how the
            default layout cuts; without it, plain tensors need a `layout` of name patterns.
        max_bytes, progress: As for `convert`.

    Raises `LayoutError`, `MissingPieces` or `Overlap` before anything is written, where the slices of all processes are not the
    whole, or one element is in several of them. Where one process fails all do, and nothing is published.
    """
    writer, target = writer_of(to), local(path)
    group = processes()
    known = described(config)
    held = together(group, lambda: _held(tensors, mesh, layout, known, group))
    assert held is not None
    told = together(group, lambda: _agreed(shared(group, [slice.told() for slice in held])))
    assert told is not None
    whole, parts = told
    view = _view(whole, parts, {(s.name, s.box): s.values for s in held}, group.rank, known)
    named = view.with_names(writer.naming) if known is not None and writer.naming != CANONICAL else view
    draft = Draft(writer, target, named, parts if named is view else Parts())
    carried = [("config.json", config_file(known))] if known else []
    with shown_progress(progress if group.rank == 0 else None) as report:
        draft.lay_out(group, named, carried)

        def move() -> None:
            todo = filling(draft.pairs(named), max_bytes=MAX_BYTES if max_bytes is None else int(max_bytes))
            _move(todo, group, draft, report)

        draft.finish(group, move)


@dataclass(frozen=True, eq=False)
class _Slice:
    """What this process holds of one array."""

    name: str
    shape: Shape
    box: Box
    values: NDArray[Any]

    def told(self) -> list[Any]:
        """Return what other processes need to know."""
        return [self.name, self.values.dtype.name, list(self.shape), list(self.box.start), list(self.box.shape)]


# --- what this process holds ------------------------------------------------------------------------------------------


def _held(tensors: Any, mesh: Any, layout: LayoutLike, config: Mapping[str, Any] | None, group: Group) -> list[_Slice]:
    framework = framework_of(None, tensors)
    if not framework.owns(tensors):
        raise LayoutError(
            f"tensors={_kind(tensors)}: a module, a dict of torch tensors or NumPy arrays, or a pytree of JAX's was expected"
        )
    wishes = _untied(framework.wishes(tensors))
    values = framework.values(tensors)
    model = model_of(CANONICAL, config)
    stored_as = {} if model is None else model.ties
    found: dict[tuple[str, Box], _Slice] = {}
    plain = {}
    for name, wish in wishes.items():
        if wish.slices is None:
            plain[name] = values[name][0]
            continue
        for (_, boxes), local_values in zip(wish.slices, values[name], strict=True):
            for box, part in zip(boxes, _parts_of(local_values, boxes), strict=True):
                slice = _Slice(stored_as.get(name, name), wish.shape, box, part)
                found.setdefault((slice.name, box), slice)
    for name, (shape, box) in _boxes(plain, mesh, layout, config, framework, group).items():
        if plain[name].shape != box.shape:
            raise LayoutError(f"{name}: this process holds {plain[name].shape}, the layout gives it {box.shape} of {shape}")
        slice = _Slice(stored_as.get(name, name), shape, box, plain[name])
        found.setdefault((slice.name, box), slice)
    return list(found.values())


def _kind(tensors: Any) -> str:
    """Say what was given instead of tensors."""
    if not isinstance(tensors, Mapping):
        return type(tensors).__name__
    return "{" + listing(f"{name!r}: {type(value).__name__}" for name, value in tensors.items()) + "}"


def _untied(wishes: Mapping[str, Wish]) -> dict[str, Wish]:
    """Leave out further names of the same tensor: tied weights are stored once, under the first."""
    found: dict[str, Wish] = {}
    for name, wish in wishes.items():
        if not any(other in found for other in wish.same):
            found[name] = wish
    return found


def _parts_of(values: NDArray[Any], boxes: Sequence[Box]) -> list[NDArray[Any]]:
    """Cut a local tensor into its boxes; a strided shard has several, one after another along the dim that is cut."""
    if len(boxes) == 1:
        return [values]
    (dim,) = {d for box in boxes for d in range(values.ndim) if box.start[d] != boxes[0].start[d]}
    edges = np.cumsum([box.shape[dim] for box in boxes])[:-1]
    return list(np.split(values, edges, axis=dim))


def _boxes(
    plain: Mapping[str, NDArray[Any]],
    mesh: Any,
    layout: LayoutLike,
    config: Mapping[str, Any] | None,
    framework: Framework,
    group: Group,
) -> dict[str, tuple[Shape, Box]]:
    """Return of which array each plain tensor is which box, as the layout says.

    The layout is asked as in a restore: what would this rank get of arrays of the whole shape?
    """
    sized, _, ranks = resolved(mesh, None, framework)
    if sized.size > 1 and group.size != sized.size:
        raise LayoutError(f"mesh {sized} has {sized.size} ranks, {group.size} processes save; every rank calls save")
    shapes = _whole_shapes(plain, sized, ranks, layout, config, group)
    arrays = {n: Array(n, a.dtype, shapes[n], piece(_Nowhere(n), 0, shapes[n], a.dtype.itemsize)) for n, a in plain.items()}
    everything = Checkpoint(arrays, "memory", config=config if layout is None or not isinstance(layout, (str, Mapping)) else None)
    if not plain or sized.size == 1:
        return {name: (shape, Box((0,) * len(shape), shape)) for name, shape in shapes.items()}
    made = plan(everything, mesh=mesh, layout=layout, rank=ranks[0], into="numpy", missing="ignore")
    found = {t.name: (t.whole, t.box) for t in made.targets if t.box is not None}
    found |= {alias: found[made.targets[i].name] for alias, i in made.aliases if made.targets[i].name in found}
    lacking = [name for name in plain if name not in found]
    if lacking:
        raise LayoutError(f"rank {ranks[0]} holds {listing(lacking)}, which the layout does not give to it as one slice")
    return {name: found[name] for name in plain}


def _whole_shapes(
    plain: Mapping[str, NDArray[Any]],
    mesh: Mesh,
    ranks: Sequence[int],
    layout: LayoutLike,
    config: Mapping[str, Any] | None,
    group: Group,
) -> dict[str, Shape]:
    """Return the shapes of the arrays that plain tensors are slices of."""
    if mesh.size == 1:
        return {name: tuple(a.shape) for name, a in plain.items()}
    if not isinstance(layout, (str, Mapping)):
        model = model_of(CANONICAL, config, names=plain)
        if model is None:
            raise LayoutError(
                "plain tensors are slices of arrays whose shapes the default layout takes from the model's config: give config=, "
                "or a layout of name patterns"
            )
        shapes = {name: model.whole_shape(line) for name, line, _ in model.arrays()}
        strange = [name for name in plain if name not in shapes]
        if strange:
            raise LayoutError(
                f"{listing(strange)}: the {model.family} of the config has no such arrays; give a layout of name patterns"
            )
        return {name: shapes[name] for name in plain}
    told = shared(group, {name: list(a.shape) for name, a in plain.items()})
    return {name: _added_up(name, a.shape, told, mesh, ranks[0], layout) for name, a in plain.items()}


def _added_up(
    name: str, shape: Shape, told: Sequence[Mapping[str, list[int]]], mesh: Mesh, rank: int, layout: str | Mapping[str, Any]
) -> Shape:
    """Add up a dim over the ranks that hold its parts: those that differ from this one in the axes that cut it alone."""
    axes = axes_by_pattern(layout, name, shape)
    here = dict(zip(mesh.names, mesh.coordinates(rank), strict=True))
    whole = []
    for d, n in enumerate(shape):
        cutting = axes_of(axes[d])
        others = [
            r
            for r in range(mesh.size)
            if all(c == here[a] for a, c in zip(mesh.names, mesh.coordinates(r), strict=True) if a not in cutting)
        ]
        whole.append(sum(told[r].get(name, [0] * len(shape))[d] for r in others) if cutting else n)
    return tuple(whole)


@dataclass(frozen=True, eq=False)
class _Nowhere:
    """Where arrays lie of which only the boxes matter."""

    name: str
    unit: int = 1
    size: int = LARGE
    gap: int = 0


# --- what all hold together -------------------------------------------------------------------------------------------


def _agreed(told: Sequence[Sequence[Any]]) -> tuple[dict[str, tuple[str, Shape]], Parts]:
    """Return dtype and shape of every array, and who writes which box; where processes disagree, raise."""
    whole: dict[str, tuple[str, Shape]] = {}
    first: dict[str, int] = {}
    parts: dict[str, dict[Box, int]] = {}
    for rank, slices in enumerate(told):
        for name, dtype, shape, start, extent in slices:
            kind = (dtype, tuple(shape))
            if whole.setdefault(name, kind) != kind:
                raise LayoutError(f"{name}: rank {first[name]} has a slice of {whole[name]}, rank {rank} one of {kind}")
            first.setdefault(name, rank)
            parts.setdefault(name, {}).setdefault(Box(tuple(start), tuple(extent)), rank)
    return whole, Parts({name: [(rank, box) for box, rank in of.items()] for name, of in parts.items()})


@dataclass(frozen=True, eq=False)
class _Memory:
    """A slice in the memory of one process, seen as bytes."""

    name: str
    rank: int
    size: int
    values: NDArray[Any] | None
    """None where it is another process's."""
    unit: int = 1
    gap: int = 0

    def read_into(self, start: int, out: Bytes) -> None:
        assert self.values is not None
        out[:] = np.ascontiguousarray(self.values).reshape(-1).view(np.uint8)[start : start + len(out)]


def _view(
    whole: Mapping[str, tuple[str, Shape]],
    parts: Parts,
    mine: Mapping[tuple[str, Box], NDArray[Any]],
    rank: int,
    config: Mapping[str, Any] | None,
) -> Checkpoint:
    """Return all slices of all processes as one checkpoint."""
    arrays = {}
    for name, (dtype_name, shape) in whole.items():
        dtype = _dtype(dtype_name)
        sources = [
            _Memory(f"{name} of rank {owner}", owner, box.size * dtype.itemsize, mine.get((name, box)) if owner == rank else None)
            for owner, box in parts[name]
        ]
        boxes = [box for _, box in parts[name]]
        pieces = table(
            sources,
            np.arange(len(boxes)),
            np.zeros(len(boxes), np.int64),
            np.asarray([box.start for box in boxes], np.int64).reshape(len(boxes), len(shape)),
            np.asarray([box.shape for box in boxes], np.int64).reshape(len(boxes), len(shape)),
            np.asarray([row_major(box.shape, dtype.itemsize) for box in boxes], np.int64).reshape(len(boxes), len(shape)),
        )
        arrays[name] = Array(name, dtype, shape, pieces)
    return with_views(Checkpoint(arrays, "memory", config=config))


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


# --- moving -----------------------------------------------------------------------------------------------------------


def _move(todo: Filling, group: Group, draft: Draft, progress: Progress | None) -> None:
    """Write the items that this process holds whole, and its part of those that several hold."""
    copies = todo.joined.copies
    ranks = [s.rank for s in copies.sources if isinstance(s, _Memory)]
    rank_of = np.asarray(ranks, np.int64)[copies.source] if ranks else np.zeros(0, np.int64)
    count = len(todo.items)
    low, high = np.full(count, group.size, np.int64), np.full(count, -1, np.int64)
    inside = copies.target < count
    np.minimum.at(low, copies.target[inside], rank_of[inside])
    np.maximum.at(high, copies.target[inside], rank_of[inside])
    alone = (low == group.rank) & (high == group.rank)
    fill(todo, groups=[g[alone[g]] for g in todo.groups if alone[g].any()], progress=progress, check=draft.check, lossy=True)
    mine = np.flatnonzero(rank_of == group.rank)
    items = np.unique(copies.target[mine])
    scatter(todo, [i for i in items.tolist() if low[i] != high[i]], mine)
