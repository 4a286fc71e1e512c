"""Tables for the names of the live modules of transformers 5, for families where `state_dict()` is not spelled like the disk.

`from_pretrained` converts the names on disk to these, and `save_pretrained` converts them back: the experts of a layer become one
array, gate over up, and Mixtral's block is `mlp`. A state dict that was saved with torch, or as a distributed checkpoint, has these
names. https://github.com/huggingface/transformers/blob/main/src/transformers/conversion_mapping.py. Parts and dims: `models/hf.py`.
"""

_SIZES = """
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_key_value_heads or num_attention_heads
group := num_attention_heads // kv_heads
head_dim := head_dim or hidden_size // num_attention_heads
ffn := intermediate_size
routes := expert
prefix model.
ignore *.rotary_emb.inv_freq
tie lm_head.weight = model.embed_tokens.weight if tie_word_embeddings
"""

_TOKENS = """
first
tokens          model.embed_tokens.weight                                     vocab embed
layers
input_norm      model.layers.{layer}.input_layernorm.weight                   embed
post_norm       model.layers.{layer}.post_attention_layernorm.weight          embed
"""

_ATTENTION = """
q               model.layers.{layer}.self_attn.q_proj.weight                  (heads head_dim) embed
k               model.layers.{layer}.self_attn.k_proj.weight                  (kv_heads head_dim) embed
v               model.layers.{layer}.self_attn.v_proj.weight                  (kv_heads head_dim) embed
o               model.layers.{layer}.self_attn.o_proj.weight                  embed (heads head_dim)
"""

_LAST = """
last
norm            model.norm.weight                                             embed
head            lm_head.weight                                                vocab embed
"""

_MIXTRAL = (
    """
families mixtral
expert := num_local_experts or num_experts
"""
    + _SIZES
    + _TOKENS
    + _ATTENTION
    + """
router          model.layers.{layer}.mlp.gate.weight                          routes embed
-               model.layers.{layer}.mlp.experts.gate_up_proj                 expert ((expert_gate + expert_up) ffn) embed
expert_down     model.layers.{layer}.mlp.experts.down_proj                    expert embed ffn
"""
    + _LAST
)

_QWEN_SIZES = """
expert := num_local_experts if num_experts == None else num_experts
moe_ffn := moe_intermediate_size
sparse_step := (decoder_sparse_step or 1) if expert else num_hidden_layers + 1
"""

_QWEN_MLP = """
gate            model.layers.{layer}.mlp.gate_proj.weight                     ffn embed \
    if layer in mlp_only_layers or (layer + 1) % sparse_step
up              model.layers.{layer}.mlp.up_proj.weight                       ffn embed \
    if layer in mlp_only_layers or (layer + 1) % sparse_step
down            model.layers.{layer}.mlp.down_proj.weight                     embed ffn \
    if layer in mlp_only_layers or (layer + 1) % sparse_step
router          model.layers.{layer}.mlp.gate.weight                          routes embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
-               model.layers.{layer}.mlp.experts.gate_up_proj \
    expert ((expert_gate + expert_up) moe_ffn) embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
expert_down     model.layers.{layer}.mlp.experts.down_proj                    expert embed moe_ffn \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
"""

_QWEN_SHARED = """
shared_gate     model.layers.{layer}.mlp.shared_expert.gate_proj.weight       shared_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_up       model.layers.{layer}.mlp.shared_expert.up_proj.weight         shared_ffn embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_down     model.layers.{layer}.mlp.shared_expert.down_proj.weight       embed shared_ffn \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
shared_router   model.layers.{layer}.mlp.shared_expert_gate.weight            one embed \
    if layer not in mlp_only_layers and (layer + 1) % sparse_step == 0
"""

_QWEN2_MOE = (
    """
families qwen2_moe
shared_ffn := shared_expert_intermediate_size
one := 1
"""
    + _QWEN_SIZES
    + _SIZES
    + _TOKENS
    + _ATTENTION
    + """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)      if qkv_bias != False
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)   if qkv_bias != False
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)   if qkv_bias != False
"""
    + _QWEN_MLP
    + _QWEN_SHARED
    + _LAST
)

