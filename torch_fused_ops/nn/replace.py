"""``replace_mlps``: eager models run their MLPs with our operators, found by what they compute.

A candidate's ``forward`` is captured (a shallow twin of the module, on a tiny input, by Dynamo; nothing is computed),
pick-up's recogniser proves the activation, and what is left must be linear layers around it: then the graph is read as
a ``Recipe``. A module with one gets a subclass of its class whose ``forward`` follows it, with the module's parameters.
All else about it stays.

A recipe holds for the *situation* it was proved in: the module's attributes, training flags and parameters' shapes and
dtypes, the input's dtype and number of axes, grad mode and autocast; and for the *state* that the forward read besides:
configurations, classes, globals, closures. With a new situation or state it is proved again, once; where it is refused,
and wherever something was hooked, wrapped or put in place since, the module's own ``forward`` runs.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import functional, lowerings
from torch_fused_ops.capturing import throwaway, unchanged
from torch_fused_ops.nn.fused_mlp import Middle, untouched
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, names_module
from torch_fused_ops.reasons import Kind, Reason, Refusal, excluded
from torch_fused_ops.reports.report import Report
from torch_fused_ops.sites import DROPOUT, Site

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["Replacements", "replace_mlps"]

log = logging.getLogger("torch_fused_ops")

MATRICES = range(2, 9)  # an MLP has two or three; a block whose MLP is spread over several modules, a few more
MLPS_MATRICES = 3
MAX_PROOFS = 64  # of a module, one for each situation: an attribute that changes with every call must not cost one each


class _Refused(Refusal):
    """A module is left alone, or runs its own forward. ``has_mlp``: an activation between linear layers is in it."""

    def __init__(self, kind: Kind, text: str, excluded_by: str = "", *, has_mlp: bool = False) -> None:
        super().__init__(kind, text, excluded_by)
        self.has_mlp = has_mlp


# ---- what is run -----------------------------------------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear layer by its parameters' names: x · weightᵀ + bias, or x · weight + bias where it is ``transposed``."""

    weight: str
    bias: str | None
    transposed: bool

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """(weight (out, in), bias)"""
        weight = _parameter(module, self.weight)
        bias = None if self.bias is None else _parameter(module, self.bias)
        return weight.t() if self.transposed else weight, bias


class Recipe(NamedTuple):
    """A proved forward: ``dropout(second(dropout(middle(first(x)))))``, first being one linear, or gate and up."""

    first: tuple[Linear, ...]
    middle: Middle
    second: Linear
    inner: float = 0.0  # chances of being dropped, behind the activation and at the end
    outer: float = 0.0
    cast: bool = False  # what the second linear reads is brought to its weight's dtype
    proved_from: str = ""

    def run(self, module: nn.Module, x: Tensor, memory: str) -> Tensor:
        """The module's result."""
        linears = [linear.of(module) for linear in self.first]
        weight, bias = self.second.of(module)
        last = None if self.outer else bias

        def second(a: Tensor) -> Tensor:
            return F.linear(a.to(weight.dtype) if self.cast else a, weight, last)

        if len(linears) == 1:
            ((own, added),) = linears

            def first(x: Tensor) -> Tensor:
                return F.linear(x, own)
        else:
            added = None

            def first(x: Tensor) -> Tensor:
                return _gate_up(x, linears)

        reads = lambda: (t for pair in linears for t in pair)  # noqa: E731
        y = self.middle.run(x, first, added, second, memory, self.inner, reads)
        return functional.bias_dropout_add(y, bias, None, self.outer) if self.outer else y


