"""One game, written with OpenAI's SDK: ask, score the answer with reasoning-gym, give a hint, ask again.

--custom-generate-function-path recipes.game.play:generate --reward-key solved

The questions are the demo's. No held-out sum is trained on, in any phrasing or order of its terms.
"""

from __future__ import annotations

import math
from typing import Any

from openai import AsyncOpenAI

from slime.agent.execution import execution
from slime.core.sample import Sample
from slime.rewards.graders.reasoning_gym_task import bare_answer, score_function, task_entry

RULE = "Answer with one number."
TURNS = 3


def hint(guess: str, answer: str) -> str:
    """Returns the environment's reply to a wrong answer."""
    try:
        said = float(guess)
    except ValueError:
        said = math.nan
    if not math.isfinite(said):
        return "That is no number. Try again."
    return f"No, it is {'more' if float(answer) > said else 'less'} than {guess}. Try again."


async def play(client: AsyncOpenAI, sample: Sample) -> int:
    """Plays one game; returns the turn with the correct answer, counted from 1, or 0 if there was none."""
    dataset, entry = task_entry(sample)
    score = score_function(dataset)
    messages: list[Any] = [{"role": "system", "content": RULE}, *sample.prompt]
    for turn in range(1, TURNS + 1):
        answer = await client.chat.completions.create(model="slime", messages=messages)
        said = answer.choices[0].message.content or ""
        guess = bare_answer(said, entry["answer"])
        if score(guess, entry) == 1.0:
            return turn
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": hint(guess, entry["answer"])})
    return 0


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: plays one game, with reward 1.0 if any turn solved it."""
    async with execution(sampling_params) as agent:
        async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0) as client:
            solved_in = await play(client, sample)
        return agent.samples(sample, reward={"solved": float(solved_in > 0), "solved_in": float(solved_in)})


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], metrics: dict[str, float]) -> bool:
    """`--custom-eval-rollout-log-function-path`: adds the fraction of games solved by each turn."""
    for name, found in data.items():
        games = {sample.index: sample.reward["solved_in"] for sample in found["samples"]}
        for turn in range(1, TURNS + 1):
            metrics[f"eval/{name}-solved_by_{turn}"] = sum(1 <= one <= turn for one in games.values()) / len(games)
    return False
