"""The buffers of Megatron's distributed optimizer: which parameter lies where, as no file tells.

A model chunk's parameters of one dtype lie in a flat buffer in the reverse of their module order, experts' in one of their own.
Each begins at a multiple of 64 elements (before megatron-core 0.6: anywhere). The buffer is cut into buckets: one that has `limit`
elements is closed, and an embedding that two stages share has one alone. Each bucket begins at a multiple of 128; files leave out
the padding before it. https://github.com/NVIDIA/Megatron-LM, `megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNED = 64
"""Elements."""


class Refused(Exception):
    """An optimizer's states cannot be told apart, for the reason given."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of parameters: their numbers, and where each begins in it, in elements."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    """Elements, without the padding at its end."""


def buckets(
    sizes: Sequence[int], *, limit: int | None = None, alone: Collection[int] = (), alignment: int = ALIGNED
) -> list[Bucket]:
    """Lay parameters of these sizes, given in module order, into buckets.

    >>> buckets([3, 64, 5])
    [Bucket(numbers=(2, 1, 0), starts=(0, 64, 128), size=131)]
    """
    found: list[Bucket] = []
    numbers: list[int] = []
    starts: list[int] = []
    at = 0

    def close() -> None:
        nonlocal at
        found.append(Bucket(tuple(numbers), tuple(starts), at))
        numbers.clear()
        starts.clear()
        at = 0

    for number in reversed(range(len(sizes))):
        at = -(-at // alignment) * alignment
        if number in alone and numbers:
            close()
        numbers.append(number)
        starts.append(at)
        at += sizes[number]
        if number in alone or (limit is not None and at >= limit):
            close()
    if numbers:
        close()
    return found


def laid_out(
    sizes: Sequence[int],
    stored: Sequence[int],
    *,
    limit: int | None,
    alone: Collection[int],
    coalesced: bool,
    replicas: int | None = None,
) -> list[Bucket] | None:
    """Return the buckets that hold as many elements as are stored, as some version laid them; None where none or several fit.

    `stored` is the length of each bucket, perhaps padded for so many `replicas`; or, where they are `coalesced`, of all together.
    Then layouts that put a parameter elsewhere differ in their sum, since each gap is there or not.
    """
    multiples = {1} if replicas is None else {1, replicas, math.lcm(replicas, 128)}
    fitting: dict[Any, list[Bucket]] = {}
    for made in _candidates(sizes, limit, alone):
        found = [b.size for b in made]
        if coalesced and sum(found) == stored[0]:
            before = itertools.accumulate(found, initial=0)
            fitting.setdefault(
                tuple(
                    (n, base + at) for b, base in zip(made, before, strict=False) for n, at in zip(b.numbers, b.starts, strict=True)
                ),
                made,
            )
        elif not coalesced and any([-(-n // multiple) * multiple for n in found] == list(stored) for multiple in multiples):
            fitting.setdefault(tuple(made), made)
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def _candidates(sizes: Sequence[int], limit: int | None, alone: Collection[int]) -> Iterator[list[Bucket]]:
    yield buckets(sizes, limit=limit, alone=alone)
    yield buckets(sizes, alone=alone)
    yield buckets(sizes, limit=limit)
    yield buckets(sizes)
    yield buckets(sizes, limit=limit, alignment=1)
    yield buckets(sizes, alignment=1)


# --- module order -----------------------------------------------------------------------------------------------------

_MODULES = (
    *("input_layernorm", "self_attention", "core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm"),
    *("pre_mlp_layernorm", "mlp", "router", "experts", "local_experts", "shared_experts", "linear_fc1", "linear_fc2"),
)
"""The modules of a layer in the order in which they are made; one inside another does not matter."""

_PARAMETERS = ("softmax_offset", "gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias")


def module_order(names: Iterable[str]) -> list[str] | None:
    """Return the names of a stage's parameters as `named_parameters()` goes through them; None where one is not known.

    The names are those that its layer spec has: a norm is where the spec puts it.
    """
    keyed = []
    for name in names:
        key = _key(name)
        if key is None:
            return None
        keyed.append((key, name))
    return [name for _, name in sorted(keyed)]


def _key(name: str) -> tuple[tuple[int, int], ...] | None:
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        ends = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "decoder.final_layernorm.weight")
        places = dict(zip((*ends, "decoder.final_layernorm.bias", "output_layer.weight"), (0, 1, 3, 4, 5), strict=True))
        return ((places[name], 0),) if name in places else None
    key = [(2, int(match[1]))]
    *modules, parameter = match[2].split(".")
    for module in modules:
        if module.isdigit():
            key.append((int(module), 0))
        elif module in _MODULES:
            key.append((_MODULES.index(module), 0))
        else:
            return None
    kind, count = parameter, 0
    if numbered := re.fullmatch(r"weight(\d+)", parameter):
        kind, count = "weight", int(numbered[1])
    if kind not in _PARAMETERS:
        return None
    return (*key, (_PARAMETERS.index(kind) - len(_PARAMETERS), count))  # a module's own come before those of its modules


def spelled_by(implementation: str, names: Iterable[str], *, is_grouped: bool, is_legacy_grouped: bool) -> dict[str, str] | None:
    """Return the names that a stage's parameters have in the layer spec that was run, to the names that they have here.

    Experts that lie in one array, `GroupedMLP`, come as `...experts.weight1` to the `linear_fc1` of expert 0. None where the
    spec is not known.
    """
    there = list(names)
    if implementation == "local":
        fused, grouping = False, "arrays" if is_grouped else ""
    elif implementation == "transformer_engine":
        fused, grouping = True, ("arrays" if is_legacy_grouped else "numbers") if is_grouped else ""
    else:
        return None
    sparse = {match[1] for n in there if (match := re.match(r"(decoder\.layers\.\d+\.)mlp\.router\.", n))}
    found: dict[str, str] = {}
    for name in there:
        text = name
        layer = re.match(r"decoder\.layers\.\d+\.", name)
        if fused and layer:
            text = re.sub(r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1", text)
            if layer[0] not in sparse:
                text = re.sub(r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1", text)
        expert = re.fullmatch(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)", text)
        if expert and grouping == "numbers":
            if expert[4] == "bias":
                return None  # whether they lie among the weights or behind them differs between versions
            text = f"{expert[1]}linear_fc{expert[3]}.weight{expert[2]}"
        elif expert and grouping == "arrays":
            if expert[4] == "bias":
                return None
            if expert[2] != "0":
                continue
            text = f"{expert[1]}weight{expert[3]}"
        found[text] = name
    return found
