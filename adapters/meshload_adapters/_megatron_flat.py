"""The optimizer states of megatron-core that lie in flat buffers: whose they are, worked out from `args`.

A group of data-parallel ranks, one per tensor and pipeline rank (for experts: and expert rank), has its parameters' states in
buffers, see `_megatron_buffers.py`. Which parameters these are follows from the mesh, and their order from the layer spec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshload.array import Array
from meshload.errors import FormatError, SourceError, listing
from meshload.pieces import Pieces, union

from ._distcp import Found, Listing
from ._distcp_runs import Place
from ._megatron import bucket_limit, layers_of, number
from ._megatron_buffers import Refused, laid_out, module_order, spelled_by
from ._megatron_shards import COLUMNS, EMBEDDING, HEAD, UNKNOWN, WHOLE, Fusion, Part, cut_runs, join_runs, taken_apart
from ._pickle import Global
from ._torch_file import DTYPES, Tensor, TorchFile
from ._zero import dict_of

MOST_RANKS = 1 << 17

KINDS = {"param": "master", "fp32_param": "master"}

BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)"
    r"\.bucket_idx_(\d+)\.(\w+)"
)

PARAM_STATE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1")

_GROUPS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_0_1")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One gradient buffer's values: of which rank and dtype, and its buckets by kind."""

    is_expert: bool
    group: int
    number: int
    dtype: str
    buckets: Mapping[str, Sequence[Array]]
    is_coalesced: bool
    """Whether the one bucket stands for all, one after another."""


def _chain(text: str | None, chains: set[str | None]) -> bool:
    """Say whether an optimizer is the experts': the second of two."""
    if chains - {None, "0", "1"} or (None in chains and len(chains) > 1):
        raise Refused(f"there are optimizers {sorted(map(str, chains))}; one, or the experts' beside the others', was expected")
    return text == "1"


def buckets_of(arrays: Mapping[str, Array]) -> list[Buffer]:
    """Return the buffers of `dp_reshardable`."""
    found: dict[tuple[bool, int, int, str], dict[str, dict[int, Array]]] = {}
    matches = [(m, array) for key, array in arrays.items() if (m := BUCKET.fullmatch(key))]
    chains = {m[1] for m, _ in matches}
    for m, array in matches:
        if array.ndim != 1:
            raise Refused(f"{m[0]} has shape {array.shape}, one dim was expected")
        if m[6] in ("param", "exp_avg", "exp_avg_sq") or array.dtype.kind == "f":
            at = found.setdefault((_chain(m[1], chains), int(m[2]), int(m[3]), m[4]), {})
            at.setdefault(m[6], {})[int(m[5])] = array
    buffers = []
    for (is_expert, group, n, dtype), kinds in sorted(found.items()):
        for kind, by_number in kinds.items():
            if sorted(by_number) != list(range(len(by_number))):
                raise Refused(f"buffer {n} of group {group} has the buckets {sorted(by_number)} of {kind}")
        ordered = {kind: [by_number[i] for i in range(len(by_number))] for kind, by_number in kinds.items()}
        buffers.append(Buffer(is_expert, group, n, dtype, ordered, False))
    return buffers


def states_of(listed: Listing, found: Found) -> list[Buffer]:
    """Return the buffers of `dp_zero_gather_scatter`: objects that hold tensors."""
    matches = [(m, places) for key, places in listed.objects.items() if (m := PARAM_STATE.fullmatch(key))]
    chains = {m[1] for m, _ in matches}
    buffers = []
    for m, places in matches:
        file, state = _object(m[0], places, found)
        for n in sorted(k for k in state if type(k) is int) if type(state) is dict else ():
            for key, values in state[n].items() if type(state[n]) is dict else ():
                dtype = key[0] if type(key) is tuple and key else key
                name = dtype.name if isinstance(dtype, Global) else str(dtype)
                arrays = _flat_arrays(values, file, f"{m[0]}: buffer {n}")
                buffers.append(Buffer(_chain(m[1], chains), int(m[2]), n, name, arrays, True))
    return buffers


