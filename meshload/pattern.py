"""A pattern says which parts a stored array shows, in elementary dims; a table is one naming's list of such lines.

`(kv_heads (q group + k + v) head_dim) embed` is a fused QKV weight: `(a b)` is one stored dim, row-major; `(x a + y b)` lays
parts x and y one after another, each with the dims that only it has; `vocab~` may be longer than the config says (padding).
`embed/128` counts blocks of 128 (`embed/128@`: all of them on every rank), `embed//8` groups of 8 packed in one element. A
closing `| * 2` is a per-element step from what is stored to what is meant. The same pattern at a rank's local sizes is that
rank's local tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from .array import Step
from .box import Shape
from .errors import LayoutError
from .expression import evaluate, needed
from .pieces import Pieces, union

LARGEST = 1 << 40
"""A dim of a model that has more elements is a hostile config's."""

SizeOf = Callable[[str, str], int]
"""(part, dim) -> its size."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One elementary dim; `padded` where the array may hold more than the size."""

    name: str
    padded: bool = False

    def __str__(self) -> str:
        return self.name + "~" * self.padded


@dataclass(frozen=True, slots=True)
class Blocks:
    """A dim that counts blocks of another: block scales (`exact` False) or packed elements (`exact` True)."""

    of: Product
    count: int
    exact: bool
    everywhere: bool = False
    """Written `embed/128@`: every rank has all of them."""

    @property
    def name(self) -> str:
        return f"{self.of}{'//' if self.exact else '/'}{self.count}{'@' * self.everywhere}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Product:
    """Row-major factors of one stored dim."""

    factors: tuple[Node, ...]

    def __str__(self) -> str:
        inner = " ".join(map(str, self.factors))
        return inner if len(self.factors) == 1 else f"({inner})"


@dataclass(frozen=True, slots=True)
class Sum:
    """Parts laid one after another."""

    terms: tuple[tuple[str, Product], ...]

    def __str__(self) -> str:
        return f"({' + '.join(' '.join([part, *map(str, p.factors)]) for part, p in self.terms)})"


Node = Dim | Blocks | Product | Sum


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a stored array shows, one node per stored dim."""

    dims: tuple[Product, ...]
    step: str | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.dims)) + (f" | {self.step}" if self.step else "")

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def parts(self) -> list[str]:
        """Return the parts that the pattern itself names, in order; none where it shows a single part."""
        return [part for node in _walk(self.dims) if isinstance(node, Sum) for part, _ in node.terms]

    def dims_of(self, part: str) -> list[str]:
        """Return the elementary dims of a part, in stored order."""
        return [leaf.name for product in self.dims for leaf in _leaves(product, part)]

    def step_at(self, sizes: Mapping[str, Any]) -> Step | None:
        """Return the per-element step, its number computed from sizes and config."""
        if self.step is None:
            return None
        number = evaluate(self.step[1:], sizes)
        if number is None:
            raise LayoutError(f"the step {self.step!r} needs {', '.join(needed(self.step[1:]))}; give it in config=")
        return Step(self.step[0], float(number))


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Read a pattern.

    >>> str(parse("(kv_heads (q group + k + v) head_dim) embed"))
    '(kv_heads (q group + k + v) head_dim) embed'
    """
    body, _, step = text.partition("|")
    words = re.findall(r"//?\d+@?|[()+]|[A-Za-z_]\w*~?", body)
    if "".join(words) != re.sub(r"\s", "", body):
        raise ValueError(f"pattern {text!r} holds something that is no dim, bracket, plus or block")
    found, rest = _read_factors(words, 0)
    if rest != len(words):
        raise ValueError(f"pattern {text!r} has an unbalanced bracket")
    dims = tuple(f if isinstance(f, Product) else Product((f,)) for f in found)
    names = [part for node in _walk(dims) if isinstance(node, Sum) for part, _ in node.terms]
    if sum(isinstance(node, Sum) for node in _walk(dims)) > 1 or len(set(names)) != len(names):
        raise ValueError(f"pattern {text!r} has more than one sum, or names a part twice")
    pattern = Pattern(dims, step.strip() or None)
    for part in names or ["-"]:
        if len(set(pattern.dims_of(part))) != len(pattern.dims_of(part)):
            raise ValueError(f"pattern {text!r} has a dim twice in one part")
    return pattern


