"""What a hostile agent tries in a local sandbox: nothing of it succeeds. Skipped where the kernel holds nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slime.agent.sandbox import exec_and_wait, local, local_supervisor
from slime.agent.sandbox.local import LocalSandbox
from slime.core.errors import ConfigError, Unconfined


def inside(body: Callable[[LocalSandbox], Awaitable[None]], **settings: object) -> None:
    async def go() -> None:
        async with LocalSandbox(**settings) as sandbox:  # type: ignore[arg-type]
            await body(sandbox)

    asyncio.run(go())


@pytest.fixture(autouse=True, scope="module")
def something_holds_them() -> None:
    """Skips the tests where this machine refuses what a sandbox is made of, with what is missing."""

    async def nothing(_: LocalSandbox) -> None: ...

    try:
        inside(nothing)
    except Unconfined as refusal:
        pytest.skip(str(refusal))


@pytest.fixture
def answering() -> socket.socket:
    """A server on the host's loopback that says one word to everyone."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                other, _ = server.accept()
            except OSError:
                return
            with other:
                other.sendall(b"word")

    threading.Thread(target=serve, daemon=True).start()
    return server


ASK = "python3 -c \"import socket; print(socket.create_connection(('{}', {}), 5).recv(9))\""


def test_the_network_is_what_may_be_reached_and_not_the_router(answering: socket.socket) -> None:
    router = socket.create_server(("127.0.0.1", 0))

    async def body(sandbox: LocalSandbox) -> None:
        assert "word" in (await sandbox.exec(ASK.format("127.0.0.1", answering.getsockname()[1]))).stdout
        for host, port in (("127.0.0.1", router.getsockname()[1]), ("1.1.1.1", 53)):
            ended = await sandbox.exec(ASK.format(host, port))
            assert ended.code != 0 and ("refused" in ended.stderr or "unreachable" in ended.stderr)

    inside(body, reach=("127.0.0.1", answering.getsockname()[1]))


def test_no_secret_of_the_run_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame-key")
    grader = tmp_path / "grader.py"
    grader.write_text("sesame-grader")
    os.chmod(tmp_path, 0o755)
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "SESSION": "sesame-session"})

    async def body(sandbox: LocalSandbox) -> None:
        look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; cat /proc/1/mem"
        look += f"; cat {grader} {__file__} /etc/shadow /root/.bashrc; ls {tmp_path} {Path(__file__).parent}"
        ended = await sandbox.exec(look)
        assert "sesame" not in ended.stdout and str(other.pid) not in (await sandbox.exec("ls /proc")).stdout.split()
        await sandbox.exec(f"ln -s {grader} link; ln -s /etc/shadow shadow; kill -9 {other.pid}; kill -9 1; kill -2 1")
        for path in ("link", "shadow", "../root/.bashrc", str(grader)):
            with pytest.raises(OSError, match="failed with status"):
                await sandbox.read_file(path)
        with pytest.raises(OSError, match="failed with status"):
            await sandbox.write_file("link", "changed")
        for path in ("/usr/bin/changed", "/etc/passwd"):
            with pytest.raises(OSError, match="failed with status"):
                await sandbox.write_file(path, "changed")

    try:
        inside(body)
        assert other.poll() is None and grader.read_text() == "sesame-grader"
    finally:
        other.kill()
        other.wait()


def test_what_may_be_read_is_read_and_not_written() -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert await sandbox.read_file(f"{folder}/program") == b"a program"
        with pytest.raises(OSError, match="failed with status"):
            await sandbox.write_file(f"{folder}/program", "changed")
        assert folder.name in (await sandbox.exec(f"ls {folder.parent}")).stdout.split()

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chmod(folder, 0o755)
        (folder / "program").write_text("a program")
        inside(body, readable=(folder,))
        with pytest.raises(ConfigError, match="does not exist"):
            inside(body, readable=(folder / "missing",))


