"""Public name of the deepscaler grader, for plugins."""

from slime.rewards.graders.answers import deepscaler_reward as get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