def _read_factors(words: Sequence[str], at: int) -> tuple[list[Node], int]:
    found: list[Node] = []
    while at < len(words) and words[at] not in ")+":
        word = words[at]
        if word == "(":
            node, at = _read_bracket(words, at + 1)
        elif word[0] == "/":
            if not found:
                raise ValueError(f"pattern {' '.join(words)!r} has blocks of nothing")
            of = found.pop()
            number, exact, everywhere = int(word.strip("/@")), word.startswith("//"), word.endswith("@")
            node = Blocks(of if isinstance(of, Product) else Product((of,)), number, exact, everywhere)
        else:
            node = Dim(word.rstrip("~"), word.endswith("~"))
        found.append(node)
        at += 1
    return found, at


def _read_bracket(words: Sequence[str], at: int) -> tuple[Node, int]:
    terms = []
    while True:
        factors, at = _read_factors(words, at)
        terms.append(factors)
        if at >= len(words):
            raise ValueError(f"pattern {' '.join(words)!r} has an unbalanced bracket")
        if words[at] == ")":
            break
        at += 1
    if len(terms) == 1:
        return Product(tuple(terms[0])), at
    if not all(t and isinstance(t[0], Dim) for t in terms):
        raise ValueError(f"pattern {' '.join(words)!r}: each term of a sum begins with its part")
    return Sum(tuple((t[0].name, Product(tuple(t[1:]))) for t in terms if isinstance(t[0], Dim))), at


def _walk(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node, Product):
            yield from _walk(node.factors)
        elif isinstance(node, Sum):
            yield from _walk(p for _, p in node.terms)


def _leaves(node: Node, part: str) -> Iterator[Dim | Blocks]:
    match node:
        case Product(factors):
            for factor in factors:
                yield from _leaves(factor, part)
        case Sum(terms):
            for name, product in terms:
                if name == part:
                    yield from _leaves(product, part)
        case _:
            yield node


def labelled(pattern: Pattern, label: str) -> Pattern:
    """Return a pattern whose parts have a label behind their names: they are others, in the same places.

    >>> str(labelled(parse("(q heads + k kv_heads) rank"), ".B"))
    '(q.B heads + k.B kv_heads) rank'
    """

    def told(node: Node) -> Node:
        match node:
            case Product(factors):
                return Product(tuple(told(f) for f in factors))
            case Sum(terms):
                return Sum(tuple((part + label, product) for part, product in terms))
            case _:
                return node

    return Pattern(tuple(_product(told(p)) for p in pattern.dims), pattern.step)


# --- joint dims -------------------------------------------------------------------------------------------------------


def refined(pattern: Pattern, joints: Mapping[str, Sequence[str]]) -> Pattern:
    """Replace joint dims by the finer ones that they are made of (`heads = kv_heads group`)."""

    def fine(node: Node) -> Node:
        match node:
            case Dim(name) if name in joints:
                return Product(tuple(fine(Dim(d)) for d in joints[name]))
            case Product(factors):
                return Product(tuple(fine(f) for f in factors))
            case Sum(terms):
                return Sum(tuple((part, _product(fine(p))) for part, p in terms))
            case _:
                return node

    return Pattern(tuple(_product(fine(p)) for p in pattern.dims), pattern.step)


def _product(node: Node) -> Product:
    return node if isinstance(node, Product) else Product((node,))


# --- from a stored array to its parts, and back -----------------------------------------------------------------------


def length(node: Node, part: str, size: SizeOf) -> int:
    """Return how many elements of a stored dim a node takes, seen from a part."""
    match node:
        case Product(factors):
            return math.prod(length(f, part, size) for f in factors)
        case Sum(terms):
            return sum(length(p, name, size) for name, p in terms)
        case _:
            return size(part, node.name)


