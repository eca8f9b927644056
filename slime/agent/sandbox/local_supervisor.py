"""The process inside a local sandbox: `local_supervisor.py PARENT_PID CONTROL_FD SETTINGS_JSON`, started by `local.py`.

The supervisor enters new namespaces, switches to another user, and forks the first process of a PID namespace. That
process builds its own root (`slime.core.confine.view`, writable only in `WRITABLE`), reports on the control socket that
it is ready, and starts commands on request, each under the system call filter. When it exits, every process of the
sandbox is killed.

If this machine cannot confine commands and the caller allows unconfined ones (`unconfined`), the supervisor itself
starts them, in a folder.

The control socket carries requests (JSON, with a command's file descriptors 0, 1 and 2) and the exit statuses of
commands. For `reach`, it also carries a listening socket on the sandbox's loopback, where `local.py` accepts and
forwards connections. The process wakes up on the control socket, on a pipe that signals the exit of a process, and
every `TICK_S` while commands run, to measure memory.

Invariants
1. No command runs before the confinement is complete. If a step fails, the process reports the step and exits.
2. When the parent exits, the control socket closes and the kernel kills the supervisor; either event ends every
   process. Without namespaces, only the socket does; if a command kills the supervisor, its processes survive.
3. A command has no capabilities, only its three file descriptors, and only the environment variables passed to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

TICK_S = 0.1
CROWD_TICK_S = 0.02
"""Shorter tick while several processes run, because together they can exceed the memory limit."""
KILL_PASSES = 100
WRITABLE = ("work", "tmp", "dev/shm")
MAX_FILES = 1024
"""Limit on open files per process."""
MESSAGE = 1 << 17
libc: Any = ctypes.CDLL(None, use_errno=True)


def build_root(settings: dict[str, Any], shown: dict[str, int]) -> None:
    """Builds the sandbox's root and enters it."""
    from slime.core.confine import view

    root, uid, gid = "/tmp", os.getuid(), os.getgid()
    texts = {
        "passwd": f"agent:x:{uid}:{gid}::/work:/bin/sh\n",
        "group": f"agent:x:{gid}:\n",
        "hosts": "127.0.0.1 localhost\n",
    }
    bounds = (settings["disk_bytes"], settings["files"])
    places = {**dict.fromkeys(WRITABLE, bounds), "proc": None}
    view.build(root, readable=shown, places=places, texts=texts)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    view.show_processes(f"{root}/proc")
    view.enter(root)


def loopback(port: int | None) -> list[int]:
    """Brings up the loopback device. Returns the listening socket for `port`."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    return [] if port is None else [socket.create_server(("127.0.0.1", port)).detach()]


def become_command(request: dict[str, Any], descriptors: list[int], settings: dict[str, Any]) -> None:
    from slime.core import confine

    try:
        os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target + 100)
        for target in range(3):
            os.dup2(target + 100, target)
        confine.close_all_but([])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(settings["folder"])
        missing = confine.give_up(
            limits={
                resource.RLIMIT_AS: settings["memory_bytes"],
                resource.RLIMIT_NOFILE: MAX_FILES,
                **bounds_of(settings),
            },
            calls=confine.Calls(internet=True, unix=True),
            user=settings["uid"],
        )
        if not missing or settings["unconfined"]:
            os.execve("/bin/sh", ["sh", "-c", *request["run"]], request["env"])
    finally:
        os._exit(127)


def bounds_of(settings: dict[str, Any]) -> dict[int, int]:
    """Returns RLIMIT -> value. Limits processes only if the user is not shared, and file sizes only if no file system
    limits them.
    """
    bounds = {resource.RLIMIT_FSIZE: settings["disk_bytes"]} if settings["unconfined"] else {}
    alone = not settings["unconfined"] or os.getuid() == settings["uid"]
    return {**bounds, **({resource.RLIMIT_NPROC: settings["processes"]} if alone else {})}


def processes(settings: dict[str, Any]) -> list[int]:
    """Returns the PIDs of the sandbox's processes, except this one."""
    from slime.core.confine import view

    me = os.getpid()
    if settings["unconfined"]:
        return [pid for pid in view.descendants_of([me]) if view.lives(pid)]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != me]


