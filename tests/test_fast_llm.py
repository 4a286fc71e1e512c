"""Fast-LLM's checkpoints: what it wrote, as names and as flat vectors, on other meshes, and in the ways that hurt users."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import meshload
from meshload import FormatError, Layout, LayoutError, MeshloadError, MeshloadWarning
from meshload.errors import MissingArray, MissingPieces
from meshload.formats import installed
from meshload.pattern import Table, parse_table, refined
from meshload.source import open_folder
from meshload.testing import (
    FormatSuite,
    counted,
    ramp,
    read_safetensors,
    same_bits,
    write_checkpoint,
    write_safetensors,
)
from meshload_adapters._fast_llm_config import huggingface
from meshload_adapters._fast_llm_layout import Ranks, Section, layout_of, model_of
from meshload_adapters._yaml import loaded
from meshload_adapters.formats.fast_llm import FastLLM
from meshload_adapters.models import fast_llm, hf

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden" / "fast_llm"
SHARED = HERE.parent.parent / "shared" / "fixtures"
LAYOUTS = sorted(d.name for d in (GOLDEN / "layouts").iterdir())
TRAINED = ("llama_tp2_sdp2_stp", "qwen2_tied_pp2_dp2", "qwen2_tied_tp2")
MESHES = ("tp=2", "pp=2", "tp=2,pp=2", "dp=3", "pp=2,tp=2,dp=2")

Values = Any
EMBEDDING, HEAD = "embeddings.word_embeddings_weight", "head.output_weights"
KINDS = {"weights": "master", "exp_avgs": "exp_avg", "exp_avgs_sq": "exp_avg_sq"}


def fixture(name: str) -> Path:
    found = next((at / name for at in (GOLDEN, SHARED / "fast_llm") if (at / name).is_dir()), None)
    if found is None:
        pytest.skip(f"{name} stands beside the project only")
    return found


def golden(name: str) -> dict[str, Values]:
    """Return what the running model held: `parameter/state`."""
    where = fixture(name)
    files = sorted((where / "fast_llm").glob("*.safetensors"))
    found: dict[str, Values] = {}
    for file in [where / "golden.safetensors"] if (where / "golden.safetensors").exists() else files:
        found |= read_safetensors(file)
    return found


def held(checkpoint: meshload.Checkpoint) -> dict[str, Values]:
    """Return all that a checkpoint gives, as the golden files name it."""
    found = {f"{name}/weights": array for name, array in checkpoint.items()}
    for state, kind in KINDS.items():
        found |= {f"{name}/{state}": array for name, array in checkpoint.optimizer.get(kind, {}).items()}
    return found


def decay_of(case: str) -> FastLLM:
    return FastLLM(decay="all" if "before" in case else None)


def opened(case: str) -> meshload.Checkpoint:
    return meshload.open(GOLDEN / "layouts" / case, format=decay_of(case))


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile))


def changed(folder: Path, old: str, new: str) -> Path:
    """Change a folder's metadata."""
    text = (folder / "metadata.yaml").read_text()
    assert old in text
    (folder / "metadata.yaml").write_text(text.replace(old, new))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(GOLDEN / "qwen2_tied_pp2_dp2" / "distributed", tmp_path)


# --- what Fast-LLM wrote ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["distributed", "fast_llm"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_weight_and_moment_is_equal_bit_for_bit(name: str, kind: str) -> None:
    checkpoint = meshload.open(fixture(name) / kind)
    expected, found = golden(name), held(checkpoint)
    assert set(found) == set(expected)
    assert [key for key in expected if not same_bits(found[key], expected[key])] == []
    assert (checkpoint.format, checkpoint.problems, dict(checkpoint.unavailable)) == ("fast_llm", (), {})
    assert dict(checkpoint.aliases) == ({HEAD: EMBEDDING} if "tied" in name else {})


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_rank_holds_what_fast_llm_says(case: str) -> None:
    checkpoint = opened(case)
    assert [name for name, array in checkpoint.items() if not same_bits(array, ramp(name, array.shape))] == []
    for state, kind in KINDS.items():
        of = "" if state == "weights" else f"{state}/"
        assert [n for n, a in checkpoint.optimizer[kind].items() if not same_bits(a, ramp(of + n, a.shape))] == []
    assert checkpoint.problems == ()
    assert meshload.check(GOLDEN / "layouts" / case, format=decay_of(case), copies=True).ok


def test_frozen_weights_have_no_moments() -> None:
    checkpoint = opened("llama_frozen_pp3_dp2")
    frozen = set(checkpoint) - set(checkpoint.optimizer["exp_avg"])
    assert frozen == {EMBEDDING, *(f"decoder.{i}.mlp.layer_{n}.weight" for i in range(4) for n in (1, 2))}
    assert set(checkpoint.optimizer["master"]) == set(checkpoint.optimizer["exp_avg_sq"]) == set(checkpoint) - frozen
    found = meshload.restore(checkpoint, into="numpy", optimizer=True)
    assert same_bits(found["optimizer.exp_avg.model.norm.weight"], ramp("exp_avgs/head.final_norm.weight", (8,)))
    assert "optimizer.exp_avg.model.embed_tokens.weight" not in found


