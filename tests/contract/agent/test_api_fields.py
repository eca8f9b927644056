"""Fields of requests: each that the SDKs know is in a table and in the docs, and no body at all is an error of ours."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import aiohttp
import openai
import pytest
import zstandard
from anthropic.types import (
    ContentBlockParam,
    message_count_tokens_params,
    message_create_params,
    tool_result_block_param,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionContentPartParam, completion_create_params
from openai.types.responses import response_create_params
from openai.types.responses.response_function_call_output_item_list_param import ResponseFunctionCallOutputItemParam
from openai.types.responses.response_input_message_content_list_param import ResponseInputContentParam

from slime.agent.adapters.anthropic import FIELDS as CLAUDE_FIELDS
from slime.agent.adapters.fields import MAX_BODY_BYTES, Fields
from slime.agent.adapters.openai_chat import FIELDS as CHAT_FIELDS
from slime.agent.adapters.openai_responses import FIELDS as RESPONSES_FIELDS
from slime.core.sample import Sample
from tests.contract.agent.test_conformance import CASES
from tests.contract.agent.test_sdks import USER, aopenai
from tests.support.agent_room import Room, agent_room
from tests.support.vision import CHATML_TEMPLATE, COLOURS, data_uri, drawn

RED = drawn(40, 24, [COLOURS["red"]])
PARAMS: dict[str, tuple[Fields, tuple[Any, ...]]] = {
    "chat": (
        CHAT_FIELDS,
        (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
    ),
    "responses": (
        RESPONSES_FIELDS,
        (
            response_create_params.ResponseCreateParamsNonStreaming,
            response_create_params.ResponseCreateParamsStreaming,
        ),
    ),
    "messages": (
        CLAUDE_FIELDS,
        (
            message_create_params.MessageCreateParamsNonStreaming,
            message_create_params.MessageCreateParamsStreaming,
            beta_create_params.MessageCreateParamsNonStreaming,
            beta_create_params.MessageCreateParamsStreaming,
            message_count_tokens_params.MessageCountTokensParams,
            beta_count_tokens_params.MessageCountTokensParams,
        ),
    ),
}


@pytest.mark.parametrize("api", PARAMS)
def test_every_field_that_the_installed_sdks_know_is_in_one_table_and_in_the_docs(api: str) -> None:
    fields, types = PARAMS[api]
    known = {name for kind in types for name in kind.__required_keys__ | kind.__optional_keys__}
    assert len(known) > 15
    tables = (set(fields.works), set(fields.hints), set(fields.refused))
    assert known <= set.union(*tables), f"new fields: {sorted(known - set.union(*tables))}"
    assert sum(map(len, tables)) == len(set.union(*tables)), "a field is in two tables"
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    section = page.partition("### Fields of requests")[2].partition("## Limits")[0]
    assert known <= set(re.findall(r"`([a-z_]+)`", section))


def json_types(hint: Any) -> set[type]:
    """The JSON types that an annotation of an SDK allows, beside null."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired, Annotated):
        return json_types(inner[0])
    if origin in (Union, UnionType):
        return set.union(*map(json_types, inner))
    if origin is Literal:
        return {type(value) for value in inner}
    kind = origin or hint
    if kind is type(None):
        return set()
    if isinstance(kind, type) and issubclass(kind, dict):
        return {dict}
    return {list} if kind in (list, Iterable) else {kind}


@pytest.mark.parametrize("api", PARAMS)
def test_a_field_without_effect_has_the_type_that_the_installed_sdks_give_it(api: str) -> None:
    fields, kinds = PARAMS[api]
    known: dict[str, Any] = {}
    for kind in kinds:
        known |= get_type_hints(kind)
    ours = {name: set(one) if isinstance(one, tuple) else {one} for name, one in fields.hints.items()}
    assert {name: json_types(known[name]) for name in ours if name in known} == {n: ours[n] for n in ours if n in known}
    assert len(ours.keys() & known.keys()) > 9


