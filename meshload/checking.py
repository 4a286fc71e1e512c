"""Checking finds damage and differences: one checkpoint against itself, or against another.

Against itself: its index against its headers against its files' sizes. Against another, in whatever format, names and topology:
names, shapes, dtypes, and every bit.
"""

from __future__ import annotations

import math
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .checkpoint import Checkpoint, Problem
from .digests import Digest, Entry, sum_of_run
from .errors import LayoutError, MeshloadError, listing
from .exchange import running, shared, together
from .formats import Format, Indexer, choose, installed
from .frameworks import Group
from .loading import byte_count, in_full, kinds_of, open, shown_progress, with_moments
from .pieces import boxes, piece
from .reading import Progress, read_array
from .requesting import missing_arrays, model_in
from .scheduling import UNIT_COST
from .source import Folder, LocalFolder, blobs_of, closing_files, open_folder
from .steps import differences
from .writing import MAX_BYTES, Filling, fill, filling, nothing, share, unit_of

ROUND = 32
"""Groups of items, 2 GiB of them by default, after which processes ask each other whether one has failed."""
PART = 1 << 18
"""Elements whose values are compared at once, each in several temporary float64."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    problems: tuple[Problem, ...]
    arrays: int = 0
    """How many arrays were looked at."""
    apart: Mapping[str, float] = field(default_factory=dict)
    """How far apart the values of two checkpoints are at most, in arrays that are not the same bit for bit."""

    @property
    def ok(self) -> bool:
        return not self.problems


@closing_files()
def check(
    path: Any, *, format: str | Format | None = None, config: Any = None, copies: bool = False, blobs: bool = False
) -> Report:
    """Compare a checkpoint's index, headers and file sizes, and its arrays with those that its config names.

    No payload is read, but with `copies=True` the replicated copies of each array are read and compared, and with `blobs=True`
    the files of a hub cache, whose blobs are named by their hashes. A path that holds no checkpoint raises; damage is reported,
    and files that have changed since they were indexed.
    """
    folder = open_folder(path)
    choose(folder, format)
    try:
        checkpoint = open(path, format=format, config=config)
        stale = [p for f in installed().values() if isinstance(f, Indexer) for p in f.stale(folder)]
    except MeshloadError as error:
        return Report((Problem(str(error), file=folder.name),))
    problems = [*checkpoint.problems, *stale]
    told = {p.array for p in problems}
    problems += [
        Problem(f"the config names it, and {checkpoint.why_missing(name).partition(': ')[2]}", array=name)
        for name in missing_arrays(checkpoint)
        if name not in told
    ]
    for array in checkpoint.arrays.values():
        problems += _outside(array)
        if copies and array.copies == "first":  # addends of a mean or sum may differ
            problems += _differing(array)
    if blobs:
        problems += _misnamed(folder)
    return Report(tuple(problems), len(checkpoint))


def _misnamed(folder: Folder) -> Iterator[Problem]:
    """Find blobs of a hub cache whose contents are not what they are named by."""
    found = list(blobs_of(folder)) if isinstance(folder, LocalFolder) else []
    if not found:
        raise LayoutError(f"blobs=True: {folder.name} is no snapshot in a hub's cache: none of its files is a link to a blob")
    for file, name, content in found:
        if name != content:
            yield Problem(f"its blob is named {name}, its contents have the hash {content}: download it again", file=file)


def _outside(array: Array) -> Iterator[Problem]:
    """Find rows that reach beyond their source."""
    pieces = array.pieces
    if not len(pieces):
        return
    last = pieces.offset + ((pieces.shape - 1) * pieces.strides).clip(min=0).sum(axis=1) + array.dtype.itemsize
    sizes = np.asarray([s.size for s in pieces.sources], np.int64)
    for row in np.flatnonzero(last > sizes[pieces.source])[:10]:
        source = pieces.sources[int(pieces.source[row])]
        text = f"its bytes end at {int(last[row])}, the file has {source.size}"
        yield Problem(text, array=array.name, file=source.name)


def _differing(array: Array) -> Iterator[Problem]:
    """Find copies of the same box whose bytes differ."""
    first_at: dict[Any, int] = {}
    for row, box in enumerate(boxes(array.pieces)):
        first = first_at.setdefault(box, row)
        if first == row:
            continue
        one, other = (_row(array, r, box.shape) for r in (first, row))
        if one.tobytes() != other.tobytes():
            files = [array.pieces.sources[int(array.pieces.source[r])].name for r in (first, row)]
            text = f"its copies in {files[0]} and {files[1]} differ at start {box.start}, shape {box.shape}{_distance(one, other)}"
            yield Problem(text, array=array.name, file=files[1])


def _row(array: Array, row: int, shape: tuple[int, ...]) -> Any:
    pieces = array.pieces.take(slice(row, row + 1))
    return read_array(Array(array.name, array.dtype, shape, pieces.place([-int(n) for n in pieces.start[0]]), array.stored))


def _distance(one: Any, other: Any) -> str:
    if one.dtype.kind in "biu" or one.dtype.itemsize == 1:
        return ""
    return f", by {float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))):g} at most"


# --- two checkpoints --------------------------------------------------------------------------------------------------


def verify(
    a: Any,
    b: Any,
    *,
    rtol: float = 0,
    atol: float = 0,
    names: str | None = None,
    optimizer: bool | Sequence[str] = False,
    config: Any = None,
    max_bytes: int | None = None,
    progress: Progress | bool | None = None,
) -> Report:
    """Compare two checkpoints, in any formats, names and topologies: names, shapes, dtypes and bits.

    With a tolerance, values and not bits are compared, whatever their dtypes: `|a - b| <= atol + rtol * |b|`. Canonical names
    where both families are known (the config of one serves the other), else native ones, or as `names` says; stored ones where
    both are shown as `stored`. Both are streamed; `max_bytes` bounds the memory, 512 MiB by default. The problems say which
    elements differ first, and in which files they lie.

    With `optimizer`, all of the optimizer's arrays or those of the kinds that are named (`"exp_avg"`, `"master"` ...) are compared
    too, as `optimizer.exp_avg.<name>`; and the steps, where both checkpoints tell them. Where only one keeps masters, the other's
    float32 weights are its masters.

    Where several processes run (torch's process group, or JAX's), all call it: each compares its share, all return the same, and
    where one fails all raise.
    """
    group = running()
    begun = together(group, lambda: _begun(a, b, rtol, atol, names, optimizer, config, max_bytes))
    assert begun is not None
    _move(group, begun.todo, progress)
    for comparison, found in zip(begun.comparisons, _told(group, [c.found for c in begun.comparisons]), strict=True):
        comparison.found = found
    problems = [*begun.problems, *(p for c in begun.comparisons for p in c.problems())]
    return Report(tuple(problems), begun.arrays, {c.name: c.found.far for c in begun.comparisons if c.found.count})


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """Two checkpoints that are about to be compared."""

    arrays: int
    problems: Sequence[Problem]
    """What their metadata tells."""
    comparisons: Sequence[_Comparison]
    todo: Filling


def _begun(
    a: Any,
    b: Any,
    rtol: float,
    atol: float,
    names: str | None,
    optimizer: bool | Sequence[str],
    config: Any,
    max_bytes: int | None,
) -> _Begun:
    limit = byte_count("max_bytes", MAX_BYTES if max_bytes is None else max_bytes) or 0
    if not all(isinstance(n, Real) and (0 <= n <= sys.float_info.max or n == math.inf) for n in (rtol, atol)):
        raise LayoutError(f"rtol={rtol!r}, atol={atol!r}: numbers from 0 on were expected")
    one, other = _both(a, b, config)
    if names is None and one.names == other.names == "stored":
        names = "stored"
    if names is None and (model_in(one) is None or model_in(other) is None):
        names = "native"
    one, other = in_full(one, names), in_full(other, names)
    one, other = _with_masters(one, other), _with_masters(other, one)
    kinds = kinds_of(optimizer, one, other)
    problems = [*_only_one(kinds, one, other, b), *_only_one(kinds, other, one, a)] if kinds else []
    if kinds:
        problems += [Problem(text, array=name) for name, text in differences(one, other)]
    both = [kind for kind in kinds if kind in one.optimizer and kind in other.optimizer]
    one, other = with_moments(one, both), with_moments(other, both)
    problems += [*_only_in(one, other, b, kinds), *_only_in(other, one, a, kinds)]
    comparing = []
    for name in (*one.arrays, *(alias for alias in one.aliases if alias in other.arrays)):
        if name in other:
            a_array, b_array = (replace(c[name], name=name) for c in (one, other))
            allowed = (0.0, 0.0) if a_array.stored or b_array.stored else (rtol, atol)  # bytes without a dtype are no numbers
            problem = _unlike(a_array, b_array, within=any(allowed))
            problems += problem
            if a_array.shape == b_array.shape:
                comparing.append(_Comparison(a_array, b_array, *allowed, limit, bits=not problem))
    leading = [c if unit_of(c.one) >= unit_of(c.other) else c.turned() for c in comparing]
    return _Begun(len(one), problems, leading, filling([(_whole_in(c), c.one) for c in leading], max_bytes=limit))


def _move(group: Group, todo: Filling, progress: Progress | bool | None) -> None:
    """Let each process give its share of what is stored to the sinks; where one fails all raise, at the end of a round."""
    if group.size > 1:
        _agree(group, todo)
    mine = share(todo, group.rank, group.size)
    step = ROUND if group.size > 1 else max(1, len(mine))
    sizes = [sum(todo.items[i].nbytes for i in one.tolist()) for one in mine]
    with shown_progress(progress if group.rank == 0 else None) as report:
        for first in range(0, step * max(shared(group, -(-len(mine) // step))), step):
            before, total = sum(sizes[:first]), sum(sizes)
            advance = report and partial(_advance, report, before, total)
            together(group, partial(fill, todo, groups=mine[first : first + step], progress=advance, lossy=True))


def _advance(report: Progress, before: int, total: int, done: int, _: int) -> None:
    """Report what is done of a round as a part of all."""
    report(before + done, total)


def _agree(group: Group, todo: Filling) -> None:
    """Raise where processes have cut what is stored otherwise: their shares would not be the whole."""
    parts = zlib.crc32("".join(f"{i.array}{i.start}{i.box.shape}{i.dtype}" for i in todo.items).encode("utf-8", "surrogatepass"))
    meant = shared(group, [len(todo.items), todo.nbytes, parts])
    unlike = next((rank for rank, other in enumerate(meant) if other != meant[0]), None)
    if unlike is not None:
        raise LayoutError(
            f"rank 0 would go through {meant[0][1]} bytes in {meant[0][0]} parts, rank {unlike} through {meant[unlike][1]} in "
            f"{meant[unlike][0]}, or through others; all processes must call with the same arguments, and see the same checkpoints"
        )


def _told(group: Group, mine: Sequence[_Difference]) -> list[_Difference]:
    """Return the differences that all processes found, each in its share."""
    found = [_Difference() for _ in mine]
    for of_rank in shared(group, [(i, *astuple(one)) for i, one in enumerate(mine) if one.count]):
        for i, *fields in of_rank:
            found[i] += _Difference(*fields)
    return found


def _both(a: Any, b: Any, config: Any) -> tuple[Checkpoint, Checkpoint]:
    """Open both; what one does not tell of its config, the other may."""
    one, other = (p if isinstance(p, Checkpoint) else open(p, config=config) for p in (a, b))
    return _completed(a, one, other.config), _completed(b, other, one.config)


def _completed(path: Any, checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Checkpoint:
    if isinstance(path, Checkpoint) or config is None or not set(config) - set(checkpoint.config or ()):
        return checkpoint
    try:
        return open(path, config=config)
    except LayoutError:  # the two contradict each other, so they are compared as they are
        return checkpoint


def _with_masters(one: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose float32 weights are their own masters, where the other one keeps these apart."""
    kept = other.optimizer.get("master", {})
    if not one.optimizer or "master" in one.optimizer or any(n not in one or one[n].dtype != np.float32 for n in kept):
        return one
    return replace(one, optimizer={**one.optimizer, "master": {n: one[n] for n in kept}} if kept else one.optimizer)


