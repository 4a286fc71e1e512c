"""Hugging Face checkpoints: safetensors files, one or many, with an index.

Files. A folder holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names, by habit
`model-00001-of-00005.safetensors`. A variant stands before the suffix: `model.fp16.safetensors`,
`model.safetensors.index.fp16.json`, `model.fp16-00001-of-00002.safetensors`. Mistral's own releases say `consolidated` for
`model`. `config.json` beside them describes the model. Repositories ship the same weights several times, and other files that
look alike, so nothing is ever merged by globbing: the index decides, and what it does not name is told in
`meta["unlisted"]`. Where an index and `model.safetensors` are both there, the index decides too.

A safetensors file (https://huggingface.co/docs/safetensors) is, as version 0.8 of the library reads it:

    u64 little endian N | N bytes of UTF-8 JSON, at most 100,000,000 | data
    {"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [97, 32], "data_offsets": [begin, end]}, ...}

Offsets are bytes, relative to byte `8 + N`; data is little endian and row-major. Sorted by offset, the first tensor begins at 0,
each where the one before it ends, and the last ends with the file. N need not be a multiple of 8, so tensors need not be
aligned. The last dim of packed types (`F4`: 2 elements a byte, `F6_*`: 4 in three bytes) counts elements; here they are arrays of
bytes, with rows of bytes where rows end on bytes, else flat. The reference library accepts more in these points, which are
refused here: a name twice in one JSON object, a tensor described by a JSON array, a dtype written as an object, more than 32
dims, zero-size tensors whose other dims overflow. In fields that nobody knows it refuses what is let pass here: nesting beyond
128, floats beyond the range.

The index is `{"metadata": {"total_size": 224640}, "weight_map": {name: file}}`. `total_size` is often wrong and checks nothing.
File names stay inside the folder; subfolders are allowed. Links to regular files are followed wherever they lead: hub caches
consist of them.

torch.distributed.checkpoint's `HuggingFaceStorageWriter` (torch 2.13) writes the same, and, in `sharded/` or instead,
`shard-0000r-model-0000i-of-0000n.safetensors`, r = rank + 1. There the tensors are pieces, and `__metadata__` has
`DCP_SHARDING_INFO`, a JSON string `{name: {"saved_offsets": [elements per dim]}}`. The whole shape is stored nowhere; it is where
the last piece ends. A rank missing in between shows as a hole, a missing last one does not show: opening warns.
"""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, NoReturn, TypeGuard

import ml_dtypes
import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, MeshloadError, MeshloadWarning, SourceError, listing
from meshload.pieces import Ints, Pieces, empty, table
from meshload.source import ByteSource, Folder, read_bytes

HEADER_LIMIT = 100_000_000
"""The reference library's own limit, in bytes; an index is bounded by it too."""

CONFIG_LIMIT = 16 << 20
"""Real ones have a few KB."""

HEADERS_AT_ONCE = 8

MAX_NDIM = 32
"""NumPy 1 has no arrays of more dims."""

TOO_LARGE = 1 << 60
"""Elements: more of them make NumPy's byte counts overflow."""

STEMS = ("model", "consolidated")

SHARDING = "DCP_SHARDING_INFO"

PIECES = "they hold pieces, and no whole shape: arrays end where their last piece ends, so a missing last rank would not show"

BYTE = np.dtype(np.uint8)

DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "U8": (BYTE, 8),
    "I8": (np.dtype(np.int8), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F8_E4M3FNUZ": (np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    "F8_E5M2FNUZ": (np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    "U16": (np.dtype("<u2"), 16),
    "I16": (np.dtype("<i2"), 16),
    "F16": (np.dtype("<f2"), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "U32": (np.dtype("<u4"), 32),
    "I32": (np.dtype("<i4"), 32),
    "F32": (np.dtype("<f4"), 32),
    "U64": (np.dtype("<u8"), 64),
    "I64": (np.dtype("<i8"), 64),
    "F64": (np.dtype("<f8"), 64),
    "C64": (np.dtype("<c8"), 64),
    "F4": (BYTE, 4),
    "F6_E2M3": (BYTE, 6),
    "F6_E3M2": (BYTE, 6),
}
"""The format's dtypes: NumPy's dtype, and bits per element; below 8 bits the array is one of bytes."""


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The format of Hugging Face folders and of single safetensors files."""

    index: str = "index"
    """Who decides: the `index`; the `union` of it and of what else its files hold; or the files' `headers` alone."""
    variant: str | None = None
    """Such as `fp16`."""
    name: str = field(default="hf", init=False)
    order: int = field(default=80, init=False)

    def __post_init__(self) -> None:
        if self.index not in ("index", "union", "headers"):
            raise LayoutError(f"index={self.index!r}: 'index', 'union' or 'headers' was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether the file is a safetensors file or an index of such, or whether the folder has one of the known names."""
        if folder.entry is not None:
            return folder.entry.endswith(".safetensors") or _is_index(folder.entry) or _has_magic(folder)
        listed = folder.names()
        stem = _stem(folder, listed, self.variant)
        if stem is not None or any(n.startswith("pytorch_model") for n in listed):
            return stem == STEMS[0]
        return self._consolidated(folder, listed) or bool(_numbered(listed, STEMS[0], self.variant))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the index and the headers. Damage is collected, where the rest stays usable."""
        if folder.entry is not None and not _is_index(folder.entry):
            return _checkpoint(folder, _one_file(_read_header(folder.file(folder.entry))), listed=[])
        listed = folder.names()
        stem = _stem(folder, listed, self.variant) or (STEMS[1] if self._consolidated(folder, listed) else STEMS[0])
        index = folder.entry or _index_name(stem, self.variant)
        if folder.entry is None and not _is_there(folder, listed, index):
            return _checkpoint(folder, self._without_index(folder, listed, stem), listed)
        if self.index == "headers":
            return _checkpoint(folder, self._despite_index(folder, listed, stem, index), listed)
        return _checkpoint(folder, _by_index(folder, listed, index, union=self.index == "union"), listed)

    def _consolidated(self, folder: Folder, listed: list[str]) -> bool:
        """Say whether only Mistral's names are there; asked for where there is a listing, so that HTTP is spared the requests."""
        names = (_single_name(STEMS[1], self.variant), _index_name(STEMS[1], self.variant))
        return any(n in listed for n in names) or bool(_numbered(listed, STEMS[1], self.variant))

    def _without_index(self, folder: Folder, listed: list[str], stem: str) -> _Contents:
        single = _single_name(stem, self.variant)
        if _is_there(folder, listed, single):
            return _one_file(_read_header(folder.file(single)))
        files, absent = self._files(folder, listed, stem)
        if absent and self.index != "headers":
            raise FormatError(
                f"{folder.name}: there is no {_index_name(stem, self.variant)}, and of the numbered files {absent} is not there; "
                f'HuggingFace(index="headers") opens what is there'
            )
        contents = _by_headers(folder, files)
        pieces = any(SHARDING in h.metadata for h in contents.headers)
        _warn(
            f"{folder.name}: there is no {_index_name(stem, self.variant)}; "
            f"{len(contents.arrays)} arrays were found in the headers of {len(files)} files"
            + (f", {absent} is not there" if absent else "")
            + (f"; {PIECES}" if pieces else "")
        )
        return contents

    def _despite_index(self, folder: Folder, listed: list[str], stem: str, index: str) -> _Contents:
        """Take the arrays from the headers, and tell how the index differs."""
        try:
            file_of, index_meta = _read_index(folder, index)
        except FormatError as error:
            file_of, index_meta = {}, {}
            found = _by_headers(folder, self._files(folder, listed, stem)[0])
            _warn(f"{error}; {len(found.arrays)} arrays were found in the headers of {len(found.headers)} files instead")
            return replace(found, problems=(Problem(str(error), file=index),))
        files, absent = self._files(folder, listed, stem) if listed else (sorted(set(file_of.values())), "")
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
            found, unavailable=dict.fromkeys(lost, why), problems=problems, unlisted=tuple(new), index=index, index_meta=index_meta
        )

    def _files(self, folder: Folder, listed: list[str], stem: str) -> tuple[list[str], str]:
        """Choose the files that belong together, by their numbers; tell which numbers are absent."""
        sets = _numbered(listed, stem, self.variant)
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
        single = _single_name(stem, self.variant)
        if _is_there(folder, listed, single):
            return [single], ""
        others = [n for n in listed if n.endswith(".safetensors") and not n.startswith(("adapter_model", "consolidated"))]
        if self.index != "headers" or not others or self.variant:
            seen = listing(n for n in listed if n.endswith((".safetensors", ".bin"))) or "no file of weights"
            raise FormatError(
                f"{folder.name}: neither {single} nor {_index_name(stem, self.variant)} is there, but {seen}; name the one file, "
                f'or use HuggingFace(index="headers"), or HuggingFace(variant=...) for names such as model.fp16.safetensors'
            )
        return others, ""


# --- names ------------------------------------------------------------------------------------------------------------


def _single_name(stem: str, variant: str | None) -> str:
    return f"{stem}{f'.{variant}' if variant else ''}.safetensors"


def _index_name(stem: str, variant: str | None) -> str:
    return f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json"


def _is_index(file: str) -> bool:
    return re.search(r"\.safetensors\.index(\.[^.]+)?\.json$", file) is not None


def _is_there(folder: Folder, listed: Collection[str], file: str) -> bool:
    """Say whether a name is there, be it a dead link; where nothing could be listed, the file is asked for."""
    return file in listed or f"{file}/" in listed or (not listed and folder.has(file))


def _stem(folder: Folder, listed: list[str], variant: str | None) -> str | None:
    names = (_index_name(STEMS[0], variant), _single_name(STEMS[0], variant))
    return STEMS[0] if any(_is_there(folder, listed, n) for n in names) else None


def _has_magic(folder: Folder) -> bool:
    """Say whether the file begins as safetensors files do. The first bytes of zips and pickles make no such length."""
    source = folder.file(folder.entry or "")
    start = read_bytes(source, 0, min(source.size, 64))
    if len(start) < 10:
        return False
    (n,) = struct.unpack("<Q", start[:8])
    return n <= min(HEADER_LIMIT, source.size - 8) and start[8:].lstrip(b" \t\r\n").startswith(b"{")


_Kind = tuple[bool, int]
"""Whether the files hold pieces of several ranks, and how many files make the whole."""


def _numbered(listed: Iterable[str], stem: str, variant: str | None) -> dict[_Kind, list[str]]:
    """Return the files that are numbered `i of n`."""
    found: dict[_Kind, list[str]] = defaultdict(list)
    for file in listed:
        if match := _NUMBER.fullmatch(file):
            rank, of_stem, of_variant, _, total = match.groups()
            if (of_stem, of_variant) == (stem, variant):
                found[rank is not None, int(total)].append(file)
    return found


_NUMBER = re.compile(r"(?:shard-(\d+)-)?([^.]+?)(?:\.([^.]+?))?-(\d{1,9})-of-(\d{1,9})\.safetensors")


def _absent(files: Sequence[str]) -> str:
    """Say which numbers of a set are not there, in words; nothing where all are."""
    parts = [(int(m[4]), int(m[5])) for m in map(_NUMBER.fullmatch, files) if m]
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
    headers: Sequence[_Header]
    arrays: Mapping[str, Array]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    unlisted: tuple[str, ...] = ()
    """Tensors that the index does not list."""
    index: str | None = None
    index_meta: Mapping[str, Any] = field(default_factory=dict)


def _one_file(header: _Header) -> _Contents:
    match = _NUMBER.fullmatch(header.source.name)
    if any(any(at) for at in header.offsets.values()) or (header.offsets and match is not None and match[1] is not None):
        raise FormatError(f"{header.source.name}: holds pieces of arrays, written by one rank; open its folder instead")
    return _Contents([header.source.name], [header], _Arrays([header], dict.fromkeys(header.entries, 0)))


def _by_index(folder: Folder, listed: list[str], index: str, *, union: bool) -> _Contents:
    """Take from each file what the index says is there."""
    file_of, index_meta = _read_index(folder, index)
    names_in: dict[str, list[str]] = defaultdict(list)
    for name, file in file_of.items():
        names_in[file].append(name)
    found = _read_headers(folder, list(names_in))
    lost = {file: error for file, error in found.items() if not isinstance(error, _Header)}
    headers = [h for h in found.values() if isinstance(h, _Header)]
    hint = _stale(listed, names_in, lost)

    unavailable: dict[str, str] = {}
    problems = [Problem(f"{index}: {hint}", file=index)] if hint else []
    for file, error in lost.items():
        why = f"{file}: not there, though {index} lists it" if _is_absent(file, listed) else str(error)
        unavailable.update(dict.fromkeys(names_in[file], f"{why}{f'; {hint}' if hint else ''}"))
        problems.append(Problem(f"{why}; it should hold {listing(names_in[file])}", file=file))

    number_of: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    for number, header in enumerate(headers):
        file = header.source.name
        for name in names_in[file]:
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
    arrays = _Arrays(headers, {**in_order, **unlisted} if union else in_order)
    return _Contents(list(names_in), headers, arrays, unavailable, tuple(problems), tuple(unlisted), index, index_meta)


def _not_whole(header: _Header, name: str, index: str) -> str:
    """Say why a file cannot give a tensor that the index lists there; nothing where it can."""
    file = header.source.name
    if name not in header.entries:
        return f"{file}, where {index} lists it, is there, but its header, of {len(header.entries)} tensors, lacks it"
    if any(header.offsets.get(name, ())):
        return f"{file} holds only a piece of it, from {header.offsets[name]} on"
    return ""


def _stale(listed: Sequence[str], names_in: Mapping[str, Any], lost: Mapping[str, MeshloadError]) -> str:
    """Say whether shards are missing in a way that blames the index rather than a file."""
    others = [n for n in listed if n not in names_in and (n == "model.safetensors" or _NUMBER.fullmatch(n))]
    absent = [file for file in lost if _is_absent(file, listed)]
    if not absent or not (others or 2 * len(absent) > len(names_in)):
        return ""
    beside = f"beside other files ({listing(others, 3)}): it looks stale" if others else "it is stale, or the download unfinished"
    return (
        f"{len(absent)} of the {len(names_in)} files that the index names are not there, {beside}; "
        f'HuggingFace(index="headers") takes the arrays from the files that are there'
    )


def _is_absent(file: str, listed: Sequence[str]) -> bool:
    """Say whether a listing shows that a file is not there; a dead link is."""
    return bool(listed) and "/" not in file and file not in listed and f"{file}/" not in listed


def _by_headers(folder: Folder, files: Sequence[str]) -> _Contents:
    """Take all that the files hold. A damaged one raises: nothing else tells which arrays would be lost."""
    headers = []
    for header in _read_headers(folder, files).values():
        if not isinstance(header, _Header):
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
    return _Contents(files, headers, _Arrays(headers, number_of))


def _assembled(files: Sequence[str], headers: Sequence[_Header]) -> _Contents:
    """Put the pieces of each array together, each at the offsets that its file saved."""
    sources = tuple(h.source for h in headers)
    rows: dict[str, list[tuple[int, _Entry, Shape]]] = defaultdict(list)
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
        pieces = table(sources, [number for number, *_ in found], offset, start, shapes, _strides(shapes, dtype.itemsize))
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
    config, problems = _read_config(folder)
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
        meta=meta,
        config=config,
        unavailable=found.unavailable,
        problems=(*found.problems, *problems),
        names="hf",
        views=views,
    )
    for names in ("hf", "native", "stored"):  # all three are the names on disk
        views[names] = partial(replace, made, names=names)
    return made


