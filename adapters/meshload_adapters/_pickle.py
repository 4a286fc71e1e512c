"""The one inert unpickler: it imports nothing and calls nothing that a pickle names, whoever wrote it.

A pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html lists its opcodes, protocols 0 to
5). The machine here is our own, so that no rule of it is left to a library: a name becomes a `Global`, and calling one becomes
a `Record`, which keeps what it was called with, unless the name stands in a table of harmless constructors: Python's plain
values, NumPy's scalars, and what the caller adds as `known`. Containers come out plain: an `OrderedDict` is a dict, and loses the
attributes that were set on it; a `torch.Size` is a tuple. NumPy's arrays and dtypes are records, which `ndarray_of` reads.

Hostile pickles end in a `FormatError`. Time and memory are linear in the bytes of the pickle: declared lengths are checked against
it, a memo is a dict, integers and text numbers are short. What comes out can be walked recursively: it has no cycles, at most
`DEPTH` levels, and at most `UNFOLDED` nodes where what is shared is counted each time. The attributes of foreign objects are
set (`BUILD`) only in records, extension codes and out-of-band buffers are refused.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.errors import FormatError
from meshload.source import METADATA_LIMIT, ByteSource, read_bytes

DEPTH = 200
"""Levels of nesting; real checkpoints have less than 30, and Python's own limit of recursion is 1000."""

UNFOLDED = 1 << 26
"""Nodes, where those that are shared are counted each time that they are met."""

MARKS = 1 << 10
"""Containers that are being filled at one time; each level of nesting has one or two."""

STACK = 1 << 22
"""Values that wait on the stack. Pickles of Python write lists and dicts in runs of 1000."""

NUMBER = 1 << 10
"""Bytes of an integer, or characters of a number in text."""

KEY = 1 << 10
"""Nodes of a tuple that is a key: hashing one takes as long as it unfolds, and recurses without a limit."""

FIRST_WINDOW = 1 << 12
"""Bytes that are read first of a pickle whose length is not known."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


def _nothing() -> Mapping[Any, Any]:
    return _NONE


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that is named, and not called."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Record:
    """An inert stand-in for an instance of a class, or for the result of a function, that nobody imported."""

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[Any, Any] = field(default_factory=_nothing)
    state: Any = None
    """What its `__setstate__` would have been given; usually a dict of its attributes."""
    items: Sequence[Any] = ()
    """What was appended, where it is a kind of list."""
    entries: Mapping[Any, Any] = field(default_factory=_nothing)
    """What was set by key, where it is a kind of dict."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute from the state, be it a dict or the pair of dicts of a class with slots."""
        for attributes in self.state if type(self.state) is tuple else (self.state,):
            if type(attributes) is dict and name in attributes:
                return attributes[name]
        return default


Known = Mapping[tuple[str, str], Callable[..., Any]]
"""Constructors by module and name; each checks its own arguments, which may be anything."""

Persistent = Callable[[Any], Any]

Shortcut = Callable[[Global, bytes, int, dict[int, Any]], "tuple[list[Any], int] | None"]
"""Reads many objects of a class at once. It is asked where one of them is made without arguments, with the class, the pickle, the
place behind that opcode, and the memo. It returns what the opcodes up to another place leave on the stack, and that place, and
has added to the memo what they add; or None, and the machine goes on itself."""


def unpickle(
    data: bytes | memoryview,
    *,
    persistent: Persistent | None = None,
    known: Known = _NONE,
    shortcuts: Mapping[tuple[str, str], Shortcut] = _NONE,
    name: str = "pickle",
) -> Any:
    """Return the object of a pickle that fills `data`; `persistent` gives the object of a persistent id.

    >>> unpickle(b"cos\\nsystem\\n(S'true'\\ntR.")
    Record(module='os', name='system', args=('true',), kwargs=mappingproxy({}), state=None, items=(), entries=mappingproxy({}))
    """
    machine = _Machine(bytes(data), persistent, known, name)
    machine.shortcuts = shortcuts
    found = machine.run()
    if machine.at != len(data):
        raise FormatError(f"{name}: the pickle ends at byte {machine.at}, but {len(data)} are there")
    return found


