"""A Llama-shaped checkpoint of random bf16 weights, as Hugging Face writes it: safetensors shards, an index and a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
"""Cut in their second dim by tensor parallelism; other matrices in their first; vectors are whole on each rank."""


def config(layers: int) -> dict[str, Any]:
    """Return a config of hidden size 2048; a layer is 122 MB, what is outside the layers 262 MB."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the arrays of a model, in the order of its layers."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found |= {at + "input_layernorm.weight": (e,), at + "post_attention_layernorm.weight": (e,)}
        found |= {at + f"self_attn.{p}_proj.weight": (n, e) for p, n in (("q", q), ("k", kv), ("v", kv))}
        found |= {at + "self_attn.o_proj.weight": (e, q), at + "mlp.down_proj.weight": (e, f)}
        found |= {at + f"mlp.{p}_proj.weight": (f, e) for p in ("gate", "up")}
    return found | {"model.norm.weight": (e,), "lm_head.weight": (v, e)}


def write(folder: Path, layers: int, shards: int) -> Path:
    """Write the checkpoint, where it is not there already; the bytes are the same each time."""
    told = config(layers)
    index = folder / "model.safetensors.index.json"
    if index.exists() and json.loads((folder / "config.json").read_text()) == told:
        written = set(json.loads(index.read_text())["weight_map"].values())
        if len(written) == shards:
            return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    rng, files = np.random.default_rng(0), {}
    for i, part in enumerate(np.array_split(list(shapes(told)), shards), 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        of_part = {str(name): shapes(told)[str(name)] for name in part}
        _write_shard(folder / file, of_part, rng)
        files |= dict.fromkeys(of_part, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _write_shard(file: Path, shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, at = {}, 0
    for name, shape in sorted(shapes.items()):
        n = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + n)}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(shapes):
            out.write(rng.integers(0x3800, 0x4000, int(np.prod(shapes[name])), np.uint16).tobytes())  # finite: below 2 in bf16
        out.flush()


def slices(folder: Path, size: int, rank: int, names: str = "") -> dict[Path, dict[str, tuple[int, int, int, int]]]:
    """Return where one rank's slices lie: file -> name -> offset, rows, bytes of a row, stride."""
    found: dict[Path, dict[str, tuple[int, int, int, int]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        found[file] = {}
        for name, told in header.items():
            if name == "__metadata__" or (names and not name.endswith(tuple(names.split()))):
                continue
            start, stop = (8 + length + offset for offset in told["data_offsets"])
            n = (stop - start) // size
            if len(told["shape"]) == 1:
                found[file][name] = (start, 1, stop - start, 0)
            elif name.endswith(ROW_PARALLEL):
                row = (stop - start) // told["shape"][0]
                found[file][name] = (start + rank * row // size, told["shape"][0], row // size, row)
            else:
                found[file][name] = (start + rank * n, 1, n, 0)
    return found
