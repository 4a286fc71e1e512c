"""New Megatron checkpoints: the `args` that say what the model is, and the ranks' files of the legacy format, without payload."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshload.array import Array
from meshload.box import Box, Shape
from meshload.errors import LayoutError, listing
from meshload.mesh import Mesh, even_parts, parts
from meshload.naming import Model, model_of
from meshload.source import LocalFolder
from meshload.writing import lay_out, put

from ._config_numbers import number, section
from ._defaults import chosen_of, epsilon_of, theta_of
from ._distcp_files import Chunk, NewEntry, lay_out_entries
from ._megatron_buffers import module_order
from ._megatron_find import TRACKER
from ._megatron_new_states import NewStates
from ._megatron_optimizer import SHARDING, NewOptimizer, Training
from ._megatron_ranks import BUFFERS_FILE
from ._megatron_shards import COLUMNS, EMBEDDING, GATED, HEAD, QKV, ROWS, UNKNOWN, Name, taken_apart
from ._pickle import Global
from ._pickle_writer import Instance
from ._torch_writer import NewTensor, dtype_of, laid_out, new_tensor

MULTIPLE = 128
"""To a multiple of this, per rank, Megatron pads the vocabulary unless it is told another."""

VERSION = 3.0

LINEAR = (".linear_proj", ".linear_qkv", ".linear_fc1", ".linear_fc2")
"""The linear modules of a layer."""

PLAIN = ("gpt2", "gpt_neox")
"""Families with LayerNorm, biases everywhere, and no gate; the others have RMSNorm and a gate."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Over how many ranks a model is cut, and into how many chunks of layers a stage."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: int = 1

    @staticmethod
    def of(mesh: Mesh, virtual: int = 1) -> Degrees:
        """Return those of a mesh with axes of these names; others hold copies."""
        sizes = {axis: mesh.size_of(axis) if axis in mesh else 1 for axis in ("tp", "pp", "ep")}
        return Degrees(**sizes, virtual=virtual)


def model_for(config: Mapping[str, Any] | None) -> Model:
    """Return the model that a config means, under Megatron's names."""
    model = model_of("megatron", config)
    if model is None:
        kind = (config or {}).get("model_type")
        raise LayoutError(f"Megatron's args need a config of a family with Megatron's names; model_type is {kind!r}; give config=")
    return model


# --- args -------------------------------------------------------------------------------------------------------------


