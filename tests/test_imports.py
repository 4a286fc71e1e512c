"""Who imports whom: read from the import statements, and from what a fresh process has loaded."""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import meshload
from meshload.formats import adapters

CORE = Path(meshload.__file__).parent
ADAPTERS = CORE.parent / "adapters" / "meshload_adapters"
MODULES = sorted(p.stem for p in CORE.glob("*.py") if p.stem not in ("__init__", "__main__"))

ORDER = [
    *("errors", "box", "digests", "expression", "pieces", "kernel", "kernel", "array", "source"),
    *("mesh", "layout", "pattern", "checkpoint", "steps"),
    *("scheduling", "sharing", "planning", "reading", "writing"),
    *("formats", "frameworks", "exchange", "streaming"),
    *("quantised", "adapted", "naming", "dequantising", "wanting"),
    *("ranks", "requesting"),
    *("loading", "converting", "saving", "indexing", "checking"),
    *("testing", "cli"),
]
"""Each module imports those in front of it alone."""

LOOKS_FORWARD = {
    ("array", "reading"),  # reading is what an array is for
    ("loading", "cli"),  # the progress bar on the terminal
}
"""Imports inside functions of what comes later, all of them."""

OUTSIDE = {"numpy", "ml_dtypes", "tensorstore"}
HEAVY = {"torch", "jax", "orbax", "transformers", "safetensors", "flax"}
MAY_IMPORT_TENSORSTORE = {"array", "source", "reading", "writing"}


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Go through a file's imports as dotted names, relative ones with a leading dot, and whether a function holds them.

    What only type checkers see is left out.
    """

    def walk(node: ast.AST, inner: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import(names=names):
                    yield from ((alias.name, inner) for alias in names)
                case ast.ImportFrom(module=None, names=names):
                    yield from (("." + alias.name, inner) for alias in names)
                case ast.ImportFrom(module=module, level=level):
                    yield "." * level + str(module), inner
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    pass
                case _:
                    yield from walk(child, inner or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return walk(ast.parse(file.read_text()), False)


def inside(module: str) -> set[tuple[str, bool]]:
    """Return the modules of the core that one of them imports."""
    found = set()
    for name, inner in imports(CORE / f"{module}.py"):
        if name.startswith("."):
            found.add((name[1:].split(".")[0], inner))
        elif name == "meshload" or name.startswith("meshload."):
            found.add((name.removeprefix("meshload").removeprefix(".").split(".")[0], inner))
    return found


def outside(file: Path) -> set[tuple[str, bool]]:
    """Return what a file imports that is neither ours nor the standard library's."""
    names = {(name.split(".")[0], inner) for name, inner in imports(file) if not name.startswith(".")}
    return {(n, inner) for n, inner in names if n not in sys.stdlib_module_names and n not in ("meshload", "meshload_adapters")}


def test_every_module_has_its_place() -> None:
    assert sorted(set(MODULES) - set(ORDER)) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_core_imports_backwards_only(module: str) -> None:
    before = set(ORDER[: ORDER.index(module)])
    forward = {(name, inner) for name, inner in inside(module) if name not in before}
    assert {name for name, inner in forward if not inner} == set()
    if module != "cli":
        assert {(module, name) for name, _ in forward} <= LOOKS_FORWARD


def test_planning_knows_no_meshes() -> None:
    seen, waiting = set(), ["planning"]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += [name for name, inner in inside(module) if not inner]
    assert seen & {"mesh", "layout", "formats", "frameworks", "naming", "loading"} == set()


def test_nothing_but_the_module_that_runs_it_imports_the_command_line() -> None:
    assert [m for m in MODULES if ("cli", False) in inside(m)] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_core_imports_numpy_ml_dtypes_and_tensorstore_alone(module: str) -> None:
    allowed = OUTSIDE | ({"typer", "rich"} if module == "cli" else set())
    found = outside(CORE / f"{module}.py")
    assert {name for name, _ in found} <= allowed
    if any(name == "tensorstore" for name, _ in found):
        assert module in MAY_IMPORT_TENSORSTORE
    if module == "cli":
        assert all(inner for name, inner in found if name in ("typer", "rich"))


@pytest.mark.parametrize("module", MODULES)
def test_the_core_imports_no_adapter(module: str) -> None:
    assert [name for name, _ in imports(CORE / f"{module}.py") if "meshload_adapters" in name] == []


ADAPTER_FILES = sorted(ADAPTERS.rglob("*.py"))


@pytest.mark.parametrize("file", ADAPTER_FILES, ids=lambda p: "/".join(p.relative_to(ADAPTERS).parts))
def test_adapters_import_no_other_adapters_but_tables(file: Path) -> None:
    """Beside tables they share modules with a leading underscore, which import each other alone."""
    place = file.relative_to(ADAPTERS).parts
    shared = {p.stem for p in ADAPTERS.glob("_*.py")}
    for name, _ in imports(file):
        if name.startswith("."):
            folder = place[:-1]
            dots = len(name) - len(name.lstrip("."))
            target = [*folder[: len(folder) - dots + 1], *name.lstrip(".").split(".")]
        elif name.split(".")[0] == "meshload_adapters":
            target = name.split(".")[1:]
        else:
            assert place[0] != "models" or name.split(".")[0] in sys.stdlib_module_names, "tables are data"
            continue
        allowed = shared if place[0].startswith("_") else shared | {"models"}
        assert target[0] in allowed, f"{name} is another adapter"


