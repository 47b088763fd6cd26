"""Read an FX graph in one vocabulary: a plain name for each call, and an analysis in one pass over the graph.

Pre-grad graphs have many names for one function (``torch.relu``, ``F.relu``, ``Tensor.relu_``, ``aten.relu.default``,
``operator.iadd``, …), are not functional, and hold autocast and grad-mode switches as nodes. This module hides these
differences; `subgraph.py` then reads calls by torch's plain name.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_fused_ops.graphs import gemm_registry
from torch_fused_ops.lowerings import compat

from .symbolic import LINEAR, RULES, Ref, Step, Unprovable

_T = TypeVar("_T", bound=Hashable)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CASTS = _words("to type type_as float double half bfloat16 _to_copy")
COPIES = _words("contiguous clone alias")
DROPOUTS = _words("dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d")
PIECES = _words("chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unsafe_chunk unsafe_split")
RESHAPES = _words("view reshape view_as reshape_as flatten unflatten squeeze unsqueeze ravel _unsafe_view")
VIEWS = (
    PIECES
    | RESHAPES
    | _words(
        """transpose permute t movedim moveaxis swapaxes swapdims expand expand_as getitem narrow select slice detach
        detach_ lift_fresh_copy index_select gather take_along_dim index"""
    )
)
# Tensor-parallel plumbing between a sharded linear and the local tensor that the activation reads.
# Dynamo wraps the DTensor methods into functions with the names "prim_to_local", "prim from_local", …
PLUMBING = _words(
    """to_local from_local redistribute wait_tensor all_reduce all_gather_tensor all_gather_tensor_autograd
    all_gather_into_tensor reduce_scatter_tensor reduce_scatter_tensor_autograd"""
)
# The positions of a GEMM's data arguments, any of which may be an activation. A linear's second argument is its weight.
GEMMS: dict[str, tuple[int, ...]] = {
    "linear": (0,),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "inner", "tensordot"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "einsum"), (1, 2)),
    "grouped_mm": (0, 1),
}
CONVOLUTIONS = _words("conv1d conv2d conv3d convolution")  # a GEMM if the kernel size is 1
CONSTANTS: dict[str, float] = {"zeros_like": 0.0, "ones_like": 1.0}
# Calls that may return their argument itself. Its gradient then does not depend on the grad mode of the call. In-place
# calls and inactive dropouts also count as such calls. The other ``VIEWS`` return a new tensor, even of the same shape.
ITSELF = CASTS | PLUMBING | _words("contiguous positive flatten")
# GEMMs under other names, custom operators included (`transformers::grouped_mm_fallback`, `aten::_scaled_mm`, …). They
# decide which sites are listed, never which sites are sound to fuse.
_OTHER_GEMM = re.compile(r"(?:^|_)(?:mv|mm|bmm|gemm|matmul|linear)(?:_fallback|_fp8|_v\d+)?$")
REGIONS = _words(
    """_enter_autocast _exit_autocast _set_grad_enabled set_grad_enabled _enter_inference_mode _exit_inference_mode
    _saved_tensors_hooks_enable _saved_tensors_hooks_disable"""
)
_PLAIN_NAMES = {
    **dict.fromkeys(("truediv", "itruediv", "true_divide", "divide"), "div"),
    **{"iadd": "add", "isub": "sub", "imul": "mul", "ipow": "pow", "__rsub__": "rsub", "pos": "positive"},
    **{"multiply": "mul", "subtract": "sub", "negative": "neg", "absolute": "abs", "clip": "clamp"},
    **{"_grouped_mm": "grouped_mm", "concat": "cat", "concatenate": "cat"},
    **{"expit": "sigmoid", "log_sigmoid": "logsigmoid", "fix": "trunc", "sgn": "sign", "arctan2": "atan2"},
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
}
_INPLACE_BUILTINS = _words("iadd isub imul itruediv ipow imatmul iand ior setitem __setitem__")

# How a node depends on GEMMs' results through pointwise functions and views: not at all, affine, or nonlinear.
FREE, AFFINE, NONLINEAR = range(3)

_CUSTOM = torch.ops.higher_order.autograd_function_apply


@cache
def _torch_functions() -> dict[object, str]:
    """Map torch's functions to their names. Other functions with the same name do not match."""
    tables = RULES, CASTS, COPIES, DROPOUTS, VIEWS, GEMMS, CONVOLUTIONS, CONSTANTS, _PLAIN_NAMES
    plain = _INPLACE_BUILTINS.union({"cat"}, *tables)
    names: dict[object, str] = {}
    for space in (torch, F, torch._C._nn, torch.special, operator, torch.Tensor):
        for name in plain | {f"{n}_" for n in plain}:
            function = getattr(space, name, None)
            if callable(function):
                names[function] = name
    return names


