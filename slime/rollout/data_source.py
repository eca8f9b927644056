"""Public names of the data sources, for plugins."""

from slime.rollout.prompt_source import RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer"]
