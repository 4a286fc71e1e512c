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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshload.array import Array
from meshload.box import Box, Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, listing
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder
from meshload.writing import lay_out, put

from .._cuts import Cut as Cut
from .._cuts import Declared, Whole, check_declared, whole
from .._torch_file import Tensor, TorchFile
from .._torch_writer import dtype_of, laid_out, new_scalar, new_tensor
from .._zero import NETWORK, Refused, dict_of, mapped, plain, read_files, scalar
from .._zero_files import UNIVERSAL_VERSION, VERSION, Training, model_states, module_of, training_of, zero_stage
from .._zero_find import has_tag, tag_named
from .._zero_save import Save, read_config, read_save
from .._zero_weights import EXPERT_NAME, LARGE, Weights, checkpoint_of, meta_of, rules_of, stored_files, with_stored

STATE = "optimizer_state.pt"

KINDS = {"fp32": "master"}
"""File -> kind; other files are called like the moments that they hold."""


@dataclass(frozen=True, slots=True)
class Universal:
    """The format of DeepSpeed's universal checkpoints."""

    weights: str = "module"
    """What `ck[name]` is: the `module`'s weight where there is one, or the fp32 `master` where there is one."""
    tag: str | None = None
    """Which tag, where not the one that `latest_universal` names."""
    cut: Declared | None = None
    """How tensor-parallel ranks share the module's parameters, where the checkpoint does not say it, as for `DeepSpeed`."""
    stage: int = 1
    """Of ZeRO, in the engine for which it is written: 1, 2 or 3."""
    step: int | None = None
    """How many steps the moments are of that are written, where their source does not tell it."""
    name: str = field(default="universal", init=False)
    order: int = field(default=10, init=False)
    naming: str = field(default="hf", init=False)

    def __post_init__(self) -> None:
        if self.weights not in ("module", "master"):
            raise LayoutError(f"weights={self.weights!r}: 'module' or 'master' was expected")
        if self.stage not in (1, 2, 3):
            raise LayoutError(f"stage={self.stage!r}: 1, 2 or 3 was expected")
        check_declared(self.cut)

    def matches(self, folder: Folder) -> bool:
        """Say whether this is a universal tag, or a root that has one, and no tag of DeepSpeed's that `latest` names.

        The run itself goes on from `latest`, so a root that has both is DeepSpeed's.
        """
        if folder.entry is not None:
            return False
        listed = folder.names()
        if "zero/" in listed:
            return _is_zero(folder, "zero")
        latest = tag_named(folder, "latest") if "latest" in listed else None
        if latest is not None and has_tag(folder, latest):
            return False
        return bool(_tags(folder, listed))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the headers of the parameters' files and of the model states."""
        inner, tag = _found(folder, self.tag)
        save = read_save(inner, needs_states=False)
        weights = Weights(save, {})
        rules = rules_of(save.state, self.cut, save.tp)
        found = _read(inner, save, weights)
        wholes = {"module": whole(weights.shards, rules, weights.is_parameter), **found.wholes}
        config, problems = read_config(folder)
        lacking = [f for mp in range(save.mp) if (f := f"mp_rank_{mp:02d}_model_states.pt") and mp not in save.states]
        told = [Problem(save.why(f), file=f) for f in lacking if not save.is_stage3]
        made = checkpoint_of(
            "universal",
            weights,
            wholes,
            self.weights,
            config=config,
            problems=[*problems, *told, *found.problems],
            meta={**meta_of(weights, rules, tag), **found.meta},
        )
        return with_stored(made, lambda: {**stored_files(save), **found.files})

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out the model states, and a file for each master and moment."""
        if self.weights == "master":
            raise LayoutError("weights='master' says what is read; to write masters as weights, convert with dtype='float32'")
        wrong = [name for name in like.arrays if not _FOLDER.fullmatch(name)]
        if wrong:
            raise LayoutError(f"{listing(wrong, 3)}: a weight's name is that of its folder, and cannot be such")
        training = training_of(like, self.step, type(self).__name__)
        tag = self.tag or f"global_step{training.count}_universal"
        for file, root in _files(like, training, parts, self.stage):
            lay_out(folder, f"{tag}/{file}", *laid_out(root))
        put(folder, "latest_universal", tag.encode())

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `latest_universal` is in the folder that now gets its name."""


