"""What a Hugging Face config means where it is silent, in each family: other formats say it, and have defaults of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._config_numbers import number, section

EPSILONS = {"gpt2": 1e-5, "gpt_neox": 1e-5, "mixtral": 1e-5}
"""Of norms; 1e-6 in other families."""

THETAS = {"mixtral": 1e6}
"""Bases of rotary embeddings; 1e4 in other families."""

CHOSEN = {"mixtral": 2, "qwen3_moe": 8}
"""How many experts a token is sent to."""


def epsilon_of(family: str, config: Mapping[str, Any]) -> float:
    """Return the epsilon of a model's norms."""
    told = number(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    return float(EPSILONS.get(family, 1e-6) if told is None else told)


def theta_of(family: str, config: Mapping[str, Any]) -> float:
    """Return the base of a model's rotary embedding: of `rope_parameters`, or of keys before transformers 5."""
    told = number(section(config, "rope_parameters"), "rope_theta")
    told = number(config, "rope_theta", "rotary_emb_base") if told is None else told
    return float(THETAS.get(family, 1e4) if told is None else told)


def chosen_of(family: str, config: Mapping[str, Any]) -> int | None:
    """Return how many experts a token is sent to; None where nothing tells it."""
    told = number(config, "num_experts_per_tok")
    return CHOSEN.get(family) if told is None else int(told)
