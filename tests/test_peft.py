"""PEFT's adapters: each pair is cut as its layer, on its layer's stage; what is written is what PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshload
from meshload.formats import installed
from meshload.naming import model_of
from meshload.source import open_folder
from meshload.testing import counted, ramp, read_safetensors, same_bits, write_checkpoint, write_safetensors

GOLDEN = Path(__file__).parent / "golden" / "peft"
LEAD = "base_model.model."

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 8, "vocab_size": 13}

Values = Any


def weights(config: Mapping[str, Any], modules: list[str]) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the weights of a model that a list of modules targets: module -> name and shape."""
    model = model_of("hf", config)
    assert model is not None
    found = {name: model.whole_shape(line) for name, line, _ in model.arrays() if name.endswith(".weight")}
    pairs = {name.removesuffix(".weight"): (name, shape) for name, shape in found.items() if len(shape) == 2}
    return {m: (name, (shape[0], shape[-1])) for m, (name, shape) in pairs.items() if m.rpartition(".")[2] in modules}


def adapter(config: Mapping[str, Any], lora: Mapping[str, Any], transposed: bool = False) -> dict[str, Values]:
    """Return the pairs of every targeted module, whole numbers that encode their place."""
    arrays = {}
    for i, (module, (_, shape)) in enumerate(weights(config, lora["target_modules"]).items()):
        out, into = shape[::-1] if transposed else shape
        arrays[f"{LEAD}{module}.lora_A.weight"] = np.arange(lora["r"] * into, dtype="f4").reshape(lora["r"], into) + 100 * i
        arrays[f"{LEAD}{module}.lora_B.weight"] = np.arange(out * lora["r"], dtype="f4").reshape(out, lora["r"]) - 10 * i
    return arrays


