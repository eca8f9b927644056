"""What others on this host can get at of a run: sockets, files, environments, command lines.

A look at the processes of a run notes what is open and should not be. Sockets are asked, once each, as somebody without
a key would ask; files, Unix sockets and environments are tried by a child that is another user.

`WITHOUT_KEY` and `KNOWS_NO_KEY` are the whole list of what answers without a key, with reasons; docs/multi_node.md says
the same. What neither they nor a key explain is a complaint.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from slime.core.processes import SHORT_ROOM

LISTEN, BOUND = "0A", "07"
"""State of a listening socket in /proc/net/tcp, and of a bound one in /proc/net/udp."""
UNIX_LISTENS = "00010000"
"""Flags of a listening socket in /proc/net/unix."""
NOBODY = 65534
ANSWER_S = 5.0
TRIES = 5
"""Looks at a socket that gives no answer, because its process is busy, or just starting."""
NO_ANSWER = "it gives no answer that this test knows"
ROUTES = (
    *("/", "/health", "/healthz", "/health_generate", "/liveness", "/readiness", "/metrics", "/engine_metrics"),
    *("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models", "/v1/loads", "/get_loads"),
    *("/workers", "/docs", "/openapi.json", "/flush_cache", "/start_profile", "/weights_checker"),
)
OF_THIS_USER = ("/health", "/health_generate", "/server_info", "/get_server_info", "/v1/models")
OF_THIS_USER += ("/model_info", "/get_model_info")
"""What a `LoopbackRouter` forwards for processes of the run's user, as this one is."""
WITHOUT_KEY: Mapping[str, tuple[str, ...]] = {
    "sglang::router": (
        *("/liveness", "/readiness", "/health", "/health_generate", "/engine_metrics"),
        *("/v1/models", "/get_server_info"),  # the name of the model; how many workers there are
    ),
    "sglang::router metrics": ROUTES,  # numbers alone, whatever is asked
    "SGLang": ("/health", "/health_generate"),
    "ray::RolloutAct": ("/healthz", *OF_THIS_USER),  # the adapter for agents: how many sessions there are
    "ray::EpisodeAct": ("/healthz", *OF_THIS_USER),
    "Ray's metrics": ROUTES,  # numbers of its autoscaler
    "ray::DashboardA": ROUTES,  # numbers of the host and of Ray's processes
}
"""Who answers over HTTP -> what it answers anybody."""
KNOWS_NO_KEY: Mapping[str, str] = {
    "ray::TrainActor": "torch's stores and gloo's sockets of training ranks",
    "sglang::schedul": "torch's store and gloo's sockets of an engine",
}
"""Process -> its sockets that know no keys. On loopback alone, where a run is on one host."""
CONTROL = (
    *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
    *("/init_weights_update_group", "/load_lora_adapter_from_tensors", "/pause_generation", "/flush_cache"),
    *("/release_memory_occupation", "/weights_checker", "/abort_request", "/start_profile", "/set_trace_level"),
)
"""Of SGLang, for whoever has the key to the weights."""
RAY_ASKED = ("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats", "ObjectManagerService/Push")
RAY_ASKED += ("CoreWorkerService/GetCoreWorkerStats",)
"""One question to each of Ray's services; a process has one or two of them."""
USE_KEY = b"SLIME_ENGINE_API_KEY="
KEYS = (b"SLIME_ENGINE_API_KEY=", b"SLIME_ENGINE_ADMIN_API_KEY=", b"RAY_AUTH_TOKEN=")


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket on which somebody waits for others."""

    kind: str
    """tcp, tcp6, udp, udp6 or unix."""
    address: str
    """Of a network; of a Unix socket its path, which begins with @ where it is a name of no file."""
    port: int = 0


def listening(tables: Path = Path("/proc/net")) -> dict[str, Listening]:
    """Every one of a network namespace, by inode. `tables`: of which one."""
    found: dict[str, Listening] = {}
    for kind, state in (("tcp", LISTEN), ("tcp6", LISTEN), ("udp", BOUND), ("udp6", BOUND)):
        for line in _rows(tables / kind):
            fields = line.split()
            if fields[3] == state:
                number, _, port = fields[1].rpartition(":")
                found[fields[9]] = Listening(kind, _address(number), int(port, 16))
    for line in _rows(tables / "unix"):
        fields = line.split()
        if fields[3] == UNIX_LISTENS and len(fields) > 7:
            found[fields[6]] = Listening("unix", fields[7])
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that `pid` has open; empty if it is gone."""
    inodes: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                    inodes.add(match[1])
    return inodes


