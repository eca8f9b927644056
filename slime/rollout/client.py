"""`EngineClient`: token ids in; token ids, log-probs and weight version out, through one connection pool.

Who wakes whom: rollout tasks await `generate`; a `RequestScope` lets the loop end every request that its tasks have
running, wherever they are in user code. A cancelled or expired request is aborted in its engine by a background task,
because an engine does not notice at once that a client hung up; `drain` waits for those tasks.

Invariants
1. The ids of a `Generation` are the ids that the engine sampled, the end-of-sequence or stop token included; the text
   has lost the end token but keeps a matched stop string.
2. Each id has a finite log-prob and a weight version: the engine's word for each where requests live through
   publications, otherwise one for all.
3. Only what can succeed is tried again: connection errors, 408, 429, 502, 503, 504; a 500 once; no other 4xx ever. Each
   try has an id of its own, because an engine refuses one that it is still working on; the try before is aborted.
4. Nothing is sent that the engine or the router is known to mishandle: an id outside the vocabulary kills the SGLang
   0.5.16 scheduler, and sglang-router 0.3.2 drops sampling parameters that it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.core.ports import TOKEN_VERSIONS_KEY, WeightVersion
from slime.core.sample import FINISH_REASONS, NOT_SAMPLED

logger = logging.getLogger(__name__)

RETRY_STATUSES = frozenset({408, 429, 502, 503, 504})
MAY_RUN_STATUSES = frozenset({408, 500, 502, 504})
"""The router gave up on an engine that may still work on the request."""
MAX_TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
ABORT_TIMEOUT_S = 10.0
EVERY_REQUEST = ""
HOLD_POLL_S, HOLD_REPEAT, HOLD_POLLS = 0.01, 20, 200
"""An abort can overtake a request on its way to the engine, so it is repeated."""
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Read by the router under its consistent-hashing and manual policies."""
FORWARDED_SAMPLING_PARAMS = frozenset(
    [
        "temperature",
        "max_new_tokens",
        "min_new_tokens",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "json_schema",
        "regex",
        "ebnf",
        "sampling_seed",
    ]
)
"""What sglang-router 0.3.2 passes on; seen by sending every parameter to an echoing worker."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request sampled: `T` tokens."""

    tokens: tuple[int, ...]
    """[T] ids as sampled."""
    log_probs: tuple[float, ...]
    """[T] nats, of the distribution after temperature (the trainer divides its logits by the same number)."""
    finish_reason: str
    """stop | length | abort"""
    weight_version: WeightVersion | tuple[WeightVersion, ...]
    """Of all tokens, or [T] of each; `NOT_SAMPLED` only if T is 0 and the request never reached an engine."""
    text: str
    """For graders and people: without the end token, with a matched stop string."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache."""


NEVER_SENT = Generation((), (), "abort", NOT_SAMPLED, "")
"""The answer to a request whose scope was aborted before it was sent."""


@dataclass(slots=True)
class RequestScope:
    """The requests of one rollout. Tasks inherit it through `REQUEST_SCOPE`; aborting it reaches all of them."""

    rids: set[str] = field(default_factory=set)
    aborted: bool = False


REQUEST_SCOPE: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)


Post = Callable[[Mapping[str, Any], Mapping[str, str], RequestScope | None], Awaitable[tuple[int, bytes]]]
"""Sends one try and returns status and body."""


