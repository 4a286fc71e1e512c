"""A format of one's own, in one file: it says where the bytes lie, and meshload does the rest.

The format: a folder with `arrays.json`, `{"name": {"file": ..., "offset": ..., "dtype": ..., "shape": [...]}}`, beside raw files.
A package registers its format as an entry point of the group `meshload.formats`, after which `meshload.open` finds it by itself:

    [project.entry-points."meshload.formats"]
    raw_folder = "my_package.my_format:RawFolder"

Run it alone: `python examples/my_format.py` writes a small folder and restores two ranks of it.
"""

import json
import pathlib
import tempfile

import numpy as np

import meshload
from meshload.array import stored_whole
from meshload.errors import FormatError
from meshload.source import Folder, read_bytes


class RawFolder:
    """The format `raw_folder`."""

    name = "raw_folder"
    order = 50  # asked after formats with plainer marks (low numbers), before those with weaker ones

    def matches(self, folder: Folder) -> bool:
        return folder.entry is None and folder.has("arrays.json")

    def open(self, folder: Folder) -> meshload.Checkpoint:
        try:
            listed = json.loads(read_bytes(folder.file("arrays.json")))
            arrays = {name: self._array(folder, name, entry) for name, entry in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"arrays.json: not what this format writes: {error}") from error
        return meshload.Checkpoint(arrays, format=self.name)

    def _array(self, folder: Folder, name: str, entry: dict) -> meshload.Array:
        shape = tuple(int(n) for n in entry["shape"])
        return stored_whole(name, np.dtype(entry["dtype"]), shape, folder.file(entry["file"]), int(entry["offset"]))


def write_example(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Write a small folder of this format, and return what is in it."""
    arrays = {"weight": np.arange(24, dtype="<f4").reshape(6, 4), "bias": np.arange(6, dtype="<f4")}
    listed, at = {}, 0
    with (folder / "data.raw").open("wb") as file:
        for name, array in arrays.items():
            file.write(array.tobytes())
            listed[name] = {"file": "data.raw", "offset": at, "dtype": array.dtype.str, "shape": array.shape}
            at += array.nbytes
    (folder / "arrays.json").write_text(json.dumps(listed))
    return arrays


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        truth = write_example(folder)
        for rank in range(2):
            layout = {"weight": ("tp", None), "bias": ("tp",)}
            got = meshload.restore(folder, format=RawFolder(), mesh="tp=2", rank=rank, layout=layout, into="numpy")
            rows = slice(3 * rank, 3 * rank + 3)
            assert all(np.array_equal(got[name], truth[name][rows]) for name in truth)
            print(f"rank {rank}: " + ", ".join(f"{name} {array.shape}" for name, array in got.items()))


if __name__ == "__main__":
    main()
