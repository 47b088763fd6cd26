"""Names and packing of an MLP's weights in checkpoints: a table of layouts, and conversions to ours and back.

Ours is ``fc1.weight`` (f, h), or (2f, h) with the gate's rows over up's, ``fc1.bias``, ``fc2.weight`` (h, f) and
``fc2.bias``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import functional

OWN = "fc1/fc2"


class Layout(NamedTuple):
    """One way to store an MLP.

    Attributes:
        name: its modules, and its packing.
        first: the modules of the first linear: one, or gate and up.
        second: the second linear.
        gated: the first linear computes gate and up.
        packing: of gate and up in one module: "halves" [gate; up], "interleaved" g0 u0 g1 u1 …, "swapped" [up; gate].
        transposed: weights are (in, out).
        guessed: keys and shapes may choose it; otherwise another layout has the same ones, and only the name does.
    """

    name: str
    first: tuple[str, ...]
    second: str
    gated: bool
    packing: str = "halves"
    transposed: bool = False
    guessed: bool = True

    def keys(self, bias: bool) -> dict[str, tuple[str, ...]]:
        """The layout's keys for each of our keys."""
        kinds = ("weight", "bias") if bias else ("weight",)
        parts = {"fc1": self.first, "fc2": (self.second,)}
        return {f"{fc}.{kind}": tuple(f"{m}.{kind}" for m in parts[fc]) for fc in parts for kind in kinds}

    def shape(self, key: str, ours: torch.Size) -> torch.Size:
        """The stored shape of our key, whose shape is ``ours``."""
        rows, *columns = ours
        shape = (rows // len(self.first) if key.startswith("fc1.") else rows, *columns)
        return torch.Size(shape[::-1] if self.transposed else shape)

    def load(self, key: str, stored: Sequence[Tensor]) -> Tensor:
        """Convert the stored tensors of a key to ours."""
        tensors = [t.t() if self.transposed and t.ndim == 2 else t for t in stored]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        packed = self.gated and len(self.first) == 1 and key.startswith("fc1.")
        return (functional.convert_glu_layout(whole, self.packing, "halves", 0) if packed else whole).contiguous()

    def save(self, key: str, ours: Tensor) -> list[Tensor]:
        """Convert our tensor to the stored ones, as new tensors."""
        first = key.startswith("fc1.")
        parts = ours.chunk(len(self.first)) if first else (ours,)
        if first and self.gated and len(self.first) == 1:
            parts = (functional.convert_glu_layout(ours, "halves", self.packing, 0),)
        parts = tuple(t.t() if self.transposed and t.ndim == 2 else t for t in parts)
        return [t.clone(memory_format=torch.contiguous_format) for t in parts]


def _named(*modules: str, gated: bool = False, packing: str = "halves", guessed: bool = True, **kwargs: bool) -> Layout:
    *first, second = modules
    marks = ["transposed"] * bool(kwargs.get("transposed")) + [packing] * (packing != "halves")
    return Layout(
        " ".join(("/".join(modules), *marks)), tuple(first), second, gated, packing, guessed=guessed, **kwargs
    )


# If two fit equally well, the first counts.
_TABLE = (
    # Linear, activation, linear.
    _named("fc1", "fc2"),
    _named("up_proj", "down_proj"),
    _named("c_fc", "c_proj"),
    _named("c_fc", "c_proj", transposed=True),  # GPT-2's Conv1D
    _named("dense_h_to_4h", "dense_4h_to_h"),
    _named("linear_fc1", "linear_fc2"),
    _named("wi", "wo"),
    _named("w1", "w2"),
    _named("lin1", "lin2"),
    _named("linear1", "linear2"),
    _named("fc_in", "fc_out"),
    _named("0", "2"),  # nn.Sequential
    _named("0", "3"),  # and with a dropout in it
    _named("net.0.proj", "net.2"),  # diffusers' FeedForward
    # Gated: gate and up apart.
    _named("gate_proj", "up_proj", "down_proj", gated=True),
    _named("w1", "w3", "w2", gated=True),
    _named("wi_0", "wi_1", "wo", gated=True),
    _named("fc1_g", "fc1_x", "fc2", gated=True),
    # Gated: packed.
    _named("fc1", "fc2", gated=True),
    _named("fc1", "fc2", gated=True, packing="interleaved", guessed=False),
    _named("fc1", "fc2", gated=True, packing="swapped", guessed=False),  # timm's GluMlp
    _named("gate_up_proj", "down_proj", gated=True),
    _named("gate_up_proj", "down_proj", gated=True, packing="interleaved", guessed=False),
    _named("gate_up_proj", "down_proj", gated=True, packing="swapped", guessed=False),
    _named("linear_fc1", "linear_fc2", gated=True),
    _named("dense_h_to_4h", "dense_4h_to_h", gated=True),
    _named("Wi", "Wo", gated=True),
    _named("w12", "w3", gated=True),
    _named("net.0.proj", "net.2", gated=True, packing="swapped"),
)
LAYOUTS: dict[tuple[str, bool], Layout] = {(layout.name, layout.gated): layout for layout in _TABLE}


def layout_of(name: str, gated: bool, argument: str) -> Layout:
    """The layout with this name, of a gated or plain MLP.

    Raises:
        ValueError: the name is not a layout; the message names the argument.
    """
    try:
        return LAYOUTS[name, gated]
    except (KeyError, TypeError):
        kind = "a gated MLP" if gated else "an MLP that is not gated"
        accepted = ", ".join(repr(n) for n, g in LAYOUTS if g == gated)
        raise ValueError(f"{argument}={name!r} is not a layout of {kind}; accepted: {accepted}") from None


class Conversion(NamedTuple):
    """A state dict's tensors in our layout, and its problems, by its own keys."""

    tensors: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def detect(stored: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], gated: bool) -> list[Layout]:
    """The layouts that fit the keys best; among them those that fit the shapes, if any does."""
    bias = "fc1.bias" in shapes

    def fit(layout: Layout) -> tuple[int, int]:
        names = [key for keys in layout.keys(bias).values() for key in keys]
        return sum(key in stored for key in names), -len(names)

    guessed = [layout for layout in _TABLE if layout.gated == gated and layout.guessed]
    best = max(map(fit, guessed))
    if not best[0]:
        return [LAYOUTS[OWN, gated]]
    near = [layout for layout in guessed if fit(layout) == best]
    return [layout for layout in near if not _mismatches(layout, stored, shapes)] or near[:1]


