"""Tables for MaxText's parameter trees, joined by dots, as its Orbax checkpoints have them.

Source: https://github.com/AI-Hypercomputer/maxtext, `checkpoint_conversion/utils/param_mapping.py` and `layers/`. Kernels are
[in, out], with heads and head_dim as dims of their own. The tree has no config: the keys are those of the Hugging Face config,
and three of MaxText's own.

`scan_layers`: false for one subtree per layer (`layers_0`), true, MaxText's default, for stacked arrays whose layers are dim
`param_scan_axis` (1 by default; 0 and 1 are known here). Both spellings are known while `scan_layers` is not given.

`rope_type`: with `llama3.1` MaxText rotates adjacent pairs of a head's elements, else the two halves, as Hugging Face always does.
If it is not given, the config's own rope type decides; that of Llama 3.1 and later is `llama3`. With neither, reading asks.
Models without a scale of their own for queries (Llama, Mistral, Mixtral) store the query kernel divided by sqrt(head_dim).

A tied head has no array. The tree begins with `params`, which a training state doubles.
"""

_SIZES = """
heads = kv_heads group
prefix params.
spelling decoder.layers.{}. decoder.layers_{}.
spelling decoder.dense_layer_{}. decoder.layers_{}.
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_key_value_heads or num_attention_heads
group := num_attention_heads // kv_heads
ffn := intermediate_size
per_layer := 0 if scan_layers else 1
scan_0 := 1 if scan_layers != False and param_scan_axis == 0 else 0
scan_1 := 1 if scan_layers != False and param_scan_axis in (None, 1) else 0
"""

_HEAD_DIM = """
head_dim := head_dim or hidden_size // num_attention_heads
"""

_NORMS = """
layers
input_norm   params.decoder.layers_{layer}.pre_self_attention_layer_norm.scale    embed                   if per_layer
input_norm   params.decoder.layers.pre_self_attention_layer_norm.scale            embed layer             if scan_1
input_norm   params.decoder.layers.pre_self_attention_layer_norm.scale            layer embed             if scan_0
post_norm    params.decoder.layers_{layer}.post_self_attention_layer_norm.scale   embed                   if per_layer
post_norm    params.decoder.layers.post_self_attention_layer_norm.scale           embed layer             if scan_1
post_norm    params.decoder.layers.post_self_attention_layer_norm.scale           layer embed             if scan_0
"""

_VALUE_AND_OUT = """
v            params.decoder.layers_{layer}.self_attention.value.kernel            embed kv_heads head_dim        if per_layer
v            params.decoder.layers.self_attention.value.kernel                    embed layer kv_heads head_dim  if scan_1
v            params.decoder.layers.self_attention.value.kernel                    layer embed kv_heads head_dim  if scan_0
o            params.decoder.layers_{layer}.self_attention.out.kernel              heads head_dim embed           if per_layer
o            params.decoder.layers.self_attention.out.kernel                      heads layer head_dim embed     if scan_1
o            params.decoder.layers.self_attention.out.kernel                      layer heads head_dim embed     if scan_0
"""

_QUERY_AND_KEY = """
q            params.decoder.layers_{layer}.self_attention.query.kernel            embed heads head_dim           if per_layer
q            params.decoder.layers.self_attention.query.kernel                    embed layer heads head_dim     if scan_1
q            params.decoder.layers.self_attention.query.kernel                    layer embed heads head_dim     if scan_0
k            params.decoder.layers_{layer}.self_attention.key.kernel              embed kv_heads head_dim        if per_layer
k            params.decoder.layers.self_attention.key.kernel                      embed layer kv_heads head_dim  if scan_1
k            params.decoder.layers.self_attention.key.kernel                      layer embed kv_heads head_dim  if scan_0
"""

# `side` says which half of a head Hugging Face has an element in; `rot` counts the pairs.
_PAIRS = """
head_dim = side rot
side := 2 if head_dim % 2 == 0 else 1
rot := head_dim // side
rope := rope_type or rope_parameters["rope_type"] or rope_scaling["rope_type"] or rope_scaling["type"]
halves := 1 if rope in ("default", "linear", "dynamic", "yarn", "longrope", "proportional") else None
pairs := 1 if rope in ("llama3.1", "llama3") else 0 if halves else None
ask pairs how heads are rotated is not said; give MaxText's rope_type in config=: 'llama3.1' (pairs) or 'default' (halves)
"""

