"""replace_mlps: the compiled modules, their policies, their unchanged state, and ``restore``."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import MLP, Net, Stack, SwiGLU, raises, saving, step
from torch import Tensor
from torch._dynamo.utils import counters

import torch_fused_ops as tfo
from torch_fused_ops.nn import replace_mlps

pytestmark = pytest.mark.codegen_is_slow("captured")

H, N, ROWS = 16, 24, 6


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    counters.clear()


def Mlp(act: Callable[[Tensor], Tensor] = F.gelu) -> MLP:
    return MLP(H, N, act)


def Block(mlp: nn.Module) -> nn.Module:
    """Return a norm and an MLP."""
    return Net(lambda s, x: x + s.mlp(s.norm(x)), norm=nn.LayerNorm(H), mlp=mlp)


def Model(*layers: nn.Module) -> Any:
    return Stack(layers, end=nn.Linear(H, 4))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, N), nn.GELU(), nn.Linear(N, H))


def rows(**options: Any) -> Tensor:
    return torch.randn(ROWS, H, **options)


def assert_alike(model: nn.Module, reference: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(step(model, model, x), step(reference, reference, x), rtol=tolerance, atol=tolerance)


def saved_elements(model: nn.Module, x: Tensor) -> int:
    """Return the number of elements that a call saves for backward, except parameters and the input."""
    return saving(lambda: model(x), (x, *model.parameters()))[1] // 4


EAGER, FREE, INPUT = 2 * ROWS * N, ROWS * N, N  # Mlp saves: input and result, the input, or a copy of the bias


def is_as_it_was(model: nn.Module) -> bool:
    return not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=2)
@pytest.mark.parametrize("memory, elements", [("free", FREE), ("input", INPUT), ("off", EAGER)])
def test_compiled_module_saves_and_computes_what_the_policy_says(memory: str, elements: int) -> None:
    model, x = Model(Block(Mlp())), rows()
    reference = copy.deepcopy(model)
    report = replace_mlps(model, x, memory=memory)
    assert list(report.replaced) == ["layers.0.mlp"]
    assert_alike(model, reference, x)
    assert saved_elements(model.layers[0].mlp, x) == elements and saved_elements(reference.layers[0].mlp, x) == EAGER
    report.restore()
    assert is_as_it_was(model) and saved_elements(model.layers[0].mlp, x) == EAGER
    report.restore()


@pytest.mark.parametrize("gemm", ["fp8", {"0": "fp8"}], ids=str)
def test_linear_layers_multiply_in_the_requested_precision(gemm: Any) -> None:
    model, x = nn.Sequential(SwiGLU(128, 256)), torch.randn(40, 128)
    exact = step(model, model, x)
    replace_mlps(model, x, gemm=gemm)
    for a, b in zip(step(model, model, x)[:2], exact[:2], strict=True):
        assert 1e-4 * b.norm() < (a - b).norm() < 0.12 * b.norm()


# ---- each layer is compiled ------------------------------------------------------------------------------------------


ACTS = (F.gelu, F.relu, F.silu, torch.sigmoid, torch.tanh, lambda x: F.gelu(x, approximate="tanh"))
ACTS += (*(lambda x, f=f: 2 * f(x) for f in ACTS),)


@pytest.mark.slow
def test_more_activations_than_dynamo_compiles_of_one_code() -> None:
    """By default Dynamo compiles the same code eight times and then runs it eagerly."""
    model, x = Model(*(Block(Mlp(act)) for act in ACTS)), rows()
    reference = copy.deepcopy(model)
    assert len(replace_mlps(model, x).replaced) == 12
    with tfo.record() as report:
        assert_alike(model, reference, x)
    assert report.summary == "12 of 12 MLP sites fused (12 graphs)"


class Broken(nn.Module):
    """A norm and an MLP with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.mlp(h)  # type: ignore[no-any-return]


def test_layers_behind_graph_breaks() -> None:
    """Dynamo captures only the first of equal layers, and after the break its paths begin at a layer."""
    assert list(replace_mlps(Model(Broken(), Broken()), rows()).replaced) == ["layers.0.mlp", "layers.1.mlp"]
    model = nn.Sequential(Mlp(), Broken())  # Dynamo captures the first MLP alone, because it skips nn.Sequential
    with pytest.warns(UserWarning, match=r"not compile the MLPs at .*:\d+: a graph break hides their paths"):
        assert list(replace_mlps(model, rows()).replaced) == ["1.mlp"]


# ---- which module, and its policy ------------------------------------------------------------------------------------


def Inline() -> nn.Module:
    """Return a model with two MLPs in one forward."""

    def body(s: Any, x: Tensor) -> Tensor:
        x = x + s.fc[1](F.gelu(s.fc[0](x)))
        return x + s.down(F.relu(s.up(x)))

    fc = nn.ModuleList([nn.Linear(H, N), nn.Linear(N, H)])
    return Net(body, fc=fc, up=nn.Linear(H, N), down=nn.Linear(N, H))


