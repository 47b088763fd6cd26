"""What the compiler plug-in may do: the policy that a user hands to ``enable``, ``enabled`` or ``compile_options``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from torch_fused_ops import tiles
from torch_fused_ops.float8_recipes import RECIPES

__all__ = [
    "BOOLS",
    "FIELDS",
    "FusionPolicy",
    "PolicyFields",
    "UnfusedError",
    "check_known",
    "check_not_meant",
    "enclosing_modules",
    "is_level",
    "names_module",
    "not_known",
    "policy_given",
    "policy_or_default",
]

MEMORY = ("off", "free", "fp8", "input", "tiled")  # the levels, each with less in memory than the one before
LEVELS = f"{', '.join(MEMORY)}, tiled:N (N: 2 to {tiles.LIMIT})"  # all that is accepted, in messages
EPILOGUES = ("measured", "library", "off")
GEMM = ("bf16", *RECIPES)

if TYPE_CHECKING:  # the same for type checkers, which take nothing computed; of tiled:N the usual numbers
    Tiles = Literal["tiled:2", "tiled:3", "tiled:4", "tiled:6", "tiled:8", "tiled:12", "tiled:16", "tiled:32"]
    Level = Literal["off", "free", "fp8", "input", "tiled"] | Tiles
    Recipe = Literal["bf16", "fp8", "fp8-wgrad-bf16", "fp8-rowwise", "mxfp8", "mxfp8-wgrad-bf16"]
    Epilogues = Literal["measured", "library", "off"]


class PolicyFields(TypedDict, total=False):
    """``FusionPolicy``'s fields, as keywords of the calls that take them in a policy's place."""

    memory: Level | Mapping[str, str]
    dropout: bool
    strict: bool
    exclude: Sequence[str]
    epilogues: Epilogues
    gemm: Recipe | Mapping[str, str]


@dataclass(frozen=True)
class FusionPolicy:
    """What pick-up may do. Frozen and hashable: it is part of every compile key.

    Attributes:
        memory: what a compiled training step keeps for backward (``docs/memory.md``). ``"off"`` leaves upstream's
            choice. ``"free"`` rebuilds in backward whatever costs only pointwise work, never a GEMM. ``"fp8"``: and
            what an MLP's activation reads is kept as float8_e4m3fn with a scale a row; gradients then carry its
            rounding. ``"input"``: what an MLP's activation reads is not kept, and the GEMM in front of it is
            computed again in backward, from the MLP's own input. ``"tiled"``: and both are done in tiles of its tokens,
            one after the other, forward and backward; ``"tiled:16"`` says how many. A mapping from module patterns (as
            in ``exclude``) to any of them but "off" chooses for each MLP; the first that fits counts, and what none
            names is "free". At all but "off" a factor of each row behind an MLP's last product, a router's weight say,
            moves in front of it: the product's result is not kept then. A budget that you set yourself
            (``torch._functorch.config.activation_memory_budget``) always wins.
        dropout: whether active dropouts of linear layers and of fused activations become ``fused::dropout_add``, with
            the residual that they are added to. Nothing but a seed is kept for backward then, where a mask is a byte
            an element; other elements are dropped than plain torch.compile drops, by the same distribution, and
            ``torch.manual_seed`` decides as before. Never under inductor's ``fallback_random``.
        strict: raise at compile time where an MLP site is left unfused (``UnfusedError``) or a pass fails, naming each
            reason, instead of logging it and going on with the graph as it was. What ``exclude`` names is no miss. And
            raise where a model has linear layers, but no site at all (``docs/policies.md``, Strict).
        exclude: module paths to leave alone, as shell patterns against the path in the model, e.g. ``("encoder.*",)``.
        epilogues: whether a linear layer and its activation (relu, tanh's GELU) may be one call of cuBLASLt, at
            inference on CUDA (``docs/epilogues.md``). ``"measured"``: under max-autotune, where it is the fastest way;
            without, nothing changes. ``"library"``: wherever it is possible, unmeasured. ``"off"``: never.
        gemm: what the linear layers of an MLP that is picked up multiply in (``docs/fp8.md``), and of one whose
            activation is this library's operator already, as ``nn.FusedMLP``'s. ``"bf16"``: what the model has.
            ``"fp8"``: float8_e4m3fn with a scale for each block of 128, in all three products of a training step;
            weights and their gradients stay in their own dtypes. ``"fp8-wgrad-bf16"``: and the weights' gradients are
            products in the model's dtype. ``"fp8-rowwise"``: so, too, with a scale for each row, which more devices
            have, and a mixture's experts too. ``"mxfp8"``, ``"mxfp8-wgrad-bf16"``: as the first two, with a scale for
            each 32 elements, for Blackwell. A mapping from module patterns chooses for each MLP; what none names is
            "bf16".
    """

    memory: Level | Mapping[str, str] | tuple[tuple[str, str], ...] = "free"
    dropout: bool = True
    strict: bool = False
    exclude: Sequence[str] = ()
    epilogues: Epilogues = "measured"
    gemm: Recipe | Mapping[str, str] | tuple[tuple[str, str], ...] = "bf16"

    def __new__(cls, *args: Any, **fields: Any) -> FusionPolicy:
        for name in fields:
            if name not in FIELDS:
                raise TypeError(f"FusionPolicy's {not_known(name, FIELDS)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _KNOWN:
            value = getattr(self, name)
            if isinstance(value, str):
                check_known(name, value)
            else:
                object.__setattr__(self, name, _pairs(name, value))
        if self.epilogues not in EPILOGUES:
            raise ValueError(f"epilogues={self.epilogues!r} is not known; accepted: {', '.join(EPILOGUES)}")
        for name in ("dropout", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not accepted: it must be True or False")
        if isinstance(self.exclude, str):
            raise TypeError(
                f"exclude={self.exclude!r} is not accepted: it must be a sequence of patterns, e.g. ('encoder.*',)"
            )
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name, patterns in self.patterns.items():
            for pattern in patterns:
                _check_pattern(name, getattr(self, name), pattern)

    @classmethod
    def parse(cls, text: str) -> FusionPolicy:
        """A policy from text, as ``TORCH_FUSED_OPS`` has it: ``"memory=fp8,gemm=fp8,strict=true"``.

        Fields are separated by commas; ``exclude`` may stand several times, a pattern each; ``"1"`` and ``"on"`` are
        the default policy. Mappings from module patterns are for Python.

        Raises:
            TypeError: a field is not known.
            ValueError: its value is not, or the text is no list of fields.
        """
        if BOOLS.get(text.strip().lower()):
            return cls()
        fields: dict[str, Any] = {}
        for part in re.split(r",(?![^\[]*\])", text):  # not at a comma inside [...]
            name, equals, value = (word.strip() for word in part.partition("="))
            if not (name and equals and value):
                meant = next((f"; did you mean {field}={name}?" for field in _KNOWN if _KNOWN[field].has(name)), "")
                raise ValueError(
                    f"{part.strip()!r} in {text!r} is not accepted: it must be FIELD=VALUE, or the text be 1{meant}"
                )
            if name == "exclude":
                fields[name] = (*fields.get(name, ()), value)
            elif name in fields:
                raise ValueError(f"{text!r} is not accepted: {name} stands in it twice")
            elif FIELDS.get(name) == "bool":
                if value.lower() not in BOOLS:
                    raise ValueError(f"{name}={value} is not accepted: it must be true or false")
                fields[name] = BOOLS[value.lower()]
            else:
                fields[name] = value
        return cls(**fields)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The module patterns of each field that has some, by its name."""
        fields = {name: getattr(self, name) for name in _KNOWN}
        mappings = {name: tuple(dict(value)) for name, value in fields.items() if not isinstance(value, str)}
        return {"exclude": tuple(self.exclude), **mappings}

    def memory_of(self, modules: Collection[str]) -> str:
        """The memory level of what is in these modules (all around it, as ``enclosing_modules`` gives them)."""
        return self._of("memory", modules, "free")

    def gemm_of(self, modules: Collection[str]) -> str:
        """What the linear layers of an MLP in these modules multiply in."""
        return self._of("gemm", modules, "bf16")

    def decisions(self, modules: Collection[str]) -> tuple[str, str, str | None]:
        """All that patterns decide for what is in these modules: compile keys of graphs without paths lack it."""
        return self.memory_of(modules), self.gemm_of(modules), self.excluding(modules)

    def _of(self, name: str, modules: Collection[str], otherwise: str) -> str:
        value = getattr(self, name)
        if isinstance(value, str):
            return value
        return next((one for pattern, one in value if names_module(pattern, modules)), otherwise)

    def excluding(self, modules: Collection[str]) -> str | None:
        """The first pattern of ``exclude`` that fits what is in these modules (all around it); None if none does."""
        return next((pattern for pattern in self.exclude if names_module(pattern, modules)), None)


FIELDS: dict[str, str] = dict(FusionPolicy.__annotations__)  # and their types, as they are written
BOOLS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def not_known(name: str, accepted: Iterable[str], besides: Iterable[str] = ()) -> str:
    """What an error says of a name that is not known: which one is meant, maybe, and all but those ``besides``."""
    accepted = tuple(accepted)
    near = difflib.get_close_matches(name, (*accepted, *besides), 1)
    return f"{name!r} is not known{f'; did you mean {near[0]!r}?' if near else ''} (accepted: {', '.join(accepted)})"


def check_not_meant(name: str, accepted: Callable[..., Any], given: Iterable[str]) -> None:
    """TypeError for keywords that are a policy's fields, nearly at least, on their way to a model that takes none such.

    Args:
        name: whose keywords they are, in the message.
        accepted: the model.
        given: the keywords.
    """
    try:
        parameters = inspect.signature(getattr(accepted, "forward", accepted)).parameters
    except (TypeError, ValueError):  # a callable that does not say
        return
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for keyword in given:
        near = difflib.get_close_matches(keyword, FIELDS, 1, 0.8)
        if near and keyword not in parameters and not (any_name and keyword in FIELDS):
            raise TypeError(f"{name}: the model takes no {keyword!r}; did you mean FusionPolicy's {near[0]}?")


def is_level(memory: object) -> bool:
    """Whether it is a memory level: one of ``MEMORY``, or "tiled:N" with N tiles, from 2."""
    return isinstance(memory, str) and (memory in MEMORY or tiles.asked(memory) is not None)


class _Known(NamedTuple):
    has: Callable[[object], bool]
    accepted: str  # in messages
    noun: str


# The fields that may be mappings from module patterns, and what they take. "off" is for a whole model.
_KNOWN = {
    "memory": _Known(is_level, LEVELS, "level"),
    "gemm": _Known(lambda value: isinstance(value, str) and value in GEMM, ", ".join(GEMM), "recipe"),
}


def check_known(name: str, value: object) -> None:
    """ValueError for what is no memory level (``name`` is "memory"), or nothing to multiply in ("gemm")."""
    if not _KNOWN[name].has(value):
        raise ValueError(f"{name}={value!r} is not known; accepted: {_KNOWN[name].accepted}")


def _pairs(name: str, value: object) -> tuple[tuple[str, str], ...]:
    has, accepted, noun = _KNOWN[name]
    try:
        pairs = tuple((pattern, one) for pattern, one in dict(value).items())  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}={value!r} is not accepted: it must be a {noun} ({accepted}), or a mapping from module patterns to "
            f"{noun}s"
        ) from None
    for pattern, one in pairs:
        if one == "off" or not has(one):
            raise ValueError(
                f"{name}={one!r} for {pattern!r} is not accepted; accepted: {accepted.removeprefix('off, ')}"
                + ("; 'off' is for all of a model, not for a part of it" if one == "off" else "")
            )
    return pairs


