"""Compare ``nn.GroupedMLP`` in one process with an ``nn.MLP`` per expert. Test flags, ``permute``, ``unpermute``."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Net, Ran, of_halves, output, raises
from test_mlp import build as build_dense
from test_mlp import one_thread  # noqa: F401 - a fixture
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fused_ops as tfo
from torch_fused_ops import nn as fnn
from torch_fused_ops.nn import MLP, GroupedMLP, GroupedMLPSubmodules, MLPConfig, _gemms, permute, unpermute

HIDDEN, FFN, EXPERTS = 16, 24, 3
LEVELS = ("off", "free", "fp8", "input")


def config(**flags):
    defaults = {"activation_func": F.silu, "gated_linear_unit": True, "params_dtype": torch.float64, **flags}
    return MLPConfig(HIDDEN, **{"moe_ffn_hidden_size": FFN, **defaults})


def build(mlp_config, experts=EXPERTS, seed=0, **arguments):
    torch.manual_seed(seed)
    mlp = GroupedMLP(experts, mlp_config, **arguments)
    with torch.no_grad():
        for p in mlp.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mlp


def separate(grouped, **flags):
    """Return an ``nn.MLP`` for each expert, with the expert's weights."""
    expert_config = copy.copy(grouped.config)
    for name, value in flags.items():
        setattr(expert_config, name, value)
    experts = [MLP(expert_config, is_expert=True) for _ in range(grouped.num_local_experts)]
    with torch.no_grad():
        for place, expert in enumerate(experts):
            for parameter, stacked in zip(expert.parameters(), grouped.parameters(), strict=True):
                parameter.copy_(stacked[place])
    return experts


def run(experts, x, counts, probs):
    """Concatenate the results of an ``MLP`` per expert."""
    parts = [None] * len(counts) if probs is None else probs.split(counts)
    outputs = (expert(rows, part) for expert, rows, part in zip(experts, x.split(counts), parts, strict=True))
    return torch.cat([y if bias is None else y + bias for y, bias in outputs])


def gradients(y, d, grouped, *extra_inputs):
    """Return the gradients of a grouped MLP's parameters, or the stacked gradients of an ``MLP`` per expert."""
    if isinstance(grouped, GroupedMLP):
        return torch.autograd.grad(y, [*extra_inputs, *grouped.parameters()], d)
    parameters = [list(expert.parameters()) for expert in grouped]
    grads = torch.autograd.grad(y, [*extra_inputs, *itertools.chain(*parameters)], d)
    remaining = iter(grads[len(extra_inputs) :])
    of_experts = [[next(remaining) for _ in expert] for expert in parameters]
    return (*grads[: len(extra_inputs)], *map(torch.stack, zip(*of_experts, strict=True)))


