"""Children of a CPU server are copies of it while it has one thread, and end with it.

Each case runs in an interpreter of its own, because the hook changes the process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

START = (
    "import multiprocessing, os, threading, time\n"
    "from slime.compat.sglang_cpu import forked_children\n"
    "multiprocessing.set_start_method('spawn', force=True)\n"
)
LATE = """
server = os.getpid()
def wait_for_its_end():
    while os.getppid() == server: time.sleep(0.01)
os.register_at_fork(after_in_child=wait_for_its_end)
"""
"""A copy that begins only when the server has ended."""
SERVER = """
forked_children._fork_from_here()
multiprocessing.Process(target=time.sleep, args=(600,)).start()
os._exit(1)
"""


def run(code: str, *, warning: str = "") -> str:
    """What the code prints; it says `warning` on stderr, or nothing."""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == warning, done.stderr
    return done.stdout.strip()


def test_a_process_with_one_thread_is_copied() -> None:
    assert run("forked_children._fork_from_here(); print(multiprocessing.get_start_method())") == "fork"


def test_a_process_with_two_threads_is_never_copied() -> None:
    two = "go = threading.Event(); threading.Thread(target=go.wait).start()\n"
    asked = "forked_children._fork_from_here(); print(multiprocessing.get_start_method()); go.set()"
    warning = "cannot fork the server's children, because the server has 2 threads; spawning them"
    assert run(two + asked, warning=warning) == "spawn"


def test_a_copy_starts_children_of_its_own_afresh() -> None:
    asked = "p = multiprocessing.Process(target=lambda: print(multiprocessing.get_start_method(), flush=True))\n"
    assert run(f"forked_children._fork_from_here()\n{asked}p.start(); p.join()") == "spawn"


@pytest.mark.parametrize("begins", ["", LATE], ids=["early", "late"])
def test_a_copy_ends_with_the_process_that_it_is_a_copy_of(begins: str) -> None:
    run(begins + SERVER)  # returns when nobody holds the pipes any more, the copy included
