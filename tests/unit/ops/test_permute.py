"""Rows of experts: every pair of token and expert once, in Megatron's order, and back as sums of a token's rows."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from torch import Tensor

from slime.ops.experts import gather_rows, plan_rows, row_weights, sum_rows

CASES = [(1, 4, 1), (1, 4, 4), (6, 5, 2), (50, 16, 3), (3, 64, 8), (200, 8, 2)]
"""Tokens, experts, experts of a token."""


def _map(tokens: int, experts: int, topk: int, *, seed: int = 0, used: int | None = None) -> Tensor:
    """A random choice of `topk` experts for each token, among the last `used`."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    scores[:, : experts - (used or experts)] = -1
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(topk, dim=-1).indices, True)


@pytest.mark.parametrize(("tokens", "experts", "topk"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_megatrons_bit_for_bit(tokens: int, experts: int, topk: int, seed: int) -> None:
    routing_map = _map(tokens, experts, topk, seed=seed, used=topk + seed % (experts - topk + 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 12, generator=generator).requires_grad_()
    weights = torch.rand(tokens, experts, generator=generator).requires_grad_()
    plan = plan_rows(routing_map, topk)
    assert plan.groups.sizes == routing_map.sum(0).tolist(), "experts without rows among them"
    rows, own = gather_rows(x, plan, "reference"), row_weights(weights, plan)
    want, want_own, order, *_ = permute(x, routing_map, probs=weights, num_out_tokens=tokens * topk)
    assert torch.equal(rows, want) and torch.equal(own, want_own) and torch.equal(plan.tokens, order)
    back = sum_rows(rows * own[:, None], plan, "reference")
    want_back = unpermute(want * want_own[:, None], order, x.shape)
    assert torch.equal(back, want_back)
    above = torch.randn(back.shape, generator=generator)
    for got, wanted in zip(
        torch.autograd.grad(back, (x, weights), above), torch.autograd.grad(want_back, (x, weights), above), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("tokens", "experts", "topk"), CASES)
def test_slots_name_the_rows_of_a_token(tokens: int, experts: int, topk: int) -> None:
    plan = plan_rows(_map(tokens, experts, topk), topk)
    slots = plan.slots.long()
    assert sorted(slots.flatten().tolist()) == list(range(tokens * topk))
    assert (plan.tokens[slots] == torch.arange(tokens)[:, None]).all()
    assert (plan.experts[slots].diff(dim=1) > 0).all(), "in the order of its experts"
    y = torch.randn(tokens * topk, 8)
    torch.testing.assert_close(sum_rows(y, plan, "reference"), y[slots].sum(1))


def test_no_token_has_no_rows() -> None:
    plan = plan_rows(torch.zeros(0, 6, dtype=torch.bool), 2)
    assert plan.groups.sizes == [0] * 6 and plan.slots.shape == (0, 2)
    assert sum_rows(gather_rows(torch.zeros(0, 4), plan, "reference"), plan, "reference").shape == (0, 4)


def test_another_number_of_choices_is_an_error() -> None:
    routing_map = _map(5, 4, 2)
    routing_map[3, :] = True
    with pytest.raises(RuntimeError, match="does not have topk experts"):
        plan_rows(routing_map, 2)
