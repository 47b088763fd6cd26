"""``verify``: one training step of a model, eager, compiled and fused, compared tensor by tensor."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from torch_fused_ops.capture import arguments_checked, call_model, check_model, throwaway, unchanged
from torch_fused_ops.fusion_events import unobserved
from torch_fused_ops.policy import FusionPolicy, check_not_meant, policy_or_default
from torch_fused_ops.reports.recording import record

__all__ = ["Comparison", "Verification", "interpreted", "verify"]

progress = logging.getLogger("torch_fused_ops.verify")

WAYS = ("eager", "plain", "fused")
# What rounding explains, in units of it: of a tensor's norm, and of the error that eager itself makes.
OF_NORM, OF_EAGER = 4.0, 4.0
# In units of how far a change of a few last bits of all parameters and arguments moves a tensor: what is nothing but
# rounding (the mean of what a norm gives) has no other measure.
OF_JITTER = 64.0
# Of a tensor of few numbers more, as their errors do not average: so many times as much for a single one.
FEW = 15.0
# Where eager in the same dtype is the truth, the unit is what rounding grows to in a deep model: in float64 this, where
# its epsilon is 2.2e-16; in float32 so many epsilons.
UNIT_EXACT, UNIT_WIDE = 1e-9, 64.0
# What float8_e4m3fn rounds off at most (3 bits of mantissa): gradients carry it where the policy asks for it.
UNIT_FP8 = 2.0**-4
# Gradients that are 0 but for rounding (a bias in front of a norm) have nothing to be compared with but the others.
OF_LARGEST = 1e-6
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class Comparison:
    """One tensor of one step.

    Attributes:
        kind: "loss", "output", "gradient", "buffer" or "argument" (as it is after the step).
        name: the parameter's or buffer's path in the model; which output or argument.
        dtype: what the step was computed in: the model's own dtype, or a wider one.
        fused: the distance from the truth, with pick-up, relative to its norm. The truth is eager in the wide dtype.
        plain: of plain ``torch.compile``.
        eager: of eager.
        allowed: what rounding explains.
    """

    kind: str
    name: str
    dtype: str
    fused: float
    plain: float
    eager: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether rounding explains what pick-up gives."""
        return self.fused <= self.allowed

    @property
    def plain_ok(self) -> bool:
        """Whether rounding explains what plain ``torch.compile`` gives."""
        return self.plain <= self.allowed

    @property
    def title(self) -> str:
        """For people."""
        return {"gradient": f"gradient of {self.name}", "loss": "loss"}.get(self.kind, f"{self.kind} {self.name}")


