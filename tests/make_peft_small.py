"""Write the adapters of `golden/peft` with PEFT itself: `python tests/make_peft_small.py`; needs peft, torch and transformers.

`llama`: embedding and attention with DoRA, trained biases, a head that is saved whole, ranks of their own; `phi3`: fused weights;
`gpt2`: weights that are stored transposed, beside a head that is not. Values are random; `base.json` is the base's config.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

HERE = Path(__file__).parent / "golden" / "peft"

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 13,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(name: str, model: Any, **options: Any) -> None:
    adapted = get_peft_model(model, LoraConfig(r=2, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    shutil.rmtree(HERE / name, ignore_errors=True)
    adapted.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink(missing_ok=True)
    kept = {k: v for k, v in model.config.to_dict().items() if k in ("model_type", "attention_bias", "tie_word_embeddings", *SIZES)}
    kept |= {k: v for k, v in model.config.to_dict().items() if k.startswith("n_")}
    (HERE / name / "base.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    write(
        "llama",
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True)),
        target_modules=["q_proj", "k_proj", "o_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        use_dora=True,
        bias="lora_only",
        rank_pattern={"k_proj": 1, r"layers\.1\.self_attn\.o_proj": 3},
    )
    write(
        "phi3",
        transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
        target_modules=["qkv_proj", "gate_up_proj", "o_proj", "down_proj"],
    )
    write(
        "gpt2",
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=8,
                n_layer=2,
                n_head=4,
                n_positions=8,
                vocab_size=13,
                bos_token_id=1,
                eos_token_id=2,
                tie_word_embeddings=False,
            )
        ),
        target_modules=["c_attn", "c_proj", "c_fc", "lm_head"],
        lora_bias=True,
    )
