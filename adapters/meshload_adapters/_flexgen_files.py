"""New files for FlexGen: which models it runs, and what stands in front of an array's elements."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.source import LocalFolder
from meshload.writing import lay_out

from ._flexgen_find import parameter


def lay_out_parameters(folder: LocalFolder, like: Checkpoint) -> None:
    """Lay out one file per array, whole."""
    _check_runnable(like.config or {})
    for name, array in like.arrays.items():
        if not parameter(name):
            raise LayoutError(f"{name}: FlexGen has no place for it; it runs OPT alone")
        head = _head(array)
        lay_out(folder, name, head, len(head) + array.nbytes)


def _check_runnable(config: Mapping[str, Any]) -> None:
    """Raise where a model's config says what FlexGen's code does not compute."""
    hidden = config.get("hidden_size")
    expected = {
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden if type(hidden) is int else None,
    }
    other = {key: config[key] for key, value in expected.items() if config.get(key, value) != value}
    if other:
        raise LayoutError(
            f"config: FlexGen runs OPT with {listing(f'{key} {expected[key]!r}' for key in other)}; here is "
            f"{listing(f'{key} {value!r}' for key, value in other.items())}"
        )


def _head(array: Array) -> bytes:
    """Return what stands in front of an array's elements in a file of `numpy.save`, version 1.0."""
    dtype = np.dtype(array.dtype)
    if array.stored is not None or dtype.isbuiltin != 1:
        raise LayoutError(f"{array.name}: NumPy's files have no dtype {array.stored or dtype.name}; give dtype='float16'")
    out = io.BytesIO()
    described = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(out, described)
    return out.getvalue()
