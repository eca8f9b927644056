"""Answers with calls, written as the chat templates of each format write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Call = tuple[str, dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "sure": {"type": "boolean"},
                    "parts": {"type": "array", "items": {}},
                    "more": {"type": "object"},
                },
            },
        },
    }
    for name in ("look_up", "run-it")
]
NAMES = [tool["function"]["name"] for tool in TOOLS]  # type: ignore[index]

PLAIN = "abcXYZ 019.,:;!?'\"\\/{}()äß€漢\n"
"""Characters of values. No `<`, `>`, `[`, `]`: a value that looks like a mark is a case of its own."""
_words = st.text(st.sampled_from(PLAIN), max_size=12)
_numbers = st.integers(-(10**12), 10**12)
_plain_values = st.one_of(st.none(), st.booleans(), _numbers, _words)
VALUES = {
    "word": _words,
    "count": _numbers,
    "share": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "sure": st.booleans(),
    "parts": st.lists(_plain_values, max_size=3),
    "more": st.dictionaries(st.sampled_from(["k", "l m"]), _plain_values, max_size=2),
}
CALLS = st.tuples(st.sampled_from(NAMES), st.fixed_dictionaries({}, optional=VALUES))
TEXTS = st.text(st.sampled_from("abc D.\n"), max_size=12).map(str.strip)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _loose(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def qwen3_coder(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{_loose(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: list[Call], feed: str) -> str:
    return feed.join(
        f"<tool_call>{name}{feed}"
        + "".join(f"<arg_key>{k}</arg_key>{feed}<arg_value>{_loose(v)}</arg_value>{feed}" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def glm45(calls: list[Call]) -> str:
    return _glm(calls, "\n")


def glm47(calls: list[Call]) -> str:
    return _glm(calls, "")


def deepseekv3(calls: list[Call]) -> str:
    each = (
        f"<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{n}\n```json\n{_json(a)}\n```<\uff5ctool▁call▁end\uff5c>"
        for n, a in calls
    )
    return "<\uff5ctool▁calls▁begin\uff5c>" + "\n".join(each) + "<\uff5ctool▁calls▁end\uff5c>"


def deepseekv31(calls: list[Call]) -> str:
    each = (
        f"<\uff5ctool▁call▁begin\uff5c>{n}<\uff5ctool▁sep\uff5c>{_json(a)}<\uff5ctool▁call▁end\uff5c>" for n, a in calls
    )
    return "<\uff5ctool▁calls▁begin\uff5c>" + "".join(each) + "<\uff5ctool▁calls▁end\uff5c>"


def kimi_k2(calls: list[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + _json([{"name": n, "arguments": a} for n, a in calls])


def mistral_args(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a)}" for n, a in calls)


def llama3(calls: list[Call]) -> str:
    return "<|python_tag|>" + ";".join(_json({"name": n, "parameters": a}) for n, a in calls)


def minimax(calls: list[Call]) -> str:
    each = (
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{_loose(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for n, arguments in calls
    )
    return "<minimax:tool_call>\n" + "".join(each) + "</minimax:tool_call>"


def deepseekv32(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        return f'<\uff5cDSML\uff5cparameter name="{key}" string="{kind}">{_loose(value)}</\uff5cDSML\uff5cparameter>'

    each = (
        f'<\uff5cDSML\uff5cinvoke name="{n}">\n'
        + "\n".join(parameter(k, v) for k, v in arguments.items())
        + "\n</\uff5cDSML\uff5cinvoke>\n"
        for n, arguments in calls
    )
    return "<\uff5cDSML\uff5cfunction_calls>\n" + "".join(each) + "</\uff5cDSML\uff5cfunction_calls>"


def deepseekv32_json(calls: list[Call]) -> str:
    each = (f'<\uff5cDSML\uff5cinvoke name="{n}">\n{_json(a)}\n</\uff5cDSML\uff5cinvoke>\n' for n, a in calls)
    return "<\uff5cDSML\uff5cfunction_calls>\n" + "".join(each) + "</\uff5cDSML\uff5cfunction_calls>"


def gpt_oss(calls: list[Call]) -> str:
    """As the model writes it, from behind `<|start|>assistant` on; it writes one call in a turn."""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}<|call|>" for n, a in calls
    )


@dataclass(frozen=True)
class Written:
    """A way to write calls."""

    format: str
    """Its name in slime and in SGLang."""
    write: Any
    frame: str = ""
    """What stands behind the last call."""

    def ends(self, calls: list[Call]) -> list[int]:
        """Where each call ends in the text that `write` makes of all of them."""
        if self.write is mistral:  # one list
            return [len(self.write(calls))] * len(calls)
        return [len(self.write(calls[: i + 1])) - len(self.frame) for i in range(len(calls))]


WAYS = [
    Written("hermes", hermes),
    Written("qwen25", hermes),
    Written("qwen3_coder", qwen3_coder),
    Written("glm45", glm45),
    Written("glm47", glm47),
    Written("deepseekv3", deepseekv3, "<\uff5ctool▁calls▁end\uff5c>"),
    Written("deepseekv31", deepseekv31, "<\uff5ctool▁calls▁end\uff5c>"),
    Written("kimi_k2", kimi_k2, "<|tool_calls_section_end|>"),
    Written("mistral", mistral),
    Written("mistral", mistral_args),
    Written("llama3", llama3),
    Written("minimax-m2", minimax, "\n</minimax:tool_call>"),
    Written("deepseekv32", deepseekv32, "\n</\uff5cDSML\uff5cfunction_calls>"),
    Written("deepseekv32", deepseekv32_json, "\n</\uff5cDSML\uff5cfunction_calls>"),
]
HARMONY = Written("gpt-oss", gpt_oss)
"""Its answers are messages with headers: text before a call is one of its own."""
