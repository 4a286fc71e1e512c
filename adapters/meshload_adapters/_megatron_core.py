"""megatron-core checkpoints (`--ckpt-format torch_dist`): a torch DCP container of logical arrays.

    iter_0002000/metadata.json      {"sharded_backend": "torch_dist", ...}
    iter_0002000/common.pt          torch.save of what is not sharded: `args`, `iteration`, `checkpoint_version`, scheduler
    iter_0002000/.metadata          and __{rank}_{k}.distcp: see `_distcp.py`

Tensor and pipeline parallelism are resolved by the chunks' offsets, so no mesh is needed to read the weights. Keys are names of
the full model, spelled as Transformer Engine does. By default layers are stacked, `decoder.layers.self_attention.linear_qkv.weight`
is [layer, ...], and experts within them, `decoder.layers.mlp.experts.experts.linear_fc1.weight` is [layer, expert, ...]; where
layers are not alike, each has keys of its own. With `singleton_local_shards` each expert has too, and gate and up are `..weight_w`
and `..weight_v`. Gated `linear_fc1` is all gate over all up; the vocabulary is padded as in the run. Objects are
`KEY/shard_{index}_{shape}`; `_extra_state` and `rng_state` are no weights.

Optimizer arrays, by `param_state_sharding_type`:

    none, or fully_reshardable    optimizer.state.{exp_avg, exp_avg_sq, fp32_param or param}.KEY, like the weight
    fully_sharded_model_space     the same keys (before 0.15), flattened: [X/x, Y/y, x*y] for shards [x, y] of [X, Y]
    dp_reshardable                optimizer.distributed.dp_group_idx_{i}.gbuf_idx_{b}.dtype_{..}.bucket_idx_{k}.{kind}: flat
    dp_zero_gather_scatter        an object ...dp_group_idx_{i}.param_state: the `distrib_optim.pt` of the legacy format

The flat ones tell no names: the parameters of each model-parallel rank are worked out from `args`, in the order in which the layer
spec makes its modules; sizes must fit. `i` counts tensor ranks fastest, then (for experts: expert ranks, then) pipeline ranks.
Several optimizers have a prefix `chained_{n}.`, of which 1 is the experts'; those that are like the weights lack it since 0.14. Why
they are refused, where they are, stands in `unavailable["optimizer.states"]`. `param_groups` and step of flat ones are an object,
`optimizer.distributed.dp_group_idx_{i}.optimizer`; those of others are in `common.pt`, by number where there are several.

Source: https://github.com/NVIDIA/Megatron-LM, `megatron/core/dist_checkpointing` and `megatron/core/optimizer`. Tried with
megatron-core 0.13, 0.15 and 0.16. The zarr backend (before 0.13) and `fsdp_dtensor` are not read here.

Written are weights, stacked where layers are alike, in chunks as the axes `tp`, `pp` and `ep` of the mesh cut them, with `args` and
empty `_extra_state`s. Spelled for Transformer Engine unless `transformer_impl="local"`, which differs in the norms before experts.
The vocabulary is not padded. Load it without random state; and without optimizer, or with moments, masters and their step where
they are converted: of the distributed optimizer as `fully_reshardable` (0.15 and later load it), or of others with
`distributed_optimizer=False`, in the folder of their iteration. Where the mesh has `ep` > 1, experts have an optimizer of their
own, for which Megatron asks on any such mesh, and on no other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshload.array import Array, concatenate
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, SourceError, listing
from meshload.source import Folder, read_bytes

from ._distcp import Found, Listing, find_arrays, read_listing
from ._megatron import REFUSED, arguments, config_of, number, plain
from ._megatron_buffers import Refused
from ._megatron_find import CORE, Save, find_save, lacking
from ._megatron_flat import BUCKET, KINDS, PARAM_STATE, Run, buckets_of, groups_in, states_of, unpacked
from ._megatron_shards import EMBEDDING, GATED, HEAD, taken_apart
from ._megatron_states import optimizers_in, told_of
from ._torch_file import TorchFile

if TYPE_CHECKING:
    from .formats.megatron_core import MegatronCore

MOST = 1 << 20
"""Layers times experts in one array; more are a hostile file's."""

