"""FlexGen's weights; `_flexgen.py` tells their files."""

from __future__ import annotations

from meshload.checkpoint import Checkpoint
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._flexgen_find import has_magic, parameter


class FlexGen:
    """The format of FlexGen's `-np` folders."""

    name = "flexgen"
    order = 38
    naming = "flexgen"
    has_one_place_for_ties = True

    def matches(self, folder: Folder) -> bool:
        """Say whether files have the names of OPT's parameters, and begin as NumPy's do or are empty."""
        if folder.entry is not None:
            return False
        named = [file for file in folder.names() if parameter(file)]
        return any(has_magic(folder.file(file)) for file in named[:3])

    def open(self, folder: Folder) -> Checkpoint:
        """Read the files' headers. What is damaged or missing is told by name."""
        from .._flexgen import checkpoint_in

        return checkpoint_in(folder)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out one file per array, whole, however the mesh cuts it."""
        from .._flexgen_files import lay_out_parameters

        lay_out_parameters(folder, like)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: the format has no marker."""
