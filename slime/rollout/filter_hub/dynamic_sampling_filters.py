"""Public names of the dynamic sampling filters, for plugins."""

from slime.rollout.filters import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]
