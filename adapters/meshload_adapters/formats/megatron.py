"""Legacy Megatron-LM checkpoints (`--ckpt-format torch`): a folder per tensor-, pipeline- and expert-parallel rank.

    iter_0002000/mp_rank_{TT}[_{PPP}][_{EEE}]/model_optim_rng.pt
    iter_0002000/mp_rank_{TT}[_{PPP}][_{EEE}]/distrib_optim.pt     with the distributed optimizer

`_PPP` is there where pp > 1, `_EEE` where ep > 1: `args` in the file tell which a single number is. Each file is a dict, saved by
torch, with `args` (the run's `argparse.Namespace`), `checkpoint_version`, `iteration`, `model` (or `model0`, `model1`, ... for the
chunks of a virtual pipeline), `optimizer`, `opt_param_scheduler`, `rng_state`.

Layers are numbered from 0 in each chunk; over the whole model, chunk `v` of stage `p` follows those with a lower `(v, p)`. Experts
are numbered from 0 on each expert-parallel rank. Arrays outside experts are repeated in each `_EEE` file. With
`expert_tensor_parallel_size` etp other than tp, an expert's shard is number `TT % etp` of etp.

Before megatron-core the state was nested, `model.language_model.encoder`, with other names of modules. `checkpoint_version` 0 (or
none) has the rows of a rank's `query_key_value` as all q, all k, all v; 1.0 has q, k and v of each element side by side; since 2.0
they are in groups: queries, key, value.

The optimizer stores no names. Without the distributed optimizer, state `i` belongs to the `i`-th parameter of the param groups:
a group has those parameters, in module order, that are decayed (`wd_mult` 1: neither biases nor of one dim) or not, and that
are experts' or not. bf16 and fp16 runs add masters, `fp32_from_fp16_params`. `distrib_optim.pt` has per gradient buffer, of a chunk
and a dtype, flat fp32 `param`, `exp_avg` and `exp_avg_sq`: see `_megatron_buffers`. Shapes and totals must fit, or the optimizer is
refused; the reason is in `meta["optimizer_refused"]`.

Source: https://github.com/NVIDIA/Megatron-LM, `megatron/training/checkpointing.py`, `megatron/core/optimizer`. Tried with
megatron-core 0.13 and 0.16. Not read: `layer_wise_optimizer_*.pt`, optimizers in `optim.pt` (before 2021).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, MeshloadWarning, SourceError, listing
from meshload.source import Folder

from .._megatron import (
    CORE,
    MODEL_FILES,
    RANK_FOLDER,
    UNFINISHED,
    Save,
    arguments,
    bucket_limit,
    config_of,
    find_save,
    layers_of,
    number,
    plain,
)
from .._megatron_buffers import laid_out
from .._megatron_shards import EMBEDDING, HEAD, Fusion, Joined, Shard, grouped, misgated, parameters, taken_apart
from .._pickle import Global
from .._torch_file import DTYPES, Tensor, TorchFile

FILES_AT_ONCE = 8

BUFFERS_FILE = "distrib_optim.pt"

_LOST = 3
"""Ranks that a message tells one by one."""


@dataclass(frozen=True, slots=True)
class Megatron:
    """The legacy format of Megatron-LM; the options say what `args` do not."""

    gated: bool | None = None
    """Whether `linear_fc1` is a gate over an up projection, where `args` have no `swiglu`."""
    glu_interleave: int | None = None
    """Rows of gate and of up that take turns in the experts' `linear_fc1`, or in each where there are no experts."""
    qkv_order: str | None = None
    """`grouped` or `concatenated` (all queries, keys, values of a rank), where `checkpoint_version` does not tell the truth."""
    name: str = field(default="megatron", init=False)
    order: int = field(default=35, init=False)

    def __post_init__(self) -> None:
        if self.qkv_order not in (None, "grouped", "concatenated"):
            raise LayoutError(f"qkv_order={self.qkv_order!r}: 'grouped' or 'concatenated' was expected")
        if self.glu_interleave is not None and (type(self.glu_interleave) is not int or self.glu_interleave < 1):
            raise LayoutError(f"glu_interleave={self.glu_interleave!r}: a number of rows was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether a folder has rank folders with models in it, or a tracker that names one that has."""
        save = find_save(folder)
        return save is not None and save.kind != CORE

    def open(self, folder: Folder) -> Checkpoint:
        """Read the pickles of all ranks; those that are absent or damaged are told in `problems`."""
        save = find_save(folder)
        if save is None or save.kind == CORE or save.why:
            raise FormatError(_no_save(folder, save))
        ranks = _read_ranks(save)
        mesh, args, there, problems = _placed(save, ranks)
        layers = _layers(there, mesh, args)
        run = _Run(mesh, args, layers, _experts(there, mesh, args), self._fusions(there, args), _tied(args))
        weights, moments, refused = _joined(there, run)
        meta = _meta(save, there, run)
        if refused:
            meta["optimizer_refused"] = refused
        views = {"stored": partial(_stored, there)}
        arrays = weights.arrays()
        gated = run.fusions[0].gated
        wrong = {} if gated is None else misgated(arrays, gated)
        return Checkpoint(
            {name: array for name, array in arrays.items() if name not in wrong},
            self.name,
            aliases={HEAD: EMBEDDING} if run.tied and EMBEDDING in weights.rows else {},
            optimizer={kind: joined.arrays() for kind, joined in moments.items()},
            meta=meta,
            config=config_of(args),
            unavailable={**weights.unavailable, **wrong},
            problems=tuple(problems),
            views=views,
        )

    def _fusions(self, ranks: Sequence[_Rank], args: Mapping[str, Any]) -> tuple[Fusion, Fusion]:
        """Return how ranks lay out what they fuse: outside experts, and in experts."""
        gated = self.gated
        for option in ("swiglu", "quick_geglu", "gated_linear_unit"):
            if type(args.get(option)) is bool and (gated is None or args[option]):
                gated = args[option] if self.gated is None else self.gated
        order = self.qkv_order or _order_before_mcore(ranks[0])
        heads, d = number(args, "num_attention_heads"), number(args, "kv_channels")
        if heads and d is None and number(args, "hidden_size"):
            d = (number(args, "hidden_size") or 0) // heads
        kv = number(args, "num_query_groups") if args.get("group_query_attention") is True else heads
        interleave = self.glu_interleave or number(args, "moe_mlp_glu_interleave_size") or 0
        experts = any(taken_apart(n).is_expert for rank in ranks for chunk in rank.chunks for n in chunk)
        usual = Fusion(gated, 0, (heads, kv, d) if heads and kv and d else None, order)
        turns = replace(usual, gated=True, interleave=interleave) if interleave else usual
        return (usual, turns) if experts else (turns, turns)


def _order_before_mcore(rank: _Rank) -> str:
    """Return how `linear_qkv` has its rows: megatron-core knows one order only, older files tell theirs by a version."""
    version = rank.root.get("checkpoint_version", 0)
    if not rank.is_old or type(version) not in (int, float) or version >= 2:
        return "grouped"
    return "trailing" if version >= 1 else "concatenated"


def _no_save(folder: Folder, save: Save | None) -> str:
    if save is not None and save.why:
        return save.why
    if save is not None and save.kind == UNFINISHED:
        return f"{save.name}: holds no checkpoint"
    if save is not None:
        return f"{save.name}: a torch_dist checkpoint of megatron-core; open it with format='megatron_core'"
    return f"{folder.name}: no mp_rank_* folder with {MODEL_FILES[0]} is there, nor an iteration folder with such"


# --- ranks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Rank:
    """The files of one rank."""

    folder: str
    numbers: tuple[int, ...]
    file: TorchFile | None = None
    why: str = ""
    """Why there is no file."""
    root: Mapping[Any, Any] = field(default_factory=dict)
    chunks: list[dict[str, Tensor]] = field(default_factory=list)
    """The model's tensors per virtual chunk, under mcore's names."""
    skipped: list[str] = field(default_factory=list)
    """What is no tensor of the model."""
    is_old: bool = False
    """Whether its names are those before megatron-core."""
    buffers: TorchFile | None = None
    buffers_why: str = ""
    t: int = 0
    p: int = 0
    e: int = 0

    @property
    def label(self) -> str:
        return self.file.source.name if self.file else f"{self.folder}/{MODEL_FILES[0]}"


def _read_ranks(save: Save) -> list[_Rank]:
    folders = [n.rstrip("/") for n in save.folder.names() if RANK_FOLDER.fullmatch(n)]
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="meshload") as pool:
        ranks = list(pool.map(partial(_read_rank, save.folder), folders or [""]))
    if not any(rank.file for rank in ranks):
        raise FormatError(f"{save.name}: no rank's file can be read: {listing((r.why for r in ranks), _LOST)}")
    return ranks