def kill_all(settings: dict[str, Any]) -> None:
    if not settings["unconfined"]:
        os.kill(-1, signal.SIGKILL)
        return
    for _ in range(KILL_PASSES):  # processes can fork while others are being killed
        found = processes(settings)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(TICK_S / 10)


def serve(control: socket.socket, settings: dict[str, Any]) -> None:
    """Starts and kills commands on request, until the control socket closes."""
    from slime.core.confine import view

    running: dict[int, int] = {}
    measured, tick_s, ends = 0.0, 1.0, wake_on_ends()
    while True:
        watched: list[socket.socket | int] = [control, ends]
        woken = select.select(watched, [], [], min(tick_s, TICK_S) if running else tick_s)[0]
        if control in woken and not handle_request(control, running, settings):
            return
        if time.monotonic() - measured >= min(tick_s, TICK_S):
            found = processes(settings)
            if view.exceeds(found, settings["memory_bytes"]) or len(found) > settings["processes"]:
                kill_all(settings)
            measured = time.monotonic()
            tick_s = CROWD_TICK_S if len(found) > 2 else TICK_S if found or running else 1.0
        with contextlib.suppress(BlockingIOError):
            os.read(ends, 1 << 12)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in running:
                    code = os.waitstatus_to_exitcode(ended[1])
                    code = 128 - code if code < 0 else code
                    control.send(json.dumps({"id": running.pop(ended[0]), "code": code}).encode())


def wake_on_ends() -> int:
    """Returns a pipe that becomes readable when a process exits."""
    ends, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    return ends


def handle_request(control: socket.socket, running: dict[int, int], settings: dict[str, Any]) -> bool:
    """Handles one request and updates `running` (pid -> command number). Returns False if the socket is closed."""
    message, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 3)
    if not message:
        return False
    request = json.loads(message)
    if "kill" in request:
        for pid in [p for p, number in running.items() if number == request["kill"]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)
    else:
        try:
            pid = os.fork()
        except OSError:  # too many processes
            control.send(json.dumps({"id": request["id"], "code": 126}).encode())
        else:
            if pid == 0:
                become_command(request, descriptors, settings)
            running[pid] = request["id"]
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def first_process(control: socket.socket, settings: dict[str, Any], shown: dict[str, int]) -> None:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        build_root(settings, shown)
        listening = loopback(settings["port"])
        socket.sethostname("sandbox")
    except OSError as error:
        control.send(json.dumps({"missing": str(error)}).encode())
        return
    libc.prctl(4, 0, 0, 0, 0)  # not dumpable, so that commands cannot read this process
    socket.send_fds(control, [json.dumps({"missing": None}).encode()], listening)
    for descriptor in listening:
        os.close(descriptor)
    serve(control, settings)


def serve_unconfined(control: socket.socket, settings: dict[str, Any]) -> None:
    """Runs commands as plain processes until the control socket closes."""
    libc.prctl(36, 1, 0, 0, 0)  # orphans become children of this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(json.dumps({"missing": None}).encode())
    try:
        serve(control, settings)
    finally:
        kill_all(settings)


def main() -> None:
    sys.path.append(str(Path(__file__).parents[3]))
    from slime.core import confine
    from slime.core.confine import view  # noqa: F401  (now, because forks cannot see the package folder)
    from slime.core.processes import die_with_parent

    parent, settings = int(sys.argv[1]), json.loads(sys.argv[3])
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    if settings["unconfined"]:
        if os.getuid() == 0:  # the kernel does not limit the number of root's processes
            confine.become(settings["uid"])
            confine.show_own_files()
        serve_unconfined(control, settings)
        return
    new = confine.NEW_NETWORK | confine.NEW_MOUNTS | confine.NEW_IPC | confine.NEW_PROCESSES | confine.NEW_NAMES
    shown = confine.leave(new, settings["uid"], keep=settings["readable"])
    if shown is None:
        control.send(json.dumps({"missing": "user, mount, PID, IPC, UTS and network namespaces"}).encode())
        return
    if not confine.Calls.available():
        control.send(json.dumps({"missing": "a system call filter (seccomp)"}).encode())
        return
    die_with_parent(parent)
    first = os.fork()
    if first == 0:
        try:
            first_process(control, settings, shown)
        finally:
            os._exit(0)
    control.close()
    os.waitpid(first, 0)


if __name__ == "__main__":
    main()
