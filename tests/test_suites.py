"""The suites of `meshload.testing`, run by the formats and frameworks that are installed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshload.testing import FormatSuite, FrameworkSuite, ramp, read_safetensors, write_checkpoint
from meshload_adapters.formats.hf import HuggingFace
from meshload_adapters.formats.orbax import Orbax
from meshload_adapters.frameworks.jax import Jax
from meshload_adapters.frameworks.numpy import NumPy
from meshload_adapters.frameworks.torch import Torch

GOLDEN = Path(__file__).resolve().parent / "golden"


class TestHuggingFace(FormatSuite):
    format = HuggingFace()

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "model"

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        dtypes = [np.bool_, np.int8, np.int64, np.float16, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
        arrays = {np.dtype(d).name: ramp("w", (3, 1, 5), d) for d in dtypes}
        arrays |= {"scalar": np.asarray(3.5, np.float32), "none": np.zeros((0, 4), np.float32)}
        yield write_checkpoint(self.folder, arrays), arrays
        yield write_checkpoint(self.folder.with_name("sharded"), arrays, shards=3), arrays


class TestOrbax(FormatSuite):
    format = Orbax()

    def cases(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        for name in ("standard_1dev", "pytree_8dev_zarr2_files", "pytree_8dev_zarr3_ocdbt", "two_processes_4dev_adamw"):
            yield GOLDEN / "orbax" / name / "checkpoint", read_safetensors(GOLDEN / "orbax" / name / "golden.safetensors")


class TestNumPy(FrameworkSuite):
    framework = NumPy()
    dtypes = (*FrameworkSuite.dtypes, np.complex64, ml_dtypes.float8_e5m2)

    @staticmethod
    def back(tensor: Any) -> Any:
        return tensor


class TestTorch(FrameworkSuite):
    framework = Torch()
    dtypes = (*FrameworkSuite.dtypes, np.complex64, ml_dtypes.float8_e5m2)

    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch")

    @staticmethod
    def back(tensor: Any) -> Any:
        import torch

        name = str(tensor.dtype).removeprefix("torch.")
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


class TestJax(FrameworkSuite):
    framework = Jax()
    dtypes = (*FrameworkSuite.dtypes, np.complex64, ml_dtypes.float8_e5m2)

    @pytest.fixture(autouse=True)
    def _needs_jax(self) -> None:
        pytest.importorskip("jax")

    @staticmethod
    def back(tensor: Any) -> Any:
        return np.asarray(tensor)
