"""Files of `torch.save` that hold weights: one `.pt`, `.pth` or `.bin`, Hugging Face's `pytorch_model.bin`, Meta's `consolidated`.

How one file is packed is told in `_torch_file.py`. Names are the keys of the dict that was saved, those of dicts in dicts (and
places in lists) joined by dots. Around the weights there may be a wrapper: `{"state_dict": {...}, "epoch": 3}`. It is taken off
where exactly one of the usual keys holds tensors and, beside it, only the usual companions do (optimizer, random states); then
those are found under `stored` names alone. Otherwise all names have their full paths. What is no tensor is `meta["extra"]`.
A file that is but a tensor calls it `tensor`.
Tensors that are the same bytes of one file (tied weights, which `torch.save` keeps) are one array, under the first of their
names, with aliases.

**Hugging Face** (transformers until 4.x): `pytorch_model.bin`, or `pytorch_model.bin.index.json` and the shards that it names,
`pytorch_model-00001-of-00004.bin`. The index is `{"metadata": {"total_size": 118784}, "weight_map": {name: file}}` and decides,
also beside `pytorch_model.bin`. A variant stands before the suffix: `pytorch_model.fp16.bin`, `pytorch_model.bin.index.fp16.json`,
`pytorch_model.fp16-00001-of-00002.bin`. `training_args.bin` and `optimizer.bin` beside them are not weights.

**Meta** (Llama 1 to 3, early Mistral; https://github.com/meta-llama/llama): `consolidated.00.pth` and so on, one per
model-parallel rank, with `params.json` (`dim, n_layers, n_heads, n_kv_heads`, sometimes `head_dim`). Each is a flat state dict:

    cut on dim 0    layers.i.attention.wq, wk, wv; layers.i.feed_forward.w1, w3; output
    cut on dim 1    layers.i.attention.wo; layers.i.feed_forward.w2
    in every file   norm, layers.i.attention_norm, layers.i.ffn_norm; rope.freqs
    tok_embeddings  on dim 1 in Llama 1 and 2, on dim 0 in Llama 3; `dim` tells which

With more ranks than kv heads, consecutive ranks hold the same head of wk and wv. Rows of wq and wk are in Meta's rotary order;
that is the naming's business (`models/meta.py`). How many files there should be is stored nowhere, so the heads of `params.json`
are compared. Where there is no `config.json`, `params.json` is the config, translated (`_params.py`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meshload.array import Array, concatenate
from meshload.box import Shape
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, MeshloadError, MeshloadWarning, SourceError, listing
from meshload.pieces import union
from meshload.source import Folder

from ._json import read_config, read_object
from ._params import arguments, config_of
from ._pickle import Record
from ._torch_file import Tensor, TorchFile
from ._torch_find import SUFFIXES, consolidated, index_name, is_index, is_there, numbered, shard, single_name
from ._weight_map import read_weight_map

if TYPE_CHECKING:
    from .formats.torch import Torch

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "module")
"""Keys under which programs keep the weights."""

COMPANIONS = frozenset(
    {
        *("optimizer", "optimizers", "optimizer_state_dict", "optimizer_state", "optimizer_states", "optim"),
        *("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers", "opt_param_scheduler"),
        *("rng_state", "rng_states", "cuda_rng_state", "random_states", "scaler", "grad_scaler", "callbacks", "loops"),
    }
)
"""Keys beside them whose tensors are no weights."""

EXTRA_LIMIT = 10_000
"""Values that are no tensors; more are counted, not kept."""

JSON_LIMIT = 100_000_000
"""Bytes; an index of 100,000 names has less than a tenth."""

_CUTS: tuple[tuple[re.Pattern[str], int | None], ...] = (
    (re.compile(r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight|output\.weight"), 0),
    (re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight"), 1),
    (re.compile(r"norm\.weight|layers\.\d+\.(attention|ffn)_norm\.weight|rope\.freqs"), None),
)
"""Which dim of Meta's arrays the files cut; None where each file has the whole."""

_EMBEDDING = "tok_embeddings.weight"


