"""The grader pool: scores samples in processes that can be killed, so that no answer can stop the rollout.

Consumes: the samples of rollout tasks, which call `score` or `score_group` on one event loop. Produces: a score, or the
reason why there is none. Waits for: a slot of a lane, then a process of it, then its reply, the last within the limit
of the grader, from when it begins (`process`). Is woken by: a slot that is given back, the end of a process's start,
the reply or the death of the process, or the clock; for a free place in a full lane it looks every `START_POLL_S`.

The `held` lane runs graders that compute on texts alone, which can be held (`held`), the `offline` lane others of the
registry that compute, each in no more processes than there are cores; the `serial` lane users' functions (and graders
that need the network), one request per process; the `concurrent` lane runs many per process (async graders that wait on
the network).

Invariants
1. Every call returns a `Scored` or an `Unscored`; it raises only on a configuration mistake or after `close`. An answer
   that a grader which only computes cannot deal with is scored as a wrong one, unless the settings say otherwise.
2. A request beyond its time limit costs its process, which is killed and replaced; requests that shared the process
   are asked again, each in a process of its own, because which of them blocked it cannot be seen.
3. Processes start on first use and are all gone after `close`.
4. Nothing here uses the event loop's own threads, which users' code may hold: grading has threads of its own.
5. No process gets a secret of the run: neither in its settings nor in its environment (`environment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from slime.core.cores import usable_cores
from slime.core.errors import ConfigError, SlimeError
from slime.core.registry import settings_of
from slime.core.sample import PER_TOKEN, Sample
from slime.rewards.grader_worker import CONCURRENT_PER_PROCESS, HELD, OFFLINE, ONLINE, load_custom
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.process import GraderDied, GraderProcess, GradingTimeout, ProcessSettings
from slime.rewards.scores import Score, Scored, Unscored
from slime.settings import Args
from slime.settings.eval_config import eval_datasets

logger = logging.getLogger(__name__)

MAX_TRIES = 2
"""How often one request is asked when its process dies under it, or runs out of the memory that others used before."""
ASYNC_GRACE_S = 5.0
"""How much longer than the worker's own limit the pool waits for an async grader before it kills the process."""
ENCODING_THREADS = 2
"""They hold the interpreter while they work: more would not be faster."""
START_POLL_S = 0.02
MAX_CHARS = 16_000_000
"""Samples with more text (prompt, response, label, metadata) are not sent: encoding them would hold the interpreter."""
SLOW_S, SLOW_SHARE, SLOW_PER_PROCESS = 2.0, 0.25, 3
"""A request that takes longer, or this share of its limit, lets another take its slot; so many for each process may."""


@dataclass(slots=True)
class _Lane:
    """Processes of one kind, and the slots that bound what they are asked."""

    max_processes: int
    per_process: int
    slots: asyncio.Semaphore
    kind: str = ONLINE
    """Of its processes, as `worker` knows them."""
    processes: list[GraderProcess] = field(default_factory=list)
    starting: set[asyncio.Task[None]] = field(default_factory=set)
    num_slow: int = 0
    """Requests that gave up their slots and still run, each in a process beyond `max_processes`."""

    @contextlib.asynccontextmanager
    async def slot(self, limit_s: float) -> AsyncIterator[None]:
        """A place among the requests that run; hung ones must not keep it from the others until their limit."""
        await self.slots.acquire()
        slow = False

        def give_way() -> None:
            nonlocal slow
            slow = self.num_slow < SLOW_PER_PROCESS * self.max_processes
            if slow:
                self.num_slow += 1
                self.slots.release()

        slow_s = min(SLOW_S, SLOW_SHARE * limit_s)
        timer = asyncio.get_running_loop().call_later(slow_s, give_way) if self.per_process == 1 else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if slow:
                self.num_slow -= 1
            else:
                self.slots.release()


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who grades a sample, and where."""

    grader: str
    """Name in the registry, or path of a user's function."""
    lane: _Lane
    custom: bool = False
    """A user's function."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a grader of the registry."""
    wrong: Reward | None = None
    """The reward of a wrong answer, if the grader only computes."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A try without a reply."""

    reason: str
    by_answer: bool = False
    """The answer is to blame."""