def inputs(counts, dtype=torch.float64, scaled=True, seed=1):
    torch.manual_seed(seed)
    rows = sum(counts)
    x = torch.randn(rows, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    probs = torch.rand(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    return x, probs if scaled else None, torch.randn(rows, HIDDEN, dtype=torch.float64).to(dtype)


COUNTS = [[2, 0, 3], [0, 5, 0], [4, 1, 2], [0, 0, 0], [1, 0, 0]]


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("counts", [*COUNTS, [7]], ids=str)
def test_grouped_mlp_equals_an_mlp_per_expert(counts: list[int], dtype: torch.dtype) -> None:
    """float64 experts run one by one, float32 experts as grouped GEMMs."""
    close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 2e-5}
    for gated, bias, scaled, memory, as_tensor in itertools.product(
        (False, True), (False, True), (False, True), LEVELS, (False, True)
    ):
        mlp_config = config(gated_linear_unit=gated, add_bias_linear=bias, memory=memory, params_dtype=dtype)
        grouped = build(mlp_config, len(counts))
        x, probs, d = inputs(counts, dtype, scaled)
        extra_inputs = [x] if probs is None else [x, probs]
        y, none = grouped(x, torch.tensor(counts) if as_tensor else counts, probs)
        truth = run(alone := separate(grouped), x, counts, probs)
        assert none is None
        torch.testing.assert_close(y, truth, **close)
        actual, expected = gradients(y, d, grouped, *extra_inputs), gradients(truth, d, alone, *extra_inputs)
        # Gradients are rounded: GroupedMLP rounds h with its bias, MLP without.
        rough = {"atol": 0.3, "rtol": 0.3} if memory == "fp8" else close
        torch.testing.assert_close(actual, expected, **rough)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loop", [False, True])
def test_low_precision_errors_are_within_twice_those_of_separate_mlps(
    dtype: torch.dtype, loop: bool, monkeypatch
) -> None:
    """Test bias gradients as well. The derivative of indexing would round a gradient of 700 rows 700 times."""
    if loop:
        monkeypatch.setattr(_gemms, "_grouped", lambda *args: False)
    counts = [300, 0, 700]
    grouped = build(config(params_dtype=dtype))
    x, probs, d = inputs(counts, dtype)
    exact = copy.deepcopy(grouped).double()
    x64, probs64 = (t.detach().double().requires_grad_() for t in (x, probs))
    y64 = run(alone := separate(exact, params_dtype=torch.float64), x64, counts, probs64)
    truth = [y64, *gradients(y64, d.double(), alone, x64, probs64)]
    errors = []
    for module in (grouped, separate(grouped)):
        y = module(x, torch.tensor(counts), probs)[0] if module is grouped else run(module, x, counts, probs)
        actual = [y, *gradients(y, d, module, x, probs)]
        assert [t.dtype for t in actual] == [dtype, dtype, torch.float32, *[dtype] * 4]
        errors.append([(a.double() - b).norm() / b.norm() for a, b in zip(actual, truth, strict=True)])
    for grouped_error, separate_error in zip(*errors, strict=True):
        assert grouped_error <= 2 * separate_error  # only GroupedMLP rounds h with its bias


def test_aligned_gemms_are_grouped(monkeypatch) -> None:
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or grouped_mm(*args, **kwargs))
    for dtype, ffn, bias, expected_calls in (
        (torch.float32, 24, False, (2, 4)),
        (torch.float32, 24, True, (2, 6)),  # two more for bias gradients
        (torch.bfloat16, 24, False, (2, 4)),
        (torch.float32, 22, False, (1, 2)),  # the second GEMM has rows of 88 bytes
        (torch.float64, 24, True, (0, 0)),
    ):
        grouped = build(config(params_dtype=dtype, moe_ffn_hidden_size=ffn, add_bias_linear=bias))
        x, probs, _ = inputs([2, 0, 3], dtype)
        y, _ = grouped(x, torch.tensor([2, 0, 3]), probs)
        forward = len(calls)
        y.sum().backward()
        assert (forward, len(calls) - forward) == expected_calls
        calls.clear()


def test_rows_may_have_any_strides() -> None:
    """``F.grouped_mm`` rejects rows that do not start at multiples of 16 bytes."""
    grouped = build(config(params_dtype=torch.float32))
    base = torch.randn(6, HIDDEN + 1)
    transposed = torch.randn(HIDDEN, 5).t()
    for x in (base[:5, :HIDDEN], base[:5, 1:], transposed, base[:1, :HIDDEN], base[:1, :HIDDEN].expand(5, HIDDEN)):
        counts = [1, 0, len(x) - 1]
        y, _ = grouped(x, counts)
        torch.testing.assert_close(y, run(separate(grouped), x, counts, None), atol=2e-5, rtol=2e-5)


def test_gradients_of_gradients() -> None:
    counts = [2, 0, 1]
    for memory, gated in itertools.product(("free", "input"), (False, True)):
        grouped = build(config(memory=memory, gated_linear_unit=gated, moe_ffn_hidden_size=2))
        x, probs, d = inputs(counts)
        parameters = list(grouped.parameters())

        def call(x, probs, *parameters, grouped=grouped):
            names = dict(zip(dict(grouped.named_parameters()), parameters, strict=True))
            return torch.func.functional_call(grouped, names, (x, counts, probs))[0]

        assert torch.autograd.gradcheck(call, (x, probs, *parameters), fast_mode=memory == "input")
        if memory == "free":
            assert torch.autograd.gradgradcheck(call, (x, probs, *parameters), fast_mode=True)
        names = dict(grouped.named_parameters())

        def loss(parameters, grouped=grouped, args=(x, counts, probs), d=d):
            return (torch.func.functional_call(grouped, parameters, args)[0] * d).sum()

        torch.testing.assert_close(
            [*torch.func.grad(loss)(names).values()], torch.autograd.grad(loss(names), parameters)
        )


