"""An array is a named, typed, lazy logical array: dtype, shape, and the pieces that say where its elements lie.

Indexing, transposing, splitting or merging dims, concatenating, stacking and interleaving give an array again by rewriting
pieces; no byte is read before `numpy.asarray(array)` or a plan asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .box import Shape
from .pieces import Pieces, piece, union

if TYPE_CHECKING:
    import tensorstore

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class Step:
    """A per-element step from stored values to those that are meant, such as Gemma's norm + 1; computed in float32.

    >>> Step("+", 1.0).apply(np.zeros(2, np.float32))
    array([1., 1.], dtype=float32)
    """

    operator: str
    """One of `+ - * /`."""
    number: float

    @property
    def inverse(self) -> Step:
        """The step back, used in writing."""
        return Step({"+": "-", "-": "+", "*": "/", "/": "*"}[self.operator], self.number)

    def apply(self, values: NDArray[Any], dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
        """Return new values of the same dtype, or of the one that is asked for, each rounded once."""
        wide = values.astype(np.float64 if values.dtype.itemsize == 8 else np.float32)
        operation = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[self.operator]
        return np.asarray(operation(wide, wide.dtype.type(self.number)).astype(dtype or values.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A logical array that nobody has read yet.

    >>> a = Array("w", np.dtype("f4"), (2, 3), piece("file", 8, (2, 3), 4))
    >>> a[1, 1:].shape, a.T.shape
    ((2,), (3, 2))
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    pieces: Pieces
    stored: str | None = None
    """The format's own name of the dtype, where NumPy has none for it: `F4` is stored as bytes."""
    step: Step | None = None
    copies: str = "first"
    """What rows of one box mean: copies of which the `first` is taken, or addends whose `mean` or `sum` is the array."""

    def __post_init__(self) -> None:
        if self.pieces.ndim != len(self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has {len(self.shape)} dims, its pieces have {self.pieces.ndim}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> Array:  # noqa: N802 - NumPy's name
        """The array with its dims reversed."""
        return self.transpose()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name}: an array of 0 dims has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Array({self.name!r}, {self.stored or self.dtype.name}, {self.shape}, {len(self.pieces)} pieces)"

    def __getitem__(self, key: Index | tuple[Index, ...]) -> Array:
        """Index like NumPy, with integers, slices of step 1 and one Ellipsis; other steps raise."""
        index = _full_index(key if isinstance(key, tuple) else (key,), self.ndim, self.name)
        pieces, shape, dim = self.pieces, list(self.shape), 0
        for item in index:
            n = shape[dim]
            if isinstance(item, slice):
                start, stop, step = item.indices(n)
                if step != 1:
                    raise ValueError(f"{self.name}: slices have step 1, found {step}; read first, then slice in NumPy")
                stop = max(start, stop)
                pieces, shape[dim] = pieces.narrow(dim, start, stop), stop - start
                dim += 1
            else:
                i = item + n if item < 0 else item
                if not 0 <= i < n:
                    raise IndexError(f"{self.name}: index {item} is out of bounds for dim {dim} with size {n}")
                pieces = pieces.index(dim, i)
                del shape[dim]
        return self._with(pieces, shape)

    def transpose(self, *order: int) -> Array:
        """Reorder the dims; without arguments, reverse them."""
        order = order or tuple(reversed(range(self.ndim)))
        positive = tuple(d + self.ndim if d < 0 else d for d in order)
        if sorted(positive) != list(range(self.ndim)):
            raise ValueError(f"{self.name}: {order} is not an order of {self.ndim} dims")
        return self._with(self.pieces.transpose(positive), [self.shape[d] for d in positive])

    def split(self, dim: int, sizes: Sequence[int]) -> Array:
        """Split one dim into row-major finer dims."""
        dim = self._dim(dim)
        if math.prod(sizes) != self.shape[dim]:
            raise ValueError(f"{self.name}: dim {dim} has {self.shape[dim]} elements, {tuple(sizes)} make {math.prod(sizes)}")
        return self._with(self.pieces.split(dim, sizes), [*self.shape[:dim], *sizes, *self.shape[dim + 1 :]])

    def merge(self, dim: int, count: int) -> Array:
        """Merge `count` dims from `dim` on into one."""
        dim = self._dim(dim)
        sizes = self.shape[dim : dim + count]
        if count < 1 or len(sizes) != count:
            raise ValueError(f"{self.name}: cannot merge {count} dims from dim {dim} of {self.ndim}")
        return self._with(self.pieces.merge(dim, sizes), [*self.shape[:dim], math.prod(sizes), *self.shape[dim + count :]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Read the array into memory."""
        if copy is False:
            raise ValueError(f"{self.name}: the array lies in files; reading it makes a copy")
        from .reading import read_array  # the one look forward: reading is what an array is for

        values = read_array(self)
        return values if dtype is None else values.astype(dtype)

    def tensorstore(self, *, max_bytes: int | None = None) -> tensorstore.TensorStore:
        """Return a read-only TensorStore view, which reads what is asked of it and nothing else."""
        from .reading import tensorstore_view

        view: tensorstore.TensorStore = tensorstore_view(self, max_bytes=max_bytes)
        return view

    def _dim(self, dim: int, ndim: int | None = None) -> int:
        ndim = self.ndim if ndim is None else ndim
        if not -ndim <= dim < ndim:
            raise IndexError(f"{self.name}: dim {dim} is out of bounds for {ndim} dims")
        return dim % ndim

    def _with(self, pieces: Pieces, shape: Sequence[int]) -> Array:
        return replace(self, pieces=pieces, shape=tuple(shape))


def stored_whole(
    name: str, dtype: np.dtype[Any], shape: Shape, source: Any, offset: int = 0, *, stored: str | None = None
) -> Array:
    """Return an array that is stored row-major in one place, as most formats store it."""
    return Array(name, dtype, shape, piece(source, offset, shape, dtype.itemsize), stored)


def concatenate(arrays: Sequence[Array], dim: int = 0, *, name: str | None = None) -> Array:
    """Join arrays along a dim that they have."""
    dim = _first(arrays)._dim(dim)
    first = _alike(arrays, skip=dim)
    tables, at = [], 0
    for array in arrays:
        start = [0] * first.ndim
        start[dim] = at
        tables.append(array.pieces.place(start))
        at += array.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return replace(first, name=name or first.name, shape=shape, pieces=union(tables))


def stack(arrays: Sequence[Array], dim: int = 0, *, name: str | None = None) -> Array:
    """Join arrays of one shape along a new dim."""
    first = _alike(arrays)
    dim = first._dim(dim, first.ndim + 1)
    tables = [array.pieces.insert(dim, i) for i, array in enumerate(arrays)]
    shape = (*first.shape[:dim], len(arrays), *first.shape[dim:])
    return replace(first, name=name or first.name, shape=shape, pieces=union(tables))


def interleave(arrays: Sequence[Array], dim: int = 0, *, name: str | None = None) -> Array:
    """Join arrays of one shape so that their elements along a dim alternate."""
    dim = _first(arrays)._dim(dim)
    return stack(arrays, dim + 1, name=name).merge(dim, 2)


def _first(arrays: Sequence[Array]) -> Array:
    if not arrays:
        raise ValueError("at least one array is needed")
    return arrays[0]


def _alike(arrays: Sequence[Array], skip: int | None = None) -> Array:
    first = _first(arrays)

    def rest(shape: Shape) -> tuple[int | None, ...]:
        return tuple(None if d == skip else n for d, n in enumerate(shape))

    for other in arrays[1:]:
        if (rest(other.shape), other.dtype, other.stored) != (rest(first.shape), first.dtype, first.stored):
            raise ValueError(
                f"{first.name} ({first.dtype}, {first.shape}) and {other.name} ({other.dtype}, {other.shape}) do not fit together"
            )
        if other.step != first.step:
            raise ValueError(f"{first.name} and {other.name} need different steps, so they cannot be one array")
    return first


def _full_index(key: tuple[Index, ...], ndim: int, name: str) -> tuple[int | slice, ...]:
    ellipses = sum(item is Ellipsis for item in key)
    if ellipses > 1 or len(key) - ellipses > ndim:
        raise IndexError(f"{name}: {len(key)} indices with {ellipses} ellipses for {ndim} dims")
    found: list[int | slice] = []
    for item in key if ellipses else (*key, Ellipsis):
        if isinstance(item, EllipsisType):
            found += [slice(None)] * (ndim - len(key) + ellipses)
        elif isinstance(item, slice):
            found.append(item)
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            found.append(int(item))
        else:
            raise TypeError(f"{name}: an index is an integer, a slice or an Ellipsis, not {item!r}")
    return tuple(found)
