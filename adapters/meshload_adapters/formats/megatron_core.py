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
    dp_reshardable                optimizer.distributed.dp_group_idx_{i}.gbuf_idx_{b}.dtype_{..}.bucket_idx_{k}.{param, ..}: flat
    dp_zero_gather_scatter        an object ...dp_group_idx_{i}.param_state: the `distrib_optim.pt` of the legacy format

The flat ones tell no names: the parameters of each model-parallel rank are worked out from `args`, in the order in which the layer
spec makes its modules; sizes must fit. `i` counts tensor ranks fastest, then (for experts: expert ranks, then) pipeline ranks.
Several optimizers have a prefix `chained_{n}.`, of which 1 is the experts'. What is refused is told in `meta["optimizer_refused"]`.

Source: https://github.com/NVIDIA/Megatron-LM, `megatron/core/dist_checkpointing` and `megatron/core/optimizer`. Tried with
megatron-core 0.13 and 0.16. The zarr backend (before 0.13) and `fsdp_dtensor` are not read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from meshload.array import Array, concatenate
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, SourceError, listing
from meshload.pieces import Pieces, union
from meshload.source import Folder, read_bytes

from .._distcp import Found, Listing, find_arrays, read_listing
from .._megatron import CORE, Save, arguments, bucket_limit, config_of, find_save, lacking, layers_of, number, plain
from .._megatron_buffers import laid_out, module_order, spelled_by
from .._megatron_shards import (
    COLUMNS,
    EMBEDDING,
    GATED,
    HEAD,
    UNKNOWN,
    WHOLE,
    Fusion,
    Part,
    cut_runs,
    join_runs,
    taken_apart,
)
from .._pickle import Global
from .._torch_file import DTYPES, Tensor, TorchFile

BACKENDS = {
    "zarr": "a zarr container, which megatron-core wrote before 0.13; load and save it with 0.12, which reads both",
}

KINDS = {"param": "master", "fp32_param": "master"}


@dataclass(frozen=True, slots=True)
class MegatronCore:
    """The torch_dist format of megatron-core; the options say what `args` do not."""

    glu_interleave: int | None = None
    """Rows of gate and of up that take turns in the experts' `linear_fc1`; 0 for gate over up."""
    transformer_impl: str | None = None
    """`local` or `transformer_engine`: the layer spec, which the order of flat optimizer states needs."""
    name: str = field(default="megatron_core", init=False)
    order: int = field(default=30, init=False)

    def __post_init__(self) -> None:
        if self.glu_interleave is not None and (type(self.glu_interleave) is not int or self.glu_interleave < 0):
            raise LayoutError(f"glu_interleave={self.glu_interleave!r}: a number of rows was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether a folder has a `metadata.json` that names a backend of megatron-core, or a tracker that leads to one."""
        save = find_save(folder)
        return save is not None and save.kind == CORE

    def open(self, folder: Folder) -> Checkpoint:
        """Read `.metadata` and `common.pt`; arrays in data files that are absent or damaged are unavailable."""
        save = find_save(folder)
        if save is None or save.kind != CORE or save.why:
            raise FormatError((save.why if save else "") or f"{folder.name}: has no metadata.json of megatron-core")
        _check_finished(save)
        common, problems = _common(save.folder)
        args = arguments(common.get("args"))
        listed = read_listing([save.folder.file(".metadata")])
        found = find_arrays(listed, save.folder)
        problems += [Problem(text, file=file) for file, text in found.damage.items()]
        keys = _Keys.of(found, listed)
        weights = _Full(args, self._interleave(args))
        for key, array in keys.weights.items():
            weights.add(key, array)
        for key, why in keys.unavailable.items():
            weights.lose(key, why)
        arrays = weights.finished()
        moments, refused = self._moments(keys, arrays, weights, args, found, listed)
        meta = _meta(save, common, listed, found)
        if refused:
            meta["optimizer_refused"] = refused
        tied = args.get("untie_embeddings_and_output_weights") is False
        return Checkpoint(
            arrays,
            self.name,
            aliases={HEAD: EMBEDDING} if tied and EMBEDDING in arrays and HEAD not in arrays else {},
            optimizer=moments,
            meta=meta,
            config=config_of(args),
            unavailable=weights.unavailable,
            problems=tuple(problems),
            views={"stored": partial(_stored, found)},
        )

    def _interleave(self, args: Mapping[str, Any]) -> int | None:
        """Return the rows that gate and up take turns in; None where `args` have them do so, and what was saved is not known."""
        if self.glu_interleave is not None:
            return self.glu_interleave
        return None if number(args, "moe_mlp_glu_interleave_size") else 0

    def _moments(
        self,
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
            run = _Run.of(args, arrays, self.transformer_impl)
            flat = [*_buckets(keys.buckets), *_states(listed, found)]
            moments |= _unpacked(flat, run)
        except _Refused as error:
            return {}, str(error)
        return moments, ""


def _check_finished(save: Save) -> None:
    if not save.folder.has(".metadata"):
        raise FormatError(f"{save.name}: {lacking(save)}: the save did not finish; open another iteration")
    found = json.loads(read_bytes(save.folder.file("metadata.json")))
    backend = found["sharded_backend"]
    if backend != "torch_dist":
        raise FormatError(f"{save.name}: is {BACKENDS.get(backend, f'of the backend {backend!r}, which is not known')}")


def _common(folder: Folder) -> tuple[Mapping[Any, Any], list[Problem]]:
    try:
        root = TorchFile.open(folder.file("common.pt")).root
    except (FormatError, SourceError) as error:
        return {}, [Problem(f"{error}; so args, and with them the model's config, are not known", file="common.pt")]
    if type(root) is not dict:
        return {}, [Problem(f"common.pt: holds {type(root).__name__}, a dict was expected", file="common.pt")]
    return root, []


# --- keys -------------------------------------------------------------------------------------------------------------

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)"
    r"\.bucket_idx_(\d+)\.(\w+)"
)

