"""Context parallelism changes nothing: attention, log-probs and gradients of the cut row are those of the whole row, as
is what runs through all tokens of a head."""

from __future__ import annotations

import pytest
import torch

from tests.contract.training.context_ranks import (
    HEADS,
    NUM_GROUPS,
    NUM_HEADS,
    PREDICTING,
    compute,
    compute_part,
    exchange,
    problem,
)
from tests.support.ranks import Ranks


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_cut_row_has_the_gradient_of_the_whole_row(size: int, ranks: Ranks) -> None:
    """Law: of sequences and of a tree of branches, whether ranks gather keys or split heads."""
    by_rank = ranks.run(compute_part, size)
    assert len(by_rank[0]) == (4 if NUM_GROUPS % size == 0 else 2)
    for splits_heads, forked in by_rank[0]:
        check([rank[splits_heads, forked] for rank in by_rank], forked=forked)


@pytest.mark.parametrize("forked", [False, True])
def test_the_whole_row_has_the_gradient_of_a_mask_over_all_keys(forked: bool) -> None:
    check([[compute(positions, forked=forked) for positions in PREDICTING]], forked=forked)


def check(by_rank: list[list[dict[str, torch.Tensor]]], *, forked: bool) -> None:
    """The results of all ranks are those of one softmax over all keys of the row."""
    for case, positions in enumerate(PREDICTING):
        whole, parts = compute(positions, forked=forked, plain=True), [rank[case] for rank in by_rank]
        for part in parts:
            torch.testing.assert_close(part["log_probs"], whole["log_probs"], rtol=1e-5, atol=1e-5)
            for name in ("out", "grad_query", "grad_key", "grad_value"):
                torch.testing.assert_close(part[name], whole[name][part["positions"]], rtol=1e-5, atol=1e-5)
        weight = torch.stack([part["grad_weight"] for part in parts]).sum(0)
        torch.testing.assert_close(weight, whole["grad_weight"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_get_the_whole_row_in_order_and_give_it_back(size: int, ranks: Ranks) -> None:
    parts = ranks.run(exchange, size)
    row, of_heads = problem()["query"].requires_grad_(), HEADS.clone().requires_grad_()
    out = row.cumsum(0) * of_heads[:, None]
    (out * out.detach().sin()).sum().backward()
    assert row.grad is not None
    for rank, part in enumerate(parts):
        heads = slice(rank * NUM_HEADS // size, (rank + 1) * NUM_HEADS // size)
        assert torch.equal(part["share"], row[:, heads]), "the heads of this rank, all tokens in the order of the row"
        assert not part["grad_heads"].index_fill(0, torch.arange(heads.start, heads.stop), 0.0).any()
        for name, want in (("out", out), ("grad_part", row.grad)):
            torch.testing.assert_close(part[name], want[part["positions"]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(part["grad_heads"] for part in parts), of_heads.grad, rtol=1e-5, atol=1e-4)
