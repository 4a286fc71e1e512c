"""Optimizers' states that are written: they are read back bit for bit, and torch's own AdamW goes on with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Checkpoint, LayoutError
from meshload.loading import with_views
from meshload.naming import model_of
from meshload.source import LocalFolder
from meshload.testing import ramp, same_bits, write_checkpoint
from meshload_adapters._distcp import read_listing
from meshload_adapters._megatron import plain
from meshload_adapters._pickle import Record
from meshload_adapters._torch_file import Tensor, TorchFile
from meshload_adapters.formats.dcp import DCP
from meshload_adapters.formats.deepspeed import DeepSpeed
from meshload_adapters.formats.megatron import Megatron
from meshload_adapters.formats.megatron_core import MegatronCore

from .test_round_trips import differing

GOLDEN = Path(__file__).resolve().parent / "golden"
TITAN = DCP(optimizer="optimizer", flat=True)


def same_states(one: Checkpoint, other: Checkpoint) -> bool:
    """Say whether two checkpoints have the same kinds of states, of the same weights, with the same bits."""
    names = {kind: sorted(arrays) for kind, arrays in one.optimizer.items()}
    if names != {kind: sorted(arrays) for kind, arrays in other.optimizer.items()}:
        return False
    return all(same_bits(other.optimizer[k][n], a) for k, arrays in one.optimizer.items() for n, a in arrays.items())


def steps(checkpoint: Checkpoint) -> dict[str, float]:
    return {name: float(np.asarray(count)) for name, count in checkpoint.meta["steps"].items()}


# --- DCP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [None, "tp=2"])
@pytest.mark.parametrize("case", ["fsdp1", "hsdp", "titan"])
def test_dcp_keeps_moments_steps_and_groups(tmp_path: Path, case: str, mesh: str | None) -> None:
    src = meshload.open(GOLDEN / "dcp" / case / "checkpoint")
    to = TITAN if case == "titan" else DCP()
    layout = {"*wq.weight": ("tp",), "*wo.weight": (None, "tp"), "*": ()}
    meshload.convert(src, tmp_path / "out", to=to, optimizer=True, mesh=mesh, layout=layout if mesh else None)
    found = meshload.open(tmp_path / "out")
    assert (sorted(found), found.problems, found.meta["unlisted"]) == (sorted(src), (), ())
    assert [n for n in src if not same_bits(found[n], src[n])] == []
    assert same_states(src, found)
    assert steps(found) == steps(src)
    assert len(steps(src)) == len(src)
    groups = {key: src.meta["objects"][key] for key in src.meta["objects"] if "param_groups" in key}
    if case == "titan":
        assert groups == dict(found.meta["objects"])
    else:
        told = {key: value for key, value in groups.items() if not key.endswith(".params")}
        assert told == {k: found.meta["objects"][k] for k in found.meta["objects"] if not k.endswith(".params")}
        params = found.meta["objects"]["optim.param_groups.0.params"]
        assert sorted(params) == sorted(n.removeprefix("model.") for n in src)
        assert all(found.meta["paths"][n] == ("model", n.removeprefix("model.")) for n in found)


@pytest.mark.parametrize("golden", ["z2-bf16-dp2-roundrobin-aligned", "z2-fp32-dp2-frozen"])
def test_dcp_has_what_deepspeed_had(tmp_path: Path, golden: str) -> None:
    src = meshload.open(GOLDEN / "deepspeed" / golden)
    meshload.convert(src, tmp_path / "out", to=DCP(model="model"), optimizer=True)
    found = meshload.open(tmp_path / "out")
    assert sorted(found) == sorted(f"model.{n}" for n in src)
    assert [n for n in src if not same_bits(found[f"model.{n}"], src[n])] == []
    bare = {k: {n.removeprefix("model."): a for n, a in arrays.items()} for k, arrays in found.optimizer.items()}
    assert same_states(src, replace(found, optimizer=bare))
    assert set(found.optimizer) == {"master", "exp_avg", "exp_avg_sq"}
    assert steps(found) == {f"model.{n}": 2.0 for n in src.optimizer["exp_avg"]}
    told = src.meta["optimizer"]["param_groups"][0]
    assert {key: found.meta["objects"][f"optim.param_groups.0.{key}"] for key in told} == told


def test_deepspeed_has_the_hyperparameters_that_dcp_had(tmp_path: Path) -> None:
    src = meshload.open(GOLDEN / "dcp/hsdp/checkpoint")
    to = DeepSpeed(stage=1, parameters=list(src))
    meshload.convert(src, tmp_path / "out", to=to, mesh="dp=2", layout="replicated", optimizer=True)
    (group,) = meshload.open(tmp_path / "out").meta["optimizer"]["param_groups"]
    told = {key: src.meta["objects"][f"optim.param_groups.0.{key}"] for key in ("lr", "betas", "eps", "weight_decay")}
    assert {key: group[key] for key in told} == told
    assert meshload.verify(src, tmp_path / "out", optimizer=True).problems == ()


MEGATRON = {
    "legacy-tp2-dp2-bf16-distopt": ("llama", 2),
    "legacy-pp2-vp2-bf16-tied": ("llama", None),
    "legacy-tp2-pp2-fp32": ("llama", None),
    "td-tp2-dp2-fp32-distopt-dpre-qwen2": ("qwen2", None),
    "td-ep2-fp32-moe": ("mixtral", None),
}
"""Golden folder -> its family, and how many steps were taken, where it does not tell that."""


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("golden", MEGATRON)
def test_dcp_has_what_megatron_had_and_torch_loads_it(tmp_path: Path, golden: str) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    family, count = MEGATRON[golden]
    opened = meshload.open(GOLDEN / "megatron" / golden, config={"model_type": family})
    meshload.convert(opened, tmp_path / "out", to=DCP(steps=count, hyperparameters=HYPER), mesh="tp=2", optimizer=True)
    src, found = opened.with_names("hf"), meshload.open(tmp_path / "out")
    assert sorted(found) == sorted(src)
    assert [n for n in src if not same_bits(found[n], src[n])] == []
    assert same_states(src, found)
    assert steps(found) == dict.fromkeys(src, 2.0)
    objects = dict(found.meta["objects"])
    assert sorted(objects.pop("optim.param_groups.0.params")) == sorted(src)
    assert {key: objects[f"optim.param_groups.0.{key}"] for key in HYPER} == HYPER
    assert objects["optim.param_groups.0.decoupled_weight_decay"] is True  # as Megatron's groups say
    assert not any(key.startswith("optim.param_groups.1.") or key.endswith(("wd_mult", "max_lr")) for key in objects)
    arrays = {f"optim.state.{n}.{kind}": a for kind, of in src.optimizer.items() for n, a in of.items()}
    tensors = {key: torch.zeros(a.shape) for key, a in arrays.items()}
    checkpoint.load(tensors, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [key for key, a in arrays.items() if not same_bits(tensors[key].numpy(), a)] == []


@pytest.mark.parametrize("golden", ["legacy-tp2-pp2-fp32", "td-tp2-dp2-fp32-distopt-dpre-qwen2", "td-ep2-fp32-moe"])
def test_what_megatrons_groups_decay_is_not_guessed(tmp_path: Path, golden: str) -> None:
    src = meshload.open(GOLDEN / "megatron" / golden, config={"model_type": MEGATRON[golden][0]})
    assert src.meta["optimizer"]["step"] == 2
    decays = [1.0, 0.0, 1.0] if "moe" in golden else [1.0, 0.0]  # with a group of experts
    assert [group["wd_mult"] for group in src.meta["optimizer"]["param_groups"]] == decays
    for given in (None, {"lr": 0.1}):
        with pytest.raises(LayoutError, match=f"has {len(decays)} groups, and does not tell which of them"):
            meshload.convert(src, tmp_path / "out", to=DCP(hyperparameters=given), optimizer=True)
    meshload.convert(src, tmp_path / "out", to=DCP(hyperparameters={"weight_decay": 0.3}), optimizer=True)
    found = meshload.open(tmp_path / "out").meta["objects"]
    told = {key: found[f"optim.param_groups.0.{key}"] for key in HYPER}
    assert told == {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    assert not any(key.startswith("optim.param_groups.1.") for key in found)


def test_what_the_source_does_not_tell_is_asked_for_or_left_to_the_loader(tmp_path: Path) -> None:
    arrays = {n: ramp(n, (4, 3)) for n in ("a.weight", "b.weight")}
    src = meshload.open(write_checkpoint(tmp_path / "src", arrays))
    src = replace(src, optimizer={"exp_avg": {n: replace(src[n]) for n in src}})
    with pytest.raises(LayoutError, match=r"which step exp_avg are of is told nowhere.*DCP\(steps=...\)"):
        meshload.convert(src, tmp_path / "out", to="dcp", optimizer=True)
    with pytest.raises(LayoutError, match=r"no hyperparameters of a.weight, b.weight are told.*DCP\(hyperparameters="):
        meshload.convert(src, tmp_path / "out", to=DCP(steps=3, flat=True), optimizer=True)
    groups = [{"lr": 0.1}, {"lr": 0.2}]
    several = replace(src, meta={**src.meta, "optimizer": {"step": 3, "param_groups": groups}})
    with pytest.raises(LayoutError, match=r"has 2 groups, and does not tell which of them a\.weight, b\.weight is in"):
        meshload.convert(several, tmp_path / "out", to="dcp", optimizer=True)
    assert not (tmp_path / "out").exists()
    named = replace(several, meta={**several.meta, "groups": [["b.weight"], ["a.weight"]]})  # as DeepSpeed tells
    meshload.convert(named, tmp_path / "two", to="dcp", optimizer=True)
    assert dict(meshload.open(tmp_path / "two").meta["objects"]) == {
        "optim.param_groups.0.lr": 0.1,
        "optim.param_groups.0.params": ["b.weight"],
        "optim.param_groups.1.lr": 0.2,
        "optim.param_groups.1.params": ["a.weight"],
    }
    meshload.convert(several, tmp_path / "one", to=DCP(hyperparameters={"lr": 0.3}), optimizer=True)
    found = meshload.open(tmp_path / "one")
    assert dict(found.meta["objects"]) == {"optim.param_groups.0.lr": 0.3, "optim.param_groups.0.params": list(arrays)}
    meshload.convert(src, tmp_path / "flat", to=DCP(steps=3, flat=True, hyperparameters={"lr": 0.3}), optimizer=True)
    found = meshload.open(tmp_path / "flat")
    assert dict(found.meta["objects"]) == {f"optim.param_groups.{n}.lr": 0.3 for n in arrays}
    assert same_states(src, found)
    assert steps(found) == dict.fromkeys(arrays, 3.0)


@pytest.mark.parametrize("to", ["dcp", "deepspeed", "universal", "fast_llm", "megatron_core", "megatron"])
@pytest.mark.parametrize(
    "step", [float("nan"), float("inf"), -1, 1 << 53, 1 << 20000], ids=["nan", "inf", "negative", "large", "huge"]
)
def test_a_step_that_is_no_count_is_refused(tmp_path: Path, to: str, step: float) -> None:
    source = meshload.open(Path(__file__).parent / "golden/fast_llm/qwen2_tied_pp2_dp2/distributed")
    group = {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    moments = {kind: source.optimizer[kind] for kind in ("exp_avg", "exp_avg_sq")}
    told = with_views(replace(source, optimizer=moments, meta={"optimizer": {"step": step, "param_groups": [group]}}))
    with pytest.raises(LayoutError, match="step"):
        meshload.convert(told, tmp_path / "out", to=DeepSpeed(parameters=list(source)) if to == "deepspeed" else to, optimizer=True)


def test_weights_of_different_steps_keep_them(tmp_path: Path) -> None:
    arrays = {n: ramp(n, (4, 3)) for n in ("a.weight", "b.weight")}
    src = meshload.open(write_checkpoint(tmp_path / "src", arrays))
    moments = {"exp_avg": {n: replace(src[n]) for n in src}}
    src = replace(src, optimizer=moments, meta={"steps": {"a.weight": 2, "b.weight": 5.0}})
    meshload.convert(src, tmp_path / "out", to="dcp", optimizer=True)
    assert steps(meshload.open(tmp_path / "out")) == {"a.weight": 2.0, "b.weight": 5.0}


# --- torch goes on ----------------------------------------------------------------------------------------------------

HYPER = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Run:
    """A small model in the midst of its training."""

    def __init__(self, groups: int, seed: int = 0) -> None:
        torch = pytest.importorskip("torch")
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4, bias=False)]
        self.model = torch.nn.Sequential(*layers)
        parameters = list(self.model.parameters())
        cut = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
        self.optimizer = torch.optim.AdamW(cut if groups == 2 else parameters, **HYPER)

    def step(self, n: int) -> None:
        torch = pytest.importorskip("torch")
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(n))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def dict(self, *, flat: bool = False) -> dict[str, Any]:
        state = pytest.importorskip("torch.distributed.checkpoint.state_dict")
        options = state.StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optim = state.get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optim": optim}

    def load(self, folder: Path, *, flat: bool = False) -> None:
        checkpoint = pytest.importorskip("torch.distributed.checkpoint")
        state = pytest.importorskip("torch.distributed.checkpoint.state_dict")
        into = self.dict(flat=flat)
        checkpoint.load(into, checkpoint_id=folder, no_dist=True)
        options = state.StateDictOptions(flatten_optimizer_state_dict=flat)
        both = {"model_state_dict": into["model"], "optim_state_dict": into["optim"]}
        state.set_state_dict(self.model, self.optimizer, **both, options=options)

    def bits(self) -> Mapping[str, bytes]:
        found = {n: p.detach().numpy().tobytes() for n, p in self.model.named_parameters()}
        for n, p in self.model.named_parameters():
            found |= {f"{n}.{field}": t.numpy().tobytes() for field, t in self.optimizer.state.get(p, {}).items()}
        return found


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_adamw_takes_the_next_step_of_the_unbroken_run(tmp_path: Path, groups: int, flat: bool) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    run = Run(groups)
    for n in range(3):
        run.step(n)
    checkpoint.save(run.dict(flat=flat), checkpoint_id=tmp_path / "saved", no_dist=True)
    src = meshload.open(tmp_path / "saved")
    meshload.convert(src, tmp_path / "out", to=DCP(flat=flat), optimizer=True, mesh="tp=2", layout={"*0.weight": ("tp",), "*": ()})
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2
    run.step(3)
    again = Run(groups, seed=1)
    assert again.bits() != run.bits()
    again.load(tmp_path / "out", flat=flat)
    again.step(3)
    assert again.bits() == run.bits()
    assert all(key in again.bits() for key in ("0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.step"))


# --- megatron-core ----------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 12}
LLAMA |= {"vocab_size": 26, "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
GROUP = {**HYPER, "amsgrad": False, "maximize": False, "foreach": None}


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def trained(folder: Path, dtype: str = "float32", *, masters: bool = False, config: Mapping[str, Any] = LLAMA) -> Checkpoint:
    """Return a model in the midst of its training, as DeepSpeed tells of it; all values tell their places."""
    model = model_of("hf", config)
    assert model is not None
    shapes = {name: model.whole_shape(line) for name, line, _ in model.arrays()}
    kinds = ("exp_avg", "exp_avg_sq", *(("master",) if masters else ()))
    weights = {n: ramp(n, shape, np.dtype(getattr(ml_dtypes, dtype, dtype))) for n, shape in shapes.items()}
    found = meshload.open(write_checkpoint(folder / "weights", weights, config))
    moments = {}
    for kind in kinds:
        arrays = {n: ramp(f"{kind}.{n}", shape) for n, shape in shapes.items()}
        moments[kind] = dict(meshload.open(write_checkpoint(folder / kind, arrays, config)))
    meta = {**found.meta, "optimizer": {"step": 7, "param_groups": [dict(GROUP)]}}
    return with_views(replace(found, optimizer=moments, meta=meta, views={}))


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("mesh", [None, "pp=2,tp=2"])
@pytest.mark.parametrize(("dtype", "masters"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_megatron_core_keeps_moments_and_masters(
    tmp_path: Path, dtype: str, masters: bool, mesh: str | None, distributed: bool
) -> None:
    src = trained(tmp_path, dtype, masters=masters)
    to = MegatronCore(distributed_optimizer=distributed)
    meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, optimizer=True)
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "7"
    found = meshload.open(tmp_path / "out")
    assert (found.problems, dict(found.unavailable), found.meta["iteration"]) == ((), {}, 7)
    assert found.meta["optimizer"]["step"] == 7
    assert found.meta["args"]["use_distributed_optimizer"] is distributed
    back = found.with_names("hf")
    expected = dict(src.optimizer)
    if not masters and (distributed or dtype == "bfloat16"):
        expected["master"] = {n: np.asarray(a).astype(np.float32) for n, a in src.items()}  # type: ignore[dict-item]
    assert same_states(replace(src, optimizer=expected), back)
    assert [n for n in src if not same_bits(back[n], src[n])] == []
    listed = read_listing([LocalFolder(tmp_path / "out/iter_0000007").file(".metadata")])
    key = "decoder.layers.self_attention.linear_qkv.weight"
    chunks = [listed.tensors[at].sizes for at in (key, f"optimizer.state.exp_avg.{key}")]
    assert chunks[0] == chunks[1]
    assert len(chunks[0]) == (8 if mesh else 4)
    word = "param" if distributed else "fp32_param"
    assert (f"optimizer.state.{word}.{key}" in listed.tensors) == (distributed or dtype == "bfloat16")


def saved_optimizer(folder: Path) -> Any:
    """Return what `common.pt` has of the optimizer."""
    (file,) = folder.rglob("common.pt")
    return plain(TorchFile.open(LocalFolder(file.parent).file("common.pt")).root["optimizer"])


def test_megatron_cores_groups_are_those_that_megatron_looks_up(tmp_path: Path) -> None:
    meshload.convert(trained(tmp_path), tmp_path / "out", to="megatron_core", optimizer=True)
    optimizer = saved_optimizer(tmp_path / "out")
    assert optimizer["param_state_sharding_type"] == "fully_reshardable"
    groups = optimizer["optimizer"]["param_groups"]
    keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    assert [tuple(g[key] for key in keys) for g in groups] == [(1.0, 1.0, False, False), (0.0, 1.0, False, False)]
    assert [(g["lr"], g["betas"], g["eps"], g["weight_decay"], g["step"]) for g in groups] == [
        (0.02, (0.9, 0.95), 1e-8, 0.1, 7.0),
        (0.02, (0.9, 0.95), 1e-8, 0.0, 7.0),
    ]


@pytest.mark.parametrize("golden", ["td-tp2-dp2-fp32-distopt-dpre-qwen2", "legacy-tp2-dp2-bf16-distopt"])
def test_an_optimizer_of_megatron_goes_on_as_a_reshardable_one(tmp_path: Path, golden: str) -> None:
    to = MegatronCore(steps=2, hyperparameters=HYPER)
    config = {"model_type": "qwen2" if "qwen2" in golden else "llama"}
    src = meshload.open(GOLDEN / "megatron" / golden, config=config)
    meshload.convert(src, tmp_path / "out", to=to, mesh="tp=2", optimizer=True)
    found = meshload.open(tmp_path / "out")
    kinds = {kind: set(arrays) for kind, arrays in src.optimizer.items()}
    assert {kind: set(arrays) for kind, arrays in found.optimizer.items()} == kinds
    padded = src.meta["args"]["padded_vocab_size"]
    for kind, arrays in src.optimizer.items():
        for name, array in arrays.items():
            one = found.optimizer[kind][name]
            assert same_bits(one, array[: one.shape[0]] if array.shape[0] == padded else array), (kind, name)
    assert found.meta["optimizer"]["step"] == 2


def test_experts_have_an_optimizer_of_their_own_as_megatron_wrote_it(tmp_path: Path) -> None:
    theirs = meshload.open(GOLDEN / "megatron/td-ep2-fp32-moe", config={"model_type": "mixtral"})
    to = MegatronCore(distributed_optimizer=False, transformer_impl="local")
    meshload.convert(theirs, tmp_path / "out", to=to, mesh="ep=2", optimizer=True)
    mine = meshload.open(tmp_path / "out")
    assert same_states(theirs.with_names("hf"), mine.with_names("hf"))
    assert mine.meta["optimizer"]["step"] == theirs.meta["optimizer"]["step"] == 2
    saved = [saved_optimizer(folder) for folder in (tmp_path / "out", GOLDEN / "megatron/td-ep2-fp32-moe")]
    assert saved[0] == saved[1]
    chunks = []
    for folder in (tmp_path / "out", GOLDEN / "megatron/td-ep2-fp32-moe"):
        file = next(folder.rglob(".metadata"))
        tensors = read_listing([LocalFolder(file.parent).file(".metadata")]).tensors
        padded = ("word_embeddings.weight", "output_layer.weight")
        chunks.append({n: set(t.sizes.items()) for n, t in tensors.items() if "optimizer." in n and not n.endswith(padded)})
    assert chunks[0] == chunks[1]
    assert "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight" in chunks[0]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_have_one_where_they_are_shared_over_ranks(tmp_path: Path, ep: int, distributed: bool) -> None:
    src = trained(tmp_path, "bfloat16", masters=True, config=MIXTRAL)
    to = MegatronCore(distributed_optimizer=distributed)
    meshload.convert(src, tmp_path / "out", to=to, mesh=f"ep={ep}", optimizer=True)
    found = meshload.open(tmp_path / "out", config=MIXTRAL)
    assert (found.problems, dict(found.unavailable), found.meta["optimizer"]["step"]) == ((), {}, 7)
    assert same_states(src, found.with_names("hf"))
    optimizer = saved_optimizer(tmp_path / "out")
    parts = [optimizer[i] for i in sorted(optimizer)] if ep > 1 else [optimizer]
    groups = [[(g["is_expert_parallel"], g["wd_mult"]) for g in part["optimizer"]["param_groups"]] for part in parts]
    assert groups == [[(False, 1.0), (False, 0.0)], [(True, 1.0)]][:ep]
    told = [group for part in parts for group in part["optimizer"]["param_groups"]]
    assert [{key: group[key] for key in GROUP} for group in told] == [
        {**GROUP, "weight_decay": GROUP["weight_decay"] * group["wd_mult"]} for group in told
    ]
    meshload.convert(found, tmp_path / "again", to=to, mesh=f"ep={3 - ep}", optimizer=True)
    again = meshload.open(tmp_path / "again", config=MIXTRAL)
    assert same_states(src, again.with_names("hf"))
    assert len(again.meta["optimizer"]["param_groups"]) == 4 - ep


def test_what_megatron_core_cannot_hold_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    src, out = trained(tmp_path), tmp_path / "out"
    for meta, why in (
        ({"param_groups": [GROUP]}, r"told nowhere.*MegatronCore\(steps=...\)"),
        ({"step": 7}, "are not all told: lr, betas, eps, weight_decay lack"),
        ({"step": 7, "param_groups": [GROUP, {**GROUP, "lr": 0.5}]}, "differ between groups in lr"),
    ):
        told = with_views(replace(src, meta={**src.meta, "optimizer": meta}, views={}))
        with pytest.raises(LayoutError, match=why):
            meshload.convert(told, out, to="megatron_core", optimizer=True)
    with pytest.raises(LayoutError, match=r"Megatron has exp_avg_sq of all weights; of 27, .* lack it"):
        meshload.convert(src, out, to="megatron_core", optimizer=["exp_avg"])
    assert not out.exists()


def test_steps_that_megatron_core_tells_are_read() -> None:
    assert meshload.open(GOLDEN / "megatron/td-ep2-fp32-moe").meta["optimizer"]["step"] == 2


# --- legacy Megatron --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(("mesh", "virtual"), [(None, 1), ("tp=4", 1), ("pp=2,tp=2", 2)])
@pytest.mark.parametrize(("dtype", "masters"), [("float32", False), ("bfloat16", True), ("bfloat16", False)])
def test_legacy_megatron_keeps_moments_and_masters(
    tmp_path: Path, dtype: str, masters: bool, mesh: str | None, virtual: int, distributed: bool
) -> None:
    src = trained(tmp_path, dtype, masters=masters)
    to = Megatron(distributed_optimizer=distributed, virtual=virtual)
    meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, optimizer=True)
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "7"
    found = meshload.open(tmp_path / "out")
    assert (found.format, found.problems, dict(found.unavailable), found.meta["iteration"]) == ("megatron", (), {}, 7)
    assert found.meta["optimizer"]["step"] == 7
    assert found.meta["args"]["use_distributed_optimizer"] is distributed
    back = found.with_names("hf")
    expected = dict(src.optimizer)
    if not masters and (distributed or dtype == "bfloat16"):
        expected["master"] = {n: np.asarray(a).astype(np.float32) for n, a in src.items()}  # type: ignore[dict-item]
    assert same_states(replace(src, optimizer=expected), back)
    assert [n for n in src if not same_bits(back[n], src[n])] == []
    told = [(g["wd_mult"], g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in found.meta["optimizer"]["param_groups"]]
    assert told == [(1.0, 0.02, (0.9, 0.95), 1e-8, 0.1), (0.0, 0.02, (0.9, 0.95), 1e-8, 0.0)]


def structure(found: Any, rows: int) -> Any:
    """Return the keys, types, dtypes and shapes of what a file holds; of the vocabulary's padding as many `rows` are left out."""
    if type(found) is Tensor:
        vocabulary = found.shape[-1:] == (32,) and found.shape[0] in (51 + rows, 101 + rows)
        longer = rows * 32 if len(found.shape) == 1 and found.shape[0] > 32 else rows if vocabulary else 0
        return found.dtype, tuple(n - longer * (d == 0) for d, n in enumerate(found.shape))
    if isinstance(found, dict):
        left_out = ("args", "rng_state")
        entries = [(k, structure(v, rows)) for k, v in found.items() if k not in left_out]
        return type(found), [(k, v - rows * 32 if k == "numel_unpadded" else v) for k, v in entries]
    return [structure(v, rows) for v in found] if isinstance(found, list) else found


