"""Files of torch.save, against golden folders, torch.load, and damage."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import meshload
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LayoutError, MeshloadError, MeshloadWarning, MissingArray
from meshload.source import open_folder
from meshload.testing import Counted, CountedFolder, FormatSuite, InMemory, ramp, read_safetensors, same_bits
from meshload_adapters._pickle import Record
from meshload_adapters._torch_file import DTYPES, Tensor, TorchFile
from meshload_adapters.formats.torch import Torch

torch: Any = pytest.importorskip("torch", reason="the reference library is not installed")

GOLDEN = Path(__file__).parent / "golden" / "torch"
CASES = {d.name: d for d in sorted(GOLDEN.iterdir())}
INDEX = "pytorch_model.bin.index.json"


def values_of(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor's values, bit for bit, as NumPy's."""
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)  # one element may have any stride, even if contiguous
    if plain.ndim == 0:
        plain = plain.reshape(1)
    raw = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return np.frombuffer(raw, dtype).reshape(tuple(tensor.shape))


def opened(path: Any, **options: Any) -> Checkpoint:
    return Torch(**options).open(open_folder(path))


def saved(tree: Any, *, legacy: bool = False, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tree, out, _use_new_zipfile_serialization=not legacy, **options)
    return out.getvalue()


def file_of(data: bytes, name: str = "file.pt") -> TorchFile:
    return TorchFile.open(InMemory(name, data))


def zipped(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class TestTorch(FormatSuite):
    format = Torch()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, NDArray[Any]]]]:
        for case in CASES.values():
            yield case / "checkpoint", read_safetensors(case / "golden.safetensors")


# --- golden folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_golden_folders_are_equal_bit_for_bit(case: str) -> None:
    expected = read_safetensors(CASES[case] / "golden.safetensors")
    found = meshload.open(CASES[case] / "checkpoint")
    assert found.format == "torch"
    assert {*found, *found.aliases} == set(expected)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []
    assert found.config is not None


def test_tied_weights_are_one_array_with_an_alias() -> None:
    found = opened(CASES["qwen2_tied_bin"] / "checkpoint")
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in list(found)
    assert "lm_head.weight" in list(found.with_names("stored"))


