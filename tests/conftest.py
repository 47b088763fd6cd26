"""What every test gets: compile caches of the tests' own, the activation table as it was, a limit of processor time."""

import atexit
import gc
import itertools
import json
import logging
import os
import platform
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# So that no run is served what another run compiled. A run's processes share one: they precompile C++ headers once.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_fused_ops_tests_")

# Which of the processor's vector instructions compiler and system know is otherwise tried out by every process that
# compiles C++, for 8 s of processor time. With "" it is tried out, with "0" none are used.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Every process that compiles starts others for a GPU's kernels, for 4 s of processor time: not where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Dynamo looks for garbage after each graph: a seventh of a small capture's time. ``pytest_collection_finish`` says when
# it is looked for here.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import processor_time

import torch_fused_ops
from torch_fused_ops import activations

# Dynamo times each graph's guards, once, with the processor's caches flushed: 40 of a small capture's 140 ms.
if hasattr(torch._C._dynamo.guards, "profile_guard_manager"):
    torch._C._dynamo.guards.profile_guard_manager = lambda *args: 0.0

# To seed devices that are not there torch writes down three times from where: 0.5 ms. It keeps the texts for ever.
if not torch.accelerator.is_available():
    torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))

# pytest adds its handlers to each logger that does not propagate, and so hears what torch has for TORCH_TRACE, which is
# made where somebody hears it: a twentieth of the time of compiling. Torch's own handler is there by now.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite, plain ``pytest``, runs in up to four processes.

    A file goes to one of them: what its tests share, estimated figures above all, is compiled once. On a GPU they share
    its memory, but for their contexts, and the pools that compile its kernels have a process for each processor in all.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses") is None:
        processors = os.cpu_count() or 1
        config.option.numprocesses = workers = min(processors, 4)
        config.option.dist = "worksteal" if torch.cuda.is_available() else "loadfile"
        settings = {"OMP_NUM_THREADS": f"{processors // workers}"}  # for the workers: threads spin
        if torch.cuda.is_available():
            settings["TORCHINDUCTOR_COMPILE_THREADS"] = f"{processors // workers}"
            settings["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{0.9 / workers:.3f}"
        for name, text in settings.items():
            os.environ.setdefault(name, text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What CONTRIBUTING.md says of them."""
    parser.addoption("--record-compatibility", action="store_true", help="write what passes to docs/compatibility.json")
    parser.addoption("--processor-time", metavar="FILE", help="write each test's processor time in seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """A meter in every process that runs tests; what reports on all tests in the one that hears of them."""
    config.pluginmanager.register(processor_time.Meter(), "processor-time-meter")
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(processor_time.Table(config.getoption("--processor-time")), "processor-time-table")
    if config.getoption("--record-compatibility"):
        config.pluginmanager.register(_Record(Path(__file__).parent), "record-compatibility")


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, and seldom: it is a tenth of a compilation's time otherwise.

    At the end pytest looks for it five times; then all goes, or Triton's bindings list what they find left.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    atexit.register(gc.unfreeze)
    _leave_out()


def _leave_out() -> None:
    """What torch computes for logs, tables and caches that nobody reads here, and what takes long: a fiftieth of all.

    Dynamo takes a file apart to name a line's function, and writes all settings as JSON for each graph. For its caches
    Inductor has all of Triton hashed by each process, 500 MB; ours are of this run.
    """
    for module, name in (
        ("torch._dynamo.symbolic_convert", "get_funcname"),
        ("torch._dynamo.utils", "_get_dynamo_config_for_logging"),
        ("torch._dynamo.utils", "_scrubbed_inductor_config_for_logging"),
        ("torch._inductor.runtime.triton_compat", "triton_key"),
    ):
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, lambda *args: None)


@pytest.fixture(scope="session")
def inductor() -> Any:
    """Inductor's compile_fx, imported at nobody's expense: it takes 3 s of whichever test is first."""
    from torch._inductor import compile_fx

    return compile_fx


@pytest.fixture
def only_new_garbage() -> None:
    """``gc.collect`` goes through what the test makes, not through 0.5 s of what is there already."""
    gc.freeze()


@pytest.fixture(autouse=True)
def inductor_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """If "interpreted": Inductor with all its passes and lowerings, but for generated code the graph, run by torch.

    A C++ compiler takes 1.5 to 4 seconds a graph, this 0.1. What the code *computes* is then not tested: tests marked
    ``codegen_is_slow`` run both ways, the generated code under ``-m slow``.
    """
    if getattr(request, "param", "generated") == "generated":
        return
    in_process = request.getfixturevalue("inductor")._InProcessFxCompile
    from torch_fused_ops.lowerings import compat

    generate = in_process.codegen_and_compile

    def codegen_and_compile(self: Any, gm: Any, inputs: Sequence[Any], to_check: Any, settings: Any) -> Any:
        from torch._inductor.virtualized import V

        if V.aot_compilation:
            return generate(self, gm, inputs, to_check, settings)
        return interpreted(gm, inputs, is_inference=settings.get("is_inference", False))

    monkeypatch.setattr(in_process, "codegen_and_compile", codegen_and_compile)
    compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: True)
    request.addfinalizer(
        lambda: compat.update_everywhere(torch.compiler.config, "force_disable_caches", lambda _: False)
    )


def interpreted(gm: Any, inputs: Sequence[Any], is_inference: bool) -> Any:
    """What Inductor makes of a graph before it generates code, run call by call."""
    from harness import after_passes
    from torch._inductor.output_code import OutputCode

    runs = after_passes(gm, inputs, is_inference)

    class Interpreted(OutputCode):
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # of the instance: wrappers copy its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()  # they are handed over: what is read no more is freed
            return runs(*given)

        def post_compile(self, *args: Any) -> None:
            pass

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            pass

    return Interpreted()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked ``codegen_is_slow``: with the graphs run by torch, and, under ``-m slow``, with generated code.

    In a file that is marked as a whole, ``codegen_is_slow(False)`` takes out a test that is about generated code.
    """
    mark = metafunc.definition.get_closest_marker("codegen_is_slow")
    if mark and mark.args != (False,) and not metafunc.definition.get_closest_marker("slow"):
        generated = pytest.param("generated", marks=pytest.mark.slow)
        metafunc.parametrize("inductor_code", ["interpreted", generated], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m takes tests out
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks as slow what ``covering(n, *names)`` and ``covering(every=n)`` leave out of the default suite.

    Every n values that parameters (``names``, or all) take together in some case, they take in one of the cases that
    stay. n = 2 is pairwise testing, n = 1 has every value once. With ``every`` one case in n stays, by a hash of its
    id: a case that is added takes at most one other's place.
    """
    products: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            device = str(item.callspec.params.get("device"))  # every device that is there gets all
            products[item.nodeid.partition("::")[0], item.originalname, device].append(item)
    for cases in products.values():
        mark = cases[0].get_closest_marker("covering")
        stay = _covering(cases, *mark.args) if mark.args else _one_in(mark.kwargs["every"], cases)
        for i, case in enumerate(cases):
            if i not in stay:
                case.add_marker(pytest.mark.slow)


def _one_in(every: int, cases: list[Any]) -> list[int]:
    """The cases whose ids have the lowest hashes."""
    by_hash = sorted(range(len(cases)), key=lambda i: zlib.crc32(cases[i].callspec.id.encode()))
    return by_hash[: -(-len(cases) // every)]


def _covering(cases: list[Any], strength: int, *names: str) -> set[int]:
    """Which cases cover all: greedily, the first of those that cover most of what is left."""
    names = names or tuple(name for name in cases[0].callspec.params if name not in ("inductor_code", "device"))
    values = [[(name, repr(case.callspec.params[name])) for name in names] for case in cases]
    together = [set(itertools.combinations(each, min(strength, len(names)))) for each in values]
    left, stay = set().union(*together), set()
    while left:
        best = max(range(len(cases)), key=lambda i: len(together[i] & left))
        left -= together[best]
        stay.add(best)
    return stay


# ---- docs/compatibility.json, from which docs/generate.py writes the table of docs/compatibility.md -----------------


class _Record:
    """Counts (passed, failed, skipped) for each file."""

    def __init__(self, tests: Path) -> None:
        self.tests = tests
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            place = ("passed", "failed", "skipped").index(report.outcome)
            self.counts[report.nodeid.partition("::")[0].removeprefix("tests/")][place] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Adds to what is there for other versions; files that did not run now keep their counts."""
        import torch

        numbers = torch.__version__.partition("+")[0]
        python = ".".join(platform.python_version_tuple()[:2])
        file = self.tests.parent / "docs" / "compatibility.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        ran = record.setdefault(f"torch {numbers}, Python {python}", {})
        slow = "slow" in session.config.option.markexpr and "not slow" not in session.config.option.markexpr
        for name, counts in self.counts.items():
            ran[name] = [a + b for a, b in zip(ran.get(name, [0, 0, 0]), counts, strict=True)] if slow else counts
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


@pytest.fixture(autouse=True)
def activation_table() -> Iterator[None]:
    """Takes out what a test registers, so that no other test recognizes it. Names must still differ between tests."""
    before = dict(activations._TABLE)
    yield
    if before != activations._TABLE:
        activations._TABLE.clear()
        activations._TABLE.update(before)
        for notify in activations._on_change:
            notify()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The same random numbers for each test; Dynamo has compiled nothing before, and afterwards pick-up is off."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    if "torch_fused_ops.lowerings.passes" in sys.modules:
        torch_fused_ops.disable()