def _only_one(kinds: Sequence[str], one: Checkpoint, other: Checkpoint, path: Any) -> Iterator[Problem]:
    """Find the kinds of optimizer arrays that only one of two checkpoints has."""
    for kind in kinds:
        if kind in one.optimizer and kind not in other.optimizer:
            held = listing(other.optimizer) or "no optimizer state"
            yield Problem(f"{path} has none of its {len(one.optimizer[kind])} arrays, but {held}", array=f"optimizer.{kind}")


def _only_in(one: Checkpoint, other: Checkpoint, path: Any, kinds: Sequence[str]) -> Iterator[Problem]:
    for name in one.arrays:
        if name not in other:
            yield Problem(f"it is not in {path}: {other.why_missing(name).partition(': ')[2]}", array=name)
    for name, why in one.unavailable.items():
        if kinds or not name.startswith("optimizer."):
            yield Problem(f"it cannot be had: {why}", array=name)


def _unlike(one: Array, other: Array, *, within: bool) -> list[Problem]:
    if one.shape != other.shape:
        return [Problem(f"its shapes are {one.shape} and {other.shape}", array=one.name)]
    if (one.dtype, one.stored) != (other.dtype, other.stored) and not within:
        return [Problem(f"its dtypes are {one.stored or one.dtype.name} and {other.stored or other.dtype.name}", array=one.name)]
    return []


