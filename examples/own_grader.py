"""Your own grader in the registry: a class, named by its path, whose fields are settings.

    python train.py ... --rm-type examples.own_grader --num-words 50

The field `num_words` becomes the flag `--num-words`. The grader runs like the built-in graders: it does not see the
settings of the run, and has no network if the kernel permits. A function with `--custom-rm-path`
(`examples/brief_reward.py`) is shorter and sees the settings of the run, except secrets.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader


@GRADERS.register("right_length")
@dataclass(frozen=True, kw_only=True)
class RightLength(Grader):
    """A grader that gives 1.0 for a response of exactly `num_words` words, and less for other lengths."""

    num_words: int = 20
    """Number of words that an answer should have."""

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns a number from 0.0 to 1.0."""
        return max(0.0, 1.0 - abs(len(sample.response.split()) - self.num_words) / self.num_words)
