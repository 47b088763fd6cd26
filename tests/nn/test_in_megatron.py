"""Our modules where Megatron's layers build, save and load them. What Megatron does is said here in arithmetic; with
Megatron itself: tests/integrations/test_megatron_core.py.
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
from torch_fused_ops.nn import MLP, ColumnParallelLinear, GroupedColumnParallelLinear, GroupedMLP, MLPSubmodules
from torch_fused_ops.nn import RowParallelLinear as Row

HIDDEN, FFN, EXPERTS = 8, 12, 4
KINDS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")


def config(**flags: Any) -> Any:
    """The attributes of Megatron's ``TransformerConfig`` that our modules read."""
    given = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "moe_ffn_hidden_size": FFN, "activation_func": F.silu}
    given |= {"gated_linear_unit": True, "add_bias_linear": True, "params_dtype": torch.float32}
    sizes = ("tensor_model_parallel_size", "expert_tensor_parallel_size", "expert_model_parallel_size")
    return SimpleNamespace(**{**given, **dict.fromkeys(sizes, 1), **flags})


def group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def collection(ep: tuple[int, int] = (1, 0)) -> Any:
    one = group(1, 0)
    return SimpleNamespace(tp=one, expt_tp=one, ep=group(*ep), expt_dp=one, dp_cp=one)


def test_a_transformer_layer_builds_an_mlp() -> None:
    """As ``TransformerLayer`` does: a partial of ``as_mlp_submodule``, or the class itself."""
    for build in (partial(MLP.as_mlp_submodule, submodules=MLPSubmodules()), MLP):
        mlp = build(config=config(), pg_collection=collection(), is_mtp_layer=False, name="decoder.0.mlp")
        assert mlp(torch.randn(3, 2, HIDDEN))[0].shape == (3, 2, HIDDEN)


def test_own_linears_get_the_name_and_the_groups() -> None:
    asked: dict[str, Any] = {}

    class First(ColumnParallelLinear):
        def __init__(self, *sizes: int, **arguments: Any) -> None:
            asked["fc1"] = arguments["name"], arguments["pg_collection"]
            super().__init__(*sizes, **arguments)

    class Grouped(GroupedColumnParallelLinear):
        def __init__(self, *sizes: int, **arguments: Any) -> None:
            asked["grouped"] = arguments["name"], arguments["pg_collection"], "tp_group" in arguments
            super().__init__(*sizes, **arguments)

    groups = collection()
    MLP(config(), MLPSubmodules(linear_fc1=First), name="mlp", pg_collection=groups)
    submodules = SimpleNamespace(linear_fc1=Grouped, linear_fc2=Grouped, activation_func=None)
    GroupedMLP(EXPERTS, config(), submodules, groups, "experts")  # as MoELayer: by position, and by name
    GroupedMLP(EXPERTS, config(), submodules, pg_collection=groups, name="experts")
    assert asked == {"fc1": ("mlp.linear_fc1", groups), "grouped": ("experts.linear_fc2", groups, False)}


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: MLP(config(tensor_model_parallel_size=2)), ValueError, "tensor_model_parallel_size=2 .* tp_group"),
        (lambda: GroupedMLP(2, config(expert_model_parallel_size=2)), ValueError, "expert_model_parallel_size=2 .* ep"),
        (lambda: GroupedMLP(2, config(expert_tensor_parallel_size=2)), ValueError, "expert_tensor_parallel_size=2"),
        (lambda: Row(4, 4, config=config(tensor_model_parallel_size=2)), ValueError, "tensor_model_parallel_size=2"),
        (lambda: MLP(config(), pg_collection=3), TypeError, "pg_collection=3 is not accepted: .* process group tp"),
        (lambda: GroupedMLP(2, config(), None, group(1, 0)), TypeError, "must have the process group expt_tp"),
        (lambda: MLP(config(), name=3), TypeError, "name=3 is not accepted: it must be a string"),
    ],
)
def test_what_is_refused(build: Any, error: type, words: str) -> None:
    raises(error, words, build)


