"""What the benchmark compares: per question, functions that prepare (imports, headers) and return the call that is timed.

A call returns its tensors by name. Whatever a library maps lazily is copied into memory of its own, so that all sides end alike.
"""

from __future__ import annotations

import http.client
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import servers
from checkpoint import ROW_PARALLEL, slices

Call = Callable[[], Mapping[str, Any]]
Side = Callable[[Any], Call]
"""Of a folder, or of a place in a server."""

ORBAX = "orbax4"
"""The folder of the copy in Orbax's format."""
THREADS = 2
"""Of the plain floors: as many as cores; more were no faster."""
ROWS = " ".join(ROW_PARALLEL)

# --- the floor: the wanted bytes, copied into new memory --------------------------------------------------------------


def floor(how: str, size: int, names: str = "", empty: str = "torch") -> Side:
    """Copy slices whose places are known, with plain `preadv` or from a map, into tensors that are new."""

    def prepare(folder: Path) -> Call:
        import torch

        new = torch.empty if empty == "torch" else lambda n, dtype: torch.from_numpy(np.empty(n, np.uint8))
        files = slices(folder, size, min(1, size - 1), names)
        opened = {file: os.open(file, os.O_RDONLY) for file in files}
        copy = {"preadv": _read, "map": _copy_mapped}[how]

        def call() -> Mapping[str, Any]:
            source = {f: _mapped(n) if how == "map" else n for f, n in opened.items()}
            found = {name: new(rows * n, dtype=torch.uint8) for of in files.values() for name, (_, rows, n, _) in of.items()}
            work = (
                (source[f], part, found[name].numpy())
                for f, of in files.items()
                for name, place in of.items()
                for part in _parts(*place)
            )
            _in_threads(lambda item: copy(*item), work)
            return found

        return call

    return prepare


