"""Reasons are data: for each kind, a program is rejected with this kind. Behavior does not depend on texts."""

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from differential import REASONS, fits, traced
from functions import StraightThrough, first, within
from harness import GEMMS, MLP, raises, selective
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops import FusionPolicy, Site, UnfusedError, activations, explain
from torch_fused_ops import functional as FF
from torch_fused_ops.graphs import reasons
from torch_fused_ops.graphs.reasons import Category, Kind, Reason, Rejection
from torch_fused_ops.lowerings import compat, memory_levels, offload, recognize
from torch_fused_ops.lowerings.passes import PreGradPass
from torch_fused_ops.lowerings.recognize import gemms
from torch_fused_ops.lowerings.saved_tensors import SavedTensors
from torch_fused_ops.reports.breaks import Break
from torch_fused_ops.reports.report import Report
from torch_fused_ops.tools.verify import interpreted

Patch = pytest.MonkeyPatch
Outcome = Site | Reason | Break
Program = Callable[[Patch], Outcome]


def program(run: Callable[..., Outcome]) -> Callable[..., Program]:
    """Bind all arguments of ``run`` except the first, a monkeypatch."""
    return lambda *args, **kwargs: lambda patch: run(patch, *args, **kwargs)


# ---- sites -----------------------------------------------------------------------------------------------------------


def only_site(report: Any) -> Site:
    (site,) = report.sites
    return site  # type: ignore[no-any-return]


def mlp_site(report: Any) -> Site:
    (site,) = (site for site in report.sites if site.activation != "dropout")
    return site  # type: ignore[no-any-return]


@program
def mlp(patch: Patch, act: Callable[..., Tensor], policy: FusionPolicy | None = None) -> Site:
    """Return the site of linear(act(h, u, m)). Linear layers compute h and u; m is an input of the same shape."""
    x, w, u, d, m = (nn.Parameter(torch.randn(s)) for s in ((4, 8), (16, 8), (16, 8), (8, 16), (4, 16)))
    fn = lambda x, m: F.linear(act(F.linear(x, w), F.linear(x, u), m), d)  # noqa: E731
    return mlp_site(explain(fn, x.detach(), m.detach(), policy=policy or FusionPolicy(dropout=False)))


def kink_of_another(patch: Patch) -> Site:
    activations.register_activation("leaking", lambda x: F.leaky_relu(x, 0.25))
    return mlp(lambda h, u, m: torch.maximum(h, 0.25 * h))(patch)


def sigmoid_of(h: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(h), h


def viewed(h: Tensor) -> tuple[Tensor, Tensor]:
    return h, h.view(-1)


def prelu(patch: Patch) -> Site:
    up, act, down = nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 8)
    return only_site(explain(nn.Sequential(up, act, down), torch.randn(4, 8)))


def subclass(patch: Patch) -> Site:
    tensors = [TwoTensor(torch.randn(s), torch.randn(s)) for s in ((4, 8),)]  # type: ignore[no-untyped-call]
    w, d = torch.randn(16, 8), torch.randn(8, 16)
    return only_site(explain(lambda x: F.linear(F.silu(F.linear(x, w)), d), *tensors))


def devices(patch: Patch) -> Site:
    """Combine a scalar on a CPU with a tensor on a GPU. The tensors are fake."""
    with FakeTensorMode():
        v, u, w = (torch.empty(s, device=on) for s, on in (((4,), "cpu"), ((4, 4), "cuda"), ((4, 4), "cuda")))
        graph = traced(lambda v, u, w: torch.mm(torch.sigmoid(torch.inner(v, v)) * torch.mm(u, w), w), v, u, w)
        (site,) = recognize.rewrite(graph, FusionPolicy(), apply=False)
    return site


def unrecorded(patch: Patch) -> Site:
    graph = traced(two_linears(F.silu), torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16))
    for node in graph.nodes:
        node.meta.clear()
    (site,) = recognize.rewrite(graph, FusionPolicy())
    return site


@program
def site_of(patch: Patch, body: Callable[[Tensor, Tensor, Tensor], Any], listed: str = "sites") -> Site:
    """Return the only site of body(x, w, d), called with an input and two weights."""
    w, d = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))
    (site,) = getattr(explain(lambda x: body(x, w, d), torch.randn(4, 8)), listed)
    return site  # type: ignore[no-any-return]


unread = functools.partial(site_of, listed="unread")


