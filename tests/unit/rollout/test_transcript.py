"""Law 1: each trained token is an id that an engine sampled where it stands, and the reason says where it is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.core.batch import TrainBatch, trains_any
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.observability.logs import ForDriver
from slime.rollout import transcript
from slime.rollout.client.call import Generation
from slime.rollout.manager import RolloutManager
from slime.rollout.recordings import save_rollout
from slime.rollout.transcript import REFUSED, Transcript, _Strays, not_sampled
from tests.support.fake_clock import Answered
from tests.support.fake_engine import FakeEngine
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager
from tests.unit.rollout import truth_hooks


def generated(*tokens: int, version: int = 3) -> Generation:
    return Generation(tokens, tuple(-0.5 * t for t in tokens), "stop", version, "")


def transcript_of(*answers: tuple[list[int], Generation]) -> Transcript:
    made = Transcript()
    for ids, generation in answers:
        made.end_call(Answered(ids, generation))
    return made


def test_a_sample_of_a_rollout_function_gets_what_strays_know_and_is_refused_if_they_know_half() -> None:
    """Law: a sample that an execution has checked, or of which nothing is known, is left as it is."""
    strays = _Strays()
    strays.end_call(Answered([1, 2], generated(5, 6)))
    made = Sample(tokens=[1, 2, 5, 6], response_length=2, rollout_log_probs=[-2.5, -3.0])
    assert strays.complete_made(made) == "" and made.token_versions == [3, 3]
    encoded_again = Sample(tokens=[1, 2, 5, 6, 7], response_length=3, rollout_log_probs=[-2.5, -3.0, -3.5])
    assert "response token 2" in strays.complete_made(encoded_again)
    for other in (
        Sample(tokens=[1, 9], response_length=1, rollout_log_probs=[-1.0]),
        Sample(tokens=[1, 9], response_length=1, rollout_log_probs=[-1.0], token_versions=[2]),
    ):
        before = other.to_dict()
        assert strays.complete_made(other) == "" and other.to_dict() == before


def test_what_a_call_of_a_rollout_function_sampled_is_known_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of answers that are dropped, none is of the call; what began before them is left to the function."""
    monkeypatch.setattr(transcript, "MAX_STRAYS", 4)
    strays = _Strays()
    for number in range(6):
        strays.end_call(Answered([8, number], generated(9)))
    assert strays.forgot
    with strays.kept():
        for number in range(10):
            strays.end_call(Answered([1, number], generated(5, 6)))
        first = Sample(tokens=[1, 0, 5, 6], response_length=2, rollout_log_probs=[-2.5, -3.0])
        assert strays.complete_made(first) == "" and first.token_versions == [3, 3]
        again = Sample(tokens=[1, 0, 5, 6, 7], response_length=3, rollout_log_probs=[-2.5, -3.0, -3.5])
        assert "response token 2" in strays.complete_made(again)
        begun_before = Sample(tokens=[2, 4, 1, 9, 5, 6], response_length=4, rollout_log_probs=[-2.0, 0.0, -2.5, -3.0])
        strays.end_call(Answered([2, 4, 1, 9], generated(5, 6)))
        assert strays.complete_made(begun_before) == ""
    assert len(strays._answers) == 2


def test_what_the_code_left_out_is_filled_in() -> None:
    said = transcript_of(([1, 2], generated(5, 6)))
    sample = Sample(tokens=[1, 2, 5, 6], response_length=2)
    said.complete(sample)
    assert (sample.rollout_log_probs, sample.token_versions) == ([-2.5, -3.0], [3, 3])
    sample = Sample(tokens=[1, 5, 6, 7], response_length=3, token_versions=[2], rollout_log_probs=[-2.5, -3.0, -3.5])
    transcript_of(([1, 5], generated(6, 7))).complete(sample)
    assert sample.token_versions == [2, 3, 3], "a continued sample keeps the versions that it has"
    sample = Sample(tokens=[1, 5, 9], response_length=2, loss_mask=[1, 0])
    said = transcript_of(([1], generated(5, 6, 7)))
    said.complete(sample)
    assert sample.token_versions == [3, NOT_SAMPLED] and not said.problem(sample), "it may end before its answer does"


