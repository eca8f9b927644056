"""People see the best, the worst and some others of each step, as the engine read and sampled them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.groups import reset
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.observability.run_folder import RunFolder
from slime.observability.samples import ShownSample, read_samples
from slime.observability.tracker import Tracker
from slime.rollout.generate import Limits
from slime.rollout.manager import RolloutManager
from slime.rollout.sample_metrics import (
    count_tool_call,
    expect_tools,
    num_turns,
    pick,
    shown_metadata,
    tool_counts,
    turn_metrics,
)
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager, write_prompts


def picks(rewards: list[float | None], num: int, seed: int = 0) -> list[tuple[int, str]]:
    return list(pick(rewards, num, random.Random(seed)))


def test_best_and_worst_come_first_and_nothing_twice() -> None:
    rewards = [0.5, None, 1.0, 0.25, float("nan"), 0.75]
    for seed in range(20):
        chosen = picks(rewards, 4, seed)
        assert chosen[:2] == [(2, "best"), (3, "worst")] and {why for _, why in chosen[2:]} == {"random"}
        assert len({i for i, _ in chosen}) == 4
    assert len(picks(rewards, 99)) == 6 and picks(rewards, 1) == [(2, "best")] and picks([], 3) == []


def test_chance_decides_among_equals_and_is_the_same_again() -> None:
    equal: list[float | None] = [1.0] * 50
    assert len({picks(equal, 3, seed)[0] for seed in range(20)}) > 5
    assert picks(equal, 3, 7) == picks(equal, 3, 7)


def test_without_rewards_to_compare_there_is_no_best() -> None:
    assert {why for _, why in picks([None, None], 3)} == {why for _, why in picks([1.0], 3)} == {"random"}


def steps_of(args: Any, *, num_steps: int = 1, evaluates: bool = False, engine: FakeEngine | None = None) -> Path:
    """Runs steps, and an evaluation, as the actor and the driver do; -> the samples' file."""
    folder = RunFolder.create(Path(args.run_dir), run_id="run-1", args={})

    async def work(manager: RolloutManager) -> None:
        with Tracker(folder) as tracker:
            for step in range(num_steps):
                await manager.generate(step)
                tracker.log_samples("rollout", step, manager.showcase.take("rollout", step))
                manager.commit(step)
            if evaluates:
                await manager.evaluate(0)
                tracker.log_samples("eval", 0, manager.showcase.take("eval", 0))
        assert not manager.showcase._picked, "what was taken is kept"

    asyncio.run(with_manager(args, engine or FakeEngine(stop_after=2), work))
    return folder.samples


def test_samples_of_every_step_and_dataset_reach_the_file(tmp_path: Path) -> None:
    held, more = write_prompts(tmp_path / "held.jsonl", 5), write_prompts(tmp_path / "more.jsonl", 3)
    flags = ("--eval-interval", "1", "--eval-prompt-data", "held", str(held), "more", str(more))
    args = rollout_args(tmp_path, *flags, "--log-samples", "4")
    samples = read_samples(steps_of(args, num_steps=2, evaluates=True))
    of = [(s.kind, s.step, s.dataset) for s in samples]
    assert of == [("rollout", i, None) for i in (0, 1) for _ in range(4)] + [
        ("eval", 0, name) for name in ("held", "more") for _ in range(4 if name == "held" else 3)
    ]
    for sample in samples:
        number = sample.prompt.partition("+")[0]
        assert sample.prompt == f"{number}+{number}=" and sample.label == str(2 * int(number))
        assert sample.status == "completed" and sample.finish_reason == "stop" and sample.weight_version == 1
        assert sample.response.endswith("<eos>") and sample.response_length == 3, sample.response
    first = [s for s in samples if s.kind == "rollout" and s.step == 0]
    rewards = [s.reward for s in first if s.reward is not None]
    assert [s.picked for s in first] == ["best", "worst", "random", "random"]
    assert rewards[0] == max(rewards) and rewards[1] == min(rewards)


def test_zero_samples_are_none(tmp_path: Path) -> None:
    assert not steps_of(rollout_args(tmp_path, "--log-samples", "0")).exists()


