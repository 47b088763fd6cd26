"""GEMM and activation in one call of the library: where it may be, that it computes the same, and how it is chosen."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from harness import MLP
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import epilogues, passes

aten, fused = torch.ops.aten, torch.ops.fused
BF16 = torch.bfloat16
AUTOTUNE = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    epilogues._measured.clear()
    # Which calls there are is asked, not how C++ is written: without vector instructions gcc takes a sixth of the time.
    with inductor_config.patch({"fx_graph_cache": False, "cpp.simdlen": 1}):
        yield


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device with cuBLASLt."""
    monkeypatch.setattr(epilogues, "has_library", lambda device: True)


@pytest.fixture
def cpu_has_it(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and its ``_addmm_activation``, whose GELU is the erf form, for that library's."""
    monkeypatch.setitem(epilogues.ACTIVATIONS, "gelu", (True, (torch.float32,)))


def guard(run: Callable[[], Any]) -> Any:
    return run()


def act(h: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, name: str = "gelu_tanh") -> Tensor:
    return fused.bias_act(h, bias, scale, name)  # type: ignore[no-any-return]


def graph_of(fn: Callable[..., Any], *likes: tuple[Any, ...], **options: Any) -> torch.fx.Graph:
    """The aten graph of a function of fake tensors (sizes, and maybe a dtype and strides, which are bf16's rows)."""

    def make(size: tuple[int, ...], dtype: torch.dtype = BF16, stride: tuple[int, ...] | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype) if stride is None else torch.empty_strided(size, stride, dtype=dtype)

    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()):
        return make_fx(fn, **options)(*(make(*like) for like in likes)).graph


def found(graph: torch.fx.Graph, **policy: Any) -> int:
    return len(list(epilogues.find(graph, tfo.FusionPolicy(**policy))))


X, W, B = ((64, 32),), ((48, 32),), ((48,),)  # what F.linear takes


def linear_act(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return act(F.linear(x, w, b))


def of(dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple((like[0], dtype) for like in (X, W, B))


FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "linear": (linear_act, (X, W, B)),
    "3-D": (linear_act, (((2, 8, 32),), W, B)),
    "weight (k, n)": (lambda x, w, b: act(torch.addmm(b, x, w)), (X, ((32, 48),), B)),
    "late bias": (lambda x, w, b: act(x @ w.t(), b), (X, W, B)),
    "late bias, 3-D": (lambda x, w, b: act((x @ w.t()).view(4, 16, 48), b), (X, W, B)),
    "relu float32": (lambda x, w, b: act(F.linear(x, w, b), name="relu"), of(torch.float32)),
    "fp16": (linear_act, of(torch.float16)),
    "wide rows": (linear_act, (((64, 32), BF16, (40, 1)), W, B)),
    "no GEMM behind": (lambda x, w, b: act(F.linear(x, w, b)).sum(), (X, W, B)),
}


def read_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, w, b)
    return act(h), h.sum()


def view_read_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.addmm(b, x, w.t()).view(4, 16, 48)
    return act(h), h.sum()


LEFT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "read twice": (read_twice, (X, W, B)),
    "view read twice": (view_read_twice, (X, W, B)),
    "erf": (lambda x, w, b: act(F.linear(x, w, b), name="gelu"), (X, W, B)),
    "silu": (lambda x, w, b: act(F.linear(x, w, b), name="silu"), (X, W, B)),
    "alpha": (lambda x, w, b: act(torch.addmm(b, x, w.t(), alpha=2)), (X, W, B)),
    "beta": (lambda x, w, b: act(torch.addmm(b, x, w.t(), beta=0.5)), (X, W, B)),
    "2-D bias": (lambda x, w, b: act(torch.addmm(b, x, w.t())), (X, W, ((64, 48),))),
    "bias of one": (lambda x, w, b: act(torch.addmm(b, x, w.t())), (X, W, ((1,),))),
    "two biases": (lambda x, w, b: act(F.linear(x, w, b), b), (X, W, B)),
    "no bias": (lambda x, w, b: act(F.linear(x, w)), (X, W, B)),
    "token scale": (lambda x, w, b: act(F.linear(x, w, b), None, x[:, 0]), (X, W, B)),
    "bias of parts": (lambda x, w, b: act((x @ w.t()).view(64, 4, 12), b[:12]), (X, W, B)),
    "cast between": (lambda x, w, b: act(F.linear(x, w, b).float()), (X, W, B)),
    "bias of another dtype": (lambda x, w, b: act(x @ w.t(), b.float()), (X, W, B)),
    "batched": (lambda x, w, b: act(torch.bmm(x, w), b), (((2, 8, 32),), ((2, 32, 48),), B)),
    "float64": (linear_act, of(torch.float64)),
    "GELU in float32": (linear_act, of(torch.float32)),
    "one row": (linear_act, (((1, 32),), W, B)),
    "one column": (linear_act, (X, ((1, 32),), ((1,),))),
    "no stride of 1": (linear_act, (((64, 32), BF16, (64, 2)), W, B)),
    "spread bias": (linear_act, (X, W, ((48,), BF16, (2,)))),
}


