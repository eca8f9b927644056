"""Public name of a filter's verdict, for plugins."""

from slime.rollout.types import DynamicFilterOutput

__all__ = ["DynamicFilterOutput"]
