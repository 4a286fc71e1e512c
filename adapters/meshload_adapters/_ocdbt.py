"""OCDBT databases whose values lie in files that were there before, or of which all but the last version is to be forgotten.

TensorStore's OCDBT is a B+tree of keys. Values are inline in its leaves, or are ranges of data files: any file of the database's
folder will do, named by its relative path. TensorStore itself writes no reference into a file of others, hence this encoder; it
writes a database once, and of others the manifest alone. The format: https://google.github.io/tensorstore/kvstore/ocdbt, where it
is called experimental. Beyond that page, `manifest_kind` stands in the config behind the uuid. Seen: tensorstore 0.1.75 to 0.1.86.

    node       u32be magic | u64le length of all | varint version 0 | varint compression 0 | body | u32le CRC-32C of all before
    manifest   config: uuid, varint manifest_kind 0, max_inline_value_bytes, max_decoded_node_bytes, u8 arity log2, compression 0
               version tree: file table, one version (columns of one), no version nodes
    B+tree     u8 height | file table | varint count | keys | values of a leaf, or references to nodes
    keys       prefix lengths shared with the key before (all but the first), suffix lengths, [common prefixes of subtrees,
               0 here: nothing is left out of the keys below], suffixes

All columns are varints (LEB128). A node is found by file, offset and length; its keys are those that it really has, so a tree is
written from the leaves up, and the manifest, which knows the root, last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE

NODE_BYTES = 1 << 16
"""A node is closed when it has about this many bytes: who opens one array reads one leaf, and the nodes above it."""
LARGEST_NODE = 8 << 20
"""What the database says of its nodes; TensorStore's own default. It matters to those who change a database."""
LARGEST_INLINE = 100
"""As above; what is inline already may be longer."""

Values = Mapping[str, "bytes | Range"]


@dataclass(frozen=True, slots=True)
class Range:
    """A value that lies in a file."""

    file: str
    """Relative to the database."""
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Reference:
    """Where a node lies, and the statistics that its parent keeps of it."""

    first: bytes
    """The first key in it."""
    offset: int
    length: int
    keys: int
    tree_bytes: int
    """Of it and all below."""
    far_bytes: int
    """Of the values in files, counted once for each key."""


def database(values: Values, file: str, *, uuid: bytes, time_ns: int) -> tuple[bytes, bytes]:
    """Return a manifest, and the data file of the nodes, which is to be called `file`. There must be a value."""
    nodes = bytearray()
    level = [_added(nodes, *leaf) for leaf in _leaves(sorted((key.encode(), value) for key, value in values.items()))]
    height = 0
    while len(level) > 1:
        height += 1
        level = [_added(nodes, *_interior(height, file, part)) for part in _parts(level)]
    return _manifest(level[0], height, file, uuid, time_ns), bytes(nodes)


def last_version(store: Any) -> tuple[bytes, set[str]]:
    """Return a manifest that knows only the last version of a database, and the files that it refers to.

    `store` is TensorStore's, of the folder of the database. Each commit leaves nodes behind that only older versions have, and what
    is killed before it commits leaves values that no version has.
    """
    import tensorstore as ts

    told = ts.ocdbt.dump(store).result()
    version = told["versions"][-1]
    root, statistics = version["root"]["location"], version["root"]["statistics"]
    files, places = set(), [root]
    while places:
        place = places.pop()
        kind, _, file, _, _ = place.split(":")
        files.add(file)
        if kind == "btreenode":
            entries = ts.ocdbt.dump(store, place).result()["entries"]
            places += [entry[key] for entry in entries for key in ("location", "indirect_value") if key in entry]
    _, _, file, offset, length = root.split(":")
    counts = (statistics[f"num_{word}"] for word in ("keys", "tree_bytes", "indirect_value_bytes"))
    reference = _Reference(b"", int(offset), int(length), *counts)
    uuid = bytes.fromhex(told["config"]["uuid"])
    return _manifest(reference, version["root_height"], file, uuid, version["commit_time"]), files


def _added(nodes: bytearray, node: bytes, first: bytes, keys: int, below: int, far: int) -> _Reference:
    at = len(nodes)
    nodes += node
    return _Reference(first, at, len(node), keys, below + len(node), far)


def _leaves(entries: Sequence[tuple[bytes, bytes | Range]]) -> Iterable[tuple[bytes, bytes, int, int, int]]:
    """Go through the leaves with their first key and statistics."""
    start, size = 0, 0
    for i, (key, value) in enumerate(entries):
        size += len(key) + (16 if isinstance(value, Range) else len(value))
        if size >= NODE_BYTES or i + 1 == len(entries):
            yield _leaf(entries[start : i + 1])
            start, size = i + 1, 0


