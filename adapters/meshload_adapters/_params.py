"""`params.json`, which Meta and Mistral put beside their `consolidated` files, in the words of a Hugging Face config.

It holds the arguments of their model classes: `ModelArgs` of https://github.com/meta-llama/llama (`llama/model.py`),
`TransformerArgs` of https://github.com/mistralai/mistral-inference (`args.py`), both of the forms

    Meta       dim, n_layers, n_heads, n_kv_heads, vocab_size, multiple_of, ffn_dim_multiplier, norm_eps, rope_theta ...
    Mistral    dim, n_layers, n_heads, n_kv_heads, vocab_size, hidden_dim, head_dim, norm_eps, sliding_window, moe ...

Llama 1 and 2 have `vocab_size` -1: the tokenizer decides. Mistral says `hidden_dim`; Meta's `FeedForward` computes the width from
`dim`, `ffn_dim_multiplier` and `multiple_of`. The family is told by whose arguments these are, and only if all of them are known:
what has others (vision, quantisation, latent attention) is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_BOTH = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta", "max_batch_size", "max_seq_len"}
_META = {"multiple_of", "ffn_dim_multiplier", "use_scaled_rope"}
_MISTRAL = {"hidden_dim", "head_dim", "sliding_window", "_sliding_window", "moe", "model_type", "max_position_embeddings"}

_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "hidden_dim": "intermediate_size",
}
"""Argument -> key of a Hugging Face config; where the first is left out, both classes mean the same."""


def arguments(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the model, which some releases nest under `model`."""
    inner = params.get("model")
    return inner if isinstance(inner, Mapping) else params


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `params.json` says of a model, under Hugging Face's keys; what it does not say is left out."""
    told = {key: value for key, value in arguments(params).items() if value is not None}
    found = {ours: told[theirs] for theirs, ours in _KEYS.items() if _is_size(told.get(theirs))}
    width = _width(told)
    if width is not None:
        found.setdefault("intermediate_size", width)
    experts = told["moe"].get("num_experts") if isinstance(told.get("moe"), Mapping) else None
    if _is_size(experts):
        found["num_local_experts"] = experts
    family = _family(told)
    return {"model_type": family, **found} if family else found


def _family(told: Mapping[str, Any]) -> str | None:
    keys = set(told)
    if "multiple_of" in keys and keys <= _BOTH | _META:
        return "llama"
    if {"hidden_dim", "head_dim"} <= keys <= _BOTH | _MISTRAL and told.get("model_type", "transformer") == "transformer":
        return "mixtral" if "moe" in keys else "mistral"
    return None


def _width(told: Mapping[str, Any]) -> int | None:
    """Return the width of Meta's feed-forward layers, as its `FeedForward` rounds it; None where an argument is not there."""
    dim, multiple, factor = told.get("dim"), told.get("multiple_of"), told.get("ffn_dim_multiplier", 1)
    if not _is_size(dim) or not _is_size(multiple) or type(factor) not in (int, float) or not 0 < factor < 1e6:
        return None
    width = int(factor * int(2 * (4 * dim) / 3))
    return multiple * -(-width // multiple)


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 40
