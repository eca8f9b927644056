"""The fleet: how engines are watched, and what becomes of one that fails."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import opt


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Faults of engines."""

    use_fault_tolerance: bool = True
    """An engine that ends or hangs is started again, gets the current weights, verified, and serves again, while the
    run goes on with the others. --no-use-fault-tolerance: the run ends."""
    rollout_health_check_interval: float = opt(5.0, gt=0)
    """Seconds between two questions to an engine's scheduler. Its processes are looked at every second."""
    rollout_health_check_timeout: float = opt(30.0, gt=0)
    """Seconds for which a scheduler may be silent before its engine counts as hung."""
    rollout_health_check_first_wait: float = opt(0.0, ge=0)
    """Seconds before the first question to an engine that has just started."""
