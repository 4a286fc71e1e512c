"""The files that an engine of a chosen topology would have saved, without payload: each rank's shards, and its partition of them.

Which rank holds what is taken from the boxes of the target's mesh. How tensor-parallel ranks share their arrays is told in the
model states, as `universal_checkpoint_info`, since shapes tell nothing (`_cuts.py`). What its words cannot say is refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshload.box import Box, Shape, row_major
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.formats import Parts
from meshload.mesh import Mesh
from meshload.source import LocalFolder
from meshload.writing import lay_out, put

from ._cuts import Cut, Declared, adds_up, declared_cut
from ._torch_writer import NewTensor, dtype_of, laid_out, new_tensor
from ._zero import dict_of
from ._zero_files import UNIVERSAL_VERSION, Training, model_states, partitions, partitions_of_stage3, size, training_of
from ._zero_save import EXPERT_NAME, LAYER_NAME
from ._zero_weights import TIED

if TYPE_CHECKING:
    from .formats.deepspeed import DeepSpeed


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that is to go on."""

    stage: int
    """Of ZeRO."""
    is_pipeline: bool
    """Whether its model is a PipelineModule."""
    tied: Mapping[str, int]
    """Tie of a pipeline -> the layer whose file holds it."""
    sub_group_size: int
    """Elements of a rank's partition at which ZeRO-3 begins another flat tensor."""
    is_bf16: bool
    cut: Declared | None
    """What is declared of how its tensor-parallel ranks share parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """What one model-parallel rank holds."""

    stage: int
    tp: int
    shape_of: Mapping[str, Shape]


def files(
    like: Checkpoint, training: Training, groups: Sequence[Sequence[str]], parts: Parts, engine: Engine
) -> Iterator[tuple[str, Any]]:
    """Go through the files in the folder of a tag, with what is saved in each; `groups` are the optimizer's, in its order."""
    pp, tp, dp, ep = degrees_of(parts.mesh)
    layers = _expert_layers(like)
    ranks, cuts = _ranks(like, parts, pp, tp)
    _check(like, training, ranks, engine)
    if tp > 1 and like.names == "gpt_neox":
        _check_addends(like.arrays, engine)
    info = _universal_info(cuts) if tp > 1 else None
    if engine.is_pipeline:
        like = replace(like, aliases={})  # they are the ties
    written: set[str] = set()
    if ep > 1 and not layers:
        raise LayoutError(
            f"mesh: ep={ep}: no array is an expert's of DeepSpeed's MoE (...deepspeed_moe.experts.deepspeed_experts.N...)"
        )
    dtypes = {kind: dtype_of(next(iter(like.optimizer[kind].values()))) for kind in training.kinds}
    prefix = "bf16_" if engine.is_bf16 else ""
    for mp, rank in enumerate(ranks):
        held = [{n: rank.shape_of[n] for n in group if n in rank.shape_of} for group in groups]
        experts = [ep if any(map(EXPERT_NAME.fullmatch, group)) else 0 for group in held]
        held = [_of_one(group, ep) if n else group for group, n in zip(held, experts, strict=True)]
        cut = [_sub_groups(group, dp, engine.sub_group_size) for group in held] if engine.stage == 3 else [held]
        module = _module(like, rank, training if engine.stage == 3 else None)
        apart = _experts(module, layers)
        state = model_states(
            like,
            None if engine.is_pipeline else module,
            [sub for group in cut for sub in group],
            training.count,
            info,
            ranks=dp,
            degrees=(pp, tp),
            is_first=mp == 0,
        )
        if layers:
            state["num_experts"] = list(layers.values())
        for expert, tensors in apart.items():
            yield f"{expert}_mp_rank_{mp:02d}_model_states.pt", tensors
        if engine.stage == 3:
            whole = [n for n in rank.shape_of if not _is_partitioned(like, training, n)]
            more = {"buffer_names": whole, **_frozen(like, rank, training, dp)}
            for d in range(dp):
                shared = state["shared_params"] if d == 0 else {}
                yield f"zero_pp_rank_{d}_mp_rank_{mp:02d}_model_states.pt", {**state, **more, "shared_params": shared}
            roots = partitions_of_stage3(training, cut, dtypes, dp)
        else:
            yield f"mp_rank_{mp:02d}_model_states.pt", state
            roots = partitions(training, held, dtypes, dp, engine.stage, experts)
        for d, root in enumerate(roots):
            yield f"{prefix}zero_pp_rank_{d}_mp_rank_{mp:02d}_optim_states.pt", root
        for layer, tensors in _layers(module, engine).items() if engine.is_pipeline else ():
            file = f"layer_{layer:02d}-model_{rank.tp:02d}-model_states.pt"
            if file not in written:  # a tie's is the first stage's
                written.add(file)
                yield file, tensors


