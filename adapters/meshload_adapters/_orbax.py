"""Orbax checkpoints, the format of the JAX world, opened with bare TensorStore: neither jax nor orbax is needed.

```
root/                          CheckpointManager: one folder per step, `{step}` or `{prefix}_{step}`, perhaps zero-padded
  7/                           a step; also what v1 `save_pytree(path)` writes, with an empty marker `orbax.checkpoint`
    _CHECKPOINT_METADATA       JSON: item_handlers, init_timestamp_nsecs, commit_timestamp_nsecs (null: not finished), metrics
    commit_success.txt         written last; older versions write it on object stores only
    meta/metadata              a JsonSave item
    state/                     a tree item; its name is the user's, so items are found by the file `_METADATA`
  8.orbax-checkpoint-tmp/      a save that is not finished, or never was; older: `-tmp-{timestamp}`
```

StandardCheckpointer and PyTreeCheckpointer write one tree straight into the folder. A tree item:

```
_METADATA                      JSON: tree_metadata, use_ocdbt, use_zarr3, store_array_data_equal_to_fill_value, custom_metadata
manifest.ocdbt, d/*            an OCDBT database (a B+tree of keys), merged from those below; its files are all needed
ocdbt.process_{i}/...          what each process wrote; alone, without the merged manifest, an incomplete save
{name}/.zarray, {name}/0.1     without OCDBT: one folder per array (zarr2), or {name}/zarr.json, {name}/c/0/1 (zarr3)
_strings.json                  the leaves that are strings
_sharding, array_metadatas/    how it was saved. A hint only: never needed for reading
```

`tree_metadata` maps a Python repr, not to be relied upon, to `key_metadata` (a list of `{key, key_type}`; 1 is a sequence
index, 2 a dict key, attribute or namedtuple field) and `value_metadata`. An array's stored key is its keys joined by dots, so
keys that hold dots may meet: Orbax then overwrites one by the other without a word, which is an error here. Empty nodes
(`value_type` None, Dict, List, Tuple, NamedTuple; `skip_deserialize`) have no array. dtype and shape are in the array's own
metadata; `write_shape` is that of a writer's part. Typed PRNG keys are uint32 arrays with a `random_key_impl` in
`array_metadatas`. `use_ocdbt` and `use_zarr3` may be missing: OCDBT then shows by its manifest, and zarr is version 2.
Where `store_array_data_equal_to_fill_value` is false or missing, a missing chunk means the fill value; else it is damage.

Native names are the stored keys, with optax's state taken out. optax writes namedtuples: `mu` and `nu` (Adam), `nu_max`
(AMSGrad), `trace` (momentum), `count`; their trees have the weights' paths, less what stands before (`params`). They lie under
`opt_state` (flax TrainState, nnx.Optimizer, MaxText), behind the positions of a `chain` and the fields of wrappers
(`inner_state`, `inner_states.<label>`, ...). Other states (`ema`, `v_row`, `acc_grads`) stay ordinary arrays. NNX states have a
last key `value` (older: `raw_value`) at every leaf, which native names leave out.

Before 2024 there was a msgpack file `checkpoint` in place of `_METADATA`; it is recognised and refused. Seen: orbax-checkpoint
0.11 and 0.12, tensorstore 0.1.75 to 0.1.86. See https://orbax.readthedocs.io and https://google.github.io/tensorstore/kvstore/ocdbt.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshload.array import Array
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, MeshloadError, MeshloadWarning, listing
from meshload.source import ChunkedArray, Folder, LocalFolder, around, read_bytes

from ._orbax_find import OLD, STEP, TEMPORARY, TREE, VERSION_1, is_old, is_temporary, number_of, steps_in, trees_in
from ._orbax_record import MANIFEST, refuse_stale

if TYPE_CHECKING:
    from .formats.orbax import Orbax

Path = tuple[str, ...]

COMMITTED = "commit_success.txt"

TREE_LIMIT = 256 << 20
"""The tree of a million arrays takes about this."""
HINT_LIMIT = 16 << 20
"""What only informs is passed over when it is larger."""
CHUNK_LIMIT = 1 << 22
"""An array of more chunks would need more memory for their places than any real one."""
EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq", "trace": "momentum"}
WRAPPERS = ("inner_state", "inner_states", "inner_opt_state", "base_optimizer_state")


def checkpoint_in(folder: Folder, options: Orbax) -> Checkpoint:
    """Open the arrays of one tree; reads metadata only."""
    if folder.entry is not None and is_old(folder, folder.entry):
        raise FormatError(_too_old(folder.name))
    if is_temporary(folder):
        raise FormatError(_unfinished(folder, f"its name holds {TEMPORARY}"))
    meta: dict[str, Any] = {}
    if folder.has(TREE):
        _choose_nothing(folder, options)
        names = folder.names()
        lacks = _lacks(folder, names) if STEP in names else _tree_lacks(folder, TREE)
        if lacks:
            raise FormatError(_unfinished(folder, lacks))
        meta["checkpoint"] = _hint(folder, STEP)
        return _opened(folder, meta)
    step = _step(folder, options, meta)
    return _opened(_item(step, options, meta), meta)


# --- steps and items --------------------------------------------------------------------------------------------------


def _choose_nothing(folder: Folder, options: Orbax) -> None:
    if options.step is not None or options.item is not None:
        raise FormatError(f"{folder.name}: this folder is a tree itself, there is no step or item to choose in it")


def _step(folder: Folder, options: Orbax, meta: dict[str, Any]) -> Folder:
    """Return the folder of the step: the folder itself, or one in it."""
    names = folder.names()
    steps = steps_in(folder, names)
    is_step = STEP in names or VERSION_1 in names or any(number_of(n) is None for n in trees_in(folder, names))
    if is_step or not steps:
        if options.step is not None:
            raise FormatError(f"{folder.name}: there are no steps in this folder, so none is {options.step!r}")
        return folder
    if options.step is None:
        name, meta["passed_over"] = _latest(folder, steps)
    else:
        name = _wanted(folder, [n for group in steps.values() for n in group], options.step)
    meta["step"] = number_of(name)
    return folder.inside(name)


def _item(step: Folder, options: Orbax, meta: dict[str, Any]) -> Folder:
    """Return the folder of the step's tree."""
    meta["checkpoint"] = _hint(step, STEP)
    if step.has(TREE):
        if options.item is not None:
            raise FormatError(f"{step.name}: this step is a tree itself, so no item in it is {options.item!r}")
        return step
    names = step.names()
    trees = trees_in(step, names)
    lacks = _lacks(step, names)
    if lacks:
        raise FormatError((None if trees else _treeless(step, names)) or _unfinished(step, lacks))
    if options.item is not None and options.item not in trees:
        raise FormatError(f"{step.name}: no tree is called {options.item!r}; there are: {listing(trees)}")
    if len(trees) > 1 and options.item is None:
        raise FormatError(f"{step.name}: the items {listing(trees)} are trees; choose one with Orbax(item=...)")
    meta["item"] = options.item or trees[0]
    meta["items"] = trees
    meta["json"] = _json_items(step, names)
    return step.inside(meta["item"])