def test_restore_gives_each_rank_its_slices() -> None:
    case = CASES["qwen2_tied_bin"]
    whole = read_safetensors(case / "golden.safetensors")
    found = meshload.restore(case / "checkpoint", mesh="tp=2", rank=1, into="numpy")
    assert set(found) == set(whole)
    for name, values in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if "norm" not in name:
            half = -(-values.shape[dim] // 2)
            start = values.shape[dim] - min(half, values.shape[dim] - half)
            values = np.take(values, range(start, values.shape[dim]), dim)
        assert same_bits(found[name], values), name


# --- against torch.load -----------------------------------------------------------------------------------------------

DTYPE_NAMES = [n for n in DTYPES if n != "float4_e2m1fn_x2"]


@st.composite
def tensors(draw: st.DrawFn, kind: str | None = None) -> Any:
    """A tensor of any dtype and shape, whole or a view of a larger one."""
    kind = kind or draw(st.sampled_from(DTYPE_NAMES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    nbytes = int(np.prod(shape, dtype=int)) * DTYPES[kind].itemsize
    raw = torch.from_numpy(((np.arange(nbytes) * 7 + draw(st.integers(0, 99))) % (2 if kind == "bool" else 251)).astype(np.uint8))
    whole = raw.view(getattr(torch, kind)).reshape(shape) if len(raw) else torch.empty(shape, dtype=getattr(torch, kind))
    view = whole
    for change in draw(st.lists(st.sampled_from(["transpose", "narrow", "step", "expand", "index", "stride"]), max_size=3)):
        d = draw(st.integers(0, view.ndim - 1)) if view.ndim else None
        if change == "transpose" and d is not None:
            view = view.transpose(0, d)
        elif change == "narrow" and d is not None:
            start = draw(st.integers(0, view.shape[d]))
            view = view.narrow(d, start, draw(st.integers(0, view.shape[d] - start)))
        elif change == "step" and d == 0:
            view = view[::2]
        elif change == "expand":
            view = view[None].expand(3, *view.shape)
        elif change == "index" and d == 0 and len(view):
            view = view[-1]
        elif change == "stride" and view.numel() > 3:
            view = torch.as_strided(view, (2, 2), (1, 1), view.storage_offset())
    if view.dtype.is_floating_point and draw(st.booleans()):
        view = torch.nn.Parameter(view.detach(), requires_grad=draw(st.booleans()))
    return view


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """A dict of tensors, of which some share storages."""
    found: dict[str, Any] = {}
    for name in draw(st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=5)):
        others = [t for t in found.values() if t.numel()]
        if others and draw(st.booleans()):
            other = draw(st.sampled_from(others)).detach()
            found[name] = draw(
                st.sampled_from([other, other[None], other.reshape(-1)[1:], other.transpose(0, -1) if other.ndim else other])
            )
        else:
            found[name] = draw(tensors())
    return found


UNTYPED = {"uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
"""dtypes without a class of storages: torch itself cannot load them from its legacy files."""


@given(state_dicts(), st.booleans(), st.sampled_from([2, 3, 4, 5]))
def test_any_state_dict_is_as_torch_loads_it(state: dict[str, Any], legacy: bool, protocol: int) -> None:
    data = saved(state, legacy=legacy, pickle_protocol=protocol)
    untyped = any(str(t.dtype).removeprefix("torch.") in UNTYPED for t in state.values())
    loaded = state if legacy and untyped else torch.load(io.BytesIO(data), weights_only=False)
    file = file_of(data)
    assert list(file.root) == list(loaded)
    for name, tensor in loaded.items():
        described = file.root[name]
        assert isinstance(described, Tensor)
        assert (described.is_parameter, described.requires_grad) == (isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
        assert same_bits(file.array(described, name), values_of(tensor)), name


@given(state_dicts(), st.booleans())
def test_any_state_dict_opens_with_its_ties(tmp_path_factory: Any, state: dict[str, Any], legacy: bool) -> None:
    file = tmp_path_factory.mktemp("x") / "model.pt"
    file.write_bytes(saved(state, legacy=legacy))
    found = opened(file)
    assert {*found, *found.aliases} == set(state)
    assert list(found.with_names("stored")) == list(state)
    for name, tensor in state.items():
        assert same_bits(found[name], values_of(tensor))
        assert same_bits(found.with_names("stored")[name], values_of(tensor))
    for alias, name in found.aliases.items():
        assert state[alias].data_ptr() == state[name].data_ptr()


def test_boxes_of_views_are_those_of_numpy() -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "t": base.transpose(0, 2),
        "s": base[1:, ::2, 1:],
        "e": base[0, :1].expand(6, 5),
        "a": torch.as_strided(base, (4, 4), (2, 1)),
    }
    file = file_of(saved(views))
    for name, view in views.items():
        array = file.array(file.root[name], name)
        assert same_bits(array[1:3], values_of(view)[1:3])
        assert same_bits(array[..., 2], values_of(view)[..., 2])
        assert same_bits(array.T, values_of(view).T)


def test_b88_legacy_files_are_read_lazily_and_equal_the_zip(tmp_path: Path) -> None:
    base = torch.arange(1 << 16).to(torch.float16)
    state = {"low": base[:100].reshape(10, 10), "high": base[1 << 15 :], "steps": torch.arange(1000)}
    for legacy in (True, False):
        (tmp_path / "model.pt").write_bytes(saved(state, legacy=legacy))
        folder = CountedFolder(open_folder(tmp_path / "model.pt"))
        found = Torch().open(folder)
        assert found.meta["containers"] == (("legacy",) if legacy else ("zip",))
        assert found["low"].pieces.sources[0].size > 130_000
        assert folder.log.nbytes < 5 * 4096 + 1000 if legacy else folder.log.nbytes < 4000
        for name, tensor in state.items():
            assert same_bits(found[name], values_of(tensor))


def test_a_zip_is_opened_without_reading_its_storages(tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.full((64, 64), float(i)) for i in range(300)}
    (tmp_path / "model.bin").write_bytes(saved(state))
    folder = CountedFolder(open_folder(tmp_path / "model.bin"))
    found = Torch().open(folder)
    reads = folder.log.of("model.bin")
    with zipfile.ZipFile(tmp_path / "model.bin") as archive:
        for info in archive.infolist():
            if "/data/" in info.filename:
                start = found["layer." + info.filename.rpartition("/")[2]].pieces.offset[0]
                assert all(at + n <= start or at >= start + info.file_size for at, n in reads)
    assert folder.log.nbytes < 80_000 < (tmp_path / "model.bin").stat().st_size // 20


def test_a_file_within_a_larger_one_is_read_in_place() -> None:
    state = {"w": torch.arange(100.0).reshape(10, 10).T}
    for legacy in (False, True):
        data = saved(state, legacy=legacy)
        source = Counted(InMemory("shard", b"x" * 777 + data + b"y" * 555))
        file = TorchFile.open(source, 777, 777 + len(data))
        assert same_bits(file.array(file.root["w"], "w"), values_of(state["w"]))
        assert all(at >= 777 and at + n <= 777 + len(data) for _, at, n in source.log.reads)


def test_many_tensors_are_opened_in_a_few_seconds(tmp_path: Path) -> None:
    import time

    one = torch.zeros(2)
    (tmp_path / "model.pt").write_bytes(saved({f"model.layers.{i}.weight": one[i % 2 :] for i in range(20_000)}))
    began = time.process_time()
    found = opened(tmp_path / "model.pt")
    assert time.process_time() - began < 30
    assert (len(found), len(found.aliases)) == (2, 19_998)


# --- zips of other writers --------------------------------------------------------------------------------------------


def test_zips_of_other_writers_are_read() -> None:
    data = saved({"a": torch.arange(10), "b": torch.ones(3, dtype=torch.bfloat16)})
    again = file_of(zipped(members_of(data)))
    assert same_bits(again.array(again.root["a"], "a"), np.arange(10))
    without = {n: d for n, d in members_of(data).items() if not n.endswith(("byteorder", "version", "alignment", "_id"))}
    assert set(file_of(zipped(without)).root) == {"a", "b"}


def test_a_zip_with_a_comment_or_zip64_records_is_read() -> None:
    members = members_of(saved({"a": torch.arange(10)}))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.comment = b"PK\x05\x06" + b"a comment" * 20
        for name, data in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(data)
    file = file_of(out.getvalue())
    assert same_bits(file.array(file.root["a"], "a"), np.arange(10))


def zip64(file: Path, members: Mapping[str, bytes], gap: int) -> None:
    """Write a zip by hand, with a hole before each member and all numbers in zip64 fields."""
    listed = b""
    with file.open("wb") as out:
        for name, data in members.items():
            raw, at = name.encode(), out.seek(gap if out.tell() else 0, os.SEEK_CUR)
            head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0, 0, 0, 0, 0, len(data), len(data), len(raw), 5)
            out.write(head + raw + bytes(5) + data)
            extra = struct.pack("<HHB", 7, 1, 0) + struct.pack("<HHQQQ", 1, 24, len(data), len(data), at)
            fixed = (0x02014B50, 45, 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(raw), len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
            listed += struct.pack("<IHHHHHHIIIHHHHHII", *fixed) + raw + extra
        begin, count = out.tell(), len(members)
        out.write(listed)
        out.write(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(listed), begin))
        out.write(struct.pack("<IIQI", 0x07064B50, 0, begin + len(listed), 1))
        out.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def test_a_zip_beyond_4_gib_is_read(tmp_path: Path) -> None:
    zip64(tmp_path / "x.pt", members_of(saved({"a": torch.arange(10), "b": torch.ones(3)})), 3 << 30)
    found = opened(tmp_path / "x.pt")
    assert found["b"].pieces.offset[0] > 1 << 33
    assert same_bits(found["a"], np.arange(10))
    assert same_bits(found["b"], np.ones(3, "f4"))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_far_away_is_opened_with_few_reads(legacy: bool) -> None:
    data = saved({f"layer.{i}": torch.full((100, 100), float(i)) for i in range(40)}, legacy=legacy)
    source = Counted(InMemory("far", b"x" * 50 + data + b"x" * 50, gap=1 << 18))
    file = TorchFile.open(source, 50, 50 + len(data))
    assert len(source.log.reads) <= 2 + 40
    assert same_bits(file.array(file.root["layer.20"], "layer.20"), np.full((100, 100), 20.0, "f4"))
    near = saved({"w": torch.arange(10.0)}, legacy=legacy)
    source = Counted(InMemory("far", near, gap=1 << 18))
    file = TorchFile.open(source)
    assert len(source.log.reads) == 1
    assert same_bits(file.array(file.root["w"], "w"), np.arange(10, dtype="f4"))


def test_files_in_a_key_value_store_are_opened() -> None:
    import tensorstore

    store = tensorstore.KvStore.open("memory://torch-files/").result()
    folder = CASES["opt_bin_sharded_fp16"] / "checkpoint"
    for file in folder.iterdir():
        store.write(file.name, file.read_bytes()).result()
    found = meshload.open(store)
    expected = read_safetensors(folder.parent / "golden.safetensors")
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def test_compressed_members_are_refused_with_a_hint() -> None:
    members = members_of(saved({"a": torch.zeros(1000)}))
    with pytest.raises(FormatError, match="is compressed"):
        file_of(zipped(members, zipfile.ZIP_DEFLATED))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if "/data/" in name else zipfile.ZIP_STORED)
    with pytest.raises(FormatError, match=r"data/0' is compressed.*save it again"):
        file_of(out.getvalue())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"archive/byteorder": b"big"}, "byteorder is 'big'"),
        ({"archive/constants.pkl": b""}, "TorchScript"),
        ({"other/data.pkl": b""}, "2 members named"),
        ({"archive/data.pkl": None}, "0 members named"),
    ],
)
def test_zips_that_torch_did_not_save_are_refused(change: dict[str, Any], match: str) -> None:
    members = {**members_of(saved({"a": torch.zeros(10)})), **change}
    with pytest.raises(FormatError, match=match):
        file_of(zipped({n: d for n, d in members.items() if d is not None}))


