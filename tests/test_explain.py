"""``explain`` and its reports as text, JSON and HTML."""

import copy
import functools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, Stack, raises
from torch.utils.checkpoint import checkpoint

from torch_fused_ops.activations import register_activation
from torch_fused_ops.graphs.listing import merged_sites
from torch_fused_ops.graphs.modules import module_path
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.planner.plan import plan
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.explain import explain
from torch_fused_ops.reports.recording import record
from torch_fused_ops.reports.report import Report
from torch_fused_ops.tools.verify import verify


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.odd = nn.Sequential(nn.Linear(8, 16), nn.Tanhshrink(), nn.Linear(16, 8))

    def forward(self, x):
        return self.odd(self.mlp(self.norm(x)))


def test_explain_lists_every_site():
    report = explain(Block(), torch.randn(4, 8))
    fused, dropout, left = report.sites
    assert (fused.op, fused.activation, fused.users) == ("fused::bias_act", "gelu", ("linear",))
    assert fused.source.startswith("test_explain.py:") and fused.source.endswith(" in mlp")
    assert (left.op, left.activation) == (None, None)
    assert left.source.endswith(" in odd") and "is not a supported activation" in left.reason
    assert (dropout.op, dropout.activation, dropout.is_mlp) == ("fused::dropout_add", "dropout", False)
    assert report.summary == "1 of 2 MLP sites fused, 1 of 1 dropouts (1 graph)"


def test_sites_on_both_sides_of_a_graph_break_are_listed():
    model = Block()

    def broken(x):
        y = model.mlp(x)
        torch._dynamo.graph_break()
        return model.mlp(y)

    report = explain(broken, torch.randn(4, 8))
    assert [site.op for site in report.sites] == ["fused::bias_act", "fused::dropout_add"] * 2
    assert report.graphs == 2


def test_explain_leaves_the_model_and_dynamo_unchanged():
    """Its captures neither count toward Dynamo's limit of eight, nor make later compilations dynamic."""
    model, x, is_dynamic = Block(), torch.randn(4, 8), []
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for _ in range(9):
        assert explain(model, x).sites
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())

    def backend(gm, inputs):
        is_dynamic.append(any(isinstance(i, torch.SymInt) for i in inputs))
        return gm.forward

    torch.compile(model, fullgraph=True, backend=backend)(torch.randn(6, 8))
    assert is_dynamic == [False]


SITES = (
    Site("fused::glu", "silu", "model.py:12 in layers.0.mlp", "proved from silu, mul", ("linear", "linear")),
    Site(
        *(None, None, "model.py:30 in attn", "not an MLP: with <softmax>", ("linear",)),
        spelling=("softmax",),
        kind=Kind.OTHER_OPERAND,
    ),
    Site(None, "gelu", "model.py:40 in head", "view stands between", ("linear", "sum"), kind=Kind.STANDS_BETWEEN),
)


def test_text_has_every_site():
    lines = str(Report(SITES)).splitlines()
    assert [line for line in lines if "(model.py" in line] == [
        "fused::glu: silu (model.py:12 in layers.0.mlp), read by linear ×2",
        "not fused: softmax (model.py:30 in attn), read by linear",
        "not fused: gelu (model.py:40 in head), read by linear, sum",
    ]
    expected = [SITES[0].reason, *(text for s in SITES[1:] for text in (s.reason, f"→ {s.kind.row}"))]
    assert [line[2:] for line in lines if line.startswith("  ")] == expected, "a reason has a link to the docs below it"
    assert lines[-1] == "1 of 2 MLP sites fused, 1 not MLPs (1 graph)"
    assert str(Report(())).startswith("0 of 0 MLP sites fused (1 graph)\n")


def test_text_groups_equal_sites_of_several_layers():
    def site(module, reason="proved from gelu", op="fused::bias_act"):
        return Site(op, "gelu" if op else None, f"model.py:12 in {module}", reason, ("linear",), module=module)

    sites = [site(f"h.{i}.mlp") for i in range(32)]
    sites += [site(f"h.{i}.mlp", "a cast inside", None) for i in (3, 1)] + [
        site(f"h.{i}.mlp", "no") for i in range(0, 12, 2)
    ]
    report = Report(tuple(sites))
    sources = [site.source for site in merged_sites(report.sites)]
    assert sources == ["model.py:12 in h.0…31.mlp ×32", "model.py:12 in h.1,3.mlp ×2", "model.py:12 in h.0…10.mlp ×6"]
    assert [line for line in str(report).splitlines() if "×32" in line] and len(str(report).splitlines()) == 8
    assert len(json.loads(report.to_json())["sites"]) == 40


