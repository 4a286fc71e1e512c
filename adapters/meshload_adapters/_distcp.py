"""`.metadata` and `.distcp`: what torch.distributed.checkpoint (DCP) writes, read without torch and without running a pickle.

Read from torch 2.13 (https://github.com/pytorch/pytorch/tree/main/torch/distributed/checkpoint: metadata.py, filesystem.py).

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`, with the attributes

    state_dict_metadata   {key: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
    planner_data          {key: path}: where the key's value was in the nested dict, such as ("optim", "param_groups", 0, "lr");
                          None where the dict was not flattened
    storage_data          {MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length, transform_descriptors)}
    storage_meta          StorageMeta(checkpoint_id, save_id, load_id, modules), or None
    version               "1.0.0"; files before torch 2.8 lack it

`properties` is TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pin_memory); `size` is the whole
shape; `chunks` are ChunkStorageMetadata(offsets, sizes), boxes in elements. A chunk's place is found by its key and offsets (for
what is no tensor, offset None). An entry is `length` bytes at `offset` of the data file, and is a complete file of `torch.save`
(`_torch_file.py`): a tensor of just the chunk's shape, perhaps in another order of strides (channels last), or any object.
Descriptors name what the entry went through (`stream.zstd/1`); such entries are refused.

Each rank may write a `__{rank}.metadata` of its own in place of the common one (`use_collectives=False`); together they say the
same, with replicated chunks listed once per rank.

Two things here are about size, since there may be a million chunks. Where in its entry a tensor lies is not in `.metadata`, and
finding out takes a read per entry; so the arrays' pieces count from where the entries begin, in a source (`Chunks`) that looks it
up when bytes of the entry are wanted. And the two kinds of records that there are many of are read in runs (`_Runs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.array import Array
from meshload.box import Shape, boxes_of_run, row_major
from meshload.errors import FormatError, MeshloadError
from meshload.pieces import Ints, Pieces
from meshload.source import Bytes, ByteSource, Folder, read_bytes

from ._pickle import Global, Record, Shortcut, unpickle
from ._torch_file import DTYPES, MAX_NDIM, TOO_LARGE, Tensor, TorchFile

OBJECT_LIMIT = 256 << 20
"""Bytes of an entry that is no tensor; more are not read at once."""

FILES_AT_ONCE = 16

TOGETHER = 1 << 20
"""Neighbouring entries are read at once, headers and all, up to this many bytes."""

EDGE = 1 << 10
"""What stands before the tensor in an entry of torch's, and what behind it, is shorter."""

BLOCK = 4 << 20
"""Tensors whose strides are not row-major are read by ranges of this many bytes."""

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"


# --- what is listed ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry lies."""

    file: str
    offset: int
    length: int
    refused: str = ""
    """Why it cannot be read."""


@dataclass(slots=True, eq=False)
class Listed:
    """A tensor, as one or several `.metadata` list it."""

    dtype: str
    shape: Shape
    refused: str = ""
    """Why it cannot be given as an array."""
    sizes: dict[Shape, Shape] = field(default_factory=dict)
    """Its chunks: offsets to sizes."""
    entries: list[tuple[Shape, Place]] = field(default_factory=list)
    """The chunks that were stored: offsets and place."""


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


def read_listing(sources: Sequence[ByteSource]) -> Listing:
    """Read one `.metadata`, or those of all ranks."""
    found = Listing({}, {}, {}, {})
    about: dict[str, Any] = {}
    for source in sources:
        runs = _Runs()
        root = unpickle(read_bytes(source), name=source.name, shortcuts=runs.shortcuts)
        if not isinstance(root, Record) or (root.module, root.name) != (_METADATA, "Metadata") or type(root.state) is not dict:
            raise FormatError(f"{source.name}: a pickle of {_called(root)}, expected is {_METADATA}.Metadata")
        _add(found, root.state, runs, source.name)
        for key, value in _about(root.state).items():
            about.setdefault(key, value)
    return Listing(found.tensors, found.objects, found.paths, about)


