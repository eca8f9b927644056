"""The probe: short fresh answers, for which the trainer compares its log-probs with the engines'.

For schedules whose batches are older than the trainer's weights; in any other the batch itself is that comparison. What
is sampled here stays outside the Data Buffer, is not graded and never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import HookError
from slime.core.sample import Sample
from slime.rollout.client import EngineClient
from slime.rollout.sampling import rollout_sampling_params
from slime.settings.groups.rollout import RolloutSettings

NUM_PROMPTS, NUM_TOKENS = 16, 64
"""Most prompts, and most tokens of each answer, of one probe."""


class MismatchProbe:
    """Remembers prompts of the last batch, and asks them again."""

    def __init__(self) -> None:
        self._prompts: list[list[int]] = []

    def remember(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Takes the prompts of a batch."""
        firsts = [group[0] for group in groups[:NUM_PROMPTS]]
        prompts = [(column, one.prompt_length) for one in firsts if (column := one.column("tokens")) is not None]
        self._prompts = [column[:length].tolist() for column, length in prompts]

    async def ask(self, client: EngineClient | None, args: RolloutSettings) -> TrainBatch:
        """Answers of the weights that the engines hold now. Raises `HookError` before any generation."""
        if client is None or not self._prompts:
            raise HookError("got a probe before any generation by an engine; there is no prompt to probe with")
        params = {k: v for k, v in rollout_sampling_params(args).items() if not k.startswith("stop")}
        params["max_new_tokens"] = min(NUM_TOKENS, args.rollout_max_response_len)
        asked = (_answer(client, index, prompt, params) for index, prompt in enumerate(self._prompts))
        return TrainBatch(rollout_id=-1, samples=tuple(await asyncio.gather(*asked)))


async def _answer(client: EngineClient, index: int, prompt: list[int], params: dict[str, Any]) -> TrainSample:
    made = await client.generate(prompt, dict(params))
    sample = Sample(group_index=index, index=index, tokens=list(prompt))
    sample.append_response_tokens(
        made.tokens,
        log_probs=made.log_probs,
        weight_version=made.weight_version,
        routed_experts=made.routed_experts,
    )
    return TrainSample.from_sample(sample, reward=0.0)