# --- which rank holds what --------------------------------------------------------------------------------------------


def degrees_of(mesh: Mesh) -> tuple[int, int, int, int]:
    """Return how many pipeline stages, tensor-parallel, data-parallel and, among these, expert-parallel ranks a mesh has.

    Other axes are refused.
    """
    others = {axis: n for axis, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1 and axis not in ("pp", "tp", "dp", "ep")}
    if others:
        axes = ", ".join(f"{axis}={n}" for axis, n in others.items())
        raise LayoutError(f"mesh: {axes}: only pp, tp, dp and ep can be written as DeepSpeed's own files")
    pp, tp, dp, ep = (mesh.size_of(axis) if axis in mesh else 1 for axis in ("pp", "tp", "dp", "ep"))
    return pp, tp, dp * ep, ep


def _expert_layers(like: Checkpoint) -> dict[str, int]:
    """Return the MoE layers, by what their experts' names begin with, in the module's order: how many experts each has."""
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(EXPERT_NAME.fullmatch, like.arrays)):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    wrong = next((layer for layer, found in numbers.items() if found != set(range(len(found)))), None)
    if wrong is not None:
        raise LayoutError(f"{wrong}*: experts {listing(map(str, sorted(numbers[wrong])))} are there, some are missing")
    names = {layer: layer.removesuffix("experts.deepspeed_experts.") for layer in numbers}  # those of its gate, too
    return {layer: len(numbers[layer]) for n in like.arrays for layer in numbers if n.startswith(names[layer])}


