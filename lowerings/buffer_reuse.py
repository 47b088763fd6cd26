"""Stage 4, in Triton kernels: which of a kernel's results take the memory of what the kernel reads.

Inductor writes a loop's result over an input that nothing else reads any more, and takes the other loops of the same
kernel for such readers (``SchedulerNode.decide_inplace_update``). A kernel that computes an activation again beside its
gradients, from the same inputs, then needs new memory for each: three tensors of a GLU's hidden layer at a step's peak.
But where no loop waits for a reduction of the same kernel, the kernel has one body for all its loops, which loads
whatever they read and then stores. Each input that they read at the index at which they write can be given to one.

This pass says of each input which loop may have it, and of that loop that the input's other readers come before it.
The rest Inductor asks itself, as for any kernel: whether something else still reads the input, whether its memory may
be taken at all (not a graph's input, but for tensors that backward is handed for good), sizes, layouts, streams.

Two results Inductor never asks for, and they are made views of the input, as the parts of a concatenation are of it, so
that Inductor itself knows how long the memory is in use:

* of packed gate and up the gradient, a concatenation whose parts two loops write, in the place of the packed tensor;
* a loop's result in the place of what only other loops of the kernel read.

Here an element of the input may be read only where, in the same turn, one of the kernel's loops writes that very
element of the result. So no other turn can find it changed. And no other thread: what is stored need not wait for what
is loaded from there, so load and store must be spread over threads alike. In a kernel of one axis Triton spreads what
is of one dtype so, where nothing narrower in the kernel asks for more elements at once. With two axes, a sum's among
them, there are several ways to spread a tile, and Triton loads a tile of fewer elements than threads again for each:
another warp may have stored by then. A tuner may choose such a tile long after this pass. So the code of these kernels
has a barrier between what they load and what they store.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch_fused_ops.lowerings import compat

__all__ = ["allow"]

Loop = Any  # torch._inductor.scheduler.SchedulerNode
Buffer = Any  # SchedulerBuffer
User = Any  # NodeUser: a loop that reads a buffer, and whether it does at the index at which it writes


class _Kernel(NamedTuple):
    loops: Sequence[Loop]
    names: set[str]  # of its loops
    before: set[str]  # of what runs before it
    read: dict[str, Any]  # the buffers that it reads, by name, but for those whose memory stays
    narrowest: int  # bytes of an element of what it reads or writes

    def readers(self, name: str) -> list[User]:
        """Its loops among the users of a buffer."""
        return [user for user in self.read[name].users if user.get_name() in self.names]


class _View(NamedTuple):
    result: Buffer
    place: Buffer
    written: list[Buffer]  # the loops' results that are the result, or its parts


def allow(nodes: Sequence[Any]) -> None:
    """Let results take the memory of inputs, in those kernels of a schedule that have a loop of an operator of ours."""
    ours = [node for node in nodes if _is_ours(node)]
    stay = compat.buffers_that_stay(ours[0].scheduler) if ours else frozenset()
    kernels = [_kernel(node, stay) for node in ours]
    found = [(kernel, owners, _views(kernel, owners)) for kernel in kernels for owners in [_owners(kernel)]]
    for kernel, owners, _ in found:
        taking = list(owners.values())
        for name in kernel.read:
            owner, readers = owners.get(name), kernel.readers(name)
            for user in readers if len(readers) > 1 else ():
                if owner is not None or user.node in taking:
                    user.can_inplace = user.node is owner
        for name, loop in owners.items():
            loop.ancestors = loop.ancestors | {
                user.get_name() for user in kernel.readers(name) if user.node is not loop
            }
    for kernel, _, views in found:
        for loop in kernel.loops:
            loop.codegen = functools.partial(compat.generate_behind_a_barrier, loop.codegen, bool(views))
    for view in (view for _, _, views in found for view in views):
        compat.make_view(view.result.node, view.place.node)
        for user in (*view.result.users, *view.place.users):
            user.can_inplace = False  # it would have the memory to itself, and who else has it would not be asked
        for each in view.written:
            # Who times a kernel's configurations must not write over what the next one reads.
            each.get_mutations = functools.partial(tuple, [each.get_name()])


def _is_ours(node: Any) -> bool:
    """Whether it is a Triton kernel, one body of several loops, and one of them is of an operator of ours."""
    if not compat.is_fused_triton(node):
        return False
    reductions = {loop.get_name() for loop in node.get_nodes() if loop.is_reduction()}
    if any(reductions & loop.ancestors for loop in node.get_nodes()) or not compat.is_one_body(node):
        return False
    origins = (origin for loop in node.get_nodes() for origin in loop.node.get_origins())
    return any(getattr(origin.target, "namespace", None) == "fused" for origin in origins)


def _kernel(node: Any, stay: Collection[str]) -> _Kernel:
    buffers = {**node.scheduler.name_to_buf, **node.scheduler.name_to_donated_buffer}
    loops = node.get_nodes()
    read = dict.fromkeys(dep.name for loop in loops for dep in loop.read_writes.reads)
    written = {output.get_name() for loop in loops for output in loop.get_outputs()}
    return _Kernel(
        loops,
        {loop.get_name() for loop in loops},
        set(node.ancestors),
        {name: buffers[name] for name in read if name in buffers and name not in written and name not in stay},
        min(compat.itemsize(name) for name in written.union(read)),
    )


def _owners(kernel: _Kernel) -> dict[str, Loop]:
    """Which loop may have which buffer: each at most one, those that fit the fewest first."""
    fitting = {loop: [name for name in kernel.read if _fits(kernel, name, loop)] for loop in kernel.loops}
    owners: dict[str, Loop] = {}
    for loop, names in sorted(fitting.items(), key=lambda item: len(item[1])):
        name = next((name for name in names if name not in owners), None)
        if name is not None:
            owners[name] = loop
    return owners


def _fits(kernel: _Kernel, name: str, loop: Loop) -> bool:
    """Whether a loop may have a buffer, and has use for it.

    Nothing reads the buffer later, all its readers here do as they write and none of them sums it up, the loop is one
    of them, and its result is of the same dtype and read elsewhere: else it needs no memory.
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
    """Results that take the memory of inputs without Inductor's asking, each input but once."""
    found: list[_View] = []
    if not compat.may_be_views():
        return found
    alone = (loop for loop in kernel.loops if len(loop.get_outputs()) == 1 and not loop.is_reduction())
    written = {loop: loop.get_outputs()[0] for loop in alone}
    parts: dict[str, list[Loop]] = {}
    for loop, output in written.items():
        whole = compat.concatenation(output.node)
        if whole is not None:
            parts.setdefault(whole.get_name(), []).append(loop)
        elif loop not in owners.values() and not output.get_aliases():
            parts[output.get_name()] = [loop]
    for result, loops in parts.items():
        buffer = kernel.loops[0].scheduler.name_to_buf[result]
        if not _is_for_others(kernel, buffer, [written[loop] for loop in loops]):
            continue
        places = {at for loop in loops if (at := compat.written_at(loop, buffer.node)) is not None}
        taken = {*owners, *(view.place.get_name() for view in found)}
        for name, place in kernel.read.items():
            if name not in taken and _can_be(kernel, name, buffer, places):
                found.append(_View(buffer, place, [written[loop] for loop in loops]))
                break
    return found


def _is_for_others(kernel: _Kernel, buffer: Buffer, written: Sequence[Buffer]) -> bool:
    """Whether a result is read behind the kernel, is no result of the graph, and all of it is written here, once."""
    users = [user for each in (buffer, *written) for user in each.users]
    names = {each.get_name() for each in (buffer, *written)}
    return (
        any(user.get_name() not in kernel.names for user in buffer.users)
        and not any(compat.is_output(user.node) for user in users)
        and compat.parts(buffer.node) <= names
        and names.isdisjoint(compat.buffers_written_again(kernel.loops[0].scheduler))
    )


def _can_be(kernel: _Kernel, name: str, result: Buffer, places: Collection[Any]) -> bool:
    """Whether a result can be a view of what the kernel reads: as large, read last here, and only where written."""
    buffer, readers = kernel.read[name], kernel.readers(name)
    return (
        compat.same_memory(buffer.node, result.node)
        and compat.itemsize(name) <= kernel.narrowest
        and not any(user.node.is_reduction() for user in readers)
        and all(user.get_name() in kernel.names | kernel.before for user in buffer.users)
        and all(at in places for user in readers for at in compat.read_at(user.node, name))
        and not any(compat.on_other_streams(loop, name) for loop in kernel.loops)
    )
