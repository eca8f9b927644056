"""Runs of a program that a model wrote: each a process tree of its own, bounded, and gone before the next begins.

A `Sandbox` holds one program and runs it once for each test. Its supervisor (`main`) is started once, which is most of
what a run would cost; for each test it waits with a deadline for three processes that it forks: a keeper, which makes
fresh namespaces; the first process of the PID namespace, so that with it everything dies that the program started; that
one's child is the program. Nothing of a program ever runs in the supervisor: it only forks, kills and reports.
Assertions are run by a checker, held as the program is, with three processes of its own; a socket connects the two.

What holds the program (`slime.core.confine`):
- namespaces: no network, no other process to see or signal, Python's and the system's libraries alone in view, to read,
  and a scratch disk of `SCRATCH_BYTES`;
- Landlock: the same of files once more, and no signal to others;
- seccomp: no socket but connected pairs, no shared memory that no limit counts, no namespace, no tracing;
- limits: CPU seconds, address space, size of a file (and of what it prints), processes. They hold on every kernel. The
  supervisor looks at the memory and the number of all processes together.

The first three need a Linux of 2021 or newer that allows user namespaces. Where one of them is missing no program runs,
unless the caller says that it may (`--allow-unconfined-code`).

A program's time is its processor time, and time in which it sleeps. While it waits for a processor that others use, its
clock stands still (`_Clock`), so a busy machine fails no program; after `PATIENCE` times its limit it is given up.

Invariants
0. A program that is not held by all of them runs only if that was allowed.
1. After `run` no process of the program lives: the supervisor kills all of its descendants. With their processes go
   the scratch disk and all else but files that an unconfined program wrote elsewhere: no run sees one before it.
2. The program's memory never holds the expected output of a test, an assertion, or a way to write that it passed. The
   supervisor, whose memory every program inherits, opens no file of a test.
3. What did not run has no verdict: a run whose processes could not begin is an `OSError`.
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

if __name__ == "__main__":  # the supervisor runs this file without any package, and its forks see no folder of one
    sys.path.append(str(Path(__file__).parents[3]))
from slime.core import confine
from slime.core.confine import CALLS, LANDLOCK, view
from slime.core.processes import scratch_prefix
from slime.rewards.environment import FEW_THREADS

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""More than that, printed or written to one file, ends the program."""
SCRATCH_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 32
MAX_FILES = 64
"""Open at a time."""
WALL_FACTOR, WALL_EXTRA_S = 2.0, 1.0
"""Clock of the program beside its CPU limit: a sleeping one must end."""
PATIENCE = 5.0
"""By so much a busy machine may lengthen that."""
LOOK_S, CROWD_LOOK_S = 0.1, 0.02
"""How often a running program is looked at; one of several processes, whose memory the kernel does not sum up."""
BEGIN_S = 30.0
"""For a program's processes to be made."""
PROBE_S = 20.0
"""For an empty program, however busy the machine is."""
SUPERVISOR_S = 10.0
"""Longer than this beyond the program's deadline no supervisor takes."""
MAX_SCRATCH_FILES = 10_000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROOT, SCRATCH = "root", "/scratch"
"""Folder of a sandbox in which the view is built, and where in the view a program may write."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
PROGRAM, CHECKER = "program", "checker"
Limits = tuple[float, int]
"""Seconds, and bytes of memory."""
NAMESPACES = "namespaces"
WHAT_FOR = {
    NAMESPACES: "no network, no other process in sight, a scratch disk of its own",
    LANDLOCK: "no file outside of its folder",
    CALLS: "no call that passes these limits",
}
"""What holds a program -> what for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit status; 128 + signal if a signal ended it."""
    timed_out: bool
    """It met the CPU limit, or that of its clock."""
    own_s: float
    """How long it ran by its own clock."""
    output: str
    """What it printed, at most `MAX_OUTPUT_BYTES`."""
    result: list[Any] | None
    """[what the function returned, as JSON]; for assertions [True] if all hold, [False] if not, [why] if nobody
    can say; None if it did not get there."""
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
        self._reply_limit_s = PATIENCE * (time_limit_s * WALL_FACTOR + WALL_EXTRA_S) + BEGIN_S + SUPERVISOR_S
        self._limits = [str(time_limit_s), str(memory_bytes)]
        self._user = confine.any_user() if os.getuid() == 0 else os.getuid()
        self._num_runs = 0

    def __enter__(self) -> Self:
        """Starts the supervisor."""
        self._folder = tempfile.TemporaryDirectory(prefix=scratch_prefix("code-"))
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **FEW_THREADS}
        command = [sys.executable, "-I", "-S", "-X", "utf8", __file__, self._folder.name, *self._limits]
        command += [str(os.getpid()), sysconfig.get_path("purelib"), "any" if self._allow_unconfined else "held"]
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
        """Runs the program; then calls `request["function"]` with `request["arguments"]`, or has `request["asserts"]`
        (as `assertions.check` wants them) checked.

        Raises `Unconfined` where nothing holds it and that was not allowed, `OSError` if the sandbox itself fails, or
        the machine has no time for it.
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
            from slime.core.errors import Unconfined  # the supervisor runs this file without any package

            raise Unconfined(refusal(missing))
        if verdict["problem"]:
            raise OSError(verdict["problem"])
        result = None
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads((scratch / "result").read_bytes()[:MAX_OUTPUT_BYTES] or b"null")
        output = (scratch / "stdout").read_bytes()[:MAX_OUTPUT_BYTES].decode(errors="replace")
        result = result if isinstance(result, list) and len(result) == 1 else None
        for name in ("request", "asserts", "stdin", "stdout", "result", "printed"):
            (scratch / name).unlink(missing_ok=True)  # many runs together must not fill the disk
        return Ended(verdict["code"], verdict["timed_out"], verdict["own_s"], output, result, missing)

    def _give(self, path: Path) -> None:
        """To the user that the supervisor becomes, if this one is root's and may."""
        if self._user != os.getuid():
            try:
                os.chown(path, self._user, self._user)
            except OSError:
                self._user = os.getuid()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Its stdin and stdout."""
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None, "started with both pipes"
        return self._supervisor.stdin, self._supervisor.stdout

    def _ask(self, folder: str, roles: Sequence[str]) -> dict[str, Any]:
        """Has the supervisor do one run of these; its verdict, which is one line. Raises `OSError` if there is none."""
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
            raise OSError(f"got no verdict from the sandbox's supervisor within {self._reply_limit_s:g} s: {problem}")
        verdict: dict[str, Any] = json.loads(said)
        return verdict


def readable() -> list[str]:
    """Where Python and its packages are, beside what a view has of the system."""
    places = [sys.prefix, sys.base_prefix, sys.argv[5]]
    environment = Path(sys.executable).parents[1]
    places += [str(environment)] if (environment / "pyvenv.cfg").exists() else []  # which `-S` keeps out of the prefix
    return view.outermost(places)


def become(role: str, scratch: Path, limits: Limits, *, alone: bool, report: int, channel: int) -> int:
    """The process of the program, or of its checker: takes its limits, then does its work; the exit status.

    `alone`: namespaces hold it; what does not goes to the pipe `report`, before its work begins, which never sees that
    pipe. `channel`: to the other one.
    """
    os.setsid()
    request = json.loads((scratch / ("request" if role == PROGRAM else "asserts")).read_text())
    checked = role == PROGRAM and request["checked"]
    files = ("stdin", "printed") if role == CHECKER else ("stdin", "stdout")
    os.dup2(os.open(scratch / files[0], os.O_RDONLY), 0)
    os.dup2(os.open(scratch / files[1], os.O_WRONLY | os.O_CREAT, 0o600), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Of a program that is checked only the checker has a place for the verdict.
    result = os.open(os.devnull if checked else scratch / "result", os.O_WRONLY | os.O_CREAT, 0o600)
    alone = alone and enter_view(scratch.parent / ROOT)
    own = SCRATCH if alone else str(scratch / "work")
    os.chdir(f"{SCRATCH}/work" if alone else own)
    used = confine.readable_libraries(readable()) | dict.fromkeys(DEVICES, confine.ALL) | {own: confine.ALL}
    bounds, user = bounds_of(*limits), int(sys.argv[7]) if alone else None
    unheld = confine.give_up(limits=bounds, calls=confine.Calls(), user=user, files=used)
    unheld = (*([] if alone else [NAMESPACES]), *unheld)
    os.write(report, json.dumps(unheld).encode() + b"\n")
    confine.close_all_but({result, channel} if channel >= 0 else {result})  # the pipes of the supervisor among them
    if unheld and sys.argv[6] != "any":
        return 1
    sys.path[:] = [*(path for path in sys.path if path != str(Path(__file__).parents[3])), sys.argv[5]]
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
    """RLIMIT -> value, of a process and those that it starts."""
    return {
        resource.RLIMIT_CPU: max(1, round(time_limit_s + 0.5)),
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_NOFILE: MAX_FILES,
    }


def enter_view(root: Path) -> bool:
    """Makes the view that the supervisor built the root, with a scratch disk in it that is this process's alone."""
    try:
        view.writable(f"{root}{SCRATCH}", SCRATCH_BYTES, MAX_SCRATCH_FILES)
        for name in ("work", "tmp", "shm"):
            os.mkdir(f"{root}{SCRATCH}/{name}")
        view.enter(str(root))
    except OSError:
        return False
    return True


