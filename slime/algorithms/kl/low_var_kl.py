"""low_var_kl: k3, or its product with the ratio, clamped to +-10: no token dominates the penalty."""

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

    def bounded(self, values: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return values.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
