"""How a run stops early, so that the same command continues it, and how it restarts by itself (`--max-restarts`).

`StopRequest` is set by SIGUSR1, by SIGTERM with `--exit-signal-handler`, and by `--exit-duration-in-mins`. The driver
looks at it once per step, saves a checkpoint after that step, and exits with `AGAIN`. Before the first step of a
launch, only a signal stops it, so that a time limit shorter than the start does not requeue a run for ever.

`--max-restarts` restarts a run from its newest checkpoint after a fault:

    keeper (this process)   has only the settings and one thread; no Ray, no torch, no run state
    launch 0, 1, ...        processes forked by the keeper one after the other; each is the driver of a complete run

Each launch is a separate process for three reasons. Ray reads its environment on import and keeps threads and object
refs of a dead cluster. A background save may hang on a dead rank. And a driver that was killed cannot restart itself.
Launches are forked because the keeper has already parsed the settings. Without `--max-restarts`, there is no keeper,
and this process is the driver.

The keeper waits for a launch to exit, reads the reason from a pipe, and waits until all of the launch's processes on
this host have exited. Then it starts the next launch in the same run folder or exits with the last launch's status. It
forwards SIGINT, SIGTERM and SIGUSR1 to the current launch and does not start another one afterwards.

    restarted after        a process died (`ActorDied`, the driver), an engine or router could not be restarted
                           (`EngineError`), a host or Ray failed (`ClusterFailed`), a wait timed out
    not restarted after    invalid settings, an exception in a hook, a library or slime, non-finite numbers, a request
                           that can never succeed, many failed groups in a row
    stopped by the user    Ctrl-C, SIGTERM, and the requests to stop early

Invariants
1. A launch starts only when no process of the previous launch is left on this host. The previous launch's guardian
   kills them. The keeper is not a subreaper. Otherwise the guardian would become its child, and a command that kills
   all descendants of the keeper would also kill the guardian.
2. No launch outlives the keeper.
3. A restart resumes like a run with `--load`: the ledger continues from the checkpoint.
4. There are at most `--max-restarts` restarts, and none after `MOST_IN_VAIN` launches in a row without a new step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from slime.cluster.guardian import ending_guardians
from slime.cluster.hosts import on_fewer_hosts
from slime.core.blame import error_line
from slime.core.errors import (
    AGAIN,
    CheckpointError,
    ClusterFailed,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    GroupsFailed,
    RequestRejected,
)
from slime.core.processes import RUN_ID_ENV, die_with_parent, new_run_id
from slime.core.text import visible
from slime.observability.sinks import AXES, read_jsonl
from slime.serving.child_process import ProcessFamily
from slime.settings import Args
from slime.settings.command_line import report_and_exit
from slime.settings.groups.training import has_checkpoint

EARLY = signal.SIGUSR1
"""The signal that always means: stop after the current step."""
ECHO_S = 2.0


class StopRequest:
    """Whether the driver has been asked to stop after its current step. Used on the main thread, as are handlers."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds; starts now. With `--max-restarts`, the keeper creates the request, so it counts all
        launches."""
        self._clock, self._began_s = clock, clock()
        self._signal: signal.Signals | None = None
        self._heard_s = 0.0

    def listen(self, args: Args) -> None:
        """Installs the handlers of the driver. Does nothing in a thread, which cannot."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(EARLY, self.hear)
            if args.exit_signal_handler:
                signal.signal(signal.SIGTERM, self.hear)

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handles a signal."""
        if self._signal is None:
            self._signal, self._heard_s = signal.Signals(number), self._clock()
            _say(f"received {self._signal.name}: the run stops after this step, with a checkpoint if it has --save")

    def takes(self, number: int) -> bool:
        """Handles a signal if it is the first one, or an echo of it. Returns whether it did.

        A signal that a scheduler sends to all processes of a job comes from the keeper as well.
        """
        if self._signal is not None and self._clock() - self._heard_s > ECHO_S:
            return False
        self.hear(number)
        return True

    def heard(self) -> str | None:
        """Returns the signal that has asked the run to stop, or None."""
        return None if self._signal is None else self._signal.name

    def reason(self, args: Args) -> str | None:
        """Returns why the run should stop after its current step, or None."""
        if (heard := self.heard()) is not None:
            return heard
        minutes = args.exit_duration_in_mins
        over = minutes is not None and self._clock() - self._began_s >= 60 * minutes
        return f"--exit-duration-in-mins {minutes}" if over else None

    def code(self, args: Args) -> int:
        """Returns the exit code of a run that stops early: `AGAIN` if it saves checkpoints."""
        return AGAIN if args.save is not None else 128 + (self._signal or signal.SIGTERM)


MOST_IN_VAIN = 2
FAULTS = (EngineError, ClusterFailed, DeadlineExceeded)
LASTING = (RequestRejected, GroupsFailed)
"""Subclasses of `FAULTS` that a restart would not fix."""
REASON_CHARS = 400
NO_STEP = -1


@dataclass(frozen=True, slots=True)
class End:
    """How a launch failed."""

    reason: str
    is_fault: bool
    """Whether a restart might help."""
    num_hosts: int | None = None
    """The number of training hosts with which it would, if too few hosts were left."""

    @classmethod
    def by(cls, error: BaseException) -> End:
        said = error_line(error, REASON_CHARS) if isinstance(error, Exception) else type(error).__name__
        num_hosts = error.num_hosts if isinstance(error, ConfigError) else None
        is_fault = isinstance(error, FAULTS) and not isinstance(error, LASTING)
        return cls(said, is_fault or num_hosts is not None, num_hosts)


class Restarts:
    """Decides whether a run restarts."""

    def __init__(self, most: int, trained: int = NO_STEP) -> None:
        self.most, self.number = most, 0
        self._trained, self._in_vain = trained, 0

    def refusal(self, end: End, trained: int) -> str | None:
        """Returns why the run should not be restarted, or counts a restart and returns None.

        `trained`: the last trained step.
        """
        self._in_vain = 0 if trained > self._trained else self._in_vain + 1
        self._trained = max(trained, self._trained)
        if not end.is_fault:
            return "a restart would fail the same way"
        if self.number >= self.most:
            return f"all restarts are used up (--max-restarts {self.most})"
        if self._in_vain >= MOST_IN_VAIN:
            return (
                f"{self._in_vain} launches in a row did not train a new step, so a restart would not help. The last "
                f"launch failed with: {end.reason}"
            )
        self.number += 1
        return None


Loop = Callable[[Args], None]
PAUSE_S = 5.0
"""Delay between launches, during which an existing Ray cluster can free the slots of the previous launch."""
ORPHANS_LIMIT_S = 60.0
"""Timeout for a launch's remaining processes to exit. The guardian usually needs less than 15 s."""
LOOK_S = 0.2
BY_PEOPLE = (signal.SIGINT, signal.SIGTERM, EARLY)
MEANT = (*BY_PEOPLE, signal.SIGHUP, signal.SIGQUIT)
"""Signals sent by users to stop a process. Others are sent by the kernel, for example when memory runs out."""


