"""Patterns against a plain model in NumPy: parts laid by concatenate and reshape."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from meshload.array import Array, Step
from meshload.errors import LayoutError
from meshload.pattern import Namer, find, fuse, parse, parse_table, refined, shown_shape
from meshload.pieces import Pieces, piece, union
from meshload.testing import InMemory, ramp, same_bits

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

Values = Any


@dataclass
class Drawn:
    """A random pattern, spelled, with what the model needs: per stored dim its dims before, in and behind the sum."""

    text: str = ""
    before: list[list[str]] = field(default_factory=list)
    """Per stored dim, the dims in front of the sum; all of them where it has none."""
    behind: list[list[str]] = field(default_factory=list)
    terms: dict[str, list[str]] = field(default_factory=dict)
    at: int = -1
    """The stored dim that holds the sum."""
    padded: int = -1
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        return list(self.terms) or ["w"]

    def dims_of(self, part: str) -> list[str]:
        found = []
        for d in range(len(self.before)):
            found += self.before[d] + (self.terms[part] if d == self.at else []) + self.behind[d]
        return found

    def size(self, part: str, dim: str) -> int:
        return self.sizes[dim]

    def stored(self, values: dict[str, Values], lead: tuple[int, ...]) -> Values:
        """Lay the parts, each in its own dims behind `lead`, into the stored array."""

        def n(dims: list[str]) -> int:
            return math.prod(self.sizes[d] for d in dims)

        if not self.terms:
            return values["w"].reshape((*lead, *(n(dims) for dims in self.before)))
        wide = []
        for part, term in self.terms.items():
            shape: list[int] = list(lead)
            for d in range(len(self.before)):
                shape += [n(self.before[d])] + ([n(term)] if d == self.at else []) + [n(self.behind[d])]
            wide.append(values[part].reshape(shape))
        laid = np.concatenate(wide, axis=len(lead) + 2 * self.at + 1)
        total = sum(n(term) for term in self.terms.values())
        shown = [n(self.before[d]) * (total if d == self.at else 1) * n(self.behind[d]) for d in range(len(self.before))]
        return laid.reshape((*lead, *shown))


@st.composite
def patterns(draw: st.DrawFn, zero: bool = True) -> Drawn:
    drawn, names = Drawn(), iter("abcdefghijklmnopqrstuvwxyz")

    def dims(most: int) -> list[str]:
        return [f"dim_{next(names)}" for _ in range(draw(st.integers(0, most)))]

    def spelled(words: list[str]) -> str:
        if len(words) > 1 and draw(st.booleans()):
            k = draw(st.integers(1, len(words)))
            return " ".join(["(" + " ".join(words[:k]) + ")", *words[k:]])
        return " ".join(words)

    count = draw(st.integers(0, 3))
    drawn.at = draw(st.integers(-1, count - 1))
    drawn.padded = draw(st.integers(-1, count - 1))
    words = []
    for d in range(count):
        if d == drawn.padded and d != drawn.at:
            drawn.before.append([f"dim_{next(names)}"])
            drawn.behind.append([])
            words.append(drawn.before[d][0] + "~")
            continue
        drawn.before.append(dims(2))
        drawn.behind.append(dims(2) if d == drawn.at else [])
        inner = [spelled(drawn.before[d])]
        if d == drawn.at:
            shared = dims(1)
            for part in ("q", "k", "v")[: draw(st.integers(2, 3))]:
                drawn.terms[part] = shared * draw(st.integers(0, 1)) + dims(2)
            inner.append("(" + " + ".join(" ".join([p, *t]) for p, t in drawn.terms.items()) + ")")
        inner.append(spelled(drawn.behind[d]))
        words.append("(" + " ".join(w for w in inner if w) + ")")
    if drawn.padded == drawn.at:
        drawn.padded = -1
    drawn.text = " ".join(words)
    used = {dim for part in drawn.parts for dim in drawn.dims_of(part)}
    drawn.sizes = {dim: draw(st.integers(0 if zero and not draw(st.integers(0, 9)) else 1, 3)) for dim in sorted(used)}
    return drawn


def stored_in_two(values: Values, at: int) -> Pieces:
    """Return where an array's elements lie, in two files that cut its first dim."""
    if not values.ndim:
        return piece(InMemory("a", values.tobytes()), 0, (), values.itemsize)
    low, high = values[:at], values[at:]
    return union(
        [
            piece(InMemory("a", low.tobytes()), 0, low.shape, values.itemsize),
            piece(InMemory("b", b"xy" + high.tobytes()), 2, high.shape, values.itemsize).place((at,) + (0,) * (values.ndim - 1)),
        ]
    )


