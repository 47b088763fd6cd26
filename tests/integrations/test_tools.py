"""Common tools, set up as in docs/integrations.md. The tests check its table: the version that ran, how many MLPs were
fused, and the bytes saved for backward. A test runs if its tool is installed: ``pip install -e ".[integrations]"``.
``test_megatron_core.py`` checks the row of Megatron core.
"""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import MLP, Stack, python, saving
from torch import Tensor, nn

import torch_fused_ops as tfo

pytestmark = pytest.mark.slow

# GPT-2 has many graphs, and a C++ compiler takes 1.5 to 4 s for each. Code does not affect fusion and saved tensors.
without_code = pytest.mark.parametrize("inductor_code", ["interpreted"], indirect=True)


PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TORCH = "2.13"  # version of the page's figures


def row(tool: str) -> list[str]:
    """Return the table cells after the tool's name and installed version."""
    tables = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    package, _, variant = tool.partition(", ")
    named = f"{package} {importlib.metadata.version(package)}" + (f", {variant}" if variant else "")
    matches = [cells[1:] for cells in tables if cells and cells[0] == named]
    assert len(matches) == 1, f"docs/integrations.md has no row {named!r}"
    return matches[0]


def states(tool: str, fused: str, plain_bytes: int, fused_bytes: int) -> None:
    """Compare the tool's row with the number of fused MLPs, and with the KiB saved without and with fusion."""
    _, fused_cell, saved_cell = row(tool)
    assert fused_bytes <= plain_bytes
    assert fused_cell.startswith(f"{fused}: "), (tool, fused)
    if torch.__version__.startswith(f"{TORCH}."):
        assert saved_cell == f"{plain_bytes / 1024:.1f} → {fused_bytes / 1024:.1f}", tool


def count_saved_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the bytes saved for backward, excluding the model's weights. Shared memory counts once."""
    return saving(step, (*model.parameters(), *model.buffers()))[1]


def of_mlps(report: tfo.Report | None) -> str:
    assert report is not None
    sites = [site for site in report.sites if site.is_mlp]
    return f"{sum(site.op is not None for site in sites)} of {len(sites)}"


def compiled_both_ways(tool: str, model: nn.Module, step: Callable[[Any], Any]) -> tfo.Report:
    """Check the tool's row. ``step`` computes a loss with the model, compiled without and with fusion."""
    plain_bytes = count_saved_bytes(model, lambda: step(torch.compile(model)).backward())
    torch._dynamo.reset()
    with tfo.record() as report:
        fused_bytes = count_saved_bytes(model, lambda: step(torch.compile(model, backend="fused")).backward())
    states(tool, of_mlps(report), plain_bytes, fused_bytes)
    if fused_bytes == plain_bytes:  # the page names the level that reduces it
        options = {"memory": "fp8"}
        torch._dynamo.reset()
        assert (
            count_saved_bytes(model, lambda: step(torch.compile(model, backend="fused", options=options)).backward())
            < plain_bytes
        )
    return report


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def examples(count: int = 8) -> list[dict[str, Tensor]]:
    ids = torch.randint(128, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    training_arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, **arguments
    )
    return transformers.Trainer(gpt2(), training_arguments, train_dataset=examples())


