"""``FusionPolicy``, the settings that ``enable``, ``enabled`` and ``compile_options`` accept."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, get_args

from torch_fused_ops.settings import tiles

_T = TypeVar("_T")
Memory = Literal["off", "free", "fp8", "input", "tiled"]
Attention = Literal["off", "input"]
Checkpoints = Literal["keep", "replace"]
Recipe = Literal["bf16", "fp8", "fp8-wgrad-bf16", "fp8-rowwise", "mxfp8", "mxfp8-wgrad-bf16"]
MEMORY: tuple[str, ...] = get_args(Memory)  # memory levels, usually from most to fewest saved bytes
ATTENTION: tuple[str, ...] = get_args(Attention)
CHECKPOINTS: tuple[str, ...] = get_args(Checkpoints)
GEMM: tuple[str, ...] = get_args(Recipe)  # families/float8/recipes.py defines them
LEVELS = f"{', '.join(MEMORY)}, tiled:N (N: 2 to {tiles.LIMIT})"  # the accepted values, for messages

if TYPE_CHECKING:
    from torch_fused_ops.graphs.sites import Site

    # For type checkers: tiled:N with usual numbers N.
    Tiles = Literal["tiled:2", "tiled:3", "tiled:4", "tiled:6", "tiled:8", "tiled:12", "tiled:16", "tiled:32"]
    Level = Memory | Tiles


class PolicyFields(TypedDict, total=False):
    """``FusionPolicy``'s fields, as the keywords that functions accept instead of a policy."""

    memory: Level | Mapping[str, str]
    dropout: bool
    strict: bool
    exclude: Sequence[str]
    gemm: Recipe | Mapping[str, str]
    attention: Attention | Mapping[str, str]
    checkpoints: Checkpoints | Mapping[str, str]
    offload: bool | Mapping[str, bool]


