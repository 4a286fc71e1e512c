"""torch: one rank's slices as plain tensors, on the CPU without a copy; or whole arrays as DTensors over a DeviceMesh.

A DTensor's placements say, mesh dim by mesh dim, which tensor dim that mesh dim cuts further: `Shard(d)` by torch.chunk's rule,
ceil parts, the last short or empty; `_StridedShard(d, split_factor=f)` cuts into `f` times as many parts and gives a rank every
n-th of them, which is how FSDP2 over tensor parallelism, and gate over up in one weight, are said. Seen in torch 2.6 to 2.13.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.box import Box
from meshload.errors import LayoutError, MeshloadWarning, listing
from meshload.frameworks import Group, Held, Placement, Slice, Staging, Wish, World
from meshload.mesh import Cut, Mesh, Sharding, axes_of, sharding
from meshload.naming import unwrapped
from meshload.wanting import local_shape

STAGING = 32 << 20
"""Bytes of pinned memory per copy to CUDA: large enough for full speed, small beside any ceiling."""

PACKED = {"F4": "float4_e2m1fn_x2"}
"""Stored dtypes that arrive as bytes -> torch's dtype of as many bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a `like` lies, and how it is cut."""

    device: Any
    mesh: Any = None
    placements: tuple[Any, ...] = ()


class Torch:
    """The framework `torch`."""

    name = "torch"
    spans = False
    spans_always = False

    def owns(self, thing: Any) -> bool:
        """Say whether a thing is torch's own, a module, or a dict of tensors."""
        return type(thing).__module__.partition(".")[0] == "torch" or _is_module(thing) or _is_state_dict(thing)

    def mesh(self, mesh: Any) -> Mesh:
        """Return a DeviceMesh as names and sizes; nameless dims are `dim0`, `dim1` ..."""
        if not hasattr(mesh, "mesh_dim_names"):
            raise LayoutError(f"mesh={type(mesh).__name__}: a DeviceMesh was expected")
        names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(mesh.ndim))
        return Mesh(tuple(names), tuple(mesh.mesh.shape), "a DeviceMesh was given")

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        """Return this process's place in a DeviceMesh; none where it takes no part."""
        coordinate = mesh.get_coordinate()
        return () if coordinate is None else (int(np.ravel_multi_index(tuple(coordinate), tuple(mesh.mesh.shape))),)

    def world(self) -> World | None:
        """Return the default process group."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        size = torch.distributed.get_world_size()
        return World(torch.distributed.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    def group(self) -> Group | None:
        """Return the default process group, where it has several processes."""
        world = self.world()
        return None if world is None or world.size == 1 else _Processes(world.rank, world.size)

    def start_group(self) -> Callable[[], None] | None:
        """Make the default process group, of gloo, where torchrun tells its processes how to meet."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            return None
        try:
            from torch import distributed
        except ImportError:
            return None
        distributed.init_process_group("gloo")
        return distributed.destroy_process_group

    def wishes(self, like: Any) -> dict[str, Wish]:
        """Return what a module or a state dict wants: local shapes, or whole shapes with this rank's boxes for DTensors."""
        state = _state(like)
        same = _names_of_same(state)
        return {name: _wish(name, tensor, same[name]) for name, (_, tensor) in state.items()}

    def values(self, tensors: Any) -> dict[str, list[Held]]:
        """Return each tensor's local part; what lies on other devices is copied to main memory when its bytes are asked for."""
        state = {name: tensor for name, (_, tensor) in _state(tensors).items()}
        meta = [name for name, tensor in state.items() if tensor.is_meta]
        if meta:
            raise LayoutError(f"{listing(meta)}: tensors on the meta device hold no values")
        return {name: [_held(tensor)] if _takes_part(tensor) else [] for name, tensor in state.items()}

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        """Return the module, filled, or a new state dict with the same keys in order.

        A module's tensors on the meta device are replaced, others are filled in place; a Parameter under several names stays
        one. What stays on the meta device is told in one warning: buffers that no state dict holds, such as `inv_freq`.
        """
        state = _state(like)
        found = {stored: _one_of(name, same, tensors) for (name, same), (stored, _) in _by_name(state)}
        if not _is_module(like):
            extra = {name: tensor for name, tensor in tensors.items() if name not in state}
            return {**{n: found.get(n, v) for n, v in like.items() if found.get(n, v) is not None}, **extra}
        strange = [name for name in tensors if name not in state]
        if strange:
            raise LayoutError(f"{listing(strange)}: a module has no place for these; restore them without like=, or with a dict")
        _fill(like, {stored: (old, found[stored]) for stored, old in state.values() if found[stored] is not None})
        left = [n for kind in (like.named_parameters(), like.named_buffers()) for n, t in kind if t.is_meta]
        if left:
            text = f"{listing(left)}: not in the checkpoint, still on the meta device; give them values before use"
            warnings.warn(text, MeshloadWarning, stacklevel=4)
        return like

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        """Return this rank's slice as a tensor, or as a DTensor where the `like` has one."""
        place = placement.key or _Place(None)
        local = tensor_of(slices[0].values, _device(placement, place), slices[0].stored)
        return local if place.mesh is None else _dtensor(local, place.mesh, place.placements, placement.shape)

    def staging(self) -> Staging | None:
        """Return page-locked memory, where CUDA is there."""
        import torch

        if not torch.cuda.is_available():
            return None
        from .._cuda import Ring

        return Ring(self._where, torch_dtype)

    def _where(self, placement: Placement) -> Any:
        return _device(placement, placement.key or _Place(None))

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        """Return a torch.dtype as NumPy's."""
        torch = sys.modules.get("torch")
        return numpy_dtype(dtype) if torch is not None and isinstance(dtype, torch.dtype) else None


