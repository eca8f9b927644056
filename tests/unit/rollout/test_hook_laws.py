"""Sample hooks, filters that give way, siblings, and groups that never answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import ConfigError, EngineError, HookError
from slime.core.sample import Group, Sample, Status
from slime.rollout.filters import check_reward_nonzero_std_with_fallback, rewards_by_execution
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import load_rollout
from slime.rollout.user_functions import call_generate, call_sample_hooks
from slime.settings.hook_contracts import check_hooks, load_hook
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

PROBE = "tests.support.probe_hooks"
REWARD = ("--custom-generate-function-path", f"{PROBE}:single")


def settings(*paths: str) -> SimpleNamespace:
    return SimpleNamespace(rollout_sample_hook_path=paths)


def test_the_flag_is_repeatable_and_each_path_is_checked(tmp_path: Path) -> None:
    paths = (f"{PROBE}:own_reward", f"{PROBE}.another_sample")
    flags = [word for path in paths for word in ("--rollout-sample-hook-path", path)]
    args = rollout_args(tmp_path, *flags)
    assert args.rollout_sample_hook_path == paths
    check_hooks(args)
    with pytest.raises(HookError, match=r"rollout-sample-hook-path.*cannot be called"):
        check_hooks(rollout_args(tmp_path, *flags, "--rollout-sample-hook-path", f"{PROBE}:single"))


def test_built_in_rollouts_are_known_by_both_spellings(tmp_path: Path) -> None:
    for module in ("loop", "sft"):
        args = rollout_args(tmp_path, "--rollout-function-path", f"slime.rollout.{module}:generate_rollout")
        assert args.rollout_function_path == f"slime.rollout.{module}.generate_rollout"


def test_siblings_train_in_an_asynchronous_run(tmp_path: Path) -> None:
    generate = ("--custom-generate-function-path", f"{PROBE}:fan_out")
    args = rollout_args(tmp_path, "--fully-async", *generate, synchronous=False)

    engine = FakeEngine()

    async def work(manager: RolloutManager) -> Any:
        batches = []
        for step in range(3):
            batches.append((await manager.generate(step))[0])
            manager.commit(step)
            engine.weight_version = str(step + 2)
        return batches

    batches = asyncio.run(with_manager(args, engine, work))
    executions = [s.index for batch in batches for s in batch.samples]
    assert len(executions) == 72 and {executions.count(i) for i in executions} == {3}
    assert all(batch.num_executions == 8 for batch in batches)


def test_sample_hooks_run_in_order_and_keep_the_identity() -> None:
    paths = (f"{PROBE}:own_reward", f"{PROBE}:another_sample")
    sample = Sample(group_index=3, index=7, tokens=[1])
    out = asyncio.run(call_sample_hooks(settings(*paths), sample, rollout_id=2, evaluation=False))
    assert (out.group_index, out.index, out.reward, out.metadata) == (3, 7, 13.0, {"reward_was": 3.0})


def test_a_sample_hook_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def hook(args, sample): return 1.0\n")
    with pytest.raises(HookError, match="must return a Sample or None"):
        asyncio.run(call_sample_hooks(settings(f"{file}:hook"), Sample(), rollout_id=0, evaluation=False))


def test_a_partial_of_an_async_function_is_async(tmp_path: Path) -> None:
    file = tmp_path / "parts.py"
    file.write_text(
        "import functools\nasync def full(args, sample, sampling_params, extra): return sample\n"
        "short = functools.partial(full, extra=1)\n"
    )
    assert load_hook(f"{file}:short", "generate").keywords == {"extra": 1}  # type: ignore[attr-defined]


def test_a_nest_is_one_execution_and_its_samples_are_different_objects() -> None:
    async def nested(args: Any, sample: Sample, params: Any) -> Any:
        return [[sample], (Sample(), [Sample()])]

    async def twice(args: Any, sample: Sample, params: Any) -> Any:
        return [[sample], [sample]]

    sample = Sample(group_index=1, index=5)
    out = asyncio.run(call_generate(nested, None, sample, {}, evaluation=False))
    assert [(s.group_index, s.index) for s in out] == [(1, 5)] * 3
    with pytest.raises(HookError, match="twice"):
        asyncio.run(call_generate(twice, None, sample, {}, evaluation=False))


def test_siblings_made_outside_share_an_execution() -> None:
    buffer = DataBuffer(None)
    buffer.add_samples([[[Sample(), Sample()], Sample()]])
    (group,) = buffer.get_groups(1)
    assert [s.index for s in group.samples] == [0, 0, 1] and group.num_executions == 2
    assert [s.index for s in buffer.get_groups(1)[0].samples] == [2]


def test_the_mean_of_siblings_is_the_reward_of_their_execution() -> None:
    samples = [Sample(index=i, reward=r) for i, r in ((0, 1.0), (0, 0.0), (1, 0.5), (2, None))]
    assert rewards_by_execution(samples, None) == [0.5, 0.5]
    verdict = check_reward_nonzero_std_with_fallback(SimpleNamespace(reward_key=None), samples)
    assert (verdict.keep, verdict.reason, verdict.keep_when_insufficient) == (False, "zero_std_0.5", True)


def test_a_filter_that_gives_way_draws_no_other_prompt(tmp_path: Path) -> None:
    """Half of the prompts have no difference: with four to spare they are dropped, without they stay."""
    path = "slime.rollout.filters:check_reward_nonzero_std_with_fallback"
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime.rollout.generate import generate as g\n"
        "async def half(args, sample, sampling_params):\n"
        "    await g(args, sample, sampling_params)\n"
        "    sample.reward = float(sample.group_index % 2 * sample.index % 2)\n"
        "    return sample\n"
    )
    flags = ("--custom-generate-function-path", f"{file}:half", "--dynamic-sampling-filter-path", path)

    def issued_and_dropped(*more: str) -> tuple[float, float]:
        async def work(manager: RolloutManager) -> Any:
            batch, metrics = await manager.generate(0)
            assert len(batch.samples) == 8
            return metrics["rollout/num_filtered_groups"]

        async def main(manager: RolloutManager) -> Any:
            return await work(manager), manager.commit(0)["data/issued"]

        return asyncio.run(with_manager(rollout_args(tmp_path, *flags, *more), FakeEngine(), main))

    assert issued_and_dropped() == (0, 4)
    dropped, issued = issued_and_dropped("--over-sampling-batch-size", "8")
    assert 0 < dropped <= 4 and issued == 8


class SilentEngine(FakeEngine):
    """Never answers the first prompt; says everything else at once."""

    silent_on: tuple[int, ...] = ()

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if not self.silent_on:
            self.silent_on = tuple(body["input_ids"])
        if tuple(body["input_ids"]) == self.silent_on:
            await stop.wait()
        return await super()._sample(body, stop)


class OneSilentRequest(FakeEngine):
    """Never answers its first request."""

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if body is self.requests[0]:
            await stop.wait()
        return await super()._sample(body, stop)


def silent_group(manager: RolloutManager, engine: FakeEngine) -> int:
    """The group of the engine's first request; which one comes first is chance. The prompt of group i is `i+i=`."""
    text = manager._tokenizer.decode(engine.requests[0]["input_ids"])
    return int(text.partition("+")[0].removeprefix("<bos>"))