def checkpoint_in(folder: Folder, options: Torch) -> Checkpoint:
    """Read the pickles. A shard that is missing or damaged makes its arrays unavailable, and the rest stays usable."""
    if folder.entry is not None and not is_index(folder.entry):
        _check_alone(folder, folder.entry)
        return _checkpoint(folder, _of_one(_read(folder, folder.entry)), [])
    listed = folder.names()
    index, single = folder.entry or index_name(options.variant), single_name(options.variant)
    if folder.entry is not None or is_there(folder, listed, index):
        return _checkpoint(folder, _by_index(folder, listed, index), listed)
    if is_there(folder, listed, single):
        return _checkpoint(folder, _of_one(_read(folder, single)), listed)
    if shards := numbered(listed, options.variant):
        return _checkpoint(folder, _without_index(folder, shards, index), listed)
    parts = sorted((int(match[1]), match[0]) for match in map(consolidated, listed) if match)
    if parts:
        return _checkpoint(folder, _consolidated(folder, parts, options.embedding_dim), listed)
    seen = listing(n for n in listed if n.endswith((*SUFFIXES, ".safetensors"))) or "no file of weights"
    raise FormatError(
        f"{folder.name}: neither {single}, nor {index}, nor consolidated.00.pth is there, but {seen}; name the one file, "
        f"or use Torch(variant=...) for names such as pytorch_model.fp16.bin"
    )


def _check_alone(folder: Folder, file: str) -> None:
    """Raise where a file that was named is one of several that hold pieces of the same arrays."""
    match = consolidated(file)
    other = "consolidated.01.pth" if match and int(match[1]) == 0 else "consolidated.00.pth"
    if match and folder.has(other):
        raise FormatError(f"{file}: holds pieces of arrays, as does {other} beside it; open their folder instead")


# --- the tree of a file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """What one file holds."""

    file: TorchFile
    tensors: Mapping[str, Tensor]
    """The weights, under their native names."""
    stored: Mapping[str, Tensor]
    """All tensors, under their full paths."""
    wrapper: str
    """What was taken off the names: `state_dict`, or nothing."""
    extra: Mapping[str, Any]
    """What is no tensor, by its full path."""
    left_out: int


def _read(folder: Folder, file: str) -> _Contents:
    found = TorchFile.open(folder.file(file))
    holders = _holders(found.root)
    inner, wrapper = found.root, list[str]()
    while (key := _wrapper(inner, holders)) is not None:
        inner = inner[key]
        wrapper.append(key)
    prefix = "".join(f"{key}." for key in wrapper)
    stored, extra, left_out = _flattened(found.root, holders, file)
    if wrapper:
        tensors, _, _ = _flattened(inner, holders, file)
    else:
        tensors = stored
    return _Contents(found, tensors, stored, prefix.removesuffix("."), extra, left_out)


def _wrapper(root: Any, holders: set[int]) -> str | None:
    """Return the one key that holds the weights, if only companions hold tensors beside it."""
    if type(root) is not dict:
        return None
    holding = [key for key, value in root.items() if id(value) in holders]
    candidates = [key for key in holding if key in WRAPPERS and type(root[key]) is dict]
    rest = [key for key in holding if key not in candidates and key not in COMPANIONS]
    return candidates[0] if len(candidates) == 1 and not rest else None


def _holders(root: Any) -> set[int]:
    """Return the ids of all objects in a tree that are or hold tensors."""
    holds: dict[int, bool] = {}

    def visit(node: Any) -> bool:
        found = holds.get(id(node))
        if found is None:
            inner = [visit(child) for _, child in _children(node)] if type(node) is not Tensor else [True]
            found = holds[id(node)] = any(inner)
        return found

    visit(root)
    return {key for key, found in holds.items() if found}


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Go through what an object holds, with the last segment of each name."""
    if type(node) is dict:
        yield from node.items()
    elif type(node) in (list, tuple):
        yield from enumerate(node)
    elif type(node) is Record:
        yield from node.entries.items()
        yield from enumerate(node.items)
        yield from node.state.items() if type(node.state) is dict else enumerate((node.state,))
        yield from enumerate(node.args)


def _flattened(root: Any, holders: set[int], file: str) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Return the tensors and the other values of a tree by their paths, and how many of the others were left out."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    left_out = 0

    def visit(node: Any, path: str) -> None:
        nonlocal left_out
        if type(node) is Tensor:
            path = path or "tensor"
            if path in tensors:
                raise FormatError(f"{file}: two tensors are both called {path!r} once the keys of dicts in dicts are joined")
            tensors[path] = node
        elif id(node) in holders:
            for key, child in _children(node):
                visit(child, f"{path}.{_segment(key)}" if path else _segment(key))
        elif len(extra) < EXTRA_LIMIT:
            extra[path or "object"] = node
        else:
            left_out += 1

    visit(root, "")
    return tensors, extra, left_out


def _segment(key: Any) -> str:
    """Return what stands for a key in a name."""
    if type(key) is str:
        return key
    return str(key) if type(key) in (int, float, bool, type(None)) else repr(key)[:100]


# --- who holds what ---------------------------------------------------------------------------------------------------


class _Arrays(Mapping[str, Array]):
    """Arrays of tensors, each made when it is asked for: making 100,000 takes longer than reading their pickle."""

    def __init__(self, tensors: Mapping[str, tuple[TorchFile, Tensor]]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Array:
        file, tensor = self._tensors[name]
        return file.array(tensor, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What was found in a folder."""

    files: Sequence[str]
    contents: Sequence[_Contents]
    arrays: Mapping[str, Array]
    stored: Mapping[str, Array]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


