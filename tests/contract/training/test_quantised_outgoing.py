"""What ranks of any layout send to quantised engines: each part once, with the bits that the whole weight gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.training.backend import MegatronBackend
from slime.weights.quantised.formats import format_of_folder
from slime.weights.quantised.sending import quantised_outgoing
from tests.support.marks import quick
from tests.support.quantised import equal, write_quantised
from tests.support.ranks import Ranks, Seat
from tests.support.tiny import write_tiny_model
from tests.support.training import training_args

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2_ep2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}
LIMIT_BYTES = 300_000
"""So small that there are many turns."""


def send(seat: Seat, folder: str, megatron: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """The bytes of the parts that this rank sends, the names of those with other bits, and how many turns."""
    backend = MegatronBackend(training_args(Path(folder), megatron=megatron), **seat.place)
    quantised = format_of_folder(folder)
    assert quantised is not None
    outgoing = quantised_outgoing(backend.outgoing(torch.bfloat16), quantised)
    turns, sent = outgoing.turns(LIMIT_BYTES), {}
    assert outgoing.turns(LIMIT_BYTES) is turns
    for turn in turns:
        got = [(name, tensor.clone()) for name, tensor in outgoing.tensors(turn)]
        specs = [(spec.name, spec.shape, spec.dtype) for spec in turn.specs if turn.sender == seat.rank]
        assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in got] == specs
        sent |= dict(got)
    want: dict[str, torch.Tensor] = {}
    for name, tensor in backend.iter_hf_tensors(torch.bfloat16):
        parts = quantised.quantise(tensor) if name in quantised.names else (tensor,)
        want |= dict(zip(quantised.parts_of(name) if name in quantised.names else (name,), parts, strict=True))
    assert set(want) == set(outgoing.table.hf_names)
    wrong = [name for name, tensor in sent.items() if not equal(tensor, want[name])]
    backend.close()
    return {name: tensor.view(torch.uint8) for name, tensor in sent.items()}, wrong, len(turns)


@pytest.mark.parametrize("kind", quick(["fp8", "int4"], "fp8"))
def test_parts_do_not_depend_on_the_layout(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    source = write_tiny_model(
        tmp_path / "m", "qwen3_moe", hidden_size=256, head_dim=64, num_key_value_heads=4, moe_intermediate_size=128
    )
    folder, _ = write_quantised(source, tmp_path / kind, kind)
    found = {}
    for name, (world_size, megatron) in LAYOUTS.items():
        told = ranks.run(send, world_size, str(folder), megatron)
        assert not any(wrong for _, wrong, _ in told) and told[0][2] > 4
        names = [part for sent, _, _ in told for part in sent]
        assert len(names) == len(set(names)), f"{name}: sent twice"
        found[name] = {part: tensor for sent, _, _ in told for part, tensor in sent.items()}
    for name, sent in found.items():
        assert sent.keys() == found["one"].keys(), name
        assert all(equal(tensor, found["one"][part]) for part, tensor in sent.items()), name
