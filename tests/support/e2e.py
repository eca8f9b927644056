"""Whole runs as people start them: `train.py` or `train_async.py` in a process of its own, watched from outside.

`RealRun` starts one, waits for it, interrupts or kills its driver, reads what it recorded, and tells what it left.
A thread looks at the process table while the run lives and notes who belongs to the run, which ports they listen on
and which shared-memory files they use, because none of that can be asked afterwards.

Invariants
1. Signals go to the driver of this run, or to the session that was made for it; to nothing else.
2. Every wait has a limit, and its failure shows the end of the run's output.
3. A driver dies with the tests, also when they are killed; the guardian of its run removes the rest.
4. `OMP_NUM_THREADS` is 1 in every run: tiny models are fastest so, and equal bits need equal numbers of threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.core.processes import INTERFACE_ENVS, RUN_ID_ENV
from slime.core.sample import Sample
from slime.observability.sinks import AXES, read_jsonl
from slime.rollout.recordings import load_rollout
from slime.serving.child_process import ProcessId, all_processes, has_mark, shm_inodes_of
from tests.support.command_line import last_of_each
from tests.support.openness import Openness, keys_in, listening, open_to_others, sockets_of, temporary_folders

ROOT = Path(__file__).parents[2]
RUN_LIMIT_S = 1200.0
"""Limit of one run; on an idle two-core machine the longest takes a tenth of it."""
CLEAN_LIMIT_S = 15.0
"""What the promise allows between the end of the driver and the last trace of the run."""
WATCH_EVERY_S = 1.0
"""A look takes some ten milliseconds of the cores that the run needs."""
NUMBERS = re.compile(r"(?<![0-9a-z])\d+(?![0-9a-z])")
"""In names of files: pids, and not the digits of random hexadecimals."""

WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Before a command (util-linux): the kernel kills it when the thread that started it ends."""

NUM_STEPS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 16, 8, 8
"""Sizes of the runs of the digits task."""

MARKERS = {"rollout": "rollout/raw_reward", "train": "train/loss", "perf": "perf/step_time"}
"""Kind of a step -> a metric that tells it from other kinds on the same axis."""
Flags = list[str | Path]
"""A command line without the script."""
Metrics = dict[int, dict[str, float]]
"""Step -> metrics of one kind."""


def environment() -> dict[str, str]:
    """The environment of a run: this one's, without what a run must make for itself."""
    made = (RUN_ID_ENV, "RAY_ADDRESS", *INTERFACE_ENVS)  # a weight sync in this process sets the last ones
    own = {k: v for k, v in os.environ.items() if k not in made}
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}


def heed_interrupts() -> None:
    """Shells start what they put in the background with SIGINT ignored, and its children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def listeners() -> dict[str, int]:
    """Every listening TCP socket of this network namespace: inode -> port."""
    return {inode: where.port for inode, where in listening().items() if where.kind in ("tcp", "tcp6")}


def shared_memory() -> dict[str, int]:
    """Files in /dev/shm: name -> inode."""
    files: dict[str, int] = {}
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(OSError):
            files[entry.name] = entry.inode()
    return files


@dataclass(slots=True)
class Traces:
    """What one run was seen to use. Written by the watching thread, read after the driver's end."""

    driver: int
    """Pid of the driver."""
    run_id: str | None = None
    """Known once the run wrote its folder."""
    members: set[ProcessId] = field(default_factory=set)
    """Processes that carry the run's mark or descend from the driver, the guardian included."""
    strangers: set[tuple[ProcessId, str]] = field(default_factory=set)
    """Others, by process and name: a look at the environment of each, once, is enough."""
    sockets: dict[str, int] = field(default_factory=dict)
    """Inode -> port of each listening socket of a member."""
    shm: set[int] = field(default_factory=set)
    """Inodes in /dev/shm that a member had mapped or open: other tests of this host have files there, too."""
    shm_before: dict[str, int] = field(default_factory=shared_memory)
    open: Openness = field(default_factory=Openness)
    """What others on this host could get at."""

    def look(self) -> None:
        """Notes members, ports and files of this moment."""
        processes = all_processes()
        mark = None if self.run_id is None else f"{RUN_ID_ENV}={self.run_id}".encode()
        mine = {pid for pid, s in processes.items() if s.id in self.members}
        if self.driver in processes:
            mine.add(self.driver)
        for pid, stat in processes.items():
            if pid in mine or mark is None or (stat.id, stat.name) in self.strangers:
                continue
            if has_mark(pid, mark):
                mine.add(pid)
            else:
                self.strangers.add((stat.id, stat.name))
        grown = True
        while grown:
            children = {pid for pid, s in processes.items() if s.parent in mine} - mine
            mine |= children
            grown = bool(children)
        self.members |= {processes[pid].id for pid in mine}
        open_now = listeners()
        for pid in mine:
            self.sockets.update({inode: open_now[inode] for inode in sockets_of(pid) & open_now.keys()})
            self.shm |= shm_inodes_of(pid)
        if self.run_id is not None:
            self.open.look(self.run_id, {pid: processes[pid].name for pid in mine}, self.shm)

    def left(self) -> list[str]:
        """What there still is of the run; empty is what was promised."""
        self.look()
        processes = all_processes()
        alive = [s for s in processes.values() if s.id in self.members and s.state not in "ZX"]
        open_now = listeners()
        found = [f"process {s.id.pid} {s.name} in state {s.state}" for s in alive]
        found += [f"port {port}" for inode, port in self.sockets.items() if open_now.get(inode) == port]
        new = {name: inode for name, inode in shared_memory().items() if self.shm_before.get(name) != inode}
        if new:  # what a living process of somebody else uses is not ours
            others = set().union(*(shm_inodes_of(pid) for pid in processes.keys() - {s.id.pid for s in alive}))
            pids = {member.pid for member in self.members}
            own = {n for n, inode in new.items() if inode in self.shm or pids & set(map(int, NUMBERS.findall(n)))}
            found += [f"/dev/shm/{name}" for name in sorted(own) if new[name] not in others]
        return found + [str(path) for path in temporary_folders(self.run_id)] if self.run_id else found


