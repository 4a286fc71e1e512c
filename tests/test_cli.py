"""The command line: what it prints, as text and as JSON, and how it ends."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

from meshload.cli import main

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


def test_usage_errors_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan", QWEN)[0] == 2
    assert run(capsys, "nonsense")[0] == 2


def test_it_runs_as_a_module_and_prints_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "meshload", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("meshload 0.")
