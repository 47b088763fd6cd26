"""Train the quickstart's GPT with tensor-parallel MLPs, and compare it with training in one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The backend is gloo on CPUs, and nccl if each process has a GPU. Each MLP becomes a ``torch_fused_ops.nn.MLP`` with a
``tp_group``. Each process has rows of the first linear layer (with ``--mlp swiglu``, of both gate and up) and the
matching columns of the second. All other parameters are replicated. The plain GPT trains on the same batches in one
process. At the end, the sharded model is saved, and one process loads it and must compute the same loss.
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

from torch_fused_ops import distributed
from torch_fused_ops.nn import MLP, MLPConfig


class BlockMLP(nn.Module):
    """One of the quickstart's MLPs as a ``torch_fused_ops.nn.MLP``: with its weights, or sharded by ``tp_group``."""

    def __init__(self, plain: nn.Module, tp_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if isinstance(plain, GELUMLP):
            first, last, act = [plain.up], plain.down, "gelu_tanh"
        else:
            first, last, act = [plain.gate, plain.up], plain.down, "silu"
        gated, bias = len(first) == 2, last.bias is not None
        config = MLPConfig(
            last.out_features, last.in_features, add_bias_linear=bias, gated_linear_unit=gated, activation_func=act
        )
        self.mlp = MLP(config, tp_group=tp_group)
        if tp_group is not None:  # main() loads the shards from a checkpoint
            return
        with torch.no_grad():
            self.mlp.linear_fc1.weight.copy_(torch.cat([linear.weight for linear in first]))
            self.mlp.linear_fc2.weight.copy_(last.weight)
            if bias:
                self.mlp.linear_fc1.bias.copy_(torch.cat([linear.bias for linear in first]))
                self.mlp.linear_fc2.bias.copy_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        output, bias = self.mlp(x)
        return output if bias is None else output + bias


def with_our_mlps(model: GPT, tp_group: dist.ProcessGroup | None = None) -> GPT:
    """Copy the model, and replace its MLPs."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.mlp = BlockMLP(block.mlp, tp_group).to(next(model.parameters()).device)
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
    whole, shared = with_our_mlps(plain), with_our_mlps(plain, dist.group.WORLD)
    first_rank = dist.new_group([0])
    temporary = tempfile.TemporaryDirectory()
    sent = [temporary.name]
    dist.broadcast_object_list(sent, 0)
    folder = Path(sent[0])
    if rank == 0:
        distributed.save(folder / "start", whole, process_group=first_rank)
    dist.barrier()
    distributed.load(folder / "start", shared)
    weights = [model.blocks[0].mlp.mlp.linear_fc1.weight for model in (whole, shared)]
    say(f"machine   {ranks} processes on {device.type}, {dist.get_backend()}; torch {torch.__version__}")
    say(f"model     {args.layers} layers, {args.mlp}; the first linear is {tuple(weights[0].shape)}, ", end="")
    say(f"of which each process holds {tuple(weights[1].shape)}\n")

    text = standard_library() if rank == 0 else None
    texts = [text]
    dist.broadcast_object_list(texts, 0)  # the same text, wherever the others run
    text = texts[0]
    batches = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        assert text is not None
        starts = torch.randint(len(text) - config.context - 1, (args.batch,), generator=batches).tolist()
        rows = torch.stack([text[s : s + config.context + 1] for s in starts]).long().to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    pairs = [(model, optimizer(model)) for model in (plain, shared)]
    step_of = {plain: plain, shared: torch.compile(shared, backend="fused") if args.compile else shared}
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

    saved_to = args.folder or folder / "trained"
    distributed.save(saved_to, shared, pairs[1][1])
    tokens, targets = batch()
    with torch.no_grad():
        expected = shared(tokens, targets).item()
    if rank == 0:
        one = with_our_mlps(GPT(config).to(device))
        distributed.load(saved_to, one, optimizer(one), process_group=first_rank)
        with torch.no_grad():
            found = one(tokens, targets).item()
        weight = one.blocks[0].mlp.mlp.linear_fc1.weight
        rows = weight.unflatten(0, (2 if args.mlp == "swiglu" else 1, -1)).chunk(ranks, 1)[0].flatten(0, 1)
        assert torch.equal(rows, weights[1]), "the checkpoint has other numbers"
        say(f"saved     by {ranks}, loaded by 1, bit for bit; the next loss is {found:.6f} and {expected:.6f}")
        assert abs(found - expected) < 1e-4
    dist.barrier()
    temporary.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
