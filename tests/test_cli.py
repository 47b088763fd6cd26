"""The command line ``python -m torch_fused_ops``."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import BUILTIN, raises

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import compat, partition, saved_tensors
from torch_fused_ops.testing import check as runner
from torch_fused_ops.testing.samples import OPERATORS
from torch_fused_ops.tools import cli
from torch_fused_ops.tools.cli import main
from torch_fused_ops.virtual_gpu import gpus

MODEL = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        assert self.training == torch.is_grad_enabled()
        return self.down(nn.functional.gelu(self.up(x))) * scale

def example():
    return MLP(), (torch.randn(4, 8),)

def floats():
    return torch.nn.Embedding(4, 8), (torch.randn(4),)

def strings():
    return MLP(), (["a", "b"],)

def scalar():
    return MLP(), (torch.tensor(1.0),)

def with_keywords():
    return MLP(), [torch.randn(4, 8)], {"scale": 2.0}

class Zoo:
    @staticmethod
    def tiny():
        return example()

def one_tensor():
    return MLP(), torch.randn(4, 8)

class Decaying(MLP):
    # Backward reads a buffer's value before forward updates it.
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("decay", torch.ones(8))

    def forward(self, x):
        if self.training:
            self.decay.mul_(0.5)
        return self.down(nn.functional.gelu(self.up(x))) + torch.tanh(x * self.decay * self.scale)

def decaying():
    return Decaying(), (torch.randn(4, 8),)

def nothing():
    pass

def wrong():
    raise RuntimeError("no such weights\\nin this folder")

number = 7
"""


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "torch_fused_ops", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("some_models", None)


