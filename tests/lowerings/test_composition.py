"""Fusion of an MLP beside Inductor's fusions, checkpoints, higher-order operators, DDP, user passes and threads.

Most tests compile with ``compiled``: all of Inductor's passes without g++, in a fraction of a second per graph.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import harness
import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_fused_ops as tfo
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings import compat, passes

aten, fused = torch.ops.aten, torch.ops.fused
PASS_SLOTS = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: True)
    yield
    compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: False)
    tfo.disable()
    for slot in (*PASS_SLOTS, "custom_partitioner_fn"):
        setattr(inductor_config, slot, None)


def calls(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(str(n.target) for n in graph.nodes if n.op == "call_function")


@dataclass
class Compiled:
    """A compilation's results, its graphs after the post-grad passes (backward last), and Inductor's counters."""

    out: Any = None
    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    def calls(self) -> Counter[str]:
        """Count the calls of all graphs, subgraphs included."""
        modules = [m for graph in self.graphs for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        return sum((calls(m.graph) for m in modules), Counter())

    def fused(self) -> int:
        return sum(n for name, n in self.calls().items() if re.fullmatch(r"fused\.\w+(?<!backward)\.default", name))


def compiled(
    fn: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    lower: bool = False,
    fullgraph: bool = True,
) -> Compiled:
    """Run ``fn`` and its backward under Inductor with ``options``. Torch runs the graphs instead of generated code.

    Args:
        fn: the function to compile.
        args: its arguments.
        options: the options of ``torch.compile``.
        config: Inductor's config during the run, for the whole process or context.
        lower: also lower the graphs, because some of Inductor's fusions happen then.
        fullgraph: the argument of ``torch.compile``.
    """
    from torch._inductor import compile_fx

    result = Compiled()

    def inner(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        before = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        after = harness.after_passes(gm, inputs, kwargs.get("is_inference", False), lower)
        runs = before if lower else after  # oneDNN's fused calls exist only as lowerings
        result.graphs.append(gm)

        def call(inputs: list[Any]) -> Any:
            return runs(*inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=inner, config_patches=options)

    before = Counter(counters["inductor"])
    with inductor_config.patch(config) if config else nullcontext():
        result.out = torch.compile(fn, backend=backend, fullgraph=fullgraph)(*args)
        if result.out.requires_grad:
            result.out.float().square().mean().backward()
    result.counters = Counter(counters["inductor"]) - before
    return result


def fused_with(policy: tfo.FusionPolicy | None = None) -> dict[str, Any]:
    return tfo.compile_options(policy or tfo.FusionPolicy())


# ---- upstream's own fusions ----------------------------------------------------------------------


class MLP(harness.MLP):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu, width: int = 64) -> None:
        super().__init__(width, 4 * width, activation)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Attention(nn.Module):
    """Attention written with basic operators, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(64, 192), nn.Linear(64, 64), MLP()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 16, 4, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q.matmul(k.transpose(-2, -1)) / 4.0, -1)
        return self.mlp(x + self.out(weights.matmul(v).transpose(1, 2).reshape(2, 16, 64)))  # type: ignore[no-any-return]


BF16 = torch.bfloat16


def test_attention_is_fused_next_to_an_mlp() -> None:
    model, x = Attention(), torch.randn(2, 16, 64)
    off, on = (compiled(model, x, options=options) for options in (None, fused_with()))
    assert on.counters["fuse_attention"] == off.counters["fuse_attention"] > 0
    assert (on.fused(), off.fused()) == (2, 0)  # backward recomputes the activation
    torch.testing.assert_close(on.out, off.out, rtol=1e-4, atol=1e-4)


