"""Algorithms: advantages, KL, policy losses, off-policy corrections and loss aggregation.

Each file implements one method and cites its source. Advantages, returns and token weights are computed on the host
from the whole batch, in NumPy float64. Everything differentiable is torch, in the dtype of its inputs.

Shapes: `_R` is response tokens, of one sample or of several concatenated; `_S` is samples. Nothing here depends on
ranks, micro-batches or engines, so neither do the results.

`Algorithm` holds the registry entries that the settings select, instantiated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from slime.algorithms.aggregation import AGGREGATIONS, Aggregation
from slime.algorithms.kl import KL_ESTIMATORS, KLEstimator
from slime.algorithms.off_policy import CORRECTIONS, Correction
from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss
from slime.settings.conditions import fine_tunes

if TYPE_CHECKING:
    from slime.settings import Args


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One entry from each registry, and any number of corrections."""

    estimator: AdvantageEstimator
    policy_loss: PolicyLoss
    kl: KLEstimator
    corrections: tuple[Correction, ...]
    """The corrections, in the order in which they are applied."""
    aggregation: Aggregation

    @classmethod
    def of(cls, args: Args) -> Algorithm:
        """Raises `ConfigError` for an unknown name."""
        return cls(
            estimator=ESTIMATORS.build(args.advantage_estimator, args),
            policy_loss=POLICY_LOSSES.build(args.policy_loss, args),
            kl=KL_ESTIMATORS.build(args.kl_loss_type, args),
            corrections=tuple(CORRECTIONS.build(name, args) for name in args.off_policy_corrections),
            aggregation=AGGREGATIONS.build(args.loss_aggregation, args),
        )

    @property
    def needs_rollout_log_probs(self) -> bool:
        return any(correction.needs_rollout_log_probs for correction in self.corrections)


def samples_top_p_set(args: Args) -> bool:
    """Returns whether sampling is restricted to part of the vocabulary (`--rollout-top-p`, `--rollout-top-k`)."""
    return not fine_tunes(args) and (args.rollout_top_p < 1.0 or args.rollout_top_k > 0)
