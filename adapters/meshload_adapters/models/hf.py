"""Tables for the names that `save_pretrained` writes to disk: Hugging Face's, which are also the canonical ones.

The truth is in the modeling files of each family, https://github.com/huggingface/transformers/tree/main/src/transformers/models.
A name on disk is not always one of the live module (those are in `models/transformers.py`): Mixtral's experts stay
`block_sparse_moe.experts.0.w1.weight`, while the module of transformers 5 holds one fused `mlp.experts.gate_up_proj`.

Attention has `heads = kv_heads group` query heads, also where `group` is 1, so that q, k and v have the same dims in all families.
A router counts its experts as `routes`, which no layout cuts: each rank needs all of its output. Experts whose width has a key of
its own in the config are `moe_ffn` wide, others `ffn`. Biases added after a sum over ranks (`o_bias`, `down_bias`) have `embed`
alone, so they stay whole. Where a config lacks a key and the class's default is not plain, the default stands here.

Some sizes are no dim's, but serve the conditions: `moe_layer`, `sparse_step`, `norms`.
"""

# --- Llama and what is spelled like it --------------------------------------------------------------------------------

_SIZES = """
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_key_value_heads or num_attention_heads
group := num_attention_heads // kv_heads
ffn := intermediate_size
prefix model.
ignore *.rotary_emb.inv_freq
"""

_HEAD_DIM = """
head_dim := head_dim or hidden_size // num_attention_heads
"""

_TIED_IF_SAID = """
tie lm_head.weight = model.embed_tokens.weight if tie_word_embeddings
"""

_TIED_UNLESS_DENIED = """
tie lm_head.weight = model.embed_tokens.weight if tie_word_embeddings != False
"""

_TOKENS = """
first
tokens          model.embed_tokens.weight                                     vocab embed
layers
"""

_NORMS = """
input_norm      model.layers.{layer}.input_layernorm.weight                   embed
post_norm       model.layers.{layer}.post_attention_layernorm.weight          embed
"""

_ATTENTION = """
q               model.layers.{layer}.self_attn.q_proj.weight                  (heads head_dim) embed
k               model.layers.{layer}.self_attn.k_proj.weight                  (kv_heads head_dim) embed
v               model.layers.{layer}.self_attn.v_proj.weight                  (kv_heads head_dim) embed
o               model.layers.{layer}.self_attn.o_proj.weight                  embed (heads head_dim)
"""

_ATTENTION_BIAS = """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)      if attention_bias
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)   if attention_bias
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)   if attention_bias
o_bias          model.layers.{layer}.self_attn.o_proj.bias                    embed                 if attention_bias
"""

_HEAD_NORMS = """
q_norm          model.layers.{layer}.self_attn.q_norm.weight                  head_dim
k_norm          model.layers.{layer}.self_attn.k_norm.weight                  head_dim
"""

_MLP = """
gate            model.layers.{layer}.mlp.gate_proj.weight                     ffn embed
up              model.layers.{layer}.mlp.up_proj.weight                       ffn embed
down            model.layers.{layer}.mlp.down_proj.weight                     embed ffn
"""

_MLP_BIAS = """
gate_bias       model.layers.{layer}.mlp.gate_proj.bias                       ffn                   if mlp_bias
up_bias         model.layers.{layer}.mlp.up_proj.bias                         ffn                   if mlp_bias
down_bias       model.layers.{layer}.mlp.down_proj.bias                       embed                 if mlp_bias
"""

_LAST = """
last
norm            model.norm.weight                                             embed
head            lm_head.weight                                                vocab embed
"""

_LLAMA = (
    """
families llama diffusion_llama
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _MLP_BIAS
    + _LAST
)

# Fast-LLM's Llama with blocks and norms behind the last layer that predict further tokens; the first norm is the model's own.
_MTP_LLAMA = (
    """
families mtp_llama
mtp := (prediction_heads or 1) - 1
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _MLP_BIAS
    + """
last
norm            model.mtp_norms.0.weight                                      embed
mtp_input_norm  model.mtp_heads.{mtp}.input_layernorm.weight                  embed
mtp_post_norm   model.mtp_heads.{mtp}.post_attention_layernorm.weight         embed
mtp_q           model.mtp_heads.{mtp}.self_attn.q_proj.weight                 (heads head_dim) embed
mtp_k           model.mtp_heads.{mtp}.self_attn.k_proj.weight                 (kv_heads head_dim) embed
mtp_v           model.mtp_heads.{mtp}.self_attn.v_proj.weight                 (kv_heads head_dim) embed
mtp_o           model.mtp_heads.{mtp}.self_attn.o_proj.weight                 embed (heads head_dim)
mtp_q_bias      model.mtp_heads.{mtp}.self_attn.q_proj.bias                   (heads head_dim)      if attention_bias
mtp_k_bias      model.mtp_heads.{mtp}.self_attn.k_proj.bias                   (kv_heads head_dim)   if attention_bias
mtp_v_bias      model.mtp_heads.{mtp}.self_attn.v_proj.bias                   (kv_heads head_dim)   if attention_bias
mtp_o_bias      model.mtp_heads.{mtp}.self_attn.o_proj.bias                   embed                 if attention_bias
mtp_gate        model.mtp_heads.{mtp}.mlp.gate_proj.weight                    ffn embed
mtp_up          model.mtp_heads.{mtp}.mlp.up_proj.weight                      ffn embed
mtp_down        model.mtp_heads.{mtp}.mlp.down_proj.weight                    embed ffn
mtp_gate_bias   model.mtp_heads.{mtp}.mlp.gate_proj.bias                      ffn                   if mlp_bias
mtp_up_bias     model.mtp_heads.{mtp}.mlp.up_proj.bias                        ffn                   if mlp_bias
mtp_down_bias   model.mtp_heads.{mtp}.mlp.down_proj.bias                      embed                 if mlp_bias
mtp_norm        model.mtp_norms.{mtp+1}.weight                                embed
head            lm_head.weight                                                vocab embed
"""
)

