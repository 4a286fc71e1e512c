"""The optimizer states of a legacy Megatron rank: whose they are, as no file tells, by the order of the rank's parameters.

Without the distributed optimizer, state `i` belongs to the `i`-th parameter of the param groups. A group has, in module order, the
parameters that are decayed (`wd_mult` 1: neither biases nor of one dim) or not, and that are experts' or not. The distributed
optimizer's file has flat buffers, see `_megatron_buffers.py`. What does not fit in number, shape or dtype is refused. New ranks'
files are laid out by the same rules, see `_megatron_new_states.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from meshload.box import Shape

from ._megatron import bucket_limit, number, plain
from ._megatron_buffers import Refused, laid_out
from ._megatron_ranks import BUFFERS_FILE, COPY, Rank
from ._megatron_shards import EMBEDDING, HEAD, Shard, parameters, taken_apart
from ._pickle import Global
from ._torch_file import DTYPES, Tensor, TorchFile
from ._zero import dict_of, scalar


@dataclass(frozen=True, slots=True)
class Model:
    """What the states' places depend on."""

    args: Mapping[str, Any]
    pp: int
    ep: int
    tied: bool


def shard_of(file: TorchFile, source: int, tensor: Tensor) -> Shard:
    offset = file.extents[tensor.key][0] + tensor.offset
    return Shard(source, offset, tensor.shape, tensor.strides, DTYPES[tensor.dtype])


Moment = tuple[str, int, str, Shard]
"""Kind, chunk, parameter, and where it lies."""

Parameter = tuple[int, str, Tensor]
"""Chunk, name and tensor."""

NARROW = ("bfloat16", "float16")
"""Parameters of these dtypes have masters."""

_KINDS = {"param": "master", "master_param": "master"}


def moments_of(rank: Rank, i: int, run: Model) -> Iterator[Moment]:
    """Go through a rank's optimizer arrays, whose names are found by their order; what does not fit raises `Refused`."""
    assert rank.file is not None
    parts = optimizers_in(rank.root.get("optimizer"))
    every: list[Parameter] = [(v, name, chunk[name]) for v, chunk in enumerate(rank.chunks) for name in parameters(chunk)]
    if rank.buffers_why:
        raise Refused(rank.buffers_why)
    if rank.buffers is not None:
        yield from _buffers(rank, rank.buffers, 2 * i + 1, parts, every, run)
        return
    separate = any(_is_expert(group) for part in parts for group in groups_of(part))
    for part in parts:
        yield from _states(rank, rank.file, 2 * i, part, every, separate, run)


class _Typed(Protocol):
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...


_T = TypeVar("_T", bound=_Typed)

Kind = tuple[float, bool, bool]
"""What a param group's members have in common: `wd_mult`, `is_expert_parallel`, `is_decoupled_lr`."""


def kind_of(group: Mapping[Any, Any]) -> Kind:
    return group.get("wd_mult", -1.0), _is_expert(group), group.get("is_decoupled_lr") is True


def by_group(
    every: Iterable[tuple[int, str, _T]], *, separate: bool, decoupled: bool, decays_heads: bool = False
) -> dict[Kind, list[tuple[int, str, _T]]]:
    """Return a rank's parameters by the kind of their param group, in module order.

    `separate`: whether experts' have groups of their own; `decoupled`: whether embedding and head do; `decays_heads`: whether the
    norms of queries and keys decay.
    """
    found: dict[Kind, list[tuple[int, str, _T]]] = {}
    for parameter in every:
        _, name, tensor = parameter
        decays = len(tensor.shape) > 1 and not name.endswith(".bias")
        decays = decays or (decays_heads and re.search(r"\.[qk]_layernorm\.", name) is not None)
        kind = (float(decays), separate and taken_apart(name).is_expert, decoupled and name in (EMBEDDING, HEAD, COPY))
        found.setdefault(kind, []).append(parameter)
    return found


