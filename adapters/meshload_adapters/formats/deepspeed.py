"""DeepSpeed checkpoints; `_deepspeed.py` tells their files and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._zero_find import is_tag, tags

if TYPE_CHECKING:
    from .._cuts import Cut as Cut
    from .._cuts import Declared


@dataclass(frozen=True, slots=True, eq=False)
class DeepSpeed:
    """The format of the folders that DeepSpeed's `save_checkpoint` writes."""

    weights: str = "module"
    """What `ck[name]` is: the `module`'s weight, or the fp32 `master` where there is one."""
    tag: str | None = None
    """Which tag, where not the one that `latest` names; opened as it is, complete or not."""
    cut: Declared | None = None
    """How tensor-parallel ranks share parameters, where the checkpoint does not say it: globs of names to a dim, None (each
    has the whole), `"mean"`, `"sum"` or a `Cut`; or `"megatron"` or `"gpt_neox"`, whose names are then followed."""
    tied: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Tie of a pipeline -> the layer whose file holds it, or is to hold it."""
    parameters: Sequence[str] | None = None
    """The names of the optimizer's parameters in its order, where its state has none, and for writing, where the source does
    not tell it."""
    stage: int = 2
    """Of ZeRO, in the engine for which it is written: 1, 2 or 3."""
    pipeline: bool = False
    """Whether the engine for which it is written has a PipelineModule: its layers are written then, under GPT-NeoX's names."""
    sub_group_size: int = 1_000_000_000
    """That of `zero_optimization` in the engine of stage 3 for which it is written."""
    bf16: bool | None = None
    """Whether the engine for which it is written has bf16 enabled, and looks for files that are called so; by default, where
    the weights are of bfloat16."""
    step: int | None = None
    """How many steps the moments are of that are written, where their source does not tell it."""
    name = "deepspeed"
    order = 20

    @property
    def naming(self) -> str:
        return "gpt_neox" if self.pipeline else "hf"

    def __post_init__(self) -> None:
        if self.weights not in ("module", "master"):
            raise LayoutError(f"weights={self.weights!r}: 'module' or 'master' was expected")
        if isinstance(self.parameters, str):
            raise LayoutError(f"parameters={self.parameters!r}: a list of names was expected")
        if self.stage not in (1, 2, 3):
            raise LayoutError(f"stage={self.stage!r}: 1, 2 or 3 was expected")
        if type(self.sub_group_size) is not int or self.sub_group_size < 1:
            raise LayoutError(f"sub_group_size={self.sub_group_size!r}: a number of elements was expected")
        if self.tied or self.cut is not None:
            from .._cuts import check_declared
            from .._zero import is_count

            if not all(isinstance(tie, str) and is_count(layer) for tie, layer in self.tied.items()):
                raise LayoutError(f"tied={dict(self.tied)!r}: ties to layer numbers were expected")
            check_declared(self.cut)

    def matches(self, folder: Folder) -> bool:
        """Say whether the folder has the files of a tag, or `latest` and a folder that has."""
        if folder.entry is not None:
            return False
        listed = folder.names()
        return is_tag(listed) or ("zero/" not in listed and bool(tags(folder, listed)))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the headers of a tag. Damage makes arrays unavailable; a damaged tag that `latest` names is refused."""
        from .._deepspeed import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out the model states, layers and experts of model-parallel ranks, and each rank's partition of the optimizer."""
        from .._zero_writer import lay_out_engine

        lay_out_engine(folder, like, parts, self)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `latest` is in the folder that now gets its name."""


def __getattr__(name: str) -> Any:
    if name != "Cut":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .._cuts import Cut

    return Cut
