"""DeepSpeed checkpoints: ZeRO 0 to 3, BF16Optimizer, pipelines, tensor parallelism, experts.

Written from DeepSpeed 0.19 (https://github.com/deepspeedai/DeepSpeed); older fields, as far as they are named, by its sources.

    ROOT/latest                text: the tag; HF Trainer's ROOT is `checkpoint-N/`
    ROOT/TAG/mp_rank_XX_model_states.pt                                  model states, stage 0 to 2
    ROOT/TAG/zero_pp_rank_D_mp_rank_XX_model_states.pt                   model states, stage 3
    ROOT/TAG/[bf16_]zero_pp_rank_D_mp_rank_XX_optim_states.pt            a rank's partition of the optimizer
    ROOT/TAG/layer_LL[-model_TT]-model_states.pt                         a layer of a PipelineModule
    ROOT/TAG/layer_L_expert_E_mp_rank_XX_model_states.pt                 an expert of MoE layer L, counted from 0

D is the data-parallel rank, in spite of its name; XX the model-parallel one, `stage * tp + tp_rank`. All are `torch.save` files.

**Model states**: `module` (a state dict in the model's dtype, buffers among it; None in pipelines; in stage 3 parameters have
the shape [0] there, and are none), `buffer_names`, `param_shapes` (per group of the optimizer, in stage 3 per sub-group, name ->
shape, in the order of the flat buffer: no other order counts), `frozen_param_shapes` and `frozen_param_fragments` (stage 3: this
rank's flat part), `shared_params` (alias -> name; in rank 0's file alone), `dp_world_size`, `mp_world_size`,
`checkpoint_parallel_dimensions`, `global_steps`, `ds_config`, and what the client adds: `args`, `universal_checkpoint_info`.

**Stage 1 and 2, BF16Optimizer** (`optimizer_state_dict`): `single_partition_of_fp32_groups` (flat, its padding cut off but for
BF16Optimizer), `base_optimizer_state` (`state[g]`, flat *with* padding; with `elastic_checkpoint` a list per group, without),
`group_paddings`, `param_alignment_paddings` (elements behind each parameter), `partition_count` per group (those of experts
differ), `param_slice_mappings` (name -> numel, start of the rank's fragments; compared here, and followed where there are no
`param_shapes`). A group of N elements is padded to W equal partitions; rank r has elements [r * S, (r + 1) * S).

**Stage 3**: `fp32_flat_groups` per sub-group, `optimizer_state_dict` in `optimizer_state_dict`. Each parameter is cut on its own
into `ceil(numel / W)` elements, a rank's parts follow each other. Weights in the model's dtype are stored nowhere: the weights
are the fp32 master then, as they are stored; frozen ones have the model's dtype.

**Stage 0**: `optimizer` in the model states, whose `state[i]` name nothing. They are matched with the parameters in the module's
order, if there is one group, and all shapes fit; else `DeepSpeed(parameters=[...])` says their names in the optimizer's order.

**Pipelines**: weights lie in `layer_*`, global layer numbers; layers without weights have no file. Names are those of the
PipelineModule: `{layer}.{key}`, and `tied_modules.{tie}.{key}`, which stands in the states of every stage that uses it and is
read once. Which layer's file holds a tie is stored nowhere: it is the one layer that has such keys and no parameters of its own;
where that is not one, `DeepSpeed(tied={"embed": 0})` says it.

GPT-NeoX's layers have their canonical names by `models/neox.py`. Its `args` say who it is, how many layers and heads there are, and
what it computes with (epsilon, rotary embedding), not which family: `config={"model_type": "gpt_neox", ...}` does.

**Experts**: names in the optimizer count local experts, here they are global: `ep_rank * local + i`. The ep rank of data rank r is
`r % ep`, or, with `use_data_before_expert_parallelism`, `r // (W / ep)`.

How tensor-parallel shards are joined is told in `_cuts.py`. `ck[name]` is the module's weight, or with `weights="master"` the fp32
master where there is one; `ck.optimizer` has `master` and the moments by the weight's name; steps and states are in `meta`. The
tag that `latest` names is refused where it is not complete; a tag's own folder, or `tag=`, opens with what is there.

**Writing** is for engines of stage 1, 2 and 3 on the axes dp and tp of `mesh`, for those of PipelineModules, of stage 1, on pp too
(`pipeline=True`; `names="gpt_neox"` or the source's), and for those of stage 1 and 2 with experts on ep. Stages 1 and 2 pad a group
of N elements to a multiple of 2 W and cut it into W partitions; in stage 3 the weights are their masters. The engine takes
parameters by their places, and by no name: their order has to be the source's, or that of `DeepSpeed(parameters=...)`, which is
then one group. How ranks of tp share arrays is what the layout says, and is told in `universal_checkpoint_info`: each has equal
parts of dim 0 or 1, the whole, or, as an `affine_map`, any box, which others may have, too (kv heads, where there are fewer than
ranks; rows that do not divide). A tie over stages is in the partitions of each, its values in the file of the one layer that
`tied` or the source tells. The data-parallel ranks are those of dp and ep together; rank r has the experts of ep rank `r % ep`, as
their names tell, whatever the layout. Refused: arrays of which a rank of tp has nothing or no one box, arrays that several stages
hold and are no ties, experts in stage 3 and in pipelines, experts in one group with other parameters, and tp for GPT-NeoX's
row-parallel biases, unless `cut=` says that they are copies. Engines that deal parameters out (`round_robin_gradients`) or align
them go on from a universal checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshload.array import Array
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, listing
from meshload.source import ByteSource, Folder

from ._cuts import Shards, whole
from ._torch_file import Tensor, TorchFile
from ._zero import (
    NETWORK,
    Partition,
    Refused,
    by_fragments,
    consecutive,
    dict_of,
    each_alone,
    is_count,
    is_number,
    mapped,
    names_of,
    placed,
    plain,
    scalar,
)
from ._zero_find import has_tag, is_tag, tag_named, tags
from ._zero_save import EXPERT_NAME, Optimizer, Save, order_told, read_config, read_save
from ._zero_weights import (
    LARGE,
    Weights,
    checkpoint_of,
    meta_of,
    ranks_of_stage3,
    rules_of,
    stored_files,
    with_stored,
)

if TYPE_CHECKING:
    from .formats.deepspeed import DeepSpeed

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Adam's and SGD's."""

