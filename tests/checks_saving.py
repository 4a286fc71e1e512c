"""Checks of saving and converting by four processes that torchrun starts; `test_saving.py` runs it.

`checks_saving.py CHECKPOINT OUT` writes a JSON object per rank: check -> what went wrong. Whoever saves has restored before.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import meshload
from meshload.testing import read_safetensors, write_checkpoint


class World:
    """This process, the source, its truth, and a folder for each check."""

    def __init__(self, path: str, out: str) -> None:
        self.path, self.out = Path(path), Path(out)
        self.rank = distributed.get_rank()
        self.config = json.loads((self.path / "config.json").read_text())
        self.golden = read_safetensors(self.path / "model.safetensors")

    def compare(self, folder: Path) -> None:
        """Raise unless a checkpoint is the source, bit for bit; all ranks look."""
        found = meshload.open(folder, config=self.config).with_names("hf")
        assert set(found) == set(self.golden), sorted(set(found) ^ set(self.golden))[:5]
        for name, values in self.golden.items():
            assert np.asarray(found[name]).tobytes() == values.tobytes(), name


def saved(world: World, name: str, mesh: str, to: Any) -> None:
    tensors = meshload.restore(world.path, mesh=mesh)
    meshload.save(world.out / name, tensors, mesh=mesh, to=to, config=world.config)
    world.compare(world.out / name)


def check_tensor_parallel_slices_into_one_file(world: World) -> None:
    saved(world, "tp", "tp=4", "hf")
    assert (world.out / "tp" / "model.safetensors").stat().st_size < 2 * (world.path / "model.safetensors").stat().st_size


def check_b08_pipeline_stages_keep_their_global_layer_numbers(world: World) -> None:
    saved(world, "pp", "pp=2,tp=2", "hf")


def check_b14_a_tied_head_is_stored_once(world: World) -> None:
    tensors = meshload.restore(world.path, mesh="pp=2,tp=2")
    assert ("lm_head.weight" in tensors) == (world.rank >= 2)
    meshload.save(world.out / "tied", tensors, mesh="pp=2,tp=2", to="hf", config=world.config)
    assert "lm_head.weight" not in read_safetensors(world.out / "tied" / "model.safetensors")


def check_b70_the_ranks_of_all_stages_save_one_adapter(world: World) -> None:
    path = Path(__file__).parent / "golden" / "peft" / "llama"
    config = meshload.open(path, config=path / "base.json").config
    tensors = meshload.restore(path, mesh="pp=2,tp=2", config=config)
    meshload.save(world.out / "adapter", tensors, mesh="pp=2,tp=2", to="peft", config=config)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (world.out / "adapter" / file).read_bytes() == (path / file).read_bytes()
    assert json.loads((world.out / "adapter" / "config.json").read_text()) == json.loads((path / "base.json").read_text())


def check_replicas_write_once(world: World) -> None:
    saved(world, "dp", "dp=2,tp=2", "hf")


def check_chunks_of_orbax_are_the_slices(world: World) -> None:
    saved(world, "orbax", "pp=2,tp=2", "orbax")
    stored = meshload.open(world.out / "orbax")["model.layers.0.mlp.up_proj.weight"]
    assert len(stored.pieces) == 2


def check_shards_of_several_files(world: World) -> None:
    from meshload_adapters.formats.hf import HuggingFace

    saved(world, "shards", "tp=4", HuggingFace(max_shard_size=20_000))
    assert (world.out / "shards" / "model.safetensors.index.json").exists()


def check_dtensors_know_their_places(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors: dict[str, Any] = {}
    for i, (name, values) in enumerate(world.golden.items()):
        whole = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
        placements = [(Shard(0), Replicate()), (Shard(0), Shard(whole.ndim - 1)), (Replicate(), Replicate())][i % 3]
        tensors[name] = distribute_tensor(whole, mesh, placements)
        assert isinstance(tensors[name], DTensor)
    meshload.save(world.out / "dtensors", tensors, to="hf")
    found = read_safetensors(world.out / "dtensors" / "model.safetensors")
    for name, values in world.golden.items():
        assert found[name].tobytes() == values.tobytes(), name


def check_fsdp2_modules_save_themselves(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3, bias=False))
    expected = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    fully_shard(module, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    meshload.save(world.out / "fsdp", module, to="hf")
    found = read_safetensors(world.out / "fsdp" / "model.safetensors")
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.numpy().tobytes(), name


def check_a_layout_of_patterns_needs_no_config(world: World) -> None:
    layout = {"a": ("tp",), "b": (None, "tp"), "*": ()}
    whole = {"a": np.arange(10, dtype="i4"), "b": np.arange(24, dtype="f4").reshape(3, 8), "c": np.arange(5, dtype="f8")}
    starts = [0, 3, 6, 9, 10]
    tensors = {
        "a": torch.from_numpy(whole["a"][starts[world.rank] : starts[world.rank + 1]].copy()),
        "b": torch.from_numpy(whole["b"][:, 2 * world.rank : 2 * world.rank + 2].copy()),
        "c": torch.from_numpy(whole["c"].copy()),
    }
    meshload.save(world.out / "patterns", tensors, mesh="tp=4", layout=layout, to="hf")
    found = read_safetensors(world.out / "patterns" / "model.safetensors")
    for name, values in whole.items():
        assert found[name].tobytes() == values.tobytes(), name


def check_slices_that_are_not_the_whole_are_refused_by_all(world: World) -> None:
    tensors = meshload.restore(world.path, mesh="tp=4")
    if world.rank == 2:
        del tensors["model.layers.1.mlp.down_proj.weight"]
    _refused(world, "hole", tensors, "model.layers.1.mlp.down_proj.weight")


def check_a_slice_of_another_shape_is_named(world: World) -> None:
    tensors = meshload.restore(world.path, mesh="tp=4")
    if world.rank == 1:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    _refused(world, "shape", tensors, "model.norm.weight")


def _refused(world: World, name: str, tensors: dict[str, Any], word: str) -> None:
    try:
        with pytest.raises(meshload.MeshloadError, match=re.escape(word)):
            meshload.save(world.out / name, tensors, mesh="tp=4", to="hf", config=world.config)
    finally:
        distributed.barrier()  # also where this fails, or the others would wait for ever
    assert not (world.out / name).exists()


def check_b86_all_fail_where_one_cannot_write(world: World) -> None:
    from meshload import writing

    put = writing.FileSink.put
    if world.rank == 3:

        def full(self: Any, runs: Any) -> None:
            raise meshload.SourceError(f"{self.name}: writing failed: No space left on device")

        writing.FileSink.put = full  # type: ignore[method-assign]
    try:
        _refused(world, "full", meshload.restore(world.path, mesh="tp=4"), "No space left on device")
    finally:
        writing.FileSink.put = put  # type: ignore[method-assign]


def check_all_convert_their_share(world: World) -> None:
    meshload.convert(world.path, world.out / "converted", to="orbax", mesh="tp=4")
    world.compare(world.out / "converted")
    meshload.convert(world.out / "converted", world.out / "back", to="hf")
    world.compare(world.out / "back")


def check_an_existing_target_stops_all(world: World) -> None:
    distributed.barrier()
    with pytest.raises(meshload.MeshloadError, match="exists already"):
        meshload.convert(world.path, world.out / "tp", to="hf")
    world.compare(world.out / "tp")


def check_shared_reads_give_the_same_and_read_once(world: World) -> None:
    import meshload.exchange as exchange

    payload = sum(values.nbytes for values in world.golden.values())
    group = exchange.running()
    for source in (world.path, world.out / "converted"):
        for mesh in ("tp=4", "dp=4", "pp=2,tp=2", "dp=2,tp=2"):
            alone = meshload.restore(source, mesh=mesh, exchange=False)
            together = meshload.restore(source, mesh=mesh, exchange=True)
            assert list(alone) == list(together)
            for name, tensor in alone.items():
                assert torch.equal(tensor.view(torch.int16), together[name].view(torch.int16)), (mesh, name)
            shared = exchange.exchange_of(meshload.plan(source, mesh=mesh), group)
            rest = shared.mine.take(shared.shared.alone[shared.first : shared.first + len(shared.mine)]).nbytes
            read = shared.nbytes + sum(exchange.shared(group, rest))
            most = payload * (1 if source == world.path else 1.01)  # the last chunk of a dim may be short
            assert payload * 0.99 < read <= most, (source, mesh, read, payload)


def check_a_plan_says_what_restoring_would_do(world: World) -> None:
    for mesh, exchange, expected in (
        ("tp=4", None, (False, "a local file system")),
        ("tp=4", True, (True, "exchange=True")),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], None, (False, "mesh= has not all processes that run")),
    ):
        made = meshload.plan(world.path, mesh=mesh, exchange=exchange)
        assert (made.exchange.chosen, made.exchange.why) == expected
        assert expected[1] in str(made)


def check_a_digest_is_compared_by_all_ranks_together(world: World) -> None:
    digest = meshload.digest(world.path)
    for mesh in ("tp=4", "pp=2,tp=2", "dp=2,tp=2"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            meshload.restore(world.path, mesh=mesh, exchange=True, digest=digest)
    entry = digest.arrays["model.layers.2.mlp.down_proj.weight"]
    other = replace(entry, sum=entry.sum ^ 1)
    wrong = meshload.Digest({**digest.arrays, "model.layers.2.mlp.down_proj.weight": other})
    with pytest.raises(meshload.FormatError, match=r"layers\.2\.mlp\.down_proj"):
        meshload.restore(world.path, mesh="tp=4", exchange=True, digest=wrong)


def check_b84_plans_are_told_in_main_memory_where_tensors_go_by_nccl(world: World) -> None:
    import meshload.exchange as exchange

    told, config, everyone = [], distributed.get_backend_config, distributed.all_gather

    def noted(found: Any, mine: Any, group: Any = None) -> Any:
        told.append((distributed.get_backend(group), mine.device.type, group in (None, distributed.group.WORLD)))
        return everyone(found, mine, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_gather", noted)
        patch.setattr(distributed, "get_backend_config", lambda: "cuda:nccl")
        assert exchange.shared(exchange.running(), world.rank) == [0, 1, 2, 3]
        assert exchange.shared(exchange.running(), None) == [None] * 4
        assert distributed.get_backend_config is not config
    assert set(told) == {("gloo", "cpu", False)}  # not by the default group, which would be NCCL's
    assert not torch.cuda.is_initialized()


def check_b85_replicas_read_each_byte_once(world: World) -> None:
    import meshload.source as source

    nbytes, read_into, read_runs = 0, source.LocalFile.read_into, source.LocalFile.read_runs

    def counted(self: Any, start: int, out: Any) -> None:
        nonlocal nbytes
        nbytes += len(out)
        read_into(self, start, out)

    def counted_runs(self: Any, ranges: Any, runs: Any, buffers: Any) -> None:
        nonlocal nbytes
        nbytes += int(runs[:, 2].sum())
        read_runs(self, ranges, runs, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.LocalFile, "read_into", counted)
        patch.setattr(source.LocalFile, "read_runs", counted_runs)
        opened = meshload.open(world.path)
        header, nbytes = nbytes, 0
        tensors = meshload.restore(opened, mesh="dp=4", exchange=True)
    total = torch.tensor(nbytes)
    distributed.all_reduce(total)
    payload = sum(values.nbytes for values in world.golden.values())
    assert header < 100_000
    assert payload <= int(total) <= 1.01 * payload
    for name, values in world.golden.items():
        assert tensors[name].view(torch.uint8).numpy().tobytes() == values.tobytes()


def check_b80_all_raise_where_one_fails_and_nothing_is_published(world: World) -> None:
    import time

    import meshload.saving as saving

    tensors = meshload.restore(world.path, mesh="tp=4")
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:

            def torn(*args: Any, **options: Any) -> None:
                raise meshload.SourceError("the upload was torn")

            patch.setattr(saving, "fill", torn)
        with pytest.raises(meshload.SourceError, match="the upload was torn"):
            meshload.save(world.out / "b80", tensors, mesh="tp=4", to="orbax", config=world.config)
    assert time.monotonic() - begin < 30
    assert not (world.out / "b80").exists()


def check_the_default_device_of_tensors_is_not_used(world: World) -> None:
    """Callers who make modules on a device restore there, too."""
    with torch.device("meta"):
        found = meshload.restore(world.path, mesh="tp=4", exchange=True)
    alone = meshload.restore(world.path, mesh="tp=4", exchange=False)
    assert all(torch.equal(alone[name].view(torch.int16), found[name].view(torch.int16)) for name in alone)


def check_a_small_ceiling_takes_more_rounds(world: World) -> None:
    alone = meshload.restore(world.path, mesh="tp=4", exchange=False)
    together = meshload.restore(world.path, mesh="tp=4", exchange=True, max_bytes=1 << 14)
    assert all(torch.equal(alone[name].view(torch.int16), together[name].view(torch.int16)) for name in alone)


def check_all_fail_where_one_cannot_read(world: World) -> None:
    from meshload.source import LocalFile

    read_into = LocalFile.read_into
    if world.rank == 2:

        def torn(self: Any, start: int, out: Any) -> None:
            if len(out) < 64 or start < 10_000:
                read_into(self, start, out)
                return
            raise meshload.SourceError(f"{self.name}: the cable was pulled")

        LocalFile.read_into = torn  # type: ignore[method-assign]
    try:
        with pytest.raises(meshload.SourceError, match="the cable was pulled"):
            meshload.restore(world.path, mesh="dp=4", exchange=True)
    finally:
        LocalFile.read_into = read_into  # type: ignore[method-assign]


def check_what_one_rank_lacks_all_are_told(world: World) -> None:
    like = meshload.restore(world.path, mesh="tp=4")
    if world.rank == 1:
        like["model.not.there"] = torch.zeros(2)
    with pytest.raises((meshload.MissingArray, meshload.SourceError), match=r"model\.not\.there"):
        meshload.restore(world.path, mesh="tp=4", like=like, exchange=True)


def check_all_compare_their_share(world: World) -> None:
    import meshload.exchange as exchange
    from meshload.testing import counted

    group, payload = exchange.running(), sum(values.nbytes for values in world.golden.values())
    one, log = counted(meshload.open(world.path))
    report = meshload.verify(one, world.out / "converted", names="native")
    assert (report.problems, report.arrays, dict(report.apart)) == ((), len(world.golden), {})
    parts = exchange.shared(group, log.nbytes)
    assert sum(parts) == payload, (parts, payload)
    assert all(abs(4 * part - payload) < 0.3 * payload for part in parts), (parts, payload)


def check_all_are_told_the_differences_that_one_process_finds(world: World) -> None:
    from meshload import checking, exchange

    if world.rank == 0:
        wrong = {name: values.copy() for name, values in world.golden.items()}
        flat = wrong["model.embed_tokens.weight"].reshape(-1).view(np.uint16)
        flat[[5, 700, -3]] ^= 0x8000
        wrong["model.layers.2.mlp.up_proj.weight"][-1, -1] += 1
        wrong["model.norm.weight"][7] = np.nan
        del wrong["model.layers.1.mlp.up_proj.weight"]
        write_checkpoint(world.out / "wrong", wrong, world.config)
    distributed.barrier()
    for pair in ((world.path, world.out / "wrong"), (world.out / "wrong", world.out / "converted")):
        for options in ({}, {"max_bytes": 1 << 13}, {"rtol": 0.1, "max_bytes": 1 << 13}):
            found = meshload.verify(*pair, **options)
            running = checking.running
            checking.running = exchange.Alone  # type: ignore[assignment]
            try:
                alone = meshload.verify(*pair, **options)
            finally:
                checking.running = running
            assert (found.problems, found.arrays, found.apart) == (alone.problems, alone.arrays, alone.apart)
            assert len(found.problems) == 4
            assert exchange.shared(running(), str(found)) == [str(found)] * 4


def check_digests_of_the_shares_add_up(world: World) -> None:
    from meshload import checking

    expected = {name: zlib.crc32(values.tobytes()) for name, values in world.golden.items()}
    count, told = checking.ROUND, list[tuple[int, int]]()
    try:
        for path in (world.path, world.out / "converted"):
            for max_bytes, checking.ROUND in ((None, count), (1 << 14, 1), (1 << 14, 3)):
                told.clear()
                found = meshload.digest(path, max_bytes=max_bytes, progress=lambda *both: told.append(both))
                assert list(found.arrays) == list(meshload.open(path).with_names("hf"))
                assert {name: entry.crc32 for name, entry in found.arrays.items()} == expected
                assert not found.partial
                assert [done for done, _ in told] == sorted(done for done, _ in told)
                assert bool(told) == (world.rank == 0)
                assert not told or told[-1][0] == told[-1][1] > 0
    finally:
        checking.ROUND = count


def check_all_fail_where_one_cannot_compare(world: World) -> None:
    from meshload import checking, exchange, writing

    read, count, group = writing.read, checking.ROUND, exchange.running()
    reads = 0

    def torn(plan: Any, buffers: Any) -> None:
        nonlocal reads
        reads += 1
        if world.rank == 3 and reads == 4:
            raise meshload.SourceError("the cable was pulled")
        read(plan, buffers)

    try:
        checking.ROUND = 2
        for act in (lambda **o: meshload.verify(world.path, world.path, **o), lambda **o: meshload.digest(world.path, **o)):
            reads, writing.read = 0, torn
            with pytest.raises(meshload.SourceError, match="the cable was pulled"):
                act(max_bytes=1 << 13)
            assert exchange.shared(group, reads) == [4, 4, 4, 4]  # nobody goes on
    finally:
        writing.read, checking.ROUND = read, count


def check_processes_that_compare_something_else_are_told(world: World) -> None:
    other = world.out / "wrong" if world.rank == 1 else world.path
    for act in (lambda: meshload.verify(other, other), lambda: meshload.digest(other)):
        with pytest.raises(meshload.LayoutError, match=r"rank 0 would go through .* rank 1 through .* the same arguments"):
            act()
    limit = 1 << 30 if world.rank == 2 else 1 << 10  # what one takes whole the others cut
    with pytest.raises(meshload.LayoutError, match="rank 2 through"):
        meshload.verify(world.path, world.path, max_bytes=limit)
    with pytest.raises(meshload.MeshloadError, match="max_bytes"):
        meshload.digest(world.path, max_bytes=-1 if world.rank == 2 else None)


WHOLE = {
    "rows": np.arange(64, dtype="f4").reshape(8, 8),
    "few": np.arange(10, dtype="f4"),
    "wide": np.arange(30, dtype="f4").reshape(3, 10),
    "scalar": np.full((), 3.5, "f4"),
    "empty": np.zeros((0, 4), "f4"),
}


def _compare(folder: Path, names: dict[str, str]) -> None:
    """Raise unless a checkpoint holds exactly arrays of `WHOLE`, under the names that are given."""
    found = meshload.open(folder)
    assert sorted(found) == sorted(names)
    for name, of in names.items():
        assert np.asarray(found[name]).tobytes() == WHOLE[of].tobytes(), name


def check_uneven_and_empty_shards_are_saved(world: World) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cuts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (square, [Shard(1), Shard(0)]),
        "few": (line, [Shard(0)]),
        "wide": (square, [Shard(0), Shard(1)]),
        "scalar": (line, [Replicate()]),
        "empty": (line, [Shard(1)]),
    }
    tensors = {n: distribute_tensor(torch.from_numpy(WHOLE[n]), *cut).requires_grad_() for n, cut in cuts.items()}
    for to in ("hf", "orbax"):
        meshload.save(world.out / f"uneven_{to}", tensors, to=to)
        _compare(world.out / f"uneven_{to}", {name: name for name in WHOLE})


def check_chunks_lie_within_slices_however_uneven_unless_they_are_too_many(world: World) -> None:
    from meshload_adapters import _orbax_files

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    few = distribute_tensor(torch.from_numpy(WHOLE["few"]), square, [Shard(0), Shard(0)])  # of 10 elements 3, 2, 3, 2
    meshload.save(world.out / "nested", {"few": few}, to="orbax")
    _compare(world.out / "nested", {"few": "few"})
    limit = _orbax_files.CHUNKS
    _orbax_files.CHUNKS = 9
    try:
        with pytest.raises(meshload.LayoutError, match=r"few: several processes hold parts of one chunk.*tiny"):
            meshload.save(world.out / "tiny", {"few": few}, to="orbax")
    finally:
        _orbax_files.CHUNKS = limit
        distributed.barrier()
    assert not [path for path in world.out.iterdir() if "tiny" in path.name]


def check_strided_shards_of_several_boxes_are_saved(world: World) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, (i, j) = torch.from_numpy(WHOLE["rows"]), divmod(world.rank, 2)
    pairs = [[0, 1, 4, 5], [2, 3, 6, 7]]
    local: dict[str, tuple[torch.Tensor, list[Any]]] = {
        "inner": (whole[2 * (i + 2 * j) : 2 * (i + 2 * j) + 2], [_StridedShard(0, split_factor=2), Shard(0)]),
        "both": (whole[pairs[i]][:, pairs[j]], [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)]),
    }
    tensors = {
        name: DTensor.from_local(part.clone(), square, cut, run_check=False, shape=whole.shape, stride=whole.stride())
        for name, (part, cut) in local.items()
    }
    meshload.save(world.out / "strided", tensors, to="hf")
    _compare(world.out / "strided", {"inner": "rows", "both": "rows"})


def check_plain_slices_go_by_their_place_in_a_device_mesh(world: World) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    i, j = mesh.get_coordinate() or (0, 0)
    whole, n = torch.from_numpy(WHOLE["rows"]), 2 * (2 * i + j)
    tensors = {"tile": whole[4 * i : 4 * i + 4, 4 * j : 4 * j + 4], "column": whole[:, n : n + 2]}  # none is contiguous
    layout = {"tile": ("a", "b"), "column": (None, ("a", "b"))}
    meshload.save(world.out / "permuted", tensors, to="hf", mesh=mesh, layout=layout)
    _compare(world.out / "permuted", {"tile": "rows", "column": "rows"})


def check_slices_whose_mesh_was_forgotten_are_no_replicas(world: World) -> None:
    tensors = {"rows": torch.from_numpy(WHOLE["rows"])[2 * world.rank : 2 * world.rank + 2]}
    with pytest.raises(meshload.LayoutError, match="rows: ranks 0 and 1 hold plain tensors that differ"):
        meshload.save(world.out / "forgotten", tensors, to="hf")


def check_replicas_that_differ_are_told(world: World) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    whole = torch.from_numpy(WHOLE["rows"])
    tensors = {"rows": DTensor.from_local(whole + world.rank, line, [Replicate()], run_check=False)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        meshload.save(world.out / "differing", tensors, to="hf")
    assert [str(w.message).startswith("replicas differ") for w in told] == [True] * (world.rank == 0)
    _compare(world.out / "differing", {"rows": "rows"})


def check_processes_may_hold_nothing(world: World) -> None:
    tensors: dict[str, Any] = {} if world.rank == 3 else {"rows": torch.from_numpy(WHOLE["rows"])}
    meshload.save(world.out / "nothing", tensors, to="hf")
    _compare(world.out / "nothing", {"rows": "rows"})
    two = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    local = torch.from_numpy(WHOLE["rows"])[4 * world.rank : 4 * world.rank + 4]
    half = DTensor.from_local(local, two, [Shard(0)], run_check=False, shape=torch.Size((8, 8)), stride=(8, 1))
    meshload.save(world.out / "outside", {"rows": half}, to="hf")
    _compare(world.out / "outside", {"rows": "rows"})


def check_none_waits_for_a_process_that_was_called_wrongly(world: World) -> None:
    part = torch.from_numpy(WHOLE["rows"])[2 * world.rank : 2 * world.rank + 2]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("no tensor", {"tensors": {"rows": "text"}}),
        ("mesh", {"mesh": "tp=2"}),
        ("config", {"config": "/not/there"}),
        ("max_bytes", {"max_bytes": -1}),
    ]
    for name, given in wrong:
        right = {"tensors": {"rows": part}, "to": "hf", "mesh": "tp=4", "layout": {"*": ("tp",)}}
        with pytest.raises(meshload.MeshloadError):
            meshload.save(world.out / name, **{**right, **(given if world.rank == 2 else {})})
        assert not (world.out / name).exists()


def check_none_waits_for_a_process_that_restores_wrongly(world: World) -> None:
    for given in ({"digest": "/not/there"}, {"digest": meshload.digest(world.path)}, {"max_bytes": -1}):
        with pytest.raises(meshload.MeshloadError):
            meshload.restore(world.path, mesh="dp=4", exchange=True, **(given if world.rank == 2 else {}))


def check_processes_share_reads_under_ceilings_and_wishes_of_their_own(world: World) -> None:
    alone = meshload.restore(world.path, mesh="dp=4", exchange=False)
    together = meshload.restore(world.path, mesh="dp=4", exchange=True, max_bytes=1 << (14 + 4 * world.rank))
    assert all(torch.equal(alone[name].view(torch.int16), together[name].view(torch.int16)) for name in alone)
    names = [[], sorted(alone), sorted(alone)[::2], sorted(alone)[::3]][world.rank]
    like = {name: torch.empty_like(alone[name]) for name in names}
    found = meshload.restore(world.path, like=like, into="torch", exchange=True)
    assert sorted(found) == names
    assert all(torch.equal(alone[name].view(torch.int16), found[name].view(torch.int16)) for name in names)


def main(path: str, out: str) -> None:
    distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")
    world = World(path, out)
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    wrong = {}
    for name, check in checks.items():
        try:
            check(world)
            wrong[name] = ""
        except (Exception, pytest.fail.Exception):  # what `pytest.raises` says is no Exception
            wrong[name] = traceback.format_exc()[-3000:]
    (Path(out) / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
