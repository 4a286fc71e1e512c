"""torch.distributed.checkpoint, against golden folders, torch's own writer and reader, and damage."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import random
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
from hypothesis import given
from hypothesis import strategies as st

import meshload
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LayoutError, MeshloadWarning, MissingArray, MissingPieces, Overlap, SourceError
from meshload.formats import installed
from meshload.source import open_folder
from meshload.testing import (
    CountedFolder,
    FormatSuite,
    InMemory,
    ramp,
    read_safetensors,
    same_bits,
    write_checkpoint,
    write_safetensors,
)
from meshload_adapters import _distcp, _distcp_chunks
from meshload_adapters._distcp import Listing, read_listing
from meshload_adapters._distcp_chunks import Chunks
from meshload_adapters.formats.dcp import DCP
from meshload_adapters.formats.hf import HuggingFace

torch = pytest.importorskip("torch", reason="torch, which writes these files, is not installed")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint import filesystem, metadata  # noqa: E402

HERE = Path(__file__).parent


def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_dcp", HERE / "bench" / "dcp_metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCH = bench()
SHARED = HERE.parent.parent / "shared" / "fixtures"
GOLDEN = HERE / "golden" / "dcp"
CASES = {d.parent.name: d.parent for root in (SHARED / "dcp", GOLDEN) for d in sorted(root.glob("*/checkpoint"))}
CASES = {name: d for name, d in CASES.items() if (d / "checkpoint" / ".metadata").exists()}
LLAMA = SHARED / "dcp" / "llama_fsdp2_4_adamw"
QWEN = SHARED / "dcp" / "qwen2_tied_tp2_fsdp2_adamw"


# --- writing ----------------------------------------------------------------------------------------------------------


def saved(folder: Path, state: Mapping[str, Any], **options: Any) -> Path:
    """Save with torch's own writer, in this process alone."""
    writer = dcp.FileSystemWriter(folder, **options)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return folder


def by_hand(folder: Path, chunks: Mapping[str, Sequence[tuple[tuple[int, ...], Any]]], **options: Any) -> Path:
    """Write chunks of several ranks: key -> (offsets, values) of each, rank after rank; `options` change the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    files = {rank: io.BytesIO() for rank in range(max(map(len, chunks.values())))}
    for key, parts in chunks.items():
        described = []
        for rank, (at, values) in enumerate(parts):
            tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
            offset = files[rank].tell()
            torch.save(tensor, files[rank])
            place = filesystem._StorageInfo(f"__{rank}_0.distcp", offset, files[rank].tell() - offset)
            stored[metadata.MetadataIndex(key, torch.Size(at), rank)] = place
            described.append(metadata.ChunkStorageMetadata(torch.Size(at), tensor.size()))
        whole = np.max([np.add(c.offsets, c.sizes) for c in described], axis=0).tolist()
        tensors[key] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(tensor.dtype), torch.Size(options.get("size", whole)), described
        )
    for rank, file in files.items():
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    write_metadata(folder, metadata.Metadata(tensors, options.get("paths"), stored, version="1.0.0"))
    return folder


def write_metadata(folder: Path, found: Any, file: str = ".metadata", protocol: int = 4) -> None:
    (folder / file).write_bytes(pickle.dumps(found, protocol))


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def opened(path: Any, **options: Any) -> Checkpoint:
    return DCP(**options).open(open_folder(path))


def stored(path: Any) -> Checkpoint:
    return opened(path).views["stored"]()


def values(tensor: Any) -> Any:
    """Return a tensor's values as NumPy's, bit for bit."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


# --- what torch wrote -------------------------------------------------------------------------------------------------


class TestSuite(FormatSuite):
    format = DCP()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        for case in CASES.values():
            yield case / "checkpoint", read_safetensors(case / "golden.safetensors")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_tensor_is_among_arrays_moments_or_scalars(case: Path) -> None:
    found = opened(case / "checkpoint")
    moments = [a.name for kind in found.optimizer.values() for a in kind.values()]
    names = [*found, *moments, *found.meta["scalars"]]
    assert sorted(names) == sorted(read_safetensors(case / "golden.safetensors"))
    assert found.problems == ()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_moments_are_found_by_the_names_of_weights(case: Path) -> None:
    truth = read_safetensors(case / "golden.safetensors")
    for kind, arrays in opened(case / "checkpoint").optimizer.items():
        for weight, array in arrays.items():
            assert weight in truth
            keys = [f"{root}.state.{name}.{kind}" for root in ("optim", "optimizer") for name in (weight, weight[6:])]
            (key,) = [k for k in keys if k in truth]
            assert same_bits(array, truth[key])


@pytest.mark.parametrize("case", [LLAMA, QWEN], ids=["fsdp2", "tp2 fsdp2"])
@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "pp=2", "tp=2,pp=2", "dp=3", "pp=2,tp=2,dp=2"])
def test_ranks_get_the_same_slices_as_from_safetensors(case: Path, mesh: str, tmp_path: Path) -> None:
    if not case.exists():
        pytest.skip("the larger fixtures are not here")
    truth = read_safetensors(case / "golden.safetensors")
    config = meshload.formats.described(case / "config")
    weights = {n.removeprefix("model."): v for n, v in truth.items() if n.startswith("model.")}
    twin, averages = meshload.open(write_checkpoint(tmp_path / "weights", weights, config)), {}
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {n[len("optim.state.") : -len(f".{kind}")]: v for n, v in truth.items() if n.endswith(f".{kind}")}
        averages[kind] = dict(meshload.open(write_checkpoint(tmp_path / kind, moments, config)))
    checkpoint = meshload.open(case / "checkpoint", config=config)
    layout = meshload.Layout.default(dp="cut") if "dp" in mesh else None
    for rank in range(meshload.mesh.mesh_of(mesh).size):
        options: dict[str, Any] = {"mesh": mesh, "rank": rank, "layout": layout, "into": "numpy"}
        found = meshload.restore(checkpoint, optimizer=True, **options)
        expected = meshload.restore(replace(twin, optimizer=averages), optimizer=True, **options)
        assert set(found) == set(expected)
        assert [n for n, v in expected.items() if not same_bits(found[n], v)] == []


