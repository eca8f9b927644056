"""Laws of what an engine in pipeline stages answers: what all stages say; and of which payload a rank takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.compat.sglang_pipeline_stages import JOINT, _own_payload, _own_place, _send_ahead, _send_once, merged


def answer(success: bool = True, message: str = "", payload: list[str] | None = None) -> Any:
    return SimpleNamespace(success=success, message=message, payload=payload)


def test_one_stage_that_fails_fails_all() -> None:
    assert merged([answer(), answer()]).success
    whole = merged([answer(), answer(False, "no memory"), answer(False, "no room")])
    assert not whole.success and whole.message == "no memory | no room"


def test_the_digests_of_all_stages_are_in_one_answer() -> None:
    assert merged([answer(payload=["a", "b"]), answer(payload=["c"])]).payload == ["a", "b", "c"]
    assert merged([SimpleNamespace(), SimpleNamespace()]) == SimpleNamespace(), "some answers say nothing"


def test_a_rank_takes_the_payload_and_the_place_of_its_stage() -> None:
    request = SimpleNamespace(serialized_named_tensors=[b"0", b"1", b"2", b"3"])
    ps = SimpleNamespace(pp_rank=1, pp_size=2, tp_size=2, tp_rank=0)
    _own_payload(SimpleNamespace(ps=ps), request)
    assert request.serialized_named_tensors == [b"2", b"3"]
    updater = SimpleNamespace(get_model_runner=lambda: SimpleNamespace(ps=ps))
    assert _own_place(lambda _, *given: given, updater, "host", 1, 5, 9, "group") == ("host", 1, 7, 9, "group")


class Stage:
    """The part of SGLang's scheduler that the hook sees."""

    def __init__(self, pp_rank: int) -> None:
        self.ps = SimpleNamespace(pp_rank=pp_rank, pp_size=2)
        self.send_req_work: list[Any] = []
        self.sent: list[Any] = []

    def _pp_commit_comm_work(self, work: list[Any]) -> None:
        work.clear()

    def _pp_send_pyobj_to_next_stage(self, data: Any, async_send: bool = False) -> list[Any]:
        return _send_once(lambda stage, given, **_: stage.sent.append(given) or ["work"], self, data)


@pytest.mark.parametrize("kind", [*JOINT, "AbortReq"])
def test_a_request_goes_to_the_next_stage_once_and_where_it_must_before_it_is_handled(kind: str) -> None:
    requests = [type(kind, (), {})()]
    stage, last = Stage(0), Stage(1)
    for one in (stage, last):
        _send_ahead(one, requests)
    assert stage.sent == ([requests] if kind in JOINT else []) and not last.sent
    stage._pp_send_pyobj_to_next_stage(requests)  # SGLang's own
    assert stage.sent == [requests]
    stage._pp_send_pyobj_to_next_stage(requests)
    assert len(stage.sent) == 2, "the next turn is sent as ever"
