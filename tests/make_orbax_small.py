"""Write small Orbax checkpoints of many kinds, each with the truth beside it: `python make_orbax_small.py FOLDER`.

The truth is `{case}.json`: stored key -> dtype name, shape and bytes in base64. The process has 8 CPU devices.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "bfloat16", "int4"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


def main(out: Path) -> None:
    import jax
    import ml_dtypes
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from jax import numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from orbax.checkpoint.experimental import v1

    jax.config.update("jax_enable_x64", True)

    def ramp(*shape: int, dtype: str = "float32") -> Any:
        return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)

    def truth(case: str, tree: Any) -> None:
        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, str):
                continue
            name = ".".join(str(ocp.utils.tuple_path_from_keypath((key,))[0]) for key in path)
            is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            host = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            found[name] = [host.dtype.name, list(host.shape), base64.b64encode(host.tobytes()).decode()]
        (out / f"{case}.json").write_text(json.dumps(found))

    def standard(case: str, tree: Any, folder: str | None = None) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(out / (folder or case), tree)
        truth(case, tree)

    def pytree(case: str, tree: Any, save_args: Any = None, **options: Any) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(out / case, args=ocp.args.PyTreeSave(tree, save_args=save_args))
        truth(case, tree)

    kinds = {"ocdbt2": {}, "ocdbt3": {"use_zarr3": True}, "files2": {"use_ocdbt": False}}
    kinds["files3"] = {"use_ocdbt": False, "use_zarr3": True}

    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    by_model = NamedSharding(mesh, PartitionSpec(None, "model"))
    sharded = {
        "params": {"w": jax.device_put(ramp(3, 16), by_model), "b": jax.device_put(ramp(16), NamedSharding(mesh, PartitionSpec()))}
    }
    for kind, options in kinds.items():
        pytree(f"sharded_{kind}", sharded, **options)
        host = {d: (ramp(2, 3) % 2).astype(getattr(ml_dtypes, d, d)) for d in DTYPES}
        device = {d: jnp.asarray(a) for d, a in host.items()}
        scalars = {d: a[1, 0] for d, a in device.items()}
        pytree(f"dtypes_{kind}", {"host": host, "device": device, "scalars": scalars}, **options)
        odd = {
            "a.b": ramp(2), "a": {"c": ramp(3)}, "x/y": ramp(4), "sp ace": ramp(2), "uni ü%": ramp(3), "it's": ramp(2),
            "list": [ramp(1), {"z": ramp(2)}], "tuple": (ramp(1), ramp(2)), "digits": {"0": ramp(5), "1": ramp(6)},
            "e": {}, "n": None, "l": [], "t": (), "state": optax.EmptyState(), "nest": {"x": [(), {}]},
            "word": "hello", "number": 3, "back\\slash": ramp(2), "line\n": ramp(2),
        }  # fmt: skip
        pytree(f"odd_{kind}", odd, **options)
        same_shape = {"a.b": ramp(2), "a": {"b": ramp(2) + 5}}
        pytree(f"meet_{kind}", same_shape, **options)
    chunked = {"w": jnp.asarray(ramp(16, 16)), "v": jnp.asarray(ramp(7, 5))}
    small = {"w": ocp.SaveArgs(chunk_byte_size=256), "v": ocp.SaveArgs()}
    pytree("chunks2", chunked, small)
    pytree("chunks3", chunked, small, use_zarr3=True)
    standard("keys", {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(1), 3), "old": jax.random.PRNGKey(0)})

    params = {"a": jnp.asarray(ramp(2, 3)), "b": {"k": jnp.asarray(ramp(2))}}
    adam, momentum = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)
    optimizers = {
        "adam": adam,
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 10))),
        "momentum": momentum,
        "amsgrad": optax.amsgrad(1e-3),
        "labels": optax.multi_transform({"x": adam, "y": momentum}, {"a": "x", "b": {"k": "y"}}),
        "masked": optax.masked(adam, {"a": True, "b": {"k": False}}),
        "steps": optax.MultiSteps(adam, 4),
        "hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        "finite": optax.apply_if_finite(adam, 3),
        "adafactor": optax.adafactor(1e-3),
        "twice": optax.chain(optax.scale_by_adam(), optax.scale_by_adam()),
    }
    for name, optimizer in optimizers.items():
        state = jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), optimizer.init(params))
        standard(f"optax_{name}", {"step": jnp.int32(7), "params": params, "opt_state": state})
    standard("optax_other_name", {"model": params, "tx": adam.init(params)})
    standard("optax_averaged", {"params": params, "ema_params": params, "opt_state": adam.init(params)})
    standard("optax_ambiguous", {"one": params, "two": params, "opt_state": adam.init(params)})

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(3, rngs=rngs)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    standard("nnx", {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    standard("nnx_bare", nnx.state(model))

    layers = [{"w": ramp(2, 2) + i} for i in range(2)]
    standard("b74", {"list": {"layers": layers}, "named": {f"layers_{i}": x for i, x in enumerate(layers)},
                     "scanned": {"layers": {"w": np.stack([x["w"] for x in layers], 1)}}})  # fmt: skip

    def manager(case: str, steps: list[int], **options: Any) -> None:
        with ocp.CheckpointManager(out / case, options=ocp.CheckpointManagerOptions(**options)) as saving:
            for step in steps:
                tree = {"w": jnp.full(3, step, "float32")}
                args = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave({"step": step}))
                saving.save(step, args=args, metrics={"loss": 1 / step})
            saving.wait_until_finished()
        truth(case, tree)

    manager("manager", [1, 2, 10])
    manager("manager_prefix", [9, 10], step_prefix="ckpt")
    manager("manager_padded", [9, 10], step_prefix="ckpt", step_format_fixed_length=6)
    with ocp.CheckpointManager(out / "manager_items") as saving:
        tree = {"w": jnp.asarray(ramp(3))}
        saving.save(3, args=ocp.args.Composite(params=ocp.args.StandardSave(tree), other=ocp.args.PyTreeSave({"m": tree})))
        saving.wait_until_finished()
    for step in (5, 30):
        standard("flax_steps", {"w": jnp.full(3, step, "float32")}, f"flax_steps/checkpoint_{step}")
    v1.save_pytree(out / "version_1", sharded)
    truth("version_1", sharded)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