@without_code
def test_trainer(tmp_path: Path) -> None:
    plain_trainer = trainer(tmp_path, torch_compile=True)
    plain_bytes = count_saved_bytes(plain_trainer.model, plain_trainer.train)
    torch._dynamo.reset()
    tfo.enable(tfo.FusionPolicy(memory="fp8"))
    fused_trainer = trainer(tmp_path, torch_compile=True)
    with tfo.record() as report:
        fused_bytes = count_saved_bytes(fused_trainer.model, fused_trainer.train)
    states("transformers, `Trainer`", of_mlps(report), plain_bytes // 2, fused_bytes // 2)
    assert report.policies == (tfo.FusionPolicy(memory="fp8"),) and "2 of 2 MLP sites fused" in report.summary


@without_code
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_trainer_with_checkpoints(kwargs: dict[str, bool] | None, tmp_path: Path) -> None:
    """With ``checkpoints="replace"``, a step saves and computes the same as without checkpoints."""
    import transformers

    name = "activation_checkpointing"  # "gradient_checkpointing" before transformers 5.24
    name = name if hasattr(transformers.TrainingArguments, name) else "gradient_checkpointing"
    checkpointing = {name: True, f"{name}_kwargs": kwargs}
    saved: list[int] = []
    models: list[dict[str, Tensor]] = []
    for checkpoints, arguments in (("keep", {}), ("replace", checkpointing), ("keep", checkpointing)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with tfo.enabled(memory="fp8", checkpoints=checkpoints), tfo.record() as report:
            tried = trainer(tmp_path, torch_compile=True, **arguments)
            saved.append(count_saved_bytes(tried.model, tried.train))
        models.append(tried.model.state_dict())
    assert saved[0] == saved[1] and of_mlps(report) == "2 of 2"
    torch.testing.assert_close(models[1], models[0])
    assert "2 of these in checkpoints, where the memory level has no effect" in report.summary


@without_code
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import TorchDynamoPlugin

    batch = {name: t[None] for name, t in examples(1)[0].items()}

    def step() -> int:
        accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
        model = gpt2()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        saved = count_saved_bytes(model, lambda: accelerator.backward(model(**batch).loss))
        optimizer.step()
        return saved

    plain_bytes = step()
    torch._dynamo.reset()
    tfo.enable()
    with tfo.record() as report:
        fused_bytes = step()
    states("accelerate", of_mlps(report), plain_bytes, fused_bytes)


def stack() -> nn.Module:
    return Stack(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_leaves_names_of_modules_as_they_are(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    model = accelerate.Accelerator(mixed_precision=precision, cpu=True).prepare(stack())
    assert names_when_compiled(model) == ["layers.0", "layers.1"]
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_wrappers_for_data_parallel_leave_names_of_modules_as_they_are(wrapper: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: nn.Module = stack()
        if wrapper == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert names_when_compiled(model) == ["layers.0", "layers.1"]
    finally:
        dist.destroy_process_group()


def names_when_compiled(model: nn.Module) -> list[str]:
    with tfo.record() as report, torch.no_grad():
        torch.compile(model, backend="fused")(torch.randn(4, 8))
    return [site.module for site in report.sites if site.is_mlp]


def test_lightning(tmp_path: Path) -> None:
    """Compile the module's network. If compiling the module itself passes, the page need not advise against it."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP(16, 32)  # torch skips the code of nn.Sequential, whose compile captures nothing

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(module: Any) -> int:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        batches = torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=4)
        return count_saved_bytes(module, lambda: trainer.fit(module, batches)) // len(batches)

    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
        fit(torch.compile(Module()))
    torch._dynamo.reset()
    plain_trainer, module = Module(), Module()
    plain_trainer.net.compile()
    plain_bytes = fit(plain_trainer)
    torch._dynamo.reset()
    module.net.compile(backend="fused")
    with tfo.record() as report:
        fused_bytes = fit(module)
    states("lightning", of_mlps(report), plain_bytes, fused_bytes)


@without_code
def test_lora() -> None:
    """Activations between linear layers with adapters are fused. PEFT's own call breaks the graph, so paths begin at
    the model that it wraps."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_fc", "c_proj"], lora_alpha=4, r=4))
    ids = torch.stack([example["input_ids"] for example in examples(2)])
    report = compiled_both_ways("peft, LoRA", model, lambda compiled: compiled(input_ids=ids, labels=ids).loss)
    named = dict(model.get_base_model().named_modules())
    assert all(site.module in named for site in report.sites if site.is_mlp), report


def test_dora(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT breaks each layer's graph. If this test's first half fails, the page need not replace PEFT's function."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model, x = (
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=4, use_dora=True)),
        torch.randn(32, 64),
    )
    report = tfo.explain(model, x)
    assert of_mlps(report) == "0 of 0" and "in dequantize_module_weight" in str(report)
    monkeypatch.setattr(peft.tuners.lora.dora, "dequantize_module_weight", lambda layer: layer.weight)
    torch._dynamo.reset()
    compiled_both_ways("peft, DoRA", model, lambda compiled: compiled(x).sum())


