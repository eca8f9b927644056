"""The whole loop on the real engines: it learns, accounts for every prompt, agrees with its engine and cleans up.

The runs cover sync and async, colocated and decoupled, tensor, distributed and disk sync, DP 2 and TP 2
(`conftest.py`).
"""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.observability.samples import read_samples
from tests.support.e2e import NUM_STEPS, PROMPTS_PER_STEP, RealRun
from tests.support.ledger import require_balance
from tests.support.marks import quick
from tests.support.wandb_file import read_offline_run

MIN_RISE = 0.15
"""The mean reward of 64 samples has a standard error below 0.02 here; a random model gets 0.2, a perfect one 1.0."""
MAX_MISMATCH = 1e-5
"""Nats, on the worst token of a step. The engine alone agrees with transformers to 1e-6."""
LOUDNESS = 10
"""At the rate of these runs logits grow, and with them what float32 rounds: 2e-5 was seen. A wrong weight gives 0.1."""
MIN_TOKENS = 1000


def num_steps(run: RealRun) -> int:
    """As asked for."""
    return int(json.loads((run.run_dir / "args.json").read_text())["num_rollout"])


@pytest.mark.parametrize("name", quick(["plain_run", "colocated_run", "long_async_run"], "plain_run"))
def test_reward_rises(name: str, request: pytest.FixtureRequest) -> None:
    """Law: the loop learns, however it is placed and however its weights travel."""
    run: RealRun = request.getfixturevalue(name)
    rewards = run.series("rollout", "rollout/raw_reward")
    assert len(rewards) == NUM_STEPS, rewards
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + MIN_RISE, rewards


def test_run_leaves_a_report(any_run: RealRun) -> None:
    """Law: a run that ended well exits with 0 and leaves its settings, its metrics of every step and its report."""
    for name in ("run.json", "args.json", "report.md", "report.html", "report.png"):
        assert (any_run.run_dir / name).stat().st_size > 0, name
    for kind in ("rollout", "train"):
        assert sorted(any_run.metrics(kind)) == list(range(num_steps(any_run))), kind


def test_samples_of_every_step_can_be_read(any_run: RealRun) -> None:
    """Law: of each step people see the best, the worst and another sample, with the reward that was trained on."""
    samples = [s for s in read_samples(any_run.run_dir / "samples.jsonl") if s.kind == "rollout"]
    for step, row in any_run.metrics("rollout").items():
        of_step = {s.picked: s for s in samples if s.step == step}
        assert sorted(of_step) == ["best", "random", "worst"], step
        best, worst = of_step["best"].reward, of_step["worst"].reward
        assert best is not None and worst is not None and worst <= row["rollout/raw_reward"] <= best, step
        assert all(s.prompt and s.response and s.finish_reason for s in of_step.values()), step
        version = row["rollout/weight_version/max"]
        assert {s.weight_version for s in of_step.values()} == {version}, step


def test_ledger_balances(any_run: RealRun) -> None:
    """Law: after every step each prompt ever issued is trained, filtered, failed, buffered or in flight."""
    require_balance(any_run.metrics("train"))
    for step, row in any_run.metrics("train").items():
        assert row["data/trained"] == (step + 1) * PROMPTS_PER_STEP, (step, row)
    last = any_run.metrics("train")[num_steps(any_run) - 1]
    assert last["data/in_flight"] == 0, "prompts were issued that no step trained"


def test_every_sample_has_one_version(any_run: RealRun) -> None:
    """Law: step k trains samples of version k + 1 when synchronous, one older when a step ahead; never a mixture."""
    settings = json.loads((any_run.run_dir / "run.json").read_text())["starts"][-1]["command"]
    behind = 1 if "train-async" in settings else 0
    for step, row in any_run.metrics("rollout").items():
        expected = max(1, step + 1 - behind)
        assert row["rollout/weight_version/min"] == row["rollout/weight_version/max"] == expected, (step, row)


