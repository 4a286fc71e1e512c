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
refused; the reason is in `unavailable["optimizer.states"]`.

Source: https://github.com/NVIDIA/Megatron-LM, `megatron/training/checkpointing.py`, `megatron/core/optimizer`. Tried with
megatron-core 0.13 and 0.16. Not read, and told in the same place: `layer_wise_optimizer_*.pt`, and `optim.pt` of old releases,
beside `model_rng.pt` or in a folder `mp_rank_{TT}_{PPP}_{DDD}` of each data-parallel rank.

Written are weights, for a mesh with the axes `tp`, `pp` and `ep`, and `args` with what Megatron takes from a checkpoint; all ranks
have equally many layers, rows of zeros make the vocabulary a multiple of tp, and names are those of the local layer spec. Load it
without random state; and without optimizer, or with moments, masters and their step where they are converted: of the distributed
optimizer, whose buffers have one bucket, as without `--overlap-grad-reduce`, or of others with `distributed_optimizer=False`, in
the folder of their iteration. Experts that are cut over ranks have an optimizer of their own. There is no loss scale of fp16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError
from meshload.source import Folder

from ._megatron import REFUSED, config_of, layers_of, number, plain, shown
from ._megatron_buffers import Refused
from ._megatron_find import CORE, MODEL_FILES, UNFINISHED, Save, find_save
from ._megatron_ranks import COPY, Mesh, Rank, placed, read_ranks
from ._megatron_shards import EMBEDDING, HEAD, Fusion, Joined, Shard, grouped, misgated, taken_apart
from ._megatron_states import Model, moments_of, optimizers_in, shard_of, told_of
from ._torch_file import Tensor

if TYPE_CHECKING:
    from .formats.megatron import Megatron


def checkpoint_in(folder: Folder, options: Megatron) -> Checkpoint:
    """Read the pickles of all ranks; those that are absent or damaged are told in `problems`."""
    save = find_save(folder)
    if save is None or save.kind == CORE or save.why:
        raise FormatError(_no_save(folder, save))
    ranks = read_ranks(save)
    mesh, args, there, problems = placed(save, ranks)
    layers = _layers(there, mesh, args)
    run = _Run(mesh, args, layers, _experts(there, mesh, args), _fusions(options, there, args), _tied(args))
    weights, moments, refused = _joined(there, run)
    meta = _meta(save, there, run)
    views = {"stored": partial(_stored, there)}
    arrays = weights.arrays()
    gated = run.fusions[0].gated
    wrong = {} if gated is None else misgated(arrays, gated)
    return Checkpoint(
        {name: array for name, array in arrays.items() if name not in wrong},
        "megatron",
        aliases={HEAD: EMBEDDING} if run.tied and EMBEDDING in weights.rows else {},
        optimizer={kind: joined.arrays() for kind, joined in moments.items()},
        meta=meta,
        config=config_of(args),
        unavailable={**weights.unavailable, **wrong, **({REFUSED: refused} if refused else {})},
        problems=tuple(problems),
        views=views,
    )


def _fusions(options: Megatron, ranks: Sequence[Rank], args: Mapping[str, Any]) -> tuple[Fusion, Fusion]:
    """Return how ranks lay out what they fuse: outside experts, and in experts."""
    gated = options.gated
    for option in ("swiglu", "quick_geglu", "gated_linear_unit"):
        if type(args.get(option)) is bool and (gated is None or args[option]):
            gated = args[option] if options.gated is None else options.gated
    order = options.qkv_order or _order_before_mcore(ranks[0])
    heads, d = number(args, "num_attention_heads"), number(args, "kv_channels")
    if heads and d is None and number(args, "hidden_size"):
        d = (number(args, "hidden_size") or 0) // heads
    kv = number(args, "num_query_groups") if args.get("group_query_attention") is True else heads
    interleave = options.glu_interleave or number(args, "moe_mlp_glu_interleave_size") or 0
    experts = any(taken_apart(n).is_expert for rank in ranks for chunk in rank.chunks for n in chunk)
    usual = Fusion(gated, 0, (heads, kv, d) if heads and kv and d else None, order)
    turns = replace(usual, gated=True, interleave=interleave) if interleave else usual
    return (usual, turns) if experts else (turns, turns)


def _order_before_mcore(rank: Rank) -> str:
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


# --- layers and experts -----------------------------------------------------------------------------------------------


def _layers(ranks: Sequence[Rank], mesh: Mesh, args: Mapping[str, Any]) -> dict[tuple[int, int], int]:
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


def _experts(ranks: Sequence[Rank], mesh: Mesh, args: Mapping[str, Any]) -> int:
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

    mesh: Mesh
    args: Mapping[str, Any]
    layers: Mapping[tuple[int, int], int]
    experts: int
    fusions: tuple[Fusion, Fusion]
    tied: bool

    def add(self, joined: Joined, rank: Rank, v: int, name: str, shard: Shard) -> None:
        """Add a rank's shard to the array that it is a part of."""
        mesh, count = self.mesh, self.experts
        for single, part in (grouped(name, shard, count) if count else None) or ((name, shard),):
            found = taken_apart(single)
            whole = found.whole(self.layers[v, rank.p], rank.e * count)
            if whole == COPY or (whole == HEAD and self.tied):
                whole = EMBEDDING
            if found.is_expert:
                joined.add(whole, part, found.cut, rank.t % mesh.etp, mesh.etp, self.fusions[1])
            else:
                joined.add(whole, part, found.cut, rank.t, mesh.tp, self.fusions[0])


def _joined(ranks: Sequence[Rank], run: _Run) -> tuple[Joined, dict[str, Joined], str]:
    """Join the ranks' shards of weights and of optimizer arrays; tell why the latter are refused, if they are."""
    files = (file for rank in ranks for file in (rank.file, rank.buffers or rank.file))
    sources = tuple(file.source for file in files if file)
    weights, model = Joined(sources), Model(run.args, run.mesh.pp, run.mesh.ep, run.tied)
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
                    run.add(weights, rank, v, name, shard_of(rank.file, 2 * i, tensor))
        if refused:
            continue
        try:
            for kind, v, name, shard in moments_of(rank, i, model):
                run.add(moments.setdefault(kind, Joined(sources)), rank, v, name, shard)
        except Refused as error:
            refused, moments = str(error), {}
    return weights, moments, refused


# --- what else there is -----------------------------------------------------------------------------------------------


def _meta(save: Save, ranks: Sequence[Rank], run: _Run) -> dict[str, Any]:
    root = ranks[0].root
    optimizers = [(file, part) for part in optimizers_in(root.get("optimizer"))] if (file := ranks[0].file) else []
    meta: dict[str, Any] = {
        "save": save.name,
        "iteration": plain(root.get("iteration", root.get("total_iters"))),
        "checkpoint_version": plain(root.get("checkpoint_version", 0)),
        "mesh": {"tp": run.mesh.tp, "pp": run.mesh.pp, "ep": run.mesh.ep, "etp": run.mesh.etp},
        "args": plain(dict(run.args)),
    }
    if optimizers:
        meta["optimizer"] = told_of(optimizers)
    scheduler = root.get("opt_param_scheduler", root.get("lr_scheduler"))
    if scheduler is not None:
        meta["opt_param_scheduler"] = plain(scheduler)
    skipped = {name for rank in ranks for name in rank.skipped}
    if skipped:
        meta["skipped"] = tuple(sorted(skipped))
    return meta


def _stored(ranks: Iterable[Rank]) -> Checkpoint:
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
        yield from _tensors(value, f"{path}.{shown(key)}" if path else shown(key))
