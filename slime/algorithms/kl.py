"""Estimators of KL(policy || reference) from one sampled token each (Schulman 2020, "Approximating KL divergence").

With d = log policy - log reference: k1 = d (unbiased, high variance), k2 = d^2 / 2 (biased, unbiased gradient),
k3 = exp(-d) - 1 + d (unbiased, never negative); `low_var_kl` is k3 clamped to +-10.

With `old_log_probs` the estimate is multiplied by the ratio policy / old, through which the gradient flows, too
(DeepSeek-V3.2, arXiv:2512.02556): value and gradient are then unbiased for tokens sampled from the old policy.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio
from slime.core.errors import ConfigError

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_LIMIT = 10.0


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kind: str,
    *,
    old_log_probs: Tensor | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """Estimate [R], zero where masked, differentiable in `log_probs`. Raises `ConfigError` on an unknown kind."""
    d, _ = clamped_log_ratio(log_probs, ref_log_probs.detach(), mask, log_ratio_limit)
    if kind == "k1":
        estimate = d
    elif kind == "k2":
        estimate = d.square() / 2
    elif kind in ("k3", "low_var_kl"):
        estimate = (-d).expm1() + d
        if kind == "low_var_kl":
            estimate = estimate.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    else:
        raise ConfigError(f"got --kl-loss-type {kind!r}; choose one of {', '.join(KL_TYPES)}")
    if old_log_probs is None:
        return estimate
    log_ratio, _ = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    return estimate * log_ratio.exp()
