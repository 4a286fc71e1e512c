"""Save what every rank of a tensor-parallel run holds as one Hugging Face checkpoint: no gather, no merge afterwards.

    torchrun --nproc-per-node 4 examples/save_from_ranks.py [OUT]

Each process holds a quarter of the weights, and writes it at its final place in the final file.
"""

import pathlib
import sys

import torch
import torch.distributed as dist

import meshload

LAYOUT = {"*.up.weight": ("tp",), "*.down.weight": (None, "tp"), "*": ()}


def main() -> None:
    dist.init_process_group("gloo")
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "saved")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = model()
    mine = {
        "layer.up.weight": whole["layer.up.weight"].chunk(size, 0)[rank].clone(),
        "layer.down.weight": whole["layer.down.weight"].chunk(size, 1)[rank].clone(),
        "layer.norm.weight": whole["layer.norm.weight"],  # every rank has it; one writes it
    }
    meshload.save(out, mine, mesh=f"tp={size}", layout=LAYOUT, to="hf")
    if rank == 0:
        found = meshload.restore(out)
        print(f"{len(found)} tensors, the same: {all(torch.equal(found[name], tensor) for name, tensor in whole.items())}")
    dist.destroy_process_group()  # else gloo's threads may abort the process as it ends


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"layer.up.weight": (48, 32), "layer.down.weight": (32, 48), "layer.norm.weight": (32,)}
    return {name: torch.randn(shape) for name, shape in sizes.items()}


if __name__ == "__main__":
    main()
