"""What is wrong with a running server, found without disturbing it: its processes, and whether its scheduler answers.

`trouble` looks at the processes at each call: one that ended, or that somebody stopped (SIGSTOP), shows at once. A
thread beside it asks the server for its state in turns (`/server_info`, which the scheduler answers between two batches
of its work, also while it has no memory). A scheduler that is busy answers late, one that hangs never does: what tells
them apart besides is `slime.core.silence`, and whether its clients get tokens (`heard`).

Consumes: the answers of the server, tokens that others have seen, and /proc. Produces: one line of what is wrong. Waits
for: an answer, in its own thread, with a limit; `close` ends it. Is woken by: time, and `close`.

Invariants
1. A server is silent only while `expects_answers` says so: loading weights from disk may take a scheduler minutes.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.core.errors import EngineError
from slime.core.ports import ROUTED_EXPERTS_MARK, TOKEN_VERSIONS_KEY
from slime.core.silence import Silence
from slime.core.text import EngineKeys
from slime.serving.leased_ports import request


class ServerWatch:
    """Watches one server from when it answers to its end."""

    def __init__(
        self,
        processes: Callable[[], str | None],
        answers: Callable[[float], bool],
        *,
        interval_s: float,
        timeout_s: float,
        first_wait_s: float = 0.0,
        used_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes`: what is wrong with them, if anything. `answers`: asks once, with a limit in seconds.

        `interval_s`: between two questions; `timeout_s`: how long a server may be silent; `first_wait_s`: before the
        first question; `used_s`: processor time that its schedulers have used so far, if that is how they compute.
        """
        self._processes, self._answers = processes, answers
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._silence = Silence(used_s, begins_in_s=first_wait_s, clock=clock)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="server-watch", daemon=True)
        self._thread.start()

    def trouble(self, *, expects_answers: bool = True) -> str | None:
        """What is wrong now, in one line; None if nothing is known to be."""
        if problem := self._processes():
            return problem
        if not expects_answers:
            self.heard()
        if self._silence.exceeds(self._timeout_s + self._interval_s):
            silent_s = self._silence.lasts_s
            return f"its scheduler has not answered for {silent_s:.0f} s (--rollout-health-check-timeout)"
        return None

    def heard(self) -> None:
        """It lives: it has answered, or somebody else has seen it work."""
        self._silence.heard()

    def close(self) -> None:
        """Ends the questions; one that is under way ends by its own limit."""
        self._closed.set()

    def _ask(self) -> None:
        if self._closed.wait(self._first_wait_s):
            return
        while True:
            if self._answers(self._timeout_s):
                self.heard()
            if self._closed.wait(self._interval_s):
                return


# What a server that somebody else started says of itself, over SGLang 0.5.16's own routes.
#
# `ask` takes a second or two: the server's settings (`/server_info`), its model (`/model_info`), the names of the
# tensors that it holds and digests of them (`/weights_checker`), and a token (`/generate`), whose answer shows what no
# setting does: how a stream comes, and which hooks the server was started with. A server that an earlier run left
# paused is let go on first, or the token would never come.
#
# Consumes: an address and a key. Produces: `ServerFacts`, to be judged elsewhere. Waits for: the server, in the
# caller's thread, each answer with a limit. Is woken by nothing.

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
