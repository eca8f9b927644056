"""Law 3 at the level of formulas, float64: every loss and aggregation, cut over data, tensor and context parallel ranks
and micro-batches. Pipeline stages and experts appear in no formula; the model's own test covers them.

The layouts hold every pair of values of any two sizes. Each runs every loss, and the aggregations take turns, so that
every loss meets every aggregation in several layouts; the slow test runs all of them in all layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.support.formulas import Case, run_cases
from tests.support.marks import quick
from tests.support.ranks import Ranks

TOLERANCE = 1e-6
"""Relative; loss, gradient norm and gradient."""

AGGREGATIONS = ("sequence_mean", "token_mean", "sequence_sum", "constant_length")
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"eps_clip_c": 3.0, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.02, "use_tis": True, "tis_level": "sequence", "entropy_coef": 0.1},
    "cispo": {
        "policy_loss": "cispo",
        "use_tis": True,
        "tis_mode": "mask",
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k2",
    },
    "sapo": {"policy_loss": "sapo", "rejection_level": "geometric", "rejection_low": 0.9, "rejection_high": 1.1},
    "dppo": {"policy_loss": "dppo", "dppo_divergence_threshold": 0.02},
    "rloo_opsm": {"advantage_estimator": "rloo", "use_opsm": True, "opsm_delta": 0.05, "kl_coef": 0.1},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coef": 0.1,
        "use_tis": True,
        "tis_level": "geometric",
    },
    "baseline_distilled": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "use_opd": True,
        "opd_type": "megatron",
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k1",
        "use_unbiased_kl": True,
    },
    "turns": {"advantage_estimator": "grpo_turn", "gamma": 0.9, "kl_coef": 0.1},
    "sft": {"loss_type": "sft_loss"},
    "values": {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.9},
}
CUTS: dict[str, dict[str, Any]] = {
    "single": {"micro_batch_size": 1},
    "four": {"micro_batch_size": 4},
    "by_tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20},
    "balanced": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True},
}
"""One sample per row, packed by samples, packed by tokens; balanced is by tokens, too."""
LAYOUTS: tuple[tuple[int, int, int, str], ...] = (
    (1, 1, 1, "single"),
    (1, 2, 2, "four"),
    (1, 1, 4, "by_tokens"),
    (2, 2, 1, "single"),
    (2, 1, 2, "by_tokens"),
    (2, 1, 1, "four"),
    (4, 1, 1, "four"),
    (4, 1, 2, "single"),
    (4, 2, 1, "by_tokens"),
    (4, 1, 1, "balanced"),
)
"""(DP, TP, CP, cut into micro-batches)"""
QUICK = (2, 1, 2, "by_tokens")
"""Every loss over samples and tokens of several ranks; the model's own tests have tensor-parallel ranks."""
VALUES: tuple[tuple[Any, ...], ...] = ((1, 2, 4), (1, 2), (1, 2), ("single", "four", "by_tokens"))
CASES = tuple(itertools.product(LOSSES, AGGREGATIONS))


def _name(layout: tuple[int, int, int, str]) -> str:
    return "dp{}tp{}cp{}_{}".format(*layout)


ONE = _name(LAYOUTS[0])


def _in_turn() -> dict[str, list[Case]]:
    """Layout -> its cases; the layout that the others are compared with has all."""
    return {
        _name(layout): [
            (loss, aggregation)
            for (i, loss), (j, aggregation) in itertools.product(enumerate(LOSSES), enumerate(AGGREGATIONS))
            if turn == 0 or (turn + i - j) % len(AGGREGATIONS) == 0
        ]
        for turn, layout in enumerate(LAYOUTS)
    }


class Runs:
    """Cases under layouts; each is run when it is first asked for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._results: dict[str, dict[Case, Any]] = {}

    def of(self, name: str, asked: Iterable[Case]) -> dict[Case, Any]:
        """Results of a layout by case, these among them."""
        known = self._results.setdefault(name, {})
        missing = [case for case in asked if case not in known]
        if missing:
            dp, tp, cp, cut = next(layout for layout in LAYOUTS if _name(layout) == name)
            same = {"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 1, **CUTS[cut]}
            cases = {(loss, kind): {**LOSSES[loss], **same, "loss_aggregation": kind} for loss, kind in missing}
            known |= self._ranks.run(run_cases, dp * tp * cp, (dp, tp, cp), cases)[0]
        return known


def _check(runs: Runs, layout: str, cases: Sequence[Case]) -> None:
    wanted, found = runs.of(ONE, cases), runs.of(layout, cases)
    for loss, aggregation in cases:
        want, got = wanted[loss, aggregation], found[loss, aggregation]
        assert want["norm"] > 1e-4, f"{loss}/{aggregation}: a gradient of zero proves nothing"
        where = f"{layout}/{loss}/{aggregation}"
        assert got["loss"] == pytest.approx(want["loss"], rel=TOLERANCE, abs=1e-9), where
        assert got["norm"] == pytest.approx(want["norm"], rel=TOLERANCE), where
        assert float((got["gradient"] - want["gradient"]).norm()) <= TOLERANCE * want["norm"], where
        torch.testing.assert_close(got["sums"], want["sums"], rtol=TOLERANCE, atol=1e-9)


@pytest.fixture(scope="module")
def runs(ranks: Ranks) -> Runs:
    return Runs(ranks)


@pytest.mark.parametrize("layout", quick([(layout,) for layout in LAYOUTS], (QUICK,)), ids=_name)
def test_loss_and_gradient_are_those_of_one_rank(runs: Runs, layout: tuple[int, int, int, str]) -> None:
    _check(runs, _name(layout), _in_turn()[_name(layout)])


@pytest.mark.slow
def test_every_loss_with_every_aggregation_in_every_layout(ranks: Ranks) -> None:
    runs = Runs(ranks)
    for layout in LAYOUTS:
        _check(runs, _name(layout), CASES)


def test_the_layouts_cover_every_pair() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(VALUES), 2):
        missing = set(itertools.product(first, second)) - {(layout[i], layout[j]) for layout in LAYOUTS}
        assert not missing, f"no layout has the values {missing} of {i} and {j}"
    missing_cases = set(CASES) - {case for name, cases in _in_turn().items() if name != ONE for case in cases}
    assert not missing_cases, f"no cut meets {missing_cases}"


@pytest.mark.parametrize("loss", quick(LOSSES, "clip"))
def test_aggregations_differ(runs: Runs, loss: str) -> None:
    """Equal numbers would mean that the setting does nothing."""
    found = runs.of(ONE, [(loss, aggregation) for aggregation in AGGREGATIONS])
    norms = {round(found[loss, aggregation]["norm"], 9) for aggregation in AGGREGATIONS}
    assert len(norms) == len(AGGREGATIONS), norms
