"""Indexing shows the files of one format as a checkpoint of another, which that one's own readers open; no payload is copied.

Which arrays can be shown is a question to their pieces: they must be a regular grid of chunks, each of which is one run of bytes
in a local file. The grid is as coarse as they allow, up to a few megabytes a chunk, since readers take chunks whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .array import Array
from .box import Shape
from .checkpoint import Checkpoint
from .converting import local, tell_bytes
from .errors import LayoutError, MeshloadError, listing
from .formats import Format, Grid, Indexer, installed
from .loading import open
from .pieces import Ints, Pieces, repeated
from .source import LocalFile, LocalFolder, open_folder
from .writing import Located, discarding, link, locked, move_in, prepare, prepare_within, publish

CHUNK = 4 << 20
"""Bytes of a chunk, at most, where an array can be cut at all: what a reader takes for one element."""
SMALL = 256 << 10
"""Bytes of a chunk, at least, where a dim has no better divisor."""
FEW, LEAST = 256, 16 << 10
"""An array may have this many chunks of any size; more must have this many bytes each, a thousand times what their places take."""
LINKS = "files"
"""The folder of links in an index that has a folder of its own."""


@dataclass(frozen=True, slots=True)
class Index:
    """What was indexed, and what could not be."""

    path: Path
    """The folder that the other format's readers open."""
    format: str
    """Whose readers do."""
    arrays: tuple[str, ...]
    """The names that are shown."""
    left_out: Mapping[str, str]
    """The names that are not, with the reason."""
    shown_bytes: int
    """Of payload, none of it copied."""
    nbytes: int
    """Of the index itself."""


def index(
    src: Any,
    dst: Any = None,
    *,
    names: str | None = None,
    format: str | Format | None = None,
    config: Any = None,
) -> Index:
    """Let Orbax and TensorStore read a checkpoint of another format where it lies.

    A few kilobytes of metadata are written that point into its files: beside them, or into `dst`, a folder of its own with links
    to them. The files are only read. An index that was made before is replaced.

    Args:
        src: A local checkpoint, as for `open`.
        dst: A folder that is new, empty or an index; by default the checkpoint's own.
        names: A naming, such as `hf`; by default the native names. `stored` shows whatever is stored, moments too.
        format, config: As for `open`.

    Arrays that cannot be shown are in `left_out` of the result, with the reason; where none can, `LayoutError` is raised. The
    index is of the files as they are now: `open` and `check` refuse it once their sizes or times of change differ, but Orbax and
    TensorStore cannot tell.
    """
    indexer = _indexer()
    folder = open_folder(src)
    if not isinstance(folder, LocalFolder):
        raise LayoutError(f"{folder.name}: only local files can be indexed")
    home = Path(os.path.abspath(folder.path))
    target = home if dst is None else local(dst)
    beside = target == home or (os.path.exists(target) and target.samefile(home))
    if beside and folder.entry is not None:
        raise LayoutError(f"{folder.name}: an index speaks for a folder, and this is one file; name a folder for it: dst=")
    checkpoint = open(src, format=format, config=config)
    shown = checkpoint if names is None else checkpoint.with_names(names)
    grids, left_out = _grids(shown, indexer)
    places = _places(grids, home, LINKS if not beside else "")
    for name in [g.array.name for g in grids if any(f.path not in places for f in g.files)]:
        left_out[name] = f"its file lies outside {home}, where no path leads from an index beside it; name a folder for it: dst="
    grids = [g for g in grids if g.array.name not in left_out]
    if not grids:
        why = listing(f"{n}: {reason}" for n, reason in left_out.items()) or "it has none"
        raise LayoutError(f"{folder.name}: none of its arrays can be shown by {indexer.name}: {why}")

    tell_bytes([g.array for g in grids], indexer, stacklevel=2)
    replaced = indexer.indexed(LocalFolder(target), beside=beside) if os.path.isdir(target) else ()
    staging = prepare_within(target) if beside or replaced else prepare(target, resume=False)
    with locked(staging.path), discarding(staging):
        written = indexer.index(staging, grids, places, beside=beside, config=None if beside else shown.config)
        nbytes = sum((staging.path / file).stat().st_size for file in written)
        links = {} if beside else places
        for path, file in links.items():
            link(staging, file, path)
        if beside or replaced:
            move_in(staging, target, [*links.values(), *written], replaced)
        else:
            publish(staging, target)
    return Index(target, indexer.name, tuple(g.array.name for g in grids), left_out, sum(g.array.nbytes for g in grids), nbytes)


