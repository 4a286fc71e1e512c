"""FlexGen's weights (https://github.com/FMInference/FlexLLMGen, package `flexgen` 0.1.8): a folder of NumPy files, for OPT alone.

Files. `{path}/{model}-np/` holds one file per parameter, whose name is the parameter's, without a suffix:

    decoder.embed_tokens.weight  decoder.embed_positions.weight  decoder.layers.0.self_attn.q_proj.weight ...  lm_head.weight

Each is a file as `numpy.save` writes it: `\\x93NUMPY`, version, the length of a header (2 bytes little endian; 4 since version
2), the header, a Python literal such as `{'descr': '<f2', 'fortran_order': False, 'shape': (101, 32), }`, and the elements.
FlexGen writes version 1.0, row-major, and float16 where the source was. A dtype that NumPy lacks (bfloat16) is written as bytes
that mean nothing (`|V2`); those are refused.

There is no config, no index and no mark of completeness; the shapes are all that tells sizes, and nothing tells the heads.
FlexGen takes whatever file is there, so an interrupted conversion leaves empty or short ones that it trusts; here such a file
is named. What some layers have is missed in the others. A `config.json` in the folder, which FlexGen does not write, is read
too.

**Written** are models as FlexGen runs them, others are refused: OPT with norms before, ReLU, all biases, `ffn_dim` four times the
hidden size, a tied head. FlexGen expects float16 (`dtype="float16"`), and finds the folder by its name, the model's with `-np`
behind it. `lm_head.weight` is left out, since FlexGen never reads it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from meshload.array import Array, stored_whole
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, MeshloadError, SourceError, listing
from meshload.source import ByteSource, Folder, read_bytes

from ._flexgen_find import MAGIC, parameter
from ._json import parsed

HEADER = re.compile(
    r"\{\s*'descr':\s*(?P<descr>'[^'\n]*'|\[[^\n]*\]),\s*'fortran_order':\s*(?P<fortran>True|False),"
    r"\s*'shape':\s*\((?P<shape>|\d{1,19},|\d{1,19}(?:,\s*\d{1,19})+,?)\),?\s*\}\s*"
)

HEADER_LIMIT = 10_000
"""NumPy's own limit for headers that are not trusted, in bytes."""

CONFIG_LIMIT = 16 << 20

HEADERS_AT_ONCE = 8

MAX_NDIM = 32

TOO_LARGE = 1 << 60
"""Elements: more of them make NumPy's byte counts overflow."""

CONFIG = "config.json"

HEAD = "lm_head.weight"

ENDS = ("decoder.embed_tokens.weight", "decoder.embed_positions.weight", "decoder.layer_norm.weight", "decoder.layer_norm.bias")
"""What each model has besides layers; FlexGen itself reads the tokens' embedding in place of `lm_head.weight`."""


def checkpoint_in(folder: Folder) -> Checkpoint:
    """Read the files' headers. What is damaged or missing is told by name."""
    files = [file for file in folder.names() if not file.endswith("/") and file != CONFIG]
    arrays: dict[str, Array] = {}
    unavailable: dict[str, str] = {}
    unlisted = []
    for file, found in _read_all(folder, files).items():
        if isinstance(found, Array):
            arrays[file] = found
        elif parameter(file):
            unavailable[file] = str(found)
        else:
            unlisted.append(file)
    problems = [Problem(text, array=file, file=file) for file, text in unavailable.items()]
    if not arrays:
        seen = next(iter(unavailable.values()), f"it holds {listing(files) or 'nothing'}")
        raise FormatError(f"{folder.name}: none of its files is a NumPy array that can be read: {seen}")
    missing = _missing({*arrays, *unavailable})
    problems += [Problem(text, array=file, file=file) for file, text in missing.items()]
    config, more = _config(folder, arrays, {*arrays, *unavailable})
    tied = HEAD not in arrays and ENDS[0] in arrays and HEAD not in unavailable
    return Checkpoint(
        arrays,
        "flexgen",
        aliases={HEAD: ENDS[0]} if tied else {},
        meta={"files": tuple(files), "unlisted": tuple(unlisted)},
        config=config,
        unavailable={**missing, **unavailable},
        problems=(*problems, *more),
    )


def _missing(names: set[str]) -> dict[str, str]:
    """Return the files that others let expect, and why."""
    layers: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(parameter, names)):
        if match["layer"] is not None:
            layers[int(match["layer"])].add(match["rest"])
    kinds = sorted({rest for rests in layers.values() for rest in rests})
    found = {}
    last = max(layers, default=-1)
    absent = sorted(set(range(min(last, len(names)) + 1)) - set(layers))
    for layer in [*sorted(layers), *absent]:
        for rest in kinds:
            if rest not in layers.get(layer, ()):
                where = "other layers have it" if layer in layers else f"there is a layer {last}"
                found[f"decoder.layers.{layer}.{rest}"] = f"not there, though {where}; the conversion may have been interrupted"
    has_bias = any(rest.endswith(".bias") for rest in kinds)
    for name in ENDS:
        if name not in names and (has_bias or not name.endswith(".bias")):
            found[name] = "not there; each FlexGen model has it, so the conversion may have been interrupted"
    return found


