"""Two hundred rows as public data sets of conversations have them, for masks of fine-tuning.

Each kind of row is there several times: one turn and many, system prompts, thoughts in one field or another or within
the content, tools with results, calls at once, rows that end with a question or a call, empty texts, masks, parts of
text, roles of other times. One row has no answer at all: nothing can be learned from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

QUESTIONS = (
    "Two and two?",
    "Why is the sky blue?\n\nIn one sentence, please.",
    "Wie heißt die Hauptstadt von Österreich? 🏔️",
    "次の文を訳してください: 猫が好きです。",
    "def f(x):\n    return x + 1\n\nWhat does f(41) give?",
    "  What is in <b>bold</b> & 'quotes'?  ",
    "What does <|im_end|> or <|user|> or [e~[ mean?",
)
ANSWERS = (
    "Four.",
    "Because short waves scatter more.\n\n- blue: much\n- red: little",
    "Wien. 🎻",
    "I like cats (猫).",
    "```python\nprint(42)\n```\nSo: 42",
    "  indented, with a line feed behind\n",
    "It is a word like any other: $\\frac{1}{2}$ \\boxed{x}",
)
THOUGHTS = ("A sum: 2 + 2 = 4.", "First the waves.\n\nThen the eye.", "Österreich → Wien, oder?")
SYSTEMS = ("Be brief.", "You are a pirate.\nSpeak like one.")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("get_weather", "search")
]
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"place": "Wien"},
    {"place": 'Zoë\'s "café"', "days": 3},
    {"place": "東京", "near": ["a", {"b": None}], "exact": True},
    {},
)
RESULTS = ("21 °C", '{"ok": true, "items": [1, 2]}', "line one\nline two")


@dataclass(frozen=True, slots=True)
class Row:
    kind: str
    messages: list[Message]
    tools: list[Any] | None = None


class _Writer:
    """Draws texts, in an order that never changes."""

    def __init__(self) -> None:
        self.draw = random.Random(7)
        self.calls = 0

    def user(self) -> Message:
        return {"role": "user", "content": self.draw.choice(QUESTIONS)}

    def answer(self, **fields: Any) -> Message:
        return {"role": "assistant", "content": self.draw.choice(ANSWERS), **fields}

    def system(self) -> Message:
        return {"role": "system", "content": self.draw.choice(SYSTEMS)}

    def thought(self) -> str:
        return self.draw.choice(THOUGHTS)

    def talk(self, turns: int, **fields: Any) -> list[Message]:
        return [m for _ in range(turns) for m in (self.user(), self.answer(**fields))]

    def calling(self, num: int = 1, content: Any = "", **fields: Any) -> Message:
        calls = []
        for _ in range(num):
            self.calls += 1
            arguments: Any = self.draw.choice(ARGUMENTS)
            if self.draw.random() < 0.5:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": self.draw.choice(TOOLS)["function"]["name"], "arguments": arguments}
            calls.append({"id": f"call_{self.calls}", "type": "function", "function": function})
        return {"role": "assistant", "content": content, "tool_calls": calls, **fields}

    def with_results(self, message: Message) -> list[Message]:
        return [message, *(self.result(call["id"]) for call in message["tool_calls"])]

    def result(self, call_id: str) -> Message:
        return {"role": "tool", "content": self.draw.choice(RESULTS), "tool_call_id": call_id}


def _thinking_everywhere(w: _Writer) -> list[Message]:
    return [m for _ in range(3) for m in (w.user(), w.answer(reasoning_content=w.thought()))]


def _one_call(w: _Writer) -> list[Message]:
    content = w.draw.choice(("", None, "I look it up."))
    return [w.user(), *w.with_results(w.calling(content=content)), w.answer()]


def _thinking_calls(w: _Writer) -> list[Message]:
    first = w.calling(reasoning_content=w.thought(), content=w.draw.choice(("", "Wait.")))
    return [w.user(), *w.with_results(first), w.answer(reasoning_content=w.thought())]


def _calls_at_once(w: _Writer) -> list[Message]:
    message, *results = w.with_results(w.calling(w.draw.choice((2, 3))))
    w.draw.shuffle(results)
    return [w.user(), message, *results, w.answer(), *w.talk(1)]


def _rounds(w: _Writer) -> list[Message]:
    return [w.user(), *w.with_results(w.calling()), *w.with_results(w.calling(content=None)), w.answer(), *w.talk(1)]


def _agent(w: _Writer) -> list[Message]:
    calls = [m for _ in range(3) for m in w.with_results(w.calling(thinking=w.thought()))]
    return [w.system(), w.user(), *calls, w.answer(thinking=w.thought()), w.user(), *w.with_results(w.calling())]


def _masked(w: _Writer) -> list[Message]:
    first, *rest = w.talk(3)
    rest[0] |= w.draw.choice(({"step_loss_mask": 0}, {"weight": 0}))
    rest[2] |= w.draw.choice(({"step_loss_mask": 1}, {"weight": 1}, {}))
    return [first, *rest]


def _parts(w: _Writer) -> list[Message]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in w.talk(2)]


def _of_other_times(w: _Writer) -> list[Message]:
    call = w.calling()["tool_calls"][0]["function"]
    result = {"role": "function", "name": call["name"], "content": w.draw.choice(RESULTS)}
    calling = {**w.answer(content=None), "function_call": call}
    return [{"role": "developer", "content": "Be kind."}, w.user(), calling, result, w.answer()]


def _within_content(w: _Writer) -> list[Message]:
    return [w.user(), w.answer(), w.user(), w.answer(content=f"<think>\n{w.thought()}\n</think>\n\nSo it is.")]


KINDS: tuple[tuple[str, int, Callable[[_Writer], list[Message]]], ...] = (
    ("one turn", 18, lambda w: w.talk(1)),
    ("one turn with a system prompt", 10, lambda w: [w.system(), *w.talk(1)]),
    ("many turns", 28, lambda w: w.talk(w.draw.randint(2, 5))),
    ("many turns with a system prompt", 14, lambda w: [w.system(), *w.talk(3)]),
    ("a thought in the last turn", 10, lambda w: [*w.talk(1), w.user(), w.answer(reasoning_content=w.thought())]),
    ("a thought in each turn", 12, _thinking_everywhere),
    ("a thought in an old turn", 6, lambda w: [*w.talk(1, reasoning_content=w.thought()), *w.talk(1)]),
    ("a thought by another name", 8, lambda w: w.talk(2, **{w.draw.choice(("thinking", "reasoning")): w.thought()})),
    ("a thought within the content", 8, _within_content),
    ("tools and no call", 4, lambda w: w.talk(2)),
    ("one call", 18, _one_call),
    ("thoughts and calls", 8, _thinking_calls),
    ("calls at once", 11, _calls_at_once),
    ("calls in rounds", 9, _rounds),
    ("an agent", 4, _agent),
    ("a call at the end", 5, lambda w: [w.user(), w.calling()]),
    ("a result at the end", 2, lambda w: [w.user(), *w.with_results(w.calling())]),
    ("calls at once at the end, tools", 1, lambda w: [w.user(), w.calling(2)]),
    ("a question at the end", 8, lambda w: [*w.talk(2), w.user()]),
    ("an empty answer", 2, lambda w: [*w.talk(1), w.user(), w.answer(content="")]),
    ("an empty question", 2, lambda w: [{"role": "user", "content": ""}, w.answer()]),
    ("masks", 6, _masked),
    ("parts of text", 3, _parts),
    ("roles of other times, a call", 1, _of_other_times),
    ("a greeting first", 1, lambda w: [w.answer(content="Hello!"), *w.talk(2)]),
    ("no answer", 1, lambda w: [w.user()]),
)


def corpus() -> list[Row]:
    """All rows, always the same."""
    writer = _Writer()
    return [
        Row(kind, make(writer), TOOLS if any(word in kind for word in ("call", "tool", "agent", "result")) else None)
        for kind, num, make in KINDS
        for _ in range(num)
    ]
