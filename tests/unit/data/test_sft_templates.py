"""Masks of fine-tuning under the chat templates of model families: proven, with the token that ends a turn, or refused.

The tokenizers are real where a package brings them (`tests/support/chat_templates.py`).
"""

from __future__ import annotations

import pytest

from slime.core.errors import DataError
from slime.data.sft import sft_tokens
from tests.support.chat_templates import (
    DEEPSEEK_END,
    PUBLISHED,
    ids_of,
    published_chat,
    published_tokenizer,
    spans,
    tekken_file,
)

TALK = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, then."},
]
GOES_ON = [*TALK, {"role": "user", "content": "Thanks."}]
NO_THOUGHT = "\n<think></think>"


CASES = {
    "qwen2.5": (TALK, "", "<|im_end|>"),
    "smollm2": (TALK, "", "<|im_end|>"),
    "deepseek-v3": (TALK, "", DEEPSEEK_END),
    "gemma3": (TALK, "", "<end_of_turn>"),
    "gemma3 of its package": (TALK, "", "<end_of_turn>"),
    "llama3": (TALK, "", "<|eot_id|>"),
    "llama3.1": (TALK, "", "<|eot_id|>"),
    "llama3.1 of its package": (TALK, "", "<|eot_id|>"),
    "mistral": (TALK, "", "</s>"),
    "glm4": (GOES_ON, "\n", "<|user|>"),
    "glm-z1": (GOES_ON, "\n", "<|user|>"),
    "glm4.6": (GOES_ON, f"{NO_THOUGHT}\n", "<|user|>"),
    "glm4.6 without words": (GOES_ON, f"{NO_THOUGHT}\n", "<|user|>"),
    "kimi-k2": (TALK, "", "<|im_end|>"),
    "kimi-k2 before calls": (TALK, "", "<|im_end|>"),
    "phi3": (TALK, "", "<|end|>"),
    "phi3.5": (TALK, "", "<|end|>"),
    "phi4": (TALK, "", "<|im_end|>"),
}
"""Family -> (conversation, what stands before an answer, what ends it)."""
FAMILIES = [pytest.param(f, marks=pytest.mark.slow) if f == "gemma3 of its package" else f for f in CASES]
"""Gemma's tokenizer takes ten seconds to load."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_trained_with_the_token_that_ends_it_and_nothing_behind(family: str) -> None:
    messages, before, end = CASES[family]
    tokenizer, chat = published_tokenizer(family), published_chat(family)
    row = sft_tokens(messages, chat)
    assert spans(tokenizer, row) == [f"{before}Four.{end}", f"{before}Seven, then.{end}"]
    assert end in PUBLISHED[family].ends and row.tokens[-1] == ids_of(tokenizer, [end])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_turn_follows_the_ids_of_its_prompt(family: str) -> None:
    """Law: what stands before an answer are the ids that an engine would get for it."""
    messages, before, end = CASES[family]
    tokenizer, chat = published_tokenizer(family), published_chat(family)
    row = sft_tokens(messages, chat)
    for number in (1, 3):
        prompt = chat.encode(chat.render(messages[:number]))
        assert list(row.tokens[: len(prompt)]) == prompt
        answer = f"{before}{messages[number]['content']}{end}"
        assert tokenizer.decode(row.tokens[len(prompt) :]).startswith(answer)


def test_qwen3_trains_its_last_turn_with_its_thought() -> None:
    messages = [*TALK[:2], TALK[2], {**TALK[3], "reasoning_content": "4 + 3"}]
    with pytest.raises(DataError, match="rewrites earlier turns"):
        sft_tokens(messages, published_chat("qwen3"))
    messages[1] = {**messages[1], "step_loss_mask": 0}
    row = sft_tokens(messages, published_chat("qwen3"))
    assert spans(published_tokenizer("qwen3"), row) == ["<think>\n4 + 3\n</think>\n\nSeven, then.<|im_end|>"]


@pytest.mark.parametrize("family", ["glm4", "glm-z1", "glm4.6", "glm4.6 without words"])
def test_an_answer_that_no_token_ends_is_refused(family: str) -> None:
    with pytest.raises(DataError, match=r"writes no token at which engines stop .* behind message 3"):
        sft_tokens(TALK, published_chat(family))


def test_an_answer_to_another_prompt_than_the_model_gets_is_refused() -> None:
    """DeepSeek-R1's prompt begins a thought, which its template takes out of every answer."""
    with pytest.raises(DataError, match=r"asks for message 1 with .*<think>.* answer to another prompt"):
        sft_tokens(TALK[:2], published_chat("deepseek-r1"))


def test_a_tool_result_may_end_a_turn() -> None:
    """GLM-4.6 with its thought, which it keeps behind the last question."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "two"}'}}
    messages = [
        TALK[0],
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {**TALK[1], "step_loss_mask": 0},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = sft_tokens(messages, published_chat("glm4.6"), tools=tools)
    arguments = "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>two</arg_value>\n"
    expected = f"\n<think>I add.</think>\n<tool_call>add\n{arguments}</tool_call><|observation|>"
    assert spans(published_tokenizer("glm4.6"), row) == [expected]


def test_a_template_that_always_writes_a_generation_prompt_is_refused() -> None:
    """That of Llama 3 as its package has it."""
    with pytest.raises(DataError, match="on which add_generation_prompt changes nothing"):
        sft_tokens(TALK[:2], published_chat("llama3 of its package"))


def test_a_template_that_never_writes_a_generation_prompt_is_refused() -> None:
    tokenizer = published_tokenizer("phi4")
    template, at = tokenizer.chat_template, tokenizer.chat_template.index("{% if add_generation_prompt")
    tokenizer.chat_template = template[:at]
    try:
        with pytest.raises(DataError, match="on which add_generation_prompt changes nothing"):
            sft_tokens(TALK[:2], published_chat("phi4"))
    finally:
        tokenizer.chat_template = template


def test_an_end_that_the_checkpoint_does_not_name_is_not_guessed() -> None:
    """Llama 3's tokenizer alone knows another end than its turns have."""
    from slime.data.chat import ChatRenderer

    with pytest.raises(DataError, match=r"engines stop \(<\|end_of_text\|>\).*generation_config\.json"):
        sft_tokens(TALK, ChatRenderer(published_tokenizer("llama3")))


def test_the_ids_are_those_of_mistrals_own_package() -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.from_file(str(tekken_file()), mode=ValidationMode.finetuning)
    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    request = ChatCompletionRequest(messages=[kinds[m["role"]](content=m["content"]) for m in TALK])
    row = sft_tokens(TALK, published_chat("mistral"))
    assert list(row.tokens) == own.encode_chat_completion(request).tokens


def test_the_channels_that_gpt_oss_writes_are_trained_and_the_end_of_its_last_answer() -> None:
    tokenizer, chat = published_tokenizer("gpt-oss"), published_chat("gpt-oss")
    row = sft_tokens([TALK[0], {**TALK[1], "thinking": "A sum."}], chat)
    trained = [i for i, m in zip(row.tokens[-row.response_length :], row.loss_mask, strict=True) if m]
    thought = "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant"
    assert tokenizer.decode(trained) == f"{thought}<|channel|>final<|message|>Four.<|return|>"
    with pytest.raises(DataError, match="rewrites earlier turns"):  # an answer that is not the last ends otherwise
        sft_tokens(TALK, chat)
