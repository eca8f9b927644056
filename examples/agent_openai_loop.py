"""An ordinary agent with OpenAI's SDK, trained without changes: it has a loop and a tool, and handles no tokens.

    python train.py ... --custom-generate-function-path examples.agent_openai_loop:generate

The dataset has messages (no `--apply-chat-template`). The agent uses the run's adapter as if the adapter were OpenAI.
The responses that the agent receives are trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from examples.multi_turn_tools import FAILED, TOOLS, calculate
from slime.agent.execution import Execution, execution
from slime.core.sample import Sample

MAX_TURNS = 4


async def answer_to(call: Any) -> str:
    """Returns the result of a tool call as text."""
    return calculate(call.function.arguments) if call.function.name == "calculate" else f"{FAILED} no such tool"


def client_of(agent: Execution) -> AsyncOpenAI:
    """Returns OpenAI's client for the run's model. `async with` closes its connections."""
    return AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key, max_retries=0)


async def solve(
    client: AsyncOpenAI, messages: list[Any], tools: Any, answer_to: Callable[[Any], Awaitable[str]]
) -> str:
    """Sends requests until the model calls no more tools; returns the last response, or "" if calls never stop."""
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="slime", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await answer_to(call)})
    return ""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """`--custom-generate-function-path`: one session of the agent."""
    async with execution(sampling_params) as agent, client_of(agent) as client:
        prompt = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        await solve(client, [dict(message) for message in prompt], TOOLS, answer_to)
        return agent.samples(sample)
