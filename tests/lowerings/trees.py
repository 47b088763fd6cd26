"""Random trees of modules: what real models do around an MLP that a step of training must come through unharmed.

``tree(seed)`` builds one. Each module maps (tokens, WIDTH) to the same; ``Tree`` also returns what its blocks hand out.
"""

import functools
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import GEMMS, WITHOUT_BIAS, Net, Stack, selective
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, HIDDEN = 5, 8, 12

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    "silu_by_hand": lambda h: h * torch.sigmoid(h),
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "in_place": lambda h: F.relu(h, inplace=True),
}


class Drawn(nn.Module):
    """Its repr says what was drawn."""

    def extra_repr(self) -> str:
        drawn = {name: value for name, value in vars(self).items() if isinstance(value, (str, bool))}
        return ", ".join(f"{name}={value}" for name, value in drawn.items() if name != "training")


class MLP(Drawn):
    """A plain MLP; its pre-activation can be had."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=r.random() < 0.5), nn.Linear(HIDDEN, WIDTH)
        self.activation = r.choice([name for name in ACTIVATIONS if name != "in_place"])

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x)  # type: ignore[no-any-return]

    def of_hidden(self, h: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.activation](h))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, with_hidden: bool = False) -> Any:
        h = self.hidden(x)
        return (self.of_hidden(h), h) if with_hidden else self.of_hidden(h)


class GLU(MLP):
    """Gate and up by two linear layers, or packed in one, in one of the layouts."""

    LAYOUTS = ("apart", "halves", "swapped", "interleaved", "rows")

    def __init__(self, r: random.Random) -> None:
        super().__init__(r)
        self.layout = r.choice(self.LAYOUTS)
        if self.layout == "apart":
            self.gate = nn.Linear(WIDTH, HIDDEN)
        else:
            self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=r.random() < 0.5)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x), self.up(x)], -1) if self.layout == "apart" else self.up(x)

    def of_hidden(self, h: Tensor) -> Tensor:
        return self.down(gated(h, self.layout, ACTIVATIONS[self.activation]))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, with_hidden: bool = False) -> Any:
        if self.layout == "apart" and not with_hidden:
            return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
        return super().forward(x, with_hidden)


def gated(h: Tensor, layout: str, activation: Callable[[Tensor], Tensor]) -> Tensor:
    if layout == "interleaved":
        return activation(h[..., ::2]) * h[..., 1::2]
    if layout == "rows":
        pairs = h.unflatten(-1, (2, -1))
        return activation(pairs[..., 0, :]) * pairs[..., 1, :]
    gate, up = h.chunk(2, -1)
    return activation(up) * gate if layout == "swapped" else activation(gate) * up


class Half(Drawn):
    """A GLU whose second linear layer gives what the next one's activation reads."""

    def __init__(self, r: random.Random, width: int, out: int, first: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * HIDDEN) if first else None
        self.down = nn.Linear(HIDDEN, out)
        self.layout = r.choice(("halves", "swapped", "interleaved"))
        self.activation = r.choice(("silu", "gelu", "gelu_tanh"))

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.proj is None else self.proj(x)
        return self.down(gated(h, self.layout, ACTIVATIONS[self.activation]))  # type: ignore[no-any-return]


def chain(r: random.Random) -> nn.Module:
    shapes = ((WIDTH, 2 * HIDDEN, True), (WIDTH, 2 * HIDDEN, False), (WIDTH, WIDTH, False))
    return nn.Sequential(*(Half(r, *shape) for shape in shapes))


def adapted(r: random.Random) -> nn.Module:
    """LoRA on the first linear layer, the weights under it frozen."""
    mlp, a, b = MLP(r), WITHOUT_BIAS(WIDTH, 2), WITHOUT_BIAS(2, HIDDEN)
    mlp.requires_grad_(r.random() < 0.3)
    return Net(lambda s, x: s.mlp.of_hidden(s.mlp.up(x) + 2.0 * s.b(s.a(x))), mlp=mlp, a=a, b=b)


