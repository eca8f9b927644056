"""How old the tokens of a batch are, and the bound on it."""

from __future__ import annotations

from collections.abc import Sequence

from slime.core.errors import LedgerError
from slime.core.ports import WeightVersion
from slime.core.sample import NOT_SAMPLED, Sample


def staleness(groups: Sequence[Sequence[Sample]], *, now: WeightVersion, limit: int | None) -> dict[str, float]:
    """How many versions older than the trainer's weights, `now`, each sampled token is, and how many have passed since
    the work on its group began, tools and environments included; nothing without sampled tokens.

    Raises `LedgerError` beyond the limit.
    """
    columns = [column for group in groups for s in group if (column := s.column("token_versions")) is not None]
    sampled = [column[column != NOT_SAMPLED] for column in columns]
    num = sum(map(len, sampled))
    if not num:
        return {}
    oldest = now - min(int(versions.min()) for versions in sampled if len(versions))
    if limit is not None and oldest > limit:
        raise LedgerError(
            f"got a token {oldest} versions older than the weights to be trained, because the rollout function "
            f"returned it; do: leave out what is older than --max-weight-staleness {limit}, or raise it"
        )
    waited = [now - s.started_version for group in groups for s in group if s.started_version is not None]
    mean = now - sum(int(versions.sum(dtype="int64")) for versions in sampled) / num
    since_start = {"rollout/staleness/since_start/max": float(max(waited))} if waited else {}
    return {"rollout/staleness/mean": mean, "rollout/staleness/max": float(oldest), **since_start}
