"""The rollout of a step: exactly the wanted groups, and an account of every other one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.core.errors import ConfigError, DataError, DeadlineExceeded, EngineError, HookError, LedgerError
from slime.core.sample import Sample
from slime.core.topology import DEFAULT_NAME
from slime.rollout.execute import mask_older
from slime.rollout.manager import RolloutManager
from slime.rollout.user_functions import load
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

pytestmark = pytest.mark.usefixtures("graders_here")

HOOKS = str(Path(__file__).with_name("rollout_hooks.py"))
REWARD = ("--custom-rm-path", f"{HOOKS}:reward")


def run(tmp_path: Path, *flags: str, steps: int = 1, engine: FakeEngine | None = None) -> Any:
    """Runs steps with commits; returns (batches, metrics of the last, buffer metrics of the last, engine)."""
    engine = engine or FakeEngine()

    async def work(manager: RolloutManager) -> Any:
        batches = []
        for step in range(steps):
            batch, metrics = await manager.generate(step)
            batches.append(batch)
            assert not engine.running, "a request outlived its rollout"
            ledger = manager.commit(step)
        return batches, metrics, ledger, engine

    return asyncio.run(with_manager(rollout_args(tmp_path, *flags), engine, work))


def test_a_step_trains_each_prompt_once_with_what_the_engine_sampled(tmp_path: Path) -> None:
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, steps=3, engine=FakeEngine(stop_after=4))
    assert [sorted({s.group_index for s in b.samples}) for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [s.index for b in batches for s in b.samples] == list(range(24))
    for sample in batches[0].samples:
        assert sample.tokens[-5:].tolist() == [10, 11, 12, 13, 1] and sample.response_length == 5
        assert sample.rollout_log_probs is not None and sample.rollout_log_probs[0] == pytest.approx(-0.5)
        assert sample.token_versions.tolist() == [1] * 5
        assert sample.reward == sample.index % 2 and not sample.truncated
    assert ledger["data/trained"] == 12 and ledger["data/issued"] == 12
    assert metrics["rollout/raw_reward"] == 0.5 and metrics["rollout/response_len/max"] == 5


@pytest.mark.parametrize("raises", ["another error", "nothing"])
def test_a_prompt_that_kills_engines_is_given_up_at_once_and_told_of(
    tmp_path: Path, raises: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: whatever user code makes of it, engines die three times of it and no oftener; the others are trained."""

    class Mortal(FakeEngine):
        """Dies of the first prompt that it gets; then its fleet gives it up, and has it again."""

        manager: RolloutManager
        deadly: list[int] | None = None
        deaths = 0

        async def generate(self, request: web.Request) -> web.StreamResponse:
            ids = (await request.json())["input_ids"]
            self.deadly = self.deadly or ids
            if ids == self.deadly:
                self.deaths += 1
                self.manager.dismiss(DEFAULT_NAME, [self.url], died=True)
                self.manager.admit(DEFAULT_NAME, [self.url])
            return await super().generate(request)

    own = tmp_path / "own.py"
    own.write_text(
        "from slime.core.errors import EngineError\n"
        "from slime.rollout.generate import generate as default\n"
        "async def generate(args, sample, sampling_params):\n"
        "    try:\n        return await default(args, sample, sampling_params)\n"
        f"    except EngineError as error:\n        {HANDLED[raises]}\n"
    )
    flags = ("--n-samples-per-prompt", "1", "--disable-rewards-normalization")
    more = ("--custom-generate-function-path", f"{own}:generate")
    engine = Mortal()

    async def work(manager: RolloutManager) -> Any:
        engine.manager = manager
        batch, metrics = await manager.generate(0)
        return batch, metrics, manager.commit(0)

    args = rollout_args(tmp_path, *REWARD, *flags, *more)
    batch, metrics, ledger = asyncio.run(with_manager(args, engine, work))
    assert engine.deaths == 3 and len(batch.samples) == 4 and ledger["data/failed"] == 1
    if raises == "nothing":
        return
    assert metrics["rollout/failed/deadly_engines_died_under_it"] == metrics["rollout/num_failed_groups"] == 1
    assert metrics.get("rollout/num_retried_groups", 0) == 0
    assert "dropping group 0 as failed: deadly: engines died under it" in caplog.text and "of group 0)" in caplog.text


