"""Public names of what rollout functions return, for plugins."""

from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput"]
