"""The folders in which DeepSpeed keeps a tag, known by the names of their files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshload.errors import FormatError, SourceError
from meshload.source import Folder, read_bytes

_SHARD = r"(?:(?:bf16|fp16)_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_?(optim|model)_states\.pt"
_MODEL = r"mp_rank_(\d{1,9})_model_states\.pt"
_LAYER = r"layer_(\d{1,9})(?:-model_(\d{1,9}))?-model_states\.pt"
_EXPERT = r"(?:layer_(\d{1,9})_)?expert_(\d{1,9})_mp_rank_(\d{1,9})_model_states\.pt"
_OTHER = r"expp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt"
"""Texts, as every folder is asked whether it is DeepSpeed's, and few need them compiled."""


def kind_of(file: str) -> tuple[str, Any]:
    """Return which field of `TagFiles` a file belongs to, and its key there; an empty text where it is none of a tag's."""
    if not file.endswith("_states.pt"):
        return "", None
    if match := re.fullmatch(_SHARD, file):
        return "optimizers" if match[3] == "optim" else "shards", (int(match[2]), int(match[1]))
    if match := re.fullmatch(_MODEL, file):
        return "models", int(match[1])
    if match := re.fullmatch(_LAYER, file):
        return "layers", (int(match[1]), int(match[2] or 0))
    if match := re.fullmatch(_EXPERT, file):
        return "experts", (int(match[1] or -1), int(match[2]), int(match[3]))
    return ("others", None) if re.fullmatch(_OTHER, file) else ("", None)


def is_tag(listed: Sequence[str]) -> bool:
    """Say whether these are the files of a tag, and of no universal checkpoint."""
    return "zero/" not in listed and any(kind_of(file)[0] for file in listed)


def has_tag(folder: Folder, tag: str) -> bool:
    """Say whether a folder holds the folder of a tag."""
    try:
        return is_tag(folder.names(tag))
    except (FormatError, SourceError):
        return False


def tag_named(folder: Folder, file: str) -> str | None:
    """Return the tag that `latest` or `latest_universal` names; None where there is no such file, or it is empty."""
    if not folder.has(file):
        return None
    source = folder.file(file)
    tag = read_bytes(source, 0, min(source.size, 1000)).decode(errors="replace").strip()
    return tag or None


def tags(folder: Folder, listed: Sequence[str]) -> list[str]:
    """Return the folders in a root that hold a tag, in the order of their numbers."""
    inner = [n[:-1] for n in listed if n.endswith("/")]
    is_root = {"latest", "zero_to_fp32.py"} & set(listed) or any(n.startswith("global_step") for n in inner)
    return sorted((n for n in inner if has_tag(folder, n)), key=_by_number) if is_root else []


def _by_number(tag: str) -> tuple[int, str]:
    numbers = re.findall(r"\d{1,18}", tag)
    return (int(numbers[-1]) if numbers else -1, tag)


# --- universal checkpoints --------------------------------------------------------------------------------------------

STATE = "optimizer_state.pt"


def universal_tags(folder: Folder, listed: Sequence[str]) -> list[str]:
    """Return the folders in a root that hold a universal tag."""
    inner = [n[:-1] for n in listed if n.endswith("/")]
    is_root = "latest_universal" in listed or any(n.endswith("_universal") for n in inner)
    return [n for n in inner if "zero/" in folder.names(n) and is_zero(folder, f"{n}/zero")] if is_root else []


def is_zero(folder: Folder, under: str) -> bool:
    """Say whether a folder is the `zero` of a universal checkpoint."""
    listed = folder.names(under)
    if STATE in listed:
        return True
    return any(n.endswith("/") and folder.has(f"{under}/{n}fp32.pt") for n in listed[:4])
