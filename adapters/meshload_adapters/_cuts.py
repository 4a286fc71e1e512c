"""How tensor parallelism cuts a parameter in DeepSpeed's checkpoints, who tells it, and how its shards are joined.

The files of model-parallel ranks hold local shards, to which ZeRO is applied. What joins them again is a
`Cut`. It is told, in this order, by the option `cut=`; by the checkpoint's `universal_checkpoint_info`; or by the names of a
client that says who it is: Megatron-DeepSpeed writes `checkpoint_version` and a Namespace `args` (and has SwiGLU's `[gate; up]` in
each shard if `args.swiglu`), GPT-NeoX a dict `args` with `model_parallel_size` (whose MLPs are gated where the first matrix has
twice the rows that the second takes). Shapes tell nothing here: where none of these
knows a name, its array is unavailable, and the reason says how to declare it.

`universal_checkpoint_info` has regular expressions, matched from a name's start:

    affine_map                               {"version": 1, "params": {regex: {"logical_shape", "ranks": {rank: {"shard_shape",
                                             "pieces": [{"shape", "source": [offset, strides], "dest": [offset, strides],
                                             "locations", "scale"}]}}}}}; source is the whole, dest the shard, in elements; wins
    tp_replicated_parameter_patterns         each rank has the whole
    parameter_to_average_patterns            the mean of the ranks' copies
    parameter_with_2_sub_params_cat_dim_0    each shard is [a; b] on dim 0; the whole is [all a; all b]
    parameter_with_sub_params                [{"patterns", "shape", "partition_dim"}]; shape[partition_dim] is the tuple of the
                                             sub-parameters' sizes, or, before 0.4, also the count of equal ones
    sub_param_shard_widths                   since version 0.4: regex -> per sub-parameter the widths of the ranks
    parameter_with_row_parallelism_patterns  joined on dim 1
    none of these                            joined on dim 0
    vocabulary_parameter_patterns            then the first original_vocab_size rows are kept
    autotp_unsupported_parameter_patterns    {regex: reason}
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from meshload.array import Array, Step, concatenate
from meshload.box import Shape, row_major
from meshload.errors import LayoutError, MeshloadError, listing
from meshload.pieces import Pieces, union
from meshload.planning import meetings

from ._pickle import Record
from ._zero import Refused, dict_of, is_count, is_list, is_number, is_shape, names_of

PATTERN_LIMIT = 1000
"""Characters of a regular expression of the checkpoint."""


# --- how tensor parallelism cuts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks share a parameter.

    `Cut(0)` is cut on dim 0, `Cut(0, parts=3)` is three equal parts one after another, each of which is cut on dim 0, and
    `Cut(0, parts=(6, 3), widths=((4, 2), (2, 1)))` parts of 6 and 3 rows, of which the ranks have 4 and 2, and 2 and 1.
    `Cut(None)` is whole on each rank; `Cut(None, copies="sum")` is the sum of what the ranks have.
    """

    dim: int | None
    parts: int | Sequence[int] = 1
    """How many equal parts are fused along the dim, or the sizes of unequal ones in the whole parameter."""
    widths: Sequence[Sequence[int]] | None = None
    """For each part, what each rank has of it; without it, equal shares."""
    copies: str = "first"
    """What the ranks' wholes are: copies, of which the `first` is taken, or addends whose `mean` or `sum` is the parameter."""
    keep: int | None = None
    """How many rows are kept: what is beyond pads the vocabulary."""
    view: Sequence[int] | None = field(default=None, repr=False)
    """The shape, -1 for one of its sizes, in which the dim is counted."""

    def __post_init__(self) -> None:
        if self.copies not in ("first", "mean", "sum") or not (self.dim is None or is_count(self.dim)):
            raise LayoutError(f"{self}: a dim or None, and copies of 'first', 'mean' or 'sum' were expected")
        sizes = [self.parts] if isinstance(self.parts, int) else self.parts
        widths = [n for of in self.widths or () for n in of]
        if not all(is_count(n) for n in (*sizes, *widths)) or not sizes or not all(sizes):
            raise LayoutError(f"{self}: parts and widths are numbers of rows")
        if self.widths is not None and (isinstance(self.parts, int) or len(self.widths) != len(self.parts)):
            raise LayoutError(f"{self}: widths go with the size of each part")


