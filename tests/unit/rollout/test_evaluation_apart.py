"""Evaluation is told apart from training: hooks are told, identities do not meet, the account is untouched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime.core.errors import EngineError
from slime.core.sample import Sample, Status
from slime.core.topology import EVAL_FLEET
from slime.rollout.context import current
from slime.rollout.generate import generate
from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine, serve
from tests.support.rollout import rollout_args, with_manager, write_prompts

Call = tuple[str, bool, int | None, int | None]
CALLS: list[Call] = []
"""(hook, evaluation, group_index, index) of every call of the hooks below."""


async def recorded_generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    CALLS.append(("generate", evaluation, sample.group_index, sample.index))
    return await generate(args, sample, sampling_params)


def recorded_sample(args: Any, sample: Sample, rollout_id: int, evaluation: bool) -> None:
    CALLS.append(("sample", evaluation, sample.group_index, sample.index))


def test_hooks_are_told_and_no_identity_is_of_both(tmp_path: Path) -> None:
    """Law: a held-out sample is none of training's groups or executions, whenever it is evaluated."""
    held_out = [write_prompts(tmp_path / f"held_{i}.jsonl", 3) for i in range(2)]
    flags = ["--custom-generate-function-path", f"{__file__}:recorded_generate"]
    flags += ["--rollout-sample-hook-path", f"{__file__}:recorded_sample", "--eval-interval", "1"]
    flags += ["--eval-prompt-data", "one", str(held_out[0]), "two", str(held_out[1])]
    args = rollout_args(tmp_path, *flags, "--n-samples-per-eval-prompt", "2")

    async def work(manager: RolloutManager) -> list[list[Call]]:
        calls = []
        for step in range(2):
            for what in (manager.generate, manager.evaluate):
                seen().clear()
                await what(step)
                calls.append(list(seen()))
                ledger = manager._source.ledger()
                assert ledger.issued == 4 * (step + 1), f"{what.__name__} has drawn prompts: {ledger}"
            manager.commit(step)
        return calls

    first, evaluated, second, evaluated_again = asyncio.run(with_manager(args, FakeEngine(), work))
    training, evaluation = first + second, evaluated + evaluated_again
    assert {call[1] for call in training} == {False} and {call[1] for call in evaluation} == {True}
    for hook in ("generate", "sample"):
        assert sum(call[0] == hook for call in training) == 16, "4 prompts of 2 executions in each of 2 steps"
        own = [call for call in evaluated if call[0] == hook]
        assert len(own) == len({call[3] for call in own}) == 12, "2 datasets of 3 prompts, each asked twice"
    for position, name in ((2, "group_index"), (3, "index")):
        both = {call[position] for call in training} & {call[position] for call in evaluation}
        assert not both, f"{name} {both} of training and of evaluation"


def seen() -> list[Call]:
    """The calls that the hooks record: the loader of hooks makes a module of its own of this file."""
    from slime.settings.hook_contracts import load_hook

    return load_hook(f"{__file__}:recorded_generate", "generate").__globals__["CALLS"]  # type: ignore[no-any-return, attr-defined]


async def through_http(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Asks the address that the settings name, as code that knows nothing of slime does."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": list(sample.tokens), "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload) as answer:
        made = await answer.json()
    tokens = [triple[1] for triple in made["meta_info"]["output_token_logprobs"]]
    log_probs = [triple[0] for triple in made["meta_info"]["output_token_logprobs"]]
    version = int(made["meta_info"]["weight_version"])
    sample.append_response_tokens(tokens, log_probs=log_probs, weight_version=version)
    sample.status = Status.COMPLETED
    return sample


async def in_any_way(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """One execution after another: as slime does, through HTTP, and by the policy's name."""
    assert sample.index is not None
    if sample.index % 3 == 0:
        return await generate(args, sample, sampling_params)
    way = through_http if sample.index % 3 == 1 else of_the_model
    return await way(args, sample, sampling_params, evaluation)


async def of_the_model(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Asks the policy by its name."""
    assert sorted(current().models) == ["default"] and current().on_eval_fleet == evaluation
    made = await current().models["default"].generate(sample.tokens, sampling_params)
    sample.append_response_tokens(made.tokens, log_probs=made.log_probs, weight_version=made.weight_version)
    sample.status = Status.COMPLETED
    return sample


def test_an_evaluation_fleet_samples_evaluations_and_nothing_else(tmp_path: Path) -> None:
    """Law: however code reaches the policy, in an evaluation the fleet answers, and in training the other engines; a
    pause of those does not touch a running evaluation."""
    held = write_prompts(tmp_path / "held.jsonl", 3)
    flags = ["--eval-prompt-data", "held", str(held), "--eval-interval", "1", "--eval-fleet", "1"]
    flags += ["--custom-generate-function-path", f"{__file__}:in_any_way"]
    args, fleet = rollout_args(tmp_path, *flags), FakeEngine(weight_version="7")

    async def work(manager: RolloutManager) -> tuple[Any, Any]:
        async with serve(fleet):
            manager.admit(EVAL_FLEET, [fleet.url])
            batch, _ = await manager.generate(0)
            assert not fleet.requests
            fleet.hold_at = 4
            evaluation = asyncio.create_task(manager.evaluate(0))
            while len(fleet.running) < 3:
                await asyncio.sleep(0.01)
            await manager.pause()
            fleet.hold_at = None
            metrics = await evaluation
            manager.resume()
            manager.commit(0)
            return batch, metrics

    policy = FakeEngine()
    batch, metrics = asyncio.run(with_manager(args, policy, work))
    assert len(policy.requests) == len(batch.samples) == 8 and not fleet.aborted
    assert metrics["eval/weight_version"] == 7 and metrics["eval/held-num_scored"] == len(fleet.requests) == 3
    assert "perf/eval_fleet_time" in metrics and "perf/eval_time" not in metrics


def test_an_evaluation_that_is_given_up_leaves_no_request(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", 3)
    flags = ["--eval-prompt-data", "held", str(held), "--eval-interval", "1", "--eval-fleet", "1"]
    args, fleet = rollout_args(tmp_path, *flags), FakeEngine(hold_at=2)

    async def work(manager: RolloutManager) -> None:
        async with serve(fleet):
            manager.admit(EVAL_FLEET, [fleet.url])
            evaluation = asyncio.create_task(manager.evaluate(3))
            while len(fleet.running) < 3:
                await asyncio.sleep(0.01)
            await manager.abandon_evaluation()
            with pytest.raises(EngineError, match="the evaluation after step 3 was cancelled"):
                await evaluation
            await manager.close()
            assert all(stop.is_set() for stop in fleet.running.values()), "aborted, if the engine still knows it"
            assert len(fleet.aborted) == 3 and not manager.progress()

    asyncio.run(with_manager(args, FakeEngine(), work))
