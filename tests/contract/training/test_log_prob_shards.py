"""Log-probs, entropy, top-p set and gradients do not depend on how many gloo ranks the vocabulary is split over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.training.log_prob_ranks import SCENARIOS, score_all
from tests.support.marks import quick
from tests.support.ranks import Ranks


class Results(dict[int, dict[str, dict[str, Any]]]):
    """What so many ranks found, when it is first asked for."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __missing__(self, world: int) -> dict[str, dict[str, Any]]:
        self[world] = self._ranks.run(score_all, world)[0]
        return self[world]


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> Results:
    return Results(ranks)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world", quick([2, 3], 2))
def test_any_number_of_ranks_gives_the_numbers_of_one(results: Results, world: int, name: str) -> None:
    one, many = results[1][name], results[world][name]
    dtype = SCENARIOS[name].get("dtype", "float32")
    tolerance = {"float64": 1e-11, "float32": 1e-6, "bfloat16": 1e-6}[dtype]
    for key in ("log_probs", "entropy", "full"):
        torch.testing.assert_close(many[key], one[key], rtol=tolerance, atol=tolerance)
    assert torch.equal(many["outside"], one["outside"]), "the kept set depends on the number of ranks"
    limit = 2e-2 if dtype == "bfloat16" else 3 * tolerance  # half-precision gradients are rounded per rank
    for key in ("grad_hidden", "grad_weight"):
        torch.testing.assert_close(many[key], one[key], rtol=limit, atol=limit)
    assert not many["grad_padding"].any(), "padded rows have no gradient"