NO_MOMENTS = ("step", "worker_error", "server_error")
"""Flat tensors in an optimizer's state that no parameter has a part of: 1-bit Adam's."""


def checkpoint_in(folder: Folder, options: DeepSpeed) -> Checkpoint:
    """Read the headers of a tag. Damage makes arrays unavailable; a damaged tag that `latest` names is refused."""
    place = _found(folder, options.tag)
    save = read_save(place.folder)
    if place.by_latest and save.gaps:
        raise FormatError(_unfinished(folder, place.tag, save.gaps))
    config, problems = read_config(folder)
    return _Opening(options, save, Weights(save, options.tied)).checkpoint(place.tag, config, problems)


# --- which tag --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Folder
    tag: str
    by_latest: bool


def _found(folder: Folder, tag: str | None) -> _Place:
    listed = folder.names()
    if tag is not None:
        if not has_tag(folder, tag):
            raise FormatError(f"{folder.name}: there is no tag {tag!r}; its tags are: {listing(tags(folder, listed)) or 'none'}")
        return _Place(folder.inside(tag), tag, False)
    if is_tag(listed):
        return _Place(folder, re.split(r"[/\\]", folder.name.rstrip("/"))[-1], False)
    latest, found = tag_named(folder, "latest"), tags(folder, listed)
    if latest is not None:
        if not has_tag(folder, latest):
            raise FormatError(_unfinished(folder, latest, {}))
        return _Place(folder.inside(latest), latest, True)
    if len(found) != 1:
        raise FormatError(
            f"{folder.name}: there is no file `latest`, and the tags are: {listing(found) or 'none'}; "
            f"say which with DeepSpeed(tag=...), or open its folder"
        )
    return _Place(folder.inside(found[0]), found[0], False)


def _unfinished(folder: Folder, tag: str, gaps: Mapping[str, str]) -> str:
    """Say that a tag is not complete, and which other is."""
    lack = f"is not complete: {listing(gaps.values(), 4)}" if gaps else "is not there, or holds no file of a checkpoint"
    others = [t for t in reversed(tags(folder, folder.names())) if t != tag]
    complete = next((t for t in others if not read_save(folder.inside(t)).gaps), None)
    instead = (
        f"the last complete one is {complete}: open it with DeepSpeed(tag={complete!r})" if complete else "no other is complete"
    )
    anyway = f"; DeepSpeed(tag={tag!r}) opens what is there" if gaps else ""
    return f"{folder.name}: `latest` names {tag}, which {lack}; {instead}{anyway}"


