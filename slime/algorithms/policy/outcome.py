"""What every policy loss returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token results, each [R], in the dtype of the log-probs and zero where masked."""

    loss: Tensor
    """Differentiable in the log-probs alone."""
    clipped: Tensor
    """1.0 where a clip decided: no gradient (PPO, GSPO), a bounded weight (CISPO); never with SAPO's soft gate."""
    old_minus_new: Tensor
    """Detached log-prob difference of each token; its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio of the token hit its clamp."""
