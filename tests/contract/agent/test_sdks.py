"""The public SDKs of OpenAI and Anthropic, unmodified, against the adapter: whole, in streams, with tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from slime.core.sample import Sample, Status
from slime.rollout.client.engine_client import REQUEST_SCOPE, RequestScope
from tests.support.agent_room import END, Room, agent_room
from tests.support.marks import quick

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ANTHROPIC_TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": PARAMETERS}]
USER: Any = [{"role": "user", "content": "What is the weather?"}]


def called(*cities: str, before: str = "") -> str:
    calls = [json.dumps({"name": "weather", "arguments": {"city": city}}) for city in cities]
    return before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def in_room(work: Callable[[Room], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with agent_room(**settings) as room:
            await work(room)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


LIMIT_S = 600.0
"""By default an SDK gives up a connection after 5 s, which a busy machine may take."""


def aopenai(room: Room, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0, timeout=LIMIT_S, **more)


def aanthropic(room: Room) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=room.url, api_key=room.key, max_retries=0, timeout=LIMIT_S)


def trained_turns(room: Room) -> list[list[str]]:
    """Of each sample the texts of its trained runs of tokens."""
    out = []
    for sample in room.adapter.finish_session(room.key, Sample(index=0, group_index=0), reward=1.0):
        runs, run = [], list[int]()
        for token, kept in zip(sample.tokens[sample.prompt_length :], sample.loss_mask or (), strict=True):
            if kept:
                run.append(token)
            elif run:
                runs.append(room.tokenizer.decode(run))
                run = []
        out.append([*runs, room.tokenizer.decode(run)] if run else runs)
    return out


def test_chat_completions_with_parallel_calls() -> None:
    """Law: calls come apart, their results go back, and what was sampled is trained, in one sample."""

    async def work(room: Room) -> None:
        first, second = called("Rome", "Oslo", before="Both. "), "<think>\nfine\n</think>\n\nSunny, and snow."
        room.says(first, second)
        client = aopenai(room)
        one = await client.chat.completions.create(model="any", messages=USER, tools=OPENAI_TOOLS)
        message = one.choices[0].message
        assert one.choices[0].finish_reason == "tool_calls" and message.content == "Both. "
        assert message.tool_calls is not None
        cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]  # type: ignore[union-attr]
        assert cities == ["Rome", "Oslo"]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "18 C"} for call in message.tool_calls]
        history = [*USER, message.model_dump(exclude_none=True), *results]
        two = await client.chat.completions.create(model="any", messages=history, tools=OPENAI_TOOLS)
        assert two.choices[0].message.content == "Sunny, and snow."
        assert two.usage is not None and two.usage.completion_tokens == len(room.tokenizer.encode(second)) + 1
        assert two.usage.prompt_tokens == len(room.model.requests[1]["input_ids"])
        assert room.model.requests[1]["input_ids"][: one.usage.prompt_tokens] == room.model.requests[0]["input_ids"]  # type: ignore[union-attr]
        assert first + END in room.read[1] and room.read[1].count("18 C") == 2
        assert trained_turns(room) == [[first + END, second + END]]

    in_room(work)


def test_a_stream_of_chat_completions_is_the_whole_in_pieces() -> None:
    async def work(room: Room) -> None:
        text = "<think>\nhm 🙂\n</think>\n\nText before. " + called("Rome")
        room.says(text)
        stream = await aopenai(room).chat.completions.create(
            model="any", messages=USER, tools=OPENAI_TOOLS, stream=True, stream_options={"include_usage": True}
        )
        content, thoughts, calls, finish, usage = "", "", list[Any](), None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                thoughts += getattr(choice.delta, "reasoning_content", None) or ""
                calls += choice.delta.tool_calls or []
                finish = choice.finish_reason or finish
        assert "hm 🙂" in thoughts and content.strip() == "Text before." and finish == "tool_calls"
        assert [call.function.name for call in calls] == ["weather"] and usage is not None
        assert trained_turns(room) == [[text + END]]

    in_room(work)


@pytest.mark.slow
def test_the_synchronous_sdks() -> None:
    def talk(room: Room) -> None:
        client = openai.OpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0, timeout=LIMIT_S)
        assert client.models.list().data[0].id == "slime"
        assert client.chat.completions.create(model="m", messages=USER).choices[0].message.content == "one"
        assert client.responses.create(model="m", input="hello").output_text == "two"
        claude = anthropic.Anthropic(base_url=room.url, api_key=room.key, max_retries=0, timeout=LIMIT_S)
        answer = claude.messages.create(model="m", max_tokens=50, messages=USER)
        assert [block.text for block in answer.content] == ["three"]  # type: ignore[union-attr]

    async def work(room: Room) -> None:
        room.says("one", "two", "three")
        await asyncio.to_thread(talk, room)
        # The same question by another API is the same request again.
        assert dict(room.adapter.session(room.key).forks) == {"sub-agent": 1, "retry": 1}

    in_room(work)


@pytest.mark.parametrize("streams", quick([False, True], True))
def test_anthropic_messages_with_thinking_and_tools(streams: bool) -> None:
    """Law: thinking goes out and comes back, and the conversation stays one line of tokens."""

    async def ask(client: Any, messages: Any) -> Any:
        given = {"model": "m", "max_tokens": 900, "system": "Be brief.", "messages": messages, "tools": ANTHROPIC_TOOLS}
        if not streams:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            return await stream.get_final_message()

    async def work(room: Room) -> None:
        first = "<think>\nwhere?\n</think>\n\nLet me look. " + called("Rome", "Oslo")
        room.says(first, "Sunny.")
        client = aanthropic(room)
        one = await ask(client, USER)
        assert [block.type for block in one.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert one.stop_reason == "tool_use" and one.content[2].input == {"city": "Rome"}
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "18 C"} for block in one.content[2:]]
        sent_back = [block.model_dump(exclude_none=True) for block in one.content]
        history = [*USER, {"role": "assistant", "content": sent_back}, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(
            model="m", system="Be brief.", messages=history, tools=ANTHROPIC_TOOLS
        )
        two = await ask(client, history)
        assert two.content[0].text == "Sunny." and two.stop_reason == "end_turn"
        assert counted.input_tokens == len(room.model.requests[1]["input_ids"])
        assert trained_turns(room) == [[first + END, "Sunny." + END]]

    in_room(work)


@pytest.mark.parametrize("streams", quick([False, True], True))
def test_openai_responses_with_calls(streams: bool) -> None:
    async def ask(client: Any, items: Any) -> Any:
        tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
        given = {"model": "m", "instructions": "Be brief.", "input": items, "tools": tools}
        if not streams:
            return await client.responses.create(**given)
        async with client.responses.stream(**given) as stream:
            return await stream.get_final_response()

    async def work(room: Room) -> None:
        first = "<think>\nwhere?\n</think>\n\nLet me look. " + called("Rome")
        room.says(first, "Sunny.")
        client = aopenai(room)
        items: list[Any] = [{"role": "user", "content": "The weather?"}]
        one = await ask(client, items)
        assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]
        items += [item.model_dump(exclude_none=True) for item in one.output]
        items.append({"type": "function_call_output", "call_id": one.output[2].call_id, "output": "18 C"})
        two = await ask(client, items)
        assert two.output_text == "Sunny." and two.status == "completed"
        assert trained_turns(room) == [[first + END, "Sunny." + END]]

    in_room(work)


def test_errors_come_in_the_shape_of_each_api() -> None:
    """Law: a wrong key, an odd request and one turn too many are what the SDKs call them."""

    async def work(room: Room) -> None:
        room.says("one")
        client, claude = aopenai(room), aanthropic(room)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-nobody").chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-nobody").models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await claude.with_options(api_key="nobody").messages.create(model="m", max_tokens=1, messages=USER)
        with pytest.raises(openai.BadRequestError, match="only one choice per request"):
            await client.chat.completions.create(model="m", messages=USER, n=2)
        picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
        with pytest.raises(anthropic.BadRequestError, match="the model is text-only"):
            await claude.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": [picture]}])
        await client.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.BadRequestError, match="limit of 1 turns"):
            await client.chat.completions.create(model="m", messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="limit of 1 turns"):
            await claude.messages.create(model="m", max_tokens=1, messages=USER)
        [sample] = room.adapter.finish_session(room.key, Sample(index=0, group_index=0))
        assert sample.status is Status.TRUNCATED, "a limit ended it, not the agent"

    in_room(work, max_turns=1)


def test_a_client_that_hangs_up_ends_its_request_in_the_engine() -> None:
    async def work(room: Room) -> None:
        room.says("word " * 400)
        room.model.tick_s = 0.01
        asking = asyncio.create_task(aopenai(room).chat.completions.create(model="m", messages=USER))
        await until(lambda: bool(room.model.running))
        asking.cancel()
        await until(lambda: not room.model.running and bool(room.model.aborted))
        assert not room.adapter.session(room.key).branches, "a turn that nobody heard is kept"

    in_room(work)


def test_the_runs_sampling_wins_and_limits_only_fall() -> None:
    async def work(room: Room) -> None:
        room.says("one", "two")
        client = aopenai(room)
        await client.chat.completions.create(model="m", messages=USER, temperature=0.1, top_p=0.2, max_tokens=5000)
        await client.chat.completions.create(model="m", messages=USER, max_tokens=1)
        sent = [body["sampling_params"] for body in room.model.requests]
        assert [one["temperature"] for one in sent] == [1.0, 1.0] and all("top_p" not in one for one in sent)
        assert [one["max_new_tokens"] for one in sent] == [1000, 1]

    in_room(work)


def test_what_ends_an_execution_ends_the_requests_of_its_agent() -> None:
    """Law: an abort of the execution's scope reaches a request that came over HTTP; what there is starts over."""

    async def work(room: Room) -> None:
        scope = RequestScope()
        token = REQUEST_SCOPE.set(scope)
        key = room.adapter.open_session()
        REQUEST_SCOPE.reset(token)
        room.says("word " * 400)
        room.model.tick_s = 0.01
        client = aopenai(room).with_options(api_key=key)
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
        await until(lambda: bool(room.model.running))
        await room.client.abort_scope(scope)
        with pytest.raises(openai.InternalServerError, match="the run cancelled a request"):
            await asking
        with pytest.raises(openai.InternalServerError, match="no longer accepts requests from this session"):
            await client.chat.completions.create(model="m", messages=USER)
        (sample,) = room.adapter.finish_session(key, Sample(index=0, group_index=0))
        assert sample.status is Status.ABORTED and not sample.tokens

    in_room(work)