def test_storages_that_are_missing_or_short_make_their_tensors_unavailable(tmp_path: Path) -> None:
    members = members_of(saved({"a": torch.zeros(10), "b": torch.ones(10), "c": torch.ones(10)}))
    del members["archive/data/0"]
    members["archive/data/1"] = members["archive/data/1"][:-4]
    (tmp_path / "x.pt").write_bytes(zipped(members))
    found = opened(tmp_path / "x.pt")
    assert list(found) == ["c"]
    with pytest.raises(MissingArray, match=r"storage '0' is not in x\.pt"):
        found["a"]
    with pytest.raises(MissingArray, match="has 36 bytes, expected are 40"):
        found["b"]
    assert [p.array for p in found.problems] == ["a", "b"]


def test_members_that_overlap_or_stand_twice_are_refused() -> None:
    data = zipped(members_of(saved({"a": torch.zeros(100), "b": torch.ones(100)})))
    at = data.rfind(b"archive/data/1") - 46
    other = data.rfind(b"archive/data/0") - 46
    start = data[other + 42 : other + 46]
    with pytest.raises(FormatError, match="overlaps"):
        file_of(data[: at + 42] + start + data[at + 46 :])
    with pytest.raises(FormatError, match="twice"):
        file_of(data.replace(b"archive/data/1", b"archive/data/0"))
    larger = struct.pack("<II", 5000, 5000)
    with pytest.raises(FormatError, match="overlaps"):
        file_of(data[: at + 20] + larger + data[at + 28 :])


