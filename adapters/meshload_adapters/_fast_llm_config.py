"""What a Fast-LLM model is in Hugging Face's words: its config with their keys, and the families that can express all of it.

As Fast-LLM's own exporters have it (`models/gpt/conversion`): what a family has no key for must be as the family always is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshload.errors import LayoutError

from ._fast_llm_layout import Section, blocks_of, has_bias

MOST_DIFFERENT = 1000
"""Blocks of a pattern that are compared."""

ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu", "squared_relu": "relu2"}


def huggingface(base: Section, family: str | None) -> dict[str, Any]:
    """Return what the configuration says in Hugging Face's keys; `model_type` where all of the model can be said in them.

    Of several families the first is meant, unless one is asked for.
    """
    blocks = [_block_keys(block) for block in blocks_of(base.of("decoder"))[:MOST_DIFFERENT]]
    found: dict[str, Any] = {
        "hidden_size": base.size("hidden_size", 1024),
        "vocab_size": base.of("embeddings").size("vocab_size", 49152),
        "num_hidden_layers": base.of("decoder").size("num_blocks", 12, least=0),
        "tie_word_embeddings": base.flag("tied_embedding_weight", False),
    }
    families: dict[str, dict[str, Any]] = {}
    if blocks and all(block == blocks[0] for block in blocks):
        keys, families = blocks[0]
        found |= keys
        families = families if _is_plain(base, found) else {}
    heads = base.of("head").size("prediction_heads", 1)
    if heads > 1:
        found["prediction_heads"] = heads
        families = {"mtp_llama": families["llama"]} if "llama" in families else {}
    if family is not None and family not in families:
        fitting = ", ".join(families) or "none"
        raise LayoutError(f"family={family!r}: the model is not one of these; the families that can express all of it: {fitting}")
    for chosen in [family] if family else list(families)[:1]:
        found |= {"model_type": chosen, **families[chosen]}
    return found


def _is_plain(base: Section, found: Mapping[str, Any]) -> bool:
    """Say whether what is around the blocks is as in Llama."""
    embeddings, head = base.of("embeddings"), base.of("head")
    return (
        not embeddings.of("position_embeddings").flag("enabled", False)
        and embeddings.number("embedding_scale", 1.0) == 1.0
        and head.number("final_logit_softcap", None) is None
        and _rms_epsilon(head.of("normalization")) == found.get("rms_norm_eps")
        and base.of("peft").word("type", "none") == "none"
    )


def _rms_epsilon(norm: Section) -> float | None:
    """Return the epsilon of a plain RMS norm; None for any other."""
    if norm.word("type", "layer_norm") != "rms_norm" or norm.flag("zero_centered", False):
        return None
    return norm.number("epsilon", 1e-5)


def _block_keys(block: Section) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a block's keys that all families share, and those that each family which can express it has besides."""
    mixer, mlp = block.of("mixer"), block.of("mlp")
    kind = mlp.word("type", "mlp")
    if mixer.word("type", "attention") != "attention" or kind not in ("mlp", "moe"):
        return {}, {}
    heads, size, is_gated = mixer.size("heads", 8), mixer.size("head_size", 128), mlp.flag("gated", False)
    activation = mlp.word("activation", "silu" if is_gated else "gelu")
    rope = _rope(mixer.of("rotary"))
    keys: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.size("head_groups", 1),
        "head_dim": size,
        "intermediate_size": mlp.size("intermediate_size", 4096),
    }
    epsilon = _rms_epsilon(block.of("normalization"))
    odd = [
        *(block.optional(f"{n}_normalization") for n in ("pre_mixer", "pre_mlp", "post_mixer", "post_mlp")),
        *(mixer.optional(f"{n}_norm") for n in ("query", "key", "value")),
        *(mlp.optional(f"{n}_norm") for n in ("pre", "post")),
        mlp.optional("router_normalization"),
    ]
    is_odd = any(norm is not None for norm in odd) or block.of("output_scale").flag("enabled", False)
    is_odd |= mixer.flag("shared_key_value", False) or not mixer.flag("causal", True)
    is_odd |= mixer.number("softmax_scale_power", 0.5) != 0.5 or not is_gated or activation not in ACTIVATIONS
    if is_odd or rope is None or epsilon is None:
        return keys, {}
    keys |= {"hidden_act": ACTIVATIONS[activation], "rms_norm_eps": epsilon, "rope_parameters": rope}
    if (dropout := mixer.number("dropout", 0.0)) is not None:
        keys["attention_dropout"] = dropout
    return keys, _families(mixer, mlp, kind)


def _families(mixer: Section, mlp: Section, kind: str) -> dict[str, dict[str, Any]]:
    """Return the families that can express the biases, windows and experts of a block, each with its own keys."""
    in_mixer, in_mlp = mixer.flag("add_linear_biases", True), mlp.flag("add_linear_biases", True)
    query, key, value, dense = (has_bias(mixer.of(f"{n}_layer"), in_mixer) for n in ("query", "key", "value", "dense"))
    first, second = (has_bias(mlp.of(f"layer_{n}"), in_mlp) for n in (1, 2))
    window = mixer.size("window_size", 0, least=0) or None
    no_bias = not any((query, key, value, dense, first, second))
    if kind == "moe":
        is_odd = mlp.size("shared_experts", 0, least=0) > 0 or mlp.word("routing", "aux_loss") != "aux_loss"
        is_odd |= mlp.of("router_scale").flag("enabled", False) or mlp.of("router_per_expert_scale").flag("enabled", False)
        is_odd |= mlp.number("router_input_scale", 1.0) != 1.0
        experts = {"num_local_experts": mlp.size("experts", 2), "num_experts_per_tok": mlp.size("experts_per_token", 1)}
        return {"mixtral": {**experts, "sliding_window": window}} if no_bias and not is_odd else {}
    found: dict[str, dict[str, Any]] = {}
    if window is None and query == key == value == dense and first == second:
        found["llama"] = {"attention_bias": query, "mlp_bias": first}
    if no_bias:
        found["mistral"] = {"sliding_window": window}
    if window is None and query and key and value and not (dense or first or second):
        found["qwen2"] = {}
    return found


def _rope(rotary: Section) -> dict[str, Any] | None:
    """Return the rotary embedding in Hugging Face's keys; None where there is none, or one that they cannot say."""
    kind = rotary.word("type", "none")
    keys: dict[str, tuple[str, float]] = {
        "factor": ("scale_factor", 8.0),
        "original_max_position_embeddings": ("original_context_length", 8192),
    }
    if kind == "llama3":
        keys |= {"low_freq_factor": ("low_frequency_factor", 1.0), "high_freq_factor": ("high_frequency_factor", 4.0)}
    elif kind == "yarn":
        keys |= {"beta_fast": ("beta_fast", 32.0), "beta_slow": ("beta_slow", 1.0)}
    elif kind != "default":
        return None
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rotary.number("theta", 10000.0)}
    if kind != "default":
        found |= {key: rotary.number(own, default) for key, (own, default) in keys.items()}
    if kind == "yarn" and (attention := rotary.number("attention_factor", None)) is not None:
        found["attention_factor"] = attention
    return found
