"""A whole run whose driver is on the first of some hosts (`tests.support.hosts`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slime.observability.sinks import AXES, read_jsonl
from tests.support.command_line import last_of_each
from tests.support.e2e import MARKERS, ROOT, Flags, Metrics, environment, wait_until
from tests.support.hosts import FakeCluster, FakeHost, child_of

RUN_LIMIT_S = 600.0
CLEAN_LIMIT_S = 30.0
"""Between the driver's end and the last trace on a host: Ray has to notice, then the guardian has 10 s."""


class HostedRun:
    """One run. Use as a context manager: whatever happens in the block, its driver is ended."""

    def __init__(
        self,
        cluster: FakeCluster,
        run_dir: Path,
        flags: Flags,
        *,
        script: str = "train.py",
        by_variable: bool = False,
        more_env: dict[str, str] | None = None,
    ) -> None:
        """`by_variable`: the driver finds the cluster by RAY_ADDRESS, not by its flag. `more_env`: variables of the
        driver."""
        self.run_dir, self._hosts = run_dir, cluster.hosts
        self.clean_s = 0.0
        """From the first question whether anything is left to the answer."""
        self._output = run_dir.with_name(f"{run_dir.name}.out")
        joined = [] if by_variable else ["--ray-address", cluster.address]
        words = [sys.executable, str(ROOT / script), "--device", "cpu", *joined, *last_of_each(flags)]
        env = {**environment(), **cluster.environment, **(more_env or {})}
        env |= {"RAY_ADDRESS": cluster.address} if by_variable else {}
        with self._output.open("wb") as output:
            self._enter = subprocess.Popen(
                cluster.hosts[0].command([*words, "--run-dir", str(run_dir)]),
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> HostedRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    @property
    def tail(self) -> str:
        """The end of the output, for the message of a failed assertion."""
        return f"output of {self.run_dir.name}:\n{self.output[-4000:]}"

    @property
    def output(self) -> str:
        """What the driver wrote to its terminal."""
        return self._output.read_text(errors="replace")

    def wait(self) -> int:
        """Exit status of the driver."""
        return self._enter.wait(RUN_LIMIT_S)

    def wait_until(self, what: str, condition: Callable[[], bool], limit_s: float = RUN_LIMIT_S) -> None:
        """Returns when `condition` holds. Fails if the run ends before, or after `limit_s`."""
        wait_until(self._enter, what, condition, limit_s, tail=lambda: self.tail)

    def interrupt(self) -> int:
        """Ctrl-C at the driver, which ends in order; its exit status."""
        os.kill(child_of(self._enter.pid), signal.SIGINT)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL of the driver alone."""
        os.kill(child_of(self._enter.pid), signal.SIGKILL)  # `nsenter` waits for it
        self._enter.wait(30)

    def end(self) -> None:
        """SIGKILL of the driver, unless it has ended."""
        if self._enter.poll() is None:
            self.kill()

    def left_now(self, host: FakeHost) -> list[str]:
        """What there is of the run on a host."""
        run_id = json.loads((self.run_dir / "run.json").read_text())["starts"][-1]["run_id"]
        return host.left_of(run_id)

    def left_on_hosts(self) -> list[str]:
        """What is left of the run on all hosts some time after its driver ended; returns as soon as nothing is."""
        asked_s = time.monotonic()
        while (found := [x for host in self._hosts for x in self.left_now(host)]) and (
            time.monotonic() < asked_s + CLEAN_LIMIT_S
        ):
            time.sleep(0.25)
        self.clean_s = time.monotonic() - asked_s
        return found

    def metrics(self, kind: str) -> Metrics:
        """Step -> metrics of one of `MARKERS`."""
        file = self.run_dir / "metrics.jsonl"
        axis, marker = AXES[kind], MARKERS[kind]
        rows = read_jsonl(file) if file.is_file() else []
        return {int(row[axis]): row for row in rows if axis in row and marker in row}