class Updated(Drawn):
    """A buffer that forward updates, and what reads it, before and afterwards."""

    UPDATES: ClassVar[dict[str, Callable[[Tensor, Tensor], Any]]] = {
        "halved": lambda b, x: b.mul_(0.5).add_(0.5),
        "mean": lambda b, x: b.mul_(0.9).add_(0.1 * x.detach().mean()),
        "copied": lambda b, x: b.copy_(b * 0.7 + 0.1),
        "counted": lambda b, x: b.add_(1.0),
        "view": lambda b, x: b.view(-1)[:2].mul_(0.5),
    }

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.inner = block(r, 0)
        self.update = r.choice(list(self.UPDATES))
        self.use = r.choice(("center", "scale", "weight", "tanh", "before", "column", "twice"))
        shapes = {"weight": (WIDTH, WIDTH), "column": (TOKENS, 1)}
        self.register_buffer("state", torch.rand(shapes.get(self.use, (WIDTH,))) + 0.5)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.state  # type: ignore[assignment]
        before = x + state if self.use in ("before", "twice") else x  # a sum keeps nothing: eager may write it
        self.UPDATES[self.update](state, x)
        if self.use == "center":
            before = x - state
        elif self.use in ("scale", "column", "twice"):
            before = before * state
        elif self.use == "weight":
            before = F.linear(x, state)
        elif self.use == "tanh":
            before = torch.tanh(x * state * self.scale)
        return self.inner(before) + x * self.scale  # type: ignore[no-any-return]


class Weighted(Drawn):
    """An MLP whose result a number for each row multiplies, as a router's weight does."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.mlp, self.router = r.choice((MLP, GLU))(r), nn.Linear(WIDTH, 1)
        self.mlp.down = nn.Linear(HIDDEN, WIDTH, bias=r.random() < 0.2)
        self.of, self.twice = r.choice(("x", "hidden", "result")), r.random() < 0.2

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.mlp(x, with_hidden=True)
        given = {"x": x, "hidden": h[..., :WIDTH], "result": y}[self.of]
        weighted = y * torch.sigmoid(self.router(given))
        return weighted + y if self.twice else weighted


def twice(r: random.Random) -> nn.Module:
    """One module called twice, or two that share a parameter."""
    a = MLP(r)
    b = MLP(r) if r.random() < 0.5 else a
    b.down.weight = a.down.weight
    return Net(lambda s, x: s.b(x + s.a(x)), a=a, b=b)


class Residual(Drawn):
    """The stream, written in place or not, behind a norm or not."""

    def __init__(self, r: random.Random, depth: int) -> None:
        super().__init__()
        self.inner = block(r, depth - 1)
        self.norm = r.choice(
            (nn.Identity, functools.partial(nn.LayerNorm, WIDTH), functools.partial(nn.RMSNorm, WIDTH))
        )()
        self.how = r.choice(("add", "add_", "iadd", "copy", "slice"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(x))
        if self.how == "add":
            return x + y  # type: ignore[no-any-return]
        stream = x * 1.0
        if self.how == "add_":
            stream.add_(y)
        elif self.how == "iadd":
            stream += y
        elif self.how == "copy":
            stream.copy_(stream + y)
        else:
            stream[..., :4] += y[..., :4]
        return stream


def sequence(r: random.Random, depth: int) -> nn.Module:
    return Stack(block(r, depth - 1) for _ in range(r.choice((2, 2, 3))))


class Concatenated(Drawn):
    """A linear layer over an activation's input or result and something else."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.mlp, self.mix = MLP(r), nn.Linear(HIDDEN + WIDTH, WIDTH)
        self.of, self.checkpointed = r.choice(("input", "result")), r.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp.hidden(x)
        y = ACTIVATIONS[self.mlp.activation](h)

        def mixed(h: Tensor, x: Tensor) -> Tensor:
            return self.mix(torch.cat([h, x], -1)).sin()  # type: ignore[no-any-return]

        read = functools.partial(checkpoint, mixed, use_reentrant=False) if self.checkpointed else mixed
        return self.mlp.down(y) + read(h if self.of == "input" else y, x)  # type: ignore[no-any-return]


class Checkpointed(Drawn):
    """A checkpoint, selective or not, maybe inside another."""

    def __init__(self, r: random.Random, depth: int) -> None:
        super().__init__()
        # What updates a buffer would do so again as the region is computed again.
        self.inner = block(r, depth - 1, without=(Updated,))
        self.selective = r.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        more: dict[str, Any] = {}
        if self.selective:
            more["context_fn"] = selective(*GEMMS)
        return checkpoint(self.inner, x, use_reentrant=False, **more)  # type: ignore[return-value]


