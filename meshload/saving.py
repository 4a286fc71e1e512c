"""Saving writes the live tensors of all processes as one checkpoint: each process its own slices, at their final places.

What a process holds becomes pieces whose source is its memory, or another process's. So the laid-out arrays are joined to them as
to any stored checkpoint, holes and overlaps are found before anything is written, and each process moves what is its own.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .array import Array
from .box import Box, Shape, row_major
from .checkpoint import Checkpoint
from .converting import Draft, config_file, local, processes, writer_of
from .digests import dtype_named
from .errors import LayoutError, MeshloadWarning, listing
from .exchange import shared, together
from .formats import Format, Parts, Writer, described
from .frameworks import Group, Held, Wish, framework_of
from .loading import byte_count, plan, shown_progress, with_views
from .mesh import Mesh, axes_of
from .naming import CANONICAL, model_of
from .pieces import piece, table
from .ranks import resolved
from .reading import Progress
from .requesting import LayoutLike, axes_by_pattern, model_in
from .source import Bytes
from .wanting import local_shape
from .writing import MAX_BYTES, FileSink, Filling, Item, fill, scatter

LARGE = 1 << 62
SAMPLE = 4 << 10
"""Bytes at either end of a slice by which replicas are compared."""
SAME = 8 << 20
"""Bytes that are compared at once."""


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
            default layout cuts; without it, plain tensors need a `layout` of name patterns. What it ties is stored once; other
            tensors are stored under each of their names, also where these share memory.
        max_bytes, progress: As for `convert`.

    Raises `LayoutError`, `MissingPieces` or `Overlap` before anything is written, where the slices of all processes are not the
    whole, or one element is in several of them. Where one process fails all do, and nothing is published.
    """
    group = processes()
    # what may fail is done together, and what is told is told in between, so that no process waits for one that has raised
    begun = together(group, lambda: _begun(path, tensors, to, mesh, layout, config, max_bytes, group))
    assert begun is not None
    told = shared(group, [begun.place, {n: wish.shape for n, wish in begun.plain.items()}])
    shapes = {place: of for place, of in told if of}
    held = together(group, lambda: _placed(begun, layout, shapes))
    assert held is not None
    told = shared(group, [slice.told() for slice in held])

    def draft() -> tuple[Draft, Checkpoint]:
        whole, parts = _agreed(told, group)
        view = _view(whole, parts, {(s.name, s.box): s for s in held}, group.rank, begun.config)
        writer = begun.writer
        named = view.with_names(writer.naming) if begun.config is not None and writer.naming != CANONICAL else view
        model = model_in(view)
        if named is view and model is not None and not model.lacking:
            view.with_names(CANONICAL)  # raises where the config is of another model
        return Draft(writer, begun.target, named, parts if named is view else Parts()), named

    drafted = together(group, draft)
    assert drafted is not None
    made, view = drafted
    carried = [("config.json", config_file(begun.config))] if begun.config else []
    with shown_progress(progress if group.rank == 0 else None) as report, made.laid_out(group, view, carried):
        made.finish(group, view, lambda todo: _move(todo, group, made, report), begun.limit)


@dataclass(frozen=True, eq=False)
class _Begun:
    """What one process was asked to save, and how."""

    writer: Writer
    target: Path
    config: Mapping[str, Any] | None
    limit: int
    mesh: Mesh
    place: int
    """This process's rank in the mesh."""
    values: Mapping[str, Sequence[Held]]
    cut: Mapping[str, Wish]
    """Tensors that know what they are slices of."""
    plain: Mapping[str, Wish]


