"""Compile caches return code of the same version and the same policy only."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import MLP, Net, python
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import codecache
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import compat

# The program is "upgraded" by editing one formula in a copy of the package: relu becomes twice relu, both ways.
PROGRAM = """
import torch
import torch_fused_ops
from torch._dynamo.utils import counters
x = torch.ones(8, requires_grad=True)
y = torch.compile(lambda x: torch.ops.fused.bias_act(x, None, None, "relu") + 1)(x) - 1
y.sum().backward()
hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(y[0].item(), x.grad[0].item(), "hit" if hits else "miss")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the installed package, to edit the copy."""
    import shutil

    import torch_fused_ops
    import torch_fused_ops.lowerings as lowerings

    target = tmp_path / "site" / "torch_fused_ops"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(torch_fused_ops.__file__).parent, target, ignore=ignore)
    if not (target / "lowerings").exists():
        shutil.copytree(Path(lowerings.__file__).parent, target / "lowerings", ignore=ignore)
    return target


def run(package: Path, cache: Path) -> tuple[float, float, str]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    caches |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # PYTHONPATH puts the copy before an editable install's finder. The option -I would ignore PYTHONPATH.
    printed = python("-c", PROGRAM, cwd=cache.parent, PYTHONPATH=str(package.parent), **caches)
    value, grad, hit = printed.split()[-3:]
    return float(value), float(grad), hit


def upgrade(package: Path) -> None:
    """Double relu's value and derivative."""
    path = package / "activations.py"
    text = path.read_text()
    for old, new in (
        ('"relu",\n            torch.relu,', '"relu",\n            lambda x: 2.0 * torch.relu(x),'),
        ("torch.where(x <= 0, 0.0, grad)", "torch.where(x <= 0, 0.0, 2.0 * grad)"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.slow
def test_an_upgrade_does_not_get_old_code(package: Path, tmp_path: Path) -> None:
    """The program calls an operator, so only the lowering and the derivative change, and no pass runs."""
    cache = tmp_path / "cache"
    assert run(package, cache) == (1.0, 1.0, "miss")
    assert run(package, cache) == (1.0, 1.0, "hit")
    upgrade(package)
    assert run(package, cache) == (2.0, 2.0, "miss")


def by_weights(s: Any, x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weights[0])), weights[1])


def two_blocks(owns: bool = False) -> nn.Module:
    """Return two blocks whose graphs are equal. Weights are arguments or, with ``owns``, parameters of the blocks."""
    enc, dec = (MLP(64, 128) if owns else Net(by_weights) for _ in range(2))
    return Net(by_weights, enc=enc, dec=dec)


def run_enc(model: Any, *args: Tensor) -> Tensor:
    return model.enc(*args)  # type: ignore[no-any-return]


def run_dec(model: Any, *args: Tensor) -> Tensor:
    return model.dec(*args)  # type: ignore[no-any-return]


RUNS = {"enc": run_enc, "dec": run_dec}


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, requires_grad=True) for s in ((64, 64), (128, 64), (64, 128))]


def compiled(way: str, fn: Callable[..., Tensor], policy: tfo.FusionPolicy) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    if way == "fused":
        return torch.compile(fn, backend="fused", options={"policy": policy})
    if way == "options":
        return torch.compile(fn, options=tfo.compile_options(policy))
    tfo.enable(policy)
    return torch.compile(fn)


@pytest.fixture
def left_clean() -> Iterator[None]:
    yield
    tfo.disable()
    torch._dynamo.reset()
    assert getattr(inductor_config, "pre_grad_pass_timing", "default") == "default"


class _Stop(BaseException):
    pass


@pytest.fixture
def key_of(monkeypatch: pytest.MonkeyPatch, left_clean: None) -> Callable[..., str]:
    """Return a function that computes AOTAutograd's cache key of a compilation, and stops the compilation."""
    keys: list[str] = []
    original = autograd_cache.autograd_cache_key

    def stopping(*args: Any, **kwargs: Any) -> Any:
        keys.append(original(*args, **kwargs)[0])
        raise _Stop

    monkeypatch.setattr(autograd_cache, "autograd_cache_key", stopping)

    def key(way: str, fn: Callable[..., Tensor], policy: tfo.FusionPolicy, model: nn.Module | None = None) -> str:
        args = arguments()[: 3 if model is None else 1]
        with torch._functorch.config.patch(enable_autograd_cache=True), pytest.raises(_Stop):
            compiled(way, fn, policy)(model or two_blocks(), *args)
        return keys[-1]

    return key


@pytest.mark.parametrize("way", ["fused", "options", "enable"])
def test_pattern_decisions_are_in_the_key(key_of: Callable[..., str], way: str) -> None:
    mixed, without_patterns = tfo.FusionPolicy(memory={"enc": "fp8"}), tfo.FusionPolicy()
    assert key_of(way, run_enc, without_patterns) == key_of(way, run_dec, without_patterns)
    assert key_of(way, run_enc, mixed) == key_of(way, run_enc, mixed) != key_of(way, run_dec, mixed)
    replacing = tfo.FusionPolicy(checkpoints={"enc": "replace"})
    moving = replacing if not compat.has_offload_operators() else tfo.FusionPolicy(offload={"enc": True})
    assert len({key_of(way, run_enc, policy) for policy in (replacing, without_patterns)}) == 2
    for policy in {replacing, moving}:
        assert key_of(way, run_enc, policy) not in (key_of(way, run_dec, policy), key_of(way, run_enc, mixed))