def _check_pattern(name: str, value: object, pattern: object) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"{name}={value!r} is not accepted: {pattern!r} is not a string pattern")
    # fnmatch takes it for itself, and no module has it in its name.
    if "[" in re.sub(r"\[(!.|[^!])[^\]]*\]", "", pattern):
        raise ValueError(f"{name}={value!r} is not accepted: {pattern!r} has a [ without its ]")


def enclosing_modules(paths: Iterable[str]) -> set[str]:
    """These module paths and those of all modules around them; "" is the whole model."""
    parts = [path.split(".") for path in paths]
    return {"", *(".".join(names[: i + 1]) for names in parts for i in range(len(names)))}


def names_module(pattern: str, modules: Collection[str]) -> bool:
    """Whether a shell pattern fits one of the module paths; ``"encoder.*"`` fits the encoder, too."""
    return any(fnmatchcase(path, p) for path in modules for p in (pattern, pattern.removesuffix(".*")))


class UnfusedError(RuntimeError):
    """Under ``FusionPolicy(strict=True)``: MLP sites were left unfused, or none was found. The message says why.

    Dynamo raises ``torch._dynamo.exc.BackendCompilerFailed``, whose ``inner_exception`` it is; but where none was found
    in a model of several graphs: that is known when its first call ends.
    """


def policy_given(name: str, policy: FusionPolicy | None, fields: Mapping[str, object]) -> FusionPolicy | None:
    """The policy, or that of its fields; None where neither is given.

    Args:
        name: who takes it, in messages.
        policy: a whole one.
        fields: a policy's, in its place.

    Raises:
        TypeError: both are given, or what is not a policy; and FusionPolicy's own.
    """
    if fields and policy is not None:
        raise TypeError(f"{name} has a policy, and {', '.join(fields)} besides: it must be the one or the other")
    if fields:
        return FusionPolicy(**fields)  # type: ignore[arg-type]
    return None if policy is None else policy_or_default(policy)


def policy_or_default(policy: FusionPolicy | None) -> FusionPolicy:
    """``policy``, or ``FusionPolicy()`` for None; TypeError for anything else."""
    if policy is None:
        return FusionPolicy()
    if not isinstance(policy, FusionPolicy):
        meant = [f"FusionPolicy({name}={policy!r})" for name, known in _KNOWN.items() if known.has(policy)]
        raise TypeError(
            f"policy={policy!r} is not accepted: it must be a FusionPolicy or None"
            + (f"; did you mean {' or '.join(meant)}?" if meant else "")
        )
    return policy
