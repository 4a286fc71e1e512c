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

import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshload.array import Array, stored_whole
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, LayoutError, MeshloadError, SourceError, listing
from meshload.formats import Parts
from meshload.source import ByteSource, Folder, LocalFolder, read_bytes
from meshload.writing import lay_out

from .._json import parsed

MAGIC = b"\x93NUMPY"

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

PARAMETER = re.compile(
    r"decoder\.embed_(?:tokens|positions)\.weight|decoder\.layer_norm\.(?:weight|bias)|lm_head\.weight"
    r"|decoder\.layers\.(?P<layer>0|[1-9]\d{0,8})"
    r"\.(?P<rest>(?:self_attn\.(?:q|k|v|out)_proj|self_attn_layer_norm|fc1|fc2|final_layer_norm)\.(?:weight|bias))"
)

HEAD = "lm_head.weight"

ENDS = ("decoder.embed_tokens.weight", "decoder.embed_positions.weight", "decoder.layer_norm.weight", "decoder.layer_norm.bias")
"""What each model has besides layers; FlexGen itself reads the tokens' embedding in place of `lm_head.weight`."""


@dataclass(frozen=True, slots=True)
class FlexGen:
    """The format of FlexGen's `-np` folders."""

    name: str = field(default="flexgen", init=False)
    order: int = field(default=38, init=False)
    naming: str = field(default="flexgen", init=False)

    def matches(self, folder: Folder) -> bool:
        """Say whether files have the names of OPT's parameters, and begin as NumPy's do or are empty."""
        if folder.entry is not None:
            return False
        named = [file for file in folder.names() if PARAMETER.fullmatch(file)]
        return any(_has_magic(folder.file(file)) for file in named[:3])

    def open(self, folder: Folder) -> Checkpoint:
        """Read the files' headers. What is damaged or missing is told by name."""
        files = [file for file in folder.names() if not file.endswith("/") and file != CONFIG]
        arrays: dict[str, Array] = {}
        unavailable: dict[str, str] = {}
        unlisted = []
        for file, found in _read_all(folder, files).items():
            if isinstance(found, Array):
                arrays[file] = found
            elif PARAMETER.fullmatch(file):
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
            self.name,
            aliases={HEAD: ENDS[0]} if tied else {},
            meta={"files": tuple(files), "unlisted": tuple(unlisted)},
            config=config,
            unavailable={**missing, **unavailable},
            problems=(*problems, *more),
        )

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out one file per array, whole, however the mesh cuts it."""
        _check_runnable(like.config or {})
        for name, array in like.arrays.items():
            if not PARAMETER.fullmatch(name):
                raise LayoutError(f"{name}: FlexGen has no place for it; it runs OPT alone")
            head = _head(array)
            lay_out(folder, name, head, len(head) + array.nbytes)

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: the format has no marker."""


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


def _missing(names: set[str]) -> dict[str, str]:
    """Return the files that others let expect, and why."""
    layers: dict[int, set[str]] = defaultdict(set)
    for match in filter(None, map(PARAMETER.fullmatch, names)):
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

    layers = {int(m["layer"]) for m in map(PARAMETER.fullmatch, names) if m and m["layer"] is not None}
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


def _has_magic(source: ByteSource) -> bool:
    return source.size == 0 or read_bytes(source, 0, min(source.size, len(MAGIC))) == MAGIC[: source.size]


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
