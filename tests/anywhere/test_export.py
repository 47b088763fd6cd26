"""Export: graphs contain our operators or their decompositions, and run in AOTInductor and ONNX."""

import io
import itertools
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import MLP, Net, python, raises
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops.nn import FusedMLP
from torch_fused_ops.testing.samples import OPERATORS, Sample, backward_samples, samples

fused = torch.ops.fused
ROWS = torch.export.Dim("rows", min=2, max=64)


class Everything(nn.Module):
    """Calls every operator by its typed name, and a FusedMLP. ``memory`` is the level of each call that has levels."""

    def __init__(self, memory: str = "free") -> None:
        super().__init__()
        self.memory = memory
        self.bias, self.packed, self.sink = (nn.Parameter(torch.randn(n)) for n in (8, 16, 3))
        self.mlp = FusedMLP(8, 32, "silu", gated=True)

    def forward(self, x: Tensor, residual: Tensor, seed: Tensor) -> Tensor:
        a = FF.bias_gelu(x, self.bias, memory=self.memory)
        b = FF.swiglu(a, x, x[..., 0].sigmoid(), memory=self.memory)
        c = FF.bias_glu(torch.cat((a, b), -1), self.packed, activation="gelu", memory=self.memory)
        d = FF.dropout_add(self.mlp(c), self.bias, residual, seed=seed, p=0.5)
        scores = d @ d.mT
        e = FF.scaled_masked_softmax(scores.expand(3, -1, -1), None, self.sink, scale=0.3, causal=True)
        return FF.make_viewless_tensor(e.sum(0).t(), True, True) * 2


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8), torch.tensor([7])


SIZES = ({0: ROWS}, {0: ROWS}, None)


