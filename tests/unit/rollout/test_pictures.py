"""Laws of images in requests: one placeholder for each, ids as they are, and the engine read what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError, EngineError, RequestRejected
from slime.core.files import ImageFolder
from slime.rollout.client.call import Call, Pictures

PLACE, IDS = 8, [2, 6, 8, 8, 8, 7, 30, 6, 8, 7, 5]
TWO = Pictures(PLACE, ("data:a", "data:b"))


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
    assert plain["input_ids"] == IDS and "image_data" not in plain


def test_an_interrupted_answer_goes_on_behind_its_tokens() -> None:
    call = _call()
    call.payload("r", 64)
    call.take_event(_event([40, 41], len(IDS), "abort"))
    assert call.can_continue and call.payload("r", 64)["input_ids"][-3:] == [5, 40, 41]
    call.take_event(_event([42, 43], len(IDS) + 2))
    assert call.answer().tokens == (40, 41, 42, 43) and call.answer().prompt_tokens == len(IDS)


def test_an_answer_with_a_placeholder_starts_over_instead_of_going_on() -> None:
    call = _call()
    call.payload("r", 64)
    call.take_event(_event([40, PLACE], len(IDS), "abort"))
    assert not call.can_continue
    call.start_over()
    assert call.can_continue and call.payload("r", 64)["input_ids"][-1] == 5


@pytest.mark.parametrize("read", [len(IDS) - 1, len(IDS) + 1])
def test_a_prompt_that_the_engine_read_otherwise_is_an_error(read: int) -> None:
    call = _call()
    call.payload("r", 64)
    with pytest.raises(EngineError, match=rf"the engine counts {read} prompt tokens and the trainer {len(IDS)},"):
        call.take_event(_event([40], read))


@pytest.mark.parametrize("ids", [[2, 5], [2, 8, 5, 8, 5, 8, 5], [2, 8, 8, 8, 5]])
def test_another_number_of_placeholders_is_refused(ids: list[int]) -> None:
    with pytest.raises(RequestRejected, match=r"runs of placeholders but 2 images"):
        TWO.written(ids)


def test_images_are_sent_as_data_uris_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    digest = folder.put(b"\x89PNG")
    assert folder.put(b"\x89PNG") == digest and len(list(folder.folder.iterdir())) == 1
    assert Pictures.of([digest], folder, PLACE).uris == ("data:image/png;base64,iVBORw==",)
    with pytest.raises(DataError, match="image 00 of a sample is missing"):
        Pictures.of(["00"], folder, PLACE)
