"""Running half of the loop, and recorded rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DebugArgs:
    """Debugging aids."""

    debug_rollout_only: bool = False
    """Generate and grade; no trainer is started."""
    debug_train_only: bool = False
    """Train; no engine is started. Needs --load-debug-rollout-data, or an SFT rollout function."""
    save_debug_rollout_data: str | None = None
    """Write every rollout here; {rollout_id} in the path is replaced."""
    load_debug_rollout_data: str | None = None
    """Replay rollouts written by --save-debug-rollout-data instead of generating; implies --debug-train-only."""
