"""A request is what one call wants: of which checkpoint, under which names, and which slices of each array.

A view is a checkpoint beside the namings in which it is stored and wanted; a collector goes through what is wanted, by table and
layout, by axes per dim, or as a `like` says, and notes targets, jobs and placements.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .adapted import ADAPTER
from .array import Array, Step
from .checkpoint import Checkpoint
from .errors import LayoutError, MissingArray, listing
from .frameworks import Framework, Placement, Wish, is_floating
from .layout import Layout
from .mesh import Axes, Mesh, Sharding, sharding
from .naming import (
    CANONICAL,
    Inventory,
    Model,
    ask,
    chosen,
    families_with,
    family_of,
    idle,
    located,
    model_of,
    moment_step,
    naming_names,
    naming_of,
    rename,
    take_apart,
    tied,
)
from .pattern import Line, shown_shape
from .wanting import Homes, Slices, Wanted, homes, padded_sizes, shown_axes, want_boxes, want_lines, want_sharded, whole_box

LayoutLike = Layout | Mapping[str, Sequence[Axes]] | str | None


@dataclass(frozen=True)
class View:
    """A checkpoint beside the namings that it is stored and wanted in."""

    checkpoint: Checkpoint
    source: Model | None
    target: Model | None
    inventory: Inventory | None


def view_of(checkpoint: Checkpoint, names: str | None, wishes: Mapping[str, Wish] | None) -> View:
    if names is None and wishes:
        names = naming_of_wishes(checkpoint, wishes)
    if names in ("native", "stored"):
        shown_names = checkpoint.with_names(names)
        naming = naming_of(shown_names.arrays, checkpoint.config)
        model = model_of(naming, checkpoint.config, names=shown_names.arrays) if naming else None
        if model is None or model.lacking:
            return View(shown_names, None, None, None)
        return View(shown_names, model, model, tied(model, take_apart(model, all_names(shown_names, model))))
    source = model_in(checkpoint)
    naming = names or (naming_of(wishes, checkpoint.config) if wishes else None) or CANONICAL
    target = source
    if source is not None and source.naming != naming:
        target = model_of(naming, checkpoint.config, names=checkpoint.arrays)
    if source is None or target is None:
        if names is not None:
            raise LayoutError(no_names(checkpoint, names))
        return View(checkpoint, None, None, None)
    ask(target)
    return View(checkpoint, source, target, tied(target, take_apart(source, all_names(checkpoint, source))))


def all_names(checkpoint: Checkpoint, model: Model) -> dict[str, Array]:
    """Return the arrays by every name under which the format itself has them; what only the config ties is left to the table."""
    same = {a: n for a, n in checkpoint.aliases.items() if model.ties.get(a) != n and model.ties.get(n) != a}
    return {**checkpoint.arrays, **{alias: checkpoint.arrays[name] for alias, name in same.items() if name in checkpoint.arrays}}


def naming_of_wishes(checkpoint: Checkpoint, wishes: Mapping[str, Wish]) -> str | None:
    """Return the naming that knows the most of what a `like` wants: native, stored, or a table's; None for no particular one."""

    def known(names: Container[str]) -> int:
        return sum(any(n in names for n in (name, *wish.same)) for name, wish in wishes.items())

    counts = {"native": known(checkpoint)}
    if "stored" in checkpoint.views:  # not where a caller made the checkpoint
        counts["stored"] = known(checkpoint.with_names("stored"))
    naming = naming_of(wishes, checkpoint.config)
    if naming is not None and model_in(checkpoint) is not None:
        model = model_of(naming, checkpoint.config)
        counts[naming] = 0 if model is None else known(located(model, [n for w in wishes for n in (w, *wishes[w].same)]))
    best = max(counts, key=lambda name: counts[name])  # the first of equals
    return best if counts[best] else None


