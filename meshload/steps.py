"""How many steps an optimizer's moments are of, as the checkpoints of different formats tell it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .array import Array
from .checkpoint import Checkpoint
from .errors import LayoutError, listing

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

    Formats tell it as `meta["optimizer"]["step"]`, one number or by group or weight, or as `meta["steps"]`, by weight.
    """
    found = sorted({int(n) for n in _told(like.meta)})
    if len(found) > 1:
        raise LayoutError(f"optimizer: its weights are of different steps, {listing(map(str, found), 3)}; one for all was expected")
    return found[0] if found else None


def steps_of(like: Checkpoint, names: Iterable[str]) -> dict[str, float] | None:
    """Return the step of each weight's moments; None where that is not told."""
    told = _by_weight(like)
    wanted = list(names)
    if all(name in told for name in wanted):
        return {name: told[name] for name in wanted}
    one = told_step(like)
    return None if one is None else dict.fromkeys(wanted, float(one))


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, str]]:
    """Go through the steps that two optimizers tell otherwise, by the names of weights that both tell of, else of all in one."""
    by_weight, by_others = _by_weight(one), _by_weight(other)
    both = [name for name in by_weight if name in by_others]
    for name in both:
        if by_weight[name] != by_others[name]:
            yield f"optimizer.step.{name}", f"its steps are {by_weight[name]:g} and {by_others[name]:g}"
    steps, others = (sorted({*_told(c.meta)}) for c in (one, other))
    if not both and steps and others and steps != others:
        said = (listing((f"{n:g}" for n in found), 3) for found in (steps, others))
        yield "optimizer.step", f"its steps are {' and '.join(said)}"


def _by_weight(like: Checkpoint) -> dict[str, float]:
    stripped = _mapping(like.meta.get("stripped"))
    told = {**_mapping(_mapping(like.meta.get("optimizer")).get("step")), **_mapping(like.meta.get("steps"))}
    return {stripped.get(name, name): n for name, count in told.items() if isinstance(name, str) for n in _numbers(count)}


def _told(meta: Mapping[str, Any]) -> Iterator[int | float]:
    yield from _numbers(_mapping(meta.get("optimizer")).get("step"))
    yield from _numbers(_mapping(meta.get("steps")))


def _numbers(found: Any) -> Iterator[int | float]:
    """Go through numbers, those in a mapping, and those that are stored as arrays of no dims."""
    for one in found.values() if isinstance(found, Mapping) else [found]:
        number = np.asarray(one).item() if isinstance(one, Array) and not one.shape else one
        if type(number) in (int, float):
            yield checked_step(number)


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
