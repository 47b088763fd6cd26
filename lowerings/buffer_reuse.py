"""Buffer reuse, in the scheduler pass: results of a kernel that are written over the kernel's inputs.

Inductor writes a loop's result over an input that nothing reads any more. It counts the other loops of the same
kernel as such readers (``SchedulerNode.decide_inplace_update``). A kernel that recomputes an activation beside its
gradients, from the same inputs, then allocates a buffer for each: three tensors of a GLU's hidden layer at a step's
peak. But where no loop waits for a reduction of the same kernel, the kernel has one body for all its loops: it loads
every input and then stores. A loop that reads an input at the index at which it writes can take its buffer.

This pass names one loop for each such input, and orders the input's other readers before that loop. Inductor checks
everything else itself, as for any kernel: later readers, inputs of the graph (backward may reuse donated ones only),
sizes, layouts, streams.

Inductor never considers two kinds of results. The pass makes them views of the input, as the parts of a concatenation
are views of it, so that Inductor itself tracks how long the memory is in use:

* the gradient of packed gate and up: a concatenation whose parts two loops write, in place of the packed tensor;
* a loop's result in place of an input that only other loops of the kernel read.

Here a kernel may read an element of the input, for a sum, too, only in the turn in which one of its loops writes that
very element of the result, so no other turn can find it changed. Nor may another thread: a store does not wait for
loads from its place, so loads and stores must be spread over threads alike. In a kernel of one axis Triton spreads
tensors of one dtype alike, unless something narrower in the kernel asks for more elements at once. With two axes, one
of them a sum's, a tile can be spread in several ways, and Triton loads a tile of fewer elements than threads several
times: another warp may have stored by then. A tuner may choose such a tile long after this pass, so the code of these
kernels has a barrier between loads and stores.

A C++ kernel is simpler: one thread computes a turn, and a body has all loads before all stores. Loops over the same
sizes have one body. A sum's loop has other sizes, so the pass leaves kernels with a sum alone.
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
User = Any  # NodeUser: a loop that reads a buffer, and whether it does at the index at which it writes


class _Kernel(NamedTuple):
    loops: Sequence[Loop]
    names: set[str]  # of its loops
    before: set[str]  # of what runs before it
    read: dict[str, Any]  # the buffers that it reads, by name, except those that must not be reused
    narrowest: int  # bytes of an element of what it reads or writes

    def readers(self, name: str) -> list[User]:
        """Its loops among the users of a buffer."""
        return [user for user in self.read[name].users if user.get_name() in self.names]


class _View(NamedTuple):
    result: Buffer
    source: Buffer
    written: list[Buffer]  # the loops' results that are the result, or its parts


def allow_reuse(nodes: Sequence[Any]) -> None:
    """Let results reuse the buffers of inputs, in a schedule's kernels that have a loop of one of our operators."""
    fused_nodes = [node for node in nodes if _is_ours(node)]
    pinned: frozenset[str] = frozenset()  # what must not be reused: mutated, aliased or unaligned buffers
    if fused_nodes:  # (Triton would spread an unaligned input over threads in another way than its aligned result.)
        aliased = (alias for buffer in fused_nodes[0].scheduler.name_to_buf.values() for alias in buffer.get_aliases())
        # Inductor calls every input of a CPU's graph unaligned: it checks the alignment of GPUs' inputs only.
        unaligned = V.graph.unaligned_buffers if fused_nodes[0].is_gpu() else ()
        pinned = _mutated_buffers(fused_nodes[0].scheduler).union(unaligned, aliased)
    kernels = [_kernel(node, pinned) for node in fused_nodes]
    plans = [(kernel, owners, _views(kernel, owners)) for kernel in kernels for owners in [_assign_buffers(kernel)]]
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
        for loop in kernel.loops if kernel.loops[0].is_gpu() else ():
            loop.codegen = functools.partial(_generate_behind_a_barrier, loop.codegen, bool(views))
    for view in (view for _, _, views in plans for view in views):
        # The memory is the input's, and in use as long as one of the two is.
        as_view = ir.ReinterpretView(data=ir.StorageBox(view.source.node), layout=view.result.node.get_output_spec())
        view.result.node.layout = ir.NonOwningLayout(as_view)
        for user in (*view.result.users, *view.source.users):
            user.can_inplace = False  # a user that took the memory alone would not be checked against the other's
        for buffer in view.written:
            # The tuner must not write over the inputs of the next configuration.
            buffer.get_mutations = functools.partial(tuple, [buffer.get_name()])


def _is_ours(node: Any) -> bool:
    """Recognize a kernel that is one body of several loops, one of them of our operators."""
    from torch._inductor.scheduler import FusedSchedulerNode

    # Neither a template nor kernels side by side.
    if type(node) is not FusedSchedulerNode or node.is_template():
        return False
    loops: Sequence[Loop] = node.get_nodes()
    device = node.get_device().type
    has_one_body = _HAS_ONE_BODY.get((device, getattr(inductor_config, f"{device}_backend", "")))
    if has_one_body is None or not has_one_body(node, loops):
        return False
    origins = (origin for loop in loops for origin in loop.node.get_origins())
    return any(getattr(origin.target, "namespace", None) == "fused" for origin in origins)


def _is_one_triton_body(node: Any, loops: Sequence[Loop]) -> bool:
    reductions = {loop.get_name() for loop in loops if loop.is_reduction()}
    if any(reductions & loop.ancestors for loop in loops):
        return False
    # Each loop has a turn for each element: a loop over rows alone would end the body before it.
    numel, sums = cast(Any, node.group[1])
    return all(loop.group[1] in {(numel, sums), (numel * sums, 1)} for loop in loops)


