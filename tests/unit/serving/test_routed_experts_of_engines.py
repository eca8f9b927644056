"""What engines are helped with to return routed experts: a mark in a request's id, and a record kept without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.compat.sglang_cpu.patches import _change
from slime.compat.sglang_routed_experts import read_mark
from slime.core.engine_interface import ROUTED_EXPERTS_MARK


@pytest.mark.parametrize("start", [0, 17])
def test_a_marked_request_asks_for_experts(start: int) -> None:
    request = SimpleNamespace(rid=f"1f{ROUTED_EXPERTS_MARK}{start}")
    read_mark(None, request)
    assert request.return_routed_experts is True and request.routed_experts_start_len == start


@pytest.mark.parametrize("rid", ["1f", None, ["1f", "2e"], f"1f{ROUTED_EXPERTS_MARK}", f"1f{ROUTED_EXPERTS_MARK}-1"])
def test_other_requests_are_left_alone(rid: Any) -> None:
    request = SimpleNamespace(rid=rid)
    read_mark(None, request)
    assert vars(request) == {"rid": rid}


def test_a_record_is_not_overwritten_by_the_next_pass() -> None:
    class Output(SimpleNamespace):
        """What a forward pass hands to the scheduler."""

    module: Any = SimpleNamespace(torch=torch, TopkCaptureOutput=Output)
    _change(module)
    _change(module)
    buffer = module.torch.zeros((2, 3), dtype=module.torch.int32, device="cpu", pin_memory=True)
    output: Any = Output(out_cache_loc=torch.arange(2), topk=buffer[:2])
    output.map_device_tensors(lambda x: x)
    buffer += 1
    assert output.topk.dtype == torch.int32 and (output.topk == 0).all()
