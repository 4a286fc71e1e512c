"""A checkpoint is a mapping of names to lazy arrays, with aliases (tied weights), optimizer arrays, and what else the format said.

What a format lists but cannot give (a missing shard, a name that no header holds) is kept in `unavailable`, with the reason, so
that the rest stays readable and asking for it tells exactly why it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .array import Array
from .errors import LayoutError, MissingArray


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint, found from metadata."""

    text: str
    """One sentence: what was found, what was expected."""
    array: str | None = None
    file: str | None = None
    rank: int | None = None


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, Array]):
    """What `meshload.open` returns: names to arrays. Nothing of the payload has been read."""

    arrays: Mapping[str, Array]
    format: str
    """The name of the format that opened it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied weights: name -> the name under which they are stored. An alias answers `ck[name]` and is not iterated."""
    optimizer: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    """Optimizer arrays, `optimizer["exp_avg"][name]`, keyed by their weight's name."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What else the format said: steps, versions, files that were passed over."""
    config: Mapping[str, Any] | None = None
    """The model's config beside the arrays, with what the caller completed."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Names that the format lists but cannot give, with the reason."""
    problems: tuple[Problem, ...] = ()
    """What is wrong, found from metadata."""
    names: str = "native"
    """The naming of the arrays."""
    views: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Other namings of the same arrays: naming -> a function that returns the checkpoint under it."""

    def __getitem__(self, name: str) -> Array:
        array = self.arrays.get(self.aliases.get(name, name))
        if array is None:
            raise MissingArray(self.why_missing(name))
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.aliases.get(name, name) in self.arrays

    def __repr__(self) -> str:
        nbytes = sum(a.nbytes for a in self.arrays.values())
        return f"Checkpoint({self.format!r}, {len(self)} arrays, {nbytes} bytes, names={self.names!r})"

    def why_missing(self, name: str) -> str:
        """Say why a name gives no array."""
        name = name if name in self.unavailable else self.aliases.get(name, name)
        if name in self.unavailable:
            return f"{name}: {self.unavailable[name]}"
        return f"{name}: the checkpoint ({self.format}, {len(self)} arrays) never lists this name"

    def with_names(self, names: str) -> Checkpoint:
        """Return the same arrays under another naming: `native`, `stored`, or any naming with a table, such as `hf`."""
        if names == self.names:
            return self
        if names not in self.views:
            known = ", ".join(sorted({self.names, *self.views}))
            raise LayoutError(f"there is no naming {names!r} for this checkpoint; it can be shown as: {known}")
        shown: Checkpoint = self.views[names]()
        return shown