_MISTRAL = (
    """
families mistral
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _MLP
    + _LAST
)

_QWEN2 = (
    """
families qwen2 dream
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)
"""
    + _MLP
    + _LAST
)

_QWEN3 = (
    """
families qwen3
head_dim := head_dim or 128
"""
    + _SIZES
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _HEAD_NORMS
    + _MLP
    + _LAST
)

_GEMMA = (
    """
families gemma
head_dim := head_dim or 256
"""
    + _SIZES
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _LAST
)

_FFN_NORMS = """
pre_ffn_norm    model.layers.{layer}.pre_feedforward_layernorm.weight         embed
post_ffn_norm   model.layers.{layer}.post_feedforward_layernorm.weight        embed
"""

_GEMMA2 = (
    """
families gemma2
head_dim := head_dim or 256
"""
    + _SIZES
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + _NORMS
    + _FFN_NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _LAST
)

# The published configs of Gemma 3 leave out what equals its class's defaults.
_GEMMA3_SIZES = """
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size or 262208
kv_heads := num_key_value_heads or 4
group := (num_attention_heads or 8) // kv_heads
head_dim := head_dim or 256
ffn := intermediate_size
"""

_GEMMA3_TEXT = (
    """
families gemma3_text
prefix model.
"""
    + _GEMMA3_SIZES
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + _NORMS
    + _FFN_NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _HEAD_NORMS
    + _MLP
    + _LAST
)

# The text part of the multimodal model; its vision tower and projector have no table.
_GEMMA3 = (
    """
families gemma3
prefix language_model.model. language_model.
tie language_model.lm_head.weight = language_model.model.embed_tokens.weight if tie_word_embeddings != False
"""
    + _GEMMA3_SIZES
    + """
first
tokens          language_model.model.embed_tokens.weight                              vocab embed
layers
input_norm      language_model.model.layers.{layer}.input_layernorm.weight            embed
post_norm       language_model.model.layers.{layer}.post_attention_layernorm.weight   embed
pre_ffn_norm    language_model.model.layers.{layer}.pre_feedforward_layernorm.weight  embed
post_ffn_norm   language_model.model.layers.{layer}.post_feedforward_layernorm.weight embed
q               language_model.model.layers.{layer}.self_attn.q_proj.weight           (heads head_dim) embed
k               language_model.model.layers.{layer}.self_attn.k_proj.weight           (kv_heads head_dim) embed
v               language_model.model.layers.{layer}.self_attn.v_proj.weight           (kv_heads head_dim) embed
o               language_model.model.layers.{layer}.self_attn.o_proj.weight           embed (heads head_dim)
q_bias          language_model.model.layers.{layer}.self_attn.q_proj.bias             (heads head_dim)      if attention_bias
k_bias          language_model.model.layers.{layer}.self_attn.k_proj.bias             (kv_heads head_dim)   if attention_bias
v_bias          language_model.model.layers.{layer}.self_attn.v_proj.bias             (kv_heads head_dim)   if attention_bias
o_bias          language_model.model.layers.{layer}.self_attn.o_proj.bias             embed                 if attention_bias
q_norm          language_model.model.layers.{layer}.self_attn.q_norm.weight           head_dim
k_norm          language_model.model.layers.{layer}.self_attn.k_norm.weight           head_dim
gate            language_model.model.layers.{layer}.mlp.gate_proj.weight              ffn embed
up              language_model.model.layers.{layer}.mlp.up_proj.weight                ffn embed
down            language_model.model.layers.{layer}.mlp.down_proj.weight              embed ffn
last
norm            language_model.model.norm.weight                                      embed
head            language_model.lm_head.weight                                         vocab embed
"""
)

_PHI3 = (
    """
