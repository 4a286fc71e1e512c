"""A source is something with ranged reads and a `unit`; a folder is where a format finds its sources.

A file or an object in a key-value store has unit 1: bytes. A chunked, possibly compressed array is seen as its decoded chunks
one after another, its unit one chunk. Only this module, `reading.py` and `writing.py` touch storage; formats read headers and
indexes through a `Folder`, so that local disks and object stores work alike.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from .box import Shape
from .errors import FormatError, SourceError
from .kernel import address_of, read_queued
from .pieces import Ints, Pieces, table

Bytes = NDArray[np.uint8]

METADATA_LIMIT = 1 << 30
"""More than this is no metadata: reading it whole is refused."""


class Source(Protocol):
    """Bytes that can be read by range, or an array that can be read by chunk."""

    @property
    def name(self) -> str:
        """What messages call it, as the user would."""

    @property
    def unit(self) -> int:
        """1 where any byte range can be read, else the size of a decoded chunk, in bytes."""

    @property
    def size(self) -> int:
        """The bytes that there are."""


class ByteSource(Source, Protocol):
    """A source of unit 1."""

    @property
    def gap(self) -> int:
        """Unwanted bytes that are cheaper to read than to skip."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `start` on, or raise `SourceError`."""


class RunSource(ByteSource, Protocol):
    """A byte source that reads many short runs at once, better than one by one or through staging memory."""

    def read_runs(self, ranges: Ints, runs: Ints, buffers: Mapping[int, Bytes]) -> None:
        """Fill buffers with runs, ascending and apart: rows of source, start, length, number of a buffer, offset in it.

        `ranges` are those that hold them, rows of source, start, length, first and end run: between two runs of a range, bytes
        are cheaper to read than to skip.
        """


class ChunkedSource(Source, Protocol):
    """A source of decoded chunks: chunk `k` lies at `k * unit`, row-major over its clipped box."""

    def read_chunks(self, ks: Sequence[int]) -> list[NDArray[Any]]:
        """Return chunks, decoded, in their clipped shapes, row-major; all are asked for at once."""


class DecodingSource(ChunkedSource, Protocol):
    """A source whose chunks can be decoded where they are wanted, without memory in between."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its elements."""

    def slices(self, k: int) -> tuple[slice, ...]:
        """Return chunk `k`'s clipped box as an index."""

    def decode_into(self, outs: Mapping[int, NDArray[Any]]) -> None:
        """Decode chunks right into arrays of their clipped shapes; all are asked for at once."""


