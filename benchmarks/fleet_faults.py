"""Faults at random moments in one run: seconds until slime notices each fault, and until the process serves again.

    python -m benchmarks.fleet_faults [--moments 10] [--seed 1] [--output FILE]

Each kind (SIGKILL and SIGSTOP of an engine's server, of its scheduler, of the router) occurs `--moments` times, in
random order, with at least four requests in flight. The run must lose no group and train no group twice. If a fault did
not happen or was not repaired, the benchmark ends with an error. It needs two cores and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

from recipes.tiny.tasks import DIGITS_FILE, write_all
from tests.support.e2e import RealRun, digits_task
from tests.support.fault_storm import KINDS, Mended, require_exact, storm, storm_flags
from tests.support.tiny import write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kinds = [kind for kind in KINDS for _ in range(options.moments)]
    random.Random(options.seed).shuffle(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", "qwen3")
        write_all(folder / "tasks")
        flags = [*digits_task(model, folder / "tasks" / DIGITS_FILE), *SIZES]
        rollouts = folder / "rollouts"
        with RealRun(folder / "run", storm_flags(flags, rollouts), script="train_async.py") as run:
            mended = storm(run, kinds, options.seed)
            assert run.interrupt() == 130, run.tail
            num_groups = require_exact(run, rollouts)
            assert run.left() == [], run.left()
    result = {
        "command": " ".join(["python", "-m", "benchmarks.fleet_faults", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "groups_trained": num_groups,
        "kinds": {
            f"{who} {signum.name}": _summary([one for one in mended if (one.who, one.signal) == (who, signum.name)])
            for who, signum in KINDS
        },
        "faults": [dataclasses.asdict(one) for one in mended],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


SIZES = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "32", "--no-bf16"]
"""Flags for small steps, so that a run has many steps."""


def _summary(faults: list[Mended]) -> dict[str, float]:
    noticed, serving = [one.noticed_s for one in faults], [one.serving_s for one in faults]
    return {
        "times": len(faults),
        "noticed_s_worst": max(noticed),
        "noticed_s_median": statistics.median(noticed),
        "serving_s_worst": max(serving),
        "serving_s_median": statistics.median(serving),
    }


if __name__ == "__main__":
    main()
