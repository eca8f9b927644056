"""What the runs of the end-to-end tests are held against finds what is open, and the documents say the same."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from slime.serving.child_process import shm_inodes_of
from tests.support.openness import (
    NOBODY,
    ROUTES,
    WITHOUT_KEY,
    Openness,
    as_nobody,
    keys_in,
    listening,
    open_to_others,
)

DOCS = Path(__file__).parents[3] / "docs"


def tcp(address: str, family: int = socket.AF_INET) -> socket.socket:
    return socket.create_server((address, 0), family=family)


def unix(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen()
    return server


def udp() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("0.0.0.0", 0))
    return server


def looked_at(pid: int) -> set[str]:
    """Complaints of one look at a process."""
    seen = Openness()
    seen.look("no-such-run", {pid: "a process"}, shm_inodes_of(pid))
    return seen.complaints


OPEN: dict[str, tuple[Callable[[], socket.socket], str]] = {
    "every interface": (lambda: tcp("0.0.0.0"), "other hosts reach it"),
    "every interface of IPv6": (lambda: tcp("::", socket.AF_INET6), "other hosts reach it"),
    "datagrams": (udp, "other hosts reach it"),
    "a name without a file": (lambda: unix(f"\0slime-test-{os.getpid()}"), "everybody on this host"),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_socket_that_others_reach_is_found(name: str) -> None:
    make, said = OPEN[name]
    before = looked_at(os.getpid())
    with closing(make()):
        assert any(said in complaint for complaint in looked_at(os.getpid()) - before)


def test_an_address_is_read_as_it_is() -> None:
    with closing(tcp("127.0.0.1")) as four, closing(tcp("::1", socket.AF_INET6)) as six:
        found = {(where.kind, where.address, where.port) for where in listening().values()}
        assert {("tcp", "127.0.0.1", four.getsockname()[1]), ("tcp6", "::1", six.getsockname()[1])} <= found


@pytest.fixture
def server() -> Iterator[int]:
    """Answers one route to anybody."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 401)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    own = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=own.serve_forever, args=(0.01,), daemon=True).start()
    yield own.server_address[1]
    own.shutdown()
    own.server_close()


def test_a_route_that_answers_anybody_is_found(server: int) -> None:
    (told,) = [complaint for complaint in looked_at(os.getpid()) if f":{server} " in complaint]
    assert told.endswith("without a key it answers ['/server_info']")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_what_another_user_gets_at_is_found() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        with closing(unix(str(folder / "socket"))):
            (folder / "socket").chmod(0o777)
            folder.chmod(0o755)
            assert any(f"connect to {folder}/socket" in complaint for complaint in looked_at(os.getpid()))
            folder.chmod(0o700)
            assert not any(f"connect to {folder}/socket" in complaint for complaint in looked_at(os.getpid()))
    with subprocess.Popen(["sleep", "60"], user=NOBODY, group=NOBODY) as theirs:
        assert any("read the environment" in complaint for complaint in looked_at(theirs.pid))
        theirs.kill()
    assert as_nobody(lambda: [str(os.getuid())]) == [str(NOBODY)]


@pytest.mark.parametrize("folder", ["/dev/shm", tempfile.gettempdir()])
def test_an_open_file_that_others_may_read_is_found(folder: str) -> None:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        assert not any(file.name in complaint for complaint in looked_at(os.getpid()))
        os.chmod(file.name, 0o604)
        assert any(f"others may use {file.name}" in complaint for complaint in looked_at(os.getpid()))


def test_modes_and_keys_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "samples.jsonl").write_text("a prompt, a-key")
    assert open_to_others(run) == [], "what is below a closed folder is closed"
    run.chmod(0o711)
    (run / "samples.jsonl").chmod(0o604)
    assert [text.partition(" ")[0] for text in open_to_others(run)] == [str(run / "samples.jsonl")]
    assert keys_in(run, [b"a-key"]) == [str(run / "samples.jsonl")] and keys_in(run, [b"another"]) == []
    assert keys_in(run, [b"a-key"], but=["samples.jsonl"]) == []


def test_the_documents_say_what_answers_without_a_key() -> None:
    """Law: docs/multi_node.md and the list that runs are held against name the same routes."""
    section = (DOCS / "multi_node.md").read_text().partition("### Without a key")[2].partition("\n### ")[0]
    told = set(re.findall(r"`(/\w[\w/]*)`", section))
    listed = {route for routes in WITHOUT_KEY.values() if routes != ROUTES for route in routes}
    assert told - {"/metrics"} == listed, "an engine tells its metrics with a flag alone"