HANDLED = {
    "another error": "raise RuntimeError('no answer') from error",
    "nothing": "sample.status = sample.Status.FAILED; return sample",
}
"""What a generate function does with the end of its request."""


@pytest.mark.parametrize(("surplus", "num_issued"), [(8, 9), (12, 14)])
def test_what_is_missing_is_issued_and_no_more(tmp_path: Path, surplus: int, num_issued: int) -> None:
    """A group that is given up costs its place, in the proportion that the settings ask for, not a whole round."""
    engine = FakeEngine()
    engine.faults.extend([400] * (1 + surplus - 8))  # so many are given up that one is missing
    flags = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "1", "--disable-rewards-normalization")
    more = ("--over-sampling-batch-size", str(surplus))
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, *flags, *more, engine=engine)
    assert len(batches[0].samples) == 8 and metrics["rollout/num_failed_groups"] == 1 + surplus - 8
    assert ledger["data/issued"] == num_issued


def test_surplus_is_started_over_and_nothing_is_lost(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.004)
    batches, _, ledger, engine = run(
        tmp_path,
        *REWARD,
        "--over-sampling-batch-size",
        "10",
        "--sglang-server-concurrency",
        "6",
        steps=4,
        engine=engine,
    )
    groups = [s.group_index for b in batches for s in b.samples[::2]]
    assert len(set(groups)) == 16
    assert all(s.response_length == 8 for b in batches for s in b.samples)
    assert ledger["data/trained"] == 16 and ledger["data/in_flight"] == 0
    assert ledger["data/issued"] == 16 + ledger["data/buffered"]
    assert engine.most_running <= 6 + 1, "more than the limit, and the marker of an abort"


@pytest.mark.parametrize("partial", [False, True])
def test_every_sample_is_of_its_steps_weights_without_partial_rollout(tmp_path: Path, partial: bool) -> None:
    engine = FakeEngine(tick_s=0.002)

    async def work(manager: RolloutManager) -> Any:
        batches, num_reset, num_surplus = [], 0.0, 0.0
        for step in range(4):
            engine.weight_version = str(step)
            engine.stops.extend([1] * 10 + [7] * 6)
            batch, metrics = await manager.generate(step)
            batches.append({int(v) for s in batch.samples for v in s.token_versions})
            num_reset += metrics["rollout/num_reset_groups"]
            num_surplus += metrics["rollout/num_surplus_groups"] + metrics["rollout/num_aborted_groups"]
            manager.commit(step)
        return batches, num_reset, num_surplus

    flags = (*REWARD, "--over-sampling-batch-size", "8", *(["--partial-rollout"] if partial else []))
    versions, num_reset, num_surplus = asyncio.run(with_manager(rollout_args(tmp_path, *flags), engine, work))
    assert num_surplus > 0, "nothing was left over, so nothing is tested"
    if partial:
        assert num_reset == 0 and any(step - 1 in seen for step, seen in enumerate(versions))
    else:
        assert versions == [{0}, {1}, {2}, {3}] and num_reset > 0


def test_a_generation_that_never_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"set sample\.status"):
        run(tmp_path, *REWARD, "--custom-generate-function-path", f"{HOOKS}:forgetful")
    with pytest.raises(EngineError, match="interrupted"):
        run(tmp_path, *REWARD, "--custom-generate-function-path", f"{HOOKS}:interrupted")


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "messages.jsonl"
    data.write_text('{"input": [{"role": "user", "content": "1<eos>"}], "label": "1"}\n')
    with pytest.raises(ConfigError, match="--apply-chat-template"):
        run(tmp_path, *REWARD, "--prompt-data", str(data))


