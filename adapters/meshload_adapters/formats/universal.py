"""DeepSpeed's universal checkpoints; `_universal.py` tells their files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._zero_find import has_tag, is_zero, tag_named, universal_tags

if TYPE_CHECKING:
    from .._cuts import Cut as Cut
    from .._cuts import Declared


@dataclass(frozen=True, slots=True)
class Universal:
    """The format of DeepSpeed's universal checkpoints."""

    weights: str = "module"
    """What `ck[name]` is: the `module`'s weight where there is one, or the fp32 `master` where there is one."""
    tag: str | None = None
    """Which tag, where not the one that `latest_universal` names."""
    cut: Declared | None = None
    """How tensor-parallel ranks share the module's parameters, where the checkpoint does not say it, as for `DeepSpeed`."""
    stage: int = 1
    """Of ZeRO, in the engine for which it is written: 1, 2 or 3."""
    step: int | None = None
    """How many steps the moments are of that are written, where their source does not tell it."""
    name = "universal"
    order = 10
    naming = "hf"

    def __post_init__(self) -> None:
        if self.weights not in ("module", "master"):
            raise LayoutError(f"weights={self.weights!r}: 'module' or 'master' was expected")
        if self.stage not in (1, 2, 3):
            raise LayoutError(f"stage={self.stage!r}: 1, 2 or 3 was expected")
        if self.cut is not None:
            from .._cuts import check_declared

            check_declared(self.cut)

    def matches(self, folder: Folder) -> bool:
        """Say whether this is a universal tag, or a root that has one, and no tag of DeepSpeed's that `latest` names.

        The run itself goes on from `latest`, so a root that has both is DeepSpeed's.
        """
        if folder.entry is not None:
            return False
        listed = folder.names()
        if "zero/" in listed:
            return is_zero(folder, "zero")
        latest = tag_named(folder, "latest") if "latest" in listed else None
        if latest is not None and has_tag(folder, latest):
            return False
        return bool(universal_tags(folder, listed))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the headers of the parameters' files and of the model states."""
        from .._universal import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out the model states, and a file for each master and moment."""
        from .._universal_files import lay_out_tag

        if self.weights == "master":
            raise LayoutError("weights='master' says what is read; to write masters as weights, convert with dtype='float32'")
        lay_out_tag(folder, like, parts, self)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `latest_universal` is in the folder that now gets its name."""


def __getattr__(name: str) -> Any:
    if name != "Cut":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .._cuts import Cut

    return Cut
