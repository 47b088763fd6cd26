"""Time single operators: ``bench pointwise``.

Variants are eager PyTorch and torch.compile of the same formula; *operators*, ours in eager mode; *fused*, ours under
torch.compile; *liger*, Liger-Kernel's function if it is installed; *copy*, a copy that reads and writes as many bytes.

A GPU times forward and backward alone. A CPU also times both together, which is the only case with compiled variants,
and calls on tiny tensors, whose time is overhead. These calls come last, because larger tensors' calls have compiled
their kernels by then.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def"

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops import functional as FF
from torch_fused_ops.benchmarks.variants import AUTOTUNE

from .harness import DTYPES, Case, Device, Plan, Trial, Unavailable, sets_of
from .ways import fresh

SHAPE = "TOKENSxWIDTH, the last operand's width, e.g. 8192x8192"
QUICK = [(16, 32)]
CPU_SIZES = [(512, 512), (1024, 1024), (4096, 1024), (128, 4096)]
CUDA_SIZES = [(8192, 8192)]  # 64 Mi elements
SMALL_CUDA_SIZES = [(256, 512), (1024, 4096), (65536, 4096)]  # sizes for MOST_USED
CALLS = 200  # calls per run when a call's overhead is measured
OURS = ("operators", "fused", "fused-autotune")
FP8_GRADIENTS = dict.fromkeys(OURS, 0.15)


@dataclass(frozen=True)
class Operator:
    """An operator with its arguments.

    Attributes:
        op: name after ``fused::``.
        activation: name in the activation table.
        bias, scale: True if the operator is called with a bias, with a scale.
        layout: the layout of bias_glu's packed input.
        memory: "fp8" saves the data in 8 bits.
    """

    op: str
    activation: str
    bias: bool = False
    scale: bool = False
    layout: str = ""
    memory: str = "free"
    unchecked: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        fp8 = self.memory if self.memory != "free" else ""
        extras = (self.activation, self.layout, "bias" * self.bias, "scale" * self.scale, fp8)
        return f"{self.op} {' '.join(filter(None, extras))}"

    def shapes(self, tokens: int, width: int) -> list[tuple[int, ...] | None]:
        """Return shapes of data, bias and scale, or None for a missing argument. Outputs have (tokens, width)."""
        packed = 2 * width if self.op == "bias_glu" else width
        data: list[tuple[int, ...] | None] = [(tokens, packed)] * (2 if self.op == "glu" else 1)
        bias = [] if self.op == "glu" else [(packed,) if self.bias else None]
        return [*data, *bias, (tokens,) if self.scale else None]

    def fused(self, *tensors: Tensor) -> Tensor:
        """Call torch.ops.fused.<op> with the tensors, and None for missing arguments."""
        present = iter(tensors)
        args = [None if shape is None else next(present) for shape in self.shapes(1, 1)]
        layout = (self.layout,) if self.layout else ()
        if self.memory != "free":
            layout_argument = {"layout": self.layout} if self.layout else {}
            return getattr(FF, self.op)(*args, activation=self.activation, memory=self.memory, **layout_argument)
        return getattr(torch.ops.fused, self.op)(*args, self.activation, *layout)

    def plain(self, *tensors: Tensor) -> Tensor:
        """Compute the operator's result with PyTorch's functions, as models do."""
        inputs = list(tensors)
        scale = inputs.pop() if self.scale else None
        x = inputs[0]
        if self.bias:
            x = x + inputs[1]
        act = activations.get(self.activation).definition
        if self.op == "bias_act":
            y = act(x)
        elif self.op == "glu":
            y = act(inputs[0]) * inputs[1]
        else:
            gate, up = (x[..., 0::2], x[..., 1::2]) if self.layout == "interleaved" else x.chunk(2, -1)
            y = act(gate) * up
        return y if scale is None else y * scale.unsqueeze(-1)

    exact = plain

    def nbytes(self, backward: bool, tokens: int, width: int, itemsize: int) -> int:
        """Return the least bytes moved. Forward reads data and writes the output. Backward reads data and the output's
        gradient, and writes the data's gradient."""
        data = sum(t * n for t, n in (s for s in self.shapes(tokens, width) if s is not None and len(s) == 2))
        saved_size = 1 if self.memory == "fp8" else itemsize
        if not backward:
            return data * (itemsize + (saved_size if self.memory == "fp8" else 0)) + tokens * width * itemsize
        return data * (saved_size + itemsize) + tokens * width * itemsize