def shown_shape(pattern: Pattern, parts: Sequence[str], size: SizeOf) -> Shape:
    """Return the stored shape that a pattern gives at these sizes; all parts must agree on it."""
    shapes = {tuple(length(p, part, size) for p in pattern.dims) for part in parts}
    if len(shapes) != 1:
        raise LayoutError(
            f"pattern {pattern}: the parts {', '.join(parts)} do not fit into one array at these sizes: {sorted(shapes)}; "
            f"a fused array needs parts that are cut alike"
        )
    return shapes.pop()


Run = tuple[int, int]
"""Start and count."""


def shown_box(pattern: Pattern, parts: Sequence[str], size: SizeOf, held: Callable[[str], Run]) -> tuple[Shape, Shape] | None:
    """Return start and shape of what is shown of the elements held of each dim; None where that is no single box.

    >>> pattern, sizes = parse("(heads head_dim) embed"), {"heads": 4, "head_dim": 2, "embed": 3}
    >>> shown_box(pattern, ["q"], lambda _, dim: sizes[dim], lambda dim: (2, 1) if dim == "heads" else (0, sizes[dim]))
    ((4, 0), (2, 3))
    """
    found = {tuple(_run(node, part, size, held) for node in pattern.dims) for part in parts}
    runs = found.pop()
    if found or any(run is None for run in runs):
        return None
    return tuple(run[0] for run in runs if run), tuple(run[1] for run in runs if run)


def _run(node: Node, part: str, size: SizeOf, held: Callable[[str], Run]) -> Run | None:
    match node:
        case Product(factors):
            start, count = 0, 1
            for factor in factors:
                n, run = length(factor, part, size), _run(factor, part, size, held)
                if run is None or (count > 1 and run != (0, n)):
                    return None
                start, count = start * n + run[0], count * run[1]
            return start, count
        case Sum(terms):
            whole = all(_run(p, name, size, held) == (0, length(p, name, size)) for name, p in terms)
            return (0, length(node, part, size)) if whole else None
        case _:
            return held(node.name)


def find(pattern: Pattern, part: str, pieces: Pieces, lead: int, shape: Shape, size: SizeOf, held: SizeOf | None = None) -> Pieces:
    """Return a part of a stored array, in its elementary dims.

    The first `lead` dims of `pieces` (layers and experts, from names) are kept in front; `shape` is that of the others. `held`
    gives the sizes by which the dims are laid out, where that is longer than `size`: each is then padded at its own end.
    """
    dim = lead
    for product, stored in zip(pattern.dims, shape, strict=True):
        pieces, dim = _find(product, part, pieces, dim, stored, size, held or size)
    return pieces


def _find(product: Product, part: str, pieces: Pieces, dim: int, stored: int, size: SizeOf, held: SizeOf) -> tuple[Pieces, int]:
    want = length(product, part, held)
    if stored > want:  # padding; that only padded dims may be longer was checked before
        pieces = pieces.narrow(dim, 0, want)
    pieces = pieces.split(dim, [length(f, part, held) for f in product.factors])
    for factor in product.factors:
        if isinstance(factor, Sum):
            pieces, dim = _find_term(factor, part, pieces, dim, size, held)
        elif isinstance(factor, Product):
            pieces, dim = _find(factor, part, pieces, dim, length(factor, part, held), size, held)
        else:
            n = length(factor, part, size)
            if n < length(factor, part, held):
                pieces = pieces.narrow(dim, 0, n)
            dim += 1
    return pieces, dim


def _find_term(node: Sum, part: str, pieces: Pieces, dim: int, size: SizeOf, held: SizeOf) -> tuple[Pieces, int]:
    at = 0
    for name, product in node.terms:
        n = length(product, name, held)
        if name == part:
            return _find(product, part, pieces.narrow(dim, at, at + n), dim, n, size, held)
        at += n
    raise AssertionError(f"{part} is not in {node}")


def fuse(pattern: Pattern, tables: Mapping[str, Pieces], lead: int, size: SizeOf) -> Pieces:
    """Lay parts, each in its elementary dims in stored order, into one stored array: the way back from `find`."""
    laid = []
    for part, pieces in tables.items():
        dim = lead
        for product in pattern.dims:
            pieces = _lay(product, part, pieces, dim, size)
            dim += 1
        laid.append(pieces)
    return union(laid)