def run_program(request: dict[str, Any], result: int, channel: int) -> None:
    """The definitions, then the call that the request names, whose value goes to `result`, or those of the checker."""
    plain = "function" not in request and not request["checked"]
    module = ModuleType("__main__" if plain else "solution")
    sys.modules[module.__name__] = module  # where dataclasses, typing and pickle look for it
    space = module.__dict__
    exec(compile(request["program"], "solution.py", "exec", dont_inherit=True), space)
    if "function" in request:
        name = request["function"]
        function = space[name] if name in space else getattr(space["Solution"](), name)
        os.write(result, json.dumps([function(*request["arguments"])]).encode())
    elif request["checked"]:
        assertions().serve(channel, space)


def assertions() -> Any:
    """The module of that name, which the supervisor has imported."""
    from slime.rewards import assertions

    return assertions


def forked(work: Callable[[], int]) -> int:
    """A child of this process that does this work, and ends with the status that it returns; its pid."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(1)
    return child


def close(*descriptors: int) -> None:
    """Those that there are: -1 stands for none."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def first_process(
    role: str, scratch: Path, limits: Limits, libc: Any, *, alone: bool, report: int, channel: int
) -> int:
    """The first process of the namespace: starts the program and answers its exit status; with it all others end."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # dies with the keeper
    program = forked(lambda: become(role, scratch, limits, alone=alone, report=report, channel=channel))
    close(report, channel)
    while True:
        ended, status = os.wait()
        if ended == program:
            return status_of(status)


def end_descendants() -> None:
    """Kills and reaps all that is left below this process, orphans included."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in view.children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def keep(role: str, scratch: Path, limits: Limits, libc: Any, *, held: bool, report: int, channel: int) -> int:
    """The keeper: the program's exit status. `held`: the supervisor has left the network, so namespaces can be made."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # dies with the supervisor
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    alone = held and libc.unshare(confine.NEW_MOUNTS | confine.NEW_IPC | confine.NEW_PROCESSES) == 0
    first = forked(lambda: first_process(role, scratch, limits, libc, alone=alone, report=report, channel=channel))
    close(report, channel)
    return status_of(os.waitpid(first, 0)[1])


def status_of(status: int) -> int:
    """Exit status as a shell says it."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