def test_parameters_are_marked_as_megatrons_training_reads_them() -> None:
    """Clipping counts what has no ``tensor_model_parallel`` on one rank; DDP sums experts' gradients apart."""
    mlp = MLP(config())
    marks = {name: [getattr(p, kind, None) for kind in KINDS] for name, p in mlp.named_parameters()}
    assert marks == {
        "linear_fc1.weight": [True, 0, 2, True],
        "linear_fc1.bias": [True, 0, 2, True],
        "linear_fc2.weight": [True, 1, 1, True],
        "linear_fc2.bias": [None, None, None, True],
    }
    for flags, allreduce in (({}, True), ({"expert_model_parallel_size": 2}, False)):
        experts = GroupedMLP(2, config(**flags), None, collection((2, 0)))
        assert {p.allreduce for p in experts.parameters()} == {allreduce}
        assert experts.linear_fc2.weight.partition_dim == 2


def test_a_state_dict_of_megatrons_loads() -> None:
    """``_extra_state`` of each linear, and a weight and a bias for each expert."""
    mlp, experts = MLP(config()), GroupedMLP(EXPERTS, config())
    theirs = {f"decoder.{name}": torch.randn_like(p) for name, p in mlp.named_parameters()}
    theirs |= {"decoder.linear_fc1._extra_state": None, "decoder.linear_fc2._extra_state": b""}
    outer = torch.nn.ModuleDict({"decoder": mlp})
    outer.load_state_dict(theirs)
    assert all(torch.equal(p, theirs[f"decoder.{name}"]) for name, p in mlp.named_parameters())

    whole = {name: torch.randn_like(p) for name, p in experts.named_parameters()}
    theirs = {f"{name}{i}": t[i] for name, t in whole.items() for i in range(EXPERTS)}
    theirs |= {f"linear_fc1._extra_state{i or ''}": None for i in range(EXPERTS)}
    experts.load_state_dict(theirs)
    assert all(torch.equal(p, whole[name]) for name, p in experts.named_parameters())
    del theirs["linear_fc1.weight2"]
    raises(RuntimeError, r"Missing key.*linear_fc1.weight", experts.load_state_dict, theirs)


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def test_a_checkpoint_in_megatrons_format_is_read(tmp_path: Path) -> None:
    """Megatron stacks layers and experts, and stores [gate; up] with all gate rows first.

    Keys and shapes are those of ``TransformerBlock``, ``MLP`` and ``TEGroupedMLP`` in Megatron core. A checkpoint also
    has ``common_state`` and extra states.
    """
    layers, at = 3, 1
    mlp, experts = "decoder.layers.mlp.", "decoder.layers.mlp.experts.experts."
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert f'mlp.sharded_state_dict("{mlp}", ((0, layer, layers),))' in page and f'`"{experts}"`' in page
    shapes = {"linear_fc1.weight": (2 * FFN, HIDDEN), "linear_fc1.bias": (2 * FFN,)}
    shapes |= {"linear_fc2.weight": (HIDDEN, FFN), "linear_fc2.bias": (HIDDEN,)}
    written: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        for prefix, stacked in ((mlp, (layers,)), (experts, (layers, EXPERTS))):
            written[prefix + key] = numbered((*stacked, *shape), 10**6 * len(written))
    rest = {"common_state/shard_0_1": {"args": 1}, f"{mlp}linear_fc1._extra_state/shard_1_3": b""}
    dcp.save({**written, **rest}, checkpoint_id=tmp_path)

    for module, prefix in ((MLP(config()), mlp), (GroupedMLP(EXPERTS, config()), experts)):
        dcp.load(module.sharded_state_dict(prefix, ((0, at, layers),)), checkpoint_id=tmp_path)
        for name, p in module.named_parameters():
            assert torch.equal(p, written[prefix + name][at])


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
        at, counts = [0] * len(box), [1] * len(box)
        for axis, place, count in places:
            assert place in range(count) and counts[axis] == 1
            at[axis], counts[axis] = place * box[axis], count
        whole = tuple(n * count for n, count in zip(box, counts, strict=True))
        return cls(key, data, tuple(data.shape), whole, tuple(at), tuple(counts), replica_id, prepend_axis_num)