@program
def dropout(patch: Patch, setting: Callable[[], Any], policy: FusionPolicy, p: float | None = 0.5) -> Site:
    w, x = nn.Parameter(torch.randn(16, 8)), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with setting():
        report = explain(lambda x: F.dropout(F.linear(x, w), p or x.shape[0] / 8), x, policy=policy)
    return only_site(report)


def freezing(patch: Patch) -> Site:
    with torch.no_grad(), inductor_config.patch(freezing=True):
        return mlp(lambda h, u, m: F.silu(h))(patch)


def emulated(patch: Patch) -> Site:
    x, w, d = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((4, 8), (16, 8), (8, 16)))
    with inductor_config.patch(emulate_precision_casts=True):
        off, fp8 = (
            explain(lambda x: F.linear(F.silu(F.linear(x, w)), d), x, policy=FusionPolicy(memory=level))
            for level in ("off", "fp8")
        )
    assert "0 of 1 MLP sites fused, 1 at memory levels in eager's rounding" in fp8.summary
    assert only_site(fp8).level == "memory='fp8'"
    return only_site(off)


def no_mlp(h: Tensor, u: Tensor, m: Tensor) -> Tensor:
    return torch.softmax(h @ u.t(), -1) @ u * torch.sigmoid(h)


def cut_by_ddp(patch: Patch) -> Site:
    """The first bucket has 1 MiB and ends inside the second MLP."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(MLP(256, 1024), MLP(256, 1024)))
        return explain(model, torch.randn(4, 256)).sites[-1]
    finally:
        dist.destroy_process_group()


def rejection(call: Callable[..., Any], *args: Any) -> Reason:
    return raises(Rejection, "", call, *args).reason


# ---- memory levels ---------------------------------------------------------------------------------------------------


@program
def stays_saved(
    patch: Patch,
    fn: Callable[..., Tensor],
    *inputs: Tensor,
    level: str = "input",
    attention: Literal["off", "input"] = "off",
    **settings: Any,
) -> Reason:
    """Return the reason why an activation's input or attention's stays saved, without compiling code."""
    reasons_logged: list[Reason] = []

    def note(text: str, *args: Any) -> None:
        reasons_logged.extend(arg.reason for arg in args if isinstance(arg, Rejection))

    patch.setattr(memory_levels.log, "info", note)
    if settings:
        patch.setattr(compat, *next(iter(settings.items())))
    interpreted(FusionPolicy(memory=level, attention=attention))(fn, *inputs).sum().backward()
    return reasons_logged[0]


@program
def stays_on_device(patch: Patch, fn: Callable[..., Tensor], *inputs: Tensor, **settings: Any) -> Reason:
    """Return the reason why ``offload`` does not move a saved tensor, without compiling code."""
    if not compat.has_offload_operators():
        pytest.skip("torch cannot copy to the host during forward")
    reasons_logged: list[Reason] = []
    patch.setattr(offload.log, "info", lambda _, *args: reasons_logged.extend(a.reason for a in args[2:]))
    for name, value in settings.items():
        patch.setattr(offload, name, value)
    interpreted(FusionPolicy(offload=True))(fn, *inputs)
    return next((r for r in reasons_logged if r.kind is not Kind.STAYS_WITH_CALLER), reasons_logged[0])


def tensors(dtype: torch.dtype = torch.float32, hidden: int = 16) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((6, 8), (hidden, 8), (8, hidden))]


def gelu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w)), v)


def also_read(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.linear(x, w)
    return F.linear(F.gelu(h), v) + h.sin().sum(-1, keepdim=True)


def checkpointed(*inputs: Tensor) -> Tensor:
    return checkpoint(gelu, *inputs, use_reentrant=False, context_fn=selective(*GEMMS))  # type: ignore[return-value]


def attention(q: Tensor, v: Tensor) -> Tensor:
    heads = q[None, None]
    return F.linear(F.scaled_dot_product_attention(heads, heads, heads)[0, 0], v)


def attention_in_checkpoint(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda x: attention(F.linear(x, w), v), x, use_reentrant=False)  # type: ignore[return-value]


def called_by_checkpoint(patch: Patch) -> Reason:
    x, *weights = tensors()
    reports: list[Report] = []

    def call(x: Tensor) -> Tensor:
        reports.append(explain(lambda x: gelu(x, *weights), x, policy=FusionPolicy(memory="fp8")))
        return x * 2

    checkpoint(call, x, use_reentrant=False)
    site = only_site(reports[0])
    assert site.memory_kind is not None
    return Reason(site.memory_kind, site.level)


def made_of_a_size(patch: Patch) -> Reason:
    """Write the graph by hand: in every known program, the partitioner passes all sizes to backward."""
    forward, backward = torch.fx.Graph(), torch.fx.Graph()
    n, x, w = (forward.placeholder(name) for name in "nxw")
    product = forward.call_function(torch.ops.aten.mm.default, (x, w))
    view = forward.call_function(torch.ops.aten.view.default, (product, [n, 16]))
    saved = backward.placeholder("saved")
    values = (n, 6), (x, torch.empty(6, 8)), (w, torch.empty(8, 16)), *((t, torch.empty(6, 16)) for t in (view, saved))
    for node, value in values:
        node.meta["val"] = value
    forward.output((view,))
    backward.output((saved,))
    return rejection(memory_levels._Planner(SavedTensors(forward, backward, 0), view, gemms=True).plan)


def many_calls(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Return the sum of two chains of twenty calls each."""
    first = second = F.linear(x, w)
    for _ in range(10):
        first, second = first * 0.5 + 1, second * 0.25 - 1
    return F.linear(FF.bias_gelu(first + second, None), v)