@lru_cache(maxsize=1024)  # bounded because users' functions are among the keys
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _target_name(node: Node) -> str:
    target = node.target
    if node.op == "call_method":
        return str(target) if hasattr(torch.Tensor, str(target)) or target in PLUMBING else ""
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        has_name = target.namespace in ("aten", "_c10d_functional", "c10d_functional")
        return target._opname.removeprefix("special_") if has_name else ""
    name = re.sub(r"^prim[ _]", "", getattr(target, "__name__", ""))
    return _torch_functions().get(target) or (name if name in PLUMBING or name in REGIONS else "")


def _is_other_gemm(target: object) -> bool:
    is_torchs = str(getattr(target, "__module__", None)).startswith("torch")
    name = str(gemm_registry.name_of(target) or (getattr(target, "__name__", "") if is_torchs else ""))
    return _OTHER_GEMM.search(name.rsplit("::", 1)[-1]) is not None


def _is_pointwise(args: tuple[Any, ...]) -> bool:
    """Return True if a convolution is a GEMM at each point: its kernel size is 1, and it has no groups."""
    values = [tensor(a) if isinstance(a, Node) else None for a in args[:2]]
    if len(values) < 2 or values[0] is None or values[1] is None or any(a is True for a in args):  # transposed
        return False
    source, weight = (value.shape for value in values if value is not None)
    return weight[2:].numel() == 1 and len(source) == len(weight) and statically(weight[1] == source[1])


class Call:
    """One node's call.

    Attributes:
        name: torch's plain name of the function; "" for functions that the tables above do not have, except methods
            and aten operators.
        args, kwargs: the arguments. For pointwise functions and dropouts, ``inplace`` is removed, and ``input`` and
            ``other`` are positional.
        inplace: True for in-place calls of PyTorch, which write their first argument.
        gemm: the positions of a GEMM's data arguments; None for other calls.
        is_registered_gemm: True for a GEMM of ``gemm_registry``, which writes no argument.
    """

    def __init__(self, node: Node) -> None:
        name = _target_name(node)
        self.inplace = name in _INPLACE_BUILTINS or (name.endswith("_") and not name.endswith("__"))
        if self.inplace and name not in _PLAIN_NAMES:
            name = name.removesuffix("_")
        self.name = _PLAIN_NAMES.get(name, name)
        self.args, self.kwargs = node.args, dict(node.kwargs)
        if self.name in RULES or self.name in DROPOUTS:
            self._take_inplace(node)
            for i, keywords in enumerate((("input", "self"), ("other",))):
                if len(self.args) == i:  # keywords become positions
                    self.args += tuple(self.kwargs.pop(k) for k in keywords if k in self.kwargs)
        self.gemm = GEMMS.get(self.name)
        if self.name in CONVOLUTIONS:
            self.gemm = (0,) if _is_pointwise(self.args) else None
        elif self.gemm is None and _is_other_gemm(node.target):
            self.gemm = (0, 1)
        target = compat.traced_function(node.target) or node.target
        self.is_registered_gemm = not self.name and gemm_registry.is_known(target)
        if self.is_registered_gemm:
            self.gemm = tensor_positions(node)

    def _take_inplace(self, node: Node) -> None:
        signature = None if isinstance(node.target, (str, torch._ops.OpOverload)) else _signature(node.target)
        if signature is not None and "inplace" in signature.parameters:
            position = list(signature.parameters).index("inplace")
            if len(self.args) > position:
                self.inplace |= bool(self.args[position])
                self.args = self.args[:position]
        self.inplace |= bool(self.kwargs.pop("inplace", False))
        self.inplace &= self.name not in DROPOUTS or self.dropout_is_active()

    def dropout_arguments(self) -> dict[str, Any]:
        """Return a dropout's arguments by name. If ``training`` is not given, it counts as True."""
        arguments = dict(zip(("input", "p", "training"), self.args, strict=False)) | self.kwargs
        return {"p": 0.5, "training": arguments.get("train", True), **arguments}

    def dropout_is_active(self) -> bool:
        arguments = self.dropout_arguments()
        return not (arguments["p"] == 0 or arguments["training"] is False)


