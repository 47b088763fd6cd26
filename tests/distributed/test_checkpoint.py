"""Checkpoints of ``nn.MLP``: saved by n processes, loaded by m, bit for bit; or refused, and nothing changed."""

import itertools
from pathlib import Path

import pytest
import torch
from harness import raises
from processes import in_processes, main
from test_tensor_parallel import FFN, HIDDEN, build, config, cut, local, parts, tokens
from torch import nn

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

from dataclasses import replace

import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torch_fused_ops import distributed
from torch_fused_ops.distributed.checkpoint import ShardedTensor, apply_swiglu_sharded_factory
from torch_fused_ops.nn import FusedMLP, MLPConfig


def optimizer_of(mlp, lr=1e-2):
    return torch.optim.AdamW(mlp.parameters(), lr=lr)


def truth_of(mlp, ranks):
    """Whole parameters and their optimizer's state: numbers that depend on names alone."""
    truth = {}
    for name, p, part in parts(mlp):
        whole = [n * ranks if axis == part.axis else n for axis, n in enumerate(p.shape)]
        for i, what in enumerate(("", "exp_avg", "exp_avg_sq")):
            truth[name, what] = tokens(*whole, seed=100 * len(name) + i, dtype=p.dtype)
    return truth


def stepped(mlp, truth, rank, ranks):
    """An optimizer whose state is, and a model that is, this rank's part of the truth."""
    optimizer = optimizer_of(mlp)
    for name, p, part in parts(mlp):
        own = {what: cut(t, part, rank, ranks).clone() for (n, what), t in truth.items() if n == name}
        with torch.no_grad():
            p.copy_(own.pop(""))
        optimizer.state[p] = {"step": torch.tensor(3.0), **own}
    return optimizer


def is_truth(mlp, optimizer, truth, rank, ranks):
    for name, p, part in parts(mlp):
        assert torch.equal(local(p), cut(truth[name, ""], part, rank, ranks)), name
        if optimizer is not None:
            state = optimizer.state[p]
            assert state["step"] == 3
            for what in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(local(state[what]), cut(truth[name, what], part, rank, ranks)), (name, what)


def matrix(rank, ranks, folder):
    """Saved by n, loaded by m."""
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 4) if n <= ranks}
    for gated, apart, dtype in (
        (False, False, torch.float32),
        (True, False, torch.float64),
        (True, True, torch.float32),
        (True, False, torch.bfloat16),
    ):
        given, metadata = config(gated_linear_unit=gated, params_dtype=dtype), {"singleton_local_shards": apart}
        for n, m in itertools.product(groups, repeat=2):
            where = folder / f"{gated}{apart}{dtype}{n}{m}"
            if rank < n:
                mlp = build(given, groups[n], seed=5)
                optimizer = stepped(mlp, truth_of(mlp, n), rank, n)
                distributed.save(where, mlp, optimizer, metadata=metadata, process_group=groups[n])
            dist.barrier()
            if rank < m:
                mlp = build(given, groups[m], seed=6)
                truth = truth_of(mlp, m)
                optimizer = optimizer_of(mlp, lr=5.0)
                distributed.load(where, mlp, optimizer, metadata=metadata, process_group=groups[m])
                is_truth(mlp, optimizer, truth, rank, m)
                assert optimizer.param_groups[0]["lr"] == 1e-2
            dist.barrier()
            if rank == 0 and not apart:
                plain(where, folder / "plain.pt", truth)


def plain(where, file, truth):
    """A checkpoint as torch.load reads it: one process's state dict."""
    dcp_to_torch_save(where, file)
    state = torch.load(file, weights_only=False)
    assert set(state["model"]) == {name for name, what in truth if not what}
    for name, t in state["model"].items():
        assert torch.equal(t, truth[name, ""])


def mismatched(rank, ranks, folder):
    """Each rank hears of it, by key, and keeps what it has."""
    where = folder / "whole"
    mlp = build(config(), dist.group.WORLD)
    optimizer = stepped(mlp, truth_of(mlp, ranks), rank, ranks)
    distributed.save(where, mlp, optimizer)
    dist.barrier()
    wider = build(config(gated_linear_unit=False), dist.group.WORLD)
    for key, other in (("linear_fc1.weight", wider), ("more.weight", nn.ModuleDict({"more": nn.Linear(2, 2)}))):
        before = [p.clone() for p in other.parameters()]
        raises(CheckpointException, key.replace(".", r"\."), distributed.load, where, other)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def stacked_layers(rank, ranks, folder):
    """Each process saves a layer of the stack, and loads another process's."""

    def stacked(module, layer):
        return module.sharded_state_dict("layers.", ((0, layer, ranks),))

    alone = build(config(), seed=rank)
    save(stacked(alone, rank), checkpoint_id=folder / "stacked")
    dist.barrier()
    other = (rank + 1) % ranks
    reread = build(config(), seed=50)
    state = stacked(reread, other)
    assert state["layers.linear_fc1.weight"].shape == (ranks, 2 * FFN, HIDDEN)
    load(state, checkpoint_id=folder / "stacked")
    for p, q in zip(reread.parameters(), build(config(), seed=other).parameters(), strict=True):
        assert torch.equal(p, q)


