"""Four processes of megatron-core on the CPU, over gloo; `test_megatron_core.py` runs it.

`checks_megatron_core.py CASE...`: each case is a folder with `there/release`, a torch_dist checkpoint, and `ids.npy`, tokens. A
`GPTModel` is made as `args` in the checkpoint say, and filled by `dist_checkpointing.load`, with tp=2 and pp=2; its logits are
written to `logits.npy`, and what `dist_checkpointing.save` makes of it to `again/iter_0000005`.

`plain` and `distributed` hold an optimizer of that kind, too; so do `plain_ep2` and so on, of which `MESHES` tells the degrees. It
is loaded and saved to `plain_again`, takes a step on the tokens, which data-parallel ranks share, and is saved to `plain_stepped`.
A distributed one is saved to `distributed_flat`, too, as `dp_reshardable`. So do `legacy_plain` and `legacy_distributed`, which
hold a file for each rank, from which Megatron's training fills both.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed: Transformer Engine, Apex
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import random as model_parallel_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

MESHES: Mapping[str, Mapping[str, int]] = {
    "": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "_ep2": {"expert_model_parallel_size": 2},
    "_ep1": {},
}
"""What folders' names end with, and the degrees; the other ranks are data-parallel."""
RANKS = 4
ITERATION = 5
DIVISIBLE_BY = 4
"""Rows of the vocabulary per tensor-parallel rank are a multiple of it, as in a run with `--make-vocab-size-divisible-by 4`."""


class NoGenerators:
    """Stands in for the tracker of each model-parallel rank's CUDA generator: dropout is off, and weights are loaded."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True


def stand_in_for_cuda() -> None:
    """Let megatron-core, which asks for the current CUDA device where it makes a tensor, be given the CPU; no number changes."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    moe_utils.te_general_gemm = None  # undefined where there is no Transformer Engine
    model_parallel_random._CUDA_RNG_STATE_TRACKER = NoGenerators()
    model_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


