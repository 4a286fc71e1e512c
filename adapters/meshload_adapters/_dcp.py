"""torch.distributed.checkpoint (DCP): what FSDP, tensor-parallel and plain torch models are saved with; needs no torch.

```
step-1000/                     the checkpoint; programs keep one such folder per step (torchtitan: `step-N`)
  .metadata                    one pickle, written last, to `.metadata.tmp`, and renamed: without it the save is not finished
  __{rank}_{n}.distcp          data files, n per writer thread
  __{rank}.metadata            in place of `.metadata`, where ranks saved without coordination
```

`_distcp.py` tells how these files are laid out. Only data files that `.metadata` names belong to the checkpoint: a save into an
old folder leaves those of more ranks behind. `async_save` writes the same. Saves by `HuggingFaceStorageWriter` are safetensors
(`_hf.py`), those with Megatron-Core's `metadata.json` or `common.pt` are Megatron's.

**Names.** The dict that was saved is flattened, its keys joined by dots: `model.<fqn>`, or torchtitan's model keys at the top.
Native names are these keys, less the optimizer's state, the counters, and what is no tensor; stored names are all that are
tensors. A chunk has its place in the whole tensor, whatever wrote it: FSDP1, FSDP2, HSDP, tensor parallelism and both in one dim
(strided shards, whose chunks are in no rank's order) read alike. Tied weights are stored under every name.

**Optimizer state** stands under `<root>.state`, where `<root>.param_groups` is there too (`optim`, torchtitan's `optimizer`, or
nothing), in three forms:

    state.<fqn>.<field>                 get_optimizer_state_dict, nested or flattened; param_groups.0.lr, or param_groups.<fqn>.lr
    state.<number>.<field>              optimizer.state_dict(): numbers have names only where param_groups.<i>.param_names are there

Fields with the weight's shape are in `optimizer["exp_avg"]` and so on, by the native name of the weight, whether the weight is
frozen by now or not; `momentum_buffer` is called `momentum`. Numbers are in `meta["scalars"]`, lazy, by their stored names, and
each weight's own count of steps in `meta["steps"]` by the weight's native one. Other fields stay
ordinary arrays, and so do those whose weight is not told, or that two optimizers have for one weight. `<fqn>` lacks the key
under which the model was saved: it is the one under which the most of the names are found, `model` or none where several do.

`meta["objects"]` reads what is no tensor when it is asked for, and inertly: learning rates, schedulers, torchtitan's
`dataloader` (a pickle within, given as bytes). Read from torch 2.13.

**Written** are the weights, as one dict without nesting, as torchtitan has its model: `torch.distributed.checkpoint.load` fills
the tensors of `{name: tensor}` from it. `DCP(model="model")` puts them under a key, `{"model": {name: tensor}}`, and what comes
from DCP under native names stays under its own. Each rank of the mesh has one data file, `__{rank}_0.distcp`, with the boxes that
no lower rank holds; without a mesh there is one file. No torch is needed for it.

Where an optimizer's states are converted, they go under `optim` (`DCP(optimizer=...)`), as `get_optimizer_state_dict` has them:
the moments like their weights, each weight's `step`, and `param_groups` with what the source tells of hyperparameters. `load` asks
for all that the groups of the live optimizer have; what the source does not tell is told by `DCP(hyperparameters={"lr": ...})`.
`DCP(optimizer="optimizer", flat=True)` writes the flattened form, as torchtitan loads it.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, MeshloadError, MeshloadWarning, listing
from meshload.source import Folder, around

from ._dcp_find import METADATA, SUFFIX, is_checkpoint, is_megatron, rank_of, steps_in
from ._distcp import Found, Listing, find_arrays, load_object, read_listing
from ._json import read_config

if TYPE_CHECKING:
    from .formats.dcp import DCP

JSON_LIMIT = 16 << 20
"""Real configs have a few KB."""

KINDS = {"momentum_buffer": "momentum"}
"""Fields of torch's optimizers that go by another name here."""

WRAPPERS = frozenset({"_orig_mod", "_forward_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"})
"""What torch.compile, activation checkpointing and FSDP put into names; `get_optimizer_state_dict` leaves them out."""

_GROUPS = re.compile(r"(?:^|\.)param_groups(?:\.|$)")


