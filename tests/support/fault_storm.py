"""Fault after fault in one run, at random moments, each with what it cost: seconds until it was noticed and mended.

The run trains fully asynchronously on two engines, so requests are in flight all the time. A fault waits until the
engine that it hits has enough of them; a router has none of the run's own, so both engines together count then.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.rollout.recordings import load_rollout
from tests.support.e2e import Flags, RealRun
from tests.support.faults import ROUTER, SCHEDULER, SERVER, engine_log, hit, requests_at, victim_of
from tests.support.hosted_run import HostedRun
from tests.support.ledger import require_balance

LEAST_IN_FLIGHT = 4
SETTLE_S = 600.0
"""Until an engine serves again, on a machine that does other things, too."""
KINDS: tuple[tuple[str, signal.Signals], ...] = tuple(
    (who, signum) for who in (SERVER, SCHEDULER, ROUTER) for signum in (signal.SIGKILL, signal.SIGSTOP)
)
NUM_ENGINES = 2


@dataclass(frozen=True, slots=True)
class Mended:
    """One fault, and how it went."""

    who: str
    signal: str
    in_flight: int
    """Requests at the engine that was hit, or at all of them."""
    noticed_s: float
    """From the signal to the driver's word of it."""
    serving_s: float
    """From the signal to verified weights and an open door."""


def storm_flags(base: Flags, rollouts: Path) -> Flags:
    """A run that goes on until it is interrupted, and records what it trained."""
    return [
        *base,
        *("--fully-async", "--rollout-num-gpus", str(NUM_ENGINES), "--num-rollout", "100000"),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--save-debug-rollout-data", rollouts / "{rollout_id}"),
        *("--router-log-level", "warn"),  # any flag of the router starts one
    ]


def storm(run: RealRun, kinds: Sequence[tuple[str, signal.Signals]], seed: int) -> list[Mended]:
    """Hits the run with each of these, in this order; each time when the last one is mended."""
    chance = random.Random(seed)
    run.wait_until("step 1", lambda: last_step(run) >= 1, SETTLE_S)
    return [_one(run, who, signum, chance) for who, signum in kinds]


def last_step(run: RealRun | HostedRun) -> int:
    """The last one that was trained; -1 before."""
    return max(run.metrics("train"), default=-1) if (run.run_dir / "metrics.jsonl").is_file() else -1


def _one(run: RealRun, who: str, signum: signal.Signals, chance: random.Random) -> Mended:
    index = chance.randrange(NUM_ENGINES)
    time.sleep(chance.uniform(0.0, 3.0))
    in_flight = 0

    def busy() -> bool:
        nonlocal in_flight
        asked = range(NUM_ENGINES) if who == ROUTER else (index,)
        in_flight = sum(requests_at(run, str(victim_of(run, SERVER, i).url)) for i in asked)
        return in_flight >= LEAST_IN_FLIGHT

    run.wait_until(f"{LEAST_IN_FLIGHT} requests at engine {index}", busy, SETTLE_S)
    logs = run.run_dir / "logs"
    log = logs / ("rollout.log" if who == ROUTER else "driver.log")
    said = (
        ("the router of model", "answers again")
        if who == ROUTER
        else (f"engine {index} was lost", f"engine {index} serves again")
    )
    before = [times_said(log, word) for word in said]
    began = hit(victim_of(run, who, index), signum)
    run.wait_until(f"word of {who} {signum.name}", lambda: times_said(log, said[0]) > before[0], SETTLE_S)
    noticed = time.time() - began
    run.wait_until(f"{said[1]}", lambda: times_said(log, said[1]) > before[1], SETTLE_S)
    serving = time.time() - began
    if who != ROUTER:
        later = engine_log(run.run_dir, index)
        run.wait_until("requests at it", lambda: "POST /generate" in later.read_text(errors="replace"), SETTLE_S)
    return Mended(who, signum.name, in_flight, round(noticed, 2), round(serving, 2))


def times_said(log: Path, words: str) -> int:
    """How often a log says something; never, while there is none."""
    return log.read_text(errors="replace").count(words) if log.is_file() else 0


def require_exact(run: RealRun | HostedRun, rollouts: Path) -> int:
    """Nothing was lost and nothing trained twice, in any step; how many groups were trained."""
    steps = run.metrics("train")
    require_balance(steps)
    assert not any(row["data/failed"] for row in steps.values()), "a prompt failed"
    trained: Counter[int] = Counter()
    for step in steps:
        _, groups = load_rollout(rollouts / str(step))
        trained.update(int(group[0].group_index) for group in groups)
    twice = [group for group, times in trained.items() if times > 1]
    assert trained and not twice, f"groups {twice} were trained twice"
    return len(trained)
