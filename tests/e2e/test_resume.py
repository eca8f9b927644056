"""Stopping does not show: a run killed and resumed is the run that was never stopped.

An engine on a CPU cannot sample by seed, so what is sampled after a resume differs; what is asked, and with which
learning rate and weights version, does not. Fed with recorded rollouts everything is equal, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.e2e import (
    NUM_STEPS,
    Flags,
    RealRun,
    Recorded,
    latest_step,
    rank_files,
    rank_settings,
    recorded_groups,
    started_and_finished,
)

pytestmark = pytest.mark.slow
KILL_AFTER = 2
"""Last step of the checkpoint after which the driver is killed: three steps are done."""


class Resumed:
    """A run in two processes: the first killed with SIGKILL, the second to the end."""

    def __init__(self, run_dir: Path, flags: Flags) -> None:
        self.save = run_dir.with_name(f"{run_dir.name}-save")
        saving: Flags = ["--save", self.save, "--save-interval", "1"]
        with RealRun(run_dir, [*flags, *saving]) as run:
            run.wait_until(f"the checkpoint of step {KILL_AFTER}", lambda: latest_step(self.save) >= KILL_AFTER)
            run.kill()
        self.killed = run
        self.left = run.left()
        """What the killed run left."""
        self.killed_after = latest_step(self.save)
        assert KILL_AFTER <= self.killed_after < NUM_STEPS - 1, f"killed after step {self.killed_after}"
        self.run = started_and_finished(run_dir, [*flags, *saving, "--load", self.save])


def assert_same_state(one: Path, two: Path) -> None:
    """The final checkpoints below `one` and `two` hold the same bits, schedule and version."""
    last = NUM_STEPS - 1
    assert rank_settings(one, last) == rank_settings(two, last)
    first, second = rank_files(one, last), rank_files(two, last)
    assert first.keys() == second.keys()
    different = [name for name in first if first[name] != second[name]]  # megabytes: no diff of these, please
    assert not different, f"{different} of {one.name} and {two.name} differ"


@pytest.fixture(scope="module")
def resumed(runs: Path, recorded: Recorded) -> tuple[Resumed, str]:
    """`recorded` again on the real engines, killed in the middle of a step and resumed; its recorded rollouts."""
    rollouts = str(runs / "resumed-rollouts" / "{rollout_id}.jsonl.zst")
    return Resumed(runs / "resumed", [*recorded.flags, "--save-debug-rollout-data", rollouts]), rollouts


@pytest.fixture(scope="module")
def replayed(runs: Path, recorded: Recorded) -> Path:
    """Checkpoints of a run fed with the recorded rollouts."""
    save = runs / "replayed-save"
    feed = ["--load-debug-rollout-data", recorded.rollouts]
    started_and_finished(runs / "replayed", [*recorded.flags, *feed, "--save", save, "--save-interval", "1"])
    return save


@pytest.fixture(scope="module")
def replayed_in_two(runs: Path, recorded: Recorded) -> Resumed:
    """A run fed with the recorded rollouts, killed and resumed, that saves in the background and keeps two."""
    flags = [*recorded.flags, "--load-debug-rollout-data", recorded.rollouts]
    return Resumed(runs / "replayed-in-two", [*flags, "--async-save", "--save-keep-last", "2"])


def test_replay_gives_the_same_bits(recorded: Recorded, replayed: Path) -> None:
    """Law: the same rollouts give bitwise the same weights, optimizer state and torch RNG, without an engine."""
    assert_same_state(replayed, recorded.save)


def test_killed_and_resumed_gives_the_same_bits(replayed: Path, replayed_in_two: Resumed) -> None:
    """Law: three steps, SIGKILL and the rest end with the bits of all steps in one go."""
    assert_same_state(replayed_in_two.save, replayed)


def test_old_checkpoints_are_removed(replayed_in_two: Resumed) -> None:
    """Law: the two newest are left, the one that the run was resumed from, and nothing of a crash."""
    kept = {NUM_STEPS - 1, NUM_STEPS - 2, replayed_in_two.killed_after}
    names = {"latest.json", *(f"step_{step:06d}" for step in kept)}
    assert {p.name for p in replayed_in_two.save.iterdir()} == names


def test_a_save_in_the_background_is_measured(replayed_in_two: Resumed) -> None:
    """Law: the loop stands still for less than a save takes; the last step waits for the last save."""
    rows = replayed_in_two.run.metrics("perf")
    assert rows[NUM_STEPS - 1]["perf/save_total_time"] > 0.0
    assert rows[NUM_STEPS - 1]["perf/save_bytes"] > 1e5
    assert all("perf/save_wait_time" in row for row in rows.values())


def test_killed_training_leaves_nothing(replayed_in_two: Resumed) -> None:
    """Law: 15 s after SIGKILL of the driver nothing of a run without engines is left."""
    assert replayed_in_two.left == []


def test_weights_change(replayed: Path) -> None:
    """The two laws above would hold for a trainer that does nothing: every step leaves other bits."""
    seen = [rank_files(replayed, step)["rank_00000.safetensors"] for step in range(NUM_STEPS)]
    assert len(set(seen)) == NUM_STEPS


def prompts(template: str, step: int) -> list[tuple[int | None, list[int | None], list[int]]]:
    """(group, indices, prompt ids) of each group of a recorded step, by group."""
    groups = recorded_groups(template, step)
    rows = [
        (g[0].group_index, [s.index for s in g], g[0].tokens[: len(g[0].tokens) - g[0].response_length]) for g in groups
    ]
    return sorted(rows, key=lambda row: row[0] or 0)


class TestOnTheEngines:
    """The same run killed and resumed with everything in it."""

    def test_same_prompts_each_once(self, recorded: Recorded, resumed: tuple[Resumed, str]) -> None:
        """Law: each step trains the prompts that it trains without the kill; none is skipped, none trained twice."""
        seen: list[int | None] = []
        for step in range(NUM_STEPS):
            again = prompts(resumed[1], step)
            assert again == prompts(recorded.rollouts, step), f"step {step}"
            seen += [row[0] for row in again]
        assert len(seen) == len(set(seen)), "a group was trained twice"

    def test_same_data_buffer(self, recorded: Recorded, resumed: tuple[Resumed, str]) -> None:
        """Law: cursor, counters and ledger end where they end without the kill."""
        final = f"step_{NUM_STEPS - 1:06d}/data_buffer.json"
        one, two = (json.loads((save / final).read_text()) for save in (recorded.save, resumed[0].save))
        assert two == one

    def test_same_learning_rates_and_versions(self, recorded: Recorded, resumed: tuple[Resumed, str]) -> None:
        """Law: schedule and weight version continue; a step after the resume has the rate and version it would have."""
        for kind, name in (("train", "train/lr-pg_0"), ("rollout", "rollout/weight_version/min")):
            one, two = (run.series(kind, name) for run in (recorded.run, resumed[0].run))
            assert two == one, name
            assert len(set(one)) > NUM_STEPS // 2, f"{name} hardly changes: {one}"

    def test_sigkill_leaves_nothing(self, resumed: tuple[Resumed, str]) -> None:
        """Law: 15 s after SIGKILL of the driver in the middle of a step nothing of the run is left."""
        assert resumed[0].left == []