BACKENDS = {
    "zarr": "a zarr container, which megatron-core wrote before 0.13; load and save it with 0.12, which reads both",
}


def checkpoint_in(folder: Folder, options: MegatronCore) -> Checkpoint:
    """Read `.metadata` and `common.pt`; arrays in data files that are absent or damaged are unavailable."""
    save = find_save(folder)
    if save is None or save.kind != CORE or save.why:
        raise FormatError((save.why if save else "") or f"{folder.name}: has no metadata.json of megatron-core")
    _check_finished(save)
    common, optimizers, problems = _common(save.folder)
    args = arguments(common.get("args"))
    listed = read_listing([save.folder.file(".metadata")])
    found = find_arrays(listed, save.folder)
    problems += [Problem(text, file=file) for file, text in found.damage.items()]
    try:
        optimizers += groups_in(listed, found)
    except Refused as error:
        problems.append(Problem(f"{error}; so the optimizer's hyperparameters are not known"))
    keys = _Keys.of(found, listed)
    weights = _Full(args, _interleave(options, args))
    for key, array in keys.weights.items():
        weights.add(key, array)
    for key, why in keys.unavailable.items():
        weights.lose(key, why)
    arrays = weights.finished()
    moments, refused = _moments(options, keys, arrays, weights, args, found, listed)
    meta = _meta(save, common, told_of(optimizers), listed, found)
    tied = args.get("untie_embeddings_and_output_weights") is False
    return Checkpoint(
        arrays,
        "megatron_core",
        aliases={HEAD: EMBEDDING} if tied and EMBEDDING in arrays and HEAD not in arrays else {},
        optimizer=moments,
        meta=meta,
        config=config_of(args),
        unavailable={**weights.unavailable, **({REFUSED: refused} if refused else {})},
        problems=tuple(problems),
        views={"stored": partial(_stored, found)},
    )


def _interleave(options: MegatronCore, args: Mapping[str, Any]) -> int | None:
    """Return the rows that gate and up take turns in; None where `args` have them do so, and what was saved is not known."""
    if options.glu_interleave is not None:
        return options.glu_interleave
    return None if number(args, "moe_mlp_glu_interleave_size") else 0


def _moments(
    options: MegatronCore,
    keys: _Keys,
    arrays: Mapping[str, Array],
    weights: _Full,
    args: Mapping[str, Any],
    found: Found,
    listed: Listing,
) -> tuple[dict[str, dict[str, Array]], str]:
    """Return the optimizer's arrays by kind, and why they are refused, if they are."""
    moments: dict[str, dict[str, Array]] = {}
    for kind, by_key in keys.moments.items():
        full = _Full(args, weights.interleave)
        for key, array in by_key.items():
            weight = keys.weights.get(key)
            shaped = array if weight is None or array.shape == weight.shape else _unflattened(array, weight.shape)
            if shaped is None or (weight is None and key not in keys.unavailable):
                shape = f"its weight has {weight.shape}" if weight is not None else "its weight is not there"
                return {}, f"optimizer.state.{kind}.{key} has shape {array.shape}, and {shape}; no flattening of it gives that"
            full.add(key, shaped)
        moments[KINDS.get(kind, kind)] = full.finished()
    if not keys.is_flat:
        return moments, ""
    try:
        run = Run.of(args, arrays, options.transformer_impl)
        flat = [*buckets_of(keys.buckets), *states_of(listed, found)]
        moments |= unpacked(flat, run)
    except Refused as error:
        return {}, str(error)
    return moments, ""


def _check_finished(save: Save) -> None:
    if not save.folder.has(".metadata"):
        raise FormatError(f"{save.name}: {lacking(save)}: the save did not finish; open another iteration")
    found = json.loads(read_bytes(save.folder.file("metadata.json")))
    backend = found["sharded_backend"]
    if backend != "torch_dist":
        raise FormatError(f"{save.name}: is {BACKENDS.get(backend, f'of the backend {backend!r}, which is not known')}")