def frozen(hidden: int = 2) -> list[Tensor]:
    x, w, v = tensors(hidden=hidden)
    return [x, w.detach(), v]


def two_linears(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, d: F.linear(act(F.linear(x, w)), d)


@program
def linear_layer(patch: Patch, fn: Callable[..., Any], *args: Tensor, **patched: Any) -> Reason:
    """Return the reason why a linear layer of a fused MLP does not run in float8."""
    rejected: list[Reason] = []
    linears = gemms.linears

    def recorded(*args: Any) -> Any:
        result = linears(*args)
        rejected.extend(reason for _, reason in result.rejected)
        return result

    patch.setattr(gemms, "linears", recorded)
    for name, value in patched.items():
        patch.setattr(gemms, name, value)
    explain(fn, *args, policy=FusionPolicy(gemm="fp8"))
    return rejected[0]


ONE_EXPERT = torch.tensor([4], dtype=torch.int32)


def blocks(dtype: torch.dtype = torch.float32, hidden: int = 128) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype) for shape in ((4, hidden), (256, hidden), (hidden, 256)))


@program
def not_tiled(
    patch: Patch, fn: Callable[[Tensor], Any], *shape: int, dynamic_shapes: bool = False, **policy: Any
) -> Reason:
    """Return the reason why a fused MLP is not tiled."""
    x = nn.Parameter(torch.randn(shape or (50, 8)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=dynamic_shapes):
        report = explain(fn, x, policy=FusionPolicy(**{"memory": "tiled:2", **policy}))
    site = next(site for site in report.sites if site.tiles_kind is not None)
    return Reason(site.tiles_kind, site.tiles_reason)


@torch.library.custom_op("test_reasons::hidden", mutates_args=())
def hidden(x: Tensor) -> Tensor:
    return x.tanh()


hidden.register_fake(torch.empty_like)


@program
def broken(patch: Patch) -> Break:
    report = explain(lambda x: first(x + 1, torch._dynamo.graph_break()) * 2, torch.randn(4))
    return report.breaks[0]


UP, DOWN = torch.randn(128, 8), torch.randn(8, 128)
PROGRAMS: dict[Kind, Program] = {
    Kind.OTHER_OPERAND: mlp(no_mlp),
    Kind.COMPUTED_PRODUCT: site_of(lambda x, w, d: (lambda h: F.silu(h) @ h.t())(F.linear(x, w))),
    Kind.CONSTANT: mlp(lambda h, u, m: torch.sigmoid(h) * torch.zeros_like(h)),
    Kind.NO_GEMM_READS: unread(lambda x, w, d: F.linear(F.layer_norm(F.gelu(F.linear(x, w)), (16,)), d)),
    Kind.NO_GEMM_BEFORE: unread(lambda x, w, d: F.linear(F.gelu(F.layer_norm(F.linear(x, w), (16,))), d)),
    Kind.OPAQUE: unread(lambda x, w, d: F.linear(hidden(F.linear(x, w)), d)),
    Kind.OTHER_DROPOUT: site_of(lambda x, w, d: F.linear(F.dropout(x.sin(), 0.5), w)),
    Kind.UNKNOWN: mlp(lambda h, u, m: F.tanhshrink(h)),
    Kind.UNKNOWN_GATED: mlp(lambda h, u, m: F.silu(h) * u * u),
    Kind.NEAR: mlp(lambda h, u, m: h * torch.sigmoid(1.7 * h)),
    Kind.RELU_KINK: mlp(lambda h, u, m: (h + h.abs()) / 2),
    Kind.KINK: kink_of_another,
    Kind.ROUNDED: mlp(lambda h, u, m: F.silu((h + 1.5 * 2**52) - 1.5 * 2**52)),
    Kind.MANY_TENSORS: site_of(
        lambda x, w, d: F.linear(F.silu(F.linear(x, w)) * F.linear(x.sin(), w) * F.linear(x.cos(), w), d)
    ),
    Kind.PARAMETER: prelu,
    Kind.ANOTHER_TENSOR: mlp(lambda h, u, m: F.silu(h) + m),
    Kind.MASK: mlp(lambda h, u, m: F.silu(h).masked_fill(m > 0, 0.0) * u),
    Kind.DROPOUT_INSIDE: mlp(lambda h, u, m: F.dropout(F.silu(h)) * u),
    Kind.COMPARISON: mlp(lambda h, u, m: torch.where(h > 0, h, 0.0)),
    Kind.UNPROVABLE: mlp(lambda h, u, m: torch.round(h)),
    Kind.CUSTOM_FUNCTION: mlp(lambda h, u, m: StraightThrough.apply(h)),
    Kind.ARGUMENT: site_of(lambda x, w, d: F.linear(F.silu(F.linear(x, w)) * 1j, d.cfloat())),
    Kind.TENSOR_BOUND: mlp(lambda h, u, m: torch.clamp(h, max=u)),
    Kind.INNER_READER: site_of(lambda x, w, d: (lambda s, h: (F.linear(s * h, d), s))(*sigmoid_of(F.linear(x, w)))),
    Kind.STANDS_BETWEEN: mlp(lambda h, u, m: F.silu(h).detach() * u),
    Kind.NARROW_CAST: mlp(lambda h, u, m: F.gelu(h).bfloat16() * u),
    Kind.DTYPE: site_of(lambda x, w, d: torch.relu(x.int() @ w.int().t()) @ w.int()),
    Kind.BROADCAST: mlp(lambda h, u, m: F.silu(h) * u[:, :1]),
    Kind.WRITTEN: mlp(lambda h, u, m: (lambda s: s * first(h, h.cumsum_(0)))(torch.sigmoid(h))),
    Kind.GRAPH_RESULT: site_of(lambda x, w, d: (lambda h: (F.linear(torch.tanh(h), d), h))(F.linear(x, w))),
    Kind.READ_AFTERWARDS: site_of(
        lambda x, w, d: (lambda h, v: F.linear(h.relu_(), d).sum() + v.sum())(*viewed(F.linear(x, w)))
    ),
    Kind.WRITES_INPUT: mlp(lambda h, u, m: m.add_(h).relu_()),
    Kind.IN_PLACE_REGION: mlp(lambda h, u, m: first(h, within(torch.no_grad, torch.sigmoid_, h))),
    Kind.REGION: mlp(lambda h, u, m: within(torch.no_grad, F.silu, h) * u),
    Kind.INFERENCE_MODE: site_of(
        lambda x, w, d: F.linear(F.gelu(F.linear(x, w)) * (within(torch.inference_mode, F.linear, x, w) + 1), d)
    ),
    Kind.TRANSFORM: site_of(lambda x, w, d: torch.vmap(lambda r: F.linear(F.silu(F.linear(r, w)), d))(x)),
    Kind.SUBCLASS: subclass,
    Kind.DEVICES: devices,
    Kind.ORDER: site_of(lambda x, w, d: F.linear(F.linear(x, w)[:, ::2].relu_(), d[:, ::2])),
    Kind.MANY_CALLS: mlp(lambda h, u, m: sum(torch.sigmoid(h) for _ in range(70))),  # type: ignore[arg-type,return-value]
    Kind.PROBABILITY: dropout(contextlib.nullcontext, FusionPolicy(), None),
    Kind.UNRECORDED: unrecorded,
    Kind.BOUNDARY: unread(
        lambda x, w, d: F.linear(checkpoint(F.gelu, F.linear(x, w), use_reentrant=False), d)  # type: ignore[arg-type]
    ),
    Kind.DROPOUT_POLICY: dropout(contextlib.nullcontext, FusionPolicy(dropout=False)),
    Kind.FALLBACK_RANDOM: dropout(lambda: inductor_config.patch(fallback_random=True), FusionPolicy()),
    Kind.EXCLUDED: mlp(lambda h, u, m: F.silu(h), FusionPolicy(exclude=("",))),
    Kind.FREEZING: freezing,
    Kind.EAGER_ROUNDING: emulated,
    Kind.GEMM_DEVICE: linear_layer(two_linears(F.gelu), *blocks(), no_scaled_products=lambda *_: "sm_80"),
    Kind.GEMM_EXPERTS: linear_layer(
        lambda x, w, d: F.grouped_mm(
            F.gelu(F.grouped_mm(x, w.t()[None], offs=ONE_EXPERT)), d.t()[None], offs=ONE_EXPERT
        ),
        *blocks(torch.bfloat16),
    ),
    Kind.GEMM_SIZE: linear_layer(two_linears(F.gelu), *blocks(hidden=120)),
    Kind.GEMM_DTYPE: linear_layer(two_linears(F.gelu), *blocks(torch.float64)),
    Kind.GEMM_FORM: linear_layer(
        lambda x, w, d: F.linear(F.gelu(F.conv1d(x[..., None], w[..., None]))[..., 0], d), *blocks()
    ),
    Kind.TILE_FEW: not_tiled(lambda x: F.linear(F.gelu(F.linear(x.sin(), UP)), DOWN), memory="tiled"),
    Kind.TILE_DROPOUT: not_tiled(lambda x: F.linear(F.dropout(F.gelu(F.linear(x, UP)), 0.1), DOWN)),
    Kind.TILE_CALLERS: not_tiled(lambda x: F.linear(F.gelu(F.linear(x, UP.detach())), DOWN)),
    Kind.TILE_READER: not_tiled(lambda x: (lambda a: F.linear(a, DOWN) + a.sum())(F.gelu(F.linear(x, UP)))),
    Kind.TILE_FORM: not_tiled(lambda x: F.linear(F.gelu(F.linear(x, UP))[:, 1:], DOWN), 5, 10, 8),
    Kind.TILE_SIZE: not_tiled(lambda x: F.linear(F.gelu(F.linear(x[x[:, 0] > 0], UP)), DOWN), dynamic_shapes=True),
    Kind.TILE_FP8: not_tiled(lambda x: F.linear(F.gelu(F.linear(x, UP)), DOWN), gemm="fp8"),
    Kind.CHECKPOINTED: stays_saved(checkpointed, *tensors()),
    Kind.IN_CHECKPOINT: stays_saved(attention_in_checkpoint, *tensors(hidden=8), attention="input"),
    Kind.OUTER_CHECKPOINT: called_by_checkpoint,
    Kind.NOTHING_SAVED: stays_saved(lambda x, w, v: attention(x, v), *tensors(hidden=8), attention="input"),
    Kind.FP8_DTYPE: stays_saved(gelu, *tensors(torch.float64), level="fp8"),
    Kind.FP8_DEVICE: stays_saved(gelu, *tensors(), level="fp8", converts_to_fp8=lambda device: False),
    Kind.FP8_CLAMP: stays_saved(
        lambda x, w, v: F.linear(FF.glu(F.linear(x, w), F.linear(x, w), activation="silu", clamp=2), v),
        *tensors(),
        level="fp8",
    ),
    Kind.ALSO_READ: stays_saved(also_read, *tensors(), level="fp8"),
    Kind.NO_GEMM: stays_saved(
        lambda x, w, v: F.linear(FF.bias_gelu(F.linear(x, w).softmax(-1).cumsum(0)), v), *tensors()
    ),
    Kind.COSTS_MORE: stays_saved(lambda x, w, v: gelu(x.sin(), w, v), *frozen()),
    Kind.MADE_OF_SIZE: made_of_a_size,
    Kind.MANY_RECOMPUTED: stays_saved(many_calls, *tensors()),
    Kind.STAYS_WITH_CALLER: stays_on_device(F.linear, *tensors()[:2]),
    Kind.STAYS_BY_FORM: stays_on_device(gelu, *tensors()),
    Kind.STAYS_SMALL: stays_on_device(gelu, *tensors(), DEVICES=("cpu",)),
    Kind.STAYS_UNHIDDEN: stays_on_device(
        lambda x, w: F.linear(x, w).sin(), *tensors()[:2], DEVICES=("cpu",), MIN_BYTES=1
    ),
    Kind.GRAPH_BREAK: broken(),
    Kind.DDP_BUCKET: cut_by_ddp,
}


@pytest.fixture
def texts(monkeypatch: Patch) -> list[Reason]:
    """Replace the text of every reason by "x"; return the reasons whose text is read."""
    read: list[Reason] = []
    monkeypatch.setattr(Reason, "__str__", lambda self: (read.append(self), "x")[1])
    return read


def test_strict_and_the_notes_read_kinds(texts: list[Reason]) -> None:
    x, w, d = torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16)
    errors: dict[Callable[[Tensor], Tensor], type[Exception] | None] = {F.silu: None, F.tanhshrink: UnfusedError}
    for act, error in errors.items():
        for exclude in ((), ("",)):
            graph = traced(two_linears(act), x, w, d)
            stage = PreGradPass(FusionPolicy(strict=True, exclude=exclude))
            with pytest.raises(error) if error and not exclude else contextlib.nullcontext():
                stage(graph)
    report = explain(two_linears(F.silu), x, w, d, policy=FusionPolicy(exclude=("", "encoder")))
    assert report.sites[0].reason == "x" and len(report.notes) == 1 and "'encoder'" in report.notes[0]