@dataclass(frozen=True)
class FusionPolicy:
    """The settings of the fusion pass. A policy is frozen and hashable, because every compile key contains it.

    Attributes:
        memory: the memory level: which tensors a training step saves for backward (``docs/memory.md``).
            ``"off"`` leaves the choice to PyTorch. ``"free"`` recomputes pointwise work in backward, never a GEMM.
            ``"fp8"`` also saves the inputs of an MLP's activation as float8_e4m3fn with a scale per row, so gradients
            carry its rounding. ``"input"`` saves the MLP's input instead, and recomputes the GEMM before the
            activation. ``"tiled"`` does the same in tiles of the tokens, forward and backward; ``"tiled:16"`` sets the
            number of tiles. A mapping from module patterns (as in ``exclude``) to levels other than "off" selects a
            level for each MLP: the first match counts, and "free" is the default. Except at "off", a per-row factor
            after the last GEMM, such as a router's weight, is applied before it instead, so the GEMM's result need not
            be saved. If you set ``torch._functorch.config.activation_memory_budget``, it takes precedence.
        dropout: replace active dropouts after linear layers, and after pointwise functions of their results, with
            ``fused::dropout_add``. Backward then needs only a seed, not a mask of a byte per element. Compared to plain
            torch.compile the distribution is equal, but different elements are dropped; ``torch.manual_seed`` works as
            before. Inductor's ``fallback_random`` or ``align_random_eager`` disables it.
        strict: if an MLP site is not fused, raise ``UnfusedError`` at compile time with each reason; if a pass fails,
            raise its error. If False, the reason is logged and the graph stays unchanged. Modules in ``exclude`` do not
            count. A model with linear layers but without a site also raises (``docs/policies.md``, Strict).
        exclude: modules not to fuse, as shell patterns for their paths in the model, e.g. ``("encoder.*",)``.
        gemm: the precision of the linear layers of fused MLPs (``docs/fp8.md``), including ``nn.FusedMLP``. ``"bf16"``
            is the model's dtype. ``"fp8"`` is float8_e4m3fn with a scale per block of 128, in all three GEMMs of a
            training step; weights and their gradients have their usual dtypes. ``"fp8-wgrad-bf16"`` is like "fp8", but
            computes weight gradients in the model's dtype. ``"fp8-rowwise"`` is like "fp8-wgrad-bf16" with a scale per
            row; it supports more devices, and a mixture's experts. ``"mxfp8"`` and ``"mxfp8-wgrad-bf16"`` are like the
            first two float8 recipes with a scale per 32 elements, for Blackwell. A mapping from module patterns to
            recipes selects one for each MLP; "bf16" is the default.
        attention: the memory level of attention. ``"input"`` saves attention's input instead of queries, keys, values
            and the projected result, and recomputes their linear layers in backward, but never attention itself.
            ``"off"`` leaves the choice to PyTorch's partitioner. A mapping from module patterns to levels selects
            linear layers, or all linear layers of a module; "off" is the default.
        checkpoints: whether levels take the place of activation checkpoints (``docs/checkpoints.md``). Inside a
            checkpoint a level has no effect. ``"keep"`` changes no checkpoint. ``"replace"`` drops each checkpoint that
            contains an MLP or attention with a level. "free" is a level, except for MLPs that a mapping does not name.
            Calls that the checkpoint's own policy must save or must recompute stay marked. A mapping from module
            patterns to these values drops the checkpoints of calls in these modules only; "keep" is the default.
        offload: move the tensors that a training step saves for backward to the host's memory, at every level
            (``docs/offload.md``). A mapping from module patterns to True and False selects the modules that compute the
            tensors; False is the default. Needs torch 2.13. ``tfo.plan`` chooses modules for the link's bandwidth.
    """

    memory: Level | Mapping[str, str] | tuple[tuple[str, str], ...] = "free"
    dropout: bool = True
    strict: bool = False
    exclude: Sequence[str] = ()
    gemm: Recipe | Mapping[str, str] | tuple[tuple[str, str], ...] = "bf16"
    attention: Attention | Mapping[str, str] | tuple[tuple[str, str], ...] = "off"
    checkpoints: Checkpoints | Mapping[str, str] | tuple[tuple[str, str], ...] = "keep"
    offload: bool | Mapping[str, bool] | tuple[tuple[str, bool], ...] = False

    def __new__(cls, *args: Any, **fields: Any) -> FusionPolicy:
        for name in fields:
            if name not in FIELDS:
                raise TypeError(f"FusionPolicy's {not_known(name, FIELDS)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _KNOWN:
            object.__setattr__(self, name, _value_or_pairs(name, getattr(self, name)))
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
                refused = f"{name}={getattr(self, name)!r} is not accepted: {pattern!r}"
                if not isinstance(pattern, str):
                    raise TypeError(f"{refused} is not a string pattern")
                # fnmatch would match the [ literally, but no module's name contains a [.
                if "[" in re.sub(r"\[(!.|[^!])[^\]]*\]", "", pattern):
                    raise ValueError(f"{refused} has a [ without a ]")

    @classmethod
    def parse(cls, text: str) -> FusionPolicy:
        """Parse a policy, as in ``TORCH_FUSED_OPS``: ``"memory=fp8,gemm=fp8,strict=true"``.

        Commas separate fields. ``exclude`` may occur several times, each time with a pattern. ``memory``, ``gemm``,
        ``attention``, ``checkpoints`` and ``offload`` also accept PATTERN=VALUE pairs:
        ``"memory=layers.[0-3].*=input,*=fp8"``. From the second pair on, a pattern must contain a character such as "."
        or "*"; otherwise it is read as a field name. ``"1"`` and ``"on"`` mean the default policy.

        Raises:
            TypeError: a field is not known.
            ValueError: a field's value is not known, or the text is not a list of fields.
        """
        if BOOLS.get(text.strip().lower()):
            return cls()
        fields: dict[str, Any] = {}
        name, has_pairs = "", False
        for part in re.split(r",(?![^\[]*\])", text):  # not at a comma inside [...]
            before, (name, equals, value) = name, (word.strip() for word in part.partition("="))
            if has_pairs and re.search(r"\W", name):
                name, value = before, part
            has_pairs = name in _KNOWN and "=" in value
            if not (name and equals and value):
                fitting = [field for field, known in _KNOWN.items() if known.has(name)]
                meant = f"; did you mean {fitting[0]}={name}?" if fitting else ""
                raise ValueError(
                    f"{part.strip()!r} in {text!r} is not accepted: it must be FIELD=VALUE, or the whole text 1{meant}"
                )
            if name == "exclude":
                fields[name] = (*fields.get(name, ()), value)
            elif has_pairs and isinstance(fields.setdefault(name, {}), dict):
                pattern, _, chosen = value.partition("=")
                fields[name][pattern.strip()] = _parsed(name, chosen.strip())
            elif name in fields:
                raise ValueError(f"{text!r} is not accepted: {name} occurs twice")
            elif FIELDS.get(name) == "bool":
                if value.lower() not in BOOLS:
                    raise ValueError(f"{name}={value} is not accepted: it must be true or false")
                fields[name] = BOOLS[value.lower()]
            else:
                fields[name] = _parsed(name, value)
        return cls(**fields)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The module patterns of each field, by the field's name."""
        fields = {name: getattr(self, name) for name in _KNOWN}
        mappings = {name: tuple(dict(value)) for name, value in fields.items() if isinstance(value, tuple)}
        return {"exclude": tuple(self.exclude), **mappings}

    def memory_of(self, modules: Collection[str]) -> str:
        """Return the memory level inside these modules (as ``enclosing_modules`` returns them)."""
        return self._choice("memory", modules, "free")

    def gemm_of(self, modules: Collection[str]) -> str:
        """Return the recipe for an MLP's linear layers inside these modules."""
        return self._choice("gemm", modules, "bf16")

    def attention_of(self, modules: Collection[str]) -> str:
        """Return the memory level of attention's linear layers inside these modules."""
        return self._choice("attention", modules, "off")

    def names_level(self, modules: Collection[str]) -> bool:
        """Return True if ``memory`` names a level for these modules, "free" included. Return False at "off"."""
        return self._choice("memory", modules, "off") != "off"

    def replaces_checkpoints(self, modules: Collection[str]) -> bool:
        """Return True if a level inside these modules takes the place of a checkpoint."""
        return self._choice("checkpoints", modules, "keep") == "replace"

    def offloads(self, modules: Collection[str]) -> bool:
        """Return True if tensors that these modules compute move to the host."""
        return self._choice("offload", modules, False)

    def decisions(self, modules: Collection[str]) -> tuple[Any, ...]:
        """Return the patterns' choices inside these modules. Compile keys need them: a graph may lack module paths."""
        return *(self._choice(name, modules, "") for name in _KNOWN), self.excluding(modules)

    def _choice(self, name: str, modules: Collection[str], otherwise: _T) -> _T:
        value = getattr(self, name)
        chosen: _T = value
        if isinstance(value, tuple):
            chosen = next((choice for pattern, choice in value if names_module(pattern, modules)), otherwise)
        return chosen

    def excluding(self, modules: Collection[str]) -> str | None:
        """Return the first pattern of ``exclude`` that matches a module in ``modules``, or None without a match."""
        return next((pattern for pattern in self.exclude if names_module(pattern, modules)), None)


FIELDS: dict[str, str] = dict(FusionPolicy.__annotations__)  # field names to types as text
BOOLS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def not_known(name: str, accepted: Iterable[str], besides: Iterable[str] = ()) -> str:
    """Return an unknown name's error text: a close match from both lists, and the ``accepted`` names."""
    accepted = tuple(accepted)
    near = difflib.get_close_matches(name, (*accepted, *besides), 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name!r} is not known{meant} (accepted: {', '.join(accepted)})"


def is_level(memory: object) -> bool:
    """Return True if ``memory`` is a memory level: one of ``MEMORY``, or "tiled:N" with N >= 2."""
    return isinstance(memory, str) and (memory in MEMORY or tiles.requested_tiles(memory) is not None)


class _Known(NamedTuple):
    has: Callable[[object], bool]
    accepted: str  # for messages
    noun: str


# Fields that may be mappings from module patterns, and the accepted values. A mapping rejects memory level "off".
_KNOWN = {
    "memory": _Known(is_level, LEVELS, "level"),
    "gemm": _Known(GEMM.__contains__, ", ".join(GEMM), "recipe"),
    "attention": _Known(ATTENTION.__contains__, ", ".join(ATTENTION), "level"),
    "checkpoints": _Known(CHECKPOINTS.__contains__, ", ".join(CHECKPOINTS), "value"),
    "offload": _Known(lambda value: isinstance(value, bool), "True, False", "value"),
}


def check_known(name: str, value: object) -> None:
    """Raise a ValueError if the field ``name``, for instance "memory", does not accept ``value``."""
    if not _KNOWN[name].has(value):
        raise ValueError(f"{name}={value!r} is not known; accepted: {_KNOWN[name].accepted}")


def _parsed(name: str, text: str) -> str | bool:
    """Return a field's value that is written as text. Unknown values stay text, and are rejected later."""
    return BOOLS.get(text.lower(), text) if name == "offload" else text


def _value_or_pairs(name: str, value: object) -> object:
    has, accepted, noun = _KNOWN[name]
    if isinstance(value, str) or has(value):
        check_known(name, value)
        return value
    try:
        pairs = tuple((pattern, chosen) for pattern, chosen in dict(value).items())  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}={value!r} is not accepted: it must be a {noun} ({accepted}), or a mapping from module patterns to "
            f"{noun}s"
        ) from None
    for pattern, chosen in pairs:
        off = name == "memory" and chosen == "off"
        if off or not has(chosen):
            raise ValueError(
                f"{name}={chosen!r} for {pattern!r} is not accepted; accepted: "
                + (accepted.removeprefix("off, ") if name == "memory" else accepted)
                + ("; 'off' is for a whole model only" if off else "")
            )
    return pairs


