"""Trains tiny models by DeepSpeed's engine: saves some, goes on from what others saved, and tells what came of it.

    python -m torch.distributed.run --standalone --nproc-per-node 2 runs_deepspeed.py RUNS.json

`RUNS.json` is a list of runs; see `Run`. What each rank of a run sees is written to `{out}/{rank}.npz`: the losses of its steps,
and masters and moments by name, whole, as they are after loading (`start/`) and after each step (`1/` ...).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, LENGTH = 40, 16, 4, 2, 24, 4, 6
MICRO_BATCHES = 2
"""Of a step, on all ranks together: two addends have the same sum in any order, so runs are comparable bit for bit."""


@dataclass
class Run:
    """One engine's life: it is made, it may load, it trains, it may save, and it trains on."""

    model: str
    """`llama`, with Hugging Face's names; `neox`, a pipeline with GPT-NeoX's; or `flat`, the same without a pipeline."""
    out: str
    stage: int = 1
    dtype: str = "fp32"
    pp: int = 1
    tp: int = 1
    ep: int = 0
    """Of a `llama`: how many ranks share the experts of its last layer, 0 where it has none."""
    tied: bool = False
    grouped: bool = False
    """Whether vectors are a group of their own, without decay."""
    zero: dict[str, Any] = field(default_factory=dict)
    """More of the engine's `zero_optimization`."""
    load: str | None = None
    universal: bool = False
    first: int = 0
    """The number of its first step, which says its data."""
    steps: int = 0
    """How many before saving ..."""
    save: str | None = None
    more: int = 0
    """... and how many after it."""


# --- a Llama ----------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend, each `(batch, length, heads, head_dim)`, and return `(batch, length, heads * head_dim)`."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -1e4).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


class Attention(nn.Module):
    """Its heads are cut over tensor-parallel ranks, if there are any; a kv head is held by all whose heads use it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN // HEADS * KV_HEADS, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // HEADS * KV_HEADS, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        if ranks > 1:
            sharing = ranks // KV_HEADS
            groups = [dist.new_group(range(k * sharing, (k + 1) * sharing)) for k in range(KV_HEADS)]
            mine = dist.get_rank() // sharing
            self.sharing = groups[mine]
            self.q_proj.weight, self.o_proj.weight = cut(self.q_proj.weight, 0, None), cut(self.o_proj.weight, 1, None)
            for projection in (self.k_proj, self.v_proj):
                projection.weight = nn.Parameter(projection.weight.detach().chunk(KV_HEADS)[mine].clone())
                projection.weight.cut, projection.weight.sharing = 0, sharing
        self.is_cut = ranks > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_cut:
            return self.o_proj(self.attended(self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        x = _Copy.apply(x, None)
        k, v = (functional.linear(x, _Copy.apply(p.weight, self.sharing)) for p in (self.k_proj, self.v_proj))
        return _Sum.apply(self.o_proj(self.attended(self.q_proj(x), k, v)), None)

    def attended(self, *qkv: torch.Tensor) -> torch.Tensor:
        return attention(*(x.unflatten(-1, (-1, HIDDEN // HEADS)) for x in qkv))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(MoE):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Block(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(HIDDEN), Attention(ranks)
        self.post_attention_layernorm, self.mlp = Norm(HIDDEN), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(ranks) for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model, self.lm_head = Body(run.tp), nn.Linear(HIDDEN, VOCAB, bias=False)
        if run.ep:
            self.model.layers[-1].mlp = Experts(HIDDEN, Mlp(), 4, run.ep, drop_tokens=False)
        if run.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.lm_head(self.model(ids)), ids)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


# --- a GPT-NeoX, as a pipeline of tensor-parallel layers ----------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """The sum of what tensor-parallel ranks have; gradients pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Copy(torch.autograd.Function):
    """What tensor-parallel ranks share; gradients are summed."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


def cut(parameter: nn.Parameter, dim: int, group: Any) -> nn.Parameter:
    """Return the rank's part of a parameter, which remembers the dim."""
    made = nn.Parameter(parameter.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone())
    made.cut = dim
    return made


class Columns(nn.Linear):
    def __init__(self, inner: int, outer: int, group: Any) -> None:
        super().__init__(inner, outer)
        self.weight, self.bias, self.group = cut(self.weight, 0, group), cut(self.bias, 0, group), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Copy.apply(x, self.group))


