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

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, listing
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder, read_bytes
from meshload.writing import lay_out, put

from .._json import parsed
from .._safetensors import Arrays, read_header
from .._safetensors_files import head
from .._torch_file import Tensor, TorchFile

CONFIG = "adapter_config.json"
ARRAYS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

KEY = "adapter_config"
"""Where a checkpoint's config has the adapter's."""

LEAD = "base_model.model."

CONFIG_LIMIT = 16 << 20

WHOLE_MODEL = re.compile(r"(model|pytorch_model|consolidated)[.-].*")


@dataclass(frozen=True, slots=True)
class PEFT:
    """The format of PEFT's folders."""

    name: str = field(default="peft", init=False)
    order: int = field(default=75, init=False)
    naming: str = field(default="hf", init=False)

    def matches(self, folder: Folder) -> bool:
        """Say whether an adapter and its config are there, and no whole model."""
        files = (ARRAYS, PICKLE)
        if folder.entry is not None:
            return folder.entry in files and folder.has(CONFIG)
        there = folder.has(CONFIG) and any(map(folder.has, files))
        return there and not any(map(WHOLE_MODEL.fullmatch, folder.names()))

    def open(self, folder: Folder) -> Checkpoint:
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
            return Checkpoint(arrays, self.name, meta=meta, problems=(Problem(text, file=CONFIG),))
        return Checkpoint(arrays, self.name, meta={**meta, KEY: adapter}, config={KEY: adapter})

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out one safetensors file and the adapter's config, as PEFT writes them."""
        adapter = (like.config or {}).get(KEY)
        if not isinstance(adapter, Mapping):
            raise LayoutError(f"config: PEFT's folders have an {CONFIG}; give its keys in config=, as {{..., {KEY!r}: {{...}}}}")
        strange = [name for name in like if not name.startswith(LEAD)] if adapter.get("peft_type") == "LORA" else []
        if strange:
            raise LayoutError(f"{listing(strange)}: no array of an adapter, whose names begin with {LEAD}")
        lay_out(folder, ARRAYS, *head(list(like.arrays.values())))
        put(folder, CONFIG, json.dumps(dict(adapter), indent=2, sort_keys=True).encode())

    def commit(self, folder: LocalFolder) -> None:
        """Leave the base model's config alone in `config.json`, where one was given: the adapter's has a file of its own."""
        path = folder.path / "config.json"
        told = json.loads(path.read_bytes()) if path.exists() else {}
        if KEY in told:
            del told[KEY]
            path.unlink()
            if told:
                put(folder, path.name, json.dumps(told, indent=2).encode() + b"\n")


def _stored(folder: Folder, file: str) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    header = read_header(folder.file(file))
    return Arrays([header], dict.fromkeys(header.entries, 0)), header.metadata


def _pickled(folder: Folder, file: str) -> tuple[Mapping[str, Array], Mapping[str, str]]:
    found = TorchFile.open(folder.file(file))
    tensors = found.root
    if not isinstance(tensors, Mapping) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()):
        raise FormatError(f"{file}: a dict of names to tensors was expected")
    return {name: found.array(tensor, name) for name, tensor in tensors.items()}, {}
