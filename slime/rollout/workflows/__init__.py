"""Data generation for other losses than the policy loss, on the path of every rollout: hooks, one file for each."""
