"""What users' functions of advantages are handed, and what training reads back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.algorithms.advantages import RewardedBatch
from slime.algorithms.advantages.grpo import GroupRelative
from slime.algorithms.whole_batch import BatchLogProbs, RolloutView
from slime.core.errors import HookError
from tests.support.training import random_batch


def view_of(*, normalised: bool = False) -> RolloutView:
    batch = random_batch(vocab_size=50)
    masks = tuple(s.loss_mask for s in batch.samples)
    rewarded = RewardedBatch(
        rewards=np.asarray([s.reward for s in batch.samples], np.float64),
        groups=np.asarray([s.group_index for s in batch.samples], np.int64),
        executions=np.asarray(batch.executions, np.int64),
        masks=masks,
    )
    estimator = GroupRelative(rewards_normalization=normalised, grpo_std_normalization=True, advantage_scale="group")
    return RolloutView(batch, masks, BatchLogProbs(), None, None, lambda: estimator.scores(rewarded))


def test_tokens_can_index() -> None:
    """A batch holds ids in 32 bits; `gather`, `scatter_` and `one_hot` take 64."""
    view = view_of()
    for sample, tokens in zip(view.batch.samples, view.as_dict()["tokens"], strict=True):
        seen = torch.nn.functional.one_hot(tokens, 50).sum(0)
        assert torch.equal(seen.gather(0, tokens) > 0, torch.ones(sample.num_tokens, dtype=torch.bool))
        assert torch.zeros(50).scatter_(0, tokens, 1.0).sum() == len(set(sample.tokens.tolist()))


def test_rewards_are_those_of_the_estimator() -> None:
    """Law: as in the public slime, `rewards` are normalised in their group, and `raw_reward` is what was graded."""
    raw, data = view_of().as_dict(), view_of(normalised=True).as_dict()
    graded = [s.reward for s in view_of().batch.samples]
    assert raw["rewards"] == raw["raw_reward"] == data["raw_reward"] == graded
    for group in set(data["group_index"]):
        mine = [place for place, other in enumerate(data["group_index"]) if other == group]
        own = torch.tensor([graded[place] for place in mine], dtype=torch.float64)
        want = (own - own.mean()) / (own.std() + 1e-6)
        assert [data["rewards"][place] for place in mine] == pytest.approx(want.tolist())


@pytest.mark.parametrize("name", ["loss_masks", "tokens", "rollout_log_probs"])
def test_a_change_that_is_not_read_back_is_an_error(name: str) -> None:
    """Law: a function that changes masks or log-probs never trains on the old ones in silence."""
    view = view_of()
    data: dict[str, Any] = view.as_dict()
    data["advantages"], data["my_own"] = [m * 2 for m in data["loss_masks"]], [1]
    view.require_only_advantages(data, "--rollout-data-postprocess-path")
    data[name][0][:1] += 1
    with pytest.raises(HookError, match=f"changed rollout_data\\['{name}'\\].*docs/migration.md"):
        view.require_only_advantages(data, "--rollout-data-postprocess-path")
