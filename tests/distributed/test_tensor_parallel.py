"""Tensor parallelism of ``nn.MLP``: results equal one process, with the minimum of communication."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import Net, Ran, output, raises
from processes import in_processes, main
from test_sharding import two_dimensions

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import torch.distributed as dist
from mlp_figures import mlp_figures
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_fused_ops.distributed import load, save
from torch_fused_ops.nn import MLP, ColumnParallelLinear, FusedMLP, MLPConfig, RowParallelLinear

HIDDEN, FFN = 16, 24
SUM, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"


def config(**flags):
    defaults = {"activation_func": F.silu, "gated_linear_unit": True, "params_dtype": torch.float64, **flags}
    return MLPConfig(HIDDEN, ffn_hidden_size=FFN, **defaults)


def build(mlp_config, tp_group=None, seed=0):
    torch.manual_seed(seed)
    return MLP(mlp_config, tp_group=tp_group)


def tokens(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(t, spec, rank, ranks):
    """Return a rank's shard of a parameter."""
    if spec.axis is None:
        return t
    axis = spec.axis
    return t.unflatten(axis, (spec.groups, -1)).chunk(ranks, axis + 1)[rank].flatten(axis, axis + 1)


def parts(mlp):
    for name, parameter in mlp.named_parameters():
        linear, kind = name.split(".")[-2:]
        yield name, parameter, getattr(mlp, linear).shard_specs[kind]


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class Counted:
    """Count the collectives since the previous call, by name."""

    def __init__(self, comm):
        self.comm, self.before = comm, {}

    def __call__(self):
        now = {str(op).split(".")[-1]: n for op, n in self.comm.get_comm_counts().items()}
        new = {name: n - self.before.get(name, 0) for name, n in now.items() if n != self.before.get(name, 0)}
        self.before = now
        return new


# ---- checks: each runs in every one of two processes, or four --------------------------------------------------------


def flags(rank, ranks, folder):
    """Every combination of flags has the same results, initial weights and collectives."""
    switches = (False, True)
    for gated, bias, sequence, scaled, memory in itertools.product(
        switches, switches, switches, switches, ("off", "free", "fp8", "input")
    ):
        mlp_config = config(
            gated_linear_unit=gated, add_bias_linear=bias, sequence_parallel=sequence, memory=memory
        )  # fmt: skip
        unsharded, mlp = build(mlp_config), build(mlp_config, dist.group.WORLD)
        x, d, scale = tokens(2 * ranks, 3, HIDDEN), tokens(2 * ranks, 3, HIDDEN, seed=2), tokens(2 * ranks, 3, seed=3)
        results = []
        with CommDebugMode() as comm:
            counted = Counted(comm)
            for module, shares in ((unsharded, 1), (mlp, ranks if sequence else 1)):
                x_shard, s, g = (t.chunk(shares)[rank % shares].clone().requires_grad_() for t in (x, scale, d))
                y = output(module, x_shard, s if scaled else None)
                counts = [counted()]
                y.backward(g.detach())
                counts.append(counted())
                results.append([y.detach(), x_shard.grad, *([s.grad] if scaled else [])])
        small = {SUM: 1} if sequence and bias else {}  # the second bias's gradient
        expected = [{SUM: 1}, {SUM: 1 + scaled}]
        if sequence:
            expected = [{GATHER: 1 + scaled, SCATTER: 1}, {GATHER: 1, SCATTER: 1 + scaled, **small}]
        assert counts == expected, (counts, expected, mlp_config)
        close = {"atol": 1e-12, "rtol": 1e-12} if memory != "fp8" else {"atol": 1.0, "rtol": 0.3}
        for got, truth in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, truth.chunk(ranks)[rank] if sequence else truth, **close)
        for (name, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
            assert torch.equal(p, cut(unsharded_p, spec, rank, ranks)), (name, mlp_config)
            torch.testing.assert_close(p.grad, cut(unsharded_p.grad, spec, rank, ranks), **close)


def training(rank, ranks, folder):
    """After ten optimizer steps, weights equal one process's weights to float64's last digits."""
    for sequence in (False, True):
        mlp_config = config(sequence_parallel=sequence)
        unsharded, mlp = build(mlp_config), build(mlp_config, dist.group.WORLD)
        pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (unsharded, mlp)]
        for step in range(10):
            x, target = tokens(4, 3, HIDDEN, seed=step), tokens(4, 3, HIDDEN, seed=100 + step)
            for module, optimizer in pairs:
                share = sequence and module is mlp
                a, b = (t.chunk(ranks)[rank] if share else t for t in (x, target))
                optimizer.zero_grad()
                (output(module, a) - b).square().sum().backward()
                optimizer.step()
        for (_, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p, cut(unsharded_p, spec, rank, ranks), atol=1e-11, rtol=1e-11)


