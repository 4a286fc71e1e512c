"""A naming shows the parts of a model under its own names and shapes; this module joins namings through their parts.

A stored array is taken apart by its table's pattern, a wanted array is laid out by its own; where both meet are the parts, in
elementary dims. So no table is ever inverted, and a layout's local tensor is the same pattern at local sizes.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import lt
from typing import Any, NamedTuple

import numpy as np

from .adapted import ADAPTER, prefix_of, ways_of, weights_of, with_adapter
from .array import Array, Step
from .box import Shape
from .checkpoint import Checkpoint
from .errors import LayoutError, listing
from .expression import evaluate, needed
from .formats import adapters
from .layout import size_of_blocks
from .pattern import Line, Namer, Pattern, Place, Table, by_shape, families_in, find, fuse, parse_table, refined, shown_shape
from .pieces import Pieces, stacked, union
from .quantised import Method, parse_method, with_companions

CANONICAL = "hf"
LIVE = "transformers"
"""The naming of live modules; families without a table of it are called there as on the disk."""

METHODS = ("quantised", "adapted")
"""Tables of what lies beside weights, in any naming."""

MOST = 1 << 20
"""Arrays of one line; more of them are a hostile config."""


@lru_cache(maxsize=1)
def _texts() -> dict[str, dict[str, str]]:
    """Return the installed tables, by naming and family; the canonical naming comes first."""
    found: dict[str, dict[str, str]] = {}
    for point in sorted(adapters("meshload.models"), key=lambda p: (p.name != CANONICAL, p.name)):
        if point.name not in METHODS:
            of = found.setdefault(point.name, {})
            for text in point.load():
                for family in families_in(text):
                    of.setdefault(family, text)
    return found


@lru_cache(maxsize=128)
def tables_of(family: str | None) -> dict[str, Table]:
    """Return a family's tables by naming, the canonical one first; other families' are not even parsed."""
    return {naming: parse_table(of[family]) for naming, of in _texts().items() if family in of}


def naming_names() -> list[str]:
    """Return the names of the installed namings."""
    return sorted({point.name for point in adapters("meshload.models")} - {"quantised"})


def families_with(naming: str) -> list[str]:
    """Return the families that have names in a naming."""
    return sorted(_texts().get(naming, ()))


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of its `text_config` on top, as multimodal models nest them."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def family_of(config: Mapping[str, Any] | None) -> str | None:
    """Return a config's `model_type`, that of its `text_config` where only that one has tables."""
    if config is None:
        return None
    nested = config.get("text_config")
    types = [config.get("model_type"), nested.get("model_type") if isinstance(nested, Mapping) else None]
    words = [t for t in types if isinstance(t, str)]
    return next((t for t in words if tables_of(t)), types[0] if isinstance(types[0], str) else None)


