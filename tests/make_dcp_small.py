"""Small checkpoints of torch.distributed.checkpoint, written by torch itself on four gloo ranks of one CPU, with the truth beside.

Kept in `tests/golden/dcp/` from torch 2.13.0. Usage: `python tests/make_dcp_small.py FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(6, 10, bias=False)
        self.wo = nn.Linear(10, 6)
        self.norm = nn.RMSNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wo(self.wq(self.norm(x)))


class Tiny(nn.Module):
    """A model whose dims divide by nothing: 13 tokens, 6 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([Block()])
        self.output = nn.Linear(6, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def trained(model: nn.Module, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's and its optimizer's state after two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(2):
        tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(i))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_state_dict(model, optimizer, options=StateDictOptions(**options))


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def fsdp1(folder: Path) -> dict[str, Any]:
    """The older wrapper, whose tensors are ShardedTensors; everything nested."""
    model = FullyShardedDataParallel(
        tiny(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    weights, optim = trained(model)
    state = {"model": weights, "optim": optim, "epoch": 3}
    dcp.save(state, checkpoint_id=folder)
    return state


def hsdp(folder: Path) -> dict[str, Any]:
    """Replicated twice, cut in two: each chunk is written once, by either replica; two writer threads."""
    model = tiny()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights, optim = trained(model)
    state = {"model": weights, "optim": optim}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2))
    return state


def titan(folder: Path) -> dict[str, Any]:
    """What torchtitan writes: tensor parallel under FSDP2 (strided shards), model keys at the top, the rest beside, async."""
    model = tiny()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"tok_embeddings": ColwiseParallel(), "layers.0.wq": ColwiseParallel(), "layers.0.wo": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # the embedding's output is cut in its last dim: gather it, as torchtitan's plans do
    model.tok_embeddings.register_forward_hook(lambda module, args, out: gathered(out, mesh["tp"]))
    weights, optim = trained(model, flatten_optimizer_state_dict=True)
    state = {
        **weights,
        "optimizer": optim,
        "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]},
        "dataloader": {"dp_rank_0": b"\x80\x04cos\nsystem\n.", "world_size": 2},
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "losses": [0.5, 0.25]},
    }
    dcp.async_save(state, checkpoint_id=folder).result()
    return state


def gathered(local: torch.Tensor, mesh: Any) -> torch.Tensor:
    found = local if isinstance(local, DTensor) else DTensor.from_local(local, mesh, [Shard(local.ndim - 1)])
    return found.full_tensor()


def strided(folder: Path) -> dict[str, Any]:
    """One dim cut by two mesh axes, in either order. (A placement that leaves a rank two runs, torch 2.13 refuses to save.)"""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at = dist.get_rank()
    dp, tp = at // 2, at % 2
    first = 4 * tp + 2 * dp
    fsdp_tp = DTensor.from_local(
        torch.arange(first, first + 2, dtype=torch.float32), mesh, (_StridedShard(0, split_factor=2), Shard(0))
    )
    rows = torch.arange(24, dtype=torch.int64).reshape(8, 3)
    outer = DTensor.from_local(rows[2 * at : 2 * at + 2].clone(), mesh, (Shard(0), Shard(0)))
    state = {"fsdp_tp": fsdp_tp, "outer": outer}
    dcp.save(state, checkpoint_id=folder)
    return state


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {"fsdp1": fsdp1, "hsdp": hsdp, "titan": titan, "strided": strided}


def flat(found: Any, path: str, out: dict[str, torch.Tensor]) -> None:
    if isinstance(found, dict):
        for key, value in found.items():
            flat(value, f"{path}.{key}" if path else str(key), out)
    elif isinstance(found, DTensor):
        out[path] = found.full_tensor().contiguous().clone()
    elif isinstance(found, ShardedTensor):
        whole = torch.zeros(found.size(), dtype=found.dtype)
        found.gather(0, whole if dist.get_rank() == 0 else None)
        out[path] = whole
    elif isinstance(found, torch.Tensor):
        out[path] = found.contiguous().clone()


def rank_main(rank: int, name: str, store: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    state = CASES[name](out / "checkpoint")
    truth: dict[str, torch.Tensor] = {}
    flat(state, "", truth)
    if rank == 0:
        save_file(truth, out / "golden.safetensors", {"torch": torch.__version__})
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    for name in names or CASES:
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as temporary:
            mp.spawn(rank_main, (name, f"{temporary}/store", out), nprocs=RANKS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
