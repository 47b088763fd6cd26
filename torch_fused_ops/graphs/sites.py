"""``Site``: the result of the pre-grad pass for one place in a graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch_fused_ops.graphs.reasons import Kind

DROPOUT = "dropout"  # the ``activation`` of a site that is a dropout


@dataclass(frozen=True)
class Site:
    """A GEMM's input that is a nonlinear pointwise function of GEMMs' results; or an active dropout.

    Attributes:
        op: the fused operator, e.g. ``"fused::glu"``; None if it is not fused.
        activation: the name of the proved activation; ``"dropout"`` for a dropout; None if nothing is proved.
        source: ``"file.py:line in module.path"``.
        reason: for people: the proof with the matched functions, or why it is not fused.
        users: the functions that read the value.
        module: the path of the innermost module that contains both the activation and the GEMM: the MLP.
        location: the line that calls the activation, ``"/full/path/file.py:line"``; "" if the graph does not record it.
        code: the text of that line.
        spelling: the functions between the GEMMs, as the model calls them.
        kind: the kind of the reason if it is not fused; else None.
        excluded_by: the policy's pattern that excludes it; "" if it is not excluded.
        gemm: the float8 recipe that the policy requests for the linear layers around it, if some of them use it; else
            "".
        gemm_reason: the layers that do not use the recipe, and why, for people; "" if all layers use it.
        gemm_kind: the kind of the first reason in ``gemm_reason``; None if all layers use the recipe.
        tiles: the number of tiles: 1 if it is not tiled, 0 if the policy requests no tiles.
        tiles_reason: why it is not tiled, for people; "" if it is tiled, or the policy requests no tiles.
        tiles_kind: the kind of ``tiles_reason``; None if there is no such reason.
        memory: the memory level of the operator, or of the model's own calls if only a setting that requires eager's
            rounding prevents fusion; "" if nothing would be saved for backward.
        memory_kind: the kind of the reason if the level has no effect; else None.
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
    memory_kind: Kind | None = None

    @property
    def is_mlp(self) -> bool:
        """Return True for an MLP's activation, fused or not. Dropouts are listed, but counted separately."""
        return self.activation != DROPOUT and (self.kind is None or self.kind.is_mlp)

    @property
    def is_missed(self) -> bool:
        """True if ``strict`` counts the site because it lacks a request of the policy: fusion, tiles, a memory level
        with an effect, or float8 in at least one of its linear layers. Reasons that the policy causes do not count, nor
        a setting that requires eager's rounding if a memory level applies to the model's own calls."""
        if self.op is not None or self.has_only_level:
            is_untiled = self.tiles_kind is not None and not self.tiles_kind.is_requested
            return is_untiled or self.memory_kind is not None or (self.gemm_kind is not None and not self.gemm)
        return self.is_mlp and not (self.kind is not None and self.kind.is_requested)

    @property
    def has_only_level(self) -> bool:
        """True if eager's rounding prevents fusion, and the memory level applies to the model's own calls."""
        return self.kind is Kind.EAGER_ROUNDING and self.memory not in ("", "off")

    @property
    def level(self) -> str:
        """Return the memory level and its effect: "memory='fp8'"; "" at "free", the default."""
        if self.memory in ("", "free"):
            return ""
        level = f"memory={self.memory!r}"
        return level if self.memory_kind is None else f"inside a checkpoint, so {level} has no effect"

    @property
    def hint(self) -> str:
        """Return the remedy for a site that is not fused; "" if it is fused, or no remedy is known."""
        return self.kind.hint if self.op is None and self.kind is not None else ""

    @property
    def refusals(self) -> tuple[Kind, ...]:
        """Return the kinds of all rejections, without repeats: activation, float8, tiles, memory level."""
        kinds = (self.kind, self.gemm_kind, self.tiles_kind, self.memory_kind)
        return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))
