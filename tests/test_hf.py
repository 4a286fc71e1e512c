"""The Hugging Face format, against golden folders, the safetensors library, and damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshload
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LayoutError, MeshloadWarning, MissingArray, SourceError
from meshload.formats import Format
from meshload.source import Folder, open_folder
from meshload_adapters._safetensors import DTYPES, HEADER_LIMIT
from meshload_adapters.formats.hf import HuggingFace

safetensors = pytest.importorskip("safetensors", reason="the reference library is not installed")

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "fixtures"
CASES = {d.parent.name: d.parent for root in (SHARED, HERE / "golden") for d in sorted(root.glob("hf/*/checkpoint"))}
CASES = {name: d for name, d in CASES.items() if list(d.glob("checkpoint/*.safetensors"))}
DCP = HERE / "golden" / "dcp" / "llama_bf16_hf_writer"
INDEX = "model.safetensors.index.json"


# --- writing by hand --------------------------------------------------------------------------------------------------


def described(tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Any = None) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def packed(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Any = None) -> Path:
    path.write_bytes(packed(*described(tensors, metadata)))
    return path


def ramp(seed: int, *shape: int) -> tuple[str, list[int], bytes]:
    return "F32", list(shape), (np.arange(np.prod(shape), dtype="<f4") + 1000 * seed).tobytes()


def write_index(folder: Path, weight_map: Mapping[str, Any], **more: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": weight_map, **more}))


def two_shards(folder: Path) -> dict[str, str]:
    """Write a folder of two shards with an index, and return its weight map."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write(folder / first, {"a": ramp(1, 2, 3), "b": ramp(2, 4)})
    write(folder / second, {"c": ramp(3, 3, 2), "d": ramp(4, 5)})
    weight_map = {"a": first, "b": first, "c": second, "d": second}
    write_index(folder, weight_map)
    return weight_map


def opened(path: Any, **options: Any) -> Checkpoint:
    return HuggingFace(**options).open(open_folder(path))


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(values)).tobytes()


