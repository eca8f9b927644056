"""The critic of --advantage-estimator ppo: a value model on the trainer's own ranks."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import derived


@dataclass(frozen=True, kw_only=True)
class CriticArgs:
    """A second model of the policy's shape with a scalar head; it has the same parallel layout."""

    critic_load: str | None = None
    """HF folder that the critic starts from. Default: --hf-checkpoint. Its value head starts at zero."""
    critic_lr: float = derived()
    """Learning rate of the critic. Default: --lr."""
    num_critic_only_steps: int = 0
    """First steps that train the critic alone."""
    value_clip: float = 0.2
    """Range of a value's change per update (PPO)."""
