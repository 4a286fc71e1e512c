"""What new files of DeepSpeed say beside their arrays: the model states, the optimizer's step and its groups.

DeepSpeed's loaders (0.19) demand the keys that are written here, and take from the running engine whatever is left out: learning
rates of groups that are not told, a loss scale, the counts of samples. An engine with a scheduler needs `lr_scheduler`, which goes
along where the source has it, or `load_lr_scheduler_states=False`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshload.box import Shape
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.frameworks import is_floating
from meshload.steps import checked_step, told_step

from ._param_groups import told_groups
from ._pickle import Global
from ._pickle_writer import Call, Instance
from ._torch_writer import NewTensor, dtype_of, new_scalar, new_tensor
from ._zero import consecutive, is_number

VERSION = "0.19.8"
"""DeepSpeed's, whose fields these are."""

UNIVERSAL_VERSION = 0.4


@dataclass(frozen=True, slots=True)
class Training:
    """What an optimizer trains, and what it keeps of it."""

    shape_of: Mapping[str, Shape]
    """The parameters."""
    kinds: Sequence[str]
    """The moments, by the names that optimizers give them."""
    step: int | float | None
    """How many steps they are of."""
    groups: Sequence[Mapping[str, Any]]
    """The hyperparameters of its groups, as far as they are known."""

    @property
    def count(self) -> int:
        """Steps, as a number of something."""
        return int(self.step or 0)


def training_of(like: Checkpoint, step: int | None, writer: str) -> Training:
    """Return what is trained: what has moments or masters that go along, else all floating arrays but buffers.

    What has no elements is none of it: DeepSpeed's optimizers leave it out.
    `writer` is the class of the format, for messages.
    """
    kinds = [kind for kind in like.optimizer if kind != "master"]
    wrong = [kind for kind in kinds if not kind.isidentifier() or kind in ("fp32", "step", "param")]
    if wrong:
        raise LayoutError(f"optimizer: {writer} has no place for {listing(wrong)}; name others")
    buffers = set(like.meta.get("buffers") or ())
    owned = {n for arrays in like.optimizer.values() for n in arrays}
    held = {n: a for n, a in like.arrays.items() if a.size}
    names = [n for n, a in held.items() if (n in owned if owned else is_floating(a.dtype) and n not in buffers)]
    for kind, arrays in like.optimizer.items():
        lacking = [n for n in names if n not in arrays]
        more = [n for n in arrays if n not in like.arrays]
        if lacking or more:
            what = f"{len(lacking)} lack it: {listing(lacking, 3)}" if lacking else f"no weight is called {listing(more, 3)}"
            raise LayoutError(f"optimizer: {writer} has {kind} of all trained weights or of none; of {len(names)}, {what}")
    small = [n for n in names if like.arrays[n].dtype.itemsize == 1]
    if small:
        raise LayoutError(f"{listing(small, 3)}: {like.arrays[small[0]].dtype.name} has no fp32 master; give what is not quantised")
    told = told_step(like) if step is None else checked_step(step)
    if kinds and told is None:
        raise LayoutError(
            f"optimizer: which step {listing(kinds)} are of is told nowhere, and Adam's next one depends on it; "
            f"say it with {writer}(step=...)"
        )
    return Training({n: like.arrays[n].shape for n in names}, kinds, told, _told_groups(like) if owned else [])


def _told_groups(like: Checkpoint) -> list[dict[str, Any]]:
    optimizer = like.meta.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        groups = [hyper for hyper, _ in told_groups(like)]
    return [{k: v for k, v in g.items() if k != "params" and _is_plain(v)} for g in groups]


def _is_plain(value: Any) -> bool:
    """Say whether this is of numbers alone: what else a reader gives as text, its writer would not know again."""
    return value is None or is_number(value) or type(value) is bool or (type(value) in (list, tuple) and all(map(_is_plain, value)))


# --- model states -----------------------------------------------------------------------------------------------------


def model_states(
    like: Checkpoint,
    module: Mapping[str, NewTensor] | None,
    shapes: Sequence[Mapping[str, Shape]],
    step: int,
    info: Mapping[str, Any] | None = None,
    ranks: int = 1,
    degrees: tuple[int, int] = (1, 1),
    is_first: bool = True,
) -> dict[str, Any]:
    """Return what a model-parallel rank's file of model states holds; the first rank's names what is tied.

    `module` is None in pipelines; `shapes` are the parameters of each group, `info` what universal ones say, `ranks` share the
    optimizer, and `degrees` are the numbers of pipeline stages and of tensor-parallel ranks.
    """
    state = like.meta.get("state")
    state = state if isinstance(state, Mapping) else {}
    scheduler = state.get("lr_scheduler")
    is_plain = isinstance(scheduler, dict) and all(type(k) is str and _is_plain(v) for k, v in scheduler.items())
    skipped = state.get("skipped_steps")
    return {
        "module": None if module is None else dict(module),
        "buffer_names": [n for n in like.meta.get("buffers") or () if n in (module or ())],
        "optimizer": None,
        "param_shapes": [{name: size(shape) for name, shape in group.items()} for group in shapes],
        "frozen_param_shapes": None,
        "shared_params": {a: n for a, n in like.aliases.items() if n in like.arrays} if is_first else {},
        "frozen_param_fragments": None,
        "lr_scheduler": scheduler if is_plain else None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": skipped if type(skipped) is int else 0,
        "global_steps": step,
        "dp_world_size": ranks,
        "mp_world_size": math.prod(degrees),
        "checkpoint_parallel_dimensions": {"pp_degree": degrees[0], "tp_degree": degrees[1]},
        "ds_config": {},
        "ds_version": VERSION,
        **({} if info is None else {"universal_checkpoint_info": dict(info)}),
    }


