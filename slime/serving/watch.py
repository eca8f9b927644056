"""Monitors a running server (`ServerWatch`) and inspects an external one (`facts_of_server`).

`ServerWatch.trouble` checks the processes on each call, so it immediately reports a process that exited or was stopped
(SIGSTOP). A thread polls `/server_info`, which the scheduler answers between batches, even while its memory is lent
out. A busy scheduler responds late and a hung one never does; `slime.core.liveness` tells them apart. Tokens received
by clients also count as signs of life (`heard`). Silence counts only while `expects_answers` is true, because a
scheduler can take minutes to load weights from disk.

`facts_of_server` takes a second or two. It requests the settings (`/server_info`), the model (`/model_info`), the names
and digests of the tensors (`/weights_checker`), and a few tokens (`/generate`), which reveal the stream format and the
server's hooks. Each request has a timeout. The server is resumed first, because one that an earlier run left paused
would never send tokens.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.core.engine_interface import ROUTED_EXPERTS_MARK, SESSION_CONFLICT, TOKEN_VERSIONS_KEY
from slime.core.errors import EngineError
from slime.core.liveness import Silence
from slime.core.text import EngineKeys
from slime.serving.control import digests_of_weights
from slime.serving.leased_ports import request


class ServerWatch:
    """Monitors a ready server until `close`."""

    def __init__(
        self,
        processes: Callable[[], str | None],
        answers: Callable[[float], bool],
        *,
        interval_s: float,
        timeout_s: float,
        first_wait_s: float = 0.0,
        used_s: Callable[[], float] | None = None,
        stands: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes`: returns a problem with the server's processes, or None. `answers`: sends one request with a
        timeout in seconds and returns whether the server responded.

        `interval_s`: interval between requests; `timeout_s`: how long the server may be silent; `first_wait_s`: delay
        before the first request; `used_s`: CPU time of the schedulers, if it counts as a sign of life; `stands`: says
        where the server's processes stand.
        """
        self._processes, self._answers = processes, answers
        self._stands, self._hung = stands, ""
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._silence = Silence(used_s, begins_in_s=first_wait_s, clock=clock)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="server-watch", daemon=True)
        self._thread.start()

    def trouble(self, *, expects_answers: bool = True) -> str | None:
        """Returns the current problem in one line, or None."""
        if problem := self._processes():
            return problem
        if not expects_answers:
            self.heard()
        if self._silence.exceeds(self._timeout_s + self._interval_s):
            silent_s = self._silence.lasts_s
            if not self._hung and self._stands is not None:
                self._hung = f": {self._stands()}"
            return f"its scheduler has not responded for {silent_s:.0f} s (--rollout-health-check-timeout){self._hung}"
        self._hung = ""
        return None

    def heard(self) -> None:
        """Records a sign of life: a response, or tokens received by a client."""
        self._silence.heard()

    def close(self) -> None:
        """Stops polling. A request in flight runs until it is answered or times out."""
        self._closed.set()

    def _ask(self) -> None:
        if self._closed.wait(self._first_wait_s):
            return
        while True:
            if self._answers(self._timeout_s):
                self.heard()
            if self._closed.wait(self._interval_s):
                return


NUM_PROBED = 4
"""Number of tokens requested by the probe; enough for several stream events."""
NOT_YET = (0, 502, 503, 504)
"""Status codes while a server is starting, possibly from a proxy in front of it. 0 means no response."""
KEYS = ("api_key", "admin_api_key")
HIDDEN = (*KEYS, "internal_states")
"""Fields of `/server_info` to drop."""
SAID = 300


class NotAnswering(EngineError):
    """No server responds at the address, or it is still starting."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Properties of a server, detected by requesting a few tokens."""

    repeats: bool
    """Whether each stream event repeats the earlier tokens."""
    labels: bool
    """Whether responses contain the weight version of each token."""
    experts: bool
    """Whether a marker in the request id makes the response contain routed experts."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    url: str
    info: Mapping[str, Any]
    """ServerArgs by name, and SGLang's `version`."""
    model: Mapping[str, Any]
    """`model_type`, `architectures`, `is_generation`, `weight_version`, `model_path`."""
    resident: frozenset[str] = frozenset()
    """Names of the tensors on the server's ranks."""
    probe: Probe | None = None
    """None if the server sampled nothing; `problem` says why."""
    problem: str = field(default="", compare=False)
    asks_for_key: bool = True
    is_open: bool = False
    """Whether a weight update was interrupted. The server samples nothing until an update succeeds."""


def server_info(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Requests a server's settings from its scheduler. Raises `EngineError` if the scheduler does not respond."""
    info = _object("GET", url, "server_info", None, api_key, timeout_s)
    return {name: value for name, value in info.items() if name not in HIDDEN}


def weight_version(url: str, api_key: str | None, timeout_s: float) -> str:
    """Returns a server's current weight version. Raises `EngineError` if the server does not respond.

    The response comes from the front end, so it arrives even if the scheduler hangs.
    """
    return str(_object("GET", url, "model_info", None, api_key, timeout_s).get("weight_version"))


def facts_of_server(url: str, keys: EngineKeys, timeout_s: float, digests_s: float, *, experts: bool) -> ServerFacts:
    """Inspects a server.

    `digests_s`: timeout of the digest request; `timeout_s`: timeout of every other request; `experts`: whether to also
    request routed experts.

    Raises `EngineError` if the server cannot be reached, rejects the key, or is not an SGLang server.
    """
    info = server_info(url, keys.use, timeout_s)
    model = _object("GET", url, "model_info", None, keys.use, timeout_s)
    is_open = not _resume(url, keys, timeout_s)
    report = _object("POST", url, "weights_checker", {"action": "checksum"}, keys.control, digests_s)
    resident = frozenset(name for rank in report.get("ranks") or () for name in digests_of_weights(rank))
    try:
        probe, problem = None if is_open else _probed(url, keys.use, timeout_s, experts=experts), ""
    except EngineError as error:
        probe, problem = None, str(error)
    asks_for_key = request("GET", f"{url}/model_info", timeout_s=timeout_s)[0] in (401, 403)
    return ServerFacts(url, info, model, resident, probe, problem, asks_for_key, is_open)


def _resume(url: str, keys: EngineKeys, timeout_s: float) -> bool:
    """Resumes a server that an earlier run paused. Returns False if an open weight update prevents it."""
    status, text = request("POST", f"{url}/continue_generation", {}, timeout_s=timeout_s, api_key=keys.control)
    if status != SESSION_CONFLICT:
        _require_success(status, text, "continue_generation")
    return status != SESSION_CONFLICT


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
        raise EngineError(f"its response to /{route} is not a JSON object: {text[:SAID]}; is it an SGLang server?")
    return found


def _answer(method: str, url: str, route: str, body: Any, api_key: str | None, timeout_s: float) -> str:
    status, text = request(method, f"{url}/{route}", body, timeout_s=timeout_s, api_key=api_key)
    _require_success(status, text, route)
    return text


def _require_success(status: int, text: str, route: str) -> None:
    """Raises `NotAnswering` or `EngineError` for a status other than 200."""
    if status in (401, 403):
        raise EngineError(
            f"it rejects the run's key at /{route} ({status}); set SLIME_ENGINE_API_KEY and, if the server has an "
            "admin key, SLIME_ENGINE_ADMIN_API_KEY to the keys that it was started with"
        )
    if status in NOT_YET:
        raise NotAnswering(f"it does not respond to /{route}: {text[:SAID]}")
    if status != 200:
        raise EngineError(f"it responded to /{route} with status {status}: {text[:SAID]}")
