"""The model tables against transformers itself: names and shapes on disk and of live modules, and its parallel plans."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import naming as naming_module
from meshload.errors import MissingArray
from meshload.expression import evaluate
from meshload.pattern import Dim, Line, Node, Pattern, Product, Sum, Table, find, parse, parse_table, refined, shown_shape
from meshload.pieces import Pieces, piece
from meshload.testing import ramp, same_bits, write_checkpoint
from meshload_adapters.models import fast_llm, flexgen, hf, maxtext, megatron, meta, neox, quantised
from meshload_adapters.models import transformers as live

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

HF = [parse_table(text) for text in hf.TABLES]
LIVE = [parse_table(text) for text in live.TABLES]
MAXTEXT = [parse_table(text) for text in maxtext.TABLES]
FRAMEWORKS = {
    "fast_llm": [parse_table(text) for text in fast_llm.TABLES],
    "flexgen": [parse_table(text) for text in flexgen.TABLES],
    "gpt_neox": [parse_table(text) for text in neox.TABLES],
    "megatron": [parse_table(text) for text in megatron.TABLES],
    "meta": [parse_table(text) for text in meta.TABLES],
    "torchtitan": [parse_table(text) for text in meta.TORCHTITAN],
}
NAMINGS = {"hf": HF, "transformers": LIVE, "maxtext": MAXTEXT, **FRAMEWORKS}

# Sizes that coincide nowhere, small, even where a plan over 2 ranks cuts them.
BASE = {
    "vocab_size": 54,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 38,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**BASE, "head_dim": 10}
LATENT = {
    **BASE,
    "moe_intermediate_size": 14,
    "n_routed_experts": 4,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 9,
    "kv_lora_rank": 7,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 11,
    "v_head_dim": 13,
    "first_k_dense_replace": 1,
}
SPARSE = {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
LINEAR = {
    **SPARSE,
    "shared_expert_intermediate_size": 26,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
OLD = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
GPT2 = {"vocab_size": 54, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 33, "bos_token_id": 1, "eos_token_id": 2}
OPT = {k: v for k, v in OLD.items() if k != "intermediate_size"} | {"ffn_dim": 38, "max_position_embeddings": 33}
BLOOM = {"vocab_size": 54, "hidden_size": 24, "n_layer": 3, "n_head": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {k: v for k, v in OLD.items() if k != "intermediate_size"}

VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

CONFIGS: dict[str, list[dict[str, Any]]] = {
    "llama": [{**WIDE, "attention_bias": True, "mlp_bias": True}, BASE, {**OLD, "tie_word_embeddings": True}],
    "mistral": [WIDE, {**BASE, "tie_word_embeddings": True}],
    "qwen2": [BASE, {**BASE, "tie_word_embeddings": True}],
    "qwen2_moe": [
        {**SPARSE, "shared_expert_intermediate_size": 26, "mlp_only_layers": [1]},
        {**SPARSE, "shared_expert_intermediate_size": 26, "decoder_sparse_step": 2, "qkv_bias": False},
        {**SPARSE, "num_experts": 0},
    ],
    "qwen3": [{**WIDE, "attention_bias": True}, {**WIDE, "tie_word_embeddings": True}],
    "qwen3_moe": [
        {**SPARSE, "attention_bias": True, "mlp_only_layers": [1]},
        {**SPARSE, "decoder_sparse_step": 2, "tie_word_embeddings": True},
        {**SPARSE, "num_experts": 0},
    ],
    "qwen3_next": [
        {**LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_only_layers": [0]},
        {**LINEAR, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True},
    ],
    "gemma": [{**WIDE, "attention_bias": True}, {**WIDE, "tie_word_embeddings": False}],
    "gemma2": [{**WIDE, "attention_bias": True}, {**WIDE, "tie_word_embeddings": False}],
    "gemma3_text": [{**WIDE, "attention_bias": True}, {**WIDE, "tie_word_embeddings": False}],
    "gemma3": [{"text_config": {**WIDE, "attention_bias": True}, "vision_config": VISION, "mm_tokens_per_image": 4}],
    "phi3": [BASE, {**OLD, "tie_word_embeddings": True}],
    "mixtral": [{**WIDE, "num_local_experts": 4}, {**BASE, "num_local_experts": 2, "tie_word_embeddings": True}],
    "deepseek_v2": [
        {**LATENT, "attention_bias": True, "mlp_bias": True},
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
    ],
    "deepseek_v3": [{**LATENT, "attention_bias": True}, {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2}],
    "gpt_oss": [{**WIDE, "num_local_experts": 4}, {**WIDE, "num_local_experts": 2, "attention_bias": False}],
    "gpt_neox": [OLD, {**OLD, "attention_bias": False}, {**OLD, "tie_word_embeddings": True}],
    "gpt2": [GPT2, {**GPT2, "n_inner": 38, "tie_word_embeddings": False}],
    "opt": [
        OPT,
        {**OPT, "word_embed_proj_dim": 6, "do_layer_norm_before": False, "enable_bias": False},
        {**OPT, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
        {**OPT, "_remove_final_layer_norm": True},
    ],
    "bloom": [BLOOM, {**BLOOM, "tie_word_embeddings": False}],
    "falcon": [
        FALCON,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 38},
        {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 2, "bias": True},
        {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        {**FALCON, "tie_word_embeddings": False, "parallel_attn": False, "new_decoder_architecture": True},
    ],
    "starcoder2": [{**BASE, "tie_word_embeddings": False}, {**BASE, "use_bias": False}],
    "cohere": [{**BASE, "attention_bias": True, "use_qk_norm": True}, {**BASE, "tie_word_embeddings": False}],
    "cohere2": [{**BASE, "attention_bias": True}, {**BASE, "tie_word_embeddings": False}],
    "olmo2": [{**BASE, "attention_bias": True}, {**BASE, "tie_word_embeddings": True}],
}
VARIANTS = [(family, i) for family, configs in CONFIGS.items() for i in range(len(configs))]

TWICE = "the default layout cuts the embedding by rows, as it does the head; the plan keeps it whole on each rank"
NO_ATTENTION = "the plan leaves attention whole; the default layout cuts its heads"
NO_SHARED = "the plan leaves the shared expert whole; the default layout cuts its width"
FUSED = "the plan cuts rows of the fused array and gathers the output; the default layout cuts each fused part"
OWN_HEADS = "the norm is cut with the heads that it scales; the plan gathers q and k before it, or forgets it"
LINEAR_WHOLE = "the plan cuts the rows and gathers the output; the default layout keeps linear attention whole"
NO_EXPERTS = "the plan is for expert parallelism alone; the default layout cuts the experts' width over tp"

EMBEDDING = {"model.embed_tokens.weight": TWICE}
ATTENTION = "model.layers.*.self_attn."
DIFFERENCES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"), EMBEDDING),
    **dict.fromkeys(("mixtral", "deepseek_v2", "starcoder2", "cohere2"), EMBEDDING),
    "gemma3": {"model.language_model.embed_tokens.weight": TWICE},
    "qwen2_moe": EMBEDDING | {f"model.layers.*.mlp.shared_expert.{m}_proj.weight": NO_SHARED for m in ("gate", "up", "down")},
    "phi3": EMBEDDING | {f"{ATTENTION}qkv_proj.weight": FUSED, "model.layers.*.mlp.gate_up_proj.weight": FUSED},
    "deepseek_v3": EMBEDDING | {f"{ATTENTION}{m}_proj.weight": NO_ATTENTION for m in ("q_b", "kv_b", "o")},
    "gpt_oss": {
        **{f"{ATTENTION}{m}_proj.weight": NO_ATTENTION for m in "qkvo"},
        **{f"{ATTENTION}{m}_proj.bias": NO_ATTENTION for m in "qkv"},
        f"{ATTENTION}sinks": NO_ATTENTION,
        "model.layers.*.mlp.experts.gate_up_proj": NO_EXPERTS,
        "model.layers.*.mlp.experts.gate_up_proj_bias": NO_EXPERTS,
        "model.layers.*.mlp.experts.down_proj": NO_EXPERTS,
    },
    "qwen3_next": EMBEDDING
    | {f"model.layers.*.linear_attn.{m}_proj{x}.weight": LINEAR_WHOLE for m, x in (("in", "_qkvz"), ("in", "_ba"), ("out", ""))},
    "gpt_neox": {},
    "cohere": EMBEDDING | {f"{ATTENTION}q_norm.weight": OWN_HEADS, f"{ATTENTION}k_norm.weight": OWN_HEADS},
    "olmo2": EMBEDDING | {f"{ATTENTION}q_norm.weight": OWN_HEADS, f"{ATTENTION}k_norm.weight": OWN_HEADS},
}
"""Family -> names where the default layout and transformers' tensor parallel plan place other elements on a rank -> why."""