def by_buffer(every: Iterable[tuple[int, str, _T]]) -> dict[tuple[int, str], list[tuple[int, str, _T]]]:
    """Return the parameters that share a buffer of the distributed optimizer: those of a chunk and a dtype."""
    found: dict[tuple[int, str], list[tuple[int, str, _T]]] = {}
    for parameter in every:
        found.setdefault((parameter[0], parameter[2].dtype), []).append(parameter)
    return found


def has_own_bucket(name: str, *, tied: bool, pp: int) -> bool:
    """Say whether a parameter has a bucket alone: an embedding that two stages share."""
    return tied and pp > 1 and name in (EMBEDDING, HEAD)


def optimizers_in(found: Any) -> list[Mapping[Any, Any]]:
    """Return the optimizers that were saved: one, or several in a list or under numbers, of which the second is the experts'."""
    numbered = [found[i] for i in sorted(k for k in found if type(k) is int)] if type(found) is dict else []
    return [part for part in (found if type(found) is list else numbered or [found]) if type(part) is dict]


def told_of(parts: Sequence[tuple[TorchFile, Mapping[Any, Any]]]) -> dict[str, Any]:
    """Return what optimizers tell of themselves: the groups of all, and the `step` of all parameters; nothing of none."""
    groups = [{k: plain(v) for k, v in group.items() if k != "params"} for _, part in parts for group in groups_of(part)]
    step = next((step for file, part in parts if (step := _step(file, part)) is not None), None)
    return ({"param_groups": groups} if parts else {}) | ({} if step is None else {"step": step})


def _step(file: TorchFile, part: Mapping[Any, Any]) -> float | None:
    """Return the steps of an optimizer's parameters: they stand beside its groups, in a parameter's state, or in its groups.

    torch's Adam counts in the states, and what it found in groups stays as it was loaded; Apex's counts in groups alone.
    """
    state = dict_of(_inner(part).get("state"))
    told = [state.get("common_step"), dict_of(next(iter(state.values()), None)).get("step")]
    told += [group.get("step") for group in groups_of(part)]
    return next((step for step in (scalar(file, one) for one in told) if step is not None), None)


def _inner(part: Mapping[Any, Any]) -> Mapping[Any, Any]:
    inner = part.get("optimizer")
    return inner if type(inner) is dict else part


def groups_of(part: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    groups = _inner(part).get("param_groups")
    return [g for g in groups if type(g) is dict] if type(groups) is list else []


def _indices(group: Mapping[Any, Any]) -> list[int]:
    found = group.get("params")
    return found if type(found) is list and all(type(i) is int for i in found) else []


def _is_expert(group: Mapping[Any, Any]) -> bool:
    return group.get("is_expert_parallel") is True


def _states(
    rank: Rank,
    file: TorchFile,
    source: int,
    part: Mapping[Any, Any],
    every: Sequence[Parameter],
    separate: bool,
    run: Model,
) -> Iterator[Moment]:
    """Go through the states of one optimizer that torch saved, and its masters."""
    state = _inner(part).get("state")
    masters = part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))
    if type(state) is not dict or (not state and not masters):
        if run.args.get("use_distributed_optimizer") is True:
            raise Refused(f"{rank.folder}/{BUFFERS_FILE} is not there")
        return
    groups = groups_of(part)
    members = _members(rank, groups, every, separate, run)
    for g, (group, parameters_) in enumerate(zip(groups, members, strict=True)):
        for index, parameter in zip(_indices(group), parameters_, strict=True):
            entries = state.get(index)
            for kind, value in entries.items() if type(entries) is dict else ():
                if type(value) is Tensor and (value.shape or not parameter[2].shape):
                    yield _moment(rank, file, source, _KINDS.get(kind, str(kind)), parameter, value)
        if masters is not None:
            yield from _masters(rank, file, source, masters, g, parameters_)


