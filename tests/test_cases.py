"""Reported faults of loaders, each as a small input with what is right: numbers are those of the collection of cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Array, Checkpoint, Layout
from meshload.pieces import piece, union
from meshload.testing import InMemory, counted, llama_shapes, ramp, read_safetensors, same_bits, write_checkpoint

Values = Any
F8 = ml_dtypes.float8_e4m3fn

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}


def llama(config: Mapping[str, Any] = LLAMA, dtype: Any = np.float32) -> dict[str, Values]:
    return {name: ramp(name, shape, dtype) for name, shape in llama_shapes(config).items()}


def restored(path: Any, **options: Any) -> dict[str, Values]:
    found: dict[str, Values] = meshload.restore(path, into="numpy", **options)
    return found


def ranks(path: Any, mesh: str, count: int, **options: Any) -> list[dict[str, Values]]:
    return [restored(path, mesh=mesh, rank=r, **options) for r in range(count)]


def columns(w: Values, start: int, stop: int) -> Values:
    return np.ascontiguousarray(w[:, start:stop])


# --- replicas ---------------------------------------------------------------------------------------------------------


def rank_files(lacking: int | None) -> Checkpoint:
    """Return what 4 ranks stored of a norm, each all of it, and of a weight, each its rows; perhaps one file is not there."""
    norm, weight = ramp("norm", (8,)), ramp("w", (8, 4))
    norms, weights = [], []
    for r in range(4):
        if r != lacking:
            source = InMemory(f"mp_rank_{r:02}", norm.tobytes() + weight[2 * r : 2 * r + 2].tobytes())
            norms.append(piece(source, 0, (8,), 4))
            weights.append(piece(source, 32, (2, 4), 4).place((2 * r, 0)))
    arrays = {
        "norm": Array("norm", np.dtype("f4"), (8,), union(norms)),
        "w": Array("w", np.dtype("f4"), (8, 4), union(weights)),
    }
    return Checkpoint(arrays, "ranks")


@pytest.mark.parametrize("lacking", [0, 2])
def test_b02_a_replica_comes_from_any_file_that_is_there(lacking: int) -> None:
    checkpoint, log = counted(rank_files(lacking))
    assert same_bits(checkpoint["norm"], ramp("norm", (8,)))
    log.reads.clear()
    layout = {"w": ("tp",), "*": ()}
    kept = [r for r in range(4) if r != lacking]
    for rank in kept:
        assert same_bits(
            restored(checkpoint, mesh="tp=4", rank=rank, layout=layout)["w"], ramp("w", (8, 4))[2 * rank : 2 * rank + 2]
        )
    log.reads.clear()
    with pytest.raises(meshload.MissingPieces, match=f"w: rank {lacking} needs 8 elements of w, the checkpoint holds 0 of them"):
        restored(checkpoint, mesh="tp=4", rank=lacking, layout=layout)
    assert log.reads == []


# --- pipeline stages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "stages"), [(7, 4), (30, 4), (10, 3), (2, 3)])
def test_b05_b07_each_layer_is_restored_on_exactly_one_stage(tmp_path: Path, layers: int, stages: int) -> None:
    config = {**LLAMA, "num_hidden_layers": layers}
    arrays = llama(config)
    found = ranks(write_checkpoint(tmp_path, arrays, config), f"pp={stages}", stages)
    assert sorted(name for stage in found for name in stage) == sorted(arrays)
    assert all(same_bits(w, arrays[name]) for stage in found for name, w in stage.items())
    counts = [len({n.split(".")[2] for n in stage if ".layers." in n}) for stage in found]
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1


# --- ties -------------------------------------------------------------------------------------------------------------


def tied(**more: Any) -> tuple[dict[str, Values], dict[str, Any]]:
    config = {**LLAMA, "tie_word_embeddings": True, **more}
    arrays = llama(config)
    del arrays["lm_head.weight"]
    return arrays, config


@pytest.mark.parametrize("pad", [None, 16])
def test_b10_the_last_stage_has_the_head_that_is_tied(tmp_path: Path, pad: int | None) -> None:
    arrays, config = tied()
    path = write_checkpoint(tmp_path, arrays, config)
    layout = Layout.default(pad={"vocab": pad}) if pad else None
    found = ranks(path, "pp=2,tp=2", 4, layout=layout)
    embedding = arrays["model.embed_tokens.weight"]
    if pad:
        embedding = np.concatenate([embedding, np.zeros((3, 16), np.float32)])
    half = len(embedding) // 2 + len(embedding) % 2
    for tp, cut in enumerate((embedding[:half], embedding[half:])):
        assert same_bits(found[tp]["model.embed_tokens.weight"], cut)
        assert "lm_head.weight" not in found[tp]
        assert same_bits(found[2 + tp]["lm_head.weight"], cut)
        assert "model.embed_tokens.weight" not in found[2 + tp]


def test_b10_a_tie_is_one_read_and_two_uses(tmp_path: Path) -> None:
    arrays, config = tied()
    checkpoint, log = counted(meshload.open(write_checkpoint(tmp_path, arrays, config)))
    include = ["lm_head.weight", "model.embed_tokens.weight"]
    made = meshload.plan(checkpoint, mesh="tp=2", rank=1, include=include)
    assert (len(made.targets), [name for name, _ in made.aliases]) == (1, ["lm_head.weight"])
    assert (made.reads, made.read_bytes) == (1, 6 * 16 * 4)
    found = restored(checkpoint, mesh="tp=2", rank=1, include=include)
    assert log.nbytes == 6 * 16 * 4
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


def test_b11_an_untied_head_that_is_missing_is_not_tied_silently(tmp_path: Path) -> None:
    arrays, config = tied(tie_word_embeddings=False)
    path = write_checkpoint(tmp_path, arrays, config)
    with pytest.raises(meshload.MissingArray, match=r"lm_head.weight: .*the config says untied.*missing='ignore'"):
        restored(path)
    assert set(restored(path, missing="ignore")) == set(arrays)
    assert meshload.plan(path, missing="ignore").missing == ("lm_head.weight",)


def test_b13_arrays_that_resemble_a_tie_and_differ_are_two(tmp_path: Path) -> None:
    arrays = {"lm_head.weight": ramp("a", (13, 4)), "mtp.shared_head.output.weight": ramp("b", (13, 4))}
    found = restored(write_checkpoint(tmp_path, arrays))
    assert all(same_bits(found[name], w) for name, w in arrays.items())
    checkpoint = meshload.open(tmp_path)
    assert (set(checkpoint), dict(checkpoint.aliases)) == (set(arrays), {})


def test_b13_a_declared_tie_whose_copies_differ_keeps_both_and_warns(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    path = write_checkpoint(tmp_path / "differ", llama(config), config)
    with pytest.warns(
        meshload.MeshloadWarning, match=r"lm_head.weight and model.embed_tokens.weight are tied .* differ; both are kept"
    ):
        found = restored(path, mesh="tp=2", rank=1)
    assert same_bits(found["lm_head.weight"], llama()["lm_head.weight"][7:])
    assert same_bits(found["model.embed_tokens.weight"], llama()["model.embed_tokens.weight"][7:])
    equal = llama(config)
    equal["lm_head.weight"] = equal["model.embed_tokens.weight"]
    restored(write_checkpoint(tmp_path / "equal", equal, config))


# --- heads ------------------------------------------------------------------------------------------------------------

WIDE = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 1}


@pytest.mark.filterwarnings("ignore:mesh .*hold nothing of:meshload.MeshloadWarning")  # of so small a vocabulary
def test_b16_with_more_ranks_than_kv_heads_each_holds_its_whole_head(tmp_path: Path) -> None:
    arrays = llama(WIDE)
    at = "model.layers.0.self_attn."
    for r, found in enumerate(ranks(write_checkpoint(tmp_path, arrays, WIDE), "tp=8", 8)):
        head = r // 2
        for p in ("k", "v"):
            assert same_bits(found[f"{at}{p}_proj.weight"], arrays[f"{at}{p}_proj.weight"][8 * head : 8 * head + 8])
        assert same_bits(found[f"{at}q_proj.weight"], arrays[f"{at}q_proj.weight"][8 * r : 8 * r + 8])
        assert same_bits(found[f"{at}o_proj.weight"], columns(arrays[f"{at}o_proj.weight"], 8 * r, 8 * r + 8))


@pytest.mark.parametrize(("heads", "kv", "tp"), [(6, 3, 2), (8, 4, 3), (12, 6, 4)])
def test_b16_kv_heads_that_do_not_divide_raise_at_plan_time(tmp_path: Path, heads: int, kv: int, tp: int) -> None:
    config = {**WIDE, "num_attention_heads": heads, "num_key_value_heads": kv}
    path = write_checkpoint(tmp_path, llama(config), config)
    with pytest.raises(meshload.LayoutError, match=rf"{kv} kv_heads x 2 group.*{heads} heads over {tp} ranks"):
        meshload.plan(path, mesh=f"tp={tp}", rank="all")


def test_b20_a_norm_over_all_kv_heads_is_cut_by_heads(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "olmo2", "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    at = "model.layers.0."
    arrays = llama(config)
    del arrays[at + "input_layernorm.weight"]
    arrays |= {
        at + "post_feedforward_layernorm.weight": ramp("f", (32,)),
        at + "self_attn.q_norm.weight": ramp("q", (32,)),
        at + "self_attn.k_norm.weight": ramp("k", (16,)),
    }
    for r, found in enumerate(ranks(write_checkpoint(tmp_path, arrays, config), "tp=4", 4)):
        head = r // 2
        assert same_bits(found[at + "self_attn.k_norm.weight"], ramp("k", (16,))[8 * head : 8 * head + 8])
        assert same_bits(found[at + "self_attn.q_norm.weight"], ramp("q", (32,))[8 * r : 8 * r + 8])
        assert same_bits(found[at + "self_attn.k_proj.weight"], arrays[at + "self_attn.k_proj.weight"][8 * head : 8 * head + 8])


def test_96_heads_over_6_ranks_are_fine_where_the_vocabulary_is_not_b30(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "hidden_size": 96,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    arrays = llama(config)
    found = ranks(write_checkpoint(tmp_path, arrays, config), "tp=6", 6)
    assert [f["model.layers.0.self_attn.q_proj.weight"].shape for f in found] == [(16, 96)] * 6
    assert [len(f["lm_head.weight"]) for f in found] == [3, 3, 3, 3, 3, 1]
    assert same_bits(np.concatenate([f["lm_head.weight"] for f in found]), arrays["lm_head.weight"])


# --- gate and up ------------------------------------------------------------------------------------------------------

MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 8,
    "num_local_experts": 4,
}


def mixtral() -> dict[str, Values]:
    arrays = {n: w for n, w in llama(MIXTRAL).items() if ".mlp." not in n}
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe."
        arrays[at + "gate.weight"] = ramp(at, (4, 16))
        for e in range(4):
            for w, shape in (("w1", (8, 16)), ("w3", (8, 16)), ("w2", (16, 8))):
                name = f"{at}experts.{e}.{w}.weight"
                arrays[name] = ramp(name, shape)
    return arrays


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b22_a_fused_gate_and_up_holds_each_ones_part(tmp_path: Path, tp: int) -> None:
    arrays = mixtral()
    path = write_checkpoint(tmp_path, arrays, MIXTRAL, shards=3)
    n = 8 // tp
    for r, found in enumerate(ranks(path, f"tp={tp}", tp, names="transformers")):
        for i in range(2):
            fused = found[f"model.layers.{i}.mlp.experts.gate_up_proj"]
            assert fused.shape == (4, 2 * n, 16)
            for e in range(4):
                at = f"model.layers.{i}.block_sparse_moe.experts.{e}."
                rows = slice(r * n, (r + 1) * n)
                assert same_bits(fused[e], np.concatenate([arrays[at + "w1.weight"][rows], arrays[at + "w3.weight"][rows]]))


def test_b62_a_missing_expert_is_named_and_nothing_is_left_unfilled(tmp_path: Path) -> None:
    arrays = mixtral()
    whole = write_checkpoint(tmp_path / "whole", arrays, MIXTRAL)
    made = meshload.plan(whole, names="transformers")
    assert made.wanted_bytes == made.result_bytes == sum(w.nbytes for w in arrays.values())
    del arrays["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    lacking = write_checkpoint(tmp_path / "lacking", arrays, MIXTRAL)
    with pytest.raises(meshload.MissingPieces, match=r"model.layers.1.mlp.experts.gate_up_proj: rank 0 needs"):
        meshload.plan(lacking, names="transformers")
    with pytest.raises(meshload.MissingArray, match=r"model.layers.1.block_sparse_moe.experts.2.w3.weight: .*never lists"):
        meshload.plan(lacking)
    first = restored(lacking, mesh="pp=2", rank=0, names="transformers")
    assert first["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 16, 16)


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron_core", "orbax"])
@pytest.mark.parametrize("mesh", [None, "ep=2"])
def test_b62_what_is_fused_with_a_missing_expert_is_never_lost_on_the_way(to: str, mesh: str | None, tmp_path: Path) -> None:
    arrays = mixtral()
    del arrays["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    lacking = write_checkpoint(tmp_path / "lacking", arrays, MIXTRAL)
    lost = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    with pytest.raises(meshload.LayoutError, match=rf"{lost}: .* lacks expert_up .*experts\.2\.w3\.weight, which"):
        meshload.convert(lacking, tmp_path / "out", to=to, mesh=mesh, names="megatron")
    assert not (tmp_path / "out").exists()
    names = meshload.open(lacking).with_names("megatron")
    assert lost not in names
    assert "lacks expert_up" in names.why_missing(lost)


def test_b63_experts_grouped_in_some_layers_and_single_in_others_are_the_same(tmp_path: Path) -> None:
    arrays = mixtral()
    plain = write_checkpoint(tmp_path / "plain", arrays, MIXTRAL)
    at = "model.layers.0.block_sparse_moe."
    pairs = [np.concatenate([arrays.pop(f"{at}experts.{e}.w1.weight"), arrays.pop(f"{at}experts.{e}.w3.weight")]) for e in range(4)]
    arrays["model.layers.0.mlp.experts.gate_up_proj"] = np.stack(pairs)
    arrays["model.layers.0.mlp.experts.down_proj"] = np.stack([arrays.pop(f"{at}experts.{e}.w2.weight") for e in range(4)])
    checkpoint, log = counted(meshload.open(write_checkpoint(tmp_path / "mixed", arrays, MIXTRAL)))
    for rank in range(2):
        for names in ("hf", "transformers"):
            log.reads.clear()
            found, wanted = (restored(c, mesh="ep=2", rank=rank, names=names, merge_gap=0) for c in (checkpoint, plain))
            assert found.keys() == wanted.keys()
            assert all(same_bits(found[n], wanted[n]) for n in wanted)
            assert log.nbytes == sum(w.nbytes for w in wanted.values())


def test_b63_experts_stored_both_ways_are_taken_from_the_naming_that_knows_most(tmp_path: Path) -> None:
    arrays = mixtral()
    grouped = ramp("other", (4, 16, 16))
    path = write_checkpoint(tmp_path, {**arrays, "model.layers.0.mlp.experts.gate_up_proj": grouped}, MIXTRAL)
    with pytest.warns(meshload.MeshloadWarning, match="1 arrays .*: model.layers.0.mlp.experts.gate_up_proj"):
        found = restored(path)
    assert all(same_bits(found[n], w) for n, w in arrays.items())


# --- vocabulary -------------------------------------------------------------------------------------------------------


def test_b26_a_padded_vocabulary_ends_in_zeros(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llama(), LLAMA)
    found = ranks(path, "tp=4", 4, layout=Layout.default(pad={"vocab": 16}))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert [f[name].shape for f in found] == [(4, 16)] * 4
        assert same_bits(found[3][name][:1], llama()[name][12:])
        assert not found[3][name][1:].any()
        assert same_bits(np.concatenate([f[name] for f in found])[:13], llama()[name])


@pytest.mark.filterwarnings("ignore:mesh .*hold nothing of:meshload.MeshloadWarning")  # of so small a vocabulary
@pytest.mark.parametrize(("tp", "rows"), [(4, [4, 4, 4, 1]), (5, [3, 3, 3, 3, 1]), (8, [2, 2, 2, 2, 2, 2, 1, 0])])
def test_b27_b29_an_uneven_vocabulary_loses_no_row(tmp_path: Path, tp: int, rows: list[int]) -> None:
    found = ranks(write_checkpoint(tmp_path, llama(), LLAMA), f"tp={tp}", tp, include=["lm_head.weight"])
    assert [len(f["lm_head.weight"]) for f in found] == rows
    assert same_bits(np.concatenate([f["lm_head.weight"] for f in found]), llama()["lm_head.weight"])


def test_b28_a_vocabulary_that_is_whole_already_is_not_padded(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 16}
    path = write_checkpoint(tmp_path, llama(config), config)
    for layout in (None, Layout.default(pad={"vocab": 8})):
        found = ranks(path, "tp=2", 2, layout=layout, include=["lm_head.weight"])
        assert [f["lm_head.weight"].shape for f in found] == [(8, 16)] * 2


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_b53_arrays_of_no_elements_are_cut_and_read_nothing(tmp_path: Path) -> None:
    arrays = {"a": np.zeros((2, 0), np.float32), "b": np.zeros((0, 4), np.float32)}
    checkpoint, log = counted(meshload.open(write_checkpoint(tmp_path, arrays)))
    found = restored(checkpoint, mesh="tp=2", rank=1, layout={"*": ("tp",)})
    assert (found["a"].shape, found["b"].shape) == ((1, 0), (0, 4))
    assert log.reads == []


def test_b55_what_was_written_from_a_strided_view_is_row_major(tmp_path: Path) -> None:
    views = {
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "expanded": np.broadcast_to(np.arange(3, dtype=np.float32), (4, 3)),
        "reversed": np.arange(6, dtype=np.float32)[::-1],
    }
    path = write_checkpoint(tmp_path, views)
    found, other = restored(path), read_safetensors(path / "model.safetensors")
    for name, view in views.items():
        assert same_bits(found[name], np.array(view, order="C"))
        assert same_bits(found[name], other[name])


# --- quantised weights ------------------------------------------------------------------------------------------------

QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in LINEAR


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def fp8(config: Mapping[str, Any]) -> dict[str, Values]:
    """Return a model whose linear weights are float8, with one scale per block."""
    high, wide = config["quantization_config"]["weight_block_size"]
    arrays = {}
    for name, shape in llama_shapes(config).items():
        if is_linear(name):
            arrays[name] = ramp(name, shape, F8)
            scale = (blocks(shape[0], high), blocks(shape[1], wide))
            arrays[name + "_scale_inv"] = ramp(name, scale).astype(np.float32) / 1e6
        else:
            arrays[name] = ramp(name, shape, ml_dtypes.bfloat16)
    return arrays


def test_fp8_of_qwen3_comes_with_the_scales_of_its_rows_and_columns(tmp_path: Path) -> None:
    arrays = fp8(QWEN3)
    path = write_checkpoint(tmp_path, arrays, QWEN3, shards=2)
    whole = restored(path)
    assert whole.keys() == arrays.keys()
    assert all(same_bits(whole[n], w) for n, w in arrays.items())
    at = "model.layers.0."
    for r, found in enumerate(ranks(path, "tp=2", 2)):
        assert found.keys() == arrays.keys()
        for p, rows in (("self_attn.q", 512), ("self_attn.k", 128), ("self_attn.v", 128), ("mlp.gate", 256), ("mlp.up", 256)):
            name = f"{at}{p}_proj.weight"
            assert same_bits(found[name], arrays[name][r * rows : (r + 1) * rows])
            n = rows // 128
            assert same_bits(found[name + "_scale_inv"], arrays[name + "_scale_inv"][r * n : (r + 1) * n])
        for p, width in (("self_attn.o", 512), ("mlp.down", 256)):
            name = f"{at}{p}_proj.weight"
            assert same_bits(found[name], columns(arrays[name], r * width, (r + 1) * width))
            n = width // 128
            assert same_bits(found[name + "_scale_inv"], columns(arrays[name + "_scale_inv"], r * n, (r + 1) * n))


def test_b21_kv_heads_and_their_scales_repeat_alike(tmp_path: Path) -> None:
    arrays = fp8(QWEN3)
    path = write_checkpoint(tmp_path, arrays, QWEN3)
    for r, found in enumerate(ranks(path, "tp=4", 4)):
        for p in ("k", "v"):
            name, head = f"model.layers.0.self_attn.{p}_proj.weight", r // 2
            assert same_bits(found[name], arrays[name][128 * head : 128 * head + 128])
            assert same_bits(found[name + "_scale_inv"], arrays[name + "_scale_inv"][head : head + 1])
        name = "model.layers.0.self_attn.q_proj.weight"
        assert same_bits(found[name], arrays[name][256 * r : 256 * r + 256])
        assert same_bits(found[name + "_scale_inv"], arrays[name + "_scale_inv"][2 * r : 2 * r + 2])


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_fp8_is_dequantised_by_the_scale_of_each_block(tmp_path: Path, tp: int) -> None:
    arrays = fp8(QWEN3)
    path = write_checkpoint(tmp_path, arrays, QWEN3)
    name = "model.layers.0.mlp.gate_proj.weight"
    wide = np.repeat(np.repeat(arrays[name + "_scale_inv"], 128, 0), 128, 1)[:512, :256]
    with np.errstate(invalid="ignore"):
        values = arrays[name].astype(np.float32) * wide
    for r in range(tp):
        found = restored(path, mesh=f"tp={tp}", rank=r, dtype="float32", include=["*gate_proj*", "model.norm.weight"])
        n = 512 // tp
        assert np.array_equal(found[name], values[r * n : (r + 1) * n], equal_nan=True)
        assert found["model.norm.weight"].dtype == np.float32
        assert name + "_scale_inv" not in found


def test_fp8_without_its_scales_is_not_dequantised(tmp_path: Path) -> None:
    arrays = fp8(QWEN3)
    path = write_checkpoint(tmp_path, {n: w for n, w in arrays.items() if not n.endswith("gate_proj.weight_scale_inv")}, QWEN3)
    with pytest.raises((meshload.LayoutError, meshload.MissingArray), match=r"gate_proj\.weight"):
        restored(path, dtype="float32")


def one_linear(config: Mapping[str, Any], extra: Mapping[str, Values], name: str) -> dict[str, Values]:
    """Return a model with some arrays in place of one weight, and plain ones for the rest."""
    arrays = llama(config, ml_dtypes.bfloat16)
    del arrays[name]
    return {**arrays, **extra}


@pytest.mark.filterwarnings("ignore:mesh .*hold nothing of:meshload.MeshloadWarning")  # of so small a vocabulary
def test_b58_ranks_within_a_block_share_its_scale(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
    }
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    name = "model.layers.0.mlp.gate_proj.weight"
    weight, scale = ramp(name, (512, 128), F8), ramp("s", (4, 1))
    path = write_checkpoint(tmp_path, one_linear(config, {name: weight, name + "_scale_inv": scale}, name), config)
    for r, found in enumerate(ranks(path, "tp=8", 8)):
        assert same_bits(found[name], weight[64 * r : 64 * r + 64])
        assert same_bits(found[name + "_scale_inv"], scale[64 * r // 128 : 64 * r // 128 + 1])


def test_b59_a_cut_inside_a_block_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 258,
        "num_hidden_layers": 1,
    }
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    name = "model.layers.0.mlp.down_proj.weight"
    weight, scale = ramp(name, (4, 258), F8), ramp("s", (1, 3))
    path = write_checkpoint(tmp_path, one_linear(config, {name: weight, name + "_scale_inv": scale}, name), config)
    assert same_bits(restored(path)[name + "_scale_inv"], scale)
    with pytest.raises(meshload.LayoutError, match=r"rank 1 holds elements 129 to 258 of 258, which cuts a block of 128"):
        restored(path, mesh="tp=2", rank=1)
    assert same_bits(restored(path, mesh="tp=2", rank=1, layout="replicated")[name], weight)


def test_b60_scales_along_the_input_are_cut_with_it(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "hidden_size": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
    }
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    name = "model.layers.0.mlp.down_proj.weight"
    weight, scale = ramp(name, (8, 96), F8), ramp("s", (8, 3))
    path = write_checkpoint(tmp_path, one_linear(config, {name: weight, name + "_scale_inv": scale}, name), config)
    for r, found in enumerate(ranks(path, "tp=3", 3)):
        assert same_bits(found[name], columns(weight, 32 * r, 32 * r + 32))
        assert same_bits(found[name + "_scale_inv"], columns(scale, r, r + 1))


AWQ = {
    **LLAMA,
    "hidden_size": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 12,
}
DOWN = "model.layers.0.mlp.down_proj."


def awq() -> tuple[dict[str, Values], dict[str, Any]]:
    extra = {
        DOWN + "qweight": ramp("qweight", (96, 2), np.int32),
        DOWN + "qzeros": ramp("qzeros", (3, 2), np.int32),
        DOWN + "scales": ramp("scales", (3, 16), np.float16),
    }
    return extra, {**AWQ, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}


def test_b61_packed_groups_are_cut_on_their_edges(tmp_path: Path) -> None:
    extra, config = awq()
    arrays = one_linear(config, extra, DOWN + "weight")
    path = write_checkpoint(tmp_path, arrays, config)
    whole = restored(path)
    assert whole.keys() == arrays.keys()
    for r, found in enumerate(ranks(path, "tp=3", 3)):
        assert same_bits(found[DOWN + "qweight"], extra[DOWN + "qweight"][32 * r : 32 * r + 32])
        assert same_bits(found[DOWN + "qzeros"], extra[DOWN + "qzeros"][r : r + 1])
        assert same_bits(found[DOWN + "scales"], extra[DOWN + "scales"][r : r + 1])


def test_b61_a_cut_inside_a_group_is_refused_at_plan_time(tmp_path: Path) -> None:
    extra, config = awq()
    path = write_checkpoint(tmp_path, one_linear(config, extra, DOWN + "weight"), config)
    with pytest.raises(meshload.LayoutError, match=r"ffn/32: rank 1 holds elements 48 to 96 of 96, which cuts a block of 32"):
        meshload.plan(path, mesh="tp=2", rank=1)


def test_b61_packed_columns_are_cut_where_they_pack(tmp_path: Path) -> None:
    config = {**AWQ, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}
    at = "model.layers.0.mlp.up_proj."
    extra = {
        at + "qweight": ramp("qweight", (16, 12), np.int32),
        at + "qzeros": ramp("qzeros", (1, 12), np.int32),
        at + "scales": ramp("scales", (1, 96), np.float16),
    }
    path = write_checkpoint(tmp_path, one_linear(config, extra, at + "weight"), config)
    for r, found in enumerate(ranks(path, "tp=3", 3)):
        assert same_bits(found[at + "qweight"], columns(extra[at + "qweight"], 4 * r, 4 * r + 4))
        assert same_bits(found[at + "qzeros"], columns(extra[at + "qzeros"], 4 * r, 4 * r + 4))
        assert same_bits(found[at + "scales"], columns(extra[at + "scales"], 32 * r, 32 * r + 32))


def test_b61_gptq_by_index_has_all_groups_on_every_rank(tmp_path: Path) -> None:
    config = {**AWQ, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}}
    order = np.random.default_rng(0).permutation(96) % 3
    extra = {
        DOWN + "qweight": ramp("qweight", (12, 16), np.int32),
        DOWN + "qzeros": ramp("qzeros", (3, 2), np.int32),
        DOWN + "scales": ramp("scales", (3, 16), np.float16),
        DOWN + "g_idx": order.astype(np.int32),
    }
    path = write_checkpoint(tmp_path, one_linear(config, extra, DOWN + "weight"), config)
    for r, found in enumerate(ranks(path, "tp=2", 2)):
        assert same_bits(found[DOWN + "qweight"], extra[DOWN + "qweight"][6 * r : 6 * r + 6])
        assert same_bits(found[DOWN + "g_idx"], extra[DOWN + "g_idx"][48 * r : 48 * r + 48])
        assert same_bits(found[DOWN + "qzeros"], extra[DOWN + "qzeros"])
        assert same_bits(found[DOWN + "scales"], extra[DOWN + "scales"])


@pytest.mark.parametrize(
    ("quantisation", "why"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "3-bit values straddle"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "only the layout called gemm is known"),
        ({"quant_method": "new"}, "quant_method 'new' is not known"),
    ],
)
def test_a_quantisation_that_is_not_known_is_refused_with_what_to_do(
    tmp_path: Path, quantisation: dict[str, Any], why: str
) -> None:
    extra, config = awq()
    path = write_checkpoint(tmp_path, one_linear(config, extra, DOWN + "weight"), {**config, "quantization_config": quantisation})
    with pytest.raises(meshload.LayoutError, match=why + ".*layout='replicated'"):
        meshload.plan(path, mesh="tp=2", rank=1)


# --- GPT-OSS ----------------------------------------------------------------------------------------------------------

GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}


def gpt_oss() -> dict[str, Values]:
    arrays = {n: w for n, w in llama(GPT_OSS, ml_dtypes.bfloat16).items() if ".mlp." not in n}
    at, bf16 = "model.layers.0.", ml_dtypes.bfloat16
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "self_attn.q_proj.bias": ((64,), bf16),
        "self_attn.k_proj.bias": ((32,), bf16),
        "self_attn.v_proj.bias": ((32,), bf16),
        "self_attn.o_proj.bias": ((64,), bf16),
        "self_attn.sinks": ((4,), bf16),
        "mlp.router.weight": ((4, 64), bf16),
        "mlp.router.bias": ((4,), bf16),
        "mlp.experts.gate_up_proj_blocks": ((4, 256, 2, 16), np.uint8),
        "mlp.experts.gate_up_proj_scales": ((4, 256, 2), np.uint8),
        "mlp.experts.gate_up_proj_bias": ((4, 256), bf16),
        "mlp.experts.down_proj_blocks": ((4, 64, 4, 16), np.uint8),
        "mlp.experts.down_proj_scales": ((4, 64, 4), np.uint8),
        "mlp.experts.down_proj_bias": ((4, 64), bf16),
    }
    return arrays | {at + n: ramp(n, shape, dtype) for n, (shape, dtype) in shapes.items()}


def test_mxfp4_of_gpt_oss_is_cut_with_gate_and_up_in_turns(tmp_path: Path) -> None:
    arrays = gpt_oss()
    path = write_checkpoint(tmp_path, arrays, GPT_OSS)
    whole = restored(path)
    assert whole.keys() == arrays.keys()
    assert all(same_bits(whole[n], w) for n, w in arrays.items())
    at = "model.layers.0.mlp.experts."
    for rank, found in enumerate(ranks(path, "ep=2,tp=2", 4)):
        ep, tp = divmod(rank, 2)
        mine = slice(2 * ep, 2 * ep + 2)
        for p in ("blocks", "scales", "bias"):
            w = arrays[f"{at}gate_up_proj_{p}"][mine, 128 * tp : 128 * tp + 128]
            assert same_bits(found[f"{at}gate_up_proj_{p}"], np.ascontiguousarray(w))
        for p in ("blocks", "scales"):
            w = arrays[f"{at}down_proj_{p}"][mine, :, 2 * tp : 2 * tp + 2]
            assert same_bits(found[f"{at}down_proj_{p}"], np.ascontiguousarray(w))
        assert same_bits(found[f"{at}down_proj_bias"], arrays[f"{at}down_proj_bias"][mine])
        assert same_bits(found["model.layers.0.self_attn.sinks"], arrays["model.layers.0.self_attn.sinks"][2 * tp : 2 * tp + 2])
        assert same_bits(found["model.layers.0.mlp.router.weight"], arrays["model.layers.0.mlp.router.weight"])


def mxfp4(arrays: Mapping[str, Values], name: str) -> Values:
    """Return what blocks and scales mean, said plainly: 4-bit floats, the lower half of each byte first, times powers of two."""
    blocks, scales = arrays[f"{name}_blocks"], arrays[f"{name}_scales"]
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[halves]
    wide = values * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    return np.ascontiguousarray(wide.reshape(*scales.shape[:-1], -1).swapaxes(1, 2).astype(np.float32).astype(ml_dtypes.bfloat16))


def test_mxfp4_is_dequantised_as_transformers_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    monkeypatch.setattr(meshload.dequantising, "CHUNK", 5 << 10)  # some rows of one expert
    monkeypatch.setattr(meshload.dequantising, "NARROW", 32)
    arrays = gpt_oss()
    for name in [n for n in arrays if n.endswith("_scales")]:  # as of weights; all 256 powers hold infinity and what is no number
        arrays[name] = (110 + arrays[name] % 20).astype(np.uint8)
    path = write_checkpoint(tmp_path / "src", arrays, GPT_OSS)
    whole = restored(path, dtype="bfloat16")
    at = "model.layers.0.mlp.experts."
    for name in (f"{at}gate_up_proj", f"{at}down_proj"):
        theirs = convert(*(torch.from_numpy(arrays[f"{name}_{part}"]) for part in ("blocks", "scales")))
        assert same_bits(whole[name], np.ascontiguousarray(theirs.contiguous().view(torch.uint16).numpy()).view(ml_dtypes.bfloat16))
        assert same_bits(whole[name], mxfp4(arrays, name))
    assert not [n for n in whole if n.endswith(("_blocks", "_scales"))]
    for rank, found in enumerate(ranks(path, "ep=2,tp=2", 4, dtype="bfloat16")):
        ep, tp = divmod(rank, 2)
        mine = slice(2 * ep, 2 * ep + 2)
        assert same_bits(
            found[f"{at}gate_up_proj"], np.ascontiguousarray(whole[f"{at}gate_up_proj"][mine, :, 128 * tp : 128 * tp + 128])
        )
        assert same_bits(found[f"{at}down_proj"], np.ascontiguousarray(whole[f"{at}down_proj"][mine, 64 * tp : 64 * tp + 64]))
    meshload.convert(path, tmp_path / "out", to="hf", dtype="bfloat16")
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(same_bits(found[n], w) for n, w in whole.items())


def test_mxfp4_is_not_cut_inside_its_32_values(tmp_path: Path) -> None:
    config = {**GPT_OSS, "intermediate_size": 96, "num_hidden_layers": 1}
    arrays = gpt_oss()
    for name in [n for n in arrays if "experts" in n]:
        w = arrays[name]
        arrays[name] = w[:, :192] if "gate_up" in name else w[:, :, :3] if w.ndim > 2 else w
    path = write_checkpoint(tmp_path, arrays, config)
    with pytest.raises(meshload.LayoutError, match=r"rank 0 holds elements 0 to 48 of 96, which cuts a block of 32"):
        meshload.plan(path, mesh="tp=2", rank=1)


# --- Orbax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_b73_layers_that_lack_or_exceed_are_listed(layers: int) -> None:
    path = Path(__file__).resolve().parent / "golden" / "orbax" / "two_processes_4dev_adamw" / "checkpoint"
    config = {
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "rope_type": "llama3.1",
    }
    if layers == 3:
        with pytest.raises(
            meshload.MissingArray,
            match=r"model.layers.2.input_layernorm.weight, .*model.layers.2.mlp.down_proj.weight: .*never lists",
        ):
            restored(path, config=config)
        made = meshload.plan(path, config=config, missing="ignore")
        assert len(made.missing) == 9
        assert all(".layers.2." in name for name in made.missing)
    else:
        with pytest.warns(
            meshload.MeshloadWarning, match="9 arrays of the checkpoint belong to nothing that is wanted: .*layers_1"
        ):
            found = restored(path, config=config)
        assert len(found) == 12
        assert all("layers_1." in name for name in meshload.plan(path, config=config).unexpected)