def test_onednn_fuses_the_linear_layer_and_gelu_under_freezing() -> None:
    """In CPU inference under freezing, MLPs are not fused."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("needs oneDNN with bfloat16")
    model, x = MLP().to(BF16), torch.randn(2, 16, 64, dtype=BF16)
    with torch.no_grad():
        frozen = functools.partial(compiled, model, x, config={"freezing": True}, lower=True)
        off, on = (frozen(options=options) for options in (None, fused_with()))
    for name in ("mkldnn_linear_weight_pack_matcher_count", "mkldnn_unary_fusion_matcher_count"):
        assert on.counters[name] == off.counters[name] > 0, name
    assert on.fused() == off.fused() == 0
    torch.testing.assert_close(on.out, off.out, rtol=2e-2, atol=1e-4)


def test_freezing_in_options_prevents_fusion_at_inference() -> None:
    with torch.no_grad():
        result = compiled(MLP(), torch.randn(4, 64), options={**fused_with(), "freezing": True})
        assert result.fused() == 0
    assert compiled(MLP(), torch.randn(4, 64), options={**fused_with(), "freezing": True}).fused() == 2  # training


# ---- saved tensors: budgets, checkpoints ---------------------------------------------------------


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [(torch.randn(shape) / shape[-1] ** 0.5).requires_grad_() for shape in shapes]


ALWAYS, NEVER = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def selective(table: dict[Any, CheckpointPolicy], seen: set[Any] | None = None) -> Callable[[], Any]:
    """Return a ``context_fn`` that applies the table, and adds each operator that is looked up to ``seen``."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if seen is not None:
            seen.add(operator)
        return table.get(operator, CheckpointPolicy.PREFER_RECOMPUTE)

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.covering(1)
@pytest.mark.parametrize("memory", ["free", "off"])
@pytest.mark.parametrize("match", [ALWAYS, NEVER])
def test_selective_checkpointing_decides_about_fused_operators(match: CheckpointPolicy, memory: str) -> None:
    """The checkpoint's policy sees the fused operator instead of ``gelu``, and takes precedence over ``memory``."""

    def mlp(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v).sin()

    x, w, v = weights((8, 16), (64, 16), (16, 64))
    operator, replaced = fused.bias_act.default, aten.gelu.default
    gemms = dict.fromkeys((aten.mm.default, aten.addmm.default), ALWAYS)
    seen: set[Any] = set()
    context_fn = selective({operator: match, **gemms}, seen)

    def model(x: Tensor) -> Tensor:
        return checkpoint(mlp, x, use_reentrant=False, context_fn=context_fn)  # type: ignore[no-any-return]

    result = compiled(model, x, options=fused_with(tfo.FusionPolicy(memory=memory)))
    forward, backward = (calls(g.graph) for g in result.graphs)
    assert forward[str(operator)] == 1 and backward[str(operator)] == (match is NEVER)
    (expected,) = torch.autograd.grad(mlp(x).square().mean(), x)
    torch.testing.assert_close(x.grad, expected)
    assert operator in seen and replaced not in seen
    seen.clear()
    compiled(model, x, options=fused_with(tfo.FusionPolicy(exclude=("*",))))
    assert replaced in seen and operator not in seen


# ---- higher-order operators ----------------------------------------------------------------------


