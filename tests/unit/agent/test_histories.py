"""Laws of sessions, on random conversations and the real tokenizers and templates of four families."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import AutoTokenizer

from slime.agent.template import ConversationTemplate
from slime.data.chat import ChatRenderer
from tests.support.agent_histories import Player
from tests.support.chat_hooks import FAMILIES, tokenizer_folder

END = {"deepseek-v3": "<\uff5cend\u2581of\u2581sentence\uff5c>"}  # of the others: <|im_end|>
QUICK, MANY = 150, 10_000
REQUESTS = 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num", [QUICK, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_what_is_trained_is_what_was_sampled(family: str, num: int) -> None:
    """Law: trained ids are sampled ids, once, behind the ids that the engine read; no text becomes a control token."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(family))
    template = ConversationTemplate(
        ChatRenderer(tokenizer), [tokenizer.convert_tokens_to_ids(END.get(family, "<|im_end|>"))]
    )
    num_ids = len(tokenizer)
    forks: Counter[str] = Counter()
    turns = refused = 0
    for seed in range(num):
        player = Player(template, tokenizer, num_ids, seed)
        player.play(REQUESTS)
        forks += player.check()
        turns, refused = turns + len(player.asked), refused + player.refused
    assert turns > num * REQUESTS * 0.9, (turns, refused)
    expected = {"retry", "edited", "compaction", "sub-agent", "thinking"} | (
        {"tools"} if template.writes_tools else set()
    )
    assert expected <= set(forks), forks