def _add(found: Listing, state: Mapping[Any, Any], runs: _Runs, file: str) -> None:
    """Add what one file lists."""
    tensors, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if type(tensors) is not dict or type(stored) is not dict:
        raise FormatError(f"{file}: lists no tensors or no places: state_dict_metadata and storage_data are to be dicts")
    objects: set[str] = set()
    for key, described in tensors.items():
        if type(key) is not str or type(described) is not Record:
            raise FormatError(f"{file}: {_short(key)} is described by {_called(described)}")
        if described.name == "BytesStorageMetadata":
            objects.add(key)
            found.objects.setdefault(key, [])
            continue
        listed = _listed(key, described, file)
        there = found.tensors.setdefault(key, listed)
        if (there.dtype, there.shape) != (listed.dtype, listed.shape):
            raise FormatError(f"{file}: {key} is {listed.dtype} {listed.shape}, other ranks say {there.dtype} {there.shape}")
        _add_chunks(there, runs.chunks_of(described.get("chunks"), f"{file}: {key}"), f"{file}: {key}")
    for key, offset, place in runs.entries_of(stored, file):
        if offset is None and key in objects:
            found.objects[key].append(place)
        elif offset is not None and key in found.tensors:
            found.tensors[key].entries.append((offset, place))
        else:
            raise FormatError(f"{file}: storage_data has {key} at offset {offset}, which state_dict_metadata does not list")
    paths = state.get("planner_data")
    for key, path in paths.items() if type(paths) is dict else ():
        if type(key) is str and type(path) is tuple and path and all(type(p) in (str, int) for p in path):
            found.paths[key] = path


def _listed(key: str, described: Record, file: str) -> Listed:
    shape, properties = described.get("size"), described.get("properties")
    state = properties.state if type(properties) is Record else None
    if described.name != "TensorStorageMetadata" or type(state) is not tuple or len(state) < 2 or not _are_sizes(shape):
        raise FormatError(f"{file}: {key}: {_called(described)} of size {_short(shape)} is no description of a tensor")
    dtype, layout = state[0], state[1]
    kind = dtype.name if type(dtype) is Global and dtype.module == "torch" else _called(dtype)
    refused = ""
    if type(layout) is Record and layout.args != ("torch.strided",):
        refused = f"its layout is {_short(layout.args)}, only strided tensors can be read"
    elif kind not in DTYPES:
        refused = f"its dtype is {kind}, which no array can have"
    elif len(shape) > MAX_NDIM or _volume(tuple(n or 1 for n in shape)) > TOO_LARGE:
        refused = f"its shape {_short(shape)} is larger than an array can be"
    return Listed(kind, shape, refused)


def _add_chunks(listed: Listed, chunks: Iterable[tuple[Shape, Shape]], what: str) -> None:
    for offsets, sizes in chunks:
        if listed.sizes.setdefault(offsets, sizes) != sizes:
            raise FormatError(f"{what}: its chunk at {offsets} has the sizes {sizes}, and {listed.sizes[offsets]}")


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


def _called(found: Any) -> str:
    return f"{found.module}.{found.name}" if isinstance(found, Record | Global) else type(found).__name__


def _short(found: Any) -> str:
    text = repr(found) if type(found) in (str, int, tuple) else _called(found)
    return text if len(text) < 100 else f"{text[:100]} ..."


def _is_size(found: Any) -> bool:
    return type(found) is int and 0 <= found < 1 << 62  # bool is an int, too


def _are_sizes(found: Any) -> bool:
    return type(found) is tuple and all(map(_is_size, found))


def _volume(shape: Shape) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


# --- records in runs --------------------------------------------------------------------------------------------------