def _config(folder: Folder, arrays: Mapping[str, Array], names: set[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return what shapes and names tell of the model, and what a config beside them says."""

    def size(dim: int, *choices: str) -> int | None:
        return next((arrays[n].shape[dim] for n in choices if n in arrays and arrays[n].ndim > dim), None)

    layers = {int(m["layer"]) for m in map(parameter, names) if m and m["layer"] is not None}
    of_layers = [f"decoder.layers.{i}." for i in sorted(layers)]
    positions = size(0, ENDS[1])
    told = {
        "vocab_size": size(0, ENDS[0], "lm_head.weight"),
        "hidden_size": size(1, ENDS[1], *(f"{layer}fc1.weight" for layer in of_layers)),
        "word_embed_proj_dim": size(1, ENDS[0], "lm_head.weight"),
        "max_position_embeddings": None if positions is None else max(positions - 2, 0),  # positions begin at 2
        "num_hidden_layers": max(layers, default=-1) + 1,
        "ffn_dim": size(0, *(f"{layer}fc1.weight" for layer in of_layers)),
    }
    kinds = {n.rpartition(".")[0].rpartition(".")[2] for n in names if n.endswith(".bias")}
    config: dict[str, Any] = {
        "model_type": "opt",
        **{key: n for key, n in told.items() if n is not None},
        "enable_bias": bool(kinds & {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}),
        "layer_norm_elementwise_affine": any(n.endswith("layer_norm.weight") for n in names),
        "tie_word_embeddings": True,
    }
    if not folder.has(CONFIG):
        return config, []
    try:
        source = folder.file(CONFIG)
        if source.size > CONFIG_LIMIT:
            raise FormatError(f"{CONFIG}: has {source.size} bytes, at most {CONFIG_LIMIT} were expected")
        theirs = parsed(read_bytes(source), CONFIG)
    except FormatError as error:
        return config, [Problem(str(error), file=CONFIG)]
    clash = [f"{k} is {theirs[k]!r}, the files give {config[k]!r}" for k in config if k in theirs and theirs[k] != config[k]]
    return {**config, **theirs}, [Problem(f"{CONFIG}: {listing(clash)}", file=CONFIG)] if clash else []


# --- NumPy's files ----------------------------------------------------------------------------------------------------


def _read_all(folder: Folder, files: Sequence[str]) -> dict[str, Array | MeshloadError]:
    """Read the headers of several files at a time; one that is no sound array gives its error."""

    def attempt(file: str) -> Array | MeshloadError:
        try:
            return _array(folder.file(file))
        except (FormatError, SourceError) as error:
            return error

    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="meshload") as pool:
        return dict(zip(files, pool.map(attempt, files), strict=True))


def _array(source: ByteSource) -> Array:
    """Read a file's header, and check it against the file's size."""
    file, size = source.name, source.size
    if size == 0:
        raise FormatError(f"{file}: empty, a NumPy file begins with its header; the conversion may have been interrupted")
    start = read_bytes(source, 0, min(size, 128))  # all of a common header
    if not start.startswith(MAGIC):
        raise FormatError(f"{file}: not a NumPy file: it begins with {start[:6]!r}, {MAGIC!r} was expected")
    major, wide = start[6] if size > 6 else 0, 4 if size > 6 and start[6] > 1 else 2
    if size < 8 + wide:
        raise FormatError(f"{file}: truncated within its header: it has {size} bytes, a header has at least {8 + wide}")
    if major not in (1, 2, 3):
        raise FormatError(f"{file}: version {major}.{start[7]} of NumPy's format, 1 to 3 are known")
    length = int.from_bytes(start[8 : 8 + wide], "little")
    begin = 8 + wide + length
    if length > HEADER_LIMIT:
        raise FormatError(f"{file}: its header declares {length} bytes, at most {HEADER_LIMIT} were expected")
    if begin > size:
        raise FormatError(f"{file}: truncated within its header: the header ends at byte {begin}, the file has {size}")
    raw = start[8 + wide : begin] if begin <= len(start) else read_bytes(source, 8 + wide, begin)
    dtype, shape, is_fortran = _described(raw.decode("utf-8" if major == 3 else "latin-1", "replace"), file)
    needed = math.prod(shape) * dtype.itemsize
    if begin + needed != size:
        kind = "truncated" if begin + needed > size else f"{size - begin - needed} trailing bytes"
        raise FormatError(
            f"{file}: {kind}: its header declares {dtype.str} {shape}, which makes {begin + needed} bytes with the header, "
            f"the file has {size}; the conversion may have been interrupted"
        )
    if is_fortran:
        return stored_whole(file, dtype, shape[::-1], source, begin).T
    return stored_whole(file, dtype, shape, source, begin)


def _described(text: str, file: str) -> tuple[np.dtype[Any], Shape, bool]:
    """Return what a header says: dtype, shape, and whether the first dim runs fastest."""
    match = HEADER.fullmatch(text)
    if match is None:
        raise FormatError(f"{file}: its header is not as NumPy writes it, with descr, fortran_order and shape: {text[:100]!r}")
    descr, shape = match["descr"], tuple(int(n) for n in re.findall(r"\d+", match["shape"]))
    if not re.fullmatch(r"'(<[fiuc]\d{1,2}|\|[biu]1)'", descr):
        more = "; bfloat16 written by NumPy looks so, and its bits are not known to be that" if descr.startswith("'|V") else ""
        raise FormatError(f"{file}: its dtype is {descr[:40]}, little-endian numbers were expected{more}")
    try:
        dtype = np.dtype(descr[1:-1])
    except TypeError as error:
        raise FormatError(f"{file}: its dtype is {descr}, which NumPy does not know") from error
    if len(shape) > MAX_NDIM or math.prod(n or 1 for n in shape) >= TOO_LARGE:
        raise FormatError(f"{file}: its shape is {str(shape)[:80]}, of more than {MAX_NDIM} dims or {TOO_LARGE} elements")
    return dtype, shape, match["fortran"] == "True"
