"""Requests of three APIs and what each must get: a table, asked over HTTP, whole and as streams, of a real adapter.

The SDKs' own models validate each response strictly, and the SDKs' clients raise the errors.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from slime.agent.adapters.adapter import Answer, Request, events_of
from slime.agent.adapters.anthropic import FIELDS as CLAUDE_FIELDS
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.fields import Fields
from slime.agent.adapters.openai_chat import FIELDS as CHAT_FIELDS
from slime.agent.adapters.openai_responses import FIELDS as RESPONSES_FIELDS
from slime.agent.adapters.openai_responses import Responses
from slime.agent.messages import Message as MessageOfUs
from slime.agent.messages import ToolCall
from slime.agent.parsers import FORMATS
from slime.rollout.generate import Limits
from tests.contract.agent.test_sdks import LIMIT_S, called
from tests.support.agent_room import Room, agent_room

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
FLAT_TOOL = {"type": "function", **WEATHER}
CLAUDE_TOOL = {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
USER = {"role": "user", "content": "hello"}
ROME = called("Rome")
PNG = "iVBORw0KGgo="
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "18 C"}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
USED = {"type": "tool_result", "tool_use_id": "c1", "content": "18 C"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "18 C"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@dataclass(frozen=True)
class Want:
    """What a request must get, beside a body that the SDK's model takes."""

    text: str = "fine"
    finish: str = "stop"
    """stop | length | calls | a stop string"""
    cities: tuple[str, ...] = ()
    """Of the calls."""
    thought: str = ""
    read: str = ""
    """What the engine must find in the prompt."""
    params: tuple[tuple[str, Any], ...] = ()
    """Sampling parameters that the engine must get."""


FINE = Want()
Case = tuple[str, dict[str, Any], str, Want | str]
"""(name, the body beside a model and a message, what the model says, what the agent gets or the reason of an error)"""


def both(name: str, *bodies: dict[str, Any], said: str = "fine", want: Want | str = FINE) -> list[Case]:
    return [(f"{name} {i}", body, said, want) for i, body in enumerate(bodies)]


GIVEN: dict[type, Any] = {str: "a", bool: True, int: 1, list: ["a"], dict: {"a": "b"}}
"""JSON type -> a value of it."""


def hints(fields: Fields) -> list[Case]:
    """Every field without effect, with each type that it may have, and with each that it may not have."""
    cases = list[Case]()
    for name, kinds in sorted(fields.hints.items()):
        for kind, value in GIVEN.items():
            sound = kind in (kinds if isinstance(kinds, tuple) else (kinds,))
            cases += both(f"hint {name}", {name: value}, want=FINE if sound else f"{name} is .*, but must be")
        cases += both(f"no hint {name}", {name: None})
    return cases


def messages(*given: Any) -> dict[str, Any]:
    return {"messages": list(given)}


