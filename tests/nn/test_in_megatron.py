"""Our modules as Megatron's layers build, save and load them. These tests model Megatron's behavior in plain Python;
tests/integrations/test_megatron_core.py runs Megatron itself.
"""

from __future__ import annotations

import math
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import raises

from torch_fused_ops import distributed
from torch_fused_ops.nn import MLP, ColumnParallelLinear, MLPSubmodules, RowParallelLinear

HIDDEN, FFN = 8, 12
KINDS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")


def config(**flags: Any) -> Any:
    """Return the attributes of Megatron's ``TransformerConfig`` that our modules read."""
    attributes = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "activation_func": F.silu, "gated_linear_unit": True}
    attributes |= {"add_bias_linear": True, "params_dtype": torch.float32}
    sizes = ("tensor_model_parallel_size", "expert_tensor_parallel_size", "expert_model_parallel_size")
    return SimpleNamespace(**{**attributes, **dict.fromkeys(sizes, 1), **flags})


def group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def expert(**flags: Any) -> MLP:
    return MLP(config(**flags), is_expert=True, ffn_hidden_size=FFN)


GROUPS = SimpleNamespace(tp=group(1, 0))


def test_transformer_layers_can_build_an_mlp() -> None:
    """``TransformerLayer`` calls a partial of ``as_mlp_submodule``, or the class itself."""
    for build in (partial(MLP.as_mlp_submodule, submodules=MLPSubmodules()), MLP):
        mlp = build(config=config(), pg_collection=GROUPS, is_mtp_layer=False, name="decoder.0.mlp")
        assert mlp(torch.randn(3, 2, HIDDEN))[0].shape == (3, 2, HIDDEN)


def test_custom_linears_get_name_and_groups() -> None:
    received: dict[str, Any] = {}

    class First(ColumnParallelLinear):
        def __init__(self, *sizes: int, **arguments: Any) -> None:
            received["fc1"] = arguments["name"], arguments["pg_collection"]
            super().__init__(*sizes, **arguments)

    MLP(config(), MLPSubmodules(linear_fc1=First), name="mlp", pg_collection=GROUPS)
    assert received == {"fc1": ("mlp.linear_fc1", GROUPS)}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MLP(config(tensor_model_parallel_size=2)), "tensor_model_parallel_size=2 .* tp_group"),
        (lambda: RowParallelLinear(4, 4, config=config(tensor_model_parallel_size=2)), "parallel_size=2"),
        (lambda: MLP(config(), is_expert=True), "ffn_hidden_size=None is not accepted for an expert"),
        (lambda: expert(moe_mlp_glu_interleave_size=32), "moe_mlp_glu_interleave_size=32 is not accepted"),
        (lambda: expert(expert_model_parallel_size=2), "is_expert=True .* expert_model_parallel_size=2"),
        (lambda: expert(expert_tensor_parallel_size=2), "is_expert=True .* expert_tensor_parallel_size=2"),
    ],
)
def test_missing_groups_and_unsupported_experts_are_rejected(build: Any, words: str) -> None:
    raises(ValueError, words, build)


def test_parameters_have_megatrons_marks() -> None:
    """Clipping counts a parameter without ``tensor_model_parallel`` once."""
    mlp = MLP(config())
    marks = {name: [getattr(p, kind, None) for kind in KINDS] for name, p in mlp.named_parameters()}
    assert marks == {
        "linear_fc1.weight": [True, 0, 2, True],
        "linear_fc1.bias": [True, 0, 2, True],
        "linear_fc2.weight": [True, 1, 1, True],
        "linear_fc2.bias": [None, None, None, True],
    }


