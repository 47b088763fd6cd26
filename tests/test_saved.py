"""``explain(…).saved``: every tensor saved for backward, its readers, and the settings that remove it."""

import functools
import html
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import GeluMLP, Net, Stack, SwiGLU, conv1d
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.graphs.listing import SavedRow
from torch_fused_ops.lowerings import compat, offload
from torch_fused_ops.reports.captures import on_paper
from torch_fused_ops.reports.saved import Saved
from torch_fused_ops.reports.saved import saved as list_saved
from torch_fused_ops.virtual_gpu import H200

pytest.importorskip("triton", reason="the virtual GPU needs Triton")

WIDTH, HIDDEN, TOKENS, LAYERS = 32, 96, 24, 2
HALF = 2  # bytes of a bfloat16


def attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = (linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (s.q, s.k, s.v))
    return s.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def block(mlp: Callable[..., nn.Module] = SwiGLU, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> nn.Module:
    attn = Net(attention, **{name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "qkvo"})

    def body(s: Any, x: Tensor) -> Tensor:
        x = x + s.attn(s.n1(x))
        return x + s.mlp(s.n2(x))  # type: ignore[no-any-return]

    return Net(body, n1=norm(WIDTH), n2=norm(WIDTH), attn=attn, mlp=mlp(WIDTH, HIDDEN))


def llama() -> nn.Module:
    return Stack(block() for _ in range(LAYERS)).bfloat16()


def gpt2() -> nn.Module:
    return Stack(block(conv1d, nn.LayerNorm) for _ in range(2)).bfloat16()


def without_a_site() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Tanh()).bfloat16()


def explained(model: nn.Module, policy: FusionPolicy | None = None) -> tfo.Report:
    x = torch.randn(2, 1 if isinstance(model, nn.Sequential) else TOKENS, WIDTH).bfloat16().requires_grad_()
    return tfo.explain(model, x, policy=policy)


def row_of(saved: Saved, module: str, **fields: Any) -> SavedRow:
    (row,) = (r for r in saved.rows if r.module == module and all(getattr(r, k) == v for k, v in fields.items()))
    return row


def by_shape(saved: Saved) -> Counter[tuple[object, ...]]:
    """Count the saved tensors by shape and dtype."""
    return sum((Counter({(row.shape, row.dtype): row.count}) for row in saved.rows), Counter())


@functools.cache
def llama_report(policy: FusionPolicy) -> tfo.Report:
    return explained(llama(), policy)


def llama_saved(policy: FusionPolicy | None = None) -> Saved:
    return llama_report(policy or FusionPolicy()).saved


CASES = {
    "llama": (llama, FusionPolicy()),
    "llama, off": (llama, FusionPolicy(memory="off")),
    "llama, fp8": (llama, FusionPolicy(memory="fp8")),
    "gpt2": (gpt2, FusionPolicy()),
    "mlp, float8 GEMMs": (lambda: Stack([GeluMLP(WIDTH, HIDDEN)]).bfloat16(), FusionPolicy(memory="fp8", gemm="fp8")),
    "no site": (without_a_site, FusionPolicy()),
}

SLOW = {*CASES} - {"mlp, float8 GEMMs"}


@pytest.mark.parametrize(
    ("make", "policy"), [pytest.param(*c, id=n, marks=pytest.mark.slow if n in SLOW else ()) for n, c in CASES.items()]
)
def test_saved_tensors_equal_those_of_a_compilation(make: Callable[[], nn.Module], policy: FusionPolicy) -> None:
    report = llama_report(policy) if make is llama else explained(make(), policy)
    paper, listed = on_paper(report._captures[0], H200, policy), list_saved(report._captures, H200, compare=False)
    assert listed.nbytes == paper.saved_bytes() > 0 and not listed.skipped
    assert by_shape(listed) == Counter(
        (t.shape, str(t.dtype).removeprefix("torch.")) for t in paper.saved if not t.is_parameter
    )


SETTINGS: dict[str, dict[str, Any]] = {
    'memory="fp8"': {"memory": "fp8"},
    'memory="input"': {"memory": "input"},
    'attention="input"': {"attention": "input"},
}


def test_a_llama_block() -> None:
    """A row has bytes, readers, and the fields that remove the tensor. Layers share a row."""
    saved = llama_saved()
    for name in ("gate", "up"):
        row = row_of(saved, f"layers.0,1.mlp.{name}")
        assert (row.count, row.nbytes) == (LAYERS, LAYERS * 2 * TOKENS * HIDDEN * HALF)
        assert (row.shape, row.dtype) == ((2 * TOKENS, HIDDEN), "bfloat16")  # the GEMM's result, not a view of it
        assert ("glu_backward", "layers.0,1.mlp") in row.read_by
        assert ("weight gradient", "layers.0,1.mlp.down") in row.read_by, "backward recomputes the activation from it"
        assert {'memory="fp8"', 'memory="input"'} <= set(row.removed_by) and not row.refused
        assert row.advice == 'memory="fp8" stores it in 8 bits; memory="input" recomputes it'
    for name in "qkv":
        row = row_of(saved, f"layers.0,1.attn.{name}")
        assert row.count == LAYERS and row.read_by == (("attention", "layers.0,1.attn"),)
        assert row.advice == 'attention="input" recomputes it'
    result = row_of(saved, "layers.0,1.attn", dtype="bfloat16")
    assert result.advice == "needed for: attention" and not result.removed_by
    assert row_of(saved, "(inputs)").advice == "needed for: weight gradient"


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_listed_setting_removes_the_tensors(setting: str) -> None:
    before, changed = llama_saved(), llama_report(FusionPolicy(**SETTINGS[setting]))
    after = list_saved(changed._captures, H200, compare=False)
    rows = [row for row in before.rows if setting in row.removed_by]
    removed = sum((Counter({(row.shape, row.dtype): row.count}) for row in rows), Counter())
    assert rows and by_shape(before) - by_shape(after) == removed
    assert before.totals[setting] == after.nbytes < before.nbytes