def test_grouped_operators_pass_opcheck() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        x, g = (torch.randn(5, n, dtype=dtype, requires_grad=True) for n in (8, 4))
        weight = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
        torch.library.opcheck(torch.ops.fused_nn.grouped_mm, (x, weight, ends))
        torch.library.opcheck(torch.ops.fused_nn.grouped_outer_mm, (g, x, ends))


def test_host_does_not_read_values() -> None:
    """Fake tensors have no values, so reading one would raise."""
    with FakeTensorMode():
        grouped = GroupedMLP(EXPERTS, config(params_dtype=torch.bfloat16))
        x, probs = torch.randn(5, HIDDEN, dtype=torch.bfloat16, requires_grad=True), torch.rand(5)
        experts = torch.randint(0, EXPERTS, (5, 2))
        rows, counts, row_probs, order = permute(x, experts, probs[:, None].expand(5, 2), EXPERTS)
        y = unpermute(grouped(rows, counts, row_probs)[0], order)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("how", [*LEVELS, "fp8-rowwise", "aot_eager"])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_no_expert_owns_are_zero(how: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory of a GEMM's result reaches neither output nor gradients. Other rows do not change."""
    dtype = torch.bfloat16 if how == "fp8-rowwise" else torch.float32
    mlp_config = config(memory=how if how in LEVELS else "free", add_bias_linear=bias, params_dtype=dtype)
    mlp_config.hidden_size = mlp_config.moe_ffn_hidden_size = 32
    grouped = build(mlp_config, gemm="fp8-rowwise" if how == "fp8-rowwise" else "bf16")
    counts, owned = torch.tensor([4, 0, 6]), 10
    x = torch.randn(owned + 5, 32, dtype=dtype).requires_grad_()
    probs, d = torch.rand(owned + 5, dtype=dtype).requires_grad_(), torch.randn(owned + 5, 32, dtype=dtype)
    y, _ = grouped(x[:owned], counts, probs[:owned])
    expected = [y, *gradients(y, d[:owned], grouped, x, probs)]
    monkeypatch.setattr(_gemms, "readable", lambda t: False)  # GPU tensors are not read
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # fills it with NaN
    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        run = torch.compile(grouped, backend=how) if how == "aot_eager" else grouped
        y, _ = run(x, counts, probs)
        got = [y, *gradients(y, d, grouped, x, probs)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not y[owned:].any()
    torch.testing.assert_close([y[:owned], *got[1:]], expected)


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_memory_levels_save_the_documented_bytes(memory: str, bias: bool, gated: bool) -> None:
    counts = torch.tensor([4, 0, 6])
    grouped = build(config(memory=memory, gated_linear_unit=gated, add_bias_linear=bias, params_dtype=torch.float32))
    x, probs, d = inputs([4, 0, 6], torch.float32)
    wide = FFN * 2 if gated else FFN
    between = {"off": 4 * (wide + FFN), "free": 4 * wide, "fp8": wide + 4, "input": 0}[memory]
    with Ran() as ran:
        y, _ = grouped(x, counts, probs)
        saved_bytes = ran.alive(x, probs, counts, y, *grouped.parameters())
        y.backward(d)
    assert saved_bytes == 10 * between + 4 * EXPERTS  # plus the end of each expert's rows
    del y
    with Ran() as ran, torch.no_grad():
        y, _ = grouped(x, counts, probs)
        assert ran.alive(x, probs, counts, y, *grouped.parameters()) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grouped", [False, True])
def test_backward_dw_is_bit_for_bit_what_backward_would_have_added(grouped: bool, dtype: torch.dtype) -> None:
    """Three batches are in flight: ``backward_dw`` adds the oldest batch's gradients first."""
    batches = [[2, 0, 3], [0, 4, 1], [0, 0, 2]]
    for gated, frozen, scaled in itertools.product((False, True), (None, "linear_fc1", "linear_fc2"), (False, True)):
        flags = {"gated_linear_unit": gated, "params_dtype": dtype, "ffn_hidden_size": FFN}
        trio = [(build if grouped else build_dense)(config(**flags, delay_wgrad_compute=i == 1)) for i in range(3)]
        input_grads = []
        for mlp, these in zip(trio, (batches, batches, batches[:1]), strict=True):
            if frozen:
                getattr(mlp, frozen).weight.requires_grad_(False)
            given_inputs = [inputs(counts, dtype, scaled, seed) for seed, counts in enumerate(these)]
            outputs = [
                output(mlp, x, *[counts] * grouped, p) for counts, (x, p, _) in zip(these, given_inputs, strict=True)
            ]
            for y, (_, _, d) in zip(outputs, given_inputs, strict=True):
                y.backward(d)
            input_grads.append([t.grad for x, p, _ in given_inputs for t in (x, p) if t is not None])
        undelayed, delayed, oldest = trio
        assert all(map(torch.equal, *input_grads[:2]))
        assert all(p.grad is None for p in delayed.parameters())
        seen = []
        for name in ("linear_fc1", "linear_fc2"):
            linear = getattr(delayed, name)
            backward_dw = linear.backward_dw
            linear.backward_dw = lambda backward_dw=backward_dw, name=name, seen=seen: (
                seen.append(name) or backward_dw()
            )
        for done in range(len(batches) + 1):  # the last call has nothing left to add
            delayed.backward_dw()
            for p, q in zip(oldest.parameters(), delayed.parameters(), strict=True):
                assert done or not q.requires_grad or torch.equal(p.grad, q.grad)
        assert seen == ["linear_fc2", "linear_fc1"] * 4
        for (name, p), q in zip(undelayed.named_parameters(), delayed.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (name == f"{frozen}.weight")
            assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_autocast(delay: bool, grouped: bool) -> None:
    """GEMMs run in bfloat16; gradients have the parameters' dtype."""
    counts = [2, 0, 3]
    mlp = build(config(params_dtype=torch.float32, delay_wgrad_compute=delay))
    experts = separate(mlp)
    x, probs, d = inputs(counts, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x, counts, probs)[0] if grouped else run(experts, x, counts, probs)
    assert y.dtype == torch.bfloat16
    y.backward(d.bfloat16())
    for module in [mlp] if grouped else experts:
        module.backward_dw()
    truth = run(alone := separate(mlp, delay_wgrad_compute=False), x, counts, probs)
    torch.testing.assert_close(y.float(), truth, atol=0.05, rtol=0.05)
    expected = gradients(truth, d, alone, x, probs)
    if grouped:
        parameters = [p.grad for p in mlp.parameters()]
    else:
        parameters = [torch.stack(gs) for gs in zip(*([p.grad for p in e.parameters()] for e in experts), strict=True)]
    for a, b in zip((x.grad, probs.grad, *parameters), expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-6


# ---- flags -----------------------------------------------------------------------------------------------------------


def Glu(*, config):
    glu = of_halves(F.silu)
    return Net(lambda s, x: glu(x))


def test_an_activation_module_computes_what_the_operator_does() -> None:
    counts, module = [2, 0, 3], {"submodules": GroupedMLPSubmodules(activation_func=Glu)}
    x, probs, d = inputs(counts)
    results = []
    for grouped in (build(config()), build(config(use_te_activation_func=True), **module)):
        y, _ = grouped(x, counts, probs)
        results.append([y, *gradients(y, d, grouped, x, probs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("bias", [False, True])
def test_probabilities_on_the_input(bias: bool) -> None:
    counts = [2, 0, 3]
    flags = {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "add_bias_linear": bias}
    grouped = build(config(**flags))
    x, probs, d = inputs(counts)
    y, _ = grouped(x, counts, probs)
    truth = run(alone := separate(grouped), x * probs[:, None], counts, None)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(gradients(y, d, grouped, x, probs), gradients(truth, d, alone, x, probs))
    torch.testing.assert_close(grouped(x, counts)[0], run(alone, x, counts, None))


def test_custom_linears_get_megatrons_arguments() -> None:
    calls = {}

    class First(fnn.GroupedColumnParallelLinear):
        def __init__(self, *sizes, **arguments):
            calls["fc1"] = sizes, set(arguments), arguments["skip_bias_add"]
            super().__init__(*sizes, **arguments)

    class Second(nn.Module):
        """A user's linear, with one GEMM per expert."""

        def __init__(self, *sizes, **arguments):
            super().__init__()
            calls["fc2"] = sizes, set(arguments), arguments["skip_bias_add"]
            self.own = fnn.GroupedRowParallelLinear(*sizes, **arguments)

        def forward(self, x, tokens_per_expert):
            calls["counts"] = tokens_per_expert
            parts = [F.linear(a, w) for a, w in zip(x.split(tokens_per_expert), self.own.weight, strict=True)]
            return torch.cat(parts), self.own.bias

    grouped = build(config(), submodules=GroupedMLPSubmodules(First, Second))
    common = {"config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name", "tp_group"}
    assert calls["fc1"] == ((EXPERTS, HIDDEN, 2 * FFN), common | {"ep_group", "stride"}, False)
    assert calls["fc2"] == ((EXPERTS, FFN, HIDDEN), common | {"ep_group"}, True)
    counts = [2, 0, 3]
    x, probs, _ = inputs(counts)
    y, _ = grouped(x, counts, probs)
    assert calls["counts"] is counts
    with torch.no_grad():
        torch.testing.assert_close(y, run(separate(grouped), x, counts, probs))


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"moe_ffn_hidden_size": None}, ValueError, "config.moe_ffn_hidden_size"),
        ({"moe_apply_probs_on_input": "no"}, TypeError, "moe_apply_probs_on_input='no' .* True or False"),
        ({"moe_apply_probs_on_input": True}, ValueError, "moe_router_topk=2"),
        ({"use_te_activation_func": True}, ValueError, "GroupedMLPSubmodules.activation_func"),
    ],
)
def test_constructor_rejects_incompatible_flags(flags: dict, error: type, words: str) -> None:
    raises(error, words, GroupedMLP, EXPERTS, config(**flags))


def test_swapped_arguments_are_rejected() -> None:
    raises(TypeError, "config=8 is not accepted: it must be an MLPConfig", GroupedMLP, config(), 8)
    raises(TypeError, "submodules=8 is not accepted", GroupedMLP, 2, config(), 8)
    words = "num_local_experts=0 is not accepted: it must be an integer from 1 on"
    raises(ValueError, words, fnn.GroupedColumnParallelLinear, 0, 4, 4, config=config())
    assert GroupedMLP(np.int64(2), config()).num_local_experts == 2


@pytest.mark.parametrize(
    ("flags", "grouped_alone"),
    [
        ({"fp8": "hybrid"}, False),
        ({"fp4": "e2m1"}, False),
        ({"quant_recipe": object()}, False),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, True),
        ({"moe_combine_bwd_dtype": "mxfp8"}, True),
    ],
)
def test_megatrons_precision_flags_are_rejected(flags: dict, grouped_alone: bool) -> None:
    (name,) = flags
    mlp_config = SimpleNamespace(**vars(config(ffn_hidden_size=FFN)), **flags)
    raises(ValueError, f"{name}=.* is not accepted", GroupedMLP, EXPERTS, mlp_config)
    if grouped_alone:
        MLP(mlp_config)
    else:
        raises(ValueError, f"{name}=.* is not accepted", MLP, mlp_config)
    GroupedMLP(EXPERTS, SimpleNamespace(**vars(config()), fp8=None, moe_dispatch_fwd_dtype="bf16", fp4=False))


def test_experts_reject_interleaved_gate_and_up() -> None:
    mlp_config = SimpleNamespace(**vars(config(ffn_hidden_size=FFN)), moe_mlp_glu_interleave_size=4)
    MLP(mlp_config)  # dense MLPs ignore the flag, as in Megatron
    for build_experts in (lambda: GroupedMLP(EXPERTS, mlp_config), lambda: MLP(mlp_config, is_expert=True)):
        raises(ValueError, "moe_mlp_glu_interleave_size=4 is not accepted", build_experts)
    raises(ValueError, r"MLPSubmodules\.activation_func", MLP, config(use_te_activation_func=True), fnn.MLPSubmodules())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.zeros(5, 8), [2, 0, 3]), ValueError, r"\(5, 8\) are not accepted: they must be \(T, 16\)"),
        ((torch.zeros(5, 1, 16), [2, 0, 3]), ValueError, "permuted_local_hidden_states"),
        ((torch.zeros(5, 16), [2, 3]), ValueError, "must have 3 numbers"),
        ((torch.zeros(5, 16), [2, 0, 4]), ValueError, r"\[2, 0, 4\] is not accepted: it must be numbers from 0 on"),
        ((torch.zeros(5, 16), [6, 0, -1]), ValueError, "numbers from 0 on with the sum 5"),
        ((torch.zeros(5, 16), [2, 0, 3.0]), TypeError, "a tensor or integers"),
        ((torch.zeros(5, 16), torch.tensor([2, 3])), ValueError, r"shape \(2,\) is not accepted: it must be \(3,\)"),
        ((torch.zeros(5, 16), torch.tensor([2, 0, 4])), ValueError, r"\[2, 0, 4\] is not accepted"),
        ((torch.zeros(5, 16), torch.tensor([6, 0, -1])), ValueError, "numbers from 0 on with the sum 5"),
        ((torch.zeros(5, 16), torch.tensor([2.0, 0, 3])), TypeError, "must have integers"),
        ((torch.zeros(5, 16), [2, 0, 3], torch.ones(4)), ValueError, r"permuted_probs of shape \(4,\)"),
        ((torch.zeros(5, 16), [2, 0, 3], torch.ones(5, 1)), ValueError, r"they must be \(5,\)"),
        ((torch.zeros(5, 16), [2, 0, 3], 2.0), TypeError, "permuted_probs of type float is not accepted"),
        (([1.0], [1, 0, 0]), TypeError, "permuted_local_hidden_states of type list is not accepted"),
    ],
)
def test_call_rejects_wrong_shapes_and_dtypes(arguments: tuple, error: type, words: str) -> None:
    raises(error, words, GroupedMLP(EXPERTS, config()), *arguments)


