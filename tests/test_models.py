"""Real architectures, random weights: picked up they match eager, and every MLP is found wherever it stands."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import torch_fused_ops as tfo

transformers = pytest.importorskip("transformers")
STRICT = tfo.FusionPolicy(strict=True)


def ids() -> Tensor:
    return torch.randint(0, 128, (2, 16))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids()}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=128,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), {"input_ids": ids()}


def llama(layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=128
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(), "use_cache": False}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        num_layers=2, d_model=64, num_heads=4, d_kv=16, d_ff=128, vocab_size=128, dropout_rate=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": ids(), "decoder_input_ids": ids(), "use_cache": False
    }  # fmt: skip


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], int, str]] = {
    "GPT-2": (gpt2, 2, "gelu_tanh"),
    "BERT": (bert, 2, "gelu"),
    "Llama": (llama, 2, "silu"),
    "Llama of a layer": (functools.partial(llama, 1), 1, "silu"),
    "T5": (t5, 4, "gelu_tanh"),
}


@pytest.mark.covering(every=10)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_explain_shows_every_mlp_fused(name: str, training: bool) -> None:
    make, count, activation = MODELS[name]
    model, inputs = make()
    report = tfo.explain(model.train(training), **inputs)
    mlps = [s for s in report.sites if s.is_mlp]
    assert len(mlps) == count
    assert {s.activation for s in mlps if s.op} == {activation} and all(s.op for s in mlps), str(report)


def step(model: Callable[..., Any], parameters: list[Tensor], inputs: dict[str, Any]) -> list[Tensor]:
    logits = model(**inputs).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), torch.arange(logits[..., 0].numel()) % 128)
    return [logits.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "a layer" in name else pytest.mark.slow) for name in MODELS],
)
def test_compiled_model_matches_eager(name: str) -> None:
    """Forward and gradients, against the same model in float64: as near to it as eager float32 is."""
    make, _, _ = MODELS[name]
    model, inputs = make()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="fused", fullgraph=True, options={"policy": STRICT})
    ours = step(compiled, list(model.parameters()), inputs)
    eager = step(model, list(model.parameters()), inputs)
    truth = step(exact, list(exact.parameters()), inputs)
    for o, e, t in zip(ours, eager, truth, strict=True):
        if t is None:
            assert o is None
            continue
        scale = t.abs().max().clamp(min=1e-6)
        assert (o - t).abs().max() / scale <= 2 * (e - t).abs().max() / scale + 2e-6
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
