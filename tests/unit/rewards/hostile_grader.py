"""A grader that computes, and does what the answer or its row says; named by path in the tests."""

from __future__ import annotations

import os
import signal
import time

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader


def act(what: str) -> float:
    """Does it."""
    match what:
        case "burn":
            while True:
                pass
        case "sleep":  # as on a machine that gives it no processor
            time.sleep(60)
        case "memory":
            return float(len("a" * (8 << 30)))
        case "recurse":
            return act(what)
        case "raise":
            return float("no number")
        case "not of the answer":
            raise OSError("no space left on device")
        case "row":
            raise DataError("got a row without tests")
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            return float("nan")
    return 1.0


@GRADERS.register("hostile")
class Hostile(Grader):
    """1.0, unless the answer or the row (`metadata["row"]`) says otherwise."""

    wrong = -2.0

    def prepare(self, sample: Sample) -> None:
        """As the row says."""
        act(sample.metadata.get("row", ""))

    def grade(self, sample: Sample, limit_s: float) -> float:
        """As the answer says."""
        return act(sample.response)