def _common(folder: Folder) -> tuple[Mapping[Any, Any], list[tuple[TorchFile, Mapping[Any, Any]]], list[Problem]]:
    """Return what is not sharded, and of that the optimizers, with the file that has them."""
    try:
        file = TorchFile.open(folder.file("common.pt"))
    except (FormatError, SourceError) as error:
        return {}, [], [Problem(f"{error}; so args, and with them the model's config, are not known", file="common.pt")]
    root = file.root
    if type(root) is not dict:
        return {}, [], [Problem(f"common.pt: holds {type(root).__name__}, a dict was expected", file="common.pt")]
    return root, [(file, part) for part in optimizers_in(root.get("optimizer"))], []


# --- keys -------------------------------------------------------------------------------------------------------------

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")


@dataclass(slots=True, eq=False)
class _Keys:
    """The keys of a container, sorted by what they are."""

    weights: dict[str, Array] = field(default_factory=dict)
    moments: dict[str, dict[str, Array]] = field(default_factory=dict)
    """By kind, then by the weight's key."""
    buckets: dict[str, Array] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Weights that cannot be given, and why."""
    is_flat: bool = False

    @staticmethod
    def of(found: Found, listed: Listing) -> _Keys:
        keys = _Keys()
        for key, array in found.arrays.items():
            state = _STATE.fullmatch(key)
            if state:
                keys.moments.setdefault(state[1], {})[state[2]] = array
            elif BUCKET.fullmatch(key):
                keys.buckets[key] = array
            elif not _is_optimizers(key):
                keys.weights[key] = array
        keys.unavailable = {key: why for key, why in found.unavailable.items() if not _is_optimizers(key)}
        keys.is_flat = bool(keys.buckets) or any(PARAM_STATE.fullmatch(key) for key in listed.objects)
        names = [*keys.weights, *keys.unavailable]
        while names and all(n.startswith("module.") for n in names):
            names = [n.removeprefix("module.") for n in names]
            keys.weights = {n.removeprefix("module."): a for n, a in keys.weights.items()}
            keys.unavailable = {n.removeprefix("module."): w for n, w in keys.unavailable.items()}
            keys.moments = {k: {n.removeprefix("module."): a for n, a in of.items()} for k, of in keys.moments.items()}
        return keys


def _is_optimizers(key: str) -> bool:
    return re.match(r"(?:chained_\d+\.)?optimizer\.", key) is not None


def _unflattened(array: Array, shape: Sequence[int]) -> Array | None:
    """Return the array of a shape that is stored as a grid of flattened shards; None where it is no such grid.

    Stored is [X/x, Y/y, x*y] for shards [x, y] of [X, Y].
    """
    grid = array.shape[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    local = [n // g for g, n in zip(grid, shape, strict=True)]
    if math.prod(local) != array.shape[-1]:
        return None
    n = len(grid)
    found = array.split(n, local).transpose(*(d for i in range(n) for d in (i, n + i)))
    for i in range(n):
        found = found.merge(i, 2)
    return found


# --- the full model ---------------------------------------------------------------------------------------------------

_STACKED = re.compile(r"((?:decoder|encoder|mtp)\.layers\.)(?!\d+\.)(.+)")

_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.experts\.)(linear_fc[12]\..+)")

_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(slots=True, eq=False)
class _Full:
    """The full model's arrays while they are collected: one per layer and expert, under the local spec's names."""

    args: Mapping[str, Any]
    interleave: int | None
    arrays: dict[str, Array] = field(default_factory=dict)
    halves: dict[str, dict[str, Array]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, array: Array) -> None:
        stacked, stacked_experts = _STACKED.fullmatch(key), _STACKED_EXPERTS.fullmatch(key)
        if array.ndim < bool(stacked) + bool(stacked_experts):
            self.lose(key, f"its shape {array.shape} has no dim that counts layers or experts, as its name says")
            return
        counts = array.shape[: bool(stacked) + bool(stacked_experts)]
        if math.prod(counts) > MOST:
            self.lose(key, f"it would be {counts} arrays, at most {MOST} are expected")
            return
        layers = number(self.args, "num_layers")
        if stacked and stacked[1] == "decoder.layers." and layers is not None and array.shape[0] != layers:
            self.lose(key, f"it holds {array.shape[0]} layers, args say {layers}")
            return
        for name, one in _unstacked(key, array, stacked):
            experts = _STACKED_EXPERTS.fullmatch(name) if stacked_experts else None
            for single, part in _unstacked(name, one, experts):
                self._add(single, part)

    def _add(self, name: str, array: Array) -> None:
        half = _HALF.fullmatch(name)
        apart = taken_apart(half[1] if half else name)
        whole = apart.whole(0, 0)
        if half:
            self.halves.setdefault(whole, {})[half[2]] = array
        elif whole in self.arrays:
            self.unavailable.setdefault(whole, "two keys are both it")
        elif apart.cut == GATED and apart.is_expert and self.interleave != 0:
            self._deinterleave(whole, array)
        else:
            self.arrays[whole] = replace(array, name=whole)

    def _deinterleave(self, name: str, array: Array) -> None:
        block = self.interleave
        if block is None:
            why = (
                f"args have gate and up take turns of {self.args['moe_mlp_glu_interleave_size']} rows; whether they do in the "
                f"file is not stored: open it with MegatronCore(glu_interleave=...), 0 for gate over up"
            )
            self.unavailable.setdefault(name, why)
        elif array.shape[0] % (2 * block):
            self.unavailable.setdefault(name, f"its {array.shape[0]} rows are no multiple of 2 x {block}")
        else:
            turns = array.split(0, (array.shape[0] // (2 * block), 2, block))
            order = (1, 0, *range(2, turns.ndim))
            self.arrays[name] = replace(turns.transpose(*order).merge(0, 3), name=name)

    def lose(self, key: str, why: str) -> None:
        """Note a key that cannot be given, under its own name where it is stacked."""
        half = _HALF.fullmatch(key)
        self.unavailable.setdefault(taken_apart(half[1] if half else key).whole(0, 0), why)

    def finished(self) -> dict[str, Array]:
        """Return the arrays, gates over their ups where these had keys of their own."""
        for name, both in self.halves.items():
            if set(both) == {"w", "v"} and both["w"].shape == both["v"].shape and both["w"].dtype == both["v"].dtype:
                self.arrays[name] = concatenate([both["w"], both["v"]], name=name)
            elif name not in self.unavailable:
                shapes = listing(f"{n} {a.shape}" for n, a in both.items())
                self.unavailable[name] = f"its gate and up do not fit together: {shapes}"
        return self.arrays


def _unstacked(key: str, array: Array, match: re.Match[str] | None) -> Iterator[tuple[str, Array]]:
    """Go through the layers or experts of an array that stacks them; without a match it stacks none."""
    if match is None:
        yield key, array
        return
    pieces = array.pieces
    if not (pieces.shape[:, 0] == 1).all():
        for i in range(array.shape[0]):
            yield f"{match[1]}{i}.{match[2]}", array[i]
        return
    order = np.argsort(pieces.start[:, 0], kind="stable")
    bounds = np.searchsorted(pieces.start[order, 0], np.arange(array.shape[0] + 1))
    for i in range(array.shape[0]):
        rows = pieces.take(order[bounds[i] : bounds[i + 1]])
        yield f"{match[1]}{i}.{match[2]}", replace(array, shape=array.shape[1:], pieces=rows.index(0, i))


# --- what else there is -----------------------------------------------------------------------------------------------


def _meta(save: Save, common: Mapping[Any, Any], optimizer: Mapping[str, Any], listed: Listing, found: Found) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "save": save.name,
        "iteration": plain(common.get("iteration")),
        "checkpoint_version": plain(common.get("checkpoint_version")),
        "args": plain(dict(arguments(common.get("args")))),
        "container": dict(listed.about),
    }
    for name in ("content_metadata", "opt_param_scheduler"):
        if name in common:
            meta[name] = plain(common[name])
    if optimizer:
        meta["optimizer"] = optimizer
    strange = [key for key in found.arrays if _is_optimizers(key) and not _STATE.fullmatch(key) and not BUCKET.fullmatch(key)]
    if strange:
        meta["skipped"] = tuple(strange)
    return meta


def _stored(found: Found) -> Checkpoint:
    """Return every array under its key."""
    return Checkpoint(found.arrays, "megatron_core", unavailable=found.unavailable, names="stored")
