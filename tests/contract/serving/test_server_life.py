"""The life of real servers: they end when told, end with their owner, fail fast and loud, and do not meet."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime.compat.sglang_memory_gate import WAITING
from slime.core import liveness
from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.serving import server as server_module
from slime.serving.child_process import FAMILY_ENV, all_processes, has_mark, read_stat
from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import PortLease, is_bindable, lease_ports, request
from slime.serving.server import ServerSpec, SGLangServer
from slime.serving.watch import ServerWatch
from slime.weights.receivers import Receiver
from slime.weights.transports.distributed import DistributedChannel
from tests.support.engines import READY_LIMIT_S, fronting, serving, spec_of
from tests.support.openness import CONTROL
from tests.support.weights import transport_context

OWNER = """
import sys, time
from slime.serving.router import Router
from slime.serving.server import ServerSpec, SGLangServer
server = SGLangServer(ServerSpec(model_path=sys.argv[1], dtype="float32"), log_path=sys.argv[2] + "/engine.log")
front = Router(log_path=sys.argv[2] + "/router.log")
server.start()
front.start()
front.wait_ready()
server.wait_ready(180)
print(server.pid, front.pid, flush=True)
time.sleep(300)
"""
GENERATE = {"input_ids": [2, 40, 41], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def session_of(pid: int) -> set[int]:
    """The living processes of the session that a server leads."""
    return {s.id.pid for s in all_processes().values() if s.session == pid and s.state != "Z"}


def gone(pids: set[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all((stat := read_stat(p)) is None or stat.state == "Z" for p in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_engine_router_and_weight_sync_meet_on_ipv6(tiny_model_path: Path, tmp_path: Path) -> None:
    server = SGLangServer(spec_of(tiny_model_path), host="::1", log_path=tmp_path / "engine.log")
    try:
        server.start()
        server.wait_ready(timeout_s=READY_LIMIT_S)
        with fronting(server.url, tmp_path, host="::1") as front:
            assert front.url.startswith("http://[::1]:") and server.url.startswith("http://[::1]:")
            status, said = request("POST", f"{front.url}/generate", GENERATE, timeout_s=60, api_key=front.api_key)
            assert status == 200 and len(json.loads(said)["output_ids"]) == 4, said
        channel = DistributedChannel(transport_context(address="::1"))
        channel.begin([Receiver(HttpEngineControl(server.url, ONE_RANK, 60.0))], version=1)
        channel.close()
        assert server.alive
    finally:
        server.stop()


@pytest.mark.slow
def test_a_model_that_does_not_exist_fails_fast_and_shows_the_log(tmp_path: Path) -> None:
    spec = ServerSpec(model_path=str(tmp_path / "nothing-here"), dtype="float32")
    server = SGLangServer(spec, log_path=tmp_path / "engine.log")
    server.start()
    pid = server.pid
    with pytest.raises(EngineError, match="nothing-here") as caught:
        server.wait_ready(timeout_s=120)
    assert "Error" in str(caught.value) and not isinstance(caught.value, DeadlineExceeded)
    assert session_of(pid) == set()
    assert not server.alive


@pytest.mark.slow
def test_a_deadline_names_the_server_and_the_last_line_of_its_log(tiny_model_path: Path, tmp_path: Path) -> None:
    server = SGLangServer(
        ServerSpec(model_path=str(tiny_model_path), dtype="float32"), log_path=tmp_path / "engine.log"
    )
    server.start()
    pid = server.pid
    try:
        with pytest.raises(DeadlineExceeded, match=r"SGLang server http://127.*waited [1-9]\d* s for"):
            server.wait_ready(timeout_s=0.2)
    finally:
        server.stop(timeout_s=1)
    assert session_of(pid) == set()


LONG = {
    "input_ids": [[2 + (31 * i + 7 * t) % 90 for t in range(1000)] for i in range(12)],
    "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 90,
}
"""A batch in which the scheduler answers nobody for a while."""
LOOP = "import os\nfrom slime.core.processes import die_with_parent\ndie_with_parent(os.getppid())\nwhile True: pass"


def said_meanwhile(server: SGLangServer, watch: ServerWatch, stops: bool = False) -> set[str | None]:
    """What the watch says while the server works on `LONG`, and is stopped for a moment each second."""
    said: set[str | None] = set()
    schedulers = [s.id.pid for s in all_processes().values() if s.session == server.pid and "schedul" in s.name]
    request("POST", f"{server.url}/flush_cache", timeout_s=60)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(request, "POST", f"{server.url}/generate", LONG, timeout_s=300)
        while not answer.done():
            for pid in schedulers * stops:
                os.kill(pid, signal.SIGSTOP)
                said.add(watch.trouble())
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.3 if stops else 0.01)
            said.add(watch.trouble())
        assert answer.result()[0] == 200, answer.result()
    return said


@pytest.mark.slow
def test_an_engine_that_works_beside_other_work_lives(
    engine_server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: an engine that computes and answers nobody is not hung, as one that does neither would be; it is after
    `WORKING` times its limit; one that stands still is.
    """
    waits_s: list[float] = []

    def answers(limit_s: float) -> bool:
        began = time.monotonic()
        answered = engine_server.scheduler_answers(limit_s)
        waits_s.append(time.monotonic() - began)
        return answered

    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(2)]
    used_s = engine_server.processor_s
    watch_for = partial(ServerWatch, engine_server.problem, answers, interval_s=0.02, used_s=used_s)
    watch = watch_for(timeout_s=20.0)
    try:
        assert said_meanwhile(engine_server, watch, stops=True) == {None}
        assert max(waits_s) > 0.1, "the batch is too short to tell"
        watch.close()
        watch = watch_for(timeout_s=1.0)
        monkeypatch.setattr(liveness, "WORKING", 0.1)
        monkeypatch.setattr(liveness, "load", lambda: 1.0)  # else the limit would grow with the load of the machine
        assert "has not responded for" in str(said_meanwhile(engine_server, watch))
    finally:
        watch.close()
        for loop in loops:
            loop.kill()


