"""Set up every test: private compile caches, a restored activation table, and a count of processor time."""

import atexit
import gc
import itertools
import logging
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

# A new cache for each run. Its processes share the cache, so they precompile C++ headers once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_fused_ops_tests_")

# Do not check, in each process that compiles C++, which vector instructions are supported. That takes 8 s of processor
# time. The value "" runs the check, and "0" disables vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Without a GPU, do not start Inductor's pool of processes for GPU kernels. It takes 4 s of processor time.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Dynamo collects garbage after each graph: a seventh of a small capture's time. ``pytest_collection_finish`` sets the
# collector instead.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import processor_time

import torch_fused_ops
from torch_fused_ops import activations
from torch_fused_ops.kernels import compiled

# Eager operators on CPUs run their formulas: only kernels/test_compiled.py compiles a few CPU kernels.
compiled.FEWEST = compiled.REPEATS = sys.maxsize

# Dynamo times each graph's guards once, with flushed processor caches: 40 ms of a small capture's 140 ms.
if hasattr(torch._C._dynamo.guards, "profile_guard_manager"):
    torch._C._dynamo.guards.profile_guard_manager = lambda *args: 0.0

# Without an accelerator, torch.manual_seed records three stack traces for the missing devices. They take 0.5 ms and are
# never freed.
if not torch.accelerator.is_available():
    torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))

# Torch formats records for TORCH_TRACE only if their logger has a handler. Pytest would add one, since this logger does
# not propagate, and the records would take a twentieth of the compile time. Torch's own handler, added earlier, stays.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite (``pytest`` without arguments) in up to four processes.

    On a CPU, all tests of a file run in one process, so that they share compiled estimates. On a GPU, a free process
    takes the next test. The processes divide the GPU's memory and the processors that compile its kernels.
    """
    is_whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_whole_suite and config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses") is None:
        processors = os.cpu_count() or 1
        config.option.numprocesses = workers = min(processors, 4)
        config.option.dist = "worksteal" if torch.cuda.is_available() else "loadfile"
        settings = {"OMP_NUM_THREADS": f"{processors // workers}"}  # more threads would only spin
        if torch.cuda.is_available():
            settings["TORCHINDUCTOR_COMPILE_THREADS"] = f"{processors // workers}"
            settings["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{0.9 / workers:.3f}"
        for name, text in settings.items():
            os.environ.setdefault(name, text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that CONTRIBUTING.md explains."""
    parser.addoption("--processor-time", metavar="FILE", help="write each test's processor time in seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Register a meter in every process that runs tests, and the reports in the main process."""
    config.pluginmanager.register(processor_time.Meter(), "processor-time-meter")
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(processor_time.Table(config.getoption("--processor-time")), "processor-time-table")


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and only among objects of tests: otherwise it takes a tenth of a compilation's time.

    At exit, unfreeze all objects. Otherwise Triton's bindings print a list of leaked objects.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    atexit.register(gc.unfreeze)
    _skip_unread_logs()


def _skip_unread_logs() -> None:
    """Skip torch's work for logs and caches that tests do not read: a thirtieth of the suite's time.

    Dynamo parses a file to name a line's function, and writes all settings as JSON for each graph. AOTAutograd writes
    the code of each graph. Each process hashes Triton's 500 MB for Inductor's cache keys; this run has its own cache.
    """
    for module, name, result in (
        ("torch._dynamo.symbolic_convert", "get_funcname", None),
        ("torch._dynamo.utils", "_get_dynamo_config_for_logging", None),
        ("torch._dynamo.utils", "_scrubbed_inductor_config_for_logging", None),
        ("torch._functorch._aot_autograd.graph_compile", "_log_fw_bw_graphs", (None, None)),
        ("torch._functorch._aot_autograd.graph_compile", "_log_joint_graph", None),
        ("torch._inductor.runtime.triton_compat", "triton_key", None),
    ):
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, lambda *args, result=result: result)


@pytest.fixture(scope="session")
def inductor() -> Any:
    """Return Inductor's compile_fx. Its import takes 3 s, which are not attributed to a test."""
    from torch._inductor import compile_fx

    return compile_fx


@pytest.fixture
def only_new_garbage() -> None:
    """Let ``gc.collect`` skip the objects that exist already. Visiting them takes 0.5 s."""
    gc.freeze()