_SCALED_QUERY_AND_KEY = """
q   params.decoder.layers_{layer}.self_attention.query.kernel  embed heads head_dim | * sqrt(head_dim)   if per_layer and not pairs
q   params.decoder.layers.self_attention.query.kernel  embed layer heads head_dim | * sqrt(head_dim)   if scan_1 and not pairs
q   params.decoder.layers.self_attention.query.kernel  layer embed heads head_dim | * sqrt(head_dim)   if scan_0 and not pairs
q   params.decoder.layers_{layer}.self_attention.query.kernel  embed heads (rot side) | * sqrt(head_dim)   if per_layer and pairs
q   params.decoder.layers.self_attention.query.kernel  embed layer heads (rot side) | * sqrt(head_dim)   if scan_1 and pairs
q   params.decoder.layers.self_attention.query.kernel  layer embed heads (rot side) | * sqrt(head_dim)   if scan_0 and pairs
k   params.decoder.layers_{layer}.self_attention.key.kernel    embed kv_heads head_dim   if per_layer and not pairs
k   params.decoder.layers.self_attention.key.kernel            embed layer kv_heads head_dim   if scan_1 and not pairs
k   params.decoder.layers.self_attention.key.kernel            layer embed kv_heads head_dim   if scan_0 and not pairs
k   params.decoder.layers_{layer}.self_attention.key.kernel    embed kv_heads (rot side)   if per_layer and pairs
k   params.decoder.layers.self_attention.key.kernel            embed layer kv_heads (rot side)   if scan_1 and pairs
k   params.decoder.layers.self_attention.key.kernel            layer embed kv_heads (rot side)   if scan_0 and pairs
"""

_MLP = """
gate         params.decoder.layers_{layer}.mlp.wi_0.kernel                        embed ffn               if per_layer
gate         params.decoder.layers.mlp.wi_0.kernel                                embed layer ffn         if scan_1
gate         params.decoder.layers.mlp.wi_0.kernel                                layer embed ffn         if scan_0
up           params.decoder.layers_{layer}.mlp.wi_1.kernel                        embed ffn               if per_layer
up           params.decoder.layers.mlp.wi_1.kernel                                embed layer ffn         if scan_1
up           params.decoder.layers.mlp.wi_1.kernel                                layer embed ffn         if scan_0
down         params.decoder.layers_{layer}.mlp.wo.kernel                          ffn embed               if per_layer
down         params.decoder.layers.mlp.wo.kernel                                  ffn layer embed         if scan_1
down         params.decoder.layers.mlp.wo.kernel                                  layer ffn embed         if scan_0
"""

_ENDS = """
first
tokens       params.token_embedder.embedding                                      vocab embed
last
norm         params.decoder.decoder_norm.scale                                    embed
head         params.decoder.logits_dense.kernel                                   embed vocab             if not tie_word_embeddings
"""

# Qwen's vocabulary may be padded.
_PADDED_ENDS = """
first
tokens       params.token_embedder.embedding                                      vocab~ embed
last
norm         params.decoder.decoder_norm.scale                                    embed
head         params.decoder.logits_dense.kernel                                   embed vocab~            if not tie_word_embeddings
"""

_LLAMA = (
    """
families llama mistral
"""
    + _SIZES
    + _HEAD_DIM
    + _PAIRS
    + _NORMS
    + _SCALED_QUERY_AND_KEY
    + _VALUE_AND_OUT
    + _MLP
    + _ENDS
)

_MIXTRAL = (
    """
families mixtral
expert := num_local_experts or num_experts
routes := expert
"""
    + _SIZES
    + _HEAD_DIM
    + _PAIRS
    + _NORMS
    + _SCALED_QUERY_AND_KEY
    + _VALUE_AND_OUT
    + """
router       params.decoder.layers_{layer}.MoeBlock_0.gate.kernel                 embed routes            if per_layer
router       params.decoder.layers.MoeBlock_0.gate.kernel                         embed layer routes      if scan_1
router       params.decoder.layers.MoeBlock_0.gate.kernel                         layer embed routes      if scan_0
expert_gate  params.decoder.layers_{layer}.MoeBlock_0.wi_0                        expert embed ffn        if per_layer
expert_gate  params.decoder.layers.MoeBlock_0.wi_0                                expert layer embed ffn  if scan_1
expert_gate  params.decoder.layers.MoeBlock_0.wi_0                                layer expert embed ffn  if scan_0
expert_up    params.decoder.layers_{layer}.MoeBlock_0.wi_1                        expert embed ffn        if per_layer
expert_up    params.decoder.layers.MoeBlock_0.wi_1                                expert layer embed ffn  if scan_1
expert_up    params.decoder.layers.MoeBlock_0.wi_1                                layer expert embed ffn  if scan_0
expert_down  params.decoder.layers_{layer}.MoeBlock_0.wo                          expert ffn embed        if per_layer
expert_down  params.decoder.layers.MoeBlock_0.wo                                  expert layer ffn embed  if scan_1
expert_down  params.decoder.layers.MoeBlock_0.wo                                  layer expert ffn embed  if scan_0
"""
    + _ENDS
)

