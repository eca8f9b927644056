"""Laws of shared memory of processes that are killed: whoever reads or writes it, nothing of it stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.serving import payloads
from slime.serving.child_process import ChildProcess
from slime.serving.payloads import serialize_bucket, shareable

HOLDS = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_child_that_is_killed_as_soon_as_it_is_ready_leaves_no_file(tmp_path: Path) -> None:
    file = Path(f"/dev/shm/psm_{os.getpid():x}_killed")
    child = ChildProcess("engine x", [sys.executable, "-c", HOLDS, str(file)], log_path=tmp_path / "log")
    child.start()
    try:
        child.wait_until(lambda: "ready\n" in f"{child.log_tail()}\n", what="it holds its file", timeout_s=60)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.stop()
    assert not file.exists()


def files_of_buckets() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def test_a_bucket_whose_receiver_never_read_it_leaves_no_file_behind_the_next() -> None:
    before = files_of_buckets()
    payloads, owner = serialize_bucket([("a", torch.ones(3)), ("b", torch.ones(2, dtype=torch.bfloat16))], 2)
    made = files_of_buckets() - before
    assert len(payloads) == 2 and len(made) == 1
    del owner
    gc.collect()
    _, other = serialize_bucket([("a", torch.zeros(3))], 1)
    assert other is not None and not made & files_of_buckets()


def test_a_bucket_in_memory_that_can_be_shared_is_not_copied() -> None:
    memory = shareable(20, torch.device("cpu"))
    tensors = [("a", memory[:12].view(torch.float32)), ("b", memory[12:16].view(torch.bfloat16))]
    before = files_of_buckets()
    _, owner = serialize_bucket(tensors, 1)
    assert isinstance(owner, torch.Tensor) and owner.data_ptr() == memory.data_ptr() and files_of_buckets() == before
    _, apart = serialize_bucket(list(reversed(tensors)), 1)
    assert isinstance(apart, torch.Tensor) and apart.data_ptr() != memory.data_ptr(), "they do not lie in this order"


READS = """
import base64, pickle, sys, torch
got = pickle.loads(base64.b64decode(sys.stdin.read()))["flattened_tensor"]
print(int(got.sum()))
del got
"""


@pytest.mark.slow
def test_a_bucket_whose_receiver_read_it_is_let_go_without_harm() -> None:
    """Torch removes the file itself then, and does not stand to find it gone: the sender would be ended."""
    before = files_of_buckets()
    payloads, owner = serialize_bucket([("a", torch.ones(5, dtype=torch.uint8))], 1)
    made = files_of_buckets() - before
    assert len(made) == 1
    read = subprocess.run([sys.executable, "-c", READS], input=payloads[0], capture_output=True, text=True, check=True)
    assert read.stdout == "5\n"
    del owner
    gc.collect()
    assert not made & files_of_buckets()
    _, other = serialize_bucket([("a", torch.zeros(3))], 1)
    assert other is not None


class SeenFirstByAnotherThread:
    """A freed buffer whose file another thread removes while this one looks."""

    def expired(self) -> bool:
        payloads._born["born_meanwhile"] = Kept()
        payloads._born.pop("freed", None)
        return True


class Kept:
    def expired(self) -> bool:
        return False


def test_two_threads_may_look_for_freed_buffers_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: no sync fails because two of its threads found the same freed buffer."""
    monkeypatch.setattr(payloads, "SHM", str(tmp_path))
    monkeypatch.setattr(payloads, "_born", {"freed": SeenFirstByAnotherThread()})
    (tmp_path / "freed").touch()
    payloads._remove_abandoned()
    assert set(payloads._born) == {"born_meanwhile"}
