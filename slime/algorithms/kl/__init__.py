"""Per-token estimators of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

An estimator is a function of d = log policy - log reference. To add one, derive from `KLEstimator` and register it.
Your own estimator is selected by its import path, `--kl-loss-type my_pkg.mine`.

With `old_log_probs`, the estimate is multiplied by the ratio policy / old, and the gradient flows through both factors
(DeepSeek-V3.2, arXiv:2512.02556). Value and gradient are then unbiased for tokens sampled from the old policy.

Bounds apply to the product of estimate and ratio, not to the estimate alone: with k3 clamped to 10, the gradient of the
ratio would push the policy away from the reference. A token at a bound has no gradient.
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
    """A per-token estimator. Its mean over tokens sampled from the policy is the KL, exactly or approximately."""

    name: ClassVar[str]

    @abstractmethod
    def of_log_ratio(self, d: Tensor) -> Tensor:
        """Returns the estimate [R] for d = log policy - log reference [R]. Must be differentiable, and 0 at d = 0."""

    def estimate(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        log_ratio_limit: float = LOG_RATIO_LIMIT,
    ) -> Tensor:
        """Returns the estimate [R], zero where masked. Differentiable in `log_probs`."""
        import torch

        if old_log_probs is None:
            d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)
            return self.bounded(self.of_log_ratio(d))
        # The slopes of k3 and the ratio are each of order exp(-d), but they sum to d. In float32, only rounding errors
        # of random sign would remain.
        policy = log_probs.double()
        d, limited = clamped_log_ratio(policy, ref_log_probs.detach(), mask, log_ratio_limit)
        log_ratio, ratio_limited = clamped_log_ratio(policy, old_log_probs.detach(), mask, log_ratio_limit)
        product = self.bounded(self.of_log_ratio(d) * log_ratio.exp())
        return torch.where(limited | ratio_limited, product.detach(), product).to(log_probs.dtype)

    def bounded(self, values: Tensor) -> Tensor:
        """Clamps the estimates [R], or their products with the ratio. By default, there are no bounds."""
        return values

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings conflict, else None. Called before the run starts."""
        return None


KL_ESTIMATORS: Registry[KLEstimator] = Registry(
    "KL estimator", flag="--kl-loss-type", package="slime.algorithms.kl", contract=KLEstimator
)


@KL_ESTIMATORS.register("k1")
@dataclass(frozen=True, kw_only=True)
class K1(KLEstimator):
    """k1 = d: unbiased, but with high variance. As a loss, its expected gradient is always zero."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return d

    def check(self, args: Args) -> str | None:
        if not (args.use_kl_loss and args.kl_loss_coef) or args.use_unbiased_kl:
            return None
        return (
            f"--kl-loss-type k1 with --kl-loss-coef {args.kl_loss_coef} has no effect on average, because the expected "
            "gradient of k1 as a loss is zero; use a different type, or add --use-unbiased-kl"
        )


@KL_ESTIMATORS.register("k2")
@dataclass(frozen=True, kw_only=True)
class K2(KLEstimator):
    """k2 = d^2 / 2: biased, but its on-policy gradient equals the gradient of the KL."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return d.square() / 2


@KL_ESTIMATORS.register("k3")
@dataclass(frozen=True, kw_only=True)
class K3(KLEstimator):
    """k3 = exp(-d) - 1 + d: unbiased and non-negative, but with a biased gradient."""

    def of_log_ratio(self, d: Tensor) -> Tensor:
        return (-d).expm1() + d


LOW_VAR_LIMIT = 10.0


@KL_ESTIMATORS.register("low_var_kl")
@dataclass(frozen=True, kw_only=True)
class LowVarianceKL(K3):
    """k3, or its product with the ratio, clamped to +-10, so that no token dominates the penalty."""

    def bounded(self, values: Tensor) -> Tensor:
        return values.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
