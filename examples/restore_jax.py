"""Run a Llama, Qwen2, Qwen3 or Qwen3-MoE checkpoint in plain JAX, on weights that are sharded over a mesh as they were restored.

    python examples/restore_jax.py PATH --mesh pp=2,tp=2,dp=2 --tokens 3,1,4,1,5

Heads, feed-forward and vocabulary are cut over `tp`, the batch over `dp`, and each stage of `pp` is on devices of its own; XLA adds
the communication. To try it without accelerators: XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshload
from meshload.mesh import parse_mesh


def forward(weights: dict, config: dict, tokens: jax.Array) -> jax.Array:
    """Return the logits of token ids `(batch, sequence)`."""
    table = weights["model.embed_tokens.weight"]
    x = jnp.take(table, beside(tokens, table), axis=0)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        mine = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = layer(beside(x, mine["input_layernorm.weight"]), mine, **numbers(config))
    scale, head = weights["model.norm.weight"], weights["lm_head.weight"]
    return norm(beside(x, scale), scale, config["rms_norm_eps"]) @ head.T


def beside(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Move activations to the devices of a weight: the next stage of the pipeline. The batch is cut over `dp`."""
    if not isinstance(weight.sharding, NamedSharding):
        return jax.device_put(x, weight.sharding)
    mesh = weight.sharding.mesh
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp" if "dp" in mesh.axis_names else None)))


def numbers(config: dict) -> dict:
    """Return what a layer needs to know, all of it static under jit."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    return {
        "heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "eps": config["rms_norm_eps"],
        "theta": rope.get("rope_theta", 10000.0),
        "top": config.get("num_experts_per_tok") or 0,
        "normed": config.get("norm_topk_prob", False),
    }


@partial(jax.jit, static_argnames=("heads", "head_dim", "eps", "theta", "top", "normed"))
def layer(x: jax.Array, w: dict, *, heads: int, head_dim: int, eps: float, theta: float, top: int, normed: bool) -> jax.Array:
    x = x + attention(norm(x, w["input_layernorm.weight"], eps), w, heads, head_dim, eps, theta)
    y = norm(x, w["post_attention_layernorm.weight"], eps)
    return x + (experts(y, w, top, normed) if "mlp.gate.weight" in w else mlp(y, w, "mlp."))


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype) * scale


def attention(x: jax.Array, w: dict, heads: int, head_dim: int, eps: float, theta: float) -> jax.Array:
    batch, length, _ = x.shape
    q, k, v = (linear(x, w, f"self_attn.{n}_proj.").reshape(batch, length, -1, head_dim) for n in "qkv")
    if "self_attn.q_norm.weight" in w:
        q, k = norm(q, w["self_attn.q_norm.weight"], eps), norm(k, w["self_attn.k_norm.weight"], eps)
    q, k = rotated(q, theta), rotated(k, theta)
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)  # query heads that share a key head stand together
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) / np.sqrt(head_dim)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype), v)
    return linear(mixed.reshape(batch, length, heads * head_dim), w, "self_attn.o_proj.")


def linear(x: jax.Array, w: dict, prefix: str) -> jax.Array:
    y = x @ w[prefix + "weight"].T
    return y + w[prefix + "bias"] if prefix + "bias" in w else y


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Turn each pair (i, i + half) by its position, as the Hugging Face layout of the weights wants it."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None].astype(x.dtype), jnp.sin(angle)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def mlp(x: jax.Array, w: dict, prefix: str) -> jax.Array:
    gate, up = (linear(x, w, f"{prefix}{n}_proj.") for n in ("gate", "up"))
    return linear(jax.nn.silu(gate) * up, w, prefix + "down_proj.")


def experts(x: jax.Array, w: dict, top: int, normed: bool) -> jax.Array:
    """Sum the experts' outputs, weighted; every expert runs on every token, which is simple and slow."""
    share = jax.nn.softmax((x @ w["mlp.gate.weight"].T).astype(jnp.float32), axis=-1)
    least = jnp.sort(share, axis=-1)[..., -top, None]
    share = jnp.where(share >= least, share, 0)
    share = (share / share.sum(axis=-1, keepdims=True) if normed else share).astype(x.dtype)
    outputs = [mlp(x, w, f"mlp.experts.{e}.") for e in range(share.shape[-1])]
    return sum(share[..., e, None] * y for e, y in enumerate(outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--mesh", default="tp=1", help="sizes of named axes, outermost first, as in pp=2,tp=2,dp=2")
    parser.add_argument("--tokens", default="1,2,3,4", help="token ids; several sequences are parted by semicolons")
    parser.add_argument("--out", help="a .npy file for the logits")
    arguments = parser.parse_args()
    sized = parse_mesh(arguments.mesh)
    mesh = Mesh(np.asarray(jax.devices()[: sized.size]).reshape(sized.sizes), sized.names)
    weights = meshload.restore(arguments.path, mesh=mesh)
    config = dict(meshload.open(arguments.path).config or {})
    tokens = np.asarray([[int(t) for t in line.split(",")] for line in arguments.tokens.split(";")], np.int32)
    logits = np.asarray(forward(weights, config, tokens), np.float32)
    print("next token:", *logits[:, -1].argmax(axis=-1))
    if arguments.out:
        np.save(arguments.out, logits)


if __name__ == "__main__":
    main()