LAW_1 = {
    "as sampled": ({}, ""),
    "another first turn": (
        {"tokens": [1, 2, 5, 7, 8, 9, 4]},
        r"token 1 \(id 7\) .* no engine sampled it after the",
    ),
    "other ids behind which the second turn was sampled": (
        {"tokens": [1, 2, 5, 6, 8, 3, 4], "loss_mask": [1, 1, 0, 0, 1]},
        r"token 4 \(id 4\) .* got a different prefix: token 5 of the sample is id 3, but the engine had id 9",
    ),
    "another prompt": (
        {"tokens": [1, 3, 5, 6, 8, 9, 4]},
        r"token 0 \(id 5\) .* token 1 of the sample is id 3, but the engine had id 2 there",
    ),
    "a tool's answer in the loss": ({"loss_mask": None}, r"token 2 \(id 8\) is trained"),
    "another log-prob": ({"rollout_log_probs": [-2.5, -3.0, 0.0, 0.0, -2.1]}, "token 4 has log-prob -2.1"),
    "another version": ({"token_versions": [3, 2, -1, -1, 4]}, "token 1 has weight version 2"),
    "as sampled, in single precision": ({"rollout_log_probs": [np.float32(-2.5), -3.0, 0, 0, np.float32(-2.0)]}, ""),
    "not trained": ({"tokens": [1, 3, 5, 6, 8, 9, 4], "remove_sample": True}, ""),
    "masked": ({"tokens": [1, 2, 5, 7, 8, 9, 4], "loss_mask": [1, 0, 0, 0, 0]}, ""),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAW_1)
def test_each_trained_token_was_sampled_where_it_stands(name: str, packed: bool) -> None:
    """Law 1, whatever wrote the sample, versions included: the reason names the first token and where ids differ."""
    changes, reason = LAW_1[name]
    said = transcript_of(([1, 2], generated(5, 6)), ([1, 2, 5, 6, 8, 9], generated(4, version=4)))
    right: dict[str, Any] = {
        "tokens": [1, 2, 5, 6, 8, 9, 4],
        "loss_mask": [1, 1, 0, 0, 1],
        "rollout_log_probs": [-2.5, -3.0, 0.0, 0.0, -2.0],
        "token_versions": [3, 3, -1, -1, 4],
    }
    sample = Sample(index=1, response_length=5, **{**right, **changes})
    if packed:
        sample.pack()
    assert re.search(reason, said.problem(sample)) if reason else not said.problem(sample)


def test_of_two_answers_to_the_same_ids_a_sample_is_one() -> None:
    one, other = generated(5, 6), Generation((5, 6), (-1.0, -2.0), "stop", 4, "")
    said = transcript_of(([1], one), ([1], other), ([1], generated(9)))
    for log_probs, version in (([-2.5, -3.0], 3), ([-1.0, -2.0], 4)):
        sample = Sample(tokens=[1, 5, 6], response_length=2, rollout_log_probs=log_probs)
        said.complete(sample)
        assert sample.token_versions == [version] * 2 and not said.problem(sample)
        sample.token_versions = [7 - version] * 2
        assert "weight version" in said.problem(sample), "the version of the one with the log-probs of the other"


def sibling(num_masked: int, *tokens: int, first: int = 1) -> Sample:
    """One in whose turns the tokens 8 and 9 are context."""
    sampled = [int(t not in (8, 9)) for t in tokens[first:]]
    mask = [0 if i < num_masked else one for i, one in enumerate(sampled)]
    versions = [3 if one else NOT_SAMPLED for one in sampled]
    said = [-0.5 * t if one else 0.0 for t, one in zip(tokens[first:], sampled, strict=True)]
    sample = Sample(tokens=list(tokens), response_length=len(sampled), loss_mask=mask, token_versions=versions)
    sample.rollout_log_probs = said
    return sample


