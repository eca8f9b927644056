"""An error is shown with the user's own line, whatever stands between it and slime."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.core.blame import RAISED_AT, error_line, first_line, place_in, place_of, raised_by_user
from slime.core.registry import load_object
from slime.core.sample import Sample
from slime.rewards.scores import reason_kind


def error_of(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_last_line_of_the_user_is_shown_not_that_of_a_library(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import json\n\ndef reward(text):\n    return parse(text)\n\ndef parse(text):\n    return json.loads(text)\n"
    )
    error = error_of(lambda: load_object(f"{file}:reward")("{"))
    assert isinstance(error, json.JSONDecodeError)
    for place in (place_of(error), place_in("".join(traceback.format_exception(error)))):
        assert place is not None and (place.file, place.line, place.function) == (str(file), 7, "parse")
    assert raised_by_user(error) == f"{RAISED_AT}{file}:7 in parse"


def test_an_error_of_ours_blames_no_user() -> None:
    sample = Sample(tokens=[1], response_length=2)
    error = error_of(sample.validate)
    assert error.__traceback__ is not None, "it was raised"
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this file
    assert raised_by_user(error) == ""
    place = place_of(error)
    assert place is not None and place.is_ours


def test_a_trace_without_a_frame_has_no_place() -> None:
    assert place_in("ValueError: no trace") is None and place_of(ValueError("never raised")) is None


def test_one_line_is_one_line() -> None:
    assert error_line(ValueError("a\nb")) == "ValueError: a" and error_line(KeyError()) == "KeyError"
    assert first_line("x" * 20, 10) == "xxxxxxx..." and first_line("\n\n") == ""


def test_a_place_is_no_part_of_a_metric_name() -> None:
    """Law: one mistake is one metric, wherever its file lies."""
    assert reason_kind("KeyError: 'x', raised at /data/rewards.py:3 in reward") == "keyerror_x"
