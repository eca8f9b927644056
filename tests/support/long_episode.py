"""An agent whose first try at the first prompt lasts as long as a test wants: a turn for each permission."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai

from slime.agent.execution import execution
from slime.core.sample import Sample


@dataclass
class Pace:
    """What a test and the agent tell each other."""

    num_turns: int = 0
    """Of a long episode."""
    allowed: int = 0
    """Turns that it may begin."""
    tries: Counter[int | None] = field(default_factory=Counter)
    """Of each execution."""


PACE = Pace()


async def generate(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
    """`--custom-generate-function-path`: prompt 0 has a long episode at its first try, all else has one turn."""
    PACE.tries[sample.index] += 1
    is_long = sample.group_index == 0 and PACE.tries[sample.index] == 1
    messages: Any = [{"role": "user", "content": f"Begin {sample.index}, try {PACE.tries[sample.index]}."}]
    async with execution(sampling_params) as agent:
        async with openai.AsyncOpenAI(
            base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0, timeout=600.0
        ) as client:
            for turn in range(PACE.num_turns if is_long else 1):
                while is_long and PACE.allowed <= turn:
                    await asyncio.sleep(0.005)
                answer = await client.chat.completions.create(model="m", messages=messages)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        return agent.samples(sample, reward=float((sample.index or 0) % 2))
