"""An asynchronous run killed at named points of its code, again and again: no prompt is skipped, none is repeated.

What is killed goes on from its last checkpoint, so steps after that are done again. The *committed history* is what
counts: step k as the run did it whose checkpoint the later steps go on from; its recorded rollout is the last one
written. Of this history, and of every checkpoint on the way, this holds:

- skipped 0: the groups that were issued are 0..N-1; group i asks row i of the endless shuffled walk over the dataset;
  each of them is trained, or waits in the Data Buffer (to be worked on, finished, or under way). None is lost.
- repeated 0: no group is trained by two steps, and none that waits has been trained.
- what was sampled is kept, with `--fully-async`: the tokens of a group in the checkpoint, with log-probs and versions,
  are the beginning of what is trained of it later. (One step off, a step trains nothing that an earlier one began.)
- weights, Data Buffer and step agree: after step k the version is k + 2 and (k + 1) batches are trained.

The runs of a chain share folders: each is killed at the next point, and the last one ends. No answer comes to the first
try of every seventh prompt, which is quarantined.
"""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.tiny.tasks import digits_rows, write_rows
from slime.buffer.samplers import PromptWalk
from slime.buffer.snapshot import SavedState
from slime.core.sample import Fingerprint, Group, Status
from tests.support.e2e import Flags, RealRun, digits_task, latest_step, rank_settings, recorded_groups
from tests.support.kill_at import Point, environment
from tests.support.ledger import require_balance

NUM_STEPS, BATCH, NUM_ROWS, SEED = 10, 4, 24, 7
BUFFER, SYNC = "slime.buffer.data_buffer", "slime.weights.sync"
WORKER, FLEET = "slime.rollout.workers.episode_worker", "slime.rollout.workers.worker_fleet"
CHECKPOINT, BACKEND, MANAGER = "slime.training.state.checkpoint", "slime.training.backend", "slime.rollout.manager"

