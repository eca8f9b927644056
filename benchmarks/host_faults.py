"""Faults of whole hosts at random moments in one run: seconds until slime notices, and until the engine serves again.

    python -m benchmarks.host_faults [--moments 10] [--seed 1] [--output FILE]

All processes on one of two hosts with engines get SIGKILL or SIGSTOP, each `--moments` times, in random order, with at
least four requests in flight at its engine. Hosts are namespaces of this machine; this needs root, `ip`, `unshare` and
`nsenter`. The run must lose no group and train no group twice. If a fault did not happen or was not repaired, the
benchmark ends with an error. The time until the engine serves includes the time that the host was away. Needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from recipes.tiny.tasks import DIGITS_FILE, write_all
from tests.support.e2e import digits_task
from tests.support.fault_storm import require_exact, storm_flags
from tests.support.host_storm import SIGNALS, SIZES, host_storm
from tests.support.hosted_run import HostedRun
from tests.support.hosts import ray_cluster, why_no_hosts
from tests.support.tiny import write_tiny_model

STEPS = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "32", "--no-bf16"]
"""Flags for small steps, so that a run has many steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if reason := why_no_hosts():
        parser.error(reason)
    signals = [signum for signum in SIGNALS for _ in range(options.moments)]
    random.Random(options.seed).shuffle(signals)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", "qwen3")
        write_all(folder / "tasks")
        flags = storm_flags([*digits_task(model, folder / "tasks" / DIGITS_FILE), *STEPS], folder / "rollouts")
        with (
            ray_cluster(folder, SIZES) as cluster,
            HostedRun(cluster, folder / "run", flags, script="train_async.py") as run,
        ):
            mended = host_storm(run, cluster, signals, options.seed)
            assert run.interrupt() == 130, run.tail
            num_groups = require_exact(run, folder / "rollouts")
            assert run.left_on_hosts() == [], run.left_on_hosts()
    result = {
        "command": " ".join(["python", "-m", "benchmarks.host_faults", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "groups_trained": num_groups,
        "noticed_s_worst": {
            signum.name: max(one.noticed_s for one in mended if one.signal == signum.name) for signum in set(signals)
        },
        "faults": [dataclasses.asdict(one) for one in mended],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
