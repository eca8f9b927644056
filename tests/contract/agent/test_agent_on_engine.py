"""Agents on the real engine: what is trained was sampled in the context that the engine reads in the sample."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from transformers import AutoTokenizer

from slime.agent.adapters import AgentAdapter
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.factories import end_of_text
from tests.support.marks import quick

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "skip_special_tokens": False}
CLOSE = 1e-4
"""Nats, in float32: the same sum in another order."""
TURNS = 4


def said(text: str) -> Any:
    return {"role": "user", "content": text}


async def over_openai(url: str, key: str) -> None:
    """A conversation, a retry, another way behind the second answer, a summary of it all."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600.0)
    history: list[Any] = [said("0123")]
    for turn in range(TURNS):
        answer = await client.chat.completions.create(model="m", messages=history)
        history += [answer.choices[0].message.model_dump(exclude_none=True), said(f"and {turn}?")]
    await client.chat.completions.create(model="m", messages=history)
    await client.chat.completions.create(model="m", messages=[*history[:3], said("no, 789")])
    await client.chat.completions.create(model="m", messages=[history[0], said("in short: 4")])


async def over_anthropic(url: str, key: str) -> None:
    """The same in streams."""
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=600.0)
    history: list[Any] = [said("456")]
    for turn in range(TURNS):
        async with client.messages.stream(model="m", max_tokens=9 + turn, system="be 1", messages=history) as stream:
            answer = await stream.get_final_message()
        history += [{"role": "assistant", "content": answer.content}, said(f"then {turn}")]


@pytest.mark.parametrize(
    ("talk", "num_ends"),
    quick([(over_openai, 1), (over_anthropic, 1), (over_openai, 60)], (over_openai, 1)),
    ids=["openai", "anthropic", "ends"],
)
def test_a_replay_of_each_sample_reproduces_its_log_probs(
    talk: Any, num_ends: int, front: Any, tiny_model_path: Path
) -> None:
    """Law: nothing is trained in a context that the model did not see; nor where many tokens may end a turn, which the
    template ends with one.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    ends = end_of_text(str(tiny_model_path), tokenizer).token_ids
    chat = ChatRenderer(tokenizer)
    ends |= set(range(len(tokenizer) // 2, len(tokenizer) // 2 + num_ends - 1)) - chat.control_ids
    params = {**PARAMS, "stop_token_ids": sorted(ends)}

    async def run() -> list[Sample]:
        client = EngineClient(front.url, request_timeout_s=60)
        adapter = AgentAdapter(client, ConversationTemplate(chat, sorted(ends)), decode=chat.decode, sampling=params)
        url = await adapter.start()
        try:
            key = adapter.open_session()
            await talk(url, key)
            return adapter.finish_session(key, Sample(index=0, group_index=0), reward=0.5)
        finally:
            await adapter.close()
            await client.close()

    samples = asyncio.run(run())
    if num_ends == 1:
        assert max(sample.metadata["agent"]["turns"] for sample in samples) >= TURNS
        assert len(samples) == (3 if talk is over_openai else 1), [sample.metadata["agent"] for sample in samples]
    else:
        assert "ending" in {sample.metadata["agent"]["branch"] for sample in samples}
        assert sum(sample.metadata["agent"]["turns"] for sample in samples) == TURNS + 3
    for sample in samples:
        body = {
            "input_ids": sample.tokens,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = httpx.post(f"{front.url}/generate", json=body, timeout=60).raise_for_status().json()
        replayed = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        assert len(replayed) == len(sample.tokens), "a log-prob for each token but the first"
        start = sample.prompt_length
        pairs = zip(sample.loss_mask or (), sample.rollout_log_probs or (), replayed[start:], strict=True)
        gaps = [abs(booked - again) for kept, booked, again in pairs if kept]
        assert gaps and max(gaps) <= CLOSE, max(gaps)


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_an_answer_in_json_satisfies_its_schema_and_is_context_alone(front: Any, tiny_model_path: Path) -> None:
    """Law: what was sampled under a constraint is not trained; a stop string ends the text on the engine, too."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    ends = end_of_text(str(tiny_model_path), tokenizer).token_ids
    chat = ChatRenderer(tokenizer)

    async def run() -> None:
        client = EngineClient(front.url, request_timeout_s=60)
        adapter = AgentAdapter(
            client,
            ConversationTemplate(chat, sorted(ends)),
            decode=chat.decode,
            sampling={**PARAMS, "max_new_tokens": 200},
            agent_sampling=True,
        )
        url = await adapter.start()
        key = adapter.open_session()
        agent = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600.0)
        format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        history: list[Any] = [said("which?")]
        try:
            answer = await agent.chat.completions.create(model="m", messages=history, response_format=format)
            text = answer.choices[0].message.content or ""
            # A random model may fill the space between two words of JSON until its tokens are used up.
            complete = answer.choices[0].finish_reason == "stop"
            assert text.lstrip().startswith("{") and (not complete or set(json.loads(text)) == {"kind", "sure"}), text
            history += [{"role": "assistant", "content": text}, said("and now?")]
            stops = list("aeiou0123456789")
            stopped = await agent.chat.completions.create(model="m", messages=history, stop=stops)
            assert not set(stopped.choices[0].message.content or "") & set(stops)
            format["json_schema"]["schema"] = {"type": "nothing"}
            with pytest.raises(openai.BadRequestError):
                await agent.chat.completions.create(model="m", messages=history, response_format=format)
            [sample] = adapter.finish_session(key, Sample(index=0, group_index=0))
            assert sample.metadata["agent"]["otherwise_sampled"] == 1 and sample.loss_mask is not None
            assert stopped.usage is not None and sum(sample.loss_mask) == stopped.usage.completion_tokens > 0
        finally:
            await adapter.close()
            await client.close()

    asyncio.run(run())
