"""Workflows on the path of every rollout: rejection sampling, a teacher's log-probs, dumps of what was made."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import second_try
from slime.core.batch import TrainBatch
from slime.core.errors import ConfigError, EngineError, RequestRejected
from slime.core.sample import Sample
from slime.core.text import EngineKeys
from slime.rollout.client.teacher_client import TeacherClient, parse_log_probs
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import head_and_tail, load_rollout, save_train_batch
from slime.rollout.workflows.rejection import has_right, keep_best, keep_right
from slime.settings.rules import teacher_scores_at_another_temperature
from tests.support.fake_engine import FakeEngine, serve
from tests.support.rollout import rollout_args, with_manager, write_prompts

HOOKS = Path(__file__).with_name("workflow_hooks.py")
OPD = ("--use-opd", "--opd-type", "sglang")


class FakeTeacher(FakeEngine):
    """Says -index/100 about each token, as SGLang 0.5.16 answers to `logprob_start_len`."""

    async def _sample(self, body: Any, stop: Any) -> Any:
        ids, start = body["input_ids"], body["logprob_start_len"]
        pairs = [[None if i == start else -i / 100, ids[i], None] for i in range(start, len(ids))]
        return {"meta_info": {"input_token_logprobs": pairs, "weight_version": "default"}}


def distil(tmp_path: Path, teacher: FakeTeacher, *flags: str, engine: FakeEngine | None = None) -> Any:
    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    async def main() -> Any:
        async with serve(teacher):
            args = rollout_args(tmp_path, *OPD, "--opd-teacher-url", teacher.url, "--rm-type", "none", *flags)
            return await with_manager(args, engine or FakeEngine(), work, EngineKeys("of the run"))

    return asyncio.run(main())


def test_the_teacher_judges_the_sampled_tokens(tmp_path: Path) -> None:
    teacher, engine = FakeTeacher(faults=deque([503, "drop"])), FakeEngine(faults=deque(["drop"]))
    batch, _ = distil(tmp_path, teacher, "--opd-teacher-api-key", "of the teacher", engine=engine)
    assert teacher.keys == {"Bearer of the teacher"} and engine.keys == {"Bearer of the run"}
    assert len(batch.samples) == 8 and len(teacher.requests) == 10, "503 and a lost connection are asked again"
    for sample in batch.samples:
        first = sample.num_tokens - sample.response_length
        expected = -np.arange(first, sample.num_tokens, dtype=np.float32) / 100
        np.testing.assert_allclose(sample.teacher_log_probs, expected, rtol=1e-6)
        assert sample.reward == 0.0, "without a grader the teacher is all there is"
    assert all(r["sampling_params"]["max_new_tokens"] == 0 for r in teacher.requests)


def test_what_a_teacher_refuses_is_given_up_and_not_asked_again(tmp_path: Path) -> None:
    teacher = FakeTeacher(faults=deque([400] * 999))
    with pytest.raises(EngineError, match="groups failed in step"):
        distil(tmp_path, teacher)
    assert len(teacher.requests) == len({tuple(r["input_ids"][:8]) for r in teacher.requests}) * 2


@pytest.mark.parametrize(("fault", "tries"), [(429, 5), (500, 2), (400, 1)])
def test_a_teacher_is_asked_as_often_as_an_engine(fault: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: five tries, of an internal error two, of a refusal one."""
    monkeypatch.setattr("slime.rollout.client.teacher_client.FIRST_RETRY_S", 0.001)

    async def main() -> None:
        async with serve(FakeTeacher(faults=deque([fault] * 99))) as teacher:
            client = TeacherClient(teacher.url, request_timeout_s=60.0)
            with pytest.raises((EngineError, RequestRejected), match=f"HTTP {fault}"):
                await client.log_probs([5, 6, 7], 2)
            await client.close()
            assert len(teacher.requests) == tries

    asyncio.run(main())


def test_a_teacher_that_never_answers_costs_its_group_alone(tmp_path: Path) -> None:
    batch, metrics = distil(tmp_path, FakeTeacher(faults=deque(["hang"])), "--request-timeout-s", "5")
    assert len(batch.samples) == 8 and all(s.teacher_log_probs is not None for s in batch.samples)
    assert metrics["rollout/num_quarantined_groups"] == 1, metrics


@pytest.mark.parametrize("pairs", [[[None, 5, None]], [[-0.1, 6, None], [None, 7, None]], [[-1, 7, None]]])
def test_log_probs_of_other_tokens_are_refused(pairs: Any) -> None:
    with pytest.raises(EngineError, match=r"the teacher('s log-prob| returned log-probs)"):
        parse_log_probs({"meta_info": {"input_token_logprobs": pairs}}, [6, 7])


def test_a_teacher_at_another_temperature_is_warned_about(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, *OPD, "--opd-teacher-url", "http://t", "--rollout-temperature", "0.5")
    assert "at temperature 1" in str(teacher_scores_at_another_temperature(args))
    with pytest.raises(ConfigError, match="opd_teacher_url"):
        rollout_args(tmp_path, "--opd-teacher-url", "http://t", "--strict")
    alone = rollout_args(tmp_path, "--opd-teacher-url", "http://t")
    assert "--use-opd" in alone.idle["opd_teacher_url"] and not alone.rollout_sample_hook_path, "nobody is asked"


def group(*rewards: float | None) -> list[Sample]:
    return [Sample(group_index=0, index=i, reward=reward) for i, reward in enumerate(rewards)]


