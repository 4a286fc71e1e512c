"""Convert a Hugging Face checkpoint to Orbax and back, and prove that nothing was lost on the way.

    python examples/convert.py PATH OUT --mesh tp=4
    torchrun --nproc-per-node 4 examples/convert.py PATH OUT --mesh tp=4                # each process takes its share

Without PATH and OUT it makes a tiny checkpoint, in a temporary folder.
"""

import argparse
import os
import pathlib
import tempfile

import meshload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="a checkpoint of any format; made by the example where it is left out")
    parser.add_argument("out", nargs="?", help="a folder for both results")
    parser.add_argument(
        "--mesh", default="tp=4", help="the mesh that will read the Orbax checkpoint: its chunks are that mesh's slices"
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun started several processes; they need a group to act together
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(arguments.path) if arguments.path else make_checkpoint(pathlib.Path(folder) / "source")
        convert(path, pathlib.Path(arguments.out or folder), arguments.mesh)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()  # else gloo's threads may abort the process as it ends


def convert(path: pathlib.Path, out: pathlib.Path, mesh: str) -> None:
    meshload.convert(path, out / "orbax", to="orbax", mesh=mesh)
    meshload.convert(out / "orbax", out / "hf", to="hf")
    report = meshload.verify(path, out / "hf")  # each process compares its share, and all are told the same
    same = meshload.digest(path) == meshload.digest(out / "orbax")
    if os.environ.get("RANK", "0") == "0":
        print(f"{report.arrays} arrays there and back, {'the same' if report.ok else report.problems}")
        print(f"digests equal: {same}")


def make_checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """Save a tiny model as `save_pretrained` does."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 131}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
