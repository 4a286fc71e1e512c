"""`.metadata` and `.distcp`: what torch.distributed.checkpoint (DCP) writes, read without torch and without running a pickle.

Read from torch 2.13 (https://github.com/pytorch/pytorch/tree/main/torch/distributed/checkpoint: metadata.py, filesystem.py).

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`, with the attributes

    state_dict_metadata   {key: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
    planner_data          {key: path}: where the key's value was in the nested dict, such as ("optim", "param_groups", 0, "lr");
                          None where the dict was not flattened
    storage_data          {MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length, transform_descriptors)}
    storage_meta          StorageMeta(checkpoint_id, save_id, load_id, modules), or None
    version               "1.0.0"; older files lack it

`properties` is TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pin_memory); `size` is the whole
shape; `chunks` are ChunkStorageMetadata(offsets, sizes), boxes in elements. A chunk's place is found by its key and offsets (for
what is no tensor, offset None). megatron-core 0.15 has a kind of `Metadata` of its own, `MCoreMetadata`, with `mcore_data` besides,
which is not needed. An entry is `length` bytes at `offset` of the data file, and is a complete file of `torch.save`
(`_torch_file.py`): a tensor of just the chunk's shape, perhaps in another order of strides (channels last), or any object.
Descriptors name what the entry went through (`stream.zstd/1`); such entries are refused.

Each rank may write a `__{rank}.metadata` of its own in place of the common one (`use_collectives=False`); together they say the
same, with replicated chunks listed once per rank.

Two things here are about size, since there may be a million chunks. Where in its entry a tensor lies is not in `.metadata`, and
finding out takes a read per entry; so the arrays' pieces count from where the entries begin, in a source that looks it up when
bytes of the entry are wanted (`_distcp_chunks.py`). And the records that there are many of are read in runs (`_distcp_runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.array import Array
from meshload.box import Shape
from meshload.errors import FormatError, MeshloadError
from meshload.pieces import Ints, Pieces
from meshload.source import ByteSource, Folder, read_bytes

from ._distcp_chunks import Chunks
from ._distcp_runs import METADATA, Entries, Place, Runs, called, short
from ._pickle import Global, Record, unpickle
from ._torch_file import DTYPES, MAX_NDIM, PACKED, TOO_LARGE, Tensor, TorchFile

OBJECT_LIMIT = 256 << 20
"""Bytes of an entry that is no tensor; more are not read at once."""

FILES_AT_ONCE = 16


# --- what is listed ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Listed:
    """A tensor, as one or several `.metadata` list it."""

    dtype: str
    shape: Shape
    refused: str = ""
    """Why it cannot be given as an array."""
    sizes: dict[Shape, Shape] = field(default_factory=dict)
    """Its chunks: offsets to sizes."""
    rows: list[int] = field(default_factory=list)
    """The chunks that were stored: their rows in the listing's entries."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What the `.metadata` of a checkpoint say."""

    tensors: dict[str, Listed]
    objects: dict[str, list[Place]]
    """What is no tensor; several places where every rank wrote its own."""
    paths: dict[str, tuple[str | int, ...]]
    """The path of each key, where it was saved."""
    about: Mapping[str, Any]
    """`version`, `checkpoint_id`, `save_id`."""
    entries: Entries = field(default_factory=Entries)
    """What was stored of tensors and objects."""


