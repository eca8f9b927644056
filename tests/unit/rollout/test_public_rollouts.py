"""A rollout that the public slime recorded is replayed to the trainer as if it had been recorded here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slime.public.recorded_samples import groups_of
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import save_rollout
from tests.support.rollout import rollout_args


def _recorded(group_index: int, index: int, reward: float) -> dict[str, Any]:
    return {
        "group_index": group_index,
        "index": index,
        "rollout_id": None,
        "prompt": "2+2=",
        "tokens": [7, 8, 20 + index, 30 + index, 1],
        "response": "4",
        "response_length": 3,
        "loss_mask": None,
        "rollout_log_probs": [-0.5, -0.25 * index, -1.0],
        "weight_versions": ["1"],
        "reward": reward,
        "label": "4",
        "status": "completed",
        "metadata": {},
    }


def test_what_the_public_slime_recorded_is_trained(tmp_path: Path) -> None:
    """Law: tokens, log-probs, masks and rewards of the batch are those of the record, by prompt."""
    records = [_recorded(index // 2, index, float(index % 2)) for index in range(4)]
    template = str(tmp_path / "{rollout_id}.jsonl.zst")
    save_rollout(tmp_path / "0.jsonl.zst", 0, groups_of(records, 0).groups)
    args = rollout_args(tmp_path, "--rm-type", "math", "--load-debug-rollout-data", template)

    async def replay() -> Any:
        manager = RolloutManager(args, engines=None)
        try:
            return (await manager.generate(0))[0]
        finally:
            await manager.close()

    batch = asyncio.run(replay())
    for sample, record in zip(batch.samples, records, strict=True):
        assert sample.tokens.tolist() == record["tokens"] and sample.group_index == record["group_index"]
        assert sample.rollout_log_probs.tolist() == record["rollout_log_probs"]
        assert sample.loss_mask.tolist() == [1, 1, 1] and sample.token_versions.tolist() == [1, 1, 1]
        assert sample.reward == record["reward"]
