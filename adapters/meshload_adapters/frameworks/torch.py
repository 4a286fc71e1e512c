"""torch: one rank's slices as plain tensors, on the CPU without a copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from meshload.frameworks import Placement, Slice, Wish, World
from meshload.mesh import Mesh


class Torch:
    """The framework `torch`."""

    name = "torch"
    spans = False

    def owns(self, thing: Any) -> bool:
        return type(thing).__module__.partition(".")[0] == "torch" or _is_module(thing) or _is_state_dict(thing)

    def mesh(self, mesh: Any) -> Mesh:
        names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(mesh.ndim))
        return Mesh(tuple(names), tuple(mesh.mesh.shape), "a DeviceMesh was given")

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        coordinate = mesh.get_coordinate()
        return () if coordinate is None else (int(np.ravel_multi_index(coordinate, tuple(mesh.mesh.shape))),)

    def world(self) -> World | None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        import os

        size = torch.distributed.get_world_size()
        return World(torch.distributed.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    def wishes(self, like: Any) -> dict[str, Wish]:
        state = like.state_dict() if _is_module(like) else like
        return {name: Wish(tuple(t.shape), numpy_dtype(t.dtype)) for name, t in state.items()}

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        return dict(tensors)

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        return tensor_of(slices[0].values, placement.device)

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        torch = sys.modules.get("torch")
        return numpy_dtype(dtype) if torch is not None and isinstance(dtype, torch.dtype) else None


def tensor_of(values: np.ndarray[Any, Any], device: Any) -> Any:
    """Return a tensor that owns the memory of an array; a copy only where the device is another."""
    import torch

    name = values.dtype.name
    own = getattr(torch, {"bool": "bool"}.get(name, name), None)
    bits = values if values.dtype.kind in "biufc" else values.view(np.dtype(f"u{values.dtype.itemsize}"))
    if not bits.flags.writeable:
        bits = bits.copy()
    tensor = torch.from_numpy(bits)
    if isinstance(own, torch.dtype) and tensor.dtype != own:
        tensor = tensor.view(own)
    return tensor if device is None else tensor.to(device)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a torch dtype as NumPy's or ml_dtypes'."""
    import ml_dtypes

    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def _is_module(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.nn.Module)


def _is_state_dict(thing: Any) -> bool:
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(thing, Mapping)
        and bool(thing)
        and all(isinstance(v, torch.Tensor) for v in thing.values())
    )
