"""Policies, options, cache keys and failures of passes. test_composition.py tests threads and other passes."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import raises, saved_by
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import compat, passes

pytestmark = pytest.mark.codegen_is_slow("captured")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    tfo.disable()
    for slot in passes.SLOTS:
        left = compat.passes_in(getattr(inductor_config, slot))
        assert not any(isinstance(graph_pass, passes.Pass) for graph_pass in left), "a fusion pass is still in a slot"


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w)), v)


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, requires_grad=True) for s in ((8, 16), (32, 16), (16, 32))]


def test_enabled_decorates_recursive_functions() -> None:
    policy = tfo.FusionPolicy(memory="off")

    @tfo.enabled(policy)
    def depth(n: int) -> int:
        assert passes.active_policy() == policy
        return n and depth(n - 1)

    assert depth(2) == 0 and passes.active_policy() is None and passes._users == 0


def test_enabled_inside_enable_and_nested() -> None:
    tfo.enable(tfo.FusionPolicy(memory="off"))
    with tfo.enabled():
        with tfo.enabled(tfo.FusionPolicy(exclude=("a",))):
            assert passes.active_policy() == tfo.FusionPolicy(exclude=("a",))
        assert passes.active_policy() == tfo.FusionPolicy()
    assert passes.active_policy() == tfo.FusionPolicy(memory="off")
    tfo.enable()  # a second call changes the policy, and needs one disable
    assert passes.active_policy() == tfo.FusionPolicy()
    tfo.disable()
    tfo.disable()
    assert passes.active_policy() is None


@pytest.mark.codegen_is_slow
def test_another_partitioner_has_precedence() -> None:
    partitioner = Partitioner()
    options = tfo.compile_options(options={"custom_partitioner_fn": partitioner})
    assert options["custom_partitioner_fn"] is partitioner
    torch.compile(mlp, fullgraph=True, options=options)(*arguments())
    assert partitioner.calls == 1


@pytest.mark.parametrize(
    "how",
    [
        {"options": tfo.compile_options(tfo.FusionPolicy(strict=True))},
        {"backend": "fused"},
        {"backend": "fused", "mode": "max-autotune-no-cudagraphs"},
        {"backend": "fused", "options": {"epilogue_fusion": False}},
    ],
)
def test_backend_takes_mode_and_options(how: dict[str, Any]) -> None:
    x, w, v = arguments()
    with tfo.record() as report:
        torch.testing.assert_close(torch.compile(mlp, fullgraph=True, **how)(x, w, v), mlp(x, w, v))
    assert [site.op for site in report.sites] == ["fused::bias_act"]


def near_miss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.linear(x, w)
    return F.linear(h * torch.sigmoid(1.7 * h), v)


def test_strict_raises_for_unfused_but_not_for_excluded_mlps() -> None:
    strict = tfo.FusionPolicy(strict=True)
    with pytest.raises(Exception, match=r"not fused(.|\n)*1\.7 for 1\.702"):
        torch.compile(near_miss, backend="fused", options={"policy": strict})(*arguments())
    torch._dynamo.reset()
    excluded = tfo.FusionPolicy(strict=True, exclude=("*",))
    torch.compile(mlp, backend="fused", options={"policy": excluded})(*arguments())


@pytest.mark.codegen_is_slow
def test_saved_tensor_hooks_of_the_user_see_no_fake_tensors() -> None:
    x, w, v = arguments()
    compiled = torch.compile(mlp, fullgraph=True, backend="fused", options={"policy": tfo.FusionPolicy(strict=True)})
    _, saved = saved_by(lambda: compiled(x, w, v).sum().backward())
    assert [t.data_ptr() for t in saved], "data_ptr raises for a fake tensor"


def test_a_failing_pass_does_not_change_the_graph_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(passes.PreGradPass, "run", mock.Mock(side_effect=RuntimeError("broken on purpose")))
    monkeypatch.setattr(passes, "_logged", set())
    x, w, v = arguments()
    for _ in range(2):
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True):
            torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="fused")(x, w, v), mlp(x, w, v))
    assert [r.getMessage() for r in caplog.records].count(
        "a pass failed and left the graph as it was (pre-grad pass: RuntimeError: broken on purpose). Please report it."
    ) == 1
    torch._dynamo.reset()
    strict = {"policy": tfo.FusionPolicy(strict=True)}
    with inductor_config.patch(force_disable_caches=True), pytest.raises(Exception, match="broken on purpose"):
        torch.compile(mlp, backend="fused", options=strict)(x, w, v)


def test_passes_and_policies_copy_and_pickle() -> None:
    graph_pass = passes.PreGradPass(tfo.FusionPolicy(exclude=("a.*",)))
    assert copy.deepcopy(graph_pass) is graph_pass
    assert pickle.loads(pickle.dumps(graph_pass)) == graph_pass
    assert pickle.loads(pickle.dumps(tfo.FusionPolicy())) == tfo.FusionPolicy()


UNKNOWN = ("fp4", "tiles", "tiled:", "tiled:0", "tiled:1", "tiled:-2", "tiled:x", "tiled:04")
LEVELS = "free, fp8, input, tiled, tiled:N"
UNCLOSED = ("[", "a.[!", "a[]", "[!]", "[0-9].[")
NOT_ACCEPTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"memory": m}, ValueError, f"memory='{m}' is not known; accepted: off, {LEVELS}") for m in UNKNOWN),
    *(({"memory": {"a": m}}, ValueError, f"'{m}' for 'a' is not accepted; accepted: {LEVELS}") for m in UNKNOWN),
    ({"memory": {"a": "off"}}, ValueError, "'off' is for a whole model only"),
    ({"memory": {1: "fp8"}}, TypeError, "1 is not a string pattern"),
    ({"memory": {"a.[0": "fp8"}}, ValueError, r"'a\.\[0' has a \[ without a \]"),
    ({"memory": 3}, TypeError, "memory=3 is not accepted"),
    ({"memory": ("a", "b", "c")}, TypeError, "is not accepted"),
    *(({"exclude": (p,)}, ValueError, r"has a \[ without a \]") for p in UNCLOSED),
    *(({"memory": {p: "fp8"}}, ValueError, r"has a \[ without a \]") for p in UNCLOSED),
    ({"exclude": "a"}, TypeError, "exclude='a'"),
    ({"strict": 1}, TypeError, "strict=1"),
    ({"memroy": "fp8"}, TypeError, "FusionPolicy's 'memroy' is not known; did you mean 'memory'"),
    ({"gemm": "int8"}, ValueError, "gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"),
    ({"gemm": {"a": "int8"}}, ValueError, "gemm='int8' for 'a' is not accepted"),
    ({"gemm": 3}, TypeError, "gemm=3 is not accepted: it must be a recipe"),
    ({"offload": "yes"}, ValueError, "offload='yes' is not known; accepted: True, False"),
    ({"offload": {"a": 1}}, ValueError, "offload=1 for 'a' is not accepted; accepted: True, False"),
    ({"offload": 1}, TypeError, "offload=1 is not accepted: it must be a value"),
    ({"checkpoints": "drop"}, ValueError, "checkpoints='drop' is not known; accepted: keep, replace"),
    ({"checkpoints": {"a": "off"}}, ValueError, "'off' for 'a' is not accepted; accepted: keep, replace"),
    ({"checkpoints": True}, TypeError, "checkpoints=True is not accepted: it must be a value"),
]


def test_bad_fields_are_rejected() -> None:
    for fields, error, message in NOT_ACCEPTED:
        raises(error, message, tfo.FusionPolicy, **fields)
    patterns = ("layers.[0-3].*", "[]]", "[!]]", "[[]", "a]", "")
    assert tfo.FusionPolicy(exclude=patterns).exclude == patterns


def test_bad_policies_are_named() -> None:
    for fn in (tfo.enable, tfo.compile_options):
        raises(TypeError, "policy='free'", fn, "free")
    raises(TypeError, r"options=\[1\]", tfo.compile_options, options=[1])
    with pytest.raises(TypeError, match="policy='free'"), tfo.enabled("free"):  # type: ignore[arg-type]
        pass
    raises(TypeError, r"policy='fp8' .*FusionPolicy\(memory='fp8'\) or FusionPolicy\(gemm='fp8'\)", tfo.enable, "fp8")
    for fn in (tfo.enable, tfo.enabled, tfo.compile_options):
        raises(TypeError, f"{fn.__name__}: both a policy and memory are given", fn, tfo.FusionPolicy(), memory="fp8")
        raises(TypeError, "'memroy' is not known; did you mean 'memory'", fn, memroy="fp8")


def test_fields_are_accepted_instead_of_a_policy() -> None:
    expected = tfo.FusionPolicy(memory="fp8", strict=True)
    try:
        tfo.enable(memory="fp8", strict=True)
        assert passes.active_policy() == expected
        with tfo.enabled(memory="input"):
            assert passes.active_policy() == tfo.FusionPolicy(memory="input")
    finally:
        tfo.disable()
    fused_passes = [
        option for option in tfo.compile_options(memory="fp8", strict=True).values() if hasattr(option, "policy")
    ]
    assert fused_passes and all(option.policy == expected for option in fused_passes)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"memory": "input", "strict": True}, tfo.FusionPolicy(memory="input", strict=True)),
        ({"policy": tfo.FusionPolicy(memory="off")}, tfo.FusionPolicy(memory="off")),
        ({"exclude": ["mlp"], "max-autotune": False}, tfo.FusionPolicy(exclude=("mlp",))),
        ({"max_autotune": False}, tfo.FusionPolicy()),
    ],
)
def test_fields_are_options_of_the_backend(
    options: dict[str, Any], policy: tfo.FusionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tfo.FusionPolicy | None] = []
    monkeypatch.setattr(passes, "compile_options", lambda policy, options: seen.append(policy) or {})
    torch.compile(lambda x: x + 1, backend="fused", options=options)(torch.ones(2))
    assert seen == [policy]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polciy": 1}, "options: 'polciy' is not known; did you mean 'policy'?"),
        ({"max_autotun": True}, "options: 'max_autotun' is not known; did you mean 'max_autotune'?"),
        ({"memory": "fp8", "policy": tfo.FusionPolicy()}, "options: both a policy and memory are given"),
        ({"policy": "fp8"}, "policy='fp8' is not accepted"),
        ({"memory": "fp9"}, "memory='fp9' is not known"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(message)):
        torch.compile(lambda x: x + 1, backend="fused", options=options)(torch.ones(2))


def test_policies_are_read_from_text() -> None:
    read = tfo.FusionPolicy.parse
    assert read("memory=fp8, gemm=fp8,strict=true,exclude=a.*,exclude=b") == tfo.FusionPolicy(
        memory="fp8", gemm="fp8", strict=True, exclude=("a.*", "b")
    )
    assert read("1") == read("on") == tfo.FusionPolicy() and not read("dropout=off").dropout
    for text, error in (("", ValueError), ("fp8", ValueError), ("memory=", ValueError), ("strict=perhaps", ValueError)):
        raises(error, "is not accepted", read, text)
    raises(TypeError, "'memroy' is not known", read, "memroy=fp8")
    for text in ("memory=fp8,memory=input", "memory=fp8,memory=*=input", "memory=*=input,memory=fp8"):
        raises(ValueError, "memory occurs twice", read, text)
    levels = {"layers.[0,1].*": "input", "*": "fp8"}
    assert read("memory=layers.[0,1].*=input, *=fp8") == read("memory=layers.[0,1].*=input,memory=*=fp8")
    mixed = read("memory=layers.[0,1].*=input,*=fp8,gemm=mlp=fp8,exclude=a.*")
    assert mixed == tfo.FusionPolicy(memory=levels, gemm={"mlp": "fp8"}, exclude=("a.*",))
    replacing = read("memory=fp8,checkpoints=layers.[0,1].*=replace,*=keep")
    assert replacing == tfo.FusionPolicy(memory="fp8", checkpoints={"layers.[0,1].*": "replace", "*": "keep"})
    assert replacing.replaces_checkpoints({"layers", "layers.1"}) and not replacing.replaces_checkpoints({"head"})
    assert read("offload=true").offload is True and read("offload=off").offload is False
    moving = read("offload=layers.[0,1].*=true,*=false,memory=fp8")
    assert moving == tfo.FusionPolicy(memory="fp8", offload={"layers.[0,1].*": True, "*": False})
    assert moving.offloads({"layers", "layers.1"}) and not moving.offloads({"head"})
    raises(ValueError, "offload='yes' for 'a' is not accepted", read, "offload=a=yes")
    raises(TypeError, "'gem' is not known", read, "memory=*=fp8,gem=fp8")
    raises(ValueError, re.escape("memory='fp9' for '*' is not accepted"), read, "memory=layers.0=input,*=fp9")


def test_enable_warns_once_about_compiled_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(passes, "_logged", set())
    monkeypatch.setattr(passes, "_graphs", 0)
    torch._dynamo.utils.counters.clear()
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), torch.ones(2, 4)
    tfo.explain(model, x)
    tfo.enable()
    tfo.disable()
    assert not caplog.records
    torch.compile(model, backend="eager")(x)
    for _ in range(2):
        tfo.enable()
        tfo.disable()
    (record,) = (record for record in caplog.records if record.name == "torch_fused_ops")
    assert "compiled 1 graph without it" in record.getMessage()


def test_enable_after_a_reset_does_not_warn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(passes, "_logged", set())
    monkeypatch.setattr(passes, "_graphs", 0)
    torch.compile(mlp, backend=lambda gm, _: gm.forward)(*arguments())
    torch.compiler.reset()
    tfo.enable()
    assert not caplog.records
    tfo.disable()
    torch.compile(mlp, backend=lambda gm, _: gm.forward)(*arguments())
    tfo.enable()
    assert "enable() comes after torch.compile has compiled" in caplog.text


# ---- other settings that disable a pass ------------------------------------------------------------------------------


class Partitioner(CustomPartitionerFn):
    calls = 0

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "theirs"


class AfterFusion(compat.SchedulerPass):  # type: ignore[misc]
    def __call__(self, nodes: Any) -> Any:
        return nodes

    def uuid(self) -> str:
        return "theirs"


TAKEN = {
    "use_pre_grad_passes": (False, "no MLP is looked for: use_pre_grad_passes=False"),
    "custom_partitioner_fn": (Partitioner(), "memory='free' has no effect: custom_partitioner_fn is <"),
    "_post_fusion_custom_pass": (AfterFusion(), "no kernel reuses a buffer: _post_fusion_custom_pass is <"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_setting_that_disables_a_pass_warns_once_and_strict_raises(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value, text = TAKEN[name]
    monkeypatch.setattr(passes, "_logged", set())
    stage = passes.SchedulerPass(tfo.FusionPolicy())
    with inductor_config.patch({name: value}):
        stage([]), stage([])
        assert [r.getMessage()[: len(text)] for r in caplog.records] == [text]
        with pytest.raises(
            tfo.UnfusedError, match=re.escape(f"strict=True and another setting disables a part: {text}")
        ):
            passes.SchedulerPass(tfo.FusionPolicy(strict=True))([])
        if name != "use_pre_grad_passes":
            passes.SchedulerPass(tfo.FusionPolicy(strict=True, memory="off"))([])
    passes.SchedulerPass(tfo.FusionPolicy(strict=True))([])
    assert len(caplog.records) == 1


def test_other_passes_disable_attention_and_offload() -> None:
    with inductor_config.patch({name: value for name, (value, _) in TAKEN.items() if name != "use_pre_grad_passes"}):
        messages = list(passes._missing(tfo.FusionPolicy(memory="off", attention="input", offload=True)))
    effects = ["attention='input' has no effect", "offload=True has no effect", "no copy overlaps a GEMM"]
    assert [message.partition(":")[0] for message in messages] == effects


def test_caching_precompile_is_rejected() -> None:
    refused = r"torch\._dynamo\.config\.caching_precompile=True is not accepted: .* under any policy and backend"
    x, w, v = arguments()
    backend = torch._dynamo.lookup_backend("fused")
    with torch._dynamo.config.patch(caching_precompile=True):
        for call in (tfo.enable, tfo.compile_options, tfo.enabled().__enter__):
            raises(RuntimeError, refused, call)
        graph = torch.fx.symbolic_trace(mlp)
        raises(RuntimeError, refused, backend, graph, [x, w, v])
        raises(RuntimeError, refused, passes.PreGradPass(tfo.FusionPolicy()), graph.graph)
        raises(RuntimeError, refused, importlib.reload, sys.modules["torch_fused_ops.lowerings.backend"])
    assert passes.active_policy() is None


def test_strict_numerics_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 has the setting ``numerics``. ``emulate_precision_casts`` applies only to half precision."""
    for numerics, emulates, dtype, expected in (
        ("strict", False, torch.float32, "numerics='strict'"),
        ("strict_eager", False, torch.bfloat16, "numerics='strict_eager'"),
        ("default", True, torch.float32, ""),
        ("default", True, torch.float16, "emulate_precision_casts=True"),
        ("default", False, torch.float16, ""),
    ):
        config = SimpleNamespace(numerics=numerics, emulate_precision_casts=emulates)
        monkeypatch.setattr(torch._inductor, "config", config)
        assert compat.eager_rounding(dtype) == expected
