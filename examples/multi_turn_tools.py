"""A custom generate function with tools: several turns in one sample, and sampled text is never encoded again.

    python train.py ... --custom-generate-function-path examples.multi_turn_tools:generate

The dataset has messages (no `--apply-chat-template`) and, if the template writes them, `tools`. A template writes turns
as text. Encoding this text may give different ids from the sampled ids, because words can be split differently and
templates drop or add thinking. So this function encodes only the text that the template writes *between* two sampled
turns. `ConversationTemplate.suffix` returns the end of the turn, the tool result and the header of the next turn. These
ids are context and are not trained.
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
from slime.rollout.context import current
from slime.rollout.factories import end_of_text
from slime.rollout.generate import generate as one_turn
from slime.rollout.sample_metrics import count_tool_call, expect_tools

MAX_TURNS = 4
ASKED = Message("user", "?")
"""Replaces the messages before a turn, which do not affect the text that the template writes after the turn."""
FAILED = "error:"
"""Prefix of the result of a failed call."""
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
"""There is no power operator, because its result could be too large for memory."""


Reply = Callable[[str, str], tuple[Message, Message] | None]
"""(text before a turn, its text) -> the turn as a message, and the reply to it; None ends the conversation."""


def chat_of(args: Any) -> ChatRenderer:
    """Returns the renderer of the run's chat template."""
    return ChatRenderer(current().tokenizer, kwargs=args.apply_chat_template_kwargs)


async def converse(args: Any, sample: Sample, sampling_params: dict[str, Any], reply: Reply) -> Sample:
    """Alternates between turns of the model and of `reply`. A partial rollout continues where it stopped."""
    chat = chat_of(args)
    template = ConversationTemplate(chat, sorted(end_of_text(args.hf_checkpoint, current().tokenizer).token_ids))
    if not sample.tokens and not isinstance(sample.prompt, str):
        sample.tokens = chat.encode(chat.render(sample.prompt, tools=sample.metadata.get("tools") or TOOLS))
    if sample.response_length == 0:
        sample.metadata["turns"] = [0]
    expect_tools(sample)
    starts: list[int] = sample.metadata["turns"]  # start of each turn of the model, in characters of the response
    while True:
        sample = await one_turn(args, sample, sampling_params)
        before = sample.response[: starts[-1]] or chat.decode(sample.tokens[: sample.prompt_length][-16:])
        said = reply(before, sample.response[starts[-1] :]) if sample.status is Status.COMPLETED else None
        if said is None or len(starts) == MAX_TURNS:
            return sample
        turn, answer = said
        suffix = template.suffix([ASKED, turn], [answer], last_id=sample.tokens[-1])
        if suffix.other_end:  # a single sample cannot undo the token with which the model ended its turn
            return sample
        count_tool_call(sample, failed=answer.text.startswith(FAILED))
        sample.append_response_tokens(list(suffix.ids), text=chat.decode(suffix.ids))
        starts.append(len(sample.response))


def calculate(arguments: str) -> str:
    """Returns the result of a call with these JSON arguments."""
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
    """`--custom-generate-function-path`: gives the model a calculator; calls are parsed in the template's format.

    Raises `ConfigError`, which ends the run, if the format is unknown.
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
