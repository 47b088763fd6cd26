"""``explain``: list a model's MLP sites, fused or not, with reasons, without compiling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_fused_ops.graphs.capture import check_model, name_of, run_captured
from torch_fused_ops.policy import FusionPolicy, policy_or_default, unmatched
from torch_fused_ops.reports.breaks import break_of, reasons_noted, since
from torch_fused_ops.reports.captures import beside_loss, capture, sites_of
from torch_fused_ops.reports.report import Report, not_sites

if TYPE_CHECKING:
    from torch.fx import GraphModule


def explain(model: Callable[..., Any], *args: Any, policy: FusionPolicy | None = None, **kwargs: Any) -> Report:
    """Report every MLP site of a model, whether the fusion pass would fuse it, and the reason if not.

    The model runs once, eagerly, on the arguments, while Dynamo captures its graphs (several if it has graph breaks).
    Nothing is compiled. Parameters, buffers and random number generators are restored afterwards.

    Args:
        model: a module, in its current training or evaluation mode; or a function.
        *args: its positional arguments.
        policy: the fusion policy; ``FusionPolicy()`` by default.
        **kwargs: its keyword arguments.

    Returns:
        A ``Report``. Print it, read its ``sites``, or list the tensors saved for backward: ``saved``.

    Raises:
        TypeError: model is not callable, or is a class; or policy is not a FusionPolicy.
        Any error that the model raises on these arguments.
    """
    model = check_model(model)
    policy = policy_or_default(policy)
    from torch_fused_ops import lowerings

    lowerings.require()
    from torch_fused_ops.lowerings import recognize

    report = Report((), 0, policies=(policy,), title=name_of(model))

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.graphs += 1
        report._captures.append(capture(gm, policy))
        report.sites += tuple(sites_of(gm, policy))
        report.unread += not_sites(recognize.unread(gm.graph), report.sites)
        report.breaks += tuple(filter(None, [break_of(gm)]))
        return gm.forward

    breaks_before = reasons_noted()
    run_captured(model, args, kwargs, backend)
    report.breaks = report.breaks or since(breaks_before)
    report.notes = unmatched(policy, report.sites)
    graph = report._captures[-1].graph if report._captures else None
    report.notes += tuple(beside_loss(graph.gm)) if graph is not None else ()
    return report
