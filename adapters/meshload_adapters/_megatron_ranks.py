"""The rank folders of a legacy Megatron save: their files, and the mesh that they belong to.

A file's own `args` tell its mesh, and with it what the numbers in its folder's name count. Files that an older, larger mesh left
behind in the same iteration tell another one.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshload.checkpoint import Problem
from meshload.errors import FormatError, MeshloadWarning, SourceError, listing
from meshload.source import Folder

from ._megatron import arguments, number
from ._megatron_find import MODEL_FILES, OLD_OPTIMIZER, RANK_FOLDER, Save, is_rank
from ._megatron_shards import EMBEDDING
from ._torch_file import NETWORK, Tensor, TorchFile

FILES_AT_ONCE = 8

BUFFERS_FILE = "distrib_optim.pt"

MOST_RANKS = 1 << 17
"""A mesh of more is a hostile file's."""

_SHOWN = 3
"""Ranks that a message tells one by one."""


@dataclass(slots=True, eq=False)
class Rank:
    """The files of one rank."""

    folder: str
    numbers: tuple[int, ...]
    file: TorchFile | None = None
    why: str = ""
    """Why there is no file."""
    root: Mapping[Any, Any] = field(default_factory=dict)
    chunks: list[dict[str, Tensor]] = field(default_factory=list)
    """The model's tensors per virtual chunk, under mcore's names."""
    skipped: list[str] = field(default_factory=list)
    """What is no tensor of the model."""
    is_old: bool = False
    """Whether its names are those before megatron-core."""
    buffers: TorchFile | None = None
    buffers_why: str = ""
    """Why the optimizer's arrays cannot be given."""
    is_optimizer: bool = False
    """Whether it is a data-parallel rank's folder of old, in which the optimizer is alone."""
    t: int = 0
    p: int = 0
    e: int = 0

    @property
    def label(self) -> str:
        return self.file.source.name if self.file else f"{self.folder}/{MODEL_FILES[0]}"


def read_ranks(save: Save) -> list[Rank]:
    folders = [n.rstrip("/") for n in save.folder.names() if is_rank(n)]
    folders = folders or [""]
    ranks: list[Rank] = []
    for name in folders:
        ranks.append(_read_rank(save.folder, name))
        if ranks[-1].file is not None:
            break
    rest = folders[len(ranks) :]
    if ranks[-1].file is not None and ranks[-1].file.source.gap >= NETWORK:
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="meshload") as pool:
            ranks += pool.map(partial(_read_rank, save.folder), rest)
    else:  # parsing takes the time, and threads would take turns at it
        ranks += [_read_rank(save.folder, name) for name in rest]
    old = next((rank for rank in ranks if rank.is_optimizer), None)
    if old is not None:
        ranks = [rank for rank in ranks if not rank.is_optimizer]
        for rank in ranks:
            rank.buffers_why = old.buffers_why
    if not any(rank.file for rank in ranks):
        raise FormatError(f"{save.name}: no rank's file can be read: {listing((r.why for r in ranks), _SHOWN)}")
    return ranks


def _read_rank(folder: Folder, name: str) -> Rank:
    match = re.fullmatch(RANK_FOLDER, f"{name}/")
    rank = Rank(name, tuple(int(n) for n in match.groups() if n) if match else ())
    at = f"{name}/" if name else ""
    listed = folder.names(name)
    if OLD_OPTIMIZER in listed:
        rank.buffers_why = f"the optimizer is in {at}{OLD_OPTIMIZER}, as old releases wrote it, which is not read"
    model = next((n for n in MODEL_FILES if n in listed), None)
    if model is None:
        rank.why = f"{at}{MODEL_FILES[0]} is not there"
        rank.is_optimizer = OLD_OPTIMIZER in listed
        return rank
    try:
        found = TorchFile.open(folder.file(f"{at}{model}"))
        _take(rank, found)
    except (FormatError, SourceError) as error:
        rank.why = str(error)
        return rank
    if BUFFERS_FILE in listed:
        try:
            rank.buffers = TorchFile.open(folder.file(f"{at}{BUFFERS_FILE}"))
        except (FormatError, SourceError) as error:
            rank.buffers_why = str(error)
    if any(n.startswith("layer_wise_optimizer") for n in listed):
        rank.buffers_why = "the optimizer is in layer_wise_optimizer_*.pt, which is not read"
    return rank


