"""What stage 1 says of a place in a graph, for all who read it: a ``Site``, and the module that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from torch_fused_ops.reasons import Kind

__all__ = ["DROPOUT", "Site"]

DROPOUT = "dropout"  # a site's activation, where the site is a dropout


@dataclass(frozen=True)
class Site:
    """A place where a GEMM reads a nonlinear pointwise function of what GEMMs produced; or a linear layer's dropout.

    Attributes:
        op: the operator that it became, e.g. ``"fused::glu"``; None where it was left alone.
        activation: the activation's name in the table, where it was proved to be one; ``"dropout"`` for a dropout.
        source: ``"file.py:line in module.path"``.
        reason: for people: what was proved, and from which functions; or why it was left alone.
        users: the functions that read the value.
        module: the path, in the model, of the innermost module that holds the activation and the GEMM: the MLP.
        location: where the activation is called, ``"/full/path/file.py:line"``; "" if the graph does not record it.
        code: the text of that line.
        spelling: the functions between the GEMMs, as the model calls them.
        kind: the reason's kind, where it was left alone; None where it became an operator.
        excluded_by: the policy's pattern that excludes it; "" where none does.
        gemm: what the linear layers around it multiply in, where the policy asks for float8 and some of them do; else
            "".
        gemm_reason: for people: those that do not, and why; "" where all do, or none was asked to.
        gemm_kind: the kind of the first of those reasons.
        tiles: how many tiles its tokens are cut into, where the policy asks for tiles; 0 where it does not.
        tiles_reason: for people: why there is but one; "" where there are more, or none was asked for.
        tiles_kind: the kind of that reason.
        memory: the policy's memory level there, where the operator's input would be kept for backward; else "".
    """

    op: str | None
    activation: str | None
    source: str
    reason: str
    users: tuple[str, ...]
    module: str = ""
    location: str = ""
    code: str = ""
    spelling: tuple[str, ...] = ()
    kind: Kind | None = None
    excluded_by: str = ""
    gemm: str = ""
    gemm_reason: str = ""
    gemm_kind: Kind | None = None
    tiles: int = 0
    tiles_reason: str = ""
    tiles_kind: Kind | None = None
    memory: str = ""

    @property
    def is_mlp(self) -> bool:
        """Whether the site counts: an MLP's activation, fused or left alone. A dropout is listed, and counts apart."""
        return self.activation != DROPOUT and (self.kind is None or self.kind.is_mlp)

    @property
    def is_missed(self) -> bool:
        """Whether ``strict`` counts it: an MLP that was left alone, or all of its linear layers were, where the policy
        asks for float8, or was left whole, where it asks for tiles; and not because the policy says so."""
        if self.op is not None:
            whole = self.tiles_kind is not None and not self.tiles_kind.is_requested
            return whole or (self.gemm_kind is not None and not self.gemm)
        return self.is_mlp and not (self.kind is not None and self.kind.is_requested)

    @property
    def missed(self) -> str:
        """Why ``strict`` counts it."""
        return "; ".join(filter(None, (self.gemm_reason, self.tiles_reason))) if self.op is not None else self.reason

    @property
    def hint(self) -> str:
        """What can be done about a site that was left alone; "" where there is nothing, or nothing to do."""
        return self.kind.hint if self.op is None and self.kind is not None else ""

    @property
    def refusals(self) -> tuple[Kind, ...]:
        """The kinds of all that was refused there, each once: the activation, linear layers in float8, tiles."""
        kinds = (self.kind, self.gemm_kind, self.tiles_kind)
        return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))
