"""Streaming brings targets to devices part by part: while one part is on its way, others are read into staging memory.

The memory of a device is a sink, and bringing a plan's targets there is writing: parts in the order of where they are stored, a few
groups in flight, under the ceiling. So main memory holds some staging memory alone, however large the targets are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .box import Box
from .frameworks import Landing, Staging
from .pieces import Ints, repeated
from .planning import Joined, Plan, Target, Targets
from .reading import Progress, read
from .scheduling import Copies, compacted
from .sharing import clipped
from .source import Bytes
from .writing import ITEM, MOVERS, Filling, Item, fill

PARTED = 1 << 12
"""What reading a group may take at least: a run that must be cut is never longer than that."""


@dataclass(frozen=True, eq=False)
class Stream:
    """What of a plan goes to devices part by part, and what is read into main memory."""

    landings: Mapping[int, Landing]
    """By target."""
    parts: Filling
    rest: Plan
    """The plan, with the copies of all other targets alone."""
    staging: Staging

    @property
    def away(self) -> frozenset[int]:
        """The targets that need no main memory, those of further copies included."""
        return _with_others(self.rest, self.landings)

    def run(self, buffers: Mapping[int, Bytes], progress: Progress | None = None) -> None:
        """Fill the devices' tensors, and the buffers of all other targets; returns when all has arrived, or raises."""
        before, total = self.rest.schedule.nbytes, self.rest.schedule.nbytes + self.parts.nbytes
        read(self.rest, buffers, progress=progress and (lambda done, _: progress(done, total)))
        try:
            fill(self.parts, lossy=True, progress=progress and (lambda done, _: progress(before + done, total)))
        finally:  # a copy that goes on writes into memory that somebody else may get
            self.staging.wait()


def _with_others(plan: Plan, landings: Mapping[int, Any]) -> frozenset[int]:
    return frozenset([*landings, *(n for i in landings for n in plan.others.get(i, ()))])


def stream(plan: Plan, landings: Mapping[int, Landing], staging: Staging) -> Stream:
    """Cut targets that have a place on a device into parts, whose staging memory and reading stay under the plan's ceiling."""
    away = sorted(_with_others(plan, landings))
    mine = np.isin(plan.copies.target, away)
    room = max(1, plan.max_bytes // (4 * MOVERS))
    steps, firsts, items, targets, others = _parts(plan, landings, min(ITEM, room))
    joined = Joined(_cut(compacted(plan.copies.take(mine)), steps, firsts), others)
    parts = Filling.of(items, targets, joined, room, MOVERS, max(PARTED, plan.max_bytes // (2 * MOVERS)))
    parts = replace(parts, memory=lambda nbytes: staging.memory(max(nbytes, room)))
    return Stream(landings, parts, replace(plan, copies=plan.copies.take(~mine)), staging)


def _parts(
    plan: Plan, landings: Mapping[int, Landing], limit: int
) -> tuple[Ints, Ints, list[Item], Targets, dict[int, tuple[int, ...]]]:
    """Return per target the bytes of a part and the number of its first, and the parts: contiguous, those of results first."""
    steps, firsts = np.ones(len(plan.targets), np.int64), np.zeros(len(plan.targets), np.int64)
    items: list[Item] = []
    targets, others = Targets(), dict[int, tuple[int, ...]]()
    for i in [*landings, *(n for of in landings for n in plan.others.get(of, ()))]:
        target: Target = plan.targets[i]
        most = max(1, limit // target.dtype.itemsize)
        steps[i] = most * target.dtype.itemsize
        boxes = [Box((at,), (min(most, target.size - at),)) for at in range(0, target.size, most)]
        is_whole = target.filled == target.size
        filled = [box.size if is_whole else 0 for box in boxes]
        firsts[i] = targets.add(
            [replace(target, shape=b.shape, whole=b.shape, box=None, filled=n) for b, n in zip(boxes, filled, strict=True)]
        )
        if i in landings:
            dtype = target.dtype if target.step is None else landings[i].dtype  # a step rounds once, to what is wanted
            items += [Item(target.name, landings[i], box.start[0], box, dtype) for box in boxes]
    for i in landings:
        for k in range(-(-plan.targets[i].nbytes // int(steps[i])) if plan.others.get(i) else 0):
            others[int(firsts[i]) + k] = tuple(int(firsts[n]) + k for n in plan.others[i])
    return steps, firsts, items, targets, others


def _cut(copies: Copies, steps: Ints, firsts: Ints) -> Copies:
    """Cut copies at the edges of their targets' parts, which are the targets of what is returned."""
    order = np.argsort(-copies.target_strides, axis=1, kind="stable")
    shape, strides, there = (np.take_along_axis(c, order, axis=1) for c in (copies.shape, copies.strides, copies.target_strides))
    turned = replace(  # seen from the target, where the edges are
        copies, offset=copies.target_offset, strides=there, target_offset=copies.offset, target_strides=strides, shape=shape
    )
    step = steps[copies.target]
    stop = copies.target_offset + ((shape - 1) * there).sum(axis=1) + copies.itemsize
    begin, end = copies.target_offset // step, -(-stop // step)
    row, part = repeated(end - begin)
    part = part + begin[row]
    low = part * step[row]
    found, which = clipped(turned.take(row), low, low + step[row])
    return replace(
        found,
        offset=found.target_offset,
        strides=found.target_strides,
        target=firsts[found.target] + part[which],
        target_offset=found.offset - low[which],
        target_strides=found.strides,
    )
