"""OpenAI's Chat Completions API: POST /v1/chat/completions.

Supported: system, developer, user, assistant and tool messages, text and image parts, tools, and `reasoning_content` in
assistant messages. Rejected: multiple choices, log-probs, audio, forced calls, and the fields in `FIELDS.refused`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from slime.agent.adapters.adapter import Answer, ContextFull, Event, Frame, Request, Stream, Text, Thought, Wire
from slime.agent.adapters.fields import (
    GUIDED,
    SAMPLING,
    BadRequest,
    Fields,
    ImageParts,
    at_least_one,
    checked,
    kind_of,
    objects,
    optional,
    required,
    sampling,
    schema_text,
    stops,
)
from slime.agent.messages import Message, Picture, ToolCall, canonical_arguments

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
CONTEXT_FULL = "context_length_exceeded"
OLD_CALLS = "it is the old form of tools; send tools and tool_choice"
ENGINE_ONLY = f"{GUIDED}; ask for the format in the prompt"
FIELDS = Fields(
    works=frozenset(
        (
            *("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "n"),
            *("tools", "tool_choice", "response_format", *SAMPLING),
        )
    ),
    hints={
        **dict.fromkeys(
            ("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"), str
        ),
        **dict.fromkeys(("reasoning_effort", "verbosity"), str),
        **dict.fromkeys(("store", "parallel_tool_calls"), bool),
        **dict.fromkeys(("metadata", "prediction"), dict),
        "seed": int,
    },
    refused={
        "audio": "the model answers with text only",
        "modalities": "the model answers with text only",
        "function_call": OLD_CALLS,
        "functions": OLD_CALLS,
        "logit_bias": GUIDED,
        "logprobs": "log-probs are not available to agents; remove it from the request",
        "top_logprobs": "log-probs are not available to agents; remove it from the request",
        "web_search_options": "there is no search; give the model a tool that searches",
        # Fields that other servers add to this API.
        "chat_template_kwargs": "the run sets it for all requests with --apply-chat-template-kwargs",
        "continue_final_message": "the model always begins its own turn; end the messages with a user message",
        "min_tokens": GUIDED,
        "ignore_eos": GUIDED,
        "best_of": "only one choice per request is supported; send several requests",
        "use_beam_search": GUIDED,
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ENGINE_ONLY),
        **dict.fromkeys(("structured_outputs", "regex", "ebnf", "json_schema", "structural_tag"), ENGINE_ONLY),
    },
    defaults={"modalities": (["text"],), "function_call": ("none", "auto"), "best_of": (1,)},
)


class ChatCompletions(Wire):
    path = "/v1/chat/completions"
    fields = FIELDS

    def request(self, body: Mapping[str, Any]) -> Request:
        if (optional(body, "n", int) or 1) != 1:
            raise BadRequest(f"n is {body['n']}, but only one choice per request is supported; send n requests")
        messages = objects(body, "messages")
        if not messages:
            raise BadRequest("messages is empty; send at least one message")
        options = optional(body, "stream_options", dict) or {}
        older_limit = at_least_one(body, "max_tokens")  # checked even if the newer one applies
        return Request(
            messages=tuple(message_of(message, f"messages[{i}]", self.images) for i, message in enumerate(messages)),
            tools=tools_in(body),
            max_tokens=at_least_one(body, "max_completion_tokens") or older_limit,
            sampling=sampling(body, tuple(SAMPLING)),
            stop=stops(body, "stop"),
            streams=optional(body, "stream", bool) or False,
            model=optional(body, "model", str) or "",
            schema=schema_text(optional(body, "response_format", dict), "response_format", "json_schema"),
            counts=optional(options, "include_usage", bool, "stream_options.") or False,
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
        return {"error": {"message": message, "type": KINDS.get(status, "server_error"), "param": None, "code": None}}

    def context_full(self, problem: ContextFull) -> dict[str, Any]:
        error = self.error(
            f"This model's maximum context length is {problem.most} tokens. However, your messages resulted in "
            f"{problem.num_prompt} tokens. Please reduce the length of the messages.",
            400,
        )["error"]
        return {"error": {**error, "param": "messages", "code": CONTEXT_FULL}}


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
                if self._request.counts:
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


def message_of(given: Any, where: str, images: ImageParts) -> Message:
    """Parses one message of a request. `where`: its place in error messages. Raises `BadRequest`."""
    given = checked(given, dict, where)
    role, where = role_of(given, where), f"{where}."
    reasoning = optional(given, "reasoning_content", str, where) or optional(given, "reasoning", str, where)
    if given.get("function_call") or given.get("audio"):
        raise BadRequest(f"{where}function_call and {where}audio are not supported; send tool_calls and text")
    text, seen = content_of(given.get("content"), f"{where}content", images, role)
    return Message(
        role,
        text,
        reasoning=reasoning if reasoning and role == "assistant" else None,
        calls=tuple(_call(call, where) for call in objects(given, "tool_calls", where)),
        call_id=optional(given, "tool_call_id", str, where),
        name=optional(given, "name", str, where) if role == "tool" else None,
        images=seen,
    )


def role_of(given: Mapping[str, Any], where: str) -> str:
    """Returns the role of a message, as templates name it. Raises `BadRequest`."""
    role = required(given, "role", str, f"{where}.")
    if role not in ROLES:
        raise BadRequest(f"{where}.role is {role[:80]!r}, but must be one of {sorted(ROLES)}")
    return ROLES[role]


def _call(given: Mapping[str, Any], where: str) -> ToolCall:
    where = f"{where}tool_calls."
    function = required(given, "function", dict, where)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise BadRequest(f"{where}function.arguments is {kind_of(arguments)}, but must be a string of JSON")
    name = required(function, "name", str, f"{where}function.")
    return ToolCall(required(given, "id", str, where), name, canonical_arguments(arguments))


TEXTS = ("text", "input_text", "output_text", "refusal")


def content_of(content: Any, where: str, images: ImageParts, role: str) -> tuple[str, tuple[Picture, ...]]:
    """Returns the text and the images of a string or of parts; `where`: its field. Raises `BadRequest`."""
    if content is None or isinstance(content, str):
        return content or "", ()
    text, seen = "", list[Picture]()
    for i, part in enumerate(checked(content, list, where)):
        at = f"{where}[{i}]."
        kind = required(checked(part, dict, at[:-1]), "type", str, at)
        if kind in TEXTS:
            text += required(part, "refusal" if kind == "refusal" else "text", str, at)
        elif (image := images.of_part(part, at)) is None:
            raise images.refused("content part", kind)
        elif role == "assistant":
            raise BadRequest(f"{at[:-1]} is an image, which an assistant's message cannot contain")
        else:
            seen.append(Picture(len(text), image.digest, image.num_tokens))
    return text, tuple(seen)


def text_of(content: Any, where: str = "content") -> str:
    """Returns the text of a string or of text parts; `where`: its field. Raises `BadRequest` for anything else."""
    return content_of(content, where, ImageParts(), "user")[0]


def lets_call(body: Mapping[str, Any]) -> bool:
    """Returns whether the model may call tools, from tool_choice. Raises `BadRequest` for forced calls."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return choice != "none"
    shown = choice if isinstance(choice, str) else choice.get("type") if isinstance(choice, dict) else kind_of(choice)
    raise BadRequest(
        f"tool_choice is {str(shown)[:80]!r}, but must be auto or none: a forced call is not possible, because {GUIDED}"
    )


def tools_in(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the tools in the form that chat templates expect; none if tool_choice is "none". Raises `BadRequest`."""
    tools = objects(body, "tools")
    for i, tool in enumerate(tools):
        where = f"tools[{i}]."
        if required(tool, "type", str, where) != "function":
            raise BadRequest(f"{where}type is {tool['type'][:80]!r}, but only tools of type function are supported")
        check_function(required(tool, "function", dict, where), f"{where}function.")
    return tuple(tools) if lets_call(body) else ()


def check_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> None:
    """Checks the types that chat templates rely on. `schema`: the field of the parameters. Raises `BadRequest`."""
    required(function, "name", str, where)
    optional(function, "description", str, where)
    optional(function, schema, dict, where)
