"""Frameworks: what filled buffers become, and what a `like` wants. Several devices and processes: `checks_*.py`, run beside."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import meshload
from meshload.box import whole
from meshload.errors import LayoutError, MeshloadWarning, MissingArray
from meshload.frameworks import Placement, Slice, framework_of, installed
from meshload.testing import FrameworkSuite, ramp, read_safetensors, same_bits, write_safetensors
from meshload_adapters.frameworks.jax import Jax
from meshload_adapters.frameworks.numpy import NumPy
from meshload_adapters.frameworks.torch import DTensors, Torch, numpy_dtype

HERE = Path(__file__).parent

SAFETENSORS = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def patterns(dtype: Any) -> np.ndarray[Any, Any]:
    """Return rows of bit patterns: all of them for one and two bytes, NaN payloads and denormals among them."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.tile(np.asarray([True, False, True, True]), (4, 1))
    if kind.itemsize <= 2:
        return np.arange(256**kind.itemsize).astype(f"u{kind.itemsize}").view(kind).reshape(4, -1)
    rows = np.random.default_rng(0).integers(0, 256, (4, 64 * kind.itemsize), np.uint8)
    return rows.view(kind)


def write_raw(file: Path, arrays: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write a safetensors file of dtypes that NumPy may lack."""
    header, at = {}, 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in arrays.values()))
    return file


@pytest.fixture(scope="session")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = {name: patterns(dtype) for name, dtype in SAFETENSORS.items()}
    folder = tmp_path_factory.mktemp("every_dtype")
    return write_raw(folder / "model.safetensors", {n: (n, a.shape, a.tobytes()) for n, a in arrays.items()})


@pytest.fixture(scope="session")
def odd_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scalars = {"half": np.asarray(3.5, np.float32), "step": np.asarray(2**40 + 1, np.int64)}
    empty = {"rows": np.zeros((2, 0), np.float32), "none": np.zeros((0, 4), np.float32)}
    thin = {"thin": ramp("thin", (3, 1, 6, 2)), "flat": ramp("flat", (1, 4))}
    return write_safetensors(tmp_path_factory.mktemp("odd") / "model.safetensors", {**scalars, **empty, **thin})


class RestoreSuite(FrameworkSuite):
    """What `restore` gives, whichever the framework."""

    def _back(self, tensor: Any) -> np.ndarray[Any, Any]:
        return type(self).back(tensor)

    def _restore(self, path: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
        found = meshload.restore(path, into=self.framework.name, **options)
        return {name: self._back(tensor) for name, tensor in found.items()}

    def test_every_bit_pattern_of_every_dtype_comes_back(self, every_dtype: Path) -> None:
        """B54."""
        found = self._restore(every_dtype)
        assert [n for n, dtype in SAFETENSORS.items() if not same_bits(found[n], patterns(dtype))] == []

    @pytest.mark.parametrize("rank", [0, 1])
    def test_replicated_is_all_on_each_rank(self, every_dtype: Path, rank: int) -> None:
        found = self._restore(every_dtype, mesh="tp=2", rank=rank, layout="replicated")
        assert [n for n, dtype in SAFETENSORS.items() if not same_bits(found[n], patterns(dtype))] == []

    @pytest.mark.parametrize("rank", range(6))
    def test_patterns_of_names_cut_rows_and_columns(self, every_dtype: Path, rank: int) -> None:
        found = self._restore(every_dtype, mesh="dp=2,tp=3", rank=rank, layout={"F8*": ("dp",), "*": (None, "tp")})
        dp, tp = divmod(rank, 3)
        for name, dtype in SAFETENSORS.items():
            full = patterns(dtype)
            size = -(-full.shape[1] // 3)
            expected = full[2 * dp : 2 * dp + 2] if name.startswith("F8") else full[:, tp * size : (tp + 1) * size]
            assert same_bits(found[name], expected), name

    def test_arrays_of_no_dims_are_whole_on_each_rank(self, odd_shapes: Path) -> None:
        """B52."""
        for rank in (0, 1):
            found = self._restore(odd_shapes, mesh="tp=2", rank=rank, layout={"*": ()})
            assert same_bits(found["half"], np.asarray(3.5, np.float32))
            assert same_bits(found["step"], np.asarray(2**40 + 1, np.int64))

    def test_arrays_of_no_elements_are_cut_like_others(self, odd_shapes: Path) -> None:
        found = self._restore(odd_shapes, mesh="tp=2", rank=1, layout={"rows": ("tp",), "none": ("tp",), "*": ()})
        assert found["rows"].shape == (1, 0)
        assert found["none"].shape == (0, 4)

    def test_thin_arrays_are_row_major(self, odd_shapes: Path) -> None:
        """B57."""
        found = self._restore(odd_shapes)
        assert same_bits(found["thin"], ramp("thin", (3, 1, 6, 2)))
        assert same_bits(found["flat"], ramp("flat", (1, 4)))

    def test_dtype_casts_floating_arrays_and_no_others(self, tmp_path: Path) -> None:
        values = np.asarray([1.0, 1.00390625, -3.0], np.float32)
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values, "step": np.arange(3)})
        found = self._restore(path, dtype="bf16")
        assert same_bits(found["w"], values.astype(ml_dtypes.bfloat16))
        assert same_bits(found["step"], np.arange(3))


# --- numpy ------------------------------------------------------------------------------------------------------------


class TestNumPy(RestoreSuite):
    framework = NumPy()
    back = staticmethod(lambda array: array)
    dtypes = tuple(SAFETENSORS.values())

    def test_arrays_are_writable(self, odd_shapes: Path) -> None:
        found = meshload.restore(odd_shapes, into="numpy")
        assert all(a.flags.writeable and a.flags.c_contiguous for a in found.values())

    def test_like_is_a_dict_with_the_same_keys_in_order(self, odd_shapes: Path) -> None:
        like = {"thin": np.empty((3, 1, 6, 2), np.float64), "half": np.empty((), np.float32)}
        with pytest.warns(MeshloadWarning, match="belong to nothing that is wanted"):
            found = meshload.restore(odd_shapes, like=like)
        assert list(found) == ["thin", "half"]
        assert found["thin"].dtype == np.float64

    def test_devices_are_refused(self, odd_shapes: Path) -> None:
        with pytest.raises(LayoutError, match="main memory"):
            meshload.restore(odd_shapes, into="numpy", device="cuda")


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_back(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(tensor.dtype)).reshape(tuple(tensor.shape))


class TestTorch(RestoreSuite):
    framework = Torch()
    back = staticmethod(torch_back)
    dtypes = tuple(SAFETENSORS.values())

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint64, np.bool_])
    def test_tensors_own_the_memory_that_was_filled(self, dtype: Any) -> None:
        values = ramp("w", (4, 4), dtype)
        tensor = Torch().tensor([Slice(0, whole((4, 4)), values)], Placement((4, 4)))
        assert tensor.data_ptr() == values.__array_interface__["data"][0]
        expected = values.copy()
        del values
        gc.collect()
        assert same_bits(torch_back(tensor), expected)

    def test_tensors_are_contiguous_and_writable(self, odd_shapes: Path) -> None:
        for name, tensor in meshload.restore(odd_shapes).items():
            assert tensor.is_contiguous(), name
            tensor.add_(1)
        assert tensor.stride() == torch.empty(tensor.shape).stride()

    def test_bytes_of_packed_fours_become_torchs_dtype(self, tmp_path: Path) -> None:
        path = write_raw(tmp_path / "model.safetensors", {"w": ("F4", (2, 8), bytes(range(8)))})
        found = meshload.restore(path)["w"]
        assert (found.dtype, tuple(found.shape)) == (torch.float4_e2m1fn_x2, (2, 4))
        assert found.view(torch.uint8).flatten().tolist() == list(range(8))

    def test_a_dtype_that_torch_lacks_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="no dtype int4"):
            Torch().tensor([Slice(0, whole((2,)), np.zeros(2, ml_dtypes.int4))], Placement((2,)))

    def test_the_meta_device_is_refused(self, odd_shapes: Path) -> None:
        with pytest.raises(LayoutError, match="holds no values"):
            meshload.restore(odd_shapes, device="meta")

    def test_dtypes_map_both_ways(self) -> None:
        for dtype in self.dtypes:
            tensor = Torch().tensor([Slice(0, whole((1,)), np.zeros(1, dtype))], Placement((1,)))
            assert Torch().dtype(tensor.dtype) == np.dtype(dtype)

    def test_a_torch_dtype_casts(self, odd_shapes: Path) -> None:
        assert meshload.restore(odd_shapes, dtype=torch.bfloat16)["half"].dtype == torch.bfloat16

    def test_like_is_a_new_state_dict_with_the_same_keys_in_order(self, odd_shapes: Path) -> None:
        like = {"thin": torch.empty(3, 1, 6, 2, dtype=torch.float64), "half": torch.empty(())}
        found = meshload.restore(odd_shapes, like=like, exclude=["step", "rows", "none", "flat"])
        assert list(found) == ["thin", "half"]
        assert found is not like
        assert found["thin"].dtype == torch.float64

    def test_names_that_are_ignored_are_left_out_of_a_state_dict(self, odd_shapes: Path) -> None:
        like = {"half": torch.empty(()), "else": torch.empty(2)}
        with pytest.raises(MissingArray, match="else"):
            meshload.restore(odd_shapes, like=like, exclude=["[!he]*"])
        found = meshload.restore(odd_shapes, like=like, exclude=["[!he]*"], missing="ignore")
        assert list(found) == ["half"]

    def test_wrappers_in_the_names_of_a_like_are_seen_through(self, odd_shapes: Path) -> None:
        """B83."""
        like = {"_orig_mod.module.half": torch.empty(()), "_orig_mod.module.flat": torch.empty(1, 4)}
        found = meshload.restore(odd_shapes, like=like, include=["half", "flat"])
        assert list(found) == list(like)


class Tied(torch.nn.Module):
    """Two names of one weight, a buffer that is kept and one that is not; no family that a table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5, bias=False)
        self.last = torch.nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)