def test_state_dicts_of_megatron_load() -> None:
    """Megatron's state dict has an ``_extra_state`` per linear."""
    mlp = MLP(config())
    megatron_state = {f"decoder.{name}": torch.randn_like(p) for name, p in mlp.named_parameters()}
    megatron_state |= {"decoder.linear_fc1._extra_state": None, "decoder.linear_fc2._extra_state": b""}
    outer = torch.nn.ModuleDict({"decoder": mlp})
    outer.load_state_dict(megatron_state)
    assert all(torch.equal(p, megatron_state[f"decoder.{name}"]) for name, p in mlp.named_parameters())


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def test_checkpoints_in_megatrons_format_load(tmp_path: Path) -> None:
    """Megatron stacks layers, and stores [gate; up] with all gate rows first.

    ``TransformerBlock`` and ``MLP`` of Megatron core write these keys and shapes. A checkpoint also has
    ``common_state`` and extra states.
    """
    layers, layer, prefix = 3, 1, "decoder.layers.mlp."
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert f'mlp.sharded_state_dict("{prefix}", ((0, layer, layers),))' in page
    shapes = {"linear_fc1.weight": (2 * FFN, HIDDEN), "linear_fc1.bias": (2 * FFN,)}
    shapes |= {"linear_fc2.weight": (HIDDEN, FFN), "linear_fc2.bias": (HIDDEN,)}
    written: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        written[prefix + key] = numbered((layers, *shape), 10**6 * len(written))
    other_entries = {"common_state/shard_0_1": {"args": 1}, f"{prefix}linear_fc1._extra_state/shard_1_3": b""}
    dcp.save({**written, **other_entries}, checkpoint_id=tmp_path)

    mlp = MLP(config())
    dcp.load(mlp.sharded_state_dict(prefix, ((0, layer, layers),)), checkpoint_id=tmp_path)
    for name, p in mlp.named_parameters():
        assert torch.equal(p, written[prefix + name][layer])


class Entry(NamedTuple):
    """Megatron's entry for a tensor: the arguments that decide its place, and whether it is split into gate and up."""

    data: torch.Tensor | None
    axis: int | None
    offsets: tuple[Any, ...]
    groups: tuple[Any, ...]
    is_split: tuple[bool, ...] = ()


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the functions of Megatron core that make its entries."""

    def make_sharded_tensors_for_checkpoint(
        state: dict[str, Any], prefix: str, axes: dict[str, int], offsets: Any, *, tp_group: Any, dp_cp_group: Any
    ) -> dict[str, Entry]:
        groups = tp_group, dp_cp_group
        return {prefix + name: Entry(t, axes.get(name), offsets, groups) for name, t in state.items()}

    def sharded_state_dict_default(child: Any, prefix: str, offsets: Any, metadata: Any) -> Any:
        return child.sharded_state_dict(prefix, offsets, metadata)

    def apply_swiglu_sharded_factory(entry: Entry, offsets: Any, separate_keys: bool) -> Entry:
        return entry._replace(is_split=(True, separate_keys))

    modules = {
        "utils": [make_sharded_tensors_for_checkpoint, sharded_state_dict_default],
        "mlp": [apply_swiglu_sharded_factory],
    }
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, functions in modules.items():
        module = types.ModuleType(name)
        vars(module).update({fn.__name__: fn for fn in functions})
        monkeypatch.setitem(sys.modules, f"megatron.core.transformer.{name}", module)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("separate_keys", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_megatron_makes_the_entries_of_an_mlp(
    megatron: None, gated: bool, separate_keys: bool, is_sharded: bool
) -> None:
    mlp, offsets, replicas = MLP(config(gated_linear_unit=gated)), ((0, 2, 5),), group(2, 0)
    ranks = group(2, 1) if is_sharded else None
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        linear.parallel = SimpleNamespace(group=ranks) if is_sharded else None
    metadata = {"dp_cp_group": replicas, "singleton_local_shards": separate_keys}
    state = mlp.sharded_state_dict("mlp.", offsets, metadata)
    axes = {"linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1}
    for name, p in mlp.named_parameters():
        entry = state.pop(f"mlp.{name}")
        is_split = (True, separate_keys) if gated and "fc1" in name else ()
        assert entry == (p, axes.get(name), offsets, (ranks, replicas), is_split)
        assert entry.data is p  # Megatron's optimizers look states up by data
    assert state == {f"mlp.linear_fc{i}._extra_state": (None, None, offsets, (ranks, replicas), ()) for i in (1, 2)}


def test_unsupported_state_is_rejected(megatron: None) -> None:
    metadata = {"dp_cp_group": group(1, 0)}
    entry = MLP(config()).linear_fc1.sharded_state_dict("", (), metadata)["weight"]
    with pytest.raises(TypeError, match=r"original_sh_ten of type .*Entry is not accepted"):
        distributed.apply_swiglu_sharded_factory(entry, ())

    class Theirs(torch.nn.Module):
        def __init__(self, *sizes: int, **arguments: Any) -> None:
            super().__init__()

        def sharded_state_dict(self, *arguments: Any) -> None:
            raise AssertionError

    mlp = MLP(config(), MLPSubmodules(linear_fc1=Theirs))
    with pytest.raises(ValueError, match="metadata without dp_cp_group is not accepted with linear_fc1 of type Theirs"):
        mlp.sharded_state_dict()