@dataclass
class Collector:
    """Collects what is wanted: by table and layout, or by boxes of the shown arrays."""

    view: View
    mesh: Mesh
    foreign: Any
    ranks: tuple[int, ...]
    layout: LayoutLike
    framework: Framework
    wishes: Mapping[str, Wish] | None
    wanted: Wanted
    placements: dict[str, Placement]
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    _homes: Homes | None = None

    def weights(self) -> None:
        """Want the model's weights; without a table, all that is listed, be it there or not."""
        self._want(self.view.checkpoint.arrays, self.view.inventory, "", lambda step: step)
        if self.view.target is None:
            for name in filter(self._keep, self.view.checkpoint.unavailable):
                if not name.startswith("optimizer."):
                    self.wanted.missing.setdefault(name, self.ranks[0])
        self._add_aliases()
        self._check_wished()

    def _add_aliases(self) -> None:
        """Let what the format itself has under several names answer to all of them, where no table does."""
        if self.view.target is not None:
            return
        names_of: dict[str, list[str]] = {}
        for alias, name in self.view.checkpoint.aliases.items():
            if self._keep(alias):
                names_of.setdefault(name, []).append(alias)
        if names_of:
            for i, target in enumerate(self.wanted.targets):
                self.wanted.aliases += [(alias, i) for alias in names_of.get(target.name, ())]

    def moments(self, checkpoint: Checkpoint) -> None:
        """Want the optimizer's arrays, each like its weight; a weight without one (frozen) has none."""
        view, lacking = self.view, dict(self.wanted.missing)
        if not checkpoint.optimizer:
            why = next((w for n, w in checkpoint.unavailable.items() if n.startswith("optimizer.")), "")
            what = f"an optimizer state that cannot be used: {why}" if why else "no optimizer state"
            raise MissingArray(f"the checkpoint ({checkpoint.format}) holds {what}; leave out optimizer=True")
        for kind, arrays in checkpoint.optimizer.items():
            inventory = None
            if view.source is not None and view.target is not None:
                inventory = tied(view.target, take_apart(view.source, arrays))
            self._want(arrays, inventory, f"optimizer.{kind}.", partial(moment_step, kind))
        self.wanted.missing.clear()
        self.wanted.missing.update(lacking)
        for name in chosen(checkpoint.unavailable, self.include, self.exclude):  # which of them are moments, no name tells
            self.wanted.missing.setdefault(name, self.ranks[0])

    def unexpected(self) -> tuple[str, ...]:
        """Return the stored names that nobody wants."""
        view = self.view
        if self.wishes is not None and view.target is None:
            return tuple(n for n in chosen(view.checkpoint, self.include, self.exclude) if n not in self.wishes)
        return tuple(chosen(view.inventory.unexpected, self.include, self.exclude)) if view.inventory else ()

    def doubles(self) -> list[tuple[str, str]]:
        """Return the tied names that are both stored, under whatever names."""
        target, inventory = self.view.target, self.view.inventory
        if target is None or inventory is None:
            return []
        stored = {line.name: [inventory.parts.get(part) for part in line.parts] for line in target.table.lines}
        pairs = [(a, n) for a, n in target.ties.items() if all(stored.get(a, [None])) and all(stored.get(n, [None]))]
        return [(a, n) for a, n in pairs if not any(one is other for one, other in zip(stored[a], stored[n], strict=True))]

    def check_globs(self) -> None:
        """Raise where `include` leaves nothing of what there is; note patterns that match nothing."""
        if self.include and not len(self.wanted.targets) and not self.wanted.missing and not self._elsewhere():
            raise LayoutError(f"include={self.include!r} matches no name; there are {listing(self.view.checkpoint, 5)}")
        patterns = self.layout if isinstance(self.layout, Mapping) else None
        if not (patterns or self.include or self.exclude):
            return
        checkpoint = self.view.checkpoint
        names = {*self._names(), *checkpoint, *checkpoint.aliases, *checkpoint.unavailable, *(self.wishes or {})}
        names.update(target.name for target in self.wanted.targets)  # moments among them
        self.wanted.notes += idle(names, layout=patterns, include=self.include, exclude=self.exclude)

    def check_shares(self) -> None:
        """Note what a rank holds nothing of, since the mesh has more ranks than an array has parts."""
        if self.layout is None and self.wishes is None and not self.framework.spans_always and self.foreign is None:
            none = [target.name for target in self.wanted.targets if not target.size and math.prod(target.whole)]
            if none:
                self.wanted.notes.append(
                    f"mesh {self.mesh}: some ranks hold nothing of {listing(dict.fromkeys(none), 3)}, which have fewer parts than "
                    f"there are ranks to cut them"
                )

    def _elsewhere(self) -> bool:
        """Say whether another rank holds what `include` matches."""
        return any(True for _ in chosen(self._names(), self.include, self.exclude))

    def _names(self) -> list[str]:
        """Return the names of the whole model."""
        return [name for name, *_ in self.view.target.arrays()] if self.view.target else list(self.view.checkpoint)

    def check_axes(self) -> None:
        """Note the mesh axes, dp aside, that cut nothing under the default layout: a likely slip of the pen."""
        if self.layout is not None or self.wishes is not None or self.view.target is None:
            return
        layout = Layout.default()
        used = {"dp", *(a for dim in layout.axes for a in layout.cutting(dim, self.mesh))}
        for axis, n in zip(self.mesh.names, self.mesh.sizes, strict=True):
            if n > 1 and axis not in used:
                self.wanted.notes.append(
                    f"mesh axis {axis!r} cuts nothing in the default layout: its {n} ranks hold the same; pass layout= to use it"
                )

    def _keep(self, name: str) -> bool:
        if self.wishes is not None and name not in self.wishes:
            return False
        return next(iter(chosen([name], self.include, self.exclude)), None) is not None

    def _want(
        self,
        arrays: Mapping[str, Array],
        inventory: Inventory | None,
        prefix: str,
        step_of: Callable[[Step | None], Step | None],
    ) -> None:
        for name, wish in (self.wishes or {}).items():
            self.placements[prefix + name] = Placement(wish.shape, key=wish.key)
        if self.wishes is not None and any(w.slices is not None for w in self.wishes.values()):
            slices = {
                n: whole_box(tuple(w.shape), self.ranks) if w.slices is None else w.slices
                for n, w in self.wishes.items()
                if self._keep(n) and w.slices != ()
            }
            return self._want_boxes(arrays, inventory, slices, prefix, step_of)
        layout = self.layout
        if isinstance(layout, str) and layout != "replicated":
            raise LayoutError(f"layout={layout!r}: 'replicated', a Layout or a dict of name patterns was expected")
        literal = isinstance(layout, (str, Mapping)) or (self.framework.spans and self.foreign is not None)
        if layout is None and self.wishes is not None and self.mesh.size == 1:
            literal, layout = True, "replicated"
        if self.view.target is None and not literal:
            if self.mesh.size > 1 or layout is not None:
                raise LayoutError(no_layout(self.view.checkpoint))
            literal, layout = True, "replicated"
        if literal:
            return self._want_literal(arrays, inventory, layout, prefix, step_of)
        assert self.view.target is not None
        assert inventory is not None
        want_lines(
            self.wanted,
            self.view.target,
            inventory,
            layout if isinstance(layout, Layout) else Layout.default(),
            self.mesh,
            self.ranks,
            None if self.wishes is None and self.include is None and self.exclude is None else self._keep,
            prefix=prefix,
            step_of=step_of,
        )
        return None

    def _want_literal(
        self,
        arrays: Mapping[str, Array],
        inventory: Inventory | None,
        layout: LayoutLike,
        prefix: str,
        step_of: Callable[[Step | None], Step | None],
    ) -> None:
        """Want slices given by mesh axes per dim of the shown arrays."""
        slices: dict[str, Slices] = {}
        if self.view.target is None and not self.framework.spans and len(self.ranks) > 1:
            for name in filter(self._keep, arrays):
                axes = self._axes(layout, name, arrays[name].shape, None)
                want_sharded(self.wanted, prefix + name, arrays[name], sharding(axes), self.mesh, self.ranks)
            return
        pad = layout.pad if isinstance(layout, Layout) else {}
        for name, shape, line in self._shapes(arrays, pad):
            if not self._keep(name):
                continue
            axes = self._axes(layout, name, shape, line)
            at = self._stage(line, layout)
            held = self._held(name, shape, axes, at)
            if held:
                slices[name] = held
                known = self.placements.get(prefix + name)
                self.placements[prefix + name] = Placement(tuple(shape), self.foreign, axes, at, known.key if known else None)
        self._want_boxes(arrays, inventory, slices, prefix, step_of, pad)

    def _shapes(
        self, arrays: Mapping[str, Array], pad: Mapping[str, int]
    ) -> Iterable[tuple[str, Sequence[int], tuple[Line, tuple[int, ...]] | None]]:
        target = self.view.target
        if target is None:
            for name, array in arrays.items():
                yield name, array.shape, None
            return
        for name, line, index in target.arrays():
            if line.optional and not any(p in self.view.inventory.parts for p in line.parts):  # type: ignore[union-attr]
                continue
            yield name, shown_shape(target.pattern(line), line.parts, padded_sizes(target, pad)), (line, index)

    def _axes(
        self, layout: LayoutLike, name: str, shape: Sequence[int], line: tuple[Line, tuple[int, ...]] | None
    ) -> tuple[Axes, ...]:
        if isinstance(layout, (str, Mapping)):
            return axes_by_pattern(layout, name, shape)
        if line is None or self.view.target is None:
            raise LayoutError(no_layout(self.view.checkpoint))
        chosen_layout = layout if isinstance(layout, Layout) else Layout.default()
        return shown_axes(self.view.target.pattern(line[0]), chosen_layout, self.mesh, self.view.target.joints)

    def _stage(self, line: tuple[Line, tuple[int, ...]] | None, layout: LayoutLike) -> dict[str, int]:
        """Return the places on mesh axes that hold a line's array, where its layer or expert is cut by name."""
        if line is None or isinstance(layout, (str, Mapping)) or self.view.target is None:
            return {}
        if self._homes is None:
            chosen_layout = layout if isinstance(layout, Layout) else Layout.default()
            self._homes = homes(self.view.target, chosen_layout, self.mesh)
        return self._homes.of(*line)

    def _held(self, name: str, shape: Sequence[int], axes: tuple[Axes, ...], at: Mapping[str, int]) -> Slices:
        cut: Sharding = sharding(axes)
        held = []
        for r in self.ranks:
            here = self.mesh.coordinates(r)
            if all(here[a] == i for a, i in at.items()):
                held.append((r, cut.boxes(tuple(shape), self.mesh, r)))
        if self.foreign is not None:
            for d, n in enumerate(shape):
                count = cut.parts_of(d, self.mesh)
                if n % count and self.framework.name == "jax":
                    raise LayoutError(
                        f"{name}: dim {d} has {n} elements, which JAX cannot cut into {count} equal parts; "
                        f"pad it with Layout.default(pad={{'vocab': {count}}}) or the like, choose another mesh, or replicate it"
                    )
        return tuple(held)

    def _want_boxes(
        self,
        arrays: Mapping[str, Array],
        inventory: Inventory | None,
        slices: Mapping[str, Slices],
        prefix: str,
        step_of: Callable[[Step | None], Step | None],
        pad: Mapping[str, int] | None = None,
    ) -> None:
        target = self.view.target
        lines = located(target, slices) if target is not None else {}
        want_boxes(self.wanted, target, inventory, lines, arrays, slices, prefix=prefix, step_of=step_of, pad=pad)

    def _check_wished(self) -> None:
        """Note what `like` wants and nothing holds, and compare the shapes of what is held."""
        if self.wishes is None:
            return
        held = {t.name: t for t in self.wanted.targets}
        held.update({alias: self.wanted.targets[i] for alias, i in self.wanted.aliases})
        for name in chosen(self.wishes, self.include, self.exclude):
            wish = self.wishes[name]
            if name in held and wish.dtype is not None and is_floating(held[name].dtype) and not is_floating(wish.dtype):
                raise LayoutError(
                    f"{name}: `like` has dtype {wish.dtype}, the checkpoint {held[name].dtype}; floats are not cast to it"
                )
            if name not in held:
                if any(other in held for other in wish.same):
                    self.wanted.missing.pop(name, None)
                elif wish.slices != ():
                    self.wanted.missing.setdefault(name, self.ranks[0])
            elif wish.slices is not None or (self.framework.spans and self.foreign is not None):
                if tuple(wish.shape) != held[name].whole:
                    raise LayoutError(
                        f"{name}: `like` has shape {tuple(wish.shape)}, the checkpoint holds {held[name].whole}; make both equal"
                    )
            elif tuple(wish.shape) != held[name].shape:
                whole = tuple(wish.shape) == held[name].whole
                do = (
                    "make `like` of local shapes, or pass layout='replicated'" if whole else "make `like` of the checkpoint's sizes"
                )
                raise LayoutError(
                    f"{name}: `like` has shape {tuple(wish.shape)}, the layout gives rank {self.ranks[0]} {held[name].shape} "
                    f"of {held[name].whole}; {do}"
                )


