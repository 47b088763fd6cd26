"""Reports: what explain says, what it leaves unchanged, and how a report is shown."""

import copy
import functools
import json
import sys
import types
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
from torch_fused_ops.graphs.listing import grouped
from torch_fused_ops.graphs.modules import module_path
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.nn import replace_mlps
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
        self.odd = nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 8))

    def forward(self, x):
        return self.odd(self.mlp(self.norm(x)))


@pytest.mark.parametrize("fields", [{"memory": "fp8"}, {"memroy": "fp8"}])
def test_fields_of_a_policy_are_not_the_models(fields: dict[str, str]) -> None:
    for call in (explain, verify, *([replace_mlps] if "memroy" in fields else [])):
        with pytest.raises(TypeError, match=r"the model takes no '\w+'; did you mean FusionPolicy's memory\?"):
            call(nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8), **fields)

    def takes_it(x: torch.Tensor, memory: str) -> torch.Tensor:
        return x * len(memory)

    def takes_all(x: torch.Tensor, **more: str) -> torch.Tensor:
        return x * len(more)

    explain(takes_it, torch.randn(2), memory="its own")
    explain(takes_all, torch.randn(2), memory="its own")


def test_sites():
    report = explain(Block(), torch.randn(4, 8))
    fused, dropout, left = report.sites
    assert (fused.op, fused.activation, fused.users) == ("fused::bias_act", "gelu", ("linear",))
    assert fused.source.startswith("test_explain.py:") and fused.source.endswith(" in mlp")
    assert (left.op, left.activation) == (None, None)
    assert left.source.endswith(" in odd") and "is not a supported activation" in left.reason
    assert (dropout.op, dropout.activation, dropout.is_mlp) == ("fused::dropout_add", "dropout", False)
    assert report.summary == "1 of 2 MLP sites fused, 1 of 1 dropouts (1 graph)"


def test_graph_breaks():
    model = Block()

    def broken(x):
        y = model.mlp(x)
        torch._dynamo.graph_break()
        return model.mlp(y)

    report = explain(broken, torch.randn(4, 8))
    assert [site.op for site in report.sites] == ["fused::bias_act", "fused::dropout_add"] * 2
    assert report.graphs == 2


@pytest.mark.parametrize("train", [True, False])
def test_the_model_is_as_before(train):
    model, x = Block().train(train), torch.randn(4, 8)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    explain(model, x)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training is train
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_shapes_seen_here_do_not_make_later_compilations_dynamic():
    model, seen = Block(), []
    explain(model, torch.randn(4, 8))

    def backend(gm, inputs):
        seen.append(any(isinstance(i, torch.SymInt) for i in inputs))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(6, 8))
    assert seen == [False]


SITES = (
    Site("fused::glu", "silu", "model.py:12 in layers.0.mlp", "proved from silu, mul", ("linear", "linear")),
    Site(None, None, "model.py:30 in attn", "not an MLP: with <softmax>", ("linear",), kind=Kind.OTHER_OPERAND),
    Site(None, "gelu", "model.py:40 in head", "view stands between", ("linear", "sum"), kind=Kind.STANDS_BETWEEN),
)


def test_print():
    lines = str(Report(SITES)).splitlines()
    assert lines[0].split() == ["operator", "activation", "source", "read", "by", "reason"]
    column = lines[0].index("reason")
    said = [SITES[0].reason, *(text for s in SITES[1:] for text in (s.reason, f"→ {s.kind.row}"))]
    assert [line[column:] for line in lines[2:7]] == said, "what was refused has its place in the docs below it"
    assert "linear ×2" in lines[2]
    assert lines[-1] == "1 of 2 MLP sites fused, 1 not MLPs (1 graph)"
    assert str(Report(())).startswith("0 of 0 MLP sites fused (1 graph)\n")


def test_print_collapses_what_differs_in_the_layer_only():
    def site(module, reason="proved from gelu", op="fused::bias_act"):
        return Site(op, "gelu" if op else None, f"model.py:12 in {module}", reason, ("linear",), module=module)

    sites = [site(f"h.{i}.mlp") for i in range(32)]
    sites += [site(f"h.{i}.mlp", "a cast inside", None) for i in (3, 1)] + [
        site(f"h.{i}.mlp", "no") for i in range(0, 12, 2)
    ]
    report = Report(tuple(sites))
    sources = [group.source for group in grouped(report.sites)]
    assert sources == ["model.py:12 in h.0…31.mlp ×32", "model.py:12 in h.1,3.mlp ×2", "model.py:12 in h.0…10.mlp ×6"]
    assert [line for line in str(report).splitlines() if "×32" in line] and len(str(report).splitlines()) == 7
    assert len(json.loads(report.to_json())["sites"]) == 40