def _latest(folder: Folder, steps: Mapping[str, list[str]]) -> tuple[str, dict[str, str]]:
    """Return the last complete step, and the later ones with what they lack."""
    if len(steps) > 1:
        shown = listing(group[0] for group in steps.values())
        raise FormatError(f"{folder.name}: the steps have several names, such as {shown}; choose with Orbax(step=...)")
    [group] = steps.values()
    passed: dict[str, str] = {}
    for i, name in enumerate(group):
        lacks = _step_lacks(folder, name)
        if lacks:
            passed[name] = lacks
            continue
        if i + 1 < len(group) and number_of(group[i + 1]) == number_of(name) and TEMPORARY not in group[i + 1]:
            raise FormatError(f"{folder.name}: {name} and {group[i + 1]} are one step; choose with Orbax(step=...)")
        if passed:
            said = listing(f"{n} ({why})" for n, why in passed.items())
            text = f"{folder.name}: step {name} is opened, the last complete one; passed over: {said}"
            warnings.warn(text, MeshloadWarning, stacklevel=2)
        return name, passed
    raise FormatError(f"{folder.name}: no step is complete: {listing(f'{n}: {why}' for n, why in passed.items())}")


def _wanted(folder: Folder, every: list[str], step: int | str) -> str:
    """Return the step that the caller chose."""
    found = [n for n in every if n == step] or [n for n in every if number_of(n) == step]
    whole = [n for n in found if TEMPORARY not in n] or found
    if len(whole) != 1:
        said = f"{listing(whole)} are" if whole else "none is"
        raise FormatError(f"{folder.name}: of the steps {listing(every)} {said} {step!r}; choose with Orbax(step=...)")
    lacks = _step_lacks(folder, whole[0])
    if lacks:
        raise FormatError(_unfinished(folder.inside(whole[0]), lacks))
    return whole[0]


