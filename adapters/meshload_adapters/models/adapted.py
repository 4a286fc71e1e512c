"""What lies beside a 2-D `.weight` that an adapter changes, by `peft_type` of an adapter's config.

The language is that of `models/quantised.py`: a suffix that takes the place of `weight` in the name, and its pattern in the
weight's own dims, `out` and `in`, here with `{rank}`; conditions ask the adapter's config. Where a method has several texts, a
weight has what the one says whose arrays are stored, or the first. In an embedding, which torch applies to numbers and not to
vectors, PEFT's pair is the other way round: `out` counts tokens, as in the table.

PEFT 0.21: https://github.com/huggingface/peft/tree/main/src/peft/tuners/lora (`layer.py`, `dora.py`). A is `rank in` and B is
`out rank` also where the weight itself is stored transposed (`fan_in_fan_out`, which is what the last of an adapter's layers is).
"""

TABLES: tuple[str, ...] = (
    """
method LORA
lora_A.weight           lora_{rank} in
lora_B.weight           out lora_{rank}
lora_B.bias             out                if lora_bias
lora_magnitude_vector   out                if use_dora
""",
    """
method LORA
lora_embedding_A        lora_{rank} out
lora_embedding_B        in lora_{rank}
lora_magnitude_vector   in                 if use_dora
""",
)
"""One text per way."""