class GraderPool:
    """Scores by the first given of sample.custom_rm_path, `--custom-rm-path`, `metadata["rm_type"]`, `--rm-type`."""

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
        """`eval_rm_types`: those that evaluation datasets name. `args`: handed to the user's functions, without
        secrets, and asked for the settings of graders. `ungradable_is_wrong`: an answer that a grader cannot deal with
        is scored as a wrong one; else it is unscored. Raises `ConfigError` on an unknown `rm_type`.
        """
        named = {rm_type, *eval_rm_types}
        self._graders = {name: GRADERS.get(name) for name in named if name}
        """Name -> grader; those of rows come when they are met, and cannot be import paths."""
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
        """Scores one sample. `Unscored` says why there is no score; raises `ConfigError` if no grader is chosen."""
        return (await self._grade([sample], group=False))[0]

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores all samples of a prompt, in order: by one call of the user's function, or one by one by a built-in."""
        if self._custom_rm_path is None:
            return list(await asyncio.gather(*(self.score(s) for s in samples)))
        return await self._grade(list(samples), group=True)

    async def close(self) -> None:
        """Kills every process, also those that are being started."""
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
        """Who grades the sample. Its own choice wins over the run's."""
        custom = sample.custom_rm_path or self._custom_rm_path
        if custom is not None:
            return self._function(custom)
        rm_type = sample.metadata.get("rm_type") or self._rm_type
        if not rm_type:
            raise ConfigError(
                f"sample {sample.index} has no grader: give --rm-type, --custom-rm-path or metadata rm_type"
            )
        return self._grader(str(rm_type))

    def _function(self, path: str) -> _Choice:
        """A user's function. Raises `HookError`."""
        if path not in self._is_async:
            function = load_custom(path)
            self._is_async[path] = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
            )
        if self._is_async[path]:
            return _Choice(path, self._concurrent, custom=True)
        return _Choice(path, self._serial, custom=True)

    def _grader(self, name: str) -> _Choice:
        """A grader of the registry. Raises `ConfigError`."""
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
        """A key of its own is its own to see."""
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
            "samples": [_wire(s, whole=choice.custom) for s in samples],
        }
        for _ in range(MAX_TRIES):
            async with lane.slot(self._timeout_s):
                reply = await self._ask(lane, message)
            if isinstance(reply, dict):
                return self._scores(choice, reply, len(samples))
            failed = reply
            if failed.reason.startswith("timeout") and lane.per_process == 1:
                break  # it had a process to itself, so the limit was its own
            lane = self._serial if lane is self._concurrent else lane
        return [self._failed(choice, failed.reason, by_answer=failed.by_answer)] * len(samples)

    def _failed(self, choice: _Choice, reason: str, *, by_answer: bool) -> Score:
        """What becomes of a sample whose grader failed."""
        if not by_answer or choice.wrong is None or not self._ungradable_is_wrong:
            return Unscored(reason)
        return Scored(copy.deepcopy(choice.wrong), ungradable=reason)

    def _scores(self, choice: _Choice, reply: dict[str, Any], num_samples: int) -> list[Score]:
        """Decodes a reply; whatever does not fit becomes a reason."""
        entries = reply.get("scores")
        if not isinstance(entries, list) or len(entries) != num_samples:
            return [Unscored("the grader process sent a malformed reply")] * num_samples
        return [
            Scored(e["value"])
            if "value" in e
            else self._failed(choice, str(e.get("ungradable", e.get("unscored"))), by_answer="ungradable" in e)
            for e in entries
        ]

    async def _ask(self, lane: _Lane, message: dict[str, Any]) -> dict[str, Any] | _Failed:
        """One try: the reply, or why there is none."""
        try:
            process = await self._process(lane, message)
        except (GraderDied, OSError) as problem:
            return _Failed(f"no grader process could be started: {problem!r}")
        try:
            grace_s = ASYNC_GRACE_S if lane is self._concurrent else 0.0
            reply = await process.ask(message, grace_s=grace_s, computes=message["computes"])
            if not reply.get("out_of_memory") or lane.per_process > 1:
                return reply
            await self._drop(lane, process)  # with what earlier gradings left in it; the next try has another
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
            if lane.per_process == 1:  # it is still busy with what nobody waits for
                await asyncio.shield(self._drop(lane, process))
            raise
        finally:
            process.num_reserved -= 1

    async def _process(self, lane: _Lane, message: dict[str, Any]) -> GraderProcess:
        """Reserves a place in an idle process, else in a new one, else in the least busy one if it takes several."""
        while True:
            for dead in [p for p in lane.processes if p.dead]:
                await self._drop(lane, dead)
            process = min(lane.processes, key=lambda p: p.num_reserved, default=None)
            full = len(lane.processes) + len(lane.starting) >= lane.max_processes + lane.num_slow
            if process is not None and (
                process.num_reserved == 0 or (full and process.num_reserved < lane.per_process)
            ):
                process.num_reserved += 1  # no await since the choice: nobody else can have taken the place
                return process
            if full:
                await asyncio.sleep(START_POLL_S)
                continue
            await self._start(lane, message)

    async def _start(self, lane: _Lane, message: dict[str, Any]) -> None:
        """Adds a process to the lane. Raises `SlimeError` once the pool is closed, which ends the start."""

        async def start() -> None:
            others = [(name, self._settings_of(kind)) for name, kind in self._graders.items() if kind.held]
            warm_up = {**message, "others": others if lane is self._held else []}
            process = await GraderProcess.start(self._settings, warm_up=warm_up, kind=lane.kind)
            lane.processes.append(process)  # here, so that no cancellation comes between
            if process.missing and not self._warned:
                self._warned = True
                logger.warning("graders of texts are not held by %s on this machine", " and ".join(process.missing))

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
        """Raises `SlimeError` after `close`."""
        if self._closed:
            raise SlimeError("the grader pool is closed; nothing can be scored any more")

    async def _drop(self, lane: _Lane, process: GraderProcess) -> None:
        if process in lane.processes:
            lane.processes.remove(process)
        await process.kill()