WITHOUT_PLAN = {"gpt2", "opt", "bloom", "falcon"}
CUT_BY_TP = {"kv_heads", "ffn", "moe_ffn", "shared_ffn", "vocab"}


ELSEWHERE = ("diffusion_llama", "dream", "mtp_llama")
"""Families of Fast-LLM that transformers does not have."""


# --- names and shapes -------------------------------------------------------------------------------------------------


def table_of(tables: Sequence[Table], family: str) -> Table | None:
    return next((table for table in tables if family in table.families), None)


def arrays_of(table: Table, config: Mapping[str, Any]) -> Iterator[tuple[str, Line, Pattern, tuple[int, ...]]]:
    """Go through the arrays that a model of this config has: name, line, pattern, shape."""
    sizes = table.sizes_at(config)
    values = {**config, **sizes}
    tied = {alias for alias, _, condition in table.ties if condition is None or evaluate(condition, values)}
    for line in table.lines:
        pattern = refined(line.pattern, table.joints)
        for index in itertools.product(*(range(sizes[d]) for d in line.counted)):
            at = dict(zip(line.counted, index, strict=True))
            if line.condition is not None and not evaluate(line.condition, {**values, **at}):
                continue
            name = line.named(index)
            if name not in tied:
                yield name, line, pattern, shown_shape(pattern, line.parts, lambda part, dim: size_of(dim, sizes))


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    name, _, block = dim.partition("/")
    return -(-sizes[name] // int(block.lstrip("/"))) if block else sizes[name]


def shapes_of(table: Table, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = list(arrays_of(table, config))
    assert len({name for name, *_ in found}) == len(found)
    return {name: shape for name, _, _, shape in found}


def model_of(family: str, variant: int) -> Any:
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family][variant])
    kind = transformers.AutoModelForImageTextToText if family == "gemma3" else transformers.AutoModelForCausalLM
    return kind.from_config(config)


