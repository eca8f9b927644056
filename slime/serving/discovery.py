"""What a server that somebody else started says of itself, over SGLang 0.5.16's own routes.

`ask` takes a second or two: the server's settings (`/server_info`), its model (`/model_info`), the names of the tensors
that it holds and digests of them (`/weights_checker`), and a token (`/generate`), whose answer shows what no setting
does: how a stream comes, and which hooks the server was started with. A server that an earlier run left paused is let
go on first, or the token would never come.

Consumes: an address and a key. Produces: `ServerFacts`, to be judged elsewhere. Waits for: the server, in the caller's
thread, each answer with a limit. Is woken by nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.core.errors import EngineError
from slime.core.ports import ROUTED_EXPERTS_MARK, TOKEN_VERSIONS_KEY
from slime.core.text import EngineKeys
from slime.serving.plain_http import request

NUM_PROBED = 4
"""Tokens of the answer that shows how streams come: enough for several events."""
NOT_YET = (0, 502, 503, 504)
"""Statuses of a server that is being started, or of what stands before it; 0 is none."""
KEYS = ("api_key", "admin_api_key")
HIDDEN = (*KEYS, "internal_states")
"""Answered, but nothing to keep."""
SAID = 300
"""Characters of a refusal in an error."""


class NotAnswering(EngineError):
    """Nobody answers at an address, or not yet."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What an answer of a few tokens showed."""

    repeats: bool
    """Whether each event of a stream repeats all before it."""
    labels: bool
    """Whether it tells the weight version of each token."""
    experts: bool
    """Whether it returns routed experts to a request that asks by its id."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    url: str
    info: Mapping[str, Any]
    """Its settings by the names of ServerArgs, and `version`, SGLang's."""
    model: Mapping[str, Any]
    """`model_type`, `architectures`, `is_generation`, `weight_version`, `model_path`."""
    resident: frozenset[str] = frozenset()
    """Tensors that its ranks hold, by name."""
    probe: Probe | None = None
    """None if it gave no answer: `problem` says why."""
    problem: str = field(default="", compare=False)
    asks_for_key: bool = True


def server_info(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """The settings of a server, which its scheduler answers. Raises `EngineError` if it does not."""
    info = _object("GET", url, "server_info", None, api_key, timeout_s)
    return {name: value for name, value in info.items() if name not in HIDDEN}


def weight_version(url: str, api_key: str | None, timeout_s: float) -> str:
    """What it calls the weights that it serves; its front door says so, whatever its scheduler does. Raises
    `EngineError` if it does not answer.
    """
    return str(_object("GET", url, "model_info", None, api_key, timeout_s).get("weight_version"))


def go_on(url: str, api_key: str | None, timeout_s: float) -> None:
    """Lets a paused server serve again; one that is not paused stays as it is. Raises `EngineError`."""
    _answer("POST", url, "continue_generation", {}, api_key, timeout_s)


def ask(url: str, keys: EngineKeys, timeout_s: float, digests_s: float, *, experts: bool) -> ServerFacts:
    """Everything. `digests_s` limits the digests, `timeout_s` all other answers; `experts`: routed experts are asked
    for as well.

    Raises `EngineError` if the server cannot be reached, turns the key down, or is none of SGLang's.
    """
    info = server_info(url, keys.use, timeout_s)
    model = _object("GET", url, "model_info", None, keys.use, timeout_s)
    go_on(url, keys.control, timeout_s)
    report = _object("POST", url, "weights_checker", {"action": "checksum"}, keys.control, digests_s)
    resident = frozenset(name for rank in report.get("ranks") or () for name in rank["checksums"])
    try:
        probe, problem = _probed(url, keys.use, timeout_s, experts=experts), ""
    except EngineError as error:
        probe, problem = None, str(error)
    return ServerFacts(url, info, model, resident, probe, problem, asks_for_key=_is_closed(url, timeout_s))


def _is_closed(url: str, timeout_s: float) -> bool:
    """Whether it turns down who has no key."""
    return request("GET", f"{url}/model_info", timeout_s=timeout_s)[0] in (401, 403)


def _probed(url: str, api_key: str | None, timeout_s: float, *, experts: bool) -> Probe:
    rid = f"probe-{uuid.uuid4().hex}{f'{ROUTED_EXPERTS_MARK}0' if experts else ''}"
    params = {"max_new_tokens": NUM_PROBED, "ignore_eos": True, "temperature": 1.0, "stream_interval": 1}
    body = {"rid": rid, "input_ids": [0, 1], "sampling_params": params, "return_logprob": True, "stream": True}
    text = _answer("POST", url, "generate", body, api_key, timeout_s)
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
    if not events or any("error" in event for event in events):
        raise EngineError(f"it sampled nothing: {text[:SAID]}")
    lengths = [len(event.get("output_ids") or ()) for event in events]
    metas = [event.get("meta_info") or {} for event in events]
    return Probe(
        repeats=sum(lengths) > NUM_PROBED,
        labels=any(meta.get(TOKEN_VERSIONS_KEY) for meta in metas),
        experts=any(meta.get("routed_experts") is not None for meta in metas),
    )


def _object(method: str, url: str, route: str, body: Any, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    text = _answer(method, url, route, body, api_key, timeout_s)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineError(f"it answered /{route} without a JSON object: {text[:SAID]}; is it an SGLang server?")
    return found


def _answer(method: str, url: str, route: str, body: Any, api_key: str | None, timeout_s: float) -> str:
    status, text = request(method, f"{url}/{route}", body, timeout_s=timeout_s, api_key=api_key)
    if status in (401, 403):
        raise EngineError(
            f"it turns down our key at /{route} ({status}); give the ones that it was started with in "
            "SLIME_ENGINE_API_KEY and, if it has an admin key, SLIME_ENGINE_ADMIN_API_KEY"
        )
    if status in NOT_YET:
        raise NotAnswering(f"it does not answer /{route}: {text[:SAID]}")
    if status != 200:
        raise EngineError(f"it answered /{route} with {status}: {text[:SAID]}")
    return text