def export(model: nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    return torch.export.export(model, inputs(6), dynamic_shapes=SIZES, strict=strict)


def fused_calls(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function" and "fused." in str(n.target)]


PLAIN = {f"fused.{name}.default" for name in OPERATORS}


@pytest.mark.covering(every=8)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("memory", ["free", "fp8"])
def test_every_operator_stays_in_the_graph(memory: str, strict: bool) -> None:
    model = Everything(memory)
    program = export(model, strict)
    assert set(fused_calls(program.graph)) == PLAIN, "an exported graph saves nothing for backward"
    for rows in (6, 11):
        args = inputs(rows)
        torch.testing.assert_close(program.module()(*args), model(*args), rtol=0, atol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("strict", [False, True])
def test_fused_mlp_exports_at_every_memory_level(strict: bool, level: str) -> None:
    mlp, x = FusedMLP(8, 32, memory=level), torch.randn(5, 8)
    program = torch.export.export(mlp, (x,), dynamic_shapes=({0: ROWS},), strict=strict)
    assert fused_calls(program.graph) == ["fused.bias_act.default"]
    mlp.memory = "free"  # its gradient is exact: levels apply in eager mode, not in the exported graph
    x = torch.randn(9, 8, requires_grad=True)
    outs = [module(x) for module in (program.module(), mlp)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in outs))


RTOL = {
    torch.float64: 1e-11,
    torch.float32: 3e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,
}


def every_sample() -> Iterator[Any]:
    """Yield the core samples. One in eight runs by default, the others are slow."""
    for op, sample_kind in itertools.product(OPERATORS, (samples, backward_samples)):
        for i, sample in enumerate(sample_kind(op, core=True)):
            yield pytest.param(sample, id=str(sample), marks=[pytest.mark.slow] * (i % 8 != 0))


def call_of(sample: Sample) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return the sample as a function of its tensors, and the tensors."""

    def call(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return sample.overload(*(next(remaining) if isinstance(a, Tensor) else a for a in sample.args))

    return call, [a.detach() for a in sample.args if isinstance(a, Tensor)]


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("sample", every_sample())
def test_decompositions_compute_the_same(sample: Sample, differentiable: bool) -> None:
    """Decompositions have the operator's values, dtypes and strides, and compute the same gradients."""
    call, tensors = call_of(sample)
    gm = make_fx(call, decomposition_table=tfo.decompositions(differentiable=differentiable))(*tensors)
    assert not fused_calls(gm.graph)
    actual, expected = (out if isinstance(out, tuple) else (out,) for out in (gm(*tensors), call(*tensors)))
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            rtol = RTOL[a.dtype]
            torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=rtol / 10, equal_nan=True)


def test_every_operator_has_a_decomposition() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fused::")}
    marks = {"fused::keep_fp8", "fused::with_saved"}  # identities that exported graphs never contain
    assert {op.name() for op in tfo.decompositions()} == registered - marks


def test_decomposed_results_do_not_alias_inputs() -> None:
    tfo.register_activation("itself_decomposed", lambda x: x)

    def twice(x: Tensor) -> Tensor:
        y = FF.bias_act(x, activation="itself_decomposed")
        return y.mul_(2) + x

    x = torch.randn(3, 4)
    for table in (None, tfo.decompositions()):
        torch.testing.assert_close(make_fx(twice, decomposition_table=table)(x)(x.clone()), 3 * x)


def test_decompositions_raise_the_operators_errors() -> None:
    with pytest.raises(ValueError, match=r"bias has shape \(1,\)"):
        make_fx(lambda x, b: FF.bias_gelu(x, b), decomposition_table=tfo.decompositions())(
            torch.ones(3, 4), torch.ones(1)
        )
    raises(TypeError, "differentiable='no' is not accepted", tfo.decompositions, differentiable="no")


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", tfo.activations.names())
def test_a_decomposed_program_may_be_trained(name: str) -> None:
    """First and second gradients are right, also at 0, where formulas with |x| have no derivative."""
    act = Net(lambda s, x: torch.ops.fused.bias_act(x, None, None, name))
    x = torch.tensor([-9.0, -1.5, -0.0, 0.0, 0.7, 9.0], requires_grad=True)
    program = torch.export.export(act, (x,)).run_decompositions({**tfo.decompositions()}).module()
    first = [torch.autograd.grad(f(x).sum(), x, create_graph=True)[0] for f in (program, act)]
    torch.testing.assert_close(*first, rtol=2e-5, atol=1e-6)
    # The gradient of a linear piece does not depend on x.
    torch.testing.assert_close(*(torch.autograd.grad((g + 0 * x).sum(), x)[0] for g in first))


def test_a_program_with_our_operators_is_saved_and_loaded() -> None:
    model, args, file = Everything(), inputs(9), io.BytesIO()
    torch.export.save(export(model), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert set(fused_calls(loaded.graph)) == PLAIN
    torch.testing.assert_close(loaded.module()(*args), model(*args), rtol=0, atol=0)


WITHOUT_US = """
import sys, torch
for kind, path, args, expected in torch.load(sys.argv[1]):
    loaded = torch.export.load(path).module() if kind == "program" else torch._inductor.aoti_load_package(path)
    for one, wanted in zip(args, expected):
        torch.testing.assert_close(loaded(*one), wanted)
assert not any(name.split(".")[0] == "torch_fused_ops" for name in sys.modules)
assert not hasattr(torch.ops.fused, "bias_act")
"""


def plain_and_fused() -> nn.Module:
    """Return an MLP in plain PyTorch, followed by a FusedMLP."""
    return nn.Sequential(MLP(8, 32), FusedMLP(8, 32, "silu", gated=True))


def packaged(program: torch.export.ExportedProgram, path: Path, how: str) -> str:
    """Compile a program with fusion, in the way ``how``, and package it. The package calls no custom operator."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if how == "options":
            options = tfo.compile_options(tfo.FusionPolicy(strict=True))
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=options
            )
        else:
            with tfo.enabled(tfo.FusionPolicy(strict=True)):
                package = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with zipfile.ZipFile(package) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert libraries and not any(b"proxy_executor_call_function" in code for code in libraries)
    return package


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("options", marks=pytest.mark.slow), "enabled"])
def test_packages_run_without_this_library(how: str, tmp_path: Path) -> None:
    """A decomposed program and AOTInductor packages run in a process that does not import the package."""
    model: nn.Module = Everything()
    program = export(model)
    torch.export.save(program.run_decompositions({**tfo.decompositions()}), path := tmp_path / "decomposed.pt2")
    cases: list[tuple[str, nn.Module, Path | str, int]] = [("program", model, path, 3)]
    if how == "options":
        cases.append(("package", model, packaged(program, tmp_path / "everything.pt2", how), 3))
    model = plain_and_fused()
    with tfo.record() as report:
        program = torch.export.export(model, inputs(6)[:1], dynamic_shapes=SIZES[:1])
        cases.append(("package", model, packaged(program, tmp_path / "mlp.pt2", how), 1))
    assert {site.activation for site in report.sites if site.op} >= {"gelu"}
    with torch.no_grad():
        runs = [
            (kind, str(path), batches := [inputs(n)[:count] for n in (6, 13)], [model(*batch) for batch in batches])
            for kind, model, path, count in cases
        ]
    torch.save(runs, tmp_path / "runs.pt")
    python("-c", WITHOUT_US, tmp_path / "runs.pt")


def test_fx_traces_every_operator() -> None:
    """torch.fx traces with proxies. The traced dropout draws a new seed at each call."""

    class Model(Everything):
        def forward(self, x: Tensor, residual: Tensor, seed: Tensor) -> Tensor:  # type: ignore[override]
            return FF.bias_dropout_add(super().forward(x, residual, seed), None, None, 0.5)

    model, args = Model(), inputs(9)
    traced = torch.fx.symbolic_trace(model)
    names = {node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"}
    assert names >= {*OPERATORS, "make_viewless_tensor"}
    torch.manual_seed(1)
    expected = model(*args)
    torch.manual_seed(1)
    torch.testing.assert_close(traced(*args), expected, rtol=0, atol=0)


def test_fx_traces_every_memory_level() -> None:
    for level in ("off", "free", "fp8", "input"):
        mlp, x = FusedMLP(8, 32, memory=level), torch.randn(4, 8)
        torch.testing.assert_close(torch.fx.symbolic_trace(mlp)(x), mlp(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_onnx_program_is_right() -> None:
    """ONNX's reference evaluator computes the decomposed program with the same dropout mask."""
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = Everything()
    table = {**torch.export.default_decompositions(), **tfo.decompositions(differentiable=False)}
    program = torch.onnx.export(export(model).run_decompositions(table), dynamo=True, verbose=False)
    assert program is not None
    assert not {"Erf", "Gelu"} & {node.op_type for node in program.model_proto.graph.node}  # these lose GELU's tail
    session = reference.ReferenceEvaluator(program.model_proto)
    for rows in (6, 11):
        args = inputs(rows)
        (actual,) = session.run(None, dict(zip(session.input_names, (t.numpy() for t in args), strict=True)))
        torch.testing.assert_close(torch.from_numpy(actual), model(*args).detach(), rtol=1e-4, atol=1e-5)
