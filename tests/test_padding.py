"""Padding: a dim whose size does not divide is laid out longer, with zeros at its own end, also within a fused array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import meshload
from meshload.testing import ramp, same_bits, write_checkpoint

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 8,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 2,
    "vocab_size": 11,
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    **{f"model.layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"},
    "model.layers.0.block_sparse_moe.gate.weight": (2, 8),
    **{f"model.layers.0.block_sparse_moe.experts.{e}.w{n}.weight": (8, 5) if n == 2 else (5, 8) for e in (0, 1) for n in (1, 2, 3)},
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, {name: ramp(name, shape) for name, shape in SHAPES.items()}, CONFIG)


@pytest.mark.parametrize(("rank", "start", "stop"), [(0, 0, 4), (1, 4, 5)])
def test_a_padded_dim_has_zeros_at_its_end(path: Path, rank: int, start: int, stop: int) -> None:
    layout = meshload.Layout({"ffn": "tp"}, pad={"ffn": 8})
    found = meshload.restore(path, mesh="tp=2", rank=rank, layout=layout, into="numpy")
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    expected = np.zeros((4, 8), np.float32)
    expected[: stop - start] = ramp(name, (5, 8))[start:stop]
    assert same_bits(found[name], expected)


@pytest.mark.parametrize(("rank", "start", "stop"), [(0, 0, 4), (1, 4, 5)])
def test_each_part_of_a_fused_array_is_padded_at_its_own_end(path: Path, rank: int, start: int, stop: int) -> None:
    layout = meshload.Layout({"ffn": "tp"}, pad={"ffn": 8})
    found = meshload.restore(path, mesh="tp=2", rank=rank, layout=layout, into="numpy", names="transformers")
    expected = np.zeros((2, 2, 4, 8), np.float32)
    for expert in (0, 1):
        for i, part in enumerate(("w1", "w3")):  # gate over up
            full = ramp(f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight", (5, 8))
            expected[expert, i, : stop - start] = full[start:stop]
    assert same_bits(found["model.layers.0.mlp.experts.gate_up_proj"], expected.reshape(2, 8, 8))


def test_a_jax_mesh_takes_a_padded_vocabulary(path: Path) -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("tp",))
    found = meshload.restore(path, mesh=mesh, layout=meshload.Layout.default(pad={"vocab": 4}))["lm_head.weight"]
    expected = np.zeros((12, 8), np.float32)
    expected[:11] = ramp("lm_head.weight", (11, 8))
    assert same_bits(np.asarray(found), expected)
