"""Conversion and evaluation: canonical order, no unscored sample, one weight version."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError, DataError, EngineError
from slime.core.sample import Sample, Status
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import load_rollout, save_rollout
from slime.rollout.sample_metrics import pass_at_k, sample_metrics
from slime.rollout.train_batch import to_train_batch
from slime.rollout.types import Progress
from slime.rollout.user_functions import load
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import READ, SAMPLED, SAMPLING_FLAGS, SEED, rollout_args, with_manager, write_prompts

HOOKS = Path(__file__).with_name("workflow_hooks.py")
HOSTILE_GRADER = Path(__file__).parents[1] / "rewards" / "hostile_grader.py"


def finished(group_index: int, index: int, reward: Any = 1.0) -> Sample:
    sample = Sample(group_index=group_index, index=index, tokens=[5, 6], reward=reward)
    sample.append_response_tokens([7, 8], log_probs=[-0.1, -1 / 3], weight_version=2, finish_reason="stop")
    return sample


def test_the_batch_does_not_depend_on_the_order_of_completion(tmp_path: Path) -> None:
    args = rollout_args(tmp_path)
    groups = [[finished(g, 2 * g + i) for i in range(2)] for g in range(6)]
    random.Random(0).shuffle(groups)
    for group in groups:
        random.Random(1).shuffle(group)
    batch = to_train_batch(args, 3, groups)
    assert [s.index for s in batch.samples] == list(range(12)) and batch.rollout_id == 3


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_missing_reward_is_an_error_never_a_zero(tmp_path: Path, reward: Any) -> None:
    with pytest.raises(DataError, match="finite"):
        to_train_batch(rollout_args(tmp_path), 0, [[finished(0, 0, reward)]])


def test_an_unfinished_sample_is_not_trained(tmp_path: Path) -> None:
    sample = finished(0, 0)
    sample.status = Status.ABORTED
    with pytest.raises(DataError, match="aborted"):
        to_train_batch(rollout_args(tmp_path), 0, [[sample]])


def test_the_reward_key_picks_from_a_dict(tmp_path: Path) -> None:
    batch = to_train_batch(
        rollout_args(tmp_path, "--reward-key", "acc"), 0, [[finished(0, 0, {"acc": 0.25, "pred": "x"})]]
    )
    assert batch.samples[0].reward == 0.25


def test_a_record_restores_every_bit(tmp_path: Path) -> None:
    path = tmp_path / "a" / "0.jsonl.zst"
    groups = [[finished(g, g, reward=1 / 3 + g)] for g in range(3)]
    save_rollout(path, 7, groups)
    assert load_rollout(path) == (7, groups)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError):
        load_rollout(path)
    with pytest.raises(DataError, match="no recorded rollout"):
        load_rollout(tmp_path / "none")


def test_pass_at_k() -> None:
    assert pass_at_k(4, 0, 2) == 0.0 and pass_at_k(4, 4, 2) == 1.0
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25) and pass_at_k(4, 1, 2) == pytest.approx(0.5)


def evaluate(tmp_path: Path, engine: FakeEngine, *flags: str) -> dict[str, float]:
    held_out = write_prompts(tmp_path / "held.jsonl", 5)
    more = write_prompts(tmp_path / "more.jsonl", 3)
    base = (
        "--eval-interval",
        "1",
        "--eval-prompt-data",
        "held",
        str(held_out),
        "more",
        str(more),
        "--rm-type",
        "exact_match",
    )
    args = rollout_args(tmp_path, *base, *flags)

    async def work(manager: RolloutManager) -> Any:
        return await manager.evaluate(0)

    return dict(asyncio.run(with_manager(args, engine, work)))


def test_evaluation_counts_prompts_answers_and_lengths(tmp_path: Path) -> None:
    engine = FakeEngine()
    metrics = evaluate(tmp_path, engine, "--eval-max-response-len", "3", "--n-samples-per-eval-prompt", "2")
    assert len(engine.requests) == 16
    assert metrics["eval/held"] == 0.0 and metrics["eval/held-num_prompts"] == 5
    assert metrics["eval/more-pass@2"] == 0.0 and metrics["eval/held-truncated_ratio"] == 1.0
    assert metrics["eval/held/response_len/max"] == 3 and metrics["eval/weight_version"] == 1


def test_engines_get_every_setting_of_sampling_and_each_execution_a_seed(tmp_path: Path) -> None:
    """Law: what the settings say of training, of all evaluations and of one dataset is what is sampled with."""
    held = write_prompts(tmp_path / "held.jsonl", 3)
    own = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_new_tokens": 1, "repetition_penalty": 1.5}
    own |= {"stop": ["q"], "stop_token_ids": [9], "skip_special_tokens": False}
    file = tmp_path / "eval.yaml"
    entry = {"path": str(held), **own, "max_response_len": 2, "n_samples_per_eval_prompt": 3}
    file.write_text(json.dumps({"eval": {"datasets": {"plain": {"path": str(held)}, "own": entry}}}))
    flags = ("--eval-temperature", "0.7", "--eval-top-p", "0.6", "--eval-top-k", "30", "--eval-max-response-len", "6")
    evaluated = {"temperature": 0.7, "top_p": 0.6, "top_k": 30, "max_new_tokens": 6, "min_new_tokens": 2}
    more = ("--eval-min-new-tokens", "2", "--eval-interval", "1", "--eval-config", str(file))
    args, engine = rollout_args(tmp_path, *SAMPLING_FLAGS, *flags, *more), FakeEngine()

    async def work(manager: RolloutManager) -> None:
        await manager.generate(0)
        await manager.evaluate(0)

    asyncio.run(with_manager(args, engine, work))
    asked = [request["sampling_params"] for request in engine.requests]
    seeds = [one.pop("sampling_seed") for one in asked]
    assert seeds[:8] == [SEED + index for index in range(8)]
    assert sorted(seeds[8:]) == sorted((SEED - 1 - index) % 2**31 for index in range(12))
    found = Counter(json.dumps({**one, "stream_interval": 0}, sort_keys=True) for one in asked)
    wanted = {8: SAMPLED | READ, 3: evaluated | READ, 9: own | {"max_new_tokens": 2}}
    fixed = {"no_stop_trim": False, "stream_interval": 0}
    assert found == {json.dumps(one | fixed, sort_keys=True): num for num, one in wanted.items()}


def test_each_dataset_has_settings_of_its_own(tmp_path: Path) -> None:
    """Law: length, number, graders, functions, metadata and prompts are the dataset's, the score is of its key."""
    held, more, mine = (write_prompts(tmp_path / f"{name}.jsonl", 12) for name in ("held", "more", "mine"))
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.rollout.generate import generate as default\n"
        "def rm(args, sample): return {'a': 0.0, 'b': float(sample.metadata == {'split': 'test'})}\n"
        "async def generate(args, sample, sampling_params):\n"
        "    made = await default(args, sample, {**sampling_params, 'max_new_tokens': 1})\n"
        "    made.reward = {'a': 0.0, 'b': 0.25}\n"
        "    return made\n"
    )
    file = tmp_path / "eval.yaml"
    file.write_text(
        f"eval:\n  defaults: {{n_samples_per_eval_prompt: 3, max_prompt_len: 5}}\n  datasets:\n"
        f"    held: {{path: {held}, max_response_len: 2, custom_rm_path: '{own}:rm', "
        f"metadata_overrides: {{split: test}}}}\n"
        f"    more: {{path: {more}, n_samples_per_eval_prompt: 1, custom_rm_path: '{own}:rm'}}\n"
        f"    mine: {{path: {mine}, custom_generate_function_path: '{own}:generate', max_prompt_len: 9}}\n"
    )
    flags = ("--reward-key", "a", "--eval-reward-key", "b", "--max-dropped-row-fraction", "0.2")
    args, engine = rollout_args(tmp_path, *flags, "--eval-interval", "1", "--eval-config", str(file)), FakeEngine()

    async def work(manager: RolloutManager) -> Any:
        return await manager.evaluate(0)

    metrics = asyncio.run(with_manager(args, engine, work))
    limits = [r["sampling_params"]["max_new_tokens"] for r in engine.requests]
    assert Counter(limits) == {2: 10 * 3, 8: 10, 1: 12 * 3}, "of two prompts there are six tokens"
    assert metrics["eval/held"] == 1.0 and metrics["eval/held-pass@2"] == 1.0 and "eval/held-pass@4" not in metrics
    assert metrics["eval/more"] == 0.0 and "eval/more-pass@1" not in metrics and metrics["eval/mine"] == 0.25
    assert [metrics[f"eval/{name}-num_prompts"] for name in ("held", "more", "mine")] == [10, 10, 12]


