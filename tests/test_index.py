"""Indexes of files of other formats: what TensorStore, Orbax and we read through them, what is refused, what is left alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Array, LayoutError, Pieces, concatenate, stack
from meshload.array import Step, stored_whole
from meshload.cli import main
from meshload.errors import FormatError, SourceError
from meshload.indexing import FEW, LEAST, grid
from meshload.pieces import union
from meshload.source import LocalFile, LocalFolder
from meshload.testing import InMemory, ramp, read_safetensors, same_bits, write_checkpoint, write_safetensors
from meshload.writing import locked, staging_of

GOLDEN = Path(__file__).parent / "golden"
HF = sorted(d.name for d in (GOLDEN / "hf").iterdir())
LLAMA = GOLDEN / "hf" / "llama_gqa_sharded_bf16"
OTHERS = sorted(
    [d / "checkpoint" for d in (GOLDEN / "dcp").iterdir()]
    + [d for kind in ("deepspeed", "megatron") for d in (GOLDEN / kind).iterdir() if d.is_dir()]
    + [GOLDEN / "flexgen" / "opt_tiny_fp16" / "opt-tiny-np"]
    + [GOLDEN / "fast_llm" / "qwen2_tied_pp2_dp2" / form for form in ("distributed", "fast_llm")]
)
ours = ("manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt", "meshload_index.json")


def label(path: Path) -> str:
    return str(path.relative_to(GOLDEN)).replace("/checkpoint", "")


def tensorstore(folder: Path, name: str) -> Any:
    import tensorstore as ts

    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()


def unlike(made: meshload.Index, expected: Any) -> list[str]:
    """Return the names of the arrays in which bare TensorStore finds other bits than those."""
    return [n for n in made.arrays if not same_bits(tensorstore(made.path, n).read().result(), np.asarray(expected[n]))]


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to))


def state(folder: Path) -> dict[str, Any]:
    """Return size, time and digest of all files in a folder, by name."""
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        at = file.stat()
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        found[str(file.relative_to(folder))] = (at.st_size, at.st_mtime_ns, digest)
    return found


# --- what is read through an index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "links"])
@pytest.mark.parametrize("case", HF)
def test_tensorstore_reads_every_array_of_hf_as_golden(case: str, beside: bool, tmp_path: Path) -> None:
    source = copied(GOLDEN / "hf" / case / "checkpoint", tmp_path / "source")
    names = "transformers" if case in ("gpt_neox_fused_qkv", "mixtral_sharded") else None
    made = meshload.index(source, None if beside else tmp_path / "index", names=names)
    golden = read_safetensors(GOLDEN / "hf" / case / "golden.safetensors")
    assert (set(made.arrays), dict(made.left_out)) == (set(golden) - set(meshload.open(source).aliases), {})
    assert unlike(made, golden) == []
    assert made.shown_bytes == sum(golden[n].nbytes for n in made.arrays)


@pytest.mark.parametrize("source", OTHERS, ids=label)
@pytest.mark.filterwarnings("ignore::meshload.MeshloadWarning")
def test_tensorstore_reads_other_formats_as_we_do(source: Path, tmp_path: Path) -> None:
    made = meshload.index(source, tmp_path / "index")
    checkpoint = meshload.open(source)
    assert set(made.arrays) | set(made.left_out) == {*checkpoint.arrays, *checkpoint.unavailable}
    assert unlike(made, checkpoint) == []
    assert len(made.arrays) >= 0.9 * len(checkpoint)
    assert [why for n, why in made.left_out.items() if n in checkpoint and "chunks of" not in why] == []


def test_torch_files_are_shown_with_their_transposed_and_shared_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    state_dict = {"a": base, "b": base.T, "c": base[2:4], "d": torch.tensor(7), "e": torch.zeros(0, 3), "f": base[:, 3]}
    (tmp_path / "source").mkdir()
    torch.save(state_dict, tmp_path / "source" / "pytorch_model.bin")
    made = meshload.index(tmp_path / "source")
    opened = meshload.open(tmp_path / "source")
    assert (opened.format, set(made.arrays)) == ("torch", set(state_dict))
    assert unlike(made, opened) == []
    assert same_bits(np.asarray(opened["b"]), base.T.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    assert json.loads(tensorstore(made.path, "b").kvstore.read(".zarray").result().value)["order"] == "F"


def test_an_index_in_canonical_names_shows_parts_of_fused_arrays(tmp_path: Path) -> None:
    source = GOLDEN / "megatron" / "legacy-tp2-pp2-fp32"
    config = {"model_type": "llama"}
    made = meshload.index(source, tmp_path / "index", names="hf", config=config)
    shown = meshload.open(source, config=config).with_names("hf")
    assert set(made.arrays) == set(shown)
    assert "model.layers.0.self_attn.q_proj.weight" in made.arrays
    assert unlike(made, shown) == []


ORBAX = """
import json, sys
from pathlib import Path
import jax, numpy as np, orbax.checkpoint as ocp
import meshload
from jax.sharding import NamedSharding, PartitionSpec as P
from meshload.testing import read_safetensors, same_bits

