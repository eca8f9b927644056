"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Supported: system (text or blocks); user and assistant messages with text, image, thinking, tool_use and tool_result
blocks; tools. Thinking blocks get a dummy signature, because clients expect one. Rejected: documents, and tools that
run on the provider's side.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from slime.agent.adapters.adapter import Answer, ContextFull, Event, Frame, Request, Stream, Text, Thought, Wire
from slime.agent.adapters.fields import (
    GUIDED,
    BadRequest,
    Fields,
    ImageParts,
    at_least_one,
    checked,
    objects,
    optional,
    required,
    sampling,
    schema_text,
    stops,
)
from slime.agent.adapters.openai_chat import check_function
from slime.agent.messages import Message, Picture, ToolCall, canonical_arguments

SAMPLES = ("temperature", "top_p", "top_k")
FIELDS = Fields(
    works=frozenset(
        (
            *("messages", "model", "system", "stream", "max_tokens", "stop_sequences", "tools", "tool_choice"),
            *("output_config", "output_format", *SAMPLES),
        )
    ),
    hints={
        **dict.fromkeys(("service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id"), str),
        **dict.fromkeys(("metadata", "billing_policy", "cache_control", "diagnostics", "thinking"), dict),
        "context_management": dict,  # the server would shorten the history; the agent's stays as it was sent
        "betas": list,
        "fallbacks": (list, str),  # other models, for a refusal by policy, which there is none of
        "fallback_credit_token": (str, dict),
    },
    refused={
        "compaction": "ask for a summary in a message",
        "container": "there are no containers; give the model a tool that runs code",
        "mcp_servers": "the adapter connects to no other servers; call them from the agent, as tools",
        "thread": "conversations are not stored; send all messages",
    },
)
STOP = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SIGNATURE = "c2xpbWU="


class Messages(Wire):
    path = "/v1/messages"
    counters: ClassVar = {"/v1/messages/count_tokens": lambda num: {"input_tokens": num}}

    fields = FIELDS

    def request(self, body: Mapping[str, Any]) -> Request:
        messages = objects(body, "messages")
        if not messages:
            raise BadRequest("messages: at least one message is required")
        begun = messages[-1].get("role") == "assistant"
        system = _text(body.get("system"), "system", self.images)
        found = [Message("system", system)] if system else []
        for i, given in enumerate(messages):
            found += _messages(given, f"messages[{i}]", self.images)
        return Request(
            messages=tuple(found),
            tools=_tools(body),
            max_tokens=at_least_one(body, "max_tokens"),
            sampling=sampling(body, SAMPLES),
            stop=stops(body, "stop_sequences"),
            streams=optional(body, "stream", bool) or False,
            model=optional(body, "model", str) or "",
            schema=_schema(body),
            unanswerable="the model does not support prefill; end the messages with a user message" if begun else "",
        )

    def response(self, answer: Answer, request: Request) -> dict[str, Any]:
        return {
            **_head(answer.id, request.model),
            "content": list(_blocks(answer.message)),
            **_stop(answer),
            "usage": _usage(answer),
        }

    def stream(self, request: Request) -> Stream:
        return _Events(request)

    def error(self, message: str, status: int) -> dict[str, Any]:
        return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": message}}

    def context_full(self, problem: ContextFull) -> dict[str, Any]:
        return self.error(f"prompt is too long: {problem.num_prompt} tokens > {problem.most} maximum", 400)


class _Events(Stream):
    def __init__(self, request: Request) -> None:
        self._request, self._index, self._kind = request, -1, ""

    def begin(self) -> Iterable[Frame]:
        head = {**_head(secrets.token_hex(12), self._request.model), "content": [], "stop_reason": None}
        head["usage"] = {"input_tokens": 0, "output_tokens": 0}
        yield _frame({"type": "message_start", "message": head})
        yield _frame({"type": "ping"})

    def frames(self, event: Event) -> Iterable[Frame]:
        match event:
            case Thought(text=text):
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Text(text=text):
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Answer() as answer:
                yield from self._end(answer)

    def _end(self, answer: Answer) -> Iterator[Frame]:
        for call in answer.message.calls:
            yield from self._close()
            yield from self._open("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.decoded)})
        if self._index < 0:
            yield from self._open("text", {"type": "text", "text": ""})
        yield from self._close()
        yield _frame({"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)})
        yield _frame({"type": "message_stop"})

    def broken(self, message: str, status: int) -> Iterable[Frame]:
        yield _frame(Messages().error(message, status))

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[Frame]:
        if kind == self._kind:
            return
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        yield _frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> Iterator[Frame]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield _frame({"type": "content_block_stop", "index": self._index})
        self._kind = ""

    def _delta(self, delta: dict[str, Any]) -> Frame:
        return _frame({"type": "content_block_delta", "index": self._index, "delta": delta})


def _frame(data: dict[str, Any]) -> Frame:
    return Frame(data, event=data["type"])


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.finish == "stop" and answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": STOP[answer.finish], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    cached = min(answer.cached_tokens, answer.prompt_tokens)
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.sampled_tokens,
    }


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE}
    if message.text or message.is_empty:
        yield {"type": "text", "text": message.text}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.decoded}