def golden(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read a safetensors file with the reference library."""
    return {n: (i["dtype"], i["shape"], bytes(i["data"])) for n, i in safetensors.deserialize(file.read_bytes())}


def is_ramp(values: Any, seed: int) -> bool:
    flat = np.asarray(values).reshape(-1)
    return bool((flat == np.arange(flat.size, dtype="f4") + 1000 * seed).all())


def snapshot(root: Path) -> list[tuple[str, int, int]]:
    return [(str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(root.rglob("*"))]


class Wrapped:
    """A folder whose listing can be refused, as HTTP does, and whose reads are counted."""

    def __init__(self, folder: Folder, *, lists: bool = True) -> None:
        self.folder, self.lists, self.reads = folder, lists, list[tuple[str, int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.folder, name)

    def names(self, under: str = "") -> list[str]:
        return self.folder.names(under) if self.lists else []

    def file(self, file: str) -> Any:
        return Counted(self.folder.file(file), self.reads)


class Counted:
    def __init__(self, source: Any, reads: list[tuple[str, int, int]]) -> None:
        self.source, self.reads = source, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read_into(self, start: int, out: Any) -> None:
        self.reads.append((self.source.name, start, len(out)))
        self.source.read_into(start, out)


# --- golden folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_golden_folder_is_bit_equal(case: str) -> None:
    checkpoint = opened(CASES[case] / "checkpoint")
    truth = golden(CASES[case] / "golden.safetensors")
    shared = [name for name in checkpoint if name in truth]  # Mixtral's and NeoX's live names differ in part
    assert len(shared) >= 10
    for name in shared:
        dtype, shape, raw = truth[name]
        assert (checkpoint[name].dtype, checkpoint[name].shape) == (DTYPES[dtype][0], tuple(shape))
        assert bits(checkpoint[name]) == raw, name
    assert not checkpoint.unavailable
    assert not checkpoint.problems
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] in case or case.startswith(checkpoint.config["model_type"])


@pytest.mark.parametrize("case", CASES)
def test_every_stored_tensor_equals_the_librarys(case: str) -> None:
    folder = CASES[case] / "checkpoint"
    checkpoint = opened(folder)
    truth = {n: t for file in folder.glob("*.safetensors") for n, t in golden(file).items()}
    assert set(checkpoint) == set(truth)
    assert all(bits(checkpoint[name]) == raw for name, (_, _, raw) in truth.items())


def test_folders_of_torch_files_do_not_match() -> None:
    for d in SHARED.glob("hf/*bin*/checkpoint"):
        assert not HuggingFace().matches(open_folder(d))


def test_dcp_consolidated_folder_opens() -> None:
    folder = open_folder(DCP / "checkpoint")
    assert HuggingFace().matches(folder)
    checkpoint = HuggingFace().open(folder)
    truth = golden(DCP / "golden.safetensors")
    assert set(checkpoint) == set(truth)
    assert all(bits(checkpoint[name]) == raw for name, (_, _, raw) in truth.items())
    assert checkpoint.config is None


def test_dcp_sharded_folder_is_assembled_with_a_warning() -> None:
    folder = open_folder(DCP / "checkpoint" / "sharded")
    assert HuggingFace().matches(folder)
    with pytest.warns(MeshloadWarning, match="they hold pieces"):
        checkpoint = HuggingFace().open(folder)
    truth = golden(DCP / "golden.safetensors")
    assert set(checkpoint) == set(truth)
    for name, (_, shape, raw) in truth.items():
        assert checkpoint[name].shape == tuple(shape)
        assert bits(checkpoint[name]) == raw, name


def test_dcp_sharded_folder_without_a_ranks_file_tells_what_is_lost(tmp_path: Path) -> None:
    shutil.copytree(DCP / "checkpoint" / "sharded", tmp_path / "sharded")
    (tmp_path / "sharded" / "shard-00002-model-00001-of-00002.safetensors").unlink()
    with pytest.warns(MeshloadWarning, match="they hold pieces"):
        checkpoint = opened(tmp_path / "sharded")
    assert "lm_head.weight" in checkpoint.unavailable
    with pytest.raises(MissingArray, match=r"lm_head.weight: its pieces, in shard-.* hold \d+ of the 3104 elements"):
        checkpoint["lm_head.weight"]
    assert "model.embed_tokens.weight" in checkpoint


def test_dcp_file_of_one_rank_is_refused(tmp_path: Path) -> None:
    file = DCP / "checkpoint" / "sharded" / "shard-00001-model-00001-of-00002.safetensors"
    with pytest.raises(FormatError, match=r"shard-00001.*pieces"):
        opened(file)
    renamed = shutil.copy(file.with_name(file.name.replace("00001-model", "00004-model")), tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"model.safetensors.*pieces"):
        opened(renamed)


def test_dcp_piece_behind_an_index_is_unavailable(tmp_path: Path) -> None:
    info = json.dumps({"a": {"saved_offsets": [0]}, "b": {"saved_offsets": [4]}})
    write(tmp_path / "x.safetensors", {"a": ramp(1, 2), "b": ramp(2, 2)}, {"DCP_SHARDING_INFO": info})
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    checkpoint = opened(tmp_path)
    assert set(checkpoint) == {"a"}
    assert "only a piece" in checkpoint.unavailable["b"]


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        "{",
        '{"a": 1}',
        '{"a": {"saved_offsets": [0, 0]}}',
        '{"a": {"saved_offsets": [-1]}}',
        '{"a": {"saved_offsets": [true]}}',
    ],
)
def test_hostile_dcp_offsets_are_refused(tmp_path: Path, info: str) -> None:
    write(tmp_path / "model.safetensors", {"a": ramp(1, 2)}, {"DCP_SHARDING_INFO": info})
    with pytest.raises(FormatError, match="DCP_SHARDING_INFO"):
        opened(tmp_path)


# --- dtypes -----------------------------------------------------------------------------------------------------------

TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "U16": "uint16",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


@pytest.mark.parametrize("kind", TORCH)
def test_b54_every_dtype_that_torch_writes_keeps_its_bits(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    raw = torch.arange(1024, dtype=torch.int64).to(torch.uint8)  # all 256 patterns of a byte
    raw = raw % 2 if kind == "BOOL" else raw
    save_file({"w": raw.view(getattr(torch, TORCH[kind])).reshape(4, -1)}, tmp_path / "model.safetensors")
    array = opened(tmp_path)["w"]
    assert array.dtype == DTYPES[kind][0]
    assert array.stored is None
    assert array.shape == (4, 256 // array.dtype.itemsize)
    assert bits(array) == bytes(raw.numpy())
    assert bits(array[1:3]) == bytes(raw.numpy())[256:768]


@pytest.mark.parametrize("dtype", ["bool", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"])
def test_what_numpy_writes_keeps_its_values(tmp_path: Path, dtype: str) -> None:
    from safetensors.numpy import save_file

    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    save_file({"w": values}, tmp_path / "w.safetensors")
    found = np.asarray(opened(tmp_path / "w.safetensors")["w"])
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)


def test_values_of_extended_dtypes_are_those_meant(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors",
        {
            "bf16": ("BF16", [2], bytes([0x80, 0x3F, 0xC0, 0x7F])),
            "e4m3": ("F8_E4M3", [2], bytes([0x38, 0x7F])),
            "e5m2": ("F8_E5M2", [2], bytes([0x3C, 0x7C])),
            "e8m0": ("F8_E8M0", [1], bytes([0x80])),
        },
    )
    found = {name: np.asarray(array).astype("f8").tolist() for name, array in opened(tmp_path).items()}
    assert found["bf16"][0] == 1.0
    assert np.isnan(found["bf16"][1])
    assert found["e4m3"][0] == 1.0
    assert np.isnan(found["e4m3"][1])
    assert found["e5m2"] == [1.0, np.inf]
    assert found["e8m0"] == [2.0]
    assert DTYPES["BF16"][0] == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("kind", "shape", "nbytes", "shown"),
    [
        ("F4", [2, 4], 4, (2, 2)),
        ("F4", [3, 0], 0, (3, 0)),
        ("F6_E2M3", [2, 8], 12, (2, 6)),
    ],
)
def test_packed_dtypes_are_arrays_of_bytes(
    tmp_path: Path, kind: str, shape: list[int], nbytes: int, shown: tuple[int, ...]
) -> None:
    raw = bytes(range(nbytes))
    write(tmp_path / "model.safetensors", {"w": (kind, shape, raw)})
    array = opened(tmp_path)["w"]
    assert (array.dtype, array.stored, array.shape) == (np.dtype("u1"), kind, shown)
    assert bits(array) == raw


def test_b52_scalars_have_no_dims(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"x": ("F32", [], struct.pack("<f", 3.5)), "n": ("I64", [], struct.pack("<q", -7))})
    checkpoint = opened(tmp_path)
    assert checkpoint["x"].shape == ()
    assert np.asarray(checkpoint["x"]) == 3.5
    assert np.asarray(checkpoint["n"]) == -7
    assert checkpoint["x"][...].shape == ()


def test_b53_arrays_without_elements_read_nothing(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ("F32", [2, 0], b""), "b": ("F32", [0, 4], b""), "c": ramp(1, 2)})
    folder = Wrapped(open_folder(tmp_path))
    checkpoint = HuggingFace().open(folder)
    folder.reads.clear()
    assert np.asarray(checkpoint["a"]).shape == (2, 0)
    assert np.asarray(checkpoint["b"]).shape == (0, 4)
    assert checkpoint["a"][:1].shape == (1, 0)
    assert not folder.reads
    assert is_ramp(checkpoint["c"], 1)


def test_b15_names_that_save_model_left_out_are_aliases(tmp_path: Path) -> None:
    torch, library = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    library.save_model(module, str(tmp_path / "model.safetensors"))
    checkpoint = opened(tmp_path)
    assert (list(checkpoint), dict(checkpoint.aliases)) == (["embed.weight"], {"head.weight": "embed.weight"})
    expected = module["embed"].weight.detach().numpy().tobytes()
    held = meshload.restore(tmp_path, layout="replicated", into="numpy")
    assert {name: values.tobytes() for name, values in held.items()} == {"embed.weight": expected, "head.weight": expected}
    meshload.convert(tmp_path, tmp_path / "orbax", to="orbax")
    assert bits(meshload.open(tmp_path / "orbax")["head.weight"]) == expected


def test_metadata_that_names_no_array_of_its_file_is_no_tie(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ramp(1, 2), "b": ramp(2, 2)}, {"format": "pt", "a": "b", "c": "d"})
    checkpoint = opened(tmp_path)
    assert (list(checkpoint), dict(checkpoint.aliases)) == (["a", "b"], {})
    assert is_ramp(np.asarray(checkpoint["a"]), 1)


def test_b56_arrays_are_indexed_as_in_numpy(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"w": ramp(0, 3, 4, 5)})
    array, truth = opened(tmp_path)["w"], np.arange(60, dtype="f4").reshape(3, 4, 5)
    for key in (1, -1, slice(1, 3), (slice(None), 2), (0, 1, 2), (..., 3), (-1, slice(-2, None)), (slice(2, 1),)):
        assert np.array_equal(np.asarray(array[key]), truth[key]), key
    with pytest.raises(ValueError, match="step 1, found 2"):
        array[::2]


def test_header_of_odd_length_leaves_the_data_unaligned_and_right(tmp_path: Path) -> None:
    header, data = described({"w": ramp(1, 3, 3)})
    for spaces in range(8):
        (tmp_path / "model.safetensors").write_bytes(packed("\n" + json.dumps(header) + " " * spaces, data))
        assert is_ramp(opened(tmp_path)["w"], 1)


# --- headers ----------------------------------------------------------------------------------------------------------

SOUND = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
EIGHT = bytes(8)
BIG = "9" * 5000


def filled(text: str) -> str:
    return text.replace("§", SOUND)


def sound(old: str = "", new: str = "") -> str:
    """Return a sound header, but for one change."""
    assert old in filled('{"a":§}')
    return filled('{"a":§}').replace(old, new, 1)


DAMAGED: list[tuple[Any, bytes, str]] = [
    (b"\xff{}", b"", "not UTF-8"),
    (filled('{"\\ud800":§}'), EIGHT, "not UTF-8"),
    ("{", b"", "not JSON"),
    ("", b"", "a JSON object was expected"),
    ("[]", b"", "a JSON object was expected"),
    ("\ufeff{}", b"", "a JSON object was expected"),
    ("{}{}", b"", "not JSON"),
    (SOUND, EIGHT, "without a name"),
    (filled('{"a":§,"a":§}'), EIGHT, "'a' stands twice"),
    (filled('{"a":§,"\\u0061":§}'), EIGHT, "'a' stands twice"),
    (filled('{"__metadata__":{"x":"1","x":"2"},"a":§}'), EIGHT, "'x' stands twice"),
    (filled('{"__metadata__":{"x":1},"a":§}'), EIGHT, "strings to strings"),
    (filled('{"__metadata__":[],"a":§}'), EIGHT, "strings to strings"),
    (filled('{"__metadata__":"","a":§}'), EIGHT, "strings to strings"),
    ('{"a":null}', b"", "described by a JSON object, found None"),
    ('{"a":["F32",[2],[0,8]]}', EIGHT, "described by a JSON object"),
    ('{"a":{}}', b"", "dtype None"),
    (sound("F32", "F31"), EIGHT, "dtype 'F31'"),
    (sound('"F32"', '["F32"]'), EIGHT, "dtype"),
    (sound("F32", "f32"), EIGHT, "dtype 'f32'"),
    (sound("[2]", "2"), EIGHT, "has the shape 2"),
    (sound("[2]", "[-2]"), EIGHT, "has the shape"),
    (sound("[2]", "[2.0]"), EIGHT, "has the shape"),
    (sound("[2]", "[true,2]"), EIGHT, "has the shape"),
    (sound("[2]", '["2"]'), EIGHT, "has the shape"),
    (sound("[2]", "[" + "1," * 40 + "2]"), EIGHT, "at most 32"),
    (sound("[0,8]", "[0]"), EIGHT, "data_offsets"),
    (sound("[0,8]", "[0,8,8]"), EIGHT, "data_offsets"),
    (sound("[0,8]", "[false,8]"), EIGHT, "data_offsets"),
    (sound("[0,8]", "[0,8.0]"), EIGHT, "data_offsets"),
    (sound("[0,8]", "[-0,8]"), EIGHT, "-0 is no integer"),
    (sound("[0,8]", "[-8,0]"), EIGHT, "data_offsets"),
    (sound("[0,8]", "[8,0]"), EIGHT, "hold -64"),
    (sound("[0,8]", f"[0,{10**30}]"), EIGHT, "data_offsets"),
    (sound("[0,8]", f"[0,{BIG}]"), EIGHT, "not JSON as expected"),
    (sound("[0,8]", "[0,7]"), EIGHT, "needs 64 bits, its data_offsets .* hold 56"),
    (sound("[2]", f"[{2**63},2]"), EIGHT, "has the shape"),
    (sound("[2]", f"[{2**62},4]"), EIGHT, "needs"),
    (sound('[2],"data_offsets":[0,8]', f'[{2**62},4,0],"data_offsets":[0,0]'), b"", "overflows"),
    ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"ab", "needs 12 bits"),
    ('{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}', b"abc", "rows of 12 bits, which end within a byte"),
    ('{"a":{"dtype":"F4","shape":[0,3],"data_offsets":[0,0]}}', b"", "rows of 12 bits"),
    ('{"a":{"dtype":"F6_E3M2","shape":[4,2],"data_offsets":[0,6]}}', b"abcdef", "rows of 12 bits"),
    ('{"a":{"dtype":"F6_E2M3","shape":[1],"data_offsets":[0,1]}}', b"a", "needs 6 bits"),
    (sound("[0,8]", "[4,12]"), bytes(12), "'a' begins at byte 4 of the data, and leaves a hole"),
    (sound("}}", '},"b":' + SOUND.replace("[0,8]", "[4,12]") + "}"), bytes(12), "'b' begins at byte 4 .* overlaps"),
    (sound(), bytes(13), "5 trailing bytes: the header declares 70 bytes, the file has 75"),
    (sound(), bytes(7), "truncated: the header declares 70 bytes, the file has 69"),
    (sound("}", ',"x":NaN}'), EIGHT, "NaN is no number"),
    ('{"a":' * 100_000, b"", "nested too deeply"),
    ('{"a":' + "[" * 100_000, b"", "nested too deeply"),
]


@pytest.mark.parametrize(("header", "data", "says"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_header_is_refused_by_name(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(packed(header, data))
    with pytest.raises(FormatError, match=rf"(?s)model\.safetensors: .*{says}"):
        opened(tmp_path)


def test_length_that_is_no_length_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for raw, says in (
        (b"", "truncated: it has 0 bytes"),
        (b"1234567", "truncated: it has 7 bytes"),
        (struct.pack("<Q", HEADER_LIMIT + 1), f"a header of {HEADER_LIMIT + 1} bytes, at most {HEADER_LIMIT}"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "at most"),
        (struct.pack("<Q", 3) + b"{}", "declares 3 bytes, so at least 11 in all, the file has 10"),
        (struct.pack("<Q", HEADER_LIMIT) + b"{}", "truncated within its header"),
    ):
        file.write_bytes(raw)
        with pytest.raises(FormatError, match=says):
            opened(tmp_path)


def test_header_limit_counts_also_where_the_file_is_large_enough(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(struct.pack("<Q", HEADER_LIMIT + 1))
        out.truncate(HEADER_LIMIT + 100)  # a hole on the disk
    with pytest.raises(FormatError, match="at most"):
        opened(tmp_path)


ACCEPTED = {
    "empty": ("{}", b""),
    "spaces": (filled('  \n{"a":§}\t '), EIGHT),
    "extra fields": (sound("}", ',"x":{"y":[1,-0.5,null]}}'), EIGHT),
    "null metadata": (filled('{"__metadata__":null,"a":§}'), EIGHT),
    "empty names": (filled('{"":§}'), EIGHT),
    "names beyond ASCII": (filled('{"\\ud83d\\ude00é\\u0000":§}'), EIGHT),
    "any order": (sound("{", '{"b":' + SOUND.replace("[0,8]", "[8,16]") + ","), bytes(16)),
    "empty at the end": (filled('{"a":§,"z":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}'), EIGHT),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_unusual_header_is_accepted_as_by_the_library(tmp_path: Path, case: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(packed(*ACCEPTED[case]))
    assert reference(file) is not None
    assert set(opened(file)) == reference(file)


def reference(file: Path) -> set[str] | None:
    try:
        with safetensors.safe_open(file, "np") as found:
            return set(found.keys())
    except (safetensors.SafetensorError, OSError, ValueError):
        return None


STRICTER = ("stands twice", "is to be described by a JSON object, found [", "overflows", "has the dtype an object", "at most 32")
"""Where the module's docstring says that we refuse more."""


def verdicts_agree(file: Path) -> None:
    theirs = reference(file)
    ours, why = None, ""
    try:
        ours = set(opened(file))
    except FormatError as error:
        why = str(error)
    assert ours == theirs or any(text in why for text in STRICTER), why


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated") / "x.safetensors"


BASE = described(
    {
        "a": ramp(1, 2, 3),
        "b": ("BF16", [5], bytes(10)),
        "s": ("I64", [], bytes(8)),
        "z": ("F16", [0, 3], b""),
        "q": ("F4", [4], b"xy"),
    },
    {"format": "pt"},
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.floats(0, 1), st.sampled_from('0123456789-.,:{}[]"abFt \\u\n')), min_size=1, max_size=3),
    insert=st.booleans(),
)
def test_verdict_on_mutated_text_is_the_librarys(scratch: Path, edits: list[tuple[float, str]], insert: bool) -> None:
    text = json.dumps(BASE[0])
    for at, letter in edits:
        i = int(at * (len(text) - 1))
        text = text[:i] + letter + text[i + (not insert) :]
    scratch.write_bytes(packed(text, BASE[1]))
    verdicts_agree(scratch)