def tensor_positions(node: Node) -> tuple[int, ...]:
    """Return the positions of a call's tensor arguments."""
    return tuple(i for i, a in enumerate(node.args) if isinstance(a, Node) and tensor(a) is not None)


def tensor(node: Node) -> torch.Tensor | None:
    """Return the recorded value if it is a tensor: ``example_value`` in Dynamo's graphs, ``val`` in exported graphs."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def is_mask(node: Node) -> bool:
    """Return True for a tensor of bools."""
    value = tensor(node)
    return value is not None and value.dtype == torch.bool


def _is_row_mask(node: Node) -> bool:
    """Return True for a mask with one bool per row. No activation's formula includes it, even if a GEMM produced it."""
    value = tensor(node)
    return value is not None and value.dtype == torch.bool and value.ndim > 0 and statically(value.shape[-1] == 1)


def statically(condition: Any) -> bool:
    """Return True if a condition holds for all sizes that the graph was traced for. Adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def record(node: Node, like: Node, make: Callable[[], Any] | None = None) -> None:
    """Give a new node the metadata of ``like``, and the fake value that tracing it would have recorded.

    Args:
        node: a call whose arguments have recorded values.
        like: the node whose metadata it gets. The new value requires a gradient if the value of ``like`` does.
        make: computes the value from fake tensors, for a call that must not run now: it would draw random numbers, or
            would return another dtype because the autocast of tracing is not active.
    """
    key = "example_value" if "example_value" in like.meta else "val"
    node.meta = {k: v for k, v in like.meta.items() if k not in ("example_value", "val", "tensor_meta")}
    value = tensor(like)
    # Use the mode of the recorded values. The tracing context may have a newer mode by now, and modes do not mix.
    mode = value.fake_mode if isinstance(value, torch._subclasses.FakeTensor) else None
    shapes = mode.shape_env if mode is not None else None
    # Comparisons of sizes here must not add guards to the user's program. Autograd is off, because the
    # recorded values include in-place writes of the whole graph, and the user may have saved-tensor hooks.
    with torch.no_grad(), mode or nullcontext(), shapes.suppress_guards() if shapes is not None else nullcontext():
        result = (make or partial(_called, node, key))()
    needs_gradient = value is not None and value.requires_grad and isinstance(result, torch.Tensor)
    node.meta[key] = result.requires_grad_() if needs_gradient and result.is_floating_point() else result


def _called(node: Node, key: str) -> Any:
    """Call a node's function on its arguments' recorded values."""
    values = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta[key])
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, values)
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    return target(*args, **kwargs)


def write_call(like: Node, target: Any, *args: Any, make: Callable[[], Any] | None = None, **kwargs: Any) -> Node:
    """Write a call of a function at the graph's insertion point. ``like`` and ``make`` are arguments of ``record``."""
    node = like.graph.call_function(target, args, kwargs)
    record(node, like, make)
    return node