def group_of(size, rank):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


@pytest.mark.parametrize("init", [None, lambda t: nn.init.normal_(t, std=0.02)])
def test_sizes_and_where_experts_start(init) -> None:
    """With the same seed, a rank of an ep_group initializes its experts like a single process."""
    mlp_config = config(moe_latent_size=8, params_dtype=None, init_method=init, output_layer_init_method=init)

    def started(*args, **kwargs):
        torch.manual_seed(0)
        return GroupedMLP(*args, **kwargs)

    all_experts = started(4, mlp_config)
    shapes = [tuple(p.shape) for p in all_experts.parameters()]
    assert shapes == [(4, 2 * FFN, 8), (4, 2 * FFN), (4, 8, FFN), (4, 8)]
    assert "experts=4 of 4" in repr(all_experts)
    for rank in range(2):
        local_experts = started(2, mlp_config, ep_group=group_of(2, rank))
        for p, q in zip(local_experts.parameters(), all_experts.parameters(), strict=True):
            assert torch.equal(p, q[2 * rank : 2 * rank + 2])
    # The first expert's weight is initialized as in nn.Linear, or by init_method.
    torch.manual_seed(0)
    first_expert = nn.Linear(8, 2 * FFN)
    if init is not None:
        torch.manual_seed(0)
        init(first_expert.weight)
        assert not all_experts.linear_fc1.bias.any()
    assert torch.equal(all_experts.linear_fc1.weight[0], first_expert.weight)


