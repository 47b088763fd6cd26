"""Models and functions that test files share: MLPs, training steps, saved tensors, compilation with a policy."""

import copy
import functools
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_fused_ops import FusionPolicy, activations
from torch_fused_ops.declaration import Signature
from torch_fused_ops.kernels import compiled as eager_kernels
from torch_fused_ops.operators.autograd import REGISTERED

BUILTIN = [name for name in activations.names() if activations.get(name).builtin]
GEMMS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
# Use Inductor's first Triton template for each GEMM. Deterministic mode skips measurements, which need a device.
GEMM_TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "deterministic": True}
WITHOUT_BIAS = functools.partial(nn.Linear, bias=False)
GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute CLIP's activation."""
    return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    """down(activation(up(x))). With ``halves`` = 2 the activation halves the number of features."""

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
    """Llama's MLP: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int, linear: Callable[[int, int], nn.Module] = WITHOUT_BIAS) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def named(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Bind some arguments of a function. The name appears in test ids."""
    bound = functools.partial(fn, *args, **kwargs)
    bound.__name__ = name  # type: ignore[attr-defined]
    return bound


GeluMLP = named("GeluMLP", MLP, activation=GELU_TANH)


def of_halves(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a GLU: it activates the first half of the features and multiplies by the second half."""

    def glu(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return activation(gate) * up

    return glu


class Net(nn.Module):
    """Calls body(self, x, ...). Its members are modules, parameters and buffers."""

    def __init__(self, body: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.body = body
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.body(self, x, *args)


def conv1d(width: int, hidden: int) -> nn.Module:
    """Return transformers' MLP of GPT-2: addmm with weights of shape (in, out), and a residual add at the end."""

    def body(s: Any, x: Tensor) -> Tensor:
        h = torch.addmm(s.b, x.view(-1, x.size(-1)), s.w).view(*x.shape[:-1], hidden)
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + torch.addmm(s.c, h.view(-1, h.size(-1)), s.v).view(x.shape)

    shapes = {"w": (width, hidden), "b": (hidden,), "v": (hidden, width), "c": (width,)}
    return Net(body, **{name: nn.Parameter(torch.randn(shape) / width**0.5) for name, shape in shapes.items()})


class Stack(nn.Module):
    """Layers in sequence, each added to its input if ``residual``. ``end`` is applied to the last layer's result."""

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
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def on_meta(make: Callable[..., nn.Module], *args: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a module without memory."""
    with torch.device("meta"):
        return make(*args).to(dtype)


def selective(*saved: Any) -> Callable[[], Any]:
    """Return a ``context_fn`` of checkpoints that save these operators' results."""

    def decide(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


class Calls(TorchDispatchMode):
    """Records calls of operators: (operator, arguments, keyword arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, result))
        return result

    def arguments_of(self, operator: Any) -> list[tuple[Any, ...]]:
        """Return the arguments of an operator's calls."""
        return [args for func, args, *_ in self.made if func is operator]


class Ran(TorchDispatchMode):
    """Counts calls of operators, and records the sizes of GEMMs and the storages of results."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[Any] = Counter()
        self.gemms: list[tuple[int, int, int]] = []
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.overloadpacket] += 1
        if func.overloadpacket is torch.ops.aten.mm:
            self.gemms.append((*args[0].shape, args[1].shape[1]))
        of_arguments = {t.untyped_storage()._cdata for t in args if type(t) in (Tensor, nn.Parameter)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if type(t) is Tensor and (storage := t.untyped_storage())._cdata not in of_arguments:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self, *except_for: Tensor) -> int:
        """Return the bytes of results that are still in memory, except these tensors."""
        excluded = {t.untyped_storage()._cdata for t in except_for}
        return sum(n for key, (ref, n) in self.made.items() if key not in excluded and not ref.expired())


@functools.lru_cache(maxsize=256)
def _on_paper(signature: Signature, key: tuple[Any, ...]) -> Any:
    from torch_fused_ops.virtual_gpu import H200
    from torch_fused_ops.virtual_gpu.compile import operator_on_paper

    return operator_on_paper(signature, key, H200)


def on_gpu(operator: str) -> Callable[..., Any]:
    """Return a function that runs an operator's eager GPU kernels on CPU tensors, in Triton's interpreter."""
    from torch_fused_ops.virtual_gpu import interpreter

    signature = REGISTERED[operator].signature
    identify = eager_kernels.identification(signature, on_gpu=True)

    def run(*args: Any) -> Any:
        if not args[0].numel():
            return REGISTERED[operator].plain(*args)
        key, tensors = identify(args)
        graph, paper = _on_paper(signature, eager_kernels.with_defaults(signature, key, len(args)))
        outputs = interpreter._run(paper.inference, [*(symbol(tensors[0]) for symbol in graph.symbols), *tensors])
        return tuple(outputs) if signature.is_backward else outputs[0]

    return run


def without_code(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Compile with Inductor's passes, AOTAutograd and its partitioner, but run the graphs without generated code."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, inner_compile=lambda gm, *args, **kwargs: make_boxed_func(gm.forward))


def after_passes(gm: torch.fx.GraphModule, inputs: Sequence[Any], is_inference: bool, lower: bool = True) -> Any:
    """Return the graph after Inductor's passes, to be run call by call. If ``lower``, also run the lowerings."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    view_to_reshape(gm)
    mode = detect_fake_mode(inputs)
    with _disable_current_modes(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(gm, inputs)
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        runs = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))  # a lowered graph cannot be run
        if lower:
            lowering = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env, is_inference=is_inference)
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
                lowering.run(*inputs)
    return runs


def python(*arguments: object, cwd: Path | None = None, quiet: bool = False, **environment: str) -> str:
    """Return a new Python process's output. It must succeed. If ``quiet``, stderr may contain only torch's log."""
    command, env = [sys.executable, "-W", "ignore", *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    errors = [line for line in done.stderr.splitlines() if quiet and not re.match(r"[IW]\d{4} ", line)]
    assert done.returncode == 0 and not errors, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def saved_by(call: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """Return a call's result, and the tensors that autograd saves."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return call(), saved


def nbytes(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once. Storages of ``besides`` do not count."""
    excluded = {t.untyped_storage()._cdata for t in besides}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(n for key, n in storages.items() if key not in excluded)


def saving(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """Return a call's result, and the bytes that autograd saves, as ``nbytes`` counts them."""
    result, saved = saved_by(call)
    return result, nbytes(saved, besides)


def step_of(fn: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return (a function's result and its inputs' gradients, the tensors that autograd saves)."""
    out, saved = saved_by(lambda: fn(*inputs))
    tangent = normal(*out.shape, dtype=out.dtype, seed=1).detach()
    leaves = [t for t in inputs if t.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, leaves, tangent) if leaves else ())], saved


def cases(*values: Iterable[Any], default: Callable[..., bool]) -> list[Any]:
    """Return all combinations of parameters' values. Those for which ``default(*values)`` is false are slow."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*case, marks=marks[default(*case)]) for case in itertools.product(*values)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a random leaf whose rows have norm one on average. A shape and a seed always give the same numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    return x.to(dtype).requires_grad_()


def distances(got: Iterable[Tensor], expected: Iterable[Tensor]) -> list[float]:
    """Return the tensors' relative errors in the 2-norm."""
    pairs = zip(got, expected, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


def saving_step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *args: Tensor) -> tuple[list[Tensor], int]:
    """Return a step's result and gradients, and the bytes that it saves, except the module's tensors.

    Args:
        fn: the module, or a function that uses its parameters.
        module: owner of the parameters, whose gradients follow the input's gradient.
        x: the input.
        args: further arguments.
    """
    x = x.detach().clone().requires_grad_()
    y, saved = saving(lambda: fn(x, *args), module.state_dict().values())
    tangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    trained = [p for p in module.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], tangent)], saved


def step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *args: Tensor) -> list[Tensor]:
    """Return a step's result and gradients."""
    return saving_step(fn, module, x, *args)[0]


def output(mlp: Callable[..., Any], *args: Any) -> Tensor:
    """Call Megatron's MLP, which returns (result, bias), and return their sum."""
    y, bias = mlp(*args)
    return y if bias is None else y + bias  # type: ignore[no-any-return]


def compiled(module: Callable[..., Any], policy: FusionPolicy, **settings: Any) -> Any:
    """Reset Dynamo and compile a module with a policy. ``settings`` are passed to torch.compile."""
    torch._dynamo.reset()
    return torch.compile(module, backend="fused", options={"policy": policy}, **settings)


def captured(
    fn: Callable[..., Any], *args: Any, edit: Callable[[torch.fx.GraphModule], Any] = lambda gm: gm, **settings: Any
) -> tuple[Any, list[Any]]:
    """Return a call's result, and ``edit(graph)`` of every Dynamo graph. ``edit`` may modify graphs before they run."""
    results = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        results.append(edit(gm))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, **settings)(*args), results


def raises(
    error: type[Exception] | tuple[type[Exception], ...],
    words: str,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the error that a call raises. Its message must match ``words``, a regular expression."""
    with pytest.raises(error, match=words) as caught:
        call(*args, **kwargs)
    return caught.value
