"""Attempts to escape from what holds programs, agents and graders of texts.

    python -m tests.support.escapes grader|agent|text

Each is a few lines of Python, and what it must not get. The command runs all of them in such a process and prints as
JSON: attempt -> "held: why", or "got: what". Attempts are functions without arguments that return what they got, or
something false, or raise `OSError`; each runs in a child where its holder allows children. `PRELUDE` is what they may
use. The last ones of a list are those that may end their process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from slime.core import confine
from slime.rewards.grader_confinement import grader_environment

PRELUDE = r"""
import ctypes, errno, json, mmap, os, platform, re, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(name, *given):
    done = libc.syscall(ctypes.c_long(NUMBERS[name]), *[ctypes.c_long(v) if isinstance(v, int) else v for v in given])
    if done == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"{name} = {done}"
def text(path):
    with open(path, "rb") as file:
        return file.read(1 << 16)
def first(acts):
    for act in acts:
        try:
            if done := act():
                return done
        except OSError as error:
            last = error
    raise last
MARKED = ("mark-of-a-run", "/tmp/mark-of-a-run", "/dev/shm/mark-of-a-run")
def leave_marks():
    for path in MARKED:
        open(path, "w").close()
    os.environ["mark"] = sys.mark = "1"
def packed(*values):
    return ctypes.create_string_buffer(struct.pack(f"{len(values)}Q", *values))
"""
ATTEMPTS = r"""
def memfd(): return call("memfd_create", b"x", 0)
def memfd_secret(): return call("memfd_secret", 0)
def sysv_memory(): return call("shmget", 1, 1 << 20, 0o1666)
def sysv_memory_attach(): return call("shmat", 0, 0, 0)
def sysv_messages(): return call("msgget", 1, 0o1666)
def sysv_semaphores(): return call("semget", 1, 1, 0o1666)
def posix_messages(): return call("mq_open", b"x", os.O_CREAT | os.O_RDWR, 0o600, None)
def io_uring(): return call("io_uring_setup", 8, ctypes.create_string_buffer(256))
def keyring(): return call("keyctl", 0, -3, 1)
def add_key(): return call("add_key", b"user", b"x", b"y", 1, -2)
def request_key(): return call("request_key", b"user", b"x", None, 0)
def new_user(): return call("unshare", 0x10000000)
def new_network(): return call("unshare", 0x40000000)
def new_time(): return call("unshare", 0x80)
def clone_user(): return call("clone", 0x10000000 | 17, 0, 0, 0, 0)
def clone_mounts_of_thread(): return call("clone", 0x00020000 | 17, 0, 0, 0, 0)
def clone3_user(): return call("clone3", packed(0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
def enter_namespace(): return call("setns", os.open("/proc/1/ns/net", os.O_RDONLY), 0)
def enter_namespace_of_process(): return call("setns", call_fd("pidfd_open", 1), 0x20000)
def mount_tmpfs(): return call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
def mount_again_writable(): return call("mount", None, b"/usr", None, 0x20 | 0x1000, None)
def unmount(): return call("umount2", b"/usr", 2)
def change_root(): return call("chroot", b"/usr")
def pivot(): return call("pivot_root", b".", b".")
def open_tree(): return call("open_tree", -100, b"/usr", 1)
def open_filesystem(): return call("fsopen", b"tmpfs", 0)
def load_bpf(): return call("bpf", 0, packed(1, 4, 4, 4), 32)
def perf(): return call("perf_event_open", packed(1 | 112 << 32, *[0] * 15), 0, -1, -1, 0)
def fault_handler(): return call("userfaultfd", 1)
def trace(): return call("ptrace", 16, PARENT, 0, 0)
def be_traced(): return call("ptrace", 0, 0, 0, 0)
def read_memory(): return call("process_vm_readv", PARENT, packed(0, 0), 1, packed(0, 0), 1, 0)
def write_memory(): return call("process_vm_writev", PARENT, packed(0, 0), 1, packed(0, 0), 1, 0)
def take_descriptor(): return call("pidfd_getfd", call_fd("pidfd_open", PARENT), 0, 0)
def compare_processes(): return call("kcmp", os.getpid(), PARENT, 0, 0, 0)
def file_handle(): return call("open_by_handle_at", -100, packed(8, 0, 0), 0)
def watch_all_files(): return call("fanotify_init", 0, 0)
def quota(): return call("quotactl", 0x800007 << 8, b"/dev/vda", 0, packed(*[0] * 16))
def kernel_module(): return call("init_module", b"", 0, b"")
def kernel_image(): return call("kexec_load", 0, 0, 0, 0)
def ctrl_alt_delete(): return call("reboot", 0xFEE1DEAD, 672274793, 0, 0)
def swap(): return call("swapon", b"/dev/vda", 0)
def kernel_log(): return call("syslog", 3, ctypes.create_string_buffer(4096), 4096)
def accounting(): return call("acct", b"/tmp/x")
def clock(): return call("clock_settime", 0, packed(0, 0))
def host_name(): return call("sethostname", b"x", 1)
def other_table_of_calls():
    number = NUMBERS["memfd_create"] | 0x40000000
    return libc.syscall(ctypes.c_long(number), b"x", ctypes.c_long(0)) >= 0
def type_into_terminal():
    import fcntl
    return fcntl.ioctl(0, 0x5412, b"x") == 0
def call_fd(name, *given):
    return int(call(name, *given).split()[-1])

def unix_socket_of_another():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(PATH_SOCKET)
        return "connected"
def unix_datagrams_of_another():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return one.sendto(b"x", PATH_DATAGRAMS)
def unix_pair_to_another():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.connect(PATH_SOCKET)
    return "connected"
def abstract_socket_of_another():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(ABSTRACT_SOCKET)
        return "connected"
def vsock(): return socket.socket(40, socket.SOCK_STREAM)
def packets(): return socket.socket(17, socket.SOCK_RAW)
def crypto_socket(): return socket.socket(38, socket.SOCK_SEQPACKET)
def audit_socket(): return socket.socket(16, socket.SOCK_RAW, 9)
def events_of_devices(): return socket.socket(16, socket.SOCK_RAW, 15)
def netfilter_socket(): return socket.socket(16, socket.SOCK_RAW, 12)
def raw_socket(): return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
def sctp_socket(): return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)
def mptcp_socket(): return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
def any_other_family(): return first([lambda f=f: socket.socket(f, t) for f in range(3, 50) if f not in (10, 16)
    for t in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)])