@pytest.mark.parametrize("name", quick(["plain_run", "colocated_run"], "plain_run"))
def test_trainer_and_engine_agree(name: str, request: pytest.FixtureRequest) -> None:
    """Law: in float32 the worst of some 1,000 sampled tokens is 1e-5 nats off at most, at step 0 and ten updates on.

    How many there are in a step is chance: the model ends its responses itself.
    """
    run: RealRun = request.getfixturevalue(name)
    tokens = run.series("rollout", "rollout/response_tokens")
    gaps = run.series("train", "train/train_rollout_logprob_abs_diff_max")
    stale = run.series("train", "train/stale_tokens")
    updates = run.series("train", "train/num_updates")
    assert sum(updates[:-1]) >= 10, updates
    assert tokens[0] >= MIN_TOKENS and sum(tokens) / len(tokens) >= MIN_TOKENS, tokens
    assert max(stale) == 0, stale
    assert len(gaps) == NUM_STEPS and gaps[0] <= MAX_MISMATCH and max(gaps) <= LOUDNESS * MAX_MISMATCH, gaps


@pytest.mark.slow
def test_async_gap_is_told_apart_from_staleness(async_run: RealRun) -> None:
    """Law: tokens of an older version have a figure of their own and cannot hide in, or trip, the limit on the gap."""
    rows = async_run.metrics("train")
    tokens = async_run.series("rollout", "rollout/response_tokens")
    assert rows[0]["train/stale_tokens"] == 0 and rows[0]["train/train_rollout_logprob_abs_diff_max"] <= MAX_MISMATCH, (
        rows[0]
    )
    for step in range(1, num_steps(async_run)):
        assert rows[step]["train/stale_tokens"] == tokens[step], (step, rows[step])
        assert "train/train_rollout_logprob_abs_diff_max" not in rows[step], (step, rows[step])
        assert rows[step]["train/train_rollout_logprob_abs_diff_stale"] > MAX_MISMATCH, (step, rows[step])


@pytest.mark.slow
def test_async_trainer_and_engine_agree(async_run: RealRun) -> None:
    """Law: where every batch is older than the trainer, each published version is compared on samples of its own."""
    gaps = async_run.series("perf", "probe/train_rollout_logprob_abs_diff_max")
    assert len(gaps) == num_steps(async_run), gaps
    assert gaps[0] <= MAX_MISMATCH and max(gaps) <= LOUDNESS * MAX_MISMATCH, gaps
    own = {name for row in async_run.metrics("perf").values() for name in row if name.startswith("train/")}
    assert own <= {"train/step"}, f"a probe took the names of the batch: {own}"


def test_views_hold_every_step_and_end_as_finished(plain_run: RealRun) -> None:
    """Law: W&B and TensorBoard have the numbers of the record, and no view is ended before it was closed."""
    losses = plain_run.series("train", "train/loss")
    sent = read_offline_run(plain_run.run_dir)
    assert sent.exit_code == 0, "the guardian was faster than W&B"
    assert [row["train/loss"] for row in sent.history if "train/loss" in row] == losses
    events = EventAccumulator(str(plain_run.run_dir / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in shown] == list(range(NUM_STEPS))
    assert [value for _, value in shown] == pytest.approx(losses, rel=1e-6)
    assert "Traceback" not in plain_run.output, plain_run.tail


def test_the_start_is_told_by_phase_and_is_in_no_step(any_run: RealRun) -> None:
    """Law: the console says what the start does; its times are in the first row alone, beside those of the step."""
    rows = any_run.metrics("perf")
    starts = {step: {n for n in row if n.startswith("startup/")} for step, row in rows.items()}
    assert {"startup/engines_time", "startup/trainers_time", "startup/update_weights_time"} <= starts[0]
    assert not any(starts[step] for step in range(1, len(rows))), starts
    log = (any_run.run_dir / "logs" / "driver.log").read_text()
    for said in (
        "engines are up",
        "training ranks have loaded the model",
        f"train  step {len(rows) - 1} of 0..{num_steps(any_run) - 1}",
    ):
        assert said in log and said in any_run.output, said


def test_others_get_at_nothing(any_run: RealRun) -> None:
    """Law: another user of the host, or another host, reads and reaches nothing of a run without its keys, but for what
    `tests.support.openness` lists with reasons: sockets, files, environments and command lines of all its processes."""
    any_run.require_closed()


def test_normal_end_leaves_nothing(any_run: RealRun) -> None:
    """Law: after a normal end there is no process, port, shared-memory file or temporary folder of the run."""
    assert any_run.left() == []