def test_local_headers_that_contradict_the_directory_are_refused() -> None:
    data = zipped(members_of(saved({"a": torch.zeros(100)})))
    at = data.find(b"archive/data/0")
    for change in (data[:at] + b"archive/data/9" + data[at + 14 :], data[: at - 2] + b"\xff\xff" + data[at:]):
        with pytest.raises(FormatError, match="archive/data/0"):
            file_of(change)


# --- what cannot be an array ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*[Ss]parse.*", "ignore:.*[Nn]ested.*", "ignore:.*Storage.*")
def test_what_no_array_can_be_is_refused_only_when_asked_for(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    state = {
        "sparse": w.to_sparse(),
        "rows": w.to_sparse_csr(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "meta": torch.zeros(3, device="meta"),
        "plain": w,
    }
    (tmp_path / "x.pt").write_bytes(saved(state))
    found = opened(tmp_path / "x.pt")
    assert "plain" in list(found)
    for name, match in {"sparse": "sparse", "rows": "sparse", "conjugate": "resolve_conj", "meta": "meta device"}.items():
        with pytest.raises(MissingArray, match=f"{name}: .*{match}"):
            found[name]
    assert same_bits(found["plain"], values_of(w))


def test_subclasses_and_attributes_are_dropped() -> None:
    class Named(torch.Tensor):  # type: ignore[misc]
        pass

    globals()["Named"] = Named
    Named.__qualname__ = "Named"
    named = torch.arange(4.0).as_subclass(Named)
    noted = torch.arange(3.0)
    noted.note = argparse.Namespace(x=1)
    parameter = torch.nn.Parameter(torch.arange(5.0))
    parameter.partition_dim = 1
    file = file_of(saved({"named": named, "noted": noted, "parameter": parameter}))
    for name, count in {"named": 4, "noted": 3, "parameter": 5}.items():
        assert same_bits(file.array(file.root[name], name), np.arange(count, dtype="f4"))
    assert file.root["parameter"].is_parameter


def test_raw_storages_and_dtypes_are_inert() -> None:
    file = file_of(saved({"storage": torch.arange(4.0).untyped_storage(), "dtype": torch.float32, "size": torch.Size([1, 2])}))
    assert file.root["size"] == (1, 2)
    assert file.root["storage"].nbytes == 16


def hand_made(call: bytes, storage: bytes = b"\0" * 40) -> bytes:
    return zipped({"archive/data.pkl": b"\x80\x02" + call + b".", "archive/data/0": storage})


def tensor_call(offset: int, size: tuple[int, ...], stride: tuple[int, ...], count: int = 10) -> bytes:
    def packed(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"")

    pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + packed(count) + b"tQ"
    return (
        b"}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + packed(offset)
        + packed(size)
        + packed(stride)
        + b"\x89}tRs"
    )


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(1, (10,), (1,)), (0, (2, 2), (9, 1)), (0, (2,), (10,)), (10, (1,), (1,)), (1 << 61, (1,), (1,)), (0, (2,), (1 << 60,))],
)
def test_tensors_that_reach_beyond_their_storage_are_unavailable(offset: int, size: Any, stride: Any) -> None:
    file = file_of(hand_made(tensor_call(offset, size, stride)))
    with pytest.raises(FormatError, match=r"a: it ends at byte \d+ of its storage '0' .*, which has 40"):
        file.array(file.root["a"], "a")