def test_programs_of_several_processes_share_memory() -> None:
    """Law: /dev/shm is there, and bounded as files are; what has no end is not read."""
    pool = "from multiprocessing import Pool; print(Pool(2).map(abs, [-1, -2]))"

    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec(f"python3 -c '{pool}'")).stdout == "[1, 2]\n"
        assert (await sandbox.exec("head -c 30m /dev/zero >/dev/shm/full")).code != 0
        await sandbox.exec("ln -s /dev/zero endless; mkfifo silent")
        for name in ("endless", "silent"):
            with pytest.raises(OSError, match="not a plain file"):
                await sandbox.read_file(name)

    inside(body, disk_bytes=20 << 20)


def test_another_session_is_neither_read_nor_met() -> None:
    async def go() -> None:
        async with LocalSandbox() as one, LocalSandbox() as two:
            await one.write_file("/tmp/key", "sesame")
            await one.exec("KEY=sesame sleep 50 &")
            ended = await two.exec("cat /tmp/key /proc/[0-9]*/environ /proc/[0-9]*/cmdline")
            assert "sesame" not in ended.stdout and "sleep" not in ended.stdout

    asyncio.run(go())


def test_no_capability_and_no_further_namespace() -> None:
    async def body(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec("unshare -U true")).code != 0
        assert (await sandbox.exec("mount -o remount,rw /usr")).code != 0
        assert "CapEff:\t0000000000000000" in (await sandbox.exec("cat /proc/self/status")).stdout

    inside(body)


def test_limits_hold_and_the_sandbox_still_answers() -> None:
    fork = (
        "import os,time\nn=0\ntry:\n while n<500:\n  if os.fork()==0: time.sleep(30)\n  n+=1\nexcept OSError: print(n)"
    )

    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.write_file("fork.py", fork)
        assert 0 < int((await sandbox.exec("python3 fork.py; kill -9 -1")).stdout) < 40
        assert (await sandbox.exec("head -c 30m /dev/zero >full")).code != 0
        assert (await sandbox.exec("rm full; python3 -c 'bytearray(1<<30)'")).code != 0
        hog = (
            "for i in 1 2 3 4; do python3 -c 'import time; b=bytearray(150<<20); time.sleep(30)' & done; wait; echo all"
        )
        assert (await sandbox.exec(hog)).code == 137
        late = await sandbox.exec("echo begun; sleep 60", timeout_s=1)
        assert late.timed_out and late.stdout == "begun\n"
        assert (await sandbox.exec("echo fine", check=True)).stdout == "fine\n"

    inside(body, processes=40, disk_bytes=20 << 20, memory_bytes=400 << 20)


def test_the_end_of_a_command_is_heard_when_it_comes() -> None:
    """Law: nothing waits for a tick; on a quiet machine a command that does nothing takes less than 10 ms."""

    async def body(sandbox: LocalSandbox) -> None:
        took_s = []
        for _ in range(10):
            began = time.perf_counter()
            await sandbox.exec("true", check=True)
            took_s.append(time.perf_counter() - began)
        assert min(took_s) < local_supervisor.TICK_S / 2, took_s

    inside(body)


CROWD = """
import socket
kept = [socket.create_connection(("127.0.0.1", {port}), 10) for _ in range({num})]
said = [one.recv(100) for one in kept]
print(sum(b"503" in words for words in said), sum(words == b"word" for words in said))
"""


