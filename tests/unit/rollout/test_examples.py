"""The examples run as they are, on a fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from examples import brief_reward, learnable_groups, small_hooks, stop_early
from slime.core.sample import Sample, Status
from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

EVERYWHERE = (
    *("--custom-generate-function-path", "examples.second_try:generate"),
    *("--custom-rm-path", "examples.small_hooks:team_reward", "--group-rm"),
    *("--rollout-function-path", "examples.small_hooks:rollout"),
    *("--rollout-sample-filter-path", "examples.small_hooks:drop_truncated"),
    *("--rollout-all-samples-process-path", "examples.small_hooks:log_longest"),
    *("--custom-rollout-log-function-path", "examples.small_hooks:log_step"),
)


@pytest.mark.parametrize(
    "more",
    [
        (
            *("--custom-convert-samples-to-train-data-path", "examples.small_hooks:convert"),
            *("--buffer-filter-path", "examples.small_hooks:newest_first"),
        ),
        (
            *("--custom-reward-post-process-path", "examples.small_hooks:clip_rewards"),
            *("--data-source-path", "examples.small_hooks:CountingSource"),
        ),
    ],
)
def test_a_step_with_all_of_them(more: tuple[str, ...], tmp_path: Path) -> None:
    args = rollout_args(tmp_path, *EVERYWHERE, *more)

    async def work(manager: RolloutManager) -> Any:
        batch, metrics = await manager.generate(0)
        return batch, metrics, manager.commit(0)

    batch, metrics, ledger = asyncio.run(with_manager(args, FakeEngine(), work))
    assert len(batch.samples) == 8 and metrics["rollout/from_example"] == 1.0 and ledger["data/trained"] == 4
    assert all(0.0 <= s.reward <= 1.0 for s in batch.samples)


def test_the_brief_reward_prefers_the_shorter_right_answer() -> None:
    short, long, wrong = (
        brief_reward.reward(None, Sample(response=text, label="12")) for text in ("12", "well, " * 99 + "12", "2")
    )
    assert short > long >= 0.8 and wrong == 0.0


def test_only_groups_between_too_hard_and_too_easy_are_kept() -> None:
    class Settings:
        reward_key = None

    def verdict(*rewards: float) -> Any:
        samples = [Sample(index=i, reward=r, status=Status.COMPLETED) for i, r in enumerate(rewards)]
        return learnable_groups.keep(Settings(), samples)

    assert (verdict(0, 0).reason, verdict(1, 1).reason, verdict(0, 1).keep) == ("too_hard", "too_easy", True)


def test_an_answer_ends_where_the_function_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_early, "END", "D")  # the fake engine says ABCDEFGH, a letter per token
    engine = FakeEngine(tick_s=0.002)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[0]

    args = rollout_args(tmp_path, "--custom-generate-function-path", "examples.stop_early:generate")
    batch = asyncio.run(with_manager(args, engine, work))
    assert [s.response_length for s in batch.samples] == [4] * 8
    assert sorted(engine.aborted) == sorted(request["rid"] for request in engine.requests)


def test_a_continued_answer_keeps_its_limit(tmp_path: Path) -> None:
    args = rollout_args(
        tmp_path, "--custom-generate-function-path", "examples.stop_early:generate", "--partial-rollout"
    )
    engine = FakeEngine()

    async def work(manager: RolloutManager) -> Any:
        for group in (groups := manager._source.get_groups(4)):
            for sample in group.samples:
                sample.append_response_tokens([10, 11], log_probs=[-1.0, -1.0], weight_version=1, finish_reason="abort")
        manager._source.put_back(groups, "aborted")
        return (await manager.generate(0))[0]

    batch = asyncio.run(with_manager(args, engine, work))
    assert [s.response_length for s in batch.samples] == [8] * 8
    assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {6}


def test_the_whole_step_is_seen_dropped_groups_included(tmp_path: Path) -> None:
    seen = tmp_path / "seen.py"
    seen.write_text(
        "COUNTS = []\n"
        "def count(args, all_groups, data_source):\n    COUNTS.append(len(all_groups))\n"
        "def drop_odd(args, samples):\n    return samples[0].group_index % 2 == 0\n"
    )
    flags = (
        "--rollout-all-samples-process-path",
        f"{seen}:count",
        "--dynamic-sampling-filter-path",
        f"{seen}:drop_odd",
    )
    args = rollout_args(tmp_path, *flags)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[1]

    metrics = asyncio.run(with_manager(args, FakeEngine(), work))
    from slime.settings.hook_contracts import load_hook

    (count,) = load_hook(f"{seen}:count", "all_samples").__globals__["COUNTS"]
    assert count == 4 + metrics["rollout/num_filtered_groups"] > 4


def test_the_newest_group_goes_first_and_leaves_the_buffer() -> None:
    buffer = [[Sample(group_index=i)] for i in range(3)]
    taken = small_hooks.newest_first(None, 0, buffer, 2)
    assert [g[0].group_index for g in taken] == [2, 1] and [g[0].group_index for g in buffer] == [0]
