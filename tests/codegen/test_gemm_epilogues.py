"""What becomes of GEMM and activation on a GPU, on paper: the library's call, Inductor's templates and what fuses into
them, forward and backward; small batches; merged gate and up; and that nothing is added atomically.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from harness import MLP, GeluMLP, Net, SwiGLU, meta, named, on_meta
from test_figures import Glu, LlamaBlock
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings import epilogues
from torch_fused_ops.lowerings.passes import compile_options

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

BF16 = torch.bfloat16
aten, fused = torch.ops.aten, torch.ops.fused
Model = Callable[[int, int], nn.Module]  # of a width and a hidden size


def options(**policy: Any) -> dict[str, Any]:
    return compile_options(FusionPolicy(**{"strict": True, **policy}))


def kernels(graph: Any) -> list[str]:
    """The kernels of a graph by kind ("tem" for a template, "poi", "red" and "per" for the rest) and external calls."""
    return sorted([k.name.split("_")[1] for k in graph.kernels for _ in range(k.launches)] + list(graph.extern))


ReluMLP = named("ReluMLP", MLP, activation=F.relu)
PackedWithBias = named(
    "PackedWithBias", MLP, activation=F.glu, halves=2, linear=lambda n, m: nn.Linear(n, m, bias=m > n)
)


def inference(model: Model, *shape: int, dtype: torch.dtype = BF16, **arguments: Any) -> Any:
    made = on_meta(model, 256, 512, dtype=dtype)
    return virtual_gpu.compile_on_paper(made, meta(*shape, dtype=dtype), training=False, **arguments).inference


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("model", "shape", "dtype", "taken"),
    [
        (GeluMLP, (64, 256), BF16, True),
        (GeluMLP, (4, 16, 256), BF16, True),
        (GeluMLP, (2, 256), torch.float16, True),
        (ReluMLP, (64, 256), torch.float32, True),
        (GeluMLP, (64, 256), torch.float32, False),
        (GeluMLP, (1, 256), BF16, False),
        (ReluMLP, (64, 256), torch.float64, False),
        (SwiGLU, (64, 256), BF16, False),
    ],
)
def test_library(model: Model, shape: tuple[int, ...], dtype: torch.dtype, taken: bool) -> None:
    graph = inference(model, *shape, dtype=dtype, config=options(epilogues="library"))
    off = inference(model, *shape, dtype=dtype, config=options(epilogues="off"))
    assert graph.extern.count("aten._addmm_activation") == int(taken)
    assert len(graph.kernels) == len(off.kernels) - int(taken) and len(graph.extern) == len(off.extern)
    assert not taken or graph.bytes_moved < off.bytes_moved


def test_library_with_symbolic_sizes() -> None:
    graph = inference(GeluMLP, 64, 256, config=options(epilogues="library"), dynamic=True)
    assert graph.extern.count("aten._addmm_activation") == 1


def test_not_in_training_and_not_on_amd() -> None:
    mlp = on_meta(GeluMLP, 256, 512)
    config = options(epilogues="library")
    training = virtual_gpu.compile_on_paper(mlp, meta(64, 256), config=config)
    amd = virtual_gpu.compile_on_paper(mlp, meta(64, 256), config=config, training=False, gpu=virtual_gpu.MI300X)
    assert not any("activation" in call for graph in (training.forward, amd.inference) for call in graph.extern)


def test_excluded_modules() -> None:
    """Here, one that calls the operator itself."""

    def own(*sizes: int) -> nn.Module:
        return Net(lambda s, x: fused.bias_act(s.mlp(x), None, None, "relu"), mlp=nn.Linear(*sizes))

    for exclude, taken in (((), 1), (("other.*",), 1), (("*",), 0)):
        graph = inference(own, 64, 256, config=options(epilogues="library", exclude=exclude))
        assert graph.extern.count("aten._addmm_activation") == taken


def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return fused.bias_act(F.linear(x, w, b), None, None, "gelu_tanh")  # type: ignore[no-any-return]


def test_measured_against_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are given: the one choice that no other may beat is taken, and the GEMMs it competed with go."""
    from torch._inductor import ir

    monkeypatch.setattr(epilogues, "_times", lambda work: (1.0, 3.0))
    monkeypatch.setattr(ir.MultiTemplateBuffer, "choice_timings", lambda self, *_: dict.fromkeys(self.choices, 2.0))
    config = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    inputs = meta(64, 256), meta(512, 256), meta(512)
    paper = virtual_gpu.compile_on_paper(gelu_linear, *inputs, training=False, config={**config, **options()})
    assert kernels(paper.inference) == ["aten._addmm_activation"]


