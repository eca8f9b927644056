"""Buckets that are filled from CUDA graphs hold the trainer's tensors of this step, and the digests are of these.

python -m pytest tests/gpu/test_recorded_fills_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime.core.topology import EngineLayout
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests, merged
from slime.weights.recorded_fills import RecordedFills, fill
from slime.weights.send_plan import Buffers
from tests.support.weights import Whole, model

LIMIT = 1 << 12
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 36},
}


def _buffers() -> Buffers:
    return Buffers(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))


def _synced(
    fills: RecordedFills, outgoing: Whole, buffers: Buffers, key: Callable[[], Any]
) -> tuple[list[torch.Tensor], Any]:
    """Fills all buckets as a weight sync does, the last one in memory of its own, which is not recorded. Returns what
    they held, and the digests."""
    turns, held = outgoing.turns(LIMIT), []
    last = len(turns) - 1
    assert last > 2

    def fresh() -> ExpectedDigests:
        return ExpectedDigests(outgoing.table, [EngineLayout(tp_size=2)], digest)

    buffers.begin()
    expected = fresh()
    fills.begin(key(), fresh)
    recordable, replayed, sent = {}, [], []
    for number, turn in enumerate(turns):
        if fills.holds(number):
            bucket = fills.replay(number)
            assert bucket is not None
            replayed += turn.hf_names
        else:
            bucket = buffers.alone(turn.specs) if number == last else buffers.next(turn.specs)
            fill(outgoing, turn, bucket, expected)
            sent += turn.hf_names
            if number != last:
                recordable[number] = turn, bucket
        held.append(bucket.flat.clone())
    fills.record(outgoing, recordable)
    digests = merged([expected.finish(sent), *([fills.digests(replayed)] if replayed else [])])
    fills.end(key(), good=True)
    assert not replayed or len(sent) == len(turns[last].hf_names)
    return held, digests


@pytest.mark.parametrize("kind", MODELS)
def test_a_replayed_fill_reads_the_tensors_of_today(kind: str) -> None:
    """The oracle of each sync is one without recordings."""
    table, state = model(**MODELS[kind])
    tensors = {name: tensor.cuda().bfloat16() for name, tensor in state.items()}
    outgoing, buffers, fills = Whole(table, tensors.items()), _buffers(), RecordedFills(on=True)
    for number in range(5):
        for tensor in tensors.values():
            tensor.mul_(1.5)
        assert fills.holds(0) == (number >= 2)
        held, digests = _synced(fills, outgoing, buffers, lambda: (outgoing.places, buffers.places))
        want, plain = _synced(RecordedFills(on=False), outgoing, _buffers(), lambda: None)
        assert digests == plain and all(map(torch.equal, held, want)), f"sync {number}"


def test_a_parameter_that_moved_is_not_replayed() -> None:
    table, state = model()
    tensors = {name: tensor.cuda().bfloat16() for name, tensor in state.items()}
    outgoing, buffers, fills = Whole(table, tensors.items()), _buffers(), RecordedFills(on=True)
    seen = []
    for number in range(6):
        if number == 3:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            outgoing = Whole(table, tensors.items())
        _synced(fills, outgoing, buffers, lambda: (outgoing.places, buffers.places))  # noqa: B023
        seen.append(fills.holds(0))
    assert seen == [False, True, True, False, True, True]
