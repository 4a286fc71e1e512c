"""The inert unpickler, against pickle itself for what is harmless, and against pickles that mean harm."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copyreg
import datetime
import os
import pickle
import pickletools
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshload.errors import FormatError, MeshloadError
from meshload.testing import Counted, InMemory, same_bits
from meshload_adapters import _pickle
from meshload_adapters._pickle import Global, Record, ndarray_of, unpickle, unpickle_at

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

# --- what is harmless -------------------------------------------------------------------------------------------------

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
)
keys = st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(st.characters(codec="utf-8")) | st.binary()
trees = st.recursive(
    atoms | st.frozensets(keys) | st.sets(keys),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


@given(trees, st.sampled_from(PROTOCOLS))
def test_plain_values_are_those_of_pickle(tree: Any, protocol: int) -> None:
    found = unpickle(pickle.dumps(tree, protocol))
    assert (type(found), found) == (type(tree), tree)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_long_containers_and_texts_come_through(protocol: int) -> None:
    tree = {
        "list": list(range(5000)),
        "dict": {i: str(i) for i in range(3000)},
        "set": set(range(2500)),
        "tuple": tuple(range(2000)),
        "text": "é" * 100_000,
        "bytes": bytes(range(256)) * 300,
        "array": bytearray(b"abc" * 1000),
        "shared": [shared := [1], shared],
        "slice": slice(1, None, 2),
    }
    found = unpickle(pickle.dumps(tree, protocol))
    assert found == tree
    assert found["shared"][0] is found["shared"][1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ordered_and_default_dicts_are_dicts(protocol: int) -> None:
    ordered = collections.OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]  # as a state dict has it
    counted = collections.defaultdict(list, x=[1])
    found = unpickle(pickle.dumps([ordered, counted], protocol))
    assert [type(f) for f in found] == [dict, dict]
    assert found == [{"b": 1, "a": 2}, {"x": [1]}]
    assert list(found[0]) == ["b", "a"]


class Thing:
    """A class of which only records come out."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class ListThing(list):  # type: ignore[type-arg]
    pass


class DictThing(dict):  # type: ignore[type-arg]
    pass


class Slotted:
    __slots__ = ("left", "right")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_instances_of_unknown_classes_are_records(protocol: int) -> None:
    found = unpickle(pickle.dumps(argparse.Namespace(lr=0.1, layers=[1, 2]), protocol))
    assert (found.module, found.name) == ("argparse", "Namespace")
    assert (found.get("lr"), found.get("layers"), found.get("absent", 7)) == (0.1, [1, 2], 7)

    found = unpickle(pickle.dumps(datetime.datetime(2024, 1, 2), protocol))
    assert (found.module, found.name, found.args[0][:2]) == ("datetime", "datetime", b"\x07\xe8")

    listed, mapped = ListThing([1, 2]), DictThing(a=1)
    listed.note = mapped.note = "n"  # type: ignore[attr-defined]
    if protocol >= 2:
        found = unpickle(pickle.dumps([listed, mapped], protocol))
        assert (found[0].items, found[0].get("note")) == ([1, 2], "n")
        assert (found[1].entries, found[1].get("note")) == ({"a": 1}, "n")
        slotted = Slotted()
        slotted.left, slotted.right = 1, "two"
        found = unpickle(pickle.dumps(slotted, protocol))
        assert (found.get("left"), found.get("right")) == (1, "two")


def test_classes_and_functions_are_named_and_not_called() -> None:
    assert unpickle(pickle.dumps([os.getcwd, Thing])) == [Global("posix", "getcwd"), Global(Thing.__module__, "Thing")]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "u1", "c8", ">i4", "f2", "U3", "S4"])
def test_numpy_arrays_and_scalars_keep_their_bits(dtype: str, protocol: int) -> None:
    values = np.arange(6).astype(dtype).reshape(2, 3)
    for array in (values, np.asfortranarray(values), values[:0], values[0, :1].reshape(())):
        found = ndarray_of(unpickle(pickle.dumps(array, protocol)))
        assert found is not None
        assert same_bits(found, array)
    scalar = unpickle(pickle.dumps(values[1, 2], protocol))
    assert (type(scalar), scalar) == (type(values[1, 2]), values[1, 2])


def test_numpy_arrays_of_objects_stay_records() -> None:
    found = unpickle(pickle.dumps(np.array([{}, None], dtype=object)))
    assert isinstance(found, Record)
    assert ndarray_of(found) is None


def test_numpy_arrays_that_lie_about_their_size_are_none() -> None:
    found = unpickle(pickle.dumps(np.zeros(4, "f4")))
    version, _, dtype, fortran, raw = found.state
    for shape in ((1 << 62,), (5,), (-1,), (2, "2"), [4], (0,), (1 << 31, 1 << 31, 1 << 2)):
        found.state = (version, shape, dtype, fortran, raw)
        assert ndarray_of(found) is None


