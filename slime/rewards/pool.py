"""The grader pool: scores samples in processes that can be killed, so that no answer can stop the rollout.

Consumes: samples of rollout tasks, which call `score` or `score_group` on one event loop. Produces: a score, or the
reason why there is none. Waits for: a slot of a lane, then one of the lane's processes, then the reply, which must
arrive within the grader's limit (`grader_process`). Woken by: a freed slot, a process that has started, the reply or
death of the process, and the clock. It polls a full lane for a free process every `START_POLL_S`.

The `held` lane runs graders that need only texts and can be confined (`grader_confinement`). The `offline` lane runs
the other registered graders that only compute. The number of processes of each is limited by the number of cores. The
`serial` lane runs users' functions and graders that need the network, one request per process. The `concurrent` lane
runs async graders, which wait for the network, many per process.

Invariants
1. Every call returns a `Scored` or an `Unscored`; it raises only for a configuration mistake or after `close`. Unless
   the settings prevent it, an answer that a computing grader cannot handle scores like a wrong one.
2. If a request exceeds its limit, its process is killed and replaced. Requests that shared the process are repeated,
   each in its own process, because it is unknown which one blocked it.
3. Processes start on first use. After `close` all have ended.
4. Grading has its own threads, because users' code may occupy the event loop's threads.
5. No process gets a secret of the run in its settings or environment (`grader_env_vars`).
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
"""Number of tries for a request whose process dies, or has too little memory because of earlier gradings."""
ASYNC_GRACE_S = 5.0
"""Extra time after the worker's own limit, before the pool kills the process of an async grader."""
ENCODING_THREADS = 2
"""More threads would not be faster, because encoding holds the GIL."""
START_POLL_S = 0.02
MAX_CHARS = 16_000_000
"""Samples with more text (prompt, response, label, metadata) are not sent, because encoding would block the GIL."""
SLOW_S, SLOW_SHARE, SLOW_PER_PROCESS = 2.0, 0.25, 3
"""A request that takes longer than `SLOW_S`, or than `SLOW_SHARE` of its limit, releases its slot. At most
`SLOW_PER_PROCESS` requests per process of the lane may do so at a time."""


@dataclass(slots=True)
class _Lane:
    """Processes of one kind, and the slots that limit their requests."""

    max_processes: int
    per_process: int
    slots: asyncio.Semaphore
    kind: str = ONLINE
    """`ONLINE`, `OFFLINE` or `HELD` of `grader_worker`."""
    processes: list[GraderProcess] = field(default_factory=list)
    starting: set[asyncio.Task[None]] = field(default_factory=set)
    num_slow: int = 0
    """Number of running requests that have released their slots. Each allows one process beyond `max_processes`."""

    @contextlib.asynccontextmanager
    async def slot(self, limit_s: float) -> AsyncIterator[Callable[[], None]]:
        """Takes a slot for the block, which calls the yielded function when a process begins the request.

        A request that is slow from then on releases its slot early, so that hung requests do not block others. The
        start of a process does not count: on a busy machine it would make the pool start even more processes.
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
    """The grader of a sample, and its lane."""

    grader: str
    """Registered name, or path of a user's function."""
    lane: _Lane
    custom: bool = False
    """Whether `grader` is a user's function."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of a registered grader."""
    wrong: Reward | None = None
    """The reward of a wrong answer, if the grader only computes."""


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    by_answer: bool = False
    """Whether the answer is to blame."""


