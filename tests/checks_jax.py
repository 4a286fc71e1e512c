"""Checks of JAX on eight pretended devices, or on two processes of two; `test_frameworks.py` runs them in processes of their own.

`checks_jax.py CHECKPOINT GOLDEN` prints a JSON object: check -> what went wrong. With `PORT PROCESS` it is one of two processes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    import jax

    return jax.sharding.Mesh(np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def wrong(found: dict[str, Any], golden: dict[str, Any]) -> Iterator[str]:
    """Go through the arrays of which some device's part is not NumPy's slice of the truth."""
    for name, array in found.items():
        for shard in array.addressable_shards:
            expected = np.ascontiguousarray(golden[name][shard.index])
            here = np.asarray(shard.data)
            if (here.shape, here.dtype, here.tobytes()) != (expected.shape, expected.dtype, expected.tobytes()):
                yield f"{name} on {shard.device}"


def no_vocabulary() -> Any:
    """Return a layout for a vocabulary that does not divide."""
    import meshload

    return meshload.Layout({"layer": "pp", "heads": "tp", "ffn": "tp"})


def check_each_device_holds_numpys_slice(path: str, golden: dict[str, Any]) -> None:
    import meshload

    mesh = mesh_of((2, 2, 2), ("pp", "tp", "dp"))
    found = meshload.restore(path, mesh=mesh, layout=no_vocabulary())
    assert set(found) == set(golden)
    assert list(wrong(found, golden)) == []
    assert found["model.layers.0.self_attn.q_proj.weight"].sharding.shard_shape((32, 32)) == (16, 32)
    assert found["model.layers.0.self_attn.o_proj.weight"].sharding.shard_shape((32, 32)) == (32, 16)


def check_a_stage_is_on_its_own_devices(path: str, golden: dict[str, Any]) -> None:
    import meshload

    mesh = mesh_of((2, 2, 2), ("pp", "tp", "dp"))
    found = meshload.restore(path, mesh=mesh, layout=no_vocabulary())
    for name, stage in {"model.embed_tokens.weight": 0, "model.layers.0.mlp.up_proj.weight": 0, "model.norm.weight": 1}.items():
        assert found[name].devices() == set(mesh.devices[stage].flat), name
        assert found[name].sharding.mesh.axis_names == ("tp", "dp")


def check_a_stage_of_one_device(path: str, golden: dict[str, Any]) -> None:
    import meshload

    mesh = mesh_of((2,), ("pp",))
    found = meshload.restore(path, mesh=mesh)
    assert found["model.norm.weight"].devices() == {mesh.devices[1]}
    assert list(wrong(found, golden)) == []


def check_rows_cut_like_fsdp(path: str, golden: dict[str, Any]) -> None:
    import meshload

    layout = meshload.Layout({"heads": "tp", "ffn": "tp", "embed": "fsdp"})
    found = meshload.restore(path, mesh=mesh_of((4, 2), ("fsdp", "tp")), layout=layout)
    assert found["model.layers.0.mlp.down_proj.weight"].sharding.shard_shape((32, 48)) == (8, 24)
    assert list(wrong(found, golden)) == []


def check_patterns_of_names_and_the_order_of_axes(path: str, golden: dict[str, Any]) -> None:
    import jax

    import meshload

    mesh = mesh_of((2, 4), ("a", "b"))
    layout = {"*.q_proj.weight": (("b", "a"),), "*.up_proj.weight": (("a", "b"), None), "*.down_proj.weight": ("b", "a"), "*": ()}
    found = meshload.restore(path, mesh=mesh, layout=layout)
    assert found["model.layers.1.self_attn.q_proj.weight"].sharding.spec == jax.sharding.PartitionSpec(("b", "a"), None)
    assert list(wrong(found, golden)) == []


def check_replicas_share_memory(path: str, golden: dict[str, Any]) -> None:
    import meshload

    found = meshload.restore(path, mesh=mesh_of((8,), ("x",)), layout="replicated")["model.norm.weight"]
    assert len({shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards}) == 1


def check_kinds_of_axes_stay(path: str, golden: dict[str, Any]) -> None:
    import jax

    import meshload

    mesh = jax.make_mesh((2, 4), ("pp", "tp"), axis_types=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
    found = meshload.restore(path, mesh=mesh, layout=meshload.Layout({"layer": "pp", "ffn": "tp"}))
    assert found["model.norm.weight"].sharding.mesh.axis_types == (jax.sharding.AxisType.Explicit,)


def check_arrays_work_in_jit(path: str, golden: dict[str, Any]) -> None:
    import jax

    import meshload

    found = meshload.restore(path, mesh=mesh_of((2, 4), ("tp", "dp")), layout=no_stage())
    up, down = (found[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("up", "down"))
    made = jax.jit(lambda a, b: b @ a)(up, down)
    wide = [golden[f"model.layers.0.mlp.{n}_proj.weight"].astype(np.float32) for n in ("down", "up")]
    np.testing.assert_allclose(np.asarray(made, np.float32), wide[0] @ wide[1], rtol=0.02, atol=1e-3)


def no_stage() -> Any:
    import meshload

    return meshload.Layout({"heads": "tp", "ffn": "tp"})


def check_a_pytree_of_shapes_keeps_its_shardings(path: str, golden: dict[str, Any]) -> None:
    import jax

    import meshload

    a, b = mesh_of((2, 2), ("x", "y")), mesh_of((8,), ("z",))
    spec = jax.sharding.PartitionSpec
    norm, up, q = (f"model.layers.0.{n}.weight" for n in ("input_layernorm", "mlp.up_proj", "self_attn.q_proj"))
    shardings = {
        norm: None,
        up: jax.sharding.NamedSharding(a, spec(("y", "x"), None)),
        q: jax.sharding.NamedSharding(b, spec(None, "z")),
    }
    like = {name: jax.ShapeDtypeStruct(golden[name].shape, golden[name].dtype, sharding=s) for name, s in shardings.items()}
    found = meshload.restore(path, like=like, exclude=[n for n in golden if n not in like])
    assert list(wrong(found, golden)) == []
    assert all(found[n].sharding == s for n, s in shardings.items() if s is not None)


def check_a_cut_that_does_not_fit_is_refused(path: str, golden: dict[str, Any]) -> None:
    import jax

    import meshload

    with pytest.raises(meshload.LayoutError, match=r"97 elements.* 2 equal parts"):
        meshload.restore(path, mesh=mesh_of((2,), ("tp",)))
    sharding = jax.sharding.NamedSharding(mesh_of((2,), ("tp",)), jax.sharding.PartitionSpec("tp"))
    like = {"lm_head.weight": jax.ShapeDtypeStruct((97, 32), np.float32, sharding=sharding)}
    with pytest.raises(meshload.LayoutError, match=r"^lm_head.weight"):
        meshload.restore(path, like=like)


def check_a_padded_vocabulary_is_cut(path: str, golden: dict[str, Any]) -> None:
    import meshload

    layout = meshload.Layout.default(pad={"vocab": 2})
    found = meshload.restore(path, mesh=mesh_of((2,), ("tp",)), layout=layout)["lm_head.weight"]
    assert found.shape == (98, 32)
    assert np.asarray(found)[:97].tobytes() == golden["lm_head.weight"].tobytes()
    assert not np.asarray(found)[97:].any()


def check_one_rank_of_many_devices_is_refused(path: str, golden: dict[str, Any]) -> None:
    import meshload

    with pytest.raises(meshload.LayoutError, match="all 2 devices"):
        meshload.restore(path, mesh=mesh_of((2,), ("x",)), layout="replicated", rank=1)


def in_two_processes(path: str, golden: dict[str, Any], port: int, process: int) -> None:
    import jax

    import meshload

    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2), ("pp", "tp"))
    found = meshload.restore(path, mesh=mesh, layout=no_vocabulary())
    assert ("model.embed_tokens.weight" in found) == (process == 0)
    assert list(wrong(found, golden)) == []
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(4), ("tp",))
    found = meshload.restore(path, mesh=mesh, layout={"*.up_proj.weight": ("tp",), "*": ()})
    up = found["model.layers.0.mlp.up_proj.weight"]
    assert len(up.addressable_shards) == 2
    assert up.shape == (48, 32)
    assert list(wrong(found, golden)) == []
    for layout in ("replicated", {"*.up_proj.weight": (None, "tp"), "*.down_proj.weight": (("tp",),), "*": ()}):
        shared = meshload.restore(path, mesh=mesh, layout=layout, exchange=True, max_bytes=1 << 14)
        assert list(wrong(shared, golden)) == []
    plain = meshload.restore(path, mesh="tp=2", into="jax", layout={"*.up_proj.weight": ("tp",), "*": ()})
    assert plain["model.layers.0.mlp.up_proj.weight"].shape == (24, 32)
    total = jax.jit(lambda x: x.astype("float32").sum())(up)
    np.testing.assert_allclose(float(total), golden["model.layers.0.mlp.up_proj.weight"].astype(np.float32).sum(), rtol=1e-3)


def main(path: str, truth: str, *process: str) -> None:
    count = 2 if process else 8
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    from meshload.testing import read_safetensors

    golden = read_safetensors(Path(truth))
    if process:
        return in_two_processes(path, golden, *map(int, process))
    told = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(path, golden)
                told[name] = ""
            except Exception:
                told[name] = traceback.format_exc()
    print(json.dumps(told))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
