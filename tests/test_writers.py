"""What is written: A -> B -> A gives the same bits, and the other side's own loaders read it."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Box, Checkpoint, Layout, LayoutError
from meshload.naming import model_of
from meshload.source import LocalFolder
from meshload.testing import ramp, read_safetensors, same_bits, write_checkpoint
from meshload_adapters._defaults import chosen_of, epsilon_of, theta_of
from meshload_adapters._distcp import read_listing
from meshload_adapters._distcp_files import chunks_of
from meshload_adapters._fast_llm_files import base_of
from meshload_adapters._pickle import Global
from meshload_adapters._pickle_writer import Call, Instance, pickled
from meshload_adapters._safetensors import read_header
from meshload_adapters._torch_writer import NewStorage, NewTensor, laid_out, new_tensor
from meshload_adapters._yaml import loaded as yaml_loaded
from meshload_adapters._yaml_writer import dumped
from meshload_adapters.formats.fast_llm import FastLLM
from meshload_adapters.formats.megatron import Megatron
from meshload_adapters.formats.megatron_core import MegatronCore
from meshload_adapters.formats.universal import Universal

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

_USUAL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 12, "vocab_size": 26}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_USUAL, "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    "qwen2": {"model_type": "qwen2", **_USUAL, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6},
    "mixtral": {"model_type": "mixtral", **_USUAL, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False},
    "gpt_neox": {"model_type": "gpt_neox", **_USUAL, "tie_word_embeddings": False, "use_parallel_residual": True},
    "opt": {
        "model_type": "opt",
        **{k: v for k, v in _USUAL.items() if k != "intermediate_size"},
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 10,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "tie_word_embeddings": True,
    },
}
MESHES = (None, "tp=2", "pp=2,tp=2")


def source(folder: Path, family: str, dtype: str = "float32", **config: Any) -> Path:
    """Write a Hugging Face checkpoint of a family, whose values tell their places."""
    told = {**CONFIGS[family], **config}
    model = model_of("hf", told)
    assert model is not None
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arrays = {name: ramp(name, model.whole_shape(line), kind) for name, line, _ in model.arrays() if name not in model.ties}
    return write_checkpoint(folder, arrays, told, shards=2)


def check_round_trip(folder: Path, family: str, to: Any, mesh: str | None, dtype: str = "float32", **options: Any) -> Checkpoint:
    """Check Hugging Face -> `to` -> Hugging Face, bit for bit; return the checkpoint in between."""
    src = source(folder / "src", family, dtype)
    meshload.convert(src, folder / "there", to=to, mesh=mesh, **options)
    expected, there = meshload.open(src), meshload.open(folder / "there")
    assert there.format == (to if isinstance(to, str) else to.name)
    assert not there.problems
    meshload.convert(folder / "there", folder / "back", to="hf", config=src)
    back = meshload.open(folder / "back")
    assert sorted(back) == sorted(expected)
    assert [n for n in expected if not same_bits(back[n], expected[n])] == []
    assert json.loads((folder / "back/config.json").read_text()) == json.loads((src / "config.json").read_text())
    return there


# --- torch's files ----------------------------------------------------------------------------------------------------


def written(root: Any, payload: Mapping[str, bytes] | None = None) -> bytes:
    """Return a laid-out file, with payload at the places that the reader finds."""
    parts, size = laid_out(root)
    data = bytearray(size)
    for at, some in parts:
        data[at : at + len(some)] = some
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        found = (payload or {}).get(info.filename.removeprefix("archive/data/"))
        if found is not None:
            assert len(found) == info.file_size
            begin = info.header_offset + 30 + int.from_bytes(data[info.header_offset + 26 : info.header_offset + 28], "little")
            begin += int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
            data[begin : begin + len(found)] = found
    return bytes(data)


def test_a_laid_out_file_is_what_torch_saves_but_for_checksums_and_the_id() -> None:
    torch = pytest.importorskip("torch")
    flat = torch.zeros(6, dtype=torch.bfloat16)
    more = [None, True, 2.5, (1, 2), "s", torch.bfloat16, -5, 1 << 40, 300, 70000, (), {}, [], (1, 2, 3, 4)]
    tensors = {"z": torch.zeros(0, 3), "f": torch.zeros(2, dtype=torch.float8_e4m3fn), "u": torch.zeros((), dtype=torch.uint16)}
    buffer = io.BytesIO()
    torch.save(OrderedDict([("a.b", flat.reshape(2, 3)), ("c", {"x": [1], "y": [flat[3:], *more], **tensors})]), buffer)
    theirs, storage = buffer.getvalue(), NewStorage("bfloat16", 6)
    more[5] = Global("torch", "bfloat16")
    mine = {"z": new_tensor("float32", (0, 3)), "f": new_tensor("float8_e4m3fn", (2,)), "u": new_tensor("uint16", ())}
    root = OrderedDict([("a.b", NewTensor(storage, (2, 3))), ("c", {"x": [1], "y": [NewTensor(storage, (3,), 3), *more], **mine})])
    found = written(root)
    assert len(found) == len(theirs)
    one, other = (zipfile.ZipFile(io.BytesIO(data)) for data in (found, theirs))
    assert [i.filename for i in one.infolist()] == [i.filename for i in other.infolist()]
    assert one.read("archive/data.pkl") == other.read("archive/data.pkl")
    different = {i for i, (a, b) in enumerate(zip(found, theirs, strict=True)) if a != b}
    allowed: set[int] = set()
    for info in other.infolist():  # where checksums stand, and the id
        begin = theirs.rindex(info.filename.encode(), 0, other.start_dir) + len(info.filename)
        stop = begin + theirs[begin:].index(b"PK\x01\x02" if info.filename.endswith("_id") else b"PK\x03\x04")
        allowed |= set(range(stop - 12, stop - 8))
        entry = theirs.index(info.filename.encode(), other.start_dir) - 46
        allowed |= set(range(entry + 16, entry + 20))
        allowed |= set(range(stop - 56, stop - 16)) if info.filename.endswith("_id") else set()
    assert different <= allowed


def test_torch_loads_what_is_laid_out_and_zipfile_misses_the_checksums_of_storages() -> None:
    torch = pytest.importorskip("torch")
    storage, values = NewStorage("float32", 6), np.arange(6, dtype=np.float32)
    root = {"whole": NewTensor(storage, (2, 3)), "end": NewTensor(storage, (2,), 4), "n": new_tensor("int64", ())}
    data = written(root, {"0": values.tobytes(), "1": np.int64(7).tobytes()})
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["whole"].tolist() == values.reshape(2, 3).tolist()
    assert found["end"].tolist() == [4.0, 5.0]
    assert found["end"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert found["n"].item() == 7
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() == "archive/data/0"
    assert zipfile.ZipFile(io.BytesIO(data)).read("archive/byteorder") == b"little"


def test_torch_and_meshload_load_a_laid_out_file_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    many = (1 << 30) + 3
    parts, size = laid_out([new_tensor("float32", (5,)), new_tensor("float32", (many,)), new_tensor("float32", (7,))])
    file = tmp_path / "x.pt"
    with file.open("wb") as out:  # with holes
        for at, data in parts:
            out.seek(at)
            out.write(data)
        out.truncate(size)
        out.seek(parts[2][0] - 4)  # the last element of the large one
        out.write(np.float32(3).tobytes())
    found = torch.load(file, weights_only=True, mmap=True)
    assert [t.shape[0] for t in found] == [5, many, 7]
    assert found[1][-1].item() == 3
    assert float(meshload.open(file)["1"][many - 1 :].__array__()[0]) == 3


def test_a_view_beyond_its_storage_is_refused() -> None:
    with pytest.raises(meshload.LayoutError, match=r"shape \(2, 3\) at element 1 of a storage of 6"):
        laid_out(NewTensor(NewStorage("float32", 6), (2, 3), 1))


def test_a_pickle_is_what_python_reads() -> None:
    shared = ["x"]
    value = {
        "a": shared,
        "b": shared,
        "c": Call(Global("builtins", "complex"), (1, 2)),
        "n": [-1, 256, -(1 << 70), 1 << 63, -(1 << 4000)],
    }
    for protocol in (2, 4):
        found = pickle.loads(pickled(value, protocol))
        assert found == {**value, "c": 1 + 2j}
        assert found["a"] is found["b"]
    found = pickle.loads(pickled(Instance(Global("argparse", "Namespace"), {"x": 1, "y": [None, "é" * 200]}), 4))
    assert vars(found) == {"x": 1, "y": [None, "é" * 200]}
    with pytest.raises(LayoutError, match="set"):
        pickled({1})


# --- DCP --------------------------------------------------------------------------------------------------------------


def loaded_by_dcp(folder: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Load arrays by torch's own loader, and return their bits."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    tensors = {n: torch.zeros(a.shape, dtype=getattr(torch, a.dtype.name)) for n, a in arrays.items()}
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return {n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


@pytest.mark.parametrize("mesh", [None, "pp=2,tp=2"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_dcp_gives_back_what_it_was_made_of(tmp_path: Path, family: str, mesh: str | None) -> None:
    dtype = "bfloat16" if family == "llama" else "float32"
    there = check_round_trip(tmp_path, family, "dcp", mesh, dtype)
    ranks = 4 if mesh else 1
    assert sorted(f.name for f in (tmp_path / "there").glob("*.distcp")) == [f"__{r}_0.distcp" for r in range(ranks)]
    assert there.meta["unlisted"] == ()
    found = loaded_by_dcp(tmp_path / "there", there)
    assert found == {n: np.asarray(a).tobytes() for n, a in there.items()}


def test_dcp_stores_each_box_once_in_the_file_of_the_lowest_rank(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "dcp", to="dcp", mesh="dp=2,tp=2")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())  # by torch's own classes
    name = "model.layers.0.self_attn.o_proj.weight"
    chunks = metadata.state_dict_metadata[name].chunks
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [((0, 0), (16, 8)), ((0, 8), (16, 8))]
    places = {tuple(i.offset): info.relative_path for i, info in metadata.storage_data.items() if i.fqn == name}
    assert places == {(0, 0): "__0_0.distcp", (0, 8): "__1_0.distcp"}
    assert metadata.planner_data[name] == (name,)
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "dcp").glob("*.distcp")}
    assert set(sizes) == {"__0_0.distcp", "__1_0.distcp"}


def test_dcp_cuts_what_a_layout_cuts_and_fsdp_rows(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "dcp", to="dcp", mesh="dp=3,tp=2", layout=Layout.default(dp="cut"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 6
    expected, found = meshload.open(src), meshload.open(tmp_path / "dcp")
    assert [n for n in expected if not same_bits(found[n], expected[n])] == []


def test_boxes_that_are_no_tiling_are_stored_whole() -> None:
    whole = Box((0,), (4,))
    assert chunks_of((4,), [(2, Box((0,), (3,))), (1, Box((2,), (2,)))]) == [(1, whole)]  # they overlap
    assert chunks_of((4,), [(1, Box((0,), (3,)))]) == [(1, whole)]  # one element is held by nobody
    assert chunks_of((), []) == [(0, Box((), ()))]


def test_dcp_of_every_dtype_and_shape_is_read_by_torch(tmp_path: Path) -> None:
    kinds = [np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.uint8, np.bool_, np.uint16]
    arrays = {f"{np.dtype(k).name}": ramp(str(k), (3, 5), k) for k in kinds}
    arrays |= {"none": np.zeros((0, 4), np.float32), "scalar": np.float32(2.5).reshape(())}
    src = write_checkpoint(tmp_path / "src", arrays)
    meshload.convert(src, tmp_path / "dcp", to="dcp")
    found = meshload.open(tmp_path / "dcp")
    assert {n: same_bits(found[n], a) for n, a in arrays.items()} == dict.fromkeys(arrays, True)
    assert loaded_by_dcp(tmp_path / "dcp", found) == {n: a.tobytes() for n, a in arrays.items()}


def test_dcp_under_torchtitans_names(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "dcp", to="dcp", names="torchtitan")
    found = meshload.open(tmp_path / "dcp")
    assert "layers.0.attention.qkv_linear.wq.weight" in found
    expected, back = meshload.open(src), found.with_names("hf")
    assert [n for n in expected if not same_bits(back[n], expected[n])] == []


# --- FlexGen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES)
def test_flexgen_gives_back_what_it_was_made_of(tmp_path: Path, mesh: str | None) -> None:
    there = check_round_trip(tmp_path, "opt", "flexgen", mesh, "float16")
    folder = tmp_path / "there"
    for name, array in there.items():
        assert same_bits(np.load(folder / name), array)
        assert (folder / name).read_bytes()[6:8] == b"\x01\x00"
    golden = Path(__file__).parent / "golden/flexgen/opt_tiny_fp16/opt-tiny-np"
    kinds = {re.sub(r"\d+", "N", f.name) for f in golden.iterdir()}
    assert {re.sub(r"\d+", "N", f.name) for f in folder.iterdir()} == (kinds | {"config.json"}) - {"lm_head.weight"}


def test_flexgen_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(meshload.LayoutError, match="flexgen"):
        meshload.convert(source(tmp_path / "llama", "llama"), tmp_path / "out", to="flexgen")
    src = source(tmp_path / "opt", "opt", ffn_dim=48)
    with pytest.raises(meshload.LayoutError, match="ffn_dim 64; here is ffn_dim 48"):
        meshload.convert(src, tmp_path / "out", to="flexgen")
    src = source(tmp_path / "bf16", "opt", "bfloat16")
    with pytest.raises(meshload.LayoutError, match=r"no dtype bfloat16; give dtype='float16'"):
        meshload.convert(src, tmp_path / "out", to="flexgen")
    assert not (tmp_path / "out").exists()
    meshload.convert(src, tmp_path / "out", to="flexgen", dtype="float16")
    assert np.load(tmp_path / "out/decoder.embed_tokens.weight").dtype == np.float16


# --- Megatron ---------------------------------------------------------------------------------------------------------


def rank_file(folder: Path, rank: str) -> dict[str, Any]:
    """Load a rank's file by torch, with nothing allowed but what is needed."""
    torch = pytest.importorskip("torch")
    with torch.serialization.safe_globals([argparse.Namespace]):
        found: dict[str, Any] = torch.load(folder / f"release/{rank}/model_optim_rng.pt", weights_only=True)
    return found


