"""Random: a coin, 0.0 or 1.0, for plumbing tests; repeatable for one response."""

from __future__ import annotations

import zlib

from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader


@GRADERS.register("random")
class Chance(Grader):
    """A repeatable coin."""

    held = True
    wrong = 0.0

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 0.0 or 1.0 by a checksum of the execution's id and response."""
        return float(zlib.crc32(f"{sample.index}:{sample.response}".encode()) & 1)
