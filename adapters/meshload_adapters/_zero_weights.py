"""The weights that a DeepSpeed save holds in the model's dtype, and a checkpoint put together of these, masters and moments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshload.array import Array
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, listing
from meshload.naming import unwrapped
from meshload.pieces import union

from ._cuts import Declared, Rules, Shards, Whole
from ._torch_file import Tensor, TorchFile
from ._zero import (
    Refused,
    TagFiles,
    dict_of,
    each_alone,
    identical,
    names_of,
    placed,
    plain,
    read_files,
    shapes_of,
    stored_arrays,
)
from ._zero_save import EXPERT_NAME, Save

TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
"""A parameter that several layers of a pipeline share."""

KNOWN_STATE = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "sparse_tensor_module_names", "ds_config", "ds_version"),
    }
)
"""Keys of the model states that are told otherwise than in `meta["state"]`."""


LARGE = frozenset(
    {
        *("base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups"),
        *("param_slice_mappings", "param_alignment_paddings", "ds_zero_partition_groups"),
    }
)
"""Keys of an optimizer's state that describe its arrays."""


@dataclass(eq=False)
class Weights:
    """The weights in the model's dtype, shard by shard."""

    save: Save
    tied: Mapping[str, int]
    """Tie of a pipeline -> the layer whose file holds it, as far as the user says it."""
    shards: Shards = field(default_factory=lambda: Shards("module"))

    def __post_init__(self) -> None:
        self._module()
        self._layers()
        self._experts()
        self._frozen()

    def is_parameter(self, name: str) -> bool | None:
        """Say whether a name is a parameter's; None where it is not known: layers of pipelines do not tell their buffers."""
        if name in self.buffers:
            return False
        if name in self.save.owned or not self.save.is_pipeline or EXPERT_NAME.fullmatch(name):
            return True
        return None

    @cached_property
    def buffers(self) -> set[str]:
        return {n for f in self.save.states.values() for n in names_of(dict_of(f.root).get("buffer_names"))}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Tied names -> the one that is kept: as `shared_params` says, or where they are the same bytes of a file."""
        found: dict[str, str] = {}
        for file in self.save.states.values():
            state = dict_of(file.root)
            module = {n: t for n, t in dict_of(state.get("module")).items() if type(n) is str and type(t) is Tensor}
            told = dict_of(state.get("shared_params")).items()
            pairs = {a: n for a, n in told if type(a) is str and type(n) is str and a != n}
            for alias, name in {**identical(module), **pairs}.items():
                owned = alias in self.save.owned and name not in self.save.owned
                found.setdefault(name if owned else alias, alias if owned else name)
        for alias, name in found.items():
            seen = {alias}
            while name in found and name not in seen:
                seen.add(name)
                name = found[name]
            found[alias] = name
        return {a: n for a, n in found.items() if a != n}

    def _module(self) -> None:
        """Take the state dicts; the empty tensors that stand for ZeRO-3's parameters are none."""
        save, shards = self.save, self.shards
        for mp in range(save.mp):
            file = save.states.get(mp)
            if file is None:
                self._lose_state(mp)
                continue
            state = dict_of(file.root)
            module = dict_of(state.get("module"))
            elsewhere = {*self.owned_by_stage3, *dict_of(state.get("frozen_param_shapes"))}
            for name, tensor in module.items():
                if type(name) is not str or type(tensor) is not Tensor or name in self.aliases:
                    continue
                if save.is_stage3 and tensor.shape == (0,) and name not in self.buffers:
                    if name not in elsewhere:
                        shards.lose([name], mp, "no file holds it; what it is tied to is told only in the model states of rank 0")
                    continue
                why = file.refusal(tensor)
                if why:
                    shards.lose([name], mp, why)
                else:
                    shards.add({name: self._with_copies(mp, file.array(tensor, name))}, mp)

    def _with_copies(self, mp: int, array: Array) -> Array:
        """Return a buffer with its copies, which ZeRO-3 has in the model states of each data-parallel rank."""
        tables = [array.pieces]
        for (other, _), name in self.save.files.shards.items():
            file = self.save.opened.get(name)
            if other == mp and file is not None and file is not self.save.states[mp] and name not in self.save.stale:
                tensor = dict_of(dict_of(file.root).get("module")).get(array.name)
                if type(tensor) is Tensor and not file.refusal(tensor):
                    copy = file.array(tensor, array.name)
                    if (copy.shape, copy.dtype) == (array.shape, array.dtype):
                        tables.append(copy.pieces)
        return replace(array, pieces=union(tables)) if len(tables) > 1 else array

    @cached_property
    def owned_by_stage3(self) -> Iterable[str]:
        return self.save.owned if self.save.is_stage3 else ()

    def _lose_state(self, mp: int) -> None:
        """Note what a rank whose model states are lost should hold, as far as others tell."""
        save = self.save
        lost = f"zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt" if save.is_stage3 else f"mp_rank_{mp:02d}_model_states.pt"
        file = (save.files.shards.get((mp, 0)) if save.is_stage3 else save.files.models.get(mp)) or lost
        others = [f for m, f in save.states.items() if m // save.tp == mp // save.tp]
        for other in others:
            module, frozen = (dict_of(dict_of(other.root).get(key)) for key in ("module", "frozen_param_shapes"))
            held = [n for n in module if n in self.buffers or n in frozen] if save.is_stage3 else module
            self.shards.lose([n for n in held if type(n) is str and n not in self.aliases], mp, save.why(file))

    def _layers(self) -> None:
        save, shards = self.save, self.shards
        for layer in self._layer_numbers:
            tie = self.tie_of.get(layer)
            prefix = f"tied_modules.{tie}." if tie is not None else f"{layer}."
            for t in range(save.tp):
                name = save.layer_file(layer, t)
                file = save.opened.get(name)
                if file is None:
                    shards.lose(self._names_of_layer(layer, prefix), t, save.why(name))
                    continue
                tensors = {f"{prefix}{k}": v for k, v in dict_of(file.root).items() if type(k) is str and type(v) is Tensor}
                ties = identical(tensors)
                self.aliases.update(ties)
                for key, tensor in tensors.items():
                    why = file.refusal(tensor)
                    if why:
                        shards.lose([key], t, why)
                    elif key not in ties:
                        shards.add({key: file.array(tensor, key)}, t)
        for tie, why in self._ties[1].items():
            names = [n for n in save.owned if n.startswith(f"tied_modules.{tie}.")]
            for t in range(save.tp):
                shards.lose(names, t, why)

    @cached_property
    def _layer_numbers(self) -> list[int]:
        told = self.save.layers_told if self.save.is_pipeline else []
        return sorted({layer for layer, _ in self.save.files.layers} | set(told))

    def _names_of_layer(self, layer: int, prefix: str) -> list[str]:
        """Return the names in a layer: those of its other shards, or those that the optimizer owns."""
        others = [self.save.opened[f] for (n, _), f in self.save.files.layers.items() if n == layer and f in self.save.opened]
        names = [f"{prefix}{k}" for f in others for k in dict_of(f.root) if type(k) is str]
        return names or [n for n in self.save.owned if n.startswith(prefix)]

    @property
    def tie_of(self) -> dict[int, str]:
        """Layer -> the tie that its file holds."""
        return self._ties[0]

    @cached_property
    def _ties(self) -> tuple[dict[int, str], dict[str, str]]:
        """Return the layers that hold ties, and why the layers of other ties are not known."""
        save = self.save
        keys: dict[str, dict[str, Shape | None]] = {}
        shapes = {n: s for groups in save.shapes.values() for g in groups or () for n, s in g.items()}
        for name in save.owned:
            if match := TIED.fullmatch(name):
                keys.setdefault(match[1], {})[match[2]] = shapes.get(name)
        wrong = [layer for layer in self.tied.values() if layer not in self._layer_numbers]
        if wrong:
            raise LayoutError(f"tied={dict(self.tied)!r}: {save.folder.name} has no layer {wrong[0]}")
        found = {layer: tie for tie, layer in self.tied.items()}
        free = [n for n in self._layer_numbers if n not in save.layers_told and n not in found]
        fitting = {tie: [n for n in free if self._holds(n, of)] for tie, of in keys.items() if tie not in self.tied}
        reasons = {}
        for tie, layers in fitting.items():
            rivals = [t for t, of in fitting.items() if t != tie and set(of) & set(layers)]
            if len(layers) == 1 and not rivals:
                found[layers[0]] = tie
            elif save.is_pipeline:
                which = f"the files of layers {listing(map(str, layers))} could" if layers else "no layer's file does"
                reasons[tie] = (
                    f"which layer's file holds it is not stored, and {which}; say it with DeepSpeed(tied={{{tie!r}: LAYER}})"
                )
        return found, reasons

    def _holds(self, layer: int, keys: Mapping[str, Shape | None]) -> bool:
        """Say whether a layer's file has keys in the shapes that the optimizer knows."""
        files = [self.save.opened[f] for (n, _), f in self.save.files.layers.items() if n == layer and f in self.save.opened]
        if not files:
            return False
        tensors = dict_of(files[0].root)
        return all(type(tensors.get(k)) is Tensor and shape in (None, tensors[k].shape) for k, shape in keys.items())

    def _experts(self) -> None:
        save, shards = self.save, self.shards
        names: dict[tuple[int, int], list[str]] = {}
        for (layer, _, mp), file in save.files.experts.items():
            opened = save.opened.get(file)
            if opened is None:
                continue
            tensors = {n: t for n, t in dict_of(opened.root).items() if type(n) is str and type(t) is Tensor}
            names.setdefault((layer, mp), list(tensors))
            for name, tensor in tensors.items():
                why = opened.refusal(tensor)
                if why:
                    shards.lose([name], mp, why)
                else:
                    shards.add({name: opened.array(tensor, name)}, mp)
        for file in [f for f in save.gaps if "expert_" in f]:
            key = next((k for k, f in save.files.experts.items() if f == file), None) or _expert_key(file)
            if key is not None:
                alike = [EXPERT_NAME.fullmatch(n) for n in names.get((key[0], key[2]), ())]
                shards.lose([f"{m[1]}{key[1]}{m[3]}" for m in alike if m], key[2], save.gaps[file])

    def _frozen(self) -> None:
        """Put the fragments of ZeRO-3's frozen parameters together, which lie in the model states of each rank."""
        save, shards = self.save, self.shards
        for mp, file in save.states.items() if save.is_stage3 else ():
            told = shapes_of(dict_of(dict_of(file.root).get("frozen_param_shapes")), file.source.name)
            shape_of = {n: s for g in told or () for n, s in g.items() if n not in self.aliases}
            if not shape_of:
                continue
            ranks = ranks_of_stage3(save, mp)
            files = {r: save.files.shards.get((mp, r), f"zero_pp_rank_{r}_mp_rank_{mp:02d}_model_states.pt") for r in ranks}
            held = {r: save.opened[f] for r, f in files.items() if f in save.opened}
            sources = tuple(f.source for f in held.values())
            for name, shape in shape_of.items():
                alone = each_alone({name: shape}, len(ranks))
                try:
                    parts = {}
                    for number, (r, f) in enumerate(held.items()):
                        fragment = dict_of(dict_of(f.root).get("frozen_param_fragments")).get(name)
                        parts[r] = placed(sources, number, f, fragment, f"fragment of {name}")
                    lacking = [r for r in range(len(ranks)) if r not in parts and alone.reach[r]]
                    if lacking:
                        raise Refused("; ".join(save.why(files[r]) for r in lacking))
                    shards.add(alone.arrays(sources, parts), mp)
                except Refused as error:
                    shards.lose([name], mp, str(error))


def ranks_of_stage3(save: Save, mp: int) -> range:
    """Return the ranks that share ZeRO-3's partitions: all, or the first group of those that have copies (MiCS)."""
    count = next((o.count(0) for (m, _), o in save.optimizers.items() if m == mp), None) or save.dp
    if count > save.dp or save.dp % count:
        raise FormatError(f"{save.folder.name}: {save.dp} ranks cannot share {count} partitions evenly")
    return range(count)


def checkpoint_of(
    format: str,
    weights: Weights,
    wholes: Mapping[str, Whole],
    prefer: str,
    *,
    config: Mapping[str, Any] | None,
    problems: Sequence[Problem],
    meta: Mapping[str, Any],
) -> Checkpoint:
    """Put a checkpoint together: the weights are the module's, or where `prefer` says so the masters, as far as there are both."""
    save, module, master = weights.save, wholes.get("module", Whole()), wholes.get("master", Whole())
    first, second = (master, module) if prefer == "master" else (module, master)
    arrays, reasons = {}, {}
    for name in _in_order(save, module, master):
        if name in weights.aliases:
            continue
        made = first.arrays.get(name)
        if made is None and name not in first.reasons:
            made = second.arrays.get(name)
        if made is not None:
            arrays[name] = made
        elif name in first.reasons:
            other = "master" if prefer == "module" else "module"
            hint = f"; its {other} is there: open it with weights={other!r}" if name in second.arrays else ""
            reasons[name] = f"{first.reasons[name]}{hint}"
        else:
            reasons[name] = second.reasons[name]
    found = [*problems, *(Problem(f"{name}: {why}", array=name) for name, why in reasons.items())]
    optimizer = {kind: whole.arrays for kind, whole in wholes.items() if kind != "module" and whole.arrays}
    aliases = {a: n for a, n in weights.aliases.items() if (n in arrays or n in reasons) and a not in arrays}
    for kind, whole in wholes.items():
        if kind != "module":
            reasons |= {f"optimizer.{kind}.{name}": why for name, why in whole.reasons.items()}
    return bare(Checkpoint(arrays, format, aliases, optimizer, meta, config, reasons, tuple(found)))


def meta_of(weights: Weights, rules: Rules, tag: str) -> dict[str, Any]:
    """Return what the model states say besides weights."""
    save, state = weights.save, weights.save.state
    return {
        "tag": tag,
        "step": plain(state.get("global_steps")),
        "ranks": {"pp": save.mp // save.tp, "tp": save.tp, "dp": save.dp},
        "rules": rules.name,
        "tied": {tie: layer for layer, tie in weights.tie_of.items()},
        "buffers": sorted(weights.buffers),
        "ds_version": plain(state.get("ds_version")),
        "ds_config": plain(state.get("ds_config")),
        "state": {k: plain(v) for k, v in state.items() if k not in KNOWN_STATE},
        "files": tuple(save.opened),
        "unused": tuple(save.stale),
    }


def _in_order(save: Save, *wholes: Whole) -> list[str]:
    """Return all names of weights, in the module's order where there is one."""
    listed = [n for f in save.states.values() for n in dict_of(dict_of(f.root).get("module")) if type(n) is str]
    known = dict.fromkeys(n for w in wholes for n in (*w.arrays, *w.reasons))
    return [n for n in dict.fromkeys([*listed, *known]) if n in known]


def bare(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose names lack what wrappers put around modules, moments and ties included."""
    moments = [n for arrays in checkpoint.optimizer.values() for n in arrays]
    lost = [n for n in checkpoint.unavailable if not n.startswith("optimizer.")]
    names = dict.fromkeys([*checkpoint.arrays, *checkpoint.aliases, *moments, *lost])
    short = {old: new for new, old in unwrapped(names).items()}
    stripped = {old: new for old, new in short.items() if new != old}
    if not stripped:
        return checkpoint

    def renamed(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {short[n]: replace(a, name=short[n]) for n, a in arrays.items()}

    return replace(
        checkpoint,
        arrays=renamed(checkpoint.arrays),
        aliases={short[a]: short[n] for a, n in checkpoint.aliases.items()},
        optimizer={kind: renamed(arrays) for kind, arrays in checkpoint.optimizer.items()},
        unavailable={short.get(n, n): why for n, why in checkpoint.unavailable.items()},
        meta={**checkpoint.meta, "stripped": stripped},
    )


def rules_of(state: Mapping[Any, Any], declared: Declared | None, ranks: int) -> Rules:
    """Return who tells how tensor-parallel ranks share parameters."""
    info = dict_of(state.get("universal_checkpoint_info"))
    client = {"args": plain(state.get("args")), "checkpoint_version": state.get("checkpoint_version")}
    return Rules(declared, info, client, ranks)


def stored_files(save: Save) -> dict[str, TorchFile]:
    """Return all files of a save, those that nothing was needed of included."""
    files = {n: f for n, f in save.opened.items() if n not in save.stale}
    rest = [f for f in (*save.files.shards.values(), *save.files.others) if f not in save.opened and f not in save.errors]
    more = {n: f for n, f in read_files(save.folder, rest).items() if isinstance(f, TorchFile)}
    return {**files, **more}


def with_stored(native: Checkpoint, files: Callable[[], Mapping[str, TorchFile]]) -> Checkpoint:
    """Return a checkpoint that can also be shown with every tensor of its files under its stored key."""

    def stored() -> Checkpoint:
        arrays = stored_arrays(files())
        return replace(native, arrays=arrays, aliases={}, optimizer={}, names="stored", views={"native": lambda: native})

    return replace(native, views={"stored": stored})


def _expert_key(file: str) -> tuple[int, int, int] | None:
    found = TagFiles.of([file], "").experts
    return next(iter(found), None)
