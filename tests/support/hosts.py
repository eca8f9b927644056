"""Hosts for the tests of runs over several: Linux namespaces of this machine, each with a Ray daemon of its own.

A host has a network of its own (an address on a common bridge), and its own processes, host name, /tmp and /dev/shm: a
guardian on one host sees nothing of another, as on real machines. One folder is shared by all. Root is needed, and
`ip`, `unshare`, `nsenter`.

Consumes nothing of the machine but names that carry this process's pid. Produces hosts for a block. Waits for hosts to
come up and for Ray to start, with limits. Nobody wakes it.

Invariants
1. A host's first process is init of its process namespace: when it is killed, so is everything on the host.
2. What the block made (processes, namespaces, bridge) is gone after it, whatever happened in it, by the names and pids
   that were made here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime.core.ids import RUN_ID_ENV
from slime.serving.proctree import has_mark, read_stat

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120.0
PORT = 6379
TOOLS = ("ip", "unshare", "nsenter")
UP = """
set -e
hostname {name}
mkdir -p {shared} && mount --bind {shared} {shared}
mkdir -p {keep} && mount --bind {shared} {keep}
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -p {shared} && mount --bind {keep} {shared}
echo up
exec sleep infinity
"""
"""What the first process of a host does: its own /tmp and /dev/shm, with the shared folder where it was."""


def why_no_hosts() -> str:
    """Why this machine can make no hosts; empty if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts are namespaces, and {', '.join(missing)} is not installed"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"hosts are namespaces, which cannot be made here: {made.stderr.strip()}"
    tried = subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=False)
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
        env = {**os.environ, **self.environment}
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
        self.run([*ray, *size, "--temp-dir", "/tmp/ray", "--disable-usage-stats"])

    def left_of(self, run_id: str) -> list[str]:
        """Processes of the run here, and what it has in /dev/shm and /tmp beside Ray's own; empty is what was promised."""
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
        lines = Path(f"/proc/{self.init}/net/tcp").read_text().splitlines()[1:]
        return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"}

    def listening_addresses(self, pids: set[int] | None = None) -> set[str]:
        """IPv4 addresses on which somebody listens here."""
        lines = Path(f"/proc/{self.init}/net/tcp").read_text().splitlines()[1:]
        raw = [line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"]
        return {".".join(str(b) for b in bytes.fromhex(address)[::-1]) for address in raw}


@dataclass
class FakeCluster:
    """Hosts with one Ray cluster over them."""

    hosts: list[FakeHost]
    address: str
    """Of Ray's head."""
    environment: dict[str, str]
    """What drivers need to join."""


@contextmanager
def ray_cluster(shared: Path, cpus: Sequence[int]) -> Iterator[FakeCluster]:
    """One host for each number of CPUs, the first with Ray's head. `shared`: the folder that all of them see."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0"}
    # The daemons lack what the driver's environment says: whatever a process of a run needs has to reach it by name.
    with ExitStack() as stack:
        hosts = stack.enter_context(network_of_hosts(shared, len(cpus)))
        address = f"{hosts[0].address}:{PORT}"
        for number, host in enumerate(hosts):
            host.environment = variables
            host.start_ray(cpus[number], head=None if number == 0 else address)
        yield FakeCluster(hosts, address, variables)


@contextmanager
def network_of_hosts(shared: Path, count: int) -> Iterator[list[FakeHost]]:
    """Hosts on one bridge."""
    tag = f"{os.getpid() % 100000}{secrets.token_hex(1)}"
    bridge, subnet = f"b{tag}", f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = [
            stack.enter_context(_host(f"h{n}{tag}", f"{subnet}.{n}", bridge, f"{subnet}.254", shared))
            for n in range(1, count + 1)
        ]
        yield hosts


@contextmanager
def _host(name: str, address: str, bridge: str, gateway: str, shared: Path) -> Iterator[FakeHost]:
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"v{name}", "master", bridge, "up")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "route", "add", "default", "via", gateway)
        keep = stack.enter_context(tempfile.TemporaryDirectory(prefix="host-", dir="/var/tmp"))
        script = UP.format(name=name, shared=shared, keep=keep)
        isolated = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--propagation", "private"]
        first = subprocess.Popen(
            ["ip", "netns", "exec", name, *isolated, "bash", "-c", script], stdout=subprocess.PIPE, text=True
        )
        stack.callback(_end, first)
        assert first.stdout is not None and first.stdout.readline() == "up\n", f"{name} did not come up"
        yield FakeHost(name, address, _child_of(first.pid))


def _child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _end(first: subprocess.Popen[str]) -> None:
    """Kills the init of the host's process namespace, and with it everything there."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(_child_of(first.pid), 9)
    deadline = time.monotonic() + 10
    while first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if first.poll() is None:
        first.kill()
    first.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