class Folder(Protocol):
    """A place that holds named files: a local directory or a prefix in a key-value store."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def entry(self) -> str | None:
        """The one file that the user named, where the path is a file."""

    @property
    def kvstore(self) -> Any:
        """The folder as a TensorStore KvStore, whose keys are the file names."""

    def names(self, under: str = "") -> list[str]:
        """List the files and folders (with a closing `/`) right in this folder, or in `under`; empty where there is none."""

    def has(self, file: str) -> bool:
        """Say whether there is a regular file of this name."""

    def file(self, file: str) -> ByteSource:
        """Return a file as a source; a name that leaves the folder, or is no regular file, raises `FormatError`."""

    def inside(self, under: str) -> Folder:
        """Return a folder in this one."""

    @property
    def is_remote(self) -> bool:
        """Whether reading goes over a network."""


def plain_runs(source: ByteSource, ranges: Ints, runs: Ints, buffers: Mapping[int, Bytes]) -> None:
    """Fill buffers with runs as `RunSource.read_runs` does, whatever the source: each range is read, and its runs copied."""
    for _, start, length, first, end in (ranges - [0, 0, 0, ranges[0, 3], ranges[0, 3]]).tolist():
        memory = np.empty(length, np.uint8)
        source.read_into(start, memory)
        for _, at, n, target, to in runs[first:end].tolist():
            buffers[target][to : to + n] = memory[at - start : at - start + n]


def read_bytes(source: ByteSource, start: int = 0, stop: int | None = None) -> bytes:
    """Read metadata: a few bytes, or a small file whole."""
    stop = source.size if stop is None else stop
    if not 0 <= start <= stop <= source.size:
        raise FormatError(f"{source.name}: bytes {start} to {stop} were asked of {source.size}")
    if stop - start > METADATA_LIMIT:
        raise FormatError(f"{source.name}: {stop - start} bytes are too many for metadata, at most {METADATA_LIMIT} are read")
    out = np.empty(stop - start, np.uint8)
    source.read_into(start, out)
    return out.tobytes()


def open_folder(path: Any) -> Folder:
    """Return the folder that a path, a TensorStore key-value URL or an open KvStore means."""
    if _is_store(path):
        return KeyValueFolder(path, _url(path))
    text = _text(path)
    if URL.match(text):
        return _open_url(text)
    try:
        local = Path(text).expanduser()
        if local.is_dir():
            return LocalFolder(local)
        if local.exists():
            return LocalFolder(local.parent, local.name)
    except (OSError, RuntimeError) as error:  # a name too long; `~` of nobody
        raise SourceError(f"{text[:200]}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text)
    more = "; an id of the Hugging Face Hub is fetched first: huggingface_hub.snapshot_download tells the folder" if hub else ""
    raise FormatError(f"{text}: there is no such file or folder{more}")


def is_remote(path: Any) -> bool:
    """Say whether a path means an object store or a network file system. It is not opened: that might fail on some ranks alone."""
    if _is_store(path):
        return KeyValueFolder(path, _url(path)).is_remote
    text = _text(path)
    return KeyValueFolder(None, text).is_remote if URL.match(text) else LocalFolder(Path(os.path.expanduser(text))).is_remote


URL = re.compile(r"[a-z][a-z0-9+.-]*:(//|[a-z])")


def _is_store(path: Any) -> bool:
    return hasattr(path, "read") and hasattr(path, "spec")


def _text(path: Any) -> str:
    """Return a path as text; of a local one that is given as a URL, as TensorStore and `KvStore.url` have it, the path."""
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise FormatError(f"path {text!r} is empty, or holds a NUL")
    return unquote(text.removeprefix("file://")) if text.startswith("file://") else text


def around(folder: Folder) -> Folder:
    """Return the folder in which a folder lies."""
    if isinstance(folder, LocalFolder):
        return LocalFolder(folder.path.absolute().parent)
    store = folder.kvstore.copy()
    head = store.path.rstrip("/").rpartition("/")[0]
    store.path = f"{head}/" if head else ""
    return open_folder(store)


def _url(store: Any) -> str:
    """Return what messages call an open store; not every store has a URL (S3 with an endpoint of its own has none)."""
    try:
        url = str(store.url)
        return f"{url}/" if store.path in ("", "/") and not url.endswith("/") else url
    except (AttributeError, NotImplementedError, ValueError):
        return str(store.path) or "key-value store"


WRITING = ".meshload-writing"
"""A file in the unfinished folder that says what is being written there."""


# --- local disks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LocalFolder:
    """A directory. Links to regular files are followed wherever they lead, as hub caches need."""

    path: Path
    entry: str | None = None

    @property
    def name(self) -> str:
        return str(self.path / self.entry if self.entry else self.path)

    @cached_property
    def kvstore(self) -> Any:
        import tensorstore

        base = os.path.abspath(self.path)
        return tensorstore.KvStore.open({"driver": "file", "path": f"{base.rstrip('/')}/"}).result()

    def names(self, under: str = "") -> list[str]:
        path = self.path / _checked(under, self.name) if under else self.path
        try:
            with os.scandir(path) as found:
                return sorted(e.name + "/" if _is_dir(e) else e.name for e in found)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SourceError(f"{path}: cannot be listed: {error.strerror}") from error

    def has(self, file: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.path / _checked(file, self.name)).st_mode)
        except OSError:
            return False

    def file(self, file: str) -> LocalFile:
        path = self.path / _checked(file, self.name)
        try:
            found = os.stat(path)
        except OSError as error:
            link = " (a link that leads nowhere)" if os.path.islink(path) else ""
            raise SourceError(f"{file}: cannot be opened in {self.path}{link}: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(f"{file}: not a regular file in {self.path}")
        return LocalFile(path, file, found.st_size, found.st_mtime_ns)

    @property
    def is_remote(self) -> bool:
        return _file_system(os.path.realpath(self.path)).startswith(NETWORKED)

    def inside(self, under: str) -> LocalFolder:
        return LocalFolder(self.path / _checked(under.rstrip("/"), self.name))


@dataclass(frozen=True, eq=False)
class LocalFile:
    """A regular file, opened when it is read."""

    path: Path
    name: str
    size: int
    changed: int | None = None
    """When it was last changed, in ns: its header says nothing of what replaced it since."""

    unit = 1
    gap = 4096
    """A page: what lies in one is read anyway. A disk of 0.6 GB/s reads some 5 times as much while it finds a place."""

    def check(self) -> None:
        """Raise where the file is not the one that was opened, or no longer what it was."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise SourceError(f"{self.name}: cannot be opened: {error.strerror}") from error
        self.compare(now)

    def compare(self, now: os.stat_result) -> None:
        """Raise where a file of this path, as it is now, is not the one that was opened."""
        if self.changed not in (None, now.st_mtime_ns):
            raise SourceError(
                f"{self.name}: it was cut, replaced or changed since the checkpoint was opened; it had {self.size} bytes then, "
                f"and has {now.st_size} now; open it again"
            )

    def expect(self, start: int, length: int) -> None:
        """Have the disk read a range, where its end is not in memory: a read of the whole would ask for it bit by bit."""
        if hasattr(os, "RWF_NOWAIT"):
            descriptor = _descriptor(self)
            try:
                os.preadv(descriptor.number, [bytearray(1)], start + length - 1, os.RWF_NOWAIT)
            except BlockingIOError:
                _ask_disk(descriptor.number, start, length)
            except OSError:  # a file system that cannot tell; or an error, which reading meets again
                pass

    def read_into(self, start: int, out: Bytes) -> None:
        view, at = memoryview(out.data).cast("B"), start
        descriptor = _descriptor(self)
        while len(view):
            try:
                n = os.preadv(descriptor.number, [view], at)
            except OSError as error:
                raise self._failed(at, len(view), error) from error
            if n == 0:
                raise self._ended(at, start + len(out))
            view, at = view[n:], at + n

    def read_runs(self, ranges: Ints, runs: Ints, buffers: Mapping[int, Bytes]) -> None:
        """Read runs by the kernel's queue; of those that are not in memory, the disk is asked for all ranges before the first."""
        addresses, descriptor = _addresses(self.name, runs, buffers), _descriptor(self)
        file = descriptor.number  # as long as there is `descriptor`
        done = read_queued(file, runs[:, 1], runs[:, 2], addresses, cached=True)
        left = np.flatnonzero(~done)
        if len(left):
            held = np.add.reduceat(done, ranges[:, 3] - ranges[0, 3], dtype=np.int64)
            for start, length in ranges[held < ranges[:, 4] - ranges[:, 3], 1:3].tolist():
                _ask_disk(file, start, length)
            done[left] = read_queued(file, runs[left, 1], runs[left, 2], addresses[left], cached=False)
        if not done.all():  # there is no queue; or an error, which is met again
            plain_runs(self, ranges, runs, buffers)

    def _failed(self, at: int, length: int, error: OSError) -> SourceError:
        return SourceError(f"{self.name}: reading {length} bytes at {at} failed: {error.strerror}")

    def _ended(self, at: int, stop: int) -> SourceError:
        return SourceError(f"{self.name}: ends at byte {at}, expected {stop}; it was cut while being read")