def test_a_users_slow_function_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    turns = []

    async def work(manager: RolloutManager) -> None:
        task = asyncio.create_task(manager.generate(0))
        while not task.done():
            await asyncio.sleep(0.01)
            turns.append(time.monotonic())
        await task

    args = rollout_args(tmp_path, *REWARD, "--dynamic-sampling-filter-path", f"{HOOKS}:slow_filter")
    asyncio.run(with_manager(args, FakeEngine(), work))
    hook: Any = load(args.dynamic_sampling_filter_path, "dynamic_filter")
    calls = hook.__globals__["SLOW_CALLS"]
    assert any(began < turn < ended for began, ended in calls for turn in turns), "the loop stood still meanwhile"


def test_a_stop_iteration_out_of_a_users_function_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="leaking_filter"):
        run(tmp_path, *REWARD, "--dynamic-sampling-filter-path", f"{HOOKS}:leaking_filter")


def test_partial_rollout_continues_the_tokens_within_the_budget(tmp_path: Path) -> None:
    class SlowUntilAborted(FakeEngine):
        async def abort(self, request: web.Request) -> web.Response:
            self.tick_s = 0.0
            return await super().abort(request)

    engine = SlowUntilAborted(tick_s=0.3)
    engine.stops.extend([2] * 8)
    flags = ("--over-sampling-batch-size", "8", "--rollout-max-response-len", "60", "--partial-rollout")
    batches, _, ledger, engine = run(tmp_path, *REWARD, *flags, steps=2, engine=engine)
    continued = [r for r in engine.requests if r["sampling_params"]["max_new_tokens"] < 60]
    assert len(continued) >= 8, "partial samples were not continued"
    assert [s.response_length for b in batches for s in b.samples] == [3] * 8 + [60] * 8
    for request in continued:  # the prompt of a continuation ends with the tokens sampled before
        assert request["input_ids"][-1] >= 10
    assert ledger["data/trained"] == 8


def test_failures_are_retried_and_never_scored_zero(tmp_path: Path) -> None:
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, "--custom-generate-function-path", f"{HOOKS}:flaky")
    assert len(batches[0].samples) == 8 and metrics["rollout/num_retried_groups"] >= 2
    assert ledger["data/trained"] == 4 and ledger["data/failed"] == 0
    assert [s.reward for s in batches[0].samples] == [0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("error", "steps", "kind"), [("RuntimeError", 1, "failed"), ("DeadlineExceeded", 3, "quarant")]
)
def test_a_group_that_only_fails_is_tried_three_times(tmp_path: Path, error: str, steps: int, kind: str) -> None:
    """Law: each execution of it, in one step, or once in each of three where it stood still; then it is given up."""
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.core.errors import DeadlineExceeded\n"
        "from slime.rollout.generate import generate as default\n"
        "TRIES = []\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.group_index == 1:\n"
        "        TRIES.append(sample.index)\n"
        f"        raise {error}('as told')\n"
        "    return await default(args, sample, sampling_params)\n"
    )
    hook = ("--custom-generate-function-path", f"{own}:generate")
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, *hook, steps=steps)
    tries: Any = load(f"{own}:generate", "generate")
    assert sorted(tries.__globals__["TRIES"]) == [2, 2, 2, 3, 3, 3]
    returned = sum(num for name, num in ledger.items() if name.startswith(f"data/returned/{kind}"))
    assert ledger["data/failed"] == metrics["rollout/num_failed_groups"] == 1 and returned == 2
    assert 1 not in {s.group_index for batch in batches for s in batch.samples}


def test_a_step_that_only_fails_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the sandbox is down"):
        run(tmp_path, "--custom-generate-function-path", f"{HOOKS}:broken")


@pytest.mark.parametrize("fault", [502, 503, 504, "drop"])
def test_while_no_engine_can_be_reached_a_step_waits_and_no_try_is_spent(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.client.engine_pool.FIRST_COOLDOWN_S", 0.01)
    monkeypatch.setattr("slime.rollout.client.engine_pool.LONGEST_COOLDOWN_S", 0.02)
    engine = FakeEngine()
    engine.faults.extend([fault] * 30)
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, engine=engine)
    assert len(batches[0].samples) == 8 and not engine.faults
    assert metrics["rollout/num_retried_groups"] == metrics["rollout/num_quarantined_groups"] == 0
    assert ledger["data/issued"] == 4 and ledger["data/failed"] == 0