def _looks_alike(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".pt", ".pth", ".incomplete", ".index.json")) or _is_index(file)


def _warn(text: str) -> None:
    warnings.warn(text, MeshloadWarning, stacklevel=4)


# --- the header of a file ---------------------------------------------------------------------------------------------


_Entry = tuple[str, Shape, int, int]
"""One tensor as the header describes it: dtype, shape, begin and end; relative to the data. A plain tuple costs the garbage
collector nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Header:
    """The header of one file, checked against the format and against the file's size."""

    source: ByteSource
    start: int
    """Where the data begins, in bytes."""
    entries: Mapping[str, _Entry]
    metadata: Mapping[str, str]
    offsets: Mapping[str, Shape]
    """Where in its array each piece lies; empty where the tensors are whole."""


def _read_headers(folder: Folder, files: Sequence[str]) -> dict[str, _Header | MeshloadError]:
    """Read several headers at a time; a file that is absent or damaged gives its error."""

    def attempt(file: str) -> _Header | MeshloadError:
        try:
            return _read_header(folder.file(file))
        except (FormatError, SourceError) as error:
            return error

    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="meshload") as pool:
        return dict(zip(files, pool.map(attempt, files), strict=True))


def _read_header(source: ByteSource) -> _Header:
    """Read a header in two reads. Its lengths are hostile until they fit the file."""
    file, size = source.name, source.size
    if size < 8:
        raise FormatError(f"{file}: truncated: it has {size} bytes, a safetensors file begins with 8 that give its header's length")
    (n,) = struct.unpack("<Q", read_bytes(source, 0, 8))
    if n > HEADER_LIMIT:
        raise FormatError(
            f"{file}: no safetensors file: its first 8 bytes would be a header of {n} bytes, at most {HEADER_LIMIT} are allowed"
        )
    if 8 + n > size:
        raise FormatError(
            f"{file}: truncated within its header: the header declares {n} bytes, so at least {8 + n} in all, the file has {size}"
        )
    described = _parsed(read_bytes(source, 8, 8 + n), file, _object)
    metadata = described.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{file}: __metadata__ is to map strings to strings, found {_short(metadata)}")
    for name, entry in described.items():
        if type(entry) is not tuple:
            raise FormatError(f"{file}: {name!r} {_unsound(entry)}")
    entries: dict[str, _Entry] = described
    _check_coverage(entries, 8 + n, size, file)
    return _Header(source, 8 + n, entries, metadata, _offsets(metadata, entries, file) if SHARDING in metadata else {})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Entry:
    """Return a JSON object of a header: a sound description of a tensor as an `_Entry`, anything else as a dict.

    A header may have 100,000 tensors, so they are checked while it is parsed, and no dict or list outlives its check.
    """
    found = _unique(pairs)
    try:
        kind, shape, (begin, end) = found["dtype"], found["shape"], found["data_offsets"]
        sound = (
            type(shape) is list
            and {type(begin), type(end), *map(type, shape)} == {int}  # a bool is none here
            and len(shape) <= MAX_NDIM
            and min((begin, *shape)) >= 0
            and math.prod(shape) * DTYPES[kind][1] == 8 * (end - begin)
            and (begin < end or math.prod(n or 1 for n in shape) < TOO_LARGE)
        )
    except (TypeError, KeyError, ValueError):
        return found
    return (kind, tuple(shape), begin, end) if sound else found


