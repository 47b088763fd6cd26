"""Checkpoints of ``nn.MLP``: n processes save and m load them, bit for bit; a rejected load changes nothing."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import raises
from processes import in_processes, main
from test_tensor_parallel import FFN, HIDDEN, build, config, cut, local, parts, tokens
from torch import nn

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_fused_ops import distributed
from torch_fused_ops.distributed.checkpoint import ShardedTensor, apply_swiglu_sharded_factory
from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.nn import FusedMLP, MLPConfig


def optimizer_of(mlp, lr=1e-2):
    return torch.optim.AdamW(mlp.parameters(), lr=lr)


def truth_of(mlp, ranks):
    """Return unsharded parameters and optimizer state: numbers that depend only on names."""
    truth = {}
    for name, p, spec in parts(mlp):
        shape = [n * ranks if axis == spec.axis else n for axis, n in enumerate(p.shape)]
        for i, kind in enumerate(("", "exp_avg", "exp_avg_sq")):
            truth[name, kind] = tokens(*shape, seed=100 * len(name) + i, dtype=p.dtype)
    return truth


def stepped(mlp, truth, rank, ranks):
    """Copy this rank's shards of the truth to the model, and return an optimizer with its state."""
    optimizer = optimizer_of(mlp)
    for name, p, spec in parts(mlp):
        tensors = {kind: cut(t, spec, rank, ranks).clone() for (n, kind), t in truth.items() if n == name}
        with torch.no_grad():
            p.copy_(tensors.pop(""))
        optimizer.state[p] = {"step": torch.tensor(3.0), **tensors}
    return optimizer


def is_truth(mlp, optimizer, truth, rank, ranks):
    for name, p, spec in parts(mlp):
        assert torch.equal(local(p), cut(truth[name, ""], spec, rank, ranks)), name
        if optimizer is not None:
            state = optimizer.state[p]
            assert state["step"] == 3
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(local(state[kind]), cut(truth[name, kind], spec, rank, ranks)), (name, kind)


def matrix(rank, ranks, folder):
    """Save in n processes, and load in m processes."""
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 4) if n <= ranks}
    for gated, dtype in ((False, torch.float32), (True, torch.float64), (True, torch.bfloat16)):
        mlp_config = config(gated_linear_unit=gated, params_dtype=dtype)
        for n, m in itertools.product(groups, repeat=2):
            checkpoint = folder / f"{gated}{dtype}{n}{m}"
            if rank < n:
                mlp = build(mlp_config, groups[n], seed=5)
                optimizer = stepped(mlp, truth_of(mlp, n), rank, n)
                distributed.save(checkpoint, mlp, optimizer, process_group=groups[n])
            dist.barrier()
            if rank < m:
                mlp = build(mlp_config, groups[m], seed=6)
                truth = truth_of(mlp, m)
                optimizer = optimizer_of(mlp, lr=5.0)
                distributed.load(checkpoint, mlp, optimizer, process_group=groups[m])
                is_truth(mlp, optimizer, truth, rank, m)
                assert optimizer.param_groups[0]["lr"] == 1e-2
            dist.barrier()
            if rank == 0:
                plain(checkpoint, folder / "plain.pt", truth)


def plain(where, file, truth):
    """Assert that torch.load reads the checkpoint as one process's state dict."""
    dcp_to_torch_save(where, file)
    state = torch.load(file, weights_only=False)
    assert set(state["model"]) == {name for name, kind in truth if not kind}
    for name, t in state["model"].items():
        assert torch.equal(t, truth[name, ""])


GROUPS = {"two": [matrix], "four": [matrix]}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "ranks"), [("two", 2), ("four", 4)])
def test_checks_pass_in_processes(group: str, ranks: int, tmp_path: Path) -> None:
    in_processes(__file__, group, ranks, tmp_path)


def test_single_process_checkpoint_is_a_plain_state_dict(tmp_path: Path) -> None:
    mlp = nn.Sequential(build(config(params_dtype=torch.float32)), nn.Linear(2, 2))
    distributed.save(tmp_path / "a", mlp)
    other = nn.Sequential(build(config(params_dtype=torch.float32), seed=1), nn.Linear(2, 2))
    distributed.load(tmp_path / "a", other)
    for a, b in zip(mlp.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    truth = {(name, ""): p.detach() for name, p in mlp.named_parameters()}
    plain(tmp_path / "a", tmp_path / "a.pt", truth)


def of_linears(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.GELU(), nn.Linear(3, 2)))


def inside(wrap):
    """Return the model with a wrapper around a part of it."""
    model = of_linears()
    model[1] = wrap(model[1])
    return model


WRAPPERS = {
    "compile": lambda: torch.compile(of_linears(), backend="eager"),
    "compile in it": lambda: inside(lambda part: torch.compile(part, backend="eager")),
    "ddp": lambda: DistributedDataParallel(of_linears()),
    "compiled ddp": lambda: torch.compile(DistributedDataParallel(of_linears()), backend="eager"),
    "checkpoint": lambda: inside(checkpoint_wrapper),
    "offload": lambda: inside(offload_wrapper),
    "compiled offload": lambda: torch.compile(inside(lambda part: offload_wrapper(checkpoint_wrapper(part)))),
}


