"""The records of a `.metadata` (`_distcp.py`) that there may be a million of, each read in one step instead of opcode by opcode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from meshload.box import Shape
from meshload.errors import FormatError

from ._pickle import Global, Record, Shortcut

METADATA = "torch.distributed.checkpoint.metadata"

STORAGE = "torch.distributed.checkpoint.filesystem"

LARGEST = 1 << 62
"""No offset, length or size is as large."""


class Place(NamedTuple):
    """Where an entry lies."""

    file: str
    offset: int
    length: int
    refused: str = ""
    """Why it cannot be read."""


@dataclass(slots=True, eq=False)
class Entries:
    """What is stored, in columns, a row per entry: a million objects would cost each run of Python's garbage collector dearly."""

    key: list[str] = field(default_factory=list)
    start: list[Shape | None] = field(default_factory=list)
    """Offsets of a chunk in its tensor; None for what is no tensor."""
    file: list[str] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Row -> why it cannot be read."""

    def __len__(self) -> int:
        return len(self.key)

    def add(self, key: str, start: Shape | None, place: Place) -> None:
        if place.refused:
            self.refused[len(self)] = place.refused
        self.key.append(key)
        self.start.append(start)
        self.file.append(place.file)
        self.offset.append(place.offset)
        self.length.append(place.length)

    def extend(self, more: Entries) -> None:
        self.refused |= {len(self) + row: why for row, why in more.refused.items()}
        for name in ("key", "start", "file", "offset", "length"):
            getattr(self, name).extend(getattr(more, name))

    def place(self, row: int) -> Place:
        return Place(self.file[row], self.offset[row], self.length[row], self.refused.get(row, ""))


# Pieces of patterns; each is a sequence of whole opcodes.
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_GET = rb"(?:h.|j.{4})"
_TEXT = rb"(?:\x8c.[^\x94]*\x94)"
_SIZE = _GET + rb"(?:\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,32}t\x94)\x85\x94R\x94" % ((_INT,) * 4)
_BEGIN, _END, _NEW = rb"\x94}\x94\(", rb"ub", rb"\)\x81"

_CHUNK = rb"%b(%b)(%b)(%b)(%b)%b" % (_BEGIN, _GET, _SIZE, _GET, _SIZE, _END)
_INDEX = rb"%b(%b)(%b|%b)(%b)(?:%b|N)(%b)(%b|%b|N)%b" % (_BEGIN, _GET, _TEXT, _GET, _GET, _INT, _GET, _SIZE, _GET, _END)
_STORED = rb"%b(%b)(%b|%b)(%b)(%b)(%b)(%b)%b" % (_BEGIN, _GET, _TEXT, _GET, _GET, _INT, _GET, _INT, _END)
_TENSOR = rb"%b(%b)(%b)%b\x94\((%b)(%b)[\x88\x89]%b[\x88\x89]t\x94b(%b)(%b)(%b)]\x94(%b)%b%baub" % (
    *(_BEGIN, _GET, _GET, _NEW, _GET, _GET, _GET, _GET, _SIZE, _GET, _GET, _NEW),
    _CHUNK,
)
_ONE_CHUNK = re.compile(_TENSOR, re.DOTALL)
_HEADS = (rb"()", rb"(%b)%b" % (_GET, _NEW))
_FIRST_CHUNK, _NEXT_CHUNK = (re.compile(head + _CHUNK, re.DOTALL) for head in _HEADS)
_FIRST_ENTRY, _NEXT_ENTRY = (re.compile(head + _INDEX + rb"(%b)%b" % (_GET, _NEW) + _STORED, re.DOTALL) for head in _HEADS)
_INTS = re.compile(_INT, re.DOTALL)

_INFO = Global(STORAGE, "_StorageInfo")
_PROPERTIES = Global(METADATA, "TensorProperties")
_CHUNK_KIND = Global(METADATA, "ChunkStorageMetadata")
_HIDDEN = Global(__name__, "hidden")
"""What the memo holds for objects in a record that nothing else refers to."""


_Described = tuple[Any, Any, Shape, Iterable[tuple[Shape, Shape]]]
"""A tensor: dtype, layout, shape, and chunks."""


class Runs:
    """Reads the records that there are many of, each in one step; in the machine's result their numbers stand for them.

    A chunk's record takes some 30 opcodes, an entry's 40: with 100,000 chunks that is 11 s for the machine, and 1 s here, where
    what is kept is strings, numbers and shapes that recur (objects of their own took the garbage collector another second). The
    patterns are sequences of whole opcodes, as Python's pickle writes instances of these classes, so that what matches means
    the same to the machine, and what does not match is left to it. What others may refer to, strings and sizes, goes to the memo.
    """

    def __init__(self) -> None:
        self.starts: list[Shape] = []
        self.shapes: list[Shape] = []
        """Of the chunks."""
        self.entries = Entries()
        self.tensors: list[_Described] = []
        self._sizes: dict[bytes, Shape] = {}
        self._texts: dict[bytes, str] = {}
        self._checked: set[tuple[bytes, ...]] = set()

    @property
    def shortcuts(self) -> Mapping[tuple[str, str], Shortcut]:
        return {
            (METADATA, "TensorStorageMetadata"): self._read_tensor,
            (METADATA, "ChunkStorageMetadata"): self._read_chunks,
            (METADATA, "MetadataIndex"): self._read_entries,
        }

    def _read_tensor(self, kind: Global, data: bytes, at: int, memo: dict[int, Any]) -> tuple[list[Any], int] | None:
        """Read a tensor of one chunk, of which a model of many experts has many."""
        match = _ONE_CHUNK.match(data, at)
        if match is None:
            return None
        a, properties, dtype, layout, b, raw_size, c, chunk, d, raw_start, e, raw_shape = match.groups()
        expected = ("properties", _PROPERTIES, "size", "chunks", _CHUNK_KIND, "offsets", "sizes")
        size, start, shape = (self._size(raw, memo) for raw in (raw_size, raw_start, raw_shape))
        if size is None or start is None or shape is None or not self._are((a, properties, b, c, chunk, d, e), expected, memo):
            return None
        self.tensors.append((memo.get(_number(dtype)), memo.get(_number(layout)), size, [(start, shape)]))
        n = len(memo)
        memo[n] = memo[n + 1] = memo[n + 2] = memo[n + 3] = _HIDDEN  # instance and attributes, of the tensor and its properties
        n = _memoise_size(memo, n + 4, size)
        memo[n] = memo[n + 1] = memo[n + 2] = _HIDDEN  # the list, and its chunk
        _memoise_size(memo, _memoise_size(memo, n + 3, start), shape)
        return [len(self.tensors) - 1], match.end()

    def _read_chunks(self, kind: Global, data: bytes, at: int, memo: dict[int, Any]) -> tuple[list[Any], int] | None:
        sizes, first, match, n = self._sizes, len(self.starts), _FIRST_CHUNK.match(data, at), len(memo)
        expected = (kind, "offsets", "sizes")
        while match is not None:
            new, name, raw_start, other, raw_shape = match.groups()
            start = sizes.get(raw_start) or self._size(raw_start, memo)
            shape = sizes.get(raw_shape) or self._size(raw_shape, memo)
            if start is None or shape is None or not self._are((new, name, other), expected, memo):
                break
            memo[n] = memo[n + 1] = _HIDDEN  # the instance, its attributes
            n = _memoise_size(memo, _memoise_size(memo, n + 2, start), shape)
            self.starts.append(start)
            self.shapes.append(shape)
            at = match.end()
            match = _NEXT_CHUNK.match(data, at)
        return (list(range(first, len(self.starts))), at) if len(self.starts) > first else None

    def _read_entries(self, kind: Global, data: bytes, at: int, memo: dict[int, Any]) -> tuple[list[Any], int] | None:
        found, texts, sizes = self.entries, self._texts, self._sizes
        first, match, n = len(found), _FIRST_ENTRY.match(data, at), len(memo)
        expected = (kind, "fqn", "index", "offset", _INFO, "relative_path", "offset", "length")
        while match is not None:
            new, a, raw_key, b, c, raw_start, info, d, raw_file, e, raw_offset, f, raw_length = match.groups()
            key = texts.get(raw_key) or self._text(raw_key, memo)
            file = texts.get(raw_file) or self._text(raw_file, memo)
            start = sizes.get(raw_start)
            is_inline = start is not None or len(raw_start) > 5 or (len(raw_start) > 2 and raw_start[0] == 104)
            if start is None and raw_start != b"N":
                start = self._size(raw_start, memo) if is_inline else memo.get(_number(raw_start))
                if start is None or not (is_inline or are_sizes(start)):
                    break
            if key is None or file is None or not self._are((new, a, b, c, info, d, e, f), expected, memo):
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
            found.key.append(key)
            found.start.append(start)
            found.file.append(file)
            found.offset.append(_integer(raw_offset))
            found.length.append(_integer(raw_length))
            at = match.end()
            match = _NEXT_ENTRY.match(data, at)
        left: list[Any] = [x for i in range(first, len(found)) for x in (i, None)]  # a key and a value each
        return (left, at) if left else None

    def _are(self, raw: tuple[bytes, ...], expected: tuple[Any, ...], memo: Mapping[int, Any]) -> bool:
        """Say whether GETs find what is expected; a missing one is not asked. What a memo holds at a number stays there."""
        if raw in self._checked:
            return True
        good = all(not r or memo.get(_number(r)) == e for r, e in zip(raw, expected, strict=True))
        if good:
            self._checked.add(raw)
        return good

    def _text(self, raw: bytes, memo: Mapping[int, Any]) -> str | None:
        """Return a string that stands here or in the memo; None where it is something else."""
        if raw[0] != 0x8C:
            found = memo.get(_number(raw))
            return found if type(found) is str else None
        try:
            text = raw[2:-1].decode() if raw[1] == len(raw) - 3 else None
        except UnicodeDecodeError:
            return None
        if text is not None:
            self._texts[raw] = text
        return text

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

    def tensor_of(self, described: Any, what: str) -> _Described:
        """Return what is said of a tensor."""
        if type(described) is int and 0 <= described < len(self.tensors):
            return self.tensors[described]
        shape: Any
        shape, properties = (described.get(a) if type(described) is Record else None for a in ("size", "properties"))
        state = properties.state if type(properties) is Record else None
        if (
            called(described) != f"{METADATA}.TensorStorageMetadata"
            or type(state) is not tuple
            or len(state) < 2
            or not are_sizes(shape)
        ):
            raise FormatError(f"{what}: {called(described)} of size {short(shape)} is no description of a tensor")
        return state[0], state[1], shape, self._chunks_of(described.get("chunks"), what)

    def _chunks_of(self, chunks: Any, what: str) -> Iterator[tuple[Shape, Shape]]:
        if type(chunks) is not list:
            raise FormatError(f"{what}: its chunks are {called(chunks)}, expected is a list")
        for chunk in chunks:
            if type(chunk) is int and 0 <= chunk < len(self.starts):
                yield self.starts[chunk], self.shapes[chunk]
                continue
            start: Any
            sizes: Any
            start, sizes = (chunk.get(a) if type(chunk) is Record else None for a in ("offsets", "sizes"))
            if not are_sizes(start) or not are_sizes(sizes):
                raise FormatError(f"{what}: {called(chunk)} at {short(start)} of sizes {short(sizes)} is no chunk")
            yield start, sizes

    def rows_of(self, stored: Mapping[Any, Any], file: str) -> list[int]:
        """Return the rows of what is stored, in its order; entries that the machine has read are added."""
        entries, read = self.entries, len(self.entries)
        rows = []
        for index, info in stored.items():
            if type(index) is int and 0 <= index < read:
                rows.append(index)
            else:
                rows.append(len(entries))
                entries.add(*self._entry(index, info, file))
        for row, (offset, length) in enumerate(zip(entries.offset, entries.length, strict=True)):
            if not 0 <= offset < LARGEST or not 0 <= length < LARGEST:
                raise FormatError(f"{file}: {entries.key[row]} is said to be {length} bytes at {offset} of {entries.file[row]}")
        return rows

    def _entry(self, index: Any, info: Any, file: str) -> tuple[str, Shape | None, Place]:
        if type(index) is not Record or index.name != "MetadataIndex" or type(info) is not Record:
            raise FormatError(f"{file}: storage_data maps {called(index)} to {called(info)}")
        key, start, name = index.get("fqn"), index.get("offset"), info.get("relative_path")
        offset, length, steps = info.get("offset"), info.get("length"), info.get("transform_descriptors")
        if type(key) is not str or type(name) is not str or not (start is None or are_sizes(start)):
            raise FormatError(f"{file}: storage_data has {short(key)} at {short(start)} in {short(name)}")
        if type(offset) is not int or type(length) is not int:
            raise FormatError(f"{file}: {key} is said to be {short(length)} bytes at {short(offset)} of {name}")
        refused = f"it is stored as {short(tuple(steps) if type(steps) is list else steps)}" if steps else ""
        return key, start, Place(name, offset, length, refused)


def _memoise_size(memo: dict[int, Any], n: int, size: Shape) -> int:
    """Add what making a torch.Size adds to the memo: the tuple (the empty one is not), the arguments, the size."""
    if size:
        memo[n] = _HIDDEN
        n += 1
    memo[n], memo[n + 1] = _HIDDEN, size
    return n + 2


def _number(raw: bytes) -> int:
    return raw[1] if len(raw) == 2 else int.from_bytes(raw[1:], "little")


def _integer(raw: bytes) -> int:
    code = raw[0]
    return raw[1] if code == 75 else int.from_bytes(raw[2 if code == 0x8A else 1 :], "little", signed=code != 77)


def called(found: Any) -> str:
    """Return the name of a value's class, for messages."""
    return f"{found.module}.{found.name}" if isinstance(found, Record | Global) else type(found).__name__


def short(found: Any) -> str:
    """Show a value that may be anything: what is not plain, by its class."""
    is_plain = type(found) is tuple and len(found) <= 32 and all(type(n) in (int, str) for n in found)
    text = repr(found) if is_plain or type(found) in (str, int, float, bool) else called(found)
    return text if len(text) < 100 else f"{text[:100]} ..."


def are_sizes(found: Any) -> TypeGuard[Shape]:
    """Say whether this is a shape or a start: whole numbers that are not negative."""
    return type(found) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in found)  # bool is an int, too
