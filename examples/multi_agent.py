"""Solvers, critics and a selector, trained together. One model plays all roles.

    python -m examples.run multi_agent

Solvers answer in parallel, a critic reviews each answer, and a selector reads the reviews and chooses an answer. Each
of them has a separate session. Their samples are siblings of one execution, each with the reward of its role:

    solver      1 if its own answer is correct
    critic      1 if its verdict is correct
    selector    1 if the chosen answer is correct

Some roles are easier than others, so a sample is compared only with samples of the same role in the group (`by_role`).
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from examples.agent_openai_loop import client_of
from slime.agent.execution import execution
from slime.core.sample import Sample

FLAGS = """
    --custom-generate-function-path examples.multi_agent:generate
    --custom-reward-post-process-path examples.multi_agent:by_role
"""
NUM_SOLVERS = 2


def rows() -> list[dict[str, Any]]:
    """Returns the dataset: small sums."""
    return [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(2, 10) for b in range(2, 10)]


def last_number(said: str) -> str:
    """Returns the last number in a text, or an empty text."""
    return next(reversed(re.findall(r"-?\d+", said)), "")


async def play(
    role: str, asked: str, right: Callable[[str], bool], sample: Sample, params: dict[str, Any]
) -> tuple[str, list[Sample]]:
    """Runs one session of one role; returns the response as text, and as samples with the reward."""
    async with execution(params) as agent, client_of(agent) as client:
        turn = await client.chat.completions.create(model="slime", messages=[{"role": "user", "content": asked}])
        said = turn.choices[0].message.content or ""
        return said, agent.samples(sample, reward=float(right(said)), metadata={"role": role})


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: runs all roles as one execution."""
    question = str(sample.prompt)

    def solved(said: str) -> bool:
        return last_number(said) == str(sample.label)

    async def solve_and_review() -> tuple[str, str, list[Sample]]:
        answer, solver = await play("solver", question, solved, sample, sampling_params)
        asked = f"{question}\nAnswer: {answer}\nIs this right? Say yes or no."
        verdict = "yes" if solved(answer) else "no"
        review, critic = await play(
            "critic",
            asked,
            lambda said: re.findall(r"\b(?:yes|no)\b", said.lower())[:1] == [verdict],
            sample,
            sampling_params,
        )
        return answer, review, [*solver, *critic]

    tried = await asyncio.gather(*(solve_and_review() for _ in range(NUM_SOLVERS)))
    listed = "\n".join(f"Answer {i}: {a}\nReview: {review}" for i, (a, review, _) in enumerate(tried, 1))
    asked = f"{question}\n{listed}\nWhich answer is right? Say its number."
    chosen = {str(i): solved(answer) for i, (answer, _, _) in enumerate(tried, 1)}
    _, selector = await play(
        "selector", asked, lambda said: chosen.get(last_number(said), False), sample, sampling_params
    )
    return [*(one for _, _, made in tried for one in made), *selector]


def by_role(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: each reward minus the mean of its role in its group."""
    raw = [float(sample.get_reward_value(args.reward_key) or 0.0) for sample in samples]  # none is unscored here
    roles = [(sample.group_index, sample.metadata.get("role")) for sample in samples]
    found: dict[Any, list[float]] = defaultdict(list)
    for role, reward in zip(roles, raw, strict=True):
        found[role].append(reward)
    return raw, [reward - fmean(found[role]) for role, reward in zip(roles, raw, strict=True)]
