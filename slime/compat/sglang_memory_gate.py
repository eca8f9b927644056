"""Makes a colocated engine wait during startup until the trainer lends it the GPU's memory.

SGLang 0.5.16 sizes its cache by the free memory, which each rank measures at startup and again after loading weights. A
trainer that is starting on the same GPU would distort these measurements. So each rank finishes its imports and then,
before the first measurement, waits for a file that is created when the trainer lends its memory.

Remove the hook when SGLang accepts an explicit cache size or can measure on request. Without it, the cache would be
too small, but the engine would still work.

Invariants
1. The hook is registered only if `GATE_ENV` is set in the environment.
2. A waiting rank exits with its parent process (`slime.core.processes`), so the wait needs no timeout.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from slime.compat import Hook

logger = logging.getLogger(__name__)

GATE_ENV = "SLIME_ENGINE_GATE"
"""Environment variable with the path of the file that opens the gate."""
WAITING = "waits for the trainer to lend the GPU"
"""Log text that `engine_phase` looks for."""
POLL_S = 0.02


def wait(*_given: Any, **_named: Any) -> None:
    """Waits until the gate is open. Runs before a rank first measures its free memory."""
    gate = Path(os.environ[GATE_ENV])
    if gate.exists():
        return
    logger.info("this rank %s", WAITING)
    while not gate.exists():
        time.sleep(POLL_S)


HOOKS = (Hook("BEFORE", "sglang.srt.model_executor.model_runner.ModelRunner.init_torch_distributed", wait),)