def _ask_disk(file: int, start: int, length: int) -> None:
    """Have the disk read a range into memory, where the system can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file, start, length, os.POSIX_FADV_WILLNEED)


def _addresses(name: str, runs: Ints, buffers: Mapping[int, Bytes]) -> Ints:
    """Return where in memory each run goes, after a check that it stays in its buffer."""
    _, _, length, target, to = runs.T
    found: Ints = to.copy()
    for t in set(target.tolist()):
        own = target == t
        address, room = address_of(buffers[t])
        low, high = int(to[own].min()), int((to[own] + length[own]).max())
        if low < 0 or high > room or (length < 0).any():
            raise ValueError(f"{name}: runs leave their buffers")
        found[own] += address
    return found


@lru_cache(maxsize=64)
def _descriptor(file: LocalFile) -> _Descriptor:
    """Return an open descriptor; the least used are closed, since there may be more files than a process may open."""
    try:
        found = _Descriptor(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
        now = os.fstat(found.number)
    except OSError as error:
        raise SourceError(f"{file.name}: cannot be opened: {error.strerror}") from error
    file.compare(now)
    return found


@contextmanager
def closing_files() -> Iterator[None]:
    """Let go of open files in the end; those that others read stay open as long."""
    try:
        yield
    finally:
        _descriptor.cache_clear()


class _Descriptor:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def lies_in(folder: Path, file: str) -> bool:
    """Say whether no folder on the way to a file is a link, so that the file lies where its name says."""
    place = os.path.join(os.path.realpath(folder), os.path.dirname(file))
    return os.path.realpath(place) == os.path.normpath(place)


def blobs_of(folder: LocalFolder) -> Iterator[tuple[str, str, str]]:
    """Go through the files that are links into a hub cache's `blobs`: file, the hash that its blob is named by, and its own.

    Large files are named by their SHA-256, small ones by the hash that git gives them.
    """
    for place, _, files in os.walk(folder.path):
        for file in sorted(files):
            path = Path(place, file)
            blob = Path(os.path.realpath(path))
            if path.is_symlink() and blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
                yield str(path.relative_to(folder.path)), blob.name, _hash(blob, is_git=len(blob.name) == 40)


def _hash(path: Path, *, is_git: bool) -> str:
    try:
        with open(path, "rb") as file:
            begun = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size) if is_git else hashlib.sha256()
            return hashlib.file_digest(file, lambda: begun).hexdigest()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error


NETWORKED = ("nfs", "lustre", "ceph", "cifs", "smb", "gpfs", "beegfs", "fuse", "9p", "glusterfs", "afs", "orangefs", "wekafs")
"""How the kernel's names of file systems begin that lie on other machines."""


