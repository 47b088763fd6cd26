"""Find the fused MLPs in each architecture of transformers, and the reasons for MLPs that are not fused.

    python benchmarks/laboratory/coverage.py

The script builds every architecture of the installed ``transformers`` with two layers, width 64 and random weights. It
downloads nothing. It runs each one, and captures it with ``torch_fused_ops.explain`` in training and in evaluation
mode. Each architecture has its own process, so that a crash costs one result. Each result is written at once, as
a JSON line. A second run continues, unless torch, transformers or the recognizer have changed.
``python docs/generate.py`` then writes ``docs/coverage.md``.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

import torch_fused_ops as tfo
from torch_fused_ops import activations
from torch_fused_ops.benchmarks.harness import RESULTS
from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import DROPOUT
from torch_fused_ops.lowerings import recognize

SECONDS = 240  # limit of an architecture's processor time; its wall time may be ten times as long
MODES = ("train", "eval")
LARGEST = 200_000_000  # parameters; larger models are not built

# ---- every architecture, tiny ----------------------------------------------------------------------------------------

# Names of settings in configurations. Only names that a configuration has are set.
_NAMES: dict[int, str] = {
    1: "n_group topk_group",
    2: """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers
        num_encoder_layers decoder_num_hidden_layers num_blocks encoder_num_hidden_layers decoder_num_layers
        num_dense_layers depth num_self_attends_per_block l_layers x_layers r_layers num_experts_per_tok moe_topk
        num_experts_per_token moe_k top_k_experts num_key_value_heads num_frames""",
    4: """num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads
        decoder_num_attention_heads encoder_num_attention_heads num_self_attention_heads num_cross_attention_heads
        attention_heads num_kv_heads linear_num_key_heads linear_num_value_heads num_experts num_local_experts
        n_routed_experts moe_num_experts""",
    8: "sliding_window patch_size num_queries num_latents rotary_dim",
    16: "head_dim attention_head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim",
    32: """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank
        moe_shared_expert_intermediate_size image_size""",
    64: """hidden_size d_model n_embd embed_dim embedding_size dim encoder_hidden_size decoder_hidden_size
        word_embed_proj_dim projection_dim emb_dim fpn_hidden_size conv_dim output_dim lru_width fusion_hidden_size
        encoder_hidden_dim cross_attention_hidden_size mask_feature_size feature_size qk_channels v_channels d_latents
        vision_hidden_size text_hidden_size entity_emb_size""",
    128: """intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner ffn_hidden_size d_inner
        decoder_intermediate_size mlp_dim dim_feedforward feed_forward_size encoder_feedforward_dim
        dense_intermediate_size intermediate_size_mlp prompt_intermediate_size max_position_embeddings n_positions
        max_source_positions max_target_positions""",
    256: "vocab_size text_vocab_size entity_vocab_size vocab_size_per_layer_input",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
# Changes to SIZES, tried in turn until the model builds and runs. None removes a name. "unset" also sets names whose
# default is None.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None, "num_heads": 1},
    {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "num_heads": 2},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
    {"num_key_value_heads": 4, "unset": True},
    {"image_size": 64, "patch_size": None, "num_key_value_heads": None},
    {"patch_size": None, "image_size": None},
    {"head_dim": None, "num_attention_heads": None, "num_heads": None, "num_key_value_heads": None},
    {"image_size": None, "patch_size": None, "max_position_embeddings": None, "sliding_window": None},
    dict.fromkeys(
        name for name in SIZES if "layers" not in name and name != "depth"
    ),  # the published sizes, two layers
)
SPECIAL = {"attention_types": [[["global", "local"], 1]]}  # a setting of GPT-Neo


def architectures() -> dict[str, tuple[str, str]]:
    """Return each architecture's configuration and model class: the bare model, or else its first head."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    heads = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")
    tables = ["MODEL_MAPPING_NAMES", *(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in heads)]
    tables += sorted(
        n for n in dir(auto) if n.startswith("MODEL_FOR") and n.endswith("_MAPPING_NAMES") and n not in tables
    )
    classes: dict[str, tuple[str, str]] = {}
    for table in tables:
        for name, model in getattr(auto, table).items():
            if name in CONFIG_MAPPING_NAMES:
                classes.setdefault(name, (CONFIG_MAPPING_NAMES[name], model if isinstance(model, str) else model[0]))
    for name, config in CONFIG_MAPPING_NAMES.items():  # parts of other architectures: text and vision towers
        classes.setdefault(name, (config, config.removesuffix("Config") + "Model"))
    return dict(sorted(classes.items()))


