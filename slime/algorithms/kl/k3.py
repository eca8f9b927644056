"""k3 = exp(-d) - 1 + d: unbiased and never negative; its gradient is biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.kl import KL_ESTIMATORS, KLEstimator

if TYPE_CHECKING:
    from torch import Tensor


@KL_ESTIMATORS.register("k3")
@dataclass(frozen=True, kw_only=True)
class K3(KLEstimator):
    """The log-ratio with a control variate."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return (-d).expm1() + d
