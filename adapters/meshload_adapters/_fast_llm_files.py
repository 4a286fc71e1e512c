"""New Fast-LLM checkpoints: what `metadata.yaml` says of the model, and files without payload, of tensors or of flat vectors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LayoutError, listing
from meshload.mesh import Mesh
from meshload.naming import Model as Named
from meshload.naming import model_of as named
from meshload.pieces import empty
from meshload.source import LocalFolder
from meshload.steps import checked_step, told_step
from meshload.writing import lay_out, put

from ._config_numbers import number, section
from ._defaults import chosen_of, epsilon_of, theta_of
from ._fast_llm_config import ACTIVATIONS, huggingface
from ._fast_llm_layout import Layout, Model, Ranks, Section, layout_of, model_of
from ._safetensors_files import head, shards
from ._yaml_writer import dumped

METADATA = "metadata.yaml"

VERSION = "0.4.0"
"""Fast-LLM's, whose fields these are."""

STATES = {"exp_avg": "exp_avgs", "exp_avg_sq": "exp_avgs_sq"}
"""Kind of an optimizer's arrays -> Fast-LLM's word. Its weights are the masters."""

FAMILIES = ("llama", "mistral", "mixtral", "qwen2")
"""Those that can be said in Fast-LLM's words."""


def lay_out_named(folder: LocalFolder, like: Checkpoint, step: int | None, max_shard_size: int) -> None:
    """Make files of whole tensors, `{parameter}/{state}`, for any mesh."""
    base = _base(like)
    states = _states(like, model_of(Section(base, "config.base_model"), 1))
    arrays = [
        Array(f"{name}/{state}", of[name].dtype, of[name].shape, of[name].pieces)
        for name in like.arrays
        for state, of in states.items()
        if name in of  # what is frozen has no moments
    ]
    told = _metadata("fast_llm", base, {}, {}, states, _progress(like, step))
    index: dict[str, str] = {}
    for n, members in enumerate(shards(arrays, max_shard_size)):
        file = f"model_{n}.safetensors"
        index |= {array.name: file for array in members}
        lay_out(folder, file, *head(members, _strings(told)))
    put(folder, METADATA, dumped({**told, "metadata": {**told["metadata"], "state_index": index}}).encode())


def lay_out_vectors(
    folder: LocalFolder, like: Checkpoint, mesh: Mesh, layers_per_stage: float, decay: str, step: int | None
) -> None:
    """Make each rank's file of flat vectors, for a mesh with the axes `tp`, `pp` and `dp`."""
    ranks, base = _ranks(mesh), _base(like)
    if Section(base, "config.base_model").of("embeddings").size("vocab_size", 49152) % ranks.tp:
        base["embeddings"]["vocab_parallel"] = False  # else Fast-LLM cannot make such a model
    try:
        model = model_of(Section(base, "config.base_model"), ranks.tp)
        layout = layout_of(model, ranks, layers_per_stage, decay)
    except FormatError as error:
        raise LayoutError(f"Fast-LLM cannot cut the model so: {error}") from error
    states = _states(like, model)
    wrong = {array.dtype.name for of in states.values() for array in of.values()} - {"float32"}
    if wrong:  # its models are made with parameters of that dtype
        raise LayoutError(f"Fast-LLM's vectors are float32, and here is {listing(sorted(wrong))}; give dtype='float32'")
    distributed = {"world_size": ranks.count, "local_world_size": ranks.count, "rank": 0}
    distributed |= {key: n for key, n in (("tensor_parallel", ranks.tp), ("pipeline_parallel", ranks.pp)) if n > 1}
    progress = _progress(like, step)
    if decay == "all":
        progress.pop("documents_seen")  # which says that the order is that of later versions
    told = _metadata("distributed", base, distributed, {"layers_per_stage": float(layers_per_stage)}, states, progress)
    for rank, sizes in enumerate(_sizes(layout)):
        vectors = [_vector(f"{state}_shard", n) for state, n in zip(states, sizes + sizes[1:], strict=False)]
        lay_out(folder, f"rank_{rank}.safetensors", *head(vectors, _strings(told)))
    put(folder, METADATA, dumped(told).encode())


def _ranks(mesh: Mesh) -> Ranks:
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    more = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 and axis not in ("tp", "pp", "dp")]
    if more:
        raise LayoutError(f"mesh: Fast-LLM's ranks are of the axes tp, pp and dp; it has none such as {listing(more)}")
    return Ranks(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1))


