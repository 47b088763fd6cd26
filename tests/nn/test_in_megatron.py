"""Our modules as Megatron's layers build, save and load them. These tests model Megatron's behavior in plain Python;
tests/integrations/test_megatron_core.py runs Megatron itself.
"""

from __future__ import annotations

import copy
import math
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@dataclass
class Sharded:
    """Megatron's documented ``ShardedTensor.from_rank_offsets``, in numbers of elements."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: Any
    prepend_axis_num: int

    @classmethod
    def from_rank_offsets(
        cls, key: str, data: torch.Tensor, *places: tuple[int, int, int], replica_id: Any, prepend_axis_num: int
    ) -> Sharded:
        box = (1,) * prepend_axis_num + tuple(data.shape)
        offset, fragments = [0] * len(box), [1] * len(box)
        for axis, place, count in places:
            assert place in range(count) and fragments[axis] == 1
            offset[axis], fragments[axis] = place * box[axis], count
        global_shape = tuple(n * count for n, count in zip(box, fragments, strict=True))
        return cls(
            key, data, tuple(data.shape), global_shape, tuple(offset), tuple(fragments), replica_id, prepend_axis_num
        )


@dataclass
class Factory:
    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: Any

    def build(self) -> list[Sharded]:
        shards: list[Sharded] = self.build_fn(self.key, self.data, self.replica_id, None)
        return shards


@dataclass
class Object:
    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"ShardedTensor": Sharded, "ShardedTensorFactory": Factory, "ShardedObject": Object}
    for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("megatron.core.dist_checkpointing", "megatron.core.dist_checkpointing.mapping"):
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)


def written_by(states: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return (tensors that these ranks write, writes per extra state). Assert that no element is written twice."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    objects: dict[str, int] = {}
    for entry in (entry for state in states for entry in state.values()):
        for piece in entry.build() if isinstance(entry, Factory) else [entry]:
            main = all(i == 0 for i in piece.replica_id)
            if isinstance(piece, Object):
                name = f"{piece.key} {piece.global_offset} of {piece.global_shape}"
                objects[name] = objects.get(name, 0) + main
                continue
            tensor = tensors.setdefault(piece.key, torch.full(piece.global_shape, math.nan))
            times = written.setdefault(piece.key, torch.zeros(piece.global_shape))
            assert tensor.shape == piece.global_shape
            if main:
                box = (1,) * piece.prepend_axis_num + piece.local_shape
                box_slices = tuple(slice(i, i + n) for i, n in zip(piece.global_offset, box, strict=True))
                tensor[box_slices] = piece.data.detach()
                times[box_slices] += 1
    assert all(bool((times <= 1).all()) for times in written.values())
    return tensors, objects


def shard_of(module: Any, ranks: int, rank: int) -> Any:
    """Return a rank's shards of a module."""
    sharded = copy.deepcopy(module)
    for linear in (sharded.linear_fc1, sharded.linear_fc2):
        for name, p in list(linear.named_parameters()):
            spec = linear.shard_specs[name]
            if spec.axis is not None:
                groups = p.detach().chunk(spec.groups, spec.axis)
                shard = torch.cat([piece.chunk(ranks, spec.axis)[rank] for piece in groups], spec.axis)
                setattr(linear, name, torch.nn.Parameter(shard.contiguous()))
        linear.parallel = SimpleNamespace(size=ranks, rank=rank)
    return sharded


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("separate_keys", [False, True])
@pytest.mark.parametrize("offsets", [(), ((0, 2, 5),)], ids=["alone", "layers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_entries_of_an_mlp_cover_it_once(
    megatron: None, gated: bool, separate_keys: bool, offsets: Any, ranks: int
) -> None:
    mlp = MLP(config(gated_linear_unit=gated))
    shards = [shard_of(mlp, ranks, rank) for rank in range(ranks)]
    states = [
        module.sharded_state_dict(
            "mlp.", offsets, {"dp_cp_group": group(2, dp), "singleton_local_shards": separate_keys}
        )
        for module in shards
        for dp in range(2)
    ]
    actual, objects = written_by(states)
    expected = {f"mlp.{name}": p.detach() for name, p in mlp.named_parameters()}
    if gated and separate_keys:
        for name in ("weight", "bias"):
            key = f"mlp.linear_fc1.{name}"
            expected[f"{key}_w"], expected[f"{key}_v"] = expected.pop(key).chunk(2)
    assert actual.keys() == expected.keys()
    for key, t in actual.items():
        assert torch.equal(t[2] if offsets else t, expected[key])
        assert not offsets or (t.shape[0] == 5 and t[[0, 1, 3, 4]].isnan().all())
    place = "(2,) of (5,)" if offsets else "(0,) of (1,)"
    assert objects == {f"mlp.linear_fc{i}._extra_state {place}": 1 for i in (1, 2)}
    for module, state in zip(shards, states[::2], strict=True):
        parameters = dict(module.named_parameters())
        for key, entry in state.items():
            if isinstance(entry, Object):
                continue
            assert entry.data is parameters[key.removeprefix("mlp.")]  # Megatron's optimizers look states up by data
            if isinstance(entry, Factory):
                assert torch.equal(entry.merge_fn([piece.data for piece in entry.build()]), entry.data)


def test_unsupported_state_is_rejected(megatron: None) -> None:
    metadata = {"dp_cp_group": group(1, 0)}
    entry = MLP(config()).linear_fc1.sharded_state_dict("", (), metadata)["weight"]
    with pytest.raises(TypeError, match=r"original_sh_ten of type .*Sharded is not accepted"):
        distributed.apply_swiglu_sharded_factory(entry, ())

    class Theirs(torch.nn.Module):
        def __init__(self, *sizes: int, **arguments: Any) -> None:
            super().__init__()

        def sharded_state_dict(self, *arguments: Any) -> None:
            raise AssertionError

    mlp = MLP(config(), MLPSubmodules(linear_fc1=Theirs))
    with pytest.raises(ValueError, match="metadata without dp_cp_group is not accepted with linear_fc1 of type Theirs"):
        mlp.sharded_state_dict()
