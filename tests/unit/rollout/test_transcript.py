"""Law 1: each trained token is an id that an engine sampled where it stands, and the reason says where it is not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from slime.core.sample import NOT_SAMPLED, Sample
from slime.rollout.generation import Generation
from slime.rollout.transcript import Transcript
from tests.support.fake_clock import Answered


def generated(*tokens: int, version: int = 3) -> Generation:
    return Generation(tokens, tuple(-0.5 * t for t in tokens), "stop", version, "")


def transcript_of(*answers: tuple[list[int], Generation]) -> Transcript:
    made = Transcript()
    for ids, generation in answers:
        made.end(Answered(ids, generation))
    return made


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
        r"token 1 \(id 7\) .* no engine sampled it there, behind",
    ),
    "other ids behind which the second turn was sampled": (
        {"tokens": [1, 2, 5, 6, 8, 3, 4], "loss_mask": [1, 1, 0, 0, 1]},
        r"token 4 \(id 4\) .* did not read the ids before it: token 5 of the sample is id 3, and the engine had id 9",
    ),
    "another prompt": (
        {"tokens": [1, 3, 5, 6, 8, 9, 4]},
        r"token 0 \(id 5\) .* token 1 of the sample is id 3, and the engine had id 2 there",
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


def test_what_an_earlier_try_sampled_was_checked_then() -> None:
    held = {"loss_mask": [1, 0], "rollout_log_probs": [-2.5, 0.0], "token_versions": [2, NOT_SAMPLED]}
    said = Transcript.behind(Sample(tokens=[1, 5, 8], response_length=2, **held))
    said.end(Answered([1, 5, 8], generated(6)))
    sample = Sample(tokens=[1, 5, 8, 6], response_length=3, loss_mask=[1, 0, 1])
    sample.rollout_log_probs, sample.token_versions = [-2.5, 0.0, -3.0], [2, NOT_SAMPLED, 3]
    assert not said.problem(sample)
    sample.loss_mask = [1, 1, 1]
    assert "token 1 (id 8) is trained" in said.problem(sample)


def test_tokens_of_a_client_of_ones_own_are_not_trained() -> None:
    claimed = Sample(tokens=[1, 5], response_length=1, rollout_log_probs=[-1.0], token_versions=[3])
    assert "asked no engine through the run's client" in Transcript().problem(claimed)
    assert not Transcript().problem(Sample(tokens=[1, 5], response_length=1)), "learned by heart"


def test_a_long_conversation_is_held_once() -> None:
    said, ids = Transcript(), list(range(1000))
    for _ in range(50):
        said.end(Answered(ids, generated(*range(7, 27))))
        ids = [*ids, *range(7, 27), 1, 2, 3]
    assert sum(len(one.new_ids) + len(one.tokens) for one in said._answers) == len(ids) - 3
