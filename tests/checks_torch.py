"""Checks of one process of eight that torchrun starts; `test_distributed.py` runs it.

`checks_torch.py CHECKPOINT OUT` writes a JSON object per rank: check -> what went wrong. The truth is cut by hand, with NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshload
from meshload.testing import read_safetensors

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, FFN = 3, 8, 2, 4, 131, 48


class World:
    """This process, the truth, and the mesh of all eight."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rank = distributed.get_rank()
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "tp", "dp"))
        self.pp, self.tp, self.dp = self.mesh.get_coordinate()
        self.golden = read_safetensors(Path(path) / "model.safetensors")
        self.golden["lm_head.weight"] = self.golden["model.embed_tokens.weight"]

    def stage(self, name: str) -> bool:
        """Say whether this one of two stages holds an array: layers 0, 1 and 2 are on stages 0, 0 and 1."""
        if ".layers." in name:
            return self.pp == (0, 0, 1)[int(name.split(".")[2])]
        return self.pp == ("embed_tokens" not in name)

    def slice(self, name: str, tp: int, at: int) -> np.ndarray[Any, Any]:
        """Cut the truth by hand: rank `at` of `tp`."""
        full = self.golden[name]
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            if "q_proj" in name:
                rows = HEADS // tp * HEAD_DIM
                return full[at * rows : (at + 1) * rows]
            if tp >= KV_HEADS:
                head = at * KV_HEADS // tp
                return full[head * HEAD_DIM : (head + 1) * HEAD_DIM]
            rows = KV_HEADS // tp * HEAD_DIM
            return full[at * rows : (at + 1) * rows]
        if "o_proj" in name:
            columns = HEADS // tp * HEAD_DIM
            return full[:, at * columns : (at + 1) * columns]
        if "gate_proj" in name or "up_proj" in name:
            return full[at * FFN // tp : (at + 1) * FFN // tp]
        if "down_proj" in name:
            return full[:, at * FFN // tp : (at + 1) * FFN // tp]
        if "embed_tokens" in name or "lm_head" in name:
            rows = -(-VOCAB // tp)
            return full[at * rows : (at + 1) * rows]
        return full  # norms

    def check(self, found: dict[str, Any], expected: dict[str, np.ndarray[Any, Any]]) -> None:
        assert set(found) == set(expected), set(found) ^ set(expected)
        different = [n for n, t in found.items() if t.shape != expected[n].shape or t.numpy().tobytes() != expected[n].tobytes()]
        assert different == []


def check_sizes(world: World) -> None:
    found = meshload.restore(world.path, mesh="pp=2,tp=2,dp=2")
    world.check(found, {n: world.slice(n, 2, world.tp) for n in world.golden if world.stage(n)})


def check_a_device_mesh(world: World) -> None:
    found = meshload.restore(world.path, mesh=world.mesh)
    world.check(found, {n: world.slice(n, 2, world.tp) for n in world.golden if world.stage(n)})


def check_names(world: World) -> None:
    """All eight are one node: tp = 8, so two kv heads are on four ranks each, and the vocabulary is 7 x 17 + 12."""
    found = meshload.restore(world.path, mesh=("pp", "tp", "dp"))
    world.check(found, {n: world.slice(n, 8, world.rank) for n in world.golden})
    assert found["lm_head.weight"].shape[0] == (12 if world.rank == 7 else 17)


def check_sizes_that_do_not_fill_the_world_are_refused(world: World) -> None:
    try:
        meshload.restore(world.path, mesh="tp=2")
    except meshload.LayoutError as error:
        told = str(error)
    assert "2 ranks, 8 processes" in told


def check_tensor_parallel_norms_are_whole_and_counted_once(world: World) -> None:
    """Both ranks have all of a norm, also where each norms its half of the sequence; a sum over ranks counts it once."""
    mesh = world.mesh["tp"]
    found = meshload.restore(world.path, mesh=mesh)
    name = "model.layers.1.input_layernorm.weight"
    world.check(found, {n: world.slice(n, 2, world.tp) for n in world.golden})
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32))
    norm, whole = torch.nn.RMSNorm(32), torch.nn.RMSNorm(32)
    norm.weight.data, whole.weight.data = found[name], torch.from_numpy(world.golden[name])
    half = slice(world.tp * 3, world.tp * 3 + 3)
    assert torch.equal(norm(x[half]), whole(x)[half])

    total = torch.zeros((), dtype=torch.float64)
    for n, tensor in meshload.restore(world.path, mesh=mesh, into="dtensor", exclude="lm_head.weight").items():
        copies = 2 if tensor.placements[0].is_replicate() else 1
        assert (copies == 2) == ("norm" in n), n
        total += tensor.to_local().double().square().sum() / copies
    distributed.all_reduce(total, group=mesh.get_group())
    expected = sum(np.square(a, dtype=np.float64).sum() for n, a in world.golden.items() if n != "lm_head.weight")
    np.testing.assert_allclose(total.item(), expected, rtol=1e-12)


def check_a_tied_embedding_is_on_the_first_and_the_last_stage(world: World) -> None:
    found = meshload.restore(world.path, mesh=world.mesh["pp"])
    world.check(found, {n: a for n, a in world.golden.items() if world.stage(n)})
    assert ("model.embed_tokens.weight" in found) == (world.pp == 0)
    assert ("lm_head.weight" in found) == (world.pp == 1)
    made = meshload.plan(world.path, mesh=world.mesh["pp"])
    assert made.read_bytes <= made.wanted_bytes + 8192


def check_data_parallel_ranks_have_all(world: World) -> None:
    world.check(meshload.restore(world.path, mesh=world.mesh["dp"]), world.golden)


def check_data_parallel_ranks_cut_rows_by_ceil(world: World) -> None:
    layout = meshload.Layout.default(dp="cut")
    found = meshload.restore(world.path, mesh=world.mesh["tp", "dp"], layout=layout)
    expected = {}
    for name in world.golden:
        local = world.slice(name, 2, world.tp)
        rows = -(-len(local) // 2)
        expected[name] = np.ascontiguousarray(local[world.dp * rows : (world.dp + 1) * rows])
    world.check(found, expected)


def check_dtensors_gather_to_the_truth(world: World) -> None:
    found = meshload.restore(world.path, mesh=world.mesh, into="dtensor")
    assert {n for n in world.golden if world.stage(n)} == set(found)
    for name, tensor in found.items():
        assert tensor.device_mesh.mesh_dim_names == ("tp", "dp")
        assert torch.equal(tensor.full_tensor(), torch.from_numpy(world.golden[name])), name


def check_dtensors_of_rows_cut_under_tensor_parallelism(world: World) -> None:
    """`dp` stands before `tp` in the mesh and cuts after it, as FSDP2 over tensor parallelism does."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    layout = meshload.Layout({"heads": "tp", "ffn": "tp"}, rows="dp")
    for name, tensor in meshload.restore(world.path, mesh=mesh, into="dtensor", layout=layout).items():
        assert torch.equal(tensor.full_tensor(), torch.from_numpy(world.golden[name])), name


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(32, FFN, bias=False)
        self.up_proj = torch.nn.Linear(32, FFN, bias=False)
        self.down_proj = torch.nn.Linear(FFN, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(32)
        self.mlp = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.input_layernorm(x))


class Model(torch.nn.Module):
    """The MLPs of the model, and its embedding with rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCAB, 32)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def wrapped() -> torch.nn.Module:
    made = torch.nn.Module()
    made.model = Model()
    return made


def _check_fsdp(world: World, mesh: DeviceMesh, *, tensor_parallel: bool, on_meta: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with torch.device("meta" if on_meta else "cpu"):
        module = wrapped()
    for layer in module.model.layers:
        if tensor_parallel:
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(layer.mlp, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module.model, mesh=mesh["dp"])
    exclude = ["*self_attn*", "*post_attention*", "lm_head*"]
    found = meshload.restore(world.path, like=module, exclude=exclude)
    assert found is module
    for name, parameter in module.named_parameters():
        whole = torch.from_numpy(world.golden[name])
        assert parameter.requires_grad
        if not tensor_parallel:
            rows = -(-len(whole) // mesh["dp"].size())
            at = mesh["dp"].get_local_rank()
            assert torch.equal(parameter.to_local(), whole[at * rows : (at + 1) * rows]), name
        assert torch.equal(parameter.full_tensor(), whole), name
    plain = wrapped()
    plain.load_state_dict({n: torch.from_numpy(world.golden[n]) for n in plain.state_dict()})
    ids = torch.arange(10) * 13
    torch.testing.assert_close(module.model(ids), plain.model(ids), rtol=1e-5, atol=1e-5)
    module.model(ids).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def check_fsdp_on_meta(world: World) -> None:
    _check_fsdp(world, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)), tensor_parallel=False, on_meta=True)


def check_fsdp_with_values(world: World) -> None:
    _check_fsdp(world, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)), tensor_parallel=False, on_meta=False)


def check_fsdp_over_tensor_parallelism(world: World) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    _check_fsdp(world, mesh, tensor_parallel=True, on_meta=True)


def main(path: str, out: str) -> None:
    warnings.simplefilter("error", meshload.MeshloadWarning)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    world, told = World(path), {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(world)
                distributed.barrier()
                told[name] = ""
            except Exception:
                told[name] = traceback.format_exc()
                break  # others wait for this process in vain, so all end here
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    if all(problem == "" for problem in told.values()):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
