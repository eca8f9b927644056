"""What length adds to trained rewards, against the formulas of DAPO (arXiv:2503.14476, equation 13) and Kimi k1.5
(arXiv:2501.12599, section 2.3.3), written here in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slime.core.sample import Sample
from slime.rewards.scores import length_rewards, overlong_penalty
from slime.rollout.train_batch import to_train_batch
from tests.support.rollout import rollout_args


def response(group: int, index: int, length: int, reward: float | None, tool_output: int = 0) -> Sample:
    sample = Sample(group_index=group, index=index, tokens=[5, 6], reward=reward)
    sample.append_response_tokens([9] * tool_output)
    sample.append_response_tokens([7] * length, log_probs=[-0.1] * length, weight_version=2, finish_reason="stop")
    sample.unscored = "the grader was lost" if reward is None else ""
    return sample


@pytest.mark.parametrize(("length", "want"), [(1, 0), (12, 0), (13, -0.25), (14, -0.5), (16, -1), (17, -1), (99, -1)])
def test_the_overlong_penalty_grows_over_the_last_tokens(length: int, want: float) -> None:
    assert overlong_penalty(length, 16, 4) == want


def test_the_overlong_penalty_is_that_of_the_paper() -> None:
    for longest, buffer in ((20480, 4096), (7, 7), (5, 1)):
        lengths = np.unique(np.linspace(1, 2 * longest, 50).astype(int))
        start = longest - buffer
        want = np.where(lengths <= start, 0.0, np.where(lengths <= longest, (start - lengths) / buffer, -1.0))
        assert [overlong_penalty(int(n), longest, buffer) for n in lengths] == pytest.approx(want, abs=1e-15)


def test_the_length_reward_is_that_of_the_paper() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        lengths, correct = rng.integers(1, 30, 6), rng.random(6) < 0.5
        spread = lengths.max() - lengths.min()
        x = 0.5 - (lengths - lengths.min()) / max(spread, 1)
        want = np.where(correct, x, np.minimum(0.0, x)) * (spread > 0)
        assert length_rewards(lengths.tolist(), correct.tolist()) == pytest.approx(want, abs=1e-15)


def test_equal_lengths_have_no_length_reward() -> None:
    assert length_rewards([4, 4, 4], [True, False, True]) == [0.0] * 3


def test_trained_rewards_have_the_penalty_and_samples_keep_their_score(tmp_path: Path) -> None:
    args = rollout_args(
        tmp_path,
        *("--rollout-max-response-len", "16", "--overlong-buffer-len", "8", "--overlong-penalty-factor", "0.5"),
    )
    group = [response(0, 0, 8, 1.0), response(0, 1, 12, 1.0), response(0, 2, 16, 0.0), response(0, 3, 8, 1.0, 8)]
    batch = to_train_batch(args, 0, [group])
    assert [s.reward for s in batch.samples] == [1.0, 0.75, -0.5, 1.0], "tool output is not length"
    assert [s.reward for s in group] == [1.0, 1.0, 0.0, 1.0]


def test_the_maximum_is_the_total_of_all_turns_if_that_is_set(tmp_path: Path) -> None:
    lengths = "--rollout-max-response-len", "16", "--rollout-max-total-response-len", "32", "--overlong-buffer-len", "8"
    args = rollout_args(tmp_path, *lengths)
    assert [s.reward for s in to_train_batch(args, 0, [[response(0, 0, 16, 1.0)]]).samples] == [1.0]
    assert [s.reward for s in to_train_batch(args, 0, [[response(0, 0, 28, 1.0)]]).samples] == [0.5]


def test_lengths_are_compared_within_a_prompt_without_unscored_responses(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, "--length-reward-coef", "0.2")
    groups = [
        [response(0, 0, 2, 1.0), response(0, 1, 4, 1.0), response(0, 2, 99, None), response(0, 3, 3, 0.0)],
        [response(1, 4, 7, 1.0), response(1, 5, 5, -1.0), response(1, 6, 9, -1.0)],
    ]
    got = [s.reward for s in to_train_batch(args, 0, groups).samples]
    assert got == pytest.approx([1.1, 0.9, np.nan, 0.0, 1.0, -1.0, -1.1], nan_ok=True)