def test_every_kind_has_a_program() -> None:
    assert PROGRAMS.keys() == set(Kind)


def test_every_kind_is_explained() -> None:
    assert list(REASONS["kinds"]) == [kind.name for kind in Kind], "in the order of reasons.py, which the tables have"
    assert list(REASONS["categories"]) == [category.name for category in Category]
    assert all(entry["title"] for entry in REASONS["categories"].values())
    for name, entry in REASONS["kinds"].items():
        assert entry.keys() == {"texts", "means"} and entry["texts"] and all(entry["texts"]), name


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.name)
def test_behavior_depends_on_the_kind(kind: Kind, monkeypatch: Patch, texts: list[Reason]) -> None:
    """Each program is rejected with its kind. Hint and counts depend on the kind, not on the text."""
    outcome = PROGRAMS[kind](monkeypatch)
    assert outcome.kind is kind
    if isinstance(outcome, Site):
        mlp = outcome.activation != "dropout"
        assert (outcome.op, outcome.reason) == (None, "x")
        assert outcome.hint == kind.hint
        assert outcome.is_mlp == (mlp and kind.category is not Category.NOT_AN_MLP)
        assert outcome.is_missed == (outcome.is_mlp and kind is not Kind.EXCLUDED)
    said = [reason.text for reason in (*texts, outcome) if isinstance(reason, Reason) and reason.kind is kind]
    assert any(fits(kind, text) for text in said) and all(text == "x" or fits(kind, text) for text in said), said