def test_metadata_of_the_row_is_shown_and_secrets_in_it_are_not(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"input": "1+1=", "label": "2", "metadata": {"source": "book \x1b[31m", "api_key": "hidden-thing"}}
    data.write_text((json.dumps(row) + "\n") * 8)
    path = steps_of(rollout_args(tmp_path, "--prompt-data", str(data)))
    assert [s.metadata for s in read_samples(path)] == [{"source": "book \\x1b[31m", "api_key": "<hidden>"}] * 3
    assert "hidden-thing" not in path.read_text()


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_any_metadata_becomes_short_json_with_a_note_of_what_is_left_out() -> None:
    nested: dict[str, Any] = {"trace": [{"tool": "ls", "access_token": "x1"}] * 60, "deep": {}, "judge": "j" * 90}
    nested |= {
        "turn_counts": {"turns": 1},
        "nan": float("nan"),
        "mine": Hostile(),
        7: (1, None),
        "long": list(range(99)),
    }
    inner = nested["deep"]
    for _ in range(2000):
        inner["deep"] = inner = {"token": "x1"}
    shown = shown_metadata(nested, 40)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown and "turn_counts" not in shown
    assert "x1" not in json.dumps(shown) and shown["nan"] == "nan" and shown["mine"] == "<Hostile>"
    assert "left out" in json.dumps(shown["deep"])
    assert shown["7"] == [1, None] and shown["judge"] == f"{'j' * 20} [... 50 characters left out ...] {'j' * 20}"
    assert all(len(json.dumps(value)) < 120 and "left out" in value for value in (shown["trace"], shown["long"]))
    assert shown_metadata({"n": list(range(60))}, 4000)["n"][-1] == "... 10 more entries left out"


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    row = {"input": "x" * 100, "label": "y"}
    data.write_text((json.dumps(row) + "\n") * 8)
    path = steps_of(rollout_args(tmp_path, "--prompt-data", str(data), "--log-samples-max-chars", "10"))
    assert {s.prompt for s in read_samples(path)} == {"xxxxx [... 90 characters left out ...] xxxxx"}


def shown_of(args: Any) -> list[ShownSample]:
    async def work() -> list[ShownSample]:
        manager = RolloutManager(args, engines=None)
        try:
            await manager.generate(0)
            return manager.showcase.take("rollout", 0)
        finally:
            await manager.close()

    return asyncio.run(work())


