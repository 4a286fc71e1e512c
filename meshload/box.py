"""A box is a region of an array: where it starts and its shape, in elements; half-open, with step 1.

JAX shardings, DTensor placements, stored shards and flat fragments all become boxes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A region of an array: `start[d] <= i[d] < start[d] + shape[d]`, in elements."""

    start: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"a box has one start per dim: {len(self.start)} starts, {len(self.shape)} sizes")
        if any(n < 0 for n in (*self.start, *self.shape)):
            raise ValueError(f"a box has no negative numbers: start {self.start}, shape {self.shape}")

    @property
    def stop(self) -> Shape:
        """The first index behind the box, per dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index for NumPy."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def meet(self, other: "Box") -> "Box | None":
        """Return the elements that both boxes hold, or None where there are none.

        >>> Box((0, 0), (2, 4)).meet(Box((1, 2), (5, 5)))
        Box(start=(1, 2), shape=(1, 2))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def inside(self, shape: Shape) -> bool:
        """Say whether an array of this shape holds the whole box."""
        return len(shape) == len(self.shape) and all(b <= n for b, n in zip(self.stop, shape, strict=True))


def whole(shape: Shape) -> Box:
    """Return the box that is all of an array."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Shape, itemsize: int = 1) -> Shape:
    """Return the byte strides of a row-major array.

    >>> row_major((2, 3, 4), 2)
    (24, 8, 2)
    """
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def boxes_of_run(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cut the row-major element range [start, stop) of an array into boxes, in order.

    At most `2 * ndim - 1` boxes come out.

    >>> list(boxes_of_run((2, 3), 2, 6))
    [Box(start=(0, 2), shape=(1, 1)), Box(start=(1, 0), shape=(1, 3))]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"run [{start}, {stop}) is not inside an array of shape {shape}")
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        yield from _in_row(shape, first, start - first * inner, stop - first * inner)
        return
    if start > first * inner:
        yield from _in_row(shape, first, start - first * inner, inner)
        first += 1
    full = stop // inner
    if full > first:
        yield Box((first,) + (0,) * (len(shape) - 1), (full - first, *shape[1:]))
    if stop > full * inner:
        yield from _in_row(shape, full, 0, stop - full * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((row, *box.start), (1, *box.shape))
