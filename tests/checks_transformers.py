"""Checks of one process of two that torchrun starts: the logits of sharded transformers models. `test_equivalence.py` runs it.

`checks_transformers.py FOLDER OUT`: FOLDER holds a checkpoint per family, with `tokens.npy` and the truth, `logits.npy`, in it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import meshload


def on_meta(folder: Path) -> Any:
    """Return a model without weights; what no checkpoint holds, such as the frequencies of the rotary embedding, has values."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def tokens_of(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / "tokens.npy")).long()


def close(found: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found.float().numpy(), expected, rtol=1e-4, atol=1e-5)


def tensor_parallel(folder: Path) -> None:
    from torch.distributed.tensor import DTensor
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model, mesh = on_meta(folder), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # cut, where a tied embedding stays whole
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    apply_tensor_parallelism(model, mesh, plan)
    meshload.restore(folder, like=model)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with torch.no_grad():
        logits = model(tokens_of(folder)).logits
    close(logits.full_tensor() if isinstance(logits, DTensor) else logits, np.load(folder / "logits.npy"))


def data_parallel(folder: Path) -> None:
    """Each rank has half of the batch, or of the sequence, and all weights."""
    model = on_meta(folder)
    names = "transformers" if "moe" in folder.name else None  # where the live model's names are not those on disk
    model.load_state_dict(meshload.restore(folder, mesh="dp=2", names=names), assign=True)
    model.tie_weights()
    tokens, rank = tokens_of(folder), distributed.get_rank()
    expected = np.load(folder / "logits.npy")
    half = slice(rank * len(tokens) // 2, (rank + 1) * len(tokens) // 2)
    length = tokens.shape[1] // 2
    with torch.no_grad():
        close(model(tokens[half]).logits, expected[half])
        first = model(tokens[:, :length], use_cache=True)
        close(first.logits, expected[:, :length])
        if rank == 1:  # the second half of the sequence, after the first
            close(model(tokens[:, length:], past_key_values=first.past_key_values).logits, expected[:, length:])


def main(path: str, out: str) -> None:
    warnings.simplefilter("error", meshload.MeshloadWarning)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    told = {}
    for folder in sorted(Path(path).iterdir()):
        for check in (tensor_parallel, data_parallel):
            name = f"{check.__name__} {folder.name}"
            try:
                check(folder)
                told[name] = ""
            except Exception:
                told[name] = traceback.format_exc()
            distributed.barrier()
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
