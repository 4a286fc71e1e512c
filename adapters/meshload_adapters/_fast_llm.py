"""Fast-LLM checkpoints (https://github.com/ServiceNow/Fast-LLM), both native formats: `distributed` and `fast_llm`.

Files. A training run saves `checkpoint/{step}/`, and an empty file `ok` there when all is written. The folder of steps opens as its
last finished one. Each has a `metadata.yaml`:

    fast_llm_version: 0.4.0     # 0.3.0 and later; before, parameters had other names
    model: gpt
    format: distributed         # or fast_llm
    shards: [weights, exp_avgs, exp_avgs_sq]
    config: {base_model: ..., distributed: {tensor_parallel: 2, world_size: 4, ...}, multi_stage: {layers_per_stage: 2.0}}
    metadata: {completed_steps: 2, optimizer: ..., state_index: {key: file}}

What `config` lacks has its default. Each safetensors file repeats all this in its `__metadata__`, each value as YAML.

`distributed`: `rank_{rank}.safetensors` with a flat vector per state, `weights_shard`, `exp_avgs_shard`, `exp_avgs_sq_shard`, in
`optimization_dtype`; `_fast_llm_layout.py` says what lies where. Frozen parameters have weights alone. Whole parameters
are on every tensor rank, and tied ones on every pipeline rank that uses them: those are copies. `world_size = tp * pp * dp`,
where `dp` counts sequence-data ranks as well; splitting sequences over tensor ranks changes no file.

`fast_llm`: `model_{n}.safetensors` or `model_{pipeline rank}_{n}.safetensors` with whole tensors, `{parameter}/{state}`;
`state_index` tells the file of each.

Names are Fast-LLM's: `decoder.0.mixer.key_value.weight`. The weights are the master copy too; where there are moments they stand
in `optimizer["master"]` as well.

**Written** are weights, and with `optimizer=` moments, of Llama, Mistral, Qwen2 and Mixtral: by default in the `fast_llm` format,
for any mesh; by `FastLLM(distributed=True)` in the `distributed` one, a file for each rank of the mesh's axes `tp`, `pp` and `dp`,
in the order since June 2026. Ranks have Fast-LLM's own numbers, tensor ranks innermost, then data ranks, however the mesh's axes
stand. A vocabulary that does not divide is whole on each tensor rank (`vocab_parallel: false`). Weights are the masters here too,
so moments go along with those alone, and all arrays of `distributed` are float32. To go on with training, write into
`checkpoint/{step}` of the experiment.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshload.array import Array, stored_whole
from meshload.checkpoint import Checkpoint, Problem
from meshload.errors import FormatError, MeshloadError, MeshloadWarning, listing
from meshload.pieces import Ints, Pieces, empty
from meshload.source import ByteSource, Folder, read_bytes

from ._fast_llm_config import huggingface
from ._fast_llm_find import METADATA, rank_files, steps_in
from ._fast_llm_layout import Layout, Model, Parameter, Ranks, Section, layout_of, model_of, ties_of
from ._safetensors import DTYPES, Arrays, Header, read_headers
from ._yaml import loaded

if TYPE_CHECKING:
    from .formats.fast_llm import FastLLM

METADATA_LIMIT = 256 << 20
"""An index of a million keys has about 100 MB."""

MOST_RANKS = 1 << 20

OLDEST, NEWEST = (0, 3), (0, 4)
"""The first and the last known versions."""

STATES = {"weights": "master", "exp_avgs": "exp_avg", "exp_avgs_sq": "exp_avg_sq"}


def checkpoint_in(folder: Folder, options: FastLLM) -> Checkpoint:
    """Read the metadata and the headers. Damage is collected, where the rest stays usable."""
    problems: tuple[Problem, ...] = ()
    if not folder.has(METADATA) and not rank_files(folder):
        folder, problems = _of_steps(folder, options)
    told, more = _metadata(folder)
    config = Section(told["config"], f"{METADATA}: config")
    if told["format"] == "fast_llm":
        opened, stored = _named(folder, told, config)
    else:
        opened, stored = _distributed(folder, told, config, options.decay)
    is_gpt = told["model"] == "gpt"
    opened = replace(
        opened,
        meta={**_said(told), **opened.meta},
        config=huggingface(config.of("base_model"), options.family) if is_gpt else None,
        problems=(*problems, *more, *opened.problems),
    )
    return replace(opened, views={"stored": lambda: _as_stored(opened, *stored())})


def _of_steps(folder: Folder, options: FastLLM) -> tuple[Folder, tuple[Problem, ...]]:
    """Choose a step."""
    steps = steps_in(folder)
    finished = [s for s in steps if folder.has(f"{s}/ok")]
    told = f"finished: {listing(map(str, finished)) or 'none'}"
    if options.step is not None:
        if options.step not in steps:
            raise FormatError(f"{folder.name}: there is no step {options.step}; {told}")
        return folder.inside(str(options.step)), ()
    if not finished:
        seen = listing(folder.names()) or "nothing"
        raise FormatError(f"{folder.name}: there is no {METADATA} and no folder of a finished step; it holds {seen}")
    later = [str(s) for s in steps if s > finished[-1]]
    text = f"{listing(later)}: saved later, but not finished (there is no ok); step {finished[-1]} is the last finished one"
    problems = (Problem(text, file=later[0]),) if later else ()
    return folder.inside(str(finished[-1])), problems


# --- metadata ---------------------------------------------------------------------------------------------------------


def _metadata(folder: Folder) -> tuple[dict[str, Any], list[Problem]]:
    """Return what the checkpoint says of itself: by its own file, or by those of its ranks."""
    problems = []
    if folder.has(METADATA):
        source = folder.file(METADATA)
        if source.size > METADATA_LIMIT:
            raise FormatError(f"{METADATA}: has {source.size} bytes, at most {METADATA_LIMIT} were expected")
        told, where = loaded(_text(source), METADATA), METADATA
    else:
        header = next((h for h in read_headers(folder, rank_files(folder)).values() if isinstance(h, Header)), None)
        if header is None:
            raise FormatError(f"{folder.name}: there is no {METADATA}, and no file of a rank can be read")
        where = header.source.name
        told = {key: loaded(text, f"{where}: {key}") for key, text in header.metadata.items()}
        problems.append(Problem(f"{METADATA} is not there; {where} says the same", file=METADATA))
    if not isinstance(told, dict):
        raise FormatError(f"{where}: a mapping was expected, found {type(told).__name__}")
    lacking = [key for key in ("fast_llm_version", "model", "format", "config") if key not in told]
    if lacking:
        raise FormatError(f"{where}: {', '.join(lacking)} is not in it; it may not be whole")
    for key, kind in (("config", dict), ("metadata", dict), ("shards", list)):
        told[key] = told.get(key) or kind()
        if not isinstance(told[key], kind):
            raise FormatError(f"{where}: {key} is {told[key]!r}, a {kind.__name__} was expected")
    if _version(told) < OLDEST:
        raise FormatError(
            f"{where}: fast_llm_version is {told['fast_llm_version']}; parameters had other names before 0.3.0. "
            f"Convert it to a Hugging Face format with a Fast-LLM of its time"
        )
    if told["format"] not in ("distributed", "fast_llm"):
        raise FormatError(f"{where}: format is {told['format']!r}, 'distributed' or 'fast_llm' was expected")
    return told, problems


def _text(source: ByteSource) -> str:
    try:
        return read_bytes(source).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{source.name}: not UTF-8: {error}") from error


def _version(told: Mapping[str, Any]) -> tuple[int, int]:
    match = re.match(r"(\d{1,9})\.(\d{1,9})", str(told["fast_llm_version"]))
    if match is None:
        raise FormatError(f"{METADATA}: fast_llm_version is {told['fast_llm_version']!r}, a version such as 0.4.0 was expected")
    return int(match[1]), int(match[2])


def _said(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the metadata."""
    said = {key: value for key, value in told["metadata"].items() if key != "state_index"}
    counted = optimizer if isinstance(optimizer := said.get("optimizer"), dict) else {}
    found = {
        "fast_llm_version": str(told["fast_llm_version"]),
        "stored_format": told["format"],
        "states": tuple(told["shards"]),
        "metadata": said,
        **({"optimizer": {"step": counted["current_step"]}} if "current_step" in counted else {}),
        "fast_llm_config": told["config"],
    }
    if "completed_steps" in said:
        found["step"] = said["completed_steps"]
    return found