@dataclass(frozen=True, slots=True)
class AffineCut:
    """How ranks share a parameter, as boxes of the whole that lie in boxes of the shards."""

    shape: Shape
    shards: Sequence[Shape]
    boxes: Sequence[tuple[int, Shape, Shape, Shape]]
    """(rank, shape, start in the whole, start in the shard), rank by rank."""
    scale: float = 1.0
    """What a shard holds is the whole times this."""


def joined(name: str, shards: Sequence[Array | None], cut: Cut | AffineCut, kind: str) -> Array:
    """Return a parameter from its shards, None where a rank has none of it; of a `kind`: `module`, `master` or a moment."""
    if isinstance(cut, AffineCut):
        return _joined_boxes(name, shards, cut, kind)
    held = [s for s in shards if s is not None]
    if cut.dim is None:
        whole = _copies(name, held, len(shards), cut, kind)
    elif cut.widths is None and any(s is None for s in shards):
        raise Refused(f"tensor-parallel ranks {listing(str(i) for i, s in enumerate(shards) if s is None)} have none of it")
    else:
        whole = _concatenated(name, shards, held, cut)
    if cut.keep is None:
        return whole
    if not whole.ndim or whole.shape[0] < cut.keep:
        raise Refused(f"its shape is {whole.shape}, the vocabulary has {cut.keep} rows")
    return whole[: cut.keep]


def _copies(name: str, held: Sequence[Array], ranks: int, cut: Cut, kind: str) -> Array:
    shapes = {(a.shape, a.dtype) for a in held}
    if len(shapes) > 1:
        raise Refused(f"its copies differ in shape or dtype: {listing(f'{a.dtype} {a.shape}' for a in held)}")
    copies = cut.copies
    if copies == "sum" and kind not in ("module", "master"):
        copies = "first"  # each addend has the gradient of the sum
    if copies != "first" and len(held) < ranks:
        raise Refused(f"it is the {copies} of what {ranks} ranks hold, {len(held)} of them are there")
    return replace(held[0], name=name, pieces=_overlaid([a.pieces for a in held]), copies=copies)


def _overlaid(tables: Sequence[Pieces]) -> Pieces:
    """Return pieces that are copies of each other, each a table's: its rows are cut where those of any other are."""
    found = []
    for table in tables:
        for other in tables:
            if table is not other and not _same_boxes(table, other):
                mine, its = meetings(table, other)
                rows, start = table.take(mine), np.maximum(table.start[mine], other.start[its])
                shape = np.minimum(rows.stop, other.stop[its]) - start
                skipped = ((start - rows.start) * rows.strides).sum(axis=1)
                table = replace(rows, offset=rows.offset + skipped, start=start, shape=shape)
        found.append(table)
    return union(found)


def _same_boxes(a: Pieces, b: Pieces) -> bool:
    return len(a) == len(b) and bool((a.start == b.start).all() and (a.shape == b.shape).all())


def _concatenated(name: str, shards: Sequence[Array | None], held: Sequence[Array], cut: Cut) -> Array:
    ranks, dim = len(shards), cut.dim
    assert dim is not None
    first = held[0]
    if cut.view is not None:
        total = sum(a.size for a in held)
        shards = [None if a is None else _viewed(a, cut, total, rank, ranks) for rank, a in enumerate(shards)]
        held = [a for a in shards if a is not None]
    if dim >= held[0].ndim:
        raise Refused(f"it is cut on dim {dim}, its shards have the shape {first.shape}")
    widths = _widths([0 if a is None else a.shape[dim] for a in shards], cut)
    starts, pieces = [0] * ranks, []
    for of in widths:
        for rank, width in enumerate(of):
            shard = shards[rank]
            if shard is not None:
                pieces.append(shard[(slice(None),) * dim + (slice(starts[rank], starts[rank] + width),)])
            starts[rank] += width
    try:
        return concatenate(pieces, dim, name=name)
    except ValueError as error:
        raise Refused(f"its shards do not fit together on dim {dim}: {error}") from error