FULLY_ASYNC: Flags = ["--fully-async", "--max-weight-staleness", "8", "--max-groups-in-flight", "12"]
IN_BACKGROUND: Flags = ["--async-save", "--save-keep-last", "2"]
CHAINS: dict[str, tuple[Flags, list[Point]]] = {
    "buffer": (
        FULLY_ASYNC,
        [
            Point(BUFFER, "DataBuffer.get_groups", 16, "after"),
            Point(BUFFER, "DataBuffer.put_finished", 9, "after", "process"),
            Point("slime.rollout.schedules.group_loop", "GroupLoop.hand_out", 2, "before"),
            Point(BUFFER, "DataBuffer.put_back", 3, "before"),
            Point(BUFFER, "DataBuffer.put_back", 12, "after"),
        ],
    ),
    "weight sync": (
        FULLY_ASYNC,
        [
            Point(BUFFER, "DataBuffer.mark_trained", 2, "before"),
            Point(BUFFER, "DataBuffer.mark_trained", 2, "after"),
            Point(SYNC, "_WeightSync._pause", 3, "after"),
            Point(SYNC, "_WeightSync._complete", 3, "before", "process"),
            Point(SYNC, "_WeightSync._resume", 3, "before"),
        ],
    ),
    "checkpoint": (
        [*FULLY_ASYNC, *IN_BACKGROUND],
        [
            Point("slime.buffer.snapshot", "write_json", 2, "before"),
            Point(CHECKPOINT, "HashedFile.__exit__", 3, "before", "process"),
            Point(CHECKPOINT, "commit", 2, "before"),
            Point(CHECKPOINT, "write_json", 4, "before"),  # it has its folder and is not yet the latest
            Point(CHECKPOINT, "prune", 2, "before"),
        ],
    ),
    "step": (
        FULLY_ASYNC,
        [
            Point(BACKEND, "MegatronBackend.train", 2, "after"),
            Point("slime.rollout.evaluate", "_evaluate_one", 5, "before"),
            Point("slime.rollout.schedules.fully_async", "RolloutWorker.__init__", 1, "after"),
            Point(MANAGER, "RolloutManager.load", 1, "after"),
            Point(
                "slime.rollout.schedules.group_loop", "GroupLoop._check_failed", 1, "before"
            ),  # a group is quarantined
        ],
    ),
    "retract": (
        [*FULLY_ASYNC, "--pause-generation-mode", "retract"],
        [
            Point(BUFFER, "DataBuffer.put_finished", 22, "after"),
            Point(SYNC, "_WeightSync._pause", 4, "after", "process"),
            Point(BUFFER, "DataBuffer.put_back", 9, "after"),
        ],
    ),
    "in_place": (
        [*FULLY_ASYNC, "--pause-generation-mode", "in_place", "--save-interval", "2"],
        [
            Point("slime.buffer.snapshot", "write_json", 2, "after"),
            Point(BUFFER, "DataBuffer.mark_trained", 2, "after"),
            Point(SYNC, "_WeightSync._resume", 3, "before"),
        ],
    ),
    "rollout workers": (
        [*FULLY_ASYNC, "--rollout-num-workers", "2"],
        [
            Point(WORKER, "EpisodeWorker.run", 7, "before"),
            Point(WORKER, "record_of", 4, "after"),
            Point(WORKER, "EpisodeWorker.pause", 2, "before"),
            Point(FLEET, "WorkerFleet.resume", 3, "after"),
            Point(BUFFER, "DataBuffer.put_finished", 9, "after"),
            Point("slime.buffer.snapshot", "write_json", 2, "before"),
        ],
    ),
    "one-step-off": (
        [],
        [
            Point(BUFFER, "DataBuffer.mark_trained", 2, "before"),
            Point("slime.buffer.snapshot", "write_json", 2, "after"),
            Point(SYNC, "_WeightSync._pause", 3, "after"),
            Point(BUFFER, "DataBuffer.get_groups", 3, "after"),
        ],
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_point_is_in_the_code(chain: str) -> None:
    """Law: a point that somebody renamed is an error at once, not a chain that the long suite finds broken."""
    for point in CHAINS[chain][1]:
        assert callable(operator.attrgetter(point.name)(importlib.import_module(point.module)))


class Numbers:
    """As many rows as the dataset has, to walk over."""

    fingerprint = Fingerprint(source="", num_rows=NUM_ROWS, digest="")

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("only the order is asked for")


class History:
    """Folders and flags of one chain, and the laws of what it committed."""

    def __init__(self, folder: Path, model: Path, flags: Flags) -> None:
        self.folder, self.save = folder, folder / "save"
        self.rows, self.rollouts = digits_rows(NUM_ROWS, seed=1), str(folder / "rollouts" / "{rollout_id}.jsonl.zst")
        data = write_rows(folder / "digits.jsonl", self.rows)
        held_out = write_rows(folder / "held_out.jsonl", self.rows[:4])
        walk = PromptWalk(Numbers(), shuffle=True, seed=SEED)
        self.order = [walk.next_row() for _ in range(NUM_ROWS * 10)]
        self.flags: Flags = [
            *digits_task(model, data),
            "--rollout-shuffle",
            "--rollout-seed",
            str(SEED),
            "--rollout-batch-size",
            str(BATCH),
            "--n-samples-per-prompt",
            "2",
            "--rollout-max-response-len",
            "160",
            "--num-rollout",
            str(NUM_STEPS),
            "--no-bf16",
            "--lr",
            "1e-3",
            "--custom-generate-function-path",
            "tests.support.kill_at:now_and_then_no_answer",
            "--update-weight-transport",
            "tensor",
            "--save",
            self.save,
            "--save-interval",
            "1",
            "--eval-prompt-data",
            "held_out",
            held_out,
            "--eval-interval",
            "2",
            "--skip-eval-before-train",
            "--eval-max-response-len",
            "16",
            "--save-debug-rollout-data",
            self.rollouts,
            *flags,
        ]
        self.waiting: dict[int, Group] = {}
        """Group -> it as it was in the last checkpoint that a run went on from, if it had tokens then."""
        self.num_kept_tokens = 0
        """Of samples that were half done in a checkpoint."""

    def start(self, more_env: dict[str, str] | None = None) -> RealRun:
        """The next run of the chain, from the last checkpoint if there is one."""
        flags: Flags = [*self.flags, "--load", self.save]
        return RealRun(self.folder / "run", flags, script="train_async.py", more_env=more_env)

    def kill(self, point: Point, number: int) -> None:
        """A run that is killed at `point`, and what it leaves."""
        killed = self.folder / f"kill-{number}"
        with self.start(environment(point, killed)) as run:
            status = run.wait()
        assert (killed / "killed").is_file(), f"never at {point}: ended with {status}; {run.tail}"
        assert status != 0, f"the run did not notice that a process was killed at {point}; {run.tail}"
        assert run.left() == [], f"left by a run killed at {point}"
        if latest_step(self.save) >= 0:
            self.check_checkpoint()

    def check_checkpoint(self) -> None:
        """The laws of the last checkpoint and the steps up to it."""
        step = latest_step(self.save)
        path = self.save / f"step_{step:06d}" / "data_buffer.json"
        state = json.loads(path.read_text())
        held = SavedState.of(state, path)
        version = next(iter(rank_settings(self.save, step).values()))["weight_version"]
        assert version == state["weight_version"] == step + 2, f"versions of {version} and {state['weight_version']}"
        trained = self.trained_until(step)
        assert state["trained"] == len(trained) == BATCH * (step + 1), f"{state['trained']} trained after step {step}"
        assert not state["failed"] and not state["filtered"] and "stale" not in state["returned"], state["returned"]
        under_way = [issued.record for _, issued in held.in_flight if issued.record is not None]
        waiting = [g["group_index"] for g in state["in_flight"] + state["buffered"] + state["finished"]]
        everything = sorted([*trained, *waiting])
        assert everything == list(range(state["issued"])), f"not each group once: {everything} of {state['issued']}"
        for group in (record.group() for record in (*under_way, *held.buffered, *held.finished)):
            if "--fully-async" in self.flags and any(s.response_length for s in group.samples):
                self.waiting[group.group_index] = group

    def trained_until(self, step: int) -> dict[int, Group]:
        """Every group of the recorded steps, each once, for the right prompt, going on from what was saved of it."""
        trained: dict[int, Group] = {}
        for samples in (g for k in range(step + 1) for g in recorded_groups(self.rollouts, k)):
            index = samples[0].group_index
            assert index is not None and index not in trained, f"group {index} is trained twice"
            trained[index] = Group(index, tuple(samples))
            word = self.rows[self.order[index]]["prompt"][0]["content"]
            assert all(f"|>{word}<" in str(s.prompt) for s in samples), f"group {index} is not of {word}: {samples[0]}"
            assert sorted(s.index or 0 for s in samples) == [2 * index, 2 * index + 1], f"executions of group {index}"
            assert all(s.num_quarantined == int(index % 7 == 3) for s in samples), samples[0].num_quarantined
            if index in self.waiting:
                self.check_continued(self.waiting.pop(index), trained[index])
        return trained

    def check_continued(self, saved: Group, trained: Group) -> None:
        """What a checkpoint holds of a group is the beginning of what was trained of it."""
        for one, two in zip(saved.samples, trained.samples, strict=True):
            num, start = one.response_length, one.prompt_length
            if num == 0:
                continue
            assert two.tokens[: start + num] == one.tokens, f"group {saved.group_index} began anew"
            for name in ("rollout_log_probs", "token_versions", "loss_mask"):
                assert getattr(two, name)[:num] == getattr(one, name), f"{name} of group {saved.group_index}"
            self.num_kept_tokens += num * (one.status is Status.ABORTED)

    def check_end(self, run: RealRun) -> None:
        """The laws of the whole."""
        assert latest_step(self.save) == NUM_STEPS - 1, "the last step is not saved"
        self.check_checkpoint()
        rows = run.metrics("train")
        assert sorted(rows) == list(range(NUM_STEPS)), f"steps {sorted(rows)}"
        require_balance(rows)
        for step, row in rows.items():
            assert row["data/trained"] == (step + 1) * BATCH, (step, row)


@pytest.fixture
def history(tmp_path: Path, tiny_qwen3: Path) -> Callable[[Flags], History]:
    """Makes the history of a chain."""
    return lambda flags: History(tmp_path, tiny_qwen3, flags)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHAINS)
def test_killed_at_named_points(name: str, history: Callable[[Flags], History]) -> None:
    """Law: prompts skipped 0, repeated 0, whatever the run was doing when it was killed; and nothing of it is left."""
    flags, points = CHAINS[name]
    chain = history(flags)
    for number, point in enumerate(points):
        chain.kill(point, number)
    with chain.start() as run:
        assert run.wait() == 0, run.tail
    assert run.left() == [], "left after the end"
    chain.check_end(run)
    if "--fully-async" in flags:
        assert chain.num_kept_tokens > 0, "no checkpoint that was gone on from held work in progress"