def test_only_what_is_kept_is_learned(tmp_path: Path) -> None:
    args = rollout_args(tmp_path)
    groups = [group(0.0, 1.0, 1.0), group(0.2, 0.9, 0.9), group(0.5, 0.5)]
    kept = []
    for choose in (keep_right, keep_best):
        copies = [[Sample.from_dict(s.to_dict()) for s in g] for g in groups]
        choose(args, copies)
        kept.append([[not s.remove_sample for s in g] for g in copies])
    assert kept[0] == [[False, True, True], [False] * 3, [False] * 2]
    assert kept[1] == [[False, True, False], [False, True, False], [False] * 2]
    assert [has_right(args, g).keep for g in groups] == [True, False, False]


def test_an_unscored_execution_is_no_zero(tmp_path: Path) -> None:
    """Law: without a reward an execution is never kept, is worth less than none, and makes no difference to compare."""
    args = dataclasses.replace(rollout_args(tmp_path), custom={"min_reward": -1.0, "num_kept": 2})
    groups = [group(None, -0.5, -2.0), group(None, -0.5, -0.5, -3.0), group(0.5, None, 0.5), group(None, None)]
    kept = []
    for choose in (keep_right, keep_best):
        copies = [[Sample.from_dict(s.to_dict()) for s in g] for g in groups]
        choose(args, copies)
        kept.append([[s.index for s in g if not s.remove_sample] for g in copies])
    assert kept[0] == [[1], [1, 2], [0, 2], []]
    assert kept[1] == [[1, 2], [1, 2], [], []]
    assert [has_right(args, g).keep for g in groups] == [True, True, True, False]


def test_fine_tuning_on_sampled_answers_has_engines_and_masks(tmp_path: Path) -> None:
    workflow = "slime.rollout.workflows.rejection"
    args = rollout_args(
        tmp_path,
        "--loss-type",
        "sft_loss",
        "--rollout-function-path",
        "slime.rollout.loop.generate_rollout",
        "--rollout-sample-filter-path",
        f"{workflow}.keep_right",
        "--drop-masked-executions",
        "--custom-rm-path",
        f"{HOOKS}:odd_is_right",
    )
    assert not args.debug_train_only, "the answers are sampled by engines"

    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    batch, metrics = asyncio.run(with_manager(args, FakeEngine(), work))
    assert [bool(s.loss_mask.any()) for s in batch.samples] == [False, True] * 4
    assert metrics["rollout/raw_reward"] == 0.5


def test_a_dump_holds_rollouts_batches_evaluations_and_the_tokenizer(tmp_path: Path) -> None:
    held, dump = write_prompts(tmp_path / "held.jsonl", 2), tmp_path / "dump"
    args = rollout_args(
        tmp_path, "--dump-details", str(dump), "--eval-interval", "1", "--eval-prompt-data", "held", str(held)
    )

    async def work(manager: RolloutManager) -> Any:
        await manager.evaluate(0)
        return await manager.generate(0)

    batch, _ = asyncio.run(with_manager(args, FakeEngine(), work))
    assert len(load_rollout(dump / "rollout_data" / "0.jsonl.zst")[1]) == 4
    assert len(load_rollout(dump / "rollout_data" / "eval_0_held.jsonl.zst")[1]) == 2
    assert (dump / "tokenizer" / "tokenizer.json").is_file()
    with np.load(dump / "train_data" / "0.npz", allow_pickle=False) as arrays:
        assert int(arrays["rollout_id"]) == 0 and "0/teacher_log_probs" not in arrays
        for i, sample in enumerate(batch.samples):
            np.testing.assert_array_equal(arrays[f"{i}/tokens"], sample.tokens)
            np.testing.assert_array_equal(arrays[f"{i}/rollout_log_probs"], sample.rollout_log_probs)


def test_the_program_of_the_documentation_shows_what_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reproducibility.md").read_text()
    code = page.split("## Which tokens are trained")[1].split("```python\n")[1].split("```")[0]
    code = code.replace("assets/smollm2-135m-instruct", str(tmp_path / "model"))
    record = str(tmp_path / "train_{rollout_id}.npz")
    hint = ("--custom-generate-function-path", "examples.second_try:generate")
    args = rollout_args(tmp_path, "--save-debug-train-data", record, *hint)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[0]

    batch = asyncio.run(with_manager(args, FakeEngine(stop_after=2), work))
    images = dataclasses.replace(batch.samples[0], images=("ab12", "cd"))
    save_train_batch(tmp_path / "train_0.npz", TrainBatch(0, (images, *batch.samples[1:])))
    exec(code.replace("train_0.npz", str(tmp_path / "train_0.npz")), {})
    said = capsys.readouterr().out
    assert said.startswith("0 0 0.0 45<eos>[") and said.count(f"[{second_try.HINT}]45<eos>") == 4


def test_a_part_of_a_rollout_is_its_head_and_its_tail(tmp_path: Path) -> None:
    groups = [group(float(i)) for i in range(7)]

    def kept(part: float | None) -> list[Any]:
        return [g[0].reward for g in head_and_tail(groups, part)]

    assert kept(None) == kept(1.0) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(0.5) == [0, 1, 5, 6] and kept(0.01) == [0] and kept(0.4) == [0, 1, 6]
    args = rollout_args(tmp_path, "--load-debug-rollout-data", "x", "--load-debug-rollout-data-subsample", "0.5")
    assert args.use_dynamic_global_batch_size and args.debug_train_only
    with pytest.raises(ConfigError, match="set both or neither"):
        rollout_args(tmp_path, "--load-debug-rollout-data-subsample", "0.5")
