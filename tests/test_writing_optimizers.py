"""Optimizers' states that are written: they are read back bit for bit, and torch's own AdamW goes on with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload import Checkpoint, LayoutError
from meshload.testing import ramp, same_bits, write_checkpoint
from meshload_adapters.formats.dcp import DCP

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
    meshload.convert(several, tmp_path / "one", to=DCP(hyperparameters={"lr": 0.3}), optimizer=True)
    found = meshload.open(tmp_path / "one")
    assert dict(found.meta["objects"]) == {"optim.param_groups.0.lr": 0.3, "optim.param_groups.0.params": list(arrays)}
    meshload.convert(src, tmp_path / "flat", to=DCP(steps=3, flat=True, hyperparameters={"lr": 0.3}), optimizer=True)
    found = meshload.open(tmp_path / "flat")
    assert dict(found.meta["objects"]) == {f"optim.param_groups.{n}.lr": 0.3 for n in arrays}
    assert same_states(src, found)
    assert steps(found) == dict.fromkeys(arrays, 3.0)


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