def _step_lacks(folder: Folder, name: str) -> str | None:
    """Say why a step is incomplete, from its name and what is in it."""
    if TEMPORARY in name:
        return f"its name holds {TEMPORARY}"
    step = folder.inside(name)
    return _lacks(step, step.names())


def _lacks(step: Folder, names: list[str]) -> str | None:
    """Say why a step, or a tree that is one, is incomplete; None where it is not."""
    trees = [step] if TREE in names else [step.inside(n) for n in trees_in(step, names)]
    begun = [n.rstrip("/") for n in names if TEMPORARY in n]
    if begun:
        return f"{begun[0]} in it is not finished"
    if not trees:
        return f"there is no {TREE} in it"
    for tree in trees:
        lacks = _tree_lacks(tree, TREE if tree is step else tree.name)
        if lacks:
            return lacks
    if COMMITTED in names:
        return None
    times = _hint(step, STEP) if STEP in names else None
    if isinstance(times, dict) and times.get("commit_timestamp_nsecs", 0) is None:
        return f"commit_timestamp_nsecs in {STEP} is null"
    if not isinstance(step, LocalFolder) and not isinstance(times, dict):
        return f"there is no {COMMITTED} in it, as object stores need"
    return None


def _tree_lacks(tree: Folder, name: str) -> str | None:
    names = tree.names()
    begun = [n for n in names if n.startswith("ocdbt.process_")]
    if begun and MANIFEST not in names:
        return f"only the parts of {len(begun)} processes are there, {MANIFEST} of the whole is not ({name})"
    return None


def _unfinished(folder: Folder, lacks: str) -> str:
    """Return the message about an unfinished save, with the last complete step near it."""
    beside = around(folder)
    whole = _last_complete(beside) or _last_complete(around(beside))
    hint = f"the last complete step is {whole}" if whole else "there is no complete step beside it"
    return f"{folder.name}: the save was not finished: {lacks}; {hint}"


def _last_complete(folder: Folder) -> str | None:
    for group in steps_in(folder, folder.names()).values():
        for name in group:
            if not _step_lacks(folder, name):
                return folder.inside(name).name
    return None


def _treeless(folder: Folder, names: list[str]) -> str | None:
    """Return the message about a folder that is no unfinished save, but has no tree either."""
    if OLD in names and is_old(folder, OLD):
        return _too_old(f"{folder.name}: {OLD}")
    if MANIFEST in names:
        return f"{folder.name}: {MANIFEST} is there and {TREE} is not, so the names of its arrays are unknown"
    if STEP in names and not any(TEMPORARY in n for n in names) and not any(n.startswith("ocdbt.process_") for n in names):
        return f"{folder.name}: none of its items ({listing(n for n in names if n.endswith('/')) or 'none'}) is a tree of arrays"
    return None


