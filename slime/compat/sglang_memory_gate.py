"""Makes an engine of a colocated start wait for its GPU memory.

SGLang 0.5.16 sizes its cache by the free memory, measured when a rank begins and again after it loaded its weights. A
trainer that is being built on the same GPU would distort one measurement or both. So each rank first imports everything
and then waits for a file, before the first measurement, until the trainer lends its memory.

Remove it when SGLang takes the size of its pool as a number, or measures on request. Without the hook a pool would be
too small, but not wrong.

Invariants
1. Without `GATE_ENV` in the environment nothing is registered.
2. A waiting rank ends with the process that started it (`slime.core.processes`), so the wait needs no limit.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GATE_ENV = "SLIME_ENGINE_GATE"
"""Path of the file that opens the gate."""
WAITING = "waits for the trainer to lend the GPU"
"""In the log; `engine_phase` reads it."""
POLL_S = 0.02


def wait(*_given: Any, **_named: Any) -> None:
    """Runs before a rank measures its memory."""
    gate = Path(os.environ[GATE_ENV])
    if gate.exists():
        return
    logger.info("this rank %s", WAITING)
    while not gate.exists():
        time.sleep(POLL_S)


HOOKS = (("BEFORE", "sglang.srt.model_executor.model_runner.ModelRunner.init_torch_distributed", wait),)
