"""What DeepSpeed's own and its universal checkpoints share: the files of a tag, what their pickles hold, and partitions.

ZeRO flattens the parameters of a group row-major, one after another, and gives each data-parallel rank a piece of the result. A
parameter is then a few runs, each in the file of one rank: here a `Partition`, in elements, that serves the fp32 master weights
and each of the optimizer's moments alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np

from meshload.array import Array
from meshload.box import Shape
from meshload.errors import FormatError, MeshloadError, SourceError
from meshload.pieces import Ints, Pieces, repeated
from meshload.source import ByteSource, Folder, read_bytes

from ._pickle import Record
from ._torch_file import DTYPES, MAX_NDIM, TOO_LARGE, Tensor, TorchFile
from ._zero_find import kind_of

FILES_AT_ONCE = 16

NETWORK = 1 << 14
"""A source that rather reads so many bytes than skips them answers slowly: files are opened at once."""


class Refused(Exception):
    """An array cannot be given; the text tells why."""


# --- the files of a tag -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of a tag, by the numbers in their names. `pp_rank` there is the data-parallel rank."""

    models: Mapping[int, str]
    """mp -> the model states; not of ZeRO-3."""
    shards: Mapping[tuple[int, int], str]
    """(mp, dp) -> the model states of ZeRO-3."""
    optimizers: Mapping[tuple[int, int], str]
    """(mp, dp) -> the partition of the optimizer's state."""
    layers: Mapping[tuple[int, int], str]
    """(layer, tp) -> a layer of a PipelineModule."""
    experts: Mapping[tuple[int, int, int], str]
    """(MoE layer or -1, expert, mp) -> the weights of an expert."""
    others: Sequence[str]
    """Optimizer states of experts without ZeRO, which name nothing."""

    @staticmethod
    def of(names: Iterable[str], where: str) -> TagFiles:
        """Sort the files of a folder; two that mean the same raise."""
        found = TagFiles({}, {}, {}, {}, {}, [])
        for file in names:
            kind, key = kind_of(file)
            if kind == "others":
                found.others.append(file)  # type: ignore[attr-defined]  # a list until it is returned
            elif kind:
                files: dict[Any, str] = getattr(found, kind)
                if key in files:
                    raise FormatError(f"{where}: {files[key]} and {file} are the same rank's; one is of another save, remove it")
                files[key] = file
        return found


def read_files(folder: Folder, files: Iterable[str]) -> dict[str, TorchFile | MeshloadError]:
    """Open files; one that is absent or damaged gives its error."""

    def attempt(file: str) -> TorchFile | MeshloadError:
        try:
            return TorchFile.open(folder.file(file))
        except (FormatError, SourceError) as error:
            return error

    names = list(files)
    if not names:
        return {}
    first = attempt(names[0])
    is_far = isinstance(first, TorchFile) and first.source.gap >= NETWORK
    return dict(zip(names, [first, *mapped(attempt, names[1:], is_far)], strict=True))


def mapped(function: Callable[[Any], Any], items: Sequence[Any], is_far: bool) -> list[Any]:
    """Apply a function that reads a little to each item; at once where each read takes a round trip."""
    if not is_far:
        return [function(item) for item in items]
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="meshload") as pool:
        return list(pool.map(function, items))


# --- values of a pickle -----------------------------------------------------------------------------------------------


def is_count(found: Any) -> TypeGuard[int]:
    """Say whether this is a number of something."""
    return type(found) is int and 0 <= found < TOO_LARGE


