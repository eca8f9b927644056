"""OpenAI's Responses API: POST /v1/responses.

Supported: `instructions`, text, images, input items (messages, function calls and their results, reasoning), and
function tools. The agent must send all items with every request. `previous_response_id` is rejected, because sessions
compare complete histories.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from slime.agent.adapters.adapter import Answer, ContextFull, Event, Frame, Request, Stream, Text, Thought, Wire
from slime.agent.adapters.fields import (
    BadRequest,
    Fields,
    ImageParts,
    at_least_one,
    objects,
    optional,
    required,
    sampling,
    schema_text,
)
from slime.agent.adapters.openai_chat import CONTEXT_FULL, KINDS, check_function, content_of, lets_call, role_of
from slime.agent.messages import Message, ToolCall, canonical_arguments

SAMPLES = ("temperature", "top_p")
FIELDS = Fields(
    works=frozenset(
        (
            *("input", "instructions", "model", "stream", "max_output_tokens", "tools", "tool_choice", "text"),
            *("include", *SAMPLES),
        )
    ),
    hints={
        **dict.fromkeys(
            ("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"), str
        ),
        **dict.fromkeys(("store", "parallel_tool_calls"), bool),
        **dict.fromkeys(("metadata", "stream_options", "reasoning"), dict),
        "max_tool_calls": int,  # it limits tools that run at the provider
        "truncation": str,  # a request that does not fit is refused, and never shortened silently
    },
    refused={
        "background": "responses are not stored; send the request without it",
        "conversation": "responses are not stored; send all items",
        "previous_response_id": "responses are not stored; send all items",
        "prompt": "there are no stored prompts; send its text as input",
        "top_logprobs": "log-probs are not available to agents; remove it from the request",
    },
)


class Responses(Wire):
    path = "/v1/responses"

    fields = FIELDS

    def request(self, body: Mapping[str, Any]) -> Request:
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(body, "input")
        if not items:
            raise BadRequest("input is empty; send at least one item")
        if "message.output_text.logprobs" in (optional(body, "include", list) or ()):
            raise BadRequest("log-probs are not available to agents; remove message.output_text.logprobs from include")
        instructions = optional(body, "instructions", str)
        messages = [Message("system", instructions)] if instructions else []
        for i, item in enumerate(items):
            _add(messages, item, f"input[{i}]", self.images)
        text = optional(body, "text", dict) or {}
        return Request(
            messages=tuple(messages),
            tools=_tools(body),
            max_tokens=at_least_one(body, "max_output_tokens"),
            sampling=sampling(body, SAMPLES),
            streams=optional(body, "stream", bool) or False,
            model=optional(body, "model", str) or "",
            schema=schema_text(optional(text, "format", dict, "text."), "text.format"),
        )

    def response(self, answer: Answer, request: Request) -> dict[str, Any]:
        return _response(request, answer.id, list(_items(answer)), answer)

    def stream(self, request: Request) -> Stream:
        return _Events(request)

    def error(self, message: str, status: int) -> dict[str, Any]:
        return {"error": {"message": message, "type": KINDS.get(status, "server_error"), "param": None, "code": None}}

    def context_full(self, problem: ContextFull) -> dict[str, Any]:
        error = self.error(
            "Your input exceeds the context window of this model. Please adjust your input and try again. It has "
            f"{problem.num_prompt} tokens, but may have at most {problem.most}.",
            400,
        )["error"]
        return {"error": {**error, "param": "input", "code": CONTEXT_FULL}}


class _Events(Stream):
    def __init__(self, request: Request) -> None:
        self._request, self._id, self._number = request, secrets.token_hex(12), 0
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def begin(self) -> Iterable[Frame]:
        yield self._frame("response.created", response=_response(self._request, self._id, [], None))
        yield self._frame("response.in_progress", response=_response(self._request, self._id, [], None))

    def frames(self, event: Event) -> Iterable[Frame]:
        match event:
            case Thought(text=text):
                yield from self._into("reasoning")
                self._text += text
                yield self._frame("response.reasoning_text.delta", delta=text, **self._place())
            case Text(text=text):
                yield from self._into("message")
                self._text += text
                yield self._frame("response.output_text.delta", delta=text, logprobs=[], **self._place())
            case Answer() as answer:
                if answer.message.is_empty:
                    yield from self._into("message")
                yield from self._close()
                for call in answer.message.calls:
                    yield from self._call(call)
                whole = _response(self._request, self._id, self._done, answer)
                kind = "response.incomplete" if answer.finish == "length" else "response.completed"
                yield self._frame(kind, response=whole)

    def broken(self, message: str, status: int) -> Iterable[Frame]:
        yield self._frame("error", message=message, code=None, param=None)

    def _into(self, kind: str) -> Iterator[Frame]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        self._open, self._text = _item(kind, "", "in_progress"), ""
        yield self._frame(
            "response.output_item.added", output_index=len(self._done), item={**self._open, "content": []}
        )
        yield self._frame("response.content_part.added", part=self._open["content"][0], **self._place())

    def _close(self) -> Iterator[Frame]:
        if self._open is None:
            return
        item = {**_item(self._open["type"], self._text, "completed"), "id": self._open["id"]}
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: dict[str, Any] = {} if kind == "reasoning_text" else {"logprobs": []}
        yield self._frame(f"response.{kind}.done", text=self._text, **more, **self._place())
        yield self._frame("response.content_part.done", part=item["content"][0], **self._place())
        yield self._frame("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Frame]:
        item, index = _call_item(call), len(self._done)
        empty = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        yield self._frame("response.output_item.added", output_index=index, item=empty)
        yield self._frame("response.function_call_arguments.delta", delta=call.arguments, **place)
        done = {"arguments": call.arguments, "name": call.name}
        yield self._frame("response.function_call_arguments.done", **done, **place)
        yield self._frame("response.output_item.done", output_index=index, item=item)
        self._done.append(item)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "an item must be open"
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _frame(self, kind: str, **data: Any) -> Frame:
        self._number += 1
        return Frame({"type": kind, "sequence_number": self._number - 1, **data}, event=kind)


def _response(request: Request, id: str, output: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
    short = answer is not None and answer.finish == "length"
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if answer is None else "incomplete" if short else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None if answer is None else _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    message = answer.message
    if message.reasoning:
        yield _item("reasoning", message.reasoning, "completed")
    if message.text or message.is_empty:
        yield _item("message", message.text, "completed")
    for call in message.calls:
        yield _call_item(call)


def _item(kind: str, text: str, status: str) -> dict[str, Any]:
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        return {"type": kind, "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [part], "status": status}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": kind,
        "id": f"msg_{secrets.token_hex(12)}",
        "role": "assistant",
        "content": [part],
        "status": status,
    }


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _add(messages: list[Message], item: Mapping[str, Any], where: str, images: ImageParts) -> None:
    """Adds an input item to `messages`, merging the items of one model turn. Raises `BadRequest`."""
    kind, at = optional(item, "type", str, f"{where}.") or "message", f"{where}."
    match kind:
        case "message":
            role = role_of(item, where)
            text, seen = content_of(item.get("content"), f"{at}content", images, role)
            message = Message(role, text, images=seen)
            last = _turn(messages) if role == "assistant" else None
            if last is None:
                messages.append(message)
            else:
                messages[-1] = replace(last, text=last.text + message.text)
        case "reasoning":
            text = "".join(
                optional(part, "text", str, f"{at}content[].") or "" for part in objects(item, "content", at)
            )
            last = _turn(messages) or _begun(messages)
            messages[-1] = replace(last, reasoning=(last.reasoning or "") + text or None)
        case "function_call":
            arguments = canonical_arguments(optional(item, "arguments", str, at))
            call = ToolCall(required(item, "call_id", str, at), required(item, "name", str, at), arguments)
            last = _turn(messages) or _begun(messages)
            messages[-1] = replace(last, calls=(*last.calls, call))
        case "function_call_output":
            output, seen = content_of(item.get("output"), f"{at}output", images, "tool")
            messages.append(Message("tool", output, call_id=required(item, "call_id", str, at), images=seen))
        case _:
            raise BadRequest(f"an input item of type {kind[:80]!r} is not supported")


def _turn(messages: list[Message]) -> Message | None:
    """Returns the assistant message that an item continues; None if the last message is not from the assistant."""
    return messages[-1] if messages and messages[-1].role == "assistant" else None


def _begun(messages: list[Message]) -> Message:
    messages.append(Message("assistant"))
    return messages[-1]


def _tools(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the functions in the form that chat templates expect. Drops tools that run at the provider."""
    tools = []
    for i, tool in enumerate(objects(body, "tools")):
        if required(tool, "type", str, f"tools[{i}].") == "function":
            check_function(tool, f"tools[{i}].")
            function = {
                name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None
            }
            tools.append({"type": "function", "function": function})
    return tuple(tools) if lets_call(body) else ()
