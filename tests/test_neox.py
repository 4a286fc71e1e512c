"""Checkpoints of the GPT-NeoX library under Hugging Face's names, against transformers' logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshload
from meshload.array import Array
from meshload.errors import LayoutError
from meshload.testing import same_bits

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

Weights = dict[str, NDArray[Any]]

LAYERS, HIDDEN, HEADS, VOCAB = 3, 16, 4, 26
CONFIG: dict[str, Any] = {
    "model_type": "gpt_neox",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "intermediate_size": 24,
    "tie_word_embeddings": False,
}
ARGS = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": 64}
ARGS |= {"make_vocab_size_divisible_by": 14, "padded_vocab_size": 28, "model_parallel_size": 2}
ENDS = {"gpt_neox.embed_in": (0, "word_embeddings"), "gpt_neox.final_layer_norm": (LAYERS + 3, "norm")}
ENDS |= {"embed_out": (LAYERS + 4, "final_linear")}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}, max_position_embeddings=64)
    made = transformers.GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # sixteenths, so that sums of them are exact
            parameter.copy_((torch.randn(parameter.shape) * 8).round() / 16 + 0.0)  # no -0.0
    return made


@pytest.fixture(scope="module")
def weights(model: Any) -> Weights:
    """Return the weights by their names on disk, in the order of the modules."""
    return {n.replace("lm_head", "embed_out"): p.detach().numpy() for n, p in model.named_parameters()}


def shards_of(weights: Weights, *, current: bool, addends: bool = True, tied: bool = False) -> list[dict[str, list[NDArray[Any]]]]:
    """Return what the library has of a model: per tensor-parallel rank of 2, for each name of its pipeline.

    Its layers are embedding, a function, blocks, a function, norm, head.
    """
    found: list[dict[str, list[NDArray[Any]]]] = [{}, {}]
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if module in ENDS:
            layer, ours = ENDS[module]
        else:
            _, _, number, ours = module.split(".", 3)
            layer = int(number) + 2
        if current:
            ours = ours.replace("dense_h_to_4h", "linear1").replace("dense_4h_to_h", "linear2")
        if tied and layer == LAYERS + 4:
            continue
        key = "tied_modules.embed.word_embeddings.weight" if tied and layer == 0 else f"{layer}.{ours}.{kind}"
        if "word_emb" in ours or "final_linear" in ours:
            array = np.concatenate([array, np.full((28 - VOCAB, HIDDEN), 99, array.dtype)])
        row = ours.endswith(("attention.dense", "dense_4h_to_h", "linear2"))
        if row and kind == "bias":
            first = np.round(array * 5) / 16
            halves = [first, array - first] if addends else [array, array]
        elif "norm" in ours:
            halves = [array, array]
        else:
            halves = np.split(array, 2, int(row))
        for rank in range(2):
            found[rank][key] = halves[rank]
    return found


def write_pipeline(
    folder: Path, weights: Weights, *, args: Mapping[str, Any] | None = ARGS, tied: bool = False, **how: Any
) -> Path:
    """Write a checkpoint of 2 stages and 2 tensor-parallel ranks, with the ZeRO-1 optimizer of one data-parallel rank."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    how |= {"tied": tied}
    ranks = shards_of(weights, **how)
    moments = {
        "single_partition_of_fp32_groups": ranks,
        "exp_avg": shards_of({n: 2 * a for n, a in weights.items()}, **{**how, "addends": False}),
        "exp_avg_sq": shards_of({n: a * a for n, a in weights.items()}, **{**how, "addends": False}),
    }
    for t, arrays in enumerate(ranks):
        by_layer: dict[int, dict[str, Any]] = {}
        for name, array in arrays.items():
            layer, _, key = name.replace("tied_modules.embed", "0").partition(".")
            by_layer.setdefault(int(layer), {})[key] = torch.from_numpy(np.ascontiguousarray(array))
        for layer, tensors in by_layer.items():
            if 1 < layer < LAYERS + 2:
                tensors["attention.rotary_emb.inv_freq"] = torch.ones(2)
            torch.save(tensors, tag / f"layer_{layer:02d}-model_{t:02d}-model_states.pt")
        for stage in range(2):
            mine = [n for n in arrays if (n[0] == "t" or int(n.split(".")[0]) < 3) == (stage == 0) or n[0] == "t"]
            mp = 2 * stage + t
            client = {"args": args} if args is not None else {}
            shapes = {n: torch.Size(arrays[n].shape) for n in mine}
            state = {"module": None, "buffer_names": [], "optimizer": None, "param_shapes": [shapes], "dp_world_size": 1}
            state |= {"mp_world_size": 4, "global_steps": 7, "shared_params": {}, "frozen_param_shapes": None, **client}
            torch.save(state, tag / f"mp_rank_{mp:02d}_model_states.pt")
            flat = {k: torch.from_numpy(np.concatenate([of[t][n].reshape(-1) for n in mine])) for k, of in moments.items()}
            master = flat.pop("single_partition_of_fp32_groups")
            inner = {
                "zero_stage": 1,
                "single_partition_of_fp32_groups": [master],
                "base_optimizer_state": {"state": {0: {"step": 7, **flat}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
                "group_paddings": [0],
                "partition_count": [1],
            }
            torch.save({"optimizer_state_dict": inner}, tag / f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt")
    return folder


def write_sequential(folder: Path, weights: Weights, **how: Any) -> Path:
    """Write a checkpoint without pipeline: two tensor-parallel ranks with a file each."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for t, arrays in enumerate(shards_of(weights, **how)):
        module = {f"sequential.{n}": torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
        module |= {f"sequential.{i + 2}.attention.rotary_emb.inv_freq": torch.ones(2) for i in range(LAYERS)}
        state = {"module": module, "buffer_names": [n for n in module if "inv_freq" in n], "optimizer": None, "param_shapes": None}
        state |= {"dp_world_size": 1, "mp_world_size": 2, "global_steps": 7, "args": ARGS}
        torch.save(state, tag / f"mp_rank_{t:02d}_model_states.pt")
    return folder


def same(found: Mapping[str, Array], expected: Weights) -> list[str]:
    """Return the names of arrays that are missing, too many, or differ."""
    wrong = [n for n in expected if n not in found or not same_bits(np.asarray(found[n]), expected[n])]
    return [*wrong, *(set(found) - set(expected))]


@pytest.mark.parametrize("current", [True, False])
def test_a_pipeline_of_gpt_neox_is_a_hugging_face_model_moments_included(current: bool, tmp_path: Path, weights: Weights) -> None:
    opened = meshload.open(write_pipeline(tmp_path, weights, current=current), config=CONFIG)
    assert opened.meta["rules"] == "gpt_neox"
    assert opened.meta["ranks"] == {"pp": 2, "tp": 2, "dp": 1}
    assert opened[f"{LAYERS + 3}.norm.weight"].shape == (HIDDEN,)
    assert opened["2.attention.dense.bias"].copies == "sum"
    found = opened.with_names("hf")
    assert same(found, weights) == []
    assert same(found.optimizer["master"], weights) == []
    assert same(found.optimizer["exp_avg"], {n: 2 * a for n, a in weights.items()}) == []
    assert same(found.optimizer["exp_avg_sq"], {n: a * a for n, a in weights.items()}) == []


def test_row_parallel_biases_are_summed_on_every_rank_of_another_mesh(tmp_path: Path, weights: Weights) -> None:
    write_pipeline(tmp_path, weights, current=True)
    bias, dense = (f"gpt_neox.layers.1.attention.dense.{kind}" for kind in ("bias", "weight"))
    for rank in range(4):
        mine = meshload.restore(tmp_path, mesh="tp=4", rank=rank, config=CONFIG, into="numpy")
        assert same_bits(mine[bias], weights[bias])
        assert same_bits(mine[dense], weights[dense][:, 4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("current", [True, False])
def test_a_model_without_pipeline_has_the_same_names_behind_sequential(current: bool, tmp_path: Path, weights: Weights) -> None:
    opened = meshload.open(write_sequential(tmp_path, weights, current=current), config=CONFIG)
    assert f"sequential.{LAYERS + 4}.final_linear.weight" in opened
    assert same(opened.with_names("hf"), weights) == []


@pytest.mark.parametrize("way", [write_pipeline, write_sequential])
def test_restored_weights_give_the_logits_of_transformers(way: Any, model: Any, weights: Weights, tmp_path: Path) -> None:
    fresh = transformers.GPTNeoXForCausalLM(model.config).eval()
    tokens = torch.arange(20).reshape(2, 10)
    tensors = meshload.restore(way(tmp_path, weights, current=True), config=CONFIG, names="transformers")
    fresh.load_state_dict(tensors)
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, model(tokens).logits)


def test_tied_embeddings_are_read_once_and_the_head_is_their_alias(tmp_path: Path, weights: Weights) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    opened = meshload.open(write_pipeline(tmp_path, weights, current=True, tied=True), config=config)
    assert "tied_modules.embed.word_embeddings.weight" in opened
    expected = {n: a for n, a in weights.items() if n != "embed_out.weight"}
    found = opened.with_names("hf")
    assert same(found, expected) == []
    assert found.aliases == {"embed_out.weight": "gpt_neox.embed_in.weight"}
    assert same(found.optimizer["exp_avg"], {n: 2 * a for n, a in expected.items()}) == []


def test_what_gpt_neox_says_of_itself_must_agree_with_the_config(tmp_path: Path, weights: Weights) -> None:
    write_pipeline(tmp_path, weights, current=True)
    with pytest.raises(LayoutError, match="num_attention_heads is 4 and 8"):
        meshload.open(tmp_path, config={**CONFIG, "num_attention_heads": 8})
    with pytest.raises(LayoutError, match=r"no model_type; give it with config="):
        meshload.open(tmp_path).with_names("hf")


def test_the_config_says_what_gpt_neox_computes_with(tmp_path: Path, weights: Weights) -> None:
    told = {"layernorm_epsilon": 1e-6, "rotary_pct": 1, "rotary_emb_base": 50000, "gpt_j_residual": False}
    write_pipeline(tmp_path, weights, current=True, args={**ARGS, **told})
    found = meshload.open(tmp_path, config=CONFIG).config
    assert found is not None
    config = transformers.GPTNeoXConfig(**{k: v for k, v in found.items() if k != "model_type"})
    assert (config.layer_norm_eps, config.use_parallel_residual) == (1e-6, False)
    assert (config.rope_parameters["partial_rotary_factor"], config.rope_parameters["rope_theta"]) == (1, 50000)


def test_another_pipelines_biases_are_not_summed(tmp_path: Path, weights: Weights) -> None:
    """Nothing but its args tells GPT-NeoX from others."""
    write_pipeline(tmp_path, weights, current=True, args=None)
    opened = meshload.open(tmp_path)
    assert "cut=" in opened.unavailable["2.attention.dense.bias"]
    from meshload_adapters.formats.deepspeed import DeepSpeed

    opened = meshload.open(tmp_path, format=DeepSpeed(cut="gpt_neox"), config=CONFIG)
    assert opened["2.attention.dense.bias"].copies == "sum"
    name = "gpt_neox.layers.0.attention.dense.bias"
    assert same_bits(np.asarray(opened.with_names("hf")[name]), weights[name])


def test_a_gated_mlp_is_joined_half_by_half(tmp_path: Path) -> None:
    """The first matrix has twice the rows that the second takes: each rank holds a piece of either half."""
    first = np.arange(8 * HIDDEN, dtype=np.float32).reshape(8, HIDDEN)
    second = np.ones((HIDDEN, 4), np.float32)
    tag = tmp_path / "global_step1"
    tag.mkdir()
    for t in range(2):
        rows = np.concatenate([first[2 * t : 2 * t + 2], first[4 + 2 * t : 6 + 2 * t]])
        module = {"2.mlp.linear1.weight": torch.from_numpy(rows), "3.mlp.linear1.weight": torch.from_numpy(rows)}
        module["2.mlp.linear2.weight"] = torch.from_numpy(second[:, :2].copy())
        state = {"module": module, "param_shapes": None, "dp_world_size": 1, "mp_world_size": 2, "args": ARGS, "buffer_names": []}
        torch.save(state, tag / f"mp_rank_{t:02d}_model_states.pt")
    opened = meshload.open(tag)
    assert same_bits(np.asarray(opened["2.mlp.linear1.weight"]), first)
    assert "cut=" in opened.unavailable["3.mlp.linear1.weight"]