@pytest.mark.parametrize("mesh", [*MESHES, "dp=2,tp=2"])
def test_megatron_gives_back_what_it_was_made_of(tmp_path: Path, mesh: str | None) -> None:
    there = check_round_trip(tmp_path, "llama", "megatron", mesh, "bfloat16")
    count = {None: (1, 1), "tp=2": (2, 1), "pp=2,tp=2": (2, 2), "dp=2,tp=2": (2, 1)}[mesh]
    assert (there.meta["mesh"]["tp"], there.meta["mesh"]["pp"]) == count
    assert len(list((tmp_path / "there").glob("release/*/model_optim_rng.pt"))) == count[0] * count[1]
    assert (tmp_path / "there/latest_checkpointed_iteration.txt").read_text() == "release"


def test_megatrons_ranks_hold_their_heads_and_their_halves(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to="megatron", mesh="pp=2,tp=2")
    hf = {n: np.asarray(a) for n, a in meshload.open(src).items()}
    for p in range(2):
        for t in range(2):
            model = rank_file(tmp_path / "out", f"mp_rank_{t:02d}_{p:03d}")["model"]
            for i in range(2):
                at, to = f"model.layers.{2 * p + i}.", f"decoder.layers.{i}."
                q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"].reshape(2, -1, 16)[t] for x in "qkv")
                assert np.array_equal(model[f"{to}self_attention.linear_qkv.weight"], np.concatenate([q, k, v]))
                gate, up = (hf[f"{at}mlp.{x}_proj.weight"][6 * t : 6 * t + 6] for x in ("gate", "up"))
                assert np.array_equal(model[f"{to}mlp.linear_fc1.weight"], np.concatenate([gate, up]))
                assert np.array_equal(model[f"{to}mlp.linear_fc2.weight"], hf[f"{at}mlp.down_proj.weight"][:, 6 * t : 6 * t + 6])
                o = hf[f"{at}self_attn.o_proj.weight"][:, 8 * t : 8 * t + 8]
                assert np.array_equal(model[f"{to}self_attention.linear_proj.weight"], o)
                assert np.array_equal(model[f"{to}input_layernorm.weight"], hf[f"{at}input_layernorm.weight"])
            ends = {n for n in model if ".layers." not in n and not n.endswith("_extra_state")}
            first, last = {"embedding.word_embeddings.weight"}, {"decoder.final_layernorm.weight", "output_layer.weight"}
            assert ends == (last if p else first)


