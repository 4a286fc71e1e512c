"""Restore a checkpoint of Hugging Face, torch, DCP, DeepSpeed or Megatron with plain orbax.checkpoint, without converting it.

    python examples/orbax_without_converting.py PATH INDEX

INDEX becomes a folder of a few kilobytes and of links to PATH's files; without it, the index lies beside those files. What follows
is Orbax alone: any of its checkpointers, any sharding. To try several devices without accelerators:
XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu.
"""

import argparse

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import meshload


def target(array: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Say where an array goes: cut along its first dim where that divides, else whole on every device."""
    divides = array.shape and array.shape[0] % mesh.size == 0
    spec = PartitionSpec("devices") if divides else PartitionSpec()
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("index", nargs="?")
    arguments = parser.parse_args()

    index = meshload.index(arguments.path, arguments.index)
    print(f"{len(index.arrays)} arrays of {index.shown_bytes} bytes are shown by {index.nbytes} bytes")
    for name, why in index.left_out.items():
        print(f"left out: {name}: {why}")

    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(index.path).item_metadata.tree  # nested dicts: names, cut at their dots
        params = checkpointer.restore(index.path, jax.tree.map(lambda array: target(array, mesh), tree))

    for path, array in jax.tree_util.tree_leaves_with_path(params)[:5]:
        print(jax.tree_util.keystr(path, simple=True, separator="."), array.shape, array.sharding.spec)


if __name__ == "__main__":
    main()