class DTensors(Torch):
    """The framework `dtensor`: whole arrays over a DeviceMesh, each process holding its shards."""

    name = "dtensor"
    spans = True
    spans_always = True

    def owns(self, thing: Any) -> bool:
        """Say whether a thing is a DeviceMesh."""
        return type(thing).__module__.startswith("torch.distributed") and hasattr(thing, "mesh_dim_names")

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        """Return a DTensor over those dims of the DeviceMesh at which ranks hold some of the array."""
        place = placement.key or _Place(None)
        if place.mesh is not None:
            return super().tensor(slices, placement)
        if placement.mesh is None:
            raise LayoutError("into='dtensor' takes a DeviceMesh as mesh=; sizes alone give plain tensors, into='torch'")
        if len(slices) != 1:
            raise LayoutError(f"a DTensor holds this process's shard, {len(slices)} ranks were asked for; leave out rank=")
        mesh = _without(placement.mesh, placement.at)
        placements = _placements(self.mesh(mesh), placement.axes)
        _check_sayable(self.mesh(mesh), placements, placement)
        local = tensor_of(slices[0].values, self._where(placement), slices[0].stored)
        return _dtensor(local, mesh, placements, placement.shape)

    def _where(self, placement: Placement) -> Any:
        place = placement.key or _Place(None)
        return _device(placement, place if place.mesh is not None else _Place(place.device, placement.mesh))