def _whole_in(comparison: _Comparison) -> Array:
    one = comparison.one
    return Array(one.name, one.dtype, one.shape, piece(comparison, 0, one.shape, one.dtype.itemsize))


@dataclass(frozen=True, slots=True)
class _Difference:
    """How two arrays differ in some of their elements; those of parts add up."""

    count: int = 0
    """Elements that are not the same bit for bit (or value for value, across dtypes)."""
    beyond: int = 0
    """Elements that differ by more than is allowed."""
    first: int | None = None
    """The flat index of the first of them."""
    last: int = 0
    far: float = 0.0
    """How far apart values are at most."""

    def __add__(self, other: _Difference) -> _Difference:
        first = min((i for i in (self.first, other.first) if i is not None), default=None)
        count, beyond = self.count + other.count, self.beyond + other.beyond
        return _Difference(count, beyond, first, max(self.last, other.last), max(self.far, other.far))


@dataclass(eq=False)
class _Comparison:
    """Takes the values of one array in any order, as a sink, and reads the other's to compare them."""

    one: Array
    other: Array
    rtol: float
    atol: float
    max_bytes: int
    """For both; a part of it is for the other."""
    bits: bool
    """Whether bits are compared; else values are, and the dtypes were told to differ."""
    is_turned: bool = False
    found: _Difference = field(default_factory=_Difference)

    unit = 1

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def turned(self) -> _Comparison:
        return replace(self, one=self.other, other=self.one, is_turned=True)

    @property
    def name(self) -> str:
        return self.one.name

    @property
    def size(self) -> int:
        return self.one.nbytes

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        flat = start // values.dtype.itemsize
        at = np.unravel_index(flat, self.one.shape) if self.one.shape else ()
        box = tuple(slice(int(i), int(i) + n) for i, n in zip(at, values.shape, strict=True))
        found = read_array(self.other[box], max_bytes=max(self.max_bytes // 8, UNIT_COST * unit_of(self.other), 1))
        one, other = values.reshape(-1), found.reshape(-1)
        for i in range(0, len(one), PART):
            a, b = one[i : i + PART], other[i : i + PART]
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                self._note(flat + i, a, b)
        return nothing

    def _note(self, flat: int, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Count what differs in a few elements, the first of which has a flat index."""
        differs, far, beyond = self._compared(one, other)
        places = flat + np.flatnonzero(beyond)
        first, last = (int(places[0]), int(places[-1])) if len(places) else (None, 0)
        with self.lock:
            self.found += _Difference(int(differs.sum()), len(places), first, last, far)

    def _compared(self, one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[np.bool_], float, NDArray[np.bool_]]:
        """Return which elements differ, how far apart they are at most, and which are further apart than allowed."""
        kinds = {one.dtype.kind, other.dtype.kind}  # a long double holds 64-bit integers, where there is one
        wide: Any = np.complex128 if "c" in kinds else np.longdouble if kinds & {*"iu"} else np.float64
        a, b = one.astype(wide), other.astype(wide)
        with np.errstate(invalid="ignore", over="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            apart = np.where(same, 0.0, np.abs(a - b))
            apart = np.where(np.isnan(apart), np.inf, apart)  # a NaN beside a number
            reference = np.abs(a if self.is_turned else b)
            allowed = self.atol + self.rtol * np.where(np.isfinite(reference), reference, 0.0)
            beyond = ~same & ~(apart <= allowed)
        differs = ~same
        if one.dtype == other.dtype:
            differs = (one.view(np.uint8).reshape(len(one), -1) != other.view(np.uint8).reshape(len(one), -1)).any(axis=1)
        if self.bits and not self.rtol and not self.atol:
            beyond = differs
        return differs, float(np.max(apart, initial=0.0)), beyond

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        return False

    def flush(self) -> None:
        pass

    def problems(self) -> list[Problem]:
        found = self.found
        if found.first is None:
            return []
        one, other = (self.other, self.one) if self.is_turned else (self.one, self.other)
        first, last = (tuple(map(int, np.unravel_index(i, one.shape))) for i in (found.first, found.last))
        files = [_file_of(array, first) for array in (one, other)]
        text = (
            f"{found.beyond} of its {one.size} elements differ, from {list(first)} (in {files[0]} and {files[1]}) "
            f"to {list(last)}, by {found.far:g} at most"
        )
        return [Problem(text, array=one.name, file=files[0])]


def _file_of(array: Array, index: tuple[int, ...]) -> str:
    """Return the name of the file or object in which an element lies."""
    pieces = array.pieces
    at = np.asarray(index, np.int64)
    rows = np.flatnonzero(((pieces.start <= at) & (at < pieces.stop)).all(axis=1))
    return str(pieces.sources[int(pieces.source[rows[0]])].name) if len(rows) else "no file"


# --- digests ----------------------------------------------------------------------------------------------------------


def digest(
    path: Any,
    *,
    names: str | None = None,
    optimizer: bool | Sequence[str] = False,
    format: str | Format | None = None,
    config: Any = None,
    max_bytes: int | None = None,
    progress: Progress | bool | None = None,
) -> Digest:
    """Read a checkpoint, and return the digest of each array; canonical names where the family is known, as `restore` has them.

    Two checkpoints hold the same arrays, bit for bit, where their digests are equal, whatever their formats and topologies.
    With `optimizer`, also of the optimizer's arrays, all or some kinds, as `optimizer.exp_avg.<name>`. Where several processes run,
    all call it, as `verify`.
    """
    group, sums = running(), _Sums()

    def begin() -> tuple[Checkpoint, Filling]:
        limit = byte_count("max_bytes", MAX_BYTES if max_bytes is None else max_bytes) or 0
        view = in_full(path if isinstance(path, Checkpoint) else open(path, format=format, config=config), names)
        view = with_moments(view, kinds_of(optimizer, view))
        return view, filling([(_receiving(array, sums), array) for array in view.arrays.values()], max_bytes=limit)

    begun = together(group, begin)
    assert begun is not None
    view, todo = begun
    _move(group, todo, progress)
    found = {n: Entry(a.dtype.name, a.shape, 0, 0) for n, a in view.arrays.items()}
    for of_rank in shared(group, sums.of):
        for name, (value, size) in of_rank.items():
            found[name] += replace(found[name], sum=value, size=size)
    return Digest(found)


class _Sums:
    """Sums of the parts of arrays, with how many elements they are of; several threads add to them."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, int]] = {}
        self.lock = threading.Lock()

    def add(self, name: str, value: int, size: int) -> None:
        with self.lock:
            before = self.of.get(name, (0, 0))
            self.of[name] = before[0] ^ value, before[1] + size


@dataclass(frozen=True, eq=False)
class _Summing:
    """A sink that keeps nothing but a sum of what it is given."""

    name: str
    size: int
    sums: _Sums
    unit: int = 1

    def write(self, start: int, values: NDArray[Any]) -> Any:
        self.sums.add(self.name, sum_of_run(values, self.size - start - values.nbytes), values.size)
        return nothing

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        return False

    def flush(self) -> None:
        pass


def _receiving(array: Array, sums: _Sums) -> Array:
    sink = _Summing(array.name, array.nbytes, sums)
    return Array(array.name, array.dtype, array.shape, piece(sink, 0, array.shape, array.dtype.itemsize))


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `meshload inspect` shows of a checkpoint, as plain values."""
    arrays = {
        name: {
            "shape": list(a.shape),
            "dtype": a.stored or a.dtype.name,
            "nbytes": a.nbytes,
            "files": sorted({a.pieces.sources[int(i)].name for i in np.unique(a.pieces.source)}),
        }
        for name, a in checkpoint.arrays.items()
    }
    moments = {kind: len(found) for kind, found in checkpoint.optimizer.items()}
    return {
        "format": checkpoint.format,
        "names": checkpoint.names,
        "arrays": arrays,
        "aliases": dict(checkpoint.aliases),
        "optimizer": moments,
        "unavailable": dict(checkpoint.unavailable),
        "total_arrays": len(arrays),
        "total_bytes": sum(a.nbytes for a in checkpoint.arrays.values()),
        "optimizer_bytes": sum(a.nbytes for found in checkpoint.optimizer.values() for a in found.values()),
    }