def test_turns_and_trained_tokens_that_siblings_share_are_counted() -> None:
    said = transcript_of(([1], generated(5, 6)), ([1, 5, 6, 8], generated(4)), ([1, 5, 6, 8, 4, 9], generated(7, 2)))
    turns = [(1, 5, 6), (1, 5, 6, 8, 4), (1, 5, 6, 8, 4, 9, 7, 2)]
    assert said.of_siblings([sibling(0, *one) for one in turns]) == [(1, 0), (1, 2), (1, 3)]
    masked = [sibling(num, *one) for num, one in zip((0, 3, 5), turns, strict=True)]
    assert said.of_siblings(masked) == [(1, 0), (1, 0), (1, 0)]
    left_out = sibling(0, *turns[1])
    left_out.remove_sample = True
    assert said.of_siblings([sibling(0, *turns[0]), left_out]) == [(1, 0), (1, 0)]
    own = [sibling(0, *one, first=first) for one, first in zip(turns, (1, 4, 6), strict=True)]
    assert said.of_siblings(own) == [(1, 0), (1, 0), (1, 0)], "earlier turns are in the prompt"


def test_equal_answers_that_engines_sampled_separately_are_no_repetition() -> None:
    """Two attempts at one prompt may begin alike, or be the same altogether."""
    said = transcript_of(([1], generated(5, 6)), ([1], generated(5, 6)), ([1], generated(5, 7)))
    attempts = [sibling(0, 1, 5, 6), sibling(0, 1, 5, 6), sibling(0, 1, 5, 7)]
    assert said.of_siblings(attempts) == [(1, 0)] * 3
    assert said.of_siblings([*attempts, sibling(0, 1, 5, 7)])[-1] == (0, 2)


def test_what_an_earlier_try_sampled_was_checked_then() -> None:
    held = {"loss_mask": [1, 0], "rollout_log_probs": [-2.5, 0.0], "token_versions": [2, NOT_SAMPLED]}
    said = Transcript.behind(Sample(tokens=[1, 5, 8], response_length=2, **held))
    said.end_call(Answered([1, 5, 8], generated(6)))
    sample = Sample(tokens=[1, 5, 8, 6], response_length=3, loss_mask=[1, 0, 1])
    sample.rollout_log_probs, sample.token_versions = [-2.5, 0.0, -3.0], [2, NOT_SAMPLED, 3]
    assert not said.problem(sample)
    sample.loss_mask = [1, 1, 1]
    assert "token 1 (id 8) is trained" in said.problem(sample)


def test_tokens_of_a_client_of_ones_own_are_not_trained() -> None:
    claimed = Sample(tokens=[1, 5], response_length=1, rollout_log_probs=[-1.0], token_versions=[3])
    assert "sent no request through the run's client" in Transcript().problem(claimed)
    given = Sample(tokens=[1, 5], response_length=1)
    assert not Transcript().problem(given) and "--train-unsampled-tokens" in not_sampled(given)


@pytest.mark.parametrize(
    ("versions", "log_probs", "place"),
    [
        (None, None, 0),
        (None, [0.0, 0.0, 0.0], 0),
        ([NOT_SAMPLED] * 3, None, 0),
        ([3, 3, NOT_SAMPLED], [-1.0, 0.0, 0.0], 2),
        ([3, 3, NOT_SAMPLED], [-1.0, 0.0, -1.0], None),
        (None, [-1.0, 0.0, -1.0], None),
        ([3, 3, 3], [0.0, 0.0, 0.0], None),
    ],
)
def test_a_trained_token_has_a_version_or_a_log_prob(versions: Any, log_probs: Any, place: int | None) -> None:
    sample = Sample(tokens=[1, 5, 6, 7], response_length=3, token_versions=versions, rollout_log_probs=log_probs)
    assert not_sampled(sample).count(f"response token {place} ") == (place is not None)
    sample.loss_mask = [0, 0, 0]
    assert not_sampled(sample) == "", "masked tokens are not trained"


def test_a_long_conversation_is_held_once() -> None:
    said, ids = Transcript(), list(range(1000))
    for _ in range(50):
        said.end_call(Answered(ids, generated(*range(7, 27))))
        ids = [*ids, *range(7, 27), 1, 2, 3]
    assert sum(len(one.new_ids) + len(one.tokens) for one in said._answers) == len(ids) - 3


# --- in whole steps ---------------------------------------------------------------------------------------------------

