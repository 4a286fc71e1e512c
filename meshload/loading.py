"""Open, plan, restore: the only place where formats, tables, layouts, plans, reading and frameworks meet."""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array import Array, Step
from .checkpoint import Checkpoint
from .errors import LayoutError, MeshloadWarning, MissingArray, listing
from .formats import Format, choose, described
from .frameworks import Framework, Placement, Slice, Wish, World, framework_of
from .layout import Layout
from .mesh import Axes, Mesh, Sharding, fitted, mesh_of, sharding
from .naming import (
    CANONICAL,
    Inventory,
    Model,
    ask,
    chosen,
    contradiction,
    family_of,
    located,
    model_of,
    moment_step,
    naming_names,
    naming_of,
    shown,
    take_apart,
    tied,
    unwrapped,
)
from .pattern import Line, shown_shape
from .planning import MAX_BYTES, Plan, Target
from .planning import plan as join
from .quantised import SCALES, blocks_of, dequantised, scale_of
from .reading import Progress, buffers_for, read, values_of
from .source import open_folder
from .wanting import Homes, Slices, Wanted, homes, padded_sizes, shown_axes, want_boxes, want_lines, want_sharded

LayoutLike = Layout | Mapping[str, Sequence[Axes]] | str | None


def open(path: Any, *, format: str | Format | None = None, config: Any = None) -> Checkpoint:
    """Open a checkpoint: headers and indexes are read, no payload.

    `path` is a local path, a TensorStore key-value URL or an open `tensorstore.KvStore`; `format` a format's name, or a format
    object with options, where recognising it is not enough; `config` completes what the checkpoint does not say: a Hugging
    Face `config.json`, its folder, or a dict with its keys. Raises `FormatError` for what is no checkpoint or a damaged one.
    """
    folder = open_folder(path)
    found, passed_over = choose(folder, format)
    opened = found.open(folder)
    meta = dict(opened.meta)
    if passed_over:
        meta["passed_over"] = tuple(passed_over)
    stored = unwrapped(opened.arrays)
    if any(new != old for new, old in stored.items()):
        meta["stripped"] = {old: new for new, old in stored.items() if new != old}
        opened = replace(opened, arrays={new: replace(opened.arrays[old], name=new) for new, old in stored.items()})
    merged = _completed(opened.config, described(config))
    native = replace(opened, meta=meta, config=merged, aliases={**_ties(opened.arrays, merged), **opened.aliases}, names="native")
    return replace(native, views=_views(native, opened))


