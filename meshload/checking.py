"""Checking finds damage: one checkpoint against itself, its index against its headers against its files' sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .array import Array
from .checkpoint import Checkpoint, Problem
from .errors import MeshloadError
from .formats import Format, choose
from .loading import open
from .pieces import boxes
from .reading import read_array
from .requesting import missing_arrays
from .source import open_folder


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    problems: tuple[Problem, ...]
    arrays: int = 0
    """How many arrays were looked at."""

    @property
    def ok(self) -> bool:
        return not self.problems


def check(path: Any, *, format: str | Format | None = None, config: Any = None, copies: bool = False) -> Report:
    """Compare a checkpoint's index, headers and file sizes, and its arrays with those that its config names.

    No payload is read, but with `copies=True` the replicated copies of each array are read and compared. A path that holds no
    checkpoint raises; damage is reported.
    """
    folder = open_folder(path)
    choose(folder, format)
    try:
        checkpoint = open(path, format=format, config=config)
    except MeshloadError as error:
        return Report((Problem(str(error), file=folder.name),))
    problems = list(checkpoint.problems)
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
    return Report(tuple(problems), len(checkpoint))


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
