"""Table for FlexGen's folders of arrays, https://github.com/FMInference/FlexLLMGen: file names, made of Hugging Face's OPT names.

Every `model.` is left out, and the decoder's final norm, which has the name of a layer's second one in Hugging Face, is renamed.
Only models whose embeddings are as wide as their layers, with a norm at the end, have a place there. `lm_head.weight` is a copy.
"""

_OPT = """
families opt
heads = kv_heads group
group := 1
layer := num_hidden_layers
embed := hidden_size
word_embed := word_embed_proj_dim or hidden_size
vocab := vocab_size
kv_heads := num_attention_heads
head_dim := embed // kv_heads
positions := max_position_embeddings + 2
ffn := ffn_dim
tie lm_head.weight = decoder.embed_tokens.weight if tie_word_embeddings != False
first
tokens          decoder.embed_tokens.weight                             vocab word_embed
positions       decoder.embed_positions.weight                          positions embed
layers
input_norm      decoder.layers.{layer}.self_attn_layer_norm.weight      embed  if layer_norm_elementwise_affine != False
input_norm_bias decoder.layers.{layer}.self_attn_layer_norm.bias        embed  if layer_norm_elementwise_affine != False
post_norm       decoder.layers.{layer}.final_layer_norm.weight          embed  if layer_norm_elementwise_affine != False
post_norm_bias  decoder.layers.{layer}.final_layer_norm.bias            embed  if layer_norm_elementwise_affine != False
q               decoder.layers.{layer}.self_attn.q_proj.weight          (heads head_dim) embed
k               decoder.layers.{layer}.self_attn.k_proj.weight          (kv_heads head_dim) embed
v               decoder.layers.{layer}.self_attn.v_proj.weight          (kv_heads head_dim) embed
o               decoder.layers.{layer}.self_attn.out_proj.weight        embed (heads head_dim)
q_bias          decoder.layers.{layer}.self_attn.q_proj.bias            (heads head_dim)  if enable_bias != False
k_bias          decoder.layers.{layer}.self_attn.k_proj.bias            (kv_heads head_dim)  if enable_bias != False
v_bias          decoder.layers.{layer}.self_attn.v_proj.bias            (kv_heads head_dim)  if enable_bias != False
o_bias          decoder.layers.{layer}.self_attn.out_proj.bias          embed  if enable_bias != False
up              decoder.layers.{layer}.fc1.weight                       ffn embed
up_bias         decoder.layers.{layer}.fc1.bias                         ffn  if enable_bias != False
down            decoder.layers.{layer}.fc2.weight                       embed ffn
down_bias       decoder.layers.{layer}.fc2.bias                         embed  if enable_bias != False
last
norm            decoder.layer_norm.weight                               embed  if layer_norm_elementwise_affine != False
norm_bias       decoder.layer_norm.bias                                 embed  if layer_norm_elementwise_affine != False
head            lm_head.weight                                          vocab word_embed
"""

TABLES: tuple[str, ...] = (_OPT,)
"""One table per family of models, in the language of `meshload.pattern`."""