@dataclass(frozen=True, slots=True)
class Restart:
    number: int
    """Restart number, starting from 1."""
    most: int
    because: str
    """How the previous launch failed."""
    checkpoint: str | None
    """The checkpoint from which the run resumes. None: no checkpoint was saved, so the run starts over."""
    step: int
    """First step of this launch (zero-based)."""
    num_hosts: int | None = None
    """The number of training hosts, if that is fewer than --actor-num-nodes."""

    def __str__(self) -> str:
        source = "no checkpoint is complete yet" if self.checkpoint is None else f"from {self.checkpoint}"
        fewer = f" on {self.num_hosts} training hosts, because no more are there" if self.num_hosts else ""
        where = f"continues with step {self.step}, {source}{fewer}"
        return f"restart {self.number} of {self.most}: {where}; the last launch failed with: {self.because}"

    def facts(self) -> dict[str, object]:
        return asdict(self)


_restart: Restart | None = None
_stop: StopRequest | None = None


def stop_request() -> StopRequest:
    """Returns the request of this process. A loop without `restarting` gets one when it starts."""
    global _stop
    _stop = StopRequest() if _stop is None else _stop
    return _stop


def this_restart() -> Restart | None:
    """Returns information about this process's restart, or None in the first launch of a run."""
    return _restart


def restarting(loop: Loop) -> Loop:
    """Wraps a training loop so that it is restarted after faults, up to `--max-restarts` times."""

    @functools.wraps(loop)
    def run(args: Args) -> None:
        global _stop
        _stop = StopRequest()
        if args.max_restarts:
            _Keeper(loop, args).run()
        else:
            loop(args)

    return run


