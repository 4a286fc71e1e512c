"""Each example runs as its first lines say, on small checkpoints that exist or that it makes itself."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
QWEN = ROOT / "tests" / "golden" / "hf" / "qwen2_tied_single" / "checkpoint"


def run(*arguments: object, **environment: str) -> str:
    words = [sys.executable, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_my_format_is_restored_by_the_core() -> None:
    assert run("examples/my_format.py").splitlines() == ["rank 0: weight (3, 4), bias (3,)", "rank 1: weight (3, 4), bias (3,)"]


def test_restore_torch_shows_both_ranks_of_a_checkpoint_that_it_makes() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = run("examples/restore_torch.py", "--mesh", "tp=2")
    assert out.count("model.layers.0.self_attn.q_proj.weight") == 2
    assert [line.split(",")[0] for line in out.splitlines() if line.startswith("rank")] == [
        "rank 0: 27 tensors",
        "rank 1: 27 tensors",
    ]


def test_restore_torch_shows_one_rank_of_a_checkpoint_that_is_named() -> None:
    pytest.importorskip("torch")
    out = run("examples/restore_torch.py", QWEN, "--mesh", "pp=2,tp=2", "--rank", "3")
    assert out.startswith("rank 3: 26 tensors")
    assert "(65, 32)" in out.splitlines()[-1]


def test_restore_jax_gives_the_same_token_on_any_mesh() -> None:
    pytest.importorskip("jax")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    llama = ROOT / "tests" / "golden" / "hf" / "llama_gqa_sharded_bf16" / "checkpoint"
    alone = run("examples/restore_jax.py", llama, "--mesh", "tp=1", "--tokens", "3,1,4,1,5", **devices)
    piped = run("examples/restore_jax.py", llama, "--mesh", "pp=4", "--tokens", "3,1,4,1,5", **devices)
    assert alone.startswith("next token: ")
    assert piped == alone


def test_orbax_without_converting_restores_a_folder_of_hugging_face(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    out = run("examples/orbax_without_converting.py", QWEN, tmp_path / "index", **devices).splitlines()
    assert out[0].startswith("50 arrays of 141824 bytes are shown by ")
    assert "model.layers.0.mlp.down_proj.weight (32, 48) PartitionSpec('devices',)" in [
        line.replace(" P(", " PartitionSpec(") for line in out
    ]


def test_convert_goes_there_and_back() -> None:
    pytest.importorskip("transformers")
    out = run("examples/convert.py", "--mesh", "tp=4").splitlines()
    assert out == ["21 arrays there and back, the same", "digests equal: True"]


def test_convert_by_several_processes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = run(*launch, "examples/convert.py", QWEN, tmp_path, "--mesh", "tp=2").splitlines()
    assert out == ["50 arrays there and back, the same", "digests equal: True"]


def test_save_from_ranks_writes_one_checkpoint(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert run(*launch, "examples/save_from_ranks.py", tmp_path / "out") == "3 tensors, the same: True\n"
