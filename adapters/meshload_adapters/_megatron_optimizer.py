"""An optimizer's state in a new checkpoint of Megatron: its step and groups, and, in a torch_dist one, its arrays and `common.pt`.

    optimizer.state.{exp_avg, exp_avg_sq}.KEY     both kinds
    optimizer.state.param.KEY                     the distributed optimizer's masters, `fully_reshardable`
    optimizer.state.fp32_param.KEY                the masters of others, where the weights are of 16 bits

Megatron looks its groups up in `param_groups` by `wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr`: matrices decay,
biases and what has one dim do not. Which weights a source decayed is of no account there. Where experts are shared over ranks,
ep > 1, there are two optimizers, numbered, of which the second has the experts' groups; their arrays are called alike, without the
prefix `chained_{n}.` (`chained_optim_avoid_prefix`).

Source: https://github.com/NVIDIA/Megatron-LM, `megatron/core/optimizer`, 0.16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.steps import checked_step, told_step

from ._megatron_shards import taken_apart
from ._param_groups import told_groups
from ._torch_writer import new_scalar

MOMENTS = ("exp_avg", "exp_avg_sq")

NEEDED = ("lr", "betas", "eps", "weight_decay")
"""Without these Adam takes no step."""

FLAGS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""What torch's Adam keeps besides; it has defaults."""

SHARDING = "fully_reshardable"


@dataclass(frozen=True, slots=True)
class Training:
    """What Megatron's files say of an optimizer beside its arrays."""

    step: int
    groups: Sequence[Mapping[str, Any]]
    """As Megatron looks them up, without `params` and `step`."""
    is_small: bool
    """Whether weights are of 16 bits, and have masters."""

    def parts(self, two: bool) -> list[list[dict[str, Any]]]:
        """Return the groups of each optimizer, those that decay first; of `two`, the second has the experts'."""
        dense = sorted((dict(g) for g in self.groups if not g.get("is_expert_parallel")), key=lambda group: -group["wd_mult"])
        own = [dict(g) for g in self.groups if g.get("is_expert_parallel")]
        own = own or [{**group, "is_expert_parallel": True} for group in dense if group["wd_mult"]]
        return [dense, own] if two else [dense]


def has_two(names: Iterable[str], ep: int) -> bool:
    """Say whether experts among weights have an optimizer of their own: where they are shared over `ep` > 1 ranks."""
    return ep > 1 and any(taken_apart(name).is_expert for name in names)


def training_of(like: Checkpoint, hyperparameters: Mapping[str, Any] | None, step: int | None, option: str) -> Training | None:
    """Return what is to be said of a checkpoint's optimizer; None where it has none. `option`: the class of the format."""
    if not like.optimizer:
        return None
    for kind in MOMENTS:
        lacking = [name for name in like.arrays if name not in like.optimizer.get(kind, ())]
        if lacking:
            raise LayoutError(
                f"optimizer: Megatron has {kind} of all weights; of {len(like.arrays)}, {listing(lacking, 3)} lack it"
            )
    count = told_step(like) if step is None else checked_step(step)
    if count is None:
        raise LayoutError(
            f"optimizer: which step the moments are of is told nowhere, and Adam's next one depends on it; say it with "
            f"{option}(steps=...)"
        )
    is_small = any(array.dtype != np.float32 for array in like.arrays.values())
    return Training(count, _groups(like, hyperparameters, option), is_small)


@dataclass(frozen=True, slots=True)
class NewOptimizer:
    """What is to be stored."""

    arrays: Mapping[str, Mapping[str, Array]]
    """By Megatron's words for their kinds, then by the weight's name."""
    common: Mapping[Any, Any]
    """`common.pt["optimizer"]`; by number, where there are two."""
    step: int
    is_distributed: bool


def optimizer_of(
    like: Checkpoint, *, ep: int, is_distributed: bool, hyperparameters: Mapping[str, Any] | None, step: int | None
) -> NewOptimizer | None:
    """Return the optimizer of a checkpoint, for `ep` expert-parallel ranks; None where it has none."""
    training = training_of(like, hyperparameters, step, "MegatronCore")
    if training is None:
        return None
    count, is_small = training.step, training.is_small
    arrays: dict[str, Mapping[str, Array]] = {kind: _named(like.optimizer[kind]) for kind in MOMENTS}
    if is_distributed or is_small:
        masters = like.optimizer.get("master") or {n: replace(a, dtype=np.dtype("f4"), stored=None) for n, a in like.arrays.items()}
        arrays["param" if is_distributed else "fp32_param"] = _named(masters)
    parts = training.parts(has_two(like.arrays, ep))
    told: list[dict[str, Any]]
    if is_distributed:
        counted = [[{**group, "step": float(count)} for group in part] for part in parts]
        told = [{"optimizer": {"param_groups": part}, "param_state_sharding_type": SHARDING} for part in counted]
    else:
        found = [{"state": {"common_step": new_scalar(count)}, "param_groups": part} for part in parts]
        told = [{"optimizer": part} if is_small else part for part in found]
    return NewOptimizer(arrays, told[0] if len(told) == 1 else dict(enumerate(told)), count, is_distributed)


def _named(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays that are called like their weights."""
    return {name: replace(array, name=name) for name, array in arrays.items()}


def _groups(like: Checkpoint, given: Mapping[str, Any] | None, option: str) -> list[dict[str, Any]]:
    """Return the group that decays, and the one that does not; a source's of Megatron as they are."""
    told = [{**hyper, **(given or {})} for hyper, _ in told_groups(like)] or [dict(given or {})]
    if {group.get("wd_mult") for group in told} == {0.0, 1.0}:
        return [{key: value for key, value in group.items() if key not in ("params", "step")} for group in told]
    found = {key: [group[key] for group in told if key in group] for key in (*NEEDED, *FLAGS)}
    found["weight_decay"] = [w for w in found["weight_decay"] if w] or found["weight_decay"]  # a group without has no say
    odd = {key: values for key, values in found.items() if any(value != values[0] for value in values)}
    lacking = [key for key in NEEDED if not found[key]]
    if odd or lacking:
        which = f"differ between groups in {listing(odd)}" if odd else f"are not all told: {listing(lacking)} lack"
        raise LayoutError(f"optimizer: its hyperparameters {which}; say them with {option}(hyperparameters={{'lr': ...}})")
    same = {key: values[0] for key, values in found.items() if values}
    key = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    return [{**key, **same, "wd_mult": 1.0}, {**key, **same, "wd_mult": 0.0, "weight_decay": 0.0}]