class OnTheCpu(TorchFunctionMode):
    """Gives optimizers, which ask for "cuda" by name and for the type of CUDA's tensors, the CPU's under these names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(found, str) else found


def stand_in_for_fused_adam() -> None:
    """Let torch's Adam, which counts steps by parameter, stand in for Apex's or Transformer Engine's, which counts them by group.

    `fully_reshardable` has the count of the groups, and asks a parameter's arrays for one, too: give it the one that it has, which
    it shares with all others until then.
    """
    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: DistributedOptimizer, parameter: Any, arrays: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        held = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        held["step"] = held["step"].clone()
        plain(self, parameter, {"step": held["step"], **arrays})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step  # type: ignore[method-assign]


def config_of(args: Any) -> TransformerConfig:
    """Return what Megatron's `--use-checkpoint-args` makes of `args`."""
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        rotary_interleaved=args.rotary_interleaved,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size if args.num_experts else None,
        moe_router_topk=args.moe_router_topk if args.num_experts else 2,
        moe_router_load_balancing_type="none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def model_of(args: Any, divisible_by: int = DIVISIBLE_BY) -> GPTModel:
    """Return this rank's part of the model, whose weights are those of nobody yet."""
    rows = parallel_state.get_tensor_model_parallel_world_size() * divisible_by
    model = GPTModel(
        config_of(args),
        get_gpt_layer_local_spec(args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=-(-args.vocab_size // rows) * rows,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model.eval()


def load(model: GPTModel, folder: Path) -> None:
    """Fill the model; keys that the checkpoint lacks, or that the model does, raise."""
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(loaded["model"])


def inputs_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, their positions, and which of them others do not see."""
    n = ids.shape[1]
    return ids, torch.arange(n).expand_as(ids), torch.ones(1, 1, n, n).triu(1).bool()


def logits_of(model: GPTModel, args: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of the whole vocabulary, on the last stage alone."""
    n = ids.shape[1]
    group = parallel_state.get_pipeline_model_parallel_group()
    hidden = torch.empty(n, len(ids), args.hidden_size)  # of the stage before
    if not parallel_state.is_pipeline_first_stage():
        distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        found = model(*inputs_of(ids))
    if not parallel_state.is_pipeline_last_stage():
        distributed.send(found, parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
        return None
    parts = [torch.empty_like(found) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    distributed.all_gather(parts, found.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[..., : args.vocab_size]


def save(model: GPTModel, args: Any, folder: Path, **more: Any) -> None:
    if distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    distributed.barrier()
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    dist_checkpointing.save({**common, "model": model.sharded_state_dict(), **more}, str(folder))
    if distributed.get_rank() == 0:  # as Megatron's training does, once all is there
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def optimizer_of(model: GPTModel, *, is_distributed: bool) -> tuple[MegatronOptimizer, DistributedDataParallel]:
    """Return an Adam of other hyperparameters than any that is loaded, and the model as it is trained."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
    options = {"optimizer": "adam", "lr": 1.0, "weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_eps": 1.0}
    config = OptimizerConfig(**options, use_distributed_optimizer=is_distributed, params_dtype=torch.float32, clip_grad=0.0)
    trained = DistributedDataParallel(model.config, ddp, model)
    return get_megatron_optimizer(config, [trained]), trained


def take_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, ids: torch.Tensor) -> None:
    """Train on this rank's share of the tokens."""
    mine = ids[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]

    def forward(batches: Iterator[torch.Tensor], module: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return module(*inputs_of(batch[:, :-1]), labels=batch[:, 1:]), lambda losses: (losses.mean(), {})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    model.config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([mine]),
        model=model,
        num_microbatches=1,
        seq_length=ids.shape[1] - 1,
        micro_batch_size=len(mine),
        forward_only=False,
    )
    assert optimizer.step()[0]


def fill(model: GPTModel, optimizer: MegatronOptimizer, given: Path, metadata: Any) -> None:
    """Load a torch_dist checkpoint; keys that it lacks, or that the model does, raise."""
    into = {"model": model.sharded_state_dict()}
    into["optimizer"] = optimizer.sharded_state_dict(into["model"], is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(into, str(given), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def go_on(args: Any, given: Path, ids: torch.Tensor, folder: Path, *, is_distributed: bool) -> None:
    """Load a model and its optimizer; save both, the distributed one's states flat, too, and both after a step."""
    t, p = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    rank = given / f"mp_rank_{t:02d}_{p:03d}"  # of a legacy checkpoint
    model = model_of(args, *([1] if rank.exists() else []))
    optimizer, trained = optimizer_of(model, is_distributed=is_distributed)
    if is_distributed:  # it asks torch's Adam for its step, which has none before the first
        optimizer.step()
    if rank.exists():
        fill_from_file(model, optimizer, rank, is_distributed=is_distributed)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    else:
        metadata = dist_checkpointing.load_content_metadata(str(given))  # as Megatron's training does
        fill(model, optimizer, given, metadata)
    flat = {"flat": {**metadata, "distrib_optim_sharding_type": "dp_reshardable"}} if is_distributed else {}
    for name, form in {"again": metadata, **flat, "stepped": metadata}.items():
        if name == "stepped":
            take_step(trained, optimizer, ids)
        state = optimizer.sharded_state_dict(model.sharded_state_dict(), metadata=form)
        save(model, args, Path(f"{folder}_{name}/iter_{ITERATION:07d}"), optimizer=state)


def compute(folder: Path) -> None:
    """Load a model, write its logits, and save it."""
    given = folder / "there/release"
    args = dist_checkpointing.load_common_state_dict(str(given))["args"]
    model = model_of(args)
    load(model, given)
    logits = logits_of(model, args, torch.from_numpy(np.load(folder / "ids.npy")))
    if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        np.save(folder / "logits.npy", logits.numpy())
    save(model, args, folder / f"again/iter_{ITERATION:07d}")


def fill_from_file(model: GPTModel, optimizer: MegatronOptimizer, rank: Path, *, is_distributed: bool) -> None:
    """Do what Megatron's training does with a legacy file; keys that it lacks, or that the model does, raise."""
    loaded = torch.load(rank / "model_optim_rng.pt", weights_only=False)
    model.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    if is_distributed:
        with torch.no_grad():  # weights of 32 bits are views of the buffer that is filled
            optimizer.load_parameter_state(str(rank / "distrib_optim.pt"))


def run(rank: int, meeting: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    stand_in_for_cuda()
    stand_in_for_fused_adam()
    for ending, degrees in MESHES.items():
        parallel_state.initialize_model_parallel(**degrees)
        for folder in map(Path, cases):
            if not ending:
                compute(folder)
            ids = torch.from_numpy(np.load(folder / "ids.npy"))
            for kind in ("plain", "distributed", "legacy_plain", "legacy_distributed"):
                for given in (folder / f"{kind}{ending}").glob("iter_*"):
                    told = folder / "there/release" if kind.startswith("legacy") else given
                    args = dist_checkpointing.load_common_state_dict(str(told))["args"]
                    with OnTheCpu():
                        go_on(args, given, ids, folder / f"{kind}{ending}", is_distributed=kind.endswith("distributed"))
        parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # forked, so that megatron-core is imported once
        multiprocessing.start_processes(run, (f"{folder}/meeting", sys.argv[1:]), nprocs=RANKS, start_method="fork")