class EngineClient:
    """One router (or one server), many requests. Use on one event loop; `close` at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float = 600.0,
        max_concurrency: int = 256,
        vocab_size: int | None = None,
        api_key: str | None = None,
        token_versions: bool = False,
    ) -> None:
        """`max_concurrency`: requests in flight at most. `vocab_size`: ids beyond it kill an engine and are refused.
        `api_key`: the token that the engines ask for. `token_versions`: engines must tell the version of each token.
        """
        self.base_url = base_url.rstrip("/")
        self.max_concurrency = max_concurrency
        self._request_timeout_s, self._vocab_size = request_timeout_s, vocab_size
        self._token_versions = token_versions
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples a continuation of `input_ids`.

        Raises `RequestRejected` if the request can never succeed, `EngineError` if engine or router fail or answer
        nonsense, `DeadlineExceeded` after `request_timeout_s` (queueing in this client not counted).
        """
        scope, (payload, headers) = REQUEST_SCOPE.get(), self._request(input_ids, sampling_params, session_id)
        async with self._slots:
            await self._open.wait()
            if scope is not None and scope.aborted:
                return NEVER_SENT
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    answer = await self._post_with_retries(payload, headers, scope)
            except TimeoutError as expiry:
                self._abort_later([payload["rid"]])
                raise self._late(payload) from expiry
            except asyncio.CancelledError:
                self._abort_later([payload["rid"]])
                raise
        return NEVER_SENT if answer is None else parse_generation(answer, self._token_versions)

    async def abort_scope(self, scope: RequestScope) -> None:
        """Ends all requests of a scope: running ones return their partial tokens, later ones are never sent."""
        scope.aborted = True
        await self._abort(list(scope.rids))

    async def hold(self, scope: RequestScope) -> None:
        """Ends every request of the engines; those of `scope` return what they have. Later ones wait for `release`.

        What has not ended after `HOLD_POLLS` is left to the engine.
        """
        self._open.clear()
        for turn in range(HOLD_POLLS):
            if not scope.rids:
                return
            if turn % HOLD_REPEAT == 0:
                await self._abort([EVERY_REQUEST])
            await asyncio.sleep(HOLD_POLL_S)

    def release(self) -> None:
        """Requests go again."""
        self._open.set()

    async def workers(self) -> list[str]:
        """Addresses of the servers behind the router; a server that is no router is its own only worker."""
        try:
            async with self._get_session().get(f"{self.base_url}/workers", timeout=_limit(ABORT_TIMEOUT_S)) as response:
                if response.status == 404:
                    return [self.base_url]
                return [str(worker["url"]).rstrip("/") for worker in (await response.json())["workers"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as problem:
            raise EngineError(f"{self.base_url}/workers did not list its workers: {problem!r}") from problem

    async def drain(self) -> None:
        """Waits until every abort that was started in the background has been delivered (or given up)."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def close(self) -> None:
        """Delivers pending aborts, then closes the pool."""
        await self.drain()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _check_request(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> None:
        unknown = sorted(set(sampling_params) - FORWARDED_SAMPLING_PARAMS)
        if unknown:
            raise RequestRejected(
                f"got sampling parameters {unknown}, which the router would drop without a word; use only "
                f"{sorted(FORWARDED_SAMPLING_PARAMS)}"
            )
        if not input_ids:
            raise RequestRejected("got an empty prompt; an engine needs at least one token to continue")
        if self._vocab_size is not None and not (min(input_ids) >= 0 and max(input_ids) < self._vocab_size):
            raise RequestRejected(
                f"got prompt ids from {min(input_ids)} to {max(input_ids)}, because the model has {self._vocab_size} "
                "tokens; check that tokenizer and model belong together"
            )

    def _request(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], session_id: str | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Payload and headers of a request that may be sent. Raises `RequestRejected`."""
        self._check_request(input_ids, sampling_params)
        params = {**sampling_params, "no_stop_trim": False}
        payload = {"rid": uuid.uuid4().hex, "input_ids": list(input_ids), "sampling_params": params}
        return {**payload, "return_logprob": True}, {ROUTING_KEY_HEADER: session_id} if session_id else {}

    def _late(self, payload: Mapping[str, Any]) -> DeadlineExceeded:
        owner, what = f"request {payload['rid']}", f"{self.base_url}/generate"
        return DeadlineExceeded.waiting(owner=owner, for_what=what, limit_s=self._request_timeout_s)

    async def _post_with_retries(
        self, payload: dict[str, Any], headers: dict[str, str], scope: RequestScope | None, post: Post | None = None
    ) -> dict[str, Any] | None:
        """The engine's answer; None if the scope was aborted between two tries. `payload["rid"]` is the try's.

        `post`: sends one try, `_post` unless said otherwise.
        """
        pause_s, problem = FIRST_PAUSE_S, "no try"
        for attempt in range(MAX_TRIES):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if scope is not None and scope.aborted:
                    return None
                payload["rid"] = uuid.uuid4().hex
            try:
                status, body = await (post or self._post)(payload, headers, scope)
            except aiohttp.ClientError as broken:
                problem = f"{type(broken).__name__}: {broken}"
                if not isinstance(broken, aiohttp.ClientConnectorError):
                    self._abort_later([payload["rid"]])  # it may have reached the engine
                continue
            text = body[:300].decode(errors="replace")
            if status == 200:
                return _decode(body)
            problem = f"HTTP {status}: {text}"
            if status in MAY_RUN_STATUSES:
                self._abort_later([payload["rid"]])
            if status == 500 and attempt > 0:
                break
            if status not in RETRY_STATUSES and status != 500:
                raise RequestRejected(
                    f"{self.base_url}/generate refused a request of {len(payload['input_ids'])} ids: {problem}"
                )
        raise EngineError(f"{self.base_url}/generate failed after {attempt + 1} tries; the last one said: {problem}")

    async def _post(
        self, payload: Mapping[str, Any], headers: Mapping[str, str], scope: RequestScope | None
    ) -> tuple[int, bytes]:
        """One try: status and body. The scope can abort it while it lasts."""
        rid = payload["rid"]
        if scope is not None:
            scope.rids.add(rid)
        try:
            async with self._get_session().post(f"{self.base_url}/generate", json=payload, headers=headers) as response:
                return response.status, await response.read()
        finally:
            if scope is not None:
                scope.rids.discard(rid)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # the semaphore is the limit; aborts must not queue behind it
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
            )
        return self._session

    def _abort_later(self, rids: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(rids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, rids: Iterable[str]) -> None:
        """Tells every worker to abort these requests; a worker that does not know one ignores it. Never raises."""
        rids = list(rids)
        if not rids:
            return
        try:
            urls = await self.workers()
        except EngineError as problem:
            logger.warning("%d requests could not be aborted: %s", len(rids), problem)
            return
        await asyncio.gather(*(self._abort_one(url, rid) for url in urls for rid in rids))

    async def _abort_one(self, url: str, rid: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._get_session().post(
                f"{url}/abort_request",
                json={"rid": rid, "abort_all": rid == EVERY_REQUEST},
                timeout=_limit(ABORT_TIMEOUT_S),
            ):
                pass


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError as problem:
        raise EngineError(f"got an answer of {len(body)} bytes that is not JSON: {body[:100]!r}") from problem
    if not isinstance(answer, dict):
        raise EngineError(f"got a {type(answer).__name__} as answer to one prompt; expected an object")
    return answer


def parse_generation(answer: Mapping[str, Any], token_versions: bool = False) -> Generation:
    """Reads and checks a `/generate` answer (SGLang 0.5.16). Raises `EngineError` if an invariant does not hold.

    `token_versions`: the engine must tell the version of each token.
    """
    meta = answer.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    reason = finish.get("type")
    if reason not in FINISH_REASONS:
        raise EngineError(f"got finish_reason {finish!r}; expected one of {sorted(FINISH_REASONS)}")
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        raise EngineError("got an answer without output_token_logprobs; was return_logprob dropped on the way?")
    tokens = tuple(int(pair[1]) for pair in pairs)
    log_probs = tuple(math.nan if pair[0] is None else float(pair[0]) for pair in pairs)
    bad = next((i for i, value in enumerate(log_probs) if not math.isfinite(value)), None)
    if bad is not None:
        raise EngineError(
            f"got log-prob {pairs[bad][0]} for token {bad} of {len(tokens)} (id {tokens[bad]}); it must be finite"
        )
    output_ids = answer.get("output_ids")
    if output_ids is not None and tuple(output_ids) != tokens:
        raise EngineError(
            f"got {len(output_ids)} output ids and log-probs of {len(tokens)} other ids; they must be the same ids"
        )
    version = str(meta.get("weight_version", ""))
    if not version.isdecimal():
        raise EngineError(
            f"got weight_version {version!r}; a trained token needs the integer version that sampled it: "
            "serve only after a verified weight sync"
        )
    versions = tuple(meta.get(TOKEN_VERSIONS_KEY) or ())
    if token_versions and tokens and not versions and reason == "abort":  # ended while it waited to be read anew
        return Generation((), (), reason, int(version), "")
    odd = [v for v in versions if not 0 < v <= int(version) and v != int(version)]  # 0: nothing was ever published
    if token_versions and (odd or len(versions) != len(tokens)):
        raise EngineError(
            f"got versions {sorted(set(versions))} of {len(versions)} tokens for {len(tokens)}, because the engine did "
            "not label each; look for errors of hooks in its log"
        )
    matched = finish.get("matched")
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        finish_reason=reason,
        weight_version=versions if token_versions else int(version),
        text=str(answer.get("text", "")) + (matched if isinstance(matched, str) else ""),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )
