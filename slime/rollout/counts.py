"""What a group loop counts between two batches."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from slime.buffer.groups import Held


@dataclass(slots=True)
class StepCounts:
    """Counters of groups, from zero; a new record for each batch."""

    filtered: Counter[str] = field(default_factory=Counter)
    """Reason -> groups that the dynamic filter dropped."""
    failed: Counter[str] = field(default_factory=Counter)
    """Kind of failure -> groups given up."""
    retried: Counter[str] = field(default_factory=Counter)
    """Kind of failure -> tries that are followed by another."""
    num_surplus: int = 0
    """Finished after the batch was full."""
    num_aborted: int = 0
    """Interrupted on purpose."""
    num_reset: int = 0
    """Begun by an earlier step, and started over."""
    num_quarantined: int = 0
    """Without an answer, and kept from the buffer."""
    dropped: list[Held] = field(default_factory=list)
    """What the dynamic filter dropped; kept for `--rollout-all-samples-process-path` only."""
    idle_s: float = 0.0
    """Time in which no group ran."""
    started: float = field(default_factory=time.monotonic)

    def metrics(self) -> dict[str, float]:
        """The counters under the names of the log."""
        counts: dict[str, float] = {}
        counts |= {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.filtered.items()}
        counts |= {f"rollout/failed/{kind}": count for kind, count in self.failed.items()}
        counts |= {f"rollout/retried/{kind}": count for kind, count in self.retried.items()}
        counts |= {
            "rollout/num_filtered_groups": self.filtered.total(),
            "rollout/num_failed_groups": self.failed.total(),
            "rollout/num_retried_groups": self.retried.total(),
            "rollout/num_quarantined_groups": self.num_quarantined,
            "rollout/num_unscored_groups": sum(n for kind, n in self.retried.items() if kind.startswith("unscored")),
            "rollout/num_surplus_groups": self.num_surplus,
            "rollout/num_aborted_groups": self.num_aborted,
            "rollout/num_reset_groups": self.num_reset,
            "perf/rollout_time": time.monotonic() - self.started,
        }
        return {name: float(value) for name, value in counts.items()}
