"""How many steps an optimizer's moments are of, as the checkpoints of different formats tell it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing


def told_step(like: Checkpoint) -> int | None:
    """Return the step of all moments; None where none is told, and an error where weights are of different ones.

    Read are `meta["optimizer"]["step"]` and `meta["steps"]`, by group or weight; and what Fast-LLM and Megatron keep.
    """
    found = sorted({int(n) for n in _told(like.meta)})
    if len(found) > 1:
        raise LayoutError(f"optimizer: its weights are of different steps, {listing(map(str, found), 3)}; one for all was expected")
    return found[0] if found else None


def _told(meta: Mapping[str, Any]) -> Iterator[int | float]:
    optimizer, own, steps = (_mapping(meta.get(key)) for key in ("optimizer", "metadata", "steps"))
    told = [optimizer.get("step"), _mapping(own.get("optimizer")).get("current_step"), *steps.values()]
    for value in told:
        for one in value.values() if isinstance(value, Mapping) else [value]:
            number = np.asarray(one).item() if isinstance(one, Array) and not one.shape else one
            if type(number) in (int, float):
                yield number


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
