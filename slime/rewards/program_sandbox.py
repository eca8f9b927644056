"""Sandbox for programs that a model wrote. Each run is a separate process tree with limits, killed before the next run.

A `Sandbox` holds one program and runs it once per test. Its supervisor (`main`) starts only once, because startup is
the largest cost. For each test, it waits with a deadline for a tree of three processes: the keeper, which it forks and
which creates new namespaces; the init process of the PID namespace, whose exit makes the kernel kill all others; and
its child, the program. The supervisor runs none of the program's code; it only forks, kills and reports. Assertions run
in a checker, which is confined like the program, has its own three processes, and talks to the program over a socket.

A program is confined (`slime.core.confine`) by
- namespaces: no network, no other processes to see or signal, a root with only the libraries of Python and the system,
  and a scratch disk of `SCRATCH_BYTES`;
- Landlock: access to these files only, and no signals to other processes;
- seccomp: no sockets except connected pairs, no shared memory outside the limits, no namespaces, no tracing;
- rlimits, available on every kernel: CPU seconds, address space, file size (including printed output) and processes.
  The supervisor also polls the total memory and number of processes.

The first three require Linux from 2021 or later with user namespaces. If one is missing, programs run only if the
caller allows it (`--allow-unconfined-code`).

A program is charged for its CPU time and the time it sleeps. Its clock stops while it waits for a busy CPU (`_Clock`),
so that programs do not fail on a busy machine. A run is killed after `PATIENCE` times its limit in wall-clock time.

Invariants
0. A program that is not fully confined runs only if the caller allows it.
1. After `run`, no process of the program is left, because the supervisor kills all its descendants. Nothing else is
   left either, except files that an unconfined program wrote elsewhere, so no run sees traces of an earlier one.
2. The memory of a program never contains the expected output of a test, an assertion, or a way to fake a pass. Programs
   inherit the supervisor's memory, so the supervisor opens no test files.
3. A test that did not run has no verdict: if the processes of a run cannot start, `run` raises `OSError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self

if __name__ == "__main__":  # the supervisor runs this file as a script; its forks cannot access the folder later
    sys.path.append(str(Path(__file__).parents[2]))
from slime.core import confine
from slime.core.confine import CALLS, LANDLOCK, view
from slime.core.processes import scratch_prefix
from slime.rewards.grader_confinement import FEW_THREADS

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""A program is killed if it prints more or writes a larger file."""
SCRATCH_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 32
MAX_FILES = 64
"""Maximum number of open files."""
WALL_FACTOR, WALL_EXTRA_S = 2.0, 1.0
"""Limit on the program's clock, so that sleeping programs end: factor times the CPU limit, plus the extra seconds."""
PATIENCE = 5.0
"""Wall-clock limit of a run as a multiple of its limit, for busy machines."""
LOOK_S, CROWD_LOOK_S = 0.1, 0.02
"""Polling intervals for programs with one process, and with several, whose total memory must be checked."""
BEGIN_S = 30.0
"""Time limit for starting the processes of a program."""
PROBE_S = 20.0
"""Time limit for an empty program. Generous, because the machine may be busy."""
SUPERVISOR_S = 10.0
"""How long the supervisor may take to respond after the program's deadline."""
MAX_SCRATCH_FILES = 10_000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROOT, SCRATCH = "root", "/scratch"
"""The folder in which the view is built, and the folder inside the view that a program can write to."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PROGRAM, CHECKER = "program", "checker"
Limits = tuple[float, int]
"""(CPU seconds, bytes of memory) of one run."""
NAMESPACES = "namespaces"
WHAT_FOR = {
    NAMESPACES: "no network, no view of other processes, a private scratch disk",
    LANDLOCK: "no files outside its folder",
    CALLS: "no system calls that bypass these limits",
}
"""Part of the confinement -> what it provides."""
libc: Any = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    """Exit status, or 128 + signal number."""
    timed_out: bool
    """Whether the program exceeded the limit on CPU time or on its clock."""
    own_s: float
    """Seconds on the program's clock."""
    output: str
    """Standard output of the program, up to `MAX_OUTPUT_BYTES`."""
    result: list[Any] | None
    """[return value of the function, as JSON]. For assertions: [True] if all hold, [False] if one fails, [reason] if
    undecidable. None if there is no result."""
    missing: tuple[str, ...] = ()
    """Parts of `WHAT_FOR` that this machine lacks."""