def arguments_of(
    model: Model,
    degrees: Degrees,
    dtype: str,
    *,
    vocabulary: int | None = None,
    transformer_impl: str = "local",
    is_distributed: bool = False,
) -> Instance:
    """Return `args` with what Megatron takes from a checkpoint; `vocabulary`: with its padding; `is_distributed`: the optimizer."""
    config, sizes = model.config, model.sizes
    heads, groups, head = sizes["kv_heads"] * sizes["group"], sizes["kv_heads"], sizes["head_dim"]
    vocab, padded = sizes["vocab"], vocabulary or sizes["vocab"]
    experts = sizes.get("expert")
    is_gpt = model.family in PLAIN
    learned = model.family == "gpt2"
    linear_bias = is_gpt or bool(config.get("attention_bias") or config.get("mlp_bias"))
    if not is_gpt and bool(config.get("attention_bias")) != bool(config.get("mlp_bias")) and not experts:
        raise LayoutError(
            f"config: attention_bias is {config.get('attention_bias')!r}, mlp_bias {config.get('mlp_bias')!r}; Megatron's "
            f"add_bias_linear gives biases to both or to neither"
        )
    positions = number(config, "max_position_embeddings", "n_positions") or sizes.get("positions")
    partial = number(section(config, "rope_parameters"), "partial_rotary_factor") or number(config, "rotary_pct")
    found: dict[str, Any] = {
        "num_layers": sizes["layer"],
        "encoder_num_layers": sizes["layer"],
        "hidden_size": sizes["embed"],
        "ffn_hidden_size": sizes.get("ffn", sizes.get("moe_ffn")),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": head,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "add_position_embedding": learned,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "use_rotary_position_embeddings": not learned,
        "rotary_base": None if learned else _whole(theta_of(model.family, config)),
        "rotary_percent": float(partial or (0.25 if model.family == "gpt_neox" else 1.0)),
        "rotary_interleaved": False,
        "normalization": "LayerNorm" if is_gpt else "RMSNorm",
        "norm_epsilon": epsilon_of(model.family, config),
        "apply_layernorm_1p": bool(config.get("apply_layernorm_1p")),
        "swiglu": not is_gpt,
        "openai_gelu": False,
        "squared_relu": False,
        "add_bias_linear": linear_bias,
        "add_qkv_bias": linear_bias or model.family == "qwen2",
        "qk_layernorm": model.family in ("qwen3", "qwen3_moe"),
        "untie_embeddings_and_output_weights": not model.ties,
        "vocab_size": vocab,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": math.gcd(MULTIPLE, padded // degrees.tp) if padded % degrees.tp == 0 else 1,
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "virtual_pipeline_model_parallel_size": degrees.virtual if degrees.virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": sizes["layer"] // degrees.pp // degrees.virtual if degrees.virtual > 1 else None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.tp,
        "num_experts": experts,
        "moe_layer_freq": 1,
        "moe_grouped_gemm": False,
        "transformer_impl": transformer_impl,
        "params_dtype": Global("torch", dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "use_distributed_optimizer": is_distributed,
        "sequence_parallel": False,
        "data_parallel_random_init": False,
        "tokenizer_type": None,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if experts:
        found |= {
            "moe_router_topk": chosen_of(model.family, config),
            "moe_ffn_hidden_size": sizes.get("moe_ffn", sizes.get("ffn")),
            "moe_layer_freq": _frequency(model),
        }
    return Instance(Global("argparse", "Namespace"), found)


def _whole(number: float) -> int | float:
    """Return a number as the whole one that it is; Megatron's rotary base is one."""
    return int(number) if float(number).is_integer() else float(number)


def _frequency(model: Model) -> int | list[int]:
    """Return 1 where each layer has experts, else a list of 1 and 0."""
    has = {int(m[1]) for name, _, _ in model.arrays() if (m := re.match(r"decoder\.layers\.(\d+)\.mlp\.router\.weight", name))}
    layers = model.sizes["layer"]
    return 1 if len(has) == layers else [int(i in has) for i in range(layers)]


# --- the legacy format ------------------------------------------------------------------------------------------------


def lay_out_ranks(
    folder: LocalFolder,
    arrays: Mapping[str, Array],
    config: Mapping[str, Any] | None,
    degrees: Degrees,
    iteration: int | None,
    training: Training | None = None,
    scheduler: Mapping[str, Any] | None = None,
    *,
    is_distributed: bool = False,
) -> None:
    """Make a save, `release` where no iteration is given, as Megatron calls what comes out of a conversion.

    With an optimizer it is one of the iteration that the moments are of, as Megatron takes none from a `release`.
    """
    model = model_for(config)
    dtypes = {dtype_of(array) for array in arrays.values()}
    run = _Run(model, degrees, arrays)
    run.check()
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    args = arguments_of(model, degrees, dtype, vocabulary=run.vocabulary, is_distributed=training is not None and is_distributed)
    states = NewStates(training, is_distributed, degrees.pp, degrees.ep, HEAD not in arrays) if training else None
    if training is not None and iteration is None:
        iteration = training.step
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    for t in range(degrees.tp):
        for p in range(degrees.pp):
            for e in range(degrees.ep):
                root: dict[str, Any] = {"args": args, "checkpoint_version": VERSION, "iteration": iteration or 0}
                chunks = [run.chunk(v, p, e) for v in range(degrees.virtual)]
                root |= {"model": chunks[0]} if len(chunks) == 1 else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
                rank = f"mp_rank_{t:02d}" + f"_{p:03d}" * (degrees.pp > 1) + f"_{e:03d}" * (degrees.ep > 1)
                if states is not None:
                    every = [(v, n, tensor) for v, chunk in enumerate(chunks) for n, tensor in chunk.items() if tensor]
                    root["optimizer"] = states.optimizer(every)
                    root |= {"opt_param_scheduler": dict(scheduler)} if scheduler else {}
                    if is_distributed:
                        lay_out(folder, f"{name}/{rank}/{BUFFERS_FILE}", *laid_out(states.buffers(every, e)))
                root["num_floating_point_operations_so_far"] = 0
                lay_out(folder, f"{name}/{rank}/model_optim_rng.pt", *laid_out(root))
    put(folder, TRACKER, b"release" if iteration is None else str(iteration).encode())


@dataclass(frozen=True, slots=True)
class _Run:
    """A full model's arrays, and over what they are cut."""

    model: Model
    degrees: Degrees
    arrays: Mapping[str, Array]

    @property
    def vocabulary(self) -> int:
        """The rows of the embedding, with as many more as make all ranks' parts alike."""
        tp = self.degrees.tp
        return -(-self.model.sizes["vocab"] // tp) * tp

    @property
    def layers(self) -> int:
        """Layers in a chunk."""
        return self.model.sizes["layer"] // (self.degrees.pp * self.degrees.virtual)

    @property
    def experts(self) -> int:
        """Experts on a rank."""
        return self.model.sizes.get("expert", 0) // self.degrees.ep

    def check(self) -> None:
        """Raise where Megatron cannot cut the model so."""
        degrees, sizes = self.degrees, self.model.sizes
        chunks = degrees.pp * degrees.virtual
        if sizes["layer"] % chunks:
            raise LayoutError(f"{sizes['layer']} layers over {chunks} chunks of pp={degrees.pp}: Megatron's have equally many")
        if degrees.ep > 1 and (not self.experts or sizes["expert"] % degrees.ep):
            raise LayoutError(f"{sizes.get('expert', 0)} experts over ep={degrees.ep}: Megatron's ranks have equally many")
        groups = sizes["kv_heads"]
        if groups % degrees.tp and degrees.tp % groups:
            raise LayoutError(f"{groups} kv heads over tp={degrees.tp}: one must be a multiple of the other")
        odd = [n for n in self.arrays if taken_apart(n).cut == UNKNOWN]
        if odd:
            raise LayoutError(f"how tensor-parallel ranks share {listing(odd)} is not known; Megatron has no such modules")

    def chunk(self, v: int, p: int, e: int) -> OrderedDict[str, NewTensor | None]:
        """Return the state dict of chunk `v` of pipeline rank `p` and expert rank `e`; any tensor rank's has these shapes.

        It is in the order of modules, which is what the optimizer goes by. Linear ones have an `_extra_state` that says nothing,
        without which Megatron loads none.
        """
        found = dict(self._held(v, p, e))
        order = module_order(found)
        if order is None:
            raise LayoutError(f"Megatron's local layer spec does not have all of such modules as {listing(found)}")
        made: OrderedDict[str, NewTensor | None] = OrderedDict()
        for module, names in itertools.groupby(order, lambda name: name.rpartition(".")[0]):
            made.update((name, self._local(taken_apart(name), found[name])) for name in names)
            if module.endswith(LINEAR):
                made[f"{module}._extra_state"] = None
        if v * self.degrees.pp + p == self.degrees.pp * self.degrees.virtual - 1:
            made[f"{HEAD.removesuffix('.weight')}._extra_state"] = None  # a tied head has one as well
        return made

    def _held(self, v: int, p: int, e: int) -> Iterator[tuple[str, Array]]:
        """Go through the arrays of a chunk, under its own names."""
        degrees = self.degrees
        number, last = v * degrees.pp + p, degrees.pp * degrees.virtual - 1
        for name, array in self.arrays.items():
            apart = taken_apart(name)
            if apart.layer is not None:
                layer, expert = apart.layer - number * self.layers, (apart.expert or 0) - e * self.experts
                if 0 <= layer < self.layers and (not apart.is_expert or 0 <= expert < self.experts):
                    yield apart.stem.format(layer=layer, expert=expert), array
            elif name.startswith("embedding."):
                if number == 0:
                    yield name, array
                if name == EMBEDDING and number == last and number and HEAD not in self.arrays:
                    yield HEAD, array  # the tied head's copy, where the embedding is on another rank
            elif number == last:
                yield name, array

    def _local(self, name: Name, array: Array) -> NewTensor:
        tp, shape = self.degrees.tp, array.shape
        if name.stem in (EMBEDDING, HEAD):
            shape = (self.vocabulary, *shape[1:])
        dim = {ROWS: 0, GATED: 0, QKV: 0, COLUMNS: 1}.get(name.cut)
        if dim is not None:
            parts = 2 * tp if name.cut == GATED and tp > 1 and self.model.family not in PLAIN else tp
            if shape[dim] % parts:
                raise LayoutError(f"{array.name}: its shape is {array.shape}, dim {dim} is no multiple of {parts}, for tp={tp}")
            shape = _replaced(shape, dim, shape[dim] // tp)
        return new_tensor(dtype_of(array), shape)


def _replaced(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


# --- torch_dist -------------------------------------------------------------------------------------------------------

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}

STATELESS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer for which Megatron asks for an `_extra_state`."""

_FUSED_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}


def lay_out_logical(
    folder: LocalFolder,
    arrays: Mapping[str, Array],
    config: Mapping[str, Any] | None,
    mesh: Mesh,
    iteration: int | None,
    transformer_impl: str,
    optimizer: NewOptimizer | None = None,
    scheduler: Mapping[str, Any] | None = None,
) -> None:
    """Make a torch_dist save: chunks as the ranks of the mesh hold them, each in the file of the first that does.

    With an optimizer it is one of the iteration that the moments are of, as Megatron takes none from a `release`.
    """
    model, degrees = model_for(config), Degrees.of(mesh)
    dtypes = {dtype_of(array) for array in arrays.values()}
    keys = _Keys(arrays, transformer_impl == "transformer_engine")
    entries = keys.entries(model, mesh)
    for kind, states in (optimizer.arrays if optimizer else {}).items():
        stacked = _Keys(states, transformer_impl == "transformer_engine").entries(model, mesh)
        entries += [replace(entry, key=f"optimizer.state.{kind}.{entry.key}") for entry in stacked]
    if optimizer is not None and iteration is None:
        iteration = optimizer.step
    is_distributed = optimizer is not None and optimizer.is_distributed
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    args = arguments_of(model, degrees, dtype, transformer_impl=transformer_impl, is_distributed=is_distributed)
    common = {
        "args": args,
        "checkpoint_version": VERSION,
        "iteration": iteration or 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "non_homogeneous_layers": not keys.is_stacked,
            **({"distrib_optim_sharding_type": SHARDING} if is_distributed else {}),
        },
        **({"optimizer": optimizer.common} if optimizer else {}),
        **({"opt_param_scheduler": dict(scheduler)} if optimizer and scheduler else {}),
    }
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    inner = LocalFolder(folder.path / name)
    lay_out_entries(inner, entries, objects=keys.extra_states())
    lay_out(inner, "common.pt", *laid_out(common))
    put(inner, "metadata.json", json.dumps(BACKEND).encode())
    put(folder, TRACKER, b"release" if iteration is None else str(iteration).encode())


_Member = tuple[tuple[int, ...], Array]
"""An array's numbers in the stack of its key, of layer and expert, and the array."""


class _Keys:
    """What torch_dist calls the arrays: those of all layers, and of all experts, are one where layers are alike."""

    def __init__(self, arrays: Mapping[str, Array], fused: bool) -> None:
        apart = {name: taken_apart(name) for name in arrays}
        odd = [name for name, a in apart.items() if a.cut == UNKNOWN]
        if odd:
            raise LayoutError(f"Megatron has no such modules as {listing(odd)}")
        kinds: dict[int, set[Any]] = {}
        for name, a in apart.items():
            if a.layer is not None:
                kinds.setdefault(a.layer, set()).add((a.stem, a.expert, arrays[name].shape))
        self.layers = len(kinds)
        self.is_stacked = len(set(map(frozenset, kinds.values()))) == 1
        routed = {a.layer for a in apart.values() if a.is_expert}
        self.members: dict[str, list[_Member]] = {}
        for name, array in arrays.items():
            a = apart[name]
            numbers: tuple[int, ...] = () if a.layer is None or not self.is_stacked else (a.layer,)
            numbers += () if a.expert is None else (a.expert,)
            key = _key(a, self.is_stacked, keep=fused and a.layer in routed)
            self.members.setdefault(key, []).append((numbers, array))

    def counts(self, key: str) -> Shape:
        """Return the extents of the stack."""
        return tuple(max(n) + 1 for n in zip(*(numbers for numbers, _ in self.members[key]), strict=True))

    def entries(self, model: Model, mesh: Mesh) -> list[NewEntry]:
        """Return what is stored of each key."""
        return [_stack(key, members, self.counts(key), model, mesh) for key, members in self.members.items()]

    def extra_states(self) -> dict[str, Any]:
        """Return the objects that Megatron asks for beside the weights, which say nothing."""
        found: dict[str, Any] = {}
        for key, members in self.members.items():
            module = key.removesuffix(".weight")
            if module != key and module.replace(".experts.experts", "").endswith(STATELESS):
                counts = self.counts(key)
                for numbers, _ in members:
                    shard = ".".join(map(str, numbers or (0,))), ".".join(map(str, counts or (1,)))
                    found[f"{module}._extra_state/shard_{shard[0]}_{shard[1]}"] = [None]
        return found


def _key(name: Name, is_stacked: bool, *, keep: bool) -> str:
    """Return the key of an array; its norm stays a module of its own where Transformer Engine `keep`s it so, before experts."""
    found = name.stem.replace(".local_experts.{expert}.", ".experts.")
    module, _, parameter = found.rpartition(".")
    head, _, norm = module.rpartition(".")
    if name.layer is not None and norm in _FUSED_NORMS and not (keep and norm == "pre_mlp_layernorm"):
        found = f"{head}.{_FUSED_NORMS[norm]}.layer_norm_{parameter}"
    return found.replace(".{layer}.", "." if is_stacked else f".{name.layer}.")


def _stack(key: str, members: Sequence[_Member], counts: Shape, model: Model, mesh: Mesh) -> NewEntry:
    """Return the entry of arrays that are one."""
    kinds = {(dtype_of(array), array.shape) for _, array in members}
    if len(kinds) != 1 or len(members) != math.prod(counts):
        raise LayoutError(f"{key}: its {math.prod(counts)} arrays are not alike: {listing(f'{d} {s}' for d, s in sorted(kinds))}")
    dtype, shape = kinds.pop()
    chunks: list[Chunk] = []
    for numbers, array in members:
        for rank, box in _chunks(array, model, mesh):
            chunks.append((rank, Box((*numbers, *box.start), (*(1 for _ in numbers), *box.shape))))
    return NewEntry(key, dtype, (*counts, *shape), chunks)


def _chunks(array: Array, model: Model, mesh: Mesh) -> list[Chunk]:
    """Return the boxes that tensor-parallel ranks hold of an array, with the first ranks of the mesh that hold them."""
    name, degrees = taken_apart(array.name), Degrees.of(mesh)
    p, e = 0, 0
    if name.layer is not None:
        held = [even_parts(model.sizes["layer"], degrees.pp, i) for i in range(degrees.pp)]
        p = next(i for i, (start, stop) in enumerate(held) if start <= name.layer < stop)
    elif not array.name.startswith("embedding."):
        p = degrees.pp - 1
    if name.expert is not None:
        held = [parts(model.sizes["expert"], degrees.ep, i) for i in range(degrees.ep)]
        e = next(i for i, (start, stop) in enumerate(held) if start <= name.expert < stop)
    dim = {ROWS: 0, GATED: 0, QKV: 0, COLUMNS: 1}.get(name.cut)
    if dim is None:
        return [(_rank(mesh, pp=p, ep=e), Box((0,) * array.ndim, array.shape))]
    halves = 2 if name.cut == GATED and model.family not in PLAIN else 1
    extent = array.shape[dim] // halves
    found = []
    for half in range(halves):
        for t in range(degrees.tp):
            start, stop = parts(extent, degrees.tp, t)
            if start < stop:
                at = _replaced((0,) * array.ndim, dim, half * extent + start)
                found.append((_rank(mesh, tp=t, pp=p, ep=e), Box(at, _replaced(array.shape, dim, stop - start))))
    return found


def _rank(mesh: Mesh, **at: int) -> int:
    """Return the rank at a place, the first along other axes."""
    rank = 0
    for axis, size in zip(mesh.names, mesh.sizes, strict=True):
        rank = rank * size + at.get(axis, 0)
    return rank