def axes_by_pattern(layout: str | Mapping[str, Sequence[Axes]], name: str, shape: Sequence[int]) -> tuple[Axes, ...]:
    """Return the mesh axes per dim that the first fitting pattern of a layout says; none where all is `"replicated"`."""
    if isinstance(layout, str):
        return (None,) * len(shape)
    found = next((axes for glob, axes in layout.items() if fnmatch.fnmatchcase(name, glob)), None)
    if found is None:
        raise LayoutError(f"{name}: no pattern of the layout matches it; add one, or '*': () to replicate the rest")
    if not _are_axes(found) or len(found) > len(shape):
        raise LayoutError(
            f"{name}: the layout gives {found!r} for an array of shape {tuple(shape)}; one entry per dim was expected"
        )
    return (*found, *(None,) * (len(shape) - len(found)))


def _are_axes(found: Any) -> bool:
    """Say whether this is one entry per dim: an axis, several or None."""

    def is_entry(axes: Any) -> bool:
        return axes is None or isinstance(axes, str) or (isinstance(axes, (tuple, list)) and all(isinstance(a, str) for a in axes))

    return isinstance(found, (tuple, list)) and all(map(is_entry, found))


def missing_text(view: View, missing: Mapping[str, int]) -> str:
    """Say what is missing, the names with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    target = view.target
    for name, rank in missing.items():
        why = view.checkpoint.why_missing(_stored_name(view, name)).partition(": ")[2]
        if target is not None and name in target.untied:
            why += f"; the config says untied ({target.untied[name]} does not hold), so it is not taken from another array"
        by_reason.setdefault(f"{why} (wanted by rank {rank})", []).append(name)
    reasons = [f"{listing(names)}: {why}" for why, names in by_reason.items()]
    others = f"; it holds {listing(view.checkpoint, 3)}" if target is None else ""
    if others and view.checkpoint.config is None:
        others += ", which config= (the model's config.json) may show under other names"
    return f"{listing(reasons)}{others}; missing='ignore' leaves them out"


def _stored_name(view: View, name: str) -> str:
    """Return the name under which a wanted array, or one that holds a part of it, is listed as unavailable; else its own."""
    unavailable = view.checkpoint.unavailable
    if name in unavailable or not unavailable or view.target is None:
        return name
    others = [other for prefix in view.target.table.prefixes for other in (prefix + name, name.removeprefix(prefix))]
    found = located(view.target, [name]).get(name)
    if found is not None and view.source is not None:
        line, where = found[0], dict(zip(found[0].counted, found[1], strict=True))
        for stored in view.source.table.lines:
            if set(stored.parts) & set(line.parts) and all(d in where for d in stored.counted):
                others.append(rename(stored, [where[d] for d in stored.counted]))
    return next((other for other in others if other in unavailable), name)


def missing_arrays(checkpoint: Checkpoint) -> list[str]:
    """Return the names that the config asks for and the checkpoint does not hold; none where no table fits, or sizes lack."""
    source = model_in(checkpoint)
    if source is None or source.lacking:
        return []
    view = view_of(checkpoint, None, None)
    if view.target is None or view.inventory is None:
        return []
    wanted = Wanted()
    want_lines(wanted, view.target, view.inventory, Layout({}), Mesh((), ()), [0], None)
    return list(wanted.missing)


def model_in(checkpoint: Checkpoint) -> Model | None:
    """Return the model in the naming that a checkpoint's own names follow."""
    naming = naming_of(checkpoint.arrays, checkpoint.config)
    return None if naming is None else model_of(naming, checkpoint.config, names=checkpoint.arrays)


