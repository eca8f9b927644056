"""Public names of small things, for plugins."""

from slime.core.registry import load_object as load_function
from slime.core.singleton import SingletonMeta

__all__ = ["SingletonMeta", "load_function"]
