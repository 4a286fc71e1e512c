"""Tables for Megatron-LM's names: those of its own full model, local layer spec, layers and experts counted from 0 over all.

The formats `megatron` and `megatron_core` give these names, with tensor-parallel shards joined and gate over up. Source:
https://github.com/NVIDIA/Megatron-LM, `megatron/core/models/gpt` and `megatron/core/transformer`. Parts, dims, sizes and
conditions: `models/hf.py`, whose config keys these are.

`linear_qkv` has for each kv head its query heads, its key, its value. The vocabulary is padded to a multiple of
`make_vocab_size_divisible_by * tp`; the rows behind the config's `vocab_size` have no meaning.

`apply_layernorm_1p`, the one key of Megatron's own: all norms store their weight less 1 (zero-centred gamma).
"""

_FIRST = """
heads = kv_heads group
tie output_layer.weight = embedding.word_embeddings.weight if tie_word_embeddings
first
tokens          embedding.word_embeddings.weight                                  vocab~ embed
layers
"""

_NORMS = """
input_norm      decoder.layers.{layer}.input_layernorm.weight                     embed        if not apply_layernorm_1p
input_norm      decoder.layers.{layer}.input_layernorm.weight                     embed | + 1  if apply_layernorm_1p
post_norm       decoder.layers.{layer}.pre_mlp_layernorm.weight                   embed        if not apply_layernorm_1p
post_norm       decoder.layers.{layer}.pre_mlp_layernorm.weight                   embed | + 1  if apply_layernorm_1p
"""

_NORM_BIASES = """
input_norm_bias decoder.layers.{layer}.input_layernorm.bias                       embed
post_norm_bias  decoder.layers.{layer}.pre_mlp_layernorm.bias                     embed
"""

_ATTENTION = """
-               decoder.layers.{layer}.self_attention.linear_qkv.weight           (kv_heads (q group + k + v) head_dim) embed
o               decoder.layers.{layer}.self_attention.linear_proj.weight          embed (heads head_dim)
"""

_HEAD_NORMS = """
q_norm          decoder.layers.{layer}.self_attention.q_layernorm.weight          head_dim        if not apply_layernorm_1p
q_norm          decoder.layers.{layer}.self_attention.q_layernorm.weight          head_dim | + 1  if apply_layernorm_1p
k_norm          decoder.layers.{layer}.self_attention.k_layernorm.weight          head_dim        if not apply_layernorm_1p
k_norm          decoder.layers.{layer}.self_attention.k_layernorm.weight          head_dim | + 1  if apply_layernorm_1p
"""

_ATTENTION_BIAS = """
-               decoder.layers.{layer}.self_attention.linear_qkv.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim) \
    if attention_bias
o_bias          decoder.layers.{layer}.self_attention.linear_proj.bias            embed        if attention_bias
"""

_MLP = """
-               decoder.layers.{layer}.mlp.linear_fc1.weight                      ((gate + up) ffn) embed
down            decoder.layers.{layer}.mlp.linear_fc2.weight                      embed ffn
"""

_PLAIN_MLP = """
up              decoder.layers.{layer}.mlp.linear_fc1.weight                      ffn embed
up_bias         decoder.layers.{layer}.mlp.linear_fc1.bias                        ffn
down            decoder.layers.{layer}.mlp.linear_fc2.weight                      embed ffn
down_bias       decoder.layers.{layer}.mlp.linear_fc2.bias                        embed
"""

_LAST = """
last
norm            decoder.final_layernorm.weight                                    embed        if not apply_layernorm_1p
norm            decoder.final_layernorm.weight                                    embed | + 1  if apply_layernorm_1p
head            output_layer.weight                                               vocab~ embed
"""

_LLAMA = (
    """
families llama
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + """
-               decoder.layers.{layer}.mlp.linear_fc1.bias                        ((gate_bias + up_bias) ffn)  if mlp_bias
down_bias       decoder.layers.{layer}.mlp.linear_fc2.bias                        embed                        if mlp_bias
"""
    + _LAST
)

_MISTRAL = (
    """
families mistral
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + _MLP
    + _LAST
)

_QWEN2 = (
    """
families qwen2
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + """
-               decoder.layers.{layer}.self_attention.linear_qkv.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim)
"""
    + _MLP
    + _LAST
)

_QWEN3 = (
    """
families qwen3
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _HEAD_NORMS
    + _MLP
    + _LAST
)

_MIXTRAL = (
    """
families mixtral
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + """
router          decoder.layers.{layer}.mlp.router.weight                                      routes embed
-               decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight \
    ((expert_gate + expert_up) ffn) embed
expert_down     decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight   embed ffn
"""
    + _LAST
)

_QWEN3_MOE = (
    """
families qwen3_moe
"""
    + _FIRST
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _HEAD_NORMS
    + """
-               decoder.layers.{layer}.mlp.linear_fc1.weight                                  ((gate + up) ffn) embed \
    if layer in mlp_only_layers or (layer + 1) % sparse_step
down            decoder.layers.{layer}.mlp.linear_fc2.weight                                  embed ffn \
    if layer in mlp_only_layers or (layer + 1) % sparse_step
router          decoder.layers.{layer}.mlp.router.weight                                      routes embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
-               decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight \
    ((expert_gate + expert_up) moe_ffn) embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
expert_down     decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight   embed moe_ffn \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
"""
    + _LAST
)

_BIASES = """
-               decoder.layers.{layer}.self_attention.linear_qkv.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim) \
    if attention_bias != False
o_bias          decoder.layers.{layer}.self_attention.linear_proj.bias            embed        if attention_bias != False
"""

_NORM_BIAS = """
norm_bias       decoder.final_layernorm.bias                                      embed
"""

_GPT_NEOX = (
    """
families gpt_neox
"""
    + _FIRST
    + _NORMS
    + _NORM_BIASES
    + _ATTENTION
    + _BIASES
    + _PLAIN_MLP
    + _LAST
    + _NORM_BIAS
)

_GPT2 = (
    """
families gpt2
heads = kv_heads group
tie output_layer.weight = embedding.word_embeddings.weight if tie_word_embeddings != False
first
tokens          embedding.word_embeddings.weight                                  vocab~ embed
positions       embedding.position_embeddings.weight                              positions embed
layers
"""
    + _NORMS
    + _NORM_BIASES
    + _ATTENTION
    + _BIASES
    + _PLAIN_MLP
    + _LAST
    + _NORM_BIAS
)

TABLES: tuple[str, ...] = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE, _GPT_NEOX, _GPT2)
"""One table per family of models, in the language of `meshload.pattern`."""