def test_a_group_that_never_answers_is_quarantined_and_survives_a_resume(tmp_path: Path) -> None:
    sixty_four = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "8")
    args = rollout_args(tmp_path, *REWARD, *sixty_four, "--request-timeout-s", "5")
    engine = OneSilentRequest()

    async def first(manager: RolloutManager) -> Any:
        batch, metrics = await manager.generate(0)
        assert metrics["rollout/num_quarantined_groups"] == 1 and metrics["rollout/num_failed_groups"] == 0
        ledger = manager.commit(0)
        assert ledger["data/returned/quarantined"] == 1 and ledger["data/buffered"] == 1, "one came in its place"
        await manager.save(tmp_path)
        return {s.group_index for s in batch.samples}, silent_group(manager, engine)

    async def resumed(manager: RolloutManager) -> Any:
        manager.load(tmp_path)
        batch, _ = await manager.generate(1)
        assert manager.commit(1)["data/buffered"] == 0
        return {s.group_index for s in batch.samples}

    trained, silent = asyncio.run(with_manager(args, engine, first))
    assert len(trained) == 8 and silent not in trained, "the others train"
    first_prompt = engine.requests[0]["input_ids"]
    assert sum(r["input_ids"] == first_prompt for r in engine.requests) == 8, "not issued again in its step"
    saved = json.loads((tmp_path / "data_buffer.json").read_text())
    assert silent in [g["group_index"] for g in saved["buffered"]]
    assert asyncio.run(with_manager(args, FakeEngine(), resumed)) == set(range(16)) - trained


