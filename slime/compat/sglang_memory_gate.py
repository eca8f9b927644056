"""Lets an engine take GPU memory only when it may: what a colocated start needs.

SGLang 0.5.16 sizes its cache by the memory that is free when a rank begins, and again when it has loaded its weights.
A trainer that is being built on the same GPU meanwhile would be taken for memory that is not there, in one of the two
or in both, as it happens. So the first of the two waits, with everything imported, until the trainer lends its memory:
`register` puts a wait for a file in front of it, through SGLang's own plugin registry.

To be removed when SGLang takes the size of its pool as a number, or measures when it is asked to. If the hook were
missing, the server would not start (`slime.serving.launch`), and without it a pool would be too small, not wrong.

Invariants
1. Without `GATE_ENV` in the environment nothing is registered.
2. Who waits ends with the process that started it (`slime.core.processes`), so the wait needs no limit of its own.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GATE_ENV = "SLIME_ENGINE_GATE"
"""Names the file whose existence opens the gate."""
FIRST_LOOK = "sglang.srt.model_executor.model_runner.ModelRunner.init_torch_distributed"
WAITING = "waits for the trainer to lend the GPU"
"""In the log, for who reads what an engine is doing."""
POLL_S = 0.02


def register() -> None:
    """Call before SGLang's scheduler loads its plugins."""
    if GATE_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FIRST_LOOK, wait, HookType.BEFORE)


def wait(*_given: Any, **_named: Any) -> None:
    """Before a rank looks at its memory."""
    gate = Path(os.environ[GATE_ENV])
    if gate.exists():
        return
    logger.info("this rank %s", WAITING)
    while not gate.exists():
        time.sleep(POLL_S)
