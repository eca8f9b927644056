"""Rewards at tokens, from a generate function to the batch: where they lie, and what keeps them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupRecord, reset
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError, HookError
from slime.core.sample import Group, Sample
from slime.rollout.filters import check_reward_nonzero_std
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import load_rollout, save_rollout, save_train_batch
from slime.rollout.sample_metrics import _more, sample_metrics
from slime.rollout.train_batch import to_train_batch
from slime.rollout.workflows.rejection import keep_best
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager, write_prompts

pytestmark = pytest.mark.usefixtures("graders_here")

THREE_TURNS = """
from slime.core.sample import Status
from slime.rollout.generate import generate as one_turn

async def generate(args, sample, sampling_params):
    while (done := sample.metadata.setdefault("done", 0)) < 3:
        sample = await one_turn(args, sample, sampling_params)
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            return sample
        sample.add_turn_reward(done + 1.0)
        sample.metadata["done"] += 1
        sample.append_response_tokens([5, 6])
    return sample
"""
"""A reward of 1, 2 and 3 for three turns; an interrupted execution goes on where it was. No outcome is scored."""


def turn_rewards(sample: Any) -> list[float]:
    """Rewards of each run of sampled tokens, which are all at the run's end."""
    versions, rewards = [*sample.token_versions.tolist(), -1], sample.token_rewards.tolist()
    ends = [t for t in range(len(rewards)) if versions[t] >= 0 and versions[t + 1] < 0]
    assert all(t in ends for t, reward in enumerate(rewards) if reward), "rewards are at the ends of turns"
    return [rewards[t] for t in ends]


def finished(index: int, reward: Any = 1.0, *rewards: float, group: int = 0) -> Sample:
    sample = Sample(group_index=group, index=index, tokens=[5, 6], reward=reward)
    for value in rewards or (0.0,):
        sample.append_response_tokens([7] * 20, log_probs=[-0.1] * 20, weight_version=2, finish_reason="stop")
        if rewards:
            sample.add_turn_reward(value)
        sample.append_response_tokens([8])
    return sample


def test_an_interrupted_execution_goes_on_with_its_rewards(tmp_path: Path) -> None:
    class SlowUntilAborted(FakeEngine):
        async def abort(self, request: web.Request) -> web.Response:
            self.tick_s = 0.0
            return await super().abort(request)

    own = tmp_path / "own.py"
    own.write_text(THREE_TURNS)
    flags = ("--over-sampling-batch-size", "8", "--partial-rollout", "--rollout-max-response-len", "12")
    args = rollout_args(tmp_path, *flags, "--custom-generate-function-path", f"{own}:generate").replace(rm_type=None)
    engine = SlowUntilAborted(tick_s=0.01)
    engine.stops.extend([2] * 30)

    async def work(manager: RolloutManager) -> Any:
        batches = []
        for step in range(2):
            engine.weight_version = str(step + 1)
            batch, metrics = await manager.generate(step)
            ledger = manager.commit(step)
            batches.append(batch)
        return batches, metrics, ledger

    batches, metrics, ledger = asyncio.run(with_manager(args, engine, work))
    samples = [s for batch in batches for s in batch.samples]
    assert len(samples) == 16 and all(turn_rewards(s) == [1.0, 2.0, 3.0] for s in samples)
    assert any(len({*s.token_versions.tolist()} - {-1}) > 1 for s in samples), "none was interrupted"
    assert {s.reward for s in samples} == {0.0}, "nothing scores the end"
    assert metrics["rollout/total_reward"] == 6.0 and metrics["rollout/raw_reward"] == 0.0
    assert ledger["data/trained"] == 8 and ledger["data/in_flight"] == 0