def test_shapes_that_no_memory_holds_are_refused() -> None:
    for size, stride in (((1 << 40, 1 << 40), (0, 0)), ((1,) * 40, (1,) * 40)):
        file = file_of(hand_made(tensor_call(0, size, stride)))
        with pytest.raises(FormatError, match="larger than an array can be"):
            file.array(file.root["a"], "a")


@pytest.mark.parametrize(
    ("offset", "size", "stride"), [(-1, (1,), (1,)), (0, (-1,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,)), (0, (2.0,), (1,))]
)
def test_tensors_that_make_no_sense_are_refused(offset: int, size: Any, stride: Any) -> None:
    with pytest.raises(FormatError, match="a tensor has the"):
        file_of(hand_made(tensor_call(offset, size, stride)))


# --- legacy damage ----------------------------------------------------------------------------------------------------


def test_legacy_files_that_lie_are_refused() -> None:
    data = saved({"a": torch.zeros(10), "b": torch.ones(3)}, legacy=True)
    for stop in (0, 1, 30, 100, len(data) - 60, len(data) - 1):
        with pytest.raises(FormatError):
            file_of(data[:stop])
    with pytest.raises(FormatError, match="5 trailing bytes"):
        file_of(data + b"12345")
    with pytest.raises(FormatError, match="little_endian is False"):
        file_of(data.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    with pytest.raises(FormatError, match="protocol 1002"):
        file_of(data.replace(b"M\xe9\x03", b"M\xea\x03", 1))
    count = data.rfind(struct.pack("<q", 3))
    with pytest.raises(FormatError, match="has 4 elements, expected are 3"):
        file_of(data[:count] + struct.pack("<q", 4) + data[count + 8 :])


def test_legacy_views_of_storages_are_placed() -> None:
    """Long ago a legacy file could name a part of a storage as a storage: its key, first element and size stand last."""
    view = b"(X\x01\x00\x00\x00vK\x02K\x05t"
    pid = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0a" + view + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor\n(" + pid + b"K\x01K\x03\x85K\x01\x85tR."
    head = saved({}, legacy=True)[: -len(pickle.dumps({}, 2) + pickle.dumps([], 2))]
    data = head + b"\x80\x02" + call + pickle.dumps(["0"], 2) + struct.pack("<q", 10) + np.arange(10, dtype="<f4").tobytes()
    file = file_of(data)
    assert same_bits(file.array(file.root, "w"), np.arange(3, 6, dtype="f4"))
    with pytest.raises(FormatError, match="ends at element 11 of 10"):
        file_of(data.replace(b"vK\x02K\x05", b"vK\x02K\x09"))


def test_files_of_other_kinds_are_refused_with_a_hint() -> None:
    tar = io.BytesIO()
    import tarfile

    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    for data, match in (
        (tar.getvalue(), "a tar, as torch wrote before 0.1.10"),
        (bytes(1000), "zeros"),
        (b"", "no torch file"),
        (b"version https://git-lfs.github.com/spec/v1", "no torch file: it begins with"),
        (b"PK\x03\x04" + bytes(100), "truncated"),
        (b"PK\x05\x06" + bytes(18), "empty zip"),
    ):
        with pytest.raises(FormatError, match=match):
            file_of(data)


# --- hostile pickles --------------------------------------------------------------------------------------------------


class Harm:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("legacy", [False, True])
def test_b81_unknown_classes_are_inert_and_tensors_are_read(tmp_path: Path, legacy: bool) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "args": argparse.Namespace(tp=2), "harm": Harm(tmp_path / "made"), "iteration": 7}
    (tmp_path / "x.pt").write_bytes(saved(state, legacy=legacy))
    found = meshload.open(tmp_path / "x.pt")
    assert same_bits(found["w"], np.arange(6, dtype="f4"))
    extra = found.meta["extra"]
    assert (extra["args"].get("tp"), extra["iteration"]) == (2, 7)
    assert isinstance(extra["harm"], Record)
    assert extra["harm"].name == "system"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_mutated_files_raise_or_are_as_torch_loads_them(tmp_path: Path, legacy: bool) -> None:
    chance = random.Random(1)
    base = torch.arange(40.0)
    state = OrderedDict(a=base[:12].reshape(3, 4).T, b=base[20:], c=torch.ones(4, dtype=torch.bfloat16))
    whole, path, compared = saved(state, legacy=legacy), tmp_path / "x.pt", 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 3)):
            data[chance.randrange(len(data))] = chance.choice([chance.randrange(256), chance.randrange(8)])
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            found = opened(path)
            values = {name: np.asarray(array) for name, array in found.items() if array.nbytes < 1 << 20}
        except MeshloadError:
            continue
        try:
            loaded = torch.load(path, weights_only=True)
        except Exception:  # whatever torch finds wrong
            continue
        for name, array in values.items():
            compared += name in loaded
            assert name not in loaded or same_bits(array, values_of(loaded[name]))
    assert compared > 200


