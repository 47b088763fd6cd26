"""Devices: plain PyTorch runs on devices without our kernels, mixed devices raise, meta and fake tensors work."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Calls, python, raises
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_fused_ops import functional as FF

SEED = torch.tensor([7])
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "bias_act": (
        lambda x, b, s: FF.bias_act(x, b, s, activation="gelu"),
        (torch.randn(4, 8), torch.randn(8), torch.randn(4)),
    ),
    "glu": (lambda g, u: FF.swiglu(g, u), (torch.randn(4, 8), torch.randn(4, 8))),
    "bias_glu": (lambda x, b: FF.bias_glu(x, b, activation="silu"), (torch.randn(4, 8), torch.randn(8))),
    "bias_act, memory=fp8": (lambda x, b: FF.bias_gelu(x, b, memory="fp8"), (torch.randn(4, 8), torch.randn(8))),
    "dropout_add": (
        lambda x, b, r, seed: torch.ops.fused.dropout_add(x, b, r, seed, 0.5),
        (torch.randn(4, 8), torch.randn(8), torch.randn(4, 8), SEED),
    ),
    "softmax": (
        lambda x, m, s: FF.scaled_masked_softmax(x, m, s, scale=0.5),
        (torch.randn(2, 2, 4, 4), torch.rand(2, 1, 4, 4) > 0.5, torch.randn(2)),
    ),
    "viewless": (lambda x: FF.make_viewless_tensor(x, requires_grad=True, keep_graph=True), (torch.randn(4, 8),)),
}


def _float(t: Tensor) -> bool:
    return t.is_floating_point()


def test_every_operator_has_a_kernel_for_every_device() -> None:
    packets = [getattr(torch.ops.fused, name) for name in dir(torch.ops.fused)]
    operators = [packet.default for packet in packets if isinstance(packet, torch._ops.OpOverloadPacket)]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    one_kernel = "fused::with_saved"  # an identity that runs plain torch on every device
    kernels = [op for op in operators if not op.has_kernel_for_dispatch_key(composite) and op.name() != one_kernel]
    assert len(kernels) >= 16
    for op in kernels:
        for key in ("CPU", "CUDA", "XPU", "MPS", "HPU", "XLA", "PrivateUse1", "Meta"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key), (op, key)
        for key in ("CPU", "CUDA", "XPU"):  # registered directly, without custom_op's wrapper
            assert op.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)), (op, key)


@pytest.mark.slow
def test_other_devices_run_plain_pytorch() -> None:
    """Run the check in a new process, since a device can be named only once."""
    ran = python(__file__, PYTHONPATH=str(Path(__file__).parents[1])).strip().splitlines()[-1].split()
    assert {"fused::bias_act", "fused::bias_act_backward", "fused::glu_backward",
            "fused::dropout_add_backward", "fused::scaled_masked_softmax_backward"} <= set(ran)  # fmt: skip


def _elsewhere() -> None:
    """Run each call on a device that has kernels for aten's operators only."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("elsewhere")

    class Elsewhere(Tensor):
        """A tensor of that device. Its kernels compute on ``raw``, a CPU tensor."""

        @staticmethod
        def __new__(cls, raw: Tensor) -> Any:
            t: Any = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
            t.__class__, t.raw = cls, raw
            return t

    library = torch.library.Library("aten", "IMPL")

    def implement(op: Any) -> None:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
            args, kwargs = tree_map(lambda t: t.raw if isinstance(t, Elsewhere) else t, (args, kwargs))
            return tree_map(lambda t: Elsewhere(t.contiguous()) if isinstance(t, Tensor) else t, op(*args, **kwargs))

        library.impl(op, kernel, "PrivateUse1")

    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            known = torch._C._dispatch_has_kernel(op.name())
            if known and not op._schema.is_mutable and not op.has_kernel_for_dispatch_key(composite):
                implement(op)

    # Autograd's engine does not support devices made in Python, so backward operators are called directly.
    with Calls() as every:
        for fn, args in CALLS.values():
            fn(*(t.clone().requires_grad_(_float(t)) for t in args)).sum().backward()
    calls = [call for call in every.made if call[0].namespace == "fused"]
    on_device = lambda t: Elsewhere(t.detach().clone()) if isinstance(t, Tensor) else t  # noqa: E731
    for func, args, kwargs, expected in calls:
        actual = func(*tree_map(on_device, args), **tree_map(on_device, kwargs))
        assert all(isinstance(t, Elsewhere) for t in tree_leaves(actual) if isinstance(t, Tensor)), func
        for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
            if isinstance(a, Tensor):
                exact = {"atol": 0, "rtol": 0} if a.element_size() == 1 else {"atol": 1e-6, "rtol": 1e-5}
                torch.testing.assert_close(a.raw, b.detach(), **exact)
            else:
                assert a == b
    print(*sorted({func._schema.name for func, *_ in calls}))


@pytest.mark.parametrize("name", [name for name, (_, args) in CALLS.items() if len(args) > 1])
@pytest.mark.parametrize("kind", ["meta", "fake cuda"])
def test_tensors_on_two_devices_are_rejected(name: str, kind: str) -> None:
    fn, args = CALLS[name]
    for index in range(1, len(args)):
        for first in (False, True):  # True: the first argument is on the other device
            with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake cuda" else torch.no_grad():
                device = "cuda" if kind == "fake cuda" else "meta"
                mixed = [
                    torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                    if (i == 0) == first and (first or i == index)
                    else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
                    for i, t in enumerate(args)
                ]
                raises((ValueError, RuntimeError), r"is on device \w+(:0)?; accepted: ", fn, *mixed)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", ["meta", "cuda", "xpu"])
def test_meta_and_fake_results_have_the_right_layout(name: str, device: str) -> None:
    fn, args = CALLS[name]
    expected = fn(*args)
    # Autograd aborts the process for a fake tensor of a device that torch was not built for. In 2.15 it raises if the
    # device is missing. F.gelu behaves in the same way.
    train = device == "meta" or (device == "cuda" and torch.cuda.is_available())
    with FakeTensorMode() if device != "meta" else nullcontext():
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).requires_grad_(train and _float(t))
            for t in args
        ]
        y = fn(*inputs)
        if train:
            y.sum().backward()
    assert (y.shape, y.stride(), y.dtype, y.device.type) == (expected.shape, expected.stride(), expected.dtype, device)
    for t in inputs:
        if t.requires_grad:
            assert t.grad is not None and t.grad.shape == t.shape and t.grad.device.type == device


if __name__ == "__main__":
    _elsewhere()
