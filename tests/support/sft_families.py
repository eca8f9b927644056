"""What fine-tuning has to train of a row in each family, written down by hand: the oracle of
`slime.data.sft_loss_mask`.

Nothing here asks our code. The prompt of a turn is what transformers' `apply_chat_template` makes of the conversation
up to it, with a generation prompt; the turn is written as the family's model card and parser have it. `Family` says
which fields of a message a template reads: a row in another spelling is written in that one first.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are written with a full-width bar

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.support.chat_templates import DEEPSEEK_END, published_tokenizer
from tests.support.sft_corpus import Message, Row

NEWLINE = "\n"
Turn = tuple[str, str]
"""Prompt and what the model writes behind it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant's message says."""

    text: str
    thought: str
    calls: list[tuple[str, dict[str, Any]]]
    ids: list[str]
    before_result: bool
    """Whether the environment speaks next, not the user."""
    thinks: bool
    """Whether the prompt asks for a thought."""

    @property
    def json(self) -> list[str]:
        """Arguments of the calls."""
        return [json.dumps(arguments, ensure_ascii=False) for _, arguments in self.calls]


@dataclass(frozen=True, slots=True)
class Family:
    turn: Callable[[Said], str]
    thought_key: str | None = None
    splits_content: bool = False
    """`<think>` in the content is a thought."""
    thinks: bool = False
    """The model writes thoughts in its turn."""
    arguments_as_text: bool = False
    nothing: str | None = ""
    """The content of a message that only calls."""
    words: bool = True
    """Text may stand beside a call."""
    words_and_thought: bool = True
    most_calls: int = 99
    ids_name: bool = False
    knows_developer: bool = False
    writes_tools: bool = True


class RefusedError(Exception):
    """This family cannot write the row."""


def expected(name: str, row: Row) -> list[Turn]:
    """The trained turns of a row. Raises `RefusedError`."""
    family = FAMILIES[name]
    tokenizer = published_tokenizer(name)
    messages = [_own(m, family) for m in row.messages]
    messages = list(_chunks(messages, family.most_calls))
    if family.ids_name:
        _name_ids(messages)
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        masked = 0 in (message.get("step_loss_mask"), message.get("weight"))
        if message["role"] != "assistant" or masked or i == 0:
            continue
        clean = [{k: v for k, v in m.items() if k not in ("step_loss_mask", "weight")} for m in messages[:i]]
        prompt = tokenizer.apply_chat_template(clean, tools=row.tools, add_generation_prompt=True, tokenize=False)
        follows = messages[i + 1]["role"] if i + 1 < len(messages) else ""
        turns.append((prompt, family.turn(_said(message, family, follows, prompt))))
    if not turns:
        raise RefusedError("nothing to learn")
    return turns


def left_out(name: str, row: Row) -> set[str]:
    """What of the trained turns, and of the tools, the family has no place for."""
    family, found = FAMILIES[name], set()
    for message in row.messages[1:]:
        if message["role"] != "assistant" or 0 in (message.get("step_loss_mask"), message.get("weight")):
            continue
        thought = any(key in message for key in ("reasoning_content", "reasoning", "thinking"))
        behind_result = row.messages[row.messages.index(message) - 1]["role"] == "tool"
        if thought and (not family.thinks or (name == "deepseek-r1" and behind_result)):
            found.add("reasoning")
        if name == "deepseek-v3.1" and "</think>" in str(message["content"]):
            found.add("reasoning")
        words = family.words_and_thought if thought and family.thinks else family.words
        if message.get("tool_calls") and message["content"] and not words:
            found.add("words beside a call")
    return found | ({"tools"} if row.tools and not family.writes_tools else set())


def _own(message: Message, family: Family) -> Message:
    own = dict(message)
    content = own.get("content")
    own["content"] = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    if own["role"] == "developer" and not family.knows_developer:
        own["role"] = "system"
    if own["role"] == "function":
        own |= {"role": "tool", "tool_call_id": "old"}
    if own["role"] != "assistant":
        return own
    if "function_call" in own:
        own["tool_calls"] = [{"type": "function", "id": "old", "function": own.pop("function_call")}]
    thought = next((own.pop(k) for k in ("reasoning_content", "reasoning", "thinking") if k in own), "")
    if thought and family.thinks:
        own[family.thought_key or "unread"] = thought
    if family.turn is deepseek_v31:
        own["content"] = own["content"].rpartition("</think>")[2].lstrip("\n")
    if "tool_calls" in own:
        own["tool_calls"] = [_own_call(call, family) for call in own["tool_calls"]]
        words = family.words_and_thought if thought and family.thinks else family.words
        own["content"] = own["content"] if own["content"] and words else family.nothing
    return own


def _own_call(call: Message, family: Family) -> Message:
    arguments = call["function"]["arguments"]
    if family.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not family.arguments_as_text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _chunks(messages: list[Message], most: int) -> Iterator[Message]:
    """Calls at once as calls one after another, each behind the results of those before."""
    results: dict[str, Message] = {m["tool_call_id"]: m for m in messages if m["role"] == "tool"}
    placed = set()
    for message in messages:
        calls = message.get("tool_calls", [])
        if message["role"] == "tool" and message["tool_call_id"] in placed:
            continue
        if len(calls) <= most:
            yield message
            continue
        for at in range(0, len(calls), most):
            some = calls[at : at + most]
            yield (
                {**message, "tool_calls": some}
                if at == 0
                else {
                    "role": "assistant",
                    "content": message["content"] if not message["content"] else "",
                    "tool_calls": some,
                }
            )
            own = [m for m in messages if m.get("tool_call_id") in [c["id"] for c in some]]
            if len(own) < len(some) and at + most < len(calls):
                raise RefusedError("a call without the result of the one before")
            yield from own
            placed |= {m["tool_call_id"] for m in own}
    assert placed <= set(results)


