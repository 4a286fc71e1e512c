"""Eight processes that torchrun starts, over gloo: pipeline, tensor and data parallel ranks hold what they should, and no more.

Three things go wrong where weights are cut by hand: replicated norms are counted once per rank; an embedding that is tied to the
head is missing on the last stage; a data parallel rank that has a part of the sequence gets a part of the weights.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = re.findall(r"^def (check_\w+)", (HERE / "checks_torch.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, save_qwen2: Callable[..., None]) -> Path:
    """Return a tiny Qwen2: tied embeddings, biases, grouped queries, a vocabulary that divides by nothing."""
    folder = tmp_path_factory.mktemp("qwen2")
    save_qwen2(folder, "float32")
    return folder


@pytest.fixture(scope="module")
def told(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return what each rank says went wrong, by check."""
    out = tmp_path_factory.mktemp("told")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    program = [*launch, str(HERE / "checks_torch.py"), str(checkpoint), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    files = list(out.iterdir())
    assert done.returncode == 0 or files, done.stderr[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_processes(told: list[dict[str, str]], check: str) -> None:
    assert {of.get(check, "an earlier check failed") for of in told} == {""}
