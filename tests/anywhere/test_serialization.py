"""Modules, policies and caches are pickled, copied and shared with processes and threads; imports may repeat."""

import copy
import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.nn import MLP, FusedMLP, MLPConfig

quietly = functools.partial(harness.python, quiet=True)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "FusedMLP": lambda: FusedMLP(8, 16),
    "FusedMLP gated": lambda: FusedMLP(8, 16, "silu", gated=True, memory="fp8", dropout=0.1),
    "MLP": lambda: MLP(MLPConfig(8)),
    "MLP gated": lambda: MLP(
        MLPConfig(
            8,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            activation_func_clamp_value=2.0,
            glu_linear_offset=1.0,
            memory="input",
        )
    ),
    "MLP of a name": lambda: MLP(MLPConfig(8, add_bias_linear=False, activation_func="relu2")),
}


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def through_a_file(value: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_copied_pickled_and_saved(name: str) -> None:
    module, x = MODULES[name]().eval(), torch.randn(3, 8)
    expected = first(module(x))
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), through_a_file(module, False)]
    for twin in (*twins, copy.copy(module)):
        assert type(twin).__name__ == type(module).__name__
        torch.testing.assert_close(first(twin(x)), expected, rtol=0, atol=0)
        assert repr(twin) == repr(module) and twin.state_dict().keys() == module.state_dict().keys()
    for twin in twins:  # they do not share the module's parameters
        with torch.no_grad():
            [p.zero_() for p in twin.parameters()]
    torch.testing.assert_close(first(module(x)), expected, rtol=0, atol=0)
    for twin in twins:
        twin.load_state_dict(through_a_file(module.state_dict(), True))
        first(twin(x)).sum().backward()  # copies can be trained
        torch.testing.assert_close(first(twin(x)), expected, rtol=0, atol=0)


def test_policies_reports_and_configs_are_copied() -> None:
    policy = tfo.FusionPolicy(memory={"a.*": "fp8", "*": "input"}, exclude=("b",), strict=True)
    report = tfo.explain(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(2, 8))
    assert report.sites
    config = MLPConfig(8, activation_func="silu", gated_linear_unit=True)
    for twin in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert twin(policy) == policy and hash(twin(policy)) == hash(policy)
        assert twin(report).sites == report.sites and twin(report).to_json() == report.to_json()
        assert twin(config) == config


CACHES = """
import sys, torch
import torch_fused_ops as tfo
from torch._dynamo.utils import counters

saves, path, factor = sys.argv[1] == "save", sys.argv[2], float(sys.argv[3])
x = torch.linspace(-2, 2, 64).view(8, 8)
w = torch.eye(8)

def compiled(policy, fn, expected):
    torch._dynamo.reset()
    counters.clear()
    y = torch.linspace(-2, 2, 64).view(8, 8).requires_grad_()
    out = torch.compile(fn, backend="fused", options={"policy": policy})(y)
    torch.testing.assert_close(out, expected(y), rtol=1e-4, atol=1e-5)
    grad, wanted = (torch.autograd.grad(o.sum(), y)[0] for o in (out, expected(y)))
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)
    hit = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return "hit" if hit else "miss"

gelu = torch.nn.functional.gelu
mlp = lambda x: gelu(x @ w) @ w
operator = lambda x: torch.ops.fused.bias_act(x, None, None, "scaled_by_hand")
if not saves:
    info = torch.compiler.load_cache_artifacts(open(path, "rb").read())
    assert info is not None
found = [compiled(tfo.FusionPolicy(strict=True), mlp, mlp)]
if not saves:
    found.append(compiled(tfo.FusionPolicy(strict=True, memory="off"), mlp, mlp))
tfo.register_activation("scaled_by_hand", lambda x: factor * x * x)
found.append(compiled(tfo.FusionPolicy(), operator, lambda x: factor * x * x))
if saves:
    open(path, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(*found)
"""