def _masters(rank: Rank, file: TorchFile, source: int, masters: Any, g: int, members: Sequence[Parameter]) -> Iterator[Moment]:
    """Go through a group's masters: those of its parameters that are 16 bits wide have one."""
    found = masters[g] if type(masters) is list and g < len(masters) else None
    narrow = [m for m in members if m[2].dtype in NARROW]
    if type(found) is not list or len(found) != len(narrow):
        n = len(found) if type(found) is list else "no list of"
        raise Refused(f"{rank.label}: group {g} has {n} masters for {len(narrow)} parameters of 16 bits")
    for parameter, value in zip(narrow, found, strict=True):
        yield _moment(rank, file, source, "master", parameter, value)


def _moment(rank: Rank, file: TorchFile, source: int, kind: str, parameter: Parameter, value: Any) -> Moment:
    v, name, tensor = parameter
    if type(value) is not Tensor or value.shape != tensor.shape:
        shape = value.shape if type(value) is Tensor else type(value).__name__
        raise Refused(f"{rank.label}: the {kind} in the place of {name} has shape {shape}, the parameter has {tensor.shape}")
    why = file.refusal(value)
    if why:
        raise Refused(f"{rank.label}: the {kind} of {name}: {why}")
    return kind, v, name, shard_of(file, source, value)


def _members(
    rank: Rank, groups: Sequence[Mapping[Any, Any]], every: Sequence[Parameter], separate: bool, run: Model
) -> list[list[Parameter]]:
    """Return the parameters of each param group: those of its kind, in module order."""
    kinds = [kind_of(g) for g in groups]
    if any(type(wd) not in (int, float) or wd not in (0, 1) for wd, _, _ in kinds):
        raise Refused(f"{rank.label}: a param group's wd_mult is neither 0 nor 1, so which parameters it has is not known")
    used = [kind for kind, g in zip(kinds, groups, strict=True) if _indices(g)]
    if len(set(used)) != len(used):
        raise Refused(f"{rank.label}: param groups differ by more than weight decay, so which parameters each has is not known")
    decoupled = any(kind[2] for kind in used)
    decays_heads = run.args.get("apply_wd_to_qk_layernorm") is True
    by_kind = by_group(every, separate=separate, decoupled=decoupled, decays_heads=decays_heads)
    found = []
    for kind, group in zip(kinds, groups, strict=True):
        count = len(_indices(group))
        there = by_kind.get(kind, []) if count else []
        if len(there) != count:
            raise Refused(
                f"{rank.label}: a param group (wd_mult {kind[0]}, experts {kind[1]}) has {count} parameters, the model "
                f"{len(there)} of its kind; some may be frozen, and which is not stored"
            )
        found.append(there)
    return found


def _buffers(
    rank: Rank,
    file: TorchFile,
    source: int,
    parts: Sequence[Mapping[Any, Any]],
    every: Sequence[Parameter],
    run: Model,
) -> Iterator[Moment]:
    """Go through the flat buffers of the distributed optimizer."""
    root = file.root
    entries = root if type(root) is list else [root]
    experts = [any(map(_is_expert, groups_of(part))) for part in parts] or [False]
    if len(entries) != len(experts) or experts.count(False) > 1 or experts.count(True) > 1:
        raise Refused(
            f"{rank.folder}/{BUFFERS_FILE}: holds {len(entries)} optimizers, {len(experts)} were expected, one for the experts' "
            f"parameters and one for the others"
        )
    apart = run.ep > 1
    for entry, is_expert in zip(entries, experts, strict=True):
        if entry is None:  # another rank's file has it
            continue
        mine = [m for m in every if (apart and taken_apart(m[1]).is_expert) == is_expert]
        buffers = by_buffer(mine)
        stored = _stored_buffers(rank, entry)
        if [dtype for dtype, _ in stored] != [dtype for _, dtype in buffers]:
            raise Refused(
                f"{rank.folder}/{BUFFERS_FILE}: its buffers are of {[d for d, _ in stored]}, the model's chunks give "
                f"{[d for _, d in buffers]}"
            )
        for (_, values), members in zip(stored, buffers.values(), strict=True):
            yield from _unpacked(rank, file, source, values, members, run)


