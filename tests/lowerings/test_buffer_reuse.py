"""Kernels write results over their inputs: the peak of a step, its numbers, and kernels that do not change."""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import cases, distances
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import buffer_reuse, passes

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

fused = torch.ops.fused
ROWS, WIDTH, HIDDEN = 64, 24, 48


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((ROWS, WIDTH), *shapes)]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up) @ down


def gelu(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up + bias, approximate="tanh") @ down


def packed(x: Tensor, two_glus: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ two_glus).chunk(2, -1)
    return F.silu(gate) * up @ down


def packed_with_a_bias(x: Tensor, two_glus: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ two_glus + bias).chunk(2, -1)
    return F.silu(gate) * up @ down


IN, OUT = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "swiglu": (swiglu, (IN, IN, OUT)),
    "gelu with a bias": (gelu, (IN, (HIDDEN,), OUT)),
    "packed": (packed, ((WIDTH, 2 * HIDDEN), OUT)),
    "packed with a bias": (packed_with_a_bias, ((WIDTH, 2 * HIDDEN), (2 * HIDDEN,), OUT)),
}


def on_paper(fn: Callable[..., Any], args: Sequence[Tensor], memory: str | None, **options: Any) -> Any:
    torch._dynamo.reset()
    with tfo.enabled(tfo.FusionPolicy(memory=memory)) if memory else contextlib.nullcontext():
        return virtual_gpu.compile_on_paper(fn, *args, **options)


LEVELS = ["free", *(pytest.param(level, marks=pytest.mark.slow) for level in ("off", "input", "tiled:3"))]


@pytest.mark.covering(1, "memory")
@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_peak_of_an_mlp_is_not_higher_than_unfused(name: str, memory: str) -> None:
    """The peak may grow only by a bias's gradient, which is computed earlier."""
    fn, shapes = PROGRAMS[name]
    args = weights(*shapes)
    bias = sum(a.nbytes for a in args if a.ndim == 1)
    assert on_paper(fn, args, memory).peak_bytes() <= on_paper(fn, args, None).peak_bytes() + bias


def test_sums_read_overwritten_buffers() -> None:
    """A bias's gradient is summed in blocks, so backward of 8192 tokens has no second tensor of gate and up."""
    args = [
        torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for s in ((8192, WIDTH), (WIDTH, 4096), (4096,), (2048, WIDTH))
    ]
    paper = on_paper(packed_with_a_bias, args, "free")
    (kernel,) = (kernel for kernel in paper.backward.kernels if "red_fused" in kernel.name and "glu" in kernel.name)
    assert "debug_barrier" in kernel.source
    gate_and_up, activation = 8192 * 4096 * 2, 8192 * 2048 * 2
    assert paper.peak_bytes() < 1.05 * (gate_and_up + activation)


def test_three_results_reuse_three_inputs() -> None:
    """Backward's kernel recomputes the activation and computes both gradients without allocating memory."""
    fn, shapes = PROGRAMS["swiglu"]
    backward = on_paper(fn, weights(*shapes), "free").backward
    (kernel,) = (kernel for kernel in backward.kernels if "glu" in kernel.name)
    (signature,) = (line for line in kernel.source.splitlines() if line.startswith("def "))
    assert [signature.count(name) for name in ("in_out_ptr", "in_ptr", " out_ptr")] == [3, 0, 0]
    lines = kernel.source.splitlines()
    loads, stores = (
        [i for i, line in enumerate(lines) if f"tl.{operation}(" in line] for operation in ("load", "store")
    )
    assert len(loads) == len(stores) == 3 and max(loads) < min(stores)
    assert "debug_barrier" not in kernel.source  # stores need not wait in kernels with one axis


DEFAULT = [("swiglu", "free"), ("packed with a bias", "free"), ("packed", "fp8")]
STEPS = [(name, memory) for name in PROGRAMS for memory in ("free", "off", "input", "tiled:3", "fp8")]