HOOKS = "tests.unit.rollout.truth_hooks"
GENERATE, GROUP_RM = "--custom-generate-function-path", ("--group-rm", "--custom-rm-path", f"{HOOKS}.one_reward_each")
SURPLUS = ("--over-sampling-batch-size", "16", "--partial-rollout")
STEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    # name: (samples of 16 that are left out, what asks for it)
    "some are untrue": (8, (GENERATE, "odd_ones_are_untrue")),
    "some of groups that are issued again": (8, (GENERATE, "odd_ones_are_untrue", *SURPLUS)),
    "some of a group that is graded together": (8, (GENERATE, "odd_ones_are_untrue", *GROUP_RM)),
    "one beside a failure": (4, (GENERATE, "untrue_beside_a_failure")),
    "one beside a failure, graded together": (4, (GENERATE, "untrue_beside_a_failure", *GROUP_RM)),
    "a filter changes one": (4, ("--dynamic-sampling-filter-path", "spoiling_filter")),
    "a sample filter changes one": (4, ("--rollout-sample-filter-path", "spoiling_sample_filter")),
    "a sample filter masks": (0, ("--rollout-sample-filter-path", "masking_sample_filter")),
    "a hook returns a new sample": (0, ("--rollout-sample-hook-path", "a_new_sample")),
    "the end is trained": (0, (GENERATE, "trains_the_end")),
    "asked by a thread": (0, (GENERATE, "in_a_thread")),
    "asked by a shared task": (0, (GENERATE, "by_a_shared_task")),
    "learned by heart": (0, (GENERATE, "learns_by_heart", "--train-unsampled-tokens")),
}


@pytest.mark.parametrize("name", quick(STEPS, "some are untrue"))
def test_what_is_untrue_is_left_out_alone(name: str, tmp_path: Path) -> None:
    """Law 1 in the loop: what differs is trained in no later try either; what is right is trained, whoever asked."""
    num_left_out, (flag, hook, *flags) = STEPS[name]
    truth_hooks.TRIES.clear()
    truth_hooks.SHARED.clear()
    args = rollout_args(tmp_path, "--n-samples-per-prompt", "4", flag, f"{HOOKS}.{hook}", *flags)

    async def work(manager: RolloutManager) -> list[TrainBatch]:
        made = []
        for step in range(2):
            made.append((await manager.generate(step))[0])
            manager.commit(step)
        return made

    for batch in asyncio.run(with_manager(args, FakeEngine(), work)):
        left_out = [s for s in batch.samples if np.isnan(s.reward)]
        assert len(batch.samples) == 16 and len(left_out) == num_left_out
        if "learned" not in name:
            trained = [s for s in batch.samples if not np.isnan(s.reward)]
            assert all(s.rollout_log_probs is not None and (s.token_versions >= 0).all() for s in trained)


@contextlib.contextmanager
def said_to_the_user() -> Iterator[ForDriver]:
    """What the console shows of the block."""
    driver = ForDriver()
    logging.getLogger().addHandler(driver)
    try:
        yield driver
    finally:
        logging.getLogger().removeHandler(driver)


def one_step(args: Any) -> tuple[TrainBatch, dict[str, float]]:
    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(0)

    found: tuple[TrainBatch, dict[str, float]] = asyncio.run(with_manager(args, FakeEngine(), work))
    return found