def _read_rank(folder: Folder, name: str) -> _Rank:
    match = RANK_FOLDER.fullmatch(f"{name}/")
    rank = _Rank(name, tuple(int(n) for n in match.groups() if n) if match else ())
    at = f"{name}/" if name else ""
    listed = folder.names(name)
    model = next((n for n in MODEL_FILES if n in listed), None)
    if model is None:
        rank.why = f"{at}{MODEL_FILES[0]} is not there"
        return rank
    try:
        found = TorchFile.open(folder.file(f"{at}{model}"))
        _take(rank, found)
    except (FormatError, SourceError) as error:
        rank.why = str(error)
        return rank
    if BUFFERS_FILE in listed:
        try:
            rank.buffers = TorchFile.open(folder.file(f"{at}{BUFFERS_FILE}"))
        except (FormatError, SourceError) as error:
            rank.buffers_why = str(error)
    if any(n.startswith("layer_wise_optimizer") for n in listed):
        rank.buffers_why = "the optimizer is in layer_wise_optimizer_*.pt, which is not read"
    return rank


def _take(rank: _Rank, file: TorchFile) -> None:
    if type(file.root) is not dict:
        raise FormatError(f"{file.source.name}: holds {type(file.root).__name__}, a dict with 'model' was expected")
    keys = (
        ["model"]
        if "model" in file.root
        else sorted((k for k in file.root if type(k) is str and re.fullmatch(r"model\d{1,4}", k)), key=lambda k: int(k[5:]))
    )
    if not keys or (keys != ["model"] and keys != [f"model{i}" for i in range(len(keys))]):
        raise FormatError(f"{file.source.name}: has no 'model', nor 'model0', 'model1' ..., but {listing(map(str, file.root))}")
    for key in keys:
        tensors = _state(file.root[key], key, rank.skipped, file.source.name)
        rank.is_old = rank.is_old or any(n.startswith("language_model.") for n in tensors)
        rank.chunks.append({_renamed(n): t for n, t in tensors.items()} if rank.is_old else tensors)
    rank.file, rank.root = file, file.root


