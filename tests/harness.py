"""Models and verbs that test files share: MLPs, a step of training and what it saves, compilation by a policy."""

import functools
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fused_ops import FusionPolicy, activations

BUILTIN = [name for name in activations.names() if activations.get(name).builtin]
WITHOUT_BIAS = functools.partial(nn.Linear, bias=False)
GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """As CLIP has it."""
    return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    """down(activation(up(x))); an activation of ``halves`` = 2 halves the features."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        *,
        halves: int = 1,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = linear(width, hidden), linear(hidden // halves, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Llama's: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int, linear: Callable[[int, int], nn.Module] = WITHOUT_BIAS) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def named(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A function with some of its arguments, which ids of tests call so."""
    made = functools.partial(fn, *args, **kwargs)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


GeluMLP = named("GeluMLP", MLP, activation=GELU_TANH)


def of_halves(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The activation of the first half of the features times the second half."""

    def glu(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return activation(gate) * up

    return glu


class Net(nn.Module):
    """body(self, x, ...), with members for it to use: modules, parameters, buffers."""

    def __init__(self, body: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.body = body
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.body(self, x, *rest)


class Stack(nn.Module):
    """Layers one after the other, each added to its input if ``residual``; what is made of the last one's result."""

    def __init__(
        self, layers: Iterable[nn.Module], residual: bool = False, end: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.layers, self.residual, self.end = nn.ModuleList(layers), residual, end

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x if self.end is None else self.end(x)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    """A tensor of no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=requires_grad)


class Calls(TorchDispatchMode):
    """The calls of operators: (operator, arguments, keyword arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, result))
        return result

    def of(self, operator: Any) -> list[tuple[Any, ...]]:
        """The arguments of each call of an operator."""
        return [args for func, args, *_ in self.made if func is operator]


class Ran(TorchDispatchMode):
    """How often operators ran, the sizes of matrix products, and what is still there of all that was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[Any] = Counter()
        self.gemms: list[tuple[int, int, int]] = []
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.overloadpacket] += 1
        if func.overloadpacket is torch.ops.aten.mm:
            self.gemms.append((*args[0].shape, args[1].shape[1]))
        given = {t.untyped_storage()._cdata for t in args if type(t) in (Tensor, nn.Parameter)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if type(t) is Tensor and (storage := t.untyped_storage())._cdata not in given:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self, *but: Tensor) -> int:
        """The bytes of what was made and is still there, but for these tensors'."""
        others = {t.untyped_storage()._cdata for t in but}
        return sum(n for at, (ref, n) in self.made.items() if at not in others and not ref.expired())


def kernel_of(operator: str) -> Callable[..., Any]:
    """What an operator, or a backward one, calls on a GPU."""
    families = {"dropout_add": "families.dropout.kernels", "scaled_masked_softmax": "families.softmax.kernels"}
    family = families.get(operator.removesuffix("_backward"))
    module = importlib.import_module(f"torch_fused_ops.{family or 'kernels.activation'}")
    return getattr(module, operator) if family else module.launch_of(operator)  # type: ignore[no-any-return]


def interpreting() -> Any:
    """While it is open, Triton's interpreter runs what would be launched on a GPU."""
    from torch_fused_ops import virtual_gpu
    from torch_fused_ops.kernels import launching

    def launch(kernel: Any, grid: Any, device: torch.device, tensors: Any, integers: Any, constants: Any) -> None:
        virtual_gpu.interpret(kernel, *tensors, *integers, grid=grid, **constants)

    return mock.patch.object(launching, "launch", launch)


def without_code(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """A backend: Inductor's passes, AOTAutograd and its partitioner; the graphs then run as they are."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, inner_compile=lambda gm, *args, **rest: make_boxed_func(gm.forward))


def python(*arguments: object, cwd: Path | None = None, quiet: bool = False, **environment: str) -> str:
    """What a new Python process prints, which ends well; if ``quiet``, with nothing on stderr but torch's own log."""
    command, env = [sys.executable, "-W", "ignore", *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    said = [line for line in done.stderr.splitlines() if quiet and not re.match(r"[IW]\d{4} ", line)]
    assert done.returncode == 0 and not said, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def saving(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """A call's result, and the bytes that autograd saves of it: each memory once, and none of these tensors'."""
    excluded = {t.untyped_storage()._cdata for t in besides}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return result, sum(storage.nbytes() for key, storage in storages.items() if key not in excluded)


def saving_step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *rest: Tensor) -> tuple[list[Tensor], int]:
    """A step's result and gradients, and the bytes that it saves besides the module's tensors.

    Args:
        fn: the module, or what computes the same with its parameters.
        module: its parameters that require gradients have theirs, behind the input's.
        x: the input.
        rest: further arguments.
    """
    x = x.detach().clone().requires_grad_()
    y, saved = saving(lambda: fn(x, *rest), module.state_dict().values())
    tangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    trained = [p for p in module.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], tangent)], saved


def step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *rest: Tensor) -> list[Tensor]:
    """A step's result and gradients."""
    return saving_step(fn, module, x, *rest)[0]


def output(mlp: Callable[..., Any], *args: Any) -> Tensor:
    """The result of a call of Megatron's MLP, whose bias comes beside it."""
    y, bias = mlp(*args)
    return y if bias is None else y + bias  # type: ignore[no-any-return]


def compiled(module: Callable[..., Any], policy: FusionPolicy, **settings: Any) -> Any:
    """A module compiled with a policy, anew; settings are torch.compile's."""
    torch._dynamo.reset()
    return torch.compile(module, backend="fused", options={"policy": policy}, **settings)


def captured(
    fn: Callable[..., Any], *args: Any, each: Callable[[torch.fx.GraphModule], Any] = lambda gm: gm, **settings: Any
) -> tuple[Any, list[Any]]:
    """(the result of a call, what ``each`` makes of its graphs by Dynamo), which run as ``each`` leaves them."""
    found = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(each(gm))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, **settings)(*args), found


def raises(
    error: type[Exception] | tuple[type[Exception], ...],
    words: str,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The error that a call raises; its message matches the words, a regular expression."""
    with pytest.raises(error, match=words) as caught:
        call(*args, **kwargs)
    return caught.value
