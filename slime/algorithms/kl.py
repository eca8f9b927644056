"""Estimators of KL(policy || reference) from one sampled token each (Schulman 2020, "Approximating KL divergence").

With d = log policy - log reference: k1 = d (unbiased, high variance), k2 = d^2 / 2 (biased, unbiased gradient),
k3 = exp(-d) - 1 + d (unbiased, never negative); `low_var_kl` is k3 clamped to +-10.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.log_ratio import clamped_log_ratio
from slime.core.errors import ConfigError

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_LIMIT = 10.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Estimate [T], zero where masked, differentiable in `log_probs`. Raises `ConfigError` on an unknown kind."""
    d, _ = clamped_log_ratio(log_probs, ref_log_probs, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind in ("k3", "low_var_kl"):
        k3 = (-d).expm1() + d
        return k3.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if kind == "low_var_kl" else k3
    raise ConfigError(f"got --kl-loss-type {kind!r}; choose one of {', '.join(KL_TYPES)}")
