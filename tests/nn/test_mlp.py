"""``nn.MLP`` in one process: the formula of all flags, and the bytes that memory levels save."""

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH, Net, Ran, of_halves, output, quick_gelu, raises
from mlp_figures import mlp_figures
from torch import nn

from torch_fused_ops import megatron
from torch_fused_ops.nn import MLP, ColumnParallelLinear, MLPConfig, MLPSubmodules, RowParallelLinear

HIDDEN, FFN = 16, 24


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: for thousands of small calls, synchronizing threads costs more than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(**flags):
    return MLPConfig(HIDDEN, **{"ffn_hidden_size": FFN, "params_dtype": torch.float64, **flags})


def build(mlp_config, seed=0, **arguments):
    torch.manual_seed(seed)
    mlp = MLP(mlp_config, **arguments)
    with torch.no_grad():
        for p in mlp.parameters():  # so that biases are not 0
            p.add_(0.1 * torch.randn_like(p))
    return mlp


def tokens(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain(mlp, act, x, scale=None, clamp=None, offset=0.0):
    """Compute the formula with PyTorch's own functions."""
    h = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    if mlp.linear_fc1.weight.shape[0] == 2 * mlp.linear_fc2.weight.shape[1]:
        gate, up = h.chunk(2, -1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        h = act(gate) * (up + offset)
    else:
        h = act(h)
    h = h if scale is None else h * scale[..., None]
    y, bias = F.linear(h, mlp.linear_fc2.weight), mlp.linear_fc2.bias
    if bias is not None:
        y = y + (bias if scale is None else bias * scale[..., None])
    return y


ACTIVATIONS = {  # name: (the config's activation_func, its formula)
    "gelu": (F.gelu, F.gelu),
    "gelu, tanh": ("gelu_tanh", GELU_TANH),
    "silu": (F.silu, F.silu),
    "silu, module": (nn.SiLU(), F.silu),
    "relu": (F.relu, F.relu),
    "squared relu": (megatron.squared_relu, lambda x: F.relu(x).square()),
    "quick gelu": (megatron.quick_gelu, quick_gelu),
    "sigmoid": (torch.sigmoid, torch.sigmoid),
    "custom": (F.tanhshrink, F.tanhshrink),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_combination_of_flags_equals_its_formula(name: str) -> None:
    activation, formula = ACTIVATIONS[name]
    switches = (False, True)
    glus = [{}, {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}]
    for gated, bias, scaled, memory in itertools.product(switches, switches, switches, ("off", "free", "fp8", "input")):
        if memory in ("fp8", "input") and activation is F.tanhshrink:
            continue
        for glu in (
            glus if gated and memory != "fp8" else glus[:1]
        ):  # rounding to float8 may move a value across a clamp's bound
            mlp = build(
                config(
                    gated_linear_unit=gated, add_bias_linear=bias, activation_func=activation, memory=memory, **glu
                )
            )  # fmt: skip
            x, scale = tokens(5, 2, HIDDEN).requires_grad_(), tokens(5, 2, seed=2).requires_grad_()
            leaves = [x, *mlp.parameters(), *([scale] if scaled else [])]
            y = output(mlp, x, scale if scaled else None)
            d = tokens(*y.shape, seed=3)
            y.backward(d)
            truth = plain(
                mlp, formula, x, scale if scaled else None, glu.get("activation_func_clamp_value"),
                glu.get("glu_linear_offset", 0.0),
            )  # fmt: skip
            torch.testing.assert_close(y, truth, atol=1e-12, rtol=1e-12)
            for t, expected in zip(leaves, torch.autograd.grad(truth, leaves, d), strict=True):
                assert (t.grad - expected).norm() <= (0.2 if memory == "fp8" else 1e-12) * expected.norm()


@pytest.mark.parametrize("memory", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("gated", [False, True])
def test_levels_save_documented_bytes_and_repeat_at_most_one_gemm(memory: str, gated: bool) -> None:
    flags = {"gated_linear_unit": gated, "memory": memory, "activation_func": F.silu}
    mlp_config = config(add_bias_linear=False, params_dtype=torch.float32, **flags)
    mlp, x = build(mlp_config), tokens(10, HIDDEN, dtype=torch.float32).requires_grad_()
    figures = mlp_figures(HIDDEN, FFN, 10, gated=gated, memory=memory, dtype=torch.float32)
    with Ran() as ran:
        y, _ = mlp(x)
        saved = ran.alive(x, y, *mlp.parameters()) + x.nbytes
        y.sum().backward()
    assert saved == figures.saved
    assert sorted(map(sorted, ran.gemms)) == sorted(map(sorted, figures.gemms))
    del y
    with Ran() as ran, torch.no_grad():
        y, _ = mlp(x)
        assert ran.alive(x, y, *mlp.parameters()) == 0 and len(ran.gemms) == 2


@pytest.mark.parametrize(
    ("memory", "saved"), [("off", 10 * FFN * 4), ("free", 10 * FFN * 4), ("fp8", 10 * (FFN + 4)), ("input", 0)]
)
def test_an_ungated_relu_saves_at_most_its_result(memory: str, saved: int) -> None:
    mlp = build(config(activation_func=F.relu, memory=memory, add_bias_linear=False, params_dtype=torch.float32))
    x = tokens(10, HIDDEN, dtype=torch.float32).requires_grad_()
    with Ran() as ran:
        y, _ = mlp(x)
        assert ran.alive(x, y, *mlp.parameters()) == saved


@pytest.mark.parametrize("gated", [False, True])
def test_parameter_counts_and_shapes(gated: bool) -> None:
    """Megatron has 1212 parameters for a hidden size of 12 and an ffn size of 48."""
    mlp = MLP(MLPConfig(12, gated_linear_unit=gated))
    assert sum(p.numel() for p in mlp.parameters()) == (12 * 96 + 96 + 48 * 12 + 12 if gated else 1212)
    y, bias = mlp(torch.randn(32, 2, 12), attention_mask=None)
    assert y.shape == (32, 2, 12) and y.dtype == torch.float32 and bias is mlp.linear_fc2.bias
    assert MLP(MLPConfig(12, add_bias_linear=False))(torch.randn(3, 12))[1] is None
    y, bias = mlp(torch.randn(3, 12), torch.rand(3))
    assert bias is None
    assert dict(mlp.state_dict()).keys() == {f"linear_fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}


def test_sizes() -> None:
    mlp_config = MLPConfig(8, ffn_hidden_size=20, add_bias_linear=False)

    def shapes(*args, **kwargs):
        return [tuple(p.shape) for p in MLP(mlp_config, *args, **kwargs).parameters()]

    assert shapes() == [(20, 8), (8, 20)]
    assert shapes(ffn_hidden_size=10) == [(10, 8), (8, 10)]
    assert shapes(input_size=4) == [(20, 4), (8, 20)]
    assert shapes(is_expert=True, ffn_hidden_size=14) == [(14, 8), (8, 14)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"activation_func": "nothing"}, "nothing"),
        ({"activation_func_clamp_value": 1.0}, "gated_linear_unit"),
        ({"glu_linear_offset": 1.0}, "gated_linear_unit"),
        ({"gated_linear_unit": True, "activation_func_clamp_value": -1.0}, "above 0"),
        ({"gated_linear_unit": True, "glu_linear_offset": float("inf")}, "finite"),
        ({"activation_func": "swish"}, "activation_func='swish' is not known; accepted: relu,"),
        ({"memory": "all"}, "memory"),
        ({"memory": "tiled"}, "not tiled. Use memory='input'"),
        ({"memory": "input", "activation_func_fp8_input_store": True}, "two levels"),
        ({"memory": "fp8", "activation_func": F.tanhshrink}, "register_activation"),
        ({"memory": "input", "activation_func": F.tanhshrink}, "register_activation"),
        ({"use_te_activation_func": True}, "MLPSubmodules.activation_func"),
    ],
)
def test_constructor_rejects_incompatible_flags(flags: dict, words: str) -> None:
    raises((ValueError, TypeError), words, MLP, config(**flags))


@pytest.mark.parametrize("act", [F.gelu, F.tanhshrink], ids=["fused", "unfused"])
def test_scales_of_wrong_shapes_are_rejected(act) -> None:
    mlp, x = MLP(config(activation_func=act)), tokens(2, 3, HIDDEN)
    for shape in ((2,), (3,), (2, 3, 1)):
        raises(ValueError, re.escape(f"per_token_scale of shape {shape} is not accepted"), mlp, x, tokens(*shape))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_serves_any_number_of_tokens(dynamic: bool | None) -> None:
    mlp = MLP(config())
    compiled = torch.compile(mlp, backend="eager", fullgraph=True, dynamic=dynamic)
    for rows in (2, 3, 5):
        x, scale = tokens(rows, 2, HIDDEN), tokens(rows, 2)
        for token_scale in (None, scale):
            torch.testing.assert_close(output(compiled, x, token_scale), output(mlp, x, token_scale))
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(mlp, (x[0], scale[0]), dynamic_shapes=({0: rows}, {0: rows}))
    x, scale = tokens(7, HIDDEN), tokens(7)
    torch.testing.assert_close(program.module()(x, scale), mlp(x, scale))


def test_any_object_with_megatrons_attributes_is_a_config() -> None:
    filled = []

    def init(t):
        filled.append(tuple(t.shape))
        return nn.init.normal_(t, std=0.02)

    attributes = SimpleNamespace(
        hidden_size=8, ffn_hidden_size=12, init_method=init, output_layer_init_method=init, activation_func=F.silu,
        gated_linear_unit=True, num_layers=3, params_dtype=torch.bfloat16,
    )  # fmt: skip
    mlp = MLP(attributes)
    assert filled == [(24, 8), (8, 12)] and mlp.linear_fc1.weight.dtype == torch.bfloat16
    assert not mlp.linear_fc1.bias.any()
    before = mlp.linear_fc1.weight.clone()
    mlp.linear_fc1.reset_parameters()
    assert not torch.equal(before, mlp.linear_fc1.weight)
    assert mlp(torch.randn(2, 8, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_custom_modules_get_megatrons_arguments() -> None:
    received, swiglu = {}, of_halves(F.silu)

    def noting(name, linear):
        def build_one(*sizes, **arguments):
            received[name] = sizes, set(arguments)
            return linear(*sizes, **arguments)

        return build_one

    def Act(*, config):
        return Net(lambda s, x: swiglu(x))

    mlp_config = config(use_te_activation_func=True, gated_linear_unit=True)
    first, second = noting("fc1", ColumnParallelLinear), noting("fc2", RowParallelLinear)
    mlp = build(mlp_config, submodules=MLPSubmodules(first, second, Act))
    common = {"config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name", "tp_group"}
    assert received["fc1"] == ((HIDDEN, 2 * FFN), common | {"gather_output", "stride"})
    assert received["fc2"] == ((FFN, HIDDEN), common | {"input_is_parallel"})
    x, scale = tokens(3, HIDDEN), tokens(3, seed=4)
    for s in (None, scale):
        torch.testing.assert_close(output(mlp, x, s), plain(mlp, F.silu, x, s))
    mlp_config = config(use_te_activation_func=True, gated_linear_unit=True, glu_linear_offset=1.0)
    raises(ValueError, "use_te_activation_func", MLP, mlp_config, MLPSubmodules(activation_func=Act))


def test_linears_without_an_mlp_add_their_bias() -> None:
    x = tokens(3, 4)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        linear = kind(4, 6, config=config())
        y, bias = linear(x)
        assert bias is None
        torch.testing.assert_close(y, F.linear(x, linear.weight, linear.bias))
        assert "4, 6, bias=True" in repr(linear)


@pytest.mark.parametrize("memory", ["off", "free", "fp8", "input"])
def test_backward_uses_parameters_of_functional_call(memory: str) -> None:
    """Backward recomputes the first linear after the module got its old parameters back."""
    mlp, x = build(config(memory=memory)), tokens(5, HIDDEN).requires_grad_()
    new_parameters = {name: (p.detach() * 1.5).requires_grad_() for name, p in mlp.named_parameters()}
    y, bias = torch.func.functional_call(mlp, new_parameters, (x,))
    actual = torch.autograd.grad((y + bias).square().sum(), [x, *new_parameters.values()])
    same = build(config(memory=memory))
    with torch.no_grad():
        for p in same.parameters():
            p.mul_(1.5)
    expected = torch.autograd.grad(output(same, x).square().sum(), [x, *same.parameters()])
    torch.testing.assert_close(actual, expected)


def test_backward_dw_calls_the_linears_that_defer_gradients() -> None:
    calls: list[str] = []

    class Deferring(ColumnParallelLinear):
        def backward_dw(self) -> None:
            calls.append("fc1")

    mlp = build(config(), submodules=MLPSubmodules(linear_fc1=Deferring))
    output(mlp, tokens(5, HIDDEN)).sum().backward()
    gradient = mlp.linear_fc2.weight.grad.clone()
    mlp.backward_dw()
    assert calls == ["fc1"] and torch.equal(mlp.linear_fc2.weight.grad, gradient)