def unpickle_at(
    source: ByteSource, start: int, limit: int, *, persistent: Persistent | None = None, known: Known = _NONE
) -> tuple[Any, int]:
    """Return the object of a pickle that begins at `start` and ends somewhere before `limit`, and where it ends.

    Its length is stored nowhere, so it is read in windows, each as large as all before it.
    """
    limit = min(limit, source.size, start + METADATA_LIMIT)
    stop = max(start, min(start + FIRST_WINDOW, limit))
    machine = _Machine(read_bytes(source, start, stop), persistent, known, source.name)
    while True:
        try:
            return machine.run(), start + machine.at
        except _Truncated:
            if stop >= limit:
                raise
        more = min(2 * stop - start, limit)
        machine.data += read_bytes(source, stop, more)
        stop = more


def ndarray_of(found: Any) -> NDArray[Any] | None:
    """Return the NumPy array that a record stands for; None for another object, for a dtype of objects, or where bytes lack.

    The array is a copy.
    """
    if not isinstance(found, Record):
        return None
    if found.name == "_reconstruct" and type(found.state) is tuple and len(found.state) == 5:
        _, shape, kind, fortran, raw = found.state
    elif found.name == "_frombuffer" and len(found.args) == 4:
        raw, kind, shape, fortran = found.args[0], found.args[1], found.args[2], found.args[3] == "F"
    else:
        return None
    dtype, raw = _dtype_of(kind), raw.encode() if type(raw) is str else raw
    if dtype is None or not isinstance(raw, bytes | bytearray) or type(shape) is not tuple:
        return None
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or len(shape) > 32:
        return None
    if math.prod(shape) * dtype.itemsize != len(raw) or math.prod(n or 1 for n in shape) > 1 << 40:
        return None
    return np.frombuffer(bytes(raw), dtype).reshape(shape, order="F" if fortran else "C").copy() if raw else np.zeros(shape, dtype)


# --- the machine ------------------------------------------------------------------------------------------------------


class _Truncated(FormatError):
    """The pickle goes on beyond the bytes that there are."""


class _Stop(Exception):
    """The pickle has ended."""


_ONE_BYTE = b"hq"
"""Opcodes whose handlers index the byte behind them: there may be none."""

_MISTAKES = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, struct.error)
"""What a malformed pickle makes the handlers and constructors raise."""


