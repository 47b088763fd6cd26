"""Choice of GEMM in the post-grad pass: a linear layer and its activation as one call of the vendor's library.

Inductor has two implementations of a GEMM and the activation behind it: the library's GEMM and then a pointwise kernel,
or one of its own Triton templates with the activation as its epilogue. CUDA has a third, which Inductor never takes:
cuBLASLt's own epilogue, ``aten._addmm_activation``, for relu and tanh's GELU. Here it is one more choice at inference,
where the earlier passes leave ``addmm → fused.bias_act``:

``"measured"``  under max-autotune it is timed against Inductor's variants and taken only where it is the fastest.
                Otherwise nothing is measured, and nothing changes.
``"library"``   it is taken wherever ``find`` finds it possible.

The pass replaces the two nodes by one, as Inductor's own pattern matcher does: a function that lowers itself. At
lowering it is known whether the graph is one of inference, and how fast Inductor's variants are.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.lowerings.partition import VIEWS
from torch_fused_ops.policy import FusionPolicy, enclosing_modules

log = logging.getLogger("torch_fused_ops")

aten, fused = torch.ops.aten, torch.ops.fused

Box = Any  # ir.TensorBox
Guard: TypeAlias = Callable[[Callable[[], Any]], Any]  # calls a function; None where it fails

# The library's epilogues by activation: its ``use_gelu``, and the dtypes in which it may replace ours. Its GELU is as
# inexact as PyTorch's, which loses the negative tail: in float32, all digits of it. relu is exact.
HALF = (torch.bfloat16, torch.float16)
ACTIVATIONS: dict[str, tuple[bool, tuple[torch.dtype, ...]]] = {
    "relu": (False, (*HALF, torch.float32)),
    "gelu_tanh": (True, HALF),
}


@dataclass(frozen=True)
class Work:
    """A GEMM and the activation behind it.

    Attributes:
        gemm: ``aten.addmm``, or ``aten.mm`` where the activation adds the bias.
        activation: its name in the table.
        likes: fake tensors like the bias (n,), the input (m, k) and the weight (k, n).
    """

    gemm: Any
    activation: str
    likes: tuple[Tensor, Tensor, Tensor]

    @property
    def late_bias(self) -> bool:
        """True where the activation adds the bias."""
        return bool(self.gemm is aten.mm.default)


class Pair(NamedTuple):
    """The nodes of a ``Work`` in a graph: the activation alone reads the GEMM, maybe through views (last first)."""

    work: Work
    operands: tuple[Node, Node, Node]
    gemm: Node
    views: list[Node]
    activation: Node


# ---- finding --------------------------------------------------------------------------------------------------------


def wanted(policy: FusionPolicy) -> bool:
    """Tell whether the policy and Inductor's settings leave a choice."""
    if policy.epilogues != "measured":
        return policy.epilogues == "library"
    # A choice by time differs from run to run. A user who leaves ATen out of the backends wants no library GEMM.
    deterministic = inductor_config.deterministic or torch.are_deterministic_algorithms_enabled()
    return autotuned("ATEN") and not deterministic


def autotuned(backend: str) -> bool:
    """Tell whether this backend competes for GEMMs."""
    backends = inductor_config.max_autotune_gemm_backends.upper().replace(" ", "").split(",")
    return backend in backends and bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def find(graph: Graph, policy: FusionPolicy) -> Iterator[Pair]:
    """Find the pairs of a post-grad graph that the library can compute in one call and the policy does not exclude."""
    for node in graph.find_nodes(op="call_function", target=fused.bias_act.default):
        pair = _pair(node)
        excluded = policy.excluding(enclosing_modules(module_stack(node))) is not None
        if pair is not None and not excluded and library_computes(pair.work, node.meta["val"]):
            yield pair


