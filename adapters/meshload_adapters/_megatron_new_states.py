"""The optimizer in a new legacy Megatron rank's files: the mirror of `_megatron_states.py`, which says what goes where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshload.errors import LayoutError, listing

from ._megatron_buffers import buckets
from ._megatron_optimizer import MOMENTS, Training, has_two
from ._megatron_shards import taken_apart
from ._megatron_states import NARROW, Kind, by_buffer, by_group, has_own_bucket, kind_of
from ._pickle import Global
from ._torch_writer import NewTensor, new_scalar, new_tensor

Parameter = tuple[int, str, NewTensor]
"""Chunk, name in it, and tensor."""

GRADIENTS = {"bfloat16": "float32", "float32": "float32"}
"""The dtype in which Megatron keeps gradients, which names a buffer; for float16 that is the run's choice."""


@dataclass(frozen=True, slots=True)
class NewStates:
    """What all ranks' optimizers have in common."""

    training: Training
    is_distributed: bool
    pp: int
    ep: int
    tied: bool

    def optimizer(self, every: Sequence[Parameter]) -> Any:
        """Return what a rank's `model_optim_rng.pt` has under `optimizer`; `every` are its parameters, in module order."""
        separate = has_two((name for _, name, _ in every), self.ep)
        parts = self.training.parts(separate)
        kinds = [kind_of(group) for part in parts for group in part]
        members = by_group(every, separate=separate, decoupled=any(kind[2] for kind in kinds))
        homeless = [name for kind, mine in members.items() if kinds.count(kind) != 1 for _, name, _ in mine]
        if homeless:
            raise LayoutError(
                f"optimizer: the source's param groups do not tell which of them {listing(homeless, 3)} are in: in Megatron groups "
                f"differ by wd_mult (1 for matrices, 0 for biases and what has one dim), is_expert_parallel and is_decoupled_lr"
            )
        found = [self._described(part) if self.is_distributed else self._saved(part, members) for part in parts]
        return found if len(found) > 1 else found[0]

    def _described(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        step = float(self.training.step)
        return {"optimizer": {"param_groups": [{**group, "step": step} for group in groups]}}

    def _saved(self, groups: Sequence[Mapping[str, Any]], members: Mapping[Kind, Sequence[Parameter]]) -> dict[str, Any]:
        """Return an optimizer as torch's Adam has it; Apex's counts its steps by group."""
        step = self.training.step
        state: dict[int, dict[str, NewTensor]] = {}
        described, masters = [], []
        for group in groups:
            mine = [tensor for _, _, tensor in members.get(kind_of(group), ())]
            described.append({**group, "step": step, "params": list(range(len(state), len(state) + len(mine)))})
            masters.append([new_tensor("float32", tensor.shape) for tensor in mine if tensor.dtype in NARROW])
            for tensor in mine:
                state[len(state)] = {"step": new_scalar(step), **{kind: new_tensor("float32", tensor.shape) for kind in MOMENTS}}
        inner = {"state": state, "param_groups": described}
        return {"optimizer": inner, "fp32_from_fp16_params": masters} if self.training.is_small else inner

    def buffers(self, every: Sequence[Parameter], e: int) -> Any:
        """Return a rank's `distrib_optim.pt`. Of the first expert rank it holds all, of others the experts' alone."""
        if not has_two((name for _, name, _ in every), self.ep):
            return self._flat(every)
        experts = [p for p in every if taken_apart(p[1]).is_expert]
        others = [p for p in every if not taken_apart(p[1]).is_expert]
        return [None if e else self._flat(others), self._flat(experts)]

    def _flat(self, every: Sequence[Parameter]) -> dict[Any, Any]:
        """Return the buffers of some parameters."""
        found: dict[Any, Any] = {"buckets_coalesced": True}
        for n, ((_, dtype), members) in enumerate(by_buffer(every).items()):
            if dtype not in GRADIENTS:
                raise LayoutError(
                    f"optimizer: in which dtype gradients of {dtype} parameters are kept names their buffer, and is told nowhere; "
                    f"say Megatron(distributed_optimizer=False)"
                )
            sizes = [math.prod(tensor.shape) for _, _, tensor in members]
            alone = {i for i, (_, name, _) in enumerate(members) if has_own_bucket(name, tied=self.tied, pp=self.pp)}
            size = sum(bucket.size for bucket in buckets(sizes, alone=alone))
            flat = {kind: new_tensor("float32", (size,)) for kind in ("param", *MOMENTS)}
            found[n] = {(Global("torch", dtype), Global("torch", GRADIENTS[dtype])): {**flat, "numel_unpadded": size}}
        return found
