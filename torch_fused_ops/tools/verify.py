"""``verify``: compare one training step of a model in eager mode, compiled and fused, tensor by tensor."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_fused_ops.graphs.capture import (
    arguments_checked,
    call_model,
    check_model,
    name_of,
    said,
    throwaway,
    unchanged,
)
from torch_fused_ops.graphs.fusion_events import unobserved
from torch_fused_ops.policy import FusionPolicy, policy_or_default
from torch_fused_ops.reports.recording import record

progress = logging.getLogger("torch_fused_ops.verify")

VARIANTS = ("eager", "plain", "fused")
# Tolerances: a number of rounding units relative to a tensor's norm, and a multiple of eager's error.
OF_NORM, OF_EAGER = 4.0, 4.0
# For the 2-norm if the reference's dtype is wider: units, and a multiple of the larger error of eager and plain.
# Over MLPs of 1, 6 and 16 layers in bf16, fused had at most 1.3 times plain's error, except for a loss.
OF_NORM_BESIDE_PLAIN, OF_PLAIN = 2.0, 2.0
# A tensor of n numbers gets 1 + FEW / n times the tolerance, because errors of few numbers do not average out.
FEW = 15.0
# The rounding unit if the reference is eager in the same dtype. It allows for a deep model's rounding: UNIT_EXACT in
# float64, whose epsilon is 2.2e-16, and UNIT_WIDE epsilons in narrower dtypes.
UNIT_EXACT, UNIT_WIDE = 1e-9, 64.0
# For tensors that a policy rounds to float8_e4m3fn: its largest rounding error (3 bits of mantissa), and the
# number allowed in the 2-norm. Gradients of the MLPs above differ by at most 4 % (memory="fp8") and 10 % (gemm="fp8").
UNIT_FP8, OF_NORM_FP8 = 2.0**-4, 2.5
# A tolerance relative to the largest gradient's norm. A bias before a norm has a gradient of 0, except for rounding.
OF_LARGEST = 1e-6
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


MEASURES = ("norm", "largest element")


@dataclass(frozen=True)
class Comparison:
    """One tensor of one step. Distances to the reference, eager in the wide dtype, are divided by the reference's norm.

    This norm is the 2-norm or the largest element (``measure``), whichever distance is closer to its tolerance.
    """

    kind: str  # "loss", "output", "gradient", "buffer" or "argument"; the last two after the step
    name: str  # the path of a parameter or buffer in the model; the number of an output or argument
    dtype: str  # the step's dtype: the model's dtype, or a wider one
    fused: float  # distance of the fused step
    plain: float  # distance of plain ``torch.compile``
    eager: float  # distance of eager
    allowed: float  # largest distance that rounding explains
    measure: str = MEASURES[0]

    @property
    def ok(self) -> bool:
        """True if rounding explains the fused step's distance."""
        return self.fused <= self.allowed

    @property
    def plain_ok(self) -> bool:
        """True if rounding explains plain ``torch.compile``'s distance."""
        return self.plain <= self.allowed

    @property
    def title(self) -> str:
        """The kind and the name, for people."""
        return {"gradient": f"gradient of {self.name}", "loss": "loss"}.get(self.kind, f"{self.kind} {self.name}")


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``: print it, check ``ok``, or read ``comparisons``.

    Attributes:
        title: the model's class.
        policy: the fusion policy.
        comparisons: every compared tensor, in each dtype.
        failures: maps a variant, such as ``"fused, float64"``, to its error. ``"eager"`` maps to the reason why
            gradients cannot be compared. ``verify`` raises errors that occur in eager mode.
        summary: the report's line on the fused step: the numbers of sites, and notes.
        notes: further remarks.
    """

    title: str
    policy: FusionPolicy
    comparisons: tuple[Comparison, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Comparison, ...]:
        """The tensors whose fused value differs from eager by more than rounding explains."""
        return tuple(compared for compared in self.comparisons if not compared.ok)

    @property
    def ok(self) -> bool:
        """True if the fused step equals the eager step, except for rounding."""
        return not self.differences and not any(variant.startswith(("eager", "fused")) for variant in self.failures)

    def to_json(self) -> str:
        """Convert to JSON. An infinite distance (a missing or a non-finite tensor) is null."""
        rows = [{**asdict(compared), "ok": compared.ok, "plain_ok": compared.plain_ok} for compared in self.comparisons]
        text = json.dumps({**asdict(self), "ok": self.ok, "comparisons": rows}, default=str, indent=2)
        return text.replace(": Infinity", ": null")

    def __str__(self) -> str:
        lines = [
            f"{self.title}: one step, eager, plain torch.compile and fused, in {' and '.join(self.dtypes)}",
            f"policy: {self.policy}",
            self.summary,
        ]
        lines += [f"{variant}: {error}" for variant, error in self.failures.items()]
        if self.differences:
            lines += ["", "fused differs from eager by more than rounding explains:", *_table(self.differences)]
            plain_off = sum(not compared.plain_ok for compared in self.differences)
            count = f"differs in {plain_off} of these {len(self.differences)}" if plain_off else "does not"
            lines.append(f"plain torch.compile {count}")
        plain = [compared for compared in self.comparisons if compared.ok and not compared.plain_ok]
        if plain:
            lines += ["", "plain torch.compile differs, fused does not:", *_table(plain)]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        ok = ["ok: nothing differs by more than rounding explains", *self._tolerances]
        return "\n".join([*lines, "", *(ok if self.ok else ["not ok"])])

    @property
    def _tolerances(self) -> list[str]:
        """Format each kind's largest tolerance, a line per dtype."""
        largest: dict[str, dict[str, float]] = {}
        for row in self.comparisons:
            kinds = largest.setdefault(row.dtype, {})
            kinds[row.kind] = max(kinds.get(row.kind, 0.0), row.allowed)
        return [
            f"  allowed in {dtype}, relative to a tensor's norm: "
            + ", ".join(f"{kind} {allowed:.1e}" for kind, allowed in kinds.items())
            for dtype, kinds in largest.items()
        ]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which steps were compared."""
        return tuple(dict.fromkeys(compared.dtype for compared in self.comparisons))


def _table(rows: Sequence[Comparison], limit: int = 24) -> list[str]:
    rows = sorted(rows, key=lambda row: min(row.allowed - row.fused, row.allowed - row.plain))
    width = max(len(row.title) for row in rows[:limit])
    lines = [f"  {'':<{width}}  {'in':<8} {'of':<15} {'fused':>8} {'plain':>8} {'eager':>8} {'allowed':>8}"]
    for row in rows[:limit]:
        figures = " ".join(f"{value:>8.1e}" for value in (row.fused, row.plain, row.eager, row.allowed))
        lines.append(f"  {row.title:<{width}}  {row.dtype:<8} {row.measure:<15} {figures}")
    return [*lines, *([f"  and {len(rows) - limit} more"] if len(rows) > limit else [])]


def verify(
    model: Callable[..., Any],
    *args: Any,
    policy: FusionPolicy | None = None,
    compiled: bool = False,
    **kwargs: Any,
) -> Verification:
    """Compare one training step of a model: eager, plain ``torch.compile``, and fused.

    The step is forward, a loss and backward. It runs on copies of the model and the arguments, in the model's dtype and
    in float64 (float32 if the model cannot run in float64). The loss is the result's ``loss``, or the result if it is a
    single number, else a fixed random linear function of all results. The reference is eager in float64. ``verify``
    compares the loss, the outputs, the gradients of parameters and arguments, and the final buffers and arguments.

    In the model's dtype, the tolerance is two rounding units or, if larger, twice the larger error of eager and plain;
    in float64 it is 4e-9. No element may differ by more than four units of the largest element or, if larger, four
    times eager's largest error. ``memory="fp8"`` and float8 GEMMs are allowed 16 % of a tensor's norm in the model's
    dtype. In float64 they do not round, so all else is compared exactly. The report's last lines state tolerances.

    Dropouts use PyTorch's random numbers (Inductor's ``fallback_random``), so that masks equal eager masks.

    Args:
        model: a module, in its current training or evaluation mode; or a function.
        *args: its positional arguments.
        policy: the fusion policy; ``FusionPolicy()`` by default.
        compiled: generate code as ``torch.compile`` does. By default, the final graphs run call by call, which takes
            seconds instead of minutes, and tests everything except code generation.
        **kwargs: its keyword arguments.

    Returns:
        A ``Verification``. Its ``ok`` is False if a tensor differs by more than rounding explains.

    Raises:
        TypeError: model is not callable, or is a class; or policy is not a FusionPolicy.
        ValueError: the model is on the meta device, or cannot be copied.
        Any error that the model raises in eager mode on these arguments.
    """
    model = check_model(model)
    policy = policy_or_default(policy)
    from torch_fused_ops import lowerings

    lowerings.require()
    if isinstance(model, torch.nn.Module) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError(f"model={type(model).__name__} is on the meta device; verify needs real data")
    dtype = _own_dtype(model, (args, kwargs))
    name, rounded = _name(dtype), _rounded(policy)
    failures: dict[str, str] = {}
    notes: list[str] = []
    summary = ""
    step = functools.partial(_step, model, args, kwargs)
    with unchanged(model), torch.enable_grad():
        progress.info("running eager in %s", name)
        with arguments_checked(args, kwargs):
            eager = step(None, call_model)
        runs = [_Run(name, None, _unit(dtype), {"eager": eager})]
        if wide := _widest(step, dtype, notes):
            runs = [_Run(name, None, torch.finfo(dtype).eps / 2, {"eager": eager}), wide]
        elif rounded:
            runs.append(_Run(f"{name} unrounded", dtype, _unit(dtype), {"eager": eager}))
        for run in runs:
            for variant in VARIANTS[1:]:
                run_policy = replace(policy, gemm="bf16") if run.exact else policy
                fn = interpreted(run_policy if variant == "fused" else None, exact=run.exact, compiled=compiled)
                progress.info("running %s in %s", variant, run.name)
                try:
                    with unobserved(), record() as report:
                        run.steps[variant] = step(run.dtype, fn)
                except Exception as error:
                    failures[f"{variant}, {run.name}"] = f"raised {said(error)}"
                    continue
                if variant == "fused":
                    summary = summary or report.summary
    truth = runs[-1].steps["eager"]
    loss = truth.get(("loss", ""))
    if loss is None:
        notes.append("no result of the model requires a gradient: only forward was compared")
    elif not loss.isfinite():
        failures["eager"] = f"the loss is {loss.item()}, so gradients cannot be compared"
    if not isinstance(model, torch.nn.Module):
        notes.append("parameters in a function's closure are not compared; pass the module to compare them")
    rows = [row for run in runs for row in _compare(truth, run, () if run.exact else rounded)]
    title = name_of(model) or "function"
    return Verification(title, policy, tuple(rows), failures, summary, tuple(notes))


# ---- a step ----------------------------------------------------------------------------------------------------------


Values = dict[tuple[str, str], Tensor | None]  # a step's results by kind and name


@dataclass
class _Run:
    """The step in one dtype, in each variant."""

    name: str
    dtype: torch.dtype | None  # None: the model's dtype
    unit: float  # the rounding unit, relative to a tensor's norm
    steps: dict[str, Values]

    @property
    def exact(self) -> bool:
        """True if the step does not round to float8."""
        return self.dtype is not None


def _unit(narrowest: torch.dtype) -> float:
    """Return the rounding unit if the reference is eager. ``narrowest`` is the narrowest dtype in the step."""
    return UNIT_EXACT if narrowest is torch.float64 else UNIT_WIDE * torch.finfo(narrowest).eps


def _widest(step: Callable[..., Values], own_dtype: torch.dtype, notes: list[str]) -> _Run | None:
    """Run the step eagerly in float64, or in float32 if it raises. Return None if no wider dtype works."""
    for dtype in (torch.float64, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(own_dtype).eps:
            break
        narrowest = _Narrowest(dtype)
        try:
            eager = step(dtype, narrowest.call)
        except Exception as error:
            notes.append(f"the step was not compared in {_name(dtype)}, where eager raises {said(error)}")
            continue
        return _Run(_name(dtype), dtype, _unit(narrowest.dtype), {"eager": eager})
    return None


def _step(
    model: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype | None, fn: Callable[..., Any]
) -> Values:
    """Copy model and arguments, cast to ``dtype`` unless None. Run ``fn(model, *args, **kwargs)`` and backward."""
    if isinstance(model, torch.nn.Module):
        try:
            model = copy.deepcopy(model)
        except Exception as error:
            raise ValueError(f"model={type(model).__name__} cannot be copied: {said(error)}") from error
        if dtype is not None:
            model._apply(functools.partial(_widened, dtype))
        model.zero_grad(set_to_none=True)
    args, kwargs = _copied((args, kwargs), dtype)
    torch.manual_seed(0)
    result = fn(model, *args, **kwargs)
    outputs = list(_tensors(result))
    if not outputs:
        raise ValueError(f"the model returned a {type(result).__name__} without tensors: there is nothing to compare")
    values: Values = {}
    loss = _loss(result, outputs)
    for i, t in enumerate(outputs):
        values["output", str(i)] = t.detach().clone()
    if loss is not None:
        values["loss", ""] = loss.detach().clone()
        loss.backward()
    if isinstance(model, torch.nn.Module):
        values.update({("gradient", name): p.grad for name, p in model.named_parameters() if p.requires_grad})
        values.update({("buffer", name): b.detach() for name, b in model.named_buffers()})
    for i, t in enumerate(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
        values["argument", str(i)] = t.detach()
        if t.requires_grad:
            values["gradient", f"argument {i}"] = t.grad
    return {key: t.to_dense() if t is not None and t.layout in _SPARSE else t for key, t in values.items()}


def _tensors(tree: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a result: in tuples, lists and dicts, and in the fields of other objects."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (
            depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)) and not callable(leaf)
        ):
            yield from _tensors(list(vars(leaf).values()), depth - 1)


def _copied(tree: Any, dtype: torch.dtype | None) -> Any:
    """Copy each tensor once, and cast floating-point copies to ``dtype`` unless it is None."""
    copies: dict[int, Tensor] = {}

    def copied(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return copy.deepcopy(t)
        if id(t) not in copies:
            new = t.detach().clone()
            copies[id(t)] = (new if dtype is None else _widened(dtype, new)).requires_grad_(t.requires_grad)
        return copies[id(t)]

    return tree_map(copied, tree)


def _widened(dtype: torch.dtype, t: Tensor) -> Tensor:
    """Convert a floating tensor to another dtype.

    A single number that is not a parameter is not cast. It does not narrow results, and torch 2.13 drops a compiled
    forward's writes to a float64 number (docs/upstream.md).
    """
    single = t.dim() == 0 and not isinstance(t, torch.nn.Parameter)
    return t.to(dtype) if t.is_floating_point() and not single else t


def _loss(result: Any, outputs: Sequence[Tensor]) -> Tensor | None:
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    for candidate in (loss, result):
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate.sum()
    generator = torch.Generator().manual_seed(0)
    terms = []
    for t in outputs:
        weights = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
        if t.requires_grad and (t.is_floating_point() or t.is_complex()):
            terms.append(((t.abs() if t.is_complex() else t).double() * weights).sum())
    return torch.stack(terms).sum() if terms else None


def _own_dtype(model: Callable[..., Any], inputs: Any) -> torch.dtype:
    """Return the dtype of most parameters; without parameters, the dtype of the first floating-point argument."""
    numbers: Counter[torch.dtype] = Counter()
    for p in model.parameters() if isinstance(model, torch.nn.Module) else ():
        numbers[p.dtype] += p.numel() * p.is_floating_point()
    if numbers.total():
        return max(numbers, key=numbers.__getitem__)
    floating = (t.dtype for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point())
    return next(floating, torch.float32)


# ---- variants --------------------------------------------------------------------------------------------------------


def interpreted(policy: FusionPolicy | None, *, exact: bool = False, compiled: bool = False) -> Callable[..., Any]:
    """Return ``fn(model, *args, **kwargs)``, which calls a model through Dynamo and Inductor.

    Args:
        policy: the fusion policy; None disables fusion, even after ``enable``.
        exact: True to skip the rounding of memory levels.
        compiled: True to generate code. By default, the final graphs run call by call.
    """
    from torch_fused_ops.lowerings import memory_levels, passes

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        options = passes.compile_options(policy) if policy else passes.options_without_us()
        settings = {**options, "fallback_random": True, "force_disable_caches": True}
        inner_compile: dict[str, Any] = {} if compiled else {"inner_compile": _call_by_call}
        with memory_levels.without_fp8_rounding(exact):
            fn: Any = compile_fx(gm, example_inputs, config_patches=settings, **inner_compile)
        return fn  # type: ignore[no-any-return]

    fn: Callable[..., Any] = torch.compile(throwaway(call_model), backend=backend)

    def call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=64):
            return fn(model, *args, **kwargs)

    return call


def _call_by_call(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Run the final graph instead of generating code from it."""

    def call(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()  # AOTAutograd passes ownership, so that tensors are freed after their last use
        return gm.forward(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _Narrowest(TorchDispatchMode):
    """Records the narrowest floating-point dtype of all results."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def call(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return model(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim():
                self.dtype = max(self.dtype, t.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


# ---- comparing -------------------------------------------------------------------------------------------------------


def _rounded(policy: FusionPolicy) -> tuple[str, ...]:
    """Return the kinds of tensors that a policy rounds: all for float8 GEMMs, only gradients for ``memory="fp8"``."""

    def values(field: Any) -> Iterable[str]:
        return [field] if isinstance(field, str) else dict(field).values()

    if any(value != "bf16" for value in values(policy.gemm)):
        return ("loss", "output", "gradient", "buffer", "argument")
    return ("gradient",) if "fp8" in values(policy.memory) else ()


def _compare(truth: Values, run: _Run, rounded: Collection[str]) -> Iterator[Comparison]:
    """Compare each tensor in both measures; yield the measure that is closer to its tolerance."""
    norms = {key: _norms(_wide(value)) for key, value in truth.items() if value is not None and _is_floating(value)}
    largest: dict[tuple[str, int], float] = {}
    for (kind, _), pair in norms.items():
        for i, norm in enumerate(pair):
            if math.isfinite(norm):
                largest[kind, i] = max(largest.get((kind, i), 0.0), norm)
    for key, expected in truth.items():
        kind, name = key
        if expected is None and all(step.get(key) is None for step in run.steps.values()):
            continue
        distances = {variant: _distance(expected, step.get(key), run.exact) for variant, step in run.steps.items()}
        few = 1 + FEW / max(1, expected.numel() if expected is not None else 1)
        in_fp8 = kind in rounded
        unit = few * (UNIT_FP8 if in_fp8 else run.unit)
        rows = []
        for i, (measure, norm) in enumerate(zip(MEASURES, norms.get(key, (1.0, 1.0)), strict=True)):
            norm = norm if norm and math.isfinite(norm) else 1.0
            fused, plain, eager = (distances[v][i] if v in distances else 0.0 for v in reversed(VARIANTS))
            of_norm = OF_NORM_FP8 if in_fp8 and not i else OF_NORM
            noise = min(unit, OF_LARGEST) * largest.get((kind, i), 0.0)
            allowed = max(of_norm * unit * norm, OF_EAGER * eager, noise)
            if not i and not in_fp8 and "plain" in distances and run.steps["eager"] is not truth:
                beside = max(OF_NORM_BESIDE_PLAIN * unit * norm, OF_PLAIN * few * max(eager, plain), noise)
                allowed = min(allowed, beside)
            figures = (fused / norm, plain / norm, eager / norm, allowed / norm)
            rows.append(Comparison(kind, name, run.name, *figures, measure))
        yield max(rows, key=lambda row: (not row.ok, not row.plain_ok, row.fused / row.allowed))


def _wide(t: Tensor) -> Tensor:
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def _is_floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _norms(difference: Tensor) -> tuple[float, float]:
    """Return the 2-norm and the largest element."""
    return float(difference.norm()), float(difference.abs().max()) if difference.numel() else 0.0


def _distance(expected: Tensor | None, actual: Tensor | None, exact: bool) -> tuple[float, float]:
    """Return the distance in both measures; infinite if a tensor is missing, or shapes or non-finite values differ."""
    same, differs = (0.0, 0.0), (float("inf"), float("inf"))
    if expected is None or actual is None:
        present = actual if expected is None else expected
        return same if present is None or not present.any() else differs  # a gradient of zeros may be missing
    if expected.shape != actual.shape:
        return differs
    if not _is_floating(expected):
        # Decisions (a token, an expert) may differ in the model's dtype, so they are compared only in exact steps.
        return same if not exact or torch.equal(expected, actual) else differs
    a, b = _wide(expected), _wide(actual)
    finite, equal = a.isfinite(), (a == b) | (a.isnan() & b.isnan())
    if not torch.equal(finite, b.isfinite()) or not equal[~finite].all():
        return differs
    return _norms(a[finite] - b[finite])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
