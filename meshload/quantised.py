"""A quantised weight is packed values with scales and zeros beside them; this module gives them lines in a model's table.

Which of a method's arrays there are is read from the stored names and dtypes. Their patterns follow from the weight's: a scale has
a dim that counts blocks of the weight's dim, so that a layout cuts both alike, or planning says why it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .array import Array
from .errors import LayoutError
from .expression import evaluate
from .pattern import Line, Product, labelled, parse


@dataclass(frozen=True, slots=True)
class Method:
    """One text of the `quantised` tables."""

    names: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, str, str | None], ...]
    """(suffix, pattern in `out` and `in`, condition)."""
    refusals: tuple[tuple[str, str | None], ...]
    """(reason, condition)."""


def parse_method(text: str) -> Method:
    """Read one text: `method NAMES [refused REASON]`, `number := expression`, `suffix pattern [if condition]`, `refused REASON`."""
    names: tuple[str, ...] = ()
    numbers: list[tuple[str, str]] = []
    rows: list[tuple[str, str, str | None]] = []
    refusals: list[tuple[str, str | None]] = []
    for raw in text.splitlines():
        line, _, condition = raw.strip().partition(" if ")
        words = line.split()
        if not words:
            continue
        if words[0] == "method":
            head, _, reason = line.partition(" refused ")
            names = tuple(head.split()[1:])
            if reason:
                refusals.append((reason.strip(), None))
        elif words[0] == "refused":
            refusals.append((line.split(None, 1)[1].strip(), condition.strip() or None))
        elif len(words) > 1 and words[1] == ":=":
            numbers.append((words[0], raw.split(":=", 1)[1].strip()))
        else:
            rows.append((words[0], " ".join(words[1:]), condition.strip() or None))
    return Method(names, tuple(numbers), tuple(rows), tuple(refusals))


def with_companions(
    lines: Sequence[Line],
    indices: Mapping[str, Sequence[tuple[int, ...]]],
    methods: Sequence[Method],
    quantisation: Mapping[str, Any],
    arrays: Mapping[str, Array],
) -> tuple[Line, ...]:
    """Return a table's lines with those of the quantised arrays that are stored; `indices` are where the model has each line."""
    name = quantisation.get("quant_method")
    method = next((m for m in methods if name in m.names), None)
    if method is None:
        raise LayoutError(f"quantization_config: quant_method {name!r} is not known; give layout='replicated' or name patterns")
    blocks_of(quantisation)
    values = _numbers(method, quantisation)
    found: list[Line] = []
    for line in lines:
        found += _with_companions(line, indices.get(line.name, ()), method, values, arrays)
    for reason, condition in method.refusals:
        if len(found) != len(lines) and (condition is None or evaluate(condition, values)):
            raise LayoutError(f"quantization_config: {name} cannot be cut: {reason}; give layout='replicated'")
    return tuple(found)


def _numbers(method: Method, quantisation: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(quantisation)
    for number, text in method.numbers:
        values[number] = evaluate(text, values)
    return values


def _with_companions(
    line: Line, indices: Sequence[tuple[int, ...]], method: Method, values: Mapping[str, Any], arrays: Mapping[str, Array]
) -> list[Line]:
    if not line.name.endswith(".weight") or line.pattern.ndim != 2 or len(line.parts) == 0:
        return [line]
    base = line.name.removesuffix("weight")
    stored = {suffix: _stored(base + suffix, line, indices, arrays) for suffix, _, _ in method.rows}
    companions = [suffix for suffix in stored if suffix != "weight" and stored[suffix]]
    if not companions:
        return [line]
    plain = stored.get("weight") or _stored(line.name, line, indices, arrays)
    packed = {i for i in indices if i not in plain}
    found = [replace(line, only=frozenset(plain))]
    for suffix, pattern, condition in method.rows:
        if suffix == "weight" or not stored[suffix] or not (condition is None or evaluate(condition, values)):
            continue
        needed = packed if packed else {i for i, a in plain.items() if a.dtype.itemsize == 1}
        rank = {a.ndim for a in stored[suffix].values()}
        made = beside(line, suffix, pattern or ("one" if rank == {1} else ""), values, label=suffix)
        only, complete = frozenset(needed | set(stored[suffix])), needed <= set(stored[suffix])
        optional = not complete and suffix in ("input_scale", "activation_scale", "input_scale_ub", "weight_scale")
        found.append(replace(made, only=only, optional=optional))  # of a scale that no weight needs, some may be absent
    return found


def beside(line: Line, suffix: str, template: str, values: Mapping[str, Any], *, label: str, transposed: bool = False) -> Line:
    """Return the line of what has another suffix than `weight` in its name; its pattern is the template with the weight's dims.

    Where those name parts, there are as many, each with the label behind its name; else one that belongs to all.
    """
    pattern = parse(_pattern(line, template, values, transposed))
    parts = tuple(f"{part}.{label}" for part in pattern.parts()) or (f"{'+'.join(line.parts)}.{label}",)
    return Line(parts, line.name.removesuffix("weight") + suffix, labelled(pattern, f".{label}"), line.where)


def _pattern(line: Line, template: str, values: Mapping[str, Any], transposed: bool) -> str:
    """Write a pattern with the weight's own dims in place of `out` and `in`."""
    for number in re.findall(r"\{(\w+)\}", template):
        if type(values[number]) is not int or not 0 < values[number] < 1 << 40:
            raise LayoutError(f"quantization_config: {number} is {values[number]!r}, a size was expected")
    numbered = re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), template)
    sides = dict(zip(("in", "out") if transposed else ("out", "in"), line.pattern.dims, strict=True))

    def side(match: re.Match[str]) -> str:
        product = sides[match[1]]
        if line.pattern.parts() and match[2] and _has_sum(product):
            raise LayoutError(f"{line.name}: blocks over the fused dim {product} cannot be cut; give layout='replicated'")
        return f"{product if str(product).startswith('(') or not match[2] else f'({product})'}{match[2]}"

    return re.sub(r"\b(out|in)\b((?://?\d+@?)?)", side, numbered)


def _has_sum(product: Product) -> bool:
    return "+" in str(product)


def _stored(
    template: str, line: Line, indices: Sequence[tuple[int, ...]], arrays: Mapping[str, Array]
) -> dict[tuple[int, ...], Array]:
    found = {}
    for index in indices:
        name = template.format(**dict(zip(line.counted, index, strict=True)))
        if name in arrays:
            found[index] = arrays[name]
    return found


def blocks_of(quantisation: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the block's sizes per dim, None where scales are not by block."""
    blocks = quantisation.get("weight_block_size")
    if not blocks:
        return None
    if not isinstance(blocks, (list, tuple)) or len(blocks) != 2 or not all(type(n) is int and 0 < n < 1 << 40 for n in blocks):
        raise LayoutError(f"quantization_config: weight_block_size is {blocks!r}, two sizes were expected")
    return blocks
