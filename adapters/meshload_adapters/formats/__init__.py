"""Formats: one file each, describing where the bytes lie. Their classes are here by name, imported when they are asked for."""

import importlib
from typing import Any

MODULES = {
    "DCP": "dcp",
    "DeepSpeed": "deepspeed",
    "FastLLM": "fast_llm",
    "FlexGen": "flexgen",
    "HuggingFace": "hf",
    "Megatron": "megatron",
    "MegatronCore": "megatron_core",
    "Orbax": "orbax",
    "PEFT": "peft",
    "Torch": "torch",
    "Universal": "universal",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