_Placed = dict[str, tuple[_Contents, Tensor]]


def _of_one(contents: _Contents) -> _Found:
    placed = {name: (contents, tensor) for name, tensor in contents.tensors.items()}
    stored = {name: (contents, tensor) for name, tensor in contents.stored.items()}
    return _found([contents.file.source.name], [contents], placed, stored)


def _found(
    files: Sequence[str],
    contents: Sequence[_Contents],
    placed: _Placed,
    stored: _Placed,
    unavailable: Mapping[str, str] | None = None,
    problems: Sequence[Problem] = (),
    **meta: Any,
) -> _Found:
    """Sort tensors into arrays, aliases, and those that cannot be given."""
    arrays: dict[str, tuple[TorchFile, Tensor]] = {}
    aliases: dict[str, str] = {}
    lost, trouble = dict(unavailable or {}), list(problems)
    first: dict[Any, str] = {}
    for name, (holder, tensor) in placed.items():
        why = holder.file.refusal(tensor)
        if why:
            lost[name] = why
            trouble.append(Problem(f"{name}: {why}", array=name, file=holder.file.source.name))
            continue
        same = tensor.identity
        of = first.setdefault((id(holder), same), name) if same is not None else name
        if of == name:
            arrays[name] = (holder.file, tensor)
        else:
            aliases[name] = of
    whole = {name: (c.file, t) for name, (c, t) in stored.items() if not c.file.refusal(t)}
    return _Found(files, contents, _Arrays(arrays), _Arrays(whole), aliases, lost, tuple(trouble), meta)


def _by_index(folder: Folder, listed: Sequence[str], index: str) -> _Found:
    """Take from each file what the index says is there."""
    told = read_weight_map(folder, index, JSON_LIMIT)
    found = {file: _attempt(folder, file) for file in told.names_in}
    lost = {file: error for file, error in found.items() if not isinstance(error, _Contents)}
    unavailable, problems = told.without(lost, listed, lambda file: file == "pytorch_model.bin" or shard(file))
    contents = [c for c in found.values() if isinstance(c, _Contents)]
    placed: _Placed = {}
    stored: _Placed = {}
    for name, file in told.file_of.items():
        holder = found[file]
        if not isinstance(holder, _Contents):
            continue
        if name in holder.tensors:
            placed[name] = stored[name] = (holder, holder.tensors[name])
        else:
            count = len(holder.tensors)
            unavailable[name] = f"{file}, where {index} lists it, is there, but of its {count} tensors none has this name"
            problems.append(Problem(f"{name}: {unavailable[name]}", array=name, file=file))
    unlisted = tuple(name for c in contents for name in c.tensors if name not in told.file_of)
    meta = {"index": index, "index_metadata": told.metadata, "unlisted_tensors": unlisted}
    return _found(list(told.names_in), contents, placed, stored, unavailable, problems, **meta)


def _attempt(folder: Folder, file: str) -> _Contents | MeshloadError:
    try:
        return _read(folder, file)
    except (FormatError, SourceError) as error:
        return error