def test_names_without_a_table_are_cut_by_a_layout() -> None:
    truth = read_safetensors(GOLDEN / "titan" / "golden.safetensors")
    layout = {"*.wq.weight": ("tp", None), "*.wo.weight": (None, "tp"), "*": ()}
    for rank in range(2):
        found = meshload.restore(GOLDEN / "titan" / "checkpoint", mesh="tp=2", rank=rank, layout=layout, into="numpy")
        assert same_bits(found["layers.0.wq.weight"], truth["layers.0.wq.weight"][5 * rank : 5 * rank + 5])
        assert same_bits(found["layers.0.wo.weight"], truth["layers.0.wo.weight"][:, 5 * rank : 5 * rank + 5])
        assert same_bits(found["tok_embeddings.weight"], truth["tok_embeddings.weight"])


def test_torch_reads_the_same() -> None:
    for case in CASES.values():
        found = stored(case / "checkpoint")
        state = {name: torch.zeros(a.shape, dtype=getattr(torch, a.dtype.name)) for name, a in found.items()}
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=case / "checkpoint", no_dist=True)
        assert [name for name, tensor in state.items() if not same_bits(found[name], values(tensor))] == []


def test_every_dtype_and_shape_of_torchs_writer_is_read(tmp_path: Path) -> None:
    dtypes = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32"]
    dtypes += ["float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]
    state = {
        d: torch.arange(24, dtype=torch.uint8).repeat(16)[:192].view(getattr(torch, d) if d != "bool" else torch.uint8)
        for d in dtypes
    }
    state["bool"] = state["bool"] > 7
    state |= {"number": torch.tensor(3.5), "one": torch.tensor([7]), "none": torch.zeros(0, 4), "five": torch.rand(2, 1, 3, 1, 2)}
    folder = saved(tmp_path / "c", state)
    found = opened(folder)
    assert set(found) == set(state)
    assert [name for name, tensor in state.items() if not same_bits(found[name], values(tensor))] == []


def test_tensors_that_are_not_row_major_in_their_entries_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_distcp_chunks, "BLOCK", 256)
    wide = torch.arange(120, dtype=torch.float32)
    state = {
        "channels_last": wide.reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": wide.reshape(10, 12).t(),
        "permuted": wide.reshape(4, 5, 6).permute(2, 0, 1),
        "expanded": torch.arange(3).expand(4, 3),
        "sliced": wide.reshape(10, 12)[2:5, 3:7],
        "flipped": torch.arange(6).flip(0),
    }
    found = opened(saved(tmp_path / "c", state))
    for name, tensor in state.items():
        assert same_bits(found[name], values(tensor)), name
        assert same_bits(found[name][1:], values(tensor)[1:]), name
        assert same_bits(found[name].T, values(tensor).T), name
        assert same_bits(found[name][..., 1:3], values(tensor)[..., 1:3]), name


def test_entries_that_differ_in_nothing_but_their_strides_are_told_apart(tmp_path: Path) -> None:
    square = torch.arange(36.0).reshape(6, 6)
    state = {"a": square, "b": square.t(), "c": square + 1, "d": (square + 1).t()}
    for names in ("abcd", "badc"):
        found = meshload.restore(saved(tmp_path / names, {n: state[n] for n in names}), layout="replicated", into="numpy")
        assert [n for n in names if not same_bits(found[n], values(state[n]))] == []


def test_b37_a_rank_may_hold_several_chunks(tmp_path: Path) -> None:
    # a strided shard with split factor 2: rank 0 holds 10, 11, 14, 15 of 10 to 17
    parts = [((0,), [10, 11]), ((4,), [14, 15]), ((2,), [12, 13]), ((6,), [16, 17])]
    found = opened(by_hand(tmp_path, {"w": [(at, np.asarray(v)) for at, v in parts]}))
    assert same_bits(found["w"], np.arange(10, 18))
    assert len(found["w"].pieces) == 4


def test_old_zip_free_entries_are_read(tmp_path: Path) -> None:
    folder = by_hand(tmp_path, {"w": [((0, 0), ramp("w", (4, 3)))]})
    file = io.BytesIO()
    torch.save(torch.from_numpy(ramp("w", (4, 3))), file, _use_new_zipfile_serialization=False)
    (folder / "__0_0.distcp").write_bytes(file.getvalue())
    found = metadata_of(folder)
    found.storage_data = {key: filesystem._StorageInfo("__0_0.distcp", 0, len(file.getvalue())) for key in found.storage_data}
    write_metadata(folder, found)
    assert same_bits(opened(folder)["w"], ramp("w", (4, 3)))


def test_metadata_of_megatron_core_is_read_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = by_hand(tmp_path, {"w": [((0, 0), ramp("a", (2, 3))), ((2, 0), ramp("b", (2, 3)))]})
    name = "megatron.core.dist_checkpointing.strategies.torch"
    kind = type("MCoreMetadata", (metadata.Metadata,), {"__module__": name})  # as 0.15 has it
    for module in ("megatron", name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(sys.modules[name], "MCoreMetadata", kind, raising=False)
    found = kind(**vars(metadata_of(folder)))
    found.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}
    write_metadata(folder, found)
    assert b"MCoreMetadata" in (folder / ".metadata").read_bytes()
    assert same_bits(stored(folder)["w"], np.concatenate([ramp("a", (2, 3)), ramp("b", (2, 3))]))


