"""Hugging Face checkpoints: safetensors files, one or many, with an index.

Files. A folder holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names, by habit
`model-00001-of-00005.safetensors`. A variant stands before the suffix: `model.fp16.safetensors`,
`model.safetensors.index.fp16.json`, `model.fp16-00001-of-00002.safetensors`. Mistral's own releases say `consolidated` for
`model`, with `params.json` beside them (`_params.py`). `config.json` describes the model. Repositories ship the same weights
several times, and other files that look alike, so nothing is ever merged by globbing: the index decides, and what it does not
name is told in `meta["unlisted"]`. Where an index and `model.safetensors` are both there, the index decides too.

A safetensors file (https://huggingface.co/docs/safetensors) is, as version 0.8 of the library reads it:

    u64 little endian N | N bytes of UTF-8 JSON, at most 100,000,000 | data
    {"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [97, 32], "data_offsets": [begin, end]}, ...}

Offsets are bytes, relative to byte `8 + N`; data is little endian and row-major. Sorted by offset, the first tensor begins at 0,
each where the one before it ends, and the last ends with the file. N need not be a multiple of 8, so tensors need not be
aligned. The last dim of packed types (`F4`: 2 elements a byte, `F6_*`: 4 in three bytes) counts elements; here they are arrays of
bytes. The reference library accepts more in these points, which are refused here: rows of packed types that end within a byte
(torch refuses them too), a name twice in one JSON object, a tensor described by a JSON array, a dtype written as an object, more
than 32 dims, zero-size tensors whose other dims overflow. In fields that nobody knows it refuses what is let pass here: nesting
beyond 128, floats beyond the range.

`safetensors.torch.save_model` writes a tensor that has several names once, and tells the others in `__metadata__`:
`{"lm_head.weight": "embed.weight"}`. They are aliases here.

The index is `{"metadata": {"total_size": 224640}, "weight_map": {name: file}}`. `total_size` is often wrong and checks nothing.
File names stay inside the folder; subfolders are allowed. Links to regular files are followed wherever they lead: hub caches
consist of them.

torch.distributed.checkpoint's `HuggingFaceStorageWriter` (torch 2.13) writes the same, and, in `sharded/` or instead,
`shard-0000r-model-0000i-of-0000n.safetensors`, r = rank + 1. There the tensors are pieces, and `__metadata__` has
`DCP_SHARDING_INFO`, a JSON string `{name: {"saved_offsets": [elements per dim]}}`. The whole shape is stored nowhere; it is where
the last piece ends. A rank missing in between shows as a hole, a missing last one does not show: opening warns.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, MeshloadWarning, listing
from meshload.pieces import table
from meshload.source import Folder

from ._hf_find import (
    HEADER_LIMIT,
    STEMS,
    index_name,
    is_consolidated,
    is_index,
    is_there,
    numbered,
    numbering,
    single_name,
    stem_of,
)
from ._json import read_config, read_object
from ._safetensors import DTYPES, SHARDING, Arrays, Entry, Header, read_header, read_headers, strides_of
from ._weight_map import read_weight_map

if TYPE_CHECKING:
    from .formats.hf import HuggingFace

CONFIG_LIMIT = 16 << 20
"""Real ones have a few KB."""

PIECES = "they hold pieces, and no whole shape: arrays end where their last piece ends, so a missing last rank would not show"


def checkpoint_in(folder: Folder, options: HuggingFace) -> Checkpoint:
    """Read the index and the headers. Damage is collected, where the rest stays usable."""
    if folder.entry is not None and not is_index(folder.entry):
        return _checkpoint(folder, _one_file(read_header(folder.file(folder.entry))), listed=[])
    listed = folder.names()
    stem = stem_of(folder, listed, options.variant) or (STEMS[1] if is_consolidated(listed, options.variant) else STEMS[0])
    index = folder.entry or index_name(stem, options.variant)
    if folder.entry is None and not is_there(folder, listed, index):
        return _checkpoint(folder, _without_index(folder, options, listed, stem), listed)
    if options.index == "headers":
        return _checkpoint(folder, _despite_index(folder, options, listed, stem, index), listed)
    return _checkpoint(folder, _by_index(folder, listed, index, union=options.index == "union"), listed)


# --- which files ------------------------------------------------------------------------------------------------------


def _without_index(folder: Folder, options: HuggingFace, listed: Sequence[str], stem: str) -> _Contents:
    single = single_name(stem, options.variant)
    if is_there(folder, listed, single):
        return _one_file(read_header(folder.file(single)))
    files, absent = _files(folder, options, listed, stem)
    if absent and options.index != "headers":
        raise FormatError(
            f"{folder.name}: there is no {index_name(stem, options.variant)}, and of the numbered files {absent} is not there; "
            f'HuggingFace(index="headers") opens what is there'
        )
    contents = _by_headers(folder, files)
    pieces = any(SHARDING in h.metadata for h in contents.headers)
    _warn(
        f"{folder.name}: there is no {index_name(stem, options.variant)}; "
        f"{len(contents.arrays)} arrays were found in the headers of {len(files)} files"
        + (f", {absent} is not there" if absent else "")
        + (f"; {PIECES}" if pieces else "")
    )
    return contents


def _despite_index(folder: Folder, options: HuggingFace, listed: Sequence[str], stem: str, index: str) -> _Contents:
    """Take the arrays from the headers, and tell how the index differs."""
    try:
        told = read_weight_map(folder, index, HEADER_LIMIT)
    except FormatError as error:
        found = _by_headers(folder, _files(folder, options, listed, stem)[0])
        _warn(f"{error}; {len(found.arrays)} arrays were found in the headers of {len(found.headers)} files instead")
        return replace(found, problems=(Problem(str(error), file=index),))
    file_of = told.file_of
    files, absent = _files(folder, options, listed, stem) if listed else (sorted(told.names_in), "")
    found = _by_headers(folder, files)
    lost = [name for name in file_of if name not in found.arrays]
    file_with = {name: h.source.name for h in found.headers for name in h.entries}
    moved = [name for name, file in file_of.items() if name not in lost and file_with[name] != file]
    new = [name for name in found.arrays if name not in file_of]
    if lost or moved or new:
        _warn(
            f"{folder.name}: {index} was not followed: {len(lost)} of its {len(file_of)} names are in no header, "
            f"{len(moved)} lie in other files, {len(new)} are not listed; "
            f"{len(found.arrays)} arrays were found in the headers of {len(files)} files"
            + (f", {absent} is not there" if absent else "")
        )
    why = f"{index} lists it, but no header of {listing(files)} has it"
    problems = (Problem(f"{index}: {len(lost)} of its names are in no header: {listing(lost)}", file=index),) if lost else ()
    return replace(
        found, unavailable=dict.fromkeys(lost, why), problems=problems, unlisted=tuple(new), index=index, index_meta=told.metadata
    )


def _files(folder: Folder, options: HuggingFace, listed: Sequence[str], stem: str) -> tuple[list[str], str]:
    """Choose the files that belong together, by their numbers; tell which numbers are absent."""
    sets = numbered(listed, stem, options.variant)
    whole = {kind: files for kind, files in sets.items() if not _absent(files)}
    kinds = whole or sets
    if len(kinds) > 1:
        raise FormatError(
            f"{folder.name}: without an index it is not known which files belong together: "
            f"{'; '.join(listing(files, 3) for files in kinds.values())}; move the others away, or restore the index"
        )
    if kinds:
        (files,) = kinds.values()
        return files, _absent(files)
    single = single_name(stem, options.variant)
    if is_there(folder, listed, single):
        return [single], ""
    others = [n for n in listed if n.endswith(".safetensors") and not n.startswith(("adapter_model", "consolidated"))]
    if options.index != "headers" or not others or options.variant:
        seen = listing(n for n in listed if n.endswith((".safetensors", ".bin"))) or "no file of weights"
        raise FormatError(
            f"{folder.name}: neither {single} nor {index_name(stem, options.variant)} is there, but {seen}; name the one file, "
            f'or use HuggingFace(index="headers"), or HuggingFace(variant=...) for names such as model.fp16.safetensors'
        )
    return others, ""


def _absent(files: Sequence[str]) -> str:
    """Say which numbers of a set are not there, in words; nothing where all are."""
    parts = [(int(m[4]), int(m[5])) for m in map(numbering, files) if m]
    there, total = {i for i, _ in parts}, parts[0][1]
    count = sum(1 <= i <= total for i in there)
    if count == total:
        return ""
    absent = islice((str(i) for i in range(1, total + 1) if i not in there), 10)
    return f"number {', '.join(absent)}{' ...' if total - count > 10 else ''} ({total - count} of {total})"


# --- who holds what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """What was found in a folder."""

    files: Sequence[str]
    """All that belong to the checkpoint, also those that could not be used."""
    headers: Sequence[Header]
    arrays: Mapping[str, Array]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unlisted: tuple[str, ...] = ()
    """Tensors that the index does not list."""
    index: str | None = None
    index_meta: Mapping[str, Any] = field(default_factory=dict)


def _one_file(header: Header) -> _Contents:
    match = numbering(header.source.name) if header.offsets else None
    if any(any(at) for at in header.offsets.values()) or (match is not None and match[1] is not None):
        raise FormatError(f"{header.source.name}: holds pieces of arrays, written by one rank; open its folder instead")
    return _Contents([header.source.name], [header], Arrays([header], dict.fromkeys(header.entries, 0)))


def _by_index(folder: Folder, listed: Sequence[str], index: str, *, union: bool) -> _Contents:
    """Take from each file what the index says is there."""
    told = read_weight_map(folder, index, HEADER_LIMIT)
    file_of, files = told.file_of, list(told.names_in)
    found = read_headers(folder, files)
    lost = {file: error for file, error in found.items() if not isinstance(error, Header)}
    headers = [h for h in found.values() if isinstance(h, Header)]
    cure = '; HuggingFace(index="headers") takes the arrays from the files that are there'
    unavailable, problems = told.without(lost, listed, lambda file: file == "model.safetensors" or numbering(file), cure)
    number_of: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    for number, header in enumerate(headers):
        file = header.source.name
        for name in told.names_in[file]:
            why = _not_whole(header, name, index)
            if why:
                unavailable[name] = why
                problems.append(Problem(f"{name}: {why}", array=name, file=file))
            else:
                number_of[name] = number
        for name in header.entries:
            if name not in file_of:
                if union and name in unlisted:
                    other = headers[unlisted[name]].source.name
                    raise FormatError(f"{name}: {index} does not list it, and both {other} and {file} hold it")
                unlisted[name] = number
    in_order = {name: number_of[name] for name in file_of if name in number_of}
    arrays = Arrays(headers, {**in_order, **unlisted} if union else in_order)
    return _Contents(files, headers, arrays, unavailable, tuple(problems), tuple(unlisted), index, told.metadata)


def _not_whole(header: Header, name: str, index: str) -> str:
    """Say why a file cannot give a tensor that the index lists there; nothing where it can."""
    file = header.source.name
    if name not in header.entries:
        return f"{file}, where {index} lists it, is there, but its header, of {len(header.entries)} tensors, lacks it"
    if any(header.offsets.get(name, ())):
        return f"{file} holds only a piece of it, from {header.offsets[name]} on"
    return ""


def _by_headers(folder: Folder, files: Sequence[str]) -> _Contents:
    """Take all that the files hold. A damaged one raises: nothing else tells which arrays would be lost."""
    headers = []
    for header in read_headers(folder, files).values():
        if not isinstance(header, Header):
            raise header
        headers.append(header)
    if any(SHARDING in h.metadata for h in headers):
        return _assembled(files, headers)
    number_of: dict[str, int] = {}
    for number, header in enumerate(headers):
        for name in header.entries:
            if name in number_of:
                both = f"{headers[number_of[name]].source.name} and {header.source.name}"
                raise FormatError(f"{name}: both {both} hold it, and no index says which is meant")
            number_of[name] = number
    return _Contents(files, headers, Arrays(headers, number_of))


def _assembled(files: Sequence[str], headers: Sequence[Header]) -> _Contents:
    """Put the pieces of each array together, each at the offsets that its file saved."""
    sources = tuple(h.source for h in headers)
    rows: dict[str, list[tuple[int, Entry, Shape]]] = defaultdict(list)
    for number, header in enumerate(headers):
        for name, entry in header.entries.items():
            if name not in header.offsets or DTYPES[entry[0]][1] < 8:
                raise FormatError(
                    f"{header.source.name}: holds {name} ({entry[0]}) without saying where in the array it lies, "
                    f"and stands beside files of pieces"
                )
            rows[name].append((number, entry, header.offsets[name]))
    arrays: dict[str, Array] = {}
    unavailable: dict[str, str] = {}
    problems = []
    for name, found in rows.items():
        kinds = {(dtype, len(shape)) for _, (dtype, shape, _, _), _ in found}
        if len(kinds) > 1:
            raise FormatError(f"{name}: its pieces differ in dtype or dims: {sorted(kinds)}")
        dtype = DTYPES[found[0][1][0]][0]
        start = np.asarray([at for *_, at in found], np.int64).reshape(len(found), -1)
        shapes = np.asarray([shape for _, (_, shape, _, _), _ in found], np.int64).reshape(len(found), -1)
        whole = tuple((start + shapes).max(axis=0).tolist())
        offset = [headers[number].start + begin for number, (_, _, begin, _), _ in found]
        pieces = table(sources, [number for number, *_ in found], offset, start, shapes, strides_of(shapes, dtype.itemsize))
        filled = sum(math.prod(shape) for _, shape in {(at, shape) for _, (_, shape, _, _), at in found})
        if filled == math.prod(whole):
            arrays[name] = Array(name, dtype, whole, pieces)
        else:
            among = listing(sources[number].name for number, *_ in found)
            unavailable[name] = (
                f"its pieces, in {among}, hold {filled} of the {math.prod(whole)} elements of shape {whole}; a rank's file is "
                f"missing, or was left by another save"
            )
            problems.append(Problem(f"{name}: {unavailable[name]}", array=name))
    return _Contents(files, headers, arrays, unavailable, tuple(problems))


def _checkpoint(folder: Folder, found: _Contents, listed: Sequence[str]) -> Checkpoint:
    config, problems = read_config(folder, CONFIG_LIMIT)
    if config is None and not problems and all(f.startswith(STEMS[1]) for f in found.files) and folder.has("params.json"):
        from ._params import config_of

        config = config_of(read_object(folder, "params.json", CONFIG_LIMIT))
    used = {*found.files, found.index}
    meta = {
        "files": tuple(found.files),
        "index": found.index,
        "index_metadata": found.index_meta,
        "header_metadata": {h.source.name: h.metadata for h in found.headers if h.metadata},
        "unlisted": tuple(n for n in listed if n not in used and _looks_alike(n)),
        "unlisted_tensors": found.unlisted,
    }
    views: dict[str, Callable[[], Checkpoint]] = {}
    made = Checkpoint(
        found.arrays,
        "hf",
        aliases=_told_ties(found),
        meta=meta,
        config=config,
        unavailable=found.unavailable,
        problems=(*found.problems, *problems),
        names="hf",
        views=views,
    )
    for names in ("hf", "native", "stored"):  # all three are the names on disk
        views[names] = partial(replace, made, names=names, aliases={} if names == "stored" else made.aliases)
    return made


def _told_ties(found: _Contents) -> dict[str, str]:
    """Return the names that `safetensors.torch.save_model` left out, with those under which it kept the same tensors."""
    told = {alias: name for header in found.headers for alias, name in header.metadata.items() if name in header.entries}
    return {a: n for a, n in told.items() if n in found.arrays and a not in found.arrays and a not in found.unavailable}


def _looks_alike(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".pt", ".pth", ".incomplete", ".index.json")) or is_index(file)


def _warn(text: str) -> None:
    warnings.warn(text, MeshloadWarning, stacklevel=5)


# --- JSON -------------------------------------------------------------------------------------------------------------