PNG = "iVBORw0KGgo="
CHAT_IMAGE: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
RESPONSES_IMAGE: Any = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PNG}"}
CLAUDE_IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


@pytest.mark.parametrize("streams", quick([False, True], True))
def test_an_image_is_refused_in_the_shape_of_each_api(streams: bool) -> None:
    """Law: a client learns by HTTP 400 which part is not supported; the conversation goes on without it."""

    def in_openais_shape(error: openai.BadRequestError, kind: str) -> None:
        said = error.response.json()["error"]
        assert error.status_code == 400 and set(said) == {"message", "type", "param", "code"}
        assert said["type"] == "invalid_request_error"
        assert f"{kind!r} is not supported" in said["message"]

    async def work(room: Room) -> None:
        client, claude = aopenai(room), aanthropic(room)
        text: Any = {"type": "text", "text": "What is this?"}
        with pytest.raises(openai.BadRequestError) as chat:
            content = [text, CHAT_IMAGE]
            await client.chat.completions.create(
                model="m", stream=streams, messages=[{"role": "user", "content": content}]
            )
        in_openais_shape(chat.value, "image_url")
        asked: Any = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, RESPONSES_IMAGE]}
        result: Any = {"type": "function_call_output", "call_id": "c", "output": [RESPONSES_IMAGE]}
        for item in (asked, result):
            with pytest.raises(openai.BadRequestError) as responses:
                await client.responses.create(model="m", stream=streams, input=[item])
            in_openais_shape(responses.value, "input_image")
        shown: Any = {"type": "tool_result", "tool_use_id": "t", "content": [CLAUDE_IMAGE]}
        for block in (CLAUDE_IMAGE, shown):
            messages: Any = [{"role": "user", "content": [text, block]}]
            with pytest.raises(anthropic.BadRequestError) as claudes:
                await claude.messages.create(model="m", max_tokens=9, stream=streams, messages=messages)
            with pytest.raises(anthropic.BadRequestError) as counted:
                await claude.messages.count_tokens(model="m", messages=messages)
            for error in (claudes.value, counted.value):
                body = error.response.json()
                assert error.status_code == 400 and body["type"] == "error"
                assert body["error"]["type"] == "invalid_request_error"
                assert "'image' is not supported" in body["error"]["message"]
        assert not room.adapter.session(room.key).branches and not room.model.requests
        room.says("fine")
        await client.chat.completions.create(model="m", messages=USER)

    in_room(work, max_turns=1)