def loopback_of_the_host(): return socket.create_connection(("127.0.0.1", PORT), 2)
def loopback_v6(): return socket.create_connection(("::1", PORT), 2)
def the_internet(): return socket.create_connection(("1.1.1.1", 53), 2)
def listens_where_others_see(): return first([lambda: socket.create_server((a, 0)) and a for a in HOST_ADDRESSES])
def asks_for_names(): return socket.getaddrinfo("example.com", 80)

def reads_the_secret(): return text(SECRET)
def reads_the_secret_by_link():
    os.symlink(SECRET, "link-of-attempt")
    return text("link-of-attempt")
def links_the_secret(): return os.link(SECRET, "hard-link") or text("hard-link")
def by_another_root(): return first([lambda p=p: text(f"/proc/{p}/root{SECRET}") for p in (1, PARENT, "self")])
def by_dots(): return text("../" * 40 + SECRET)
def by_another_folder(): return first([lambda p=p: os.listdir(f"/proc/{p}/cwd/../../slime") for p in (1, PARENT)])
def writes_beside_the_secret(): return open(SECRET + ".new", "w")
def changes_the_secret(): return open(SECRET, "a")
def passwords(): return text("/etc/shadow")
def home_of_root(): return os.listdir("/root")
def changes_the_system(): return open("/usr/lib/x-of-attempt", "w")
def changes_python(): return open(os.path.dirname(os.__file__) + "/x-of-attempt", "w")
def environment_of_others():
    found = [p for p in range(1, 400) if os.path.exists(f"/proc/{p}/environ")] or [1]
    return b"SESAME" in b"".join(quiet(lambda p=p: text(f"/proc/{p}/environ")) or b"" for p in [*found, PARENT])
def quiet(act):
    try:
        return act()
    except OSError:
        return None