def _unsound(found: Any) -> str:
    """Say what is wrong with a tensor's description, and what was expected."""
    if not isinstance(found, dict):
        return f"is to be described by a JSON object, found {_short(found)}"
    kind, shape, offsets = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPES:
        return f"has the dtype {_short(kind)}, known are {', '.join(DTYPES)}"
    if not _are_sizes(shape) or len(shape) > MAX_NDIM:
        return f"has the shape {_short(shape)}, expected is a list of at most {MAX_NDIM} sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"has the data_offsets {_short(offsets)}, expected are a begin and an end"
    bits, held = math.prod(shape) * DTYPES[kind][1], 8 * (offsets[1] - offsets[0])
    if bits != held:
        return f"of {kind} {shape} needs {bits} bits, its data_offsets {offsets} hold {held}"
    return f"has the shape {shape}, which overflows though it has no elements"


def _short(found: Any) -> str:
    if isinstance(found, dict):
        return f"an object with {len(found)} names"
    text = repr(found[:40] if isinstance(found, list | str) else found)
    return text if len(text) < 100 else f"{text[:100]} ..."


def _are_sizes(found: Any) -> TypeGuard[list[int]]:
    return type(found) is list and all(type(n) is int and 0 <= n < 1 << 63 for n in found)  # bool is an int, too


