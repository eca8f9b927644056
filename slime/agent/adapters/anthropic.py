"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Supported: system (text or blocks); user and assistant messages with text, thinking, tool_use and tool_result blocks;
tools. Thinking blocks get a dummy signature, because clients expect one. Rejected: images, documents, and tools that
run on the provider's side.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from slime.agent.adapters.adapter import Answer, BadRequest, Event, Frame, Request, Stream, Text, Thought, Wire, wanted
from slime.agent.messages import Message, ToolCall, canonical_arguments

SAMPLING = ("temperature", "top_p", "top_k")
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

    def request(self, body: Mapping[str, Any]) -> Request:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: at least one message is required")
        system = _text(body.get("system"))
        found = [Message("system", system)] if system else []
        for given in messages:
            found += _messages(given)
        return Request(
            messages=tuple(found),
            tools=_tools(body),
            max_tokens=body.get("max_tokens"),
            sampling=wanted(body, SAMPLING),
            stop=tuple(body.get("stop_sequences") or ()),
            streams=bool(body.get("stream")),
            model=str(body.get("model", "")),
            thinks=True,
        )

    def response(self, answer: Answer, request: Request) -> dict[str, Any]:
        return {
            **_head(answer.id, request.model),
            "content": list(_blocks(answer.message)),
            "stop_reason": STOP[answer.finish],
            "usage": _usage(answer),
        }

    def stream(self, request: Request) -> Stream:
        return _Events(request)

    def error(self, message: str, status: int) -> dict[str, Any]:
        return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": message}}


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
        delta = {"stop_reason": STOP[answer.finish], "stop_sequence": None}
        yield _frame({"type": "message_delta", "delta": delta, "usage": _usage(answer)})
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
    if message.text or not message.calls:
        yield {"type": "text", "text": message.text}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.decoded}


def _messages(given: Any) -> list[Message]:
    """Parses one message. Each tool result in it becomes a separate message. Raises `BadRequest`."""
    if not isinstance(given, Mapping) or given.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"messages: {str(given)[:80]!r} must have the role user or assistant")
    content = given.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if given["role"] == "assistant":
        return [_assistant(blocks)]
    out: list[Message] = []
    text: list[str] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            out.append(Message("tool", _text(block.get("content")), call_id=str(block.get("tool_use_id"))))
        else:
            text.append(_text([block]))
    if text or not out:
        out.append(Message(given["role"], "\n".join(text)))
    return out


def _assistant(blocks: Any) -> Message:
    text, thoughts, calls = [], [], []
    for block in blocks:
        match _kind(block):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = canonical_arguments(block.get("input") or {})
                calls.append(ToolCall(str(block.get("id")), str(block.get("name")), arguments))
            case _:
                text.append(_text([block]))
    return Message("assistant", "".join(text), "".join(thoughts) or None, tuple(calls))


def _kind(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, Mapping) else ""


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for block in content:
        if _kind(block) != "text":
            raise BadRequest(f"a block of type {_kind(block)!r} is not supported, because the model is text-only")
    return "\n".join(str(block.get("text", "")) for block in content)


def _tools(body: Mapping[str, Any]) -> tuple[Any, ...]:
    if (body.get("tool_choice") or {}).get("type") == "none":
        return ()
    tools = []
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise BadRequest(
                f"tool {tool.get('name')!r} of type {tool.get('type')!r} would run at the provider; remove it"
            )
        function = {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    return tuple(tools)
