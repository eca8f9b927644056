"""Runs of a program that a model wrote: each a process tree of its own, bounded, and gone before the next begins.

A `Sandbox` holds one program and runs it once for each test. Its supervisor (`main`) is started once, which is most of
what a run would cost; for each test it waits with a deadline for three processes that it forks: a keeper, which makes
fresh namespaces; the first process of the PID namespace, so that with it everything dies that the program started; that
one's child is the program. Nothing of a program ever runs in the supervisor: it only forks, kills and reports.

What holds the program:
- namespaces: no network, no other process to see or signal, and a scratch disk of `SCRATCH_BYTES`;
- Landlock: files outside the scratch folder are not written, and none but Python's and the system's libraries are read;
- limits: CPU seconds, address space, size of a file (and of what it prints), processes. They hold on every kernel.

The first two need a Linux of 2021 or newer that allows user namespaces. Where one of them is missing no program runs,
unless the caller says that it may (`--allow-unconfined-code`).

Invariants
0. A program that is not held by all of them runs only if that was allowed.
1. After `run` no process of the program lives: the supervisor kills all of its descendants. With their processes go
   the scratch disk and all else but files that an unconfined program wrote elsewhere: no run sees one before it.
2. The program's memory never holds the expected output of a test. Assertions are another matter: they run in the
   program's own interpreter, so they, and the token that says that they passed, are read after its definitions ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""More than that, printed or written to one file, ends the program."""