def test_a_sandbox_has_so_many_connections_at_a_time() -> None:
    """Law: those above `MAX_CONNECTIONS` are told so and closed; the others work, and so do later ones."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        port, most, seen, free = server.getsockname()[1], local.MAX_CONNECTIONS, [], threading.Event()

        def serve() -> None:
            kept = [server.accept()[0] for _ in range(most)]
            free.wait(20)
            seen.append(len(os.listdir("/proc/self/fd")))
            for one in kept:
                one.sendall(b"word")
                one.close()
            server.accept()[0].sendall(b"word")

        thread = threading.Thread(target=serve, daemon=True)

        async def body(sandbox: LocalSandbox) -> None:
            before = len(os.listdir("/proc/self/fd"))
            thread.start()
            asyncio.get_running_loop().call_later(1.0, free.set)
            ended = await sandbox.exec(f"python3 -c '{CROWD.format(port=port, num=most + 40)}'", check=True)
            assert ended.stdout.split() == ["40", str(most)] and seen[0] - before < 4 * most
            assert "word" in (await sandbox.exec(ASK.format("127.0.0.1", port))).stdout

        inside(body, reach=("127.0.0.1", port))


def test_a_long_command_runs_once_for_its_key() -> None:
    async def body(sandbox: LocalSandbox) -> None:
        for _ in range(2):
            ended = await exec_and_wait(sandbox, "echo x >>count; cat count; exit 3", timeout_s=30, poll_s=0.1, key="a")
            assert (ended.code, ended.stdout) == (3, "x\n")
        late = await exec_and_wait(sandbox, "sleep 50", timeout_s=0.5, poll_s=0.1, key="b")
        assert (
            late.timed_out and "sleep 50" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
        )

    inside(body)


def marked(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes().decode(errors="replace").split("\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


def begun(mark: str) -> bool:
    """What `BEHIND` leaves is there; its shell may have ended before."""
    deadline = time.monotonic() + 60
    while len(marked(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(marked(mark)) == 2


BEHIND = "setsid sleep {0} </dev/null >/dev/null 2>&1 & sleep {0} & true"


def test_nothing_runs_after_the_end() -> None:
    async def body(sandbox: LocalSandbox) -> None:
        await sandbox.exec(BEHIND.format("7301"))
        assert begun("7301")

    inside(body)
    assert gone("7301")


def test_nothing_runs_after_the_parent_was_killed() -> None:
    program = (
        "import asyncio\nfrom slime.agent.sandbox.local import LocalSandbox\nasync def go():\n"
        f" async with LocalSandbox() as s:\n  await s.exec({BEHIND.format('7302')!r})\n"
        "  print('up', flush=True)\n  await asyncio.sleep(600)\nasyncio.run(go())"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n" and begun("7302")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone("7302")


WITHOUT_NAMESPACES = """
import ctypes, os, sys
from pathlib import Path
uid = os.getuid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0, "a user namespace"
Path("/proc/sys/user/max_user_namespaces").write_text("0")
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
"""What it starts has no right to leave a namespace, as in a container of the usual kind."""
UNCONFINED = """
import asyncio, json, logging, os
from slime.agent.sandbox import exec_and_wait, local
from slime.agent.sandbox.local import LocalSandbox
from slime.core.errors import Unconfined
logging.basicConfig(format="%(levelname)s %(message)s")

async def go():
    try:
        async with LocalSandbox():
            print("held")
    except Unconfined as refusal:
        print("refused" if "allow_unconfined" in str(refusal) else refusal)
    async with LocalSandbox(allow_unconfined=True, memory_bytes=400 << 20, disk_bytes=20 << 20) as sandbox:
        await sandbox.write_file("a/b", "text")
        print((await sandbox.exec("cat a/b; echo; pwd; echo $HOME; env | grep -c SESAME")).stdout.split())
        print(sandbox.folder, os.path.exists(sandbox.folder))
        late = await sandbox.exec("echo begun; sleep 7303", timeout_s=1)
        print(late.timed_out, late.stdout)
        print((await sandbox.exec("head -c 30m /dev/zero >full")).code != 0)
        hog = "python3 -c 'import time; b=bytearray(150<<20); time.sleep(30)' &"
        hog = f"for i in 1 2 3 4; do {hog} done; wait; echo all"
        print((await sandbox.exec(hog)).code)
        print((await exec_and_wait(sandbox, "echo fine", timeout_s=30, poll_s=0.1, key="a")).stdout)
        await sandbox.exec("setsid sleep 7303 </dev/null >/dev/null 2>&1 & sleep 7303 & true")
    print(os.path.exists(sandbox.folder))

asyncio.run(go())
"""


def test_what_nothing_holds_runs_only_where_that_is_allowed() -> None:
    """Law: it says so loudly, its bounds hold, and its processes and files end with it."""
    environment = {**os.environ, "SESAME": "a secret of the run", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, UNCONFINED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    said = done.stdout.split("\n")
    assert done.returncode == 0 and said[0] == "refused", done
    folder = said[2].split()[0]
    assert said[1] == str(["text", folder, folder, "0"]) and said[2].endswith("True"), done
    assert said[3:] == ["True begun", "", "True", "137", "fine", "", "False", ""], done
    assert "WARNING running agents UNCONFINED" in done.stderr and gone("7303"), done