def test_an_evaluation_over_two_weight_versions_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine()

    class Moving(FakeEngine):
        async def _sample(self, body: Any, stop: Any) -> Any:
            self.weight_version = str(3 - int(self.weight_version))
            return await super()._sample(body, stop)

    engine = Moving()
    with pytest.raises(EngineError, match=r"versions \[1, 2\]"):
        evaluate(tmp_path, engine)


def test_a_failing_engine_fails_the_evaluation(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.faults.extend([400] * 99)
    with pytest.raises(EngineError, match="rejected"):
        evaluate(tmp_path, engine)


def test_a_few_failures_are_counted_and_no_score_has_them(tmp_path: Path) -> None:
    """Law: what failed for good is in no mean and in no pass rate; one more than allowed ends the evaluation."""
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.rollout.generate import generate as default\n"
        "TRIES = []\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if int(sample.label) < 2:\n"
        "        TRIES.append(sample.index)\n"
        "        raise RuntimeError('the sandbox is gone')\n"
        "    made = await default(args, sample, sampling_params)\n"
        "    made.reward = 1.0\n"
        "    return made\n"
    )
    hook = ("--custom-generate-function-path", f"{own}:generate", "--n-samples-per-eval-prompt", "2")
    metrics = evaluate(tmp_path, FakeEngine(), *hook, "--eval-max-failed-fraction", "0.25")
    assert metrics["eval/held-num_failed"] == metrics["eval/more-num_failed"] == 2
    assert metrics["eval/held-num_unscored"] == 0 and metrics["eval/held"] == metrics["eval/held-pass@2"] == 1.0
    tries: Any = load(f"{own}:generate", "generate")
    assert Counter(tries.__globals__["TRIES"]) == {-1: 3, -2: 3, -11: 3, -12: 3}, "each of the first prompt's"
    too_many = r"2 of 6 samples of more failed in evaluation; at most 1 .* the sandbox is gone"
    with pytest.raises(EngineError, match=too_many):
        evaluate(tmp_path, FakeEngine(), *hook, "--eval-max-failed-fraction", "0.16")


