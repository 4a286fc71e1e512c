"""The Orbax format, against golden folders, what Orbax itself writes, and damage."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import meshload.source
from meshload.checkpoint import Checkpoint
from meshload.errors import FormatError, LimitError, MeshloadWarning, MissingArray, SourceError
from meshload.source import open_folder
from meshload_adapters.formats.orbax import Orbax

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "orbax"
SHARED = HERE.parent.parent / "shared" / "fixtures" / "orbax"
CASES = sorted({d.name: d for root in (SHARED, GOLDEN) if root.is_dir() for d in root.iterdir() if d.is_dir()}.values())
SAFETENSORS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I32": np.int32}


def opened(path: Any, **options: Any) -> Checkpoint:
    folder = open_folder(path)
    assert Orbax().matches(folder)
    return Orbax(**options).open(folder)


def golden(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        found[name] = np.frombuffer(data[8 + n + start : 8 + n + stop], SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    return found


def same(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and found.tobytes() == expected.tobytes()


def written(folder: Path, arrays: Mapping[tuple[str, ...], Any], *, empty: Any = (), **said: Any) -> Path:
    """Write a tree item of plain zarr2 files, without Orbax."""
    tree = {}
    folder.mkdir(parents=True, exist_ok=True)
    for path, value in arrays.items():
        values = np.asarray(value, np.float32)
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/{'.'.join(path)}/"}}
        chunk = [max(1, n // 2) for n in values.shape]
        ts.open(spec, create=True, dtype="float32", shape=values.shape, chunk_layout=ts.ChunkLayout(chunk_shape=chunk)).result()[
            ...
        ] = values
        tree[str(path)] = entry(path)
    for path in empty:
        tree[str(path)] = entry(path, "None", True)
    meta = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    (folder / "_METADATA").write_text(json.dumps(meta | said))
    return folder


def entry(path: tuple[str, ...], kind: str = "jax.Array", skipped: bool = False) -> dict[str, Any]:
    keys = [{"key": key, "key_type": 2} for key in path]
    return {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skipped}}


def copied(case: str, to: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / case / "checkpoint", to / "checkpoint"))


# --- golden folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_golden_folder_is_equal_bit_for_bit(case: Path) -> None:
    expected = golden(case / "golden.safetensors")
    stored = opened(case / "checkpoint").with_names("stored")
    assert set(stored) == set(expected)
    assert [name for name in expected if not same(stored[name], expected[name])] == []


def test_moments_have_their_weights_names() -> None:
    case = GOLDEN / "two_processes_4dev_adamw"
    expected = golden(case / "golden.safetensors")
    found = opened(case / "checkpoint")
    weights = {name for name in expected if name.startswith("params.")}
    assert set(found) == weights
    assert set(found.optimizer) == {"exp_avg", "exp_avg_sq"}
    for moment, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        assert set(found.optimizer[moment]) == weights
        for name, array in found.optimizer[moment].items():
            assert same(array, expected[f"opt_state.0.{field}.{name.removeprefix('params.')}"])
    assert {name: int(np.asarray(a)) for name, a in found.meta["scalars"].items()} == {"opt_state.0.count": 2, "step": 2}
    assert found.meta["json"] == {"meta": {"step": 2, "mesh": {"fsdp": 4, "tensor": 2}}}
    assert (found.meta["step"], found.meta["item"]) == (2, "state")
    assert found.with_names("stored").with_names("native") is found


@pytest.mark.parametrize("inner", ["", "2", "2/state"])
def test_root_step_and_item_open_the_same(inner: str) -> None:
    case = GOLDEN / "two_processes_4dev_adamw"
    assert set(opened(case / "checkpoint" / inner)) == set(opened(case / "checkpoint"))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_process_without_jax_and_orbax_reads(case: Path) -> None:
    code = f"""