def _state(found: Any, key: str, skipped: list[str], file: str) -> dict[str, Tensor]:
    """Return the tensors of a chunk, in their order."""
    if type(found) is not dict:
        raise FormatError(f"{file}: {key} is {type(found).__name__}, a dict of tensors was expected")
    tensors: dict[str, Tensor] = {}
    for name, value in _leaves(found, ""):
        if type(value) is Tensor and not name.endswith("_extra_state"):
            tensors[name] = value
        elif not name.endswith("_extra_state"):
            skipped.append(f"{key}.{name}")
    while tensors and all(n.startswith("module.") for n in tensors):
        tensors = {n.removeprefix("module."): t for n, t in tensors.items()}
    return tensors


def _leaves(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if type(value) is dict:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_BEFORE_MCORE = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(?:encoder|transformer)\.(?=layers\.|final_)"), "decoder."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
    (re.compile(r"^word_embeddings_for_head\."), "word_embeddings_for_head."),
    (re.compile(r"(\.layers\.\d+\.)post_attention_(?:layer)?norm\."), r"\1pre_mlp_layernorm."),
    (re.compile(r"(\.layers\.\d+\.)input_norm\."), r"\1input_layernorm."),
    (re.compile(r"(\.layers\.\d+\.)attention\."), r"\1self_attention."),
    (re.compile(r"\.self_attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.self_attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.local_experts\."), ".mlp.experts.local_experts."),
    (re.compile(r"\.dense_h_to_4h\."), ".linear_fc1."),
    (re.compile(r"\.dense_4h_to_h\."), ".linear_fc2."),
)
"""How the names before megatron-core are spelled now."""

_COPY = "word_embeddings_for_head.weight"
"""The last stage's copy of the embedding, before megatron-core."""


def _renamed(name: str) -> str:
    for old, new in _BEFORE_MCORE:
        name = old.sub(new, name)
    return name


# --- the mesh ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mesh:
    tp: int
    pp: int
    ep: int
    etp: int

    def place(self, numbers: Sequence[int]) -> tuple[int, int, int] | None:
        """Return tensor, pipeline and expert rank of a folder's numbers; None where the folder belongs to another mesh."""
        if len(numbers) != 1 + (self.pp > 1) + (self.ep > 1):
            return None
        rest = list(numbers[1:])
        p = rest.pop(0) if self.pp > 1 else 0
        e = rest.pop(0) if self.ep > 1 else 0
        return (numbers[0], p, e) if numbers[0] < self.tp and p < self.pp and e < self.ep else None


