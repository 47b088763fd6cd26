"""``plan(dp=…)``: its arithmetic for FSDP2 and DDP, compared with FSDP2 and DDP themselves in two processes.

Both count the live bytes of all storages after each operator, in eager mode. One process runs the whole model. Its
timeline is cut at the layers, and FSDP2's additional bytes are computed. Then two processes run FSDP2, and must have
exactly these bytes.
"""

import copy
import types
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import MLP, Stack
from processes import in_processes, main
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import models
from torch_fused_ops.planner.model import cross_entropy

# An odd vocabulary: of its 97 rows a GPU has 49, one of which is padding.
CONFIG = models.Config(layers=5, width=64, hidden=256, heads=4, context=128, vocabulary=97, kv_heads=2)
WIDE = replace(CONFIG, vocabulary=4999)
# A case is named after the tensors that make its peak: layers' parameters, activations, or the root's parameters.
CASES = {
    "layers": (models.GPT(CONFIG), (1, 16)),
    "activations": (models.Llama(CONFIG), (8, 128)),
    "the root": (models.Llama(WIDE), (1, 16)),
    "the root, tied": (models.GPT(WIDE), (1, 16)),
}


class Live(TorchDispatchMode):
    """Records the live bytes after each operator, and the operator's layer."""

    def __init__(self, uncounted):
        super().__init__()
        self.storages, self.uncounted, self.born = {}, set(), {}
        self.layer, self.kind, self.calls = "", "forward", []
        for tensor in uncounted:
            self.uncounted.add(tensor.untyped_storage()._cdata)
            self.add(tensor)

    def add(self, tensor):
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages or self.storages[storage._cdata]() is None:
            self.storages[storage._cdata] = weakref.ref(storage)
            self.born[storage._cdata] = len(self.calls)

    def live(self):
        """Return the current sizes' sum. FSDP2 resizes whole parameters to 0 and back."""
        nbytes = 0
        for key, ref in list(self.storages.items()):
            storage = ref()
            if storage is None:
                del self.storages[key]
                self.uncounted.discard(key)
            elif key not in self.uncounted:
                nbytes += storage.nbytes()
        return nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.calls and len(self.calls[-1]) == 4:
            self.calls[-1] += (self.live(),)  # tensors last read by the previous call are freed
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args, kwargs)):
            if isinstance(value, Tensor):
                self.add(value)
        # Gloo has no reduce-scatter: it reduces a copy of the whole buffer, which NCCL does not make, and splits that.
        if func is torch.ops.aten.split.Tensor and self.calls[-1][1].startswith("c10d._reduce_scatter_base_"):
            self.uncounted.add(args[0].untyped_storage()._cdata)
        self.calls.append((self.kind, str(func), self.layer, self.live()))
        return result


def follow(live, model):
    """Add hooks that tell ``live`` which layer runs, in forward and backward."""

    def enter(path):
        def run(*_):
            live.layer = path

        return run

    for i, block in enumerate(model.blocks):
        path = f"blocks.{i}"

        def before(module, args, path=path, first=i == 0):
            live.layer = path
            if first:  # the other layers' inputs are results of layers
                args[0].register_hook(enter(""))

        def after(module, args, result, path=path):
            live.layer = ""
            result.register_hook(enter(path))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


def step(live, model, tokens):
    """Return live bytes: before a step, the peaks of forward and backward, between them, and after the step."""
    live.calls.clear()
    live.kind, live.layer, entry = "forward", "", live.live()
    with live:
        loss = model(tokens, tokens)
        saved = live.live()
        live.kind = "backward"
        loss.backward()
        end = live.live()
        live.calls[-1] += (end,)
    peaks = [max(call[3] for call in live.calls if call[0] == kind) for kind in ("forward", "backward")]
    return entry, *peaks, saved, end


def predicted(model, tokens, setup):
    """Compute ``step``'s figures for one of several GPUs from the whole model's step."""
    from torch_fused_ops.planner.static_memory import Resident, resident_tensors
    from torch_fused_ops.planner.step import Step, cut
    from torch_fused_ops.virtual_gpu.timeline import Event, Timeline

    units = tuple(f"blocks.{i}" for i in range(len(model.blocks)))

    def unit_of(path):
        return next((unit for unit in units if f"{path}.".startswith(f"{unit}.")), "")

    tensors = resident_tensors(model, unit_of)
    model = model.bfloat16() if setup.mixed_precision else model
    live = Live([tokens, *model.parameters()])
    follow(live, model)
    entry, *_, saved, end = step(live, model, tokens)
    moments = tuple(
        Event(kind, name, alive, after, 0, 0, 0.0, (layer,)) for kind, name, layer, alive, after in live.calls
    )
    names = [name for name, _ in model.named_parameters()]
    gradients = {
        (0, i): (live.born[p.grad.untyped_storage()._cdata], p.grad.untyped_storage().nbytes())
        for i, p in enumerate(model.parameters())
    }
    captured = types.SimpleNamespace(
        units=units,
        layers={unit: unit for unit in units},
        unit_of=unit_of,
        parameter=lambda graph, number: names[number],
        unread=0,
    )
    parts = cut(Timeline(moments, entry, saved, end, gradients), captured, lambda call: 0.0)
    outer = {"token.weight": "(embedding)", "norm.weight": "(head)", "head.weight": "(head)"}
    resident = Resident.of(tensors, setup, outer.get)
    sharded = Step({}, {"free": parts}, resident.shards)
    alive, peaks = 0, dict.fromkeys(("forward", "backward"), 0)
    for graph, _, segment in sharded.sharded(sharded.pieces({})):
        peaks[graph] = max(peaks[graph], alive + segment.peak)
        alive += segment.net
    return 0, *peaks.values(), sharded.summary_at({}).saved, alive


