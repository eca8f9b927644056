"""One game, written with OpenAI's SDK: ask, score the answer with reasoning-gym, give a hint, ask again.

--custom-generate-function-path recipes.game.play:generate --reward-key solved

`generate_by_turn` also rewards each wrong answer, the more the nearer it is:

recipes/game/run.sh --custom-generate-function-path slime.cli.recipes.game.play:generate_by_turn \
  --advantage-estimator grpo_turn --gamma 0.5 --advantage-scale batch

The questions are the demo's. No held-out sum is trained on, in any phrasing or order of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from slime.agent.execution import execution
from slime.core.sample import Sample
from slime.rewards.graders.reasoning_gym_task import bare_answer, score_function, task_entry

RULE = "Answer with one number."
TURNS = 3


def miss(guess: str, answer: str) -> float:
    """Returns how much larger the correct number is than the guess; NaN if the guess is no number."""
    try:
        said = float(guess)
    except ValueError:
        return math.nan
    return float(answer) - said if math.isfinite(said) else math.nan


def hint(guess: str, answer: str) -> str:
    """Returns the environment's reply to a wrong answer."""
    missed = miss(guess, answer)
    if math.isnan(missed):
        return "That is no number. Try again."
    return f"No, it is {'more' if missed > 0 else 'less'} than {guess}. Try again."


def nearness(guess: str, answer: str) -> float:
    """Returns the reward of a wrong answer: 0.25 if it is off by one, less the further it is off, 0 if no number.

    With --gamma 0.5, no game that begins with a wrong answer is worth more than one solved at once (1.0), because
    0.25 + 0.5 * 1.0 < 1.0.
    """
    missed = miss(guess, answer)
    return 0.0 if math.isnan(missed) else 0.5 / (1.0 + abs(missed))


async def play(client: AsyncOpenAI, sample: Sample, reward_wrong: Callable[[float], None] | None = None) -> int:
    """Plays one game; returns the turn with the correct answer, counted from 1, or 0 if there was none.

    `reward_wrong`: called with the `nearness` of each wrong answer.
    """
    dataset, entry = task_entry(sample)
    score = score_function(dataset)
    messages: list[Any] = [{"role": "system", "content": RULE}, *sample.prompt]
    for turn in range(1, TURNS + 1):
        answer = await client.chat.completions.create(model="slime", messages=messages)
        said = answer.choices[0].message.content or ""
        guess = bare_answer(said, entry["answer"])
        if score(guess, entry) == 1.0:
            return turn
        if reward_wrong is not None:
            reward_wrong(nearness(guess, entry["answer"]))
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": hint(guess, entry["answer"])})
    return 0


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: plays one game, with reward 1.0 if any turn solved it."""
    return await played(sample, sampling_params, by_turn=False)


async def generate_by_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The same, and each wrong answer has its `nearness` as the reward of its turn."""
    return await played(sample, sampling_params, by_turn=True)


async def played(sample: Sample, sampling_params: dict[str, Any], *, by_turn: bool) -> list[Sample]:
    async with execution(sampling_params) as agent:
        async with AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0) as client:
            solved_in = await play(client, sample, agent.reward_turn if by_turn else None)
        return agent.samples(sample, reward={"solved": float(solved_in > 0), "solved_in": float(solved_in)})


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], metrics: dict[str, float]) -> bool:
    """`--custom-eval-rollout-log-function-path`: adds the fraction of games solved by each turn."""
    for name, found in data.items():
        games = {sample.index: sample.reward["solved_in"] for sample in found["samples"]}
        for turn in range(1, TURNS + 1):
            metrics[f"eval/{name}-solved_by_{turn}"] = sum(1 <= one <= turn for one in games.values()) / len(games)
    return False