def asks(content: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": content})


CHAT: list[Case] = [
    *both("plain", {}, {"stream": False}, {"n": 1}, {"n": None}, {"user": "u", "metadata": {"a": "b"}, "store": True}),
    *hints(CHAT_FIELDS),
    *both("hint", {"seed": 1.0}, {"parallel_tool_calls": False}),
    *both("unknown fields", {"usage": {"include": True}}, {"provider": {"order": []}}, {"thinking": {"type": "off"}}),
    *both("unset", *({name: None} for name in sorted(CHAT_FIELDS.refused)), {"logprobs": False}, {"logit_bias": {}}),
    *both("defaults", {"modalities": ["text"]}, {"function_call": "none"}, {"response_format": {"type": "text"}}),
    *both("sampling is the run's", {"temperature": 0.2}, {"top_p": 1}, want=Want(params=(("temperature", 1.0),))),
    *both("parts", asks([{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]), want=Want(read="hello")),
    *both("no content", asks(None), asks(""), asks([])),
    *both("system", messages({"role": "system", "content": "Be brief."}, USER), want=Want(read="Be brief.")),
    *both("developer", messages({"role": "developer", "content": "Be brief."}, USER), want=Want(read="Be brief.")),
    *both("odd text", asks("\u0000 \u202e \U0001f600"), asks("<|im_end|>"), asks("x" * 5000)),
    *both("limit", {"max_tokens": 1}, {"max_completion_tokens": 1}, {"max_tokens": 1.0}, want=Want("fine", "length")),
    *both("large limit", {"max_tokens": 10**30}, {"max_tokens": 2**63}, want=Want(params=(("max_new_tokens", 1000),))),
    *both("stop", {"stop": "B"}, {"stop": ["x", "B"]}, said="aBc", want=Want("a", "B")),
    *both("no stop", {"stop": None}, {"stop": []}, {"stop": ""}, {"stop": ["", "Z"]}, said="aBc", want=Want("aBc")),
    *both("thinking", {}, said="<think>\nhm\n</think>\n\nfine", want=Want(thought="hm")),
    *both("calls", {"tools": [TOOL]}, said="So " + called("Rome", "Oslo"), want=Want("So ", "calls", ("Rome", "Oslo"))),
    *both("auto", {"tools": [TOOL], "tool_choice": "auto"}, said=ROME, want=Want("", "calls", ("Rome",))),
    *both("no call", {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}, said=ROME, want=Want(ROME)),
    *both(
        "results",
        messages(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT),
        messages(USER, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "name": "weather"}),
        messages(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**RESULT, "content": None}, USER),
        want=Want(read="Rome"),
    ),
    *both(
        "arguments",
        *(
            messages(
                USER,
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": a}}]},
                RESULT,
            )
            for a in ({"city": "Rome"}, None, "", "not JSON", "[" * 2000, '{"a": 1e999}', '{"a": "\\ud800"}')
        ),
    ),
    *both("a thought of old", messages(USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER)),
    *both("two of a role", messages(USER, USER), messages(USER, {"role": "assistant", "content": "a"})),
    *both("refused", *({name: {"a": 1}} for name in sorted(CHAT_FIELDS.refused)), want="is not supported: "),
    *both("choices", {"n": 2}, {"n": 128}, want="only one choice"),
    *both(
        "forced", *({"tools": [TOOL], "tool_choice": c} for c in ("required", TOOL, {}, 3)), want="must be auto or none"
    ),
    *both(
        "format",
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        want="ask for JSON in the prompt",
    ),
    *both(
        "format", {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}, want="response_"
    ),
    *both("no messages", {"messages": []}, {"messages": None}, want="at least one message"),
    *both(
        "types",
        *({name: {"a": [1]}} for name in ("messages", "model", "stream", "max_tokens", "stop", "n", "tools")),
        *({name: "a"} for name in ("temperature", "stream", "max_tokens", "n", "tools", "stream_options")),
        *({"messages": m} for m in ("hi", [3], ["hi"], [None], [[]], {"role": "user"})),
        *(messages({"role": r, "content": "a"}) for r in (3, None, "nobody", ["user"])),
        *(asks(c) for c in (3, True, {"a": 1}, [3], ["a"], [{"type": "text"}], [{"type": "text", "text": 3}], [{}])),
        *({"stop": s} for s in (3, [3], [["a"]], {"a": "b"}, True)),
        *({"tools": t} for t in ([3], [{}], [{"type": "function"}], [{"type": "function", "function": {}}], "a")),
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": "b"}}]},
        {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
        *(messages(USER, {"role": "assistant", "tool_calls": c}, RESULT) for c in (3, [3], [{}], [{"id": "a"}])),
        *({"temperature": t} for t in (-1, 1e300, True, [1])),
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        want=r"must be|missing|is supported|are supported|at least",
    ),
    *both(
        "not text",
        asks([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + PNG}}]),
        asks([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
        asks([{"type": "file", "file": {"file_id": "f"}}]),
        want="is not supported, because the model is text-only",
    ),
    *both("old calls", messages(USER, {"role": "assistant", "function_call": {"name": "a"}}), want="not supported"),
    *both("full", asks("word " * 4000), want="maximum context length is 3999 tokens.*resulted in [0-9]{4} tokens"),
]


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


def speaks(content: Any) -> dict[str, Any]:
    return items({"role": "user", "content": content})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def talk(answer: Any, reply: Any) -> dict[str, Any]:
    return messages(USER, {"role": "assistant", "content": answer}, {"role": "user", "content": reply})


SPOKEN = {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "a"}]}
REASONING = {"type": "reasoning", "id": "r", "summary": []}
RESPONSES: list[Case] = [
    *both("plain", {}, {"input": "hello"}, speaks("hello"), speaks([{"type": "input_text", "text": "hello"}])),
    *hints(RESPONSES_FIELDS),
    *both("unset", *({name: None} for name in sorted(RESPONSES_FIELDS.refused)), {"background": False}),
    *both("instructions", {"instructions": "Be brief."}, want=Want(read="Be brief.")),
    *both("include", {"include": ["reasoning.encrypted_content"]}, {"include": []}),
    *both("text", {"text": {"format": {"type": "text"}}}, {"text": {"verbosity": "low"}}, {"text": {}}),
    *both("limit", {"max_output_tokens": 1}, want=Want(finish="length")),
    *both("thinking", {}, said="<think>\nhm\n</think>\n\nfine", want=Want(thought="hm")),
    *both("calls", {"tools": [FLAT_TOOL]}, said="So " + ROME, want=Want("So ", "calls", ("Rome",))),
    *both("provider's tools", {"tools": [{"type": "web_search"}, {"type": "custom", "name": "a"}]}),
    *both("no call", {"tools": [FLAT_TOOL], "tool_choice": "none"}, said=ROME, want=Want(ROME)),
    *both(
        "turns",
        items(USER, SPOKEN, USER),
        items(USER, CALLED, OUTPUT),
        items(USER, SPOKEN, CALLED, {**OUTPUT, "output": [{"type": "input_text", "text": "18 C"}]}),
        items(
            USER,
            {**REASONING, "content": None, "encrypted_content": "x"},
            CALLED,
            OUTPUT,
        ),
        items(
            USER,
            {**REASONING, "content": [{"type": "reasoning_text", "text": "b"}]},
            SPOKEN,
            USER,
        ),
        items({"type": "message", "role": "developer", "content": "Be brief."}, USER),
    ),
    *both("refused", *({name: {"a": 1}} for name in sorted(RESPONSES_FIELDS.refused)), want="is not supported: "),
    *both("log-probs", {"include": ["message.output_text.logprobs"]}, want="not available to agents"),
    *both(
        "forced",
        *({"tools": [FLAT_TOOL], "tool_choice": c} for c in ("required", {"type": "function", "name": "weather"})),
        want="must be auto or none",
    ),
    *both(
        "format",
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        want="ask for JSON in the prompt",
    ),
    *both("empty", {"input": []}, {"input": None}, want="at least one item"),
    *both(
        "types",
        *({name: {"a": [1]}} for name in ("input", "instructions", "model", "stream", "max_output_tokens", "tools")),
        *({name: "a"} for name in ("stream", "max_output_tokens", "tools", "text", "temperature", "include")),
        *(items(item) for item in (3, None, "a", [], {"type": 3}, {"type": "message"}, {"role": "nobody"})),
        *(speaks(c) for c in (3, [3], [{"type": "input_text", "text": None}], [{"text": "a"}])),
        *(items(USER, {**CALLED, name: 3}) for name in ("call_id", "name", "arguments")),
        *(items(USER, CALLED, {**OUTPUT, name: 3}) for name in ("call_id", "output")),
        items(USER, {"type": "reasoning", "content": "a"}),
        {"text": {"format": "json"}},
        {"tools": [{"name": "a"}]},
        {"tools": [{"type": "function"}]},
        {"max_output_tokens": 0},
        want=r"must be|missing|at least",
    ),
    *both(
        "items", items({"type": "item_reference", "id": "a"}), items({"type": "web_search_call"}), want="not supported"
    ),
    *both("not text", speaks([{"type": "input_image", "image_url": "x"}]), want="the model is text-only"),
    *both("full", {"input": "word " * 4000}, want="exceeds the context window"),
]
CLAUDE: list[Case] = [
    *both("plain", {}, asks([{"type": "text", "text": "hello"}]), {"stream": False}, {"max_tokens": 40.0}),
    *hints(CLAUDE_FIELDS),
    *both("unset", *({name: None} for name in sorted(CLAUDE_FIELDS.refused)), {"mcp_servers": []}),
    *both("effort", {"output_config": {"effort": "low"}}, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
    *both(
        "system", {"system": "Be brief."}, {"system": [{"type": "text", "text": "Be brief."}]}, want=Want(read="Be bri")
    ),
    *both("limit", {"max_tokens": 1}, want=Want(finish="length")),
    *both("stop", {"stop_sequences": ["B"]}, {"stop_sequences": ["x", "B"]}, said="aBc", want=Want("a", "B")),
    *both("no stop", {"stop_sequences": []}, {"stop_sequences": ["Z"]}, said="aBc", want=Want("aBc")),
    *both("thinking", {}, said="<think>\nhm\n</think>\n\nfine", want=Want(thought="hm")),
    *both("calls", {"tools": [CLAUDE_TOOL]}, said="So " + ROME, want=Want("So ", "calls", ("Rome",))),
    *both("calls", {"tools": [{**CLAUDE_TOOL, "type": "custom"}]}, said=ROME, want=Want("", "calls", ("Rome",))),
    *both("no call", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "none"}}, said=ROME, want=Want(ROME)),
    *both(
        "turns",
        talk([USE], [USED]),
        talk([text("a"), USE], [USED, text("go")]),
        talk([{"type": "thinking", "thinking": "b", "signature": ""}, USE], [{**USED, "is_error": True}]),
        talk([{"type": "redacted_thinking", "data": "x"}, USE], [{**USED, "content": None}]),
        talk([USE], [{**USED, "content": [text("18")]}]),
        messages(USER, {"role": "assistant", "content": "a"}, USER),
    ),
    *both("refused", *({name: {"a": 1}} for name in sorted(CLAUDE_FIELDS.refused)), want="is not supported: "),
    *both(
        "forced",
        *({"tools": [CLAUDE_TOOL], "tool_choice": c} for c in ({"type": "any"}, {"type": "tool", "name": "weather"})),
        want="must be auto or none",
    ),
    *both(
        "format",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        want="ask for JSON in the prompt",
    ),
    *both("prefill", messages(USER, {"role": "assistant", "content": "{"}), want="does not support prefill"),
    *both("empty", {"messages": []}, {"messages": None}, want="at least one message"),
    *both(
        "types",
        *(
            {name: {"a": [1]}}
            for name in ("messages", "system", "model", "stream", "max_tokens", "stop_sequences", "tools")
        ),
        *(
            {name: "a"}
            for name in ("messages", "stream", "max_tokens", "tools", "tool_choice", "output_config", "top_k")
        ),
        *(messages(m) for m in (3, None, "a", [], {"role": "nobody"}, {"role": 3}, {"content": "a"})),
        *(asks(c) for c in (3, {"a": 1}, [3], ["a"], [{}], [{"type": "text"}], [{"type": "text", "text": 3}])),
        *(messages(USER, {"role": "assistant", "content": [{**USE, n: 3}]}, USER) for n in ("id", "name", "input")),
        *(asks([{**USED, name: 3}]) for name in ("tool_use_id", "content")),
        {"tools": [3]},
        {"tools": [{"input_schema": {}}]},
        {"tools": [{"name": "a", "input_schema": "b"}]},
        {"tool_choice": {}},
        {"max_tokens": 0},
        {"top_k": 10**18},
        want=r"must be|missing|at least",
    ),
    *both(
        "provider's tool",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        want="input_schema is missing",
    ),
    *both(
        "not text", asks([{"type": "image", "source": {"type": "base64", "data": PNG}}]), want="the model is text-only"
    ),
    *both("full", asks("word " * 4000), want="prompt is too long: [0-9]{4} tokens > 3999 maximum"),
]
CASES = {"chat": CHAT, "responses": RESPONSES, "claude": CLAUDE}
CHUNK, EVENT, CLAUDE_EVENT = (
    TypeAdapter[Any](t) for t in (ChatCompletionChunk, ResponseStreamEvent, RawMessageStreamEvent)
)