def test_a_zip_directory_that_miscounts_is_refused() -> None:
    data = bytearray(zipped(members_of(saved({"a": W}))))
    for count in (0, 1, 200):
        data[-12] = count
        with pytest.raises(FormatError, match=f"{count} members"):
            file_of(bytes(data))


def test_files_cut_anywhere_raise() -> None:
    for legacy in (False, True):
        data = saved({"a": torch.arange(10), "b": torch.ones(3)}, legacy=legacy)
        for stop in range(0, len(data), 7):
            with pytest.raises(FormatError):
                file_of(data[:stop])


# --- names and wrappers -----------------------------------------------------------------------------------------------

W = torch.arange(4.0)


def save(path: Path, tree: Any, **options: Any) -> Path:
    path.write_bytes(saved(tree, **options))
    return path


def test_wrappers_are_taken_off_where_only_companions_stand_beside(tmp_path: Path) -> None:
    inner = {"a.weight": W, "b": W + 1}
    for tree in (
        {"state_dict": inner, "epoch": 3},
        {"model": inner, "optimizer": {"state": {0: {"exp_avg": W}}, "param_groups": [{"lr": 0.1}]}},
        {"module": inner, "lr_scheduler": {"step": W}, "args": argparse.Namespace()},
        {"state_dict": {"model": inner}},
    ):
        found = opened(save(tmp_path / "x.pt", tree))
        assert set(found) == {"a.weight", "b"}
        assert same_bits(found["a.weight"], values_of(W))
    assert found.meta["wrapper"] == "state_dict.model"
    assert set(found.with_names("stored")) == {"state_dict.model.a.weight", "state_dict.model.b"}


def test_names_have_their_full_paths_where_a_wrapper_is_not_sure(tmp_path: Path) -> None:
    for tree in (
        {"model": {"a": W}, "lm_head": {"weight": W + 1}},
        {"model": {"a": W}, "state_dict": {"a": W + 1}},
        {"model": {"a": W}, "bias": W + 1},
        {"weights": {"a": W}, "more": [W + 1, {"x": (W + 2,)}]},
    ):
        found = opened(save(tmp_path / "x.pt", tree))
        assert found.meta["wrapper"] is None
        assert all(name.split(".")[0] in tree for name in found)
    assert set(found) == {"weights.a", "more.0", "more.1.x.0"}


def test_names_that_meet_once_joined_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"two tensors are both called 'a\.b'"):
        opened(save(tmp_path / "x.pt", {"a": {"b": W}, "a.b": W + 1}))


def test_a_file_of_one_tensor_or_of_none_opens(tmp_path: Path) -> None:
    assert list(opened(save(tmp_path / "x.pt", W))) == ["tensor"]
    assert opened(save(tmp_path / "x.pt", {"lr": 0.5})).meta["extra"] == {"object": {"lr": 0.5}}


def test_b83_prefixes_are_stripped_at_open(tmp_path: Path) -> None:
    found = meshload.open(save(tmp_path / "x.pt", {"_orig_mod.module.model.x": W, "module._orig_mod.model.y": W + 1}))
    assert set(found) == {"module.model.x", "model.y"} or set(found) == {"model.x", "model.y"}
    found = meshload.open(save(tmp_path / "x.pt", {"module.a": W, "b.module.c": W + 1}))
    assert set(found) == {"module.a", "b.module.c"}


