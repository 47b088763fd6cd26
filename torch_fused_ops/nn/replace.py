"""``replace_mlps``: eager models run their MLPs with our operators, found by what they compute.

A candidate's ``forward`` is captured (``proofs``: a shallow twin of the module, on a tiny input, by Dynamo; nothing is
computed), pick-up's recogniser proves the activation, and what is left must be linear layers around it: then the graph
is read (``reading``) as a recipe (``recipes``). A module with one gets a subclass of its class whose ``forward``
follows it (``replaced``), with the module's parameters. All else about it stays.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops import lowerings
from torch_fused_ops.capturing import unchanged
from torch_fused_ops.nn.fused_mlp import untouched
from torch_fused_ops.nn.proofs import Fusing, Recipes, capture, hooked, twin_of, uncaptured
from torch_fused_ops.nn.reading import MLPS_MATRICES, NO_ACTIVATION
from torch_fused_ops.nn.recipes import Recipe, Refused
from torch_fused_ops.nn.replaced import Replaced, class_of, original_of
from torch_fused_ops.policy import FusionPolicy, check_not_meant, enclosing_modules, names_module
from torch_fused_ops.reasons import Kind, Reason, excluded
from torch_fused_ops.reports.report import Report
from torch_fused_ops.sites import Site

__all__ = ["Replacements", "replace_mlps"]

# An MLP has two or three; a block whose MLP is spread over several modules, a few more; three with adapters, nine.
MATRICES = range(2, 10)


class Replacements(Report):
    """What ``replace_mlps`` did: a ``Report`` with a site for each MLP, and the way back.

    Attributes:
        sites: a replaced module's has ``op``; the reason of one left alone says why.
        replaced: the replaced modules by their paths.
    """

    def __init__(self, sites: tuple[Site, ...], replaced: dict[str, nn.Module], title: str) -> None:
        super().__init__(sites, 0)
        self.title, self.replaced = title, replaced

    @property
    def summary(self) -> str:
        """One line: how many of how many."""
        fused = sum(site.op is not None for site in self.sites)
        return f"{fused} of {len(self.sites)} MLPs replaced"

    @property
    def nothing(self) -> str:
        """What to look at where there are no sites."""
        return "No module of the model is linear layers around an activation (docs/modules.md says what is looked at)."

    def restore(self) -> None:
        """Put every module back as it was before. Again, it does nothing.

        Raises:
            RuntimeError: something else has since changed a module's class (fully_shard); none is put back then.
        """
        for path, module in self.replaced.items():
            mine = "_fused" in module.__dict__  # until it is put back
            if mine and (not isinstance(module, Replaced) or type(module) is not _class_for(module)):
                raise RuntimeError(f"{path or 'the model'} cannot be put back: its class is now {type(module)!r}")
        for module in self.replaced.values():
            _put_back(module)


def _class_for(module: nn.Module) -> Any:
    original: Any = original_of(module)
    return class_of(original)


def _put_back(module: Any) -> None:
    if isinstance(module, Replaced):
        original: Any = type(module)._original
        module.__class__ = original
    module.__dict__.pop("_fused", None)


def replace_mlps(
    model: nn.Module,
    *args: Any,
    memory: str | Mapping[str, str] = "free",
    gemm: str | Mapping[str, str] = "bf16",
    exclude: Collection[str] = (),
    **kwargs: Any,
) -> Replacements:
    """Have a model's MLPs run with our operators in eager mode, in place; ``report.restore()`` puts it back.

    A module is replaced where its forward is proved to be linear layers, an activation of the table (gated or not),
    maybe dropouts, and a linear layer, however it is spelled. Its parameters stay where they are, so optimizers, state
    dicts and later loading work on; hooks on the module, training flags and copies of the model do, too. Under
    ``torch.compile`` the module's own forward is compiled. Results are within the precision contract; where dropout is
    active, other elements are dropped, by the same chance.

    A linear, activation or dropout inside that is hooked, wrapped or parametrized refuses, or, if that happens later,
    has the module's own forward run again: nothing is skipped.

    Args:
        model: a module. Its classes are not looked at, only what they compute.
        *args, **kwargs: what to call the model with, once, to see what its modules are called with. Without, each
            candidate is tried with (2, 3, its first linear's input size).
        memory: what eager autograd keeps between the linears, as ``FusedMLP``; or, as ``FusionPolicy``'s, a mapping
            from module patterns to levels: the first that fits counts, and what none names is "free".
        gemm: what the linear layers multiply in, as ``FusionPolicy.gemm``, a mapping from module patterns too. Those
            that cannot be in float8 stay in their own dtype; the report says which, and why.
        exclude: module paths to leave alone, as shell patterns, e.g. ``("encoder.*",)``.

    Returns:
        A report: print it. For each module that looks like an MLP what it runs now, or why it was left alone.

    Raises:
        TypeError, ValueError: for arguments that are not accepted, patterns that fit no module of the model included.
        Whatever the model raises on ``args``. The model is then as it was.
    """
    lowerings.require()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory=memory, gemm=gemm, exclude=exclude)  # type: ignore[arg-type]
    paths = _paths(model)
    _check_patterns(policy, [path for several in paths.values() for path in several])
    check_not_meant("replace_mlps", model, kwargs)
    inputs = _inputs(model, args, kwargs) if args or kwargs else None
    recipes, chosen, sites = Recipes(), dict[str, nn.Module](), dict[str, Site]()
    settled: list[nn.Module] = []
    unseen: dict[str, None] = {}
    refused: dict[Any, Refused] = {}
    compiled = [path for path, module in model.named_modules() if _is_compiled(module)]
    for path, module in _candidates(model):
        if any(_holds(module, inner) for inner in settled):
            continue
        site = _site(path, module, paths[id(module)], policy, compiled, inputs, recipes, refused)
        if site is not None and inputs is None and site.kind is Kind.OTHER_INPUTS:
            unseen[type(module).__name__] = None
            continue
        if site is None:
            continue
        settled.append(module)
        sites[path] = site
        if site.op is not None:
            chosen[path] = module
    done: list[nn.Module] = []
    try:
        for module in chosen.values():
            done.append(module)
            around = enclosing_modules(paths[id(module)])
            module.__dict__["_fused"] = Fusing(policy.memory_of(around), policy.gemm_of(around), recipes)
            module.__class__ = _class_for(module)
    except BaseException:
        for module in done:
            _put_back(module)
        raise
    ordered = tuple(sites[path] for path, _ in model.named_modules() if path in sites)
    report = Replacements(ordered, chosen, type(model).__name__)
    around = enclosing_modules(path for module in chosen.values() for path in paths[id(module)])
    report.notes = tuple(
        f"{name}={pattern!r} names no module that was replaced"
        for name in ("memory", "gemm")
        for pattern in policy.patterns.get(name, ())
        if not names_module(pattern, around)
    )
    if unseen:
        report.notes = (f"not looked at, for want of inputs to call them with: {', '.join(unseen)}", *report.notes)
    return report


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """All paths of each module: one that is used twice has two."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return paths


def _check_patterns(policy: FusionPolicy, paths: Sequence[str]) -> None:
    for name, patterns in policy.patterns.items():
        for pattern in patterns:
            if not names_module(pattern, paths):
                near = difflib.get_close_matches(pattern.removesuffix(".*"), paths)
                close = f", as {' or '.join(map(repr, near))} would" if near else ""
                raise ValueError(f"{name}={pattern!r} is not accepted: it must fit a module of the model{close}")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _matrices(module: nn.Module) -> list[Tensor]:
    """What may be linear layers' weights. (Whole numbers of 8 bits may, too; those of 64 are positions.)"""
    owners = (m for m in module.modules() if not isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    tensors = (t for m in owners for t in (*m._parameters.values(), *m._buffers.values()))
    indices = (torch.int64, torch.bool)
    return list({id(t): t for t in tensors if t is not None and t.ndim == 2 and t.dtype not in indices}.values())


def _are_experts(module: nn.Module) -> bool:
    """Whether its own parameters are an MLP's weights, stacked: gate and up, packed or not, and down."""
    weights = [p for p in module._parameters.values() if p is not None and p.ndim == 3]
    if len(weights) not in (2, 3) or len({p.shape[0] for p in weights}) != 1 or weights[0].shape[0] == 1:
        return False
    shapes = [tuple(p.shape[1:]) for p in weights]
    return any(
        all(shape in ((b, a), (2 * b, a), (b, 2 * a)) for j, shape in enumerate(shapes) if j != i)
        for i, (a, b) in enumerate(shapes)
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may be MLPs or hold one, the innermost first."""
    named = list(model.named_modules())
    for path, module in reversed(named):
        many = len(_matrices(module)) in MATRICES and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if many or _are_experts(module):
            yield path, module


def _inputs(model: nn.Module, args: Any, kwargs: Any) -> dict[int, tuple[Any, Any]]:
    """What each candidate is first called with."""
    seen: dict[int, tuple[Any, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.setdefault(id(module), (args, kwargs))

    with contextlib.ExitStack() as stack:
        stack.enter_context(unchanged(model))
        for _, module in _candidates(model):
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        model(*args, **kwargs)
    return seen


def _site(
    path: str,
    module: nn.Module,
    paths: Sequence[str],
    policy: FusionPolicy,
    compiled: Sequence[str],
    inputs: dict[int, tuple[Any, Any]] | None,
    recipes: Recipes,
    refused: dict[Any, Refused],
) -> Site | None:
    """What becomes of a candidate; None if it is no MLP, as far as can be seen."""
    where = f"{type(module).__name__} in {path}" if path else type(module).__name__
    looks = len(_matrices(module)) <= MLPS_MATRICES
    # Blocks have attributes of their own (their number, say): one of a kind is looked at.
    kind = None if looks else (tuple(map(type, module.modules())), tuple(p.shape for p in module.parameters()))
    try:
        pattern = policy.excluding(enclosing_modules(paths))
        if pattern is not None:
            raise Refused(*excluded(pattern))
        if _are_experts(module):
            raise Refused(*_STACKED, has_mlp=True)
        _check_module(path, module, compiled)
        if kind in refused:
            raise refused[kind]
        try:
            recipe = _try(module, inputs, recipes)
        except Refused as refusal:
            if kind is not None:
                refused[kind] = refusal
            raise
    except Refused as refusal:
        why = refusal.reason
        if not (refusal.has_mlp or (looks and why.kind is not Kind.NO_ACTIVATION)):
            return None
        return Site(None, None, where, str(why), (), path, kind=why.kind, excluded_by=why.excluded_by)
    op = "fused::bias_act" if recipe.middle.layout is None else "fused::bias_glu"
    proof = f"proved from {recipe.proved_from}"
    if "memory" in policy.patterns:
        proof += f"; memory={policy.memory_of(enclosing_modules(paths))!r}"
    site = Site(op, recipe.middle.activation, where, proof, ("linear",), path)
    gemm = policy.gemm_of(enclosing_modules(paths))
    if gemm == "bf16":
        return site
    refusals = [reason for reason in recipe.not_in_float8[gemm] if reason is not None]
    text = "; ".join(dict.fromkeys(f"linear: {reason}" for reason in refusals))
    some = len(refusals) <= len(recipe.first)
    gemm_kind = refusals[0].kind if refusals else None
    return replaced(site, gemm=gemm if some else "", gemm_reason=text, gemm_kind=gemm_kind)


_STACKED = Reason(
    Kind.STACKED,
    "its weights are stacked, as a mixture's experts are: nn.GroupedMLP computes those (docs/modules.md, Experts), and "
    'torch.compile(model, backend="fused") finds their activations',
)


def _check_module(path: str, module: nn.Module, compiled: Sequence[str]) -> None:
    if isinstance(module, Replaced):
        raise Refused(Kind.REPLACED, "it is replaced already")
    if isinstance(module, torch.jit.ScriptModule):
        raise Refused(Kind.SCRIPT, "it is a script")
    if any(path == outer or not outer or path.startswith(f"{outer}.") for outer in compiled):
        raise Refused(Kind.COMPILED, "it is compiled already: pick-up reads it there")
    if any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise Refused(
            Kind.DTENSORS,
            "its weights are DTensors: call replace_mlps before fully_shard; a tensor-parallel plan takes nn.FusedMLP "
            "or nn.MLP instead (docs/distributed.md)",
        )
    for name, inner in module.named_modules():
        if _is_compiled(inner):
            raise Refused(Kind.COMPILED, f"{name} in it is compiled already")
        if not untouched(inner) and (name or "forward" in inner.__dict__):
            raise Refused(Kind.HOOKED, f"{name or 'it'}: {hooked(inner)}, which a fused forward would not run")


def _takes_one(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _try(module: nn.Module, inputs: dict[int, tuple[Any, Any]] | None, recipes: Recipes) -> Recipe:
    if inputs is not None:
        if id(module) not in inputs:
            raise Refused(Kind.NOT_CALLED, "it was not called with these inputs")
        args, kwargs = inputs[id(module)]
        given = (*args, *kwargs.values())
        if len(given) == 1:
            return recipes.find(module, given[0])
        refusal = capture(twin_of(module, {}), args, kwargs)[0].refusal()
        raise refusal if refusal.has_mlp else Refused(*NO_ACTIVATION)
    if not _takes_one(module):
        raise Refused(*uncaptured("more than one argument", inputs=True))
    # Of a linear layer the input size comes second, of GPT-2's Conv1D first.
    matrices = _matrices(module)
    sizes = dict.fromkeys(size for matrix in matrices for size in (matrix.shape[1], matrix.shape[0]))
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    refusals: list[Refused] = []
    for size in list(sizes)[:3]:
        x = torch.empty(2, 3, size, dtype=matrices[0].dtype, device=matrices[0].device)
        try:
            return recipes.find(module, x.requires_grad_(learns) if x.is_floating_point() else x)
        except Refused as refusal:
            refusals.append(refusal)
            if refusal.reason.kind not in (Kind.UNCAPTURED, Kind.OTHER_INPUTS):
                raise
    raise refusals[0]
