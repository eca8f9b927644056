"""On-policy distillation against a real engine: one server is student and teacher, so both must say the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.manager import RolloutManager
from tests.support.rollout import rollout_args


def test_a_teacher_with_the_students_weights_agrees_with_it(front: Any, tmp_path: Path) -> None:
    args = rollout_args(tmp_path, "--use-opd", "--opd-type", "sglang", "--opd-teacher-url", front.url)

    async def main() -> Any:
        manager = RolloutManager(args, engines=[front.url])
        try:
            return await manager.generate(0)
        finally:
            await manager.close()

    batch, _ = asyncio.run(main())
    assert sum(s.response_length for s in batch.samples) > 8, "too little was sampled to compare"
    for sample in batch.samples:
        np.testing.assert_allclose(sample.teacher_log_probs, sample.rollout_log_probs, atol=1e-4)