class RealRun:
    """One process tree. Use as a context manager: whatever happens in the block, its driver is ended."""

    def __init__(
        self, run_dir: Path, flags: Flags, *, script: str = "train.py", more_env: dict[str, str] | None = None
    ) -> None:
        """`script`: a loop, or bash that starts one. `more_env`: variables beside those of `environment`."""
        self.run_dir = run_dir
        heed_interrupts()
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.with_name(f"{run_dir.name}.{time.time_ns()}.out")
        self._started_s = time.monotonic()
        self.seconds = 0.0
        """From the start to the end of the driver."""
        self.clean_s = 0.0
        """From the first question whether anything is left to the answer."""
        interpreter = "bash" if script.endswith(".sh") else sys.executable
        words = [interpreter, script, "--device", "cpu", *last_of_each(flags), "--run-dir", str(run_dir)]
        with self._output.open("wb") as output:
            self._driver = subprocess.Popen(
                [*WITH_ITS_PARENT, *words],
                cwd=ROOT,
                env={**environment(), **(more_env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.traces = Traces(self._driver.pid)
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="traces", daemon=True)
        self._watcher.start()

    def __enter__(self) -> RealRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        self._stop_watching()

    def _watch(self) -> None:
        starts = self._num_starts()
        while not self._over.wait(WATCH_EVERY_S):
            if self.traces.run_id is None and self._num_starts() > starts:
                self.traces.run_id = self._starts()[-1]["run_id"]
            self.traces.look()

    def _starts(self) -> list[dict[str, Any]]:
        record = self.run_dir / "run.json"
        return list(json.loads(record.read_text())["starts"]) if record.is_file() else []

    def _num_starts(self) -> int:
        return len(self._starts())

    def _stop_watching(self) -> None:
        self._over.set()
        self._watcher.join()

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """What the driver wrote to its terminal."""
        return self._output.read_text(errors="replace")

    @property
    def tail(self) -> str:
        """The end of the output, for the message of a failed assertion."""
        return f"output of {self.run_dir.name}:\n{self.output[-3000:]}"

    def wait(self, limit_s: float = RUN_LIMIT_S) -> int:
        """Exit status of the driver."""
        try:
            status = self._driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run is not over after {limit_s:.0f} s; {self.tail}") from None
        self.seconds = time.monotonic() - self._started_s
        self._stop_watching()
        return status

    def wait_until(self, what: str, condition: Callable[[], bool], limit_s: float = RUN_LIMIT_S) -> None:
        """Returns when `condition` holds. Fails if the run ends before, or after `limit_s`."""
        wait_until(self._driver, what, condition, limit_s, tail=lambda: self.tail)

    def kill(self) -> None:
        """SIGKILL of the driver alone, as the kernel's out-of-memory killer would."""
        self.traces.look()
        self._driver.kill()
        self._driver.wait()
        self._stop_watching()

    def signal(self, number: signal.Signals, whom: str) -> None:
        """Sends a signal to the `driver`, to its `session`, or to all its `descendants`, itself included."""
        self.traces.look()
        above, found = {self._driver.pid}, {self._driver.pid}
        processes = all_processes()
        while above := {pid for pid, process in processes.items() if process.parent in above} - found:
            found |= above
        sessions = {pid for pid, process in processes.items() if process.session == self._driver.pid}
        for pid in {"driver": {self._driver.pid}, "session": sessions, "descendants": found}[whom]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def interrupt(self) -> int:
        """Ctrl-C: SIGINT to the process group of the driver, as a terminal sends it. Returns the exit status."""
        self.traces.look()
        os.killpg(self._driver.pid, signal.SIGINT)
        return self.wait(240)

    def left(self, limit_s: float = CLEAN_LIMIT_S) -> list[str]:
        """What is left of the run `limit_s` after its driver ended; returns as soon as nothing is."""
        assert self._driver.poll() is not None, "the driver still runs"
        assert self.traces.run_id is not None, f"the run ended before it wrote its folder; {self.tail}"
        assert len(self.traces.members) > 3, f"only {len(self.traces.members)} processes of the run were seen"
        asked_s = time.monotonic()
        while (found := self.traces.left()) and time.monotonic() < asked_s + limit_s:
            time.sleep(0.25)
        self.clean_s = time.monotonic() - asked_s
        return found

    def require_closed(self) -> None:
        """Fails with all that others on this host could get at while it ran, or can in its folder."""
        opened = self.traces.open
        assert len(opened.asked) > 5 and opened.keys, f"only {sorted(opened.asked.values())} were looked at"
        assert "requires no token" not in self.output, "Ray of the run itself requires one"
        assert opened.complaints == set(), "\n".join(sorted(opened.complaints))
        assert open_to_others(self.run_dir) == []
        assert keys_in(self.run_dir, opened.keys, but=("router_key",)) == []

    # --- what it recorded ---------------------------------------------------------------------------------------------

    def metrics(self, kind: str) -> Metrics:
        """Step -> metrics of one of `MARKERS`; the last word on a step that was done twice."""
        axis, marker = AXES[kind], MARKERS[kind]
        rows = read_jsonl(self.run_dir / "metrics.jsonl")
        return {int(row[axis]): row for row in rows if axis in row and marker in row}

    def series(self, kind: str, name: str) -> list[float]:
        """One metric over the steps, in order."""
        rows = self.metrics(kind)
        return [rows[step][name] for step in sorted(rows)]


def wait_until(
    driver: subprocess.Popen[bytes],
    what: str,
    condition: Callable[[], bool],
    limit_s: float,
    *,
    tail: Callable[[], str],
) -> None:
    """Returns when `condition` holds. Fails with `tail` if the driver ends before, or after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert driver.poll() is None, f"the run ended ({driver.returncode}) before {what}; {tail()}"
        assert time.monotonic() < deadline, f"no {what} after {limit_s:.0f} s; {tail()}"
        time.sleep(0.02)


def digits_task(model: Path, data: Path) -> Flags:
    """A model, and the prompts of the digits task with their reward."""
    task: Flags = ["--hf-checkpoint", model, "--prompt-data", data]
    task += ["--input-key", "prompt", "--label-key", "label", "--apply-chat-template"]
    return [*task, "--custom-rm-path", "recipes.tiny.tasks:digit_fraction"]


def sums_task(model: Path, data: Path, *, num_steps: int = NUM_STEPS) -> Flags:
    """Fine-tuning on the sums task, which needs no engine, with a learning rate that changes."""
    task: Flags = ["--hf-checkpoint", model, "--loss-type", "sft_loss", "--prompt-data", data]
    task += ["--input-key", "messages", "--rollout-shuffle", "--rollout-batch-size", "8", "--no-bf16"]
    task += ["--n-samples-per-prompt", "1", "--num-rollout", str(num_steps)]
    return [*task, "--lr", "3e-3", "--lr-warmup-iters", "2", "--lr-decay-style", "linear", "--min-lr", "1e-3"]


@dataclass(frozen=True)
class Recorded:
    """A finished run with its checkpoints, its rollouts, and the flags that repeat it."""

    run: RealRun
    flags: Flags
    """Without --run-dir, --save, --load and the recording of rollouts."""
    save: Path
    rollouts: str
    """Template of the recorded rollouts."""


def started_and_finished(run_dir: Path, flags: Flags, *, script: str = "train.py") -> RealRun:
    """A run from start to end, which must be a success."""
    with RealRun(run_dir, flags, script=script) as run:
        status = run.wait()
        assert status == 0, f"exit status {status}; {run.tail}"
    return run


def latest_step(save: Path) -> int:
    """Last step of the newest committed checkpoint below `save`; -1 if there is none."""
    record = save / "latest.json"
    return int(json.loads(record.read_text())["rollout_id"]) if record.is_file() else -1


def rank_files(save: Path, step: int) -> dict[str, bytes]:
    """Weights, optimizer and RNG of every rank after `step`: file name -> content."""
    files = sorted((save / f"step_{step:06d}").glob("rank_*.safetensors"))
    assert files, f"no rank wrote into step {step} of {save}"
    return {file.name: file.read_bytes() for file in files}


def rank_settings(save: Path, step: int) -> dict[str, dict[str, Any]]:
    """Numbers beside the tensors of every rank after `step`: optimizer groups, schedule, weight version, layout.

    Without the state of Python's own generator, which libraries in the process draw from as they like.
    """
    files = sorted((save / f"step_{step:06d}").glob("rank_*.json"))
    return {f.name: {k: v for k, v in json.loads(f.read_text()).items() if k != "rng"} for f in files}


def recorded_groups(template: str, step: int) -> list[list[Sample]]:
    """The groups of one recorded rollout."""
    return load_rollout(Path(template.replace("{rollout_id}", str(step))))[1]