def test_a_site_without_a_module_is_shown_as_it_is():
    (group,) = grouped([Site(None, None, "unknown", "why", ())])
    assert (group.source, group.modules) == ("unknown", "")


def test_long_reasons_are_wrapped_and_a_minus_is_no_bullet():
    reason = "-1 + " + " + ".join(f"x·sigmoid({i}·x)" for i in range(40)) + " is not a supported activation"
    lines = str(Report((Site(None, None, "model.py:1 in a", reason, ("linear",)),))).splitlines()
    column = lines[0].index("reason")
    assert max(map(len, lines)) <= 120
    shown = [line[column:] for line in lines[2 : lines.index("")]]
    assert shown[0].startswith("the value -1 + ") and " ".join(shown) == f"the value {reason}"


@pytest.mark.parametrize("call", [explain, functools.partial(plan, memory="1GiB"), verify])
def test_arguments_in_a_tuple_are_explained(call: Any):
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"args=\(tuple of 1,\): .* one by one: \(model, x\), not \(model, \(x,\)\)$"):
        call(nn.Linear(4, 4), (x,))
    raises(TypeError, r"^(?!args=)", call, nn.Linear(4, 4), x, x)


def test_pages_are_not_written_where_there_is_no_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be written: it must be a file in an existing folder"):
        Report(()).to_html(tmp_path / "none" / "page.html")


def test_json():
    parsed = json.loads(Report(SITES).to_json())
    as_they_were = {"users": tuple, "spelling": tuple, "kind": lambda name: name and Kind[name]}
    sites = [Site(**{k: as_they_were.get(k, lambda v: v)(v) for k, v in site.items()}) for site in parsed["sites"]]
    assert sites == list(SITES)
    assert [site["kind"] for site in parsed["sites"]] == [None, "OTHER_OPERAND", "STANDS_BETWEEN"]
    assert parsed["figures"] is None and parsed["graphs"] == 1


class Balanced(HTMLParser):
    """Checks that tags are closed in order and that nothing is fetched; collects the text."""

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


def test_html(tmp_path):
    path = tmp_path / "report.html"
    assert Report(SITES, graphs=2).to_html(path) == path
    text, parser = read(path)
    assert "&lt;softmax&gt;" in text and "<softmax>" not in text
    headings = [t for t in parser.texts if t.strip() in ("Fused", "Not fused", "Not MLPs")]
    assert [h.strip() for h in headings] == ["Fused", "Not fused", "Not MLPs"]
    assert "report.measure()" in text


def test_html_escapes_everything(tmp_path):
    for op in ("fused::glu", None):
        site = Site(op, NASTY, NASTY, NASTY, (NASTY,), NASTY, NASTY, NASTY)
        report = Report((site,))
        report.title, report.notes, report.figures_missing = NASTY, (NASTY,), NASTY
        text, parser = read(report.to_html(str(tmp_path / "report.html")))
        assert "<script" not in text and text.count("&lt;script&gt;") >= 8
        assert sum(NASTY in t for t in parser.texts) >= 7, "and shows it as it is"


