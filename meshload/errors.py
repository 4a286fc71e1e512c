"""Errors and warnings of meshload.

```
MeshloadError
├── FormatError     (ValueError)   a file is not what it says: hostile, damaged, unfinished, not recognised
├── SourceError     (OSError)      bytes that should be there could not be read
├── MissingArray    (KeyError)     an array is not in the checkpoint, with the reason
├── MissingPieces   (ValueError)   elements that are wanted are stored nowhere
├── Overlap         (ValueError)   elements that are wanted are stored more than once, in different boxes
├── CopiesDiffer    (ValueError)   replicated copies of an array are not equal, and the caller asked
├── LayoutError     (ValueError)   a mesh, layout, target or configuration does not fit the arrays
└── LimitError      (ValueError)   one unit that must be held at once is larger than `max_bytes`
MeshloadWarning     (UserWarning)  right, but unexpected
```

Each message says which array or file, what was found, what was expected and what to do.
"""

from collections.abc import Iterable


class MeshloadError(Exception):
    """Whatever meshload raises on purpose."""


class FormatError(MeshloadError, ValueError):
    """A file is not what it says: hostile, damaged, unfinished or not recognised."""


class SourceError(MeshloadError, OSError):
    """Bytes that should be there could not be read."""


class MissingArray(MeshloadError, KeyError):
    """An array is not in the checkpoint; the message tells why."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show its repr


class MissingPieces(MeshloadError, ValueError):
    """Elements that are wanted are stored nowhere."""


class Overlap(MeshloadError, ValueError):
    """Elements that are wanted are stored more than once, in different boxes."""


class CopiesDiffer(MeshloadError, ValueError):
    """Replicated copies of an array are not equal, and the caller asked."""


class LayoutError(MeshloadError, ValueError):
    """A mesh, layout, target or configuration does not fit the arrays."""


class LimitError(MeshloadError, ValueError):
    """One unit that must be held at once is larger than `max_bytes`."""


class MeshloadWarning(UserWarning):
    """Something is right, but unexpected."""


def listing(items: Iterable[str], limit: int = 10) -> str:
    """Join names for a message, shortened after `limit`, with the count.

    >>> listing(["a", "b", "c"], limit=2)
    'a, b and 1 more (3 in all)'
    """
    names = list(items)
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more ({len(names)} in all)"
