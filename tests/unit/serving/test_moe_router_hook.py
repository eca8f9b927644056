"""The float32 copy of a router's weight follows the weight, where captured CUDA graphs read it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slime.compat.sglang_0_5_16 import renew_router


def test_a_copy_is_written_over_in_its_place() -> None:
    gate, plain = torch.nn.Linear(4, 2, dtype=torch.bfloat16), torch.nn.Linear(4, 2)
    gate.register_buffer("_weight_fp32", None, persistent=False)
    runner = SimpleNamespace(model=torch.nn.ModuleList([gate, plain]))
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), draft_worker=None)
    renew_router(None, manager)
    assert gate._weight_fp32 is None, "a copy that nobody made yet is SGLang's to make"
    gate._weight_fp32 = torch.zeros(2, 4)
    place = gate._weight_fp32.data_ptr()
    renew_router(None, manager)
    assert gate._weight_fp32.data_ptr() == place and torch.equal(gate._weight_fp32, gate.weight.float())