def groups_in(listed: Listing, found: Found) -> list[tuple[TorchFile, Mapping[Any, Any]]]:
    """Return what the first group of ranks says of each optimizer's `param_groups`, as all do, with the file that has it."""
    first: dict[str, re.Match[str]] = {}
    for key in listed.objects:
        m = _GROUPS.fullmatch(key)
        if m and (m[1] not in first or int(m[2]) < int(first[m[1]][2])):
            first[m[1]] = m
    told = [_object(first[chain][0], listed.objects[first[chain][0]], found) for chain in sorted(first, key=lambda c: c or "")]
    return [(file, dict_of(root)) for file, root in told]


def _object(key: str, places: Sequence[Place], found: Found) -> tuple[TorchFile, Any]:
    """Return what was saved as an object, and the file that has it."""
    source = found.sources.get(places[0].file) if places else None
    if source is None:
        raise Refused(f"{key}: its data file is not there")
    place = places[0]
    try:
        file = TorchFile.open(source, place.offset, place.offset + place.length)
    except (FormatError, SourceError) as error:
        raise Refused(f"{key}: {error}") from error
    return file, file.root[0] if type(file.root) is list and len(file.root) == 1 else file.root  # objects are saved in a list


def _flat_arrays(values: Any, file: TorchFile, what: str) -> dict[str, list[Array]]:
    tensors = {k: v for k, v in values.items() if type(v) is Tensor} if type(values) is dict else {}
    why = next((file.refusal(t) for t in tensors.values() if file.refusal(t)), "")
    if not tensors or why or any(len(t.shape) != 1 for t in tensors.values()):
        raise Refused(f"{what} is no dict of flat arrays{f': {why}' if why else ''}")
    return {kind: [file.array(tensor, kind)] for kind, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """The run that saved the states, as far as the places of its parameters depend on it."""

    args: Mapping[str, Any]
    tp: int
    pp: int
    ep: int
    etp: int
    virtual: int
    layers: Mapping[tuple[int, int], int]
    """How many layers chunk `v` of stage `p` has."""
    experts: int
    """Per expert-parallel rank."""
    fusion: Fusion
    tied: bool
    implementation: str
    arrays: Mapping[str, Array]

    @staticmethod
    def of(args: Mapping[str, Any], arrays: Mapping[str, Array], implementation: str | None) -> Run:
        """Return the run that `args` describe, or say what they lack."""
        tp = number(args, "tensor_model_parallel_size")
        swiglu = args.get("swiglu")
        implementation = implementation or args.get("transformer_impl")
        why = "the optimizer's states are flat, and hold no names: "
        if tp is None or type(swiglu) is not bool:
            raise Refused(f"{why}args, which tell the mesh and the model that they depend on, are not in common.pt")
        if type(implementation) is not str:
            raise Refused(f"{why}args do not say transformer_impl; open it with MegatronCore(transformer_impl=...)")
        pp, ep = number(args, "pipeline_model_parallel_size", 1) or 1, number(args, "expert_model_parallel_size", 1) or 1
        virtual = number(args, "virtual_pipeline_model_parallel_size", 1) or 1
        if tp * pp * ep * virtual > MOST_RANKS:
            raise Refused(f"args say tp {tp}, pp {pp}, ep {ep}, at most {MOST_RANKS} ranks are expected")
        layers = layers_of(args, pp, virtual)
        if layers is None:
            raise Refused(f"{why}args do not say plainly which layers each pipeline rank had")
        return Run(
            args,
            tp,
            pp,
            ep,
            number(args, "expert_tensor_parallel_size", tp) or tp,
            virtual,
            layers,
            (number(args, "num_experts") or 0) // ep,
            Fusion(swiglu or args.get("quick_geglu") is True),
            args.get("untie_embeddings_and_output_weights") is False,
            implementation,
            arrays,
        )

    def ranks(self, is_expert: bool, group: int) -> tuple[int, int, int]:
        """Return tensor, pipeline and expert rank of a group of data-parallel ranks."""
        tp, ep = (self.etp, self.ep) if is_expert else (self.tp, 1)
        t, rest = group % tp, group // tp
        if rest // ep >= self.pp:
            raise Refused(f"there is a state of group {group}, the mesh of args has {tp * ep * self.pp}")
        return t, rest // ep, rest % ep

    def chunk(self, p: int, v: int) -> list[str]:
        """Return the full names of the parameters of a chunk, in module order, each as its layer spec spells it."""
        before = sum(n for place, n in self.layers.items() if place < (v, p))
        mine = range(before, before + self.layers[v, p])
        names = []
        for name in self.arrays:
            layer = taken_apart(name).layer
            last = (v, p) == (self.virtual - 1, self.pp - 1)
            if layer is not None:
                is_mine = layer in mine
            elif name.startswith("embedding."):
                is_mine = (v, p) == (0, 0)
            else:
                is_mine = last and not (name == HEAD and self.tied)
            if is_mine and not name.endswith((".expert_bias", ".inv_freq")):
                names.append(name)
        if self.tied and self.pp > 1 and (v, p) == (self.virtual - 1, self.pp - 1):
            names.append(HEAD)
        return names


def unpacked(buffers: Sequence[Buffer], run: Run) -> dict[str, dict[str, Array]]:
    """Return the optimizer's arrays by kind, cut out of the buffers of all ranks."""
    by_group: dict[tuple[bool, int], list[Buffer]] = {}
    for buffer in buffers:
        by_group.setdefault((buffer.is_expert, buffer.group), []).append(buffer)
    experts = run.ep > 1 and run.experts > 0
    expected = {(False, i) for i in range(run.tp * run.pp)}
    expected |= {(True, i) for i in range(run.etp * run.ep * run.pp)} if experts else set()
    if set(by_group) != expected:
        raise Refused(
            f"there are states of {len(by_group)} groups of ranks, tp {run.tp}, pp {run.pp}, ep {run.ep} give {len(expected)}"
        )
    parts: list[Part] = []
    runs: dict[str, list[Pieces]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    chunks = {(p, v): _spelled(run, p, v) for p in range(run.pp) for v in range(run.virtual)}
    for (is_expert, group), held in sorted(by_group.items()):
        t, p, e = run.ranks(is_expert, group)
        laid: dict[tuple[int, str], list[Sequence[Part]]] = {}
        for v in range(run.virtual):
            for dtype, these in _parts_of(run, chunks[p, v], is_expert, t, e):
                laid.setdefault((v, dtype), []).append(these)
        held = sorted(held, key=lambda b: b.number)
        if [b.dtype for b in held] != [dtype for _, dtype in laid]:
            raise Refused(
                f"group {group} has buffers of {[b.dtype for b in held]}, its parameters give {[dtype for _, dtype in laid]}"
            )
        for buffer, ((v, _), units) in zip(held, laid.items(), strict=True):
            first = len(parts)
            parts += [part for unit in units for part in unit]
            for kind, pieces, dtype_ in _cut(buffer, units, first, bucket_limit(run.args, p, v), run, p, v):
                runs.setdefault(kind, []).append(pieces)
                if dtypes.setdefault(kind, dtype_) != dtype_:
                    raise Refused(f"{kind} is stored as {dtypes[kind]} and as {dtype_}")
    return {KINDS.get(kind, kind): join_runs(parts, union(tables), dtypes[kind], run.fusion) for kind, tables in runs.items()}


def _spelled(run: Run, p: int, v: int) -> list[tuple[str, str]]:
    """Return a chunk's parameters in module order: as the layer spec spells them, and the full name."""
    spelled = spelled_by(
        run.implementation,
        run.chunk(p, v),
        is_grouped=run.args.get("moe_grouped_gemm") is True,
        is_legacy_grouped=run.args.get("moe_use_legacy_grouped_gemm") is True,
    )
    order = None if spelled is None else module_order(spelled)
    if spelled is None or order is None:
        strange = [n for n in spelled or () if module_order([n]) is None]
        what = f"{listing(strange, 3)}" if strange else f"the layer spec {run.implementation!r}"
        raise Refused(f"the optimizer's states are flat, and hold no names: where {what} stands among the others is not known")
    return [(name, spelled[name]) for name in order]


def _parts_of(run: Run, chunk: Sequence[tuple[str, str]], is_expert: bool, t: int, e: int) -> Iterator[tuple[str, Sequence[Part]]]:
    """Go through the parameters of a rank: the dtype of each, and what it consists of, one part but for `GroupedMLP`."""
    for spelled, full in chunk:
        name = taken_apart(full)
        whole = EMBEDDING if full == HEAD and run.tied else full
        apart = name.is_expert and run.ep > 1
        if apart != is_expert:
            continue
        count, at = (run.etp, t % run.etp) if name.is_expert else (run.tp, t)
        grouped = re.search(r"\.mlp\.experts\.weight([12])$", spelled)
        if name.expert is not None and apart and not grouped and name.expert // run.experts != e:
            continue
        numbers: Sequence[int | None] = [name.expert]
        if grouped:
            numbers = range(e * run.experts, (e + 1) * run.experts)
        units = []
        for k in numbers:
            single = whole if k is None else re.sub(r"local_experts\.\d+\.", f"local_experts.{k}.", whole)
            array = run.arrays.get(single)
            if array is None:
                raise Refused(f"{single} is not among the weights, so the shape of its state is not known")
            shape = _local(array.shape, name.cut, count, single)
            units.append(Part(single, name.cut, at, count, shape[::-1] if grouped else shape, bool(grouped)))
        dtype = run.arrays[units[0].name].dtype
        yield next(k for k, d in DTYPES.items() if d == dtype), units


def _local(shape: Sequence[int], cut: str, count: int, name: str) -> tuple[int, ...]:
    dim = None if cut == WHOLE or count == 1 else 1 if cut == COLUMNS else 0
    if cut == UNKNOWN and count > 1:
        raise Refused(f"{name}: how tensor-parallel ranks share it is not known")
    if dim is None:
        return tuple(shape)
    if dim >= len(shape) or shape[dim] % count:
        raise Refused(f"{name}: dim {dim} of shape {tuple(shape)} does not divide by {count}")
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])


