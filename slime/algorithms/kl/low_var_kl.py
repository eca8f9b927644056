"""low_var_kl: k3 clamped to +-10, with the ratio too where it is multiplied by one: no token dominates the penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.kl import KL_ESTIMATORS
from slime.algorithms.kl.k3 import K3

if TYPE_CHECKING:
    from torch import Tensor

LOW_VAR_LIMIT = 10.0


@KL_ESTIMATORS.register("low_var_kl")
@dataclass(frozen=True, kw_only=True)
class LowVarianceKL(K3):
    """k3 inside of the clamp; zero gradient outside."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return super().of_log_ratio(d).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)

    def held(self, product: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return product.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
