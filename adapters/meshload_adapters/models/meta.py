"""Tables for the names of Meta's Llama (`consolidated.NN.pth`), of Mistral's releases, and of torchtitan, which grew out of them.

Sources: https://github.com/meta-llama/llama (`llama/model.py`), https://github.com/mistralai/mistral-inference (`args.py`,
`transformer_layers.py`, `moe.py`), https://github.com/pytorch/torchtitan (`models/*/state_dict_adapter.py`). The config's keys are
Hugging Face's: `params.json` is translated where the format finds one, and torchtitan's checkpoints have none.

**Rotary order.** Llama rotates adjacent elements of a head, Hugging Face its two halves: rows of q and k are `(heads rot side)`
here and `(heads side rot)` there, where `side` says which half has an element, and `rot` counts the pairs. v is the same in both.
torchtitan's Qwen3 rotates halves, so its rows are Hugging Face's.

w1 is the gate, w3 the other one (up), w2 the way back (down). Mixtral was first published with all experts below each other, and
w2 transposed. torchtitan's names as of 2026: q, k, v in `qkv_linear`, the head `lm_head`; until April 2026 it had Meta's, between
April and June those of one fused array.
"""

_SIZES = """
heads = kv_heads group
layer := num_hidden_layers
embed := hidden_size
vocab := vocab_size
kv_heads := num_key_value_heads or num_attention_heads
group := num_attention_heads // kv_heads
ffn := intermediate_size
"""

_HEAD_DIM = """
head_dim := head_dim or hidden_size // num_attention_heads
"""

_PAIRS = """
head_dim = side rot
side := 2 if head_dim % 2 == 0 else 1
rot := head_dim // side
"""

_FIRST = """
first
tokens          tok_embeddings.weight                                 vocab embed
layers
input_norm      layers.{layer}.attention_norm.weight                  embed
post_norm       layers.{layer}.ffn_norm.weight                        embed
o               layers.{layer}.attention.wo.weight                    embed (heads head_dim)
"""

_MLP = """
gate            layers.{layer}.feed_forward.w1.weight                 ffn embed
down            layers.{layer}.feed_forward.w2.weight                 embed ffn
up              layers.{layer}.feed_forward.w3.weight                 ffn embed
"""

# --- Meta and Mistral -------------------------------------------------------------------------------------------------

_ATTENTION = """
q               layers.{layer}.attention.wq.weight                    (heads rot side) embed
k               layers.{layer}.attention.wk.weight                    (kv_heads rot side) embed
v               layers.{layer}.attention.wv.weight                    (kv_heads head_dim) embed
"""

_LAST = """
last
norm            norm.weight                                           embed
head            output.weight                                         vocab embed
"""

_LLAMA = (
    """
families llama mistral
ignore rope.freqs freqs_cis
tie output.weight = tok_embeddings.weight if tie_word_embeddings
"""
    + _SIZES
    + _HEAD_DIM
    + _PAIRS
    + _FIRST
    + _ATTENTION
    + _MLP
    + _LAST
)

_MIXTRAL = (
    """
families mixtral
expert := num_local_experts or num_experts
routes := expert
tie output.weight = tok_embeddings.weight if tie_word_embeddings
"""
    + _SIZES
    + _HEAD_DIM
    + _PAIRS
    + _FIRST
    + _ATTENTION
    + """
router          layers.{layer}.feed_forward.gate.weight               routes embed
expert_gate     layers.{layer}.feed_forward.experts.{expert}.w1.weight  ffn embed
expert_down     layers.{layer}.feed_forward.experts.{expert}.w2.weight  embed ffn
expert_up       layers.{layer}.feed_forward.experts.{expert}.w3.weight  ffn embed
<router         layers.{layer}.block_sparse_moe.gate.weight           routes embed
<expert_gate    layers.{layer}.block_sparse_moe.w1                    (expert ffn) embed
<expert_down    layers.{layer}.block_sparse_moe.w2                    (expert ffn) embed
<expert_up      layers.{layer}.block_sparse_moe.w3                    (expert ffn) embed
"""
    + _LAST
)

TABLES: tuple[str, ...] = (_LLAMA, _MIXTRAL)
"""One table per family of models, in the language of `meshload.pattern`: Meta's and Mistral's names."""

