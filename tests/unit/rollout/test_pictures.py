"""Laws of images in requests: one placeholder for each, ids as they are, and the engine read what is trained.

A placeholder that the model samples is text, in the engine and in the trainer; an engine cannot read it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.core.batch import TrainSample
from slime.core.errors import DataError, EngineError, RequestRejected, SampledPlaceholder
from slime.core.files import ImageFolder
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.rollout.client.call import Call, Generation, Pictures
from slime.rollout.transcript import Transcript
from slime.training.step.vision_encoder import placeholder_starts
from tests.support.fake_clock import Answered

PLACE, VIDEO, IDS = 8, 9, [2, 6, 8, 8, 8, 7, 30, 6, 8, 7, 5]
TWO = Pictures(PLACE, ("data:a", "data:b"), other_ids=frozenset({VIDEO}))


def _event(tokens: list[int], prompt_tokens: int, finish: str = "length") -> dict[str, Any]:
    return {
        "text": "",
        "meta_info": {
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "finish_reason": {"type": finish},
            "prompt_tokens": prompt_tokens,
            "weight_version": "3",
        },
    }


def _call(pictures: Pictures | None = TWO, **params: Any) -> Call:
    return Call(IDS, {"max_new_tokens": 4, **params}, pictures=pictures)


def test_a_request_has_one_placeholder_for_each_image_and_all_other_ids() -> None:
    asked = _call().payload("r", 64)
    assert asked["input_ids"] == [2, 6, 8, 7, 30, 6, 8, 7, 5] and asked["image_data"] == ["data:a", "data:b"]
    plain = _call(None).payload("r", 64)
    assert plain["input_ids"].tolist() == IDS and "image_data" not in plain


def test_an_interrupted_answer_goes_on_behind_its_tokens() -> None:
    call = _call()
    call.payload("r", 64)
    call.take_event(_event([40, 41], len(IDS), "abort"))
    assert call.can_continue and call.payload("r", 64)["input_ids"][-3:] == [5, 40, 41]
    call.take_event(_event([42, 43], len(IDS) + 2))
    assert call.answer().tokens == (40, 41, 42, 43) and call.answer().prompt_tokens == len(IDS)


@pytest.mark.parametrize("sampled", [PLACE, VIDEO])
def test_an_answer_with_a_placeholder_starts_over_instead_of_going_on(sampled: int) -> None:
    call = _call()
    call.payload("r", 64)
    call.take_event(_event([40, sampled], len(IDS), "abort"))
    assert not call.can_continue
    call.start_over()
    assert call.can_continue and call.payload("r", 64)["input_ids"][-1] == 5


@pytest.mark.parametrize("read", [len(IDS) - 1, len(IDS) + 1])
def test_a_prompt_that_the_engine_read_otherwise_is_an_error(read: int) -> None:
    call = _call()
    call.payload("r", 64)
    with pytest.raises(EngineError, match=rf"the engine counts {read} prompt tokens and the trainer {len(IDS)},"):
        call.take_event(_event([40], read))


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([2, 5], RequestRejected),
        ([2, 8, 8, 8, 5], RequestRejected),
        ([2, 8, 5, 8, 5, 8, 5], SampledPlaceholder),
        ([2, 8, 5, 8, 5, 9, 5], SampledPlaceholder),
    ],
)
def test_another_number_of_placeholders_is_refused(ids: list[int], kind: type[EngineError]) -> None:
    """Law: one too many may be sampled, so the execution starts over; one too few is a mistake in code."""
    with pytest.raises(RequestRejected, match=r"runs of placeholders but 2 images") as raised:
        TWO.written(ids)
    assert type(raised.value) is kind


# ---- the images of a sample ----------------------------------------------------------------------------------------

FIRST, LATER = [2, 6, PLACE, PLACE, 7, 30], [6, PLACE, 7, 31]
"""A prompt with one image of two tokens, and an observation with one of one token."""


def _two_turns(*said: tuple[int, ...], images: tuple[tuple[str, ...], ...] = (("a",), ("a", "b"))) -> Transcript:
    """A transcript of the turns `said`, the second after `LATER`."""
    transcript, ids = Transcript(), list(FIRST)
    for tokens, seen in zip(said, images, strict=True):
        answer = Generation(tokens, tuple(-1.0 for _ in tokens), "stop", 3, "")
        transcript.end_call(Answered(list(ids), answer, seen, PLACE if seen else None))
        ids += [*tokens, *LATER]
    return transcript


def _sample(*said: tuple[int, ...], images: tuple[str, ...] = ("a",)) -> Sample:
    response, mask = list(said[0]), [1] * len(said[0])
    for tokens in said[1:]:
        response += [*LATER, *tokens]
        mask += [0] * len(LATER) + [1] * len(tokens)
    return Sample(
        *(0, 0, ""),
        [*FIRST, *response],
        response_length=len(response),
        loss_mask=mask,
        images=list(images),
        status=Status.COMPLETED,
    )


@pytest.mark.parametrize("last", [(40, 41), (40, PLACE), (PLACE, PLACE, 41), (VIDEO, 41), (6, PLACE, 7)])
def test_what_the_model_samples_is_no_image(last: tuple[int, ...]) -> None:
    """Law: a sampled placeholder is text. The sample has the images of its requests, and the trainer shows those."""
    transcript, sample = _two_turns((40,), last), _sample((40,), last)
    transcript.complete(sample)
    assert sample.images == ["a", "b"] and transcript.problem(sample) == ""
    record = TrainSample.from_sample(sample, reward=1.0)
    assert placeholder_starts(record, PLACE, np.asarray([2, 1])).tolist() == [2, len(FIRST) + 2]


def test_each_sibling_has_the_images_of_its_own_requests() -> None:
    transcript = _two_turns((40,), (41,))
    siblings = [_sample((40,)), _sample((40,), (41,)), _sample((40,), images=("a", "b"))]
    for sample in siblings:
        transcript.complete(sample)
        assert transcript.problem(sample) == ""
    assert [one.images for one in siblings] == [["a"], ["a", "b"], ["a"]]
    unfinished = _sample((40,), images=("a", "b"))
    unfinished.status = Status.ABORTED
    transcript.complete(unfinished)
    assert unfinished.images == ["a", "b"], "its next request may show them"


def test_images_are_those_that_the_engine_got_whatever_code_says() -> None:
    """Law: other images, or none where the ids have placeholders, are what the trainer shows too."""
    shown = _two_turns((40,), (41,), images=(("c",), ("c", "b")))
    sample = _sample((40,), (41,), images=("a", "b"))
    shown.complete(sample)
    assert sample.images == ["c", "b"] and shown.problem(sample) == ""
    as_text = _two_turns((40,), (41,), images=((), ()))
    sample = _sample((40,), (41,))
    as_text.complete(sample)
    assert sample.images == [] and as_text.problem(sample) == ""


@pytest.mark.parametrize("images", [((), ("a", "b")), (("c",), ("a", "b")), (("a",), ("c", "b"))])
def test_a_turn_that_got_other_images_than_a_later_one_is_refused(images: tuple[tuple[str, ...], ...]) -> None:
    transcript, sample = _two_turns((40,), (41,), images=images), _sample((40,), (41,))
    transcript.complete(sample)
    assert "response token 0 is trained, but its engine got other images" in transcript.problem(sample)
    sample.loss_mask = [0, 0, 0, 0, 0, 1]
    assert transcript.problem(sample) == ""


def test_what_an_earlier_attempt_was_shown_was_checked_then() -> None:
    begun = _sample((40,), (41,), images=("a", "b"))
    begun.rollout_log_probs = [-1.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    begun.token_versions = [3, *[NOT_SAMPLED] * 4, 3]
    transcript, more = Transcript.behind(begun), Generation((42,), (-1.0,), "stop", 3, "")
    transcript.end_call(Answered(list(begun.tokens), more, ("a", "b"), PLACE))
    for sample, log_probs in ((begun.copy(), []), (_sample((40,), (41, 42)), [-1.0])):
        sample.rollout_log_probs = [*begun.rollout_log_probs, *log_probs]
        sample.token_versions = [*begun.token_versions, *[3 for _ in log_probs]]
        transcript.complete(sample)
        assert sample.images == ["a", "b"] and transcript.problem(sample) == ""


def test_images_are_sent_as_data_uris_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    digest = folder.put(b"\x89PNG")
    assert folder.put(b"\x89PNG") == digest and len(list(folder.folder.iterdir())) == 1
    assert Pictures.of([digest], folder, PLACE).uris == ("data:image/png;base64,iVBORw==",)
    with pytest.raises(DataError, match="image 00 of a sample is missing"):
        Pictures.of(["00"], folder, PLACE)
