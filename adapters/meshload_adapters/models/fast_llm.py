"""Tables for the parameters of Fast-LLM's `gpt` models (https://github.com/ServiceNow/Fast-LLM), in the families that it exports.

Keys and values lie one after another, gate and up as well, per expert; the second matrix of an MLP is transposed, the experts'
below each other. The keys of the config are those of the Hugging Face config, which the format makes of Fast-LLM's own.
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
tie head.output_weights = embeddings.word_embeddings_weight if tie_word_embeddings
"""

_FIRST = """
first
tokens       embeddings.word_embeddings_weight            vocab embed
layers
input_norm   decoder.{layer}.norm_1.weight                embed
post_norm    decoder.{layer}.norm_2.weight                embed
q            decoder.{layer}.mixer.query.weight           (heads head_dim) embed
-            decoder.{layer}.mixer.key_value.weight       ((k + v) kv_heads head_dim) embed
o            decoder.{layer}.mixer.dense.weight           embed (heads head_dim)
"""

_MLP = """
-            decoder.{layer}.mlp.layer_1.weight           ((gate + up) ffn) embed
down         decoder.{layer}.mlp.layer_2.weight           ffn embed
"""

_ATTENTION_BIAS = """
q_bias       decoder.{layer}.mixer.query.bias             (heads head_dim)                     if attention_bias
-            decoder.{layer}.mixer.key_value.bias         ((k_bias + v_bias) kv_heads head_dim)  if attention_bias
o_bias       decoder.{layer}.mixer.dense.bias             embed                                if attention_bias
"""

_MLP_BIAS = """
-            decoder.{layer}.mlp.layer_1.bias             ((gate_bias + up_bias) ffn)          if mlp_bias
down_bias    decoder.{layer}.mlp.layer_2.bias             embed                                if mlp_bias
"""

_LAST = """
last
norm         head.final_norm.weight                       embed
head         head.output_weights                          vocab embed
"""

_LLAMA = (
    """
families llama diffusion_llama
"""
    + _SIZES
    + _FIRST
    + _ATTENTION_BIAS
    + _MLP
    + _MLP_BIAS
    + _LAST
)

# Heads that predict further tokens; all have the first one's output weights.
_MTP_LLAMA = (
    """
families mtp_llama
mtp := (prediction_heads or 1) - 1
ignore multi_token_prediction.heads.*.output_weights
"""
    + _SIZES
    + _FIRST
    + _ATTENTION_BIAS
    + _MLP
    + _MLP_BIAS
    + _LAST
    + """
mtp_input_norm  multi_token_prediction.blocks.{mtp}.norm_1.weight             embed
mtp_post_norm   multi_token_prediction.blocks.{mtp}.norm_2.weight             embed
mtp_q           multi_token_prediction.blocks.{mtp}.mixer.query.weight        (heads head_dim) embed
-               multi_token_prediction.blocks.{mtp}.mixer.key_value.weight    ((mtp_k + mtp_v) kv_heads head_dim) embed
mtp_o           multi_token_prediction.blocks.{mtp}.mixer.dense.weight        embed (heads head_dim)
mtp_q_bias      multi_token_prediction.blocks.{mtp}.mixer.query.bias          (heads head_dim)  if attention_bias
-               multi_token_prediction.blocks.{mtp}.mixer.key_value.bias      ((mtp_k_bias + mtp_v_bias) kv_heads head_dim) \
    if attention_bias
mtp_o_bias      multi_token_prediction.blocks.{mtp}.mixer.dense.bias          embed             if attention_bias
-               multi_token_prediction.blocks.{mtp}.mlp.layer_1.weight        ((mtp_gate + mtp_up) ffn) embed
mtp_down        multi_token_prediction.blocks.{mtp}.mlp.layer_2.weight        ffn embed
-               multi_token_prediction.blocks.{mtp}.mlp.layer_1.bias          ((mtp_gate_bias + mtp_up_bias) ffn)  if mlp_bias
mtp_down_bias   multi_token_prediction.blocks.{mtp}.mlp.layer_2.bias          embed             if mlp_bias
mtp_norm        multi_token_prediction.heads.{mtp}.final_norm.weight          embed
"""
)

_MISTRAL = (
    """
families mistral
"""
    + _SIZES
    + _FIRST
    + _MLP
    + _LAST
)

_QWEN2 = (
    """
families qwen2 dream
"""
    + _SIZES
    + _FIRST
    + """
q_bias       decoder.{layer}.mixer.query.bias             (heads head_dim)
-            decoder.{layer}.mixer.key_value.bias         ((k_bias + v_bias) kv_heads head_dim)
"""
    + _MLP
    + _LAST
)

_MIXTRAL = (
    """
families mixtral
expert := num_local_experts or num_experts
routes := expert
"""
    + _SIZES
    + _FIRST
    + """
router       decoder.{layer}.mlp.router.weight            routes embed
-            decoder.{layer}.mlp.layer_1.weight           (expert (expert_gate + expert_up) ffn) embed
expert_down  decoder.{layer}.mlp.layer_2.weight           (expert ffn) embed
"""
    + _LAST
)

TABLES: tuple[str, ...] = (_LLAMA, _MTP_LLAMA, _MISTRAL, _QWEN2, _MIXTRAL)
"""One table per family of models, in the language of `meshload.pattern`."""