def no_names(checkpoint: Checkpoint, naming: str) -> str:
    """Say why a checkpoint cannot be shown under a naming."""
    family = family_of(checkpoint.config)
    example = next(iter(checkpoint), "model.norm.weight")
    model = model_in(checkpoint)
    damaged = next((p.text for p in checkpoint.problems if p.file == "config.json"), None)
    if naming not in naming_names():
        why = f"there is no naming {naming!r}; there are native, stored, {', '.join(naming_names())}"
    elif checkpoint.config is None and damaged:
        why = damaged
    elif checkpoint.config is None:
        why = "there is no config.json beside the arrays, so the model family is not known; give it with config="
    elif model is not None and model.lacking:
        sizes = listing(model.table.needs(dim) for dim in model.lacking)
        why = f"{model.family} ({model.naming}): the size of {sizes} is not in the config; give it in config="
    elif family is None and ADAPTER in checkpoint.config:
        why = "an adapter's config tells nothing of its base model's sizes; give the base model's config with config="
    elif family is None:
        why = "the config has no model_type; give it with config="
    else:
        why = f"there is no {naming} table for model_type {family!r} whose names these are (such as {example})"
        known = families_with(naming)
        why += f"; there are some for {listing(known)}" if known and family not in known else ""
    return why


def no_layout(checkpoint: Checkpoint) -> str:
    """Say why a checkpoint's arrays have no layout of their own, and how to give them one."""
    return (
        f"{no_names(checkpoint, CANONICAL)}. Without a table, say where arrays go: layout='replicated', or a dict of name patterns "
        f"to mesh axes per dim, as in layout={{'*.o_proj.weight': (None, 'tp'), '*': ()}}"
    )
