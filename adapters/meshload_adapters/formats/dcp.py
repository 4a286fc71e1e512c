"""torch.distributed.checkpoint; `_dcp.py` tells its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshload.checkpoint import Checkpoint
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._dcp_find import SUFFIX, is_checkpoint, is_megatron, is_metadata, steps_in


@dataclass(frozen=True, slots=True, eq=False)
class DCP:
    """The format of torch.distributed.checkpoint."""

    step: int | str | None = None
    """Which step, in a folder of steps: its number or its folder's name; by default the last complete one."""
    model: str | None = None
    """The key under which the weights lie that the optimizer trained, where several models are in the checkpoint; `""`: none.
    When writing: the key under which all lie."""
    optimizer: str = "optim"
    """When writing: the key under which an optimizer's state lies."""
    flat: bool = False
    """When writing: the optimizer's state as `flatten_optimizer_state_dict=True` has it."""
    steps: int | None = None
    """When writing: how many steps the moments are of, where their source does not tell it."""
    hyperparameters: Mapping[str, Any] | None = None
    """When writing: what the optimizer's groups hold besides what the source tells, or in its place."""
    name = "dcp"
    order = 60
    naming = "hf"

    def matches(self, folder: Folder) -> bool:
        """Say whether there is a `.metadata` or a data file, here or in folders of steps; unfinished saves are recognised too."""
        if folder.entry is not None:
            return (is_metadata(folder.entry) or folder.entry.endswith(SUFFIX)) and not is_megatron(folder, folder.names())
        names = folder.names()
        return is_checkpoint(folder, names) or bool(steps_in(folder, names))

    def open(self, folder: Folder) -> Checkpoint:
        """Read `.metadata`. Data files that are missing or cut make their arrays unavailable, and the rest stays usable."""
        from .._dcp import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out the ranks' data files, and `.metadata`: it stands in a folder that nobody sees before all is written."""
        from .._distcp_files import lay_out_entries, new_entry
        from .._distcp_optimizer import paths_of, state_of

        entries = [new_entry(array, parts.get(name, ()), self.called(name)) for name, array in like.arrays.items()]
        nested = paths_of(like, self.model)
        state = state_of(
            like,
            parts,
            root=self.optimizer,
            names={name: str(path[-1]) for name, path in nested.items()},
            is_flat=self.flat,
            hyperparameters=self.hyperparameters,
            step=self.steps,
        )
        paths = {self.called(name): path for name, path in nested.items()} | state.paths
        lay_out_entries(folder, [*entries, *state.entries], paths=paths, objects=state.objects)

    def called(self, name: str) -> str:
        """Return the key of an array that is written, which is its native name when it is read."""
        return f"{self.model}.{name}" if self.model else name

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: what says that the payload is there is `.metadata`, in the folder that now gets its name."""
