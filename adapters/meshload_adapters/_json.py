"""JSON from strangers: read as strictly as safetensors reads it, with no name twice, no NaN, and no nesting that hurts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from meshload.checkpoint import Problem
from meshload.errors import FormatError
from meshload.source import Folder, read_bytes


def parsed(raw: bytes, what: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """Parse a JSON object as strictly as the reference library does, and refuse a name that stands twice."""
    try:
        text = raw.decode()
        if not text.lstrip(" \t\r\n").startswith("{"):  # before lists of millions are made
            raise FormatError(f"{what}: a JSON object was expected, found {text[:20]!r}")
        integer = _integer if "-0" in text else None
        found = json.loads(text, object_pairs_hook=hook or unique, parse_constant=_refused, parse_int=integer)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # raises on half a surrogate pair
    except UnicodeError as error:
        raise FormatError(f"{what}: not UTF-8: {error}") from error
    except RecursionError as error:
        raise FormatError(f"{what}: JSON nested too deeply") from error
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{what}: not JSON as expected: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what}: describes one tensor without a name, expected is an object of tensors")
    return found


def read_object(folder: Folder, file: str, limit: int) -> dict[str, Any]:
    """Return the object in a file of at most `limit` bytes."""
    source = folder.file(file)
    if source.size > limit:
        raise FormatError(f"{file}: has {source.size} bytes, at most {limit} were expected")
    return parsed(read_bytes(source), file)


def read_config(folder: Folder, limit: int) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    """Return the model's config, where one lies beside the data; a damaged one is a problem, as the arrays can do without."""
    if not folder.has("config.json"):
        return None, ()
    try:
        return read_object(folder, "config.json", limit), ()
    except FormatError as error:
        return None, (Problem(f"{error}; the model's config is not known", file="config.json"),)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)


def short(found: Any) -> str:
    if isinstance(found, dict):
        return f"an object with {len(found)} names"
    text = repr(found[:40] if isinstance(found, list | str) else found)
    return text if len(text) < 100 else f"{text[:100]} ..."