def saved(model: Any, folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Save a model; return its config, a nested text config on top, and its header's names and shapes."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_bytes())
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return flat(config), {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def text_part(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if "vision_tower" not in name and "multi_modal" not in name}


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
@pytest.mark.filterwarnings("ignore")
def test_tables_give_the_names_and_shapes_of_the_disk_and_of_the_live_module(family: str, variant: int, tmp_path: Path) -> None:
    model = model_of(family, variant)
    config, on_disk = saved(model, tmp_path)
    table = table_of(HF, family)
    assert table is not None
    assert shapes_of(table, config) == text_part(on_disk)

    module = table_of(LIVE, family) or table
    in_memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    aliases = {alias for alias, name, _ in module.ties if config.get("tie_word_embeddings")}
    assert shapes_of(module, config) == {n: s for n, s in text_part(in_memory).items() if n not in aliases}


def test_every_family_has_a_disk_table_and_is_tested() -> None:
    assert sorted(family for table in HF for family in table.families) == sorted([*CONFIGS, *ELSEWHERE])
    assert {f for table in (*LIVE, *MAXTEXT) for f in table.families} <= set(CONFIGS)


def test_a_missing_key_has_the_default_of_its_class() -> None:
    """Keys that the published configs lack, or that are null, give what the class says."""
    for family, gone in [
        ("gemma3", ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")),
        ("qwen3", ("head_dim",)),
        ("gemma", ("head_dim", "tie_word_embeddings")),
        ("gpt_oss", ("head_dim", "attention_bias")),
        ("gpt_neox", ("attention_bias",)),
        ("qwen2_moe", ("qkv_bias", "decoder_sparse_step", "mlp_only_layers")),
        ("falcon", ("multi_query", "parallel_attn", "new_decoder_architecture", "num_kv_heads", "ffn_hidden_size", "bias")),
        ("opt", ("enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm")),
        ("deepseek_v3", ("first_k_dense_replace", "attention_bias")),
        ("deepseek_v2", ("first_k_dense_replace", "mlp_bias")),
        ("starcoder2", ("use_bias", "tie_word_embeddings")),
        ("qwen3_next", ("layer_types", "head_dim", "mlp_only_layers", "decoder_sparse_step")),
        ("llama", ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings")),
    ]:
        config = transformers.AutoConfig.for_model(family, num_hidden_layers=5)
        config = flat({**config.to_dict(), "text_config": config.get_text_config().to_dict()})
        config["num_hidden_layers"] = 5
        config["num_experts"] = config["num_local_experts"] = config["n_routed_experts"] = 2
        table = table_of(HF, family)
        assert table is not None
        assert shapes_of(table, {k: v for k, v in config.items() if k not in gone}) == shapes_of(table, config), family


@pytest.mark.parametrize("variant", [0, 1])
def test_gpt_oss_in_mxfp4_has_blocks_and_scales_in_place_of_expert_weights(variant: int) -> None:
    config = {**CONFIGS["gpt_oss"][variant], "hidden_size": 64, "intermediate_size": 96}
    table = table_of(HF, "gpt_oss")
    assert table is not None
    plain = shapes_of(table, config)
    packed = shapes_of(table, {**config, "quantization_config": {"quant_method": "mxfp4"}})
    prefix, n = "model.layers.0.mlp.experts.", config["num_local_experts"]
    # As in openai/gpt-oss-20b, where hidden_size and intermediate_size are 2880: [32, 5760, 90, 16], [32, 5760, 90].
    assert packed[prefix + "gate_up_proj_blocks"] == (n, 192, 2, 16)
    assert packed[prefix + "gate_up_proj_scales"] == (n, 192, 2)
    assert packed[prefix + "down_proj_blocks"] == (n, 64, 3, 16)
    assert packed[prefix + "down_proj_scales"] == (n, 64, 3)
    replaced = {f"model.layers.{i}.mlp.experts.{m}_proj" for i in range(3) for m in ("gate_up", "down")}
    assert set(plain) - set(packed) == replaced


# --- parts are the same in all namings --------------------------------------------------------------------------------


def tables_of(family: str) -> list[Table]:
    """Return a family's tables in all namings."""
    return [t for t in (table_of(tables, family) for tables in NAMINGS.values()) if t is not None]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_part_has_the_same_dims_in_every_naming(family: str) -> None:
    joints = {joint: dims for table in tables_of(family) for joint, dims in table.joints.items()}
    dims: dict[str, set[str]] = {}
    for table in tables_of(family):
        for line in table.lines:
            for part in line.parts:
                found = {*line.counted, *refined(line.pattern, joints).dims_of(part)}
                assert dims.setdefault(part, found) == found, (part, line.name)


@pytest.mark.parametrize("family", CONFIGS)
def test_joints_and_sections_are_the_same_in_every_naming(family: str) -> None:
    joints: dict[str, tuple[str, ...]] = {}
    where: dict[str, str] = {}
    for table in tables_of(family):
        for joint, dims in table.joints.items():
            assert joints.setdefault(joint, dims) == dims, joint
        for line in table.lines:
            for part in line.parts:
                assert where.setdefault(part, line.where) == line.where, (part, line.name)


@pytest.mark.parametrize("family", CONFIGS)
def test_sections_and_layers_agree(family: str) -> None:
    for table in tables_of(family):
        for line in table.lines:
            for part in line.parts:
                assert ("layer" in line.dims_of(part)) == (line.where == "layers"), line.name


WITHOUT_A_PLACE: dict[str, set[str]] = {
    "flexgen": {"word_embed_proj_dim", "_remove_final_layer_norm"},
    "maxtext": {"attention_bias", "mlp_only_layers", "decoder_sparse_step"},
    "meta": {"attention_bias"},
    "torchtitan": {"attention_bias", "mlp_only_layers", "decoder_sparse_step"},
}
"""Naming -> keys of configs that mean a model for which the framework has no names."""

FAMILIES_OF = {
    "fast_llm": {"llama", "mistral", "mixtral", "qwen2", *ELSEWHERE},
    "flexgen": {"opt"},
    "gpt_neox": {"gpt_neox"},
    "maxtext": {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"},
    "megatron": {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_neox", "gpt2"},
    "meta": {"llama", "mistral", "mixtral"},
    "torchtitan": {"llama", "qwen3", "qwen3_moe"},
}


@pytest.mark.parametrize("naming", FAMILIES_OF)
def test_a_frameworks_names_show_the_parts_of_the_disk_at_every_config(naming: str) -> None:
    """Nothing of a model is left out, and nothing is shown twice."""
    assert {f for table in NAMINGS[naming] for f in table.families} == FAMILIES_OF[naming]
    for family in FAMILIES_OF[naming] - set(ELSEWHERE):
        for config in [{**c, "rope_type": "llama3.1", "scan_layers": False} for c in CONFIGS[family]]:
            if set(config) & WITHOUT_A_PLACE.get(naming, set()) or config.get("num_experts") == 0:
                continue
            found = [shown_parts(naming, family, config), shown_parts("hf", family, config)]
            assert sorted(found[0]) == sorted(found[1]), (family, config)
            assert len(found[0]) == len(set(found[0])), (family, config)


def shown_parts(naming: str, family: str, config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return each part with the layers at which a naming's arrays show it, older forms left out, heads that are tied too."""
    model = naming_module.model_of(naming, {"model_type": family, **config})
    assert model is not None
    found = set()
    twice = []
    for name, line, index in model.arrays():
        if name in model.ties:
            continue
        at = dict(zip(line.counted, index, strict=True))
        layers = [at["layer"]] if "layer" in at else range(model.sizes["layer"]) if line.where == "layers" else [-1]
        for part in line.parts:
            for layer in layers:
                entry = (part, layer)
                if entry in found and "expert" not in at:
                    twice.append(entry)
                found.add(entry)
    return [*found, *twice]


@pytest.mark.parametrize("family", [f for table in LIVE for f in table.families])
def test_the_live_table_has_the_parts_of_the_disk_table(family: str) -> None:
    parts = [{p for line in t.lines for p in line.parts} for t in (table_of(HF, family), table_of(LIVE, family)) if t]
    assert parts[0] == parts[1]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_dim_has_a_size(family: str) -> None:
    known = {name for table in tables_of(family) for name in (*table.sizes, *table.joints)}  # as `model_of` takes them together
    for table in tables_of(family):
        used = {d for line in table.lines for part in line.parts for d in line.dims_of(part)}
        assert {d.partition("/")[0] for d in used} <= known
        assert {d for dims in table.joints.values() for d in dims} <= known


# --- against transformers' plans --------------------------------------------------------------------------------------


def held(node: Node, part: str | None, sizes: Mapping[str, int], cut: set[str]) -> np.ndarray:
    """Which elements of a stored dim the first of two ranks holds."""
    match node:
        case Dim(name):
            n = sizes[name]
            return np.arange(n) < (n // 2 if name in cut else n)
        case Product(factors):
            found = np.ones(1, bool)
            for factor in factors:
                found = np.kron(found, held(factor, part, sizes, cut))
            return found
        case Sum(terms):
            return np.concatenate([held(product, name, sizes, cut) for name, product in terms])
    raise AssertionError(node)


def placed(style: str | None, name: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Which elements per stored dim the first of two ranks holds by a style of transformers."""
    whole = [np.ones(n, bool) for n in shape]
    is_bias = name.endswith("bias")
    if style in (None, "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "ep_dispatch_experts"):
        return whole
    if style in ("rowwise", "rowwise_split_input"):
        dim, sections = (None if is_bias else len(shape) - 1), 1
    elif style in ("colwise", "colwise_gather_output"):
        dim, sections = (0 if is_bias else len(shape) - 2), 1
    elif style == "packed_colwise":
        dim, sections = len(shape) - 2, 2
    elif style in ("embedding_rowwise", "grouped_gemm"):
        dim, sections = 0, 1
    else:
        raise AssertionError(style)
    if dim is not None:
        n = shape[dim] // sections
        whole[dim] = np.tile(np.arange(n) < n // 2, sections)
    return whole


def differences(family: str, plan: Mapping[str, str], cut: set[str]) -> set[str]:
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family][0])
    config = flat({**config.to_dict(), "tie_word_embeddings": False})
    table = table_of(LIVE, family) or table_of(HF, family)
    assert table is not None
    sizes = table.sizes_at(config)
    found = set()
    for name, _, pattern, shape in arrays_of(table, {**config, "tie_word_embeddings": False}):
        generic = re.sub(r"\.\d+\.", ".*.", name)
        theirs = placed(plan.get(generic, plan.get(generic.rpartition(".")[0])), name, shape)
        ours = [held(product, None, sizes, cut) for product in pattern.dims]
        if any(not np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            found.add(generic)
    return found


def plan_of(family: str, kind: str) -> dict[str, Any]:
    """Return a plan with the full names of the causal model."""
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family][0])
    text = config.get_text_config()
    prefix = {"gemma3": "model.language_model.", "gpt_neox": "gpt_neox."}.get(family, "model.")
    name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    head = getattr(getattr(transformers, name), f"_{kind}_plan", None) or {}
    own = {k: v for k, v in head.items() if k == "lm_head"}
    return {**{prefix + k: v for k, v in (getattr(text, f"base_model_{kind}_plan") or {}).items()}, **own}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_the_default_layout_differs_from_the_tensor_parallel_plan_where_listed(family: str) -> None:
    plan = plan_of(family, "tp")
    if family in WITHOUT_PLAN:
        assert not plan
        return
    assert differences(family, plan, CUT_BY_TP) == set(DIFFERENCES[family])


@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in WITHOUT_PLAN])
@pytest.mark.filterwarnings("ignore")
def test_the_default_layout_cuts_experts_as_the_expert_parallel_plan_does(family: str) -> None:
    plan = plan_of(family, "ep")
    has_experts = any("expert" in line.dims_of(p) for t in HF if family in t.families for line in t.lines for p in line.parts)
    assert any("experts" in name for name in plan) == has_experts
    assert differences(family, {k: v for k, v in plan.items() if k != "lm_head"}, {"expert"}) == set()


@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in WITHOUT_PLAN])
@pytest.mark.filterwarnings("ignore")
def test_sections_are_in_the_order_of_the_pipeline_plan(family: str) -> None:
    table = table_of(LIVE, family) or table_of(HF, family)
    assert table is not None
    order = list(plan_of(family, "pp"))
    if "lm_head" not in order:  # it is not in the plan of every class
        order.append("lm_head")
    layers = next(i for i, module in enumerate(order) if module.endswith(".layers"))
    for line in table.lines:
        at = next(i for i, module in enumerate(order) if line.name.startswith(module + "."))
        assert line.where == ("first" if at < layers else "layers" if at == layers else "last"), line.name


# --- cases of the collection ------------------------------------------------------------------------------------------


def test_further_prediction_heads_of_fast_llm_have_names_in_hugging_face(tmp_path: Path) -> None:
    """`mtp_llama` of Fast-LLM: blocks behind the last layer, and a norm each behind the model's own."""
    config = {"model_type": "mtp_llama", **WIDE, "attention_bias": True, "mlp_bias": True, "prediction_heads": 3}
    model = naming_module.model_of("hf", config)
    assert model is not None
    weights = {name: ramp(name, model.whole_shape(line)) for name, line, _ in model.arrays()}
    norms = {name for name in weights if "mtp_norms" in name or name == "model.norm.weight"}
    assert norms == {f"model.mtp_norms.{i}.weight" for i in range(3)}
    block = {name.split(".", 3)[3] for name in weights if name.startswith("model.layers.0.")}
    assert {name for name in weights if "mtp_heads" in name} == {f"model.mtp_heads.{i}.{n}" for i in range(2) for n in block}
    write_checkpoint(tmp_path, weights, config)
    theirs = meshload.open(tmp_path).with_names("fast_llm")
    assert shown_parts("fast_llm", "mtp_llama", config) != []
    at, of = "multi_token_prediction.blocks.1.", "model.mtp_heads.1."
    both = [weights[f"{of}self_attn.{m}_proj.weight"] for m in "kv"]
    assert same_bits(np.asarray(theirs[f"{at}mixer.key_value.weight"]), np.concatenate(both))
    assert same_bits(np.asarray(theirs[f"{at}mlp.layer_2.weight"]), weights[f"{of}mlp.down_proj.weight"].T)
    norm = "multi_token_prediction.heads.1.final_norm.weight"
    assert same_bits(np.asarray(theirs[norm]), weights["model.mtp_norms.2.weight"])
    parts = [{(p, i) for p, i in shown_parts(naming, "mtp_llama", config)} for naming in ("hf", "fast_llm")]
    assert parts[0] == parts[1]


def test_fast_llms_own_checkpoint_with_further_heads_is_read_by_its_table() -> None:
    path = Path(__file__).parent / "golden" / "fast_llm" / "layouts" / "mtp_tied_pp2"
    opened = meshload.open(path)
    found = opened.with_names("hf")
    assert meshload.plan(path, mesh="pp=2", rank="all").unexpected == ()
    for i in range(2):
        stored = np.asarray(opened[f"multi_token_prediction.blocks.{i}.mixer.key_value.weight"])
        for part, name in zip(np.split(stored, 2), ("k_proj", "v_proj"), strict=True):
            assert same_bits(np.asarray(found[f"model.mtp_heads.{i}.self_attn.{name}.weight"]), part)
        norm = np.asarray(opened[f"multi_token_prediction.heads.{i}.final_norm.weight"])
        assert same_bits(np.asarray(found[f"model.mtp_norms.{i + 1}.weight"]), norm)
    assert same_bits(np.asarray(found["model.mtp_norms.0.weight"]), np.asarray(opened["head.final_norm.weight"]))
    on_last = meshload.restore(path, mesh="pp=2", rank=1, into="numpy")
    assert {n for n in on_last if "mtp" in n} == {n for n in found if "mtp" in n}


def test_b66_conv1d_weights_are_cut_by_name_and_never_transposed(tmp_path: Path) -> None:
    """Weights of GPT-2 are [in, out], q, k and v in thirds of the columns."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1, "n_positions": 5, "vocab_size": 6}
    config["tie_word_embeddings"] = False
    shapes = shapes_of(table_of(HF, "gpt2"), config)  # type: ignore[arg-type]  # it is there
    at = "transformer.h.0."
    square, tall = at + "attn.c_proj.weight", at + "mlp.c_proj.weight"
    assert (shapes[square], shapes[at + "attn.c_attn.weight"], shapes[tall]) == ((8, 8), (8, 24), (32, 8))
    whole = {name: ramp(name, shape) for name, shape in shapes.items()}
    write_checkpoint(tmp_path, whole, config)
    for rank in range(2):
        mine = meshload.restore(tmp_path, mesh="tp=2", rank=rank, into="numpy")
        columns = [c + 4 * rank for c in (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19)]
        assert same_bits(mine[at + "attn.c_attn.weight"], whole[at + "attn.c_attn.weight"][:, columns])
        assert same_bits(mine[at + "attn.c_attn.bias"], whole[at + "attn.c_attn.bias"][columns])
        assert same_bits(mine[square], whole[square][4 * rank : 4 * rank + 4])
        assert same_bits(mine[at + "attn.c_proj.bias"], whole[at + "attn.c_proj.bias"])
        assert same_bits(mine[at + "mlp.c_fc.weight"], whole[at + "mlp.c_fc.weight"][:, 16 * rank : 16 * rank + 16])
        assert same_bits(mine[tall], whole[tall][16 * rank : 16 * rank + 16])
    theirs = meshload.open(tmp_path).with_names("megatron")
    assert same_bits(np.asarray(theirs["decoder.layers.0.self_attention.linear_proj.weight"]), whole[square].T)
    heads = np.asarray(theirs["decoder.layers.0.self_attention.linear_qkv.weight"]).reshape(4, 3, 2, 8)
    for n, part in enumerate(np.split(whole[at + "attn.c_attn.weight"].T, 3)):
        assert same_bits(heads[:, n], part.reshape(4, 2, 8))


def test_b67_norms_around_zero_are_shifted_once_and_rounded_once(tmp_path: Path) -> None:
    """Of 1 + 2**-10, bfloat16 keeps 1: the shift is exact where float32 is asked for."""
    small, bf16 = np.float32(2**-10), np.dtype(ml_dtypes.bfloat16)
    config = {"model_type": "llama", **WIDE, "num_hidden_layers": 1, "tie_word_embeddings": True, "apply_layernorm_1p": True}
    plain = naming_module.model_of("megatron", config)
    assert plain is not None
    stored = {n: np.full(plain.whole_shape(line), small, bf16) for n, line, _ in plain.arrays() if n not in plain.ties}
    write_checkpoint(tmp_path / "megatron", stored, config)
    opened = meshload.open(tmp_path / "megatron")
    names = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")
    for found, expected in ((opened.with_names("hf"), 1), (meshload.restore(opened, into="numpy"), 1)):
        assert all((np.asarray(found[n]) == expected).all() for n in names)
        assert (np.asarray(found["model.embed_tokens.weight"]) == small).all()
    exact = meshload.restore(opened, into="numpy", dtype="float32")
    assert all((exact[n] == 1 + small).all() and exact[n].dtype == np.float32 for n in names)
    torches = meshload.restore(opened, into="torch", dtype=torch.float32)
    assert all((torches[n] == 1 + 2**-10).all() for n in names)
    for of in (opened, opened.with_names("hf").with_names("native")):
        assert same_bits(np.asarray(of["decoder.final_layernorm.weight"]), stored["decoder.final_layernorm.weight"])
    write_checkpoint(tmp_path / "hf", {n: v for n, v in exact.items() if n != "lm_head.weight"}, config)
    back = meshload.open(tmp_path / "hf").with_names("megatron")
    assert all((np.asarray(array) == small).all() for array in back.values())
    moment = naming_module.moment_step("exp_avg", opened.with_names("hf")["model.norm.weight"].step)
    assert moment is None  # the gradient of a shifted weight is that of the weight


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "qwen3_next"])
def test_b67_norms_that_all_namings_store_less_one_are_shifted_in_none(family: str) -> None:
    for table in tables_of(family):
        assert [line.name for line in table.lines if line.pattern.step is not None] == []


def test_b68_inverse_frequencies_are_neither_needed_nor_unexpected_nor_returned(tmp_path: Path) -> None:
    config = {"model_type": "llama", **WIDE, "num_hidden_layers": 2}
    weights = {n: ramp(n, shape) for n, shape in shapes_of(table_of(HF, "llama"), config).items()}  # type: ignore[arg-type]
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ramp(f"f{i}", (5,)) for i in range(2)}
    write_checkpoint(tmp_path / "without", weights, config)
    write_checkpoint(tmp_path / "with", {**weights, **buffers}, config)
    for path in (tmp_path / "without", tmp_path / "with"):
        found = meshload.restore(path, into="numpy")
        assert set(found) == set(weights)
        assert all(same_bits(found[n], a) for n, a in weights.items())
        assert meshload.plan(path, mesh="tp=2", rank="all").unexpected == ()
        asked = {n: torch.empty(a.shape) for n, a in {**weights, **buffers}.items()}
        if path.name == "without":
            with pytest.raises(MissingArray, match="inv_freq"):
                meshload.restore(path, like=asked)
    live = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).eval()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).eval()
    live.save_pretrained(tmp_path / "live")
    with pytest.warns(meshload.MeshloadWarning, match="inv_freq"):
        meshload.restore(tmp_path / "live", like=empty)
    assert [n for n, b in empty.named_buffers() if not b.is_meta] == []  # not filled, and so not filled with anything


DELTA = """
families toy_next
layer := layers
embed := 3
key_heads := 2
value_heads := 4
width := 2
layers
-   layers.{layer}.in_proj.weight \
    (q key_heads width + k key_heads width + v value_heads width + z value_heads width) embed
"""


def test_b71_unequal_fused_parts_are_each_cut_then_joined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of q 4, k 4, v 8 and z 8, over two ranks, with a table of the user's own."""
    installed = naming_module.tables_of
    toy = {"hf": parse_table(DELTA)}
    monkeypatch.setattr(naming_module, "tables_of", lambda family: toy if family == "toy_next" else installed(family))
    whole = ramp("in_proj", (24, 3))
    write_checkpoint(tmp_path, {"layers.0.in_proj.weight": whole}, {"model_type": "toy_next", "layers": 1})
    layout = meshload.Layout({"key_heads": "tp", "value_heads": "tp"})
    for rank in range(2):
        mine = meshload.restore(tmp_path, mesh="tp=2", rank=rank, layout=layout, into="numpy")["layers.0.in_proj.weight"]
        halves = [np.split(part, 2)[rank] for part in np.split(whole, [4, 8, 16])]
        assert same_bits(mine, np.concatenate(halves))


def test_b71_fused_parts_of_qwen3_next_are_those_that_its_module_takes_apart() -> None:
    config = CONFIGS["qwen3_next"][0]
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_next", **config))
    attention = module.model.layers[0].linear_attn
    table = table_of(HF, "qwen3_next")
    assert table is not None
    sizes = table.sizes_at(config)
    names = ("in_proj_qkvz", "in_proj_ba")
    lines = [next(line for line in table.lines if line.name.endswith(f"{n}.weight")) for n in names]
    rows = [torch.arange(float(getattr(attention, n).out_features)) for n in names]
    theirs = attention.fix_query_key_value_ordering(*(r[None, None] for r in rows))
    ours = []
    for line, values in zip(lines, rows, strict=True):
        for part in line.parts:
            stored = np.repeat(values.numpy()[:, None], sizes["embed"], 1)
            pieces = find(line.pattern, part, piece("m", 0, stored.shape, 4), 0, stored.shape, lambda _, d: sizes[d])
            ours.append(read(pieces, stored, tuple(sizes[d] for d in line.pattern.dims_of(part)))[..., 0].reshape(-1))
    for mine, his in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, his.reshape(-1).numpy())


# --- MaxText ----------------------------------------------------------------------------------------------------------


def test_maxtext_shapes_with_and_without_scanned_layers() -> None:
    table = table_of(MAXTEXT, "llama")
    assert table is not None
    config = {**WIDE, "scan_layers": True}
    scanned = shapes_of(table, config)
    name = "params.decoder.layers.self_attention.query.kernel"
    assert scanned[name] == (24, 3, 4, 10)
    assert scanned["params.decoder.layers.self_attention.out.kernel"] == (4, 3, 10, 24)
    assert scanned["params.decoder.layers.pre_self_attention_layer_norm.scale"] == (24, 3)
    assert scanned["params.decoder.logits_dense.kernel"] == (24, 54)
    assert shapes_of(table, {**config, "param_scan_axis": 1}) == scanned
    assert shapes_of(table, {**config, "param_scan_axis": 0})[name] == (3, 24, 4, 10)
    loose = shapes_of(table, {**config, "scan_layers": False})
    assert loose["params.decoder.layers_2.self_attention.query.kernel"] == (24, 4, 10)
    assert len(loose) == 3 + 3 * 9
    assert not any(".layers." in name for name in loose)
    assert {*loose, *scanned} == set(shapes_of(table, WIDE))
    assert "params.decoder.logits_dense.kernel" not in shapes_of(table, {**config, "tie_word_embeddings": True})


def test_maxtext_experts_stand_before_scanned_layers() -> None:
    for family, block, width in [("mixtral", "MoeBlock_0", 38), ("qwen3_moe", "moe_block", 14)]:
        table = table_of(MAXTEXT, family)
        assert table is not None
        shapes = shapes_of(table, {**SPARSE, "scan_layers": True})
        assert shapes[f"params.decoder.layers.{block}.wi_0"] == (4, 3, 24, width)
        assert shapes[f"params.decoder.layers.{block}.wo"] == (4, 3, width, 24)
        assert shapes[f"params.decoder.layers.{block}.gate.kernel"] == (24, 3, 4)


def values_of(array: np.ndarray, pattern: Pattern, part: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return a part of an array in memory, its dims sorted by name."""
    pieces = find(pattern, part, piece("memory", 0, array.shape, array.itemsize), 0, array.shape, lambda _, d: sizes[d])
    dims = pattern.dims_of(part)
    return np.transpose(read(pieces, array, tuple(sizes[d] for d in dims)), [dims.index(d) for d in sorted(dims)])


def read(pieces: Pieces, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    found, flat_values = np.zeros(shape, array.dtype), array.ravel()
    for offset, start, extent, strides in zip(pieces.offset, pieces.start, pieces.shape, pieces.strides, strict=True):
        index = sum(np.indices(extent)[d] * strides[d] for d in range(len(shape))) + offset
        found[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] = flat_values[index // array.itemsize]
    return found


def line_of(table: Table, part: str, config: Mapping[str, Any]) -> Line:
    values = {**config, **table.sizes_at(config), "layer": 0}
    lines = [x for x in table.lines if part in x.parts and (x.condition is None or evaluate(x.condition, values))]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("part", ["q", "k", "v", "o", "gate", "down", "head"])
@pytest.mark.parametrize(
    ("config", "in_pairs"),
    [
        ({"rope_parameters": {"rope_type": "llama3"}}, True),
        ({"rope_scaling": {"rope_type": "llama3"}}, True),
        ({"rope_type": "llama3.1"}, True),
        ({"rope_type": "default", "rope_scaling": {"rope_type": "llama3"}}, False),
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({}, False),
    ],
)
def test_maxtext_llama_holds_what_its_own_converter_makes(part: str, config: dict[str, Any], in_pairs: bool) -> None:
    """`LLAMA31_MAXTEXT_TO_HF_PARAM_HOOK_FN`: transpose, reshape, and q and k from halves to pairs where MaxText rotates those."""
    config = {**WIDE, **config, "scan_layers": False}
    theirs, ours = table_of(HF, "llama"), table_of(MAXTEXT, "llama")
    assert theirs is not None
    assert ours is not None
    joints = {**theirs.joints, **ours.joints}
    sizes = {**theirs.sizes_at(config), **ours.sizes_at(config)}
    pattern, mine = (refined(line_of(table, part, config).pattern, joints) for table in (theirs, ours))
    shape, shape_of_mine = (shown_shape(p, [part], lambda _, d: sizes[d]) for p in (pattern, mine))
    stored = np.arange(math.prod(shape), dtype="f4").reshape(shape)
    made = stored.T.reshape(shape_of_mine)
    if part in "qk" and in_pairs:
        half = made.shape[-1] // 2
        made = np.stack([made[..., :half], made[..., half:]], axis=-1).reshape(made.shape)
    np.testing.assert_array_equal(values_of(stored, pattern, part, sizes), values_of(made, mine, part, sizes))


def test_maxtext_divides_the_query_kernel_where_the_model_has_no_scale_of_its_own() -> None:
    for table in MAXTEXT:
        for line in table.lines:
            scaled = "q" in line.parts and table.families[0] in ("llama", "mixtral")
            assert line.pattern.step == ("* sqrt(head_dim)" if scaled else None), line.name


# --- quantised --------------------------------------------------------------------------------------------------------


def companions(method: str, quantisation: Mapping[str, Any]) -> dict[str, str]:
    """Return suffix -> pattern by a method's text, numbers filled in."""
    text = next(t for t in quantised.TABLES if method in t.split("\n")[1].partition(" refused ")[0].split()[1:])
    values, found = dict(quantisation), {}
    for line in text.strip().split("\n")[1:]:
        body, _, condition = line.partition(" if ")
        name, _, rest = body.strip().partition(" ")
        if rest.strip().startswith(":="):
            values[name] = evaluate(line.split(":=", 1)[1], values)
        elif not condition or evaluate(condition, values):
            assert name != "refused", line
            assert name not in found, line
            found[name] = re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]), rest.strip())
    return found


def companion_shape(pattern: str, rows: int, columns: int) -> tuple[int, ...]:
    sizes = {"out": rows, "in": columns, "one": 1}
    return tuple(size_of(str(product), sizes) for product in parse(pattern).dims)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), None])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_fp8_companions_are_those_of_the_module_of_transformers(block: tuple[int, int] | None, scheme: str) -> None:
    module_of = importlib.import_module("transformers.integrations.finegrained_fp8").FP8Linear
    module = module_of(300, 200, block_size=block, activation_scheme=scheme)
    there = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name != "bias"}
    lines = companions("fp8", {"weight_block_size": block and list(block), "activation_scheme": scheme})
    assert set(there) <= set(lines)
    assert {name: companion_shape(lines[name], 200, 300) for name in there} == there


def test_awq_packs_outputs_and_gptq_packs_inputs() -> None:
    awq = companions("awq", {"bits": 4, "group_size": 128, "version": "gemm"})
    assert awq == {"qweight": "in out//8", "qzeros": "in/128 out//8", "scales": "in/128 out"}
    gptq = companions("gptq", {"bits": 4, "group_size": 32, "desc_act": False})
    assert gptq == {"qweight": "in//8 out", "qzeros": "in/32 out//8", "scales": "in/32 out", "g_idx": "in"}
    assert companions("gptq", {"bits": 8, "group_size": 32})["qweight"] == "in//4 out"


def test_groups_in_the_order_of_activations_are_on_every_rank() -> None:
    lines = companions("gptq", {"bits": 4, "group_size": 128, "desc_act": True})
    assert (lines["qzeros"], lines["scales"]) == ("in/128@ out//8", "in/128@ out")


def test_a_single_group_is_on_every_rank() -> None:
    lines = companions("gptq", {"bits": 4, "group_size": -1})
    assert (lines["qzeros"], lines["scales"]) == ("one out//8", "one out")


def test_compressed_tensors_pack_inputs_or_keep_the_weight() -> None:
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "symmetric": True, "actorder": None}
    packed = companions("compressed-tensors", {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}})
    assert packed["weight_packed"] == "out in//8"
    assert packed["weight_scale"] == "out in/128"
    assert "weight" not in packed
    weights = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    kept = companions("compressed-tensors", {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}})
    assert (kept["weight"], kept["weight_scale"]) == ("out in", "out one")


