"""Legacy Megatron-LM checkpoints (`--ckpt-format torch`); `_megatron_legacy.py` tells their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._megatron_find import CORE, find_save


@dataclass(frozen=True, slots=True, eq=False)
class Megatron:
    """The legacy format of Megatron-LM; the options say what `args` do not, or how it is to be written."""

    gated: bool | None = None
    """Whether `linear_fc1` is a gate over an up projection, where `args` have no `swiglu`."""
    glu_interleave: int | None = None
    """Rows of gate and of up that take turns in the experts' `linear_fc1`, or in each where there are no experts."""
    qkv_order: str | None = None
    """`grouped` or `concatenated` (all queries, keys, values of a rank), where `checkpoint_version` does not tell the truth."""
    virtual: int = 1
    """When writing: into how many chunks of layers a pipeline rank's layers are cut."""
    iteration: int | None = None
    """When writing: the iteration's number; by default the step of the optimizer's states or, where there are none, `release`, for
    which Megatron asks for no optimizer and no random state."""
    distributed_optimizer: bool = True
    """When writing an optimizer's states: whether it is the distributed one that loads them."""
    steps: int | None = None
    """When writing: how many steps the moments are of, where their source does not tell it."""
    hyperparameters: Mapping[str, Any] | None = None
    """When writing: `lr`, `betas`, `eps` and `weight_decay`, where their source does not tell them."""
    scheduler: Mapping[str, Any] | None = None
    """When writing: `opt_param_scheduler`, for which Megatron's training asks, where the source is not Megatron's."""
    name = "megatron"
    order = 35
    naming = "megatron"
    has_one_place_for_ties = True

    def __post_init__(self) -> None:
        if self.qkv_order not in (None, "grouped", "concatenated"):
            raise LayoutError(f"qkv_order={self.qkv_order!r}: 'grouped' or 'concatenated' was expected")
        if self.glu_interleave is not None and (type(self.glu_interleave) is not int or self.glu_interleave < 1):
            raise LayoutError(f"glu_interleave={self.glu_interleave!r}: a number of rows was expected")
        if type(self.virtual) is not int or self.virtual < 1:
            raise LayoutError(f"virtual={self.virtual!r}: a number of chunks was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether a folder has rank folders with models in it, or a tracker that names one that has."""
        save = find_save(folder)
        return save is not None and save.kind != CORE

    def open(self, folder: Folder) -> Checkpoint:
        """Read the pickles of all ranks; those that are absent or damaged are told in `problems`."""
        from .._megatron_legacy import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out a file for each place on the mesh's axes `tp`, `pp` and `ep`; along others, ranks hold the same."""
        from .._megatron_files import Degrees, lay_out_ranks
        from .._megatron_optimizer import training_of

        degrees, distributed = Degrees.of(parts.mesh, self.virtual), self.distributed_optimizer
        training = training_of(like, self.hyperparameters, self.steps, type(self).__name__)
        scheduler = self.scheduler or like.meta.get("opt_param_scheduler")
        lay_out_ranks(folder, like.arrays, like.config, degrees, self.iteration, training, scheduler, is_distributed=distributed)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: the tracker, written when a save is complete, stands in the folder that now gets its name."""
