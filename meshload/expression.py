"""An expression in a model table: a size or a condition, computed from a model's config.

`num_key_value_heads or num_attention_heads` takes the first that is there; a key that the config lacks is None. Divisions must
be exact. Only names, numbers, strings, arithmetic, comparisons, `and`, `or`, `not`, `in`, `x if c else y`, `sqrt` and `len` exist.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .errors import LayoutError

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda x, y: x in _list(y),
    ast.NotIn: lambda x, y: x not in _list(y),
}


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression, None where what it needs is not there.

    >>> evaluate("head_dim or hidden_size // heads", {"hidden_size": 64, "heads": 4})
    16
    """
    try:
        return _value(_parsed(text), values)
    except (TypeError, ZeroDivisionError):
        return None


@lru_cache(maxsize=4096)
def needed(text: str) -> tuple[str, ...]:
    """Return the config keys that an expression mentions, sorted."""
    return tuple(sorted({node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)} - {"sqrt", "len"}))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values.get(name)
        case ast.BoolOp(op=ast.Or(), values=terms):
            return _first(terms, values, stop_at=True)
        case ast.BoolOp(op=ast.And(), values=terms):
            return _first(terms, values, stop_at=False)
        case ast.UnaryOp(op=ast.Not(), operand=term):
            return not _value(term, values)
        case ast.UnaryOp(op=ast.USub(), operand=term):
            return -_value(term, values)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _exact(_value(left, values), _value(right, values), ast.unparse(node))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            sides = _value(left, values), _value(right, values)
            if any(isinstance(side, (str, list)) for side in sides):
                raise LayoutError(f"config: {ast.unparse(node)} is of {sides[0]!r} and {sides[1]!r}; numbers were expected")
            return _BINARY[type(op)](*sides)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_value(left, values), _value(right, values))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test, values) else other, values)
        case ast.Tuple(elts=terms) | ast.List(elts=terms):
            return tuple(_value(term, values) for term in terms)
        case ast.Subscript(value=value, slice=index):
            return _item(_value(value, values), _value(index, values))
        case ast.Call(func=ast.Name(id="sqrt"), args=[term]):
            return math.sqrt(_value(term, values))
        case ast.Call(func=ast.Name(id="len"), args=[term]):
            return len(_value(term, values))
    raise ValueError(f"a table cannot say {ast.unparse(node)!r}")


def _first(terms: list[ast.expr], values: Mapping[str, Any], *, stop_at: bool) -> Any:
    found = None
    for term in terms:
        try:
            found = _value(term, values)
        except (TypeError, ZeroDivisionError):
            found = None
        if bool(found) is stop_at:
            break
    return found


def _list(value: Any) -> Any:
    if value and not isinstance(value, (list, tuple)):
        raise LayoutError(f"config: a list was expected, found {value!r}")
    return value or ()


def _item(value: Any, index: Any) -> Any:
    try:
        return value[index]
    except (IndexError, KeyError):
        return None


def _exact(a: Any, b: Any, text: str) -> int:
    if a % b:
        raise LayoutError(f"config: {text} is {a} / {b}, which is no whole number")
    return int(a // b)