class _Machine:
    """A stack, a memo and a place in the pickle."""

    __slots__ = ("at", "data", "known", "marks", "memo", "name", "persistent", "shortcuts", "stack")

    def __init__(self, data: bytes, persistent: Persistent | None, known: Known, name: str) -> None:
        self.data, self.persistent, self.name = data, persistent, name
        self.known: Known = {**HARMLESS, **known}
        self.shortcuts: Mapping[tuple[str, str], Shortcut] = _NONE
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.at = 0

    def run(self) -> Any:
        """Run the pickle to its end, and return the object that it leaves.

        Where the data ends first, `_Truncated` is raised, and the run goes on from there once there is more: handlers read
        before they change anything.
        """
        data, operations, at = self.data, _OPERATIONS, self.at
        try:
            while True:
                for _ in repeat(None, 1 << 16):
                    at = operations[data[at]](self, at + 1)
                if len(self.stack) > STACK:
                    raise FormatError(f"{len(self.stack)} values wait on the stack, at most {STACK} are expected")
        except _Stop:
            pass
        except _Truncated:
            self.at = at
            raise
        except FormatError as error:
            raise FormatError(f"{self.name}: pickle, byte {at}: {error}") from error
        except _MISTAKES as error:
            self.at = at
            if isinstance(error, struct.error) or at >= len(data) or (at + 1 == len(data) and data[at] in _ONE_BYTE):
                raise _Truncated(f"{self.name}: the pickle is cut: it goes on beyond its {len(data)} bytes") from None
            raise FormatError(
                f"{self.name}: pickle, byte {at}: opcode {data[at : at + 1]!r} does not fit what is there: "
                f"{type(error).__name__}: {str(error)[:200]}"
            ) from error
        if len(self.stack) != 1 or self.marks:
            raise FormatError(f"{self.name}: pickle, byte {at}: it leaves {len(self.stack)} objects, expected is one")
        self.at = at + 1
        found = self.stack.pop()
        _check_walkable(found, self.name)
        return found

    def take(self, at: int, count: int) -> bytes:
        """Return the next bytes; their count is hostile."""
        stop = at + count
        if stop > len(self.data):
            raise _Truncated(
                f"{self.name}: the pickle is cut, or lies: {count} bytes at {at} were declared, {len(self.data) - at} are left"
            )
        return self.data[at:stop]

    def line(self, at: int) -> tuple[bytes, int]:
        """Return the bytes up to the end of the line, and where the next begins."""
        stop = self.data.find(b"\n", at)
        if stop < 0:
            raise _Truncated(f"{self.name}: the pickle is cut: a line at byte {at} does not end")
        return self.data[at:stop], stop + 1

    def above(self) -> list[Any]:
        """Return the values above the topmost mark, and take them off."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def call(self, what: Any, args: Any, kwargs: Mapping[Any, Any] = _NONE) -> Any:
        """Return what a constructor makes, or a record of the call."""
        if type(args) is not tuple:
            raise FormatError(f"{what} is called with {type(args).__name__}, expected is a tuple")
        if type(what) is Global:
            constructor = self.known.get((what.module, what.name))
            if constructor is None:
                return Record(what.module, what.name, args, kwargs)
            return constructor(*args, **{str(k): v for k, v in kwargs.items()}) if kwargs else constructor(*args)
        if type(what) is Record:
            return Record(what.module, f"{what.name}()", (what, *args), kwargs)
        raise FormatError(f"{type(what).__name__} is called, which is no class or function")


def _check_walkable(root: Any, name: str) -> None:
    """Raise unless an object can be walked recursively in bounded time."""
    if type(root) not in _CONTAINERS:
        return
    levels: dict[int, int] = {}
    nodes: dict[int, int] = {}
    above: set[int] = set()
    todo = [root]
    while todo:
        node, key = todo[-1], id(todo[-1])
        if key in nodes:
            todo.pop()
            continue
        children = _children(node)
        inner = [c for c in children if type(c) in _CONTAINERS]
        if key not in above:
            fresh = [c for c in inner if id(c) not in nodes]
            above.add(key)
            if any(id(c) in above for c in fresh):
                raise FormatError(f"{name}: the pickle holds an object that contains itself")
            if len(above) > DEPTH:
                raise FormatError(f"{name}: the pickle is nested more than {DEPTH} levels deep")
            todo += fresh
            if fresh:
                continue
        todo.pop()
        above.discard(key)
        levels[key] = 1 + max((levels[id(c)] for c in inner), default=0)
        nodes[key] = 1 + len(children) - len(inner) + sum(nodes[id(c)] for c in inner)
        if levels[key] > DEPTH or nodes[key] > UNFOLDED:
            raise FormatError(
                f"{name}: the pickle unfolds to {nodes[key]} objects on {levels[key]} levels, "
                f"at most {UNFOLDED} on {DEPTH} are expected"
            )


def _children(node: Any) -> Sequence[Any]:
    if type(node) is dict:
        return [*node, *node.values()]
    if type(node) is Record:
        return [*node.args, *node.kwargs.values(), node.state, *node.items, *node.entries, *node.entries.values()]
    return node if type(node) is list or type(node) is tuple else list(node)


_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, Record})


def _key(found: Any) -> Any:
    """Return a key of a dict or an element of a set, if hashing and comparing it is cheap."""
    kind = type(found)
    if kind is str:
        return found
    if kind is int and not -(1 << 64) < found < 1 << 64:
        raise FormatError(f"a key is an integer of {found.bit_length()} bits")
    if kind is tuple or kind is frozenset:
        todo, count = [found], 0
        while todo:
            node = todo.pop()
            count += 1
            if count > KEY:
                raise FormatError(f"a key unfolds to more than {KEY} objects")
            if type(node) in (tuple, frozenset):
                todo += node
    return found


# --- opcodes ----------------------------------------------------------------------------------------------------------

# A handler takes the machine and the place behind the opcode, and returns the place of the next one.

_U16, _I32, _U32, _U64, _F64 = (struct.Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))


def _counted(size: struct.Struct, made: Callable[[bytes], Any]) -> Callable[[_Machine, int], int]:
    """Return the handler of a value that is stored as a length and so many bytes."""
    unpack, width = size.unpack_from, size.size

    def handler(machine: _Machine, at: int) -> int:
        data = machine.data
        at += width
        stop: int = at + unpack(data, at - width)[0]
        if stop > len(data):
            machine.take(at, stop - at)
        machine.stack.append(made(data[at:stop]))
        return stop

    return handler


def _fixed(packed: struct.Struct) -> Callable[[_Machine, int], int]:
    """Return the handler of a number of fixed width."""
    unpack, width = packed.unpack_from, packed.size

    def handler(machine: _Machine, at: int) -> int:
        machine.stack.append(unpack(machine.data, at)[0])
        return at + width

    return handler


def _constant(value: Any) -> Callable[[_Machine, int], int]:
    def handler(machine: _Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return handler


def _empty(kind: Callable[[], Any]) -> Callable[[_Machine, int], int]:
    def handler(machine: _Machine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return handler


def _refused(why: str) -> Callable[[_Machine, int], int]:
    def handler(machine: _Machine, at: int) -> int:
        raise FormatError(why)

    return handler


def _utf8(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _python2(raw: bytes) -> str | bytes:
    """Return a string of Python 2, which may be text or bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _integer(raw: bytes) -> int:
    if len(raw) > NUMBER:
        raise FormatError(f"an integer of {len(raw)} bytes, at most {NUMBER} are expected")
    return int.from_bytes(raw, "little", signed=True)


