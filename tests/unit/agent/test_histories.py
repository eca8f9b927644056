"""Laws of sessions, on random conversations and the real tokenizers and templates of four families; and on GLM's, whose
turns end with the header of the next one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from slime.agent.messages import Message, ToolCall
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.rollout.client.call import Generation
from tests.support.agent_histories import TOOLS, Player
from tests.support.chat_hooks import FAMILIES
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer
from tests.support.marks import quick

QUICK, MANY = 60, 10_000
REQUESTS = 8


@pytest.mark.parametrize("family", quick([*FAMILIES, "glm4.6"], "glm4.6"))
@pytest.mark.parametrize("num", [QUICK, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_what_is_trained_is_what_was_sampled(family: str, num: int) -> None:
    """Law: trained ids are sampled ids, once, behind the ids that the engine read; no text becomes a control token."""
    tokenizer = published_tokenizer(family)
    template = ConversationTemplate(published_chat(family), ids_of(tokenizer, PUBLISHED[family].ends))
    num_ids = len(tokenizer)
    forks: Counter[str] = Counter()
    turns = refused = 0
    for seed in range(num):
        player = Player(template, tokenizer, num_ids, seed)
        player.play(REQUESTS)
        forks += player.check()
        turns, refused = turns + len(player.asked), refused + player.refused
    assert turns > num * REQUESTS * 0.9, (turns, refused)
    expected = {"retry", "edited", "compaction", "sub-agent"}
    expected |= {"tools"} if template.writes_tools else set()
    expected |= {"ending"} if len(template.end_ids) > 1 else set()
    assert expected <= set(forks), forks


SYSTEM, A, B, C = (Message(role, text) for role, text in (("system", "s"), ("user", "a"), ("user", "b"), ("user", "c")))
ONE, TWO = (Message("assistant", text, f"thought {text}") for text in ("one", "two"))
WHY: dict[str, tuple[list[list[Message]], list[Message], str]] = {
    "the first": ([], [SYSTEM, A], "first"),
    "the next turn": ([[SYSTEM, A]], [SYSTEM, A, ONE, B], "first"),
    "the same again": ([[SYSTEM, A]], [SYSTEM, A], "retry"),
    "the same again, later": ([[SYSTEM, A], [SYSTEM, A, ONE, B]], [SYSTEM, A], "retry"),
    "a later one again": ([[SYSTEM, A], [SYSTEM, A, ONE, B]], [SYSTEM, A, ONE, B], "retry"),
    "a part of a request": ([[SYSTEM, A, B]], [SYSTEM, A], "compaction"),
    "other words after a turn": ([[SYSTEM, A], [SYSTEM, A, ONE, B]], [SYSTEM, A, ONE, C], "edited"),
    "a part of what followed": ([[SYSTEM, A], [SYSTEM, A, ONE, B, C]], [SYSTEM, A, ONE, B], "edited"),
    "other words before a turn": ([[SYSTEM, A]], [SYSTEM, B, ONE, C], "edited"),
    "other thinking": ([[SYSTEM, A]], [SYSTEM, A, Message("assistant", "one", "no"), B], "edited"),
    "other thinking after a turn": (
        [[SYSTEM, A], [SYSTEM, A, ONE, B]],
        [SYSTEM, A, ONE, B, Message("assistant", "two", "no"), C],
        "edited",
    ),
    "an answer of nobody": ([[SYSTEM, A]], [SYSTEM, A, Message("assistant", "no"), B], "foreign"),
    "a call of nobody": (
        [[SYSTEM, A]],
        [SYSTEM, A, Message("assistant", "one", None, (ToolCall("c", "f", "{}"),)), B],
        "foreign",
    ),
    "turns left out at the end": ([[SYSTEM, A], [SYSTEM, A, ONE, B]], [SYSTEM, C], "compaction"),
    "turns left out in the middle": ([[SYSTEM, A], [SYSTEM, A, ONE, B]], [SYSTEM, A, TWO, C], "compaction"),
    "another first message": ([[SYSTEM, A]], [B, ONE, C], "sub-agent"),
    "tools": ([[SYSTEM, A]], [SYSTEM, A, ONE, B], "tools"),
}
"""Name -> (requests that are answered with one, two, ...; the request; why its branch exists, by the docs)."""


def asked_before(requests: list[list[Message]]) -> Session:
    """A session that answered these requests with ONE, TWO."""
    tokenizer = published_tokenizer("glm4.6")
    session = Session(ConversationTemplate(published_chat("glm4.6"), ids_of(tokenizer, PUBLISHED["glm4.6"].ends)))
    ids = (tokenizer.convert_tokens_to_ids("<|user|>"),)
    for request, answer in zip(requests, (ONE, TWO), strict=False):
        session.end_turn(session.open_turn(request), answer, Generation(ids, (-1.0,), "stop", 1, ""))
    assert len(session.branches) <= 1
    return session


@pytest.mark.parametrize("name", WHY)
def test_a_branch_has_the_reason_that_the_docs_give(name: str) -> None:
    before, asked, why = WHY[name]
    assert asked_before(before).open_turn(asked, TOOLS if name == "tools" else ()).branch.why == why


def test_a_request_that_is_still_being_answered_is_a_retry_only_if_it_comes_again() -> None:
    session = asked_before([[SYSTEM, A]])
    histories = ([SYSTEM, A, ONE, B], [SYSTEM, A, ONE, B], [SYSTEM, A, ONE, C])
    assert [session.open_turn(history).branch.why for history in histories] == ["first", "retry", "edited"]
