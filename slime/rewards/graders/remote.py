"""Remote rewards: POSTs prompt, response, label and metadata as JSON to `--rm-url`, which returns the reward.

The service returns a number or an object. If the only key of the object is `reward` or `score`, its value is the
reward; otherwise, the whole object is. With `--rm-batch-size` N > 1, concurrent samples are sent together as a list of
up to N objects, and the service returns a list with one reward per sample.

Connection errors, 429 and 5xx are retried with exponential backoff (or after `Retry-After`) until the pool's time limit
for the sample. Other statuses are not retried. If a batch is rejected with a 4xx, its samples are resent one by one, so
that a bad sample affects only its own reward.

Who wakes whom: `grade` adds a sample to the open batch. The first sample of a batch starts a task that sends the batch
after `GATHER_S` and wakes all waiters. Everything runs on the event loop of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from slime.core.errors import ConfigError, DataError, EngineError, RequestRejected
from slime.core.liveness import backoff_s
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
GATHER_S = 0.02
"""How long the first sample of a batch waits for others, in seconds."""
Batch = list[tuple[dict[str, Any], "asyncio.Future[Any]"]]
MAX_ANSWER_BYTES = 16 * 1024 * 1024


def reward_of(answer: Any) -> Any:
    """Unwraps an object whose only key is `reward` or `score`; returns anything else unchanged."""
    if isinstance(answer, dict) and len(answer) == 1:
        return next((answer[key] for key in ("reward", "score") if key in answer), answer)
    return answer


async def post(session: Any, url: str, payload: Any) -> Any:
    """POSTs `payload` and returns the response as JSON. Retries transient failures indefinitely, so callers must set a
    timeout.

    Raises `RequestRejected` for a 4xx other than 429, and `EngineError` for any other invalid response.
    """
    import aiohttp

    failures = 0
    while True:
        failures += 1
        pause_s = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):  # may be restarting
            async with session.post(url, json=payload, allow_redirects=False) as response:
                body = b""
                async for chunk in response.content.iter_chunked(65536):
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise EngineError(f"the reward service sent more than {MAX_ANSWER_BYTES} bytes")
                if response.status == 200:
                    return json.loads(body)
                if response.status != 429 and response.status < 500:
                    kind = RequestRejected if response.status >= 400 else EngineError
                    raise kind(f"the reward service returned {response.status}: {body[:200].decode(errors='replace')}")
                with contextlib.suppress(ValueError):
                    wished_s = float(response.headers.get("Retry-After", 0))
                    pause_s = min(max(pause_s, wished_s), LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)


class Batcher:
    """Batches concurrent samples of one event loop and sends them over one connection pool."""

    def __init__(self, url: str, *, batch_size: int, limit_s: float) -> None:
        import aiohttp

        self._url, self._batch_size, self._limit_s = url, batch_size, limit_s
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0))
        self._open: Batch = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, payload: dict[str, Any]) -> Any:
        """Returns the service's response. Raises the errors of `post`, and `DataError` for a malformed list."""
        if self._batch_size <= 1:
            return await post(self.session, self._url, payload)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._open or len(self._open) >= self._batch_size:
            self._open = []
            task = asyncio.create_task(self._send(self._open))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._open.append((payload, future))
        return await future

    async def _send(self, batch: Batch) -> None:
        await asyncio.sleep(GATHER_S)
        if self._open is batch:
            self._open = []  # later samples start a new batch
        waiting = [(payload, future) for payload, future in batch if not future.done()]
        try:
            async with asyncio.timeout(self._limit_s):
                rewards = await self._rewards([payload for payload, _ in waiting])
        except Exception as problem:  # forwarded to all waiters
            rewards = [problem] * len(waiting)
        for (_, future), reward in zip(waiting, rewards, strict=True):
            if future.done():
                continue
            if isinstance(reward, BaseException):
                future.set_exception(reward)
            else:
                future.set_result(reward)

    async def _rewards(self, payloads: list[dict[str, Any]]) -> list[Any]:
        """Returns a reward or an exception for each payload."""
        try:
            answer = await post(self.session, self._url, payloads) if payloads else []
        except RequestRejected:
            alone = (post(self.session, self._url, [payload]) for payload in payloads)
            answers = await asyncio.gather(*alone, return_exceptions=True) if len(payloads) > 1 else []
            if not answers:
                raise
            return [a[0] if isinstance(a, list) and len(a) == 1 else _another_shape(a, 1) for a in answers]
        if not isinstance(answer, list) or len(answer) != len(payloads):
            raise _another_shape(answer, len(payloads))
        return answer


def _another_shape(answer: Any, num_samples: int) -> BaseException:
    if isinstance(answer, BaseException):
        return answer
    size = len(answer) if isinstance(answer, list) else type(answer).__name__
    return DataError(f"the reward service must return a list of {num_samples} rewards, got {size}")


@GRADERS.register("remote_rm")
@dataclass(kw_only=True)
class RemoteReward(Grader):
    """The reward returned by the service at `--rm-url`."""

    waits = True

    rm_url: str | None = None
    """URL of the reward service."""
    rm_batch_size: int = 1
    """Maximum number of samples per request. With 1, a request is a single object; otherwise, a list of objects."""

    def __post_init__(self) -> None:
        self.batcher: Batcher | None = None

    async def grade(self, sample: Sample, limit_s: float) -> Any:
        """Requests the reward, retrying until the pool's time limit. Raises `RequestRejected` if it is rejected."""
        if not self.rm_url:
            raise ConfigError("--rm-type remote_rm needs the URL of the reward service; set --rm-url")
        if self.batcher is None:
            self.batcher = Batcher(self.rm_url, batch_size=self.rm_batch_size, limit_s=limit_s)
        payload = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        return reward_of(await self.batcher.ask(payload))
