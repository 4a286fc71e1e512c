"""The headers of a tag that DeepSpeed saved: which files there are, which are missing, and what they say of ranks and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from meshload.box import Shape
from meshload.checkpoint import Problem
from meshload.errors import FormatError, SourceError, listing
from meshload.source import Folder, read_bytes

from ._json import parsed
from ._torch_file import TorchFile
from ._zero import TagFiles, dict_of, is_count, is_list, plain, read_files, scalar, shapes_of

CONFIG_LIMIT = 16 << 20
"""Bytes; real ones have a few KB."""

MOST_RANKS = 1 << 17
"""More of them, or of experts, are hostile."""

LAYER_NAME = re.compile(r"(\d{1,9})\.(.+)")
"""A parameter of a pipeline's layer."""

EXPERT_NAME = re.compile(r"(.*deepspeed_experts\.)(\d{1,9})(\..*)")
"""A parameter of an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """One rank's partition of the optimizer."""

    file: TorchFile
    inner: Mapping[Any, Any]
    """Its `optimizer_state_dict`."""

    @property
    def stage(self) -> int:
        told = plain(self.inner.get("zero_stage"))
        return told if type(told) is int else 3 if "fp32_flat_groups" in self.inner else 1

    @property
    def masters(self) -> Sequence[Any]:
        """The flat fp32 tensors, per group."""
        found = self.inner.get("fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups")
        return found if is_list(found) else ()

    @property
    def is_elastic(self) -> bool:
        return type(self.inner.get("base_optimizer_state")) is list

    @property
    def base(self) -> Mapping[Any, Any]:
        """torch's state dict: `state` and `param_groups`."""
        return dict_of(self.inner.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"))

    @property
    def param_groups(self) -> Sequence[Mapping[Any, Any]]:
        found = self.base.get("param_groups")
        return [dict_of(g) for g in found] if type(found) is list else []

    def state(self, group: int) -> Mapping[Any, Any]:
        """Return what the optimizer keeps of a group; empty before its first step."""
        if self.is_elastic:
            of = self.inner["base_optimizer_state"]
            return dict_of(of[group]) if group < len(of) else {}
        params = self.param_groups[group].get("params") if self.stage != 3 and group < len(self.param_groups) else None
        key = params[0] if type(params) is list and len(params) == 1 else group
        return dict_of(dict_of(self.base.get("state")).get(key))

    def count(self, group: int) -> int | None:
        """Return how many ranks share a group."""
        found = self.inner.get("partition_count")
        if type(found) is list:
            found = found[group] if group < len(found) else None
        return found if is_count(found) and found else None

    def fragments(self, group: int) -> dict[str, tuple[int, int]] | None:
        """Return `param_slice_mappings`: name -> (count, start)."""
        found = self.inner.get("param_slice_mappings")
        if type(found) is not list or group >= len(found) or type(found[group]) is not dict:
            return None
        pairs = {n: (f.get("numel"), f.get("start")) for n, f in found[group].items() if hasattr(f, "get")}
        return pairs if all(type(n) is str and is_count(a) and is_count(b) for n, (a, b) in pairs.items()) else None

    def step(self) -> int | float | None:
        """Return how many steps were taken, by the first group that says it; no tensor but its one number is read."""
        for group in range(max(1, len(self.masters))):
            found = scalar(self.file, self.state(group).get("step"))
            if found is None and group < len(self.param_groups):
                found = scalar(self.file, self.param_groups[group].get("step"))
            if found is not None:
                return found
        return scalar(self.file, self.inner.get("base_optimizer_state_step"))


@dataclass(frozen=True, eq=False)
class Save:
    """The headers of a tag's files."""

    folder: Folder
    files: TagFiles
    listed: Sequence[str]
    opened: dict[str, TorchFile]
    errors: dict[str, str]
    """Files that could not be read, with the reason."""
    states: Mapping[int, TorchFile]
    """mp -> a file of model states; in stage 3 of the lowest rank that could be read."""

    @cached_property
    def state(self) -> Mapping[Any, Any]:
        """The model states of the lowest rank."""
        return dict_of(next(iter(self.states.values())).root) if self.states else {}

    @cached_property
    def is_stage3(self) -> bool:
        return bool(self.files.shards)

    @cached_property
    def is_pipeline(self) -> bool:
        return bool(self.files.layers)

    @cached_property
    def dp(self) -> int:
        """How many data-parallel ranks there are."""
        told = self.state.get("dp_world_size")
        if is_count(told) and told:
            return int(told)
        first = next(iter(self.optimizers.values()), None)
        ranks = [dp for _, dp in (*self.files.shards, *self.files.optimizers)]
        return (first.count(0) if first else None) or max(ranks, default=0) + 1

    @cached_property
    def mp(self) -> int:
        """How many model-parallel ranks there are."""
        told = self.state.get("mp_world_size")
        ranks = [*self.files.models, *(mp for mp, _ in (*self.files.shards, *self.files.optimizers))]
        return int(told) if is_count(told) and told else max(ranks, default=0) + 1

    @cached_property
    def tp(self) -> int:
        """How many of them are tensor-parallel ranks."""
        told = dict_of(self.state.get("checkpoint_parallel_dimensions")).get("tp_degree")
        if is_count(told) and told and self.mp % told == 0:
            return int(told)
        return max((t for _, t in self.files.layers), default=0) + 1 if self.is_pipeline else self.mp

    @cached_property
    def optimizers(self) -> dict[tuple[int, int], Optimizer]:
        """(mp, dp) -> what that rank keeps, of those that could be read."""
        found = {}
        for key, file in sorted(self.files.optimizers.items()):
            if file in self.opened:
                root = dict_of(self.opened[file].root)
                found[key] = Optimizer(self.opened[file], dict_of(root.get("optimizer_state_dict")))
        return found

    @cached_property
    def shapes(self) -> dict[int, list[dict[str, Shape]] | None]:
        """mp -> `param_shapes`; very old files have them beside the optimizer."""
        found = {mp: shapes_of(dict_of(f.root).get("param_shapes"), f.source.name) for mp, f in self.states.items()}
        for (mp, _), optimizer in self.optimizers.items():
            if found.get(mp) is None:
                file = optimizer.file
                found[mp] = shapes_of(dict_of(file.root).get("param_shapes"), file.source.name)
        return found

    @cached_property
    def has_partitions(self) -> bool:
        """Whether there should be optimizer files."""
        return self.is_stage3 or bool(self.files.optimizers) or any(s is not None for s in self.shapes.values())

    @cached_property
    def owned(self) -> dict[str, None]:
        """The names that the optimizer owns, as its files call them."""
        names = dict.fromkeys(n for groups in self.shapes.values() for g in groups or () for n in g)
        for optimizer in self.optimizers.values():
            for group in range(len(optimizer.masters)):
                names.update(dict.fromkeys(optimizer.fragments(group) or ()))
        return names

    @cached_property
    def stale(self) -> list[str]:
        """Files of ranks that this save does not have, left by one with more."""
        ranks = [*self.files.shards.items(), *self.files.optimizers.items()]
        more = [file for (mp, dp), file in ranks if mp >= self.mp or dp >= self.dp]
        return [*more, *(file for mp, file in self.files.models.items() if mp >= self.mp)]

    @cached_property
    def gaps(self) -> dict[str, str]:
        """Files that should be there and are not, or are damaged: file -> what is wrong."""
        stale, listed = set(self.stale), set(self.listed)
        found = {file: f"{file}: not there" for file in self._expected() if file not in listed}
        return found | {file: why for file, why in self.errors.items() if file not in stale}

    def _expected(self) -> Iterator[str]:
        ranks = [(mp, dp) for mp in range(self.mp) for dp in range(self.dp)]
        for mp in () if self.is_stage3 else range(self.mp):
            yield self.files.models.get(mp, f"mp_rank_{mp:02d}_model_states.pt")
        for mp, dp in ranks if self.is_stage3 else ():
            yield self.files.shards.get((mp, dp), f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt")
        prefix = "bf16_" if any(f.startswith("bf16_") for f in self.files.optimizers.values()) else ""
        for mp, dp in ranks if self.has_partitions else ():
            yield self.optimizer_file(mp, dp, prefix)
        for layer in self.layers_told if self.is_pipeline else ():
            for t in range(self.tp):
                yield self.layer_file(layer, t)
        for layer, experts in enumerate(self.experts_told):
            for expert in range(experts):
                for mp in range(self.mp):
                    old = self.files.experts.get((-1, expert, mp))
                    new = f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"
                    yield self.files.experts.get((layer, expert, mp), old or new)

    def optimizer_file(self, mp: int, dp: int, prefix: str = "") -> str:
        """Return the name of a rank's optimizer file, be it there or not."""
        return self.files.optimizers.get((mp, dp), f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")

    def layer_file(self, layer: int, tp: int) -> str:
        """Return the name of a layer's file, be it there or not."""
        of_model = any("-model_" in file.removesuffix("-model_states.pt") for file in self.files.layers.values())
        name = f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" if of_model else f"layer_{layer:02d}-model_states.pt"
        return self.files.layers.get((layer, tp), name)

    @cached_property
    def layers_told(self) -> list[int]:
        """The layers that have parameters of their own."""
        return sorted({int(match[1]) for match in map(LAYER_NAME.fullmatch, self.owned) if match})

    @cached_property
    def experts_told(self) -> list[int]:
        """The numbers of experts of the MoE layers."""
        told = self.state.get("num_experts")
        counts = told if type(told) is list and self.files.experts else []
        counts = [n if is_count(n) else 0 for n in counts]
        return counts if sum(counts) <= MOST_RANKS else []

    def why(self, file: str) -> str:
        """Say why a file gives nothing."""
        return self.errors.get(file) or f"{file}: not there"


def order_told(save: Save) -> list[list[str]] | None:
    """Return the parameters' names in the optimizer's order, by group, where the ranks tell one order of all of them.

    Tensor-parallel ranks have the same; stages follow each other, if each has its layers in their order.
    """
    found: list[list[str]] | None = None
    for stage in range(save.mp // save.tp):
        of = [_order_of(save, mp) for mp in range(stage * save.tp, (stage + 1) * save.tp)]
        mine = of[0]
        if mine is None or any(other != mine for other in of) or (found is not None and len(found) != len(mine)):
            return None
        if save.mp > save.tp and not all(_is_by_layer(group) for group in mine):
            return None
        known = {n for group in found or () for n in group}
        more = [[n for n in group if n not in known] for group in mine]  # a tie is in all stages that use it
        found = more if found is None else [a + b for a, b in zip(found, more, strict=True)]
    return found


def _order_of(save: Save, mp: int) -> list[list[str]] | None:
    optimizer = next((o for (m, _), o in save.optimizers.items() if m == mp), None)
    shapes = save.shapes.get(mp)
    if optimizer is None or shapes is None:
        return None
    counts = [len(found) if type(found := g.get("params")) is list else 1 for g in optimizer.param_groups]
    counts = counts if optimizer.stage == 3 else [1] * len(counts)
    if sum(counts) != len(shapes):
        return None
    left = iter(shapes)
    groups = [[name for _ in range(count) for name in next(left)] for count in counts]
    return [_of_all_experts(group, save.dp // (optimizer.count(g) or save.dp)) for g, group in enumerate(groups)]


def _of_all_experts(names: Sequence[str], ranks: int) -> list[str]:
    """Return a group's names in which each expert-parallel rank counts its own experts from 0, with those of all ranks."""
    found: list[str] = []
    for layer, alike in groupby(names, key=lambda name: (EXPERT_NAME.fullmatch(name) or ("", ""))[1]):
        run = list(alike)
        matches = [m for m in map(EXPERT_NAME.fullmatch, run) if m]
        count = max((int(m[2]) + 1 for m in matches), default=0)
        found += [f"{layer}{r * count + int(m[2])}{m[3]}" for r in range(ranks) for m in matches] or run
    return found


def _is_by_layer(names: Iterable[str]) -> bool:
    """Say whether names are in the order in which a pipeline has them: ties, then its layers."""
    numbers = [int(match[1]) if (match := LAYER_NAME.fullmatch(name)) else -1 for name in names]
    return numbers == sorted(numbers)


def read_save(folder: Folder, *, needs_states: bool = True) -> Save:
    """Read the headers of a tag's files: of ZeRO-3's model states one per model-parallel rank, unless weights lie in them."""
    listed = folder.names()
    files = TagFiles.of(listed, folder.name)
    opened: dict[str, TorchFile] = {}
    errors: dict[str, str] = {}

    def read(names: Iterable[str]) -> None:
        for file, found in read_files(folder, [n for n in names if n not in opened and n not in errors]).items():
            if isinstance(found, TorchFile):
                opened[file] = found
            else:
                errors[file] = str(found)

    read(files.models.values())
    states = {mp: opened[file] for mp, file in sorted(files.models.items()) if file in opened}
    for mp in sorted({mp for mp, _ in files.shards}):
        for dp in sorted(dp for m, dp in files.shards if m == mp):
            read([files.shards[mp, dp]])
            if files.shards[mp, dp] in opened:
                states[mp] = opened[files.shards[mp, dp]]
                break
    if needs_states and not states:
        raise FormatError(
            f"{folder.name}: no file of model states (mp_rank_XX_model_states.pt or zero_pp_rank_D_mp_rank_XX_model_states.pt) "
            f"can be read: {listing(errors.values(), 3) or 'none is there'}; without the shapes in it nothing can be found"
        )
    for key in ("frozen_param_fragments", "buffer_names"):  # a part of the former is in each file, a copy of the latter
        if any(dict_of(f.root).get(key) for f in states.values()):
            read(files.shards.values())
    read(file for _, file in sorted(files.optimizers.items()))
    read(file for _, file in sorted(files.layers.items()))
    read(file for _, file in sorted(files.experts.items()))
    save = Save(folder, files, listed, opened, errors, states)
    if save.mp * save.dp > MOST_RANKS or save.mp % save.tp:
        raise FormatError(
            f"{folder.name}: says it is of {save.mp} model-parallel ranks, {save.tp} of them tensor-parallel, x {save.dp}"
        )
    return save


def read_config(folder: Folder) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    """Return the model's `config.json`, which HF Trainer writes beside `latest`."""
    if not folder.has("config.json"):
        return None, ()
    try:
        source = folder.file("config.json")
        if source.size > CONFIG_LIMIT:
            raise FormatError(f"config.json: {source.size} bytes, at most {CONFIG_LIMIT} are read")
        return parsed(read_bytes(source), "config.json"), ()
    except (FormatError, SourceError) as error:
        return None, (Problem(f"{error}; the model's config is not known", file="config.json"),)
