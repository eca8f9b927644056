"""OpenAI's Chat Completions API: POST /v1/chat/completions.

Supported: system, developer, user, assistant and tool messages, text parts, tools, and `reasoning_content` in assistant
messages. Rejected: multiple choices, log-probs, images and audio.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from slime.agent.adapters.adapter import Answer, BadRequest, Event, Frame, Request, Stream, Text, Thought, Wire, wanted
from slime.agent.messages import Message, ToolCall, canonical_arguments

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatCompletions(Wire):
    path = "/v1/chat/completions"

    def request(self, body: Mapping[str, Any]) -> Request:
        if body.get("n") not in (None, 1):
            raise BadRequest(f"n is {body['n']}, but only one choice per request is supported; send n requests")
        if body.get("logprobs"):
            raise BadRequest("logprobs are not available to agents; remove them from the request")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages is empty; send at least one message")
        stop = body.get("stop") or ()
        return Request(
            messages=tuple(map(message_of, messages)),
            tools=tools_of(body),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            sampling=wanted(body, SAMPLING),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            streams=bool(body.get("stream")),
            model=str(body.get("model", "")),
        )

    def response(self, answer: Answer, request: Request) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.text or None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.calls:
            message["tool_calls"] = [call_of(call) for call in answer.message.calls]
        else:
            message["content"] = answer.message.text
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": FINISH[answer.finish]}
        return {**_head(request, answer.id, "chat.completion"), "choices": [choice], "usage": usage_of(answer)}

    def stream(self, request: Request) -> Stream:
        return _Chunks(request)

    def error(self, message: str, status: int) -> dict[str, Any]:
        kind = KINDS.get(status, "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class _Chunks(Stream):
    def __init__(self, request: Request) -> None:
        self._request, self._id = request, f"{time.time_ns():x}"

    def begin(self) -> Iterable[Frame]:
        yield self._chunk({"role": "assistant", "content": ""})

    def frames(self, event: Event) -> Iterable[Frame]:
        match event:
            case Thought(text=text):
                yield self._chunk({"reasoning_content": text})
            case Text(text=text):
                yield self._chunk({"content": text})
            case Answer() as answer:
                for index, call in enumerate(answer.message.calls):
                    yield self._chunk({"tool_calls": [{"index": index, **call_of(call)}]})
                yield self._chunk({}, FINISH[answer.finish])
                usage = {**_head(self._request, self._id, "chat.completion.chunk"), "choices": []}
                yield Frame({**usage, "usage": usage_of(answer)})
                yield Frame("[DONE]")

    def broken(self, message: str, status: int) -> Iterable[Frame]:
        yield Frame(ChatCompletions().error(message, status))
        yield Frame("[DONE]")

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> Frame:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return Frame({**_head(self._request, self._id, "chat.completion.chunk"), "choices": [choice]})


def _head(request: Request, id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": request.model}


def usage_of(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def call_of(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_of(given: Any) -> Message:
    """Parses one message of a request. Raises `BadRequest`."""
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise BadRequest(f"the message {str(given)[:80]!r} is not an object whose role is one of {sorted(ROLES)}")
    role = ROLES[given["role"]]
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    return Message(
        role,
        text_of(given.get("content")),
        reasoning=str(reasoning) if reasoning and role == "assistant" else None,
        calls=tuple(_call(call) for call in given.get("tool_calls") or ()),
        call_id=given.get("tool_call_id"),
        name=given.get("name") if role == "tool" else None,
    )


def _call(given: Any) -> ToolCall:
    try:
        function = given["function"]
        return ToolCall(str(given["id"]), str(function["name"]), canonical_arguments(function.get("arguments")))
    except (KeyError, TypeError) as error:
        raise BadRequest(f"the tool call {str(given)[:80]!r} has no id or function") from error


def text_of(content: Any) -> str:
    """Returns the text of a string or of text parts. Raises `BadRequest` for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise BadRequest(f"a content part of type {kind!r} is not supported, because the model is text-only")
        parts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(parts)


def tools_of(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the tools in the form that chat templates expect; none if tool_choice is "none". Raises `BadRequest`."""
    if body.get("tool_choice") == "none":
        return ()
    tools = body.get("tools") or ()
    for tool in tools:
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" not in tool:
            raise BadRequest(f"the tool {str(tool)[:80]!r} is not of type function")
    return tuple(tools)