@pytest.mark.slow
def test_off_lists_tensors_that_free_removes() -> None:
    saved = explained(llama(), FusionPolicy(memory="off")).saved
    row = row_of(saved, "layers.0,1.mlp")
    assert row.advice == 'memory="free" recomputes it' and row.nbytes == LAYERS * 2 * TOKENS * HIDDEN * HALF


@pytest.mark.slow
def test_float8_tensors_are_rows() -> None:
    row = row_of(llama_saved(FusionPolicy(memory="fp8")), "layers.0,1.mlp.up", dtype="float8_e4m3fn")
    assert row.nbytes == LAYERS * 2 * TOKENS * HIDDEN and row.advice == 'memory="input" recomputes it'


def test_a_rejected_level_has_a_reason() -> None:
    """A copy of the frozen MLP's input, which nothing else saves, is larger than gate and up."""
    model = Stack([SwiGLU(WIDTH, WIDTH // 4), nn.Linear(WIDTH, WIDTH)]).bfloat16()
    model.layers[0].gate.requires_grad_(False)  # type: ignore[union-attr]
    model.layers[0].up.requires_grad_(False)  # type: ignore[union-attr]
    requested, other = (explained(model, FusionPolicy(memory=level)).saved for level in ("input", "free"))
    for saved, setting in ((requested, "the policy"), (other, 'memory="input"')):
        row = row_of(saved, "layers.0.gate")
        ((name, reason),) = row.refused
        assert name == setting and "its inputs take" in reason and reason in row.advice
    assert "the policy does not apply" in row_of(requested, "layers.0.gate").advice


def test_without_gradients_nothing_is_saved() -> None:
    with torch.no_grad():
        saved = explained(llama()).saved
    assert (saved.rows, saved.nbytes, saved.totals, saved.skipped) == ((), 0, {}, ())


def test_the_listing_of_a_model_without_a_site_is_in_all_formats_after_access(tmp_path: Path) -> None:
    report = explained(without_a_site())
    assert (
        not report.sites and json.loads(report.to_json())["saved"] is None and "saved for backward" not in str(report)
    )
    assert "saved for backward" not in report.to_html(tmp_path / "report.html").read_text()
    saved = report.saved
    assert saved is report.saved and str(saved) in str(report)
    assert str(saved) in html.unescape(report.to_html(tmp_path / "report.html").read_text())
    data = json.loads(report.to_json())["saved"]
    assert data["nbytes"] == saved.nbytes == sum(row["nbytes"] for row in data["rows"])
    assert data["rows"][0]["module"] == "(inputs)" and data["totals"] == saved.totals
    row = row_of(saved, "2")
    assert row.removed_by and all("activation_memory_budget" in setting for setting in row.removed_by)
    assert row.advice.startswith("torch._functorch.config.activation_memory_budget")
    assert row_of(saved, "4").advice == "only a checkpoint removes it"


@pytest.mark.slow
@pytest.mark.skipif(not compat.has_offload_operators(), reason="torch cannot copy to the host during forward")
def test_offloaded_tensors_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says that its tensors move to the host, or why not. Other modules' tensors stay without a reason."""
    monkeypatch.setattr(offload, "MIN_BYTES", TOKENS * WIDTH * HALF)
    saved, plain = llama_saved(FusionPolicy(offload={"layers.*.mlp": True})), llama_saved()
    on_host = [row for row in saved.rows if row.moves]
    assert {row.module for row in on_host} == {"layers.0.mlp.gate", "layers.0.mlp.up"}
    assert "no GEMM would run during its copies" in row_of(saved, "layers.1.mlp.up").text
    assert saved.nbytes == plain.nbytes - sum(row.nbytes for row in on_host) < plain.nbytes
    assert "more move to the host" in repr(saved) and "moves to the host" in on_host[0].text
    assert on_host[0].removed_by == row_of(plain, "layers.0,1.mlp.gate").removed_by
    everything = llama_saved(FusionPolicy(offload=True))
    assert "shares memory with an argument" in row_of(everything, "(inputs)").text
    small = next(row for row in everything.rows if row.dtype == "float32")
    assert re.search("offload: it has less than .* KiB", small.text) and not row_of(saved, "(inputs)").stays