def test_every_answer_of_an_evaluation_is_counted_once_as_what_became_of_it(tmp_path: Path) -> None:
    """Law: an answer is sampled once, whatever its grader makes of it; one that the grader cannot deal with is a wrong
    one in every score, and only what a service or a machine lost is in none."""
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.rollout.generate import generate as default\n"
        "def lost(args, sample):\n    return None\n"
        "async def generate(args, sample, sampling_params):\n"
        "    kind = -sample.index % 4\n"
        "    if kind == 3:\n        raise RuntimeError('the sandbox is gone')\n"
        "    made = await default(args, sample, sampling_params)\n"
        "    made.response = 'segfault' if kind == 1 and sample.group_index == -1 else 'fine'\n"
        "    made.custom_rm_path = f'{__file__}:lost' if kind == 2 else None\n"
        "    return made\n"
    )
    engine = FakeEngine()
    flags = ("--rm-type", str(HOSTILE_GRADER), "--eval-max-failed-fraction", "1")
    hook = ("--custom-generate-function-path", f"{own}:generate", "--n-samples-per-eval-prompt", "4")
    metrics = evaluate(tmp_path, engine, *hook, *flags)
    for name, num in (("held", 5), ("more", 3)):
        kinds = ("scored", "ungradable", "unscored", "failed")
        assert [metrics[f"eval/{name}-num_{kind}"] for kind in kinds] == [2 * num - 1, 1, num, num]
        assert metrics[f"eval/{name}"] == pytest.approx((2 * num - 1 - 2.0) / (2 * num))
    assert len(engine.requests) == 3 * 8, "an answer was sampled again"


def test_a_dataset_of_which_everything_failed_has_no_score_and_ends_no_run(tmp_path: Path) -> None:
    """Law: what may fail is a share of each dataset; one without an answer says how many failed, and nothing else."""
    own = tmp_path / "own.py"
    own.write_text(
        "from slime.rollout.generate import generate as default\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.index < -5:\n"
        "        raise RuntimeError('the sandbox is gone')\n"
        "    return await default(args, sample, sampling_params)\n"
    )
    hook = ("--custom-generate-function-path", f"{own}:generate", "--eval-max-failed-fraction", "1")
    metrics = evaluate(tmp_path, FakeEngine(), *hook)
    assert metrics["eval/more-num_failed"] == metrics["eval/more-num_prompts"] == 3 and "eval/more" not in metrics
    assert metrics["eval/held-num_failed"] == 0 and metrics["eval/held"] == 0.0