def _sizes(layout: Layout) -> list[tuple[int, int]]:
    """Return how long each rank's vectors are: of weights, of moments."""
    ranks = layout.ranks
    data, tensor = np.arange(ranks.dp)[:, None], np.arange(ranks.tp)[None]
    pipeline_of = {int(r): p for p in range(ranks.pp) for r in ranks.number(p, data, tensor).reshape(-1)}
    return [layout.sizes[pipeline_of[rank]] for rank in range(ranks.count)]


def _vector(name: str, n: int) -> Array:
    return Array(name, np.dtype(np.float32), (n,), empty(1, ()))


# --- what is stored ---------------------------------------------------------------------------------------------------


def _states(like: Checkpoint, model: Model) -> dict[str, Mapping[str, Array]]:
    """Return the arrays of each state, weights first; what the model has not, or lacks, raises."""
    parameters = [p for layer in model.layers for p in layer.parameters if p.name not in model.ties]
    found: dict[str, Mapping[str, Array]] = {"weights": like.arrays}
    for kind, arrays in like.optimizer.items():
        if kind in STATES:
            found[STATES[kind]] = arrays
        elif kind != "master":
            raise LayoutError(f"optimizer: Fast-LLM has no place for {kind}; of {listing(STATES)}, name some")
        elif any(n not in like.arrays or not _is_same(a, like.arrays[n]) for n, a in arrays.items()):
            raise LayoutError(
                f"optimizer: Fast-LLM's weights are the masters, and these are others; open the source so that its weights are its "
                f"masters, as by DeepSpeed(weights='master'), and convert optimizer={list(STATES)}"
            )
    for state, arrays in found.items():
        expected = {p.name: p.shape for p in parameters if state == "weights" or not p.is_frozen}
        lacking, more = [n for n in expected if n not in arrays], [n for n in arrays if n not in expected]
        if lacking or more:
            raise LayoutError(
                f"{state}: by the config, {listing(lacking, 3) or 'none'} lack, {listing(more, 3) or 'none'} are too many"
            )
        odd = [f"{n} {arrays[n].shape}, expected {shape}" for n, shape in expected.items() if arrays[n].shape != shape]
        if odd:
            raise LayoutError(f"{state}: by the config, shapes differ: {listing(odd, 3)}")
    return found


def _is_same(one: Array, other: Array) -> bool:
    """Say whether two arrays are stored at the same place."""
    a, b = one.pieces, other.pieces
    columns = ((a.source, b.source), (a.offset, b.offset), (a.start, b.start), (a.shape, b.shape), (a.strides, b.strides))
    same = one.dtype == other.dtype and [*map(id, a.sources)] == [*map(id, b.sources)]
    return same and all(np.array_equal(x, y) for x, y in columns)


def _progress(like: Checkpoint, step: int | None) -> dict[str, Any]:
    """Return what Fast-LLM goes on with: how many steps the moments are of."""
    own = like.meta.get("metadata") if "fast_llm_config" in like.meta else None
    found: dict[str, Any] = {"documents_seen": (own or {}).get("documents_seen", 0)}
    if not any(kind in STATES for kind in like.optimizer):
        return found
    told = told_step(like) if step is None else checked_step(step)
    if told is None:
        raise LayoutError(
            f"optimizer: which step {listing(k for k in like.optimizer if k in STATES)} are of is told nowhere, and Adam's next "
            f"one depends on it; say it with FastLLM(step=...)"
        )
    return found | {"completed_steps": told, "optimizer": {"current_step": told, "grad_scaler": {"type": "NoopGradScaler"}}}


def _metadata(
    form: str,
    base: Mapping[str, Any],
    distributed: Mapping[str, Any],
    stages: Mapping[str, Any],
    states: Mapping[str, Any],
    progress: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "fast_llm_version": VERSION,
        "model": "gpt",
        "format": form,
        "config": {"type": "gpt", "base_model": base, "distributed": distributed, "multi_stage": stages},
        "shards": list(states),
        "metadata": dict(progress),
    }


def _strings(told: Mapping[str, Any]) -> dict[str, str]:
    """Return what each file's header repeats."""
    return {key: value if isinstance(value, str) else dumped(value) for key, value in told.items()}


# --- the model in Fast-LLM's words ------------------------------------------------------------------------------------


