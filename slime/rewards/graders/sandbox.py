"""One run of a program that a model wrote: a process tree of its own, bounded, and gone afterwards.

Three processes: the supervisor (`main`, started by `run`) waits with a deadline; its child is the first process of a
PID namespace, so that with it everything dies that the program started; that one's child is the program.

What holds the program:
- namespaces: no network, no other process to see or signal, and a scratch disk of `SCRATCH_BYTES`;
- Landlock: files outside the scratch folder are not written, and none but Python's and the system's libraries are read;
- limits: CPU seconds, address space, size of a file (and of what it prints), processes. They hold on every kernel.

The first two need a Linux of 2021 or newer that allows user namespaces. Where one of them is missing no program runs,
unless the caller says that it may (`--allow-unconfined-code`).

Invariants
0. A program that is not held by all of them runs only if that was allowed.
1. After `run` no process of the program lives: the supervisor kills all of its descendants.
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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_OUTPUT_BYTES = 4 * 1024 * 1024
"""More than that, printed or written to one file, ends the program."""
SCRATCH_BYTES = 64 * 1024 * 1024
MAX_PROCESSES = 32
WALL_FACTOR, WALL_EXTRA_S = 2.0, 1.0
"""Wall clock beside the CPU limit: a loaded machine must not fail a program, a sleeping one must end."""
PROBE_S = 20.0
"""For an empty program, however busy the machine is."""
SUPERVISOR_S = 10.0
"""Longer than this beyond the program's deadline no supervisor takes."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FS_RIGHTS, FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}, 0b1100000000000111
"""Landlock: number of file rights since an ABI; the rights that a plain file can have."""
READ_RIGHTS = 0b1101
"""Execute, read a file, list a folder."""
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
    ended = run({"program": ""}, time_limit_s=PROBE_S, memory_bytes=1 << 30, allow_unconfined=True)
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


def run(
    request: dict[str, Any],
    *,
    stdin: str = "",
    time_limit_s: float,
    memory_bytes: int,
    allow_unconfined: bool = False,
) -> Ended:
    """Runs `request["program"]`; then calls `request["function"]` with `request["arguments"]`, or `request["asserts"]`.

    `allow_unconfined`: also where namespaces or Landlock cannot hold it. Raises `Unconfined` without that, and
    `OSError` if the sandbox itself fails.
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="slime-code-") as folder:
        scratch = Path(folder)
        (scratch / "work").mkdir()
        (scratch / "request").write_text(json.dumps({k: v for k, v in request.items() if k != "asserts"}))
        (scratch / "asserts").write_text(json.dumps({"token": token, "asserts": request.get("asserts")}))
        (scratch / "stdin").write_text(stdin)
        command = [sys.executable, "-I", "-S", "-X", "utf8", __file__, folder, str(time_limit_s), str(memory_bytes)]
        environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        supervisor = subprocess.run(
            [*command, str(os.getpid()), sysconfig.get_path("purelib"), "any" if allow_unconfined else "held"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            cwd="/",
            start_new_session=True,
            timeout=time_limit_s * WALL_FACTOR + WALL_EXTRA_S + SUPERVISOR_S,
            check=False,
        )
        if supervisor.returncode != 0:
            problem = supervisor.stderr[-300:].decode(errors="replace")
            raise OSError(f"got status {supervisor.returncode} from the sandbox's supervisor: {problem}")
        verdict = json.loads(supervisor.stdout)
        missing = tuple(verdict["missing"])
        if missing and not allow_unconfined:
            from slime.core.errors import Unconfined  # the supervisor runs this file without any package

            raise Unconfined(refusal(missing))
        result = None
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads((scratch / "result").read_bytes()[:MAX_OUTPUT_BYTES] or b"null")
        if request.get("asserts") is not None:
            result = [True] if result == [token] else None
        output = (scratch / "stdout").read_bytes()[:MAX_OUTPUT_BYTES].decode(errors="replace")
        result = result if isinstance(result, list) and len(result) == 1 else None
        return Ended(verdict["code"], verdict["timed_out"], output, result, missing)


def confine(scratch: Path, libc: Any) -> bool:
    """Landlock: this process and its children use the files above and no TCP, and signal nobody else. False without."""
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return False
    rights = (1 << max(bits for since, bits in FS_RIGHTS.items() if since <= abi)) - 1
    attributes = (ctypes.c_uint64 * 3)(rights, 0b11, 0b11)  # files; TCP bind and connect; abstract sockets and signals
    ruleset = libc.syscall(444, attributes, 24 if abi >= 6 else 16 if abi >= 4 else 8, 0)
    if ruleset < 0:
        return False
    allowed = dict.fromkeys((*READABLE, sys.prefix, sys.base_prefix, sys.argv[5]), READ_RIGHTS)
    allowed |= dict.fromkeys(DEVICES, FILE_RIGHTS) | {str(scratch / "work"): rights}
    for path, permitted in allowed.items():
        with contextlib.suppress(OSError):  # a system without such a file
            descriptor = os.open(path, os.O_PATH)
            permitted &= rights if os.path.isdir(path) else rights & FILE_RIGHTS
            rule = permitted.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
            libc.syscall(445, ruleset, 1, rule, 0)
            os.close(descriptor)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(libc.syscall(446, ruleset, 0) == 0)


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
        (resource.RLIMIT_NOFILE, 64),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    unheld = [*missing, *([] if confine(scratch, libc) else [LANDLOCK])]
    os.write(report, json.dumps(unheld).encode())
    os.close(report)
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
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # dies with the supervisor
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
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_descendants() -> None:
    """Kills and reaps all that is left below this process, orphans included."""
    with contextlib.suppress(ChildProcessError):
        while True:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def main() -> None:
    """The supervisor: `sandbox.py SCRATCH TIME_LIMIT_S MEMORY_BYTES PARENT_PID PACKAGES held|any`; prints a verdict."""
    sys.path.append(str(Path(__file__).parents[3]))
    from slime.core.lifeline import die_with_parent
    from slime.rewards.environment import leave_network

    sys.path.pop()
    scratch, time_limit_s, memory_bytes = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    die_with_parent(int(sys.argv[4]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    alone = leave_network(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
    deadline = time.monotonic() + time_limit_s * WALL_FACTOR + WALL_EXTRA_S
    told, report = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os._exit(first_process(scratch, time_limit_s, memory_bytes, libc, alone=alone, report=report))
        finally:
            os._exit(1)
    os.close(report)
    code, timed_out = None, False
    while code is None:
        left = deadline - time.monotonic()
        if left <= 0:
            code, timed_out = 128 + signal.SIGKILL, True
            break
        signal.sigtimedwait({signal.SIGCHLD}, left)
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    end_descendants()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    timed_out = timed_out or (code > 128 and used.ru_utime + used.ru_stime >= time_limit_s)
    for name in ("stdout", "result"):
        (scratch / name).touch()
    said = os.read(told, 1000)  # nobody holds the other end any more
    missing = json.loads(said) if said else []  # it ended before it began, so nothing of the program ran
    sys.stdout.write(json.dumps({"code": code, "timed_out": timed_out, "missing": missing}))


if __name__ == "__main__":
    main()