def _short_line(machine: _Machine, at: int) -> tuple[bytes, int]:
    line, at = machine.line(at)
    if len(line) > NUMBER:
        raise FormatError(f"a number of {len(line)} characters, at most {NUMBER} are expected")
    return line, at


def _int(machine: _Machine, at: int) -> int:
    line, at = _short_line(machine, at)
    machine.stack.append(line == b"01" if line in (b"00", b"01") else int(line))
    return at


def _long(machine: _Machine, at: int) -> int:
    line, at = _short_line(machine, at)
    machine.stack.append(int(line.removesuffix(b"L")))
    return at


def _float(machine: _Machine, at: int) -> int:
    line, at = _short_line(machine, at)
    machine.stack.append(float(line))
    return at


def _string(machine: _Machine, at: int) -> int:
    line, at = machine.line(at)
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
        raise FormatError(f"a string without quotes: {line[:40]!r}")
    decode: Any = codecs.escape_decode  # as pickle.py does; typeshed lacks it
    machine.stack.append(_python2(decode(line[1:-1])[0]))
    return at


def _unicode(machine: _Machine, at: int) -> int:
    line, at = machine.line(at)
    machine.stack.append(line.decode("raw-unicode-escape"))
    return at


def _proto(machine: _Machine, at: int) -> int:
    version = machine.take(at, 1)[0]
    if version > 5:
        raise FormatError(f"protocol {version}, known are 0 to 5")
    return at + 1


def _frame(machine: _Machine, at: int) -> int:
    (count,) = _U64.unpack(machine.take(at, 8))
    if count > len(machine.data) - at - 8:
        machine.take(at + 8, count)
    return at + 8


def _stop(machine: _Machine, at: int) -> int:
    raise _Stop


def _mark(machine: _Machine, at: int) -> int:
    machine.marks.append(len(machine.stack))
    if len(machine.marks) > MARKS:
        raise FormatError(f"nested too deeply: {MARKS} marks are open")
    return at