class Rows(nn.Linear):
    def __init__(self, inner: int, outer: int, group: Any) -> None:
        super().__init__(inner, outer)
        self.weight, self.group = cut(self.weight, 1, group), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(functional.linear(x, self.weight), self.group) + self.bias


class Words(nn.Module):
    """The embedding."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.word_embeddings.weight, self.group = cut(self.word_embeddings.weight, 0, group), group
        self.rows = len(self.word_embeddings.weight)

    @property
    def shared(self) -> nn.Parameter:
        return self.word_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.rows * dist.get_rank(self.group)
        is_mine = (local >= 0) & (local < self.rows)
        return _Sum.apply(self.word_embeddings(local.clamp(0, self.rows - 1)) * is_mine.unsqueeze(-1), self.group)


class NeoXAttention(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.query_key_value, self.dense = Columns(HIDDEN, 3 * HIDDEN, group), Rows(HIDDEN, HIDDEN, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, HIDDEN // HEADS)).unbind(3)
        return self.dense(attention(q, k, v))


class NeoXMlp(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear1, self.linear2 = Columns(HIDDEN, FFN, group), Rows(FFN, HIDDEN, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(functional.gelu(self.linear1(x)))


class NeoXBlock(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = NeoXAttention(group), NeoXMlp(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.input_layernorm(x)) + self.mlp(self.post_attention_layernorm(x))


class LastNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Head(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.final_linear = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.final_linear.weight, self.group = cut(self.final_linear.weight, 0, group), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.final_linear(_Copy.apply(x, self.group))  # a rank's part of the logits


class _Gathered(torch.autograd.Function):
    """The ranks' parts, one after another in the last dim."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(dist.get_world_size(context.group), -1)[dist.get_rank(context.group)].contiguous(), None


def same(x: torch.Tensor) -> torch.Tensor:
    """Stand for the functions that GPT-NeoX has between its layers."""
    return x


