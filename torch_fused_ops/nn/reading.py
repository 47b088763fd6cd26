"""Captured graphs, read as recipes: exactly linear layers around one activation, which the recogniser has proved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_fused_ops.nn.fused_mlp import Middle
from torch_fused_ops.nn.recipes import Linear, Recipe, Refused
from torch_fused_ops.reasons import Kind, Reason
from torch_fused_ops.sites import DROPOUT, Site

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["MLPS_MATRICES", "NO_ACTIVATION", "read", "with_place"]

MLPS_MATRICES = 3
NO_ACTIVATION = Reason(Kind.NO_ACTIVATION, "there is no activation between linear layers in it")


def read(gm: GraphModule, x: Node | None, given: dict[Node, str], sites: Sequence[Site]) -> Recipe:
    """The graph as a recipe.

    Args:
        gm: captured, with the activation replaced by its operator.
        x: the module's input.
        given: each placeholder's parameter, by its name; "" if it is none.
        sites: what the recogniser has found.

    Raises:
        Refused: it is not exactly linear layers around one activation.
    """
    reader = _Reader(given)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    if len(output.args[0]) != 1:
        raise Refused(Kind.RESULTS, f"it gives {len(output.args[0])} tensors")
    if not any(site.is_mlp for site in sites):
        raise Refused(*NO_ACTIVATION)
    for site in sites:
        if site.op is None and site.activation != DROPOUT:
            assert site.kind is not None
            raise Refused(site.kind if site.is_mlp else Kind.MORE, site.reason)
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
            raise Refused(Kind.DROPOUT_INSIDE, "an active dropout stands before its activation")
        linear, source = reader.linear(operand, "in front of its activation")
        source, p, more = reader.through(source)
        if source is not x or p or more:
            raise Refused(
                Kind.MORE, f"a linear layer in front of its activation does not read its input, but {_shown(source)}"
            )
        # Widened and brought back, it is rounded once, as by the operator itself.
        if widened and ends_in != _dtype(operand):
            raise Refused(Kind.MORE, f"its activation is computed in {widened[0]}")
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
                    raise Refused(Kind.MORE, "two dropouts follow one another")
                p = call.dropout_arguments()["p"]
                if not isinstance(p, (int, float)):
                    raise Refused(Kind.PROBABILITY, "its dropout's probability is no number")
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
        raise Refused(Kind.MORE, f"its last linear layer does not read the activation, but {_shown(node)}")

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
        raise Refused(
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
            raise Refused(
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
            raise Refused(Kind.LINEAR, f"a linear layer's bias is no vector of its own ({_shown(node)})")
        return name

    def check_rest(self, gm: GraphModule) -> None:
        """Nothing else is done but asking for sizes."""
        for node in gm.graph.nodes:
            if node in self.read or node.op in ("placeholder", "output"):
                continue
            value = node.meta.get("example_value")
            parts = value if isinstance(value, (tuple, list, torch.Size)) else (value,)
            if node.op == "get_attr" or not all(isinstance(part, (int, torch.SymInt)) for part in parts):
                raise Refused(Kind.MORE, f"its forward also calls {_shown(node)}")


def with_place(reason: str, gm: GraphModule, given: dict[Node, str]) -> str:
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
        raise Refused(Kind.MORE, "its result has other leading axes than its input")
    shapes = getattr(getattr(_tensor(x), "fake_mode", None), "shape_env", None)
    if shapes is not None and shapes.guards:
        raise Refused(
            Kind.SIZES, f"its forward depends on its input's sizes: {', '.join(str(g.expr) for g in shapes.guards)}"
        )


def _shown(node: Any) -> str:
    from torch_fused_ops.lowerings.recognise.graph import shown

    return shown(node) if isinstance(node, torch.fx.Node) else repr(node)


def _tensor(node: Any) -> Tensor:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        raise Refused(Kind.UNRECORDED, f"the capture does not record what {_shown(node)} gives")
    return value


def _dtype(node: Any) -> torch.dtype:
    return _tensor(node).dtype


def _sizes(node: Any) -> tuple[Any, ...]:
    return tuple(_tensor(node).shape)