def _pair(node: Node) -> Pair | None:
    names = [argument.name for argument in fused.bias_act.default._schema.arguments]
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    gemm, bias, views = arguments["input"], arguments["bias"], []
    while gemm.target in VIEWS and len(gemm.users) == 1:
        views.append(gemm)
        gemm = gemm.args[0]
    # Not with a scale, an alpha or a beta, nor where others read the GEMM's result (training saves it).
    if arguments["token_scale"] is not None or len(gemm.users) != 1 or any(v != 1 for v in gemm.kwargs.values()):
        return None
    operands = gemm.args if bias is None else (bias, *gemm.args)
    if gemm.target is not (aten.addmm.default if bias is None else aten.mm.default):
        return None
    work = Work(gemm.target, arguments["activation"], tuple(operand.meta["val"] for operand in operands))
    return Pair(work, operands, gemm, views, node)


def library_computes(work: Work, out: Tensor) -> bool:
    """Tell whether ATen computes this by one call of cuBLASLt: ``isInputCompliesAddmmCudaLt`` in its Blas.cpp.

    Elsewhere ``_addmm_activation`` is a GEMM and a pointwise kernel; it copies an operand without a stride of 1.
    https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/Blas.cpp

    Args:
        work: the GEMM and the activation.
        out: like the activation's result.
    """
    bias, x, w = work.likes
    (m, k), n = x.shape, w.shape[1]
    known = statically_known_true
    return (
        work.activation in ACTIVATIONS
        and has_library(x.device)
        and x.dtype in ACTIVATIONS[work.activation][1]
        and bias.dtype == w.dtype == out.dtype == x.dtype
        and bias.dim() == 1
        and all(known(condition) for condition in (m > 1, k > 1, n > 1, bias.shape[0] == n, out.shape[-1] == n))
        and all(any(known(stride == 1) for stride in t.stride()) for t in work.likes)
    )


def has_library(device: torch.device) -> bool:
    """Tell whether a device's library is cuBLASLt. (On CPUs oneDNN and Inductor's C++ templates have epilogues.)"""
    return device.type == "cuda" and not torch.version.hip


# ---- rewriting ------------------------------------------------------------------------------------------------------


def rewrite(graph: Graph, policy: FusionPolicy, guard: Guard) -> int:
    """Replace each pair that ``find`` finds by one node, once all are found; return the number of pairs.

    Args:
        graph: a graph after the post-grad passes.
        policy: its ``epilogues`` and ``exclude`` decide.
        guard: calls a function that may fail at lowering, and returns None where it does.
    """
    pairs = list(find(graph, policy)) if wanted(policy) else []
    for pair in pairs:
        with graph.inserting_before(pair.activation):
            new = graph.call_function(Lowering(pair.work, policy.epilogues, guard), pair.operands)
            new.meta = {**pair.activation.meta, "val": pair.gemm.meta["val"]}
            if pair.views:  # the last view has the result's shape
                new = graph.create_node("call_function", pair.views[0].target, (new, *pair.views[0].args[1:]))
                new.meta = dict(pair.activation.meta)
        pair.activation.replace_all_uses_with(new)
        for old in (pair.activation, *pair.views, pair.gemm):
            graph.erase_node(old)
    return len(pairs)


# ---- choosing -------------------------------------------------------------------------------------------------------

Call: TypeAlias = Callable[[Any], Callable[..., Any]]  # an operator to its implementation: itself, or its lowering


def _by_library(work: Work, call: Call, bias: Any, x: Any, w: Any) -> Any:
    return call(aten._addmm_activation.default)(bias, x, w, use_gelu=ACTIVATIONS[work.activation][0])


def _gemm(work: Work, call: Call, bias: Any, x: Any, w: Any) -> Any:
    return call(work.gemm)(*((x, w) if work.late_bias else (bias, x, w)))


def _activation(work: Work, call: Call, product: Any, bias: Any) -> Any:
    return call(fused.bias_act.default)(product, bias if work.late_bias else None, None, work.activation)


