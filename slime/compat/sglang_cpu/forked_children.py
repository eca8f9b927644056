"""One import of SGLang for all processes of a server on a CPU.

SGLang starts its schedulers and its detokenizer as fresh interpreters, because CUDA does not survive a fork. Each
imports torch, transformers and SGLang again: eight seconds of a core, three times over, on a machine with few cores.
Here they are copies of the server's process, taken where SGLang has settled how to start them: everything is imported,
and nothing else has been done. Seen with SGLang 0.5.16; to be removed when it imports once for all. The launcher
refuses to serve if the hook did not take effect.

Invariants
1. A process is copied only while it has one thread: a lock that another thread holds would stay locked in the copy.
   Otherwise SGLang's own way is left in place; it is back once schedulers and detokenizer are started, and in them.
2. A copy ends with the process that it is a copy of.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

from slime.core.processes import die_with_parent

logger = logging.getLogger(__name__)

BEFORE = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""Where SGLang says how children are started, just before it starts them."""
BEHIND = "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses"
"""What starts the last of them."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy and SciPy each start threads with their libraries, which a server has no use for."""


def register() -> None:
    """Call before SGLang loads its plugins, which puts the hook in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(BEFORE, _fork_from_here, HookType.AFTER)
    HookRegistry.register(BEHIND, _spawn_from_here, HookType.AFTER)


def num_threads() -> int:
    """Threads of this process, of libraries too."""
    return len(os.listdir("/proc/self/task"))


def _fork_from_here(*_: Any, **__: Any) -> None:
    if num_threads() > 1:
        logger.warning("children of this server import everything again: it has %d threads already", num_threads())
        return
    original: list[int] = []  # what is about to be copied: a copy may run only after its original has ended

    def note() -> None:
        original[:] = [os.getpid()]

    def begin() -> None:
        die_with_parent(original[0])
        _spawn_from_here()

    os.register_at_fork(before=note, after_in_child=begin)
    multiprocessing.set_start_method("fork", force=True)


def _spawn_from_here(*_: Any, **__: Any) -> None:
    multiprocessing.set_start_method("spawn", force=True)
