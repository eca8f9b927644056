"""A custom generate function with tools: several turns in one sample; what the model sampled is never encoded again.

    python train.py ... --custom-generate-function-path examples.multi_turn_tools:generate

The dataset brings messages (no `--apply-chat-template`) and, if the template writes them, `tools`. A template writes
turns as text, and ids made from a text that the model wrote need not be those that it sampled: it may spell a word in
other pieces, and templates drop or add thinking. So only what the template writes *between* two sampled turns is
encoded: it renders a placeholder for the answer, followed by the tool's result, and the text after the placeholder is
the end of the turn, the result and the head of the next turn. Its ids are context, never trained.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from slime.core.sample import Sample, Status
from slime.data.chat import ChatRenderer
from slime.rollout.context import current
from slime.rollout.generate import generate as one_turn
from slime.rollout.turns import count_tool_call, expect_tools

MAX_TURNS = 4
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)
PLACEHOLDER = "qqplaceholderqq"
FAILED = "error:"
"""How the result of a failed call begins."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
"""No power: its result can be larger than any memory."""


def between_turns(chat: ChatRenderer, result: str) -> list[int]:
    """Ids from the end of a sampled turn to the head of the next one; control tokens in `result` are spelled out."""
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": PLACEHOLDER},
        {"role": "tool", "content": result},
    ]
    rendered = chat.render(conversation, add_generation_prompt=True)
    return chat.encode(rendered.part(rendered.marked.index(PLACEHOLDER) + len(PLACEHOLDER)))


async def converse(
    args: Any, sample: Sample, sampling_params: dict[str, Any], answer: Callable[[str], str | None]
) -> Sample:
    """Turns of the model, and of `answer` to their text, until it says None. A partial rollout goes on where it was."""
    chat = ChatRenderer(current().tokenizer, kwargs=args.apply_chat_template_kwargs)
    if not sample.tokens and not isinstance(sample.prompt, str):
        sample.tokens = chat.encode(chat.render(sample.prompt, tools=sample.metadata.get("tools") or TOOLS))
    if sample.response_length == 0:
        sample.metadata["turns"] = [0]
    expect_tools(sample)
    starts: list[int] = sample.metadata["turns"]  # of each turn of the model, in characters of the response
    while True:
        sample = await one_turn(args, sample, sampling_params)
        result = answer(sample.response[starts[-1] :]) if sample.status is Status.COMPLETED else None
        if result is None or len(starts) == MAX_TURNS:
            return sample
        count_tool_call(sample, failed=result.startswith(FAILED))
        ids = between_turns(chat, result)
        if ids[0] == sample.tokens[-1]:
            ids = ids[1:]  # the model sampled the end of its turn
        sample.append_response_tokens(ids, text=chat.decode(ids))
        starts.append(len(sample.response))


def calculate(text: str) -> str | None:
    """The result of the call in a turn's text; None without a call."""
    call = CALL.search(text)
    if call is None:
        return None
    try:
        expression = json.loads(call[1])["arguments"]["expression"]
        return str(_value(ast.parse(expression, mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as problem:
        return f"{FAILED} {problem}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("numbers with + - * / only")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`--custom-generate-function-path`: a calculator for the model."""
    return await converse(args, sample, sampling_params, calculate)
