"""Checks of one checkpoint against itself, and of two against each other: what they find, and what they leave unread."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import zlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload.array import stored_whole
from meshload.checking import check
from meshload.loading import with_views
from meshload.pieces import union
from meshload.source import Folder, open_folder
from meshload.testing import counted, ramp, read_safetensors
from meshload.testing import write_checkpoint as hf

from .test_cases import LLAMA, llama
from .test_writing_optimizers import trained


class Copies:
    """A format of two files that hold the same array, as tensor-parallel ranks hold their norms."""

    name = "copies"
    order = 1

    def matches(self, folder: Folder) -> bool:
        return folder.has("rank0")

    def open(self, folder: Folder) -> meshload.Checkpoint:
        whole = [stored_whole("norm", np.dtype("f4"), (8,), folder.file(f"rank{r}")) for r in range(2)]
        array = replace(whole[0], pieces=union([w.pieces for w in whole]))
        return meshload.Checkpoint({"norm": array}, format="copies")


def written(folder: pathlib.Path, *values: Any) -> pathlib.Path:
    for rank, value in enumerate(values):
        (folder / f"rank{rank}").write_bytes(np.asarray(value, "f4").tobytes())
    return folder


def test_equal_copies_are_no_problem(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path, range(8), range(8))
    assert check(folder, format=Copies(), copies=True).ok


def test_b01_copies_that_differ_are_named_with_their_distance(tmp_path: pathlib.Path) -> None:
    other = np.arange(8, dtype="f4")
    other[3] += 2.0**-6
    folder = written(tmp_path, range(8), other)
    assert check(folder, format=Copies()).ok  # they are read only when asked for
    report = check(folder, format=Copies(), copies=True)
    (problem,) = report.problems
    assert (problem.array, problem.file) == ("norm", "rank1")
    assert "rank0" in problem.text
    assert "0.015625" in problem.text


def test_replicated_copies_are_read_once(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path, range(8), range(8))
    plan = meshload.plan(folder, format=Copies(), layout="replicated")
    assert (plan.wanted_bytes, plan.read_bytes, plan.reads) == (32, 32, 1)


def test_a_piece_beyond_its_file_is_reported_and_refused(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path, range(8), range(8))
    (folder / "rank1").write_bytes(b"short")
    (folder / "rank0").write_bytes(b"short")
    report = check(folder, format=Copies())
    assert {p.file for p in report.problems} == {"rank0", "rank1"}
    assert all("32" in p.text and "5" in p.text for p in report.problems)
    with pytest.raises(meshload.FormatError, match="rank0, which has 5"):
        meshload.plan(folder, format=Copies(), layout="replicated")


def test_a_path_that_holds_no_checkpoint_raises(tmp_path: pathlib.Path) -> None:
    assert open_folder(tmp_path).names() == []
    with pytest.raises(meshload.FormatError, match="no installed format"):
        check(tmp_path)


def test_b01_the_caller_says_what_becomes_of_copies(tmp_path: pathlib.Path) -> None:
    other = np.arange(8, dtype="f4")
    other[3] += 2.0**-6
    folder = written(tmp_path, range(8), other)
    restored = {
        policy: meshload.restore(folder, format=Copies(), layout="replicated", into="numpy", copies=policy)["norm"]
        for policy in ("first", "mean")
    }
    assert restored["first"].tolist() == list(range(8))
    assert restored["mean"][3] == 3 + 2.0**-7
    with pytest.raises(meshload.CopiesDiffer, match=r"norm: rank 0 .*0\.015625"):
        meshload.restore(folder, format=Copies(), layout="replicated", into="numpy", copies="check")


def test_addends_are_summed_whatever_is_asked_of_copies(tmp_path: pathlib.Path) -> None:
    checkpoint = meshload.open(written(tmp_path, range(8), range(8)), format=Copies())
    checkpoint = replace(checkpoint, arrays={"norm": replace(checkpoint["norm"], copies="sum")})
    assert np.asarray(checkpoint["norm"][2:5]).tolist() == [4, 6, 8]
    layout = {"norm": ("tp",)}
    got = meshload.restore(checkpoint, mesh="tp=2", rank=1, layout=layout, into="numpy")
    assert got["norm"].tolist() == [8, 10, 12, 14]
    summary = meshload.plan(checkpoint, mesh="tp=2", rank="all", layout=layout).summary()
    assert {r: (s["arrays"], s["read_bytes"]) for r, s in summary["ranks"].items()} == {0: (1, 32), 1: (1, 32)}


def cached(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a snapshot as a hub cache has it: links to blobs, named by SHA-256, or by git's hash where they are small."""
    source = pathlib.Path(__file__).parent / "golden" / "hf" / "qwen2_tied_single" / "checkpoint"
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        data = file.read_bytes()
        is_large = file.suffix == ".safetensors"
        name = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        (blobs / name.hexdigest()).write_bytes(data)
        (snapshot / file.name).symlink_to(f"../../blobs/{name.hexdigest()}")
    return snapshot


