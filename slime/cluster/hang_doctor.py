"""`HangDoctor`: notices that a process of the run stands still, reports who waits for whom, and ends an endless wait.

While the driver waits, it calls `tend` about twice a second, which never blocks. Every few seconds, `tend` asks each
training rank where it stands (`TrainActor.look`), asks the rollout process for a sign of life, and looks at the states
of the run's processes on every host (`run_processes`).

    a process is stopped (state T)         an incident after `STOPPED_S`
    no busy training rank moves            an incident after --hang-report-s
    the rollout process does not respond   an incident after --hang-report-s

A rank moves if its stack or its number of collectives changes, if it reads or writes, or, on a CPU, if it computes. A
rank that waits for an engine has a limit of its own. For an incident, all ranks report their stacks and pending
collectives; those that do not respond are read with py-spy on their host. `judge` turns this into one sentence. The
stacks go to `logs/hang_<n>.txt`.

After --hang-limit-s, a hang of the ranks or the rollout process ends the run with `Hung`, after which
--max-restarts restarts it. A rollout worker that stays stopped is killed and replaced. Engines have their own watch.

Everything runs on the driver's thread, except process scans, which run in a thread each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from slime.cluster.hosts import GuardedHosts
from slime.cluster.waiting import all_there, peek_all
from slime.core.blame import error_line
from slime.core.errors import Hung
from slime.core.processes import RUN_ID_ENV
from slime.observability.stacks import Standing, Verdict, gpu_state, judge, process_state, standing_of
from slime.rollout.guard import DaemonThreads
from slime.serving.child_process import ProcessFamily, ProcessId, read_stat
from slime.settings import Args

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY_S = 5.0
RANKS_PER_LOOK_S = 50
"""With many ranks, looks are rarer, so that the driver makes at most this many calls a second."""
STOPPED_S = 8.0
"""A process counts as stopped after this time, because debuggers and py-spy stop processes for a moment."""
EXAM_LIMIT_S = 20.0
"""How long an examination waits for stacks."""
REPLACE_S = 30.0
"""A rollout worker that is stopped for this long is killed."""
MOVED_BYTES = 2**20
LEAST_SHARE = 0.1
"""Bytes read or written, or the fraction of a core used, between two looks that count as progress."""
OWN_LIMIT = ("slime/weights/", "slime/serving/")
"""A rank that stands here, outside a collective, waits for an engine under --weight-sync-timeout-s."""
CALLS = "slime/cluster/train_actor.py"
"""The calls of this file are the work of a training rank."""
_RANK = re.compile(r"training rank (\d+)")
_LOGS = (
    (re.compile(r"train_(\d+)"), "training rank {}"),
    (re.compile(r"rollout_worker_(\d+)"), "rollout worker {}"),
    (re.compile(r"rollout"), "the rollout process"),
    (re.compile(r"engine_actor_(\w+)"), "the actor of engine {}"),
    (re.compile(r"engine_(\w+)"), "{name} of engine {}"),
    (re.compile(r"router\w*"), "the router"),
)
"""(log file that a process has open, its name in messages)."""


# --- On each host


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of the run on one host."""

    id: ProcessId
    name: str
    """As in messages, such as `training rank 1`."""
    host: str
    state: str
    """State in /proc."""

    @property
    def key(self) -> tuple[str, ProcessId]:
        """Process ids of two hosts may be equal."""
        return self.host, self.id


def name_of(pid: int, default: str) -> str:
    """Returns what messages call a process, by the log of the run that it has open."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                file = Path(os.readlink(link))
                if file.suffix == ".log" and file.parent.name == "logs":
                    for pattern, name in _LOGS:
                        if match := pattern.fullmatch(file.stem):
                            return name.format(*match.groups(), name=default)
    return default


def stopped_processes(run_id: str) -> list[RunProcess]:
    """Returns the run's processes on this host that are stopped."""
    found = [stat for stat in ProcessFamily(RUN_ID_ENV, run_id).refresh() if stat.state in ("T", "t")]
    host = socket.gethostname()
    return [RunProcess(stat.id, name_of(stat.id.pid, stat.name), host, stat.state) for stat in found]


def examine(run_id: str, responding: Iterable[str]) -> tuple[list[Standing], str]:
    """Reads the stacks of the run's processes on this host that matter and are not `responding`; also the GPUs' state.

    Those are training ranks, the rollout side, and every process that is stopped.
    """
    known, found = set(responding), []
    for stat in ProcessFamily(RUN_ID_ENV, run_id).refresh():
        name = name_of(stat.id.pid, stat.name)
        matters = stat.state in ("T", "t") or _RANK.fullmatch(name) or name.startswith(("rollout", "the rollout"))
        if matters and name not in known:
            found.append((stat.id.pid, name, CALLS if _RANK.fullmatch(name) else None))
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda one: standing_of(*one), found)), gpu_state()