@dataclass(frozen=True, slots=True)
class _Processes:
    """The default process group."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each process gave; by tensors, so that no pickle is read, and in main memory."""
        import torch
        import torch.distributed as dist

        group = _telling()
        mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")  # whatever the caller's default device is
        lengths = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(lengths, mine, group=group)
        padded = torch.zeros(max(1, *(int(n) for n in lengths)), dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=group)
        return [t.numpy().tobytes()[: int(n)] for t, n in zip(found, lengths, strict=True)]

    def swap(self, parts: Sequence[NDArray[np.uint8]], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Give each process its part, by one collective."""
        import torch
        import torch.distributed as dist

        device = self._device()
        sent = torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.uint8)])).to(device)
        taken = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(taken, sent, list(sizes), [len(part) for part in parts])
        return list(np.split(taken.cpu().numpy(), np.cumsum(sizes)[:-1]))

    def _device(self) -> Any:
        """Return where the group's tensors lie: NCCL, for one, takes none of main memory."""
        import torch

        kinds = _kinds()
        return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _kinds() -> list[str]:
    """Return the kinds of devices between which the default group moves tensors, as in `cpu:gloo,cuda:nccl`."""
    import torch.distributed as dist

    return [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]


_told: tuple[Any, Any] = (None, None)
"""A default group that has no part of main memory, and one of gloo beside it."""


def _telling() -> Any:
    """Return the group by which processes tell each other of plans: NCCL would hold memory of a device for each other process."""
    global _told
    import torch.distributed as dist

    if "cpu" in _kinds():
        return None
    if _told[0] is not dist.group.WORLD:
        _told = dist.group.WORLD, dist.new_group(backend="gloo")
    return _told[1]


# --- tensors and dtypes -----------------------------------------------------------------------------------------------


def tensor_of(values: Any, device: Any = None, stored: str | None = None) -> Any:
    """Return a tensor that owns the memory of an array; a copy only where the device is not the CPU."""
    import torch

    if isinstance(values, torch.Tensor):
        return values  # it was filled where it is
    own = torch_dtype(values.dtype, stored)
    if not values.size:
        return torch.empty(values.shape, dtype=own, device="cpu" if device is None else device)
    if not (values.flags.writeable and values.flags.c_contiguous):
        values = values.copy()
    own_bits = values if values.dtype.isbuiltin == 1 else values.view(np.dtype(f"u{values.dtype.itemsize}"))
    tensor = torch.from_numpy(own_bits)
    if device is not None:
        tensor = _moved(tensor, torch.device(device))
    return tensor if tensor.dtype == own else tensor.view(own)


def _takes_part(tensor: Any) -> bool:
    """Say whether this process holds anything of a tensor: a DTensor's mesh may be of other processes."""
    return not hasattr(tensor, "placements") or tensor.device_mesh.get_coordinate() is not None


def _held(tensor: Any) -> Held:
    """Return what gives the bytes of a tensor's local values."""
    import torch

    local = tensor.detach()
    local = local.to_local() if hasattr(local, "placements") else local
    local = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if local.numel() == 1:  # contiguous whatever its stride, which may be that of what it was cut from
        local = local.clone(memory_format=torch.contiguous_format)
    flat = local.view(torch.uint8) if local.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
    return lambda start, stop: np.asarray(flat[start:stop].cpu().numpy())


def torch_dtype(dtype: np.dtype[Any], stored: str | None = None) -> Any:
    """Return the torch.dtype of NumPy's or ml_dtypes' dtype; `stored` is the format's name of what arrives as bytes."""
    import torch

    own = getattr(torch, PACKED.get(stored or "", dtype.name), None)
    if not isinstance(own, torch.dtype) or dtype.name in ("int2", "int4", "uint2", "uint4"):  # torch's are no storage
        raise LayoutError(f"torch has no dtype {dtype.name}; take it with into='numpy' or 'jax', or give dtype=")
    return own


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a torch dtype as NumPy's or ml_dtypes'."""
    import ml_dtypes

    name = str(dtype).removeprefix("torch.")
    if name in PACKED.values():
        return np.dtype(np.uint8)
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise LayoutError(f"NumPy has no dtype for {dtype}") from error


def _moved(tensor: Any, device: Any) -> Any:
    """Return a tensor on a device; to CUDA through pinned memory, in the current stream's order, where it is not streamed."""
    import torch

    if device.type == "meta":
        raise LayoutError("device='meta' holds no values; meshload.plan tells names, shapes and dtypes without reading")
    if device.type != "cuda":
        return tensor.to(device)
    there: Any = torch.empty_like(tensor, device=device)
    count = max(STAGING // tensor.element_size(), 1)
    for source, target in zip(tensor.reshape(-1).split(count), there.view(-1).split(count), strict=True):
        target.copy_(source.pin_memory(), non_blocking=True)  # torch keeps pinned memory until the copy is done
    return there


def _device(placement: Placement, place: _Place) -> Any:
    if placement.device is not None or place.device is not None:
        return placement.device if placement.device is not None else place.device
    if place.mesh is None or place.mesh.device_type == "cpu":
        return None
    import torch

    return torch.device(place.mesh.device_type, torch.get_device_module(place.mesh.device_type).current_device())


# --- DTensors ---------------------------------------------------------------------------------------------------------


def _dtensor(local: Any, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _without(mesh: Any, at: Mapping[str, int]) -> Any:
    """Return the part of a DeviceMesh that this process is in, without the dims at which others hold nothing."""
    if not at:
        return mesh
    names = tuple(n for n in mesh.mesh_dim_names or () if n not in at)
    if not names:
        raise LayoutError(f"mesh dims {', '.join(at)} leave no mesh for a DTensor; give the DeviceMesh one more dim, of size 1")
    return mesh[names]


def _placements(mesh: Mesh, axes: Sequence[Any]) -> tuple[Any, ...]:
    """Return DTensor's placements of a cut by mesh axes per dim, outermost first.

    DTensor cuts in the order of its mesh; an axis that cuts before an earlier one of the mesh makes that one's shard strided.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = [Replicate()] * len(mesh.names)
    for d, cutting in enumerate(map(axes_of, axes)):
        for k, axis in enumerate(cutting):
            place = mesh.names.index(axis)
            before = [b for b in cutting[:k] if mesh.names.index(b) > place]
            factor = math.prod(mesh.size_of(b) for b in before)
            found[place] = Shard(d) if factor == 1 else _StridedShard(d, split_factor=factor)
    return tuple(found)


def _check_sayable(mesh: Mesh, placements: Sequence[Any], placement: Placement) -> None:
    """Check that placements give each rank what the axes give it: where a cut is uneven, strided shards may not."""
    meant = sharding(placement.axes)
    said = _sharding(placements, mesh.names, len(placement.shape))
    if not said.is_strided or all(n % meant.parts_of(d, mesh) == 0 for d, n in enumerate(placement.shape)):
        return
    for rank in range(mesh.size):
        one, other = (s.boxes(placement.shape, mesh, rank) for s in (meant, said))
        if one != other:
            raise LayoutError(
                f"axes {placement.axes} of mesh {mesh} cut shape {placement.shape} into {one} for rank {rank}; as a DTensor's "
                f"{placements} they give {other}; name the axes in the order of the mesh, or use sizes that divide"
            )


def _boxes(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> tuple[Box, ...]:
    """Return the boxes of this process in an array; none where it takes no part."""
    ranks = Torch().ranks(mesh)
    sized = Torch().mesh(mesh)
    return _sharding(placements, sized.names, len(shape)).boxes(tuple(shape), sized, ranks[0]) if ranks else ()


def _sharding(placements: Sequence[Any], names: Sequence[str], ndim: int) -> Sharding:
    """Return placements as cuts, in the order of the mesh."""
    cuts: list[list[Cut]] = [[] for _ in range(ndim)]
    for axis, placement in zip(names, placements, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise LayoutError(f"placement {placement} has no slices of its own; Shard or Replicate was expected")
        cuts[dim % ndim].append(Cut(axis, getattr(placement, "split_factor", 1)))
    return Sharding(tuple(map(tuple, cuts)))


# --- modules and state dicts ------------------------------------------------------------------------------------------


def _wish(name: str, tensor: Any, same: tuple[str, ...]) -> Wish:
    shape, dtype = tuple(tensor.shape), numpy_dtype(tensor.dtype)
    stored = next((word for word, name in PACKED.items() if str(tensor.dtype) == f"torch.{name}"), None)
    device = None if tensor.is_meta else tensor.device
    if not hasattr(tensor, "placements"):
        return Wish(shape, dtype, key=_Place(device), same=same, stored=stored)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    try:
        boxes = _boxes(mesh, placements, shape)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error
    held = tuple(tensor.to_local().shape)
    if boxes and local_shape(boxes) != held:
        raise LayoutError(
            f"{name}: this rank's part of {shape} by {placements} has shape {local_shape(boxes)}, the tensor holds {held}: an "
            f"uneven cut that the placements do not tell; use sizes that divide"
        )
    slices = tuple((rank, boxes) for rank in Torch().ranks(mesh))
    return Wish(shape, dtype, slices, _Place(device, mesh, placements), same, stored)


def _state(like: Any) -> dict[str, tuple[str, Any]]:
    """Return the tensors of a module or a state dict: name without wrappers -> its own name and the tensor."""
    if not _is_module(like) and not isinstance(like, Mapping):
        raise LayoutError(f"like={type(like).__name__}: torch takes a module or a dict of tensors")
    state = like.state_dict(keep_vars=True) if _is_module(like) else like
    held = {name: tensor for name, tensor in state.items() if hasattr(tensor, "is_meta")}
    strange = [f"{name!r}: {tensor.layout}" for name, tensor in held.items() if _is_strange(name, tensor)]
    if strange:
        raise LayoutError(f"{listing(strange)}: names that are text and dense tensors were expected")
    return {short: (name, held[name]) for short, name in unwrapped(held).items()}


def _is_strange(name: Any, tensor: Any) -> bool:
    import torch

    return not isinstance(name, str) or tensor.layout != torch.strided


def _names_of_same(state: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the other names under which each tensor stands: the same object, or the same memory seen the same way."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, (_, tensor) in state.items():
        local = tensor.detach().to_local() if hasattr(tensor, "placements") else tensor
        seen = local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride(), tensor.dtype
        groups.setdefault(seen, []).append(name)
    return {name: tuple(n for n in names if n != name) for names in groups.values() for name in names}


def _by_name(state: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[tuple[str, tuple[str, ...]], tuple[str, Any]]]:
    same = _names_of_same(state)
    for name, found in state.items():
        yield (name, same[name]), found


def _one_of(name: str, same: Sequence[str], tensors: Mapping[str, Any]) -> Any:
    """Return the tensor that serves a name and those that are the same tensor in `like`; None where the checkpoint has none."""
    held = [n for n in sorted((name, *same)) if n in tensors]
    differing = [n for n in held[1:] if not _same_bits(tensors[held[0]], tensors[n])]
    if differing:
        raise LayoutError(
            f"{held[0]} and {differing[0]} are one tensor in `like`, and the checkpoint's two differ; exclude= one of them, "
            f"or untie the module"
        )
    return tensors[held[0]] if held else None


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    if one is other:
        return True
    a, b = (t.to_local() if hasattr(t, "placements") else t for t in (one, other))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _fill(module: Any, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a module its tensors: all are checked first, so that it is never left half filled."""
    import torch

    for name, (old, new) in pairs.items():
        if tuple(old.shape) != tuple(new.shape):
            raise LayoutError(f"{name}: the module has shape {tuple(old.shape)}, the checkpoint gives {tuple(new.shape)}")
    fresh: dict[str, Any] = {}
    made: dict[int, Any] = {}
    with torch.no_grad():
        for name, (old, new) in pairs.items():
            if not old.is_meta and (old.dtype, old.device) == (new.dtype, new.device):
                if id(old) not in made:
                    made[id(old)] = _copy(old, new)
            elif isinstance(old, torch.nn.Parameter):
                if id(old) not in made:
                    made[id(old)] = _parameter(old, new)
                fresh[name] = made[id(old)]
            else:
                fresh[name] = made.setdefault(id(old), new)
    module.load_state_dict(fresh, strict=False, assign=True)  # torch's own way, whose hooks FSDP2 relies on


def _copy(old: Any, new: Any) -> Any:
    there, here = (t.detach().to_local() if hasattr(t, "placements") else t for t in (old, new))
    there.copy_(here)
    return old


def _parameter(old: Any, new: Any) -> Any:
    """Return a Parameter like an old one: `requires_grad`, and what was noted on it."""
    import torch

    made = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    for key, value in getattr(old, "__dict__", {}).items():
        if key not in made.__dict__:
            made.__dict__[key] = value
    return made


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