def test_b86_a_blob_that_is_not_what_it_is_named_by_is_found_when_asked(tmp_path: pathlib.Path) -> None:
    snapshot = cached(tmp_path)
    assert check(snapshot, blobs=True).ok
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-100] ^= 1
    blob.write_bytes(data)
    assert check(snapshot).ok  # nothing is read that was not asked for
    (problem,) = check(snapshot, blobs=True).problems
    assert problem.file == "model.safetensors"
    assert blob.name in problem.text


def test_a_folder_that_is_no_cache_has_no_blobs_to_check(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path, range(8), range(8))
    with pytest.raises(meshload.LayoutError, match="blobs=True"):
        check(folder, format=Copies(), blobs=True)


# --- two checkpoints --------------------------------------------------------------------------------------------------

GOLDEN = pathlib.Path(__file__).parent / "golden"


def of_one(name: str, a: Any, b: Any, folder: pathlib.Path, **options: Any) -> meshload.Report:
    one, other = hf(folder / "a", {name: np.asarray(a)}), hf(folder / "b", {name: np.asarray(b)})
    return meshload.verify(one, other, **options)


@pytest.mark.parametrize("to", ["hf", "orbax", "dcp"])
def test_a_copy_in_another_format_is_the_same(to: str, tmp_path: pathlib.Path) -> None:
    source = GOLDEN / "hf" / "qwen2_tied_single" / "checkpoint"
    meshload.convert(source, tmp_path / "copy", to=to)
    report = meshload.verify(source, tmp_path / "copy", max_bytes=1 << 20)
    assert (report.problems, report.arrays, dict(report.apart)) == ((), 50, {})
    assert meshload.verify(tmp_path / "copy", source).ok


@pytest.mark.parametrize("name", ["legacy-tp2-pp2-fp32", "td-tp2-dp2-fp32-distopt-dpre-qwen2"])
def test_a_sharded_training_state_is_the_same_as_what_came_of_it(name: str, tmp_path: pathlib.Path) -> None:
    source = GOLDEN / "megatron" / name
    model = {"legacy-tp2-pp2-fp32": "llama", "td-tp2-dp2-fp32-distopt-dpre-qwen2": "qwen2"}[name]
    meshload.convert(source, tmp_path / "hf", to="hf", config={"model_type": model})
    assert meshload.verify(source, tmp_path / "hf").problems == ()
    wrong = read_safetensors(tmp_path / "hf" / "model.safetensors")
    norm = wrong["model.layers.1.input_layernorm.weight"].copy()
    norm[3] += 1
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    hf(tmp_path / "wrong", wrong | {"model.layers.1.input_layernorm.weight": norm}, config)
    for pair in ((source, tmp_path / "wrong"), (tmp_path / "wrong", source)):
        (problem,) = meshload.verify(*pair).problems
        assert problem.array == "model.layers.1.input_layernorm.weight"
        assert "1 of its" in problem.text
        assert "from [3]" in problem.text