families phi3
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + """
-               model.layers.{layer}.self_attn.qkv_proj.weight \
    ((q heads + k kv_heads + v kv_heads) head_dim) embed
o               model.layers.{layer}.self_attn.o_proj.weight                  embed (heads head_dim)
-               model.layers.{layer}.mlp.gate_up_proj.weight                  ((gate + up) ffn) embed
down            model.layers.{layer}.mlp.down_proj.weight                     embed ffn
"""
    + _LAST
)

# One norm before attention and MLP, which run side by side; layer norms without biases.
_COHERE = (
    """
families cohere
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + """
input_norm      model.layers.{layer}.input_layernorm.weight                   embed
q_norm          model.layers.{layer}.self_attn.q_norm.weight                  heads head_dim        if use_qk_norm
k_norm          model.layers.{layer}.self_attn.k_norm.weight                  kv_heads head_dim     if use_qk_norm
"""
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _LAST
)

_COHERE2 = (
    """
families cohere2
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + """
input_norm      model.layers.{layer}.input_layernorm.weight                   embed
"""
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _LAST
)

# The norms of q and k go over all heads at once; each rank holds the part that scales its own.
_OLMO2 = (
    """
families olmo2
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + """
post_norm       model.layers.{layer}.post_attention_layernorm.weight          embed
post_ffn_norm   model.layers.{layer}.post_feedforward_layernorm.weight        embed
q_norm          model.layers.{layer}.self_attn.q_norm.weight                  (heads head_dim)
k_norm          model.layers.{layer}.self_attn.k_norm.weight                  (kv_heads head_dim)
"""
    + _ATTENTION
    + _ATTENTION_BIAS
    + _MLP
    + _LAST
)

_STARCODER2 = (
    """
families starcoder2
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_UNLESS_DENIED
    + _TOKENS
    + _NORMS
    + """
input_norm_bias model.layers.{layer}.input_layernorm.bias                     embed
post_norm_bias  model.layers.{layer}.post_attention_layernorm.bias            embed
"""
    + _ATTENTION
    + """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)      if use_bias != False
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)   if use_bias != False
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)   if use_bias != False
o_bias          model.layers.{layer}.self_attn.o_proj.bias                    embed                 if use_bias != False
up              model.layers.{layer}.mlp.c_fc.weight                          ffn embed
down            model.layers.{layer}.mlp.c_proj.weight                        embed ffn
up_bias         model.layers.{layer}.mlp.c_fc.bias                            ffn                   if use_bias != False
down_bias       model.layers.{layer}.mlp.c_proj.bias                          embed                 if use_bias != False
"""
    + _LAST
    + """
norm_bias       model.norm.bias                                               embed
"""
)

# --- experts ----------------------------------------------------------------------------------------------------------

_MIXTRAL = (
    """
families mixtral
expert := num_local_experts or num_experts
routes := expert
"""
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + """
router          model.layers.{layer}.block_sparse_moe.gate.weight                    routes embed
expert_gate     model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight     ffn embed
expert_up       model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight     ffn embed
expert_down     model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight     embed ffn
"""
    + _LAST
)

# A layer is sparse where it is not listed as dense and the step divides its number, counted from 1. Without experts none is.
_QWEN_DENSE = """
gate            model.layers.{layer}.mlp.gate_proj.weight  ffn embed  if layer in mlp_only_layers or (layer + 1) % sparse_step
up              model.layers.{layer}.mlp.up_proj.weight    ffn embed  if layer in mlp_only_layers or (layer + 1) % sparse_step
down            model.layers.{layer}.mlp.down_proj.weight  embed ffn  if layer in mlp_only_layers or (layer + 1) % sparse_step
"""

_QWEN_EXPERTS = """
router          model.layers.{layer}.mlp.gate.weight                        routes embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
expert_gate     model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight  moe_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
expert_up       model.layers.{layer}.mlp.experts.{expert}.up_proj.weight    moe_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
expert_down     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  embed moe_ffn \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
"""

_QWEN_SHARED = """
shared_gate     model.layers.{layer}.mlp.shared_expert.gate_proj.weight  shared_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_up       model.layers.{layer}.mlp.shared_expert.up_proj.weight    shared_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_down     model.layers.{layer}.mlp.shared_expert.down_proj.weight  embed shared_ffn \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_router   model.layers.{layer}.mlp.shared_expert_gate.weight       one embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
"""

_QWEN_EXPERT_SIZES = """
expert := num_local_experts if num_experts == None else num_experts
routes := expert
moe_ffn := moe_intermediate_size
sparse_step := (decoder_sparse_step or 1) if expert else num_hidden_layers + 1
"""

