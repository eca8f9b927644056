"""The grader pool: scores samples in processes that can be killed, so that no answer can hang the rollout.

Consumes: samples from rollout tasks, which call `score` or `score_group` on one event loop. Produces: a score, or the
reason why there is none. Waits for: a slot of a lane, then one of the lane's processes, then the reply, which must
arrive within the grader's time limit (`grader_process`). Woken by: a released slot, a process start, the reply or the
death of the process, and timers. If a lane is full, it is polled for a free process every `START_POLL_S`.

The `held` lane runs graders that need only text and can be confined (`grader_confinement`). The `offline` lane runs all
other registered compute-only graders. Both are limited to one process per core. The `serial` lane runs users' functions
and graders that need the network, one request per process. The `concurrent` lane runs async graders, which mostly wait
for the network, many per process.

Invariants
1. Every call returns a `Scored` or `Unscored`. It raises only on misconfiguration or after `close`. By default, an
   answer that a compute-only grader cannot handle is scored as wrong.
2. A process that exceeds the time limit of a request is killed and replaced. Other requests on the process are retried,
   each in a process of its own, because any of them could have blocked it.
3. Processes start on first use. After `close`, all of them have exited.
4. Grading uses its own threads, because users' code can occupy the event loop's threads.
5. No process sees secrets of the run in its settings or environment (`grader_confinement`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from slime.core.cores import usable_cores
from slime.core.errors import ConfigError, SlimeError
from slime.core.registry import settings_of
from slime.core.sample import PER_TOKEN, Sample
from slime.rewards.grader_process import GraderDied, GraderProcess, GradingTimeout, ProcessSettings
from slime.rewards.grader_worker import CONCURRENT_PER_PROCESS, HELD, OFFLINE, ONLINE, load_custom
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.scores import Score, Scored, Unscored
from slime.settings import Args
from slime.settings.eval_config import eval_datasets

logger = logging.getLogger(__name__)

MAX_TRIES = 2
"""Attempts per request. It is retried if its process dies, or runs out of memory because of earlier requests."""
ASYNC_GRACE_S = 5.0
"""Extra time after the worker's own time limit before the pool kills the process of an async grader."""
ENCODING_THREADS = 2
"""Encoding holds the GIL, so more threads would not help."""
START_POLL_S = 0.02
MAX_CHARS = 16_000_000
"""Samples with more text (prompt, response, label, metadata) are not sent: encoding one would hold the GIL for long."""
SLOW_S, SLOW_SHARE, SLOW_PER_PROCESS = 2.0, 0.25, 3
"""A request releases its slot early if it takes longer than `SLOW_S` or `SLOW_SHARE` of its limit. At most
`SLOW_PER_PROCESS` requests per process of the lane can do so at a time."""


@dataclass(slots=True)
class _Lane:
    """Processes of one kind, with slots that limit concurrent requests."""

    max_processes: int
    per_process: int
    slots: asyncio.Semaphore
    kind: str = ONLINE
    """`ONLINE`, `OFFLINE` or `HELD` of `grader_worker`."""
    processes: list[GraderProcess] = field(default_factory=list)
    starting: set[asyncio.Task[None]] = field(default_factory=set)
    num_slow: int = 0
    """Number of running requests that have released their slots. Each permits one process beyond `max_processes`."""

    @contextlib.asynccontextmanager
    async def slot(self, limit_s: float) -> AsyncIterator[Callable[[], None]]:
        """Holds a slot until the block ends. The block calls the yielded function when a process starts on the request.

        If the request is then slow, it releases its slot early, so that hung requests do not block others. Process
        startup does not count; otherwise, a busy machine would start even more processes.
        """
        await self.slots.acquire()
        slow = False
        timer: asyncio.TimerHandle | None = None

        def give_way() -> None:
            nonlocal slow
            slow = self.num_slow < SLOW_PER_PROCESS * self.max_processes
            if slow:
                self.num_slow += 1
                self.slots.release()

        def begin() -> None:
            nonlocal timer
            if self.per_process == 1:
                timer = asyncio.get_running_loop().call_later(min(SLOW_S, SLOW_SHARE * limit_s), give_way)

        try:
            yield begin
        finally:
            if timer is not None:
                timer.cancel()
            if slow:
                self.num_slow -= 1
            else:
                self.slots.release()


