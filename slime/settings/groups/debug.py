"""Running half of the loop, and recorded rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DebugArgs:
    """Debugging aids."""

    debug_rollout_only: bool = False
    """Generate and grade; no trainer is started. With --num-rollout 0 and nothing to evaluate, engines and router serve
    until Ctrl-C."""
    debug_train_only: bool = False
    """Train; no engine is started. Needs --load-debug-rollout-data, or an SFT rollout function."""
    save_debug_rollout_data: str | None = None
    """Write every rollout here; {rollout_id} in the path is replaced, by eval_STEP_NAME for an evaluation."""
    save_debug_train_data: str | None = None
    """Write every batch for the trainer here, as numpy's .npz; {rollout_id} in the path is replaced."""
    dump_details: str | None = None
    """Folder for all of this: sets both --save-debug-... paths and gets the tokenizer."""
    load_debug_rollout_data: str | None = None
    """Replay rollouts written by --save-debug-rollout-data instead of generating; implies --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = None
    """Replay only this part of each rollout's groups, half from its head and half from its tail."""
