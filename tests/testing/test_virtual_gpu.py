"""The virtual GPU: bytes, kernels, instruction counts and numerics; it leaves no patches behind."""

from __future__ import annotations

import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import GeluMLP, SwiGLU, meta, on_meta, python, raises
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.language.extra.libdevice import tanh as device_tanh

from torch_fused_ops import virtual_gpu
from torch_fused_ops.virtual_gpu import compile_on_paper, gpus

MIB = 2**20
BF16 = torch.bfloat16


@cache
def mlp_on_paper(module: Callable[..., nn.Module], tokens: int = 512, hidden: int = 256, budget: float | None = None):
    """Compile a training step once for all tests."""
    x = meta(tokens, hidden, requires_grad=True)
    return compile_on_paper(on_meta(module, hidden, 4 * hidden), x, memory_budget=budget)


# Bytes, kernels and saved tensors


@pytest.mark.parametrize(
    ("module", "budget", "saved", "backward"),
    [
        (GeluMLP, None, 576, 2625),
        pytest.param(GeluMLP, 0.99, 320, 2881, marks=pytest.mark.slow),
        pytest.param(SwiGLU, None, 832, 4032, marks=pytest.mark.slow),
        pytest.param(SwiGLU, 0.99, 576, 4288, marks=pytest.mark.slow),
    ],
)
def test_steps_save_and_move_exact_bytes(module, budget, saved, backward):
    paper = mlp_on_paper(module, 8192, 4096, budget)
    assert paper.saved_bytes() == saved * MIB
    assert paper.saved_bytes(include_inputs=False) == (saved - 64) * MIB
    weights = sum(parameter.nbytes for parameter in on_meta(module, 4096, 16384).parameters() if parameter.dim() == 2)
    counted = paper.saved_bytes(include_parameters=True) - paper.saved_bytes()
    # the weights are needed for gradients of the input and the activation
    assert counted == weights
    # rounded to MiB, because biases have a few KiB
    assert round(paper.backward.bytes_moved / MIB) == backward
    assert paper.inference is None


def test_a_gelu_mlps_graphs_have_exact_kernels_and_bytes():
    paper = mlp_on_paper(GeluMLP, 8192, 4096, None)
    assert [kernel.name for kernel in paper.forward.kernels] == ["triton_poi_fused_gelu_0"]
    assert paper.forward.kernels[0].bytes_moved == 512 * MIB
    assert paper.forward.extern == ("addmm", "addmm")
    assert paper.backward.extern == ("mm",) * 4
    assert paper.forward.bytes_moved == 1408 * MIB + 2 * (16384 + 4096)
    kernels = sum(kernel.bytes_moved for kernel in paper.backward.kernels)
    # four GEMMs between two 4096 x 16384 weights (128), 8192 x 4096 (64) and 8192 x 16384 (256)
    assert paper.backward.bytes_moved - kernels == 4 * (128 + 64 + 256) * MIB
    by_name = {(tensor.shape, tensor.is_parameter, tensor.is_graph_input) for tensor in paper.saved}
    assert ((8192, 4096), False, True) in by_name
    assert ((16384, 4096), True, False) in by_name
    assert ((8192, 16384), False, False) in by_name
    assert "async_compile.triton('triton_poi_fused_gelu_0'" in paper.forward.code


def test_launches_of_one_kernel_are_counted():
    first, second = on_meta(SwiGLU, 256, 1024), on_meta(SwiGLU, 256, 1024)
    paper = compile_on_paper(lambda x: second(first(x)), meta(512, 256, requires_grad=True))
    (kernel,) = paper.forward.kernels
    assert kernel.launches == 2
    assert kernel.bytes_moved == 2 * 3 * 512 * 1024 * 2


def test_real_tensors_are_not_modified():
    x, w = torch.randn(8, 16, requires_grad=True), nn.Parameter(torch.randn(32, 16))
    before = x.clone(), w.clone()
    paper = compile_on_paper(lambda x, w: F.silu(F.linear(x, w)), x, w)
    assert paper.saved_bytes() == (8 * 16 + 8 * 32) * 4
    assert all(torch.equal(a, b) for a, b in zip((x, w), before, strict=True))
    assert x.grad is None and w.grad is None