_PARAM_STATE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1")


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
            elif _BUCKET.fullmatch(key):
                keys.buckets[key] = array
            elif not _is_optimizers(key):
                keys.weights[key] = array
        keys.unavailable = {key: why for key, why in found.unavailable.items() if not _is_optimizers(key)}
        keys.is_flat = bool(keys.buckets) or any(_PARAM_STATE.fullmatch(key) for key in listed.objects)
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


# --- flat optimizer states --------------------------------------------------------------------------------------------


class _Refused(Exception):
    """The optimizer cannot be told apart, for the reason given."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One gradient buffer's values: of which rank and dtype, and its buckets by kind."""

    is_expert: bool
    group: int
    number: int
    dtype: str
    buckets: Mapping[str, Sequence[Array]]
    is_coalesced: bool
    """Whether the one bucket stands for all, one after another."""


def _chain(text: str | None, chains: set[str | None]) -> bool:
    """Say whether an optimizer is the experts': the second of two."""
    if chains - {None, "0", "1"} or (None in chains and len(chains) > 1):
        raise _Refused(f"there are optimizers {sorted(map(str, chains))}; one, or the experts' beside the others', was expected")
    return text == "1"


def _buckets(arrays: Mapping[str, Array]) -> list[_Buffer]:
    """Return the buffers of `dp_reshardable`."""
    found: dict[tuple[bool, int, int, str], dict[str, dict[int, Array]]] = {}
    matches = [(m, array) for key, array in arrays.items() if (m := _BUCKET.fullmatch(key))]
    chains = {m[1] for m, _ in matches}
    for m, array in matches:
        if array.ndim != 1:
            raise _Refused(f"{m[0]} has shape {array.shape}, one dim was expected")
        if m[6] in ("param", "exp_avg", "exp_avg_sq") or array.dtype.kind == "f":
            at = found.setdefault((_chain(m[1], chains), int(m[2]), int(m[3]), m[4]), {})
            at.setdefault(m[6], {})[int(m[5])] = array
    buffers = []
    for (is_expert, group, n, dtype), kinds in sorted(found.items()):
        for kind, by_number in kinds.items():
            if sorted(by_number) != list(range(len(by_number))):
                raise _Refused(f"buffer {n} of group {group} has the buckets {sorted(by_number)} of {kind}")
        ordered = {kind: [by_number[i] for i in range(len(by_number))] for kind, by_number in kinds.items()}
        buffers.append(_Buffer(is_expert, group, n, dtype, ordered, False))
    return buffers