def test_metadata_of_every_rank_is_put_together(tmp_path: Path) -> None:
    folder = by_hand(tmp_path, {"w": [((0, 0), ramp("a", (2, 3))), ((2, 0), ramp("b", (2, 3)))], "norm": [((0,), np.ones(3))] * 2})
    whole = metadata_of(folder)
    (folder / ".metadata").unlink()
    for rank in range(2):
        mine = {k: v for k, v in whole.storage_data.items() if v.relative_path.startswith(f"__{rank}_")}
        if rank == 0:
            mine[metadata.MetadataIndex("norm", torch.Size([0]), 0)] = filesystem._StorageInfo(
                "__0_0.distcp", *places_of(folder / "__0_0.distcp")[1]
            )
        tensors = {
            key: metadata.TensorStorageMetadata(
                t.properties, t.size, [c for c in t.chunks if metadata.MetadataIndex(key, c.offsets) in mine]
            )
            for key, t in whole.state_dict_metadata.items()
        }
        write_metadata(folder, metadata.Metadata(tensors, None, mine), f"__{rank}.metadata")
    assert DCP().matches(open_folder(folder))
    found = opened(folder)
    assert found.meta["metadata_files"] == ("__0.metadata", "__1.metadata")
    assert same_bits(found["w"], np.concatenate([ramp("a", (2, 3)), ramp("b", (2, 3))]))
    assert same_bits(found["norm"], np.ones(3))
    assert len(found["norm"].pieces) == 2  # copies, which check(copies=True) compares
    (folder / "__1.metadata").rename(folder / "__2.metadata")
    assert "__1.metadata" in opened(folder).problems[0].text
    (folder / "__2.metadata").unlink()
    assert "hold 6 elements, shape (4, 3) has 12" in opened(folder).unavailable["w"]


def places_of(file: Path) -> list[tuple[int, int]]:
    """Return offset and length of each zip in a file."""
    raw = file.read_bytes()
    starts = [i for i in range(len(raw)) if raw.startswith(b"PK\x03\x04", i) and b"archive/data.pkl" in raw[i : i + 50]]
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], len(raw)], strict=True)]


# --- the optimizer ----------------------------------------------------------------------------------------------------


def adam(named: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_numbered_states_have_names_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    model, optimizer = adam(named=True)
    found = opened(saved(tmp_path / "c", {"model": model.state_dict(), "optim": optimizer.state_dict()}))
    assert list(found.optimizer["exp_avg"]) == [f"model.{n}" for n in model.state_dict()]
    for number, name in enumerate(model.state_dict()):
        expected = optimizer.state_dict()["state"][number]["exp_avg"]
        assert same_bits(found.optimizer["exp_avg"][f"model.{name}"], values(expected))


def test_numbered_states_without_names_stay_ordinary_arrays(tmp_path: Path) -> None:
    model, optimizer = adam(named=False)
    found = opened(saved(tmp_path / "c", {"model": model.state_dict(), "optim": optimizer.state_dict()}))
    assert found.optimizer == {}
    assert "optim.state.2.exp_avg" in found
    assert "optim.state.2.step" in found.meta["scalars"]


def state_of(weights: Mapping[str, Any], root: str = "optim") -> dict[str, Any]:
    moments = {n: {"exp_avg": v + 1, "exp_avg_sq": v + 2, "step": torch.tensor(3.0)} for n, v in weights.items()}
    return {root: {"state": moments, "param_groups": [{"lr": 0.1, "params": list(weights)}]}}


def two() -> dict[str, Any]:
    return {"l1.weight": torch.arange(6.0).reshape(2, 3), "l2.weight": torch.arange(4.0)}


def test_b40_state_of_weights_that_are_frozen_by_now_is_readable(tmp_path: Path) -> None:
    weights = two()
    folder = saved(tmp_path / "c", {"model": weights, **state_of(weights)})
    found = meshload.restore(folder, optimizer=True, into="numpy", include=["model.l1.weight", "optimizer.*"])
    assert same_bits(opened(folder).optimizer["exp_avg"]["model.l2.weight"], values(weights["l2.weight"] + 1))
    assert same_bits(found["model.l1.weight"], values(weights["l1.weight"]))


def test_an_optimizer_alone_keeps_its_own_names(tmp_path: Path) -> None:
    found = opened(saved(tmp_path / "c", state_of(two())["optim"]))
    assert list(found) == []
    assert list(found.optimizer["exp_avg_sq"]) == ["l1.weight", "l2.weight"]


def test_a_copy_of_the_model_beside_it_does_not_take_its_moments(tmp_path: Path) -> None:
    weights = two()
    found = opened(saved(tmp_path / "c", {"ema": weights, "model": weights, **state_of(weights)}))
    assert list(found.optimizer["exp_avg"]) == ["model.l1.weight", "model.l2.weight"]


def test_of_two_models_that_fit_alike_one_is_asked_for(tmp_path: Path) -> None:
    weights = two()
    folder = saved(tmp_path / "c", {"actor": weights, "critic": weights, **state_of(weights)})
    with pytest.warns(MeshloadWarning, match=r"actor\., critic\. alike, so it stays among the arrays; choose with DCP\(model"):
        found = opened(folder)
    assert found.optimizer == {}
    assert "optim.state.l1.weight.exp_avg" in found
    assert list(opened(folder, model="critic").optimizer["exp_avg"]) == ["critic.l1.weight", "critic.l2.weight"]
    with pytest.raises(LayoutError, match=r"DCP\(model='judge'\): no weight's name begins so; there are actor\.l1\.weight"):
        opened(folder, model="judge")


def test_two_optimizers_of_one_weight_stay_ordinary_arrays(tmp_path: Path) -> None:
    weights = two()
    found = opened(saved(tmp_path / "c", {"model": weights, **state_of(weights), **state_of(weights, "other")}))
    assert {len(arrays) for arrays in found.optimizer.values()} <= {0}
    assert "other.state.l1.weight.exp_avg" in found


def test_fields_of_other_shapes_stay_ordinary_arrays(tmp_path: Path) -> None:
    weights = two()
    state = state_of(weights)
    state["optim"]["state"]["l1.weight"] |= {"row": torch.ones(2), "momentum_buffer": weights["l1.weight"] * 2}
    found = opened(saved(tmp_path / "c", {"model": weights, **state}))
    assert "optim.state.l1.weight.row" in found
    assert list(found.optimizer["momentum"]) == ["model.l1.weight"]


def test_b42_wrappers_are_stripped_from_weights_and_moments_alike(tmp_path: Path) -> None:
    weights = two()
    wrapped = {"_orig_mod.l1.weight": weights["l1.weight"], "_checkpoint_wrapped_module.l2.weight": weights["l2.weight"]}
    folder = saved(tmp_path / "c", {"model": wrapped, **state_of(weights)})
    found = meshload.open(folder)
    assert list(found) == ["model.l1.weight", "model.l2.weight"]
    assert list(found.optimizer["exp_avg"]) == ["model.l1.weight", "model.l2.weight"]
    assert found.meta["stripped"]["model._orig_mod.l1.weight"] == "model.l1.weight"
    assert "model._orig_mod.l1.weight" in found.with_names("stored")
    both = saved(tmp_path / "both", {"model": {**weights, "_orig_mod.l1.weight": weights["l1.weight"]}})
    with pytest.raises(LayoutError, match=r"are both model\.l1\.weight without their wrappers"):
        meshload.open(both)


def test_b44_what_a_partial_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", {"l1.weight": torch.ones(2, 3)})
    like = {"l1.weight": torch.empty(2, 3)}
    assert torch.equal(meshload.restore(folder, like=like)["l1.weight"], torch.ones(2, 3))
    with pytest.raises(MissingArray, match=r"l2\.weight: the checkpoint \(dcp, 1 arrays\) never lists this name"):
        meshload.restore(folder, like={**like, "l2.weight": torch.empty(4)})


# --- what is no tensor ------------------------------------------------------------------------------------------------


class Foreign:
    def __init__(self) -> None:
        self.secret = 7


def test_objects_are_read_when_they_are_asked_for_and_nothing_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    state = {
        "w": torch.ones(2),
        "lr_scheduler": {"last_epoch": 5, "rates": [0.1, 0.2]},
        "dataloader": {"rank_0": pickle.dumps(Evil())},
        "evil": Evil(),
        "foreign": Foreign(),
        "buffer": io.BytesIO(b"abc"),
        "pair": (torch.arange(3), "x"),
    }
    folder = CountedFolder(open_folder(saved(tmp_path / "c", state)))
    found = DCP().open(folder)
    assert {name for name, _, _ in folder.log.reads} == {".metadata"}
    objects = found.meta["objects"]
    assert objects["lr_scheduler.last_epoch"] == 5
    assert objects["lr_scheduler.rates"] == [0.1, 0.2]
    assert objects["dataloader.rank_0"] == state["dataloader"]["rank_0"]
    assert (objects["evil"].name, objects["evil"].args) == ("mkdir", (str(tmp_path / "made"),))
    assert objects["foreign"].get("secret") == 7
    assert objects["buffer"].name == "BytesIO"
    assert same_bits(objects["pair"][0], np.arange(3))
    assert not (tmp_path / "made").exists()
    assert "read when asked for" in repr(objects)
    with pytest.raises(KeyError):
        objects["nothing"]


def test_a_large_object_is_not_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "c", {"w": torch.ones(2), "dataloader": {"buffer": b"x" * 5000}})
    monkeypatch.setattr(_distcp, "OBJECT_LIMIT", 4096)
    with pytest.raises(FormatError, match=r"dataloader\.buffer: \d+ bytes in __0_0\.distcp are no tensor; at most 4096"):
        opened(folder).meta["objects"]["dataloader.buffer"]


