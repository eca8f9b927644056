"""`slime doctor --ray-address`: checks all hosts of a Ray cluster before a run joins it.

An actor on each host reports versions, folders, free space and GPUs, answers pings that measure its clock, and takes
part in all-reduces. A problem of one host does not hide those of the others: every call has a limit of its own, and its
error becomes a `Problem` of that host. The driver's thread makes all calls. The hosts work at the same time, except for
the pings, which take a few milliseconds each.

Bandwidth is measured in two rounds of disjoint pairs of neighbours, so a slow host is found in constant time: each host
has one or two partners, and its value is the better one. Then follows one all-reduce over all hosts. With gloo, one
process per host takes part; with NCCL, one per GPU, if Ray has given none of them away.

Invariants
1. No file of the check is left in a folder, and no process on a host.
2. A host that does not answer costs `LIMIT_S` once, not once per check.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from slime.cluster.host_actor import on_node
from slime.cluster.hosts import Contract, by_number, differing_versions, not_seen, versions_here
from slime.cluster.preflight import why_unreachable
from slime.cluster.ray_session import join_cluster
from slime.cluster.waiting import translated
from slime.core.blame import error_line
from slime.core.errors import ConfigError
from slime.core.processes import INTERFACE_ENVS, interface_variables
from slime.settings.groups.cluster import split_address

LIMIT_S = 120.0
"""Timeout of an answer. A host's first one includes the start of a process and its imports."""
GIB = 2**30
LEAST_FREE_BYTES = 10 * GIB
LEAST_SHM_BYTES = GIB
PINGS = 5
MOST_SKEW_S = 1.0
PAYLOAD_BYTES = {"gloo": 32 * 2**20, "nccl": 256 * 2**20}
REPEATS = 3
SLOW = 0.5
"""A host with less than this fraction of the median bandwidth is reported."""
GPU_QUERY = "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    driver: str
    total_mib: int
    used_mib: int
    ecc_errors: int
    """Uncorrected since the driver was loaded; 0 if the GPU does not count them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a host reports about itself."""

    name: str
    versions: dict[str, str]
    unseen: list[str]
    """Folders that it does not see as the driver does, with the reason."""
    unwritable: list[str]
    free_bytes: dict[str, int]
    """Folder -> free space."""
    gpus: list[Gpu]
    gpu_problem: str
    """Why `nvidia-smi` failed; empty if it did not, or is not installed."""


@dataclass(frozen=True, slots=True)
class Problem:
    host: str
    """Name and address; empty if the problem belongs to no single host."""
    text: str
    """What is wrong, with the value, and what to do."""
    is_fatal: bool = True
    """Whether a run would fail or be refused."""


@dataclass(slots=True)
class HostReport:
    node_id: str
    address: str
    num_gpus: int
    """GPUs that Ray has there."""
    name: str
    facts: Facts | None = None
    skew_s: float | None = None
    """The host's clock minus the driver's."""
    skew_error_s: float = 0.0
    bandwidths: dict[str, float] = field(default_factory=dict)
    """Kind of all-reduce -> bytes per second, the best that this host reached with a neighbour."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(slots=True)
class ClusterReport:
    versions: dict[str, str]
    """Of the driver's environment."""
    hosts: list[HostReport]
    problems: list[Problem] = field(default_factory=list)
    overall: dict[str, float] = field(default_factory=dict)
    """Kind of all-reduce -> bus bandwidth in bytes per second over all hosts."""
    notes: list[str] = field(default_factory=list)
    """What was not measured, and why."""


def check_cluster(
    address: str, folders: Sequence[Path], *, run_id: str, begun: Callable[[str], object]
) -> ClusterReport:
    """Joins the cluster, checks every live host, and leaves it.

    `folders`: folders that all hosts must share. `run_id`: that of `prepare_environment`. `begun`: called with the name
    of each check before it runs. Raises `ConfigError` if there is no cluster or a folder does not exist, and
    `ActorFailed` if the cluster refuses to be joined.
    """
    _require_cluster(address)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--shared {folder} does not exist on this host; create it or pass another folder")
    begun("joining")
    try:
        join_cluster(address, run_id)
        return _checked(folders, begun)
    finally:
        ray.shutdown()