def _states(listed: Listing, found: Found) -> list[_Buffer]:
    """Return the buffers of `dp_zero_gather_scatter`: objects that hold tensors."""
    matches = [(m, places) for key, places in listed.objects.items() if (m := _PARAM_STATE.fullmatch(key))]
    chains = {m[1] for m, _ in matches}
    buffers = []
    for m, places in matches:
        source = found.sources.get(places[0].file) if places else None
        if source is None:
            raise _Refused(f"{m[0]}: its data file is not there")
        place = places[0]
        try:
            file = TorchFile.open(source, place.offset, place.offset + place.length)
        except (FormatError, SourceError) as error:
            raise _Refused(f"{m[0]}: {error}") from error
        state = file.root[0] if type(file.root) is list and len(file.root) == 1 else file.root  # objects are saved in a list
        for n in sorted(k for k in state if type(k) is int) if type(state) is dict else ():
            for key, values in state[n].items() if type(state[n]) is dict else ():
                dtype = key[0] if type(key) is tuple and key else key
                name = dtype.name if isinstance(dtype, Global) else str(dtype)
                arrays = _flat_arrays(values, file, f"{m[0]}: buffer {n}")
                buffers.append(_Buffer(_chain(m[1], chains), int(m[2]), n, name, arrays, True))
    return buffers