class Lowering:
    """The target of a pair's node: the library's call, or Inductor's GEMM and our activation, to be fused as usual.

    Args:
        work: the GEMM and the activation.
        how: the policy's ``epilogues``.
        guard: calls a function that may fail.
    """

    _inductor_lowering_function = True
    __name__ = "addmm_activation"

    def __init__(self, work: Work, how: str, guard: Guard) -> None:
        self.work, self.how, self.guard = work, how, guard

    def __repr__(self) -> str:  # stands in generated code
        return f"{self.work.activation}({self.work.gemm.overloadpacket.__name__})"

    def _inductor_lowering_output_metadata_fn(self, *operands: Tensor) -> Tensor:
        """The result's fake tensor, which torch ≥ 2.15 renews where the node's inputs have changed."""
        return _by_library(self.work, _as_operator, *operands)  # type: ignore[no-any-return]

    def __call__(self, *operands: Box) -> Box:
        from torch._inductor.lowering import lowerings
        from torch._inductor.virtualized import V

        work, call = self.work, lowerings.__getitem__
        if V.graph.is_inference and self.how == "library":
            return _by_library(work, call, *operands)
        product = _gemm(work, call, *operands)
        if V.graph.is_inference and self.guard(lambda: _is_fastest(work, product)):
            return _by_library(work, call, *operands)  # the product has no reader then, and Inductor drops it
        return _activation(work, call, product, operands[0])


def _is_fastest(work: Work, product: Box) -> bool:
    """Tell whether the library's call takes less time than its GEMM with our kernel behind it, and than any template.

    Templates are timed without an epilogue. With one, their time is known only after scheduling, and is no shorter.
    """
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:  # the timed calls are Python's
        return False
    library, ours = _times(work)
    template = _fastest_template(product)
    log.info("%s: %.4f ms by the library, %.4f by GEMM and kernel, templates from %.4f", work, library, ours, template)
    return library < min(ours, template)


def _fastest_template(product: Box) -> float:
    """The milliseconds of the fastest competitor of the library's GEMM; 0 where one is chosen already."""
    from torch._inductor import ir
    from torch._inductor.select_algorithm import ExternKernelCaller

    buffer = product
    while isinstance(buffer, (ir.TensorBox, ir.StorageBox)):
        buffer = buffer.data
    if isinstance(buffer, ir.MultiTemplateBuffer):
        times = buffer.choice_timings()
        return min((t for choice, t in times.items() if not isinstance(choice, ExternKernelCaller)), default=math.inf)
    return math.inf if isinstance(buffer, ir.ExternKernel) else 0.0


_measured: dict[Any, tuple[float, float]] = {}  # a model's layers are alike: each size is timed once a process


def _times(work: Work) -> tuple[float, float]:
    """The milliseconds of the library's call, and of its GEMM with our kernel; symbolic sizes as captured."""
    key = work.gemm, work.activation, *((like.device, like.dtype, *_numbers(like)) for like in work.likes)
    if key not in _measured:

        def ours(*t: Any) -> Any:
            return _activation(work, _as_operator, _gemm(work, _as_operator, *t), t[0])

        library = functools.partial(_by_library, work, _as_operator)
        _measured[key] = _milliseconds("library", library, work.likes), _milliseconds("ours", ours, work.likes)
    return _measured[key]


def _as_operator(operator: Any) -> Any:
    return operator


def _numbers(like: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides, as they were at capture."""
    size, stride = (
        tuple(n if isinstance(n, int) else int(n.node.hint) for n in numbers) for numbers in (like.shape, like.stride())
    )
    return size, stride


def _milliseconds(name: str, fn: Callable[..., Any], likes: Sequence[Tensor]) -> float:
    """Time a function of tensors like these, compiled by Inductor as it times decompositions.

    That is without autotuning, so that a GEMM is the library's.
    """
    from torch._dynamo.testing import rand_strided
    from torch._inductor import ir
    from torch._inductor.codegen.subgraph import SubgraphChoiceCaller

    def box(i: int, like: Tensor) -> Box:
        layout = ir.FixedLayout(like.device, like.dtype, *_numbers(like))
        return ir.TensorBox.create(ir.InputBuffer(name=f"operand_{i}", layout=layout))

    boxes = [box(i, like) for i, like in enumerate(likes)]
    choice = SubgraphChoiceCaller(f"fused_epilogue_{name}", boxes, boxes[0].get_layout(), "", make_fx(fn))
    tensors: Any = [rand_strided(*_numbers(like), device=like.device, dtype=like.dtype) for like in likes]
    return float(choice.benchmark(*tensors, out=tensors[0]))