def _parts(start: int, rows: int, n: int, stride: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut a slice into parts of 8 MiB, or 1 MiB of rows with what lies between: file offset, rows, bytes, stride, place in it."""
    if rows == 1:
        for at in range(0, n, 8 << 20):
            yield start + at, 1, min(8 << 20, n - at), 0, at
    else:
        step = max(1, (1 << 20) // stride)
        for row in range(0, rows, step):
            yield start + row * stride, min(step, rows - row), n, stride, row * n


def _read(file: int, part: tuple[int, int, int, int, int], out: Any) -> None:
    start, rows, n, stride, at = part
    there = memoryview(out)[at : at + rows * n]
    if rows == 1:
        while there:
            done = os.preadv(file, [there], start)
            there, start = there[done:], start + done
        return
    block = np.empty((rows - 1) * stride + n, np.uint8)
    assert os.preadv(file, [block], start) == len(block)
    out[at : at + rows * n].reshape(rows, n)[...] = np.lib.stride_tricks.as_strided(block, (rows, n), (stride, 1))


def _copy_mapped(source: Any, part: tuple[int, int, int, int, int], out: Any) -> None:
    start, rows, n, stride, at = part
    np.copyto(out[at : at + rows * n].reshape(rows, n), np.lib.stride_tricks.as_strided(source[start:], (rows, n), (stride, 1)))


def _mapped(file: int) -> Any:
    return np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)


def _in_threads(do: Callable[[Any], Any], items: Iterator[Any], threads: int = THREADS) -> None:
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                item = next(items, None)
            if item is None:
                return
            do(item)

    pool = [threading.Thread(target=run) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


# --- meshload ---------------------------------------------------------------------------------------------------------


def meshload(*, again: bool = False, **options: Any) -> Side:
    """Restore; `again` times the second of two restores in one process."""

    def prepare(place: Any) -> Call:
        import torch  # noqa: F401 - the other sides have it before the clock starts too

        import meshload

        opened = servers.opened(place)
        if again:
            meshload.restore(opened, into="torch", **options)
        return lambda: meshload.restore(opened, into="torch", **options)

    return prepare


def exchanging(exchange: bool, **options: Any) -> Side:
    """Restore in several processes."""

    def prepare(place: Any) -> Call:
        import torch

        torch.distributed.init_process_group("gloo")
        return meshload(exchange=exchange, **options)(place)

    return prepare


def engine(*, threads: int = 0, **options: Any) -> Side:
    """Read what is opened and planned already: meshload without its constant costs; over a network by so many threads."""

    def prepare(place: Any) -> Call:
        import meshload
        from meshload import scheduling
        from meshload.reading import buffers_for, read

        scheduling.NETWORK_THREADS = threads or scheduling.NETWORK_THREADS
        made = meshload.plan(servers.opened(place), into="numpy", **options)
        len(made.schedule)

        def call() -> Mapping[str, Any]:
            buffers = buffers_for(made)
            read(made, buffers)
            return {t.name: buffers[i] for i, t in enumerate(made.targets)}

        return call

    return prepare


# --- safetensors and those that read whole files ----------------------------------------------------------------------


def get_slice(size: int, names: str = "") -> Side:
    def prepare(folder: Path) -> Call:
        import torch
        from safetensors import safe_open

        def call() -> Mapping[str, Any]:
            files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            opened = {file: safe_open(folder / file, framework="pt") for file in set(files.values())}
            found = {}
            for name, file in files.items():
                if names and not name.endswith(tuple(names.split())):
                    continue
                part = opened[file].get_slice(name)
                shape = part.get_shape()
                if len(shape) == 1:
                    taken = part[:]
                elif name.endswith(ROW_PARALLEL):
                    taken = part[:, shape[1] // size : 2 * (shape[1] // size)]
                else:
                    taken = part[shape[0] // size : 2 * (shape[0] // size)]
                found[name] = taken.clone(memory_format=torch.contiguous_format)
            return found

        return call

    return prepare


def load_file(folder: Path) -> Call:
    from safetensors.torch import load_file as load

    return lambda: {name: t.clone() for file in _files(folder) for name, t in load(file).items()}


def runai(folder: Path) -> Call:
    from runai_model_streamer import SafetensorsStreamer

    def call() -> Mapping[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(file) for file in _files(folder)])
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return call


def fastsafetensors(folder: Path) -> Call:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def call() -> Mapping[str, Any]:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(file) for file in _files(folder)]})
        buffer = loader.copy_files_to_device()
        found = {name: buffer.get_tensor(name).clone() for name in loader.get_keys()}
        buffer.close()
        loader.close()
        return found

    return call


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# --- over a network ---------------------------------------------------------------------------------------------------


def by_hand(threads: int, **options: Any) -> Side:
    """Ask for the ranges that meshload asks for, each thread by a connection of its own, into new memory; no slice is cut out."""

    def prepare(place: str) -> Call:
        import meshload
        from meshload.reading import fragments

        asked = list(fragments(meshload.plan(servers.opened(place), into="numpy", **options)))

        own = threading.local()

        def ask(item: tuple[str, int, Any]) -> None:
            file, start, out = item
            if not hasattr(own, "connection"):
                own.connection = http.client.HTTPConnection(urlsplit(place).netloc)
            told = {"Range": f"bytes={start}-{start + len(out) - 1}"}
            own.connection.request("GET", f"{urlsplit(place).path}{file}", headers=told)
            answer, there = own.connection.getresponse(), memoryview(out)
            while there and (n := answer.readinto(there)):
                there = there[n:]
            if there or answer.status != 206:
                raise OSError(f"{file}: {answer.status}, {len(there)} bytes of {len(out)} did not come")

        def call() -> Mapping[str, Any]:
            found = {f"{file} {start:015}": np.empty(n, np.uint8) for file, start, n in asked}
            _in_threads(ask, ((file, start, found[f"{file} {start:015}"]) for file, start, _ in asked), threads)
            return found

        return call

    return prepare


# --- several processes ------------------------------------------------------------------------------------------------


def _device_mesh() -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    DTensor.from_local(torch.zeros(1), mesh, [Replicate()])  # torch imports two seconds' worth at the first one
    return mesh


def meshload_dtensors(folder: Path) -> Call:
    import meshload

    mesh = _device_mesh()
    return lambda: _local(meshload.restore(folder, mesh=mesh, into="dtensor"))


def dcp(folder: Path) -> Call:
    import torch
    import torch.distributed.checkpoint as dcp
    from checkpoint import config, shapes
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = _device_mesh()
    told = json.loads((folder / "config.json").read_text())

    def call() -> Mapping[str, Any]:
        state = {}
        for name, shape in shapes(config(told["num_hidden_layers"])).items():
            place = Replicate() if len(shape) == 1 else Shard(1 if name.endswith(ROW_PARALLEL) else 0)
            state[name] = empty(shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[place])
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        return _local(state)

    return call


def transformers(folder: Path) -> Call:
    """Time the loading of weights alone: building the model is not counted, and what is mapped lazily is touched."""
    import time

    import transformers.modeling_utils as modeling
    from transformers import AutoModelForCausalLM

    mesh = _device_mesh()
    spent = []
    own = modeling.PreTrainedModel._load_pretrained_model

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = own(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return found

    modeling.PreTrainedModel._load_pretrained_model = staticmethod(timed)

    def call() -> Mapping[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh, dtype="auto")
        begin = time.perf_counter()
        found = {n: t.clone() for n, t in _local(dict(model.named_parameters())).items()}
        call.seconds = sum(spent) + time.perf_counter() - begin  # type: ignore[attr-defined]
        return found

    return call


def _local(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (t.to_local() if hasattr(t, "to_local") else t).detach() for name, t in state.items()}


# --- JAX --------------------------------------------------------------------------------------------------------------


def _jax_mesh() -> Any:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    return jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def meshload_jax(**options: Any) -> Side:
    def prepare(folder: Path) -> Call:
        import jax

        import meshload

        mesh = _jax_mesh()
        told = options if (folder / "config.json").exists() else {"config": folder.parent, **options}
        return lambda: jax.block_until_ready(meshload.restore(folder, mesh=mesh, **told))

    return prepare


def orbax_safetensors(folder: Path) -> Call:
    import jax

    mesh = _jax_mesh()
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS)

    def call() -> Mapping[str, Any]:
        with context:
            return jax.block_until_ready(ocp.load_pytree(folder, _abstract(folder, mesh)))

    return call


def orbax(folder: Path) -> Call:
    import jax

    mesh = _jax_mesh()
    import orbax.checkpoint as ocp

    def call() -> Mapping[str, Any]:
        abstract = _abstract(folder.parent, mesh)
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(folder.absolute(), abstract))

    return call


def _abstract(folder: Path, mesh: Any) -> dict[str, Any]:
    import jax
    from checkpoint import shapes
    from jax.sharding import NamedSharding, PartitionSpec

    def spec(name: str, ndim: int) -> Any:
        return PartitionSpec() if ndim == 1 else PartitionSpec(None, "tp") if name.endswith(ROW_PARALLEL) else PartitionSpec("tp")

    of = shapes(json.loads((folder / "config.json").read_text()))
    return {
        name: jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16, sharding=NamedSharding(mesh, spec(name, len(shape))))
        for name, shape in of.items()
    }


def convert_to_orbax(folder: Path) -> None:
    """Write a copy as Orbax writes it, OCDBT and zstd, where it is not there already."""
    import jax
    import ml_dtypes
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file as load

    made = folder / ORBAX
    if not made.exists():
        mesh = _jax_mesh()
        abstract = _abstract(folder, mesh)
        arrays = {}
        for file in _files(folder):
            arrays |= {n: jax.device_put(a.view(ml_dtypes.bfloat16), abstract[n].sharding) for n, a in load(file).items()}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(made.absolute(), arrays)


# --- the questions ----------------------------------------------------------------------------------------------------

TP4 = {"mesh": "tp=4", "rank": 1}
ROWS_ALONE = {"include": [f"*{n}" for n in ROW_PARALLEL]}


def ceilings(least: int = 64, side: Callable[..., Side] = meshload, **options: Any) -> dict[str, Side]:
    mib = {"unlimited": 1 << 20, "256 MiB, the default": 256, f"{least} MiB": least}
    return {f"meshload, {name}": side(max_bytes=n << 20, **options) for name, n in mib.items()}


def shared(**options: Any) -> dict[str, Side]:
    return {f"meshload, exchange={told}": exchanging(told, **options) for told in (True, False)}


def remote(**options: Any) -> dict[str, Side]:
    return {
        "floor: 16 requests by hand": by_hand(16, **options),
        "one after another": by_hand(1, **options),
        "meshload": meshload(**options),
        "meshload, planned": engine(**options),
    }


SIDES: Mapping[str, Mapping[str, Side]] = {
    "tp4": {
        "floor: preadv": floor("preadv", 4),
        "floor: mapped copy": floor("map", 4),
        "floor: preadv, huge pages": floor("preadv", 4, empty="numpy"),
        "meshload": meshload(**TP4),
        "meshload, planned": engine(**TP4),
        "safetensors get_slice": get_slice(4),
    },
    "rows": {
        "floor: preadv": floor("preadv", 4, ROWS),
        "floor: mapped copy": floor("map", 4, ROWS),
        "meshload": meshload(**TP4, **ROWS_ALONE),
        "meshload, planned": engine(**TP4, **ROWS_ALONE),
        "safetensors get_slice": get_slice(4, ROWS),
    },
    "whole": {
        "floor: preadv": floor("preadv", 1),
        "floor: mapped copy": floor("map", 1),
        "meshload": meshload(),
        "meshload, planned": engine(),
        "safetensors load_file": load_file,
        "runai-model-streamer": runai,
        "fastsafetensors": fastsafetensors,
    },
    "tp2x2": {"meshload": meshload_dtensors, "torch DCP": dcp, "transformers": transformers},
    "jax4": {"meshload": meshload_jax(), "Orbax v1": orbax_safetensors},
    "orbax4": {"meshload": meshload_jax(), "Orbax v0": orbax},
    "again": {
        "floor: preadv": floor("preadv", 4),
        "meshload, first time": meshload(**TP4),
        "meshload, second time": meshload(**TP4, again=True),
    },
    "ceiling": ceilings(**TP4),
    "ceiling-whole": ceilings(),
    "ceiling-http": ceilings(),
    "ceiling-orbax": ceilings(128, meshload_jax),  # the largest chunk takes 94 MiB
    "dp4": shared(mesh="dp=4"),
    "dp4-http": shared(mesh="dp=4"),
    "rows4": shared(mesh="tp=4", **ROWS_ALONE),
    "rows4-http": shared(mesh="tp=4", **ROWS_ALONE),
    "http": remote(),
    "http-tp4": remote(**TP4),
    "s3": remote(),
    "threads": {f"meshload, planned, {n} at once": engine(threads=n) for n in (1, 2, 4, 8, 16, 32)},
}
PROCESSES = {"tp2x2": 2, "dp4": 4, "dp4-http": 4, "rows4": 4, "rows4-http": 4}
PARTS = {"tp2x2": 2, "rows4": 4, "rows4-http": 4}
"""How many processes' slices make up what is wanted; of others one process wants all that any does."""
CONVERTED = {"orbax4": convert_to_orbax, "ceiling-orbax": convert_to_orbax}
"""Questions about a copy in another format, in a folder beside the files."""
SERVED: Mapping[str, Callable[[Path], AbstractContextManager[str]]] = {
    **dict.fromkeys(("ceiling-http", "dp4-http", "rows4-http", "http", "http-tp4", "threads"), servers.ranges),
    "s3": servers.s3,
}
"""Questions about files in a server, which runs as long as the question is asked."""
COMPARED = ("tp4", "rows", "whole", "again", "ceiling", "ceiling-whole", "ceiling-http")
"""Questions of which all sides give the same arrays, which are compared."""


def nbytes(found: Any) -> int:
    """Return the bytes of all tensors, of the shards of this process where they are sharded."""
    return sum(_size(t) for t in found.values())


def _size(tensor: Any) -> int:
    shards: Sequence[Any] | None = getattr(tensor, "addressable_shards", None)
    if shards is not None:
        return sum(math.prod(s.data.shape) * tensor.dtype.itemsize for s in shards)
    return int(tensor.nbytes)
