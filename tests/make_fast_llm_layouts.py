"""Write small `distributed` checkpoints of Fast-LLM for meshes and models that would take many processes to train.

No training and no process groups: for each rank, Fast-LLM's own configuration, model, stages and parameters say what its flat
vector holds (`GPTModel`, `FSDP`, `ParameterMeta.global_to_local`), and this script fills it with `meshload.testing.ramp` of the
parameter's name (`exp_avgs/` and `exp_avgs_sq/` in front for the moments). The metadata are Fast-LLM's own, too.

Usage: python make_fast_llm_layouts.py FOLDER [CASE ...], with torch, safetensors, meshload and a source tree of Fast-LLM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NORM = {"type": "rms_norm", "epsilon": 1e-6}
ATTENTION = {
    "heads": 4,
    "head_groups": 2,
    "head_size": 3,
    "add_linear_biases": False,
    "rotary": {"type": "default", "theta": 10000.0},
    "implementation": "backup",
}
MLP = {"intermediate_size": 10, "gated": True, "add_linear_biases": False, "activation": "silu"}
MOE = {**MLP, "type": "moe", "experts": 3, "experts_per_token": 2}
QWEN2 = {name: {"bias": {"enabled": True}} for name in ("query_layer", "key_layer", "value_layer")}
FROZEN = {"lr_scale": 0.0}


def base(mixer: Any = None, mlp: Any = None, blocks: int = 3, norm: Any = NORM, **other: Any) -> dict[str, Any]:
    block = {"mixer": {**ATTENTION, **(mixer or {})}, "mlp": {**MLP, **(mlp or {})}, "normalization": norm}
    return {
        "decoder": {"block": block, "num_blocks": blocks},
        "embeddings": {"vocab_size": 14},
        "head": {"normalization": norm},
        "hidden_size": 8,
        "tied_embedding_weight": False,
        **other,
    }


def pattern() -> dict[str, Any]:
    """Two kinds of blocks in turn, with what else a block may have."""
    one = {
        "mixer": {**ATTENTION, "query_norm": NORM, "key_norm": NORM},
        "mlp": {**MLP, "pre_norm": NORM, "post_norm": {"type": "fixed_rms_norm"}},
        "normalization": NORM,
        "post_mlp_normalization": NORM,
        "output_scale": {"enabled": True},
    }
    other = {
        "mixer": {**ATTENTION, "shared_key_value": True, "query_layer": {"weight": {"weight_decay": False}}},
        "mlp": {**MOE, "router_normalization": NORM, "router_scale": {"enabled": True}},
        "normalization": NORM,
        "pre_mlp_normalization": {"type": "none"},
    }
    return {"type": "pattern", "pattern": ["a", "b"], "num_blocks": 3, "blocks": {"a": one, "b": other}}


# case: base model, distributed, multi-stage
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "mixtral_tp2_pp2_dp2": (
        base(mlp=MOE),
        {"tensor_parallel": 2, "pipeline_parallel": 2, "world_size": 8, "pipeline_first": True},
        {"layers_per_stage": 2},
    ),
    "llama_frozen_pp3_dp2": (
        base(mlp=FROZEN, blocks=4, embeddings={"vocab_size": 14, "word_embeddings": FROZEN}),
        {"pipeline_parallel": 3, "world_size": 6},
        {"layers_per_stage": 1},
    ),
    "llama_untied_one_rank": (base(), {"world_size": 1}, {"layers_per_stage": 2}),
    "biases_positions_layer_norm_tp2": (
        base(
            mixer={"add_linear_biases": True, "head_groups": 1, "window_size": 7},
            mlp={"add_linear_biases": True, "gated": False, "activation": "gelu", "intermediate_size": 12},
            norm={"type": "layer_norm"},
            embeddings={"vocab_size": 14, "position_embeddings": {"enabled": True}, "num_position_embeddings": 11},
            tied_embedding_weight=True,
        ),
        {"tensor_parallel": 2, "world_size": 6},
        {"layers_per_stage": 2},
    ),
    "mtp_tied_pp2": (
        base(head={"normalization": NORM, "prediction_heads": 3}, tied_embedding_weight=True, blocks=2),
        {"pipeline_parallel": 2, "world_size": 2},
        {},
    ),
    "pattern_norms_whole_vocab_tp2": (
        base(decoder=pattern(), embeddings={"vocab_size": 13, "vocab_parallel": False}),
        {"tensor_parallel": 2, "sequence_tensor_parallel": True, "world_size": 4, "sequence_data_parallel": 2},
        {"layers_per_stage": 2},
    ),
    "qwen2_tp2_dp2": (base(mixer={**QWEN2, "head_size": 2}), {"tensor_parallel": 2, "world_size": 4}, {"layers_per_stage": 3}),
}


def write(folder: Path, base_model: Any, distributed: dict[str, Any], multi_stage: dict[str, Any]) -> None:
    import torch
    import yaml
    from fast_llm.engine.checkpoint.config import CheckpointSaveMetadataConfig, export_safetensors_metadata
    from fast_llm.engine.config_utils.parameter import ParameterConfig
    from fast_llm.models.gpt.config import GPTModelConfig
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    states = ("weights", "exp_avgs", "exp_avgs_sq")
    is_new = "weight_decay" in {name for name, _ in ParameterConfig.fields()}
    metadata = {"completed_steps": 3, "optimizer": {"current_step": 3}, **({"documents_seen": 3} if is_new else {})}
    for rank in range(distributed["world_size"]):
        mesh = {**distributed, "rank": rank, "local_world_size": distributed["world_size"], "use_cuda": False, "backend": "gloo"}
        model = {"base_model": base_model, "distributed": mesh, "multi_stage": multi_stage, "type": "gpt"}
        config = GPTModelConfig.from_dict(json.loads(json.dumps(model)))  # a copy without shared parts: it is taken apart
        built = config.get_model_class()(config, optimizer_state_names=states[1:], verbose=False)
        said = config.to_metadata(
            CheckpointSaveMetadataConfig(path=folder, format=config.get_checkpoint_format("distributed")),
            shards=list(states),
            metadata=metadata,
        ).to_dict()
        if rank == 0:
            (folder / "metadata.yaml").write_text(yaml.safe_dump(said))
        tensors = {f"{state}_shard": torch.cat([*slices(built, state), torch.zeros(0)]) for state in states}
        save_file(tensors, folder / f"rank_{rank}.safetensors", metadata=export_safetensors_metadata(said))
    (folder / "ok").touch()


def slices(model: Any, state: str) -> Iterator[Any]:
    """Go through what a rank holds of one state: its slice of each group of each of its stages."""
    import torch

    from meshload.testing import ramp

    for stage in model._stages_on_device.values():
        for group in stage.fsdps:
            if state != "weights" and not group.requires_grad:
                continue
            parts = []
            for name, parameter in group._parameter_metas.items():
                whole = torch.from_numpy(ramp(name if state == "weights" else f"{state}/{name}", tuple(parameter.global_shape)))
                parts.append(parameter.global_to_local(whole).reshape(-1))
            parts.append(torch.zeros(group._global_pad))
            begin = group._fsdp_dim.rank * group._shard_size
            yield torch.cat(parts)[begin : begin + group._shard_size]


if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        write(Path(sys.argv[1]) / case, *CASES[case])