def test_info_lists_versions_and_features(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for fact in (tfo.__version__, torch.__version__, sys.version.split()[0]):
        assert fact in out
    assert re.search(r"^policy +none: plain", out, re.M)
    assert re.search(r"^numpy +[\d.]+$", out, re.M)
    for what in ("torch.compile on CPUs", "torch.compile on GPUs", "float8 GEMMs", "estimated figures"):
        assert re.search(rf"^(works here)? +{what}.*: .+$", out, re.M), what
    assert re.search(r"^turned off +nothing; TORCH_FUSED_OPS_WITHOUT takes kernels, compiled_kernels, ", out, re.M)
    assert re.search(
        r"^eager kernels +(compiled by Inductor at the first call|formulas in plain PyTorch: comp)",
        out,
        re.M,
    )


def test_info_lists_upstream_faults_of_installed_versions(capsys):
    upstream = (Path(__file__).parents[1] / "docs" / "upstream.md").read_text()
    assert all(fault.report.isdecimal() or f"](#{fault.report}) |" in upstream for fault in compat.FAULTS)
    reports = lambda **versions: [fault.report for fault in compat.faults(versions)]  # noqa: E731
    assert reports(torch="2.11.0+cpu", triton="") == ["written-results", "float8-store", "193061"]
    assert reports(torch="2.13.0", triton="3.7.1") == [fault.report for fault in compat.FAULTS]
    assert reports(torch="2.16.0", triton="3.9.0") == []
    main(["info"])
    assert re.search(r"^upstream faults +torch: .*docs/upstream.md#", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_check_quick_passes():
    done = run("check", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("ok") for line in lines) == len(BUILTIN) + 4 * len(OPERATORS)  # in each dtype
    assert lines[-2].endswith("all passed")  # the last line states the kernels of eager mode


def test_check_reports_failures(monkeypatch, capsys):
    row = runner.Row(
        "glu", torch.bfloat16, samples=3, failures=["glu[some sample]: forward error 7 ulp, allowed 1 ulp"]
    )
    monkeypatch.setattr(runner, "check", lambda device, quick, progress: progress(row) or [row])
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "1 failures" in out and "glu[some sample]: forward error 7 ulp, allowed 1 ulp" in out


@pytest.mark.parametrize(
    ("spec", "train"),
    [("some_models:example", True), ("some_models.py:with_keywords", False), ("some_models:Zoo.tiny", True)],
)
def test_explain_runs_every_kind_of_callable(models, capsys, spec, train):
    assert main(["explain", spec, *(["--train"] if train else [])]) == 0
    out = capsys.readouterr().out
    assert "gelu" in out and "some_models.py" in out


@pytest.mark.slow
def test_explain_writes_files(models):
    done = run("explain", "some_models:example", "--json", "report.json", "--html", "report.html", cwd=models)
    assert done.returncode == 0, done.stderr
    assert "bias_act" in json.dumps(json.loads((models / "report.json").read_text()))
    assert "<html" in (models / "report.html").read_text().lower()


@pytest.mark.slow
def test_explain_has_options_for_the_policy(models, capsys):
    pytest.importorskip("triton")
    assert main(["explain", "some_models:example", "--exclude", "nothing", "--exclude", "*"]) == 0
    assert "excludes" in capsys.readouterr().out
    assert main(["explain", "some_models:example", "--train", "--memory", "tiled:2"]) == 0
    assert "in 2 tiles" in capsys.readouterr().out
    assert main(["explain", "some_models:example", "--saved"]) == 0
    assert 'memory="fp8" stores it in 8 bits' in capsys.readouterr().out


def test_missing_triton_is_reported_before_the_model_is_created(models, capsys, monkeypatch):
    def import_triton():
        raise ModuleNotFoundError("Triton is missing", name="triton")

    monkeypatch.setattr(gpus, "import_triton", import_triton)
    assert main(["explain", "some_models:no_such_model", "--saved"]) == 2
    assert capsys.readouterr().err == "error: Triton is missing\n"


@pytest.mark.parametrize("command", [["explain"], ["plan", "--capacity", "1MiB"], ["verify"]], ids=lambda c: c[0])
def test_model_errors_exit_with_2(models, capsys, command):
    assert main([*command, "some_models:wrong"]) == 2
    output = capsys.readouterr().err
    assert output.endswith("\nerror: some_models:wrong cannot be run: RuntimeError: no such weights\n")
    assert "Traceback" in output and "in wrong" in output


def test_plan_writes_all_formats(models, capsys):
    pytest.importorskip("triton")
    arguments = ["plan", "some_models:example", "--gpu", "H100", "--optimizer", "sgd", "--compile", "none", "--meta"]
    assert main([*arguments, "--dp", "3", "--capacity", "1MiB", "--json", "plan.json", "--html", "plan.html"]) == 0
    output = capsys.readouterr().out
    assert "MLP in 1.00 MiB of an NVIDIA H100 80GB HBM3, one of 3: fits" in output
    parsed = json.loads((models / "plan.json").read_text())
    assert parsed["setup"]["dp"] == 3 and parsed["setup"]["optimizer"] == "sgd"
    assert parsed["fits"] and [row["level"] for row in parsed["levels"]] == ["eager mode"]
    page = (models / "plan.html").read_text()
    assert page.count("<polyline") == 2 and "one of 3" in page


def test_verify_exits_with_1_on_wrong_gradients(models, capsys, monkeypatch):
    monkeypatch.setattr(partition, "_copies_of_written", lambda *args: [])
    monkeypatch.setattr(saved_tensors.SavedTensors, "check", lambda self: None)
    assert main(["verify", "some_models.py:decaying", "--memory", "input", "--json", "found.json"]) == 1
    out = capsys.readouterr().out
    assert "1 of 1 MLP sites fused" in out and "'input'" in out
    assert json.loads((models / "found.json").read_text())["ok"] is False
    assert "gradient of scale" in out and "not ok" in out and "plain torch.compile differs in " in out
    assert main(["verify", "nowhere.py:example"]) == 2


def test_progress_is_printed_on_standard_error(capsys):
    logger = logging.getLogger("torch_fused_ops.planner")
    with cli._progress(logger.name):
        logger.info("compiling")
    logger.info("after the command")
    printed = capsys.readouterr()
    assert printed.err == "... compiling\n" and not printed.out and not logger.handlers


@pytest.mark.parametrize("arguments", [
    *(["--help"], ["plan", "--help"], ["bench", "mlp", "--help"], ["plan"]),
    ["plan", "no_such:x", "--capacity", "1GiB", "--gpu", "H1000"],
])  # fmt: skip
def test_help_and_usage_errors_do_not_import_torch(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "torch_fused_ops", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert "usage: python -m torch_fused_ops" in done.stdout + done.stderr
    imported = re.findall(r"\| +(\S+)$", done.stderr, re.M)
    assert "torch_fused_ops.tools.arguments" in imported and "torch" not in imported


def test_version_and_help_are_printed(capsys):
    for option in ("--version", "--help"):
        assert raises(SystemExit, "", main, [option]).code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"torch_fused_ops {tfo.__version__}\n")
    assert all(command in out for command in ("info", "check", "explain"))


PROGRAM = """
import multiprocessing, sys
import torch

def child(queue):
    import torch_fused_ops.settings.environment
    queue.put(torch_fused_ops.settings.environment.POLICY.memory)

if __name__ == "__main__":
    from some_models import example
    model, args = example()
    torch.compile(model)(*args).sum().backward()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("child:", queue.get())
    process.join()
    print("arguments:", sys.argv)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]])
def test_run_keeps_arguments_imports_and_exit_code(models, how):
    """Child processes inherit the policy."""
    (models / "program.py").write_text(PROGRAM)
    done = run("run", "--memory", "input", "--strict", "--report", "report.json", *how, "--memory", "x", cwd=models)
    assert done.returncode == 3, done.stderr
    assert "child: input" in done.stdout
    name = "program.py"
    assert re.search(rf"arguments: \['[^']*{name}', '--memory', 'x'\]", done.stdout), done.stdout
    report = json.loads((models / "report.json").read_text())
    assert [site["op"] for site in report["sites"]] == ["fused::bias_act"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_run_works_under_torchrun(models):
    (models / "program.py").write_text(PROGRAM.replace("sys.exit(3)", ""))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "torch_fused_ops", "run", "--memory", "fp8", "--report", "report.txt", "program.py"]
    done = subprocess.run(command, cwd=models, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("child: fp8") == 2
    assert "1 of 1 MLP sites fused" in (models / "report.txt").read_text()


@pytest.mark.slow
def test_run_behaves_like_python(models):
    """Paths, `__main__` at exit, sys.path, and the program's errors equal `python script.py`."""
    folder = models / "elsewhere"
    folder.mkdir()
    (models / "beside.py").write_text("VALUE = 7")
    (models / "program.py").write_text(
        "import atexit, inspect, os, pickle, sys, torch\n"
        "from torch import nn\n"
        "import beside\n"
        "os.chdir('elsewhere')\n"
        "assert os.path.isabs(__file__) and 'beside' in inspect.getsource(sys.modules['__main__'])\n"
        "class State: pass\n"
        "atexit.register(lambda: print('pickled', len(pickle.dumps(State())) > 0))\n"
        "model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))\n"
        "torch.compile(model)(torch.randn(2, 8)).sum().backward()\n"
        "raise ModuleNotFoundError('its own', name='triton')\n"
    )
    (folder / "link.py").symlink_to(models / "program.py")
    done = run("run", "--exclude", "layers.[0,1].*", "--report", "report.json", "elsewhere/link.py", cwd=models)
    assert done.returncode == 1 and "Traceback" in done.stderr and "its own" in done.stderr
    assert "pickled True" in done.stdout and "is off" not in done.stderr
    assert re.search(r"1 of 1 MLP sites fused \(1 graph\); .*; the report is in ", done.stderr)
    assert len(json.loads((models / "report.json").read_text())["sites"]) == 1


def test_run_replaces_the_process(models, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *command: calls.append(command))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(models)  # as `python -m` does
    levels = "layers.[0,1].*=input,*=fp8"
    main(
        ["run", "--memory", levels, "--exclude", "b.[0,1]", "--report", "r.json", "-m", "some_models", "--memory", "x"]
    )
    (executable, command, environ) = calls[0]
    assert executable == command[0] == sys.executable and command[-4:] == ["-m", "some_models", "--memory", "x"]
    policy = tfo.FusionPolicy.parse(environ["TORCH_FUSED_OPS"])
    assert policy == tfo.FusionPolicy(memory={"layers.[0,1].*": "input", "*": "fp8"}, exclude=("b.[0,1]",))
    assert environ["TORCH_FUSED_OPS_REPORT"] == str(models / "r.json")


# Invalid commands with their arguments, and the message.
INVALID = {
    "check --device cuda:77": "error: --device cuda:77 cannot be used",
    "explain some_models": "error: 'some_models' is not of the form module:callable",
    "explain :example": "error: ':example' is not of the form module:callable",
    "explain no_such_module:example": "error: No module named 'no_such_module'",
    "explain no_such_file.py:example": "error: No module named 'no_such_file'",
    "explain some_models:no_such_name": "AttributeError: module 'some_models' has no attribute 'no_such_name'",
    "explain some_models:number": "error: some_models:number is not accepted: it must be a function that",
    "explain some_models:nothing": "error: some_models:nothing is not accepted: it must be a function that returns",
    "explain some_models:one_tensor": "error: some_models:one_tensor is not accepted: it must be a function",
    "explain some_models:example --json .": "error: --json . cannot be written",
    "explain some_models:example --html no_such_folder/report": "error: --html no_such_folder/report cannot be written",
    "explain some_models:example --memry fp8": "unrecognized arguments: --memry fp8",
    "explain some_models:example --memory tiled:1": "'tiled:1' is not known; accepted: off, free, fp8, input, tiled, ",
    "explain some_models:example --exclude b.[7": "'b.[7' has a [ without a ]",
    "plan no_such:x --capacity 72gigs": "error: --capacity 72gigs is not accepted: it must be a size",
    "plan no_such:x": "error: the following arguments are required: --capacity",
    "plan no_such:x --gpu H1000": "error: --gpu H1000 is not known; accepted: A100, ",
    "plan no_such:x --capacity 1GiB --max batches": "error: --max batches is not known; accepted: batch, tokens",
    "plan no_such:x --capacity 1GiB --levels free,fp9": "error: --levels free,fp9 is not accepted: it must list",
    "plan no_such:x --capacity 1GiB --mixed-precision": "error: --mixed-precision is not accepted: it is a",
    "plan some_models:scalar --capacity 1GiB --max tokens": "error: --max tokens is not accepted: none of",
    "plan some_models:floats --capacity 1GiB": "cannot be run: RuntimeError: Expected tensor for argument #1 'indices'",
    "plan some_models:strings --capacity 1GiB": "cannot be run: TypeError: linear(): argument 'input'",
    "run": "the following arguments are required: SCRIPT",
    "run --report no/such/folder.txt some_models.py": "--report no/such/folder.txt cannot be written",
    "run --memory *=fp9 some_models.py": "error: memory='fp9' for '*' is not accepted",
    "": "COMMAND",
    "bench": "NAME",
}


@pytest.mark.parametrize("command", INVALID)
def test_invalid_arguments_exit_with_2_and_a_message(models, capsys, command):
    """Argparse exits itself, and prints the usage first."""
    usage = ""
    try:
        status = main(command.split())
    except SystemExit as end:
        status, usage = end.code, "usage: python -m torch_fused_ops"
    output = capsys.readouterr()
    assert status == 2 and usage in output.err and INVALID[command] in output.err and not output.out
