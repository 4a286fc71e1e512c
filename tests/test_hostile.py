"""What hostile files, configs and arguments give: the right arrays or a `MeshloadError`, never less than was asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ml_dtypes
import numpy as np
import pytest

import meshload
from meshload import Layout
from meshload.cli import main
from meshload.errors import FormatError, LayoutError, LimitError, MeshloadError, MissingArray, SourceError
from meshload.testing import ramp, same_bits, write_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}
LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
ENDS = {"model.embed_tokens.weight": (13, 16), "model.norm.weight": (16,), "lm_head.weight": (13, 16)}
SHAPES = ENDS | {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()}
LLAMA = {name: ramp(name, shape) for name, shape in SHAPES.items()}
QWEN = CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 6}


def llama(folder: Path, **changes: Any) -> Path:
    return write_checkpoint(folder, LLAMA, CONFIG | changes)


def restore(path: Any, **arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = meshload.restore(path, into="numpy", **arguments)
    return found


# --- nothing is left out in silence -----------------------------------------------------------------------------------


def without_a_shard(folder: Path) -> Path:
    write_checkpoint(folder, {f"w{i}": ramp(f"w{i}", (4, 2)) for i in range(6)}, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder


@pytest.mark.parametrize("layout", [None, "replicated", {"*": ("tp",)}])
def test_a_missing_shard_is_missed_without_a_table_too(tmp_path: Path, layout: Any) -> None:
    mesh = {"mesh": "tp=2", "rank": 0} if isinstance(layout, dict) else {}
    with pytest.raises(MissingArray, match=r"w2, w3.*model-00002-of-00003"):
        restore(without_a_shard(tmp_path), layout=layout, **mesh)


def test_a_missing_shard_is_left_out_where_that_is_asked(tmp_path: Path) -> None:
    path = without_a_shard(tmp_path)
    assert sorted(restore(path, missing="ignore")) == ["w0", "w1", "w4", "w5"]
    assert sorted(restore(path, exclude=["w2", "w3"])) == ["w0", "w1", "w4", "w5"]
    assert meshload.plan(path, missing="ignore").missing == ("w2", "w3")


def test_globs_from_a_generator_admit_every_name(tmp_path: Path) -> None:
    assert set(restore(llama(tmp_path), include=(glob for glob in ["*"]))) == set(LLAMA)


def test_rank_all_is_for_plans(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="plan"):
        restore(llama(tmp_path), mesh="tp=2", rank="all")


def test_a_rank_without_a_mesh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="rank=1: without mesh="):
        restore(llama(tmp_path), rank=1)


def test_a_plan_takes_a_rank_of_numpy(tmp_path: Path) -> None:
    rank: Any = np.int64(1)
    assert meshload.plan(llama(tmp_path), mesh="tp=2", rank=rank).targets[0].ranks == (1,)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        Layout({"embed": "tp", "heads": "tp"}),
        Layout({"vocab": "tp"}, rows="tp"),
        Layout({"layer": "tp", "ffn": "tp"}),
        Layout({"layer": "tp", "vocab": "tp"}),
    ],
    ids=["two dims", "rows", "layers", "the outer stages"],
)
def test_an_axis_that_would_cut_an_array_twice_is_refused(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(LayoutError, match="'tp' cuts both"):
        restore(llama(tmp_path), mesh="tp=2", rank=0, layout=layout)


@pytest.mark.parametrize(
    "arguments",
    [
        {"axes": {"heads": ("tp", "tp")}},
        {"axes": {"heads": 5}},
        {"axes": {}, "rows": 5},
        {"axes": {}, "virtual": 0},
        {"axes": {}, "virtual": -1},
        {"axes": {}, "pad": {"vocab": 0}},
        {"axes": {}, "pad": {"vocab": "8"}},
        {"axes": {}, "stages": [3, -1]},
        {"axes": {}, "stages": [1.0, 1.0]},
        {"axes": {}, "stages": 2},
    ],
    ids=str,
)
def test_a_layout_checks_its_values(arguments: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**arguments)


@pytest.mark.parametrize("dim", ["nothing", "heads", "kv_heads", "layer"])
def test_a_dim_that_cannot_be_padded_is_named(tmp_path: Path, dim: str) -> None:
    with pytest.raises(LayoutError, match=f"pad: {dim} cannot be padded"):
        restore(llama(tmp_path), mesh="tp=2", rank=0, layout=Layout.default(pad={dim: 8}))


@pytest.mark.parametrize("layout", [5, [], {"*": 5}, {"*": (5,)}, {"*": b"tp"}], ids=str)
def test_what_is_no_layout_is_refused(tmp_path: Path, layout: Any) -> None:
    with pytest.raises(LayoutError):
        restore(llama(tmp_path), mesh="tp=2", rank=0, layout=layout)


def test_a_mesh_of_too_many_ranks_to_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="more than can be counted"):
        restore(llama(tmp_path), mesh=f"tp={10**20}", rank=0)


@pytest.mark.parametrize("word", ["max_bytes", "merge_gap"])
@pytest.mark.parametrize("n", [-1, "1", True, float("nan"), float("inf"), 10**30], ids=str)
def test_what_is_no_number_of_bytes_is_refused(tmp_path: Path, word: str, n: Any) -> None:
    with pytest.raises(LayoutError, match=f"{word}=.*a number of bytes"):
        restore(llama(tmp_path), **{word: n})


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": "2"},
    ],
    ids=str,
)
def test_a_config_out_of_all_bounds_is_refused_at_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        restore(llama(tmp_path, **changes), mesh="pp=2", rank=0)


@pytest.mark.parametrize("value", ["fp8", 4, [4], True])
def test_a_quantisation_that_is_no_object_is_none(tmp_path: Path, value: Any) -> None:
    found = restore(llama(tmp_path, quantization_config=value))
    assert all(same_bits(found[name], values) for name, values in LLAMA.items())


@pytest.mark.parametrize("blocks", [[4], [4, 4, 4], [0, 4], [4, -4], [4.0, 4.0], ["4", "4"], "x", True], ids=str)
def test_blocks_that_are_no_two_sizes_are_refused(tmp_path: Path, blocks: Any) -> None:
    scaled = LLAMA | {"model.layers.0.mlp.up_proj.weight_scale_inv": np.ones((6, 4), np.float32)}
    quantisation = {"quant_method": "fp8", "weight_block_size": blocks}
    with pytest.raises(LayoutError, match="weight_block_size"):
        restore(write_checkpoint(tmp_path, scaled, CONFIG | {"quantization_config": quantisation}))


def qwen() -> dict[str, Any]:
    arrays = {name: a for name, a in LLAMA.items() if ".mlp." not in name}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes = {"self_attn.q_norm": (4,), "self_attn.k_norm": (4,), "mlp.gate": (4, 16)}
        for e in range(4):
            expert = {"gate_proj": (6, 16), "up_proj": (6, 16), "down_proj": (16, 6)}
            shapes |= {f"mlp.experts.{e}.{name}": shape for name, shape in expert.items()}
        arrays |= {f"{layer}.{name}.weight": ramp(f"{layer}.{name}", shape) for name, shape in shapes.items()}
    return arrays


@pytest.mark.parametrize("changes", [{"mlp_only_layers": 3}, {"mlp_only_layers": "x"}, {"decoder_sparse_step": "1"}], ids=str)
def test_experts_are_not_dropped_where_a_config_key_has_a_wrong_type(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="expected"):
        restore(write_checkpoint(tmp_path, qwen(), QWEN | changes))


@pytest.mark.parametrize("to", ["megatron", "megatron_core", "fast_llm"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": "1e4"},
        {"rope_theta": 10**400},
        {"rope_parameters": 5},
        {"rope_parameters": {"rope_theta": [1e4]}},
        {"rms_norm_eps": "1e-6"},
        {"rms_norm_eps": True},
    ],
    ids=str,
)
def test_what_is_no_number_is_not_written_where_a_number_is_read(tmp_path: Path, to: str, changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=r"config: (rope_theta|rope_parameters|rms_norm_eps) is .* was expected"):
        meshload.convert(llama(tmp_path / "src", **changes), tmp_path / "out", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_an_order_that_the_config_does_not_say_is_asked_for_on_the_way_out_too(tmp_path: Path) -> None:
    path = llama(tmp_path)
    with pytest.raises(LayoutError, match="rope_type"):
        restore(path, names="maxtext")
    with pytest.raises(LayoutError, match="rope_type"):
        meshload.open(path).with_names("maxtext")
    assert restore(path, names="maxtext", config={"rope_type": "default", "scan_layers": True})


@pytest.mark.parametrize("word", ["llama3_1", "nonsense", 5, True])
def test_an_order_by_an_unknown_word_is_asked_for(tmp_path: Path, word: Any) -> None:
    with pytest.raises(LayoutError, match="rope"):
        restore(llama(tmp_path), names="maxtext", config={"rope_type": word, "scan_layers": True})


@pytest.mark.parametrize(
    "layout", ['{"*": 5}', '{"*": null}', '{"*": "tp"}', "[" * 100_000], ids=["number", "null", "word", "deep"]
)
def test_the_command_line_refuses_what_is_no_layout(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(llama(tmp_path)), "--mesh", "tp=2", "--layout", layout])
    assert (end.value.code, capsys.readouterr().err[:10]) == (2, "meshload: ")


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama(tmp_path))
    with pytest.raises(FormatError, match="empty"):
        meshload.open("")


def test_a_shape_that_finds_no_memory_is_a_limit_error(tmp_path: Path) -> None:
    entry = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"w": entry}, "use_ocdbt": False}))
    array = {"zarr_format": 2, "dtype": "<f4", "compressor": None, "fill_value": None, "filters": None, "order": "C"}
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_text(json.dumps(array | {"shape": [10**17], "chunks": [10**17]}))
    with pytest.raises(LimitError, match=r"w: \(100000000000000000,\) of float32"):
        restore(tmp_path, max_bytes=1 << 61)


@pytest.mark.parametrize(("shape", "blocks"), [((16,), None), ((4, 4), None), ((3, 4), [4, 4]), ((4, 4, 1), [4, 4])])
def test_scales_that_fit_no_element_are_refused(tmp_path: Path, shape: tuple[int, ...], blocks: Any) -> None:
    arrays = {"w": ramp("w", (16, 16), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones(shape, np.float32)}
    config = {"model_type": "none", "quantization_config": {"quant_method": "fp8", "weight_block_size": blocks}}
    with pytest.raises(LayoutError, match="scales"):
        restore(write_checkpoint(tmp_path, arrays, config), dtype="float32")


def test_stacked_experts_have_each_their_own_scales(tmp_path: Path) -> None:
    values, scales = ramp("w", (3, 4, 8), ml_dtypes.float8_e4m3fn), ramp("s", (3, 2, 2)) / 1000
    config = {"model_type": "none", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}
    path = write_checkpoint(tmp_path, {"w": values, "w_scale_inv": scales}, config)
    expected = values.astype(np.float32) * scales.repeat(2, axis=1).repeat(4, axis=2)
    assert same_bits(restore(path, dtype="float32")["w"], expected)


def test_a_damaged_config_is_named_where_a_table_is_needed(tmp_path: Path) -> None:
    (llama(tmp_path) / "config.json").write_text('{"model_type": NaN}')
    with pytest.raises(LayoutError, match=r"config\.json: not JSON.*NaN"):
        restore(tmp_path, mesh="tp=2", rank=0)


# --- paths and files --------------------------------------------------------------------------------------------------


def test_a_file_url_is_percent_encoded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "ä model 100%", {"w": ramp("w", (2,))})
    assert same_bits(meshload.open(f"file://{quote(str(path))}")["w"], ramp("w", (2,)))


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["y" * 200] * 30), "~nobody_has_this_name/x"], ids=["long", "deep", "home"])
def test_a_path_that_the_system_refuses_is_a_source_error(path: str) -> None:
    with pytest.raises(SourceError, match="cannot be opened"):
        meshload.open(path)


def test_the_root_folder_is_no_checkpoint() -> None:
    with pytest.raises(FormatError):
        meshload.open("file:///")


def test_a_file_that_was_replaced_since_it_was_opened_is_not_read_by_the_old_header(tmp_path: Path) -> None:
    names = [f"w{i:03}" for i in range(100)]  # more files than are kept open
    path = write_checkpoint(tmp_path / "a", {n: ramp(n, (2, 3)) for n in names}, shards=100)
    opened = meshload.open(path)
    other = write_checkpoint(tmp_path / "b", {n: ramp(f"other {n}", (2, 3)) for n in names}, shards=100)
    for file in other.glob("*.safetensors"):
        os.utime(file, (1, 1))
        file.replace(path / file.name)
    with pytest.raises(SourceError, match="replaced or changed"):
        restore(opened)


@pytest.mark.parametrize("size", [-8, 0, 8])
def test_a_file_of_another_size_is_not_read_by_the_old_header(tmp_path: Path, size: int) -> None:
    path = write_checkpoint(tmp_path, {"a": ramp("a", (64,)), "b": ramp("b", (64,))})
    opened, file = meshload.open(path), path / "model.safetensors"
    data = (file.read_bytes() + bytes(8))[: file.stat().st_size + size]
    file.write_bytes(data.replace(ramp("a", (64,)).tobytes(), bytes(256)))
    os.utime(file, (1, 1))
    with pytest.raises(SourceError, match="open it again"):
        np.asarray(opened["a"])


def test_names_of_nothing_but_wrappers_stay(tmp_path: Path) -> None:
    assert list(meshload.open(write_checkpoint(tmp_path, {"_orig_mod": ramp("x", (2,)), "w": ramp("w", (2,))}))) == [
        "_orig_mod",
        "w",
    ]


def test_moments_that_cannot_be_read_are_missed(tmp_path: Path) -> None:
    store = pytest.importorskip("tensorstore")
    entries = {}
    for name in ("params.w", "opt_state.0.count", "opt_state.0.mu.w", "opt_state.0.nu.w"):
        keys = [{"key": key, "key_type": 2} for key in name.split(".")]
        entries[name] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
        shape = () if name.endswith("count") else (2, 3)
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/{name}/"}}
        made = store.open(spec, create=True, dtype=store.float32, shape=shape).result()
        made.write(ramp(name, shape)).result()
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_ocdbt": False}))
    assert "optimizer.exp_avg_sq.params.w" in restore(tmp_path, optimizer=True)
    (tmp_path / "opt_state.0.nu.w" / ".zarray").write_text("damaged")
    with pytest.raises(MeshloadError, match=r"opt_state\.0\.nu\.w"):
        restore(tmp_path, optimizer=True)
