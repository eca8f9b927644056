"""SGLang's own detectors read the same in well-formed answers; where they differ on others, and which is right."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from slime.agent.parsers import FORMATS, Reader
from tests.support.sglang_detectors import read_by_sglang
from tests.support.written_calls import NAMES, TOOLS, WAYS

NUM = 40
"""Answers of each way to write."""
WORDS = ["a", "two words", "line\nfeed", '"quoted" \\ {}', "ä€漢", "12", ""]
VALUES: dict[str, list[Any]] = {
    "word": WORDS,
    "count": [0, -7, 10**12],
    "share": [0.5, -1.25e-3, 2.0],
    "sure": [True, False],
    "parts": [[], [1, "a", None], [[True]]],
    "more": [{}, {"k": 1.5, "l m": ["a"]}],
}
PLAIN_WORDS = [word for word in WORDS if word and word != "12"]
"""What SGLang's detector for GLM keeps: it reads a value as JSON before it asks for the type."""


def some_call(source: random.Random, format: str) -> tuple[str, dict[str, Any]]:
    keys = source.sample(sorted(VALUES), source.randint(1, 4))
    made = {key: source.choice(VALUES[key]) for key in keys}
    if "word" in made and format in ("glm45", "glm47"):
        made["word"] = source.choice([w for w in PLAIN_WORDS if '"' not in w])
    return source.choice(NAMES), made


def ours(format: str, text: str) -> tuple[str, list[list[Any]]]:
    got = Reader(FORMATS.build(format, None), TOOLS).all(text)
    return got.text, [[name, json.loads(arguments)] for name, arguments in got.calls]


def test_well_formed_answers_read_alike() -> None:
    source = random.Random(5)
    cases: list[tuple[str, Any, str]] = []
    wanted: list[Any] = []
    for way in WAYS:
        for _ in range(NUM):
            calls = [some_call(source, way.format) for _ in range(source.randint(1, 3))]
            before = source.choice(["", "I look it up.", "First\n\nthis:"])
            cases.append((way.format, TOOLS, before + way.write(calls)))
            wanted.append([before, [[name, made] for name, made in calls]])
        cases.append((way.format, TOOLS, "No call, <b>just</b> text [1].\n"))
        wanted.append([cases[-1][2], []])
    for case, want, theirs in zip(cases, wanted, read_by_sglang(cases), strict=True):
        assert theirs == want, ("SGLang", case[0], case[2])
        assert list(ours(case[0], case[2])) == want, ("slime", case[0], case[2])


def test_thinking_is_split_alike() -> None:
    answers = [
        "<think>\nab c\n</think>\n\nanswer",
        "<think>ab</think>answer",
        "plain answer",
        "<think>\n\n</think>\n\nanswer",
        "<think>\ncut short",
    ]
    found = read_by_sglang([("thinking", [], text) for text in answers])
    for text, (words, thoughts) in zip(answers, found, strict=True):
        got = Reader(FORMATS.build("none", None)).all(text)
        # SGLang trims both; slime leaves what is no line feed beside a mark.
        assert (got.text.strip(), (got.reasoning or "").strip()) == (words.strip(), (thoughts or "").strip()), text


LOOK = '{"name": "look_up", "arguments": {"word": "a"}}'
CALL = ["look_up", {"word": "a"}]
DIFFERENT: list[tuple[str, str, str, Any, Any]] = [
    (
        "An unknown function is a call: the agent hears of it from its own harness. SGLang drops it without a word.",
        "hermes",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        ["", []],
        ["", [["other", {}]]],
    ),
    (
        "A call that was cut off was not made; SGLang makes it where its JSON is whole.",
        "hermes",
        f"<tool_call>{LOOK}",
        ["", [CALL]],
        [f"<tool_call>{LOOK}", []],
    ),
    (
        "One unreadable call leaves the others; SGLang gives up all of them.",
        "hermes",
        f"<tool_call>{LOOK}</tool_call><tool_call>oops</tool_call>",
        [f"<tool_call>{LOOK}</tool_call><tool_call>oops</tool_call>", []],
        ["<tool_call>oops</tool_call>", [CALL]],
    ),
    (
        "What cannot be read stays text; SGLang loses it.",
        "qwen25",
        "so: <tool_call>\noops\n</tool_call>",
        ["so:", []],
        ["so: <tool_call>\noops\n</tool_call>", []],
    ),
    (
        "Text behind a call is text; SGLang loses it.",
        "hermes",
        f"<tool_call>{LOOK}</tool_call> done",
        ["", [CALL]],
        ["done", [CALL]],
    ),
    (
        "A mark inside a JSON string is part of the value; SGLang ends the call there and gives it up.",
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"word": "</tool_call>"}}</tool_call>',
        ['<tool_call>{"name": "look_up", "arguments": {"word": "</tool_call>"}}</tool_call>', []],
        ["", [["look_up", {"word": "</tool_call>"}]]],
    ),
    (
        "A parameter of type string stays text; SGLang makes null of the word.",
        "qwen3_coder",
        "<tool_call><function=look_up><parameter=word>null</parameter></function></tool_call>",
        ["", [["look_up", {"word": None}]]],
        ["", [["look_up", {"word": "null"}]]],
    ),
    (
        "A parameter of type string stays text; SGLang takes the quotes off.",
        "glm45",
        '<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>"a"</arg_value>\n</tool_call>',
        ["", [["look_up", {"word": "a"}]]],
        ["", [["look_up", {"word": '"a"'}]]],
    ),
]


@pytest.fixture(scope="module")
def of_sglang() -> list[Any]:
    return read_by_sglang([(format, TOOLS, text) for _, format, text, _, _ in DIFFERENT])


@pytest.mark.parametrize("number", range(len(DIFFERENT)), ids=[f"{i}-{case[1]}" for i, case in enumerate(DIFFERENT)])
def test_where_sglang_reads_another_thing(number: int, of_sglang: list[Any]) -> None:
    """If SGLang's part fails, it reads otherwise now: then change the sentence too."""
    _, format, text, theirs, right = DIFFERENT[number]
    assert of_sglang[number] == theirs
    assert list(ours(format, text)) == right