PARTS: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "chat/completions": ((ChatCompletionContentPartParam,), {"text", "image_url"}),
    "responses": ((ResponseInputContentParam, ResponseFunctionCallOutputItemParam), {"input_text", "input_image"}),
    "messages": ((ContentBlockParam, tool_result_block_param.Content), {"text", "image", "tool_result"}),
}
"""Route -> the parts of messages and results as the SDKs know them, and those that work in a user's message."""


def kinds_of(union: Any) -> set[str]:
    hints = (get_type_hints(one, include_extras=False) for one in get_args(union))
    return {kind for hint in hints for kind in get_args(hint["type"])}


@pytest.mark.parametrize("route", PARTS)
async def test_every_part_of_a_message_that_the_installed_sdks_know_is_read_or_refused(
    route: str, tmp_path: Path
) -> None:
    """Law: by a model that reads images; what is refused is named, and what works is in the docs."""
    unions, works = PARTS[route]
    known = set.union(*map(kinds_of, unions))
    assert works < known and len(known) >= 3
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    section = page.partition("### Fields of requests")[2].partition("## Limits")[0]
    assert works <= set(re.findall(r"`([a-z_]+)`", section))
    async with agent_room(template=CHATML_TEMPLATE, image_folder=tmp_path) as room, aiohttp.ClientSession() as web:

        async def answer_to(part: Any) -> tuple[int, str]:
            message = {"role": "user", "content": [part]}
            body = {"input": [message]} if route == "responses" else {"max_tokens": 9, "messages": [message]}
            headers = {"Authorization": f"Bearer {room.key}"}
            async with web.post(f"{room.url}/v1/{route}", json=body, headers=headers) as answer:
                return answer.status, ((await answer.json()).get("error") or {}).get("message", "")

        for kind in known - works:
            status, said = await answer_to({"type": kind})
            assert status == 400 and f"of type {kind!r} is not supported" in said, (kind, said)
        uri, data = data_uri(RED), data_uri(RED).partition(",")[2]
        given: dict[str, Any] = {
            "image_url": {"image_url": {"url": uri}},
            "input_image": {"image_url": uri},
            "image": {"source": {"type": "base64", "media_type": "image/png", "data": data}},
            "tool_result": {"tool_use_id": "t", "content": "red"},
        }
        for kind in works:
            room.says("fine")
            assert await answer_to({"type": kind, **given.get(kind, {"text": "What?"})}) == (200, ""), kind


async def test_a_body_that_arrives_after_the_end_of_its_session_is_refused() -> None:
    async with agent_room() as room:
        room.says("one")
        arrived, begun = asyncio.Event(), asyncio.Event()

        async def slowly() -> Any:
            yield b'{"model": "m", "messages": [{"role": "user",'
            begun.set()
            await arrived.wait()
            yield b' "content": "hello"}]}'

        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(
                http.post(
                    f"{room.url}/v1/chat/completions",
                    data=slowly(),
                    headers={"Authorization": f"Bearer {room.key}", "Content-Type": "application/json"},
                )
            )
            await begun.wait()
            await asyncio.sleep(0.05)  # the head of the request is read
            assert room.adapter.finish_session(room.key, Sample(index=0, group_index=0)) == []
            arrived.set()
            answer = await asking
            assert answer.status == 401 and "open session" in (await answer.json())["error"]["message"]
        assert not room.model.requests


async def test_a_full_context_is_an_error_that_a_shorter_history_mends() -> None:
    """Law: an agent that shortens its history goes on, in a branch of its own; one that ends there is truncated."""
    async with agent_room(max_context_tokens=60) as room:
        room.says("one two", "three")
        client = aopenai(room)
        first = await client.chat.completions.create(model="m", messages=USER)
        told: Any = {"role": "assistant", "content": first.choices[0].message.content}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="m", messages=[*USER, told, {"role": "user", "content": "word " * 80}]
            )
        assert caught.value.code == "context_length_exceeded"
        session = room.adapter.session(room.key)
        base = Sample(index=0, group_index=0)
        assert [s.status.value for s in session.samples(base)] == ["truncated"]
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "shorter"}])
        assert [s.status.value for s in session.samples(base)] == ["completed", "completed"]
        assert [len(body["input_ids"]) < 60 for body in room.model.requests] == [True, True]


PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "claude": "/v1/messages",
    "count": "/v1/messages/count_tokens",
}
BASES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": USER},
    "responses": {"model": "m", "input": USER},
    "claude": {"model": "m", "max_tokens": 9, "messages": USER},
}
BASES["count"] = BASES["claude"]
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\u0000", "<|im_end|>", "text", "user", "assistant", "tool", "function", "auto"]),
)
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "id", "input", "arguments", "function", "tool_calls", "call_id"),
        *("tool_use_id", "parameters", "input_schema", "reasoning_content", "thinking", "output", "summary", "stop"),
        *sorted(CHAT_FIELDS.works | RESPONSES_FIELDS.works | CLAUDE_FIELDS.works),
    ]
)
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    """(API, a body that is anything, or a good one from the table with some of its values replaced)."""
    api = draw(st.sampled_from(sorted(PATHS)))
    if draw(st.integers(0, 9)) == 0:
        return api, draw(VALUES)
    _, body, _, _ = draw(st.sampled_from(CASES["claude" if api == "count" else api]))
    body = json.loads(json.dumps({**BASES[api], **body}))
    for _ in range(draw(st.integers(0, 3))):
        _mutate(draw, body)
    return api, body


def _mutate(draw: Any, value: Any) -> None:
    """Replaces, adds or removes something at some depth."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if isinstance(value, dict) and (not places or draw(st.integers(0, 4)) == 0):
            value[draw(KEYS)] = draw(VALUES)
            return
        if not places:
            value.append(draw(VALUES))
            return
        place = draw(st.sampled_from(places))
        if isinstance(value[place], dict | list) and draw(st.integers(0, 4)):
            value = value[place]
        elif draw(st.integers(0, 3)):
            value[place] = draw(VALUES)
            return
        else:
            del value[place]
            return


ASKS = b'"messages": [{"role": "user", "content": "a"}]'
TOOL = b'{"type": "function", "function": {"name": "a", "parameters": '
CALL = b'{"id": "a", "type": "function", "function": {"name": "a", "arguments": "'
RAW = [
    *(b"", b"null", b"[]", b"3", b"{", b"\xff\xfe", b'{"messages": NaN}', b'{"a": 1e999}', b'{"model": "\\ud800"}'),
    *(b'{"messages": ' + b"[" * n + b"]" * n + b"}" for n in (200, 900, 5000)),
    *(b"{" + ASKS + b', "tools": [' + TOOL + b'{"a": ' * n + b"1" + b"}" * n + b"}}]}" for n in (200, 900)),
    b'{"messages": [{"role": "user", "content": ' + b'[{"type": "text", "text": ' * 500 + b'"a"' + b"}]" * 500 + b"}]}",
    b'{"messages": [{"role": "assistant", "tool_calls": [' + CALL + b"[" * 3000 + b'"}}]}]}',
    b"{" + ASKS + b', "max_tokens": ' + b"9" * 5000 + b"}",
]
"""Bodies that no JSON writer makes, and some that are nested deeply."""


async def _status(http: aiohttp.ClientSession, room: Room, api: str, body: bytes) -> tuple[int, bytes]:
    key = room.adapter.open_session(max_context_tokens=4000)
    room.model.script.clear()
    room.says("fine", "fine")
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with http.post(room.url + PATHS[api], data=body, headers=headers) as answer:
            return answer.status, await answer.read()
    finally:
        room.adapter.drop_session(key)


async def _never_ours(num: int) -> None:
    async with agent_room() as room, aiohttp.ClientSession() as http:
        loop, seen = asyncio.get_running_loop(), list[int]()

        async def check(api: str, body: bytes) -> None:
            status, said = await _status(http, room, api, body)
            seen.append(status)
            assert status in (200, 400), (api, body[:2000], status, said[:500])
            if status == 400:
                error = json.loads(said)["error"]
                assert error["type"] == "invalid_request_error" and error["message"], said

        for api in PATHS:
            for body in RAW:
                await check(api, body)

        @settings(
            max_examples=num,
            database=None,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies())
        def any_body(drawn: tuple[str, Any]) -> None:
            api, body = drawn
            asyncio.run_coroutine_threadsafe(check(api, json.dumps(body).encode()), loop).result()

        await asyncio.to_thread(any_body)
        assert seen.count(200) > num // 20 and seen.count(400) > num // 5, (seen.count(200), seen.count(400))


@pytest.mark.parametrize("num", [60, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_no_body_whatever_is_an_error_of_the_server(num: int) -> None:
    """Law: any JSON gets an answer or HTTP 400 in the API's shape: clients would repeat a request after HTTP 500."""
    await _never_ours(num)