numbers = st.one_of(
    st.integers(-2, 40), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, 10**30, 1.0, True, None, "1"])
)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F31", "I4", "C128", None]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    },
    optional={"more": numbers},
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changed=st.dictionaries(st.sampled_from([*BASE[0], "new"]), st.one_of(tensors, numbers), max_size=2), size=st.integers(0, 60)
)
def test_verdict_on_mutated_fields_is_the_librarys(scratch: Path, changed: dict[str, Any], size: int) -> None:
    scratch.write_bytes(packed({**BASE[0], **changed}, bytes(size)))
    verdicts_agree(scratch)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=st.lists(tensors, max_size=3), consistent=st.booleans(), cut=st.integers(-2, 2))
def test_verdict_on_built_headers_is_the_librarys(scratch: Path, found: list[dict[str, Any]], consistent: bool, cut: int) -> None:
    at = 0
    for tensor in found:
        sizes = [n if type(n) is int and 0 <= n < 41 else 1 for n in tensor["shape"]]
        if consistent and tensor["dtype"] in DTYPES:
            nbytes = int(np.prod(sizes)) * DTYPES[tensor["dtype"]][1] // 8
            tensor |= {"shape": sizes, "data_offsets": [at, at + nbytes]}
            at += nbytes
    scratch.write_bytes(packed({f"t{i}": t for i, t in enumerate(found)}, bytes(max(0, at + cut))))
    verdicts_agree(scratch)


