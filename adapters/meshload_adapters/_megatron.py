"""What the `args` in a Megatron checkpoint say of the model.

`args` is the `argparse.Namespace` of the run, hundreds of attributes
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._pickle import Global, Record, ndarray_of

MOST = 1 << 32
"""Layers times chunks of the pipeline; more are a hostile file's."""

REFUSED = "optimizer.states"
"""The name under which it is told why the optimizer's arrays are not given."""


def arguments(found: Any) -> Mapping[str, Any]:
    """Return the attributes of a saved `args`; none where there are no args."""
    if isinstance(found, Record) and type(found.state) is dict:
        return {name: value for name, value in found.state.items() if type(name) is str}
    return found if type(found) is dict else {}


def number(args: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Return an argument that is a whole number of at least 1, else the default."""
    value = args.get(name)
    return value if type(value) is int and value > 0 else default


def plain(value: Any) -> Any:
    """Return a value of a pickle as plain Python: what is foreign becomes text that names it."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(map(plain, value)) if kind in (list, tuple) else tuple(map(plain, value))
    if kind is dict:
        return {k if type(k) in (str, int) else shown(k): plain(v) for k, v in value.items()}
    return shown(value)


def shown(value: Any) -> str:
    """Return a value of a pickle as text: dtypes and classes by their names."""
    if isinstance(value, Global):
        return f"{value.module}.{value.name}"
    if isinstance(value, Record):
        array = ndarray_of(value)
        if array is not None:
            return f"numpy.ndarray({array.dtype}, {array.shape})"
        short = ", ".join(repr(a) for a in value.args if type(a) in (bool, int, float, str))
        return f"{value.module}.{value.name}({short[:80]})"
    if type(value) is tuple:
        return f"({', '.join(map(shown, value))})"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__}({getattr(value, 'dtype', '')}, {shape})"
    return str(value)[:80]


def config_of(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what `args` say of the model, in the keys of Hugging Face configs; only what they say exactly.

    The family is not among it: Megatron's one model is Llama, Qwen or GPT by its options.
    """
    if not args:
        return None
    heads = number(args, "num_attention_heads")
    found: dict[str, Any] = {
        "hidden_size": number(args, "hidden_size"),
        "num_hidden_layers": number(args, "num_layers"),
        "num_attention_heads": heads,
        "intermediate_size": number(args, "ffn_hidden_size"),
        "vocab_size": number(args, "vocab_size"),
        "num_local_experts": number(args, "num_experts"),
        "apply_layernorm_1p": True if args.get("apply_layernorm_1p") is True else None,
    }
    if type(args.get("group_query_attention")) is bool:  # without it `num_query_groups` is 1, and means nothing
        found["num_key_value_heads"] = number(args, "num_query_groups") if args["group_query_attention"] else heads
    if args.get("multi_latent_attention") is not True:
        found["head_dim"] = number(args, "kv_channels")
    if type(args.get("untie_embeddings_and_output_weights")) is bool:
        found["tie_word_embeddings"] = not args["untie_embeddings_and_output_weights"]
    if args.get("position_embedding_type") == "learned_absolute":
        found["max_position_embeddings"] = number(args, "max_position_embeddings")
    found |= _beside_sizes(args)
    linear, qkv = args.get("add_bias_linear"), args.get("add_qkv_bias") is True
    if type(linear) is bool and (linear or not qkv):  # biases of q, k and v alone are another thing than attention_bias
        found["attention_bias"] = found["mlp_bias"] = linear
    if found["num_local_experts"]:
        width = found["moe_intermediate_size"] = number(args, "moe_ffn_hidden_size") or found["intermediate_size"]
        if args.get("moe_layer_freq", 1) == 1:
            found |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
            if width != found["intermediate_size"]:
                found["intermediate_size"] = None  # the width of dense layers, which this model has none of
    padded = number(args, "padded_vocab_size")
    if found["vocab_size"] and padded and found["vocab_size"] > padded:
        found["vocab_size"] = None
    return {name: value for name, value in found.items() if value is not None}


def _beside_sizes(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model computes with beside its arrays, which no array shows, and Hugging Face has other defaults of."""
    found: dict[str, Any] = {"num_experts_per_tok": number(args, "moe_router_topk") if number(args, "num_experts") else None}
    epsilon, is_rms = (
        _real(args, "norm_epsilon" if "norm_epsilon" in args else "layernorm_epsilon"),
        args.get("normalization") == "RMSNorm",
    )
    found |= dict.fromkeys(("rms_norm_eps",) if is_rms else ("layer_norm_eps", "layer_norm_epsilon"), epsilon)
    if args.get("position_embedding_type") == "rope":
        found |= {"rope_theta": _real(args, "rotary_base"), "rotary_pct": None if is_rms else _real(args, "rotary_percent")}
        if args.get("use_rope_scaling") is True:  # as Llama 3.1, with this factor
            scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            found["rope_scaling"] = {"rope_type": "llama3", "factor": _real(args, "rope_scaling_factor") or 8.0, **scaling}
    return found


def _real(args: Mapping[str, Any], name: str) -> float | None:
    return float(args[name]) if type(args.get(name)) in (int, float) else None


def layers_of(args: Mapping[str, Any], pp: int, virtual: int) -> dict[tuple[int, int], int] | None:
    """Return how many layers `args` say that chunk `v` of stage `p` has; None where they do not say it plainly."""
    layers = number(args, "num_layers")
    if layers is None or layers * pp * virtual > MOST or args.get("pipeline_model_parallel_layout") is not None:
        return None
    first, last = number(args, "decoder_first_pipeline_num_layers"), number(args, "decoder_last_pipeline_num_layers")
    embedding = args.get("account_for_embedding_in_pipeline_split") is True
    loss = args.get("account_for_loss_in_pipeline_split") is True
    even = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0) + embedding + loss
    if even < 0 or (even and rest % even) or (not even and rest):
        return None
    stages = [rest // even if even else 0] * pp
    stages[0] = first or stages[0]
    stages[-1] = last or stages[-1]
    if any(n % virtual for n in stages):
        return None
    found = {(v, p): stages[p] // virtual for v in range(virtual) for p in range(pp)}
    found[0, 0] -= embedding
    found[virtual - 1, pp - 1] -= loss
    return found


def bucket_limit(args: Mapping[str, Any], p: int, v: int) -> int | None:
    """Return the elements at which the distributed optimizer closes a bucket; None where it has one.

    Only chunk 0 of stage 0 has several, and only where gradients are reduced while others are computed.
    """
    if args.get("overlap_grad_reduce") is not True or p or v:
        return None
    replicas = (number(args, "data_parallel_size", 1) or 1) * (number(args, "context_parallel_size", 1) or 1)
    return number(args, "ddp_bucket_size") or max(40_000_000, 1_000_000 * replicas)