def test_metadata_is_the_users_whatever_its_keys(tmp_path: Path) -> None:
    """Law: what slime knows of a sample is in fields of its own; a row may call its columns as it likes."""
    own = {"failure": "an example", "unscored": True, "quarantined": 7}
    data = tmp_path / "named.jsonl"
    rows = [{"input": f"{i}+{i}=", "label": "0", "metadata": own} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = FakeEngine()
    engine.faults.extend([500, 500, 500])  # some tries fail
    kept = str(tmp_path / "{rollout_id}.jsonl.zst")
    args = rollout_args(tmp_path, "--prompt-data", str(data), "--save-debug-rollout-data", kept)

    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    batch, metrics = asyncio.run(with_manager(args, engine, work))
    _, groups = load_rollout(Path(kept.format(rollout_id=0)))
    assert len(batch.samples) == 8 and metrics["rollout/num_unscored_samples"] == 0
    assert all(s.metadata == own and s.num_quarantined == 0 for group in groups for s in group)


def test_an_asynchronous_run_quarantines_as_well(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, *REWARD, "--fully-async", "--request-timeout-s", "5", synchronous=False)
    engine = OneSilentRequest()

    def quarantined(manager: RolloutManager) -> list[int]:
        """Groups that wait for the next step, and would be known as what they are after a resume."""
        held = [g for g in manager._source.state_dict()["in_flight"] if g["group"] is not None]
        return [g["group_index"] for g in held if g["group"]["samples"][0]["num_quarantined"] == 1]

    async def work(manager: RolloutManager) -> None:
        trained: set[int] = set()
        for step in range(9):
            batch, _ = await manager.generate(step)
            trained |= {s.group_index for s in batch.samples}
            ledger = manager.commit(step)
            if step == 0:
                async with asyncio.timeout(60):
                    while not (held := quarantined(manager)):
                        await asyncio.sleep(0.02)
                assert held == [silent_group(manager, engine)] and not trained & set(held)
            elif trained & set(held):
                assert ledger["data/returned/quarantined"] == 1
                return
            engine.weight_version = str(step + 2)  # as synced; else everything would soon be stale
            await asyncio.sleep(0.1)
        raise AssertionError("the quarantined group was never issued again")

    asyncio.run(with_manager(args, engine, work))


@pytest.mark.slow
def test_a_group_that_never_answers_in_any_step_is_given_up(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, *REWARD, "--request-timeout-s", "3")  # the others answer sooner, on any machine

    async def work(manager: RolloutManager) -> Any:
        for step in range(3):
            await manager.generate(step)
            ledger = manager.commit(step)
        return ledger

    ledger = asyncio.run(with_manager(args, SilentEngine(), work))
    assert ledger["data/failed"] == 1 and ledger["data/returned/quarantined"] == 2 and ledger["data/trained"] == 12


def test_engines_that_never_answer_end_the_step(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.faults.extend(["hang"] * 99)

    async def work(manager: RolloutManager) -> None:
        with pytest.raises(EngineError, match="5 groups failed"):
            await manager.generate(0)
        manager._source.ledger().check()
        assert manager._source.ledger().buffered == manager._source.ledger().issued

    asyncio.run(with_manager(rollout_args(tmp_path, *REWARD, "--request-timeout-s", "0.3"), engine, work))


def test_a_fan_out_group_goes_through_json_unchanged() -> None:
    samples = [Sample(group_index=0, index=i // 2, reward=float(i), status=Status.COMPLETED) for i in range(4)]
    buffer = DataBuffer(None, n_samples_per_prompt=2)
    buffer.get_groups(1)
    buffer.put_back([Group(0, tuple(samples))], "surplus")
    again = DataBuffer(None, n_samples_per_prompt=2)
    again.load_state_dict(buffer.state_dict())
    assert [(s.index, s.reward) for s in again.get_groups(1)[0].samples] == [(s.index, s.reward) for s in samples]


HALF = """
def every(args, sample):
    sample.reward = float(sample.index % 2)

def some(args, sample):
    sample.reward = 1.0 if sample.index % 2 else None
"""


def test_a_run_whose_hook_gives_every_reward_needs_no_grader(tmp_path: Path) -> None:
    """A sample that comes without a reward all the same ends the run with a sentence."""
    file = tmp_path / "hook.py"
    file.write_text(HALF)

    def batch_of(hook: str) -> Any:
        args = rollout_args(tmp_path, "--rm-type", "none", "--rollout-sample-hook-path", f"{file}:{hook}")

        async def work(manager: RolloutManager) -> Any:
            return (await manager.generate(0))[0]

        return asyncio.run(with_manager(args, FakeEngine(), work))

    rewards = {s.index: s.reward for s in batch_of("every").samples}
    assert len(rewards) == 8 and all((reward > 0) == bool(index % 2) for index, reward in rewards.items())
    with pytest.raises(ConfigError, match=r"sample \d+ has no reward and no grader is set for it; .* in every case"):
        batch_of("some")
    with pytest.raises(ConfigError, match=r"nothing would score the samples; .* or set sample.reward in"):
        rollout_args(tmp_path, "--rm-type", "none")