def command_line_of_the_kernel(): return text("/proc/cmdline")
def symbols_of_the_kernel(): return text("/proc/kallsyms")
def settings_of_the_kernel(): return text("/proc/config.gz")
def keys_of_the_kernel(): return text("/proc/keys")
def memory_of_the_kernel(): return first([lambda n=n: text(n) for n in ("/proc/kcore", "/dev/mem", "/dev/kmem")])
def magic_key(): return open("/proc/sysrq-trigger", "wb", 0).write(b"h")
def core_pattern(): return open("/proc/sys/kernel/core_pattern", "wb", 0).write(b"|/x")
def devices_of_the_machine(): return os.listdir("/sys")
def control_groups(): return os.listdir("/sys/fs/cgroup")
def disks(): return first([lambda n=n: open(f"/dev/{n}", "rb") for n in DEVICES])
def makes_a_device():
    os.mknod("null-of-attempt", 0o666 | 0o020000, os.makedev(1, 1))
    return text("null-of-attempt")
def gives_a_file_away(): return os.chown(HERE, 12345, 12345) or "given"
def changes_rights_of_a_file(): return os.chmod(SECRET, 0o600) or os.chmod(os.path.dirname(SECRET), 0o755) or "changed"
def changes_times_of_a_file(): return os.utime(SECRET, (0, 0)) or "changed"
def sets_a_capability():
    return os.setxattr(".", "security.capability", struct.pack("<5I", 0x2000001, 1, 0, 0, 0)) or "set"
def escapes_by_kept_folder():
    for fd in range(3, 64):
        try:
            if os.path.isdir(f"/proc/self/fd/{fd}") or os.stat(fd).st_mode & 0o170000 == 0o040000:
                return os.listdir(fd)
        except OSError:
            pass

def becomes_root(): return os.setuid(0) or (os.getuid() == 0 and NOT_ROOT and "root")
def has_a_right():
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, data)
    return any(data.raw)
def takes_rights():
    header = struct.pack("Ii", 0x20080522, 0)
    return libc.capset(header, struct.pack("6I", *[1 << 21] * 6)) == 0
def may_gain_rights(): return libc.prctl(39, 0, 0, 0, 0) != 1
def drops_the_filter(): return libc.prctl(22, 0, 0) == 0 or libc.prctl(21, 0, 0, 0, 0) != 2
def signals_a_process_outside(): return os.kill(VICTIM, 0) or "it is there"
def limits_a_process_outside(): return resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))
def schedules_a_process_outside(): return os.sched_setaffinity(VICTIM, {0}) or "done"
def raises_its_limits():
    def one(name):
        soft, hard = resource.getrlimit(name)
        resource.setrlimit(name, (hard + 1 if hard >= 0 else hard, hard + 1 if hard >= 0 else hard))
        return hard >= 0 and name
    return first([lambda n=n: one(n) for n in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)])
def goes_before_others(): return os.setpriority(os.PRIO_PROCESS, 0, -5) or "done"
def real_time(): return os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) or "done"
def is_spared_when_memory_is_short(): return open("/proc/self/oom_score_adj", "wb", 0).write(b"-1000")
def locks_memory():
    memory = mmap.mmap(-1, 64 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(64 << 20)) == 0
def opens_ten_thousand_files(): return [os.open("/dev/null", 0) for _ in range(10_000)]
def enlarges_a_pipe():
    import fcntl
    return fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
def enlarges_a_socket():
    one, _ = socket.socketpair()
    before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before
def finds_a_test_in_its_memory():
    libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
    told, tell = os.pipe()
    heap, arena = libc.sbrk(0), id(object()) & ~0xFFFFF
    found = bytearray()
    for begin, end in ((heap - (24 << 20), heap), (arena - (4 << 20), arena + (4 << 20))):
        for page in range(begin & ~4095, end, 4096):
            got = libc.write(tell, page, 4096)
            found += os.read(told, got) if got > 0 else b" "
    return re.findall(rb"canary-of-a-test-[0-9]+", found)[:3]
def meets_what_a_run_before_left():
    return [p for p in MARKED if os.path.exists(p)] or ("mark" in os.environ or hasattr(sys, "mark")) and "a mark"
def writes_into_its_input():
    return first([lambda: os.pwrite(0, b"x", 1 << 20),
        lambda: os.path.isfile("/proc/self/fd/0") and os.truncate("/proc/self/fd/0", 1 << 30) or None])