_QWEN2 = (
    """
families qwen2
"""
    + _SIZES
    + _HEAD_DIM
    + _NORMS
    + _QUERY_AND_KEY
    + _VALUE_AND_OUT
    + """
q_bias       params.decoder.layers_{layer}.self_attention.query.bias              heads head_dim           if per_layer
q_bias       params.decoder.layers.self_attention.query.bias                      heads layer head_dim     if scan_1
q_bias       params.decoder.layers.self_attention.query.bias                      layer heads head_dim     if scan_0
k_bias       params.decoder.layers_{layer}.self_attention.key.bias                kv_heads head_dim        if per_layer
k_bias       params.decoder.layers.self_attention.key.bias                        kv_heads layer head_dim  if scan_1
k_bias       params.decoder.layers.self_attention.key.bias                        layer kv_heads head_dim  if scan_0
v_bias       params.decoder.layers_{layer}.self_attention.value.bias              kv_heads head_dim        if per_layer
v_bias       params.decoder.layers.self_attention.value.bias                      kv_heads layer head_dim  if scan_1
v_bias       params.decoder.layers.self_attention.value.bias                      layer kv_heads head_dim  if scan_0
"""
    + _MLP
    + _PADDED_ENDS
)

_HEAD_NORMS = """
q_norm       params.decoder.layers_{layer}.self_attention.query_norm.scale        head_dim                if per_layer
q_norm       params.decoder.layers.self_attention.query_norm.scale                head_dim layer          if scan_1
q_norm       params.decoder.layers.self_attention.query_norm.scale                layer head_dim          if scan_0
k_norm       params.decoder.layers_{layer}.self_attention.key_norm.scale          head_dim                if per_layer
k_norm       params.decoder.layers.self_attention.key_norm.scale                  head_dim layer          if scan_1
k_norm       params.decoder.layers.self_attention.key_norm.scale                  layer head_dim          if scan_0
"""

_QWEN3 = (
    """
families qwen3
head_dim := head_dim or 128
"""
    + _SIZES
    + _NORMS
    + _QUERY_AND_KEY
    + _VALUE_AND_OUT
    + _HEAD_NORMS
    + _MLP
    + _PADDED_ENDS
)

_QWEN3_MOE = (
    """
families qwen3_moe
expert := num_local_experts if num_experts == None else num_experts
routes := expert
moe_ffn := moe_intermediate_size
"""
    + _SIZES
    + _HEAD_DIM
    + _NORMS
    + _QUERY_AND_KEY
    + _VALUE_AND_OUT
    + _HEAD_NORMS
    + """
router       params.decoder.layers_{layer}.moe_block.gate.kernel                  embed routes                if per_layer
router       params.decoder.layers.moe_block.gate.kernel                          embed layer routes          if scan_1
router       params.decoder.layers.moe_block.gate.kernel                          layer embed routes          if scan_0
expert_gate  params.decoder.layers_{layer}.moe_block.wi_0                         expert embed moe_ffn        if per_layer
expert_gate  params.decoder.layers.moe_block.wi_0                                 expert layer embed moe_ffn  if scan_1
expert_gate  params.decoder.layers.moe_block.wi_0                                 layer expert embed moe_ffn  if scan_0
expert_up    params.decoder.layers_{layer}.moe_block.wi_1                         expert embed moe_ffn        if per_layer
expert_up    params.decoder.layers.moe_block.wi_1                                 expert layer embed moe_ffn  if scan_1
expert_up    params.decoder.layers.moe_block.wi_1                                 layer expert embed moe_ffn  if scan_0
expert_down  params.decoder.layers_{layer}.moe_block.wo                           expert moe_ffn embed        if per_layer
expert_down  params.decoder.layers.moe_block.wo                                   expert layer moe_ffn embed  if scan_1
expert_down  params.decoder.layers.moe_block.wo                                   layer expert moe_ffn embed  if scan_0
"""
    + _PADDED_ENDS
)

TABLES: tuple[str, ...] = (_LLAMA, _MIXTRAL, _QWEN2, _QWEN3, _QWEN3_MOE)
"""One table per family of models, in the language of `meshload.pattern`."""