@dataclass(frozen=True)
class Model:
    """A model family in one naming: its table at the sizes that a config gives."""

    naming: str
    family: str
    table: Table
    config: Mapping[str, Any]
    joints: Mapping[str, tuple[str, ...]]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Dim -> size, as far as the config tells."""
        return self.table.sizes_at(self.config)

    @cached_property
    def values(self) -> dict[str, Any]:
        """What conditions and steps may name."""
        return {**self.config, **self.sizes}

    def pattern(self, line: Line) -> Pattern:
        """Return a line's pattern in elementary dims."""
        return refined(line.pattern, self.joints)

    def size(self, part: str, dim: str) -> int:
        """Return the size of a dim in the whole model, or ask for it."""
        if "/" in dim:
            return size_of_blocks(dim, self.sizes, self.joints)
        if dim not in self.sizes:
            raise LayoutError(
                f"{self.family} ({self.naming}): the size of {self.table.needs(dim)} is not in the config, or no number there; "
                f"give it in config="
            )
        return self.sizes[dim]

    @cached_property
    def lacking(self) -> tuple[str, ...]:
        """The dims that all its layers have and whose sizes the config does not tell."""
        lines = [x for x in self.table.lines if not x.optional and not set(needed(x.condition or "0")) & set(x.counted)]
        dims = {d for line in lines for part in line.parts for d in (*line.counted, *self.pattern(line).dims_of(part))}
        return tuple(sorted(d for d in dims if "/" not in d and d not in self.sizes))

    def holds(self, line: Line, index: Sequence[int]) -> bool:
        """Say whether the model has a line's array at these counted dims."""
        if line.only is not None and tuple(index) not in line.only:
            return False
        if line.condition is None:
            return True
        key = line.name, line.condition
        places, held = self._held.get(key) or self._held.setdefault(key, (_named(line), {}))
        at = tuple([index[n] for n in places])
        found = held.get(at)
        if found is None:
            for name in set(needed(line.condition)) & set(self.table.sizes):
                if isinstance(evaluate(self.table.sizes[name], self.values), str):
                    raise LayoutError(f"config: {self.table.needs(name)} is a word, a whole number was expected")
            where = dict(zip(line.counted, index, strict=True))
            found = held[at] = bool(evaluate(line.condition, {**self.values, **where}))
        return found

    @cached_property
    def _held(self) -> dict[tuple[str, str], tuple[list[int], dict[Shape, bool]]]:
        """By a line's name and condition: the counted dims that it names, and what it gave for those; many experts ask for it."""
        return {}

    def has(self, line: Line, index: Sequence[int]) -> bool:
        """Say whether these counted dims are inside the model, and it has the line's array there."""
        extents = self._extents.get(line.name)
        if extents is None:
            extents = self._extents[line.name] = tuple(self.size(line.parts[0], d) for d in line.counted)
        return all(map(lt, index, extents)) and self.holds(line, index)

    @cached_property
    def _extents(self) -> dict[str, Shape]:
        """The sizes of a line's counted dims, by its name."""
        return {}

    def indices(self, line: Line, over: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
        """Return the counted dims' indices at which the model has a line's array, out of those given per dim."""
        count = math.prod(len(over[d]) for d in line.counted)
        if count > MOST:
            raise LayoutError(f"{self.family} ({self.naming}): {line.name} would be {count} arrays, at most {MOST} are planned")
        combinations: Iterable[tuple[int, ...]] = itertools.product(*(over[d] for d in line.counted))
        if line.only is not None:
            combinations = [index for index in combinations if index in line.only]
        if line.condition is None:
            return list(combinations)
        if not set(needed(line.condition)) & set(line.counted):
            return list(combinations) if self.holds(line, [0] * len(line.counted)) else []
        return [index for index in combinations if self.holds(line, index)]

    def whole_shape(self, line: Line) -> Shape:
        """Return the shape of a line's arrays in the whole model."""
        return shown_shape(self.pattern(line), line.parts, self.size)

    def arrays(self) -> Iterator[tuple[str, Line, tuple[int, ...]]]:
        """Go through the model's arrays: name, line and counted dims."""
        for line in self.table.lines:
            yield from self.arrays_of(line)

    def arrays_of(self, line: Line) -> Iterator[tuple[str, Line, tuple[int, ...]]]:
        """Go through the arrays of one line."""
        over = {d: range(self.size(line.parts[0], d)) for d in line.counted}
        for index in self.indices(line, over):
            yield rename(line, index), line, index

    @cached_property
    def ties(self) -> dict[str, str]:
        """Alias -> name, of the weights that the config ties."""
        return {
            alias: name for alias, name, condition in self.table.ties if condition is None or bool(evaluate(condition, self.values))
        }

    @cached_property
    def untied(self) -> dict[str, str]:
        """Alias -> the condition that the config does not fulfil."""
        return {alias: c for alias, _, c in self.table.ties if c is not None and alias not in self.ties}


def model_of(naming: str, config: Mapping[str, Any] | None, *, names: Iterable[str] = ()) -> Model | None:
    """Return the model that a naming's tables and a config mean, or None where no table fits.

    Joint dims of all the family's tables are refined alike, so that parts of different namings meet. Quantised arrays that
    stand among `names` (a mapping to arrays) in place of or beside a weight get lines of their own. Where the config has that
    of an adapter, its arrays are the model's: those that it says, and those that stand among `names`.
    """
    family = family_of(config)
    tables = tables_of(family)
    if naming == LIVE and naming not in tables:
        naming = CANONICAL
    if config is None or naming not in tables:
        return None
    table = tables[naming]
    joints: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, str] = {}
    for other in tables.values():
        joints.update(other.joints)
        sizes.update(other.sizes)
    flat = flattened(config)
    table = replace(table, sizes={**sizes, **table.sizes, "one": "1"})
    table = table.numbered(table.sizes_at(flat))
    model = Model(naming, str(family), table, flat, joints)
    if ADAPTER in flat:
        return _adapted(model, list(names))
    model = _decided(model, names)
    quantisation = flat.get("quantization_config")
    if not isinstance(quantisation, Mapping) or not isinstance(names, Mapping):
        return model
    where = {line.name: [i for _, _, i in model.arrays_of(line)] for line in model.table.lines}
    lines = with_companions(model.table.lines, where, methods("quantised"), quantisation, names)
    return replace(model, table=replace(model.table, lines=lines))