TIED = {"first.weight": ramp("first", (5, 3)), "frozen": ramp("frozen", (2,)), "mean": ramp("mean", (4,))}


def on_meta(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("meta"):
        return make()


def equal(tensor: torch.Tensor, values: Any) -> bool:
    return same_bits(torch_back(tensor), values)


class TestModules:
    def test_a_module_on_the_meta_device_is_filled(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        module = on_meta(Tied)
        module.frozen.tag = "kept"
        with pytest.warns(MeshloadWarning, match="^table: not in the checkpoint, still on the meta device") as told:
            found = meshload.restore(path, like=module)
        assert len(told) == 1
        assert found is module
        assert equal(module.first.weight, TIED["first.weight"])
        assert equal(module.mean, TIED["mean"])
        assert module.last.weight is module.first.weight
        assert (module.first.weight.requires_grad, module.frozen.requires_grad) == (True, False)
        assert module.frozen.tag == "kept"

    def test_a_tied_weight_is_served_by_either_of_its_names(self, tmp_path: Path) -> None:
        renamed = {("last.weight" if n == "first.weight" else n): a for n, a in TIED.items()}
        path = write_safetensors(tmp_path / "model.safetensors", renamed)
        module = meshload.restore(path, like=Tied())
        assert module.last.weight is module.first.weight
        assert equal(module.first.weight, TIED["first.weight"])

    def test_a_tied_weight_that_is_stored_twice_alike_is_one(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {**TIED, "last.weight": TIED["first.weight"]})
        module = meshload.restore(path, like=Tied())
        assert module.last.weight is module.first.weight

    def test_a_tied_weight_that_is_stored_twice_differently_is_an_error(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {**TIED, "last.weight": TIED["first.weight"] + 1})
        module = Tied()
        before = {n: t.clone() for n, t in module.state_dict().items()}
        with pytest.raises(LayoutError, match=r"first.weight and last.weight are one tensor"):
            meshload.restore(path, like=module)
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
        meshload.restore(path, like=module, exclude="last.weight")
        assert equal(module.last.weight, TIED["first.weight"])

    def test_tied_names_of_a_state_dict_share_their_memory(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        found = meshload.restore(path, like=Tied().state_dict())
        assert found["first.weight"] is found["last.weight"]

    def test_a_module_with_values_is_filled_in_place(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        module = Tied()
        weight, place = module.first.weight, module.first.weight.data_ptr()
        meshload.restore(path, like=module)
        assert module.first.weight is weight
        assert weight.data_ptr() == place
        assert equal(weight, TIED["first.weight"])

    def test_values_take_the_modules_dtype_or_the_one_that_is_given(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        assert meshload.restore(path, like=Tied().bfloat16()).first.weight.dtype == torch.bfloat16
        module = meshload.restore(path, like=Tied().bfloat16(), dtype="fp32")
        assert module.first.weight.dtype == torch.float32
        assert module.last.weight is module.first.weight

    @pytest.mark.parametrize("fault", ["missing", "shape"])
    def test_a_module_is_never_left_half_filled(self, tmp_path: Path, fault: str) -> None:
        arrays = dict(TIED)
        if fault == "missing":
            del arrays["mean"]
        else:
            arrays["mean"] = ramp("mean", (5,))
        path = write_safetensors(tmp_path / "model.safetensors", arrays)
        module = Tied()
        before = {n: t.clone() for n, t in module.state_dict().items()}
        with pytest.raises((MissingArray, LayoutError), match="mean"):
            meshload.restore(path, like=module)
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())

    def test_what_is_ignored_stays_on_the_meta_device_and_is_told(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {n: a for n, a in TIED.items() if n != "mean"})
        with pytest.warns(MeshloadWarning, match="^mean, table: not in the checkpoint"):
            module = meshload.restore(path, like=on_meta(Tied), missing="ignore")
        assert module.mean.is_meta

    def test_a_compiled_module_is_filled(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        module = torch.nn.Module()
        module._orig_mod = Tied()
        meshload.restore(path, like=module)
        assert equal(module._orig_mod.mean, TIED["mean"])

    @pytest.mark.parametrize("name", ["qwen2_tied_single", "llama_gqa_sharded_bf16", "mixtral_sharded", "gpt_neox_fused_qkv"])
    def test_a_transformers_model_on_the_meta_device_is_filled(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        path = hf_fixture(name)
        config = transformers.AutoConfig.from_pretrained(path / "checkpoint")
        module = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config))
        with pytest.warns(MeshloadWarning, match="inv_freq"):
            meshload.restore(path / "checkpoint", like=module)
        golden = read_safetensors(path / "golden.safetensors")
        state = module.state_dict()
        assert set(state) == set(golden)
        assert [n for n in golden if not equal(state[n], golden[n])] == []
        tied = config.tie_word_embeddings
        assert (module.lm_head.weight is module.get_input_embeddings().weight) == tied


def hf_fixture(name: str) -> Path:
    for folder in (HERE / "golden" / "hf", HERE.parent.parent / "shared" / "fixtures" / "hf"):
        if (folder / name).is_dir():
            return folder / name
    pytest.skip(f"the golden folder hf/{name} is not here")


# --- DTensor ----------------------------------------------------------------------------------------------------------


def torch_shard(full: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    """Cut by torch's own placements, mesh dim by mesh dim."""
    for size, at, placement in zip(mesh.mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if not placement.is_replicate():
            full = placement._split_tensor(full, size, with_padding=False)[0][at]
    return full


def placements_of(text: str) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    made = {
        "R": lambda _: Replicate(),
        "S": lambda n: Shard(int(n)),
        "Z": lambda n: _StridedShard(int(n[0]), split_factor=int(n[1])),
    }
    return tuple(made[word[0]](word[1:]) for word in text.split())


class TestDTensors:
    @pytest.mark.parametrize("shape", [(8, 6), (13, 5), (3, 1), (1, 7)])
    @pytest.mark.parametrize("text", ["S0 S0", "S0 S1", "R S0", "S1 R", "Z02 S0", "Z02 R", "R Z12", "Z03 S1", "R R"])
    def test_a_like_wants_what_its_placements_give(
        self, tmp_path: Path, pretend: Callable[..., Any], shape: tuple[int, ...], text: str
    ) -> None:
        from torch.distributed.tensor import DTensor

        values = ramp("w", shape)
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values})
        for rank in range(4):
            mesh, placements = pretend(rank, (2, 2), ("a", "b")), placements_of(text)
            expected = torch_shard(torch.from_numpy(values), mesh, placements)
            like = DTensor.from_local(
                torch.empty_like(expected, device="meta"),
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=(shape[1], 1),
            )
            found = meshload.restore(path, like={"w": like})["w"]
            assert (tuple(found.shape), found.placements) == (shape, placements)
            assert torch.equal(found.to_local(), expected), (rank, found.to_local(), expected)

    @pytest.mark.parametrize("shape", [(8, 12), (13, 5), (2, 3)])
    @pytest.mark.parametrize("axes", [("tp",), (None, "tp"), ("dp", "tp"), (("dp", "tp"),), ("tp", "dp"), (), (None, ("dp", "tp"))])
    def test_dtensors_are_cut_by_axes_in_the_order_of_the_mesh(
        self, tmp_path: Path, pretend: Callable[..., Any], shape: tuple[int, ...], axes: Any
    ) -> None:
        values = ramp("w", shape)
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values})
        for rank in range(6):
            mesh = pretend(rank, (2, 3), ("dp", "tp"))
            found = meshload.restore(path, mesh=mesh, into="dtensor", layout={"w": axes})["w"]
            assert tuple(found.shape) == shape
            assert torch.equal(found.to_local(), torch_shard(torch.from_numpy(values), mesh, found.placements))

    def test_axes_against_the_order_of_the_mesh_are_strided(self, tmp_path: Path, pretend: Callable[..., Any]) -> None:
        values = ramp("w", (12, 2))
        path = write_safetensors(tmp_path / "model.safetensors", {"w": values})
        for rank in range(6):
            mesh = pretend(rank, (2, 3), ("dp", "tp"))
            found = meshload.restore(path, mesh=mesh, into="dtensor", layout={"w": (("tp", "dp"),)})["w"]
            dp, tp = divmod(rank, 3)
            assert found.placements == placements_of("Z03 S0")
            assert equal(found.to_local(), values[tp * 4 + dp * 2 : tp * 4 + dp * 2 + 2])

    def test_axes_that_dtensor_cannot_say_are_refused(self, tmp_path: Path, pretend: Callable[..., Any]) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {"w": ramp("w", (20, 2))})
        mesh = pretend(0, (3, 3), ("dp", "tp"))
        with pytest.raises(LayoutError, match="as a DTensor's"):
            meshload.restore(path, mesh=mesh, into="dtensor", layout={"w": (("tp", "dp"),)})

    def test_partial_placements_are_refused_by_name(self, tmp_path: Path, pretend: Callable[..., Any]) -> None:
        from torch.distributed.tensor import DTensor, Partial

        path = write_safetensors(tmp_path / "model.safetensors", {"w": ramp("w", (4,))})
        like = DTensor.from_local(torch.empty(4), pretend(0, (2,), ("tp",)), [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"^w: placement .*Shard or Replicate"):
            meshload.restore(path, like={"w": like})

    def test_another_whole_shape_is_refused(self, tmp_path: Path, pretend: Callable[..., Any]) -> None:
        from torch.distributed.tensor import DTensor, Shard

        path = write_safetensors(tmp_path / "model.safetensors", {"w": ramp("w", (6,))})
        like = DTensor.from_local(torch.empty(2), pretend(0, (2,), ("tp",)), [Shard(0)], run_check=False)
        with pytest.raises(LayoutError, match=r"w: .*\(4,\).*\(6,\)"):
            meshload.restore(path, like={"w": like})

    def test_a_stage_is_on_its_part_of_the_mesh(self, pretend: Callable[..., Any]) -> None:
        mesh = pretend(3, (2, 2), ("pp", "tp"))
        found = meshload.restore(hf_fixture("llama_gqa_sharded_bf16") / "checkpoint", mesh=mesh, into="dtensor")
        assert "model.embed_tokens.weight" not in found
        assert found["lm_head.weight"].device_mesh.mesh_dim_names == ("tp",)
        assert {n.split(".")[2] for n in found if ".layers." in n} == {"2", "3"}

    def test_a_mesh_of_stages_alone_is_refused(self, pretend: Callable[..., Any]) -> None:
        mesh = pretend(0, (2,), ("pp",))
        with pytest.raises(LayoutError, match="leave no mesh"):
            meshload.restore(hf_fixture("llama_gqa_sharded_bf16") / "checkpoint", mesh=mesh, into="dtensor")

    def test_sizes_alone_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="span a mesh of its own"):
            meshload.restore(hf_fixture("llama_gqa_sharded_bf16") / "checkpoint", mesh="tp=2", rank=0, into="dtensor")

    def test_a_device_mesh_gives_plain_tensors_unless_dtensors_are_asked_for(self, pretend: Callable[..., Any]) -> None:
        mesh = pretend(1, (2,), ("tp",))
        assert framework_of(None, mesh).name == "torch"
        found = meshload.restore(hf_fixture("llama_gqa_sharded_bf16") / "checkpoint", mesh=mesh)
        assert type(found["lm_head.weight"]) is torch.Tensor
        assert found["lm_head.weight"].shape == (48, 32)

    def test_a_module_of_dtensors_is_filled(self, pretend: Callable[..., Any], tmp_path: Path) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

        path = write_safetensors(tmp_path / "model.safetensors", TIED)
        mesh, module = pretend(1, (2,), ("tp",)), on_meta(Tied)
        cut = torch.nn.Parameter(distribute_tensor(module.first.weight, mesh, [Shard(0)], src_data_rank=None))
        module.first.weight = module.last.weight = cut
        module.frozen = torch.nn.Parameter(
            distribute_tensor(module.frozen, mesh, [Replicate()], src_data_rank=None), requires_grad=False
        )
        with pytest.warns(MeshloadWarning, match="^table"):
            meshload.restore(path, like=module)
        assert isinstance(module.first.weight, DTensor)
        assert module.last.weight is module.first.weight
        assert equal(module.first.weight.to_local(), TIED["first.weight"][3:])
        assert equal(module.frozen.to_local(), TIED["frozen"])
        module.table = torch.zeros(4)
        weight, place = module.first.weight, module.first.weight.to_local().data_ptr()
        weight.detach().to_local().zero_()
        meshload.restore(path, like=module)
        assert module.first.weight is weight
        assert weight.to_local().data_ptr() == place
        assert equal(weight.to_local(), TIED["first.weight"][3:])


# --- jax --------------------------------------------------------------------------------------------------------------


class TestJax(RestoreSuite):
    framework = Jax()
    back = staticmethod(np.asarray)
    dtypes = (*SAFETENSORS.values(), ml_dtypes.float8_e4m3b11fnuz)

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.bool_])
    def test_aligned_memory_is_taken_without_a_copy_and_kept(self, tmp_path: Path, dtype: Any) -> None:
        raw = np.zeros(64 * 64 + 64, np.uint8)
        values = raw[-raw.ctypes.data % 64 :][: 16 * np.dtype(dtype).itemsize].view(dtype)
        values[...] = ramp("w", (16,), dtype)
        found = Jax().tensor([Slice(0, whole((16,)), values)], Placement((16,)))
        assert found.unsafe_buffer_pointer() == values.__array_interface__["data"][0]
        expected = values.copy()
        del raw, values
        gc.collect()
        assert same_bits(np.asarray(found), expected)

    def test_restored_arrays_lie_where_they_were_read(self, odd_shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        put = jax.device_put
        monkeypatch.setattr(jax, "device_put", lambda v, d: seen.extend(a.ctypes.data for a in v if a.size) or put(v, d))
        found = meshload.restore(odd_shapes, into="jax")
        assert sorted(a.unsafe_buffer_pointer() for a in found.values() if a.size) == sorted(seen)

    def test_integers_of_64_bits_are_not_narrowed(self, odd_shapes: Path) -> None:
        found = meshload.restore(odd_shapes, into="jax")["step"]
        assert not jax.config.jax_enable_x64
        assert found.dtype == np.int64
        assert int(np.asarray(found)) == 2**40 + 1

    def test_b57_arrays_with_dims_of_one_are_usable_in_jit(self, odd_shapes: Path) -> None:
        """B57."""
        found = meshload.restore(odd_shapes, into="jax")
        made = jax.jit(lambda tree: {"thin": tree["thin"] + 1, "flat": tree["flat"].T})({n: found[n] for n in ("thin", "flat")})
        assert same_bits(np.asarray(made["thin"]), ramp("thin", (3, 1, 6, 2)) + 1)
        assert same_bits(np.asarray(made["flat"]), ramp("flat", (1, 4)).T)

    @pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.float4_e2m1fn])
    def test_dtypes_of_less_than_a_byte_keep_their_values(self, dtype: Any) -> None:
        values = np.arange(-8 if "u" not in dtype.__name__ else 0, 8).astype(dtype)
        found = Jax().tensor([Slice(0, whole(values.shape), values)], Placement(values.shape))
        assert found.dtype == values.dtype
        assert same_bits(np.asarray(found), values)

    def test_donation_does_not_write_into_numpys_memory(self) -> None:
        raw = np.zeros(64 * 64 + 64, np.uint8)
        values = raw[-raw.ctypes.data % 64 :][:4096].view(np.float32)
        values[...] = 1
        found = Jax().tensor([Slice(0, whole((1024,)), values)], Placement((1024,)))
        jax.jit(lambda x: x + 1, donate_argnums=0)(found).block_until_ready()
        assert (values == 1).all()

    def test_a_device_is_taken_by_name_or_as_it_is(self, odd_shapes: Path) -> None:
        for device in ("cpu", jax.devices()[0]):
            assert meshload.restore(odd_shapes, into="jax", device=device)["half"].devices() == {jax.devices()[0]}

    def test_dtypes_of_jax_numpy_are_numpys(self, odd_shapes: Path) -> None:
        assert Jax().dtype(jnp.bfloat16) == np.dtype(ml_dtypes.bfloat16)
        assert meshload.restore(odd_shapes, into="jax", dtype=jnp.bfloat16)["half"].dtype == jnp.bfloat16


