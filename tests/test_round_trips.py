"""A -> B -> A for all pairs of formats that can be written: the files of A come back, byte for byte.

Each form of a model is made of its source once. What is made of another form is then compared with it, file for file. So if B made
of A is B made of the source, and A made of B is A made of the source, A comes back from B. Only Orbax gives its files names of
chance: what is made of it is made of the very checkpoint that was made of A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import meshload
from meshload.converting import writer_of
from meshload.formats import Writer, installed
from meshload.naming import model_of
from meshload.testing import ramp, read_safetensors, same_bits, write_checkpoint
from meshload_adapters.formats.deepspeed import DeepSpeed
from meshload_adapters.formats.fast_llm import FastLLM
from meshload_adapters.formats.hf import HuggingFace

from .test_writers import CONFIGS

COPIES = {"*.dense.bias": None, "*.linear2.bias": None}
"""What GPT-NeoX's ranks have copies of without `gpt_j_residual`, which is told nowhere."""


@dataclass(frozen=True)
class Form:
    """A format with its options, and the mesh for which it is written."""

    to: Callable[[str], Any]
    """What `to=` is, for a family."""
    mesh: str | None = None


FORMS = {
    "hf": Form(lambda _: HuggingFace(max_shard_size=4000)),
    "orbax": Form(lambda _: "orbax", "tp=2"),
    "dcp": Form(lambda _: "dcp", "pp=2,tp=2"),
    "megatron": Form(lambda _: "megatron", "pp=2,tp=2"),
    "megatron_core": Form(lambda _: "megatron_core", "pp=2,tp=2"),
    "zero1": Form(lambda family: DeepSpeed(stage=1, parameters=named(family)), "dp=3"),
    "zero2": Form(lambda family: DeepSpeed(stage=2, parameters=named(family)), "tp=2,dp=2"),
    "zero3": Form(lambda family: DeepSpeed(stage=3, parameters=named(family)), "tp=2,dp=3"),
    "pipeline": Form(
        lambda family: DeepSpeed(stage=1, pipeline=True, cut=COPIES, parameters=named(family, "gpt_neox")), "pp=2,tp=2,dp=2"
    ),
    "universal": Form(lambda _: "universal", "pp=2,tp=2"),
    "fast_llm": Form(lambda _: "fast_llm"),
    "fast_llm_distributed": Form(lambda _: FastLLM(distributed=True), "pp=2,tp=2,dp=3"),
    "flexgen": Form(lambda _: "flexgen", "tp=2"),
}
ANY = {"hf", "orbax", "dcp", "zero1", "zero2", "zero3", "universal"}
MEGATRON = {"megatron", "megatron_core"}
FAST_LLM = {"fast_llm", "fast_llm_distributed"}
POSSIBLE = {
    "llama": ANY | MEGATRON | FAST_LLM,
    "qwen2": ANY | MEGATRON | FAST_LLM,
    "mixtral": ANY | MEGATRON | FAST_LLM,
    "gpt_neox": ANY | MEGATRON | {"pipeline"},
    "opt": ANY | {"flexgen"},
}
PAIRS = [(family, one, other) for family, forms in POSSIBLE.items() for one in sorted(forms) for other in sorted(forms)]
REFUSED = [
    (family, one, other) for family, forms in POSSIBLE.items() for one in sorted(forms) for other in sorted({*FORMS} - forms)
]


def config_of(family: str) -> dict[str, Any]:
    return {**CONFIGS[family], "num_hidden_layers": 2}


def named(family: str, naming: str = "hf") -> list[str]:
    """Return the names of a model's parameters, in their order in the model."""
    model = model_of(naming, config_of(family))
    names = [] if model is None else [name for name, _, _ in model.arrays() if name not in model.ties]
    return sorted(names, key=lambda name: int(name.split(".")[0])) if naming == "gpt_neox" else names


def arrays_of(family: str) -> dict[str, Any]:
    model = model_of("hf", config_of(family))
    assert model is not None
    return {name: ramp(name, model.whole_shape(line)) for name, line, _ in model.arrays() if name not in model.ties}


Make = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function of a family and a form, which is written once, straight from the source."""
    root = tmp_path_factory.mktemp("forms")

    def make(family: str, form: str) -> Path:
        src, dst = root / family / "source", root / family / form
        if not src.exists():
            write_checkpoint(src, arrays_of(family), config_of(family), shards=2)
        if not dst.exists():
            written(src, dst, family, form)
        return dst

    return make


def writer(form: str, family: str) -> Writer:
    return writer_of(FORMS[form].to(family))


def written(src: Path, dst: Path, family: str, form: str) -> Path:
    meshload.convert(src, dst, to=FORMS[form].to(family), mesh=FORMS[form].mesh)
    return dst


def files_of(folder: Path) -> Mapping[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def differing(one: Path, other: Path) -> list[str]:
    """Return the names of the files that two folders do not both have with the same bytes."""
    files, others = files_of(one), files_of(other)
    return sorted(name for name in {**files, **others} if files.get(name) != others.get(name))


def test_every_format_that_can_be_written_is_here() -> None:
    writers = {name for name, format in installed().items() if isinstance(format, Writer)}
    assert {writer(form, "llama").name for form in FORMS} == writers - {"peft"}  # whose arrays are no whole model


@pytest.mark.parametrize("family", POSSIBLE)
def test_the_source_is_in_all_forms_of_it(made: Make, family: str) -> None:
    expected = arrays_of(family)
    for form in sorted(POSSIBLE[family]):
        found = meshload.open(made(family, form))
        assert (found.format, found.problems, dict(found.unavailable)) == (writer(form, family).name, (), {}), form
        shown = found.with_names("hf")
        assert set(shown) == set(expected), form
        assert [name for name, array in expected.items() if not same_bits(shown[name], array)] == [], form
    shards = [read_safetensors(file) for file in made(family, "hf").glob("*.safetensors")]  # without meshload
    stored = {name: array for arrays in shards for name, array in arrays.items()}
    assert set(stored) == set(expected)
    assert [name for name, array in expected.items() if not same_bits(stored[name], array)] == []


@pytest.mark.parametrize(("family", "one", "other"), PAIRS)
def test_a_form_made_of_another_one_is_that_made_of_the_source(
    made: Make, tmp_path: Path, family: str, one: str, other: str
) -> None:
    expected, found = made(family, other), written(made(family, one), tmp_path / other, family, other)
    if other != "orbax":
        assert differing(expected, found) == []
        return
    report = meshload.verify(expected, found, names="stored")
    assert (report.problems, report.arrays) == ((), len(named(family)))
    if one != "orbax":
        assert differing(made(family, one), written(found, tmp_path / "back", family, one)) == []


@pytest.mark.parametrize(("family", "one", "other"), REFUSED)
def test_a_form_that_a_family_does_not_have_is_refused_by_its_name(
    made: Make, tmp_path: Path, family: str, one: str, other: str
) -> None:
    why = f"no {writer(other, family).naming} table for model_type '{family}'"
    with pytest.raises(meshload.LayoutError, match=why):
        written(made(family, one), tmp_path / other, family, other)
    assert list(tmp_path.iterdir()) == []