@pytest.mark.parametrize("name", PATHS)
async def test_a_body_that_cannot_be_decoded_is_an_error_of_the_api(name: str) -> None:
    """Bodies that are not in the encoding of their header; the same JSON that is, is read."""
    sound = json.dumps(BASES[name]).encode()
    packed = gzip.compress(sound)
    faulty = {"gzip": [sound, packed[:-9], packed + b"x"], "deflate": [b"\xff" + sound], "zstd": [sound, packed]}
    faulty |= {"br": [b"\x0b\x02\x80{}\x03"], "gzip, br": [packed], "nonsense": [sound]}
    read = {"gzip": packed, "deflate": zlib.compress(sound), "zstd": zstandard.compress(sound), "identity": sound}
    large = b" " * (MAX_BODY_BYTES + 1)
    async with agent_room() as room, aiohttp.ClientSession() as http:

        async def asked(encoding: str, body: bytes) -> tuple[int, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {room.key}", "Content-Encoding": encoding, "Connection": "close"}
            async with http.post(room.url + PATHS[name], data=body, headers=headers) as answer:
                return answer.status, await answer.json()

        for encoding, bodies in faulty.items():
            for body in bodies:
                status, answer = await asked(encoding, body)
                assert status == 400 and encoding in answer["error"]["message"], answer
                assert answer["error"]["type"] == "invalid_request_error"
        for encoding, body in read.items():
            room.says("fine")
            assert (await asked(encoding, body))[0] == 200, encoding
        for encoding, body in {"gzip": gzip.compress(large, 1), "zstd": zstandard.compress(large)}.items():
            assert (await asked(encoding, body))[0] == 413, encoding


async def test_an_unknown_route_is_an_error_in_the_form_of_both_apis() -> None:
    async with agent_room() as room, aiohttp.ClientSession() as http:
        for method, path in (("POST", "/v1/embeddings"), ("GET", PATHS["chat"]), ("GET", "/"), ("PUT", "/v1/models")):
            async with http.request(method, room.url + path) as answer:
                given = await answer.json()
            assert answer.status == 404 and given["type"] == "error"
            assert given["error"].keys() == {"type", "message", "param", "code"}
            assert given["error"]["type"] == "not_found_error" and f"{method} {path}" in given["error"]["message"]
        with pytest.raises(openai.NotFoundError, match="no route POST /v1/embeddings"):
            await aopenai(room).embeddings.create(model="m", input="a")


async def test_models_refuse_an_unknown_key_in_the_form_of_both_apis() -> None:
    async with agent_room() as room, aiohttp.ClientSession() as http:
        async with http.get(f"{room.url}/v1/models", headers={"Authorization": "Bearer none"}) as answer:
            given = await answer.json()
        assert answer.status == 401 and given["type"] == "error"
        assert given["error"].keys() == {"type", "message", "param", "code"}
        assert given["error"]["type"] == "authentication_error"


async def test_an_older_limit_of_a_wrong_type_is_refused_beside_the_newer_one() -> None:
    async with agent_room() as room, aiohttp.ClientSession() as http:
        body = {**BASES["chat"], "max_completion_tokens": 9, "max_tokens": "many"}
        headers = {"Authorization": f"Bearer {room.key}"}
        async with http.post(room.url + PATHS["chat"], json=body, headers=headers) as answer:
            assert answer.status == 400 and "max_tokens" in (await answer.json())["error"]["message"]