def missing_here() -> tuple[str, ...]:
    """Runs an empty program to find the parts of `WHAT_FOR` that this machine lacks. Raises `OSError` on failure."""
    with Sandbox("", time_limit_s=PROBE_S, memory_bytes=1 << 30, allow_unconfined=True) as sandbox:
        ended = sandbox.run({})
    if ended.code != 0:
        raise OSError(f"an empty program exited with status {ended.code} in the sandbox; check load and free memory")
    return ended.missing


def refusal(missing: Sequence[str]) -> str:
    parts = "; ".join(f"{name}: {WHAT_FOR[name]}" for name in missing)
    return (
        f"this machine cannot confine programs written by a model (missing: {parts}); allow user namespaces (sysctl "
        "user.max_user_namespaces and kernel.unprivileged_userns_clone, a container's seccomp profile), boot a kernel "
        "with Landlock, or set --allow-unconfined-code if you can afford to lose this machine"
    )


class Sandbox:
    """Context manager for one program, which `run` executes once per test."""

    def __init__(self, program: str, *, time_limit_s: float, memory_bytes: int, allow_unconfined: bool = False) -> None:
        """The limits apply to each run. `allow_unconfined`: run even if full confinement is not possible."""
        self._program, self._allow_unconfined = program, allow_unconfined
        self._reply_limit_s = PATIENCE * (time_limit_s * WALL_FACTOR + WALL_EXTRA_S) + BEGIN_S + SUPERVISOR_S
        self._limits = [str(time_limit_s), str(memory_bytes)]
        self._user = confine.any_user() if os.getuid() == 0 else os.getuid()
        self._num_runs = 0

    def __enter__(self) -> Self:
        if self._user != os.getuid() and (closed := closed_to_others()):
            raise OSError(
                f"sandboxed programs run as another user, who cannot read {closed}; run: chmod -R o+rX {closed}"
            )
        self._folder = tempfile.TemporaryDirectory(prefix=scratch_prefix("code-"))
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **FEW_THREADS}
        command = [sys.executable, "-I", "-S", "-X", "utf8", __file__, self._folder.name, *self._limits]
        command += [str(os.getpid()), sysconfig.get_path("purelib"), "any" if self._allow_unconfined else "confined"]
        command += [str(self._user)]
        Path(self._folder.name, ROOT).mkdir()
        self._give(Path(self._folder.name))
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
        """Stops the supervisor and any descendants left by an abandoned run."""
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
        """Runs the program, then calls `request["function"]` with `request["arguments"]`, or checks the assertions
        `request["asserts"]` (argument `test` of `assertions.check`).

        Raises `Unconfined` if the machine cannot confine the program and `allow_unconfined` is off, and `OSError` if
        the sandbox fails or the machine is overloaded.
        """
        scratch, asserts = Path(self._folder.name, str(self._num_runs)), request.get("asserts")
        self._num_runs += 1
        (scratch / "work").mkdir(parents=True)
        shown = {"program": self._program, "checked": asserts is not None}
        (scratch / "request").write_text(json.dumps(shown | {k: v for k, v in request.items() if k != "asserts"}))
        (scratch / "asserts").write_text(json.dumps(asserts))
        (scratch / "stdin").write_text(stdin)
        for name in (".", "work", "request", "asserts", "stdin"):
            self._give(scratch / name)
        verdict = self._ask(scratch.name, [PROGRAM] if asserts is None else [PROGRAM, CHECKER])
        missing = tuple(verdict["missing"])
        if missing and not self._allow_unconfined:
            from slime.core.errors import Unconfined  # not at the top: the supervisor runs without packages

            raise Unconfined(refusal(missing))
        if verdict["problem"]:
            raise OSError(verdict["problem"])
        result = None
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads((scratch / "result").read_bytes()[:MAX_OUTPUT_BYTES] or b"null")
        output = (scratch / "stdout").read_bytes()[:MAX_OUTPUT_BYTES].decode(errors="replace")
        result = result if isinstance(result, list) and len(result) == 1 else None
        for name in ("request", "asserts", "stdin", "stdout", "result", "printed"):
            (scratch / name).unlink(missing_ok=True)  # many parallel runs must not fill the disk
        return Ended(verdict["code"], verdict["timed_out"], verdict["own_s"], output, result, missing)

    def _give(self, path: Path) -> None:
        """Changes the owner of a file to the user that the supervisor will run as, if permitted."""
        if self._user != os.getuid():
            try:
                os.chown(path, self._user, self._user)
            except OSError:
                self._user = os.getuid()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None, "started with both pipes"
        return self._supervisor.stdin, self._supervisor.stdout

    def _ask(self, folder: str, roles: Sequence[str]) -> dict[str, Any]:
        """Requests one run with these roles from the supervisor. Returns the verdict, or raises `OSError`."""
        (stdin, stdout), said, deadline = self._pipes(), b"", time.monotonic() + self._reply_limit_s
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{folder} {' '.join(roles)}\n".encode())
            while not said.endswith(b"\n"):
                readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
                more = os.read(stdout.fileno(), 4096) if readable else b""
                if not more:
                    break
                said += more
        if not said.endswith(b"\n"):
            problem = Path(self._folder.name, "problems").read_bytes()[-300:].decode(errors="replace")
            raise OSError(f"the sandbox supervisor returned no verdict within {self._reply_limit_s:g} s: {problem}")
        verdict: dict[str, Any] = json.loads(said)
        return verdict