def test_text_that_no_engine_sampled_is_refused_and_the_console_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: a generate function that asks no engine trains nothing, unless the run is said to train given text."""
    with said_to_the_user() as driver:
        batch, metrics = one_step(rollout_args(tmp_path, GENERATE, f"{HOOKS}.learns_by_heart"))
    assert len(batch.samples) == 8 and not trains_any(batch.samples)
    assert metrics[REFUSED] == 3 * 8.0, "in each attempt"
    assert metrics["rollout/num_unscored_samples"] == 8.0 and metrics["rollout/num_failed_groups"] == 0.0
    refused, nothing = driver.take()
    assert refused.startswith("step 0: 24 samples are refused")
    assert nothing.startswith("step 0 TRAINS NOTHING") and "of its 8 samples, 8 are refused, 0 others" in nothing
    assert "no engine of the run is known to have sampled it" in nothing and "--train-unsampled-tokens" in nothing
    caplog.clear()
    flags = ("--n-samples-per-prompt", "4", GENERATE, f"{HOOKS}.odd_ones_are_untrue")
    with said_to_the_user() as driver:
        _, metrics = one_step(rollout_args(tmp_path, *flags))
    assert metrics[REFUSED] == 8.0 == metrics["rollout/num_unscored_samples"]
    (told,) = driver.take()
    assert told.startswith("step 0: 8 samples are refused") and "not as sampled: response token" in told
    assert caplog.text.count("execution 1 of group 0 is refused") == 1


def test_a_rollout_function_trains_only_what_is_sampled(tmp_path: Path) -> None:
    """Law: text of a rollout function is refused sample by sample; log-probs of engines of its own are enough."""
    flags = ("--rollout-function-path", f"{HOOKS}.from_texts")
    batch, metrics = one_step(rollout_args(tmp_path, *flags))
    assert [np.isnan(s.reward) for s in batch.samples] == [True, False] * 4 and metrics[REFUSED] == 4.0
    batch, metrics = one_step(rollout_args(tmp_path, *flags, "--train-unsampled-tokens"))
    assert not any(np.isnan(s.reward) for s in batch.samples) and metrics[REFUSED] == 0.0
    with said_to_the_user() as driver:
        batch, metrics = one_step(rollout_args(tmp_path, "--rollout-function-path", f"{HOOKS}.all_from_texts"))
    assert len(batch.samples) == 8 and not trains_any(batch.samples) and metrics[REFUSED] == 8.0
    assert driver.take()[-1].startswith("step 0 TRAINS NOTHING"), "and the run goes on"


GROUPS_WITHOUT: dict[str, tuple[str, ...]] = {
    "graded one by one": (),
    "graded together": GROUP_RM,
    "filtered": ("--dynamic-sampling-filter-path", "slime.rollout.filters.check_reward_nonzero_std"),
    "converted": ("--custom-convert-samples-to-train-data-path", f"{HOOKS}.converted"),
    "one sample of a prompt": ("--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce_plus_plus"),
    "fully async": ("--fully-async",),
}


@pytest.mark.parametrize("name", quick(GROUPS_WITHOUT, "graded one by one"))
def test_a_run_whose_samples_are_all_refused_goes_on(name: str, tmp_path: Path) -> None:
    """Law: refused text never ends a run, and is in no later try taken for sampled text."""
    flags = ("--n-samples-per-prompt", "4", GENERATE, f"{HOOKS}.always_untrue", *GROUPS_WITHOUT[name])
    args = rollout_args(tmp_path, *flags, synchronous="--fully-async" not in flags)

    async def work(manager: RolloutManager) -> list[tuple[TrainBatch, dict[str, float]]]:
        made = []
        for step in range(3):
            made.append(await manager.generate(step))
            manager.commit(step)
        return made

    with said_to_the_user() as driver:
        for batch, metrics in asyncio.run(with_manager(args, FakeEngine(), work)):
            assert len({s.group_index for s in batch.samples}) == 4 and not trains_any(batch.samples)
            assert metrics["rollout/num_unscored_samples"] == len(batch.samples) <= metrics[REFUSED]
            assert metrics["rollout/num_failed_groups"] == metrics["rollout/num_filtered_groups"] == 0.0
    assert sum("TRAINS NOTHING" in line for line in driver.take()) == 3


def test_a_group_with_too_few_sampled_executions_is_not_compared(tmp_path: Path) -> None:
    """Law: one true execution of four is no group, so it is not trained on either; other groups are."""
    flags = ("--n-samples-per-prompt", "4", GENERATE, f"{HOOKS}.one_of_the_first_group_is_true")
    batch, metrics = one_step(rollout_args(tmp_path, *flags))
    assert [np.isnan(s.reward) for s in batch.samples] == [True] * 4 + [False] * 12
    assert metrics["rollout/num_unscored_samples"] == 4.0 and metrics["rollout/num_failed_groups"] == 0.0


def test_an_execution_that_samples_a_placeholder_of_an_image_samples_again(tmp_path: Path) -> None:
    """Law: what no engine can read again starts over by itself. Its group is not dropped."""
    truth_hooks.TRIES.clear()
    batch, metrics = one_step(rollout_args(tmp_path, GENERATE, f"{HOOKS}.samples_a_placeholder_once"))
    assert not any(np.isnan(s.reward) for s in batch.samples)
    assert [truth_hooks.TRIES[index] for index in range(8)] == [1, 2, 1, 1, 1, 1, 1, 1]
    assert metrics["rollout/num_failed_groups"] == 0 and metrics["rollout/num_retried_groups"] == 1


def test_a_conversion_and_a_record_train_only_what_is_sampled(tmp_path: Path) -> None:
    flags = ("--custom-convert-samples-to-train-data-path", f"{HOOKS}.converted")
    batch, _ = one_step(rollout_args(tmp_path, *flags))
    assert [np.isnan(s.reward) for s in batch.samples] == [True] + [False] * 7
    groups = [[Sample(0, i, "", [1, 5], response_length=1, reward=1.0, status=Status.COMPLETED)] for i in range(2)]
    groups[1][0].rollout_log_probs = [-1.0]
    save_rollout(tmp_path / "0", 0, groups)
    batch, metrics = one_step(rollout_args(tmp_path, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}")))
    assert [np.isnan(s.reward) for s in batch.samples] == [True, False] and metrics[REFUSED] == 1.0


def test_another_try_begins_with_what_the_dataset_gave(tmp_path: Path) -> None:
    """Law: whatever prompt, ids and metadata an untrue try left, the next one has the dataset's."""
    truth_hooks.TRIES.clear()
    truth_hooks.PROMPTS.clear()
    args = rollout_args(tmp_path, GENERATE, f"{HOOKS}.own_prompt")
    batch, _ = one_step(args)
    assert len(batch.samples) == 8 and not any(np.isnan(s.reward) for s in batch.samples)
    assert len(truth_hooks.PROMPTS) == 16 and all("+" in prompt for prompt, *_ in truth_hooks.PROMPTS)
    assert all(seen is None for *_, seen in truth_hooks.PROMPTS)
    by_prompt = {prompt: ids for prompt, ids, _ in truth_hooks.PROMPTS}
    assert all(ids == by_prompt[prompt] for prompt, ids, _ in truth_hooks.PROMPTS)