@pytest.fixture(autouse=True)
def inductor_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Inductor's passes, but run a graph call by call instead of generating code from it, as the parameter says.

    * "generated": a C++ compiler takes 1.5 to 4 s.
    * "lowered": the final graphs, which are lowered as well, take 0.28 s for a step of an MLP.
    * "interpreted": the graphs after the partitioner take 0.18 s.
    * "captured": Dynamo's graph after the pre-grad pass takes 0.06 s.

    Tests marked ``codegen_is_slow`` run without generated code, and with it under ``-m slow``.
    """
    way = getattr(request, "param", "generated")
    if way == "generated":
        return
    in_process = request.getfixturevalue("inductor")._InProcessFxCompile
    if way == "captured":
        monkeypatch.setattr("torch._dynamo.backends.common.aot_autograd", after_pre_grad_pass)
        return
    from torch_fused_ops.lowerings import compat

    generate = in_process.codegen_and_compile

    def codegen_and_compile(self: Any, gm: Any, inputs: Sequence[Any], to_check: Any, settings: Any) -> Any:
        from harness import after_passes
        from torch._inductor.virtualized import V

        if V.aot_compilation:
            return generate(self, gm, inputs, to_check, settings)
        if way == "lowered":
            return call_by_call(after_passes(gm, inputs, is_inference=settings.get("is_inference", False)))
        return call_by_call(gm)

    monkeypatch.setattr(in_process, "codegen_and_compile", codegen_and_compile)
    compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: True)
    request.addfinalizer(
        lambda: compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: False)
    )


def after_pre_grad_pass(
    *, pre_grad_passes: Callable[..., Any] = lambda gm, inputs: gm, **settings: Any
) -> Callable[..., Any]:
    """Replace AOTAutograd in Inductor's backend: run the pre-grad pass, and return the graph as it then is."""
    return lambda gm, inputs: pre_grad_passes(gm, inputs).forward


def call_by_call(gm: Any) -> Any:
    """Return a function that runs a graph call by call."""
    from torch._inductor.output_code import OutputCode

    class Interpreted(OutputCode):
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # on the instance, because wrappers copy its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            arguments = list(inputs)
            inputs.clear()  # the caller passes ownership: an input is freed after its last read
            return gm.forward(*arguments)

        def post_compile(self, *args: Any) -> None:
            pass

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            pass

    return Interpreted()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked ``codegen_is_slow`` with interpreted graphs, and under ``-m slow`` with generated code.

    If a whole file has the mark, ``codegen_is_slow(False)`` exempts a test of generated code.
    ``codegen_is_slow("captured")`` is for tests of the pre-grad pass, ``"lowered"`` for post-grad passes and lowerings.
    """
    mark = metafunc.definition.get_closest_marker("codegen_is_slow")
    if mark and mark.args != (False,) and not metafunc.definition.get_closest_marker("slow"):
        generated = pytest.param("generated", marks=pytest.mark.slow)
        way = pytest.param(*(mark.args or ("interpreted",)), id="interpreted")
        metafunc.parametrize("inductor_code", [way, generated], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark as slow the cases that ``covering(n, *names)`` and ``covering(every=n)`` do not select.

    ``covering(n)`` selects cases that cover every combination of n parameters' values (``names``, or all). n = 2
    is pairwise testing; n = 1 covers every value. ``every=n`` selects one case in n by a hash of its id, so adding a
    case replaces at most one selected case.
    """
    products: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            device = str(item.callspec.params.get("device"))  # each device has its own selection
            products[item.nodeid.partition("::")[0], item.originalname, device].append(item)
    for cases in products.values():
        mark = cases[0].get_closest_marker("covering")
        selected = _covering(cases, *mark.args) if mark.args else _one_in(mark.kwargs["every"], cases)
        for i, case in enumerate(cases):
            if i not in selected:
                case.add_marker(pytest.mark.slow)


def _one_in(every: int, cases: list[Any]) -> list[int]:
    """Return one case in ``every``: those whose ids have the lowest hashes."""
    by_hash = sorted(range(len(cases)), key=lambda i: zlib.crc32(cases[i].callspec.id.encode()))
    return by_hash[: -(-len(cases) // every)]


def _covering(cases: list[Any], strength: int, *names: str) -> set[int]:
    """Return indices of cases that cover all combinations. Greedily take the case with most new combinations."""
    names = names or tuple(name for name in cases[0].callspec.params if name not in ("inductor_code", "device"))
    values = [[(name, repr(case.callspec.params[name])) for name in names] for case in cases]
    covered_by = [set(itertools.combinations(case, min(strength, len(names)))) for case in values]
    uncovered, selected = set().union(*covered_by), set()
    while uncovered:
        best = max(range(len(cases)), key=lambda i: len(covered_by[i] & uncovered))
        uncovered -= covered_by[best]
        selected.add(best)
    return selected


@pytest.fixture(autouse=True)
def activation_table() -> Iterator[None]:
    """Remove the activations that a test registers. Names must still differ between tests."""
    before = dict(activations._TABLE)
    yield
    if before != activations._TABLE:
        activations._TABLE.clear()
        activations._TABLE.update(before)
        for notify in activations._on_change:
            notify()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Start each test with the same random numbers and an empty Dynamo, and end it with fusion disabled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    compiled.FEWEST = sys.maxsize  # the command ``check`` lowers it
    if "torch_fused_ops.lowerings.passes" in sys.modules:
        torch_fused_ops.disable()