def test_megatrons_args_say_what_the_model_is(tmp_path: Path) -> None:
    meshload.convert(source(tmp_path / "src", "qwen2"), tmp_path / "out", to="megatron", mesh="pp=2,tp=2")
    found = rank_file(tmp_path / "out", "mp_rank_01_001")
    args = found["args"]
    assert found["checkpoint_version"] == 3.0
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads) == (4, 16, 12, 4)
    assert (args.group_query_attention, args.num_query_groups, args.kv_channels) == (True, 2, 4)
    assert (args.swiglu, args.normalization, args.add_bias_linear, args.add_qkv_bias) == (True, "RMSNorm", False, True)
    assert (args.untie_embeddings_and_output_weights, args.position_embedding_type, args.rotary_base) == (False, "rope", 1000000)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.vocab_size, args.padded_vocab_size, args.make_vocab_size_divisible_by) == (26, 26, 1)
    assert str(args.params_dtype) == "torch.float32"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gpt2"])
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    eps = next(theirs[key] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in theirs)
    assert epsilon_of(family, {}) == epsilon_of(family, theirs) == eps
    assert chosen_of(family, {}) == chosen_of(family, theirs) == theirs.get("num_experts_per_tok")
    if rope := theirs.get("rope_parameters"):
        assert theta_of(family, {}) == theta_of(family, {"rope_theta": None}) == theta_of(family, theirs) == rope["rope_theta"]
    assert theta_of(family, {"rope_theta": 5.0}) == theta_of(family, {"rope_parameters": {"rope_theta": 5.0}}) == 5