def bodies(mlp: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    from torch._higher_order_ops.map import map as mapped
    from torch._higher_order_ops.scan import scan

    region = torch.compiler.nested_compile_region(mlp)

    def while_loop(x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, mlp(x)

        return torch.while_loop(lambda i, x: i < 1, body, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]

    return {
        "checkpoint": lambda x: checkpoint(mlp, x, use_reentrant=False),
        "cond": lambda x: torch.cond(x.sum() > -1e9, mlp, lambda x: mlp(-x), (x,)),
        "nested_compile_region": lambda x: region(x) + 0 * region(2 * x),  # becomes a call once inlined
        "map": lambda x: mapped(mlp, x[None])[0],
        "scan": lambda x: scan(lambda c, x: (c + x, mlp(x)), torch.zeros_like(x), x[None])[1][0],
        "while_loop": while_loop,
    }


@pytest.mark.covering(every=12)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["checkpoint", "cond", "nested_compile_region", "map", "scan", "while_loop"])
def test_bodies_of_higher_order_operators_are_fused(name: str, training: bool) -> None:
    w, v = weights((64, 16), (16, 64))

    def mlp(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v)

    x = torch.randn(8, 16, requires_grad=training)
    seen: list[Counter[str]] = []
    options = fused_with(tfo.FusionPolicy(strict=True))
    slot = compat.Passes((*compat.passes_in(options["pre_grad_custom_pass"]), lambda g: seen.append(calls(g))))
    with torch.set_grad_enabled(training):
        result = compiled(bodies(mlp)[name], x, options={**options, "pre_grad_custom_pass": slot})
        expected = mlp(x)
    count = 2 if name == "cond" else 1  # both branches
    assert sum(c["fused.bias_act.default"] for c in seen) == count
    assert not any("fused" in call for call in seen[-1])  # the outer graph
    torch.testing.assert_close(result.out, expected)
    if training:
        torch.testing.assert_close(x.grad, torch.autograd.grad(expected.square().mean(), x)[0])


# ---- DDP -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("megabytes, parts", [(4.3, 3), (1000, 2)])  # the first bucket always has 1 MiB
def test_mlps_that_ddp_cuts_are_sites_that_are_not_fused(megabytes: float, parts: int) -> None:
    """DDPOptimizer splits a graph when a bucket is full. No backend sees all of an MLP that is split."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")

    model, x = harness.Stack(MLP(width=256) for _ in range(4)), torch.randn(4, 256)  # 2 MiB each
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes)
        with tfo.record() as report:
            split = compiled(sharded, x, options=fused_with(), fullgraph=False)
        explained = tfo.explain(sharded, x)
        with pytest.raises(Exception, match="optimize_ddp = False") as strict:
            compiled(sharded, x, options=fused_with(tfo.FusionPolicy(strict=True)), fullgraph=False)
    finally:
        dist.destroy_process_group()
    assert isinstance(strict.value.inner_exception, tfo.UnfusedError)
    for described in (report, explained):
        assert described.summary == f"3 of 4 MLP sites fused ({parts} graphs)" and not described.unread
        assert [site.kind for site in described.sites if site.op is None] == [Kind.DDP_BUCKET]
        assert {graph_break.kind for graph_break in described.breaks} == {Kind.DDP_BUCKET}
    assert len(split.graphs) == 2 * parts and split.calls()["fused.bias_act_backward.default"] == 3
    torch.testing.assert_close(split.out, model(x))


# ---- users' passes -------------------------------------------------------------------------------


class UserPass(CustomGraphPass):
    """A user's pass, which counts the fused operators that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(sum(n for name, n in calls(graph).items() if name.startswith("fused.")))

    def uuid(self) -> str:
        return "user pass"

    def __deepcopy__(self, memo: Any) -> UserPass:
        return self


def step() -> Compiled:
    """Compile an MLP with the current settings, for inference."""
    with torch.no_grad():
        return compiled(MLP(width=16), torch.randn(4, 16))


KINDS: dict[str, Callable[[UserPass], Any]] = {
    "a pass": lambda user_pass: user_pass,
    "a function": lambda user_pass: lambda graph: user_pass(graph),
    "a list": lambda user_pass: [user_pass],
    "a tuple": lambda user_pass: (user_pass, lambda graph: user_pass(graph)),
}


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_in_all_slots_run_as_before_and_are_restored(kind: str) -> None:
    if kind in ("a list", "a tuple") and not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("in this torch a slot holds one pass")
    user_passes = {slot: UserPass() for slot in PASS_SLOTS}
    values = {slot: KINDS[kind](user_pass) for slot, user_pass in user_passes.items()}
    for slot, value in values.items():
        setattr(inductor_config, slot, value)

    def seen() -> dict[str, list[int]]:
        for user_pass in user_passes.values():
            user_pass.seen.clear()
        step()
        return {slot: list(user_pass.seen) for slot, user_pass in user_passes.items()}

    before = seen()
    assert all(before.values()) and not any(map(any, before.values()))
    tfo.enable()
    during = seen()
    assert {slot: len(n) for slot, n in during.items()} == {slot: len(n) for slot, n in before.items()}
    assert not any(during["pre_grad_custom_pass"])  # runs before ours
    assert all(any(during[slot]) for slot in PASS_SLOTS[1:])
    tfo.disable()
    assert all(getattr(inductor_config, slot) is value for slot, value in values.items())
    assert seen() == before


def test_several_passes_have_one_identity() -> None:
    """Torch before 2.13 asks for it. A function has none, so torch caches nothing."""
    first, second = UserPass(), passes.PostGradPass()
    assert compat.Passes((first, second)).uuid() not in (None, compat.Passes((second, first)).uuid())
    assert compat.Passes((first, lambda graph: None)).uuid() is None


@contextmanager
def enable_and_disable() -> Iterator[None]:
    tfo.enable()
    yield
    tfo.disable()


@pytest.mark.parametrize("on", [enable_and_disable, tfo.enabled])
def test_passes_set_inside_the_block_stay(on: Callable[[], Any]) -> None:
    user_pass, partitioner = UserPass(), passes.Partitioner(tfo.FusionPolicy(memory="off"))
    with on():
        inductor_config.pre_grad_custom_pass = user_pass
        inductor_config.custom_partitioner_fn = partitioner
        assert step().fused() == 0
    assert inductor_config.pre_grad_custom_pass is user_pass
    assert inductor_config.custom_partitioner_fn is partitioner


@pytest.mark.parametrize("enable_again", [enable_and_disable, tfo.enabled])
def test_enabling_again_runs_the_fusion_pass_after_user_passes(enable_again: Callable[[], Any]) -> None:
    user_pass = UserPass()
    tfo.enable()
    inductor_config.pre_grad_custom_pass = user_pass
    with enable_again():
        assert step().fused() and user_pass.seen
    tfo.disable()
    assert inductor_config.pre_grad_custom_pass is user_pass


def test_a_user_pass_may_call_the_replaced_pass() -> None:
    tfo.enable()
    fusion_pass = inductor_config.pre_grad_custom_pass
    user_pass = UserPass()

    def wrapper(graph: torch.fx.Graph) -> None:
        fusion_pass(graph)
        user_pass(graph)

    inductor_config.pre_grad_custom_pass = wrapper
    assert step().fused() and any(user_pass.seen)
    tfo.disable()
    assert inductor_config.pre_grad_custom_pass is wrapper
    assert step().fused() == 0


def test_a_slot_in_options_replaces_the_fusion_pass_unless_joined() -> None:
    user_pass = UserPass()
    options = {"pre_grad_custom_pass": user_pass}
    tfo.enable()
    model, x = MLP(width=16), torch.randn(4, 16)
    assert compiled(model, x, options=options).fused() == 0 and user_pass.seen == [0]
    assert compiled(model, x, options=tfo.compile_options(options=options)).fused() and user_pass.seen == [0, 0]


def test_blocks_that_overlap_leave_nothing_behind() -> None:
    """Passes belong to a context. This context's block is neither the first to open nor the last to close."""
    inductor_config.pre_grad_custom_pass = user_pass = UserPass()
    opened, close = threading.Event(), threading.Event()

    def other() -> None:
        with tfo.enabled():
            opened.set()
            close.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(60)
    with tfo.enabled():
        fused_here = step().fused()
        close.set()
        thread.join()
    assert fused_here and user_pass.seen
    assert inductor_config.pre_grad_custom_pass is user_pass


def test_compile_options_send_inductors_options_to_the_dictionary() -> None:
    with pytest.raises(TypeError, match=r"compile_options\(options=\{'max_autotune': True\}\)"):
        tfo.compile_options(memory="fp8", max_autotune=True)  # type: ignore[call-arg]


def test_compile_options_keep_what_was_set() -> None:
    user_pass, second = UserPass(), UserPass()
    inductor_config.pre_grad_custom_pass = user_pass
    options = tfo.compile_options(options={"joint_custom_pre_pass": second, "max_autotune": False})
    assert compat.passes_in(options["pre_grad_custom_pass"])[0] is user_pass
    assert options["joint_custom_pre_pass"] is second
    assert options["max_autotune"] is False
    compiled(MLP(width=16), torch.randn(4, 16), options=tfo.compile_options())
    assert user_pass.seen == [0]


# ---- threads and policies ------------------------------------------------------------------------


def in_threads(*fns: Callable[[], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i, fn=fn: results.update({i: fn()})) for i, fn in enumerate(fns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(fns))]


def test_enable_holds_until_disabled_in_every_thread() -> None:
    assert not step().fused()
    tfo.enable()
    assert step().fused() and in_threads(step)[0].fused()
    tfo.disable()
    assert not step().fused() and not in_threads(step)[0].fused()


def test_enabled_holds_in_its_own_context_only() -> None:
    with tfo.enabled():
        assert step().fused() and not in_threads(step)[0].fused()
    assert not step().fused()


@pytest.mark.parametrize("way", ["enabled", pytest.param("options", marks=pytest.mark.slow)])
def test_two_threads_compiling_at_once_do_not_mix(way: str) -> None:
    barrier = threading.Barrier(2, timeout=60)

    def by(policy: tfo.FusionPolicy) -> set[tuple[int, int]]:
        """Return the numbers of fused activations in forward, and of recomputed activations in backward."""
        numbers = set()
        with tfo.enabled(policy) if way == "enabled" else nullcontext():
            options = None if way == "enabled" else fused_with(policy)
            for _ in range(2):
                barrier.wait()
                pair = harness.Net(lambda s, x: s.two(s.one(x)), one=MLP(width=16), two=MLP(width=16))
                graphs = compiled(pair, torch.randn(4, 16, requires_grad=True), options=options).graphs
                forward, backward = (calls(graph.graph)["fused.bias_act.default"] for graph in graphs)
                numbers.add((forward, backward))
            barrier.wait()
        return numbers

    first, second = in_threads(
        lambda: by(tfo.FusionPolicy(exclude=("one",))), lambda: by(tfo.FusionPolicy(memory="off"))
    )
    assert first == {(1, 1)} and second == {(2, 0)}


def test_a_block_opened_while_another_thread_compiles_holds_afterwards() -> None:
    """If config is global, the other thread sets its options before this block begins and restores them afterwards."""
    compiling, opened = threading.Event(), threading.Event()

    def wait(graph: torch.fx.Graph) -> None:
        compiling.set()
        opened.wait(1)

    def compile_with_options() -> None:
        compiled(MLP(width=16), torch.randn(4, 16), options={"pre_grad_custom_pass": wait})

    thread = threading.Thread(target=compile_with_options)
    thread.start()
    compiling.wait(60)
    with tfo.enabled():
        opened.set()
        thread.join()
        assert step().fused()
    assert inductor_config.pre_grad_custom_pass is None
