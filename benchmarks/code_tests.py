"""Time of the code grader by number of tests, for a correct answer, through the grader pool and with a run's limits.

    python -m benchmarks.code_tests [--json FILE]

A program that adds two numbers runs on 1 to 1,000 tests, once for each number of tests, in a warm grader process.
Prints seconds, seconds per test, and the score or why there is none. `benchmarks/results/code_tests.json` has two such
runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.rewards.pool import GraderPool
from slime.rewards.scores import Scored

PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


async def measure(num_tests: list[int], timeout_s: float) -> list[dict[str, Any]]:
    """Returns one row for each number of tests."""
    pool = GraderPool(num_workers=1, timeout_s=timeout_s, rm_type="code", memory_limit_bytes=2 << 30)
    rows: list[dict[str, Any]] = []
    try:
        for number in [1, *num_tests]:
            tests = {"inputs": [f"{i} 1" for i in range(number)], "outputs": [str(i + 1) for i in range(number)]}
            began = time.perf_counter()
            score = await pool.score(Sample(response=PROGRAM, metadata={"tests": tests}))
            seconds = time.perf_counter() - began
            told = {"score": score.value} if isinstance(score, Scored) else {"unscored": score.reason}
            rows.append({"tests": number, "s": round(seconds, 3), "s_per_test": round(seconds / number, 4), **told})
    finally:
        await pool.close()
    return rows[1:]


def main() -> None:
    """Measures, prints, and optionally writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, nargs="+", default=[1, 10, 100, 200, 300, 1000])
    parser.add_argument("--timeout", type=float, default=30.0, help="--reward-timeout-s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = asyncio.run(measure(options.tests, options.timeout))
    text = json.dumps({"rows": rows, "timeout_s": options.timeout, "cpus": os.cpu_count(), "load_average": load})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