_QWEN3_MOE = (
    """
families qwen3_moe
"""
    + _QWEN_SIZES
    + _SIZES
    + _TOKENS
    + _ATTENTION
    + """
q_bias          model.layers.{layer}.self_attn.q_proj.bias                    (heads head_dim)      if attention_bias
k_bias          model.layers.{layer}.self_attn.k_proj.bias                    (kv_heads head_dim)   if attention_bias
v_bias          model.layers.{layer}.self_attn.v_proj.bias                    (kv_heads head_dim)   if attention_bias
o_bias          model.layers.{layer}.self_attn.o_proj.bias                    embed                 if attention_bias
q_norm          model.layers.{layer}.self_attn.q_norm.weight                  head_dim
k_norm          model.layers.{layer}.self_attn.k_norm.weight                  head_dim
"""
    + _QWEN_MLP
    + _LAST
)

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
    + _QWEN_SIZES
    + _SIZES
    + _TOKENS
    + _QWEN3_NEXT_ATTENTION
    + _QWEN_MLP
    + _QWEN_SHARED
    + _LAST
)

_DEEPSEEK = """
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

_DEEPSEEK_LAYER = """
q               model.layers.{layer}.self_attn.q_proj.weight                  (heads qk_dim) embed    if q_lora_rank == None
q_a             model.layers.{layer}.self_attn.q_a_proj.weight                q_rank embed            if q_lora_rank != None
q_a_bias        model.layers.{layer}.self_attn.q_a_proj.bias                  q_rank  if q_lora_rank != None and attention_bias
q_a_norm        model.layers.{layer}.self_attn.q_a_layernorm.weight           q_rank                  if q_lora_rank != None
q_b             model.layers.{layer}.self_attn.q_b_proj.weight                (heads qk_dim) q_rank   if q_lora_rank != None
kv_a            model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight      kv_latent embed
kv_a_bias       model.layers.{layer}.self_attn.kv_a_proj_with_mqa.bias        kv_latent               if attention_bias
kv_a_norm       model.layers.{layer}.self_attn.kv_a_layernorm.weight          kv_rank
kv_b            model.layers.{layer}.self_attn.kv_b_proj.weight               (heads k_v_dim) kv_rank
o               model.layers.{layer}.self_attn.o_proj.weight                  embed (heads v_dim)
o_bias          model.layers.{layer}.self_attn.o_proj.bias                    embed                   if attention_bias
gate            model.layers.{layer}.mlp.gate_proj.weight                     ffn embed               if layer < moe_layer
up              model.layers.{layer}.mlp.up_proj.weight                       ffn embed               if layer < moe_layer
down            model.layers.{layer}.mlp.down_proj.weight                     embed ffn               if layer < moe_layer
router          model.layers.{layer}.mlp.gate.weight                          routes embed            if layer >= moe_layer
-               model.layers.{layer}.mlp.experts.gate_up_proj \
    expert ((expert_gate + expert_up) moe_ffn) embed \
    if layer >= moe_layer
expert_down     model.layers.{layer}.mlp.experts.down_proj                    expert embed moe_ffn    if layer >= moe_layer
shared_gate     model.layers.{layer}.mlp.shared_experts.gate_proj.weight      shared_ffn embed        if layer >= moe_layer
shared_up       model.layers.{layer}.mlp.shared_experts.up_proj.weight        shared_ffn embed        if layer >= moe_layer
shared_down     model.layers.{layer}.mlp.shared_experts.down_proj.weight      embed shared_ffn        if layer >= moe_layer
"""

_DEEPSEEK_V2 = (
    """
families deepseek_v2
moe_layer := first_k_dense_replace or 0
"""
    + _DEEPSEEK
    + _TOKENS
    + _DEEPSEEK_LAYER
    + """
gate_bias        model.layers.{layer}.mlp.gate_proj.bias                      ffn         if layer < moe_layer and mlp_bias
up_bias          model.layers.{layer}.mlp.up_proj.bias                        ffn         if layer < moe_layer and mlp_bias
down_bias        model.layers.{layer}.mlp.down_proj.bias                      embed       if layer < moe_layer and mlp_bias
shared_gate_bias model.layers.{layer}.mlp.shared_experts.gate_proj.bias       shared_ffn  if layer >= moe_layer and mlp_bias
shared_up_bias   model.layers.{layer}.mlp.shared_experts.up_proj.bias         shared_ffn  if layer >= moe_layer and mlp_bias
shared_down_bias model.layers.{layer}.mlp.shared_experts.down_proj.bias       embed       if layer >= moe_layer and mlp_bias
"""
    + _LAST
)

_DEEPSEEK_V3 = (
    """