@dataclass(frozen=True, eq=False)
class _Slice:
    """What this process holds of one array: a box of it, which lies in a local array."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    box: Box
    values: Held
    size: int
    """Bytes of the local array."""
    offset: int
    strides: Shape
    """In bytes, in the local array."""
    stored: str | None
    """As an array has it."""
    known: bool
    """Whether its place was told; what is taken for whole because there is no mesh may be a slice."""

    def told(self) -> list[Any]:
        """Return what other processes need to know."""
        return [self.name, self.dtype.name, self.stored, self.shape, self.box.start, self.box.shape, self.known, self.sample()]

    def sample(self) -> int | None:
        """Return a checksum of some of its bytes, by which most differences show; None where they are not in one run."""
        n = self.box.size * self.dtype.itemsize
        if n != self.size:
            return None
        ends = self.values(0, min(n, SAMPLE)), self.values(max(0, n - SAMPLE), n)
        return zlib.crc32(b"".join(part.tobytes() for part in ends))


# --- what this process holds ------------------------------------------------------------------------------------------


def _begun(
    path: Any, tensors: Any, to: str | Format, mesh: Any, layout: LayoutLike, config: Any, max_bytes: int | None, group: Group
) -> _Begun:
    writer, target, known = writer_of(to), local(path), described(config)
    limit = byte_count("max_bytes", MAX_BYTES if max_bytes is None else max_bytes) or 0
    framework = framework_of(None, tensors)
    holds_nothing = isinstance(tensors, Mapping) and not tensors and group.size > 1
    if not framework.owns(tensors) and not holds_nothing:
        raise LayoutError(
            f"tensors={_kind(tensors)}: a module, a dict of torch tensors or NumPy arrays, or a pytree of JAX's was expected"
        )
    ties, wishes = _ties(known), framework.wishes(tensors)
    wishes = {name: wish for name, wish in wishes.items() if ties.get(name) not in wish.same}  # stored under the other name
    plain = {name: wish for name, wish in wishes.items() if wish.slices is None}
    cut = {name: wish for name, wish in wishes.items() if wish.slices is not None}
    sized, place = Mesh((), ()), group.rank
    if plain:
        sized, _, ranks = resolved(mesh, None, framework if mesh is None else framework_of(None, mesh, tensors))
        if sized.size > 1 and group.size != sized.size:
            raise LayoutError(f"mesh {sized} has {sized.size} ranks, {group.size} processes save; every rank calls save")
        place = ranks[0] if sized.size > 1 else group.rank
    return _Begun(writer, target, known, limit, sized, place, framework.values(tensors), cut, plain)


def _kind(tensors: Any) -> str:
    """Say what was given instead of tensors."""
    if not isinstance(tensors, Mapping):
        return type(tensors).__name__
    return "{" + listing(f"{name!r}: {type(value).__name__}" for name, value in tensors.items()) + "}"


def _ties(config: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Return which names the config ties to which; what it does not tie is stored under every name, as nothing would tell."""
    model = model_of(CANONICAL, config)
    return {} if model is None else model.ties


def _placed(begun: _Begun, layout: LayoutLike, shapes: Mapping[int, Mapping[str, Sequence[int]]]) -> list[_Slice]:
    """Return this process's slices, each once; what the config ties goes under one name."""
    stored_as = _ties(begun.config)
    found: dict[tuple[str, Box], _Slice] = {}
    for name, wish in begun.cut.items():
        for (_, boxes), values in zip(wish.slices or (), begun.values[name], strict=True):
            for box, start in _starts(boxes):
                _add(found, stored_as, name, _slice(name, wish, wish.shape, box, values, local_shape(boxes), start))
    for name, (shape, box, extent) in _boxes(begun, layout, shapes).items():
        wish = begun.plain[name]
        if wish.shape != extent:
            raise LayoutError(f"{name}: this process holds {wish.shape}, the layout gives it {extent} of {shape}")
        known = begun.mesh.size > 1
        _add(found, stored_as, name, _slice(name, wish, shape, box, begun.values[name][0], extent, (0,) * len(shape), known))
    return list(found.values())


def _slice(name: str, wish: Wish, shape: Shape, box: Box, values: Held, extent: Shape, start: Shape, known: bool = True) -> _Slice:
    assert wish.dtype is not None
    strides = row_major(extent, wish.dtype.itemsize)
    offset = sum(i * s for i, s in zip(start, strides, strict=True))
    size = math.prod(extent) * wish.dtype.itemsize
    return _Slice(name, shape, wish.dtype, box, values, size, offset, strides, wish.stored, known)


def _add(found: dict[tuple[str, Box], _Slice], stored_as: Mapping[str, str], name: str, slice: _Slice) -> None:
    slice = replace(slice, name=stored_as.get(name, name))
    other = found.setdefault((slice.name, slice.box), slice)
    if other is not slice and (name != slice.name or name in stored_as.values()) and not _same(slice, other):
        raise LayoutError(_untie(slice.name))


def _untie(name: str) -> str:
    return f"{name}: the config ties another array to it, and what is held of the two differs; untie them in config=, or save one"


def _same(one: _Slice, other: _Slice) -> bool:
    """Say whether two slices of one box have the same bytes."""
    if (one.dtype, one.size) != (other.dtype, other.size):
        return False
    ranges = ((at, min(at + SAME, one.size)) for at in range(0, one.size, SAME))
    return all(np.array_equal(one.values(low, high), other.values(low, high)) for low, high in ranges)


