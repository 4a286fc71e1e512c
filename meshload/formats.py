"""A format turns a folder into a checkpoint. Formats are found as entry points of the group `meshload.formats`.

A format describes, and moves no payload: it reads headers and indexes and returns arrays with pieces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from .array import Array
from .box import Box, Shape
from .checkpoint import Checkpoint, Problem
from .errors import FormatError, LayoutError
from .mesh import Mesh
from .pieces import Ints
from .source import Folder, LocalFile, LocalFolder

ALONE = Mesh((), ())
"""No axes, one rank."""


CONFIG = "config.json"


@runtime_checkable
class Format(Protocol):
    """What a format adapter provides. Its entry point names a class whose instances need no arguments.

    All formats are loaded to ask whose a folder is: what `matches` does not need, `open` better imports when it is called.
    """

    @property
    def name(self) -> str:
        """The word for `format=`."""

    @property
    def order(self) -> int:
        """When it is asked; low numbers first. The more specific a format's marks, the lower."""

    def matches(self, folder: Folder) -> bool:
        """Say from names and magic bytes whether the folder, or `folder.entry` in it, is of this format."""

    def open(self, folder: Folder) -> Checkpoint:
        """Read headers and indexes, and say everything that the format says."""


class Parts(dict[str, Sequence[tuple[int, Box]]]):
    """Which rank of the target mesh holds which box of an array; empty where there is no mesh.

    An array of which some rank's slice is no single box, as of a fused one, may be left out.
    """

    def __init__(self, held: Mapping[str, Sequence[tuple[int, Box]]] = MappingProxyType({}), mesh: Mesh = ALONE) -> None:
        super().__init__(held)
        self.mesh = mesh


@runtime_checkable
class Writer(Format, Protocol):
    """A format that can also be written."""

    @property
    def naming(self) -> str:
        """The naming of the arrays that it writes, where the model's family has a table for it."""

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out all files but their payload, so that `open` gives the arrays of `like`, stored nowhere else."""

    def commit(self, folder: LocalFolder) -> None:
        """Write what says that the payload is there."""


@runtime_checkable
class TyingWriter(Writer, Protocol):
    """A format in which weights that are tied have one place."""

    has_one_place_for_ties: bool


@runtime_checkable
class Renaming(Writer, Protocol):
    """A format that writes arrays under other names than theirs."""

    def called(self, name: str) -> str:
        """Return the name that `open` gives to the array which is written as `name`."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """An array as chunks of one shape, each of which is one run of bytes in a file that is there already."""

    array: Array
    chunk: Shape
    """Its extents divide the array's."""
    order: str
    """In which a chunk's elements follow one another: `C`, row-major, or `F`, the other way round."""
    files: Sequence[LocalFile]
    file: Ints
    """`(n,)`: which of the files each chunk is in; chunks are row-major over the grid."""
    offset: Ints
    """`(n,)`, in bytes."""


@runtime_checkable
class Indexer(Format, Protocol):
    """A format that can show arrays which lie in files of others."""

    def check_shown(self, array: Array) -> None:
        """Raise `LayoutError`, with the reason alone, where an array's name or dtype cannot be shown."""

    def index(
        self,
        folder: LocalFolder,
        grids: Sequence[Grid],
        places: Mapping[Path, str],
        *,
        beside: bool,
        config: Mapping[str, Any] | None,
    ) -> list[str]:
        """Write files that show the grids; return their names, last that without which the others count as unfinished.

        `places` are the names of the grids' files relative to the folder that the index will lie in; `beside` says that this is
        the files' own folder, and not one of links. A model's `config` is written too.
        """

    def indexed(self, folder: LocalFolder, *, beside: bool) -> Sequence[str]:
        """Return the names of what an index in a folder consists of, links too, the last one last; nothing where there is none.

        They may be deleted: nothing else may be among them, whatever was put into the folder.
        """

    def stale(self, folder: Folder) -> list[Problem]:
        """Say which files have changed since the index in a folder, if there is one, was made."""


def adapters(group: str) -> Iterable[Any]:
    """Return the entry points of a group. They are looked for once."""
    found: Iterable[Any] = _entry_points().select(group=group)
    return found


@lru_cache(maxsize=1)
def _entry_points() -> Any:
    """Return the entry points of all our groups; of two of a name, the one that comes first on the path.

    `importlib.metadata.entry_points` parses those of all packages, which takes four times as long where a hundred are installed.
    It finds them in zip files, too.
    """
    from importlib.metadata import Distribution, EntryPoints, entry_points  # slow to import

    found: dict[tuple[str, str], Any] = {}
    for path in (path for folder in sys.path for path in _naming_ours(folder or ".")):
        for point in Distribution.at(path).entry_points:
            found.setdefault((point.group, point.name), point)
    return EntryPoints(found.values()) if found else entry_points()


def _naming_ours(folder: str) -> Iterator[str]:
    """Go through the packages' metadata in a folder of the path that have entry points in our groups."""
    try:
        infos = [name for name in os.listdir(folder) if name.lower().endswith("-info")]
    except OSError:
        return  # there is no such folder, or it is a zip file
    for path in (os.path.join(folder, info) for info in infos):
        try:
            with open(os.path.join(path, "entry_points.txt"), "rb") as file:
                is_ours = b"[meshload." in file.read()
        except OSError:
            continue
        if is_ours:
            yield path


def installed() -> dict[str, Format]:
    """Return the installed formats by name, in the order in which they are asked."""
    found: list[Format] = [point.load()() for point in adapters("meshload.formats")]
    return {f.name: f for f in sorted(found, key=lambda f: (f.order, f.name))}


def choose(folder: Folder, format: str | Format | None) -> tuple[Format, list[str]]:
    """Return the format of a folder, and the names of the others that would have opened it too."""
    if isinstance(format, Format) and not isinstance(format, str):
        return format, []
    known = installed()
    if format is not None:
        if format not in known:
            raise LayoutError(f"there is no format {format!r}; installed are: {', '.join(known)}")
        return known[format], []
    fitting = _fitting(folder, list(known.values()))
    if not fitting:
        seen = folder.names()[:8] if folder.entry is None else [folder.entry]
        raise FormatError(
            f"{folder.name}: no installed format ({', '.join(known)}) recognises it; "
            f"it holds {', '.join(seen) or 'nothing'}; name one with format="
        )
    return fitting[0], [f.name for f in fitting[1:]]


def _fitting(folder: Folder, known: Sequence[Format]) -> list[Format]:
    """Return the formats that match a folder; all are asked at once where answers come from afar."""
    if not folder.is_remote:
        return [f for f in known if f.matches(folder)]
    from concurrent.futures import ThreadPoolExecutor

    if folder.entry is None:
        folder.names()  # which it remembers
    with ThreadPoolExecutor(len(known), thread_name_prefix="meshload") as pool:
        return [f for f, fits in zip(known, pool.map(lambda f: f.matches(folder), known), strict=True) if fits]


def described(config: Any) -> Mapping[str, Any] | None:
    """Return a model's config: from a dict, a `config.json`, or a folder that has one."""
    from .source import open_folder

    if config is None or isinstance(config, Mapping):
        return config
    folder = open_folder(os.fspath(config))
    return config_in(folder, folder.entry or CONFIG)


def config_in(folder: Folder, file: str = CONFIG) -> dict[str, Any]:
    """Return the config in a file."""
    import json

    from .source import read_bytes

    try:
        found = json.loads(read_bytes(folder.file(file)))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{file}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{file}: a JSON object was expected, found {type(found).__name__}")
    return found