def _pop(machine: _Machine, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return at


def _pop_mark(machine: _Machine, at: int) -> int:
    machine.above()
    return at


def _dup(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _put(machine: _Machine, at: int) -> int:
    line, at = _short_line(machine, at)
    machine.memo[_key(int(line))] = machine.stack[-1]
    return at


def _binput(machine: _Machine, at: int) -> int:
    machine.memo[machine.data[at]] = machine.stack[-1]
    return at + 1


def _long_binput(machine: _Machine, at: int) -> int:
    machine.memo[_U32.unpack_from(machine.data, at)[0]] = machine.stack[-1]
    return at + 4


def _memoize(machine: _Machine, at: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    return at


def _get(machine: _Machine, at: int) -> int:
    line, at = _short_line(machine, at)
    machine.stack.append(machine.memo[int(line)])
    return at


def _binget(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.memo[machine.data[at]])
    return at + 1


def _long_binget(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.memo[_U32.unpack_from(machine.data, at)[0]])
    return at + 4


def _tuple(machine: _Machine, at: int) -> int:
    machine.stack.append(tuple(machine.above()))
    return at


def _tuple1(machine: _Machine, at: int) -> int:
    machine.stack[-1] = (machine.stack[-1],)
    return at


def _tuple2(machine: _Machine, at: int) -> int:
    last = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], last)
    return at


def _tuple3(machine: _Machine, at: int) -> int:
    *_, first, second, third = machine.stack[-3:]
    del machine.stack[-2:]
    machine.stack[-1] = (first, second, third)
    return at


def _list(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.above())
    return at


def _dict(machine: _Machine, at: int) -> int:
    machine.stack.append(_paired(machine.above()))
    return at


def _frozenset(machine: _Machine, at: int) -> int:
    machine.stack.append(frozenset(map(_key, machine.above())))
    return at


def _paired(flat: Sequence[Any]) -> dict[Any, Any]:
    if len(flat) % 2:
        raise FormatError(f"{len(flat)} keys and values do not make pairs")
    return {_key(key): value for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _append(machine: _Machine, at: int) -> int:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])
    return at


def _appends(machine: _Machine, at: int) -> int:
    values = machine.above()
    _extend(machine.stack[-1], values)
    return at


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is list:
        target += values
    elif type(target) is Record:
        if type(target.items) is not list:
            target.items = []
        target.items += values
    else:
        raise FormatError(f"{len(values)} values are appended to {type(target).__name__}, which is no list")


def _setitem(machine: _Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], (key, value))
    return at


def _setitems(machine: _Machine, at: int) -> int:
    flat = machine.above()
    _update(machine.stack[-1], flat)
    return at


def _update(target: Any, flat: Sequence[Any]) -> None:
    if type(target) is dict:
        target.update(_paired(flat))
    elif type(target) is Record:
        if type(target.entries) is not dict:
            target.entries = {}
        target.entries.update(_paired(flat))
    else:
        raise FormatError(f"keys are set in {type(target).__name__}, which is no dict")


def _additems(machine: _Machine, at: int) -> int:
    values = machine.above()
    target = machine.stack[-1]
    if type(target) is not set:
        raise FormatError(f"elements are added to {type(target).__name__}, which is no set")
    target.update(map(_key, values))
    return at


