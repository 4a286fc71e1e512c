"""JAX: whole arrays over a `jax.sharding.Mesh`, or without one a rank's slices; on the CPU without a copy.

A dim that several mesh axes cut is cut by the first of them outermost, and into equal parts. JAX keeps the NumPy memory that its
CPU buffers lie in, and never donates it. Dtypes of 64 bits are put under a local `enable_x64`, so they are not narrowed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.box import Box
from meshload.errors import LayoutError
from meshload.frameworks import Group, Held, Placement, Slice, Wish, World, held
from meshload.mesh import Mesh, axes_of

SWAPPED = 16 << 20
"""Bytes that all processes together tell each other at once, where each wants a part of them."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A sharding that the caller gave, and this process's devices in it: slice `rank` lies on `devices[rank]`."""

    sharding: Any
    devices: tuple[Any, ...]


class Jax:
    """The framework `jax`."""

    name = "jax"
    spans = True
    spans_always = False

    def owns(self, thing: Any) -> bool:
        """Say whether a thing is JAX's mesh, or a pytree of its arrays or shapes."""
        jax = sys.modules.get("jax")
        if jax is None or isinstance(thing, str):
            return False
        if isinstance(thing, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            return True
        leaves = jax.tree_util.tree_leaves(thing)
        own = [isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves]
        return any(own) and all(a or isinstance(leaf, np.ndarray) for a, leaf in zip(own, leaves, strict=True))

    def mesh(self, mesh: Any) -> Mesh:
        """Return a mesh as names and sizes."""
        if not isinstance(getattr(mesh, "devices", None), np.ndarray):
            raise LayoutError(f"mesh={type(mesh).__name__}: a jax.sharding.Mesh with devices was expected")
        return Mesh(tuple(mesh.axis_names), tuple(mesh.devices.shape), "a jax.sharding.Mesh was given")

    def ranks(self, mesh: Any) -> tuple[int, ...]:
        """Return the places of this process's devices in a mesh, row-major."""
        import jax

        here = jax.process_index()
        return tuple(i for i, device in enumerate(mesh.devices.flat) if device.process_index == here)

    def world(self) -> World | None:
        """Return JAX's processes, one a node, where its distributed runtime is on."""
        jax = sys.modules.get("jax")
        if jax is None or not jax.distributed.is_initialized():
            return None
        return World(jax.process_index(), jax.process_count(), 1)

    def group(self) -> Group | None:
        """Return JAX's processes, where there are several."""
        world = self.world()
        return None if world is None or world.size == 1 else _Processes(world.rank, world.size)

    def wishes(self, like: Any) -> dict[str, Wish]:
        """Return what a pytree of shapes or arrays wants; a leaf's name is its path joined by dots."""
        import jax

        found: dict[str, Wish] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]:
            name = _name(path)
            if name in found:
                raise LayoutError(f"two leaves of `like` have the path {name}")
            found[name] = _wish(name, leaf)
        return found

    def values(self, tensors: Any) -> dict[str, list[Held]]:
        """Return each array's shards on this process's devices, by the devices' numbers."""
        import jax

        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tensors)[0]:
            name = _name(path)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise LayoutError(f"{name}: a jax.ShapeDtypeStruct holds no values")
            shards = [leaf]
            if isinstance(leaf, jax.Array):
                shards = [shard.data for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)]
            found[name] = [held(np.asarray(shard)) for shard in shards]
        return found

    def like(self, like: Any, tensors: Mapping[str, Any]) -> Any:
        """Return the same pytree with arrays as leaves; a leaf that the checkpoint lacks and may lack stays as it is."""
        import jax

        leaves, tree = jax.tree_util.tree_flatten_with_path(like)
        strange = set(tensors) - {_name(path) for path, _ in leaves}
        if strange:
            raise LayoutError(f"{min(strange)}: `like` has no place for it; restore it without like=")
        return jax.tree_util.tree_unflatten(tree, [tensors.get(_name(path), leaf) for path, leaf in leaves])

    def tensor(self, slices: Sequence[Slice], placement: Placement) -> Any:
        """Return an array over the devices at which ranks hold some of it, or on one device where there is no mesh."""
        if isinstance(placement.key, _Place):
            sharding, device_of = placement.key.sharding, placement.key.devices
        elif placement.mesh is not None:
            sharding, device_of = _named(placement), tuple(placement.mesh.devices.flat)
        else:
            return _put([slices[0].values], [_device(placement.device)])[0]
        if placement.device is not None:
            raise LayoutError(f"device={placement.device!r}: the mesh or sharding says where an array lies; give one of them")
        on = {device_of[s.rank]: s.values for s in slices}
        lacking = sharding.addressable_devices - set(on)
        if lacking:
            raise LayoutError(
                f"a jax.Array holds the slices of all {len(on) + len(lacking)} devices of this process, {len(on)} were asked for; "
                f"leave out rank="
            )
        return _joined(placement.shape, sharding, _put(list(on.values()), list(on)))

    def dtype(self, dtype: Any) -> np.dtype[Any] | None:
        """Return a scalar type of jax.numpy as NumPy's dtype."""
        own = type(dtype).__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(dtype, "dtype")
        return np.dtype(dtype.dtype) if own else None