def test_sites_without_a_module_have_their_source():
    (site,) = merged_sites([Site(None, None, "unknown", "why", ())])
    assert site.source == "unknown"


def test_long_reasons_are_wrapped_and_do_not_start_with_a_minus():
    reason = "-1 + " + " + ".join(f"x·sigmoid({i}·x)" for i in range(40)) + " is not a supported activation"
    lines = str(Report((Site(None, None, "model.py:1 in a", reason, ("linear",)),))).splitlines()
    assert max(map(len, lines)) <= 120
    text = [line.strip() for line in lines[1 : lines.index("")]]
    assert text[0].startswith("the value -1 + ") and " ".join(text) == f"the value {reason}"


@pytest.mark.parametrize("call", [explain, functools.partial(plan, capacity="1GiB"), verify])
def test_arguments_in_a_tuple_are_explained(call: Any):
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"args=\(tuple of 1,\): .* one by one: \(model, x\), not \(model, \(x,\)\)$"):
        call(nn.Linear(4, 4), (x,))
    raises(TypeError, r"^(?!args=)", call, nn.Linear(4, 4), x, x)
    raises(TypeError, r"^(?!args=)", call, nn.Linear(4, 4), ["a", "batch"])


def test_html_into_a_missing_folder_raises(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be written: it must be a file in an existing folder"):
        Report(()).to_html(tmp_path / "none" / "page.html")


def test_json_has_every_site():
    parsed = json.loads(Report(SITES).to_json())
    convert = {"users": tuple, "spelling": tuple, "kind": lambda name: name and Kind[name]}
    sites = [Site(**{k: convert.get(k, lambda v: v)(v) for k, v in site.items()}) for site in parsed["sites"]]
    assert sites == list(SITES)
    assert [site["kind"] for site in parsed["sites"]] == [None, "OTHER_OPERAND", "STANDS_BETWEEN"]
    assert parsed["saved"] is None and parsed["graphs"] == 1


class Balanced(HTMLParser):
    """Checks that tags are closed in order and that the page is self-contained; collects the text."""

    def __init__(self):
        super().__init__()
        self.open_tags, self.texts, self.in_section = [], [], {}

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open_tags.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs}  # self-contained

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(path):
    text = path.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open_tags == [] and "url(" not in text and "@import" not in text
    return text, parser


NASTY = "<script>alert('&')</script>{body}{title}%s"


def test_html_escapes_everything_and_has_all_sections(tmp_path):
    path = tmp_path / "report.html"
    assert Report(SITES, graphs=2).to_html(path) == path
    text, parser = read(path)
    assert "&lt;softmax&gt;" in text and "<softmax>" not in text
    headings = [t.strip() for t in parser.texts if t.strip() in ("Fused", "Not fused", "Not MLPs")]
    assert headings == ["Fused", "Not fused", "Not MLPs"]
    for op in ("fused::glu", None):
        report = Report((Site(op, NASTY, NASTY, NASTY, (NASTY,), NASTY, NASTY, NASTY),), title=NASTY, notes=(NASTY,))
        text, parser = read(report.to_html(str(path)))
        assert "<script" not in text and text.count("&lt;script&gt;") >= 8
        assert sum(NASTY in t for t in parser.texts) >= 6, "the text is unchanged"


