"""Public names of DAPO's grader, for plugins."""

from slime.rewards.graders.answers import dapo_score as compute_score
from slime.rewards.graders.answers import dapo_score as math_dapo_compute_score

__all__ = ["compute_score", "math_dapo_compute_score"]