def enclosing_modules(paths: Iterable[str]) -> set[str]:
    """Return these module paths and the paths of all modules around them; "" is the whole model."""
    parts = [path.split(".") for path in paths]
    return {"", *(".".join(names[: i + 1]) for names in parts for i in range(len(names)))}


def modules_of_site(site: Site) -> set[str]:
    """Return the paths of the modules that contain a site's activation, and of its MLP."""
    return enclosing_modules((site.module, site.source.partition(" in ")[2]))


def names_module(pattern: str, modules: Collection[str]) -> bool:
    """Return True if a shell pattern matches one of the module paths; ``"encoder.*"`` also matches the encoder."""
    return any(fnmatchcase(path, p) for path in modules for p in (pattern, pattern.removesuffix(".*")))


# Fields whose patterns may match modules other than MLPs, and the names of these modules in notes:
_FIELDS_BESIDE_MLPS = {"attention": "attention", "checkpoints": "checkpoint", "offload": "module"}


def unmatched(
    policy: FusionPolicy,
    sites: Sequence[Site],
    inner: Iterable[str] = (),
    by_field: Mapping[str, Collection[str]] | None = None,
) -> tuple[str, ...]:
    """Return notes on the policy's patterns that do not match a site, such as typos or patterns for another model.

    Args:
        policy: the policy whose patterns are checked.
        sites: the model's sites.
        inner: known paths of modules inside these sites, which patterns may also match.
        by_field: the paths of the modules with attention, of the modules inside checkpoints, and of all modules, by
            field: "attention", "checkpoints", "offload". Patterns of a missing field are not checked.
    """
    modules = enclosing_modules(inner).union(*map(modules_of_site, sites))
    excluding = {site.excluded_by for site in sites}  # a pattern may also match a linear layer's module
    site_modules = joined_each(site.source.partition(" in ")[2] for site in sites) or "none"
    notes = []
    pairs = [(name, pattern) for name, patterns in policy.patterns.items() for pattern in patterns]
    for name, pattern in pairs:
        if name in _FIELDS_BESIDE_MLPS:
            if by_field and name in by_field and not names_module(pattern, enclosing_modules(by_field[name])):
                places = joined_each(by_field[name]) or "none"
                notes.append(f"{name}={pattern!r} matches no {_FIELDS_BESIDE_MLPS[name]}; the modules are {places}")
        elif not (name == "exclude" and pattern in excluding) and not names_module(pattern, modules):
            near = difflib.get_close_matches(pattern.removesuffix(".*"), modules)
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            notes.append(f"{name}={pattern!r} matches no site's modules; the sites' modules are {site_modules}{meant}")
    return tuple(notes)


