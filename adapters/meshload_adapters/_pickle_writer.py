"""Pickles of inert values, the mirror of `_pickle.py`: classes and functions are named, and need not be there to be imported.

Protocol 2 is what a file of `torch.save` holds, and all that `torch.load(weights_only=True)` takes; 4 is what DCP's `.metadata` is.
The opcodes are those that Python itself writes for the same values, but for frames and batches, which only bound memory.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshload.errors import LayoutError

from ._pickle import Global


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a function or class returns when it is called."""

    function: Global
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class, made without calling it, whose attributes are then set."""

    kind: Global
    state: Any = None
    """What its `__setstate__` is given, by default a dict of its attributes; None where nothing is."""


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object that lies outside of the pickle, by its id."""

    id: Any


def pickled(value: Any, protocol: int = 2) -> bytes:
    """Return the pickle of plain values and of the above.

    Lists, dicts and the above are written once, and referred to where the same object comes again; strings and names, where an
    equal one does.

    >>> pickled((1, None))
    b'\\x80\\x02K\\x01N\\x86q\\x00.'
    """
    if protocol not in (2, 4):
        raise ValueError(f"protocol {protocol}: 2 or 4 was expected")
    machine = _Machine(protocol)
    machine.save(value)
    return b"\x80" + bytes([protocol]) + bytes(machine.out) + b"."


_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Machine:
    def __init__(self, protocol: int) -> None:
        self.out = bytearray()
        self._protocol = protocol
        self._count = 0
        self._values: dict[Any, int] = {}
        """Places in the memo, of strings and globals."""
        self._objects: dict[int, tuple[int, Any]] = {}
        """Places in the memo by identity; the objects are kept, so that no other gets it."""

    def save(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self._save_text(value)
        elif kind is int:
            self._save_int(value)
        elif kind is tuple:
            self._save_tuple(value)
        elif value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is Global:
            self._save_global(value)
        elif id(value) in self._objects:
            self._get(self._objects[id(value)][0])
        else:
            self._save_object(value)

    def _save_object(self, value: Any) -> None:
        kind = type(value)
        if kind is list:
            self.out += b"]"
            self._keep(value)
            self._save_items(value)
        elif kind is dict:
            self.out += b"}"
            self._keep(value)
            self._save_entries(value)
        elif kind is OrderedDict:
            self._save_global(Global("collections", "OrderedDict"))
            self.out += b")R"
            self._keep(value)
            self._save_entries(value)
        elif kind is Call:
            self._save_global(value.function)
            self.save(value.args)
            self.out += b"R"
            self._keep(value)
        elif kind is Instance:
            self._save_global(value.kind)
            self.out += b")\x81"
            self._keep(value)
            if value.state is not None:
                self.save(value.state)
                self.out += b"b"
        elif kind is Persistent:
            self.save(value.id)
            self.out += b"Q"
        else:
            raise LayoutError(
                f"{kind.__name__}: no value that is written to a pickle; where a hyperparameter is one, give it plainly, by "
                f"hyperparameters="
            )

    def _save_items(self, values: Sequence[Any]) -> None:
        if len(values) == 1:
            self.save(values[0])
            self.out += b"a"
        elif values:
            self.out += b"("
            for value in values:
                self.save(value)
            self.out += b"e"

    def _save_entries(self, entries: Mapping[Any, Any]) -> None:
        if entries:
            self.out += b"(" if len(entries) > 1 else b""
            for key, value in entries.items():
                self.save(key)
                self.save(value)
            self.out += b"u" if len(entries) > 1 else b"s"

    def _save_tuple(self, values: tuple[Any, ...]) -> None:
        if not values:
            self.out += b")"
            return
        self.out += b"" if len(values) <= 3 else b"("
        for value in values:
            self.save(value)
        self.out += _TUPLES.get(len(values), b"t")
        self._put()

    def _save_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw

    def _save_text(self, value: str) -> None:
        place = self._values.get(value)
        if place is not None:
            self._get(place)
            return
        raw = value.encode("utf-8", "surrogatepass")
        is_short = self._protocol >= 4 and len(raw) < 256
        self.out += (b"\x8c" + bytes([len(raw)]) if is_short else b"X" + struct.pack("<I", len(raw))) + raw
        self._values[value] = self._put()

    def _save_global(self, value: Global) -> None:
        place = self._values.get(value)
        if place is not None:
            self._get(place)
            return
        if self._protocol >= 4:
            self._save_text(value.module)
            self._save_text(value.name)
            self.out += b"\x93"
        else:
            self.out += f"c{value.module}\n{value.name}\n".encode()
        self._values[value] = self._put()

    def _keep(self, value: Any) -> None:
        self._objects[id(value)] = (self._put(), value)

    def _put(self) -> int:
        place = self._count
        self._count += 1
        if self._protocol >= 4:
            self.out += b"\x94"
        else:
            self.out += b"q" + bytes([place]) if place < 256 else b"r" + struct.pack("<I", place)
        return place

    def _get(self, place: int) -> None:
        self.out += b"h" + bytes([place]) if place < 256 else b"j" + struct.pack("<I", place)
