"""Law: a run that a scheduler requeues five times, at random moments, is the run that was never stopped.

Each launch has the same command line. It gets a signal at a moment that a seeded generator chooses, between the stages
of a step or inside of one, and says by its exit status whether it is to be continued. The runs fine-tune, because
nothing is sampled there, so everything is equal, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.tiny.tasks import SFT_FILE
from slime.core.errors import AGAIN
from tests.e2e.test_resume import assert_same_state
from tests.support.e2e import NUM_STEPS, Flags, RealRun, started_and_finished, sums_task
from tests.support.hosted_run import HostedRun
from tests.support.hosts import ray_cluster, why_no_hosts
from tests.support.kill_at import Point, environment
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow
NO_HOSTS = why_no_hosts()
SEED = 7
WHOM = ("SIGUSR1", "SIGTERM", "SIGUSR1", "run", "SIGTERM")
"""Signals of the launches, in random order. `run` is SIGKILL, as after the loss of a machine."""
STAGES = ("generate", "train", "save", "sync_weights", "end_step")
MOST_CALLS = 2
"""A launch trains at most one step more than this, so five do not complete the run."""
Launch = Callable[[Flags, dict[str, str]], RealRun | HostedRun]


def moments() -> Iterator[Point]:
    chosen = random.Random(SEED)
    for whom in chosen.sample(WHOM, len(WHOM)):
        stage, call, when = chosen.choice(STAGES), chosen.randint(1, MOST_CALLS), chosen.choice(("before", "after"))
        if stage == "save" or (stage, when) == ("end_step", "after"):
            call = 1  # with an interval of two, the second one comes late
        yield Point("slime.cluster.training_run", f"Run.{stage}", call, when, whom)


def requeued(folder: Path, flags: Flags, launch: Launch) -> RealRun | HostedRun:
    """Launches the same command line until it says that it is complete. Returns the last launch."""
    for number, point in enumerate(moments()):
        with launch(flags, environment(point, folder / f"launch_{number}")) as run:
            status = run.wait()
            killed = folder / f"launch_{number}" / "killed"
            assert killed.is_file(), f"{point} did not come; {run.tail}"
            assert status == (-signal.SIGKILL if point.whom == "run" else AGAIN), f"{status} after {point}; {run.tail}"
            assert point.whom == "run" or "not complete (exit status 75)" in run.output, run.tail
    with launch(flags, {}) as run:
        status = run.wait()
        assert status == 0, f"exit status {status}; {run.tail}"
        assert "resumed from step_" in run.output, run.tail
    return run


def of_steps(run: RealRun | HostedRun, *names: str) -> list[list[float]]:
    rows = run.metrics("train")
    return [[rows[step][name] for name in names] for step in sorted(rows)]


def require_equal(one: tuple[RealRun | HostedRun, Path], two: tuple[RealRun | HostedRun, Path]) -> None:
    """Weights, optimizer, schedule, Data Buffer, and the loss of each step are the same bits; the ledgers balance."""
    assert_same_state(one[1], two[1])
    final = f"step_{NUM_STEPS - 1:06d}/data_buffer.json"
    first, second = (json.loads((save / final).read_text()) for _, save in (one, two))
    assert first == second
    for run, _ in (one, two):
        assert sorted(run.metrics("train")) == list(range(NUM_STEPS))
        require_balance(run.metrics("train"))
    names = ("train/loss", "train/grad_norm", "train/lr-pg_0")
    assert of_steps(one[0], *names) == of_steps(two[0], *names)


def command(model: Path, tasks: Path, save: Path) -> Flags:
    saving: Flags = ["--save", save, "--load", save, "--save-interval", "2", "--save-keep-last", "2"]
    return [*sums_task(model, tasks / SFT_FILE), *saving, "--exit-signal-handler"]


def test_a_run_that_is_requeued_five_times_equals_one_that_is_not(runs: Path, tasks: Path, tiny_qwen3: Path) -> None:
    whole, often = runs / "whole-save", runs / "often-save"
    run = started_and_finished(runs / "whole", command(tiny_qwen3, tasks, whole))

    def launch(flags: Flags, env: dict[str, str]) -> RealRun:
        return RealRun(runs / "often", flags, more_env=env)

    last = requeued(runs / "moments", command(tiny_qwen3, tasks, often), launch)
    require_equal((run, whole), (last, often))


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are hosts")
def test_requeues_over_two_hosts(tmp_path: Path, tasks: Path, tiny_qwen3: Path) -> None:
    """The same, with a training rank on each of two hosts of a cluster that outlives the launches."""
    model, data = tmp_path / "model", tmp_path / "tasks"
    shutil.copytree(tiny_qwen3, model)
    shutil.copytree(tasks, data)
    more: Flags = ["--actor-num-nodes", "2", "--cluster-wait-s", "60"]
    whole, often = tmp_path / "whole-save", tmp_path / "often-save"
    with ray_cluster(tmp_path, [1, 1]) as two:
        with HostedRun(two, tmp_path / "whole", [*command(model, data, whole), *more]) as run:
            assert run.wait() == 0, run.tail

        def launch(flags: Flags, env: dict[str, str]) -> HostedRun:
            return HostedRun(two, tmp_path / "often", [*flags, *more], more_env=env)

        last = requeued(tmp_path / "moments", command(model, data, often), launch)
    require_equal((run, whole), (last, often))