def _without_index(folder: Folder, files: Sequence[str], index: str) -> _Found:
    """Take all that a whole set of numbered files holds."""
    matches = [m for m in map(shard, files) if m]
    totals = {int(m[3]) for m in matches}
    absent = sorted(set(range(1, max(totals) + 1)) - {int(m[2]) for m in matches}) if max(totals) <= 10 * len(files) else ["most"]
    if len(totals) > 1 or absent:
        what = (
            f"of {max(totals)} files, {listing(map(str, absent))} are not there" if absent else "files of several saves are there"
        )
        raise FormatError(
            f"{folder.name}: there is no {index}, and {what}: {listing(files, 4)}; restore the index, or name one file"
        )
    contents = [_read(folder, file) for file in files]
    placed: _Placed = {}
    for holder in contents:
        for name, tensor in holder.tensors.items():
            if name in placed:
                both = f"{placed[name][0].file.source.name} and {holder.file.source.name}"
                raise FormatError(f"{name}: both {both} hold it, and no index says which is meant")
            placed[name] = (holder, tensor)
    _warn(f"{folder.name}: there is no {index}; {len(placed)} tensors were found in {len(files)} files")
    return _found(files, contents, placed, placed)


# --- Meta's files -----------------------------------------------------------------------------------------------------


def _consolidated(folder: Folder, parts: Sequence[tuple[int, str]], embedding_dim: int | None) -> _Found:
    """Put the pieces of model-parallel ranks together."""
    files, count = [file for _, file in parts], len(parts)
    absent = sorted(set(range(parts[-1][0] + 1)) - {number for number, _ in parts})
    if absent:
        raise FormatError(f"{folder.name}: of the files consolidated.NN.pth, {listing(f'{n:02}' for n in absent)} are not there")
    params = read_object(folder, "params.json", JSON_LIMIT) if folder.has("params.json") else None
    if params is None and count > 1 and embedding_dim is None:
        raise FormatError(
            f"{folder.name}: there is no params.json beside the {count} files; without its dim it is not known which dim of the "
            f"embedding they cut; Torch(embedding_dim=...) says it: 1 for Llama 1 and 2, 0 for Llama 3"
        )
    contents = [_read(folder, file) for file in files]
    names = dict.fromkeys(name for c in contents for name in c.tensors)
    cut = _Cut(files, arguments(params or {}), embedding_dim)
    if count == 1:
        for name, tensor in contents[0].tensors.items():
            cut.check_heads(name, tensor.shape)
        return replace(_of_one(contents[0]), meta={"params": params})
    arrays: dict[str, Array] = {}
    unavailable: dict[str, str] = {}
    problems = []
    for name in names:
        why = _not_everywhere(name, contents)
        try:
            if not why:
                arrays[name] = cut.joined(name, [c.file.array(c.tensors[name], name) for c in contents])
                continue
        except _NoRule as error:
            why = str(error)
        unavailable[name] = why
        problems.append(Problem(f"{name}: {why}", array=name))
    return _Found(files, contents, arrays, arrays, {}, unavailable, tuple(problems), {"params": params})


def _not_everywhere(name: str, contents: Sequence[_Contents]) -> str:
    lacking = [c.file.source.name for c in contents if name not in c.tensors]
    if lacking:
        return f"{listing(lacking)} of the {len(contents)} files lack it"
    return next((why for c in contents if (why := c.file.refusal(c.tensors[name]))), "")


