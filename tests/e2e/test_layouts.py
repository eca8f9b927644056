"""Models cut over pipeline stages and expert-parallel ranks, in the whole loop with a real engine; a critic; top-p."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_loops import LOUDNESS, MAX_MISMATCH
from tests.support.e2e import NUM_STEPS, Flags, started_and_finished
from tests.support.tiny import write_tiny_model

TWO_RANKS = ["--actor-num-gpus-per-node", "2"]
CASES: dict[str, tuple[str, list[str]]] = {
    "stages": (
        "qwen3",
        [
            "--lr",
            "2e-2",
            "--pipeline-model-parallel-size",
            "2",
            "--update-weight-transport",
            "distributed",
            "--advantage-estimator",
            "ppo",
            "--critic-lr",
            "1e-3",
            "--rollout-top-p",
            "0.95",
            "--use-tis",
        ],
    ),
    "experts": (
        "qwen3_moe",
        [
            "--lr",
            "8e-3",
            "--expert-model-parallel-size",
            "2",
            "--update-weight-transport",
            "tensor",
            "--policy-loss",
            "gspo",
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            "512",
            "--balance-data",
            "--use-rollout-routing-replay",
            "--rollout-num-workers",
            "2",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_engines_get_the_weights_of_a_model_that_is_cut(
    case: str, tmp_path: Path, digits: Callable[[Path], Flags]
) -> None:
    family, settings = CASES[case]
    model = write_tiny_model(tmp_path / "model", family)
    run = started_and_finished(
        tmp_path / "run", [*digits(model), "--lr-decay-style", "constant", *TWO_RANKS, *settings]
    )
    gaps = run.series("train", "train/train_rollout_logprob_abs_diff_max")
    assert len(gaps) == NUM_STEPS and gaps[0] <= MAX_MISMATCH and max(gaps) <= LOUDNESS * MAX_MISMATCH, gaps
    rewards = run.series("rollout", "rollout/raw_reward")
    if case == "stages":
        losses = run.series("train", "train/critic-value_loss")
        assert min(losses) < 0.5 * losses[0], f"the critic learns, until the policy moves on: {losses}"
        assert max(run.series("train", "train/top_p_outside")) == 0.0, "the engine samples from our top-p set"
    else:
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert run.left() == []
