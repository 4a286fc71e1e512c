"""Checks of one checkpoint against itself: what they find, and what they leave unread."""

from __future__ import annotations

import hashlib
import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.array import stored_whole
from meshload.checking import check
from meshload.pieces import union
from meshload.source import Folder, open_folder


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
