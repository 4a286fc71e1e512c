"""Orbax checkpoints; `_orbax.py` tells their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.formats import Grid, Parts
from meshload.source import Folder, LocalFolder

from .._orbax_find import OLD, STEP, TREE, VERSION_1, is_mark, is_old, is_temporary, steps_in, trees_in
from .._orbax_record import is_beside


@dataclass(frozen=True, slots=True, eq=False)
class Orbax:
    """The format of Orbax: one tree item of one step."""

    step: int | str | None = None
    """Which step of a CheckpointManager: its number or its folder's name; by default the latest complete one."""
    item: str | None = None
    """Which item of a step; needed where several are trees."""
    zarr3: bool = False
    """In writing: arrays of zarr version 3; Orbax's default is version 2."""
    compress: bool = True
    """In writing: zstd at level 1, as Orbax does; without it, writing is a copy."""
    name = "orbax"
    order = 40
    naming = "hf"

    def matches(self, folder: Folder) -> bool:
        """Say yes to items, steps and roots of steps, to unfinished ones too; no to a virtual index beside its own source."""
        if folder.entry is not None:
            return folder.entry in (TREE, STEP, VERSION_1) or is_old(folder, folder.entry)
        names = folder.names()
        if any(n.endswith((".safetensors", ".distcp")) for n in names) or is_beside(folder, names):
            return False
        if is_temporary(folder) or folder.has(TREE) or any(is_mark(n) for n in names):
            return True
        return bool(trees_in(folder, names) or steps_in(folder, names)) or (OLD in names and is_old(folder, OLD))

    def open(self, folder: Folder) -> Checkpoint:
        """Open the arrays of one tree; reads metadata only."""
        from .._orbax import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out one tree, a nested dict; a chunk is one rank's part of an array, or what makes up all parts.

        Moments lie where optax's Adam has them, under `opt_state`.
        """
        from .._orbax_files import lay_out_tree

        lay_out_tree(folder, like, parts, zarr3=self.zarr3, compress=self.compress)

    def commit(self, folder: LocalFolder) -> None:
        """Keep what the arrays consist of, and write `_CHECKPOINT_METADATA` and `commit_success.txt`."""
        from .._orbax_files import commit, keep_last_version

        keep_last_version(folder)
        commit(folder)

    def check_shown(self, array: Array) -> None:
        """Raise where an array's name or dtype cannot be shown."""
        from .._orbax_index import check_shown

        check_shown(array)

    def index(
        self,
        folder: LocalFolder,
        grids: Sequence[Grid],
        places: Mapping[Path, str],
        *,
        beside: bool,
        config: Mapping[str, Any] | None,
    ) -> list[str]:
        """Write a virtual checkpoint, whose chunks lie in files of another format."""
        from .._orbax_index import write_index

        return write_index(folder, grids, places, beside=beside, config=config)

    def indexed(self, folder: LocalFolder, *, beside: bool) -> list[str]:
        """Return the files of a virtual checkpoint."""
        from .._orbax_record import indexed

        return indexed(folder, beside=beside)

    def stale(self, folder: Folder) -> list[Problem]:
        """Say which files a virtual checkpoint shows that have changed since."""
        from .._orbax_record import stale

        return stale(folder)