def _decided(model: Model, names: Iterable[str]) -> Model:
    """Drop the lines that this config rules out, older ones that no stored name follows, and of lines that show the same parts
    those that no stored name follows.
    """
    lines = [
        line
        for line in model.table.lines
        if line.condition is None or set(needed(line.condition)) & set(line.counted) or evaluate(line.condition, model.values)
    ]
    table = replace(model.table, lines=tuple(lines))
    followed = Namer(table).followed(by_shape(names))
    shown_parts = {part for line in followed for part in line.parts}
    kept = [line for line in lines if line in followed or not (line.older or set(line.parts) <= shown_parts)]
    return replace(model, table=replace(table, lines=tuple(kept)))


def _adapted(base: Model, names: Sequence[str]) -> Model | None:
    """Return the model of an adapter's arrays, in the names that PEFT makes of the canonical ones; None in other namings."""
    ways = ways_of(base.config[ADAPTER], methods("adapted"))
    if base.naming != CANONICAL or not ways:
        return None
    if not names:  # where its arrays are not at hand, there are none
        return replace(base, table=replace(base.table, lines=(), ties=()))
    weights = weights_of(names, ways)
    lacked = prefix_of(base.table, weights)
    base = _decided(base, [lacked + weight for weight in weights])
    where = {line.name: [i for _, _, i in base.arrays_of(line)] for line in base.table.lines}
    return replace(base, table=with_adapter(base.table, where, ways, base.config[ADAPTER], names, lacked))


@lru_cache(maxsize=len(METHODS))
def methods(kind: str) -> tuple[Method, ...]:
    """Return the installed methods by which arrays lie beside weights: `quantised` ones, or `adapted`."""
    points = [point for point in adapters("meshload.models") if point.name == kind]
    return tuple(parse_method(text) for point in points for text in point.load())


def _named(line: Line) -> list[int]:
    """Return which of a line's counted dims its condition names."""
    names = needed(line.condition or "0")
    return [n for n, d in enumerate(line.counted) if d in names]


def rename(line: Line, index: Sequence[int]) -> str:
    """Return the name of a line's array at these counted dims."""
    return line.named(index)


# --- what is stored ---------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What arrays must share to be parts of one array."""

    dtype: np.dtype[Any]
    stored: str | None
    """The format's own name of the dtype, where NumPy has none."""
    step: Step | None
    """From stored values to those that are meant."""
    copies: str
    """What rows of one box mean."""


@dataclass(frozen=True)
class Stored:
    """A part as it is stored: its dims, and its pieces per dtype (and stored dtype name, and step)."""

    dims: tuple[str, ...]
    groups: dict[Kind, Pieces] = field(default_factory=dict)
    at: dict[tuple[str, ...], dict[tuple[int, ...], Kind]] = field(default_factory=dict)
    """Counted dims -> index -> the group that it is in."""

    _seen: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[tuple[int, ...], set[Kind]]] = field(default_factory=dict)

    def kind(self, counted: tuple[str, ...], index: tuple[int, ...]) -> Kind | None:
        """Return the dtype, its stored name and the step of what is stored at an index; None where nothing is."""
        if len(self.at) == 1 and counted in self.at:
            return self.at[counted].get(index)
        found = self._found(counted, index)
        if len(found) > 1:
            where = dict(zip(counted, index, strict=True))
            dtypes = listing(str(kind.dtype) for kind in found)
            raise LayoutError(
                f"{' '.join(self.dims)} at {where} is stored in several dtypes ({dtypes}), which one array cannot hold"
            )
        return next(iter(found), None)

    def has(self, counted: Sequence[str], index: Sequence[int]) -> bool:
        """Say whether anything is stored at an index."""
        return bool(self._found(counted, index))

    def _found(self, counted: Sequence[str], index: Sequence[int]) -> set[Kind]:
        where = dict(zip(counted, index, strict=True))
        found: set[Kind] = set()
        for dims in self.at:
            shared = tuple(d for d in dims if d in where)
            found |= self._kinds(dims, shared).get(tuple(where[d] for d in shared), set())
        return found

    def _kinds(self, dims: tuple[str, ...], shared: tuple[str, ...]) -> dict[tuple[int, ...], set[Kind]]:
        """Return what is stored at the indices of some of the counted dims."""
        found = self._seen.get((dims, shared))
        if found is None:
            found = self._seen[dims, shared] = {}
            places = [dims.index(d) for d in shared]
            for index, kind in self.at[dims].items():
                found.setdefault(tuple(index[p] for p in places), set()).add(kind)
        return found