def _settings(config: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's arguments: the SIZES whose names the configuration or its parts have."""
    from transformers import PretrainedConfig

    sizes = {**SIZES, **variant}
    result: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            result[name] = {**_settings(value, variant), "model_type": value.model_type}
        elif name in SPECIAL:
            result[name] = SPECIAL[name]
        elif name == "depths" and isinstance(value, (list, tuple)):
            result[name] = [1] * len(value)
        elif value is None and sizes.get("unset") and name in SIZES:
            result[name] = sizes[name]
        elif isinstance(value, bool) or value is None or isinstance(value, (list, tuple, dict)):
            continue
        elif sizes.get(name) is not None and isinstance(value, (int, float)):
            result[name] = min(sizes[name], value) if value > 0 else value
        elif name.endswith("_token_id") and isinstance(value, int):
            result[name] = value % 256 if sizes.get("vocab_size") else value
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            result[name] = 0
    return result


def _models(config_name: str, model_name: str) -> Iterator[Any]:
    """Yield the model in every variant, or the error of a variant that cannot be built."""
    import transformers

    config_class, model_class = getattr(transformers, config_name), getattr(transformers, model_name)
    default = config_class()
    tried: list[dict[str, Any]] = []
    for variant in VARIANTS:
        settings = _settings(default, variant)
        if settings in tried:
            continue
        tried.append(settings)
        try:
            config = config_class(**settings)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            yield model_class(config)
        except Exception as error:
            yield error


def _image(config: Any) -> tuple[int, int, int]:
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None)
        if size is not None:
            height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
            return getattr(part, "num_channels", 3), height, width
    return getattr(config, "num_channels", 3) or 3, 64, 64


def _inputs(model: Any) -> dict[str, Any]:
    """Return inputs for the model's ``forward``, chosen by the names of its parameters."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 256
    batch, length = 2, 16
    ids = torch.randint(3, max(4, min(vocabulary, 250)), (batch, length))
    image = torch.randn(batch, *_image(config))
    frames = getattr(config, "num_frames", None) or 2
    makers: dict[str, Any] = {
        "input_ids": lambda: ids,
        "attention_mask": lambda: torch.ones_like(ids),
        "decoder_input_ids": lambda: ids,
        "pixel_values": lambda: image,
        "pixel_values_videos": lambda: image[:, None].expand(-1, frames, -1, -1, -1),
        "pixel_mask": lambda: torch.ones(batch, *image.shape[-2:], dtype=torch.long),
        "noise": lambda: torch.rand(batch, 16),
        "bbox": lambda: torch.zeros(batch, length, 4, dtype=torch.long),
        "input_values": lambda: torch.randn(batch, 4000),
        "input_features": lambda: torch.randn(batch, getattr(config, "num_mel_bins", None) or 80, 64),
    }
    parameters = inspect.signature(model.forward).parameters
    if "grid_thw" in parameters:  # Qwen-VL's vision towers: each row is a patch of frames
        patch = getattr(config, "temporal_patch_size", 2) * config.patch_size**2
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
        patches = torch.randn(16, channels * patch)
        makers |= {"grid_thw": lambda: torch.tensor([[1, 4, 4]]), "hidden_states": lambda: patches}
        makers |= {"pixel_values": lambda: patches}
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = getattr(model, "main_input_name", None)
    names = [*required, main]
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    names += [n for n in ("input_ids", "attention_mask", "pixel_values", "bbox") if "input_ids" in parameters]
    chosen = {n: makers[n]() for n in names if n in parameters and n in makers}
    if "inputs_embeds" in required:
        chosen["inputs_embeds"] = torch.randn(batch, length, text.hidden_size)
    if "hidden_states" in required and "hidden_states" not in makers:
        chosen["hidden_states"] = torch.randn(batch, length, config.hidden_size)
    if getattr(config, "model_type", "").startswith(("videomae", "vivit", "timesformer", "vjepa")):
        chosen = {main: image[:, None].expand(-1, getattr(config, "num_frames", frames), -1, -1, -1).contiguous()}
    if "use_cache" in parameters or "use_cache" in vars(config):
        chosen["use_cache"] = False
    return chosen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import logging
    import warnings

    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        warnings.simplefilter("ignore")
        yield


def _calls(model: Any) -> dict[str, Any]:
    """Return arguments with which the model runs."""
    inputs, main = _inputs(model), getattr(model, "main_input_name", None)
    first: Exception | None = None
    for without in (
        () if main == "pixel_values" else ("pixel_values",),
        (),
        ("use_cache", "pixel_values"),
        ("attention_mask", "pixel_values"),
        ("input_ids", "attention_mask"),
        ("attention_mask", "use_cache"),
    ):
        arguments = {k: v for k, v in inputs.items() if k not in without}
        try:
            with torch.no_grad():
                model.eval()(**arguments)
            return arguments
        except Exception as error:
            first = first or error
    raise first or RuntimeError("no arguments")


def capture(config_name: str, model_name: str) -> dict[str, Any]:
    """Build, run and explain one architecture. If none of its variants runs, return ``{"error": …}``."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    errors: list[str] = []
    with _quiet():
        for model in _models(config_name, model_name):
            if isinstance(model, Exception):
                errors.append(_line(model))
                continue
            try:
                arguments = _calls(model)
            except Exception as error:
                errors.append(_line(error))
                continue
            result: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "modes": {}}
            for mode in MODES:
                torch._dynamo.reset()
                model.train(mode == "train")
                try:
                    with torch.set_grad_enabled(mode == "train"):
                        report = tfo.explain(model, **arguments)
                    sites = counted(asdict(site) for site in report.sites)
                    result["modes"][mode] = {"graphs": report.graphs, "sites": sites}
                except Exception as error:
                    result["modes"][mode] = {"error": _line(error)}
            return result
    return {"error": " | ".join(dict.fromkeys(errors)) or "no variant"}


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


