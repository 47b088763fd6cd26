"""``nn.GroupedMLP`` in several processes: results equal one process, and any number of them loads a checkpoint."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import raises
from processes import in_processes, main
from test_checkpoint import is_truth, optimizer_of, stepped, truth_of
from test_tensor_parallel import SUM, Counted, cut, parts, tokens

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_fused_ops import distributed
from torch_fused_ops.nn import GroupedMLP, MLPConfig

HIDDEN, FFN, EXPERTS = 16, 24, 4
COUNTS = [3, 0, 2, 1]


def config(**flags):
    defaults = {"activation_func": F.silu, "gated_linear_unit": True, "params_dtype": torch.float64, **flags}
    return MLPConfig(HIDDEN, moe_ffn_hidden_size=FFN, **defaults)


def build(mlp_config, tp_group=None, ep_group=None, experts=EXPERTS, seed=0):
    torch.manual_seed(seed)
    return GroupedMLP(experts, mlp_config, tp_group=tp_group, ep_group=ep_group)


def step(mlp, x, probs, d, counts=COUNTS):
    x, probs = (t.clone().requires_grad_() for t in (x, probs))
    y, _ = mlp(x, counts, probs)
    y.backward(d)
    mlp.backward_dw()
    return [y.detach(), x.grad, probs.grad]


def tensor_parallel(rank, ranks, folder):
    """Every combination of flags has the same results, initial weights and collectives."""
    x, probs, d = tokens(6, HIDDEN), tokens(6, seed=2).abs(), tokens(6, HIDDEN, seed=3)
    for gated, bias, delay, memory in itertools.product(
        (False, True), (False, True), (False, True), ("off", "free", "input")
    ):
        mlp_config = config(gated_linear_unit=gated, add_bias_linear=bias, delay_wgrad_compute=delay, memory=memory)
        unsharded, mlp = build(mlp_config), build(mlp_config, dist.group.WORLD, seed=rank)
        x_leaf = x.clone().requires_grad_()
        with CommDebugMode() as comm:
            counted = Counted(comm)
            y, _ = mlp(x_leaf, COUNTS, probs)
            assert counted() == {SUM: 1}
            y.backward(d)
            assert counted() == {SUM: 1}
            mlp.backward_dw()
            assert counted() == {}
        mlp.zero_grad()
        torch.testing.assert_close(step(mlp, x, probs, d), step(unsharded, x, probs, d), atol=1e-12, rtol=1e-12)
        for (name, p, spec), unsharded_p in zip(parts(mlp), unsharded.parameters(), strict=True):
            assert torch.equal(p, cut(unsharded_p, spec, rank, ranks)), name
            torch.testing.assert_close(p.grad, cut(unsharded_p.grad, spec, rank, ranks), atol=1e-12, rtol=1e-12)


def refused(rank, ranks, folder):
    """Each error names the argument."""
    for words, flags in (
        ("sequence_parallel=True .* Gather", {"sequence_parallel": True}),
        (r"ffn_hidden_size=25 .* tp_group", {"ffn": 25}),
    ):
        mlp_config = config(**{name: value for name, value in flags.items() if name != "ffn"})
        mlp_config.moe_ffn_hidden_size = flags.get("ffn", FFN)
        raises(ValueError, words, build, mlp_config, dist.group.WORLD)


def truth_here(mlp, ep_rank):
    """Return the truth for this rank's experts."""
    everything = truth_of(build(mlp.config), 1)  # one process's truth
    num_local = mlp.num_local_experts
    return {key: tensor[ep_rank * num_local : (ep_rank + 1) * num_local] for key, tensor in everything.items()}


def round_trips(rank, ranks, folder):
    """Other numbers of ranks load a checkpoint of ep·tp ranks bit for bit: packed, in two keys, or plain."""
    sizes = [(ep, tp) for ep, tp in itertools.product((1, 2), repeat=2) if ep * tp <= ranks]
    layouts = {}
    for ep, tp in sizes:
        members = range(ep * tp)
        tps = [dist.new_group(list(members)[i * tp : (i + 1) * tp]) for i in range(ep)]
        eps = [dist.new_group(list(members)[i::tp]) for i in range(tp)]
        layouts[ep, tp] = dist.new_group(members), tps[rank // tp % ep], eps[rank % tp]
    for flags, separate_keys in (
        ({"gated_linear_unit": False}, False),
        ({}, False),
        ({"params_dtype": torch.float32}, True),
        ({"params_dtype": torch.bfloat16}, False),
    ):
        mlp_config, metadata = config(**flags), {"singleton_local_shards": separate_keys}
        for (n, m), is_load in itertools.product(itertools.product(sizes, repeat=2), (False, True)):
            (ep, tp), (group, tp_group, ep_group) = (m, layouts[m]) if is_load else (n, layouts[n])
            if rank < ep * tp:
                mlp = build(mlp_config, tp_group, ep_group, EXPERTS // ep, seed=5 + is_load)
                truth = truth_here(mlp, rank // tp)
                checkpoint = folder / f"{flags}{separate_keys}{n}{m}"
                if is_load:
                    optimizer = optimizer_of(mlp, lr=5.0)
                    distributed.load(checkpoint, mlp, optimizer, metadata=metadata, process_group=group)
                    is_truth(mlp, optimizer, truth, rank % tp, tp)
                else:
                    optimizer = stepped(mlp, truth, rank % tp, tp)
                    distributed.save(checkpoint, mlp, optimizer, metadata=metadata, process_group=group)
            dist.barrier()


def wrapped(rank, ranks, folder):
    """FSDP2 shards the experts. Gradients and checkpoints are equal to one process."""
    mesh = init_device_mesh("cpu", (ranks,))
    x, probs, d = tokens(6, HIDDEN), tokens(6, seed=2).abs(), tokens(6, HIDDEN, seed=3)
    for memory in ("free", "input"):
        unsharded, mlp = build(config(memory=memory)), build(config(memory=memory))
        fully_shard(mlp, mesh=mesh)
        torch.testing.assert_close(step(mlp, x, probs, d), step(unsharded, x, probs, d))
        for p, unsharded_p in zip(mlp.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), unsharded_p.grad)
        distributed.save(folder / f"fsdp{memory}", mlp)
        dist.barrier()
        by_experts = build(config(), ep_group=dist.group.WORLD, experts=EXPERTS // ranks, seed=3)
        distributed.load(folder / f"fsdp{memory}", by_experts)
        for p, q in zip(by_experts.parameters(), unsharded.parameters(), strict=True):
            assert torch.equal(p, q.chunk(ranks)[rank])


GROUPS = {"two": [wrapped, tensor_parallel, refused, round_trips], "four": [tensor_parallel, round_trips]}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "ranks"), [("two", 2), ("four", 4)])
def test_checks_pass_in_processes(group: str, ranks: int, tmp_path: Path) -> None:
    in_processes(__file__, group, ranks, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
