"""An adapter changes a base model's weights by small arrays beside them; this module gives those lines, made from the base's.

A low-rank pair is `lora_A` of `rank in` and `lora_B` of `out rank`, where `out` and `in` are the weight's own dims. So a layout
cuts the pair as it cuts the layer, part by part where the weight is fused. Which modules have a pair, and of which rank, is said by
the adapter's config, which stands in the base model's under `adapter_config`; what is stored beside that is taken too.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .errors import LayoutError
from .expression import evaluate
from .pattern import Line, Namer, Table
from .quantised import Method, beside

ADAPTER = "adapter_config"
"""The key of a config under which an adapter's own stands; the other keys are its base model's."""

LEAD = "base_model.model."
"""What stands before the base model's names."""

WRAPPED = "base_layer"
"""Where the base's own arrays are in a module that has a pair."""

MOST_REPEATS = 6
"""Quantifiers in an expression of a config; more of them, or repeated groups, could take forever."""

Index = tuple[int, ...]


def ways_of(adapter: Any, methods: Sequence[Method]) -> list[Method]:
    """Return the kinds of arrays that an adapter's method may put beside a weight; none where it has no table."""
    if not isinstance(adapter, Mapping):
        raise LayoutError(f"config: {ADAPTER} is {adapter!r}, the object in an adapter_config.json was expected")
    return [m for m in methods if adapter.get("peft_type") in m.names]


def weights_of(names: Iterable[str], ways: Sequence[Method]) -> list[str]:
    """Return the names, in the base model, of the weights that an adapter's arrays belong to, or are."""
    suffixes = tuple({f".{suffix}" for way in ways for suffix, _, _ in way.rows})
    found = []
    for name in names:
        if name.startswith(LEAD):
            bare = name.removeprefix(LEAD).replace(f".{WRAPPED}.", ".")
            suffix = next((s for s in suffixes if bare.endswith(s)), None)
            found.append(bare if suffix is None else f"{bare.removesuffix(suffix)}.weight")
    return found


def prefix_of(table: Table, weights: Iterable[str]) -> str:
    """Return the prefix that these names lack: the adapter is one of the model without its head."""
    namer, seen = Namer(table), Counter[str]()
    for weight in weights:
        seen.update([p for p in ("", *table.prefixes) if namer.find(p + weight) is not None][:1])
    return seen.most_common(1)[0][0] if seen else ""


def with_adapter(
    table: Table,
    indices: Mapping[str, Sequence[Index]],
    ways: Sequence[Method],
    config: Mapping[str, Any],
    names: Collection[str],
    lacked: str,
) -> Table:
    """Return the table of an adapter's arrays; `indices` are where the base has each line, `lacked` is a prefix of its names."""
    adapter, there = _Adapter(config), set(names)
    lines: list[Line] = []
    sizes: dict[str, str] = {}
    for line in table.lines:
        named = replace(line, name=LEAD + line.name.removeprefix(lacked), condition=None)
        places = [_Place(i, named.named(i)) for i in indices.get(line.name, ())]
        lines += _whole(named, adapter, places, there)
        if line.name.endswith(".weight") and line.pattern.ndim == 2:
            transposed = any(fnmatch.fnmatchcase(line.name, glob) for glob in table.transposed)
            for rank, made in _pairs(named, adapter, ways, places, there, transposed):
                lines.append(made)
                sizes[f"lora_{rank}"] = str(rank)
    return replace(table, lines=tuple(lines), sizes={**table.sizes, **sizes}, ties=(), ignored=(), prefixes=(), spellings=())


@dataclass(frozen=True, slots=True)
class _Place:
    """One array of the base, as the adapter would call it."""

    index: Index
    name: str

    @property
    def owner(self) -> str:
        """The module's name here."""
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> str:
        """The module's name in the base."""
        return self.owner.removeprefix(LEAD)


def _whole(line: Line, adapter: _Adapter, places: Sequence[_Place], there: set[str]) -> list[Line]:
    """Return the lines of the base's own arrays that an adapter holds: saved modules, trained biases, resized embeddings."""
    owner, _, leaf = line.name.rpartition(".")
    kept = {p.index for p in places if p.name in there or adapter.keeps(p.module)}
    wrapped = {p.index for p in places if f"{p.owner}.{WRAPPED}.{leaf}" in there}
    both = ((line.name, kept), (f"{owner}.{WRAPPED}.{leaf}", wrapped))
    return [replace(line, name=name, only=frozenset(found)) for name, found in both if found]


def _pairs(
    line: Line, adapter: _Adapter, ways: Sequence[Method], places: Sequence[_Place], there: set[str], transposed: bool
) -> list[tuple[int, Line]]:
    """Return the lines of what lies beside a weight, those of each rank apart."""

    def stored(way: Method) -> set[Index]:
        return {p.index for p in places for suffix, _, condition in way.rows if not condition and f"{p.owner}.{suffix}" in there}

    way, found_at = next(((w, at) for w in ways if (at := stored(w))), (ways[0], set()))
    of_rank: dict[int, set[Index]] = {}
    for place in places:
        if adapter.targets(place.module, any_stored=bool(found_at)) or place.index in found_at:
            of_rank.setdefault(adapter.rank(place.module), set()).add(place.index)
    found = []
    for rank, only in of_rank.items():
        values = {**adapter.config, "rank": rank}
        for suffix, template, condition in way.rows:
            if condition is None or evaluate(condition, values):
                made = beside(line, suffix, template, values, label=f"{suffix}.{rank}", transposed=transposed)
                found.append((rank, replace(made, only=frozenset(only))))
    return found


