"""Public name of the rollout of supervised fine-tuning, for plugins."""

from slime.rollout.sft import generate_rollout

__all__ = ["generate_rollout"]