def _indexer() -> Indexer:
    found = [f for f in installed().values() if isinstance(f, Indexer)]
    if not found:
        raise LayoutError("no installed format can show the files of others")
    return found[0]


def _grids(checkpoint: Checkpoint, indexer: Indexer) -> tuple[list[Grid], dict[str, str]]:
    """Return what can be shown, and why the rest cannot be."""
    grids, left_out = [], dict(checkpoint.unavailable)
    for name, array in checkpoint.arrays.items():
        try:
            named = replace(array, name=name)
            indexer.check_shown(named)
            grids.append(grid(named))
        except MeshloadError as error:
            left_out[name] = str(error)
    return grids, left_out


def _places(grids: Sequence[Grid], home: Path, links: str) -> dict[Path, str]:
    """Return how an index calls the files: as they lie under `home`, or as the links that it has to them."""
    paths = dict.fromkeys(file.path for grid in grids for file in grid.files)
    places: dict[Path, str] = {}
    for number, path in enumerate(paths):
        full = Path(os.path.abspath(path))
        inside = full.is_relative_to(home)
        if links:
            places[path] = f"{links}/{full.relative_to(home) if inside else Path(str(number), full.name)}"
        elif inside:
            places[path] = str(full.relative_to(home))
    return places


# --- arrays as grids --------------------------------------------------------------------------------------------------