def _take(rank: Rank, file: TorchFile) -> None:
    if type(file.root) is not dict:
        raise FormatError(f"{file.source.name}: holds {type(file.root).__name__}, a dict with 'model' was expected")
    keys = (
        ["model"]
        if "model" in file.root
        else sorted((k for k in file.root if type(k) is str and re.fullmatch(r"model\d{1,4}", k)), key=lambda k: int(k[5:]))
    )
    if not keys or (keys != ["model"] and keys != [f"model{i}" for i in range(len(keys))]):
        raise FormatError(f"{file.source.name}: has no 'model', nor 'model0', 'model1' ..., but {listing(map(str, file.root))}")
    for key in keys:
        tensors = _state(file.root[key], key, rank.skipped, file.source.name)
        rank.is_old = rank.is_old or any(n.startswith("language_model.") for n in tensors)
        rank.chunks.append({_renamed(n): t for n, t in tensors.items()} if rank.is_old else tensors)
    rank.file, rank.root = file, file.root


def _state(found: Any, key: str, skipped: list[str], file: str) -> dict[str, Tensor]:
    """Return the tensors of a chunk, in their order."""
    if type(found) is not dict:
        raise FormatError(f"{file}: {key} is {type(found).__name__}, a dict of tensors was expected")
    tensors: dict[str, Tensor] = {}
    for name, value in _leaves(found, ""):
        if type(value) is Tensor and not name.endswith("_extra_state"):
            tensors[name] = value
        elif not name.endswith("_extra_state"):
            skipped.append(f"{key}.{name}")
    while tensors and all(n.startswith("module.") for n in tensors):
        tensors = {n.removeprefix("module."): t for n, t in tensors.items()}
    return tensors


def _leaves(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if type(value) is dict:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_BEFORE_MCORE = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"^(?:encoder|transformer)\.(?=layers\.|final_)"), "decoder."),
    (re.compile(r"^decoder\.final_norm\."), "decoder.final_layernorm."),
    (re.compile(r"^word_embeddings_for_head\."), "word_embeddings_for_head."),
    (re.compile(r"(\.layers\.\d+\.)post_attention_(?:layer)?norm\."), r"\1pre_mlp_layernorm."),
    (re.compile(r"(\.layers\.\d+\.)input_norm\."), r"\1input_layernorm."),
    (re.compile(r"(\.layers\.\d+\.)attention\."), r"\1self_attention."),
    (re.compile(r"\.self_attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.self_attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.local_experts\."), ".mlp.experts.local_experts."),
    (re.compile(r"\.dense_h_to_4h\."), ".linear_fc1."),
    (re.compile(r"\.dense_4h_to_h\."), ".linear_fc2."),
)
"""How the names before megatron-core are spelled now."""

COPY = "word_embeddings_for_head.weight"
"""The last stage's copy of the embedding, before megatron-core."""


def _renamed(name: str) -> str:
    for old, new in _BEFORE_MCORE:
        name = old.sub(new, name)
    return name


# --- the mesh ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mesh:
    tp: int
    pp: int
    ep: int
    etp: int

    def place(self, numbers: Sequence[int]) -> tuple[int, int, int] | None:
        """Return tensor, pipeline and expert rank of a folder's numbers; None where the folder belongs to another mesh."""
        if len(numbers) != 1 + (self.pp > 1) + (self.ep > 1):
            return None
        rest = list(numbers[1:])
        p = rest.pop(0) if self.pp > 1 else 0
        e = rest.pop(0) if self.ep > 1 else 0
        return (numbers[0], p, e) if numbers[0] < self.tp and p < self.pp and e < self.ep else None


def _mesh_of(args: Mapping[str, Any]) -> Mesh | None:
    tp = number(args, "tensor_model_parallel_size") or number(args, "model_parallel_size")
    if tp is None:
        return None
    pp, ep = number(args, "pipeline_model_parallel_size", 1) or 1, number(args, "expert_model_parallel_size", 1) or 1
    if tp * pp * ep > MOST_RANKS:
        raise FormatError(f"args say tp {tp}, pp {pp}, ep {ep}: {tp * pp * ep} ranks, at most {MOST_RANKS} are expected")
    return Mesh(tp, pp, ep, number(args, "expert_tensor_parallel_size", tp) or tp)