def without_numbers(path: str) -> str:
    """Replace numbers in a module's path, so that all layers have equal paths: "layers.#.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", path)


def joined_paths(paths: Iterable[str]) -> str:
    """Join paths that differ only in numbers: "layers.0…31.mlp", "layers.1,5,9.mlp". Many numbers become "1…9"."""
    names = []
    for same_place in zip(*(path.split(".") for path in paths), strict=True):
        if len(set(same_place)) == 1:
            names.append(same_place[0])
            continue
        numbers = sorted({int(name) for name in same_place})
        dense = numbers[-1] - numbers[0] == len(numbers) - 1
        is_range = len(numbers) > 4 or (dense and len(numbers) > 2)
        names.append(f"{numbers[0]}…{numbers[-1]}" if is_range else ",".join(map(str, numbers)))
    return ".".join(names)


def joined_each(paths: Iterable[str]) -> str:
    """Join each group of paths that differ only in numbers: "layers.0…31.mlp, head". "" is the model itself."""
    return ", ".join(joined_paths(group) or "the model itself" for group in alike(paths, without_numbers))


def alike(items: Iterable[_T], key: Callable[[_T], object]) -> Iterable[list[_T]]:
    """Group items with equal keys, in the order of each group's first item."""
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


class UnfusedError(RuntimeError):
    """Under ``strict=True``, an MLP is not fused, a model has no site, or a part of the policy has no effect.

    Dynamo raises ``torch._dynamo.exc.BackendCompilerFailed`` with this error as ``inner_exception``. If the error is
    about a model of several graphs as a whole, it is raised directly, at the end of the first call.
    """


