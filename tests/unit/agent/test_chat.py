"""`current().chat`: the same samples as an agent's over HTTP, branches, forks, limits, and what it refuses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from slime.agent.chat import ModelChats
from slime.agent.execution import Execution
from slime.core.errors import ConfigError, DataError, HookError
from slime.core.sample import Sample, Status
from slime.rollout import context as contexts
from slime.rollout.context import EXECUTION, RolloutContext, RunningExecution, current, use
from slime.rollout.generate import LIMITS, Limits
from slime.rollout.types import Chat, Progress
from tests.support.agent_room import END, Room, agent_room

PROMPT = "<|im_start|>user\nHi<|im_end|>\n"
PARAMS = {"temperature": 1.0, "max_new_tokens": 1000}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def in_chat(work: Callable[[Room, Chat], Awaitable[Any]], *, most_turns: int = 1_000, **args: Any) -> Any:
    """Runs `work` inside an execution whose engine says what the room's script holds."""

    async def main() -> Any:
        async with agent_room() as room:
            ends = [room.tokenizer.convert_tokens_to_ids(END)]
            chats = ModelChats("", room.tokenizer, {})
            known: dict[str, Any] = {"hf_checkpoint": None, "multimodal_keys": None}
            known |= {"agent_tool_format": None, "agent_max_turns": most_turns, "apply_chat_template": False, **args}
            room.client.chats = chats
            room.tokenizer.eos_token = END
            assert room.tokenizer.eos_token_id == ends[0]
            loop = asyncio.get_running_loop()
            context = RolloutContext(
                args=SimpleNamespace(**known),  # type: ignore[arg-type]
                client=room.client,
                tokenizer=room.tokenizer,
                graders=None,
                progress=Progress(),
                loop=loop,
                models=contexts.Models(default=room.client),
            )
            with use(context):
                EXECUTION.set(RunningExecution(PARAMS, PROMPT))
                return await work(room, current().chat)

    return asyncio.run(main())


def as_recorded(samples: list[Sample]) -> list[Any]:
    """What training reads of samples."""
    return [
        (s.tokens, s.response_length, s.loss_mask, s.rollout_log_probs, s.token_versions, s.token_rewards)
        for s in samples
    ]


def test_the_samples_are_those_of_an_agent_over_http() -> None:
    """Law: OpenAI's SDK and the chat have the same conversation; each token, mask and log-prob is the same."""
    said = ["<think>\nhm\n</think>\n\nLook.", CALL, "Done."]

    async def work(room: Room, chat: Chat) -> Any:
        room.says(*said, *said)
        async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key=room.key, max_retries=0) as client:
            history: list[Any] = [user("What is it?")]
            for number in range(3):
                made = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)  # type: ignore
                message = made.choices[0].message
                Execution(room.url, room.key, room.adapter).reward_turn(number / 3)
                history.append(message.model_dump(exclude_none=True))
                history += [{"role": "tool", "tool_call_id": c.id, "content": "red"} for c in message.tool_calls or ()]
                history += [] if message.tool_calls else [user(f"and {number}?")]
        messages: list[Any] = [user("What is it?")]
        for number in range(3):
            reply = await chat.ask(messages, tools=TOOLS)
            chat.reward_turn(number / 3)
            messages += [reply.message, *(call.result("red") for call in reply.calls)]
            messages += [] if reply.calls else [user(f"and {number}?")]
            if number == 1:
                assert [(call.name, call.arguments) for call in reply.calls] == [("look", {"at": "it"})]
                assert reply.finish_reason == "calls"
        over_http = room.adapter.finish_session(room.key, Sample(index=0))
        return over_http, chat.samples(Sample(index=0), reward=0.5), room.model.requests

    over_http, in_process, requests = in_chat(work)
    assert as_recorded(over_http) == as_recorded(in_process) and len(in_process) == 1
    assert [one["input_ids"] for one in requests[:3]] == [one["input_ids"] for one in requests[3:]]
    assert [reward for reward in in_process[0].token_rewards or () if reward] == [1 / 3, 2 / 3]
    assert in_process[0].reward == 0.5 and in_process[0].metadata["agent"]["turns"] == 3


def test_an_edited_conversation_branches_and_each_sampled_token_is_trained_once() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("one", "two", "three", "four")
        with pytest.raises(DataError, match="no answer to reward yet"):
            chat.reward_turn(1.0)
        first = await chat.ask("Begin.")
        chat.reward_turn(1.0)
        begun = [user("Begin."), first.message]
        for reward, messages in ((2.0, [*begun, user("left")]), (4.0, [*begun, user("right")]), (8.0, "Another.")):
            await chat.ask(messages)
            chat.reward_turn(reward)
        with pytest.raises(DataError, match="must be a finite number, got nan"):
            chat.reward_turn(float("nan"))
        made = chat.samples(Sample(index=0))
        said = [room.tokenizer.encode(word + END, add_special_tokens=False) for word in ("one", "two", "three", "four")]
        return made, said

    made, said = in_chat(work)
    assert [one.metadata["agent"]["branch"] for one in made] == ["first", "edited", "sub-agent"]
    trained = [[t for t, m in zip(s.tokens[-s.response_length :], s.loss_mask, strict=True) if m] for s in made]
    assert trained == [said[0] + said[1], said[2], said[3]]
    rewards = [[r for r in s.token_rewards or () if r] for s in made]
    assert rewards == [[1.0, 2.0], [4.0], [8.0]], "each counts once, where its turn is trained"
    for sample in made:
        pairs = zip(sample.tokens[-sample.response_length :], sample.token_rewards or (), strict=True)
        assert {token for token, reward in pairs if reward} == {said[0][-1]}, "at the token that ends a turn"