@pytest.mark.parametrize("gated", [False, True])
def test_checkpoint_equals_that_of_an_mlp_per_expert(gated: bool) -> None:
    """Both have the same keys, shapes and boxes."""
    mlp_config = config(gated_linear_unit=gated)
    grouped = build(mlp_config, 2, ep_group=group_of(3, 1))  # experts 2 and 3 of 6
    for offsets, separate_keys in itertools.product(((), ((0, 5, 7),)), (False, True)):
        metadata = {"singleton_local_shards": separate_keys}
        state = grouped.sharded_state_dict("mlp.", offsets, metadata)
        boxes = {
            (key, tuple(place[: len(offsets)]), place[len(offsets)] + i, *place[len(offsets) + 1 :]): part
            for key, t in state.items()
            for place, box in t._boxes()
            for i, part in enumerate(box.squeeze(0) if offsets else box)
        }
        for expert, mlp in zip((2, 3), separate(grouped), strict=True):
            expert_state = mlp.sharded_state_dict("mlp.", (*offsets, (len(offsets), expert, 6)), metadata)
            assert {key: t.shape for key, t in expert_state.items()} == {key: t.shape for key, t in state.items()}
            for key, t in expert_state.items():
                for place, box in t._boxes():
                    n = len(offsets)
                    mine = boxes.pop((key, tuple(place[:n]), *place[n:]))
                    assert torch.equal(mine, box.reshape(mine.shape))
        assert not boxes


