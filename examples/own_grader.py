"""A grader of your own in the registry: a class, named by its path, with settings as its fields.

    python train.py ... --rm-type examples.own_grader --num-words 50

Its field `num_words` is a setting, with a flag of its own. It runs where the built-in ones do: without network, where
the kernel permits, and without the settings of the run. A function with `--custom-rm-path`
(`examples/brief_reward.py`) is less to write; it sees all settings of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader


@GRADERS.register("right_length")
@dataclass(frozen=True, kw_only=True)
class RightLength(Grader):
    """1.0 for an answer of exactly `num_words` words, less the further it is from that."""

    num_words: int = 20
    """How many words are wanted."""

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns a number from 0.0 to 1.0."""
        return max(0.0, 1.0 - abs(len(sample.response.split()) - self.num_words) / self.num_words)
