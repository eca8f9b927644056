"""Per-token estimators of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

Every estimator is a function of d = log policy - log reference. To add one, derive from `KLEstimator`, define
`of_log_ratio`, and register it. A user's own is selected by its path: `--kl-loss-type my_pkg.mine`.

With `old_log_probs` the estimate is multiplied by the ratio policy / old, and the gradient flows through the ratio as
well (DeepSeek-V3.2, arXiv:2512.02556). Value and gradient are then unbiased for tokens sampled from the old policy.

Bounds apply to the minimised quantity: the estimate, or its product with the ratio. Bounding only the estimate inside
the product would be wrong: with k3 clamped to 10, the gradient of the ratio alone would push the policy away. A token
at which a bound acts has no gradient.
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
    """A per-token estimate of the KL. Its mean over tokens sampled from the policy is the KL, exactly or nearly."""

    name: ClassVar[str]

    @abstractmethod
    def of_log_ratio(self, d: Tensor) -> Tensor:
        """[R] the estimate for d = log policy - log reference [R]; differentiable, 0 for d = 0."""

    def estimate(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        log_ratio_limit: float = LOG_RATIO_LIMIT,
    ) -> Tensor:
        """[R] the estimate, zero where masked; differentiable in `log_probs`."""
        import torch

        if old_log_probs is None:
            d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)
            return self.bounded(self.of_log_ratio(d))
        # The slopes of k3 and of the ratio are both as large as exp(-d), but their sum is only d. In float32 their
        # rounding errors would swamp the sum.
        policy = log_probs.double()
        d, limited = clamped_log_ratio(policy, ref_log_probs.detach(), mask, log_ratio_limit)
        log_ratio, ratio_limited = clamped_log_ratio(policy, old_log_probs.detach(), mask, log_ratio_limit)
        product = self.bounded(self.of_log_ratio(d) * log_ratio.exp())
        return torch.where(limited | ratio_limited, product.detach(), product).to(log_probs.dtype)

    def bounded(self, values: Tensor) -> Tensor:
        """[R] `values` (the estimates, or their products with the ratio) within the estimator's bounds.

        The gradient is zero where a bound acts. By default there are no bounds.
        """
        return values

    def check(self, args: Args) -> str | None:
        """Why the settings cannot work together, checked before the start; None if they can."""
        return None


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator", flag="--kl-loss-type", package="slime.algorithms.kl", contract=KLEstimator
)

# k1 = d: unbiased, with high variance. As a loss its expected gradient is always zero.


@KL_ESTIMATORS.register("k1")
@dataclass(frozen=True, kw_only=True)
class K1(KLEstimator):
    """The log-ratio itself."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return d

    def check(self, args: Args) -> str | None:
        """Refuses k1 as a loss, where it would have no effect."""
        if not (args.use_kl_loss and args.kl_loss_coef) or args.use_unbiased_kl:
            return None
        return (
            f"got kl_loss_type k1 with kl_loss_coef {args.kl_loss_coef}, because as a loss its expected gradient is "
            "zero, so nothing pulls the policy to the reference; use another, or add --use-unbiased-kl"
        )


# k2 = d^2 / 2: biased, but its on-policy gradient equals that of the KL.


@KL_ESTIMATORS.register("k2")
@dataclass(frozen=True, kw_only=True)
class K2(KLEstimator):
    """Half the squared log-ratio."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return d.square() / 2


# k3 = exp(-d) - 1 + d: unbiased and never negative, but its gradient is biased.


@KL_ESTIMATORS.register("k3")
@dataclass(frozen=True, kw_only=True)
class K3(KLEstimator):
    """The log-ratio with a control variate."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return (-d).expm1() + d


# low_var_kl: k3, or its product with the ratio, clamped to +-10, so that no single token dominates the penalty.

LOW_VAR_LIMIT = 10.0


@KL_ESTIMATORS.register("low_var_kl")
@dataclass(frozen=True, kw_only=True)
class LowVarianceKL(K3):
    """k3, clamped; the gradient is zero where the clamp acts."""

    def bounded(self, values: Tensor) -> Tensor:
        return values.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