def pytorch_styles(rank, ranks, folder):
    """``nn.FusedMLP`` works with PyTorch's own styles, which make its parameters DTensors, at every memory level."""
    mesh, x = init_device_mesh("cpu", (ranks,)), tokens(5, HIDDEN)
    for memory in ("off", "free", "fp8", "input"):
        unsharded = FusedMLP(HIDDEN, FFN, "silu", memory=memory, dtype=torch.float64)
        styles = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
        mlp = parallelize_module(copy.deepcopy(unsharded), mesh, styles)
        for module in (mlp, unsharded):
            module(x).square().sum().backward()
        rough = {"atol": 1.0, "rtol": 0.3} if memory == "fp8" else {}
        for p, unsharded_p in zip(mlp.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), unsharded_p.grad, **rough)


def odds(rank, ranks, folder):
    """Seeds may differ. Meta tensors, frozen weights, copies, micro-batches in flight work. Other arguments raise."""
    world, x = dist.group.WORLD, tokens(4, HIDDEN)
    unsharded = build(config())
    mlp = build(config(), world, seed=rank)
    torch.testing.assert_close(output(mlp, x), output(unsharded, x))  # every rank has rank 0's weights
    torch.testing.assert_close(output(copy.deepcopy(mlp), x), output(unsharded, x))
    with torch.device("meta"):
        mlp = MLP(config(), tp_group=world)
    mlp.to_empty(device="cpu")
    torch.manual_seed(0)
    mlp.linear_fc1.reset_parameters()
    mlp.linear_fc2.reset_parameters()
    torch.testing.assert_close(output(mlp, x), output(unsharded, x))
    unsharded, mlp = build(config()), build(config(), world)
    for m in (unsharded, mlp):
        m.linear_fc1.weight.requires_grad_(False)
        for y in [output(m, tokens(4, HIDDEN, seed=s)) for s in range(3)]:
            y.square().sum().backward()
    assert mlp.linear_fc1.weight.grad is None
    for (_, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
        if unsharded_p.grad is not None:
            torch.testing.assert_close(p.grad, cut(unsharded_p.grad, spec, rank, ranks))
    arguments = {"config": config(), "tp_group": world}
    raises(ValueError, "ffn_hidden_size", MLP, config(), ffn_hidden_size=ranks + 1, tp_group=world)
    raises(ValueError, "gather_output", ColumnParallelLinear, 8, 8, gather_output=True, **arguments)
    raises(ValueError, "input_is_parallel", RowParallelLinear, 8, 8, input_is_parallel=False, **arguments)
    raises(ValueError, "divide", RowParallelLinear, 2 * ranks + 1, 8, **arguments)
    column = ColumnParallelLinear(4, 2 * ranks, bias=True, **arguments)  # a single linear adds its bias
    row = RowParallelLinear(2 * ranks, 4, **arguments)
    assert column(x[:, :4])[0].shape == (4, 2) and row(column(x[:, :4])[0])[1] is None


def saves_and_sends_as_computed(rank, ranks, folder):
    """Saved bytes, collectives and GEMMs equal ``mlp_figures``."""

    class Seen(Ran):
        def __init__(self):
            super().__init__()
            self.collectives = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            name = str(func).split(".")[1]
            if name in (SUM, GATHER, SCATTER):
                large = max(args[0].numel(), out.numel())
                self.collectives.append((name.removesuffix("_into_tensor").removesuffix("_tensor"), large * 4))
            return out

    t = 8
    for gated, memory, sequence, tp in itertools.product(
        (False, True), ("off", "free", "fp8", "input"), (False, True), {1, ranks}
    ):
        mlp_config = config(
            gated_linear_unit=gated, memory=memory, sequence_parallel=sequence, params_dtype=torch.float32,
            add_bias_linear=False,
        )  # fmt: skip
        mlp = build(mlp_config, dist.group.WORLD if tp > 1 else None)
        figures = mlp_figures(
            HIDDEN, FFN, t, tp, gated=gated, memory=memory, sequence_parallel=sequence, dtype=torch.float32
        )
        assert figures.weights == sum(p.nbytes for p in mlp.parameters())
        shared = sequence and tp > 1
        x = tokens(t // tp if shared else t, HIDDEN, dtype=torch.float32).requires_grad_()
        with Seen() as seen:
            y, _ = mlp(x)
            saved = seen.alive(x, y, *mlp.parameters()) + (0 if shared else x.nbytes)
            y.sum().backward()
        assert saved == figures.saved, (saved, figures, mlp_config)
        assert seen.collectives == list(figures.collectives), (seen.collectives, figures, mlp_config)
        assert sorted(map(sorted, seen.gemms)) == sorted(map(sorted, figures.gemms)), (seen.gemms, figures.gemms)


def compiled(rank, ranks, folder, backend="fused"):
    """torch.compile(backend="fused") makes one graph, with the same results."""
    x = tokens(4 * ranks, HIDDEN)
    for sequence in (False, True):
        torch._dynamo.reset()
        mlp_config = config(sequence_parallel=sequence)
        unsharded, mlp = build(mlp_config), build(mlp_config, dist.group.WORLD)
        mine = x.chunk(ranks)[rank] if sequence else x
        fn = torch.compile(mlp, backend=backend, fullgraph=True)
        y = output(fn, mine)
        y.square().sum().backward()
        truth = output(unsharded, x)
        truth.square().sum().backward()
        torch.testing.assert_close(y, truth.chunk(ranks)[rank] if sequence else truth)
        for (_, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p.grad, cut(unsharded_p.grad, spec, rank, ranks))


def traced(rank, ranks, folder):
    """Run ``compiled`` without Inductor, whose first compilation takes 20 s."""
    compiled(rank, ranks, folder, "aot_eager")


def data_parallel(rank, ranks, folder):
    """One mesh dimension is for DistributedDataParallel or FSDP2, the other for tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    place = tp.get_local_rank()
    x = tokens(8, 3, HIDDEN)
    mine = x.chunk(2)[dp.get_local_rank()]
    unsharded = build(config())
    optimizer = torch.optim.AdamW(unsharded.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        output(unsharded, x).square().mean().backward()
        optimizer.step()
    for sequence, way in itertools.product((False, True), ("ddp", "fsdp")):
        mlp = build(config(sequence_parallel=sequence), tp.get_group())
        if way == "ddp":
            wrapped = DistributedDataParallel(mlp, process_group=dp.get_group())
        else:
            wrapped = fully_shard(mlp, mesh=dp)
        # The loss is a mean over the tokens of all ranks.
        batch, weight = (mine.chunk(tp.size())[place], 1 / tp.size()) if sequence else (mine, 1.0)
        optimizer_of_mlp = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer_of_mlp.zero_grad()
            (output(wrapped, batch).square().mean() * weight).backward()
            optimizer_of_mlp.step()
        if way == "ddp":
            for (_, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
                torch.testing.assert_close(p, cut(unsharded_p, spec, place, tp.size()))
        folder_of_way = folder / f"{way}{sequence}"
        save(folder_of_way, mlp, optimizer_of_mlp)
        alone = build(config(), seed=7)
        of_alone = torch.optim.AdamW(alone.parameters(), lr=5e-2)
        load(folder_of_way, alone, of_alone)
        for p, q in zip(alone.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p, q)
            for name, t in optimizer.state[q].items():
                torch.testing.assert_close(of_alone.state[p][name], t)
        # Loading restores the model bit for bit.
        with torch.no_grad():
            before = [local(p).clone() for p in mlp.parameters()]
            for p in mlp.parameters():
                local(p).zero_()
        load(folder_of_way, mlp, optimizer_of_mlp)
        assert all(map(torch.equal, map(local, mlp.parameters()), before))


def wrapped(rank, ranks, folder):
    """FSDP2 frees parameters after forward, except a bias that is returned to an outer module."""

    mesh, x = init_device_mesh("cpu", (ranks,)), tokens(4, HIDDEN)
    for inside, memory in itertools.product((False, True), ("free", "fp8", "input")):
        unsharded, block = (Net(lambda s, x: output(s.mlp, x), mlp=build(config(memory=memory))) for _ in range(2))
        for module in [block.mlp.linear_fc1, block.mlp.linear_fc2] if inside else [block.mlp]:
            fully_shard(module, mesh=mesh)
        fully_shard(block, mesh=mesh)
        for m in (unsharded, block):
            y = m(x)
            y.square().sum().backward()
        # A second linear with hooks saves its exact input, so its weight gradient has no rounding.
        rough = {"atol": 1.0, "rtol": 0.3} if inside and memory == "fp8" else {}
        for p, unsharded_p in zip(block.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), unsharded_p.grad, **rough)


GROUPS = {
    "two": [training, pytorch_styles, odds, wrapped],
    "two more": [flags, saves_and_sends_as_computed, traced],
    "four": [two_dimensions, odds, training, data_parallel],
    "many": [flags, saves_and_sends_as_computed, compiled],
}


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "ranks"),
    [
        ("two", 2),
        pytest.param("two more", 2, marks=pytest.mark.slow),
        pytest.param("four", 4, marks=pytest.mark.slow),
        pytest.param("many", 4, marks=pytest.mark.slow),
    ],
)
def test_checks_pass_in_processes(group: str, ranks: int, tmp_path: Path) -> None:
    in_processes(__file__, group, ranks, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