def _flat_arrays(values: Any, file: TorchFile, what: str) -> dict[str, list[Array]]:
    tensors = {k: v for k, v in values.items() if type(v) is Tensor} if type(values) is dict else {}
    why = next((file.refusal(t) for t in tensors.values() if file.refusal(t)), "")
    if not tensors or why or any(len(t.shape) != 1 for t in tensors.values()):
        raise _Refused(f"{what} is no dict of flat arrays{f': {why}' if why else ''}")
    return {kind: [file.array(tensor, kind)] for kind, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Run:
    """The run that saved the states, as far as the places of its parameters depend on it."""

    args: Mapping[str, Any]
    tp: int
    pp: int
    ep: int
    etp: int
    virtual: int
    layers: Mapping[tuple[int, int], int]
    """How many layers chunk `v` of stage `p` has."""
    experts: int
    """Per expert-parallel rank."""
    fusion: Fusion
    tied: bool
    implementation: str
    arrays: Mapping[str, Array]

    @staticmethod
    def of(args: Mapping[str, Any], arrays: Mapping[str, Array], implementation: str | None) -> _Run:
        """Return the run that `args` describe, or say what they lack."""
        tp = number(args, "tensor_model_parallel_size")
        swiglu = args.get("swiglu")
        implementation = implementation or args.get("transformer_impl")
        why = "the optimizer's states are flat, and hold no names: "
        if tp is None or type(swiglu) is not bool:
            raise _Refused(f"{why}args, which tell the mesh and the model that they depend on, are not in common.pt")
        if type(implementation) is not str:
            raise _Refused(f"{why}args do not say transformer_impl; open it with MegatronCore(transformer_impl=...)")
        pp, ep = number(args, "pipeline_model_parallel_size", 1) or 1, number(args, "expert_model_parallel_size", 1) or 1
        virtual = number(args, "virtual_pipeline_model_parallel_size", 1) or 1
        layers = layers_of(args, pp, virtual)
        if layers is None:
            raise _Refused(f"{why}args do not say plainly which layers each pipeline rank had")
        return _Run(
            args,
            tp,
            pp,
            ep,
            number(args, "expert_tensor_parallel_size", tp) or tp,
            virtual,
            layers,
            (number(args, "num_experts") or 0) // ep,
            Fusion(swiglu or args.get("quick_geglu") is True),
            args.get("untie_embeddings_and_output_weights") is False,
            implementation,
            arrays,
        )

    def ranks(self, is_expert: bool, group: int) -> tuple[int, int, int]:
        """Return tensor, pipeline and expert rank of a group of data-parallel ranks."""
        tp, ep = (self.etp, self.ep) if is_expert else (self.tp, 1)
        t, rest = group % tp, group // tp
        if rest // ep >= self.pp:
            raise _Refused(f"there is a state of group {group}, the mesh of args has {tp * ep * self.pp}")
        return t, rest // ep, rest % ep

    def chunk(self, p: int, v: int) -> list[str]:
        """Return the full names of the parameters of a chunk, in module order, each as its layer spec spells it."""
        before = sum(n for place, n in self.layers.items() if place < (v, p))
        mine = range(before, before + self.layers[v, p])
        names = []
        for name in self.arrays:
            layer = taken_apart(name).layer
            last = (v, p) == (self.virtual - 1, self.pp - 1)
            if layer is not None:
                is_mine = layer in mine
            elif name.startswith("embedding."):
                is_mine = (v, p) == (0, 0)
            else:
                is_mine = last and not (name == HEAD and self.tied)
            if is_mine and not name.endswith((".expert_bias", ".inv_freq")):
                names.append(name)
        if self.tied and self.pp > 1 and (v, p) == (self.virtual - 1, self.pp - 1):
            names.append(HEAD)
        return names


def _unpacked(buffers: Sequence[_Buffer], run: _Run) -> dict[str, dict[str, Array]]:
    """Return the optimizer's arrays by kind, cut out of the buffers of all ranks."""
    by_group: dict[tuple[bool, int], list[_Buffer]] = {}
    for buffer in buffers:
        by_group.setdefault((buffer.is_expert, buffer.group), []).append(buffer)
    experts = run.ep > 1 and run.experts > 0
    expected = {(False, i) for i in range(run.tp * run.pp)}
    expected |= {(True, i) for i in range(run.etp * run.ep * run.pp)} if experts else set()
    if set(by_group) != expected:
        raise _Refused(
            f"there are states of {len(by_group)} groups of ranks, tp {run.tp}, pp {run.pp}, ep {run.ep} give {len(expected)}"
        )
    parts: list[Part] = []
    runs: dict[str, list[Pieces]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    chunks = {(p, v): _spelled(run, p, v) for p in range(run.pp) for v in range(run.virtual)}
    for (is_expert, group), held in sorted(by_group.items()):
        t, p, e = run.ranks(is_expert, group)
        laid: dict[tuple[int, str], list[Sequence[Part]]] = {}
        for v in range(run.virtual):
            for dtype, these in _parts_of(run, chunks[p, v], is_expert, t, e):
                laid.setdefault((v, dtype), []).append(these)
        held = sorted(held, key=lambda b: b.number)
        if [b.dtype for b in held] != [dtype for _, dtype in laid]:
            raise _Refused(
                f"group {group} has buffers of {[b.dtype for b in held]}, its parameters give {[dtype for _, dtype in laid]}"
            )
        for buffer, ((v, _), units) in zip(held, laid.items(), strict=True):
            first = len(parts)
            parts += [part for unit in units for part in unit]
            for kind, pieces, dtype_ in _cut(buffer, units, first, bucket_limit(run.args, p, v), run, p, v):
                runs.setdefault(kind, []).append(pieces)
                if dtypes.setdefault(kind, dtype_) != dtype_:
                    raise _Refused(f"{kind} is stored as {dtypes[kind]} and as {dtype_}")
    return {KINDS.get(kind, kind): join_runs(parts, union(tables), dtypes[kind], run.fusion) for kind, tables in runs.items()}


def _spelled(run: _Run, p: int, v: int) -> list[tuple[str, str]]:
    """Return a chunk's parameters in module order: as the layer spec spells them, and the full name."""
    spelled = spelled_by(
        run.implementation,
        run.chunk(p, v),
        is_grouped=run.args.get("moe_grouped_gemm") is True,
        is_legacy_grouped=run.args.get("moe_use_legacy_grouped_gemm") is True,
    )
    order = None if spelled is None else module_order(spelled)
    if spelled is None or order is None:
        strange = [n for n in spelled or () if module_order([n]) is None]
        what = f"{listing(strange, 3)}" if strange else f"the layer spec {run.implementation!r}"
        raise _Refused(f"the optimizer's states are flat, and hold no names: where {what} stands among the others is not known")
    return [(name, spelled[name]) for name in order]


def _parts_of(run: _Run, chunk: Sequence[tuple[str, str]], is_expert: bool, t: int, e: int) -> Iterator[tuple[str, Sequence[Part]]]:
    """Go through the parameters of a rank: the dtype of each, and what it consists of, one part but for `GroupedMLP`."""
    for spelled, full in chunk:
        name = taken_apart(full)
        whole = EMBEDDING if full == HEAD and run.tied else full
        apart = name.is_expert and run.ep > 1
        if apart != is_expert:
            continue
        count, at = (run.etp, t % run.etp) if name.is_expert else (run.tp, t)
        grouped = re.search(r"\.mlp\.experts\.weight([12])$", spelled)
        if name.expert is not None and apart and not grouped and name.expert // run.experts != e:
            continue
        numbers: Sequence[int | None] = [name.expert]
        if grouped:
            numbers = range(e * run.experts, (e + 1) * run.experts)
        units = []
        for k in numbers:
            single = whole if k is None else re.sub(r"local_experts\.\d+\.", f"local_experts.{k}.", whole)
            array = run.arrays.get(single)
            if array is None:
                raise _Refused(f"{single} is not among the weights, so the shape of its state is not known")
            shape = _local(array.shape, name.cut, count, single)
            units.append(Part(single, name.cut, at, count, shape[::-1] if grouped else shape, bool(grouped)))
        dtype = run.arrays[units[0].name].dtype
        yield next(k for k, d in DTYPES.items() if d == dtype), units


def _local(shape: Sequence[int], cut: str, count: int, name: str) -> tuple[int, ...]:
    dim = None if cut == WHOLE or count == 1 else 1 if cut == COLUMNS else 0
    if cut == UNKNOWN and count > 1:
        raise _Refused(f"{name}: how tensor-parallel ranks share it is not known")
    if dim is None:
        return tuple(shape)
    if dim >= len(shape) or shape[dim] % count:
        raise _Refused(f"{name}: dim {dim} of shape {tuple(shape)} does not divide by {count}")
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _cut(
    buffer: _Buffer, units: Sequence[Sequence[Part]], first: int, limit: int | None, run: _Run, p: int, v: int
) -> Iterator[tuple[str, Pieces, np.dtype[Any]]]:
    """Go through the kinds of a buffer's values, cut at its parameters."""
    sizes = [sum(math.prod(part.shape) for part in unit) for unit in units]
    shared = {EMBEDDING} if run.tied and run.pp > 1 else set()
    alone = {i for i, unit in enumerate(units) if unit[0].name in shared}
    held = next(iter(buffer.buckets.values()))
    expected = [a.shape[0] for a in held]
    made = laid_out(sizes, expected, limit=limit, alone=alone)
    if made is None:
        raise _Refused(
            f"buffer {buffer.number} of group {buffer.group} has {expected[:4]} elements, its {len(sizes)} parameters have "
            f"{sum(sizes)}; no known way to lay them out gives that number"
        )
    number_of = np.cumsum([0, *(len(unit) for unit in units)]) + first
    lengths = [[math.prod(part.shape) for part in unit] for unit in units]
    for kind, arrays in buffer.buckets.items():
        if [a.shape[0] for a in arrays] != expected:
            raise _Refused(f"buffer {buffer.number} of group {buffer.group}: {kind} has other sizes than the others")
        base = 0
        for b, bucket in enumerate(made):
            array = arrays[0] if buffer.is_coalesced else arrays[b]
            of = [(i, n) for i in bucket.numbers for n in range(len(units[i]))]
            begins = dict(zip(bucket.numbers, bucket.starts, strict=True))
            starts = [base + begins[i] + sum(lengths[i][:n]) for i, n in of]
            numbers = [int(number_of[i]) + n for i, n in of]
            yield kind, cut_runs(array.pieces, starts, [lengths[i][n] for i, n in of], numbers, array.dtype.itemsize), array.dtype
            base += bucket.size if buffer.is_coalesced else 0


# --- what else there is -----------------------------------------------------------------------------------------------


def _meta(save: Save, common: Mapping[Any, Any], listed: Listing, found: Found) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "save": save.name,
        "iteration": plain(common.get("iteration")),
        "checkpoint_version": plain(common.get("checkpoint_version")),
        "args": plain(dict(arguments(common.get("args")))),
        "container": dict(listed.about),
    }
    for name in ("content_metadata", "opt_param_scheduler", "optimizer"):
        if name in common:
            meta[name] = plain(common[name])
    strange = [key for key in found.arrays if _is_optimizers(key) and not _STATE.fullmatch(key) and not _BUCKET.fullmatch(key)]
    if strange:
        meta["skipped"] = tuple(strange)
    return meta


def _stored(found: Found) -> Checkpoint:
    """Return every array under its key."""
    return Checkpoint(found.arrays, "megatron_core", unavailable=found.unavailable, names="stored")
