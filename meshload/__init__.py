"""meshload opens any large-model checkpoint as lazy, named arrays and gives every rank of any mesh exactly its slices."""

from .array import Array, concatenate, interleave, stack
from .box import Box
from .checking import Report, check, digest, verify
from .checkpoint import Checkpoint, Problem
from .converting import convert
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
from .indexing import Index, index
from .layout import Layout
from .loading import open, plan, restore
from .mesh import Mesh, Sharding
from .pieces import Pieces
from .planning import Plan
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
