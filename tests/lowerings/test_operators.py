"""The lowerings: compiled equals eager, forward and backward, static and dynamic, and no operator remains a call."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import meta, step_of
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.utils import run_and_get_code

import torch_fused_ops as tfo
from torch_fused_ops import activations
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings import cpp_vectors, operators, programs

fused = torch.ops.fused
BF16 = torch.bfloat16
Make = Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]


def leaf(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def cpp(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    """Return the C++ kernels that Inductor generates, without compiling them."""
    sources: list[str] = []

    def note(self: Any, types: list[str], source: str, **kwargs: Any) -> Callable[..., None]:
        sources.append(source)
        return lambda *tensors: None

    torch._dynamo.reset()
    with mock.patch.object(AsyncCompile, "cpp_pybinding", note), inductor_config.patch(force_disable_caches=True):
        torch.compile(fn, fullgraph=True, dynamic=False)(*args)
    return sources


def kernels(code: str) -> int:
    return len(re.findall(r"= async_compile\.\w+\(", code))


def check(fn: Callable[..., Tensor], args: list[Tensor], dynamic: bool | None = False) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
        (result, _), code = run_and_get_code(lambda: step_of(compiled, args))
    for r, e in zip(result, step_of(fn, args)[0], strict=True):
        assert r.dtype == e.dtype and r.shape == e.shape
        # The order of summation differs. In half precision, results differ by at most one rounding.
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(e.dtype, 1.6e-2)
        torch.testing.assert_close(
            r, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 1)
        )
    assert not re.search(r"^[^#]*ops\.fused[\w.]+\(", "\n".join(code), re.M), "an operator is called in generated code"
    return code


CASES: dict[str, Make] = {
    "bias_act, every argument": lambda: (
        lambda x, b, s: fused.bias_act(x * 2, b, s, "gelu") + 1,
        [leaf(6, 34, 24), leaf(24), leaf(6, 34)],
    ),
    "bias_act, frozen input, bf16, fp32 bias": lambda: (
        lambda x, b: fused.bias_act(x, b, None, "gelu_tanh") * 2,
        [leaf(33, 24, dtype=BF16, grad=False), leaf(24)],
    ),
    "bias_act, transposed and sliced": lambda: (
        lambda x, b: fused.bias_act(x.mT[..., 1:], b, None, "silu"),
        [leaf(3, 17, 9), leaf(16)],
    ),
    "bias_act, one axis, float64": lambda: (
        lambda x, b, s: fused.bias_act(x, b, s, "tanh"),
        [leaf(40, dtype=torch.float64), leaf(40), leaf(dtype=torch.float64)],
    ),
    "bias_act, no rows": lambda: (lambda x, b: fused.bias_act(x, b, None, "relu") + 1, [leaf(0, 8), leaf(8)]),
    "bias_act, no columns": lambda: (lambda x, b: fused.bias_act(x, b, None, "relu") + 1, [leaf(8, 0), leaf(0)]),
    "glu, every argument": lambda: (
        lambda g, u, s: fused.glu(g + 1, u, s, "quick_gelu", 1.0, 0.7),
        [leaf(5, 33, 24), leaf(5, 33, 24), leaf(5, 33)],
    ),
    "glu, frozen up, mixed dtypes": lambda: (
        lambda g, u: fused.glu(g, u, None, "silu"),
        [leaf(33, 24, dtype=BF16), leaf(33, 24, grad=False)],
    ),
    "bias_glu, halves": lambda: (
        lambda x, b, s: fused.bias_glu(x * 2, b, s, "gelu_tanh") * 3,
        [leaf(6, 33, 48), leaf(48), leaf(6, 33)],
    ),
    "bias_glu, swapped, bf16": lambda: (
        lambda x, b, s: fused.bias_glu(x, b, s, "silu", "swapped") * 3,
        [leaf(6, 34, 48, dtype=BF16), leaf(48, dtype=BF16), leaf(6, 34, dtype=BF16)],
    ),
    "bias_glu, interleaved": lambda: (
        lambda x, b: fused.bias_glu(x, b, None, "quick_gelu", "interleaved", 1.0, 7.0) + 1,
        [leaf(6, 34, 48, dtype=BF16), leaf(48, dtype=BF16)],
    ),
    "bias_glu, only the scale": lambda: (
        lambda x, s: fused.bias_glu(x, None, s, "relu2", "interleaved"),
        [leaf(33, 48, grad=False), leaf(33)],
    ),
}


def fp8_swiglu(x: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return FF.bias_glu(x * 2, bias, activation="silu", memory="fp8", **options)


# Calls that save float8 tensors.
FP8: dict[str, Make] = {
    "bias_act": lambda: (
        lambda x, b, s: FF.bias_gelu(x * 2, b, token_scale=s, memory="fp8") + 1,
        [leaf(6, 33, 24), leaf(24), leaf(6, 33)],
    ),
    "glu, clamped": lambda: (
        lambda g, u, s: FF.swiglu(g * 2, u, s, clamp=1.0, memory="fp8"),
        [leaf(33, 24), leaf(33, 24), leaf(33)],
    ),
    "bias_glu, bf16": lambda: (fp8_swiglu, [leaf(33, 48, dtype=BF16), leaf(48, dtype=BF16)]),
    "bias_glu, swapped": lambda: (functools.partial(fp8_swiglu, layout="swapped"), [leaf(33, 48), leaf(48)]),
    "bias_glu, interleaved": lambda: (functools.partial(fp8_swiglu, layout="interleaved"), [leaf(33, 48), leaf(48)]),
    "one axis, float64": lambda: (lambda x: FF.bias_gelu(x, memory="fp8"), [leaf(40, dtype=torch.float64)]),
    "empty": lambda: (lambda x: FF.bias_gelu(x * 2, memory="fp8"), [leaf(3, 0)]),
}


# One variant runs by default, the others under -m slow. Without vector instructions gcc takes a sixth of the time.
VARIANTS = [(name, vectors) for vectors in (False, True) for name in CASES]
SMOKE = ("bias_glu, interleaved", False)


@pytest.mark.parametrize(
    ("name", "vectors"), [SMOKE, *(pytest.param(*v, marks=pytest.mark.slow) for v in VARIANTS if v != SMOKE)]
)
def test_compiled_equals_eager(name: str, vectors: bool) -> None:
    fn, args = CASES[name]()
    with inductor_config.patch({"cpp.simdlen": None if vectors else 1}):
        check(fn, args)


DYNAMIC = ("bias_act, every argument", "glu, every argument", "bias_glu, halves", "bias_glu, interleaved")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [*(pytest.param(CASES[name], id=name) for name in DYNAMIC), *(pytest.param(FP8[n], id=f"fp8 {n}") for n in FP8)],
)
def test_dynamic_shapes(make: Make) -> None:
    fn, args = make()
    check(fn, args, dynamic=True)


@pytest.mark.codegen_is_slow
def test_two_compilations_for_ten_batch_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("fused")
    w, v = leaf(32, 16), leaf(16, 16)

    def mlp(x: Tensor) -> Tensor:
        g, u = F.linear(x, w).chunk(2, -1)
        return F.linear(F.silu(g) * u, v)

    compiled = torch.compile(mlp, backend=counter, fullgraph=True)
    for batch in range(2, 12):
        x = leaf(batch, 16)
        torch.testing.assert_close(compiled(x), mlp(x))
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_every_activation_in_one_kernel() -> None:
    names = [a for a in activations.names() if activations.get(a).builtin]

    def fn(x: Tensor) -> Tensor:
        return torch.stack([fused.bias_act(x, None, None, a) for a in names]).sum(0)

    (code, backward) = check(fn, [leaf(33, 24)])
    assert kernels(code) == kernels(backward) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "mish_for_lowering"])
def test_fuses_with_neighbors_on_both_sides(name: str) -> None:
    tfo.register_activation("mish_for_lowering", lambda x: x * torch.tanh(F.softplus(x)))
    code = check(lambda x, b: (fused.bias_act(x.sin() * 2, b, None, name) + 1).cos(), [leaf(33, 24), leaf(24)])
    assert [kernels(c) for c in code] == [1, 1]


def test_activations_that_cannot_be_inlined_raise() -> None:
    tfo.register_activation("sorted_for_lowering", lambda x: x.unsqueeze(-1).cumsum(-1).squeeze(-1))
    with pytest.raises(Exception, match="cannot be part of an activation"):
        torch.compile(lambda x: fused.bias_act(x, None, None, "sorted_for_lowering"))(leaf(4, 4))


@pytest.mark.codegen_is_slow("lowered")
def test_programs_evaluate_each_step_once() -> None:
    """A formula of n steps becomes n Inductor ops. Nested loaders would repeat steps whose values are used often."""
    check(lambda x: fused.bias_act(x, None, None, "gelu"), [leaf(8, 8)])
    from torch_fused_ops.operators.activation import bias_act

    value = operators._elements(bias_act).value
    (program,) = programs.programs_of(value, (True, False, False), ("gelu",), torch.float32, "cpu")
    steps = [node for node in program.code.graph.nodes if node.op == "call_method" and node.target != "constant"]
    assert 10 < len(steps) <= 30


def test_cpus_inline_exponentials_and_clamps() -> None:
    """Inlined code agrees with exp2, except that powers below 2**-125 may be 0. NaN stays NaN, also in a bound."""
    tfo.register_activation("power", torch.exp2)
    bounded = {
        "by_numbers": lambda x: torch.clamp(x, -1.0, 2.0),
        "by_a_value": lambda x: torch.maximum(x, torch.sqrt(x + 2.0)),
    }
    for name, act in bounded.items():
        tfo.register_activation(name, act)
    x = torch.cat([torch.linspace(-160, 135, 4096), torch.tensor([math.nan, math.inf, -math.inf])])
    z = torch.linspace(-3, 3, 100)
    z[::7] = torch.nan

    def fn(*inputs: Tensor) -> list[Tensor]:
        names = ("power", "power", *bounded)
        return [fused.bias_act(x, None, None, name) for x, name in zip(inputs, names, strict=True)]

    *powers, by_numbers, by_a_value = torch.compile(fn, dynamic=False)(x, x.to(BF16), z, z)
    for power, error in zip(powers, (3e-7, 4e-3), strict=True):
        expected = torch.exp2(x.to(power.dtype).double()).to(power.dtype)
        torch.testing.assert_close(power, expected, rtol=error, atol=2.0**-125, equal_nan=True)
    torch.testing.assert_close([by_numbers, by_a_value], [act(z) for act in bounded.values()], equal_nan=True)


def test_inline_assembly_on_cpus_stays_an_error() -> None:
    cpp_vectors.install()
    with pytest.raises(NotImplementedError, match="mov"):
        CppVecOverrides.inline_asm_elementwise("x", asm="mov", constraints="=r,r")


def test_cpus_use_fma() -> None:
    """Kernels call fma, as Inductor's flags forbid fusing, and no selects, whose masks go through memory."""
    (code,) = cpp(lambda x: fused.bias_act(x, None, None, "gelu"), leaf(8, 64, grad=False))
    assert code.count("fma") >= 7 and "blendv" not in code and " ? " not in code


