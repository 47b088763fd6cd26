"""Reports: what explain says, what it leaves unchanged, and how a report is shown."""

import copy
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_fused_ops.explain import Report, Site, explain
from torch_fused_ops.policy import FusionPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.odd = nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 8))

    def forward(self, x):
        return self.odd(self.mlp(self.norm(x)))


def gate(x, w):
    return (F.scaled_dot_product_attention(x @ w, x, x) * torch.sigmoid(x @ w)) @ w


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_sites():
    report = explain(Block(), torch.randn(4, 8))
    fused, left = report.sites
    assert (fused.op, fused.activation, fused.users) == ("fused::bias_act", "gelu", ("linear",))
    assert fused.source.startswith("test_explain.py:") and fused.source.endswith(" in mlp")
    assert (left.op, left.activation) == (None, None)
    assert left.source.endswith(" in odd") and left.reason.endswith("is no activation of the table")
    assert report.summary == "1 of 2 MLP sites fused (1 graph)"


def test_functions_and_other_sites():
    report = explain(gate, torch.randn(4, 4), torch.randn(4, 4))
    (site,) = report.sites
    assert site.op is None and site.reason.startswith("not an MLP: ") and not site.is_mlp
    assert report.summary == "0 of 0 MLP sites fused, 1 not MLPs (1 graph)"


def test_graph_breaks():
    model = Block()

    def broken(x):
        y = model.mlp(x)
        torch._dynamo.graph_break()
        return model.mlp(y)

    report = explain(broken, torch.randn(4, 8))
    assert [site.op for site in report.sites] == ["fused::bias_act"] * 2
    assert report.graphs == 2


def test_keyword_arguments_and_policy():
    report = explain(Block(), x=torch.randn(4, 8), policy=FusionPolicy(exclude=("mlp",)))
    assert report.sites[0].reason == "the policy excludes 'mlp'"


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


def test_compiled_and_repeated():
    model, x = Block(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    for _ in range(10):  # more often than Dynamo recompiles one function by default
        assert len(explain(compiled, x).sites) == 2


def test_shapes_seen_here_do_not_make_later_compilations_dynamic():
    model, seen = Block(), []
    explain(model, torch.randn(4, 8))

    def backend(gm, inputs):
        seen.append(any(isinstance(i, torch.SymInt) for i in inputs))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(6, 8))
    assert seen == [False]


def test_errors_are_the_models_own():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(fails, torch.randn(2))


SITES = (
    Site("fused::glu", "silu", "model.py:12 in layers.0.mlp", "proved from silu, mul", ("linear", "linear")),
    Site(None, None, "model.py:30 in layers.0.attn", "not an MLP: combined with <softmax>", ("linear",)),
    Site(None, "gelu", "model.py:40 in head", "sum also reads it", ("linear", "sum")),
)


def test_print():
    lines = str(Report(SITES)).splitlines()
    assert lines[0].split() == ["operator", "activation", "source", "read", "by", "reason"]
    column = lines[0].index("reason")
    assert [line[column:] for line in lines[2:5]] == [site.reason for site in SITES]
    assert "linear ×2" in lines[2]
    assert lines[-1] == "1 of 2 MLP sites fused, 1 not MLPs (1 graph)"
    assert str(Report(())).startswith("0 of 0 MLP sites fused (1 graph)\n")


def test_json():
    parsed = json.loads(Report(SITES).to_json())
    assert [Site(**{**site, "users": tuple(site["users"])}) for site in parsed["sites"]] == list(SITES)


def test_html(tmp_path):
    path = tmp_path / "report.html"
    Report(SITES, graphs=2).to_html(path)
    text = path.read_text(encoding="utf-8")
    assert "&lt;softmax&gt;" in text and "<softmax>" not in text

    class Balanced(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open_tags = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link"):
                self.open_tags.append(tag)
            assert not {"src", "href"} & {name for name, _ in attrs}  # self-contained

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    parser = Balanced()
    parser.feed(text)
    assert parser.open_tags == []


def test_import_is_light():
    code = "import sys, torch_fused_ops.explain; print([m for m in sys.modules if m.startswith('torch_fused_ops.low')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_explaining_does_not_use_up_the_models_compilations():
    model, x = Block(), torch.randn(4, 8)
    for _ in range(20):
        assert explain(model, x).sites
    torch.compile(model, fullgraph=True, backend="eager")(x)  # raises where Dynamo's limit is reached


def test_nothing_found_says_what_to_look_at():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    report = explain(model, torch.randn(2, 8))
    assert report.sites == () and "something else (a norm" in str(report) and repr(report) == str(report)

    def broken(x):
        y = x @ x
        torch._dynamo.graph_break()
        return torch.relu(y) @ x

    assert "graph break" in str(explain(broken, torch.randn(4, 4)))


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match="model=3"):
        explain(3)
    with pytest.raises(TypeError, match="policy='free'"):
        explain(Block(), torch.randn(4, 8), policy="free")