def _viewed(shard: Array, cut: Cut, total: int, rank: int, ranks: int) -> Array:
    """Return a shard in the shape in which its cut is told."""
    assert cut.dim is not None
    assert cut.view is not None
    sizes = [int(n) for n in cut.view]
    if isinstance(cut.parts, int):
        if len(sizes) != shard.ndim:
            raise Refused(f"it has {cut.parts} equal parts in the shape {tuple(sizes)}, its shards have the shape {shard.shape}")
        return shard
    sizes[cut.dim] = sum(cut.parts)
    unknown = [d for d, n in enumerate(sizes) if n < 0]
    known = math.prod(n for n in sizes if n >= 0)
    if len(unknown) > 1 or (unknown and (known == 0 or total % known)):
        raise Refused(f"it is to be seen as {tuple(cut.view)}, which does not fit its {total} elements")
    if unknown:
        sizes[unknown[0]] = total // known
    try:
        sizes[cut.dim] = sum(of[rank] for of in cut.widths) if cut.widths is not None else sum(_even(n, ranks) for n in cut.parts)
    except IndexError:
        raise Refused(f"its recorded widths are not of {ranks} ranks: {cut.widths}") from None
    if math.prod(sizes) != shard.size:
        raise Refused(f"the shard of rank {rank} has {shard.size} elements, its recorded widths make {tuple(sizes)}")
    return reshaped(shard, tuple(sizes))


def reshaped(array: Array, shape: Shape) -> Array:
    """Return an array in another shape, row-major."""
    if array.shape == shape:
        return array
    flat = array.merge(0, array.ndim) if array.ndim else replace(array, pieces=array.pieces.insert(0), shape=(1,))
    return flat.split(0, shape)


