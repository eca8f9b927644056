"""Public names of context parallelism in users' losses, for plugins: they get whole responses on every rank."""

from slime.algorithms.whole_responses import all_gather_with_cp, slice_log_prob_with_cp

__all__ = ["all_gather_with_cp", "slice_log_prob_with_cp"]