_QWEN2_MOE = (
    """
families qwen2_moe
shared_ffn := shared_expert_intermediate_size
one := 1
"""
    + _QWEN_EXPERT_SIZES
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)      if qkv_bias != False
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)   if qkv_bias != False
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)   if qkv_bias != False
"""
    + _QWEN_DENSE
    + _QWEN_EXPERTS
    + _QWEN_SHARED
    + _LAST
)

_QWEN3_MOE = (
    """
families qwen3_moe
"""
    + _QWEN_EXPERT_SIZES
    + _SIZES
    + _HEAD_DIM
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + _ATTENTION_BIAS
    + _HEAD_NORMS
    + _QWEN_DENSE
    + _QWEN_EXPERTS
    + _LAST
)

# Most layers have linear attention (a gated delta rule), others full attention, whose q has a gate beside each head: as
# `layer_types` says, or in published configs `full_attention_interval`. The fused projections of linear attention have all parts
# per key head, with `linear_group` heads of values for each. `mtp` (multi-token prediction) is no part of Hugging Face's model.
_QWEN3_NEXT_ATTENTION = """
-               model.layers.{layer}.self_attn.q_proj.weight            (heads (q + q_gate) head_dim) embed      if full
k               model.layers.{layer}.self_attn.k_proj.weight            (kv_heads head_dim) embed                if full
v               model.layers.{layer}.self_attn.v_proj.weight            (kv_heads head_dim) embed                if full
o               model.layers.{layer}.self_attn.o_proj.weight            embed (heads head_dim)                   if full
q_norm          model.layers.{layer}.self_attn.q_norm.weight            head_dim                                 if full
k_norm          model.layers.{layer}.self_attn.k_norm.weight            head_dim                                 if full
-               model.layers.{layer}.linear_attn.in_proj_qkvz.weight \
    (linear_heads (linear_q linear_key + linear_k linear_key \
    + linear_v linear_group linear_value + linear_z linear_group linear_value)) embed                            if linear
-               model.layers.{layer}.linear_attn.in_proj_ba.weight      (linear_heads (linear_b + linear_a) linear_group) embed \
    if linear
-               model.layers.{layer}.linear_attn.conv1d.weight \
    (conv_q linear_heads linear_key + conv_k linear_heads linear_key + conv_v linear_heads linear_group linear_value) one conv \
    if linear
linear_dt       model.layers.{layer}.linear_attn.dt_bias                (linear_heads linear_group)              if linear
linear_decay    model.layers.{layer}.linear_attn.A_log                  (linear_heads linear_group)              if linear
linear_norm     model.layers.{layer}.linear_attn.norm.weight            linear_value                             if linear
linear_o        model.layers.{layer}.linear_attn.out_proj.weight        embed (linear_heads linear_group linear_value) \
    if linear
""".replace(
    " if full",
    """ if layer_types[layer] == "full_attention" \
    or not layer_types and (layer + 1) % (full_attention_interval or 4) == 0""",
).replace(
    " if linear",
    """ if layer_types[layer] == "linear_attention" \
    or not layer_types and (layer + 1) % (full_attention_interval or 4)""",
)

_QWEN3_NEXT_SIZES = """
linear_heads := linear_num_key_heads
linear_group := linear_num_value_heads // linear_num_key_heads
linear_key := linear_key_head_dim
linear_value := linear_value_head_dim
conv := linear_conv_kernel_dim
shared_ffn := shared_expert_intermediate_size
one := 1
ignore mtp.*
"""

_QWEN3_NEXT = (
    """
families qwen3_next
head_dim := head_dim or 256
"""
    + _QWEN3_NEXT_SIZES
    + _QWEN_EXPERT_SIZES
    + _SIZES
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _QWEN3_NEXT_ATTENTION
    + _QWEN_DENSE
    + _QWEN_EXPERTS
    + _QWEN_SHARED
    + _LAST
)

# Multi-head latent attention: q, and k with v, come from narrow latents that every rank holds whole. `head_dim` in these configs is
# the rotated part of a head alone. `moe_layer` is the first layer with experts.
_DEEPSEEK_SIZES = """
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_attention_heads
group := 1
qk_dim := qk_nope_head_dim + qk_rope_head_dim
v_dim := v_head_dim
k_v_dim := qk_nope_head_dim + v_head_dim
q_rank := q_lora_rank
kv_rank := kv_lora_rank
kv_latent := kv_lora_rank + qk_rope_head_dim
ffn := intermediate_size
moe_ffn := moe_intermediate_size
shared_ffn := moe_intermediate_size * n_shared_experts
expert := n_routed_experts or num_local_experts or num_experts
routes := expert
prefix model.
ignore *.rotary_emb.inv_freq
tie lm_head.weight = model.embed_tokens.weight if tie_word_embeddings
"""

_DEEPSEEK_ATTENTION = """
q               model.layers.{layer}.self_attn.q_proj.weight                  (heads qk_dim) embed    if q_lora_rank == None
q_a             model.layers.{layer}.self_attn.q_a_proj.weight                q_rank embed            if q_lora_rank != None
q_a_bias        model.layers.{layer}.self_attn.q_a_proj.bias                  q_rank \
    if q_lora_rank != None and attention_bias