@dataclass(frozen=True)
class Softmax:
    """Attention's softmax. ``masked``: the last input is a mask of booleans."""

    masked: bool = False
    unchecked: ClassVar[tuple[str, ...]] = ()
    op: ClassVar[str] = "scaled_masked_softmax"
    scale: ClassVar[float] = 0.125

    def __str__(self) -> str:
        return self.op + " mask" * self.masked

    def shapes(self, tokens: int, width: int) -> list[tuple[int, ...] | None]:
        return [(tokens, width)]

    def fused(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return FF.scaled_masked_softmax(x, mask, scale=self.scale)

    def plain(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scaled = self.scale * x
        return torch.softmax(scaled if mask is None else scaled.masked_fill(mask, -math.inf), -1)

    exact = plain

    def nbytes(self, backward: bool, tokens: int, width: int, itemsize: int) -> int:
        """Return the least bytes moved. Backward reads the gradient and the output."""
        return tokens * width * itemsize * (3 if backward else 2)


@dataclass(frozen=True)
class Dropout:
    """Bias, dropout and residual. PyTorch drops other elements, so its result is not compared."""

    unchecked: ClassVar[tuple[str, ...]] = ("eager", "compile")
    op: ClassVar[str] = "dropout_add"
    p: ClassVar[float] = 0.1
    seed: ClassVar[int] = 7

    def __str__(self) -> str:
        return f"{self.op} bias residual"

    def shapes(self, tokens: int, width: int) -> list[tuple[int, ...] | None]:
        return [(tokens, width), (width,), (tokens, width)]

    def fused(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        seed = torch.full((1,), self.seed, dtype=torch.int64, device=x.device)
        return FF.dropout_add(x, bias, residual, seed=seed, p=self.p)

    def plain(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + F.dropout(x + bias, self.p, training=True)

    exact = fused

    def nbytes(self, backward: bool, tokens: int, width: int, itemsize: int) -> int:
        """Return the least bytes. Backward reads one gradient and writes one: the residual's is the output's."""
        return tokens * width * itemsize * (2 if backward else 3)


AnyOperator = Operator | Softmax | Dropout
BUILTIN = [name for name in activations.names() if activations.get(name).builtin]
OPERATORS = [
    *(Operator("bias_act", act) for act in BUILTIN),
    *(Operator("bias_act", act, bias=True) for act in BUILTIN),
    Operator("bias_act", "gelu_tanh", bias=True, scale=True),
    *(Operator("glu", act) for act in ("silu", "gelu_tanh", "gelu")),
    Operator("glu", "silu", scale=True),
    *(
        Operator("bias_glu", "silu", bias, scale, layout)
        for layout, (bias, scale) in itertools.product(
            ("halves", "interleaved"), ((False, False), (True, False), (True, True))
        )
    ),
]
OTHERS: list[AnyOperator] = [
    Softmax(),
    Dropout(),
    Operator("bias_act", "gelu_tanh", memory="fp8"),
    Operator("glu", "silu", memory="fp8"),
]
MOST_USED = [Operator("bias_act", "gelu_tanh"), Operator("glu", "silu")]
ON_CPU: list[AnyOperator] = [
    Operator("glu", "silu"),
    Operator("bias_act", "gelu", bias=True),
    Dropout(),
    Softmax(masked=True),
    *(Operator("bias_act", act) for act in ("gelu", "sigmoid", "tanh")),
    *(Operator("bias_act", act, bias=True) for act in ("gelu_tanh", "silu", "relu2")),
    Operator("glu", "gelu_tanh"),
    Operator("bias_glu", "silu", bias=True, layout="halves"),
]


def liger(operator: Operator) -> Callable[..., Tensor]:
    """Return Liger-Kernel's SwiGLU or GEGLU."""
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as e:
        raise Unavailable(f"Liger-Kernel cannot be imported: {e}") from None
    return {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}[operator.activation].apply


def compiled(fn: Callable[..., Tensor], **settings: Any) -> Callable[..., Tensor]:
    return torch.compile(fresh(fn), fullgraph=True, dynamic=False, **settings)


def callables(operator: AnyOperator, gpu: bool) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return the variants: first eager PyTorch, whose error sets the tolerance, then the most important."""
    variants: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "eager": lambda: operator.plain,
        "operators": lambda: operator.fused,
        "compile": lambda: compiled(lambda *tensors: operator.plain(*tensors)),
        "fused": lambda: compiled(lambda *tensors: operator.fused(*tensors)),
    }
    if operator in MOST_USED and gpu:
        variants["autotune"] = lambda: compiled(lambda *tensors: operator.plain(*tensors), mode=AUTOTUNE)
        variants["fused-autotune"] = lambda: compiled(lambda *tensors: operator.fused(*tensors), mode=AUTOTUNE)
    if isinstance(operator, Operator) and operator in (Operator("glu", "silu"), Operator("glu", "gelu_tanh")) and gpu:
        variants["liger"] = lambda: liger(operator)
    return variants


# ---- cases -----------------------------------------------------------------------------------------------------------

# The kind (forward, backward, both, call, or call with gradients), operator, size and dtype.
Combination = tuple[str, AnyOperator, int, int, torch.dtype]


def grid(device: Device, quick: bool, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[Combination]:
    """Return the cases, the most important first: MOST_USED at the default size, other operators, other sizes."""
    gpu = device.type == "cuda"
    kinds = [DTYPES[d] for d in dtypes] or ([torch.bfloat16] if gpu else [torch.float32, torch.bfloat16])
    main = [(s[0], s[1]) for s in sizes] or (QUICK if quick else CUDA_SIZES if gpu else CPU_SIZES)
    operators: list[AnyOperator] = [*MOST_USED] if gpu or quick else ON_CPU
    if gpu and not quick:
        operators += [*OTHERS, *(o for o in OPERATORS if o not in MOST_USED)]
    sides = ("forward", "backward") if gpu else ("both", "forward", "backward")
    combinations: list[Combination] = [
        (side, o, *size, dtype) for o in operators for size in main for dtype in kinds for side in sides
    ]
    if gpu and not quick and not sizes:
        combinations += [(side, o, *size, kinds[0]) for size in SMALL_CUDA_SIZES for o in MOST_USED for side in sides]
        if not dtypes:
            more_dtypes = (torch.float16, torch.float32)
            combinations += [(side, o, *main[0], dtype) for dtype in more_dtypes for o in MOST_USED for side in sides]
    if not gpu:
        calls = [(o, 8, 64, dtype) for o in operators for dtype in kinds]
        combinations += [(kind, *call) for kind in ("call", "call with gradients") for call in calls]
    return combinations


def name_of(kind: str, operator: AnyOperator, tokens: int, width: int, dtype: torch.dtype) -> str:
    return f"{operator} {kind} {tokens}×{width} {str(dtype).removeprefix('torch.')}"


def case(
    kind: str, operator: AnyOperator, tokens: int, width: int, dtype: torch.dtype, device: Device, plan: Plan
) -> Case:
    """Return the case of an operator, a size and a kind."""
    shapes = [s for s in operator.shapes(tokens, width) if s is not None]
    output = tokens * width
    nbytes = operator.nbytes(kind != "forward", tokens, width, dtype.itemsize)
    sets = sets_of(device, nbytes)
    generator = torch.Generator(device=device.where).manual_seed(plan.seed)
    grad = kind not in ("forward", "call")

    def normal(*shape: int) -> Tensor:
        return (2 * torch.randn(shape, generator=generator, device=device.where)).to(dtype)

    inputs = [[normal(*s).requires_grad_(grad) for s in shapes] for _ in range(sets)]
    if isinstance(operator, Softmax) and operator.masked:
        mask = normal(tokens, width) > 2.0
        mask[:, 0] = False  # PyTorch's result of a row without elements is NaN
        inputs = [[*tensors, mask] for tensors in inputs]
    tangents = [normal(tokens, width) for _ in range(sets if grad else 0)]
    makers = {"forward": _forward, "backward": _backward, "both": _both}
    make, small, gpu = makers.get(kind, _calls), kind.startswith("call"), device.type == "cuda"
    trials: dict[str, Callable[[], Trial]] = {
        name: (lambda fn=fn: make(fn(), inputs, tangents))  # type: ignore[misc]
        for name, fn in callables(operator, gpu).items()
        if gpu or kind == "both" or name in ("operators", "eager")
    }
    if gpu:
        trials["copy"] = lambda: _copy(nbytes, sets, device)

    def truth() -> list[Tensor]:
        wide = [t.detach().double() if t.is_floating_point() else t for t in inputs[0]]
        doubles = [w.requires_grad_(t.requires_grad) for w, t in zip(wide, inputs[0], strict=True)]
        out = operator.exact(*doubles)
        derived = torch.autograd.grad(out, _differentiable(doubles), tangents[0].double()) if grad else ()
        return [*derived] if kind == "backward" else [out.detach(), *derived]

    return Case(
        name_of(kind, operator, tokens, width, dtype),
        {"kind": kind, "operator": str(operator), "tokens": tokens, "width": width, "elements": output},
        trials,
        truth,
        sets,
        dtype,
        ours=OURS,
        unchecked=("copy", *operator.unchecked),
        loose=FP8_GRADIENTS if isinstance(operator, Operator) and operator.memory == "fp8" else {},
        calls=CALLS if small else 1,
    )


def _differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.requires_grad]


def _forward(fn: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor]) -> Trial:
    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [fn(*tensors)]

    return Trial(run, lambda i: inputs[i])


def _backward(fn: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor]) -> Trial:
    """Time only backward: an untimed forward runs before each one."""

    def prepare(i: int) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        # Liger writes gradients into the inputs, so each forward gets new leaves.
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[i]]
        return fn(*leaves), _differentiable(leaves), tangents[i]

    def run(state: tuple[Tensor, Sequence[Tensor], Tensor]) -> list[Tensor]:
        out, leaves, tangent = state
        return list(torch.autograd.grad(out, leaves, tangent))

    return Trial(run, prepare)


def _both(fn: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor]) -> Trial:
    """Time forward and backward together."""

    def run(i: int) -> list[Tensor]:
        out = fn(*inputs[i])
        return [out.detach(), *torch.autograd.grad(out, _differentiable(inputs[i]), tangents[i])]

    return Trial(run, lambda i: i)


def _calls(fn: Callable[..., Tensor], inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor]) -> Trial:
    """Time many calls per run. With gradients, a call is forward and backward."""
    tensors, tangent = inputs[0], tangents[0] if tangents else None
    leaves = _differentiable(tensors)

    def run(_: Any) -> list[Tensor]:
        derived: Sequence[Tensor] = ()
        with torch.set_grad_enabled(tangent is not None):
            for _ in range(CALLS):
                out = fn(*tensors)
                if tangent is not None:
                    derived = torch.autograd.grad(out, leaves, tangent)
        return [out.detach(), *derived]

    return Trial(run, lambda i: i)


def _copy(nbytes: int, sets: int, device: Device) -> Trial:
    """Copy half of ``nbytes``, so that reads and writes add up to ``nbytes``."""
    half = max(1, nbytes // 2)
    buffers = [[torch.ones(half, dtype=torch.uint8, device=device.where) for _ in range(2)] for _ in range(sets)]

    def run(i: int) -> list[Tensor]:
        source, target = buffers[i]
        target.copy_(source)
        return []

    return Trial(run, lambda i: i)