def _cut(
    buffer: Buffer, units: Sequence[Sequence[Part]], first: int, limit: int | None, run: Run, p: int, v: int
) -> Iterator[tuple[str, Pieces, np.dtype[Any]]]:
    """Go through the kinds of a buffer's values, cut at its parameters."""
    sizes = [sum(math.prod(part.shape) for part in unit) for unit in units]
    shared = {EMBEDDING} if run.tied and run.pp > 1 else set()
    alone = {i for i, unit in enumerate(units) if unit[0].name in shared}
    held = next(iter(buffer.buckets.values()))
    expected = [a.shape[0] for a in held]
    made = laid_out(sizes, expected, limit=limit, alone=alone, coalesced=buffer.is_coalesced)
    if made is None:
        raise Refused(
            f"buffer {buffer.number} of group {buffer.group} has {expected[:4]} elements, its {len(sizes)} parameters have "
            f"{sum(sizes)}; no known way to lay them out gives that number"
        )
    number_of = np.cumsum([0, *(len(unit) for unit in units)]) + first
    lengths = [[math.prod(part.shape) for part in unit] for unit in units]
    for kind, arrays in buffer.buckets.items():
        if [a.shape[0] for a in arrays] != expected:
            raise Refused(f"buffer {buffer.number} of group {buffer.group}: {kind} has other sizes than the others")
        base = 0
        for b, bucket in enumerate(made):
            array = arrays[0] if buffer.is_coalesced else arrays[b]
            of = [(i, n) for i in bucket.numbers for n in range(len(units[i]))]
            begins = dict(zip(bucket.numbers, bucket.starts, strict=True))
            starts = [base + begins[i] + sum(lengths[i][:n]) for i, n in of]
            numbers = [int(number_of[i]) + n for i, n in of]
            yield kind, cut_runs(array.pieces, starts, [lengths[i][n] for i, n in of], numbers, array.dtype.itemsize), array.dtype
            base += bucket.size if buffer.is_coalesced else 0