class _Keeper:
    """Launches a run until it succeeds, is stopped by a signal, or a restart would not help."""

    def __init__(self, loop: Loop, args: Args) -> None:
        """Raises `ConfigError` if this process cannot be forked safely."""
        if threading.active_count() > 1 or "ray" in sys.modules:
            raise ConfigError(
                "--max-restarts cannot fork launches from this process because it has threads or has imported Ray; "
                "call the loop from a plain script or drop the flag"
            )
        if args.use_wandb and args.wandb_run_id is None:
            args = args.replace(wandb_run_id=args.run_id)  # all launches share one W&B run
        self._loop, self._args, self._all_hosts = loop, args, args
        self._child: int | None = None
        self._asked: int | None = None
        """The signal that asked the run to stop."""

    def run(self) -> None:
        """Returns after a successful launch. Otherwise, raises `SystemExit` with the last launch's exit status."""
        before = {number: signal.signal(number, self._hand_on) for number in BY_PEOPLE}
        try:
            self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        restarts, restart = Restarts(self._args.max_restarts, last_trained(self._args)), None
        while (code := self._start(restart)) != 0:
            end = self._end
            early = self._asked == EARLY or (self._asked == signal.SIGTERM and self._args.exit_signal_handler)
            if code == AGAIN or (self._asked is not None and not early):
                raise SystemExit(code)
            why_not = restarts.refusal(end, last_trained(self._args)) or self._what_is_left()
            if why_not is None and early:
                why_not, code = f"it was asked to stop early; the last launch failed with: {end.reason}", AGAIN
            if why_not is not None:
                _say(f"the run is not restarted: {why_not}")
                raise SystemExit(code)
            restart = self._next(restarts, end)
            _say(str(restart))
            time.sleep(PAUSE_S)

    def _next(self, restarts: Restarts, end: End) -> Restart:
        """Prepares the next launch to load the newest checkpoint."""
        save = str(self._args.save)
        saved = has_checkpoint(save)
        wait_s = max(self._args.cluster_wait_s, self._args.restart_wait_s if self._args.ray_address else 0.0)
        load = save if saved else None
        args = self._all_hosts if end.num_hosts is None else on_fewer_hosts(self._all_hosts, end.num_hosts)
        self._args = args.replace(run_id=new_run_id(), load=load, cluster_wait_s=wait_s)
        name, step = _newest(save) if saved else (None, int(self._args.start_rollout_id or 0))
        return Restart(restarts.number, restarts.most, end.reason, name, step, end.num_hosts)

    def _start(self, restart: Restart | None) -> int:
        """Runs one launch. Returns its exit status and sets `_end`."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        keeper = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, BY_PEOPLE)
        child = os.fork()
        if child == 0:
            _be_start(self._loop, self._args, restart, write, keeper)
        self._child = child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BY_PEOPLE)
        os.close(write)
        _, status = os.waitpid(child, 0)
        self._child = None
        os.set_blocking(read, False)
        with open(read, "rb") as pipe:
            self._end = _end_of(status, pipe.read() or b"")
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _what_is_left(self) -> str | None:
        """Waits until all processes of the last launch have exited. Returns an error message if some are left."""
        run_id, deadline = self._args.run_id, time.monotonic() + ORPHANS_LIMIT_S
        family = ProcessFamily(RUN_ID_ENV, run_id)
        while (left := [p.name for p in family.refresh()]) or ending_guardians(run_id):
            if time.monotonic() > deadline:
                return (
                    f"processes of the last launch are still running after {ORPHANS_LIMIT_S:.0f} s: "
                    f"{', '.join(left) or 'its guardian'} (see the environment variable {RUN_ID_ENV})"
                )
            time.sleep(LOOK_S)
        return None

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal to the current launch.

        The launch has its own process group, so it does not receive the signal from the terminal as well.
        """
        self._asked = number
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number == EARLY or self._args.exit_signal_handler:
            sys.exit(AGAIN)
        else:
            sys.exit(128 + number)


def last_trained(args: Args) -> int:
    """Returns the last trained step in the run's metrics, or `NO_STEP`."""
    record, axis = Path(args.run_dir) / "metrics.jsonl", AXES["train"]
    rows = read_jsonl(record) if record.is_file() else []
    return max((int(row[axis]) for row in rows if axis in row), default=NO_STEP)


def _newest(save: str) -> tuple[str, int]:
    """Returns the name of the checkpoint that `--load` would select and the step after it."""
    from slime.training.state import checkpoint

    try:
        found = checkpoint.find(Path(save))
    except CheckpointError:  # the next launch reports the problem
        found = None
    return (found.path.name, found.rollout_id + 1) if found is not None else (save, 0)


def _be_start(loop: Loop, args: Args, restart: Restart | None, verdict: int, keeper: int) -> NoReturn:
    """Runs the loop as the driver, reports the outcome to the keeper, and exits. Never returns."""
    global _restart
    code = 1
    try:
        die_with_parent(keeper)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a background process group cannot read from the terminal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(EARLY, stop_request().hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BY_PEOPLE)
        _restart = restart
        try:
            loop(args)
            code = 0
        except BaseException as error:
            os.write(verdict, json.dumps(asdict(End.by(error))).encode())
            report_and_exit(error, Path(args.run_dir).resolve() / "logs")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_of(status: int, said: bytes) -> End:
    """Returns how a launch failed, from its own report if there is one, else from its exit status."""
    if said:
        return End(**json.loads(said))
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        return End(f"{number.name}, which killed the driver", is_fault=number not in MEANT)
    return End(f"exit status {os.WEXITSTATUS(status)} of the driver, for an unknown reason", is_fault=True)


def _say(text: str) -> None:
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()