class _Clock:
    """The time of a program and its checker, in seconds: without that in which they wait for a processor.

    That is known of a process with one thread. One that starts others gives its clock up for that of the machine, or it
    could slow itself down and blame the machine.
    """

    def __init__(self, keepers: Sequence[int]) -> None:
        self._keepers, self._began = keepers, time.monotonic()
        self._waited_s, self._crowd = 0.0, False
        self.several = False
        """More than one process was seen of the program, or of its checker."""

    def look(self) -> None:
        """Has to be done often enough to see processes that are started and gone."""
        mains = []
        for keeper in self._keepers:
            for first in view.children_of(keeper):
                (main, *others) = view.children_of(first) or [0]
                self.several |= bool(others or view.children_of(main))
                self._crowd |= self.several or num_threads(main) > 1
                mains.append(main)
        waited_s = sum(map(waited_for_processor_s, mains))
        self._waited_s = 0.0 if self._crowd else max(self._waited_s, waited_s)

    def machine_s(self) -> float:
        """Since it began, by the clock of the machine."""
        return time.monotonic() - self._began

    def own_s(self) -> float:
        """The same by its own."""
        return self.machine_s() - self._waited_s


def too_much(keepers: Sequence[int], memory_bytes: int) -> bool:
    """Whether a program or a checker has more memory in all its processes than one may have, or too many of them."""
    held = [view.descendants_of(view.children_of(keeper)) for keeper in keepers]
    return any(len(pids) > MAX_PROCESSES or view.exceeds(pids, memory_bytes) for pids in held)