def reachable(start: Iterable[_T], neighbors: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield the items of ``start``, their neighbors, the neighbors of these and so on, each once."""
    seen, pending = set[_T](), list(start)
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            yield item
            pending.extend(neighbors(item))


def label(node: Node) -> str:
    """Return the node's name for reports and messages."""
    if node.op in ("placeholder", "get_attr"):  # Dynamo calls a parameter L_self_modules_mlp_parameters_alpha_
        name = re.sub(r"^.*_(?:parameters|buffers)_(.*?)_?$", r"\1", str(node.target))
        name = re.sub(r"^L_args_(\d+)_$", lambda m: f"argument {int(m[1]) + 1}", name)
        return re.sub(r"^[LG]_(?:kwargs_)?(.*?)_?$", r"\1", name)
    target = node.target
    function = compat.traced_function(target)
    if function is not None:
        return function.__name__
    if target is _CUSTOM:  # the graph does not name the function, but records the line that calls it
        called = re.findall(r"([\w.]+)\.apply\(", node.meta.get("stack_trace") or "")
        return called[-1] if called else "autograd.Function"
    return target if isinstance(target, str) else str(getattr(target, "__name__", target)).removesuffix(".default")


def names_of(nodes: Iterable[Node]) -> str:
    """Return the nodes' labels, without repeats."""
    return ", ".join(dict.fromkeys(map(label, nodes))) or "nothing"


def _nodes(argument: Any) -> list[Node]:
    """Return the nodes in an argument, also inside lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Node)]


def _writes(node: Node, call: Call, bodies: dict[GraphModule, GraphAnalysis]) -> Iterator[Node]:
    """Yield the nodes whose memory a call writes, by the tables or its schema; every argument if neither is known.

    ``bodies`` caches the analysis of bodies. Without it, nested bodies that are called twice take exponential time.
    """
    if node.op not in ("call_function", "call_method"):
        if node.op == "call_module":
            yield from node.all_input_nodes
        return
    yield from _nodes(node.kwargs.get("out"))
    if call.is_registered_gemm and not isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return
    if call.name in _HARMLESS:
        if call.inplace:
            yield from _nodes(call.args[:1])
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        called = _bodies(node)  # an operator without a body may write its inputs
        if not called or any(_analysis_of(body, bodies).writes_inputs() for body in called):
            yield from node.all_input_nodes
        return
    written = _written_arguments(node.target)
    if written is None:
        yield from node.all_input_nodes
        return
    for position, name in written:
        yield from _nodes(node.args[position : position + 1])
        yield from _nodes(node.kwargs.get(name, node.kwargs.get("input") if position == 0 else None))


def _analysis_of(body: GraphModule, known: dict[GraphModule, GraphAnalysis]) -> GraphAnalysis:
    if body not in known:
        known[body] = GraphAnalysis(body.graph, {}, known)
    return known[body]


def _bodies(node: Node) -> list[GraphModule]:
    """Return the graphs that a higher-order operator calls."""
    children = (body_of(a) for a in _nodes((node.args, node.kwargs)) if a.op == "get_attr")
    return [body for body in children if body is not None]


def body_of(node: Node) -> GraphModule | None:
    """Return the graph module that a ``get_attr`` node reads; None if it reads something else."""
    body: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        body = getattr(body, name, None)
    return body if isinstance(body, GraphModule) else None


def function_bodies(node: Node) -> list[GraphModule]:
    """Return the forward and the backward graph of a ``torch.autograd.Function``; [] for other calls."""
    arguments = node.args[:2] if node.target is _CUSTOM else ()
    return [body for a in arguments if isinstance(a, Node) and (body := body_of(a))]


_HARMLESS = frozenset(RULES) | CASTS | COPIES | DROPOUTS | VIEWS | PLUMBING | REGIONS | frozenset(GEMMS) | CONVOLUTIONS


@lru_cache(maxsize=1024)
def _written_arguments(target: Any) -> frozenset[tuple[int, str]] | None:
    """Return the positions and names of the arguments that a function may write; None if they are not known."""
    if isinstance(target, torch._ops.OpOverload) and target._opname in _UNANNOTATED:
        return _UNANNOTATED[target._opname]
    if isinstance(target, torch._ops.OpOverload):
        return _written_by((target,))
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _written_by(tuple(getattr(target, name) for name in target.overloads()))
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = "" if isinstance(target, str) else str(getattr(target, "__module__", None))
    if module == "torch.nn.functional":
        return _WRITTEN_BY_FUNCTIONAL.get(name, frozenset())
    if name in _UNANNOTATED and module.startswith("torch"):
        return _UNANNOTATED[name]
    if module in ("_operator", "builtins", "math") or name in _INPLACE_BUILTINS:
        return frozenset({(0, "self")}) if name in _INPLACE_BUILTINS else frozenset()
    packet = getattr(torch.ops.aten, name, None) if not module or module == "None" or module.startswith("torch") else 0
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return _written_arguments(packet)
    if not module:  # a method without an operator of its name, such as bool
        return frozenset({(0, "self")}) if name.endswith("_") and not name.endswith("__") else frozenset()
    return None


def _written_by(overloads: Sequence[torch._ops.OpOverload]) -> frozenset[tuple[int, str]]:
    return frozenset(
        (i, argument.name)
        for overload in overloads
        for i, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    )


# The arguments that functions write, for functions without a schema, or whose schema omits running statistics.
_UNANNOTATED: dict[str, frozenset[tuple[int, str]]] = {
    **dict.fromkeys(
        ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm"),
        frozenset({(3, "running_mean"), (4, "running_var")}),
    ),
    "_get_data_attr": frozenset(),  # Dynamo's name for x.data
}
# The Python functions of torch.nn.functional that write an argument. ``Call`` reads the activations' ``inplace``.
_WRITTEN_BY_FUNCTIONAL = {
    **dict.fromkeys(("batch_norm", "instance_norm"), frozenset({(1, "running_mean"), (2, "running_var")})),
    **dict.fromkeys(("embedding", "embedding_bag"), frozenset({(1, "weight")})),
}


class Modes:
    """The active grad mode, autocast, inference mode and hooks during a pass over a graph.

    A mode that begins and ends between two calls does not separate the calls: bitsandbytes sets a parameter under
    ``no_grad`` in each of its layers.
    """

    def __init__(self, graph: Graph) -> None:
        self.grad: bool | None = _grad_mode(graph)
        self.entered: list[tuple[Node, str]] = []  # blocks of autocast and inference mode
        self.hooks = ""

    @property
    def region(self) -> tuple[object, ...]:
        """The active modes, which are equal for calls that they do not separate."""
        return self.grad, self.hooks, *(arguments for _, arguments in self.entered)

    def switch(self, name: str, node: Node) -> None:
        """Apply a call of ``REGIONS``."""
        if name.startswith("_exit"):
            self.entered = [block for block in self.entered if block[0] is not node.args[0]]
        elif name.startswith("_enter"):
            self.entered.append((node, f"{name}{node.args}{node.kwargs}"))
        elif name.startswith("_saved"):
            self.hooks = "" if name.endswith("_enable") else node.name
        else:
            self.grad = bool(node.args[0]) if node.args and isinstance(node.args[0], bool) else None


def _grad_mode(graph: Graph) -> bool | None:
    """Return the grad mode at the beginning of a graph, derived from its first GEMMs; None if they do not show it.

    The current grad mode may differ, since the graph may be a body whose caller has switched the mode.
    """
    for node in graph.nodes:
        if _target_name(node).endswith("set_grad_enabled"):
            break
        value = tensor(node)
        needs_gradient = any(source.requires_grad for source in map(tensor, node.all_input_nodes) if source is not None)
        if value is not None and needs_gradient and _target_name(node) in GEMMS:
            return value.requires_grad
    return None


class GraphAnalysis:
    """One forward pass over a graph; linear in its size."""

    def __init__(
        self, graph: Graph, known: Mapping[Node, Call], bodies: dict[GraphModule, GraphAnalysis] | None = None
    ) -> None:
        """``known``: calls that are already read; ``bodies``: analyses of bodies of higher-order operators."""
        self.index: dict[Node, int] = {}
        self.calls: dict[Node, Call] = {}
        self.region: dict[Node, tuple[object, ...]] = {}  # the grad mode, autocast, inference mode and hooks of a call
        self._made_in: dict[Node, tuple[object, ...]] = {}  # region of the call that created the node's tensor
        self.state: dict[Node, int] = {}
        self.follows_gemm: dict[Node, bool] = {}  # True if the value depends on a GEMM's result
        self._origins: dict[Node, Node] = {}
        self._bodies = {} if bodies is None else bodies
        self.writes: dict[int, list[Node]] = defaultdict(list)  # storage → the nodes that write it, in order
        self.aliases: dict[int, list[Node]] = defaultdict(list)  # storage → the nodes whose values are in it
        self._merged: dict[int, int] = {}  # storages that are one storage when the graph runs
        modes = Modes(graph)
        for i, node in enumerate(graph.nodes):
            call = self.calls[node] = known[node] if node in known else Call(node)
            if node.target is _CUSTOM or (compat.traced_function(node.target) and not call.is_registered_gemm):
                self._read_custom(node, call)
            if call.name in REGIONS:
                modes.switch(call.name, node)
            self.index[node], self.region[node] = i, modes.region
            returned = self._returned_argument(node, call)
            self._made_in[node] = modes.region if returned is None else self._made_in[returned]
            if returned is not None:  # up to torch 2.13, the fake result of an inactive dropout is a copy
                self._merged[self.storage(node)] = self.storage(returned)
            passes = self.is_passthrough(node) and node.all_input_nodes
            self._origins[node] = self._origins[node.all_input_nodes[0]] if passes else node
            # Ignore an index argument: weights gathered per expert are still weights.
            inputs = node.all_input_nodes[:1] if passes else node.all_input_nodes
            reads_gemm = call.name not in CONSTANTS and any(self.follows_gemm[a] for a in inputs)
            self.follows_gemm[node] = call.gemm is not None or reads_gemm
            self.state[node] = self._state(node, call)
            self.aliases[self.storage(node)].append(node)
            for written in _writes(node, call, self._bodies):
                self.writes[self.storage(written)].append(node)

    def _read_custom(self, node: Node, call: Call) -> None:
        """Mark a custom autograd.Function as a GEMM if it is registered, or if its forward returns a GEMM's result."""
        body = next(iter(function_bodies(node)), None)
        if body is not None:
            traces = "\n".join(n.meta.get("stack_trace") or "" for n in body.graph.nodes)
            frames = re.findall(r'File "([^"]+)", line (\d+)', traces)
            call.is_registered_gemm = gemm_registry.function_at((file, int(line)) for file, line in frames)
        multiplies = body is not None and _analysis_of(body, self._bodies).returns_gemm()
        if call.is_registered_gemm or multiplies:
            call.gemm = tuple(i for i in tensor_positions(node) if node.target is not _CUSTOM or i > 1)

    def returns_gemm(self) -> bool:
        """Return True if the graph's first result is an affine function of GEMMs' results, through views and casts."""
        results = next(iter(self.calls)).graph.output_node().args[0]
        while isinstance(results, (tuple, list)) and results:
            results = results[0]
        return isinstance(results, Node) and self.state[results] == AFFINE

    def writes_inputs(self) -> bool:
        """Return True if the graph may write one of its inputs."""
        inputs = {self.storage(node) for node in self.calls if node.op in ("placeholder", "get_attr")}
        return any(storage in inputs or storage <= 0 for storage in self.writes)

    def storage(self, node: Node) -> int:
        """Return a number that identifies the memory of the node's value. Fakes share storages like real tensors."""
        value = tensor(node)
        try:
            storage = -self.index[node] if value is None else int(value.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # some subclasses have no storage
            storage = -self.index[node]
        return self._merged.get(storage, storage)

    def _returned_argument(self, node: Node, call: Call) -> Node | None:
        """Return the argument that the call returns as its result; None if the result is a new tensor."""
        source = call.kwargs.get("out", next(iter(node.all_input_nodes), None))
        if not isinstance(source, Node):
            return None
        if call.inplace or "out" in call.kwargs or (call.name in DROPOUTS and not call.dropout_is_active()):
            return source
        return source if call.name in ITSELF and self.storage(source) == self.storage(node) else None

    def weight_gemm(self, node: Node) -> bool:
        """Return True for a GEMM, unless both its operands depend on other GEMMs, as in attention."""
        call = self.calls[node]
        if call.gemm is None:
            return False
        sides = [a for i, a in enumerate(call.args) if i in call.gemm and isinstance(a, Node)]
        return call.gemm == (0,) or not all(self.follows_gemm[a] for a in sides) or len(sides) < 2

    def custom(self, node: Node) -> Node | None:
        """Return the ``torch.autograd.Function`` call whose first result is the node, unless the call is a GEMM."""
        if self.calls[node].name != "getitem" or node.args[1] != 0 or not isinstance(node.args[0], Node):
            return None
        return node.args[0] if node.args[0].target is _CUSTOM and self.calls[node.args[0]].gemm is None else None

    def sources(self, node: Node) -> list[Node]:
        """Return the nodes whose values the node's value is computed from."""
        function = self.custom(node)
        if function is None:
            return node.all_input_nodes[: 1 if self.is_passthrough(node) else None]
        return [a for a in dict.fromkeys(function.args[2:]) if isinstance(a, Node)]

    def is_passthrough(self, node: Node) -> bool:
        """Return True for views, casts, copies, dropouts and tensor-parallel plumbing of the first argument."""
        name = self.calls[node].name
        moves = name in VIEWS or name in CASTS or name in COPIES or name in DROPOUTS or name in PLUMBING
        return moves and self.custom(node) is None

    def writers(self, node: Node, after: Node | None = None, before: Node | None = None) -> list[Node]:
        """Return the calls between two nodes that write the memory of a node's value, in order."""
        first = -1 if after is None else self.index[after]
        last = len(self.index) if before is None else self.index[before]
        return [w for w in self.writes.get(self.storage(node), ()) if first < self.index[w] < last]

    def is_of_region(self, node: Node) -> bool:
        """Return True if the node's tensor was created, and each time written, in the region of the node's call.

        Under ``no_grad``, a call that works in place changes a tensor's values, but not its gradient.
        """
        made_in = (self._made_in[node], *(self.region[writer] for writer in self.writers(node, before=node)))
        return all(region == self.region[node] for region in made_in)

    def is_inference(self, node: Node) -> bool:
        """Return True if the node is computed in inference mode."""
        return any(str(mode).startswith("_enter_inference_mode") for mode in self.region[node])

    def concat_inputs(self, node: Node) -> list[Node]:
        """Return the tensors that the node concatenates along their last axis; [] for other calls."""
        call = self.calls[node]
        if call.name != "cat" or set(call.kwargs) - {"tensors", "dim", "axis"}:
            return []
        pieces = call.args[0] if call.args else call.kwargs.get("tensors")
        axis = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
        value = tensor(node)
        if value is None or not isinstance(pieces, (list, tuple)) or not isinstance(axis, int):
            return []
        return [piece for piece in pieces if isinstance(piece, Node)] if axis in (-1, value.ndim - 1) else []

    def mask(self, node: Node) -> Node | None:
        """Return the mask with which a call selects between elements of tensors and numbers; None for other calls."""
        masks = [a for a in node.all_input_nodes if is_mask(a)]
        selects = self.calls[node].name in ("masked_fill", "where")
        return masks[0] if selects and len(masks) == 1 < len(node.all_input_nodes) else None

    def origin(self, node: Node) -> Node:
        """Return the node behind this node's views, casts, copies and dropouts."""
        return self._origins[node]

    def _state(self, node: Node, call: Call) -> int:
        inputs = self.sources(node)
        if call.gemm is not None:
            return AFFINE if self.weight_gemm(node) else FREE
        if not inputs or _is_row_mask(node):
            return FREE
        if self.is_passthrough(node):
            return self.state[inputs[0]]
        states = [self.state[a] for a in inputs]
        if call.name not in RULES and self.custom(node) is None:
            return FREE
        mask = self.mask(node)
        if mask is not None and self.state[mask] == FREE:
            return max(self.state[a] for a in inputs if a is not mask)
        if call.name not in LINEAR:
            return NONLINEAR if any(states) else FREE
        # Streams depend on a GEMM, but not through pointwise functions alone.
        streams = [a for a in inputs if not self.state[a] and self.follows_gemm[a]]
        if call.name in ("add", "sub", "rsub"):
            return FREE if NONLINEAR in states and streams else max(states)  # joining a residual stream ends a subgraph
        if any(states) and len(inputs) > 1:  # a multiplication or division of two tensors
            if all(states) or (call.name == "div" and states[1]):
                return NONLINEAR
            if not streams:
                return max(states)
            (stream,), (other,) = streams, (a for a in inputs if self.state[a])
            if is_mask(self.origin(stream)):
                return self.state[other]
            return FREE if self.state[other] == AFFINE or self._normalizes(stream, other) else NONLINEAR
        if any(states) and (call.args.count(inputs[0]) > 1 or (call.name == "div" and call.args[0] is not inputs[0])):
            return NONLINEAR  # x·x, 1/x
        return states[0]

    def _normalizes(self, scale: Node, node: Node) -> bool:
        """Return True if ``scale`` is computed from ``node`` itself, as 1/sqrt(mean(node²)) is: a norm, not a gate."""
        node = self.origin(node)
        for _ in range(8):
            if scale is node or not scale.all_input_nodes:
                break
            scale = scale.all_input_nodes[0]
        return scale is node


def inline_bodies(
    graph: Graph, *, autograd_functions: bool = False
) -> tuple[Graph, dict[Node, tuple[Node, tuple[Node, ...]]]]:
    """Copy a graph for analysis, with the bodies of higher-order operators in place of their calls.

    A second call of a body remains a call. A call with several bodies also remains, with the bodies' results as
    additional arguments.

    Args:
        graph: the graph, which is not changed.
        autograd_functions: True inlines the forwards of autograd functions, and no other body. False inlines all other
            bodies.

    Returns:
        The copy; and for each of its nodes the original, with the operators whose bodies contain the original.
    """
    inlined, copied, seen = Graph(graph.owning_module), {}, set[GraphModule]()

    def copy_into(graph: Graph, arguments: Sequence[Any], inside: tuple[Node, ...]) -> Any:
        known: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=False))

        def operands(node: Node, body: GraphModule) -> list[Any]:
            """Return the operator's last arguments. The body reads them, or parts of them (``map``, ``scan``)."""
            count = len(body.graph.find_nodes(op="placeholder"))
            tensors = [known[a] for a in _nodes((node.args, node.kwargs)) if a.op != "get_attr" or body_of(a) is None]
            return tensors[len(tensors) - count :] if count <= len(tensors) else []

        for node in graph.nodes:
            source = node.args[0] if node.target is operator.getitem else None
            if node in known:
                continue
            if node.op == "output" and inside:
                return torch.fx.map_arg(node.args[0], known.__getitem__)
            if isinstance(source, Node) and isinstance(known[source], (tuple, list)):
                known[node] = known[source][node.args[1]]
                continue
            is_function = node.target is _CUSTOM
            calls = isinstance(node.target, torch._ops.HigherOrderOperator) and is_function == autograd_functions
            bodies = list(dict.fromkeys(_bodies(node)))[: 1 if is_function else None] if calls else []
            fresh = [body for body in bodies if body not in seen]
            seen.update(fresh)
            results = [copy_into(body.graph, operands(node, body), (*inside, node)) for body in fresh]
            if len(results) == len(bodies) == 1:
                known[node] = results[0][0] if is_function else results[0]  # a forward also returns saved values
            else:
                known[node] = copy = inlined.node_copy(node, known.__getitem__)
                copy.args += tuple(results)
                copied[copy] = node, inside
        return None

    copy_into(graph, (), ())
    return inlined, copied


