"""Public names of the graders, for plugins."""

from slime.rewards.graders.answers import boxed_equals as grade_answer_verl
from slime.rewards.graders.answers import deepscaler_reward as get_deepscaler_rule_based_reward
from slime.rollout.scored import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm", "get_deepscaler_rule_based_reward", "grade_answer_verl"]