def _num_chars(value: Any) -> int:
    """Characters of the text inside a nest of lists and dicts."""
    if isinstance(value, dict):
        return sum(_num_chars(k) + _num_chars(v) for k, v in value.items())
    return (
        sum(map(_num_chars, value)) if isinstance(value, list | tuple) else len(value) if isinstance(value, str) else 1
    )


def _wire(sample: Sample, *, whole: bool) -> dict[str, Any]:
    """The sample as JSON; unless `whole`, without the per-token lists: most of the bytes, read by no built-in.

    No grader gets the routed experts, which say nothing about an answer.
    """
    without: dict[str, Any] = {} if whole else {**dict.fromkeys(PER_TOKEN), "tokens": [], "response_length": 0}
    return dataclasses.replace(sample, rollout_routed_experts=None).to_dict() | without


# Whether this machine can hold the code that graders run, looked at before any process starts.
#
# The settings cannot say it: what is refused here may run on another machine.

ALLOW = "allow_unconfined_code"
"""Setting of a grader that runs code."""


def code_problems(args: Args) -> list[str]:
    """What is wrong if a grader that the settings name runs code which nothing would hold here; empty if nothing.

    A grader that a row names is refused when it is asked: its samples stay unscored, with the same reason.
    """
    named = {args.rm_type, *(one.rm_type for one in eval_datasets(args))}
    kinds = [GRADERS.get(name) for name in sorted(name for name in named if name)]
    if not any(kind.runs_code and not settings_of(kind, args).get(ALLOW) for kind in kinds):
        return []
    from slime.rewards.graders.sandbox import missing_here, refusal

    try:
        missing = missing_here()
    except OSError as error:
        return [str(error)]
    return [refusal(missing)] if missing else []
