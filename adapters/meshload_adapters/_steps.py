"""How many steps an optimizer's moments are of, as the checkpoints of different formats tell it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing

MOST = 1 << 53
"""No optimizer takes as many steps; a float64 counts no further."""


def checked_step(step: Any) -> Any:
    """Return a count of steps that a stranger's file or a caller tells, or None; what is no count raises."""
    if step is None or (isinstance(step, (int, float, np.number)) and 0 <= step < MOST):
        return step
    shown = f"an integer of {step.bit_length()} bits" if isinstance(step, int) and step.bit_length() > 99 else repr(step)[:100]
    raise LayoutError(f"optimizer: the step of its moments is {shown}, a count below 2**53 was expected; say it with step=")


def told_step(like: Checkpoint) -> int | None:
    """Return the step of all moments; None where none is told, and an error where weights are of different ones.

    Read are `meta["optimizer"]["step"]` and `meta["steps"]`, by group or weight; and what Fast-LLM and Megatron keep.
    """
    found = sorted({int(n) for n in _told(like.meta)})
    if len(found) > 1:
        raise LayoutError(f"optimizer: its weights are of different steps, {listing(map(str, found), 3)}; one for all was expected")
    return found[0] if found else None


def steps_of(like: Checkpoint, names: Iterable[str]) -> dict[str, float] | None:
    """Return the step of each weight's moments; None where that is not told."""
    stripped = _mapping(like.meta.get("stripped"))
    told = {stripped.get(name, name): count for name, count in _mapping(like.meta.get("steps")).items()}
    wanted = list(names)
    counts = {name: count for name in wanted if (count := next(_numbers(told.get(name)), None)) is not None}
    if len(counts) == len(wanted):
        return counts
    one = told_step(like)
    return None if one is None else dict.fromkeys(wanted, float(one))


def _told(meta: Mapping[str, Any]) -> Iterator[int | float]:
    optimizer, own, steps = (_mapping(meta.get(key)) for key in ("optimizer", "metadata", "steps"))
    yield from _numbers(optimizer.get("step"))
    yield from _numbers(_mapping(own.get("optimizer")).get("current_step"))
    yield from _numbers(steps)


def _numbers(found: Any) -> Iterator[int | float]:
    """Go through numbers, those in a mapping, and those that are stored as arrays of no dims."""
    for one in found.values() if isinstance(found, Mapping) else [found]:
        number = np.asarray(one).item() if isinstance(one, Array) and not one.shape else one
        if type(number) in (int, float):
            yield checked_step(number)


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