# --- Who moves


@dataclass(frozen=True, slots=True)
class Look:
    """A training rank's answer to `TrainActor.look`."""

    standing: Standing
    computed_s: float
    """CPU time of the process so far."""
    bytes_moved: int
    """Bytes that the process has read and written so far."""


def bytes_moved() -> int:
    """Returns the number of bytes that this process has read and written with files so far; 0 if unknown."""
    try:
        words = Path("/proc/self/io").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("rchar:") + 1]) + int(words[words.index("wchar:") + 1])


@dataclass(slots=True)
class _Rank:
    last: Look | None = None
    seen_s: float = 0.0
    moved_s: float = 0.0


class Stillness:
    """Decides since when no busy training rank has moved. Pure."""

    def __init__(self, num_ranks: int, now_s: float, *, counts_cpu: bool) -> None:
        """`counts_cpu`: whether computing is progress. On a GPU, a rank that waits for a kernel uses a core."""
        self._ranks = [_Rank(moved_s=now_s, seen_s=now_s) for _ in range(num_ranks)]
        self._counts_cpu = counts_cpu

    def saw(self, rank: int, look: Look, now_s: float) -> None:
        """Takes a rank's answer."""
        one, last = self._ranks[rank], self._ranks[rank].last
        if last is None or not look.standing.places or self._moved(last, look, now_s - one.seen_s):
            one.moved_s = now_s
        one.last, one.seen_s = look, now_s

    def _moved(self, before: Look, now: Look, passed_s: float) -> bool:
        a, b = before.standing, now.standing
        if (a.places, a.enqueued) != (b.places, b.enqueued) or now.bytes_moved - before.bytes_moved >= MOVED_BYTES:
            return True
        if b.collective is None and any(part in b.places[-1].file or part in b.line for part in OWN_LIMIT):
            return True
        return self._counts_cpu and now.computed_s - before.computed_s >= LEAST_SHARE * passed_s

    def last(self, rank: int) -> Standing | None:
        """Returns where a rank stood when it last answered."""
        look = self._ranks[rank].last
        return None if look is None else look.standing

    def since_s(self, now_s: float, late_s: float) -> float | None:
        """Returns when a busy rank last moved, or None if no rank is busy.

        A rank that has not answered for `late_s` counts as busy, and as having moved when it last answered.
        """
        lost = [one.seen_s for one in self._ranks if now_s - one.seen_s > late_s]
        busy = [
            one.moved_s
            for one in self._ranks
            if now_s - one.seen_s <= late_s and one.last is not None and one.last.standing.places
        ]
        return max([*lost, *busy], default=None)


class StoppedProcesses:
    """Knows since when processes are stopped. A host's last answer counts until its next one. Pure."""

    def __init__(self) -> None:
        self._on: dict[object, dict[object, tuple[float, RunProcess]]] = {}

    def saw(self, host: object, found: Iterable[RunProcess], now_s: float) -> None:
        """Takes the answer of a host."""
        before = self._on.get(host, {})
        self._on[host] = {one.key: (before.get(one.key, (now_s,))[0], one) for one in found}

    def keep(self, hosts: Iterable[object]) -> None:
        """Forgets all hosts but these."""
        self._on = {host: self._on[host] for host in hosts if host in self._on}

    def all(self) -> dict[object, tuple[float, RunProcess]]:
        """Returns each stopped process by its key, with the time at which it was first seen stopped."""
        return {key: one for on_host in self._on.values() for key, one in on_host.items()}


# --- The driver's side


@dataclass(slots=True)
class Incident:
    """A hang that was noticed and is not over."""

    key: object
    """`ranks`, `rollout`, or a stopped process."""
    since_s: float
    process: RunProcess | None = None
    verdict: Verdict | None = None
    """None during the examination."""
    is_killed: bool = False


@dataclass(slots=True)
class _Exam:
    incident: Incident
    for_what: str
    end_s: float
    looks: dict[int, Any]
    here: Future[tuple[list[Standing], str]] | None = None
    """None until the ranks have had time to respond."""
    there: list[Any] = field(default_factory=list)


