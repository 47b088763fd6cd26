"""The activation family's eager GPU kernels without a GPU: arithmetic in Triton's interpreter, and machine code.

On a machine with a GPU the comparisons also run on the GPU.
"""

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from harness import BUILTIN, meta
from torch import Tensor

pytest.importorskip("triton")

from kernel_harness import Device, assemble, assert_close, recorded, wide

from torch_fused_ops import activations, declaration, virtual_gpu
from torch_fused_ops.kernels import activation as kernels
from torch_fused_ops.kernels import launching
from torch_fused_ops.kernels.activation import launch_of
from torch_fused_ops.operators import activation as declared
from torch_fused_ops.operators import reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERYTHING, OF_DATA = (True, True, True), (True, False, False)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of infinities


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)


def check(device: Device, name: str, args: Sequence[Any], grad: Tensor, mask: Sequence[bool] = EVERYTHING) -> None:
    """Compare an operator's forward and backward with its float64 reference."""
    forward, backward = launch_of(name), launch_of(f"{name}_backward")
    actual = device.run(forward, *args)
    expected = getattr(reference, name)(*wide(args))
    assert (actual.dtype, actual.is_contiguous()) == (args[0].dtype, True)
    assert_close(actual, expected)
    assert device.names == (["_forward"] if expected.numel() else [])

    mask = [requested and isinstance(a, Tensor) for requested, a in zip(mask, args, strict=False)]
    actual = device.run(backward, grad, *args, mask)
    expected = getattr(reference, f"{name}_backward")(*wide([grad, *args]), mask)
    assert device.names.count("_backward") == (1 if grad.numel() and any(mask) else 0)
    assert len(device.launches) <= 3
    # A derivative near its zero, and a sum of terms that cancel, are only as exact as their terms.
    finest = torch.float64 if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in (grad, *args)) else None
    epsilon = torch.finfo(finest or torch.float32).eps
    reduced = {1, 2} if name != "glu" else {2}
    for i, (a, e, arg) in enumerate(zip(actual, expected, args, strict=False)):
        if e is None:
            assert a is None
            continue
        assert (a.dtype, a.shape, a.is_contiguous()) == (arg.dtype, arg.shape, True)
        terms = grad.numel() / max(1, a.numel()) if i in reduced else 1
        size = e.abs().max() if e.numel() else 0.0
        assert_close(a, e, gradient=True, absolute=8 * epsilon * size * max(1.0, terms**0.5))


def arguments(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    bias: bool = False,
    scale: bool = False,
    layout: str = "halves",
    offset: float = 0.0,
    clamp: float | None = None,
) -> list[Any]:
    token_scale = normal(*shape[:-1], dtype=dtype) if scale else None
    if name == "glu":
        return [normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), token_scale, activation, offset, clamp]
    n = shape[-1] * (2 if name == "bias_glu" else 1)
    common = [normal(*shape[:-1], n, dtype=dtype), normal(n, dtype=dtype) if bias else None, token_scale, activation]
    return common if name == "bias_act" else [*common, layout, offset, clamp]


OPERATORS = ["bias_act", "glu", "bias_glu"]


@pytest.mark.parametrize(
    "changed",
    [{"scalars": {"activation": "str", "alpha": "float=1.0"}}, {"value": lambda x, scale, activation: x}],
    ids=["a scalar more", "another formula"],
)
def test_kernels_reject_other_formulas(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaration, "OPERATORS", dict(declaration.OPERATORS))
    dataclasses.replace(declared.bias_act, name="scaled_act", **changed)
    with pytest.raises(ValueError, match=r"scaled_act\(activation.*\) is not accepted"):
        launch_of("scaled_act")