SCRATCH_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 32
MAX_FILES = 64
"""Open at a time."""
WALL_FACTOR, WALL_EXTRA_S = 2.0, 1.0
"""Wall clock beside the CPU limit: a loaded machine must not fail a program, a sleeping one must end."""
PROBE_S = 20.0
"""For an empty program, however busy the machine is."""
SUPERVISOR_S = 10.0
"""Longer than this beyond the program's deadline no supervisor takes."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
CAPABILITY_VERSION_3 = 0x20080522
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_CHILD_SUBREAPER = 36
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
NAMESPACES, LANDLOCK = "namespaces", "Landlock"
WHAT_FOR = {
    NAMESPACES: "no network, no other process in sight, a scratch disk of its own",
    LANDLOCK: "no file outside of its folder",
}
"""What holds a program -> what for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit status; 128 + signal if a signal ended it."""
    timed_out: bool
    """It met the CPU or the wall limit."""
    output: str
    """What it printed, at most `MAX_OUTPUT_BYTES`."""
    result: list[Any] | None
    """[what the function returned, as JSON]; for assertions [True] if all hold; None if it did not get there."""
    missing: tuple[str, ...] = ()
    """Of `WHAT_FOR`, what did not hold the program."""


def missing_here() -> tuple[str, ...]:
    """Of `WHAT_FOR`, what this machine does not give. Takes as long as an empty program.

    Raises `OSError` if that does not end well.
    """
    with Sandbox("", time_limit_s=PROBE_S, memory_bytes=1 << 30, allow_unconfined=True) as sandbox:
        ended = sandbox.run({})
    if ended.code != 0:
        raise OSError(f"got status {ended.code} from an empty program in the sandbox; look at load and free memory")
    return ended.missing


def refusal(missing: Sequence[str]) -> str:
    """Why no program runs here, and what to do."""
    gone = "; ".join(f"{name}: {WHAT_FOR[name]}" for name in missing)
    return (
        f"got a machine that cannot hold a program that a model wrote (it lacks {gone}); allow user namespaces "
        "(sysctl user.max_user_namespaces and kernel.unprivileged_userns_clone, a container's seccomp profile), boot "
        "a kernel with Landlock, or give --allow-unconfined-code where losing this machine does no harm"
    )


class Sandbox:
    """Holds one program, which `run` runs as often as there are tests. A context manager."""

    def __init__(self, program: str, *, time_limit_s: float, memory_bytes: int, allow_unconfined: bool = False) -> None:
        """The limits are those of one run. `allow_unconfined`: run also where namespaces or Landlock cannot hold it."""
        self._program, self._allow_unconfined = program, allow_unconfined
        self._reply_limit_s = time_limit_s * WALL_FACTOR + WALL_EXTRA_S + SUPERVISOR_S
        self._limits = [str(time_limit_s), str(memory_bytes)]
        self._num_runs = 0

    def __enter__(self) -> Self:
        """Starts the supervisor."""
        self._folder = tempfile.TemporaryDirectory(prefix="slime-code-")
        environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        command = [sys.executable, "-I", "-S", "-X", "utf8", __file__, self._folder.name, *self._limits]
        command += [str(os.getpid()), sysconfig.get_path("purelib"), "any" if self._allow_unconfined else "held"]
        with open(Path(self._folder.name, "problems"), "wb") as problems:
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=problems,
                bufsize=0,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the supervisor, which has no descendants between runs; with it those of a run that was given up."""
        stdin, stdout = self._pipes()
        stdin.close()
        try:
            self._supervisor.wait(SUPERVISOR_S if error[0] is None else 0.0)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        stdout.close()
        self._folder.cleanup()

    def run(self, request: dict[str, Any], *, stdin: str = "") -> Ended:
        """Runs the program; then calls `request["function"]` with `request["arguments"]`, or `request["asserts"]`.

        Raises `Unconfined` where nothing holds it and that was not allowed, `OSError` if the sandbox itself fails.
        """
        token, scratch = secrets.token_hex(16), Path(self._folder.name, str(self._num_runs))
        self._num_runs += 1
        (scratch / "work").mkdir(parents=True)
        shown = {"program": self._program, **{k: v for k, v in request.items() if k != "asserts"}}
        (scratch / "request").write_text(json.dumps(shown))
        (scratch / "asserts").write_text(json.dumps({"token": token, "asserts": request.get("asserts")}))
        (scratch / "stdin").write_text(stdin)
        verdict = self._ask(scratch.name)
        missing = tuple(verdict["missing"])
        if missing and not self._allow_unconfined:
            from slime.core.errors import Unconfined  # the supervisor runs this file without any package

            raise Unconfined(refusal(missing))
        result = None
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads((scratch / "result").read_bytes()[:MAX_OUTPUT_BYTES] or b"null")
        if request.get("asserts") is not None:
            result = [True] if result == [token] else None
        output = (scratch / "stdout").read_bytes()[:MAX_OUTPUT_BYTES].decode(errors="replace")
        result = result if isinstance(result, list) and len(result) == 1 else None
        for name in ("request", "asserts", "stdin", "stdout", "result"):
            (scratch / name).unlink()  # many runs together must not fill the disk
        return Ended(verdict["code"], verdict["timed_out"], output, result, missing)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdin and stdout."""
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None, "started with both pipes"
        return self._supervisor.stdin, self._supervisor.stdout

    def _ask(self, folder: str) -> dict[str, Any]:
        """Has the supervisor do one run; its verdict, which is one line. Raises `OSError` if there is none."""
        (stdin, stdout), said, deadline = self._pipes(), b"", time.monotonic() + self._reply_limit_s
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{folder}\n".encode())
            while not said.endswith(b"\n"):
                readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
                more = os.read(stdout.fileno(), 4096) if readable else b""
                if not more:
                    break
                said += more
        if not said.endswith(b"\n"):
            problem = Path(self._folder.name, "problems").read_bytes()[-300:].decode(errors="replace")
            raise OSError(f"got no verdict from the sandbox's supervisor within {self._reply_limit_s:g} s: {problem}")
        verdict: dict[str, Any] = json.loads(said)
        return verdict


def confine(scratch: Path) -> bool:
    """Landlock: this process and its children use the files above and no TCP, and signal nobody else. False without."""
    from slime.core import landlock  # the supervisor has imported it

    devices = dict.fromkeys(DEVICES, landlock.ALL)
    return landlock.confine(
        landlock.readable_libraries([sys.argv[5]]) | devices | {str(scratch / "work"): landlock.ALL}
    )


def give_up_rights(libc: Any) -> None:
    """Drops what the user namespace gave: a program must not change the network that the runs after it share."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())


