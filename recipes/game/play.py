"""One game, as anybody would write it with OpenAI's SDK: ask, score with reasoning-gym, hint, ask again.

--custom-generate-function-path recipes.game.play:generate --reward-key solved
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from slime.agent.running import execution
from slime.core.sample import Sample
from slime.rewards.graders.reasoning_gym_task import bare_answer


@functools.cache
def _scorer(dataset: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    made = reasoning_gym.create_dataset(dataset, seed=0, **json.loads(settings))
    return lambda answer, entry: float(made.score_answer(answer, entry))


def hint(guess: str, answer: str) -> str:
    """What the environment says to a miss."""
    try:
        said, right = float(guess), float(answer)
    except ValueError:
        return "A number."
    if not math.isfinite(said):
        return "A number."
    return f"{'More' if right > said else 'Less'} than {guess}."


async def play(client: AsyncOpenAI, messages: list[Any], task: dict[str, Any], turns: int) -> int:
    """The turn that answered right, from 1; 0: none did."""
    entry, score = task["entry"], _scorer(task["dataset"], json.dumps(task["settings"]))
    for turn in range(1, turns + 1):
        answer = await client.chat.completions.create(model="slime", messages=messages)
        said = answer.choices[0].message.content or ""
        guess = bare_answer(said, entry["answer"])
        if score(guess, entry) == 1.0:
            return turn
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": hint(guess, entry["answer"])})
    return 0


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: one game. Its reward: 1.0 if any turn solved it."""
    turns = int(sample.metadata["turns"])
    async with execution(sampling_params) as agent:
        async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0) as client:
            messages: list[Any] = list(sample.prompt)
            solved_in = await play(client, messages, sample.metadata["reasoning_gym"], turns)
        return agent.samples(sample, reward={"solved": float(solved_in > 0), "solved_in": float(solved_in)})


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], metrics: dict[str, float]) -> bool:
    """`--custom-eval-rollout-log-function-path`: adds the share of games that were solved by each turn."""
    for name, found in data.items():
        games = {sample.index: sample.reward["solved_in"] for sample in found["samples"]}
        for turn in range(1, max(int(s.metadata["turns"]) for s in found["samples"]) + 1):
            metrics[f"eval/{name}-solved_by_{turn}"] = sum(1 <= one <= turn for one in games.values()) / len(games)
    return False