jax.config.update("jax_enable_x64", True)
mesh = jax.make_mesh((2, 2), ("x", "y"))

def target(array):
    spec = [axis if n and n % 2 == 0 else None for axis, n in zip(("x", "y"), array.shape)]
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, P(*spec)))

def flat(tree):
    return {".".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

wrong = {}
for path, golden in zip(sys.argv[1::2], sys.argv[2::2]):
    expected = read_safetensors(Path(golden))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        wanted = jax.tree.map(target, tree)
        cut = flat(checkpointer.restore(path, wanted))
        plain = flat(checkpointer.restore(path))
    bad = sorted({*cut} ^ {*expected})
    for name, array in cut.items():
        sharded = array.sharding == flat(wanted)[name].sharding
        parts = all(same_bits(np.asarray(s.data), np.asarray(expected[name][s.index], order="C")) for s in array.addressable_shards)
        if not sharded or not parts or not same_bits(plain[name], expected[name]):
            bad.append(name)
    if not any(len(a.sharding.device_set) == 4 and not a.is_fully_replicated for a in cut.values()):
        bad.append("nothing was cut")
    wrong[path] = bad
print(json.dumps(wrong))
"""

ODD: dict[str, Any] = {
    "a..b": ramp("q", (8, 4)),
    ".x": ramp("w", (4,)),
    "y.": ramp("e", (4,)),
    "..": ramp("g", (3,)),
    "a/b.c": ramp("r", (4, 4)),
    "../up": ramp("k", (2,)),
    "\u00fc \u6f22.k\\n": ramp("t", (8,)),
    "m": ramp("y", (4,)),
    "m.n": ramp("u", (4, 2)),
    "0.0": ramp("o", (2,)),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 4), np.float32),
    "f8": np.arange(8).astype(ml_dtypes.float8_e4m3fn),
    "f8.e5": np.arange(8).astype(ml_dtypes.float8_e5m2),
    "bf": np.arange(8).astype(ml_dtypes.bfloat16),
    "i64": np.arange(8) << 40,
    "b": np.array([True, False] * 4),
}


def test_orbax_restores_indexes_on_four_devices_with_any_sharding(tmp_path: Path, run_python: Callable[..., str]) -> None:
    pytest.importorskip("orbax.checkpoint")
    pairs: list[Path] = []

    def shown(source: Path, golden: Path, *, beside: bool = False, names: str | None = None) -> None:
        made = meshload.index(source, None if beside else tmp_path / f"index{len(pairs)}", names=names)
        checkpoint = meshload.open(source)
        expected = read_safetensors(golden)
        kept = {name: expected[name] if name in expected else np.asarray(checkpoint[name]) for name in made.arrays}
        assert {n: why for n, why in made.left_out.items() if n in checkpoint} == {}
        pairs.extend((made.path, write_safetensors(tmp_path / f"golden{len(pairs)}.safetensors", kept)))

    for case in HF:
        source = copied(GOLDEN / "hf" / case / "checkpoint", tmp_path / case)
        names = "transformers" if case in ("gpt_neox_fused_qkv", "mixtral_sharded") else None
        shown(source, GOLDEN / "hf" / case / "golden.safetensors", beside=case != "llama_gqa_sharded_bf16", names=names)
    shown(GOLDEN / "megatron" / "legacy-tp2-pp2-fp32", GOLDEN / "megatron" / "legacy-tp2-pp2-fp32" / "golden.safetensors")
    shown(GOLDEN / "dcp" / "fsdp1" / "checkpoint", GOLDEN / "dcp" / "fsdp1" / "golden.safetensors")
    odd = write_checkpoint(tmp_path / "odd", ODD)
    shown(odd, odd / "model.safetensors")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    wrong = json.loads(run_python(ORBAX, *pairs, env=devices).splitlines()[-1])
    assert wrong == {str(path): [] for path in pairs[::2]}


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "links"])
def test_names_of_any_kind_are_keys(beside: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "odd \u6f22 #?%41", ODD)
    made = meshload.index(source, None if beside else tmp_path / "in dex")
    assert set(made.arrays) == set(ODD)
    assert unlike(made, ODD) == []
    opened = meshload.open(made.path, format="orbax").with_names("stored")
    assert [n for n in ODD if not same_bits(np.asarray(opened[n]), np.asarray(ODD[n]))] == []


def test_we_restore_from_an_index_with_its_config(tmp_path: Path) -> None:
    meshload.index(LLAMA / "checkpoint", tmp_path / "index")
    for rank in range(4):
        mesh: dict[str, Any] = {"mesh": "pp=2,tp=2", "rank": rank, "into": "numpy"}
        found = meshload.restore(tmp_path / "index", **mesh)
        expected = meshload.restore(LLAMA / "checkpoint", **mesh)
        assert set(found) == set(expected)
        assert [n for n in expected if not same_bits(found[n], expected[n])] == []
    assert meshload.check(tmp_path / "index").ok


def test_the_index_is_small(tmp_path: Path) -> None:
    for case in HF:
        made = meshload.index(GOLDEN / "hf" / case / "checkpoint", tmp_path / case)
        assert made.nbytes < 1024 * len(made.arrays)
        assert made.nbytes > sum(p.stat().st_size for p in made.path.glob("*.ocdbt"))


def test_large_arrays_are_cut_along_their_first_dim(tmp_path: Path) -> None:
    big = np.arange(9 << 20, dtype=np.uint16).reshape(3 << 11, 3 << 9)
    made = meshload.index(write_checkpoint(tmp_path / "source", {"w": big}), tmp_path / "index")
    found = tensorstore(made.path, "w")
    assert found.chunk_layout.read_chunk.shape == (1024, 1536)
    assert same_bits(found[1000:2100, 7].read().result(), big[1000:2100, 7].copy())
    assert made.nbytes < 4096


def test_ten_thousand_arrays_take_seconds_and_several_nodes(tmp_path: Path) -> None:
    import tensorstore as ts

    values = np.arange(10_000 * 6, dtype=np.int32).reshape(10_000, 2, 3)
    source = write_checkpoint(tmp_path / "source", {f"layers.{i}.w": values[i] for i in range(10_000)})
    begin = time.process_time()
    made = meshload.index(source, tmp_path / "index")
    assert time.process_time() - begin < 15
    assert len(made.arrays) == 10_000
    [nodes] = made.path.glob("index.*.ocdbt")
    assert nodes.read_bytes().count(bytes.fromhex("0cdb20de")) > 20
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{made.path}/"}}).result()
    assert len(store.list().result()) == 20_000
    for i in (0, 1, 4999, 7777, 9999):
        assert same_bits(tensorstore(made.path, f"layers.{i}.w").read().result(), values[i])


# --- the database -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 700])
def test_tensorstore_reads_trees_of_any_height(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorstore as ts

    from meshload_adapters import _ocdbt

    monkeypatch.setattr(_ocdbt, "NODE_BYTES", 150)
    chosen = random.Random(count)
    data = chosen.randbytes(5000)
    (tmp_path / "x").mkdir()
    for file in ("x/a.bin", "b.bin"):
        (tmp_path / file).write_bytes(data)
    values: dict[str, Any] = {}
    while len(values) < count:
        key = "".join(chosen.choices("ab\u00fc/.", k=chosen.randint(1, 200)))
        start, length = chosen.randrange(4000), chosen.randrange(1000)
        inline = chosen.random() < 0.3
        values[key] = data[start : start + length] if inline else _ocdbt.Range(chosen.choice(["x/a.bin", "b.bin"]), start, length)
    manifest, nodes = _ocdbt.database(values, "nodes", uuid=bytes(range(16)), time_ns=time.time_ns())
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    (tmp_path / "nodes").write_bytes(nodes)
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/"}}).result()
    assert sorted(store.list().result()) == sorted(key.encode() for key in values)
    for key, value in values.items():
        expected = data[value.offset : value.offset + value.length] if isinstance(value, _ocdbt.Range) else value
        assert store.read(key).result().value == expected
    assert store.read("nobody").result().state == "missing"
    assert sorted(store.list(ts.KvStore.KeyRange("b", "c")).result()) == sorted(k.encode() for k in values if k.startswith("b"))


# --- arrays as grids --------------------------------------------------------------------------------------------------

FILE = LocalFile(Path("/nowhere/a.bin"), "a.bin", 1 << 40)
F4 = np.dtype(np.float32)


def array(*shape: int, offset: int = 0, source: Any = FILE) -> Array:
    return stored_whole("w", F4, shape, source, offset)


def test_parts_of_ranks_are_chunks() -> None:
    parts = [array(6, 4, offset=1000 * r) for r in range(3)]
    columns = grid(concatenate(parts, 1))
    assert (columns.chunk, columns.order, columns.offset.tolist()) == ((6, 4), "C", [0, 1000, 2000])
    rows = grid(concatenate(parts, 0))
    assert (rows.chunk, rows.order, rows.offset.tolist()) == ((6, 4), "C", [0, 1000, 2000])


def test_a_transposed_array_lies_the_other_way_round() -> None:
    found = grid(array(6, 4).T)
    assert (found.chunk, found.order, found.offset.tolist()) == ((4, 6), "F", [0])


def test_uneven_parts_share_a_divisor() -> None:
    found = grid(concatenate([array(6, 4), array(4, 4, offset=5000)], 0))
    assert found.chunk == (2, 4)
    assert found.offset.tolist() == [0, 32, 64, 5000, 5032]


def test_a_cut_row_is_chunks_of_one_row() -> None:
    found = grid(array(6, 4)[:, :2])
    assert (found.chunk, found.offset.tolist()) == ((1, 2), [16 * i for i in range(6)])


def test_copies_are_taken_once() -> None:
    one, other = array(6, 4), array(6, 4, offset=5000)
    both = Array("w", F4, (6, 4), union([one.pieces, other.pieces]))
    assert grid(both).offset.tolist() == [0]
    summed = Array("w", F4, (6, 4), both.pieces, copies="sum")
    with pytest.raises(LayoutError, match="the sum of what is stored in several places"):
        grid(summed)


def place(start: tuple[int, ...], one: Array) -> Pieces:
    return one.pieces.place(start)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Array("w", F4, (8, 4), array(6, 4).pieces), "8 of its 32 elements are stored nowhere"),
        (Array("w", F4, (8, 4), union([array(6, 4).pieces, place((4, 0), array(4, 4))])), "more than once, in different boxes"),
        (Array("w", F4, (6, 4), array(6, 4).pieces, step=Step("+", 1.0)), r"the stored ones \+ 1"),
        (array(512, 512)[:, :256], r"512 chunks of 1x256 elements, 1024 bytes each; beyond 256 chunks, .* 16384"),
        (array(6, 4, offset=(1 << 40) - 95), r"end at 1099511627777 of a.bin, which has 1099511627776"),
        (array(6, 4, source=InMemory("b.bin", bytes(96))), "b.bin, which is no local file"),
    ],
    ids=["hole", "overlap", "step", "tiny", "truncated", "no file"],
)
def test_what_is_no_grid_of_runs_says_why(given: Array, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        grid(given)


def test_small_chunks_may_be_few_and_many_must_be_large() -> None:
    assert len(grid(array(FEW, 8)[:, :4]).offset) == FEW
    assert len(grid(array(FEW + 1, LEAST)[:, : LEAST // 4]).offset) == FEW + 1
    with pytest.raises(LayoutError, match="257 chunks"):
        grid(array(FEW + 1, LEAST)[:, : LEAST // 4 - 1])


def test_any_grid_gives_the_elements_that_reading_gives(tmp_path: Path) -> None:
    """Chains of operations, against NumPy: what a grid says of a file is what the array is."""
    data = np.arange(20_000, dtype=np.uint16)
    path = tmp_path / "a.bin"
    path.write_bytes(b"?" + data.tobytes())
    file = LocalFolder(tmp_path).file("a.bin")
    chosen, orders = random.Random(0), set()
    for _ in range(300):
        shape = tuple(chosen.choice([1, 2, 3, 4, 6]) for _ in range(chosen.randint(0, 3)))
        parts = [stored_whole("w", data.dtype, shape, file, 1 + 2 * chosen.randrange(10_000)) for _ in range(2)]
        made = chosen.choice(parts) if not shape else chosen.choice([parts[0], concatenate(parts, 0), stack(parts, 0)])
        for _ in range(chosen.randint(0, 3)):
            d = chosen.randrange(made.ndim) if made.ndim else 0
            if made.ndim and chosen.random() < 0.4:
                made = made.transpose(*chosen.sample(range(made.ndim), made.ndim))
            elif made.ndim and chosen.random() < 0.5:
                made = made[(slice(None),) * d + (slice(chosen.randrange(made.shape[d]), None),)]
            elif made.ndim > 1:
                made = made.merge(0, 2)
        found = grid(made)
        orders.add(found.order)
        assert same_bits(assembled(found), np.asarray(made))
    assert orders == {"C", "F"}


def assembled(found: Any) -> Any:
    """Read a grid as its definition says."""
    whole = np.empty(found.array.shape, found.array.dtype)
    counts = [range(n // c) for n, c in zip(whole.shape, found.chunk, strict=True)]
    n = int(np.prod(found.chunk))
    for at, file, offset in zip(itertools.product(*counts), found.file, found.offset, strict=True):
        values = np.frombuffer(found.files[file].path.read_bytes(), whole.dtype, n, offset)
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, found.chunk, strict=True))
        whole[box] = values.reshape(found.chunk, order=found.order)
    return whole


@pytest.mark.parametrize("split", [1, 2])
def test_order_f_is_read_by_tensorstore(split: int, tmp_path: Path) -> None:
    values = ramp("w", (6, 8))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.bin").write_bytes(values.tobytes())
    file = LocalFolder(tmp_path / "source").file("a.bin")
    part = 6 // split
    whole = concatenate([stored_whole("w", F4, (part, 8), file, r * part * 32) for r in range(split)], 0).T
    made = grid(whole)
    assert made.order == "F"
    from meshload_adapters.formats.orbax import Orbax

    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "a.bin").symlink_to(tmp_path / "source" / "a.bin")
    Orbax().index(LocalFolder(tmp_path / "index"), [made], {file.path: "a.bin"}, beside=False, config=None)
    assert same_bits(tensorstore(tmp_path / "index", "w").read().result(), values.T.copy())


# --- what is left out -------------------------------------------------------------------------------------------------


def test_what_tensorstore_has_no_dtype_for_is_left_out_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,)), "x": ramp("x", (4,))})
    from meshload_adapters.formats.orbax import Orbax

    odd = stored_whole("w", np.dtype(ml_dtypes.float8_e4m3), (4,), FILE)
    with pytest.raises(LayoutError, match="TensorStore has no dtype float8_e4m3"):
        Orbax().check_shown(odd)
    for name in ("", "\udc80"):
        with pytest.raises(LayoutError, match="empty, or no text"):
            Orbax().check_shown(stored_whole(name, F4, (4,), FILE))
    assert meshload.index(source, tmp_path / "index").left_out == {}


def test_a_missing_shard_is_left_out_with_the_reason(tmp_path: Path) -> None:
    source = copied(LLAMA / "checkpoint", tmp_path / "source")
    (source / "model-00002-of-00003.safetensors").unlink()
    made = meshload.index(source)
    checkpoint = meshload.open(source)
    assert set(made.arrays) == set(checkpoint)
    assert dict(made.left_out) == dict(checkpoint.unavailable)
    assert len(made.left_out) > 3


def test_an_orbax_checkpoint_needs_no_index(tmp_path: Path) -> None:
    source = GOLDEN / "orbax" / "standard_1dev" / "checkpoint"
    with pytest.raises(LayoutError, match=r"none of its arrays can be shown by orbax: .*chunks .* that have to be decoded"):
        meshload.index(source, tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_a_file_needs_a_folder_for_its_index(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "some.safetensors", {"w": ramp("w", (4, 2))})
    with pytest.raises(LayoutError, match=r"an index speaks for a folder.*dst="):
        meshload.index(file)
    made = meshload.index(file, tmp_path / "index")
    assert unlike(made, {"w": ramp("w", (4, 2))}) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "some.safetensors"]


def test_other_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="only local files"):
        meshload.index("memory://nothing/", tmp_path / "index")
    with pytest.raises(LayoutError, match="gs://"):
        meshload.index(LLAMA / "checkpoint", "gs://bucket/index")


# --- beside the files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [LLAMA / "checkpoint", *OTHERS], ids=label)
@pytest.mark.filterwarnings("ignore::meshload.MeshloadWarning")
def test_an_index_beside_the_files_leaves_them_and_their_readers_alone(source: Path, tmp_path: Path) -> None:
    path = copied(source, tmp_path / "source")
    before, opened = state(path), meshload.open(path)
    made = meshload.index(path)
    after = state(path)
    assert {file: at for file, at in after.items() if file in before} == before
    assert {file for file in after if file not in before and not file.endswith(".ocdbt")} == {*ours} - {"manifest.ocdbt"}
    again = meshload.open(path)
    assert (again.format, set(again), again.meta.get("passed_over")) == (opened.format, set(opened), opened.meta.get("passed_over"))
    if opened.format != "flexgen":  # which needs to be told a number before it can be checked
        assert meshload.check(path).problems == meshload.check(source).problems
    assert set(meshload.open(path, format="orbax").with_names("stored")) == set(made.arrays)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_the_folder_around_an_indexed_one_keeps_its_format(tmp_path: Path) -> None:
    step = copied(GOLDEN / "dcp" / "fsdp1" / "checkpoint", tmp_path / "10")
    before = meshload.open(tmp_path)
    meshload.index(step)
    again = meshload.open(tmp_path)
    assert (before.format, again.format, set(again)) == ("dcp", "dcp", set(before))


def test_an_index_is_replaced_and_leaves_nothing_behind(tmp_path: Path) -> None:
    source = copied(LLAMA / "checkpoint", tmp_path / "source")
    for target in (None, tmp_path / "index"):
        meshload.index(source, target)
        first = {str(p.relative_to(source)) for p in source.rglob("*")}
        made = meshload.index(source, target)
        assert len(list(made.path.glob("*.ocdbt"))) == 2
        assert len({str(p.relative_to(source)) for p in source.rglob("*")}) == len(first)
        assert unlike(made, meshload.open(source)) == []
    (tmp_path / "index" / "notes.txt").write_text("mine")
    meshload.index(source, tmp_path / "index")
    assert (tmp_path / "index" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("file", ours)
def test_files_of_others_are_never_replaced(file: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,))})
    (source / file).write_bytes(b"{}")
    before = state(source)
    with pytest.raises((LayoutError, FormatError), match=rf"{file}.*(exist already|damaged)"):
        meshload.index(source)
    assert state(source) == before


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "links"])
def test_a_hostile_record_deletes_nothing(beside: bool, tmp_path: Path) -> None:
    source = copied(LLAMA / "checkpoint", tmp_path / "source")
    victims = ["config.json", "model-00001-of-00003.safetensors", "../outside", "files/../config.json", "files/mine"]
    (tmp_path / "outside").write_text("mine")
    (source / "files").mkdir()
    (source / "files" / "mine").write_text("mine")
    record = {
        "version": 1,
        "beside": beside,
        "files": {name: [1, 1] for name in victims},
        "written": [*victims, "meshload_index.json"],
    }
    (source / "meshload_index.json").write_text(json.dumps(record))
    before = state(tmp_path)
    if beside:
        assert unlike(meshload.index(source), meshload.open(source)) == []
        before = {file: at for file, at in before.items() if not file.endswith("meshload_index.json")}
    else:
        with pytest.raises(LayoutError, match=r"meshload_index.json exist already"):
            meshload.index(source)
    after = state(tmp_path)
    assert {file: at for file, at in after.items() if file in before} == before


@pytest.mark.parametrize("recorded", [True, False])
def test_an_index_touches_nothing_through_links_to_folders(recorded: bool, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,))})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").symlink_to("elsewhere")
    index = meshload.index(source, tmp_path / "index").path
    shutil.rmtree(index / "files")
    (index / "files").symlink_to("../mine")
    if not recorded:
        (tmp_path / "mine" / "model.safetensors").unlink()
    before = os.listdir(tmp_path / "mine")
    with pytest.raises(LayoutError, match=r"files/model.safetensors"):
        meshload.index(source, index)
    assert os.listdir(tmp_path / "mine") == before


def test_an_index_that_another_process_is_making_is_left_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,))})
    staging = staging_of(source / "index")
    staging.mkdir()
    with locked(staging), pytest.raises(LayoutError, match="another process is writing"):
        meshload.index(source)
    assert staging.is_dir()
    assert meshload.index(source).arrays == ("w",)


def test_what_cannot_be_a_path_or_a_key_is_told(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,)), "v" * 70_000: ramp("v", (2,))})
    with pytest.raises(SourceError, match="File name too long"):
        meshload.index(source, tmp_path / ("n" * 300))
    made = meshload.index(source)
    assert made.arrays == ("w",)
    assert "its name has 70000 bytes" in made.left_out["v" * 70_000]


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "mine").write_text("mine")
    with pytest.raises(LayoutError, match="exists already"):
        meshload.index(LLAMA / "checkpoint", tmp_path / "index")
    assert os.listdir(tmp_path / "index") == ["mine"]
    assert os.listdir(tmp_path) == ["index"]


def test_a_replacement_that_fails_leaves_no_half_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": ramp("w", (4,))})
    meshload.index(source)
    before = state(source)["model.safetensors"]
    rename = os.rename

    def failing(a: Any, b: Any) -> None:
        if str(b).endswith("_CHECKPOINT_METADATA"):
            raise OSError(28, "No space left on device")
        rename(a, b)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(meshload.SourceError, match="the disk is full"):
            meshload.index(source)
    assert not (source / "manifest.ocdbt").exists()
    assert meshload.open(source).format == "hf"
    made = meshload.index(source)
    assert unlike(made, {"w": ramp("w", (4,))}) == []
    assert state(source)["model.safetensors"] == before
    assert not list(source.glob(".index*"))


# --- a source that changes --------------------------------------------------------------------------------------------


def rewritten(file: Path) -> None:
    """Change a file's bytes, but neither its size nor its header."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1_000_000))


def lengthened(file: Path) -> None:
    at = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes() + b"?")
    os.utime(file, ns=(1, at))