@pytest.mark.parametrize(
    ("name", "memory"), [pytest.param(*s, marks=() if s in DEFAULT else pytest.mark.slow) for s in STEPS]
)
def test_interpreted_gpu_steps_are_right(name: str, memory: str) -> None:
    """Triton's interpreter runs the generated GPU program, with the same in-place writes in the same order."""
    fn, shapes = PROGRAMS[name]
    args, gradient = weights(*shapes), torch.randn(ROWS, WIDTH)
    inputs = [a.detach().clone() for a in args]
    (result,), gradients = virtual_gpu.interpret_step(on_paper(fn, args, memory), inputs, [gradient])
    exact = [a.detach().double().requires_grad_() for a in args]
    expected = fn(*exact)
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    if memory == "fp8":
        assert max(distances(gradients, expected_gradients)) < 0.08
    else:
        torch.testing.assert_close([g.double() for g in gradients], list(expected_gradients), rtol=1e-4, atol=1e-3)


def two_glus(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return two results. One kernel computes them in two loops, which read the same inputs."""
    return fused.glu(gate, up, None, "silu"), fused.glu(up, gate, None, "gelu")


def count_reused_buffers(fn: Callable[..., Any], *args: Tensor, memory: str | None = "free") -> list[int]:
    """Return the number of results that each kernel writes over its inputs. Compare the results with eager mode."""
    paper = on_paper(fn, args, memory, training=False)
    actual, _ = virtual_gpu.interpret_step(paper, [a.clone() for a in args])
    torch.testing.assert_close(actual, tuple(fn(*args)), rtol=1e-4, atol=1e-3)
    headers = [re.search(r"^def .*$", kernel.source, re.M) for kernel in paper.inference.kernels]
    return [header[0].count("in_out_ptr") for header in headers if header]


def random_matrix() -> Tensor:
    return torch.randn(32, 32)


def read_later(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x = a @ b
    r, s = two_glus(x, b @ a)
    return r, s @ x


REUSE_CASES: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "both inputs": (lambda a, b: two_glus(a @ b, b @ a), [2]),
    "a graph's inputs are not": (lambda a, b: two_glus(a, b), [0]),
    "one is a graph's": (lambda a, b: two_glus(a @ b, b), [1]),
    "one is returned": (lambda a, b: (*two_glus(x := a @ b, b @ a), x), [1]),
    "one is read later": (read_later, [1]),
    "read at another index": (lambda a, b: two_glus(x := a @ b, x.t()), [0]),
    "results of another dtype": (lambda a, b: [r.half() for r in two_glus(a @ b, b @ a)], [0]),
    "one is smaller": (lambda a, b: two_glus(a @ b, (b @ a)[:1].expand(32, 32)), [1]),
    "a part of a buffer": (lambda a, b: two_glus((a @ b)[:16], (b @ a)[16:]), [0]),
    "one reads the other's result": (lambda a, b: (r := fused.glu(x := a @ b, b @ a, None, "silu"), r * x), [2]),
}


OTHER_INPUTS = ("one is a graph's", "one is returned", "read at another index", "a part of a buffer")


@pytest.mark.parametrize("name", cases(REUSE_CASES, default=lambda name: name not in OTHER_INPUTS))
def test_results_reuse_input_buffers(name: str) -> None:
    fn, expected = REUSE_CASES[name]
    assert count_reused_buffers(fn, random_matrix(), random_matrix()) == expected


def test_values_without_memory_have_no_dtype() -> None:
    """A deterministic ``index_put`` leaves such a value."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(32, device=a.device) % 7
        x, y = (a @ b).index_put((rows,), torch.ones_like(a), accumulate=True), b @ a
        return fused.glu(x, y, None, "silu") @ a, fused.glu(y, x, None, "gelu") @ b

    torch.use_deterministic_algorithms(True)
    try:
        assert count_reused_buffers(fn, random_matrix(), random_matrix()) == [0, 0, 1]
    finally:
        torch.use_deterministic_algorithms(False)


def count_aliases(fn: Callable[..., Any], *args: Tensor, **options: Any) -> int:
    """Return the number of buffers that are views of others. Compare the results with eager mode."""
    paper = on_paper(fn, args, "free", training=False, **options)
    actual, _ = virtual_gpu.interpret_step(paper, [a.clone() for a in args])
    expected = fn(*args)
    torch.testing.assert_close(actual, expected if isinstance(expected, tuple) else (expected,), rtol=1e-4, atol=1e-2)
    return len(re.findall(r"^ +\w+ = \w+ +# alias$", paper.inference.code, re.M))


def concatenated(*halves: Tensor, dim: int = -1) -> Tensor:
    return torch.cat(two_glus(*halves), dim)


def flipped_half(a: Tensor, b: Tensor) -> Tensor:
    gate, up = (a @ b).chunk(2, -1)
    return concatenated(gate, up.flip(0)) @ a


def concatenated_with_another_kernel(a: Tensor, b: Tensor) -> Tensor:
    gate, up = (a @ b).chunk(2, -1)
    return torch.cat([fused.glu(gate, up, None, "silu"), a @ b[:, :16]], -1) @ a


def concatenated_with_an_existing_tensor(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, gradient = a @ b, a @ b[:, :16]
    two = [fused.glu(gradient, x[:, :16], None, name) for name in ("silu", "gelu")]
    return torch.cat([two[0], gradient @ b[:16, :16]], -1) @ a, two[1] @ a[:16]


def backward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute backward of a packed MLP. The recomputed activation reuses a buffer that only the gradients read."""
    packed = a @ b
    gradient = fused.bias_glu_backward(
        a @ b[:, :16], packed, None, None, "silu", "halves", 0.0, None, [True, False, False]
    )
    return fused.bias_glu(packed, None, None, "silu"), gradient[0]


def summed(a: Tensor, b: Tensor, axis: int, flipped: bool = False) -> tuple[Tensor, Tensor]:
    """Compute a sum in the kernel that writes the activation."""
    x = a @ b
    y = fused.bias_act(x, None, None, "gelu")
    return y.t() @ a, (x * (x.flip(0) if flipped else 3)).sum(axis)


def used_once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    value, gradient = backward(a, b)
    return value @ a[:16], gradient @ a


def used_again(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The next kernel must not reuse the memory while the result is in use.

    The peak is at the end, so that Inductor reuses memory before it.
    """
    value, gradient = backward(a, b)
    product = value * (value @ a[:16, :16])
    block = (gradient @ a)[:16, :16]
    return product @ block + product @ block.t() * product, (gradient @ a).repeat(64, 1) @ a


def overwritten(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Later readers use the mutated buffer's new name, so the memory could be freed too early."""
    value, gradient = backward(a, b)
    rows = torch.arange(7, device=a.device)
    v = value.index_put((rows,), torch.ones_like(value)[:7])
    t = (gradient @ a)[:, :16] @ a[:16, :16]
    return v, t @ a[:16, :16]


def read_through_an_alias(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = a @ b
    w = torch.view_as_real(torch.view_as_complex(x.view(32, 16, 2))).view(32, 32)
    value = fused.glu(a, b, None, "silu")
    return value @ b, (x * value + w.flip(0)).double() @ b.double()


def without_memory(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A value that only its own kernel reads is never stored."""
    h = fused.glu(a, b, None, "gelu")
    return h.sin().double() @ b.double(), (h * 3).cos().double() @ b.double(), (a * 2).sin() @ b


def per_row(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A loop over rows ends the body that computes the sum. The next body reads its inputs again."""
    rows, other = a[:, :4] @ b[:4, :1], (a[:, :4] * 2) @ b[:4, :1]
    row_values = other.sin()
    y = fused.bias_act(a @ b, None, None, "gelu") * rows * other
    return row_values.t() @ a, y @ b.t(), (y * y).sum(-1)


def between_two_sums(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    rows, other = a[:, :4] @ b[:4, :1], (a[:, :4] + 1) @ b[:4, :1]
    x, z = (a + 1) @ b, a @ b
    y = fused.bias_act(z, None, None, "gelu") * rows
    row_sums, row_values = (z * z).sum(-1), (rows * other).sin()
    return row_sums, y @ b.t(), row_values.t() @ a, (x.sin() * other).double() @ b.t().double()


ALIAS_CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "both halves": (lambda a, b: concatenated(*(a @ b).chunk(2, -1)) @ a, 1),
    "halves exchanged": (lambda a, b: concatenated(*reversed((a @ b).chunk(2, -1))) @ a, 1),
    "halves of rows": (lambda a, b: concatenated(*(a @ b).chunk(2, 0), dim=0) @ a, 1),
    "put together another way": (lambda a, b: concatenated(*(a @ b).chunk(2, -1), dim=0) @ a[:16], 0),
    "read in another turn": (flipped_half, 0),
    "joined with what another kernel writes": (concatenated_with_another_kernel, 0),
    "joined with what is there before": (concatenated_with_an_existing_tensor, 0),
    "read later": (lambda a, b: (concatenated(*(x := a @ b).chunk(2, -1)) @ a, x @ b), 0),
    "returned": (lambda a, b: concatenated(*(a @ b).chunk(2, -1)), 0),
    "a graph's input": (lambda a, b: concatenated(*a.chunk(2, -1)) @ b, 0),
    "what only others read": (used_once, 2),
    "summed over rows": (functools.partial(summed, axis=0), 1),
    "summed along rows": (functools.partial(summed, axis=1), 1),
    "summed in another turn": (functools.partial(summed, axis=1, flipped=True), 0),
    "the result is read twice": (used_again, 2),
    "the result is written again": (overwritten, 1),
    "read by another name": (read_through_an_alias, 0),
    "of no memory": (without_memory, 0),
}


OTHER_HALVES = ("halves exchanged", "halves of rows", "returned", "a graph's input", "summed along rows")


@pytest.mark.parametrize("name", cases(ALIAS_CASES, default=lambda name: name not in OTHER_HALVES))
def test_results_become_views_of_inputs(name: str) -> None:
    fn, expected = ALIAS_CASES[name]
    assert count_aliases(fn, random_matrix(), random_matrix()) == expected


@pytest.mark.parametrize("fn", [per_row, between_two_sums])
def test_no_views_in_kernels_with_several_bodies(fn: Callable[..., Any]) -> None:
    assert count_aliases(fn, torch.randn(8, 8), torch.randn(8, 4096)) == 0


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_loads_and_stores_must_use_the_same_thread_layout(dtype: torch.dtype, expected: int) -> None:
    """Triton loads in vectors sized for the narrowest dtype, but stores in vectors sized for each tensor's dtype."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        x = a @ b
        value = (torch.arange(1024, device=a.device).view(32, 32) % 97) * a[0, 0]
        return value @ b, fused.glu(x * value, c.float(), None, "silu").double() @ b.double()

    assert count_aliases(fn, random_matrix(), random_matrix(), random_matrix().to(dtype)) == expected


def stores_wait(ptx: str) -> bool:
    """Return True if all threads load from global memory before any thread stores, in the kernel's first block."""
    order = re.findall(r"^\s+(?:@!?%p\d+ )?(ld\.global|st\.global|bar\.sync)", ptx, re.M)
    loads = order[: order.index("st.global")]
    return loads.count("ld.global") > 1 and loads[-1] == "bar.sync"


# Columns, rows and warps. In the first two tiles Triton loads elements twice, for the sum. Inductor uses the third.
TILES = [(64, 4, 16), *(pytest.param(tile, marks=pytest.mark.slow) for tile in ((64, 4, 8), (2, 256, 4))), (16, 8, 8)]


@pytest.mark.parametrize("tile", TILES)
def test_no_warp_overwrites_elements_that_another_sums(tile: tuple[int, int, int]) -> None:
    """This must hold for every tile, because a tuner chooses the tile after buffers are reused."""
    columns, rows, warps = tile
    (kernel,) = (kernel for kernel in summed_gradients().kernels if "bias_act_backward" in kernel.name)
    assert kernel.source.count("tl.debug_barrier()") == 1 and kernel.source.count("in_out_ptr0 +") == 2
    block = {"XBLOCK": columns, "R0_BLOCK": rows}
    assert stores_wait(virtual_gpu.assemble(kernel, virtual_gpu.H100, block=block, num_warps=warps).ptx)


@functools.cache
def summed_gradients() -> Any:
    """Compile backward of a GELU MLP, in which the activation's kernel sums the bias's gradient."""
    args = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((512, 16), (16, 512), (512,), (512, 16))]
    return on_paper(gelu, [a.requires_grad_() for a in args], "free").backward


def test_kernels_with_two_axes_have_a_barrier_before_stores() -> None:
    args = torch.randn(128, 128), torch.randn(128, 128), torch.randn(128, 128)
    paper = on_paper(lambda a, b, c: two_glus(a @ b, c.t()), args, "free", training=False)
    (source,) = (kernel.source for kernel in paper.inference.kernels if "YBLOCK" in kernel.source)
    lines = source.splitlines()
    loads, stores = (
        [i for i, line in enumerate(lines) if f"tl.{operation}(" in line] for operation in ("load", "store")
    )
    assert "in_out_ptr" in source and max(loads) < lines.index("    tl.debug_barrier()") < min(stores)


def test_no_views_of_unaligned_halves() -> None:
    fn, _ = ALIAS_CASES["both halves"]
    assert count_aliases(fn, torch.randn(24, 24), torch.randn(24, 24)) == 0


def test_overwritten_inputs_are_mutated_args() -> None:
    fn, _ = ALIAS_CASES["both halves"]
    paper = on_paper(fn, [random_matrix(), random_matrix()], "free", training=False)
    (kernel,) = (kernel for kernel in paper.inference.kernels if "glu" in kernel.name)
    assert "'mutated_arg_names': ['out_ptr0', 'out_ptr1']" in kernel.source


@pytest.mark.parametrize("setting", ["triton.cudagraphs", "memory_planning", "triton.multi_kernel"])
def test_no_views_under_cudagraphs_or_memory_planning(setting: str) -> None:
    with inductor_config.patch({setting: 1}):
        assert not buffer_reuse.can_make_views()
        paper = on_paper(ALIAS_CASES["both halves"][0], [random_matrix(), random_matrix()], "free", training=False)
    assert not re.search(r"^ +\w+ = \w+ +# alias$", paper.inference.code, re.M)


def test_kernels_without_fused_operators_do_not_change() -> None:
    def unfused(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, y = a @ b, b @ a
        return x.sin() * y, x * y.cos()

    args = random_matrix(), random_matrix()
    assert count_reused_buffers(unfused, *args) == count_reused_buffers(unfused, *args, memory=None) == [0]


def test_no_reuse_if_a_loop_needs_a_reduction() -> None:
    """The kernel goes over its input twice, so the second pass would read values that the first pass stored."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = a @ b
        y = fused.bias_act(x, None, None, "gelu")
        return y, x * y.sum(-1, keepdim=True)

    args = torch.randn(8, 8), torch.randn(8, 2048)
    assert count_reused_buffers(fn, *args) == count_reused_buffers(fn, *args, memory=None)


def test_a_failure_does_not_change_the_schedule(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(kernel: Any) -> Any:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(buffer_reuse, "_assign_buffers", fails)
    monkeypatch.setattr(passes, "_logged", set())
    fn, args = REUSE_CASES["both inputs"][0], [random_matrix(), random_matrix()]
    with tfo.enabled(tfo.FusionPolicy()):
        graph = virtual_gpu.compile_on_paper(fn, *args, training=False).inference
    assert not any("in_out_ptr" in kernel.source for kernel in graph.kernels)
    assert [record.message.count("scheduler pass: ZeroDivisionError") for record in caplog.records] == [1]
    torch._dynamo.reset()
    with tfo.enabled(tfo.FusionPolicy(strict=True)), pytest.raises(Exception, match="a fault"):
        virtual_gpu.compile_on_paper(fn, *args, training=False)
