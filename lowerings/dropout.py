"""``fused::dropout_add`` → Inductor IR: the random generator is part of the graph, so no mask is saved.

The generator's counter is an element's row-major index // 4 in every kernel, so eager and compiled masks are equal.
On a GPU, Inductor simplifies the index to the kernel's own index, and a thread has several contiguous indices. LLVM
then sees that four indices call the generator with the same arguments. C++ compilers do not see this in vectorized
code. On a CPU a separate loop therefore calls the generator once for four elements, and the mask is a temporary of one
byte per element (1024×1024 in float32 with a bias and a residual: forward 1.38 → 0.75 ns per element with AVX-512,
9.3 → 3.4 with AVX2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering, to_dtype
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import ops
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.families.dropout.operators import dropout_add
from torch_fused_ops.lowerings import operators, partition, programs  # as modules, which may still be importing

if TYPE_CHECKING:
    from torch_fused_ops.lowerings.programs import Box, Index, Load, Value

aten = torch.ops.aten


def _mask(like: Box, seed: Box, p: float) -> Box | None:
    """Return a mask of the elements that are not dropped, or None if all or no elements are dropped.

    The mask has booleans on GPUs, and bytes on CPUs, whose vector instructions load bytes faster.
    """
    if not formulas.is_random(p):
        return None
    size, device = list(like.get_size()), like.get_device()
    strides, count = ir.FlexibleLayout.contiguous_strides(size), sympy_product(size)
    load_seed, seed_index = seed.make_loader(), [0] * len(seed.get_size())

    def draw(element: Callable[..., Any], dtype: torch.dtype, ranges: Sequence[Any], *places: Load) -> Box:
        loads = *places, lambda _: load_seed(seed_index)
        (program,) = programs.programs_of(element, (torch.int64,) * len(loads), (p,), torch.int64, device.type)
        return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=lambda i: program(loads, i), ranges=ranges)

    def place(index: Index) -> Value:
        return ops.index_expr(sum(i * stride for i, stride in zip(index, strides, strict=True)), torch.int64)

    def counter(index: Index) -> Value:
        return ops.bitwise_right_shift(place(index), ops.constant(2, torch.int64))

    if programs.is_on_gpu(like):
        return draw(formulas.mask_at, torch.bool, size, counter, place)
    fours = [FloorDiv(count + 3, 4)]
    packed = draw(formulas.mask_of_four, torch.int32, fours, lambda index: ops.index_expr(index[0], torch.int64))
    packed.realize()
    mask = lowerings[aten.slice.Tensor](lowerings[aten.view.dtype](packed, torch.uint8), 0, 0, count)
    return lowerings[aten.view.default](mask, size)


def _dropout_add(input: Box, bias: Box | None, residual: Box | None, seed: Box, p: float) -> Box:
    loads = (input, programs.element_index), (bias, programs.column), (residual, programs.element_index)
    e = programs.Elementwise(input.get_size(), *loads, masks=[_mask(input, seed, p)])
    return e.node(formulas.dropout_add_element, p, dtype=(input if residual is None else residual).get_dtype())


def _unrounded_grad(grad: Tensor, d_input: Tensor, p: float) -> Tensor:
    """Return the input's gradient before rounding. Dropped elements are zeros in d_input and have gradient 0."""
    scaled = torch.where(torch.isnan(d_input), d_input, grad * formulas.keep_scale(p))
    return torch.where(d_input == 0, 0.0, scaled)


def _dropout_add_backward(
    grad: Box,
    seed: Box,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Box | None, ...]:
    d_input = d_bias = None
    # Rounding to dtype then does not make a gradient 0.
    shows_zeros = torch.finfo(dtype).tiny <= torch.finfo(grad.get_dtype()).tiny
    if torch.float64 in (dtype, bias_dtype):
        grad = to_dtype(grad, torch.float64)
    e = programs.Elementwise(grad.get_size(), (grad, programs.element_index), masks=[_mask(grad, seed, p)])
    if output_mask[0]:
        d_input = e.node(formulas.dropped, p, dtype=dtype)
        operators.before_sums(output_mask[1:], d_input)
    if output_mask[1] and bias_dtype is not None:
        in_blocks = operators.rows_in_blocks(grad)
        if d_input is not None and shows_zeros and programs.is_on_gpu(grad):
            # If a thread adds columns, the compiler merges few calls of the generator: 48 instructions per element on
            # sm_90, for bfloat16. Reading d_input instead takes 9, and as long as 14 would.
            loads = (in_blocks, programs.element_index), (operators.rows_in_blocks(d_input), programs.element_index)
            terms = programs.Elementwise(in_blocks.get_size(), *loads).node(_unrounded_grad, p)
        else:
            load, masks = (in_blocks, programs.element_index), [_mask(in_blocks, seed, p)]
            terms = programs.Elementwise(in_blocks.get_size(), load, masks=masks).node(formulas.dropped, p)
        d_bias = operators.sum_rows(terms, bias_dtype)
    return d_input, d_bias


register_lowering(dropout_add.forward.overload, type_promotion_kind=None)(_dropout_add)
register_lowering(dropout_add.backward.overload, type_promotion_kind=None)(_dropout_add_backward)


def _seeds_as_views(graph: Graph, backward: Collection[Node], results: Collection[Node]) -> list[Node]:
    """Replace the seeds of dropouts by views of the tensor with all seeds: saving a copy would launch a kernel."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.prims.inductor_lookup_seed.default):
        if any(user.target is dropout_add.forward.overload for user in node.users):
            seeds, place = node.args
            node.target, node.args = aten.select.int, (seeds, 0, place)
            with torch.no_grad():
                node.meta["val"] = seeds.meta["val"][place]
    return []


partition.SAVE_HOOKS.append(_seeds_as_views)