def test_html_has_the_source_line_and_hint_of_unfused_sites(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return F.tanhshrink(x) * (1 < 2)

    model = Stack(nn.Sequential(nn.Linear(8, 16), Odd(), nn.Linear(16, 8)) for _ in range(3))
    text, _ = read(explain(model, torch.randn(4, 8)).to_html(tmp_path / "report.html"))
    assert "<pre>return F.tanhshrink(x) * (1 &lt; 2)</pre>" in text
    assert "test_explain.py:" in text and "layers.0…2 ×3" in text
    assert text.count('<p class="hint">') == 1 and "register_activation" in text


def test_html_without_sites_names_graph_breaks(tmp_path):
    text, _ = read(Report((), graphs=3).to_html(tmp_path / "report.html"))
    assert "graph break" in text and "Not fused" not in text and "<h2>Graph breaks" not in text


def breaks(x, w):
    x = x @ w
    torch._dynamo.graph_break()
    return x


def breaks_twice(x, w):
    return torch.relu(breaks(breaks(x, w), w)) @ w


def test_graph_breaks_have_line_reason_and_hint(tmp_path):
    arguments = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    report = explain(breaks_twice, *arguments)
    assert report.graphs > 2 and report.sites == ()
    (graph_break,), times = set(report.breaks), len(report.breaks)
    assert times > 1
    assert graph_break.code == "torch._dynamo.graph_break()" and graph_break.kind is Kind.GRAPH_BREAK
    assert graph_break.location.startswith(__file__) and graph_break.source.startswith("test_explain.py:")
    text = " ".join(str(report).split())
    hint = f"{Kind.GRAPH_BREAK.hint} ({Kind.GRAPH_BREAK.row})"
    assert f"{graph_break.source} ×{times}: {graph_break.code} {graph_break.reason} → {hint}" in text
    text, parser = read(report.to_html(tmp_path / "report.html"))
    assert text.count(f"<pre>{graph_break.code}</pre>") == 1 and f"{times} times" in text and "Graph breaks" in text
    assert any(Kind.GRAPH_BREAK.row in t for t in parser.texts)
    assert [b["kind"] for b in json.loads(report.to_json())["breaks"]] == ["GRAPH_BREAK"] * times
    unbroken = explain(lambda x, w: torch.relu(x @ w) @ w, *arguments)
    assert unbroken.breaks == () and "graph break" not in str(unbroken)


@pytest.mark.codegen_is_slow("captured")
def test_record_lists_graph_breaks_of_fused_graphs_only():
    with record() as report:
        torch.compile(breaks, backend="aot_eager")(torch.randn(4, 4), torch.randn(4, 4))
        torch._dynamo.reset()
        torch.compile(breaks, backend="fused")(torch.randn(4, 4), torch.randn(4, 4))
    (graph_break,) = report.breaks
    assert graph_break.code == "torch._dynamo.graph_break()" and graph_break.reason in " ".join(str(report).split())


def test_without_a_captured_graph_dynamos_reasons_are_listed():
    def loop(x, w):
        for _ in range(2):
            x = x @ w
            torch._dynamo.graph_break()
        return torch.relu(x) @ w

    report = explain(loop, torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)))
    assert report.graphs == 0 and "0 graphs" in str(report)
    assert report.breaks and {graph_break.kind for graph_break in report.breaks} == {Kind.GRAPH_BREAK}
    assert "torch._dynamo.graph_break()" in str(report)
    assert explain(lambda x: x + 1, torch.randn(4)).breaks == ()