def test_a_group_with_an_untrue_sample_is_not_finished_while_another_is_under_way(tmp_path: Path) -> None:
    flags = ("--n-samples-per-prompt", "4", GENERATE, f"{HOOKS}.untrue_beside_a_long_one", "--fully-async")
    args = rollout_args(tmp_path, *flags, "--rollout-max-response-len", "100", synchronous=False)
    engine = FakeEngine(tick_s=0.005, stop_after=None)

    async def work(manager: RolloutManager) -> TrainBatch:
        step = asyncio.create_task(manager.generate(0))
        while len(engine.requests) < 16 or not 0 < len(engine.running) <= 8:
            await asyncio.sleep(0.005)
        await manager.pause(hand_back=True)
        manager.resume()
        return (await step)[0]

    batch: TrainBatch = asyncio.run(with_manager(args, engine, work))
    assert len(batch.samples) == 16 and sum(s.response_length == 100 for s in batch.samples) == 4


def test_a_task_that_outlives_the_execution_that_started_it_serves_others(tmp_path: Path) -> None:
    """A judge behind a task of the first execution: its verdicts of later steps are whole ones."""
    truth_hooks.SHARED.clear()
    flags = (GENERATE, f"{HOOKS}.judged_by_a_shared_task", "--rollout-sample-filter-path", f"{HOOKS}.noted")
    args = rollout_args(tmp_path, *flags, "--over-sampling-batch-size", "8")
    truth_hooks.TRAINED.clear()

    async def work(manager: RolloutManager) -> None:
        for step in range(2):
            await manager.generate(step)
            manager.commit(step)

    asyncio.run(with_manager(args, FakeEngine(tick_s=0.002, stop_after=None), work))
    assert len(truth_hooks.TRAINED) == 16 and all(s.metadata["whole"] for s in truth_hooks.TRAINED)