class Api:
    """One API as its SDK speaks it, with bodies that the SDK's own functions would not send."""

    def __init__(self, name: str, room: Room) -> None:
        self.name, self.room, self.key = name, room, ""
        shared: Any = {"api_key": "none yet", "max_retries": 0, "timeout": LIMIT_S}
        self.client: Any
        if name == "claude":
            self.client = anthropic.AsyncAnthropic(base_url=room.url, **shared)
            self.path, self.base = "/v1/messages", {"model": "m", "max_tokens": 50, "messages": [USER]}
            return
        self.client = openai.AsyncOpenAI(base_url=f"{room.url}/v1", **shared)
        self.path, self.base = "/chat/completions", {"model": "m", "messages": [USER]}
        if name == "responses":
            self.path, self.base = "/responses", {"model": "m", "input": "hello"}

    async def ask(self, body: dict[str, Any], *, streams: bool) -> Want:
        """Returns what the agent sees. Raises the SDK's errors, and pydantic's if the SDK's model refuses the body."""
        self.key = self.room.adapter.open_session(limits=Limits(max_context_len=4000))
        given = {**self.base, **body, **({"stream": True} if streams else {})}
        client = self.client.with_options(api_key=self.key)
        got = await client.post(self.path, body=given, cast_to=str)
        if streams:
            frames = [line[6:] for line in got.split("\n") if line.startswith("data: ")]
            return getattr(self, f"{self.name}_stream")(frames)  # type: ignore[no-any-return]
        return getattr(self, self.name)(got)  # type: ignore[no-any-return]

    def chat(self, content: str) -> Want:
        [choice] = ChatCompletion.model_validate_json(content, strict=True).choices
        said = choice.message
        calls: Any = said.tool_calls or []
        cities = tuple(json.loads(call.function.arguments)["city"] for call in calls)
        return self.want(said.content, choice.finish_reason, cities, getattr(said, "reasoning_content", ""))

    def chat_stream(self, frames: list[str]) -> Want:
        assert frames.pop() == "[DONE]"
        text, thought, cities, finish = "", "", list[str](), ""
        for chunk in [CHUNK.validate_json(frame, strict=True) for frame in frames]:
            [choice] = chunk.choices  # agents read the first one of each chunk
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", "") or ""
            cities += [json.loads(call.function.arguments)["city"] for call in choice.delta.tool_calls or ()]
            finish = choice.finish_reason or finish
        return self.want(text, finish, tuple(cities), thought)

    def responses(self, content: str) -> Want:
        whole = Response.model_validate_json(content, strict=True)
        cities = tuple(json.loads(o.arguments)["city"] for o in whole.output if o.type == "function_call")
        thought = "".join(p.text for o in whole.output if o.type == "reasoning" for p in o.content or ())
        return self.want(whole.output_text, "calls" if cities else str(whole.status), cities, thought)

    def responses_stream(self, frames: list[str]) -> Want:
        events = [EVENT.validate_json(frame, strict=True) for frame in frames]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        whole = self.responses(json.dumps(json.loads(frames[-1])["response"]))
        assert text == whole.text
        return whole

    def claude(self, content: str) -> Want:
        whole = Message.model_validate_json(content, strict=True)
        assert (whole.stop_sequence is not None) == (whole.stop_reason == "stop_sequence")
        return self.blocks(
            [block.model_dump() for block in whole.content], whole.stop_sequence or str(whole.stop_reason)
        )

    def claude_stream(self, frames: list[str]) -> Want:
        blocks, finish = list[dict[str, Any]](), ""
        for event in [CLAUDE_EVENT.validate_json(frame, strict=True) for frame in frames if '"ping"' not in frame]:
            match event.type:
                case "content_block_start":
                    blocks.append({**event.content_block.model_dump(), "json": ""})
                case "content_block_delta":
                    for name in ("text", "thinking"):
                        blocks[event.index][name] = blocks[event.index].get(name, "") + getattr(event.delta, name, "")
                    blocks[event.index]["json"] += getattr(event.delta, "partial_json", "")
                case "message_delta":
                    finish = event.delta.stop_sequence or event.delta.stop_reason
        for block in blocks:
            block["input"] = json.loads(block["json"] or "{}")
        return self.blocks(blocks, finish)

    def blocks(self, blocks: list[dict[str, Any]], finish: str) -> Want:
        cities = tuple(block["input"]["city"] for block in blocks if block["type"] == "tool_use")
        text, thought = ("".join(b[k] for b in blocks if b["type"] == k) for k in ("text", "thinking"))
        return self.want(text, finish, cities, thought)

    def want(self, text: str | None, finish: str, cities: tuple[str, ...], thought: str | None) -> Want:
        names = {"end_turn": "stop", "completed": "stop", "max_tokens": "length", "incomplete": "length"}
        names |= {"tool_use": "calls", "tool_calls": "calls"}
        return Want(text or "", names.get(finish, finish), cities, (thought or "").strip())

    def refusal(self, error: openai.APIStatusError | anthropic.APIStatusError) -> str:
        """The message of an error, which must have the API's shape."""
        body = error.response.json()
        if self.name == "claude":
            assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
        else:
            assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
            full = "context" in body["error"]["message"]
            assert body["error"]["code"] == ("context_length_exceeded" if full else None)
        assert error.status_code == 400 and body["error"]["type"] == "invalid_request_error"
        return str(body["error"]["message"])