q_a_norm        model.layers.{layer}.self_attn.q_a_layernorm.weight           q_rank                  if q_lora_rank != None
q_b             model.layers.{layer}.self_attn.q_b_proj.weight                (heads qk_dim) q_rank   if q_lora_rank != None
kv_a            model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight      kv_latent embed
kv_a_bias       model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias        kv_latent               if attention_bias
kv_a_norm       model.layers.{layer}.self_attn.kv_a_layernorm.weight          kv_rank
kv_b            model.layers.{layer}.self_attn.kv_b_proj.weight               (heads k_v_dim) kv_rank
o               model.layers.{layer}.self_attn.o_proj.weight                  embed (heads v_dim)
o_bias          model.layers.{layer}.self_attn.o_proj.bias                    embed                   if attention_bias
"""

_DEEPSEEK_DENSE = """
gate            model.layers.{layer}.mlp.gate_proj.weight                     ffn embed               if layer < moe_layer
up              model.layers.{layer}.mlp.up_proj.weight                       ffn embed               if layer < moe_layer
down            model.layers.{layer}.mlp.down_proj.weight                     embed ffn               if layer < moe_layer
"""

_DEEPSEEK_EXPERTS = """
router          model.layers.{layer}.mlp.gate.weight                          routes embed            if layer >= moe_layer
expert_gate     model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight    moe_ffn embed           if layer >= moe_layer
expert_up       model.layers.{layer}.mlp.experts.{expert}.up_proj.weight      moe_ffn embed           if layer >= moe_layer
expert_down     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight    embed moe_ffn           if layer >= moe_layer
"""

_DEEPSEEK_SHARED = """
shared_gate     model.layers.{layer}.mlp.shared_experts.gate_proj.weight      shared_ffn embed        if layer >= moe_layer
shared_up       model.layers.{layer}.mlp.shared_experts.up_proj.weight        shared_ffn embed        if layer >= moe_layer
shared_down     model.layers.{layer}.mlp.shared_experts.down_proj.weight      embed shared_ffn        if layer >= moe_layer
"""

_DEEPSEEK_V2 = (
    """
families deepseek_v2
moe_layer := first_k_dense_replace or 0
"""
    + _DEEPSEEK_SIZES
    + _TOKENS
    + _NORMS
    + _DEEPSEEK_ATTENTION
    + _DEEPSEEK_DENSE
    + """
gate_bias        model.layers.{layer}.mlp.gate_proj.bias                       ffn         if layer < moe_layer and mlp_bias
up_bias          model.layers.{layer}.mlp.up_proj.bias                         ffn         if layer < moe_layer and mlp_bias
down_bias        model.layers.{layer}.mlp.down_proj.bias                       embed       if layer < moe_layer and mlp_bias
"""
    + _DEEPSEEK_EXPERTS
    + _DEEPSEEK_SHARED
    + """
shared_gate_bias model.layers.{layer}.mlp.shared_experts.gate_proj.bias        shared_ffn  if layer >= moe_layer and mlp_bias
shared_up_bias   model.layers.{layer}.mlp.shared_experts.up_proj.bias          shared_ffn  if layer >= moe_layer and mlp_bias
shared_down_bias model.layers.{layer}.mlp.shared_experts.down_proj.bias        embed       if layer >= moe_layer and mlp_bias
"""
    + _LAST
)

# The published model keeps its multi-token prediction head as a layer after the last, 61; transformers drops it, too.
_DEEPSEEK_V3 = (
    """
families deepseek_v3
moe_layer := 3 if first_k_dense_replace == None else first_k_dense_replace
ignore model.layers.61.*
"""
    + _DEEPSEEK_SIZES
    + _TOKENS
    + _NORMS
    + _DEEPSEEK_ATTENTION
    + _DEEPSEEK_DENSE
    + _DEEPSEEK_EXPERTS
    + """
router_bias     model.layers.{layer}.mlp.gate.e_score_correction_bias         routes                  if layer >= moe_layer
"""
    + _DEEPSEEK_SHARED
    + _LAST
)

# Gate and up alternate along the last dim. The published weights are mxfp4: 16 bytes and one exponent for 32 values along the
# input; `_blocks` and `_scales` are transposed with respect to the bfloat16 weights.
_GPT_OSS = (
    """
families gpt_oss
head_dim := head_dim or 64
expert := num_local_experts or num_experts
routes := expert
bytes := 16
"""
    + _SIZES
    + _TIED_IF_SAID
    + _TOKENS
    + _NORMS
    + _ATTENTION
    + """