class GraderPool:
    """Scores samples. The first of these that is set chooses the grader: `sample.custom_rm_path`, `--custom-rm-path`,
    `metadata["rm_type"]`, `--rm-type`."""

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
    ) -> None:
        """`eval_rm_types`: graders of evaluation datasets. `args`: all settings. Graders get their fields from them,
        and users' functions get all of them without secrets. `ungradable_is_wrong`: whether an answer that a grader
        cannot handle scores like a wrong answer; if not, it is unscored.

        Raises `ConfigError` for an unknown `rm_type`.
        """
        named = {rm_type, *eval_rm_types}
        self._graders = {name: GRADERS.get(name) for name in named if name}
        """Name -> grader class. Names from data rows are added on first use, and cannot be import paths."""
        self._rm_type, self._custom_rm_path, self._timeout_s = rm_type, custom_rm_path, timeout_s
        self._args, self._ungradable_is_wrong = args, ungradable_is_wrong
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
        """Scores one sample. Raises `ConfigError` if no grader is chosen."""
        return (await self._grade([sample], group=False))[0]

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores a prompt's samples, in order: with one call of the user's function, or each separately with a
        registered grader.
        """
        if self._custom_rm_path is None:
            return list(await asyncio.gather(*(self.score(s) for s in samples)))
        return await self._grade(list(samples), group=True)

    async def close(self) -> None:
        """Kills all processes, including those that are still starting."""
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
        """Returns the grader of a sample; the sample's own choice overrides the run's."""
        custom = sample.custom_rm_path or self._custom_rm_path
        if custom is not None:
            return self._function(custom)
        rm_type = sample.metadata.get("rm_type") or self._rm_type
        if not rm_type:
            raise ConfigError(
                f"sample {sample.index} has no grader; set --rm-type, --custom-rm-path or metadata rm_type"
            )
        return self._grader(str(rm_type))

    def _function(self, path: str) -> _Choice:
        """Raises `HookError`."""
        if path not in self._is_async:
            function = load_custom(path)
            self._is_async[path] = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
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
        """Returns the grader's fields from the settings, including its own secrets."""
        return {} if self._args is None else settings_of(kind, self._args)

    async def _grade(self, samples: list[Sample], *, group: bool) -> list[Score]:
        self._require_open()
        choice = self._choose(samples[0])
        rows, answers = [(s.prompt, s.label, s.metadata) for s in samples], [s.response for s in samples]
        for texts, by_answer in ((rows, False), (answers, True)):
            if (longest := max(map(_num_chars, texts))) > MAX_CHARS:
                reason = f"too long to be graded: {longest} characters, more than {MAX_CHARS}"
                return [self._failed(choice, reason, by_answer=by_answer)] * len(samples)
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
                break  # no other request shared the process, so this one used the time
            lane = self._serial if lane is self._concurrent else lane
        return [self._failed(choice, failed.reason, by_answer=failed.by_answer)] * len(samples)

    def _failed(self, choice: _Choice, reason: str, *, by_answer: bool) -> Score:
        """Returns the score of a sample whose grader failed."""
        if not by_answer or choice.wrong is None or not self._ungradable_is_wrong:
            return Unscored(reason)
        return Scored(copy.deepcopy(choice.wrong), ungradable=reason)

    def _scores(self, choice: _Choice, reply: dict[str, Any], num_samples: int) -> list[Score]:
        """Decodes a reply; an invalid entry becomes `Unscored` with the reason."""
        entries = reply.get("scores")
        if not isinstance(entries, list) or len(entries) != num_samples:
            return [Unscored("the grader process sent a malformed reply")] * num_samples
        return [
            Scored(e["value"])
            if "value" in e
            else self._failed(choice, str(e.get("ungradable", e.get("unscored"))), by_answer="ungradable" in e)
            for e in entries
        ]

    async def _ask(self, lane: _Lane, message: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any] | _Failed:
        """Tries the request once; calls `begin` once a process is found. Returns the reply, or why the try failed."""
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
            await self._drop(lane, process)  # earlier gradings may have used its memory; the next try gets a new one
            ((name, reason),) = reply["scores"][0].items()
            return _Failed(reason, name == "ungradable")
        except GradingTimeout as expiry:
            logger.warning("grader %s: %s; its process is killed", message["grader"], expiry)
            await self._drop(lane, process)
            return _Failed(str(expiry), expiry.by_answer)
        except GraderDied as death:
            await self._drop(lane, process)
            told = f"{death}: it {process.end}" if death.by_itself else str(death)
            return _Failed(told, death.looked and process.crashed)
        except asyncio.CancelledError:
            if lane.per_process == 1:  # the process is still busy, but the result is no longer needed
                await asyncio.shield(self._drop(lane, process))
            raise
        finally:
            process.num_reserved -= 1

    async def _process(self, lane: _Lane, message: dict[str, Any]) -> GraderProcess:
        """Reserves an idle process, starts one, or shares the least busy one if the lane allows it."""
        while True:
            for dead in [p for p in lane.processes if p.dead]:
                await self._drop(lane, dead)
            process = min(lane.processes, key=lambda p: p.num_reserved, default=None)
            full = len(lane.processes) + len(lane.starting) >= lane.max_processes + lane.num_slow
            if process is not None and (
                process.num_reserved == 0 or (full and process.num_reserved < lane.per_process)
            ):
                process.num_reserved += 1  # no await since the choice, so the place is still free
                return process
            if full:
                await asyncio.sleep(START_POLL_S)
                continue
            await self._start(lane, message)

    async def _start(self, lane: _Lane, message: dict[str, Any]) -> None:
        """Starts a process and adds it to the lane. Raises `SlimeError` if the pool is closed or closes meanwhile."""

        async def start() -> None:
            others = [(name, self._settings_of(kind)) for name, kind in self._graders.items() if kind.held]
            warm_up = {**message, "others": others if lane is self._held else []}
            process = await GraderProcess.start(self._settings, warm_up=warm_up, kind=lane.kind)
            lane.processes.append(process)  # inside the task, so that a cancelled caller does not lose the process
            if process.missing and not self._warned:
                self._warned = True
                logger.warning(
                    "graders of texts are not fully confined: this machine has no %s", " and ".join(process.missing)
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
            raise SlimeError("the grader pool is closed and scores nothing more")

    async def _drop(self, lane: _Lane, process: GraderProcess) -> None:
        if process in lane.processes:
            lane.processes.remove(process)
        await process.kill()


def _num_chars(value: Any) -> int:
    """Counts the characters of all text in nested lists and dicts."""
    if isinstance(value, dict):
        return sum(_num_chars(k) + _num_chars(v) for k, v in value.items())
    return (
        sum(map(_num_chars, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 1
    )


def _wire(sample: Sample, *, with_tokens: bool) -> dict[str, Any]:
    """Returns the sample as JSON, without routed experts, which no grader needs.

    Unless `with_tokens`, per-token lists are left out, too. They are most of the bytes, and built-in graders do not use
    them.
    """
    without: dict[str, Any] = {} if with_tokens else {**dict.fromkeys(PER_TOKEN), "tokens": [], "response_length": 0}
    return dataclasses.replace(sample, rollout_routed_experts=None).to_dict() | without


# Checks before the start whether this machine can confine the code that graders run. This is not a rule of the
# settings, because it depends on the machine.
ALLOW = "allow_unconfined_code"
"""The setting of graders that allows running code unconfined."""


def code_problems(args: Args) -> list[str]:
    """Returns why this machine cannot confine the code that the configured graders run; empty if it can.

    A grader that is named only in data rows is refused on first use: its samples stay unscored for the same reason.
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
