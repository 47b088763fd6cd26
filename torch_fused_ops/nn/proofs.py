"""Proofs that a module's forward is a recipe, and the situation and state that each holds for.

A recipe holds for the *situation* it was proved in: the module's attributes, training flags and parameters' shapes and
dtypes, the input's dtype and number of axes, grad mode and autocast; and for the *state* that the forward read besides:
configurations, classes, globals, closures. With a new situation or state it is proved again, once; where it is refused,
and wherever something was hooked, wrapped or put in place since, the module's own ``forward`` runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fused_ops.capturing import throwaway, unchanged
from torch_fused_ops.nn.fused_mlp import untouched
from torch_fused_ops.nn.reading import read, with_place
from torch_fused_ops.nn.recipes import Recipe, Refused
from torch_fused_ops.nn.replaced import Replaced, original_of
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reasons import Kind, Reason
from torch_fused_ops.sites import Site

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Fusing", "Recipes", "capture", "hooked", "twin_of", "uncaptured"]

log = logging.getLogger("torch_fused_ops")

MAX_PROOFS = 64  # of a module, one for each situation: an attribute that changes with every call must not cost one each

# ---- situations ------------------------------------------------------------------------------------------------------


class Fusing:
    """What a replaced module knows: its level, what it multiplies in, and the recipes by situation.

    A copy of it starts without recipes.
    """

    def __init__(self, memory: str, gemm: str = "bf16", recipes: Recipes | None = None) -> None:
        self.memory, self.gemm = memory, gemm
        self.recipes = Recipes() if recipes is None else recipes
        self.proofs = 0

    def __reduce__(self) -> Any:
        return Fusing, (self.memory, self.gemm)

    def recipe(self, module: nn.Module, x: Any) -> Recipe | None:
        """What to follow, or None: the module's own forward."""
        known = self.recipes.made
        try:
            return self.recipes.find(module, x, self.proofs < MAX_PROOFS)
        except Refused:
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

    result: Recipe | Refused
    state: _State | None  # None: it stays, whatever changes
    alive: nn.Module  # the twin, as situations name attributes by their ids


class Recipes:
    """Proofs by situation, shared by the modules that were replaced together."""

    def __init__(self) -> None:
        self.found: dict[Any, list[_Proof]] = {}
        self.made = 0

    def find(self, module: nn.Module, x: Any, prove: bool = True) -> Recipe:
        """The recipe for a module and an input like x: one that is known, or else proved now.

        Raises:
            Refused: there is none.
        """
        key = _situation(module, x)
        for proof in self.found.get(key, ()):
            if proof.state is None or proof.state.is_unchanged():
                break
        else:
            if not prove:
                raise Refused(Kind.SITUATIONS, "it was in too many situations already")
            proof = _prove(module, x)
            self.found.setdefault(key, []).append(proof)
            self.made += 1
            if isinstance(proof.result, Refused):
                log.info("%s runs its own forward: %s", type(module).__name__, proof.result)
        if isinstance(proof.result, Refused):
            raise Refused(*proof.result.reason, has_mlp=proof.result.has_mlp)  # each raised once
        return proof.result


_BASE = frozenset(nn.Module().__dict__) - {"training"} | {"_fused"}
_PLAIN = (bool, int, float, str, type(None))