def test_meta_tells_what_the_save_was() -> None:
    meta = opened(GOLDEN / "titan" / "checkpoint").meta
    assert meta["version"] == "1.0.0"
    assert meta["objects"]["dataloader.dp_rank_0"] == b"\x80\x04cos\nsystem\n."
    assert meta["objects"]["train_state.losses"] == [0.5, 0.25]
    assert int(np.asarray(meta["scalars"]["train_state.step"])) == 2
    assert meta["paths"]["optimizer.state.output.weight.exp_avg"] == ("optimizer", "state.output.weight.exp_avg")


# --- what is read -----------------------------------------------------------------------------------------------------


def test_opening_reads_the_metadata_alone() -> None:
    for case in CASES.values():
        folder = CountedFolder(open_folder(case / "checkpoint"))
        DCP().open(folder)
        assert {name for name, _, _ in folder.log.reads} <= {".metadata"}


def test_a_slice_of_a_large_entry_costs_little_more_than_itself(tmp_path: Path) -> None:
    large = torch.arange(1 << 20, dtype=torch.int32).reshape(1024, 1024)
    folder = CountedFolder(open_folder(saved(tmp_path / "c", {"w": large})))
    found = DCP().open(folder)
    before = folder.log.nbytes
    assert same_bits(found["w"][5:7], values(large[5:7]))
    assert 8192 <= folder.log.nbytes - before <= 8192 + 4096
    before = folder.log.nbytes
    assert same_bits(found["w"][9:10], values(large[9:10]))
    assert folder.log.nbytes - before == 4096  # where it lies is known by now


def test_neighbouring_small_entries_share_a_read(tmp_path: Path) -> None:
    state = {f"w{i:03}": torch.full((16, 16), i, dtype=torch.float32) for i in range(200)}
    folder = CountedFolder(open_folder(saved(tmp_path / "c", state)))
    found = DCP().open(folder)
    folder.log.reads.clear()
    arrays = meshload.restore(found, layout="replicated", into="numpy")
    assert [i for i in range(200) if (arrays[f"w{i:03}"] != i).any()] == []
    assert len(folder.log.reads) <= 3
    assert folder.log.nbytes <= sum(f.stat().st_size for f in (tmp_path / "c").glob("*.distcp"))


