"""``GroupedMLP``, a mixture's experts as in Megatron core's ``TEGroupedMLP``, and functions that sort its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_fused_ops.nn._gemms import GroupedGemms, check_gemm, check_shape, dense_gradient
from torch_fused_ops.nn.config import checked, read, read_groups
from torch_fused_ops.nn.linear import GroupedColumnParallelLinear, GroupedLinear, GroupedRowParallelLinear
from torch_fused_ops.nn.mlp import TEActivationFunctionBuilder, _Block, _check_divides, _from_megatron, _sizes
from torch_fused_ops.operators.routing import readable, rows_of_tokens, tokens_of_rows


class GroupedLinearInterface(Protocol):
    """The interface of the experts' linears."""

    def forward(
        self, hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], /
    ) -> tuple[Tensor, Tensor | None]:
        """Return (result, bias). With ``skip_bias_add`` bias is (num_local_experts, output size), otherwise None."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``backward`` deferred."""
        ...


class GroupedLinearBuilder(Protocol):
    """A builder of the experts' linears.

    ``groups_and_stride`` has tp_group, ep_group, pg_collection and the linear's name, as far as the MLP got them. The
    first linear's builder also gets ``stride``, as in ``LinearFc1Builder``.
    """

    def __call__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        **groups_and_stride: Any,
    ) -> GroupedLinearInterface: ...


@dataclass
class GroupedMLPSubmodules:
    """The builders of a ``GroupedMLP``'s children.

    Attributes:
        linear_fc1, linear_fc2: builders of the linears. The first linear adds its bias; the second returns its bias.
            linear_fc1 also gets ``stride``, as in ``LinearFc1Builder``.
        activation_func: builder of the activation module, used only if ``config.use_te_activation_func`` is True.
    """

    linear_fc1: GroupedLinearBuilder = GroupedColumnParallelLinear
    linear_fc2: GroupedLinearBuilder = GroupedRowParallelLinear
    activation_func: TEActivationFunctionBuilder | None = None


class GroupedMLP(_Block):
    """Several experts as one module. For the rows x of expert e, with probabilities p, it computes

        output = fc2_e(act(fc1_e(x) + bias1_e) · p) + bias2_e · p

    Each linear is one grouped GEMM (``torch.nn.functional.grouped_mm``), and the host does not wait for the GPU. If
    grouped_mm does not support the dtype, device or sizes (rows must be multiples of 16 bytes), each linear runs one
    GEMM per expert, and the host waits for ``tokens_per_expert``.

    Attributes:
        linear_fc1: weight (num_local_experts, ffn, h), or (…, 2 · ffn, h) if gated; bias (num_local_experts, …).
        linear_fc2: weight (num_local_experts, h, ffn), bias (num_local_experts, h).

    Args:
        num_local_experts: number of experts on this rank.
        config: as in ``MLP``. ffn is ``moe_ffn_hidden_size``; h is ``moe_latent_size``, or ``hidden_size`` if None.
        submodules: builders of the linears; by default the linears of ``torch_fused_ops.nn``.
        pg_collection: Megatron's ``ProcessGroupCollection``. Its ``expt_tp`` and ``ep`` are the defaults of tp_group
            and ep_group, and Megatron's checkpoints need its ``expt_dp``.
        name: as in ``MLP``.
        tp_group: the processes that shard each expert, as in ``MLP``. All get the same rows, and each returns the
            complete output. With Megatron's config each returns a summand, and Megatron's token dispatchers add them.
        ep_group: the processes among which the experts are distributed. This process's first expert has the number
            rank · num_local_experts. The caller sends rows to the ranks of their experts. With the same seed on all
            ranks, the experts start as they would in one process. Checkpoints number experts across all ranks.
        gemm: precision of both linears, as ``FusionPolicy.gemm``: "bf16" is the parameters' dtype, "fp8-rowwise" is
            float8 (``functional.grouped_linear_fp8``). Float8 needs bfloat16 rows and weights (autocast may cast them),
            sizes that are multiples of 16, and experts that are not sharded.

    Raises:
        ValueError, TypeError: the flags are incompatible; the message says why. ``forward`` does not check flags.

    Source: ``megatron.core.transformer.moe.experts.TEGroupedMLP``. Its parameters are weight0, weight1, …, which
    ``load_state_dict`` here also accepts.
    """

    _grouped = True

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: GroupedMLPSubmodules | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        *,
        tp_group: torch.distributed.ProcessGroup | None = None,
        ep_group: torch.distributed.ProcessGroup | None = None,
        gemm: str = "bf16",
    ) -> None:
        super().__init__(config, experts=True)
        submodules = checked("submodules", submodules) or GroupedMLPSubmodules()
        self.num_local_experts = checked("num_local_experts", num_local_experts, required=True)
        self.input_size, ffn, output_size = _sizes(config, True, None, None)
        self.ffn_hidden_size = ffn
        groups = read_groups(config, True, tp_group, ep_group, pg_collection, grouped=True)
        common: dict[str, Any] = {"tp_group": tp_group, "ep_group": ep_group}
        if pg_collection is not None:  # the linears read groups that are None from it
            common = {name: group for name, group in common.items() if group is not None}
        tp_group = groups.tp
        _check_divides(ffn, tp_group)
        width = "hidden_size" if read(config, "moe_latent_size") is None else "moe_latent_size"
        check_gemm(gemm, experts=True, **{width: output_size, "moe_ffn_hidden_size": ffn})
        self._probs_on_input = read(config, "moe_apply_probs_on_input")
        if self._probs_on_input and (topk := read(config, "moe_router_topk")) != 1:
            raise ValueError(
                f"moe_apply_probs_on_input=True is not accepted with moe_router_topk={topk!r}: a token must have one "
                "expert"
            )
        common |= {"config": config, "bias": read(config, "add_bias_linear"), "is_expert": True}
        first = {"skip_bias_add": False, **common, **_from_megatron(name, "linear_fc1", pg_collection)}
        second = {"skip_bias_add": True, **common, **_from_megatron(name, "linear_fc2", pg_collection)}
        self._build(submodules, (self.input_size, ffn, output_size), first, second, gemm)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | Sequence[int],
        permuted_probs: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return (output (T, h), None).

        Args:
            permuted_local_hidden_states: (T, h), sorted by expert.
            tokens_per_expert: rows per expert, as a tensor (num_local_experts,) or a sequence of integers. The sum must
                be T. A tensor's sum is checked only on a CPU in eager mode. Otherwise, rows beyond the sum have an
                output of 0 and gradients of 0.
            permuted_probs: (T,), a probability for each row; None means 1.

        Raises:
            TypeError, ValueError: a dtype or shape is not accepted.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        check_shape("permuted_local_hidden_states", x, (self.input_size,), "T")
        if probs is not None:
            check_shape("permuted_probs", probs, x.shape[:1])
        groups = GroupedGemms.from_counts(x, tokens_per_expert, self.num_local_experts)
        x = groups.zero_gradient_beyond(x)
        probs = None if probs is None else groups.zero_gradient_beyond(probs)
        if self._probs_on_input and probs is not None:
            x, probs = (x * probs.unsqueeze(-1)).to(x.dtype), None
        take_groups = isinstance(self.linear_fc1, GroupedLinear) and isinstance(self.linear_fc2, GroupedLinear)
        output, bias = self._run(x, probs, groups if take_groups else tokens_per_expert)
        output = dense_gradient(output)
        return groups.zero_beyond(output if bias is None else groups.add(output, bias, probs)), None