def _lay(product: Product, part: str, pieces: Pieces, dim: int, size: SizeOf) -> Pieces:
    for i, factor in enumerate(product.factors):
        at = dim + i
        if isinstance(factor, Product):
            pieces = _lay(factor, part, pieces, at, size)
        elif isinstance(factor, Sum):
            pieces = _lay_term(factor, part, pieces, at, size)
    return pieces.merge(dim, [length(f, part, size) for f in product.factors])


def _lay_term(node: Sum, part: str, pieces: Pieces, dim: int, size: SizeOf) -> Pieces:
    at = 0
    for name, product in node.terms:
        if name == part:
            pieces = _lay(product, part, pieces, dim, size)
            start = [0] * pieces.ndim
            start[dim] = at
            return pieces.place(start)
        at += length(product, name, size)
    raise AssertionError(f"{part} is not in {node}")


# --- tables -----------------------------------------------------------------------------------------------------------


_DIGITS = re.compile(r"\d+")
_ALL_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_FAMILIES = re.compile(r"^\s*families\s+([^#\n]*)", re.MULTILINE)
_COUNTED = re.compile(r"\{(\w+)(?:\+(\d+))?\}")
"""What stands in a name for a number that counts a dim, from 0 or from another number."""

_BEHIND = re.compile(r"\{=(\w+)(?:\+(\d+))?\}")
"""What stands for a dim's size, or a number behind it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: the arrays of one name and what they show."""

    parts: tuple[str, ...]
    name: str
    """With `{layer}`, `{expert}` for the dims that the name counts; `{layer+2}` counts from 2."""
    pattern: Pattern
    where: str
    """`first`, `layers` or `last`: the pipeline stage that holds it."""
    condition: str | None = None
    optional: bool = False
    """Wanted where it is stored, not missed where it is not."""
    older: bool = False
    """Read where it is stored; another line shows the parts as they are written now."""
    only: frozenset[tuple[int, ...]] | None = None
    """The counted indices at which it is, where that differs from index to index: quantised arrays, an adapter's."""

    @property
    def counted(self) -> tuple[str, ...]:
        """The dims that the name counts, in order."""
        return _holes(self.name)[1]

    @property
    def first(self) -> tuple[int, ...]:
        """The numbers from which the name counts them."""
        return _holes(self.name)[2]

    def named(self, index: Sequence[int]) -> str:
        """Return the name at these counted dims."""
        (found, *pieces), _, first = _holes(self.name)
        for i, n, piece in zip(index, first, pieces, strict=True):
            found += f"{i + n}{piece}"
        return found

    def dims_of(self, part: str) -> tuple[str, ...]:
        """Return the dims of a part: those of the name, then those of the pattern."""
        return (*self.counted, *self.pattern.dims_of(part))


