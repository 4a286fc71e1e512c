"""New safetensors files: which arrays go into which file, and what a file's header says of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meshload.array import Array
from meshload.errors import LayoutError

from ._hf_find import HEADER_LIMIT
from ._safetensors import BYTE, DTYPES

NAMES = {dtype: name for name, (dtype, bits) in DTYPES.items() if bits >= 8 and name != "U8"} | {BYTE: "U8"}


def shards(arrays: Iterable[Array], max_shard_size: int) -> list[list[Array]]:
    """Fill files in order, each up to a size; an array that is larger has one alone."""
    found: list[list[Array]] = [[]]
    room = max_shard_size
    for array in arrays:
        if found[-1] and array.nbytes > room:
            found.append([])
            room = max_shard_size
        found[-1].append(array)
        room -= array.nbytes
    return found


PLAIN: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""What files of plain tensors say of themselves."""


def head(arrays: Sequence[Array], metadata: Mapping[str, str] = PLAIN) -> tuple[bytes, int]:
    """Return the bytes in front of a file's data, and the size of the whole file.

    As the reference library has it: wide dtypes first, so that all are aligned to their own size, then by name; the header is
    padded to a multiple of 8.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for array in sorted(arrays, key=lambda a: (-a.dtype.itemsize, a.name)):
        kind, shape = _described(array)
        if array.name == "__metadata__":
            raise LayoutError(f"{array.name}: safetensors keeps this name for itself; rename the array")
        described[array.name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    try:
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"a header is UTF-8, and some name of an array is not: {error}") from error
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise LayoutError(
            f"the header of {len(arrays)} arrays would take {len(text)} bytes, at most {HEADER_LIMIT} are allowed; "
            f"use a smaller max_shard_size"
        )
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + at


def _described(array: Array) -> tuple[str, list[int]]:
    """Return dtype and shape as the header says them; types below one byte count elements, not bytes."""
    if array.stored is not None and array.stored in DTYPES:
        bits = DTYPES[array.stored][1]
        *outer, last = array.shape
        return array.stored, [*outer, last * 8 // bits]
    name = NAMES.get(np.dtype(array.dtype).newbyteorder("<"))
    if name is None:
        raise LayoutError(f"{array.name}: safetensors has no dtype {array.stored or array.dtype.name}; give dtype=")
    return name, list(array.shape)