@dataclass(frozen=True)
class Inventory:
    """A checkpoint taken apart: its parts, and what belongs to none."""

    parts: Mapping[str, Stored]
    unexpected: tuple[str, ...]


def take_apart(model: Model, arrays: Mapping[str, Array]) -> Inventory:
    """Find the parts of a model in stored arrays.

    What the model's naming does not know, another of its namings may: experts grouped in some layers, single in others.
    """
    ask(model)
    parts: dict[str, Stored] = {}
    left = _take(model, arrays, parts)
    for naming in sorted(tables_of(model.family)) if left and parts else ():
        other = model_of(naming, model.config) if naming != model.naming else None
        if left and other is not None and all(other.sizes.get(size) is not None for size, _ in other.table.asks):
            left = _take(other, {name: arrays[name] for name in left}, parts)
    ignored = model.table.ignored
    unexpected = tuple(name for name in left if not any(fnmatch.fnmatchcase(name, glob) for glob in ignored))
    return Inventory(parts, unexpected)


def _take(model: Model, arrays: Mapping[str, Array], parts: dict[str, Stored]) -> list[str]:
    """Add the parts that a naming finds to those that others found, and return the names that it does not know."""
    there = bool(parts)
    places = located(model, arrays)
    taken: dict[tuple[int, tuple[int, ...]], str] = {}
    by_line: dict[int, tuple[Line, list[tuple[tuple[int, ...], Array]]]] = {}
    left: list[str] = []
    for name, array in arrays.items():
        found = places.get(name)
        if found is None or not model.has(*found) or (there and _is_there(parts, *found)):
            left.append(name)
            continue
        line, index = found
        if taken.setdefault((id(line), index), name) != name:
            raise LayoutError(f"{name} and {taken[id(line), index]} are the same array of the model: {rename(line, index)}")
        by_line.setdefault(id(line), (line, []))[1].append((index, array))
    for line, entries in by_line.values():
        _add(model, line, entries, parts)
    return left


def _is_there(parts: Mapping[str, Stored], line: Line, index: Sequence[int]) -> bool:
    """Say whether a part of a line is stored already, at dims that both count."""
    return any(parts[part].has(line.counted, index) for part in line.parts if part in parts)


def ask(model: Model) -> None:
    """Raise where a config lacks what decides the order of elements."""
    for size, question in model.table.asks:
        if model.sizes.get(size) is None:
            raise LayoutError(f"{model.family} ({model.naming}): {question}")


def _add(model: Model, line: Line, entries: Sequence[tuple[tuple[int, ...], Array]], parts: dict[str, Stored]) -> None:
    pattern = model.pattern(line)
    expected = model.whole_shape(line)
    step = pattern.step_at(model.values)
    groups: dict[tuple[Kind, Shape], list[tuple[tuple[int, ...], Array]]] = {}
    for index, array in entries:
        _check_shape(model, line, pattern, expected, array)
        kind = Kind(array.dtype, array.stored, array.step or step, array.copies)
        groups.setdefault((kind, array.shape), []).append((index, array))
    for (kind, shape), members in groups.items():
        rows = stacked([a.pieces for _, a in members], np.asarray([i for i, _ in members], np.int64).reshape(len(members), -1))
        for part in line.parts:
            pieces = find(pattern, part, rows, len(line.counted), shape, model.size)
            dims = (*line.counted, *pattern.dims_of(part))
            there = parts.setdefault(part, Stored(dims))
            if set(there.dims) != set(dims):
                raise LayoutError(f"{line.name}: {part} has dims {dims} here and {there.dims} elsewhere")
            pieces = pieces.transpose([dims.index(d) for d in there.dims])
            there.groups[kind] = union([there.groups[kind], pieces]) if kind in there.groups else pieces
            there.at.setdefault(line.counted, {}).update({index: kind for index, _ in members})
            there._seen.clear()


