"""Universal checkpoints, which DeepSpeed's `ds_to_universal` makes: one folder per parameter, whole, whatever the ranks were.

Written from DeepSpeed 0.19 (https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/checkpoint/ds_to_universal.py).

    ROOT/latest_universal                      text: the tag; a `latest` beside it may name a tag that was deleted
    ROOT/TAG/mp_rank_XX_model_states.pt        the source's model states, copied; layers of pipelines are not
    ROOT/TAG/zero_pp_rank_D_mp_rank_XX_model_states.pt    the same, of stage 3
    ROOT/TAG/zero/optimizer_state.pt           groups and scalars; of stage 3 also one rank's shards, which mean nothing alone
    ROOT/TAG/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

From stage 1 and 2 (and stage 3 with tensor parallelism) a file is `{"param": tensor, "cat_dim": 0, ...}`: the whole tensor, shards
joined, its vocabulary cut to the true size. From stage 3 it is a bare, flat tensor, whose shape is in `param_shapes` of the model
states alone. Names without moments are copies of what the module has besides trained parameters, made fp32: frozen ones, buffers,
and tied names, whose values are rounded to the model's dtype. They are taken from the module here, or from their owner.

`ck[name]` is the weight in the model's dtype, as the copied model states have it (joined as `_cuts.py` tells), else the fp32
master; with `weights="master"` the latter wherever there is one. `ck.optimizer` has `master` and the moments, `meta` the steps.

**Writing** makes the files of stage 1 and 2, which engines of every stage read: the module in the dtype that is asked for, masters
(the weights, where no others are converted), moments and steps where they are converted. `Universal(stage=3)` gives the model
states the name by which an engine of stage 3 looks for them. A loader goes through the groups of `optimizer_state.pt` and its own
side by side, and leaves those weights as they are for whose group there is none: so there is one for each weight, and those that
are told first. It takes no frozen weights and no buffers from the module. For Megatron-DeepSpeed with tensor parallelism, `mesh`
says how its ranks share the weights: `cat_dim`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshload.array import Array
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, listing
from meshload.source import Folder

from ._cuts import Whole, whole
from ._torch_file import Tensor, TorchFile
from ._zero import NETWORK, Refused, dict_of, mapped, plain, read_files, scalar
from ._zero_find import STATE, tag_named, universal_tags
from ._zero_save import EXPERT_NAME, Save, read_config, read_save
from ._zero_weights import LARGE, Weights, checkpoint_of, meta_of, rules_of, stored_files, with_stored

if TYPE_CHECKING:
    from .formats.universal import Universal

KINDS = {"fp32": "master"}
"""File -> kind; other files are called like the moments that they hold."""


def checkpoint_in(folder: Folder, options: Universal) -> Checkpoint:
    """Read the headers of the parameters' files and of the model states."""
    inner, tag = _found(folder, options.tag)
    save = read_save(inner, needs_states=False)
    weights = Weights(save, {})
    rules = rules_of(save.state, options.cut, save.tp)
    found = _read(inner, save, weights)
    wholes = {"module": whole(weights.shards, rules, weights.is_parameter), **found.wholes}
    config, problems = read_config(folder)
    lacking = [f for mp in range(save.mp) if (f := f"mp_rank_{mp:02d}_model_states.pt") and mp not in save.states]
    told = [Problem(save.why(f), file=f) for f in lacking if not save.is_stage3]
    made = checkpoint_of(
        "universal",
        weights,
        wholes,
        options.weights,
        config=config,
        problems=[*problems, *told, *found.problems],
        meta={**meta_of(weights, rules, tag), **found.meta},
    )
    return with_stored(made, lambda: {**stored_files(save), **found.files})


