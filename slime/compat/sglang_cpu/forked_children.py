"""Forks a CPU server's child processes, so that SGLang is imported only once.

SGLang starts its schedulers and detokenizer as new interpreters, because CUDA does not survive a fork. Each of the
three children imports torch, transformers and SGLang again, which takes eight seconds of CPU time. On a CPU, these
hooks make SGLang fork the server process instead. When SGLang starts its children, everything has been imported and
nothing else has happened yet. Seen with SGLang 0.5.16. Remove the hooks when SGLang imports only once. The launcher
refuses to start the server if the hooks had no effect.

Invariants
1. A process forks only while it is single-threaded, because a lock held by another thread would stay locked in the
   fork. With more threads, SGLang spawns its children as usual. After startup, new children of the server and of its
   children are spawned as well.
2. A forked process exits when its parent exits.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

from slime.compat import Hook
from slime.core.processes import die_with_parent

logger = logging.getLogger(__name__)

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps the libraries of NumPy and SciPy from starting threads, which a server does not need."""


def num_threads() -> int:
    """Returns the number of threads in this process, including library threads."""
    return len(os.listdir("/proc/self/task"))


def _fork_from_here(*_: Any, **__: Any) -> None:
    if num_threads() > 1:
        logger.warning(
            "cannot fork the server's children, because the server has %d threads; spawning them", num_threads()
        )
        return
    original: list[int] = []  # set before the fork, because the parent may exit before the child runs

    def note() -> None:
        original[:] = [os.getpid()]

    def begin() -> None:
        die_with_parent(original[0])
        _spawn_from_here()

    os.register_at_fork(before=note, after_in_child=begin)
    multiprocessing.set_start_method("fork", force=True)


def _spawn_from_here(*_: Any, **__: Any) -> None:
    multiprocessing.set_start_method("spawn", force=True)


_ENGINE = "sglang.srt.entrypoints.engine"
HOOKS = (
    Hook("AFTER", f"{_ENGINE}._set_envs_and_config", _fork_from_here),  # runs just before the children start
    Hook("AFTER", f"{_ENGINE}.Engine._launch_detokenizer_subprocesses", _spawn_from_here),  # starts the last child
)