# --- the index --------------------------------------------------------------------------------------------------------


def test_index_and_shards_open_in_the_indexs_order(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = opened(tmp_path)
    assert list(checkpoint) == ["a", "b", "c", "d"]
    assert all(is_ramp(checkpoint[name], seed) for seed, name in enumerate("abcd", 1))
    assert checkpoint.meta["index"] == INDEX
    assert checkpoint.meta["index_metadata"] == {"total_size": 1.5}
    assert checkpoint.meta["files"] == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert checkpoint.config is None


def test_index_can_be_opened_by_its_path(tmp_path: Path) -> None:
    two_shards(tmp_path)
    assert HuggingFace().matches(open_folder(tmp_path / INDEX))
    assert list(opened(tmp_path / INDEX)) == ["a", "b", "c", "d"]


def test_b45_name_that_its_shard_lacks_is_reported_and_the_rest_stays_usable(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, weight_map | {"mtp.fc.weight": weight_map["c"]})
    checkpoint = opened(tmp_path)
    assert [(p.array, p.file) for p in checkpoint.problems] == [("mtp.fc.weight", weight_map["c"])]
    assert is_ramp(checkpoint["d"], 4)
    with pytest.raises(
        MissingArray, match=r"mtp.fc.weight: model-00002-of-00002.safetensors, where .* its header, of 2 tensors, lacks it"
    ):
        checkpoint["mtp.fc.weight"]


def test_b46_missing_shard_is_reported_with_its_tensors(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    checkpoint = opened(tmp_path)
    assert list(checkpoint) == ["a", "b"]
    assert set(checkpoint.unavailable) == {"c", "d"}
    (problem,) = checkpoint.problems
    assert problem.file == "model-00002-of-00002.safetensors"
    assert "not there" in problem.text
    assert "c, d" in problem.text


@pytest.mark.parametrize("ships", ["other names", "some of the names"])
def test_b47_stale_index_is_named_and_headers_rebuild_it(tmp_path: Path, ships: str) -> None:
    weight_map = two_shards(tmp_path)
    total = 7 if ships == "other names" else 2
    write_index(tmp_path, {name: f"model-0000{i}-of-0000{total}.safetensors" for i, name in enumerate("abcdefg", 2)})
    stale = opened(tmp_path)
    with pytest.raises(MissingArray, match=r'stale.*HuggingFace\(index="headers"\)'):
        stale["g"]
    assert any("stale" in p.text for p in stale.problems)
    with pytest.warns(MeshloadWarning, match="was not followed") as warned:
        rebuilt = opened(tmp_path, index="headers")
    assert len(warned) == 1
    assert sorted(rebuilt) == sorted(weight_map)
    assert all(is_ramp(rebuilt[name], seed) for seed, name in enumerate("abcd", 1))
    assert set(rebuilt.unavailable) == {"e", "f", "g"}


def test_headers_of_an_unfinished_download_open_what_is_there(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.warns(MeshloadWarning, match=r"number 1 \(1 of 2\) is not there"):
        checkpoint = opened(tmp_path, index="headers")
    assert list(checkpoint) == ["c", "d"]


def test_headers_that_say_what_the_index_says_give_no_warning(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    assert sorted(opened(tmp_path, index="headers")) == sorted(weight_map)


@pytest.mark.parametrize(
    "stray", ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "adapter_model.safetensors"]
)
def test_b48_index_wins_and_strays_are_listed(tmp_path: Path, stray: str) -> None:
    two_shards(tmp_path)
    write(tmp_path / stray, {"a": ("U8", [6], bytes(6)), "x": ramp(9, 2)})
    checkpoint = opened(tmp_path)
    assert checkpoint["a"].dtype == np.float32
    assert "x" not in checkpoint
    assert checkpoint.meta["unlisted"] == (stray,)


def test_b48_same_tensor_in_two_files_is_taken_where_the_index_says(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    write(tmp_path / weight_map["c"], {"a": ramp(9, 2, 3), "c": ramp(3, 3, 2), "d": ramp(4, 5)})
    assert is_ramp(opened(tmp_path)["a"], 1)
    assert opened(tmp_path).meta["unlisted_tensors"] == ()
    for index in ("index", "headers"):
        if index == "index":
            (tmp_path / INDEX).unlink()
        with pytest.raises(
            FormatError, match=r"a: both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors hold it"
        ):
            opened(tmp_path, index=index)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw[:-10], r"truncated: the header declares {n} bytes, the file has {less}"),
        (lambda raw: raw[:40], r"truncated within its header: .* the file has 40"),
        (lambda raw: raw + b"extra", r"5 trailing bytes: the header declares {n} bytes, the file has {more}"),
        (lambda raw: b"", r"truncated: it has 0 bytes"),
    ],
)
def test_b49_damaged_shard_is_named_with_both_sizes(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    two_shards(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    raw = file.read_bytes()
    file.write_bytes(change(raw))
    says = says.format(n=len(raw), less=len(raw) - 10, more=len(raw) + 5)
    checkpoint = opened(tmp_path)
    assert is_ramp(checkpoint["a"], 1)
    assert set(checkpoint.unavailable) == {"c", "d"}
    assert [p.file for p in checkpoint.problems] == [file.name]
    with pytest.raises(MissingArray, match=rf"c: {file.name}: {says}"):
        checkpoint["c"]
    assert checkpoint.meta["unlisted"] == ()
    with pytest.raises(FormatError, match=rf"{file.name}: {says}"):
        opened(file)


def test_b50_three_causes_of_a_missing_tensor_are_three_messages(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, weight_map | {"lacking": weight_map["a"], "absent": "model-00003-of-00003.safetensors"})
    checkpoint = opened(tmp_path)
    assert "never lists" in checkpoint.why_missing("nobody")
    assert "not there" in checkpoint.why_missing("absent")
    assert "lacks it" in checkpoint.why_missing("lacking")


def test_tensors_that_the_index_does_not_list_are_used_on_request(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    del weight_map["b"]
    write_index(tmp_path, weight_map)
    assert "b" not in opened(tmp_path)
    assert opened(tmp_path).meta["unlisted_tensors"] == ("b",)
    assert is_ramp(opened(tmp_path, index="union")["b"], 2)
    with pytest.warns(MeshloadWarning, match="1 are not listed"):
        assert is_ramp(opened(tmp_path, index="headers")["b"], 2)


def test_unlisted_tensor_in_two_files_is_no_union(tmp_path: Path) -> None:
    weight_map = two_shards(tmp_path)
    for name in ("a", "c"):
        write(tmp_path / weight_map[name], {name: ramp(1, 2), "x": ramp(9, 2)})
    write_index(tmp_path, {name: weight_map[name] for name in ("a", "c")})
    with pytest.raises(FormatError, match=r"x: .* does not list it, and both .*00001.* and .*00002.* hold it"):
        opened(tmp_path, index="union")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\0b", "C:x", "http://h/x", "s\\x", "sub/../../x", "", "."])
def test_file_that_leaves_the_folder_is_refused_with_index_and_tensor(tmp_path: Path, file: str) -> None:
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, weight_map | {"evil": file})
    with pytest.raises(FormatError, match=rf"{INDEX}: 'evil' is said to be in .*leaves the folder"):
        opened(tmp_path)


def test_subfolders_inside_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "x.safetensors", {"a": ramp(1, 2)})
    write_index(tmp_path, {"a": "sub/x.safetensors", "b": "sub/none.safetensors"})
    checkpoint = opened(tmp_path)
    assert is_ramp(checkpoint["a"], 1)
    assert "sub/none.safetensors" in checkpoint.unavailable["b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a JSON object was expected"),
        ("[]", "a JSON object was expected"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "'a' is to be in a file, found 1"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' stands twice"),
        ('{"weight_map": ' + '{"a":' * 50_000, "nested too deeply"),
    ],
)
def test_damaged_index_is_refused_and_headers_do_without(tmp_path: Path, text: str, says: str) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=rf"{INDEX}: .*{says}"):
        opened(tmp_path)
    with pytest.warns(MeshloadWarning, match="4 arrays were found in the headers of 2 files"):
        assert list(opened(tmp_path, index="headers")) == ["a", "b", "c", "d"]


