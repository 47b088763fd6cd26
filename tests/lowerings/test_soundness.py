"""What fuzzing and adversarial reading have found in the recognizer, each shrunk to the smallest program.

Every program here was once rewritten into one that computes something else, or made the pass fail. Now it is left
alone, for the reason named; and compiled, it does what it does without us, gradients and writes included.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functions import Swish

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings.recognize import rewrite

POLICY = FusionPolicy()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@torch.library.custom_op("test_soundness::scale_", mutates_args=("t",))
def scale_(t: torch.Tensor, k: float) -> None:
    t.mul_(k)


def written(write):
    """A function whose sigmoid reads h before it is written, and whose product reads it afterwards."""

    def fn(x, w, d):
        h = F.linear(x, w)
        s = torch.sigmoid(h)
        write(h)
        return F.linear(s * h, d)

    return fn


def by_numpy(h):
    a = h.detach().numpy()
    a += 1


def under_no_grad(x, w, d):
    h = F.linear(x, w)
    with torch.no_grad():
        h.sigmoid_()
    return F.linear(h, d)


def from_inference_mode(x, w, d):
    h = F.linear(x, w)
    with torch.inference_mode():
        u = F.linear(x, w)
    return F.linear(F.gelu(h) * (u + 1), d)


def act(fn):
    return lambda x, w, d: F.linear(fn(F.linear(x, w)), d)


WRITES = {
    "foreach": lambda h: torch._foreach_mul_([h], 2.0),
    "out= in a tuple": lambda h: torch.sort(
        h.detach().clone(), dim=-1, out=(h.detach(), torch.empty(h.shape, dtype=torch.long))
    ),
    "custom operator": lambda h: torch.ops.test_soundness.scale_(h, 2.0),
    "custom operator, by keyword": lambda h: torch.ops.test_soundness.scale_(t=h, k=2.0),
    "overload, by keyword": lambda h: torch.ops.aten.add_.Tensor(self=h, other=h),
    "relu_, by keyword": lambda h: torch.relu_(input=h),
    "inplace, by keyword": lambda h: F.relu(input=h, inplace=True),
    "checkpoint": lambda h: torch.utils.checkpoint.checkpoint(lambda t: t.mul_(2.0), h, use_reentrant=False),
    "batch_norm": lambda h: F.batch_norm(h.clone().t(), h[:, 0], h[:, 1], training=True),
    "numpy": by_numpy,
}


def unfused(fn, *args):
    """The graphs that Dynamo makes of fn, after the recognizer, and the sites that it reports."""
    sites = []

    def backend(gm, _):
        sites.extend(rewrite(gm.graph, POLICY))
        gm.recompile()
        return gm.forward

    def run(call):
        given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        out = call(*given)
        out.sum().backward()
        return out, *given, *(a.grad for a in given)

    expected, got = run(fn), run(torch.compile(fn, backend=backend))
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    return sites


def inputs(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen(name):
    x, w, d = inputs((4, 8), (16, 8), (8, 16))
    with torch.no_grad():  # some of these writes autograd does not allow
        sites = []

        def backend(gm, _):
            sites.extend(rewrite(gm.graph, POLICY))
            gm.recompile()
            return gm.forward

        fn = written(WRITES[name])
        expected = fn(x, w, d)
        got = torch.compile(fn, backend=backend)(x, w, d)
    torch.testing.assert_close(got, expected)
    assert all(site.activation != "silu" or site.reason.endswith("as 2·silu(x)") for site in sites)


LEFT_ALONE = {
    "rounding by a large constant": (act(lambda h: F.silu((h + 1.5 * 2**52) - 1.5 * 2**52)), "large terms cancel"),
    "underflow": (act(lambda h: F.silu(h * 1e-300 * 1e300)), "large terms cancel"),
    "tolerance, amplified": (
        act(lambda h: F.silu(h) + 1e6 * (torch.sigmoid(1.0000005 * h) - torch.sigmoid(h))),
        "large terms cancel",
    ),
    "softplus' threshold": (act(lambda h: h * torch.tanh(F.softplus(h, 1, 0.5))), "softplus with the threshold 0.5"),
    "in place under no_grad": (under_no_grad, "sigmoid_ works in place in another grad mode"),
    "from inference mode": (from_inference_mode, "from inference mode, cannot be saved"),
    "maximum": (act(lambda h: torch.maximum(h, torch.zeros_like(h))), "it is relu, but with another gradient"),
    "relu and its mirror": (act(lambda h: h + F.relu(-h)), "it is relu, but with another gradient"),
    "half the sum with abs": (act(lambda h: (h + h.abs()) / 2), "it is relu, but with another gradient"),
    "vmap": (
        lambda x, w, d: torch.vmap(lambda r: F.linear(F.silu(F.linear(r, w)), d))(x),
        "it is computed under a torch.func transform",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    fn, reason = LEFT_ALONE[name]
    (site,) = unfused(fn, *inputs((4, 8), (16, 8), (8, 16)))
    assert site.op is None and reason in site.reason, site.reason


def test_a_view_that_is_written_after_the_graph_read_it():
    """Recorded values are those after a whole run: the operator's own is made without autograd's look at them."""

    def fn(x, p, d):
        g, u = F.linear(x, p).chunk(2, -1)
        v = u.detach()
        v.mul_(torch.tanh(g))
        return F.linear(v, d)

    unfused(fn, *inputs((8,), (32, 8), (8, 16)))


@pytest.mark.parametrize("factor", [4097.0, 17.0])
def test_half_of_the_digits(factor):
    """A sum of GEMMs' outputs is an operand: computed as it stands, rounding included."""
    (site,) = unfused(act(lambda h: (lambda c: F.silu(c - (c - h)))(h * factor)), *inputs((4, 8), (16, 8), (8, 16)))
    assert site.activation == "silu"


