"""Restore the slices of one rank, or of all ranks one after another, and show what each holds.

    python examples/restore_torch.py PATH --mesh tp=2                                   # every rank in turn, in one process
    torchrun --nproc-per-node 2 examples/restore_torch.py PATH --mesh tp=2              # each process its own rank

Without PATH it makes a tiny Qwen2 checkpoint with transformers, and restores that.
"""

import argparse
import os
import pathlib
import tempfile

import meshload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="a checkpoint; made by the example where it is left out")
    parser.add_argument("--mesh", default="tp=2", help="sizes of named axes, outermost first, as in pp=2,tp=4")
    parser.add_argument("--rank", type=int, help="one rank only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.path or make_checkpoint(pathlib.Path(folder))
        launched = "RANK" in os.environ  # torchrun says who this process is, and restore takes it from there
        ranks = [int(os.environ["RANK"])] if launched else ranks_of(path, arguments.mesh)
        for rank in ranks if arguments.rank is None else [arguments.rank]:
            show(rank, meshload.restore(path, mesh=arguments.mesh, rank=None if launched else rank))


def ranks_of(path: object, mesh: str) -> list[int]:
    """Return all ranks of a mesh, from a plan: nothing is read for it."""
    return sorted(meshload.plan(path, mesh=mesh, rank="all").each())


def show(rank: int, tensors: dict) -> None:
    nbytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors.values()}.values())
    lines = [f"rank {rank}: {len(tensors)} tensors, {nbytes} bytes"]
    lines += [f"  {name:55} {tensor.dtype!s:15} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    print("\n".join(lines), flush=True)


def make_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """Save a tiny model as `save_pretrained` does: its embeddings are tied, and its vocabulary divides by nothing."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 131}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
