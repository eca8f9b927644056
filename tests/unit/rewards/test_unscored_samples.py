"""A group goes on without a minority of unscored samples: no number stands for them anywhere."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from slime.core.sample import Group, Sample
from slime.rollout.execute import can_be_compared
from slime.rollout.manager import RolloutManager
from slime.rollout.train_batch import to_train_batch
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

HOSTILE = str(Path(__file__).with_name("hostile.py"))


def group(*rewards: float | None, siblings: int = 1) -> Group:
    samples = [Sample(group_index=0, index=i // siblings, tokens=[5, 6], reward=r) for i, r in enumerate(rewards)]
    for sample in samples:
        sample.append_response_tokens([7], log_probs=[-0.1], weight_version=1, finish_reason="stop")
        if sample.reward is None:
            sample.unscored = "timeout after 1 s"
    return Group(0, tuple(samples))


@pytest.mark.parametrize(
    ("rewards", "stands"),
    [
        ([None], False),
        ([1.0], True),
        ([1.0, None], False),
        ([1.0, None, 0.0], True),
        ([1.0, None, None], False),
        ([1.0, 0.0, None, None], True),
        ([1.0, None, None, None], False),
        ([None] * 4 + [0.5] * 4, True),
        ([None] * 5 + [0.5] * 4, False),
    ],
)
def test_half_of_a_group_and_two_are_enough_to_compare(rewards: list[float | None], stands: bool) -> None:
    assert can_be_compared(group(*rewards)) is stands


def test_an_execution_with_an_unscored_sibling_is_unscored() -> None:
    mixed = group(1.0, None, 1.0, 1.0, 0.0, 0.0, siblings=2)
    assert can_be_compared(mixed)
    assert [s.reward for s in mixed.samples] == [None, None, 1.0, 1.0, 0.0, 0.0]
    assert "sibling" in mixed.samples[0].unscored


def test_an_unscored_sample_has_no_number_in_the_batch(tmp_path: Path) -> None:
    samples = list(group(1.0, None, 0.0).samples)
    rewards = [s.reward for s in to_train_batch(rollout_args(tmp_path), 0, [samples]).samples]
    assert rewards[0] == 1.0 and math.isnan(rewards[1]) and rewards[2] == 0.0


def test_a_users_post_processing_sees_no_unscored_sample(tmp_path: Path) -> None:
    hooks = Path(__file__).parents[1] / "rollout" / "rollout_hooks.py"
    args = rollout_args(tmp_path, "--custom-reward-post-process-path", f"{hooks}:halve")
    rewards = [s.reward for s in to_train_batch(args, 0, [list(group(1.0, None, 0.0).samples)]).samples]
    assert rewards[0] == 0.5 and math.isnan(rewards[1]) and rewards[2] == 0.0


def test_a_group_grader_may_leave_one_of_several_unscored(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    flags = ("--n-samples-per-prompt", "4", "--group-rm", "--custom-rm-path", f"{HOSTILE}:group_with_gap")
    batch, metrics = asyncio.run(with_manager(rollout_args(tmp_path, *flags), FakeEngine(), work))
    assert len(batch.samples) == 16 and metrics["rollout/num_unscored_samples"] == 4.0
    for sample in batch.samples:
        assert math.isnan(sample.reward) if sample.index % 4 == 0 else sample.reward == sample.index
