"""Train the quickstart's GPT with tensor-parallel MLPs, and compare it with training in one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The backend is gloo on CPUs, and nccl if each process has a GPU. Each MLP becomes a ``torch_fused_ops.nn.MLP``, and
``parallelize_module`` shards its weights. Each process has rows of the first linear layer (with ``--mlp swiglu``, of
both gate and up) and the matching columns of the second. All other parameters are replicated. The plain GPT trains on
the same batches in one process. At the end, the sharded model is saved, and one process loads it and must compute the
same loss.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

import argparse
import copy
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from quickstart import GELUMLP, GPT, Config, standard_library  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from torch_fused_ops import distributed
from torch_fused_ops.nn import MLP, MLPConfig


class BlockMLP(nn.Module):
    """One of the quickstart's MLPs as a ``torch_fused_ops.nn.MLP``, with the same weights."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        if isinstance(plain, GELUMLP):
            first, last, act = [plain.up], plain.down, "gelu_tanh"
        else:
            first, last, act = [plain.gate, plain.up], plain.down, "silu"
        gated, bias = len(first) == 2, last.bias is not None
        config = MLPConfig(
            last.out_features, last.in_features, add_bias_linear=bias, gated_linear_unit=gated, activation_func=act
        )
        self.mlp = MLP(config)
        with torch.no_grad():
            self.mlp.linear_fc1.weight.copy_(torch.cat([linear.weight for linear in first]))
            self.mlp.linear_fc2.weight.copy_(last.weight)
            if bias:
                self.mlp.linear_fc1.bias.copy_(torch.cat([linear.bias for linear in first]))
                self.mlp.linear_fc2.bias.copy_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        output, bias = self.mlp(x)
        return output if bias is None else output + bias


def with_our_mlps(model: GPT) -> GPT:
    """Return a copy of the model with this library's MLPs."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.mlp = BlockMLP(block.mlp).to(next(model.parameters()).device)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: 10)")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model (default: 2)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch (default: 4)")
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="swiglu", help="its MLPs (default: swiglu)")
    parser.add_argument("--compile", action="store_true", help='train torch.compile(model, backend="fused")')
    parser.add_argument("--folder", type=Path, help="for the checkpoint (default: a temporary one)")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 (or 4)")
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None

    torch.manual_seed(0)
    config = Config(layers=args.layers, mlp=args.mlp)
    plain = GPT(config).to(device)
    alone, shared = copy.deepcopy(plain), with_our_mlps(plain)
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    for block in shared.blocks:
        parallelize_module(block.mlp.mlp, mesh, distributed.tensor_parallel_plan(block.mlp.mlp))
    weight = shared.blocks[0].mlp.mlp.linear_fc1.weight
    say(f"machine   {ranks} processes on {device.type}, {dist.get_backend()}; torch {torch.__version__}")
    say(f"model     {args.layers} layers, {args.mlp}; the first linear is {tuple(weight.shape)}, ", end="")
    say(f"of which each process holds {tuple(weight.to_local().shape)}\n")

    text = standard_library() if rank == 0 else None
    sent = [text]
    dist.broadcast_object_list(sent, 0)  # the same text, wherever the others run
    text = sent[0]
    batches = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        assert text is not None
        starts = torch.randint(len(text) - config.context - 1, (args.batch,), generator=batches).tolist()
        rows = torch.stack([text[s : s + config.context + 1] for s in starts]).long().to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # DTensors and tensors side by side

    pairs = [(model, optimizer(model)) for model in (alone, shared)]
    step_of = {alone: alone, shared: torch.compile(shared, backend="fused") if args.compile else shared}
    say(f"  step        one process    {ranks} processes")
    difference = 0.0
    for step in range(1, args.steps + 1):
        tokens, targets = batch()
        losses = []
        for model, of_model in pairs:
            loss = step_of[model](tokens, targets)
            of_model.zero_grad()
            loss.backward()
            of_model.step()
            losses.append(loss.item())
        difference = max(difference, abs(losses[0] - losses[1]))
        say(f"  {step:<4} {losses[0]:>18.6f} {losses[1]:>14.6f}")
    say(f"\nlosses    differ by {difference:.1e} at most")
    assert difference < 1e-3, "tensor parallelism has changed what is computed"

    with tempfile.TemporaryDirectory() as temporary:
        folders = [str(args.folder or Path(temporary) / "checkpoint")]
        dist.broadcast_object_list(folders, 0)
        distributed.save(folders[0], shared, pairs[1][1])
        tokens, targets = batch()
        with torch.no_grad():
            expected = shared(tokens, targets).item()
        me = dist.new_group([0])
        if rank == 0:
            single = with_our_mlps(GPT(config).to(device))
            of_one = optimizer(single)
            distributed.load(folders[0], single, of_one, process_group=me)
            with torch.no_grad():
                actual = single(tokens, targets).item()
            loaded = single.blocks[0].mlp.mlp.linear_fc1.weight
            part = weight.to_local()
            rows = loaded.unflatten(0, (2 if args.mlp == "swiglu" else 1, -1)).chunk(ranks, 1)[0].flatten(0, 1)
            assert torch.equal(rows, part), "the checkpoint has other numbers"
            say(f"saved     by {ranks}, loaded by 1, bit for bit; the next loss is {actual:.6f} and {expected:.6f}")
            assert abs(actual - expected) < 1e-4
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
