"""Steps of training of random trees of modules are eager's, at every memory level, in float64.

    pytest tests/lowerings/test_trees.py            a fixed sample
    pytest -m slow tests/lowerings/test_trees.py    1,000 trees, in four parts

Graphs are interpreted, not compiled. A failing tree prints itself.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trees
from torch import Tensor
from trees import TOKENS, WIDTH, Tree, tree

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings import passes
from torch_fused_ops.tools.verify import interpreted

LEVELS = ("off", "free", "fp8", "input", "tiled:2")
SAMPLE = range(18)
PARTS = [range(start, start + 250) for start in range(100, 1100, 250)]


class CannotBeWritten(Exception):
    """Eager itself raises where a result is written before backward."""


def step(model: Tree, fn: Callable[..., Any], dtype: torch.dtype, write: bool) -> dict[str, Tensor]:
    """What a user sees of a step of this model, called through ``fn``; ``write``: the caller writes what it gets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    column = torch.randn(TOKENS, 1, generator=generator, dtype=dtype).requires_grad_()
    y, *given = fn(model, x, column * 1.0)
    seen = {"result": y.detach().clone(), **{f"given {i}": t.detach().clone() for i, t in enumerate(given)}}
    if write:
        with torch.no_grad():
            for t in given:
                t.add_(1.0)
    (y * torch.randn(y.shape, generator=generator, dtype=dtype)).sum().backward()
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    inputs = {f"gradient of {name}": t.grad for name, t in (("x", x), ("column", column)) if t.grad is not None}
    return seen | {f"buffer {name}": b for name, b in model.named_buffers()} | inputs


def eager(model: Tree, *args: Any) -> Any:
    return model(*args)


def apart(wanted: Tensor, got: Tensor, floor: float) -> float:
    """The relative distance in the 2-norm; relative to ``floor`` where there is nearly nothing."""
    return float((wanted - got).detach().norm()) / max(float(wanted.detach().norm()), floor)


def compare(model: Tree, policy: FusionPolicy, write: bool, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """How far each of a step's tensors is from eager's."""
    model = model.to(dtype)
    wanted = step(copy.deepcopy(model), eager, dtype, write)
    got = step(copy.deepcopy(model), interpreted(policy, exact=dtype is torch.float64), dtype, write)
    assert wanted.keys() == got.keys()
    floor = 1e-3 * max(float(t.norm()) for name, t in wanted.items() if name.startswith("gradient"))
    return {name: apart(t, got[name], floor) for name, t in wanted.items()}


def policies(r: random.Random, model: Tree) -> Iterator[FusionPolicy]:
    """Every level, and two mappings from random modules to random levels."""
    paths = [name for name, _ in model.named_modules()]
    yield from (FusionPolicy(memory=level) for level in LEVELS)
    for _ in range(2):
        patterns = r.sample(paths, min(len(paths), r.choice((1, 2, 4))))
        yield FusionPolicy(memory={pattern: r.choice(LEVELS[1:]) for pattern in patterns})


@contextmanager
def no_pass_may_fail() -> Iterator[None]:
    """A failure inside a pass is one of the test, and not logged."""
    guarded = passes._guarded
    passes._guarded = lambda graph_pass, policy, run: run()
    try:
        yield
    finally:
        passes._guarded = guarded


def bears_writing(model: Tree, fn: Callable[..., Any]) -> bool:
    """Whether a step works in which the caller writes what it gets: nothing that is kept for backward is written."""
    try:
        step(copy.deepcopy(model), fn, torch.float32, write=True)
    except RuntimeError:
        return False
    return True


def check(seed: int, only: int | None = None, write: bool = True) -> None:
    """Assert that all is well with the tree of this number, with one of its ``policies`` or all.

    Its results are written where that works in eager mode and in plain torch.compile, which may keep a result that
    eager mode does not (relu's input, for one: tree 111).
    """
    model, r = tree(seed), random.Random(seed)
    write = write and bears_writing(model, eager)
    with no_pass_may_fail():
        for policy in list(policies(r, model))[slice(only, None if only is None else only + 1)]:
            try:
                off = {name: by for name, by in compare(model, policy, write).items() if not by < 1e-9}
            except Exception as error:
                if write and not bears_writing(model, interpreted(None)):
                    check(seed, only, write=False)
                    return
                raise AssertionError(f"tree({seed}), {policy}, write={write}:\n{model}") from error
            assert not off, f"tree({seed}), {policy}, write={write}: {off}\n{model}"
        check_rounding(seed, model, write)


def check_rounding(seed: int, model: Tree, write: bool) -> bool:
    """Where the first MLP alone keeps float8, what comes behind it has exact gradients; whether it did keep that."""
    distances = compare(model, FusionPolicy(memory={"first": "fp8"}), write, torch.float32)
    behind = {name: by for name, by in distances.items() if not name.startswith(("gradient of first", "gradient of x"))}
    off = {name: by for name, by in behind.items() if not by < 1e-4}
    assert not off, f"tree({seed}), the first MLP's rounding is seen: {off}\n{model}"
    return max(distances.values()) > 1e-3


@pytest.mark.covering(every=20)
@pytest.mark.parametrize("seed", SAMPLE)
def test_sample(seed: int) -> None:
    """One level or mapping each, all of them in turn."""
    check(seed, only=seed % 6)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.start}-{part.stop}")
def test_many(part: range) -> None:
    failures = []
    for seed in part:
        torch._dynamo.reset()
        try:
            check(seed)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n\n".join(failures[:3]) + f"\n{len(failures)} of {len(part)} trees"


@pytest.mark.slow
def test_rounding_is_there_to_be_seen() -> None:
    """Of these trees the first MLP keeps float8 in some, and in others something else reads what it would round."""
    assert {check_rounding(seed, tree(seed), write=False) for seed in range(12)} == {True, False}


def test_trees_are_built_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample holds each kind of module, and writes results of some trees."""
    built, kinds = set(), {*trees.LEAVES, *trees.NODES, trees.Updated}

    def noted(kind: Any) -> Any:
        return lambda *drawn: built.add(kind) or kind(*drawn)

    monkeypatch.setattr(trees, "LEAVES", tuple(map(noted, trees.LEAVES)))
    monkeypatch.setattr(trees, "NODES", tuple(map(noted, trees.NODES)))
    monkeypatch.setattr(trees, "Updated", noted(trees.Updated))
    for seed in range(100):
        tree(seed)
    assert built == kinds