def test_a_fork_knows_the_conversation_and_trains_only_its_own_turns() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("one", "two", "three")
        first = await chat.ask("Begin.")
        other = chat.fork()
        messages = [user("Begin."), first.message, user("More.")]
        await asyncio.gather(other.ask(messages), chat.ask(messages))
        again = chat.fork()
        return chat.samples(Sample(index=0), 1.0), other.samples(Sample(index=0), 0.0), again.samples(Sample(index=0))

    ours, theirs, nothing = in_chat(work)
    assert len(ours) == len(theirs) == 1 and (ours[0].reward, theirs[0].reward) == (1.0, 0.0)
    prompt = ours[0].tokens[: len(ours[0].tokens) - ours[0].response_length]
    assert theirs[0].tokens[: len(prompt)] == prompt
    assert ours[0].metadata["agent"]["turns"] == 2 and theirs[0].metadata["agent"]["turns"] == 1
    assert sum(ours[0].loss_mask or ()) > sum(theirs[0].loss_mask or ()) > 0
    assert nothing == [], "a fork without turns has nothing to train"


def test_a_turn_with_other_sampling_parameters_is_context() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("plan", "do")
        plan = await chat.ask("Plan.", temperature=0.2)
        await chat.ask([user("Plan."), plan.message, user("Do.")], temperature=1.0, max_new_tokens=7)
        asked = [one["sampling_params"] for one in room.model.requests]
        return chat.samples(Sample(index=0)), asked, room.tokenizer.encode("do" + END, add_special_tokens=False)

    (sample,), asked, done = in_chat(work)
    assert [(one["temperature"], one["max_new_tokens"]) for one in asked] == [(0.2, 1000), (1.0, 7)]
    pairs = zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
    assert [token for token, kept in pairs if kept] == done
    assert sample.metadata["agent"]["otherwise_sampled"] == 1


def test_behind_a_limit_a_turn_is_empty_and_the_sample_truncated() -> None:
    async def turns(room: Room, chat: Chat) -> Any:
        room.says("one", "two", "three")
        replies = [await chat.ask(f"{i}") for i in range(3)]
        return [(one.text, one.finish_reason) for one in replies], chat.samples(Sample(index=0))

    async def tokens(room: Room, chat: Chat) -> Any:
        LIMITS.set(replace(Limits(), max_context_len=1))
        reply = await chat.ask("Too long.")
        return reply, chat.samples(Sample(index=0))

    replies, samples = in_chat(turns, most_turns=2)
    assert replies == [("one", "stop"), ("two", "stop"), ("", "length")] and len(samples) == 2
    reply, samples = in_chat(tokens)
    assert (reply.finish_reason, reply.num_tokens) == ("length", 0) and samples[0].status is Status.FAILED


def test_a_model_answers_with_its_own_template_and_nothing_is_kept() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("yes", "so")
        said = await current().models["default"].chat([{"role": "system", "content": "Judge."}, user("Right?")])
        await chat.ask("Go on.")
        return said, room.read, chat.samples(Sample(index=0))

    said, read, samples = in_chat(work)
    assert said.text == "yes" and "Judge." in read[0] and len(samples) == 1
    assert "Judge." not in read[1]


