"""Fine-tuning as a rollout: conversations become ids and masks without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.rollout.manager import RolloutManager
from tests.support.rollout import rollout_args

SFT = ("--rollout-function-path", "slime.rollout.sft.generate_rollout", "--n-samples-per-prompt", "1")


def step(args: Any) -> Any:
    async def work() -> Any:
        manager = RolloutManager(args, router_url=None, num_engines=0)
        try:
            batch, metrics = await manager.generate(0)
            return batch, metrics, manager.commit(0)
        finally:
            await manager.close()

    return asyncio.run(work())


def test_the_mask_is_the_answer_and_its_end(tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    rows = [
        {"input": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), "--label-key", "label")
    batch, metrics, ledger = step(args.replace(label_key=None))
    assert len(batch.samples) == 4 and ledger["data/trained"] == 4
    for sample in batch.samples:
        assert sample.rollout_log_probs is None and sample.loss_mask.tolist() == [1.0, 1.0]
        assert sample.tokens[-1] == 1 and sample.reward == 0.0
    assert metrics["rollout/trained_tokens"] == 8.0


def test_text_prompts_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs messages"):
        step(rollout_args(tmp_path, *SFT))