q_bias             model.layers.{layer}.self_attn.q_proj.bias               (heads head_dim)      if attention_bias != False
k_bias             model.layers.{layer}.self_attn.k_proj.bias               (kv_heads head_dim)   if attention_bias != False
v_bias             model.layers.{layer}.self_attn.v_proj.bias               (kv_heads head_dim)   if attention_bias != False
o_bias             model.layers.{layer}.self_attn.o_proj.bias               embed                 if attention_bias != False
sinks              model.layers.{layer}.self_attn.sinks                     heads
router             model.layers.{layer}.mlp.router.weight                   routes embed
router_bias        model.layers.{layer}.mlp.router.bias                     routes
-                  model.layers.{layer}.mlp.experts.gate_up_proj            expert embed (ffn (expert_gate + expert_up)) \
    if (quantization_config and quantization_config["quant_method"]) != "mxfp4"
-                  model.layers.{layer}.mlp.experts.gate_up_proj_bias       expert (ffn (expert_gate_bias + expert_up_bias))
expert_down        model.layers.{layer}.mlp.experts.down_proj               expert ffn embed \
    if (quantization_config and quantization_config["quant_method"]) != "mxfp4"
expert_down_bias   model.layers.{layer}.mlp.experts.down_proj_bias          expert embed
-                  model.layers.{layer}.mlp.experts.gate_up_proj_blocks \
    expert (ffn (expert_gate_blocks + expert_up_blocks)) embed//32 bytes \
    if quantization_config["quant_method"] == "mxfp4"
-                  model.layers.{layer}.mlp.experts.gate_up_proj_scales \
    expert (ffn (expert_gate_scales + expert_up_scales)) embed//32 \
    if quantization_config["quant_method"] == "mxfp4"
expert_down_blocks model.layers.{layer}.mlp.experts.down_proj_blocks        expert embed ffn//32 bytes \
    if quantization_config["quant_method"] == "mxfp4"
expert_down_scales model.layers.{layer}.mlp.experts.down_proj_scales        expert embed ffn//32 \
    if quantization_config["quant_method"] == "mxfp4"
"""
    + _LAST
)

# --- older families, with layer norms and biases throughout -----------------------------------------------------------

_MULTI_HEAD = """
heads = kv_heads group
group := 1
head_dim := embed // kv_heads
vocab := vocab_size
"""

# q, k and v of one head lie together.
_GPT_NEOX = (
    """
families gpt_neox
layer := num_hidden_layers
embed := hidden_size
kv_heads := num_attention_heads
ffn := intermediate_size
prefix gpt_neox. model.
ignore *.attention.bias *.attention.masked_bias *.rotary_emb.inv_freq
tie embed_out.weight = gpt_neox.embed_in.weight if tie_word_embeddings
"""
    + _MULTI_HEAD
    + """
first
tokens          gpt_neox.embed_in.weight                                      vocab embed
layers
input_norm      gpt_neox.layers.{layer}.input_layernorm.weight                embed
input_norm_bias gpt_neox.layers.{layer}.input_layernorm.bias                  embed
post_norm       gpt_neox.layers.{layer}.post_attention_layernorm.weight       embed
post_norm_bias  gpt_neox.layers.{layer}.post_attention_layernorm.bias         embed
-               gpt_neox.layers.{layer}.attention.query_key_value.weight      (kv_heads (q group + k + v) head_dim) embed
-               gpt_neox.layers.{layer}.attention.query_key_value.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim) \
    if attention_bias != False
o               gpt_neox.layers.{layer}.attention.dense.weight                embed (heads head_dim)
o_bias          gpt_neox.layers.{layer}.attention.dense.bias                  embed                 if attention_bias != False
up              gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight              ffn embed
up_bias         gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias                ffn
down            gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight              embed ffn
down_bias       gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias                embed
last
norm            gpt_neox.final_layer_norm.weight                              embed
norm_bias       gpt_neox.final_layer_norm.bias                                embed
head            embed_out.weight                                              vocab embed
"""
)

# Weights are stored [in, out] (`Conv1D`), with q, k and v one after another along the last dim.
_GPT2 = (
    """
families gpt2
layer := n_layer or num_hidden_layers
embed := n_embd or hidden_size
kv_heads := n_head or num_attention_heads
positions := n_positions or max_position_embeddings
ffn := n_inner or 4 * embed
transposed *.c_attn.weight *.c_proj.weight *.c_fc.weight
prefix transformer. model.
ignore *.attn.bias *.attn.masked_bias
tie lm_head.weight = transformer.wte.weight if tie_word_embeddings != False
"""
    + _MULTI_HEAD
    + """