def _starts(boxes: Sequence[Box]) -> list[tuple[Box, Shape]]:
    """Return where in a local array each of its boxes begins; those of a strided shard follow one another along each dim."""
    ndim = len(boxes[0].shape) if boxes else 0
    places: list[dict[int, int]] = []
    for d in range(ndim):
        at, of = 0, {}
        for start, n in {box.start[d]: box.shape[d] for box in boxes}.items():
            of[start] = at
            at += n
        places.append(of)
    return [(box, tuple(of[i] for of, i in zip(places, box.start, strict=True))) for box in boxes]


def _boxes(
    begun: _Begun, layout: LayoutLike, told: Mapping[int, Mapping[str, Sequence[int]]]
) -> dict[str, tuple[Shape, Box, Shape]]:
    """Return of which array each plain tensor is which box, as the layout says, and the shape of the tensor, padding included.

    The layout is asked as in a restore: what would this rank get of arrays of the whole shape?
    """
    plain, mesh = begun.plain, begun.mesh
    if not plain or mesh.size == 1:
        return {name: (wish.shape, Box((0,) * len(wish.shape), wish.shape), wish.shape) for name, wish in plain.items()}
    shapes = _whole_shapes(begun, layout, told)
    arrays = {}
    for name, wish in plain.items():
        assert wish.dtype is not None
        arrays[name] = Array(name, wish.dtype, shapes[name], piece(_Nowhere(name), 0, shapes[name], wish.dtype.itemsize))
    config = begun.config if layout is None or not isinstance(layout, (str, Mapping)) else None
    everything = Checkpoint(arrays, "memory", config=config)
    made = plan(everything, mesh=mesh, layout=layout, rank=begun.place, into="numpy", missing="ignore")
    found = {t.name: (t.whole, t.box, t.shape) for t in made.targets if t.box is not None}
    found |= {alias: found[made.targets[i].name] for alias, i in made.aliases if made.targets[i].name in found}
    lacking = [name for name in plain if name not in found]
    if lacking:
        raise LayoutError(f"rank {begun.place} holds {listing(lacking)}, which the layout does not give to it as one slice")
    return {name: found[name] for name in plain}


def _whole_shapes(begun: _Begun, layout: LayoutLike, told: Mapping[int, Mapping[str, Sequence[int]]]) -> dict[str, Shape]:
    """Return the shapes of the arrays that plain tensors are slices of."""
    if not isinstance(layout, (str, Mapping)):
        model = model_of(CANONICAL, begun.config, names=begun.plain)
        if model is None:
            raise LayoutError(
                "plain tensors are slices of arrays whose shapes the default layout takes from the model's config: give config=, "
                "or a layout of name patterns"
            )
        shapes = {name: model.whole_shape(line) for name, line, _ in model.arrays()}
        strange = [name for name in begun.plain if name not in shapes]
        if strange:
            raise LayoutError(
                f"{listing(strange)}: the {model.family} of the config has no such arrays; give a layout of name patterns"
            )
        return {name: shapes[name] for name in begun.plain}
    return {name: _added_up(name, wish.shape, told, begun.mesh, begun.place, layout) for name, wish in begun.plain.items()}


def _added_up(
    name: str,
    shape: Shape,
    told: Mapping[int, Mapping[str, Sequence[int]]],
    mesh: Mesh,
    rank: int,
    layout: str | Mapping[str, Any],
) -> Shape:
    """Add up a dim over the ranks that hold its parts: those that differ from this one in the axes that cut it alone."""
    axes = axes_by_pattern(layout, name, shape)
    here = mesh.coordinates(rank)
    whole = []
    for d in range(len(shape)):
        cutting = axes_of(axes[d])
        others = [r for r in told if all(c == here[a] for a, c in mesh.coordinates(r).items() if a not in cutting)]
        parts = [told[r].get(name, (0,) * len(shape)) for r in others] if cutting else [shape]
        if any(len(part) != len(shape) for part in parts):
            raise LayoutError(
                f"{name}: rank {rank} holds {shape}, others {listing(map(str, parts))}, which are no slices of one array"
            )
        whole.append(sum(part[d] for part in parts))
    return tuple(whole)


@dataclass(frozen=True, eq=False)
class _Nowhere:
    """Where arrays lie of which only the boxes matter."""

    name: str
    unit: int = 1
    size: int = LARGE
    gap: int = 0