@dataclass
class Factory:
    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: Any

    def build(self) -> list[Sharded]:
        found: list[Sharded] = self.build_fn(self.key, self.data, self.replica_id, None)
        return found


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


def whole_of(states: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors that these ranks write, and how often each extra state is written; no element twice."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    objects: dict[str, int] = {}
    for entry in (entry for state in states for entry in state.values()):
        for one in entry.build() if isinstance(entry, Factory) else [entry]:
            main = all(i == 0 for i in one.replica_id)
            if isinstance(one, Object):
                name = f"{one.key} {one.global_offset} of {one.global_shape}"
                objects[name] = objects.get(name, 0) + main
                continue
            whole = tensors.setdefault(one.key, torch.full(one.global_shape, math.nan))
            times = written.setdefault(one.key, torch.zeros(one.global_shape))
            assert whole.shape == one.global_shape
            if main:
                box = (1,) * one.prepend_axis_num + one.local_shape
                at = tuple(slice(i, i + n) for i, n in zip(one.global_offset, box, strict=True))
                whole[at] = one.data.detach()
                times[at] += 1
    assert all(bool((times <= 1).all()) for times in written.values())
    return tensors, objects


def share_of(module: Any, ranks: int, rank: int) -> Any:
    """A rank's module, of one that holds all."""
    shared = copy.deepcopy(module)
    for linear in (shared.linear_fc1, shared.linear_fc2):
        for name, p in list(linear.named_parameters()):
            part = linear.shard_specs[name]
            if part.axis is not None:
                pieces = p.detach().chunk(part.groups, part.axis)
                own = torch.cat([piece.chunk(ranks, part.axis)[rank] for piece in pieces], part.axis)
                setattr(linear, name, torch.nn.Parameter(own.contiguous()))
        linear.parallel = SimpleNamespace(size=ranks, rank=rank)
    return shared


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offsets", [(), ((0, 2, 5),)], ids=["alone", "layers"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_mlps_entries_make_the_whole(megatron: None, gated: bool, apart: bool, offsets: Any, ranks: int) -> None:
    mlp = MLP(config(gated_linear_unit=gated))
    shares = [share_of(mlp, ranks, rank) for rank in range(ranks)]
    states = [
        one.sharded_state_dict("mlp.", offsets, {"dp_cp_group": group(2, dp), "singleton_local_shards": apart})
        for one in shares
        for dp in range(2)
    ]
    found, objects = whole_of(states)
    wanted = {f"mlp.{name}": p.detach() for name, p in mlp.named_parameters()}
    if gated and apart:
        for name in ("weight", "bias"):
            key = f"mlp.linear_fc1.{name}"
            wanted[f"{key}_w"], wanted[f"{key}_v"] = wanted.pop(key).chunk(2)
    assert found.keys() == wanted.keys()
    for key, t in found.items():
        assert torch.equal(t[2] if offsets else t, wanted[key])
        assert not offsets or (t.shape[0] == 5 and t[[0, 1, 3, 4]].isnan().all())
    place = "(2,) of (5,)" if offsets else "(0,) of (1,)"
    assert objects == {f"mlp.linear_fc{i}._extra_state {place}": 1 for i in (1, 2)}
    for one, state in zip(shares, states[::2], strict=True):
        parameters = dict(one.named_parameters())
        for key, entry in state.items():
            if isinstance(entry, Object):
                continue
            assert entry.data is parameters[key.removeprefix("mlp.")]  # by which optimizers find it
            if isinstance(entry, Factory):
                assert torch.equal(entry.merge_fn([piece.data for piece in entry.build()]), entry.data)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offsets", [(), ((0, 2, 5),)], ids=["alone", "layers"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_experts_entries_make_the_whole(
    megatron: None, gated: bool, apart: bool, offsets: Any, tp: int, ep: int
) -> None:
    """``TEGroupedMLP``'s entries for so many experts: their axis behind the layers', or a key for each."""
    given = config(gated_linear_unit=gated)
    whole, shares = GroupedMLP(EXPERTS, given), []
    here = EXPERTS // ep
    for rank in range(ep):
        part = GroupedMLP(here, given, None, collection((ep, rank)))
        part.load_state_dict({k: t[rank * here : (rank + 1) * here] for k, t in whole.state_dict().items()})
        shares += [share_of(part, tp, i) for i in range(tp)]
    metadata = {"dp_cp_group": group(3, 2), "singleton_local_shards": apart}  # not the group of the experts' replicas
    states = [one.sharded_state_dict("mlp.experts.", offsets, metadata) for one in shares]
    found, objects = whole_of(states)
    wanted, states_of = {}, set()
    for name, p in whole.named_parameters():
        linear = name.split(".")[0]
        halves = [("_w", 0), ("_v", 1)] if gated and apart and linear == "linear_fc1" else [("", None)]
        for suffix, half in halves:
            for e in range(EXPERTS) if apart else [None]:
                number = "" if e is None else f"{e}."
                t = p.detach() if e is None else p.detach()[e]
                wanted[f"mlp.experts.experts.{number}{name}{suffix}"] = t if half is None else t.chunk(2)[half]
        for e in range(EXPERTS):
            at = [place[1:] for place in offsets] + ([] if apart else [(e, EXPERTS)])
            at = at or [(0, 1)]
            number = f"{e}." if apart else ""
            states_of.add(
                f"mlp.experts.experts.{number}{linear}._extra_state {tuple(i for i, _ in at)} of "
                f"{tuple(n for _, n in at)}"
            )
    assert found.keys() == wanted.keys() and objects == dict.fromkeys(states_of, 1)
    for key, t in found.items():
        assert torch.equal(t[2] if offsets else t, wanted[key]), key
    for one, state in zip(shares, states, strict=True):
        assert all(f"mlp.experts.{name}" in state for name, _ in one.named_parameters())
        for name, p in one.named_parameters():
            entry = state[f"mlp.experts.{name}"]
            assert entry.data is p
            if isinstance(entry, Factory):
                assert torch.equal(entry.merge_fn([piece.data for piece in entry.build()]), p)