import sys
sys.modules.update(jax=None, jaxlib=None, orbax=None, flax=None, optax=None, torch=None)
import numpy
from meshload.source import open_folder
from meshload_adapters.formats.orbax import Orbax
found = Orbax().open(open_folder({str(case / "checkpoint")!r}))
print(sum(numpy.asarray(a).nbytes for a in found.with_names("stored").values()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(a.nbytes for a in golden(case / "golden.safetensors").values())


@pytest.mark.parametrize("case", [d.name for d in sorted(GOLDEN.iterdir()) if d.is_dir()])
def test_b72_what_tells_the_topology_is_not_needed(case: str, tmp_path: Path) -> None:
    path = copied(case, tmp_path)
    for file in [*path.rglob("_sharding"), *path.rglob("_CHECKPOINT_METADATA")]:
        file.unlink()
    for folder in list(path.rglob("array_metadatas")):
        shutil.rmtree(folder)
    expected = golden(GOLDEN / case / "golden.safetensors")
    stored = opened(path).with_names("stored")
    assert all(same(stored[name], expected[name]) for name in expected)
    assert stored.meta["sharding"] == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"AA": 3, "%": "{}", "eA==": "no"}'])
def test_b72_garbled_sharding_is_passed_over(text: str, tmp_path: Path) -> None:
    path = copied("standard_1dev", tmp_path)
    (path / "_sharding").write_text(text)
    assert opened(path).meta["sharding"] == {}


def test_recorded_sharding_is_told() -> None:
    found = opened(GOLDEN / "pytree_8dev_zarr3_ocdbt" / "checkpoint").meta["sharding"]
    assert found["params.token_embedder.embedding"]["partition_spec"] == [None, "fsdp"]


@pytest.mark.parametrize("case", ["pytree_8dev_zarr2_files", "pytree_8dev_zarr3_ocdbt", "two_processes_4dev_adamw"])
def test_open_memory_store_is_read(case: str) -> None:
    path = GOLDEN / case / "checkpoint"
    store = ts.KvStore.open("memory://somewhere/else/").result()
    for file in path.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(path)), file.read_bytes()).result()
    expected = golden(GOLDEN / case / "golden.safetensors")
    stored = opened(store).with_names("stored")
    assert all(same(stored[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", ["pytree_8dev_zarr3_ocdbt", "two_processes_4dev_adamw"])
def test_object_store_is_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        path = GOLDEN / case / "checkpoint"
        for file in path.rglob("*"):
            if file.is_file():
                client.put_object(Bucket="bucket", Key=f"{case}/{file.relative_to(path)}", Body=file.read_bytes())
        spec = {"driver": "s3", "bucket": "bucket", "endpoint": endpoint, "aws_region": "us-east-1", "path": f"{case}/"}
        stored = opened(ts.KvStore.open(spec).result()).with_names("stored")
        expected = golden(GOLDEN / case / "golden.safetensors")
        assert all(same(stored[name], expected[name]) for name in expected)
    finally:
        server.stop()


def test_file_url_is_read() -> None:
    case = GOLDEN / "standard_1dev"
    assert set(opened(f"file://{case}/checkpoint")) == set(golden(case / "golden.safetensors"))


def test_opening_reads_no_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a chunk was read")

    monkeypatch.setattr(meshload.source.ChunkedArray, "read_chunks", refuse)
    assert len(opened(GOLDEN / "two_processes_4dev_adamw" / "checkpoint")) == 21


# --- what Orbax writes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that Orbax itself wrote, in a process with 8 CPU devices."""
    if any(importlib.util.find_spec(name) is None for name in ("jax", "orbax", "flax", "optax")):
        pytest.skip("needs jax, orbax, flax and optax")
    out = tmp_path_factory.mktemp("orbax")
    script = HERE / "make_orbax_small.py"
    done = subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def assert_truth(found: Checkpoint, file: Path) -> None:
    stored = found.with_names("stored")
    expected = json.loads(file.read_text())
    assert set(stored) == set(expected)
    for name, (dtype, shape, data) in expected.items():
        values = np.asarray(stored[name])
        assert (name, values.dtype.name, list(values.shape)) == (name, dtype, shape)
        assert values.tobytes() == base64.b64decode(data), name


KINDS = ("ocdbt2", "ocdbt3", "files2", "files3")


@pytest.mark.parametrize("kind", KINDS)
def test_b72_saved_on_eight_devices_is_read_without_any(saved: Path, kind: str) -> None:
    found = opened(saved / f"sharded_{kind}")
    assert_truth(found, saved / f"sharded_{kind}.json")
    assert len(found["params.w"].pieces) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_is_read(saved: Path, kind: str) -> None:
    found = opened(saved / f"dtypes_{kind}")
    assert_truth(found, saved / f"dtypes_{kind}.json")
    assert found["host.int4"].dtype.itemsize == 1


@pytest.mark.parametrize("kind", KINDS)
def test_odd_keys_and_empty_nodes(saved: Path, kind: str) -> None:
    found = opened(saved / f"odd_{kind}")
    assert_truth(found, saved / f"odd_{kind}.json")
    empty = {"e": "Dict", "n": "None", "l": "List", "t": "Tuple", "state": "None", "nest.x.0": "Tuple", "nest.x.1": "Dict"}
    assert found.meta["empty"] == empty
    assert found.meta["strings"] == {"word": "hello"}


@pytest.mark.parametrize("kind", KINDS)
def test_b74_leaves_with_one_stored_key_are_refused(saved: Path, kind: str) -> None:
    with pytest.raises(FormatError, match=r"\['a', 'b'\] and \['a\.b'\] are both stored as 'a\.b'"):
        opened(saved / f"meet_{kind}")


def test_b74_list_index_name_index_and_scanned_layers_keep_their_paths(saved: Path) -> None:
    found = opened(saved / "b74")
    names = ["list.layers.0.w", "list.layers.1.w", "named.layers_0.w", "named.layers_1.w", "scanned.layers.w"]
    assert sorted(found) == names
    for i in range(2):
        one = np.asarray(found[f"list.layers.{i}.w"])
        assert same(found[f"named.layers_{i}.w"], one)
        assert same(found["scanned.layers.w"][:, i], one)


@pytest.mark.parametrize("case", ["chunks2", "chunks3"])
def test_small_chunks_are_one_piece_each(saved: Path, case: str) -> None:
    found = opened(saved / case)
    assert_truth(found, saved / f"{case}.json")
    assert (len(found["w"].pieces), len(found["v"].pieces)) == (4, 1)


def test_typed_random_keys_are_their_data(saved: Path) -> None:
    found = opened(saved / "keys")
    assert_truth(found, saved / "keys.json")
    assert found.meta["random_keys"] == {"one": "threefry2x32", "many": "threefry2x32"}


WEIGHTS = ["params.a", "params.b.k"]
BOTH = {"exp_avg": WEIGHTS, "exp_avg_sq": WEIGHTS}
MOMENTS = {
    "adam": BOTH,
    "chain": BOTH,
    "momentum": {"momentum": WEIGHTS},
    "amsgrad": BOTH | {"max_exp_avg_sq": WEIGHTS},
    "labels": {"exp_avg": ["params.a"], "exp_avg_sq": ["params.a"], "momentum": ["params.b.k"]},
    "masked": {"exp_avg": ["params.a"], "exp_avg_sq": ["params.a"]},
    "steps": BOTH,
    "hyperparams": BOTH,
    "finite": BOTH,
    "adafactor": {},
    "twice": {},
    "other_name": {"exp_avg": ["model.a", "model.b.k"], "exp_avg_sq": ["model.a", "model.b.k"]},
    "averaged": BOTH,
    "ambiguous": {},
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_of_optax(saved: Path, name: str) -> None:
    found = opened(saved / f"optax_{name}")
    assert_truth(found, saved / f"optax_{name}.json")
    assert {field: sorted(arrays) for field, arrays in found.optimizer.items()} == MOMENTS[name]
    stored = len(json.loads((saved / f"optax_{name}.json").read_text()))
    assert len(found) + sum(map(len, found.optimizer.values())) + len(found.meta["scalars"]) == stored


def test_other_states_of_optax_stay_ordinary_arrays(saved: Path) -> None:
    assert {"opt_state.acc_grads.a", "params.a"} <= set(opened(saved / "optax_steps"))
    assert "opt_state.0.v_row.a" in opened(saved / "optax_adafactor")
    assert {"opt_state.0.mu.a", "opt_state.1.mu.a"} <= set(opened(saved / "optax_twice"))


def test_counters_of_optax_are_scalars(saved: Path) -> None:
    found = opened(saved / "optax_finite").meta["scalars"]
    assert set(found) == {
        "step", "opt_state.inner_state.0.count",
        "opt_state.last_finite", "opt_state.notfinite_count", "opt_state.total_notfinite",
    }  # fmt: skip
    assert np.asarray(found["opt_state.last_finite"]).dtype == bool


def test_nnx_names_leave_out_value(saved: Path) -> None:
    found = opened(saved / "nnx")
    assert_truth(found, saved / "nnx.json")
    learned = {f"model.layers.{i}.{name}" for i in range(2) for name in ("kernel", "bias")} | {
        "model.norm.scale",
        "model.norm.bias",
    }
    assert set(found) == learned | {"model.norm.mean", "model.norm.var"}
    assert set(found.optimizer["exp_avg"]) == set(found.optimizer["exp_avg_sq"]) == learned
    assert set(found.meta["scalars"]) == {"optimizer.step", "optimizer.opt_state.0.count"}
    assert "layers.0.kernel" in opened(saved / "nnx_bare")


@pytest.mark.parametrize(("case", "step"), [("manager", 10), ("manager_prefix", 10), ("manager_padded", 10)])
def test_manager_opens_its_latest_step(saved: Path, case: str, step: int) -> None:
    found = opened(saved / case)
    assert_truth(found, saved / f"{case}.json")
    assert found.meta["step"] == step
    assert found.meta["json"] == {"meta": {"step": step}}


@pytest.mark.parametrize(
    ("case", "step"), [("manager", 2), ("manager", "2"), ("manager_padded", 9), ("manager_padded", "ckpt_000009")]
)
def test_step_is_chosen_by_number_or_name(saved: Path, case: str, step: int | str) -> None:
    found = opened(saved / case, step=step)
    assert set(np.asarray(found["w"]).tolist()) == {found.meta["step"]} == {int(str(step)[-1])}


def test_step_that_is_not_there_names_those_that_are(saved: Path) -> None:
    with pytest.raises(FormatError, match="10, 2, 1 none is 7"):
        opened(saved / "manager", step=7)


def test_several_trees_need_a_choice(saved: Path) -> None:
    with pytest.raises(FormatError, match=r"the items other, params are trees; choose one with Orbax\(item=...\)"):
        opened(saved / "manager_items")
    assert list(opened(saved / "manager_items", item="params")) == ["w"]
    assert list(opened(saved / "manager_items", item="other")) == ["m.w"]
    with pytest.raises(FormatError, match="no tree is called 'state'; there are: other, params"):
        opened(saved / "manager_items", item="state")


def test_steps_without_items_are_read(saved: Path) -> None:
    found = opened(saved / "flax_steps")
    assert found.meta["step"] == 30
    assert np.asarray(found["w"]).tolist() == [30, 30, 30]


def test_version_1_is_read(saved: Path) -> None:
    assert_truth(opened(saved / "version_1"), saved / "version_1.json")


# --- names, without Orbax ---------------------------------------------------------------------------------------------


def test_value_is_left_out_only_where_every_leaf_has_it(tmp_path: Path) -> None:
    found = opened(written(tmp_path / "x", {("attention", "value"): [1], ("mlp", "kernel"): [1], ("step",): 3}))
    assert set(found) == {"attention.value", "mlp.kernel"}


def test_names_that_meet_without_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"\['a'\] and \['a', 'value'\] would both be called 'a'"):
        opened(written(tmp_path / "x", {("a",): [1], ("a", "value"): [1]}))


def test_weights_called_mu_and_nu_are_weights(tmp_path: Path) -> None:
    arrays = {("encoder", "0", "mu", "kernel"): [1], ("encoder", "0", "nu", "kernel"): [1], ("encoder", "0", "kernel"): [1]}
    found = opened(written(tmp_path / "x", arrays))
    assert len(found) == 3
    assert not found.optimizer


def test_scalar_weight_stays_an_array(tmp_path: Path) -> None:
    arrays = {
        ("params", "logit_scale"): 3,
        ("opt_state", "0", "mu", "logit_scale"): 1,
        ("opt_state", "0", "count"): 2,
        ("step",): 4,
    }
    found = opened(written(tmp_path / "x", arrays))
    assert list(found) == ["params.logit_scale"]
    assert list(found.optimizer["exp_avg"]) == ["params.logit_scale"]
    assert set(found.meta["scalars"]) == {"step", "opt_state.0.count"}


def test_moments_without_their_weights_stay_arrays(tmp_path: Path) -> None:
    found = opened(written(tmp_path / "x", {("opt_state", "0", "mu", "w"): [1, 2], ("opt_state", "0", "nu", "w"): [1, 2]}))
    assert set(found) == {"opt_state.0.mu.w", "opt_state.0.nu.w"}


def test_array_without_elements_has_no_pieces(tmp_path: Path) -> None:
    found = opened(written(tmp_path / "x", {("none",): np.zeros((0, 3)), ("w",): [1]}))
    assert (found["none"].shape, len(found["none"].pieces), np.asarray(found["none"]).shape) == ((0, 3), 0, (0, 3))


# --- saves that were not finished -------------------------------------------------------------------------------------


def steps(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        item = written(root / name / "state", {("w",): [i, i]})
        (item.parent / "_CHECKPOINT_METADATA").write_text(json.dumps({"commit_timestamp_nsecs": 1}))
    return root


def test_b51_unfinished_save_is_refused_by_name(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4", "5", "6.orbax-checkpoint-tmp-1700", "7.orbax-checkpoint-tmp")
    for path in (root / "7.orbax-checkpoint-tmp", root / "6.orbax-checkpoint-tmp-1700" / "state"):
        with pytest.raises(FormatError, match=r"orbax-checkpoint-tmp.*was not finished.*last complete step is .*run/5$"):
            opened(path)


def test_b51_root_opens_the_last_complete_step_and_says_so(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4", "5", "6", "7.orbax-checkpoint-tmp")
    (root / "6" / "state").rename(root / "6" / "state.orbax-checkpoint-tmp")
    with pytest.warns(MeshloadWarning, match=r"step 5 is opened.*passed over: 7\.orbax-checkpoint-tmp.*6 \(state.orbax"):
        found = opened(root)
    assert np.asarray(found["w"]).tolist() == [1, 1]
    assert list(found.meta["passed_over"]) == ["7.orbax-checkpoint-tmp", "6"]


def test_b51_unfinished_step_cannot_be_chosen(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4", "5.orbax-checkpoint-tmp")
    with pytest.raises(FormatError, match="was not finished"):
        opened(root, step=5)


def test_b51_root_without_a_complete_step_lists_what_there_is(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4.orbax-checkpoint-tmp", "5")
    shutil.rmtree(root / "5" / "state")
    with pytest.raises(FormatError, match=r"no step is complete: 5: there is no _METADATA in it, 4\.orbax"):
        opened(root)


def test_b51_parts_of_processes_alone_are_unfinished(tmp_path: Path) -> None:
    path = copied("two_processes_4dev_adamw", tmp_path)
    (path / "2" / "state" / "manifest.ocdbt").unlink()
    shutil.rmtree(path / "2" / "state" / "d")
    with pytest.raises(FormatError, match="only the parts of 2 processes are there"):
        opened(path)
    with pytest.raises(FormatError, match="only the parts of 2 processes are there"):
        opened(path / "2" / "state")


def test_b51_save_without_commit_time_is_unfinished(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4", "5")
    (root / "5" / "_CHECKPOINT_METADATA").write_text(json.dumps({"commit_timestamp_nsecs": None}))
    with pytest.raises(
        FormatError, match=r"commit_timestamp_nsecs in _CHECKPOINT_METADATA is null; the last complete step is .*4$"
    ):
        opened(root / "5")
    (root / "5" / "commit_success.txt").write_text("done")
    assert list(opened(root / "5")) == ["w"]


def test_b51_object_store_needs_the_mark(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4", "5")
    (root / "5" / "_CHECKPOINT_METADATA").unlink()
    (root / "4" / "commit_success.txt").write_text("done")
    store = ts.KvStore.open({"driver": "file", "path": f"{root}/"}).result()
    with pytest.warns(MeshloadWarning, match=r"step 4 is opened.*no commit_success.txt"):
        assert opened(store).meta["step"] == 4


def test_steps_of_several_names_need_a_choice(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "best_4", "last_5")
    (root / "logs_2024").mkdir()
    with pytest.raises(FormatError, match=r"best_4, last_5.*Orbax\(step"):
        opened(root)
    assert opened(root, step="best_4").meta["step"] == 4


# --- damage -----------------------------------------------------------------------------------------------------------


def test_array_that_is_not_there_is_unavailable_by_name(tmp_path: Path) -> None:
    path = copied("pytree_8dev_zarr2_files", tmp_path)
    name = "params.decoder.layers_2.mlp.wo.kernel"
    shutil.rmtree(path / name)
    found = opened(path)
    assert len(found) == 38
    assert list(found.unavailable) == [name]
    assert [p.array for p in found.problems] == [name]
    with pytest.raises(MissingArray, match=rf"{name}: its metadata is not there in .*checkpoint"):
        found[name]


@pytest.mark.parametrize("text", [b"", b"{", b'{"shape": [1]}'])
def test_array_with_damaged_metadata_is_unavailable(tmp_path: Path, text: bytes) -> None:
    path = copied("pytree_8dev_zarr2_files", tmp_path)
    (path / "params.decoder.decoder_norm.scale" / ".zarray").write_bytes(text)
    found = opened(path)
    assert list(found.unavailable) == ["params.decoder.decoder_norm.scale"]


def failure(array: Any) -> str | None:
    try:
        np.asarray(array)
    except SourceError as error:
        return str(error)
    return None


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def spoil(file: Path) -> None:
    file.write_bytes(b"?" * file.stat().st_size)


@pytest.mark.parametrize("damage", [remove, cut, spoil])
def test_damaged_chunk_is_named_with_its_array(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = copied("pytree_8dev_zarr2_files", tmp_path)
    name = "params.decoder.layers_2.mlp.wo.kernel"
    damage(path / name / "1.2")
    found = opened(path)
    assert np.asarray(found[name][:24]).shape == (24, 32)
    with pytest.raises(SourceError, match=rf"{name}: chunk 1\.2 cannot be read"):
        np.asarray(found[name])


def test_chunk_left_out_on_purpose_is_the_fill_value(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1, 2, 3, 4]}, store_array_data_equal_to_fill_value=False)
    (path / "w" / "1").unlink()
    assert np.asarray(opened(path)["w"]).tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("damage", [cut, spoil])
@pytest.mark.parametrize("case", ["pytree_8dev_zarr3_ocdbt", "standard_1dev"])
def test_damaged_manifest_is_refused(tmp_path: Path, case: str, damage: Callable[[Path], None]) -> None:
    path = copied(case, tmp_path)
    damage(path / "manifest.ocdbt")
    with pytest.raises(FormatError, match=r"manifest\.ocdbt, or the tree of keys under it, is damaged"):
        opened(path)


def test_database_without_its_data_is_refused(tmp_path: Path) -> None:
    path = copied("pytree_8dev_zarr3_ocdbt", tmp_path)
    shutil.rmtree(path / "d")
    with pytest.raises(FormatError, match="tree of keys under it, is damaged"):
        opened(path)


def test_lost_data_file_of_a_process_is_found_in_reading(tmp_path: Path) -> None:
    path = copied("two_processes_4dev_adamw", tmp_path)
    for file in (path / "2" / "state" / "ocdbt.process_1" / "d").iterdir():
        file.unlink()
    found = opened(path).with_names("stored")
    reasons = [reason for name, array in found.items() if (reason := failure(array)) and reason.startswith(f"{name}: chunk ")]
    assert reasons or found.unavailable


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff\xfe", b"[]", b"{}", b'{"tree_metadata": []}', b"[" * 100_000, b'{"tree_metadata": {"a": []}}',
        b'{"tree_metadata": {"a": {"key_metadata": [1], "value_metadata": {}}}}',
        b'{"tree_metadata": {"a": {"key_metadata": [{"key": "w"}], "value_metadata": []}}}',
        b'{"tree_metadata": {"a": {"key_metadata": [{"key": "\\ud800"}], "value_metadata": {}}}}',
    ],
)  # fmt: skip
def test_hostile_tree_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "_METADATA").write_bytes(text)
    with pytest.raises(FormatError, match="_METADATA"):
        opened(tmp_path / "x")


def test_huge_tree_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "_METADATA", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(FormatError, match=f"_METADATA has {1 << 40} bytes, at most"):
        opened(tmp_path)


@pytest.mark.parametrize("key", ["../x/w", "/etc/passwd", "a/../../w", "..", "a\\..\\..\\w", "w\0"])
def test_name_that_leaves_the_folder_is_refused(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "x", {("w",): [1]})
    meta = json.loads((path / "_METADATA").read_text())
    meta["tree_metadata"]["hostile"] = entry((key,))
    (path / "_METADATA").write_text(json.dumps(meta))
    with pytest.raises(FormatError, match="leaves the folder"):
        opened(path)


def test_array_of_countless_chunks_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1, 2]})
    meta = json.loads((path / "w" / ".zarray").read_text())
    (path / "w" / ".zarray").write_text(json.dumps(meta | {"shape": [1 << 50]}))
    with pytest.raises(FormatError, match="more than any real array"):
        opened(path)


def test_a_chunk_that_reaches_far_beyond_its_array_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1, 2]})
    meta = json.loads((path / "w" / ".zarray").read_text())
    (path / "w" / ".zarray").write_text(json.dumps(meta | {"chunks": [1 << 36]}))
    with pytest.raises(LimitError, match="w: one unit of it takes"):
        meshload.restore(path, into="numpy")


def test_elements_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1, 2]})
    meta = json.loads((path / "w" / ".zarray").read_text())
    (path / "w" / ".zarray").write_text(json.dumps(meta | {"dtype": "|V4", "fill_value": None}))
    assert "not numbers" in opened(path).unavailable["w"]