def _too_old(file: str) -> str:
    return (
        f"{file} is msgpack, as Orbax and Flax wrote before 2024, and is not read; restore it with "
        f"orbax.checkpoint.PyTreeCheckpointer or flax.training.checkpoints, and save it again with StandardCheckpointer"
    )


def _json_items(step: Folder, names: Iterable[str]) -> dict[str, Any]:
    """Return what JsonSave wrote: items that are one JSON file."""
    found = {}
    for name in (n[:-1] for n in names if n.endswith("/")):
        for file in (f"{name}/metadata", f"{name}/{name}"):
            if (value := _hint(step, file)) is not None:
                found[name] = value
                break
    return found


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One entry of the tree."""

    path: Path
    kind: str
    """Its `value_type`."""
    is_empty: bool

    @property
    def stored(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class _Tree:
    """What `_METADATA` says."""

    leaves: tuple[_Leaf, ...]
    is_ocdbt: bool
    driver: str
    """TensorStore's name of the array format."""
    leaves_out_fill: bool
    custom: Any


def _tree(item: Folder) -> _Tree:
    found = _json(item, TREE, TREE_LIMIT)
    entries = found.get("tree_metadata") if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        raise FormatError(f"{item.name}: {TREE} has no object tree_metadata")
    leaves = tuple(_leaf(entry, key, item.name) for key, entry in entries.items())
    has_manifest = item.has(MANIFEST)
    is_ocdbt = found.get("use_ocdbt")
    is_ocdbt = has_manifest if is_ocdbt is None else bool(is_ocdbt)
    if is_ocdbt and not has_manifest:
        raise FormatError(_unfinished(item, _tree_lacks(item, item.name) or f"{MANIFEST} is not there"))
    return _Tree(
        leaves,
        is_ocdbt,
        "zarr3" if found.get("use_zarr3") else "zarr",
        not found.get("store_array_data_equal_to_fill_value", False),
        found.get("custom_metadata"),
    )


def _leaf(entry: Any, key: str, item: str) -> _Leaf:
    try:
        path = tuple(str(k["key"]) for k in entry["key_metadata"])
        value = entry["value_metadata"]
        kind, skipped = value.get("value_type"), value.get("skip_deserialize", False)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{item}: {TREE}: the entry {key[:200]!r} lacks key_metadata or value_metadata") from error
    return _Leaf(path, str(kind), kind in EMPTY or bool(skipped))


def _json(folder: Folder, file: str, limit: int) -> Any:
    source = folder.file(file)
    if source.size > limit:
        raise FormatError(f"{folder.name}: {file} has {source.size} bytes, at most {limit} are read")
    try:
        return json.loads(read_bytes(source))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{folder.name}: {file} is not JSON: {str(error)[:200] or type(error).__name__}") from error


def _hint(folder: Folder, file: str) -> Any:
    """Return JSON that only informs; None where it is absent, garbled or too large."""
    try:
        return _json(folder, file, HINT_LIMIT) if folder.has(file) else None
    except MeshloadError:
        return None


# --- arrays -----------------------------------------------------------------------------------------------------------