# ---- sorting rows by expert ------------------------------------------------------------------------------------------


class Permuted(NamedTuple):
    """The result of ``permute``.

    Attributes:
        rows: (T · k, h). Each token occurs once per expert of the token; rows are sorted by expert, then by token.
        tokens_per_expert: (num_experts,), int64, on the tokens' device.
        probs: (T · k,), the probability of each row; None if ``permute`` got none.
        order: (T, k), the indices of each token's rows.
    """

    rows: Tensor
    tokens_per_expert: Tensor
    probs: Tensor | None
    order: Tensor


def permute(tokens: Tensor, experts: Tensor, probs: Tensor | None, num_experts: int) -> Permuted:
    """Sort tokens by expert, without waiting for a GPU. All tokens have the same number k of experts.

        probs, experts = router(x).softmax(-1).topk(k)
        rows, tokens_per_expert, row_probs, order = permute(x, experts, probs, num_experts)
        output, _ = grouped_mlp(rows, tokens_per_expert, row_probs)
        y = unpermute(output, order)

    Args:
        tokens: (T, h).
        experts: (T, k), integers from 0 to num_experts - 1.
        probs: (T, k), or None.
        num_experts: the number of all experts.

    Raises:
        TypeError, ValueError: a dtype or shape is not accepted; or, on a CPU, an expert's number is out of range.
    """
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise TypeError(f"experts of dtype {experts.dtype} are not accepted: they must be integers")
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} are not accepted: they must be (T, h)")
    if experts.ndim != 2 or experts.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"experts of shape {tuple(experts.shape)} are not accepted: they must be ({tokens.shape[0]}, k)"
        )
    if probs is not None and probs.shape != experts.shape:
        raise ValueError(f"probs of shape {tuple(probs.shape)} are not accepted: they must be as experts")
    if readable(experts) and experts.numel():
        low, high = map(int, experts.aminmax())
        if low < 0 or high >= num_experts:
            raise ValueError(f"experts from {low} to {high} are not accepted: they must be from 0 to {num_experts - 1}")
    flat = experts.flatten()
    ordered, source = flat.sort(stable=True)  # row i is element source[i] of the T · k elements
    ends = torch.searchsorted(ordered, torch.arange(num_experts, dtype=flat.dtype, device=flat.device), right=True)
    order = _inverse(source).view(experts.shape)
    rows = rows_of_tokens(tokens, source // max(experts.shape[1], 1), order)
    row_probs = None if probs is None else probs.flatten().index_select(0, source)
    return Permuted(rows, ends.diff(prepend=ends.new_zeros(1)), row_probs, order)


def unpermute(rows: Tensor, order: Tensor) -> Tensor:
    """Sum each token's rows: rows (T · k, h) → (T, h). ``order`` comes from ``permute``.

    Raises:
        ValueError: a shape is not accepted.
    """
    if order.ndim != 2:
        raise ValueError(f"order of shape {tuple(order.shape)} is not accepted: it must be (T, k)")
    if rows.ndim != 2 or rows.shape[0] != order.numel():
        raise ValueError(f"rows of shape {tuple(rows.shape)} are not accepted: they must be ({order.numel()}, h)")
    token_of_row = _inverse(order.flatten()) // max(order.shape[1], 1)
    return tokens_of_rows(rows, token_of_row, order)


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
