"""Estimators of KL(policy || reference) from one sampled token each (Schulman 2020, "Approximating KL divergence").

With d = log policy - log reference, one file per estimator: derive from `KLEstimator`, say what it makes of d, and
register it. A user's own is named by its path: `--kl-loss-type my_pkg.mine`.

With `old_log_probs` the estimate is multiplied by the ratio policy / old, through which the gradient flows, too
(DeepSeek-V3.2, arXiv:2512.02556): value and gradient are then unbiased for tokens sampled from the old policy.

Bounds act on what is minimised: on the estimate, or on its product with the ratio, of which the estimate is a factor
whose slope the bound may not take alone: k3 held at 10, times a ratio that rises, would push the policy away. A token
where any bound acts has no gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio
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
        import torch

        if old_log_probs is None:
            d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)
            return self.bounded(self.of_log_ratio(d))
        # The slopes of k3 and of the ratio are both as large as exp(-d), and their sum is d: float32 would leave of it
        # the rounding of the two, of either sign.
        policy = log_probs.double()
        d, limited = clamped_log_ratio(policy, ref_log_probs.detach(), mask, log_ratio_limit)
        log_ratio, ratio_limited = clamped_log_ratio(policy, old_log_probs.detach(), mask, log_ratio_limit)
        product = self.bounded(self.of_log_ratio(d) * log_ratio.exp())
        return torch.where(limited | ratio_limited, product.detach(), product).to(log_probs.dtype)

    def bounded(self, values: Tensor) -> Tensor:
        """Estimates [R], times the ratio if they are multiplied by one, within the bounds of the estimator: by default
        it has none. Zero gradient where a bound acts.
        """
        return values

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator", flag="--kl-loss-type", package="slime.algorithms.kl", contract=KLEstimator
)

# k1 = d: unbiased, of high variance. As a loss its expected gradient is zero, whatever the distance.


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


# k2 = d^2 / 2: biased; its gradient on policy is that of the KL.


@KL_ESTIMATORS.register("k2")
@dataclass(frozen=True, kw_only=True)
class K2(KLEstimator):
    """Half the squared log-ratio."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return d.square() / 2


# k3 = exp(-d) - 1 + d: unbiased and never negative; its gradient is biased.


@KL_ESTIMATORS.register("k3")
@dataclass(frozen=True, kw_only=True)
class K3(KLEstimator):
    """The log-ratio with a control variate."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return (-d).expm1() + d


# low_var_kl: k3, or its product with the ratio, clamped to +-10: no token dominates the penalty.

LOW_VAR_LIMIT = 10.0


@KL_ESTIMATORS.register("low_var_kl")
@dataclass(frozen=True, kw_only=True)
class LowVarianceKL(K3):
    """k3 inside of the clamp; zero gradient outside."""

    def bounded(self, values: Tensor) -> Tensor:
        """See `KLEstimator`."""
        return values.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