def _check_coverage(entries: Mapping[str, _Entry], start: int, size: int, file: str) -> None:
    """Raise unless the tensors cover the data without hole or overlap, to the file's end."""
    at = 0
    for entry in sorted(entries.values(), key=itemgetter(2, 3)):
        _, _, begin, end = entry
        if begin != at:
            name = next(n for n, e in entries.items() if e is entry)
            what = "leaves a hole after" if begin > at else "overlaps"
            raise FormatError(f"{file}: {name!r} begins at byte {begin} of the data, and {what} the one that ends at {at}")
        at = end
    if start + at > size:
        raise FormatError(f"{file}: truncated: the header declares {start + at} bytes, the file has {size}")
    if start + at < size:
        raise FormatError(
            f"{file}: {size - start - at} trailing bytes: the header declares {start + at} bytes, the file has {size}"
        )


def _offsets(metadata: Mapping[str, str], entries: Mapping[str, _Entry], file: str) -> dict[str, Shape]:
    """Return the offsets that torch.distributed.checkpoint saved with its pieces."""
    found: dict[str, Shape] = {}
    for name, info in _parsed(metadata[SHARDING].encode(errors="surrogatepass"), f"{file}: {SHARDING}").items():
        at = info.get("saved_offsets") if isinstance(info, dict) else None
        if name not in entries:
            continue
        shape = entries[name][1]
        if not _are_sizes(at) or len(at) != len(shape) or any(a + n >= TOO_LARGE for a, n in zip(at, shape, strict=True)):
            raise FormatError(f"{file}: {SHARDING} of {name!r}: {_short(info)} has no saved_offsets of {len(shape)} dims")
        found[name] = tuple(at)
    return found