def _file_system(path: str) -> str:
    """Return the kernel's name of the file system that a path is on; nothing where it does not tell."""
    best, found = -1, ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, place, kind, *_ = line.split(" ")
                place = place.encode("latin-1", "replace").decode("unicode_escape", "replace")  # a space is \\040
                if len(place) > best and (path == place or path.startswith(place.rstrip("/") + "/")):
                    best, found = len(place), kind
    except (OSError, ValueError):
        return ""
    return found


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _checked(file: str, folder: str) -> str:
    """Return a relative name that stays inside its folder, or raise."""
    parts = file.split("/")
    hostile = not file or "\0" in file or "\\" in file or file.startswith("/") or re.match(r"[A-Za-z]:", file)
    if hostile or "://" in file or any(p in ("", ".", "..") for p in parts):
        raise FormatError(f"{folder}: {file!r} is not a plain file name inside the folder")
    return file


# --- key-value stores -------------------------------------------------------------------------------------------------


def _open_url(url: str) -> Folder:
    import tensorstore

    try:
        store = tensorstore.KvStore.open(url).result()
    except (ValueError, OSError, NotImplementedError) as error:
        raise FormatError(f"{url}: TensorStore cannot open it: {error}") from error
    head, _, file = url.rstrip("/").rpartition("/")
    if not url.endswith("/") and _found(store, "", url):
        store.path = store.path[: -len(file)]
        return KeyValueFolder(store, f"{head}/", file)
    store.path = f"{store.path.rstrip('/')}/" if store.path else ""
    return KeyValueFolder(store, f"{url.rstrip('/')}/")


@dataclass(frozen=True, eq=False)
class KeyValueFolder:
    """A prefix in a TensorStore key-value store: S3, GCS, HTTP, memory and what else TensorStore knows."""

    kvstore: Any
    url: str
    entry: str | None = None
    seen: set[str] = field(default_factory=set)
    """Files that were there when they were asked for: several formats ask for the same."""
    listed: dict[str, list[str]] = field(default_factory=dict)
    """What has been listed already."""

    @property
    def name(self) -> str:
        return f"{self.url}{self.entry}" if self.entry else self.url

    def names(self, under: str = "") -> list[str]:
        if under not in self.listed:
            self.listed[under] = self._names(under)
        return self.listed[under].copy()

    def _names(self, under: str) -> list[str]:
        import tensorstore

        prefix = f"{_checked(under.rstrip('/'), self.url)}/" if under else ""
        keys = tensorstore.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" follows "/"
        try:
            found = self.kvstore.list(keys).result()
        except NotImplementedError:
            return []  # http cannot list; formats then ask for the names that they know
        except (ValueError, OSError) as error:
            raise SourceError(f"{self.url}: cannot be listed: {error}") from error
        rest = (key.decode(errors="surrogateescape").removeprefix(prefix).partition("/") for key in found)
        return sorted({head + slash for head, slash, _ in rest if head})

    def has(self, file: str) -> bool:
        if file not in self.seen and _found(self.kvstore, _checked(file, self.url), f"{self.url}{file}"):
            self.seen.add(file)
        return file in self.seen

    def file(self, file: str) -> KeyValueFile:
        if not self.has(file):
            raise SourceError(f"{file}: there is no such object in {self.url}")
        return KeyValueFile(self.kvstore, file, file)

    @property
    def is_remote(self) -> bool:
        return not self.url.startswith(("file:", "memory:"))

    def inside(self, under: str) -> KeyValueFolder:
        under = f"{_checked(under.rstrip('/'), self.url)}/"
        store = self.kvstore.copy()
        store.path = f"{store.path}{under}"
        return KeyValueFolder(store, f"{self.url}{under}")