def _found(folder: Folder, tag: str | None) -> tuple[Folder, str]:
    listed = folder.names()
    if tag is None and "zero/" in listed:
        return folder, folder.name.rstrip("/").rpartition("/")[2]
    tags = universal_tags(folder, listed)
    told = tag or tag_named(folder, "latest_universal")
    if told is None and len(tags) == 1:
        told = tags[0]
    if told is None or told not in tags:
        what = f"there is no universal tag {told!r}" if told else "there is no file `latest_universal`"
        raise FormatError(
            f"{folder.name}: {what}; its universal tags are: {listing(tags) or 'none'}; say which with Universal(tag=...)"
        )
    return folder.inside(told), told


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What the folder `zero` holds."""

    wholes: Mapping[str, Whole]
    meta: Mapping[str, Any]
    problems: Sequence[Problem]
    files: Mapping[str, TorchFile]
    """By their names without the folder of the tag."""


def _read(inner: Folder, save: Save, weights: Weights) -> _Found:
    """Read the headers of the parameters' files."""
    names = [n[:-1] for n in inner.names("zero") if n.endswith("/")]
    files_of = {name: [f for f in inner.names(f"zero/{name}") if f.endswith(".pt")] for name in names}
    read = read_files(inner, [f"zero/{name}/{f}" for name, files in files_of.items() for f in files] + [f"zero/{STATE}"])
    state = read.pop(f"zero/{STATE}")
    problems = [] if isinstance(state, TorchFile) else [Problem(f"{state}; its groups are not known", file=STATE)]
    shapes = {n: s for groups in save.shapes.values() for g in groups or () for n, s in g.items()}
    wholes: dict[str, Whole] = {"master": Whole()}
    steps: dict[str, TorchFile] = {}
    notes: dict[str, Any] = {}
    for name, files in files_of.items():
        if name in weights.aliases:
            continue
        for file in files:
            found, kind = read[f"zero/{name}/{file}"], file.removesuffix(".pt")
            made = wholes.setdefault(KINDS.get(kind, kind), Whole()) if kind != "step" else None
            try:
                if not isinstance(found, TorchFile):
                    raise Refused(str(found))
                if made is None:
                    steps[name] = found
                elif shapes and name not in shapes and name in weights.shards.found:
                    continue  # a copy of what the module has
                else:
                    made.arrays[name] = _array(name, found, shapes.get(name), save)
                    more = {k: plain(v) for k, v in dict_of(found.root).items() if k != "param"}
                    if kind == "fp32" and more:
                        notes[name] = more
            except Refused as error:
                if made is not None:
                    made.reasons[name] = str(error)
                problems.append(Problem(f"{name}: {error}", array=name, file=f"zero/{name}/{file}"))
    for name in shapes:
        known = name in wholes["master"].arrays or name in wholes["master"].reasons or name in weights.aliases
        if not known and not EXPERT_NAME.fullmatch(name):
            wholes["master"].reasons[name] = f"zero/{name}/fp32.pt: not there"
            problems.append(Problem(f"{name}: zero/{name}/fp32.pt is not there", array=name))
    meta = {**_meta(state, steps), "parameters": notes}
    kept = {f: found for f, found in read.items() if isinstance(found, TorchFile)}
    if isinstance(state, TorchFile):
        kept[f"zero/{STATE}"] = state
    return _Found({k: w for k, w in wholes.items() if w.arrays or w.reasons}, meta, problems, kept)


def _array(name: str, file: TorchFile, shape: Shape | None, save: Save) -> Array:
    tensor = file.root if type(file.root) is Tensor else dict_of(file.root).get("param")
    if type(tensor) is not Tensor:
        raise Refused(f"{file.source.name}: holds no tensor")
    why = file.refusal(tensor)
    if why:
        raise Refused(f"{file.source.name}: {why}")
    array = file.array(tensor, name)
    if type(file.root) is not Tensor:
        return array
    if shape is None:
        raise Refused(
            f"{file.source.name}: a flat tensor of {array.size} elements; its shape is told in the model states alone, "
            f"{'which lack it' if save.states else 'which are not there'}"
        )
    if array.ndim != 1 or array.size != math.prod(shape):
        raise Refused(f"{file.source.name}: a tensor of shape {array.shape}, param_shapes say {shape}")
    return replace(array, pieces=array.pieces.split(0, shape), shape=shape)


def _meta(state: Any, files: Mapping[str, TorchFile]) -> dict[str, Any]:
    is_far = any(f.source.gap >= NETWORK for f in list(files.values())[:1])
    steps = dict(zip(files, mapped(lambda file: scalar(file, file.root), list(files.values()), is_far), strict=True))
    root = dict_of(state.root) if isinstance(state, TorchFile) else {}
    of = dict_of(dict_of(root.get("optimizer_state_dict")).get("state"))
    step: Any = next((s for s in (scalar(state, dict_of(v).get("step")) for v in of.values()) if s is not None), None)
    told = set(steps.values())
    if steps:
        step = next(iter(told)) if len(told) == 1 else dict(steps)
    stage = plain(root.get("zero_stage"))
    groups = root.get("param_groups")
    plain_groups = [{k: plain(v) for k, v in dict_of(g).items() if k != "params"} for g in groups] if type(groups) is list else []
    plain_groups = [g for g in plain_groups if g]  # those that `create` adds say nothing
    inner = {k: plain(v) for k, v in root.items() if k not in LARGE and k != "param_groups"}
    return {"zero_stage": stage, "optimizer": {**inner, "param_groups": plain_groups, "step": step}}