def _opened(item: Folder, meta: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of a tree item."""
    refuse_stale(item)
    tree = _tree(item)
    _refuse_met([leaf for leaf in tree.leaves if not leaf.is_empty], item.name)
    leaves = [leaf for leaf in tree.leaves if not leaf.is_empty and leaf.kind != "string"]
    arrays, reasons = _arrays(item, tree, leaves)
    meta |= {
        "driver": tree.driver,
        "ocdbt": tree.is_ocdbt,
        "custom_metadata": tree.custom,
        "empty": {leaf.stored: leaf.kind for leaf in tree.leaves if leaf.is_empty},
        "sharding": _shardings(item),
        "random_keys": _random_keys(item),
        "strings": _hint(item, "_strings.json") or {},
    }
    shown = _named({leaf.path: arrays[leaf.stored] for leaf in leaves if leaf.stored in arrays}, item.name)
    problems = tuple(Problem(reason, array=name, file=item.name) for name, reason in reasons.items())

    def stored() -> Checkpoint:
        return replace(native, arrays=arrays, optimizer={}, names="stored", views={"native": lambda: native})

    native = Checkpoint(
        shown.arrays,
        "orbax",
        optimizer=shown.optimizer,
        meta=meta | {"scalars": shown.scalars},
        config=config if isinstance(config := _hint(item, "config.json"), dict) else None,
        unavailable=reasons,
        problems=problems,
        views={"stored": stored},
    )
    return native


def _refuse_met(leaves: Iterable[_Leaf], item: str) -> None:
    """Raise where two leaves share a stored key: Orbax has overwritten one by the other."""
    first: dict[str, Path] = {}
    for leaf in leaves:
        other = first.setdefault(leaf.stored, leaf.path)
        if other is not leaf.path:
            raise FormatError(
                f"{item}: the leaves {list(other)} and {list(leaf.path)} are both stored as {leaf.stored!r}, "
                f"so only one of them was saved; rename one and save again"
            )


def _arrays(item: Folder, tree: _Tree, leaves: list[_Leaf]) -> tuple[dict[str, Array], dict[str, str]]:
    """Open all arrays at once; return them by stored key, and why the others cannot be had."""
    import tensorstore as ts

    # Nodes of the OCDBT tree are kept, decoded chunks are not: the arrays use the default cache pool, of 0 bytes.
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
    base = _database(item, context) if tree.is_ocdbt else item.kvstore
    spec = {
        "driver": tree.driver,
        "recheck_cached_metadata": "open",
        "recheck_cached_data": "open",
        "fill_missing_data_reads": tree.leaves_out_fill,
        "store_data_equal_to_fill_value": True,
    }
    opening = []
    for leaf in leaves:
        store = base.copy()
        store.path += _key(leaf.stored, item, tree)
        opening.append((leaf, ts.open(spec, kvstore=store, context=context, read=True, open=True)))
    arrays, reasons = {}, {}
    is_far = item.is_remote
    for leaf, future in opening:
        try:
            opened = future.result()
        except (ValueError, OSError, NotImplementedError) as error:
            missing = "its metadata is not there" if "NOT_FOUND" in str(error) else "its metadata cannot be read"
            reasons[leaf.stored] = f"{missing} in {item.name}: {_said(error)}"
            continue
        if np.dtype(opened.dtype.numpy_dtype).hasobject or np.dtype(opened.dtype.numpy_dtype).type is np.void:
            reasons[leaf.stored] = f"its elements are {opened.dtype.name}, not numbers"
        else:
            arrays[leaf.stored] = _array(leaf.stored, opened, is_far)
    return arrays, reasons


def _key(stored: str, item: Folder, tree: _Tree) -> str:
    """Return where an array's keys begin; in plain files that must stay inside the item."""
    if any("\ud800" <= letter <= "\udfff" for letter in stored):
        raise FormatError(f"{item.name}: {TREE} names an array {stored[:200]!r}, which is not text")
    if tree.is_ocdbt:
        return f"{stored}/" if stored else ""
    file = stored.replace("\\", "/") if isinstance(item, LocalFolder) else stored  # as TensorStore writes it
    if "\0" in file or file.startswith("/") or any(part in (".", "..") for part in file.split("/")):
        raise FormatError(f"{item.name}: {TREE} names an array {stored[:200]!r}, which leaves the folder")
    return f"{file}/" if file else ""


def _database(item: Folder, context: Any) -> Any:
    """Open the OCDBT database of an item.

    A database cannot be put upon an open store, only upon a spec. Where that spec opens another store, as `memory://` does,
    the item is in memory already and is copied there.
    """
    import tensorstore as ts

    try:
        base = item.kvstore.spec(unbind_context=True).to_json()
        if ts.KvStore.open(base, context=context).result().read(MANIFEST).result().state != "value":
            base = _copied(item, context)
        spec = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
        store = ts.KvStore.open(spec, context=context).result()
        store.read("").result()  # reads the manifest and the root of the tree
    except (ValueError, OSError) as error:
        raise FormatError(f"{item.name}: {MANIFEST}, or the tree of keys under it, is damaged: {_said(error)}") from error
    return store


def _copied(item: Folder, context: Any) -> dict[str, Any]:
    import tensorstore as ts

    spec = {"driver": "memory", "path": "copy/"}
    copy = ts.KvStore.open(spec, context=context).result()
    keys = [k for k in item.kvstore.list().result() if k.startswith((b"manifest.", b"d/", b"ocdbt"))]
    for write in [copy.write(key, item.kvstore.read(key).result().value) for key in keys]:
        write.result()
    return spec


def _array(name: str, store: Any, is_far: bool) -> Array:
    source = ChunkedArray(store, name, is_far)
    dtype = np.dtype(store.dtype.numpy_dtype)
    if math.prod(source.grid) > CHUNK_LIMIT or source.size >= 1 << 62:
        raise FormatError(f"{name}: a shape of {source.shape} in chunks of {source.stored_chunk} is more than any real array has")
    return Array(name, dtype, source.shape, source.pieces())


def _said(error: Exception) -> str:
    """Return what TensorStore said, without the spec and the lines of its own source."""
    return str(error).split(" [", 1)[0][:500]


def _shardings(item: Folder) -> dict[str, Any]:
    """Return how each array was sharded when it was saved, by stored key, as far as that can be read."""
    found = {}
    for key, value in _items(_hint(item, "_sharding")):
        try:
            name = base64.b64decode(key, validate=True).decode()
            found[name] = json.loads(value)
        except (binascii.Error, ValueError, TypeError, RecursionError):
            continue
    return found


def _random_keys(item: Folder) -> dict[str, str]:
    """Return the implementations of typed PRNG keys by stored key. Each process's file lists all arrays; the first will do."""
    files = sorted(n for n in item.names("array_metadatas") if n.startswith("process_"))
    listed = dict(_items(_hint(item, f"array_metadatas/{files[0]}"))) if files else {}
    entries = listed.get("array_metadatas")
    found = {}
    for entry in entries if isinstance(entries, list) else []:
        described = dict(_items(entry)).get("array_metadata")
        extra = dict(_items(dict(_items(described)).get("ext_metadata")))
        if "random_key_impl" in extra:
            found[str(dict(_items(described)).get("param_name"))] = str(extra["random_key_impl"])
    return found


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else ()


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Named:
    """The arrays under native names."""

    arrays: dict[str, Array]
    optimizer: dict[str, dict[str, Array]]
    scalars: dict[str, Array]


@dataclass(frozen=True, slots=True)
class _Moment:
    """An array in a state of optax: `root.<wrappers>.field.<the weight's path, less a prefix>`."""

    path: Path
    root: Path
    field: str
    suffix: Path

    @property
    def state(self) -> Path:
        """The path of the field, which all its arrays share."""
        return self.path[: len(self.path) - len(self.suffix)]


def _named(arrays: Mapping[Path, Array], item: str) -> _Named:
    """Take optax's state and the counters out of the arrays, and name all by their paths."""
    moments = _moments(arrays)
    roots = {m.root for m in moments} | {p[: i + 1] for p in arrays for i, key in enumerate(p) if key == "opt_state"}
    below = {p for p in arrays if any(p[:i] in roots for i in range(1, len(p) + 1))}
    weights = {p: a.shape for p, a in arrays.items() if p not in below}
    placed = _placed(moments, weights, {p: a.shape for p, a in arrays.items()})
    known = {m.path for m in moments}
    matched = {m.root for m in moments if m.path in placed} | {r for r in roots if r[-1] == "opt_state"}
    strip = _ends_of_nnx(weights or arrays)

    def native(path: Path) -> str:
        return ".".join(path[:-1] if strip and len(path) > 1 and path[-1] == strip else path)

    def is_scalar(path: Path) -> bool:
        if arrays[path].shape or path in known:
            return False
        keys = path[:-1] if len(path) > 1 and path[-1] == strip else path
        is_step = keys[-1:] == ("step",) and (len(keys) == 1 or any(keys[:-1] == r[:-1] for r in roots))
        return is_step or any(path[:i] in matched for i in range(1, len(path) + 1))

    named = _Named({}, {}, {})
    first: dict[str, Path] = {}
    for path, array in arrays.items():
        if path in placed:
            field, weight = placed[path]
            named.optimizer.setdefault(field, {})[native(weight)] = array
            continue
        name = native(path)
        if first.setdefault(name, path) is not path:
            raise FormatError(f"{item}: the leaves {list(first[name])} and {list(path)} would both be called {name!r}")
        (named.scalars if is_scalar(path) else named.arrays)[name] = replace(array, name=name)
    return named


def _moments(paths: Iterable[Path]) -> list[_Moment]:
    """Find the arrays in states of optax, by the names that optax writes.

    A root of another name than `opt_state` counts where a state in it has all of Adam's fields and stands in a chain.
    """
    fields: dict[Path, set[str]] = {}
    for path in paths:
        for i, key in enumerate(path):
            fields.setdefault(path[:i], set()).add(key)
    found = []
    for path in paths:
        for i, key in enumerate(path):
            start = _root(path[:i]) if key in MOMENTS else 0
            is_adam = i > start and {"count", "mu", "nu"} <= fields[path[:i]]
            if start and (path[start - 1] == "opt_state" or is_adam):
                found.append(_Moment(path, path[:start], key, path[i + 1 :]))
                break
    return found


def _root(path: Path) -> int:
    """Return how many keys lead to the optimizer that a state's path ends in; 0 where there is none."""
    for start in range(1, len(path) + 1):
        rest = path[start:]
        label = [i > 0 and rest[i - 1] == "inner_states" for i in range(len(rest))]
        if all(free or key in WRAPPERS or key.isdecimal() for key, free in zip(rest, label, strict=True)):
            return start
    return 0


def _placed(moments: list[_Moment], weights: Mapping[Path, Any], shapes: Mapping[Path, Any]) -> dict[Path, tuple[str, Path]]:
    """Return field and weight of each moment: path -> (`exp_avg`, the weight's path).

    Each optimizer serves one tree of weights, of the same paths and shapes; where none fits or several do, its arrays stay
    ordinary ones. So do fields of other shapes, and the states of a chain that keep the same field for the same weight.
    """
    found: dict[Path, tuple[str, Path]] = {}
    for root in dict.fromkeys(m.root for m in moments):
        mine = [m for m in moments if m.root == root]
        longest = max((m.suffix for m in mine), key=len)
        n = len(longest)
        heads = [w[: len(w) - n] for w in weights if w[len(w) - n :] == longest]
        heads = [h for h in heads if all(h + m.suffix in weights for m in mine)]
        unlike = {h: {m.state for m in mine if weights[h + m.suffix] != shapes[m.path]} for h in heads}
        fits = [h for h in heads if len(unlike[h]) < len({m.state for m in mine})]
        usual = (*root[:-1], "params")
        head = usual if usual in fits else fits[0] if len(fits) == 1 else None
        if head is not None:
            found |= {m.path: (MOMENTS[m.field], head + m.suffix) for m in mine if m.state not in unlike[head]}
    often = Counter(found.values())
    return {path: place for path, place in found.items() if often[place] == 1}


def _ends_of_nnx(paths: Iterable[Path]) -> str | None:
    """Return the last key of an NNX state's leaves, where all below the top have it."""
    ends = {p[-1] for p in paths if len(p) > 1}
    return ends.pop() if len(ends) == 1 and ends <= {"value", "raw_value"} else None