def _gate_up(x: Tensor, linears: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    tensors, kind = [x, *(t for pair in linears for t in pair)], x.device.type
    on = torch.is_autocast_enabled(kind)
    if on:  # it knows no out=
        tensors = [None if t is None else t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    with torch.autocast(kind, enabled=False) if on else contextlib.nullcontext():
        packed: Tensor = _GateUp.apply(*tensors)  # type: ignore[no-untyped-call]
    return packed


class _GateUp(torch.autograd.Function):
    """[x · gateᵀ + bias | x · upᵀ + bias] in one tensor, without a copy of either: (..., h) → (..., 2f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, gate_bias: Any, up: Tensor, up_bias: Any) -> Tensor:
        rows, n = x.reshape(-1, x.shape[-1]), gate.shape[0]
        packed = x.new_empty(rows.shape[0], n + up.shape[0])
        for out, weight, bias in ((packed[:, :n], gate, gate_bias), (packed[:, n:], up, up_bias)):
            if bias is None:
                torch.mm(rows, weight.t(), out=out)
            else:
                torch.addmm(bias, rows, weight.t(), out=out)
        ctx.save_for_backward(x, gate, up)
        return packed.view(*x.shape[:-1], packed.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows, both = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        parts = both.split((gate.shape[0], up.shape[0]), -1)
        to_x = torch.addmm(parts[1].mm(up), parts[0], gate).view_as(x) if needs[0] else None
        to_weights = [part.t().mm(rows) if needs[i] else None for part, i in zip(parts, (1, 3), strict=True)]
        to_biases = [part.sum(0) if needs[i] else None for part, i in zip(parts, (2, 4), strict=True)]
        return to_x, to_weights[0], to_biases[0], to_weights[1], to_biases[1]


def _parameter(module: nn.Module, path: str) -> Tensor:
    *owners, name = path.split(".")
    for owner in owners:
        module = module._modules[owner]  # type: ignore[assignment]
    tensor = module._parameters[name]
    assert tensor is not None
    return tensor


class _Replaced:
    """In front of a module's class: its forward follows a recipe where one was proved."""

    _original: type[nn.Module]
    _members: frozenset[str]
    _input_name: str
    _fused: _Fusing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original: Callable[..., Any] = type(self)._original.forward
        # Under the compiler its own forward is what pick-up reads.
        if torch.compiler.is_compiling() or len(args) + len(kwargs) != 1:
            return original(self, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(type(self)._input_name)
        recipe = self._fused.recipe(self, x)  # type: ignore[arg-type]
        if recipe is None:
            return original(self, *args, **kwargs)
        return recipe.run(self, x, self._fused.memory)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return _new, (type(self)._original,), *state


@functools.cache
def _replaced(original: Any) -> Any:
    """A class's subclass that follows recipes. It has its name: reports, pickles and wrapping policies go by names."""
    parameters = list(inspect.signature(original.forward).parameters)
    attributes = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_original": original,
        "_input_name": parameters[1] if len(parameters) > 1 else "",
    }
    made: Any = type(original.__name__, (_Replaced, original), attributes)
    made._members = frozenset((*vars(made), "_members"))
    return made


def _new(original: Any) -> nn.Module:
    """An empty replaced module, for copies and pickles."""
    kind = _replaced(original)
    made: nn.Module = kind.__new__(kind)
    return made


def _original_of(module: nn.Module) -> type[nn.Module]:
    return module._original if isinstance(module, _Replaced) else type(module)


# ---- situations ------------------------------------------------------------------------------------------------------


class _Fusing:
    """What a replaced module knows: its level, and the recipes by situation. A copy of it starts without recipes."""

    def __init__(self, memory: str, recipes: _Recipes | None = None) -> None:
        self.memory = memory
        self.recipes = _Recipes() if recipes is None else recipes
        self.proofs = 0

    def __reduce__(self) -> Any:
        return _Fusing, (self.memory,)

    def recipe(self, module: nn.Module, x: Any) -> Recipe | None:
        """What to follow, or None: the module's own forward."""
        known = self.recipes.made
        try:
            return self.recipes.find(module, x, self.proofs < MAX_PROOFS)
        except _Refused:
            return None
        finally:
            self.proofs += self.recipes.made - known


class _State:
    """What a capture has read besides its situation: configurations, classes, globals, closures, defaults.

    Dynamo's guards watch it, on the twin that was captured: it shares everything with the module but the modules
    themselves, and those are in the situation. Methods have no guards: classes are compared here.

    Args:
        code: what was captured; Dynamo keeps its guards with it.
        scope: what it was called with.
        values: the modules, and all that has guards.
        traced: the code of the functions that it called.
    """

    def __init__(self, code: CodeType, scope: dict[str, Any], values: list[Any], traced: Sequence[CodeType]) -> None:
        self.code, self.scope = code, scope
        classes = [vars(kind) for kind in dict.fromkeys(kind for value in values for kind in _classes(value))]
        self.names = [(members, [*members]) for members in classes]
        self.functions = [
            (members, name, member, f, f.__code__)
            for members in classes
            for name, member in members.items()
            if (f := _function(member)) is not None
        ]
        watched = [code, *(own for *_, own in self.functions)]
        watched += [function.__code__ for function in map(_function, values) if function is not None]
        for each in watched:
            watched += [inner for inner in each.co_consts if isinstance(inner, CodeType) and each in traced]
        self.unwatched = [c for c in traced if c not in watched and not c.co_filename.startswith(_TORCH)]

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was."""
        for members, names in self.names:
            if [*members] != names:
                return False
        for members, name, member, function, code in self.functions:
            if members[name] is not member or function.__code__ is not code:
                return False
        guards = self._guards()
        return guards is not None and guards.check(self.scope)

    def fault(self) -> str:
        """Why it cannot be watched; "" if it can."""
        if self.unwatched:
            code = self.unwatched[0]
            return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}), called on an object that it makes"
        if self.is_unchanged():
            return ""
        guards = self._guards()
        failing = guards.check_verbose(self.scope).verbose_code_parts if guards is not None else ()
        return failing[0].partition("  #")[0].replace("L['module']", "self") if failing else "Dynamo keeps no guards"

    def _guards(self) -> Any:
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(self.code)
        # torch.compiler.reset() leaves none; one without code is over, as an object that it names has gone.
        return entries[0].guard_manager if entries and entries[0].code is not None else None


def _classes(value: Any) -> list[type]:
    """Python's classes that a value has its methods from; torch's own are taken to stay."""
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    return [kind for kind in kinds if kind.__flags__ & _HEAP and kind.__module__.partition(".")[0] != "torch"]


def _function(value: Any) -> FunctionType | None:
    """The function in a method, a property or the like."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, FunctionType) else None


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes that Python code has made
_TORCH = os.path.join(torch.__path__[0], "")


class _Proof(NamedTuple):
    """A recipe, or why there is none."""

    result: Recipe | _Refused
    state: _State | None  # None: it stays, whatever changes
    alive: nn.Module  # the twin, as situations name attributes by their ids


class _Recipes:
    """Proofs by situation, shared by the modules that were replaced together."""

    def __init__(self) -> None:
        self.found: dict[Any, list[_Proof]] = {}
        self.made = 0

    def find(self, module: nn.Module, x: Any, prove: bool = True) -> Recipe:
        """The recipe for a module and an input like x: one that is known, or else proved now.

        Raises:
            _Refused: there is none.
        """
        key = _situation(module, x)
        for proof in self.found.get(key, ()):
            if proof.state is None or proof.state.is_unchanged():
                break
        else:
            if not prove:
                raise _Refused(Kind.SITUATIONS, "it was in too many situations already")
            proof = _prove(module, x)
            self.found.setdefault(key, []).append(proof)
            self.made += 1
            if isinstance(proof.result, _Refused):
                log.info("%s runs its own forward: %s", type(module).__name__, proof.result)
        if isinstance(proof.result, _Refused):
            raise _Refused(*proof.result.reason, has_mlp=proof.result.has_mlp)  # each raised once
        return proof.result


_BASE = frozenset(nn.Module().__dict__) - {"training"} | {"_fused"}
_PLAIN = (bool, int, float, str, type(None))


def _situation(module: nn.Module, x: Any) -> tuple[Any, ...]:
    """All that a proof may have depended on.

    Raises:
        _Refused: there is no fused way here at all.
    """
    if type(x) not in (Tensor, nn.Parameter) or x.ndim == 0 or x.numel() == 0:
        raise _Refused(Kind.INPUT, "its input is no plain tensor, or empty")
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        raise _Refused(Kind.AT_WORK, "a torch.func transform or a tracer is at work")
    if torch.autograd.forward_ad._current_level >= 0 or nn.modules.module._has_any_global_hook():
        raise _Refused(Kind.AT_WORK, "forward-mode derivatives or global module hooks are at work")
    if isinstance(module, _Replaced) and len(members := vars(type(module))) != len(module._members):
        added = [name for name in members.keys() - module._members if not name.startswith("__")]
        if added:
            raise _Refused(
                Kind.CLASS_CHANGED, f"its class got {added[0]} after it was replaced: set it before, or on the module"
            )
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    sizes = tuple(min(size, 2) for size in x.shape[:-1])
    here = (sizes, x.shape[-1], x.dtype, x.device, x.requires_grad, torch.is_grad_enabled(), autocast)
    return (*here, torch.is_inference_mode_enabled(), _structure(module, {}, True))


def _structure(module: nn.Module, seen: dict[int, int], outermost: bool = False) -> tuple[Any, ...]:
    """What a module is made of: classes, attributes, parameters (and which are one), to the leaves."""
    if not outermost and not untouched(module):
        raise _Refused(Kind.HOOKED, f"{_hooked(module)}, which its fused forward would not run")
    if id(module) in seen:
        return (seen[id(module)],)
    seen[id(module)] = len(seen)
    kind = _original_of(module)
    own = tuple([(name, _token(value)) for name, value in module.__dict__.items() if name not in _BASE])
    tensors: list[tuple[Any, ...]] = []
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is None:
            tensors.append((name,))
            continue
        if type(t) not in (Tensor, nn.Parameter):
            raise _Refused(Kind.SUBCLASS, f"{name} is a {type(t).__name__}: tensor subclasses are left alone")
        tensors.append((name, seen.setdefault(id(t), len(seen)), t.shape, t.dtype, t.device, t.requires_grad))
    children = [(name, c and _structure(c, seen)) for name, c in module._modules.items()]
    return (kind, kind.forward, own, *tensors, *children)


def _hooked(module: nn.Module) -> str:
    name = type(module).__name__
    if "forward" in module.__dict__:
        return f"the forward of {name} was put in its place"
    if module._compiled_call_impl is not None:
        return f"{name} is compiled (Module.compile)"
    return f"{name} has a hook"


def _token(value: Any) -> Any:
    """What stands for an attribute: plain values for themselves, other objects by their identity."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return (kind, *map(_token, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_token, value))
    if kind is dict:
        return (kind, *[(_token(k), _token(v)) for k, v in value.items()])
    return id(value)


# ---- proofs ----------------------------------------------------------------------------------------------------------


def _prove(module: nn.Module, x: Tensor) -> _Proof:
    """Capture and read the module's forward on an input like x."""
    made: dict[int, nn.Module] = {}
    twin = _twin(module, made)
    with torch.utils._python_dispatch._disable_current_modes():
        before = _structure(twin, {}, True)
        reading, state = _capture(twin, (_like(x),), {})
    result = reading.recipe or reading.refusal()
    try:
        if reading.recipe is not None and _structure(twin, {}, True) != before:
            result = _Refused(Kind.ATTRIBUTES, "its forward changes the module's attributes")
    except _Refused as refusal:
        result = refusal.with_traceback(None)
    for inner in made.values():  # neither situations nor what is watched name tensors: they may go
        for tensors in (inner._parameters, inner._buffers):
            tensors.update(dict.fromkeys(tensors))
    fault = state.fault()
    if fault and isinstance(result, Recipe):
        result = _Refused(Kind.UNWATCHED, f"its forward reads what it changes, or what cannot be watched: {fault}")
    return _Proof(result, None if fault else state, twin)


def _like(x: Tensor) -> Tensor:
    """A small tensor in the same situation, whose sizes other than 1 may turn out as any."""
    sizes = [1 if size == 1 else 2 + i for i, size in enumerate(x.shape[:-1])]
    with torch.inference_mode(False):
        example = torch.zeros(*sizes, x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
    for i, size in enumerate(sizes):
        if size != 1:
            torch._dynamo.mark_dynamic(example, i)
    return example


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A copy that shares everything but the modules themselves: what a forward sets on itself, it sets on that."""
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(_original_of(module))
        twin.__dict__.update(module.__dict__)
        for name, value in module.__dict__.items():
            if type(value) in (dict, list, set) or (name in _BASE and isinstance(value, dict)):
                twin.__dict__[name] = value.copy()
        twin.__dict__.pop("_fused", None)
        for name, child in module._modules.items():
            twin._modules[name] = child if child is None else _twin(child, made)
    return made[id(module)]


class _Reading:
    """One capture: the recipe, or why there is none."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.sites: tuple[Site, ...] = ()
        self.reason = Reason(Kind.DISABLED, "Dynamo did not capture it (is it disabled?)")

    def refusal(self) -> _Refused:
        return _Refused(*self.reason, has_mlp=any(site.is_mlp for site in self.sites))


def _capture(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Reading, _State]:
    """What a module's forward computes of these arguments, and the state that it read.

    A recipe, if it is one and there is one argument.
    """
    from torch_fused_ops.lowerings import recognise

    reading = _Reading()
    names = {id(p): name for name, p in reversed(list(twin.named_parameters(remove_duplicate=False)))}
    stand_in: list[Tensor] = []
    several = len(args) + len(kwargs)
    x = args[0] if args else None
    tensors = {*names, *map(id, twin.buffers()), id(x)}
    values: list[Any] = []
    traced: list[CodeType] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        reading.sites = recognise.rewrite(gm.graph, FusionPolicy(dropout=False))
        count = len(next(node for node in gm.graph.nodes if node.op == "output").args[0])
        traced.extend(torch._guards.TracingContext.get_traced_code() or ())
        captured = [gm]

        def run(*args: Any) -> tuple[Tensor, ...]:
            gm = captured.pop()  # Dynamo keeps this function, and it is all that keeps the graph
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            given = {node: names.get(id(arg), "") for node, arg in zip(nodes, args, strict=True)}
            source = next((node for node, arg in zip(nodes, args, strict=True) if arg is x), None)
            try:
                if several != 1 or x is None:
                    raise _Refused(Kind.ARGUMENTS, f"it is called with {several} arguments")
                reading.recipe = _read(gm, source, given, reading.sites)
            except _Refused as refusal:  # here, before Dynamo's code goes on to what the forward does to its arguments
                raise _Refused(refusal.reason.kind, _with_place(str(refusal), gm, given)) from None
            stand_in.append(x.new_empty(0))
            return (*stand_in,) * count

        return run

    def watched(guards: Sequence[Any]) -> list[bool]:
        values.extend(guard.value for guard in guards)
        return [id(guard.value) not in tensors and guard.guard_type not in _NOT_WATCHED for guard in guards]

    forward = throwaway(_forward)
    options: dict[str, Any] = {"guard_filter_fn": watched}
    try:
        # Not its __call__: the outermost module's own hooks run around the fused forward as around this one.
        with unchanged(twin), _quiet(), torch._dynamo.config.patch(_DYNAMO):
            compiled = torch.compile(forward, backend=backend, fullgraph=True, options=options)
            result = compiled(twin, *args, **kwargs)
        if reading.recipe is not None and result is not stand_in[0]:
            reading.recipe, reading.reason = None, Reason(Kind.RESULTS, "it gives something else than one tensor")
    except _Refused as refusal:
        reading.recipe, reading.reason = None, refusal.reason
    except Exception as error:
        log.debug("a module could not be captured", exc_info=True)
        own = not isinstance(error, torch._dynamo.exc.Unsupported) or any(text in str(error) for text in _ITS_OWN)
        reading.recipe, reading.reason = None, _uncaptured(_first_line(error), inputs=own)
    scope = {"module": twin, "args": args, "kwargs": kwargs}
    state = _State(forward.__code__, scope, [*twin.modules(), *values], traced)
    traced.clear()  # what the backend holds lives as long as the code
    return reading, state


# Sizes are in the situation; and a checkpoint has new hooks for saved tensors each time.
_NOT_WATCHED = ("SHAPE_ENV", "AUTOGRAD_SAVED_TENSORS_HOOKS")
# How Dynamo tells of errors that the module itself raises, on an input that it does not take.
_ITS_OWN = ("bserved exception", "Length mismatch when unpacking", "failed to bind arguments")
_DYNAMO = {
    "recompile_limit": 64,
    "suppress_errors": False,
    "guard_nn_modules": True,
    "skip_nnmodule_hook_guards": False,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """An input of another size than the module takes is an answer here, and nothing to be logged."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _uncaptured(what: str, inputs: bool) -> Reason:
    """Why a forward was not captured; ``inputs``: because of what it was called with."""
    kind, needs = (Kind.OTHER_INPUTS, "it needs other inputs: ") if inputs else (Kind.UNCAPTURED, "")
    return Reason(kind, f"it cannot be captured in one graph: {needs}{what}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]


# ---- reading a graph -------------------------------------------------------------------------------------------------


def _read(gm: GraphModule, x: Node | None, given: dict[Node, str], sites: Sequence[Site]) -> Recipe:
    """The graph as a recipe.

    Args:
        gm: captured, with the activation replaced by its operator.
        x: the module's input.
        given: each placeholder's parameter, by its name; "" if it is none.
        sites: what the recogniser has found.

    Raises:
        _Refused: it is not exactly linear layers around one activation.
    """
    reader = _Reader(given)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    if len(output.args[0]) != 1:
        raise _Refused(Kind.RESULTS, f"it gives {len(output.args[0])} tensors")
    if not any(site.is_mlp for site in sites):
        raise _Refused(*_NO_ACTIVATION)
    for site in sites:
        if site.op is None and site.activation != DROPOUT:
            assert site.kind is not None
            raise _Refused(site.kind if site.is_mlp else Kind.MORE, site.reason)
    node, outer, _ = reader.through(output.args[0][0])
    second, node = reader.linear(node, "at its end")
    node, inner, casts = reader.through(node)
    ends_in = casts[0] if casts else None
    operator = reader.operator(node)
    operands, middle = operator
    first = []
    for operand in operands:
        operand, p, widened = reader.through(operand)
        if p:
            raise _Refused(Kind.DROPOUT_INSIDE, "an active dropout stands before its activation")
        linear, source = reader.linear(operand, "in front of its activation")
        source, p, more = reader.through(source)
        if source is not x or p or more:
            raise _Refused(
                Kind.MORE, f"a linear layer in front of its activation does not read its input, but {_shown(source)}"
            )
        # Widened and brought back, it is rounded once, as by the operator itself.
        if widened and ends_in != _dtype(operand):
            raise _Refused(Kind.MORE, f"its activation is computed in {widened[0]}")
        first.append(linear)
    reader.check_rest(gm)
    _check_sizes(x, output.args[0][0])
    cast = ends_in is not None and ends_in != _dtype(operands[0])
    spelled = ", ".join(dict.fromkeys(name for site in sites if site.is_mlp for name in site.spelling))
    return Recipe(tuple(first), middle, second, inner, outer, cast, spelled)


class _Reader:
    """Walks a graph from its output; what it has gone through is accounted for."""

    # Rows stay rows: these move the leading axes about at most, if the last one is as it was.
    ROWS = frozenset(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"))
    COPIES = frozenset(("contiguous", "clone", "alias"))

    def __init__(self, given: dict[Node, str]) -> None:
        from torch_fused_ops.lowerings.recognise import graph

        self.graph, self.given = graph, given
        self.read: set[Node] = set()

    def call(self, node: Any) -> Any:
        return self.graph.Call(node)

    def through(self, node: Any) -> tuple[Node, float, list[torch.dtype]]:
        """The value that a node passes on, the chance of being dropped on the way, and the dtypes it is cast to."""
        p, casts = 0.0, []
        while True:
            call = self.call(node)
            if call.name == "dropout" and call.dropout_is_active():
                if p:
                    raise _Refused(Kind.MORE, "two dropouts follow one another")
                p = call.dropout_arguments()["p"]
                if not isinstance(p, (int, float)):
                    raise _Refused(Kind.PROBABILITY, "its dropout's probability is no number")
            elif call.name in self.graph.CASTS:
                if _dtype(node) != _dtype(call.args[0]):
                    casts.append(_dtype(node))
            elif call.name in self.ROWS:
                if _sizes(node)[-1:] != _sizes(call.args[0])[-1:]:
                    break
            elif call.name != "dropout" and call.name not in self.COPIES:
                break
            self.read.add(node)
            node = call.args[0]
        return node, float(p), casts

    def operator(self, node: Node) -> tuple[tuple[Node, ...], Middle]:
        """(what the activation reads, the activation)"""
        ops, args = torch.ops.fused, node.args
        self.read.add(node)
        if node.target is ops.bias_act.default:
            return args[:1], Middle(args[3])  # type: ignore[arg-type, return-value]
        if node.target is ops.glu.default:
            return args[:2], Middle(args[3], "halves", *args[4:])  # type: ignore[arg-type, return-value]
        if node.target is ops.bias_glu.default:
            return args[:1], Middle(*args[3:])  # type: ignore[arg-type, return-value]
        raise _Refused(Kind.MORE, f"its last linear layer does not read the activation, but {_shown(node)}")

    def linear(self, node: Node, place: str) -> tuple[Linear, Node]:
        """(the layer, what it reads); place: where it is looked for."""
        call = self.call(node)
        self.read.add(node)
        args, kwargs = call.args, call.kwargs
        if call.name == "linear":
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            weight, transposed = self.weight(named["weight"], False)
            return Linear(weight, self.bias(named.get("bias"), node), transposed), named["input"]
        if call.name == "addmm" and len(args) == 3 and not kwargs:
            weight, transposed = self.weight(args[2], True)
            return Linear(weight, self.bias(args[0], node), transposed), args[1]
        if call.name in ("matmul", "mm") and len(args) == 2 and not kwargs:
            weight, transposed = self.weight(args[1], True)
            return Linear(weight, None, transposed), args[0]
        if call.name == "add" and len(args) == 2 and not kwargs and not call.inplace:
            bias, product = sorted(args, key=lambda a: not self.given.get(a))
            layer, source = self.linear(product, place)
            if layer.bias is None and self.given.get(bias):
                return layer._replace(bias=self.bias(bias, node)), source
        raise _Refused(
            Kind.LINEAR,
            f"{place} stands {_shown(node)}, where a linear layer was looked for: F.linear, addmm, x @ w or x @ w + b, "
            "of parameters of the module",
        )

    def weight(self, node: Any, transposed: bool) -> tuple[str, bool]:
        """(the parameter's name, whether it is (in, out))"""
        call = self.call(node)
        flips = call.name in ("t", "transpose", "permute", "swapaxes") or (
            node.target in (torch.ops.aten.numpy_T, torch.ops.aten.mT)
            or (node.target is getattr and node.args[1] in ("T", "mT"))
        )
        if flips and len(_sizes(node)) == 2 and not self.given.get(node):
            self.read.add(node)
            inner = node.args[0]
            same = call.name in ("transpose", "permute", "swapaxes") and not self._swaps(call.args[1:])
            return self.weight(inner, transposed if same else not transposed)
        name = self.given.get(node)
        if not name:
            raise _Refused(
                Kind.LINEAR, f"a linear layer's weight is computed ({_shown(node)}): it is no parameter of its own"
            )
        return name, transposed

    @staticmethod
    def _swaps(axes: tuple[Any, ...]) -> bool:
        flat = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return [axis % 2 for axis in flat] in ([0, 1], [1, 0]) and (
            len(axes) == 2 or [axis % 2 for axis in flat] == [1, 0]
        )

    def bias(self, node: Any, result: Node) -> str | None:
        if node is None:
            return None
        name = self.given.get(node)
        if not name or _sizes(node) != _sizes(result)[-1:]:
            raise _Refused(Kind.LINEAR, f"a linear layer's bias is no vector of its own ({_shown(node)})")
        return name

    def check_rest(self, gm: GraphModule) -> None:
        """Nothing else is done but asking for sizes."""
        for node in gm.graph.nodes:
            if node in self.read or node.op in ("placeholder", "output"):
                continue
            value = node.meta.get("example_value")
            parts = value if isinstance(value, (tuple, list, torch.Size)) else (value,)
            if node.op == "get_attr" or not all(isinstance(part, (int, torch.SymInt)) for part in parts):
                raise _Refused(Kind.MORE, f"its forward also calls {_shown(node)}")


def _with_place(reason: str, gm: GraphModule, given: dict[Node, str]) -> str:
    """The reason, and where the activation stands, if many linear layers are in the module."""
    from torch_fused_ops.lowerings.recognise.graph import Call

    def weights(node: Node, step: Callable[[Node], Any]) -> list[str]:
        """Of the linear layers that come next in a direction."""
        found, pending, seen = [], list(step(node)), set()
        while pending:
            one = pending.pop(0)
            if one in seen:
                continue
            seen.add(one)
            if Call(one).gemm is not None:
                found += [given[a].rpartition(".")[0] for a in one.all_input_nodes if "." in given.get(a, "")]
            else:
                pending += step(one)
        return found

    owners = {name.rpartition(".")[0] for name in given.values() if name}
    for node in gm.graph.nodes:
        if getattr(node.target, "namespace", "") == "fused" and len(owners) > MLPS_MATRICES:
            before, after = weights(node, lambda n: n.all_input_nodes), weights(node, lambda n: n.users)
            names = [", ".join(dict.fromkeys(part)) for part in (before, after)]
            if all(names):
                return f"its activation stands between {names[0]} and {names[1]}, in a module that does more: {reason}"
    return reason


def _check_sizes(x: Any, result: Any) -> None:
    from torch_fused_ops.lowerings.recognise.graph import statically

    a, b = _sizes(x), _sizes(result)
    if len(a) != len(b) or not all(statically(m == n) for m, n in zip(a[:-1], b[:-1], strict=True)):
        raise _Refused(Kind.MORE, "its result has other leading axes than its input")
    shapes = getattr(getattr(_tensor(x), "fake_mode", None), "shape_env", None)
    if shapes is not None and shapes.guards:
        raise _Refused(
            Kind.SIZES, f"its forward depends on its input's sizes: {', '.join(str(g.expr) for g in shapes.guards)}"
        )


def _shown(node: Any) -> str:
    from torch_fused_ops.lowerings.recognise.graph import shown

    return shown(node) if isinstance(node, torch.fx.Node) else repr(node)


def _tensor(node: Any) -> Tensor:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        raise _Refused(Kind.UNRECORDED, f"the capture does not record what {_shown(node)} gives")
    return value


def _dtype(node: Any) -> torch.dtype:
    return _tensor(node).dtype


def _sizes(node: Any) -> tuple[Any, ...]:
    return tuple(_tensor(node).shape)


# ---- the model -------------------------------------------------------------------------------------------------------


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
            if mine and (not isinstance(module, _Replaced) or type(module) is not _class_for(module)):
                raise RuntimeError(f"{path or 'the model'} cannot be put back: its class is now {type(module)!r}")
        for module in self.replaced.values():
            _put_back(module)


def _class_for(module: nn.Module) -> Any:
    original: Any = _original_of(module)
    return _replaced(original)


def _put_back(module: Any) -> None:
    if isinstance(module, _Replaced):
        original: Any = type(module)._original
        module.__class__ = original
    module.__dict__.pop("_fused", None)


def replace_mlps(
    model: nn.Module,
    *args: Any,
    memory: str | Mapping[str, str] = "free",
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
    policy = FusionPolicy(memory=memory, exclude=exclude)  # type: ignore[arg-type]
    paths = _paths(model)
    _check_patterns(policy, [path for several in paths.values() for path in several])
    inputs = _inputs(model, args, kwargs) if args or kwargs else None
    recipes, chosen, sites = _Recipes(), dict[str, nn.Module](), dict[str, Site]()
    settled: list[nn.Module] = []
    unseen: dict[str, None] = {}
    refused: dict[Any, _Refused] = {}
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
            module.__dict__["_fused"] = _Fusing(policy.memory_of(enclosing_modules(paths[id(module)])), recipes)
            module.__class__ = _class_for(module)
    except BaseException:
        for module in done:
            _put_back(module)
        raise
    ordered = tuple(sites[path] for path, _ in model.named_modules() if path in sites)
    report = Replacements(ordered, chosen, type(model).__name__)
    around = enclosing_modules(path for module in chosen.values() for path in paths[id(module)])
    report.notes = tuple(
        f"memory={pattern!r} names no module that was replaced"
        for pattern in policy.memory_patterns
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
    for name, patterns in (("exclude", policy.exclude), ("memory", policy.memory_patterns)):
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
    recipes: _Recipes,
    refused: dict[Any, _Refused],
) -> Site | None:
    """What becomes of a candidate; None if it is no MLP, as far as can be seen."""
    where = f"{type(module).__name__} in {path}" if path else type(module).__name__
    looks = len(_matrices(module)) <= MLPS_MATRICES
    # Blocks have attributes of their own (their number, say): one of a kind is looked at.
    kind = None if looks else (tuple(map(type, module.modules())), tuple(p.shape for p in module.parameters()))
    try:
        pattern = policy.excluding(enclosing_modules(paths))
        if pattern is not None:
            raise _Refused(*excluded(pattern))
        if _are_experts(module):
            raise _Refused(*_STACKED, has_mlp=True)
        _check_module(path, module, compiled)
        if kind in refused:
            raise refused[kind]
        try:
            recipe = _try(module, inputs, recipes)
        except _Refused as refusal:
            if kind is not None:
                refused[kind] = refusal
            raise
    except _Refused as refusal:
        why = refusal.reason
        if not (refusal.has_mlp or (looks and why.kind is not Kind.NO_ACTIVATION)):
            return None
        return Site(None, None, where, str(why), (), path, kind=why.kind, excluded_by=why.excluded_by)
    op = "fused::bias_act" if recipe.middle.layout is None else "fused::bias_glu"
    proof = f"proved from {recipe.proved_from}"
    if policy.memory_patterns:
        proof += f"; memory={policy.memory_of(enclosing_modules(paths))!r}"
    return Site(op, recipe.middle.activation, where, proof, ("linear",), path)


_NO_ACTIVATION = Reason(Kind.NO_ACTIVATION, "there is no activation between linear layers in it")
_STACKED = Reason(
    Kind.STACKED,
    "its weights are stacked, as a mixture's experts are: nn.GroupedMLP computes those (docs/modules.md, Experts), and "
    'torch.compile(model, backend="fused") finds their activations',
)


def _check_module(path: str, module: nn.Module, compiled: Sequence[str]) -> None:
    if isinstance(module, _Replaced):
        raise _Refused(Kind.REPLACED, "it is replaced already")
    if isinstance(module, torch.jit.ScriptModule):
        raise _Refused(Kind.SCRIPT, "it is a script")
    if any(path == outer or not outer or path.startswith(f"{outer}.") for outer in compiled):
        raise _Refused(Kind.COMPILED, "it is compiled already: pick-up reads it there")
    if any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise _Refused(
            Kind.DTENSORS,
            "its weights are DTensors: call replace_mlps before fully_shard; a tensor-parallel plan takes nn.FusedMLP "
            "or nn.MLP instead (docs/distributed.md)",
        )
    for name, inner in module.named_modules():
        if _is_compiled(inner):
            raise _Refused(Kind.COMPILED, f"{name} in it is compiled already")
        if not untouched(inner) and (name or "forward" in inner.__dict__):
            raise _Refused(Kind.HOOKED, f"{name or 'it'}: {_hooked(inner)}, which a fused forward would not run")


def _takes_one(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _try(module: nn.Module, inputs: dict[int, tuple[Any, Any]] | None, recipes: _Recipes) -> Recipe:
    if inputs is not None:
        if id(module) not in inputs:
            raise _Refused(Kind.NOT_CALLED, "it was not called with these inputs")
        args, kwargs = inputs[id(module)]
        given = (*args, *kwargs.values())
        if len(given) == 1:
            return recipes.find(module, given[0])
        refusal = _capture(_twin(module, {}), args, kwargs)[0].refusal()
        raise refusal if refusal.has_mlp else _Refused(*_NO_ACTIVATION)
    if not _takes_one(module):
        raise _Refused(*_uncaptured("more than one argument", inputs=True))
    # Of a linear layer the input size comes second, of GPT-2's Conv1D first.
    matrices = _matrices(module)
    sizes = dict.fromkeys(size for matrix in matrices for size in (matrix.shape[1], matrix.shape[0]))
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    refusals: list[_Refused] = []
    for size in list(sizes)[:3]:
        x = torch.empty(2, 3, size, dtype=matrices[0].dtype, device=matrices[0].device)
        try:
            return recipes.find(module, x.requires_grad_(learns) if x.is_floating_point() else x)
        except _Refused as refusal:
            refusals.append(refusal)
            if refusal.reason.kind not in (Kind.UNCAPTURED, Kind.OTHER_INPUTS):
                raise
    raise refusals[0]
