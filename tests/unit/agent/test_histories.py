"""Laws of sessions, on random conversations and the real tokenizers and templates of four families; and on GLM's, whose
turns end with the header of the next one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from slime.agent.template import ConversationTemplate
from tests.support.agent_histories import Player
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