@dataclass(frozen=True, slots=True)
class _Choice:
    """The grader for a sample, and its lane."""

    grader: str
    """Registered name, or import path of a user's function."""
    lane: _Lane
    custom: bool = False
    """Whether `grader` is a user's function."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of a registered grader."""
    wrong: Reward | None = None
    """The reward of a wrong answer, for compute-only graders."""


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    by_answer: bool = False
    """Whether the answer is to blame."""


class GraderPool:
    """Scores samples. The grader is the first of `sample.custom_rm_path`, `--custom-rm-path`, `metadata["rm_type"]` and
    `--rm-type` that is set."""

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        memory_limit_bytes: int | None = None,
        rm_type: str | None = None,
        custom_rm_path: str | None = None,
        eval_rm_types: Collection[str] = (),
        args: object = None,
        ungradable_is_wrong: bool = True,
        prepare: Callable[[object], None] | None = None,
    ) -> None:
        """`eval_rm_types`: graders of evaluation datasets. `args`: all settings; a grader gets its own fields, a user's
        function gets everything except secrets. `ungradable_is_wrong`: score an answer that a grader cannot handle as
        wrong instead of leaving it unscored. `prepare`: called with the settings for users' functions before the first
        process with network access starts; may change them.

        Raises `ConfigError` for an unknown `rm_type`.
        """
        named = {rm_type, *eval_rm_types}
        self._graders = {name: GRADERS.get(name) for name in named if name}
        """Name -> grader class. Names from data rows are added on first use and cannot be import paths."""
        self._rm_type, self._custom_rm_path, self._timeout_s = rm_type, custom_rm_path, timeout_s
        self._args, self._ungradable_is_wrong, self._prepare = args, ungradable_is_wrong, prepare
        shown = args.without_secrets() if isinstance(args, Args) else args
        self._threads = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="grading")
        self._settings = ProcessSettings(timeout_s, memory_limit_bytes, shown, self._threads)
        num_async = min(2, num_workers)
        num_computing = min(num_workers, max(2, usable_cores()))
        self._held = _Lane(num_computing, 1, asyncio.Semaphore(num_computing), kind=HELD)
        self._offline = _Lane(num_computing, 1, asyncio.Semaphore(num_computing), kind=OFFLINE)
        self._serial = _Lane(num_workers, 1, asyncio.Semaphore(num_workers))
        self._concurrent = _Lane(
            num_async, CONCURRENT_PER_PROCESS, asyncio.Semaphore(num_async * CONCURRENT_PER_PROCESS)
        )
        self._is_async: dict[str, bool] = {}
        self._closed = self._warned = False

    async def score(self, sample: Sample) -> Score:
        """Scores one sample. Raises `ConfigError` if no grader is set."""
        return (await self._grade([sample], group=False))[0]

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores the samples of a prompt: in one call of a user's function, or one by one with registered graders."""
        if self._custom_rm_path is None:
            return list(await asyncio.gather(*(self.score(s) for s in samples)))
        return await self._grade(list(samples), group=True)

    async def close(self) -> None:
        """Kills all processes, including those still starting."""
        self._closed = True
        lanes = (self._held, self._offline, self._serial, self._concurrent)
        starts = [start for lane in lanes for start in lane.starting]
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(process.kill() for lane in lanes for process in lane.processes))
        for lane in lanes:
            lane.processes.clear()
        self._threads.shutdown(wait=False)

    def _choose(self, sample: Sample) -> _Choice:
        """Selects the grader for a sample. The sample's own setting overrides that of the run."""
        custom = sample.custom_rm_path or self._custom_rm_path
        if custom is not None:
            return self._function(custom)
        rm_type = sample.metadata.get("rm_type") or self._rm_type
        if not rm_type:
            raise ConfigError(
                f"sample {sample.index} has no reward and no grader is set for it; set --rm-type, --custom-rm-path or "
                "metadata rm_type, or set sample.reward in every case in your generate function or sample hook"
            )
        return self._grader(str(rm_type))

    def _function(self, path: str) -> _Choice:
        """Raises `HookError`."""
        if path not in self._is_async:
            function = load_custom(path)
            self._is_async[path] = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
            )
        return _Choice(path, self._concurrent if self._is_async[path] else self._serial, custom=True)

    def _grader(self, name: str) -> _Choice:
        """Raises `ConfigError`."""
        if name not in self._graders:
            self._graders[name] = GRADERS.get_registered(name)
        kind = self._graders[name]
        settings = self._settings_of(kind)
        if kind.waits:
            return _Choice(name, self._concurrent, settings=settings)
        if kind.needs_network:
            return _Choice(name, self._serial, settings=settings)
        return _Choice(name, self._held if kind.held else self._offline, settings=settings, wrong=kind.wrong)

    def _settings_of(self, kind: type[Grader]) -> dict[str, Any]:
        """Returns the settings for the grader's fields, including its own secrets."""
        return {} if self._args is None else settings_of(kind, self._args)

    async def _grade(self, samples: list[Sample], *, group: bool) -> list[Score]:
        self._require_open()
        choice = self._choose(samples[0])
        rows, answers = [(s.prompt, s.label, s.metadata) for s in samples], [s.response for s in samples]
        for texts, by_answer in ((rows, False), (answers, True)):
            if (longest := max(map(_num_chars, texts))) > MAX_CHARS:
                reason = f"too long to be graded: {longest} characters, more than {MAX_CHARS}"
                return [self._failed(choice, reason, by_answer=by_answer)] * len(samples)
        if choice.custom:  # the sample's columns stay packed, so later checks and the Data Buffer need not convert them
            await asyncio.get_running_loop().run_in_executor(self._threads, _pack, samples)
        lane, failed = choice.lane, _Failed("never asked")
        message = {
            "grader": choice.grader,
            "custom": choice.custom,
            "settings": choice.settings,
            "group": group,
            "concurrent": lane is self._concurrent,
            "computes": choice.wrong is not None,
            "samples": [_wire(s, with_tokens=choice.custom) for s in samples],
        }
        for _ in range(MAX_TRIES):
            async with lane.slot(self._timeout_s) as begin:
                reply = await self._ask(lane, message, begin)
            if isinstance(reply, dict):
                return self._scores(choice, reply, len(samples))
            failed = reply
            if failed.reason.startswith("timeout") and lane.per_process == 1:
                break  # no other request shared the process, so this one is to blame
            lane = self._serial if lane is self._concurrent else lane
        return [self._failed(choice, failed.reason, by_answer=failed.by_answer)] * len(samples)

    def _failed(self, choice: _Choice, reason: str, *, by_answer: bool) -> Score:
        """Returns the score for a sample when grading has failed."""
        if not by_answer or choice.wrong is None or not self._ungradable_is_wrong:
            return Unscored(reason)
        return Scored(copy.deepcopy(choice.wrong), ungradable=reason)

    def _scores(self, choice: _Choice, reply: dict[str, Any], num_samples: int) -> list[Score]:
        """Decodes a reply. Invalid entries become `Unscored`."""
        entries = reply.get("scores")
        if not isinstance(entries, list) or len(entries) != num_samples:
            return [Unscored("the grader process sent a malformed reply")] * num_samples
        scores = [
            Scored(e["value"])
            if "value" in e
            else self._failed(choice, str(e.get("ungradable", e.get("unscored"))), by_answer="ungradable" in e)
            for e in entries
        ]
        noted = reply.get("metadata") or [None] * num_samples
        return [dataclasses.replace(score, metadata=one) for score, one in zip(scores, noted, strict=True)]

    async def _ask(self, lane: _Lane, message: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any] | _Failed:
        """Tries the request once. Calls `begin` when a process is available. Returns the reply or the failure."""
        try:
            process = await self._process(lane, message)
            begin()
        except (GraderDied, OSError) as problem:
            return _Failed(f"no grader process could be started: {problem!r}")
        try:
            grace_s = ASYNC_GRACE_S if lane is self._concurrent else 0.0
            reply = await process.ask(message, grace_s=grace_s, computes=message["computes"])
            if not reply.get("out_of_memory") or lane.per_process > 1:
                return reply
            await self._drop(lane, process)  # earlier requests may have used up its memory, so retry in a new one
            ((name, reason),) = reply["scores"][0].items()
            return _Failed(reason, name == "ungradable")
        except GradingTimeout as expiry:
            logger.warning("grader %s: %s; killing its process", message["grader"], expiry)
            await self._drop(lane, process)
            return _Failed(str(expiry), expiry.by_answer)
        except GraderDied as death:
            await self._drop(lane, process)
            told = f"{death}: it {process.end}" if death.by_itself else str(death)
            return _Failed(told, death.looked and process.crashed)
        except asyncio.CancelledError:
            if lane.per_process == 1:  # the process is busy with a result that is no longer needed
                await asyncio.shield(self._drop(lane, process))
            raise
        finally:
            process.num_reserved -= 1

    async def _process(self, lane: _Lane, message: dict[str, Any]) -> GraderProcess:
        """Reserves an idle process, starts a new one, or shares the least busy one if the lane allows it."""
        while True:
            for dead in [p for p in lane.processes if p.dead]:
                await self._drop(lane, dead)
            process = min(lane.processes, key=lambda p: p.num_reserved, default=None)
            full = len(lane.processes) + len(lane.starting) >= lane.max_processes + lane.num_slow
            if process is not None and (
                process.num_reserved == 0 or (full and process.num_reserved < lane.per_process)
            ):
                process.num_reserved += 1  # no await since the check, so it is still available
                return process
            if full:
                await asyncio.sleep(START_POLL_S)
                continue
            await self._start(lane, message)

    async def _start(self, lane: _Lane, message: dict[str, Any]) -> None:
        """Starts a process and adds it to the lane. Raises `SlimeError` if the pool is or gets closed."""

        if self._prepare is not None and lane.kind not in (HELD, OFFLINE):
            prepare, self._prepare = self._prepare, None
            prepare(self._settings.args)

        async def start() -> None:
            others = [(name, self._settings_of(kind)) for name, kind in self._graders.items() if kind.held]
            warm_up = {**message, "others": others if lane is self._held else []}
            process = await GraderProcess.start(self._settings, warm_up=warm_up, kind=lane.kind)
            lane.processes.append(process)  # inside the task, so that cancelling the caller does not leak the process
            if process.missing and not self._warned:
                self._warned = True
                logger.warning(
                    "text graders are not fully confined, because this machine lacks %s", " and ".join(process.missing)
                )

        self._require_open()
        task = asyncio.create_task(start(), name="grader-start")
        lane.starting.add(task)
        task.add_done_callback(lane.starting.discard)
        try:
            await task
        except asyncio.CancelledError:
            self._require_open()
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise SlimeError("the grader pool is closed")

    async def _drop(self, lane: _Lane, process: GraderProcess) -> None:
        if process in lane.processes:
            lane.processes.remove(process)
        await process.kill()


