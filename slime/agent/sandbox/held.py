"""The inside of a local sandbox: `held.py PARENT_PID CONTROL_FD SETTINGS_JSON`, started by `local.py`.

The supervisor gives up its user, leaves all namespaces and forks the first process of a PID namespace. That one builds
a root of its own (the system's libraries to read; `WRITABLE` to write, in memory and bounded), says on the control
socket that it is ready, and starts commands as it is asked. With it everything ends.

Where nothing holds a command and that was allowed (`unheld`), the supervisor itself starts commands, in a folder.

Consumes: requests on the control socket (JSON, with the descriptors 0, 1, 2 of a command). Produces: ends of commands,
and for `reach` one listening socket on the sandbox's loopback, which the outside accepts on and forwards.
Woken by: the control socket, a pipe that each end of a process writes to, and while commands run a tick of `TICK_S`
that measures memory.

Invariants
1. Nothing runs before all of the confinement holds: the first step that fails ends the process with its name.
2. The end of the outside closes the control socket, and the kernel kills the supervisor; either ends every process.
   Without namespaces the first alone does, and not for processes of a command that ended the supervisor.
3. A command has no capability, no descriptor but its three, and no variable that it was not given.
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
KILL_PASSES = 100
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 2, 4
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_SETATTR = 2, -100, 0x8000, 442
RDONLY, NOSUID = 1, 2
NEW = 0x00020000 | 0x08000000 | 0x20000000 | 0x04000000
"""Mount, IPC, PID and UTS namespaces; user and network come with `leave_network`."""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs")
WRITABLE = ("work", "tmp", "dev/shm")
DEVICES = ("null", "zero", "full", "random", "urandom")
MESSAGE = 1 << 17
libc: Any = ctypes.CDLL(None, use_errno=True)


def must(what: str, status: int) -> None:
    """Raises `OSError` with the name of a step of the confinement that failed."""
    if status != 0:
        raise OSError(f"{what} ({os.strerror(ctypes.get_errno())})")


def mount(what: str, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    given = [None if v is None else v.encode() for v in (source, target, kind, data)]
    must(what, libc.mount(given[0], given[1], given[2], flags, given[3]))


def show(source: str, target: str) -> None:
    """A file or folder of the outside, to be read only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    mount(f"mount namespace: {source}", source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", RDONLY | NOSUID, 0, 0, 0)
    status = libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))
    must(f"mount_setattr: {source}", status)