def test_huge_index_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as out:
        out.truncate(HEADER_LIMIT + 1)
    with pytest.raises(FormatError, match=f"has {HEADER_LIMIT + 1} bytes, at most {HEADER_LIMIT}"):
        opened(tmp_path)


# --- which files ------------------------------------------------------------------------------------------------------


def test_numbered_files_without_an_index_open_with_a_warning_if_all_are_there(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    assert HuggingFace().matches(open_folder(tmp_path))
    with pytest.warns(MeshloadWarning, match=f"there is no {INDEX}; 4 arrays"):
        assert list(opened(tmp_path)) == ["a", "b", "c", "d"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"number 2 \(1 of 2\) is not there"):
        opened(tmp_path)


def test_two_whole_sets_without_an_index_are_refused(tmp_path: Path) -> None:
    for total in (1, 2):
        for i in range(1, total + 1):
            write(tmp_path / f"model-0000{i}-of-0000{total}.safetensors", {f"{i}": ramp(1, 2)})
    with pytest.raises(FormatError, match="not known which files belong together"):
        opened(tmp_path)


def test_other_file_names_are_merged_on_request_only(tmp_path: Path) -> None:
    write(tmp_path / "first.safetensors", {"a": ramp(1, 2)})
    write(tmp_path / "second.safetensors", {"b": ramp(2, 2)})
    assert not HuggingFace().matches(open_folder(tmp_path))
    with pytest.raises(FormatError, match=r"neither model.safetensors nor .* but first.safetensors, second.safetensors"):
        opened(tmp_path)
    with pytest.warns(MeshloadWarning, match="headers of 2 files"):
        assert list(opened(tmp_path, index="headers")) == ["a", "b"]


def test_variant_is_another_set_of_names(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ramp(1, 2)})
    write(tmp_path / "model.fp16.safetensors", {"a": ramp(2, 2)})
    assert is_ramp(opened(tmp_path)["a"], 1)
    assert is_ramp(opened(tmp_path, variant="fp16")["a"], 2)
    assert opened(tmp_path, variant="fp16").meta["unlisted"] == ("model.safetensors",)
    with pytest.raises(FormatError, match=r"neither model.bf16.safetensors nor model.safetensors.index.bf16.json"):
        opened(tmp_path, variant="bf16")
    sharded = "model.bf16-00001-of-00001.safetensors"
    write(tmp_path / sharded, {"a": ramp(3, 2)})
    (tmp_path / "model.safetensors.index.bf16.json").write_text(json.dumps({"weight_map": {"a": sharded}}))
    assert is_ramp(opened(tmp_path, variant="bf16")["a"], 3)


