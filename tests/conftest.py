"""What every test gets: compile caches of the tests' own, and the activation table as it was."""

import os
import tempfile
from collections.abc import Iterator

import pytest

# So that no run is served what another run compiled.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_fused_ops_tests_")

from torch_fused_ops import activations


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite, plain ``pytest``, runs in up to four processes: most of it waits for compilers of its own."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses") is None:
        processors = os.cpu_count() or 1
        config.option.numprocesses = workers = min(processors, 4)
        config.option.dist = "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", str(processors // workers))  # for the workers: threads spin


@pytest.fixture(autouse=True)
def activation_table() -> Iterator[None]:
    """Takes out what a test registers, so that no other test recognises it. Names must still differ between tests."""
    before = dict(activations._TABLE)
    yield
    if before != activations._TABLE:
        activations._TABLE.clear()
        activations._TABLE.update(before)
        for notify in activations._on_change:
            notify()
