"""What a request may demand of its answer works on a CPU; what cannot be demanded is refused, and the server lives."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime.serving.leased_ports import request
from slime.serving.server import SGLangServer

SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["right", "digit"],
    "additionalProperties": False,
}
REGEX = "(yes|no) [0-9]{3}"
LIMIT_S = 120.0


def generate(server: SGLangServer, **demands: Any) -> tuple[int, str]:
    sampling = {"temperature": 1.0, "max_new_tokens": 64, **demands}
    body = {"text": "hello", "sampling_params": sampling, "return_logprob": True}
    return request("POST", f"{server.url}/generate", body, timeout_s=LIMIT_S)


def text_of(answer: tuple[int, str]) -> str:
    assert answer[0] == 200, answer
    return str(json.loads(answer[1])["text"])


def is_what_the_schema_says(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"right", "digit"} and isinstance(found["right"], bool) and 0 <= found["digit"] <= 9


def test_demands_on_an_answer_are_met_side_by_side_with_a_plain_request(engine_server: SGLangServer) -> None:
    demands: list[dict[str, Any]] = [{"json_schema": json.dumps(SCHEMA)}, {"regex": REGEX}, {"ignore_eos": True}]
    with ThreadPoolExecutor(len(demands)) as pool:
        by_schema, by_regex, plain = pool.map(lambda demand: text_of(generate(engine_server, **demand)), demands)
    # A random model may fill the space between two words of JSON until its tokens are used up.
    assert not by_schema.rstrip().endswith("}") or is_what_the_schema_says(by_schema), by_schema
    assert by_schema.lstrip().startswith("{"), by_schema
    assert re.fullmatch(REGEX, by_regex), by_regex
    assert plain and not re.fullmatch(REGEX, plain)
    assert text_of(generate(engine_server, ignore_eos=True)), "a plain request after them"


def test_the_openai_route_keeps_to_a_schema(engine_server: SGLangServer) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    }
    status, text = request("POST", f"{engine_server.url}/v1/chat/completions", body, timeout_s=LIMIT_S)
    assert status == 200, text
    choice = json.loads(text)["choices"][0]
    assert choice["finish_reason"] == "length" or is_what_the_schema_says(choice["message"]["content"]), text


@pytest.mark.parametrize("demand", [{"json_schema": "{bad"}, {"json_schema": '{"type": "nothing"}'}, {"regex": "("}])
def test_what_cannot_be_demanded_is_refused_with_a_reason(engine_server: SGLangServer, demand: dict[str, str]) -> None:
    status, text = generate(engine_server, **demand)
    assert status == 400 and "Failed to compile" in text, text
    assert text_of(generate(engine_server, ignore_eos=True)), "the server serves on"
