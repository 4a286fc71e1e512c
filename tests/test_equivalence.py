"""The same model, sharded by different frameworks and read from different formats, is the same model: its logits and its bits."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.testing import read_safetensors, same_bits, write_checkpoint
from meshload_adapters.frameworks.torch import numpy_dtype

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
FAMILIES = ("llama", "qwen2_tied", "qwen3_moe")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(family: str) -> Any:
    """Return a tiny model with weights that all matter."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 96, "max_position_embeddings": 64}
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif family == "qwen2_tied":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))
    else:
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint per family, with tokens and the logits of the unsharded model in it."""
    found = tmp_path_factory.mktemp("families")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 10))
    for family in FAMILIES:
        model = make(family)
        model.save_pretrained(found / family)
        np.save(found / family / "tokens.npy", tokens)
        with torch.no_grad():
            np.save(found / family / "logits.npy", model(torch.from_numpy(tokens)).logits.numpy())
    return found


@pytest.fixture(scope="module")
def told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("told")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launch, str(HERE / "checks_transformers.py"), str(folder), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["tensor_parallel", "data_parallel"])
def test_a_sharded_transformers_model_gives_the_same_logits(told: list[dict[str, str]], way: str, family: str) -> None:
    assert {rank: of[f"{way} {family}"] for rank, of in enumerate(told) if of[f"{way} {family}"]} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_jax_on_a_mesh_gives_the_same_logits(folder: Path, family: str, tmp_path: Path) -> None:
    tokens = ";".join(",".join(map(str, row)) for row in np.load(folder / family / "tokens.npy"))
    program = [sys.executable, str(HERE.parent / "examples" / "restore_jax.py"), str(folder / family)]
    options = ["--mesh", "pp=2,tp=2,dp=2", "--tokens", tokens, "--out", str(tmp_path / "logits.npy")]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), np.load(folder / family / "logits.npy"), rtol=1e-4, atol=1e-4)


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(tensor.dtype)).reshape(tuple(tensor.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_and_jax_hold_the_same_bits(folder: Path, family: str, dtype: str) -> None:
    pytest.importorskip("jax")
    for rank in range(4):
        options: dict[str, Any] = {"mesh": "pp=2,tp=2", "rank": rank, "dtype": dtype}
        one, other, third = (meshload.restore(folder / family, into=into, **options) for into in ("torch", "jax", "numpy"))
        assert set(one) == set(other) == set(third)
        assert [n for n in third if not same_bits(numpy_of(one[n]), third[n])] == []
        assert [n for n in third if not same_bits(np.asarray(other[n]), third[n])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_orbax_copy_holds_the_same_bits(folder: Path, family: str, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    expected = meshload.restore(folder / family, into="numpy")
    stored = meshload.open(folder / family)
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "copy", {name: np.asarray(stored[name]) for name in stored})
        writer.wait_until_finished()
    found = meshload.restore(tmp_path / "copy", config=folder / family, into="numpy")
    assert set(found) == set(expected)
    assert [n for n in expected if not same_bits(found[n], expected[n])] == []
    for rank in (0, 3):
        one, other = (
            meshload.restore(path, mesh="pp=2,tp=2", rank=rank, config=folder / family, into="jax")
            for path in (tmp_path / "copy", folder / family)
        )
        assert set(one) == set(other)
        assert [n for n in one if not same_bits(np.asarray(one[n]), np.asarray(other[n]))] == []


def test_the_torch_example_shows_each_rank(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE.parent / "examples" / "restore_torch.py"), "--mesh", "pp=2,tp=2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("rank")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert sum("model.embed_tokens.weight" in line and "(66, 32)" in line for line in lines) == 1
    assert sum("lm_head.weight" in line and "(65, 32)" in line for line in lines) == 1


def test_the_torch_example_runs_under_torchrun(folder: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*launch, str(HERE.parent / "examples" / "restore_torch.py"), str(folder / "llama"), "--mesh", "tp=2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("rank")) == ["rank 0", "rank 1"]


# --- one model, as each training framework saves it -------------------------------------------------------------------

ROOTS = (HERE / "golden", HERE.parent.parent / "shared" / "fixtures")
FAST_LLM, CORE = "fast_llm/qwen2_tied_pp2_dp2", "megatron/td-tp2-dp2-fp32-distopt-dpre-qwen2"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MCORE = {
    "model.norm": "decoder.final_layernorm",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.down_proj": "mlp.linear_fc2",
}


def real(name: str) -> Path:
    return next(root / name for root in ROOTS if (root / name).is_dir())


def as_megatron(arrays: dict[str, Any], config: dict[str, Any], tp: int = 1, t: int = 0) -> dict[str, Any]:
    """Fuse by hand a Qwen2's arrays as a tensor-parallel rank of Megatron holds them."""
    kv, d = config["num_key_value_heads"] // tp, config["hidden_size"] // config["num_attention_heads"]

    def rows(w: Any) -> Any:
        return np.split(w, tp)[t]

    padded = -(-len(arrays[EMBEDDING]) // (2 * tp)) * 2 * tp
    made = {"embedding.word_embeddings.weight": rows(np.pad(arrays[EMBEDDING], [(0, padded - len(arrays[EMBEDDING])), (0, 0)]))}
    for name, w in arrays.items():
        module, _, last = name.rpartition(".")
        at = f"decoder.layers.{name.split('.')[2]}." if ".layers." in name else ""
        inner = module.split(".", 3)[3] if at else module
        if inner in MCORE:
            made[f"{at}{MCORE[inner]}.{last}"] = np.split(w, tp, axis=1)[t] if w.ndim == 2 else w
        elif inner == "self_attn.q_proj":
            parts = [rows(arrays[name.replace("q_proj", f"{p}_proj")]).reshape(kv, -1, d, *w.shape[1:]) for p in "qkv"]
            made[f"{at}self_attention.linear_qkv.{last}"] = np.concatenate(parts, axis=1).reshape(-1, *w.shape[1:])
        elif inner == "mlp.gate_proj":
            pair = [rows(w), rows(arrays[name.replace("gate", "up")])]
            made[f"{at}mlp.linear_fc1.{last}"] = np.concatenate(pair)
    if not config["tie_word_embeddings"]:
        made["output_layer.weight"] = rows(np.pad(arrays[HEAD], [(0, padded - len(arrays[HEAD])), (0, 0)]))
    return made


def args_of(config: dict[str, Any], tp: int) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["hidden_size"] // config["num_attention_heads"],
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
        vocab_size=config["vocab_size"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        num_experts=None,
    )


def write_legacy(root: Path, arrays: dict[str, Any], config: dict[str, Any]) -> Path:
    for t in range(2):
        folder = root / "iter_0000001" / f"mp_rank_{t:02}"
        folder.mkdir(parents=True)
        model = {n: torch.from_numpy(np.array(w)) for n, w in as_megatron(arrays, config, 2, t).items()}
        torch.save({"model": model, "args": args_of(config, 2), "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def write_core(root: Path, arrays: dict[str, Any], config: dict[str, Any]) -> Path:
    """Write a homogeneous container: each array of a layer stacked over the layers."""
    from torch.distributed.checkpoint.state_dict_saver import save

    whole, folder = as_megatron(arrays, config), root / "iter_0000001"
    ends = {n: w for n, w in whole.items() if ".layers." not in n}
    stems = [n.split(".", 3)[3] for n in whole if n.startswith("decoder.layers.0.")]
    numbers = range(config["num_hidden_layers"])
    layers = {f"decoder.layers.{s}": np.stack([whole[f"decoder.layers.{i}.{s}"] for i in numbers]) for s in stems}
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({n: torch.from_numpy(np.array(w)) for n, w in {**ends, **layers}.items()}, checkpoint_id=folder, no_dist=True)
    torch.save({"args": args_of(config, 1), "iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


def write_zero3(root: Path, arrays: dict[str, Any], config: dict[str, Any]) -> Path:
    spec = importlib.util.spec_from_file_location("bench_zero3", HERE / "bench" / "zero3.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.value = lambda shapes, name, kind: arrays[name] if kind == "master" else np.zeros(shapes[name], np.float32)
    path: Path = bench.write_zero3(root, {n: w.shape for n, w in arrays.items()}, 3)
    return path


def write_hf(root: Path, arrays: dict[str, Any], config: dict[str, Any]) -> Path:
    return write_checkpoint(root, arrays, config)


def canonical(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    found = meshload.restore(path, into="numpy", config=config)
    return {n: w for n, w in found.items() if n != HEAD or not config["tie_word_embeddings"]}


def logits_of(path: Path, config: dict[str, Any], tokens: Any) -> Any:
    more = {"rms_norm_eps": 1e-5, "use_sliding_window": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**{**config, **more})).eval()
    model = meshload.restore(path, like=model, config=config)
    with torch.no_grad():
        return model(torch.from_numpy(np.array(tokens)).long()).logits.numpy()


@pytest.mark.parametrize("base", [FAST_LLM, CORE])
def test_one_model_is_the_same_in_the_forms_of_all_frameworks(base: str, tmp_path: Path) -> None:
    """What Fast-LLM or megatron-core wrote, and by hand, as files of Hugging Face, legacy and core Megatron, and DeepSpeed."""
    path = real(base) / ("distributed" if base == FAST_LLM else "")
    told = dict(meshload.open(path, config={"model_type": "qwen2"}).config or {})
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    config = {"model_type": "qwen2", "tie_word_embeddings": told["tie_word_embeddings"], **{k: told[k] for k in keys}}
    arrays = canonical(path, config)
    forms = {"native": path, **({"names": real(base) / "fast_llm"} if base == FAST_LLM else {})}
    for write in (write_hf, write_legacy, write_core, write_zero3):
        forms[write.__name__] = write(tmp_path / write.__name__, arrays, config)
    formats = {name: meshload.open(p, config=config).format for name, p in forms.items()}
    assert {"hf", "megatron", "megatron_core", "deepspeed"} <= set(formats.values())
    truth = read_safetensors(path / "golden.safetensors") if base == CORE else {}
    tokens = truth.get("probe/input_ids", np.arange(20).reshape(2, 10))
    expected = truth["probe/logits"] if truth else logits_of(forms["write_hf"], config, tokens)
    for name, form in forms.items():
        found = canonical(form, config)
        assert set(found) == set(arrays), name
        assert [n for n in arrays if not same_bits(found[n], arrays[n])] == [], name
        assert np.abs(logits_of(form, config, tokens) - expected).max() < 1e-4, name