def test_b86_a_flipped_byte_is_named_with_array_index_and_files(tmp_path: pathlib.Path) -> None:
    arrays = {f"layers.{i}.fc1": ramp(str(i), (40, 24), np.float16) for i in range(4)}
    one = hf(tmp_path / "a", arrays, shards=2)
    row = arrays["layers.3.fc1"].copy()
    row[17, 3:21] += np.float16(1)  # 18 values of one row
    other = hf(tmp_path / "b", arrays | {"layers.3.fc1": row}, shards=4)
    report = meshload.verify(one, other)
    (problem,) = report.problems
    assert (problem.array, problem.file) == ("layers.3.fc1", "model-00002-of-00002.safetensors")
    found = re.match(r"(\d+) of its 960 elements differ, from \[17, 3\] \(in (\S+) and (\S+)\) to \[17, 20\]", problem.text)
    assert found is not None
    assert found.groups() == ("18", "model-00002-of-00002.safetensors", "model-00004-of-00004.safetensors")
    assert set(report.apart) == {"layers.3.fc1"}


@pytest.mark.parametrize("swapped", [False, True])
def test_b86_a_difference_in_a_chunk_is_named_alike_from_either_side(swapped: bool, tmp_path: pathlib.Path) -> None:
    w = ramp("w", (13, 6))
    source = hf(tmp_path / "a", {"w": w})
    wrong = w.copy()
    wrong[7, 2:4] *= -1
    meshload.convert(hf(tmp_path / "c", {"w": wrong}), tmp_path / "b", to="orbax", mesh="tp=4", layout={"w": ("tp",)})
    pair = (tmp_path / "b", source) if swapped else (source, tmp_path / "b")
    (problem,) = meshload.verify(*pair).problems
    files = "w and model.safetensors" if swapped else "model.safetensors and w"
    assert f"2 of its 78 elements differ, from [7, 2] (in {files}) to [7, 3]" in problem.text


def test_names_on_one_side_only_are_told_for_both(tmp_path: pathlib.Path) -> None:
    one = hf(tmp_path / "a", {"both": ramp("both", (2,)), "left": ramp("left", (2,))})
    other = hf(tmp_path / "b", {"both": ramp("both", (2,)), "right": ramp("right", (2,))})
    report = meshload.verify(one, other)
    assert [(p.array, str(tmp_path / "b") in p.text, str(tmp_path / "a") in p.text) for p in report.problems] == [
        ("left", True, False),
        ("right", False, True),
    ]


def test_what_no_table_knows_is_compared_too(tmp_path: pathlib.Path) -> None:
    one = hf(tmp_path / "a", llama() | {"value_head": ramp("v", (3,))}, LLAMA)
    other = hf(tmp_path / "b", llama() | {"value_head": ramp("w", (3,))}, LLAMA)
    assert [p.array for p in meshload.verify(one, other).problems] == ["value_head"]
    assert [p.array for p in meshload.verify(one, hf(tmp_path / "c", llama(), LLAMA)).problems] == ["value_head"]


def test_a_tied_head_is_compared_with_one_that_is_stored(tmp_path: pathlib.Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    arrays = {n: a for n, a in llama().items() if n != "lm_head.weight"}
    tied = hf(tmp_path / "tied", arrays, config)
    same = hf(tmp_path / "same", arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}, config)
    other = hf(tmp_path / "other", arrays | {"lm_head.weight": ramp("other", (13, 16))}, config)
    assert meshload.verify(tied, same).ok
    assert meshload.verify(same, tied).ok
    for pair in ((tied, other), (other, tied)):
        assert [p.array for p in meshload.verify(*pair).problems] == ["lm_head.weight"]


@pytest.mark.parametrize("case", ["torch/qwen2_tied_bin/checkpoint", "fast_llm/qwen2_tied_pp2_dp2/distributed", "peft/llama"])
def test_a_checkpoint_that_is_shown_as_stored_is_compared(case: str) -> None:
    found = meshload.open(GOLDEN / case)
    stored = found.with_names("stored")
    assert (stored.config, stored.with_names("native").names) == (found.config, "native")
    assert meshload.verify(stored, GOLDEN / case).ok
    assert meshload.verify(GOLDEN / case, stored).ok