def _base(like: Checkpoint) -> dict[str, Any]:
    """Return `base_model`: Fast-LLM's own where the checkpoint comes from there, else from the Hugging Face config."""
    own = like.meta.get("fast_llm_config")
    return deepcopy(own["base_model"]) if own else base_of(like.config)


def base_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `base_model` of a Hugging Face config; what it cannot say raises. The mirror of `_fast_llm_config`."""
    model = named("fast_llm", config)
    if model is None or model.family not in FAMILIES:
        kind = (config or {}).get("model_type")
        raise LayoutError(f"Fast-LLM's metadata needs a config of {listing(FAMILIES)}; model_type is {kind!r}; give config=")
    sizes, norm = model.sizes, {"type": "rms_norm", "epsilon": epsilon_of(model.family, model.config)}
    block = {"type": "decoder", "mixer": _mixer(model), "mlp": _mlp(model), "normalization": norm}
    base: dict[str, Any] = {
        "hidden_size": sizes["embed"],
        "tied_embedding_weight": bool(model.ties),
        "embeddings": {"vocab_size": sizes["vocab"]},
        "decoder": {"type": "fixed", "num_blocks": sizes["layer"], "block": block},
        "head": {"normalization": dict(norm)},
    }
    huggingface(Section(base, "config.base_model"), model.family)  # raises where the family could not be told from it
    return base


def _mixer(model: Named) -> dict[str, Any]:
    config, sizes = model.config, model.sizes
    if config.get("use_sliding_window"):
        raise LayoutError("config: use_sliding_window, in some layers only, cannot be said in Fast-LLM's config")
    window = number(config, "sliding_window") if model.family in ("mistral", "mixtral") else None
    mixer: dict[str, Any] = {
        "type": "attention",
        "heads": sizes["kv_heads"] * sizes["group"],
        "head_groups": sizes["kv_heads"],
        "head_size": sizes["head_dim"],
        "add_linear_biases": bool(model.family == "llama" and config.get("attention_bias")),
        "dropout": float(number(config, "attention_dropout") or 0.0),
        "rotary": _rotary(model),
        **({} if window is None else {"window_size": window}),
    }
    if model.family == "qwen2":
        mixer |= {f"{name}_layer": {"bias": {"enabled": name != "dense"}} for name in ("query", "key", "value", "dense")}
    return mixer


def _mlp(model: Named) -> dict[str, Any]:
    config, own = model.config, {word: key for key, word in ACTIVATIONS.items()}
    told = config.get("hidden_act") or "silu"
    if not isinstance(told, str) or told not in own:
        raise LayoutError(f"config: hidden_act is {told!r}; Fast-LLM has {listing(own)}")
    mlp = {
        "type": "mlp",
        "gated": True,
        "activation": own[told],
        "intermediate_size": model.sizes["ffn"],
        "add_linear_biases": bool(model.family == "llama" and config.get("mlp_bias")),
    }
    if model.family == "mixtral":
        mlp |= {"type": "moe", "experts": model.sizes["expert"], "experts_per_token": chosen_of(model.family, config)}
    return mlp


def _rotary(model: Named) -> dict[str, Any]:
    """Return the rotary embedding, from `rope_parameters` or, before transformers 5, `rope_theta` and `rope_scaling`."""
    config = model.config
    told = section(config, "rope_parameters") or section(config, "rope_scaling")
    kind = told.get("rope_type") or told.get("type") or "default"
    found: dict[str, Any] = {"type": kind, "theta": theta_of(model.family, config)}
    if not isinstance(kind, str) or kind not in KEYS or told.get("partial_rotary_factor", 1.0) != 1.0:
        raise LayoutError(f"config: rotary embeddings {dict(told)!r} cannot be said in Fast-LLM's config; it has {listing(KEYS)}")
    lacking = [key for key in KEYS[kind] if told.get(key) is None and key not in OPTIONAL]
    if lacking:
        raise LayoutError(f"config: rotary embeddings of type {kind!r} lack {listing(lacking)}")
    return found | {own: n for key, own in KEYS[kind].items() if (n := number(told, key)) is not None}


_SCALED = {"factor": "scale_factor", "original_max_position_embeddings": "original_context_length"}

KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "llama3": {**_SCALED, "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"},
    "yarn": {**_SCALED, "attention_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"},
}
"""Types of rotary embeddings: Hugging Face's keys -> Fast-LLM's."""

OPTIONAL = ("attention_factor", "beta_fast", "beta_slow")
"""What has the same default on both sides."""
