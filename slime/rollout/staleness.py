"""How old the tokens of a batch are, and the bound on it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from slime.core.errors import LedgerError
from slime.core.ports import WeightVersion
from slime.core.sample import NOT_SAMPLED, Sample


def staleness(groups: Sequence[Sequence[Sample]], *, now: WeightVersion, limit: int | None) -> dict[str, float]:
    """How many versions older than the trainer's weights, `now`, each sampled token is; nothing without such tokens.

    Raises `LedgerError` beyond the limit.
    """
    ages = [now - v for group in groups for s in group for v in s.token_versions or () if v != NOT_SAMPLED]
    if not ages:
        return {}
    if limit is not None and max(ages) > limit:
        raise LedgerError(
            f"got a token {max(ages)} versions older than the weights to be trained, because the rollout function "
            f"returned it; do: leave out what is older than --max-weight-staleness {limit}, or raise it"
        )
    return {"rollout/staleness/mean": statistics.fmean(ages), "rollout/staleness/max": float(max(ages))}