families deepseek_v3
moe_layer := 3 if first_k_dense_replace == None else first_k_dense_replace
"""
    + _DEEPSEEK
    + _TOKENS
    + _DEEPSEEK_LAYER
    + """
router_bias     model.layers.{layer}.mlp.gate.e_score_correction_bias         routes                  if layer >= moe_layer
"""
    + _LAST
)

_GPT_NEOX = """
families gpt_neox
heads = kv_heads group
group := 1
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_attention_heads
head_dim := embed // kv_heads
ffn := intermediate_size
prefix gpt_neox. model.
ignore *.attention.bias *.attention.masked_bias *.rotary_emb.inv_freq
tie lm_head.weight = gpt_neox.embed_in.weight if tie_word_embeddings
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
o_bias          gpt_neox.layers.{layer}.attention.dense.bias                  embed                   if attention_bias != False
up              gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight              ffn embed
up_bias         gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias                ffn
down            gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight              embed ffn
down_bias       gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias                embed
last
norm            gpt_neox.final_layer_norm.weight                              embed
norm_bias       gpt_neox.final_layer_norm.bias                                embed
head            lm_head.weight                                                vocab embed
"""

# The text part of the multimodal model.
_GEMMA3 = """
families gemma3
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size or 262208
kv_heads := num_key_value_heads or 4
group := (num_attention_heads or 8) // kv_heads
head_dim := head_dim or 256
ffn := intermediate_size
prefix model. model.language_model.
tie lm_head.weight = model.language_model.embed_tokens.weight if tie_word_embeddings != False
first
tokens          model.language_model.embed_tokens.weight                              vocab embed
layers
input_norm      model.language_model.layers.{layer}.input_layernorm.weight            embed
post_norm       model.language_model.layers.{layer}.post_attention_layernorm.weight   embed
pre_ffn_norm    model.language_model.layers.{layer}.pre_feedforward_layernorm.weight  embed
post_ffn_norm   model.language_model.layers.{layer}.post_feedforward_layernorm.weight embed
q               model.language_model.layers.{layer}.self_attn.q_proj.weight           (heads head_dim) embed
k               model.language_model.layers.{layer}.self_attn.k_proj.weight           (kv_heads head_dim) embed
v               model.language_model.layers.{layer}.self_attn.v_proj.weight           (kv_heads head_dim) embed
o               model.language_model.layers.{layer}.self_attn.o_proj.weight           embed (heads head_dim)
q_bias          model.language_model.layers.{layer}.self_attn.q_proj.bias             (heads head_dim)      if attention_bias
k_bias          model.language_model.layers.{layer}.self_attn.k_proj.bias             (kv_heads head_dim)   if attention_bias
v_bias          model.language_model.layers.{layer}.self_attn.v_proj.bias             (kv_heads head_dim)   if attention_bias
o_bias          model.language_model.layers.{layer}.self_attn.o_proj.bias             embed                 if attention_bias
q_norm          model.language_model.layers.{layer}.self_attn.q_norm.weight           head_dim
k_norm          model.language_model.layers.{layer}.self_attn.k_norm.weight           head_dim
gate            model.language_model.layers.{layer}.mlp.gate_proj.weight              ffn embed
up              model.language_model.layers.{layer}.mlp.up_proj.weight                ffn embed
down            model.language_model.layers.{layer}.mlp.down_proj.weight              embed ffn
last
norm            model.language_model.norm.weight                                      embed
head            lm_head.weight                                                        vocab embed
"""

TABLES: tuple[str, ...] = (_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE, _QWEN3_NEXT, _DEEPSEEK_V2, _DEEPSEEK_V3, _GPT_NEOX, _GEMMA3)
"""One table per family of models, in the language of `meshload.pattern`."""
