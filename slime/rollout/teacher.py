"""`TeacherClient`: how probable a served teacher finds given tokens.

Waits for: the teacher's server (or its router). Is woken by: its answer.

Invariants
1. The ids that the teacher judged are the ids that were asked for; anything else is an error.
2. What can succeed is asked again within the request's limit, as `EngineClient` does it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slime.core.errors import DeadlineExceeded, EngineError
from slime.rollout.client import EngineClient


class TeacherClient(EngineClient):
    """Client of a server (or router) whose model judges given tokens."""

    async def log_probs(self, tokens: Sequence[int], num_response: int) -> list[float]:
        """[num_response] nats: log-probs of the last tokens given all before each, at temperature 1.

        Raises `RequestRejected`, `EngineError`, `DeadlineExceeded` as `EngineClient.generate` does.
        """
        if not num_response:
            return []
        payload, headers = self._request(tokens, {"max_new_tokens": 0, "temperature": 1.0}, None)
        payload["logprob_start_len"] = len(tokens) - num_response - 1
        async with self._slots:
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    answer = await self._post_with_retries(payload, headers, None)
            except TimeoutError as expiry:
                self._abort_later([payload["rid"]])
                raise DeadlineExceeded.waiting(
                    owner="distillation", for_what=f"the teacher {self.base_url}", limit_s=self._request_timeout_s
                ) from expiry
        assert answer is not None, "a request without a scope is never aborted"
        return parse_log_probs(answer, tokens[-num_response:])


def parse_log_probs(answer: Mapping[str, Any], response: Sequence[int]) -> list[float]:
    """The log-probs of `response` in a `/generate` answer (SGLang 0.5.16). Raises `EngineError` if they are others'."""
    pairs = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
    judged = pairs[-len(response) :]
    if [pair[1] for pair in judged] != list(response):
        raise EngineError(
            f"got teacher log-probs of {len(pairs)} tokens, which do not end with the {len(response)} of the response; "
            "the teacher must be an SGLang server that reads the student's ids"
        )
    values = [math.nan if pair[0] is None else float(pair[0]) for pair in judged]
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
    if bad is not None:
        raise EngineError(f"got teacher log-prob {judged[bad][0]} for response token {bad}; it must be finite")
    return values