def test_channel_scales_of_a_fused_weight_are_cut_part_by_part(tmp_path: Path) -> None:
    config = {**BASE, "model_type": "phi3", "quantization_config": {"quant_method": "fbgemm_fp8"}}
    model = naming_module.model_of("hf", config)
    assert model is not None
    arrays = {name: ramp(name, model.whole_shape(line)) for name, line, _ in model.arrays()}
    name = "model.layers.0.mlp.gate_up_proj.weight"
    arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
    n = arrays[name].shape[0] // 4
    scales = arrays[name + "_scale"] = ramp("scales", (4 * n, 1))
    found = meshload.restore(write_checkpoint(tmp_path, arrays, config), mesh="tp=2", rank=1, into="numpy")
    assert same_bits(found[name + "_scale"], np.concatenate([scales[n : 2 * n], scales[3 * n :]]))


@pytest.mark.parametrize(
    ("method", "quantisation"),
    [
        ("gptq", {"bits": 3}),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}),
        ("awq", {"bits": 4, "version": "gemv"}),
        ("fp8", {"expert_dtype": "fp4"}),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}),
    ],
)
def test_what_no_pattern_says_is_refused_with_a_reason(method: str, quantisation: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="refused"):
        companions(method, quantisation)


def test_every_method_that_transformers_knows_is_described_or_refused() -> None:
    known = {m.value for m in importlib.import_module("transformers.utils.quantization_config").QuantizationMethod}
    heads = [text.strip().split("\n")[0].partition(" refused ")[0].split()[1:] for text in quantised.TABLES]
    listed = [method for head in heads for method in head]
    assert len(set(listed)) == len(listed)
    assert known <= set(listed)