def test_html_of_refusals_shows_the_line_and_what_to_do(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return F.mish(x) * (1 < 2)

    model = Stack(nn.Sequential(nn.Linear(8, 16), Odd(), nn.Linear(16, 8)) for _ in range(3))
    text, _ = read(explain(model, torch.randn(4, 8)).to_html(tmp_path / "report.html"))
    assert "<pre>return F.mish(x) * (1 &lt; 2)</pre>" in text
    assert "test_explain.py:" in text and "3 times" in text and "layers.0…2" in text
    assert text.count('<p class="hint">') == 1 and "register_activation" in text


def test_html_of_nothing(tmp_path):
    text, _ = read(Report((), graphs=3).to_html(tmp_path / "report.html"))
    assert "graph break" in text and "Not fused" not in text and "<h2>Graph breaks" not in text


def breaks(x, w):
    x = x @ w
    torch._dynamo.graph_break()
    return x


def breaks_twice(x, w):
    return torch.relu(breaks(breaks(x, w), w)) @ w


def test_each_graph_break_has_its_line_its_reason_and_what_helps(tmp_path):
    arguments = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    report = explain(breaks_twice, *arguments)
    assert report.graphs > 2 and report.sites == ()
    (one,), times = set(report.breaks), len(report.breaks)
    assert times > 1
    assert one.code == "torch._dynamo.graph_break()" and one.kind is Kind.GRAPH_BREAK
    assert one.location.startswith(__file__) and one.source.startswith("test_explain.py:")
    shown = " ".join(str(report).split())
    assert f"{one.source} ×{times}: {one.code} {one.reason} → {Kind.GRAPH_BREAK.hint} ({Kind.GRAPH_BREAK.row})" in shown
    text, parser = read(report.to_html(tmp_path / "report.html"))
    assert text.count(f"<pre>{one.code}</pre>") == 1 and f"{times} times" in text and "Graph breaks" in text
    assert any(Kind.GRAPH_BREAK.row in t for t in parser.texts)
    assert [b["kind"] for b in json.loads(report.to_json())["breaks"]] == ["GRAPH_BREAK"] * times
    whole = explain(lambda x, w: torch.relu(x @ w) @ w, *arguments)
    assert whole.breaks == () and "graph break" not in str(whole)


@pytest.mark.codegen_is_slow
def test_recorded_graph_breaks():
    with record() as report:
        torch.compile(breaks, backend="aot_eager")(torch.randn(4, 4), torch.randn(4, 4))
        torch._dynamo.reset()
        torch.compile(breaks, backend="fused")(torch.randn(4, 4), torch.randn(4, 4))
    (one,) = report.breaks
    assert one.code == "torch._dynamo.graph_break()" and one.reason in " ".join(str(report).split())


def test_where_nothing_is_captured_dynamos_reasons_are_said():
    def loop(x, w):
        for _ in range(2):
            x = x @ w
            torch._dynamo.graph_break()
        return torch.relu(x) @ w

    report = explain(loop, torch.randn(4, 4), nn.Parameter(torch.randn(4, 4)))
    assert report.graphs == 0 and "0 graphs" in str(report)
    assert report.breaks and {one.kind for one in report.breaks} == {Kind.GRAPH_BREAK}
    assert "torch._dynamo.graph_break()" in str(report)
    assert explain(lambda x: x + 1, torch.randn(4)).breaks == ()


class Loop(nn.Module):
    """Experts one after the other, as transformers' are where they are eager."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 16, 8)), nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero()[:, 0]
            y[rows] = F.linear(F.gelu(F.linear(x[rows], self.up[i])), self.down[i])
        return y


@pytest.mark.parametrize("dispatched", [True, False])
def test_loops_over_experts_that_transformers_can_compute_otherwise_are_told_so(monkeypatch, tmp_path, dispatched):
    """By the class, whose forward is a wrapper of transformers': a loop that nobody can switch gets no such hint."""
    wrappers = tmp_path / "moe.py"
    wrappers.write_text(
        "from functools import wraps\ndef dispatch(forward):\n    @wraps(forward)\n"
        "    def wrapper(self, *args):\n        return forward(self, *args)\n    return wrapper\n"
    )
    module = types.ModuleType("transformers.integrations.moe")
    module.__file__ = str(wrappers)
    exec(compile(wrappers.read_text(), str(wrappers), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if dispatched:
        monkeypatch.setattr(Loop, "forward", module.dispatch(Loop.forward))
    report = explain(Loop(), torch.randn(6, 8), torch.tensor([0, 1, 1, 0, 1, 0]))
    kinds = {one.kind for one in report.breaks}
    assert kinds == {Kind.EXPERT_LOOP if dispatched else Kind.GRAPH_BREAK}
    assert ('set_experts_implementation("grouped_mm")' in str(report)) == dispatched


def test_the_hint_for_experts_is_an_implementation_that_transformers_has():
    moe = pytest.importorskip("transformers.integrations.moe")
    assert "grouped_mm" in moe.ALL_EXPERTS_FUNCTIONS
    from transformers import PreTrainedModel

    assert callable(PreTrainedModel.set_experts_implementation)


@torch.library.custom_op("test_explain::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


product.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("test_explain::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


same.register_fake(torch.empty_like)


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
    "an operator": (lambda x: F.linear(same(F.linear(x, W)), D), [BETWEEN.format("torch.ops.test_explain.same")]),
    "a function": (lambda x: F.linear(Traced.apply(F.linear(x, W) + 1)[None], D), [BETWEEN.format("Traced")]),
    "products": (lambda x: product(F.silu(product(x, W)), D), [PRODUCT.format("torch.ops.test_explain.product")] * 2),
    "the second product": (
        lambda x: product(F.silu(F.linear(x, W)), D),
        [PRODUCT.format("torch.ops.test_explain.product")],
    ),
    "a norm of a sum": (lambda x: F.linear(same(x + F.linear(F.linear(x, W), D)), W), []),
    "at an end": (lambda x: same(F.linear(F.linear(same(x), W), D)), []),
    "torch's own": (lambda x: F.linear(torch.fft.rfft(F.linear(x, W)).abs(), D[:, :9]), []),
    "in a checkpoint": (
        lambda x: checkpoint(lambda x: F.linear(same(F.linear(x, W)), D), x, use_reentrant=False),
        [BETWEEN.format("torch.ops.test_explain.same")],
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_calls_that_are_not_looked_into_are_named_where_they_stand_between_products(name, tmp_path):
    fn, wanted = HIDDEN[name]
    report = explain(fn, torch.randn(4, 8))
    hidden = [site for site in report.unread if site.kind is Kind.OPAQUE]
    assert [site.reason for site in hidden] == wanted and not any(site.is_mlp for site in hidden)
    for shown in (" ".join(str(report).split()), read(report.to_html(tmp_path / "report.html"))[0]):
        assert ("register it: torch_fused_ops.register_gemm" in shown) == bool(wanted)


def test_the_policys_memory_level_stands_with_each_site():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))
    policy = FusionPolicy(memory={"0": "fp8", "[12]": "input"})
    report = explain(model, torch.randn(4, 8), policy=policy)
    assert [site.memory for site in report.sites] == ["fp8", "input", "input", "free"]
    rows = str(report).splitlines()[2:5]
    for row, end in zip(rows, ("memory='fp8'", "memory='input'", "from gelu"), strict=True):
        assert row.endswith(end)
    for memory in ("off", "fp8", "tiled:2"):
        text = str(explain(model, torch.randn(4, 8), policy=FusionPolicy(memory=memory)))
        assert f"memory={memory!r}" in text
    with torch.no_grad():  # nothing is kept
        assert {site.memory for site in explain(model, torch.randn(4, 8), policy=policy).sites} == {""}
    with torch._functorch.config.patch(activation_memory_budget=0.5):  # which decides alone
        assert {site.memory for site in explain(model, torch.randn(4, 8), policy=policy).sites} == {""}


UNKNOWN = {
    "mish": F.mish,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "near": lambda x: x * torch.sigmoid(1.7 * x),
    "shifted": lambda x: F.gelu(x) + x,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_hint_to_register_works(name):
    fn = UNKNOWN[name]

    def mlp(x, w):
        return fn(x @ w) @ w

    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    (site,) = explain(mlp, x, w).sites
    assert site.op is None and "register_activation" in site.hint
    shown = " ".join(str(explain(mlp, x, w)).split())
    assert f"→ {site.hint} ({site.kind.row})" in shown, "beside the refusal"
    register_activation(f"hinted_{name}", fn)
    (site,) = explain(mlp, x, w).sites
    assert (site.op, site.activation, site.hint) == ("fused::bias_act", f"hinted_{name}", "")


def test_no_hint_where_registering_would_not_help():
    def gated(x, w, v):
        return (F.mish(x @ w) * (x @ v)) @ w

    w = nn.Parameter(torch.randn(8, 8))
    sites = explain(gated, torch.randn(4, 8), w, nn.Parameter(torch.randn(8, 8))).sites
    assert sites
    for site in sites:
        assert site.op is None and "register_activation" not in site.hint
    (site,) = explain(Block(), torch.randn(4, 8), policy=FusionPolicy(exclude=("mlp", "odd"))).sites[:1]
    assert "exclude" in site.hint


def test_explaining_does_not_use_up_the_models_compilations():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
    for _ in range(20):
        assert explain(model, x).sites
    torch.compile(model, fullgraph=True, backend="eager")(x)  # raises where Dynamo's limit is reached


def test_nothing_found_says_what_to_look_at():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    report = explain(model, torch.randn(2, 8))
    assert report.sites == () and "another op (a norm" in str(report) and repr(report) == str(report)

    def broken(x):
        y = x @ x
        torch._dynamo.graph_break()
        return torch.relu(y) @ x

    assert "graph break" in str(explain(broken, torch.randn(4, 4)))


def test_bad_arguments_are_named_and_errors_are_the_models_own():
    raises(KeyError, "mine", explain, {}.__getitem__, "mine")
    raises(TypeError, "model=3", explain, 3)
    with pytest.raises(TypeError, match=r"model=<class .*Block'> is a class: it must be an instance of it, Block\(…\)"):
        explain(Block, torch.randn(4, 8))
    raises(TypeError, "is a class: it must be an instance of it", verify, Block, torch.randn(4, 8))
    raises(TypeError, "is a class: it must be an instance of it", plan, Block, torch.randn(4, 8), memory="1GiB")
    raises(TypeError, "policy='free'", explain, Block(), torch.randn(4, 8), policy="free")


@pytest.mark.codegen_is_slow
def test_activations_that_no_gemm_reads():
    def norm_former(s, x):
        h = s.up(x)
        return s.down(s.norm(F.gelu(h))) + h.square().mean()

    model = Net(norm_former, up=nn.Linear(8, 16), norm=nn.LayerNorm(16), down=nn.Linear(16, 8))
    report = explain(model, torch.randn(4, 8))
    (seen,) = report.unread
    assert report.sites == () and not seen.is_mlp
    assert (seen.spelling, seen.users) == (("gelu",), ("layer_norm",))
    assert "gelu is not a site: no GEMM reads it, but layer_norm (test_explain.py:" in str(report)
    assert json.loads(report.to_json())["unread"][0]["users"] == ["layer_norm"]
    with record() as recorded:
        torch.compile(model, backend="fused")(torch.randn(4, 8))
    assert [site.spelling for site in recorded.unread] == [("gelu",)]


def test_activations_behind_what_is_no_gemm_and_after_a_break():
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


again = functools.partial(checkpoint, use_reentrant=False)


def parts(body):
    return Net(body, gate=nn.Linear(8, 16), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def swiglu(gate, up):
    return F.silu(gate) * up


CHECKPOINT = "tag_activation_checkpoint"
CUT = {
    "activation": (lambda s, x: s.down(again(F.gelu, s.up(x))), "gelu"),
    "by hand": (lambda s, x: s.down(again(lambda h: 0.5 * h * (1 + torch.erf(h / 2**0.5)), s.up(x))), "erf, add, mul"),
    "up": (lambda s, x: s.down(F.gelu(again(s.up, x) + 1)), "gelu"),
    "activation, down": (lambda s, x: again(lambda h: s.down(F.gelu(h)), s.up(x)), "gelu"),
    "up, activation": (lambda s, x: s.down(again(lambda x: F.gelu(s.up(x)), x)), "gelu"),
    "down": (lambda s, x: again(s.down, swiglu(s.gate(x), s.up(x))), "silu, mul"),
    "gated activation": (lambda s, x: s.down(again(swiglu, s.gate(x), s.up(x))), "silu, mul"),
    "one up": (lambda s, x: s.down(swiglu(again(s.gate, x), s.up(x))), "silu, mul"),
    "both ups": (lambda s, x: s.down(swiglu(*again(lambda x: (s.gate(x), s.up(x)), x))), "silu, mul"),
    "activation of the gate": (lambda s, x: s.down(again(F.silu, s.gate(x)) * s.up(x)), "silu, mul"),
    "glu": (lambda s, x: s.down(again(F.glu, F.linear(x, torch.cat((s.gate.weight, s.up.weight))))), "glu"),
    "a body in a body": (lambda s, x: again(lambda x: s.down(again(F.gelu, s.up(x))), x), "gelu"),
    "two bodies": (lambda s, x: again(s.down, again(lambda x: F.gelu(s.up(x)), x)), "gelu"),
}


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=2)
@pytest.mark.parametrize("part", CUT)
def test_a_checkpoint_around_a_part_of_an_mlp_is_the_reason(part):
    """Dynamo puts a checkpoint's body into a graph of its own, and a site is of one graph."""
    body, spelling = CUT[part]
    reports = [explain(parts(body), torch.randn(4, 8))]
    if part in ("activation", "activation, down", "both ups"):  # compiling takes a second
        with record() as recorded:
            torch.compile(parts(body), backend="fused")(torch.randn(4, 8))
        reports.append(recorded)
    for report in reports:
        (seen,) = report.unread
        assert report.sites == () and ", ".join(seen.spelling) == spelling
        assert seen.reason == f"the boundary of {CHECKPOINT} lies between it and a GEMM"
        assert f"{spelling} is not a site: {seen.reason} (test_explain.py:" in str(report)
        assert seen.users == ("linear",) and seen.op is None


WHOLE = {
    "inside": lambda s, x: again(lambda x: s.down(F.gelu(s.up(x))), x),
    "gated, inside": lambda s, x: again(lambda x: s.down(swiglu(s.gate(x), s.up(x))), x),
    "inside, one after another": lambda s, x: again(
        lambda x: s.down(F.gelu(s.up(x))), again(lambda x: s.down(F.silu(s.up(x))), x)
    ),
    "beside": lambda s, x: s.down(F.gelu(s.up(x))) + again(lambda x: s.down(s.up(x)), x),
    "inside, read outside, too": lambda s, x: (lambda y, h: y + s.down(h))(
        *again(lambda x: (lambda h: (s.down(h), h))(F.gelu(s.up(x))), x)
    ),
}


@pytest.mark.parametrize("body", WHOLE)
def test_a_checkpoint_around_the_whole_or_beside_is_none(body):
    report = explain(parts(WHOLE[body]), torch.randn(4, 8))
    assert report.unread == () and len(report.sites) == 1 + ("one after" in body)
    assert all(site.op for site in report.sites)
    assert explain(parts(lambda s, x: s.down(again(lambda h: h + 1, s.up(x)))), torch.randn(4, 8)).unread == ()


def test_a_site_that_also_reads_across_a_boundary_is_listed_once():
    def body(s, x):
        return again(lambda x, up: s.down(F.silu(s.gate(x)) * up), x, s.up(x))

    report = explain(parts(body), torch.randn(4, 8))
    (site,) = report.sites
    assert report.unread == () and site.op == "fused::bias_act", "of this side of the boundary"
    assert site.reason.endswith("mul by another tensor stays behind it")


def test_activations_in_other_operators_bodies():
    w, d = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    def branches(x):
        return F.linear(torch.cond(x.sum() > 0, F.gelu, F.silu, (F.linear(x, w),)), d)

    def attention(x):
        return again(lambda q, k: F.silu(q) @ k.t(), F.linear(x, w), F.linear(x, w))

    def normed(x):
        return F.linear(F.layer_norm(again(lambda x: F.gelu(F.linear(x, w)), x), (16,)), d)

    def mapped(x):
        return F.linear(torch._higher_order_ops.map(F.gelu, F.linear(x, w)), d)

    reasons = {
        branches: ["not an MLP: no GEMM reads it, but cond"] * 2,
        attention: [],
        normed: ["not an MLP: no GEMM reads it, but layer_norm"],
        mapped: ["the boundary of map_impl lies between it and a GEMM"],
    }
    for fn, wanted in reasons.items():
        assert [site.reason for site in explain(fn, torch.randn(4, 8)).unread] == wanted


def test_an_activation_before_a_linear_layer_is_listed_behind_convolutions():
    norm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    (site,) = explain(norm, torch.randn(2, 3, 8, 8)).unread
    assert site.reason == "not an MLP: it reads batch_norm, which no GEMM with weights has produced"
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 3, 3))
    assert explain(convolutions, torch.randn(1, 3, 8, 8)).unread == ()


def test_a_disabled_model_is_said():
    model = Block()
    model.forward = torch.compiler.disable(model.forward)
    text = str(explain(model, torch.randn(4, 8)))
    assert "Dynamo captured no graph of the model" in text and "torch.compiler.disable" in text
    assert "unknown" not in text and "between the products" not in text


def test_a_disabled_mlp_is_a_graph_break():
    """Dynamo captures no graph before it."""
    block = Block()
    block.forward = torch.compiler.disable(block.forward)
    (graph_break,) = explain(Net(lambda s, x: s.block(x) + 1, block=block), torch.randn(4, 8)).breaks
    assert "torch.compiler.disable" in graph_break.reason


def test_a_configuration_s_constructor_is_no_call_that_hides_a_product():
    """torchao's float8 makes its ``LinearMMConfig`` in the graph, of tensors' own settings."""

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


def test_exclude_that_matches_nothing_is_said():
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


def test_dropouts_without_mlps_are_summed_up_alone():
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
def test_paths_are_as_the_model_names_its_modules(by_dynamo: str, by_the_model: str) -> None:
    assert module_path(by_dynamo) == by_the_model


def test_a_pattern_fits_below_a_class_with_a_getattr_of_its_own() -> None:
    """PEFT's and diffusers' have one, and so have checkpoint wrappers."""

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
