"""Public names of distillation from a served teacher: settings know them, and take `--opd-teacher-url` in their place.

--custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://HOST:PORT/generate
"""

from slime.rollout.workflows.teacher import post_process_rewards, reward_func

__all__ = ["post_process_rewards", "reward_func"]
