"""What a Fast-LLM model is made of, and what each of its ranks holds in one flat vector. Nothing here touches a file.

From https://github.com/ServiceNow/Fast-LLM, `engine/multi_stage` and `layers`, versions 0.3.0 to 0.4.0.

A model is a list of layers: embeddings, decoder blocks, head, and for each further prediction head a block and a head. Layers are
dealt into stages, stage `i` to pipeline rank `i % pp`. A stage's parameters that are trained form one group, the frozen ones
(`lr_scale` 0, theirs or that of something around them) a second. A group is its parameters without gaps, each the tensor
rank's part of it, and zeros up to a multiple of `32 * dp`; each data rank holds an equal run of it.

In a group parameters stand in the order of their modules, but sorted by whether weights decay and whether tensor ranks share them:

    since June 2026 (`decay="matrices"`): biases of split layers; norms and other biases; whole matrices; split matrices
    before (`decay="all"`, all parameters decay): all whole parameters; all split ones

Neither the version nor a size tells the two apart. A parameter is split by its declaration, also where there is one tensor rank;
the vocabulary alone only where there are several. A module's own parameters come before those of modules inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from meshload.box import Shape
from meshload.errors import FormatError
from meshload.pieces import Ints

LARGEST = 1 << 40
"""Elements of a dim."""

MOST_BLOCKS = 10_000

PAD_TO = 32

EMBEDDINGS_COUNT = 1000
"""Fast-LLM counts the embeddings as so many layers, so that they are a stage of their own."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a configuration. What it lacks has its default: Fast-LLM writes only what was set."""

    values: Mapping[str, Any]
    path: str

    def of(self, key: str) -> Section:
        """Return a section; an empty one where there is none."""
        return self.optional(key) or Section({}, f"{self.path}.{key}")

    def optional(self, key: str) -> Section | None:
        """Return a section; None where there is none, or null."""
        found = self._get(key, dict, "a mapping")
        return None if found is None else Section(found, f"{self.path}.{key}")

    def size(self, key: str, default: int, least: int = 1) -> int:
        found = self._get(key, int, "a whole number")
        if found is None:
            return default
        if not least <= found < LARGEST:
            raise FormatError(f"{self.path}.{key} is {found}, a whole number from {least} on was expected")
        return found

    def number(self, key: str, default: float | None) -> float | None:
        found = self._get(key, (int, float), "a number")
        return default if found is None else found

    def flag(self, key: str, default: bool) -> bool:
        found = self._get(key, bool, "true or false")
        return default if found is None else found

    def word(self, key: str, default: str) -> str:
        found = self._get(key, str, "a word")
        return default if found is None else found

    def refuse(self, key: str, why: str) -> FormatError:
        return FormatError(f"{self.path}.{key} is {self.values.get(key)!r}: {why}")

    def _get(self, key: str, kinds: type[T] | tuple[type[T], ...], expected: str) -> T | None:
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is not bool):
            raise FormatError(f"{self.path}.{key} is {found!r}, {expected} was expected")
        return found