@pytest.mark.slow
def test_unmeasured_is_upstreams() -> None:
    by_default = inference(GeluMLP, 64, 256, config=options())
    deterministic = inference(GeluMLP, 64, 256, config=options(), gemm="triton")
    assert kernels(by_default) == ["addmm", "addmm", "poi"] and kernels(deterministic) == ["tem", "tem"]


@cache
def by_templates(model: Model, ours: bool, training: bool = True) -> Any:
    made = on_meta(model, 4096, 16384)
    config = options() if ours else {}
    return virtual_gpu.compile_on_paper(
        made, meta(8192, 4096, requires_grad=training), training=training, gemm="triton", config=config
    )


def stores(kernel: Any) -> int:
    """How many results a kernel writes."""
    return len(re.findall(r"\btl\.store\(", kernel.source))


def kernel_with(graph: Any, operator: str) -> Any:
    (kernel,) = (k for k in graph.kernels if k.name.startswith("triton_tem") and operator in k.name)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "inference", "forward", "backward"),
    [
        (GeluMLP, ["tem"] * 2, ["tem"] * 2, ["per", "red", "red", "tem", "tem", "tem", "tem"]),
        (SwiGLU, ["tem"] * 3, ["tem"] * 3, ["tem"] * 5),
        (Glu, ["poi", "tem", "tem"], ["poi", "tem", "tem"], ["poi", "tem", "tem", "tem", "tem"]),
    ],
)
def test_what_fuses_into_templates(model: Model, inference: list[str], forward: list[str], backward: list[str]) -> None:
    """Exactly what fuses upstream's: activations and their derivatives, but for packed gate and up, whose halves are no
    epilogue of one tile; and not the bias gradient, a reduction.
    """
    for ours in (False, True):
        training = by_templates(model, ours)
        assert kernels(by_templates(model, ours, training=False).inference) == inference
        assert (kernels(training.forward), kernels(training.backward)) == (forward, backward)


@pytest.mark.slow
def test_gelu_in_the_gemms_epilogues() -> None:
    """Forward: the sum that backward needs and the activation from one GEMM. Backward: the gradient, and the activation
    again for the weight gradient, from the one that makes the activation's gradient.
    """
    paper = by_templates(GeluMLP, True)
    assert stores(paper.forward.kernels[0]) == 2 and "addmm" in paper.forward.kernels[0].name
    assert stores(kernel_with(paper.backward, "bias_act_backward")) == 2
    assert stores(by_templates(GeluMLP, True, training=False).inference.kernels[0]) == 1


def test_swiglu_in_the_gemms_epilogues() -> None:
    """Backward: gradients of gate and up, and the product again, from one GEMM."""
    paper = by_templates(SwiGLU, True)
    assert sum(map(stores, paper.forward.kernels)) == 4  # gate, up and the product, and the second linear
    assert stores(kernel_with(paper.backward, "glu_glu_backward")) == 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU])
@pytest.mark.parametrize("settings", [{}, {"config": {"coordinate_descent_tuning": True}}, {"gemm": "triton"}], ids=str)
def test_decoding_takes_no_more_kernels(model: Model, rows: int, settings: dict[str, Any]) -> None:
    config = settings.get("config", {})
    plain, ours = (
        inference(model, rows, 256, **{**settings, "config": {**config, **ours}}) for ours in ({}, options())
    )
    assert kernels(ours) == kernels(plain)