def _mesh_of(args: Mapping[str, Any]) -> _Mesh | None:
    tp = number(args, "tensor_model_parallel_size") or number(args, "model_parallel_size")
    if tp is None:
        return None
    pp, ep = number(args, "pipeline_model_parallel_size", 1) or 1, number(args, "expert_model_parallel_size", 1) or 1
    return _Mesh(tp, pp, ep, number(args, "expert_tensor_parallel_size", tp) or tp)


def _placed(save: Save, ranks: list[_Rank]) -> tuple[_Mesh, Mapping[str, Any], list[_Rank], list[Problem]]:
    """Return the mesh, its `args`, the ranks that were read, in the order of their copies, and what is wrong."""
    meshes: dict[_Mesh, list[_Rank]] = {}
    for rank in ranks:
        mesh = _mesh_of(arguments(rank.root.get("args"))) if rank.file else None
        if mesh is not None:
            meshes.setdefault(mesh, []).append(rank)
    if not meshes:
        mesh = _mesh_by_names(save, ranks)
        meshes[mesh] = [rank for rank in ranks if rank.file]
    mesh = _chosen(save, meshes)
    args = arguments(meshes[mesh][0].root.get("args"))
    if not ranks[0].folder:
        if mesh.tp * mesh.pp * mesh.ep > 1:
            raise FormatError(
                f"{save.name}: is one rank's folder of tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}; open the folder above it, which "
                f"has them all"
            )
        return mesh, args, ranks, []
    at: dict[tuple[int, int, int], _Rank] = {}
    stale = []
    for rank in ranks:
        place = mesh.place(rank.numbers)
        if place is None or (rank.file and rank not in meshes[mesh]):
            stale.append(rank.folder)
        else:
            rank.t, rank.p, rank.e = place
            at[place] = rank
    if stale:
        warnings.warn(
            f"{save.name}: its checkpoint is of tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}; {listing(stale)} belong to another, "
            f"and are passed over",
            MeshloadWarning,
            stacklevel=4,
        )
    there = sorted((r for r in at.values() if r.file), key=lambda r: (r.p, r.e, r.t))
    return mesh, args, there, _lost(mesh, at)


def _chosen(save: Save, meshes: Mapping[_Mesh, list[_Rank]]) -> _Mesh:
    """Return the mesh whose files are there, where files of another were left behind."""
    if len(meshes) == 1:
        return next(iter(meshes))
    whole = []
    for mesh, ranks in meshes.items():
        at = {place: rank for rank in ranks if (place := mesh.place(rank.numbers)) is not None}
        if not _lost(mesh, at):
            whole.append(mesh)
    if len(whole) == 1:
        return whole[0]
    kinds = listing(f"tp {m.tp} pp {m.pp} ep {m.ep} ({len(r)} files)" for m, r in meshes.items())
    raise FormatError(
        f"{save.name}: holds files of several meshes, {kinds}, of which {len(whole)} are complete; move the others away"
    )


def _lost(mesh: _Mesh, at: Mapping[tuple[int, int, int], _Rank]) -> list[Problem]:
    """Tell which ranks' files are needed and not there. With etp other than tp, not each (tensor, expert) rank has one."""
    found = []
    there = {place for place, rank in at.items() if rank.file}
    for p in range(mesh.pp):
        for t in range(mesh.tp):
            for e in range(mesh.ep):
                dense = any((t, p, other) in there for other in range(mesh.ep))
                experts = any((other, p, e) in there for other in range(t % mesh.etp, mesh.tp, mesh.etp))
                if (t, p, e) in there or (mesh.etp != mesh.tp and dense and experts):
                    continue
                name = f"mp_rank_{t:02}{f'_{p:03}' if mesh.pp > 1 else ''}{f'_{e:03}' if mesh.ep > 1 else ''}"
                rank = at.get((t, p, e))
                file = f"{name}/{MODEL_FILES[0]}"
                why = rank.why if rank else f"{file} is not there"
                of = f"tensor rank {t} of {mesh.tp}, pipeline rank {p} of {mesh.pp}, expert rank {e} of {mesh.ep}"
                found.append(Problem(f"{why}; it is to hold {of}", file=file))
    return found