@torch.library.custom_op("test_explain::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


product.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("test_explain::same", mutates_args=())
def tanh_op(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


tanh_op.register_fake(torch.empty_like)


class Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad


torch._dynamo.allow_in_graph(Traced)

BETWEEN = "not an MLP: {} lies between GEMMs and cannot be analyzed"
PRODUCT = "not an MLP: it is not known whether {} is a GEMM"
W, D = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))
HIDDEN = {
    "an operator": (lambda x: F.linear(tanh_op(F.linear(x, W)), D), [BETWEEN.format("torch.ops.test_explain.same")]),
    "a function": (lambda x: F.linear(Traced.apply(F.linear(x, W) + 1)[None], D), [BETWEEN.format("Traced")]),
    "products": (lambda x: product(F.silu(product(x, W)), D), [PRODUCT.format("torch.ops.test_explain.product")] * 2),
    "the second product": (
        lambda x: product(F.silu(F.linear(x, W)), D),
        [PRODUCT.format("torch.ops.test_explain.product")],
    ),
    "a norm of a sum": (lambda x: F.linear(tanh_op(x + F.linear(F.linear(x, W), D)), W), []),
    "at an end": (lambda x: tanh_op(F.linear(F.linear(tanh_op(x), W), D)), []),
    "torch's own": (lambda x: F.linear(torch.fft.rfft(F.linear(x, W)).abs(), D[:, :9]), []),
    "in a checkpoint": (
        lambda x: checkpoint(lambda x: F.linear(tanh_op(F.linear(x, W)), D), x, use_reentrant=False),
        [BETWEEN.format("torch.ops.test_explain.same")],
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_opaque_calls_between_gemms_are_named(name, tmp_path):
    fn, expected = HIDDEN[name]
    report = explain(fn, torch.randn(4, 8))
    hidden = [site for site in report.unread if site.kind is Kind.OPAQUE]
    assert [site.reason for site in hidden] == expected and not any(site.is_mlp for site in hidden)
    for text in (" ".join(str(report).split()), read(report.to_html(tmp_path / "report.html"))[0]):
        assert ("register it: torch_fused_ops.register_gemm" in text) == bool(expected)


def test_sites_have_the_policys_memory_level():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))
    policy = FusionPolicy(memory={"0": "fp8", "[12]": "input"})
    report = explain(model, torch.randn(4, 8), policy=policy)
    assert [site.memory for site in report.sites] == ["fp8", "input", "input", "free"]
    rows = str(report).splitlines()[1:6:2]
    for row, end in zip(rows, ("memory='fp8'", "memory='input'", "from gelu"), strict=True):
        assert row.endswith(end)
    for memory in ("off", "fp8", "tiled:2"):
        text = str(explain(model, torch.randn(4, 8), policy=FusionPolicy(memory=memory)))
        assert f"memory={memory!r}" in text
    with torch.no_grad():  # a step without backward saves no tensors
        assert {site.memory for site in explain(model, torch.randn(4, 8), policy=policy).sites} == {""}
    with torch._functorch.config.patch(activation_memory_budget=0.5):  # the budget takes precedence
        assert {site.memory for site in explain(model, torch.randn(4, 8), policy=policy).sites} == {""}


UNKNOWN = {
    "tanhshrink": F.tanhshrink,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "near": lambda x: x * torch.sigmoid(1.7 * x),
    "shifted": lambda x: F.gelu(x) + x,
}


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", UNKNOWN)
def test_registering_as_hinted_fuses_the_site(name):
    fn = UNKNOWN[name]

    def mlp(x, w):
        return fn(x @ w) @ w

    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    (site,) = explain(mlp, x, w).sites
    assert site.op is None and "register_activation" in site.hint
    text = " ".join(str(explain(mlp, x, w)).split())
    assert f"→ {site.hint} ({site.kind.row})" in text, "the hint follows the reason"
    register_activation(f"hinted_{name}", fn)
    (site,) = explain(mlp, x, w).sites
    assert (site.op, site.activation, site.hint) == ("fused::bias_act", f"hinted_{name}", "")


def test_no_hint_to_register_if_it_would_not_help():
    def gated(x, w, v):
        return (F.tanhshrink(x @ w) * (x @ v)) @ w

    w = nn.Parameter(torch.randn(8, 8))
    sites = explain(gated, torch.randn(4, 8), w, nn.Parameter(torch.randn(8, 8))).sites
    assert sites
    for site in sites:
        assert site.op is None and "register_activation" not in site.hint
    (site,) = explain(Block(), torch.randn(4, 8), policy=FusionPolicy(exclude=("mlp", "odd"))).sites[:1]
    assert "exclude" in site.hint


def test_reports_without_sites_give_advice():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    report = explain(model, torch.randn(2, 8))
    assert report.sites == () and "another op (a norm" in str(report) and repr(report) == str(report)


def test_invalid_arguments_are_named_and_model_errors_propagate():
    raises(KeyError, "mine", explain, {}.__getitem__, "mine")
    raises(TypeError, "model=3", explain, 3)
    with pytest.raises(TypeError, match=r"model=<class .*Block'> is a class: it must be an instance of it, Block\(…\)"):
        explain(Block, torch.randn(4, 8))
    raises(TypeError, "is a class: it must be an instance of it", verify, Block, torch.randn(4, 8))
    raises(TypeError, "is a class: it must be an instance of it", plan, Block, torch.randn(4, 8), capacity="1GiB")
    raises(TypeError, "policy='free'", explain, Block(), torch.randn(4, 8), policy="free")


