"""The part of YAML that PyYAML's `safe_dump` writes: block mappings and sequences, scalars, and nothing that could run.

Values mean what YAML 1.1 says (https://yaml.org/spec/1.1/), as PyYAML reads them: `yes` is true, `1.0e-06` a number, `0.4.0` text.
Plain and quoted scalars may go on over lines, `{}` and `[]` are empty, `&id001` and `*id001` are the same list or mapping again.
What the writer does not write is refused by name and line: tags, literal blocks, filled flow collections, complex keys, keys that
stand twice. Dates stay text, and keys do.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from meshload.errors import FormatError

DEEPEST = 60
"""Real ones have about ten levels."""

MOST = 5_000_000
"""Values, those behind aliases counted again: a few nested aliases can stand for more than any memory holds."""

LONGEST = 1000
"""Lines of one text."""

_QUOTED_KEY = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*')[ ]*"""
_PLAIN_KEY = r"""(?:[^\s"'#&*!|>%@`{}\[\],?:-]|[?:-](?=\S))(?:[^:#]|:(?=\S)|(?<=\S)\#)*?"""
_KEY = re.compile(rf"(?:{_QUOTED_KEY}|{_PLAIN_KEY}):(?=\s|$)")
_COLON = re.compile(r":(?=\s|$)")
_SIMPLE = re.compile(r"( *)([A-Za-z_][\w./-]*): ([A-Za-z_][\w./-]*)$")
_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_ODD_BREAK = re.compile("[\x85\u2028\u2029]")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{w: True for word in ("yes", "true", "on") for w in (word, word.capitalize(), word.upper())},
    **{w: False for word in ("no", "false", "off") for w in (word, word.capitalize(), word.upper())},
}
_ESCAPES = dict(zip('0abt\tnvfre "\\/N_LP', '\0\a\b\t\t\n\v\f\r\x1b "\\/\x85\xa0\u2028\u2029', strict=True))
_REFUSED = {
    "!": "a tag",
    "|": "a literal block",
    ">": "a folded block",
    "{": "a flow mapping",
    "[": "a flow sequence",
    "%": "a directive",
    "@": "a reserved sign",
    "`": "a reserved sign",
    "?": "a complex key",
}


def loaded(text: str, what: str) -> Any:
    """Return what a document says, in dicts, lists, strings, numbers, booleans and None.

    >>> loaded("a:\\n- 1\\n- b: 1.0e-06\\n  c: {}\\nd: null\\n", "doc")
    {'a': [1, {'b': 1e-06, 'c': {}}], 'd': None}
    """
    reader = _Reader(text, what)
    found = reader.node(0, 0)
    if reader.ahead() is not None:
        reader.refuse("something less or more indented than what stands before it")
    return found


