"""Each hook of docs/customization.md through the real loop on the real engine, with single samples and with fan-out.

Where its effect can be seen the hook is the documented example itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.core.batch import TrainBatch
from slime.core.errors import DataError, HookError
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from slime.rollout.manager import RolloutManager
from slime.settings.hook_contracts import CONTRACTS
from tests.support.engine_parity import one_rank
from tests.support.marks import quick
from tests.support.rollout import rollout_args, write_prompts

PROBE = "tests.support.probe_hooks"
MODES = ("single", "fan_out")
SIBLINGS = {"single": 1, "fan_out": 3}


@dataclass
class Seen:
    """What a step with a hook gave."""

    batch: TrainBatch
    metrics: dict[str, float]
    log: str

    @property
    def rewards(self) -> list[float]:
        return [s.reward for s in self.batch.samples]


def run(
    front: Any, engine_server: Any, tmp_path: Path, work: Callable[[RolloutManager], Awaitable[Any]], *flags: str
) -> Any:
    """`work` on a manager before the real engine: 2 prompts of 2 executions per step, 8 tokens each."""
    small = ("--hf-checkpoint", str(engine_server.model_path), "--rollout-batch-size", "2")
    args = rollout_args(tmp_path, *small, *flags)

    async def main() -> Any:
        manager = RolloutManager(args, engines=[front.url])
        try:
            return await work(manager)
        finally:
            manager._source.ledger().check()
            await manager.close()

    return asyncio.run(main())


def _drops_the_unsolved(seen: Seen) -> bool:
    kept = {s.group_index for s in seen.batch.samples}
    return 0 not in kept and seen.metrics["rollout/dynamic_filter/drop_too_hard"] >= 1


EXAMPLE = "examples.small_hooks"
STEP: dict[str, tuple[tuple[str, ...], Callable[[Seen], bool]]] = {
    "rollout": (("--rollout-function-path", f"{EXAMPLE}:rollout"), lambda s: s.metrics["rollout/from_example"] == 1.0),
    "sample_hook": (
        ("--rollout-sample-hook-path", f"{PROBE}:own_reward", "--rollout-sample-hook-path", f"{PROBE}.another_sample"),
        lambda s: all(r == 10.0 + t.index % 2 for r, t in zip(s.rewards, s.batch.samples, strict=True)),
    ),
    "custom_rm": (("--custom-rm-path", "examples.brief_reward:reward"), lambda s: all(0 <= r <= 1 for r in s.rewards)),
    "group_rm": (
        ("--custom-rm-path", f"{EXAMPLE}:team_reward", "--group-rm"),
        lambda s: all(max(t.reward for t in s.batch.samples if t.group_index == g) == 1.0 for g in (0, 1)),
    ),
    "dynamic_filter": (("--dynamic-sampling-filter-path", "examples.learnable_groups:keep"), _drops_the_unsolved),
    "sample_filter": (
        ("--rollout-sample-filter-path", f"{EXAMPLE}:drop_truncated"),
        lambda s: all((t.loss_mask.sum() == 0) == t.truncated for t in s.batch.samples),
    ),
    "all_samples": (
        ("--rollout-all-samples-process-path", f"{EXAMPLE}:log_longest"),
        lambda s: "the longest answer has" in s.log,
    ),
    "reward_post_process": (
        ("--custom-reward-post-process-path", f"{EXAMPLE}:clip_rewards"),
        lambda s: max(s.rewards) == 1.0,
    ),
    "convert_samples": (
        ("--custom-convert-samples-to-train-data-path", f"{EXAMPLE}:convert"),
        lambda s: max(s.rewards) == 1.5,
    ),
    "rollout_log": (("--custom-rollout-log-function-path", f"{EXAMPLE}:log_step"), lambda s: "step 0:" in s.log),
    "data_source": (("--data-source-path", f"{EXAMPLE}:CountingSource"), lambda s: s.batch.samples[0].group_index == 0),
}
"""Kind -> (flags, what must be seen)."""
UNSCORED = ("custom_rm", "group_rm", "sample_hook")
ELSEWHERE = {
    "generate",
    "eval",
    "eval_log",
    "buffer_filter",
    "advantage",
    "data_postprocess",
    "loss",
    "tis",
    "pg_loss_reducer",
    "megatron_init",
    "before_log_prob",
    "before_train_step",
    "post_write",
    "pre_read",
}
"""Kinds that the tests below run."""


def test_no_kind_is_forgotten() -> None:
    assert set(STEP) | ELSEWHERE == set(CONTRACTS)


@pytest.mark.parametrize("mode", quick(MODES, "fan_out"))
@pytest.mark.parametrize("kind", STEP)
def test_a_step_with_the_hook(
    kind: str, mode: str, front: Any, engine_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags, seen = STEP[kind]
    generate = f"{PROBE}:{'bare_' if kind in UNSCORED else ''}{mode}"

    async def work(manager: RolloutManager) -> Seen:
        batch, metrics = await manager.generate(0)
        assert manager.commit(0)["data/trained"] == 2
        return Seen(batch, metrics, caplog.text)

    with caplog.at_level(logging.INFO, "examples"):
        result = run(front, engine_server, tmp_path, work, *flags, "--custom-generate-function-path", generate)
    by_execution = [t.index for t in result.batch.samples]
    assert {by_execution.count(i) for i in by_execution} == {SIBLINGS[mode]} and result.batch.num_executions == 4
    assert seen(result), f"the hook left no trace: {result.metrics} {result.rewards}"


@pytest.mark.parametrize("mode", quick(MODES, "fan_out"))
def test_evaluation_with_its_hooks(
    mode: str, front: Any, engine_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = write_prompts(tmp_path / "held.jsonl", 3)
    flags = (
        "--eval-interval",
        "1",
        "--eval-prompt-data",
        "held",
        str(held),
        "--n-samples-per-eval-prompt",
        "2",
        "--eval-function-path",
        f"{EXAMPLE}:rollout",
        "--custom-generate-function-path",
        f"{PROBE}:{mode}",
        "--custom-eval-rollout-log-function-path",
        f"{EXAMPLE}:log_eval",
    )

    async def work(manager: RolloutManager) -> Any:
        return await manager.evaluate(0)

    with caplog.at_level(logging.INFO, "examples"):
        metrics = run(front, engine_server, tmp_path, work, *flags)
    assert metrics["rollout/from_example"] == 1.0 and metrics["eval/held-num_prompts"] == 3
    assert "eval/held-pass@2" in metrics and "eval/held-pass@4" not in metrics, "siblings are no tries"
    assert f"{{'held': {6 * SIBLINGS[mode]}}}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_groups_go_round_through_the_buffer_and_its_filter(
    mode: str, front: Any, engine_server: Any, tmp_path: Path
) -> None:
    """Over-sampled groups wait in the buffer, are saved, loaded, and served newest first; siblings stay together."""
    flags = (
        "--custom-generate-function-path",
        f"{PROBE}:together_{mode}",
        "--buffer-filter-path",
        f"{EXAMPLE}:newest_first",
        "--over-sampling-batch-size",
        "6",
        "--partial-rollout",
    )

    async def work(manager: RolloutManager) -> Any:
        first, metrics = await manager.generate(0)
        manager.commit(0)
        assert metrics["rollout/num_surplus_groups"] == metrics["rollout/num_aborted_groups"] == 2
        waiting = [record.group() for record in manager._source._queue]
        await manager.save(tmp_path)
        manager.load(tmp_path)
        manager._args = rollout_args(
            tmp_path,
            *flags[:-3],
            "--hf-checkpoint",
            str(engine_server.model_path),
            "--rollout-batch-size",
            "2",
            "--partial-rollout",
        )
        return first, waiting, (await manager.generate(1))[0]

    first, waiting, second = run(front, engine_server, tmp_path, work, *flags)
    assert sorted({s.group_index for s in second.samples}) == sorted(g.group_index for g in waiting[-2:])
    for batch in (first, second):
        executions = [s.index for s in batch.samples]
        assert {executions.count(i) for i in executions} == {SIBLINGS[mode]} and batch.num_executions == 4


@pytest.mark.parametrize("mode", quick(MODES, "fan_out"))
def test_the_trainers_hooks_take_what_the_engine_sampled(
    mode: str, front: Any, engine_server: Any, tmp_path: Path
) -> None:
    async def work(manager: RolloutManager) -> TrainBatch:
        return (await manager.generate(0))[0]

    flags = ("--custom-generate-function-path", f"{PROBE}:{mode}", "--rollout-batch-size", "3")
    batch = run(front, engine_server, tmp_path, work, *flags)
    own = "examples.own_algorithm"
    common = {
        "global_batch_size": 6,
        "rewards_normalization": False,
        "custom_advantage_function_path": f"{own}:best_of_group",
        "rollout_data_postprocess_path": f"{own}:at_most_three",
    }
    for settings in (
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{own}:reinforce"},
        {
            "use_tis": True,
            "custom_tis_function_path": f"{own}:soft_weights",
            "custom_pg_loss_reducer_function_path": f"{own}:by_thousand_tokens",
        },
    ):
        with one_rank(engine_server.model_path, **common, **settings) as backend:
            metrics = backend.train(batch)
        assert np.isfinite(list(metrics.values())).all() and metrics["train/grad_norm"] > 0
        assert 0 < metrics["train/advantages"] <= 1, "ones for the best answers"


def test_a_filter_that_rejects_everything_ends_with_a_named_error(
    front: Any, engine_server: Any, tmp_path: Path
) -> None:
    async def work(manager: RolloutManager) -> None:
        with pytest.raises(DataError, match="the dynamic filter dropped 64 groups"):
            await manager.generate(0)
        assert manager._source.ledger().in_flight == 0

    flags = ("--dynamic-sampling-filter-path", f"{PROBE}:drop_everything", "--custom-generate-function-path")
    run(front, engine_server, tmp_path, work, *flags, f"{PROBE}:single", "--rollout-max-response-len", "2")


def test_a_conversation_trains_the_sampled_ids(front: Any, engine_server: Any, tmp_path: Path) -> None:
    """Every turn ends with one of many stop ids; the environment answers it, three times."""
    data = tmp_path / "messages.jsonl"
    data.write_text(json.dumps({"input": [{"role": "user", "content": "1+1="}], "label": "2"}) + "\n")
    stops = [str(i) for i in range(30, 60)]
    flags = (
        "--custom-generate-function-path",
        f"{PROBE}:conversation",
        "--prompt-data",
        str(data),
        "--rollout-max-response-len",
        "400",
        "--rollout-stop-token-ids",
        *stops,
    )
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    """What the engine read -> what it sampled, each time."""

    async def work(manager: RolloutManager) -> Any:
        generate = manager._client.generate

        async def recorded(ids: Any, *rest: Any, **more: Any) -> Generation:
            answer: Generation = await generate(ids, *rest, **more)
            answers.setdefault(tuple(ids), []).append(list(answer.tokens))
            return answer

        manager._client.generate = recorded
        return (await manager.generate(0))[0], ChatRenderer(manager._tokenizer)

    batch, chat = run(front, engine_server, tmp_path, work, *flags)
    eos = chat._tokenizer.eos_token_id
    for sample in batch.samples:
        ids = sample.tokens.tolist()
        mask = [0] * (len(ids) - sample.response_length) + sample.loss_mask.astype(int).tolist()
        starts = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
        assert len(starts) == 4, "four turns"
        for start in starts:
            read = answers[tuple(ids[:start])]
            sampled = next(s for s in read if ids[start : start + len(s)] == s)
            assert all(mask[start : start + len(sampled)])
            end = start + len(sampled)
            assert end == len(ids) or (mask[end] == 0 and ids[end - 1 : end + 1].count(eos) == 1), "one end of a turn"


def test_one_sample_object_twice_is_refused(front: Any, engine_server: Any, tmp_path: Path) -> None:
    hook = tmp_path / "twice.py"
    hook.write_text(
        "from slime.rollout.generate import generate as g\n"
        "async def generate(args, sample, sampling_params):\n"
        "    return [await g(args, sample, sampling_params)] * 2\n"
    )

    async def work(manager: RolloutManager) -> None:
        with pytest.raises(HookError, match=r"copy\.deepcopy"):
            await manager.generate(0)

    run(front, engine_server, tmp_path, work, "--custom-generate-function-path", f"{hook}:generate")
