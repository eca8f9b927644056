"""The critic of an advantage estimator that has one (ppo): a value model on the trainer's own ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.settings.conditions import ADVANTAGES, CRITIC, estimator_of
from slime.settings.fields import derived, is_not_zero, opt
from slime.settings.ranges import STEPS_OR_NONE

_NEEDS = (ADVANTAGES, CRITIC)


def _initial(s: Any) -> str | None:
    return s.initial_weights if estimator_of(s).needs_critic else None


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """A second model of the policy's architecture with a scalar head; it has the same parallel layout."""

    critic_load: str | None = derived(_initial, "the critic starts from the policy's weights", needs=_NEEDS)
    """HF folder that the critic starts from. Default: that of the policy. Its value head starts at zero."""
    critic_lr: float = derived(lambda s: s.megatron["lr"], "lr", needs=_NEEDS, gt=0, le=100)
    """Learning rate of the critic. Default: --lr."""
    num_critic_only_steps: int = opt(0, needs=_NEEDS, asks=is_not_zero, within=STEPS_OR_NONE)
    """First steps that train the critic alone."""
