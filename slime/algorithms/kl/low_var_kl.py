"""low_var_kl: k3 clamped to +-10, so that one token cannot dominate the penalty.

Multiplied by the ratio of the update, the product has the same bound: the ratio alone may be e^20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.kl import KL_ESTIMATORS
from slime.algorithms.kl.k3 import K3
from slime.algorithms.log_ratio import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

LOW_VAR_LIMIT = 10.0


@KL_ESTIMATORS.register("low_var_kl")
@dataclass(frozen=True, kw_only=True)
class LowVarianceKL(K3):
    """k3 inside of the clamp; zero gradient outside."""

    def estimate(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        log_ratio_limit: float = LOG_RATIO_LIMIT,
    ) -> Tensor:
        """See `KLEstimator`."""
        made = super().estimate(
            log_probs, ref_log_probs, mask, old_log_probs=old_log_probs, log_ratio_limit=log_ratio_limit
        )
        return made.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return super().of_log_ratio(d).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