# Pieces of patterns; each is a sequence of whole opcodes.
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_GET = rb"(?:h.|j.{4})"
_TEXT = rb"(?:\x8c.[^\x94]*\x94)"
_SIZE = _GET + rb"(?:\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,32}t\x94)\x85\x94R\x94" % ((_INT,) * 4)
_BEGIN, _END, _NEW = rb"\x94}\x94\(", rb"ub", rb"\)\x81"

_CHUNK = rb"%b(%b)(%b)(%b)(%b)%b" % (_BEGIN, _GET, _SIZE, _GET, _SIZE, _END)
_INDEX = rb"%b(%b)(%b|%b)(%b)(?:%b|N)(%b)(%b|%b|N)%b" % (_BEGIN, _GET, _TEXT, _GET, _GET, _INT, _GET, _SIZE, _GET, _END)
_STORED = rb"%b(%b)(%b|%b)(%b)(%b)(%b)(%b)%b" % (_BEGIN, _GET, _TEXT, _GET, _GET, _INT, _GET, _INT, _END)
_HEADS = (rb"()", rb"(%b)%b" % (_GET, _NEW))
_FIRST_CHUNK, _NEXT_CHUNK = (re.compile(head + _CHUNK, re.DOTALL) for head in _HEADS)
_FIRST_ENTRY, _NEXT_ENTRY = (re.compile(head + _INDEX + rb"(%b)%b" % (_GET, _NEW) + _STORED, re.DOTALL) for head in _HEADS)
_INTS = re.compile(_INT, re.DOTALL)

_INFO = Global(_STORAGE, "_StorageInfo")
_HIDDEN = Global(__name__, "hidden")
"""What the memo holds for objects in a record that nothing else refers to."""


