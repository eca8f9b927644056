"""A corpus of answers with calls: well formed, several at once, cut, damaged, in thinking, beside text.

Of each the right reading is known, because it was written: a reader is compared with that, and with SGLang.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.support.written_calls import HARMONY, NAMES, WAYS, Call, Written

WORDS = [
    "a",
    "two words",
    "line\nfeed",
    '"quoted" \\ {}',
    "ä€漢 \U0001f600",
    "\u202eright",
    "12",
    "null",
    "<b>x</b>",
    "",
]
VALUES: dict[str, list[Any]] = {
    "word": WORDS,
    "count": [0, -7, 10**12],
    "share": [0.5, -1.25e-3, 2.0],
    "sure": [True, False],
    "parts": [[], [1, "a", None], [[True], {"deep": [{"er": "ä"}]}]],
    "more": [{}, {"k": 1.5, "l m": ["a"]}, {"a": {"b": {"c": [{"d": "}]"}]}}}],
}
TEXTS = ["", "I look it up.", "First\n\nthis:", "Ich schaue nach: ä€漢"]
THOUGHTS = ["They ask for it.", "line\n\nand line ä"]
DAMAGED, CUT = "damaged", "cut"
RUNS_ON = ("qwen3_coder", "glm45", "glm47", "minimax-m2", "deepseekv32", "llama3")
"""Formats in which a damaged call may take the next one along: a value, or a string, without its end."""


@dataclass(frozen=True)
class Answer:
    """One text of the corpus."""

    kind: str
    format: str
    text: str
    calls: list[Call]
    """Those that it makes, in order; of a damaged one those beside the damage."""
    said: str | None = ""
    """Its text; None if something in it cannot be read, which then stands in the text, too."""
    thinking: str = ""
    thinks: bool = False
    """The prompt has begun the thinking."""


def some_calls(source: random.Random, num: int) -> list[Call]:
    """Calls of known functions with arguments of all kinds."""
    made = []
    for _ in range(num):
        keys = source.sample(sorted(VALUES), source.randint(1, 4))
        made.append((source.choice(NAMES), {key: source.choice(VALUES[key]) for key in keys}))
    return made


def corpus(seed: int, size: int) -> list[Answer]:
    """`size` answers of each kind in each way to write."""
    source = random.Random(seed)
    made = [one for way in WAYS for _ in range(size) for one in _answers(source, way)]
    return made + [one for _ in range(size) for one in _harmony(source)]


def _answers(source: random.Random, way: Written) -> list[Answer]:
    calls, before, thought = some_calls(source, source.randint(1, 3)), source.choice(TEXTS), source.choice(THOUGHTS)
    written, behind = way.write(calls), source.choice(["done", "And so on."])
    forced = way.format == "minimax-m2"  # its prompts always begin the thinking
    head = "</think>\n\n" if forced else ""
    opened = f"{thought}\n" if forced else f"<think>\n{thought}\n"

    def answer(kind: str, text: str, made: list[Call], said: str | None = before, thinking: str = "") -> Answer:
        return Answer(kind, way.format, text if thinking else head + text, made, said, thinking, forced)

    cut = source.randrange(1, len(written))
    whole = [call for call, end in zip(calls, way.ends(calls), strict=True) if end <= cut]
    plain = source.choice(["No call, <b>text</b> [1].", '{"a": 1}', ""])
    out = [
        answer("well formed", before + written, calls),
        answer(CUT, before + written[:cut], whole, None),
        _damaged(source, way, calls, before, answer),
        answer(
            "unknown function",
            before + way.write([("other", {"word": "a"}), *calls]),
            [("other", {"word": "a"}), *calls],
        ),
        answer("text behind", f"{before}{written}\n\n{behind}", calls, before + behind),
        answer("no call", before + plain, [], before + plain),
    ]
    if way.format in ("mistral", "llama3"):
        return out
    end = f"{opened}</think>\n\n"
    inside = f"{opened}{written}\n</think>\n\n"
    breaks = way.format in ("hermes", "qwen25", "qwen3_coder", "glm45", "glm47", "kimi_k2")
    unclosed = (calls, "", thought) if breaks else ([], "", f"{thought}\n{written}")
    return [
        *out,
        answer("thinking", end + before + written, calls, before, thought),
        answer("call in unclosed thinking", opened + written, *unclosed),
        answer("call in closed thinking", inside + before + written, calls, before, f"{thought}\n{written}"),
    ]


def _damaged(source: random.Random, way: Written, calls: list[Call], before: str, answer: Any) -> Answer:
    """One to three characters of one call are lost, or others stand there."""
    written, ends = way.write(calls), way.ends(calls)
    number = source.randrange(len(calls))
    at_once = len(set(ends)) < len(ends)
    start, end = (ends[number - 1] if number and not at_once else written.index(calls[0][0])), ends[number]
    spot = source.randrange(start, end)
    text = (
        written[:spot] + source.choice(["", "x", '"', "}", "\n"]) + written[min(end, spot + source.choice([0, 1, 3])) :]
    )
    taken = 2 if way.format in RUNS_ON else 1
    beside = [] if at_once else calls[:number] + calls[number + taken :]
    return answer(DAMAGED, before + text, beside, None)


def _harmony(source: random.Random) -> list[Answer]:
    """Of gpt-oss: a turn makes one call. SGLang's detector reads one only where something stands before it."""
    [(name, arguments)] = calls = some_calls(source, 1)
    thought, text, end = source.choice(THOUGHTS), source.choice(TEXTS[1:]), "<|end|><|start|>assistant"
    call = HARMONY.write(calls)
    analysis, preamble = f"<|channel|>analysis<|message|>{thought}{end}", f"<|channel|>commentary<|message|>{text}{end}"
    final = f"<|channel|>final<|message|>{text}<|return|>"
    spot, cut = source.randrange(len(call) - 8), source.randrange(1, len(call))
    damaged = call[:spot] + source.choice(["x", '"', "}"]) + call[spot + source.choice([1, 3]) :]
    templates = (
        f" to=functions.{name}<|channel|>commentary json<|message|>{HARMONY.write(calls).partition('<|message|>')[2]}"
    )

    def answer(kind: str, text: str, made: list[Call], said: str | None, thinking: str = thought) -> Answer:
        return Answer(kind, "gpt-oss", text, made, said, thinking)

    return [
        answer("well formed", analysis + call, calls, ""),
        answer("text before", analysis + preamble + call, calls, text),
        answer("no call", analysis + final, [], text),
        answer(CUT, analysis + call[:cut], [], None),
        answer(DAMAGED, analysis + damaged, [], None),
        answer("unknown function", analysis + HARMONY.write([("other", arguments)]), [("other", arguments)], ""),
        answer("call first", call, calls, "", ""),
        answer("as the template writes it", templates, calls, "", ""),
    ]