def become_program(
    scratch: Path, time_limit_s: float, memory_bytes: int, libc: Any, *, missing: Sequence[str], report: int
) -> int:
    """The program's process: takes its limits, then runs it; the exit status.

    `missing`: what does not hold it already; with what else does not it goes to the pipe `report`, before the program
    runs, which never sees that pipe.
    """
    os.setsid()
    request = json.loads((scratch / "request").read_text())
    asserts = open(scratch / "asserts", "rb")  # noqa: SIM115  (read when the program's definitions have run)
    result = os.open(scratch / "result", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(os.open(scratch / "stdin", os.O_RDONLY), 0)
    os.dup2(os.open(scratch / "stdout", os.O_WRONLY | os.O_CREAT, 0o600), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir(scratch / "work")
    cpu_s = max(1, round(time_limit_s + 0.5))
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    unheld = [*missing, *([] if confine(scratch) else [LANDLOCK])]
    give_up_rights(libc)
    os.write(report, json.dumps(unheld).encode())
    low, high = sorted((asserts.fileno(), result))
    for begin, end in ((3, low), (low + 1, high), (high + 1, MAX_FILES)):
        os.closerange(begin, end)  # the pipes of the supervisor among them
    if unheld and sys.argv[6] != "any":
        return 1
    sys.path.append(sys.argv[5])
    sys.argv = ["solution.py"]
    plain = "function" not in request and not request.get("checked")
    space: dict[str, Any] = {"__name__": "__main__" if plain else "solution", "__builtins__": __builtins__}
    try:
        exec(compile(request["program"], "solution.py", "exec"), space)
        if "function" in request:
            name = request["function"]
            function = space[name] if name in space else getattr(space["Solution"](), name)
            os.write(result, json.dumps([function(*request["arguments"])]).encode())
        elif not plain:
            check = json.loads(asserts.read())
            for statement in check["asserts"]:
                exec(compile(statement, "tests.py", "exec"), space)
            os.write(result, json.dumps([check["token"]]).encode())
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return code & 0xFF


def first_process(scratch: Path, time_limit_s: float, memory_bytes: int, libc: Any, *, alone: bool, report: int) -> int:
    """The first process of the namespace: starts the program and answers its exit status; with it all others end."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # dies with the keeper
    if alone:
        disk = f"size={SCRATCH_BYTES},mode=700".encode()
        alone = libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        alone = alone and libc.mount(b"tmpfs", bytes(scratch / "work"), b"tmpfs", 0, disk) == 0
    program = os.fork()
    if program == 0:
        missing = [] if alone else [NAMESPACES]
        try:
            code = become_program(scratch, time_limit_s, memory_bytes, libc, missing=missing, report=report)
            os._exit(code)
        finally:
            os._exit(1)
    os.close(report)
    while True:
        ended, status = os.wait()
        if ended == program:
            return status_of(status)


def end_descendants() -> None:
    """Kills and reaps all that is left below this process, orphans included."""
    with contextlib.suppress(ChildProcessError):
        while True:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def keep(scratch: Path, time_limit_s: float, memory_bytes: int, libc: Any, *, held: bool, report: int) -> int:
    """The keeper: the program's exit status. `held`: the supervisor has left the network, so namespaces can be made."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # dies with the supervisor
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    alone = held and libc.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID) == 0
    first = os.fork()
    if first == 0:
        try:
            os._exit(first_process(scratch, time_limit_s, memory_bytes, libc, alone=alone, report=report))
        finally:
            os._exit(1)
    os.close(report)
    return status_of(os.waitpid(first, 0)[1])


def status_of(status: int) -> int:
    """Exit status as a shell says it."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def run_once(scratch: Path, time_limit_s: float, memory_bytes: int, libc: Any, *, held: bool) -> dict[str, Any]:
    """The supervisor's part of one run: its verdict."""
    used_before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # processor time of all that was waited for
    deadline = time.monotonic() + time_limit_s * WALL_FACTOR + WALL_EXTRA_S
    told, report = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            os._exit(keep(scratch, time_limit_s, memory_bytes, libc, held=held, report=report))
        finally:
            os._exit(1)
    os.close(report)
    ended, status = 0, int(signal.SIGKILL)
    while not ended and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        ended, given = os.waitpid(keeper, os.WNOHANG)
        status = given if ended else status
    end_descendants()
    code = status_of(status)
    timed_out = not ended or (
        code > 128 and sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used_before_s >= time_limit_s
    )
    for name in ("stdout", "result"):
        (scratch / name).touch()
    said = os.read(told, 1000)  # nobody holds the other end any more
    os.close(told)
    # Without a word it ended before it began, so nothing of the program ran.
    return {"code": code, "timed_out": timed_out, "missing": json.loads(said) if said else []}


def main() -> None:
    """The supervisor: `sandbox.py SCRATCH TIME_LIMIT_S MEMORY_BYTES PARENT_PID PACKAGES held|any`.

    For each line on stdin, the name of a folder in SCRATCH, it runs what stands there and prints a line: the verdict.
    """
    sys.path.append(str(Path(__file__).parents[3]))
    from slime.core import landlock  # noqa: F401  (here, because its forks may not read the folder of the package)
    from slime.core.lifeline import die_with_parent
    from slime.rewards.environment import leave_network

    sys.path.pop()
    scratch, time_limit_s, memory_bytes = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    die_with_parent(int(sys.argv[4]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    held = leave_network()
    while name := os.read(0, 64).decode().strip():  # one at a time: the next is written when this one is answered
        verdict = run_once(scratch / name, time_limit_s, memory_bytes, libc, held=held)
        os.write(1, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()
