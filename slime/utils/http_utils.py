"""Public name of requests, for plugins."""

from slime.rollout.posting import post

__all__ = ["post"]
