"""torch_dist checkpoints of megatron-core; `_megatron_core.py` tells their files."""

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
class MegatronCore:
    """The torch_dist format of megatron-core; the options say what `args` do not."""

    glu_interleave: int | None = None
    """Rows of gate and of up that take turns in the experts' `linear_fc1`; 0 for gate over up."""
    transformer_impl: str | None = None
    """`local` or `transformer_engine`: the layer spec, which the order of flat optimizer states needs, and writing."""
    iteration: int | None = None
    """When writing: the iteration's number; by default the step of the optimizer's states or, where there are none, `release`, for
    which Megatron asks for no optimizer and no random state."""
    distributed_optimizer: bool = True
    """When writing an optimizer's states: whether it is the distributed one that loads them. Experts have one of their own where
    `ep` is more than 1 in the mesh."""
    steps: int | None = None
    """When writing: how many steps the moments are of, where their source does not tell it."""
    hyperparameters: Mapping[str, Any] | None = None
    """When writing: `lr`, `betas`, `eps` and `weight_decay`, where their source does not tell them."""
    scheduler: Mapping[str, Any] | None = None
    """When writing: `opt_param_scheduler`, for which Megatron's training asks, where the source is not Megatron's."""
    name = "megatron_core"
    order = 30
    naming = "megatron"
    has_one_place_for_ties = True

    def __post_init__(self) -> None:
        if self.glu_interleave is not None and (type(self.glu_interleave) is not int or self.glu_interleave < 0):
            raise LayoutError(f"glu_interleave={self.glu_interleave!r}: a number of rows was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether a folder has a `metadata.json` that names a backend of megatron-core, or a tracker that leads to one."""
        save = find_save(folder)
        return save is not None and save.kind == CORE

    def open(self, folder: Folder) -> Checkpoint:
        """Read `.metadata` and `common.pt`; arrays in data files that are absent or damaged are unavailable."""
        from .._megatron_core import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out a container as Megatron's ranks at the places of the mesh write it."""
        from .._megatron_files import Degrees, lay_out_logical
        from .._megatron_optimizer import optimizer_of

        spec = self.transformer_impl or "transformer_engine"
        ep, distributed, hyper = Degrees.of(parts.mesh).ep, self.distributed_optimizer, self.hyperparameters
        optimizer = optimizer_of(like, ep=ep, is_distributed=distributed, hyperparameters=hyper, step=self.steps)
        scheduler = self.scheduler or like.meta.get("opt_param_scheduler")
        lay_out_logical(folder, like.arrays, like.config, parts.mesh, self.iteration, spec, optimizer, scheduler)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `.metadata` and the tracker stand in the folder that now gets its name."""