def checkpoint_in(folder: Folder, options: DCP) -> Checkpoint:
    """Read `.metadata`. Data files that are missing or cut make their arrays unavailable, and the rest stays usable."""
    meta: dict[str, Any] = {}
    folder = _chosen(folder, options, meta)
    names = folder.names()
    files = _metadata_files(folder, names)
    if not files:
        raise FormatError(_unfinished(folder, names))
    listed = read_listing([folder.file(file) for file in files])
    found = find_arrays(listed, folder)
    objects = _Objects(listed, found)
    sorted_out = _sort_out(listed, found, objects, options.model, folder.name)
    config, problems = read_config(folder, JSON_LIMIT)
    meta |= {
        **listed.about,
        "metadata_files": tuple(files),
        "unlisted": tuple(n for n in names if n.endswith(SUFFIX) and n not in found.sources),
        "paths": listed.paths,
        "objects": objects,
        "scalars": sorted_out.scalars,
        "steps": sorted_out.steps,
    }

    def stored() -> Checkpoint:
        return replace(
            native,
            arrays=found.arrays,
            optimizer={},
            unavailable=found.unavailable,
            names="stored",
            views={"native": lambda: native},
        )

    native: Checkpoint = Checkpoint(
        sorted_out.arrays,
        "dcp",
        optimizer=sorted_out.optimizer,
        meta=meta,
        config=config,
        unavailable=sorted_out.unavailable,
        problems=(*_problems(listed, found, files), *problems),
        views={"stored": stored},
    )
    return native


# --- folders ----------------------------------------------------------------------------------------------------------


def _chosen(folder: Folder, options: DCP, meta: dict[str, Any]) -> Folder:
    """Return the folder of the checkpoint: the folder itself, or that of a step in it."""
    if folder.entry is not None and folder.entry.endswith(SUFFIX):
        raise FormatError(f"{folder.name}: one data file of a checkpoint; open its folder")
    names = folder.names()
    steps = {} if folder.entry is not None or is_checkpoint(folder, names) else steps_in(folder, names)
    if not steps:
        if options.step is not None:
            raise FormatError(f"{folder.name}: there are no steps in this folder, so none is {options.step!r}")
        return folder
    if options.step is not None:
        fitting = [name for name, number in steps.items() if options.step in (name, number)]
        if len(fitting) != 1:
            raise FormatError(f"{folder.name}: of the steps {listing(steps)}, {len(fitting)} are {options.step!r}")
        name = fitting[0]
    else:
        name, meta["passed_over"] = _latest(folder, steps)
    meta["step"] = steps[name]
    return folder.inside(name)


def _metadata_files(folder: Folder, names: Sequence[str]) -> list[str]:
    """Return the files that list the tensors: the common one, or one per rank."""
    if METADATA in names or (not names and folder.has(METADATA)):
        return [METADATA]
    return sorted((n for n in names if rank_of(n) >= 0), key=rank_of)


def _latest(folder: Folder, steps: Mapping[str, int]) -> tuple[str, dict[str, str]]:
    """Return the last complete step, and the later ones with what they lack."""
    passed: dict[str, str] = {}
    for name, number in reversed(list(steps.items())):
        step = folder.inside(name)
        names = step.names()
        if not _metadata_files(step, names) or is_megatron(step, names):
            passed[name] = _lacks(names)
            continue
        same = [
            n for n in steps if steps[n] == number and n != name and _metadata_files(inside := folder.inside(n), inside.names())
        ]
        if same:
            raise FormatError(f"{folder.name}: {listing([name, *same])} are one step; choose with DCP(step=...)")
        if passed:
            said = listing(f"{n} ({why})" for n, why in passed.items())
            _warn(f"{folder.name}: step {name} is opened, the last complete one; passed over: {said}")
        return name, passed
    raise FormatError(f"{folder.name}: no step is complete: {listing(f'{n}: {why}' for n, why in passed.items())}")


def _lacks(names: Sequence[str]) -> str:
    """Say what a folder without `.metadata` holds."""
    data = [n for n in names if n.endswith(SUFFIX)]
    if f"{METADATA}.tmp" in names:
        return f"there is {METADATA}.tmp, but no {METADATA}, which is written last"
    if data:
        return f"there are {len(data)} data files ({listing(data, 3)}), but no {METADATA}, which is written last"
    return f"there is no {METADATA}, but {listing(names, 5) or 'nothing else either'}"


