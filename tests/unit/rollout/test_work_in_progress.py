"""What is half done when a checkpoint is written goes on after a resume, with the tokens that it had."""

from __future__ import annotations

import asyncio
import copy
import random
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Fingerprint, Group, PromptRow, Sample
from slime.rewards.scores import Score, Scored
from slime.rollout.context import RolloutContext
from slime.rollout.schedules.fully_async import RolloutWorker
from slime.rollout.types import Progress
from tests.support.fake_clock import InProcessEngine, run_on_fake_clock
from tests.support.marks import quick
from tests.support.rollout import rollout_args

NUM_STEPS = 3


class Rows:
    """Endless enough."""

    fingerprint = Fingerprint(source="rows", num_rows=200, digest="d")

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(f"p{row}", (2, row + 3), label=row, metadata={}, source="")


class Graders:
    """Scores at once."""

    async def score(self, sample: Sample) -> Score:
        return Scored(float(sample.response_length % 2))


class Life:
    """One process: a worker over the buffer, from a saved state if there is one."""

    def __init__(self, args: Any, rng: random.Random, state: dict[str, Any] | None = None) -> None:
        self.buffer = DataBuffer(Rows(), n_samples_per_prompt=2)
        if state is not None:
            self.buffer.load_state_dict(state)
        self.engine = InProcessEngine(rng, version=self.buffer.weight_version)
        client: Any = self.engine
        graders: Any = Graders()
        self.context = RolloutContext(args, client, None, graders, Progress(), asyncio.get_running_loop())
        self.worker = RolloutWorker(self.context, self.buffer)

    async def step(self, number: int) -> list[Group]:
        """Takes a batch, trains it, syncs weights."""
        output = await self.worker.step(self.context, number)
        groups = [Group(samples[0].group_index or 0, tuple(samples)) for samples in output.samples]
        self.buffer.mark_trained([g.group_index for g in groups])
        self.buffer.weight_version += 1
        await self.engine.sync_weights(self.buffer.weight_version)
        return groups


@pytest.mark.parametrize("seed", quick(range(10), 0, 1))
def test_saved_after_a_weight_sync_nothing_that_was_sampled_is_lost(seed: int, tmp_path: Path) -> None:
    """Law: the checkpoint holds all tokens of all groups under way; trained, each begins with them, labels and all."""
    args = rollout_args(tmp_path, "--fully-async", synchronous=False).replace(rollout_max_response_len=60)

    async def work() -> int:
        first = Life(args, random.Random(seed))
        for number in range(NUM_STEPS):
            await first.step(number)
        state = first.buffer.state_dict()
        under_way = {g.group_index: g.to_dict()["samples"] for g in first.worker.running}
        saved = {g["group_index"]: g["group"] for g in state["in_flight"]}
        for index, samples in under_way.items():
            if saved[index] is not None:
                assert saved[index]["samples"] == samples, f"group {index} is not saved as it is"
            assert saved[index] is not None or not any(s["response_length"] for s in samples), f"group {index} is lost"
        await first.worker.close()

        second = Life(args, random.Random(seed + 1), copy.deepcopy(state))
        num_kept = 0
        for number in range(NUM_STEPS, 3 * NUM_STEPS):
            for group in await second.step(number):
                before = saved.get(group.group_index)
                for one, two in zip(before["samples"] if before else (), group.samples, strict=bool(before)):
                    num, one = one["response_length"], Sample.from_dict(one)
                    assert two.tokens[: len(one.tokens)] == one.tokens, f"group {group.group_index} began anew"
                    for name in ("rollout_log_probs", "token_versions"):
                        assert (getattr(two, name) or [])[:num] == (getattr(one, name) or []), name
                    num_kept += num
        await second.worker.close()
        return num_kept

    assert run_on_fake_clock(work()) > 0, "nothing was half done when the state was saved"


def test_a_copy_of_a_sample_shares_nothing() -> None:
    """A failed try leaves what was before it, whatever the generate function wrote into the sample."""
    sample = Sample(prompt=[{"role": "user"}], tokens=[7], metadata={"turns": [1]}, label=["x"])
    sample.append_response_tokens([5], log_probs=[-0.5], weight_version=1, text="a", finish_reason="abort")
    before, seen = sample.copy(), copy.deepcopy(sample)
    assert before == sample
    sample.append_response_tokens([6], log_probs=[-0.1], weight_version=2, text="b", finish_reason="stop")
    sample.metadata["turns"].append(2)
    sample.label.append("y")
    sample.prompt[0]["role"] = "tool"  # type: ignore[index,assignment]
    assert before == seen