def written(folder: Path, arrays: Mapping[str, Values], lora: Mapping[str, Any] = LORA) -> Path:
    folder.mkdir(parents=True)
    write_safetensors(folder / "adapter_model.safetensors", arrays, {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(dict(lora), indent=2, sort_keys=True))
    return folder


def ranks(path: Any, mesh: str, **options: Any) -> list[dict[str, Values]]:
    count = int(np.prod([int(axis.partition("=")[2]) for axis in mesh.split(",")]))
    return [meshload.restore(path, mesh=mesh, rank=r, into="numpy", **options) for r in range(count)]


# --- cut over a mesh --------------------------------------------------------------------------------------------------


def test_b70_a_pair_is_cut_as_its_layer_and_all_stages_are_there(tmp_path: Path) -> None:
    arrays = adapter(LLAMA, LORA)
    path = written(tmp_path / "adapter", arrays)
    for rank, found in enumerate(ranks(path, "pp=2,tp=2", config=LLAMA)):
        stage, part = divmod(rank, 2)
        at, half = f"{LEAD}model.layers.{stage}.self_attn.", slice(4 * part, 4 * part + 4)
        expected = {
            at + "q_proj.lora_A.weight": arrays[at + "q_proj.lora_A.weight"],
            at + "q_proj.lora_B.weight": arrays[at + "q_proj.lora_B.weight"][half],
            at + "o_proj.lora_A.weight": arrays[at + "o_proj.lora_A.weight"][:, half].copy(),
            at + "o_proj.lora_B.weight": arrays[at + "o_proj.lora_B.weight"],
        }
        assert [a.shape for a in expected.values()] == [(2, 8), (4, 2), (2, 4), (8, 2)]
        assert sorted(found) == sorted(expected)
        assert [n for n in expected if not same_bits(found[n], expected[n])] == []


def test_b70_a_missing_stage_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    arrays = {n: a for n, a in adapter(LLAMA, LORA).items() if ".layers.0." in n}  # the first stage alone was exported
    checkpoint, log = counted(meshload.open(written(tmp_path / "adapter", arrays), config=LLAMA))
    log.reads.clear()
    with pytest.raises(meshload.MissingArray, match=r"layers\.1\.self_attn\.q_proj\.lora_A\.weight.*wanted by rank 2"):
        meshload.restore(checkpoint, mesh="pp=2,tp=2", rank=2, into="numpy")
    assert log.reads == []


@pytest.mark.parametrize(
    ("config", "modules", "mesh"),
    [
        (LLAMA, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", "pp=2,tp=2"),
        (LLAMA, "q_proj k_proj v_proj o_proj lm_head", "tp=4"),
        ({**LLAMA, "num_key_value_heads": 1}, "q_proj k_proj v_proj o_proj", "tp=4"),
        ({**LLAMA, "model_type": "phi3"}, "qkv_proj o_proj gate_up_proj down_proj", "pp=2,tp=2"),
        (GPT2, "c_attn c_proj c_fc", "pp=2,tp=2"),
    ],
    ids=["llama", "kv heads fewer than ranks", "one kv head", "phi3", "gpt2"],
)
def test_what_a_rank_s_pair_adds_is_its_slice_of_what_the_whole_pair_adds(
    tmp_path: Path, config: dict[str, Any], modules: str, mesh: str
) -> None:
    lora = {**LORA, "target_modules": modules.split()}
    transposed = config["model_type"] == "gpt2"
    arrays = adapter(config, lora, transposed)
    added = {}  # as a base model whose weights are what the pairs add
    for module, (name, _) in weights(config, lora["target_modules"]).items():
        delta = arrays[f"{LEAD}{module}.lora_B.weight"] @ arrays[f"{LEAD}{module}.lora_A.weight"]
        added[name] = np.ascontiguousarray(delta.T) if transposed else delta
    base = write_checkpoint(tmp_path / "base", added, config)
    path = written(tmp_path / "adapter", arrays, lora)
    theirs = ranks(base, mesh, missing="ignore")
    for found, expected in zip(ranks(path, mesh, config=config), theirs, strict=True):
        assert len(found) == 2 * len(expected)
        for name, delta in expected.items():
            owner = LEAD + name.removesuffix(".weight")
            product = found[f"{owner}.lora_B.weight"] @ found[f"{owner}.lora_A.weight"]
            assert np.array_equal(product.T if transposed else product, delta), name


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "ep=2", "tp=2,ep=2"])
def test_b25_an_experts_pair_is_cut_once_and_merges_to_its_slice(tmp_path: Path, mesh: str) -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 4}
    test_what_a_rank_s_pair_adds_is_its_slice_of_what_the_whole_pair_adds(tmp_path, config, "w1 w2 w3", mesh)
    arrays = adapter(config, {**LORA, "target_modules": ["w1", "w2", "w3"]})
    assert len(arrays) == 2 * 2 * 3 * 2  # matrices of a pair, layers, modules, experts
    meshload.convert(tmp_path / "adapter", tmp_path / "again", to="peft", config=config)
    again = read_safetensors(tmp_path / "again" / "adapter_model.safetensors")
    assert list(again) == sorted(arrays)
    assert all(same_bits(again[name], values) for name, values in arrays.items())


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_ranks_hold_all_that_peft_wrote_and_nothing_else(family: str) -> None:
    golden = read_safetensors(GOLDEN / family / "adapter_model.safetensors")
    found = ranks(GOLDEN / family, "pp=2", config=GOLDEN / family / "base.json")
    assert sorted(n for rank in found for n in rank) == sorted(golden)
    assert all(same_bits(a, golden[n]) for rank in found for n, a in rank.items())
    assert all(("layers.1." in n or ".h.1." in n or "lm_head" in n) == bool(r) for r, rank in enumerate(found) for n in rank)


def test_embeddings_trained_biases_magnitudes_and_saved_modules_are_cut_as_what_they_change() -> None:
    golden = read_safetensors(GOLDEN / "llama" / "adapter_model.safetensors")
    found = ranks(GOLDEN / "llama", "tp=2", config=GOLDEN / "llama" / "base.json")[1]
    tokens, layer = f"{LEAD}model.embed_tokens.", f"{LEAD}model.layers.1.self_attn."
    expected = {
        tokens + "lora_embedding_A": golden[tokens + "lora_embedding_A"][:, 7:],
        tokens + "lora_embedding_B": golden[tokens + "lora_embedding_B"],
        tokens + "lora_magnitude_vector": golden[tokens + "lora_magnitude_vector"],
        tokens + "base_layer.weight": golden[tokens + "base_layer.weight"][7:],
        f"{LEAD}lm_head.weight": golden[f"{LEAD}lm_head.weight"][7:],
        layer + "q_proj.lora_magnitude_vector": golden[layer + "q_proj.lora_magnitude_vector"][4:],
        layer + "q_proj.base_layer.bias": golden[layer + "q_proj.base_layer.bias"][4:],
        layer + "o_proj.lora_A.weight": golden[layer + "o_proj.lora_A.weight"][:, 4:],
        layer + "o_proj.lora_magnitude_vector": golden[layer + "o_proj.lora_magnitude_vector"],
        layer + "o_proj.base_layer.bias": golden[layer + "o_proj.base_layer.bias"],
        layer + "k_proj.lora_B.weight": golden[layer + "k_proj.lora_B.weight"][2:],
    }
    assert golden[layer + "o_proj.lora_A.weight"].shape == (3, 8)
    assert golden[layer + "k_proj.lora_A.weight"].shape == (1, 8)
    assert [n for n, a in expected.items() if not same_bits(found[n], np.ascontiguousarray(a))] == []