@pytest.mark.codegen_is_slow("captured")
def test_activations_without_a_reading_gemm_are_unread():
    def norm_former(s, x):
        h = s.up(x)
        return s.down(s.norm(F.gelu(h))) + h.square().mean()

    model = Net(norm_former, up=nn.Linear(8, 16), norm=nn.LayerNorm(16), down=nn.Linear(16, 8))
    report = explain(model, torch.randn(4, 8))
    (unread_site,) = report.unread
    assert report.sites == () and not unread_site.is_mlp
    assert (unread_site.spelling, unread_site.users) == (("gelu",), ("layer_norm",))
    assert "not fused: gelu (test_explain.py:" in str(report)
    assert "  not an MLP: no GEMM reads it, but layer_norm\n" in str(report)
    assert json.loads(report.to_json())["unread"][0]["users"] == ["layer_norm"]
    with record() as recorded:
        torch.compile(model, backend="fused")(torch.randn(4, 8))
    assert [site.spelling for site in recorded.unread] == [("gelu",)]


def test_activations_of_norms_and_after_breaks_are_unread():
    def fn(x, w, d):
        h = F.linear(F.gelu(F.layer_norm(F.linear(x, w), (16,))), d)
        torch._dynamo.graph_break()
        return F.linear(torch.relu(h), w)

    report = explain(fn, torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16))
    assert report.sites == () and report.graphs == 2
    reasons = [site.reason for site in report.unread]
    assert reasons[0] == "not an MLP: it reads layer_norm, which no GEMM with weights has produced"
    assert reasons[1].startswith("not an MLP: it reads ") and "a site does not reach across a graph break" in str(
        report
    )


ckpt = functools.partial(checkpoint, use_reentrant=False)


