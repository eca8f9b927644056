"""Estimators of KL(policy || reference) from one sampled token each (Schulman 2020, "Approximating KL divergence").

With d = log policy - log reference, one file per estimator: derive from `KLEstimator`, say what it makes of d, and
register it. A user's own is named by its path: `--kl-loss-type my_pkg.mine`.

With `old_log_probs` the estimate is multiplied by the ratio policy / old, through which the gradient flows, too
(DeepSeek-V3.2, arXiv:2512.02556): value and gradient are then unbiased for tokens sampled from the old policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio
from slime.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args


class KLEstimator(ABC):
    """A number per token whose mean over samples of the policy is the KL, exactly or nearly."""

    name: ClassVar[str]

    @abstractmethod
    def of_log_ratio(self, d: Tensor) -> Tensor:
        """The estimate [R] from d = log policy - log reference [R], differentiable; 0 for d = 0."""

    def estimate(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        log_ratio_limit: float = LOG_RATIO_LIMIT,
    ) -> Tensor:
        """Estimate [R], zero where masked, differentiable in `log_probs`."""
        d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)
        estimate = self.of_log_ratio(d)
        if old_log_probs is None:
            return estimate
        log_ratio, _ = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
        return self.held(estimate * log_ratio.exp())

    def held(self, product: Tensor) -> Tensor:
        """The product of estimate and ratio [R], within the bounds of the estimator: by default it has none."""
        return product

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator", flag="--kl-loss-type", package="slime.algorithms.kl", contract=KLEstimator
)