class _NoRule(Exception):
    """How an array is cut is not known."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How Meta's files cut arrays."""

    files: Sequence[str]
    params: Mapping[str, Any]
    embedding_dim: int | None

    def joined(self, name: str, arrays: Sequence[Array]) -> Array:
        """Return the whole array; one that the files do not fill raises `FormatError`."""
        kinds = {(a.dtype, a.ndim) for a in arrays}
        if len(kinds) > 1:
            raise FormatError(
                f"{name}: its pieces in {self.files[0]} and others differ in dtype or dims: {sorted(map(str, kinds))}"
            )
        dim = self._dim(name, arrays[0])
        rests = {tuple(n for d, n in enumerate(a.shape) if d != dim) for a in arrays}
        if dim is None and len(rests) == 1:
            return replace(arrays[0], pieces=union([a.pieces for a in arrays]))
        if len(rests) > 1 or dim is None or dim >= arrays[0].ndim:
            shapes = listing(str(a.shape) for a in arrays)
            raise FormatError(f"{name}: its pieces have the shapes {shapes}; they cannot be joined along dim {dim}")
        whole = self._repeated(name, arrays) or concatenate(arrays, dim)
        self.check_heads(name, whole.shape)
        return whole

    def _dim(self, name: str, part: Array) -> int | None:
        if name == _EMBEDDING:
            return self._embedding(part)
        for pattern, dim in _CUTS:
            if pattern.fullmatch(name):
                return dim
        raise _NoRule(f"how the {len(self.files)} files cut it is not known: it is none of the names of Llama")

    def _embedding(self, part: Array) -> int:
        """Say which dim of the embedding is cut: the one that `dim` does not leave whole."""
        if self.embedding_dim is not None:
            return self.embedding_dim
        dim, columns = _size(self.params, "dim"), part.shape[-1]
        for cut, whole in ((0, columns), (1, columns * len(self.files))):
            if dim == whole:
                return cut
        raise FormatError(
            f"{_EMBEDDING}: {len(self.files)} files with {columns} columns each, params.json says dim {dim}; it is not known which "
            f"dim they cut, or files are missing; Torch(embedding_dim=...) says it: 1 for Llama 1 and 2, 0 for Llama 3"
        )

    def _repeated(self, name: str, arrays: Sequence[Array]) -> Array | None:
        """Return wk or wv where consecutive files hold the same kv head; None where each holds heads of its own."""
        heads = self._heads("n_kv_heads")
        if heads is None or re.search(r"attention\.w[kv]\.weight$", name) is None:
            return None
        count, size = heads
        rows = arrays[0].shape[0]
        if rows != size or len(arrays) <= count or len(arrays) % count or any(a.shape[0] != rows for a in arrays):
            return None
        each = len(arrays) // count
        one_each = [replace(arrays[i], pieces=union([a.pieces for a in arrays[i : i + each]])) for i in range(0, len(arrays), each)]
        return concatenate(one_each, 0)

    def check_heads(self, name: str, shape: Shape) -> None:
        """Raise where an array has fewer or more heads than `params.json` says: a file is missing, or one too many."""
        match = re.search(r"attention\.w([qkvo])\.weight$", name)
        heads = self._heads("n_kv_heads" if match and match[1] in "kv" else "n_heads")
        if match is None or heads is None or len(shape) != 2:
            return
        found, expected = shape[1 if match[1] == "o" else 0], math.prod(heads)
        if found != expected:
            raise FormatError(
                f"{name}: {len(self.files)} files hold {found} of the {expected} rows that params.json says "
                f"({heads[0]} heads of {heads[1]}); files are missing, or of another model"
            )

    def _heads(self, field: str) -> tuple[int, int] | None:
        """Return how many heads there are, and the size of each; None where `params.json` does not say."""
        dim, count = _size(self.params, "dim"), _size(self.params, "n_heads")
        if dim is None or count is None:
            return None
        size = _size(self.params, "head_dim") or dim // count
        return (_size(self.params, field) or count), size


def _size(params: Mapping[str, Any], field: str) -> int | None:
    value = params.get(field)
    return value if type(value) is int and value > 0 else None


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def _checkpoint(folder: Folder, found: _Found, listed: Sequence[str]) -> Checkpoint:
    config, problems = read_config(folder, JSON_LIMIT)
    if config is None and found.meta.get("params"):
        config = config_of(found.meta["params"])
    used = {*found.files, found.meta.get("index")}
    several = len(found.contents) > 1
    meta = {
        "files": tuple(found.files),
        "containers": tuple(sorted({c.file.container for c in found.contents})),
        "wrapper": next((c.wrapper for c in found.contents if c.wrapper), None),
        "extra": {f"{c.file.source.name}: {k}" if several else k: v for c in found.contents for k, v in c.extra.items()},
        "extra_left_out": sum(c.left_out for c in found.contents),
        "unlisted": tuple(n for n in listed if n not in used and n.endswith((*SUFFIXES, ".safetensors", ".index.json"))),
        **found.meta,
    }
    views: dict[str, Callable[[], Checkpoint]] = {}
    made = Checkpoint(
        found.arrays,
        "torch",
        aliases=found.aliases,
        meta=meta,
        config=config,
        unavailable=found.unavailable,
        problems=(*found.problems, *problems),
        views=views,
    )
    views["native"] = partial(replace, made, names="native")
    views["stored"] = partial(replace, made, arrays=found.stored, aliases={}, names="stored")
    return made


def _warn(text: str) -> None:
    warnings.warn(text, MeshloadWarning, stacklevel=5)
