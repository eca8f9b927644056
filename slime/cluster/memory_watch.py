"""Reports whether a run failed because it ran out of memory, and how much memory each process used.

A process killed by the kernel leaves no message and can no longer be measured. So a thread of the driver measures the
run's processes on this host every `LOOK_EVERY_S`, and the error of a failed run includes the last measurements.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import ProcessFamily, ProcessId, read_stat

LOOK_EVERY_S = 5.0
NUM_SHOWN = 5
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Usage:
    id: ProcessId
    name: str
    rss_bytes: int
    """Resident memory. Shared pages count for every process that maps them."""
    peak_bytes: int
    """Highest measured `rss_bytes`."""


def num_oom_kills() -> int | None:
    """Returns the number of OOM kills in this cgroup, or else on this host.

    Returns None if the kernel does not report it.
    """
    for path in (
        _own_group() / "memory.events",
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
        Path("/proc/vmstat"),
    ):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _own_group() -> Path:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup", line.removeprefix("0::").lstrip("/"))
    return Path("/sys/fs/cgroup")


def read_usage(id: ProcessId, default_name: str, peak_bytes: int = 0) -> Usage | None:
    """Returns a process's memory usage, or None if the process is gone."""
    try:
        pages = int(Path(f"/proc/{id.pid}/statm").read_text().split()[1])
        words = Path(f"/proc/{id.pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):
        return None
    rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return Usage(id, _name(words, default_name), rss_bytes, max(rss_bytes, peak_bytes))


def _name(words: Sequence[bytes], default: str) -> str:
    """Returns the process title set by Ray or SGLang, else the Python module or the program name."""
    text = [w.decode(errors="replace") for w in words if w.strip()]
    if not text:
        return default
    if "-m" in text[:-1]:
        return text[text.index("-m") + 1]
    return text[0] if "::" in text[0] else Path(text[0]).name


class MemoryWatch:
    """Context manager with a background thread that measures the run's processes."""

    def __init__(self, run_id: str) -> None:
        self._family = ProcessFamily(RUN_ID_ENV, run_id)
        self._usages: dict[ProcessId, Usage] = {}
        self._before = num_oom_kills()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def look(self) -> list[Usage]:
        """Measures the run's processes and returns the latest measurements, including those of dead processes."""
        with self._lock:
            for stat in self._family.refresh():
                last = self._usages.get(stat.id)
                usage = read_usage(stat.id, stat.name, last.peak_bytes if last else 0)
                if usage is not None:
                    self._usages[stat.id] = usage
            return list(self._usages.values())

    def was_killed_for_memory(self) -> bool:
        """Returns whether there has been an OOM kill since this object was created."""
        now = num_oom_kills()
        return now is not None and self._before is not None and now > self._before

    def report(self) -> str:
        """Returns a note for a run's error message: OOM kills and the processes that used the most memory."""
        usages = sorted(self.look(), key=lambda u: u.peak_bytes, reverse=True)
        if self.was_killed_for_memory():
            kills = (num_oom_kills() or 0) - (self._before or 0)
            verdict = (
                f"the kernel killed {kills} process{'es' if kills > 1 else ''} during the run because memory ran out"
            )
        else:
            verdict = "the kernel did not kill any process for lack of memory"
        shown = ", ".join(_told(usage) for usage in usages[:NUM_SHOWN]) or "none seen"
        return f"memory: {verdict}; largest processes of the run, by peak memory: {shown}"

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()


def _told(usage: Usage) -> str:
    now = read_stat(usage.id.pid)
    gone = "" if now is not None and now.id == usage.id and now.state not in "ZX" else ", gone"
    return f"{usage.name} (pid {usage.id.pid}{gone}) {usage.peak_bytes / GIB:.1f} GiB"
