"""Public names of answers in boxes, for plugins."""

from slime.rewards.graders.answers import boxed_equals as grade_answer_verl
from slime.rewards.graders.answers import last_boxed as extract_answer
from slime.rewards.graders.answers import last_boxed as extract_boxed_answer

__all__ = ["extract_answer", "extract_boxed_answer", "grade_answer_verl"]
