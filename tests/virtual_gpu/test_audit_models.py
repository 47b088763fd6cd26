"""The audit has no findings for whole models, plain and at every memory level and float8 recipe."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_fused_ops as tfo
from torch_fused_ops import virtual_gpu
from torch_fused_ops.policy import GEMM, MEMORY

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

WORDS: dict[str, Any] = {"vocab_size": 512, "use_cache": False}
LLAMA = {**WORDS, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4}
T5 = {**WORDS, "num_layers": 1, "d_model": 256, "num_heads": 4, "d_kv": 64, "d_ff": 768, "decoder_start_token_id": 0}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {**WORDS, "n_layer": 2, "n_embd": 256, "n_head": 4}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_key_value_heads": 2}),
    "T5": ("T5Config", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
}
NAMES = ["quickstart", *ARCHITECTURES]
POLICIES = ["plain", *(f"memory={level}" for level in MEMORY), *(f"gemm={recipe}" for recipe in GEMM[1:])]


def make_model(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return a model in bfloat16 (the quickstart in float32) and its arguments, on the meta device."""
    with torch.device("meta"):
        if name == "quickstart":
            sys.path.append(str(Path(__file__).parents[2] / "examples"))
            module = importlib.import_module("quickstart")
            ids = torch.zeros(8, 128, dtype=torch.int64)
            return module.GPT(module.Config()), (ids, ids), {}
        config_name, model_name, settings = ARCHITECTURES[name]
        model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings)).bfloat16()
        model.loss_type = "ForCausalLM"  # GPT-2 logs that it has none, which breaks the graph
        ids = torch.zeros(4, 128, dtype=torch.int64)
        return model.train(), (), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_models_have_no_findings(name: str, policy: str) -> None:
    torch._dynamo.reset()
    model, args, kwargs = make_model(name)
    config = None if policy == "plain" else tfo.compile_options(policy=tfo.FusionPolicy.parse(policy))
    gpu = virtual_gpu.B200 if "mxfp8" in policy else virtual_gpu.H100
    paper = virtual_gpu.compile_on_paper(model, *args, gpu=gpu, config=config, **kwargs)
    audit = virtual_gpu.audit(paper)
    print(audit)
    assert audit.ok and audit.kernels > 10, str(audit)
    assert audit.configurations > audit.kernels