# --- arrays -----------------------------------------------------------------------------------------------------------


class _Arrays(Mapping[str, Array]):
    """Arrays that are stored whole, each made when it is asked for. Making 100,000 takes longer than reading their header.

    The pieces of one file's arrays that have as many dims are rows of one table; all tables share one tuple of sources.
    """

    def __init__(self, headers: Sequence[_Header], number_of: Mapping[str, int]) -> None:
        self._headers = headers
        self._number_of = number_of
        """The number of the header that each array is in."""
        self._sources = tuple(h.source for h in headers)
        self._tables: dict[int, tuple[dict[int, Pieces], dict[str, int]]] = {}

    def __getitem__(self, name: str) -> Array:
        number = self._number_of[name]
        tables, rows = self._tables.get(number) or self._tables.setdefault(number, self._made(number))
        dtype, shape, stored = _shown(self._headers[number].entries[name])
        row = rows.get(name)
        pieces = empty(len(shape), self._sources) if row is None else tables[len(shape)].take(slice(row, row + 1))
        return Array(name, dtype, shape, pieces, stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number_of)

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, name: object) -> bool:
        return name in self._number_of

    def _made(self, number: int) -> tuple[dict[int, Pieces], dict[str, int]]:
        """Return a file's tables by their number of dims, and each tensor's row; one without elements has none."""
        header = self._headers[number]
        rows: dict[str, int] = {}
        columns: dict[int, list[tuple[int, int, Shape]]] = defaultdict(list)
        for name, entry in header.entries.items():
            dtype, shape, _ = _shown(entry)
            if 0 not in shape:
                rows[name] = len(columns[len(shape)])
                columns[len(shape)].append((header.start + entry[2], dtype.itemsize, shape))
        tables = {}
        for ndim, column in columns.items():
            offset, itemsize, shapes = zip(*column, strict=True)
            sizes = np.asarray(shapes, np.int64).reshape(len(column), ndim)
            strides = _strides(sizes, np.asarray(itemsize, np.int64)[:, None])
            number_column = np.full(len(column), number, np.int64)
            tables[ndim] = table(self._sources, number_column, offset, np.zeros_like(sizes), sizes, strides)
        return tables, rows


