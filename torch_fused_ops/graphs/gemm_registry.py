"""Register GEMMs that a graph does not show: GEMMs of other libraries, and GEMMs of users.

The fusion pass looks for activations between GEMMs. It recognizes PyTorch's GEMMs, and each ``torch.autograd.Function``
that calls a GEMM. Custom operators, kernels, and functions that Dynamo does not trace (``allow_in_graph``) are GEMMs if
they are registered here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# GEMMs of optional libraries: operators by qualified name, functions by module and name.
_OPERATORS = {"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"}
_FUNCTIONS = {
    ("torchao.float8.float8_linear", "matmul_with_hp_or_float8_args"),
    ("bitsandbytes.autograd._functions", "MatMul4Bit"),
    ("bitsandbytes.autograd._functions", "MatMul8bitFp"),
    ("bitsandbytes.autograd._functions", "MatMul8bitLt"),
}
_registered: dict[str, Any] = {}  # operators and Functions by the name that ``name_of`` returns
_on_change: list[Callable[[], None]] = []


def register_gemm(fn: Any) -> None:
    """Register a function or operator as a GEMM with weights, such as ``F.linear``.

    ::

        class Linear4Bit(torch.autograd.Function): ...

        tfo.register_gemm(Linear4Bit)

    An activation between two such GEMMs, or between such a GEMM and a linear layer, is then fused, and the memory level
    applies to it. You promise that

    * the result is linear in the input, the one tensor that the model computes, along its last axis; the other tensors
      are weights, biases and scales;
    * it reads its tensors and writes none of them, forward and backward;
    * a second call with the same tensors has the same result.

    The function and its saved tensors are unchanged. Functions that Dynamo traces and that call one of PyTorch's GEMMs
    need no registration; torchao's ``Float8Linear`` and bitsandbytes' 4-bit and 8-bit linear layers are registered.
    ``memory="input"`` recomputes a GEMM if its operator is part of PyTorch, or is registered itself.

    Args:
        fn: a subclass of ``torch.autograd.Function``; or an operator: ``torch.ops.library.name``, one of its overloads,
            or the result of ``torch.library.custom_op``. Registering it again has no effect.

    Raises:
        TypeError: ``fn`` is anything else.
    """
    name = name_of(fn)
    if name is None:
        raise TypeError(
            f"fn={fn!r} is not accepted: it must be a subclass of torch.autograd.Function, or an operator "
            "(torch.ops.library.name, or the result of torch.library.custom_op)"
        )
    _registered[name] = fn
    for notify in _on_change:
        notify()


def name_of(fn: Any) -> str | None:
    """Return the name of an operator or of a Function's class; None for anything else."""
    fn = getattr(fn, "_opoverload", fn)  # the operator in torch.library.custom_op's result
    if isinstance(fn, torch._ops.OpOverload):
        return str(fn._schema.name)
    if isinstance(fn, torch._ops.OpOverloadPacket):
        return str(fn._qualified_op_name)
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        return f"{fn.__module__}.{fn.__qualname__}"
    return None


def is_known(fn: Any) -> bool:
    """Return True if an operator, or a Function's class, is a registered GEMM."""
    if isinstance(fn, type):
        return any(fn is function for function in _functions())
    name = name_of(fn)
    return name is not None and (name in _OPERATORS or name in _registered)


def _functions() -> Iterator[type[torch.autograd.Function]]:
    """Yield the registered Functions whose modules are imported."""
    yield from (fn for fn in _registered.values() if isinstance(fn, type))
    for module, name in _FUNCTIONS:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, type):
            yield function


def function_at(frames: Iterable[tuple[str, int]]) -> bool:
    """Return True if the forward of a registered Function contains one of the (file, line) pairs.

    Dynamo's graph does not name a traced Function, but has the source lines of its calls.
    """
    lines: dict[str, list[tuple[int, int]]] = {}
    for function in _functions():
        code = getattr(function.forward, "__code__", None)
        if code is not None:
            numbers = [line for *_, line in code.co_lines() if line is not None]
            lines.setdefault(code.co_filename, []).append((code.co_firstlineno, max(numbers)))
    return bool(lines) and any(first <= line <= last for file, line in frames for first, last in lines.get(file, ()))


def registered_hash() -> str:
    """Return a hash of the users' registrations, for compile keys; "" without registrations."""
    names = "\n".join(sorted(_registered))
    return hashlib.sha256(names.encode()).hexdigest()[:16] if names else ""
