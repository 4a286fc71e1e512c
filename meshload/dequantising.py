"""What quantised weights mean: lazy arrays in which values and scales have become numbers of the dtype that was asked for.

Such an array is a source of decoded chunks, as a compressed one is, so whatever cuts, renames, reads or converts arrays takes it as
any other. A chunk is made of whole blocks, and reads the values and scales of its own box alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .array import Array
from .box import Shape
from .errors import LayoutError
from .frameworks import is_floating
from .naming import flattened
from .quantised import blocks_of
from .reading import read_here
from .source import Chunks

CHUNK = 1 << 22
"""Elements of a chunk, about."""
SLAB = 1 << 20
"""Elements that are computed at once, about: they take more memory than what becomes of them."""
NARROW = 1024
"""Elements of a chunk's last dim, about, where ranks may want some columns, and skipping the others is cheap."""
SCALES = ("_scale_inv", "_scale")
"""What is added to a weight's name for the factors that its values are to be multiplied with."""
ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")
"""What a layer has for its inputs, in place of `weight`; it means nothing to a weight that is not quantised."""

Part = tuple[slice, ...]
Floats = NDArray[np.float32]


class Meaning(Protocol):
    """How the elements of a weight follow from stored arrays."""

    @property
    def shape(self) -> Shape:
        """Of the weight."""

    @property
    def block(self) -> Shape:
        """Elements that belong together, per dim."""

    @property
    def stored(self) -> tuple[Array, ...]:
        """What it is made of: values first."""

    def needs(self, part: Part) -> tuple[Part, ...]:
        """Return which part of each stored array belongs to a part of the weight that begins with whole blocks."""

    def values(self, *stored: NDArray[Any]) -> Floats:
        """Return a part's elements, of the parts that belong to it."""


def dequantised(
    arrays: Mapping[str, Array], config: Mapping[str, Any] | None, dtype: np.dtype[Any], *, narrow: bool = False
) -> tuple[Mapping[str, Array], Mapping[str, Any] | None]:
    """Return arrays in which each quantised weight is what it means, and a config that tells of no quantisation any more.

    Values are computed in float32 and rounded once, to `dtype`. `narrow` cuts chunks for ranks that want some columns. A method
    that is not known here, and scales of which it is not said what they scale, raise `LayoutError`.
    """
    told = flattened(config or {}).get("quantization_config")
    quantisation = told if isinstance(told, Mapping) else {}
    method = METHODS.get(quantisation.get("quant_method"))
    if method is None:
        how = quantisation["quant_method"]
        raise LayoutError(f"dtype=: weights quantised by {how} cannot be dequantised; leave out dtype= to get them as stored")
    first: dict[str, Array] = {}
    gone: set[str] = set()
    for name, meaning, names, turn in method(arrays, quantisation):
        if dtype == arrays[names[0]].dtype:
            raise LayoutError(f"dtype=: {name} is {dtype.name} already, and its scales would be cast too; leave out dtype=")
        source = Dequantised(name, meaning, dtype, _blocks(meaning.shape, meaning.block, CHUNK, NARROW if narrow else None))
        first[names[0]] = turn(Array(name, dtype, meaning.shape, source.pieces()))
        gone.update(names)
    if not first:
        return arrays, config
    made = {}
    for name, array in arrays.items():
        if name in first:
            made[first[name].name] = first[name]
        elif name not in gone:
            made[name] = array
    return made, _without(config)


