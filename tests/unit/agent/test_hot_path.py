"""What a turn costs: how many events an answer takes, which experts are asked for, and what a long history encodes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
import pytest

from slime.agent.adapters.adapter import Answer, Request, Turn, Words
from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import FORMATS
from slime.agent.session import Session
from slime.agent.template import KEPT, ConversationTemplate, _without_middle
from slime.core.columns import GrowingColumn
from slime.core.engine_interface import ROUTED_EXPERTS_MARK
from slime.core.errors import DataError
from slime.core.routed_experts import ExpertFormat
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer, Rendered
from slime.rollout.client.call import Call, Generation
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.generate import Limits
from slime.rollout.transcript import Transcript
from tests.support.agent_histories import TOOLS
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer
from tests.support.fake_engine import FakeEngine, serve
from tests.support.marks import quick

FAMILY = "glm4.6"
SAID = Message("assistant", "so it is")
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
    async with serve(FakeEngine(stop_after=200, tick_s=0.0005 if streams else 0.0)) as engine:
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


def conversation(template: ConversationTemplate, rng: random.Random, num: int, *, calls: bool) -> list[Message]:
    """Messages up to an answer, in the shapes of chats and of loops over tools, with control tokens in some."""
    odd = sorted(template.chat.control)
    out = [Message("system", "be brief")] * rng.randrange(2)
    while len(out) < num or out[-1].role != "assistant":
        out.append(Message("user", rng.choice(("go on", "é", f"a {rng.choice(odd)} b"))))
        for number in range(rng.choice((0, 0, 1, 2, 40)) if calls else 0):
            call = ToolCall(f"functions.search:{number}", "search", '{"q":"x"}')
            out += [
                Message("assistant", "", None, (call,)),
                Message("tool", rng.choice(("found", "")), call_id=call.id, name="search"),
            ]
        out.append(Message("assistant", "an answer", rng.choice((None, "a thought"))))
    return out


@pytest.mark.parametrize("family", quick(sorted(PUBLISHED), FAMILY))
def test_what_follows_a_turn_does_not_depend_on_the_middle_of_a_long_conversation(family: str) -> None:
    """The oracle renders all messages. A template that breaks this is found out, and all are rendered from then on."""
    tokenizer = published_tokenizer(family)
    template = ConversationTemplate(published_chat(family), ids_of(tokenizer, PUBLISHED[family].ends))
    rng, num_short = random.Random(family), 0
    for _ in range(20):
        calls = template.writes_tools and rng.random() < 0.7
        before = conversation(template, rng, rng.randrange(50, 200), calls=calls)
        new, tools = [Message("user", "what now?")], TOOLS if calls else []
        try:
            whole = template._behind_all(before, new, tools)
        except DataError:
            continue
        num_short += len(_without_middle(before)) > 0
        assert template._behind(before, new, tools).text == whole.text
    assert num_short or not template.writes_tools
    assert not template._needs_all


def test_a_template_that_counts_messages_is_found_out_and_rendered_whole() -> None:
    tokenizer = copy.copy(published_tokenizer(FAMILY))
    shown = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = shown + "<|system|>{{ messages | length }}<|assistant|>"
    template = ConversationTemplate(ChatRenderer(tokenizer), ids_of(tokenizer, PUBLISHED[FAMILY].ends))
    before = [Message(role, "x") for _ in range(64) for role in ("user", "assistant")]
    for _ in range(2):
        assert "129" in template._behind(before, [Message("user", "y")], []).marked
    assert template._needs_all


def test_a_long_history_opens_without_rendering_or_encoding_more_than_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in calls, not in seconds: 200,000 tokens in 700 answers."""
    template, ids = template_of(), tuple(range(1000, 1280))
    session, history = Session(template), [Message("user", "hi")]
    for number in range(700):
        session.end_turn(session.open_turn(history), SAID, Generation(ids, (-0.5,) * len(ids), "stop", 1, ""))
        history += [SAID, Message("user", f"go on {number}")]
    encoded, written = list[str](), list[int]()
    encode, write = template.chat.encode_with_starts, template.chat.write

    def encode_noted(rendered: Rendered) -> tuple[list[int], list[int]]:
        encoded.append(rendered.marked)
        return encode(rendered)

    def write_noted(messages: Sequence[Any], tools: Any, *, add_prompt: bool) -> str:
        written.append(len(messages))
        return write(messages, tools, add_prompt=add_prompt)

    monkeypatch.setattr(template.chat, "encode_with_starts", encode_noted)
    monkeypatch.setattr(template.chat, "write", write_noted)
    opened = session.open_turn([Message(m.role, m.text) for m in history])
    assert len(opened.branch.tokens) > 196_000 and len(session.branches) == 1
    assert len(encoded) == 1 and "go on 699" in encoded[0] and "go on 698" not in encoded[0] and len(encoded[0]) < 100
    assert sum(written) < 3 * KEPT


def test_a_long_prompt_is_sent_and_recorded_without_lists_of_its_ids() -> None:
    """Counted in bytes: a list of 200,000 ids takes 1.6 MB for its references alone, an array 0.8 MB."""
    ids, transcript = GrowingColumn(np.int32, np.arange(200_000) % 50_000), Transcript()
    call = Call(ids.array, {"max_new_tokens": 8})
    payload = call.payload("r", 64)
    assert isinstance(payload["input_ids"], np.ndarray) and payload["input_ids"].nbytes == 800_000
    sent = orjson.loads(orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY))
    assert sent["input_ids"] == list(ids)
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "output_token_logprobs": [[-0.5, 7, None]]}
    transcript.begin_call(call)
    call.take_event({"text": "x", "meta_info": meta})
    transcript.end_call(call)
    sample = Sample(tokens=list(ids))
    sample.append_response_tokens([7], log_probs=[-0.5], weight_version=1)
    assert not transcript.problem(sample)
