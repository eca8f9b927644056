"""k1 = d: unbiased, of high variance. As a loss its expected gradient is zero, whatever the distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.kl import KL_ESTIMATORS, KLEstimator

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args


@KL_ESTIMATORS.register("k1")
@dataclass(frozen=True, kw_only=True)
class K1(KLEstimator):
    """The log-ratio itself."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return d

    def check(self, args: Args) -> str | None:
        """A loss that holds nothing is refused."""
        if not (args.use_kl_loss and args.kl_loss_coef) or args.use_unbiased_kl:
            return None
        return (
            f"got kl_loss_type k1 with kl_loss_coef {args.kl_loss_coef}, because as a loss its expected gradient is "
            "zero, so nothing pulls the policy to the reference; use another, or add --use-unbiased-kl"
        )