GROUPS = {"two": [matrix, mismatched, stacked_layers], "four": [matrix, mismatched, stacked_layers]}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "ranks"), [("two", 2), ("four", 4)])
def test_in_processes(group: str, ranks: int, tmp_path: Path) -> None:
    in_processes(__file__, group, ranks, tmp_path)


def test_one_process_writes_the_same_keys_and_layout(tmp_path: Path) -> None:
    mlp = nn.Sequential(build(config(params_dtype=torch.float32)), nn.Linear(2, 2))
    distributed.save(tmp_path / "a", mlp)
    other = nn.Sequential(build(config(params_dtype=torch.float32), seed=1), nn.Linear(2, 2))
    distributed.load(tmp_path / "a", other)
    for a, b in zip(mlp.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    truth = {(name, ""): p.detach() for name, p in mlp.named_parameters()}
    plain(tmp_path / "a", tmp_path / "a.pt", truth)


def test_an_optimizer_without_a_step_is_saved_and_loaded_as_such(tmp_path: Path) -> None:
    """It has no state after a save, after a load and after a load that fails."""
    mlp, twin, wider = build(config()), build(config()), build(MLPConfig(HIDDEN, ffn_hidden_size=2 * FFN))
    optimizer, of_twin, of_wider = map(optimizer_of, (mlp, twin, wider))
    distributed.save(tmp_path, mlp, optimizer)
    assert not optimizer.state
    raises(CheckpointException, r"Size mismatch.*linear_fc\d\.weight", distributed.load, tmp_path, wider, of_wider)
    assert not of_wider.state
    distributed.load(tmp_path, mlp, optimizer)
    for module, its_optimizer in ((mlp, optimizer), (twin, of_twin)):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        its_optimizer.step()
    assert all(map(torch.equal, mlp.parameters(), twin.parameters()))


def of_linears(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.GELU(), nn.Linear(3, 2)))


def inside(wrap):
    """The wrapper around a part of the model."""
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


def test_fsdp1_is_refused(one_process: None, tmp_path: Path) -> None:
    flat = FullyShardedDataParallel(FusedMLP(2, 3), device_id=torch.device("cpu"))
    for model, name in ((nn.Sequential(flat), "0"), (torch.compile(flat), "model")):
        raises(TypeError, f"{name} of type FullyShardedDataParallel", distributed.save, tmp_path, model)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    raises(CheckpointException, "metadata", distributed.load, tmp_path, build(config()))


def test_optimizer_state_of_unknown_parts_is_refused(tmp_path: Path) -> None:
    mlp = build(config())
    optimizer = optimizer_of(mlp)
    optimizer.state[mlp.linear_fc1.weight] = {"step": torch.tensor(1.0), "row": torch.zeros(3)}
    raises(ValueError, r"linear_fc1\.weight\.row has shape \(3,\)", distributed.save, tmp_path, mlp, optimizer)


def test_factory_places_gate_and_up() -> None:
    """The second of two ranks: gate rows behind the first's gate rows, up rows behind all gate rows."""
    whole = torch.arange(8.0).view(8, 1)
    part = torch.cat([whole[2:4], whole[6:8]])
    layout = ShardedTensor.of_parameter("w", part).sharding
    layout = replace(layout, shape=torch.Size((8, 1)), runs=(layout.runs[0]._replace(place=4),))
    packed = ShardedTensor("w", part, layout)
    (sharded,) = apply_swiglu_sharded_factory(packed, ()).values()
    assert [(tuple(place), box.flatten().tolist()) for place, box in sharded._boxes()] == [
        ((2, 0), [2.0, 3.0]),
        ((6, 0), [6.0, 7.0]),
    ]
    stacked = apply_swiglu_sharded_factory(packed, ((0, 3, 5),), singleton_local_shards=True)
    assert list(stacked) == ["w_w", "w_v"] and all(t.shape == (5, 4, 1) for t in stacked.values())
    assert [tuple(place) for t in stacked.values() for place, _ in t._boxes()] == [(3, 2, 0), (3, 2, 0)]
    with pytest.raises(NotImplementedError, match="only save and load it"):
        sharded + 1
    assert "w" in repr(sharded)


if __name__ == "__main__":
    main(GROUPS)