def _stored_buffers(rank: Rank, entry: Any) -> list[tuple[str, Any]]:
    """Return the parameters' dtype and the values of each buffer."""
    if type(entry) is not dict:
        raise Refused(f"{rank.folder}/{BUFFERS_FILE}: an optimizer is {type(entry).__name__}, a dict was expected")
    found = []
    for i in sorted(k for k in entry if type(k) is int):
        for key, values in entry[i].items() if type(entry[i]) is dict else ():
            dtype = key[0] if type(key) is tuple and key else key
            found.append((dtype.name if isinstance(dtype, Global) else str(dtype), values))
    return found


def _unpacked(rank: Rank, file: TorchFile, source: int, values: Any, members: Sequence[Parameter], run: Model) -> Iterator[Moment]:
    """Go through the parameters in one buffer, whose buckets follow one another or, before `buckets_coalesced`, are a list."""
    sizes = [math.prod(m[2].shape) for m in members]
    listed = [v for v in values if type(v) is dict] if type(values) is list else None
    first = (listed[0] if listed else {}) if listed is not None else values
    if type(first) is not dict or not all(type(first.get(kind)) is Tensor for kind in ("param", "exp_avg", "exp_avg_sq")):
        raise Refused(f"{rank.folder}/{BUFFERS_FILE}: a buffer has no param, exp_avg and exp_avg_sq")
    limit = bucket_limit(run.args, rank.p, members[0][0])
    alone = {n for n, m in enumerate(members) if has_own_bucket(m[1], tied=run.tied, pp=run.pp)}
    held = [_length(v.get("param")) for v in listed] if listed is not None else [_length(first.get("param"))]
    expected = [first["numel_unpadded"]] if listed is None and type(first.get("numel_unpadded")) is int else held
    replicas = number(run.args, "data_parallel_size", 1) or 1
    made = laid_out(sizes, expected, limit=limit, alone=alone, coalesced=listed is None, replicas=replicas)
    if made is None:
        raise Refused(
            f"{rank.folder}/{BUFFERS_FILE}: a buffer has {expected[:4]} elements, its {len(sizes)} parameters have {sum(sizes)}; "
            f"no known way to lay them out gives that number"
        )
    base = 0
    for b, bucket in enumerate(made):
        of = listed[b] if listed is not None else first
        for kind, value in of.items():
            if type(value) is not Tensor:
                continue
            why = file.refusal(value) or ("" if len(value.shape) == 1 else f"its shape is {value.shape}, one dim was expected")
            if why or value.dtype not in DTYPES:
                raise Refused(f"{rank.folder}/{BUFFERS_FILE}: {kind}: {why or value.dtype}")
            whole = shard_of(file, source, value)
            for n, start in zip(bucket.numbers, bucket.starts, strict=True):
                v, name, tensor = members[n]
                shard = _inside(whole, base + start, tensor.shape)
                if base + start + sizes[n] > value.shape[0]:
                    raise Refused(f"{rank.folder}/{BUFFERS_FILE}: {kind} has {value.shape[0]} elements, {name} ends behind them")
                yield _KINDS.get(kind, str(kind)), v, name, shard
        base += bucket.size if listed is None else 0


def _inside(flat: Shard, start: int, shape: tuple[int, ...]) -> Shard:
    """Return the array of a shape that begins at an element of a flat one."""
    width = flat.strides[0]
    strides, inner = [], width
    for n in reversed(shape):
        strides.append(inner)
        inner *= n
    return Shard(flat.source, flat.offset + start * width, shape, tuple(reversed(strides)), flat.dtype)


def _length(found: Any) -> int:
    return found.shape[0] if type(found) is Tensor and len(found.shape) == 1 else -1
