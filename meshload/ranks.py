"""Which ranks of which mesh a call is about: sizes that are given, or fitted to the processes that run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .errors import LayoutError
from .exchange import running
from .frameworks import Framework, Group, World, installed
from .mesh import Mesh, fitted, mesh_of


def resolved(mesh: Any, rank: Any, framework: Framework) -> tuple[Mesh, Any, tuple[int, ...]]:
    """Return the mesh with sizes, the framework's own mesh object if it is one, and the ranks that are wanted."""
    world = framework.world() or launched()
    if mesh is None:
        if rank not in (None, 0, "all"):
            raise LayoutError(f"rank={rank!r}: without mesh= there is one rank, 0, that holds all")
        return Mesh((), ()), None, (0,)
    if framework.owns(mesh):
        sized = framework.mesh(mesh)
        return sized, mesh, tuple(range(sized.size)) if rank == "all" else (rank,) if rank is not None else framework.ranks(mesh)
    found = mesh_of(mesh)
    if found is None:
        axes = [mesh] if isinstance(mesh, str) else mesh
        if not isinstance(axes, Iterable) or not all(isinstance(a, str) for a in axes):
            raise LayoutError(f"mesh {mesh!r} is not sizes, names of axes, or a mesh of {framework.name}")
        found = fitted(tuple(axes), world.size if world else 1, world.per_node if world else 1)
    if rank == "all":
        return found, None, tuple(range(found.size))
    if rank is None:
        if world is None and found.size > 1:
            raise LayoutError(f"mesh {found} has {found.size} ranks and no group of processes runs here; say which with rank=")
        if world is not None and world.size != found.size:
            raise LayoutError(f"mesh {found} has {found.size} ranks, {world.size} processes run; make both equal, or give rank=")
        rank = world.rank if world else 0
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise LayoutError(f"rank={rank!r}: a number was expected")
    found.coordinates(int(rank))
    return found, None, (int(rank),)


@contextmanager
def joined() -> Iterator[Group]:
    """Let the processes that a launcher started act together, and give their group back in the end; one that runs already stays."""
    world, end = launched(), None
    if running().size == 1 and world is not None and world.size > 1:
        end = next((made for f in installed().values() if (made := f.start_group()) is not None), None)
    try:
        yield running()
    finally:
        if end is not None:
            end()


def launched() -> World | None:
    """Return what the launcher says of this process, by the variables of torchrun."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return World(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    except (KeyError, ValueError):
        return None
