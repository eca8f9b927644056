"""Samples of fine-tuning under the chat templates of model families: each turn behind its prompt, with its proper end.

The tokenizers are real where a package brings them (`tests/support/chat_templates.py`). The oracle is transformers'
`apply_chat_template` and what is written down by hand of each family (`tests/support/sft_families.py`).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data.sft_loss_mask import sft_row
from tests.support import sft_families
from tests.support.chat_templates import (
    DEEPSEEK_END,
    PUBLISHED,
    ids_of,
    published_chat,
    published_tokenizer,
    runs,
    spans,
    tekken_file,
)
from tests.support.marks import quick
from tests.support.sft_corpus import Row, corpus

TALK = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, then."},
]
NO_THOUGHT = "\n<think></think>"


CASES = {
    "qwen2.5": ("", "<|im_end|>"),
    "smollm2": ("", "<|im_end|>"),
    "deepseek-v3": ("", DEEPSEEK_END),
    "gemma3": ("", "<end_of_turn>"),
    "gemma3 of its package": ("", "<end_of_turn>"),
    "llama3": ("", "<|eot_id|>"),
    "llama3.1": ("", "<|eot_id|>"),
    "llama3.1 of its package": ("", "<|eot_id|>"),
    "mistral": ("", "</s>"),
    "glm4": ("\n", "<|user|>"),
    "glm-z1": ("\n", "<|user|>"),
    "glm4.6": (f"{NO_THOUGHT}\n", "<|user|>"),
    "glm4.6 without words": (f"{NO_THOUGHT}\n", "<|user|>"),
    "kimi-k2": ("", "<|im_end|>"),
    "kimi-k2 before calls": ("", "<|im_end|>"),
    "phi3": ("", "<|end|>"),
    "phi3.5": ("", "<|end|>"),
    "phi4": ("", "<|im_end|>"),
}
"""Family -> (what stands before an answer, what ends it)."""
FAMILIES = quick(CASES, "qwen2.5", "deepseek-v3", "llama3.1", "mistral", "glm4.6", "kimi-k2")
"""The others take up to ten seconds to load, and most have the form of one of these."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_trained_with_the_token_that_ends_it_and_nothing_behind(family: str) -> None:
    before, end = CASES[family]
    tokenizer = published_tokenizer(family)
    row = sft_row(TALK, published_chat(family))
    assert spans(tokenizer, row) == [f"{before}Four.{end}", f"{before}Seven, then.{end}"]
    assert end in PUBLISHED[family].ends and len(row.samples) == 1
    assert row.samples[0].tokens[-1] == ids_of(tokenizer, [end])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_turn_follows_the_ids_of_its_prompt(family: str) -> None:
    """Law: what stands before an answer are the ids that an engine would get for it."""
    tokenizer = published_tokenizer(family)
    for number, (prompt, _) in zip((1, 3), runs(sft_row(TALK, published_chat(family))), strict=True):
        own = tokenizer.apply_chat_template(TALK[:number], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert prompt == own


def test_a_prompt_that_is_encoded_otherwise_than_the_turns_in_it_begins_a_sample() -> None:
    """Law: the ids before a turn are those of its prompt, also where header and answer share a token of it."""
    tokenizer = published_tokenizer("qwen2.5")
    talk = [TALK[0], {**TALK[1], "content": "\n\nFour."}, *TALK[2:]]
    row = sft_row(talk, published_chat("qwen2.5"))
    assert len(row.samples) == 2
    for number, (prompt, _) in zip((1, 3), runs(row), strict=True):
        own = tokenizer.apply_chat_template(talk[:number], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert prompt == own


KINDS = list({row.kind: row for row in corpus()}.values())
"""A row of each kind."""


@pytest.mark.parametrize(
    "family", quick(sft_families.FAMILIES, "qwen3", "llama3.1", "deepseek-r1", "kimi-k2", "gpt-oss")
)
def test_each_turn_of_any_row_is_trained_once_under_its_prompt(family: str) -> None:
    """Law: all that the model would have sampled, behind what it would have read, and nothing else."""
    assert _refused(family, KINDS) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", sft_families.FAMILIES)
def test_at_most_one_row_of_a_hundred_is_refused(family: str) -> None:
    rows = corpus()
    assert _refused(family, rows) <= len(rows) // 100 == 2


def _refused(family: str, rows: list[Row]) -> int:
    """How many of the rows are, and rightly; of the others the samples are right."""
    chat, tokenizer = published_chat(family), published_tokenizer(family)
    num_refused = 0
    for row in rows:
        try:
            turns = sft_families.expected(family, row)
        except sft_families.RefusedError:
            num_refused += 1
            with pytest.raises(DataError, match=r"; (use|leave|add|with|change) "):
                sft_row(row.messages, chat, tools=row.tools)
            continue
        made = sft_row(row.messages, chat, tools=row.tools)
        assert [(chat.decode(a), chat.decode(b)) for a, b in runs(made)] == turns, row
        assert made.left_out == sft_families.left_out(family, row), row
        if not any(text in str(row.messages) for text in ("<|im_end|> or",)):  # as ordinary text, not as tokens
            ids = [(_encoded(tokenizer, a), _encoded(tokenizer, b)) for a, b in turns]
            assert runs(made) == ids, row
            goes_on = [new[: len(a) + len(b)] == a + b for (a, b), (new, _) in itertools.pairwise(ids)]
            assert len(made.samples) == 1 + goes_on.count(False), row
    return num_refused


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_the_masks_are_those_that_the_public_names_promise() -> None:
    """`--loss-mask-type`: each assistant turn (qwen), also under a template that drops thoughts (qwen3), and the last
    message behind its prompt alone (distill_qwen)."""
    thinking = [TALK[0], {**TALK[1], "reasoning_content": "2 + 2"}, TALK[2], {**TALK[3], "reasoning_content": "4 + 3"}]
    assert spans(published_tokenizer("qwen2.5"), sft_row(TALK, published_chat("qwen2.5"))) == [
        "Four.<|im_end|>",
        "Seven, then.<|im_end|>",
    ]
    row = sft_row(thinking, published_chat("qwen3"))
    assert spans(published_tokenizer("qwen3"), row) == [
        "<think>\n2 + 2\n</think>\n\nFour.<|im_end|>",
        "<think>\n4 + 3\n</think>\n\nSeven, then.<|im_end|>",
    ]
    tokenizer = published_tokenizer("deepseek-r1")
    answer = "<think>\n4 + 3\n</think>\n\nSeven, then."
    messages = [TALK[0], {**TALK[1], "step_loss_mask": 0}, TALK[2], {"role": "assistant", "content": answer}]
    ((prompt, turn),) = runs(sft_row(messages, published_chat("deepseek-r1")))
    asked = [TALK[0], TALK[1], TALK[2]]
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert "<think>\n" + tokenizer.decode(turn) == answer + DEEPSEEK_END


@pytest.mark.parametrize("family", ["glm4", "glm-z1", "glm4.6", "glm4.6 without words", "glm4.7"])
@pytest.mark.parametrize(
    ("follows", "end"),
    [
        ([], "<|user|>"),
        ([{"role": "user", "content": "Thanks."}], "<|user|>"),
        ([{"role": "assistant", "content": "More.", "weight": 0}], "<|user|>"),
        ([{"role": "tool", "content": "7"}], "<|observation|>"),
    ],
)
def test_the_end_of_a_glm_turn_is_the_header_of_what_would_follow(
    family: str, follows: list[dict[str, Any]], end: str
) -> None:
    assert spans(published_tokenizer(family), sft_row([*TALK[:2], *follows], published_chat(family)))[0].endswith(end)


@pytest.mark.parametrize("family", ["glm4.6", "glm4.7"])
@pytest.mark.parametrize("follows", [[], [{"role": "tool", "content": "4"}], [{"role": "user", "content": "Well?"}]])
def test_a_glm_turn_that_calls_ends_with_the_header_of_a_result(family: str, follows: list[dict[str, Any]]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *follows]
    (text,) = spans(published_tokenizer(family), sft_row(messages, published_chat(family)))
    assert text.endswith("</tool_call><|observation|>")


def test_a_single_call_of_deepseek_ends_as_two_do() -> None:
    """Its template forgets the end behind one, in every round."""
    messages: list[dict[str, Any]] = [TALK[0]]
    for name in ("add", "sub"):
        call = {"type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    texts = spans(published_tokenizer("deepseek-v3"), sft_row(messages, published_chat("deepseek-v3")))
    assert texts == [
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        f'<\uff5ctool\u2581sep\uff5c>{name}\n```json\n{{"a": 1}}\n```<\uff5ctool\u2581call\u2581end\uff5c>'
        f"<\uff5ctool\u2581calls\u2581end\uff5c>{DEEPSEEK_END}"
        for name in ("add", "sub")
    ]


def test_a_template_that_always_writes_a_generation_prompt_is_refused() -> None:
    """That of Llama 3 as its package has it."""
    with pytest.raises(DataError, match="ignores add_generation_prompt"):
        sft_row(TALK[:2], published_chat("llama3 of its package"))


def test_a_template_that_never_writes_a_generation_prompt_is_refused() -> None:
    tokenizer = published_tokenizer("phi4")
    template, at = tokenizer.chat_template, tokenizer.chat_template.index("{% if add_generation_prompt")
    tokenizer.chat_template = template[:at]
    try:
        with pytest.raises(DataError, match="ignores add_generation_prompt"):
            sft_row(TALK[:2], published_chat("phi4"))
    finally:
        tokenizer.chat_template = template


def test_an_end_that_the_checkpoint_does_not_name_is_not_guessed() -> None:
    """Llama 3's tokenizer alone knows another end than its turns have."""
    from slime.data.chat import ChatRenderer

    with pytest.raises(DataError, match=r"no stop token \(<\|end_of_text\|>\).*generation_config\.json"):
        sft_row(TALK, ChatRenderer(published_tokenizer("llama3")))


def test_the_ids_are_those_of_mistrals_own_package() -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.from_file(str(tekken_file()), mode=ValidationMode.finetuning)
    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    request = ChatCompletionRequest(messages=[kinds[m["role"]](content=m["content"]) for m in TALK])
    (row,) = sft_row(TALK, published_chat("mistral")).samples
    assert list(row.tokens) == own.encode_chat_completion(request).tokens


def test_an_old_answer_of_gpt_oss_ends_with_return_and_is_history_with_end() -> None:
    tokenizer = published_tokenizer("gpt-oss")
    row = sft_row([TALK[0], {**TALK[1], "thinking": "A sum."}, *TALK[2:]], published_chat("gpt-oss"))
    thought = "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert spans(tokenizer, row) == [f"{thought}{final}Four.<|return|>", f"{final}Seven, then.<|return|>"]
    assert f"{final}Four.<|end|>" in tokenizer.decode(row.samples[1].tokens)