def test_parts_that_are_the_same_are_told_once() -> None:
    from meshload_adapters.frameworks.jax import _packed

    a, b = np.arange(100, dtype=np.uint8), np.arange(100, dtype=np.uint8)[::-1]
    places, data = _packed([a, b, a[:0], a.copy(), a[:50], b])
    assert places.tolist() == [[0, 100], [100, 100], [200, 0], [0, 100], [200, 50], [100, 100]]
    assert data.tobytes() == a.tobytes() + b.tobytes() + a[:50].tobytes()


def shape_of(values: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


TREE = {"layers.0.kernel": ramp("k0", (4, 3)), "layers.0.bias": ramp("b0", (3,)), "layers.1.kernel": ramp("k1", (4, 3))}
TREE |= {"layers.1.bias": ramp("b1", (3,)), "count": np.asarray(7, np.int32)}


class TestPytrees:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_safetensors(tmp_path / "model.safetensors", TREE)

    def like(self, sharding: Any = None) -> dict[str, Any]:
        layers = [Layer(*(shape_of(TREE[f"layers.{i}.{n}"], sharding) for n in ("kernel", "bias"))) for i in (0, 1)]
        return {"layers": layers, "count": shape_of(TREE["count"], sharding)}

    def check(self, found: Any) -> None:
        assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(self.like())
        for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
            assert same_bits(np.asarray(leaf), TREE[jax.tree_util.keystr(path, simple=True, separator=".")])

    def test_shapes_without_shardings(self, path: Path) -> None:
        self.check(meshload.restore(path, like=self.like()))

    def test_shapes_on_one_device(self, path: Path) -> None:
        self.check(meshload.restore(path, like=self.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))))

    def test_shapes_on_a_mesh(self, path: Path) -> None:
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
        self.check(meshload.restore(path, like=self.like(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))))

    def test_arrays(self, path: Path) -> None:
        zeros = jax.tree_util.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), self.like())
        self.check(meshload.restore(path, like=zeros))

    def test_the_dtype_of_a_leaf_is_given(self, path: Path) -> None:
        like = self.like()
        like["layers"][0].kernel = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
        assert meshload.restore(path, like=like)["layers"][0].kernel.dtype == jnp.bfloat16

    def test_states_of_nnx(self, tmp_path: Path) -> None:
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.eval_shape(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        state = nnx.state(model)
        names = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        arrays = dict(zip(names, (ramp("bias", (4,)), ramp("kernel", (3, 4))), strict=True))
        found = meshload.restore(write_safetensors(tmp_path / "model.safetensors", arrays), like=state)
        assert isinstance(found, nnx.State)
        nnx.update(model, found)
        assert same_bits(np.asarray(model.kernel[...]), ramp("kernel", (3, 4)))

    def test_a_leaf_that_is_missing_is_an_error_or_stays(self, path: Path) -> None:
        like = {**self.like(), "more": jax.ShapeDtypeStruct((2,), jnp.float32)}
        with pytest.raises(MissingArray, match="more"):
            meshload.restore(path, like=like)
        found = meshload.restore(path, like=like, missing="ignore")
        assert isinstance(found["more"], jax.ShapeDtypeStruct)

    def test_another_shape_is_refused(self, path: Path) -> None:
        with pytest.raises(LayoutError, match=r"count: .*\(1,\)"):
            meshload.restore(path, like={**self.like(), "count": jax.ShapeDtypeStruct((1,), jnp.int32)})

    @pytest.mark.parametrize("leaf", [jax.random.key(0), "text"])
    def test_a_leaf_that_is_no_array_is_refused_by_name(self, path: Path, leaf: Any) -> None:
        with pytest.raises(LayoutError, match=r"^other"):
            meshload.restore(path, like={**self.like(), "other": leaf}, into="jax")


# --- all --------------------------------------------------------------------------------------------------------------


def test_the_frameworks_are_installed() -> None:
    assert {"numpy", "torch", "dtensor", "jax"} <= set(installed())


def test_nothing_is_imported_to_ask_whose_a_thing_is() -> None:
    program = (
        "import sys, numpy; from meshload.frameworks import installed\n"
        "for f in installed().values(): f.owns({'a': numpy.zeros(1)}), f.owns(object()), f.world(), f.dtype(numpy.dtype('f4'))\n"
        "assert not {'torch', 'jax', 'flax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_dtensors_are_torchs() -> None:
    assert DTensors().spans
    assert not DTensors().owns({"w": torch.zeros(1)})


# --- several devices --------------------------------------------------------------------------------------------------


def checks_in(file: str) -> list[str]:
    """Return the names of the checks in a file that runs beside."""
    return re.findall(r"^def (check_\w+)", (HERE / file).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def on_eight_devices() -> dict[str, str]:
    folder = hf_fixture("llama_gqa_sharded_bf16")
    program = [sys.executable, str(HERE / "checks_jax.py"), str(folder / "checkpoint"), str(folder / "golden.safetensors")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("check", checks_in("checks_jax.py"))
def test_on_eight_devices(on_eight_devices: dict[str, str], check: str) -> None:
    assert on_eight_devices[check] == ""


def test_two_processes_hold_what_is_theirs() -> None:
    folder = hf_fixture("llama_gqa_sharded_bf16")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = [sys.executable, str(HERE / "checks_jax.py"), str(folder / "checkpoint"), str(folder / "golden.safetensors"), port]
    running = [subprocess.Popen([*program, i], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in "01"]
    told = [process.communicate(timeout=240)[1][-3000:] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