def is_list(found: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Say whether this is a list or a tuple."""
    return type(found) in (list, tuple)


def is_number(found: Any) -> TypeGuard[int | float]:
    """Say whether this is a plain number."""
    return type(found) in (int, float)


def dict_of(found: Any) -> Mapping[Any, Any]:
    """Return a dict, or an empty one for anything else."""
    return found if type(found) is dict else {}


def names_of(found: Any) -> list[str]:
    """Return the strings of a list."""
    return [n for n in found if type(n) is str] if is_list(found) else []


def shapes_of(found: Any, file: str) -> list[dict[str, Shape]] | None:
    """Return `param_shapes`: per group the shapes by name, in the order of the flat buffer. Old files have one dict."""
    if found is None:
        return None
    groups = [found] if type(found) is dict else found
    if type(groups) not in (list, tuple) or not all(type(g) is dict for g in groups):
        raise FormatError(f"{file}: its param_shapes are {type(found).__name__}, expected is a list of dicts of shapes")
    for name, shape in (item for g in groups for item in g.items()):
        if type(name) is not str or not is_shape(shape):
            raise FormatError(f"{file}: param_shapes give {str(name)[:100]!r} the shape {str(shape)[:100]}")
    return [{name: tuple(shape) for name, shape in g.items()} for g in groups]


def is_shape(found: Any) -> bool:
    """Say whether this is the shape of an array that could be."""
    fine = type(found) in (tuple, list) and len(found) <= MAX_NDIM and all(map(is_count, found))
    return fine and math.prod(n or 1 for n in found) < TOO_LARGE


def plain(found: Any) -> Any:
    """Return a value of a pickle without what only its writer could use: a Namespace as a dict, an enum as its value."""
    kind = type(found)
    if kind is dict:
        return {k if type(k) in (str, int, float, bool, type(None)) else str(k): plain(v) for k, v in found.items()}
    if kind in (list, tuple):
        return kind(plain(v) for v in found)
    if kind is Tensor:
        return f"tensor of {found.dtype} {found.shape}"
    if kind is Record:
        if found.name.endswith("Enum") and len(found.args) == 1:
            return plain(found.args[0])
        return plain(found.state) if type(found.state) is dict and not found.args else f"{found.module}.{found.name}"
    return found if kind in (str, int, float, bool, complex, type(None), bytes) else str(found)


def scalar(file: TorchFile, found: Any) -> int | float | None:
    """Return a number: a plain one, or a tensor of one element, which is read."""
    if is_number(found):
        return found
    if type(found) is not Tensor or math.prod(found.shape) != 1 or file.refusal(found):
        return None
    dtype, start = DTYPES[found.dtype], file.extents[found.key][0] + found.offset
    value = np.frombuffer(read_bytes(file.source, start, start + dtype.itemsize), dtype)[0]
    return value.item() if isinstance(value.item(), (int, float)) else float(value)


def tensors_of(root: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors of a tree, with their keys joined by dots."""
    if type(root) is Tensor:
        yield prefix, root
    elif type(root) is dict:
        for key, value in root.items():
            yield from tensors_of(value, f"{prefix}.{str(key)[:1000]}")
    elif type(root) in (list, tuple):
        for i, value in enumerate(root):
            yield from tensors_of(value, f"{prefix}.{i}")
    elif type(root) is Record:
        yield from tensors_of(root.state, prefix)


def stored_arrays(files: Mapping[str, TorchFile]) -> dict[str, Array]:
    """Return every tensor of some files under its stored key: the file's name without `.pt`, and the path in its tree."""
    arrays: dict[str, Array] = {}
    for name, file in files.items():
        for path, tensor in tensors_of(file.root, name.removesuffix(".pt")):
            if path in arrays:
                raise FormatError(f"{name}: two tensors are both called {path!r} once their keys are joined")
            if not file.refusal(tensor):
                arrays[path] = file.array(tensor, path)
    return arrays


# --- partitions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Partition:
    """Where the parameters of one group lie in the ranks' flat tensors; rows by parameter, in elements."""

    shape_of: Mapping[str, Shape]
    row: Ints
    """`(parameters + 1,)`: the first row of each parameter, in the order of `shape_of`."""
    rank: Ints
    """`(rows,)`: whose tensor; counted among the ranks that share the group."""
    local: Ints
    """Where in it the run begins."""
    at: Ints
    """Where in the flattened parameter it begins."""
    count: Ints
    ranks: int
    """How many share the group."""

    @cached_property
    def reach(self) -> Ints:
        """`(ranks,)`: how many elements each rank's tensor must have at least."""
        found = np.zeros(self.ranks, np.int64)
        np.maximum.at(found, self.rank, self.local + self.count)
        return found

    @cached_property
    def _templates(self) -> dict[str, Pieces]:
        """The parameters' pieces, with ranks for sources, and elements for bytes."""
        columns = (c[:, None] for c in (self.at, self.count, np.ones_like(self.count)))
        flat = Pieces((), self.rank, self.local, *columns)
        found = {}
        for (name, shape), first, last in zip(self.shape_of.items(), self.row[:-1].tolist(), self.row[1:].tolist(), strict=True):
            found[name] = flat.take(slice(first, last)).split(0, shape)
        return found

    def fragments(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return what of a rank's tensor is whose: name -> (count, start)."""
        names, number = list(self.shape_of), np.repeat(np.arange(len(self.shape_of)), np.diff(self.row))
        mine = np.flatnonzero(self.rank == rank)
        columns = zip(number[mine].tolist(), self.count[mine].tolist(), self.local[mine].tolist(), strict=True)
        return {names[i]: (count, start) for i, count, start in columns}

    def needing(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        """Return the parameters that lie in some ranks' tensors, with those of the ranks."""
        wanted = np.isin(self.rank, ranks)
        found = {}
        for i, name in enumerate(self.shape_of):
            rows = slice(int(self.row[i]), int(self.row[i + 1]))
            if wanted[rows].any():
                found[name] = np.unique(self.rank[rows][wanted[rows]]).tolist()
        return found

    def arrays(self, sources: Sequence[ByteSource], parts: Mapping[int, tuple[int, Tensor, int]]) -> dict[str, Array]:
        """Return the parameters that some ranks' tensors hold wholly: rank -> (source, tensor, its first byte)."""
        dtypes = {tensor.dtype for _, tensor, _ in parts.values()}
        if len(dtypes) != 1:
            raise Refused(f"the ranks' tensors differ in dtype: {', '.join(sorted(dtypes))}")
        dtype = DTYPES[dtypes.pop()]
        source, base = np.full(self.ranks, -1, np.int64), np.zeros(self.ranks, np.int64)
        for rank, (number, tensor, start) in parts.items():
            source[rank], base[rank] = number, start
            if tensor.shape[0] < self.reach[rank]:
                raise Refused(
                    f"{sources[number].name} holds a flat tensor of {tensor.shape[0]} elements, {self.reach[rank]} are expected"
                )
        found = {}
        for name, rows in self._templates.items():
            of = source[rows.source]
            if (of >= 0).all():
                offset = base[rows.source] + rows.offset * dtype.itemsize
                pieces = Pieces(sources, of, offset, rows.start, rows.shape, rows.strides * dtype.itemsize)
                found[name] = Array(name, dtype, self.shape_of[name], pieces)
        return found


def consecutive(shape_of: Mapping[str, Shape], pads: Sequence[int], size: int, ranks: int) -> Partition:
    """Return ZeRO-1 and 2's partition: the flat group is cut into pieces of `size` elements; `pads` follow each parameter."""
    numel = np.asarray([math.prod(shape) for shape in shape_of.values()], np.int64)
    start = np.cumsum(numel + np.asarray(pads, np.int64)) - numel - np.asarray(pads, np.int64)
    end = int((start + numel).max(initial=0))
    if end > size * ranks:
        raise Refused(f"the group has {end} elements, the {ranks} partitions of {size} hold {size * ranks}")
    size = max(1, size)
    first = start // size
    counts = np.where(numel > 0, (start + numel - 1) // size - first + 1, 0)
    number, step = repeated(counts)
    rank = first[number] + step
    low = np.maximum(start[number], rank * size)
    high = np.minimum(start[number] + numel[number], (rank + 1) * size)
    row = np.concatenate([[0], np.cumsum(counts)])
    return Partition(shape_of, row, rank, low - rank * size, low - start[number], high - low, ranks)


def each_alone(shape_of: Mapping[str, Shape], ranks: int) -> Partition:
    """Return ZeRO-3's partition: each parameter is cut into `ceil(numel / ranks)`, and a rank's parts follow each other."""
    numel = np.asarray([math.prod(shape) for shape in shape_of.values()], np.int64)
    part = -(-numel // ranks)
    start = np.cumsum(part) - part
    number, step = repeated(-(-numel // np.maximum(part, 1)))
    at = step * part[number]
    count = np.minimum(part[number], numel[number] - at)
    row = np.concatenate([[0], np.cumsum(-(-numel // np.maximum(part, 1)))])
    return Partition(shape_of, row, step, start[number], at, count, ranks)


def by_fragments(shape_of: Mapping[str, Shape], fragments: Sequence[Mapping[str, tuple[int, int]]]) -> Partition:
    """Return the partition that each rank's fragments tell: name -> (count, start). Those of a name follow by rank."""
    rows: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in shape_of}
    for rank, found in enumerate(fragments):
        for name, (count, start) in found.items():
            if name in rows and count:
                at = sum(row[3] for row in rows[name])
                rows[name].append((rank, start, at, count))
    for name, of in rows.items():
        held, numel = sum(row[3] for row in of), math.prod(shape_of[name])
        if held != numel:
            raise Refused(f"the fragments of {name} hold {held} elements, its shape {shape_of[name]} has {numel}")
    row = np.concatenate([[0], np.cumsum([len(of) for of in rows.values()])]).astype(np.int64)
    columns = np.asarray([r for of in rows.values() for r in of], np.int64).reshape(-1, 4)
    return Partition(shape_of, row, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], len(fragments))


def placed(sources: Sequence[ByteSource], number: int, file: TorchFile, tensor: Any, what: str) -> tuple[int, Tensor, int]:
    """Return a flat tensor for `Partition.arrays`, or raise `Refused`."""
    if type(tensor) is not Tensor:
        raise Refused(f"{file.source.name}: its {what} is {type(tensor).__name__}, a flat tensor was expected")
    why = file.refusal(tensor)
    if not why and len(tensor.shape) != 1:
        why = f"its shape is {tensor.shape}, a flat tensor was expected"
    if not why and tensor.shape[0] > 1 and tensor.strides[0] != tensor.itemsize:
        why = f"its stride is {tensor.strides[0]} bytes, a flat tensor was expected"
    if why:
        raise Refused(f"{file.source.name}: its {what}: {why}")
    start = file.extents[tensor.key][0] + tensor.offset if tensor.shape[0] else 0
    return number, tensor, start


def identical(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return which names are the same bytes of one file: alias -> the first of them."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in tensors.items():
        same = tensor.identity
        if same is not None and first.setdefault(same, name) != name:
            found[name] = first[same]
    return found


def flat_array(array: Array, shape: Shape) -> Array:
    """Return a flat array in its parameter's shape."""
    if array.ndim != 1 or array.size != math.prod(shape):
        raise Refused(f"it is stored with shape {array.shape}, its parameter has {shape}")
    return array.split(0, shape)