def _name_ids(messages: list[Message]) -> None:
    """As Kimi-K2's guide to calls has them."""
    named: dict[str, str] = {}
    for i, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls", []):
            named[call["id"]] = f"functions.{call['function']['name']}:{len(named)}"
            calls.append({**call, "id": named[call["id"]]})
        if calls:
            messages[i] = {**message, "tool_calls": calls}
        if message["role"] == "tool":
            messages[i] = {**message, "tool_call_id": named[message["tool_call_id"]]}


def _said(message: Message, family: Family, follows: str, prompt: str) -> Said:
    text = message["content"] or ""
    thought = message.get(family.thought_key or "unread", "")
    if family.splits_content and "</think>" in text:
        thought, _, text = text.partition("</think>")
        thought, text = thought.replace("<think>", "").strip("\n"), text.lstrip("\n")
    calls = []
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        calls.append((call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    ids = [call.get("id", "") for call in message.get("tool_calls", [])]
    return Said(text, thought, calls, ids, follows == "tool" or bool(calls), prompt.rstrip().endswith("<think>"))


def hermes(said: Said) -> str:
    """Qwen2.5 and Qwen3."""
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for (name, _), arguments in zip(said.calls, said.json, strict=True)
    ]
    return "\n".join([said.text, *calls] if said.text or not calls else calls) + "<|im_end|>"


def qwen3(said: Said) -> str:
    return f"<think>\n{said.thought}\n</think>\n\n{hermes(replace(said, text=said.text.lstrip(NEWLINE)))}"


def qwen35(said: Said) -> str:
    calls = []
    for name, arguments in said.calls:
        values = [
            f"<parameter={k}>\n{json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v}\n</parameter>\n"
            for k, v in arguments.items()
        ]
        calls.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
    text, between = said.text.strip(), "\n\n" if said.text.strip() and calls else ""
    return f"{said.thought}\n</think>\n\n{text}{between}" + "\n".join(calls) + "<|im_end|>"


def llama31(said: Said) -> str:
    if not said.calls:
        return f"{said.text.strip()}<|eot_id|>"
    return f'{{"name": "{said.calls[0][0]}", "parameters": {said.json[0]}}}<|eot_id|>'


def _deepseek_calls(said: Said) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for (name, _), arguments in zip(said.calls, said.json, strict=True)
    )
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""


def deepseek_v3(said: Said) -> str:
    return said.text + _deepseek_calls(said) + DEEPSEEK_END


def deepseek_r1(said: Said) -> str:
    """Its template asks for no thought behind the result of a call."""
    thought = f"{said.thought}\n</think>\n\n" if said.thinks else ""
    return f"{thought}{said.text.lstrip(NEWLINE) if thought else said.text}{_deepseek_calls(said)}{DEEPSEEK_END}"


def deepseek_v31(said: Said) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for (name, _), arguments in zip(said.calls, said.json, strict=True)
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return said.text + section + DEEPSEEK_END


def kimi_k2(said: Said) -> str:
    calls = "".join(
        f"<|tool_call_begin|>{own}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for own, arguments in zip(said.ids, said.json, strict=True)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return f"{said.text}{section}<|im_end|>"


def minimax_m2(said: Said) -> str:
    calls = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in said.calls
    )
    section = f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    text = said.text if said.thought else said.text.lstrip("\n")
    return f"{said.thought}\n</think>\n\n{text}{section}[e~["


def gpt_oss(said: Said) -> str:
    """OpenAI's harmony format: a call ends a turn."""
    thought = said.thought or (said.text if said.calls else "")
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if said.calls:
        name, arguments = said.calls[0][0], said.json[0]
        return f"{analysis} to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
    return f"{analysis}<|channel|>final<|message|>{said.text}<|return|>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glm_end(said: Said) -> str:
    return "<|observation|>" if said.before_result else "<|user|>"


def glm46(said: Said) -> str:
    calls = "".join(
        f"\n<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in said.calls
    )
    text = f"\n{said.text.strip()}" if said.text.strip() else ""
    return f"\n<think>{said.thought.strip()}</think>{text}{calls}{_glm_end(said)}"


def glm47(said: Said) -> str:
    calls = "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{k}</arg_key><arg_value>{_plain(v)}</arg_value>" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in said.calls
    )
    return f"{said.thought.strip()}</think>{said.text.strip()}{calls}{_glm_end(said)}"


THINKING = {"thought_key": "reasoning_content", "splits_content": True, "thinks": True}
FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(hermes),
    "qwen3": Family(qwen3, **THINKING),
    "qwen3-2507": Family(hermes),
    "qwen3-vl": Family(hermes),
    "qwen3.5": Family(qwen35, **THINKING),
    "llama3.1": Family(llama31, words=False, most_calls=1, knows_developer=True),
    "deepseek-v3": Family(
        deepseek_v3, arguments_as_text=True, nothing=None, words=False, most_calls=2, writes_tools=False
    ),
    "deepseek-r1": Family(deepseek_r1, splits_content=True, thinks=True, arguments_as_text=True, writes_tools=False),
    "deepseek-v3.1": Family(deepseek_v31, arguments_as_text=True, writes_tools=False),
    "kimi-k2": Family(kimi_k2, ids_name=True, knows_developer=True),
    "minimax-m2": Family(minimax_m2, **THINKING),
    "gpt-oss": Family(
        gpt_oss, **THINKING | {"thought_key": "thinking"}, words_and_thought=False, most_calls=1, knows_developer=True
    ),
    "glm4.6": Family(glm46, **THINKING),
    "glm4.7": Family(glm47, **THINKING),
}