def _global(machine: _Machine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    machine.stack.append(Global(_utf8(module), _utf8(name)))
    return at


def _stack_global(machine: _Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError(f"a class is named by {type(module).__name__} and {type(name).__name__}, expected are strings")
    machine.stack.append(Global(module, name))
    return at


def _reduce(machine: _Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)
    return at


def _newobj(machine: _Machine, at: int) -> int:
    """Make an instance from a class and the arguments of its __new__."""
    if machine.shortcuts and machine.stack[-1] == () and type(machine.stack[-2]) is Global:
        kind = machine.stack[-2]
        shortcut = machine.shortcuts.get((kind.module, kind.name))
        found = shortcut(kind, machine.data, at, machine.memo) if shortcut else None
        if found is not None:
            machine.stack[-2:] = found[0]
            return found[1]
    return _reduce(machine, at)


def _newobj_ex(machine: _Machine, at: int) -> int:
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict:
        raise FormatError(f"keyword arguments are {type(kwargs).__name__}, expected is a dict")
    machine.stack[-1] = machine.call(machine.stack[-1], args, kwargs)
    return at


def _inst(machine: _Machine, at: int) -> int:
    at = _global(machine, at)
    named = machine.stack.pop()
    machine.stack.append(machine.call(named, tuple(machine.above())))
    return at


def _obj(machine: _Machine, at: int) -> int:
    kind, *args = machine.above()
    machine.stack.append(machine.call(kind, tuple(args)))
    return at


def _build(machine: _Machine, at: int) -> int:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is Record:
        target.state = state
    elif type(target) not in (dict, list, set):  # attributes of an OrderedDict, such as a state dict's `_metadata`: dropped
        raise FormatError(f"attributes are set on {type(target).__name__}")
    return at


def _persid(machine: _Machine, at: int) -> int:
    line, at = machine.line(at)
    machine.stack.append(_persistent(machine)(_utf8(line)))
    return at


def _binpersid(machine: _Machine, at: int) -> int:
    machine.stack[-1] = _persistent(machine)(machine.stack[-1])
    return at


def _persistent(machine: _Machine) -> Persistent:
    if machine.persistent is None:
        raise FormatError("it refers to an object outside (a persistent id), which has no meaning here")
    return machine.persistent


def _unknown(machine: _Machine, at: int) -> int:
    raise FormatError(f"unknown opcode {machine.data[at - 1]:#04x}")


_NAMED: dict[bytes, Callable[[_Machine, int], int]] = {
    b"(": _mark,
    b".": _stop,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"F": _float,
    b"I": _int,
    b"J": _fixed(_I32),
    b"K": _fixed(struct.Struct("B")),
    b"L": _long,
    b"M": _fixed(_U16),
    b"N": _constant(None),
    b"P": _persid,
    b"Q": _binpersid,
    b"R": _reduce,
    b"S": _string,
    b"T": _counted(_U32, _python2),
    b"U": _counted(struct.Struct("B"), _python2),
    b"V": _unicode,
    b"X": _counted(_U32, _utf8),
    b"a": _append,
    b"b": _build,
    b"c": _global,
    b"d": _dict,
    b"}": _empty(dict),
    b"e": _appends,
    b"g": _get,
    b"h": _binget,
    b"i": _inst,
    b"j": _long_binget,
    b"l": _list,
    b"]": _empty(list),
    b"o": _obj,
    b"p": _put,
    b"q": _binput,
    b"r": _long_binput,
    b"s": _setitem,
    b"t": _tuple,
    b")": _constant(()),
    b"u": _setitems,
    b"G": _fixed(_F64),
    b"B": _counted(_U32, bytes),
    b"C": _counted(struct.Struct("B"), bytes),
    b"\x80": _proto,
    b"\x81": _newobj,
    b"\x82": _refused("a class is named by an extension code, which only its writer knows"),
    b"\x83": _refused("a class is named by an extension code, which only its writer knows"),
    b"\x84": _refused("a class is named by an extension code, which only its writer knows"),
    b"\x85": _tuple1,
    b"\x86": _tuple2,
    b"\x87": _tuple3,
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"\x8a": _counted(struct.Struct("B"), _integer),
    b"\x8b": _counted(_U32, _integer),
    b"\x8c": _counted(struct.Struct("B"), _utf8),
    b"\x8d": _counted(_U64, _utf8),
    b"\x8e": _counted(_U64, bytes),
    b"\x8f": _empty(set),
    b"\x90": _additems,
    b"\x91": _frozenset,
    b"\x92": _newobj_ex,
    b"\x93": _stack_global,
    b"\x94": _memoize,
    b"\x95": _frame,
    b"\x96": _counted(_U64, bytearray),
    b"\x97": _refused("it refers to a buffer outside"),
    b"\x98": _refused("it refers to a buffer outside"),
}

_OPERATIONS = [_NAMED.get(bytes([code]), _unknown) for code in range(256)]


# --- harmless constructors --------------------------------------------------------------------------------------------

_PLAIN = (list, tuple, dict, set, frozenset)


def _elements(found: Any) -> Iterable[Any]:
    if type(found) not in _PLAIN:
        raise FormatError(f"a container is made of {type(found).__name__}")
    elements: Iterable[Any] = found
    return elements


def _new_list(found: Any = ()) -> list[Any]:
    return list(_elements(found))


def _new_tuple(found: Any = ()) -> tuple[Any, ...]:
    return tuple(_elements(found))


def _new_set(found: Any = ()) -> set[Any]:
    return set(map(_key, _elements(found)))


def _new_frozenset(found: Any = ()) -> frozenset[Any]:
    return frozenset(map(_key, _elements(found)))


def _new_dict(found: Any = ()) -> dict[Any, Any]:
    if type(found) is dict:
        return dict(found)
    return {_key(key): value for key, value in map(_elements, _elements(found))}


def _new_default_dict(default: Any = None, found: Any = ()) -> dict[Any, Any]:
    return _new_dict(found)


def _new_bytes(found: Any = b"", encoding: Any = "latin1") -> bytes:
    return _encode(found, encoding) if type(found) is str else bytes(_octets(found))


def _new_bytearray(found: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_new_bytes(found, encoding))


def _octets(found: Any) -> Any:
    """Return what bytes are made of; a number would be a size."""
    if type(found) not in (bytes, bytearray, list, tuple):
        raise FormatError(f"bytes are made of {type(found).__name__}")
    return found


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "iso-8859-1", "utf-8", "utf8", "ascii"):
        raise FormatError(f"{type(text).__name__} is encoded as {encoding!r}")
    return text.encode(str(encoding), "strict" if encoding not in ("utf-8", "utf8") else "surrogatepass")


def _number(found: Any) -> Any:
    if type(found) not in (int, float, bool, str) or (type(found) is str and len(found) > NUMBER):
        raise FormatError(f"a number is made of {type(found).__name__}")
    return found


def _new_int(found: Any = 0) -> int:
    return int(_number(found))


def _new_float(found: Any = 0.0) -> float:
    return float(_number(found))


def _new_bool(found: Any = False) -> bool:
    return bool(_number(found))


def _new_complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    return complex(_new_float(real), _new_float(imaginary))


def _new_str(found: Any = "") -> str:
    if type(found) is not str:
        raise FormatError(f"a string is made of {type(found).__name__}")
    return found


def _new_slice(*bounds: Any) -> slice:
    if not all(bound is None or type(bound) is int for bound in bounds):
        raise FormatError("the bounds of a slice are no integers")
    return slice(*bounds)


def _reconstructed(kind: Any, base: Any = None, state: Any = None) -> Record:
    """Return the record of an object of a plain class, as protocols 0 and 1 make them."""
    if type(kind) is not Global:
        raise FormatError(f"an object is made of {type(kind).__name__}, expected is a class")
    return Record(kind.module, kind.name, () if state is None else (state,))


def _new_object(kind: Any, *args: Any) -> Record:
    if type(kind) is not Global:
        raise FormatError(f"an object is made of {type(kind).__name__}, expected is a class")
    return Record(kind.module, kind.name, args)


def _scalar(kind: Any, raw: Any) -> Any:
    """Return a NumPy scalar, or the record of one whose dtype is not plain."""
    dtype, octets = _dtype_of(kind), raw.encode() if type(raw) is str else raw
    if dtype is None or type(octets) is not bytes:
        return Record("numpy", "scalar", (kind, raw))
    if dtype.itemsize != len(octets) or not octets:
        raise FormatError(f"a NumPy scalar of {dtype} has {len(octets)} bytes, expected are {dtype.itemsize}")
    return np.frombuffer(octets, dtype)[0]


def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """Return the dtype that a record stands for, if it is plain: no objects, no fields, no units."""
    if not isinstance(kind, Record) or kind.name != "dtype" or not kind.args or type(kind.args[0]) is not str:
        return None
    if re.fullmatch(r"[<>=|]?([bBhHiIlLqQefdgFDG?]|[biufc][1-9]\d?|[SU][1-9]\d{0,8})", kind.args[0]) is None:
        return None
    state = kind.state
    order = state[1] if type(state) is tuple and len(state) > 1 and state[1] in ("<", ">", "=", "|") else None
    return np.dtype(kind.args[0]).newbyteorder(order) if order else np.dtype(kind.args[0])


_BUILTINS: dict[str, Callable[..., Any]] = {
    "list": _new_list,
    "tuple": _new_tuple,
    "set": _new_set,
    "frozenset": _new_frozenset,
    "dict": _new_dict,
    "bytes": _new_bytes,
    "bytearray": _new_bytearray,
    "int": _new_int,
    "long": _new_int,
    "float": _new_float,
    "bool": _new_bool,
    "complex": _new_complex,
    "str": _new_str,
    "unicode": _new_str,
    "slice": _new_slice,
}

HARMLESS: Known = {
    **{(module, name): make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()},
    ("collections", "OrderedDict"): _new_dict,
    ("collections", "defaultdict"): _new_default_dict,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstructed,
    ("copyreg", "__newobj__"): _new_object,
    ("copy_reg", "_reconstructor"): _reconstructed,
    ("copy_reg", "__newobj__"): _new_object,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("torch", "Size"): _new_tuple,
}
"""The constructors that are called, under their names in Python 3 and 2. None allocates more than it is given."""
