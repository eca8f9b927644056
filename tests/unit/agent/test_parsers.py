"""Laws of what reads a model's answer: calls come back as they were written, and no text breaks it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.agent.parsers import CLOSE, FORMATS, OPEN, Parsed, format_of, tagged
from slime.agent.parsers.tagged import typed_arguments
from tests.support.chat_hooks import tokenizer_folder
from tests.support.written_calls import CALLS, HARMONY, TEXTS, TOOLS, WAYS, Written

FORMAT_NAMES = (
    *("deepseekv3", "deepseekv31", "deepseekv32", "glm45", "gpt-oss", "hermes", "kimi_k2", "llama3", "minimax-m2"),
    *("mistral", "qwen3_coder", "text"),
)
MARKS = sorted({mark for name in FORMAT_NAMES for mark in FORMATS.get(name).marks} | {OPEN, CLOSE})
TEXT_LIKE_CALLS = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=6), TEXTS), max_size=8).map("".join)


def read(name: str, text: str, prompt_end: str = "") -> Parsed:
    return FORMATS.build(name, None).reader(TOOLS, prompt_end).all(text)


def decoded(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.write.__name__)
@given(before=TEXTS, calls=st.lists(CALLS, min_size=1, max_size=3), thought=TEXTS)
def test_calls_come_back_as_they_were_written(way: Written, before: str, calls: list[Any], thought: str) -> None:
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    got = read(way.format, thinking + before + way.write(calls))
    assert (decoded(got), got.ill_formed) == (calls, False)
    assert got.text == before
    assert (got.reasoning or "").strip() == thought


@pytest.mark.parametrize("name", FORMAT_NAMES)
@given(data=st.data())
def test_cut_anywhere_the_parts_are_the_whole(name: str, data: st.DataObject) -> None:
    """Law: the parts that come out of a stream, joined, are what reading the whole gives; nothing raises."""
    writers = [way.write for way in (*WAYS, HARMONY) if way.format == name]
    text = data.draw(TEXT_LIKE_CALLS)
    if writers:
        written = data.draw(st.sampled_from(writers))(data.draw(st.lists(CALLS, min_size=1, max_size=2)))
        spot = data.draw(st.integers(0, len(written)))
        text += data.draw(st.sampled_from([written, written[:spot], written[:spot] + "x" + written[spot:]]))
        text += data.draw(TEXT_LIKE_CALLS)
    prompt_end = data.draw(st.sampled_from(["", "<think>\n"]))
    whole = read(name, text, prompt_end)
    reader = FORMATS.build(name, None).reader(TOOLS, prompt_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts: list[tuple[str, str]] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.feed(text[start:end])
    rest, parsed = reader.end()
    parts += rest
    assert parsed == whole
    assert "".join(text for kind, text in parts if kind == "text") == parsed.text
    assert "".join(text for kind, text in parts if kind == "thinking") == (parsed.reasoning or "")


@pytest.mark.parametrize("name", FORMAT_NAMES)
@given(text=TEXT_LIKE_CALLS, tail=st.text(max_size=30))
def test_what_is_read_can_be_sent(name: str, text: str, tail: str) -> None:
    """Law: arguments are the JSON text of an object, and all of it goes over a wire."""
    for mark in (*FORMATS.get(name).marks, ""):
        got = read(name, text + mark + tail)
        for called, arguments in got.calls:
            assert isinstance(json.loads(arguments), dict)
            (called + arguments).encode()


UNREADABLE = {
    "hermes": [
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}',
        '<tool_call>{"name": "look_up", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"share": NaN}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"share": 1e999}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"word": "\\ud800"}}</tool_call>',
        "<tool_call>" + '{"a":' * 100_000 + "</tool_call>",
        "<tool_call></tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=look_up>\n<parameter=word>\na\n</parameter>\n",
        "<tool_call>\n<function=look_up>\n<parameter=word>\na\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
        "<function=></function>",
    ],
    "glm45": [
        "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>a</arg_value>\n",
        "<tool_call>look_up\n<arg_key>word</arg_key>\n</tool_call>",
        "<tool_call></tool_call>",
    ],
    "deepseekv3": [
        "<\uff5ctool▁calls▁begin\uff5c>",
        "<\uff5ctool▁call▁begin\uff5c>look_up<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c>",
    ],
    "deepseekv31": ["<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>look_up<\uff5ctool▁sep\uff5c>{}"],
    "kimi_k2": ["<|tool_call_begin|>look_up<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "mistral": ['[TOOL_CALLS] [{"name": "look_up"}, 3]', "[TOOL_CALLS]look_up[ARGS]{", "[TOOL_CALLS] []"],
    "llama3": [
        '<|python_tag|>print("a")',
        '{"name": "look_up", "parameters": {"a',
        '{"name": "look_up", "parameters": 1}',
        '<|python_tag|>{"name": {"name": "look_up", "parameters": {}}}',
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in UNREADABLE.items() for text in texts])
def test_what_cannot_be_read_stays_text(name: str, text: str) -> None:
    assert read(name, f"so: {text}") == Parsed(f"so: {text}", None, (), True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.write.__name__)
def test_a_readable_call_beside_an_unreadable_one_is_read(way: Written) -> None:
    good = way.write([("look_up", {"count": 1})])
    mark = FORMATS.get(way.format).marks[0 if way.format == "llama3" else -1]
    broken = f"{mark} oops"
    got = read(way.format, f"{good}\n{broken}")
    assert decoded(got) == [("look_up", {"count": 1})]
    assert got.ill_formed and broken in got.text


INSIDE = [
    ("hermes", '<tool_call>{"name": "look_up", "arguments": {"word": "</tool_call>"}}</tool_call>', "</tool_call>"),
    (
        "qwen3_coder",
        "<function=look_up><parameter=word>\n<p></parameter></p>\n</parameter></function>",
        "<p></parameter></p>",
    ),
    (
        "glm45",
        "<tool_call>look_up<arg_key>word</arg_key><arg_value></arg_value>x</arg_value></tool_call>",
        "</arg_value>x",
    ),
    (
        "deepseekv3",
        WAYS[5].write([("look_up", {"word": "```<\uff5ctool▁call▁end\uff5c>"})]),
        "```<\uff5ctool▁call▁end\uff5c>",
    ),
    ("mistral", WAYS[8].write([("look_up", {"word": "[TOOL_CALLS] ]"})]), "[TOOL_CALLS] ]"),
]


@pytest.mark.parametrize(("name", "text", "word"), INSIDE)
def test_a_value_may_hold_marks(name: str, text: str, word: str) -> None:
    got = read(name, text)
    assert (decoded(got), got.text, got.ill_formed) == ([("look_up", {"word": word})], "", False)


@pytest.mark.parametrize("name", ['"Ada"', '{"first": "Ada"}', "[]", "null"])
def test_json_that_names_no_tool_is_an_answer(name: str) -> None:
    text = f'{{"name":{name}, "parameters": {{"born": 1815}}}}'
    assert read("llama3", text) == Parsed(text, None, (), False)


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    assert FORMATS.build("hermes", None).reader().all(text) == Parsed(text, None, (), False)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/x"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({}, "true", True),
        (None, "free text", "free text"),
        ({"type": "int"}, "3", 3),
        ({"type": 7, "enum": None, "anyOf": "?"}, "3", 3),
    ],
)
def test_a_value_has_the_type_that_the_schema_names(schema: Any, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    call = typed_arguments("f", {"x": text}, tools)
    assert call is not None
    got = json.loads(call[1])["x"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("tools", [[None], ["f"], [{"function": 3}], [{"function": {"name": "f", "parameters": 3}}]])
def test_odd_tools_are_no_reason_to_raise(tools: list[Any]) -> None:
    assert typed_arguments("f", {"x": "1"}, tools) == ("f", '{"x":1}')


SIGNS = {
    "qwen3_coder": "<tool_call>\n<function=name>\n<parameter=a>",
    "glm45": "<tool_call>{name}\n<arg_key>{k}</arg_key> arguments",
    "deepseekv31": "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>name<\uff5ctool▁sep\uff5c>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS] [",
    "minimax-m2": "<minimax:tool_call>\n<invoke name=",
    "deepseekv32": "<\uff5cDSML\uff5cfunction_calls>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary<|call|>",
    "llama3": 'Respond in the format {"name": function name, "parameters": ...}.<|eot_id|>',
    None: "{{ messages }}",
}


@pytest.mark.parametrize(("name", "template"), SIGNS.items())
def test_the_format_of_a_template(name: str | None, template: str) -> None:
    assert format_of(template) == name


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "hermes"), ("qwen2.5", "hermes"), ("deepseek-v3", "deepseekv3"), ("smollm2", None)],
)
def test_the_format_of_a_real_template(family: str, name: str | None) -> None:
    template = Path(tokenizer_folder(family), "chat_template.jinja").read_text()
    assert format_of(template) == name


class Counted:
    """Reads JSON, and counts the characters that it reads, whether they are JSON or not."""

    def __init__(self) -> None:
        self._scan, self.num_read = tagged._SCAN, 0

    def __call__(self, text: str, at: int) -> tuple[Any, int]:
        end = len(text)
        try:
            value, end = self._scan(text, at)
            return value, end
        except StopIteration:
            end = at
            raise
        except json.JSONDecodeError as error:
            end = error.pos
            raise
        finally:
            self.num_read += end - at


def steps_of(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of functions, built-in ones too, and characters of JSON that reading a text takes."""
    reads, num_calls = Counted(), 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    monkeypatch.setattr(tagged, "_SCAN", reads)
    format, before = FORMATS.build(name, None), sys.getprofile()
    sys.setprofile(count)
    try:
        format.read(text, TOOLS)
    finally:
        sys.setprofile(before)
    return num_calls + reads.num_read // 8