def test_b08_each_stage_of_a_pipeline_gets_its_own_layers(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to="megatron", mesh="pp=2")
    hf = meshload.open(src)
    for p in range(2):
        model = rank_file(tmp_path / "out", f"mp_rank_00_{p:03d}")["model"]
        for i in range(2):
            expected = np.asarray(hf[f"model.layers.{2 * p + i}.mlp.down_proj.weight"])
            assert np.array_equal(model[f"decoder.layers.{i}.mlp.linear_fc2.weight"], expected)


def test_b14_a_tied_head_is_copied_to_the_last_stage(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "qwen2")
    meshload.convert(src, tmp_path / "out", to="megatron", mesh="pp=2")
    first, last = (rank_file(tmp_path / "out", f"mp_rank_00_{p:03d}")["model"] for p in range(2))
    expected = np.asarray(meshload.open(src)["model.embed_tokens.weight"])
    assert np.array_equal(first["embedding.word_embeddings.weight"], expected)
    assert np.array_equal(last["output_layer.weight"], expected)
    assert "output_layer.weight" not in first
    assert "embedding.word_embeddings.weight" not in last
    meshload.convert(src, tmp_path / "one", to="megatron")
    assert "output_layer.weight" not in rank_file(tmp_path / "one", "mp_rank_00")["model"]


