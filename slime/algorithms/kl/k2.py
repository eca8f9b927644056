"""k2 = d^2 / 2: biased; its gradient on policy is that of the KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.kl import KL_ESTIMATORS, KLEstimator

if TYPE_CHECKING:
    from torch import Tensor


@KL_ESTIMATORS.register("k2")
@dataclass(frozen=True, kw_only=True)
class K2(KLEstimator):
    """Half the squared log-ratio."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return d.square() / 2
