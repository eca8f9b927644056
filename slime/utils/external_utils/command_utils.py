"""Public name of a run that a program starts, for plugins."""

from slime.settings.parse import execute_train

__all__ = ["execute_train"]