def _found(store: Any, key: str, name: str) -> bool:
    try:
        return bool(store.read(key, byte_range=slice(0, 0)).result().state == "value")
    except (ValueError, OSError) as error:
        if "OUT_OF_RANGE" in str(error):
            return True  # there, and empty
        raise SourceError(f"{name}: cannot be read: {error}") from error


START = 64 << 10
"""Many a file of metadata ends within so many bytes."""
PROBES = 16
"""Requests at once that look for an end."""


@dataclass(frozen=True, eq=False)
class KeyValueFile:
    """One object in a key-value store, read by ranges."""

    kvstore: Any
    key: str
    name: str

    unit = 1
    gap = 1 << 18
    """A request over a network costs about as much as some hundred kilobytes."""
    holds = True
    """TensorStore hands over bytes in memory of its own."""

    @cached_property
    def size(self) -> int:
        """Found by asking, since TensorStore tells no sizes, but for the error that a range over the end is.

        The first such range may do; some stores tell of one behind the end too; else the end is looked for, by requests at once.
        """
        told, far = self._told([(0, START), (1 << 60, 1)])
        if told is not None and 0 < told <= START:
            return told
        if far is not None and far > 0 and [n is None for n in self._told([(far - 1, 1), (far, 1)])] == [True, False]:
            return far
        low, high = 0 if told is not None else START, 1 << 60
        while low < high:  # bytes before `low` are there, byte `high` is not
            if high - low <= self.gap:
                (told,) = self._told([(low, high - low + 1)])
                if told is not None and low < told <= high:
                    return told
            at = np.unique(np.geomspace(max(low, 1), high, PROBES).astype(np.int64).clip(low, high - 1)).tolist()
            there = sum(told is None for told in self._told([(byte, 1) for byte in at]))
            low, high = at[there - 1] + 1 if there else low, at[there] if there < len(at) else high
        return low

    def _told(self, ranges: Sequence[tuple[int, int]]) -> list[int | None]:
        """Return, of each start and length, None where all of it is there, else what the store tells of the size (-1: nothing)."""
        found: list[int | None] = []
        for future in [self._asked(start, length) for start, length in ranges]:
            try:
                future.result()
                found.append(None)
            except (ValueError, OSError) as error:
                if "OUT_OF_RANGE" not in str(error):
                    raise SourceError(f"{self.name}: cannot be read: {error}") from error
                told = re.search(r"size\D{0,3}(\d+)", str(error), re.IGNORECASE)
                found.append(int(told[1]) if told else -1)
        return found

    def read_into(self, start: int, out: Bytes) -> None:
        if len(out):
            out[:] = self._bytes(start, len(out), self._asked(start, len(out)))

    def read_runs(self, ranges: Ints, runs: Ints, buffers: Mapping[int, Bytes]) -> None:
        """Ask for all ranges at once, and copy their runs as they come."""
        first, rows = int(ranges[0, 3]), ranges.tolist()
        for (_, start, length, low, high), asked in zip(rows, [self._asked(r[1], r[2]) for r in rows], strict=True):
            memory = self._bytes(start, length, asked)
            for _, at, n, target, to in runs[low - first : high - first].tolist():
                buffers[target][to : to + n] = memory[at - start : at - start + n]

    def _asked(self, start: int, length: int) -> Any:
        return self.kvstore.read(self.key, byte_range=slice(start, start + length))

    def _bytes(self, start: int, length: int, asked: Any) -> Bytes:
        try:
            found = asked.result()
        except (ValueError, OSError) as error:
            raise SourceError(f"{self.name}: reading {length} bytes at {start} failed: {error}") from error
        value = found.value  # a copy, each time that it is asked for
        if found.state != "value" or len(value) != length:
            raise SourceError(f"{self.name}: {len(value)} bytes came of {length} at {start}; it was cut while being read")
        return np.frombuffer(value, np.uint8)