def test_what_is_late_is_dropped_and_too_few_answers_have_no_score(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: a dataset ends at its limit; what had not finished is counted, is in no mean and ends no run."""
    own, file = tmp_path / "own.py", tmp_path / "eval.yaml"
    own.write_text(
        "import asyncio\n"
        "from slime.rollout.generate import generate as default\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if -sample.index % 3 == 0 or sample.metadata.get('slow'):\n"
        "        await asyncio.sleep(300)\n"
        "    return await default(args, sample, sampling_params)\n"
    )
    path = str(write_prompts(tmp_path / "held.jsonl", 6))
    entries: dict[str, dict[str, Any]] = {
        "some": {"min_eval_samples": 4},
        "few": {"min_eval_samples": 5},
        "none": {"metadata_overrides": {"slow": True}},
    }
    datasets = {name: {"path": path, "eval_task_timeout": 2.0, **entry} for name, entry in entries.items()}
    file.write_text(json.dumps({"eval": {"datasets": datasets}}))
    hook = ("--custom-generate-function-path", f"{own}:generate", "--eval-max-failed-fraction", "0")
    args = rollout_args(tmp_path, *hook, "--eval-interval", "1", "--eval-config", str(file))

    async def work(manager: RolloutManager) -> dict[str, float]:
        return await manager.evaluate(0)

    metrics = asyncio.run(with_manager(args, FakeEngine(), work))
    late, scored = ([metrics[f"eval/{name}-num_{kind}"] for name in entries] for kind in ("late", "scored"))
    assert late == [2, 2, 6] and scored == [4, 4, 0]
    assert "eval/some" in metrics and "eval/few" not in metrics and "eval/none" not in metrics
    assert "eval/few has no score: only 4 executions are scored, and min_eval_samples is 5" in caplog.text


def test_no_grader_is_a_configuration_mistake(tmp_path: Path) -> None:
    args = rollout_args(tmp_path).replace(rm_type=None)

    async def work(manager: RolloutManager) -> None:
        with pytest.raises(ConfigError, match="no grader"):
            await manager.generate(0)

    asyncio.run(with_manager(args, FakeEngine(), work))


def test_progress_says_what_runs() -> None:
    progress = Progress()
    assert str(progress) == ""
    progress.begin("groups", 8)
    progress.done = 2
    assert str(progress) == "2/8 groups", "no rate before the first token"
    progress.tokens, progress.started = 300, progress.started - 10
    assert str(progress) == "2/8 groups, 30 tokens/s"
    progress.started -= 10
    assert str(progress) == "2/8 groups, 15 tokens/s"


def test_tokens_count_as_they_arrive_and_a_silent_engine_changes_nothing() -> None:
    """Law: the rate counts tokens of unfinished responses, and none that an earlier step received."""
    received = [1000]
    progress = Progress(arrived=lambda: received[0])
    progress.begin("groups", 8)
    assert str(progress) == "0/8 groups"
    received[0], progress.started = 1200, progress.started - 10
    assert str(progress) == "0/8 groups, 20 tokens/s"
    seen = progress._seen
    assert str(progress) == "0/8 groups, 20 tokens/s" and progress._seen == seen, "so 'no progress' can be reported"


def test_lengths_of_right_answers_are_logged_where_they_are_asked_for(tmp_path: Path) -> None:
    group = [finished(0, index, reward=reward) for index, reward in enumerate((1.0, 0.0, 1.0))]
    for sample, more in zip(group, (1, 3, 5), strict=True):
        sample.append_response_tokens([9] * more, log_probs=[-0.1] * more, weight_version=2, finish_reason="stop")
    args = rollout_args(tmp_path)
    assert not [name for name in sample_metrics(args, [group]) if "correct" in name]
    metrics = sample_metrics(args.replace(log_correct_samples=True), [group])
    found = [metrics[f"rollout/correct_length/{part}"] for part in ("mean", "max", "min")]
    assert found == [5.0, 7.0, 3.0] and metrics["rollout/response_len/mean"] == 5.0


def test_pass_rates_and_kinds_of_a_step_are_logged_where_they_are_asked_for(tmp_path: Path) -> None:
    def group(index: int, *scores: float) -> list[Sample]:
        kinds = {1.0: "right", 0.0: "wrong"}
        return [
            finished(index, 4 * index + i, reward={"score": score, "kind": kinds[score], "form": score / 2 + i})
            for i, score in enumerate(scores)
        ]

    groups = [group(0, 1.0, 0.0, 0.0, 0.0), group(1, 1.0, 1.0, 1.0, 1.0)]
    args = rollout_args(tmp_path, "--reward-key", "score", "--n-samples-per-prompt", "4")
    assert not [name for name in sample_metrics(args, groups) if "pass" in name or "error_cat" in name]
    metrics = sample_metrics(args.replace(log_passrate=True, log_reward_category="kind"), groups)
    assert {k: metrics[f"passrate/pass@{k}"] for k in (1, 2, 4)} == {1: 0.625, 2: 0.75, 4: 1.0}
    assert (metrics["rollout/error_cat/right"], metrics["rollout/error_cat/wrong"]) == (0.625, 0.375)
    scores = {name: value for name, value in metrics.items() if name.startswith("rollout/score/")}
    assert scores == {"rollout/score/score": 0.625, "rollout/score/form": 0.3125 + 1.5}, "numbers of a dict, no words"
    many = [[finished(0, 0, reward={f"key {i}": float(i) for i in range(99)} | {"score": 1.0})]]
    assert sum(name.startswith("rollout/score/") for name in sample_metrics(args, many)) == 20
