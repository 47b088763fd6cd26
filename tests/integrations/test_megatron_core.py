"""Megatron core's GPT with our MLP and experts in the places of its own: outputs, gradients, marks, checkpoints and
optimizers', either way; its DistributedOptimizer, and its pipeline. Runs where it is installed, with psutil, which it
saves with; what of it needs a GPU is put out of the way (``on_cpus``).
"""

import contextlib
import functools
import importlib.util
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from processes import in_processes, main

from torch_fused_ops import nn as fnn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


class OnCpus(TorchFunctionMode):
    """What is made on ``"cuda"``, or sent there, stays on the CPU; a tensor's type is called as a GPU's is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.cuda.is_available():
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and not args[1:] else result


def with_steps(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Torch's Adam counts steps for each parameter; 0.16 loads one count for all, and does not find it in a state."""
    group, place = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    state["step"] = state["step"].clone()
    with_steps.load(self, model_param, {**state, **tensors})


def on_cpus() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # of tensors that are made there
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    # What 0.16 lacks without TransformerEngine: a name that it asks for, and a way to load the state of torch's Adam.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if DistributedOptimizer._set_main_param_and_optimizer_states is not with_steps:
        with_steps.load = DistributedOptimizer._set_main_param_and_optimizer_states
        DistributedOptimizer._set_main_param_and_optimizer_states = with_steps


def setting(tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, **flags: Any) -> tuple[Any, Any]:
    """(Megatron's configuration, its process groups)"""
    on_cpus()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    parallel_state.initialize_model_parallel(**sizes)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, gated_linear_unit=True,
        activation_func=F.silu, use_cpu_initialization=True, gradient_accumulation_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_dtype=torch.float32, deallocate_pipeline_outputs=True, **sizes,
        **{"bias_activation_fusion": False, **flags},
    )  # fmt: skip
    return config, ProcessGroupCollection.use_mpu_process_groups()


def model(config: Any, groups: Any, ours: bool) -> Any:
    """As a user puts ours into a layer's specification."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    mlp = spec.submodules.mlp
    released = isinstance(mlp, ModuleSpec)  # up to 0.16 a ModuleSpec, later what builds one
    if ours and config.num_moe_experts is None:
        spec.submodules.mlp = ModuleSpec(module=fnn.MLP, params={"pg_collection": groups}) if released else fnn.MLP
    elif ours:
        where = mlp.submodules if released else mlp.keywords["submodules"]
        where.experts = ModuleSpec(module=fnn.GroupedMLP) if released else fnn.GroupedMLP
    torch.manual_seed(3)
    first, last = groups.pp.rank() == 0, groups.pp.rank() == groups.pp.size() - 1
    sizes = {"vocab_size": 64, "max_sequence_length": 16}
    return GPTModel(config, spec, pre_process=first, post_process=last, pg_collection=groups, **sizes)


def losses_of(gpt: Any, seed: int = 0) -> Any:
    """Of each token; on a stage that is not the last: what the next one reads."""
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
    return gpt(ids, torch.arange(16).expand(2, 16), mask, labels=ids)


def loss_of(gpt: Any, seed: int = 0) -> Any:
    return losses_of(gpt, seed).mean()


def state_of(gpt: Any, optimizer: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    state = gpt.sharded_state_dict(metadata=dict(metadata))
    of_optimizer = optimizer.state_dict()
    ids = get_param_id_to_sharded_param_map(state, gpt.parameters())
    optim_state_to_sharding_state(of_optimizer, ids, ("step",))
    return {"model": gpt.sharded_state_dict(metadata=dict(metadata)), "optimizer": of_optimizer}


def shapes(folder: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    return {key: one.global_shape for key, one in load_sharded_metadata(folder).items()}


def made(rank: int, folder: Path) -> Path:
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    return folder


def from_theirs(rank: int, at: Path, metadata: dict[str, Any], theirs: Any, ours: Any) -> None:
    """Ours has what theirs has, by a checkpoint."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save({"model": theirs.sharded_state_dict(metadata=dict(metadata))}, made(rank, at))
    found = dist_checkpointing.load({"model": ours.sharded_state_dict(metadata=dict(metadata))}, at)
    ours.load_state_dict(found["model"])