def placed(save: Save, ranks: list[Rank]) -> tuple[Mesh, Mapping[str, Any], list[Rank], list[Problem]]:
    """Return the mesh, its `args`, the ranks that were read, in the order of their copies, and what is wrong."""
    meshes: dict[Mesh, list[Rank]] = {}
    for rank in ranks:
        mesh = _mesh_of(arguments(rank.root.get("args"))) if rank.file else None
        if mesh is not None:
            meshes.setdefault(mesh, []).append(rank)
    if not meshes:
        mesh = _mesh_by_names(save, ranks)
        meshes[mesh] = [rank for rank in ranks if rank.file]
    mesh = _chosen(save, meshes)
    args = arguments(meshes[mesh][0].root.get("args"))
    if not ranks[0].folder:
        if mesh.tp * mesh.pp * mesh.ep > 1:
            raise FormatError(
                f"{save.name}: is one rank's folder of tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}; open the folder above it, which "
                f"has them all"
            )
        return mesh, args, ranks, []
    at: dict[tuple[int, int, int], Rank] = {}
    stale = []
    for rank in ranks:
        place = mesh.place(rank.numbers)
        if place is None or (rank.file and rank not in meshes[mesh]):
            stale.append(rank.folder)
        else:
            rank.t, rank.p, rank.e = place
            at[place] = rank
    if not any(rank.file for rank in at.values()):
        raise FormatError(
            f"{save.name}: args say tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}, and no folder is named as such a mesh has them: "
            f"{listing(stale)}"
        )
    if stale:
        warnings.warn(
            f"{save.name}: its checkpoint is of tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}; {listing(stale)} belong to another, "
            f"and are passed over",
            MeshloadWarning,
            stacklevel=5,
        )
    there = sorted((r for r in at.values() if r.file), key=lambda r: (r.p, r.e, r.t))
    return mesh, args, there, _lost(mesh, at)


def _chosen(save: Save, meshes: Mapping[Mesh, list[Rank]]) -> Mesh:
    """Return the mesh whose files are there, where files of another were left behind."""
    if len(meshes) == 1:
        return next(iter(meshes))
    whole = []
    for mesh, ranks in meshes.items():
        at = {place: rank for rank in ranks if (place := mesh.place(rank.numbers)) is not None}
        if not _lost(mesh, at):
            whole.append(mesh)
    if len(whole) == 1:
        return whole[0]
    kinds = listing(f"tp {m.tp} pp {m.pp} ep {m.ep} ({len(r)} files)" for m, r in meshes.items())
    raise FormatError(
        f"{save.name}: holds files of several meshes, {kinds}, of which {len(whole)} are complete; move the others away"
    )


def _lost(mesh: Mesh, at: Mapping[tuple[int, int, int], Rank]) -> list[Problem]:
    """Tell which ranks' files are needed and not there. With etp other than tp, not each (tensor, expert) rank has one."""
    found = []
    there = {place for place, rank in at.items() if rank.file}
    for p in range(mesh.pp):
        for t in range(mesh.tp):
            for e in range(mesh.ep):
                dense = any((t, p, other) in there for other in range(mesh.ep))
                experts = any((other, p, e) in there for other in range(t % mesh.etp, mesh.tp, mesh.etp))
                if (t, p, e) in there or (mesh.etp != mesh.tp and dense and experts):
                    continue
                name = f"mp_rank_{t:02}{f'_{p:03}' if mesh.pp > 1 else ''}{f'_{e:03}' if mesh.ep > 1 else ''}"
                rank = at.get((t, p, e))
                file = f"{name}/{MODEL_FILES[0]}"
                why = rank.why if rank else f"{file} is not there"
                of = f"tensor rank {t} of {mesh.tp}, pipeline rank {p} of {mesh.pp}, expert rank {e} of {mesh.ep}"
                found.append(Problem(f"{why}; it is to hold {of}", file=file))
    return found


def _mesh_by_names(save: Save, ranks: Sequence[Rank]) -> Mesh:
    """Return the mesh where no `args` tell it: from the folders' numbers, and from who holds the embedding."""
    lengths = {len(rank.numbers) for rank in ranks}
    if len(lengths) > 1:
        raise FormatError(f"{save.name}: no file has args, and the names of its folders are of several kinds; move one kind away")
    size = [max(rank.numbers[i] for rank in ranks) + 1 for i in range(lengths.pop())]
    if math.prod(size) > MOST_RANKS:
        raise FormatError(
            f"{save.name}: no file has args, and the folders' numbers make {size} ranks; move those that are none away"
        )
    tp = size[0] if size else 1
    if len(size) < 2:
        return Mesh(tp, 1, 1, tp)
    if len(size) == 3:
        return Mesh(tp, size[1], size[2], tp)
    everywhere = all(EMBEDDING in chunk for rank in ranks if rank.file for chunk in rank.chunks[:1])
    return Mesh(tp, 1, size[1], tp) if everywhere else Mesh(tp, size[1], 1, tp)