def close(got: Want, want: Want, api: str) -> bool:
    finish = want.finish
    if finish not in ("stop", "length", "calls") and api != "claude":
        finish = "stop"
    return (got.text.strip(), got.finish, got.cities, got.thought) == (
        want.text.strip(),
        finish,
        want.cities,
        want.thought,
    ) or (finish == got.finish == "length" and want.text.startswith(got.text))


def wrong(api: Api, body: dict[str, Any], got: Want, want: Want) -> Iterator[str]:
    if not close(got, want, api.name):
        yield f"got {got}"
    asked = api.room.model.requests[-1]
    if want.read not in api.room.tokenizer.decode(asked["input_ids"]):
        yield f"the prompt lacks {want.read!r}"
    if any(asked["sampling_params"].get(name) != value for name, value in want.params):
        yield f"the engine got {asked['sampling_params']}"


@pytest.mark.parametrize("name", CASES)
async def test_each_request_of_the_table_gets_what_its_api_promises(name: str) -> None:
    async with agent_room() as room:
        api, outcomes = Api(name, room), Counter[str]()
        for case, body, said, want in CASES[name]:
            for streams in (False, True):
                if streams and body.get("stream", True) is not True:
                    continue
                room.model.script.clear()
                room.says(said)
                try:
                    got = await api.ask(body, streams=streams)
                except (openai.APIStatusError, anthropic.APIStatusError) as error:
                    reason = api.refusal(error)
                    assert isinstance(want, str) and re.search(want, reason), (case, body, reason)
                    outcomes["refused"] += 1
                else:
                    assert isinstance(want, Want), (case, body, got)
                    problems = list(wrong(api, body, got, want))
                    assert not problems, (case, streams, body, problems)
                    outcomes["served"] += 1
                room.adapter.drop_session(api.key)
        assert outcomes["served"] > 50 and outcomes["refused"] > 50, outcomes