def test_tree_without_metadata_is_refused(tmp_path: Path) -> None:
    path = copied("standard_1dev", tmp_path)
    (path / "_METADATA").unlink()
    with pytest.raises(FormatError, match=r"manifest\.ocdbt is there and _METADATA is not"):
        opened(path)


def test_step_without_a_tree_is_refused(tmp_path: Path) -> None:
    root = steps(tmp_path / "run", "4")
    (root / "4" / "state" / "_METADATA").unlink()
    with pytest.raises(FormatError, match=r"none of its items \(state/\) is a tree"):
        opened(root / "4")


@pytest.mark.parametrize("inside", [True, False])
def test_msgpack_of_old_is_refused_with_a_way_out(tmp_path: Path, inside: bool) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x82\xa6params\x81\xa1w\xc0\xa4step\x03")
    with pytest.raises(FormatError, match=r"checkpoint is msgpack.*PyTreeCheckpointer.*save it again"):
        opened(tmp_path if inside else tmp_path / "checkpoint")


def test_choice_that_cannot_apply_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1]})
    with pytest.raises(FormatError, match="no step or item to choose"):
        opened(path, step=3)
    with pytest.raises(FormatError, match="no step or item to choose"):
        opened(path, item="state")


def test_other_folders_do_not_match(tmp_path: Path) -> None:
    (tmp_path / "global_step100").mkdir()
    (tmp_path / "runs_12").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-100"')
    assert not Orbax().matches(open_folder(tmp_path))


def test_virtual_index_yields_to_its_source(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {("w",): [1]})
    (path / "model.safetensors").write_bytes(b"")
    assert not Orbax().matches(open_folder(path))


def test_item_and_its_own_file_match() -> None:
    item = GOLDEN / "standard_1dev" / "checkpoint"
    assert Orbax().matches(open_folder(item / "_METADATA"))
    assert len(opened(item / "_METADATA")) == 39