def _check_shape(model: Model, line: Line, pattern: Pattern, expected: Shape, array: Array) -> None:
    if array.shape == expected:
        return
    padded = [len(p.factors) == 1 and getattr(p.factors[0], "padded", False) for p in pattern.dims]
    if len(array.shape) != len(expected) or any(
        found != n and not (pad and found > n) for found, n, pad in zip(array.shape, expected, padded, strict=True)
    ):
        leaves = {d for part in line.parts for d in pattern.dims_of(part)}
        sizes = ", ".join(f"{d} {model.size(line.parts[0], d)}" for d in sorted(leaves))
        raise LayoutError(
            f"{array.name}: its shape is {array.shape}; {model.family}'s config gives {expected} ({line.pattern}: {sizes}); "
            f"one of the two is wrong"
        )


# --- showing ----------------------------------------------------------------------------------------------------------


def shown(model: Model, inventory: Inventory, like: Checkpoint) -> Checkpoint:
    """Return the arrays of a checkpoint under another naming, lazily; what fuses stored parts with missing ones is unavailable."""
    arrays: dict[str, Array] = {}
    torn: dict[str, str] = {}
    for line in model.table.lines:
        if not any(part in inventory.parts for part in line.parts):
            continue
        pattern, shape = model.pattern(line), model.whole_shape(line)
        over = {d: range(model.size(line.parts[0], d)) for d in line.counted}
        for index in model.indices(line, over):
            lacking = [p for p in line.parts if p not in inventory.parts or inventory.parts[p].kind(line.counted, index) is None]
            if not lacking:
                made = _shown_array(model, line, pattern, shape, index, inventory)
                if made is not None:
                    arrays[made.name] = made
            elif len(lacking) < len(line.parts):
                held = [part for part in line.parts if part not in lacking]
                torn[rename(line, index)] = f"of its parts the checkpoint has {listing(held)}, and lacks {listing(lacking)}"
    parts_of = {line.name: line.parts for line in model.table.lines}
    for alias, name in model.ties.items():
        if alias in arrays and name in arrays:  # the same part under both names, where only one is stored
            both = zip(parts_of[alias], parts_of[name], strict=True)
            if all(inventory.parts[a] is inventory.parts[b] for a, b in both):
                del arrays[alias]
    aliases = {a: n for a, n in model.ties.items() if n in arrays and a not in arrays}
    return replace(like, arrays=arrays, aliases=aliases, unavailable={**like.unavailable, **torn}, names=model.naming)


def _shown_array(
    model: Model, line: Line, pattern: Pattern, shape: Shape, index: tuple[int, ...], inventory: Inventory
) -> Array | None:
    tables: dict[str, Pieces] = {}
    kinds = set()
    for part in line.parts:
        stored = inventory.parts[part]
        kind = stored.kind(line.counted, index)
        assert kind is not None
        kinds.add(kind)
        pieces, dims = stored.groups[kind], list(stored.dims)
        for dim, i in zip(line.counted, index, strict=True):
            pieces = pieces.index(dims.index(dim), i)
            dims.remove(dim)
        tables[part] = pieces.transpose([dims.index(d) for d in pattern.dims_of(part)])
    if not any(len(t) for t in tables.values()) and 0 not in shape:
        return None
    if len(kinds) != 1:
        raise LayoutError(f"{rename(line, index)}: its parts are stored in different dtypes or with different steps")
    kind = kinds.pop()
    back = pattern.step_at(model.values)
    pieces = fuse(pattern, tables, 0, model.size)
    return Array(rename(line, index), kind.dtype, shape, pieces, kind.stored, between(kind.step, back), kind.copies)


def between(stored: Step | None, wanted: Step | None) -> Step | None:
    """Return the step from stored values to those of another naming."""
    if stored == wanted:
        return None
    if wanted is None:
        return stored
    if stored is None:
        return wanted.inverse
    raise LayoutError(f"a step from {stored} to {wanted} would round twice; restore to the canonical names first")


def moment_step(kind: str, step: Step | None) -> Step | None:
    """Return the step of an optimizer array, from that of its weight: moments scale inversely, and do not shift."""
    if step is None or kind == "master":
        return step
    if step.operator in "+-":
        return None
    power = {"exp_avg": 1, "momentum": 1, "exp_avg_sq": 2}.get(kind)
    if power is None:
        raise LayoutError(f"optimizer array {kind!r}: how it scales with its weight ({step}) is not known")
    return Step(step.inverse.operator, step.number**power)


