"""Unix sockets have short paths wherever temporary files go, or a folder that is too long is refused by name."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.core import processes
from slime.core.errors import ConfigError
from slime.core.processes import (
    OF_LIBRARIES,
    OF_RAY,
    RUN_ID_ENV,
    SHORT_ROOM,
    SOCKET_PATH_BYTES,
    longest_room,
    new_run_id,
    ray_folder,
    socket_room,
)
from slime.serving.child_process import ChildProcess


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with as long a path as libraries allow. pytest's own may be longer."""
    tmp_path_factory.getbasetemp()  # it stays where it is
    with tempfile.TemporaryDirectory(dir=SHORT_ROOM) as room:
        folder = Path(room, "t" * (longest_room(OF_LIBRARIES) - len(room) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        yield folder


def bind(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_the_longest_room_is_the_kernels(temporary: Path) -> None:
    bind(temporary / OF_LIBRARIES)
    with pytest.raises(OSError, match="too long"):
        bind(temporary / f"{OF_LIBRARIES}x")


def test_the_temporary_folder_is_used_where_sockets_fit(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_room(OF_LIBRARIES) == str(temporary)
    assert socket_room(f"{OF_LIBRARIES}x") == SHORT_ROOM
    monkeypatch.setattr(processes, "SHORT_ROOM", "/proc/nothing")
    with pytest.raises(ConfigError, match=rf"TMPDIR {temporary} of 73 characters.*folder whose path is at most 72"):
        socket_room(f"{OF_LIBRARIES}x")


def test_rays_sockets_fit_and_its_own_variable_decides(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ray_folder(new_run_id())
    assert found.parent == Path(SHORT_ROOM) and len(str(found / OF_RAY)) <= SOCKET_PATH_BYTES
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/ray")
    assert ray_folder(new_run_id()).parent == Path("/scratch/ray")
    monkeypatch.setenv("RAY_TMPDIR", str(temporary))
    with pytest.raises(ConfigError, match=rf"RAY_TMPDIR {temporary} of 73 characters.*at most \d+ characters"):
        ray_folder(new_run_id())


def test_what_a_child_imports_may_have_sockets(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines do, in the temporary folder that they find."""
    monkeypatch.setenv(RUN_ID_ENV, new_run_id())
    code = (
        "import os, socket, tempfile\n"
        "folder = tempfile.mkdtemp(prefix='torch-shm-dir-')[:-2]\n"
        "os.mkdir(folder)\n"
        "socket.socket(socket.AF_UNIX).bind(f'{folder}/manager.sock')\n"
    )
    child = ChildProcess("engine x", [sys.executable, "-c", code], log_path=tmp_path / "log")
    child.start()
    try:
        while child.returncode is None:
            time.sleep(0.02)
    finally:
        child.stop()
    assert child.returncode == 0, child.log_tail()
    assert os.listdir(temporary) == []