# ---- the run ---------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    import transformers

    sources = [activations.__file__, *Path(recognize.__file__).parent.glob("*.py")]
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sorted(map(str, sources))))
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "recognizer": digest.hexdigest()[:12],
    }


def _capture_in_child(classes: tuple[str, str], out: Any) -> None:
    import resource

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))  # the first limit ends the process with SIGXCPU
    signal.alarm(10 * SECONDS)
    try:
        result = capture(*classes)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    out.send(result)
    out.close()
    os._exit(0)  # without teardown, which hangs for some models


def _warm_up() -> None:
    """Capture a model once before forking: Dynamo's first capture loads modules for 2 s."""
    torch.set_num_threads(1)  # a forked process cannot use its parent's threads
    with _quiet():
        tfo.explain(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)), torch.ones(4))
    torch._dynamo.reset()


def run(out: Path) -> None:
    """Capture the architectures that ``out`` lacks, each in its own process, as many at a time as there are cores."""
    every, now = architectures(), versions()
    results = {r["architecture"]: r for r in load(out) if r["versions"] == now}
    _warm_up()
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    running: dict[Any, tuple[str, Any]] = {}
    waiting = [n for n in every if n not in results][::-1]
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_capture_in_child, args=(every[name], send), daemon=True)
            process.start()
            send.close()
            running[receive] = (name, process)
        for ready in cast("list[Connection[Any, Any]]", wait(list(running))):
            name, process = running.pop(ready)
            try:
                result = ready.recv()
            except EOFError:
                process.join()
                result = {"error": f"the process ended with {process.exitcode}"}
            process.join()
            results[name] = {"architecture": name, "model": every[name][1], "versions": now, **result}
            print(f"{len(waiting)} left; {name}: {result.get('error', 'captured')}", flush=True)
            lines = (json.dumps(r, ensure_ascii=False) + "\n" for r in results.values())
            out.write_text("".join(lines), encoding="utf-8")


# Site fields that the page needs. Sites of a mode that agree in these fields become one record with a count.
FIELDS = ("op", "activation", "reason", "kind", "spelling")


def counted(sites: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge equal sites into records with a ``count``, in the order of their first site."""
    records: dict[str, dict[str, Any]] = {}
    for site in sites:
        record = {field: site[field] for field in FIELDS}
        record["kind"] = site["kind"] and site["kind"].name
        records.setdefault(json.dumps(record), {**record, "count": 0})["count"] += 1
    return list(records.values())


def load(path: Path) -> list[dict[str, Any]]:
    """Read the results of earlier runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


OUTCOMES = ("fused", "not fused", "not an MLP")


def outcome(site: dict[str, Any]) -> str:
    """Return one of OUTCOMES."""
    if site["op"]:
        return OUTCOMES[0]
    return OUTCOMES[1] if site["kind"] is None or Kind[site["kind"]].is_mlp else OUTCOMES[2]


def sites_of(result: dict[str, Any], *modes: str) -> Iterator[dict[str, Any]]:
    """Yield an architecture's sites except dropouts, by default in both modes."""
    for mode in modes or MODES:
        for site in result["modes"].get(mode, {}).get("sites", ()):
            if site["activation"] != DROPOUT:
                yield from itertools.repeat(site, site["count"])


def main(arguments: argparse.Namespace) -> int:
    """Capture every architecture that the results lack."""
    run(RESULTS / "coverage.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(main, __doc__))