def parts(body):
    return Net(body, gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def swiglu(gate, up):
    return F.silu(gate) * up


CHECKPOINT = "tag_activation_checkpoint"
CUT = {
    "activation": (lambda s, x: s.down(ckpt(F.gelu, s.up(x))), "gelu"),
    "up": (lambda s, x: s.down(F.gelu(ckpt(s.up, x) + 1)), "gelu"),
    "activation, down": (lambda s, x: ckpt(lambda h: s.down(F.gelu(h)), s.up(x)), "gelu"),
    "up, activation": (lambda s, x: s.down(ckpt(lambda x: F.gelu(s.up(x)), x)), "gelu"),
    "down": (lambda s, x: ckpt(s.down, swiglu(s.gate(x), s.up(x))), "silu, mul"),
    "both ups": (lambda s, x: s.down(swiglu(*ckpt(lambda x: (s.gate(x), s.up(x)), x))), "silu, mul"),
    "activation of the gate": (lambda s, x: s.down(ckpt(F.silu, s.gate(x)) * s.up(x)), "silu, mul"),
    "glu": (lambda s, x: s.down(ckpt(F.glu, F.linear(x, torch.cat((s.gate.weight, s.up.weight))))), "glu"),
    "a body in a body": (lambda s, x: ckpt(lambda x: s.down(ckpt(F.gelu, s.up(x))), x), "gelu"),
}


@pytest.mark.codegen_is_slow("captured")
@pytest.mark.covering(every=2)
@pytest.mark.parametrize("part", CUT)
def test_checkpoints_that_split_an_mlp_are_the_reason(part):
    """Dynamo captures a checkpoint's body as a separate graph, and a site cannot span two graphs."""
    body, spelling = CUT[part]
    reports = [explain(parts(body), torch.randn(4, 8))]
    if part in ("activation", "activation, down", "both ups"):  # compiling takes a second
        with record() as recorded:
            torch.compile(parts(body), backend="fused")(torch.randn(4, 8))
        reports.append(recorded)
    for report in reports:
        (unread_site,) = report.unread
        assert report.sites == () and ", ".join(unread_site.spelling) == spelling
        assert unread_site.reason == f"the boundary of {CHECKPOINT} lies between it and a GEMM"
        assert f"not fused: {spelling} (test_explain.py:" in str(report)
        assert f"\n  {unread_site.reason}\n" in str(report)
        assert unread_site.users == ("linear",) and unread_site.op is None


UNCUT = {
    "inside": lambda s, x: ckpt(lambda x: s.down(F.gelu(s.up(x))), x),
    "gated, inside": lambda s, x: ckpt(lambda x: s.down(swiglu(s.gate(x), s.up(x))), x),
    "beside": lambda s, x: s.down(F.gelu(s.up(x))) + ckpt(lambda x: s.down(s.up(x)), x),
    "inside, read outside, too": lambda s, x: (lambda y, h: y + s.down(h))(
        *ckpt(lambda x: (lambda h: (s.down(h), h))(F.gelu(s.up(x))), x)
    ),
}


@pytest.mark.parametrize("body", UNCUT)
def test_checkpoints_around_or_beside_an_mlp_do_not_split_it(body):
    report = explain(parts(UNCUT[body]), torch.randn(4, 8))
    assert report.unread == () and len(report.sites) == 1
    assert all(site.op for site in report.sites)
    assert explain(parts(lambda s, x: s.down(ckpt(lambda h: h + 1, s.up(x)))), torch.randn(4, 8)).unread == ()


def test_a_site_that_also_reads_across_a_boundary_is_listed_once():
    def body(s, x):
        return ckpt(lambda x, up: s.down(F.silu(s.gate(x)) * up), x, s.up(x))

    report = explain(parts(body), torch.randn(4, 8))
    (site,) = report.sites
    assert report.unread == () and site.op == "fused::bias_act", "the part on this side of the boundary is fused"
    assert site.reason.endswith("mul by another tensor stays behind it")


def test_activations_in_operator_bodies_have_reasons():
    w, d = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    def branches(x):
        return F.linear(torch.cond(x.sum() > 0, F.gelu, F.silu, (F.linear(x, w),)), d)

    def attention(x):
        return ckpt(lambda q, k: F.silu(q) @ k.t(), F.linear(x, w), F.linear(x, w))

    def normed(x):
        return F.linear(F.layer_norm(ckpt(lambda x: F.gelu(F.linear(x, w)), x), (16,)), d)

    def mapped(x):
        return F.linear(torch._higher_order_ops.map(F.gelu, F.linear(x, w)), d)

    reasons = {
        branches: ["not an MLP: no GEMM reads it, but cond"] * 2,
        attention: [],
        normed: ["not an MLP: no GEMM reads it, but layer_norm"],
        mapped: ["the boundary of map_impl lies between it and a GEMM"],
    }
    for fn, expected in reasons.items():
        assert [site.reason for site in explain(fn, torch.randn(4, 8)).unread] == expected


def test_activations_between_convolutions_are_not_listed():
    norm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    (site,) = explain(norm, torch.randn(2, 3, 8, 8)).unread
    assert site.reason == "not an MLP: it reads batch_norm, which no GEMM with weights has produced"
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 3, 3))
    assert explain(convolutions, torch.randn(1, 3, 8, 8)).unread == ()


def test_a_disabled_model_is_reported():
    model = Block()
    model.forward = torch.compiler.disable(model.forward)
    text = str(explain(model, torch.randn(4, 8)))
    assert "Dynamo captured no graph of the model" in text and "torch.compiler.disable" in text
    assert "unknown" not in text and "between the products" not in text


def test_constructors_in_the_graph_are_not_opaque_calls():
    """torchao's float8 constructs its ``LinearMMConfig`` in the graph from tensors' settings."""

    class Config:
        def __init__(self, x: torch.Tensor, config: Any = None) -> None:
            self.x = x

    w = nn.Parameter(torch.randn(8, 8))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    h = graph.call_function(F.gelu, (graph.call_function(F.linear, (x, graph.placeholder("w"))),))
    config = graph.call_function(Config, (h,))
    graph.output(graph.call_function(F.linear, (h, config)))
    for node, value in zip(graph.nodes, (torch.randn(4, 8), w, *[torch.randn(4, 8)] * 2, Config(w)), strict=False):
        node.meta["example_value"] = value
    assert [site.reason for site in recognize.unread(graph) if "Config" in site.reason] == []


