"""Real architectures with random weights: ``strict`` accepts each, and results match eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from architectures import made
from torch import Tensor

import torch_fused_ops as tfo

STRICT = tfo.FusionPolicy(strict=True)
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob"), 0.0)
DROPOUT |= {"hidden_dropout_prob": 0.0, "dropout_rate": 0.0}
T5 = {"as_class": "T5ForConditionalGeneration", "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}

# (architecture, changes of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", {"n_layer": 2}),
    "BERT": ("bert", {"num_hidden_layers": 2}),
    "Llama": ("llama", {"num_hidden_layers": 2}),
    "Llama of a layer": ("llama", {}),
    "T5": ("t5", {"num_layers": 2, **T5}),
}


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    architecture, changes = MODELS[name]
    model, _, inputs = made(architecture, **changes, **DROPOUT)
    labels = inputs.pop("labels")
    return model, {**inputs, **({"decoder_input_ids": labels} if name == "T5" else {})}


def step(model: Callable[..., Any], parameters: list[Tensor], inputs: dict[str, Any]) -> list[Tensor]:
    logits = model(**inputs).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), torch.arange(logits[..., 0].numel()) % 128)
    return [logits.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "a layer" in name else pytest.mark.slow) for name in MODELS]
)
def test_compiled_model_matches_eager(name: str) -> None:
    """Results and gradients are as close to the float64 model as eager float32."""
    model, inputs = model_and_inputs(name)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="fused", fullgraph=True, options={"policy": STRICT})
    actual = step(compiled, list(model.parameters()), inputs)
    eager = step(model, list(model.parameters()), inputs)
    truth = step(exact, list(exact.parameters()), inputs)
    for o, e, t in zip(actual, eager, truth, strict=True):
        if t is None:
            assert o is None
            continue
        scale = t.abs().max().clamp(min=1e-6)
        assert (o - t).abs().max() / scale <= 2 * (e - t).abs().max() / scale + 2e-6
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