def _without(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if config is None:
        return None
    nested = config.get("text_config")
    inner = {"text_config": _without(nested)} if isinstance(nested, Mapping) else {}
    return {key: value for key, value in {**config, **inner}.items() if key != "quantization_config"}


# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dequantised(Chunks):
    """A quantised weight as decoded chunks."""

    name: str
    meaning: Meaning
    dtype: np.dtype[Any]
    chunk: Shape

    @property
    def shape(self) -> Shape:
        return self.meaning.shape

    @property
    def source(self) -> Any:
        """Where the values come from."""
        return next(iter(self.meaning.stored[0].pieces.sources), None)

    @property
    def is_far(self) -> bool:
        """Whether reading goes over a network."""
        return any(getattr(s, "is_far", False) or getattr(s, "holds", False) for a in self.meaning.stored for s in a.pieces.sources)

    @property
    def changed(self) -> list[Any]:
        """When what it is made of was last changed."""
        return [[s.name, int(s.size), getattr(s, "changed", None)] for a in self.meaning.stored for s in a.pieces.sources]

    def read_chunks(self, ks: Sequence[int]) -> list[NDArray[Any]]:
        """Return chunks, each computed where its parts have been read."""
        outs = {k: np.empty([s.stop - s.start for s in self.slices(k)], self.dtype) for k in ks}
        self.decode_into(outs)
        return [outs[k] for k in ks]

    def decode_into(self, outs: Mapping[int, NDArray[Any]]) -> None:
        """Compute chunks right into arrays of their clipped shapes, slab by slab."""
        for k, out in outs.items():
            part = self.slices(k)
            needed = self.meaning.needs(part)
            read = [read_here(array[held]) for array, held in zip(self.meaning.stored, needed, strict=True)]
            slab = _blocks(out.shape, self.meaning.block, SLAB)
            for at in np.ndindex(*(-(-n // m) for n, m in zip(out.shape, slab, strict=True))):
                starts = (i * m for i, m in zip(at, slab, strict=True))
                here = tuple(slice(a, min(a + m, n)) for a, m, n in zip(starts, slab, out.shape, strict=True))
                there = self.meaning.needs(_moved(here, part, 1))
                out[here] = self.meaning.values(*(r[_moved(t, n, -1)] for r, t, n in zip(read, there, needed, strict=True)))


def _moved(part: Part, by: Part, sign: int) -> Part:
    return tuple(slice(s.start + sign * at.start, s.stop + sign * at.start) for s, at in zip(part, by, strict=True))


def _blocks(shape: Shape, block: Shape, room: int, widest: int | None = None) -> Shape:
    """Return the shape of about `room` elements made of whole blocks, the last dims as long as they fit, or as `widest`."""
    found = list(shape)
    for d in range(len(shape) - 1, -1, -1):
        most = min(room, widest or room) if d == len(shape) - 1 else room
        found[d] = max(1, shape[d] if shape[d] <= most else max(block[d], most // block[d] * block[d]))
        room = max(1, room // found[d])
    return tuple(found)


# --- the methods ------------------------------------------------------------------------------------------------------

Found = Iterator[tuple[str, Meaning, tuple[str, ...], Callable[[Array], Array]]]
"""Name, meaning, the stored names of which it comes, and how the weight lies in it."""


def _as_it_is(array: Array) -> Array:
    return array


def scaled(arrays: Mapping[str, Array], quantisation: Mapping[str, Any]) -> Found:
    """Go through the 8-bit floats, and integers where the config says that there may be some, that have scales beside them."""
    blocks = blocks_of(quantisation)
    integers = quantisation.get("quant_method") == "compressed-tensors"
    for scales in arrays:
        suffix = next((s for s in SCALES if scales.endswith(s)), "")
        name = scales.removesuffix(suffix)
        strange = next((n for n in (f"{name}_packed", f"{name}_zero_point") if n in arrays), None)
        if suffix and strange is not None:
            raise LayoutError(f"dtype=: {strange}: packed weights and zero points are not dequantised; leave out dtype=")
        dtype = arrays[name].dtype if suffix and name in arrays else None
        if dtype is not None and ((dtype.itemsize == 1 and is_floating(dtype)) or (integers and dtype == np.int8)):
            inputs = (name.removesuffix("weight") + more for more in ACTIVATIONS)
            names = (name, scales, *(n for n in inputs if n in arrays))
            yield name, Scaled.of(arrays[name], arrays[scales], blocks), names, _as_it_is


@dataclass(frozen=True, eq=False)
class Scaled:
    """8-bit numbers times scales: one for all, one per row, or one per block of the last dims.

    - https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/finegrained_fp8.py
    - https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/quantization/lifecycle/forward.py
    """

    weight: Array
    scales: Array
    spans: Shape
    """How many elements have one scale, per dim; none where there is a single scale, of whatever shape."""

    @staticmethod
    def of(weight: Array, scales: Array, blocks: Sequence[int] | None) -> Scaled:
        if scales.size == 1 and (blocks is None or scales.ndim != weight.ndim):
            return Scaled(weight, scales, ())
        spans = (1,) * weight.ndim if blocks is None else (*(1,) * (weight.ndim - len(blocks)), *blocks)
        pairs = list(zip(scales.shape, weight.shape, spans, strict=False))
        if not scales.ndim == weight.ndim == len(spans) or any(n != -(-m // span) and (n, span) != (1, 1) for n, m, span in pairs):
            raise LayoutError(
                f"dtype=: which of the scales {scales.name}, of shape {scales.shape}, belongs to which element of {weight.shape} "
                f"is not said"
            )
        return Scaled(weight, scales, tuple(m if n == 1 else span for n, m, span in pairs))

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def block(self) -> Shape:
        return tuple(1 if span == n else span for span, n in zip(self.spans or self.shape, self.shape, strict=True))

    @property
    def stored(self) -> tuple[Array, ...]:
        return self.weight, self.scales

    def needs(self, part: Part) -> tuple[Part, ...]:
        held = tuple(slice(s.start // n, -(-s.stop // n)) for s, n in zip(part, self.spans, strict=True)) if self.spans else ()
        return part, held

    def values(self, *stored: NDArray[Any]) -> Floats:
        weight, scales = stored
        found: Floats = np.take(_table(weight.dtype), weight.view(np.uint8))
        factors = scales.astype(np.float32)
        if not self.spans:
            found *= factors.reshape(())
            return found
        for d, span in enumerate(self.spans):
            if d != found.ndim - 2 and factors.shape[d] > 1 and span > 1:
                factors = factors.repeat(span, axis=d)[(slice(None),) * d + (slice(found.shape[d]),)]
        rows = self.spans[-2] if found.ndim > 1 else 1
        if found.ndim < 2 or rows == 1 or factors.shape[-2] == 1:
            found *= factors
            return found
        for i in range(factors.shape[-2]):
            found[..., i * rows : (i + 1) * rows, :] *= factors[..., i : i + 1, :]
        return found


def microscaled(arrays: Mapping[str, Array], quantisation: Mapping[str, Any]) -> Found:
    """Go through the MXFP4 weights of GPT-OSS, which are stored transposed."""
    for blocks in arrays:
        name = blocks.removesuffix("_blocks")
        if name != blocks and f"{name}_scales" in arrays:
            yield name, Microscaled.of(arrays[blocks], arrays[f"{name}_scales"]), (blocks, f"{name}_scales"), _turned


def _turned(array: Array) -> Array:
    return array.transpose(*range(array.ndim - 2), array.ndim - 1, array.ndim - 2)


@dataclass(frozen=True, eq=False)
class Microscaled:
    """MXFP4: 32 values of 4 bits in 16 bytes, the lower bits first, with one power of two for all of them.

    OCP Microscaling Formats (MX) 1.0; how they lie: `convert_moe_packed_tensors` in transformers' `integrations/mxfp4.py`.
    """

    blocks: Array
    scales: Array

    @staticmethod
    def of(blocks: Array, scales: Array) -> Microscaled:
        fits = blocks.ndim > 2 and blocks.shape == (*scales.shape, 16) and blocks.dtype == scales.dtype == np.uint8
        if not fits:
            raise LayoutError(
                f"dtype=: {blocks.name} is {blocks.dtype.name} {blocks.shape}, {scales.name} {scales.dtype.name} {scales.shape}; "
                f"bytes were expected, 16 for each scale"
            )
        return Microscaled(blocks, scales)

    @property
    def shape(self) -> Shape:
        return (*self.scales.shape[:-1], 32 * self.scales.shape[-1])

    @property
    def block(self) -> Shape:
        return (*(1,) * (self.scales.ndim - 1), 32)

    @property
    def stored(self) -> tuple[Array, ...]:
        return self.blocks, self.scales

    def needs(self, part: Part) -> tuple[Part, ...]:
        held = (*part[:-1], slice(part[-1].start // 32, -(-part[-1].stop // 32)))
        return (*held, slice(0, 16)), held

    def values(self, *stored: NDArray[Any]) -> Floats:
        blocks, scales = stored
        found: Floats = np.take(_pairs(), blocks).view(np.float32)
        found *= np.take(_table(_exponents()), scales)[..., None]
        return found.reshape(*scales.shape[:-1], -1)


@lru_cache(maxsize=16)
def _table(dtype: np.dtype[Any]) -> Floats:
    """Return what each byte means; looking it up is five times as fast as `astype`."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@lru_cache(maxsize=1)
def _pairs() -> NDArray[np.uint64]:
    """Return what the two values of each byte are, as one word."""
    import ml_dtypes

    byte = np.arange(256, dtype=np.uint8)
    halves = np.stack([byte & 15, byte >> 4], axis=1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return np.ascontiguousarray(halves).view(np.uint64)[:, 0]


def _exponents() -> np.dtype[Any]:
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.float8_e8m0fnu)
    return found


METHODS: Mapping[Any, Callable[[Mapping[str, Array], Mapping[str, Any]], Found]] = {
    None: scaled,
    "fp8": scaled,
    "fbgemm_fp8": scaled,
    "compressed-tensors": scaled,
    "mxfp4": microscaled,
}
"""How the weights of each `quant_method` are found."""