def test_known_constructors_and_persistent_ids_are_the_callers() -> None:
    class Writer(pickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            return ("id", found.n) if isinstance(found, Thing) else None

    import io

    out = io.BytesIO()
    Writer(out, 2).dump([Thing(n=4), datetime.timedelta(3)])
    found = unpickle(
        out.getvalue(), persistent=lambda i: i[1] * 10, known={("datetime", "timedelta"): lambda days, *rest: f"{days} days"}
    )
    assert found == [40, "3 days"]
    with pytest.raises(FormatError, match="persistent id"):
        unpickle(out.getvalue())


def test_constructors_that_refuse_end_in_one_error() -> None:
    def refuses(*args: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(FormatError, match="byte"):
        unpickle(pickle.dumps(datetime.timedelta(3)), known={("datetime", "timedelta"): refuses})


# --- several pickles in a row -----------------------------------------------------------------------------------------


def test_pickles_in_a_row_tell_where_the_next_begins() -> None:
    objects = [1, {"a": list(range(50_000))}, "x"]
    data = b"--" + b"".join(pickle.dumps(o, 2) for o in objects) + b"payload" * 100_000
    source = Counted(InMemory("file", data))
    at, found = 2, []
    for _ in objects:
        one, at = unpickle_at(source, at, len(data))
        found.append(one)
    assert found == objects
    assert data[at : at + 7] == b"payload"
    assert source.log.nbytes < 2 * at + 3 * _pickle.FIRST_WINDOW  # each window as large as all before it


def test_a_pickle_read_in_small_windows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "a": [1, 2.5, "x", b"y", (1, 2, 3), {4}, np.int64(3)],
        "n": argparse.Namespace(a=[7] * 9),
        "big": 1 << 90,
        "text": "t" * 500,
    }
    for window in range(1, 40):
        monkeypatch.setattr(_pickle, "FIRST_WINDOW", window)
        for protocol in PROTOCOLS:
            data = pickle.dumps(tree, protocol)
            found, stop = unpickle_at(InMemory("file", data + b"more"), 0, len(data) + 4)
            assert stop == len(data)
            assert repr(found) == repr(unpickle(data))


def test_a_pickle_that_does_not_end_before_the_limit_is_an_error() -> None:
    data = pickle.dumps(list(range(1000)), 2)
    source = InMemory("file", data)
    for limit in range(0, len(data), 37):
        with pytest.raises(FormatError, match="cut"):
            unpickle_at(source, 0, limit)


def test_bytes_behind_the_pickle_are_an_error() -> None:
    with pytest.raises(FormatError, match="ends at byte 4, but 5 are there"):
        unpickle(b"\x80\x02N..")


# --- what means harm --------------------------------------------------------------------------------------------------


class Reduced:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_are_records_and_nothing_is_done(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    for harm in (
        Reduced(open, str(target), "w"),
        Reduced(os.system, f"touch {target}"),
        Reduced(eval, f"open({str(target)!r}, 'w')"),
        Reduced(exec, f"open({str(target)!r}, 'w')"),
        Reduced(os.mkdir, str(target)),
        Reduced(getattr, "x", "upper"),
        Reduced(__import__, "antigravity"),
        Reduced(copyreg.add_extension, "os", "system", 240),
        Reduced(Path.touch, target),
    ):
        found = unpickle(pickle.dumps({"a": [harm]}, protocol))
        assert isinstance(found["a"][0], Record)
    assert not target.exists()
    assert ("os", "system") not in copyreg._extension_registry  # type: ignore[attr-defined]


def test_calls_of_what_calls_return_are_records() -> None:
    data = b"cbuiltins\ngetattr\n(cos\nenviron\nS'clear'\ntR(tR."
    before = dict(os.environ)
    found = unpickle(data)
    assert (found.module, found.name, found.args[0].args[1]) == ("builtins", "getattr()", "clear")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x82\x01.", "extension"),
        (b"\x83\x01\x00.", "extension"),
        (b"\x84\x01\x00\x00\x00.", "extension"),
        (b"\x97.", "buffer"),
        (b"\x80\x06N.", "protocol 6"),
        (b"K\x01}b.", "attributes are set on int"),
        (b"cos\nsystem\n}b.", "attributes are set on Global"),
        (b"K\x01)R.", "int is called"),
        (b"cos\nsystem\nNR.", "expected is a tuple"),
        (b"(K\x01K\x02.", "it leaves"),
        (b"]K\x01K\x02s.", "no dict"),
        (b"}K\x01a.", "no list"),
        (b"](K\x01\x90.", "no set"),
        (b"}(K\x01u.", "pairs"),
        (b"}]K\x01s.", "unhashable"),
        (b"\xff.", "unknown opcode"),
        (b"K\x01K\x02\x93.", "expected are strings"),
        (b"h\x05.", "KeyError"),
        (b"a.", "byte 0"),
        (b".", "leaves 0"),
        (b"cbuiltins\nbytes\n(J\xff\xff\xff\x7ftR.", "bytes are made of int"),
        (b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR.", "bytes are made of int"),
        (b"cbuiltins\nlist\n(cbuiltins\nrange\n(J\xff\xff\xff\x7ftRtR.", "container is made of Record"),
        (b"cbuiltins\nint\n(X\x01\x00\x00\x00xtR.", "invalid literal"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00xX\x03\x00\x00\x00zlttR.", "encoded as"),
        (b"I" + b"9" * 5000 + b"\n.", "a number of 5000"),
        (b"\x8b\x00\x10\x00\x00" + b"\1" * 4096 + b".", "an integer of 4096"),
        (b"}\x8a\x20" + b"\1" * 32 + b"K\1s.", "bits"),
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        unpickle(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x8e" + struct.pack("<Q", 1 << 40) + b"x",  # bytes, text, bytearray, frame, long integer: sizes that are not there
        b"\x8d" + struct.pack("<Q", 1 << 62) + b"x",
        b"\x96" + struct.pack("<Q", 1 << 40) + b"x",
        b"\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        b"\x8b" + struct.pack("<I", 0xFFFFFFFF) + b"x",
        b"B" + struct.pack("<I", 0xFFFFFFFF) + b"x",
        b"X" + struct.pack("<I", 0xFFFFFFFF) + b"x",
        b"T" + struct.pack("<I", 0xFFFFFFFF) + b"x",
        b"J\x01",
        b"G\x01",
        b"c" + b"x" * 1000,
        b"(" * 100_000 + b".",
        b"Nr\xff\xff\xff\xff" * 1000 + b"h\x01.",
        b"]" * 50_000 + b"a" * 49_999 + b".",  # nesting
        b")" + b"\x85" * 50_000 + b".",
        b"}" + b")" + b"\x85" * 50_000 + b"Ns.",  # a key nested so deeply that hashing it would end the process
        b"})" + b"\x86".join([b"2"] * 200) + b"\x86Ns.",  # a key that takes 2 ** 200 steps to hash
        b"(" + b")" + b"2\x86" * 200 + b"\x91.",
        b"]q\x00h\x00a.",  # a list in itself
        b"}q\x00K\x01h\x00s.",
        b"](h\x00e.",
        b"]q\x00(]h\x00\x86tR.",
        b"cx\ny\n)\x81q\x00h\x00b.",
        b"]" + b"".join(b"q" + bytes([i]) + b"](h" + bytes([i]) * 1 + b"h" + bytes([i]) + b"e" for i in range(100)) + b".",
    ],
)
def test_bombs_are_refused_quickly_and_without_memory(data: bytes) -> None:
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(FormatError):
        unpickle(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * len(data) + (1 << 20)
    assert time.process_time() - began < 20


def test_values_that_pile_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pickle, "STACK", 1 << 17)
    with pytest.raises(FormatError, match="wait on the stack"):
        unpickle(b"N" * 300_000 + b".")


def test_what_unfolds_to_very_many_objects_is_refused() -> None:
    tree: Any = []
    for _ in range(60):
        tree = [tree, tree]
    with pytest.raises(FormatError, match="unfolds"):
        unpickle(pickle.dumps(tree))
    cycle: list[Any] = []
    cycle.append({"a": (cycle,)})
    with pytest.raises(FormatError, match="contains itself"):
        unpickle(pickle.dumps(cycle))
    thing = Thing()
    thing.me = thing  # type: ignore[attr-defined]
    with pytest.raises(FormatError, match="contains itself"):
        unpickle(pickle.dumps(thing))


def test_cut_pickles_raise_at_every_length() -> None:
    tree = {"a": [1, 2.5, "x", b"y", (1, 2, 3)], "n": argparse.Namespace(a=np.int64(4)), "big": 1 << 90}
    for protocol in PROTOCOLS:
        data = pickle.dumps(tree, protocol)
        for stop in range(len(data)):
            with pytest.raises(FormatError):
                unpickle(data[:stop])


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_end_in_an_object_or_an_error(data: bytes) -> None:
    with contextlib.suppress(MeshloadError):
        unpickle(data, persistent=lambda i: None)


def test_mutated_pickles_end_in_an_object_or_an_error() -> None:
    chance = random.Random(0)
    tree = {"a": [1, 2.5, "x", b"y", (1, 2, 3), {4}, np.int64(3)], "n": argparse.Namespace(a=np.zeros(3)), "big": 1 << 90}
    codes = [ord(o.code) for o in pickletools.opcodes]
    for n in range(3000):
        data = bytearray(pickle.dumps(tree, n % 6))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            data[at] = chance.choice([chance.randrange(256), chance.choice(codes)])
        try:
            unpickle(bytes(data), persistent=lambda i: None)
        except MeshloadError:
            continue
