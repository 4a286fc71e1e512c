"""Exchange is how the processes of one call act together: they tell each other what they hold, and fail together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import SourceError
from .frameworks import Group, installed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Alone:
    """A group of one process."""

    rank: int = 0
    size: int = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


def running() -> Group:
    """Return the group of processes that runs: torch's or JAX's, else this process alone."""
    groups = (framework.group() for framework in installed().values())
    return next((group for group in groups if group is not None), Alone())


def shared(group: Group, value: Any) -> list[Any]:
    """Return what each process gave, by rank: plain values, as JSON has them."""
    return [json.loads(data) for data in group.gather(json.dumps(value).encode())]


def together(group: Group, action: Callable[[], T], *, only: int | None = None) -> T | None:
    """Let all processes act, or only one; where one fails all raise, the others with the first one's words."""
    failed: BaseException | None = None
    result = None
    if only is None or group.rank == only:
        try:
            result = action()
        except Exception as error:
            failed = error
    words = shared(group, None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, text in enumerate(words):
        if text is not None:
            raise SourceError(f"rank {rank} failed, so nothing was published: {text}")
    return result