# --- torchtitan -------------------------------------------------------------------------------------------------------

_TITAN_LAST = """
last
norm            norm.weight                                           embed
head            lm_head.weight                                        vocab embed
<head           output.weight                                         vocab embed
"""

_TITAN_LLAMA = (
    """
families llama
ignore rope.freqs freqs_cis *.rope.cache
tie lm_head.weight = tok_embeddings.weight if tie_word_embeddings
"""
    + _SIZES
    + _HEAD_DIM
    + _PAIRS
    + _FIRST
    + """
q               layers.{layer}.attention.qkv_linear.wq.weight         (heads rot side) embed
k               layers.{layer}.attention.qkv_linear.wk.weight         (kv_heads rot side) embed
v               layers.{layer}.attention.qkv_linear.wv.weight         (kv_heads head_dim) embed
<q              layers.{layer}.attention.wq.weight                    (heads rot side) embed
<k              layers.{layer}.attention.wk.weight                    (kv_heads rot side) embed
<v              layers.{layer}.attention.wv.weight                    (kv_heads head_dim) embed
<-              layers.{layer}.attention.qkv_linear.wqkv.weight \
    (kv_heads (q group rot side + k rot side + v head_dim)) embed
"""
    + _MLP
    + _TITAN_LAST
)

_TITAN_QWEN3_ATTENTION = """
q               layers.{layer}.attention.qkv_linear.wq.weight         (heads head_dim) embed
k               layers.{layer}.attention.qkv_linear.wk.weight         (kv_heads head_dim) embed
v               layers.{layer}.attention.qkv_linear.wv.weight         (kv_heads head_dim) embed
<q              layers.{layer}.attention.wq.weight                    (heads head_dim) embed
<k              layers.{layer}.attention.wk.weight                    (kv_heads head_dim) embed
<v              layers.{layer}.attention.wv.weight                    (kv_heads head_dim) embed
<-              layers.{layer}.attention.qkv_linear.wqkv.weight       (kv_heads (q group + k + v) head_dim) embed
q_norm          layers.{layer}.attention.q_norm.weight                head_dim
k_norm          layers.{layer}.attention.k_norm.weight                head_dim
"""

_TITAN_QWEN3 = (
    """
families qwen3
head_dim := head_dim or 128
ignore rope_cache *.rope.cache
tie lm_head.weight = tok_embeddings.weight if tie_word_embeddings
"""
    + _SIZES
    + _FIRST
    + _TITAN_QWEN3_ATTENTION
    + _MLP
    + _TITAN_LAST
)

# All layers have experts there.
_TITAN_QWEN3_MOE = (
    """
families qwen3_moe
expert := num_local_experts if num_experts == None else num_experts
routes := expert
moe_ffn := moe_intermediate_size
ignore rope_cache *.rope.cache *.moe.expert_bias *.moe.tokens_per_expert
tie lm_head.weight = tok_embeddings.weight if tie_word_embeddings
"""
    + _SIZES
    + _HEAD_DIM
    + _FIRST
    + _TITAN_QWEN3_ATTENTION
    + """
router          layers.{layer}.moe.router.gate.weight                 routes embed
expert_gate     layers.{layer}.moe.routed_experts.inner_experts.w1_EFD  expert moe_ffn embed
expert_down     layers.{layer}.moe.routed_experts.inner_experts.w2_EDF  expert embed moe_ffn
expert_up       layers.{layer}.moe.routed_experts.inner_experts.w3_EFD  expert moe_ffn embed
<expert_gate    layers.{layer}.moe.experts.w1_EFD                     expert moe_ffn embed
<expert_down    layers.{layer}.moe.experts.w2_EDF                     expert embed moe_ffn
<expert_up      layers.{layer}.moe.experts.w3_EFD                     expert moe_ffn embed
<expert_gate    layers.{layer}.moe.experts.w1                         expert moe_ffn embed
<expert_down    layers.{layer}.moe.experts.w2                         expert embed moe_ffn
<expert_up      layers.{layer}.moe.experts.w3                         expert moe_ffn embed
"""
    + _TITAN_LAST
)

TORCHTITAN: tuple[str, ...] = (_TITAN_LLAMA, _TITAN_QWEN3, _TITAN_QWEN3_MOE)
"""torchtitan's names, of the models that stand for a Hugging Face family."""
