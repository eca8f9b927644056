"""Public name of coroutines in synchronous functions, for plugins."""

from slime.rollout.loop import run

__all__ = ["run"]