def test_a_called_operators_decision_is_in_the_key(key_of: Callable[..., str]) -> None:
    def run(which: str) -> Callable[..., Tensor]:
        def call(model: Any, x: Tensor, *_: Tensor) -> Tensor:
            return getattr(model, which)(x)  # type: ignore[no-any-return]

        return call

    enc, dec = (Net(lambda s, x: tfo.functional.bias_act(x, activation="gelu")) for _ in range(2))
    model = Net(by_weights, enc=enc, dec=dec)
    policy = tfo.FusionPolicy(exclude=("enc",))
    assert key_of("fused", run("enc"), policy, model) != key_of("fused", run("dec"), policy, model)


@pytest.mark.parametrize("way", ["fused", "enable"])
def test_a_level_requested_by_a_call_is_in_the_key(key_of: Callable[..., str], way: str) -> None:
    def call(memory: str) -> Callable[..., Tensor]:
        return lambda model, x, *_: tfo.functional.bias_act(x, activation="gelu", memory=memory)

    free, fp8, same = (key_of(way, call(memory), tfo.FusionPolicy()) for memory in ("free", "fp8", "fp8"))
    assert free != fp8 == same


def test_donated_buffers_are_in_the_key() -> None:
    """Code that overwrites saved tensors must not run twice. PyTorch's own key lacks the setting (docs/upstream.md)."""
    keys: list[str] = []
    for donated in (True, True, False):
        with inductor_config.patch(tfo.compile_options()), torch._functorch.config.patch(donated_buffer=donated):
            keys.append(codecache.compiled_fx_graph_hash(torch.fx.symbolic_trace(nn.Identity()), [], {}, [])[0])
    assert keys[0] == keys[1] != keys[2]


def test_late_passes_are_rejected_with_patterns() -> None:
    """Cache keys would miss a late pass's decisions, so torch raises if the user sets the timing to "late"."""
    from torch_fused_ops.lowerings import passes

    by_paths = tfo.FusionPolicy(memory={"enc": "fp8"})
    has_timing = hasattr(inductor_config, compat.TIMING)
    assert (passes.PreGradPass(by_paths).uuid() is None) == has_timing and passes.Partitioner(by_paths).uuid()
    if has_timing:
        args = (two_blocks(), *arguments())
        options = tfo.compile_options(by_paths, {"pre_grad_pass_timing": "late"})
        with pytest.raises(RuntimeError, match="pre_grad_pass_timing to 'early'"):
            torch.compile(run_enc, options=options)(*args)


def gradients(fn: Callable[..., Tensor], owns: bool = False) -> list[Tensor]:
    args = arguments()[: 1 if owns else 3]
    model = two_blocks(owns)
    requested = [*args, *model.parameters()]
    grads = torch.autograd.grad(fn(model, *args).square().sum(), requested, allow_unused=True)
    return [grad for grad in grads if grad is not None]


def served(policy: tfo.FusionPolicy, which: str, owns: bool, cached: bool) -> tuple[list[Tensor], int, int]:
    """Return a module's gradients, the bytes that it saves for backward, and the hits in AOTAutograd's cache."""
    saved: list[Tensor] = []
    counters.clear()
    with (
        inductor_config.patch(fx_graph_cache=cached),
        torch._functorch.config.patch(enable_autograd_cache=cached),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        grads = gradients(compiled("fused", RUNS[which], policy), owns)
    return grads, sum(t.nbytes for t in saved), counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
def test_random_policies_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_clean: None) -> None:
    """Each module gets code for its own policy, independent of earlier entries in the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    chance, levels = random.Random(0), ("free", "fp8", "input", "tiled:2")
    alone: dict[Any, tuple[list[Tensor], int]] = {}
    hits = 0
    for _ in range(4):
        first, second = (
            tfo.FusionPolicy(
                memory={"enc": chance.choice(levels), "*": chance.choice(levels)},
                exclude=chance.choice(((), ("enc",), ("dec",))),
            )
            for _ in range(2)
        )
        owns = chance.choice((False, True))
        for policy, which in ((first, "enc"), (second, "dec"), (first, "dec"), (second, "enc"), (first, "enc")):
            grads, nbytes, hit = served(policy, which, owns, cached=True)
            key = policy.decisions((which,)), owns and which
            if key not in alone:
                alone[key] = served(policy, which, owns, cached=False)[:2]
            torch.testing.assert_close(grads, alone[key][0])
            assert nbytes == alone[key][1], (policy, which)
            hits += hit
    assert hits >= 4, "each repeated pair of policy and module is a hit"