def access_lists_of_files():
    entries = [(1, 7, -1), (2, 7, os.getuid()), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
    wanted = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    return os.setxattr(".", "system.posix_acl_access", wanted) or "set"
def attributes_of_files(): return os.setxattr(".", "user.x", b"x" * 4096) or "set"
def attributes_of_files_by_place(): return call("setxattrat", -100, b".", 0, b"user.x", packed(0, 0), 16)
def rules_of_landlock(): return call("landlock_create_ruleset", packed(0, 3), 16, 0)
def requests_that_the_system_counts(): return call("io_setup", 1, packed(0))
def limits_the_first_process():
    return os.getpid() > 1 and (resource.prlimit(1, resource.RLIMIT_MEMLOCK, (0, 0)) or "done")
def schedules_the_first_process():
    return first([lambda: os.sched_setaffinity(1, {0}) or "processors", lambda: os.setpriority(0, 1, 19) or "priority"])
def buffers_of_tcp_that_grow():
    server = socket.create_server(("127.0.0.1", 0))
    one, held = socket.create_connection(server.getsockname()), 0
    other = server.accept()[0]
    one.setblocking(False)
    try:
        while True:
            held += one.send(bytes(1 << 16))
    except BlockingIOError:
        return held > 1 << 20 and held
def huge_pages_in_pipes():
    page, (_, tell) = mmap.mmap(-1, 4096), os.pipe()
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return call("vmsplice", tell, packed(at, 4096), 1, 0)
def one_large_object(): return len(bytearray(MEMORY + (64 << 20)))
def one_large_mapping(): return mmap.mmap(-1, MEMORY + (64 << 20))
"""
"""Quick ones, which end nothing."""
HEAVY = r"""
def six_hundred_processes():
    num, began = 0, []
    try:
        while num < 600:
            child = os.fork()
            if not child:
                time.sleep(20)
                os._exit(0)
            num += 1
            began.append(child)
    except OSError:
        pass
    for child in began:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return num >= 200 and num
def six_hundred_threads():
    import threading
    end, began = threading.Event(), []
    try:
        for _ in range(600):
            began.append(threading.Thread(target=end.wait))
            began[-1].start()
    except RuntimeError:
        began.pop()
    end.set()
    return len(began) >= 200 and len(began)
def shared_memory_files():
    held = 0
    with open("/dev/shm/x", "wb") as file:
        for _ in range(40):
            file.write(bytes(64 << 20))
            file.flush()
            held += 64
    return held > 300 and held
def fills_the_disk():
    held = 0
    try:
        for i in range(4000):
            with open(f"file-{i}", "wb") as file:
                file.write(bytes(1 << 20))
            held += 1
    finally:
        for name in os.listdir("."):
            if name.startswith("file-"):
                os.unlink(name)
    return held > 300 and held
def a_million_files():
    made = 0
    os.makedirs("many", exist_ok=True)
    for i in range(1_000_000):
        open(f"many/{i}", "w").close()
        made += 1
    return made
def memory_of_eight_processes():
    return still_held(8, 3 * MEMORY, lambda take: take(bytearray(int(0.7 * MEMORY))))
def shared_memory_of_eight_processes():
    def hold(take):
        held = mmap.mmap(-1, int(0.7 * MEMORY))
        for at in range(0, len(held), 4096):
            held[at] = 1
        take(held)
    return still_held(8, 3 * MEMORY, hold)
def memory_in_sockets():
    part = bytes(1 << 16)
    def fill(end):
        end.setblocking(False)
        try:
            while True:
                yield end.send(part)
        except BlockingIOError:
            pass
    def hold(take):
        held, ends = 0, []
        try:
            while held < MEMORY // 4:
                ends += socket.socketpair()
                held += sum(fill(ends[-1])) + sum(fill(ends[-2]))
                take(ends, held)
        except OSError:
            pass
    return still_held(24, 2 * MEMORY, hold)
def memory_of_children_of_a_thread():
    import threading
    said = []
    def start():  # whose children are the main thread's as soon as it ends
        said.append(still_held(8, 3 * MEMORY, half))
        time.sleep(60)
    threading.Thread(target=start, daemon=True).start()
    while not said:
        time.sleep(0.1)
    return said[0]
def memory_of_processes_whose_main_thread_ended():
    return still_held(8, 3 * MEMORY, half, ends=True)
def half(take):
    take(bytearray(b"x") * int(0.5 * MEMORY))
def still_held(num, most, hold, ends=False):
    # Whether children hold more than `most` for half a minute, because whoever ends them may be slow. Returns at once
    # when they are dead, or could not take more.
    import threading
    PATIENCE_S, sums = 30, mmap.mmap(-1, 2 * 8 * num)
    def child(i):
        kept = []
        def take(what, size=None):
            kept.append(what)
            struct.pack_into("Q", sums, 16 * i, len(what) if size is None else size)
        try:
            hold(take)
        except MemoryError:
            pass
        struct.pack_into("Q", sums, 16 * i + 8, 1)
        time.sleep(3 * PATIENCE_S)
        os._exit(0)
    living = {}
    for i in range(num):
        pid = os.fork()
        if not pid and ends:
            threading.Thread(target=child, args=(i,)).start()
            libc.syscall(ctypes.c_long(NUMBERS["exit"]), 0)
        if not pid:
            child(i)
        living[i] = pid
    end, total = time.monotonic() + PATIENCE_S, most + 1
    while time.monotonic() < end:
        living = {i: pid for i, pid in living.items() if os.waitpid(pid, os.WNOHANG)[0] == 0}
        told = [struct.unpack_from("QQ", sums, 16 * i) for i in living]
        total = sum(held for held, _ in told)
        if total <= most and all(done for _, done in told):
            break
        time.sleep(0.05)
    for pid in living.values():
        quiet(lambda pid=pid: os.kill(pid, 9))  # or they would be found when their parent is gone
    return total > most and f"{total} bytes in {len(living)} processes"
"""
"""Those that take time, or that the holder may end."""
MEMORY_BYTES = 512 << 20


def names(source: str) -> list[str]:
    """Of the attempts in it; the others are helpers."""
    helpers = ("call_fd", "quiet", "half", "still_held")
    found = [line.removeprefix("def ").partition("(")[0] for line in source.splitlines() if line.startswith("def ")]
    return [name for name in found if name not in helpers]


OTHERS = ({"pidfd_open": 434, "exit": 60}, {"pidfd_open": 434, "exit": 93})
QUICK_NAMES, HEAVY_NAMES = names(ATTEMPTS), names(HEAVY)


def program(facts: dict[str, object], chosen: list[str], *, forks: bool) -> str:
    """That makes the attempts and prints what came of them."""
    column = confine._ARCHITECTURES[os.uname().machine][0]
    numbers = {name: both[column] for name, both in confine._NUMBERS.items()} | OTHERS[column]
    head = f"NUMBERS, FORKS, CHOSEN = {numbers!r}, {forks!r}, {chosen!r}\n"
    head += "".join(f"{name} = {value!r}\n" for name, value in facts.items())
    return head + PRELUDE + ATTEMPTS + HEAVY + TAIL


TAIL = r"""
def outcome(name):
    try:
        got = globals()[name]()
        return f"got: {got!r:.200}" if got else "held"
    except (OSError, MemoryError, ValueError) as error:
        return f"held: {type(error).__name__} {error}"
def in_child(name):
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, outcome(name).encode())
        os._exit(0)
    os.close(tell)
    said = b""
    while part := os.read(told, 4096):
        said += part
    os.close(told)
    status = os.waitpid(child, 0)[1]
    return said.decode() or f"held: ended with {status}"
