"""Masks of conversations with tools under real chat templates: every trained span is a whole turn, nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data.sft_loss_mask import sft_row
from tests.support.chat_templates import published_chat, published_tokenizer, spans

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculate", "description": "Sums.", "parameters": PARAMETERS}}]


def conversation(content: str, *, as_text: bool) -> list[dict[str, Any]]:
    arguments: Any = {"expression": "17*23"}
    call = {"name": "calculate", "arguments": json.dumps(arguments) if as_text else arguments}
    return [
        {"role": "user", "content": "17 times 23?"},
        {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "TOOL391"},
        {"role": "assistant", "content": "It is 391."},
        {"role": "user", "content": "and 2+2?"},
        {"role": "assistant", "content": "4."},
    ]


def test_calls_and_answers_are_trained_and_results_are_not() -> None:
    tokenizer = published_tokenizer("qwen2.5")
    row = sft_row(conversation("", as_text=False), published_chat("qwen2.5"), tools=TOOLS)
    call, answer, last = spans(tokenizer, row)
    assert json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>")) == {
        "name": "calculate",
        "arguments": {"expression": "17*23"},
    }
    assert (answer, last) == ("It is 391.<|im_end|>", "4.<|im_end|>")
    text = tokenizer.decode(row.samples[0].tokens)
    assert "TOOL391" in text and '"description": "Sums."' in text


@pytest.mark.parametrize("key", ["step_loss_mask", "weight"])
def test_a_masked_turn_is_context(key: str) -> None:
    tokenizer = published_tokenizer("qwen3")
    messages = conversation("", as_text=False)
    for message in (messages[1], messages[3]):
        message[key] = 0
    row = sft_row(messages, published_chat("qwen3", enable_thinking=False), tools=TOOLS)
    assert spans(tokenizer, row) == ["4.<|im_end|>"] and "calculate" in tokenizer.decode(row.samples[0].tokens)
    messages[5][key] = 0.5
    with pytest.raises(DataError, match=f'"{key}" of a message must be 1 .* got 0.5'):
        sft_row(messages, published_chat("qwen3"), tools=TOOLS)


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    """Law: no row trains an empty turn because a template knows no calls."""
    with pytest.raises(DataError, match="omits tool call calculate"):
        sft_row(conversation("", as_text=True), published_chat("smollm2"), tools=TOOLS)