def test_b26_a_vocabulary_that_does_not_divide_is_padded_with_zeros_and_cut_again(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama", vocab_size=13, num_key_value_heads=4)
    meshload.convert(src, tmp_path / "out", to="megatron", mesh="tp=4")
    expected = np.asarray(meshload.open(src)["model.embed_tokens.weight"])
    last = rank_file(tmp_path / "out", "mp_rank_03")
    assert last["args"].padded_vocab_size == 16
    assert np.array_equal(last["model"]["embedding.word_embeddings.weight"][0], expected[12])
    assert not last["model"]["embedding.word_embeddings.weight"][1:].any()
    meshload.convert(tmp_path / "out", tmp_path / "back", to="hf", config=src)
    assert same_bits(meshload.open(tmp_path / "back")["model.embed_tokens.weight"], expected)
    padded = Layout.default(pad={"vocab": 4})
    mine = meshload.restore(tmp_path / "back", mesh="tp=4", rank=3, layout=padded, into="numpy")["model.embed_tokens.weight"]
    assert np.array_equal(mine, [expected[12], *np.zeros((3, 16))])


def test_megatrons_virtual_stages_take_turns(tmp_path: Path) -> None:
    there = check_round_trip(tmp_path, "qwen2", Megatron(virtual=2), "pp=2,tp=2")
    assert "decoder.layers.3.mlp.linear_fc2.weight" in there
    file = rank_file(tmp_path / "there", "mp_rank_00_001")
    hf = meshload.open(tmp_path / "src")
    for v in range(2):
        expected = np.asarray(hf[f"model.layers.{2 * v + 1}.input_layernorm.weight"])
        assert np.array_equal(file[f"model{v}"]["decoder.layers.0.input_layernorm.weight"], expected)
    assert "output_layer.weight" in file["model1"]
    assert "output_layer.weight" not in file["model0"]
    assert file["args"].num_layers_per_virtual_pipeline_stage == 1


def test_megatrons_expert_ranks_hold_their_experts_and_all_else(tmp_path: Path) -> None:
    check_round_trip(tmp_path, "mixtral", "megatron", "ep=2,tp=2")
    hf = meshload.open(tmp_path / "src")
    model = rank_file(tmp_path / "there", "mp_rank_00_001")["model"]
    expected = np.asarray(hf["model.layers.1.block_sparse_moe.experts.2.w2.weight"])[:, :6]
    assert np.array_equal(model["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"], expected)
    assert "decoder.layers.1.self_attention.linear_proj.weight" in model


def test_what_megatron_cannot_cut_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    for mesh, why in (("pp=3", "4 layers over 3 chunks"), ("tp=3", "2 kv heads over tp=3")):
        with pytest.raises(meshload.LayoutError, match=why):
            meshload.convert(src, tmp_path / "out", to="megatron", mesh=mesh)
    with pytest.raises(meshload.LayoutError, match="model_type is None"):
        meshload.convert(write_checkpoint(tmp_path / "x", {"w": np.zeros(3)}), tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


FAMILY_MESHES = [
    *(("llama", mesh) for mesh in (*MESHES, "dp=2,tp=2")),
    *((family, mesh) for family in ("qwen2", "mixtral", "gpt_neox") for mesh in (None, "pp=2,tp=2")),
]


@pytest.mark.parametrize(("family", "mesh"), FAMILY_MESHES)
def test_megatron_core_gives_back_what_it_was_made_of(tmp_path: Path, family: str, mesh: str | None) -> None:
    there = check_round_trip(tmp_path, family, "megatron_core", mesh)
    ranks = {None: [0], "tp=2": [0, 1], "pp=2,tp=2": [0, 1, 2, 3], "dp=2,tp=2": [0, 1]}[mesh]
    assert sorted(f.name for f in (tmp_path / "there/release").glob("*.distcp")) == [f"__{r}_0.distcp" for r in ranks]
    stored = there.with_names("stored")
    assert stored["decoder.layers.self_attention.linear_qkv.weight"].shape[0] == 4
    assert loaded_by_dcp(tmp_path / "there/release", stored) == {n: np.asarray(a).tobytes() for n, a in stored.items()}


@pytest.mark.parametrize(("golden", "family"), [("td-ep2-fp32-moe", "mixtral"), ("td-tp2-dp2-fp32-distopt-dpre-qwen2", "qwen2")])
def test_megatron_core_has_the_keys_and_chunks_that_megatron_writes(tmp_path: Path, golden: str, family: str) -> None:
    path = Path(__file__).parent / "golden/megatron" / golden
    theirs = meshload.open(path, config={"model_type": family})
    mesh = {"mixtral": "ep=2", "qwen2": "tp=2"}[family]
    meshload.convert(theirs, tmp_path / "out", to=MegatronCore(transformer_impl="local"), mesh=mesh)
    mine = meshload.open(tmp_path / "out")
    one, other = mine.with_names("stored"), theirs.with_names("stored")
    weights = {n for n in other if "optimizer." not in n}
    assert set(one) == weights
    weights -= {"embedding.word_embeddings.weight", "output_layer.weight"}  # padded there
    assert [n for n in weights if not same_bits(one[n], other[n])] == []
    listed = [
        read_listing([LocalFolder(f.parent).file(".metadata")]) for f in (*tmp_path.rglob(".metadata"), *path.rglob(".metadata"))
    ]
    chunks = [{n: set(t.sizes.items()) for n, t in found.tensors.items() if n in weights} for found in listed]
    assert chunks[0] == chunks[1]
    states = [{n for n in found.objects if "_extra_state" in n} for found in listed]
    assert states[0] == states[1]
    model = ["num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "swiglu", "normalization"]
    model += ["add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights", "position_embedding_type", "num_experts"]
    model += ["group_query_attention", "params_dtype", "tensor_model_parallel_size", "expert_model_parallel_size"]
    assert {n: mine.meta["args"][n] for n in model} == {n: theirs.meta["args"].get(n) for n in model}


def test_megatron_core_keeps_layers_apart_that_are_not_alike(tmp_path: Path) -> None:
    config = {**CONFIGS["mixtral"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 4, "moe_intermediate_size": 8}
    config |= {"mlp_only_layers": [0], "decoder_sparse_step": 1}
    CONFIGS["qwen3_moe"] = config
    there = check_round_trip(tmp_path, "qwen3_moe", "megatron_core", "tp=2")
    stored = there.with_names("stored")
    assert stored["decoder.layers.0.mlp.linear_fc1.weight"].shape == (24, 16)
    assert stored["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (4, 16, 16)
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in stored
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in stored
    assert there.meta["args"]["moe_layer_freq"] == [0, 1, 1, 1]
    assert there.meta["content_metadata"]["non_homogeneous_layers"] is True


# --- DeepSpeed --------------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden/deepspeed"


def loaded(file: Path) -> Any:
    """Load a file of `torch.save` by torch, with nothing but plain values allowed."""
    torch = pytest.importorskip("torch")
    return torch.load(file, weights_only=True)


def same_states(one: Checkpoint, other: Checkpoint) -> bool:
    """Say whether two checkpoints have the same masters and moments."""
    names = {kind: sorted(arrays) for kind, arrays in one.optimizer.items()}
    if names != {kind: sorted(arrays) for kind, arrays in other.optimizer.items()}:
        return False
    return all(same_bits(other.optimizer[k][n], a) for k, arrays in one.optimizer.items() for n, a in arrays.items())


@pytest.mark.parametrize("family", list(CONFIGS))
def test_universal_gives_back_what_it_was_made_of_and_has_masters(tmp_path: Path, family: str) -> None:
    there = check_round_trip(tmp_path, family, "universal", None, "bfloat16" if family == "llama" else "float32")
    assert list(there.optimizer) == ["master"]
    assert sorted(there.optimizer["master"]) == sorted(there)
    for name, array in there.items():
        assert same_bits(there.optimizer["master"][name], np.asarray(array).astype(np.float32))
    assert dict(there.aliases) == dict(model_of("hf", CONFIGS[family]).ties)  # type: ignore[union-attr]
    assert (tmp_path / "there/latest_universal").read_text() == "global_step0_universal"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("golden", ["z2-bf16-dp2-roundrobin-aligned", "z2-fp32-dp2-frozen"])
def test_universal_keeps_masters_moments_and_step(tmp_path: Path, golden: str, stage: int) -> None:
    src = meshload.open(GOLDEN / golden)
    meshload.convert(src, tmp_path / "out", to=Universal(stage=stage), optimizer=True)
    found = meshload.open(tmp_path / "out")
    assert not found.problems
    assert sorted(found) == sorted(src)
    assert [n for n in src if not same_bits(found[n], src[n])] == []
    assert same_states(src, found)
    assert found.meta["optimizer"]["step"] == src.meta["optimizer"]["step"] == found.meta["step"] == 2
    assert found.meta["optimizer"]["param_groups"] == src.meta["optimizer"]["param_groups"]
    assert found.meta["buffers"] == src.meta["buffers"]
    start = "zero_pp_rank_0_mp" if stage == 3 else "mp"
    assert [f.name for f in (tmp_path / "out/global_step2_universal").glob("*.pt")] == [f"{start}_rank_00_model_states.pt"]


def test_universal_has_what_deepspeeds_loaders_ask_for(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    src = meshload.open(GOLDEN / "z2-fp32-dp2-frozen")
    meshload.convert(src, tmp_path / "out", to="universal", optimizer=["exp_avg", "exp_avg_sq"])
    folder = tmp_path / "out/global_step2_universal"
    name = "model.layers.1.self_attn.q_proj.weight"
    assert name in src.optimizer["master"]
    assert {f.name for f in (folder / "zero" / name).iterdir()} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}
    master = loaded(folder / "zero" / name / "fp32.pt")
    assert set(master) == {"cat_dim", "param"}
    assert np.array_equal(master["param"].numpy(), np.asarray(src[name]))  # as nobody asked for the source's
    step = loaded(folder / "zero" / name / "step.pt")
    assert (step.dtype, step.item()) == (torch.float32, 2)
    trained = {f.name for f in (folder / "zero").iterdir() if f.is_dir()}
    assert trained == set(src.optimizer["master"]) != set(src)
    state = loaded(folder / "mp_rank_00_model_states.pt")
    assert {n: tuple(shape) for n, shape in state["param_shapes"][0].items()} == {n: src[n].shape for n in src if n in trained}
    assert (state["global_steps"], state["skipped_steps"], state["dp_world_size"], state["mp_world_size"]) == (2, 0, 1, 1)
    assert "universal_checkpoint_version" in state["universal_checkpoint_info"]
    assert {n: tuple(t.shape) for n, t in state["module"].items()} == {n: a.shape for n, a in src.items()}


def test_universal_has_a_group_for_each_weight_since_loaders_leave_those_without_one(tmp_path: Path) -> None:
    meshload.convert(source(tmp_path / "src", "llama"), tmp_path / "out", to="universal")
    from meshload_adapters._torch_file import TorchFile

    root = TorchFile.open(LocalFolder(tmp_path / "out/global_step0_universal/zero").file("optimizer_state.pt")).root
    assert [g["params"] for g in root["param_groups"]] == [[i] for i in range(len(meshload.open(tmp_path / "src")))]
    assert meshload.open(tmp_path / "out").meta["optimizer"]["param_groups"] == []


def test_universal_says_which_dim_ranks_of_tp_cut(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama")
    meshload.convert(src, tmp_path / "out", to="universal", mesh="pp=2,tp=2")
    notes = meshload.open(tmp_path / "out").meta["parameters"]
    at = "model.layers.2."
    cuts = {n: notes.get(n, {}).get("cat_dim") for n in meshload.open(src)}
    assert (cuts[f"{at}self_attn.q_proj.weight"], cuts[f"{at}self_attn.o_proj.weight"]) == (0, 1)
    assert (cuts[f"{at}mlp.down_proj.weight"], cuts["lm_head.weight"], cuts["model.norm.weight"]) == (1, 0, None)
    with pytest.raises(meshload.LayoutError, match=r"k_proj.weight: the 4 ranks of tp hold no equal parts of one dim"):
        meshload.convert(source(tmp_path / "kv", "llama", vocab_size=28), tmp_path / "not", to="universal", mesh="tp=4")
    assert not (tmp_path / "not").exists()


def test_what_universal_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    moments = meshload.open(GOLDEN / "z2-fp32-dp2-frozen")
    without = replace(moments, meta={})
    with pytest.raises(meshload.LayoutError, match=r"exp_avg, exp_avg_sq are of is told nowhere.*Universal\(step=...\)"):
        meshload.convert(without, tmp_path / "out", to="universal", optimizer=True)
    meshload.convert(without, tmp_path / "told", to=Universal(step=7), optimizer=True)
    assert meshload.open(tmp_path / "told").meta["optimizer"]["step"] == 7
    name = "model.norm.weight"
    holes = {**moments.optimizer, "exp_avg": {n: a for n, a in moments.optimizer["exp_avg"].items() if n != name}}
    with pytest.raises(meshload.LayoutError, match=rf"exp_avg of all trained weights or of none; of 17, 1 lack it: {name}"):
        meshload.convert(replace(moments, optimizer=holes), tmp_path / "out", to="universal", optimizer=True)
    with pytest.raises(meshload.LayoutError, match="a/b: a weight's name is that of its folder"):
        meshload.convert(write_checkpoint(tmp_path / "x", {"a/b": np.zeros(3)}), tmp_path / "out", to="universal")
    with pytest.raises(meshload.LayoutError, match="weights='master' says what is read"):
        meshload.convert(moments, tmp_path / "out", to=Universal(weights="master"))
    with pytest.raises(meshload.LayoutError, match="stage=4: 1, 2 or 3 was expected"):
        Universal(stage=4)
    assert not (tmp_path / "out").exists()


def test_live_tensors_are_saved_as_a_universal_checkpoint(tmp_path: Path) -> None:
    arrays = {n: ramp(n, (3, 5), ml_dtypes.bfloat16) for n in ("a.weight", "b.weight")}
    meshload.save(tmp_path / "out", arrays, to="universal", layout="replicated", mesh="tp=1")
    found = meshload.open(tmp_path / "out")
    assert {n: same_bits(found[n], a) for n, a in arrays.items()} == dict.fromkeys(arrays, True)
    assert all(same_bits(found.optimizer["master"][n], a.astype(np.float32)) for n, a in arrays.items())


# --- Fast-LLM ---------------------------------------------------------------------------------------------------------

FAST_LLM = Path(__file__).parent / "golden/fast_llm"


@pytest.mark.parametrize("to", ["fast_llm", FastLLM(distributed=True), FastLLM(distributed=True, layers_per_stage=2)])
@pytest.mark.parametrize("mesh", [None, "pp=2,tp=2,dp=3"])
def test_fast_llm_gives_back_what_it_was_made_of(tmp_path: Path, mesh: str | None, to: Any) -> None:
    there = check_round_trip(tmp_path, "mixtral", to, mesh)
    files = sorted(f.name for f in (tmp_path / "there").glob("*.safetensors"))
    if to == "fast_llm":
        assert (there.meta["stored_format"], files) == ("fast_llm", ["model_0.safetensors"])
    else:
        assert there.meta["stored_format"] == "distributed"
        assert files == sorted(f"rank_{r}.safetensors" for r in range(12 if mesh else 1))
    assert (tmp_path / "there/ok").read_bytes() == b""


FLAT: dict[str, tuple[str | None, dict[str, Any]]] = {
    "qwen2_tied_pp2_dp2/distributed": ("pp=2,dp=2", {}),
    "layouts/llama_frozen_pp3_dp2": ("dp=2,pp=3", {}),
    "layouts/llama_untied_one_rank": (None, {"layers_per_stage": 2}),
    "layouts/mtp_tied_pp2": ("pp=2", {}),
    "layouts/pattern_norms_whole_vocab_tp2": ("tp=2,dp=2", {"layers_per_stage": 2}),
    "layouts/qwen2_tp2_dp2": ("tp=2,dp=2", {"layers_per_stage": 3}),
    "layouts/qwen2_before_june_2026": ("tp=2,dp=2", {"layers_per_stage": 3, "decay": "all"}),
}


@pytest.mark.parametrize("case", FLAT)
def test_every_ranks_vectors_are_those_that_fast_llm_wrote(tmp_path: Path, case: str) -> None:
    mesh, options = FLAT[case]
    decay = {key: value for key, value in options.items() if key == "decay"}
    src = meshload.open(FAST_LLM / case, format=FastLLM(**decay))
    to = FastLLM(distributed=True, **options)
    meshload.convert(src, tmp_path / "out", to=to, mesh=mesh, layout="replicated", optimizer=True)
    files = sorted(f.name for f in (FAST_LLM / case).glob("rank_*"))
    assert sorted(f.name for f in (tmp_path / "out").glob("*.safetensors")) == files
    for file in files:
        mine, theirs = read_safetensors(tmp_path / "out" / file), read_safetensors(FAST_LLM / case / file)
        assert {n: a.tobytes() for n, a in mine.items()} == {n: a.tobytes() for n, a in theirs.items()}, file
    found = meshload.open(tmp_path / "out", format=FastLLM(**decay))
    assert found.meta["metadata"].get("documents_seen") == src.meta["metadata"].get("documents_seen")
    assert found.meta["metadata"]["optimizer"]["current_step"] == src.meta["metadata"]["optimizer"]["current_step"]
    assert (found.meta["step"], found.meta["states"]) == (src.meta["step"], ("weights", "exp_avgs", "exp_avgs_sq"))
    assert found.meta["fast_llm_config"]["base_model"] == src.meta["fast_llm_config"]["base_model"]


def test_fast_llms_frozen_weights_are_written_without_moments(tmp_path: Path) -> None:
    path = FAST_LLM / "layouts/llama_frozen_pp3_dp2"
    meshload.convert(path, tmp_path / "out", to="fast_llm", optimizer=True)
    src, found = meshload.open(path), meshload.open(tmp_path / "out")
    assert sorted(found) == sorted(src)
    for kind, moments in src.optimizer.items():
        assert sorted(found.optimizer[kind]) == sorted(moments)
        assert all(same_bits(found.optimizer[kind][name], np.asarray(array)) for name, array in moments.items())


def within(part: Any, whole: Any) -> bool:
    """Say whether a config is part of another one."""
    if isinstance(part, dict):
        return all(key in whole and within(value, whole[key]) for key, value in part.items())
    return bool(part == whole)


def test_fast_llms_metadata_says_what_fast_llm_says_and_yaml_reads_it(tmp_path: Path) -> None:
    theirs = meshload.open(FAST_LLM / "qwen2_tied_pp2_dp2/distributed")
    assert theirs.config is not None
    assert within(base_of(theirs.config), theirs.meta["fast_llm_config"]["base_model"])
    meshload.convert(source(tmp_path / "src", "qwen2"), tmp_path / "out", to=FastLLM(distributed=True), mesh="tp=2,dp=2")
    text = (tmp_path / "out/metadata.yaml").read_text()
    told = yaml_loaded(text, "metadata.yaml")
    assert told == pytest.importorskip("yaml").safe_load(text)
    assert told["config"]["distributed"] == {"world_size": 4, "local_world_size": 4, "rank": 0, "tensor_parallel": 2}
    assert told["config"]["base_model"]["decoder"]["block"]["mixer"]["rotary"] == {"type": "default", "theta": 1e6}
    head = read_header(LocalFolder(tmp_path / "out").file("rank_3.safetensors")).metadata
    assert {key: yaml_loaded(value, key) for key, value in head.items()} == told


def test_yaml_is_read_as_it_was_written() -> None:
    value = {
        "a": [1, -2.5, 1e-06, 1e30, True, None, "yes", "0.4.0", "it's", "a: b", "é\n", "", "1e3", "~"],
        "b": {},
        "c": [[], {"d": [{}]}],
    }
    assert yaml_loaded(dumped(value), "text") == value
    assert pytest.importorskip("yaml").safe_load(dumped(value)) == value


def test_fast_llm_has_a_rope_that_is_scaled(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 64}
    new = {"rope_parameters": {**scaled, "rope_theta": 5e5}}
    old = {"rope_theta": 5e5, "rope_scaling": scaled}
    rotary = [base_of({**CONFIGS["llama"], **keys})["decoder"]["block"]["mixer"]["rotary"] for keys in (new, old)]
    assert rotary[0] == rotary[1]
    told = {"type": "llama3", "theta": 5e5, "scale_factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
    assert rotary[0] == {**told, "original_context_length": 64}


def test_a_vocabulary_that_does_not_divide_is_whole_on_each_tensor_rank(tmp_path: Path) -> None:
    src = source(tmp_path / "src", "llama", vocab_size=27)
    meshload.convert(src, tmp_path / "out", to=FastLLM(distributed=True), mesh="tp=2")
    found = meshload.open(tmp_path / "out")
    assert found.meta["fast_llm_config"]["base_model"]["embeddings"]["vocab_parallel"] is False
    name = "embeddings.word_embeddings_weight"
    assert same_bits(found[name], meshload.open(src)["model.embed_tokens.weight"])
    assert len(found[name].pieces) == 2  # a copy in each file


def test_what_fast_llm_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out, flat = tmp_path / "out", FastLLM(distributed=True)
    llama = source(tmp_path / "llama", "llama")
    with pytest.raises(meshload.LayoutError, match=r"vectors are float32, and here is bfloat16; give dtype='float32'"):
        meshload.convert(source(tmp_path / "bf16", "llama", "bfloat16"), out, to=flat)
    with pytest.raises(meshload.LayoutError, match="it has none such as ep=2"):
        meshload.convert(source(tmp_path / "mixtral", "mixtral"), out, to=flat, mesh="ep=2")
    with pytest.raises(meshload.LayoutError, match="2 head groups, 4 tensor ranks"):
        meshload.convert(llama, out, to=flat, mesh="tp=4", layout="replicated")
    with pytest.raises(meshload.LayoutError, match=r"no fast_llm table for model_type 'gpt_neox'"):
        meshload.convert(source(tmp_path / "neox", "gpt_neox"), out, to="fast_llm")
    for keys, why in (
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'.*cannot be said"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'llama3' lack factor, original_max"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ):
        with pytest.raises(meshload.LayoutError, match=why):
            meshload.convert(llama, out, to="fast_llm", config={**CONFIGS["llama"], **keys})
    moments = meshload.open(FAST_LLM / "qwen2_tied_pp2_dp2/distributed")
    told = {key: value for key, value in moments.meta.items() if key == "fast_llm_config"}
    with pytest.raises(meshload.LayoutError, match=r"told nowhere.*FastLLM\(step=...\)"):
        meshload.convert(replace(moments, meta=told), out, to=flat, optimizer=True, names="native")
    other = {n: moments.optimizer["exp_avg"][n] for n in moments}
    wrong = replace(moments, optimizer={**moments.optimizer, "master": other})
    with pytest.raises(meshload.LayoutError, match=r"weights are the masters, and these are others.*weights='master'"):
        meshload.convert(wrong, out, to=flat, optimizer=True, names="native")
    with pytest.raises(meshload.LayoutError, match=r"llama, mistral, mixtral, qwen2; model_type is None; give config="):
        meshload.convert(write_checkpoint(tmp_path / "x", {"w": np.zeros(3)}), out, to="fast_llm")
    assert not out.exists()


def test_moments_go_to_fast_llm_from_elsewhere(tmp_path: Path) -> None:
    src = meshload.open(FAST_LLM / "qwen2_tied_pp2_dp2/distributed")
    meshload.convert(src, tmp_path / "universal", to=Universal(step=2), optimizer=True)
    there = meshload.open(tmp_path / "universal", format=Universal(weights="master"))
    assert "model.layers.0.self_attn.k_proj.weight" in there.optimizer["exp_avg"]
    meshload.convert(there, tmp_path / "out", to="fast_llm", optimizer=["exp_avg", "exp_avg_sq"])
    found = meshload.open(tmp_path / "out")
    assert same_states(src, found)
    assert found.meta["step"] == found.meta["metadata"]["optimizer"]["current_step"] == 2


# --- boxes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "names"), [("llama", "megatron"), ("mixtral", "hf")])
def test_the_box_of_a_slice_says_where_it_lies(tmp_path: Path, family: str, names: str) -> None:
    checkpoint = meshload.open(source(tmp_path / "src", family, num_hidden_layers=2))
    shown = checkpoint.with_names(names)
    for mesh, layout in (
        ("pp=2,tp=2", None),
        ("dp=3", Layout.default(dp="cut")),
        ("tp=4", Layout.default(pad={"vocab": 8})),
        ("tp=1", None),
    ):
        plan = meshload.plan(checkpoint, mesh=mesh, rank="all", names=names, layout=layout)
        for rank in sorted({t.rank for t in plan.targets}):
            restored = meshload.restore(checkpoint, mesh=mesh, rank=rank, names=names, layout=layout, into="numpy")
            for target in (t for t in plan.targets if t.rank == rank and t.box is not None):
                at = tuple(slice(a, b) for a, b in zip(target.box.start, target.box.stop, strict=True))
                held = restored[target.name][tuple(slice(n) for n in target.box.shape)]
                assert same_bits(held, np.asarray(shown[target.name])[at]), (target.name, rank, mesh)
                assert target.box.size == target.filled
        boxed = {t.name for t in plan.targets if t.box is not None}
        assert {n for n in shown if "linear_fc1.weight" not in n and "linear_qkv" not in n} <= boxed
