"""What a starting engine is doing, by the lines that SGLang writes into its log (0.5.16).

Without these lines the phase stays the last one that was seen.
"""

from __future__ import annotations

from slime.compat.sglang_memory_gate import WAITING

IMPORTING = "importing SGLang"
PHASES = (
    ("Load weight end", "taking memory for its cache"),
    ("Load weight begin", "loading weights"),
    ("Init torch distributed begin", "building the model"),
    (WAITING, "waiting for the trainer to lend the GPU"),
    ("server_args=", IMPORTING + " in its scheduler"),
)
"""(sign in the log, what follows it), the last one first."""


def engine_phase(log: str) -> str:
    """What the engine that wrote `log` is doing."""
    return next((phase for sign, phase in PHASES if sign in log), IMPORTING)