if __name__ == "__main__":
    print(json.dumps({name: (in_child if FORKS else outcome)(name) for name in CHOSEN}), flush=True)
else:
    leave_marks()
"""
"""A program that is checked by assertions makes no attempt, and leaves marks."""


class Outside:
    """What attempts are after: a server on loopback, sockets with places, a file, a process. A context manager."""

    def __enter__(self) -> dict[str, object]:
        self._ends = contextlib.ExitStack()
        folder = self._ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.write_text("SESAME")
        secret.chmod(0o666)
        os.environ["SESAME_KEY"] = "SESAME"
        abstract = f"\0slime-escapes-{os.getpid()}"
        server = self._ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        for address, kind in (
            (f"{folder}/stream", socket.SOCK_STREAM),
            (f"{folder}/datagrams", socket.SOCK_DGRAM),
            (abstract, socket.SOCK_STREAM),
        ):
            one = self._ends.enter_context(socket.socket(socket.AF_UNIX, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen(100)
            if not address.startswith("\0"):
                os.chmod(address, 0o777)
        victim = subprocess.Popen(["sleep", "600"])
        self._ends.callback(victim.wait)
        self._ends.callback(victim.kill)
        return {
            "PORT": server.getsockname()[1],
            "PATH_SOCKET": f"{folder}/stream",
            "PATH_DATAGRAMS": f"{folder}/datagrams",
            "ABSTRACT_SOCKET": abstract,
            "SECRET": str(secret),
            "VICTIM": victim.pid,
            "PARENT": os.getpid(),
            "MEMORY": MEMORY_BYTES,
            "HERE": folder,
            "NOT_ROOT": True,
            "HOST_ADDRESSES": [a for a in subprocess.getoutput("hostname -I").split() if ":" not in a] or ["10.0.0.1"],
            "DEVICES": sorted({"vda", "sda", "nvme0", "kvm", "fuse", "kmsg", "net/tun", "vsock", "vport0p1", "tty"}),
        }

    def __exit__(self, *error: object) -> None:
        self._ends.close()


def of_grader(facts: dict[str, object], chosen: list[str]) -> str:
    from slime.rewards.program_sandbox import Sandbox

    with Sandbox(program(facts, chosen, forks=True), time_limit_s=60.0, memory_bytes=MEMORY_BYTES) as sandbox:
        test = {"statements": ["assert first([]) == 'canary-of-a-test-4711'" + "#" * 600], "names": ["first"]}
        sandbox.run({"asserts": {**test, "modules": {}}})
        ended = sandbox.run({})
    return ended.output or f"ended: {ended.code}"


def of_agent(facts: dict[str, object], chosen: list[str]) -> str:
    from slime.agent.sandbox.local import LocalSandbox

    async def go() -> str:
        bounds = {"memory_bytes": MEMORY_BYTES, "disk_bytes": 64 << 20, "files": 5000}
        async with LocalSandbox(**bounds) as sandbox:  # type: ignore[arg-type]
            await sandbox.write_file("attempts.py", program(facts, chosen, forks=True))
            ended = await sandbox.exec("python3 attempts.py", timeout_s=120)
            return ended.stdout or f"ended: {ended.code} {ended.stderr[-300:] if ended.code != 137 else ''}"

    return asyncio.run(go())


TEXT = """
import sys
from slime.rewards.grader_confinement import shut_in
from slime.rewards.grader_worker import limit_resources
program = sys.stdin.read()
limit_resources(int(sys.argv[1]))
assert shut_in() == ()
exec(program)
"""


def of_text(facts: dict[str, object], chosen: list[str]) -> str:
    """As if an answer had passed the gate of its grader."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", TEXT, str(MEMORY_BYTES)],
        input=program(facts, chosen, forks=False),
        capture_output=True,
        text=True,
        env={**grader_environment(os.environ, offline=True), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout or f"ended: {done.returncode} {done.stderr[-2000:]}"


def of_nobody(facts: dict[str, object], chosen: list[str]) -> str:
    """Held by nothing but a user without rights: shows which attempts get something."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-"],
            input=program(facts, chosen, forks=True),
            capture_output=True,
            text=True,
            cwd=folder,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )
    return done.stdout or f"ended: {done.returncode} {done.stderr[-2000:]}"


NOBODY = 1_234_567
HOLDERS = {"grader": of_grader, "agent": of_agent, "text": of_text, "nobody": of_nobody}


def main() -> None:
    """Prints what came of the attempts: all quick ones in one process, each heavy one in a process of its own."""
    holder = HOLDERS[sys.argv[1]]
    kinds = sys.argv[2:] or ["quick"]
    said: dict[str, str] = {}
    with Outside() as facts:
        if "quick" in kinds:
            text = holder(facts, QUICK_NAMES)
            said |= json.loads(text) if text.startswith("{") else dict.fromkeys(QUICK_NAMES, text)
        for name in HEAVY_NAMES if "heavy" in kinds else ():
            text = holder(facts, [name])
            said |= json.loads(text) if text.startswith("{") else {name: f"held: {text}"}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