def grid(array: Array) -> Grid:
    """Return the chunks that an array's pieces are, or raise `LayoutError` with the reason why they are none.

    >>> from meshload.pieces import piece
    >>> file = LocalFile(Path("a.bin"), "a.bin", 100)
    >>> made = grid(Array("a", np.dtype("f4"), (4, 3), piece(file, 8, (4, 3), 4)))
    >>> made.chunk, made.offset.tolist()
    ((4, 3), [8])
    """
    if array.step is not None:
        raise LayoutError(
            f"its values are the stored ones {array.step.operator} {array.step.number:g}, which no reader of bytes knows"
        )
    pieces = array.pieces
    if array.size == 0:
        return Grid(array, tuple(max(1, n) for n in array.shape), "C", (), np.zeros(0, np.int64), np.zeros(0, np.int64))
    _check_sources(pieces)
    chunk, order = _chunk(pieces, array)
    counts = tuple(n // c for n, c in zip(array.shape, chunk, strict=True))
    nbytes = prod(chunk) * array.dtype.itemsize
    if prod(counts) > FEW and nbytes < LEAST:
        raise LayoutError(
            f"as it is stored, it would be {prod(counts)} chunks of {'x'.join(map(str, chunk))} elements, {nbytes} bytes each; "
            f"beyond {FEW} chunks, each must have at least {LEAST}"
        )
    source, offset = _cells(array, chunk, counts)
    files, file, offset = _located(pieces.sources, source, offset, nbytes)
    for number, end in enumerate(_ends(file, offset, len(files))):
        if end + nbytes > files[number].size:
            raise LayoutError(f"its bytes end at {end + nbytes} of {files[number].name}, which has {files[number].size}")
    return Grid(array, chunk, order, files, file, offset)


def _check_sources(pieces: Pieces) -> None:
    for number in np.unique(pieces.source).tolist():
        source = pieces.sources[number]
        if source.unit != 1:
            raise LayoutError(f"it is stored in chunks of {source.name} that have to be decoded, not as plain bytes")
        if not isinstance(source, LocalFile | Located):
            raise LayoutError(f"it is stored in {source.name}, which is no local file")


def _chunk(pieces: Pieces, array: Array) -> tuple[Shape, str]:
    """Return the largest chunks that are one run in every piece, and whether they lie row-major (`C`) or the other way round."""
    edges = np.concatenate([pieces.start, pieces.stop, np.asarray(array.shape, np.int64).reshape(1, -1)])
    extents = np.gcd.reduce(edges, axis=0).tolist()
    dims = range(array.ndim)
    runs = [_run(pieces, extents, array.dtype.itemsize, order) for order in (dims[::-1], dims)]
    best = max((0, 1), key=lambda i: (prod(runs[i]), -i))
    return _cut(runs[best], array.dtype.itemsize, (dims, dims[::-1])[best]), "CF"[best]


def _run(pieces: Pieces, extents: Sequence[int], itemsize: int, inner_first: Sequence[int]) -> list[int]:
    """Return the extents of the largest box, of divisors of `extents`, that is one run of bytes wherever it lies."""
    found, run = [1] * len(extents), itemsize
    for d in inner_first:
        if ((pieces.strides[:, d] == run) | (pieces.shape[:, d] == 1)).all():
            found[d] = extents[d]
            run *= extents[d]
    return found


def _cut(chunk: Sequence[int], itemsize: int, outer_first: Sequence[int]) -> Shape:
    """Cut a box that is one run along its outer dims, into equal runs of at most `CHUNK` bytes if that can be."""
    found = list(chunk)
    inner = prod(chunk) * itemsize
    for d in outer_first:
        inner //= found[d]
        found[d] = _divisor(found[d], inner)
        if inner <= CHUNK:
            break
    return tuple(found)


@lru_cache(maxsize=4096)
def _divisor(n: int, nbytes: int) -> int:
    """Return into how many rows of `nbytes` each, of `n`, to cut: the most within `CHUNK`, unless that is less than `SMALL`.

    >>> _divisor(151936, 8192), _divisor(50021, 8192)
    (128, 50021)
    """
    divisors = sorted({d for i in range(1, int(n**0.5) + 1) if n % i == 0 for d in (i, n // i)})
    fitting = max((d for d in divisors if d * nbytes <= CHUNK), default=1)
    if fitting * nbytes >= SMALL:
        return fitting
    return next((d for d in divisors if d * nbytes >= SMALL), n)


def _cells(array: Array, chunk: Shape, counts: Shape) -> tuple[Ints, Ints]:
    """Return source and offset of each chunk, row-major over the grid; each must be stored, and only copies more than once."""
    pieces = array.pieces
    if len(pieces) == prod(counts) == 1:
        return pieces.source, pieces.offset
    each = np.asarray(chunk, np.int64).reshape(1, -1)
    parts = pieces.shape // each
    many = parts.prod(axis=1)
    row, left = repeated(many)
    offset = pieces.offset[row]
    at = np.zeros(len(row), np.int64)
    size = 1
    for d in range(array.ndim - 1, -1, -1):
        left, i = np.divmod(left, parts[row, d])
        offset = offset + i * chunk[d] * pieces.strides[row, d]
        at += (pieces.start[row, d] // chunk[d] + i) * size
        size *= counts[d]
    order = np.argsort(at, kind="stable")
    first = np.flatnonzero(np.diff(at[order], prepend=-1))
    if len(first) < size:
        raise LayoutError(f"{(size - len(first)) * prod(chunk)} of its {array.size} elements are stored nowhere")
    if len(order) > size:
        _check_copies(array, row[order], np.repeat(row[order][first], np.diff(first, append=len(order))))
    chosen = order[first]
    return pieces.source[row[chosen]], offset[chosen]


def _check_copies(array: Array, row: Ints, first: Ints) -> None:
    pieces = array.pieces
    if (pieces.start[row] != pieces.start[first]).any() or (pieces.shape[row] != pieces.shape[first]).any():
        raise LayoutError("elements of it are stored more than once, in different boxes")
    if array.copies != "first":
        raise LayoutError(f"its value is the {array.copies} of what is stored in several places, which no reader of bytes knows")


def _located(sources: Sequence[Any], source: Ints, offset: Ints, nbytes: int) -> tuple[tuple[LocalFile, ...], Ints, Ints]:
    """Return the files, and number and offset by chunk; what a virtual source shows is looked up in its file."""
    number: dict[LocalFile, int] = {}
    file, offset = np.zeros_like(source), offset.copy()
    for n in np.unique(source).tolist():
        mine = np.flatnonzero(source == n)
        if isinstance(sources[n], LocalFile):
            file[mine] = number.setdefault(sources[n], len(number))
            continue
        for i in mine.tolist():
            found, at = sources[n].located(int(offset[i]), nbytes)
            if found is sources[n]:
                raise LayoutError(f"it is stored in {found.name} in an order that is not row-major")
            if not isinstance(found, LocalFile):
                raise LayoutError(f"it is stored in {found.name}, which is no local file")
            file[i], offset[i] = number.setdefault(found, len(number)), at
    return tuple(number), file, offset


def _ends(file: Ints, offset: Ints, count: int) -> list[int]:
    """Return the last offset in each file."""
    found = np.zeros(count, np.int64)
    np.maximum.at(found, file, offset)
    last: list[int] = found.tolist()
    return last