def test_an_adapter_of_a_model_without_its_head_keeps_its_names(tmp_path: Path) -> None:
    arrays = {n.replace("model.model.", "model."): a for n, a in adapter(LLAMA, LORA).items()}
    assert f"{LEAD}layers.0.self_attn.q_proj.lora_A.weight" in arrays
    found = ranks(written(tmp_path / "adapter", arrays), "pp=2", config=LLAMA)
    assert sorted(n for rank in found for n in rank) == sorted(arrays)


# --- what the config says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*\.layers\.\d+\.self_attn\.(q_proj|o_proj)"},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"target_modules": ["self_attn.q_proj", "o_proj", "score"], "exclude_modules": ["nothing"]},
        {"target_modules": ["q_proj", "o_proj", "k_proj"], "exclude_modules": r".*k_proj"},
    ],
    ids=str,
)
def test_a_layer_that_lacks_its_pair_is_missed_however_the_modules_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    arrays, lora = adapter(LLAMA, LORA), {**LORA, **changes}
    whole = written(tmp_path / "whole", arrays, lora)
    assert sorted(n for rank in ranks(whole, "pp=2", config=LLAMA) for n in rank) == sorted(arrays)
    part = written(tmp_path / "part", {n: a for n, a in arrays.items() if "1.self_attn.o_proj.lora_B" not in n}, lora)
    with pytest.raises(meshload.MissingArray, match=r"layers\.1\.self_attn\.o_proj\.lora_B\.weight"):
        ranks(part, "pp=2", config=LLAMA)


@pytest.mark.parametrize("changes", [{"layers_to_transform": [1]}, {"layers_to_transform": 1, "layers_pattern": "layers"}], ids=str)
def test_layers_that_are_not_changed_are_not_missed(tmp_path: Path, changes: dict[str, Any]) -> None:
    arrays = {n: a for n, a in adapter(LLAMA, LORA).items() if ".layers.1." in n}
    found = ranks(written(tmp_path / "adapter", arrays, {**LORA, **changes}), "pp=2", config=LLAMA)
    assert [len(rank) for rank in found] == [0, 4]


def test_a_pair_of_another_rank_than_the_config_says_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "adapter", adapter(LLAMA, LORA), {**LORA, "r": 4})
    with pytest.raises(meshload.LayoutError, match=r"lora_A.weight: its shape is \(2, 8\); llama's config gives \(4, 8\)"):
        ranks(path, "tp=2", config=LLAMA)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": "8"}, "r is '8', a rank was expected"),
        ({"r": True}, "r is 'True', a rank was expected"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj is '0'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*, an object of ranks was expected"),
        ({"target_modules": [5]}, "target_modules is .*, names of modules were expected"),
        ({"target_modules": "("}, "target_modules is '\\(', a regular expression"),
        ({"target_modules": "(.*a|.*b)*c"}, "target_modules is .*could take forever"),
        ({"target_modules": ".*.*.*.*.*.*.*c"}, "target_modules is .*could take forever"),
        ({"rank_pattern": {"a?" * 40: 2}}, "rank_pattern is .*could take forever"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', names of modules were expected"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform is .*, numbers of layers were expected"),
    ],
    ids=str,
)
def test_a_config_that_says_nonsense_is_an_error(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = written(tmp_path / "adapter", adapter(LLAMA, LORA), {**LORA, **changes})
    with pytest.raises(meshload.LayoutError, match=f"adapter_config: {said}"):
        ranks(path, "tp=2", config=LLAMA)


def test_the_base_model_s_config_is_asked_for_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "adapter", adapter(LLAMA, LORA))
    with pytest.raises(meshload.LayoutError, match="give the base model's config with config="):
        ranks(path, "tp=2")


def test_a_damaged_config_is_a_problem_and_the_arrays_are_there(tmp_path: Path) -> None:
    path = written(tmp_path / "adapter", adapter(LLAMA, LORA))
    (path / "adapter_config.json").write_text("{")
    checkpoint = meshload.open(path)
    assert [p.file for p in checkpoint.problems] == ["adapter_config.json"]
    assert len(checkpoint) == 8