@pytest.mark.parametrize("name", FOUND | LEFT)
def test_found_and_left_alone(anywhere: None, name: str) -> None:
    fn, likes = (FOUND | LEFT)[name]
    assert found(graph_of(fn, *likes)) == (name in FOUND)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(graph_of(linear_act, X, W, B)) == 0
    monkeypatch.setattr(torch.version, "hip", None)
    assert [epilogues.has_library(torch.device(name)) for name in ("cuda:1", "cpu", "xpu")] == [True, False, False]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not epilogues.has_library(torch.device("cuda"))


def test_symbolic_sizes(anywhere: None) -> None:
    assert found(graph_of(linear_act, ((2, 8, 32),), W, B, tracing_mode="symbolic")) == 1


def test_excluded_modules(anywhere: None) -> None:
    graph = graph_of(linear_act, X, W, B)
    (node,) = graph.find_nodes(op="call_function", target=fused.bias_act.default)
    node.meta["nn_module_stack"] = {"L__self___mlp": ("L['self'].encoder.mlp", nn.Module)}
    assert found(graph) == found(graph, exclude=("decoder.*",)) == 1
    assert found(graph, exclude=("encoder.*",)) == found(graph, exclude=("encoder.mlp",)) == 0


def test_when_it_is_wanted() -> None:
    measured, library, off = (tfo.FusionPolicy(epilogues=how) for how in ("measured", "library", "off"))
    assert tfo.FusionPolicy() == measured
    assert epilogues.wanted(library) and not epilogues.wanted(off) and not epilogues.wanted(measured)
    for settings in ({"max_autotune": True}, {"max_autotune_gemm": True}):
        with inductor_config.patch(settings):
            assert epilogues.wanted(measured) and not epilogues.wanted(off)
            with inductor_config.patch(deterministic=True):
                assert not epilogues.wanted(measured) and epilogues.wanted(library)
            with inductor_config.patch(max_autotune_gemm_backends="TRITON"):
                assert not epilogues.wanted(measured)
            torch.use_deterministic_algorithms(True)
            try:
                assert not epilogues.wanted(measured)
            finally:
                torch.use_deterministic_algorithms(False)


def test_policy() -> None:
    uuids = {passes.PostGrad(tfo.FusionPolicy(epilogues=how)).uuid() for how in ("measured", "library", "off")}
    assert len(uuids) == 3  # cache keys follow


def test_rewriting_keeps_shape_and_order(anywhere: None) -> None:
    graph = graph_of(lambda x, w, b: act((x @ w.t()).view(4, 16, 48), b * 2) + 1, X, W, B)
    assert epilogues.rewrite(graph, tfo.FusionPolicy(epilogues="library"), guard) == 1
    graph.lint()
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    assert fused.bias_act.default not in targets and aten.mm.default not in targets
    (node,) = (n for n in graph.nodes if isinstance(n.target, epilogues.Lowering))
    (view,) = node.users
    assert node.meta["val"].shape == (64, 48) and view.meta["val"].shape == (4, 16, 48)
    assert repr(node.target) == "gelu_tanh(mm)"


