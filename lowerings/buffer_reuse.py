"""Buffer reuse, in the scheduler pass: kernels write results over their own inputs.

Inductor writes a loop's result over an input that has no later reader. It counts other loops of the same kernel as
later readers (``SchedulerNode.decide_inplace_update``). A kernel that recomputes an activation and also computes its
gradients, from the same inputs, therefore allocates a buffer for each result: for a GLU, three of the hidden layer's
size, at a step's peak. But if no loop needs a reduction of the same kernel, the kernel has one body, which loads every
input before it stores. A loop that writes at the index at which it reads an input can then reuse the input's buffer.

This pass assigns each such input to one loop, and declares the input's other readers ancestors of this loop. Inductor
checks everything else, as for any kernel: later readers, inputs of the graph (backward may reuse donated ones only),
sizes, layouts, streams.

Inductor never considers two kinds of results. The pass makes them views of the input, just as the parts of a
concatenation are views of the whole, so that Inductor tracks how long the memory is in use:

* the gradient of packed gate and up: a concatenation of two loops' results. It becomes a view of the packed tensor.
* the result of a loop that does not read the input. It becomes a view of an input that other loops of the kernel read.

Such a kernel, even with a sum, may read an input element only in the iteration that writes the same element of the
result. No other iteration then sees it overwritten. Other threads must not see it either. A store does not wait for
loads of the same address, so loads and stores must use the same thread layout. In a kernel with one axis, Triton uses
one layout for all tensors of a dtype, unless a narrower tensor in the kernel needs more elements per thread. With two
axes, one of which is summed, a tile has several layouts. If it has fewer elements than threads, several warps load the
same element, and a faster warp may already have overwritten it. A tuner may choose such a tile long after this
pass, so the code of these kernels has a barrier between loads and stores.

The pass changes Triton kernels on CUDA and ROCm GPUs only. C++ kernels allocate their results: the host's memory is
rarely short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

from torch_fused_ops.lowerings import compat

Loop = Any  # torch._inductor.scheduler.SchedulerNode
Buffer = Any  # SchedulerBuffer
User = Any  # NodeUser: a loop that reads a buffer; ``can_inplace`` if it reads at the index at which it writes


class _Kernel(NamedTuple):
    loops: Sequence[Loop]
    names: set[str]  # names of its loops
    before: set[str]  # names of the loops that must run first
    read: dict[str, Any]  # its inputs by name: buffers that it does not write, except pinned ones
    narrowest: int  # bytes of the smallest element that it reads or writes

    def readers(self, name: str) -> list[User]:
        """Return the users of a buffer that are loops of this kernel."""
        return [user for user in self.read[name].users if user.get_name() in self.names]


class _View(NamedTuple):
    result: Buffer
    source: Buffer
    written: list[Buffer]  # the loops' results: the result itself, or the parts of a concatenation


def allow_reuse(nodes: Sequence[Any]) -> None:
    """Let results reuse input buffers, in the scheduled kernels that contain a fused operator."""
    fused_nodes = [node for node in nodes if _is_ours(node)]
    pinned: frozenset[str] = frozenset()  # mutated, aliased and unaligned buffers, which must not be reused
    if fused_nodes:  # (Triton uses different thread layouts for an unaligned input and its aligned result.)
        aliased = (alias for buffer in fused_nodes[0].scheduler.name_to_buf.values() for alias in buffer.get_aliases())
        pinned = _mutated_buffers(fused_nodes[0].scheduler).union(V.graph.unaligned_buffers, aliased)
    plans = []
    for node in fused_nodes:
        kernel = _kernel(node, pinned)
        owners = _assign_buffers(kernel)
        plans.append((kernel, owners, _views(kernel, owners)))
    for kernel, owners, _ in plans:
        owning_loops = list(owners.values())
        for name in kernel.read:
            owner, readers = owners.get(name), kernel.readers(name)
            for user in readers if len(readers) > 1 else ():
                if owner is not None or user.node in owning_loops:
                    user.can_inplace = user.node is owner
        for name, loop in owners.items():
            loop.ancestors = loop.ancestors | {
                user.get_name() for user in kernel.readers(name) if user.node is not loop
            }
    for kernel, _, views in plans:
        for loop in kernel.loops:
            loop.codegen = functools.partial(_generate_behind_a_barrier, loop.codegen, bool(views))
    for view in (view for _, _, views in plans for view in views):
        # The result uses the input's memory, which is in use as long as the input or the result is.
        as_view = ir.ReinterpretView(data=ir.StorageBox(view.source.node), layout=view.result.node.get_output_spec())
        view.result.node.layout = ir.NonOwningLayout(as_view)
        for user in (*view.result.users, *view.source.users):
            user.can_inplace = False  # Inductor would not check a reuse of this memory against the other buffer's users
        for buffer in view.written:
            # Declare a mutation, so that tuning one configuration does not change the next one's inputs.
            buffer.get_mutations = functools.partial(tuple, [buffer.get_name()])


def _is_ours(node: Any) -> bool:
    """Return True for a Triton kernel whose loops share one body and include a fused operator."""
    from torch._inductor.scheduler import FusedSchedulerNode

    # Exclude templates and horizontally fused (foreach) kernels.
    if type(node) is not FusedSchedulerNode or node.is_template():
        return False
    loops: Sequence[Loop] = node.get_nodes()
    is_triton = node.get_device().type == "cuda" and inductor_config.cuda_backend == "triton"
    if not is_triton or not _has_one_body(node, loops):
        return False
    origins = (origin for loop in loops for origin in loop.node.get_origins())
    return any(getattr(origin.target, "namespace", None) == "fused" for origin in origins)


def _has_one_body(node: Any, loops: Sequence[Loop]) -> bool:
    reductions = {loop.get_name() for loop in loops if loop.is_reduction()}
    if any(reductions & loop.ancestors for loop in loops):
        return False
    # Every loop must visit every element. A loop over rows only would split the kernel body.
    numel, sums = cast(Any, node.group[1])
    return all(loop.group[1] in {(numel, sums), (numel * sums, 1)} for loop in loops)


def _kernel(node: Any, pinned: Collection[str]) -> _Kernel:
    buffers = {**node.scheduler.name_to_buf, **node.scheduler.name_to_donated_buffer}
    loops = node.get_nodes()
    read = dict.fromkeys(dep.name for loop in loops for dep in loop.read_writes.reads)
    written = {output.get_name() for loop in loops for output in loop.get_outputs()}
    return _Kernel(
        loops,
        {loop.get_name() for loop in loops},
        set(node.ancestors),
        {name: buffers[name] for name in read if name in buffers and name not in written and name not in pinned},
        min(_itemsize(name) for name in written.union(read)),
    )


def _assign_buffers(kernel: _Kernel) -> dict[str, Loop]:
    """Assign at most one buffer to each loop, first to loops that can reuse the fewest buffers."""
    fitting = {loop: [name for name in kernel.read if _can_reuse(kernel, name, loop)] for loop in kernel.loops}
    owners: dict[str, Loop] = {}
    for loop, names in sorted(fitting.items(), key=lambda item: len(item[1])):
        name = next((name for name in names if name not in owners), None)
        if name is not None:
            owners[name] = loop
    return owners


def _can_reuse(kernel: _Kernel, name: str, loop: Loop) -> bool:
    """Return True if a loop may reuse a buffer, and needs memory.

    The buffer must not have later readers. The loop must read it. Each loop of this kernel that reads it must read at
    the index at which this reader writes, without reducing it. The loop's result must have the same dtype. Another
    kernel must read the result, or the graph return it: otherwise the result does not need memory.
    """
    buffer, readers, outputs = kernel.read[name], kernel.readers(name), loop.get_outputs()
    return (
        len(outputs) == 1
        and not outputs[0].get_aliases()
        and any(user.get_name() not in kernel.names for user in outputs[0].users)
        and outputs[0].node.get_dtype() == buffer.node.get_dtype()
        and any(user.node is loop for user in readers)
        and all(user.can_inplace and not user.node.is_reduction() for user in readers)
        and all(user.get_name() in kernel.names | kernel.before for user in buffer.users)
    )


def _views(kernel: _Kernel, owners: Mapping[str, Loop]) -> list[_View]:
    """Return the results to make views of inputs, at most one for each input."""
    views: list[_View] = []
    if not can_make_views():
        return views
    single_output_loops = (loop for loop in kernel.loops if len(loop.get_outputs()) == 1 and not loop.is_reduction())
    written = {loop: loop.get_outputs()[0] for loop in single_output_loops}
    writers: dict[str, list[Loop]] = {}
    for loop, output in written.items():
        joined = _concatenation(output.node)
        if joined is not None:
            writers.setdefault(joined.get_name(), []).append(loop)
        elif loop not in owners.values() and not output.get_aliases():
            writers[output.get_name()] = [loop]
    for result, loops in writers.items():
        buffer = kernel.loops[0].scheduler.name_to_buf[result]
        if not _is_intermediate(kernel, buffer, [written[loop] for loop in loops]):
            continue
        write_indices = {_written_at(loop, buffer.node) for loop in loops} - {None}
        used_names = {*owners, *(view.source.get_name() for view in views)}
        for name, source in kernel.read.items():
            if name not in used_names and _can_be_view(kernel, name, buffer, write_indices):
                views.append(_View(buffer, source, [written[loop] for loop in loops]))
                break
    return views


def can_make_views() -> bool:
    """Return False if CUDA graphs, a C++ wrapper, memory planning or multi-kernels prevent views of inputs."""
    triton = inductor_config.triton
    return not (
        triton.cudagraphs or inductor_config.cpp_wrapper or inductor_config.memory_planning or triton.multi_kernel
    )


def _is_intermediate(kernel: _Kernel, buffer: Buffer, written: Sequence[Buffer]) -> bool:
    """Return True if a later kernel reads a result that the graph does not return and only this kernel writes."""
    from torch._inductor.scheduler import OutputNode

    users = [user for part in (buffer, *written) for user in part.users]
    names = {part.get_name() for part in (buffer, *written)}
    parts = buffer.node.inputs if isinstance(buffer.node, ir.ConcatKernel) else ()
    return (
        any(user.get_name() not in kernel.names for user in buffer.users)
        and not any(isinstance(user.node, OutputNode) for user in users)
        and {cast(Any, part).get_name() for part in parts} <= names
        and names.isdisjoint(_mutated_buffers(kernel.loops[0].scheduler))
    )


def _can_be_view(kernel: _Kernel, name: str, result: Buffer, write_indices: Collection[Any]) -> bool:
    """Return True if a result can be a view of an input: same size, last read here, only at written indices."""
    buffer, readers = kernel.read[name], kernel.readers(name)
    reads = [dep for user in readers for dep in user.node.read_writes.reads if dep.name == name]
    return (
        _fills_same_memory(buffer.node, result.node)
        and _itemsize(name) <= kernel.narrowest
        and all(user.get_name() in kernel.names | kernel.before for user in buffer.users)
        and all(isinstance(dep, MemoryDep) and (dep.index, dep.size) in write_indices for dep in reads)
        and not any(compat.on_other_streams(loop, name) for loop in kernel.loops)
    )


# ---- Inductor's buffers ----------------------------------------------------------------------------------------------


def _mutated_buffers(scheduler: Any) -> frozenset[str]:
    """Return the names of buffers that a later node mutates, or whose memory must not be reused.

    Later readers use the mutated buffer's new name (``Scheduler.mutation_renames``).
    """
    mutated = scheduler.mutation_renames.keys() | scheduler.mutation_real_name.keys() | V.graph.never_reuse_buffers
    return frozenset(mutated.union(scheduler.mutation_real_name.values()))


def _itemsize(name: str) -> int:
    """Return the element size in bytes of a kernel's input or output; 0 if it is not a tensor."""
    buffer = V.graph.try_get_buffer(name)
    dtype = None if buffer is None else cast(Any, buffer).maybe_get_dtype()
    return dtype.itemsize if dtype is not None else 0


