"""Which files are FlexGen's, by their names, OPT's parameters, and by how NumPy's files begin."""

from __future__ import annotations

import re

from meshload.source import ByteSource, read_bytes

MAGIC = b"\x93NUMPY"

_PARAMETER = (
    r"decoder\.embed_(?:tokens|positions)\.weight|decoder\.layer_norm\.(?:weight|bias)|lm_head\.weight"
    r"|decoder\.layers\.(?P<layer>0|[1-9]\d{0,8})"
    r"\.(?P<rest>(?:self_attn\.(?:q|k|v|out)_proj|self_attn_layer_norm|fc1|fc2|final_layer_norm)\.(?:weight|bias))"
)


def parameter(file: str) -> re.Match[str] | None:
    """Return the `layer` and the `rest` of a parameter's name; both None where it is in no layer."""
    return re.fullmatch(_PARAMETER, file) if file.startswith(("decoder.", "lm_head.")) else None


def has_magic(source: ByteSource) -> bool:
    """Say whether a file begins as NumPy's do, or is empty."""
    return source.size == 0 or read_bytes(source, 0, min(source.size, len(MAGIC))) == MAGIC[: source.size]