def no_hints(query):  # type: ignore[no-untyped-def]
    return query


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        (lambda chat: chat.ask([{"role": "wizard", "content": "?"}]), DataError, "wizard"),
        (lambda chat: chat.ask([{"role": "user", "content": [{"type": "image_url"}]}]), DataError, "image_url"),
        (lambda chat: chat.ask("?", tools=[no_hints]), HookError, "no_hints cannot be a tool"),
        (
            lambda chat: chat.ask("?", tools=[functools.partial(len, [])]),
            HookError,
            "cannot be a tool that runs; pass a function",
        ),
        (lambda chat: chat.ask("?", tools=[{"name": "look"}]), DataError, r"tools\[0\]"),
        (lambda chat: chat.ask("?", tools=no_hints), DataError, "tools must be a list, but it is of type function"),
        (lambda chat: chat.ask(None), DataError, "messages must be a list, but it is of type NoneType"),
        (lambda chat: chat.ask({"role": "user"}), DataError, "messages must be a list, but it is of type dict"),
        (lambda chat: chat.ask("?", max_new_tokens=0), DataError, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(asked: Any, error: type[Exception], says: str) -> None:
    async def work(_: Room, chat: Chat) -> None:
        with pytest.raises(error, match=says):
            await asked(chat)

    in_chat(work)


def test_a_prompt_that_the_dataset_has_rendered_is_refused_and_other_text_is_not() -> None:
    async def work(room: Room, chat: Chat) -> None:
        room.says("Hello.")
        for messages in (PROMPT, [user(PROMPT)]):
            with pytest.raises(ConfigError, match="drop that flag"):
                await chat.ask(messages)
        await chat.ask("Hi")

    in_chat(work, apply_chat_template=True)


def test_samples_end_a_chat_once() -> None:
    """Law: a token is in the samples of one call, and nothing that comes later is silently lost."""

    async def work(room: Room, chat: Chat) -> Any:
        room.says("one", "two")
        asking = asyncio.create_task(chat.ask("Begin."))
        await asyncio.sleep(0)
        with pytest.raises(HookError, match="1 calls of ask are running"):
            chat.samples(Sample(index=0))
        await asking
        for reward in ("x", float("nan")):
            with pytest.raises(DataError, match="reward of sample 0 must be a finite number"):
                chat.fork().samples(Sample(index=0), reward)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="which slime sets"):
            chat.samples(Sample(index=0), metadata={"agent": 1})
        made = chat.samples(Sample(index=0))
        for late in (lambda: chat.samples(Sample(index=0)), lambda: chat.reward_turn(1.0)):
            with pytest.raises(HookError, match=r"after samples\(\)"):
                late()
        with pytest.raises(HookError, match=r"after samples\(\)"):
            await chat.ask("More.")
        return made

    assert len(in_chat(work)) == 1


def test_an_execution_without_anything_to_train_says_why() -> None:
    async def unused(_: Room, chat: Chat) -> Any:
        return chat.fork().samples(Sample(index=0), 1.0), chat.samples(Sample(index=0))

    async def otherwise(room: Room, chat: Chat) -> Any:
        room.says("one")
        await chat.ask("Begin.", temperature=0.0)
        return chat.samples(Sample(index=0))

    nothing, (failed,) = in_chat(unused)
    assert nothing == [] and failed.status is Status.FAILED and "never called ask" in failed.failure
    (failed,) = in_chat(otherwise)
    assert failed.status is Status.FAILED and "other parameters than the run's (temperature=0.0)" in failed.failure


def test_a_turn_without_tokens_gets_no_reward() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("one")
        first = await chat.ask("Begin.")
        chat.reward_turn(1.0)
        await chat.ask([user("Begin."), first.message, user("More.")])
        chat.reward_turn(-5.0)
        return chat.samples(Sample(index=0))

    (sample,) = in_chat(work, most_turns=1)
    assert sum(sample.token_rewards or ()) == 1.0 and sample.status is Status.TRUNCATED


def test_functions_answer_calls_by_name_and_errors_are_results() -> None:
    def look(at: str) -> str:
        """Looks.

        Args:
            at: What.
        """
        return f"{at} is red"

    async def wait(at: str) -> str:
        raise OSError("no network")

    async def work(room: Room, chat: Chat) -> Any:
        room.says(f"{CALL}{CALL.replace('look', 'wait')}{CALL.replace('look', 'fly')}", "Red.")
        reply = await chat.ask("?", tools=[look])
        results = await chat.run(reply, [look, wait])
        await chat.ask([user("?"), reply.message, *results])
        return results, chat.samples(Sample(index=0, metadata={"turn_counts": {"tool_calls": 1, "tool_errors": 0}}))

    results, (sample,) = in_chat(work)
    texts = [one["content"] for one in results]
    assert texts == ["it is red", "error: OSError: no network", "error: there is no tool fly; the tools are look, wait"]
    assert sample.metadata["turn_counts"] == {"tool_calls": 4, "tool_errors": 2, "turns": 2}


def test_a_conversation_keeps_its_tools_until_it_gets_others() -> None:
    async def work(room: Room, chat: Chat) -> Any:
        room.says("one", "two", "three", "four")
        begun = [user("Begin."), (await chat.ask("Begin.", tools=TOOLS)).message, user("On.")]
        begun += [(await chat.fork().ask(begun)).message, user("On.")]
        await chat.ask(begun[:3], tools=[])
        await chat.ask("Something else.")
        return ["look" in text for text in room.read], chat.samples(Sample(index=0))

    shown, samples = in_chat(work)
    assert shown == [True, True, False, False]
    assert [one.metadata["agent"]["branch"] for one in samples] == ["first", "tools", "sub-agent"]


def test_outside_an_execution_there_is_no_chat() -> None:
    async def work(_: Room, __: Chat) -> None:
        EXECUTION.set(None)
        with pytest.raises(HookError, match="belongs to one execution"):
            _ = current().chat

    in_chat(work)