def _rows(table: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return table.read_text().splitlines()[1:]
    return []


def _address(number: str) -> str:
    """As /proc writes it: words of four bytes, each in the order of the host."""
    words = [bytes.fromhex(number[i : i + 8]) for i in range(0, len(number), 8)]
    address = ip_address(b"".join(word[:: -1 if sys.byteorder == "little" else 1] for word in words))
    return str(getattr(address, "ipv4_mapped", None) or address)


@dataclass(slots=True)
class Openness:
    """What was seen of one run. `look` from one thread; `complaints` when that has ended."""

    complaints: set[str] = field(default_factory=set)
    asked: dict[str, str] = field(default_factory=dict)
    """By inode, sockets that were looked at: where, whose, and what came of it."""
    keys: set[bytes] = field(default_factory=set)
    _tries: Counter[str] = field(default_factory=Counter)
    _seen: dict[int, str] = field(default_factory=dict)
    """Processes whose environment was tried, with the name that they had."""

    def look(self, run_id: str, names: Mapping[int, str], shm: set[int]) -> None:
        """Looks at the processes of a run, by pid, and at its inodes in shared memory."""
        owners: dict[str, dict[int, str]] = {}
        for pid, name in names.items():
            for inode in sockets_of(pid):
                owners.setdefault(inode, {})[pid] = name
        fresh = [pid for pid, name in names.items() if self._seen.get(pid) != name]
        self._seen.update({pid: names[pid] for pid in fresh})
        self._note_keys(fresh)
        paths = []
        for inode, where in listening().items():
            if inode not in owners or inode in self.asked:
                continue
            whose = ", ".join(sorted({who(pid, name) for pid, name in owners[inode].items()}))
            self.asked[inode] = f"{where.kind} {where.address}:{where.port} of {whose}"
            if where.kind == "unix" and not where.address.startswith("@"):
                paths.append(where.address)
            elif (problem := _problem(where, owners[inode])) == NO_ANSWER and self._tries[inode] < TRIES:
                self._tries[inode] += 1
                del self.asked[inode]
            elif problem is not None:
                self.complaints.add(f"{self.asked[inode]}: {problem}")
        for path in _open_files(names, shm):
            self.complaints |= {f"others may use {text}" for text in open_to_others(path)}
        folders = temporary_folders(run_id)
        if (fresh or paths) and os.getuid() == 0:
            self.complaints |= set(as_nobody(lambda: _reached(fresh, paths)))
        self.complaints |= {f"others may use {path}" for folder in folders for path in open_to_others(folder)}

    def _note_keys(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self.keys |= {_entry(pid, name) for name in KEYS}
        self.keys.discard(b"")
        for pid in pids:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(key in line for key in self.keys):
                    self.complaints.add(f"a key is on the command line of {pid}: {line[:200]!r}")


def temporary_folders(run_id: str) -> list[Path]:
    """Those of a run, in the temporary folder and where sockets go if that has too long a path."""
    ending = run_id.rpartition("-")[2]  # which Ray's folder has alone
    return [path for room in {tempfile.gettempdir(), SHORT_ROOM} for path in Path(room).glob(f"slime-*{ending}*")]


def _open_files(pids: Iterable[int], shm: set[int]) -> set[Path]:
    """Files of these inodes in shared memory, and in the temporary folder itself what these processes have open."""
    found = {Path(entry.path) for entry in os.scandir("/dev/shm") if entry.inode() in shm}
    rooms = {tempfile.gettempdir(), SHORT_ROOM}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    path = Path(os.readlink(entry.path))
                    found |= {path} if str(path.parent) in rooms else set()
    return found


def _entry(pid: int, name: bytes) -> bytes:
    """The value of an environment variable (NAME=) of a process; empty if it has none."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(name):
                return entry.removeprefix(name)
    return b""


def who(pid: int, name: str) -> str:
    """A process by its name, or where that says nothing by its command line."""
    with contextlib.suppress(OSError):
        line, name = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_text().strip()
        if b"slime.serving.launch" in line and not name.startswith("sglang::"):
            return "sglang::router" if b"--router\0" in line else "SGLang"
        if b"autoscaler/_private/monitor.py" in line:
            return "Ray's metrics"
    return name


def _problem(where: Listening, owners: Mapping[int, str]) -> str | None:
    """What is wrong with a socket of a network or without a file; None if nothing is."""
    if where.kind == "unix":
        return "a name without a file has no mode: everybody on this host may connect"
    if not ip_address(where.address).is_loopback and not (where.kind == "tcp" and is_on_loopback_device(where.port)):
        return "other hosts reach it"
    whose = {who(pid, name) for pid, name in owners.items()}
    if where.kind == "tcp6":
        return _without_token(where.port)
    if where.kind != "tcp" or whose & KNOWS_NO_KEY.keys():
        return None
    (owner, *_) = sorted(whose)
    if _status(where.port, "/") is None:
        return NO_ANSWER
    answered = [route for route in ROUTES if _status(where.port, route) == 200]
    if owner == "sglang::router" and len(answered) == len(ROUTES):
        owner = "sglang::router metrics"
    more = [route for route in answered if route not in WITHOUT_KEY.get(owner, ())]
    if more or owner != "SGLang":
        return f"without a key it answers {more}" if more else None
    key = next(filter(None, (_entry(pid, USE_KEY) for pid in owners)), b"").decode()
    more = [route for route in CONTROL if _status(where.port, route, "POST", key) != 401]
    return f"whoever may generate may ask it for {more}" if more else None


def is_on_loopback_device(port: int) -> bool:
    """Whether the listening IPv4 socket of this port is bound to the device lo, which /proc/net/tcp does not tell."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # NETLINK_SOCK_DIAG
        request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 1 << 10) + bytes(48)  # TCP_LISTEN
        netlink.send(struct.pack("=IHHII", 16 + len(request), 20, 0x301, 1, 0) + request)  # a dump
        while True:
            data = netlink.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3):  # an error, or the end
                    return False
                (number,) = struct.unpack_from("!H", data, 16 + 4)
                if number == port:
                    return int.from_bytes(data[16 + 40 : 16 + 44], sys.byteorder) == socket.if_nametoindex("lo")
                data = data[size + -size % 4 :]