def build_root(settings: dict[str, Any]) -> None:
    """The root view, entered."""
    root, uid = "/tmp", os.getuid()
    readable = {path: os.open(path, os.O_PATH) for path in settings["readable"]}  # the root may cover some of them
    mount("mount namespace", "none", "/", None, MS_REC | MS_PRIVATE)
    new = f"{root}/.slime-root"
    mount("tmpfs", "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(new)
    mount("tmpfs", "tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), new + path)
        elif os.path.exists(path):
            show(path, new + path)
    for name in ETC:
        if os.path.exists(f"/etc/{name}"):
            show(f"/etc/{name}", f"{new}/etc/{name}")
    for name in DEVICES:
        show(f"/dev/{name}", f"{new}/dev/{name}")
    os.symlink("/proc/self/fd", f"{new}/dev/fd")
    for name, text in (
        ("passwd", f"agent:x:{uid}:{os.getgid()}::/work:/bin/sh\n"),
        ("group", f"agent:x:{os.getgid()}:\n"),
        ("hosts", "127.0.0.1 localhost\n"),
    ):
        Path(new, "etc", name).write_text(text)
    for name in WRITABLE:
        os.mkdir(f"{new}/{name}")
        options = f"size={settings['disk_bytes']},nr_inodes={settings['files']},mode=700"
        mount("tmpfs", "tmpfs", f"{new}/{name}", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, descriptor in readable.items():
        show(f"/proc/self/fd/{descriptor}", new + path)
        os.close(descriptor)
    os.mkdir(f"{new}/proc")
    mount("a /proc of its own", "proc", f"{new}/proc", "proc", MS_NOSUID | MS_NODEV)
    Path(new, "proc/sys/user/max_user_namespaces").write_text("0")
    os.chdir(new)
    must("pivot_root", libc.pivot_root(b".", b"."))
    must("pivot_root", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    attributes = struct.pack("QQQQ", RDONLY, 0, 0, 0)
    must("a root to read only", libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", 0, attributes, len(attributes)))


def loopback(port: int | None) -> list[int]:
    """Raises the loopback device; the listening socket of `port`."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    return [] if port is None else [socket.create_server(("127.0.0.1", port)).detach()]


def become_command(request: dict[str, Any], descriptors: list[int], settings: dict[str, Any]) -> None:
    """The process of one command; does not return."""
    try:
        os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target + 100)
        for target in range(3):
            os.dup2(target + 100, target)
        os.closerange(3, 1024)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for limit, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, settings["memory_bytes"]),
            (resource.RLIMIT_NOFILE, 1024),
            *bounds_of(settings),
        ):
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        must("no_new_privs", libc.prctl(38, 1, 0, 0, 0))
        os.chdir(settings["folder"])
        os.execve("/bin/sh", ["sh", "-c", *request["run"]], request["env"])
    finally:
        os._exit(127)


def bounds_of(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Of processes, where nobody else has their user; of a file, where no file system bounds all of them."""
    bounds = [(resource.RLIMIT_FSIZE, settings["disk_bytes"])] if settings["unheld"] else []
    alone = not settings["unheld"] or os.getuid() == settings["uid"]
    return [*bounds, *([(resource.RLIMIT_NPROC, settings["processes"])] if alone else [])]


def fields_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def processes(settings: dict[str, Any]) -> dict[int, dict[str, str]]:
    """Those of the sandbox but this one, with what the kernel says of them."""
    me = os.getpid()
    known = {int(pid): fields_of(int(pid)) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != me}
    if not settings["unheld"]:
        return known
    mine, grown = {me}, True
    while grown:
        children = {pid for pid, fields in known.items() if int(fields.get("PPid", "0")) in mine} - mine
        mine |= children
        grown = bool(children)
    return {pid: known[pid] for pid in mine - {me} if not known[pid]["State"].startswith("Z")}


def memory_used(settings: dict[str, Any]) -> int:
    """Bytes of memory of all processes but this one, shared ones counted for each."""
    sizes = [fields.get(name, "0") for fields in processes(settings).values() for name in ("RssAnon", "RssShmem")]
    return sum(1024 * int(size.split()[0]) for size in sizes)


def kill_all(settings: dict[str, Any]) -> None:
    """All processes but this one."""
    if not settings["unheld"]:
        os.kill(-1, signal.SIGKILL)
        return
    for _ in range(KILL_PASSES):  # what one forked while the others were killed is found by the next look
        found = processes(settings)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(TICK_S / 10)


def serve(control: socket.socket, settings: dict[str, Any]) -> None:
    """Starts and ends commands until the outside is gone."""
    running: dict[int, int] = {}
    measured, ends = 0.0, wake_on_ends()
    while True:
        watched: list[socket.socket | int] = [control, ends]
        woken = select.select(watched, [], [], TICK_S if running else 1.0)[0]
        if control in woken and not take(control, running, settings):
            return
        if time.monotonic() - measured >= TICK_S:
            if memory_used(settings) > settings["memory_bytes"]:
                kill_all(settings)
            measured = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            os.read(ends, 1 << 12)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in running:
                    code = os.waitstatus_to_exitcode(ended[1])
                    code = 128 - code if code < 0 else code
                    control.send(json.dumps({"id": running.pop(ended[0]), "code": code}).encode())


def wake_on_ends() -> int:
    """A pipe that can be read when a process has ended."""
    ends, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    return ends


def take(control: socket.socket, running: dict[int, int], settings: dict[str, Any]) -> bool:
    """One request, which changes what is `running` (process -> number of the command). False if the outside is gone."""
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
        except OSError:  # the bound on processes is met
            control.send(json.dumps({"id": request["id"], "code": 126}).encode())
        else:
            if pid == 0:
                become_command(request, descriptors, settings)
            running[pid] = request["id"]
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def first_process(control: socket.socket, settings: dict[str, Any]) -> None:
    """The first process of the namespace."""
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        build_root(settings)
        listening = loopback(settings["port"])
        socket.sethostname("sandbox")
    except OSError as error:
        control.send(json.dumps({"missing": str(error)}).encode())
        return
    libc.prctl(4, 0, 0, 0, 0)  # not dumpable: no command reads this process
    socket.send_fds(control, [json.dumps({"missing": None}).encode()], listening)
    for descriptor in listening:
        os.close(descriptor)
    serve(control, settings)


def serve_unheld(control: socket.socket, settings: dict[str, Any]) -> None:
    """Commands as plain processes, until the outside is gone."""
    libc.prctl(36, 1, 0, 0, 0)  # orphans become children of this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(json.dumps({"missing": None}).encode())
    try:
        serve(control, settings)
    finally:
        kill_all(settings)


def main() -> None:
    """The supervisor."""
    sys.path.append(str(Path(__file__).parents[3]))
    from slime.core.lifeline import die_with_parent
    from slime.rewards.environment import leave_network

    parent, settings = int(sys.argv[1]), json.loads(sys.argv[3])
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    if os.getuid() == 0:  # the kernel bounds the processes of every user but this one
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
        libc.prctl(4, 1, 0, 0, 0)  # its own /proc files again, which the change of user took
    if settings["unheld"]:
        serve_unheld(control, settings)
        return
    die_with_parent(parent)
    uid = os.getuid()
    if not leave_network(NEW) or os.getuid() != uid:
        control.send(json.dumps({"missing": "user, mount, PID, IPC, UTS and network namespaces"}).encode())
        return
    first = os.fork()
    if first == 0:
        try:
            first_process(control, settings)
        finally:
            os._exit(0)
    control.close()
    os.waitpid(first, 0)


if __name__ == "__main__":
    main()
