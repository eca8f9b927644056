"""What the run ends by itself is no failure of an agent, whatever the agent's program makes of the broken request; and
tools that nobody could read calls of end the run, whatever it makes of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import openai
import pytest

from slime.agent.execution import execution
from slime.core.errors import ConfigError
from slime.core.sample import Sample, Status
from slime.rollout.execute import Execution, Outcome, run_execution
from tests.support.agent_room import rollout, turns_with_calls
from tests.support.marks import quick

USER: Any = [{"role": "user", "content": "What is the weather?"}]
PARAMS = {"temperature": 1.0, "max_new_tokens": 900}


async def asked(url: str, key: str, *, streams: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer: Any = await client.chat.completions.create(model="m", messages=USER, stream=streams)
        if streams:
            async for _ in answer:
                pass


async def raises_the_sdks_error(args: Any, sample: Sample, params: Any) -> list[Sample]:
    async with execution(params) as agent:
        await asked(agent.url, agent.key, streams=False)
        return agent.samples(sample, reward=1.0)


async def raises_the_sdks_error_of_a_stream(args: Any, sample: Sample, params: Any) -> list[Sample]:
    async with execution(params) as agent:
        await asked(agent.url, agent.key, streams=True)
        return agent.samples(sample, reward=1.0)


async def raises_its_own_error(args: Any, sample: Sample, params: Any) -> list[Sample]:
    try:
        return await raises_the_sdks_error(args, sample, params)
    except openai.APIError:
        raise ValueError("the agent broke") from None


async def raises_in_another_task(args: Any, sample: Sample, params: Any) -> list[Sample]:
    return await asyncio.create_task(raises_its_own_error(args, sample, params))


async def gives_up(args: Any, sample: Sample, params: Any) -> Sample:
    try:
        await raises_the_sdks_error(args, sample, params)
    except openai.APIError:
        sample.status, sample.failure = Status.FAILED, "no answer"
    return sample


HOOKS = (
    raises_the_sdks_error,
    raises_the_sdks_error_of_a_stream,
    raises_its_own_error,
    raises_in_another_task,
    gives_up,
)
QUICK_ENDS = ((raises_the_sdks_error, "abort"), (raises_its_own_error, "pause"), (gives_up, "abort"))


async def ended_by(hook: Any, end: str, tmp_path: Path) -> Execution:
    """How an execution ends whose request the run, or its engine, ends while it is being answered."""
    async with rollout(tmp_path) as (room, context, scope):
        room.model.tick_s = 0.01
        room.says("word " * 1000)
        sample = Sample(group_index=0, index=0, prompt=USER)
        running = asyncio.create_task(run_execution(context, [sample], PARAMS, hook))
        async with asyncio.timeout(120):
            while not room.model.running:
                await asyncio.sleep(0.01)
            if end == "abort":
                await room.client.abort_scope(scope)
            elif end == "pause":
                await room.client.pause(scope)
            else:
                room.model.faults.extend([400] * 9)
                room.model.transports[next(iter(room.model.transports))].close()
            return await running


@pytest.mark.parametrize(
    ("hook", "end"),
    quick([(hook, end) for hook in HOOKS for end in ("abort", "pause")], *QUICK_ENDS),
)
async def test_what_the_run_ended_is_aborted_whatever_the_agent_raised(hook: Any, end: str, tmp_path: Path) -> None:
    """Law: it goes back to the buffer as it was, and counts as no failure."""
    ended = await ended_by(hook, end, tmp_path)
    assert (ended.outcome, ended.reason) == (Outcome.ABORTED, "interrupted")
    [sample] = ended.samples
    assert sample.status is Status.PENDING and not sample.tokens and not sample.failure


async def test_what_an_engine_refused_failed(tmp_path: Path) -> None:
    """Law: only the run's own abort is one."""
    ended = await ended_by(raises_its_own_error, "engine", tmp_path)
    assert ended.outcome is Outcome.FAILED and "the agent broke" in ended.reason


TOOLS: Any = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
UNKNOWN = turns_with_calls("{{ '!' ~ c.function.name ~ '(' ~ c.function.arguments | tojson ~ ')' }}")
OTHER = turns_with_calls("<tool_call>{{ c.function.name ~ ': ' ~ c.function.arguments | tojson }}</tool_call>")
AGENTS = ("--custom-generate-function-path", "examples.agent_openai_loop:generate")
"""Without one, flags of agents have no effect."""
REFUSED = [
    (UNKNOWN, (), r"does not use a known tool-call format.*--agent-tool-format text to leave calls"),
    (
        UNKNOWN.replace("tools", "notools"),
        (),
        r"the chat template does not support tools.*--chat-template FILE",
    ),
    (OTHER, (), r"'<tool_call>look_up.*which the format hermes cannot parse"),
    (
        UNKNOWN,
        (*AGENTS, "--agent-tool-format", "kimi_k2"),
        r"'!look_up.*which the format kimi_k2 cannot parse",
    ),
]


async def asks_with_tools(args: Any, sample: Sample, params: Any) -> list[Sample]:
    async with execution(params) as agent, openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key) as client:
        await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        return agent.samples(sample, reward=1.0)


async def carries_on_without(args: Any, sample: Sample, params: Any) -> list[Sample]:
    async with execution(params) as agent, openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=agent.key) as client:
        with contextlib.suppress(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        await client.chat.completions.create(model="m", messages=USER)
        return agent.samples(sample, reward=1.0)


@pytest.mark.parametrize(("template", "flags", "why"), quick(REFUSED, REFUSED[0], REFUSED[2]))
@pytest.mark.parametrize("hook", quick([asks_with_tools, carries_on_without], carries_on_without))
async def test_tools_whose_calls_nobody_reads_end_the_run(
    hook: Any, template: str, flags: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    """Law: no agent is trained whose calls would stay text without a word, whatever its program makes of that."""
    async with rollout(tmp_path, *flags) as (room, context, _):
        room.tokenizer.chat_template, room.model.tick_s = template, 0.0
        room.says("an answer")
        with pytest.raises(ConfigError, match=why):
            await run_execution(context, [Sample(group_index=0, index=0, prompt=USER)], PARAMS, hook)


async def test_calls_stay_text_where_the_user_says_so(tmp_path: Path) -> None:
    async with rollout(tmp_path, *AGENTS, "--agent-tool-format", "text") as (room, context, _):
        room.tokenizer.chat_template, room.model.tick_s = UNKNOWN, 0.0
        room.model.script.clear()
        room.says("!f({})")
        ended = await run_execution(context, [Sample(group_index=0, index=0, prompt=USER)], PARAMS, asks_with_tools)
        assert ended.outcome is Outcome.FINISHED and ended.samples[0].response == "!f({})<|im_end|>"
