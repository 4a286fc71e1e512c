"""Converting opens one checkpoint, shows it under the target's naming, and fills a newly laid-out one from it."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .array import Array
from .box import Box
from .checkpoint import Checkpoint
from .errors import LayoutError, MeshloadError, MeshloadWarning, SourceError, listing
from .exchange import running, together
from .formats import Format, Parts, Renaming, TyingWriter, Writer, installed
from .frameworks import Group, framework_of, is_floating
from .loading import as_dtype, as_meant, byte_count, check_meaning, in_full, kinds_of, moments_of, open, plan, shown_progress
from .mesh import Mesh
from .naming import chosen, idle
from .ranks import launched, resolved
from .reading import Progress
from .requesting import LayoutLike, missing_arrays, model_in
from .source import Folder, LocalFolder, closing_files, open_folder, read_bytes
from .writing import FAILED, MAX_BYTES, Filling, fill, filling, locked, prepare, publish, put, remember, share, staging_of

CARRIED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "chat_template.jinja", "chat_template.json"),
)
"""Files beside a model that go with it, into any format."""


def convert(
    src: Any,
    dst: Any,
    *,
    to: str | Format,
    mesh: Any = None,
    layout: LayoutLike = None,
    names: str | None = None,
    dtype: Any = None,
    optimizer: bool | Sequence[str] = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    format: str | Format | None = None,
    config: Any = None,
    max_bytes: int | None = None,
    resume: bool = False,
    progress: Progress | bool | None = None,
) -> None:
    """Write a checkpoint again in another format, under bounded memory.

    Args:
        src: As for `open`; or an open `Checkpoint`.
        dst: A new local folder. It appears when all is written: until then there is `.NAME.meshload-unfinished` beside it.
        to: A format that can be written (`"hf"`, `"orbax"` ...), or a format object with options.
        mesh: The mesh that will read it: what depends on it (Orbax's chunks) is cut so that each rank's slices are whole.
        layout: As for `restore`; how that mesh cuts the arrays.
        names: A naming; by default the target's own where the family is known, else the names stay.
        dtype: Cast floating weights to this; quantised weights are dequantised, or refused where that is not known.
        optimizer: Also convert the optimizer's arrays: all kinds, or those that are named (`"exp_avg"`, `"master"` ...).
        include, exclude: Globs of names, as they are written; moments go with their weights.
        format, config: As for `open`, of the source.
        max_bytes: Ceiling of memory that is no metadata, beyond the largest unit that the target encodes at once; 512 MiB.
        resume: Go on with an interrupted writing of the same source with the same options; what it finished is compared, not
            trusted.
        progress: True for a bar on the terminal, or a function of bytes done and bytes in all.

    Raises what `open` and `restore` raise before anything is written, `LayoutError` where the target exists, and `SourceError`
    where writing fails; nothing is published then.
    """
    writer = writer_of(to)
    limit = byte_count("max_bytes", MAX_BYTES if max_bytes is None else max_bytes) or 0
    cast = as_dtype(dtype, framework_of("numpy"))
    checkpoint = as_meant(src if isinstance(src, Checkpoint) else open(src, format=format, config=config), cast)
    checkpoint = replace(checkpoint, unavailable=_chosen(checkpoint.unavailable, include, exclude))
    _refuse_lost(src, checkpoint)
    view = _view(checkpoint, writer, names)
    if include is not None or exclude is not None:
        moments = {kind: _chosen(of, include, exclude) for kind, of in view.optimizer.items()}
        for text in idle((*view.arrays, *view.unavailable), include=include, exclude=exclude):
            warnings.warn(text, MeshloadWarning, stacklevel=2)
        view = replace(view, arrays=_chosen(view.arrays, include, exclude), optimizer=moments)
    _refuse_lost(src, view, missing_arrays(checkpoint) if view.unavailable else ())
    if not view.arrays:
        raise LayoutError(f"{src}: it holds no arrays, so there is nothing to convert")
    _tell(src, checkpoint, view)
    like = replace(_cast(view, cast), optimizer=moments_of(view, kinds_of(optimizer, view)))
    carried = _carried(None if isinstance(src, Checkpoint) else open_folder(src), like, cast)
    draft = Draft(writer, local(dst), like, _parts(view, mesh, layout), resume)
    group = processes()
    with shown_progress(progress if group.rank == 0 else None) as report, draft.laid_out(group, view, carried):

        def move(todo: Filling) -> None:
            groups = share(todo, group.rank, group.size)
            fill(todo, groups=groups, progress=report, check=draft.check, resume=resume, lossy=dtype is not None)

        draft.finish(group, view, move, limit)


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written, by one process or several, in a folder beside its place."""

    writer: Writer
    target: Path
    like: Checkpoint
    parts: Parts
    resume: bool = False

    @property
    def staging(self) -> LocalFolder:
        return LocalFolder(staging_of(self.target))

    @contextmanager
    def laid_out(self, group: Group, view: Checkpoint, carried: Sequence[tuple[str, bytes]]) -> Iterator[None]:
        """Make the folder and all files in it, their payload left out; one process does, all wait for it.

        Until the end nobody else may write there.
        """
        with closing_files(), ExitStack() as held:

            def make() -> None:
                staging = prepare(self.target, resume=self.resume)
                held.enter_context(locked(staging.path))
                remember(staging, _fingerprint(self.like, view, self.writer, self.parts))
                with self._given_up(group):
                    self.writer.create(staging, self.like, self.parts)
                    for file, data in carried:
                        put(staging, file, data)

            together(group, make, only=0)
            yield

    def pairs(self, view: Checkpoint) -> list[tuple[Array, Array]]:
        """Return the arrays that are laid out, each with the one that fills it; further rows, which pad, stay zeros.

        A master that a format has a place for, and nobody asked to convert, is the weight. Where the weight has no other place than
        its master's, that one is filled once.
        """
        opened = self.writer.open(self.staging)
        made, moments = opened.arrays, opened.optimizer
        called = self.writer.called if isinstance(self.writer, Renaming) else str
        found = []
        for name, array in self.like.arrays.items():
            one, master = made.get(called(name)), moments.get("master", {}).get(called(name))
            if one is not None and master is not None and one.pieces is master.pieces:
                continue
            one = _filled(one, array)
            if one is None:
                came = repr(made.get(called(name)))
                raise LayoutError(
                    f"{name}: {array.dtype.name} {array.shape} cannot be laid out by {self.writer.name}: {came} came of it"
                )
            found.append((one, view.arrays[name]))
        for kind, arrays in self.like.optimizer.items():
            for name, array in arrays.items():
                one = _filled(moments.get(kind, {}).get(called(name)), array)
                if one is None:
                    kinds = listing(self.like.optimizer)
                    raise LayoutError(f"optimizer: {self.writer.name} has no place for {kind} of {name}; of {kinds}, name others")
                found.append((one, view.optimizer[kind][name]))
        asked = self.like.optimizer.get("master", {})
        masters = {name: moments.get("master", {}).get(called(name)) for name in self.like.arrays if name not in asked}
        for name, master in masters.items():
            if master is not None:
                one = _filled(master, replace(self.like.arrays[name], dtype=master.dtype, stored=None))
                found.append((master if one is None else one, view.arrays[name]))
        return found

    def finish(self, group: Group, view: Checkpoint, move: Callable[[Filling], None], max_bytes: int) -> None:
        """Let each process move its share; then one gives the folder its name. Where one fails all do, and soon.

        All have read the empty files before anybody writes into them: a file that changes while it is opened is refused.
        """

        def joined() -> Filling:
            pairs = self.pairs(view)
            if group.rank == 0:
                tell_bytes([stored for made, stored in pairs if made.stored != stored.stored], self.writer, stacklevel=5)
            return filling(pairs, max_bytes=max_bytes)

        def attempt(todo: Filling) -> None:
            try:
                move(todo)
            except Exception as error:
                if group.size > 1:
                    with suppress(OSError):
                        told = self.staging.path / f"{FAILED}-{group.rank}"
                        told.write_text(f"rank {group.rank}: {error}")
                        told.replace(self.staging.path / FAILED)  # whole, to whoever looks
                raise

        def end() -> None:
            self.writer.commit(self.staging)
            publish(self.staging, self.target)

        with self._given_up(group):
            todo = together(group, joined)
            assert todo is not None
            together(group, lambda: attempt(todo))
        together(group, end, only=0)

    @contextmanager
    def _given_up(self, group: Group) -> Iterator[None]:
        """Remove the folder where going on would fail alike."""
        try:
            yield
        except MeshloadError as error:
            if group.rank == 0 and not isinstance(error, SourceError):
                shutil.rmtree(self.staging.path, ignore_errors=True)
            raise

    def check(self) -> None:
        """Raise where another process has failed."""
        failed = self.staging.path / FAILED
        if failed.exists():
            raise SourceError(f"another process failed: {failed.read_text(errors='replace')}")


def _filled(made: Array | None, array: Array) -> Array | None:
    """Return the part of a laid-out array that another one fills, which may have fewer rows; None where it fits nowhere."""
    if made is not None and made.ndim and made.ndim == array.ndim and made.shape[0] > array.shape[0]:
        made = made[: array.shape[0]]
    return made if made is not None and (made.shape, made.dtype) == (array.shape, array.dtype) else None


def processes() -> Group:
    """Return the processes that convert or save together."""
    group = running()
    world = launched()
    if group.size == 1 and world is not None and world.size > 1:
        raise LayoutError(
            f"{world.size} processes were launched, and they have no process group; call torch.distributed.init_process_group "
            f"(gloo will do) or jax.distributed.initialize first"
        )
    return group


def writer_of(to: str | Format) -> Writer:
    """Return the format that writes, or say which can."""
    known = {name: f for name, f in installed().items() if isinstance(f, Writer)}
    found = known.get(to) if isinstance(to, str) else to
    if not isinstance(found, Writer):
        raise LayoutError(f"to={to!r}: it cannot be written; what can is: {', '.join(sorted(known))}")
    return found


def local(dst: Any) -> Path:
    """Return the folder to be written; it is on a local disk, or one that looks like it."""
    text = os.fsdecode(dst)
    if not text or "\0" in text:
        raise LayoutError(f"path {text!r} is empty, or holds a NUL")
    if "://" in text:
        raise LayoutError(f"{text}: targets are local folders; write there, and copy the folder to where it is to be")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _view(checkpoint: Checkpoint, writer: Writer, names: str | None) -> Checkpoint:
    """Return the source under the names to be written."""
    if names is None and model_in(checkpoint) is not None:
        names = writer.naming
    view = in_full(checkpoint, names)
    stored, shown = (sum(math.prod(a.shape) for a in c.arrays.values()) for c in (checkpoint, view))
    if shown > stored and view.names not in (checkpoint.names, "native", "stored"):
        raise LayoutError(
            f"{shown} elements would be written, {stored} are stored: {view.names} has several names for some of them, and the "
            f"config does not say which is meant; give it in config= (MaxText's scan_layers is such a key)"
        )
    return _tied_once(view, writer) if isinstance(writer, TyingWriter) else view


def _tied_once(view: Checkpoint, writer: Writer) -> Checkpoint:
    """Return a checkpoint without second copies of what the config ties; copies that differ raise."""
    model = model_in(view)
    ties = {} if model is None else model.ties

    def once(arrays: Mapping[str, Array]) -> dict[str, Array]:
        second = {alias for alias, name in ties.items() if alias in arrays and name in arrays}
        for alias in second:
            _check_copies(arrays[alias], arrays[ties[alias]], writer)
        return {name: array for name, array in arrays.items() if name not in second}

    return replace(view, arrays=once(view.arrays), optimizer={kind: once(of) for kind, of in view.optimizer.items()})


def _check_copies(one: Array, other: Array, writer: Writer) -> None:
    """Raise where two copies differ, of which only one can be written."""
    rows = max(1, MAX_BYTES // 16 // max(1, math.prod(one.shape[1:]) * one.dtype.itemsize))
    same = one.shape == other.shape and all(
        np.asarray(one[at : at + rows]).tobytes() == np.asarray(other[at : at + rows]).tobytes() for at in range(0, len(one), rows)
    )
    if not same:
        raise LayoutError(
            f"{one.name} and {other.name} are tied by the config, {writer.name} has one place for both, and the stored copies "
            f"differ; say in config= that they are not tied ('tie_word_embeddings': False), or make them equal"
        )


Held = TypeVar("Held")


def _chosen(held: Mapping[str, Held], include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> dict[str, Held]:
    return {name: held[name] for name in chosen(held, include, exclude)}


def tell_bytes(arrays: Sequence[Array], format: Format, *, stacklevel: int) -> None:
    """Warn of arrays whose dtype a format has no word for, so that it shows bytes."""
    if any(array.stored for array in arrays):
        said = listing(f"{array.name} ({array.stored})" for array in arrays if array.stored)
        text = f"{format.name} has no dtype for {said}; their bits are kept, and its readers find bytes, uint8"
        warnings.warn(text, MeshloadWarning, stacklevel=stacklevel + 1)


def _refuse_lost(src: Any, checkpoint: Checkpoint, missing: Sequence[str] = ()) -> None:
    """Raise where arrays are known of that cannot be given."""
    if checkpoint.unavailable:
        lost = listing(f"{n}: {why}" for n, why in checkpoint.unavailable.items())
        told = f" (the config asks for {listing(missing)}, which are not there)" if missing else ""
        raise LayoutError(f"{src}: {lost}{told}; nothing is left out silently")


def _tell(src: Any, checkpoint: Checkpoint, view: Checkpoint) -> None:
    """Warn of what the model lacks, and of what it does not know."""
    model = model_in(checkpoint)
    unknown = [n for n in view.meta.get("unexpected", ()) if n in view.arrays]
    if unknown and model is not None and model.naming != view.names:
        text = f"{src}: {len(unknown)} arrays belong to nothing that {model.family} has, and keep their names: {listing(unknown)}"
        warnings.warn(text, MeshloadWarning, stacklevel=3)
    lacking = missing_arrays(checkpoint) if view.names not in ("native", "stored") else []
    if lacking:
        text = f"{src}: the config asks for {len(lacking)} arrays that are not there, and will not be: {listing(lacking)}"
        warnings.warn(text, MeshloadWarning, stacklevel=3)


def _cast(view: Checkpoint, dtype: np.dtype[Any] | None) -> Checkpoint:
    """Return what is to be laid out: the same arrays, stored nowhere yet, in the dtype that was asked for."""
    if dtype is not None:
        check_meaning({name: array.dtype for name, array in view.arrays.items()}, dtype)

    def made(array: Array) -> Array:
        return array if dtype is None or not is_floating(array.dtype) else replace(array, dtype=dtype, stored=None)

    return replace(view, arrays={name: replace(made(a), name=name) for name, a in view.arrays.items()})


def _parts(view: Checkpoint, mesh: Any, layout: LayoutLike) -> Parts:
    if mesh is None:
        return Parts()
    found: dict[str, list[tuple[int, Box]]] = {}
    plain = replace(view, arrays={name: replace(a, step=None) for name, a in view.arrays.items()})  # its steps move no box
    for target in plan(plain, mesh=mesh, layout=layout, rank="all", names=view.names).targets:
        if target.box is not None:
            found.setdefault(target.name, []).extend((rank, target.box) for rank in target.ranks)
    into = "numpy" if isinstance(mesh, (str, Mapping, Mesh)) else None  # as plan() has it
    sized, _, _ = resolved(mesh, "all", framework_of(into, mesh))
    return Parts(found, sized)


def _fingerprint(like: Checkpoint, view: Checkpoint, writer: Writer, parts: Parts) -> dict[str, Any]:
    """Say what is being written from what, so that an interrupted writing is only gone on with where both are the same."""
    sources = {id(s): s for a in view.arrays.values() for s in a.pieces.sources}
    return {
        "format": repr(writer),
        "arrays": {name: [a.dtype.name, *a.shape] for name, a in like.arrays.items()},
        "optimizer": {kind: sorted(arrays) for kind, arrays in like.optimizer.items()},
        "parts": {name: sorted((rank, *box.start, *box.shape) for rank, box in found) for name, found in parts.items()},
        "files": sorted([s.name, int(s.size), getattr(s, "changed", None)] for s in sources.values()),
    }


def _carried(folder: Folder | None, like: Checkpoint, dtype: np.dtype[Any] | None) -> list[tuple[str, bytes]]:
    """Return the files that go with the model; its config says the dtype that it now has."""
    found = {}
    if folder is not None and folder.entry is None:
        found = {file: read_bytes(folder.file(file)) for file in CARRIED if folder.has(file)}
    config = dict(like.config or {})
    if config and (dtype is not None or "config.json" not in found):
        for key in ("torch_dtype", "dtype"):
            if key in config and dtype is not None:
                config[key] = dtype.name
        found["config.json"] = config_file(config)
    return list(found.items())


def config_file(config: Mapping[str, Any]) -> bytes:
    """Return a `config.json`."""
    return json.dumps(dict(config), indent=2).encode() + b"\n"
