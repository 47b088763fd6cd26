"""``explain``: which MLP sites of a model are fused, as what, and why the others are not, without compiling it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_fused_ops.policy import FusionPolicy, policy_or_default
from torch_fused_ops.reports.figures import capture as set_aside
from torch_fused_ops.reports.figures import graphs_of
from torch_fused_ops.reports.report import EXCLUDED, NOT_AN_MLP, Report, Site, unmatched

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["EXCLUDED", "NOT_AN_MLP", "Report", "Site", "explain"]


def explain(model: Callable[..., Any], *args: Any, policy: FusionPolicy | None = None, **kwargs: Any) -> Report:
    """Say what pick-up would do to a model: every MLP site, fused or not, and why.

    The model runs once, eagerly, on the arguments, while Dynamo captures its graphs (several where it breaks them).
    Nothing is compiled; parameters, buffers and random number generators are afterwards as they were.

    Args:
        model: a module or a function; as it is, in training or evaluation mode.
        *args: what to call it with.
        policy: what pick-up may do; ``FusionPolicy()`` by default.
        **kwargs: what to call it with.

    Returns:
        A ``Report``: print it, read its ``sites``, or let it ``measure`` what fusing saves.

    Raises:
        TypeError: model is not callable, or policy is no FusionPolicy.
        Whatever the model raises on these arguments.
    """
    if not callable(model):
        raise TypeError(f"model={model!r} is not callable: it must be a module or a function")
    policy = policy_or_default(policy)
    from torch_fused_ops import lowerings

    lowerings.require()
    from torch_fused_ops.lowerings import recognise

    sites: list[Site] = []
    unread: list[Site] = []
    captures = []

    def capture(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captures.append(set_aside(gm, policy))
        for module in graphs_of(gm):
            sites.extend(recognise.rewrite(module.graph, policy, apply=False))
        unread.extend(recognise.unread(gm.graph))
        return gm.forward

    model = getattr(model, "_orig_mod", model)
    with _unchanged(model), torch._dynamo.config.patch(recompile_limit=64):
        torch.compile(_throwaway(_call), backend=capture)(model, *args, **kwargs)
    report = Report(tuple(sites), len(captures))
    report.title = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "")
    report.unread = tuple(unread)
    report.notes = unmatched(policy, sites)
    report._captures = captures
    return report


def _call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _throwaway(fn: Any) -> Callable[..., Any]:
    """fn with a code object of its own. Dynamo keeps what it captures on the code object, and eight captures are its
    limit: on the model's own code they would count against the user's compilations."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)


@contextmanager
def _unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Put back what a run changes: buffers (batch statistics, caches), random generators, Dynamo's record of sizes.

    Without the last, sizes that were seen here would make a later compilation with others dynamic from the start.
    """
    from torch._dynamo import pgo

    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    seen = pgo.get_code_state()
    seen_before = copy.deepcopy(seen)
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            seen.clear()
            seen.update(seen_before)
            with torch.no_grad():
                for buffer, old in zip(buffers, before, strict=True):
                    if not torch.equal(buffer, old):
                        buffer.copy_(old)
