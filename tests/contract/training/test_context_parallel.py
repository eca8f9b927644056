"""Context parallelism changes nothing: attention, log-probs and gradients of the cut row are those of the whole row."""

from __future__ import annotations

import pytest
import torch

from tests.contract.training.context_ranks import PREDICTING, compute, compute_part
from tests.support.ranks import Ranks


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_cut_row_has_the_gradient_of_the_whole_row(size: int, ranks: Ranks) -> None:
    by_rank = ranks.run(compute_part, size)
    for case, positions in enumerate(PREDICTING):
        whole, parts = compute(positions), [rank[case] for rank in by_rank]
        for part in parts:
            torch.testing.assert_close(part["log_probs"], whole["log_probs"], rtol=1e-5, atol=1e-5)
            for name in ("out", "grad_query", "grad_key", "grad_value"):
                torch.testing.assert_close(part[name], whole[name][part["positions"]], rtol=1e-5, atol=1e-5)
        weight = torch.stack([part["grad_weight"] for part in parts]).sum(0)
        torch.testing.assert_close(weight, whole["grad_weight"], rtol=1e-5, atol=1e-5)