def neox(run: Run) -> PipelineModule:
    topology = PipeModelDataParallelTopology(run.pp, run.tp, dist.get_world_size() // (run.pp * run.tp))
    groups = [(ranks, dist.new_group(ranks)) for ranks in topology.get_axis_comm_lists("model")]
    group = next(group for ranks, group in groups if dist.get_rank() in ranks)
    words, head = LayerSpec(Words, group), LayerSpec(Head, group)
    if run.tied:
        words = TiedLayerSpec("embed", Words, group, tied_weight_attr=["shared"])

        def logits(words: Words, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(_Copy.apply(x, group), words.shared)

        head = TiedLayerSpec("embed", Words, group, forward_fn=logits, tied_weight_attr=["shared"])
    blocks = [LayerSpec(NeoXBlock, group) for _ in range(LAYERS)]
    made = PipelineModule(
        [words, same, *blocks, same, LayerSpec(LastNorm), head],
        topology=topology,
        loss_fn=lambda x, ids: loss_of(_Gathered.apply(x, group), ids),
        seed_layers=True,  # each rank makes the layers that another would
        seed_fn=torch.manual_seed,
        partition_method="type:neoxblock",
    )
    made.tp_group = group
    return made


class Flat(nn.Module):
    """The same layers, one after another."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        blocks = [NeoXBlock(group) for _ in range(LAYERS)]
        self.sequential = nn.ModuleList([Words(group), nn.Identity(), *blocks, nn.Identity(), LastNorm(), Head(group)])
        self.tp_group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids
        for layer in self.sequential:
            x = layer(x)
        return loss_of(_Gathered.apply(x, self.tp_group), ids)


class Mpu:
    """Tells DeepSpeed which ranks are tensor-parallel: all of them."""

    def __init__(self) -> None:
        self.tp, single = dist.new_group(), [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.dp = single[dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return self.tp

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self.dp


# --- the engine -------------------------------------------------------------------------------------------------------


def engine_of(run: Run) -> Any:
    world = dist.get_world_size() // (run.pp * run.tp)
    zero = {"stage": run.stage, "stage3_param_persistence_threshold": 20, **run.zero}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // world,
        "gradient_clipping": 0.0,  # by a norm, whose sum would have another order
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        "checkpoint": {"load_universal": run.universal},
    }
    if run.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    torch.manual_seed(1)
    mpu = Mpu() if run.model != "neox" and (run.model == "flat" or run.tp > 1) else None
    model = neox(run) if run.model == "neox" else Flat(mpu.tp) if run.model == "flat" else Llama(run)
    if run.load:  # only loading makes these right
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    parameters: Any = list(model.parameters())
    if run.grouped:
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) is some] for some in (True, False))
        parameters = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if run.ep:
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    told: dict[str, Any] = {"lr": 2e-2, "betas": (0.9, 0.95), "eps": 1e-3}  # a small eps makes steps of gradients that are noise
    if run.load:
        told = {"lr": 0.5, "betas": (0.1, 0.2), "eps": 1e-8}
    optimizer = torch.optim.AdamW(parameters, **told)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def micro_batch(step: int, i: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + i))


def step_of(engine: Any, run: Run, step: int) -> float:
    """Take a step, and return the mean loss of its micro-batches."""
    if run.model == "neox":

        def batches() -> Iterator[Any]:
            count = engine.gradient_accumulation_steps()
            first = engine.grid.get_data_parallel_rank() * count
            yield from ((b, b) for b in (micro_batch(step, first + i) for i in range(count)))

        return float(engine.train_batch(batches()))
    count = engine.gradient_accumulation_steps()
    is_alone = run.model == "flat" or run.tp > 1  # no other rank has other data
    first = 0 if is_alone else dist.get_rank() * count
    losses = torch.zeros(MICRO_BATCHES, dtype=torch.float64)
    for i in range(first, first + count):
        loss = engine(micro_batch(step, i))
        engine.backward(loss)
        engine.step()
        losses[i] = loss.item()
    if not is_alone:
        dist.all_reduce(losses)
    return float(losses.mean())


def flat_state(engine: Any, parameter: Any, kind: str) -> torch.Tensor:
    """Return a moment of ZeRO-1 and 2: DeepSpeed's own accessor knows those of the first group alone."""
    whole, mapping = torch.zeros(parameter.numel()), parameter._hp_mapping
    if mapping is not None:
        flat = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        held, inside = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
        part = engine.optimizer.optimizer.state[flat][kind].narrow(0, held.start, held.numel)
        whole[inside.start : inside.start + inside.numel] = part
    dist.all_reduce(whole, group=parameter._dp_group)
    return whole.view(parameter.shape)


def states(engine: Any, run: Run, when: str) -> dict[str, Any]:
    """Return weights, masters and moments, whole."""
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if not getattr(parameter, "allreduce", True):  # an expert's, which ranks count from 0
            before, number, after = re.split(r"(?<=deepspeed_experts\.)(\d+)", name)
            name = f"{before}{int(number) + 4 // run.ep * (dist.get_rank() % run.ep)}{after}"
        of = {"master": safe_get_full_fp32_param(parameter)}
        for kind in ("exp_avg", "exp_avg_sq"):
            full = safe_get_full_optimizer_state if run.stage == 3 else None
            of[kind] = full(parameter, kind) if full else flat_state(engine, parameter, kind)
        with deepspeed.zero.GatheredParameters([parameter], enabled=run.stage == 3):
            of["weight"] = parameter.detach().float().clone()
        for kind, values in of.items():
            if hasattr(parameter, "cut"):
                parts = [torch.empty_like(values) for _ in range(run.tp)]
                dist.all_gather(parts, values.contiguous(), group=getattr(engine.module, "tp_group", None))
                values = torch.cat(parts[:: getattr(parameter, "sharing", 1)], parameter.cut)
            found[f"{when}/{kind}/{name}"] = values.detach().clone().numpy()
    return found


def perform(run: Run) -> None:
    engine = engine_of(run)
    found: dict[str, Any] = {}
    if run.load:
        path, _ = engine.load_checkpoint(run.load)
        assert path is not None, f"{run.load} was not loaded"
        found |= states(engine, run, "start")
    for i in range(run.steps + run.more):
        found[f"{i + 1}/loss"] = np.float64(step_of(engine, run, run.first + i))
        found |= states(engine, run, f"{i + 1}")
        if i + 1 == run.steps and run.save:
            engine.save_checkpoint(run.save)
    Path(run.out).mkdir(parents=True, exist_ok=True)
    np.savez(Path(run.out) / f"{dist.get_rank()}.npz", **found)
    engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled where there is a compiler
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, timeout=timedelta(minutes=1))
    for told in json.loads(Path(sys.argv[1]).read_text()):
        perform(Run(**told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