def _leaf(entries: Sequence[tuple[bytes, bytes | Range]]) -> tuple[bytes, bytes, int, int, int]:
    keys = [key for key, _ in entries]
    values = [value for _, value in entries]
    ranges = [v for v in values if isinstance(v, Range)]
    files = sorted({r.file for r in ranges})
    number = {file: i for i, file in enumerate(files)}
    prefixes, suffixes = _prefixes(keys)
    body = b"".join(
        (
            b"\0",
            _file_table(files),
            _varint(len(keys)),
            _column(prefixes),
            _column(len(s) for s in suffixes),
            *suffixes,
            _column(v.length if isinstance(v, Range) else len(v) for v in values),
            _column(isinstance(v, Range) for v in values),
            _column(number[r.file] for r in ranges),
            _column(r.offset for r in ranges),
            *(v for v in values if not isinstance(v, Range)),
        )
    )
    return _node(NODE_MAGIC, body), keys[0], len(keys), 0, sum(r.length for r in ranges)


def _parts(level: Sequence[_Reference]) -> Iterable[Sequence[_Reference]]:
    """Cut a level into what is under one node each; each a similar number."""
    size = max(2, NODE_BYTES // (24 + sum(len(r.first) for r in level) // len(level)))
    count = -(-len(level) // size)
    return (level[i * len(level) // count : (i + 1) * len(level) // count] for i in range(count))


def _interior(height: int, file: str, under: Sequence[_Reference]) -> tuple[bytes, bytes, int, int, int]:
    prefixes, suffixes = _prefixes([r.first for r in under])
    body = b"".join(
        (
            bytes([height]),
            _file_table([file]),
            _varint(len(under)),
            _column(prefixes),
            _column(len(s) for s in suffixes),
            _column(0 for _ in under),  # bytes that all keys under a node share, and that are left out there
            *suffixes,
            _column(0 for _ in under),  # the file's number
            _column(r.offset for r in under),
            _column(r.length for r in under),
            _column(r.keys for r in under),
            _column(r.tree_bytes for r in under),
            _column(r.far_bytes for r in under),
        )
    )
    sums = (sum(column) for column in zip(*((r.keys, r.tree_bytes, r.far_bytes) for r in under), strict=True))
    return _node(NODE_MAGIC, body), under[0].first, *sums


def _manifest(root: _Reference, height: int, file: str, uuid: bytes, time_ns: int) -> bytes:
    config = (uuid, _column((0, LARGEST_INLINE, LARGEST_NODE)), b"\4", b"\0")
    place = _column((0, root.offset, root.length, root.keys, root.tree_bytes, root.far_bytes))
    version = (_varint(1), _varint(1), bytes([height]), place, time_ns.to_bytes(8, "little"))
    return _node(MANIFEST_MAGIC, b"".join((*config, _file_table([file]), *version, _varint(0))))


def _file_table(files: Sequence[str]) -> bytes:
    names = [os.fsencode(f) for f in files]
    prefixes, suffixes = _prefixes(names)
    return b"".join(
        (
            _varint(len(names)),
            _column(prefixes),
            _column(len(s) for s in suffixes),
            _column(0 for _ in names),  # how much of a path is that of another database
            *suffixes,
        )
    )


def _prefixes(words: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Return how long a beginning each word but the first shares with that before it, and what remains of all.

    >>> _prefixes([b"layer.0", b"layer.1", b"norm"])
    ([6, 0], [b'layer.0', b'1', b'norm'])
    """
    shared = [_shared(*pair) for pair in pairwise(words)]
    return shared, [*words[:1], *(word[n:] for word, n in zip(words[1:], shared, strict=True))]


def _shared(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    unlike = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return n - -(-unlike.bit_length() // 8)


def _node(magic: int, body: bytes) -> bytes:
    length = 4 + 8 + 2 + len(body) + 4
    node = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + b"\0\0" + body
    return node + crc32c(node).to_bytes(4, "little")


def _varint(n: int) -> bytes:
    """Return the unsigned LEB128 of a number.

    >>> _varint(300).hex()
    'ac02'
    """
    if n < 128:
        return bytes((n,))
    found = bytearray()
    while n > 127:
        found.append(n & 127 | 128)
        n >>= 7
    found.append(n)
    return bytes(found)


def _column(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _table() -> list[int]:
    found = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        found.append(n)
    return found


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