def _unfinished(folder: Folder, names: Sequence[str]) -> str:
    beside = around(folder)
    whole = [n for n in steps_in(beside, beside.names()) if _metadata_files(inside := beside.inside(n), inside.names())]
    hint = f"the last complete step is {beside.inside(whole[-1]).name}" if whole else "there is no complete step beside it"
    return f"{folder.name}: the save was not finished: {_lacks(names)}; {hint}"


def _problems(listed: Listing, found: Found, files: Sequence[str]) -> Iterator[Problem]:
    """Say what is wrong: each damaged file once, with its arrays; then what is wrong with others."""
    held: dict[str, list[str]] = {file: [] for file in found.damage}
    for name in found.unavailable:
        mine = {listed.entries.file[row] for row in listed.tensors[name].rows} & held.keys()
        for file in mine:
            held[file].append(name)
        if not mine:
            yield Problem(f"{name}: {found.unavailable[name]}", array=name)
    for key, places in listed.objects.items():
        for place in places:
            if place.file in held:
                held[place.file].append(key)
    for file, names in held.items():
        yield Problem(f"{file}: {found.damage[file]}; in it are {listing(names)}", file=file)
    ranks = {rank_of(file) for file in files}
    lost = sorted(set(range(max(ranks) + 1)) - ranks)
    if lost and files != [METADATA]:
        yield Problem(f"of the ranks' metadata, {listing(f'__{r}{METADATA}' for r in lost)} are not there")


def _warn(text: str) -> None:
    warnings.warn(text, MeshloadWarning, stacklevel=4)


# --- what is no tensor ------------------------------------------------------------------------------------------------


class _Objects(Mapping[str, Any]):
    """What is no tensor, by its key, read when it is asked for; a list where every rank wrote its own."""

    def __init__(self, listed: Listing, found: Found) -> None:
        self._places = listed.objects
        self._found = found

    def __getitem__(self, key: str) -> Any:
        values = []
        for place in self._places[key]:
            if place.file not in self._found.sources:
                raise FormatError(f"{key}: it is in {place.file}: {self._found.damage[place.file]}")
            values.append(load_object(self._found.sources[place.file], place, key))
        return values[0] if len(values) == 1 else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __repr__(self) -> str:
        return f"<{len(self)} objects, read when asked for: {listing(self, 5)}>"


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SortedOut:
    """The arrays under native names."""

    arrays: dict[str, Array]
    optimizer: dict[str, dict[str, Array]]
    scalars: dict[str, Array]
    steps: dict[str, Array]
    """Those of the scalars that count a weight's steps, by its name."""
    unavailable: dict[str, str]


@dataclass(frozen=True, slots=True)
class _State:
    """A tensor of an optimizer's state."""

    key: str
    weight: str
    """The weight's name, as the optimizer has it."""
    field: str


def _sort_out(listed: Listing, known: Found, objects: Mapping[str, Any], model: str | None, folder: str) -> _SortedOut:
    """Take the optimizers' state and the counters out of the arrays."""
    roots = {key[: match.start()] for key in (*listed.tensors, *listed.objects) if (match := _GROUPS.search(key))}
    stems = {root: f"{root}." if root else "" for root in sorted(roots)}
    owner = {
        key: root
        for root, stem in stems.items()
        for key in listed.tensors
        if key.startswith((f"{stem}state.", f"{stem}param_groups."))
    }
    weights = [key for key in listed.tensors if key not in owner]
    native = {_bare(name): name for name in weights}
    placed: dict[str, tuple[str, str]] = {}
    steps: dict[str, str] = {}
    for root, stem in stems.items():
        keys = [key for key in owner if owner[key] == root and key.startswith(f"{stem}state.")]
        states = _states(keys, stem, listed, objects)
        head = _head({_bare(s.weight) for s in states}, native, root, model, folder)
        for state in states if head is not None else ():
            weight = native.get(f"{head}{_bare(state.weight)}", f"{head}{state.weight}")
            shape, trained = listed.tensors[state.key].shape, listed.tensors.get(weight)
            if state.field == "step" and not shape and trained:
                steps[state.key] = weight
            elif shape == trained.shape and state.field != "step" if trained else shape:
                placed[state.key] = KINDS.get(state.field, state.field), weight
    often = Counter(placed.values())
    placed = {key: place for key, place in placed.items() if often[place] == 1}  # of two optimizers, neither is the one meant
    found = _SortedOut({}, {kind: {} for kind in sorted({kind for kind, _ in placed.values()})}, {}, {}, {})
    for key, tensor in listed.tensors.items():
        array, why = known.arrays.get(key), known.unavailable.get(key, "")
        if key in placed:
            kind, weight = placed[key]
            if array is None:
                found.unavailable[f"optimizer.{kind}.{weight}"] = why
            else:
                found.optimizer[kind][weight] = array
        elif not tensor.shape and (key in owner or key == "step" or listed.paths.get(key, (key,))[0] == "train_state"):
            if array is not None:
                found.scalars[key] = array
        elif array is None:
            found.unavailable[key] = why
        else:
            found.arrays[key] = array
    counts = Counter(steps.values())
    found.steps.update({w: found.scalars[key] for key, w in steps.items() if key in found.scalars and counts[w] == 1})
    return found