def _mismatches(layout: Layout, stored: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> list[str]:
    wrong = []
    for key, parts in layout.keys("fc1.bias" in shapes).items():
        shape = layout.shape(key, shapes[key])
        for part in parts:
            if part not in stored:
                continue
            if not isinstance(stored[part], Tensor):
                wrong.append(f"{part} is not a tensor, but {type(stored[part]).__name__}")
            elif stored[part].shape != shape:
                wrong.append(f"{part} has shape {tuple(stored[part].shape)}, and must have {tuple(shape)}")
    return wrong


def convert(
    stored: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], gated: bool, name: str | None = None
) -> Conversion:
    """Bring a state dict into our layout.

    Args:
        stored: a state dict in the layout ``name``, or in one that keys and shapes tell.
        shapes: our tensors' shapes.
        gated: the MLP is gated.
    """
    candidates = detect(stored, shapes, gated) if name is None else [layout_of(name, gated, "layout")]
    layout = candidates[0]
    keys = layout.keys("fc1.bias" in shapes)
    errors = [f"{text} (layout {layout.name!r})" for text in _mismatches(layout, stored, shapes)]
    if len(candidates) > 1:
        names = " or ".join(repr(candidate.name) for candidate in candidates)
        errors.append(f"{layout.second}.weight is square: it could be {names}; checkpoint_layout tells which")
    required = [part for parts in keys.values() for part in parts]
    missing = [part for part in required if part not in stored]
    unexpected = [key for key in stored if key not in required]
    tensors = {}
    if not errors:
        whole = {key: parts for key, parts in keys.items() if all(part in stored for part in parts)}
        tensors = {key: layout.load(key, [stored[part] for part in parts]) for key, parts in whole.items()}
    return Conversion(tensors, missing, unexpected, errors)
