"""A framework turns filled buffers into its tensors, and its meshes and shardings into boxes.

Frameworks are found as entry points of the group `meshload.frameworks`. They move no payload themselves: the core has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .box import Box, Shape
from .errors import LayoutError
from .formats import adapters
from .mesh import Axes, Mesh


@dataclass(frozen=True, slots=True)
class World:
    """A running group of processes."""

    rank: int
    size: int
    per_node: int


class Group(Protocol):
    """Processes that run together, and can tell each other something; all call each method, in the same order."""

    @property
    def rank(self) -> int:
        """Which of the processes this one is."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each process gave, by rank."""

    def swap(self, parts: Sequence[NDArray[np.uint8]], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Give each process its part, and return what each gave this one, of the sizes that are known."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's values of an array, in row-major memory of their own."""

    rank: int
    box: Box | None
    """Where they lie in the whole array, as its naming shows it; None where that is no single box."""
    values: Any
    """A NumPy array, or what the framework's own `Landing` gave."""
    stored: str | None = None
    """The format's own name of the dtype, where NumPy has none for it and the values are bytes: `F4`."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a `like` wants under one name."""

    shape: Shape
    """Of the whole array where `slices` is given, else of this rank's tensor."""
    dtype: np.dtype[Any] | None
    slices: tuple[tuple[int, tuple[Box, ...]], ...] | None = None
    """Ranks of this process with the boxes that each holds, in order; None where the layout decides."""
    key: Any = None
    """What the framework needs to place it: its own sharding object."""
    same: tuple[str, ...] = ()
    """Other names of the same tensor in `like` (tied weights): what is stored under one of them serves all."""
    stored: str | None = None
    """As a `Slice` has it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a framework is to hold an array."""

    shape: Shape
    """Of the whole array."""
    mesh: Any = None
    """The framework's own mesh, where the array is to span it."""
    axes: tuple[Axes, ...] = ()
    """Mesh axes per dim of the whole array."""
    at: Mapping[str, int] = field(default_factory=dict)
    """Places on mesh axes outside of which nothing of the array is held (a pipeline stage, an expert's ranks)."""
    key: Any = None
    """The framework's own sharding, where the caller gave one."""
    device: Any = None


Held = Callable[[int, int], NDArray[np.uint8]]
"""A local array of this process: what gives its bytes from `start` to `stop`."""


def held(values: NDArray[Any]) -> Held:
    """Return an array of main memory as what gives its bytes, in the machine's order."""
    flat = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
    return lambda start, stop: flat[start:stop]


class Framework(Protocol):
    """What a framework adapter provides. Its entry point names a class whose instances need no arguments."""

    @property
    def name(self) -> str:
        """The word for `into=`."""

    @property
    def spans(self) -> bool:
        """Whether its tensors are whole arrays that span the ranks of a mesh, rather than one rank's slices."""

    @property
    def spans_always(self) -> bool:
        """Whether it has no tensors but those that span a mesh of its own."""

    def owns(self, thing: Any) -> bool:
        """Say whether a mesh or a `like` is made of this framework; imports nothing."""

    def mesh(self, mesh: Any) -> Mesh:
        """Return its mesh as names and sizes."""

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        """Return this process's ranks in its mesh."""

    def world(self) -> World | None:
        """Return the process group that runs, or None; imports nothing."""

    def group(self) -> Group | None:
        """Return the running processes as a group, where there are several; imports nothing."""

    def start_group(self) -> Callable[[], None] | None:
        """Make a group of the processes that a launcher started, and return what ends it; None where it cannot."""

    def wishes(self, like: Any) -> dict[str, Wish]:
        """Return what a `like` wants, by name."""

    def values(self, tensors: Any) -> dict[str, list[Held]]:
        """Return what this process holds of tensors, by name: one local array per rank in `wishes`, or the only one.

        Each is a function that gives a range of its bytes, row-major, in main memory; without a copy where it can.
        """

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        """Return the tensors as what `like` is."""

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        """Return a tensor of this process's slices, without a copy where the library allows it."""

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        """Return a dtype of this framework as NumPy's; None for what is not its own."""


class Landing(Protocol):
    """A tensor in the memory of a device, to be filled part by part: a sink of elements, in row-major order."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What is wanted."""

    @property
    def tensor(self) -> Any:
        """The tensor, once all parts have arrived."""

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        """Begin to copy values to the elements from `start` on, cast to the tensor's dtype; return what does nothing.

        The values may lie in staging memory, which is not given to anybody before the copy has ended.
        """

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        """Say no: nothing is there before it is written."""

    def flush(self) -> None:
        """Do nothing: `Staging.wait` waits for all."""


class Staging(Protocol):
    """Memory from which copies to devices go on by themselves."""

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the calling thread's memory, at least `nbytes` of it, once no copy reads it any more."""

    def landing(self, name: str, shape: Shape, dtype: np.dtype[Any], stored: str | None, placement: Placement) -> Landing | None:
        """Return a new tensor on the device of a placement; None where that is main memory."""

    def wait(self) -> None:
        """Return once all copies have ended."""


@runtime_checkable
class Streaming(Protocol):
    """A framework that fills devices part by part, while others are read."""

    def staging(self) -> Staging | None:
        """Return new staging memory; None where there are no such devices, which costs nothing."""


def installed() -> dict[str, Framework]:
    """Return the installed frameworks by name."""
    return {point.name: point.load()() for point in adapters("meshload.frameworks")}


def framework_of(into: str | None, *things: Any) -> Framework:
    """Return the framework by name, or the one that owns one of the things, else torch."""
    known = installed()
    if into is not None:
        if into not in known:
            raise LayoutError(f"there is no framework {into!r}; installed are: {', '.join(sorted(known))}")
        return known[into]
    plain_first = sorted(known.values(), key=lambda framework: framework.spans)  # a DeviceMesh alone gives plain tensors
    for thing in things:
        for framework in plain_first:
            if thing is not None and framework.owns(thing):
                return framework
    return known["torch"]


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Say whether a dtype is one of real floating numbers, the extended ones included."""
    import ml_dtypes

    return dtype.kind == "f" or (dtype.kind == "V" and dtype.names is None and _is_ml_float(dtype, ml_dtypes))


def _is_ml_float(dtype: np.dtype[Any], ml_dtypes: Any) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True
