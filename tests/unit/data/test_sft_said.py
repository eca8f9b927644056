"""Law: a trained turn says all that its message says, or its row is refused with what the template leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data.said import unsaid
from slime.data.sft import sft_tokens
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("search", "add")
]


def calling(*calls: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    entries = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", **fields} | ({"tool_calls": entries} if entries else {})
    return [{"role": "user", "content": "Go."}, answer, {"role": "user", "content": "Well."}]


def trained(family: str, messages: list[dict[str, Any]], tools: Any = TOOLS, **kwargs: Any) -> str:
    row = sft_tokens(messages, published_chat(family, **kwargs), tools=tools)
    return str(published_tokenizer(family).decode(row.tokens[-row.response_length :]))


@pytest.mark.parametrize(
    "family", ["qwen2.5", "llama3", "llama3.1", "deepseek-v3", "kimi-k2", "mistral", "glm4", "phi3", "smollm2"]
)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_does_not_write_is_refused(family: str, key: str) -> None:
    messages = calling(content="Seven.", **{key: "Four and three."})
    with pytest.raises(DataError, match="leaves out reasoning of message 1"):
        trained(family, messages, tools=None)


def test_a_thought_that_a_template_cuts_out_of_the_content_is_refused() -> None:
    with pytest.raises(DataError, match="leaves out reasoning of message 1"):
        trained("glm-z1", calling(content="<think>Four and three.</think>Seven."), tools=None)


def test_a_thought_within_the_content_is_trained_where_it_is_written() -> None:
    text = trained("qwen3", calling(content="<think>\nFour.\n</think>\n\nSeven.")[:2], tools=None)
    assert text == "<think>\nFour.\n</think>\n\nSeven.<|im_end|>"


@pytest.mark.parametrize("family", ["glm4.6", "glm4.6 without words"])
def test_a_thought_is_written_as_a_thought_though_the_template_writes_an_empty_one(family: str) -> None:
    """Law: `<think>` in an assistant's text is that token, not its letters behind an empty thought."""
    messages = calling(("add", {"a": 1}), content="<think>I add.</think>Yes.")
    messages[2] = {"role": "tool", "content": "1"}
    text = trained(family, messages)
    assert text.startswith("\n<think>I add.</think>\nYes.\n<tool_call>add") and text.count("<think>") == 1
    row = sft_tokens(messages, published_chat(family), tools=TOOLS)
    ids = ids_of(published_tokenizer(family), PUBLISHED[family].words)
    assert [row.tokens[-row.response_length :].count(i) for i in ids] == [1] * len(ids)


def test_a_user_cannot_write_a_thought() -> None:
    messages = calling(content="Yes.")
    messages[0] = {"role": "user", "content": "<think>Go.</think>"}
    row = sft_tokens(messages, published_chat("glm4.6"))
    ids = ids_of(published_tokenizer("glm4.6"), PUBLISHED["glm4.6"].words)
    assert [row.tokens.count(i) for i in ids] == [1, 1], "the empty thought of the answer, and no other"


@pytest.mark.parametrize("family", ["qwen2.5", "kimi-k2", "mistral"])
def test_two_calls_of_one_name_are_both_trained(family: str) -> None:
    text = trained(family, calling(("search", {"q": "a"}), ("search", {"q": "b"})), tools=_tools_of(family))
    assert text.count("search") == 2 and text.index('{"q": "a"}') < text.index('{"q": "b"}')


def test_the_second_of_two_equal_calls_is_missed_where_a_template_drops_it() -> None:
    tokenizer = published_tokenizer("kimi-k2")
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("for c in m.tool_calls", "for c in m.tool_calls[:1]")
    try:
        for second in ({"q": "a"}, {"q": "b"}, {}):
            with pytest.raises(DataError, match="leaves out tool call search of message 1"):
                trained("kimi-k2", calling(("search", {"q": "a"}), ("search", second)))
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("family", ["llama3", "smollm2", "glm4", "kimi-k2 before calls"])
def test_a_call_that_a_template_does_not_write_is_refused(family: str) -> None:
    with pytest.raises(DataError, match="leaves out tool call add of message 1"):
        trained(family, calling(("add", {"a": 1})), tools=None)


def test_content_beside_a_call_is_missed_where_a_template_drops_it() -> None:
    with pytest.raises(DataError, match="leaves out content of message 1"):
        trained("llama3.1", calling(("add", {"a": 1}), content="I add."))


@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1", "mistral"])
def test_arguments_as_text_are_trained_as_arguments_as_objects(family: str) -> None:
    """Law: data sets that write arguments as JSON text teach no text within a text."""
    arguments = {"expression": "17*23", "name": "Zoë", "deep": [1, {"x": None}]}
    tools = _tools_of(family)
    texts = {trained(family, calling(("add", given)), tools=tools) for given in (arguments, json.dumps(arguments))}
    assert len(texts) == 1 and json.dumps(arguments, ensure_ascii=False) in texts.pop()


@pytest.mark.parametrize("as_text", [True, False])
def test_a_template_that_pastes_arguments_gets_text(as_text: bool) -> None:
    """DeepSeek-V3's, which refuses objects."""
    arguments: Any = {"a": 1}
    given = json.dumps(arguments) if as_text else arguments
    text = trained("deepseek-v3", calling(("add", given), ("search", given), content=None), tools=None)
    assert text.count('```json\n{"a": 1}\n```') == 2 and text.endswith(PUBLISHED["deepseek-v3"].ends[0])


def test_a_call_that_no_token_ends_is_refused() -> None:
    """As DeepSeek-V3's own template writes a single one."""
    with pytest.raises(DataError, match="writes no token at which engines stop"):
        trained("deepseek-v3", calling(("add", '{"a": 1}'), content=None), tools=None)


def test_arguments_are_never_written_as_python_writes_an_object() -> None:
    tokenizer = published_tokenizer("phi4")
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace(
        "~ m.content",
        "~ m.content ~ (m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments if m.tool_calls)",
    )
    try:
        assert trained("phi4", calling(("add", {"a": 1})), tools=None) == 'add{"a": 1}<|im_end|>'
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("turn", "missing"),
    [
        ('add {"a": 1, "b": "x"}', []),
        ('add{"a":1,"b":"x"}', []),
        ('{"name": "add", "parameters": {\n    "a": 1,\n    "b": "x"\n}}', []),
        ("add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x</arg_value>", []),
        ("[add(a=1, b='x')]", []),
        ('add {"a": 11, "b": "x"}', ["arguments of tool call add"]),
        ('add {"b": "x"}', ["arguments of tool call add"]),
        ('add {"a": 1}', ["arguments of tool call add"]),
        ("add", ["arguments of tool call add"]),
        ('{"a": 1, "b": "x"}', ["tool call add"]),
    ],
)
def test_arguments_are_found_in_any_layout_and_missed_where_they_are_not(turn: str, missing: list[str]) -> None:
    (message,) = calling(("add", {"a": 1, "b": "x"}))[1:2]
    assert unsaid(message, turn) == missing


def test_what_a_message_says_twice_must_stand_twice() -> None:
    message = calling(("add", {"a": 1}), ("add", {"a": 1}), content="add")[1]
    call = 'add {"a": 1}'
    assert unsaid(message, f"add {call} {call}") == []
    assert unsaid(message, f"add {call}") == ["tool call add"]
    assert unsaid(message, f"{call} {call}") == ["tool call add"]


def _tools_of(family: str) -> Any:
    """Mistral's form, as it is written down for these tests, has no tools."""
    return None if family == "mistral" else TOOLS