first
tokens          transformer.wte.weight                         vocab embed
positions       transformer.wpe.weight                         positions embed
layers
input_norm      transformer.h.{layer}.ln_1.weight              embed
input_norm_bias transformer.h.{layer}.ln_1.bias                embed
post_norm       transformer.h.{layer}.ln_2.weight              embed
post_norm_bias  transformer.h.{layer}.ln_2.bias                embed
-               transformer.h.{layer}.attn.c_attn.weight       embed ((q heads + k kv_heads + v kv_heads) head_dim)
-               transformer.h.{layer}.attn.c_attn.bias         ((q_bias heads + k_bias kv_heads + v_bias kv_heads) head_dim)
o               transformer.h.{layer}.attn.c_proj.weight       (heads head_dim) embed
o_bias          transformer.h.{layer}.attn.c_proj.bias         embed
up              transformer.h.{layer}.mlp.c_fc.weight          embed ffn
up_bias         transformer.h.{layer}.mlp.c_fc.bias            ffn
down            transformer.h.{layer}.mlp.c_proj.weight        ffn embed
down_bias       transformer.h.{layer}.mlp.c_proj.bias          embed
last
norm            transformer.ln_f.weight                        embed
norm_bias       transformer.ln_f.bias                          embed
head            lm_head.weight                                 vocab embed
"""
)

# Embeddings may be narrower than the layers (`word_embed`), with a projection in and out. Positions begin at 2.
_OPT = (
    """
families opt
layer := num_hidden_layers
embed := hidden_size
word_embed := word_embed_proj_dim or hidden_size
kv_heads := num_attention_heads
positions := max_position_embeddings + 2
ffn := ffn_dim
prefix model.
ignore *decoder.version
tie lm_head.weight = model.decoder.embed_tokens.weight if tie_word_embeddings != False
"""
    + _MULTI_HEAD
    + """
first
tokens          model.decoder.embed_tokens.weight                             vocab word_embed
positions       model.decoder.embed_positions.weight                          positions embed
project_in      model.decoder.project_in.weight                               embed word_embed      if word_embed != embed
layers
input_norm      model.decoder.layers.{layer}.self_attn_layer_norm.weight      embed \
    if layer_norm_elementwise_affine != False
input_norm_bias model.decoder.layers.{layer}.self_attn_layer_norm.bias        embed \
    if layer_norm_elementwise_affine != False
post_norm       model.decoder.layers.{layer}.final_layer_norm.weight          embed \
    if layer_norm_elementwise_affine != False
post_norm_bias  model.decoder.layers.{layer}.final_layer_norm.bias            embed \
    if layer_norm_elementwise_affine != False
q               model.decoder.layers.{layer}.self_attn.q_proj.weight          (heads head_dim) embed
k               model.decoder.layers.{layer}.self_attn.k_proj.weight          (kv_heads head_dim) embed
v               model.decoder.layers.{layer}.self_attn.v_proj.weight          (kv_heads head_dim) embed
o               model.decoder.layers.{layer}.self_attn.out_proj.weight        embed (heads head_dim)
q_bias          model.decoder.layers.{layer}.self_attn.q_proj.bias            (heads head_dim)      if enable_bias != False
k_bias          model.decoder.layers.{layer}.self_attn.k_proj.bias            (kv_heads head_dim)   if enable_bias != False
v_bias          model.decoder.layers.{layer}.self_attn.v_proj.bias            (kv_heads head_dim)   if enable_bias != False
o_bias          model.decoder.layers.{layer}.self_attn.out_proj.bias          embed                 if enable_bias != False
up              model.decoder.layers.{layer}.fc1.weight                       ffn embed
up_bias         model.decoder.layers.{layer}.fc1.bias                         ffn                   if enable_bias != False
down            model.decoder.layers.{layer}.fc2.weight                       embed ffn
down_bias       model.decoder.layers.{layer}.fc2.bias                         embed                 if enable_bias != False
last
norm            model.decoder.final_layer_norm.weight   embed \
    if do_layer_norm_before != False and not _remove_final_layer_norm and layer_norm_elementwise_affine != False
norm_bias       model.decoder.final_layer_norm.bias     embed \
    if do_layer_norm_before != False and not _remove_final_layer_norm and layer_norm_elementwise_affine != False
project_out     model.decoder.project_out.weight                              word_embed embed      if word_embed != embed
head            lm_head.weight                                                vocab word_embed
"""
)

_BLOOM = (
    """
families bloom
layer := n_layer or num_hidden_layers
embed := n_embed or hidden_size
kv_heads := n_head or num_attention_heads
ffn := 4 * embed
prefix transformer. model.
tie lm_head.weight = transformer.word_embeddings.weight if tie_word_embeddings != False
"""
    + _MULTI_HEAD
    + """
