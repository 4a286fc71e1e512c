"""Saving live tensors: by four processes that torchrun starts, by JAX's devices, and by one process alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.digests import of_arrays
from meshload.testing import read_safetensors

from .test_cases import LLAMA, llama

HERE = Path(__file__).parent
TIED = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 6,
    "intermediate_size": 16,
    "tie_word_embeddings": True,
}
CHECKS = re.findall(r"^def (check_\w+)", (HERE / "checks_saving.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, save_qwen2: Callable[..., None]) -> list[dict[str, str]]:
    """Return what each rank says went wrong, by check: a tied Qwen2 whose sizes divide by 4, but for the vocabulary."""
    folder, out = tmp_path_factory.mktemp("qwen2"), tmp_path_factory.mktemp("saved")
    save_qwen2(folder, "bfloat16")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    program = [*launch, str(HERE / "checks_saving.py"), str(folder), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    files = sorted(out.glob("rank*.json"))
    assert len(files) == 4, done.stderr[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("check", CHECKS)
def test_on_four_processes(told: list[dict[str, str]], check: str) -> None:
    assert [of.get(check, "an earlier check failed") for of in told] == [""] * 4


def test_one_process_saves_a_dict_of_arrays(tmp_path: Path) -> None:
    arrays = {"a.b": np.arange(6, dtype="i2").reshape(2, 3), "c": np.full((), 7, "f4"), "empty": np.zeros((0, 4), "f2")}
    meshload.save(tmp_path / "out", arrays, to="hf")
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in found.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()
    }


@pytest.mark.parametrize("to", ["hf", "orbax", "dcp"])
def test_b15_live_tensors_that_share_memory_are_saved_under_each_name(to: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    flat = torch.arange(24.0)
    state = {**module.state_dict(), "first": flat[:12].view(3, 4), "second": flat[8:20].view(4, 3)}
    for folder, tensors in (("module", module), ("state", state)):
        meshload.save(tmp_path / folder, tensors, to=to)
        found = meshload.open(tmp_path / folder)
        expected = tensors.state_dict() if tensors is module else tensors
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert np.asarray(found[name]).tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize("to", ["hf", "orbax", "dcp"])
def test_b15_what_the_config_ties_is_saved_once_from_one_memory(to: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tied = torch.arange(48.0).reshape(6, 8)
    arrays = {"lm_head.weight": tied, "model.embed_tokens.weight": tied, "model.norm.weight": torch.ones(8)}
    meshload.save(tmp_path / "out", arrays, to=to, config=TIED)
    found = meshload.open(tmp_path / "out", config=TIED)
    assert set(found) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert np.asarray(found["lm_head.weight"]).tobytes() == tied.numpy().tobytes()


def test_what_is_no_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="'step': int"):
        meshload.save(tmp_path / "out", {"a": np.zeros(2), "step": 3}, to="hf")
    with pytest.raises(meshload.LayoutError, match="tensors="):
        meshload.save(tmp_path / "out", {}, to="hf")


@pytest.mark.parametrize("to", ["hf", "orbax", "dcp"])
def test_arrays_of_the_other_byte_order_are_saved_with_their_values(to: str, tmp_path: Path) -> None:
    values = np.arange(6, dtype=">f4").reshape(2, 3)
    meshload.save(tmp_path / "out", {"w": values}, to=to)
    assert np.asarray(meshload.open(tmp_path / "out")["w"]).tolist() == values.tolist()
    told = meshload.digest(tmp_path / "out").arrays["w"]
    assert told == of_arrays({"w": values}).arrays["w"] == of_arrays({"w": values.astype("<f4")}).arrays["w"]


@pytest.mark.parametrize(
    "arrays",
    [{"w": np.asarray([1, "x"], object)}, {"w": np.asarray(["x"])}, {"w": np.zeros(2, [("a", "f4")])}, {5: np.ones(2)}],
    ids=["objects", "text", "fields", "a number for a name"],
)
def test_what_holds_no_numbers_or_has_no_name_is_told(arrays: Any, tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="arrays of numbers were expected"):
        meshload.save(tmp_path / "out", arrays, to="hf")
    assert os.listdir(tmp_path) == []


def test_sparse_tensors_of_torch_are_told_and_views_of_one_element_are_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(meshload.LayoutError, match=r"'w': torch\.sparse_coo"):
        meshload.save(tmp_path / "out", {"w": torch.eye(3).to_sparse()}, to="hf")
    meshload.save(tmp_path / "out", {"w": torch.arange(6.0)[1:3:2], "n": torch.tensor([1 + 2j]).conj().imag}, to="hf")
    assert {n: np.asarray(a).tolist() for n, a in meshload.open(tmp_path / "out").items()} == {"n": [-2.0], "w": [1.0]}


@pytest.mark.parametrize("to", ["hf", "orbax", "megatron"])
def test_a_config_of_another_model_is_refused_before_anything_is_written(to: str, tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match=r"its shape is .*; llama's config gives"):
        meshload.save(tmp_path / "out", llama(), to=to, config=LLAMA | {"hidden_size": 2 * LLAMA["hidden_size"]})
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_no_text_is_refused_by_orbax(tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="no text"):
        meshload.save(tmp_path / "out", {"\ud800": np.ones(2)}, to="orbax")
    assert os.listdir(tmp_path) == []


def test_tied_arrays_that_differ_are_not_saved_as_one(tmp_path: Path) -> None:
    arrays = {"model.embed_tokens.weight": np.ones((6, 8), "f4"), "lm_head.weight": np.ones((6, 8), "f4")}
    meshload.save(tmp_path / "same", arrays, to="hf", config=TIED)
    assert list(read_safetensors(tmp_path / "same" / "model.safetensors")) == ["model.embed_tokens.weight"]
    arrays["lm_head.weight"][3, 4] = 2
    with pytest.raises(meshload.LayoutError, match=r"model\.embed_tokens\.weight: the config ties"):
        meshload.save(tmp_path / "other", arrays, to="hf", config=TIED)


def test_every_dtype_and_every_stride_of_torch_is_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(64.0).reshape(8, 8)
    tensors = {
        "bfloat16": whole.bfloat16(),
        "float8": whole.to(torch.float8_e4m3fn),
        "bool": whole > 5,
        "transposed": whole.t(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "stepped": whole[::2, 1::3].requires_grad_(),
    }
    meshload.save(tmp_path / "out", tensors, to="hf")
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        assert found[name].tobytes() == tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), name
    with pytest.raises(meshload.LayoutError, match="weight: tensors on the meta device hold no values"):
        meshload.save(tmp_path / "meta", torch.nn.Linear(2, 2, bias=False, device="meta"), to="hf")


def test_packed_fours_of_torch_are_saved_as_such_or_that_is_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {"w": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)}
    for to in ("hf", "dcp"):
        meshload.save(tmp_path / to, tensors, to=to)
        found = meshload.restore(tmp_path / to, layout="replicated")["w"]
        assert (found.dtype, tuple(found.shape)) == (torch.float4_e2m1fn_x2, (2, 4))
        assert found.view(torch.uint8).flatten().tolist() == list(range(8))
    with pytest.warns(meshload.MeshloadWarning, match=r"orbax has no dtype for w \(F4\)") as told:
        meshload.save(tmp_path / "orbax", tensors, to="orbax")
    assert [w.filename for w in told] == [__file__]


def test_processes_without_a_group_are_told_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(meshload.LayoutError, match="2 processes were launched, and they have no process group"):
        meshload.save(tmp_path / "out", {"a": np.zeros(2)}, to="hf")
    assert not (tmp_path / "out").exists()


def test_ranks_of_a_mesh_that_do_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="mesh"):
        meshload.save(tmp_path / "out", {"a": np.zeros(2)}, mesh="tp=2", layout={"*": ("tp",)}, to="hf")


JAX = """
import sys, json
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import meshload
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("x", "y"))
def array(values, *axes):
    return jax.device_put(values, NamedSharding(mesh, P(*axes)))
kernel = np.arange(32, dtype=np.float32).reshape(4, 8)
tree = {
    "layer": {"kernel": array(kernel, "x", "y"), "bias": array(np.arange(8, dtype=np.float32))},
    "rows": array(np.arange(12, dtype=np.int32).reshape(12, 1), ("y", "x")),
    "plain": np.arange(3.0),
}
for to in ("hf", "orbax"):
    meshload.save(f"{sys.argv[1]}/{to}", tree, to=to)
    found = meshload.open(f"{sys.argv[1]}/{to}")
    leaves = {**{f"layer.{name}": leaf for name, leaf in tree["layer"].items()}, "rows": tree["rows"], "plain": tree["plain"]}
    for name, leaf in leaves.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), (to, name)
print(json.dumps({n: len(a.pieces) for n, a in found.arrays.items()}))
"""


def test_jax_arrays_are_saved_from_all_devices(tmp_path: Path, run_python: Callable[..., str]) -> None:
    pytest.importorskip("jax")
    out = run_python(JAX, tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"})
    assert json.loads(out.splitlines()[-1]) == {"layer.bias": 1, "layer.kernel": 4, "plain": 1, "rows": 4}