@pytest.fixture
def one_process():
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_keys_have_no_names_of_wrappers(wrapper: str, one_process: None, tmp_path: Path) -> None:
    """A plain model reads a wrapped model's checkpoint and the other way around, with the optimizers."""
    for i, (written, read) in enumerate(((WRAPPERS[wrapper](), of_linears(1)), (of_linears(1), WRAPPERS[wrapper]()))):
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (written, read)]
        for optimizer in optimizers:
            for p in optimizer.param_groups[0]["params"]:
                optimizer.state[p] = {"momentum_buffer": torch.randn_like(p)}
        distributed.save(tmp_path / str(i), written, optimizers[0])
        distributed.load(tmp_path / str(i), read, optimizers[1])
        for a, b in zip(written.parameters(), read.parameters(), strict=True):
            assert torch.equal(a, b)
            states = (optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (a, b), strict=True))
            assert torch.equal(*states)


def test_gathered_parameters_are_loaded(one_process: None, tmp_path: Path) -> None:
    """After a forward pass without backward, FSDP2's root has gathered parameters in place of its shards."""
    for make in (of_linears, lambda: build(config(params_dtype=torch.float32))):
        written, read = make(), make()
        for p in read.parameters():
            torch.nn.init.zeros_(p)
        for model in (written, read):
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        distributed.save(tmp_path, written)
        with torch.no_grad():
            read(torch.ones(1, 2 if make is of_linears else HIDDEN))
        distributed.load(tmp_path, read)
        for a, b in zip(written.state_dict().values(), read.state_dict().values(), strict=True):
            assert torch.equal(local(a), local(b))


def test_megatron_gets_no_dtensors(one_process: None) -> None:
    linear = fully_shard(build(config()).linear_fc1, mesh=init_device_mesh("cpu", (1,)))
    raises(ValueError, "fc1.weight is a DTensor", linear.sharded_state_dict, "fc1.", (), {"dp_cp_group": None})


def test_integer_optimizer_state_is_loaded(tmp_path: Path) -> None:
    models = [of_linears(), of_linears(1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for steps, optimizer in zip((5, 1), optimizers, strict=True):
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p] = {"step": steps, "sum": torch.full_like(p, steps)}
    distributed.save(tmp_path, models[0], optimizers[0])
    distributed.load(tmp_path, models[1], optimizers[1])
    for state in optimizers[1].state.values():
        assert state["step"] == 5 and (state["sum"] == 5).all()


def test_fsdp1_is_refused(one_process: None, tmp_path: Path) -> None:
    flat = FullyShardedDataParallel(FusedMLP(2, 3), device_id=torch.device("cpu"))
    for model, name in ((nn.Sequential(flat), "0"), (torch.compile(flat), "model")):
        raises(TypeError, f"{name} of type FullyShardedDataParallel", distributed.save, tmp_path, model)


def test_folders_without_the_models_checkpoint_are_refused(tmp_path: Path) -> None:
    mlp, wider = build(config()), build(MLPConfig(HIDDEN, ffn_hidden_size=2 * FFN))
    raises(CheckpointException, "metadata", distributed.load, tmp_path, mlp)
    distributed.save(tmp_path, mlp)
    raises(CheckpointException, r"Size mismatch.*linear_fc\d\.weight", distributed.load, tmp_path, wider)


def test_optimizer_state_of_unknown_parts_is_refused(tmp_path: Path) -> None:
    mlp = build(config())
    optimizer = optimizer_of(mlp)
    optimizer.state[mlp.linear_fc1.weight] = {"step": torch.tensor(1.0), "row": torch.zeros(3)}
    raises(ValueError, r"linear_fc1\.weight\.row has shape \(3,\)", distributed.save, tmp_path, mlp, optimizer)


SECOND_OF_TWO: Any = SimpleNamespace(size=2, rank=1)


def test_factory_places_gate_and_up() -> None:
    """On the second of two ranks, gate rows follow the first rank's gate rows, and up rows follow all gate rows."""
    tensor = torch.arange(8.0).view(8, 1)
    shard = torch.cat([tensor[2:4], tensor[6:8]])
    packed = ShardedTensor.of_parameter("w", shard, ShardSpec(0, 2), SECOND_OF_TWO)
    (sharded,) = apply_swiglu_sharded_factory(packed, ()).values()
    assert [(tuple(place), box.flatten().tolist()) for place, box in sharded._views()] == [
        ((2, 0), [2.0, 3.0]),
        ((6, 0), [6.0, 7.0]),
    ]
    packed = ShardedTensor.of_parameter("w", shard, ShardSpec(0, 2), SECOND_OF_TWO, ((0, 3, 5),))
    stacked = apply_swiglu_sharded_factory(packed, ((0, 3, 5),), singleton_local_shards=True)
    assert list(stacked) == ["w_w", "w_v"] and all(t.shape == (5, 4, 1) for t in stacked.values())
    assert [tuple(place) for t in stacked.values() for place, _ in t._views()] == [(3, 2, 0), (3, 2, 0)]
    with pytest.raises(NotImplementedError, match="only save and load it"):
        sharded + 1
    assert "w" in repr(sharded)


if __name__ == "__main__":
    main(GROUPS)