def test_the_program_of_the_documentation_rewards_each_turn(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "customization.md").read_text()
    code = page.split("### A reward for each turn")[1].split("```python\n")[1].split("```")[0]
    own = tmp_path / "own.py"
    own.write_text(code.replace("str(sample.label)", "''"))
    flags = ("--custom-generate-function-path", f"{own}:generate", "--rollout-max-context-len", "100")
    flags += ("--eval-interval", "1", "--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 2)))
    args = rollout_args(tmp_path, *flags).replace(rm_type=None)

    async def work(manager: RolloutManager) -> Any:
        batch, _ = await manager.generate(0)
        return batch, await manager.evaluate(0)

    batch, metrics = asyncio.run(with_manager(args, FakeEngine(stop_after=2), work))
    assert [turn_rewards(s) for s in batch.samples] == [[1.0, 1.0, 1.0]] * 8
    assert metrics["eval/held"] == 3.0, "without a grader, an evaluation shows the sum"


def test_a_grader_still_scores_the_end(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(THREE_TURNS + "\ndef reward(args, sample):\n    return sum(sample.token_rewards) + sample.index\n")
    flags = ("--custom-generate-function-path", f"{own}:generate", "--custom-rm-path", f"{own}:reward")
    args = rollout_args(tmp_path, *flags)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[0]

    batch = asyncio.run(with_manager(args, FakeEngine(stop_after=2), work))
    assert [s.reward for s in batch.samples] == [6.0 + s.index for s in batch.samples], "it saw the rewards of turns"
    assert all(turn_rewards(s) == [1.0, 2.0, 3.0] for s in batch.samples)


def test_records_transport_and_checkpoints_keep_every_bit(tmp_path: Path) -> None:
    rng = random.Random(1)
    sample = finished(3, 0.1, *(rng.gauss(0, 1) for _ in range(3)))
    sample.train_metadata = {"turns": [1, 2]}  # type: ignore[attr-defined]
    want, group = list(sample.token_rewards or ()), Group(0, (sample, finished(4)))
    save_rollout(tmp_path / "0.zst", 0, [list(group.samples)])
    (recorded,) = load_rollout(tmp_path / "0.zst")[1]
    sent = GroupRecord.of(Group(0, tuple(s.copy() for s in group.samples))).group().samples
    for first, second in (recorded, sent, Group.from_dict(json.loads(group.to_json())).samples):
        assert first.token_rewards == want and second.token_rewards is None
        assert TrainSample.from_sample(first, reward=0.1).metadata == {"turns": [1, 2]}
    again = reset(sample)
    assert again.token_rewards is None and again.response_length == 0

    batch = TrainBatch(0, tuple(TrainSample.from_sample(s, reward=0.1) for s in group.samples))
    save_train_batch(tmp_path / "0.npz", batch)
    with np.load(tmp_path / "0.npz", allow_pickle=False) as arrays:
        assert arrays["0/token_rewards"].tolist() == want and "1/token_rewards" not in arrays
        assert json.loads(str(arrays["0/metadata"])) == {"turns": [1, 2]}


def test_the_buffers_checkpoint_keeps_every_bit() -> None:
    buffer = DataBuffer(None, n_samples_per_prompt=2)
    (group,) = buffer.get_groups(1)
    for sample in group.samples:
        sample.append_response_tokens([5] * 40, log_probs=[-0.1] * 40, weight_version=1)
        sample.add_turn_reward(1 / 3)
    want = [list(s.token_rewards or ()) for s in group.samples]
    buffer.put_back([group], "interrupted")
    resumed = DataBuffer(None, n_samples_per_prompt=2)
    resumed.load_state_dict(buffer.state_dict())
    (again,) = resumed.get_groups(1)
    assert [s.token_rewards for s in again.samples] == want
    again.samples[0].append_response_tokens([6], log_probs=[-0.2], weight_version=2)
    assert again.samples[0].token_rewards == [*want[0], 0.0], "and goes on"


def test_a_record_written_before_there_were_token_rewards_is_read() -> None:
    old = finished(0).to_dict()
    del old["token_rewards"]
    assert Sample.from_dict(old) == finished(0)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([0.5], "token_rewards has 1 entries for 21"),
        ([float("inf")] * 21, r"token_rewards\[0\] is inf"),
        (["a"] * 21, "numbers"),
        (["1"] * 21, "must be numbers, got '1'"),
        ([0.5, "1", 0.5] * 7, "must be numbers"),
        ([None] * 21, r"token_rewards\[0\] is None"),
        (5, "token_rewards is 5, but must have one number per response token"),
        ({"a": 1.0}, "numbers"),
        ([1e308] * 21, "must have a finite sum"),
        ([1e308, -1e308, 0.0] * 7, "must have a finite sum"),
        ([10**400] * 21, "numbers"),
        ([[0.5]] * 21, r"the shape \(21, 1\)"),
        ("1" * 21, "token_rewards is '1111"),
    ],
)
def test_wrong_rewards_are_refused_with_the_sample_named(tmp_path: Path, wrong: Any, problem: str) -> None:
    sample = finished(7)
    with pytest.raises(DataError, match=f"sample 7: .*{problem}"):
        sample.token_rewards = wrong
        assert wrong == [0.5], "the code that sets them learns it, unless tokens may follow"
        to_train_batch(rollout_args(tmp_path), 0, [[sample]])
    sample = finished(7)
    sample.token_rewards = [0.0] * 21
    if isinstance(wrong, list):
        sample.token_rewards[:] = wrong
        with pytest.raises(DataError, match=f"sample 7: .*{problem}"):  # what is changed in place is found later
            to_train_batch(rollout_args(tmp_path), 0, [[sample]])
    sample.token_rewards = [0.0] * 21
    sample.add_turn_reward(1e308)
    with pytest.raises(DataError, match=r"sample 7: the rewards of a turn must have a finite sum, got 1e\+308 after"):
        sample.add_turn_reward(1e308)
    with pytest.raises(DataError, match="sample 7: the reward of a turn must be finite"):
        finished(7).add_turn_reward(float("nan"))
    with pytest.raises(DataError, match="sample 7: the reward of a turn must be a number"):
        finished(7).add_turn_reward("0.5")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="sample 7 has no sampled token yet"):
        Sample(index=7, tokens=[1]).add_turn_reward(1.0)