@pytest.mark.parametrize("file", ADAPTER_FILES, ids=lambda p: "/".join(p.relative_to(ADAPTERS).parts))
def test_adapters_import_heavy_libraries_inside_functions(file: Path) -> None:
    assert {name for name, inner in outside(file) if not inner} & HEAVY == set()


def test_adapters_is_no_package() -> None:
    assert not (ADAPTERS.parent / "__init__.py").exists()


def test_the_public_names_are_those_of_the_init() -> None:
    tree = ast.parse((CORE / "__init__.py").read_text())
    later = next(node.body for node in tree.body if isinstance(node, ast.If))  # what type checkers see, and who asks for it
    nodes = [node for node in (*tree.body, *later) if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.asname or alias.name for node in nodes for alias in node.names}
    assert sorted(imported) == sorted(meshload.__all__)
    assert len(set(meshload.__all__)) == len(meshload.__all__)
    assert [name for name in meshload.__all__ if not hasattr(meshload, name)] == []


def test_no_module_is_named_like_a_public_function() -> None:
    assert set(MODULES) & {name for name in meshload.__all__ if name[0].islower()} == set()


FRESH = """
import sys
import {module}
heavy = {{"torch", "jax", "orbax", "transformers", "safetensors", "typer", "rich"}}
print(*sorted({{name.split(".")[0] for name in sys.modules}} & heavy))
"""


def test_a_fresh_process_has_loaded_nothing_heavy(run_python: Callable[..., str]) -> None:
    assert run_python(FRESH.format(module="meshload")).split() == []


def test_a_plan_of_sizes_loads_nothing_heavy(run_python: Callable[..., str], tmp_path: Path) -> None:
    from meshload.testing import ramp, write_checkpoint

    path = write_checkpoint(tmp_path, {"w": ramp("w", (4, 4))})
    program = FRESH.format(module="meshload").replace(
        "print(", "meshload.plan(sys.argv[1], mesh='tp=2', rank=1, layout={'*': ('tp',)})\nprint("
    )
    assert run_python(program, path).split() == []


LOADED = """
import sys
import meshload
from meshload.formats import installed
installed()
meshload.open(sys.argv[1]) if sys.argv[1:] else None
print(*(name.removeprefix("meshload_adapters.") for name in sys.modules if name.startswith("meshload_adapters._")))
print(*(name for name in sys.modules if name in ("meshload.writing", "tensorstore")))
"""


def is_light(module: str) -> bool:
    return module.endswith("_find") or module == "_orbax_record"


def test_asking_whose_a_folder_is_loads_only_what_finds_files(run_python: Callable[..., str]) -> None:
    private, others = run_python(LOADED).splitlines()
    assert [name for name in private.split() if not is_light(name)] == []
    assert others == ""


def test_opening_a_hugging_face_folder_loads_no_other_format_and_no_writer(run_python: Callable[..., str], tmp_path: Path) -> None:
    from meshload.testing import ramp, write_checkpoint

    private, others = run_python(LOADED, write_checkpoint(tmp_path, {"w": ramp("w", (4, 4))})).splitlines()
    assert {name for name in private.split() if not is_light(name)} == {"_hf", "_json", "_safetensors", "_weight_map"}
    assert others == ""


@pytest.mark.parametrize("module", ["deepspeed", "universal"])
def test_the_cut_that_an_option_takes_is_beside_its_format(module: str) -> None:
    from meshload_adapters._cuts import Cut

    assert import_module(f"meshload_adapters.formats.{module}").Cut is Cut


@pytest.mark.parametrize("group", ["meshload.formats", "meshload.frameworks", "meshload.models"])
def test_our_entry_points_are_those_that_importlib_finds(group: str) -> None:
    assert {(p.name, p.value) for p in adapters(group)} == {(p.name, p.value) for p in entry_points(group=group)}


ON_A_PATH = """
import importlib.metadata, sys
from meshload.formats import adapters
sys.path[:] = sys.argv[1:]
print(*(f"{point.name}={point.value}" for point in adapters("meshload.formats")))
"""
INFO = "{package}-1.dist-info/entry_points.txt"


def test_of_two_entry_points_of_a_name_the_first_on_the_path_counts(run_python: Callable[..., str], tmp_path: Path) -> None:
    for package, names in {"one": ("a",), "two": ("a", "b")}.items():
        file = tmp_path / package / INFO.format(package=package)
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(["[other]", "c = x:Y", "[meshload.formats]", *(f"{name} = {package}:Format" for name in names)]))
    paths = [tmp_path / "nothing", tmp_path / "one", tmp_path / "two"]
    assert run_python(ON_A_PATH, *paths).split() == ["a=one:Format", "b=two:Format"]


def test_entry_points_in_a_zip_file_are_found(run_python: Callable[..., str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr(INFO.format(package="one"), "[meshload.formats]\na = one:Format")
        packed.writestr("one-1.dist-info/METADATA", "Name: one")
    assert run_python(ON_A_PATH, tmp_path / "packed.zip").split() == ["a=one:Format"]


TIMED = "import time; start = time.process_time(); import {module}; print(time.process_time() - start)"


def test_importing_costs_little_more_than_tensorstore(run_python: Callable[..., str]) -> None:
    ours, theirs = (min(float(run_python(TIMED.format(module=m))) for _ in range(7)) for m in ("meshload", "tensorstore"))
    assert ours < theirs + 0.2


def test_formats_are_there_by_name() -> None:
    import meshload_adapters.formats as formats
    from meshload.formats import installed

    assert {type(of) for of in installed().values()} == {getattr(formats, name) for name in formats.MODULES}
    with pytest.raises(ImportError):
        from meshload_adapters.formats import Nothing  # noqa: F401
