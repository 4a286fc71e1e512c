"""PEFT's adapters; `_peft.py` tells their files and names."""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._peft_find import ARRAYS, CONFIG, KEY, has_adapter

LEAD = "base_model.model."


class PEFT:
    """The format of PEFT's folders."""

    name = "peft"
    order = 75
    naming = "hf"

    def matches(self, folder: Folder) -> bool:
        """Say whether an adapter and its config are there, and no whole model."""
        return has_adapter(folder)

    def open(self, folder: Folder) -> Checkpoint:
        """Read the config and the header, or the pickle."""
        from .._peft import checkpoint_in

        return checkpoint_in(folder)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out one safetensors file and the adapter's config, as PEFT writes them."""
        from meshload.writing import lay_out, put

        from .._safetensors_files import head

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
        from meshload.writing import put

        path = folder.path / "config.json"
        told = json.loads(path.read_bytes()) if path.exists() else {}
        if KEY in told:
            del told[KEY]
            path.unlink()
            if told:
                put(folder, path.name, json.dumps(told, indent=2).encode() + b"\n")
