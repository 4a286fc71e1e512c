"""PEFT's adapters (https://github.com/huggingface/peft): the few arrays that change a base model, without the base model.

Files. `adapter_config.json` says how the adapter was made; beside it `adapter_model.safetensors`, or from before 2023's end
`adapter_model.bin`, holds its arrays, whole, in one file. Where a whole model lies in the folder too, the folder is that model's,
and `format="peft"` opens the adapter.

Names are those of the base's live module behind `base_model.model.`; the adapter's own name is left out. Of LoRA:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     rank x in
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     out x rank; with lora_bias also lora_B.bias
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    DoRA: out
    base_model.model.model.embed_tokens.lora_embedding_A, _B           rank x tokens, embedding x rank
    base_model.model.lm_head.weight                                    modules_to_save: the base's own array, trained
    base_model.model.model.embed_tokens.base_layer.weight              the same of a module that has a pair

A pair changes its weight by `B @ A * lora_alpha / r`. The rank is `r`, or what `rank_pattern` says of the module.

**Cut over a mesh** they are as their layers: `models/adapted.py`, and the table of the base's family. An adapter has no sizes, so
the base's config is asked for: `config=`, or a `config.json` beside the adapter, as converting leaves it there. In a checkpoint's
config the adapter's stands under `adapter_config`; so it does where one is saved:
`save(..., to="peft", config={**base, "adapter_config": adapter})`.

Seen: PEFT 0.21's files of Llama, Phi-3 and GPT-2. Other methods than LoRA, and LoRA of parameters (fused experts), of which
nothing says here how they are cut, open under their names, for `layout=`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError
from meshload.source import Folder, read_bytes

from ._json import parsed
from ._peft_find import ARRAYS, CONFIG, KEY, PICKLE
from ._safetensors import Arrays, read_header

CONFIG_LIMIT = 16 << 20


def checkpoint_in(folder: Folder) -> Checkpoint:
    """Read the config and the header, or the pickle."""
    file = folder.entry or next((f for f in (ARRAYS, PICKLE) if folder.has(f)), None)
    if file is None:
        raise FormatError(f"{folder.name}: neither {ARRAYS} nor {PICKLE} is there")
    arrays, metadata = _pickled(folder, file) if file.endswith(".bin") else _stored(folder, file)
    meta: dict[str, Any] = {"files": (file,), "header_metadata": metadata}
    try:
        source = folder.file(CONFIG)
        if source.size > CONFIG_LIMIT:
            raise FormatError(f"{CONFIG}: has {source.size} bytes, at most {CONFIG_LIMIT} were expected")
        adapter = parsed(read_bytes(source), CONFIG)
    except FormatError as error:
        text = f"{error}; what the adapter changes is not known"
        return Checkpoint(arrays, "peft", meta=meta, problems=(Problem(text, file=CONFIG),))
    return Checkpoint(arrays, "peft", meta={**meta, KEY: adapter}, config={KEY: adapter})


def _stored(folder: Folder, file: str) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    header = read_header(folder.file(file))
    return Arrays([header], dict.fromkeys(header.entries, 0)), header.metadata


def _pickled(folder: Folder, file: str) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    from ._torch_file import Tensor, TorchFile

    found = TorchFile.open(folder.file(file))
    tensors = found.root
    if not isinstance(tensors, Mapping) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()):
        raise FormatError(f"{file}: a dict of names to tensors was expected")
    return {name: found.array(tensor, name) for name, tensor in tensors.items()}, {}