def closed_to_others() -> str:
    """Returns the first folder of Python and its packages that other users cannot read, or ""."""
    folders = (sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), str(Path(__file__).parent))
    return next((folder for folder in folders if os.stat(folder).st_mode & 0o005 != 0o005), "")


def readable() -> list[str]:
    """Returns the folders of Python and its packages, which a view contains besides the system folders."""
    places = [sys.prefix, sys.base_prefix, sys.argv[5]]
    environment = Path(sys.executable).parents[1]
    places += [str(environment)] if (environment / "pyvenv.cfg").exists() else []  # `-S` hides it from `sys.prefix`
    return view.outermost(places)


def become(role: str, scratch: Path, limits: Limits, *, alone: bool, report: int, channel: int) -> int:
    """Main function of the program or checker process: confines itself, does the work, returns the exit status.

    `alone`: whether it is in its own namespaces. `report`: the pipe to report missing confinement to. `channel`: the
    socket to the other process.
    """
    os.setsid()
    request = json.loads((scratch / ("request" if role == PROGRAM else "asserts")).read_text())
    checked = role == PROGRAM and request["checked"]
    files = ("stdin", "printed") if role == CHECKER else ("stdin", "stdout")
    os.dup2(os.open(scratch / files[0], os.O_RDONLY), 0)
    os.dup2(os.open(scratch / files[1], os.O_WRONLY | os.O_CREAT, 0o600), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # If there is a checker, only the checker can write the verdict.
    result = os.open(os.devnull if checked else scratch / "result", os.O_WRONLY | os.O_CREAT, 0o600)
    alone = alone and enter_view(scratch.parent / ROOT)
    own = SCRATCH if alone else str(scratch / "work")
    os.chdir(f"{SCRATCH}/work" if alone else own)
    if alone:
        os.environ["TMPDIR"] = f"{SCRATCH}/tmp"
    used = confine.readable_libraries(readable()) | dict.fromkeys(DEVICES, confine.ALL) | {own: confine.ALL}
    bounds, user = bounds_of(*limits), int(sys.argv[7]) if alone else None
    missing = confine.give_up(limits=bounds, calls=confine.Calls(), user=user, files=used)
    missing = (*([] if alone else [NAMESPACES]), *missing)
    os.write(report, json.dumps(missing).encode() + b"\n")
    confine.close_all_but({result, channel} if channel >= 0 else {result})  # includes the supervisor's pipes
    if missing and sys.argv[6] != "any":
        return 1
    sys.path[:] = [*(path for path in sys.path if path != str(Path(__file__).parents[2])), sys.argv[5]]
    sys.argv = ["solution.py"]
    try:
        if role == CHECKER:
            os.write(result, json.dumps([assertions().check(channel, request)]).encode())
        else:
            run_program(request, result, channel)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return code & 0xFF


def bounds_of(time_limit_s: float, memory_bytes: int) -> dict[int, int]:
    """Returns the rlimits of a process and its children."""
    return {
        resource.RLIMIT_CPU: max(1, round(time_limit_s + 0.5)),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_NOFILE: MAX_FILES,
    }


def enter_view(root: Path) -> bool:
    """Enters the view built by the supervisor, with a private scratch disk. Returns False on failure."""
    try:
        view.writable(f"{root}{SCRATCH}", SCRATCH_BYTES, MAX_SCRATCH_FILES)
        for name in ("work", "tmp", "shm"):
            os.mkdir(f"{root}{SCRATCH}/{name}")
        view.enter(str(root))
    except OSError:
        return False
    return True


def run_program(request: dict[str, Any], result: int, channel: int) -> None:
    """Runs the program, then writes the return value of the requested call to `result`, or serves the checker."""
    plain = "function" not in request and not request["checked"]
    module = ModuleType("__main__" if plain else "solution")
    sys.modules[module.__name__] = module  # for dataclasses, typing and pickle
    space = module.__dict__
    exec(compile(request["program"], "solution.py", "exec", dont_inherit=True), space)
    if "function" in request:
        name = request["function"]
        function = space[name] if name in space else getattr(space["Solution"](), name)
        os.write(result, json.dumps([function(*request["arguments"])]).encode())
    elif request["checked"]:
        assertions().serve(channel, space)


def assertions() -> Any:
    """Returns the `assertions` module, already imported by the supervisor."""
    from slime.rewards import assertions

    return assertions


def forked(work: Callable[[], int]) -> int:
    """Forks a child that exits with the status returned by `work`. Returns its pid."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(1)
    return child


def close(*descriptors: int) -> None:
    """Closes descriptors, ignoring -1."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def first_process(role: str, scratch: Path, limits: Limits, *, alone: bool, report: int, channel: int) -> int:
    """Init process of the PID namespace: starts the program and returns its exit status. When this process exits, the
    kernel kills all others in the namespace.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # dies with the keeper
    program = forked(lambda: become(role, scratch, limits, alone=alone, report=report, channel=channel))
    close(report, channel)
    while True:
        ended, status = os.wait()
        if ended == program:
            return status_of(status)


def end_descendants() -> None:
    """Kills and reaps all descendants of this process, including orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in view.children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def keep(role: str, scratch: Path, limits: Limits, *, confined: bool, report: int, channel: int) -> int:
    """Main function of the keeper. Returns the program's exit status. `confined`: the supervisor is in namespaces."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # dies with the supervisor
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    alone = confined and libc.unshare(confine.NEW_MOUNTS | confine.NEW_IPC | confine.NEW_PROCESSES) == 0
    first = forked(lambda: first_process(role, scratch, limits, alone=alone, report=report, channel=channel))
    close(report, channel)
    return status_of(os.waitpid(first, 0)[1])


def status_of(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


class _Clock:
    """Measures the time of a program and its checker, excluding the time they waited for a CPU.

    The wait is known only for a single-threaded process. Programs with more threads or processes are measured in
    wall-clock time, because otherwise they could wait on purpose and blame the machine.
    """

    def __init__(self, keepers: Sequence[int]) -> None:
        self._keepers, self._began = keepers, time.monotonic()
        self._waited_s, self._crowd = 0.0, False
        self.several = False
        """Whether the program or the checker has had more than one process."""

    def update(self) -> None:
        """Updates the clock. Must be called often enough to catch short-lived processes."""
        mains = []
        for keeper in self._keepers:
            for first in view.children_of(keeper):
                (main, *others) = view.children_of(first) or [0]
                self.several |= bool(others or view.children_of(main))
                self._crowd |= self.several or len(view.threads_of(main)) > 1
                mains.append(main)
        waited_s = sum(map(waited_for_processor_s, mains))
        self._waited_s = 0.0 if self._crowd else max(self._waited_s, waited_s)

    def machine_s(self) -> float:
        return time.monotonic() - self._began

    def own_s(self) -> float:
        return self.machine_s() - self._waited_s


def too_much(keepers: Sequence[int], memory_bytes: int) -> bool:
    """Returns whether the program or the checker exceeds the limit on processes or on their total memory."""
    trees = [view.descendants_of(view.children_of(keeper)) for keeper in keepers]
    return any(len(pids) > MAX_PROCESSES or view.exceeds(pids, memory_bytes) for pids in trees)


def waited_for_processor_s(pid: int) -> float:
    """Returns how long the process was runnable but not running, in seconds; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def start(roles: Sequence[str], scratch: Path, limits: Limits, *, confined: bool) -> tuple[list[int], int]:
    """Starts one keeper per role. Returns (pids, pipe on which missing confinement is reported)."""
    told, report = os.pipe()
    ends = [end.detach() for end in socket.socketpair()] if len(roles) > 1 else [-1]
    keepers = []
    for role, channel in zip(roles, ends, strict=True):

        def begin(role: str = role, channel: int = channel) -> int:
            for other in set(ends) - {channel}:
                with contextlib.suppress(OSError):  # already closed after the fork of an earlier role
                    os.close(other)
            return keep(role, scratch, limits, confined=confined, report=report, channel=channel)

        keepers.append(forked(begin))
        close(channel)
    close(report)
    return keepers, told


def read_reports(told: int) -> list[list[str]]:
    """Reads the reports of missing confinement until EOF, for at most `BEGIN_S`."""
    said, deadline = b"", time.monotonic() + BEGIN_S
    while (left := deadline - time.monotonic()) > 0 and select.select([told], [], [], left)[0]:
        more = os.read(told, 1000)
        if not more:
            break
        said += more
    os.close(told)
    return [json.loads(line) for line in said.splitlines()]


def run_once(scratch: Path, roles: Sequence[str], limits: Limits, *, confined: bool) -> dict[str, Any]:
    """Supervises one run. Returns the verdict.

    Opens none of the run's files, because programs would inherit anything read from them, even in freed memory.
    """
    time_limit_s, memory_bytes = limits
    used_before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # all reaped children
    keepers, told = start(roles, scratch, limits, confined=confined)
    reports = read_reports(told)
    limit_s, clock = time_limit_s * WALL_FACTOR + WALL_EXTRA_S, _Clock(keepers)
    ended, status, fat = 0, int(signal.SIGKILL), False
    while not ended and not fat and clock.own_s() < limit_s and clock.machine_s() < PATIENCE * limit_s:
        ended, given = os.waitpid(keepers[-1], os.WNOHANG)  # the checker's keeper, if there is a checker
        status = given if ended else status
        if not ended:
            signal.sigtimedwait({signal.SIGCHLD}, CROWD_LOOK_S if clock.several else LOOK_S)
            clock.update()
            fat = clock.several and too_much(keepers, memory_bytes)
    own_s, slow = clock.own_s(), clock.own_s() >= limit_s
    # The kernel does not count the time of children that are killed below.
    live_s = view.processor_with_children_s(view.descendants_of([os.getpid()]))
    used_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used_before_s + live_s
    end_descendants()
    code = status_of(status)
    used_s = max(used_s, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used_before_s)
    problem = ""
    if len(reports) < len(roles):
        problem = f"the sandbox could not start a program (status {code}); check load, free memory and processes"
    elif not (ended or slow or fat) and used_s < time_limit_s:
        problem = f"the machine is overloaded: a program got {used_s:.1f} s of CPU time in {clock.machine_s():.0f} s"
    for name in ("stdout", "result"):
        (scratch / name).touch()
    missing = [name for name in WHAT_FOR if any(name in one for one in reports)]
    timed_out = not (ended or fat) or (code != 0 and used_s >= time_limit_s)
    return {"code": code, "timed_out": timed_out, "own_s": own_s, "missing": missing, "problem": problem}


def main() -> None:
    """The supervisor: `program_sandbox.py SCRATCH TIME_LIMIT_S MEMORY_BYTES PARENT_PID PACKAGES confined|any USER`.

    Each line on stdin requests a run: a folder in SCRATCH, then the roles. Prints one verdict per line.
    """
    from slime.core.processes import die_with_parent
    from slime.rewards import assertions  # noqa: F401  (forks of this process cannot see the package's folder)

    scratch, limits = Path(sys.argv[1]), (float(sys.argv[2]), int(sys.argv[3]))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shown = confine.leave(confine.NEW_NETWORK | confine.NEW_MOUNTS, int(sys.argv[7]), keep=readable())
    confined = shown is not None and build_view(scratch / ROOT, shown)
    die_with_parent(int(sys.argv[4]))  # after `leave`, because changing the user cancels it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while request := os.read(0, 64).decode().split():  # one line at a time: the caller waits for the verdict
        name, *roles = request
        verdict = run_once(scratch / name, roles, limits, confined=confined)
        os.write(1, json.dumps(verdict).encode() + b"\n")


def build_view(root: Path, shown: Mapping[str, int]) -> bool:
    """Builds the view, in which each program later mounts its own scratch disk. Returns False on failure."""
    try:
        view.build(str(root), readable=shown, places={SCRATCH.strip("/"): None})
        if not (root / "tmp").exists():  # Python's own folder can be in /tmp
            os.symlink(f"{SCRATCH}/tmp", root / "tmp")
        os.symlink(f"{SCRATCH}/shm", root / "dev/shm")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