def test_decoding_with_products_as_sums() -> None:
    """What ``coordinate_descent_tuning`` makes of a GPU's matrix-vector products: activations join those kernels."""

    def times(x: Tensor, w: Tensor) -> Tensor:
        return (x.unsqueeze(2) * w.t().unsqueeze(0)).sum(dim=1)

    x, up, down = meta(1, 1024), meta(4096, 1024), meta(1024, 4096)
    pairs: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
        (lambda h, _: F.gelu(h, approximate="tanh"), lambda h, _: fused.bias_act(h, None, None, "gelu_tanh")),
        (lambda g, u: F.silu(g) * u, lambda g, u: fused.glu(g, u, None, "silu")),
    ]
    for theirs, ours in pairs:
        plain, fewer = (
            virtual_gpu.compile_on_paper(
                lambda x, w, v, f=f: times(f(times(x, w), times(x, w + 1)), v), x, up, down, training=False
            ).inference
            for f in (theirs, ours)
        )
        assert len(kernels(fewer)) <= len(kernels(plain)) and not fewer.extern


def test_freezing_merges_gate_and_up() -> None:
    """Upstream's pattern for constant weights, on a graph with our operator: two GEMMs then, and still one kernel."""
    from torch._inductor.fx_passes import freezing_patterns
    from torch._inductor.pattern_matcher import stable_topological_sort

    # In float64, which oneDNN has no linears for: its patterns are in the same lists once a process has frozen a graph.
    gate, up, down, x = (torch.randn(s, dtype=torch.float64) for s in ((16, 32), (16, 32), (32, 16), (8, 16)))

    def mlp(x: Tensor) -> Tensor:
        return fused.glu(x @ gate, x @ up, None, "silu") @ down  # type: ignore[no-any-return]

    gm = make_fx(mlp, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    for node in gm.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(gm, str(node.target))
    freezing_patterns.addmm_patterns_init()
    with inductor_config.patch({"cpp.enable_concat_linear": True}):  # on CUDA always
        for patterns in freezing_patterns.pass_patterns:
            patterns.apply(gm.graph)
    stable_topological_sort(gm.graph)
    gm.recompile()
    assert sum(node.target is aten.mm.default for node in gm.graph.nodes) == 2
    torch.testing.assert_close(gm(x), mlp(x))

    def merged(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        g, u = (x @ gate_up).split([4096, 4096], dim=1)
        return fused.glu(g, u, None, "silu") @ down  # type: ignore[no-any-return]

    inputs = meta(8, 1024), meta(1024, 8192), meta(4096, 1024)
    graph = virtual_gpu.compile_on_paper(merged, *inputs, training=False).inference
    assert kernels(graph) == ["mm", "mm", "poi"]


@pytest.mark.covering(every=10)
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU, Glu, LlamaBlock, PackedWithBias])
@pytest.mark.parametrize("gemm", ["library", "triton"])
def test_nothing_is_added_atomically(model: Model, gemm: str) -> None:
    x, made = meta(2, 1024, 4096, requires_grad=True), on_meta(model, 4096, 16384)
    paper = virtual_gpu.compile_on_paper(made, x, gemm=gemm, config=options())
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["bias_act", "glu", "bias_glu"])
def test_no_gradient_is_added_atomically(name: str) -> None:
    """Of any argument: biases and token scales too."""
    n = {"bias_act": 512, "glu": 512, "bias_glu": 1024}[name]
    x, scale = meta(4, 64, n, requires_grad=True), meta(4, 64, requires_grad=True)
    second = meta(4, 64, n, requires_grad=True) if name == "glu" else meta(n, requires_grad=True)
    paper = virtual_gpu.compile_on_paper(lambda *t: getattr(fused, name)(*t, "silu"), x, second, scale)
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())