def _status(port: int, route: str, method: str = "GET", key: str = "") -> int | None:
    """Of an answer to somebody with that key, or without; None where no HTTP is spoken."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        body = "{}" if method == "POST" else None
        connection.request(method, route, body, {"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _without_token(port: int) -> str | None:
    """Ray's processes speak gRPC, on sockets of IPv6."""
    import grpc

    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for question in RAY_ASKED:
            try:
                channel.unary_unary(f"/ray.rpc.{question}")(b"", timeout=ANSWER_S)
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code().name)  # type: ignore[attr-defined]
    if codes & {"DEADLINE_EXCEEDED", "UNAVAILABLE"} and "OK" not in codes:
        return NO_ANSWER
    closed = "UNAUTHENTICATED" in codes and codes <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}
    return None if closed else f"without a token it says {sorted(codes)} to {RAY_ASKED}"


def _reached(pids: Iterable[int], paths: Iterable[str]) -> list[str]:
    """What this process can get at: environments of processes, and Unix sockets."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/environ").read_bytes()
            found.append(f"others read the environment of process {pid}")
    for path in paths:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            found.append(f"others connect to {path}")
    return found


def as_nobody(act: Callable[[], list[str]]) -> list[str]:
    """What `act` says in a child that is another user. Only root can be one."""
    assert os.getuid() == 0, "another user is needed, and only root can become one"
    for _ in range(TRIES):  # a copy of a process with threads may find a lock locked
        if text := _said_by_nobody(act):
            found: list[str] = json.loads(text)
            return found
    return ["the other user gave no answer"]


def _said_by_nobody(act: Callable[[], list[str]]) -> bytes:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(ANSWER_S))
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = act()
        except BaseException as error:
            said = [f"the other user failed: {error!r}"]
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def open_to_others(root: Path) -> list[str]:
    """What another user may list, read or write at and below `root`, whatever is above it."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        mode = root.lstat().st_mode
        if stat.S_ISLNK(mode):
            return []
        if mode & 0o066:
            found.append(f"{root} (mode {stat.S_IMODE(mode):o})")
        if stat.S_ISDIR(mode) and mode & 0o011:
            for entry in root.iterdir():
                found += open_to_others(entry)
    return found


def keys_in(root: Path, keys: Iterable[bytes], *, but: Iterable[str] = ()) -> list[str]:
    """Files at and below `root` in which one of these keys is written."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name not in but]
    return [str(path) for path in files if any(key in path.read_bytes() for key in keys)]
