"""`TeacherClient`: computes the log-probs of tokens under a served teacher.

A request waits for a free slot. It then waits up to `--request-timeout-s` for the teacher's server or router.

Invariants
1. The log-probs belong to exactly the ids that were sent; a mismatch is an error.
2. Within the limit, a request is retried after lost connections, 408, 429, 502, 503 and 504, and once after a 500.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.core.liveness import backoff_s
from slime.core.text import EngineKeys
from slime.rollout.client.call import check_request
from slime.rollout.client.retries import FIRST_RETRY_S, LONGEST_RETRY_S, MAX_TRIES, MAY_RUN_STATUSES, RETRY_STATUSES
from slime.rollout.client.wire import Wire, decode
from slime.rollout.guard import waiting


class TeacherClient:
    """A client of a served teacher. Call `close` at the end."""

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float = 600.0,
        max_concurrency: int = 256,
        vocab_size: int | None = None,
        api_key: str | None = None,
    ) -> None:
        """`max_concurrency`: maximum number of concurrent requests. The other parameters are as in `EngineClient`."""
        self._url, self._request_timeout_s, self._vocab_size = url.rstrip("/"), request_timeout_s, vocab_size
        self._slots, self._wire = asyncio.Semaphore(max_concurrency), Wire(EngineKeys(api_key))

    async def log_probs(self, tokens: Sequence[int], num_response: int) -> list[float]:
        """Returns the log-probs of the last tokens in nats, shape [num_response], each conditioned on all earlier
        tokens, at temperature 1.

        Raises `RequestRejected`, `EngineError`, or `DeadlineExceeded` after `request_timeout_s`.
        """
        if not num_response:
            return []
        params = {"max_new_tokens": 0, "temperature": 1.0}
        check_request(tokens, params, self._vocab_size)
        start = len(tokens) - num_response - 1
        payload = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True}
        with waiting():
            answer = await self._answer({**payload, "logprob_start_len": start})
        return parse_log_probs(answer, tokens[-num_response:], self._vocab_size)

    async def close(self) -> None:
        await self._wire.close()

    async def _answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        async with self._slots:
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await self._ask(payload)
            except TimeoutError as expiry:
                raise DeadlineExceeded.waiting(
                    owner="distillation", for_what=f"the teacher {self._url}", limit_s=self._request_timeout_s
                ) from expiry

    async def _ask(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Sends the request, with up to `MAX_TRIES` attempts. Aborts an attempt that may still be running."""
        problem = "no attempt"
        for attempt in range(MAX_TRIES):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, FIRST_RETRY_S, LONGEST_RETRY_S))
            rid, may_run = uuid.uuid4().hex, True
            try:
                response = await self._wire.post(f"{self._url}/generate", {**payload, "rid": rid})
                async with response:
                    body = await response.read()
                status = response.status
                may_run = status in MAY_RUN_STATUSES
                if status == 200:
                    return decode(body)
                problem = f"HTTP {status}: {body[:300].decode(errors='replace')}"
                if status not in RETRY_STATUSES:
                    raise RequestRejected(
                        f"{self._url} rejected a request of {len(payload['input_ids'])} ids: {problem}"
                    )
                if status == 500 and attempt:
                    break
            except aiohttp.ClientConnectorError as broken:
                problem, may_run = f"{type(broken).__name__}: {broken}", False
            except aiohttp.ClientError as broken:
                problem = f"{type(broken).__name__}: {broken}"
            finally:
                if may_run:
                    self._wire.abort(self._url, rid)
        raise EngineError(f"{self._url}/generate failed after {attempt + 1} attempts; last error: {problem}")


def parse_log_probs(answer: Mapping[str, Any], response: Sequence[int], vocab_size: int | None = None) -> list[float]:
    """Parses the log-probs of `response` from the body of a `/generate` response (SGLang 0.5.16).

    Raises `EngineError` if the ids differ.

    In prompts, SGLang reports the last id of the vocabulary as 0, because it expects image hashes there.
    """
    pairs = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
    judged = pairs[-len(response) :]
    said = [pair[1] for pair in judged]
    if len(said) != len(response) or any(
        one != token and not (one == 0 and vocab_size == token + 1) for one, token in zip(said, response, strict=True)
    ):
        raise EngineError(
            f"the teacher returned log-probs of {len(pairs)} tokens, but the last {len(response)} do not match the "
            "response; the teacher must be an SGLang server with the student's vocabulary"
        )
    values = [math.nan if pair[0] is None else float(pair[0]) for pair in judged]
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is not None:
        raise EngineError(f"the teacher's log-prob of response token {bad} is {judged[bad][0]}; it must be finite")
    return values