class _Runs:
    """Reads the records that there are many of, each in one step; in the machine's result their numbers stand for them.

    A chunk's record takes some 30 opcodes, an entry's 40: with 100,000 chunks that is 11 s for the machine, and 1 s here. The
    patterns are sequences of whole opcodes, as Python's pickle writes instances of these classes, so that what matches means
    the same to the machine, and what does not match is left to it. What others may refer to, strings and sizes, goes to the memo.
    """

    def __init__(self) -> None:
        self.chunks: list[tuple[Any, Any]] = []
        self.entries: list[tuple[Any, Any, Any, Any, Any]] = []
        self._sizes: dict[bytes, Shape] = {}
        self._checked: set[tuple[bytes, ...]] = set()

    @property
    def shortcuts(self) -> Mapping[tuple[str, str], Shortcut]:
        return {(_METADATA, "ChunkStorageMetadata"): self._read_chunks, (_METADATA, "MetadataIndex"): self._read_entries}

    def _read_chunks(self, kind: Global, data: bytes, at: int, memo: dict[int, Any]) -> tuple[list[Any], int] | None:
        first, match, n = len(self.chunks), _FIRST_CHUNK.match(data, at), len(memo)
        expected = (kind, "offsets", "sizes")
        while match is not None:
            new, name, raw_start, other, raw_shape = match.groups()
            start, shape = self._size(raw_start, memo), self._size(raw_shape, memo)
            if start is None or shape is None or not self._are((new, name, other), expected, memo):
                break
            memo[n] = memo[n + 1] = _HIDDEN  # the instance, its attributes
            n = _memoise_size(memo, _memoise_size(memo, n + 2, start), shape)
            self.chunks.append((start, shape))
            at = match.end()
            match = _NEXT_CHUNK.match(data, at)
        return (list(range(first, len(self.chunks))), at) if len(self.chunks) > first else None

    def _read_entries(self, kind: Global, data: bytes, at: int, memo: dict[int, Any]) -> tuple[list[Any], int] | None:
        first, match, n = len(self.entries), _FIRST_ENTRY.match(data, at), len(memo)
        expected = (kind, "fqn", "index", "offset", _INFO, "relative_path", "offset", "length")
        while match is not None:
            new, a, raw_key, b, c, raw_start, info, d, raw_file, e, raw_offset, f, raw_length = match.groups()
            key, file = _text(raw_key, memo), _text(raw_file, memo)
            is_inline = len(raw_start) > 5 or (len(raw_start) > 2 and raw_start[0] == 104)
            start = self._size(raw_start, memo) if is_inline else None if raw_start == b"N" else memo.get(_number(raw_start))
            if key is None or file is None or (start is None and raw_start != b"N"):
                break
            if not self._are((new, a, b, c, info, d, e, f), expected, memo):
                break
            memo[n] = memo[n + 1] = _HIDDEN
            n += 2
            if raw_key[0] == 0x8C:
                memo[n] = key
                n += 1
            if is_inline and start is not None:
                n = _memoise_size(memo, n, start)
            memo[n] = memo[n + 1] = _HIDDEN
            n += 2
            if raw_file[0] == 0x8C:
                memo[n] = file
                n += 1
            self.entries.append((key, start, file, _integer(raw_offset), _integer(raw_length)))
            at = match.end()
            match = _NEXT_ENTRY.match(data, at)
        found: list[Any] = [x for i in range(first, len(self.entries)) for x in (i, None)]  # a key and a value each
        return (found, at) if found else None

    def _are(self, raw: tuple[bytes, ...], expected: tuple[Any, ...], memo: Mapping[int, Any]) -> bool:
        """Say whether GETs find what is expected; a missing one is not asked. What a memo holds at a number stays there."""
        if raw in self._checked:
            return True
        good = all(not r or memo.get(_number(r)) == e for r, e in zip(raw, expected, strict=True))
        if good:
            self._checked.add(raw)
        return good

    def _size(self, raw: bytes, memo: Mapping[int, Any]) -> Shape | None:
        """Return a torch.Size that is made in place; None where it is made of something else."""
        found = self._sizes.get(raw)
        if found is None:
            n = 2 if raw[0] == 104 else 5
            if memo.get(_number(raw[:n])) != Global("torch", "Size"):
                return None
            skip = n + 1 if raw[n] in b"()" else n
            found = self._sizes[raw] = tuple(map(_integer, _INTS.findall(raw, skip)))
        return found

    # - using what was read

    def chunks_of(self, chunks: Any, what: str) -> Iterator[tuple[Any, Any]]:
        """Return a tensor's chunks: offsets and sizes."""
        if type(chunks) is not list:
            raise FormatError(f"{what}: its chunks are {_called(chunks)}, expected is a list")
        for chunk in chunks:
            if type(chunk) is int and chunk < len(self.chunks):
                found = self.chunks[chunk]
            elif type(chunk) is Record and chunk.name == "ChunkStorageMetadata":
                found = chunk.get("offsets"), chunk.get("sizes")
            else:
                raise FormatError(f"{what}: a chunk is {_called(chunk)}")
            if type(found[0]) is not tuple or type(found[1]) is not tuple:
                raise FormatError(f"{what}: a chunk has the offsets {_short(found[0])} and the sizes {_short(found[1])}")
            yield found

    def entries_of(self, stored: Mapping[Any, Any], file: str) -> Iterator[tuple[str, Shape | None, Place]]:
        """Return what is stored: key, offsets (None where it is no tensor), and place."""
        for index, info in stored.items():
            refused = ""
            if type(index) is int and index < len(self.entries):
                key, start, name, offset, length = self.entries[index]
            elif type(index) is Record and index.name == "MetadataIndex" and type(info) is Record:
                key, start, name = index.get("fqn"), index.get("offset"), info.get("relative_path")
                offset, length, steps = info.get("offset"), info.get("length"), info.get("transform_descriptors")
                refused = f"it is stored as {_short(tuple(steps) if type(steps) is list else steps)}" if steps else ""
            else:
                raise FormatError(f"{file}: storage_data maps {_called(index)} to {_called(info)}")
            if type(key) is not str or type(name) is not str or (type(start) is not tuple and start is not None):
                raise FormatError(f"{file}: storage_data has {_short(key)} at {_short(start)} in {_short(name)}")
            if not _is_size(offset) or not _is_size(length):
                raise FormatError(f"{file}: {key} is said to be {_short(length)} bytes at {_short(offset)} of {name}")
            yield key, start, Place(name, offset, length, refused)