def _require_cluster(address: str) -> None:
    if address == "auto":
        return
    try:
        host, port = split_address(address)
    except ValueError:
        raise ConfigError(
            f"--ray-address {address} is not HOST:PORT; use the address that `ray start --head` printed"
        ) from None
    if (reason := why_unreachable(host, port)) is not None:
        raise ConfigError(
            f"no Ray cluster can be reached at --ray-address {address} ({reason}); use HOST:PORT as printed by `ray "
            "start --head`, and run slime doctor on a host of the cluster"
        )


def _checked(folders: Sequence[Path], begun: Callable[[str], object]) -> ClusterReport:
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: by_number(n["NodeManagerAddress"]))
    hosts = [
        HostReport(
            n["NodeID"], n["NodeManagerAddress"], int(n["Resources"].get("GPU", 0)), str(n["NodeManagerHostname"])
        )
        for n in nodes
    ]
    report = ClusterReport(versions_here(), hosts)
    actors = {host.node_id: Checker.options(**on_node(host.node_id)).remote() for host in hosts}  # type: ignore[attr-defined]
    begun("facts")
    with _tokens(folders) as contract:
        names = [str(folder) for folder in folders]
        asked = [(host, actors[host.node_id].facts.remote(contract, names)) for host in hosts]
        for host, facts in _answers(asked, report, "its facts"):
            host.facts, host.name = facts, facts.name
    answering = [host for host in hosts if host.facts is not None]
    begun("clocks")
    for host in answering:
        host.skew_s, host.skew_error_s = clock_skew(lambda host=host: ray.get(actors[host.node_id].clock.remote()))  # type: ignore[misc]
    report.problems += problems_of(report)
    begun("all-reduce")
    _measure(report, [(host, [actors[host.node_id]]) for host in answering], "gloo")
    _measure_gpus(report, answering)
    return report


@contextmanager
def _tokens(folders: Sequence[Path]) -> Iterator[Contract]:
    """Writes a file to each folder, for hosts to read, and removes them after the block."""
    tokens: dict[str, tuple[str, str]] = {}
    with ExitStack() as stack:
        for folder in folders:
            file, token = folder.absolute() / f".seen-by-every-host-{secrets.token_hex(4)}", secrets.token_hex(16)
            stack.callback(file.unlink, missing_ok=True)
            try:
                file.write_text(token)
            except OSError as error:
                raise ConfigError(f"--shared {folder} is not writable on this host: {error.strerror}") from error
            tokens[f"--shared {len(tokens) + 1}:" if len(folders) > 1 else "--shared"] = (str(file), token)
        yield Contract(tokens, {}, os.getcwd(), versions_here())


def _answers(asked: Sequence[tuple[HostReport, Any]], report: ClusterReport, what: str) -> Iterator[tuple[Any, Any]]:
    """Yields the hosts that answered, with their answers; the others become problems."""
    deadline = time.monotonic() + LIMIT_S
    for host, ref in asked:
        try:
            yield host, ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
        except (GetTimeoutError, RayError) as error:
            report.problems.append(Problem(str(host), f"did not report {what}: {_why(error, what)}"))


def _why(error: Exception, what: str) -> str:
    if isinstance(error, GetTimeoutError):
        return (
            f"no answer within {LIMIT_S:.0f} s; look at the log of its raylet, and whether slime can be imported there"
        )
    assert isinstance(error, RayError), repr(error)
    return error_line(translated(error, what))