# ---- permute ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "k", "experts"), [(7, 2, 4), (5, 1, 3), (6, 3, 3), (0, 2, 4), (4, 2, 9)])
def test_permute_and_unpermute(tokens: int, k: int, experts: int) -> None:
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    probs, chosen = torch.rand(tokens, experts, dtype=torch.float64).topk(k)
    probs.requires_grad_()
    rows, counts, row_probs, order = permute(x, chosen, probs, experts)
    expected = sorted((e, t, j) for t, row in enumerate(chosen.tolist()) for j, e in enumerate(row))
    assert torch.equal(rows, x[[t for _, t, _ in expected]])
    assert torch.equal(row_probs, probs[[t for _, t, _ in expected], [j for *_, j in expected]])
    assert counts.tolist() == [sum(e == expert for e, *_ in expected) for expert in range(experts)]
    assert counts.dtype == torch.int64 and order.shape == (tokens, k)
    for i, (_, t, j) in enumerate(expected):
        assert order[t, j] == i
    torch.testing.assert_close(unpermute(rows, order), k * x)
    weighted = unpermute(rows * row_probs[:, None], order)
    torch.testing.assert_close(weighted, x * probs.sum(1, keepdim=True))
    assert permute(x, chosen.int(), None, experts).probs is None

    def round_trip(x, probs):
        rows, _, row_probs, order = permute(x, chosen, probs, experts)
        return unpermute(rows.square() * row_probs[:, None], order)

    assert torch.autograd.gradcheck(round_trip, (x, probs)) and torch.autograd.gradgradcheck(round_trip, (x, probs))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, e, p: permute(x, e.float(), p, 4), TypeError, "experts of dtype torch.float32"),
        (lambda x, e, p: permute(x[None], e, p, 4), ValueError, r"tokens of shape \(1, 5, 3\)"),
        (lambda x, e, p: permute(x, e[:4], p, 4), ValueError, r"experts of shape \(4, 2\) .* \(5, k\)"),
        (lambda x, e, p: permute(x, e[:, 0], p, 4), ValueError, r"experts of shape \(5,\)"),
        (lambda x, e, p: permute(x, e, p[:, :1], 4), ValueError, r"probs of shape \(5, 1\)"),
        (lambda x, e, p: permute(x, e, p, 3), ValueError, "from 0 to 3 are not accepted: they must be from 0 to 2"),
        (lambda x, e, p: permute(x, e - 1, p, 4), ValueError, "from -1"),
        (lambda x, e, p: unpermute(x, e), ValueError, r"rows of shape \(5, 3\) .* \(10, h\)"),
        (lambda x, e, p: unpermute(x, e[:, 0]), ValueError, r"order of shape \(5,\)"),
    ],
)
def test_permute_rejects_wrong_shapes_and_dtypes(call, error: type, words: str) -> None:
    chosen = torch.tensor([[0, 3]] * 5)
    raises(error, words, call, torch.zeros(5, 3), chosen, torch.ones(5, 2))