def _memoise_size(memo: dict[int, Any], n: int, size: Shape) -> int:
    """Add what making a torch.Size adds to the memo: the tuple (the empty one is not), the arguments, the size."""
    if size:
        memo[n] = _HIDDEN
        n += 1
    memo[n], memo[n + 1] = _HIDDEN, size
    return n + 2


def _text(raw: bytes, memo: Mapping[int, Any]) -> str | None:
    """Return a string that stands here or in the memo; None where it is something else."""
    if raw[0] != 0x8C:
        found = memo.get(_number(raw))
        return found if type(found) is str else None
    try:
        return raw[2:-1].decode() if raw[1] == len(raw) - 3 else None
    except UnicodeDecodeError:
        return None


def _number(raw: bytes) -> int:
    return raw[1] if len(raw) == 2 else int.from_bytes(raw[1:], "little")


def _integer(raw: bytes) -> int:
    code = raw[0]
    return raw[1] if code == 75 else int.from_bytes(raw[2 if code == 0x8A else 1 :], "little", signed=code != 77)


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
    rows, places = _rows(tensors, list(sources), unavailable)
    itemsize = np.asarray([DTYPES[t.dtype].itemsize for t in tensors.values()], np.int64)
    nbytes = rows.shape.prod(axis=1, dtype=np.int64) * itemsize[rows.tensor]
    is_usable = np.ones(len(places), bool)
    for mask, why in _faults(rows, places, nbytes, tensors, listing, sources, damage):
        is_usable &= ~mask
        for row in np.flatnonzero(mask).tolist():
            name = names[int(rows.tensor[row])]
            if name not in unavailable:
                unavailable[name] = why(row)
    is_usable &= nbytes > 0
    chunks = _chunk_sources(rows.take(is_usable), nbytes[is_usable], tensors, list(sources.values()))
    arrays = _arrays(rows.take(is_usable), tensors, chunks, unavailable)
    return Found(arrays, unavailable, sources, damage)


def _open_files(folder: Folder, listing: Listing) -> tuple[dict[str, ByteSource], dict[str, str]]:
    """Return the data files, and why others are none; several at a time, since asking a network takes its time."""
    places = [p for listed in listing.tensors.values() for _, p in listed.entries]
    files = list(dict.fromkeys(p.file for ps in (places, *listing.objects.values()) for p in ps))

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