@pytest.mark.slow  # it compiles five times, in two processes
def test_cache_artifacts_serve_another_process(tmp_path: Path) -> None:
    """The same policy hits the cache. Another policy misses, and so does another activation of the same name."""

    def run(mode: str, factor: float, caches: str) -> list[str]:
        settings = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / caches),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        return quietly("-c", CACHES, mode, tmp_path / "artifacts", factor, **settings).split()

    assert run("save", 1.0, "first") == ["miss", "miss"]
    assert run("load", 3.0, "second") == ["hit", "miss", "miss"]


PROCESSES = """
import torch
import torch.multiprocessing as mp
import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops.nn import FusedMLP

def step(x, seed):
    x = x.clone().requires_grad_()
    y = FF.dropout_add(FF.bias_gelu(x, x[0].detach()), residual=FF.swiglu(x, x), seed=seed, p=0.5)
    y = FF.scaled_masked_softmax(y @ y.mT, causal=True) @ FF.bias_glu(torch.cat((y, y), -1), activation="gelu")
    return [y.detach(), torch.autograd.grad(y.square().sum(), x)[0]]

def spelled(x):
    return torch.nn.functional.gelu(x @ torch.eye(8)) @ torch.eye(8)

compiled = torch.compile(spelled, backend="fused", options={"policy": tfo.FusionPolicy(strict=True)})

def child(queue, module):
    # OpenMP's threads do not survive a fork, and even F.gelu would wait for them forever. Loaders' workers do the same.
    torch.set_num_threads(1)
    x, seed = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([3])
    with torch.no_grad():
        module.fc1.weight.mul_(2)  # shared with the parent
    queue.put([t.numpy().copy() for t in (*step(x, seed), compiled(x))])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return FF.bias_gelu(torch.full((8,), float(i)))

if __name__ == "__main__":
    x, seed = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([3])
    expected = step(x, seed)  # the parent has used them
    torch.testing.assert_close(compiled(x), spelled(x))
    for method in ("fork", "forkserver", "spawn"):
        context, module = mp.get_context(method), FusedMLP(8, 16).share_memory()
        before = module.fc1.weight.detach().clone()
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, module))
        process.start()
        found = [torch.from_numpy(t) for t in queue.get(timeout=60)]
        process.join()
        assert process.exitcode == 0, method
        torch.testing.assert_close(found, [*expected, spelled(x)])
        torch.testing.assert_close(module.fc1.weight, 2 * before)
        print(method)
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader)), torch.stack([Data()[i] for i in range(4)]))
"""


@pytest.mark.slow
def test_children_of_every_start_method_compute_the_same(tmp_path: Path) -> None:
    """Child processes run operators, shared modules, data loaders, and functions that the parent compiled."""
    (tmp_path / "program.py").write_text(PROCESSES)  # a file, which spawned children import
    assert quietly(tmp_path / "program.py").split() == ["fork", "forkserver", "spawn"]