@pytest.mark.parametrize(
    "make, expected",
    [
        (sequential, [""]),
        (Inline, [""]),
        (lambda: Model(Inline(), Block(sequential())), ["layers.0", "layers.1.mlp"]),
        (lambda: nn.Sequential(mlp := Mlp(), nn.LayerNorm(H), mlp), ["0"]),
        (lambda: Block(nn.Sequential(Inline(), Mlp())), ["mlp.0", "mlp.1"]),
    ],
)
def test_innermost_module_around_each_mlp_is_compiled(make: Callable[[], nn.Module], expected: list[str]) -> None:
    model = make()
    report = replace_mlps(model, rows())
    assert list(report.replaced) == expected
    assert [path for path, module in model.named_modules() if module._compiled_call_impl is not None] == expected


@pytest.mark.codegen_is_slow
def test_patterns_match_paths_of_the_model() -> None:
    """The first pattern that matches a compiled module or one around it decides."""
    model, x = Model(Block(Mlp()), Block(Mlp()), Block(Mlp())), rows()
    replace_mlps(model, x, memory={"layers.0.*": "input", "layers.1": "input"})
    assert [saved_elements(layer.mlp, x) for layer in model.layers] == [INPUT, INPUT, FREE]


# ---- the handle ------------------------------------------------------------------------------------------------------


def test_compiled_modules_are_not_compiled_again() -> None:
    model, x = Model(Block(Mlp()), Block(Mlp())), rows()
    model.layers[0].mlp.compile(backend="eager")
    calls_before = [module._compiled_call_impl for module in model.modules()]
    report = replace_mlps(model, x)
    assert list(report.replaced) == ["layers.1.mlp"]
    with pytest.warns(UserWarning, match="compiled no module"):
        replace_mlps(model, x)
    report.restore()
    assert [module._compiled_call_impl for module in model.modules()] == calls_before


def test_names_copies_and_pickles() -> None:
    model, x = Model(Mlp(), sequential()), rows()
    keys, text, parameters = list(model.state_dict()), repr(model), list(model.parameters())
    replace_mlps(model, x)
    expected = model(x)
    assert list(model.state_dict()) == keys and repr(model) == text
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False))
    for other in copies:
        assert is_as_it_was(other)
        torch.testing.assert_close(other(x), expected)
    model.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})
    assert not model(x).any()


@pytest.mark.codegen_is_slow
def test_works_with_checkpoint_compile_and_export() -> None:
    model, x = Model(Block(Mlp())), rows()
    expected = model(x)
    replace_mlps(model, x)
    recomputed = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(recomputed, expected)
    graphs: list[Any] = []
    compiled = torch.compile(model, backend=lambda gm, _: (graphs.append(gm), gm.forward)[1], fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 1  # the outer compilation includes the compiled module
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        assert not any("fused" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), expected)

    def twice() -> None:
        (gradient,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
        gradient.sum().backward()

    raises(RuntimeError, "double backward|donated buffers", twice)  # "donated buffers" if the code was compiled before


# ---- the call itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"model": F.gelu}, TypeError, "must be a torch.nn.Module"),
        ({"memory": "least"}, ValueError, "memory='least' is not known; accepted: off, free, fp8, input"),
        ({"memory": {"up": "off"}}, ValueError, "'off' is for a whole model only"),
        ({"gemm": "int8"}, ValueError, "gemm='int8' is not known"),
        ({"memory": {"dwn": "fp8"}}, ValueError, "memory='dwn' matches no site's modules"),
        ({"memory": {"[0": "fp8"}}, ValueError, "'[0' has a [ without a ]"),
        ({"args": (torch.randn(3, H + 1),)}, RuntimeError, "mat1 and mat2|size"),
    ],
)
def test_wrong_arguments_are_rejected(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    call = {"model": Mlp(), "args": (rows(),), **arguments}
    model, args = call.pop("model"), call.pop("args")
    said = str(raises(error, "", replace_mlps, model, *args, **call))
    assert any(word in said for word in words.split("|"))
    assert not isinstance(model, nn.Module) or is_as_it_was(model)


@pytest.mark.parametrize("acts, stance", [((F.tanhshrink,), "default"), ((), "default"), ((F.gelu,), "force_eager")])
def test_warns_if_no_mlp_is_compiled(acts: tuple[Any, ...], stance: str) -> None:
    model = nn.Sequential(*(Mlp(act) for act in acts), nn.Linear(H, H))
    with torch.compiler.set_stance(stance), pytest.warns(UserWarning, match="compiled no module; .*explain has the"):
        assert replace_mlps(model, rows()).replaced == {}
    assert is_as_it_was(model)