first
tokens           transformer.word_embeddings.weight                            vocab embed
tokens_norm      transformer.word_embeddings_layernorm.weight                  embed
tokens_norm_bias transformer.word_embeddings_layernorm.bias                    embed
layers
input_norm       transformer.h.{layer}.input_layernorm.weight                  embed
input_norm_bias  transformer.h.{layer}.input_layernorm.bias                    embed
post_norm        transformer.h.{layer}.post_attention_layernorm.weight         embed
post_norm_bias   transformer.h.{layer}.post_attention_layernorm.bias           embed
-                transformer.h.{layer}.self_attention.query_key_value.weight   (kv_heads (q group + k + v) head_dim) embed
-                transformer.h.{layer}.self_attention.query_key_value.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim)
o                transformer.h.{layer}.self_attention.dense.weight             embed (heads head_dim)
o_bias           transformer.h.{layer}.self_attention.dense.bias               embed
up               transformer.h.{layer}.mlp.dense_h_to_4h.weight                ffn embed
up_bias          transformer.h.{layer}.mlp.dense_h_to_4h.bias                  ffn
down             transformer.h.{layer}.mlp.dense_4h_to_h.weight                embed ffn
down_bias        transformer.h.{layer}.mlp.dense_4h_to_h.bias                  embed
last
norm             transformer.ln_f.weight                                       embed
norm_bias        transformer.ln_f.bias                                         embed
head             lm_head.weight                                                vocab embed
"""
)

# Three layouts of q, k and v that one line says: per group of query heads (180B, 40B), one key and value head for all (7B:
# `kv_heads` is 1), per head (RW: `group` is 1). Norms: one or two before the parallel attention and MLP, or one before each.
_FALCON = """
families falcon
heads = kv_heads group
layer := num_hidden_layers
embed := n_embed or hidden_size
vocab := vocab_size
heads_unless_shared := num_attention_heads if multi_query == False else 1
kv_heads := (num_kv_heads or num_attention_heads) if new_decoder_architecture else heads_unless_shared
group := num_attention_heads // kv_heads
head_dim := embed // num_attention_heads
ffn := ffn_hidden_size or 4 * embed
norms := num_ln_in_parallel_attn or (2 if new_decoder_architecture else 1)
prefix transformer. model.
ignore *.rotary_emb.inv_freq
tie lm_head.weight = transformer.word_embeddings.weight if tie_word_embeddings != False
first
tokens          transformer.word_embeddings.weight                            vocab embed
layers
input_norm      transformer.h.{layer}.input_layernorm.weight           embed  if parallel_attn == False or norms != 2
input_norm_bias transformer.h.{layer}.input_layernorm.bias             embed  if parallel_attn == False or norms != 2
post_norm       transformer.h.{layer}.post_attention_layernorm.weight  embed  if parallel_attn == False
post_norm_bias  transformer.h.{layer}.post_attention_layernorm.bias    embed  if parallel_attn == False
attn_norm       transformer.h.{layer}.ln_attn.weight                   embed  if parallel_attn != False and norms == 2
attn_norm_bias  transformer.h.{layer}.ln_attn.bias                     embed  if parallel_attn != False and norms == 2
mlp_norm        transformer.h.{layer}.ln_mlp.weight                    embed  if parallel_attn != False and norms == 2
mlp_norm_bias   transformer.h.{layer}.ln_mlp.bias                      embed  if parallel_attn != False and norms == 2
-               transformer.h.{layer}.self_attention.query_key_value.weight   (kv_heads (q group + k + v) head_dim) embed
-               transformer.h.{layer}.self_attention.query_key_value.bias \
    (kv_heads (q_bias group + k_bias + v_bias) head_dim) \
    if bias
o               transformer.h.{layer}.self_attention.dense.weight             embed (heads head_dim)
o_bias          transformer.h.{layer}.self_attention.dense.bias               embed    if bias
up              transformer.h.{layer}.mlp.dense_h_to_4h.weight                ffn embed
up_bias         transformer.h.{layer}.mlp.dense_h_to_4h.bias                  ffn      if bias
down            transformer.h.{layer}.mlp.dense_4h_to_h.weight                embed ffn
down_bias       transformer.h.{layer}.mlp.dense_4h_to_h.bias                  embed    if bias
last
norm            transformer.ln_f.weight                                       embed
norm_bias       transformer.ln_f.bias                                         embed
head            lm_head.weight                                                vocab embed
"""

TABLES: tuple[str, ...] = (
    _LLAMA,
    _MTP_LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN2_MOE,
    _QWEN3,
    _QWEN3_MOE,
    _QWEN3_NEXT,
    _GEMMA,
    _GEMMA2,
    _GEMMA3_TEXT,
    _GEMMA3,
    _PHI3,
    _MIXTRAL,
    _DEEPSEEK_V2,
    _DEEPSEEK_V3,
    _GPT_OSS,
    _GPT_NEOX,
    _GPT2,
    _OPT,
    _BLOOM,
    _FALCON,
    _STARCODER2,
    _COHERE,
    _COHERE2,
    _OLMO2,
)
"""One table per family of models, in the language of `meshload.pattern`."""