def test_a_fleet_that_stays_away_ends_the_step_with_the_limit_that_was_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.rollout.client.engine_pool.LONGEST_COOLDOWN_S", 0.02)
    engine = FakeEngine()
    engine.faults.extend([503] * 100_000)
    with pytest.raises(EngineError, match="--engine-wait-s"):
        run(tmp_path, *REWARD, "--engine-wait-s", "1", engine=engine)


def test_an_unscored_group_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nan"):
        run(tmp_path, "--custom-rm-path", f"{HOOKS}:nan_reward")


def test_a_refused_prompt_is_dropped_without_a_retry(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.faults.append(400)
    batches, metrics, ledger, engine = run(tmp_path, *REWARD, engine=engine)
    assert len({s.group_index for s in batches[0].samples}) == 4
    assert ledger["data/failed"] == 1 and metrics["rollout/num_failed_groups"] == 1


def test_the_filter_drops_and_is_bounded(tmp_path: Path) -> None:
    batches, metrics, ledger, _ = run(tmp_path, *REWARD, "--dynamic-sampling-filter-path", f"{HOOKS}:drop_odd")
    assert [s.group_index for s in batches[0].samples[::2]] == [0, 2, 4, 6]
    assert metrics["rollout/dynamic_filter/drop_filter"] == ledger["data/filtered"] >= 3
    with pytest.raises(DataError, match="the dynamic filter dropped 128 groups"):
        run(tmp_path, *REWARD, "--dynamic-sampling-filter-path", f"{HOOKS}:drop_all")


def test_a_dynamic_filter_gets_numbers_alone(tmp_path: Path) -> None:
    """Law: an execution that no grader could score is no reason for a filter of the user to fail."""
    own = ("--custom-rm-path", f"{HOOKS}:one_unscored", "--dynamic-sampling-filter-path", f"{HOOKS}:keep_some_right")
    batches, metrics, *_ = run(tmp_path, *own, "--n-samples-per-prompt", "4")
    assert len(batches[0].samples) == 16 and metrics["rollout/num_unscored_samples"] == 4


def test_the_zero_std_filter_compares_exactly(tmp_path: Path) -> None:
    path = "slime.rollout.filters.check_reward_nonzero_std"
    batches, *_ = run(tmp_path, *REWARD, "--dynamic-sampling-filter-path", path)
    assert len(batches[0].samples) == 8
    with pytest.raises(DataError, match="zero_std_2"):
        flags = ("--custom-rm-path", f"{HOOKS}:group_reward", "--group-rm")
        run(tmp_path, *flags, "--dynamic-sampling-filter-path", path)


def test_fan_out_siblings_share_their_execution(tmp_path: Path) -> None:
    batches, *_ = run(tmp_path, *REWARD, "--custom-generate-function-path", f"{HOOKS}:fan_out")
    assert len(batches[0].samples) == 16 and batches[0].num_executions == 8
    assert [s.index for s in batches[0].samples] == [i for i in range(8) for _ in range(2)]


def test_a_hook_that_breaks_its_contract_ends_the_run_and_returns_the_groups(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> None:
        with pytest.raises(HookError, match="must return a Sample"):
            await manager.generate(0)
        ledger = manager._source.ledger()
        ledger.check()
        assert ledger.in_flight == 0 and ledger.buffered == ledger.issued

    args = rollout_args(tmp_path, "--custom-generate-function-path", f"{HOOKS}:wrong")
    asyncio.run(with_manager(args, FakeEngine(), work))


def test_a_step_has_a_limit(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.faults.extend(["hang"] * 99)
    with pytest.raises(DeadlineExceeded, match="rollout of step 0"):
        run(tmp_path, *REWARD, "--rollout-global-timeout-s", "2", engine=engine)
    assert len(engine.aborted) >= 1


def test_cancelling_a_rollout_aborts_its_requests_and_returns_its_groups(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.01)

    async def work(manager: RolloutManager) -> None:
        task = asyncio.create_task(manager.generate(0))
        while len(engine.running) < 8:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.running:
            await asyncio.sleep(0.01)
        assert manager._source.ledger().in_flight == 0
        batch, _ = await manager.generate(0)
        assert len(batch.samples) == 8

    args = rollout_args(tmp_path, *REWARD, "--rollout-max-response-len", "100")
    asyncio.run(with_manager(args, engine, work))


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> None:
        await manager.generate(0)
        manager.commit(0)
        with pytest.raises(LedgerError):
            manager.commit(0)

    asyncio.run(with_manager(rollout_args(tmp_path, *REWARD), FakeEngine(), work))


def test_a_save_between_generation_and_commit_issues_the_batch_again(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, *REWARD)

    async def first(manager: RolloutManager) -> None:
        await manager.generate(0)
        manager.commit(0)
        await manager.generate(1)
        await manager.save(tmp_path)

    async def resumed(manager: RolloutManager) -> Any:
        manager.load(tmp_path)
        return (await manager.generate(1))[0]

    asyncio.run(with_manager(args, FakeEngine(), first))
    batch = asyncio.run(with_manager(args, FakeEngine(), resumed))
    assert sorted({s.group_index for s in batch.samples}) == [4, 5, 6, 7]


def test_a_users_rollout_function_keeps_the_ledger(tmp_path: Path) -> None:
    batches, metrics, ledger, _ = run(tmp_path, "--rollout-function-path", f"{HOOKS}:own_rollout")
    assert metrics["rollout/own"] == 1.0 and len(batches[0].samples) == 4
    assert ledger["data/trained"] == 2 and ledger["data/filtered"] == 1


def test_rewards_can_be_post_processed(tmp_path: Path) -> None:
    batches, *_ = run(tmp_path, *REWARD, "--custom-reward-post-process-path", f"{HOOKS}:halve")
    assert {s.reward for s in batches[0].samples} == {0.0, 0.5}


def test_recorded_rollouts_replay_exactly(tmp_path: Path) -> None:
    template = str(tmp_path / "dump" / "{rollout_id}.jsonl.zst")
    batches, *_ = run(tmp_path, *REWARD, "--save-debug-rollout-data", template, steps=2)
    record = {path: path.read_bytes() for path in (tmp_path / "dump").iterdir()}
    again_there = ["--save-debug-rollout-data", template, "--load-debug-rollout-data", template]
    args = rollout_args(tmp_path, *REWARD, *again_there)

    async def replay() -> Any:
        manager = RolloutManager(args, engines=None)
        try:
            return [(await manager.generate(i))[0] for i in range(2)]
        finally:
            await manager.close()

    for recorded, again in zip(batches, asyncio.run(replay()), strict=True):
        for a, b in zip(recorded.samples, again.samples, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.reward == b.reward
            assert a.rollout_log_probs is not None and b.rollout_log_probs is not None
            assert a.rollout_log_probs.tobytes() == b.rollout_log_probs.tobytes()
    half = rollout_args(tmp_path, *REWARD, *again_there, "--load-debug-rollout-data-subsample", "0.5")
    asyncio.run(with_manager(half, FakeEngine(), lambda manager: manager.generate(0)))
    assert {path: path.read_bytes() for path in (tmp_path / "dump").iterdir()} == record, "a replay writes no rollouts"


def test_only_what_the_newest_weights_sampled_is_trained() -> None:
    """Also within one request that lived through a weight sync; a tool's words stay masked."""
    sample = Sample(tokens=[9] * 6, response_length=5, loss_mask=[1, 1, 0, 1, 0], token_versions=[1, 2, -1, 2, 2])
    mask_older(sample)
    assert sample.loss_mask == [0, 1, 0, 1, 0]
    fresh = Sample(tokens=[9, 9, 9], response_length=2, token_versions=[3, 3])
    mask_older(fresh)
    assert fresh.loss_mask == [1, 1]