def _bare(name: str) -> str:
    """Return a name without wrappers."""
    return ".".join(s for s in name.split(".") if s not in WRAPPERS) if "_" in name else name


def _states(keys: Sequence[str], stem: str, listed: Listing, objects: Mapping[str, Any]) -> list[_State]:
    """Split the keys of an optimizer's state into weight and field, as far as the checkpoint tells how."""
    found = [_State(key, *_split(key, stem, listed.paths.get(key, ()))) for key in keys]
    if not all(s.weight.isdecimal() for s in found):
        return found
    names = _names_of_numbers(stem, objects)
    return [replace(s, weight=names[s.weight]) for s in found if s.weight in names]


def _split(key: str, stem: str, path: Sequence[str | int]) -> tuple[str, str]:
    """Return weight and field: by the path where it was nested, else at the last dot, as torch's own fields have none."""
    for i, part in enumerate(path[:-2]):
        if part == "state" and "".join(f"{p}." for p in path[:i]) == stem:
            return str(path[i + 1]), ".".join(map(str, path[i + 2 :]))
    weight, _, name = key.removeprefix(f"{stem}state.").rpartition(".")
    return weight, name


def _names_of_numbers(stem: str, objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of an optimizer's numbered weights, where it was made of `named_parameters()` and so knows them."""
    found: dict[str, str] = {}
    groups = _whole(objects, f"{stem}param_groups")
    many = groups if type(groups) is list else _groups(stem, objects)
    for group in many:
        numbers, names = (group.get(key) if type(group) is dict else None for key in ("params", "param_names"))
        if type(numbers) is list and type(names) is list and len(numbers) == len(names):
            found |= {str(n): name for n, name in zip(numbers, names, strict=True) if type(n) is int and type(name) is str}
    return found


def _groups(stem: str, objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    i = 0
    while f"{stem}param_groups.{i}.params" in objects:
        yield {key: _whole(objects, f"{stem}param_groups.{i}.{key}") for key in ("params", "param_names")}
        i += 1


def _whole(objects: Mapping[str, Any], key: str) -> Any:
    """Return an object that may be absent or damaged."""
    try:
        return objects.get(key)
    except MeshloadError:
        return None


def _head(weights: set[str], native: Mapping[str, str], root: str, model: str | None, folder: str) -> str | None:
    """Return what stands before the optimizer's names in those of the weights; None where that cannot be told."""
    if model is not None:
        head = f"{model}." if model else ""
        if not any(name.startswith(head) for name in native):
            raise LayoutError(f"{folder}: DCP(model={model!r}): no weight's name begins so; there are {listing(native, 5)}")
        return head
    counts: Counter[str] = Counter()
    for name in native:
        at = 0
        while True:
            if name[at:] in weights:
                counts[name[:at]] += 1
            at = name.find(".", at) + 1
            if not at:
                break
    best = [head for head, count in counts.items() if count == max(counts.values())]
    usual = [head for head in ("model.", "") if head in best]
    if len(best) < 2 or usual:
        return (usual or best or [""])[0]
    _warn(
        f"{folder}: the optimizer state under {root or 'the top'!r} fits the weights of {listing(sorted(best))} alike, so it stays "
        f"among the arrays; choose with DCP(model=...)"
    )
    return None