QWEN = "<function=f><parameter=a>", "x</parameter><parameter=b>"
GLM = "<tool_call>f<arg_key>a</arg_key><arg_value>", "x</arg_value><arg_key>b</arg_key><arg_value>"
HALF = '"\\ud800"'
HOSTILE: list[tuple[str, tuple[str, ...], str]] = [
    *((name, (mark,), "") for name in FORMAT_NAMES for mark in FORMATS.get(name).marks),
    *((name, (mark + '{"a": ["',), "") for name in FORMAT_NAMES for mark in FORMATS.get(name).marks),
    *((way.format, (way.write([("look_up", {"word": "a"})])[:-3],), "") for way in WAYS),
    ("qwen3_coder", QWEN, "</function"),
    ("qwen3_coder", (*QWEN, "</parameter></function>"), ""),
    ("qwen3_coder", QWEN[:1], f"x</parameter><parameter=b>{HALF}</parameter></function>"),
    ("qwen3_coder", (f"<tool_call>{QWEN[0]}", QWEN[1]), "</parameter></function>"),
    ("glm45", GLM, "</tool_call"),
    ("glm45", (*GLM, "</arg_value></tool_call>"), ""),
    ("glm45", GLM[:1], f"{GLM[1]}{HALF}</arg_value></tool_call>"),
    ("llama3", ('{"name": "look_up"};',), '{"name": 1}'),
    ("llama3", ('<|python_tag|>{"name": "look_up"};',), ""),
    ("llama3", ('{"name":' * 60 + "]",), ""),
    ("llama3", ('{"name":' * 60 + "1" + "}" * 60,), ""),
]
"""(format, what is repeated, one after the other, what ends the text)."""


@pytest.mark.parametrize("number", range(len(HOSTILE)), ids=[f"{i}-{name}" for i, (name, *_) in enumerate(HOSTILE)])
def test_the_work_grows_with_the_text_and_not_with_its_square(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: no answer holds up the event loop: four times the text is about four times the work."""
    name, parts, end = HOSTILE[number]
    texts = ["".join(part * size for part in parts) + end for size in (100, 400)]
    short, long = (steps_of(name, text, monkeypatch) for text in texts)
    assert long <= 6 * short + 200, (short, long)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_expression_searches_for_the_end_of_a_value(name: str) -> None:
    """Law: an expression reads a tag and what is beside it; values are found by their ends, once for a text."""
    expressions = [v for v in vars(sys.modules[FORMATS.get(name).__module__]).values() if isinstance(v, re.Pattern)]
    assert not [one for one in expressions if re.search(r"\.[*+]", one.pattern)]
