"""meshload opens any large-model checkpoint as lazy, named arrays and gives every rank of any mesh exactly its slices."""

from .array import Array, concatenate, interleave, stack
from .box import Box
from .checking import Report, check
from .checkpoint import Checkpoint, Problem
from .converting import convert
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

__all__ = [
    "Array",
    "Box",
    "Checkpoint",
    "CopiesDiffer",
    "FormatError",
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
    "interleave",
    "open",
    "plan",
    "restore",
    "stack",
]
