"""Limits of an execution, ids of calls, and sampling that is the agent's own: what an agent sees, what is trained."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from typing import Any

import aiohttp
import openai
import pytest

from slime.agent.execution import Execution
from slime.core.sample import Sample, Status
from slime.rollout.generate import Limits
from slime.rollout.sample_metrics import count_tool_call, expect_tools, turn_metrics
from slime.rollout.transcript import TRANSCRIPT, Transcript
from tests.contract.agent.test_sdks import until
from tests.support.agent_room import Room, agent_room, turns_with_calls

USER: Any = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = {"id": "functions.weather:0", "function": {"name": "weather", "arguments": {"city": "Rome"}}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": USER}),
    "responses": ("/v1/responses", {"model": "m", "input": USER}),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 900, "messages": USER}),
}


def client_of(room: Room, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=key, max_retries=0, timeout=600.0)


async def test_an_execution_that_is_out_of_time_ends_its_request_and_takes_no_more() -> None:
    async with agent_room() as room:
        room.says("word " * 2000)
        room.model.tick_s = 0.01
        key = room.adapter.open_session(time_limit_s=1.0)
        client = client_of(room, key)
        with pytest.raises(openai.BadRequestError, match="time limit of 1 s"):
            await client.chat.completions.create(model="m", messages=USER)
        async with asyncio.timeout(60):
            while room.model.running:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="time limit of 1 s"):
            await client.chat.completions.create(model="m", messages=USER)
        assert room.adapter.session(key).hit_limit
        assert room.adapter.finish_session(key, Sample(index=0, group_index=0)) == []


@pytest.mark.parametrize("api", BODIES)
async def test_a_request_that_runs_when_its_session_ends_gets_an_error_of_its_api(api: str) -> None:
    """Law: whole and streamed, an agent learns why its answer ends; nothing of it is trained, and the engine stops."""
    path, body = BODIES[api]
    async with agent_room() as room, aiohttp.ClientSession() as http:
        room.model.tick_s = 0.01
        for streams in (False, True):
            room.says("word " * 2000)
            key = room.adapter.open_session()
            asked = {**body, "stream": streams}
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(room.url + path, json=asked, headers=headers) if streams else nullcontext() as begun:
                if begun is None:
                    asking = asyncio.create_task(http.post(room.url + path, json=asked, headers=headers))
                    await until(lambda: bool(room.model.running))
                assert room.adapter.finish_session(key, Sample(index=0, group_index=0)) == []
                answer = await asking if begun is None else begun
                said = await answer.text()
            assert answer.status == (200 if streams else 401)
            frames = [line[6:] for line in said.split("\n") if line.startswith("data: ") and "[DONE]" not in line]
            last = json.loads(frames[-1] if streams else said)
            error = last if streams and api == "responses" else last["error"]  # its event has no type of error
            assert "session of this API key ended" in error["message"], said[-500:]
            if error is not last:
                assert error["type"] == "authentication_error"
            await until(lambda: not room.model.running)


async def test_a_request_that_runs_when_the_adapter_closes_gets_an_error_of_its_api() -> None:
    async with agent_room() as room:
        room.says("word " * 2000)
        room.model.tick_s = 0.01
        asking = asyncio.create_task(client_of(room, room.key).chat.completions.create(model="m", messages=USER))
        await until(lambda: bool(room.model.running))
        await room.adapter.close()
        with pytest.raises(openai.InternalServerError, match="the run no longer accepts requests"):
            await asking


async def test_what_was_said_before_the_limit_counts_and_is_truncated() -> None:
    async with agent_room() as room:
        room.says("one", "two")
        key = room.adapter.open_session(max_turns=1, time_limit_s=3600.0)
        client = client_of(room, key)
        await client.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.BadRequestError, match="limit of 1 turns"):
            await client.chat.completions.create(model="m", messages=USER)
        limit = room.adapter._sessions[key].limit
        [sample] = room.adapter.finish_session(key, Sample(index=0, group_index=0), reward=1.0)
        assert sample.status is Status.TRUNCATED and sample.metadata["agent"]["turns"] == 1
        assert limit is not None and limit.cancelled(), "a timer outlives its session"


async def test_what_an_execution_samples_in_all_is_limited_over_its_sessions() -> None:
    """Law: `--rollout-max-total-response-len` counts what the policy samples for an execution, whoever asks for it."""
    async with agent_room() as room:
        room.says(*["one two three four five six seven eight"] * 3)
        token = TRANSCRIPT.set(Transcript())
        limits = Limits(max_total_response_len=12, transcript=TRANSCRIPT.get())
        keys = [room.adapter.open_session(limits=limits) for _ in range(2)]
        TRANSCRIPT.reset(token)
        for key in (keys[0], keys[1], keys[0]):
            answer = await client_of(room, key).chat.completions.create(model="m", messages=USER, max_tokens=5)
            assert answer.choices[0].finish_reason == "length"
        assert [body["sampling_params"]["max_new_tokens"] for body in room.model.requests] == [5, 5, 2]
        for key in keys:
            with pytest.raises(openai.BadRequestError, match="limit of 12 sampled tokens"):
                await client_of(room, key).chat.completions.create(model="m", messages=USER)
            assert room.adapter.finish_session(key, Sample(index=0, group_index=0))[-1].status is Status.TRUNCATED


async def test_sampling_of_an_agents_own_is_context_and_the_runs_is_trained() -> None:
    """Law: nothing is trained under a temperature that it was not sampled with."""
    async with agent_room(agent_sampling=True) as room:
        room.says("one", "two", "three")
        client = client_of(room, room.key)
        messages: Any = list(USER)
        for given in ({"temperature": 0.2}, {}, {"temperature": 1.0, "top_p": 1.0}):
            answer = await client.chat.completions.create(model="m", messages=messages, **given)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *USER]
        assert [body["sampling_params"]["temperature"] for body in room.model.requests] == [0.2, 1.0, 1.0]
        [sample] = room.adapter.finish_session(room.key, Sample(index=0, group_index=0), reward=1.0)
        assert sample.metadata["agent"]["otherwise_sampled"] == 1 and sample.loss_mask is not None
        kept = [t for t, m in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True) if m]
        assert room.tokenizer.decode(kept) == "two<|im_end|>three<|im_end|>"


async def test_what_was_counted_is_counted_once_over_the_branches_and_sessions_of_an_execution() -> None:
    """Law: a fork doubles no metric: turns that branches share, and calls of tools, are reported once."""
    async with agent_room() as room:
        room.says("one", "two", "another", "of a second session")
        client, base = client_of(room, room.key), Sample(index=0, group_index=0)
        answer = await client.chat.completions.create(model="m", messages=USER)
        messages: Any = [*USER, {"role": "assistant", "content": answer.choices[0].message.content}]
        for words in ("Go on.", "No, like this."):
            await client.chat.completions.create(model="m", messages=[*messages, {"role": "user", "content": words}])
        second = room.adapter.open_session()
        await client_of(room, second).chat.completions.create(model="m", messages=USER)
        expect_tools(base)
        for failed in (False, True):
            count_tool_call(base, failed=failed)
        samples = [s for key in (room.key, second) for s in room.adapter.finish_session(key, base, reward=1.0)]
        assert [s.metadata["agent"]["branch"] for s in samples] == ["first", "edited", "first"]
        assert [s.metadata["agent"]["turns"] for s in samples] == [2, 1, 1]
        metrics = turn_metrics("rollout", samples)
        assert metrics["rollout/num_turns/mean"] == 4
        assert (metrics["rollout/tool_calls/mean"], metrics["rollout/tool_errors/mean"]) == (2, 1)
        assert [s.metadata["turn_counts"].get("tool_calls") for s in samples] == [2, None, None]


MISTRAL = "[TOOL_CALLS] [{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}]"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
)
HERMES = "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"


@pytest.mark.parametrize(
    ("template", "call_id"),
    [(HERMES, r"call_\w+"), (MISTRAL, r"[a-zA-Z0-9]{9}"), (KIMI, r"functions\.weather:0")],
    ids=["hermes", "mistral", "kimi_k2"],
)
async def test_a_call_has_an_id_that_its_familys_template_takes(template: str, call_id: str) -> None:
    """Law: calls are read as the chat template writes them, and named as the family names them."""
    async with agent_room(template=turns_with_calls(template)) as room:
        asked = [*USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        written = room.tokenizer.apply_chat_template(asked, tokenize=False).partition("assistant\n")[2]
        room.says(written.removesuffix("<|im_end|>\n"))
        answer = await client_of(room, room.key).chat.completions.create(model="m", messages=USER, tools=TOOLS)
        [call] = answer.choices[0].message.tool_calls or []
        assert re.fullmatch(call_id, call.id) and call.function.arguments == '{"city":"Rome"}'


async def test_an_agent_that_never_got_an_answer_failed() -> None:
    """Law: the execution is tried again; it is no sample, and no mistake that ends the run."""
    async with agent_room() as room:
        execution = Execution(room.url, room.key, room.adapter)
        [sample] = execution.samples(Sample(index=3, group_index=1), reward=1.0)
        assert sample.status is Status.FAILED and sample.index == 3 and "without a response" in sample.failure