@pytest.mark.parametrize("change", [rewritten, lengthened, Path.unlink], ids=lambda c: c.__name__)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "links"])
def test_a_changed_source_is_noticed(change: Callable[[Path], None], beside: bool, tmp_path: Path) -> None:
    source = copied(LLAMA / "checkpoint", tmp_path / "source")
    made = meshload.index(source, None if beside else tmp_path / "index")
    meshload.open(made.path, format="orbax")
    change(source / "model-00002-of-00003.safetensors")
    with pytest.raises(FormatError, match=r"no longer the same; make it again with meshload.index: .*model-00002-of-00003"):
        meshload.open(made.path, format="orbax")
    problems = meshload.check(made.path).problems
    assert any("index" in p.text and "model-00002" in f"{p.file}{p.text}" for p in problems)
    if change is rewritten:
        assert meshload.index(source, None if beside else tmp_path / "index").left_out == {}
        assert meshload.check(made.path).ok


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    made = meshload.index(LLAMA / "checkpoint", tmp_path / "index")
    for text in ("", "[]", '{"version": 2}', '{"version": 1, "beside": 1, "files": {}, "written": []}'):
        (made.path / "meshload_index.json").write_text(text)
        with pytest.raises(FormatError, match=r"meshload_index.json is damaged"):
            meshload.open(made.path)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_prints_what_is_shown_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(LLAMA / "checkpoint", tmp_path / "source")
    (source / "model-00002-of-00003.safetensors").unlink()
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["index", str(source), str(tmp_path / "index"), *more])
        assert not ended.value.code
    text, _, found = capsys.readouterr().out.partition("{")
    lines = text.splitlines()
    assert lines[-1].startswith(f"{tmp_path / 'index'}: orbax, ")
    assert all(line.startswith("left out: model.") for line in lines[:-1])
    said = json.loads("{" + found)
    assert len(said["left_out"]) == len(lines) - 1 > 3
    assert said["format"] == "orbax"
    assert set(said["arrays"]) == set(meshload.open(source))
