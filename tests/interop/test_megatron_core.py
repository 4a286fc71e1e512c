"""megatron-core loads what is converted to its format, and computes what transformers does; what it saves is converted back."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.testing import same_bits
from meshload_adapters.formats.megatron import Megatron
from meshload_adapters.formats.megatron_core import MegatronCore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)

dcp = pytest.importorskip("torch.distributed.checkpoint")
get_state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict").get_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning", "ignore::FutureWarning:torch")

CHECKS = Path(__file__).with_name("checks_megatron_core.py")

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"vocab_size": 101, "max_position_embeddings": 64}  # a vocabulary that the ranks have to pad
_WHOLE = {"vocab_size": 104}  # one that they have not: the padding's logits have their part in Megatron's loss
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {**_WHOLE, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 20000.0}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 16, "num_hidden_layers": 2}),
    "mixtral": ("MixtralConfig", {**_WHOLE, "num_local_experts": 4, "num_hidden_layers": 2, "sliding_window": None}),
}
OPTIMIZERS: Mapping[str, Mapping[str, str]] = {
    "llama": dict.fromkeys(("plain", "distributed", "legacy_plain", "legacy_distributed"), "tp=2,pp=2"),
    "mixtral": {"plain_ep2": "ep=2", "distributed_ep2": "ep=2", "distributed_ep1": "dp=4"},
}
"""By family, the optimizers that go on, too, and the meshes; `checks_megatron_core.py` tells of their names."""
TRAINED = [(family, kind) for family, kinds in OPTIMIZERS.items() for kind in kinds]

TOLERANCE = 1e-5
"""Of logits up to about 2 in float32: two ranks add what one adds in another order. Seen were differences of 1e-6, after a step of
weights of 2e-7."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder per family: `hf`, converted for tp=2 and pp=2 in `there`, and what megatron-core made of that."""
    root = tmp_path_factory.mktemp("megatron_core")
    for family in CONFIGS:
        prepare(root / family, family)
    program = [sys.executable, "-W", "ignore", str(CHECKS), *(str(root / family) for family in CONFIGS)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    return root


def prepare(folder: Path, family: str) -> None:
    kind, keys = CONFIGS[family]
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**_SIZES, **keys})).eval()
    ids = torch.randint(0, _SIZES["vocab_size"], (4, 12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
        logits = model(ids).logits
    model.save_pretrained(folder / "hf")
    np.save(folder / "ids.npy", ids.numpy())
    np.save(folder / "expected.npy", logits.numpy())
    to = MegatronCore(transformer_impl="local")
    meshload.convert(folder / "hf", folder / "there", to=to, mesh="tp=2,pp=2")
    if family in OPTIMIZERS:
        train(model, ids, folder)
    for kind, mesh in OPTIMIZERS.get(family, {}).items():
        src = meshload.open(folder / "dcp", config=folder / "hf")
        form = Megatron() if kind.startswith("legacy") else to
        meshload.convert(
            src, folder / kind, to=replace(form, distributed_optimizer="distributed" in kind), mesh=mesh, optimizer=True
        )


def train(model: Any, ids: Any, folder: Path) -> None:
    """Save a model and its optimizer after two steps to `dcp`, and after the next one to `next`."""
    groups = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    decayed = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(decayed, lr=0.01, betas=(0.9, 0.95))
    for step in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        if step > 0:
            state, states = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": states}, checkpoint_id=folder / ("next" if step == 2 else "dcp"), no_dist=True)


@pytest.mark.parametrize("family", CONFIGS)
def test_four_ranks_compute_the_logits_of_transformers(folder: Path, family: str) -> None:
    found, expected = (np.load(folder / family / f"{name}.npy") for name in ("logits", "expected"))
    assert found.shape == expected.shape
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


@pytest.mark.parametrize(
    ("family", "saved"),
    [(f, f"{k}_{form}") for f, k in TRAINED for form in ("again", "flat") if form == "again" or "distributed" in k],
)
def test_moments_masters_and_steps_go_through_megatron_core_bit_for_bit(folder: Path, family: str, saved: str) -> None:
    config = folder / family / "hf"
    source = meshload.open(folder / family / "dcp", config=config).with_names("hf")
    opened = meshload.open(folder / family / saved, config=config)
    assert (opened.problems, dict(opened.unavailable)) == ((), {})
    assert opened.meta["optimizer"]["step"] == 2
    found = opened.with_names("hf")
    kinds = {"exp_avg", "exp_avg_sq", *(("master",) if "distributed" in saved else ())}
    assert set(found.optimizer) == kinds
    for moment in kinds:
        expected = source.optimizer.get(moment, source.arrays)
        assert set(found.optimizer[moment]) == set(expected)
        assert [n for n, a in expected.items() if not same_bits(found.optimizer[moment][n], a)] == []
    assert [n for n, a in source.items() if not same_bits(found[n], a)] == []
    groups = opened.meta["optimizer"]["param_groups"]
    told = {(g["wd_mult"], g["lr"], tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in groups}
    assert told == {(1.0, 0.01, (0.9, 0.95), 1e-8, 0.1), (0.0, 0.01, (0.9, 0.95), 1e-8, 0.0)}
    assert len(groups) == (3 if "_ep2" in saved else 2)  # with the experts'


@pytest.mark.parametrize(("family", "kind"), TRAINED)
def test_the_next_step_is_that_of_the_unbroken_run(folder: Path, family: str, kind: str) -> None:
    config = folder / family / "hf"
    before, after = (meshload.open(folder / family / name, config=config).with_names("hf") for name in ("dcp", "next"))
    found = meshload.open(folder / family / f"{kind}_stepped", config=config).with_names("hf")
    assert found.meta["optimizer"]["step"] == 3
    assert set(found) == set(after)
    moved = max(float(np.abs(np.asarray(a) - np.asarray(before[n])).max()) for n, a in after.items())
    off = {n: float(np.abs(np.asarray(a) - np.asarray(found[n])).max()) for n, a in after.items()}
    assert moved > 0.01
    assert max(off.values()) < TOLERANCE, sorted(off.items(), key=lambda item: -item[1])[:5]