def compiled(
    fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, dynamic: bool = False, **policy: Any
) -> tuple[Any, str]:
    """What a function compiled with a policy returns, and the code of its (forward) graph."""
    torch._dynamo.reset()
    strict = tfo.FusionPolicy(**{"strict": True, **policy})
    run = torch.compile(fn, dynamic=dynamic, fullgraph=True, options=tfo.compile_options(strict, options))
    out, codes = run_and_get_code(run, *args)
    return out, codes[-1]  # what was compiled to be timed comes before


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("activation", [F.relu, F.gelu])
@pytest.mark.parametrize("shape", [(8, 32), (2, 3, 32)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_library_on_cpu(
    cpu_has_it: None, activation: Callable[[Tensor], Tensor], shape: tuple[int, ...], dynamic: bool
) -> None:
    model, x = MLP(32, 64, activation), torch.randn(shape)
    with torch.no_grad():
        out, code = compiled(model, x, epilogues="library", dynamic=dynamic)
    assert code.count("_addmm_activation.default(") == 1
    torch.testing.assert_close(out, model(x))


def test_late_bias_on_cpu(cpu_has_it: None) -> None:
    x, w, b = torch.randn(8, 32), torch.randn(32, 64), torch.randn(64)
    out, code = compiled(lambda x, w, b: act(x @ w, b, name="relu"), x, w, b, epilogues="library")
    assert code.count("_addmm_activation.default(") == 1
    torch.testing.assert_close(out, torch.relu(x @ w + b))


@pytest.mark.parametrize("how", ["library", pytest.param("measured", marks=pytest.mark.slow)])
def test_cpu_stays_as_it_is(how: str) -> None:
    """oneDNN and the C++ templates have epilogues of their own."""
    model, x = MLP(32, 64, F.relu), torch.randn(8, 32)
    with torch.no_grad():
        codes = [compiled(model, x, epilogues=one)[1] for one in ("off", how)]
    assert len({code.split("\n", 1)[1] for code in codes}) == 1  # the first line counts the compilations


def test_measured_on_cpu(cpu_has_it: None, caplog: pytest.LogCaptureFixture) -> None:
    """Really timed, once for each size."""
    model, x = nn.Sequential(MLP(32, 64, F.relu), MLP(32, 64, F.relu)), torch.randn(8, 32)
    with torch.no_grad(), caplog.at_level(logging.INFO, "torch_fused_ops"):
        out, code = compiled(model, x, options=AUTOTUNE)
    ((library, ours),) = epilogues._measured.values()
    assert 0 < library < math.inf and 0 < ours < math.inf
    assert code.count("_addmm_activation.default(") == 2 * (library < ours)
    assert sum("ms by the library" in message for message in caplog.messages) == 2
    torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize(
    ("times", "template", "taken"),
    [((1.0, 2.0), None, True), ((2.0, 1.0), None, False), ((1.0, 1.0), None, False), ((1.0, 2.0), 0.9, False)],
)
def test_the_fastest_is_taken(cpu_has_it: None, monkeypatch: Any, times: Any, template: Any, taken: bool) -> None:
    """A template may be faster than both."""
    monkeypatch.setattr(epilogues, "_times", lambda work: times)
    if template is not None:
        monkeypatch.setattr(epilogues, "_fastest_template", lambda product: template)
    model, x = MLP(32, 64, F.relu), torch.randn(8, 32)
    with torch.no_grad():
        out, code = compiled(model, x, options=AUTOTUNE)
        untouched = compiled(model, x, options=AUTOTUNE, epilogues="off")[1]
    assert ("_addmm_activation" in code) == taken
    assert taken or len(calls(code)) == len(calls(untouched)) == 3
    torch.testing.assert_close(out, model(x))


def calls(code: str) -> list[str]:
    return re.findall(r"^ +(?:extern_kernels\.|cpp_fused)\w+\(", code.split("def call(")[1], re.MULTILINE)


def test_nothing_is_measured_without_max_autotune(cpu_has_it: None) -> None:
    with torch.no_grad():
        _, code = compiled(MLP(32, 64, F.relu), torch.randn(8, 32))
        with inductor_config.patch(deterministic=True):
            _, deterministic = compiled(MLP(32, 64, F.relu), torch.randn(8, 32), options=AUTOTUNE)
    assert "_addmm_activation" not in code + deterministic and not epilogues._measured


@pytest.mark.parametrize("where", ["find", "_times"])
def test_a_failure_leaves_the_graph_as_it_was(
    cpu_has_it: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError(f"no {where} today")

    monkeypatch.setattr(epilogues, where, fail)
    monkeypatch.setattr(passes, "_logged", set())
    model, x = nn.Sequential(MLP(32, 64, F.relu), MLP(32, 64, F.relu)), torch.randn(8, 32)
    with torch.no_grad():
        out, code = compiled(model, x, options=AUTOTUNE, strict=False)
        assert "_addmm_activation" not in code
        torch.testing.assert_close(out, model(x))
        assert sum(f"post-grad: ValueError: no {where} today" in message for message in caplog.messages) == 1
        with pytest.raises(Exception, match=f"no {where} today"):
            compiled(model, x, options=AUTOTUNE, strict=True)


class Other(CustomGraphPass):
    """Somebody else's pass: makes every pre-activation's relu negative, in a graph that still has one."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=fused.bias_act.default):
            with graph.inserting_after(node):
                negative = graph.call_function(aten.neg.default, (node,))
                negative.meta = dict(node.meta)
            node.replace_all_uses_with(negative, delete_user_cb=lambda user, n=negative: user is not n)

    def uuid(self) -> str:
        return "other"


def test_other_peoples_passes_run_first(cpu_has_it: None) -> None:
    model, x, other = MLP(32, 64, F.relu), torch.randn(8, 32), Other()
    with torch.no_grad():
        out, code = compiled(model, x, options={"post_grad_custom_post_pass": other}, epilogues="library")
        assert code.count("_addmm_activation.default(") == 1
        torch.testing.assert_close(out, model.down(-F.relu(model.up(x))))


@pytest.mark.slow
def test_cpu_runs_are_bit_equal_in_deterministic_mode() -> None:
    model, x = MLP(32, 64, F.gelu), torch.randn(512, 32, requires_grad=True)
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(model, fullgraph=True, options=tfo.compile_options(tfo.FusionPolicy(strict=True)))
        for _ in range(3):
            out = run(x)
            runs.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