# ---- the formulas are the table's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", BUILTIN)
def test_every_bfloat16_value(device: Device, activation: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    table, finite = activations.get(activation), torch.isfinite(x)
    tile = 8192 if device.name == "cpu" else kernels._THREADS  # larger, to save the interpreter's time
    with mock.patch.object(kernels, "_THREADS", tile):
        y = device.run(launch_of("bias_act"), x, None, None, activation)
        dx, _, _ = device.run(launch_of("bias_act_backward"), torch.ones_like(x), x, None, None, activation, OF_DATA)
    assert_close(y[finite], table.value(x[finite].double()))
    assert_close(dx[finite], table.derivative(x[finite].double()), gradient=True)
    special = x[~finite].float()
    torch.testing.assert_close(y[~finite], table.value(special).bfloat16(), equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(dx[~finite], table.derivative(special).bfloat16(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", BUILTIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_keep_their_tails(device: Device, activation: str, dtype: torch.dtype) -> None:
    magnitude = torch.logspace(-6, 2.5 if dtype == torch.float32 else 2.8, 2000, dtype=torch.float64).to(dtype)
    x = torch.cat((magnitude, -magnitude))
    table = activations.get(activation)
    assert_close(device.run(launch_of("bias_act"), x, None, None, activation), table.value(x.double()))
    dx, _, _ = device.run(launch_of("bias_act_backward"), torch.ones_like(x), x, None, None, activation, OF_DATA)
    near_zero = 4 * torch.finfo(dtype).eps * ((x > -2) & (x < 0)).double()  # derivatives cross zero there
    assert_close(dx, table.derivative(x.double()), gradient=True, absolute=near_zero)


# ---- every operator, option, dtype -----------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", BUILTIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_dtypes(device: Device, activation: str, dtype: torch.dtype) -> None:
    args = arguments("bias_glu", (5, 36), dtype, activation, bias=True, scale=True, offset=0.7, clamp=1.1)
    check(device, "bias_glu", args, normal(5, 36, dtype=dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize(("bias", "scale"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize(("offset", "clamp"), [(0.0, None), (1.0, 2.5), (0.1, None), (0.0, float("inf"))])
def test_packed_options(
    device: Device, layout: str, bias: bool, scale: bool, offset: float, clamp: float | None
) -> None:
    args = arguments("bias_glu", (2, 3, 20), torch.bfloat16, "gelu_tanh", bias, scale, layout, offset, clamp)
    check(device, "bias_glu", args, normal(2, 3, 20, dtype=torch.bfloat16))


@pytest.mark.parametrize(("bias", "scale"), itertools.product([False, True], repeat=2))
def test_single_options(device: Device, bias: bool, scale: bool) -> None:
    check(device, "bias_act", arguments("bias_act", (40, 100), torch.float16, "gelu", bias, scale), normal(40, 100))
    if not bias:
        args = arguments("glu", (40, 100), torch.float32, "gelu", scale=scale, clamp=2.0, offset=0.1)
        check(device, "glu", args, normal(40, 100))


def test_scalars_keep_float64(device: Device) -> None:
    """A scalar passed in float32 would be off by 1e-8."""
    args = arguments("glu", (4, 16), torch.float64, "silu", offset=0.1, clamp=0.7)
    check(device, "glu", args, normal(4, 16, dtype=torch.float64))


def test_at_the_clamps_bounds(device: Device) -> None:
    """The gradient at a bound equals torch.clamp's gradient in this version."""
    x = torch.tensor([0.5, 2.0, 3.0, -2.0]).repeat(2, 4)
    check(device, "glu", (x, x.flip(-1), None, "silu", 0.0, 2.0), torch.ones(2, 16))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("dtypes", [d for d in itertools.permutations(DTYPES, 3)][::3])
def test_mixed_dtypes(device: Device, dtypes: tuple[torch.dtype, ...]) -> None:
    a, b, c = dtypes
    x, bias, scale = normal(6, 40, dtype=a), normal(40, dtype=b), normal(6, dtype=c)
    check(device, "bias_act", (x, bias, scale, "gelu"), normal(6, 40, dtype=c))
    check(device, "glu", (x, normal(6, 40, dtype=b), None, "silu", 0.0, None), normal(6, 40, dtype=c))


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_goes_the_references_way(device: Device, name: str) -> None:
    layouts = reference.LAYOUTS if name == "bias_glu" else ("",)
    for layout, activation in itertools.product(layouts, ("relu", "gelu", "silu")):
        args = arguments(name, (2, 12), activation=activation, layout=layout, clamp=1.0)
        for t in args[:2]:
            if t is not None:
                t[0, ::3] = float("nan")
        grad = normal(2, 12)
        for actual, expected in (
            (device.run(launch_of(name), *args), getattr(reference, name)(*args)),
            *zip(
                device.run(launch_of(f"{name}_backward"), grad, *args, (True, name == "glu", False)),
                getattr(reference, f"{name}_backward")(grad, *args, (True, name == "glu", False)),
                strict=True,
            ),
        ):
            if expected is not None:
                assert torch.equal(actual.isnan(), expected.isnan())


# ---- shapes and strides ----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (1,), (1, 1), (3, 1), (7,), (1, 33), (2, 1500), (700, 3)]
)
def test_sizes(device: Device, name: str, shape: tuple[int, ...]) -> None:
    check(device, name, arguments(name, shape, bias=True, scale=True), normal(*shape))
    check(device, name, arguments(name, shape, layout="interleaved"), normal(*shape))


def strided(kind: str, *shape: int) -> Tensor:
    """Return a tensor of this shape with unusual strides."""
    if kind == "transposed":
        return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
    if kind == "rows swapped":  # no single stride covers these three axes
        return normal(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    if kind == "sliced":
        return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if kind == "every other row":
        return normal(2 * shape[0], *shape[1:])[::2]
    if kind == "one row":
        return normal(*shape[-1:]).expand(shape)
    assert kind == "one value"
    return normal(1).expand(shape)


STRIDES = ["transposed", "rows swapped", "sliced", "every other row", "one row", "one value"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("name", OPERATORS)
def test_strides_of_each_argument(device: Device, name: str, kind: str) -> None:
    shape = (4, 3, 70)
    for odd in range(3):  # the first tensor, the second, the gradient
        args, grad = arguments(name, shape, clamp=2.0), normal(*shape)
        if odd == 2:
            grad = strided(kind, *shape)
        elif isinstance(args[odd], Tensor):
            args[odd] = strided(kind, *args[odd].shape)
        elif name != "glu":
            n = args[0].shape[-1]
            args[1], args[2] = normal(2 * n)[::2], strided("transposed", 4, 3)
        check(device, name, args, grad)


def test_evenly_strided_tensors_are_one_row(device: Device) -> None:
    """Contiguous data, and the expanded gradient of a sum, run as one flat vectorized loop, without copies."""
    x, grad = normal(4, 5, 64, dtype=torch.bfloat16), torch.ones(()).expand(4, 5, 64)
    for args in ((x,), (grad, x)):
        operator = launch_of("bias_act") if len(args) == 1 else launch_of("bias_act_backward")
        device.run(operator, *args, None, None, "silu", *([(True, False, False)] if len(args) == 2 else []))
        (_, launched, constants), pointers = device.launches[0], [a.data_ptr() for a in args]
        assert constants["FLAT"]
        if device.name == "cpu":
            assert set(pointers) <= {a.data_ptr() for a in launched if isinstance(a, Tensor)}


# ---- unrequested gradients -------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=3)))
def test_output_masks(device: Device, name: str, mask: tuple[bool, bool, bool]) -> None:
    args = arguments(name, (4, 24), bias=True, scale=True, offset=1.0, clamp=2.0)
    check(device, name, args, normal(4, 24), mask)
    for kernel, launched, _ in device.launches:
        if kernel == "_backward":
            outputs = dict(zip(kernels._backward.arg_names, launched, strict=False))
            data = mask[0] or (name == "glu" and mask[1])
            assert (outputs["d_gate"] is not None or outputs["d_up"] is not None) == data
            assert (outputs["gate_bias_sums"] is not None) == (name != "glu" and mask[1])
            assert (outputs["scale_sums"] is not None) == mask[2]


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("shape", [(20000, 3), (4096, 40), (9, 5000)])
def test_sums_round_like_short_ones(device: Device, shape: tuple[int, int]) -> None:
    """Terms have one sign, so a long chain of roundings would show. The error is at most 4 ulp of the float32 sum."""
    grad, x = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    bias, scale = torch.zeros(shape[1]), torch.ones(shape[0])
    mask = (False, True, True)
    _, d_bias, d_scale = device.run(launch_of("bias_act_backward"), grad, x, bias, scale, "relu", mask)
    # A sum of one part needs no second kernel.
    assert device.names in (["_backward"] + ["_add_rows"] * n for n in (1, 2))
    _, *sums = reference.bias_act_backward(grad.double(), x.double(), bias.double(), scale.double(), "relu", mask)
    for actual, expected in zip((d_bias, d_scale), sums, strict=True):
        assert expected is not None
        assert ((actual.double() - expected).abs() <= 4 * torch.finfo(torch.float32).eps * expected.abs()).all()


def test_results_are_the_same_in_every_run(device: Device) -> None:
    args = arguments("bias_glu", (300, 40), torch.bfloat16, bias=True, scale=True)
    grad = normal(300, 40, dtype=torch.bfloat16)
    first, second = (device.run(launch_of("bias_glu_backward"), grad, *args, EVERYTHING) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ---- large tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=8)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_wide_offsets_give_the_same(device: Device, name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test 64-bit offsets, and rows that overflow into the grid's third axis."""
    monkeypatch.setattr(kernels, "INT32_MAX", 0)
    monkeypatch.setattr(launching, "GRID_LIMIT", 3)
    for option in (False, True):
        args = arguments(name, (500, 20), layout=layout, bias=option, scale=option)
        check(device, name, args, normal(500, 20))
        assert all(constants["WIDE"] for _, _, constants in device.launches)


# ---- machine code ----------------------------------------------------------------------------------------------------


def calls(activation: str, dtype: torch.dtype, rows: int = 4096, n: int = 8192) -> dict[str, tuple[Any, ...]]:
    """Return calls of each kind, by name."""
    x, packed, bias, packed_bias = (meta(*s, dtype=dtype) for s in ((rows, n), (rows, 2 * n), (n,), (2 * n,)))
    scale, x_t = meta(rows, dtype=torch.float32), meta(n, rows, dtype=dtype).t()
    act, act_backward = launch_of("bias_act"), launch_of("bias_act_backward")
    glu, glu_backward = launch_of("glu"), launch_of("glu_backward")
    by_name: dict[str, tuple[Any, ...]] = {
        "flat": (act, x, None, None, activation),
        "flat backward": (act_backward, x, x, None, None, activation, (True, False, False)),
        "glu": (glu, x, x, None, activation),
        "glu backward": (glu_backward, x, x, x, None, activation, 0.0, None, (True, True, False)),
        "bias": (act, x, bias, scale, activation),
        "bias backward": (act_backward, x, x, bias, scale, activation, EVERYTHING),
        "transposed backward": (act_backward, x, x_t, bias, scale, activation, EVERYTHING),
    }
    for layout in reference.LAYOUTS:
        plain, full = (None, None, activation, layout, 0.0, None), (packed_bias, scale, activation, layout, 1.0, 7.0)
        by_name[f"{layout} forward"] = (launch_of("bias_glu"), packed, *full)
        by_name[f"{layout} plain backward"] = (launch_of("bias_glu_backward"), x, packed, *plain, (True, False, False))
        by_name[f"{layout} backward"] = (launch_of("bias_glu_backward"), x, packed, *full, EVERYTHING)
    return by_name


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(
    ("call", "activation", "most"),
    [
        ("flat", "gelu_tanh", 15),
        ("flat", "gelu", 22),
        ("glu", "silu", 15),
        ("flat backward", "gelu_tanh", 26),
        ("flat backward", "gelu", 28),
        ("glu backward", "silu", 28),
    ],
)
def test_instructions_per_element_are_bounded(call: str, activation: str, most: float) -> None:
    (code,) = assemble(virtual_gpu.H100, *calls(activation, torch.bfloat16)[call])
    (launch,) = recorded(*calls(activation, torch.bfloat16)[call])
    elements = launch.constants["BLOCK_N"] / (32 * launch.constants["num_warps"])
    assert elements == (8 if "backward" in call else 16)
    vectorized = [name for name in code.instructions if name.startswith(("LDG", "STG"))]
    assert vectorized and all(name.endswith(".128") for name in vectorized)
    assert len(code.instructions) / elements <= most
    assert (code.spills, code.shared) == (0, 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [8, 24, 20, 18, 7])
@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_of_every_unit(device: Device, name: str, columns: int) -> None:
    """Sizes arrive divided by 8, 4 or 2; rows may be strided and unaligned."""
    args = arguments(name, (5, columns), bias=True, scale=True)
    check(device, name, args, normal(5, columns))
    for gap in (16 - columns % 16, 2, 1):
        n = args[0].shape[-1]
        args[0] = normal(5, n + gap)[:, :n]
        check(device, name, args, normal(5, columns + gap)[:, :columns])


@pytest.mark.slow
def test_unused_operands_are_not_read() -> None:
    x, packed = meta(512, 1024), meta(512, 2048)
    for masks, loads, call in (
        ((False, True, False), 2, (launch_of("glu_backward"), x, x, x, None, "silu", 0.0, None)),  # up is not read
        ((True, False, False), 3, (launch_of("glu_backward"), x, x, x, None, "silu", 0.0, None)),
        ((True, False, False), 2, (launch_of("bias_act_backward"), x, x, None, None, "silu")),
        ((False, False, True), 2, (launch_of("bias_act_backward"), x, x, None, meta(512, dtype=torch.float32), "silu")),
        ((True, False, False), 3, (launch_of("bias_glu_backward"), x, packed, None, None, "silu", "halves", 0.0, None)),
    ):
        code = assemble(virtual_gpu.H100, *call, masks)[0]
        assert sum(name.startswith("LDG") for name in code.instructions) == loads, (call[0].__name__, masks)


# ---- without Triton --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_triton_says_what_to_install() -> None:
    program = "import sys; sys.modules['triton'] = None; import torch_fused_ops.kernels.activation"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError" in done.stderr and "pip install triton numpy" in done.stderr
