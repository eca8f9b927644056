"""Law: a trained turn says all that its message says, or its row is refused with what the template leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data.sft_loss_mask import sft_row
from slime.data.template_spelling import unsaid
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer, runs, spans
from tests.support.marks import quick

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
    (text,) = spans(published_tokenizer(family), sft_row(messages, published_chat(family, **kwargs), tools=tools))
    return text


@pytest.mark.parametrize(
    "family",
    quick(["qwen2.5", "llama3", "llama3.1", "deepseek-v3", "kimi-k2", "mistral", "glm4", "phi3", "smollm2"], "qwen2.5"),
)
@pytest.mark.parametrize("key", quick(["reasoning_content", "reasoning", "thinking"], "thinking"))
def test_a_row_is_trained_without_a_thought_that_its_template_has_no_place_for_and_says_so(
    family: str, key: str
) -> None:
    messages = calling(content="Seven.", **{key: "Four and three."})
    chat = published_chat(family)
    row, without = sft_row(messages, chat), sft_row(calling(content="Seven."), chat)
    assert row.left_out == {"reasoning"} and row.samples == without.samples


@pytest.mark.parametrize("key", ["content", "reasoning_content", "thinking"])
def test_a_thought_that_a_template_cuts_out_of_the_content_is_trained_where_the_model_writes_it(key: str) -> None:
    thought = {"content": "<think>\nFour and three.\n</think>\n\nSeven."}
    messages = calling(**(thought if key == "content" else {"content": "Seven.", key: "Four and three."}))
    assert trained("glm-z1", messages, tools=None) == f"\n{thought['content']}<|user|>"


def test_of_two_thoughts_none_is_left_out_without_a_word() -> None:
    messages = calling(content="Seven.", reasoning_content="Four and three.", thinking="Three and four.")
    with pytest.raises(DataError, match="omits reasoning of message 1"):
        trained("qwen3", messages, tools=None)


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
    ((_, turn),) = runs(sft_row(messages, published_chat(family), tools=TOOLS))
    ids = ids_of(published_tokenizer(family), PUBLISHED[family].words)
    assert [turn.count(i) for i in ids] == [1] * len(ids)


def test_a_user_cannot_write_a_thought() -> None:
    messages = calling(content="Yes.")
    messages[0] = {"role": "user", "content": "<think>Go.</think>"}
    (row,) = sft_row(messages, published_chat("glm4.6")).samples
    ids = ids_of(published_tokenizer("glm4.6"), PUBLISHED["glm4.6"].words)
    assert [row.tokens.count(i) for i in ids] == [1, 1], "the empty thought of the answer, and no other"


@pytest.mark.parametrize("family", quick(["qwen2.5", "kimi-k2", "mistral"], "kimi-k2"))
def test_two_calls_of_one_name_are_both_trained(family: str) -> None:
    text = trained(family, calling(("search", {"q": "a"}), ("search", {"q": "b"})), tools=_tools_of(family))
    assert text.count("search") == 2 and text.index('{"q": "a"}') < text.index('{"q": "b"}')


@pytest.mark.parametrize("second", quick([{"q": "a"}, {"q": "b"}, {}], {"q": "b"}))
def test_of_calls_at_once_none_is_lost_where_a_template_writes_one_a_turn(second: dict[str, Any]) -> None:
    """Each becomes a turn behind the results of those before; without them nothing says what the model would read."""
    chat, tokenizer = published_chat("llama3.1"), published_tokenizer("llama3.1")
    asked, answer, _ = calling(("search", {"q": "a"}), ("search", second))
    results = [{"role": "tool", "content": f"r{i}", "tool_call_id": f"functions.search:{i}"} for i in (1, 0)]
    row = sft_row([asked, answer, *results], chat)
    calls = [f'{{"name": "search", "parameters": {json.dumps(q)}}}<|eot_id|>' for q in ({"q": "a"}, second)]
    assert spans(tokenizer, row) == calls
    before, _ = runs(row)[1]
    assert tokenizer.decode(before).count('"r0"') == 1 and '"r1"' not in tokenizer.decode(before)
    with pytest.raises(DataError, match=r"2 calls, but this chat template writes only 1 per turn.*but only 0 have"):
        sft_row([asked, answer], chat)


@pytest.mark.parametrize("family", quick(["llama3", "smollm2", "glm4", "kimi-k2 before calls"], "smollm2"))
def test_a_call_that_a_template_does_not_write_is_refused(family: str) -> None:
    with pytest.raises(DataError, match="omits tool call add of message 1") as refusal:
        trained(family, calling(("add", {"a": 1})), tools=None)
    assert ("examples/tools.jinja" in str(refusal.value)) == (family == "smollm2"), "it writes messages as ChatML"


@pytest.mark.parametrize("family", ["llama3.1", "deepseek-v3"])
def test_words_beside_a_call_that_a_template_has_no_place_for_are_named(family: str) -> None:
    row = sft_row(calling(("add", {"a": 1}), content="I add."), published_chat(family))
    assert row.left_out == {"words beside a call"}
    assert row.samples == sft_row(calling(("add", {"a": 1})), published_chat(family)).samples


def test_tools_that_a_template_has_no_place_for_are_named() -> None:
    assert sft_row(calling(content="Hi."), published_chat("smollm2"), tools=TOOLS).left_out == {"tools"}
    assert not sft_row(calling(content="Hi."), published_chat("qwen2.5"), tools=TOOLS).left_out


def test_what_others_say_is_never_left_out() -> None:
    """Templates pass over roles that they do not know."""
    for role, content in (("ipython", "21"), ("observation", "21")):
        messages = [*calling(content="Yes.")[:2], {"role": role, "content": content}, *calling(content="No.")[:2]]
        with pytest.raises(DataError, match=rf"omits message 2 \(role {role}\): '21'"):
            trained("qwen2.5", messages, tools=None)


@pytest.mark.parametrize("family", quick(["qwen2.5", "llama3.1", "mistral"], "qwen2.5"))
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
