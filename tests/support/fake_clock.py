"""Time that passes at once, and an engine inside the process: thousands of schedules of the rollout in seconds.

`FakeClockLoop` jumps to the next timer when nothing is left to do, and says so when there is none: a deadlock. It runs
what is meant for a thread in place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected, TakenBack
from slime.core.sample import Sample
from slime.rollout.client.call import NEVER_SENT, Generation
from slime.rollout.client.engine_client import REQUEST_SCOPE, RequestScope
from slime.rollout.guard import waiting
from slime.rollout.transcript import TRANSCRIPT

T = TypeVar("T")


class FakeClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock only its timers move."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            timers = [t for t in self._scheduled if not t.cancelled()]  # type: ignore[attr-defined]
            if not timers:
                raise AssertionError(f"nothing will ever happen again: {asyncio.all_tasks(self)}")
            self._now = max(self._now, min(t.when() for t in timers))
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:  # type: ignore[override]
        """Runs `func` here and now."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_on_fake_clock(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in no time."""
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        return runner.run(work)


@dataclass(frozen=True)
class Answered:
    """A call that has its answer, as a transcript takes it."""

    input_ids: list[int]
    generation: Generation
    images: tuple[str, ...] = ()
    image_token: int | None = None

    def answer(self) -> Generation:
        return self.generation


@dataclass
class InProcessEngine:
    """Stands for client, router and engines: keeps the protocol of SGLang 0.5.16 as the client shows it.

    The id of each token is `1000 * version + position in the request`, so that its label can be checked. A weight sync
    with `abort` ends what runs with its partial tokens and holds what is sent until the new weights serve; with another
    mode what runs waits, and goes on under the new weights.
    """

    rng: random.Random
    fault_rate: float = 0.0
    """Part of the requests that fail, are refused or expire."""
    version: int = 1
    pause_mode: str = "abort"
    running: int = 0
    num_pauses: int = 0
    pace: float = 1.0
    _serving: asyncio.Event = field(default_factory=asyncio.Event)
    _aborts: list[asyncio.Event] = field(default_factory=list)
    """In the order of their requests, so that a seed is a schedule."""

    def __post_init__(self) -> None:
        self._serving.set()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
        returns_partial: bool = False,
    ) -> Generation:
        with waiting():
            generation = await self._answer(sampling_params)
        transcript = TRANSCRIPT.get()
        if transcript is not None:
            transcript.end_call(Answered(list(input_ids), generation))
            transcript.taken_back = transcript.taken_back or generation.finish_reason == "abort"
        if generation.finish_reason == "abort" and not returns_partial:
            raise TakenBack("as told")
        return generation

    async def _answer(self, sampling_params: Mapping[str, Any]) -> Generation:
        scope = REQUEST_SCOPE.get()
        await asyncio.sleep(self.rng.choice([0.0, 0.01]))
        await self._serving.wait()
        if scope is not None and scope.aborted:
            return NEVER_SENT
        if self.rng.random() < self.fault_rate:
            await asyncio.sleep(self.rng.random())
            raise self.rng.choice([EngineError("503"), RequestRejected("400"), DeadlineExceeded("no answer")])
        abort = asyncio.Event()
        self._aborts.append(abort)
        self.running += 1
        try:
            return await self._sample(sampling_params["max_new_tokens"], abort)
        finally:
            self.running -= 1
            self._aborts.remove(abort)

    async def _sample(self, limit: int, abort: asyncio.Event) -> Generation:
        length = min(limit, int(self.rng.paretovariate(1.0)))
        tokens: list[int] = []
        versions: list[int] = []
        while len(tokens) < length:
            await asyncio.sleep(0.1)
            if self.pause_mode != "abort" and not abort.is_set():
                await self._serving.wait()
            if abort.is_set():
                break
            tokens.append(1000 * self.version + len(tokens))
            versions.append(self.version)
        reason = "abort" if abort.is_set() else "length" if len(tokens) == limit else "stop"
        return Generation(tuple(tokens), (-0.5,) * len(tokens), reason, tuple(versions) or self.version, "")

    async def sync_weights(self, version: int, scope: RequestScope | None = None) -> None:
        """Abort and drain, or pause (unless told whose requests to end); send; serve."""
        self._serving.clear()
        ends = self.pause_mode == "abort" or scope is not None
        for abort in self._aborts if ends else ():
            abort.set()
        while self.running and ends:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self.rng.random())
        self.version = version
        self._serving.set()

    @property
    def client(self) -> InProcessEngine:
        return self

    async def num_running(self) -> int:
        return self.running

    def versions(self, sample: Sample) -> list[int]:
        """[R] from the ids."""
        return [token // 1000 for token in sample.tokens[sample.prompt_length :]]

    async def abort_scope(self, scope: RequestScope) -> None:
        scope.aborted = True
        for abort in self._aborts:
            abort.set()

    async def drain(self) -> None:
        """Nothing is left to deliver."""