# --- chunked arrays ---------------------------------------------------------------------------------------------------


class Chunks:
    """An array as its decoded chunks one after another; who inherits has `shape`, `dtype`, and `chunk`, the shape of a chunk."""

    shape: Any
    dtype: Any
    chunk: Any

    @property
    def stored_chunk(self) -> Any:
        """The shape of a chunk as it is stored, which may reach beyond the array."""
        return self.chunk

    @property
    def grid(self) -> Shape:
        """How many chunks there are, per dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def unit(self) -> int:
        """The size of a decoded chunk, and at least 2: a unit of 1 would say that bytes can be read (a chunk of one bool)."""
        found: int = max(2, math.prod(self.stored_chunk) * self.dtype.itemsize)
        return found

    @property
    def size(self) -> int:
        return math.prod(self.grid) * self.unit

    def slices(self, k: int) -> tuple[slice, ...]:
        """Return chunk `k`'s clipped box as an index."""
        at = np.unravel_index(k, self.grid) if self.grid else ()
        return tuple(slice(int(i) * c, min((int(i) + 1) * c, n)) for i, c, n in zip(at, self.chunk, self.shape, strict=True))

    def pieces(self) -> Pieces:
        """Return one row per chunk."""
        ndim, count = len(self.shape), math.prod(self.grid)
        chunk = np.asarray(self.chunk, np.int64).reshape(1, ndim)
        at = np.stack(np.unravel_index(np.arange(count), self.grid), axis=1) if ndim else np.zeros((1, 0), np.int64)
        start = at * chunk
        shape = np.minimum(start + chunk, np.asarray(self.shape, np.int64)) - start
        inner = np.ones_like(shape)
        for d in range(ndim - 2, -1, -1):
            inner[:, d] = inner[:, d + 1] * shape[:, d + 1]
        return table((self,), np.zeros(count, np.int64), np.arange(count) * self.unit, start, shape, inner * self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class ChunkedArray(Chunks):
    """An open TensorStore array, seen as its decoded read chunks."""

    store: Any
    name: str
    is_far: bool = False
    """Whether reading goes over a network."""

    @cached_property
    def stored_chunk(self) -> Shape:
        """The shape of a chunk as it is stored, in elements; it may reach beyond the array, and is never 0."""
        grid = self.store.chunk_layout.read_chunk.shape or self.shape
        return tuple(max(1, c or n) for c, n in zip(grid, self.shape, strict=True))

    @cached_property
    def chunk(self) -> Shape:
        """The shape of a chunk, in elements, without what lies beyond the array; never 0."""
        return tuple(max(1, min(c, n)) for c, n in zip(self.stored_chunk, self.shape, strict=True))

    @property
    def shape(self) -> Shape:
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.store.dtype.numpy_dtype
        return found

    def read_chunks(self, ks: Sequence[int]) -> list[NDArray[Any]]:
        asked = [self.store[self.slices(k)].read(order="C") for k in ks]
        return [np.asarray(self._result(k, future), order="C") for k, future in zip(ks, asked, strict=True)]

    def decode_into(self, outs: Mapping[int, NDArray[Any]]) -> None:
        """Decode chunks right into arrays of their clipped shapes; all are asked for at once."""
        import tensorstore

        asked = [tensorstore.array(out, copy=False, write=True).write(self.store[self.slices(k)]) for k, out in outs.items()]
        for k, future in zip(outs, asked, strict=True):
            self._result(k, future)

    def _result(self, k: int, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            at = np.unravel_index(k, self.grid) if self.grid else ()
            name = ".".join(str(int(i)) for i in at) or "0"
            raise SourceError(f"{self.name}: chunk {name} cannot be read: {error}") from error