# --- wrappers ---------------------------------------------------------------------------------------------------------

WRAPPERS = ("_orig_mod", "_forward_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module")


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return names without what torch.compile, DDP, FSDP and engines wrap around modules: new name -> stored name.

    `WRAPPERS` are dropped wherever they stand; a leading `module` where every name has it.
    """
    stored = list(names)
    if not any(w in name for w in WRAPPERS for name in stored) and not all(name.startswith("module.") for name in stored):
        return {name: name for name in stored}
    bare = [[s for s in name.split(".") if s not in WRAPPERS] or [name] for name in stored]
    while bare and all(len(segments) > 1 and segments[0] == "module" for segments in bare):
        bare = [segments[1:] for segments in bare]
    found: dict[str, str] = {}
    for name, segments in zip(stored, bare, strict=True):
        short = ".".join(segments)
        if short in found:
            raise LayoutError(f"{found[short]} and {name} are both {short} without their wrappers; save it with one of them")
        found[short] = name
    return found


def chosen(names: Iterable[str], include: Sequence[str] | str | None, exclude: Sequence[str] | str | None) -> Iterator[str]:
    """Go through the names that `include` globs match and `exclude` globs do not."""
    wanted = [include] if isinstance(include, str) else include
    unwanted = [exclude] if isinstance(exclude, str) else exclude or ()
    for name in names:
        if wanted is not None and not any(fnmatch.fnmatchcase(name, glob) for glob in wanted):
            continue
        if not any(fnmatch.fnmatchcase(name, glob) for glob in unwanted):
            yield name


def idle(names: Iterable[str], **patterns: Iterable[str] | str | None) -> Iterator[str]:
    """Say, of each option's globs, which match none of the names."""
    known = set(names)
    for word, globs in patterns.items():
        unmatched = [
            repr(glob)
            for glob in ([globs] if isinstance(globs, str) else globs or ())
            if not any(fnmatch.fnmatchcase(name, glob) for name in known)
        ]
        if unmatched:
            yield f"{word}=: {listing(unmatched, 3)} matches no name; there are {listing(sorted(known), 3)}"


# --- which naming ------------------------------------------------------------------------------------------------------


def naming_of(names: Iterable[str], config: Mapping[str, Any] | None) -> str | None:
    """Return the naming whose table knows the most of these names, or None where none knows any; canonical before others."""
    family = family_of(config)
    flat = flattened(config or {})
    if ADAPTER in flat:
        names = weights_of(list(names), ways_of(flat[ADAPTER], methods("adapted")))
    shapes = by_shape(names)
    best, count = None, 0
    for naming, table in tables_of(family).items():
        table = table.numbered(table.sizes_at(flat))
        known = sum(1 for _ in Namer(table).locate(shapes))
        if known > count:
            best, count = naming, known
    return best


def located(model: Model, names: Iterable[str]) -> dict[str, Place]:
    """Return the line and the counted dims of each name that a model's table knows."""
    return dict(Namer(model.table).locate(by_shape(names)))


def tied(model: Model, inventory: Inventory) -> Inventory:
    """Return an inventory in which a tied part that is not stored is the one that it is tied to."""
    parts = dict(inventory.parts)
    by_name = {line.name: line for line in model.table.lines}
    for alias, name in model.ties.items():
        if alias in by_name and name in by_name:
            for a, b in zip(by_name[alias].parts, by_name[name].parts, strict=True):
                if a not in parts and b in parts:
                    parts[a] = parts[b]
                elif b not in parts and a in parts:
                    parts[b] = parts[a]
    return replace(inventory, parts=parts)


def contradiction(told: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return where two configs differ in what tables read of them."""
    keys = {"model_type"}
    families = {family_of(told), family_of(given)} - {None} or {f for of in _texts().values() for f in of}
    for family in families:
        for table in tables_of(family).values():
            for text in (*table.sizes.values(), *(line.condition for line in table.lines if line.condition)):
                keys |= set(needed(text))
    one, other = flattened(told), flattened(given)
    both = [k for k in sorted(keys) if one.get(k) is not None and other.get(k) is not None]  # null says nothing
    return [f"{k} is {one[k]!r} and {other[k]!r}" for k in both if one[k] != other[k]]