def test_diffusers() -> None:
    pytest.importorskip("diffusers")
    from diffusers.models.attention import FeedForward

    x = torch.randn(2, 8, 32)
    compiled_both_ways("diffusers", FeedForward(32, activation_fn="geglu"), lambda compiled: compiled(x).sum())


def test_torchao() -> None:
    """``lowerings/test_gemm_registry.py`` tests all recipes, and gradients."""
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name("rowwise"))
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled_both_ways("torchao, `Float8Linear`", model, lambda compiled: compiled(x).sum())


@pytest.mark.parametrize("bits", (4, 8))
def test_bitsandbytes(bits: int) -> None:
    """``lowerings/test_gemm_registry.py`` tests the gradients."""
    layers = pytest.importorskip("bitsandbytes.nn")
    kind, settings = {
        4: (layers.Linear4bit, {"compute_dtype": torch.float32, "quant_type": "nf4"}),
        8: (layers.Linear8bitLt, {"has_fp16_weights": False, "threshold": 0.0}),
    }[bits]
    first, last = (kind(*sizes, bias=False, **settings) for sizes in ((64, 128), (128, 64)))
    model, x = nn.Sequential(first, nn.GELU(), last).to("cpu"), torch.randn(2, 8, 64, requires_grad=True)
    compiled_both_ways(f"bitsandbytes, {bits} bits", model, lambda compiled: compiled(x).sum())


# Torchtitan's trainer needs a GPU, but its layers and its function to compile them do not. Its language models use
# FlexAttention, which has no backward on CPUs, so the model gets the attention of torchtitan's Flux.
TITAN = """
import sys
import torch
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

config = model_registry("debugmodel", attn_backend="flex").model
config.layers = config.layers[:2]
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
model = config.build()
model.init_states()
if "checkpointed" in sys.argv:
    SelectiveAC.Config().build(dump_folder=".").apply(model)
dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
apply_compile(model, compile_config=CompileConfig(enable=True), parallel_dims=dims)
ids = torch.randint(2048, (2, 64))

def step():
    model(ids, torch.arange(64).expand(2, 64)).square().mean().backward()
"""
MEASURED = """
import json
import sys
sys.path[:0] = {folders}
from titan import model, step
import test_tools
import torch_fused_ops as tfo

with tfo.record() as report:
    saved = test_tools.count_saved_bytes(model, step)
print(json.dumps([test_tools.of_mlps(report), saved]))
"""


def test_torchtitan(tmp_path: Path) -> None:
    """Torchtitan compiles layers one by one, so both layers share one graph."""
    pytest.importorskip("torchtitan")
    (tmp_path / "titan.py").write_text(TITAN)
    (tmp_path / "measured.py").write_text(
        MEASURED.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    )

    def run(setting: str, *arguments: str) -> Any:
        return json.loads(python("measured.py", *arguments, cwd=tmp_path, TORCH_FUSED_OPS=setting).splitlines()[-1])

    (unfused_sites, plain_bytes), (fused_sites, fused_bytes) = run("off"), run("memory=input")
    assert unfused_sites == "0 of 0"
    states("torchtitan", fused_sites, plain_bytes, fused_bytes)
    # Torchtitan's selective checkpointing decides which tensors are saved; MLPs are still fused.
    (_, plain_bytes), (fused_sites, fused_bytes) = run("off", "checkpointed"), run("memory=input", "checkpointed")
    assert fused_sites == "1 of 1" and plain_bytes == fused_bytes
    command = ["-m", "torch_fused_ops", "run", "--memory", "input", "--report", "report.json"]
    (tmp_path / "train.py").write_text("from titan import step\nstep()\n")
    python(*command, "train.py", cwd=tmp_path)
    assert '"fused::glu"' in (tmp_path / "report.json").read_text()