def test_grouped_linears_in_megatrons_experts(megatron: None) -> None:
    """``TEGroupedMLP`` asks its linears for entries of each expert, weight0, weight1, …, and splits them itself."""
    linear = GroupedColumnParallelLinear(2, HIDDEN, FFN, config=config(), pg_collection=collection((2, 1)))
    state = linear.sharded_state_dict("linear_fc1.", ((0, 1, 3),), {"dp_cp_group": group(1, 0)})
    names = {"weight0", "weight1", "bias0", "bias1", "_extra_state", "_extra_state1"}
    assert state.keys() == {f"linear_fc1.{name}" for name in names}
    one = state["linear_fc1.weight1"]
    assert one.key == "linear_fc1.weight" and torch.equal(one.data, linear.weight[1])
    assert one.global_shape == (3, 4, FFN, HIDDEN) and one.global_offset == (1, 3, 0, 0)
    alone = linear.sharded_state_dict("linear_fc1.", (), {"dp_cp_group": group(1, 0), "singleton_local_shards": True})
    assert [alone[f"linear_fc1.weight{i}"].key for i in (0, 1)] == ["2.linear_fc1.weight", "3.linear_fc1.weight"]


def test_what_state_is_refused(megatron: None) -> None:
    metadata = {"dp_cp_group": group(1, 0)}
    experts = GroupedMLP(2, config(), ep_group=group(2, 0))
    raises(ValueError, r"an ep_group alone .* pg_collection.expt_dp", experts.sharded_state_dict, "", (), metadata)
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