@dataclass(frozen=True)
class Verification:
    """What ``verify`` has found: print it, ask ``ok``, or read ``comparisons``.

    Attributes:
        title: the model's class.
        policy: what pick-up was allowed to do.
        comparisons: every tensor that was compared, in each dtype.
        failures: what raised, by way: ``"fused, float64"`` → the error; ``"eager"``: why nothing can be said. Errors of
            eager's own are raised by ``verify``.
        sites: MLP sites that were fused, and all of them.
        notes: what a reader must know besides.
    """

    title: str
    policy: FusionPolicy
    comparisons: tuple[Comparison, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    sites: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Comparison, ...]:
        """What differs from eager by more than rounding explains, with pick-up."""
        return tuple(one for one in self.comparisons if not one.ok)

    @property
    def ok(self) -> bool:
        """Whether the fused step is the eager one, but for rounding."""
        return not self.differences and not any(way.startswith(("eager", "fused")) for way in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{**asdict(one), "ok": one.ok, "plain_ok": one.plain_ok} for one in self.comparisons]
        return {
            "title": self.title,
            "ok": self.ok,
            "policy": asdict(self.policy),
            "sites": {"fused": self.sites[0], "found": self.sites[1]},
            "failures": self.failures,
            "notes": list(self.notes),
            "comparisons": rows,
        }

    def to_json(self) -> str:
        """All of it as JSON; infinite distances (a missing or a non-finite tensor) as null."""
        text = json.dumps(self.as_dict(), default=str, indent=2)
        return text.replace(": Infinity", ": null")

    def __str__(self) -> str:
        kinds = [one.kind for one in self.comparisons]
        counts = ", ".join(
            f"{n // len(self.dtypes)} {kind}{'' if kind == 'loss' or n == len(self.dtypes) else 's'}"
            for kind in dict.fromkeys(kinds)
            if (n := kinds.count(kind))
        )
        lines = [
            f"{self.title}: one step, eager, plain torch.compile and fused, in {' and '.join(self.dtypes)}",
            f"policy: {self.policy}",
            f"{self.sites[0]} of {self.sites[1]} MLP sites fused; compared: {counts or 'nothing'}",
        ]
        lines += [f"{way}: {error}" for way, error in self.failures.items()]
        off = self.differences
        if off:
            lines += ["", "fused differs from eager by more than rounding explains:", *_table(off)]
            both = sum(not one.plain_ok for one in off)
            lines.append(
                f"plain torch.compile is off as well in {both} of these {len(off)}"
                if both
                else "plain torch.compile is not"
            )
        plain = [one for one in self.comparisons if one.ok and not one.plain_ok]
        if plain:
            lines += ["", "plain torch.compile differs, where fused does not:", *_table(plain)]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        lines += ["", "not ok" if not self.ok else "ok: nothing differs by more than rounding explains"]
        return "\n".join(lines)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the step was computed in."""
        return tuple(dict.fromkeys(one.dtype for one in self.comparisons)) or ("no dtype",)


def _table(rows: Sequence[Comparison], most: int = 24) -> list[str]:
    rows = sorted(rows, key=lambda one: min(one.allowed - one.fused, one.allowed - one.plain))
    width = max(len(one.title) for one in rows[:most])
    lines = [f"  {'':<{width}}  {'in':<8} {'fused':>8} {'plain':>8} {'eager':>8} {'allowed':>8}"]
    for one in rows[:most]:
        figures = " ".join(f"{value:>8.1e}" for value in (one.fused, one.plain, one.eager, one.allowed))
        lines.append(f"  {one.title:<{width}}  {one.dtype:<8} {figures}")
    return [*lines, *([f"  and {len(rows) - most} more"] if len(rows) > most else [])]


def verify(
    model: Callable[..., Any],
    *args: Any,
    policy: FusionPolicy | None = None,
    compiled: bool = False,
    **kwargs: Any,
) -> Verification:
    """Compare one training step of a model: eager, plain ``torch.compile``, and with pick-up.

    The step runs on copies of the model and of the arguments, in the model's own dtype and in float64 (in float32 where
    the model cannot run in float64): forward, a loss, backward. The loss is the result's ``loss`` where it has one, the
    result where that is one number, and else a fixed random function, linear in all that the model returns. Loss,
    outputs, every parameter's and every argument's gradient, and buffers and arguments as they are afterwards are
    compared with eager's in float64. What rounding explains: four times the error that eager makes itself in the
    model's dtype, or four units of that dtype's rounding; in float64 4e-9. What rounds (``memory="fp8"``, products in
    float8) is allowed its own rounding in the model's dtype; in float64 it does not round, so that everything but the
    rounding is compared exactly.

    Dropouts are compared as PyTorch's own (Inductor's ``fallback_random``), which drop what eager drops.

    Args:
        model: a module, as it is, in training or evaluation mode; or a function.
        *args: what to call it with.
        policy: what pick-up may do; ``FusionPolicy()`` by default.
        compiled: generate code as ``torch.compile`` does. By default the graphs that it would generate code for are run
            call by call, which takes seconds where compiling takes minutes, and leaves out code generation alone.
        **kwargs: what to call it with.

    Returns:
        A ``Verification``. Its ``ok`` is False where something differs by more than rounding explains.

    Raises:
        TypeError: model is not callable, or a class, or policy is no FusionPolicy.
        ValueError: the model is on the meta device, or cannot be copied.
        Whatever the model raises in eager mode on these arguments.
    """
    check_model(model)
    policy = policy_or_default(policy)
    from torch_fused_ops import lowerings

    lowerings.require()
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, torch.nn.Module) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"model={type(model).__name__} is on the meta device: verify computes with it; give it real data"
        )
    check_not_meant("verify", model, kwargs)
    own = _own_dtype(model, (args, kwargs))
    failures: dict[str, str] = {}
    notes: list[str] = []
    sites = (0, 0)
    with unchanged(model), torch.enable_grad():
        progress.info("eager, %s", _name(own))
        with arguments_checked(args, kwargs):
            eager = _step(model, args, kwargs, None, call_model)
        wide = _widest(model, args, kwargs, own, notes)
        runs = [
            _Run(own, _name(own), False, _unit(own) if wide is None else torch.finfo(own).eps / 2, {"eager": eager})
        ]
        if wide is not None:
            runs.append(wide)
        elif _rounded(policy):
            runs.append(_Run(own, f"{_name(own)} unrounded", True, _unit(own), {"eager": eager}))
        for run in runs:
            for way in WAYS[1:]:
                own_policy = replace(policy, gemm="bf16") if run.exact else policy
                fn = interpreted(own_policy if way == "fused" else None, exact=run.exact, compiled=compiled)
                progress.info("%s, %s", way, run.name)
                try:
                    with _recorded(way) as report:
                        run.steps[way] = _step(model, args, kwargs, run.dtype if run.exact else None, fn)
                except Exception as error:
                    failures[f"{way}, {run.name}"] = f"raised {_error_line(error)}"
                    continue
                if report is not None:
                    found = [site for site in report.sites if site.is_mlp]
                    sites = (sum(site.op is not None for site in found), len(found))
                    notes += report.notes
                    if report.graphs > 1:
                        notes.append(f"{report.graphs} graphs were captured: an MLP that a graph break cuts is no site")
        jittered = _step(model, args, kwargs, runs[-1].dtype if runs[-1].exact else None, call_model, jitter=True)
    truth = runs[-1].steps["eager"]
    loss = truth.values.get(("loss", ""))
    if loss is None:
        notes.append("nothing that the model returned needs a gradient: forward alone was compared")
    elif not loss.isfinite():
        failures["eager"] = f"the loss is {loss.item()}: of gradients nothing can be said"
    if not isinstance(model, torch.nn.Module):
        notes.append("parameters that a function closes over are not compared: give verify the module itself")
    if not sites[0]:
        notes.append("no MLP was fused: this compares what plain torch.compile does, too; explain says why")
    if truth.random:
        notes.append("random numbers were PyTorch's own; dropouts that pick-up takes drop other elements")
    rows = [row for run in runs for row in _compare(truth, jittered, run, () if run.exact else _rounded(policy))]
    title = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
    return Verification(title, policy, tuple(rows), failures, sites, tuple(dict.fromkeys(notes)))


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """What a user can see of a step."""

    values: dict[tuple[str, str], Tensor | None]  # by kind and name
    random: bool  # whether it drew random numbers


@dataclass
class _Run:
    """The step in one dtype, each way."""

    dtype: torch.dtype
    name: str
    exact: bool  # nothing is rounded to keep less
    unit: float  # what it rounds off, relatively
    steps: dict[str, _Step]


def _unit(narrowest: torch.dtype) -> float:
    """The unit where eager in the same dtype is the truth. Models that cast to float32 inside do so in float64, too."""
    return UNIT_EXACT if narrowest is torch.float64 else UNIT_WIDE * torch.finfo(narrowest).eps


def _widest(model: Callable[..., Any], args: Any, kwargs: Any, own: torch.dtype, notes: list[str]) -> _Run | None:
    """The step in eager mode in float64, or if that raises in float32; None if neither is wider than the model's."""
    for dtype in (torch.float64, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(own).eps:
            break
        narrowest = _Narrowest(dtype)
        try:
            step = _step(model, args, kwargs, dtype, call_model, narrowest)
        except Exception as error:
            notes.append(f"the step was not computed in {_name(dtype)}, where eager raises {_error_line(error)}")
            continue
        return _Run(dtype, _name(dtype), True, _unit(narrowest.dtype), {"eager": step})
    return None


def _step(
    model: Callable[..., Any],
    args: Any,
    kwargs: Any,
    dtype: torch.dtype | None,
    fn: Callable[..., Any],
    watching: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 (it can be entered again)
    jitter: bool = False,
) -> _Step:
    if isinstance(model, torch.nn.Module):
        try:
            model = copy.deepcopy(model)
        except Exception as error:
            raise ValueError(f"model={type(model).__name__} cannot be copied: {_error_line(error)}") from error
        if dtype is not None:
            model._apply(functools.partial(_widened, dtype))
        model.zero_grad(set_to_none=True)
    args, kwargs = _copied((args, kwargs), dtype)
    if jitter:
        _jitter([*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *_tensors((args, kwargs))])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with watching:
        result = fn(model, *args, **kwargs)
    outputs = list(_tensors(result))
    if not outputs:
        raise ValueError(
            f"the model returned a {type(result).__name__} in which no tensor is found: nothing to compare"
        )
    values: dict[tuple[str, str], Tensor | None] = {}
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
    return _Step({key: _dense(t) for key, t in values.items()}, not torch.equal(before, torch.get_rng_state()))


def _dense(t: Tensor | None) -> Tensor | None:
    """A sparse gradient, as of an embedding's table, with its zeros."""
    return t.to_dense() if t is not None and t.layout in _SPARSE else t


def _tensors(tree: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a result: in tuples, lists and dicts, and in the fields of other objects."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (
            depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)) and not callable(leaf)
        ):
            yield from _tensors(list(vars(leaf).values()), depth - 1)