class MoE(nn.Module):
    """The example of docs/modules.md."""

    def __init__(self, mlp_config, experts, k):
        super().__init__()
        self.router = nn.Linear(mlp_config.hidden_size, experts, bias=False, dtype=mlp_config.params_dtype)
        self.experts, self.num_experts, self.k = GroupedMLP(experts, mlp_config), experts, k

    def forward(self, x):
        probs, experts = self.router(x).softmax(-1).topk(self.k)
        rows, tokens_per_expert, row_probs, order = permute(x, experts, probs, self.num_experts)
        output, _ = self.experts(rows, tokens_per_expert, row_probs)
        return unpermute(output, order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_results_equal_mixtrals_experts(dtype: torch.dtype) -> None:
    """The reference is transformers' block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    mixtral_config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=4, num_experts_per_tok=2,
        router_jitter_noise=0.0, experts_implementation="eager",
    )  # fmt: skip
    block = MixtralSparseMoeBlock(mixtral_config).to(dtype)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=0.2)
    grouped = GroupedMLP(4, config(params_dtype=dtype, add_bias_linear=False))
    grouped.load_state_dict(
        {"linear_fc1.weight": block.experts.gate_up_proj, "linear_fc2.weight": block.experts.down_proj}
    )
    x = torch.randn(2, 9, HIDDEN, dtype=dtype, requires_grad=True)
    d = torch.randn_like(x)
    y = block(x)
    expected = torch.autograd.grad(y, [x, *block.parameters()], d)
    tokens = x.flatten(0, 1)
    _, probs, experts = block.gate(tokens)
    rows, tokens_per_expert, row_probs, order = permute(tokens, experts, probs, 4)
    mine = unpermute(grouped(rows, tokens_per_expert, row_probs)[0], order).view_as(x)
    parameters = {
        "gate.weight": block.gate.weight,
        "experts.gate_up_proj": grouped.linear_fc1.weight,
        "experts.down_proj": grouped.linear_fc2.weight,
    }
    actual = torch.autograd.grad(mine, [x, *(parameters[name] for name, _ in block.named_parameters())], d)
    close = {"atol": 1e-6, "rtol": 1e-6}  # transformers' router computes in float32
    close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else close
    torch.testing.assert_close(mine, y, **close)
    torch.testing.assert_close(actual, expected, **close if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5})


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def compare(moe, x, backend, dynamic=None):
    torch._dynamo.reset()
    fn = torch.compile(moe, fullgraph=True, backend=backend, dynamic=dynamic)
    results = []
    for call in (fn, moe):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *moe.parameters()])])
    close = {"atol": 1e-12, "rtol": 1e-12} if x.dtype == torch.float64 else {"atol": 2e-4, "rtol": 1e-3}
    close = {"atol": 0.05, "rtol": 0.05} if x.dtype == torch.bfloat16 else close
    torch.testing.assert_close(*results, **close)
    return fn


def layer(dtype, **flags):
    torch.manual_seed(0)
    moe = MoE(config(params_dtype=dtype, **flags), 4, 2)
    return moe, torch.randn(11, HIDDEN, dtype=dtype, requires_grad=True)


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_compiles_to_one_graph(dtype: torch.dtype, bias: bool) -> None:
    """One graph handles every routing, and expanded gradients."""
    moe, x = layer(dtype, add_bias_linear=bias)
    fn = compare(moe, x, "aot_eager")
    other = (-x.detach()).requires_grad_()  # another routing uses the same graph
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(fn(other), moe(other), atol=0.05, rtol=0.05)


@pytest.mark.codegen_is_slow
def test_compiled_experts_are_fused_and_save_only_h() -> None:
    def own_silu(x):
        return x * torch.sigmoid(x)

    grouped = build(config(params_dtype=torch.bfloat16, activation_func=own_silu, add_bias_linear=False))
    x, _, d = inputs([4, 0, 6], torch.bfloat16)
    counts = torch.tensor([4, 0, 6])
    fn = torch.compile(lambda x, counts: grouped(x, counts)[0], fullgraph=True, backend="fused")
    saved_shapes = []
    with (
        tfo.record() as report,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved_shapes.append(tuple(t.shape)) or t, lambda t: t),
    ):
        y = fn(x, counts)
    actual_grads = gradients(y, d, grouped, x)
    assert [site.op for site in report.sites] == ["fused::bias_glu"]
    assert (10, 2 * FFN) in saved_shapes and (10, FFN) not in saved_shapes
    eager, _ = grouped(x, counts)
    torch.testing.assert_close((y, *actual_grads), (eager, *gradients(eager, d, grouped, x)), atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_layer_compiled_for_a_gpu_does_not_synchronize() -> None:
    """The graph has six grouped GEMMs and no host synchronization, and saves little more than h."""
    pytest.importorskip("triton")
    from torch_fused_ops import virtual_gpu

    with torch.device("meta"):
        mlp_config = config(params_dtype=torch.bfloat16, add_bias_linear=False, moe_ffn_hidden_size=2048)
        mlp_config.hidden_size = 1024
        moe, x = MoE(mlp_config, 8, 2), torch.empty(4096, 1024, dtype=torch.bfloat16, requires_grad=True)
    with tfo.enabled():
        compiled_step = virtual_gpu.compile_on_paper(moe, x, gpu=virtual_gpu.H200)
    graphs = (compiled_step.forward, compiled_step.backward)
    gemms = [sum("grouped_mm" in call for call in graph.extern) for graph in graphs]
    assert gemms == [2, 4]
    assert not any(wait in graph.code for graph in graphs for wait in (".item()", ".tolist()", ".cpu()"))
    h = 4096 * 2 * 2 * 2048 * 2
    assert h <= compiled_step.saved_bytes(include_inputs=False) < 1.01 * h
