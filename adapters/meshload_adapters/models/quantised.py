"""What lies beside, or in place of, a quantised 2-D `.weight`, by `quantization_config.quant_method` of a Hugging Face config.

A text begins with `method` and its names. `number := expression` is computed from the quantization_config. Each other line is a
suffix that takes the place of `weight` in the name, its pattern, and perhaps `if condition`. `out` and `in` stand for the weight's
two dims as its table has them, `{number}` for a number. `in/128` has one element per block of 128, the last may be short, and ranks
that share a block both hold it; `out//8` has 8 values packed in one element, and a cut inside one is refused. An empty pattern is
one value for the whole weight, of shape [] or [1]. `one` is a dim of size 1. `groups` is a dim that no layout cuts, as long as it
is stored: where `g_idx` names each input's group, a rank may need any of them. Where `weight` itself is kept, it has a line.
`refused reason` says why such arrays cannot be cut.

- fp8: https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/finegrained_fp8.py
- awq: https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py; the order inside an element is 0 2 4 6 1 3 5 7
- gptq: https://github.com/ModelCloud/GPTQModel/tree/main/gptqmodel/nn_modules/qlinear
- compressed-tensors: https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors
- mxfp4: GPT-OSS alone has it, in its fused experts; its lines stand in `models/hf.py`
"""

TABLES: tuple[str, ...] = (
    """
method fp8
block0 := weight_block_size[0] if weight_block_size else 1
block1 := weight_block_size[1] if weight_block_size else 1
weight             out in
weight_scale_inv   out/{block0} in/{block1}   if weight_block_size
weight_scale_inv                              if not weight_block_size
activation_scale
weight_scale
input_scale
refused experts of 4 bits are two to an element  if expert_dtype == "fp4"
""",
    """
method fbgemm_fp8
weight             out in
weight_scale       out one
input_scale_ub
""",
    """
method awq
width := bits or w_bit or 4
pack := 32 // width if width in (4, 8) else 1
group := group_size or q_group_size or 128
qweight            in out//{pack}
qzeros             in/{group} out//{pack}     if group > 0
scales             in/{group} out             if group > 0
qzeros             one out//{pack}            if group < 0
scales             one out                    if group < 0
refused only the layout called gemm is known  if (version or "gemm") not in ("gemm", "GEMM")
refused the width is not 4 or 8 bits          if width not in (4, 8)
""",
    """
method gptq
pack := 32 // bits if bits in (2, 4, 8) else 1
group := group_size or 128
qweight            in//{pack} out
qzeros             in/{group} out//{pack}     if group > 0 and not desc_act
scales             in/{group} out             if group > 0 and not desc_act
qzeros             in/{group}@ out//{pack}    if group > 0 and desc_act
scales             in/{group}@ out            if group > 0 and desc_act
qzeros             one out//{pack}            if group < 0
scales             one out                    if group < 0
g_idx              in
refused 3-bit values straddle elements        if bits not in (2, 4, 8)
refused Marlin's tiles are not known          if checkpoint_format == "marlin" or is_marlin_format
""",
    """
method compressed-tensors
width := config_groups["group_0"]["weights"]["num_bits"]
pack := 32 // width if width in (4, 8) and format == "pack-quantized" else 1
group := config_groups["group_0"]["weights"]["group_size"] or 128
block0 := config_groups["group_0"]["weights"]["block_structure"][0] or 128
block1 := config_groups["group_0"]["weights"]["block_structure"][1] or 128
by_index := 1 if config_groups["group_0"]["weights"]["actorder"] in ("group", True) else 0
weight             out in                     if format != "pack-quantized"
weight_packed      out in//{pack}             if format == "pack-quantized"
weight_scale                                  if config_groups["group_0"]["weights"]["strategy"] == "tensor"
weight_scale       out one                    if config_groups["group_0"]["weights"]["strategy"] == "channel"
weight_scale       out/{block0} in/{block1}   if config_groups["group_0"]["weights"]["strategy"] == "block"
weight_scale       out in/{group}    if config_groups["group_0"]["weights"]["strategy"] == "group" and not by_index
weight_scale       out in/{group}@   if config_groups["group_0"]["weights"]["strategy"] == "group" and by_index
weight_g_idx       in
input_scale
refused more than one scheme in a checkpoint  if len(config_groups) != 1
refused this format of compressed-tensors     if format not in ("pack-quantized", "float-quantized", "int-quantized")
refused zero points beside packed weights     if config_groups["group_0"]["weights"]["symmetric"] == False
refused the width is not 4 or 8 bits          if width not in (4, 8)
""",
    """
method mxfp4
""",
    """
method bitsandbytes refused its weights are flat, packed over rows, with the state of quantisation in an array of its own
""",
    """
method hqq quanto eetq torchao aqlm vptq higgs spqr quark fp_quant auto-round bitnet refused this layout has no table yet
""",
    """
method gguf nvfp4 mxfp8 metal fouroversix sinq gemma modelopt refused this layout has no table yet
""",
)
"""One text per method, or per group of methods that are refused alike."""
