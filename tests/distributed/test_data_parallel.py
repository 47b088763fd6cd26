"""Fused models in several processes: DistributedDataParallel and FSDP2 train them like one process."""

import contextlib
from pathlib import Path

import pytest
import torch
from harness import MLP, Stack, SwiGLU
from processes import in_processes, main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_fused_ops as tfo
from torch_fused_ops import nn as fnn

WIDTH, FFN, BLOCKS, STEPS, BATCHES = 128, 512, 4, 3, 2
TILED = {"policy": tfo.FusionPolicy(memory="tiled:2", strict=True)}


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=outputs == WIDTH)


def net():
    torch.manual_seed(0)
    return Stack((SwiGLU(WIDTH, FFN, linear) if i % 2 else MLP(WIDTH, FFN) for i in range(BLOCKS)), residual=True)


def data(step, batch):
    """Return all ranks' tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + batch)
    return torch.randn(8, WIDTH, generator=generator)


def train(model, parameters, ranks, rank, no_sync):
    """Run STEPS steps of BATCHES micro-batches; gradients are reduced only after the last micro-batch."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)  # AdamW's division would amplify rounding
    for step in range(STEPS):
        for batch in range(BATCHES):
            last = batch == BATCHES - 1
            with contextlib.nullcontext() if last else no_sync():
                y = model(data(step, batch).chunk(ranks)[rank])
                (y.square().mean() / BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()


def truth():
    """Train the model in one process, eagerly."""
    model = net()
    train(model, model.parameters(), 1, 0, contextlib.nullcontext)
    return model


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def assert_trained_alike(model, expected):
    actual = dict(model.named_parameters())
    for name, p in expected.named_parameters():
        mine = next(q for n, q in actual.items() if n.replace("_orig_mod.", "").removeprefix("module.") == name)
        torch.testing.assert_close(whole(mine.detach()), p.detach(), rtol=1e-4, atol=1e-5)


def fused(report):
    return sum(site.op is not None for site in report.sites)


def ddp(rank, ranks, folder, optimize_too=(True,), options=None):
    """Train a compiled DDP model; with True in ``optimize_too``, DDPOptimizer splits it."""
    expected = truth()
    for optimize in optimize_too:
        torch._dynamo.reset()
        model = DistributedDataParallel(net(), bucket_cap_mb=1.0)  # a block has 0.5 or 0.75 MiB
        compiled = torch.compile(model, backend="fused", options=options)
        with torch._dynamo.config.patch(optimize_ddp=optimize), tfo.record() as report:
            train(compiled, model.parameters(), ranks, rank, model.no_sync)
        assert report.graphs > 1 if optimize else report.graphs == 1, (optimize, report.graphs)
        # If buckets split an MLP, no backend can recognize it (test_composition.py).
        assert 0 < fused(report) <= BLOCKS if optimize else fused(report) == BLOCKS, (optimize, str(report))
        assert {site.tiles for site in report.sites} == {2 if options is TILED else 0}, str(report)
        assert_trained_alike(model, expected)


def ddp_whole(rank, ranks, folder):
    """Train a model that DDPOptimizer does not split."""
    ddp(rank, ranks, folder, (False,))


def ddp_of_compiled(rank, ranks, folder):
    """Train a compiled module in DistributedDataParallel."""
    expected = truth()
    torch._dynamo.reset()
    model = DistributedDataParallel(torch.compile(net(), backend="fused"))
    with torch._dynamo.config.patch(optimize_ddp=False), tfo.record() as report:
        train(model, model.parameters(), ranks, rank, model.no_sync)
    assert fused(report) == BLOCKS, str(report)
    assert_trained_alike(model, expected)


def fsdp(rank, ranks, folder, ways=("blocks",), options=None):
    """Compile each block and then shard it, as in torchtitan."""
    expected, mesh = truth(), init_device_mesh("cpu", (ranks,))
    for way in ways:
        torch._dynamo.reset()
        model = net()
        for block in model.layers:
            if way == "blocks":
                block.compile(backend="fused", options=options)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        called = torch.compile(model, backend="fused") if way == "whole" else model

        @contextlib.contextmanager
        def no_sync(model=model):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        with tfo.record() as report:
            train(called, model.parameters(), ranks, rank, no_sync)
        assert fused(report) > 0 and not [site for site in report.sites if site.op is None], (way, str(report))
        assert {site.tiles for site in report.sites} == {2 if options is TILED else 0}, str(report)
        assert_trained_alike(model, expected)


def fsdp_whole(rank, ranks, folder):
    """Compile the sharded model."""
    fsdp(rank, ranks, folder, ("whole",))


def modules(rank, ranks, folder):
    """Train nn.FusedMLP, and modules compiled by replace_mlps, under DistributedDataParallel and FSDP2."""
    expected, mesh = truth(), init_device_mesh("cpu", (ranks,))
    for sharded in (False, True):
        model = net()
        report = fnn.replace_mlps(model, torch.randn(4, WIDTH), memory="input")
        for mlp in report.replaced.values() if sharded else ():
            fully_shard(mlp, mesh=mesh)
        parallel = fully_shard(model, mesh=mesh) if sharded else DistributedDataParallel(model)
        no_sync = contextlib.nullcontext if sharded else parallel.no_sync
        train(parallel, model.parameters(), ranks, rank, no_sync)
        assert_trained_alike(model, expected)
        assert len(report.replaced) == BLOCKS
    for memory in ("free", "input"):
        model = nn.Sequential(*(fnn.FusedMLP(WIDTH, FFN, memory=memory) for _ in range(2)))
        alone = nn.Sequential(*(fnn.FusedMLP(WIDTH, FFN, memory=memory) for _ in range(2)))
        alone.load_state_dict(expected_state := {k: torch.full_like(v, 0.01) for k, v in alone.state_dict().items()})
        model.load_state_dict(expected_state)
        for mlp in model:
            fully_shard(mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, model.parameters(), ranks, rank, contextlib.nullcontext)
        train(alone, alone.parameters(), 1, 0, contextlib.nullcontext)
        assert_trained_alike(model, alone)


def in_tiles(rank, ranks, folder):
    """A tiled MLP computes each parameter's gradient once per backward, so the gradient is reduced once."""
    ddp(rank, ranks, folder, (False,), TILED)
    fsdp(rank, ranks, folder, options=TILED)


GROUPS = {
    "few": [ddp, fsdp],
    "modules": [modules],
    "tiles": [in_tiles],
    "more": [ddp_whole, ddp_of_compiled, fsdp_whole],
}


@pytest.mark.slow
@pytest.mark.parametrize("group", list(GROUPS))
def test_checks_pass_in_two_processes(group: str, tmp_path: Path) -> None:
    in_processes(__file__, group, 2, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
