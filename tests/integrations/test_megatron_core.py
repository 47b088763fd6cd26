"""Megatron core's GPT with our MLP instead of its own. The tests compare outputs, gradients, marks and checkpoints (of
models and optimizers, in both directions), also with DistributedOptimizer. They need megatron-core, and psutil for
saving. ``on_cpus`` replaces code that needs a GPU.
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
    """Without a GPU, create "cuda" tensors on the CPU, and give them the type names of GPU tensors."""

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
    """Add each parameter's step: torch's Adam has one per parameter, but 0.16 expects a single step for all."""
    group, place = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    state["step"] = state["step"].clone()
    with_steps.load(self, model_param, {**state, **tensors})


def on_cpus() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # device of new tensors
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    # Without TransformerEngine, 0.16 cannot load the state of torch's Adam.
    if DistributedOptimizer._set_main_param_and_optimizer_states is not with_steps:
        with_steps.load = DistributedOptimizer._set_main_param_and_optimizer_states
        DistributedOptimizer._set_main_param_and_optimizer_states = with_steps


def setting(tp: int = 1, **flags: Any) -> tuple[Any, Any]:
    """Return (Megatron's configuration, its process groups)."""
    on_cpus()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, gated_linear_unit=True,
        activation_func=F.silu, use_cpu_initialization=True, gradient_accumulation_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tp, **{"bias_activation_fusion": False, **flags},
    )  # fmt: skip
    return config, ProcessGroupCollection.use_mpu_process_groups()


def model(config: Any, groups: Any, use_ours: bool) -> Any:
    """Build a GPT; with ``use_ours``, its layer specification has our modules."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec()
    released = isinstance(spec.submodules.mlp, ModuleSpec)  # up to 0.16 a ModuleSpec, later its builder
    if use_ours:
        spec.submodules.mlp = ModuleSpec(module=fnn.MLP, params={"pg_collection": groups}) if released else fnn.MLP
    torch.manual_seed(3)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=16, pg_collection=groups)


def loss_of(gpt: Any, seed: int = 0) -> Any:
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
    return gpt(ids, torch.arange(16).expand(2, 16), mask, labels=ids).mean()


def state_of(gpt: Any, optimizer: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    state = gpt.sharded_state_dict(metadata=dict(metadata))
    optimizer_state = optimizer.state_dict()
    ids = get_param_id_to_sharded_param_map(state, gpt.parameters())
    optim_state_to_sharding_state(optimizer_state, ids, ("step",))
    return {"model": gpt.sharded_state_dict(metadata=dict(metadata)), "optimizer": optimizer_state}


def shapes(folder: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    return {key: tensor.global_shape for key, tensor in load_sharded_metadata(folder).items()}


def create(rank: int, folder: Path) -> Path:
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    return folder


def load_from_reference(rank: int, folder: Path, metadata: dict[str, Any], reference: Any, fused: Any) -> None:
    """Copy the reference's weights to our model through a checkpoint."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save({"model": reference.sharded_state_dict(metadata=dict(metadata))}, create(rank, folder))
    loaded = dist_checkpointing.load({"model": fused.sharded_state_dict(metadata=dict(metadata))}, folder)
    fused.load_state_dict(loaded["model"])