def trains_saves_and_loads(rank: int, folder: Path, config: Any, groups: Any) -> None:
    from megatron.core import dist_checkpointing

    theirs, ours = (model(config, groups, mine) for mine in (False, True))
    kind = fnn.MLP if config.num_moe_experts is None else fnn.GroupedMLP
    assert sum(isinstance(module, kind) for module in ours.modules()) == 2

    for apart in (False, True):
        metadata = {"dp_cp_group": groups.dp_cp, "singleton_local_shards": apart}
        optimizers = [torch.optim.Adam(gpt.parameters(), lr=1e-2) for gpt in (theirs, ours)]
        # theirs → ours
        from_theirs(rank, folder / f"theirs{apart}", metadata, theirs, ours)

        losses = [loss_of(gpt) for gpt in (theirs, ours)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        mine = {name: p for name, p in ours.named_parameters()}
        for name, p in theirs.named_parameters():
            if name in mine:  # all but SequentialMLP's
                torch.testing.assert_close(mine[name].grad, p.grad, rtol=1e-4, atol=1e-7, msg=name)
                for mark in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
                    assert getattr(mine[name], mark, None) == getattr(p, mark, None), (name, mark)
        for optimizer in optimizers:
            optimizer.step()

        # ours → theirs, with the optimizer's state, and into a fresh one of ours
        at = made(rank, folder / f"ours{apart}")
        dist_checkpointing.save(state_of(ours, optimizers[1], metadata), at)
        again = model(config, groups, True)
        restored = torch.optim.Adam(again.parameters(), lr=1e-2)
        loss_of(again).backward()
        restored.step()
        for gpt, optimizer in ((theirs, optimizers[0]), (again, restored)):
            found = dist_checkpointing.load(state_of(gpt, optimizer, metadata), at)
            gpt.load_state_dict(found["model"])
            torch.testing.assert_close(loss_of(gpt), loss_of(ours), rtol=1e-6, atol=0)
        saved = optimizers[1].state_dict()["state"]
        for i, state in found["optimizer"]["state"].items():
            for name, value in state.items():
                assert torch.equal(value, saved[i][name])
        if apart is False:
            dense = {key: shape for key, shape in shapes(at).items() if not key.startswith("optimizer.")}
            assert dense == shapes(folder / f"theirs{apart}")


# ---- checks ----------------------------------------------------------------------------------------------------------


def saving(check: Any) -> Any:
    """A check behind which the process is gone that Megatron has started to save with, and would leave behind."""

    @functools.wraps(check)
    def wrapped(*arguments: Any) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        try:
            check(*arguments)
        finally:
            filesystem_async._results_queue = None
            for child in multiprocessing.active_children():
                child.terminate()
                child.join()

    return wrapped


@saving
def dense(rank: int, ranks: int, folder: Path) -> None:
    for bias in (False, True):
        config, groups = setting(tp=ranks, add_bias_linear=bias)
        trains_saves_and_loads(rank, made(rank, folder / f"dense{bias}"), config, groups)


def keeps(rank: int, ranks: int, folder: Path) -> None:
    """docs/integrations.md's row: in eager mode, Megatron's MLP unfused, its own fused activation, and ours."""
    import test_tools

    found = []
    for ours, fused in ((False, False), (False, True), (True, False)):
        config, groups = setting(add_bias_linear=False, bias_activation_fusion=fused)
        gpt = model(config, groups, ours)
        found.append(test_tools.kept(gpt, lambda gpt=gpt: loss_of(gpt).backward()))
    theirs, theirs_fused, mine = (f"{nbytes / 1024:.1f}" for nbytes in found)
    kept = test_tools.row("megatron-core")[2]
    wanted = f"{theirs} → {mine}, in eager mode; its own fused activation: {theirs_fused}"
    assert kept == wanted, f"the page has {kept!r}, and it is {wanted!r}"


@saving
def experts(rank: int, ranks: int, folder: Path) -> None:
    """All experts on each rank; half of them; half of each."""
    shared = [{}, {"ep": 2}, {"etp": 2}]
    for i, flags in enumerate(shared if ranks == 2 else shared[:1]):
        config, groups = setting(
            num_moe_experts=4,
            moe_ffn_hidden_size=64,
            moe_token_dispatcher_type="allgather",
            moe_router_load_balancing_type="none",
            add_bias_linear=False,
            **flags,
        )
        trains_saves_and_loads(rank, made(rank, folder / f"experts{i}"), config, groups)


@saving
def mixed_linears(rank: int, ranks: int, folder: Path) -> None:
    """Megatron's linears in our MLP, and ours in Megatron's: each reads what Megatron's own MLP wrote."""
    for i, parallel in enumerate((False, True)[:ranks]):
        config, groups = setting(tp=ranks, add_bias_linear=True, sequence_parallel=parallel)
        _mixed_linears(rank, made(rank, folder / f"mixed{i}"), config, groups)


def _mixed_linears(rank: int, folder: Path, config: Any, groups: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    theirs = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    ours = {"linear_fc1": fnn.ColumnParallelLinear, "linear_fc2": fnn.RowParallelLinear}
    sizes = {"ffn_hidden_size": 64, "tp_group": groups.tp}
    one = MLP(config, MLPSubmodules(**theirs), **sizes)
    others = [
        fnn.MLP(config, fnn.MLPSubmodules(**theirs), **sizes),
        MLP(config, MLPSubmodules(**ours), **sizes),
        fnn.MLP(config, **sizes),
    ]
    x = torch.randn(
        4, 2, 32, generator=torch.Generator().manual_seed(1 + rank * config.sequence_parallel)
    ).requires_grad_()
    for offsets in ((), ((0, 0, 1),)):
        at = made(rank, folder / f"mixed{len(offsets)}")
        metadata = {"dp_cp_group": groups.dp_cp}
        dist_checkpointing.save(one.sharded_state_dict("mlp.", offsets, metadata), at)
        for other in others:
            found = dist_checkpointing.load(other.sharded_state_dict("mlp.", offsets, metadata), at)
            other.load_state_dict({k.removeprefix("mlp."): t for k, t in found.items() if k.startswith("mlp.")})
            (y, bias), (truth, theirs_bias) = other(x), one(x)
            torch.testing.assert_close((y, bias), (truth, theirs_bias))
            found, wanted = (
                torch.autograd.grad(
                    (z * z.detach().cos()).sum(), [x, module.linear_fc1.weight, module.linear_fc2.weight]
                )
                for z, module in ((y, other), (truth, one))
            )
            torch.testing.assert_close(found, wanted)


class Trained:
    """A model in Megatron's DistributedDataParallel and DistributedOptimizer."""

    def __init__(self, gpt: Any) -> None:
        from megatron.core import distributed
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
        self.ddp = distributed.DistributedDataParallel(gpt.config, config, gpt)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(config, [self.ddp])

    def step(self, seed: int) -> tuple[Any, ...]:
        """(its loss, the gradient's norm, before it was clipped)"""
        from megatron.core.distributed import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = loss_of(self.ddp, seed)
        loss.backward()
        finalize_model_grads([self.ddp])
        done, norm, _ = self.optimizer.step()
        assert done
        return loss.detach(), torch.tensor(norm)

    def state(self, groups: Any, is_loading: bool = False) -> dict[str, Any]:
        metadata = {"dp_cp_group": groups.dp_cp, "distrib_optim_sharding_type": "fully_reshardable"}
        model = self.ddp.module.sharded_state_dict(metadata=dict(metadata))
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
        return {"model": model, "optimizer": optimizer}


@saving
def distributed_optimizer(rank: int, ranks: int, folder: Path) -> None:
    """Each rank has batches of its own, and the optimizer's state of its share of the parameters."""
    from megatron.core import dist_checkpointing

    mixture = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_load_balancing_type": "none"}
    for i, flags in enumerate(({}, {"ep": ranks, "moe_token_dispatcher_type": "allgather", **mixture})):
        config, groups = setting(add_bias_linear=False, **flags)
        with OnCpus():
            gpts = [model(config, groups, mine) for mine in (False, True)]
            from_theirs(rank, folder / f"weights{i}", {"dp_cp_group": groups.dp_cp}, *gpts)
            theirs, ours = map(Trained, gpts)
            for step in range(3):
                torch.testing.assert_close(ours.step(2 * step + rank), theirs.step(2 * step + rank), rtol=1e-4, atol=0)
            # into fresh ones, of ours and of theirs
            at = made(rank, folder / f"optimizer{i}")
            dist_checkpointing.save(ours.state(groups), at)
            again = [Trained(model(config, groups, mine)) for mine in (False, True)]
            for one in again:
                one.step(7)  # so that there is a state to load into
                found = dist_checkpointing.load(one.state(groups, is_loading=True), at)
                one.ddp.module.load_state_dict(found["model"])
                one.optimizer.load_state_dict(found["optimizer"])
            wanted = [
                ours.step(seed + rank) for seed in (6, 8)
            ]  # the first by the state that was loaded, the second shows it
            for one in again:
                torch.testing.assert_close([one.step(seed + rank) for seed in (6, 8)], wanted, rtol=1e-4, atol=0)


@saving
def stages(rank: int, ranks: int, folder: Path) -> None:
    """A layer on each of two stages, by Megatron's schedule; what they save is read by one stage."""
    from megatron.core import dist_checkpointing
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(batches: Any, gpt: Any) -> Any:
        return losses_of(gpt, next(batches)), lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    config, groups = setting(pp=ranks, add_bias_linear=False)
    gpts = [model(config, groups, mine) for mine in (False, True)]
    theirs, ours = gpts
    from_theirs(rank, folder / "weights", {"dp_cp_group": groups.dp_cp}, theirs, ours)
    found: list[list[Any]] = []
    for gpt in gpts:
        with OnCpus():
            given = {"seq_length": 16, "micro_batch_size": 2, "num_microbatches": 4, "forward_only": False}
            losses = get_forward_backward_func()(
                forward_step_func=forward, data_iterator=iter(range(4)), model=gpt, **given
            )
        found.append([one["loss"] for one in losses])
    assert len(found[0]) == (4 if rank == ranks - 1 else 0)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    named = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(named[name].grad, p.grad, rtol=1e-4, atol=1e-7, msg=name)

    at = made(rank, folder / "stages")
    dist_checkpointing.save({"model": ours.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})}, at)
    config, groups = setting(add_bias_linear=False)
    for mine in (False, True):
        whole = model(config, groups, mine)
        state = {"model": whole.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})}
        whole.load_state_dict(dist_checkpointing.load(state, at)["model"])
        losses = [loss_of(whole, seed).detach() for seed in range(4)]
        if rank == ranks - 1:
            torch.testing.assert_close(losses, found[1], rtol=1e-5, atol=0)


GROUPS = {
    "one": [keeps, dense, experts, mixed_linears],
    "two": [mixed_linears, dense, experts],
    "training": [distributed_optimizer, stages],
}


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_with_megatron(tmp_path: Path, group: str) -> None:
    in_processes(__file__, group, 1 if group == "one" else 2, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
