"""Move saved tensors to the host's memory in forward, and back in backward: ``FusionPolicy(offload=…)``.

Forward copies a tensor with ``ao::offload`` and saves the copy. ``ao::wait_tensor(copy, None, tensor)`` follows later:
until then the GPU's tensor stays alive, and afterwards Inductor frees its memory or reuses it. Backward fetches the
copy with ``ao::reload``, and ``ao::wait_tensor`` precedes the first reader. PyTorch has these operators for its own
edit, ``enable_activation_offloading``, in which the wait itself frees the tensor. The schema does not declare this, so
Inductor may schedule readers behind the wait (docs/upstream.md).

Copies run on another stream, next to GEMMs. The link's rate is not known here, so each copy gets the same window: as
many GEMMs as there are between the same tensor of two layers. A wait in forward follows its copy by one window, and a
reload precedes its reader by one. If a layer's copies take no longer than the layer, nothing waits.

Copying does not change the kernels before it: a copy begins after the last pointwise call that reads the tensor, or
before the first GEMM that does. Inductor writes the tensor to memory at this point even without a copy.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

from torch_fused_ops.graphs.modules import innermost, module_stack
from torch_fused_ops.graphs.reasons import Kind, Rejection
from torch_fused_ops.lowerings.partition import base, is_gemm, op_types
from torch_fused_ops.lowerings.saved_tensors import SavedTensors, by_memory
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, without_numbers

log = logging.getLogger("torch_fused_ops")

aten, ao = torch.ops.aten, torch.ops.ao

MIN_BYTES = 1 << 20  # smaller tensors stay: a copy takes a call of Python and about 20 µs
DEVICES = ("cuda",)  # types of devices whose tensors move
STAYS = "torch_fused_ops_stays"  # key of the reason why a saved tensor stays on its device
MOVED = "torch_fused_ops_moved"  # key of a host copy's original: its name in forward


class _Copies(NamedTuple):
    """A tensor's copies to the host and back.

    Attributes:
        module: the path of the module that computes the tensor.
        kind: equal for the same tensor of all layers.
        host: forward's call that waits for the copy to the host.
        reload: backward's call that begins the copy to the device.
        begins: the number of GEMMs in forward before the copy to the host.
        ends: the number of GEMMs in backward before the tensor's first reader.
    """

    module: str
    kind: tuple[Any, ...]
    host: Node
    reload: Node
    begins: int
    ends: int


def prevented() -> str:
    """Return the setting of this compilation that prevents offloading, or ""."""
    if inductor_config.triton.cudagraphs:
        return "a CUDA graph would copy to the same host memory in each step"
    if torch._dynamo.config.compiled_autograd:
        return "compiled autograd rejects the operators, whose results are views"
    return "its calls have not been tried in C++ wrappers" if inductor_config.cpp_wrapper else ""


def move_to_host(pair: SavedTensors, policy: FusionPolicy) -> None:
    """Move saved tensors of the policy's modules to the host. Record in other tensors' metadata why they stay."""
    if policy.offload is False or prevented():
        return
    tensors = [n for n in pair.saved() if isinstance(n.meta.get("val"), torch.Tensor) and n not in pair.static]
    gemms: dict[Node, int] = {}  # the number of GEMMs before each node of the two graphs
    for graph in (pair.forward, pair.backward):
        counts = itertools.accumulate(map(_takes_time, graph.nodes), initial=0)
        gemms |= zip(graph.nodes, counts, strict=False)
    copies: list[_Copies] = []
    for memory, views in by_memory(tensors).items():
        if policy.offloads(enclosing_modules(module_stack(memory))):
            try:
                copies.append(_move(pair, memory, views, gemms))
                log.info("%s in %s moves to the host", memory.name, innermost(memory))
            except Rejection as rejection:
                log.info("%s in %s stays on the device: %s", memory.name, innermost(memory), rejection)
                for view in views:
                    view.meta[STAYS] = rejection.reason
    _overlap(pair, copies)


def _move(pair: SavedTensors, memory: Node, views: Sequence[Node], gemms: Mapping[Node, int]) -> _Copies:
    """Save a host copy instead of ``views``, the saved views of one memory. Each wait directly follows its copy.

    Raises:
        Rejection: the tensor stays.
    """
    value = memory.meta.get("val")
    if memory.op != "call_function" or memory in pair.caller_owned:
        raise Rejection(Kind.STAYS_WITH_CALLER, "it shares memory with an argument, a parameter or a result")
    if type(value) is not FakeTensor or value.device.type not in DEVICES:
        raise Rejection(Kind.STAYS_BY_FORM, f"it is not a plain tensor on {DEVICES}")
    if pair.cost(views) < MIN_BYTES:
        raise Rejection(Kind.STAYS_SMALL, f"it has less than {MIN_BYTES >> 10} KiB")
    # One view is copied alone if it is dense. Otherwise its whole memory is copied, and backward repeats the views.
    source = views[0] if len(views) == 1 and _dense_order(views[0].meta["val"]) else memory
    order = _dense_order(source.meta["val"])
    if order is None:
        raise Rejection(Kind.STAYS_BY_FORM, "it has gaps or overlaps in memory")
    calls = _calls_between(pair, source, views)
    place, begins = _place_of_copy(source, memory, gemms)
    readers = {reader for view in views for reader in _readers(pair.in_backward[view])}
    first = next((node for node in gemms if node in readers), None)
    if begins == gemms[pair.output_node] or first is None or not gemms[first]:
        raise Rejection(Kind.STAYS_UNHIDDEN, "no GEMM would run during its copies")

    def call(graph: Graph, suffix: str, target: Any, *args: Any) -> Node:
        node = graph.create_node("call_function", target, args, name=f"{source.name}_{suffix}")
        node.meta = {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}
        with torch.no_grad():
            node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        return node

    is_contiguous = order == sorted(order)
    with pair.forward.inserting_before(place):
        packed = source if is_contiguous else call(pair.forward, "packed", aten.permute.default, source, order)
        offload = call(pair.forward, "offload", ao.offload.default, packed)
        host = call(pair.forward, "host", ao.wait_tensor.default, offload, None, packed)
        host.meta[MOVED] = views[0].name
    (arrived,) = pair.save_instead(views[0], [host])
    for view in views[1:]:
        pair.save_instead(view, [])
    with pair.backward.inserting_before(first):
        reload = call(pair.backward, "reload", ao.reload.default, arrived, value.device)
        ready = result = call(pair.backward, "ready", ao.wait_tensor.default, reload, None, arrived)
        if not is_contiguous:
            inverse = [order.index(axis) for axis in range(len(order))]
            result = call(pair.backward, "unpacked", aten.permute.default, ready, inverse)
        available = {**pair.in_backward, source: result}
        for view in calls:
            available[view] = pair.backward.node_copy(view, available.__getitem__)
    pair.reloaded.add(result)
    for view in views:
        pair.replace_in_backward(view, available[view])
    pair.in_backward.update((call, available[call]) for call in (source, *calls))
    module = innermost(memory)
    kind = (without_numbers(module), tuple(map(str, value.shape)), value.dtype, memory.target)
    return _Copies(module, kind, host, reload, begins, gemms[first])


def _dense_order(value: torch.Tensor) -> list[int] | None:
    """Return the order of axes in which a tensor is contiguous, or None."""
    strides = [stride if isinstance(stride, int) else stride.node.hint for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    with torch.no_grad():
        return order if value.permute(order).is_contiguous() else None


def _calls_between(pair: SavedTensors, source: Node, views: Iterable[Node]) -> list[Node]:
    """Return forward's calls that make ``views`` of ``source``, in order.

    Raises:
        Rejection: they read a size that is not saved.
    """
    between = set[Node]()
    for node in views:
        while node is not source:
            between.add(node)
            node = node.all_input_nodes[0]
    if any(size not in pair.in_backward for call in between for size in call.all_input_nodes[1:]):
        raise Rejection(Kind.STAYS_BY_FORM, "a size of its views is not saved")
    return [node for node in pair.forward.nodes if node in between]


def _readers(memory: Node) -> Iterator[Node]:
    """Yield the calls that read a tensor, through views."""
    for user in memory.users:
        if base(user) is base(memory):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _place_of_copy(source: Node, memory: Node, gemms: Mapping[Node, int]) -> tuple[Node, int]:
    """Return forward's node before which a copy begins, and the number of GEMMs before it.

    The copy begins before the first GEMM that reads the tensor, or else after its last reader.
    """
    readers, last = set(_readers(memory)), source
    for node in itertools.dropwhile(lambda node: node is not source, gemms):
        if node in readers:
            if _takes_time(node):
                return node, gemms[node]
            last = node
    return last.next, gemms[last] + _takes_time(last)


def _takes_time(node: Node) -> bool:
    return is_gemm(node) or op_types().is_compute_intensive(node)


def _overlap(pair: SavedTensors, copies: Sequence[_Copies]) -> None:
    """Move each wait in forward, and each reload in backward, as far from its other end as two layers are apart."""
    in_order = sorted(copies, key=lambda copy: copy.begins)
    out, back = windows((copy.module, copy.kind, copy.begins, copy.ends) for copy in in_order)
    forward = [*filter(_takes_time, pair.forward.nodes), pair.output_node]
    backward = list(filter(_takes_time, pair.backward.nodes))
    for copy in copies:
        forward[min(copy.begins + out, len(forward) - 1)].prepend(copy.host)
    for copy in sorted(copies, key=lambda copy: copy.ends):
        backward[max(0, copy.ends - back)].prepend(copy.reload)


def windows(tensors: Iterable[tuple[str, object, int, int]]) -> tuple[int, int]:
    """Return during how many GEMMs a copy to the host runs, and a copy back: as many as separate two layers.

    This is the median over the tensors of adjacent layers. A single layer's copies run during the whole graph.

    Args:
        tensors: (module, kind, GEMMs in forward before its copy, GEMMs in backward before its first reader) of each
            tensor that moves, in forward's order. The same tensor of all layers has one kind.
    """
    layers: dict[object, list[tuple[int, int]]] = {}  # the same tensor of all layers
    numbers: Counter[object] = Counter()  # a layer may have several tensors of a kind
    for module, kind, begins, ends in tensors:
        layers.setdefault((kind, numbers[kind, module]), []).append((begins, ends))
        numbers[kind, module] += 1
    neighbors = list(itertools.chain.from_iterable(map(itertools.pairwise, layers.values())))
    if not neighbors:
        return sys.maxsize, sys.maxsize
    out = statistics.median_low(later - begins for (begins, _), (later, _) in neighbors)
    back = statistics.median_low(ends - earlier for (_, ends), (_, earlier) in neighbors)
    return max(1, out), max(1, back)


# ---- the order of the generated calls --------------------------------------------------------------------------------


def keep_order(nodes: Sequence[Any]) -> None:
    """Fix the order of copies, waits and GEMMs in a scheduled graph.

    Otherwise Inductor moves each wait to its copy, because this frees memory earliest, and nothing overlaps.
    """
    # Inductor calls the results of operators that read a host's tensor unaligned. New tensors are aligned.
    for node in filter(_is_copy, nodes):
        results = (buffer.get_name() for buffer in node.node.outputs)
        V.graph.unaligned_buffers.difference_update(node.get_buffer_names(), results)

    def is_fixed(node: Any) -> bool:
        is_call = node.is_extern() and not isinstance(node.node, ir.MultiOutput)
        return _is_copy(node) or node.is_template() or is_call

    for before, after in itertools.pairwise(filter(is_fixed, nodes)):
        if _is_copy(before) or _is_copy(after):
            name, other = (next(iter(node.get_buffer_names())) for node in (before, after))
            after.add_fake_dep(WeakDep(name, mutating_buf=other, is_fake=True))


def _is_copy(node: Any) -> bool:
    operator = getattr(getattr(node, "node", None), "op_overload", None)
    return getattr(operator, "namespace", "") == "ao"