class _Reader:
    """Goes through the lines of a document."""

    def __init__(self, text: str, what: str) -> None:
        self.what = what
        self.lines = text.replace("\r\n", "\n").split("\n")
        self.at = 0
        self.anchors: dict[str, tuple[Any, int]] = {}
        """Name -> the value, and how many values it holds."""
        self.count = 0
        for number, line in enumerate(self.lines):
            if "\r" in line or (not line.isascii() and _ODD_BREAK.search(line)):
                self.at = number
                self.refuse("a line break other than \\n")
        if self.lines and self.lines[0].rstrip() == "---":
            self.at = 1
        while self.lines and self.lines[-1].strip() in ("", "..."):
            self.lines.pop()

    def refuse(self, found: str) -> NoReturn:
        line = min(self.at, max(len(self.lines) - 1, 0)) + 1
        raise FormatError(f"{self.what}: line {line} has {found}, which this reader of PyYAML's files does not know")

    def ahead(self) -> int | None:
        """Skip blank lines and comments; return the indentation of the next line, None at the end."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            bare = line.lstrip(" ")
            if bare[:1] == "\t":
                self.refuse("a tab for indentation")
            if bare and bare[0] != "#":
                return len(line) - len(bare)
            self.at += 1
        return None

    def node(self, least: int, depth: int) -> Any:
        """Read what stands at the next line, if it is indented enough; else it is null."""
        indent = self.ahead()
        if indent is None or indent < least:
            return None
        if depth > DEEPEST:
            self.refuse(f"more than {DEEPEST} levels")
        bare = self.lines[self.at][indent:]
        if _is_item(bare):
            return self.sequence(indent, depth)
        if _KEY.match(bare):
            return self.mapping(indent, depth)
        if bare[:2] in ("? ", "?"):
            self.refuse("a complex key")
        self.at += 1
        return self.value(bare, indent - 1, depth)

    def mapping(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.ahead() == indent:
            begun, line = self.at, self.lines[self.at]
            quick = _SIMPLE.match(line)
            self.at += 1
            value: Any
            if quick is not None and quick[3] not in _WORDS and not self._goes_on(indent):
                key, value = quick[2], quick[3]
            else:
                match = _KEY.match(line, indent)
                if match is None:
                    self.at = begun
                    if line[indent:][:2] in ("? ", "?"):
                        self.refuse("a complex key")
                    break
                key = self._key(match[0][:-1].rstrip())
                value = self.value(line[match.end() :].strip(), indent, depth, items=indent)
            if key in found:
                self.at = begun
                self.refuse(f"the key {key!r} a second time")
            found[key] = value
        return found

    def _goes_on(self, indent: int) -> bool:
        """Say whether the next line is more indented, or blank."""
        following = self.lines[self.at : self.at + 1]
        return bool(following) and (not following[0].strip() or following[0][indent : indent + 1] in (" ", "\t", "#"))

    def _key(self, text: str) -> str:
        if text[0] in "\"'":
            return self._unquoted(text)
        return text

    def sequence(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self.ahead() == indent:
            line = self.lines[self.at]
            if not _is_item(line[indent:]):
                break
            rest = line[indent + 1 :]
            bare = rest.strip()
            if _is_item(bare) or _KEY.match(bare):  # a collection that begins on the line of its dash
                self.lines[self.at] = " " * (indent + 1) + rest
                found.append(self.node(indent + 1, depth + 1))
            else:
                self.at += 1
                found.append(self.value(bare, indent, depth))
        return found

    def value(self, text: str, indent: int, depth: int, items: int | None = None) -> Any:
        """Read a value that begins with `text`, behind a key or dash at `indent`; the lines behind it are still ahead.

        A collection on those lines is more indented, but a sequence below a key may begin at `items`.
        """
        name, text = _named(text)
        before = self.count
        found = self._alias(text[1:]) if text[:1] == "*" else self._unnamed(text, indent, depth, items)
        self.count += 1
        if self.count > MOST:
            self.refuse_last(f"more than {MOST} values")
        if name:
            self.anchors[name] = found, self.count - before
        return found

    def _alias(self, name: str) -> Any:
        if name not in self.anchors:
            self.refuse_last(f"*{name}, which no value before it is named")
        found, count = self.anchors[name]
        self.count += count
        return found

    def _unnamed(self, text: str, indent: int, depth: int, items: int | None) -> Any:
        if not text or text[0] == "#":
            below = self.ahead()
            is_at = below is not None and below == items and _is_item(self.lines[self.at][below:])
            return self.node(indent if is_at else indent + 1, depth + 1)
        if text in ("{}", "[]"):
            return {} if text == "{}" else []
        if text[0] in "\"'":
            return self._unquoted(self._whole_quoted(text))
        if text[0] in _REFUSED:
            self.refuse_last(f"{_REFUSED[text[0]]} ({text[:20]})")
        return resolved(self._whole_plain(text, indent))

    def refuse_last(self, found: str) -> NoReturn:
        self.at -= 1
        self.refuse(found)

    def _whole_plain(self, text: str, indent: int) -> str:
        """Join a plain scalar with the more indented lines that go on with it."""
        found = _uncommented(text)
        if _COLON.search(found):
            self.refuse_last("a colon in the midst of a text")
        if found != text:
            return found
        breaks = 0
        while self.at < len(self.lines):
            line = self.lines[self.at]
            bare = line.strip()
            if bare and (len(line) - len(line.lstrip(" ")) <= indent or bare[0] == "#"):
                break
            if bare:
                if _COLON.search(bare):
                    self.refuse("a colon in the midst of a text")
                found += ("\n" * breaks or " ") + bare
            breaks = 0 if bare else breaks + 1
            self.at += 1
        return found

    def _whole_quoted(self, text: str) -> str:
        """Join a quoted scalar with the lines up to its closing quote, line breaks folded."""
        begun, breaks = self.at, 0
        while not _is_closed(text):
            if self.at == len(self.lines):
                self.at = begun
                self.refuse_last("a quote that is never closed")
            if self.at - begun > LONGEST:
                self.refuse_last(f"a text of more than {LONGEST} lines")
            bare = self.lines[self.at].strip(" \t")
            self.at += 1
            if not bare:
                breaks += 1
                continue
            escaped = text[0] == '"' and re.search(r"(?<!\\)(?:\\\\)*\\$", text) is not None and not breaks
            text = text[:-1] + bare if escaped else text + ("\n" * breaks or " ") + bare
            breaks = 0
        end = _closing(text)
        if text[end:].strip() and not text[end:].lstrip().startswith("#"):
            self.refuse_last(f"{text[end:].strip()[:20]!r} behind a closing quote")
        return text[:end]

    def _unquoted(self, text: str) -> str:
        if text[0] == "'":
            return text[1:-1].replace("''", "'")

        def escaped(match: re.Match[str]) -> str:
            code = match[1]
            if code[0] in "xuU":
                if len(code) == 1 or int(code[1:], 16) > 0x10FFFF:
                    self.refuse_last(f"the escape \\{code}, which is no character")
                return chr(int(code[1:], 16))
            if code not in _ESCAPES:
                self.refuse_last(f"the escape \\{code}")
            return _ESCAPES[code]

        return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", escaped, text[1:-1], flags=re.DOTALL)


def _is_item(bare: str) -> bool:
    return bare[:2] == "- " or bare == "-"


def _named(text: str) -> tuple[str, str]:
    """Return the anchor in front of a value, and the rest."""
    match = re.match(r"&([\w-]+)(?:\s+|$)", text)
    return (match[1], text[match.end() :]) if match else ("", text)


def _uncommented(text: str) -> str:
    return re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def _closing(text: str) -> int:
    """Return where a quoted scalar ends, behind its quote; 0 where it does not."""
    match = re.match(r"'(?:[^']|'')*'(?!')" if text[0] == "'" else r'"(?:[^"\\]|\\.)*"', text, re.DOTALL)
    return match.end() if match else 0


def _is_closed(text: str) -> bool:
    return _closing(text) > 0


def resolved(text: str) -> Any:
    """Return what a plain scalar means: null, a boolean, a number, or text.

    >>> [resolved(word) for word in ("no", "1_000", "0x10", "1.0e-06", "1e3", ".inf", "0.4.0")]
    [False, 1000, 16, 1e-06, '1e3', inf, '0.4.0']
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INT.match(text):
        digits = text.replace("_", "")
        sign, digits = (digits[0], digits[1:]) if digits[0] in "+-" else ("", digits)
        base = {"0x": 16, "0b": 2}.get(digits[:2], 8 if len(digits) > 1 and digits[0] == "0" else 10)
        try:
            number = int(digits[2:] if base in (2, 16) else digits, base)
        except ValueError:  # no digit at all, or thousands
            return text
        return -number if sign == "-" else number
    if _FLOAT.match(text):
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