@pytest.mark.slow
def test_two_servers_at_once_serve_and_stop_without_a_trace(tiny_model_path: Path, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    spec = ServerSpec(model_path=str(tiny_model_path), dtype="float32")
    servers = [SGLangServer(spec, log_path=tmp_path / f"engine_{i}.log") for i in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(timeout_s=240)
        assert servers[0].port != servers[1].port
        for server in servers:
            status, text = request("POST", f"{server.url}/generate", GENERATE, timeout_s=60)
            assert status == 200, text
        pids, ports = [s.pid for s in servers], [s.port for s in servers]
        families = [session_of(pid) for pid in pids]
        assert all(len(f) >= 3 for f in families), "launcher, scheduler and detokenizer"
        mine = set().union(*(_shm_names(f) for f in families))
        assert mine, "SGLang maps shared memory, or this test looks in the wrong place"
    finally:
        for server in servers:
            server.stop()
    assert gone(set().union(*families), limit_s=1)
    assert all(is_bindable(port) for port in ports)
    assert not mine & (set(os.listdir("/dev/shm")) - before)


def _shm_names(pids: set[int]) -> set[str]:
    from slime.serving.child_process import library_files, shm_inodes_of

    inodes = set().union(*(shm_inodes_of(pid) for pid in pids))
    return {name for name, inode in library_files().items() if inode in inodes}


@pytest.mark.slow
def test_server_and_router_end_with_an_owner_that_is_killed(tiny_model_path: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny_model_path), str(tmp_path)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    left_behind: set[str] = set()
    try:
        assert owner.stdout is not None
        server_pid, router_pid = (int(p) for p in owner.stdout.readline().split())
        family = session_of(server_pid) | session_of(router_pid)
        assert len(family) >= 4
        left_behind = _shm_names(family)
        os.kill(owner.pid, signal.SIGKILL)
        assert gone(family, limit_s=15)
    finally:
        owner.kill()
        owner.wait()
        for name in left_behind:  # nobody was left to remove them: the guardian's duty, and none ran here
            Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile_is_answered_with_another(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squatter = socket.socket()
    leases: list[PortLease] = []

    def lease_and_squat(count: int = 1, **how: Any) -> PortLease:
        lease = lease_ports(count, **how)
        if not leases:
            squatter.bind(("127.0.0.1", lease.port))
            squatter.listen()
        leases.append(lease)
        return lease

    monkeypatch.setattr(server_module, "lease_ports", lease_and_squat)
    server = SGLangServer(
        ServerSpec(model_path=str(tiny_model_path), dtype="float32"), log_path=tmp_path / "engine.log"
    )
    try:
        server.start()
        server.wait_ready(timeout_s=240)
        assert len(leases) == 2 and server.port == leases[1].port
        assert request("POST", f"{server.url}/generate", GENERATE, timeout_s=60)[0] == 200
    finally:
        server.stop()
        squatter.close()


@pytest.mark.slow
def test_two_tensor_parallel_ranks_serve(tiny_model_path: Path, tmp_path: Path) -> None:
    with serving(spec_of(tiny_model_path, layout=EngineLayout(tp_size=2)), tmp_path) as server:
        assert request("POST", f"{server.url}/generate", GENERATE, timeout_s=60)[0] == 200
        status, text = request("POST", f"{server.url}/weights_checker", {"action": "checksum"}, timeout_s=60)
        assert status == 200 and text.count("tp_rank") == 2, text
        mine = _shm_names(session_of(server.pid))
        assert any(name.startswith("sgl_shm_mq_") for name in mine) and any(name.startswith("sem.") for name in mine), (
            mine
        )
    assert not mine & set(os.listdir("/dev/shm"))


def test_the_mark_of_a_server_survives_in_all_its_processes(engine_server: SGLangServer) -> None:
    pids = session_of(engine_server.pid)
    marks = {
        entry
        for pid in pids
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if entry.startswith(FAMILY_ENV.encode())
    }
    assert len(marks) == 1
    assert all(has_mark(pid, next(iter(marks))) for pid in pids)


@pytest.mark.slow
def test_a_server_with_keys_serves_its_router_and_refuses_others(tiny_model_path: Path, tmp_path: Path) -> None:
    """Law: without a key it answers health checks alone; who may generate can do no more than that."""
    spec = spec_of(tiny_model_path, api_key="secret-of-the-run", admin_key="secret-of-its-weights")
    with serving(spec, tmp_path) as server, fronting(server.url, tmp_path, worker_api_key=spec.api_key) as front:
        paths = json.loads(request("GET", f"{server.url}/openapi.json", api_key=spec.api_key)[1])["paths"]
        asked = [(path, method.upper()) for path, methods in paths.items() for method in methods]
        assert len(asked) > 60, "SGLang lists its routes"
        for path, method in asked:
            body = {} if method in ("POST", "PUT") else None
            status = request(method, f"{server.url}{path}", body)[0]
            assert status == 401 or path in ("/health", "/health_generate", "/ready"), (
                f"{method} {path} without a key: {status}"
            )
        for path in CONTROL:
            assert request("POST", f"{server.url}{path}", {}, api_key=spec.api_key)[0] == 401, path
        speak = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "a",
        }
        assert httpx.get(f"{server.url}/v1/realtime", headers=speak).status_code != 101
        status, text = request("GET", f"{server.url}/server_info", api_key=spec.api_key, timeout_s=60)
        assert status == 200 and '"internal_states"' in text and "secret-of" not in text
        for key in (None, spec.api_key):
            stranger = HttpEngineControl(server.url, ONE_RANK, timeout_s=30, api_key=key)
            for call in (stranger.pause, stranger.flush_cache, stranger.weight_checksums, stranger.resume):
                with pytest.raises(EngineError, match="401"):
                    call()
        control = HttpEngineControl(server.url, ONE_RANK, timeout_s=30, api_key=spec.keys.control)
        control.pause()
        control.flush_cache()
        assert control.weight_checksums()[0].checksums
        control.resume()
        assert request("POST", f"{front.url}/generate", GENERATE, timeout_s=60)[0] == 401, "nor does the router answer"
        status, text = request("POST", f"{front.url}/generate", GENERATE, api_key=spec.api_key, timeout_s=60)
        assert status == 200, f"a client shows it, and the router shows it to the server: {text}"
        command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"slime.serving.launch" in command_line and b"secret-of" not in command_line
    log = tmp_path / "engine.log"
    assert log.stat().st_mode & 0o077 == 0 and "secret-of" not in log.read_text(errors="replace")


@pytest.mark.slow
def test_a_gated_server_waits_with_everything_imported_and_then_serves(tiny_model_path: Path, tmp_path: Path) -> None:
    """What a colocated start on a GPU needs: memory is measured when the trainer has lent its own."""
    server = SGLangServer(spec_of(tiny_model_path, gated=True), log_path=tmp_path / "engine.log")
    try:
        server.start()
        deadline = time.monotonic() + READY_LIMIT_S
        while WAITING not in server.log_tail():
            assert server.alive, server.log_tail()
            assert time.monotonic() < deadline, "it never came to the gate"
            time.sleep(0.1)
        assert "Load weight begin" not in server.log_tail() and not server.healthy()
        server.open_gate()
        server.wait_ready(READY_LIMIT_S)
        status, _ = request("POST", f"{server.url}/generate", GENERATE, timeout_s=60)
        assert status == 200
    finally:
        server.stop()
    assert not list(tmp_path.glob("*.gate"))
