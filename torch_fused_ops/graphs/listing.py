"""Format sites and saved tensors as text, for reports and for the errors of ``strict``."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.policy import alike, joined_paths, without_numbers

WIDTH = 120


def merged_sites(sites: Iterable[Site]) -> list[Site]:
    """Merge sites that differ only in their layer's number: "model.py:12 in layers.0…31.mlp ×32". Keep their order."""

    def key(site: Site) -> object:
        where, _, path = site.source.partition(" in ")
        return site.op, site.activation, reason_text(site), site.users, where, without_numbers(path)

    merged = []
    for group in alike(sites, key):
        where, inside, _ = group[0].source.partition(" in ")
        path = joined_paths(site.source.partition(" in ")[2] for site in group)
        times = f" ×{len(group)}" if len(group) > 1 else ""
        merged.append(replace(group[0], source=f"{where}{inside}{path}{times}"))
    return merged


def read_by(site: Site) -> str:
    """Return the functions that read the value, without repeats: "linear ×2"."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(site.users).items())


def explained(*parts: str | Kind) -> Iterator[str]:
    """Yield indented lines for these texts, and for the advice of these kinds."""
    for part in parts:
        line = part if isinstance(part, str) else f"→ {part.advice}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def site_lines(sites: Iterable[Site]) -> list[str]:
    """Return lines on each group of sites: the operator and the place, then the reason and the advice."""
    lines: list[str] = []
    for site in merged_sites(sites):
        names = site.activation or ", ".join(dict.fromkeys(site.spelling))
        head = f"{site.op or 'not fused'}: {names} ({site.source}), read by {read_by(site)}"
        lines += textwrap.wrap(head, WIDTH, subsequent_indent="    ")
        lines += explained(reason_text(site), *site.refusals)
    return lines


def reason_text(site: Site) -> str:
    """Return the reason for reports, with the effects of the policy, and not beginning with a bullet."""
    reason = f"the value {site.reason}" if site.reason.startswith(("-", "−", "*", "+")) else site.reason
    if site.gemm:
        reason += "; its linear layers are in float8" + (", except " if site.gemm_reason else "")
    elif site.gemm_reason:
        reason += "; its linear layers are not in float8: "
    reason += site.gemm_reason
    if site.level:
        reason += f"; {site.level}"
    if site.tiles_reason:
        return f"{reason}; not tiled: {site.tiles_reason}"
    return f"{reason}; in {site.tiles} tiles" if site.tiles else reason


@dataclass(frozen=True)
class SavedRow:
    """Tensors saved for backward that differ only in their layer's number.

    Attributes:
        module: the module that computes them, "layers.0…31.mlp.up"; "(inputs)" for the graph's arguments.
        shape: the shape of each tensor.
        dtype: the element type, "bfloat16".
        nbytes: the bytes of all tensors together.
        read_by: (kind, module) of each reader in backward, through views and recomputed calls.
        removed_by: settings. Each of them alone avoids saving these tensors.
        refused: (setting, reason) for settings that do not apply to them.
        count: the number of tensors.
        moves: True if ``offload`` moves them to the host.
        stays: the reason why ``offload`` does not move them; "" if it does, or does not name their module.
    """

    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read_by: tuple[tuple[str, str], ...]
    removed_by: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()
    count: int = 1
    moves: bool = False
    stays: str = ""

    @property
    def advice(self) -> str:
        """Return the settings that avoid saving the tensors; otherwise the reason why they stay saved."""
        levels = [s for s in self.removed_by if s in _LEVELS and 'memory="free"' not in self.removed_by]
        parts = [f"{s} {_LEVELS.get(s, 'recomputes it')}" for s in levels or self.removed_by[:1]]
        parts += [f"{setting} does not apply: {reason}" for setting, reason in self.refused]
        kinds = {kind for kind, _ in self.read_by}
        needed = next((kind for kind in ("attention", "weight gradient") if kind in kinds), "")
        return "; ".join(parts) or (f"needed for: {needed}" if needed else "only a checkpoint removes it")

    @property
    def text(self) -> str:
        """Return the tensor and its readers, on several lines."""
        readers: dict[str, list[str]] = {}
        for kind, module in self.read_by:
            readers.setdefault(kind, []).append(module or "the model")
        read_by = "; ".join(f"{kind} of {', '.join(modules)}" for kind, modules in readers.items())
        times = f" ×{self.count}" if self.count > 1 else ""
        lines = [f"{self.module or 'the model'}: {self.dtype}{list(self.shape)}{times}"]
        stays = [f"offload: {self.stays}"] if self.stays else []
        moves = ["moves to the host"] if self.moves else stays
        for line in (*moves, f"read by {read_by or 'nothing'}", f"→ {self.advice}"):
            lines += textwrap.wrap(line, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 14)
        return "\n".join(lines)


_LEVELS = {
    'memory="fp8"': "stores it in 8 bits",
    'memory="input"': "recomputes it",
    'attention="input"': "recomputes it",
}


@dataclass(frozen=True)
class AttentionSite:
    """Attention for which a policy requests ``attention="input"``, in layers that differ only in their number.

    Attributes:
        module: the innermost module that contains all its linear layers, "layers.0…31.attn".
        nbytes: the bytes in all layers that are no longer saved for backward.
        reason: the reason why nothing changes; "" if backward recomputes at least one tensor.
        count: the number of layers.
        modules: the paths of all modules that contain one of its linear layers.
        linears: the number of its linear layers, in all layers.
        kind: the kind of the reason, or None.
    """

    module: str
    nbytes: int
    reason: str = ""
    count: int = 1
    modules: tuple[str, ...] = ()
    linears: int = 0
    kind: Kind | None = None

    @property
    def text(self) -> str:
        """Return the module, the number of layers, and the reason."""
        return self.module + (f" ×{self.count}" if self.count > 1 else "") + (f": {self.reason}" if self.reason else "")


def merged_attention(sites: Iterable[AttentionSite]) -> Iterator[AttentionSite]:
    """Merge sites that differ only in their layer's number, in the order of each group's first site."""
    for group in alike(sites, lambda site: (without_numbers(site.module), bool(site.reason))):  # reasons may name nodes
        yield replace(
            group[0],
            module=joined_paths(site.module for site in group),
            nbytes=sum(site.nbytes for site in group),
            count=len(group),
            modules=tuple(dict.fromkeys(path for site in group for path in site.modules)),
            linears=sum(site.linears for site in group),
        )


def merged(rows: Iterable[SavedRow]) -> Iterator[SavedRow]:
    """Merge rows that differ only in their layer's number, in the order of each group's first row."""

    def key(row: SavedRow) -> SavedRow:
        readers = tuple((kind, without_numbers(module)) for kind, module in row.read_by)
        settings = tuple((setting, "") for setting, _ in row.refused)  # reasons may name nodes
        return replace(row, module=without_numbers(row.module), read_by=readers, refused=settings)

    for group in alike(rows, key):
        readers = zip(*(row.read_by for row in group), strict=True)  # the same reader of each row
        yield replace(
            group[0],
            module=joined_paths(row.module for row in group),
            nbytes=sum(row.nbytes for row in group),
            read_by=tuple((same[0][0], joined_paths(module for _, module in same)) for same in readers),
            count=len(group),
        )
