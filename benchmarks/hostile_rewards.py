"""Throughput with reward functions that fail for a fifth of the samples: a hostile step compared with a clean step.

python -m benchmarks.hostile_rewards [--repeats 3]

A fake engine samples 256 samples, at 0.15 s per token, so that generation limits the speed. The rewards of the hostile
step hang, raise, or return None, NaN or 1 GB (`tests/contract/rollout/hostile_rewards.py`). Prints a JSON line per
repeat: seconds of both steps, and the remaining throughput.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.contract.rollout import hostile_rewards
from tests.contract.rollout.test_hostile_rewards import clean_and_hostile

NUM_PROMPTS, TICK_S = 32, 0.15


def main() -> None:
    """Measures all repeats and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    hostile_rewards.GIANT.append("x" * 2**30)
    for _ in range(parser.parse_args().repeats):
        hostile_rewards.ACTS.clear()
        with tempfile.TemporaryDirectory() as folder:
            clean, hostile = clean_and_hostile(Path(folder), NUM_PROMPTS, TICK_S)
        clean_s, hostile_s = clean[2], hostile[2]
        print(json.dumps({"clean_s": clean_s, "hostile_s": hostile_s, "throughput_left": clean_s / hostile_s}))


if __name__ == "__main__":
    main()