def num_threads(pid: int) -> int:
    """Zero of a process that is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def waited_for_processor_s(pid: int) -> float:
    """How long the process could run and did not, in seconds; zero where the kernel does not say it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def start(roles: Sequence[str], scratch: Path, limits: Limits, libc: Any, *, held: bool) -> tuple[list[int], int]:
    """The keeper of each role, and the pipe in which each says what does not hold it, when it begins."""
    told, report = os.pipe()
    ends = [end.detach() for end in socket.socketpair()] if len(roles) > 1 else [-1]
    keepers = []
    for role, channel in zip(roles, ends, strict=True):

        def begin(role: str = role, channel: int = channel) -> int:
            for other in set(ends) - {channel}:
                with contextlib.suppress(OSError):  # of the one that began before
                    os.close(other)
            return keep(role, scratch, limits, libc, held=held, report=report, channel=channel)

        keepers.append(forked(begin))
        close(channel)
    close(report)
    return keepers, told


def read_reports(told: int) -> list[list[str]]:
    """What each that began says; ends when the last of them has begun, or none can any more."""
    said, deadline = b"", time.monotonic() + BEGIN_S
    while (left := deadline - time.monotonic()) > 0 and select.select([told], [], [], left)[0]:
        more = os.read(told, 1000)
        if not more:
            break
        said += more
    os.close(told)
    return [json.loads(line) for line in said.splitlines()]


def run_once(scratch: Path, roles: Sequence[str], limits: Limits, libc: Any, *, held: bool) -> dict[str, Any]:
    """The supervisor's part of one run: its verdict.

    It opens none of the files of the run: a program would inherit what it read, in memory that was freed, too.
    """
    time_limit_s, memory_bytes = limits
    used_before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # processor time of all that was waited for
    keepers, told = start(roles, scratch, limits, libc, held=held)
    reports = read_reports(told)
    limit_s, clock = time_limit_s * WALL_FACTOR + WALL_EXTRA_S, _Clock(keepers)
    ended, status, fat = 0, int(signal.SIGKILL), False
    while not ended and not fat and clock.own_s() < limit_s and clock.machine_s() < PATIENCE * limit_s:
        ended, given = os.waitpid(keepers[-1], os.WNOHANG)  # the checker's, if there is one
        status = given if ended else status
        if not ended:
            signal.sigtimedwait({signal.SIGCHLD}, CROWD_LOOK_S if clock.several else LOOK_S)
            clock.look()
            fat = clock.several and too_much(keepers, memory_bytes)
    own_s, slow = clock.own_s(), clock.own_s() >= limit_s
    # The kernel drops the time of killed children.
    live_s = view.processor_with_children_s(view.descendants_of([os.getpid()]))
    used_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used_before_s + live_s
    end_descendants()
    code = status_of(status)
    used_s = max(used_s, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used_before_s)
    problem = ""
    if len(reports) < len(roles):
        problem = f"the sandbox could not start a program (status {code}); look at load, free memory and processes"
    elif not (ended or slow or fat) and used_s < time_limit_s:
        problem = f"a program got {used_s:.1f} s of a processor in {clock.machine_s():.0f} s; the machine is overloaded"
    for name in ("stdout", "result"):
        (scratch / name).touch()
    missing = [name for name in WHAT_FOR if any(name in one for one in reports)]
    timed_out = not (ended or fat) or (code != 0 and used_s >= time_limit_s)
    return {"code": code, "timed_out": timed_out, "own_s": own_s, "missing": missing, "problem": problem}


def main() -> None:
    """The supervisor: `sandbox.py SCRATCH TIME_LIMIT_S MEMORY_BYTES PARENT_PID PACKAGES held|any USER`.

    For each line on stdin, the name of a folder in SCRATCH and the roles that have work there, it runs what stands in
    it and prints a line: the verdict.
    """
    from slime.core.processes import die_with_parent
    from slime.rewards import assertions  # noqa: F401  (here, because its forks see no folder of the package)

    scratch, limits = Path(sys.argv[1]), (float(sys.argv[2]), int(sys.argv[3]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shown = confine.leave(confine.NEW_NETWORK | confine.NEW_MOUNTS, int(sys.argv[7]), keep=readable())
    held = shown is not None and build_view(scratch / ROOT, shown)
    die_with_parent(int(sys.argv[4]))  # a change of user would take that back
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while asked := os.read(0, 64).decode().split():  # one at a time: the next is written when this one is answered
        name, *roles = asked
        verdict = run_once(scratch / name, roles, limits, libc, held=held)
        os.write(1, json.dumps(verdict).encode() + b"\n")


def build_view(root: Path, shown: Mapping[str, int]) -> bool:
    """What programs see, where each mounts its scratch disk; False where that cannot be."""
    try:
        view.build(str(root), readable=shown, places={SCRATCH.strip("/"): None})
        os.symlink(f"{SCRATCH}/tmp", root / "tmp")
        os.symlink(f"{SCRATCH}/shm", root / "dev/shm")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
