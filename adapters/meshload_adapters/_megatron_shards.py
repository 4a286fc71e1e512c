"""How Megatron cuts its arrays over tensor- and expert-parallel ranks, by the names of its modules, and how they join again.

A rank's `linear_fc1` of a gated MLP is its gate over its up; the joined one is all gate over all up. `linear_qkv` is cut between
rows, so its shards follow one another. With more ranks than kv heads that holds as well: nothing is repeated in the files.

Names come out as those of the local layer spec: Transformer Engine keeps a norm in the linear that follows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.array import Array
from meshload.box import Shape
from meshload.pieces import Pieces, repeated, table, union

WHOLE, ROWS, COLUMNS, GATED, QKV, UNKNOWN = "whole", "rows", "columns", "gated", "qkv", "unknown"
"""What a rank has of an array: all of it, a part of dim 0 or of dim 1, both halves' parts, or what no rule says."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter's name, taken apart."""

    stem: str
    """The full model's name, with `{layer}` and `{expert}` for the numbers that count from 0 on each rank."""
    layer: int | None
    expert: int | None
    cut: str
    is_expert: bool
    """Whether it is cut over expert-parallel ranks."""

    def whole(self, layers: int, experts: int) -> str:
        """Return the name in the full model, given how many layers and experts come before those of the rank."""
        return self.stem.format(layer=(self.layer or 0) + layers, expert=(self.expert or 0) + experts)


_NORMS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"), r".\1_layernorm.\2"),
    (re.compile(r"\.eh_proj\.layer_norm_(weight|bias)$"), r".eh_norm.\1"),
)