def without_step(found: Any) -> Any:
    """Leave out the steps of groups, which Apex's Adam counts and torch's does not."""
    if isinstance(found, dict):
        left_out = {"step"} if "wd_mult" in found and "params" in found else set()
        return type(found)((k, without_step(v)) for k, v in found.items() if k not in left_out)
    return [without_step(v) for v in found] if isinstance(found, list) else found


LEGACY = {
    "legacy-tp2-pp2-fp32": (Megatron(distributed_optimizer=False), "pp=2,tp=2", 5),
    "legacy-pp2-vp2-bf16-tied": (Megatron(distributed_optimizer=False, virtual=2), "pp=2", 3),
    "legacy-tp2-dp2-bf16-distopt": (Megatron(), "tp=2", 5),
}
"""Golden folder -> how it is written, for which mesh, and with how many rows of padding per rank."""


@pytest.mark.parametrize("golden", LEGACY)
def test_legacy_files_have_the_structure_of_those_that_megatron_wrote(tmp_path: Path, golden: str) -> None:
    to, mesh, rows = LEGACY[golden]
    theirs = GOLDEN / "megatron" / golden
    src = meshload.open(theirs, config={"model_type": "llama"})
    meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, optimizer=True)
    assert same_states(src.with_names("hf"), meshload.open(tmp_path / "out").with_names("hf"))
    files = sorted(str(file.relative_to(theirs)) for file in theirs.rglob("*.pt"))
    assert files == sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.pt"))
    for file in files:
        mine, expected = (TorchFile.open(LocalFolder(at).file(file)).root for at in (tmp_path / "out", theirs))
        assert repr(structure(without_step(mine), 0)) == repr(structure(expected, rows)), file
        assert isinstance(mine.get("args"), Record) or file.endswith("distrib_optim.pt")


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("mesh", ["ep=2", "ep=2,pp=2,tp=2", "tp=2"])
def test_experts_that_are_cut_over_ranks_have_an_optimizer_of_their_own(tmp_path: Path, mesh: str, distributed: bool) -> None:
    theirs = meshload.open(GOLDEN / "megatron/td-ep2-fp32-moe", config={"model_type": "mixtral"})
    to = Megatron(distributed_optimizer=distributed, hyperparameters=GROUP)
    meshload.convert(theirs, tmp_path / "out", to=to, mesh=mesh, optimizer=True)
    mine = meshload.open(tmp_path / "out").with_names("hf")
    expected = {**theirs.with_names("hf").optimizer}
    if distributed:
        expected["master"] = dict(theirs.with_names("hf"))
    assert same_states(replace(theirs, optimizer=expected), mine)
    files = {path.parent.name: TorchFile.open(LocalFolder(path.parent).file(path.name)) for path in tmp_path.rglob("model_*.pt")}
    has_two = {type(file.root["optimizer"]) is list for file in files.values()}
    assert has_two == {"ep" in mesh}
    if distributed and "ep" in mesh:
        for path in tmp_path.rglob("distrib_optim.pt"):
            dense, experts = TorchFile.open(LocalFolder(path.parent).file(path.name)).root
            assert (dense is None) == path.parent.name.endswith("_001")
            assert experts["buckets_coalesced"] is True


