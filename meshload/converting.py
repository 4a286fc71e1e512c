"""Converting opens one checkpoint, shows it under the target's naming, and fills a newly laid-out one from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .array import Array
from .box import Box
from .checkpoint import Checkpoint
from .errors import LayoutError, listing
from .formats import Format, Parts, Writer, installed
from .frameworks import framework_of, is_floating
from .loading import as_dtype, open, plan, shown_progress
from .reading import Progress
from .requesting import LayoutLike, model_in
from .source import Folder, LocalFolder, open_folder, read_bytes
from .writing import MAX_BYTES, fill, filling, prepare, publish, put, remember

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
        dtype: Cast floating arrays to this.
        format, config: As for `open`, of the source.
        max_bytes: Ceiling of memory that is no metadata, beyond the largest unit that the target encodes at once; 512 MiB.
        resume: Go on with an interrupted writing of the same source with the same options; what it finished is compared, not
            trusted.
        progress: True for a bar on the terminal, or a function of bytes done and bytes in all.

    Raises what `open` and `restore` raise before anything is written, `LayoutError` where the target exists, and `SourceError`
    where writing fails; nothing is published then.
    """
    writer = writer_of(to)
    target = _local(dst)
    checkpoint = src if isinstance(src, Checkpoint) else open(src, format=format, config=config)
    if checkpoint.unavailable:
        raise LayoutError(
            f"{src}: {listing(f'{n}: {why}' for n, why in checkpoint.unavailable.items())}; nothing is left out silently"
        )
    view = _view(checkpoint, writer, names)
    like = _cast(view, dtype)
    parts = _parts(view, mesh, layout)
    limit = MAX_BYTES if max_bytes is None else int(max_bytes)
    staging = prepare(target, resume=resume)
    remember(staging, _fingerprint(like, view, writer, parts))
    writer.create(staging, like, parts)
    for file, data in _carried(None if isinstance(src, Checkpoint) else open_folder(src), like, dtype):
        put(staging, file, data)
    made = _opened(writer, staging, like)
    todo = filling([(made[name], view.arrays[name]) for name in like.arrays], max_bytes=limit)
    with shown_progress(progress) as report:
        fill(todo, progress=report, resume=resume, lossy=dtype is not None)
    writer.commit(staging)
    publish(staging, target)


def writer_of(to: str | Format) -> Writer:
    """Return the format that writes, or say which can."""
    known = {name: f for name, f in installed().items() if isinstance(f, Writer)}
    found = known.get(to) if isinstance(to, str) else to
    if not isinstance(found, Writer):
        raise LayoutError(f"to={to!r}: it cannot be written; what can is: {', '.join(sorted(known))}")
    return found


def _local(dst: Any) -> Path:
    text = os.fspath(dst)
    if "://" in text:
        raise LayoutError(f"{text}: targets are local folders; write there, and copy the folder to where it is to be")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _view(checkpoint: Checkpoint, writer: Writer, names: str | None) -> Checkpoint:
    """Return the source under the names to be written."""
    if names is not None:
        return checkpoint.with_names(names)
    return checkpoint.with_names(writer.naming) if model_in(checkpoint) is not None else checkpoint


def _cast(view: Checkpoint, dtype: Any) -> Checkpoint:
    """Return what is to be laid out: the same arrays, stored nowhere yet, in the dtype that was asked for."""
    wanted = as_dtype(dtype, framework_of("numpy"))
    if wanted is not None and (view.config or {}).get("quantization_config"):
        raise LayoutError("dtype=: the weights are quantised, and are only converted as they are stored; leave out dtype=")

    def made(array: Array) -> Array:
        return array if wanted is None or not is_floating(array.dtype) else replace(array, dtype=wanted, stored=None)

    return replace(view, arrays={name: replace(made(a), name=name) for name, a in view.arrays.items()})


def _parts(view: Checkpoint, mesh: Any, layout: LayoutLike) -> Parts:
    if mesh is None:
        return {}
    found: dict[str, list[tuple[int, Box]]] = {}
    for target in plan(view, mesh=mesh, layout=layout, rank="all", names=view.names).targets:
        if target.box is not None:
            found.setdefault(target.name, []).extend((rank, target.box) for rank in target.ranks)
    return found


def _opened(writer: Writer, staging: LocalFolder, like: Checkpoint) -> Mapping[str, Array]:
    """Open what was laid out; it must be what was asked for."""
    made = writer.open(staging).arrays
    for name, array in like.arrays.items():
        found = made.get(name)
        if found is None or (found.shape, found.dtype) != (array.shape, array.dtype):
            raise LayoutError(f"{name}: {array.dtype.name} {array.shape} cannot be laid out by {writer.name}: {found!r} came of it")
    return made


def _fingerprint(like: Checkpoint, view: Checkpoint, writer: Writer, parts: Parts) -> dict[str, Any]:
    """Say what is being written from what, so that an interrupted writing is only gone on with where both are the same."""
    sources = {id(s): s for a in view.arrays.values() for s in a.pieces.sources}
    return {
        "format": repr(writer),
        "arrays": {name: [a.dtype.name, *a.shape] for name, a in like.arrays.items()},
        "parts": {name: sorted((rank, *box.start, *box.shape) for rank, box in found) for name, found in parts.items()},
        "files": sorted([s.name, int(s.size), getattr(s, "changed", None)] for s in sources.values()),
    }


def _carried(folder: Folder | None, like: Checkpoint, dtype: Any) -> list[tuple[str, bytes]]:
    """Return the files that go with the model; its config says the dtype that it now has."""
    found = {}
    if folder is not None and folder.entry is None:
        found = {file: read_bytes(folder.file(file)) for file in CARRIED if folder.has(file)}
    config = dict(like.config or {})
    if config and (dtype is not None or "config.json" not in found):
        for key in ("torch_dtype", "dtype"):
            if key in config and dtype is not None:
                config[key] = np.dtype(as_dtype(dtype, framework_of("numpy"))).name
        found["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    return list(found.items())