def planned(rank, ranks, folder):
    """Compare all figures of ``step`` with the computed ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from torch_fused_ops.planner.setup import Setup

    mesh = init_device_mesh("cpu", (ranks,))
    mixed = {"mixed_precision": True}
    # With the root's peak in mixed precision, 386 bytes of 4.4 MB are not explained.
    cases = [(name, {}) for name in CASES] + [(name, mixed) for name in ("layers", "activations")]
    cases += [("layers of Llama", mixed | {"root": "apart", "reshard": how}) for how in ("always", "not-last", "never")]
    cases += [("layers of Llama", mixed | {"reshard": "not-last"}), ("layers", {"reshard": "never"})]
    for name, settings in cases:
        model, batch = copy.deepcopy((CASES | {"layers of Llama": (models.Llama(CONFIG), (1, 16))})[name])
        tokens, setup = torch.randint(CONFIG.vocabulary, batch), Setup("none", ranks, **settings)
        expected = predicted(copy.deepcopy(model), tokens, setup)
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setup.mixed_precision else MixedPrecisionPolicy()
        )
        last = len(model.blocks) - 1
        for i, block in enumerate(model.blocks):
            stays = setup.reshard == "never" or (setup.reshard == "not-last" and setup.root == "with" and i == last)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays)
        if setup.root == "apart":
            fully_shard(model.token, mesh=mesh, mp_policy=policy, reshard_after_forward=setup.reshard != "never")
            ends = [model.norm, model.head]
            fully_shard(ends, mesh=mesh, mp_policy=policy, reshard_after_forward=setup.reshard == "always")
        fully_shard(model, mesh=mesh, mp_policy=policy)
        live = Live([tokens, *(p.to_local() for p in model.parameters())])
        steps = []
        for _ in range(8):
            steps.append(step(live, model, tokens))
            model.zero_grad()
        # All steps except the first are equal, except that Gloo's threads may release sent buffers later.
        measured = tuple(map(min, *steps[1:]))
        # torch 2.15 frees the previous layer's flat buffer a moment earlier, so forward may have a layer less.
        layer = sum(ranks * p.to_local().nbytes for p in model.blocks[0].parameters())
        case = name, settings, measured, expected
        assert expected[1] - layer <= measured[1] <= expected[1], case
        assert measured[:1] + measured[2:] == expected[:1] + expected[2:], case


def profiled_peak(model, x, wrap, accumulates):
    """Return the most bytes that the profiler sees alive in a step, including parameters and buckets.

    It is the least of several steps, since Gloo's threads may release sent buffers later.
    """
    with torch.profiler.profile(profile_memory=True) as profile:
        model, x = wrap(copy.deepcopy(model)), x.clone()
        for number in range(8):
            if not accumulates:
                model.zero_grad()
            with torch.profiler.record_function(f"step {number}"):
                cross_entropy(model(x)).backward()
    live, peaks = 0, [0]
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peaks[-1] = max(peaks[-1], live)
        elif event.name().startswith("step "):
            peaks.append(live)
    return min(peaks[2:])


def profiled(rank, ranks, folder):
    """A rank's planned peak, which the loss makes, equals the profiler's, to the byte."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (ranks,))

    def shard(model):
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        return model

    model = Stack([MLP(64, 256) for _ in range(4)], residual=True, end=nn.Linear(64, 2000, bias=False))
    common = {"capacity": "1GiB", "gpu": "H100", "optimizer": "none", "loss": "eager", "compiled": "none", "dp": ranks}
    for wrap, dtype, settings in (
        (DistributedDataParallel, torch.float32, {"parallel": "ddp"}),
        (shard, torch.bfloat16, {"mixed_precision": True}),
    ):
        x = torch.randn(2048, 64, dtype=dtype)
        for accumulate in (1, 2):
            plan = tfo.plan(model, x, accumulate=accumulate, **common, **settings)
            measured = profiled_peak(model, x, wrap, accumulate > 1)
            # Gloo's threads release buffers late: on two cores, between 0 bytes and 1.5 % more are alive.
            assert plan.step_peak <= measured <= 1.02 * plan.step_peak, (settings, accumulate, measured, plan.step_peak)


GROUPS = {"planned": (planned,), "profiled": (profiled,)}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_need_the_planned_bytes(group: str, tmp_path: Path) -> None:
    in_processes(__file__, group, 2, tmp_path)


if __name__ == "__main__":
    main(GROUPS)
