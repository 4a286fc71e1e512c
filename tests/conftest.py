"""Hypothesis runs the same examples each time and sets no deadline, since CI machines stall; no test has a launcher around it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests that need it skip themselves
    pass
else:
    settings.register_profile(
        "meshload",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=100,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )
    settings.load_profile("meshload")

ROOT = Path(__file__).resolve().parent.parent

collect_ignore_glob = [
    "bench/*",
    "make_*.py",
    "checks_*.py",
    "interop/checks_*.py",
]  # programs, some of which need what no test needs


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run a program in a fresh process, and return what it printed."""

    def run(program: str, *arguments: Any, env: dict[str, str] | None = None, timeout: float = 240) -> str:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def save_qwen2() -> Callable[..., None]:
    """Save a tiny Qwen2 of a dtype: tied embeddings, biases, grouped queries, a vocabulary that divides by nothing."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=131,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))

    def save(folder: Path, dtype: str) -> None:
        deepcopy(model).to(getattr(torch, dtype)).save_pretrained(folder)  # `to` changes a module itself

    return save


@pytest.fixture
def pretend() -> Iterator[Callable[..., Any]]:
    """Give DeviceMeshes of ranks that do not run: no rank ever talks to another."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def mesh(rank: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    yield mesh
    if distributed.is_initialized():
        distributed.destroy_process_group()
