"""A custom generate function with tools: several turns in one sample; what the model sampled is never encoded again.

    python train.py ... --custom-generate-function-path examples.multi_turn_tools:generate

The dataset brings messages (no `--apply-chat-template`) and, if the template writes them, `tools`. A template writes
turns as text, and ids made from a text that the model wrote need not be those that it sampled: it may spell a word in
other pieces, and templates drop or add thinking. So only what the template writes *between* two sampled turns is
encoded: `ConversationTemplate.suffix` gives the end of the turn, the tool's result and the head of the next turn. Its
ids are context, never trained.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import known_format
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample, Status
from slime.data.chat import ChatRenderer
from slime.rollout.clients import end_of_text
from slime.rollout.context import current
from slime.rollout.generate import generate as one_turn
from slime.rollout.sample_metrics import count_tool_call, expect_tools

MAX_TURNS = 4
ASKED = Message("user", "?")
"""Stands for all before a turn: what the template writes behind one does not depend on it."""
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


Reply = Callable[[str, str], tuple[Message, Message] | None]
"""(what stands before a turn, its text) -> it as a message, and the message behind it; None ends the conversation."""


def chat_of(args: Any) -> ChatRenderer:
    """Of the run's tokenizer."""
    return ChatRenderer(current().tokenizer, kwargs=args.apply_chat_template_kwargs)


async def converse(args: Any, sample: Sample, sampling_params: dict[str, Any], reply: Reply) -> Sample:
    """Turns of the model, and of `reply` to them. A partial rollout goes on where it was."""
    chat = chat_of(args)
    template = ConversationTemplate(chat, sorted(end_of_text(args.hf_checkpoint, current().tokenizer).token_ids))
    if not sample.tokens and not isinstance(sample.prompt, str):
        sample.tokens = chat.encode(chat.render(sample.prompt, tools=sample.metadata.get("tools") or TOOLS))
    if sample.response_length == 0:
        sample.metadata["turns"] = [0]
    expect_tools(sample)
    starts: list[int] = sample.metadata["turns"]  # of each turn of the model, in characters of the response
    while True:
        sample = await one_turn(args, sample, sampling_params)
        before = sample.response[: starts[-1]] or chat.decode(sample.tokens[: sample.prompt_length][-16:])
        said = reply(before, sample.response[starts[-1] :]) if sample.status is Status.COMPLETED else None
        if said is None or len(starts) == MAX_TURNS:
            return sample
        turn, answer = said
        suffix = template.suffix([ASKED, turn], [answer], last_id=sample.tokens[-1])
        if suffix.other_end:  # one line of tokens cannot take back how the model ended its turn
            return sample
        count_tool_call(sample, failed=answer.text.startswith(FAILED))
        sample.append_response_tokens(list(suffix.ids), text=chat.decode(suffix.ids))
        starts.append(len(sample.response))


def calculate(arguments: str) -> str:
    """The result of a call with these arguments, which are JSON."""
    try:
        return str(_value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as problem:
        return f"{FAILED} {problem}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("numbers with + - * / only")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`--custom-generate-function-path`: a calculator for the model, whose calls are read as its template writes them.

    Raises `ConfigError`, which ends the run, if nobody knows how that is.
    """
    calls = known_format(chat_of(args).template)

    def result(before: str, text: str) -> tuple[Message, Message] | None:
        read = calls.reader(TOOLS, before).all(text)
        if not read.calls:
            return None
        made = [ToolCall(calls.call_id(name, 0), name, arguments) for name, arguments in read.calls[:1]]
        turn = Message("assistant", read.text, calls=tuple(made))
        return turn, Message("tool", calculate(made[0].arguments), call_id=made[0].id, name=made[0].name)

    return await converse(args, sample, sampling_params, result)
