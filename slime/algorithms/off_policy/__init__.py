"""Corrections for tokens that another policy sampled: weights and masks without a gradient of their own.

Several may act at once: each gets the policy loss that the one before left, in the order of --off-policy-corrections.
They multiply token losses; the denominators stay those of the step, whatever is left out.

One file per correction: derive a frozen dataclass from `Correction`, whose fields are its settings, and register it. A
user's own is named by its path: `--off-policy-corrections tis my_pkg.mine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.token_losses import LOG_RATIO_LIMIT
from slime.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences
    from slime.settings import Args


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyTokens:
    """All that a correction reads of a micro-batch with R response tokens; nothing of it carries a gradient."""

    log_probs: Tensor
    """[R] of the current policy."""
    old_log_probs: Tensor
    """[R] of the old policy of the update: the trainer's before it, or the engine's with --use-rollout-logprobs."""
    trainer_log_probs: Tensor
    """[R] the trainer's before the update, of the whole distribution, as engines report theirs."""
    rollout_log_probs: Tensor
    """[R] the engine's; meaningless where `sampled` is 0."""
    sampled: Tensor
    """[R] 1.0 where an engine's log-prob is there and the token is trained."""
    mask: Tensor
    """[R] trained tokens."""
    advantages: Tensor
    """[R]"""
    sequences: Sequences
    """Which sample each token belongs to."""
    lengths: tuple[int, ...]
    """Response tokens of each sample."""
    total_lengths: tuple[int, ...]
    """Tokens of each sample, prompt included."""
    args: Args
    """All settings, for functions of the user."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this; 0 switches it off."""


class Correction(ABC):
    """Something that acts on the policy loss of tokens, by how they were sampled."""

    name: ClassVar[str]
    switch: ClassVar[str] = ""
    """The flag that asks for it, for messages."""
    asked_by: ClassVar[str] = ""
    """The setting of that flag; corrections of one setting stand in for each other."""
    place: ClassVar[int] = 0
    """Where it acts among those that switches ask for, the smallest first; --off-policy-corrections has its own order.
    """
    needs_rollout_log_probs: ClassVar[bool] = True
    """Whether trained tokens must come with the engine's log-probs."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Whether the switches ask for it, where --off-policy-corrections is not given."""
        return False

    @abstractmethod
    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """(the policy loss [R] after this correction, metric name -> values [R], averaged over trained tokens).

        A name that ends in `_clamped` is counted instead.
        """

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


class MismatchCorrection(Correction):
    """A correction by w = p(trainer, before the update) / p(engine)."""

    def check(self, args: Args) -> str | None:
        """With the engine's log-probs as old policy every w is one."""
        if not args.use_rollout_logprobs:
            return None
        return (
            "got --use-rollout-logprobs with --use-tis, --rejection-level or --get-mismatch-metrics, which compare "
            "them with the trainer's; give one of them"
        )


CORRECTIONS: Registry[Correction] = Registry(
    "off-policy correction",
    flag="--off-policy-corrections",
    package="slime.algorithms.off_policy",
    contract=Correction,
)
