"""What a turn costs: how many events an answer takes, which experts are asked for, and what a long history encodes."""

from __future__ import annotations

import random
from contextlib import aclosing

import pytest

from slime.agent.adapters.adapter import Answer, Request, Turn, Words
from slime.agent.messages import Message
from slime.agent.parsers import FORMATS
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.engine_interface import ROUTED_EXPERTS_MARK
from slime.core.routed_experts import ExpertFormat
from slime.core.sample import Sample
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.generate import Limits
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer
from tests.support.fake_engine import FakeEngine, serve

FAMILY = "glm4.6"
END = 1
"""The last token of the fake engine's answers, as with a stop string: the template does not know it as an end."""


def template_of() -> ConversationTemplate:
    return ConversationTemplate(published_chat(FAMILY), ids_of(published_tokenizer(FAMILY), PUBLISHED[FAMILY].ends))


def turn_of(session: Session, messages: list[Message], *, streams: bool = False, most: int = 300) -> Turn:
    template, format = template_of(), FORMATS.build("text", None)
    return Turn(
        session=session,
        session_id="s",
        request=Request(tuple(messages), streams=streams),
        params={"max_new_tokens": most, "temperature": 1.0},
        trained=True,
        limits=Limits(),
        decode=template.chat.decode,
        format=format,
        end_ids=template.end_ids,
    )


async def answered(turn: Turn, client: EngineClient) -> tuple[Answer, int]:
    """Returns the answer and the number of events before it."""
    async with aclosing(turn.events(client)) as events:
        seen = [event async for event in events]
    assert isinstance(seen[-1], Answer)
    return seen[-1], len(seen) - 1


@pytest.mark.parametrize(("streams", "interval"), [(False, 64), (True, 8)])
async def test_answers_that_nobody_streams_come_in_long_events(streams: bool, interval: int) -> None:
    async with serve(FakeEngine(stop_after=200)) as engine:
        client = EngineClient(engine.url)
        session = Session(template_of())
        answer, num_events = await answered(turn_of(session, [Message("user", "hi")], streams=streams), client)
        await client.close()
    assert [body["sampling_params"]["stream_interval"] for body in engine.requests] == [interval]
    ids = [*(10 + i % 50 for i in range(200)), END]
    assert session.branches[0].tokens[-201:] == ids and answer.sampled_tokens == 201
    assert answer.message.text == template_of().chat.decode(ids)
    assert (num_events > 20) is streams


async def test_each_turn_asks_for_the_experts_that_its_branch_lacks_and_for_no_others() -> None:
    num_turns, experts = 3, ExpertFormat(num_experts=200, topk=2, sparse=(True,))
    async with serve(FakeEngine(stop_after=70)) as engine:
        client = EngineClient(engine.url, experts=experts)
        session, history = Session(template_of()), [Message("user", "hi")]
        for number in range(num_turns):
            answer, _ = await answered(turn_of(session, history), client)
            history += [answer.message, Message("user", f"go on {number}")]
        await client.close()
    (branch,) = session.branches
    starts = [int(body["rid"].partition(ROUTED_EXPERTS_MARK)[2].rstrip(".")) for body in engine.requests]
    assert starts == [0, *(turn.end - 1 for turn in branch.turns[:-1])]
    (sample,) = session.samples(Sample(index=0, group_index=0))
    assert sample.rollout_routed_experts is not None
    rows = sample.rollout_routed_experts.ids[:, 0, 0]
    assert rows.tolist() == [token % 100 for token in sample.tokens[:-1]], "one row for each token but the last"


@pytest.mark.parametrize("least", [1, 5, 512])
def test_the_text_of_an_answer_does_not_depend_on_how_its_events_cut_it(least: int) -> None:
    """The oracle is the tokenizer, which decodes all ids at once."""
    chat, tokenizer = published_chat(FAMILY), published_tokenizer(FAMILY)
    end, rng = tokenizer.convert_tokens_to_ids("<|user|>"), random.Random(least)
    words = "é\u0301 👩\u200d👩\u200d👧 \U0001f600 漢字かな  spaces\n\ttabs العربية " * 3
    texts = [tokenizer.encode(words, add_special_tokens=False), [*tokenizer.encode(words[:40]), end, end]]
    texts += [[rng.randrange(len(tokenizer)) for _ in range(40)] for _ in range(20)]
    for ids in texts:
        for kept in ((), (chat.decode([end]),)):
            text, parts, at = Words(chat.decode, {end}, kept, least), list[str](), 0
            while at < len(ids):
                num = rng.choice((1, 1, 2, 3, 8, 30))
                parts.append(text.more(ids[at : at + num]))
                at += num
            parts.append(text.end())
            shown = ids[:-1] if ids[-1] == end and not kept else ids
            assert "".join(parts) == chat.decode(shown)