def _mesh_by_names(save: Save, ranks: Sequence[_Rank]) -> _Mesh:
    """Return the mesh where no `args` tell it: from the folders' numbers, and from who holds the embedding."""
    lengths = {len(rank.numbers) for rank in ranks}
    if len(lengths) > 1:
        raise FormatError(f"{save.name}: no file has args, and the names of its folders are of several kinds; move one kind away")
    size = [max(rank.numbers[i] for rank in ranks) + 1 for i in range(lengths.pop())]
    tp = size[0] if size else 1
    if len(size) < 2:
        return _Mesh(tp, 1, 1, tp)
    if len(size) == 3:
        return _Mesh(tp, size[1], size[2], tp)
    everywhere = all(EMBEDDING in chunk for rank in ranks if rank.file for chunk in rank.chunks[:1])
    return _Mesh(tp, 1, size[1], tp) if everywhere else _Mesh(tp, size[1], 1, tp)


# --- layers and experts -----------------------------------------------------------------------------------------------


def _layers(ranks: Sequence[_Rank], mesh: _Mesh, args: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """Return, for chunk `v` of stage `p`, how many layers of the model come before its own."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for v, chunk in enumerate(rank.chunks):
            numbers = {n for n in (taken_apart(name).layer for name in chunk) if n is not None}
            if numbers != set(range(len(numbers))):
                raise FormatError(f"{rank.label}: its layers are {sorted(numbers)[:8]}, they were expected to count from 0 on")
            if counts.setdefault((v, rank.p), len(numbers)) != len(numbers):
                raise FormatError(
                    f"{rank.label}: chunk {v} of pipeline rank {rank.p} has {len(numbers)} layers, in another rank's file "
                    f"{counts[v, rank.p]}"
                )
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) != 1:
        raise FormatError(f"{ranks[0].label}: ranks have different numbers of virtual chunks: {sorted(chunks)}")
    virtual = chunks.pop()
    absent = [(v, p) for v in range(virtual) for p in range(mesh.pp) if (v, p) not in counts]
    if absent:
        told = layers_of(args, mesh.pp, virtual)
        if told is None:
            raise FormatError(
                f"no file of pipeline rank {absent[0][1]} can be read, and args do not say how many layers it has, so those of "
                f"later ranks cannot be numbered"
            )
        counts |= {place: told[place] for place in absent}
    total, expected = sum(counts.values()), number(args, "num_layers")
    if expected is not None and total != expected:
        raise FormatError(
            f"the ranks' files hold {total} layers ({', '.join(str(counts[k]) for k in sorted(counts))} in order), "
            f"args say {expected}"
        )
    before, found = 0, {}
    for place in sorted(counts):
        found[place] = before
        before += counts[place]
    return found


def _experts(ranks: Sequence[_Rank], mesh: _Mesh, args: Mapping[str, Any]) -> int:
    """Return how many experts each expert-parallel rank has."""
    experts = number(args, "num_experts")
    if experts is not None:
        return experts // mesh.ep
    numbers = {taken_apart(name).expert for rank in ranks for chunk in rank.chunks for name in chunk} - {None}
    return len(numbers)


def _tied(args: Mapping[str, Any]) -> bool:
    return args.get("untie_embeddings_and_output_weights") is False


# --- joining ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """What the names of a rank's parameters mean in the whole model."""

    mesh: _Mesh
    args: Mapping[str, Any]
    layers: Mapping[tuple[int, int], int]
    experts: int
    fusions: tuple[Fusion, Fusion]
    tied: bool

    def add(self, joined: Joined, rank: _Rank, v: int, name: str, shard: Shard) -> None:
        """Add a rank's shard to the array that it is a part of."""
        mesh, count = self.mesh, self.experts
        for single, part in (grouped(name, shard, count) if count else None) or ((name, shard),):
            found = taken_apart(single)
            whole = found.whole(self.layers[v, rank.p], rank.e * count)
            if whole == _COPY or (whole == HEAD and self.tied):
                whole = EMBEDDING
            if found.is_expert:
                joined.add(whole, part, found.cut, rank.t % mesh.etp, mesh.etp, self.fusions[1])
            else:
                joined.add(whole, part, found.cut, rank.t, mesh.tp, self.fusions[0])


class _Refused(Exception):
    """The optimizer cannot be told apart, for the reason given."""


def _joined(ranks: Sequence[_Rank], run: _Run) -> tuple[Joined, dict[str, Joined], str]:
    """Join the ranks' shards of weights and of optimizer arrays; tell why the latter are refused, if they are."""
    files = (file for rank in ranks for file in (rank.file, rank.buffers or rank.file))
    sources = tuple(file.source for file in files if file)
    weights = Joined(sources)
    moments: dict[str, Joined] = {}
    refused = ""
    for i, rank in enumerate(ranks):
        assert rank.file is not None
        for v, chunk in enumerate(rank.chunks):
            for name, tensor in chunk.items():
                why = rank.file.refusal(tensor)
                if why:
                    weights.unavailable.setdefault(taken_apart(name).whole(run.layers[v, rank.p], rank.e * run.experts), why)
                elif 0 not in tensor.shape:
                    run.add(weights, rank, v, name, _shard(rank.file, 2 * i, tensor))
        if refused:
            continue
        try:
            for kind, v, name, shard in _moments(rank, i, run):
                run.add(moments.setdefault(kind, Joined(sources)), rank, v, name, shard)
        except _Refused as error:
            refused, moments = str(error), {}
    return weights, moments, refused


def _shard(file: TorchFile, source: int, tensor: Tensor) -> Shard:
    offset = file.extents[tensor.key][0] + tensor.offset
    return Shard(source, offset, tensor.shape, tensor.strides, DTYPES[tensor.dtype])


# --- the optimizer ----------------------------------------------------------------------------------------------------

_Moment = tuple[str, int, str, Shard]
"""Kind, chunk, parameter, and where it lies."""

_Parameter = tuple[int, str, Tensor]

_KINDS = {"param": "master", "master_param": "master"}


def _moments(rank: _Rank, i: int, run: _Run) -> Iterator[_Moment]:
    """Go through a rank's optimizer arrays, whose names are found by their order; what does not fit raises `_Refused`."""
    assert rank.file is not None
    found = rank.root.get("optimizer")
    parts = [p for p in (found if type(found) is list else [found]) if type(p) is dict]
    every: list[_Parameter] = [(v, name, chunk[name]) for v, chunk in enumerate(rank.chunks) for name in parameters(chunk)]
    if rank.buffers_why:
        raise _Refused(rank.buffers_why)
    if rank.buffers is not None:
        yield from _buffers(rank, rank.buffers, 2 * i + 1, parts, every, run)
        return
    separate = any(_is_expert(group) for part in parts for group in _groups(part))
    for part in parts:
        yield from _states(rank, rank.file, 2 * i, part, every, separate, run)


def _inner(part: Mapping[Any, Any]) -> Mapping[Any, Any]:
    inner = part.get("optimizer")
    return inner if type(inner) is dict else part


def _groups(part: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    groups = _inner(part).get("param_groups")
    return [g for g in groups if type(g) is dict] if type(groups) is list else []


def _is_expert(group: Mapping[Any, Any]) -> bool:
    return group.get("is_expert_parallel") is True


def _states(
    rank: _Rank,
    file: TorchFile,
    source: int,
    part: Mapping[Any, Any],
    every: Sequence[_Parameter],
    separate: bool,
    run: _Run,
) -> Iterator[_Moment]:
    """Go through the states of one optimizer that torch saved, and its masters."""
    state = _inner(part).get("state")
    masters = part.get("fp32_from_fp16_params", part.get("fp32_from_fp16"))
    if type(state) is not dict or (not state and not masters):
        if run.args.get("use_distributed_optimizer") is True:
            raise _Refused(f"{rank.folder}/{BUFFERS_FILE} is not there")
        return
    groups = _groups(part)
    members = _members(rank, groups, every, separate, run)
    for g, (group, parameters_) in enumerate(zip(groups, members, strict=True)):
        for index, parameter in zip(group["params"], parameters_, strict=True):
            entries = state.get(index)
            for kind, value in entries.items() if type(entries) is dict else ():
                if type(value) is Tensor and (value.shape or not parameter[2].shape):
                    yield _moment(rank, file, source, _KINDS.get(kind, str(kind)), parameter, value)
        if masters is not None:
            yield from _masters(rank, file, source, masters, g, parameters_)


def _masters(rank: _Rank, file: TorchFile, source: int, masters: Any, g: int, members: Sequence[_Parameter]) -> Iterator[_Moment]:
    """Go through a group's masters: those of its parameters that are 16 bits wide have one."""
    found = masters[g] if type(masters) is list and g < len(masters) else None
    narrow = [m for m in members if m[2].dtype in ("bfloat16", "float16")]
    if type(found) is not list or len(found) != len(narrow):
        n = len(found) if type(found) is list else "no list of"
        raise _Refused(f"{rank.label}: group {g} has {n} masters for {len(narrow)} parameters of 16 bits")
    for parameter, value in zip(narrow, found, strict=True):
        yield _moment(rank, file, source, "master", parameter, value)


def _moment(rank: _Rank, file: TorchFile, source: int, kind: str, parameter: _Parameter, value: Any) -> _Moment:
    v, name, tensor = parameter
    if type(value) is not Tensor or value.shape != tensor.shape:
        shape = value.shape if type(value) is Tensor else type(value).__name__
        raise _Refused(f"{rank.label}: the {kind} in the place of {name} has shape {shape}, the parameter has {tensor.shape}")
    why = file.refusal(value)
    if why:
        raise _Refused(f"{rank.label}: the {kind} of {name}: {why}")
    return kind, v, name, _shard(file, source, value)


def _members(
    rank: _Rank, groups: Sequence[Mapping[Any, Any]], every: Sequence[_Parameter], separate: bool, run: _Run
) -> list[list[_Parameter]]:
    """Return the parameters of each param group: those of its kind, in module order."""
    kinds = [(g.get("wd_mult"), _is_expert(g), g.get("is_decoupled_lr") is True) for g in groups]
    if any(wd not in (0.0, 1.0) for wd, _, _ in kinds):
        raise _Refused(f"{rank.label}: a param group's wd_mult is neither 0 nor 1, so which parameters it has is not known")
    used = [kind for kind, g in zip(kinds, groups, strict=True) if g.get("params")]
    if len(set(used)) != len(used):
        raise _Refused(f"{rank.label}: param groups differ by more than weight decay, so which parameters each has is not known")
    decoupled = any(kind[2] for kind in used)
    by_kind: dict[tuple[Any, bool, bool], list[_Parameter]] = {}
    for parameter in every:
        _, name, tensor = parameter
        decays = len(tensor.shape) > 1 and not name.endswith(".bias")
        if run.args.get("apply_wd_to_qk_layernorm") is True and re.search(r"\.[qk]_layernorm\.", name):
            decays = True
        own = (float(decays), separate and taken_apart(name).is_expert, decoupled and name in (EMBEDDING, HEAD, _COPY))
        by_kind.setdefault(own, []).append(parameter)
    found = []
    for kind, group in zip(kinds, groups, strict=True):
        there = by_kind.get(kind, []) if group.get("params") else []
        count = len(group["params"]) if type(group.get("params")) is list else 0
        if len(there) != count:
            raise _Refused(
                f"{rank.label}: a param group (wd_mult {kind[0]}, experts {kind[1]}) has {count} parameters, the model "
                f"{len(there)} of its kind; some may be frozen, and which is not stored"
            )
        found.append(there)
    return found


def _buffers(
    rank: _Rank,
    file: TorchFile,
    source: int,
    parts: Sequence[Mapping[Any, Any]],
    every: Sequence[_Parameter],
    run: _Run,
) -> Iterator[_Moment]:
    """Go through the flat buffers of the distributed optimizer."""
    root = file.root
    entries = root if type(root) is list else [root]
    experts = [any(map(_is_expert, _groups(part))) for part in parts] or [False]
    if len(entries) != len(experts) or experts.count(False) > 1 or experts.count(True) > 1:
        raise _Refused(
            f"{rank.folder}/{BUFFERS_FILE}: holds {len(entries)} optimizers, {len(experts)} were expected, one for the experts' "
            f"parameters and one for the others"
        )
    apart = run.mesh.ep > 1
    for entry, is_expert in zip(entries, experts, strict=True):
        if entry is None:  # another rank's file has it
            continue
        mine = [m for m in every if (apart and taken_apart(m[1]).is_expert) == is_expert]
        buffers: dict[tuple[int, str], list[_Parameter]] = {}
        for parameter in mine:
            buffers.setdefault((parameter[0], parameter[2].dtype), []).append(parameter)
        stored = _stored_buffers(rank, entry)
        if [dtype for dtype, _ in stored] != [dtype for _, dtype in buffers]:
            raise _Refused(
                f"{rank.folder}/{BUFFERS_FILE}: its buffers are of {[d for d, _ in stored]}, the model's chunks give "
                f"{[d for _, d in buffers]}"
            )
        for (_, values), members in zip(stored, buffers.values(), strict=True):
            yield from _unpacked(rank, file, source, values, members, run)


def _stored_buffers(rank: _Rank, entry: Any) -> list[tuple[str, Any]]:
    """Return the parameters' dtype and the values of each buffer."""
    if type(entry) is not dict:
        raise _Refused(f"{rank.folder}/{BUFFERS_FILE}: an optimizer is {type(entry).__name__}, a dict was expected")
    found = []
    for i in sorted(k for k in entry if type(k) is int):
        for key, values in entry[i].items() if type(entry[i]) is dict else ():
            dtype = key[0] if type(key) is tuple and key else key
            found.append((dtype.name if isinstance(dtype, Global) else str(dtype), values))
    return found


def _unpacked(
    rank: _Rank, file: TorchFile, source: int, values: Any, members: Sequence[_Parameter], run: _Run
) -> Iterator[_Moment]:
    """Go through the parameters in one buffer, whose buckets follow one another or, before `buckets_coalesced`, are a list."""
    sizes = [_size(m[2]) for m in members]
    listed = [v for v in values if type(v) is dict] if type(values) is list else None
    first = (listed[0] if listed else {}) if listed is not None else values
    if type(first) is not dict or not all(type(first.get(kind)) is Tensor for kind in ("param", "exp_avg", "exp_avg_sq")):
        raise _Refused(f"{rank.folder}/{BUFFERS_FILE}: a buffer has no param, exp_avg and exp_avg_sq")
    limit = bucket_limit(run.args, rank.p, members[0][0])
    shared = {EMBEDDING, HEAD} if run.tied and run.mesh.pp > 1 else set()
    alone = {n for n, m in enumerate(members) if m[1] in shared}
    held = [_length(v.get("param")) for v in listed] if listed is not None else [_length(first.get("param"))]
    expected = [int(first["numel_unpadded"])] if type(first.get("numel_unpadded")) is int else held
    made = laid_out(sizes, expected, limit=limit, alone=alone)
    if made is None:
        raise _Refused(
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
                raise _Refused(f"{rank.folder}/{BUFFERS_FILE}: {kind}: {why or value.dtype}")
            whole = _shard(file, source, value)
            for n, start in zip(bucket.numbers, bucket.starts, strict=True):
                v, name, tensor = members[n]
                shard = _inside(whole, base + start, tensor.shape)
                if base + start + sizes[n] > value.shape[0]:
                    raise _Refused(f"{rank.folder}/{BUFFERS_FILE}: {kind} has {value.shape[0]} elements, {name} ends behind them")
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


def _size(tensor: Tensor) -> int:
    count = 1
    for n in tensor.shape:
        count *= n
    return count


def _length(found: Any) -> int:
    return found.shape[0] if type(found) is Tensor and len(found.shape) == 1 else -1


# --- what else there is -----------------------------------------------------------------------------------------------


def _meta(save: Save, ranks: Sequence[_Rank], run: _Run) -> dict[str, Any]:
    root = ranks[0].root
    found = root.get("optimizer")
    parts = [p for p in (found if type(found) is list else [found]) if type(p) is dict]
    meta: dict[str, Any] = {
        "save": save.name,
        "iteration": plain(root.get("iteration", root.get("total_iters"))),
        "checkpoint_version": plain(root.get("checkpoint_version", 0)),
        "mesh": {"tp": run.mesh.tp, "pp": run.mesh.pp, "ep": run.mesh.ep, "etp": run.mesh.etp},
        "args": plain(dict(run.args)),
        "param_groups": [{k: plain(v) for k, v in group.items() if k != "params"} for part in parts for group in _groups(part)],
    }
    scheduler = root.get("opt_param_scheduler", root.get("lr_scheduler"))
    if scheduler is not None:
        meta["opt_param_scheduler"] = plain(scheduler)
    skipped = {name for rank in ranks for name in rank.skipped}
    if skipped:
        meta["skipped"] = tuple(sorted(skipped))
    return meta


def _stored(ranks: Iterable[_Rank]) -> Checkpoint:
    """Return every tensor of every file, under the file's name and its own path."""
    arrays: dict[str, Array] = {}
    unavailable: dict[str, str] = {}
    for rank in ranks:
        for file in (rank.file, rank.buffers):
            for path, tensor in _tensors(file.root, "") if file else ():
                name = f"{file.source.name}/{path}" if file else path
                why = file.refusal(tensor) if file else ""
                if why:
                    unavailable[name] = why
                elif file:
                    arrays[name] = file.array(tensor, name)
    return Checkpoint(arrays, "megatron", unavailable=unavailable, names="stored")


def _tensors(found: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if type(found) is Tensor:
        yield path, found
        return
    items = found.items() if type(found) is dict else enumerate(found) if type(found) in (list, tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{path}.{plain(key)}" if path else str(plain(key)))
