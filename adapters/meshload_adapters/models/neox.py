"""Table for the GPT-NeoX library's names: layers of a DeepSpeed pipeline by their numbers, `sequential.N` without a pipeline.

Source: https://github.com/EleutherAI/gpt-neox, `megatron/model/gpt2_model.py` (the order of the layers) and
`tools/ckpts/convert_neox_to_hf.py`. Layer 0 is the embedding, 1 a function without weights, and the blocks begin at 2; behind them
come another function, the final norm and the head. With tied weights the embedding is `tied_modules.embed` of the pipeline (its
values lie in layer 0's file, its optimizer's state in the first stage and the last), and there is no head (`tie_word_embeddings` in
the config: the library ties unless `no-weight-tying` is set).

The rows of `query_key_value` are, per head, q, k and v, as in Hugging Face. The vocabulary is padded. MLPs are `dense_h_to_4h` and
`dense_4h_to_h` in older versions. Each tensor-parallel rank adds a bias of its own behind `attention.dense` and the second matrix
of the MLP, and Hugging Face's is their sum: the format says so where the checkpoint says whose it is. The library's converter takes
the mean of the ranks' norms (`copies="mean"`); by default here it is the first rank's.
"""

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
prefix sequential.
spelling {}.mlp.dense_h_to_4h. {}.mlp.linear1.
spelling tied_modules.embed.word_embeddings. 0.word_embeddings.
spelling 0.word_embeddings. tied_modules.embed.word_embeddings.
spelling {}.mlp.dense_4h_to_h. {}.mlp.linear2.
ignore *.attention.rotary_emb.inv_freq
tie {=layer+4}.final_linear.weight = tied_modules.embed.word_embeddings.weight if tie_word_embeddings
first
tokens          0.word_embeddings.weight                      vocab~ embed  if not tie_word_embeddings
tokens          tied_modules.embed.word_embeddings.weight     vocab~ embed  if tie_word_embeddings
layers
input_norm      {layer+2}.input_layernorm.weight              embed
input_norm_bias {layer+2}.input_layernorm.bias                embed
post_norm       {layer+2}.post_attention_layernorm.weight     embed
post_norm_bias  {layer+2}.post_attention_layernorm.bias       embed
-               {layer+2}.attention.query_key_value.weight    (kv_heads (q group + k + v) head_dim) embed
-               {layer+2}.attention.query_key_value.bias      (kv_heads (q_bias group + k_bias + v_bias) head_dim) \
    if attention_bias != False
o               {layer+2}.attention.dense.weight              embed (heads head_dim)
o_bias          {layer+2}.attention.dense.bias                embed  if attention_bias != False
up              {layer+2}.mlp.linear1.weight                  ffn embed
up_bias         {layer+2}.mlp.linear1.bias                    ffn
down            {layer+2}.mlp.linear2.weight                  embed ffn
down_bias       {layer+2}.mlp.linear2.bias                    embed
last
norm            {=layer+3}.norm.weight                        embed
norm_bias       {=layer+3}.norm.bias                          embed
head            {=layer+4}.final_linear.weight                vocab~ embed
"""

TABLES: tuple[str, ...] = (_GPT_NEOX,)
"""One table per family of models, in the language of `meshload.pattern`."""