def test_fake_inputs_and_keyword_arguments_compile():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(64, 128)
    paper = compile_on_paper(lambda x, *, scale: x * scale, x, scale=2.0)
    assert paper.inference.bytes_moved == 2 * 64 * 128 * 4


def test_str_is_aligned():
    text = str(mlp_on_paper(GeluMLP, 8192, 4096, None))
    lines = text.splitlines()
    assert lines[0] == "compiled for NVIDIA H200 (sm_90), without a device"
    rows = [line for line in lines if " MiB" in line]
    assert len({line.index(" MiB") for line in rows}) == 1
    assert any("saved for backward" in line for line in rows)


# Emulation of the GPU on CPU tensors


def test_cuda_autocast_lists_apply():
    """pow, softmax and layer_norm give float32 under CUDA's autocast; gelu stays in bfloat16."""
    weight = nn.Parameter(meta(256, 256, dtype=torch.float32))

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=BF16):
            y = F.linear(x, weight)
            return y, F.gelu(y), y.pow(2.0), torch.softmax(y, -1), F.layer_norm(y, (256,)), y.sum(-1)

    graph = compile_on_paper(fn, meta(512, 256, dtype=torch.float32), training=False).inference.graph
    outputs = graph.graph.output_node().args[0]
    assert [node.meta["val"].dtype for node in outputs] == [BF16, BF16] + [torch.float32] * 4
    assert all(node.meta["val"].device == torch.device("cuda", 0) for node in outputs)
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_enclosing_cuda_autocast_applies_and_cpu_autocast_does_not():
    weight = nn.Parameter(meta(256, 256, dtype=torch.float32))

    def dtype(context: torch.autocast) -> torch.dtype:
        with context:
            graph = compile_on_paper(
                lambda x: F.linear(x, weight), meta(512, 256, dtype=torch.float32), training=False
            ).inference.graph
        return graph.graph.output_node().args[0][0].meta["val"].dtype

    with virtual_gpu.described(virtual_gpu.H200):
        cuda = torch.autocast("cuda", dtype=BF16)
    assert dtype(cuda) == BF16
    assert dtype(torch.autocast("cpu", dtype=BF16)) == torch.float32
    with torch.autocast("cpu", dtype=BF16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == BF16
        assert torch.ones(2, dtype=BF16).pow(2.0).dtype == BF16  # the CPU's own lists are back


def test_layer_norms_statistics_are_float32():
    weight, bias = nn.Parameter(meta(256)), nn.Parameter(meta(256))
    graph = compile_on_paper(
        lambda x: torch.native_layer_norm(x, (256,), weight, bias, 1e-5), meta(512, 256), training=False
    ).inference.graph
    outputs = graph.graph.output_node().args[0]
    assert [node.meta["val"].dtype for node in outputs] == [BF16, torch.float32, torch.float32]


@pytest.mark.parametrize(("dtype", "kernel"), [(BF16, "flash"), (torch.float32, "efficient")])
def test_attention_uses_the_gpus_kernel(dtype, kernel):
    q, k, v = (meta(2, 4, 128, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    paper = compile_on_paper(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    (forward,) = paper.forward.extern
    assert forward == f"aten._scaled_dot_product_{kernel}_attention"
    assert f"aten._scaled_dot_product_{kernel}_attention_backward" in paper.backward.extern


def test_attention_in_three_calls_is_one_kernel():
    """Inductor replaces it with PyTorch's attention, after tracing its pattern with gradients."""
    q, k, v = (meta(2, 4, 128, 64, requires_grad=True) for _ in range(3))
    paper = compile_on_paper(lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v, q, k, v)
    assert paper.forward.extern == ("aten._scaled_dot_product_flash_attention",)
    assert paper.backward.extern == ("aten._scaled_dot_product_flash_attention_backward",)


@pytest.mark.parametrize(
    ("dtype", "heads", "operators"),
    [
        pytest.param(torch.float32, 2, {"mm", "bmm"}, marks=pytest.mark.slow),
        (BF16, 2, {"aten._scaled_dot_product_flash_attention"}),
    ],
)
def test_grouped_queries_use_flash_attention_or_gemms(dtype, heads, operators):
    """The memory-efficient kernel does not support groups, so float32 uses plain GEMMs."""
    q, *kv = (meta(2, n, 128, 64, dtype=dtype, requires_grad=True) for n in (4, heads, heads))
    paper = compile_on_paper(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True), q, *kv)
    assert set(paper.forward.extern) <= operators


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_checkpoint_around_attention_saves_its_inputs_only(dtype):
    """The checkpoint does not save a GPU's random state, because a described GPU has no generator."""
    qkv = [meta(2, 4, 128, 64, dtype=dtype, requires_grad=True) for _ in range(3)]

    def fn(*qkv: Tensor) -> Tensor:
        return checkpoint(F.scaled_dot_product_attention, *qkv, use_reentrant=False)

    paper = compile_on_paper(fn, *qkv)
    assert paper.saved_bytes() == sum(tensor.nbytes for tensor in qkv)
    assert paper.timeline().between == 4 * qkv[0].nbytes  # includes the result


def test_masks_are_padded_for_the_efficient_kernel():
    q = meta(2, 4, 24, 64, dtype=torch.float32, requires_grad=True)
    mask = meta(24, 24, dtype=torch.bool)
    paper = compile_on_paper(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), q, mask)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    (node,) = paper.forward.graph.graph.find_nodes(op="call_function", target=efficient)
    assert node.args[3].meta["val"].stride()[-2:] == (32, 1)


def test_shape_functions_follow_the_gpus_rules():
    """CPUs reject a histogram of integers, with which mixtures of experts count their tokens."""
    paper = compile_on_paper(lambda x: torch.histc(x, bins=4, min=0, max=3), meta(64, dtype=torch.int32))
    assert paper.inference is not None


@pytest.mark.slow
def test_constants_indexing_embedding_and_dropout_compile():
    table = nn.Embedding(1000, 256, device="meta")

    def fn(index: Tensor) -> Tensor:
        x = table(index) + torch.tensor([1.0, 2.0], device=index.device).repeat(128)
        x = x[:, None, 1:][..., 0, [-2]] + torch.arange(1, device=index.device)
        return F.cross_entropy(F.dropout(x @ torch.ones(1, 1000, device=index.device), 0.1), index)

    paper = compile_on_paper(fn, meta(512, dtype=torch.int64))
    assert paper.forward is not None and paper.backward is not None


# Passes, custom operators, settings


def test_pre_grad_pass_sees_checkpoint_bodies_and_changes_the_program():
    def relu_for_silu(graph):
        for node in graph.find_nodes(op="call_function", target=F.silu):
            node.target, node.kwargs = F.relu, {}

    mlp = on_meta(SwiGLU, 256, 1024)
    paper = compile_on_paper(
        lambda x: checkpoint(mlp, x, use_reentrant=False),
        meta(512, 256, requires_grad=True),
        config={"pre_grad_custom_pass": relu_for_silu},
    )
    assert [kernel.name for kernel in paper.forward.kernels] == ["triton_poi_fused_mul_relu_0"]


def test_custom_operators_are_external_unless_lowered():
    from torch._inductor import lowering

    @torch.library.custom_op("virtual_gpu_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: double(grad))
    x = meta(512, 256, requires_grad=True)
    opaque = compile_on_paper(lambda x: double(x) + 1, x)
    assert opaque.forward.extern == opaque.backward.extern == ("virtual_gpu_test.double",)
    target = torch.ops.virtual_gpu_test.double.default
    lowering.register_lowering(target, type_promotion_kind=None)(lambda x: lowering.mul(x, 2.0))
    try:
        lowered = compile_on_paper(lambda x: double(x) + 1, x)
    finally:
        del lowering.lowerings[target]
    assert lowered.forward.extern == lowered.backward.extern == ()
    assert lowered.forward.bytes_moved == 2 * 512 * 256 * 2


# Machine code


def copied(x: Tensor) -> Tensor:
    return x + 1


@cache
def elementwise(fn, tensors: int):
    paper = compile_on_paper(fn, *(meta(8192, 16384) for _ in range(tensors)), training=False)
    (kernel,) = paper.inference.kernels
    return kernel


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("gpu", gpus.GPUS.values(), ids=lambda gpu: gpu.name)
def test_kernels_assemble_for_every_gpu(gpu):
    code = virtual_gpu.assemble(elementwise(copied, 1), gpu, block=1024, num_warps=4)
    assert code.threads == 4 * gpu.warp_size and code.elements == 1024
    assert code.instructions_per_element() == len(code.instructions) * code.threads / 1024
    if gpu.is_amd:
        assert code.instructions[-1] == "s_endpgm" and "global_store_dwordx2" in code.instructions
        assert code.ptx == "" and "gfx942" in code.asm
    else:
        assert "STG.E.128" in code.instructions and "EXIT" in code.instructions
        assert f".target {gpu.arch}" in code.ptx
    assert code.registers > 0 and code.spills == 0


@triton.jit
def gate_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, offsets < n, other=0.0).to(tl.float32)
    tl.store(out + offsets, half_of(tl.sigmoid(value)) * device_tanh(value), offsets < n)


@triton.jit
def half_of(x):
    return x * 0.5


@triton.jit
def tenth_of(x):
    return x * 0.1


@triton.jit
def many_registers_kernel(x, out, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out + tl.arange(0, BLOCK), values / tl.sum(values))


FLOATS = meta(1024, dtype=torch.float32)


def gate_code(gpu=virtual_gpu.H100, x=FLOATS, out=FLOATS, n=1024):
    return virtual_gpu.assemble(gate_kernel, gpu, x, out, n, block={"BLOCK": 1024})


@pytest.mark.covering(every=5)
@pytest.mark.parametrize(
    ("x_offset", "out_offset", "n", "wide"),
    [
        (0, 0, 1024, (True, True)),
        (4, 4, 1024, (True, True)),
        (0, 1, 1024, (True, False)),
        (1, 0, 1024, (False, True)),
        (0, 0, 1001, (False, False)),
    ],
)
def test_a_hand_written_kernel_assembles_for_arguments_divisible_by_16(x_offset, out_offset, n, wide):
    code = gate_code(x=FLOATS[x_offset:], out=FLOATS[out_offset:], n=n)
    assert code.elements == 1024 and code.threads == 128
    assert ("LDG.E.128" in code.instructions, "STG.E.128" in code.instructions) == wide
    assert sum(name.startswith("LDG.E.128") for name in code.instructions) == 2 * wide[0]


@pytest.mark.slow
def test_spills_are_reported():

    def spills(block: int) -> int:
        block_sizes = {"BLOCK": block}
        return virtual_gpu.assemble(
            many_registers_kernel, virtual_gpu.H200, FLOATS, FLOATS, block=block_sizes, num_warps=1
        ).spills

    assert spills(256) == 0 < spills(8192)  # 256 values per thread, but at most 255 registers


def test_amd_spills_are_read_from_the_metadata():
    code = virtual_gpu.assemble(
        many_registers_kernel, virtual_gpu.MI300X, FLOATS, FLOATS, block={"BLOCK": 256}, num_warps=1
    )
    asm, spilled = re.subn(r"\.vgpr_spill_count: +0", ".vgpr_spill_count: 7", code.asm)
    assert spilled == 1 and code.spills == 0
    compiled = types.SimpleNamespace(asm={"amdgcn": asm})
    assert virtual_gpu.machine_code._amd_code(compiled)[1] == 28


# The interpreter


def ulps(result: Tensor, exact: Tensor) -> int:
    """Return the largest distance from the correctly rounded bfloat16 result, in units of the last place."""
    as_int = [t.view(torch.int16).int() for t in (result, exact.to(BF16))]
    ordered = [torch.where(i < 0, -(i & 0x7FFF), i) for i in as_int]
    return int((ordered[0] - ordered[1]).abs().max())


def interpreted(fn, *inputs):
    """Interpret a function's only kernel. Return its result and the kernel."""
    (kernel,) = compile_on_paper(fn, *inputs, training=False).inference.kernels
    expected = fn(*inputs)
    out = torch.full(expected.shape, float("nan"), dtype=expected.dtype)
    virtual_gpu.interpret(kernel, *inputs, out)
    return out, kernel


@pytest.mark.parametrize("size", [(64, 1000), (64, 1024)], ids=["masked", "even"])
def test_pointwise_kernels_are_within_one_ulp(size):
    def fn(x: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x + b) * torch.erfc(x)

    x, b = torch.randn(size).to(BF16), torch.randn(size[1]).to(BF16)
    out, kernel = interpreted(fn, x, b)
    assert ulps(out, fn(x.double(), b.double())) <= 1
    explicit = torch.full_like(x, float("nan"))
    virtual_gpu.interpret(kernel, x, b, explicit, x.numel(), grid=(-(-x.numel() // 512),), XBLOCK=512)
    assert torch.equal(out, explicit)


def test_float32_rounds_to_the_nearest_bfloat16():
    x = torch.cat([torch.randn(4096), torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-40, 3.4e38])])
    ties = (torch.randint(-(2**15), 2**15, (4096,), dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    x = torch.cat([x, ties[ties.isfinite()]])
    out, _ = interpreted(lambda x: x.to(BF16), x)
    assert torch.equal(out.view(torch.int16), x.to(BF16).view(torch.int16))


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
def test_float32_rounds_to_the_nearest_float8(dtype: torch.dtype):
    """Test ties, carries into the exponent, and values beyond the largest number."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * 0.999, torch.tensor([1e9, -1e9])])
    out, _ = interpreted(lambda x: x.to(dtype), x)
    largest = torch.finfo(dtype).max
    assert torch.equal(out.float(), x.clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: torch.softmax(x, -1), (32, 500)),
        pytest.param(lambda x: torch.softmax(x, -1), (4, 8000), marks=pytest.mark.slow),
        pytest.param(lambda x: F.layer_norm(x, (500,)), (32, 500), marks=pytest.mark.slow),
        (lambda x: F.layer_norm(x, (8000,)), (4, 8000)),
        pytest.param(lambda x: x.sum(-1), (32, 5000), marks=pytest.mark.slow),
        (lambda x: x.permute(2, 0, 1).contiguous() + 1, (10, 20, 30)),
    ],
    ids=["softmax", "softmax_looped", "layer_norm", "layer_norm_looped", "sum", "transpose"],
)
def test_reductions_and_tiled_kernels_are_accurate(fn, shape):
    x = torch.randn(shape)
    out, _ = interpreted(fn, x)
    torch.testing.assert_close(out.double(), fn(x.double()), rtol=2e-5, atol=2e-5)


def test_hand_written_kernel_runs():
    x, out = torch.randn(1000), torch.zeros(1000)
    virtual_gpu.interpret(gate_kernel, x, out, 1000, grid=(4,), BLOCK=256)
    expected = torch.sigmoid(x.double()) * 0.5 * torch.tanh(x.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-7)
    virtual_gpu.interpret(gate_kernel, x, out.zero_(), 1000, grid=lambda meta: (4,), BLOCK=256)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-7)


def test_kernels_are_rewritten_once_and_use_current_globals(monkeypatch):
    x, out = torch.randn(8), torch.zeros(8)
    virtual_gpu.interpret(gate_kernel, x, out, 8, grid=(1,), BLOCK=8)
    before = out.clone()
    rewrite = mock.Mock(side_effect=AssertionError("the source was rewritten twice"))
    with monkeypatch.context() as patched:
        patched.setattr(import_module("triton.runtime.interpreter").FunctionRewriter, "rewrite_ast", rewrite)
        virtual_gpu.interpret(gate_kernel, x, out.zero_(), 8, grid=(1,), BLOCK=8)
    assert torch.equal(out, before) and before.any()
    monkeypatch.setitem(globals(), "half_of", tenth_of)
    virtual_gpu.interpret(gate_kernel, x, out, 8, grid=(1,), BLOCK=8)
    torch.testing.assert_close(out, before / 5)


def test_kernels_of_one_name_have_their_own_defaults(tmp_path):
    def load_kernel(bias: float) -> object:
        file = tmp_path / f"kernel_{bias}.py"
        file.write_text(f"""import triton, triton.language as tl
@triton.jit
def kernel(out, bias={bias}, BLOCK: tl.constexpr = 4):
    tl.store(out + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32) + bias)
""")
        spec = spec_from_file_location(file.stem, file)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    for bias in (2.0, 3.0):
        kernel = load_kernel(bias)
        for block in (4, 2):
            out = torch.zeros(4)
            virtual_gpu.interpret(kernel, out, grid=(1,), **({} if block == 4 else {"BLOCK": block}))
            assert out.tolist() == [bias] * block + [0.0] * (4 - block)


# Errors


def test_errors_name_argument_value_and_choice():
    kernel, x = elementwise(copied, 1), torch.ones(4)
    raises(ValueError, r"name='H300' is not known; accepted: A100, H100", virtual_gpu.by_name, "H300")
    raises(ValueError, r"gpu='H300' is not known; accepted: A100, H100", compile_on_paper, torch.sin, x, gpu="H300")
    raises(TypeError, r"fn: got int", compile_on_paper, 3)
    raises(ValueError, r"memory_budget: got 2, expected", compile_on_paper, lambda x: x, x, memory_budget=2)
    raises(ValueError, r"has no tensor operations to compile", compile_on_paper, lambda x: 3, x)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_on_paper(lambda x: torch._dynamo.graph_break() or x + 1, x)
    raises(TypeError, r"kernel: got function", virtual_gpu.assemble, copied)
    with pytest.raises(ValueError, match=r"block: got 'YBLOCK', expected one of \['XBLOCK'\]"):
        virtual_gpu.assemble(kernel, block={"YBLOCK": 4})
    with pytest.raises(TypeError, match=r"gate_kernel\(x, out, n, BLOCK\) does not accept .* missing .*: 'n'"):
        virtual_gpu.assemble(gate_kernel, virtual_gpu.H200, x, x, block={"BLOCK": 64})
    with pytest.raises(TypeError, match=r"gate_kernel\(.*\) does not accept these arguments: .* y was"):
        virtual_gpu.assemble(gate_kernel, virtual_gpu.H200, x, x, 4, y=4, block={"BLOCK": 64})
    with pytest.raises(ValueError, match=r"args, constexprs: a generated kernel has its own"):
        virtual_gpu.assemble(kernel, virtual_gpu.H200, x)
    with pytest.raises(ValueError, match=r"x: got a tensor on meta, expected one on the CPU"):
        virtual_gpu.interpret(gate_kernel, meta(4), x, 4, grid=(1,), BLOCK=4)
    with pytest.raises(ValueError, match=r"grid: missing, and gate_kernel is hand-written"):
        virtual_gpu.interpret(gate_kernel, x, x, 4, BLOCK=4)
    with pytest.raises(ValueError, match=r"XBLOCK: got 8192, expected a power of 2 up to 4096"):
        virtual_gpu.interpret(kernel, x, x, XBLOCK=8192)
    raises(
        TypeError,
        r"missing 1 required positional argument: 'n'",
        virtual_gpu.interpret,
        gate_kernel,
        x,
        x,
        grid=(1,),
        BLOCK=4,
    )


def test_missing_triton_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    raises(ModuleNotFoundError, "pip install triton numpy", compile_on_paper, lambda x: x + 1, torch.ones(4))


def test_tritons_warning_on_its_next_version_is_avoided():
    warn_once = getattr(pytest.importorskip("triton._utils"), "warn_once", None)
    if warn_once is None:
        pytest.skip("this Triton has no such warning")
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "TRITON_DEFAULT_FP_FUSION")
        compile_on_paper(lambda x: x + 1, torch.ones(4))
    assert "TRITON_DEFAULT_FP_FUSION" not in os.environ


# No trace


def state():
    from torch._dynamo import device_interface
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from triton.language.extra import libdevice

    return {
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "properties": torch.cuda.get_device_properties,
        "versions": (torch.version.cuda, torch.version.hip),
        "driver": triton.runtime.driver._active,
        "interface": device_interface.device_interfaces.get("cuda"),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "lazy_init": joint_graph.lazy_init,
        "from_tensor": FakeTensorMode.from_tensor,
        "getitem": FakeTensor.__getitem__,
        "passes": inductor_config.joint_custom_pre_pass,
        "padding": inductor_config.shape_padding,
        "budget": functorch_config.activation_memory_budget,
        "language": (tl.load, tl.core.load, tl.reduce, tl.core.tensor.__add__, libdevice.tanh),
        "jit": triton.runtime.jit.JITFunction.__call__,
    }


@pytest.mark.slow
def test_leaves_no_trace():
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.utils import get_gpu_type
    from torch.utils._triton import has_triton

    mlp = SwiGLU(16, 32)
    x = torch.randn(4, 16, requires_grad=True)
    eager = mlp(x)
    torch._dynamo.device_interface.get_interface_for_device("cpu")
    before, had_triton, gpu_type = state(), has_triton(), get_gpu_type()
    compiled = torch.compile(mlp, fullgraph=True)
    torch.testing.assert_close(compiled(x), eager)

    h200 = compile_on_paper(mlp, x, gpu=virtual_gpu.H200).forward
    a100 = compile_on_paper(mlp, x, gpu=virtual_gpu.A100).forward
    assert "cc=90" in h200.code and "multi_processor_count=132" in h200.code
    assert "cc=80" in a100.code and "multi_processor_count=108" in a100.code
    for kernel in h200.kernels:
        virtual_gpu.assemble(kernel)
        out = torch.zeros(4, 32)
        virtual_gpu.interpret(kernel, torch.ones(4, 32), torch.ones(4, 32), out)
    with pytest.raises(RuntimeError, match="stop"):
        compile_on_paper(mlp, x, config={"joint_custom_pre_pass": mock.Mock(side_effect=RuntimeError("stop"))})

    assert state() == before
    assert (has_triton(), get_gpu_type()) == (had_triton, gpu_type)
    assert DeviceProperties.create(torch.device("cpu")).type == "cpu"
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(x), eager)
    torch._dynamo.reset()
    recompiled = torch.compile(mlp, fullgraph=True)(x)
    recompiled.sum().backward()
    torch.testing.assert_close(recompiled, eager)
    assert mlp.up.weight.grad is not None


@pytest.mark.slow
def test_importing_the_compiler_during_interpretation_copies_original_functions():
    """On import the compiler copies the language's min and max, which the interpreter replaces temporarily."""
    program = """
from torch_fused_ops.virtual_gpu import interpreter
with interpreter._interpreting():
    import triton.compiler.code_generator as compiler
from triton.language import core
print(compiler.CodeGenerator.builtin_namespace["min"] in (core.minimum, getattr(core, "builtin_min", None)))
"""
    assert python("-c", program).split() == ["True"]


def test_automatic_dynamic_sizes_do_not_leak():
    """Compiling for two sizes must not make the second, or the user's compilation, dynamic."""
    for rows in (64, 128):
        paper = compile_on_paper(F.silu, meta(rows, 64))
        assert "ks0" not in paper.inference.code
        assert paper.inference.bytes_moved == 2 * rows * 64 * 2


# ---- interpret_step --------------------------------------------------------------------------------------------------


def test_interpreted_steps_match_eager_mode() -> None:
    """The module has a norm, reductions and buffer reuse."""
    module = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    x, gradient = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    paper = virtual_gpu.compile_on_paper(module, x)
    parameters = dict(module.named_parameters())
    paths = [re.sub(r"l_fn_modules_(\d)_parameters_(\w+)_", r"\1.\2", spec.name) for spec in paper.forward.inputs]
    used = [parameters.get(path, x) for path in paths]
    assert len(set(paths)) == len(used) == 7
    for strided in (gradient, gradient.t().contiguous().t()):
        (result,), actual = virtual_gpu.interpret_step(paper, [t.detach().clone() for t in used], [strided])
    expected = module(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, used, gradient), rtol=1e-4, atol=1e-4)


def test_interpret_step_checks_its_arguments() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    paper = virtual_gpu.compile_on_paper(F.gelu, x)
    for inputs, gradients, text in (
        ([], [], "inputs: got 0, expected 1"),
        ([x.detach()], [x.detach()] * 2, "gradients: got 2, expected 1"),
        (
            [x.detach()],
            [x.detach().t()],
            r"gradients\[0\] .* got torch.float32\[16, 8\], expected .*\[8, 16\]",
        ),
        ([x.detach().double()], [], r"inputs\[0\] \(\w+\): got torch.float64\[8, 16\], expected torch.float32"),
    ):
        raises(ValueError, text, virtual_gpu.interpret_step, paper, inputs, gradients)
    assert virtual_gpu.interpret_step(paper, [x.detach()])[1] == ()


def test_one_dimensional_convolutions_compile() -> None:
    """A convolution's fake kernel calls `contiguous`, a method that enters a device guard."""
    conv = nn.Conv1d(4, 4, 3, device="meta")
    assert compile_on_paper(lambda x: conv(x).square().sum(), meta(2, 4, 16, dtype=torch.float32)).backward is not None