def _concatenation(node: Any) -> Any:
    """Return the concatenation that a loop's result is a part of, or None."""
    layout = node.get_output_spec()
    if not isinstance(layout, ir.NonOwningLayout) or not isinstance(layout.view, ir.ReinterpretView):
        return None
    joined: Any = cast(Any, layout.view).data.data
    return joined if isinstance(joined, ir.ConcatKernel) and type(joined.get_output_spec()) is ir.FixedLayout else None


def _written_at(loop: Any, result: Any) -> tuple[Any, Any] | None:
    """Return the index at which a loop writes a result, and the loop's sizes; None if unknown or not aligned."""
    (output,) = loop.get_outputs()
    start = 0 if output.node is result else output.node.get_output_spec().view.get_layout().offset
    writes = [dep for dep in loop.read_writes.writes if dep.name == output.get_name()]
    if len(writes) != 1 or not isinstance(writes[0], MemoryDep) or writes[0].mode is not None:
        return None
    # If a tensor does not begin at a vector boundary, Triton may use different thread layouts for its loads and stores.
    return (writes[0].index + start, writes[0].size) if start % 16 == 0 else None


def _fills_same_memory(node: Any, result: Any) -> bool:
    """Return True if a result exactly fills a buffer that owns its memory and may be overwritten."""
    layout, other = node.get_output_spec(), result.get_output_spec()
    return (
        isinstance(node, (ir.DonatedBuffer, ir.ComputedBuffer, ir.ExternKernelOut))
        and type(layout) is type(other) is ir.FixedLayout
        and layout.offset == 0
        and (layout.device, layout.dtype) == (other.device, other.dtype)
        and layout.is_contiguous()
        and other.is_contiguous()
        and layout.storage_size() == other.storage_size()
        and not node.get_inputs_that_alias_output()
        and not node.get_mutation_names()
    )


def _generate_behind_a_barrier(generate: Callable[..., None], has_views: bool, *args: Any) -> None:
    """Generate a loop's code. If the kernel has two axes and overwrites inputs, put a barrier before the stores.

    Inductor puts the same barrier before it stores a broadcast value over an input (triton#1615).

    Args:
        generate: ``SchedulerNode.codegen`` of the loop.
        has_views: True if a result of the kernel is a view of an input.
        args: passed to ``generate``.
    """
    barrier, kernel = "tl.debug_barrier()", cast(Any, V.kernel)
    writes_over_inputs = has_views or kernel.args.inplace_buffers
    if writes_over_inputs and len(kernel.active_range_trees()) > 1 and barrier not in kernel.stores.getvalue():
        kernel.stores.writeline(barrier)
    generate(*args)