# --- folders ----------------------------------------------------------------------------------------------------------


def sharded(folder: Path, variant: str = "") -> dict[str, str]:
    first, second = (f"pytorch_model{variant}-0000{i}-of-00002.bin" for i in (1, 2))
    save(folder / first, {"a": W, "b": W + 1})
    save(folder / second, {"c": W + 2, "extra": W + 3})
    weight_map = {"a": first, "b": first, "c": second}
    (folder / f"pytorch_model.bin.index{variant}.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_the_index_decides(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "pytorch_model.bin", {"a": W * 0})
    save(tmp_path / "training_args.bin", argparse.Namespace(lr=1))
    found = opened(tmp_path)
    assert list(found) == ["a", "b", "c"]
    assert same_bits(found["a"], values_of(W))
    assert found.meta["unlisted_tensors"] == ("extra",)
    assert found.meta["unlisted"] == ("pytorch_model.bin", "training_args.bin")
    assert list(opened(tmp_path / INDEX)) == ["a", "b", "c"]


def test_a_missing_or_damaged_shard_makes_its_arrays_unavailable(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    data = (tmp_path / weight_map["c"]).read_bytes()
    (tmp_path / weight_map["c"]).write_bytes(data[:-100])
    with pytest.raises(MissingArray, match=r"c: .*00002-of-00002\.bin: truncated"):
        opened(tmp_path)["c"]
    (tmp_path / weight_map["c"]).unlink()
    found = opened(tmp_path)
    assert list(found) == ["a", "b"]
    with pytest.raises(MissingArray, match=f"c: .*not there, though {INDEX} lists it"):
        found["c"]
    assert len(found.problems) == 1


def test_a_name_that_its_shard_lacks_is_unavailable(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "d": weight_map["c"]}}))
    with pytest.raises(MissingArray, match="of its 2 tensors none has this name"):
        opened(tmp_path)["d"]


def test_a_stale_index_is_told(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    for file in set(weight_map.values()):
        (tmp_path / file).rename(tmp_path / file.replace("of-00002", "of-00003"))
    found = opened(tmp_path)
    assert list(found) == []
    assert "looks stale" in found.problems[0].text


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.bin"}}', '{"a": 1, "a": 2}']
)
def test_a_malformed_index_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=r"pytorch_model\.bin\.index\.json"):
        opened(tmp_path)


def test_shards_without_an_index_are_taken_if_they_are_all_there(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert Torch().matches(open_folder(tmp_path))
    with pytest.warns(MeshloadWarning, match="4 tensors were found in 2 files"):
        assert set(opened(tmp_path)) == {"a", "b", "c", "extra"}
    (tmp_path / weight_map["a"]).unlink()
    with pytest.raises(FormatError, match="of 2 files, 1 are not there"):
        opened(tmp_path)


def test_variants_have_files_of_their_own(tmp_path: Path) -> None:
    sharded(tmp_path, ".fp16")
    save(tmp_path / "pytorch_model.ema.bin", {"e": W})
    assert not Torch().matches(open_folder(tmp_path))
    with pytest.raises(FormatError, match=r"Torch\(variant=\.\.\.\)"):
        opened(tmp_path)
    assert list(opened(tmp_path, variant="fp16")) == ["a", "b", "c"]
    assert list(opened(tmp_path, variant="ema")) == ["e"]


def test_only_torch_files_are_recognised(tmp_path: Path) -> None:
    for name, data, expected in (
        ("x.pt", saved({"a": W}), True),
        ("x", saved({"a": W}), True),
        ("x", saved({"a": W}, legacy=True), True),
        ("x.npz", zipped({"a.npy": b""}), False),
        ("x.bin", b"\x80\x02N.", False),
        ("x.bin", b"", False),
    ):
        (tmp_path / name).write_bytes(data)
        assert Torch().matches(open_folder(tmp_path / name)) is expected, (name, data[:10])


# --- Meta's files -----------------------------------------------------------------------------------------------------

PARAMS = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 24}


