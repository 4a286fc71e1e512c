"""torch.distributed.checkpoint; `_dcp.py` tells its files."""

from __future__ import annotations

from dataclasses import dataclass

from meshload.checkpoint import Checkpoint
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._dcp_find import SUFFIX, is_checkpoint, is_megatron, is_metadata, steps_in


@dataclass(frozen=True, slots=True)
class DCP:
    """The format of torch.distributed.checkpoint."""

    step: int | str | None = None
    """Which step, in a folder of steps: its number or its folder's name; by default the last complete one."""
    model: str | None = None
    """The key under which the weights lie that the optimizer trained, where several models are in the checkpoint; `""`: none."""
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

        lay_out_entries(folder, [new_entry(a, parts.get(name, ())) for name, a in like.arrays.items()], paths=True)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: what says that the payload is there is `.metadata`, in the folder that now gets its name."""