def _as_stored(opened: Checkpoint, arrays: Mapping[str, Array], unavailable: Mapping[str, str]) -> Checkpoint:
    return replace(opened, arrays=arrays, unavailable=unavailable, aliases={}, optimizer={}, names="stored", views={})


_Stored = Callable[[], tuple[Mapping[str, Array], Mapping[str, str]]]
"""Gives what is stored under its own keys, and what is not there."""


# --- the named format -------------------------------------------------------------------------------------------------


def _named(folder: Folder, told: Mapping[str, Any], config: Section) -> tuple[Checkpoint, _Stored]:
    """Open a checkpoint of whole tensors."""
    file_of = told["metadata"].get("state_index")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(file, str) for file in file_of.values()):
        raise FormatError(f"{METADATA}: metadata.state_index maps no keys to files; the save did not finish")
    for file, key in {file: key for key, file in file_of.items()}.items():
        try:
            folder.inside(file)
        except FormatError as error:
            raise FormatError(f"{METADATA}: {key} is said to be in {file!r}, which leaves the folder") from error
    found = read_headers(folder, sorted(set(file_of.values())))
    headers = [h for h in found.values() if isinstance(h, Header)]
    number = {h.source.name: i for i, h in enumerate(headers)}
    number_of, why = {}, {}
    for key, file in file_of.items():
        header = found[file]
        if not isinstance(header, Header):
            why[key] = str(header)
        elif key not in header.entries:
            why[key] = f"{METADATA} says that {file} holds it, whose header lacks it"
        else:
            number_of[key] = number[file]
    if not number_of:
        raise FormatError(f"{folder.name}: none of its {len(file_of)} tensors can be read: {next(iter(why.values()))}")
    stored = Arrays(headers, number_of)
    arrays: dict[str, dict[str, Array]] = defaultdict(dict)
    unavailable = {}
    for key in file_of:
        name, _, state = key.rpartition("/")
        if not name:
            raise FormatError(f"{METADATA}: the key {key!r} in state_index names no state, as in parameter/weights")
        kind = STATES.get(state, state)
        if key in why:
            unavailable[name if kind == "master" else f"optimizer.{kind}.{name}"] = why[key]
        else:
            arrays[kind][name] = replace(stored[key], name=name)
    weights = arrays.pop("master", {})
    problems = [Problem(str(e), file=f) for f, e in found.items() if not isinstance(e, Header)]
    problems += [Problem(why[k], array=k, file=file_of[k]) for k in why if isinstance(found[file_of[k]], Header)]
    unlisted = sorted(f"{h.source.name}: {key}" for h in headers for key in h.entries if file_of.get(key) != h.source.name)
    if unlisted:
        problems.append(Problem(f"{METADATA} does not list {listing(unlisted)}", file=METADATA))
    ties = ties_of(config.of("base_model")) if told["model"] == "gpt" else {}
    opened = Checkpoint(
        weights,
        "fast_llm",
        aliases={a: n for a, n in ties.items() if a not in weights and n in weights},
        optimizer=_optimizer(weights, arrays),
        meta={"files": tuple(found)},
        unavailable=unavailable,
        problems=tuple(problems),
    )
    return opened, lambda: (stored, why)


