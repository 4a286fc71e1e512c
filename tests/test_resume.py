"""A run that goes on elsewhere: AdamW's next step on another topology gives the very bits that it gives on the one that saved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.testing import ramp, read_safetensors, same_bits

torch: Any = pytest.importorskip("torch", reason="its optimizer takes the steps")

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "fixtures"
MASTER, MEAN, SQUARE = "optimizer.master.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."
HYPER = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")

Values = Any
Named = Mapping[str, Values]


def fixture(kind: str, name: str) -> Path:
    found = next((at / kind / name for at in (HERE / "golden", SHARED) if (at / kind / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} stands beside the project only")
    return found


def gradient(name: str, shape: Sequence[int]) -> Values:
    """Return a gradient of the size of the moments, each of whose elements tells its place."""
    return (ramp(name, tuple(shape)) - np.float32(4_000_000)) / np.float32(1 << 24)


def tensor(values: Values) -> Any:
    """Return a tensor of its own memory."""
    return values.clone() if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))


def stepped(weights: Named, means: Named, squares: Named, grads: Named, counts: Mapping[str, float], hyper: Named) -> list[Named]:
    """Take one step of torch's own AdamW from where these states are; return the weights and the moments after it."""
    assert set(weights) == set(means) == set(squares)
    names = list(weights)
    parameters = [torch.nn.Parameter(tensor(weights[n])) for n in names]
    for name, parameter in zip(names, parameters, strict=True):
        parameter.grad = tensor(grads[name])
    optimizer = torch.optim.AdamW(parameters, foreach=False, **hyper)
    state = {
        i: {
            "step": torch.tensor(float(counts[n])),
            "exp_avg": tensor(means[n]),
            "exp_avg_sq": tensor(squares[n]),
        }
        for i, n in enumerate(names)
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    optimizer.step()
    after = [optimizer.state[p] for p in parameters]
    return [
        {n: p.detach().numpy() for n, p in zip(names, parameters, strict=True)},
        {n: s["exp_avg"].numpy() for n, s in zip(names, after, strict=True)},
        {n: s["exp_avg_sq"].numpy() for n, s in zip(names, after, strict=True)},
    ]


def of(prefix: str, found: Named) -> dict[str, Values]:
    return {n.removeprefix(prefix): v for n, v in found.items() if n.startswith(prefix)}


def kind_of(golden: Named, kind: str) -> dict[str, Values]:
    return of(f"{kind}/", golden)


# --- DeepSpeed, ZeRO-2 of two data-parallel ranks, to two tensor-parallel ones ----------------------------------------

ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")

TINY = {
    "z2-fp32-dp2-frozen": {"vocab_size": 101, "hidden_size": 32, "head_dim": 8, "intermediate_size": 24},
    "z2-bf16-dp2-groups": {"vocab_size": 101, "hidden_size": 32, "head_dim": 8, "intermediate_size": 24},
    "z2-bf16-dp2-roundrobin-aligned": {"vocab_size": 97, "hidden_size": 36, "head_dim": 9, "intermediate_size": 25},
}


def config_of(name: str) -> dict[str, Any]:
    biases = "roundrobin" in name
    more = {"model_type": "qwen2" if biases else "llama", "num_hidden_layers": 2, "tie_word_embeddings": False}
    return {**TINY[name], **more, "num_attention_heads": 4, "num_key_value_heads": 2}


def cut(name: str, full: Values, rank: int, ranks: int) -> Values:
    """Return a tensor-parallel rank's part of a Llama's array: by rows, by columns, or all of it."""
    dim = 0 if any(word in name for word in ROWS) else 1 if any(word in name for word in COLUMNS) else None
    if dim is None:
        return full
    size = math.ceil(full.shape[dim] / ranks)
    return full[(slice(None),) * dim + (slice(rank * size, (rank + 1) * size),)]


def joined(name: str, parts: Sequence[Values]) -> Values:
    if any(word in name for word in (*ROWS, *COLUMNS)):
        return np.concatenate(parts, axis=0 if any(word in name for word in ROWS) else 1)
    assert all(same_bits(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize("name", TINY)
def test_a_step_after_zero2_of_two_data_ranks_is_the_same_on_two_tensor_ranks(name: str) -> None:
    path = fixture("deepspeed", name)
    golden = read_safetensors(path / "golden.safetensors")
    checkpoint = meshload.open(path, config=config_of(name))
    told = checkpoint.meta["optimizer"]  # DeepSpeed keeps one count of steps for all weights, and the optimizer's groups
    hyper = {key: told["param_groups"][0][key] for key in HYPER}
    full = [kind_of(golden, kind) for kind in ("fp32", "exp_avg", "exp_avg_sq")]
    masters = {n: full[0][n] for n in full[1]}  # a frozen weight has no moments, and takes no step
    grads = {n: gradient(n, v.shape) for n, v in masters.items()}
    counts = dict.fromkeys(masters, told["step"])
    assert told["step"] == 2
    expected = stepped(masters, full[1], full[2], grads, counts, hyper)

    ranks = []
    for rank in range(2):
        found = meshload.restore(checkpoint, mesh="tp=2", rank=rank, optimizer=True, exclude="*position_scale")
        assert set(of(MASTER, found)) == set(masters)
        mine = {n: cut(n, g, rank, 2) for n, g in grads.items()}
        ranks.append(stepped(of(MASTER, found), of(MEAN, found), of(SQUARE, found), mine, counts, hyper))
    for kind, whole in enumerate(expected):
        assert [n for n in whole if not same_bits(joined(n, [of_rank[kind][n] for of_rank in ranks]), whole[n])] == []
    moved = [n for n, v in masters.items() if not same_bits(expected[0][n], v)]
    assert moved == list(masters)


def test_frozen_weights_come_without_moments_and_as_they_were() -> None:
    path = fixture("deepspeed", "z2-fp32-dp2-frozen")
    golden = kind_of(read_safetensors(path / "golden.safetensors"), "param")
    found = meshload.restore(path, config=config_of(path.name), optimizer=True, into="numpy", exclude="*position_scale")
    frozen = {n for n in found if not n.startswith("optimizer.")} - set(of(MASTER, found))
    assert "model.embed_tokens.weight" in frozen
    assert [n for n in frozen if not same_bits(found[n], golden[n])] == []


# --- DCP: FSDP2, HSDP, FSDP1, and torchtitan's keys, to one process ---------------------------------------------------

DCP = {
    "hsdp": ("optim", "model.", "param_groups.0."),
    "fsdp1": ("optim", "model.", "param_groups.0."),
    "titan": ("optimizer", "", "param_groups.output.weight."),
    "llama_fsdp2_4_adamw": ("optim", "model.", "param_groups.0."),
    "qwen2_tied_tp2_fsdp2_adamw": ("optim", "model.", "param_groups.model.embed_tokens.weight."),
}
"""Where the optimizer is, what stands before a weight's name, and where the hyper-parameters are."""


@pytest.mark.parametrize("name", DCP)
def test_a_step_after_fsdp_is_the_same_in_one_process(name: str) -> None:
    case = fixture("dcp", name)
    root, head, group = DCP[name]
    golden = read_safetensors(case / "golden.safetensors")
    full = [
        {key.removeprefix(f"{root}.state.").removesuffix(f".{kind}"): v for key, v in golden.items() if key.endswith(f".{kind}")}
        for kind in ("exp_avg", "exp_avg_sq", "step")
    ]
    weights = {n: golden[f"{head}{n}"] for n in full[0]}
    grads = {n: gradient(n, v.shape) for n, v in weights.items()}
    checkpoint = meshload.open(case / "checkpoint")
    hyper = {key: checkpoint.meta["objects"][f"{root}.{group}{key}"] for key in HYPER}
    expected = stepped(weights, full[0], full[1], grads, {n: float(v) for n, v in full[2].items()}, hyper)

    found = meshload.restore(checkpoint, layout="replicated", optimizer=True)
    counts = {n.removeprefix(head): float(np.asarray(a)) for n, a in checkpoint.meta["steps"].items()}  # each weight has its own
    assert set(counts.values()) == {2.0}
    mine = [{n.removeprefix(head): v for n, v in of(prefix, found).items()} for prefix in (MEAN, SQUARE)]
    resumed = stepped({n: found[f"{head}{n}"] for n in mine[0]}, *mine, grads, counts, hyper)
    for got, want in zip(resumed, expected, strict=True):
        assert set(got) == set(want)
        assert [n for n in want if not same_bits(got[n], want[n])] == []


def test_a_real_model_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """A torch module and its AdamW, saved by DCP after two steps, restored into new ones, and trained on beside the old ones."""
    import warnings

    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def make() -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
        return model, torch.optim.AdamW(model.named_parameters(), lr=0.01, foreach=False)

    def train(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
        for i in steps:
            torch.manual_seed(i)
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(7)
    old = make()
    train(*old, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, optim = state_dict.get_state_dict(*old)
        dcp.save({"model": weights, "optim": optim}, checkpoint_id=tmp_path, no_dist=True)

    checkpoint = meshload.open(tmp_path)
    found = meshload.restore(checkpoint, optimizer=True)
    model, optimizer = make()
    model.load_state_dict({n: found[f"model.{n}"] for n in model.state_dict()})
    named = dict(enumerate(n for n, _ in model.named_parameters()))
    state = {
        i: {
            "step": torch.from_numpy(np.asarray(checkpoint.meta["steps"][f"model.{n}"]).copy()),
            "exp_avg": found[f"optimizer.exp_avg.model.{n}"],
            "exp_avg_sq": found[f"optimizer.exp_avg_sq.model.{n}"],
        }
        for i, n in named.items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    train(*old, range(2, 5))
    train(model, optimizer, range(2, 5))
    for one, other in zip(old[0].parameters(), model.parameters(), strict=True):
        assert same_bits(one.detach().numpy(), other.detach().numpy())


# --- JAX --------------------------------------------------------------------------------------------------------------

JAX = """
import json, sys
import jax, numpy as np
import meshload
path, config = sys.argv[1], json.loads(sys.argv[2])
mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 2), ("tp", "dp"))
layout = meshload.Layout({"heads": "tp", "embed": "dp"})  # 25 wide MLPs stay whole
found = meshload.restore(path, mesh=mesh, config=config, optimizer=True, layout=layout, exclude="*position_scale")
told = {}
for name, array in found.items():
    weight = name.split(".", 2)[2] if name.startswith("optimizer.") else name
    told[name] = [array.sharding == found[weight].sharding, list(array.sharding.spec)]
    for i, shard in enumerate(array.addressable_shards):
        start = [s.start or 0 for s in shard.index]
        np.savez(f"{sys.argv[3]}/{name}.{i}.npz", start=start, values=np.asarray(shard.data).astype(np.float32))
print(json.dumps(told))
"""


def test_moments_in_jax_are_sharded_like_their_weights(run_python: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("jax")
    path = fixture("deepspeed", "z2-bf16-dp2-roundrobin-aligned")
    golden = read_safetensors(path / "golden.safetensors")
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    told = json.loads(run_python(JAX, path, json.dumps(config_of(path.name)), tmp_path, env=env))
    assert [name for name, (is_same, *_) in told.items() if not is_same] == []
    q = "model.layers.0.self_attn.q_proj.weight"
    assert told[q][1] == told[f"{MASTER}{q}"][1] == told[f"{MEAN}{q}"][1] == ["tp", "dp"]
    for prefix, kind in ((MASTER, "fp32"), (MEAN, "exp_avg"), (SQUARE, "exp_avg_sq")):
        expected = kind_of(golden, kind)
        assert {n.removeprefix(prefix) for n in told if n.startswith(prefix)} == set(expected)
        for name, full in expected.items():
            for i in range(4):
                with np.load(tmp_path / f"{prefix}{name}.{i}.npz") as part:
                    box = tuple(slice(a, a + n) for a, n in zip(part["start"], part["values"].shape, strict=True))
                    assert same_bits(part["values"], full[box])