@pytest.mark.parametrize("kind", [np.array, tuple], ids=["array", "tuple"])
def test_rewards_that_a_reward_model_returns_as_an_array_are_filtered_and_saved_like_a_list(kind: Any) -> None:
    made = [finished(index, 1.0, 0.5) for index in range(2)]
    for sample in made:
        wanted = sample.token_rewards
        sample.token_rewards = kind(wanted)
        sample.validate()
        assert json.loads(sample.to_json())["token_rewards"] == wanted
    settings = SimpleNamespace(reward_key=None, advantage_estimator="grpo_turn")
    assert not check_reward_nonzero_std(settings, made).keep


def test_a_turns_reward_is_at_the_last_sampled_token() -> None:
    one = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 1, 0])
    one.add_turn_reward(0.5)
    assert one.token_rewards == [0.0, 0.5, 0.0], "without versions, the loss mask says what was sampled"
    one = Sample(tokens=[1])
    one.append_response_tokens([5, 6], log_probs=[-1.0, -1.0], weight_version=0)
    one.append_response_tokens([7])
    one.loss_mask = [1, 0, 0]
    one.add_turn_reward(1.0)
    one.add_turn_reward(0.25)
    assert one.token_rewards == [0.0, 1.25, 0.0], "sampled, though it is masked"
    one.reward = {"acc": 2.0}
    assert one.total_reward("acc") == 3.25 and Sample().total_reward() is None


def test_columns_of_a_users_conversion(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def same(args, samples): return {'rewards': [1.0 for s in samples]}\n"
        "def other(args, samples):\n"
        "    return {'rewards': [1.0], 'tokens': [[5, 6, 9]], 'response_lengths': [2], 'token_rewards': [[0.5, 0.0]]}\n"
        "def lost(args, samples): return {'rewards': [1.0], 'tokens': [[5, 6, 9]], 'response_lengths': [2]}\n"
        "def uneven(args, samples): return {'rewards': [1.0], 'token_rewards': [[0.5]]}\n"
    )

    def converted(name: str) -> TrainSample:
        flag = ("--custom-convert-samples-to-train-data-path", f"{own}:{name}", "--train-unsampled-tokens")
        return to_train_batch(rollout_args(tmp_path, *flag), 0, [[finished(0, 1.0, 0.25)]]).samples[0]

    kept = converted("same").token_rewards
    assert kept is not None and kept.tolist() == [0.0] * 19 + [0.25, 0.0]
    changed = converted("other").token_rewards
    assert changed is not None and changed.tolist() == [0.5, 0.0]
    with pytest.raises(HookError, match="changed the tokens of sample 0, which has token_rewards"):
        converted("lost")
    with pytest.raises(HookError, match="'token_rewards': 1"):
        converted("uneven")


def test_filters_and_metrics_count_rewards_of_tokens(tmp_path: Path) -> None:
    grpo = rollout_args(tmp_path)
    by_turn = rollout_args(tmp_path, "--advantage-estimator", "grpo_turn")
    equal = [finished(0, 1.0, 0.5), finished(1, 0.5, 1.0)]
    unequal = [finished(0, 1.0, 0.5), finished(1, 1.0, 1.0)]
    placed = [finished(0, 1.0, 1.0, 0.0), finished(1, 1.0, 0.0, 1.0), finished(2, 1.0, 0.25, 0.75)]
    same = [finished(i, 1.0, 0.25, 0.5) for i in range(2)]
    groups = (equal, unequal, placed, same)
    assert [check_reward_nonzero_std(grpo, g).keep for g in groups] == [False, True, False, False]
    assert [check_reward_nonzero_std(by_turn, g).keep for g in groups] == [True, True, True, False]
    found = sample_metrics(grpo, [equal, unequal])
    assert found["rollout/total_reward"] == (1.5 + 1.5 + 1.5 + 2.0) / 4 and found["rollout/zero_std/ratio"] == 0.5
    assert found["rollout/raw_reward"] == 0.875 and found["rollout/zero_std/count_1.5"] == 1
    assert "rollout/total_reward" not in sample_metrics(grpo, [[finished(0), finished(1)]])
    assert _more(placed[0])["token_rewards"] == [1.0] and "token_rewards" not in _more(finished(0))
    keep_best(grpo, [unequal])
    assert [s.remove_sample for s in unequal] == [True, False]