def _rows(tensors: Mapping[str, Listed], files: Sequence[str], unavailable: dict[str, str]) -> tuple[_Rows, list[Place]]:
    number = {file: i for i, file in enumerate(files)}
    places: list[Place] = []
    owner: list[int] = []
    starts: list[Shape] = []
    shapes: list[Shape] = []
    is_first: list[bool] = []
    for i, (name, listed) in enumerate(tensors.items()):
        seen: set[Shape] = set()
        ndim = len(listed.shape)
        for start, place in listed.entries:
            shape = listed.sizes.get(start)
            if place.refused:
                unavailable[name] = place.refused
            elif shape is None or len(start) != ndim or len(shape) != ndim:
                unavailable[name] = f"something is stored at {_short(start)}, where no chunk of shape {listed.shape} is listed"
            else:
                places.append(place)
                owner.append(i)
                starts.append(start)
                shapes.append(shape)
                is_first.append(start not in seen)
                seen.add(start)
    wide = max((len(listed.shape) for listed in tensors.values()), default=0)
    return (
        _Rows(
            np.asarray(owner, np.int64),
            np.asarray([number.get(p.file, -1) for p in places], np.int64),
            np.asarray([p.offset for p in places], np.int64),
            np.asarray([p.length for p in places], np.int64),
            _padded(starts, wide, 0),
            _padded(shapes, wide, 1),
            np.asarray(is_first, bool),
        ),
        places,
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
    places: Sequence[Place],
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

    def chunk(row: int) -> str:
        n, place = int(ndim[rows.tensor[row]]), places[row]
        box = f"its chunk at {tuple(rows.start[row, :n].tolist())} of shape {tuple(rows.shape[row, :n].tolist())}"
        return f"{box} is said to be at bytes {place.offset} to {place.offset + place.length} of {place.file}"

    yield np.asarray(rows.file < 0, bool), lambda row: f"{chunk(row)}, which cannot be opened: {damage[places[row].file]}"

    sizes = np.asarray([s.size for s in sources.values()] or [0], np.int64)[rows.file]
    cut = (rows.file >= 0) & (rows.offset + rows.length > sizes)
    for row in np.flatnonzero(cut).tolist():
        place = places[row]
        damage.setdefault(
            place.file, f"truncated: an entry ends at byte {place.offset + place.length}, the file has {int(sizes[row])}"
        )
    yield cut, lambda row: f"{chunk(row)}, which was truncated: it has {int(sizes[row])}"

    met = (rows.file >= 0) & ~cut & _overlapping(rows, listing.objects, list(sources))
    why_of = {i: _why_overlapping(list(sources.values())[i]) for i in np.unique(rows.file[met]).tolist()}
    yield met, lambda row: f"{chunk(row)}, and so are other entries{why_of[int(rows.file[row])]}"
    yield rows.length < nbytes, lambda row: f"{chunk(row)}, but takes {int(nbytes[row])} bytes"

    beyond = (rows.start + rows.shape > whole[rows.tensor]).any(axis=1)
    yield beyond, lambda row: f"{chunk(row)}, but does not fit into shape {listed[int(rows.tensor[row])].shape}"

    volume = np.where(rows.is_first, rows.shape.prod(axis=1, dtype=np.int64), 0)
    sums = np.zeros(len(listed), np.int64)
    np.add.at(sums, rows.tensor, volume)
    yield (
        (sums != whole.prod(axis=1, dtype=np.int64))[rows.tensor],
        lambda row: (
            f"its chunks hold {int(sums[rows.tensor[row]])} elements, shape {listed[int(rows.tensor[row])].shape} has "
            f"{_volume(listed[int(rows.tensor[row])].shape)}; what other ranks wrote is not listed"
        ),
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
        stored = listed.dtype if listed.dtype == "float4_e2m1fn_x2" else None
        found[name] = Array(name, DTYPES[listed.dtype], listed.shape, pieces, stored)
    return found


# --- data files -------------------------------------------------------------------------------------------------------


def _chunk_sources(rows: _Rows, nbytes: Ints, tensors: Mapping[str, Listed], sources: Sequence[ByteSource]) -> list[Chunks | None]:
    """Return, per file, the source of its chunks; None where it has none."""
    order = np.lexsort((rows.offset, rows.file))
    bounds = np.searchsorted(rows.file[order], np.arange(len(sources) + 1))
    names, listed = list(tensors), list(tensors.values())
    found: list[Chunks | None] = []
    for i, source in enumerate(sources):
        of = order[bounds[i] : bounds[i + 1]]
        if not len(of):
            found.append(None)
            continue
        found.append(Chunks(source, rows.offset[of], rows.length[of], nbytes[of], rows.tensor[of], rows.shape[of], names, listed))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How a tensor lies in its entry."""

    begin: int
    """Its first element, in bytes behind the entry's first."""
    strides: Shape | None
    """In bytes; None where they are row-major."""


@dataclass(frozen=True, slots=True, eq=False)
class _Twin:
    """The bytes around the tensor of one entry, but for checksums. Where those of another are the same, so is its layout."""

    layout: _Layout
    head: bytes
    tail: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    """Which bytes of the tail are compared."""


@dataclass(eq=False)
class Chunks:
    """A data file whose tensors begin where their entries do, row-major: byte `i` of a tensor is byte `offset + i` here.

    That is never beyond its entry. Where in the entry it is in truth, the entry's own pickle and zip directory tell: they are
    read when bytes of the tensor are, compared with what `.metadata` says, and the place is kept. Beside `out`, a read takes
    at most `TOGETHER` bytes, and `2 * BLOCK` where strides are not row-major.
    """

    source: ByteSource
    offset: Ints
    """Where each entry begins; ascending."""
    length: Ints
    nbytes: Ints
    """Bytes of its tensor."""
    tensor: Ints
    shape: Ints
    names: Sequence[str]
    listed: Sequence[Listed]

    unit = 1

    def __post_init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}
        self._twins: dict[tuple[str, Shape, int], _Twin] = {}

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def gap(self) -> int:
        return self.source.gap

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out`; what lies between tensors is left as it is."""
        stop = start + len(out)
        first = max(0, int(np.searchsorted(self.offset, start, side="right")) - 1)
        end = int(np.searchsorted(self.offset, stop, side="left"))
        while first < end:
            last = self._together(first, end, len(out))
            view: ByteSource = self.source
            if last > first:
                view = _held(view, int(self.offset[first]), int(self.offset[last - 1] + self.length[last - 1]))
            for k in range(first, max(last, first + 1)):
                begin = int(self.offset[k])
                low, high = max(start, begin), min(stop, begin + int(self.nbytes[k]))
                if low < high:
                    self._read(k, view, low - begin, out[low - start : high - start])
            first = max(last, first + 1)

    def _together(self, first: int, end: int, wanted: int) -> int:
        """Return the end of the entries from `first` on that are worth reading whole; `first` where none is."""
        reach = np.searchsorted(self.offset[first:end] + self.length[first:end], self.offset[first] + TOGETHER, side="right")
        last = first + int(reach)
        if last == first or (last == first + 1 and (first in self._layouts or 2 * wanted < self.length[first])):
            return first
        return last

    def _read(self, k: int, view: ByteSource, skip: int, out: Bytes) -> None:
        layout = self._layout(k, view)
        begin = int(self.offset[k]) + layout.begin
        if layout.strides is None:
            view.read_into(begin + skip, out)
        else:
            itemsize = DTYPES[self.listed[int(self.tensor[k])].dtype].itemsize
            _gather(view, begin, layout.strides, self._shape(k), itemsize, skip, out)

    def _shape(self, k: int) -> Shape:
        ndim = len(self.listed[int(self.tensor[k])].shape)
        return tuple(self.shape[k, :ndim].tolist())

    def _layout(self, k: int, view: ByteSource) -> _Layout:
        found = self._layouts.get(k)
        if found is None:
            found = self._layouts[k] = self._look_up(k, view)
        return found

    def _look_up(self, k: int, view: ByteSource) -> _Layout:
        begin, length, nbytes = int(self.offset[k]), int(self.length[k]), int(self.nbytes[k])
        kind = (self.listed[int(self.tensor[k])].dtype, self._shape(k), length)
        if not isinstance(view, _Held):
            middle = begin + length - EDGE
            view = _held(_held(view, begin, min(begin + EDGE, begin + length)), max(begin, middle), begin + length)
        twin = self._twins.get(kind)
        if twin is not None:
            head = read_bytes(view, begin, begin + len(twin.head))
            tail = read_bytes(view, begin + length - len(twin.tail), begin + length)
            if head == twin.head and np.array_equal(np.frombuffer(tail, np.uint8)[twin.kept], twin.tail[twin.kept]):
                return twin.layout
        layout = self._parsed(k, view)
        tail_length = length - layout.begin - nbytes
        if twin is None and layout.strides is None and layout.begin <= EDGE and 0 <= tail_length <= EDGE:
            head = read_bytes(view, begin, begin + layout.begin)
            self._twins[kind] = _twin(layout, head, read_bytes(view, begin + length - tail_length, begin + length))
        return layout

    def _parsed(self, k: int, view: ByteSource) -> _Layout:
        """Read an entry's own description of its tensor."""
        begin, length, shape = int(self.offset[k]), int(self.length[k]), self._shape(k)
        tensor = int(self.tensor[k])
        what = f"{self.names[tensor]}: its entry at bytes {begin} to {begin + length} of {self.name}"
        try:
            file = TorchFile.open(view, begin, begin + length)
        except FormatError as error:
            raise FormatError(f"{what} cannot be used: {error}") from error
        found, dtype = file.root, self.listed[tensor].dtype
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (dtype, shape):
            kind = f"{found.dtype} {found.shape}" if isinstance(found, Tensor) else f"{_called(found)}, no tensor"
            raise FormatError(f"{what} is {kind}, expected is {dtype} {shape}")
        pieces = file.array(found, what).pieces
        strides = tuple(pieces.strides[0].tolist())
        usual = row_major(shape, DTYPES[dtype].itemsize)
        is_usual = all(n == 1 or s == u for n, s, u in zip(shape, strides, usual, strict=True))
        return _Layout(int(pieces.offset[0]) - begin, None if is_usual else strides)


_CHECKSUMS = re.compile(rb"(?<=PK\x07\x08).{4}|(?<=PK\x01\x02.{12}).{4}|\d{40}", re.DOTALL)
"""What differs between entries of one layout: checksums behind the data and in the directory, and the hash of the whole."""


def _twin(layout: _Layout, head: bytes, tail: bytes) -> _Twin:
    kept = np.ones(len(tail), bool)
    for match in _CHECKSUMS.finditer(tail):
        kept[match.start() : match.end()] = False
    return _Twin(layout, head, np.frombuffer(tail, np.uint8), kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A source of which a range was read already."""

    source: ByteSource
    start: int
    held: Bytes
    unit: int = 1
    gap: int = 0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int:
        return self.source.size

    def read_into(self, start: int, out: Bytes) -> None:
        at = start - self.start
        if at >= 0 and at + len(out) <= len(self.held):
            out[:] = self.held[at : at + len(out)]
        else:
            self.source.read_into(start, out)


def _held(source: ByteSource, start: int, stop: int) -> _Held:
    held = np.empty(stop - start, np.uint8)
    source.read_into(start, held)
    return _Held(source, start, held)


def _gather(view: ByteSource, begin: int, strides: Shape, shape: Shape, itemsize: int, skip: int, out: Bytes) -> None:
    """Fill `out` with the row-major bytes from `skip` on of a tensor that is stored with other strides."""
    first, last = skip // itemsize, -(-(skip + len(out)) // itemsize)
    word = np.dtype((np.void, itemsize))
    values = np.empty(last - first, word)
    at = 0
    for box in boxes_of_run(shape, first, last):
        offset = begin + sum(i * s for i, s in zip(box.start, strides, strict=True))
        _fill(view, offset, strides, values[at : at + box.size].reshape(box.shape))
        at += box.size
    out[:] = values.view(np.uint8)[skip - first * itemsize :][: len(out)]


def _fill(view: ByteSource, offset: int, strides: Shape, values: NDArray[Any]) -> None:
    """Fill an array from a strided box: by the range that it spans, or in two halves where that is long."""
    reach = [(n - 1) * s for n, s in zip(values.shape, strides, strict=True)]
    span = sum(reach) + values.itemsize
    if span <= BLOCK or values.size == 1:
        held = np.empty(span, np.uint8)
        view.read_into(offset, held)
        values[...] = np.ndarray(values.shape, values.dtype, held, 0, strides)
        return
    dim = int(np.argmax(reach))
    half = values.shape[dim] // 2
    low, high = np.split(values, [half], axis=dim)
    _fill(view, offset, strides, low)
    _fill(view, offset + half * strides[dim], strides, high)


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
