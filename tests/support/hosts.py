"""Hosts for the tests of runs over several: Linux namespaces of this machine, each with a Ray daemon of its own.

A host has a network of its own (an address on a common bridge), and its own processes, host name, /tmp and /dev/shm: a
guardian on one host sees nothing of another, as on real machines. One folder is shared by all. Root is needed, and
`ip`, `unshare`, `nsenter`.

Consumes nothing of the machine. Produces hosts for a block. Waits for hosts to
come up and for Ray to start, with limits. Nobody wakes it.

Invariants
1. A host's first process is init of its process namespace: when it is killed, so is everything on the host.
2. What the block made is gone after it, and when the tests are killed: namespaces, bridge and links have no names and
   end with their processes, which end with the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime.core.processes import INTERFACE_ENVS, RUN_ID_ENV, host_port
from slime.serving.child_process import has_mark, read_stat
from tests.support.openness import Listening, listening, sockets_of, who

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0
PORT = 6379
SLOW_START = "timed out during startup"
"""What `ray start` says after its own limit of 30 s (2.60), which is too short on a busy machine."""
TOOLS = ("ip", "unshare", "nsenter")
UP = """
set -e
hostname {name}
mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared && mount --bind {shared} /mnt/shared
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -p {shared} && mount --bind /mnt/shared {shared}
ip link set lo up
echo up
while :; do sleep 3600 & wait; done
"""
"""What the first process of a host does: its own /tmp and /dev/shm, with the shared folder where it was. Then it reaps,
as an init does: a dead process that nobody waits for would look alive to its children."""
ISOLATED = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child=SIGKILL", "--mount-proc")
BRIDGE = "hosts"
SUBNETS = {4: "10.77.0.{}", 6: "fd77::{}"}
"""Version of IP -> addresses of hosts on the bridge."""
WHOLE = {4: 24, 6: 64}
"""Bits of an address that say its network."""
PR_SET_PDEATHSIG = 1


def why_no_hosts() -> str:
    """Why this machine can make no hosts; empty if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts are namespaces, and {', '.join(missing)} is not installed"
    words = ["unshare", *ISOLATED, "ip", "link", "add", BRIDGE, "type", "bridge"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"hosts are namespaces, which cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class FakeHost:
    """One host."""

    name: str
    address: str
    init: int
    """Pid of its first process, as the machine sees it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of its Ray daemon, and of drivers that join it."""

    def command(self, words: Sequence[str], *, folder: Path = ROOT) -> list[str]:
        """A command line that runs `words` on this host, in `folder`."""
        enter = ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "-u", "--"]
        return [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(folder), *words]

    def run(self, words: Sequence[str]) -> str:
        """Runs a command there to its end; its output. Fails with the output if it fails."""
        own = {name: value for name, value in os.environ.items() if name not in INTERFACE_ENVS}
        env = {**own, **self.environment}
        done = subprocess.run(
            self.command(words), capture_output=True, text=True, timeout=START_LIMIT_S, check=False, env=env
        )
        assert done.returncode == 0, f"{list(words)} on {self.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def start_ray(self, num_cpus: int, *, head: str | None = None) -> None:
        """A Ray daemon with so many CPUs: the head of a cluster, or one that joins `head` (host:port)."""
        where = ["--head", "--port", str(PORT), "--include-dashboard", "false"] if head is None else ["--address", head]
        ray = [str(Path(sys.executable).with_name("ray")), "start", *where, "--node-ip-address", self.address]
        size = ["--num-cpus", str(num_cpus), "--object-store-memory", str(150 * 2**20)]
        for last in (False, False, True):
            try:
                self.run([*ray, *size, "--temp-dir", "/tmp/ray", "--disable-usage-stats"])
                return
            except AssertionError as error:
                if last or SLOW_START not in str(error):
                    raise
            for pid in self.pids_of("site-packages/ray/"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def left_of(self, run_id: str) -> list[str]:
        """Processes of the run here, and what it has in /dev/shm and /tmp; empty is what was promised."""
        mark = f"{RUN_ID_ENV}={run_id}".encode()
        own = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
            with contextlib.suppress(OSError):
                stat = read_stat(pid)
                if os.readlink(f"/proc/{pid}/ns/pid") == own and stat is not None and stat.state not in "ZX":
                    guards = b"slime.cluster.guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    if has_mark(pid, mark) or guards:
                        found.append(f"{self.name}: process {pid} {stat.name}")
        root = Path(f"/proc/{self.init}/root")
        found += [f"{self.name}: {p}" for p in (root / "dev/shm").iterdir() if not p.name.startswith("plasma")]
        return found + [f"{self.name}: {p}" for p in (root / "tmp").glob(f"slime-*{run_id}*")]

    def ports(self) -> set[int]:
        """Ports on which somebody listens here."""
        return {where.port for where in self._listening().values()}

    def listeners(self) -> set[tuple[str, str]]:
        """(process, address) of each TCP socket on which a process here listens, of IPv6, too."""
        open_now, found = self._listening(), set()
        for pid in self.pids_of(""):
            stat = read_stat(pid)
            name = who(pid, "" if stat is None else stat.name)
            found |= {(name, open_now[inode].address) for inode in sockets_of(pid) & open_now.keys()}
        return found

    def _listening(self) -> dict[str, Listening]:
        found = listening(Path(f"/proc/{self.init}/net"))
        return {inode: where for inode, where in found.items() if where.kind.startswith("tcp")}

    def pids_of(self, words: str) -> list[int]:
        """Processes here, as the machine numbers them, whose command line holds these words."""
        own, found = os.readlink(f"/proc/{self.init}/ns/pid"), []
        for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if os.readlink(f"/proc/{pid}/ns/pid") == own and words.encode() in line:
                    found.append(pid)
        return found

    def empty_memory(self) -> None:
        """Removes the files in its /dev/shm: a host that was started anew has none."""
        own = Path(f"/proc/{self.init}") / "root" / "dev" / "shm"
        assert own.stat().st_dev != Path("/dev/shm").stat().st_dev, f"{self.name} has no /dev/shm of its own"
        for file in own.iterdir():
            file.unlink()

    def detached(self, words: str) -> set[int]:
        """Those of `pids_of` whose parent is the init of the host."""
        stats = {pid: read_stat(pid) for pid in self.pids_of(words)}
        return {pid for pid, stat in stats.items() if stat is not None and stat.parent == self.init}

    def kill(self, words: str) -> int:
        """SIGKILL to the one process here whose command line holds these words; its pid."""
        (pid,) = self.pids_of(words)
        os.kill(pid, signal.SIGKILL)
        return pid


@dataclass
class FakeCluster:
    """Hosts with one Ray cluster over them."""

    hosts: list[FakeHost]
    address: str
    """Of Ray's head."""
    environment: dict[str, str]
    """What drivers need to join."""


LATE_PORT = 44217
"""Metrics of Ray's autoscaler (2.60): its head opens it some seconds after it is up, and it is no run's."""


@contextmanager
def ray_cluster(shared: Path, cpus: Sequence[int], *, token: bool = True, version: int = 4) -> Iterator[FakeCluster]:
    """One host for each number of CPUs, the first with Ray's head. `shared`: the folder that all of them see; `token`:
    whether the cluster asks for one; `version`: of IP, between hosts.
    """
    auth = (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if token else {"RAY_AUTH_MODE": "disabled"}
    )
    variables = {**auth, "RAY_worker_niceness": "0"}
    # The daemons lack what the driver's environment says: whatever a process of a run needs has to reach it by name.
    with ExitStack() as stack:
        hosts = stack.enter_context(network_of_hosts(shared, len(cpus), version=version))
        address = host_port(hosts[0].address, PORT)
        for number, host in enumerate(hosts):
            host.environment = variables
            host.start_ray(cpus[number], head=None if number == 0 else address)
        deadline = time.monotonic() + 60.0
        while LATE_PORT not in hosts[0].ports():
            assert time.monotonic() < deadline, f"Ray's head did not listen on {LATE_PORT}"
            time.sleep(0.1)
        yield FakeCluster(hosts, address, variables)


@contextmanager
def network_of_hosts(shared: Path, count: int, *, version: int = 4) -> Iterator[list[FakeHost]]:
    """Hosts on one bridge, which is in the namespace of the first; nothing of the machine's own network is touched.
    `version`: of IP; there are no addresses of the other one, but on loopback.
    """
    ip, bits = f"-{version}", WHOLE[version]
    own = ["nodad"] * (version == 6)  # nobody else is there who could have the address
    with ExitStack() as stack:
        hosts = []
        for number in range(1, count + 1):
            name = f"host{number}-{os.getpid()}"
            hosts.append(
                FakeHost(name, SUBNETS[version].format(number), stack.enter_context(_first_process(name, shared)))
            )
        first = hosts[0]
        for words in (
            ("link", "add", BRIDGE, "type", "bridge"),
            ("addr", "add", f"{first.address}/{bits}", "dev", BRIDGE, *own),
            ("link", "set", BRIDGE, "up"),
            (ip, "route", "add", "default", "dev", BRIDGE),  # Ray finds its own address by asking for a way out
        ):
            _ip(first, *words)
        for host_number, host in enumerate(hosts[1:], start=2):
            _ip(first, *f"link add v{host_number} type veth peer name eth0 netns {host.init}".split())
            _ip(first, "link", "set", f"v{host_number}", "master", BRIDGE, "up")
            _ip(host, "addr", "add", f"{host.address}/{bits}", "dev", "eth0", *own)
            _ip(host, "link", "set", "eth0", "up")
            _ip(host, ip, "route", "add", "default", "via", first.address)
        yield hosts


@contextmanager
def _first_process(name: str, shared: Path) -> Iterator[int]:
    """Pid of a host's init."""
    with ExitStack() as stack:
        script = UP.format(name=name, shared=shared)
        first = subprocess.Popen(
            ["unshare", *ISOLATED, "--propagation", "private", "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_the_tests,
        )
        stack.callback(_end, first)
        assert first.stdout is not None and first.stderr is not None, "a host was started without pipes"
        assert first.stdout.readline() == "up\n", f"{name} did not come up: {first.stderr.read()}"
        yield child_of(first.pid)


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _end(first: subprocess.Popen[str]) -> None:
    """Kills the init of the host's process namespace, and with it everything there."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(child_of(first.pid), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if first.poll() is None:
        first.kill()
    first.wait()


def _ip(host: FakeHost, *words: str) -> None:
    """Sets up a host's network."""
    subprocess.run(["nsenter", "-t", str(host.init), "-n", "ip", *words], check=True, capture_output=True)