def test_patterns_without_a_match_are_noted():
    model = Block()
    report = explain(model, x=torch.randn(4, 8), policy=FusionPolicy(exclude=("mlp.*", "mpl")))
    assert report.sites[0].reason == "the policy excludes 'mlp.*'"
    assert report.notes == (
        "exclude='mpl' matches no site's modules; the sites' modules are mlp, mlp.2, odd; did you mean 'mlp'?",
    )
    assert report.summary.endswith(f"; note: {report.notes[0]}") and str(report).count(report.notes[0]) == 1
    policy = FusionPolicy(exclude=("mlp", "mlp.*"), memory={"mlp": "fp8", "od": "fp8", "*": "input"})
    assert explain(model, torch.randn(4, 8), policy=policy).notes == (
        "memory='od' matches no site's modules; the sites' modules are mlp, mlp.2, odd; did you mean 'odd'?",
    )


def test_summaries_of_models_with_dropouts_only():
    report = explain(lambda x, w: F.dropout(x @ w, 0.5) + x, torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)))
    assert report.summary == "1 of 1 dropouts fused (1 graph)"
    report = explain(lambda x, w: F.dropout(x, 0.5) @ w, torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)))
    assert report.summary == "0 of 0 MLP sites fused, 0 of 1 dropouts (1 graph)" and report.nothing in str(report)


@pytest.mark.parametrize(
    ("by_dynamo", "by_the_model"),
    [
        ("L['self'].layers['0'].mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']['0'].mlp", "layers.0.mlp"),
        ("L['s'].__dict__['_modules']['layers'].0.__dict__['_modules']['mlp']", "layers.0.mlp"),
        ("L['self'].__dict__._modules.layers.0", "layers.0"),
        ("L['fn'].0._orig_mod.layers", "0.layers"),
        ("L['self'].layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("L['self'].layers._modules['0'].__dict__['_modules']['_checkpoint_wrapped_module'].mlp", "layers.0.mlp"),
        ("L['self']._fsdp_wrapped_module.layers.0", "layers.0"),
        ("L['self']", ""),
        ("L['self'].my_orig_modules.0", "my_orig_modules.0"),
        ("L['args'][0].model.layers.0.mlp", "model.layers.0.mlp"),  # accelerate's bf16
        ("L['args'][0]._modules['model']._modules['layers']._modules['0']", "model.layers.0"),
        ("L['args'][0]", ""),
        ("L['kwargs']['model'].layers.0.mlp", "layers.0.mlp"),
        ("L['models'][1]._orig_mod.layers.0", "layers.0"),
        ("L['__nested_frame_values'][0][1].layers.0", "layers.0"),
        ("G['model'].layers.0", "layers.0"),
        ("L['step'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("L['forward'].__self__.layers.0", "layers.0"),
        ("L['f'].model_forward.__closure__[1].cell_contents.forward.__self__.layers.0", "layers.0"),
        ("L['forward'].__wrapped__.__func__.__closure__[1].cell_contents[0].layers.0", "layers.0"),
        ("L['fn'].func.layers.0.mlp", "layers.0.mlp"),  # functools.partial(model)
        ("L['fn'].args[0].layers.0.mlp", "layers.0.mlp"),  # functools.partial(step, model)
        ("L['fn'].keywords['model'].layers.0.mlp", "layers.0.mlp"),
        ("L['fn'].function.0", "function.0"),
        ("L['fn'].args.0", "args.0"),
        ("L['self'].func.layers.0", "func.layers.0"),
        ("L['self'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].a", "base_model.model.a"),  # PEFT
    ],
)
def test_module_paths_match_named_modules(by_dynamo: str, by_the_model: str) -> None:
    assert module_path(by_dynamo) == by_the_model


def test_patterns_match_below_modules_with_a_custom_getattr() -> None:
    """PEFT, diffusers and checkpoint wrappers define ``__getattr__``."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    report = explain(Wrapper(), torch.randn(4, 8), policy=FusionPolicy(exclude=("layers.0.*",)))
    mlps = [site for site in report.sites if site.module.endswith("mlp")]
    assert [(site.module, site.op is None) for site in mlps] == [("layers.0.mlp", True), ("layers.1.mlp", False)]
