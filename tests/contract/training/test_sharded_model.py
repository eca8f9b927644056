"""The record that ranks build together: the same on all of them, and everything written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.training.backend import MegatronBackend
from tests.support.marks import quick
from tests.support.ranks import Ranks, Seat
from tests.support.tiny import write_tiny_model
from tests.support.training import training_args

TP, PP, EP = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2ep2_lora": ("qwen3_moe", {**TP, **EP, "sequence_parallel": True}, {"lora_rank": 2}),
    "pp2_tied": ("qwen3", PP, {}),
    "ep2": ("qwen3_moe", EP, {}),
}
Facts = dict[str, tuple[Any, ...]]


def describe(seat: Seat, model: str, megatron: dict[str, Any], args: dict[str, Any]) -> tuple[Facts, Facts]:
    """What all ranks say of each parameter, and what this one has and writes of it."""
    backend = MegatronBackend(training_args(Path(model), megatron=megatron, **args), **seat.place)
    tensors = backend.model.tensors
    shared = {n: (t.shape, str(t.dtype), t.tp_size, t.pp_rank, t.ep_rank, t.trained) for n, t in tensors.items()}
    own = {
        t.name: (t.tp_rank, t.share, tuple(t.shard.shape), t.here.parameter.requires_grad) for t in backend.model.own
    }
    backend.close()
    return shared, own


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp2ep2_lora"))
def test_ranks_agree_on_every_parameter_and_each_element_is_written_once(
    layout: str, tmp_path: Path, ranks: Ranks
) -> None:
    family, megatron, args = LAYOUTS[layout]
    model = write_tiny_model(tmp_path / "model", family, tied="tied" in layout)
    told = ranks.run(describe, 2, str(model), megatron, args)
    shared = told[0][0]
    assert all(other == shared for other, _ in told), "one record"
    written: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for _, own in told:
        for name, (tp_rank, share, shape, has_gradient) in own.items():
            assert shape == shared[name][0] and has_gradient == shared[name][-1]
            if share is not None:
                written.setdefault((name, tp_rank), []).append(share)
    assert written.keys() == {(name, i) for name, facts in shared.items() for i in range(facts[2])}
    for place, shares in written.items():
        assert sorted(shares) == [(i, len(shares)) for i in range(len(shares))], place
