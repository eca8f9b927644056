"""Public names of the records, for plugins."""

from slime.core.sample import Sample

__all__ = ["Sample"]