def _is_one_cpp_body(node: Any, loops: Sequence[Loop]) -> bool:
    return all(loop.group[1] == node.group[1] for loop in loops)


# By a device and its code generator.
_HAS_ONE_BODY = {("cuda", "triton"): _is_one_triton_body, ("cpu", "cpp"): _is_one_cpp_body}


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
    """Assign each loop at most one buffer, loops that fit the fewest buffers first."""
    fitting = {loop: [name for name in kernel.read if _can_reuse(kernel, name, loop)] for loop in kernel.loops}
    owners: dict[str, Loop] = {}
    for loop, names in sorted(fitting.items(), key=lambda item: len(item[1])):
        name = next((name for name in names if name not in owners), None)
        if name is not None:
            owners[name] = loop
    return owners


def _can_reuse(kernel: _Kernel, name: str, loop: Loop) -> bool:
    """Tell whether a loop may reuse a buffer, and needs memory at all.

    Nothing reads the buffer later. All its readers here read at the index at which they write, none reduces it, and
    the loop is one of them. The loop's result has the same dtype and is read elsewhere: else it needs no memory.
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
    """Results to make views of inputs, which Inductor never considers: at most one for each input."""
    views: list[_View] = []
    if not may_be_views():
        return views
    single_output_loops = (loop for loop in kernel.loops if len(loop.get_outputs()) == 1 and not loop.is_reduction())
    written = {loop: loop.get_outputs()[0] for loop in single_output_loops}
    writers: dict[str, list[Loop]] = {}
    for loop, output in written.items():
        whole = _concatenation(output.node)
        if whole is not None:
            writers.setdefault(whole.get_name(), []).append(loop)
        elif loop not in owners.values() and not output.get_aliases():
            writers[output.get_name()] = [loop]
    for result, loops in writers.items():
        buffer = kernel.loops[0].scheduler.name_to_buf[result]
        if not _is_for_others(kernel, buffer, [written[loop] for loop in loops]):
            continue
        write_indices = {at for loop in loops if (at := _written_at(loop, buffer.node)) is not None}
        taken = {*owners, *(view.source.get_name() for view in views)}
        for name, source in kernel.read.items():
            if name not in taken and _can_be_view(kernel, name, buffer, write_indices):
                views.append(_View(buffer, source, [written[loop] for loop in loops]))
                break
    return views


def may_be_views() -> bool:
    """Tell whether results may become views of inputs: not where CUDA graphs, C++ or a plan own the memory."""
    triton = inductor_config.triton
    return not (
        triton.cudagraphs or inductor_config.cpp_wrapper or inductor_config.memory_planning or triton.multi_kernel
    )


def _is_for_others(kernel: _Kernel, buffer: Buffer, written: Sequence[Buffer]) -> bool:
    """Tell whether a result is read after the kernel, not returned by the graph, and written here as a whole, once."""
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
    """Tell whether a result can be a view of an input: as large, last read here, and only where it is written."""
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
    """The names of buffers that something other than their maker writes, and of those that must keep their memory.

    Later readers know a mutated buffer by another name (``Scheduler.mutation_renames``).
    """
    mutated = scheduler.mutation_renames.keys() | scheduler.mutation_real_name.keys() | V.graph.never_reuse_buffers
    return frozenset(mutated.union(scheduler.mutation_real_name.values()))


def _itemsize(name: str) -> int:
    """Bytes of an element of a kernel's input or output; 0 for a value that is not a tensor."""
    buffer = V.graph.try_get_buffer(name)
    dtype = None if buffer is None else cast(Any, buffer).maybe_get_dtype()
    return dtype.itemsize if dtype is not None else 0


def _concatenation(node: Any) -> Any:
    """The concatenation that a loop's result is a part of; None where it is not a part of one."""
    layout = node.get_output_spec()
    if not isinstance(layout, ir.NonOwningLayout) or not isinstance(layout.view, ir.ReinterpretView):
        return None
    whole: Any = cast(Any, layout.view).data.data
    return whole if isinstance(whole, ir.ConcatKernel) and type(whole.get_output_spec()) is ir.FixedLayout else None


def _written_at(loop: Any, result: Any) -> tuple[Any, Any] | None:
    """The index at which a loop writes a result in a turn, and the turns' sizes; None where it cannot be told."""
    (output,) = loop.get_outputs()
    start = 0 if output.node is result else output.node.get_output_spec().view.get_layout().offset
    writes = [dep for dep in loop.read_writes.writes if dep.name == output.get_name()]
    if len(writes) != 1 or not isinstance(writes[0], MemoryDep) or writes[0].mode is not None:
        return None
    # Triton could spread loads and stores of a tensor that does not begin at a vector in two ways.
    return (writes[0].index + start, writes[0].size) if start % 16 == 0 else None


def _fills_same_memory(node: Any, result: Any) -> bool:
    """Tell whether a result fills the memory of a buffer that has its own, which the graph may overwrite."""
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
    """Generate a loop's code, its stores behind a barrier where the kernel overwrites its inputs.

    Inductor writes the same barrier itself, in front of a value that is stored once for many loads (triton#1615).

    Args:
        generate: ``SchedulerNode.codegen`` of the loop.
        has_views: whether some of the kernel's results are views of its inputs.
        args: ``generate``'s.
    """
    barrier, kernel = "tl.debug_barrier()", cast(Any, V.kernel)
    writes_over_inputs = has_views or kernel.args.inplace_buffers
    if writes_over_inputs and len(kernel.active_range_trees()) > 1 and barrier not in kernel.stores.getvalue():
        kernel.stores.writeline(barrier)
    generate(*args)
