"""meshload opens any large-model checkpoint as lazy, named arrays and gives every rank of any mesh exactly its slices."""

from typing import TYPE_CHECKING, Any

from .array import Array, concatenate, interleave, stack
from .box import Box
from .checkpoint import Checkpoint, Problem
from .digests import Digest
from .errors import (
    CopiesDiffer,
    FormatError,
    LayoutError,
    LimitError,
    MeshloadError,
    MeshloadWarning,
    MissingArray,
    MissingPieces,
    Overlap,
    SourceError,
)
from .layout import Layout
from .loading import open, plan, restore
from .mesh import Mesh, Sharding
from .pieces import Pieces
from .planning import Plan

if TYPE_CHECKING:
    from .checking import Report, check, digest, verify
    from .converting import convert
    from .indexing import Index, index
    from .saving import save

__all__ = [
    "Array",
    "Box",
    "Checkpoint",
    "CopiesDiffer",
    "Digest",
    "FormatError",
    "Index",
    "Layout",
    "LayoutError",
    "LimitError",
    "Mesh",
    "MeshloadError",
    "MeshloadWarning",
    "MissingArray",
    "MissingPieces",
    "Overlap",
    "Pieces",
    "Plan",
    "Problem",
    "Report",
    "Sharding",
    "SourceError",
    "check",
    "concatenate",
    "convert",
    "digest",
    "index",
    "interleave",
    "open",
    "plan",
    "restore",
    "save",
    "stack",
    "verify",
]

_LATER = {
    **dict.fromkeys(("Report", "check", "digest", "verify"), "checking"),
    **dict.fromkeys(("Index", "index"), "indexing"),
    "convert": "converting",
    "save": "saving",
}
"""What most processes never call is imported when it is asked for: name -> module."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'meshload' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)