def _jitter(tensors: Iterable[Tensor]) -> None:
    """Change the last bits of every floating number."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in {id(t): t for t in tensors if t.is_floating_point()}.values():
            by = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
            t.copy_(t.double() * (1 + 4 * torch.finfo(t.dtype).eps * by))


def _copied(tree: Any, dtype: torch.dtype | None) -> Any:
    """Copies of the tensors, one for each; in a wider dtype, if one is given, where they are floating."""
    copies: dict[int, Tensor] = {}

    def copied(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return copy.deepcopy(t)
        if id(t) not in copies:
            new = t.detach().clone()
            copies[id(t)] = (new if dtype is None else _widened(dtype, new)).requires_grad_(t.requires_grad)
        return copies[id(t)]

    leaves, spec = tree_flatten(tree)
    return tree_unflatten([copied(leaf) for leaf in leaves], spec)


def _widened(dtype: torch.dtype, t: Tensor) -> Tensor:
    """A tensor in another dtype, if it is floating.

    A single number that is no parameter stays as it is: it narrows no product, and torch 2.13 forgets what a compiled
    forward writes into one in float64 (docs/upstream/written-inputs.md).
    """
    single = t.dim() == 0 and not isinstance(t, torch.nn.Parameter)
    return t.to(dtype) if t.is_floating_point() and not single else t


def _loss(result: Any, outputs: Sequence[Tensor]) -> Tensor | None:
    own = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    for candidate in (own, result):
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
    """The dtype of most of the model's parameters, or of the first floating argument."""
    numbers: dict[torch.dtype, int] = {}
    for p in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if p.is_floating_point():
            numbers[p.dtype] = numbers.get(p.dtype, 0) + p.numel()
    floating = [t.dtype for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
    return max(numbers, key=numbers.__getitem__) if numbers else (floating or [torch.float32])[0]


# ---- the ways --------------------------------------------------------------------------------------------------------


def interpreted(policy: FusionPolicy | None, *, exact: bool = False, compiled: bool = False) -> Callable[..., Any]:
    """``fn(model, *args, **kwargs)``: a call of a model through Dynamo and Inductor.

    Args:
        policy: pick-up's; None: none of it, whatever policy is in force.
        exact: keep what memory levels round as it is.
        compiled: generate code. By default the graphs that code would be generated for are run call by call.
    """
    from torch_fused_ops.lowerings import memory_levels, passes

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        options = passes.compile_options(policy) if policy else passes.options_without_us()
        settings = {**options, "fallback_random": True, "force_disable_caches": True}
        more: dict[str, Any] = {} if compiled else {"inner_compile": _call_by_call}
        with memory_levels.unrounded(exact):
            fn: Any = compile_fx(gm, example_inputs, config_patches=settings, **more)
        return fn  # type: ignore[no-any-return]

    fn: Callable[..., Any] = torch.compile(throwaway(call_model), backend=backend)

    def call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=64):
            return fn(model, *args, **kwargs)

    return call