def _widths(extents: Sequence[int], cut: Cut) -> list[list[int]]:
    """Return, for each part, what each rank has of it."""
    ranks = len(extents)
    if isinstance(cut.parts, int):
        uneven = [n for n in extents if n % cut.parts]
        if uneven:
            raise Refused(f"a shard has {uneven[0]} elements on dim {cut.dim}, which are not {cut.parts} equal parts")
        return [[n // cut.parts for n in extents]] * cut.parts
    if cut.widths is None:
        widths = [[_even(n, ranks)] * ranks for n in cut.parts]
    else:
        widths = [list(of) for of in cut.widths]
        wrong = next((i for i, of in enumerate(widths) if len(of) != ranks or sum(of) != cut.parts[i]), None)
        if wrong is not None:
            raise Refused(f"part {wrong} of {cut.parts[wrong]} has the widths {widths[wrong]} on {ranks} ranks")
    for rank, extent in enumerate(extents):
        expected = sum(of[rank] for of in widths)
        if extent != expected:
            raise Refused(f"the shard of rank {rank} has {extent} elements on dim {cut.dim}, its widths make {expected}")
    return widths


def _even(part: int, ranks: int) -> int:
    if part % ranks:
        raise Refused(f"a part of {part} cannot be cut evenly over {ranks} ranks, and nothing says their widths")
    return part // ranks


def _joined_boxes(name: str, shards: Sequence[Array | None], cut: AffineCut, kind: str) -> Array:
    if cut.scale != 1 and kind not in ("module", "master"):
        raise Refused(f"its shards are scaled by {cut.scale}, and how an optimizer's state scales is not known")
    if len(cut.shards) != len(shards):
        raise Refused(f"its affine map is of {len(cut.shards)} ranks, there are {len(shards)}")
    seen = []
    for rank, (shard, shape) in enumerate(zip(shards, cut.shards, strict=True)):
        if (0 if shard is None else shard.size) != math.prod(shape):
            raise Refused(f"the shard of rank {rank} has {shard.size if shard else 0} elements, its affine map says {shape}")
        seen.append(None if shard is None else reshaped(shard, shape))
    tables: dict[tuple[Shape, Shape], list[Pieces]] = {}
    for rank, shape, to, start in cut.boxes:
        shard = seen[rank]
        if shard is not None:
            held = shard[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
            tables.setdefault((to, shape), []).append(held.pieces.place(to))
    first = next(s for s in seen if s is not None)
    step = None if cut.scale == 1 else Step("/", cut.scale)
    return Array(name, first.dtype, cut.shape, union([_overlaid(copies) for copies in tables.values()]), first.stored, step)


# --- who tells how it is cut ------------------------------------------------------------------------------------------

Declared = Mapping[str, "int | str | Cut | None"] | str
"""What `cut=` may be: globs of names to a dim, None (whole on each rank), `mean`, `sum` or a `Cut`; or the rules' name."""

RULES = ("megatron", "gpt_neox")

_NORM = r"(?:.*\.)?\w*(?:layernorm|layer_norm|norm|rmsnorm|ln_f)\.(?:weight|bias|scale)"

_MEGATRON: tuple[tuple[str, Cut | None], ...] = (
    (r"(?:.*\.)?(?:word_embeddings|lm_head|output_layer)\.weight", Cut(0)),
    (r"(?:.*\.)?(?:query_key_value|query|key_value)\.(?:weight|bias)", Cut(0)),
    (r"(?:.*\.)?dense_h_to_4h\.(?:weight|bias)", None),  # as args.swiglu says
    (r"(?:.*\.)?(?:self_attention|attention)\.dense\.weight|(?:.*\.)?dense_4h_to_h\.weight", Cut(1)),
    (r"(?:.*\.)?(?:self_attention|attention)\.dense\.bias|(?:.*\.)?dense_4h_to_h\.bias", Cut(None)),
    (r"(?:.*\.)?position_embeddings\.weight|(?:.*\.)?inv_freq", Cut(None)),
    (r"\d+\.(?:weight|bias)", Cut(None)),  # the one layer of GPTModelPipe that is but a norm
    (_NORM, Cut(None)),
)

_NEOX: tuple[tuple[str, Cut | None], ...] = (
    (r"(?:.*\.)?(?:word_embeddings|final_linear)\.weight", Cut(0)),
    (r"(?:.*\.)?query_key_value\.(?:weight|bias)", None),  # with fewer kv heads, the order of the rows is another
    (r"(?:.*\.)?mlp\.(?:dense_h_to_4h|linear1)\.(?:weight|bias)", None),  # a gated MLP has both of its halves in there
    (r"(?:.*\.)?mlp\.w[13]\.weight", Cut(0)),
    (r"(?:.*\.)?(?:attention\.dense|dense_4h_to_h|mlp\.(?:w2|linear2))\.weight", Cut(1)),
    (r"(?:.*\.)?(?:attention\.dense|dense_4h_to_h|mlp\.linear2)\.bias", Cut(None, copies="sum")),  # each rank adds its own
    (r"(?:.*\.)?inv_freq", Cut(None)),
    (_NORM, Cut(None)),
)


def adds_up(name: str) -> bool:
    """Say whether GPT-NeoX's tensor-parallel ranks have addends of an array."""
    cut = next((cut for pattern, cut in _NEOX if re.fullmatch(pattern, name)), None)
    return cut is not None and cut.copies == "sum"


def declared_cut(declared: Declared | None, name: str) -> Cut | None:
    """Return how an array is cut by what the caller declared; None where that says nothing of it."""
    globs = declared.items() if isinstance(declared, Mapping) else ()
    return next((_cut_of(found) for glob, found in globs if fnmatch.fnmatchcase(name, glob)), None)


@dataclass(frozen=True, eq=False)
class Rules:
    """Tells how a parameter is cut over `ranks` tensor-parallel ranks."""

    declared: Declared | None
    info: Mapping[str, Any]
    """`universal_checkpoint_info`; empty where there is none."""
    client: Mapping[str, Any]
    """The client's `args`, plain, and its `checkpoint_version`."""
    ranks: int

    @property
    def name(self) -> str:
        """Who tells: `universal_checkpoint_info`, `megatron`, `gpt_neox`, or nobody."""
        if isinstance(self.declared, str):
            return self.declared
        return "universal_checkpoint_info" if self.info else self._client

    @cached_property
    def _client(self) -> str:
        args, version = dict_of(self.client.get("args")), self.client.get("checkpoint_version")
        if is_number(version) and version >= 2 and args:
            return "megatron"
        return "gpt_neox" if "model_parallel_size" in args and "make_vocab_size_divisible_by" in args else ""

    def cut(
        self,
        name: str,
        is_parameter: bool | None,
        shards: Sequence[Array | None],
        others: Mapping[str, Mapping[int, Array]] = MappingProxyType({}),
    ) -> Cut | AffineCut:
        """Return how an array is cut, or raise `Refused`. Whether it is a parameter may not be known (None).

        A buffer that nobody tells of is each rank's own copy. `others` are the shards of all arrays.
        """
        declared = declared_cut(self.declared, name)
        if declared is not None:
            return declared
        if self.ranks == 1:
            return Cut(None, keep=self._rows_kept(name))
        if self.name == "universal_checkpoint_info":
            told = self._told(name)
            if told is not None:
                return told
            if is_parameter:
                return Cut(0, keep=self._rows_kept(name))
        found = self._by_name(name, shards, others) if self.name in RULES else None
        if found is not None:
            return found
        if is_parameter is False:
            return Cut(None)
        raise Refused(
            f"how {self.ranks} tensor-parallel ranks share it is not in the checkpoint; say it with "
            f"cut={{{name!r}: 0}} (a dim, None where each has the whole, 'mean', 'sum' or a Cut) in the format's options"
        )

    def _by_name(self, name: str, shards: Sequence[Array | None], others: Mapping[str, Mapping[int, Array]]) -> Cut | None:
        for pattern, cut in _MEGATRON if self.name == "megatron" else _NEOX:
            if re.fullmatch(pattern, name):
                return cut or self._depending(name, shards, others)
        return None

    def _depending(self, name: str, shards: Sequence[Array | None], others: Mapping[str, Mapping[int, Array]]) -> Cut | None:
        """Return a cut that the client's args or another array decide; None where they do not."""
        args = dict_of(self.client.get("args"))
        if self.name == "megatron":
            gated = args.get("swiglu")
            return Cut(0, parts=2 if gated else 1) if type(gated) is bool else None
        mlp = re.fullmatch(r"(.*)(?:dense_h_to_4h|linear1)\.(?:weight|bias)", name)
        if mlp:  # what the second matrix takes is what the first gives, or half of it
            back = [a for n in ("dense_4h_to_h", "linear2") for a in others.get(f"{mlp[1]}{n}.weight", {}).values()]
            ratios = {s.shape[0] / a.shape[1] for s in shards if s is not None and s.ndim for a in back if a.ndim == 2 and a.size}
            return {1.0: Cut(0), 2.0: Cut(0, parts=2)}.get(ratios.pop()) if len(ratios) == 1 else None
        hidden, rows = args.get("hidden_size"), sum(s.shape[0] for s in shards if s is not None and s.ndim)
        return Cut(0) if is_count(hidden) and rows == 3 * hidden else None

    # --- universal_checkpoint_info ---

    def _told(self, name: str) -> Cut | AffineCut | None:
        info = self.info
        reasons = dict_of(info.get("autotp_unsupported_parameter_patterns"))
        why = next((reason for pattern, reason in reasons.items() if matches(pattern, name)), None)
        if why is not None:
            raise Refused(f"the checkpoint says that how it is cut cannot be told: {str(why)[:200]}; say it with cut=")
        for pattern, found in dict_of(dict_of(info.get("affine_map")).get("params")).items():
            if matches(pattern, name):
                return self._affine(found)
        keep = self._rows_kept(name)
        if self._listed("tp_replicated_parameter_patterns", name):
            return Cut(None, keep=keep)
        if self._listed("parameter_to_average_patterns", name):
            return Cut(None, copies="mean", keep=keep)
        if self._listed("parameter_with_2_sub_params_cat_dim_0", name):
            return Cut(0, parts=2, keep=keep)
        found = self._sub_parameters(name)
        if found is not None:
            return replace(found, keep=keep)
        if self._listed("parameter_with_row_parallelism_patterns", name):
            return Cut(1, keep=keep)
        return None if keep is None else Cut(0, keep=keep)

    def _listed(self, key: str, name: str) -> bool:
        return any(matches(pattern, name) for pattern in names_of(self.info.get(key)))

    def _rows_kept(self, name: str) -> int | None:
        if not self._listed("vocabulary_parameter_patterns", name):
            return None
        rows = self.info.get("original_vocab_size")
        if not is_count(rows):
            raise Refused(f"universal_checkpoint_info pads its rows, and its original_vocab_size is {str(rows)[:40]}")
        return rows

    def _sub_parameters(self, name: str) -> Cut | None:
        for entry in self.info.get("parameter_with_sub_params") or ():
            entry = dict_of(entry.state if type(entry) is Record else entry)
            pattern = next((p for p in names_of(entry.get("patterns")) if matches(p, name)), None)
            if pattern is None:
                continue
            shape, dim = entry.get("shape"), entry.get("partition_dim")
            if not is_list(shape) or not is_count(dim) or dim >= len(shape):
                raise Refused(f"parameter_with_sub_params gives it shape {str(shape)[:80]} and partition_dim {str(dim)[:20]}")
            return self._sub_parameter(pattern, list(shape), dim)
        return None

    def _sub_parameter(self, pattern: str, shape: list[Any], dim: int) -> Cut:
        sizes = shape[dim]
        view = [sum(n) if is_list(n) and all(map(is_count, n)) else n for n in shape]
        if not all(type(n) is int and n >= -1 for n in view):
            raise Refused(f"parameter_with_sub_params gives it the shape {str(shape)[:80]}")
        version = self.info.get("universal_checkpoint_version")
        widths = dict_of(self.info.get("sub_param_shard_widths")).get(pattern)
        if widths is None and is_number(version) and version >= 0.4:
            raise Refused("parameter_with_sub_params names it, and sub_param_shard_widths lacks what each rank has of its parts")
        if type(sizes) is int:  # before 0.4: the number of equal parts
            if widths is not None or sizes < 1:
                raise Refused(f"parameter_with_sub_params says {sizes} parts, without their sizes")
            return Cut(dim, parts=sizes, view=view)
        try:
            return Cut(dim, tuple(sizes), None if widths is None else tuple(map(tuple, widths)), view=view)
        except (LayoutError, TypeError) as error:
            raise Refused(f"parameter_with_sub_params and sub_param_shard_widths of {pattern} do not fit: {error}") from error

    def _affine(self, found: Any) -> AffineCut:
        version = dict_of(self.info.get("affine_map")).get("version", 1)
        if version != 1:
            raise Refused(f"its affine map is of version {str(version)[:20]}, known is 1; say how it is cut with cut=")
        try:
            return affine_cut(found, self.ranks)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, MeshloadError):
                raise
            raise Refused(f"its affine map is damaged: {type(error).__name__}: {str(error)[:100]}") from error


def affine_cut(found: Any, ranks: int) -> AffineCut:
    """Return the boxes of an affine map; pieces that are none are refused."""
    shape, of = tuple(found["logical_shape"]), {int(r): entry for r, entry in found["ranks"].items()}
    shards = [tuple(of[rank]["shard_shape"]) if rank in of else (0,) for rank in range(ranks)]
    if not all(map(is_shape, (shape, *shards))):
        raise Refused(f"its affine map has the shapes {str((shape, *shards))[:100]}")
    boxes, scales, known, filled = [], set(), set(), 0
    for rank in range(ranks):
        for piece in of[rank]["pieces"] if rank in of else ():
            size, holders = tuple(piece["shape"]), piece["locations"]
            scales.add(float(piece.get("scale", 1.0)))
            if not is_shape(size):
                raise ValueError(f"a piece has the shape {size}")
            if 0 in size:
                continue
            to, start = _box_start(size, piece["source"], shape), _box_start(size, piece["dest"], shards[rank])
            if rank == min(holders):
                filled += math.prod(size)
            elif (size, to) not in known:
                continue  # the lowest holder has it in other pieces
            known.add((size, to))
            boxes.append((rank, size, to, start))
    if len(scales) > 1 or 0.0 in scales:
        raise Refused(f"its affine map scales its pieces differently: {sorted(scales)}")
    if filled != math.prod(shape):
        raise Refused(f"its affine map does not fill the shape {shape} once")
    return AffineCut(shape, shards, boxes, scales.pop() if scales else 1.0)


def _box_start(size: Shape, told: Any, whole: Shape) -> Shape:
    """Return where in a row-major array a box begins that is told by an offset and strides, in elements."""
    offset, strides = told
    expected = row_major(whole, 1)
    box = len(size) == len(whole) == len(strides) and all(n == 1 or s == e for n, s, e in zip(size, strides, expected, strict=True))
    start, rest = [], int(offset)
    for stride in expected if box else ():
        start.append(rest // stride if stride else 0)
        rest -= start[-1] * stride
    if not box or not all(a >= 0 and a + n <= w for a, n, w in zip(start, size, whole, strict=True)):
        raise Refused(f"its affine map has a piece of shape {size} that is no box of {whole}; say how it is cut with cut=")
    return tuple(start)


def _cut_of(found: Any) -> Cut:
    if isinstance(found, Cut):
        return found
    return Cut(None, copies=found) if isinstance(found, str) else Cut(found)


def check_declared(declared: Any) -> None:
    """Raise unless this is what `cut=` may be."""
    if isinstance(declared, Mapping) and all(isinstance(glob, str) for glob in declared):
        for found in declared.values():
            _cut_of(found)
    elif declared is not None and declared not in RULES:
        raise LayoutError(f"cut={declared!r}: a dict of name patterns, or one of {', '.join(map(repr, RULES))} was expected")


def matches(pattern: Any, name: str) -> bool:
    """Say whether a regular expression of a checkpoint matches from the start of a name; one that could take ages is refused."""
    if type(pattern) is not str or len(pattern) > PATTERN_LIMIT:
        raise Refused(f"universal_checkpoint_info has the pattern {str(pattern)[:80]!r}, a short regular expression was expected")
    repeats, choices = len(re.findall(r"(?<!\\)(?<!\()[*+{?]", pattern)), pattern.count("|")
    if re.search(r"\)[*+{?]", pattern) or repeats > 4 or choices > 8:
        raise Refused(f"universal_checkpoint_info has the pattern {pattern[:80]!r}, whose repetitions are nested or too many")
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(f"universal_checkpoint_info has {pattern[:80]!r}, no regular expression: {error}") from error


# --- putting it together ----------------------------------------------------------------------------------------------


@dataclass
class Shards:
    """The shards of one kind (`module`, `master`, `exp_avg` ...): name -> model-parallel rank -> array, or why it is not there."""

    kind: str
    found: dict[str, dict[int, Array]] = field(default_factory=dict)
    lost: dict[str, dict[int, str]] = field(default_factory=dict)

    def add(self, arrays: Mapping[str, Array], mp: int) -> None:
        """Add what a rank holds."""
        for name, array in arrays.items():
            self.found.setdefault(name, {})[mp] = array

    def lose(self, names: Iterable[str], mp: int, why: str) -> None:
        """Note what a rank should hold, and does not."""
        for name in names:
            self.lost.setdefault(name, {}).setdefault(mp, why)


@dataclass
class Whole:
    """The arrays of one kind, put together; and why others are not."""

    arrays: dict[str, Array] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def whole(shards: Shards, rules: Rules, is_parameter: Callable[[str], bool | None]) -> Whole:
    """Join the shards of tensor-parallel ranks; what several pipeline stages hold are copies, that of the lowest first."""
    made = Whole()
    for name in dict.fromkeys([*shards.found, *shards.lost]):
        found, lost = shards.found.get(name, {}), shards.lost.get(name, {})
        reasons, copies = [], []
        for stage in sorted({mp // rules.ranks for mp in (*found, *lost)}):
            ranks = range(stage * rules.ranks, (stage + 1) * rules.ranks)
            try:
                mine, gone = [found.get(mp) for mp in ranks], [lost.get(mp) for mp in ranks]
                copies.append(_of_stage(name, mine, gone, shards, rules, is_parameter(name)))
            except Refused as error:
                reasons.append(str(error))
        if copies:
            alike = [a for a in copies if (a.shape, a.dtype) == (copies[0].shape, copies[0].dtype) and a.copies == "first"]
            made.arrays[name] = replace(copies[0], pieces=_overlaid([a.pieces for a in alike or copies[:1]]))
        else:
            made.reasons[name] = "; ".join(dict.fromkeys(reasons))
    return made


def _of_stage(
    name: str,
    found: Sequence[Array | None],
    lost: Sequence[str | None],
    shards: Shards,
    rules: Rules,
    is_parameter: bool | None,
) -> Array:
    why = "; ".join(dict.fromkeys(w for w, a in zip(lost, found, strict=True) if w is not None and a is None))
    if not any(a is not None for a in found):
        raise Refused(why or "no rank holds it")
    cut = rules.cut(name, is_parameter, found, shards.found)
    needs_all = not (isinstance(cut, Cut) and cut.dim is None and cut.copies == "first")
    if why and needs_all:
        raise Refused(why)
    return joined(name, found, cut, shards.kind)