def _situation(module: nn.Module, x: Any) -> tuple[Any, ...]:
    """All that a proof may have depended on.

    Raises:
        Refused: there is no fused way here at all.
    """
    if type(x) not in (Tensor, nn.Parameter) or x.ndim == 0 or x.numel() == 0:
        raise Refused(Kind.INPUT, "its input is no plain tensor, or empty")
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        raise Refused(Kind.AT_WORK, "a torch.func transform or a tracer is at work")
    if torch.autograd.forward_ad._current_level >= 0 or nn.modules.module._has_any_global_hook():
        raise Refused(Kind.AT_WORK, "forward-mode derivatives or global module hooks are at work")
    if isinstance(module, Replaced) and len(members := vars(type(module))) != len(module._members):
        added = [name for name in members.keys() - module._members if not name.startswith("__")]
        if added:
            raise Refused(
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
        raise Refused(Kind.HOOKED, f"{hooked(module)}, which its fused forward would not run")
    if id(module) in seen:
        return (seen[id(module)],)
    seen[id(module)] = len(seen)
    kind = original_of(module)
    own = tuple([(name, _token(value)) for name, value in module.__dict__.items() if name not in _BASE])
    tensors: list[tuple[Any, ...]] = []
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is None:
            tensors.append((name,))
            continue
        if type(t) not in (Tensor, nn.Parameter):
            raise Refused(Kind.SUBCLASS, f"{name} is a {type(t).__name__}: tensor subclasses are left alone")
        tensors.append((name, seen.setdefault(id(t), len(seen)), t.shape, t.dtype, t.device, t.requires_grad))
    children = [(name, c and _structure(c, seen)) for name, c in module._modules.items()]
    return (kind, kind.forward, own, *tensors, *children)


def hooked(module: nn.Module) -> str:
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
    twin = twin_of(module, made)
    with torch.utils._python_dispatch._disable_current_modes():
        before = _structure(twin, {}, True)
        reading, state = capture(twin, (_like(x),), {})
    result: Recipe | Refused
    try:
        if reading.recipe is None:
            result = reading.refusal()
        elif _structure(twin, {}, True) != before:
            result = Refused(Kind.ATTRIBUTES, "its forward changes the module's attributes")
        else:
            result = reading.recipe.examined(twin)
    except Refused as refusal:
        result = refusal.with_traceback(None)
    for inner in made.values():  # neither situations nor what is watched name tensors: they may go
        for tensors in (inner._parameters, inner._buffers):
            tensors.update(dict.fromkeys(tensors))
    fault = state.fault()
    if fault and isinstance(result, Recipe):
        result = Refused(Kind.UNWATCHED, f"its forward reads what it changes, or what cannot be watched: {fault}")
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


def twin_of(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A copy that shares everything but the modules themselves: what a forward sets on itself, it sets on that."""
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(original_of(module))
        twin.__dict__.update(module.__dict__)
        for name, value in module.__dict__.items():
            if type(value) in (dict, list, set) or (name in _BASE and isinstance(value, dict)):
                twin.__dict__[name] = value.copy()
        twin.__dict__.pop("_fused", None)
        for name, child in module._modules.items():
            twin._modules[name] = child if child is None else twin_of(child, made)
    return made[id(module)]


class _Reading:
    """One capture: the recipe, or why there is none."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.sites: tuple[Site, ...] = ()
        self.reason = Reason(Kind.DISABLED, "Dynamo did not capture it (is it disabled?)")

    def refusal(self) -> Refused:
        return Refused(*self.reason, has_mlp=any(site.is_mlp for site in self.sites))


def capture(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Reading, _State]:
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
                    raise Refused(Kind.ARGUMENTS, f"it is called with {several} arguments")
                reading.recipe = read(gm, source, given, reading.sites)
            except Refused as refusal:  # here, before Dynamo's code goes on to what the forward does to its arguments
                raise Refused(refusal.reason.kind, with_place(str(refusal), gm, given)) from None
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
    except Refused as refusal:
        reading.recipe, reading.reason = None, refusal.reason
    except Exception as error:
        log.debug("a module could not be captured", exc_info=True)
        own = not isinstance(error, torch._dynamo.exc.Unsupported) or any(text in str(error) for text in _ITS_OWN)
        reading.recipe, reading.reason = None, uncaptured(_first_line(error), inputs=own)
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


def uncaptured(what: str, inputs: bool) -> Reason:
    """Why a forward was not captured; ``inputs``: because of what it was called with."""
    kind, needs = (Kind.OTHER_INPUTS, "it needs other inputs: ") if inputs else (Kind.UNCAPTURED, "")
    return Reason(kind, f"it cannot be captured in one graph: {needs}{what}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]
