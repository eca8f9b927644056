"""Evaluation is told apart from training: hooks are told, identities do not meet, the account is untouched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slime.core.sample import Sample
from slime.rollout.generate import generate
from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine
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
