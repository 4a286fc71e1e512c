"""NumPy: one rank's slices as plain arrays, with the dtypes of ml_dtypes where NumPy has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from meshload.errors import LayoutError
from meshload.frameworks import Placement, Slice, Wish, World
from meshload.mesh import Mesh


class Jax:
    """The framework `numpy`."""

    name = "jax"
    spans = False

    def owns(self, thing: Any) -> bool:
        return False

    def mesh(self, mesh: Any) -> Mesh:
        raise LayoutError(f"NumPy has no meshes of its own: {mesh!r}")

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        raise LayoutError(f"NumPy has no meshes of its own: {mesh!r}")

    def world(self) -> World | None:
        return None

    def wishes(self, like: Any) -> dict[str, Wish]:
        """Return what a dict of arrays wants: its names, local shapes and dtypes."""
        if not isinstance(like, Mapping):
            raise LayoutError(f"like={type(like).__name__}: into='numpy' takes a dict of arrays")
        return {name: Wish(tuple(a.shape), np.dtype(a.dtype)) for name, a in like.items()}

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        return {name: tensors[name] for name in like if name in tensors}

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        return slices[0].values

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        return None
