"""Public name of the fully asynchronous rollout, for plugins."""

from slime.rollout.fully_async import generate_rollout_fully_async

__all__ = ["generate_rollout_fully_async"]