def _optimizer(weights: Mapping[str, Array], moments: Mapping[str, Mapping[str, Array]]) -> dict[str, Mapping[str, Array]]:
    """Return the optimizer's arrays: the moments, and the weights that they belong to."""
    trained = {name for arrays in moments.values() for name in arrays}
    return {"master": {n: a for n, a in weights.items() if n in trained}, **moments} if trained else {}


# --- the distributed format -------------------------------------------------------------------------------------------


def _distributed(folder: Folder, told: Mapping[str, Any], config: Section, decay: str | None) -> tuple[Checkpoint, _Stored]:
    """Open a checkpoint of flat vectors, one file per rank."""
    if told["model"] != "gpt":
        raise FormatError(f"{METADATA}: model is {told['model']!r}, and this reader knows what ranks hold of 'gpt' alone")
    states = told["shards"]
    if not states or states[0] != "weights" or not all(isinstance(s, str) for s in states) or len(set(states)) != len(states):
        raise FormatError(f"{METADATA}: shards is {states!r}, 'weights' and then others were expected")
    ranks = _ranks(config.of("distributed"))
    base, stages = config.of("base_model"), config.of("multi_stage")
    if stages.size("stages_per_pipeline_stage", 1) != 1:
        raise stages.refuse("stages_per_pipeline_stage", "1 was expected")
    model = model_of(base, ranks.tp)
    if len(model.ties) > 1 and _version(told) < (0, 4):
        raise base.of("head").refuse("prediction_heads", "this reader knows further prediction heads since 0.4.0 alone")
    per_stage = stages.number("layers_per_stage", 1.0) or 1.0
    layout = _ordered(model, ranks, per_stage, told, decay)
    vectors = _vectors(folder, layout, states)
    arrays, lost = _arrays(layout, vectors, states)
    if not arrays[0]:
        raise FormatError(f"{folder.name}: none of its {ranks.count} files of ranks can be used: {next(iter(lost.values()))}")
    problems = [Problem(text, file=_file(rank), rank=rank) for rank, text in sorted(vectors.lost.items())]
    if not folder.has("ok"):
        text = f"{folder.name}: there is no file ok, which is written last: the save may not have finished"
        problems.append(Problem(text, file="ok"))
        warnings.warn(text, MeshloadWarning, stacklevel=5)
    more = [f for f in rank_files(folder) if int(f[5:].partition(".")[0]) >= ranks.count]
    if more:
        problems.append(Problem(f"{listing(more)}: not of this run, which has {ranks.count} ranks", file=more[0]))
    weights = arrays[0]
    frozen = {p.name for group in layout.groups if group.is_frozen for p in group.parameters}
    for state in states[1:]:
        kind = STATES.get(state, state)
        lost |= {f"optimizer.{kind}.{name}": why for name, why in lost.items() if name not in frozen and "optimizer." not in name}
    moments = {STATES.get(state, state): found for state, found in zip(states[1:], arrays[1:], strict=True)}
    mesh = {"tensor": ranks.tp, "pipeline": ranks.pp, "data": ranks.dp}
    opened = Checkpoint(
        weights,
        "fast_llm",
        aliases={alias: name for alias, name in model.ties.items() if name in weights},
        optimizer=_optimizer(weights, moments),
        meta={"mesh": mesh, "files": tuple(map(_file, range(ranks.count)))},
        unavailable=lost,
        problems=tuple(problems),
    )
    return opened, vectors.stored


