"""Rows of tokens in the order of their experts, and back: what stands on both sides of the experts of a layer.

Every token has the same number of experts, so that all sizes are known to the host and nothing waits for the device.

Invariants
1. Rows are ordered by expert, and those of one expert by token.
2. `gather_rows` and `sum_rows` are each other's gradient. A token's rows are added in the order of its experts: in
   the dtype of the rows by "reference", which is bit for bit Megatron's, in float32 by "fused".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from slime.ops.grouped import Form, RowGroups


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which token each row is of, for which expert."""

    tokens: Tensor
    """int64 [rows]: the token of a row."""
    experts: Tensor
    """int64 [rows]: its expert."""
    slots: Tensor
    """int32 [tokens, topk]: the rows of a token, in the order of its experts."""
    groups: RowGroups
    """The rows of each expert."""


def plan_rows(routing_map: Tensor, topk: int) -> RowPlan:
    """From bool [tokens, experts], true where a token goes to an expert: `topk` times for each token.

    Raises an error, on a GPU at some later wait, for a map with another number of choices.
    """
    num_tokens, num_experts = routing_map.shape
    device, num_rows = routing_map.device, num_tokens * topk
    pairs = routing_map.t().reshape(-1)  # expert after expert
    ranks = pairs.cumsum(0)
    if num_tokens:
        torch._assert_async(ranks[-1] == num_rows, "a token has another number of experts than all others")
    # Pairs that were not chosen all go to one place behind the rows.
    places = torch.where(pairs, ranks - 1, num_rows).clamp_(max=num_rows)
    chosen = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    chosen = chosen.scatter_(0, places, torch.arange(pairs.numel(), device=device))[:num_rows]
    tokens, experts = chosen.remainder(max(1, num_tokens)), chosen.div(max(1, num_tokens), rounding_mode="floor")
    nth = routing_map.cumsum(1).t().reshape(-1).index_select(0, chosen) - 1
    slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
    slots.scatter_(0, tokens * topk + nth, torch.arange(num_rows, dtype=torch.int32, device=device))
    ends = ranks.view(num_experts, num_tokens)[:, -1] if num_tokens else ranks.new_zeros(num_experts)
    return RowPlan(tokens, experts, slots.view(num_tokens, topk), RowGroups(ends.to(torch.int32)))


def row_weights(weights: Tensor, plan: RowPlan) -> Tensor:
    """The router's weights [tokens, experts] -> [rows]."""
    return weights.reshape(-1).gather(0, plan.tokens * weights.size(1) + plan.experts)


def gather_rows(x: Tensor, plan: RowPlan, form: Form) -> Tensor:
    """Tokens [tokens, H] -> rows [rows, H]; its gradient sums."""
    match form:
        case "reference":
            return x.index_select(0, plan.tokens)
        case "fused":
            return _Gather.apply(x, plan.tokens, plan.slots)
    assert_never(form)


def sum_rows(y: Tensor, plan: RowPlan, form: Form) -> Tensor:
    """Rows [rows, H] -> the sum of each token's rows [tokens, H]; its gradient gathers."""
    match form:
        case "reference":
            out = y.new_zeros(plan.slots.size(0), y.size(1))
            if torch.are_deterministic_algorithms_enabled():
                return out.index_add_(0, plan.tokens, y)
            return out.scatter_add_(0, plan.tokens.unsqueeze(1).expand(-1, y.size(1)), y)
        case "fused":
            return _Sum.apply(y, plan.tokens, plan.slots)
    assert_never(form)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from slime.ops.kernels.experts import sum_slots  # Triton, which a CPU may lack

        (slots,) = ctx.saved_tensors
        return sum_slots(grads[0].contiguous(), slots), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        from slime.ops.kernels.experts import sum_slots

        ctx.save_for_backward(tokens)
        return sum_slots(y.contiguous(), slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens), None, None