@ray.remote(max_restarts=0, num_cpus=0)
class Checker:
    """The check's process on a host, or on a GPU."""

    def __init__(self) -> None:
        self._store: Any = None

    def facts(self, contract: Contract, folders: Sequence[str]) -> Facts:
        gpus, problem = gpus_here()
        free = {}
        for folder in (*folders, "/dev/shm"):
            with contextlib.suppress(OSError):
                free[folder] = shutil.disk_usage(folder).free
        unseen = not_seen(contract)
        return Facts(socket.gethostname(), versions_here(), unseen, not_writable(folders), free, gpus, problem)

    def clock(self) -> float:
        return time.time()

    def open_store(self, address: str) -> tuple[str, int]:
        """Starts the store of a process group on this host. Returns its address."""
        import torch.distributed as dist

        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        return address, int(self._store.port)

    def all_reduce(self, backend: str, own: str, store: tuple[str, int], rank: int, size: int) -> float:
        """Seconds of one all-reduce of `PAYLOAD_BYTES`, after one that is not counted. `own`: this host's address."""
        import torch
        import torch.distributed as dist

        given = {name: value for name, value in os.environ.items() if name in INTERFACE_ENVS}
        os.environ.update(interface_variables(own, given))
        limit = timedelta(seconds=LIMIT_S / 2)
        mine = self._store if rank == 0 else dist.TCPStore(*store, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        dist.init_process_group(backend, store=mine, rank=rank, world_size=size, timeout=limit)
        try:
            data = torch.ones(PAYLOAD_BYTES[backend] // 4, device=device)
            seconds = []
            for _ in range(1 + REPEATS):
                dist.barrier()
                began_s = time.perf_counter()
                dist.all_reduce(data, op=dist.ReduceOp.MAX)
                _finish(device)
                seconds.append(time.perf_counter() - began_s)
            return statistics.median(seconds[1:])
        finally:
            dist.destroy_process_group()


def _finish(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def not_writable(folders: Sequence[str]) -> list[str]:
    """Returns the folders in which this host cannot create a file, with the reason. Skips those that do not exist."""
    found = []
    for folder in map(Path, folders):
        file = folder / f".written-by-{socket.gethostname()}-{secrets.token_hex(4)}"
        if folder.is_dir():
            try:
                file.write_text("")
                file.unlink()
            except OSError as error:
                found.append(f"{folder} ({error.strerror})")
    return found


def gpus_here() -> tuple[list[Gpu], str]:
    """Returns the GPUs that `nvidia-smi` lists, and why it failed. Both are empty without `nvidia-smi`."""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi did not answer within 30 s"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi failed with exit status {done.returncode}: {said[-1] if said else 'no output'}"
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()], ""


def _gpu(line: str) -> Gpu:
    name, driver, *numbers = (word.strip() for word in line.split(","))
    total, used, errors = (int(number) if number.isdecimal() else 0 for number in numbers)
    return Gpu(name, driver, total, used, errors)


def clock_skew(
    ask: Callable[[], float], *, now: Callable[[], float] = time.time, pings: int = PINGS
) -> tuple[float, float]:
    """Returns (other clock minus this one, largest error), in seconds, from the fastest of some pings (RFC 5905)."""
    best = (0.0, float("inf"))
    for _ in range(pings):
        sent = now()
        theirs = ask()
        back = now()
        best = min(best, (theirs - (sent + back) / 2, (back - sent) / 2), key=lambda found: found[1])
    return best


# --- Findings


def problems_of(report: ClusterReport) -> list[Problem]:
    """Returns what is wrong with the hosts that answered, from their facts and clocks."""
    told = {str(host): host.facts for host in report.hosts if host.facts is not None}
    versions = {host: facts.versions for host, facts in told.items()}
    found = [
        Problem(host, f"{text}; install the same versions in the environment of its `ray start`, and restart Ray there")
        for host, text in differing_versions("the environment of slime doctor", report.versions, versions).items()
    ]
    for host in report.hosts:
        if host.facts is not None:
            found += [*_of_folders(host, host.facts), *_of_clock(host), *_of_gpus(host, host.facts)]
    return [*found, *_of_kinds(report.hosts)]


def _of_folders(host: HostReport, facts: Facts) -> Iterator[Problem]:
    for folder in facts.unseen:
        yield Problem(str(host), f"does not see {folder}; mount the same file system at the same path on all hosts")
    for folder in facts.unwritable:
        yield Problem(str(host), f"cannot write to {folder}; change its owner or the options of the mount")
    for folder, free in facts.free_bytes.items():
        least = LEAST_SHM_BYTES if folder == "/dev/shm" else LEAST_FREE_BYTES
        if free < least:
            text = f"has {free / GIB:.1f} GiB free in {folder}; at least {least / GIB:.0f} GiB are needed"
            yield Problem(str(host), text, is_fatal=False)


def _of_clock(host: HostReport) -> Iterator[Problem]:
    if host.skew_s is not None and abs(host.skew_s) - host.skew_error_s > MOST_SKEW_S:
        side = "ahead of" if host.skew_s > 0 else "behind"
        yield Problem(
            str(host),
            f"its clock is {abs(host.skew_s):.1f} s {side} this host's, so traces and metrics of the hosts do not line "
            "up and requests to weight agents expire at the wrong time; start an NTP client there (chronyc tracking)",
            is_fatal=False,
        )


def _of_gpus(host: HostReport, facts: Facts) -> Iterator[Problem]:
    if facts.gpu_problem:
        yield Problem(str(host), f"{facts.gpu_problem}; reload the driver or reboot the host")
    elif host.num_gpus > len(facts.gpus):
        said = f"lists {len(facts.gpus)}" if facts.gpus else "is not installed or lists none"
        yield Problem(str(host), f"Ray has {host.num_gpus} GPUs there, but nvidia-smi {said}; check --num-gpus")
    for number, gpu in enumerate(facts.gpus):
        if gpu.ecc_errors:
            text = f"GPU {number} has {gpu.ecc_errors} uncorrected memory errors; reset or replace it"
            yield Problem(str(host), text)


def _of_kinds(hosts: Sequence[HostReport]) -> Iterator[Problem]:
    """Reports GPUs or drivers that differ between hosts."""
    kinds = {str(h): sorted({f"{g.name}, driver {g.driver}" for g in h.facts.gpus}) for h in hosts if h.facts}
    kinds = {host: kind for host, kind in kinds.items() if kind}
    if len({tuple(kind) for kind in kinds.values()}) > 1:
        told = "; ".join(f"{host}: {' and '.join(kind)}" for host, kind in kinds.items())
        yield Problem("", f"hosts have different GPUs or drivers: {told}", is_fatal=False)


# --- Bandwidth

Member = tuple[HostReport, list[Any]]
"""A host and its processes in an all-reduce."""


def pairs_of(count: int) -> list[list[tuple[int, int]]]:
    """Returns the two rounds of disjoint pairs of neighbours in a row; together they hold each of `count` hosts."""
    return [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)]


def _measure(report: ClusterReport, members: Sequence[Member], backend: str) -> None:
    """Measures pairs of hosts, names those that are slow or cannot communicate, then measures all together."""
    if len(members) < 2:
        report.notes.append(f"all-reduce between hosts ({backend}): not measured, it needs two hosts that answer")
        return
    kind = f"{backend} between hosts"
    before = len(report.problems)
    for pairs in pairs_of(len(members)):
        groups = [[members[a], members[b]] for a, b in pairs]
        for group, found in zip(groups, _bandwidths(groups, backend), strict=True):
            _note(report, group, kind, found)
    report.problems += slow_hosts({str(host): host.bandwidths.get(kind) for host, _ in members}, kind)
    if len(report.problems) > before and any(p.is_fatal for p in report.problems[before:]):
        report.notes.append(f"all-reduce over all hosts ({backend}): not measured, because of the problem above")
        return
    (found,) = _bandwidths([list(members)], backend)
    if isinstance(found, str):
        report.problems.append(Problem("", f"the all-reduce over all hosts ({backend}) failed: {found}"))
    else:
        report.overall[backend] = found


def _note(report: ClusterReport, group: Sequence[Member], kind: str, found: float | str) -> None:
    if isinstance(found, str):
        names = " and ".join(str(host) for host, _ in group)
        hint = "check firewalls and the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        report.problems.append(Problem("", f"the all-reduce on {names} ({kind}) failed: {found}; {hint}"))
        return
    for host, _ in group:
        host.bandwidths[kind] = max(found, host.bandwidths.get(kind, 0.0))


def slow_hosts(bandwidths: Mapping[str, float | None], kind: str) -> list[Problem]:
    """Returns the hosts whose bandwidth is far below the median. `bandwidths`: host -> bytes per second."""
    known = {host: value for host, value in bandwidths.items() if value is not None}
    if len(known) < 3:  # of two hosts, both have the same value
        return []
    middle = statistics.median(known.values())
    return [
        Problem(
            host,
            f"its all-reduce ({kind}) reaches {value / 1e9:.2f} GB/s, the median of the hosts is {middle / 1e9:.2f}; "
            "check its link and network interface",
            is_fatal=False,
        )
        for host, value in known.items()
        if value < SLOW * middle
    ]


def _bandwidths(groups: Sequence[Sequence[Member]], backend: str) -> list[float | str]:
    """Bus bandwidth of each group in bytes per second, or why it failed. The groups work at the same time."""
    deadline = time.monotonic() + LIMIT_S
    stores = [group[0][1][0].open_store.remote(group[0][0].address) for group in groups]
    calls: list[list[Any] | str] = []
    for group, store in zip(groups, stores, strict=True):
        ranks = [(host.address, actor) for host, actors in group for actor in actors]
        try:
            where = ray.get(store, timeout=max(deadline - time.monotonic(), 0.1))
        except (GetTimeoutError, RayError) as error:
            calls.append(_why(error, "the store of the process group"))
            continue
        calls.append(
            [actor.all_reduce.remote(backend, own, where, rank, len(ranks)) for rank, (own, actor) in enumerate(ranks)]
        )
    return [_bandwidth(one, backend, deadline) for one in calls]


def _bandwidth(calls: list[Any] | str, backend: str, deadline: float) -> float | str:
    if isinstance(calls, str):
        return calls
    try:
        seconds = max(ray.get(calls, timeout=max(deadline - time.monotonic(), 0.1)))
    except (GetTimeoutError, RayError) as error:
        return _why(error, "the all-reduce")
    return bus_bandwidth(PAYLOAD_BYTES[backend], len(calls), seconds)


def bus_bandwidth(num_bytes: int, num_ranks: int, seconds: float) -> float:
    """Bytes per second that each rank's link carries in a ring, as nccl-tests report it."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


def _measure_gpus(report: ClusterReport, hosts: Sequence[HostReport]) -> None:
    """Measures NCCL within hosts and between them, on the hosts whose GPUs are all free."""
    free = {str(node): dict(found) for node, found in ray._private.state.available_resources_per_node().items()}
    members: list[Member] = []
    for host in (h for h in hosts if h.num_gpus):
        if free.get(host.node_id, {}).get("GPU", 0) < host.num_gpus:
            report.notes.append(f"all-reduce (nccl) on {host}: not measured, because its GPUs are in use")
            continue
        options = {**on_node(host.node_id), "num_gpus": 1}
        members.append((host, [Checker.options(**options).remote() for _ in range(host.num_gpus)]))  # type: ignore[attr-defined]
    inside = [[member] for member in members if len(member[1]) > 1]
    for group, found in zip(inside, _bandwidths(inside, "nccl"), strict=True):
        _note(report, group, "nccl inside the host", found)
    if members:
        _measure(report, members, "nccl")