SAYS = {
    "text": "a",
    "nothing": "",
    "thinking and text": "<think>\nhm\n</think>\n\na",
    "thinking alone": "<think>\nhm\n</think>\n\n",
    "thinking that is not closed": "<think>\nhm",
    "no thought": "<think>\n\n</think>\n\n",
    "thinking and a call": f"<think>\nhm\n</think>\n\n{ROME}",
    "thinking that is not closed, and a call": f"<think>\nhm {ROME}",
    "text and a call": f"a{ROME}",
    "a call": ROME,
    "white space": "\n \n",
}


def blocks_in(api: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """(type, text) of the parts of an answer."""
    if api == "responses":
        texts = {"reasoning": "content", "message": "content"}
        return [
            (one["type"], one[texts[one["type"]]][0]["text"] if one["type"] in texts else "") for one in body["output"]
        ]
    return [(one["type"], one.get("thinking") or one.get("text") or "") for one in body["content"]]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("said", SAYS)
async def test_a_stream_has_the_parts_of_the_whole_answer(said: str, opened: bool) -> None:
    """Law: none more and none fewer, also where the model begins its thinking, or the prompt, and nothing ends it."""
    text = SAYS[said].removeprefix("<think>\n" if opened else "")
    reader = FORMATS.build("hermes", None).reader([TOOL], "<think>\n" if opened else "")
    parts = [event for letter in text for event in events_of(reader.feed(letter))]
    held, parsed = reader.end()
    calls = tuple(ToolCall("c", *call) for call in parsed.calls)
    message = MessageOfUs("assistant", parsed.text, parsed.reasoning, calls)
    answer = Answer("id", message, "calls" if calls else "stop", 1, 1, 0, parsed.ill_formed)
    events = [*parts, *events_of(held), answer]
    for wire in (Messages(), Responses()):
        name, request = wire.path.rpartition("/")[2], Request((), model="m")
        stream = wire.stream(request)
        frames = [*stream.begin(), *(frame for event in events for frame in stream.frames(event))]
        whole = blocks_in(name, wire.response(answer, request))
        assert whole, "an answer has a part"
        data: Any = [frame.data for frame in frames]
        if name == "responses":
            assert blocks_in(name, data[-1]["response"]) == whole
            continue
        found = [[one["content_block"]["type"], ""] for one in data if one["type"] == "content_block_start"]
        for one in data:
            if one["type"] == "content_block_delta":
                found[one["index"]][1] += one["delta"].get("text", "") + one["delta"].get("thinking", "")
        assert [tuple(one) for one in found] == whole


async def test_tokens_of_a_conversation_that_ends_with_an_answer_can_be_counted() -> None:
    """Claude Code counts such conversations, though it asks for no answer to them."""
    async with agent_room() as room:
        claude = anthropic.AsyncAnthropic(base_url=room.url, api_key=room.key, max_retries=0, timeout=LIMIT_S)
        given: Any = [USER, {"role": "assistant", "content": "fine"}]
        assert (await claude.messages.count_tokens(model="m", messages=given)).input_tokens > 5


def test_the_table_is_long() -> None:
    assert sum(map(len, CASES.values())) > 200