def _is_zero(folder: Folder, under: str) -> bool:
    """Say whether a folder is the `zero` of a universal checkpoint."""
    listed = folder.names(under)
    if STATE in listed:
        return True
    return any(n.endswith("/") and folder.has(f"{under}/{n}fp32.pt") for n in listed[:4])


def _tags(folder: Folder, listed: Sequence[str]) -> list[str]:
    inner = [n[:-1] for n in listed if n.endswith("/")]
    is_root = "latest_universal" in listed or any(n.endswith("_universal") for n in inner)
    return [n for n in inner if "zero/" in folder.names(n) and _is_zero(folder, f"{n}/zero")] if is_root else []


def _found(folder: Folder, tag: str | None) -> tuple[Folder, str]:
    listed = folder.names()
    if tag is None and "zero/" in listed:
        return folder, folder.name.rstrip("/").rpartition("/")[2]
    tags = _tags(folder, listed)
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


# --- new files --------------------------------------------------------------------------------------------------------

_FOLDER = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")


def _files(like: Checkpoint, training: Training, parts: Parts, stage: int) -> Iterator[tuple[str, Any]]:
    """Go through the files in the folder of a tag, with what is saved in each."""
    rank = "zero_pp_rank_0_" if stage == 3 else ""
    info = {"universal_checkpoint_version": UNIVERSAL_VERSION}
    module = module_of(like)
    yield f"{rank}mp_rank_00_model_states.pt", model_states(like, module, [training.shape_of], training.count, info)
    groups = [*training.groups, *({} for _ in training.shape_of)][: max(len(training.shape_of), len(training.groups))]
    numbered = [{**group, "params": [i]} for i, group in enumerate(groups)]
    state = {0: {"step": new_scalar(training.step)}} if training.step is not None else {}
    yield (
        f"zero/{STATE}",
        {
            "zero_stage": zero_stage(stage),
            "ds_version": VERSION,
            "param_groups": numbered,
            "optimizer_state_dict": {"state": state, "param_groups": numbered},
        },
    )
    for name, shape in training.shape_of.items():
        more = {"cat_dim": _cat_dim(name, shape, parts)} if parts else {"cat_dim": 0}
        more = {k: v for k, v in more.items() if v is not None}
        dtypes = {kind: dtype_of(like.optimizer[kind][name]) for kind in training.kinds}
        for file, dtype in {"fp32": "float32", **dtypes}.items():
            yield f"zero/{name}/{file}.pt", {**more, "param": new_tensor(dtype, shape)}
        if training.kinds and training.step is not None:
            yield f"zero/{name}/step.pt", new_scalar(training.step)


def _cat_dim(name: str, shape: Shape, parts: Parts) -> int | None:
    """Return the dim that tensor-parallel ranks cut; None where each has the whole."""
    mesh = parts.mesh
    count = mesh.size_of("tp") if "tp" in mesh else 1
    if count == 1:
        return 0
    held: dict[tuple[int, ...], dict[int, Box]] = {}
    for rank, box in parts.get(name, ()):
        place = mesh.coordinates(rank)
        t = place.pop("tp")
        held.setdefault(tuple(place.values()), {})[t] = box
    boxes = next(iter(held.values()), {})
    if len(boxes) == count:
        dims = [d for d in range(len(shape)) if len({box.start[d] for box in boxes.values()}) > 1]
        if not dims:
            return None
        d = dims[0]
        if len(dims) == 1 and all(box.start[d] == t * shape[d] // count == t * box.shape[d] for t, box in boxes.items()):
            return d
    raise LayoutError(
        f"{name}: the {count} ranks of tp hold no equal parts of one dim of {shape}, which are all that DeepSpeed cuts"
    )
