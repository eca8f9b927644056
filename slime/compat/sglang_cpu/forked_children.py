"""Forks the children of a server on a CPU, so that all its processes share one import of SGLang.

SGLang starts its schedulers and its detokenizer as fresh interpreters, because CUDA does not survive a fork. Each child
imports torch, transformers and SGLang again, which takes eight seconds of a core for each of three children. On a CPU
these hooks make SGLang fork the server's process instead, at the moment when SGLang starts its children: by then
everything is imported, and nothing else has happened. Seen with SGLang 0.5.16. Remove the hooks when SGLang imports
only once. The launcher refuses to serve if the hooks had no effect.

Invariants
1. A process forks only while it has one thread, because a lock that another thread holds would stay locked in the fork.
   With more threads, SGLang spawns its children as usual. After the children have started, new children of the server
   and of its children are also spawned.
2. A fork exits together with the process from which it was forked.
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
"""Keeps the libraries of NumPy and SciPy from starting threads, which a server does not use."""


def num_threads() -> int:
    """Returns the number of threads of this process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def _fork_from_here(*_: Any, **__: Any) -> None:
    if num_threads() > 1:
        logger.warning(
            "children of this server import everything again, because the server has %d threads", num_threads()
        )
        return
    original: list[int] = []  # set before the fork, because the original may end before the fork runs

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
