"""Public names of the default rollout, for plugins."""

from slime.rollout.generate import generate
from slime.rollout.loop import generate_rollout
from slime.rollout.plugin_calls import generate_and_rm, generate_and_rm_group
from slime.rollout.plugin_state import GenerateState

__all__ = ["GenerateState", "generate", "generate_and_rm", "generate_and_rm_group", "generate_rollout"]