@dataclass(frozen=True, slots=True)
class _Processes:
    """JAX's processes."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each process gave."""
        from jax.experimental import multihost_utils

        lengths = np.asarray(multihost_utils.process_allgather(np.asarray([len(data)], np.int32))).reshape(-1)
        padded = np.zeros(max(1, int(lengths.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        found = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.size, -1)
        return [row.tobytes()[: int(n)] for row, n in zip(found, lengths, strict=True)]

    def swap(self, parts: Sequence[NDArray[np.uint8]], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Give each process its part: what each gives goes to all, a little at a time, since JAX has no other way for main memory.

        So parts that are the same, of which replicas are made, are told once.
        """
        places, data = _packed(parts)
        told = np.stack([np.frombuffer(n, np.int64).reshape(-1, 2) for n in self.gather(places.tobytes())])
        found = [np.empty(n, np.uint8) for n in sizes]
        begin = told[:, self.rank, 0]  # where in what each gives this process's part is
        step = max(SWAPPED // self.size, 1)
        for at in range(0, int((told[:, :, 0] + told[:, :, 1]).max()), step):
            for given, start, out in zip(self.gather(data[at : at + step].tobytes()), begin.tolist(), found, strict=True):
                low, high = max(start, at), min(start + len(out), at + len(given))
                if low < high:
                    out[low - start : high - start] = np.frombuffer(given, np.uint8)[low - at : high - at]
        return found


def _packed(parts: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the start and the length of each part, and the bytes of all; parts that are equal lie there once."""
    kept: list[tuple[int, NDArray[np.uint8]]] = []
    places, end = [], 0
    for part in parts:
        same = (at for at, k in kept if len(k) == len(part) and k[:64].tobytes() == part[:64].tobytes() and np.array_equal(k, part))
        at = next(same, end)
        if at == end:
            kept.append((at, part))
            end += len(part)
        places.append((at, len(part)))
    return np.asarray(places, np.int64), np.concatenate([*(part for _, part in kept), np.zeros(0, np.uint8)])


def _put(values: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """Return arrays on devices, all at once; device memory is filled while others are read."""
    import jax

    with _x64():
        return list(jax.device_put(list(values), list(devices)))


def _joined(shape: Sequence[int], sharding: Any, arrays: Sequence[Any]) -> Any:
    import jax

    with _x64():
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(arrays), dtype=arrays[0].dtype)


def _x64() -> Any:
    import jax
    import jax.experimental

    before: Any = jax.experimental  # where it stood in older versions
    return (jax.enable_x64 if hasattr(jax, "enable_x64") else before.enable_x64)(True)


def _device(device: Any) -> Any:
    """Return a device by the name of its platform; JAX's own objects as they are."""
    if not isinstance(device, str):
        return device
    import jax

    return jax.local_devices(backend=device)[0]


def _named(placement: Placement) -> Any:
    """Return the sharding over the part of a mesh whose ranks hold some of an array."""
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    mesh = placement.mesh
    if placement.at:
        names = [n for n in mesh.axis_names if n not in placement.at]
        devices = mesh.devices[tuple(placement.at.get(n, slice(None)) for n in mesh.axis_names)]
        if not names:
            return SingleDeviceSharding(devices)
        types = tuple(t for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if n in names)
        mesh = JaxMesh(devices, names, axis_types=types)
    partition: Any = PartitionSpec  # untyped
    return NamedSharding(mesh, partition(*(axes_of(axes) or None for axes in placement.axes)))


def _name(path: Any) -> str:
    import jax

    return str(jax.tree_util.keystr(path, simple=True, separator="."))


def _wish(name: str, leaf: Any) -> Wish:
    """Return what a leaf wants: the boxes of this process's devices, where it has a sharding."""
    import jax

    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise LayoutError(f"{name}: {type(leaf).__name__} is no array; a jax.ShapeDtypeStruct or a jax.Array was expected")
    shape, dtype, sharding = tuple(leaf.shape), np.dtype(leaf.dtype), getattr(leaf, "sharding", None)
    if sharding is None:
        return Wish(shape, dtype)
    try:
        places = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise LayoutError(f"{name}: {sharding} does not fit shape {shape}: {error}") from error
    devices = tuple(sorted(places, key=lambda device: device.id))
    slices = tuple((i, (_box(places[device], shape),)) for i, device in enumerate(devices))
    return Wish(shape, dtype, slices, _Place(sharding, devices))


def _box(index: Any, shape: Sequence[int]) -> Box:
    runs = [s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(shape), shape, strict=True)]
    return Box(tuple(a for a, _ in runs), tuple(b - a for a, b in runs))
