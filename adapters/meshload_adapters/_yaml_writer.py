"""YAML as PyYAML's `safe_dump` writes it, in blocks and by sorted keys: the mirror of `_yaml.py`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_NOT_TEXT = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
"""Plain words that YAML 1.1 takes for something else."""


def dumped(value: Any) -> str:
    """Return a document of dicts with keys of text, lists, strings, numbers, booleans and None.

    >>> print(dumped({"b": [1, "0.4.0"], "a": {"x": 1e-06, "z": None}}), end="")
    a:
      x: 1.0e-06
      z: null
    b:
    - 1
    - '0.4.0'
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _entry(f"{_scalar(key)}:", value[key])
    elif isinstance(value, (list, tuple)) and value:
        for item in value:
            first, *more = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in more)
    else:
        yield _scalar(value)


def _entry(head: str, value: Any) -> Iterator[str]:
    """Go through the lines of a key; a list stands below it without indent."""
    if isinstance(value, Mapping) and value:
        yield head
        yield from (f"  {line}" for line in _lines(value))
    elif isinstance(value, (list, tuple)) and value:
        yield head
        yield from _lines(value)
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT
        return value if is_plain else f"'{value.replace(chr(39), 2 * chr(39))}'" if value.isprintable() else json.dumps(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, (list, tuple)):
        return "[]"
    raise TypeError(f"{type(value).__name__} has no place in YAML")


def _number(value: float) -> str:
    """Return a float as YAML 1.1 knows one: with a point, also before an exponent."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    digits, e, exponent = repr(value).partition("e")
    return f"{digits}{'' if '.' in digits else '.0'}{e}{exponent}"