def test_further_prediction_heads_are_tied_to_the_first() -> None:
    checkpoint = opened("mtp_tied_pp2")
    heads = [HEAD, *(f"multi_token_prediction.heads.{i}.output_weights" for i in range(2))]
    assert dict(checkpoint.aliases) == dict.fromkeys(heads, EMBEDDING)
    assert "multi_token_prediction.blocks.1.mixer.query.weight" in checkpoint
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] == "mtp_llama"


def test_steps_and_the_mesh_are_told() -> None:
    meta = meshload.open(GOLDEN / "qwen2_tied_pp2_dp2" / "distributed").meta
    assert (meta["step"], meta["fast_llm_version"], meta["states"]) == (2, "0.4.0", ("weights", "exp_avgs", "exp_avgs_sq"))
    assert meta["mesh"] == {"tensor": 1, "pipeline": 2, "data": 2}
    assert meta["metadata"]["optimizer"]["current_step"] == 2
    assert meta["optimizer"]["step"] == 2
    assert meta["fast_llm_config"]["multi_stage"] == {"layers_per_stage": 1.0}


@pytest.mark.parametrize("name", TRAINED)
def test_the_config_is_that_of_the_model_that_was_loaded(name: str) -> None:
    theirs = json.loads((fixture(name) / "hf_before_training" / "config.json").read_bytes())
    for kind in ("distributed", "fast_llm"):
        config = meshload.open(fixture(name) / kind, config=fixture(name) / "hf_before_training").config
        assert config is not None
        told = meshload.open(fixture(name) / kind).config
        assert told is not None
        assert {k: v for k, v in told.items() if k in theirs} == {k: theirs[k] for k in told if k in theirs}
        assert set(told) - set(theirs) <= {"head_dim", "sliding_window", "attention_bias", "mlp_bias"}


# --- under other names, on other meshes -------------------------------------------------------------------------------


def as_hugging_face(params: Mapping[str, Values], experts: int = 0) -> dict[str, Values]:
    """Rename and split by hand: the plain twin of the tables."""
    found: dict[str, Values] = {}
    ends = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight", "head.final_norm.weight": "model.norm.weight"}
    same = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
    same |= {"mixer.query": "self_attn.q_proj", "mixer.dense": "self_attn.o_proj", "mlp.router": "block_sparse_moe.gate"}
    for name, w in params.items():
        if name in ends:
            found[ends[name]] = w
            continue
        _, layer, rest = name.split(".", 2)
        module, _, last = rest.rpartition(".")
        at = f"model.layers.{layer}."
        if module == "mixer.key_value":
            found |= {f"{at}self_attn.{n}_proj.{last}": part for n, part in zip("kv", np.split(w, 2), strict=True)}
        elif module == "mlp.layer_1":
            names = [f"block_sparse_moe.experts.{e}.{n}" for e in range(experts) for n in ("w1", "w3")]
            names = names or ["mlp.gate_proj", "mlp.up_proj"]
            found |= {f"{at}{n}.{last}": part for n, part in zip(names, np.split(w, len(names)), strict=True)}
        elif module == "mlp.layer_2":
            names = [f"block_sparse_moe.experts.{e}.w2" for e in range(experts)] or ["mlp.down_proj"]
            found |= {
                f"{at}{n}.{last}": np.ascontiguousarray(part.T) for n, part in zip(names, np.split(w, len(names)), strict=True)
            }
        else:
            found[f"{at}{same[module]}.{last}"] = w
    return found


SHOWN = ("layouts/mixtral_tp2_pp2_dp2", "layouts/llama_frozen_pp3_dp2")