@settings(max_examples=150)
@given(st.data(), patterns())
def test_parts_are_found_and_laid_back(data: st.DataObject, drawn: Drawn) -> None:
    pattern = parse(drawn.text)
    assert [pattern.dims_of(p) for p in drawn.parts] == [drawn.dims_of(p) for p in drawn.parts]
    lead = tuple(data.draw(st.lists(st.integers(1, 2), max_size=2)))
    shapes = {p: (*lead, *(drawn.sizes[d] for d in drawn.dims_of(p))) for p in drawn.parts}
    values = {p: ramp(p, shape) for p, shape in shapes.items()}
    whole = drawn.stored(values, lead)
    assert shown_shape(pattern, drawn.parts, drawn.size) == whole.shape[len(lead) :]
    longer = whole
    if drawn.padded >= 0:
        more = list(whole.shape)
        more[len(lead) + drawn.padded] = data.draw(st.integers(0, 2))
        longer = np.concatenate([whole, ramp("padding", tuple(more))], axis=len(lead) + drawn.padded)
    pieces = stored_in_two(longer, data.draw(st.integers(0, longer.shape[0] if longer.ndim else 0)))
    found = {p: find(pattern, p, pieces, len(lead), longer.shape[len(lead) :], drawn.size) for p in drawn.parts}
    for part, table in found.items():
        assert same_bits(Array(part, np.dtype("f4"), shapes[part], table), values[part]), part
    laid = fuse(pattern, found, len(lead), drawn.size)
    assert same_bits(Array("fused", np.dtype("f4"), whole.shape, laid), whole)


@given(patterns())
def test_a_pattern_reads_its_own_spelling(drawn: Drawn) -> None:
    pattern = parse(drawn.text)
    again = parse(str(pattern))
    assert str(again) == str(pattern)
    assert [again.dims_of(p) for p in drawn.parts] == [pattern.dims_of(p) for p in drawn.parts]


SIZES = {"kv_heads": 2, "group": 3, "head_dim": 4, "embed": 5, "ffn": 6}


def laid(text: str, values: dict[str, Values]) -> Values:
    pattern = parse(text)
    tables = {p: piece(InMemory(p, v.tobytes()), 0, v.shape, v.itemsize) for p, v in values.items()}
    shape = shown_shape(pattern, list(values), lambda _, d: SIZES[d])
    return np.asarray(Array("w", np.dtype("f4"), shape, fuse(pattern, tables, 0, lambda _, d: SIZES[d])))


def test_fused_qkv_of_megatron_lies_per_kv_head() -> None:
    q, k, v = ramp("q", (2, 3, 4, 5)), ramp("k", (2, 4, 5)), ramp("v", (2, 4, 5))
    found = laid("(kv_heads (q group + k + v) head_dim) embed", {"q": q, "k": k, "v": v})
    heads = [row for h in range(2) for row in (*q[h].reshape(12, 5), *k[h], *v[h])]
    assert same_bits(found, np.stack(heads))


def test_gate_lies_over_up_or_in_turns_as_the_pattern_says() -> None:
    gate, up = ramp("gate", (6, 5)), ramp("up", (6, 5))
    assert same_bits(laid("((gate + up) ffn) embed", {"gate": gate, "up": up}), np.concatenate([gate, up]))
    turns = laid("(ffn (gate + up)) embed", {"gate": gate, "up": up})
    assert same_bits(turns[0::2], gate)
    assert same_bits(turns[1::2], up)


def test_a_joint_dim_is_refined() -> None:
    fine = refined(parse("(heads head_dim) embed"), {"heads": ("kv_heads", "group"), "head_dim": ("side", "rot")})
    assert fine.dims_of("-") == ["kv_heads", "group", "side", "rot", "embed"]


def test_parts_that_do_not_fit_into_one_array_are_refused_with_the_shapes() -> None:
    def size(part: str, dim: str) -> int:
        return {("q", "embed"): 5, ("k", "embed"): 6}.get((part, dim), 2)

    with pytest.raises(LayoutError, match=r"the parts q, k do not fit.*\(4, 5\).*\(4, 6\)"):
        shown_shape(parse("((q + k) a) embed"), ["q", "k"], size)


@pytest.mark.parametrize("text", ["out/128 in/128", "(a b)/32 c", "a//8 b", "a (b//8 c)", "a/128@ b"])
def test_blocks_are_read_and_spelled(text: str) -> None:
    assert str(parse(text)) == text


