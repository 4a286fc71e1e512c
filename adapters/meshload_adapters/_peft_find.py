"""The files of an adapter of PEFT, and which folders hold one."""

from __future__ import annotations

import re

from meshload.source import Folder

CONFIG = "adapter_config.json"
ARRAYS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

KEY = "adapter_config"
"""Where a checkpoint's config has the adapter's."""


def has_adapter(folder: Folder) -> bool:
    """Say whether an adapter and its config are there, and no whole model."""
    files = (ARRAYS, PICKLE)
    if folder.entry is not None:
        return folder.entry in files and folder.has(CONFIG)
    there = folder.has(CONFIG) and any(map(folder.has, files))
    return there and not any(re.fullmatch(r"(model|pytorch_model|consolidated)[.-].*", name) for name in folder.names())