@pytest.mark.parametrize("name", [*SHOWN, "layouts/mixtral_before_june_2026"])
def test_other_ranks_get_what_they_get_of_the_hugging_face_files(name: str, tmp_path: Path) -> None:
    path = fixture(name) / ("" if "layouts" in name else "distributed")
    checkpoint = meshload.open(path, format=decay_of(name))
    params = {n: np.asarray(a) for n, a in checkpoint.items()}
    experts = 3 if "mixtral" in name else 0
    twin = meshload.open(write_checkpoint(tmp_path / "hf", as_hugging_face(params, experts), checkpoint.config))
    layout = Layout.default(dp="cut")
    assert set(checkpoint.with_names("hf")) == set(as_hugging_face(params, experts))
    for mesh in MESHES:
        count = int(np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")]))
        for rank in range(count):
            found = meshload.restore(checkpoint, mesh=mesh, rank=rank, into="numpy", layout=layout)
            expected = meshload.restore(twin, mesh=mesh, rank=rank, into="numpy", layout=layout)
            assert set(found) == set(expected)
            assert [n for n in expected if not same_bits(found[n], expected[n])] == []


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", TRAINED)
def test_moments_are_cut_like_their_weights(name: str, mesh: str, tmp_path: Path) -> None:
    checkpoint = meshload.open(fixture(name) / "distributed")
    truth, layout = golden(name), Layout.default(dp="cut")
    files = {}
    for state, kind in KINDS.items():
        params = {k.rpartition("/")[0]: v for k, v in truth.items() if k.endswith(f"/{state}")}
        files[kind] = meshload.open(write_checkpoint(tmp_path / kind, as_hugging_face(params), checkpoint.config))
    twin = replace(files["master"], optimizer={kind: dict(of) for kind, of in files.items()})
    for rank in range(int(np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")]))):
        found, expected = (
            meshload.restore(c, mesh=mesh, rank=rank, into="numpy", optimizer=True, layout=layout) for c in (checkpoint, twin)
        )
        assert set(found) == set(expected)
        assert [n for n in expected if not same_bits(found[n], expected[n])] == []


def local(name: str, w: Values, tp: int, rank: int, experts: int) -> Values:
    """Cut by hand as Fast-LLM does: each section of a fused weight on its own."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module == "dense":
        return np.split(w, tp, axis=1)[rank]
    sections = {"key_value": 2, "layer_1": 2 * experts, "layer_2": experts, "query": 1, "head": 1, "embeddings": 1}.get(module)
    if sections is None or "norm" in name:
        return w
    return np.concatenate([np.split(part, tp)[rank] for part in np.split(w, sections)])


def test_native_names_give_the_local_tensors_of_fast_llm() -> None:
    checkpoint = opened("mixtral_tp2_pp2_dp2")
    for rank in range(2):
        found = meshload.restore(checkpoint, mesh="tp=2", rank=rank, names="native", into="numpy")
        expected = {n: local(n, ramp(n, a.shape), 2, rank, 3) for n, a in checkpoint.items()}
        assert [n for n in expected if not same_bits(found[n], expected[n])] == []


def test_a_rank_reads_what_it_needs_and_a_copy_once() -> None:
    checkpoint, log = counted(meshload.open(fixture("llama_tp2_sdp2_stp") / "distributed"))
    found = meshload.restore(checkpoint, mesh="tp=2", rank=1, into="numpy", merge_gap=0)
    assert log.nbytes == sum(v.nbytes for v in found.values())


def test_the_tables_have_the_parts_of_hugging_faces() -> None:
    theirs = [parse_table(text) for text in hf.TABLES]
    for table in map(parse_table, fast_llm.TABLES):
        family = table.families[0]
        assert parts_of(table) == parts_of(next(t for t in theirs if family in t.families))


def parts_of(table: Table) -> dict[str, frozenset[str]]:
    lines = [
        (part, {*line.counted, *refined(line.pattern, table.joints).dims_of(part)}) for line in table.lines for part in line.parts
    ]
    return {part: frozenset(dims) for part, dims in lines}


# --- the order of flat vectors, which changed -------------------------------------------------------------------------


def test_an_order_that_nothing_tells_is_asked_for() -> None:
    for case in ("qwen2_before_june_2026", "mixtral_before_june_2026"):
        with pytest.raises(FormatError, match=r"June 2026.*FastLLM\(decay='matrices'\) for a later save, 'all' for an earlier"):
            meshload.open(GOLDEN / "layouts" / case)


def test_an_order_that_changed_nothing_here_is_not_asked_for(tmp_path: Path) -> None:
    """Without biases of split layers, and with the head tied, both orders are one."""
    path = changed(copied(GOLDEN / "layouts" / "mtp_tied_pp2", tmp_path), "  documents_seen: 3\n", "")
    checkpoint = meshload.open(path)
    assert [name for name, array in checkpoint.items() if not same_bits(array, ramp(name, array.shape))] == []


def test_a_setting_that_came_with_the_new_order_tells_it(tmp_path: Path) -> None:
    path = copied(GOLDEN / "layouts" / "pattern_norms_whole_vocab_tp2", tmp_path)
    assert len(meshload.open(changed(path, "  documents_seen: 3\n", ""))) == 36
    path = changed(path, "query_layer:\n              weight:\n                weight_decay: false\n            ", "")
    with pytest.raises(FormatError, match="June 2026"):
        meshload.open(path)


def test_versions_before_the_change_have_the_old_order(tmp_path: Path) -> None:
    path = changed(copied(GOLDEN / "layouts" / "qwen2_before_june_2026", tmp_path), "version: 0.4.0", "version: 0.3.0")
    checkpoint = meshload.open(path)
    assert [name for name, array in checkpoint.items() if not same_bits(array, ramp(name, array.shape))] == []


def test_a_later_version_is_refused_unless_its_order_is_said(folder: Path) -> None:
    changed(folder, "version: 0.4.0", "version: 0.5.1")
    with pytest.raises(FormatError, match=r"0\.5\.1; 0\.4 is the last whose flat vectors are known.*decay='matrices'"):
        meshload.open(folder)
    assert len(meshload.open(folder, format=FastLLM(decay="matrices"))) == 38


def test_the_option_is_one_of_two_words() -> None:
    with pytest.raises(LayoutError, match="decay='none': 'matrices' or 'all' was expected"):
        FastLLM(decay="none")


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_missing_rank_is_named_and_the_rest_stays(folder: Path) -> None:
    (folder / "rank_3.safetensors").unlink()
    checkpoint = meshload.open(folder)
    assert [(p.file, p.rank) for p in checkpoint.problems] == [("rank_3.safetensors", 3)]
    # of pipeline rank 1's stages, this is the second half of the data ranks; a stage's first parameters lie in the first half
    assert set(checkpoint.unavailable) >= {"decoder.0.mlp.layer_2.weight", "optimizer.exp_avg.decoder.0.mlp.layer_2.weight"}
    assert not any(n.removeprefix("optimizer.exp_avg.").startswith("decoder.1.") for n in checkpoint.unavailable)
    truth = golden("qwen2_tied_pp2_dp2")
    assert [n for n, a in checkpoint.items() if not same_bits(a, truth[f"{n}/weights"])] == []
    with pytest.raises(MissingArray, match=r"rank_3\.safetensors: not there, though metadata.yaml says that there are 4 ranks"):
        checkpoint["decoder.0.mlp.layer_2.weight"]
    with pytest.raises((MissingArray, MissingPieces), match="rank_3"):
        meshload.restore(folder, mesh="pp=2", rank=0, into="numpy")


def test_a_copy_stands_in_for_a_lost_rank(tmp_path: Path) -> None:
    path = copied(GOLDEN / "layouts" / "mixtral_tp2_pp2_dp2", tmp_path)
    (path / "rank_1.safetensors").unlink()  # tensor rank 1: norms and routers are on tensor rank 0 as well
    checkpoint = meshload.open(path)
    lost = {n for n in checkpoint.unavailable if not n.startswith("optimizer.")}
    assert lost
    assert not any("norm" in n or "router" in n for n in lost)
    assert set(checkpoint) | lost == set(opened("mixtral_tp2_pp2_dp2"))
    assert [n for n, a in checkpoint.items() if not same_bits(a, ramp(n, a.shape))] == []


def test_a_tied_weight_is_read_where_it_is_used_if_its_owner_is_lost(folder: Path) -> None:
    for rank in (0, 1):
        (folder / f"rank_{rank}.safetensors").unlink()
    checkpoint = meshload.open(folder)
    assert same_bits(checkpoint[EMBEDDING], golden("qwen2_tied_pp2_dp2")[f"{EMBEDDING}/weights"])
    assert same_bits(checkpoint[HEAD], golden("qwen2_tied_pp2_dp2")[f"{EMBEDDING}/weights"])
    assert "decoder.1.norm_1.weight" in checkpoint.unavailable


@pytest.mark.parametrize("harm", ["cut", "empty", "longer", "lacking"])
def test_a_damaged_rank_is_named(harm: str, folder: Path) -> None:
    file = folder / "rank_2.safetensors"
    raw = file.read_bytes()
    if harm == "lacking":
        arrays = read_safetensors(file)
        file.unlink()
        write_safetensors(file, {n: a for n, a in arrays.items() if n != "exp_avgs_shard"})
    else:
        file.write_bytes({"cut": raw[:-10], "empty": b"", "longer": raw + b"12345"}[harm])
    checkpoint = meshload.open(folder)
    (problem,) = checkpoint.problems
    words = {"cut": "truncated", "empty": "truncated", "longer": "5 trailing bytes", "lacking": r"\(9952,\), None, \(9952,\)"}
    assert (problem.file, problem.rank) == ("rank_2.safetensors", 2)
    with pytest.raises(MissingArray, match=rf"rank_2\.safetensors: .*{words[harm]}"):
        checkpoint["decoder.0.norm_1.weight"]


def test_vectors_that_the_config_does_not_give_are_refused(folder: Path) -> None:
    changed(folder, "intermediate_size: 48", "intermediate_size: 56")
    with pytest.raises(
        FormatError, match=r"rank_0\.safetensors: its vectors .* have the shapes .*9920.* the config gives .*10688.* all 4 files"
    ):
        meshload.open(folder)


def test_vectors_of_different_dtypes_are_refused(folder: Path) -> None:
    arrays = read_safetensors(folder / "rank_1.safetensors")
    (folder / "rank_1.safetensors").unlink()
    write_safetensors(folder / "rank_1.safetensors", {n: a.astype(np.float16) for n, a in arrays.items()})
    with pytest.raises(FormatError, match=r"different dtypes: rank_0\.safetensors has F32, F32, F32; rank_1\.safetensors has F16"):
        meshload.open(folder)


def test_an_unfinished_save_is_told(folder: Path) -> None:
    (folder / "ok").unlink()
    with pytest.warns(MeshloadWarning, match="no file ok, which is written last: the save may not have finished"):
        checkpoint = meshload.open(folder)
    assert [p.file for p in checkpoint.problems] == ["ok"]
    assert len(checkpoint) == 38


def test_files_of_another_run_are_told(folder: Path) -> None:
    shutil.copyfile(folder / "rank_3.safetensors", folder / "rank_4.safetensors")
    (problem,) = meshload.open(folder).problems
    assert problem.text == "rank_4.safetensors: not of this run, which has 4 ranks"


def test_a_ranks_file_says_what_lost_metadata_did(folder: Path) -> None:
    (folder / "metadata.yaml").unlink()
    assert FastLLM().matches(open_folder(folder))
    checkpoint = meshload.open(folder)
    assert held(checkpoint).keys() == golden("qwen2_tied_pp2_dp2").keys()
    assert [p.file for p in checkpoint.problems] == ["metadata.yaml"]


def test_differing_copies_are_found(tmp_path: Path) -> None:
    path = copied(GOLDEN / "layouts" / "qwen2_tp2_dp2", tmp_path)
    file = path / "rank_1.safetensors"
    raw = bytearray(file.read_bytes())
    checkpoint = meshload.open(path)
    pieces = checkpoint["decoder.0.norm_1.weight"].pieces
    row = next(i for i, s in enumerate(pieces.source) if pieces.sources[int(s)].name == file.name)
    raw[int(pieces.offset[row]) + 2] ^= 1
    file.write_bytes(bytes(raw))
    report = meshload.check(path, copies=True)
    assert {(p.array, p.file) for p in report.problems} >= {("decoder.0.norm_1.weight", "rank_1.safetensors")}
    assert same_bits(meshload.open(path)["decoder.0.norm_1.weight"], ramp("decoder.0.norm_1.weight", (8,)))  # the first
    with pytest.raises(MeshloadError, match=r"input_layernorm.*differ"):
        meshload.restore(path, into="numpy", copies="check")


def metadata_without(key: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        lines = (path / "metadata.yaml").read_text().splitlines(keepends=True)
        begin = next(i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
        end = next((i for i in range(begin + 1, len(lines)) if lines[i][0] not in " -"), len(lines))
        (path / "metadata.yaml").write_text("".join(lines[:begin] + lines[end:]))

    return harm


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (metadata_without("model"), "model is not in it; it may not be whole"),
        (metadata_without("config"), "config is not in it"),
        (metadata_without("shards"), r"shards is \[\]"),
        (("fast_llm_version: 0.4.0", "fast_llm_version: 0.2.1"), "0.2.1; parameters had other names before 0.3.0"),
        (("fast_llm_version: 0.4.0", "fast_llm_version: new"), "fast_llm_version is 'new'"),
        (("format: distributed", "format: llama"), "format is 'llama', 'distributed' or 'fast_llm' was expected"),
        (("model: gpt", "model: multimodal"), "model is 'multimodal'"),
        (("    world_size: 4\n", ""), "world_size is not there"),
        (("world_size: 4", "world_size: 3"), "a multiple of 1 tensor x 2 pipeline ranks"),
        (("world_size: 4", "world_size: many"), "world_size is 'many', a whole number was expected"),
        (("heads: 4", "heads: 5"), r"mixer\.heads is 5: they cannot be split"),
        (("        type: decoder", "        type: other"), r"block\.type is 'other'"),
        (("          type: attention", "          type: mamba"), r"mixer\.type is 'mamba'"),
        (("          type: mlp", "          type: hybrid_moe"), r"mlp\.type is 'hybrid_moe'"),
        (("      type: fixed", "      type: pattern"), r"decoder\.pattern is None"),
        (("type: rms_norm", "type: odd_norm"), r"normalization\.type is 'odd_norm'"),
        (("      type: none", "      type: lora"), r"peft\.type is 'lora': adapters"),
        (("embeddings:\n", "embeddings_layer:\n"), "before October 2025"),
        (("num_blocks: 4", "num_blocks: 100000000"), "num_blocks is 100000000: at most"),
        (("hidden_size: 32", "hidden_size: -1"), "hidden_size is -1"),
        (("gated: true", "gated: 7"), "gated is 7, true or false was expected"),
        (("layers_per_stage: 1.0", "layers_per_stage: 9.0"), "fewer than its 2 pipeline ranks"),
        (("model: gpt\n", "model: gpt\nmodel: gpt\n"), "the key 'model' a second time"),
    ],
)
def test_what_is_not_known_is_refused_by_name(harm: Any, words: str, folder: Path) -> None:
    if callable(harm):
        harm(folder)
    else:
        if "9.0" in harm[1]:
            changed(folder, "num_blocks: 4", "num_blocks: 0")
            changed(folder, "tied_embedding_weight: true", "tied_embedding_weight: false")
            changed(folder, "pipeline_parallel: 2", "pipeline_parallel: 4")
            words = "fewer than its 4 pipeline ranks"
        changed(folder, *harm)
    with pytest.raises(FormatError, match=words):
        meshload.open(folder, format="fast_llm")


# --- the named format -------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> Path:
    return copied(GOLDEN / "qwen2_tied_pp2_dp2" / "fast_llm", tmp_path)


def test_a_missing_file_of_names_is_told(named: Path) -> None:
    (named / "model_1_0.safetensors").unlink()
    checkpoint = meshload.open(named)
    assert [p.file for p in checkpoint.problems] == ["model_1_0.safetensors"]
    assert {n.removeprefix("optimizer.exp_avg.") for n in checkpoint.unavailable} >= {
        "decoder.0.norm_1.weight",
        "decoder.2.norm_1.weight",
    }
    with pytest.raises(MissingArray, match=r"decoder\.0\.norm_1\.weight: model_1_0\.safetensors"):
        checkpoint["decoder.0.norm_1.weight"]


def test_an_index_that_does_not_fit_its_files_is_told(named: Path) -> None:
    key = "decoder.0.norm_1.weight/exp_avgs"
    changed(named, f"    {key}: model_1_0.safetensors\n", f"    {key}: model_0_0.safetensors\n")
    checkpoint = meshload.open(named)
    assert checkpoint.unavailable["optimizer.exp_avg.decoder.0.norm_1.weight"].endswith("whose header lacks it")
    assert "decoder.0.norm_1.weight" in checkpoint
    assert f"does not list model_1_0.safetensors: {key}" in checkpoint.problems[-1].text


@pytest.mark.parametrize("file", ["../model_0_0.safetensors", "/etc/passwd", "a//b"])
def test_files_stay_in_the_folder(file: str, named: Path) -> None:
    changed(named, "decoder.0.norm_1.weight/weights: model_1_0.safetensors", f"decoder.0.norm_1.weight/weights: {file}")
    with pytest.raises(FormatError, match="leaves the folder"):
        meshload.open(named)


def test_an_index_that_was_not_written_is_told(named: Path) -> None:
    text = (named / "metadata.yaml").read_text()
    head, _, tail = text.partition("  state_index:\n")
    (named / "metadata.yaml").write_text(head + tail[tail.index("model: gpt") :])
    with pytest.raises(FormatError, match="state_index maps no keys to files; the save did not finish"):
        meshload.open(named)


def test_names_of_a_model_without_a_table_are_read_all_the_same(tmp_path: Path) -> None:
    arrays = {"decoder.0.mixer.in_proj.weight/weights": ramp("w", (3, 4)), "head.final_norm.weight/weights": ramp("n", (4,))}
    write_safetensors(tmp_path / "model_0.safetensors", arrays)
    index = "".join(f"    {key}: model_0.safetensors\n" for key in arrays)
    (tmp_path / "metadata.yaml").write_text(
        "config:\n  base_model:\n    decoder:\n      block:\n        mixer:\n          type: mamba\n"
        f"fast_llm_version: 0.4.0\nformat: fast_llm\nmetadata:\n  state_index:\n{index}model: gpt\nshards:\n- weights\n"
    )
    checkpoint = meshload.open(tmp_path)
    assert {f"{n}/weights": np.asarray(a).tolist() for n, a in checkpoint.items()} == {n: a.tolist() for n, a in arrays.items()}
    assert checkpoint.optimizer == {}
    assert checkpoint.config is not None
    assert "model_type" not in checkpoint.config


# --- folders of steps, recognition ------------------------------------------------------------------------------------


def test_a_folder_of_steps_opens_as_its_last_finished_one(tmp_path: Path) -> None:
    source = GOLDEN / "layouts" / "llama_untied_one_rank"
    for step in (9, 10, 200):
        shutil.copytree(source, tmp_path / str(step), copy_function=shutil.copyfile)
    (tmp_path / "200" / "ok").unlink()
    changed(tmp_path / "10", "completed_steps: 3", "completed_steps: 10")
    checkpoint = meshload.open(tmp_path)
    assert checkpoint.meta["step"] == 10
    assert [(p.file, "step 10 is the last finished one" in p.text) for p in checkpoint.problems] == [("200", True)]
    assert meshload.open(tmp_path, format=FastLLM(step=9)).meta["step"] == 3
    with pytest.raises(FormatError, match="there is no step 7; finished: 9, 10"):
        meshload.open(tmp_path, format=FastLLM(step=7))


def test_a_folder_of_unfinished_steps_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "layouts" / "llama_untied_one_rank", tmp_path / "5", copy_function=shutil.copyfile)
    (tmp_path / "5" / "ok").unlink()
    with pytest.raises(FormatError, match="no folder of a finished step; it holds 5/"):
        meshload.open(tmp_path)


def test_only_its_own_folders_are_recognised() -> None:
    ours = FastLLM()
    found = {path for path in folders() if ours.matches(open_folder(path))}
    expected = {path for path in folders() if "fast_llm" in path.parts and (path / "metadata.yaml").exists()}
    assert found == expected
    for path in sorted(expected)[:4]:
        assert [name for name, format in installed().items() if format.matches(open_folder(path))] == ["fast_llm"]


def folders() -> Iterator[Path]:
    for root in (HERE / "golden", SHARED):
        yield from (path for path in root.glob("*/**/") if path.is_dir()) if root.is_dir() else ()


def test_the_metadata_file_itself_can_be_named() -> None:
    path = GOLDEN / "qwen2_tied_pp2_dp2" / "distributed"
    assert set(meshload.open(path / "metadata.yaml")) == set(meshload.open(path))
    assert meshload.open(path / "rank_0.safetensors").format == "hf"  # a file alone is what it is


def test_object_stores_are_read_as_well() -> None:
    store = tensorstore.KvStore.open("memory://run/3/").result()
    for file in (GOLDEN / "layouts" / "qwen2_tp2_dp2").iterdir():
        store.write(file.name, file.read_bytes()).result()
    checkpoint = meshload.open(store)
    assert [name for name, array in checkpoint.items() if not same_bits(array, ramp(name, array.shape))] == []


# --- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "family"),
    [
        ("llama_untied_one_rank", "llama"),
        ("mixtral_tp2_pp2_dp2", "mixtral"),
        ("qwen2_tp2_dp2", "qwen2"),
        ("biases_positions_layer_norm_tp2", None),
        ("pattern_norms_whole_vocab_tp2", None),
    ],
)
def test_the_family_is_one_that_can_say_all_of_the_model(case: str, family: str | None) -> None:
    config = opened(case).config
    assert config is not None
    assert config.get("model_type") == family
    assert (config["hidden_size"], config["num_hidden_layers"]) == (8, 4 if "frozen" in case else 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("type: default", "type: none"),
        ("activation: silu", "activation: sigmoid"),
        ("      vocab_size: 14", "      vocab_size: 14\n      embedding_scale: 2.0"),
        ("          heads: 4", "          heads: 4\n          causal: false"),
        ("          heads: 4", "          heads: 4\n          softmax_scale_power: 1.0"),
        ("          heads: 4", "          heads: 4\n          dense_layer:\n            bias:\n              enabled: true"),
        ("type: rms_norm", "zero_centered: true\n          type: rms_norm"),
    ],
)
def test_a_model_that_no_family_says_has_none(old: str, new: str) -> None:
    text = (GOLDEN / "layouts" / "llama_untied_one_rank" / "metadata.yaml").read_text()
    assert old in text
    base = Section(loaded(text.replace(old, new, 1), "metadata.yaml")["config"]["base_model"], "config.base_model")
    assert "model_type" not in huggingface(base, None)
    with pytest.raises(LayoutError, match=r"family='llama': the model is not one of these; .* none"):
        huggingface(base, "llama")


def test_a_family_that_fits_too_can_be_meant() -> None:
    path = GOLDEN / "layouts" / "llama_untied_one_rank"
    config = meshload.open(path, format=FastLLM(family="mistral")).config
    assert config is not None
    assert config["model_type"] == "mistral"
    with pytest.raises(LayoutError, match=r"family='qwen2'.*llama, mistral"):
        meshload.open(path, format=FastLLM(family="qwen2"))


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    path = changed(copied(GOLDEN / "layouts" / "llama_untied_one_rank", tmp_path), "heads: 4", "heads: 4\n          window_size: 5")
    config = meshload.open(path).config
    assert config is not None
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 5)


def test_rotary_embeddings_are_told_in_hugging_faces_keys(tmp_path: Path) -> None:
    path = changed(
        copied(GOLDEN / "layouts" / "llama_untied_one_rank", tmp_path),
        "theta: 10000.0\n            type: default",
        "theta: 500000.0\n            scale_factor: 32.0\n            type: llama3",
    )
    config = meshload.open(path).config
    assert config is not None
    assert config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# --- many ranks -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_many_ranks_opens_soon(tmp_path: Path) -> None:
    """64 ranks of 283 parameters: about 0.1 s of computing."""
    base = {
        "hidden_size": 64,
        "embeddings": {"vocab_size": 320},
        "head": {"normalization": {"type": "rms_norm"}},
        "decoder": {
            "num_blocks": 40,
            "block": {
                "normalization": {"type": "rms_norm"},
                "mixer": {"heads": 8, "head_groups": 4, "head_size": 8, "add_linear_biases": False, "rotary": {"type": "default"}},
                "mlp": {"gated": True, "intermediate_size": 96, "add_linear_biases": False},
            },
        },
    }
    ranks = Ranks(4, 2, 8)
    sparse(tmp_path, base, ranks)
    meshload.open(tmp_path)  # what is imported, is
    begin = time.process_time()
    checkpoint = meshload.open(tmp_path)
    made = meshload.plan(checkpoint, mesh="tp=2,pp=2", rank=3)
    assert time.process_time() - begin < 2
    assert (len(checkpoint), checkpoint.problems) == (283, ())
    assert made.wanted_bytes > 0


def sparse(folder: Path, base: dict[str, Any], ranks: Ranks) -> None:
    """Write files of zeros that take no space."""
    layout = layout_of(model_of(Section(base, "base_model"), ranks.tp), ranks, 1.0, "matrices")
    told = {
        "base_model": base,
        "distributed": {"tensor_parallel": ranks.tp, "pipeline_parallel": ranks.pp, "world_size": ranks.count},
    }
    text = f"config:\n{yaml_of(told, 1)}fast_llm_version: 0.4.0\nformat: distributed\nmodel: gpt\nshards:\n- weights\n- exp_avgs\n"
    (folder / "metadata.yaml").write_text(text)
    (folder / "ok").touch()
    for pipeline, data, tensor in itertools.product(range(ranks.pp), range(ranks.dp), range(ranks.tp)):
        weights, moments = layout.sizes[pipeline]
        ends = [4 * weights, 4 * (weights + moments)]
        header = {
            "weights_shard": {"dtype": "F32", "shape": [weights], "data_offsets": [0, ends[0]]},
            "exp_avgs_shard": {"dtype": "F32", "shape": [moments], "data_offsets": ends},
        }
        raw = json.dumps(header).encode()
        rank = int(ranks.number(pipeline, np.asarray(data), np.asarray(tensor)))
        with (folder / f"rank_{rank}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + ends[1])


def yaml_of(values: Mapping[str, Any], depth: int) -> str:
    text = ""
    for key, value in values.items():
        word = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
        text += "  " * depth + (f"{key}:\n{yaml_of(value, depth + 1)}" if isinstance(value, dict) else f"{key}: {word}\n")
    return text


def test_the_vectors_of_all_ranks_are_covered_exactly_once() -> None:
    """Whatever the mesh: each element of each parameter's parts lies in one place per holder, and none in padding."""
    base = Section({"hidden_size": 8, "embeddings": {"vocab_size": 12}, "decoder": {"num_blocks": 3, "block": {}}}, "base_model")
    base.values["decoder"]["block"] = {  # type: ignore[index]
        "mixer": {"heads": 4, "head_groups": 2, "head_size": 2},
        "mlp": {"intermediate_size": 12},
    }
    for tp, pp, dp, per_stage in itertools.product((1, 2), (1, 2), (1, 3, 5), (1.0, 2.0)):
        layout = layout_of(model_of(base, tp), Ranks(tp, pp, dp), per_stage, "matrices")
        for group in layout.groups:
            assert group.begin[-1] == sum(p.held(tp) for p in group.parameters)
            assert group.share * dp >= group.begin[-1] > group.share * dp - 32 * dp
        for pipeline in range(pp):
            mine = [(place, g) for (g, p), place in layout.at.items() if p == pipeline]
            ends = [at[0] + layout.groups[g].share for at, g in sorted(mine)]
            assert [at[0] for at, _ in sorted(mine)] == [0, *ends[:-1]]
            assert ends[-1] == layout.sizes[pipeline][0]


# --- the suite --------------------------------------------------------------------------------------------------------


class TestFastLLM(FormatSuite):
    format = FastLLM()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Values]]]:
        trained = GOLDEN / "qwen2_tied_pp2_dp2"
        yield trained / "fast_llm", golden("qwen2_tied_pp2_dp2")
        for path in (trained / "distributed", GOLDEN / "layouts" / "llama_frozen_pp3_dp2"):
            yield path, vectors(sorted(path.glob("rank_*.safetensors")))


def vectors(files: Sequence[Path]) -> dict[str, Values]:
    return {f"{file.stem}/{name}": values for file in files for name, values in read_safetensors(file).items()}