def _of_one(group: Mapping[str, Shape], ranks: int) -> dict[str, Shape]:
    """Return a group of experts as each of the expert-parallel ranks has it, which counts its own experts from 0."""
    matches = [match for match in map(EXPERT_NAME.fullmatch, group) if match]
    if len(matches) < len(group):
        other = next(name for name in group if not EXPERT_NAME.fullmatch(name))
        raise LayoutError(f"optimizer: {other} is in a group with experts, which DeepSpeed has in groups of their own")
    count: dict[str, int] = {}
    for match in matches:
        count[match[1]] = max(count.get(match[1], 0), int(match[2]) + 1)
    found: list[dict[str, Shape]] = [{} for _ in range(ranks)]
    for match in matches:
        if count[match[1]] % ranks:
            raise LayoutError(f"mesh: ep={ranks}: {match[1]}* are {count[match[1]]} experts, of which ranks have equal numbers")
        rank, i = divmod(int(match[2]), count[match[1]] // ranks)
        found[rank][f"{match[1]}{i}{match[3]}"] = group[match[0]]
    if any(list(one.items()) != list(found[0].items()) for one in found):
        raise LayoutError(
            f"optimizer: its experts differ in order or shape ({next(iter(group))} ...), ranks of ep={ranks} must not"
        )
    return found[0]


Told = int | None | dict[str, Any]
"""How ranks of tp share an array: they have equal parts of dim 0 or 1; each has the whole; or what an affine map says."""


def _ranks(like: Checkpoint, parts: Parts, pp: int, tp: int) -> tuple[list[Rank], dict[str, Told]]:
    """Return the model-parallel ranks, stage by stage, and how those of a stage share each array."""
    cuts: dict[str, Told] = {}
    if pp * tp == 1:
        return [Rank(0, 0, {name: array.shape for name, array in like.arrays.items()})], cuts
    shapes: dict[tuple[int, int], dict[str, Shape]] = {(p, t): {} for p in range(pp) for t in range(tp)}
    everyone = np.arange(parts.mesh.size)
    place = [parts.mesh.along(axis, everyone).tolist() if axis in parts.mesh else [0] * parts.mesh.size for axis in ("pp", "tp")]
    places = list(zip(*place, strict=True))
    for name, array in like.arrays.items():
        held = _boxes([name, *(alias for alias, owner in like.aliases.items() if owner == name)], parts, places)
        stages = sorted({p for p, _ in held})
        if not stages or (len(stages) > 1 and not TIED.fullmatch(name)):
            what = f"stages {listing(map(str, stages))} hold it" if stages else "the mesh's ranks hold no single box of it"
            raise LayoutError(f"{name}: {what}, which can be written as a universal checkpoint alone")
        cuts[name] = _cut(name, array.shape, [held.get((stages[0], t)) for t in range(tp)])
        for (p, t), box in held.items():
            if box != held.get((stages[0], t)):
                raise LayoutError(f"{name}: stages {stages[0]} and {p} hold different parts of it, rank {t} of tp")
            shapes[p, t][name] = box.shape
    return [Rank(p, t, found) for (p, t), found in shapes.items()], cuts


def _boxes(names: Iterable[str], parts: Parts, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Box]:
    """Return the box of each model-parallel rank: (stage, tensor-parallel rank) -> box; `places` are those of all ranks.

    `names` are those of one array.
    """
    found: dict[tuple[int, int], Box] = {}
    for name in names:
        for rank, box in parts.get(name, ()):
            if found.setdefault(places[rank], box) != box:
                raise LayoutError(f"{name}: the layout cuts it over dp, which ZeRO itself does; leave that to it")
    return found


def _cut(name: str, shape: Shape, boxes: Sequence[Box | None]) -> Told:
    """Return how tensor-parallel ranks share an array, of which each has a box."""
    count, known = len(boxes), [box for box in boxes if box is not None and box.size]
    if len(known) == count:
        cut = [d for d in range(len(shape)) if any(box.shape[d] != shape[d] for box in known)]
        if not cut:
            return None
        d = cut[0]
        even = all(box.start[d] == t * box.shape[d] and count * box.shape[d] == shape[d] for t, box in enumerate(known))
        if cut == [d] and d < 2 and even:
            return d
        apart = {*known}
        meet = any(one.meet(other) for one, other in itertools.combinations(apart, 2))
        if not meet and sum(box.size for box in apart) == math.prod(shape):
            return _affine(shape, known)
    found = listing(("nothing" if box is None else f"{box.shape} at {box.start}" for box in boxes), 4)
    raise LayoutError(
        f"{name}: the {count} ranks of tp hold {found} of {shape}; DeepSpeed's own files can say that each holds a box of it, "
        f"which others hold, too, or have nothing of"
    )


def _affine(shape: Shape, boxes: Sequence[Box]) -> dict[str, Any]:
    """Return the affine map by which `universal_checkpoint_info` tells where ranks' boxes lie, those that several have included."""
    strides, ranks = row_major(shape, 1), {}
    for rank, box in enumerate(boxes):
        piece = {
            "shape": list(box.shape),
            "source": [sum(a * s for a, s in zip(box.start, strides, strict=True)), list(strides)],
            "dest": [0, list(row_major(box.shape, 1))],
            "locations": [other for other, its in enumerate(boxes) if its == box],
        }
        ranks[rank] = {"shard_shape": list(box.shape), "pieces": [piece]}
    return {"logical_shape": list(shape), "ranks": ranks}


def _check(like: Checkpoint, training: Training, ranks: Sequence[Rank], engine: Engine) -> None:
    """Raise where such an engine could not have saved this."""
    if engine.is_pipeline:
        wrong = [n for n in like.arrays if not LAYER_NAME.fullmatch(n) and not TIED.fullmatch(n)]
        if wrong:
            raise LayoutError(
                f"{listing(wrong, 3)}: a pipeline's arrays are called LAYER.KEY; give a naming of such names (names='gpt_neox')"
            )
        untold = [n for n in like.arrays if (tie := TIED.fullmatch(n)) and tie[1] not in engine.tied]
        if untold:
            raise LayoutError(f"{untold[0]}: which layer's file is to hold it? say it with DeepSpeed(tied={{TIE: LAYER}})")
        others = [alias for alias, name in like.aliases.items() if not TIED.fullmatch(name)]
        if others:
            raise LayoutError(
                f"{listing(others, 3)} is tied to another layer, and what a pipeline calls the tie is told nowhere; "
                f"untie it, or write a universal checkpoint"
            )
        if engine.stage != 1:
            raise LayoutError(f"stage={engine.stage}: engines of pipelines have stage 1; say DeepSpeed(stage=1, pipeline=True)")
        last = -1
        for stage in sorted({rank.stage for rank in ranks}):
            numbers = [int(m[1]) for rank in ranks if rank.stage == stage for m in map(LAYER_NAME.fullmatch, rank.shape_of) if m]
            if numbers and min(numbers) <= last:
                raise LayoutError(
                    f"stage {stage} holds layer {min(numbers)}, an earlier one layer {last}; stages are runs of layers"
                )
            last = max(numbers, default=last)
    elif any(rank.stage for rank in ranks):
        raise LayoutError("mesh: stages are those of a PipelineModule; say DeepSpeed(stage=1, pipeline=True), or leave out pp")
    experts = next((n for n in like.arrays if EXPERT_NAME.fullmatch(n)), None)
    if experts is not None and (engine.is_pipeline or engine.stage == 3):
        raise LayoutError(f"{experts}: engines of stage 1 or 2 without a pipeline can have experts; say DeepSpeed(stage=2)")
    if engine.stage == 3:
        wide = [n for n in training.shape_of if like.arrays[n].dtype.itemsize > 4]
        half = [n for n in training.shape_of if dtype_of(like.arrays[n]) == "float16"]
        if wide or half:
            why = "would not keep its bits as float32" if wide else "has a loss scale, which is told nowhere"
            raise LayoutError(f"{(wide or half)[0]}: {like.arrays[(wide or half)[0]].dtype.name} {why}; say dtype= of another")


def _check_addends(names: Iterable[str], engine: Engine) -> None:
    """Raise where it is not told that GPT-NeoX's ranks have the same bias: whether each adds its own depends on its code's options.

    With `gpt_j_residual` it sums what ranks have added their biases to, else it adds one to the sum
    (https://github.com/EleutherAI/gpt-neox, `megatron/model/transformer.py`).
    """
    untold = [n for n in names if adds_up(n) and declared_cut(engine.cut, n) != Cut(None)]
    if untold:
        raise LayoutError(
            f"{listing(untold, 2)}: GPT-NeoX's tensor-parallel ranks each add a bias of their own with gpt_j_residual, which "
            f"cannot be written, and one of which all have copies without; where it is the latter, say it with "
            f"cut={{'*.dense.bias': None, '*.linear2.bias': None}}, else write for tp=1"
        )


# --- what the files hold ----------------------------------------------------------------------------------------------


def _module(like: Checkpoint, rank: Rank, trained: Training | None) -> dict[str, NewTensor]:
    """Return a rank's state dict; tied names are the same tensor. What ZeRO-3 partitions has the shape [0] in it."""
    module = {}
    for name, shape in rank.shape_of.items():
        is_elsewhere = trained is not None and _is_partitioned(like, trained, name)
        module[name] = new_tensor(dtype_of(like.arrays[name]), (0,) if is_elsewhere else shape)
    return module | {alias: module[n] for alias, n in like.aliases.items() if n in module}


def _is_partitioned(like: Checkpoint, training: Training, name: str) -> bool:
    """Say whether ZeRO-3 partitions an array: parameters, frozen ones too. Integers are none, and count as buffers."""
    is_buffer = name in (like.meta.get("buffers") or ()) or like.arrays[name].dtype.kind in "iub"
    return name in training.shape_of or not is_buffer


def _frozen(like: Checkpoint, rank: Rank, training: Training, ranks: int) -> dict[str, Any]:
    """Return what model states of ZeRO-3 say of parameters that are not trained: a rank's part of each."""
    names = [n for n in rank.shape_of if n not in training.shape_of and _is_partitioned(like, training, n)]
    if not names:
        return {}
    parts = {n: new_tensor(dtype_of(like.arrays[n]), (-(-math.prod(rank.shape_of[n]) // ranks),)) for n in names}
    return {"frozen_param_shapes": {n: size(rank.shape_of[n]) for n in names}, "frozen_param_fragments": parts}


def _experts(module: dict[str, NewTensor], layers: Iterable[str]) -> dict[str, dict[str, NewTensor]]:
    """Take the experts out of a module, and return the state dict of each, by how its file's name begins."""
    number = {layer: i for i, layer in enumerate(layers)}
    found: dict[str, dict[str, NewTensor]] = {}
    for match in [m for m in map(EXPERT_NAME.fullmatch, module) if m]:
        found.setdefault(f"layer_{number[match[1]]}_expert_{match[2]}", {})[match[0]] = module.pop(match[0])
    return found


def _layers(module: Mapping[str, NewTensor], engine: Engine) -> dict[int, dict[str, NewTensor]]:
    """Return the state dicts of a rank's layers."""
    found: dict[int, dict[str, NewTensor]] = {}
    for name, tensor in module.items():
        tie, own = TIED.fullmatch(name), LAYER_NAME.fullmatch(name)
        if tie:
            found.setdefault(engine.tied[tie[1]], {})[tie[2]] = tensor
        elif own:
            found.setdefault(int(own[1]), {})[own[2]] = tensor
    return dict(sorted(found.items()))


def _sub_groups(group: Mapping[str, Shape], ranks: int, limit: int) -> list[dict[str, Shape]]:
    """Return a group as ZeRO-3 cuts it: a flat tensor ends with the parameter by which it reaches the limit."""
    found: list[dict[str, Shape]] = [{}]
    count = 0
    for name, shape in group.items():
        if count >= limit:
            found.append({})
            count = 0
        found[-1][name] = shape
        count += -(-math.prod(shape) // ranks)
    return found


def _universal_info(cuts: Mapping[str, Told]) -> dict[str, Any]:
    """Say how tensor-parallel ranks share the arrays: what is not listed is joined on dim 0."""
    maps = {pattern: told for told in cuts.values() if isinstance(told, dict) for pattern in _patterns(cuts, told)}
    return {
        "universal_checkpoint_version": UNIVERSAL_VERSION,
        **({"affine_map": {"version": 1, "params": maps}} if maps else {}),
        "tp_replicated_parameter_patterns": _patterns(cuts, None),
        "pipeline_replicated_parameter_patterns": _patterns(dict.fromkeys(filter(TIED.fullmatch, cuts)), None),
        "parameter_with_row_parallelism_patterns": _patterns(cuts, 1),
        "parameter_to_average_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "vocabulary_parameter_patterns": [],
    }


MOST_NUMBERS = 3
"""In a name, for one expression to stand for all of its numbers."""


def _patterns(cuts: Mapping[str, Told], wanted: Told) -> list[str]:
    """Return regular expressions for the names that are cut in a way; one for all layers, where they are alike."""
    alike: dict[str, list[str]] = {}
    for name in cuts:
        alike.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    found = []
    for names in alike.values():
        mine = [name for name in names if cuts[name] == wanted]
        texts = re.split(r"\d+", names[0])
        if len(mine) == len(names) > 1 and len(texts) <= MOST_NUMBERS + 1:
            found.append(rf"{'[0-9]+'.join(map(re.escape, texts))}$")
        else:
            found += [rf"{re.escape(name)}$" for name in mine]
    return found


# --- for an engine ----------------------------------------------------------------------------------------------------


def lay_out_engine(folder: LocalFolder, like: Checkpoint, parts: Parts, options: DeepSpeed) -> None:
    """Lay out a checkpoint's files for the engine that a format object describes."""
    if options.weights == "master":
        raise LayoutError("weights='master' says what is read; to write masters as weights, convert with dtype='float32'")
    training = training_of(like, options.step, type(options).__name__)
    groups = _groups_for(options, like, training.shape_of)
    if training.kinds and len(training.groups) != len(groups):
        raise LayoutError(
            f"optimizer: engines take the hyperparameters of their {len(groups)} groups from the file, and the source tells "
            f"those of {len(training.groups)}; convert without optimizer=, or write a universal checkpoint, which needs none"
        )
    of_neox = {"embed": 0} if like.names == "gpt_neox" else {}  # as its library has it
    tied = {**of_neox, **dict_of(like.meta.get("tied")), **options.tied}
    engine = Engine(
        options.stage, options.pipeline, tied, options.sub_group_size, _is_bf16(options, like, training.shape_of), options.cut
    )
    tag = options.tag or f"global_step{training.count}"
    for file, root in files(like, training, groups, parts, engine):
        lay_out(folder, f"{tag}/{file}", *laid_out(root))
    put(folder, "latest", tag.encode())


def _is_bf16(options: DeepSpeed, like: Checkpoint, names: Iterable[str]) -> bool:
    """Say whether the engine is one of bf16: as its weights are, or as ZeRO-3's source says, which holds masters alone."""
    if options.bf16 is not None:
        return options.bf16
    told = dict_of(dict_of(like.meta.get("ds_config")).get("bf16")).get("enabled") is True
    is_master_alone = like.format == options.name and like.meta.get("zero_stage") == 3
    return "bfloat16" in {dtype_of(like.arrays[n]) for n in names} or (told and is_master_alone)


def _groups_for(options: DeepSpeed, like: Checkpoint, shape_of: Mapping[str, Shape]) -> list[list[str]]:
    """Return the parameters in the optimizer's order, by group, or refuse: a wrong order would be loaded, and be noise."""
    told = like.meta.get("groups") if options.parameters is None else [list(options.parameters)]
    zero = dict_of(dict_of(like.meta.get("ds_config")).get("zero_optimization"))
    if options.parameters is None and zero.get("round_robin_gradients"):
        told = None  # dealt out to as many ranks as there were
    told = [[n for n in group if n not in like.arrays or like.arrays[n].size] for group in told or ()]
    names = [n for group in told for n in group]
    if sorted(names) != sorted(shape_of):
        missing, more = [n for n in shape_of if n not in names], [n for n in names if n not in shape_of]
        what = f"lacks {listing(missing, 3)}" if missing else f"names {listing(more, 3)}" if more else "names some twice"
        why = f"what is given {what}" if options.parameters is not None else "the source does not tell it"
        raise LayoutError(
            f"DeepSpeed finds the optimizer's {len(shape_of)} parameters by their order, and {why}; say it with "
            f"DeepSpeed(parameters=[name for name, _ in model.named_parameters()])"
        )
    return told