def _messages(given: Mapping[str, Any], where: str, images: ImageParts) -> list[Message]:
    """Parses one message. Each tool result in it becomes a separate message. Raises `BadRequest`."""
    role = required(given, "role", str, f"{where}.")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role is {role[:80]!r}, but must be user or assistant")
    content, where = given.get("content"), f"{where}.content"
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks_of(content, where)
    if role == "assistant":
        return [_assistant(blocks, where, images)]
    out: list[Message] = []
    rest: list[Mapping[str, Any]] = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            answered = required(block, "tool_use_id", str, f"{where}[{i}].")
            text, seen = _content(block.get("content"), f"{where}[{i}].content", images)
            out.append(Message("tool", text, call_id=answered, images=seen))
        else:
            rest.append(block)
    if rest or not out:
        text, seen = _content(rest, where, images)
        out.append(Message(role, text, images=seen))
    return out


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str, images: ImageParts) -> Message:
    text, thoughts, calls, at = [], [], [], f"{where}[]."
    for block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(optional(block, "thinking", str, at) or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = canonical_arguments(optional(block, "input", dict, at))
                calls.append(ToolCall(required(block, "id", str, at), required(block, "name", str, at), arguments))
            case _:
                text.append(_text([block], where, images))
    return Message("assistant", "".join(text), "".join(thoughts) or None, tuple(calls))


def _blocks_of(content: Any, where: str) -> list[Mapping[str, Any]]:
    """Returns the blocks of a message's content, each with a type. Raises `BadRequest`."""
    blocks = [] if content is None else checked(content, list, where)
    for block in blocks:
        required(checked(block, dict, f"{where}[]"), "type", str, f"{where}[].")
    return blocks


def _text(content: Any, where: str, images: ImageParts) -> str:
    """Returns the text of blocks that contain no images. Raises `BadRequest`."""
    text, seen = _content(content, where, images)
    if seen:
        raise BadRequest(f"{where} contains an image, but only the messages of a user can")
    return text


def _content(content: Any, where: str, images: ImageParts) -> tuple[str, tuple[Picture, ...]]:
    """Returns the text and the images of a message's or a result's content. A line break separates texts that follow
    each other. Raises `BadRequest`.
    """
    if content is None or isinstance(content, str):
        return content or "", ()
    text, seen, after_text = "", list[Picture](), False
    for i, block in enumerate(_blocks_of(content, where)):
        at = f"{where}[{i}]."
        if block["type"] == "text":
            text += "\n" * after_text + required(block, "text", str, at)
        elif block["type"] == "image" and images.images is not None:
            source = required(block, "source", dict, at)
            if (kind := required(source, "type", str, f"{at}source.")) != "base64":
                raise BadRequest(
                    f"{at}source.type is {kind[:80]!r}, but must be base64: slime downloads no images and stores no "
                    "files; send the image's bytes"
                )
            image = images.read_base64(source, "data", f"{at}source.")
            seen.append(Picture(len(text), image.digest, image.num_tokens))
        else:
            raise images.refused("block", block["type"])
        after_text = block["type"] == "text"
    return text, tuple(seen)


def _tools(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the tools in the form that chat templates expect; none if tool_choice is none. Raises `BadRequest`."""
    tools = []
    for i, tool in enumerate(objects(body, "tools")):
        where = f"tools[{i}]."
        if tool.get("input_schema") is None:
            kind = optional(tool, "type", str, where)
            raise BadRequest(
                f"{where}input_schema is missing: a tool of type {str(kind)[:80]!r} would run at the provider, or only "
                "its models know it; remove it, or send a tool with an input_schema"
            )
        check_function(tool, where, "input_schema")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    return tuple(tools) if _lets_call(body) else ()


def _lets_call(body: Mapping[str, Any]) -> bool:
    """Returns whether the model may call tools. Raises `BadRequest` for calls that are forced."""
    choice = optional(body, "tool_choice", dict)
    kind = "auto" if choice is None else required(choice, "type", str, "tool_choice.")
    if kind not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice.type is {kind[:80]!r}, but must be auto or none: a forced call is not possible, because "
            f"{GUIDED}"
        )
    return kind == "auto"


def _schema(body: Mapping[str, Any]) -> str:
    config = optional(body, "output_config", dict) or {}
    format = optional(config, "format", dict, "output_config.") or optional(body, "output_format", dict)
    return schema_text(format, "output_config.format")