def _ranks(section: Section) -> Ranks:
    tp, pp, count = section.size("tensor_parallel", 1), section.size("pipeline_parallel", 1), section.size("world_size", 0)
    if count == 0:
        raise FormatError(f"{section.path}.world_size is not there, and nothing else says how many ranks there were")
    if count % (tp * pp) or count > MOST_RANKS:
        raise section.refuse("world_size", f"a multiple of {tp} tensor x {pp} pipeline ranks, at most {MOST_RANKS}, was expected")
    return Ranks(tp, pp, count // (tp * pp), section.flag("pipeline_first", False))


def _ordered(model: Model, ranks: Ranks, per_stage: float, told: Mapping[str, Any], decay: str | None) -> Layout:
    """Return the layout, or ask how vectors are sorted, where that matters and nothing says it."""
    if decay is not None:
        return layout_of(model, ranks, per_stage, decay)
    version = _version(told)
    if version > NEWEST:
        raise FormatError(
            f"{METADATA}: fast_llm_version is {told['fast_llm_version']}; {NEWEST[0]}.{NEWEST[1]} is the last whose flat vectors "
            f"are known. Save it in the fast_llm format; or, if their order is known to be the same, use FastLLM(decay='matrices')"
        )
    new, old = (layout_of(model, ranks, per_stage, word) for word in ("matrices", "all"))
    if new.order == old.order:
        return new
    # `documents_seen` is saved since July 2026, `weight_decay` is known since the order changed.
    if version >= (0, 4) and ("documents_seen" in told["metadata"] or _mentions(told["config"].get("base_model"), "weight_decay")):
        return new
    if version < (0, 4):
        return old
    pairs = (pair for n, o in zip(new.order, old.order, strict=True) for pair in zip(n, o, strict=True))
    name, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise FormatError(
        f"{METADATA}: Fast-LLM changed the order of its flat vectors in June 2026 without a new version, and nothing here says "
        f"which it is: {name} stands where {other} stood before. "
        f"Say it: format=FastLLM(decay='matrices') for a later save, 'all' for an earlier one"
    )


def _mentions(config: Any, key: str) -> bool:
    if not isinstance(config, dict):
        return False
    return config.get(key) is not None or any(_mentions(value, key) for value in config.values())


def _file(rank: int) -> str:
    return f"rank_{rank}.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class _Vectors:
    """The flat vectors of all ranks, as their files' headers describe them."""

    sources: Sequence[ByteSource | None]
    """Per rank; None where its file cannot be used."""
    start: Ints
    """`(ranks, states)`: where each vector begins in its file, in bytes."""
    dtypes: Sequence[np.dtype[Any]]
    """Per state."""
    lost: Mapping[int, str]
    """Rank -> why its file cannot be used."""
    states: Sequence[str]
    lengths: Mapping[int, tuple[int, ...]]

    def stored(self) -> tuple[dict[str, Array], dict[str, str]]:
        """Return the vectors as they are stored, and those that are not there."""
        arrays = {}
        for rank, lengths in self.lengths.items():
            for s, n in enumerate(lengths):
                name = f"rank_{rank}/{self.states[s]}_shard"
                arrays[name] = stored_whole(name, self.dtypes[s], (n,), self.sources[rank], int(self.start[rank, s]))
        return arrays, {f"rank_{rank}/{state}_shard": text for rank, text in self.lost.items() for state in self.states}


def _vectors(folder: Folder, layout: Layout, states: Sequence[str]) -> _Vectors:
    """Read the headers of all ranks, and check how long their vectors are."""
    ranks = layout.ranks
    pipeline_of = np.empty(ranks.count, np.int64)
    for p in range(ranks.pp):
        pipeline_of[ranks.number(p, np.arange(ranks.dp)[:, None], np.arange(ranks.tp)[None])] = p
    found = read_headers(folder, [_file(r) for r in range(ranks.count)])
    sources: list[ByteSource | None] = [None] * ranks.count
    start = np.zeros((ranks.count, len(states)), np.int64)
    lost: dict[int, str] = {}
    lengths: dict[int, tuple[int, ...]] = {}
    kinds: dict[tuple[str, ...], int] = {}
    wrong = []
    for rank, header in enumerate(found.values()):
        if not isinstance(header, Header):
            lost[rank] = _why(folder, rank, header, ranks.count)
            continue
        weights, moments = layout.sizes[int(pipeline_of[rank])]
        expected = (weights, *[moments] * (len(states) - 1))
        entries = [header.entries.get(f"{state}_shard") for state in states]
        held = tuple(entry[1] if entry else None for entry in entries)
        if any(entry is None or entry[1] != (n,) for entry, n in zip(entries, expected, strict=True)):
            wrong.append(rank)
            lost[rank] = (
                f"{_file(rank)}: its vectors {', '.join(states)} have the shapes {held}, the config gives {expected} elements"
            )
            continue
        here = [entry for entry in entries if entry is not None]
        kinds.setdefault(tuple(entry[0] for entry in here), rank)
        sources[rank], lengths[rank] = header.source, expected
        start[rank] = [header.start + entry[2] for entry in here]
    if wrong and not lengths:
        raise FormatError(
            f"{lost[wrong[0]]}; so it is with all {len(wrong)} files that can be read: {METADATA} does not describe them, or this "
            f"reader does not know all that the model is made of"
        )
    if len(kinds) > 1:
        told = "; ".join(f"{_file(rank)} has {', '.join(kind)}" for kind, rank in kinds.items())
        raise FormatError(f"{folder.name}: its ranks have vectors of different dtypes: {told}")
    dtypes = [DTYPES[word][0] for kind in kinds for word in kind] or [np.dtype("<f4")] * len(states)
    return _Vectors(sources, start, dtypes, lost, states, lengths)


def _why(folder: Folder, rank: int, error: MeshloadError, count: int) -> str:
    return (
        str(error) if folder.has(_file(rank)) else f"{_file(rank)}: not there, though {METADATA} says that there are {count} ranks"
    )


# --- from vectors to parameters ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Columns, one row per run of a parameter in a vector; numbers of elements."""

    parameter: Ints
    group: Ints
    tensor: Ints
    """The tensor rank, whose part of the parameter it is; 0 where each has all."""
    rank: Ints
    """Whose vector it is in."""
    at: Ints
    """Where it begins in its group, in the rank's vector."""
    start: Ints
    """Where it begins in the tensor rank's part of the parameter."""
    count: Ints

    def take(self, rows: Any) -> _Runs:
        return _Runs(*(getattr(self, name)[rows] for name in self.__slots__))


def _arrays(layout: Layout, vectors: _Vectors, states: Sequence[str]) -> tuple[list[dict[str, Array]], dict[str, str]]:
    """Return each state's arrays, and which parameters are lost with files, and why."""
    parameters = [p for group in layout.groups for p in group.parameters]
    runs = _runs(layout)
    is_there = np.asarray([s is not None for s in vectors.sources])[runs.rank]
    lost = _lost(parameters, runs, is_there, vectors.lost)
    kept = [i for i, p in enumerate(parameters) if p.name not in lost]
    runs = runs.take(is_there)
    sources = tuple(s for s in vectors.sources if s is not None)
    source_of = np.cumsum([s is not None for s in vectors.sources]) - 1
    position = np.zeros((2, len(layout.groups), layout.ranks.count), np.int64)
    for (g, pipeline), places in layout.at.items():
        mine = layout.ranks.number(pipeline, np.arange(layout.ranks.dp)[:, None], np.arange(layout.ranks.tp)[None])
        position[0, g, mine], position[1, g, mine] = places
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i in kept:
        alike = parameters[i]
        kinds[alike.outer, alike.cut, alike.inner, alike.shape, alike.is_split].append(i)
    arrays: list[dict[str, Array]] = [{} for _ in states]
    for members in kinds.values():
        table, which = _table(parameters[members[0]], members, runs, layout.ranks.tp, len(parameters))
        first = np.searchsorted(which, np.arange(len(members) + 1))
        group = runs.group[np.searchsorted(runs.parameter, np.asarray(members))][which] if len(which) else which
        for s, dtype in enumerate(vectors.dtypes):
            # until here `source` is a rank, `offset` and `strides` count elements from where the group begins
            begin = vectors.start[:, s][table.source] + position[min(s, 1), group, table.source] * dtype.itemsize
            offset, strides = begin + table.offset * dtype.itemsize, table.strides * dtype.itemsize
            placed = Pieces(sources, source_of[table.source], offset, table.start, table.shape, strides)
            for n, i in enumerate(members):
                p = parameters[i]
                if s == 0 or not p.is_frozen:
                    rows = placed.take(slice(int(first[n]), int(first[n + 1])))
                    arrays[s][p.name] = Array(p.name, dtype, p.shape, rows)
    order = [p.name for p in parameters]
    return [{name: found[name] for name in order if name in found} for found in arrays], lost


def _runs(layout: Layout) -> _Runs:
    """Return where the parameters lie, those of one parameter together, the owner's before copies."""
    dp, tp = layout.ranks.dp, layout.ranks.tp
    data, tensor = np.arange(dp)[None, :, None], np.arange(tp)[None, None]
    first = np.cumsum([0, *(len(group.parameters) for group in layout.groups)])
    found = []
    for g, pipeline in layout.at:
        group = layout.groups[g]
        begin, end = group.begin[:-1, None, None], group.begin[1:, None, None]
        low = np.maximum(begin, data * group.share)
        high = np.minimum(end, (data + 1) * group.share)
        split = np.asarray([p.is_split for p in group.parameters])[:, None, None]
        columns = np.broadcast_arrays(
            np.arange(len(group.parameters))[:, None, None] + first[g],
            np.asarray(g),
            np.where(split, tensor, 0),
            layout.ranks.number(pipeline, data, tensor),
            low - data * group.share,
            low - begin,
            high - low,
        )
        runs = _Runs(*(np.ascontiguousarray(c).reshape(-1) for c in columns))
        found.append(runs.take(runs.count > 0))
    all_ = _Runs(*(np.concatenate([getattr(r, name) for r in found]) for name in _Runs.__slots__))
    return all_.take(np.argsort(all_.parameter, kind="stable"))


def _lost(parameters: Sequence[Parameter], runs: _Runs, is_there: Any, why: Mapping[int, str]) -> dict[str, str]:
    """Return the parameters of which a run is in no file that can be used, and the file that would have it."""
    if is_there.all():
        return {}
    spot = np.stack([runs.parameter, runs.tensor, runs.start], axis=1)
    _, number = np.unique(spot, axis=0, return_inverse=True)
    number = number.reshape(-1)
    covered = np.zeros(int(number.max()) + 1, np.bool_)
    covered[number[is_there]] = True
    gone = np.flatnonzero(~covered[number])
    found: dict[str, str] = {}
    for row in gone.tolist():
        found.setdefault(parameters[int(runs.parameter[row])].name, why[int(runs.rank[row])])
    return found


def _table(p: Parameter, members: Sequence[int], runs: _Runs, tp: int, count: int) -> tuple[Pieces, Ints]:
    """Return the pieces of parameters that are alike, one after another, and which of them each row is of."""
    number = np.full(count, -1, np.int64)
    number[members] = np.arange(len(members))
    mine = runs.take(number[runs.parameter] >= 0)
    which = number[mine.parameter]
    ndim = len(p.shape)
    if not len(which):
        return empty(ndim, ()), which
    one = np.ones_like(which)
    rows = Pieces(
        (),
        mine.rank,
        mine.at,
        np.stack([which, mine.tensor, mine.start], axis=1),
        np.stack([one, one, mine.count], axis=1),
        np.stack([0 * one, 0 * one, one], axis=1),
    )
    cut = p.cut // tp if p.is_split else p.cut
    parts = tp if p.is_split else 1
    rows = rows.split(2, [p.outer, cut, p.inner]).transpose([0, 2, 1, 3, 4]).merge(2, [parts, cut])
    if ndim == 1:
        rows = rows.merge(1, [p.outer, p.cut, p.inner])
    elif p.shape[1] == p.inner:
        rows = rows.merge(1, [p.outer, p.cut])
    else:
        rows = rows.merge(2, [p.cut, p.inner])
    rows = rows.take(np.argsort(rows.start[:, 0], kind="stable"))
    which = rows.start[:, 0]
    return Pieces(rows.sources, rows.source, rows.offset, rows.start[:, 1:], rows.shape[:, 1:], rows.strides[:, 1:]), which