THREADS = """
import importlib, threading, traceback
import torch

COUNT, failed = 8, []
barrier = threading.Barrier(COUNT)

def thread(run):
    def guarded(i):
        try:
            run(i)
        except BaseException:
            failed.append(traceback.format_exc())
            barrier.abort()
    return guarded

def everywhere(run):
    threads = [threading.Thread(target=thread(run), args=(i,)) for i in range(COUNT)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed, failed[0]

outs = [None] * COUNT

def first_use(i):
    '''All threads import and call for the first time at once.'''
    barrier.wait()
    import torch_fused_ops as tfo
    from torch_fused_ops import functional as FF
    from torch_fused_ops.nn import FusedMLP
    x = torch.linspace(-2, 2, 48).view(6, 8).requires_grad_()
    y = FF.dropout_add(FF.bias_gelu(x, memory="fp8"), residual=FF.swiglu(x, x), seed=torch.tensor([3]), p=0.5)
    y = FF.scaled_masked_softmax(y @ y.mT, causal=True) @ FF.bias_glu(torch.cat((y, y), -1), activation="gelu")
    outs[i] = [y.detach(), torch.autograd.grad(y.square().sum(), x)[0]]
    barrier.wait()
    if i % 2:
        importlib.import_module("torch.distributed.tensor")
    lowering = importlib.import_module("torch._inductor.lowering")
    assert torch.ops.fused.bias_act.default in lowering.lowerings
    assert "torch_fused_ops" in torch.compiler.config.cache_key_tag

everywhere(first_use)
for out in outs[1:]:
    torch.testing.assert_close(out, outs[0])

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF

def registers(i):
    '''Every thread registers names, one of them shared, and calls.'''
    act = {0: torch.relu, 1: torch.tanh}
    barrier.wait()
    for n in range(6):
        tfo.register_activation(f"of_{i}_{n}", lambda x, k=float(i + n + 1): x * k)
        tfo.register_activation("of_all", FUNCTION)
        x = torch.ones(3, 4)
        torch.testing.assert_close(FF.bias_act(x, activation=f"of_{i}_{n}"), x * (i + n + 1))
        torch.testing.assert_close(FF.bias_act(x, activation="of_all"), x * 5)

FUNCTION = lambda x: 5 * x
# torch 2.11's make_fx replaces CUDA's device guard (_ensureCUDADeviceGuardSet) in CUDA builds that find no device, and
# other threads crash then: eight of torch.tanh, and of make_fx under a lock, end in a segmentation fault without us.
if torch.__version__ >= "2.13" or not torch.backends.cuda.is_built() or torch.cuda.is_available():
    everywhere(registers)
from torch_fused_ops.lowerings import passes
tag = torch.compiler.config.cache_key_tag
assert tag.count("torch_fused_ops") == 1 and tag.endswith(passes.identity()), tag

w = torch.eye(8)

def compiles(i):
    policy = tfo.FusionPolicy(strict=True, memory=("free", "off")[i % 2])
    fn = torch.compile(lambda x: torch.nn.functional.gelu(x @ w) @ w, backend="fused", options={"policy": policy})
    barrier.wait()
    for rows in (4, 5):
        x = torch.randn(rows, 8, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.gelu(x))

torch._dynamo.lookup_backend("fused")  # torch registers entry points without a lock: two first lookups at once fail
everywhere(compiles)
print("done")
"""


@pytest.mark.slow
def test_threads_do_not_interfere() -> None:
    """Threads import, call, register and compile at the same time."""
    assert quietly("-c", THREADS) == "done\n"


AGAIN = """
import importlib, sys
import torch_fused_ops as tfo
import torch
x = torch.randn(3, 4)
y = tfo.functional.bias_gelu(x)
again = importlib.reload(tfo)
assert again is tfo and torch.equal(again.functional.bias_gelu(x), y)
import torch._inductor.lowering as lowering, torch._inductor.config
importlib.reload(tfo)
assert torch.ops.fused.bias_act.default in lowering.lowerings
assert torch.compiler.config.cache_key_tag.count("torch_fused_ops") == 1
tfo.enable(); tfo.enable()
importlib.reload(tfo)
tfo.disable()
assert torch._inductor.config.pre_grad_custom_pass is None
tfo.enable()
print("ends")
"""


@pytest.mark.slow
def test_reloading_and_exiting_while_enabled() -> None:
    """A reload finds the operators registered, and the interpreter exits without output."""
    assert quietly("-c", AGAIN) == "ends\n"


def test_import_hook_stays() -> None:
    """The import hook is not removed: removal could hide a finder from a thread that iterates over sys.meta_path."""
    hooks = [f for f in sys.meta_path if type(f).__name__ == "_AfterImport"]
    assert hooks
    importlib.import_module("torch._inductor.lowering")
    assert [f for f in sys.meta_path if type(f).__name__ == "_AfterImport"] == hooks
