"""Open, plan, restore: the only place where formats, tables, layouts, plans, reading and frameworks meet."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import Box
from .checkpoint import Checkpoint
from .dequantising import SCALES, Dequantised, dequantised
from .digests import Digest, of_slice, total
from .errors import FormatError, LayoutError, MeshloadError, MeshloadWarning, MissingArray, MissingPieces, listing
from .exchange import Alone, exchange_of, read_shared, running, shared, together
from .formats import CONFIG, Format, choose, config_in, described
from .frameworks import Framework, Group, Landing, Placement, Slice, Streaming, framework_of, is_floating
from .layout import Layout
from .mesh import Mesh
from .naming import (
    CANONICAL,
    ask,
    contradiction,
    model_of,
    moment_step,
    naming_names,
    naming_of,
    shown,
    take_apart,
    tied,
    unwrapped,
)
from .planning import MAX_BYTES, Choice, Plan, Target, check_limit
from .planning import plan as join
from .ranks import resolved
from .reading import Progress, buffers_for, read, values_of
from .requesting import Collector, LayoutLike, all_names, missing_text, model_in, no_names, view_of
from .source import WRITING, Folder, LocalFolder, closing_files, is_remote, open_folder
from .wanting import Wanted

if TYPE_CHECKING:
    from .streaming import Stream


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put garbage collection off: opening and planning make much that stays, and passing over it again and again takes as long.

    A plan of 100,000 arrays took 10 s with it, 7 s without; and restoring a small model 0.07 s more where the call happened to set
    off a full collection of all that torch had made, which now waits for the caller's next young objects.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.collect(0)
            gc.enable()


@_uncollected()
@closing_files()
def open(path: Any, *, format: str | Format | None = None, config: Any = None) -> Checkpoint:
    """Open a checkpoint: headers and indexes are read, no payload.

    `path` is a local path, a TensorStore key-value URL or an open `tensorstore.KvStore`; `format` a format's name, or a format
    object with options, where recognising it is not enough; `config` completes what the checkpoint does not say: a Hugging
    Face `config.json`, its folder, or a dict with its keys. Raises `FormatError` for what is no checkpoint or a damaged one.
    """
    folder = open_folder(path)
    if isinstance(folder, LocalFolder) and folder.has(WRITING):
        raise FormatError(
            f"{folder.name}: what meshload writes there is not finished, or was interrupted, and may hold zeros; convert again "
            f"with resume=True, or remove it"
        )
    found, passed_over = choose(folder, format)
    opened = found.open(folder)
    meta = dict(opened.meta)
    if passed_over:
        meta["passed_over"] = tuple(passed_over)
    stored = unwrapped([*opened.arrays, *opened.aliases])
    if any(new != old for new, old in stored.items()):
        meta["stripped"] = {old: new for new, old in stored.items() if new != old}
        arrays = {new: replace(opened.arrays[old], name=new) for new, old in stored.items() if old in opened.arrays}
        bare = meta["stripped"]
        aliases = {bare.get(alias, alias): bare.get(name, name) for alias, name in opened.aliases.items()}
        moments = {kind: {bare.get(n, n): a for n, a in of.items()} for kind, of in opened.optimizer.items()}
        opened = replace(opened, arrays=arrays, aliases=aliases, optimizer=moments)
    given = described(config)
    if given is None and "model_type" not in (opened.config or {}) and not any(p.file == CONFIG for p in opened.problems):
        given = _beside(folder, opened.config)
    merged = _completed(opened.config, given)
    native = replace(opened, meta=meta, config=merged, aliases={**_ties(opened.arrays, merged), **opened.aliases}, names="native")
    return replace(native, views=_views(native, opened))


def with_views(native: Checkpoint) -> Checkpoint:
    """Return a checkpoint that was not opened from files, with the namings that its config allows."""
    return replace(native, views=_views(native, native))


def _ties(arrays: Mapping[str, Array], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the tied weights that are stored under one name only, as the config ties them."""
    found = _tied_in(CANONICAL, arrays, config)
    naming = naming_of(arrays, config) if found else None  # a canonical name alone does not make all of them canonical
    return found if naming is None or naming == CANONICAL else _tied_in(naming, arrays, config)