def _shown(entry: _Entry) -> tuple[np.dtype[Any], Shape, str | None]:
    """Return dtype and shape of the array, and the format's dtype where NumPy has none: such are arrays of bytes."""
    kind, shape, begin, end = entry
    dtype, bits = DTYPES[kind]
    if bits >= 8:
        return dtype, shape, None
    *outer, last = shape or (0,)
    return dtype, (*outer, last * bits // 8) if last * bits % 8 == 0 else (end - begin,), kind


def _strides(shape: Ints, itemsize: Any) -> Ints:
    """Return row-major strides, in bytes, of each row's shape."""
    found = np.ones_like(shape)
    for d in range(shape.shape[1] - 2, -1, -1):
        found[:, d] = found[:, d + 1] * shape[:, d + 1]
    return np.asarray(found * itemsize, np.int64)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_index(folder: Folder, index: str) -> tuple[dict[str, str], Mapping[str, Any]]:
    """Return the file of each name, and the index's metadata."""
    found = _read_json(folder, index, HEADER_LIMIT)
    file_of, metadata = found.get("weight_map"), found.get("metadata")
    if not isinstance(file_of, dict):
        raise FormatError(f"{index}: has no weight_map that maps names to files, found {_short(file_of)}")
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise FormatError(f"{index}: {name!r} is to be in a file, found {_short(file)}")
    for file, name in {file: name for name, file in file_of.items()}.items():
        try:
            folder.inside(file)
        except FormatError as error:
            raise FormatError(f"{index}: {name!r} is said to be in {file!r}, which leaves the folder: {error}") from error
    return file_of, metadata if isinstance(metadata, dict) else {}


def _read_config(folder: Folder) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    if not folder.has("config.json"):
        return None, ()
    try:
        return _read_json(folder, "config.json", CONFIG_LIMIT), ()
    except FormatError as error:
        return None, (Problem(f"{error}; the model's config is not known", file="config.json"),)


def _read_json(folder: Folder, file: str, limit: int) -> dict[str, Any]:
    source = folder.file(file)
    if source.size > limit:
        raise FormatError(f"{file}: has {source.size} bytes, at most {limit} were expected")
    return _parsed(read_bytes(source), file)


def _parsed(raw: bytes, what: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """Parse a JSON object as strictly as the reference library does, and refuse a name that stands twice."""
    try:
        text = raw.decode()
        if not text.lstrip(" \t\r\n").startswith("{"):  # before lists of millions are made
            raise FormatError(f"{what}: a JSON object was expected, found {text[:20]!r}")
        integer = _integer if "-0" in text else None
        found = json.loads(text, object_pairs_hook=hook or _unique, parse_constant=_refused, parse_int=integer)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # raises on half a surrogate pair
    except UnicodeError as error:
        raise FormatError(f"{what}: not UTF-8: {error}") from error
    except RecursionError as error:
        raise FormatError(f"{what}: JSON nested too deeply") from error
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{what}: not JSON as expected: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what}: describes one tensor without a name, expected is an object of tensors")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)
