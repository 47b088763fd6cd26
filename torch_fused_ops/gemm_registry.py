"""Matrix products by name, where a graph does not show that they are: other libraries', and those that users register.

Pick-up looks for activations between matrix products. PyTorch's own it knows; a ``torch.autograd.Function`` whose
forward shows a product is one; and what hides it, in a custom operator, a kernel, or a function that Dynamo does not
look into (``allow_in_graph``), is one if its name stands here.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["function_at", "is_known", "name_of", "register_gemm", "registered_hash"]

# Of libraries that need not be there: operators by their qualified names, functions by module and name.
_OPERATORS = {"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"}
_FUNCTIONS = {
    ("torchao.float8.float8_linear", "matmul_with_hp_or_float8_args"),
    ("bitsandbytes.autograd._functions", "MatMul4Bit"),
    ("bitsandbytes.autograd._functions", "MatMul8bitFp"),
    ("bitsandbytes.autograd._functions", "MatMul8bitLt"),
}
_registered: dict[str, Any] = {}  # by name: an operator's name, or a Function's class
_on_change: list[Callable[[], None]] = []


def register_gemm(fn: Any) -> None:
    """Let pick-up take a function or operator for a matrix product with weights, as ``F.linear`` is.

    ::

        class Linear4Bit(torch.autograd.Function): ...

        tfo.register_gemm(Linear4Bit)

    An activation that stands between two such products, or between one and a linear layer, is then fused, and what is
    kept of it for backward goes by the memory level. You promise that

    * its result is linear in the one of its tensors that the model computes, its input, along that tensor's last axis:
      the others are weights, biases and scales;
    * it reads its tensors and writes none of them, forward and backward;
    * called again with the same tensors it gives the same.

    Neither the function nor what it keeps for backward is changed. A function need not be registered whose forward is
    traced by Dynamo and calls one of PyTorch's products: that is seen. torchao's ``Float8Linear`` and bitsandbytes'
    4-bit and 8-bit linear layers are known. ``memory="input"`` computes a product again where the operator that
    computes it is PyTorch's, or registered itself.

    Args:
        fn: a subclass of ``torch.autograd.Function``; or an operator: ``torch.ops.library.name``, one of its overloads,
            or what ``torch.library.custom_op`` gave. Registering it again changes nothing.

    Raises:
        TypeError: it is anything else.
    """
    name = name_of(fn)
    if name is None:
        raise TypeError(
            f"fn={fn!r} is not accepted: it must be a subclass of torch.autograd.Function, or an operator "
            "(torch.ops.library.name, or what torch.library.custom_op gave)"
        )
    _registered[name] = fn
    for notify in _on_change:
        notify()


def name_of(fn: Any) -> str | None:
    """What identifies an operator or a Function's class; None for anything else."""
    fn = getattr(fn, "_opoverload", fn)  # torch.library.custom_op's
    if isinstance(fn, torch._ops.OpOverload):
        return str(fn._schema.name)
    if isinstance(fn, torch._ops.OpOverloadPacket):
        return str(fn._qualified_op_name)
    if isinstance(fn, type) and issubclass(fn, torch.autograd.Function):
        return f"{fn.__module__}.{fn.__qualname__}"
    return None


def is_known(fn: Any) -> bool:
    """Whether an operator, or a Function's class, is a product by name."""
    if isinstance(fn, type):
        return any(fn is one for one in _functions())
    name = name_of(fn)
    return name is not None and (name in _OPERATORS or name in _registered)


def _functions() -> Iterator[type[torch.autograd.Function]]:
    """The Functions that are products, as far as their modules are imported."""
    yield from (one for one in _registered.values() if isinstance(one, type))
    for module, name in _FUNCTIONS:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type):
            yield found


def function_at(frames: Iterable[tuple[str, int]]) -> bool:
    """Whether one of these lines, (file, line), is of the forward of a Function that is a product.

    Where Dynamo traces a Function its graph does not name it; but of every call inside it has where it stands.
    """
    lines: dict[str, list[tuple[int, int]]] = {}
    for function in _functions():
        code = getattr(function.forward, "__code__", None)
        if code is not None:
            numbers = [line for *_, line in code.co_lines() if line is not None]
            lines.setdefault(code.co_filename, []).append((code.co_firstlineno, max(numbers)))
    return bool(lines) and any(first <= line <= last for file, line in frames for first, last in lines.get(file, ()))


def registered_hash() -> str:
    """Identifies what users have registered, for compile keys; "" where that is nothing."""
    names = "\n".join(sorted(_registered))
    return hashlib.sha256(names.encode()).hexdigest()[:16] if names else ""