# --- parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """`outer * cut * inner` elements, row-major; of a split parameter each tensor rank holds an equal run of `cut`."""

    name: str
    outer: int
    cut: int
    inner: int
    shape: Shape
    is_split: bool = False
    decays: bool = True
    is_frozen: bool = False

    def held(self, tp: int) -> int:
        """Number of elements that one tensor rank holds."""
        return self.outer * (self.cut // tp if self.is_split else self.cut) * self.inner

    def key(self, decay: str) -> tuple[bool, bool]:
        """What its place in a group is sorted by. (Fast-LLM's third key parts what is never in one group.)"""
        decays = self.decays or decay == "all"
        return decays, decays == self.is_split


@dataclass(frozen=True, slots=True)
class Layer:
    """What is never cut by a stage's end."""

    count: float
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model, and which of their parameters are tied: alias -> the one that is stored."""

    layers: tuple[Layer, ...]
    ties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Around:
    """What holds for all that is inside a module."""

    hidden: int
    tp: int
    is_frozen: bool = False

    def inside(self, section: Section) -> _Around:
        """Return what holds inside a module of this configuration."""
        return _Around(self.hidden, self.tp, self.is_frozen or section.number("lr_scale", None) == 0)

    def parameter(
        self,
        name: str,
        section: Section,
        parts: tuple[int, int, int],
        shape: Shape,
        *,
        is_split: bool = False,
        decays: bool = True,
    ) -> Parameter:
        if is_split and parts[1] % self.tp:
            raise FormatError(f"{name} cannot be split: {parts[1]} elements over {self.tp} tensor ranks")
        told = section.values.get("weight_decay")
        if told is not None:
            decays = bool(section.number("weight_decay", None) if not isinstance(told, bool) else told)
        frozen = self.inside(section).is_frozen
        return Parameter(name, *parts, shape, is_split, decays, frozen)


def model_of(base: Section, tp: int) -> Model:
    """Return what a `gpt` model of this configuration is made of."""
    if base.optional("embeddings_layer") or base.optional("output_layer"):
        raise FormatError(f"{base.path} has the layout that Fast-LLM had before October 2025, which this reader does not know")
    if base.of("peft").word("type", "none") != "none":
        raise base.of("peft").refuse("type", "adapters have parameters that this reader does not know")
    around = _Around(base.size("hidden_size", 1024), tp).inside(base)
    embeddings, head, decoder = base.of("embeddings"), base.of("head"), base.of("decoder")
    blocks = blocks_of(decoder)
    in_decoder = around.inside(decoder)
    layers = [
        Layer(EMBEDDINGS_COUNT, tuple(_embeddings(embeddings, around))),
        *(Layer(1, tuple(_block(f"decoder.{i}", block, in_decoder))) for i, block in enumerate(blocks)),
        Layer(1, tuple(_head("head", head, embeddings, around))),
    ]
    further = head.size("prediction_heads", 1) - 1
    if further > MOST_BLOCKS:
        raise head.refuse("prediction_heads", f"at most {MOST_BLOCKS} are read")
    if further and not blocks:
        raise decoder.refuse("num_blocks", "each further prediction head repeats the last block")
    for i in range(further):
        name = f"multi_token_prediction.heads.{i}"
        block = _block(f"multi_token_prediction.blocks.{i}", blocks[-1], around.inside(head))
        layers += [Layer(1, tuple(block)), Layer(1, tuple(_head(name, head, embeddings, around)))]
    return Model(tuple(layers), ties_of(base))


def ties_of(base: Section) -> dict[str, str]:
    """Return the tied weights: alias -> the one that is stored. Further prediction heads always use the first one's."""
    is_tied, further = base.flag("tied_embedding_weight", False), base.of("head").size("prediction_heads", 1) - 1
    main = "embeddings.word_embeddings_weight" if is_tied else "head.output_weights"
    heads = ["head", *(f"multi_token_prediction.heads.{i}" for i in range(min(further, MOST_BLOCKS)))]
    return {f"{head}.output_weights": main for head in heads[0 if is_tied else 1 :]}


def blocks_of(decoder: Section) -> list[Section]:
    """Return the configuration of each block."""
    kind, count = decoder.word("type", "fixed"), decoder.size("num_blocks", 12, least=0)
    if count > MOST_BLOCKS:
        raise decoder.refuse("num_blocks", f"at most {MOST_BLOCKS} are read")
    if kind == "fixed":
        return [decoder.of("block")] * count
    if kind != "pattern":
        raise decoder.refuse("type", "'fixed' or 'pattern' was expected")
    blocks, pattern = decoder.of("blocks"), decoder.values.get("pattern")
    if not isinstance(pattern, list) or not pattern or not all(isinstance(b, str) and b in blocks.values for b in pattern):
        raise decoder.refuse("pattern", f"a list of the blocks {', '.join(blocks.values)} was expected")
    return [blocks.of(pattern[i % len(pattern)]) for i in range(count)]


def _embeddings(section: Section, around: _Around) -> Iterator[Parameter]:
    around, vocab, hidden = around.inside(section), section.size("vocab_size", 49152), around.hidden
    is_split = _is_vocab_split(section, around)
    word, position = section.of("word_embeddings"), section.of("position_embeddings")
    name = "embeddings.word_embeddings_weight"
    yield around.parameter(name, word, (1, vocab, hidden), (vocab, hidden), is_split=is_split)
    if position.flag("enabled", False):
        n, name = section.size("num_position_embeddings", 2048), "embeddings.position_embeddings_weight"
        yield around.parameter(name, position, (1, n, hidden), (n, hidden))


def _head(name: str, section: Section, embeddings: Section, around: _Around) -> Iterator[Parameter]:
    around, vocab, hidden = around.inside(section), embeddings.size("vocab_size", 49152), around.hidden
    weight, is_split = section.of("output_weight"), _is_vocab_split(embeddings, around)
    yield around.parameter(f"{name}.output_weights", weight, (1, vocab, hidden), (vocab, hidden), is_split=is_split)
    yield from _norm(f"{name}.final_norm", section.of("normalization"), around, hidden)


def _is_vocab_split(embeddings: Section, around: _Around) -> bool:
    return around.tp > 1 and embeddings.flag("vocab_parallel", True)


def _block(name: str, section: Section, around: _Around) -> Iterator[Parameter]:
    if section.word("type", "decoder") != "decoder":
        raise section.refuse("type", "this reader knows decoder blocks alone")
    around, hidden, norm = around.inside(section), around.hidden, section.of("normalization")
    if section.of("output_scale").flag("enabled", False):
        yield around.parameter(f"{name}.output_scale", section.of("output_scale"), (1, 1, 1), (1,), decays=False)
    yield from _norm(f"{name}.norm_1", section.optional("pre_mixer_normalization") or norm, around, hidden)
    yield from _norm(f"{name}.norm_2", section.optional("pre_mlp_normalization") or norm, around, hidden)
    yield from _norm(f"{name}.post_mixer_norm", section.optional("post_mixer_normalization"), around, hidden)
    yield from _norm(f"{name}.post_mlp_norm", section.optional("post_mlp_normalization"), around, hidden)
    yield from _attention(f"{name}.mixer", section.of("mixer"), around)
    yield from _mlp(f"{name}.mlp", section.of("mlp"), around)


def _norm(name: str, section: Section | None, around: _Around, size: int) -> Iterator[Parameter]:
    if section is None:
        return
    kind = section.word("type", "layer_norm")
    if kind not in ("layer_norm", "rms_norm", "fixed_rms_norm", "none"):
        raise section.refuse("type", "'layer_norm', 'rms_norm', 'fixed_rms_norm' or 'none' was expected")
    around = around.inside(section)
    for part in {"layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}.get(kind, ()):
        yield around.parameter(f"{name}.{part}", section.of(part), (1, size, 1), (size,), decays=False)


def has_bias(layer: Section, default: bool) -> bool:
    """Say whether a linear layer has a bias: its own setting, else that of what it is in."""
    return layer.of("bias").flag("enabled", default)


def _attention(name: str, section: Section, around: _Around) -> Iterator[Parameter]:
    if section.word("type", "attention") != "attention":
        raise section.refuse("type", "this reader knows attention alone")
    around, hidden = around.inside(section), around.hidden
    heads, groups, size = section.size("heads", 8), section.size("head_groups", 1), section.size("head_size", 128)
    if heads % groups or (groups if groups > 1 else heads) % around.tp:
        raise section.refuse("heads", f"they cannot be split: {groups} head groups, {around.tp} tensor ranks")
    default, query, key, dense = section.flag("add_linear_biases", True), heads * size, groups * size, section.of("dense_layer")
    sections, shared = (1 if section.flag("shared_key_value", False) else 2), groups > 1

    yield from _linear(f"{name}.query", section.of("query_layer"), around, (1, query), default, is_split=True)
    yield from _linear(f"{name}.key_value", section.of("key_layer"), around, (sections, key), default, is_split=shared)
    for norm in ("query_norm", "key_norm", "value_norm"):
        yield from _norm(f"{name}.{norm}", section.optional(norm), around, size)
    around = around.inside(dense)
    yield around.parameter(f"{name}.dense.weight", dense.of("weight"), (hidden, query, 1), (hidden, query), is_split=True)
    if has_bias(dense, default):
        yield around.parameter(f"{name}.dense.bias", dense.of("bias"), (1, hidden, 1), (hidden,), decays=False)


def _linear(
    name: str, section: Section, around: _Around, rows: tuple[int, int], default_bias: bool, *, is_split: bool
) -> Iterator[Parameter]:
    """Go through a layer whose outputs are split: `rows[0]` sections of `rows[1]`, of which each tensor rank has a run."""
    around, n = around.inside(section), rows[0] * rows[1]
    weight, bias = section.of("weight"), section.of("bias")
    yield around.parameter(f"{name}.weight", weight, (*rows, around.hidden), (n, around.hidden), is_split=is_split)
    if has_bias(section, default_bias):
        yield around.parameter(f"{name}.bias", bias, (*rows, 1), (n,), is_split=is_split, decays=False)


def _mlp(name: str, section: Section, around: _Around) -> Iterator[Parameter]:
    kind = section.word("type", "mlp")
    if kind not in ("mlp", "moe"):
        raise section.refuse("type", "'mlp' or 'moe' was expected")
    around, hidden, width = around.inside(section), around.hidden, section.size("intermediate_size", 4096)
    experts = section.size("experts", 2) if kind == "moe" else 1
    default, second = section.flag("add_linear_biases", True), section.of("layer_2")
    if kind == "moe":
        for scale, n in (("router_scale", hidden), ("router_per_expert_scale", experts)):
            if section.of(scale).flag("enabled", False):
                yield around.parameter(f"{name}.{scale}", section.of(scale), (1, n, 1), (n,), decays=False)
    yield from _norm(f"{name}.pre_norm", section.optional("pre_norm"), around, hidden)
    yield from _norm(f"{name}.post_norm", section.optional("post_norm"), around, hidden)
    rows = (experts * (2 if section.flag("gated", False) else 1), width)
    yield from _linear(f"{name}.layer_1", section.of("layer_1"), around, rows, default, is_split=True)
    inner, shape = around.inside(second), (experts * width, hidden)
    yield inner.parameter(f"{name}.layer_2.weight", second.of("weight"), (experts, width, hidden), shape, is_split=True)
    if has_bias(second, default):
        yield inner.parameter(f"{name}.layer_2.bias", second.of("bias"), (1, hidden, 1), (hidden,), decays=False)
    if kind == "moe":
        router, n = section.of("router"), experts - section.size("shared_experts", 0, least=0)
        weight = around.inside(router).parameter(f"{name}.router.weight", router.of("weight"), (1, n, hidden), (n, hidden))
        yield weight
        yield from _norm(f"{name}.router_normalization", section.optional("router_normalization"), around, hidden)


# --- flat vectors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run: tensor ranks innermost, then data ranks, then pipeline ranks, or these two the other way round."""

    tp: int
    pp: int
    dp: int
    is_pipeline_first: bool = False

    @property
    def count(self) -> int:
        return self.tp * self.pp * self.dp

    def number(self, pipeline: int, data: Ints, tensor: Ints) -> Ints:
        """Return the ranks at these places."""
        outer = data * self.pp + pipeline if self.is_pipeline_first else pipeline * self.dp + data
        return outer * self.tp + tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Parameters of a stage that lie together, each tensor rank's part of them one after another."""

    stage: int
    is_frozen: bool
    parameters: tuple[Parameter, ...]
    begin: Ints
    """Where each begins, in elements; and where the last ends."""
    share: int
    """What each data rank holds of it, padding included, in elements."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What lies where: the groups of a model, and where each begins in the vectors of the pipeline ranks that hold it."""

    ranks: Ranks
    groups: tuple[Group, ...]
    at: Mapping[tuple[int, int], tuple[int, int]] = field(repr=False)
    """(group, pipeline rank) -> where it begins in weights and in moments; the rank that owns the stage before others."""
    sizes: Sequence[tuple[int, int]]
    """Per pipeline rank, how long its vectors are: weights, moments."""

    @property
    def order(self) -> list[list[str]]:
        """The names of each group's parameters, in order."""
        return [[p.name for p in group.parameters] for group in self.groups]


def layout_of(model: Model, ranks: Ranks, layers_per_stage: float, decay: str) -> Layout:
    """Say where everything lies."""
    stages = _stages(model, layers_per_stage)
    if len(stages) < ranks.pp:
        raise FormatError(
            f"the model has {len(stages)} stages of {layers_per_stage:g} layers, fewer than its {ranks.pp} pipeline ranks"
        )
    groups = []
    for i, layers in enumerate(stages):
        own = [p for layer in layers for p in layer.parameters if p.name not in model.ties]
        for is_frozen in (False, True):
            members = sorted((p for p in own if p.is_frozen is is_frozen), key=lambda p: p.key(decay))
            if members:
                begin = list(accumulate((p.held(ranks.tp) for p in members), initial=0))
                share = -(-begin[-1] // (ranks.dp * PAD_TO)) * PAD_TO
                groups.append(Group(i, is_frozen, tuple(members), np.asarray(begin, np.int64), share))
    at: dict[tuple[int, int], tuple[int, int]] = {}
    sizes = []
    holders = _holders(model, stages, ranks.pp)
    for pipeline in range(ranks.pp):
        weights = moments = 0
        for g, group in enumerate(groups):
            if pipeline in holders[group.stage]:
                at[g, pipeline] = weights, moments
                weights += group.share
                moments += 0 if group.is_frozen else group.share
        sizes.append((weights, moments))
    owner_first = sorted(at, key=lambda place: (place[0], holders[groups[place[0]].stage].index(place[1])))
    return Layout(ranks, tuple(groups), {place: at[place] for place in owner_first}, sizes)


def _stages(model: Model, layers_per_stage: float) -> list[list[Layer]]:
    """Deal layers into stages, each closed as soon as it is full."""
    stages: list[list[Layer]] = [[]]
    count = 0.0
    for layer in model.layers:
        if stages[-1] and count >= layers_per_stage:
            stages.append([])
            count = 0.0
        stages[-1].append(layer)
        count += layer.count
    return stages


def _holders(model: Model, stages: Sequence[Sequence[Layer]], pp: int) -> list[list[int]]:
    """Return the pipeline ranks that hold each stage: its owner, then those with a stage that uses a tied weight of it."""
    stage_of = {p.name: i for i, layers in enumerate(stages) for layer in layers for p in layer.parameters}
    holders = [[i % pp] for i in range(len(stages))]
    for alias, main in model.ties.items():
        user = stage_of[alias] % pp
        if user not in holders[stage_of[main]]:
            holders[stage_of[main]].append(user)
    return holders
