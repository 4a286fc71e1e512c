"""Meta's and Mistral's consolidated files and torchtitan's checkpoints under Hugging Face's names, against transformers' logits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshload
from meshload.array import Array
from meshload.errors import LayoutError
from meshload.naming import model_of
from meshload.testing import ramp, same_bits
from meshload_adapters._params import config_of

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

Weights = dict[str, NDArray[Any]]

# 4 query heads of 8 elements, 2 to a kv head.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
META = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "norm_eps": 1e-5, "multiple_of": 8}
MISTRAL = {**{k: v for k, v in META.items() if k != "multiple_of"}, "head_dim": 8, "hidden_dim": 24, "sliding_window": 4096}
MODULES = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj"} | {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
QKV = {f"attention.w{m}": f"attention.qkv_linear.w{m}" for m in "qkv"}


def in_pairs(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return rows of q or k whose heads are rotated by halves, as Meta rotates them: the two of a pair next to each other."""
    made = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            made[head * size + 2 * i] = rows[head * size + i]
            made[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return made


def canonical(sizes: Mapping[str, Any] = SIZES, dtype: str = "f4") -> Weights:
    """Return a Llama of random weights under Hugging Face's names."""
    random, d = np.random.default_rng(0), sizes["head_dim"]
    q, kv, embed, ffn = sizes["num_attention_heads"] * d, sizes["num_key_value_heads"] * d, 32, sizes["intermediate_size"]
    shapes = {"self_attn.q_proj": (q, embed), "self_attn.k_proj": (kv, embed), "self_attn.v_proj": (kv, embed)}
    shapes |= {"self_attn.o_proj": (embed, q), "mlp.gate_proj": (ffn, embed), "mlp.up_proj": (ffn, embed)}
    shapes |= {"mlp.down_proj": (embed, ffn), "input_layernorm": (embed,), "post_attention_layernorm": (embed,)}
    found = {f"model.layers.{i}.{n}.weight": s for i in range(sizes["num_hidden_layers"]) for n, s in shapes.items()}
    found |= {f"{n}.weight": (40, embed) for n in ("model.embed_tokens", "lm_head")} | {"model.norm.weight": (embed,)}
    return {n: (random.standard_normal(s) * 0.3 + (len(s) == 1)).astype(dtype) for n, s in found.items()}


def as_meta(weights: Weights, *, pairs: bool = True) -> Weights:
    """Return weights under Meta's names and in its order."""
    made = {}
    theirs = {hf: meta for meta, hf in (MODULES | ENDS).items()}
    for name, array in weights.items():
        path = name.removesuffix(".weight").split(".")
        layer = f"layers.{path[2]}." if path[1:2] == ["layers"] else ""
        meta = theirs[".".join(path[3:]) if layer else ".".join(path)]
        heads = {"attention.wq": SIZES["num_attention_heads"], "attention.wk": SIZES["num_key_value_heads"]}.get(meta)
        made[f"{layer}{meta}.weight"] = in_pairs(array, heads) if heads and pairs else array
    return made


def write(folder: Path, weights: Weights, params: Mapping[str, Any], count: int = 1, embedding_dim: int = 0) -> Path:
    """Write consolidated files, cut as Meta's parallel layers are, with the frequencies that each of them has."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(count):
        part = {"rope.freqs": torch.ones(4)}
        for name, array in weights.items():
            dim = embedding_dim if name.startswith("tok") else int(name.endswith(("wo.weight", "w2.weight")))
            whole = array.ndim == 1
            if name.endswith(("wk.weight", "wv.weight")) and count > 2:  # more ranks than kv heads
                cut = np.split(array, 2)[rank * 2 // count]
            else:
                cut = array if whole else np.split(array, count, dim)[rank]
            part[name] = torch.from_numpy(cut.copy())
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def same(found: Mapping[str, Array], expected: Weights) -> bool:
    return set(found) == set(expected) and all(same_bits(np.asarray(found[n]), a) for n, a in expected.items())


# --- Meta -------------------------------------------------------------------------------------------------------------


def test_b69_rows_of_q_and_k_go_from_pairs_to_halves_and_back(tmp_path: Path) -> None:
    params = {"dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 5, "norm_eps": 1e-5, "multiple_of": 8}
    config = {**config_of(params), "model_type": "llama"}
    shapes = {name: model.whole_shape(line) for model in [model_of("meta", config)] if model for name, line, _ in model.arrays()}
    meta = {name: ramp(name, shape) for name, shape in shapes.items()}
    write(tmp_path / "meta", meta, params)
    opened = meshload.open(tmp_path / "meta")
    found = opened.with_names("hf")
    rows = [0, 2, 4, 6, 1, 3, 5, 7]
    order = [*rows, *(8 + r for r in rows)]
    for ours, theirs in (("q", "wq"), ("k", "wk")):
        stored = meta[f"layers.0.attention.{theirs}.weight"]
        assert same_bits(np.asarray(found[f"model.layers.0.self_attn.{ours}_proj.weight"]), stored[order])
    v = found["model.layers.0.self_attn.v_proj.weight"]
    assert same_bits(np.asarray(v), meta["layers.0.attention.wv.weight"])
    assert len(v.pieces) == 1
    tensors = meshload.restore(tmp_path / "meta")
    transformers.utils.logging.disable_progress_bar()
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    back = meshload.open(tmp_path / "hf", config=config).with_names("meta")
    assert same(back, meta)


@pytest.mark.parametrize(("count", "embedding_dim"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1)])
def test_meta_files_are_a_hugging_face_model(count: int, embedding_dim: int, tmp_path: Path) -> None:
    weights = canonical({**SIZES, "intermediate_size": 88})
    write(tmp_path, as_meta(weights), META, count, embedding_dim)
    opened = meshload.open(tmp_path)
    assert opened.config == {"model_type": "llama", **{k: v for k, v in SIZES.items() if k != "head_dim"}, "intermediate_size": 88}
    assert opened["layers.2.attention.wk.weight"].shape == (16, 32)
    assert same(opened.with_names("hf"), weights)
    whole = meshload.restore(tmp_path, into="numpy")
    assert same_bits(whole["lm_head.weight"], weights["lm_head.weight"])
    q, o = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight"
    for rank in range(2):
        slices = meshload.restore(tmp_path, mesh="tp=2", rank=rank, into="numpy")
        assert same_bits(slices[q], weights[q][16 * rank : 16 * rank + 16])
        assert same_bits(slices[o], weights[o][:, 16 * rank : 16 * rank + 16])


def test_a_mistral_file_is_a_hugging_face_model(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = canonical()
    save_file(as_meta(weights), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL))
    opened = meshload.open(tmp_path)
    assert opened.config == {"model_type": "mistral", **SIZES}
    assert "layers.0.attention.wq.weight" in opened
    assert same(opened.with_names("hf"), weights)
    write(tmp_path / "older", as_meta(weights), MISTRAL)
    assert same(meshload.open(tmp_path / "older").with_names("hf"), weights)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_restored_meta_weights_give_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family, **SIZES, max_position_embeddings=64, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write(tmp_path, as_meta(weights), MISTRAL if family == "mistral" else {**META, "multiple_of": 8, "ffn_dim_multiplier": 0.25}, 2)
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        expected = model(tokens).logits
        for parameter in model.parameters():
            parameter.zero_()
        model.load_state_dict(meshload.restore(tmp_path))
        assert torch.equal(model(tokens).logits, expected)
        for name, tensor in model.named_parameters():  # what Meta's order would give, if it were taken for Hugging Face's
            if name.endswith("q_proj.weight"):
                tensor.copy_(torch.from_numpy(in_pairs(tensor.numpy(), 4)))
        assert not torch.allclose(model(tokens).logits, expected, atol=1e-3)


def test_a_vocabulary_that_the_tokenizer_decides_is_asked_for(tmp_path: Path) -> None:
    weights = canonical({**SIZES, "intermediate_size": 88})
    write(tmp_path, as_meta(weights), {**META, "vocab_size": -1})
    with pytest.raises(LayoutError, match=r"vocab \(vocab_size\) is not in the config.*config="):
        meshload.open(tmp_path).with_names("hf")
    with pytest.raises(LayoutError, match=r"vocab \(vocab_size\) is not in the config.*config="):
        meshload.restore(tmp_path, mesh="tp=2", rank=0, names="native")
    assert set(meshload.restore(tmp_path, names="native", into="numpy")) == {*as_meta(weights), "rope.freqs"}
    assert meshload.check(tmp_path).ok
    assert same(meshload.open(tmp_path, config={"vocab_size": 40}).with_names("hf"), weights)
    assert meshload.plan(tmp_path, config={"vocab_size": 40}, mesh={}).unexpected == ()
    with pytest.raises(LayoutError, match="num_hidden_layers is 3 and 4"):
        meshload.open(tmp_path, config={"vocab_size": 40, "num_hidden_layers": 4})


def test_the_config_beside_params_wins(tmp_path: Path) -> None:
    write(tmp_path, as_meta(canonical()), {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2})
    config = {"model_type": "mistral", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = meshload.open(tmp_path)
    assert opened.config == config
    assert opened.meta["params"] == {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}


@pytest.mark.parametrize(
    ("params", "family", "width"),
    [
        ({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6, "vocab_size": -1}, "llama", 11008),
        ({"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-5, "vocab_size": -1}, "llama", 13824),
        ({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8}, "llama", 28672),
        ({"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "rope_theta": 5e5, "use_scaled_rope": True}, "llama", 14336),
        ({"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, "llama", 8192),
        ({"dim": 4096, "hidden_dim": 14336, "head_dim": 128, "sliding_window": 4096}, "mistral", 14336),
        ({"dim": 4096, "hidden_dim": 14336, "head_dim": 128, "moe": {"num_experts": 8}}, "mixtral", 14336),
        ({"dim": 4096, "hidden_dim": 14336, "head_dim": 128, "moe": None}, "mistral", 14336),
        ({"model": {"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}}, "llama", 14336),
        ({"dim": 5120, "multiple_of": 2048, "moe_args": {"num_experts": 16}}, None, 14336),  # Llama 4
        ({"dim": 5120, "hidden_dim": 14336, "head_dim": 128, "vision_encoder": {"hidden_size": 1024}}, None, 14336),
        ({"dim": 4096, "model_type": "mamba"}, None, None),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32}, None, None),
        ({"dim": "4096", "multiple_of": 256}, "llama", None),
    ],
)
def test_params_tell_the_family_and_the_width_of_published_models(
    params: dict[str, Any], family: str | None, width: int | None
) -> None:
    config = config_of(params)
    assert (config.get("model_type"), config.get("intermediate_size")) == (family, width)


def test_a_family_that_params_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    weights = canonical({**SIZES, "intermediate_size": 88})
    write(tmp_path, as_meta(weights), {**META, "vision": {"dim": 3}})
    with pytest.raises(LayoutError, match="no model_type"):
        meshload.open(tmp_path).with_names("hf")
    assert same(meshload.open(tmp_path, config={"model_type": "llama"}).with_names("hf"), weights)


def test_a_quantised_release_is_not_taken_for_a_plain_one() -> None:
    assert "model_type" not in config_of({**META, "quantization_args": {"group_size": 32}})


@pytest.mark.parametrize("form", ["experts", "stacked"])
def test_mixtral_is_read_in_both_published_forms_and_shown_in_the_later(form: str, tmp_path: Path) -> None:
    dense, experts = canonical({**SIZES, "num_hidden_layers": 2}), 3
    weights = {n: a for n, a in dense.items() if ".mlp." not in n}
    stored = as_meta(weights)
    for i in range(2):
        shapes = {"w1": (24, 32), "w2": (32, 24), "w3": (24, 32)}
        made = {f"{e}.{w}": ramp(f"{i}.{e}.{w}", s, np.float32) for e in range(experts) for w, s in shapes.items()}
        gate = ramp(f"{i}.gate", (experts, 32), np.float32)
        weights |= {f"model.layers.{i}.block_sparse_moe.experts.{n}.weight": a for n, a in made.items()}
        weights[f"model.layers.{i}.block_sparse_moe.gate.weight"] = gate
        if form == "experts":
            stored |= {f"layers.{i}.feed_forward.experts.{n}.weight": a for n, a in made.items()}
            stored[f"layers.{i}.feed_forward.gate.weight"] = gate
        else:
            for w in shapes:
                rows = [made[f"{e}.{w}"].T if w == "w2" else made[f"{e}.{w}"] for e in range(experts)]
                stored[f"layers.{i}.block_sparse_moe.{w}"] = np.concatenate(rows)
            stored[f"layers.{i}.block_sparse_moe.gate.weight"] = gate
    write(tmp_path, stored, {**MISTRAL, "n_layers": 2, "moe": {"num_experts": 3, "num_experts_per_tok": 2}})
    opened = meshload.open(tmp_path)
    assert opened.config is not None
    assert opened.config["model_type"] == "mixtral"
    assert same(opened.with_names("hf"), weights)
    model = model_of("meta", opened.config)
    assert model is not None
    assert not any("block_sparse_moe" in name for name, *_ in model.arrays())


# --- torchtitan -------------------------------------------------------------------------------------------------------


def renamed(weights: Weights, since: str) -> Weights:
    """Return Meta's names in torchtitan's spelling of a time."""
    if since == "2024":
        return weights
    made = {}
    for name, array in weights.items():
        for meta, titan in (*QKV.items(), ("output.", "lm_head.")):
            name = name.replace(meta, titan)
        made[name] = array
    return made


def fused(weights: Weights) -> Weights:
    """Return q, k and v in one array: for each kv head its query heads, its key, its value."""
    made = {n: a for n, a in weights.items() if ".qkv_linear." not in n}
    for i in range(SIZES["num_hidden_layers"]):
        q, k, v = (weights[f"layers.{i}.attention.qkv_linear.w{m}.weight"].reshape(2, -1, 8, 32) for m in "qkv")
        made[f"layers.{i}.attention.qkv_linear.wqkv.weight"] = np.concatenate([q, k, v], 1).reshape(-1, 32)
    return made


def save_dcp(folder: Path, tensors: Mapping[str, Any]) -> None:
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is but one process
        checkpoint.save(tensors, checkpoint_id=folder)


@pytest.mark.parametrize("form", ["2024", "2026", "fused"])
def test_torchtitan_checkpoints_are_hugging_face_models_moments_included(form: str, tmp_path: Path) -> None:
    weights = canonical()

    def tensors(of: Weights) -> dict[str, Any]:
        made = fused(renamed(as_meta(of), "2026")) if form == "fused" else renamed(as_meta(of), form)
        return {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in made.items()}

    first = {n: a * 2 for n, a in weights.items()}
    second = {n: a * a for n, a in weights.items()}
    state = tensors(weights)
    for kind, of in (("exp_avg", first), ("exp_avg_sq", second)):
        state |= {f"optimizer.state.{n}.{kind}": t for n, t in tensors(of).items()}
    state |= {f"optimizer.state.{n}.step": torch.tensor(3.0) for n in tensors(weights)}
    state |= {f"optimizer.param_groups.{n}.lr": 0.1 for n in tensors(weights)}
    save_dcp(tmp_path / "step-3", state)
    config = {"model_type": "llama", **SIZES}
    opened = meshload.open(tmp_path / "step-3", config=config)
    assert "layers.0.attention_norm.weight" in opened
    found = opened.with_names("hf")
    assert same(found, weights)
    assert same(found.optimizer["exp_avg"], first)
    assert same(found.optimizer["exp_avg_sq"], second)
    k = "model.layers.1.self_attn.k_proj.weight"
    part = meshload.restore(opened, mesh="tp=2", rank=1, into="numpy", optimizer=True)
    assert same_bits(part[k], weights[k][8:])
    assert same_bits(part[f"optimizer.exp_avg.{k}"], first[k][8:])
    with pytest.raises(LayoutError, match="config="):
        meshload.open(tmp_path / "step-3").with_names("hf")


def test_hugging_face_models_are_shown_in_torchtitans_current_names(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = canonical()
    save_file(weights, tmp_path / "model.safetensors")
    opened = meshload.open(tmp_path, config={"model_type": "llama", **SIZES})
    assert same(opened.with_names("torchtitan"), renamed(as_meta(weights), "2026"))
    assert same(opened.with_names("meta"), as_meta(weights))


@pytest.mark.parametrize("form", ["2024", "2026", "fused"])
def test_torchtitans_qwen3_rotates_as_hugging_face_does(form: str, tmp_path: Path) -> None:
    weights = canonical()
    stored = as_meta(weights, pairs=False)
    stored = fused(renamed(stored, "2026")) if form == "fused" else renamed(stored, form)
    for i in range(3):
        for m in "qk":
            norm = ramp(f"{i}.{m}_norm", (8,), np.float32)
            stored[f"layers.{i}.attention.{m}_norm.weight"] = weights[f"model.layers.{i}.self_attn.{m}_norm.weight"] = norm
    save_dcp(tmp_path / "step-1", {n: torch.from_numpy(a.copy()) for n, a in stored.items()})
    opened = meshload.open(tmp_path / "step-1", config={"model_type": "qwen3", **SIZES})
    assert same(opened.with_names("hf"), weights)


@pytest.mark.parametrize("prefix", ["moe.experts.w{}", "moe.experts.w{}_{}", "moe.routed_experts.inner_experts.w{}_{}"])
def test_torchtitans_experts_are_stacked(prefix: str, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", **SIZES, "num_experts": 3, "moe_intermediate_size": 10}
    model = model_of("hf", config)
    assert model is not None
    weights = {name: ramp(name, model.whole_shape(line), np.float32) for name, line, _ in model.arrays()}
    stored = {}
    for name, array in as_meta({n: a for n, a in weights.items() if ".mlp." not in n and "_norm.w" not in n}, pairs=False).items():
        stored[name] = array
    for i in range(3):
        at = f"model.layers.{i}."
        for m in "qk":
            stored[f"layers.{i}.attention.{m}_norm.weight"] = weights[f"{at}self_attn.{m}_norm.weight"]
        for w, hf, order in (("1", "gate", "EFD"), ("2", "down", "EDF"), ("3", "up", "EFD")):
            each = [weights[f"{at}mlp.experts.{e}.{hf}_proj.weight"] for e in range(3)]
            stored[f"layers.{i}.{prefix.format(w, order)}"] = np.stack(each)
        stored[f"layers.{i}.moe.router.gate.weight"] = weights[f"{at}mlp.gate.weight"]
    save_dcp(tmp_path / "step-1", {n: torch.from_numpy(a.copy()) for n, a in stored.items()})
    assert same(meshload.open(tmp_path / "step-1", config=config).with_names("hf"), weights)