def module_of(like: Checkpoint) -> dict[str, NewTensor]:
    """Return a state dict; names that are tied are the same tensor."""
    module = {name: new_tensor(dtype_of(array), array.shape) for name, array in like.arrays.items()}
    return module | {a: module[n] for a, n in like.aliases.items() if n in module}


def size(shape: Shape) -> Call:
    """Return a `torch.Size`."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def zero_stage(number: int) -> Call:
    """Return DeepSpeed's word for a stage of ZeRO."""
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


# --- partitions -------------------------------------------------------------------------------------------------------

ALIGNMENT = 2
"""Elements: stages 1 and 2 pad a group to a multiple of this and the number of ranks."""


def partitions(
    training: Training,
    groups: Sequence[Mapping[str, Shape]],
    dtypes: Mapping[str, str],
    ranks: int,
    number: int,
    experts: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Go through what the optimizer's files of stage 1 or 2 hold, by rank; `dtypes` are those of the moments.

    Masters are without their padding, moments with it. Loss scale and clipping are the engine's own. `experts` tells of each group
    how many expert-parallel ranks have a group of their own, 0 where it is not of experts: every so many-th rank shares one.
    """
    sharing = [ranks // (n or 1) for n in experts]
    counts = [sum(math.prod(shape) for shape in group.values()) for group in groups]
    sizes = [-(-count // (ALIGNMENT * n)) * ALIGNMENT for count, n in zip(counts, sharing, strict=True)]
    cuts = [consecutive(of, [0] * len(of), size, n) for of, size, n in zip(groups, sizes, sharing, strict=True)]
    told = training.groups or [{}] * len(groups)
    marks = [{"name": f"ep_size_{n}", "moe": True} if n else {} for n in experts]
    base = [{**group, **mark, "params": [g]} for g, (group, mark) in enumerate(zip(told, marks, strict=True))]
    for rank in range(ranks):
        place = [rank // (n or 1) for n in experts]
        held = [min(size, max(0, count - p * size)) for count, size, p in zip(counts, sizes, place, strict=True)]
        moments = [{kind: new_tensor(dtype, (size,)) for kind, dtype in dtypes.items()} for size in sizes]
        step = {} if training.step is None else {"step": training.step}
        state = {g: {**{k: new_scalar(v) for k, v in step.items()}, **of} for g, of in enumerate(moments) if of}
        inner = {
            "base_optimizer_state": {"state": state, "param_groups": base},
            "single_partition_of_fp32_groups": [new_tensor("float32", (count,)) for count in held],
            "zero_stage": zero_stage(number),
            "group_paddings": [size - count for size, count in zip(sizes, held, strict=True)],
            "param_alignment_paddings": [[0] * len(group) for group in groups],
            "partition_count": sharing,
            "ds_version": VERSION,
            "param_slice_mappings": [
                {n: _address(*at) for n, at in cut.fragments(p).items()} for cut, p in zip(cuts, place, strict=True)
            ],
        }
        yield {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": VERSION}


def partitions_of_stage3(
    training: Training, groups: Sequence[Sequence[Mapping[str, Shape]]], dtypes: Mapping[str, str], ranks: int
) -> Iterator[dict[str, Any]]:
    """Go through what the optimizer's files of stage 3 hold, by rank; a group is cut into sub-groups, each one flat tensor."""
    sizes = [sum(-(-math.prod(shape) // ranks) for shape in sub.values()) for group in groups for sub in group]
    told = training.groups or [{}] * len(groups)
    first = [sum(len(group) for group in groups[:g]) for g in range(len(groups) + 1)]
    base = [{**group, "params": list(range(first[g], first[g + 1]))} for g, group in enumerate(told)]
    for _ in range(ranks):
        state = {}
        for i, size in enumerate(sizes) if dtypes else ():
            step = {} if training.step is None else {"step": new_scalar(training.step)}
            state[i] = step | {kind: new_tensor(dtype, (size,)) for kind, dtype in dtypes.items()}
        inner = {
            "zero_stage": zero_stage(3),
            "loss_scaler": Instance(
                Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), {"cur_scale": 1.0, "dynamic": False}
            ),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": state, "param_groups": base},
            "fp32_flat_groups": [new_tensor("float32", (size,)) for size in sizes],
        }
        yield {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": VERSION}


def _address(count: int, start: int) -> Instance:
    return Instance(Global("deepspeed.utils.tensor_fragment", "fragment_address"), {"numel": count, "start": start})
