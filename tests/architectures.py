"""Tiny transformers architectures with random weights, which several test files share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {**WORDS, **BART}),
    "bert": ("BertForMaskedLM", BERT),
    "bloom": ("BloomForCausalLM", {**WORDS, "n_layer": 1, "hidden_size": 64, "n_head": 4}),
    "cohere": ("CohereForCausalLM", LLAMA),
    "electra": ("ElectraForMaskedLM", {**BERT, "embedding_size": 64}),
    "falcon": ("FalconForCausalLM", {**WORDS, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}),
    "gemma2": ("Gemma2ForCausalLM", {**WINDOW, **TWO_KINDS, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**WINDOW, **TWO_KINDS, "query_pre_attn_scalar": 16}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT),
    "gpt_oss": ("GptOssForCausalLM", {**EXPERTS, **TWO_KINDS, "sliding_window": 8}),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    "granite": ("GraniteForCausalLM", LLAMA),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", WINDOW),
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "opt": ("OPTForCausalLM", {**LLAMA, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "phi": ("PhiForCausalLM", LLAMA),
    "phi3": ("Phi3ForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "roberta": ("RobertaForMaskedLM", BERT),
    "starcoder2": ("Starcoder2ForCausalLM", LLAMA),
    # Its decoder, checkpointed, sets requires_grad of a tensor in forward, where Dynamo breaks the graph.
    "t5": ("T5ForTokenClassification", T5),
    "vit": ("ViTForImageClassification", IMAGES),
}


def made(
    name: str,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    as_class: str | None = None,
    **changes: Any,
) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """Return (model, (), inputs with labels). ``as_class`` and ``changes`` replace transformers' class and settings."""
    torch.manual_seed(0)
    class_name, settings = ARCHITECTURES[name]
    model_class = getattr(transformers, as_class or class_name)
    config = model_class.config_class(**{**settings, **changes})
    config.use_cache = False  # before the model: encoders and decoders copy it
    model = model_class(config).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if name == "vit":
        pixels, labels = torch.randn(2, 3, 32, 32).to(dtype), torch.randint(0, 10, (2,))
        return model, (), {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(3, 128, (2, 16))
    return model, (), {"input_ids": ids, "labels": ids}
