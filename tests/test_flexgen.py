"""FlexGen's folders of arrays: what its converter wrote, what an interrupted one leaves, and NumPy's header in every form."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import meshload
from meshload import FormatError, LayoutError, MeshloadWarning
from meshload.errors import MissingArray, MissingPieces
from meshload.formats import installed
from meshload.pattern import Table, parse_table, refined
from meshload.source import open_folder
from meshload.testing import FormatSuite, counted, ramp, read_safetensors, same_bits, write_checkpoint
from meshload_adapters.formats.flexgen import FlexGen
from meshload_adapters.models import flexgen, hf

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden" / "flexgen" / "opt_tiny_fp16"
FOLDER = GOLDEN / "opt-tiny-np"
SHARED = HERE.parent.parent / "shared" / "fixtures"
CONFIG = GOLDEN / "hf_bin" / "config.json"
HEADS = {"num_attention_heads": 4}
QUERY = "decoder.layers.1.self_attn.q_proj.weight"

Values = Any


def golden() -> dict[str, Values]:
    """Return the live model's weights, under Hugging Face's names."""
    return read_safetensors(GOLDEN / "golden.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "opt-np", copy_function=shutil.copyfile))


# --- what FlexGen wrote -----------------------------------------------------------------------------------------------


def test_names_are_those_of_the_files() -> None:
    checkpoint = meshload.open(FOLDER)
    assert set(checkpoint) == {file.name for file in FOLDER.iterdir()}
    assert (checkpoint.format, checkpoint.problems, dict(checkpoint.unavailable)) == ("flexgen", (), {})
    truth = golden()
    same = {name: f"model.{name}" for name in checkpoint if name != "lm_head.weight"}
    same |= {f"decoder.layer_norm.{last}": f"model.decoder.final_layer_norm.{last}" for last in ("weight", "bias")}
    same["lm_head.weight"] = "lm_head.weight"
    assert [name for name in checkpoint if not same_bits(checkpoint[name], truth[same[name]])] == []


def test_every_array_is_equal_under_hugging_faces_names() -> None:
    shown = meshload.open(FOLDER, config=CONFIG).with_names("hf")
    truth = golden()
    assert set(shown) == set(truth)
    assert [name for name in truth if not same_bits(shown[name], truth[name])] == []


def test_sizes_are_told_by_shapes_and_names() -> None:
    config = meshload.open(FOLDER).config
    theirs = json.loads(CONFIG.read_bytes())
    assert config is not None
    assert {k: theirs[k] for k in config} == config
    assert "num_attention_heads" not in config


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "tp=2,pp=2", "dp=3", "pp=3", "pp=2,tp=2,dp=2"])
def test_other_ranks_get_what_they_get_of_the_hugging_face_files(mesh: str, tmp_path: Path) -> None:
    twin = write_checkpoint(tmp_path / "hf", golden(), json.loads(CONFIG.read_bytes()))
    count = int(np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")]))
    for rank in range(count):
        layout = meshload.Layout.default(dp="cut")
        found = meshload.restore(FOLDER, mesh=mesh, rank=rank, into="numpy", config=HEADS, layout=layout)
        expected = meshload.restore(twin, mesh=mesh, rank=rank, into="numpy", layout=layout)
        assert set(found) == set(expected)
        assert [n for n in expected if not same_bits(found[n], expected[n])] == []


def test_heads_are_asked_for() -> None:
    with pytest.raises(LayoutError, match=r"num_attention_heads.*config="):
        meshload.restore(FOLDER, mesh="tp=2", rank=0, into="numpy")


def test_flexgens_own_stages_hold_whole_arrays_of_some_layers() -> None:
    for stage in range(3):
        found = meshload.restore(FOLDER, mesh="pp=3", rank=stage, into="numpy", config=HEADS, names="native")
        layers = {int(m[1]) for m in (re.match(r"decoder\.layers\.(\d+)\.", n) for n in found) if m}
        assert layers == ({0, 1}, {2}, {3})[stage]
        assert [n for n in found if not same_bits(found[n], np.asarray(meshload.open(FOLDER)[n]))] == []


def test_a_rank_reads_its_own_slices() -> None:
    checkpoint, log = counted(meshload.open(FOLDER, config=HEADS))
    found = meshload.restore(checkpoint, mesh="pp=4", rank=1, into="numpy", merge_gap=0)
    assert log.nbytes == sum(v.nbytes for v in found.values())


def test_the_table_has_the_parts_of_hugging_faces() -> None:
    (ours,) = map(parse_table, flexgen.TABLES)
    theirs = next(t for t in map(parse_table, hf.TABLES) if "opt" in t.families)
    narrow = {"project_in", "project_out"}  # embeddings narrower than the layers have no place in FlexGen
    assert parts_of(ours) == {part: dims for part, dims in parts_of(theirs).items() if part not in narrow}


def parts_of(table: Table) -> dict[str, frozenset[str]]:
    lines = [
        (part, {*line.counted, *refined(line.pattern, table.joints).dims_of(part)}) for line in table.lines for part in line.parts
    ]
    return {part: frozenset(dims) for part, dims in lines}


# --- damage -----------------------------------------------------------------------------------------------------------


def test_b87_empty_and_short_files_are_named(folder: Path) -> None:
    """An interrupted conversion leaves files that the next run trusts."""
    empty, short = "decoder.layers.2.fc1.weight", "decoder.layers.0.self_attn.k_proj.bias"
    (folder / empty).write_bytes(b"")
    whole = (folder / short).stat().st_size
    (folder / short).write_bytes((folder / short).read_bytes()[:-10])
    checkpoint = meshload.open(folder, config=HEADS)
    assert {p.file for p in checkpoint.problems} == {empty, short}
    with pytest.raises(MissingArray, match=rf"{re.escape(empty)}: empty, .*interrupted"):
        checkpoint[empty]
    with pytest.raises(MissingArray, match=rf"truncated: .*<f2 \(32,\), which makes {whole} bytes .* the file has {whole - 10}"):
        checkpoint[short]
    with pytest.raises((MissingArray, MissingPieces), match="empty, a NumPy file begins with its header"):
        meshload.restore(checkpoint, mesh="pp=2", rank=1, into="numpy")
    assert not meshload.check(folder, config=HEADS).ok
    found = meshload.restore(checkpoint, mesh="tp=2", rank=1, into="numpy", missing="ignore")
    assert len(found) == 67


def test_b87_a_short_file_of_a_tied_array_is_named_though_its_twin_is_there(folder: Path) -> None:
    tokens = folder / "decoder.embed_tokens.weight"
    tokens.write_bytes(tokens.read_bytes()[:-10])
    for include in (None, tokens.name):
        with pytest.raises(MissingArray, match=rf"{re.escape(tokens.name)}: truncated: "):
            meshload.restore(folder, layout="replicated", names="native", into="numpy", include=include)


@pytest.mark.parametrize("length", [3, 6, 7, 9, 40])
def test_a_file_cut_in_its_header_is_named(length: int, folder: Path) -> None:
    (folder / QUERY).write_bytes((folder / QUERY).read_bytes()[:length])
    with pytest.raises(MissingArray, match=rf"{re.escape(QUERY)}: (truncated within its header|not a NumPy file)"):
        meshload.open(folder)[QUERY]


def test_trailing_bytes_are_told(folder: Path) -> None:
    (folder / QUERY).write_bytes((folder / QUERY).read_bytes() + b"12345")
    with pytest.raises(MissingArray, match="5 trailing bytes"):
        meshload.open(folder)[QUERY]


def test_a_missing_file_is_named(folder: Path) -> None:
    for name in (QUERY, "decoder.embed_positions.weight", "decoder.layer_norm.bias"):
        (folder / name).unlink()
    checkpoint = meshload.open(folder, config={**HEADS, "max_position_embeddings": 62})
    assert set(checkpoint.unavailable) == {QUERY, "decoder.embed_positions.weight", "decoder.layer_norm.bias"}
    with pytest.raises(MissingArray, match="not there, though other layers have it"):
        checkpoint[QUERY]
    with pytest.raises(MissingArray, match="each FlexGen model has it"):
        checkpoint["decoder.layer_norm.bias"]


def test_a_layer_without_any_file_is_missed(folder: Path) -> None:
    for file in folder.glob("decoder.layers.1.*"):
        file.unlink()
    checkpoint = meshload.open(folder)
    assert len(checkpoint.unavailable) == 16
    assert "though there is a layer 3" in checkpoint.unavailable[QUERY]


def test_biases_that_no_layer_has_are_not_missed(folder: Path) -> None:
    for file in folder.glob("*.bias"):
        file.unlink()
    checkpoint = meshload.open(folder)
    assert (checkpoint.problems, dict(checkpoint.unavailable)) == ((), {})
    assert checkpoint.config is not None
    assert checkpoint.config["enable_bias"] is False


def test_the_head_is_the_embedding_where_it_is_missing(folder: Path) -> None:
    """FlexGen writes it, and reads the embedding in its place."""
    (folder / "lm_head.weight").unlink()
    checkpoint = meshload.open(folder, config=HEADS)
    assert dict(checkpoint.aliases) == {"lm_head.weight": "decoder.embed_tokens.weight"}
    assert checkpoint.problems == ()
    found = meshload.restore(checkpoint, mesh="tp=2", rank=1, into="numpy")
    assert same_bits(found["lm_head.weight"], golden()["lm_head.weight"][51:])


def test_a_head_that_differs_from_the_embedding_is_told(folder: Path) -> None:
    np.save(folder / "h.npy", ramp("head", (101, 32), np.float16))
    (folder / "h.npy").rename(folder / "lm_head.weight")
    with pytest.warns(MeshloadWarning, match="tied by the config, and their stored copies differ"):
        meshload.restore(folder, into="numpy", config=HEADS)


def test_a_folder_of_nothing_sound_is_refused(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(b"")
    assert FlexGen().matches(open_folder(folder))
    with pytest.raises(
        FormatError, match=r"none of its files is a NumPy array that can be read: decoder\.embed_positions\.weight: empty"
    ):
        meshload.open(folder)


def test_other_files_are_told(folder: Path) -> None:
    (folder / "notes.txt").write_text("by hand")
    (folder / "logs").mkdir()
    checkpoint = meshload.open(folder)
    assert checkpoint.meta["unlisted"] == ("notes.txt",)
    assert checkpoint.problems == ()


def test_a_config_beside_the_arrays_is_read(folder: Path) -> None:
    shutil.copyfile(CONFIG, folder / "config.json")
    assert len(meshload.restore(folder, mesh="tp=2", rank=0, into="numpy")) == 69
    theirs = json.loads(CONFIG.read_bytes())
    (folder / "config.json").write_text(json.dumps({**theirs, "vocab_size": 50272}))
    (problem,) = meshload.open(folder).problems
    assert problem.text == "config.json: vocab_size is 50272, the files give 101"
    (folder / "config.json").write_text("{")
    assert "not JSON" in meshload.open(folder).problems[0].text


# --- NumPy's header ---------------------------------------------------------------------------------------------------


def written(values: Values, version: tuple[int, int] = (1, 0)) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, values, version=version)
    return out.getvalue()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "|i1", "<i4", "<i8", "|u1", "|b1", "<c8"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4)])
def test_arrays_of_every_kind_are_read(dtype: str, shape: tuple[int, ...], folder: Path) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    (folder / "decoder.version").write_bytes(written(values))
    (folder / "decoder.fortran").write_bytes(written(np.asarray(values, order="F"), (2, 0)))
    checkpoint = meshload.open(folder)
    assert same_bits(checkpoint["decoder.version"], values)
    assert same_bits(checkpoint["decoder.fortran"], values)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': '|V2', 'fortran_order': False, 'shape': (2,), }", "bfloat16 written by NumPy looks so"),
        ("{'descr': '>f2', 'fortran_order': False, 'shape': (2,), }", "its dtype is '>f2', little-endian numbers were expected"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", r"its dtype is '\|O'"),
        ("{'descr': '<f3', 'fortran_order': False, 'shape': (2,), }", "which NumPy does not know"),
        ("{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (2,), }", "its dtype is"),
        ("{'descr': '<f2', 'fortran_order': 1, 'shape': (2,), }", "not as NumPy writes it"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': [2], }", "not as NumPy writes it"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (-2, -1), }", "not as NumPy writes it"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (True, 2), }", "not as NumPy writes it"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 1 << 62), }", "not as NumPy writes it"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 4611686018427387904), }", "its shape is"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (4611686018427387904,), }", "its shape is"),
        ("{'descr': '<f2', 'fortran_order': False, 'shape': (1000000,), }", "truncated"),
        ("{'descr': '<f2', 'shape': (2,), }", "not as NumPy writes it, with descr, fortran_order and shape"),
        ("__import__('os').system('true')", "not as NumPy writes it"),
        ("(" * 2000, "not as NumPy writes it"),
        ("", "not as NumPy writes it"),
    ],
)
def test_a_hostile_header_is_refused_by_name(header: str, words: str, folder: Path) -> None:
    raw = header.encode()
    (folder / QUERY).write_bytes(b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + b"1234")
    with pytest.raises(MissingArray, match=rf"{re.escape(QUERY)}: .*{words}"):
        meshload.open(folder)[QUERY]


@pytest.mark.parametrize(
    "start", [b"\x93NUMPY\x09\x00\x10\x00", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", b"\x93NUMPX\x01\x00", b"PK\x03\x04"]
)
def test_what_is_no_numpy_file_is_refused_by_name(start: bytes, folder: Path) -> None:
    (folder / QUERY).write_bytes(start + b" " * 200)
    with pytest.raises(MissingArray, match=re.escape(QUERY)):
        meshload.open(folder)[QUERY]


# --- recognition ------------------------------------------------------------------------------------------------------


def test_only_its_own_folders_are_recognised() -> None:
    ours = FlexGen()
    found = {path for path in folders() if ours.matches(open_folder(path))}
    assert {path.name for path in found} == {"opt-tiny-np"}
    assert FOLDER in found
    assert [name for name, format in installed().items() if format.matches(open_folder(FOLDER))] == ["flexgen"]


def folders() -> Iterator[Path]:
    for root in (HERE / "golden", SHARED):
        yield from (path for path in root.glob("*/**/") if path.is_dir()) if root.is_dir() else ()


def test_object_stores_are_read_as_well() -> None:
    store = tensorstore.KvStore.open("memory://opt-np/").result()
    for file in FOLDER.iterdir():
        store.write(file.name, file.read_bytes()).result()
    checkpoint = meshload.open(store)
    assert same_bits(checkpoint[QUERY], golden()[f"model.{QUERY}"])


class TestFlexGen(FormatSuite):
    format = FlexGen()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Values]]]:
        yield FOLDER, {file.name: np.load(file) for file in FOLDER.iterdir()}
