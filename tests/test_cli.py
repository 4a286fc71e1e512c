"""The command line: what it prints, as text and as JSON, and how it ends."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from meshload.box import Box
from meshload.cli import main
from meshload.digests import of_arrays, of_slice
from meshload.source import LocalFolder
from meshload.testing import read_safetensors, write_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden" / "hf"
QWEN = GOLDEN / "qwen2_tied_single" / "checkpoint"
MIXTRAL = GOLDEN / "mixtral_sharded" / "checkpoint"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status in (0, 1)
    return json.loads(out)


def test_inspect_lists_every_array_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "inspect", QWEN)
    assert (status, err) == (0, "")
    assert "model.layers.3.self_attn.q_proj.bias" in out
    assert "131x32" in out
    assert out.splitlines()[-1].endswith("hf, 50 arrays, 138.5 KiB")


def test_inspect_lets_alike_arrays_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "inspect", MIXTRAL)
    assert "model.layers.[0-3].block_sparse_moe.experts.[0-3].w2.weight (x16)" in out
    _, out, _ = run(capsys, "inspect", MIXTRAL, "--all")
    assert "model.layers.3.block_sparse_moe.experts.2.w2.weight" in out


def test_inspect_as_json_has_shapes_dtypes_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "inspect", MIXTRAL)
    assert found["total_arrays"] == 79
    assert found["total_bytes"] == sum(a["nbytes"] for a in found["arrays"].values())
    assert found["arrays"]["lm_head.weight"] == {
        "shape": [97, 32],
        "dtype": "float32",
        "nbytes": 97 * 32 * 4,
        "files": ["model-00001-of-00005.safetensors"],
    }


def test_inspect_shows_another_naming(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "inspect", MIXTRAL, "--names", "transformers")
    assert found["arrays"]["model.layers.0.mlp.experts.gate_up_proj"]["shape"] == [4, 48, 32]
    assert len(found["arrays"]["model.layers.0.mlp.experts.gate_up_proj"]["files"]) >= 1


def test_plan_counts_per_rank_and_says_what_is_tied_and_replicated(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", QWEN, "--mesh", "pp=2,tp=4,dp=2", "--merge-gap", "0")
    assert list(found["ranks"]) == [str(r) for r in range(16)]
    assert found["replicas"] == 2
    assert "model.norm.weight" in found["replicated"]
    assert "model.layers.0.self_attn.k_proj.weight" in found["repeated"]
    assert found["total"]["wanted_bytes"] == found["total"]["read_bytes"] == sum(r["read_bytes"] for r in found["ranks"].values())
    one = run_json(capsys, "plan", QWEN, "--mesh", "tp=1", "--merge-gap", "0")
    assert one["tied"] == ["lm_head.weight"]
    assert one["total"]["read_bytes"] == run_json(capsys, "inspect", QWEN)["total_bytes"]


def test_plan_as_text_has_a_line_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", QWEN, "--mesh", "pp=2,tp=2")
    assert status == 0
    assert out.splitlines()[0].split() == ["rank", "arrays", "wanted", "read", "requests", "result", "peak", "beside", "it"]
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("is_remote", "arguments", "shared", "why"),
    [
        (False, [], False, "a local file system"),
        (True, [], True, "an object store or a network file system"),
        (True, ["--no-exchange"], False, "exchange=False"),
        (False, ["--exchange"], True, "exchange=True"),
        (True, ["--rank", "1"], False, "rank= asks for one rank's slices"),
    ],
)
def test_plan_says_whether_reads_are_shared_and_why(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_remote: bool,
    arguments: list[str],
    shared: bool,
    why: str,
) -> None:
    monkeypatch.setattr(LocalFolder, "is_remote", property(lambda _: is_remote))
    found = run_json(capsys, "plan", QWEN, "--mesh", "tp=2", *arguments)
    assert found["exchange"] == {"shared": shared, "why": why}
    text = "processes share reads, each byte once" if shared else "each process reads for itself"
    assert f"{text} ({why})" in run(capsys, "plan", QWEN, "--mesh", "tp=2", *arguments)[1].splitlines()


def test_plan_takes_layouts_and_globs(capsys: pytest.CaptureFixture[str]) -> None:
    layout = json.dumps({"*.q_proj.weight": ["tp"], "*": []})
    found = run_json(capsys, "plan", QWEN, "--mesh", "tp=2", "--layout", layout, "--include", "*.0.self_attn.*.weight")
    assert found["ranks"]["0"]["arrays"] == 4
    assert found["ranks"]["0"]["wanted_bytes"] == 4 * (16 * 32 + 2 * 16 * 32 + 32 * 32)


def test_check_of_a_sound_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", MIXTRAL)[0] == 0
    assert run_json(capsys, "check", MIXTRAL) == {"ok": True, "arrays": 79, "problems": []}


def test_check_names_a_missing_shard_and_its_arrays(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MIXTRAL, broken)
    (broken / "model-00002-of-00005.safetensors").unlink()
    status, out, _ = run(capsys, "check", broken)
    assert status == 1
    assert "model-00002-of-00005.safetensors" in out
    found = run_json(capsys, "check", broken)
    assert not found["ok"]
    assert any(p["file"] == "model-00002-of-00005.safetensors" for p in found["problems"])


def test_check_names_an_array_that_the_config_wants(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deeper"
    shutil.copytree(QWEN, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    found = run_json(capsys, "check", folder)
    assert "model.layers.4.mlp.up_proj.weight" in [p["array"] for p in found["problems"]]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("inspect", "/nowhere/at/all"), "/nowhere/at/all"),
        (("plan", QWEN, "--mesh", "tp"), "AXIS=SIZE"),
        (("plan", QWEN, "--mesh", "tp=0"), "at least 1"),
        (("plan", QWEN, "--mesh", "tp=2", "--rank", "7"), "rank 7"),
        (("plan", QWEN, "--mesh", "tp=2", "--layout", "{"), "JSON"),
        (("inspect", QWEN, "--format", "nonsense"), "nonsense"),
        (("inspect", QWEN, "--names", "nonsense"), "nonsense"),
        (("inspect", QWEN, "--config", "/nowhere"), "/nowhere"),
        (("check", GOLDEN), "recognises"),
        (("inspect", "s3://"), "s3://"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_status_2(
    arguments: tuple[object, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("meshload: ")
    assert word in err
    assert err.count("\n") == 1


# --- convert and verify -----------------------------------------------------------------------------------------------


def test_convert_writes_and_says_what_and_how_fast(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    status, out, err = run(capsys, "convert", QWEN, tmp_path / "orbax", "--to", "orbax", "--mesh", "tp=2", "--dtype", "bf16")
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path}/orbax: orbax, 50 arrays, ")
    assert out.count("\n") == 1
    assert out.rstrip().endswith("/s)")
    found = run_json(capsys, "convert", tmp_path / "orbax", tmp_path / "hf", "--to", "hf", "--max-bytes", 1 << 20)
    assert (found["path"], found["format"], found["arrays"]) == (str(tmp_path / "hf"), "hf", 50)
    assert found["bytes"] == sum(a.nbytes for a in read_safetensors(tmp_path / "hf" / "model.safetensors").values())
    assert run(capsys, "verify", QWEN, tmp_path / "hf", "--rtol", "0.01")[0] == 0


def test_convert_resumes_where_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert run(capsys, "convert", QWEN, tmp_path / "out", "--to", "hf", "--resume")[0] == 0
    (tmp_path / ".other.meshload-unfinished").mkdir()
    (tmp_path / ".other.meshload-unfinished" / ".meshload-writing").write_text("something else")
    status, out, err = run(capsys, "convert", QWEN, tmp_path / "other", "--to", "hf", "--resume")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "of another source" in err


def test_verify_ends_with_0_where_all_is_the_same_and_1_where_not(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    status, out, err = run(capsys, "verify", QWEN, QWEN)
    assert (status, out, err) == (0, f"{QWEN} and {QWEN}: 50 arrays, the same\n", "")
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    one = write_checkpoint(tmp_path / "one", arrays)
    other = write_checkpoint(tmp_path / "other", {"w": np.where(arrays["w"] == 4, np.inf, arrays["w"])})
    status, out, err = run(capsys, "verify", one, other)
    lines = out.splitlines()
    assert (status, err, len(lines)) == (1, "", 3)
    assert lines[0].startswith("model.safetensors: w: 1 of its 6 elements differ, from [1, 1]")
    assert lines[1:] == ["w: inf apart at most", f"{one} and {other}: 1 arrays, 1 differences"]
    _, out, _ = run(capsys, "verify", one, other, "--json")
    found = json.loads(out, parse_constant=pytest.fail)  # JSON has no Infinity
    assert (found["ok"], found["arrays"], found["apart"]) == (False, 1, {"w": "inf"})
    assert [p["array"] for p in found["problems"]] == ["w"]


def test_processes_that_torchrun_starts_share_the_work_and_one_tells_of_it(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshload"]

    def told(*arguments: object) -> tuple[int, Any]:
        done = subprocess.run([*launch, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=240)
        return done.returncode, json.loads(done.stdout)

    status, found = told("convert", QWEN, tmp_path / "orbax", "--to", "orbax")
    assert (status, found["arrays"]) == (0, 50)
    wrong = read_safetensors(QWEN / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    config = json.loads((QWEN / "config.json").read_text())
    other = write_checkpoint(tmp_path / "other", wrong | {name: np.zeros_like(wrong[name])}, config)
    status, found = told("verify", other, tmp_path / "orbax")
    assert (status != 0, found["arrays"], [p["array"] for p in found["problems"]]) == (True, 50, [name])


def test_verify_and_digest_take_the_optimizer_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    titan = GOLDEN.parent / "dcp" / "titan" / "checkpoint"
    for options, count in (((), 6), (("--optimizer", "exp_avg"), 12), (("--optimizer", "all"), 18)):
        assert run_json(capsys, "verify", titan, titan, *options)["arrays"] == count
        assert len(run_json(capsys, "verify", "--digest", titan, *options)["arrays"]) == count
    assert run(capsys, "verify", titan, titan, "--optimizer", "momentum")[0] == 2


def test_a_digest_is_printed_stored_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = write_checkpoint(tmp_path / "one", {"w": values})
    other = write_checkpoint(tmp_path / "other", {"w": values[::-1]})
    crc = f"{zlib.crc32(values.tobytes()):08x}"
    status, out, err = run(capsys, "verify", "--digest", one, "-o", tmp_path / "digest.json")
    assert (status, out, err) == (0, f"{crc}  float32 2x3  w\n", "")
    assert run_json(capsys, "verify", "--digest", one) == json.loads((tmp_path / "digest.json").read_text())
    assert run(capsys, "verify", "--digest", one, tmp_path / "digest.json")[0] == 0
    status, out, _ = run(capsys, "verify", "--digest", other, tmp_path / "digest.json")
    assert status == 1
    assert f"w: has the CRC-32 {zlib.crc32(values[::-1].tobytes()):08x}, the digest says {crc}" in out


def test_a_digest_file_that_is_none_is_told_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    one = write_checkpoint(tmp_path / "one", {"w": np.arange(6, dtype=np.float32)})
    cut = (one / "model.safetensors").read_bytes()[:-4]
    (one / "model.safetensors").write_bytes(cut)  # what reads meets this first
    for arguments in ((tmp_path / "none.json",), ("-o", tmp_path), ("-o", tmp_path / "none" / "digest.json")):
        status, _, err = run(capsys, "verify", "--digest", one, *arguments)
        assert status == 2
        assert str(arguments[-1]) in err


def test_a_digest_of_a_part_or_of_other_names_is_a_difference(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = write_checkpoint(tmp_path / "one", {"w": values, "v": values})
    part = of_slice("w", values[:1], Box((0, 0), (1, 3)), (2, 3)) + of_arrays({"x": values})
    part.save(tmp_path / "digest.json")
    found = run_json(capsys, "verify", "--digest", one, tmp_path / "digest.json")
    assert not found["ok"]
    assert sorted(p["array"] for p in found["problems"]) == ["v", "w", "x"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("convert", QWEN, "OUT", "--to", "nonsense"), "what can is"),
        (("convert", QWEN, QWEN, "--to", "hf"), "exists already"),
        (("convert", "/nowhere/at/all", "OUT", "--to", "hf"), "/nowhere/at/all"),
        (("convert", QWEN, "OUT", "--to", "hf", "--dtype", "int4"), "floating"),
        (("convert", QWEN, "OUT", "--to", "hf", "--mesh", "tp"), "AXIS=SIZE"),
        (("convert", QWEN, "OUT", "--to", "hf", "--max-bytes", "-1"), "max_bytes"),
        (("convert", QWEN, "s3://bucket/out", "--to", "hf"), "local folders"),
        (("convert", QWEN, "/proc/nowhere/out", "--to", "hf"), "making the folder failed"),
        (("verify", QWEN), "--digest"),
        (("verify", QWEN, "/nowhere/at/all"), "/nowhere/at/all"),
        (("verify", QWEN, QWEN, "--format", "hf"), "--digest"),
        (("verify", QWEN, QWEN, "--rtol", "-1"), "rtol"),
        (("verify", QWEN, QWEN, "--names", "nonsense"), "nonsense"),
        (("verify", "--digest", QWEN, "/nowhere/at/all"), "/nowhere/at/all"),
        (("verify", "--digest", QWEN, QWEN / "config.json"), "no digest"),
        (("verify", "--digest", QWEN, "-o", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_written_or_compared_is_one_sentence_and_status_2(
    arguments: tuple[object, ...], word: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    status, out, err = run(capsys, *(tmp_path / "out" if a == "OUT" else a for a in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("meshload: ")
    assert word in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan", QWEN)[0] == 2
    assert run(capsys, "nonsense")[0] == 2


def test_it_runs_as_a_module_and_prints_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "meshload", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("meshload 0.")