def _call_by_call(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """In the place of Inductor's code generation: run the graph that code would be generated for."""

    def call(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()  # AOTAutograd hands them over: what is read no more is freed
        return gm.forward(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextmanager
def _recorded(way: str) -> Iterator[Any]:
    with ExitStack() as stack:
        stack.enter_context(unobserved())
        yield stack.enter_context(record()) if way == "fused" else None


class _Narrowest(TorchDispatchMode):
    """The narrowest floating dtype that anything inside computes in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim():
                self.dtype = max(self.dtype, t.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


# ---- comparing -------------------------------------------------------------------------------------------------------


def _rounded(policy: FusionPolicy) -> tuple[str, ...]:
    """The kinds of quantities that a policy lets float8 round: products in it, all; what is kept in it, gradients."""

    def values(field: Any) -> Iterable[str]:
        return [field] if isinstance(field, str) else dict(field).values()

    if any(one != "bf16" for one in values(policy.gemm)):
        return ("loss", "output", "gradient", "buffer", "argument")
    return ("gradient",) if "fp8" in values(policy.memory) else ()


def _compare(truth: _Step, jittered: _Step, run: _Run, rounded: Collection[str]) -> Iterator[Comparison]:
    norms = {
        key: float(_wide(value).norm()) for key, value in truth.values.items() if value is not None and _counts(value)
    }
    largest: dict[str, float] = {}
    for (kind, _), norm in norms.items():
        if math.isfinite(norm):
            largest[kind] = max(largest.get(kind, 0.0), norm)
    for key, wanted in truth.values.items():
        kind, name = key
        if wanted is None and all(step.values.get(key) is None for step in run.steps.values()):
            continue
        apart = {way: _apart(wanted, step.values.get(key), run.exact) for way, step in run.steps.items()}
        norm = norms.get(key, 0.0)
        norm = norm if norm and math.isfinite(norm) else 1.0
        unit = UNIT_FP8 if kind in rounded else run.unit
        unit *= 1 + FEW / max(1, wanted.numel() if wanted is not None else 1)
        noise = min(unit, OF_LARGEST) * largest.get(kind, 0.0)
        jitter = _apart(wanted, jittered.values.get(key), False)
        jitter = jitter if math.isfinite(jitter) else 0.0
        allowed = max(OF_NORM * unit * norm, OF_EAGER * apart["eager"], noise, OF_JITTER * jitter)
        fused, plain, eager = (apart.get(way, 0.0) / norm for way in ("fused", "plain", "eager"))
        yield Comparison(kind, name, run.name, fused, plain, eager, allowed / norm)


def _wide(t: Tensor) -> Tensor:
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def _counts(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _apart(wanted: Tensor | None, got: Tensor | None, exact: bool) -> float:
    """The distance in the 2-norm; infinite where one is missing, or where they differ in what is not finite."""
    if wanted is None or got is None:
        other = got if wanted is None else wanted
        return 0.0 if other is None or not other.any() else float("inf")  # zeros are as good as no gradient
    if wanted.shape != got.shape:
        return float("inf")
    if not _counts(wanted):
        # Decisions (a token, an expert) may fall the other way in the model's dtype: they are compared in float64.
        return 0.0 if not exact or torch.equal(wanted, got) else float("inf")
    w, g = _wide(wanted), _wide(got)
    finite, same = w.isfinite(), (w == g) | (w.isnan() & g.isnan())
    if not torch.equal(finite, g.isfinite()) or not same[~finite].all():
        return float("inf")
    return float((w[finite] - g[finite]).norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error_line(error: BaseException) -> str:
    text = str(getattr(error, "inner_exception", error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