# --- what a config says of modules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Adapter:
    """An adapter's config, read as PEFT reads it."""

    config: Mapping[str, Any]

    def targets(self, module: str, *, any_stored: bool) -> bool:
        """Say whether a module has a pair; where the config names no modules, all of those of which any has one do."""
        if _ends(module, self._excluded) or any(f".{name}." in f".{module}." for name in self._saved):
            return False
        if self._targets is None:
            return any_stored
        if isinstance(self._targets, re.Pattern):
            return self._targets.fullmatch(module) is not None
        return module in self._targets or (_ends(module, self._targets) and self._in_layers(module))

    def keeps(self, module: str) -> bool:
        """Say whether a module, or one that holds it, is saved whole."""
        steps = module.split(".")
        return any(".".join(steps[:n]).endswith(self._saved) for n in range(1, len(steps) + 1))

    def rank(self, module: str) -> int:
        """Return the rank of a module's pair."""
        return next((rank for pattern, rank in self._ranks if pattern.match(module)), self._rank)

    def _in_layers(self, module: str) -> bool:
        if not self._layers:
            return True
        found = next((m for m in (p.match(module) for p in self._layer_patterns) if m), None)
        return found is not None and int(found[1]) in self._layers

    @cached_property
    def _targets(self) -> re.Pattern[str] | tuple[str, ...] | None:
        told = self.config.get("target_modules")
        if told in (None, "all-linear"):
            return None
        return _expression("target_modules", told) if isinstance(told, str) else self._names("target_modules")

    @cached_property
    def _excluded(self) -> re.Pattern[str] | tuple[str, ...]:
        told = self.config.get("exclude_modules")
        return _expression("exclude_modules", told) if isinstance(told, str) else self._names("exclude_modules")

    @cached_property
    def _saved(self) -> tuple[str, ...]:
        return self._names("modules_to_save")

    @cached_property
    def _layers(self) -> frozenset[int]:
        told = self.config.get("layers_to_transform")
        found = [] if told is None else told if isinstance(told, list) else [told]
        if not all(type(n) is int for n in found):
            raise _unlike("layers_to_transform", told, "numbers of layers were")
        return frozenset(found)

    @cached_property
    def _layer_patterns(self) -> list[re.Pattern[str]]:
        told = self.config.get("layers_pattern") or "[^.]*"
        names = (told,) if isinstance(told, str) else self._names("layers_pattern")
        return [_expression("layers_pattern", name, r".*?\.", r"\.(\d+)\.") for name in names]

    @cached_property
    def _rank(self) -> int:
        return _rank("r", self.config.get("r"))

    @cached_property
    def _ranks(self) -> list[tuple[re.Pattern[str], int]]:
        told = self.config.get("rank_pattern") or {}
        if not isinstance(told, Mapping):
            raise _unlike("rank_pattern", told, "an object of ranks was")
        return [(_expression("rank_pattern", p, r"(?:.*\.)?(?:", ")$"), _rank(f"rank_pattern of {p}", n)) for p, n in told.items()]

    def _names(self, key: str) -> tuple[str, ...]:
        told = self.config.get(key) or []
        if not isinstance(told, (list, tuple)) or not all(isinstance(name, str) and name for name in told):
            raise _unlike(key, told, "names of modules were")
        return tuple(told)


def _ends(module: str, names: re.Pattern[str] | tuple[str, ...]) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return f".{module}".endswith(tuple(f".{name}" for name in names))


def _rank(what: str, told: Any) -> int:
    if type(told) is not int or not 0 < told < 1 << 31:
        raise _unlike(what, told, "a rank was")
    return told


def _expression(key: str, text: str, before: str = "", behind: str = "") -> re.Pattern[str]:
    """Return a config's regular expression, where it cannot take forever."""
    quantifiers = len(re.findall(r"(?<!\\)[*+{]|(?<![\\*+?}(])\?", text))
    if quantifiers > MOST_REPEATS or re.search(r"\)[*+{]", text):
        raise LayoutError(
            f"{ADAPTER}: {key} is {text[:80]!r}, whose repeats ({quantifiers}, at most {MOST_REPEATS} are read, none of a group) "
            f"could take forever; name the modules instead"
        )
    try:
        return re.compile(before + text + behind)
    except (re.error, OverflowError, RecursionError) as error:
        raise _unlike(key, text, f"a regular expression ({error}) was") from error


def _unlike(key: str, told: Any, expected: str) -> LayoutError:
    return LayoutError(f"{ADAPTER}: {key} is {str(told)[:80]!r}, {expected} expected")
