"""The index of a sharded checkpoint: `weight_map` says which file holds which array, `metadata` what else its writer told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshload.checkpoint import Problem
from meshload.errors import FormatError, MeshloadError, listing
from meshload.source import Folder

from ._json import read_object, short


@dataclass(frozen=True)
class WeightMap:
    """What an index says."""

    index: str
    """Its name."""
    file_of: Mapping[str, str]
    metadata: Mapping[str, Any]

    @cached_property
    def names_in(self) -> dict[str, list[str]]:
        """The names in each file."""
        found: dict[str, list[str]] = {}
        for name, file in self.file_of.items():
            found.setdefault(file, []).append(name)
        return found

    def without(
        self, lost: Mapping[str, MeshloadError], listed: Sequence[str], is_shard: Callable[[str], Any], cure: str = ""
    ) -> tuple[dict[str, str], list[Problem]]:
        """Return which arrays cannot be had, and why, where some files were not read; and what is wrong.

        `listed` are the files that are there, as far as they can be listed.
        """
        hint = self._stale([file for file in lost if _is_absent(file, listed)], listed, is_shard)
        hint = f"{hint}{cure}" if hint else ""
        unavailable: dict[str, str] = {}
        problems = [Problem(f"{self.index}: {hint}", file=self.index)] if hint else []
        for file, error in lost.items():
            why = f"{file}: not there, though {self.index} lists it" if _is_absent(file, listed) else str(error)
            unavailable.update(dict.fromkeys(self.names_in[file], f"{why}{f'; {hint}' if hint else ''}"))
            problems.append(Problem(f"{why}; it should hold {listing(self.names_in[file])}", file=file))
        return unavailable, problems

    def _stale(self, absent: Sequence[str], listed: Sequence[str], is_shard: Callable[[str], Any]) -> str:
        """Say whether shards are missing in a way that blames the index rather than a file."""
        others = [n for n in listed if n not in self.names_in and is_shard(n)] if absent else []
        if not absent or not (others or 2 * len(absent) > len(self.names_in)):
            return ""
        beside = (
            f"beside other files ({listing(others, 3)}): it looks stale" if others else "it is stale, or the download unfinished"
        )
        return f"{len(absent)} of the {len(self.names_in)} files that the index names are not there, {beside}"


def _is_absent(file: str, listed: Sequence[str]) -> bool:
    """Say whether a listing shows that a file is not there; a dead link is."""
    return bool(listed) and "/" not in file and file not in listed and f"{file}/" not in listed


def read_weight_map(folder: Folder, index: str, limit: int) -> WeightMap:
    """Read an index of at most `limit` bytes."""
    found = read_object(folder, index, limit)
    file_of, metadata = found.get("weight_map"), found.get("metadata")
    if not isinstance(file_of, dict):
        raise FormatError(f"{index}: has no weight_map that maps names to files, found {short(file_of)}")
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise FormatError(f"{index}: {name!r} is to be in a file, found {short(file)}")
    for file, name in {file: name for name, file in file_of.items()}.items():
        try:
            folder.inside(file)
        except FormatError as error:
            raise FormatError(f"{index}: {name!r} is said to be in {file!r}, which leaves the folder: {error}") from error
    return WeightMap(index, file_of, metadata if isinstance(metadata, dict) else {})