def meta_model() -> dict[str, Any]:
    shapes = {
        "tok_embeddings.weight": (24, 16),
        "layers.0.attention.wq.weight": (16, 16),
        "layers.0.attention.wk.weight": (8, 16),
        "layers.0.attention.wv.weight": (8, 16),
        "layers.0.attention.wo.weight": (16, 16),
        "layers.0.feed_forward.w1.weight": (32, 16),
        "layers.0.feed_forward.w2.weight": (16, 32),
        "layers.0.feed_forward.w3.weight": (32, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.ffn_norm.weight": (16,),
        "norm.weight": (16,),
        "output.weight": (24, 16),
        "rope.freqs": (2,),
    }
    return {name: torch.from_numpy(ramp(name, shape).copy()) for name, shape in shapes.items()}


def write_meta(folder: Path, count: int, embedding_dim: int, params: Mapping[str, Any] | None = PARAMS) -> None:
    for i in range(count):
        part = {}
        for name, tensor in meta_model().items():
            dim = embedding_dim if name.startswith("tok") else 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            if "norm" in name or "rope" in name:
                part[name] = tensor
            elif name.endswith(("wk.weight", "wv.weight")) and count > 2:
                part[name] = tensor.chunk(2)[i * 2 // count].clone()
            else:
                part[name] = tensor.chunk(count, dim)[i].clone()
        save(folder / f"consolidated.{i:02}.pth", part)
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_meta_files_are_joined(tmp_path: Path, count: int, embedding_dim: int) -> None:
    write_meta(tmp_path, count, embedding_dim)
    assert Torch().matches(open_folder(tmp_path))
    found = opened(tmp_path)
    expected = meta_model()
    assert set(found) == set(expected)
    assert [n for n, t in expected.items() if not same_bits(found[n], values_of(t))] == []
    assert found.meta["params"] == PARAMS
    assert len(found["norm.weight"].pieces) == count


def test_meta_embeddings_are_not_guessed(tmp_path: Path) -> None:
    write_meta(tmp_path, 2, 1, params=None)
    with pytest.raises(FormatError, match=r"Torch\(embedding_dim=\.\.\.\)"):
        opened(tmp_path)
    truth = values_of(meta_model()["tok_embeddings.weight"])
    assert same_bits(opened(tmp_path, embedding_dim=1)["tok_embeddings.weight"], truth)
    (tmp_path / "params.json").write_text(json.dumps({"vocab_size": 24}))
    with pytest.raises(FormatError, match=r"Torch\(embedding_dim=\.\.\.\)"):
        opened(tmp_path)
    with pytest.raises(LayoutError, match="embedding_dim=2"):
        Torch(embedding_dim=2)


def test_missing_meta_files_are_an_error(tmp_path: Path) -> None:
    write_meta(tmp_path, 4, 0)
    (tmp_path / "consolidated.03.pth").unlink()
    with pytest.raises(FormatError, match=r"3 files hold 12 of the 16 rows that params\.json says"):
        opened(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(FormatError, match=r"consolidated.NN.pth, 01 are not there"):
        opened(tmp_path)


def test_one_meta_file_of_several_is_not_opened_alone(tmp_path: Path) -> None:
    write_meta(tmp_path, 2, 0)
    for file in ("consolidated.00.pth", "consolidated.01.pth"):
        with pytest.raises(FormatError, match="open their folder instead"):
            opened(tmp_path / file)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(FormatError, match="1 files hold 8 of the 16"):
        opened(tmp_path)


def test_meta_names_without_a_rule_are_unavailable(tmp_path: Path) -> None:
    write_meta(tmp_path, 2, 0)
    for i in range(2):
        file = tmp_path / f"consolidated.{i:02}.pth"
        save(file, {**torch.load(file), "layers.0.router.weight": W, **({"only": W} if i else {})})
    found = opened(tmp_path)
    with pytest.raises(MissingArray, match="how the 2 files cut it is not known"):
        found["layers.0.router.weight"]
    with pytest.raises(MissingArray, match=r"consolidated.00\.pth of the 2 files lack it"):
        found["only"]


def test_a_link_to_a_blob_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    shutil.copy(CASES["qwen2_tied_bin"] / "checkpoint" / "pytorch_model.bin", tmp_path / "blobs" / "0f3a")
    (tmp_path / "snapshot" / "pytorch_model.bin").symlink_to("../blobs/0f3a")
    assert len(opened(tmp_path / "snapshot")) == 50


def test_every_dtype_of_torch_keeps_its_bits() -> None:
    for kind in DTYPES:
        raw = torch.arange(64, dtype=torch.uint8) if kind != "bool" else torch.arange(64, dtype=torch.uint8) % 2
        tensor = raw.view(getattr(torch, kind))
        for legacy in (False, True):
            file = file_of(saved([tensor], legacy=legacy))
            array = file.array(file.root[0], kind)
            assert array.dtype == DTYPES[kind]
            assert np.asarray(array).tobytes() == raw.numpy().tobytes()
    assert array.dtype == np.bool_
    assert DTYPES["bfloat16"] == ml_dtypes.bfloat16