def test_blocks_name_their_dims() -> None:
    assert parse("(heads head_dim)/32 embed//8").dims_of("-") == ["(heads head_dim)/32", "embed//8"]
    assert parse("embed/128@").dims_of("-") == ["embed/128@"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(a b", "unbalanced bracket"),
        ("a b)", "unbalanced bracket"),
        ("a b) c", "unbalanced bracket"),
        ("a-b", "no dim, bracket, plus or block"),
        ("a 7", "no dim, bracket, plus or block"),
        ("a / 128", "no dim, bracket, plus or block"),
        ("(q a + k) (u + v)", "more than one sum"),
        ("((q + k) (u + v))", "more than one sum"),
        ("(q a + q b)", "names a part twice"),
        ("a a", "a dim twice"),
        ("(q a + k) a", "a dim twice"),
        ("(q + )", "begins with its part"),
        ("((a) + b)", "begins with its part"),
        ("/128 a", "blocks of nothing"),
        ("a + b", "unbalanced bracket"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_the_empty_pattern_shows_one_value() -> None:
    pattern = parse("")
    assert (pattern.ndim, pattern.dims_of("-")) == (0, [])


def test_a_step_is_computed_from_sizes() -> None:
    assert parse("embed | * sqrt(head_dim)").step_at({"head_dim": 16}) == Step("*", 4.0)
    assert parse("embed | + 1").step_at({}) == Step("+", 1.0)
    with pytest.raises(LayoutError, match=r"needs head_dim; give it in config="):
        parse("embed | * sqrt(head_dim)").step_at({})


# --- tables -----------------------------------------------------------------------------------------------------------

TABLE = """
families toy
heads = kv_heads group
layer := num_layers
kv_heads := num_kv or num_heads
group := num_heads // kv_heads
prefix model.
ignore *.inv_freq
tie head = tokens if tied
first
tokens   tokens                    vocab embed          # a comment
layers
-        layers.{layer}.qkv        (kv_heads (q group + k + v)) embed
?scale   layers.{layer}.scale      embed                if scaled
expert   layers.{layer}.experts.{expert}.w   ffn embed
last
head     head                      vocab embed
"""


def test_a_table_is_read() -> None:
    table = parse_table(TABLE)
    assert (table.families, table.prefixes, table.ignored) == (("toy",), ("model.",), ("*.inv_freq",))
    assert table.ties == (("head", "tokens", "tied"),)
    assert dict(table.joints) == {"heads": ("kv_heads", "group")}
    assert [(line.parts, line.where, line.optional, line.condition) for line in table.lines] == [
        (("tokens",), "first", False, None),
        (("q", "k", "v"), "layers", False, None),
        (("scale",), "layers", True, "scaled"),
        (("expert",), "layers", False, None),
        (("head",), "last", False, None),
    ]
    assert table.lines[3].dims_of("expert") == ("layer", "expert", "ffn", "embed")


def test_sizes_come_from_the_config_alone() -> None:
    table = parse_table(TABLE)
    assert table.sizes_at({"num_layers": 3, "num_heads": 8, "num_kv": 2}) == {"layer": 3, "kv_heads": 2, "group": 4}
    assert table.sizes_at({"num_heads": 8}) == {"kv_heads": 8, "group": 1}
    assert table.sizes_at({}) == {}
    with pytest.raises(LayoutError, match="layer = num_layers is -1"):
        table.sizes_at({"num_layers": -1})
    with pytest.raises(LayoutError, match="num_heads // kv_heads is 9 / 2"):
        table.sizes_at({"num_heads": 9, "num_kv": 2})


def test_names_are_found_with_what_they_count() -> None:
    namer = Namer(parse_table(TABLE))
    found = namer.find("layers.12.experts.0.w")
    assert found is not None
    assert (found[0].parts, found[1]) == (("expert",), (12, 0))
    for name in ("layers.x.qkv", "layers.01.qkv", "layers.1.qkv.more", "model.tokens", "layers.1.experts.w", "layers.-1.qkv"):
        assert namer.find(name) is None, name


OFFSET = """
layer := num_layers
tie {=layer+4}.head = 0.tokens
layers
w        {layer+2}.w               embed
up       {layer+2}.up              embed
<up      {layer+2}.old_up          embed
last
norm     {=layer+3}.norm           embed
count    last_{=layer}             embed
"""


def test_names_may_count_from_another_number_and_stand_behind_a_dim() -> None:
    table = parse_table(OFFSET)
    sized = table.numbered({"layer": 5})
    assert [line.name for line in sized.lines] == ["{layer+2}.w", "{layer+2}.up", "{layer+2}.old_up", "8.norm", "last_5"]
    assert sized.ties == (("9.head", "0.tokens", None),)
    found = Namer(sized).find("12.w")
    assert found is not None
    assert (found[0].counted, found[1]) == (("layer",), (10,))
    assert found[0].named(found[1]) == "12.w"
    assert found[0].dims_of("w") == ("layer", "embed")
    for name in ("0.w", "1.w", "02.w", "-2.w", "9.norm", "7.norm"):
        assert Namer(sized).find(name) is None, name
    assert Namer(sized).find("2.w") is not None
    assert Namer(sized).find("8.norm") is not None
    assert Namer(table.numbered({})).find("8.norm") is None


def test_an_older_form_is_marked() -> None:
    table = parse_table(OFFSET)
    assert [(line.parts, line.older) for line in table.lines if line.older] == [(("up",), True)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("q  a  (u + v)", "the part is `-` exactly where"),
        ("-  a  u v", "the part is `-` exactly where"),
    ],
)
def test_a_line_whose_part_does_not_fit_is_refused(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_table("first\n" + line)


def test_a_line_before_any_section_is_refused() -> None:
    with pytest.raises(ValueError, match="stands before a section"):
        parse_table("q a b")