@lru_cache(maxsize=4096)
def _holes(name: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """Return what stands around the counted dims of a line's name, the dims, and the numbers from which they count."""
    holes = list(_COUNTED.finditer(name))
    return tuple(_COUNTED.sub("\n", name).split("\n")), tuple(h[1] for h in holes), tuple(int(h[2] or 0) for h in holes)


@dataclass(frozen=True, slots=True)
class Table:
    """How one naming's arrays show the parts of a model family."""

    families: tuple[str, ...]
    """The `model_type`s that it serves."""
    joints: Mapping[str, tuple[str, ...]]
    """Dims made of finer ones: `heads -> (kv_heads, group)`."""
    sizes: Mapping[str, str]
    """Dim -> the expression that computes its size from the config."""
    lines: tuple[Line, ...]
    ties: tuple[tuple[str, str, str | None], ...]
    """(alias, name that is stored, condition)."""
    ignored: tuple[str, ...] = ()
    """Globs of names that are neither wanted nor unexpected, such as recomputed buffers."""
    prefixes: tuple[str, ...] = ()
    """Prefixes that a stored name may have or lack."""
    spellings: tuple[tuple[str, str], ...] = ()
    """(other, ours): another way in which writers spell a piece of a name, which may have `{}` for a number."""
    asks: tuple[tuple[str, str], ...] = ()
    """(size, question): what the config must say before arrays can be read, and how."""
    transposed: tuple[str, ...] = ()
    """Globs of the names of weights whose dims are `in out`, where the others' are `out in`."""

    def sizes_at(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the dims' sizes, those that the config tells."""
        values: dict[str, Any] = dict(config)
        found = {}
        for dim, text in self.sizes.items():
            n = evaluate(text, values)
            if isinstance(n, str):
                values[dim] = n  # a word that later lines ask about, no size
            elif n is not None:
                if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < LARGEST:
                    raise LayoutError(f"config: {dim} = {text} is {n!r}, a whole number was expected")
                found[dim] = values[dim] = n
        return found

    def numbered(self, sizes: Mapping[str, int]) -> Table:
        """Return the table whose names have numbers for `{=layer+3}`, as far as the sizes are known."""

        def with_numbers(name: str) -> str:
            return _BEHIND.sub(lambda hole: str(sizes[hole[1]] + int(hole[2] or 0)) if hole[1] in sizes else hole[0], name)

        lines = tuple(replace(line, name=with_numbers(line.name)) if "{=" in line.name else line for line in self.lines)
        ties = tuple((with_numbers(alias), with_numbers(name), condition) for alias, name, condition in self.ties)
        return replace(self, lines=lines, ties=ties)

    def needs(self, dim: str) -> str:
        """Say what the config must have for a dim to get its size."""
        return f"{dim} ({self.sizes[dim]})" if dim in self.sizes else dim


def families_in(text: str) -> list[str]:
    """Return the families that a table serves."""
    return [family for line in _FAMILIES.findall(text) for family in line.split()]


def parse_table(text: str) -> Table:
    """Read a table: `families`, `dim = dims`, `dim := size`, sections `first` `layers` `last`, `tie`, `ignore`, `prefix`,
    `spelling`, `ask` and `transposed`.

    A line is `part name pattern [if condition]`; `-` for the part where the pattern names several, `?part` where it may be absent.
    A name may count dims: `layers.{layer}.w`, or from another number than 0: `{layer+2}.w`; `{=layer+3}.w` is the dim's size and 3.
    `<part` is an older form of what another line shows: read where it is stored, never shown or wanted.
    """
    families: list[str] = []
    joints: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, str] = {}
    lines: list[Line] = []
    ties: list[tuple[str, str, str | None]] = []
    ignored: list[str] = []
    prefixes: list[str] = []
    spellings: list[tuple[str, str]] = []
    asks: list[tuple[str, str]] = []
    transposed: list[str] = []
    where = ""
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip() if "#" in raw else raw.strip()
        words = line.split()
        if not words:
            continue
        if line in ("first", "layers", "last"):
            where = line
        elif words[0] == "families":
            families += words[1:]
        elif words[0] == "ignore":
            ignored += words[1:]
        elif words[0] == "prefix":
            prefixes += words[1:]
        elif words[0] == "spelling":
            spellings.append((words[1], words[2]))
        elif words[0] == "ask":
            asks.append((words[1], line.split(None, 2)[2]))
        elif words[0] == "transposed":
            transposed += words[1:]
        elif words[0] == "tie":
            body, _, condition = line[4:].partition(" if ")
            alias, name = (side.strip() for side in body.split(" = "))
            ties.append((alias, name, condition.strip() or None))
        elif words[1] == ":=":
            sizes[words[0]] = line.split(":=", 1)[1].strip()
        elif words[1] == "=":
            joints[words[0]] = tuple(words[2:])
        else:
            lines.append(_parse_line(line, where))
    return Table(
        tuple(families),
        joints,
        sizes,
        tuple(lines),
        tuple(ties),
        tuple(ignored),
        tuple(prefixes),
        tuple(spellings),
        tuple(asks),
        tuple(transposed),
    )


def _parse_line(line: str, where: str) -> Line:
    body, _, condition = line.partition(" if ")
    part, name, *rest = body.split(None, 2)
    pattern = parse(rest[0] if rest else "")
    optional, older, part = part.startswith("?"), part.startswith("<"), part.lstrip("?<")
    named = tuple(pattern.parts())
    if (part == "-") != bool(named):
        raise ValueError(f"table line {line!r}: the part is `-` exactly where the pattern names parts")
    if not where:
        raise ValueError(f"table line {line!r} stands before a section: first, layers or last")
    return Line(named or (part,), name, pattern, where, condition.strip() or None, optional, older)


Place = tuple[Line, tuple[int, ...]]
"""A line, and the counted dims at which it has an array."""


def by_shape(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in their numbers, as most of a model's do."""
    alike: dict[bytes, list[str]] = {}  # bytes are translated in a tenth of the time that an expression takes
    for name in names:
        alike.setdefault(name.encode(errors="surrogatepass").translate(_ALL_ZEROS), []).append(name)
    found: dict[str, list[str]] = {}
    for group in alike.values():
        found.setdefault(_DIGITS.sub("#", group[0]), []).extend(group)
    return found


@dataclass(frozen=True)
class Namer:
    """Finds the line and the counted indices of a stored name."""

    table: Table
    _by_shape: dict[str, list[Line]] = field(default_factory=dict)
    _spellings: list[tuple[re.Pattern[str], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for line in self.table.lines:
            self._by_shape.setdefault(_shape("0".join(_holes(line.name)[0])), []).append(line)
        for other, ours in self.table.spellings:
            self._spellings.append((re.compile(re.escape(other).replace(r"\{\}", r"(\d+)")), ours))

    def find(self, name: str) -> Place | None:
        """Return the line that a name belongs to, with the layer, the expert ... that it counts."""
        return _match(self._by_shape.get(_shape(name), ()), name)

    def locate(self, shapes: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, Place]]:
        """Find names, grouped by shape, in any of their spellings, with or without a prefix; pass over those of no line."""
        for shape, alike in shapes.items():
            if self._lines_for(shape):
                lines = self._by_shape.get(shape, ())
                for name in alike:
                    place = _match(lines, name) or self._respelled(name)
                    if place is not None:
                        yield name, place

    def followed(self, shapes: Mapping[str, Iterable[str]]) -> list[Line]:
        """Return the lines that any of these names, grouped by shape, belongs to."""
        found: dict[int, Line] = {}
        for shape, alike in shapes.items():
            left = {id(line) for line in self._lines_for(shape)}
            for _, (line, _) in self.locate({shape: alike}):
                found[id(line)] = line
                left.discard(id(line))
                if not left:
                    break
        return list(found.values())

    def _respelled(self, name: str) -> Place | None:
        found = self._prefixed(name)
        for other, ours in self._spellings:
            if found is None:
                name = other.sub(lambda m, ours=ours: ours.format(*m.groups()), name)  # type: ignore[misc]  # a str
                found = self._prefixed(name)
        return found

    def _prefixed(self, name: str) -> Place | None:
        found = self.find(name)
        for prefix in self.table.prefixes:
            if found is None:
                found = self.find(prefix + name)
            if found is None and name.startswith(prefix):
                found = self.find(name.removeprefix(prefix))
        return found

    def _lines_for(self, shape: str) -> list[Line]:
        """Return the lines that names of a shape may belong to."""
        shapes = {shape}
        for other, ours in self.table.spellings:
            shapes |= {s.replace(_shape(other), _shape(ours)) for s in shapes}
        heads = [_shape(prefix) for prefix in self.table.prefixes]
        shapes |= {head + s for head in heads for s in shapes} | {s.removeprefix(head) for head in heads for s in shapes}
        return [line for s in shapes for line in self._by_shape.get(s, ())]


@lru_cache(maxsize=4096)
def _expression(name: str) -> re.Pattern[str]:
    """Return what the names of a line's arrays match; compiled when one is looked for, which few of a table's lines ever are."""
    return re.compile(r"(0|[1-9]\d*)".join(map(re.escape, _holes(name)[0])))


def _match(lines: Iterable[Line], name: str) -> Place | None:
    for line in lines:
        match = _expression(line.name).fullmatch(name)
        if match:
            index = tuple(map(int, match.groups()))
            if any(line.first):
                index = tuple(n - first for n, first in zip(index, line.first, strict=True))
            if min(index, default=0) >= 0 and (line.only is None or index in line.only):
                return line, index
    return None


def _shape(name: str) -> str:
    return _DIGITS.sub("#", name.replace("{}", "0"))