def test_entries_of_one_layout_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    honest = Chunks._parsed
    monkeypatch.setattr(Chunks, "_parsed", lambda self, k, view: (parsed.append(k), honest(self, k, view))[1])
    state = {f"w{i}": torch.full((4, 4), i, dtype=torch.float32) for i in range(20)} | {"v": torch.ones(16)}
    meshload.restore(saved(tmp_path / "c", state), layout="replicated", into="numpy")
    assert len(parsed) == 2


@given(st.data())
def test_any_range_of_a_data_file_reads_like_its_chunks(data: st.DataObject) -> None:
    source, truth = some_chunks()
    start = data.draw(st.integers(0, len(truth) - 1))
    stop = data.draw(st.integers(start, len(truth)))
    out = np.full(stop - start, 255, np.uint8)
    source.read_into(start, out)
    inside = truth[start:stop] >= 0
    assert (out[inside] == truth[start:stop][inside]).all()


def some_chunks() -> tuple[Any, Any]:
    """Return a data file as chunks, and what each byte of it is to be; -1 where it belongs to no chunk."""
    if not _SOME:
        file, tensors = io.BytesIO(), []
        for n, dtype in ((3, "i4"), (40, "u1"), (1, "f8"), (700, "f4"), (5, "i2")):
            begin = file.tell()
            array = ramp(f"{n}", (n, 2), dtype)
            strided = torch.from_numpy(array.T.copy()).t() if n == 40 else torch.from_numpy(array)
            torch.save(strided, file)
            tensors.append((f"{n}", array, begin, file.tell() - begin))
        listed = Listing({}, {}, {}, {})
        for name, array, begin, length in tensors:
            listed.tensors[name] = _distcp.Listed(array.dtype.name, array.shape, "", {(0, 0): array.shape})
            listed.tensors[name].rows.append(len(listed.entries))
            listed.entries.add(name, (0, 0), _distcp.Place("f", begin, length))
        store = tensorstore.KvStore.open("memory://").result()
        store.write("f", file.getvalue()).result()
        found = _distcp.find_arrays(listed, open_folder(store))
        truth = np.full(len(file.getvalue()), -1)
        for _, array, begin, _ in tensors:
            truth[begin : begin + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        _SOME.extend((found.arrays["3"].pieces.sources[0], truth))
    return _SOME[0], _SOME[1]


_SOME: list[Any] = []


# --- many chunks ------------------------------------------------------------------------------------------------------


def listing_of(raw: bytes) -> Listing:
    return read_listing([InMemory(".metadata", raw)])


def as_values(found: Listing) -> Any:
    def entries(rows: Sequence[int]) -> list[Any]:
        return [(found.entries.start[row], found.entries.place(row)) for row in rows]

    tensors = {k: (t.dtype, t.shape, t.refused, t.sizes, entries(t.rows)) for k, t in found.tensors.items()}
    return tensors, found.objects, found.paths, dict(found.about)


def plainly(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> Listing:
    """Read metadata by the machine alone."""
    with monkeypatch.context() as patch:
        patch.setattr(_distcp.Runs, "shortcuts", {})
        return listing_of(raw)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_runs_of_records_mean_what_the_machine_reads(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (case / "checkpoint" / ".metadata").read_bytes()
    assert as_values(listing_of(raw)) == as_values(plainly(raw, monkeypatch))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_runs_of_records_of_any_kind_mean_what_the_machine_reads(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(protocol)
    shared = torch.Size([0, 0])
    names = [f"layers.{i}.weight" for i in range(40)] + ["größe", "n" * 148, "n" * 255, "n" * 300, "ends\x94here", ""]
    for turn in range(6):
        tensors: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for name in names:
            ndim = chance.choice([0, 1, 2, 2, 2, 3, 4, 5, 6])
            chunks = []
            for c in range(chance.choice([1, 1, 2, 5])):
                start = torch.Size([chance.choice([0, c, 255, 256, 65535, 65536, 1 << 31, 1 << 40])] * ndim)
                start = shared if ndim == 2 and chance.random() < 0.3 else start
                chunks.append(metadata.ChunkStorageMetadata(start, torch.Size([chance.choice([1, 7, 300, 1 << 33])] * ndim)))
                at = start if turn % 2 else torch.Size(list(start))
                key = name if turn % 3 else "".join(list(name))
                length = chance.choice([3, 300, 70_000, 1 << 35])
                more = (["stream.zstd/1"],) if chance.random() < 0.05 else ()
                file = f"__{chance.randrange(3)}_0.distcp"
                places[metadata.MetadataIndex(key, at, c)] = filesystem._StorageInfo(file, chance.randrange(1 << 34), length, *more)
            size = torch.Size([1 << 41] * ndim)
            properties = metadata.TensorProperties(chance.choice([torch.float32, torch.bfloat16]), requires_grad=bool(turn % 2))
            unlike = {c.offsets: c for c in chunks}
            tensors[name] = metadata.TensorStorageMetadata(properties, size, list(unlike.values()))
            tensors[f"{name}.lr"] = metadata.BytesStorageMetadata()
            places[metadata.MetadataIndex(f"{name}.lr")] = filesystem._StorageInfo("__0_0.distcp", 1, 2)
        found = metadata.Metadata(tensors, {n: ("model", n) for n in tensors}, places, metadata.StorageMeta(Path("/a/b")), "1.0.0")
        raw = pickle.dumps(found, protocol)
        expected = as_values(plainly(raw, monkeypatch))
        assert as_values(listing_of(raw)) == expected
        assert expected[3]["checkpoint_id"] == "/a/b"


def large(tensors: int, chunks: int) -> bytes:
    """Return metadata of so many tensors of so many chunks each."""
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for t in range(tensors):
        name = f"layers.{t}.attention.wq.weight"
        parts = [metadata.ChunkStorageMetadata(torch.Size([2 * c, 0]), torch.Size([2, 8])) for c in range(chunks)]
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.bfloat16), torch.Size([2 * chunks, 8]), parts
        )
        for c in range(chunks):
            place = filesystem._StorageInfo(f"__{c}_0.distcp", 1600 * t, 1600)
            places[metadata.MetadataIndex(name, torch.Size([2 * c, 0]), c)] = place
    return pickle.dumps(metadata.Metadata(described, {n: (n,) for n in described}, places), 4)


def calls(work: Callable[[], Any]) -> int:
    """Count the calls of Python functions, which no clock disturbs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_with_the_number_of_chunks_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opening(tensors: int, chunks: int) -> int:
        folder = tmp_path / f"{tensors}_{chunks}"
        folder.mkdir()
        (folder / ".metadata").write_bytes(large(tensors, chunks))
        for c in range(chunks):
            with open(folder / f"__{c}_0.distcp", "wb") as file:
                file.truncate(1600 * tensors)
        return calls(lambda: opened(folder))

    few, more, deep = opening(20, 32), opening(40, 32), opening(20, 64)
    assert more < 2.1 * few
    assert deep < 2.1 * few
    with monkeypatch.context() as patch:
        patch.setattr(_distcp.Runs, "shortcuts", {})
        assert 3 * few < calls(lambda: opened(tmp_path / "20_32"))  # what the machine takes, opcode by opcode


def test_a_hundred_thousand_chunks_take_less_than_two_seconds(tmp_path: Path) -> None:
    """A quarter of them, in a quarter of the time and half as much again for a busy machine; `bench/dcp_metadata.py` makes all."""
    BENCH.write(tmp_path, 100, 250)
    times = []
    for _ in range(3):
        start = time.process_time()  # of the wall's, other processes take their part
        checkpoint = opened(tmp_path)
        times.append(time.process_time() - start)
    assert sum(len(a.pieces) for a in checkpoint.values()) == 25_000
    assert min(times) < 2 / 4 * 1.5


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    chunks = {"w": [((0, 0), ramp("a", (2, 3))), ((2, 0), ramp("b", (2, 3)))], "v": [((0,), ramp("v", (5,)))]}
    return by_hand(tmp_path / "c", chunks)


def test_b51_an_unfinished_save_is_refused_by_name(tmp_path: Path) -> None:
    for step in (10, 20):
        saved(tmp_path / f"step-{step}", {"w": torch.ones(2)})
    unfinished = saved(tmp_path / "step-30", {"w": torch.ones(2)})
    (unfinished / ".metadata").rename(unfinished / ".metadata.tmp")
    assert DCP().matches(open_folder(unfinished))
    with pytest.raises(FormatError, match=r"step-30: the save was not finished: there is \.metadata\.tmp.*step is \S*step-20"):
        meshload.open(unfinished)
    (unfinished / ".metadata.tmp").unlink()
    with pytest.raises(FormatError, match=r"there are 1 data files \(__0_0\.distcp\), but no \.metadata, .*step is \S*step-20"):
        meshload.open(unfinished)
    with pytest.raises(FormatError, match="there is no complete step beside it"):
        opened(shutil.copytree(unfinished, tmp_path / "alone" / "c"))


def test_a_folder_of_steps_gives_the_last_complete_one(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        saved(tmp_path / f"step-{step}", {"w": torch.full((2,), step)})
    assert meshload.open(tmp_path).meta["step"] == 20
    (tmp_path / "step-20" / ".metadata").unlink()
    with pytest.warns(
        MeshloadWarning, match=r"step step-10 is opened, the last complete one; passed over: step-20 \(there are 1 data"
    ):
        found = meshload.open(tmp_path)
    assert same_bits(found["w"], np.full(2, 10))
    for step in (5, "step-5"):
        assert same_bits(opened(tmp_path, step=step)["w"], np.full(2, 5))
    with pytest.raises(FormatError, match="of the steps step-5, step-10, step-20, 0 are 7"):
        opened(tmp_path, step=7)
    with pytest.raises(FormatError, match="the save was not finished"):
        opened(tmp_path, step=20)
    with pytest.raises(FormatError, match="there are no steps in this folder, so none is 5"):
        opened(tmp_path / "step-5", step=5)


def test_a_missing_data_file_takes_its_arrays_alone(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()
    found = meshload.open(folder)
    assert same_bits(found["v"], ramp("v", (5,)))
    with pytest.raises(
        MissingArray, match=r"w: its chunk at \(2, 0\) of shape \(2, 3\) .* of __1_0\.distcp, which cannot be opened"
    ):
        found["w"]
    (problem,) = found.problems
    assert (problem.file, problem.text.endswith("in it are w")) == ("__1_0.distcp", True)
    assert not meshload.check(folder).ok
    with pytest.raises(MissingArray, match=r"__1_0\.distcp"):
        meshload.restore(folder, layout="replicated")
    assert set(meshload.restore(folder, layout="replicated", include="v")) == {"v"}


def test_a_truncated_data_file_is_found_from_its_size(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    found = opened(folder)
    assert "w" in found.unavailable
    (problem,) = found.problems
    assert f"an entry ends at byte {size}, the file has {size - 1}" in problem.text


def test_files_that_another_save_left_are_told(folder: Path) -> None:
    shutil.copy(folder / "__1_0.distcp", folder / "__7_0.distcp")
    assert opened(folder).meta["unlisted"] == ("__7_0.distcp",)


def test_moments_that_are_lost_do_not_hinder_the_weights(tmp_path: Path) -> None:
    weights = two()
    folder = saved(tmp_path / "c", {"model": weights, **state_of(weights)}, single_file_per_rank=False)
    for key, place in metadata_of(folder).storage_data.items():
        if key.fqn == "optim.state.l1.weight.exp_avg":
            (folder / place.relative_path).unlink()
    assert set(meshload.restore(folder, layout="replicated")) == {"model.l1.weight", "model.l2.weight"}
    with pytest.raises(MissingArray, match=r"optimizer\.exp_avg\.model\.l1\.weight"):
        meshload.restore(folder, layout="replicated", optimizer=True)


def test_entries_that_are_not_what_is_listed_are_refused_when_read(folder: Path) -> None:
    def replaced(what: Any) -> Any:
        file = io.BytesIO()
        torch.save(what, file)
        (folder / "__1_0.distcp").write_bytes(file.getvalue())
        found = metadata_of(folder)
        for key, place in found.storage_data.items():
            if place.relative_path == "__1_0.distcp":
                found.storage_data[key] = filesystem._StorageInfo("__1_0.distcp", 0, len(file.getvalue()))
        write_metadata(folder, found)
        return opened(folder)["w"]

    cases = [
        (torch.zeros(3, 2), r"w: its entry at bytes 0 to \d+ of __1_0\.distcp is float32 \(3, 2\), expected is float32 \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int32), r"is int32 \(2, 3\), expected is float32"),
        ({"a": torch.zeros(2, 3)}, r"is dict, no tensor, expected is float32"),
    ]
    for what, message in cases:
        with pytest.raises(FormatError, match=message):
            np.asarray(replaced(what))


@pytest.mark.parametrize("at", [0, 100, 300, 600, -5, -70, -200])
def test_a_damaged_entry_is_refused_or_read_right(folder: Path, at: int) -> None:
    raw = bytearray((folder / "__1_0.distcp").read_bytes())
    for i in range(4):
        raw[at - i] ^= 0xFF
    (folder / "__1_0.distcp").write_bytes(raw)
    try:
        found = np.asarray(opened(folder)["w"])
    except FormatError as error:
        assert "__1_0.distcp" in str(error)  # noqa: PT017
    else:
        assert same_bits(found, np.concatenate([ramp("a", (2, 3)), ramp("b", (2, 3))]))


def changed(folder: Path, change: Callable[[Any], Any]) -> Path:
    found = metadata_of(folder)
    change(found)
    write_metadata(folder, found)
    return folder


def test_places_that_cannot_be_are_refused(folder: Path) -> None:
    def place(**fields: Any) -> Callable[[Any], Any]:
        def change(found: Any) -> None:
            for key in found.storage_data:
                if key.fqn == "v":
                    old = found.storage_data[key]
                    found.storage_data[key] = filesystem._StorageInfo(
                        **{"relative_path": old.relative_path, "offset": old.offset, "length": old.length, **fields}
                    )

        return change

    for fields in ({"offset": -1}, {"length": 1 << 70}, {"length": 2.5}, {"offset": True}, {"relative_path": 5}):
        with pytest.raises(FormatError, match="v"):
            opened(changed(Path(shutil.copytree(folder, folder.with_name(str(fields)))), place(**fields)))
    for fields, why in (
        ({"relative_path": "../c/__0_0.distcp"}, "not a plain file name"),
        ({"relative_path": "/etc/passwd"}, "not a plain file name"),
        ({"offset": 1 << 50}, "truncated"),
        ({"offset": 10}, "and so are other entries"),
        ({"length": 3}, "but takes 20 bytes"),
    ):
        found = opened(changed(Path(shutil.copytree(folder, folder.with_name(str(hash(str(fields)))))), place(**fields)))
        assert why in found.unavailable["v"]


def test_chunks_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    a, b = ramp("a", (2, 3)), ramp("b", (2, 3))
    hole = opened(by_hand(tmp_path / "hole", {"w": [((0, 0), a), ((4, 0), b)]}))
    assert "hold 12 elements, shape (6, 3) has 18" in hole.unavailable["w"]
    beyond = opened(by_hand(tmp_path / "beyond", {"w": [((0, 0), a), ((2, 0), b)]}, size=(3, 3)))
    assert "does not fit into shape (3, 3)" in beyond.unavailable["w"]
    found = opened(by_hand(tmp_path / "twice", {"w": [((0, 0), a), ((1, 0), b)]}, size=(4, 3)))
    with pytest.raises((Overlap, MissingPieces), match="w"):
        np.asarray(found["w"])


def test_what_cannot_be_an_array_is_told(tmp_path: Path) -> None:
    folder = by_hand(tmp_path, {"w": [((0,), ramp("w", (4,)))], "v": [((0,), ramp("v", (4,)))], "u": [((0,), ramp("u", (4,)))]})

    def change(found: Any) -> None:
        found.state_dict_metadata["w"].properties.dtype = torch.qint8
        found.state_dict_metadata["v"].properties.layout = torch.sparse_coo
        for key in found.storage_data:
            if key.fqn == "u":
                found.storage_data[key].transform_descriptors = ["stream.zstd/1"]

    found = opened(changed(folder, change))
    assert found.unavailable["w"] == "its dtype is qint8, which no array can have"
    assert found.unavailable["v"] == "its layout is ('torch.sparse_coo',), only strided tensors can be read"
    assert found.unavailable["u"] == "it is stored as ('stream.zstd/1',)"
    assert {p.array for p in found.problems} == {"u", "v", "w"}


def test_a_writer_of_safetensors_in_data_files_is_named(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    folder = saved(tmp_path / "c", state, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    found = opened(folder)
    assert set(found.unavailable) == {"a", "b"}
    assert "serialization_format=SAFETENSORS" in found.unavailable["a"]


def test_hostile_metadata_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    good = metadata.Metadata({}, None, {})
    described = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([2]), [])
    cases: list[Any] = [
        b"",
        b"\x80\x04.",
        pickle.dumps(Evil()),
        pickle.dumps([1, 2]),
        pickle.dumps(metadata.StorageMeta()),
        pickle.dumps(metadata.Metadata({"w": described}, None, None)),
        pickle.dumps(metadata.Metadata({"w": 3}, None, {})),
        pickle.dumps(metadata.Metadata({3: described}, None, {})),
        pickle.dumps(metadata.Metadata({"w": described}, None, {3: 4})),
        pickle.dumps(metadata.Metadata({"w": described}, None, {metadata.MetadataIndex("w"): Evil()})),
        pickle.dumps(good)[:-20],
    ]
    for chunk in (
        metadata.ChunkStorageMetadata([0], [2]),  # type: ignore[arg-type]  # hostile
        metadata.ChunkStorageMetadata(torch.Size([-1]), torch.Size([2])),
        metadata.ChunkStorageMetadata((0.5,), (2,)),  # type: ignore[arg-type]  # hostile
        7,
    ):
        found = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([2]), [chunk])  # type: ignore[list-item]
        place = {metadata.MetadataIndex("w", torch.Size([-1])): filesystem._StorageInfo("f", 0, 2000)}
        cases.append(pickle.dumps(metadata.Metadata({"w": found}, None, place)))
    for i, raw in enumerate(cases):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / ".metadata").write_bytes(raw)
        with pytest.raises(FormatError):
            opened(tmp_path / f"{i}")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("case", [GOLDEN / "strided", GOLDEN / "hsdp"], ids=["strided", "hsdp"])
def test_metadata_with_flipped_bytes_ends_in_a_format_error_or_is_read(case: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(case / "checkpoint", tmp_path / "c"))
    raw, chance = (folder / ".metadata").read_bytes(), random.Random(7)
    for _ in range(150):
        damaged = bytearray(raw)
        for _ in range(chance.choice([1, 1, 3])):
            damaged[chance.randrange(len(raw))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(damaged)
        try:
            found = stored(folder)
            for array in found.values():
                np.asarray(array)
        except (FormatError, SourceError, MissingPieces, Overlap):
            pass


# --- which folders ----------------------------------------------------------------------------------------------------


def test_folders_of_other_formats_are_not_recognised() -> None:
    seen = 0
    for root in (SHARED, HERE / "golden"):
        for path in sorted(root.glob("*/*")):
            inner = [path, *(p for p in path.rglob("*") if p.is_dir())] if path.is_dir() else []
            for folder in inner:
                mine = (folder / ".metadata").exists() and path.parent.name == "dcp"
                assert DCP().matches(open_folder(folder)) == mine, folder
                seen += 1
    assert seen > 20


def test_safetensors_that_dcp_wrote_are_the_other_formats() -> None:
    for under in ("", "sharded"):
        folder = open_folder(GOLDEN / "llama_bf16_hf_writer" / "checkpoint" / under)
        assert not DCP().matches(folder)
        assert installed()["hf"].matches(folder)


def sharded(folder: Path, name: str, arrays: Mapping[str, Any]) -> None:
    """Write what each of two ranks of torch's safetensors writer leaves: half of the rows, and where they belong."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        mine = {n: v[len(v) // 2 * rank :][: len(v) // 2] for n, v in arrays.items()}
        info = {n: {"saved_offsets": [len(v) * rank, *(0,) * (v.ndim - 1)]} for n, v in mine.items()}
        write_safetensors(folder / name.format(rank + 1), mine, {"DCP_SHARDING_INFO": json.dumps(info)})


def test_b38_whole_numbers_and_truth_values_in_shards_of_dcp_are_put_together(tmp_path: Path) -> None:
    arrays = {
        "ids": np.asarray([1, -(1 << 62), 3, 4]),
        "mask": np.asarray([True, False, False, True]),
        "w": ramp("w", (4, 3), ml_dtypes.bfloat16),
    }
    sharded(tmp_path, "shard-0000{}-model-00001-of-00001.safetensors", arrays)
    with pytest.warns(MeshloadWarning, match="they hold pieces"):
        found = meshload.open(tmp_path)
    assert set(found) == set(arrays)
    assert [n for n, v in arrays.items() if not same_bits(found[n], v)] == []


def test_b39_numbers_in_the_names_of_shards_mean_nothing(tmp_path: Path) -> None:
    arrays = {"a": ramp("a", (4, 3)), "b": ramp("b", (2,))}
    sharded(tmp_path / "pieces", "qwen3-0000{}-of-00007.safetensors", arrays)
    with pytest.warns(MeshloadWarning, match="they hold pieces"):
        found = meshload.open(tmp_path / "pieces", format=HuggingFace(index="headers"))
    assert [n for n, v in arrays.items() if not same_bits(found[n], v)] == []
    names = {n: f"qwen3-0000{i + 1}-of-00002.safetensors" for i, n in enumerate(arrays)}
    (tmp_path / "whole").mkdir()
    for n, file in names.items():
        write_safetensors(tmp_path / "whole" / file, {n: arrays[n]})
    (tmp_path / "whole" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = meshload.open(tmp_path / "whole")
    assert {n: a.pieces.sources[int(a.pieces.source[0])].name for n, a in found.items()} == names
    assert [n for n, v in arrays.items() if not same_bits(found[n], v)] == []


def test_a_folder_is_opened_by_its_metadata_file_and_not_by_a_data_file() -> None:
    checkpoint = GOLDEN / "strided" / "checkpoint"
    assert set(meshload.open(checkpoint / ".metadata")) == {"fsdp_tp", "outer"}
    with pytest.raises(FormatError, match="one data file of a checkpoint; open its folder"):
        meshload.open(checkpoint / "__0_0.distcp")


def test_key_value_stores_are_read(tmp_path: Path) -> None:
    store = tensorstore.KvStore.open("memory://").result()
    for file in (GOLDEN / "titan" / "checkpoint").iterdir():
        store.write(f"step-2/{file.name}", file.read_bytes()).result()
    found = DCP().open(open_folder(store))
    truth = read_safetensors(GOLDEN / "titan" / "golden.safetensors")
    assert found.meta["step"] == 2
    assert [n for n, a in found.views["stored"]().items() if not same_bits(a, truth[n])] == []


def test_a_config_beside_the_data_is_read(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert opened(folder).config == {"model_type": "llama"}
    (folder / "config.json").write_text("{")
    found = opened(folder)
    assert found.config is None
    assert found.problems[0].file == "config.json"