def test_what_is_stored_of_two_is_compared_moments_too(tmp_path: pathlib.Path) -> None:
    meshload.convert(trained(tmp_path), tmp_path / "out", to="orbax", optimizer=True)
    found = meshload.open(tmp_path / "out")
    stored = found.with_names("stored")
    assert meshload.verify(stored, stored).arrays == len(stored) == 3 * len(found)


def test_shapes_that_differ_are_told_with_both(tmp_path: pathlib.Path) -> None:
    report = of_one("w", ramp("w", (2, 3)), ramp("w", (3, 2)), tmp_path)
    assert [p.text for p in report.problems] == ["its shapes are (2, 3) and (3, 2)"]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_arrays_of_no_dims_and_no_elements_are_compared(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    assert of_one("w", ramp("w", shape), ramp("w", shape), tmp_path).ok


def test_dtypes_that_differ_are_told_and_a_tolerance_allows_them(tmp_path: pathlib.Path) -> None:
    a = np.asarray([1.0, 1.001, -3.0], np.float32)
    b = a.astype(ml_dtypes.bfloat16)
    report = of_one("w", a, b, tmp_path)
    assert report.problems[0].text == "its dtypes are float32 and bfloat16"
    assert "1 of its 3 elements differ, from [1]" in report.problems[1].text
    assert report.apart["w"] == pytest.approx(0.001, abs=1e-6)
    assert meshload.verify(tmp_path / "a", tmp_path / "b", rtol=2**-8).ok
    assert not meshload.verify(tmp_path / "a", tmp_path / "b", rtol=2**-12).ok
    assert meshload.verify(tmp_path / "a", tmp_path / "b", atol=0.002).ok


def test_a_tolerance_is_relative_to_the_second(tmp_path: pathlib.Path) -> None:
    assert of_one("w", np.asarray([90.0]), np.asarray([100.0]), tmp_path, rtol=0.1).ok
    assert not meshload.verify(tmp_path / "b", tmp_path / "a", rtol=0.1).ok


@pytest.mark.parametrize(
    ("a", "b", "bits", "values"),
    [
        (0.0, -0.0, False, True),
        (np.nan, np.nan, True, True),
        (np.nan, 1.0, False, False),
        (1.0, np.nan, False, False),
        (np.inf, np.inf, True, True),
        (np.inf, -np.inf, False, False),
        (1.0, np.inf, False, False),
    ],
)
def test_bits_and_values_of_zeros_nans_and_infinities(a: float, b: float, bits: bool, values: bool, tmp_path: pathlib.Path) -> None:
    assert of_one("w", np.asarray([1.0, a]), np.asarray([1.0, b]), tmp_path).ok is bits
    report = meshload.verify(tmp_path / "a", tmp_path / "b", atol=1e6, rtol=0.5)
    assert report.ok is values
    assert values or report.apart["w"] == np.inf


def test_nans_of_other_bits_are_other_bits(tmp_path: pathlib.Path) -> None:
    a, b = (np.asarray([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert not of_one("w", a, b, tmp_path).ok
    assert meshload.verify(tmp_path / "a", tmp_path / "b", atol=1e-9).ok


def test_integers_beyond_what_floats_hold_are_compared_by_bits(tmp_path: pathlib.Path) -> None:
    assert not of_one("w", np.asarray([2**53]), np.asarray([2**53 + 1]), tmp_path).ok


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_tolerance_tells_integers_apart_that_floats_do_not(dtype: Any, tmp_path: pathlib.Path) -> None:
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("this machine has no long double")
    a, b = np.asarray([2**62 + 1], dtype), np.asarray([2**62 + 3], dtype)
    assert of_one("w", a, b, tmp_path, atol=1.5).apart == {"w": 2}
    assert not meshload.verify(tmp_path / "a", tmp_path / "b", atol=1.5).ok
    assert meshload.verify(tmp_path / "a", tmp_path / "b", atol=2).ok


def fours(folder: pathlib.Path, data: bytes) -> pathlib.Path:
    """Write an array of F4, two elements a byte."""
    head = json.dumps({"w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder


def test_types_below_a_byte_do_not_pass_as_bytes(tmp_path: pathlib.Path) -> None:
    one = fours(tmp_path / "a", bytes(range(4)))
    other = hf(tmp_path / "b", {"w": np.arange(4, dtype=np.uint8).reshape(2, 2)})
    for atol in (0, 100):
        assert [p.text for p in meshload.verify(one, other, atol=atol).problems] == ["its dtypes are F4 and uint8"]


def test_no_tolerance_makes_numbers_of_bytes_that_have_no_dtype(tmp_path: pathlib.Path) -> None:
    one, other = fours(tmp_path / "a", bytes(range(4))), fours(tmp_path / "b", bytes(range(1, 5)))
    assert "4 of its 4 elements differ" in meshload.verify(one, other, atol=100).problems[0].text


def test_b67_verify_tells_that_a_step_was_lossy(tmp_path: pathlib.Path) -> None:
    """1 + w of a bf16 w of 2**-10 is 1: what was cast on the way back is not what it came from."""
    w = np.asarray([2.0**-10, 0.5], ml_dtypes.bfloat16)
    back = ((w + ml_dtypes.bfloat16(1)) - ml_dtypes.bfloat16(1)).astype(ml_dtypes.bfloat16)
    (problem,) = of_one("norm", w, back, tmp_path).problems
    assert "1 of its 2 elements differ, from [0]" in problem.text
    assert "by 0.000976562 at most" in problem.text


@pytest.mark.parametrize("tolerance", [{"rtol": -1.0}, {"atol": float("nan")}, {"atol": "1"}, {"rtol": None}, {"rtol": 10**400}])
def test_a_tolerance_that_is_none_is_refused(tolerance: dict[str, Any], tmp_path: pathlib.Path) -> None:
    one = hf(tmp_path / "a", {"w": ramp("w", (2,))})
    with pytest.raises(meshload.LayoutError, match="rtol="):
        meshload.verify(one, one, **tolerance)


def test_verify_reads_each_byte_once(tmp_path: pathlib.Path) -> None:
    arrays = {f"w{i}": ramp(str(i), (50, 7)) for i in range(5)}
    paths = [hf(tmp_path / "a", arrays, shards=2), hf(tmp_path / "b", arrays)]
    (one, log), (other, other_log) = (counted(meshload.open(path)) for path in paths)
    assert meshload.verify(one, other, max_bytes=1 << 14).ok
    assert log.nbytes == other_log.nbytes == sum(a.nbytes for a in arrays.values())


def test_progress_ends_where_all_is_compared(tmp_path: pathlib.Path) -> None:
    arrays = {f"w{i}": ramp(str(i), (50, 7)) for i in range(5)}
    one, told = hf(tmp_path / "a", arrays), list[tuple[int, int]]()
    meshload.verify(one, one, max_bytes=1 << 13, progress=lambda done, total: told.append((done, total)))
    total = sum(a.nbytes for a in arrays.values())
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_is_lost_on_one_side_is_a_problem_that_names_the_file(tmp_path: pathlib.Path) -> None:
    arrays = {f"w{i}": ramp(str(i), (5, 7)) for i in range(4)}
    one, other = hf(tmp_path / "a", arrays), hf(tmp_path / "b", arrays, shards=2)
    (other / "model-00002-of-00002.safetensors").unlink()
    report = meshload.verify(one, other)
    assert {p.array for p in report.problems} == {"w2", "w3"}
    assert all("model-00002-of-00002.safetensors" in p.text for p in report.problems)


# --- optimizers -------------------------------------------------------------------------------------------------------

TITAN = GOLDEN / "dcp" / "titan" / "checkpoint"
DEEPSPEED = GOLDEN / "deepspeed" / "z2-fp32-dp2-frozen"


def altered(checkpoint: meshload.Checkpoint, kind: str, name: str, index: int, folder: pathlib.Path) -> meshload.Checkpoint:
    """Return a checkpoint of which one element of one moment is another."""
    values = np.asarray(checkpoint.optimizer[kind][name]).copy()
    values.reshape(-1)[index] += 1
    other = replace(meshload.open(hf(folder, {"w": values}))["w"], name=name)
    moments = {**checkpoint.optimizer, kind: {**checkpoint.optimizer[kind], name: other}}
    return replace(checkpoint, optimizer=moments)


def test_moments_are_the_same_in_another_format_and_one_that_differs_is_named(tmp_path: pathlib.Path) -> None:
    source = meshload.open(TITAN)
    meshload.convert(source, tmp_path / "orbax", to="orbax", optimizer=True)
    report = meshload.verify(source, tmp_path / "orbax", optimizer=True)
    assert (report.problems, report.arrays) == ((), 3 * len(source))
    wrong = altered(source, "exp_avg_sq", "tok_embeddings.weight", 5, tmp_path / "wrong")
    assert meshload.verify(wrong, tmp_path / "orbax").ok  # weights alone, unless asked
    assert meshload.verify(wrong, tmp_path / "orbax", optimizer="exp_avg").ok
    (problem,) = meshload.verify(wrong, tmp_path / "orbax", optimizer=["exp_avg", "exp_avg_sq"]).problems
    assert problem.array == "optimizer.exp_avg_sq.tok_embeddings.weight"
    assert "1 of its" in problem.text
    assert "from [0, 5] (in model.safetensors and opt_state.0.nu.tok_embeddings.weight)" in problem.text


def test_moments_and_masters_are_the_same_on_another_topology_and_under_other_names(tmp_path: pathlib.Path) -> None:
    source = trained(tmp_path, "bfloat16", masters=True)
    meshload.convert(source, tmp_path / "out", to="megatron_core", mesh="pp=2,tp=2", optimizer=True)
    report = meshload.verify(source, tmp_path / "out", optimizer=True)
    assert (report.problems, report.arrays) == ((), 4 * len(source))
    name = "model.layers.2.self_attn.k_proj.weight"
    wrong = with_views(replace(altered(source, "master", name, 17, tmp_path / "wrong"), views={}))
    for pair in ((wrong, tmp_path / "out"), (tmp_path / "out", wrong)):
        (problem,) = meshload.verify(*pair, optimizer=True).problems
        assert problem.array == f"optimizer.master.{name}"
        assert "1 of its 128 elements differ, from [1, 1]" in problem.text


def test_kinds_that_one_side_lacks_are_told_once_each(tmp_path: pathlib.Path) -> None:
    opened = meshload.open(DEEPSPEED)
    source = replace(opened, optimizer={**opened.optimizer, "sum": opened.optimizer["master"]})
    meshload.convert(source, tmp_path / "orbax", to="orbax", optimizer=["exp_avg"])
    count = len(source.optimizer["exp_avg"])
    for pair, held in (((source, tmp_path / "orbax"), "exp_avg"), ((tmp_path / "orbax", source), None)):
        problems = meshload.verify(*pair, optimizer=True).problems
        assert {p.array for p in problems} == {"optimizer.sum", "optimizer.exp_avg_sq"}
        assert held is None or all(
            p.text == f"{tmp_path / 'orbax'} has none of its {count} arrays, but exp_avg, master" for p in problems
        )
    assert meshload.verify(source, tmp_path / "orbax", optimizer=["exp_avg"]).ok


def test_float32_weights_are_their_own_masters(tmp_path: pathlib.Path) -> None:
    source = meshload.open(DEEPSPEED)
    meshload.convert(source, tmp_path / "orbax", to="orbax", optimizer=["exp_avg", "exp_avg_sq"])
    for pair in ((source, tmp_path / "orbax"), (tmp_path / "orbax", source)):
        assert meshload.verify(*pair, optimizer=True).problems == ()
    name = next(iter(source.optimizer["master"]))
    wrong = altered(source, "master", name, 0, tmp_path / "wrong")
    (problem,) = meshload.verify(wrong, tmp_path / "orbax", optimizer=True).problems
    assert problem.array == f"optimizer.master.{name}"
    meshload.convert(source, tmp_path / "half", to="orbax", dtype="bf16", optimizer=["exp_avg", "exp_avg_sq"])
    assert "optimizer.master" in {p.array for p in meshload.verify(source, tmp_path / "half", optimizer=True).problems}


def test_an_optimizer_that_is_not_there_is_no_agreement(tmp_path: pathlib.Path) -> None:
    plain = hf(tmp_path / "plain", {"w": ramp("w", (2,))})
    for act in (lambda **o: meshload.verify(plain, plain, **o), lambda **o: meshload.digest(plain, **o)):
        with pytest.raises(meshload.LayoutError, match=r"optimizer: its state was asked for, .*there is no optimizer state"):
            act(optimizer=True)
    with pytest.raises(meshload.LayoutError, match=r"optimizer: momentum was asked for, .*there is exp_avg, exp_avg_sq"):
        meshload.verify(TITAN, plain, optimizer=["momentum"])


def with_steps(checkpoint: meshload.Checkpoint, **told: Any) -> meshload.Checkpoint:
    meta = {key: value for key, value in checkpoint.meta.items() if key not in ("steps", "optimizer")}
    return replace(checkpoint, meta={**meta, **told})


def test_steps_are_compared_where_both_tell_them() -> None:
    source = meshload.open(TITAN)
    (count,) = {float(np.asarray(n)) for n in source.meta["steps"].values()}
    for told in ({}, {"optimizer": {"step": int(count)}}, {"steps": dict.fromkeys(source, count)}):
        assert meshload.verify(source, with_steps(source, **told), optimizer=True).ok
    (problem,) = meshload.verify(source, with_steps(source, optimizer={"step": 99}), optimizer=True).problems
    assert (problem.array, problem.text) == ("optimizer.step", f"its steps are {count:g} and 99")
    steps = {**dict.fromkeys(source, count), "output.weight": 7}
    (problem,) = meshload.verify(with_steps(source, steps=steps), source, optimizer=True).problems
    assert (problem.array, problem.text) == ("optimizer.step.output.weight", f"its steps are 7 and {count:g}")
    assert meshload.verify(with_steps(source, steps=steps), source).ok


def test_moments_of_arrays_that_no_table_knows_are_converted_and_compared_too(tmp_path: pathlib.Path) -> None:
    arrays = llama() | {"value_head": ramp("v", (3,))}
    source = meshload.open(hf(tmp_path / "a", arrays, LLAMA))
    source = with_views(replace(source, optimizer={"exp_avg": dict(source)}, views={}))
    with pytest.warns(meshload.MeshloadWarning, match="value_head"):
        meshload.convert(source, tmp_path / "out", to="orbax", names="megatron", optimizer=True)
    assert meshload.verify(source, tmp_path / "out", optimizer=True).problems == ()
    assert meshload.verify(source, tmp_path / "out", optimizer=True).arrays == 2 * len(arrays)
    wrong = altered(source, "exp_avg", "value_head", 2, tmp_path / "wrong")
    (problem,) = meshload.verify(with_views(replace(wrong, views={})), tmp_path / "out", optimizer=True).problems
    assert problem.array == "optimizer.exp_avg.value_head"


def test_a_digest_of_moments_is_that_of_their_values_and_is_checked_where_they_arrive(tmp_path: pathlib.Path) -> None:
    source = trained(tmp_path, masters=True)
    found = meshload.digest(source, optimizer=True)
    values = {**source, **{f"optimizer.{kind}.{n}": a for kind, of in source.optimizer.items() for n, a in of.items()}}
    assert {n: e.crc32 for n, e in found.arrays.items()} == {n: zlib.crc32(np.asarray(a).tobytes()) for n, a in values.items()}
    meshload.convert(source, tmp_path / "out", to="megatron_core", mesh="tp=2", optimizer=True)
    assert meshload.digest(tmp_path / "out", optimizer=True) == found
    assert set(meshload.digest(source, optimizer="exp_avg").arrays) == {
        n for n in values if ".exp_avg_sq." not in n and "master" not in n
    }
    assert set(meshload.restore(tmp_path / "out", into="numpy", optimizer=True, digest=found)) == set(values)
    wrong = altered(source, "exp_avg", "model.norm.weight", 3, tmp_path / "wrong")
    with pytest.raises(meshload.FormatError, match=r"digest=: optimizer\.exp_avg\.model\.norm\.weight has the CRC-32"):
        meshload.restore(wrong, into="numpy", optimizer=True, digest=found)
