"""What the compiler plug-in may do: the policy that a user hands to ``enable``, ``enabled`` or ``compile_options``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FusionPolicy", "UnfusedError", "policy_or_default"]

MEMORY = ("free", "off")


@dataclass(frozen=True)
class FusionPolicy:
    """What pick-up may do. Frozen and hashable: it is part of every compile key.

    Attributes:
        memory: what a compiled training step keeps for backward. ``"free"`` rebuilds in backward whatever costs only
            pointwise work (never a GEMM); ``"off"`` leaves upstream's choice. A budget that you set yourself
            (``torch._functorch.config.activation_memory_budget``) always wins.
        dropout: whether an active dropout next to an MLP's activation may be fused by meaning. Reserved for the dropout
            operators: now, an activation in front of an active dropout is fused and the dropout itself stays as it is.
        strict: raise at compile time where an MLP site is left unfused (``UnfusedError``) or a pass fails, naming each
            reason, instead of logging it and going on with the graph as it was. What ``exclude`` names is no miss.
        exclude: module paths to leave alone, as shell patterns against the path in the model, e.g. ``("encoder.*",)``.
    """

    memory: str = "free"
    dropout: bool = True
    strict: bool = False
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory not in MEMORY:
            raise ValueError(f"memory={self.memory!r} is not known; accepted: {', '.join(MEMORY)}")
        for name in ("dropout", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not accepted: it must be True or False")
        if isinstance(self.exclude, str):
            raise TypeError(
                f"exclude={self.exclude!r} is not accepted: it must be a sequence of patterns, e.g. ('encoder.*',)"
            )
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for pattern in self.exclude:
            if not isinstance(pattern, str):
                raise TypeError(f"exclude={self.exclude!r} is not accepted: {pattern!r} is not a string pattern")


class UnfusedError(RuntimeError):
    """Under ``FusionPolicy(strict=True)``: MLP sites were left unfused. The message names each and its reason.

    Dynamo raises ``torch._dynamo.exc.BackendCompilerFailed``, whose ``inner_exception`` it is.
    """


def policy_or_default(policy: FusionPolicy | None) -> FusionPolicy:
    """``policy``, or ``FusionPolicy()`` for None; TypeError for anything else."""
    if policy is None:
        return FusionPolicy()
    if not isinstance(policy, FusionPolicy):
        raise TypeError(f"policy={policy!r} is not accepted: it must be a FusionPolicy or None")
    return policy
