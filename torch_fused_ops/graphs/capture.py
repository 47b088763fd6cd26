"""Run a model so that Dynamo captures it, without lasting effects; count captured graphs."""

from __future__ import annotations

import copy
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph


def check_model(model: Any) -> Callable[..., Any]:
    """Return ``model``, uncompiled; raise a TypeError if it is not callable, or is a class."""
    if not callable(model):
        raise TypeError(f"model={model!r} is not callable: it must be a module or a function")
    if isinstance(model, type):
        raise TypeError(f"model={model!r} is a class: it must be an instance of it, {model.__name__}(…), or a function")
    uncompiled: Callable[..., Any] = getattr(model, "_orig_mod", model)
    return uncompiled


def name_of(model: Callable[..., Any]) -> str:
    """Return the name of a module's class, or of a function; "" if it has none."""
    return getattr(type(model) if isinstance(model, torch.nn.Module) else model, "__name__", "")


def captured_graphs() -> int:
    """Return the number of graphs that Dynamo captured in this process, or since its counters were last reset."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


@contextmanager
def arguments_checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """If a model that was called with one tuple of tensors raises a TypeError, explain in it how to pass arguments."""
    try:
        yield
    except TypeError as error:
        is_tuple = len(args) == 1 and isinstance(args[0], (tuple, list)) and not kwargs
        if is_tuple and not all(isinstance(value, str) for value in args[0]):  # strings may be the model's batch
            kind = type(args[0]).__name__
            message = f"args=({kind} of {len(args[0])},): the model was called with one {kind}, and raised: {error}"
            raise TypeError(f"{message}. Pass its arguments one by one: (model, x), not (model, (x,))") from error
        raise


def said(error: Exception) -> str:
    """Shorten an exception to one line, because compilers wrap errors and append pages of advice."""
    quoted = re.search(r"""got (\w+)\((['"])(.*?)\2\)""", str(error))  # Dynamo quotes the operator's error
    if quoted and isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        return f"{quoted[1]}: {quoted[3]}"
    lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def call_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model. ``run_captured`` compiles this function, so its frame is in every captured stack."""
    return model(*args, **kwargs)


def throwaway(fn: Any) -> Callable[..., Any]:
    """Copy fn with a new code object. Dynamo limits the captures per code object to eight. Without a copy, captures
    here would count against the user's compilations."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)


def run_captured(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: Any, **options: Any
) -> Any:
    """Run a model once under ``torch.compile(backend=…)`` without lasting effects. A compiled model is unwrapped first.

    Args:
        model: a module or a function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        backend: called with each graph that Dynamo captures.
        **options: further arguments of ``torch.compile``.

    Returns:
        The model's result.
    """
    model = getattr(model, "_orig_mod", model)
    with (
        unchanged(model),
        _meta_indices(),
        torch._dynamo.config.patch(recompile_limit=64),
        arguments_checked(args, kwargs),
    ):
        return torch.compile(throwaway(call_model), backend=backend, **options)(model, *args, **kwargs)


@contextmanager
def _meta_indices() -> Iterator[None]:
    """Allow calls that mix fake tensors and the real meta tensor that torch creates for a list index, ``x[[0, 2]]``."""
    from torch._subclasses.fake_tensor import fake_tensor_tls

    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


@contextmanager
def unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Restore the state that a run changes: buffers (batch statistics, caches), random generators, Dynamo's records.

    Otherwise the sizes of this run would make a later compilation with other sizes dynamic. Dynamo would also count the
    graphs of this run as graphs of the user.
    """
    from torch._dynamo import pgo
    from torch._dynamo.utils import counters

    buffers = [b for b in model.buffers() if not b.is_meta] if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    seen = pgo.get_code_state()
    seen_before, counted = copy.deepcopy(seen), dict(counters["stats"])
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            seen.clear()
            seen.update(seen_before)
            counters["stats"].clear()
            counters["stats"].update(counted)
            with torch.no_grad():
                for buffer, old in zip(buffers, before, strict=True):
                    if not torch.equal(buffer, old):
                        buffer.copy_(old)


def title_of(graph: Graph) -> str:
    """Return the class name of the model that is being compiled; "" if it is not known.

    The model is the compiled module that is being called. For a compiled function, it is the outermost module of the
    first node inside a module, if the function reads that module from a variable or from an attribute of a variable.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        compiled = frame.f_locals.get("self")
        if isinstance(compiled, OptimizedModule):
            return type(compiled._orig_mod).__name__
        frame = frame.f_back
    for node in graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name: str = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
            return name if re.fullmatch(r"[LG]\['\w+'\](\.\w+)?", path) else ""
    return ""
