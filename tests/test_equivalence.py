"""The same model, sharded by different frameworks and read from different formats, is the same model: its logits and its bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.testing import same_bits
from meshload_adapters.frameworks.torch import numpy_dtype

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
FAMILIES = ("llama", "qwen2_tied", "qwen3_moe")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(family: str) -> Any:
    """Return a tiny model with weights that all matter."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 96, "max_position_embeddings": 64}
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif family == "qwen2_tied":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))
    else:
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint per family, with tokens and the logits of the unsharded model in it."""
    found = tmp_path_factory.mktemp("families")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 10))
    for family in FAMILIES:
        model = make(family)
        model.save_pretrained(found / family)
        np.save(found / family / "tokens.npy", tokens)
        with torch.no_grad():
            np.save(found / family / "logits.npy", model(torch.from_numpy(tokens)).logits.numpy())
    return found


@pytest.fixture(scope="module")
def told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("told")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launch, str(HERE / "checks_transformers.py"), str(folder), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["tensor_parallel", "data_parallel"])
def test_a_sharded_transformers_model_gives_the_same_logits(told: list[dict[str, str]], way: str, family: str) -> None:
    assert {rank: of[f"{way} {family}"] for rank, of in enumerate(told) if of[f"{way} {family}"]} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_jax_on_a_mesh_gives_the_same_logits(folder: Path, family: str, tmp_path: Path) -> None:
    tokens = ";".join(",".join(map(str, row)) for row in np.load(folder / family / "tokens.npy"))
    program = [sys.executable, str(HERE.parent / "examples" / "restore_jax.py"), str(folder / family)]
    options = ["--mesh", "pp=2,tp=2,dp=2", "--tokens", tokens, "--out", str(tmp_path / "logits.npy")]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), np.load(folder / family / "logits.npy"), rtol=1e-4, atol=1e-4)


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(tensor.dtype)).reshape(tuple(tensor.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_and_jax_hold_the_same_bits(folder: Path, family: str, dtype: str) -> None:
    pytest.importorskip("jax")
    for rank in range(4):
        options: dict[str, Any] = {"mesh": "pp=2,tp=2", "rank": rank, "dtype": dtype}
        one, other, third = (meshload.restore(folder / family, into=into, **options) for into in ("torch", "jax", "numpy"))
        assert set(one) == set(other) == set(third)
        assert [n for n in third if not same_bits(numpy_of(one[n]), third[n])] == []
        assert [n for n in third if not same_bits(np.asarray(other[n]), third[n])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_orbax_copy_holds_the_same_bits(folder: Path, family: str, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    expected = meshload.restore(folder / family, into="numpy")
    stored = meshload.open(folder / family)
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "copy", {name: np.asarray(stored[name]) for name in stored})
        writer.wait_until_finished()
    found = meshload.restore(tmp_path / "copy", config=folder / family, into="numpy")
    assert set(found) == set(expected)
    assert [n for n in expected if not same_bits(found[n], expected[n])] == []
    for rank in (0, 3):
        one, other = (
            meshload.restore(path, mesh="pp=2,tp=2", rank=rank, config=folder / family, into="jax")
            for path in (tmp_path / "copy", folder / family)
        )
        assert set(one) == set(other)
        assert [n for n in one if not same_bits(np.asarray(one[n]), np.asarray(other[n]))] == []


def test_the_torch_example_shows_each_rank(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE.parent / "examples" / "restore_torch.py"), "--mesh", "pp=2,tp=2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("rank")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert sum("model.embed_tokens.weight" in line and "(66, 32)" in line for line in lines) == 1
    assert sum("lm_head.weight" in line and "(65, 32)" in line for line in lines) == 1


def test_the_torch_example_runs_under_torchrun(folder: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launch, str(HERE.parent / "examples" / "restore_torch.py"), str(folder / "llama"), "--mesh", "tp=2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("rank")) == ["rank 0", "rank 1"]