def read(graph: Graph) -> tuple[tuple[Step, ...], Any]:
    """Read a graph as an expression of its placeholders.

    Returns:
        The steps, and the graph's output with a ``Ref`` for each node in it.

    Raises:
        Unprovable: a call is not pointwise, or may round an intermediate value.
    """
    steps: list[Step] = []
    refs: dict[Node, Ref] = {}
    operands: list[Node] = []
    output: Any = None
    for node in graph.nodes:
        call = Call(node)
        if node.op == "placeholder":
            refs[node] = Ref("operand", len(operands))
            operands.append(node)
        elif node.op == "output":
            output = torch.fx.map_arg(node.args[0], refs.__getitem__)
        elif call.inplace or not (call.name in RULES or call.name in CASTS or call.name in COPIES | REGIONS):
            raise Unprovable(f"{label(node)} is not a supported call")
        elif call.name in RULES:
            args, kwargs = torch.fx.map_arg((call.args, tuple(call.kwargs.items())), refs.__getitem__)
            refs[node] = Ref("value", len(steps))
            steps.append((call.name, tuple(args), tuple(kwargs)))
        elif call.name not in REGIONS:
            refs[node] = refs[node.all_input_nodes[0]]
        if node in refs and node not in operands:
            value = tensor(node)
            for source in (tensor(operand) for operand in operands if operand.users):
                if value is None or source is None or torch.promote_types(source.dtype, value.dtype) != value.dtype:
                    raise Unprovable(f"{label(node)} may round")
    return tuple(steps), output
