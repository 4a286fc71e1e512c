"""NumPy: one rank's slices as plain, writable arrays, with the dtypes of ml_dtypes where NumPy has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshload.errors import LayoutError, listing
from meshload.frameworks import Group, Held, Placement, Slice, Wish, World, held
from meshload.mesh import Mesh


class NumPy:
    """The framework `numpy`."""

    name = "numpy"
    spans = False
    spans_always = False

    def owns(self, thing: Any) -> bool:
        """Say whether a thing is a dict of arrays."""
        return isinstance(thing, Mapping) and bool(thing) and all(isinstance(v, np.ndarray) for v in thing.values())

    def mesh(self, mesh: Any) -> Mesh:
        """Raise: NumPy has none."""
        raise LayoutError(f"NumPy has no meshes of its own: {mesh!r}")

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        """Raise: NumPy has none."""
        raise LayoutError(f"NumPy has no meshes of its own: {mesh!r}")

    def world(self) -> World | None:
        """Return None: NumPy runs no processes."""
        return None

    def group(self) -> Group | None:
        """Return None: NumPy runs no processes."""
        return None

    def start_group(self) -> None:
        """Return None: NumPy has no groups."""

    def wishes(self, like: Any) -> dict[str, Wish]:
        """Return what a dict of arrays wants: its names, local shapes and dtypes."""
        if not isinstance(like, Mapping):
            raise LayoutError(f"like={type(like).__name__}: into='numpy' takes a dict of arrays")
        strange = [
            f"{name!r}: {a.dtype}" for name, a in like.items() if not isinstance(name, str) or not _is_number(np.dtype(a.dtype))
        ]
        if strange:
            raise LayoutError(f"{listing(strange)}: names that are text and arrays of numbers were expected")
        return {name: Wish(tuple(a.shape), np.dtype(a.dtype).newbyteorder("=")) for name, a in like.items()}

    def values(self, tensors: Any) -> dict[str, list[Held]]:
        """Return the arrays themselves."""
        return {name: [held(array)] for name, array in tensors.items()}

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        """Return a new dict with the same keys in order, moments after them."""
        kept = {name: tensors[name] for name in like if name in tensors}
        return {**kept, **{name: tensor for name, tensor in tensors.items() if name not in kept}}

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        """Return the values themselves."""
        if placement.device not in (None, "cpu"):
            raise LayoutError(f"device={placement.device!r}: NumPy's arrays lie in main memory")
        values = slices[0].values
        return values if values.flags.writeable else values.copy()

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        """Return None: all dtypes that meshload knows are NumPy's."""
        return None


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "OSUMm" and dtype.type is not np.void  # ml_dtypes' kinds are V, too