# --- what all hold together -------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What an array is."""

    dtype: str
    shape: Shape
    stored: str | None


def _agreed(told: Sequence[Sequence[Any]], group: Group) -> tuple[dict[str, _Kind], Parts]:
    """Return dtype and shape of every array, and who writes which box; where processes disagree, raise."""
    whole: dict[str, _Kind] = {}
    first: dict[str, int] = {}
    parts: dict[str, dict[Box, tuple[int, int | None]]] = {}
    unlike: dict[str, str] = {}
    for rank, slices in enumerate(told):
        for name, dtype, stored, shape, start, extent, known, sample in slices:
            kind = _Kind(dtype, tuple(shape), stored)
            if whole.setdefault(name, kind) != kind:
                raise LayoutError(f"{name}: rank {first[name]} has a slice of {whole[name]}, rank {rank} one of {kind}")
            first.setdefault(name, rank)
            of = parts.setdefault(name, {})
            other, before = of.setdefault(Box(tuple(start), tuple(extent)), (rank, sample))
            if None not in (sample, before) and sample != before:
                unlike.setdefault(name, f"{name} (ranks {other} and {rank})")
                if not known:
                    raise LayoutError(
                        f"{name}: ranks {other} and {rank} hold plain tensors that differ, and without mesh= each is taken for "
                        f"the whole array; if they are slices, say of what by mesh= and layout=; if not, make them the same"
                    )
    if not whole:
        raise LayoutError("tensors={}: no process holds anything")
    if unlike and group.rank == 0:
        text = f"replicas differ, and those of the first rank are written: {listing(unlike.values())}"
        warnings.warn(text, MeshloadWarning, stacklevel=5)  # save -> together -> draft -> here
    return whole, Parts({name: [(rank, box) for box, (rank, _) in of.items()] for name, of in parts.items()})


@dataclass(frozen=True, eq=False)
class _Memory:
    """A local array in the memory of one process, seen as bytes."""

    name: str
    rank: int
    size: int
    values: Held | None
    """None where it is another process's."""
    unit: int = 1
    gap: int = 0

    def read_into(self, start: int, out: Bytes) -> None:
        assert self.values is not None
        out[:] = self.values(start, start + len(out))


def _view(
    whole: Mapping[str, _Kind],
    parts: Parts,
    mine: Mapping[tuple[str, Box], _Slice],
    rank: int,
    config: Mapping[str, Any] | None,
) -> Checkpoint:
    """Return all slices of all processes as one checkpoint."""
    arrays = {}
    for name, (dtype_name, shape, stored) in whole.items():
        dtype = dtype_named(dtype_name)
        rows = []
        for owner, box in parts[name]:
            label, own = f"{name} of rank {owner}", mine[name, box] if owner == rank else None
            if own is None:
                strides = row_major(box.shape, dtype.itemsize)
                rows.append((_Memory(label, owner, box.size * dtype.itemsize, None), 0, box.start, box.shape, strides))
            else:
                rows.append((_Memory(label, owner, own.size, own.values), own.offset, box.start, box.shape, own.strides))
        sources, offset, *wide = zip(*rows, strict=True)
        columns = [np.asarray(column, np.int64).reshape(len(rows), len(shape)) for column in wide]
        pieces = table(sources, np.arange(len(rows)), np.asarray(offset, np.int64), *columns)
        arrays[name] = Array(name, dtype, shape, pieces, stored)
    return with_views(Checkpoint(arrays, "memory", config=config))


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
    split = np.flatnonzero((low < high) & (low < group.size))
    _check_shared([todo.items[i] for i in split.tolist()])
    alone = (low == group.rank) & (high == group.rank)
    fill(todo, groups=[g[alone[g]] for g in todo.groups if alone[g].any()], progress=progress, check=draft.check, lossy=True)
    mine = np.flatnonzero(rank_of == group.rank)
    scatter(todo, np.intersect1d(split, copies.target[mine]).tolist(), mine, check=draft.check)


def _check_shared(items: Sequence[Item]) -> None:
    """Raise where an item that several processes hold parts of can only be written by one."""
    chunks = [item.array for item in items if not isinstance(item.sink, FileSink)]
    if chunks:
        raise LayoutError(
            f"{listing(dict.fromkeys(chunks))}: several processes hold parts of one chunk, which only one can write; the slices "
            f"are cut so unevenly that chunks within them would be tiny; save to a format of plain files (hf), and convert that"
        )