def test_name_patterns_cut_any_adapter_without_its_base(tmp_path: Path) -> None:
    arrays = {f"{LEAD}h.0.attn.ia3_l": ramp("l", (8, 1)), f"{LEAD}h.0.mlp.ia3_l": ramp("m", (1, 12))}
    path = written(tmp_path / "adapter", arrays, {"peft_type": "IA3"})
    layout = {"*.attn.ia3_l": ("tp",), "*": (None, "tp")}
    for config in (None, LLAMA):
        found = ranks(path, "tp=2", layout=layout, config=config)[1]
        assert same_bits(found[f"{LEAD}h.0.attn.ia3_l"], arrays[f"{LEAD}h.0.attn.ia3_l"][4:])
        assert same_bits(found[f"{LEAD}h.0.mlp.ia3_l"], arrays[f"{LEAD}h.0.mlp.ia3_l"][:, 6:].copy())


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_pickle_is_read_where_there_is_no_safetensors_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arrays = adapter(LLAMA, LORA)
    path = written(tmp_path / "adapter", arrays)
    (path / "adapter_model.safetensors").unlink()
    torch.save({n: torch.from_numpy(a) for n, a in arrays.items()}, path / "adapter_model.bin")
    checkpoint = meshload.open(path)
    assert checkpoint.format == "peft"
    assert all(same_bits(checkpoint[n], a) for n, a in arrays.items())


def test_a_whole_model_beside_an_adapter_is_what_the_folder_holds(tmp_path: Path) -> None:
    path = written(tmp_path / "adapter", adapter(LLAMA, LORA))
    assert [n for n, f in installed().items() if f.matches(open_folder(path))] == ["peft"]
    assert meshload.open(path / "adapter_model.safetensors").config == {"adapter_config": LORA}
    write_safetensors(path / "model.safetensors", {"w": ramp("w", (2,))})
    assert meshload.open(path).format == "hf"
    assert len(meshload.open(path, format="peft")) == 8


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("is_known", [False, True], ids=["alone", "with its base's config"])
def test_what_is_written_is_what_peft_wrote(tmp_path: Path, family: str, is_known: bool) -> None:
    src = GOLDEN / family
    meshload.convert(src, tmp_path / "out", to="peft", config=src / "base.json" if is_known else None)
    expected = ["adapter_config.json", "adapter_model.safetensors", *(["config.json"] if is_known else [])]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == expected
    if is_known:
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((src / "base.json").read_text())
        assert ranks(tmp_path / "out", "pp=2")[1].keys() == ranks(src, "pp=2", config=src / "base.json")[1].keys()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (src / file).read_bytes()


def test_through_another_format_an_adapter_comes_back(tmp_path: Path) -> None:
    src = GOLDEN / "llama"
    meshload.convert(src, tmp_path / "orbax", to="orbax", mesh="tp=2", config=src / "base.json")
    there, back = ranks(tmp_path / "orbax", "pp=2,tp=2"), ranks(src, "pp=2,tp=2", config=src / "base.json")
    assert all(list(a) == list(b) and all(same_bits(a[n], b[n]) for n in b) for a, b in zip(there, back, strict=True))
    meshload.convert(tmp_path / "orbax", tmp_path / "back", to="peft")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (src / file).read_bytes()


def test_what_is_no_adapter_is_not_written_as_one(tmp_path: Path) -> None:
    src = write_checkpoint(tmp_path / "src", {"w": ramp("w", (2,))})
    with pytest.raises(meshload.LayoutError, match=r"adapter_config\.json; give its keys in config="):
        meshload.convert(src, tmp_path / "out", to="peft")
    with pytest.raises(meshload.LayoutError, match="w: no array of an adapter"):
        meshload.convert(src, tmp_path / "out", to="peft", config={"adapter_config": LORA})
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_peft_loads_what_is_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers")
    meshload.convert(GOLDEN / "gpt2", tmp_path / "out", to="peft", config=GOLDEN / "gpt2" / "base.json")
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**json.loads((GOLDEN / "gpt2" / "base.json").read_text())))
    loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, tmp_path / "out"))
    golden = read_safetensors(GOLDEN / "gpt2" / "adapter_model.safetensors")
    assert all(same_bits(loaded[n].numpy(), a) for n, a in golden.items() if "base_layer" not in n)
