"""Stop strings of an agent: it gets the text before them, all sampled tokens are trained, the history is recognised."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from slime.agent.parsers import UntilStop
from tests.contract.agent.test_sdks import OPENAI_TOOLS, USER, aanthropic, aopenai, called, trained_turns
from tests.support.agent_room import END, Room, agent_room
from tests.support.marks import quick

SAID = "Thought: look.\nAction: search\nObservation: it rains\nThought: done"
KEPT, STOP = "Thought: look.\nAction: search\n", "Observation:"


async def ask_chat(room: Room, messages: Any, stop: Any, *, streams: bool, **more: Any) -> tuple[str, str, None]:
    """(content, finish reason, nothing), as an agent on OpenAI's SDK reads them."""
    client = aopenai(room).chat.completions
    if not streams:
        whole = await client.create(model="m", messages=messages, stop=stop, **more)
        return whole.choices[0].message.content or "", str(whole.choices[0].finish_reason), None
    text, finish = "", ""
    async for chunk in await client.create(model="m", messages=messages, stop=stop, stream=True, **more):
        for choice in chunk.choices:
            text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
    return text, finish, None


async def ask_claude(room: Room, messages: Any, stop: Any, *, streams: bool) -> tuple[str, str, str | None]:
    """(text, stop reason, stop sequence), as an agent on Anthropic's SDK reads them."""
    given: Any = {"model": "m", "max_tokens": 900, "messages": messages, "stop_sequences": stop}
    client: anthropic.AsyncAnthropic = aanthropic(room)
    if streams:
        async with client.messages.stream(**given) as stream:
            whole = await stream.get_final_message()
    else:
        whole = await client.messages.create(**given)
    text = "".join(block.text for block in whole.content if block.type == "text")
    return text, str(whole.stop_reason), whole.stop_sequence


ASKS = {"openai": (ask_chat, "stop", None), "anthropic": (ask_claude, "stop_sequence", STOP)}


@pytest.mark.parametrize("streams", quick([False, True], True))
@pytest.mark.parametrize("api", ASKS)
async def test_an_agent_gets_the_text_before_its_stop_string_and_what_was_sampled_is_trained(
    api: str, streams: bool
) -> None:
    ask, reason, named = ASKS[api]
    async with agent_room() as room:
        room.says(SAID, SAID, "Final Answer: rain")
        assert await ask(room, USER, [STOP], streams=streams) == (KEPT, reason, named)
        first: Any = [*USER, {"role": "assistant", "content": KEPT}, {"role": "user", "content": "Observation: sun"}]
        assert await ask(room, first, ["\nThought: done", STOP], streams=streams) == (KEPT, reason, named)
        # A client that trims the text sends the same turn.
        second = [*first, {"role": "assistant", "content": KEPT.strip()}, {"role": "user", "content": "Observation: ?"}]
        assert (await ask(room, second, [STOP], streams=streams))[0] == "Final Answer: rain"
        assert not room.adapter.session(room.key).forks
        sampled = f"{KEPT}{STOP}"
        assert trained_turns(room) == [[sampled, sampled, "Final Answer: rain" + END]]


async def test_a_client_may_put_back_the_stop_string_that_ended_a_turn() -> None:
    """smolagents does so. What the model never said in its place is another history."""
    async with agent_room() as room:
        room.says(SAID, SAID, "Final Answer: rain")
        history: Any = list(USER)
        for _ in range(2):
            said, _, _ = await ask_chat(room, history, [STOP], streams=False)
            assert said == KEPT
            history += [{"role": "assistant", "content": said + STOP}, {"role": "user", "content": "sun"}]
        await ask_chat(room, history, [STOP], streams=False)
        assert not +room.adapter.session(room.key).forks
        room.says("Final Answer: snow")
        history[1] = {"role": "assistant", "content": KEPT + "Result:"}
        await ask_chat(room, history, [STOP], streams=False)
        assert dict(room.adapter.session(room.key).forks) == {"foreign": 1}


async def test_a_stop_string_counts_in_thinking_and_behind_calls_as_in_text() -> None:
    async with agent_room() as room:
        room.says("<think>\nlet me END not", "Text. " + called("Rome") + "\nEND behind", "so EN")
        assert await ask_chat(room, USER, "END", streams=False) == ("", "stop", None)
        answer = await aopenai(room).chat.completions.create(model="m", messages=USER, stop="END", tools=OPENAI_TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content == "Text. "
        assert await ask_chat(room, USER, "END", streams=True, max_tokens=50) == ("so EN", "stop", None)


def test_text_is_cut_at_the_first_stop_string_however_it_is_split() -> None:
    """The oracle is `str.partition` on the whole text."""
    for stops in (("Obs:",), ("aab", "b c"), ("\n\n", "</s>", "x"), ()):
        for text in ("aaab c Obs:x", "Obs", "", "aaaab", "no\n \n\nyes</s>", "</s", "Obs:Obs:"):
            want = min((text.partition(stop)[0] for stop in stops), key=len, default=text)
            for size in range(1, len(text) + 2):
                until = UntilStop(stops)
                parts = [until.more(text[i : i + size]) for i in range(0, len(text), size)]
                assert "".join([*parts, until.end()]) == want, (stops, text, size)
                assert (until.found is None) == (want == text), (stops, text)


async def test_empty_stop_strings_mean_none() -> None:
    async with agent_room() as room:
        room.says("one", "two", "three")
        for number, stop in enumerate(("", [], None)):
            given: Any = {} if stop is None else {"stop": stop}
            answer = await aopenai(room).chat.completions.create(model="m", messages=USER, **given)
            assert answer.choices[0].message.content == ("one", "two", "three")[number]
        assert all("stop" not in body["sampling_params"] for body in room.model.requests)
        with pytest.raises(openai.BadRequestError, match="stop"):
            await aopenai(room).chat.completions.create(model="m", messages=USER, stop=[3])  # type: ignore[list-item]