_EXPERTS = (
    re.compile(r"\.mlp\.experts\.(?:local_)?experts\.(?P<expert>\d+)\.(?P<rest>linear_fc[12]\..+)$"),
    re.compile(r"\.mlp\.experts\.(?P<rest>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)$"),
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

_ROWS = {
    "word_embeddings",
    "output_layer",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_q",
    "linear_kv",
    "eh_proj",
}

_COLUMNS = {"linear_proj", "linear_fc2"}

_WHOLE = {
    *("router", "position_embeddings", "tokentype_embeddings", "linear_q_down_proj", "linear_kv_down_proj"),
    *("fc1_latent_proj", "fc2_latent_proj"),
}


@lru_cache(maxsize=1 << 16)
def taken_apart(name: str) -> Name:
    """Return the parts of a parameter's name, in either layer spec.

    >>> taken_apart("decoder.layers.3.mlp.linear_fc1.layer_norm_weight").whole(8, 0)
    'decoder.layers.11.pre_mlp_layernorm.weight'
    """
    text = name.replace("{", "{{").replace("}", "}}")
    for spelling, ours in _NORMS:
        text = spelling.sub(ours, text)
    expert: int | None = None
    for pattern in _EXPERTS:
        match = pattern.search(text)
        if match:
            expert = int(match["expert"])
            text = f"{text[: match.start()]}.mlp.experts.local_experts.{{expert}}.{match['rest']}"
    layer = _LAYER.match(text)
    if layer:
        text = f"decoder.layers.{{layer}}.{text[layer.end() :]}"
    return Name(text, int(layer[1]) if layer else None, expert, _cut_of(text), ".mlp.experts." in text)


def _cut_of(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    module = module.rpartition(".")[2]
    if parameter == "softmax_offset" or (module in _ROWS and parameter in ("weight", "bias")):
        return ROWS
    if module in _COLUMNS and parameter in ("weight", "bias"):
        return COLUMNS if parameter == "weight" else WHOLE
    if module in ("linear_qkv", "linear_fc1") and parameter in ("weight", "bias"):
        return QKV if module == "linear_qkv" else GATED
    if module in _WHOLE or module.endswith(("layernorm", "norm")) or parameter == "gate_weight":
        return WHOLE
    return UNKNOWN


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank stores of an array: a tensor somewhere in a file."""

    source: int
    offset: int
    shape: Shape
    strides: Shape
    """In bytes, as is `offset`."""
    dtype: np.dtype[Any]


def grouped(name: str, shard: Shard, count: int) -> list[tuple[str, Shard]] | None:
    """Return the single experts of a `GroupedMLP`, which keeps those of a rank in one transposed array; None for another array."""
    stem, _, last = name.rpartition(".")
    if last not in ("weight1", "weight2") or not stem.endswith(".mlp.experts") or len(shard.shape) != 2:
        return None
    rows, columns = shard.shape
    if (columns if last == "weight1" else rows) % count or count > 1 << 16:
        return None
    inputs, outputs = (rows, columns // count) if last == "weight1" else (rows // count, columns)
    width = shard.dtype.itemsize
    linear = "linear_fc1" if last == "weight1" else "linear_fc2"
    return [
        (
            f"{stem}.local_experts.{k}.{linear}.weight",
            Shard(
                shard.source, shard.offset + k * inputs * outputs * width, (outputs, inputs), (width, outputs * width), shard.dtype
            ),
        )
        for k in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How ranks lay out what they fuse."""

    gated: bool | None
    """Whether `linear_fc1` is gate over up; None where that is not known."""
    interleave: int = 0
    """Rows of gate and of up in turns in the experts' `linear_fc1`, or in all where there are no experts; 0: gate over up."""
    heads: tuple[int, int, int] | None = None
    """The whole model's heads, kv heads and head size, where `linear_qkv` is not in groups."""
    order: str = "grouped"
    """`grouped`: per kv head its queries, key, value. `concatenated`: a rank's queries, keys, values. `trailing`: q, k, v of an
    element side by side."""


Row = tuple[int, int, Shape, Shape, Shape]
"""Source, byte offset, start, shape, strides."""


def rows_of(shard: Shard, cut: str, at: int, count: int, fusion: Fusion) -> tuple[Shape, Iterator[Row]]:
    """Return the whole shape of an array of which rank `at` of `count` has a shard, and where the shard's elements go."""
    shape = shard.shape
    if cut == WHOLE:
        return shape, iter(((shard.source, shard.offset, (0,) * len(shape), shape, shard.strides),))
    if cut == COLUMNS:
        return (shape[0], shape[1] * count), iter(((shard.source, shard.offset, (0, at * shape[1]), shape, shard.strides),))
    whole = (shape[0] * count, *shape[1:])
    if cut == GATED and fusion.interleave:
        return whole, _taken(shard, _interleaved(shape[0], at, count, fusion.interleave))
    if cut == GATED and count > 1:
        half = shape[0] // 2
        return whole, _taken(shard, ((0, 1, at * half, half), (half, 1, (count + at) * half, half)))
    if cut == QKV and fusion.order != "grouped":
        return whole, _taken(shard, _regrouped(at, count, fusion))
    start = (at * shape[0], *(0,) * (len(shape) - 1))
    return whole, iter(((shard.source, shard.offset, start, shape, shard.strides),))


_Run = tuple[int, int, int, int]
"""First row in the shard, step between rows there, first row in the whole array, number of rows."""


def _taken(shard: Shard, runs: Sequence[_Run] | Iterator[_Run]) -> Iterator[Row]:
    rest = shard.shape[1:]
    for first, step, to, n in runs:
        strides = (shard.strides[0] * step, *shard.strides[1:])
        yield shard.source, shard.offset + first * shard.strides[0], (to, *(0,) * len(rest)), (n, *rest), strides


def _interleaved(rows: int, at: int, count: int, block: int) -> Iterator[_Run]:
    half = rows // 2
    for i in range(half // block):
        yield 2 * i * block, 1, at * half + i * block, block
        yield (2 * i + 1) * block, 1, (count + at) * half + i * block, block


def _regrouped(at: int, count: int, fusion: Fusion) -> Iterator[_Run]:
    heads, kv, d = fusion.heads or (0, 0, 0)
    heads, kv = heads // count, kv // count
    group = heads // kv
    for g in range(kv):
        to = (at * kv + g) * (group + 2) * d
        if fusion.order == "concatenated":
            yield g * group * d, 1, to, group * d
            yield (heads + g) * d, 1, to + group * d, d
            yield (heads + kv + g) * d, 1, to + (group + 1) * d, d
        else:
            for i in range(3):
                yield 3 * g * d + i, 3, to + i * d, d


def misfit(shard: Shard, cut: str, count: int, fusion: Fusion) -> str:
    """Say why a shard cannot be one that its name tells; nothing where it can."""
    shape = shard.shape
    if cut == COLUMNS and len(shape) != 2:
        return f"a shard has shape {shape}, 2 dims were expected"
    if cut in (ROWS, GATED, QKV) and not shape:
        return "a shard has no dims, rows were expected"
    if cut == UNKNOWN and count > 1:
        return "how tensor-parallel ranks share it is not known; its module is none that this format knows"
    if cut == GATED and fusion.gated is None and count > 1:
        return "whether it is a gate over an up projection is not in args (swiglu); open it with the format's option gated="
    if cut == GATED and count > 1 and shape[0] % 2:
        return f"a rank has {shape[0]} rows of gate over up, which are no two halves"
    if cut == GATED and fusion.interleave and shape[0] % (2 * fusion.interleave):
        return f"a rank has {shape[0]} rows, no multiple of 2 x {fusion.interleave} of gate and up in turns"
    if cut == QKV and fusion.order != "grouped":
        if fusion.heads is None:
            return "the order of its rows needs num_attention_heads and kv_channels, which args do not say"
        heads, kv, d = fusion.heads
        if heads % count or kv % count or heads % kv or (fusion.order == "trailing" and heads != kv):
            return f"{heads} heads in {kv} groups over {count} ranks are no whole groups, which its row order needs"
        if shape[0] != (heads + 2 * kv) // count * d:
            return f"a rank has {shape[0]} rows, its heads give {(heads + 2 * kv) // count * d}"
    return ""


# --- joining ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    whole: Shape
    dtype: np.dtype[Any]
    columns: tuple[list[int], list[int], list[Shape], list[Shape], list[Shape]] = field(
        default_factory=lambda: ([], [], [], [], [])
    )


@dataclass(slots=True)
class Joined:
    """Arrays while their shards are collected: rows of one box are copies, the first one first."""

    sources: tuple[Any, ...]
    rows: dict[str, _Rows] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, shard: Shard, cut: str, at: int, count: int, fusion: Fusion) -> None:
        """Add what rank `at` of `count` has of an array; what does not fit makes it unavailable."""
        if cut == GATED and not fusion.gated:
            cut = ROWS if fusion.gated is False or count == 1 else GATED
        why = misfit(shard, cut, count, fusion)
        if why:
            self.unavailable.setdefault(name, why)
            return
        whole, rows = rows_of(shard, cut, at, count, fusion) if cut != UNKNOWN else rows_of(shard, WHOLE, at, count, fusion)
        held = self.rows.get(name)
        if held is None:
            held = self.rows[name] = _Rows(whole, shard.dtype)
        elif (held.whole, held.dtype) != (whole, shard.dtype):
            self.unavailable.setdefault(
                name, f"ranks disagree: {held.dtype.name} {held.whole} in one file, {shard.dtype.name} {whole} in another"
            )
            return
        source, offset, start, shape, strides = held.columns
        for row in rows:
            source.append(row[0])
            offset.append(row[1])
            start.append(row[2])
            shape.append(row[3])
            strides.append(row[4])

    def arrays(self) -> dict[str, Array]:
        """Return the arrays whose shards fit together."""
        return {
            name: Array(name, rows.dtype, rows.whole, table(self.sources, *rows.columns))
            for name, rows in self.rows.items()
            if name not in self.unavailable
        }


def misgated(arrays: Mapping[str, Array], gated: bool) -> dict[str, str]:
    """Return the `linear_fc1` whose rows are not those that `linear_fc2` and its being gated give, with the numbers."""
    found = {}
    for name, array in arrays.items():
        if name.endswith(".linear_fc1.weight"):
            other = arrays.get(name.replace(".linear_fc1.", ".linear_fc2."))
            expected = other.shape[-1] * (2 if gated else 1) if other is not None else array.shape[0]
            if array.shape[0] != expected:
                what = "a gate over an up projection" if gated else "no gate"
                found[name] = f"it has {array.shape[0]} rows; linear_fc2 and args (swiglu: {what}) give {expected}"
    return found


def uncovered(array: Array) -> bool:
    """Say whether elements of an array are stored nowhere: its different boxes, none of which overlap, do not add up."""
    boxes = np.unique(np.concatenate([array.pieces.start, array.pieces.shape], axis=1), axis=0)
    held = boxes[:, array.ndim :].prod(axis=1, dtype=np.int64).sum() if len(boxes) else 0
    return int(held) < array.size


def parameters(names: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters among those of a state dict, in their order: buffers are left out."""
    return [n for n in names if not n.endswith((".expert_bias", ".inv_freq", ".local_tokens_per_expert", "_extra_state"))]


# --- joining what lies in flat buffers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter in a rank's flat buffer: which array it is a part of, and which."""

    name: str
    cut: str
    at: int
    count: int
    shape: Shape
    """On the rank; reversed where it is `transposed`, as `GroupedMLP` keeps experts."""
    transposed: bool = False


def join_runs(parts: Sequence[Part], runs: Pieces, dtype: np.dtype[Any], fusion: Fusion) -> dict[str, Array]:
    """Join runs of elements to arrays. `runs` has two dims: the part's number, with extent 1, and the element in the part.

    There may be 100,000 parts, so those that are cut alike are laid out together. Of copies the first is kept: boundaries of
    data-parallel ranks cut each in another place.
    """
    first: dict[tuple[str, int], int] = {}
    numbers = [first.setdefault((p.name, 0 if p.cut == WHOLE else p.at), n) for n, p in enumerate(parts)]
    is_copy = np.asarray(numbers, np.int64) != np.arange(len(parts))
    runs = runs.take(~is_copy[runs.start[:, 0]])
    alike: dict[tuple[Any, ...], int] = {}
    kinds = [alike.setdefault((p.cut, p.count, p.shape, p.transposed), len(alike)) for p in parts]
    kind_of, at_of = np.asarray(kinds, np.int64), np.asarray([p.at for p in parts], np.int64)
    kind_of_row = kind_of[runs.start[:, 0]]
    wholes: dict[int, Shape] = {}
    by_ndim: dict[int, list[Pieces]] = {}
    for (cut, count, shape, transposed), kind in alike.items():
        pieces = runs.take(kind_of_row == kind).split(1, shape)
        if transposed:
            pieces, shape = pieces.transpose([0, *range(pieces.ndim - 1, 0, -1)]), tuple(reversed(shape))
        wholes[kind], laid = _laid(pieces, cut, count, shape, at_of, fusion)
        by_ndim.setdefault(pieces.ndim, []).append(laid)
    number: dict[str, int] = {}
    name_of = np.asarray([number.setdefault(p.name, len(number)) for p in parts], np.int64)
    shape_of = {p.name: wholes[kind] for p, kind in zip(parts, kinds, strict=True)}
    found: dict[str, Array] = {}
    for tables in by_ndim.values():
        pieces = union(tables)
        names = name_of[pieces.start[:, 0]]
        order = np.lexsort((pieces.start[:, 0], names))
        bounds = np.searchsorted(names[order], np.arange(len(number) + 1)).tolist()
        pieces = pieces.take(order)
        pieces = Pieces(
            pieces.sources, pieces.source, pieces.offset, pieces.start[:, 1:], pieces.shape[:, 1:], pieces.strides[:, 1:]
        )
        for name, n in number.items():
            if bounds[n] < bounds[n + 1]:
                found[name] = Array(name, dtype, shape_of[name], pieces.take(slice(bounds[n], bounds[n + 1])))
    return {name: found[name] for name in number if name in found}


def _laid(pieces: Pieces, cut: str, count: int, shape: Shape, at_of: NDArray[np.int64], fusion: Fusion) -> tuple[Shape, Pieces]:
    """Return the whole shape, and pieces of shards moved to where they are in it."""

    def moved(some: Pieces, dim: int, step: int, first: int = 0) -> Pieces:
        start = some.start.copy()
        start[:, 1 + dim] += first + at_of[some.start[:, 0]] * step
        return Pieces(some.sources, some.source, some.offset, start, some.shape, some.strides)

    if cut == WHOLE:
        return shape, pieces
    if cut == COLUMNS:
        return (shape[0], shape[1] * count), moved(pieces, 1, shape[1])
    whole = (shape[0] * count, *shape[1:])
    if cut == GATED and fusion.gated and count > 1:
        half = shape[0] // 2
        halves = (pieces.narrow(1, i * half, (i + 1) * half) for i in range(2))
        return whole, union([moved(h, 0, half, i * count * half) for i, h in enumerate(halves)])
    return whole, moved(pieces, 0, shape[0])


def cut_runs(pieces: Pieces, starts: Sequence[int], sizes: Sequence[int], numbers: Sequence[int], itemsize: int) -> Pieces:
    """Cut the rows of a flat buffer at its parameters: rows of two dims, the parameter's number, and the element in it.

    `starts` ascend. Elements between parameters are left out.
    """
    low, high = np.asarray(starts, np.int64), np.asarray(starts, np.int64) + np.asarray(sizes, np.int64)
    begin, end = pieces.start[:, 0], pieces.stop[:, 0]
    one, last = np.searchsorted(high, begin, side="right"), np.searchsorted(low, end, side="left")
    counts = np.maximum(last - one, 0)
    rows, which = repeated(counts)
    which = which + one[rows]
    start, stop = np.maximum(begin[rows], low[which]), np.minimum(end[rows], high[which])
    return table(
        pieces.sources,
        pieces.source[rows],
        pieces.offset[rows] + (start - begin[rows]) * pieces.strides[rows, 0],
        np.stack([np.asarray(numbers, np.int64)[which], start - low[which]], axis=1),
        np.stack([np.ones_like(which), stop - start], axis=1),
        np.stack([np.zeros_like(which), np.full_like(which, itemsize)], axis=1),
    )