def test_what_legacy_megatron_cannot_hold_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    src, out = trained(tmp_path), tmp_path / "out"
    for meta, why in (
        ({"param_groups": [GROUP]}, r"told nowhere.*Megatron\(steps=...\)"),
        ({"step": 7}, r"are not all told: lr, betas, eps, weight_decay lack; say them with Megatron\("),
        (
            {"step": 7, "param_groups": [{**GROUP, "wd_mult": wd, "lr_mult": x} for wd in (1.0, 0.0) for x in (1.0, 2.0)]},
            "param groups do not tell which of them embedding",
        ),
    ):
        told = with_views(replace(src, meta={**src.meta, "optimizer": meta}, views={}))
        with pytest.raises(LayoutError, match=why):
            meshload.convert(told, out, to="megatron", optimizer=True)
    with pytest.raises(LayoutError, match=r"Megatron has exp_avg_sq of all weights; of 27, .* lack it"):
        meshload.convert(src, out, to="megatron", optimizer=["exp_avg"])
    half = trained(tmp_path / "half", "float16")
    with pytest.raises(LayoutError, match=r"gradients of float16 .* told nowhere; say Megatron\(distributed_optimizer=False\)"):
        meshload.convert(half, out, to="megatron", optimizer=True)
    assert not list(tmp_path.glob("*out*"))
    meshload.convert(half, out, to=Megatron(distributed_optimizer=False), optimizer=True)
    assert set(meshload.open(out).optimizer) == {"exp_avg", "exp_avg_sq", "master"}


FORMS = {
    "universal": ("universal", None),
    "core": (MegatronCore(), "tp=2"),
    "core_plain": (MegatronCore(distributed_optimizer=False), "pp=2,tp=2"),
    "legacy": (Megatron(), "pp=2,tp=2"),
    "legacy_plain": (Megatron(distributed_optimizer=False, virtual=2), "pp=2,tp=2"),
}


def test_megatrons_forms_made_of_one_another_are_those_made_of_the_source(tmp_path: Path) -> None:
    src = trained(tmp_path, "bfloat16", masters=True)
    for form, (to, mesh) in FORMS.items():
        meshload.convert(src, tmp_path / form, to=to, mesh=mesh, optimizer=True)
    for one, other in (*pairwise(FORMS), ("legacy_plain", "core")):
        to, mesh = FORMS[other]
        out = tmp_path / f"{one} to {other}"
        meshload.convert(tmp_path / one, out, to=to, mesh=mesh, config=LLAMA, optimizer=True)
        assert differing(tmp_path / other, out) == [], (one, other)