class HangDoctor:
    def __init__(
        self,
        args: Args,
        trainers: Sequence[Any],
        rollout: Any,
        hosts: GuardedHosts,
        log_dir: Path,
        *,
        tell: Callable[[str, str | None], None] = lambda key, text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell`: takes what stands still, and the sentence about it or, at its end, None."""
        self._args, self._trainers, self._rollout, self._hosts = args, trainers, rollout, hosts
        self._log_dir, self._tell, self._clock = log_dir, tell, clock
        self._report_s, self._limit_s = args.hang_report_s, args.hang_limit_s
        now = clock()
        self._still = Stillness(len(trainers), now, counts_cpu=args.device == "cpu")
        self._every_s = max(LOOK_EVERY_S, len(trainers) / RANKS_PER_LOOK_S)
        self._next_s, self._waits_since_s = now, now
        self._looks: dict[int, Any] = {}
        self._alive: Any = None
        self._alive_s = now
        self._threads = DaemonThreads()
        self._scan: Future[list[RunProcess]] | None = None
        """The scan of this host that has not finished."""
        self._scans: dict[object, Any] = {}
        """Handle of another host -> its scan that has not finished."""
        self._stopped = StoppedProcesses()
        self._incidents: dict[object, Incident] = {}
        self._exam: _Exam | None = None
        self._last_tend_s, self._num = now, 0

    @property
    def verdict(self) -> str | None:
        """The sentence about a hang of the ranks or the rollout process that is not over, or None."""
        return next((i.verdict.text for i in self._incidents.values() if i.verdict and self._is_vital(i)), None)

    def tend(self, for_what: str) -> None:
        """Looks once. Does not block. Raises `Hung` if a hang has lasted longer than --hang-limit-s."""
        if not self._report_s:
            return
        now = self._clock()
        if now - self._last_tend_s > 2 * LOOK_EVERY_S:  # the driver did not wait, so nobody was watched
            self._alive_s = now
            self._still = Stillness(len(self._trainers), now, counts_cpu=self._args.device == "cpu")
        self._last_tend_s = now
        self._collect(now)
        if now >= self._next_s:
            self._next_s = now + self._every_s
            self._ask(now)
        self._notice(for_what, now)
        self._continue_exam(now)
        self._end_endless(for_what, now)

    # --- looking

    def _ask(self, now: float) -> None:
        for rank, trainer in enumerate(self._trainers):
            if rank not in self._looks:
                self._looks[rank] = trainer.look.remote()
        if self._alive is None:
            self._alive = self._rollout.progress.remote()
        if self._scan is None:
            self._scan = self._threads.submit(stopped_processes, self._args.run_id)
        handles, scans = self._hosts.handles(), self._scans
        self._scans = {one: scans[one] if one in scans else one.actor.stopped.remote() for one in handles}
        self._stopped.keep((None, *handles))

    def _collect(self, now: float) -> None:
        refs = {ref: rank for rank, ref in self._looks.items()}
        for ref, look in peek_all(list(refs)).items():
            del self._looks[refs[ref]]
            if look is not None:
                self._still.saw(refs[ref], look, now)
        if self._alive is not None and all_there([self._alive]):
            self._alive, self._alive_s = None, now
        if self._scan is not None and self._scan.done():
            here, self._scan = _result(self._scan), None
            self._stopped.saw(None, here or (), now)
        hosts = {ref: handle for handle, ref in self._scans.items()}
        for ref, found in peek_all(list(hosts)).items():
            del self._scans[hosts[ref]]
            self._stopped.saw(hosts[ref], found or (), now)

    def _notice(self, for_what: str, now: float) -> None:
        found: dict[object, Incident] = {}
        all_stopped = self._stopped.all()
        for key, (since, process) in all_stopped.items():
            if now - since >= STOPPED_S:
                found[key] = Incident(key, since, process)
        since_s = self._still.since_s(now, 2 * self._every_s)
        stopped = {process.name for _, process in all_stopped.values()}
        if since_s is not None and now - since_s >= self._report_s and not any(map(_RANK.fullmatch, stopped)):
            found["ranks"] = Incident("ranks", since_s)
        if now - self._alive_s >= self._report_s and "the rollout process" not in stopped:
            found["rollout"] = Incident("rollout", self._alive_s)
        for key, incident in list(self._incidents.items()):
            if key not in found:
                del self._incidents[key]
                if self._exam is not None and self._exam.incident is incident:
                    self._exam = None  # it is over before anything was said about it
                if incident.verdict is not None:
                    self._tell(str(key), None)
                    since_s = now - incident.since_s
                    logger.warning("it moves again after %.0f s; the hang was: %s", since_s, incident.verdict.text)
        for key, incident in found.items():
            if key not in self._incidents and self._exam is None:
                self._incidents[key] = incident
                self._begin_exam(incident, for_what, now)

    # --- examining

    def _begin_exam(self, incident: Incident, for_what: str, now: float) -> None:
        looks = {rank: trainer.look.remote(True) for rank, trainer in enumerate(self._trainers)}
        self._exam = _Exam(incident, for_what, now + EXAM_LIMIT_S, looks)

    def _continue_exam(self, now: float) -> None:
        exam = self._exam
        if exam is None:
            return
        is_late = now > exam.end_s
        answers = peek_all(list(exam.looks.values()))
        responded = {rank: look for rank, ref in exam.looks.items() if (look := answers.get(ref)) is not None}
        if exam.here is None:
            if len(responded) < len(exam.looks) and now < exam.end_s - 0.75 * EXAM_LIMIT_S:
                return
            names = [f"training rank {rank}" for rank in responded]
            exam.here = self._threads.submit(examine, self._args.run_id, names)
            exam.there = [handle.actor.examine.remote(names) for handle in self._hosts.handles()]
        if not is_late and not (exam.here.done() and all_there(exam.there)):
            return
        parts = [part for part in (_result(exam.here), *peek_all(exam.there).values()) if part is not None]
        self._exam = None
        spied = [standing for standings, _ in parts for standing in standings]
        self._conclude(exam, responded, spied, [gpus for _, gpus in parts if gpus], now)

    def _conclude(
        self,
        exam: _Exam,
        responded: Mapping[int, Look],
        spied: Sequence[Standing],
        gpus: Sequence[str],
        now: float,
    ) -> None:
        of_ranks = {standing.name: standing for standing in spied if _RANK.fullmatch(standing.name)}
        ranks = [self._rank(rank, responded, of_ranks) for rank in range(len(self._trainers))]
        others = [standing for standing in spied if not _RANK.fullmatch(standing.name)]
        incident, process = exam.incident, exam.incident.process
        if incident.key == "ranks" or (process is not None and _RANK.fullmatch(process.name)):
            verdict = judge(ranks, waits_for=exam.for_what)
        else:
            name = process.name if process is not None else "the rollout process"
            mine = [s for s in others if process is None or (s.host, s.pid) == (process.host, process.id.pid)][:1]
            verdict = judge(
                mine or [Standing(name, process.host if process else "its host", 0, unread="it does not respond")],
                waits_for=exam.for_what,
            )
        incident.verdict = verdict
        self._num += 1
        file = self._log_dir / f"hang_{self._num:03d}.txt"
        said = f"nothing has moved for {now - incident.since_s:.0f} s: {verdict.text}"
        file.write_text("\n\n".join([said, *(s.text() for s in (*ranks, *others)), *gpus]) + "\n")
        logger.error("hang: %s; all stacks are in %s%s", said, file, self._what_follows(incident))
        follows = self._what_follows(incident)
        self._tell(str(incident.key), f"{said}; all stacks are in {file}{follows}")

    def _rank(self, rank: int, responded: Mapping[int, Look], spied: Mapping[str, Standing]) -> Standing:
        name = f"training rank {rank}"
        if rank in responded:
            return responded[rank].standing
        last = self._still.last(rank)
        if name in spied:
            return spied[name]
        if last is None:
            return Standing(name, "an unknown host", 0, unread="it does not respond")
        return replace(last, unread="it does not respond; this is where it last stood")

    def _what_follows(self, incident: Incident) -> str:
        if incident.process is not None and incident.process.name.startswith("rollout worker"):
            return f"; the worker is replaced after {REPLACE_S:.0f} s"
        if not self._is_vital(incident) or not self._limit_s:
            return ""
        restarts = "restarted from its newest checkpoint" if self._args.max_restarts else "ended"
        return f"; after {self._limit_s:.0f} s (--hang-limit-s), the run is {restarts}"

    def _is_vital(self, incident: Incident) -> bool:
        """Returns whether nothing but a restart of the run helps. Engines and rollout workers are replaced."""
        name = "" if incident.process is None else incident.process.name
        return incident.process is None or bool(_RANK.fullmatch(name)) or name == "the rollout process"

    def _end_endless(self, for_what: str, now: float) -> None:
        for incident in self._incidents.values():
            process = incident.process
            if incident.verdict is None:
                continue
            if self._is_vital(incident) and self._limit_s and now - incident.since_s > self._limit_s:
                raise Hung(
                    f"{incident.verdict.text}; this lasted {now - incident.since_s:.0f} s, and --hang-limit-s is "
                    f"{self._limit_s:.0f}"
                )
            is_worker = process is not None and process.name.startswith("rollout worker")
            if process is not None and is_worker and not incident.is_killed and now - incident.since_s > REPLACE_S:
                incident.is_killed = True
                logger.warning("killing %s, which is replaced", process.name)
                _kill(process.id)


def _result(future: Future[T]) -> T | None:
    """Returns the result of a thread, or None if it is not done or failed: the doctor must not end a healthy run."""
    if not future.done():
        return None
    if (error := future.exception()) is not None:
        logger.warning("the hang doctor could not look: %s", error_line(error))
        return None
    return future.result()


def _kill(id: ProcessId) -> None:
    stat = read_stat(id.pid)
    if stat is not None and stat.id == id and process_state(id.pid) in ("T", "t"):
        with contextlib.suppress(OSError):
            os.kill(id.pid, signal.SIGKILL)