def _tied_in(naming: str, arrays: Mapping[str, Array], config: Mapping[str, Any] | None) -> dict[str, str]:
    model = model_of(naming, config)
    pairs = [] if model is None else [*model.ties.items(), *((name, alias) for alias, name in model.ties.items())]
    return {alias: name for alias, name in pairs if alias not in arrays and name in arrays}


def _beside(folder: Folder, told: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the `config.json` in the folder, as converting puts it beside any format; not one of another model."""
    try:
        found = config_in(folder) if folder.entry is None and folder.has(CONFIG) else None
    except MeshloadError:
        return None  # not ours to tell: the format knows nothing of it
    clash = contradiction(told, found) if told and found else []
    if clash:
        warnings.warn(
            f"{CONFIG} beside the checkpoint is not used, it is of another model: {listing(clash)}", MeshloadWarning, stacklevel=3
        )
        return None
    return found or None


def _completed(told: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if told is None or given is None:
        return given if told is None else told
    clash = contradiction(told, given)
    if clash:
        raise LayoutError(f"config= contradicts the checkpoint's own config: {listing(clash)}")
    return {**given, **{k: v for k, v in told.items() if v is not None or k not in given}}


def _views(native: Checkpoint, opened: Checkpoint) -> dict[str, Callable[[], Checkpoint]]:
    """Return the other namings under which a checkpoint can be shown."""
    views: dict[str, Callable[[], Checkpoint]] = dict(opened.views)
    stored = opened.views.get("stored", lambda: replace(opened, names="stored"))
    views["stored"] = lambda: replace(stored(), config=native.config, views=views)
    for naming in naming_names():
        views[naming] = partial(_shown_as, native, naming)
    views["native"] = lambda: replace(native, views=views)
    return views


def _shown_as(checkpoint: Checkpoint, naming: str) -> Checkpoint:
    source = model_in(checkpoint)
    target = model_of(naming, checkpoint.config, names=checkpoint.arrays)
    if source is None or target is None:
        raise LayoutError(no_names(checkpoint, naming))
    ask(target)
    inventory = take_apart(source, all_names(checkpoint, source))
    made = shown(target, tied(target, inventory), checkpoint)
    moments = {}
    for kind, arrays in checkpoint.optimizer.items():
        view = shown(target, tied(target, take_apart(source, arrays)), replace(checkpoint, arrays=arrays))
        moments[kind] = {name: replace(a, step=moment_step(kind, a.step)) for name, a in view.arrays.items()}
    return replace(made, optimizer=moments, meta={**made.meta, "unexpected": inventory.unexpected})


def in_full(checkpoint: Checkpoint, names: str | None) -> Checkpoint:
    """Return all arrays of a checkpoint under a naming: also those that its table does not know, which keep their names, and
    those that the format declares to be another one (only what the config ties is left an alias).

    Without a naming the canonical one is meant where the family is known, else that which the checkpoint has.
    """
    if names is None and model_in(checkpoint) is not None:
        names = CANONICAL
    view = checkpoint if names is None else checkpoint.with_names(names)
    left = {n: checkpoint.arrays[n] for n in view.meta.get("unexpected", ()) if n in checkpoint.arrays and view is not checkpoint}
    both = [name for name in left if name in view]
    if both:
        raise LayoutError(f"{listing(both)}: under {view.names} names, other arrays of the model are called so")
    model = model_in(view)
    ties = {} if model is None else model.ties
    declared = {a: n for a, n in view.aliases.items() if ties.get(a) != n and ties.get(n) != a}
    arrays = {**view.arrays, **left, **{a: replace(view.arrays[n], name=a) for a, n in declared.items() if n in view.arrays}}
    moments = {k: {**of, **_named(checkpoint.optimizer.get(k, {}), left)} for k, of in view.optimizer.items()}
    return replace(view, arrays=arrays, optimizer=moments, aliases={a: n for a, n in view.aliases.items() if a not in declared})


def _named(arrays: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    return {name: arrays[name] for name in names if name in arrays}


def kinds_of(optimizer: bool | str | Sequence[str], *views: Checkpoint) -> list[str]:
    """Return the kinds of optimizer arrays that are asked for: all that any of the views has, or those that are named.

    Raises `LayoutError` where none has them.
    """
    held = list(dict.fromkeys(kind for view in views for kind in view.optimizer))
    kinds = [optimizer] if isinstance(optimizer, str) else held if optimizer is True else list(optimizer or ())
    if optimizer and (not kinds or any(kind not in held for kind in kinds)):
        why = listing(dict.fromkeys(w for view in views for n, w in view.unavailable.items() if n.startswith("optimizer.")))
        asked = "its state" if optimizer is True else listing(kinds)
        there = f"{' and '.join(view.format for view in views)} there is {listing(held) or 'no optimizer state'}"
        raise LayoutError(f"optimizer: {asked} was asked for, and in {there}{': ' if why else ''}{why}")
    return kinds


def moments_of(view: Checkpoint, kinds: Sequence[str]) -> dict[str, dict[str, Array]]:
    """Return the optimizer's arrays of some kinds, each called as `restore` has it: `optimizer.exp_avg.<name>`."""
    return {k: {n: replace(a, name=f"optimizer.{k}.{n}") for n, a in view.optimizer[k].items()} for k in kinds}


def with_moments(view: Checkpoint, kinds: Sequence[str]) -> Checkpoint:
    """Return a checkpoint whose arrays are also those of its optimizer, of those kinds that it has."""
    held = moments_of(view, [kind for kind in kinds if kind in view.optimizer])
    return replace(view, arrays={**view.arrays, **{a.name: a for of in held.values() for a in of.values()}})


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
    digest: Any = None,
    exchange: bool | None = None,
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
        digest: A `Digest`, or a file that its `save` wrote: what arrives is compared with it, as stored, and `FormatError` is
            raised where it differs. Of an array that this process holds in part, and the others do not tell of theirs
            (`exchange`), nothing can be said: a warning tells.
        exchange: Whether the running processes share their reads: what several want is read once, and handed on by the process
            group. Then all of them must call, each with its own `like` if need be. By default they do where the checkpoint lies
            in an object store or on a network file system, and `mesh=` spans the group; a rank that is asked for by `rank=` reads
            alone. The result is the same. Where it is local to some processes and remote to others, say True or False.
        max_bytes: Ceiling of memory that is neither result nor metadata; 256 MiB by default.
        merge_gap: Unwanted bytes that are read rather than skipped; by default 4 KiB locally, more for object stores.
        progress: True for a bar on the terminal, or a function of bytes done and bytes in all.

    Raises `MissingArray`, `MissingPieces`, `Overlap`, `LayoutError`, `FormatError`, `LimitError` before any payload is read,
    and `SourceError` where reading fails.
    """
    if isinstance(rank, str):
        raise LayoutError(f"rank={rank!r}: a number was expected; 'all' is for plan()")
    group = _exchanging(exchange, path, mesh, rank)

    def prepare() -> tuple[_Request, Digest | None, Stream | None, dict[int, Any]]:
        request = _request(
            path,
            mesh=mesh,
            rank=rank,
            layout=layout,
            like=like,
            into=into,
            dtype=dtype,
            names=names,
            format=format,
            config=config,
            include=include,
            exclude=exclude,
            missing=missing,
            optimizer=optimizer,
            copies=copies,
            max_bytes=max_bytes,
            merge_gap=merge_gap,
        )
        _warn(request)
        expected = digest if digest is None or isinstance(digest, Digest) else Digest.load(digest)
        made = check_limit(request.plan)
        streamed = None if expected is not None or group.size > 1 else request.stream(device)
        return request, expected, streamed, buffers_for(made, without=() if streamed is None else streamed.away)

    with _uncollected():
        prepared = together(group, prepare)  # all that may fail, so that no process waits for one that has raised
        assert prepared is not None
        request, expected, streamed, buffers = prepared
        made = request.plan
        if len({*shared(group, expected is None)}) > 1:
            raise LayoutError("digest=: some processes gave one and others did not; with exchange, all compare or none")
        with shown_progress(progress) as report:
            if group.size > 1:
                read_shared(made, buffers, exchange_of(made, group), progress=report)
            elif streamed is not None:
                streamed.run(buffers, report)
            else:
                read(made, buffers, progress=report)
        if expected is not None:
            request.check_digest(buffers, expected, group)
        request.check_ties(buffers)
        return request.place(buffers, device, {} if streamed is None else streamed.landings)


def _exchanging(exchange: bool | None, path: Any, mesh: Any, rank: int | None) -> Group:
    """Return the processes that share their reads; only this one where they do not."""
    _check_exchange(exchange, rank)
    if exchange is False or rank is not None or (exchange is None and mesh is None):
        return Alone()
    group = running()
    if exchange and group.size == 1:
        raise LayoutError("exchange=True needs a group of processes; initialise torch.distributed or jax.distributed first")
    return group if group.size > 1 and _choice(exchange, path, mesh, rank, group).chosen else Alone()


def _check_exchange(exchange: Any, rank: Any) -> None:
    if not (exchange is None or isinstance(exchange, bool)):
        raise LayoutError(f"exchange={exchange!r}: True, False or None was expected")
    if exchange and rank not in (None, "all"):
        raise LayoutError("exchange=True: processes share reads where each restores its own rank; leave out rank=")


def _choice(exchange: bool | None, path: Any, mesh: Any, rank: Any, group: Group) -> Choice:
    """Say whether processes share their reads: those of a group, or where only one runs, those that the mesh is made for."""
    if exchange is not None:
        return Choice(exchange, f"exchange={exchange}")
    if rank not in (None, "all"):
        return Choice(False, "rank= asks for one rank's slices")
    if mesh is None:
        return Choice(False, "without mesh= nobody knows what others want")
    if isinstance(path, Checkpoint):
        return Choice(False, "an open checkpoint was given")
    if group.size > 1 and not _spans(mesh, group):
        return Choice(False, "mesh= has not all processes that run")
    if is_remote(path):
        return Choice(True, "an object store or a network file system")
    return Choice(False, "a local file system")


def _spans(mesh: Any, group: Group) -> bool:
    """Say whether a mesh has all processes of a group; sizes that do not fit it are refused later, by all."""
    framework = framework_of(None, mesh)
    return not framework.owns(mesh) or framework.mesh(mesh).size == group.size * len(framework.ranks(mesh))


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
    exchange: bool | None = None,
    max_bytes: int | None = None,
    merge_gap: int | None = None,
) -> Plan:
    """Return what `restore` with the same arguments would read, without reading payload; `rank="all"` plans for every rank."""
    if rank is not None and not isinstance(rank, (int, np.integer)) and rank != "all":
        raise LayoutError(f"rank={rank!r}: a number or 'all' was expected")
    if into is None and like is None and isinstance(mesh, (str, Mapping, Mesh)):
        into = "numpy"  # a plan of sizes needs no framework
    _check_exchange(exchange, rank)
    made = _request(
        path,
        mesh=mesh,
        rank=rank,
        layout=layout,
        like=like,
        into=into,
        dtype=dtype,
        names=names,
        format=format,
        config=config,
        include=include,
        exclude=exclude,
        missing=missing,
        optimizer=optimizer,
        copies=copies,
        max_bytes=max_bytes,
        merge_gap=merge_gap,
    ).plan
    return replace(made, exchange=_choice(exchange, path, mesh, rank, running()))


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
    notes: Sequence[str]
    """What is right, but unexpected."""
    tied: Mapping[str, str]
    """Arrays that the config ties -> the name that both are stored under, where they are stored once."""

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

    def check_digest(self, buffers: Mapping[int, Any], expected: Digest, group: Group) -> None:
        """Raise where what was read, by all processes of a group together, is not what a digest says."""
        told = together(group, lambda: self._digests(buffers, expected))
        assert told is not None
        found, unlike = told
        if group.size > 1:  # a slice that several processes hold counts once
            for of_rank in shared(group, [[list(box.start), list(box.shape), one.to_json()] for (_, box), one in found.items()]):
                for start, shape, one in of_rank:
                    other = Digest.from_json(one)
                    found.setdefault((next(iter(other.arrays)), Box(tuple(start), tuple(shape))), other)
        added = total(found.values())
        different = added.differences(expected)
        if different:
            told_of = listing(f"{name} {what}{self._among(name)}" for name, what in different)
            raise FormatError(
                f"digest=: {told_of}; the files are damaged, or the digest is another checkpoint's (verify with a second copy "
                f"finds the elements)"
            )
        lacking = {*added.arrays} - {*expected.arrays} | {*expected.partial}
        untold = dict.fromkeys([*added.partial, *unlike, *(n for n in added.arrays if n in lacking)])
        if untold:
            warnings.warn(
                f"digest=: {len(untold)} arrays were not compared, since this process holds only a part of them, they are "
                f"dequantised, or the digest lacks them or is of a part: {listing(untold)}",
                MeshloadWarning,
                stacklevel=3,
            )

    def _among(self, name: str) -> str:
        """Say in which files an array lies, as far as this process reads it."""
        copies = self.plan.copies
        mine = [i for i, t in enumerate(self.plan.targets) if name in (t.name, self.tied.get(t.name))]
        files = [self.plan.sources[i].name for i in np.unique(copies.source[np.isin(copies.target, mine)]).tolist()]
        return f" (in {listing(files, 3)})" if files else ""

    def _digests(self, buffers: Mapping[int, Any], expected: Digest) -> tuple[dict[tuple[str, Box], Digest], list[str]]:
        """Return the digest of each slice that was read, and the arrays of which one is no box, padded or computed."""
        found: dict[tuple[str, Box], Digest] = {}
        unlike: list[str] = []
        copies = self.plan.copies
        is_computed = np.asarray([isinstance(s, Dequantised) for s in self.plan.sources], bool)
        computed = set(np.unique(copies.target[is_computed[copies.source]]).tolist()) if is_computed.any() else set()
        for i, target in enumerate(self.plan.targets):
            box, name = target.box, target.name if target.name in expected.arrays else self.tied.get(target.name, target.name)
            if box is None or target.filled != target.size or i in computed:
                unlike += [] if i in self.plan.spare else [name]
            elif i not in self.plan.spare and (name, box) not in found:
                values = values_of(buffers[i], target, [buffers[n] for n in self.plan.others.get(i, ())])
                found[name, box] = of_slice(name, values, box, target.whole)
        return found, unlike

    def stream(self, device: Any) -> Stream | None:
        """Make the tensors of devices that are filled while others are read; None where there are none.

        What is chunked is decoded whole, and ties are compared in main memory.
        """
        staging = self.framework.staging() if isinstance(self.framework, Streaming) else None
        if staging is None:
            return None
        from .streaming import stream

        targets, sources, copies = self.plan.targets, self.plan.sources, self.plan.copies
        chunked = np.asarray([s.unit != 1 for s in sources], bool)
        held = {*self.plan.spare, *np.unique(copies.target[chunked[copies.source]]).tolist()}
        compared = {name for pair in self.ties for name in pair}
        landings = {}
        for i, target in enumerate(targets):
            if i in held or target.name in compared or not target.size:
                continue
            dtype = self._wanted(target) or target.dtype
            stored = target.stored if dtype == target.dtype else None
            landing = staging.landing(target.name, target.shape, dtype, stored, self._placement(target, device))
            if landing is not None:
                landings[i] = landing
        return stream(self.plan, landings, staging) if landings else None

    def place(self, buffers: dict[int, Any], device: Any, landings: Mapping[int, Landing]) -> Any:
        """Turn filled buffers into tensors, letting go of each buffer on the way; what has landed is there."""
        by_name: dict[str, list[int]] = {}
        for i, target in enumerate(self.plan.targets):
            if i not in self.plan.spare:
                by_name.setdefault(target.name, []).append(i)
        aliases: dict[int, list[str]] = {}
        for alias, i in self.plan.aliases:
            aliases.setdefault(i, []).append(alias)
        tensors: dict[str, Any] = {}
        for name, numbers in by_name.items():
            targets = [self.plan.targets[i] for i in numbers]
            slices = []
            for i, target in zip(numbers, targets, strict=True):
                values = landings[i].tensor if i in landings else self._values(i, buffers)
                slices += [Slice(r, target.box, values, target.stored) for r in target.ranks]
            tensor = self.framework.tensor(slices, self._placement(targets[0], device))
            tensors[name] = tensor
            for alias in {a for i in numbers for a in aliases.get(i, ())}:
                tensors[alias] = tensor
        return tensors if self.like is None else self.framework.like(self.like, tensors)

    def _placement(self, target: Target, device: Any) -> Placement:
        placement = self.placements.get(target.name) or Placement(target.whole)
        return replace(placement, device=device or placement.device)

    def _wanted(self, target: Target) -> np.dtype[Any] | None:
        """Return what a target is cast to, if to anything."""
        return self.dtypes.get(target.name) or (self.dtype if is_floating(target.dtype) else None)

    def _values(self, i: int, buffers: dict[int, Any]) -> NDArray[Any]:
        target: Target = self.plan.targets[i]
        wanted = self._wanted(target)
        values = values_of(buffers.pop(i), target, [buffers.pop(n) for n in self.plan.others.get(i, ())], wanted)
        return values if wanted is None or wanted == values.dtype else values.astype(wanted)


@_uncollected()
def _request(
    path: Any,
    *,
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
    max_bytes, merge_gap = byte_count("max_bytes", max_bytes), byte_count("merge_gap", merge_gap)
    if optimizer and like is not None:
        raise LayoutError("optimizer=True goes with a dict of tensors; a like= names all that it wants itself")
    framework = framework_of(into, mesh, like)
    cast = as_dtype(dtype, framework)
    checkpoint = as_meant(path if isinstance(path, Checkpoint) else open(path, format=format, config=config), cast, narrow=True)
    sized, foreign, ranks = resolved(mesh, rank, framework)
    if framework.spans_always and foreign is None and like is None:
        raise LayoutError(f"into={framework.name!r}: its tensors span a mesh of its own, and mesh={mesh!r} is none")
    wishes = framework.wishes(like) if like is not None else None
    view = view_of(checkpoint, names, wishes)
    if copies not in ("first", "check", "mean"):
        raise LayoutError(f"copies={copies!r}: 'first', 'check' or 'mean' was expected")
    wanted = Wanted(copies=copies)
    placements: dict[str, Placement] = {}
    collect = Collector(
        view=view,
        mesh=sized,
        foreign=foreign,
        ranks=ranks,
        layout=layout,
        framework=framework,
        wishes=wishes,
        wanted=wanted,
        placements=placements,
        include=include,
        exclude=exclude,
    )
    collect.weights()
    if optimizer:
        collect.moments(checkpoint)
    collect.check_globs()
    collect.check_shares()
    collect.check_axes()
    wanted.notes += [f"{p.file}: {p.text}" for p in checkpoint.problems if checkpoint.config is None and not checkpoint.unavailable]
    if wanted.missing and missing == "error":
        raise MissingArray(missing_text(view, wanted.missing))
    try:
        joined = join(wanted.jobs(), wanted.targets)
    except MissingPieces as error:
        damage = listing(p.text for p in checkpoint.problems)
        if not damage:
            raise
        raise MissingPieces(f"{error}; the checkpoint is damaged: {damage}") from error
    made = Plan(
        wanted.targets,
        joined.copies,
        joined.others,
        aliases=tuple(wanted.aliases),
        unexpected=collect.unexpected(),
        missing=tuple(wanted.missing),
        notes=(f"mesh {sized} ({sized.chosen})", *wanted.notes) if sized.names else tuple(wanted.notes),
        max_bytes=MAX_BYTES if max_bytes is None else max_bytes,
        merge_gap=merge_gap,
        apart=rank == "all",
    )
    made = replace(made, notes=(*made.notes, *_cast_cost(made, cast)))
    if cast is not None:
        check_meaning({t.name: t.dtype for t in made.targets}, cast)
    return _Request(
        plan=made,
        framework=framework,
        placements=placements,
        like=like,
        dtype=cast,
        dtypes={n: w.dtype for n, w in (wishes or {}).items()} if cast is None else {},
        ties=collect.doubles(),
        notes=wanted.notes,
        tied={} if view.target is None else view.target.ties,
    )


def _globs(word: str, globs: Any) -> list[str] | None:
    """Return globs as a list, which may be gone through more than once."""
    if globs is None:
        return None
    found = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else [globs]
    if not all(isinstance(glob, str) for glob in found):
        raise LayoutError(f"{word}={globs!r}: a glob of names or several were expected")
    return found


def byte_count(word: str, n: Any) -> int | None:
    """Return a number of bytes that the caller gave, or raise; None stays."""
    if n is None:
        return None
    if isinstance(n, bool) or not isinstance(n, (int, float, np.number)) or not 0 <= n < 1 << 62:
        raise LayoutError(f"{word}={n!r}: a number of bytes was expected")
    return int(n)


def _cast_cost(made: Plan, cast: np.dtype[Any] | None) -> Iterator[str]:
    """Say what casting makes of the result."""
    if cast is None:
        return
    changed = [t for i, t in enumerate(made.targets) if i not in made.spare and is_floating(t.dtype) and t.dtype != cast]
    if changed:
        after, before = sum(t.size * cast.itemsize for t in changed), sum(t.nbytes for t in changed)
        yield f"dtype={cast.name}: {len(changed)} arrays are cast, and take {after} bytes in place of {before}"


def as_meant(checkpoint: Checkpoint, dtype: np.dtype[Any] | None, *, narrow: bool = False) -> Checkpoint:
    """Return a checkpoint whose quantised weights are what they mean, where there is a dtype for them."""
    if dtype is None:
        return checkpoint
    native = checkpoint.with_names("native") if "native" in checkpoint.views else checkpoint
    arrays, config = dequantised(native.arrays, native.config, dtype, narrow=narrow)
    if arrays is native.arrays:
        return checkpoint
    found = with_views(replace(native, arrays=arrays, config=config))
    return found if checkpoint.names in ("native", "stored") else found.with_names(checkpoint.names)


def check_meaning(dtypes: Mapping[str, np.dtype[Any]], cast: np.dtype[Any]) -> None:
    """Raise where 8-bit floats are to be cast whose scales are not known."""
    for name, dtype in dtypes.items():
        if dtype.itemsize == 1 and is_floating(dtype) and dtype != cast and not name.endswith(SCALES):
            raise LayoutError(
                f"dtype=: {name} is {dtype.name}, which means nothing without scales, and there are none; leave out dtype= to get "
                f"the bits as stored"
            )


def as_dtype(dtype: Any, framework: Framework) -> np.dtype[Any] | None:
    """Return the floating dtype that the caller means, in NumPy's, ml_dtypes' or the framework's words."""
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


def _warn(request: _Request) -> None:
    made = request.plan
    for note in request.notes:
        warnings.warn(note, MeshloadWarning, stacklevel=5)
    if made.unexpected:
        warnings.warn(
            f"{len(made.unexpected)} arrays of the checkpoint belong to nothing that is wanted: {listing(made.unexpected)}",
            MeshloadWarning,
            stacklevel=5,
        )


def shown_progress(progress: Progress | bool | None) -> Any:
    """Return a context that gives the function to report to: the caller's, or the terminal's bar."""
    import contextlib

    if progress is True:
        from .cli import progress_bar

        return progress_bar()
    return contextlib.nullcontext(progress if callable(progress) else None)