def _ties(arrays: Mapping[str, Array], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the tied weights that are stored under one name only, as the config ties them."""
    model = model_of(CANONICAL, config)
    pairs = [] if model is None else [*model.ties.items(), *((name, alias) for alias, name in model.ties.items())]
    return {alias: name for alias, name in pairs if alias not in arrays and name in arrays}


def _completed(told: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if told is None or given is None:
        return given if told is None else told
    clash = contradiction(told, given)
    if clash:
        raise LayoutError(f"config= contradicts the checkpoint's own config: {listing(clash)}")
    return {**given, **told}


def _views(native: Checkpoint, opened: Checkpoint) -> dict[str, Callable[[], Checkpoint]]:
    """Return the other namings under which a checkpoint can be shown."""
    views: dict[str, Callable[[], Checkpoint]] = dict(opened.views)
    views.setdefault("stored", lambda: replace(opened, names="stored"))
    for naming in naming_names():
        views[naming] = partial(_shown_as, native, naming)
    views["native"] = lambda: replace(native, views=views)
    return views


def _shown_as(checkpoint: Checkpoint, naming: str) -> Checkpoint:
    source = _model(checkpoint)
    target = model_of(naming, checkpoint.config, names=checkpoint.arrays)
    if source is None or target is None:
        raise LayoutError(_no_table(checkpoint, naming))
    ask(target)
    made = shown(target, tied(target, take_apart(source, checkpoint.arrays)), checkpoint)
    moments = {}
    for kind, arrays in checkpoint.optimizer.items():
        view = shown(target, tied(target, take_apart(source, arrays)), replace(checkpoint, arrays=arrays))
        moments[kind] = {name: replace(a, step=moment_step(kind, a.step)) for name, a in view.arrays.items()}
    return replace(made, optimizer=moments)


def _model(checkpoint: Checkpoint) -> Model | None:
    """Return the model in the naming that a checkpoint's own names follow."""
    naming = naming_of(checkpoint.arrays, checkpoint.config)
    return None if naming is None else model_of(naming, checkpoint.config, names=checkpoint.arrays)


def _no_table(checkpoint: Checkpoint, naming: str) -> str:
    family = family_of(checkpoint.config)
    example = next(iter(checkpoint), "model.norm.weight")
    damaged = next((p.text for p in checkpoint.problems if p.file == "config.json"), None)
    if checkpoint.config is None and damaged:
        why = damaged
    elif checkpoint.config is None:
        why = "there is no config.json beside the arrays, so the model family is not known; give it with config="
    elif family is None:
        why = "the config has no model_type"
    else:
        why = f"there is no {naming} table for model_type {family!r} whose names these are (such as {example})"
    return (
        f"{why}. Without a table, say where arrays go: layout='replicated', or a dict of name patterns to mesh axes per dim, "
        f"as in layout={{'*.o_proj.weight': (None, 'tp'), '*': ()}}"
    )


# --- restore ----------------------------------------------------------------------------------------------------------


def restore(
    path: Any,
    *,
    mesh: Any = None,
    rank: int | None = None,
    layout: LayoutLike = None,
    like: Any = None,
    into: str | None = None,
    device: Any = None,
    dtype: Any = None,
    names: str | None = None,
    format: str | Format | None = None,
    config: Any = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    missing: str = "error",
    optimizer: bool = False,
    copies: str = "first",
    max_bytes: int | None = None,
    merge_gap: int | None = None,
    progress: Progress | bool | None = None,
) -> Any:
    """Read this rank's slices of a checkpoint, and return them by name, or as what `like` is.

    Args:
        path: As for `open`; or an open `Checkpoint`.
        mesh: Sizes (`"pp=2,tp=4"`, a dict), names (`("pp", "tp")`, sized by the running processes), a torch `DeviceMesh` or a
            `jax.sharding.Mesh`. Outermost axis first; ranks count row-major. None: one rank that holds all.
        rank: Whose slices; this process's by default.
        layout: A `Layout`, name patterns to mesh axes per dim, `"replicated"`, or by default the model's table with
            `Layout.default()`.
        like: An `nn.Module`, a state dict or a pytree of `jax.ShapeDtypeStruct`: its names, dtypes and shardings are wanted.
        into: `"torch"`, `"dtensor"`, `"jax"` or `"numpy"`; by default what `mesh` or `like` is made of, else torch.
        device: Where the tensors go, in the framework's words.
        dtype: Cast floating arrays to this; quantised weights are dequantised, or refused where that is not known.
        names: A naming: `"hf"` (default where the family is known), `"native"`, or another that has a table.
        config: As for `open`.
        include, exclude: Globs of names.
        missing: `"error"`, or `"ignore"` for wanted names that the checkpoint lacks.
        optimizer: Also return the moments, as `optimizer.exp_avg.<name>`, sharded like their weights.
        copies: What becomes of replicated copies (norms under tp): the `"first"` is taken, `"check"` raises `CopiesDiffer` where
            they are not equal, `"mean"` takes their mean.
        max_bytes: Ceiling of memory that is neither result nor metadata; 256 MiB by default.
        merge_gap: Unwanted bytes that are read rather than skipped; by default 4 KiB locally, more for object stores.
        progress: True for a bar on the terminal, or a function of bytes done and bytes in all.

    Raises `MissingArray`, `MissingPieces`, `Overlap`, `LayoutError`, `FormatError`, `LimitError` before any payload is read,
    and `SourceError` where reading fails.
    """
    if isinstance(rank, str):
        raise LayoutError(f"rank={rank!r}: a number was expected; 'all' is for plan()")
    request = _request(
        path,
        mesh,
        rank,
        layout,
        like,
        into,
        dtype,
        names,
        format,
        config,
        include,
        exclude,
        missing,
        optimizer,
        copies,
        max_bytes,
        merge_gap,
    )
    _warn(request)
    made = request.plan
    buffers = buffers_for(made)
    with _shown_progress(progress) as report:
        read(made, buffers, progress=report)
    request.check_ties(buffers)
    return request.place(buffers, device)


def plan(
    path: Any,
    *,
    mesh: Any = None,
    rank: int | str | None = None,
    layout: LayoutLike = None,
    like: Any = None,
    into: str | None = None,
    dtype: Any = None,
    names: str | None = None,
    format: str | Format | None = None,
    config: Any = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    missing: str = "error",
    optimizer: bool = False,
    copies: str = "first",
    max_bytes: int | None = None,
    merge_gap: int | None = None,
) -> Plan:
    """Return what `restore` with the same arguments would read, without reading payload; `rank="all"` plans for every rank."""
    if rank is not None and not isinstance(rank, (int, np.integer)) and rank != "all":
        raise LayoutError(f"rank={rank!r}: a number or 'all' was expected")
    if into is None and like is None and isinstance(mesh, (str, Mapping, Mesh)):
        into = "numpy"  # a plan of sizes needs no framework
    return _request(
        path,
        mesh,
        rank,
        layout,
        like,
        into,
        dtype,
        names,
        format,
        config,
        include,
        exclude,
        missing,
        optimizer,
        copies,
        max_bytes,
        merge_gap,
    ).plan


@dataclass
class _Request:
    """A restore that is planned: what it reads, and how its tensors are placed."""

    plan: Plan
    framework: Framework
    placements: Mapping[str, Placement]
    like: Any
    dtype: np.dtype[Any] | None
    dtypes: Mapping[str, np.dtype[Any] | None]
    ties: Sequence[tuple[str, str]]
    ranks: tuple[int, ...]
    scales: Mapping[int, int]
    """Target of a quantised weight -> the target of its scales, where the weight is to be dequantised."""
    blocks: Sequence[int] | None

    def check_ties(self, buffers: Mapping[int, Any]) -> None:
        """Warn of tied weights whose two stored copies differ; both are kept."""
        at = {(t.name, t.ranks): i for i, t in enumerate(self.plan.targets)}
        for alias, name in self.ties:
            for ranks in {r for n, r in at if n == alias}:
                other = at.get((name, ranks))
                if other is not None and not np.array_equal(buffers[at[alias, ranks]], buffers[other]):
                    warnings.warn(
                        f"{alias} and {name} are tied by the config, and their stored copies differ; both are kept",
                        MeshloadWarning,
                        stacklevel=3,
                    )

    def place(self, buffers: dict[int, Any], device: Any) -> Any:
        """Turn filled buffers into tensors, letting go of each buffer on the way."""
        by_name: dict[str, list[int]] = {}
        for i, target in enumerate(self.plan.targets):
            if i not in self.scales.values() and i not in self.plan.spare:
                by_name.setdefault(target.name, []).append(i)
        aliases: dict[int, list[str]] = {}
        for alias, i in self.plan.aliases:
            aliases.setdefault(i, []).append(alias)
        tensors: dict[str, Any] = {}
        factors = {i: values_of(buffers.pop(i), self.plan.targets[i]) for i in set(self.scales.values())}
        for name, numbers in by_name.items():
            targets = [self.plan.targets[i] for i in numbers]
            slices = []
            for i, target in zip(numbers, targets, strict=True):
                values = self._values(i, buffers, factors)
                slices += [Slice(r, target.box, values, target.stored) for r in target.ranks]
            placement = self.placements.get(name) or Placement(targets[0].whole)
            tensor = self.framework.tensor(slices, replace(placement, device=device or placement.device))
            tensors[name] = tensor
            for alias in {a for i in numbers for a in aliases.get(i, ())}:
                tensors[alias] = tensor
        return tensors if self.like is None else self.framework.like(self.like, tensors)

    def _values(self, i: int, buffers: dict[int, Any], factors: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
        target: Target = self.plan.targets[i]
        values = values_of(buffers.pop(i), target, [buffers.pop(n) for n in self.plan.others.get(i, ())])
        if i in self.scales and self.dtype is not None:
            other = self.plan.targets[self.scales[i]]
            start = target.box.start if target.box else (0,) * values.ndim
            scales_start = other.box.start if target.box and other.box else (0,) * values.ndim
            return dequantised(values, factors[self.scales[i]], self.blocks, start, scales_start, self.dtype)
        wanted = self.dtypes.get(target.name) or (self.dtype if is_floating(values.dtype) else None)
        return values if wanted is None or wanted == values.dtype else values.astype(wanted)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Say whether a dtype is one of real floating numbers, the extended ones included."""
    import ml_dtypes

    return dtype.kind == "f" or (dtype.kind == "V" and dtype.names is None and _is_ml_float(dtype, ml_dtypes))


def _is_ml_float(dtype: np.dtype[Any], ml_dtypes: Any) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _request(
    path: Any,
    mesh: Any,
    rank: Any,
    layout: LayoutLike,
    like: Any,
    into: str | None,
    dtype: Any,
    names: str | None,
    format: str | Format | None,
    config: Any,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    missing: str,
    optimizer: bool,
    copies: str,
    max_bytes: int | None,
    merge_gap: int | None,
) -> _Request:
    if missing not in ("error", "ignore"):
        raise LayoutError(f"missing={missing!r}: 'error' or 'ignore' was expected")
    if not (layout is None or isinstance(layout, (str, Mapping, Layout))):
        raise LayoutError(f"layout={layout!r}: 'replicated', a Layout or a dict of name patterns was expected")
    include, exclude = _globs("include", include), _globs("exclude", exclude)
    max_bytes, merge_gap = _bytes("max_bytes", max_bytes), _bytes("merge_gap", merge_gap)
    if optimizer and like is not None:
        raise LayoutError("optimizer=True goes with a dict of tensors; a like= names all that it wants itself")
    checkpoint = path if isinstance(path, Checkpoint) else open(path, format=format, config=config)
    framework = framework_of(into, mesh, like)
    sized, foreign, ranks = _resolved(mesh, rank, framework)
    if framework.spans_always and foreign is None and like is None:
        raise LayoutError(f"into={framework.name!r}: its tensors span a mesh of its own, and mesh={mesh!r} is none")
    wishes = framework.wishes(like) if like is not None else None
    view = _view(checkpoint, names, wishes)
    if copies not in ("first", "check", "mean"):
        raise LayoutError(f"copies={copies!r}: 'first', 'check' or 'mean' was expected")
    wanted = Wanted(copies=copies)
    placements: dict[str, Placement] = {}
    collect = _Collector(view, sized, foreign, ranks, layout, framework, wishes, wanted, placements, include, exclude)
    collect.weights()
    if optimizer:
        collect.moments(checkpoint)
    if wanted.missing and missing == "error":
        raise MissingArray(_missing_text(view, wanted.missing))
    joined = join(wanted.jobs(), wanted.targets)
    made = Plan(
        wanted.targets,
        joined.copies,
        joined.others,
        tuple(wanted.aliases),
        collect.unexpected(),
        tuple(wanted.missing),
        (f"mesh {sized} ({sized.chosen})", *wanted.notes) if sized.names else tuple(wanted.notes),
        MAX_BYTES if max_bytes is None else max_bytes,
        merge_gap,
        apart=rank == "all",
    )
    cast = _as_dtype(dtype, framework)
    dtypes = {n: w.dtype for n, w in (wishes or {}).items()} if cast is None else {}
    scales = {} if cast is None else _scales(made, checkpoint.config, cast)
    quantisation = (checkpoint.config or {}).get("quantization_config")
    blocks = blocks_of(quantisation) if scales and isinstance(quantisation, Mapping) else None
    return _Request(made, framework, placements, like, cast, dtypes, collect.doubles(), ranks, scales, blocks)


def _globs(word: str, globs: Any) -> list[str] | None:
    """Return globs as a list, which may be gone through more than once."""
    if globs is None:
        return None
    found = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else [globs]
    if not all(isinstance(glob, str) for glob in found):
        raise LayoutError(f"{word}={globs!r}: a glob of names or several were expected")
    return found


def _bytes(word: str, n: Any) -> int | None:
    if n is None:
        return None
    if isinstance(n, bool) or not isinstance(n, (int, float, np.number)) or not 0 <= n < 1 << 62:
        raise LayoutError(f"{word}={n!r}: a number of bytes was expected")
    return int(n)


def _scales(made: Plan, config: Mapping[str, Any] | None, cast: np.dtype[Any]) -> dict[int, int]:
    """Find the scales of the quantised weights that a cast is to dequantise, or say why it cannot."""
    quantisation = (config or {}).get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if method not in (None, "fp8", "fbgemm_fp8", "compressed-tensors"):
        raise LayoutError(f"dtype=: weights quantised by {method} cannot be dequantised; leave out dtype= to get them as stored")
    at = {(t.name, t.ranks): i for i, t in enumerate(made.targets)}
    names = {t.name for t in made.targets}
    found: dict[int, int] = {}
    for i, target in enumerate(made.targets):
        if target.dtype.itemsize > 1 or not is_floating(target.dtype) or target.dtype == cast:
            continue
        scale = scale_of(target.name, names)
        if scale is None or (scale, target.ranks) not in at:
            if target.name.endswith(SCALES):
                continue
            raise LayoutError(
                f"dtype=: {target.name} is {target.stored or target.dtype.name}, which means nothing without scales, and no scales "
                f"are among what is wanted; leave out dtype= to get the bits as stored"
            )
        found[i] = at[scale, target.ranks]
    return found


def _as_dtype(dtype: Any, framework: Framework) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    import ml_dtypes

    own = framework.dtype(dtype)
    if own is None:
        short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(str(dtype), str(dtype))
        try:
            own = np.dtype(getattr(ml_dtypes, short, None) or short if isinstance(dtype, str) else dtype)
        except TypeError as error:
            raise LayoutError(f"dtype={dtype!r} is no dtype of NumPy, ml_dtypes or {framework.name}") from error
    if not is_floating(own):
        raise LayoutError(f"dtype={dtype!r}: arrays are cast to floating dtypes only; integers keep theirs")
    return own


def missing_arrays(checkpoint: Checkpoint) -> list[str]:
    """Return the names that the model's config asks for and the checkpoint does not hold; none where no table fits."""
    view = _view(checkpoint, None, None)
    if view.target is None or view.inventory is None:
        return []
    wanted = Wanted()
    want_lines(wanted, view.target, view.inventory, Layout({}), Mesh((), ()), [0], lambda name: True)
    return list(wanted.missing)


# --- mesh and ranks ---------------------------------------------------------------------------------------------------


def _resolved(mesh: Any, rank: Any, framework: Framework) -> tuple[Mesh, Any, tuple[int, ...]]:
    """Return the mesh with sizes, the framework's own mesh object if it is one, and the ranks that are wanted."""
    world = framework.world() or _launched()
    if mesh is None:
        if rank not in (None, 0, "all"):
            raise LayoutError(f"rank={rank!r}: without mesh= there is one rank, 0, that holds all")
        return Mesh((), ()), None, (0,)
    if framework.owns(mesh):
        sized = framework.mesh(mesh)
        return sized, mesh, tuple(range(sized.size)) if rank == "all" else (rank,) if rank is not None else framework.ranks(mesh)
    found = mesh_of(mesh)
    if found is None:
        axes = [mesh] if isinstance(mesh, str) else mesh
        if not isinstance(axes, Iterable) or not all(isinstance(a, str) for a in axes):
            raise LayoutError(f"mesh {mesh!r} is not sizes, names of axes, or a mesh of {framework.name}")
        found = fitted(tuple(axes), world.size if world else 1, world.per_node if world else 1)
    if rank == "all":
        return found, None, tuple(range(found.size))
    if rank is None:
        if world is None and found.size > 1:
            raise LayoutError(f"mesh {found} has {found.size} ranks and no group of processes runs here; say which with rank=")
        if world is not None and world.size != found.size:
            raise LayoutError(f"mesh {found} has {found.size} ranks, {world.size} processes run; make both equal, or give rank=")
        rank = world.rank if world else 0
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise LayoutError(f"rank={rank!r}: a number was expected")
    found.coordinates(int(rank))
    return found, None, (int(rank),)


def _launched() -> World | None:
    """Return what the launcher says of this process, by the variables of torchrun."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return World(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    except (KeyError, ValueError):
        return None


# --- what is wanted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """A checkpoint beside the namings that it is stored and wanted in."""

    checkpoint: Checkpoint
    source: Model | None
    target: Model | None
    inventory: Inventory | None


def _view(checkpoint: Checkpoint, names: str | None, wishes: Mapping[str, Wish] | None) -> _View:
    if names is None and wishes:
        names = _naming_of_wishes(checkpoint, wishes)
    if names in ("native", "stored"):
        shown_names = checkpoint.with_names(names)
        naming = naming_of(shown_names.arrays, checkpoint.config)
        model = model_of(naming, checkpoint.config, names=shown_names.arrays) if naming else None
        if model is None:
            return _View(shown_names, None, None, None)
        return _View(shown_names, model, model, tied(model, take_apart(model, shown_names.arrays)))
    source = _model(checkpoint)
    naming = names or (naming_of(wishes, checkpoint.config) if wishes else None) or CANONICAL
    target = model_of(naming, checkpoint.config, names=checkpoint.arrays) if source else None
    if source is None or target is None:
        if names is not None:
            raise LayoutError(_no_table(checkpoint, names))
        return _View(checkpoint, None, None, None)
    ask(target)
    return _View(checkpoint, source, target, tied(target, take_apart(source, checkpoint.arrays)))


def _naming_of_wishes(checkpoint: Checkpoint, wishes: Mapping[str, Wish]) -> str | None:
    """Return the naming that knows the most of what a `like` wants: native, stored, or a table's; None for no particular one."""

    def known(names: Container[str]) -> int:
        return sum(any(n in names for n in (name, *wish.same)) for name, wish in wishes.items())

    counts = {"native": known(checkpoint)}
    if "stored" in checkpoint.views:  # not where a caller made the checkpoint
        counts["stored"] = known(checkpoint.with_names("stored"))
    naming = naming_of(wishes, checkpoint.config)
    if naming is not None and _model(checkpoint) is not None:
        model = model_of(naming, checkpoint.config)
        counts[naming] = 0 if model is None else known(located(model, [n for w in wishes for n in (w, *wishes[w].same)]))
    best = max(counts, key=lambda name: counts[name])  # the first of equals
    return best if counts[best] else None


@dataclass
class _Collector:
    """Collects what is wanted: by table and layout, or by boxes of the shown arrays."""

    view: _View
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
                self.wanted.missing.setdefault(name, self.ranks[0])
        self._check_wished()

    def moments(self, checkpoint: Checkpoint) -> None:
        """Want the optimizer's arrays, each like its weight; a weight without one (frozen) has none."""
        view, lacking = self.view, dict(self.wanted.missing)
        if not checkpoint.optimizer:
            raise MissingArray(f"the checkpoint ({checkpoint.format}) holds no optimizer state; leave out optimizer=True")
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
        """Return the tied names that are both stored."""
        target, inventory = self.view.target, self.view.inventory
        if target is None or inventory is None:
            return []
        return [(a, n) for a, n in target.ties.items() if a in inventory.names and n in inventory.names]

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
                n: _whole(w.shape, self.ranks) if w.slices is None else w.slices
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
                raise LayoutError(_no_table(self.view.checkpoint, CANONICAL))
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
            self._keep,
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
        if layout == "replicated":
            return (None,) * len(shape)
        if isinstance(layout, Mapping):
            found = next((axes for glob, axes in layout.items() if fnmatch.fnmatchcase(name, glob)), None)
            if found is None:
                raise LayoutError(f"{name}: no pattern of the layout matches it; add one, or '*': () to replicate the rest")
            if not _are_axes(found) or len(found) > len(shape):
                raise LayoutError(
                    f"{name}: the layout gives {found!r} for an array of shape {tuple(shape)}; one entry per dim was expected"
                )
            return (*found, *(None,) * (len(shape) - len(found)))
        if line is None or self.view.target is None:
            raise LayoutError(_no_table(self.view.checkpoint, CANONICAL))
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
                raise LayoutError(
                    f"{name}: `like` has shape {tuple(wish.shape)}, the layout gives rank {self.ranks[0]} {held[name].shape} "
                    f"of {held[name].whole}; make `like` of local shapes, or pass layout='replicated'"
                )


def _are_axes(found: Any) -> bool:
    """Say whether this is one entry per dim: an axis, several or None."""

    def is_entry(axes: Any) -> bool:
        return axes is None or isinstance(axes, str) or (isinstance(axes, (tuple, list)) and all(isinstance(a, str) for a in axes))

    return isinstance(found, (tuple, list)) and all(map(is_entry, found))


def _whole(shape: Sequence[int], ranks: Sequence[int]) -> Slices:
    from .wanting import whole_box

    return whole_box(tuple(shape), ranks)


def _missing_text(view: _View, missing: Mapping[str, int]) -> str:
    """Say what is missing, the names with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    target = view.target
    for name, rank in missing.items():
        why = view.checkpoint.why_missing(_stored_name(view, name)).partition(": ")[2]
        if target is not None and name in target.untied:
            why += f"; the config says untied ({target.untied[name]} does not hold), so it is not taken from another array"
        by_reason.setdefault(f"{why} (wanted by rank {rank})", []).append(name)
    reasons = [f"{listing(names)}: {why}" for why, names in by_reason.items()]
    return f"{listing(reasons)}; missing='ignore' leaves them out"


def _stored_name(view: _View, name: str) -> str:
    """Return the name under which a wanted array is listed, where the checkpoint's naming differs by a prefix only."""
    if name in view.checkpoint.unavailable or view.target is None:
        return name
    for prefix in view.target.table.prefixes:
        for other in (prefix + name, name.removeprefix(prefix)):
            if other in view.checkpoint.unavailable:
                return other
    return name


def _warn(request: _Request) -> None:
    made = request.plan
    if made.unexpected:
        warnings.warn(
            f"{len(made.unexpected)} arrays of the checkpoint belong to nothing that is wanted: {listing(made.unexpected)}",
            MeshloadWarning,
            stacklevel=3,
        )


def _shown_progress(progress: Progress | bool | None) -> Any:
    import contextlib

    if progress is True:
        from .cli import progress_bar

        return progress_bar()
    return contextlib.nullcontext(progress if callable(progress) else None)