# ---- the page --------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def said() -> Iterator[tuple[str, Kind, str]]:
    """Yield (place, kind, text) of each rejection in the sources that names its kind. "…" is a computed part."""
    for path in sorted([*(ROOT / "torch_fused_ops").rglob("*.py"), *(ROOT / "lowerings").rglob("*.py")]):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        texts = [n for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "text"]
        for call in nodes:
            if (
                not isinstance(call, ast.Call)
                or len(call.args) < 2
                or not ast.unparse(call.args[0]).startswith("Kind.")
            ):
                continue
            text = call.args[1]
            if isinstance(text, ast.Name):  # the text was assigned right before
                text = max((n for n in texts if n.lineno < call.lineno), key=lambda n: n.lineno).value
            if isinstance(text, ast.JoinedStr | ast.Constant):
                place = f"{path.relative_to(ROOT)}:{call.lineno}"
                yield place, Kind[ast.unparse(call.args[0]).removeprefix("Kind.")], written(text)


def written(text: ast.expr) -> str:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else getattr(reasons, ast.unparse(part.value), "…")  # type: ignore[attr-defined]
        for part in parts
    )


def test_the_page_has_every_text() -> None:
    """docs/reasons.json, from which the page is written, has each text that is raised (``test_docs.py``)."""
    raised = list(said())
    assert len(raised) > 75
    assert not [(place, kind, text) for place, kind, text in raised if not fits(kind, text)]