_KINDS = ((METADATA, "Metadata"), ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"))


def read_listing(sources: Sequence[ByteSource]) -> Listing:
    """Read one `.metadata`, or those of all ranks."""
    found = Listing({}, {}, {}, {})
    about: dict[str, Any] = {}
    for source in sources:
        runs = Runs()
        root = unpickle(read_bytes(source), name=source.name, shortcuts=runs.shortcuts)
        if not isinstance(root, Record) or (root.module, root.name) not in _KINDS or type(root.state) is not dict:
            raise FormatError(f"{source.name}: a pickle of {called(root)}, expected is {METADATA}.Metadata")
        _add(found, root.state, runs, source.name)
        for key, value in _about(root.state).items():
            about.setdefault(key, value)
    return replace(found, about=about)


def _add(found: Listing, state: Mapping[Any, Any], runs: Runs, file: str) -> None:
    """Add what one file lists."""
    tensors, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if type(tensors) is not dict or type(stored) is not dict:
        raise FormatError(f"{file}: lists no tensors or no places: state_dict_metadata and storage_data are to be dicts")
    objects: set[str] = set()
    for key, described in tensors.items():
        if type(key) is not str:
            raise FormatError(f"{file}: state_dict_metadata has the key {short(key)}")
        if type(described) is Record and described.name == "BytesStorageMetadata":
            objects.add(key)
            found.objects.setdefault(key, [])
            continue
        dtype, layout, shape, chunks = runs.tensor_of(described, f"{file}: {key}")
        there = found.tensors.get(key)
        if there is None:
            there = found.tensors[key] = _listed(dtype, layout, shape)
        elif (there.dtype, there.shape) != (_dtype_name(dtype), shape):
            raise FormatError(f"{file}: {key} is {_dtype_name(dtype)} {shape}, other ranks say {there.dtype} {there.shape}")
        for at, sizes in chunks:
            if there.sizes.setdefault(at, sizes) != sizes:
                raise FormatError(f"{file}: {key}: its chunk at {at} has the sizes {sizes}, and {there.sizes[at]}")
    rows, entries, before = runs.rows_of(stored, file), runs.entries, len(found.entries)
    for row in rows:
        key, start = entries.key[row], entries.start[row]
        if start is None and key in objects:
            found.objects[key].append(entries.place(row))
        elif start is not None and key in found.tensors:
            found.tensors[key].rows.append(before + row)
        else:
            raise FormatError(f"{file}: storage_data has {key} at offset {start}, which state_dict_metadata does not list")
    found.entries.extend(entries)
    paths = state.get("planner_data")
    for key, path in paths.items() if type(paths) is dict else ():
        if type(key) is str and type(path) is tuple and path and all(type(p) in (str, int) for p in path):
            found.paths[key] = path


def _listed(dtype: Any, layout: Any, shape: Shape) -> Listed:
    kind = _dtype_name(dtype)
    refused = ""
    if type(layout) is Record and layout.args != ("torch.strided",):
        refused = f"its layout is {short(layout.args)}, only strided tensors can be read"
    elif kind not in DTYPES:
        refused = f"its dtype is {kind}, which no array can have"
    elif len(shape) > MAX_NDIM or math.prod(n or 1 for n in shape) > TOO_LARGE:
        refused = f"its shape {short(shape)} is larger than an array can be"
    return Listed(kind, shape, refused)


def _dtype_name(dtype: Any) -> str:
    return dtype.name if type(dtype) is Global and dtype.module == "torch" else called(dtype)


def _about(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is told of the save."""
    storage = state.get("storage_meta")
    found: dict[str, Any] = {"version": state.get("version")}
    if type(storage) is Record:
        where = storage.get("checkpoint_id")
        if type(where) is Record and all(type(part) is str for part in where.args):  # a path, by its parts
            where = "/".join(where.args).replace("//", "/", 1)
        found["checkpoint_id"] = where if type(where) is str else None
        found["save_id"] = storage.get("save_id")
    return {key: value for key, value in found.items() if type(value) is str}


# --- arrays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The arrays of a listing, and what is wrong with the others."""

    arrays: dict[str, Array]
    unavailable: dict[str, str]
    sources: Mapping[str, ByteSource]
    """The data files that are there."""
    damage: Mapping[str, str]
    """Data files that are not there, or not whole, with the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The chunks of the tensors, one row each, a tensor's together. Dims are filled up behind with extents of 1."""

    tensor: Ints
    """Which tensor; ascending."""
    entry: Ints
    """Its row in the listing's entries."""
    file: Ints
    """Which data file; -1 where it is not there."""
    offset: Ints
    length: Ints
    start: Ints
    """`(n, d)`, as in `Pieces`."""
    shape: Ints
    is_first: NDArray[np.bool_]
    """Whether no row before has the same box of the same tensor."""

    def take(self, rows: NDArray[np.bool_]) -> _Rows:
        return _Rows(*(getattr(self, name)[rows] for name in self.__slots__))


def find_arrays(listing: Listing, folder: Folder) -> Found:
    """Return the arrays of a listing. Of the data files only the sizes are asked."""
    sources, damage = _open_files(folder, listing)
    unavailable = {key: listed.refused for key, listed in listing.tensors.items() if listed.refused}
    tensors = {key: listed for key, listed in listing.tensors.items() if key not in unavailable}
    names = list(tensors)
    rows = _rows(tensors, listing.entries, list(sources), unavailable)
    itemsize = np.asarray([DTYPES[t.dtype].itemsize for t in tensors.values()], np.int64)
    nbytes = rows.shape.prod(axis=1, dtype=np.int64) * itemsize[rows.tensor]
    is_usable = np.ones(len(nbytes), bool)
    for mask, why in _faults(rows, nbytes, tensors, listing, sources, damage):
        is_usable &= ~mask
        for row in np.flatnonzero(mask).tolist():
            name = names[int(rows.tensor[row])]
            if name not in unavailable:
                unavailable[name] = why(row)
    _add_incomplete(rows, tensors, unavailable)
    is_usable &= nbytes > 0
    chunks = _chunk_sources(rows.take(is_usable), nbytes[is_usable], tensors, list(sources.values()))
    arrays = _arrays(rows.take(is_usable), tensors, chunks, unavailable)
    return Found(arrays, unavailable, sources, damage)


def _open_files(folder: Folder, listing: Listing) -> tuple[dict[str, ByteSource], dict[str, str]]:
    """Return the data files, and why others are none; several at a time, since asking a network takes its time."""
    files = list(dict.fromkeys(listing.entries.file))

    def attempt(file: str) -> ByteSource | str:
        try:
            source = folder.file(file)
            return source if source.size >= 0 else ""  # a network is asked for the size here
        except MeshloadError as error:
            return str(error)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="meshload") as pool:
        found = dict(zip(files, pool.map(attempt, files), strict=True))
    there = {file: source for file, source in found.items() if not isinstance(source, str)}
    return there, {file: why for file, why in found.items() if isinstance(why, str)}


def _rows(tensors: Mapping[str, Listed], entries: Entries, files: Sequence[str], unavailable: dict[str, str]) -> _Rows:
    owner: list[int] = []
    entry: list[int] = []
    shapes: list[Shape] = []
    is_first: list[bool] = []
    for i, (name, listed) in enumerate(tensors.items()):
        seen: set[Shape] = set()
        ndim, before = len(listed.shape), len(entry)
        for row in listed.rows:
            start = entries.start[row]
            shape = listed.sizes.get(start) if start is not None else None
            if row in entries.refused:
                unavailable[name] = entries.refused[row]
            elif start is None or shape is None or len(start) != ndim or len(shape) != ndim:
                unavailable[name] = f"something is stored at {short(start)}, where no chunk of shape {listed.shape} is listed"
            else:
                entry.append(row)
                shapes.append(shape)
                is_first.append(start not in seen)
                seen.add(start)
        owner += [i] * (len(entry) - before)
    wide = max((len(listed.shape) for listed in tensors.values()), default=0)
    number = {file: i for i, file in enumerate(files)}
    rows = np.asarray(entry, np.int64)
    return _Rows(
        np.asarray(owner, np.int64),
        rows,
        np.asarray([number.get(file, -1) for file in entries.file], np.int64)[rows],
        np.asarray(entries.offset, np.int64)[rows],
        np.asarray(entries.length, np.int64)[rows],
        _padded([entries.start[row] or () for row in entry], wide, 0),
        _padded(shapes, wide, 1),
        np.asarray(is_first, bool),
    )


def _padded(shapes: Sequence[Shape], wide: int, fill: int) -> Ints:
    """Return shapes as rows of one width."""
    pad = [(fill,) * n for n in range(wide + 1)]
    found = np.asarray([shape + pad[wide - len(shape)] for shape in shapes])
    if found.size and (found.dtype.kind != "i" or found.min() < 0 or found.max() >= 1 << 62):
        raise FormatError(".metadata: offsets and sizes of chunks are to be whole numbers that are not negative")
    return found.astype(np.int64).reshape(len(shapes), wide)


_Fault = tuple[NDArray[np.bool_], Callable[[int], str]]


def _faults(
    rows: _Rows,
    nbytes: Ints,
    tensors: Mapping[str, Listed],
    listing: Listing,
    sources: Mapping[str, ByteSource],
    damage: dict[str, str],
) -> Iterator[_Fault]:
    """Return which rows cannot be used, and why; the weightiest reasons first. Damaged files are added to `damage`."""
    listed = list(tensors.values())
    ndim = np.asarray([len(t.shape) for t in listed], np.int64)
    whole = _padded([t.shape for t in listed], rows.start.shape[1], 1)

    def place_of(row: int) -> Place:
        return listing.entries.place(int(rows.entry[row]))

    def chunk(row: int) -> str:
        n, place = int(ndim[rows.tensor[row]]), place_of(row)
        box = f"its chunk at {tuple(rows.start[row, :n].tolist())} of shape {tuple(rows.shape[row, :n].tolist())}"
        return f"{box} is said to be at bytes {place.offset} to {place.offset + place.length} of {place.file}"

    absent: NDArray[np.bool_] = rows.file < 0
    yield absent, lambda row: f"{chunk(row)}, which cannot be opened: {damage[place_of(row).file]}"

    sizes = np.asarray([s.size for s in sources.values()] or [0], np.int64)[rows.file]
    cut = ~absent & (rows.offset + rows.length > sizes)
    for row in np.flatnonzero(cut).tolist():
        place = place_of(row)
        damage.setdefault(
            place.file, f"truncated: an entry ends at byte {place.offset + place.length}, the file has {int(sizes[row])}"
        )
    yield cut, lambda row: f"{chunk(row)}, which was truncated: it has {int(sizes[row])}"

    met = ~absent & ~cut & _overlapping(rows, listing.objects, list(sources))
    why_of = {i: _why_overlapping(list(sources.values())[i]) for i in np.unique(rows.file[met]).tolist()}
    yield met, lambda row: f"{chunk(row)}, and so are other entries{why_of[int(rows.file[row])]}"
    small: NDArray[np.bool_] = rows.length < nbytes
    yield small, lambda row: f"{chunk(row)}, but takes {int(nbytes[row])} bytes"

    beyond: NDArray[np.bool_] = np.any(rows.start + rows.shape > whole[rows.tensor], axis=1)
    yield beyond, lambda row: f"{chunk(row)}, but does not fit into shape {listed[int(rows.tensor[row])].shape}"


def _add_incomplete(rows: _Rows, tensors: Mapping[str, Listed], unavailable: dict[str, str]) -> None:
    """Add the tensors whose chunks do not make the whole. (That none lie upon each other, the plan finds out.)"""
    held = np.zeros(len(tensors), np.int64)
    np.add.at(held, rows.tensor, np.where(rows.is_first, rows.shape.prod(axis=1, dtype=np.int64), 0))
    for n, (name, listed) in zip(held.tolist(), tensors.items(), strict=True):
        if n != math.prod(listed.shape) and name not in unavailable:
            unavailable[name] = (
                f"its chunks hold {n} elements, shape {listed.shape} has {math.prod(listed.shape)}; "
                f"what other ranks wrote is not listed"
            )


def _overlapping(rows: _Rows, objects: Mapping[str, Sequence[Place]], files: Sequence[str]) -> NDArray[np.bool_]:
    """Say which rows share bytes with other entries: places in a file could not be told apart then."""
    number = {file: i for i, file in enumerate(files)}
    others = [(number[p.file], p.offset, p.length) for ps in objects.values() for p in ps if p.file in number]
    more = np.asarray(others, np.int64).reshape(-1, 3)
    file, offset, length = (np.concatenate([a, more[:, i]]) for i, a in enumerate((rows.file, rows.offset, rows.length)))
    order = np.lexsort((offset, file))
    file, offset, stop = file[order], offset[order], (offset + length)[order]
    meets = (file[1:] == file[:-1]) & (offset[1:] < stop[:-1])
    found = np.zeros(len(order), bool)
    found[order[1:]] |= meets
    found[order[:-1]] |= meets
    return found[: len(rows.file)]


def _why_overlapping(source: ByteSource) -> str:
    """Say what overlapping entries come from, where that can be told."""
    head = read_bytes(source, 0, min(10, source.size))
    if len(head) == 10 and head[8:9] == b"{":
        return "; the file is one of safetensors (serialization_format=SAFETENSORS), whose pieces only it can tell: not supported"
    return ""


def _arrays(
    rows: _Rows, tensors: Mapping[str, Listed], chunks: Sequence[Chunks | None], unavailable: Mapping[str, str]
) -> dict[str, Array]:
    itemsize = np.asarray([DTYPES[t.dtype].itemsize for t in tensors.values()], np.int64)
    strides = np.ones_like(rows.shape)
    for d in range(rows.shape.shape[1] - 2, -1, -1):
        strides[:, d] = strides[:, d + 1] * rows.shape[:, d + 1]
    strides *= itemsize[rows.tensor][:, None]
    sources = tuple(c for c in chunks if c is not None)
    place = np.cumsum([c is not None for c in chunks]) - 1 if chunks else np.zeros(1, np.int64)
    source = place[rows.file]
    bounds = np.searchsorted(rows.tensor, np.arange(len(tensors) + 1)).tolist()
    found = {}
    for i, (name, listed) in enumerate(tensors.items()):
        if name in unavailable:
            continue
        of, n = slice(bounds[i], bounds[i + 1]), len(listed.shape)
        pieces = Pieces(sources, source[of], rows.offset[of], rows.start[of, :n], rows.shape[of, :n], strides[of, :n])
        found[name] = Array(name, DTYPES[listed.dtype], listed.shape, pieces, PACKED.get(listed.dtype))
    return found


def _chunk_sources(rows: _Rows, nbytes: Ints, tensors: Mapping[str, Listed], sources: Sequence[ByteSource]) -> list[Chunks | None]:
    """Return, per file, the source of its chunks; None where it has none."""
    order = np.lexsort((rows.offset, rows.file))
    bounds = np.searchsorted(rows.file[order], np.arange(len(sources) + 1))
    names, dtypes = list(tensors), [t.dtype for t in tensors.values()]
    ndim = np.asarray([len(t.shape) for t in tensors.values()], np.int64)
    found: list[Chunks | None] = []
    for i, source in enumerate(sources):
        of = order[bounds[i] : bounds[i + 1]]
        if not len(of):
            found.append(None)
            continue
        tensor = rows.tensor[of]
        found.append(
            Chunks(source, rows.offset[of], rows.length[of], nbytes[of], tensor, rows.shape[of], ndim[tensor], names, dtypes)
        )
    return found


# --- objects ----------------------------------------------------------------------------------------------------------


def load_object(source: ByteSource, place: Place, name: str) -> Any:
    """Return what was saved at a place, inert: plain values, records of others, and lazy arrays for tensors."""
    if place.refused:
        raise FormatError(f"{name}: {place.refused}, and cannot be read")
    if place.length > OBJECT_LIMIT:
        raise FormatError(f"{name}: {place.length} bytes in {place.file} are no tensor; at most {OBJECT_LIMIT} are read at once")
    try:
        file = TorchFile.open(source, place.offset, place.offset + place.length)
    except FormatError as error:
        raise FormatError(f"{name}: at bytes {place.offset} to {place.offset + place.length}: {error}") from error
    return _plain(file.root, file, name)


def _plain(found: Any, file: TorchFile, name: str) -> Any:
    if isinstance(found, Tensor):
        return file.array(found, name)
    if type(found) is dict:
        return {key: _plain(value, file, f"{name}.{key}") for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(_plain(value, file, f"{name}.{i}") for i, value in enumerate(found))
    return found