# --- the arrays of a tag ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """One group of the optimizer, on the ranks that share it."""

    number: int
    mp: int
    ranks: Sequence[int]
    """The data-parallel ranks, in the order of their partitions."""
    partition: Partition
    native: Mapping[str, str]
    """Name in the partition -> native name."""


@dataclass(eq=False)
class _Opening:
    """Puts the checkpoint of a tag together."""

    options: DeepSpeed
    save: Save
    weights: Weights
    kinds: dict[str, Shards] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def checkpoint(self, tag: str, config: Mapping[str, Any] | None, problems: Sequence[Problem]) -> Checkpoint:
        save, rules = self.save, rules_of(self.save.state, self.options.cut, self.save.tp)
        self._check_one_save()
        self.kinds["module"] = self.weights.shards
        for mp in range(save.mp):
            for group in self._groups(mp):
                self._partition(group)
        self._without_partitions()
        wholes = {kind: whole(shards, rules, self.weights.is_parameter) for kind, shards in self.kinds.items()}
        config = config if config is not None or rules.name != "gpt_neox" else _neox_config(save.state) or None
        told = [Problem(why, file=file) for file, why in save.gaps.items()]
        told += [Problem(f"{f}: not of this save, which has {save.mp} x {save.dp} ranks; not used", file=f) for f in save.stale]
        made = checkpoint_of(
            "deepspeed",
            self.weights,
            wholes,
            self.options.weights,
            config=config,
            problems=[*problems, *self.problems, *told],
            meta={**meta_of(self.weights, rules, tag), **self._optimizer_meta()},
        )
        return with_stored(made, lambda: stored_files(save))

    def shards(self, kind: str) -> Shards:
        """Return the shards of a kind, for adding."""
        return self.kinds.setdefault(kind, Shards(kind))

    @cached_property
    def sources(self) -> tuple[ByteSource, ...]:
        """The optimizer files, one tuple for all arrays."""
        return tuple(o.file.source for o in self.save.optimizers.values())

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {key: i for i, key in enumerate(self.save.optimizers)}

    def _check_one_save(self) -> None:
        """Raise where the files are of different saves, as after one that did not finish."""
        save, stale = self.save, set(self.save.stale)
        steps: dict[Any, list[str]] = {}
        optimizers = [o for o in save.optimizers.values() if o.file.source.name not in stale]
        is_far = any(o.file.source.gap >= NETWORK for o in optimizers[:1])
        for optimizer, step in zip(optimizers, mapped(Optimizer.step, optimizers, is_far), strict=True):
            if step is not None:
                steps.setdefault(step, []).append(optimizer.file.source.name)
        if len(steps) > 1:
            told = "; ".join(f"step {step:g}: {listing(files, 3)}" for step, files in steps.items())
            raise FormatError(f"{save.folder.name}: its optimizer files are of different saves: {told}")
        self.notes["step"] = next(iter(steps), None)
        counts = {dict_of(f.root).get("global_steps") for f in save.states.values()} if not save.is_stage3 else set()
        if len(counts) > 1:
            told = "; ".join(f"{f.source.name}: {dict_of(f.root).get('global_steps')}" for f in save.states.values())
            raise FormatError(f"{save.folder.name}: its model states are of different steps: {told}")

    # --- the fp32 master weights and the moments ---

    def _groups(self, mp: int) -> Iterator[_Group]:
        """Go through a rank's groups; one that cannot be understood makes its parameters unavailable."""
        save, shapes = self.save, self.save.shapes.get(mp)
        mine = {dp: o for (m, dp), o in save.optimizers.items() if m == mp and dp < save.dp}
        if not mine or (shapes is None and not save.has_partitions):
            for group in shapes or ():
                self._lose(group, mp, save.why(save.optimizer_file(mp, 0)))
            return
        first = next(iter(mine.values()))
        if first.stage == 3:
            yield from self._groups_of_stage3(mp, first, shapes)
            return
        if shapes is not None and len(shapes) != len(first.masters):
            why = f"{first.file.source.name} has {len(first.masters)} groups, param_shapes are of {len(shapes)}"
            self._lose([n for g in shapes for n in g], mp, why)
            return
        for number in range(len(first.masters)):
            names = shapes[number] if shapes is not None else {}
            for ranks, native in self._sharing(mp, number, first, names):
                try:
                    if isinstance(ranks, str):
                        raise Refused(ranks)
                    partition = self._consecutive(mp, number, ranks, names if shapes is not None else None)
                    yield _Group(number, mp, ranks, partition, native)
                except Refused as error:
                    self._lose([native.get(n, n) for n in names or first.fragments(number) or ()], mp, str(error))

    def _groups_of_stage3(self, mp: int, first: Optimizer, shapes: list[dict[str, Shape]] | None) -> Iterator[_Group]:
        ranks = ranks_of_stage3(self.save, mp)
        if shapes is None:
            alike = [g for m, of in self.save.shapes.items() if m // self.save.tp == mp // self.save.tp for g in of or ()]
            file = self.save.files.shards.get((mp, 0), f"zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt")
            self._lose([n for g in alike for n in g], mp, self.save.why(file))
            return
        layers = self.save.state.get("ds_autoep_layers")
        prefixes = [str(dict_of(e).get("expert_key_prefix")) for e in layers] if type(layers) is list else []
        try:
            groups = self._aligned(first, shapes, len(ranks))
        except Refused as error:
            self._lose([n for g in shapes for n in g], mp, str(error))
            return
        for number, shape_of in enumerate(groups):
            apart = [n for n in shape_of if any(n.startswith(f"{p}.") for p in prefixes)]
            if apart:
                self._lose(
                    shape_of, mp, f"its sub-group holds AutoEP's experts ({apart[0]}), partitioned in a way that is not read"
                )
            else:
                yield _Group(number, mp, ranks, each_alone(shape_of, len(ranks)), {})

    def _aligned(self, first: Optimizer, shapes: list[dict[str, Shape]], ranks: int) -> list[dict[str, Shape]]:
        """Return the parameters of each flat tensor; old files have fewer dicts than tensors, which then follow each other."""
        masters = first.masters
        if len(masters) == len(shapes):
            return shapes
        sizes = [t.shape[0] if type(t) is Tensor and len(t.shape) == 1 else 0 for t in masters]
        found: list[dict[str, Shape]] = [{} for _ in masters]
        number, at = 0, 0
        for name, shape in (item for g in shapes for item in g.items()):
            while number < len(sizes) and at >= sizes[number]:
                number, at = number + 1, 0
            part = -(-math.prod(shape) // ranks)
            if number == len(sizes) or at + part > sizes[number]:
                hint = "; they lie in offloaded_tensors, as swap files" if "offloaded_tensors/" in self.save.listed else ""
                raise Refused(
                    f"{first.file.source.name} has {len(sizes)} flat tensors of {sum(sizes)} elements, in which the parameters of "
                    f"{len(shapes)} groups do not fit{hint}"
                )
            found[number][name] = shape
            at += part
        return found

    def _sharing(
        self, mp: int, number: int, first: Optimizer, names: Mapping[str, Shape]
    ) -> Iterator[tuple[Sequence[int] | str, dict[str, str]]]:
        """Go through the sets of ranks that share a group, with the native names: one, or one per expert-parallel rank."""
        dp, count = self.save.dp, first.count(number) or self.save.dp
        is_moe = number < len(first.param_groups) and first.param_groups[number].get("moe") is True
        if not is_moe:
            yield (range(dp) if count == dp else f"{dp} ranks share it, partition_count says {count}"), {}
            return
        if dp % count:
            yield f"{dp} ranks are no multiple of partition_count {count}", {}
            return
        local: dict[str, int] = {}
        known = names or (first.fragments(number) or {})
        for match in map(EXPERT_NAME.fullmatch, known):
            if match:
                local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
        ep, told = dp // count, {n for n in self.save.experts_told if n}
        wrong = [n for n in local.values() if told and n * ep not in told]
        before = dict_of(self.save.state.get("ds_config")).get("use_data_before_expert_parallelism") is True
        for k in range(ep):
            native = {}
            for name, match in ((n, EXPERT_NAME.fullmatch(n)) for n in known):
                if match:
                    native[name] = f"{match[1]}{k * local[match[1]] + int(match[2])}{match[3]}"
            ranks = range(k * count, (k + 1) * count) if before else range(k, dp, ep)
            if wrong or len(native) != len(known):
                yield f"{wrong[0] if wrong else 'no'} local experts on {ep} ranks, num_experts says {sorted(told)}", native
            else:
                yield ranks, native

    def _consecutive(self, mp: int, number: int, ranks: Sequence[int], shape_of: Mapping[str, Shape] | None) -> Partition:
        """Return the partition of a group of ZeRO-1 or 2, by `param_shapes`; without them by `param_slice_mappings`."""
        held = {i: self.save.optimizers[mp, r] for i, r in enumerate(ranks) if (mp, r) in self.save.optimizers}
        fragments = {i: o.fragments(number) for i, o in held.items()}
        if shape_of is None:
            told = [fragments.get(i) for i in range(len(ranks))]
            if any(f is None for f in told):
                raise Refused("there are no param_shapes, and not every rank's param_slice_mappings")
            return by_fragments(self._shapes_of_weights(mp, [n for f in told for n in f or ()]), [f or {} for f in told])
        if not held:
            raise Refused(self.save.why(self.save.optimizer_file(mp, ranks[0])))
        size = _partition_size(held, number, len(ranks))
        pads = self._pads(held, number, len(shape_of))
        made = consecutive(shape_of, pads or [0] * len(shape_of), size, len(ranks))
        end = sum(math.prod(s) for s in shape_of.values()) + sum(pads or ())
        if size * len(ranks) - end >= 2 * len(ranks) and len(ranks) * size > 0:
            raise Refused(f"{len(ranks)} partitions of {size} elements were written, param_shapes make {end}")
        for i, found in fragments.items():
            if found is not None and {n: f for n, f in found.items() if f[0]} != made.fragments(i):
                raise Refused(f"{held[i].file.source.name}: its param_slice_mappings contradict param_shapes")
        return made

    def _pads(self, held: Mapping[int, Optimizer], number: int, count: int) -> list[int] | None:
        told = next(iter(held.values())).inner.get("param_alignment_paddings")
        if told is None:
            return None
        pads = told[number] if type(told) is list and number < len(told) else None
        if type(pads) is not list or len(pads) != count or not all(map(is_count, pads)):
            raise Refused(f"param_alignment_paddings are {str(pads)[:60]}, expected is one number for each of {count} parameters")
        return pads

    def _shapes_of_weights(self, mp: int, names: Iterable[str]) -> dict[str, Shape]:
        """Return the shapes of a rank's shards in the module or the layers' files."""
        module = self.weights.shards.found
        found = {}
        for name in dict.fromkeys(names):
            array = module.get(name, {}).get(mp) or module.get(name, {}).get(mp % self.save.tp)
            if array is None:
                raise Refused(f"there are no param_shapes, and no weight {name} to take the shape from")
            found[name] = array.shape
        return found

    def _partition(self, group: _Group) -> None:
        """Add the arrays of a group: the master weights, and each moment."""
        save, held = self.save, {}
        for i, r in enumerate(group.ranks):
            if (group.mp, r) in save.optimizers:
                held[i] = save.optimizers[group.mp, r]
        lost = {i: save.why(save.optimizer_file(group.mp, r)) for i, r in enumerate(group.ranks) if i not in held}
        for kind in ("master", *self._moments(group, held)):
            for name, of in group.partition.needing(list(lost)).items() if lost else ():
                self.shards(kind).lose([group.native.get(name, name)], group.mp, "; ".join(lost[i] for i in of[:3]))
            try:
                parts = {}
                for i, optimizer in held.items():
                    masters = optimizer.masters
                    tensor = masters[group.number] if group.number < len(masters) else None
                    if kind != "master":
                        tensor = optimizer.state(group.number).get(kind)
                    number = self._numbers[group.mp, group.ranks[i]]
                    parts[i] = placed(self.sources, number, optimizer.file, tensor, f"{kind} of group {group.number}")
                arrays = group.partition.arrays(self.sources, parts) if parts else {}
            except Refused as error:
                names = [group.native.get(n, n) for n in group.partition.shape_of]
                self.shards(kind).lose(names, group.mp, str(error))
                continue
            renamed = {group.native.get(n, n): a for n, a in arrays.items()}
            self.shards(kind).add({n: a if a.name == n else replace(a, name=n) for n, a in renamed.items()}, group.mp)

    def _moments(self, group: _Group, held: Mapping[int, Optimizer]) -> list[str]:
        """Return the kinds of a group's moments. A tensor of a name that is not Adam's may be no parameter's: see its size."""
        kinds: dict[str, bool] = {}
        for i, optimizer in held.items():
            for key, found in optimizer.state(group.number).items():
                if _is_moment(key, found):
                    fits = key in MOMENTS or (len(found.shape) == 1 and found.shape[0] >= max(2, group.partition.reach[i]))
                    kinds[key] = kinds.get(key, False) or fits
        others = [kind for kind, fits in kinds.items() if not fits]
        if others:
            self.notes["others"] = sorted({*self.notes.get("others", ()), *others})
        return [kind for kind, fits in kinds.items() if fits]

    def _lose(self, names: Iterable[str], mp: int, why: str) -> None:
        self.shards("master").lose(names, mp, why)

    # --- an optimizer without ZeRO ---

    def _without_partitions(self) -> None:
        for mp, file in self.save.states.items():
            optimizer = dict_of(dict_of(file.root).get("optimizer"))
            if not optimizer or self.save.files.optimizers:  # BF16_Optimizer without ZeRO writes a few scalars here, too
                continue
            try:
                _add_named(self, mp, file, optimizer)
            except Refused as error:
                self.notes["optimizer"] = f"left out: {error}"
                self.problems.append(Problem(f"the optimizer's state is left out: {error}", file=file.source.name))
        if self.save.files.others:
            told = f"experts' optimizer states name no parameters and are left out: {listing(self.save.files.others, 3)}"
            self.notes["experts"] = told

    def parameters_of(self, mp: int, groups: int) -> dict[str, Array]:
        """Return the parameters in the order in which the optimizer has them."""
        module = self.weights.shards.found
        names = self.options.parameters
        if names is None:
            if groups != 1:
                raise Refused(f"it has {groups} groups, and names no parameters; say their names with DeepSpeed(parameters=[...])")
            names = [n for n in module if n not in self.weights.buffers]
        found = {n: module[n][mp] for n in names if mp in module.get(n, {})}
        if len(found) != len(names):
            raise Refused(f"the module has no parameter {next(n for n in names if n not in found)}")
        return found

    def _optimizer_meta(self) -> dict[str, Any]:
        optimizer = next(iter(self.save.optimizers.values()), None)
        inner = {k: plain(v) for k, v in optimizer.inner.items() if k not in LARGE} if optimizer else {}
        groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups] if optimizer else []
        return {
            "zero_stage": optimizer.stage if optimizer else 0,
            "groups": order_told(self.save),
            "optimizer": {**inner, "param_groups": groups, **self.notes},
        }


def _neox_config(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what GPT-NeoX's args say of the model, under Hugging Face's keys; not its family, as it trains several."""
    args = dict_of(plain(state.get("args")))
    keys = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads"}
    found = {ours: args[theirs] for theirs, ours in keys.items() if is_count(args.get(theirs)) and args[theirs]}
    numbers = {"layernorm_epsilon": "layer_norm_eps", "rotary_pct": "rotary_pct", "rotary_emb_base": "rotary_emb_base"}
    found |= {ours: args[theirs] for theirs, ours in numbers.items() if is_number(args.get(theirs))}
    if type(args.get("gpt_j_residual")) is bool:
        found["use_parallel_residual"] = args["gpt_j_residual"]
    return found


def _is_moment(key: Any, value: Any) -> bool:
    return type(key) is str and type(value) is Tensor and len(value.shape) > 0 and key not in NO_MOMENTS


def _partition_size(held: Mapping[int, Optimizer], number: int, ranks: int) -> int:
    """Return how many elements a rank's partition of a group has, with its padding."""
    sizes: dict[int, str] = {}
    for i, optimizer in held.items():
        master = optimizer.masters[number] if number < len(optimizer.masters) else None
        if type(master) is not Tensor or len(master.shape) != 1:
            raise Refused(f"{optimizer.file.source.name}: its partition of group {number} is no flat tensor")
        moments = [v.shape[0] for k, v in optimizer.state(number).items() if _is_moment(k, v) and not optimizer.is_elastic]
        pads = optimizer.inner.get("group_paddings")
        pad = pads[number] if type(pads) is list and number < len(pads) and "zero_stage" in optimizer.inner else 0
        if moments:
            sizes.setdefault(moments[0], optimizer.file.source.name)
        elif is_count(pad) and (pad or i == 0 or ranks == 1):
            sizes.setdefault(master.shape[0] + pad, optimizer.file.source.name)
    if len(sizes) > 1:
        raise Refused(f"its partitions differ in size: {'; '.join(f'{n} elements in {file}' for n, file in sizes.items())}")
    if not sizes:
        sizes = {max(o.masters[number].shape[0] for o in held.values()): ""}
    return next(iter(sizes))


def _add_named(opening: _Opening, mp: int, file: TorchFile, optimizer: Mapping[Any, Any]) -> None:
    """Add the state of an optimizer that knows its parameters by their order alone."""
    base = dict_of(optimizer.get("optimizer_state_dict")) if "optimizer_state_dict" in optimizer else optimizer
    groups = base.get("param_groups")
    groups = [dict_of(g) for g in groups] if type(groups) is list else []
    masters = optimizer.get("fp32_groups_flat", optimizer.get("fp32_groups"))
    is_flat = "fp32_groups_flat" in optimizer
    named = [n for g in groups for n in names_of(g.get("param_names"))]
    params = opening.parameters_of(mp, len(groups)) if opening.options.parameters or not named else None
    if params is None:
        params = {n: opening.weights.shards.found[n][mp] for n in named if mp in opening.weights.shards.found.get(n, {})}
        if len(params) != len(named):
            raise Refused("its param_names are not those of the module")
    state = dict_of(base.get("state"))
    if is_flat:
        _add_flat(opening, mp, file, params, masters, state)
        return
    keys = [k for g in groups for k in (g.get("params") if type(g.get("params")) is list else [])]
    flat_masters = [t for g in masters for t in g] if type(masters) is list and all(type(g) is list for g in masters) else []
    if len(keys) != len(params) or (flat_masters and len(flat_masters) != len(params)):
        raise Refused(f"it has {len(keys)} parameters, the module {len(params)}; say their names with DeepSpeed(parameters=[...])")
    found: dict[str, dict[str, Array]] = {}
    for i, (name, weight) in enumerate(params.items()):
        of = {"master": flat_masters[i]} if flat_masters else {}
        for kind, tensor in {**of, **{k: v for k, v in dict_of(state.get(keys[i])).items() if _is_moment(k, v)}}.items():
            why = file.refusal(tensor) if type(tensor) is Tensor else "it is no tensor"
            if why or tensor.shape != weight.shape:
                raise Refused(
                    f"its {kind} number {i} has the shape {getattr(tensor, 'shape', None)}, {name} has {weight.shape} {why}"
                )
            found.setdefault(kind, {})[name] = file.array(tensor, name)
    for kind, arrays in found.items():
        opening.shards(kind).add(arrays, mp)
    opening.notes["step"] = next((s for s in (scalar(file, dict_of(v).get("step")) for v in state.values()) if s is not None), None)


def _add_flat(
    opening: _Opening, mp: int, file: TorchFile, params: Mapping[str, Array], masters: Any, state: Mapping[Any, Any]
) -> None:
    """Add the state of a fused optimizer: one flat tensor per group, its parameters one after another."""
    masters = masters if type(masters) is list else []
    names = list(params)
    for number, master in enumerate(masters):
        tensors = {"master": master, **{k: v for k, v in dict_of(state.get(number)).items() if _is_moment(k, v)}}
        _, tensor, _ = placed((), 0, file, master, f"fp32 group {number}")
        mine: dict[str, Shape] = {}
        held = 0
        while names and held < tensor.shape[0]:
            name = names.pop(0)
            mine[name] = params[name].shape
            held += params[name].size
        if held != tensor.shape[0]:
            raise Refused(f"its group {number} has {tensor.shape[0]} elements, the parameters in order make {held}")
        partition = consecutive(mine, [0] * len(mine), held, 1)
        for kind, found in tensors.items():
            part = placed(file.sources, 0, file, found, f"{kind} of group {number}")
            opening.shards(kind).add(partition.arrays(file.sources, {0: part}), mp)
    if names:
        raise Refused(f"its groups hold none of {listing(names, 3)}; say its names, in its order, with DeepSpeed(parameters=[...])")