def trains_saves_and_loads(rank: int, folder: Path, config: Any, groups: Any) -> None:
    from megatron.core import dist_checkpointing

    reference, fused = (model(config, groups, use_ours) for use_ours in (False, True))
    assert sum(isinstance(module, fnn.MLP) for module in fused.modules()) == 2

    for separate_keys in (False, True):
        metadata = {"dp_cp_group": groups.dp_cp, "singleton_local_shards": separate_keys}
        optimizers = [torch.optim.Adam(gpt.parameters(), lr=1e-2) for gpt in (reference, fused)]
        # reference → fused
        load_from_reference(rank, folder / f"reference{separate_keys}", metadata, reference, fused)

        losses = [loss_of(gpt) for gpt in (reference, fused)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        fused_parameters = {name: p for name, p in fused.named_parameters()}
        for name, p in reference.named_parameters():
            torch.testing.assert_close(fused_parameters[name].grad, p.grad, rtol=1e-4, atol=1e-7, msg=name)
            for mark in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
                assert getattr(fused_parameters[name], mark, None) == getattr(p, mark, None), (name, mark)
        for optimizer in optimizers:
            optimizer.step()

        # fused → reference, and → a fresh fused model, with the optimizer's state
        saved_to = create(rank, folder / f"fused{separate_keys}")
        dist_checkpointing.save(state_of(fused, optimizers[1], metadata), saved_to)
        fresh = model(config, groups, True)
        restored = torch.optim.Adam(fresh.parameters(), lr=1e-2)
        loss_of(fresh).backward()
        restored.step()
        for gpt, optimizer in ((reference, optimizers[0]), (fresh, restored)):
            loaded = dist_checkpointing.load(state_of(gpt, optimizer, metadata), saved_to)
            gpt.load_state_dict(loaded["model"])
            torch.testing.assert_close(loss_of(gpt), loss_of(fused), rtol=1e-6, atol=0)
        saved = optimizers[1].state_dict()["state"]
        for i, state in loaded["optimizer"]["state"].items():
            for name, value in state.items():
                assert torch.equal(value, saved[i][name])
        if separate_keys is False:
            dense = {key: shape for key, shape in shapes(saved_to).items() if not key.startswith("optimizer.")}
            assert dense == shapes(folder / f"reference{separate_keys}")


# ---- checks ----------------------------------------------------------------------------------------------------------


def saving(check: Any) -> Any:
    """Decorate a check: afterwards, end the process that Megatron starts for saving and leaves running."""

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
        trains_saves_and_loads(rank, create(rank, folder / f"dense{bias}"), config, groups)


def keeps(rank: int, ranks: int, folder: Path) -> None:
    """Check the page's row: the bytes that eager mode saves with Megatron's MLP, unfused and fused, and with ours."""
    import test_tools

    saved_bytes = []
    for use_ours, fused in ((False, False), (False, True), (True, False)):
        config, groups = setting(add_bias_linear=False, bias_activation_fusion=fused)
        gpt = model(config, groups, use_ours)
        saved_bytes.append(test_tools.count_saved_bytes(gpt, lambda gpt=gpt: loss_of(gpt).backward()))
    reference, reference_fused, fused_kib = (f"{nbytes / 1024:.1f}" for nbytes in saved_bytes)
    actual = test_tools.row("megatron-core")[2]
    expected = f"{reference} → {fused_kib}, in eager mode; its own fused activation: {reference_fused}"
    assert actual == expected, f"the page has {actual!r}, and it is {expected!r}"


@saving
def mixed_linears(rank: int, ranks: int, folder: Path) -> None:
    """Our MLP with Megatron's linears, and Megatron's MLP with ours, load the checkpoint of Megatron's MLP."""
    for i, parallel in enumerate((False, True)[:ranks]):
        config, groups = setting(tp=ranks, add_bias_linear=True, sequence_parallel=parallel)
        _mixed_linears(rank, create(rank, folder / f"mixed{i}"), config, groups)


def _mixed_linears(rank: int, folder: Path, config: Any, groups: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    megatron_linears = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    our_linears = {"linear_fc1": fnn.ColumnParallelLinear, "linear_fc2": fnn.RowParallelLinear}
    sizes = {"ffn_hidden_size": 64, "tp_group": groups.tp}
    reference = MLP(config, MLPSubmodules(**megatron_linears), **sizes)
    mixtures = [
        fnn.MLP(config, fnn.MLPSubmodules(**megatron_linears), **sizes),
        MLP(config, MLPSubmodules(**our_linears), **sizes),
        fnn.MLP(config, **sizes),
    ]
    x = torch.randn(
        4, 2, 32, generator=torch.Generator().manual_seed(1 + rank * config.sequence_parallel)
    ).requires_grad_()
    for offsets in ((), ((0, 0, 1),)):
        saved_to = create(rank, folder / f"mixed{len(offsets)}")
        metadata = {"dp_cp_group": groups.dp_cp}
        dist_checkpointing.save(reference.sharded_state_dict("mlp.", offsets, metadata), saved_to)
        for other in mixtures:
            actual = dist_checkpointing.load(other.sharded_state_dict("mlp.", offsets, metadata), saved_to)
            other.load_state_dict({k.removeprefix("mlp."): t for k, t in actual.items() if k.startswith("mlp.")})
            (y, bias), (truth, reference_bias) = other(x), reference(x)
            torch.testing.assert_close((y, bias), (truth, reference_bias))
            actual, expected = (
                torch.autograd.grad(
                    (z * z.detach().cos()).sum(), [x, module.linear_fc1.weight, module.linear_fc2.weight]
                )
                for z, module in ((y, other), (truth, reference))
            )
            torch.testing.assert_close(actual, expected)


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
        """Return (the loss, the gradient's norm before clipping)."""
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
    """Each rank has its own batches, and its part of the optimizer state."""
    from megatron.core import dist_checkpointing

    config, groups = setting(add_bias_linear=False)
    with OnCpus():
        gpts = [model(config, groups, use_ours) for use_ours in (False, True)]
        load_from_reference(rank, folder / "weights", {"dp_cp_group": groups.dp_cp}, *gpts)
        reference, fused = map(Trained, gpts)
        for step in range(3):
            torch.testing.assert_close(fused.step(2 * step + rank), reference.step(2 * step + rank), rtol=1e-4, atol=0)
        # load into a fresh reference and a fresh fused model
        saved_to = create(rank, folder / "optimizer")
        dist_checkpointing.save(fused.state(groups), saved_to)
        fresh = [Trained(model(config, groups, use_ours)) for use_ours in (False, True)]
        for trained in fresh:
            trained.step(7)  # creates the state to load into
            loaded = dist_checkpointing.load(trained.state(groups, is_loading=True), saved_to)
            trained.ddp.module.load_state_dict(loaded["model"])
            trained.optimizer.load_state_dict(loaded["optimizer"])
        # the first step uses the loaded state, the second step's loss depends on it
        expected = [fused.step(seed + rank) for seed in (6, 8)]
        for trained in fresh:
            torch.testing.assert_close([trained.step(seed + rank) for seed in (6, 8)], expected, rtol=1e-4, atol=0)


GROUPS = {
    "one": [keeps, dense, mixed_linears],
    "two": [mixed_linears, dense],
    "training": [distributed_optimizer],
}


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_with_megatron(tmp_path: Path, group: str) -> None:
    in_processes(__file__, group, 1 if group == "one" else 2, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
