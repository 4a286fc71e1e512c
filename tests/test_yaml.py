"""The YAML reader against PyYAML: all that its `safe_dump` writes, and nothing that it would refuse."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshload.errors import FormatError
from meshload_adapters._yaml import MOST, loaded

yaml = pytest.importorskip("yaml", reason="PyYAML, which writes these files, is not installed")

GOLDEN = Path(__file__).resolve().parent / "golden" / "fast_llm"

# What looks like another kind of value, or like a sign, unless it is quoted; and long texts, which are folded over lines.
ODD = [
    "",
    " ",
    "null",
    "~",
    "yes",
    "No",
    "on",
    "1",
    "010",
    "0x1",
    "0o7",
    "1_0",
    "1e3",
    "1.0e-3",
    ".inf",
    ".nan",
    "-",
    "--",
    "?",
    "- a",
]
ODD += [
    "a: b",
    "a:b",
    "a #b",
    "a# b",
    "=",
    "<<",
    "x\n",
    "\nx",
    "a\n\nb",
    "---",
    "...",
    "'",
    '"',
    "\\",
    "0.4.0",
    "{}",
    "[]",
    "&a",
    "*a",
    "!t",
    "|",
]
WORDS = st.lists(st.sampled_from(["abc", "d:e", "-f", "#g", "'h'", '"i"', "j-k", "l.m"]), max_size=40).map(" ".join)
TEXTS = st.sampled_from(ODD) | st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029"), max_size=12) | WORDS
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./-]{0,20}", fullmatch=True).filter(lambda k: k.lower() not in yaml_words())
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20)


def yaml_words() -> set[str]:
    """Keys stay text; PyYAML makes these something else."""
    return {"null", "yes", "no", "on", "off", "true", "false", "y", "n", ""}


@given(TREES, st.booleans())
def test_what_pyyaml_writes_is_read_as_it_was(tree: Any, unicode: bool) -> None:
    assert loaded(yaml.safe_dump(tree, allow_unicode=unicode), "it") == tree


@given(st.lists(SCALARS, max_size=3), st.booleans())
def test_what_stands_twice_is_the_same_again(values: list[Any], nested: bool) -> None:
    tree = {"one": values, "two": [values, values] if nested else values, "three": {"four": values}}
    assert loaded(yaml.safe_dump(tree), "it") == tree


@given(st.text(st.sampled_from("ab:- #'\"\\{}[],&*!|>%@`?~=\t\n0.1"), max_size=40))
def test_what_pyyaml_refuses_or_reads_otherwise_is_not_read(text: str) -> None:
    """Where both read something, they read the same."""
    try:
        found = loaded(text, "it")
    except FormatError:
        return
    try:
        expected = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return
    assert found == expected or any(c in text for c in "0123456789?")  # dates, base 60, keys that are numbers


@pytest.mark.parametrize("file", sorted(GOLDEN.rglob("metadata.yaml")), ids=lambda p: "/".join(p.parts[-3:-1]))
def test_real_files_are_read_as_pyyaml_does(file: Path) -> None:
    text = file.read_text()
    assert loaded(text, file.name) == yaml.safe_load(text)
    assert loaded(f"---\n# a comment\n{text}...\n".replace("\n", "\r\n"), file.name) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [true]\n", r"line 1 has a tag \(!!python"),
        ("a: 1\nb: |\n  text\n", "line 2 has a literal block"),
        ("b: >-\n  text\n", "line 1 has a folded block"),
        ("a: {b: c}\n", "a flow mapping"),
        ("a: [1, 2]\n", "a flow sequence"),
        ("? a\n: b\n", "line 1 has a complex key"),
        ("a: 1\n? b\n: c\n", "line 2 has a complex key"),
        ("a: 1\nb: 2\na: 3\n", "line 3 has the key 'a' a second time"),
        ("a: *b\n", r"\*b, which no value before it is named"),
        ("a: &b\n- *b\n", r"\*b, which no value before it is named"),
        ("a: 'b\n", "a quote that is never closed"),
        ("a: 'b' c\n", "'c' behind a closing quote"),
        ('a: "\\q"\n', r"the escape \\q"),
        ('a: "\\UFFFFFFFF"\n', "which is no character"),
        ("a: b: c\n", "a colon in the midst of a text"),
        ("a:\n\t- b\n", "a tab for indentation"),
        ("a: 1\n  b: 2\n", "a colon in the midst of a text"),
        ("a:\n  b: 1\n c: 2\n", "less or more indented"),
        ("a: 1\rb: 2\n", "a line break other than"),
        ("a: x\u2028y\n", "a line break other than"),
        ("- " * 200 + "a\n", "more than 60 levels"),
        ("".join("  " * i + "a:\n" for i in range(200)), "more than 60 levels"),
        ("a: 'b" + "\n" * 1500 + "'\n", "a text of more than 1000 lines"),
    ],
)
def test_what_it_does_not_know_is_refused_by_line(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=rf"^it: (line [1-9]\d* has .*)?{words}"):
        loaded(text, "it")


def test_a_few_lines_cannot_stand_for_more_than_memory_holds() -> None:
    laughs = "a0: &a0\n" + "- x\n" * 10
    for i in range(1, 12):
        laughs += f"a{i}: &a{i}\n" + f"- *a{i - 1}\n" * 10
    with pytest.raises(FormatError, match=f"more than {MOST} values"):
        loaded(laughs, "it")


@pytest.mark.parametrize(
    "text", ["a" + " " * 200_000, "'" * 200_001, '"' + "\\" * 200_001, "::" * 100_000, "a #" * 60_000, "&a " * 60_000]
)
def test_no_text_takes_long(text: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(FormatError):
        loaded(text, "it")
    assert time.process_time() - begin < 2
