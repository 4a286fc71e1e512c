"""megatron-core loads what is converted to its format, and computes what transformers does; what it saves is converted back."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

CHECKS = Path(__file__).with_name("checks_megatron_core.py")

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"vocab_size": 101, "max_position_embeddings": 64}  # a vocabulary that the ranks have to pad
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 20000.0}}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 16}),
}
TOLERANCE = 1e-5
"""Of logits up to about 2 in float32: two ranks add what one adds in another order. Seen were differences of 1e-6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder per family: `hf`, converted for tp=2 and pp=2 in `there`, and what megatron-core made of that."""
    root = tmp_path_factory.mktemp("megatron_core")
    for family in CONFIGS:
        prepare(root / family, family)
    program = [sys.executable, str(CHECKS), *(str(root / family) for family in CONFIGS)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    return root


def prepare(folder: Path, family: str) -> None:
    kind, keys = CONFIGS[family]
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**_SIZES, **keys)).eval()
    ids = torch.randint(0, _SIZES["vocab_size"], (2, 12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        logits = model(ids).logits
    model.save_pretrained(folder / "hf")
    np.save(folder / "ids.npy", ids.numpy())
    np.save(folder / "expected.npy", logits.numpy())
    meshload.convert(folder / "hf", folder / "there", to="megatron_core", mesh="tp=2,pp=2")


@pytest.mark.parametrize("family", CONFIGS)
def test_four_ranks_compute_the_logits_of_transformers(folder: Path, family: str) -> None:
    found, expected = (np.load(folder / family / f"{name}.npy") for name in ("logits", "expected"))
    assert found.shape == expected.shape == (2, 12, _SIZES["vocab_size"])
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_what_four_ranks_save_is_converted_back_bit_for_bit(folder: Path, family: str, tmp_path: Path) -> None:
    saved = meshload.open(folder / family / "again")
    assert not saved.problems
    assert not saved.unavailable
    assert saved["embedding.word_embeddings.weight"].shape == (104, 32)  # padded
    meshload.convert(saved, tmp_path / "back", to="hf", config=folder / family / "hf")
    assert meshload.verify(folder / family / "hf", tmp_path / "back").ok
