"""A virtual Orbax checkpoint: metadata and a database (`_ocdbt.py`) that point into files of another format.

```
meshload_index.json        what was indexed: {"version": 1, "beside": whether the files lie in this folder themselves,
                           "files": {name: [bytes, when it was changed, in ns]}, "written": [the names below, and this one]}
index.{hex}.ocdbt          the nodes of the database; a new name each time, so that an older manifest never meets newer nodes
_METADATA, _CHECKPOINT_METADATA, commit_success.txt, manifest.ocdbt
                           as in any checkpoint of Orbax; the manifest is the last to come and the first to go
files/...                  links to what was indexed, where the index has a folder of its own; config.json too
```

Each array is zarr 2 without a compressor, its `.zarray` inline in the database, each chunk a range of a file; TensorStore needs no
alignment. It refuses paths with `..`, so that an index elsewhere needs links, and names that end in `.__lock`. The tree says
`np.ndarray`: Orbax then restores NumPy arrays where it is told of no sharding, and `jax.Array`s where it is told of one.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.errors import LayoutError, listing
from meshload.formats import Grid
from meshload.source import LocalFolder
from meshload.writing import put

from ._ocdbt import Range, database
from ._orbax_files import commit, tree_of, zarr2
from ._orbax_record import ALWAYS, MANIFEST, RECORD, VERSION

LOCK = ".__lock"
LONGEST = 32 << 10
"""Bytes of a name: TensorStore reads no database with keys of 64 KiB or more."""


def check_shown(array: Array) -> None:
    """Raise `LayoutError` where Orbax could not name an array, or TensorStore its dtype."""
    import tensorstore as ts

    if not array.name or any("\ud800" <= letter <= "\udfff" for letter in array.name):
        raise LayoutError("its name is empty, or no text: Orbax has no key for it")
    if len(array.name.encode()) > LONGEST:
        raise LayoutError(f"its name has {len(array.name.encode())} bytes, keys of a database at most {LONGEST}")
    try:
        ts.dtype(np.dtype(array.dtype).name)
    except ValueError:
        raise LayoutError(f"TensorStore has no dtype {array.dtype.name}") from None


def write_index(
    folder: LocalFolder, grids: Sequence[Grid], places: Mapping[Path, str], *, beside: bool, config: Mapping[str, Any] | None
) -> list[str]:
    """Write all files of an index but links, and return their names, the manifest's last."""
    _refuse_locks(places.values())
    name = uuid.uuid4()
    nodes = f"index.{name.hex[:16]}.ocdbt"
    manifest, data = database(_values(grids, places), nodes, uuid=name.bytes, time_ns=time.time_ns())
    laid = {grid.array.name: (grid.array, grid.chunk) for grid in grids}
    put(folder, "_METADATA", tree_of(laid, zarr3=False))
    commit(folder)
    put(folder, nodes, data)
    put(folder, MANIFEST, manifest)
    more = []
    if config is not None:
        put(folder, "config.json", json.dumps(dict(config), indent=2).encode() + b"\n")
        more = ["config.json"]
    written = [RECORD, nodes, *more, *ALWAYS[1:]]
    files = {file.path: file for grid in grids for file in grid.files}
    said = {
        "version": VERSION,
        "beside": beside,
        "files": {places[path]: [file.size, file.changed] for path, file in files.items()},
        "written": written,
    }
    put(folder, RECORD, json.dumps(said, indent=1).encode() + b"\n")
    return written


def _refuse_locks(places: Any) -> None:
    locks = [place for place in places if place.endswith(LOCK)]
    if locks:
        raise LayoutError(f"{listing(locks)}: TensorStore takes files of such names for its own locks; rename them")


def _values(grids: Sequence[Grid], places: Mapping[Path, str]) -> dict[str, bytes | Range]:
    found: dict[str, bytes | Range] = {}
    for grid in grids:
        array, name = grid.array, grid.array.name
        found[f"{name}/.zarray"] = json.dumps(zarr2(array, grid.chunk, compress=False, order=grid.order)).encode()
        nbytes = prod(grid.chunk) * array.dtype.itemsize
        counts = [range(n // c) for n, c in zip(array.shape, grid.chunk, strict=True)]
        names = [places[file.path] for file in grid.files]
        for at, file, offset in zip(itertools.product(*counts), grid.file.tolist(), grid.offset.tolist(), strict=True):
            found[f"{name}/{'.'.join(map(str, at)) or '0'}"] = Range(names[file], offset, nbytes)
    return found
