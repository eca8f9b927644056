"""Programs that start a Ray of their own, in a Python of their own: a process has one Ray at a time."""

from __future__ import annotations

import os
import subprocess
import sys


def output_of(program: str) -> str:
    """Runs Python code, which must end well, and returns what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
