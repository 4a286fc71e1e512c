"""A new Orbax checkpoint: the tree of its arrays, their chunks, and their metadata in one OCDBT database."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.box import Box, Shape
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, SourceError, listing
from meshload.formats import Parts
from meshload.source import LocalFolder
from meshload.writing import put, remove

from ._ocdbt import last_version
from ._orbax import MOMENTS
from ._orbax_find import TREE
from ._orbax_record import MANIFEST

CHUNK = 64 << 20
"""Bytes: chunks of arrays that no mesh cuts. A reader decodes a chunk whole, and many at a time."""
CHUNKS = 1 << 18
"""The most chunks of one array: writing as many takes half a minute, and each is an entry that all readers list."""
DATA = "d"
"""The folder in which OCDBT has its files."""
DATA_FILE = 2 << 30
"""Bytes per file of OCDBT, as Orbax has it."""
HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"

DRIVERS = {True: "zarr3", False: "zarr"}


def lay_out_tree(folder: LocalFolder, like: Checkpoint, parts: Parts, *, zarr3: bool, compress: bool) -> None:
    """Write a tree's `_METADATA`, and the metadata of its arrays; moments lie where optax's Adam has them."""
    laid = {a.name: (a, chunks(a, parts.get(a.name, ()))) for a in like.arrays.values()}
    fields = {kind: field for field, kind in MOMENTS.items()}
    for kind, moments in like.optimizer.items():
        if kind not in fields:
            raise LayoutError(f"optimizer: Orbax has no place for {kind}; name those of {', '.join(fields)} that are there")
        laid |= {f"opt_state.0.{fields[kind]}.{n}": (a, chunks(a, parts.get(n, ()))) for n, a in moments.items()}
    strange = [name for name in laid if any("\ud800" <= letter <= "\udfff" for letter in name)]
    if strange:
        raise LayoutError(f"{listing(map(repr, strange))}: such names are no text, and Orbax has no keys for them")
    put(folder, TREE, tree_of(laid, zarr3=zarr3))
    lay_out_arrays(folder, laid, zarr3=zarr3, compress=compress)


def chunks(array: Array, parts: Sequence[tuple[int, Box]]) -> Shape:
    """Return the chunk shape of which every rank's part is made whole; without parts, at most `CHUNK` bytes along the first dims.

    So it is, too, where parts are cut so unevenly that they have no such chunks but tiny ones, more than `CHUNKS`.

    >>> from meshload.pieces import empty
    >>> chunks(Array("a", np.dtype("f4"), (13, 4), empty(2)), [(r, Box((4 * r, 0), (min(4, 13 - 4 * r), 4))) for r in range(4)])
    (4, 4)
    """
    found = []
    for d, n in enumerate(array.shape):
        edges = {e for _, box in parts for e in (box.start[d], box.stop[d])} - {0, n}
        found.append(max(1, math.gcd(*edges) if edges else n))
    count = math.prod(-(-n // c) for n, c in zip(array.shape, found, strict=True))
    return tuple(found) if parts and count <= CHUNKS else _small(array.shape, array.dtype.itemsize)


def _small(shape: Shape, itemsize: int) -> Shape:
    found = [max(1, n) for n in shape]
    for d in range(len(found)):
        inner = math.prod(found[d + 1 :]) * itemsize
        found[d] = max(1, min(found[d], CHUNK // inner))
        if found[d] > 1 or inner <= CHUNK:
            break
    return tuple(found)


def lay_out_arrays(folder: LocalFolder, chunk_of: Mapping[str, tuple[Array, Shape]], *, zarr3: bool, compress: bool) -> None:
    """Write the metadata of every array into one database; no chunk is written."""
    import tensorstore as ts

    context = ts.Context({"file_io_sync": False})
    base = folder.kvstore.spec(unbind_context=True).to_json()
    spec = {"driver": "ocdbt", "base": base, "target_data_file_size": DATA_FILE, "config": {"compression": {"id": "zstd"}}}
    try:
        database = ts.KvStore.open(spec, context=context).result()
        opening = []
        for name, (array, chunk) in chunk_of.items():
            store = database.copy()
            store.path += f"{name}/"
            metadata = _zarr3(array, chunk, compress) if zarr3 else zarr2(array, chunk, compress=compress)
            made = {"driver": DRIVERS[zarr3], "metadata": metadata}
            opening.append(ts.open(made, kvstore=store, context=context, create=True, open=True))
        for future in opening:
            future.result()
    except (ValueError, OSError) as error:
        raise SourceError(f"{folder.name}: laying out {len(chunk_of)} arrays failed: {str(error)[:500]}") from error


def zarr2(array: Array, chunk: Shape, *, compress: bool, order: str = "C") -> dict[str, Any]:
    """Return the metadata of an array of zarr version 2, as TensorStore names dtypes."""
    return {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(chunk),
        "dtype": _zarr2_dtype(array),
        "compressor": {"id": "zstd", "level": 1} if compress else None,
        "fill_value": None,
        "filters": None,
        "order": order,
        "dimension_separator": ".",
    }


def _zarr2_dtype(array: Array) -> str:
    dtype = np.dtype(array.dtype)
    return dtype.name if dtype.type.__module__ == "ml_dtypes" else dtype.str


def _zarr3(array: Array, chunk: Shape, compress: bool) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compress:
        codecs.append({"name": "zstd", "configuration": {"level": 1}})
    return {
        "shape": list(array.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "data_type": np.dtype(array.dtype).name,
        "codecs": codecs,
    }


def tree_of(arrays: Mapping[str, tuple[Array, Shape]], *, zarr3: bool) -> bytes:
    """Return `_METADATA`: a nested dict, cut at the dots of the names.

    Of `np.ndarray`s, which Orbax restores where it is told of no sharding; it refuses a `jax.Array` without one.
    """
    paths = paths_of(arrays)
    described = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": 2} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(arrays[name][1])},
        }
        for name, path in paths.items()
    }
    found = {
        "tree_metadata": described,
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(found).encode()


def paths_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return each name's path: its words, but for a word that is another array's name too, which cannot be a dict as well.

    A name with an empty word is one key.

    >>> paths_of(["a.b", "a.b.c", "d.e", "f..g"])
    {'a.b': ('a', 'b'), 'a.b.c': ('a', 'b.c'), 'd.e': ('d', 'e'), 'f..g': ('f..g',)}
    """
    known = set(names)
    found = {}
    for name in known:
        path: list[str] = []
        for word in name.split("."):
            if path and ".".join(path) in known:
                path[-1:] = [f"{path[-1]}.{word}"]
            else:
                path.append(word)
        found[name] = tuple(path) if all(path) else (name,)
    return {name: found[name] for name in names}


def keep_last_version(folder: LocalFolder) -> None:
    """Remove the files of a database that only what was written before, or was not finished, has a use for."""
    try:
        manifest, files = last_version(folder.kvstore)
        folder.kvstore.write(MANIFEST, manifest).result()
    except (ValueError, OSError) as error:
        raise SourceError(f"{folder.name}: going through what was written failed: {str(error)[:500]}") from error
    remove(folder, [file for name in folder.names(DATA) if (file := f"{DATA}/{name}") not in files])


def commit(folder: LocalFolder) -> None:
    """Write the markers of a finished save."""
    now = time.time_ns()
    said = {
        "item_handlers": HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    put(folder, "_CHECKPOINT_METADATA", json.dumps(said).encode())
    put(folder, "commit_success.txt", b"")
