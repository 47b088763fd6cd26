"""The tools that people use, switched on as docs/integrations.md says. Each runs where its package is installed:
``pip install -e ".[integrations]"``."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_fused_ops as tfo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def examples(count: int = 8) -> list[dict[str, Tensor]]:
    ids = torch.randint(128, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def fused(report: tfo.Report | None, count: int) -> None:
    assert report is not None
    sites = [site for site in report.sites if site.is_mlp]
    assert len(sites) == count and all(site.op for site in sites), report


# ---- transformers' Trainer, which accelerate compiles for ------------------------------------------------------------


def trainer(folder: Path, callback: Any, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    given = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, **arguments
    )
    return transformers.Trainer(gpt2(), given, train_dataset=examples(), callbacks=[callback])


def test_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from torch_fused_ops.integrations.transformers import FusionCallback

    tfo.enable(tfo.FusionPolicy(memory="fp8"))
    callback = FusionCallback()
    trainer(tmp_path, callback, torch_compile=True).train()
    fused(callback.report, 2)
    out = capsys.readouterr().out
    assert out.count("torch_fused_ops, the first step:") == 1
    assert "FusionPolicy(memory='fp8'" in out and "2 of 2 MLP sites fused" in out


def test_trainer_without_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("accelerate")
    from torch_fused_ops.integrations.transformers import FusionCallback

    said: list[str] = []
    with caplog.at_level(logging.WARNING, "torch_fused_ops"):
        trainer(tmp_path, FusionCallback(said.append), torch_compile=True).train()
    (text,) = said
    assert "Nothing was compiled with pick-up in this block" in text
    assert [r.getMessage() for r in caplog.records if "nothing was fused" in r.getMessage()]


def test_trainer_s_list_of_backends_is_closed(tmp_path: Path) -> None:
    """Why the page says ``enable()``, and not a backend's name. If this fails, the page can say the other."""
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="is not a valid DynamoBackend"):
        trainer(tmp_path, None, torch_compile=True, torch_compile_backend="fused")


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import TorchDynamoPlugin

    tfo.enable()
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = examples(1)[0]
    with tfo.record() as report:
        loss = model(input_ids=batch["input_ids"][None], labels=batch["labels"][None]).loss
        accelerator.backward(loss)
        optimizer.step()
    fused(report, 2)


# ---- Lightning -------------------------------------------------------------------------------------------------------


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from torch_fused_ops.integrations.lightning import FusionCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.mlp(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    said: list[str] = []
    callback = FusionCallback(said.append)
    module = torch.compile(Module(), backend="fused")
    fit = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    fit.fit(module, torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=4))
    fused(callback.report, 1)
    assert len(said) == 1


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def test_peft() -> None:
    """Adapters stand beside linear layers; activations between them are fused all the same. PEFT's own call breaks the
    graph, so paths are those in the model that it wraps."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_fc", "c_proj"], lora_alpha=4, r=4))
    compiled = torch.compile(model, backend="fused", options={"exclude": ("*.h.0.*",)})
    ids = torch.stack([example["input_ids"] for example in examples(2)])
    with tfo.record() as report:
        compiled(input_ids=ids, labels=ids).loss.backward()
    sites = [site for site in report.sites if site.is_mlp]
    named = dict(model.get_base_model().named_modules())
    assert [site.op is not None for site in sites] == [False, True]
    assert all(site.module in named for site in sites), [site.module for site in sites]


# ---- diffusers -------------------------------------------------------------------------------------------------------


def test_diffusers() -> None:
    pytest.importorskip("diffusers")
    from diffusers.models.attention import FeedForward

    model = FeedForward(32, activation_fn="geglu")
    with tfo.record() as report:
        torch.compile(model, backend="fused")(torch.randn(2, 8, 32)).sum().backward()
    fused(report, 1)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_versions_that_ran() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    for name in ("transformers", "accelerate", "lightning", "peft", "diffusers"):
        version = importlib.metadata.version(name) if _installed(name) else ""
        if version:
            assert f"{name} {version}" in page, (name, version)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