def _num_chars(value: Any) -> int:
    """Counts the characters of all strings in nested lists and dicts."""
    if isinstance(value, dict):
        return sum(_num_chars(k) + _num_chars(v) for k, v in value.items())
    return (
        sum(map(_num_chars, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 1
    )


def _pack(samples: Sequence[Sample]) -> None:
    for sample in samples:
        sample.pack()


def _wire(sample: Sample, *, with_tokens: bool) -> dict[str, Any]:
    """Returns the sample's fields as JSON and columns, without routed experts, which no grader needs.

    Unless `with_tokens`, also omits per-token lists, which built-in graders do not use.
    """
    without: dict[str, Any] = {} if with_tokens else {**dict.fromkeys(PER_TOKEN), "tokens": [], "response_length": 0}
    return {**sample.held_fields(), "status": sample.status.value, "rollout_routed_experts": None, **without}


# Startup check: can this machine confine the code that graders run? Not a settings rule, because it depends on the
# machine.
ALLOW = "allow_unconfined_code"
"""The grader setting that allows running code unconfined."""


def code_problems(args: Args) -> list[str]:
    """Returns why this machine cannot confine the code that the configured graders run. Empty if it can.

    Graders named only in data rows are not checked here. Their samples stay unscored for the same reason.
    """
    named = {args.rm_type, *(one.rm_type for one in eval_datasets(args))}
    kinds = [GRADERS.get(name) for name in sorted(name for name in named if name)]
    if not any(kind.runs_code and not settings_of(kind, args).get(ALLOW) for kind in kinds):
        return []
    from slime.rewards.program_sandbox import missing_here, refusal

    try:
        missing = missing_here()
    except OSError as error:
        return [str(error)]
    return [refusal(missing)] if missing else []