@pytest.mark.parametrize(("rows", "together"), [(8, 4), (9, 1)])
def test_cpus_sum_gradients_without_recomputation(rows: int, together: int) -> None:
    grad, bias, mask = torch.ones(rows, 64, dtype=BF16), torch.ones(64), [True, True, False]
    step = lambda g, b: (fused.bias_act(g, b, None, "silu"), *fused.bias_act_backward(g, g, b, None, "silu", mask))  # noqa: E731
    (code,) = cpp(step, grad, bias)
    assert 2 * code.count("at::vec::clamp(") == 2 * together == code.count("at::vec::convert<at::BFloat16,1,float,2>")


def test_integers_do_not_use_fma() -> None:
    """``std::fma`` of integers returns a float64."""
    tfo.register_activation("stairs", lambda x: x + (x.detach().to(torch.int64) * 3 + 2**60).to(x.dtype))
    (code,) = cpp(lambda x: fused.bias_act(x, None, None, "stairs"), leaf(8, 64, grad=False))
    assert "int64_t" in code and "fma" not in code


def test_a_loop_reads_only_its_results_inputs() -> None:
    """The gradient of up is grad · silu(gate). If the loop also listed ``up``, Inductor could not reuse its buffer."""
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

    def of_up(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return fused.glu_backward(grad, gate, up, None, "silu", 0.0, None, [False, True, False])[1]

    tensors = [torch.randn(64, 128) for _ in range(3)]
    paper = virtual_gpu.compile_on_paper(of_up, *tensors, training=False)
    assert paper.bytes_moved == 3 * tensors[0].nbytes


ROWS, N = 8192, 16384
NUMBERS, SCALES = ROWS * N, 4 * ROWS  # bytes of a float8 tensor of the result's size, and of its scales


@pytest.mark.parametrize(
    ("fn", "widths", "kernels", "forward", "backward"),
    [
        # bf16 has 2 bytes. Forward reads the input and writes the result, the float8 copy and scales. Backward reads
        # the gradient, the float8 copy and scales, and writes the input's gradient.
        pytest.param(FF.bias_gelu, [N], (1, 1), 2 + 2 + 1, 2 + 1 + 2, id="bias_act"),
        pytest.param(FF.swiglu, [N, N], (1, 1), 4 + 2 + 2, 2 + 2 + 4, id="glu"),
        pytest.param(
            functools.partial(FF.bias_glu, activation="silu"), [2 * N], (1, 1), 4 + 2 + 2, 2 + 2 + 4, id="halves"
        ),
        # Only the scale's loop runs over pairs, so the input is read twice.
        pytest.param(
            functools.partial(FF.bias_glu, activation="silu", layout="interleaved"),
            [2 * N],
            (2, 1),
            4 + 2 + 4 + 2,
            2 + 2 + 4,
            id="interleaved",
        ),
    ],
)
def test_kernels_and_bytes_of_float8(
    fn: Callable[..., Tensor], widths: list[int], kernels: tuple[int, int], forward: int, backward: int
) -> None:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
    inputs = [meta(ROWS, n, requires_grad=True) for n in widths]
    paper = virtual_gpu.compile_on_paper(lambda *t: fn(*t, memory="fp8"), *inputs, gpu=virtual_gpu.H200)
    graphs = paper.graphs
    assert (len(graphs["forward"].kernels), len(graphs["backward"].kernels)) == kernels
    scales = len(inputs) * SCALES
    assert graphs["backward"].bytes_moved == backward * NUMBERS + scales
    assert forward * NUMBERS < graphs["forward"].bytes_moved <= forward * NUMBERS + 2 * scales
    assert paper.saved_bytes() == sum(widths) * ROWS + scales