def policy_given(name: str, policy: FusionPolicy | None, fields: Mapping[str, object]) -> FusionPolicy | None:
    """Return the policy, or a policy with these fields. Return None if there is neither.

    Args:
        name: the function that was called, for messages.
        policy: a policy or None.
        fields: a policy's fields, if policy is None.

    Raises:
        TypeError: policy and fields are both given, or policy is not a FusionPolicy. FusionPolicy raises other errors.
    """
    if fields and policy is not None:
        raise TypeError(f"{name}: both a policy and {', '.join(fields)} are given; it must be one or the other")
    if fields:
        return FusionPolicy(**fields)  # type: ignore[arg-type]
    return None if policy is None else policy_or_default(policy)


def policy_or_default(policy: FusionPolicy | None) -> FusionPolicy:
    """Return ``policy``, or ``FusionPolicy()`` if it is None. Raise a TypeError if it has another type."""
    if policy is None:
        return FusionPolicy()
    if not isinstance(policy, FusionPolicy):
        known = (name for name in _KNOWN if isinstance(policy, str) and _KNOWN[name].has(policy))
        meant = [f"FusionPolicy({name}={policy!r})" for name in known]
        raise TypeError(
            f"policy={policy!r} is not accepted: it must be a FusionPolicy or None"
            + (f"; did you mean {' or '.join(meant)}?" if meant else "")
        )
    return policy