def test_a_conversation_that_is_learned_shows_its_trained_part_and_no_reward(tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    data.write_text((json.dumps({"input": [{"role": r, "content": c} for r, c in turns]}) + "\n") * 8)
    sft = ("--loss-type", "sft_loss", "--rollout-function-path", "slime.rollout.sft.generate_rollout")
    args = rollout_args(tmp_path, *sft, "--n-samples-per-prompt", "1", "--prompt-data", str(data))
    for sample in shown_of(args.replace(label_key=None)):
        assert sample.prompt == "<bos><|user|>1+1=<eos><|assistant|>"
        assert sample.response == "2<eos><|user|>2+2=<eos><|assistant|>4<eos>"
        assert sample.reward is None and sample.picked == "random" and sample.weight_version is None
        assert sample.finish_reason is None and sample.more == {"trained_tokens": 4}


def conversation() -> Sample:
    """Two turns of the model with a tool's result between them."""
    sample = Sample(group_index=0, index=0, tokens=[10, 11])
    sample.append_response_tokens([12, 13], log_probs=[-1.0, -1.0], weight_version=1)
    sample.append_response_tokens([14, 15])
    sample.append_response_tokens([16], log_probs=[-1.0], weight_version=2, finish_reason="stop")
    return sample


def test_turns_are_counted_from_the_tokens() -> None:
    sample = conversation()
    assert num_turns(sample) == 2 and tool_counts(sample) == {"num_turns": 2}
    sample.metadata["turn_counts"] = {"turns": 5}
    assert num_turns(sample) == 5
    assert num_turns(Sample(token_versions=[NOT_SAMPLED] * 3)) == num_turns(Sample()) == 0
    partial = Sample(token_versions=[1, 1, 2])
    assert num_turns(partial) == 1, "a continued answer is one turn"


def test_tool_calls_and_errors_are_counted_and_averaged() -> None:
    busy, idle = conversation(), conversation()
    expect_tools(busy)
    for failed in (False, True, True):
        count_tool_call(busy, failed=failed)
    expect_tools(busy)
    expect_tools(idle)
    idle.index = 1
    assert tool_counts(busy) == {"num_turns": 2, "tool_calls": 3, "tool_errors": 2}
    assert turn_metrics("rollout", [busy, idle]) == {
        "rollout/num_turns/mean": 2.0,
        "rollout/num_turns/max": 2.0,
        "rollout/tool_calls/mean": 1.5,
        "rollout/tool_calls/max": 3.0,
        "rollout/tool_errors/mean": 1.0,
        "rollout/tool_error_ratio": pytest.approx(2 / 3),
    }
    assert "rollout/tool_error_ratio" not in turn_metrics("rollout", [idle])
    assert set(turn_metrics("rollout", [conversation()])) == {"rollout/num_turns/mean", "rollout/num_turns/max"}


def test_counts_of_siblings_are_of_one_execution() -> None:
    first, second, other = conversation(), conversation(), conversation()
    other.index = 1
    count_tool_call(first)
    second.metadata["turn_counts"] = {"turns": 1}
    metrics = turn_metrics("rollout", [first, second, other])
    assert (metrics["rollout/num_turns/mean"], metrics["rollout/num_turns/max"]) == (2.5, 3.0)
    assert (metrics["rollout/tool_calls/mean"], metrics["rollout/tool_calls/max"]) == (0.5, 1.0)


@pytest.mark.parametrize(("masks", "num_again"), [(True, 0), (False, 8 * (4 + 8))])
def test_samples_of_one_turn_each_count_each_turn_once(tmp_path: Path, masks: bool, num_again: int) -> None:
    """The example of the documentation: 8 executions of 3 turns of 4 tokens. Without its mask, the two later samples
    train one and two turns again."""
    page = (Path(__file__).parents[3] / "docs" / "customization.md").read_text()
    code = page.split("### One sample for each turn")[1].split("```python\n")[1].split("```")[0]
    (line,) = (one for one in code.splitlines() if "one.loss_mask =" in one)
    file = tmp_path / "turns.py"
    file.write_text(code if masks else code.replace(line, ""))

    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    args = rollout_args(tmp_path, "--custom-generate-function-path", f"{file}:generate")
    batch, metrics = asyncio.run(with_manager(args, FakeEngine(stop_after=3), work))
    assert len(batch.samples) == 24 and metrics["rollout/num_turns/mean"] == metrics["rollout/num_turns/max"] == 3
    assert metrics["rollout/num_tokens_trained_again"] == num_again
    assert sum(int(s.loss_mask.sum()) for s in batch.samples) == 8 * 3 * 4 + num_again


def test_one_turn_without_tools_has_no_such_metrics() -> None:
    sample = Sample(token_versions=[1, 1], status=Status.COMPLETED, metadata={"turn_counts": ["a column", "of data"]})
    assert turn_metrics("rollout", [sample]) == {} and tool_counts(sample) == {}


def test_a_sample_that_starts_over_has_called_nothing() -> None:
    sample = conversation()
    count_tool_call(sample, failed=True)
    assert tool_counts(Sample.from_dict(json.loads(sample.to_json()))) == tool_counts(sample), "a checkpoint lost them"
    assert "turn_counts" not in reset(sample).metadata


def test_a_turn_that_gets_no_token_is_counted_by_the_limit_that_left_none(tmp_path: Path) -> None:
    """The first turn spends all 8 tokens, so two of three turns of each of 8 executions are empty."""
    file = tmp_path / "turns.py"
    file.write_text(
        "from slime.rollout.generate import generate\n"
        "async def three(args, sample, sampling_params):\n"
        "    for _ in range(3):\n"
        "        sample = await generate(args, sample, sampling_params)\n"
        "        sample.append_response_tokens([5], text='r')\n"
        "    return sample\n"
    )
    flags = ["--custom-generate-function-path", f"{file}:three", "--rollout-max-total-response-len"]

    def metrics_of(most: str) -> Any:
        async def work(manager: RolloutManager) -> Any:
            return (await manager.generate(0))[1]

        return asyncio.run(with_manager(rollout_args(tmp_path, *flags, most), FakeEngine(), work))

    spent = metrics_of("8")
    assert spent["rollout/num_empty_turns"] == spent["rollout/num_empty_turns/max_total_response_len"] == 16
    assert spent["rollout/num_empty_turns/max_context_len"] == 0
    enough = metrics_of("24")
    assert enough["rollout/num_empty_turns"] == 0 and "rollout/num_empty_turns/max_context_len" not in enough


@pytest.mark.parametrize(
    ("limits", "num_read", "begun", "told"),
    [
        ({"served": 100}, 94, 0, {"model_context": 1}),
        ({"served": 100}, 93, 0, {}),
        ({"max_context_len": 20, "served": 100}, 20, 0, {"max_context_len": 1}),
        ({"max_context_len": 20}, 20, 4, {}),
    ],
)
def test_only_a_turn_without_any_token_is_empty(
    limits: dict[str, int], num_read: int, begun: int, told: dict[str, int]
) -> None:
    """What ends an answer in its middle is a truncation."""
    one = Limits(**limits)
    one.next_answer(8, num_read, begun)
    one.next_answer(0, num_read)
    assert one.spent == told