def parametrized(r: random.Random) -> nn.Module:
    mlp, gain = MLP(r), nn.Parameter(torch.rand(1) + 0.5)
    scaled = Net(lambda s, weight: torch.tanh(weight) * s.gain, gain=gain)
    parametrize.register_parametrization(mlp.up if r.random() < 0.5 else mlp.down, "weight", scaled)
    return mlp


class Configured(nn.Module):
    """An MLP whose forward reads its configuration, as many of transformers' do."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(hidden_act=r.choice(("silu", "gelu", "tanh")), factor=1.0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.reads = r.choice(("config", "class"))
        self.__class__ = type("Configured", (Configured,), {"default": "relu"})  # one that others do not share

    def forward(self, x: Tensor) -> Tensor:
        name = self.config.hidden_act if self.reads == "config" else self.default  # type: ignore[attr-defined]
        return self.down(ACTIVATIONS[name](self.up(x)))  # type: ignore[no-any-return]


LEAVES = (MLP, GLU, GLU, chain, adapted, Weighted, twice, Concatenated, parametrized, Configured)
NODES = (Residual, Residual, sequence, Checkpointed)


def block(r: random.Random, depth: int, without: tuple[type, ...] = ()) -> nn.Module:
    """Any module."""
    if depth > 0 and r.random() < 0.6:
        kinds = [kind for kind in (*NODES, Updated, Updated) if kind not in without]
        kind: Any = r.choice(kinds)
        return kind(r) if kind is Updated else kind(r, depth)  # type: ignore[no-any-return]
    leaf: Any = r.choice(LEAVES)
    return leaf(r)  # type: ignore[no-any-return]


class Tree(Drawn):
    """Of (tokens, WIDTH) and (tokens, 1): a first MLP, whose pre-activation others read or get, and blocks behind it.

    Attributes:
        hands_out: what is returned besides the result: the pre-activation, something pointwise on it, or nothing.
        reads: what reads the pre-activation besides the activation.
        writes: whether the second argument, which needs a gradient, is read and then written.
    """

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.first = r.choice((MLP, GLU))(r)
        self.blocks = nn.ModuleList(block(r, 2) for _ in range(r.choice((1, 2))))
        width = HIDDEN if type(self.first) is MLP else 2 * HIDDEN
        self.head = nn.Linear(width, WIDTH)
        self.mix = nn.Linear(width + WIDTH, WIDTH)
        self.hands_out = r.choice(("nothing", "hidden", "view", "double", "stream"))
        self.reads = r.choice(("nothing", "sin", "linear", "multiples", "cat", "cat checkpointed", "keyword"))
        self.writes = r.random() < 0.3
        self.side = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("row", torch.rand(WIDTH))

    def forward(self, x: Tensor, column: Tensor) -> tuple[Tensor, ...]:
        y, h = self.first(x, with_hidden=True)
        y = x + y
        if self.writes:
            y = y + self.side(column * self.row)
            column.add_(1.0)
        if self.reads == "sin":
            y = y + h.sin().sum(-1, keepdim=True)
        elif self.reads == "linear":
            y = y + self.head(h)
        elif self.reads == "multiples":  # each as large as h: all are kept, or h
            y = y + self.head(h * 2.0) + self.head(h * 3.0) - self.head(h * 0.5)
        elif self.reads.startswith("cat"):
            mixed = lambda h, x: self.mix(torch.cat([h, x], -1)).sin()  # noqa: E731
            y = y + (checkpoint(mixed, h, x, use_reentrant=False) if "checkpointed" in self.reads else mixed(h, x))
        elif self.reads == "keyword":
            y = y + self.head(torch.addcmul(h, tensor1=h, tensor2=h, value=0.1))
        for one in self.blocks:
            y = one(y)
        given = {"hidden": h, "view": h.view(-1), "double": h * 2.0, "stream": y * 1.0}.get(self.hands_out)
        return (y,) if given is None else (y, given)


def tree(seed: int) -> Tree:
    """The tree of this number."""
    torch.manual_seed(seed)
    return Tree(random.Random(seed))
