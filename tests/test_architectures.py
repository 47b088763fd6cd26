"""The commands on tiny architectures of transformers, in float32 and bf16, with checkpoints and without."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_fused_ops.planner import search
from torch_fused_ops.planner.model import captured_model
from torch_fused_ops.planner.static_memory import resident_tensors
from torch_fused_ops.planner.step import parts_of
from torch_fused_ops.policy import MEMORY, FusionPolicy
from torch_fused_ops.tools.cli import main
from torch_fused_ops.virtual_gpu import H100

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS: dict[str, Any] = {**IDS, "vocab_size": 128}
BERT = {**WORDS, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {**BERT, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
WINDOW = {**LLAMA, "sliding_window": 8}
TWO_KINDS = {"num_hidden_layers": 2}  # the first layer's attention has a window, the second's none
GPT2 = {**WORDS, "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64}
EXPERTS = {**LLAMA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BART = {"d_model": 64, "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 128}
T5 = {**WORDS, "num_layers": 1, "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "num_labels": 128}
IMAGES = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
IMAGES |= {"image_size": 32, "patch_size": 8, "num_labels": 10}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", {**WORDS, **BART}),
    "bert": ("BertConfig", "BertForMaskedLM", BERT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**WORDS, "n_layer": 1, "hidden_size": 64, "n_head": 4}),
    "cohere": ("CohereConfig", "CohereForCausalLM", LLAMA),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**BERT, "embedding_size": 64}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**WORDS, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**WINDOW, **TWO_KINDS, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**WINDOW, **TWO_KINDS, "query_pre_attn_scalar": 16}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BERT),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**EXPERTS, **TWO_KINDS, "sliding_window": 8}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", LLAMA),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", WINDOW),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", LLAMA),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{name: value for name, value in LLAMA.items() if name != "intermediate_size"},
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
        },
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", LLAMA),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", BERT),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", LLAMA),
    # Its decoder, checkpointed, sets requires_grad of a tensor in forward, where Dynamo breaks the graph.
    "t5": ("T5Config", "T5ForTokenClassification", T5),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGES),
}
COMMANDS = {
    "plan": ("plan", "--memory", "1GiB", "--gpu", "A100"),  # its instructions are not counted, which takes longest
    "plan on meta": ("plan", "--memory", "1GiB", "--gpu", "A100", "--meta"),
    "measure": ("explain", "--train", "--figures"),
    "verify": ("verify",),
}


def made(
    name: str, dtype: torch.dtype, checkpointing: bool
) -> Callable[[], tuple[nn.Module, tuple[()], dict[str, Any]]]:
    """A function such as the command line takes."""

    def make_model() -> tuple[nn.Module, tuple[()], dict[str, Any]]:
        torch.manual_seed(0)
        config_name, model_name, settings = ARCHITECTURES[name]
        config = getattr(transformers, config_name)(**settings)
        config.use_cache = False  # before the model: encoders and decoders copy it
        model = getattr(transformers, model_name)(config).to(dtype)
        if checkpointing:
            model.gradient_checkpointing_enable()
        if name == "vit":
            pixels, labels = torch.randn(2, 3, 32, 32).to(dtype), torch.randint(0, 10, (2,))
            return model, (), {"pixel_values": pixels, "labels": labels}
        ids = torch.randint(3, 128, (2, 16))
        return model, (), {"input_ids": ids, "labels": ids}

    return make_model


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plans_train_the_parameters_that_get_gradients(name: str, checkpointing: bool) -> None:
    model, args, kwargs = made(name, torch.float32, checkpointing)()
    torch._dynamo.reset()
    captured = captured_model(model, args, kwargs)
    parts = parts_of(captured, H100, FusionPolicy(memory="off"))
    planned = resident_tensors(model, captured.unit_of, gets_gradient=parts.trained.__contains__)
    model(*args, **kwargs).loss.backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {tensor.name for tensor in planned if tensor.trained} == gradients


WAYS = list(itertools.product(("float32", "bfloat16"), ("plain", "checkpointed")))
LEVELS = [level for level in MEMORY if level not in ("off", "free")]
# Each architecture with each command, and in each dtype with and without checkpoints; each command in each way.
CASES = [(name, n, *WAYS[(i + j) % 4]) for i, name in enumerate(ARCHITECTURES) for j, n in enumerate(COMMANDS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command", "dtype", "checkpoints"), CASES)
def test_commands(
    name: str,
    command: str,
    dtype: str,
    checkpoints: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = types.ModuleType("their_module")
    module.make_model = made(name, getattr(torch, dtype), checkpoints == "checkpointed")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_module", module)
    # Compilations take the time: each plan is of two levels, each level is in plans of several architectures.
    levels = ("free", LEVELS[[*ARCHITECTURES].index(name) % len(LEVELS)])
    monkeypatch.setattr(search, "levels_for", lambda lossless: levels)
    torch._dynamo.reset()
    first, *rest = COMMANDS[command]
    code = main([first, "their_module:make_model", *rest])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert "figures are not available" not in said.out
