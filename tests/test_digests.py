"""Digests: what they are, that those of slices add up, what they find, and what a restore says that is given one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload.box import Box, whole
from meshload.digests import of_arrays, of_slice, sum_of_run, total
from meshload.errors import FormatError, LayoutError, MeshloadWarning, SourceError
from meshload.testing import ramp, write_checkpoint

from .test_cases import LLAMA, llama

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:
    pytest.skip("needs hypothesis", allow_module_level=True)

DTYPES = ("bool", "uint8", "int16", "float16", "bfloat16", "float32", "float8_e4m3fn", "int64", "complex64", "complex128")
META = {"digest": "crc32"}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def bits(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bits; those of a bool are 0 and 1."""
    chance = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = chance.integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return data.view(dtype).reshape(shape)


@st.composite
def partitions(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """Return a shape and boxes that are all of it, cut again and again, in some order."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[d]))
        head, tail = list(box.shape), list(box.shape)
        head[d], tail[d] = at, box.shape[d] - at
        start = list(box.start)
        start[d] += at
        boxes += [Box(box.start, tuple(head)), Box(tuple(start), tuple(tail))]
    return shape, draw(st.permutations(boxes))


def cut(values: Any, box: Box) -> Any:
    return values[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


# --- what a digest is -------------------------------------------------------------------------------------------------


@given(partitions(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_digests_of_any_partition_add_up_to_the_crc_of_the_whole(cuts: Any, dtype: str, seed: int) -> None:
    shape, boxes = cuts
    values = bits(shape, dtype_of(dtype), seed)
    entry = total(of_slice("w", cut(values, box), box, shape) for box in boxes).arrays["w"]
    assert (entry.is_whole, entry.dtype, entry.shape) == (True, dtype, shape)
    assert entry.crc32 == zlib.crc32(values.tobytes())
    assert entry == of_arrays({"w": values}).arrays["w"]


@given(st.binary(max_size=40), st.integers(0, 40))
def test_runs_add_up_from_either_side(data: bytes, at: int) -> None:
    values, at = np.frombuffer(data, np.uint8), min(at, len(data))
    assert sum_of_run(values[:at], len(data) - at) ^ sum_of_run(values[at:], 0) == sum_of_run(values, 0)


def test_a_slice_may_be_a_view_of_any_order() -> None:
    values = ramp("w", (6, 4))
    assert of_arrays({"w": values.T}).arrays["w"].crc32 == zlib.crc32(np.ascontiguousarray(values.T).tobytes())
    assert of_arrays({"w": values[::-2]}).arrays["w"].crc32 == zlib.crc32(values[::-2].tobytes())


def test_a_long_array_is_counted_to_its_end() -> None:
    shape = (3, 1 << 20)
    values = bits(shape, np.dtype("u1"))
    parts = [of_slice("w", values[r : r + 1], Box((r, 0), (1, 1 << 20)), shape) for r in (2, 0, 1)]
    assert total(parts).arrays["w"].crc32 == zlib.crc32(values.tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)])
def test_shapes_of_no_dims_and_no_elements_have_a_digest(shape: tuple[int, ...]) -> None:
    values = ramp("w", shape)
    assert of_arrays({"w": values}).arrays["w"].crc32 == zlib.crc32(values.tobytes())


def test_a_part_has_no_crc_and_says_so() -> None:
    part = of_slice("w", ramp("w", (2, 4)), Box((0, 0), (2, 4)), (4, 4))
    assert part.partial == ["w"]
    assert "part" in str(part)
    assert "crc32" not in part.to_json()["arrays"]["w"]


@pytest.mark.parametrize("other", [ramp("w", (4,)), ramp("w", (2, 2), np.float16)], ids=["shape", "dtype"])
def test_digests_of_different_arrays_do_not_add_up(other: Any) -> None:
    with pytest.raises(LayoutError, match="not of one array"):
        of_arrays({"w": ramp("w", (2, 2))}) + of_arrays({"w": other})


# --- what it finds ----------------------------------------------------------------------------------------------------


def swapped_rows(w: Any) -> Any:
    return w[[1, 0, *range(2, len(w))]]


def swapped_halves(w: Any) -> Any:
    return np.concatenate([w[len(w) // 2 :], w[: len(w) // 2]])


def moved_element(w: Any) -> Any:
    flat = w.reshape(-1).copy()
    flat[[0, -1]] = flat[[-1, 0]]
    return flat.reshape(w.shape)


def flipped_bit(w: Any) -> Any:
    data = bytearray(w.tobytes())
    data[len(data) // 2] ^= 1
    return np.frombuffer(bytes(data), w.dtype).reshape(w.shape)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("damage", [swapped_rows, swapped_halves, moved_element, flipped_bit])
def test_what_lies_elsewhere_or_is_changed_is_found(damage: Any, dtype: Any) -> None:
    values = ramp("w", (8, 6), dtype)
    found = of_arrays({"w": damage(values)}).differences(of_arrays({"w": values}))
    assert [name for name, _ in found] == ["w"]
    assert f"{zlib.crc32(values.tobytes()):08x}" in found[0][1]


def test_slices_of_two_ranks_that_are_swapped_are_found() -> None:
    values = ramp("w", (8, 6))
    boxes = [Box((0, 0), (8, 3)), Box((0, 3), (8, 3))]
    right = total(of_slice("w", cut(values, box), box, (8, 6)) for box in boxes)
    wrong = total(of_slice("w", cut(values, box), other, (8, 6)) for box, other in zip(boxes, boxes[::-1], strict=True))
    assert right.differences(of_arrays({"w": values})) == []
    assert len(wrong.differences(of_arrays({"w": values}))) == 1


def test_other_shapes_and_dtypes_are_told_with_both() -> None:
    one, other = of_arrays({"w": ramp("w", (2, 3))}), of_arrays({"w": ramp("w", (3, 2)).astype(np.float64)})
    assert one.differences(other) == [("w", "is float32 (2, 3), the digest is of float64 (3, 2)")]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_digest_is_loaded_as_it_was(tmp_path: Path) -> None:
    made = of_arrays({"a": ramp("a", (2, 3)), "none": np.zeros((0, 2), ml_dtypes.bfloat16), "one": np.asarray(1.5)})
    made += of_slice("part", ramp("part", (1, 2)), Box((1, 0), (1, 2)), (4, 2))
    made.save(tmp_path / "digest.json")
    assert meshload.Digest.load(tmp_path / "digest.json") == made
    assert json.loads((tmp_path / "digest.json").read_text())["arrays"]["a"]["crc32"] == f"{zlib.crc32(ramp('a', (2, 3))):08x}"


GOOD = {"dtype": "float32", "shape": [2], "sum": "0000000f", "size": 2}
HOSTILE: dict[str, Any] = {
    "no object": [],
    "no kind": {"arrays": {}},
    "another kind": {"digest": "md5", "arrays": {}},
    "arrays no object": META | {"arrays": [1]},
    "array no object": META | {"arrays": {"w": 3}},
    "no size": META | {"arrays": {"w": {k: v for k, v in GOOD.items() if k != "size"}}},
    **{
        f"{key} {value!r}": META | {"arrays": {"w": GOOD | {key: value}}}
        for key, value in [
            ("dtype", "nonsense"),
            ("dtype", "O"),
            ("dtype", "object"),
            ("dtype", "dtype"),
            ("dtype", 7),
            ("shape", "12"),
            ("shape", [-1]),
            ("shape", [1.5]),
            ("shape", [True]),
            ("shape", [1 << 70]),
            ("shape", [float("inf")]),
            ("sum", "-1"),
            ("sum", "fffffffff"),
            ("sum", 15),
            ("sum", " 000000f"),
            ("size", -2),
            ("size", "2"),
            ("size", 1e400),
            ("shape", [1] * 65),
            ("crc32", "00000000"),
            ("crc32", 7),
        ]
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_digest_is_refused_with_its_name(case: str, tmp_path: Path) -> None:
    file = tmp_path / "digest.json"
    file.write_text(json.dumps(HOSTILE[case]))
    with pytest.raises(FormatError, match=r"digest\.json"):
        str(meshload.Digest.load(file))


TWICE = b'{"digest": "crc32", "arrays": {"w": {}, "w": {}}}'


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, TWICE], ids=["empty", "cut", "binary", "deep", "twice"])
def test_what_is_no_json_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "digest.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"digest\.json: it is no digest"):
        meshload.Digest.load(tmp_path / "digest.json")


def test_a_digest_without_end_is_refused() -> None:
    with pytest.raises(FormatError, match=r"/dev/zero: it is no digest.*more than"):
        meshload.Digest.load("/dev/zero")


def test_a_digest_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "digest.json"
    of_arrays({"a": ramp("a", (2, 3))}).save(file)
    old = file.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshload.digests.os.replace", fails)
    with pytest.raises(SourceError, match=r"digest\.json: cannot be written: No space"):
        of_arrays({"b": ramp("b", (2, 3))}).save(file)
    assert ([p.name for p in tmp_path.iterdir()], file.read_bytes()) == (["digest.json"], old)


def test_a_digest_is_written_through_a_link_and_into_what_is_no_file(tmp_path: Path) -> None:
    made = of_arrays({"a": ramp("a", (2, 3))})
    (tmp_path / "link").symlink_to("digest.json")
    made.save(tmp_path / "link")
    assert meshload.Digest.load(tmp_path / "digest.json") == made
    made.save("/dev/null")
    with pytest.raises(SourceError, match="Is a directory"):
        made.save(tmp_path)


def test_a_digest_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"digest\.json: cannot be read"):
        meshload.Digest.load(tmp_path / "digest.json")
    with pytest.raises(SourceError, match="cannot be read"):
        meshload.Digest.load(tmp_path)


# --- of checkpoints, and of what ranks hold ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", llama(), LLAMA, shards=3)


def test_the_digest_of_a_checkpoint_is_that_of_its_arrays(source: Path) -> None:
    assert meshload.digest(source) == of_arrays(llama())
    assert meshload.digest(source, max_bytes=1 << 13) == of_arrays(llama())


def test_every_dtype_of_a_checkpoint_has_a_digest(tmp_path: Path) -> None:
    arrays = {name: bits((5, 3), dtype_of(name)) for name in DTYPES if "complex" not in name}
    arrays |= {"scalar": np.asarray(3.5, np.float32), "none": np.zeros((0, 4), np.float32)}
    found = meshload.digest(write_checkpoint(tmp_path / "model", arrays))
    assert {n: e.crc32 for n, e in found.arrays.items()} == {n: zlib.crc32(a.tobytes()) for n, a in arrays.items()}


def slices_of(path: Path, mesh: str, count: int, **options: Any) -> list[tuple[str, Box, Any, tuple[int, ...]]]:
    """Return name, box, values and whole shape of what the ranks of a mesh hold, replicated slices once."""
    found: dict[Any, Any] = {}
    plan = meshload.plan(path, mesh=mesh, rank="all", **options)
    held = [meshload.restore(path, mesh=mesh, rank=r, into="numpy", **options) for r in range(count)]
    for target in plan.targets:
        assert target.box is not None
        for rank in target.ranks:
            values = np.asarray(held[rank][target.name])
            found.setdefault((target.name, target.box), (target.name, target.box, values, target.whole))
    return list(found.values())


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2", "pp=2,tp=2,dp=2", "tp=4"])
def test_what_the_ranks_of_a_mesh_hold_adds_up_to_the_source(source: Path, mesh: str) -> None:
    count = int(np.prod([int(word.split("=")[1]) for word in mesh.split(",")]))
    slices = slices_of(source, mesh, count)
    found = total(of_slice(name, values, box, shape) for name, box, values, shape in slices)
    assert found == meshload.digest(source)


def test_slices_cut_over_dp_add_up_too(source: Path) -> None:
    slices = slices_of(source, "dp=3", 3, layout=meshload.Layout.default(dp="cut"))
    assert total(of_slice(*s[:1], s[2], s[1], s[3]) for s in slices) == meshload.digest(source)


# --- restore(digest=) -------------------------------------------------------------------------------------------------


def digests(arrays: Mapping[str, Any], folder: Path) -> Path:
    of_arrays(arrays).save(folder / "digest.json")
    return folder / "digest.json"


def test_a_restore_passes_where_all_is_as_the_digest_says(source: Path, tmp_path: Path) -> None:
    found = meshload.restore(source, into="numpy", digest=digests(llama(), tmp_path))
    assert set(found) == set(llama())
    assert set(meshload.restore(source, into="numpy", digest=of_arrays(llama()))) == set(llama())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_restore_raises_where_one_byte_was_flipped(name: str, tmp_path: Path) -> None:
    wrong = llama() | {name: flipped_bit(llama()[name])}
    path = write_checkpoint(tmp_path / "model", wrong, LLAMA)
    with pytest.raises(
        FormatError, match=rf"digest=: {name} has the CRC-32 .* \(in model.*\.safetensors\); the files are damaged, or"
    ) as raised:
        meshload.restore(path, into="numpy", digest=of_arrays(llama()))
    assert str(raised.value).count("CRC-32") == 1


def test_a_restore_raises_where_the_digest_is_of_another_shape(source: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.norm\.weight is float32 \(16,\), the digest is of float32 \(4, 4\)"):
        meshload.restore(source, into="numpy", digest=of_arrays({"model.norm.weight": ramp("w", (4, 4))}))


def test_a_rank_that_holds_parts_checks_what_it_holds_whole_and_tells_of_the_rest(source: Path, tmp_path: Path) -> None:
    with pytest.warns(MeshloadWarning, match=r"16 arrays were not compared.*q_proj\.weight"):
        meshload.restore(source, mesh="tp=2", rank=1, into="numpy", digest=of_arrays(llama()))
    wrong = llama() | {"model.norm.weight": flipped_bit(llama()["model.norm.weight"])}  # norms are whole on each rank
    with pytest.raises(FormatError, match=r"model\.norm\.weight"):
        meshload.restore(
            write_checkpoint(tmp_path / "model", wrong, LLAMA), mesh="tp=2", rank=1, into="numpy", digest=of_arrays(llama())
        )


def test_a_digest_that_lacks_an_array_is_told(source: Path) -> None:
    known = {name: values for name, values in llama().items() if name != "model.norm.weight"}
    with pytest.warns(MeshloadWarning, match=r"1 arrays were not compared.*model\.norm\.weight"):
        meshload.restore(source, into="numpy", digest=of_arrays(known))


def test_an_array_of_which_the_digest_has_a_part_is_told(source: Path) -> None:
    made = meshload.digest(source)
    name = next(iter(made.arrays))
    part = meshload.Digest({**made.arrays, name: replace(made.arrays[name], size=1)})
    with pytest.warns(MeshloadWarning, match=f"1 arrays were not compared.*of a part: {name}"):
        meshload.restore(source, into="numpy", digest=part)


def test_what_a_digest_has_beside_what_is_wanted_is_no_matter(source: Path) -> None:
    found = meshload.restore(source, into="numpy", include="model.norm.weight", digest=of_arrays(llama()))
    assert list(found) == ["model.norm.weight"]


def test_the_digest_is_of_what_is_stored_and_not_of_a_cast(source: Path) -> None:
    found = meshload.restore(source, into="numpy", dtype="bf16", digest=of_arrays(llama()))
    assert {str(a.dtype) for a in found.values()} == {"bfloat16"}


def test_fused_slices_of_a_rank_are_told_not_compared(source: Path) -> None:
    with pytest.warns(MeshloadWarning, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        meshload.restore(source, mesh="tp=2", rank=0, into="numpy", names="megatron", digest=of_arrays({}))