def test_packed_in_rows_of_another_shape():
    def fn(x, p, d):
        g, u = F.linear(x, p).view(3, 4, 2, 16).unbind(2)
        return F.linear(F.silu(g) * u, d)

    (site,) = unfused(fn, *inputs((2, 6, 8), (32, 8), (8, 16)))
    assert site.op == "fused::glu"


def test_a_result_that_is_not_computed_last():
    (site,) = unfused(act(Swish.apply), *inputs((4, 8), (16, 8), (8, 16)))
    assert site.activation == "silu"


def test_terms_that_cancel_on_paper_only():
    """1 + tanh is 1 - 1 + 2·sigmoid in the canonical form; scaled up and down again it is no rounding."""
    fn = act(lambda h: 2 * (2 * (1 + torch.tanh(0.5 * h))) * (0.5 * h * 0.5 * 0.5))
    (site,) = unfused(fn, *inputs((4, 8), (16, 8), (8, 16)))
    assert site.activation == "silu"


def test_nothing_times_nothing():
    """Division of what has canceled to 0."""
    unfused(act(lambda h: (h.abs() + h) / 2 * ((h.abs() - h.abs()) / 2) * (h + 0.5)), *inputs((4, 8), (16, 8), (8, 16)))


def test_infinite_bounds_are_none():
    (site,) = unfused(act(lambda h: F.silu(h.clamp(max=float("inf")))), *inputs((4, 8), (16, 8), (8, 16)))
    assert site.activation == "silu"


def test_constants_are_no_mlps():
    fn = act(lambda h: torch.sigmoid(h) * torch.zeros_like(h))
    (site,) = unfused(fn, *inputs((4, 8), (16, 8), (8, 16)))
    assert site.op is None and not site.is_mlp and site.reason == "not an MLP: it is 0 everywhere"


def test_keywords():
    (site,) = unfused(act(lambda h: F.silu(torch.div(input=h, other=2.0))), *inputs((4, 8), (16, 8), (8, 16)))
    assert site.reason.endswith("as silu(0.5·x)")


@pytest.mark.parametrize(
    "fn",
    [
        lambda h: h.clamp(min=0),
        lambda h: torch.clamp_min(h, 0),
        F.relu,
        lambda h: h - h.clamp(max=0),
        lambda h: F.leaky_relu(h, 0.0),
        F.hardtanh,
        lambda h: F.relu(h) ** 2,
        lambda h: h * h.clamp(min=0),
    ],
)
def test_gradients_at_a_kink(fn):
    """Fused or not: the gradient where the input is exactly zero, as in a padded row of a layer without bias."""
    x, w, d = inputs((4, 8), (16, 8), (8, 16))
    with torch.no_grad():
        x[0] = 0
    unfused(act(fn), x, w, d)


@pytest.mark.parametrize("spelling", ["clamp", "maximum", "abs"])
def test_without_gradients_kinks_do_not_matter(spelling):
    fn = {
        "clamp": lambda h: h.clamp(min=0),
        "maximum": lambda h: torch.maximum(h, torch.zeros_like(h)),
        "abs": lambda h: (h + h.abs()) / 2,
    }
    sites = []

    def backend(gm, _):
        sites.extend(rewrite(gm.graph, POLICY))
        return gm.forward

    with torch.no_grad():
        torch.compile(act(fn[spelling]), backend=backend)(*inputs((4, 8), (16, 8), (8, 16)))
    assert [site.activation for site in sites] == ["relu"]