def test_variant_alone_is_not_taken_for_the_default(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16.safetensors", {"a": ramp(2, 2)})
    assert not HuggingFace().matches(open_folder(tmp_path))
    assert HuggingFace(variant="fp16").matches(open_folder(tmp_path))
    with pytest.raises(FormatError, match=r"variant=.*model.fp16.safetensors"):
        opened(tmp_path)


def test_consolidated_file_comes_after_torch_files(tmp_path: Path) -> None:
    write(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": ramp(1, 2)})
    assert HuggingFace().matches(open_folder(tmp_path))
    assert is_ramp(opened(tmp_path)["tok_embeddings.weight"], 1)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    assert not HuggingFace().matches(open_folder(tmp_path))
    write(tmp_path / "model.safetensors", {"w": ramp(2, 2)})
    assert HuggingFace().matches(open_folder(tmp_path))
    assert list(opened(tmp_path)) == ["w"]


def test_single_file_is_known_by_suffix_or_by_its_first_bytes(tmp_path: Path) -> None:
    file = write(tmp_path / "weights.safetensors", {"a": ramp(1, 2)})
    other = shutil.copy(file, tmp_path / "0a1b2c")
    assert HuggingFace().matches(open_folder(file))
    assert HuggingFace().matches(open_folder(other))
    assert is_ramp(opened(other)["a"], 1)
    for raw in (b"", b"PK\3\4" + bytes(60), b"\x80\x02}q\0.", bytes(64), (tmp_path / "weights.safetensors").read_bytes()[:60]):
        (tmp_path / "no").write_bytes(raw)
        assert not HuggingFace().matches(open_folder(tmp_path / "no"))


def test_empty_folder_does_not_match(tmp_path: Path) -> None:
    assert not HuggingFace().matches(open_folder(tmp_path))


# --- config, naming, options ------------------------------------------------------------------------------------------


def test_config_is_read_and_a_broken_one_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ramp(1, 2)}, {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}')
    checkpoint = opened(tmp_path)
    assert checkpoint.config == {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    assert checkpoint.meta["header_metadata"] == {"model.safetensors": {"format": "pt"}}
    (tmp_path / "config.json").write_text('{"model_type": ')
    broken = opened(tmp_path / "model.safetensors")
    assert broken.config is None
    assert [p.file for p in broken.problems] == ["config.json"]
    assert is_ramp(broken["a"], 1)


def test_all_three_namings_are_the_names_on_disk(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = opened(tmp_path)
    assert checkpoint.names == "hf"
    for names in ("native", "stored", "hf"):
        shown = checkpoint.with_names(names)
        assert (shown.names, list(shown), shown.arrays) == (names, list(checkpoint), checkpoint.arrays)
        assert shown.with_names("hf").names == "hf"


def test_options_are_checked() -> None:
    assert isinstance(HuggingFace(), Format)
    assert (HuggingFace().name, HuggingFace().order) == ("hf", 80)
    with pytest.raises(LayoutError, match="index='glob'"):
        HuggingFace(index="glob")


# --- links, stores and reads ------------------------------------------------------------------------------------------


def hub_cache(root: Path) -> Path:
    """Lay two shards out as huggingface_hub does, and return the snapshot."""
    blobs, snapshot = root / "models--x" / "blobs", root / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    two_shards(blobs)
    for i, file in enumerate(sorted(blobs.iterdir())):
        name = file.name
        file.rename(blobs / f"{i:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{i:064x}")
    return snapshot


def test_b82_hub_cache_is_read_through_its_links_and_left_alone(tmp_path: Path) -> None:
    snapshot_folder = hub_cache(tmp_path)
    before = snapshot(tmp_path)
    assert HuggingFace().matches(open_folder(snapshot_folder))
    checkpoint = opened(snapshot_folder)
    assert all(is_ramp(checkpoint[name], seed) for seed, name in enumerate("abcd", 1))
    assert list(opened(snapshot_folder / "model-00001-of-00002.safetensors")) == ["a", "b"]
    assert snapshot(tmp_path) == before


def test_link_to_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "a.safetensors").symlink_to("x")
    (tmp_path / "b.safetensors").symlink_to("/dev/zero")
    (tmp_path / "c.safetensors").symlink_to("nowhere")
    (tmp_path / "d.safetensors").symlink_to("d.safetensors")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "e.safetensors").symlink_to("pipe")
    write(tmp_path / "f.safetensors", {"f": ramp(1, 2)})
    write_index(tmp_path, {name: f"{name}.safetensors" for name in "abcdef"})
    checkpoint = opened(tmp_path)
    assert list(checkpoint) == ["f"]
    for name, says in zip("abcde", ["not a regular file"] * 2 + ["leads nowhere"] * 2 + ["not a regular file"], strict=True):
        assert f"{name}.safetensors: " in checkpoint.unavailable[name]
        assert says in checkpoint.unavailable[name]


def test_single_file_that_is_a_dead_link_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert HuggingFace().matches(open_folder(tmp_path))
    with pytest.raises(SourceError, match=r"model.safetensors: .*leads nowhere"):
        opened(tmp_path)


def test_key_value_store_serves_as_a_folder(tmp_path: Path) -> None:
    two_shards(tmp_path)
    store = tensorstore.KvStore.open("memory://run/").result()
    for file in tmp_path.iterdir():
        store.write(file.name, file.read_bytes()).result()
    folder = open_folder(store)
    assert HuggingFace().matches(folder)
    checkpoint = HuggingFace().open(folder)
    assert all(is_ramp(checkpoint[name], seed) for seed, name in enumerate("abcd", 1))


@pytest.mark.parametrize("index", ["index", "union", "headers"])
def test_folder_that_cannot_be_listed_opens(tmp_path: Path, index: str) -> None:
    two_shards(tmp_path)
    folder = Wrapped(open_folder(tmp_path), lists=False)
    assert HuggingFace().matches(folder)
    assert list(HuggingFace(index=index).open(folder)) == ["a", "b", "c", "d"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    if index != "headers":
        assert set(HuggingFace(index=index).open(folder).unavailable) == {"c", "d"}


def test_headers_are_read_in_two_reads_and_payload_in_one(tmp_path: Path) -> None:
    two_shards(tmp_path)
    folder = Wrapped(open_folder(tmp_path))
    checkpoint = HuggingFace().open(folder)
    reads = [r for r in folder.reads if r[0] != INDEX]
    assert sorted(r[:2] for r in reads) == [(f"model-0000{i}-of-00002.safetensors", at) for i in (1, 2) for at in (0, 8)]
    assert sum(n for *_, n in reads) == sum(8 + struct.unpack("<Q", f.read_bytes()[:8])[0] for f in tmp_path.glob("*.safetensors"))
    folder.reads.clear()
    np.asarray(checkpoint["c"][1:])
    assert [n for *_, n in folder.reads] == [16]


def test_arrays_share_one_tuple_of_sources(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = opened(tmp_path)
    assert len({id(array.pieces.sources) for array in checkpoint.values()}) == 1
    assert [s.name for s in checkpoint["a"].pieces.sources] == list(checkpoint.meta["files"])


def test_many_tensors_of_many_shapes_lie_where_the_header_says(tmp_path: Path) -> None:
    choice = random.Random(1)
    made = {f"t{i}": ramp(i % 7, *(choice.randint(0, 3) for _ in range(choice.randint(0, 4)))) for i in range(500)}
    write(tmp_path / "model.safetensors", made)
    checkpoint = opened(tmp_path)
    assert list(checkpoint) == list(made)
    for name, (_, shape, raw) in made.items():
        assert checkpoint[name].shape == tuple(shape)
        assert bits(checkpoint[name]) == raw
