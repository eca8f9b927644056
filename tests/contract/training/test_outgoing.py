"""What ranks send of a sharded model is the model: every tensor once, bitwise, from the ranks that have their turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from slime.core.errors import WeightSyncError
from slime.training.backend import MegatronBackend
from slime.training.state import outgoing as module
from slime.training.state.outgoing import MESSAGE_TIMES, MESSAGES, PARAMETER_TIMES, TrainerWeights
from slime.weights.send_plan import Buffers
from tests.support.adapters import fill_b
from tests.support.families import write_family
from tests.support.marks import quick
from tests.support.qwen_next import write_qwen_next
from tests.support.ranks import Ranks, Seat
from tests.support.tiny import write_tiny_model
from tests.support.training import training_args

TP, PP, EP = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
SP = {"sequence_parallel": True}
LIMIT_BYTES = 15_000
"""So small that all who can send have turns."""
ROOM_BYTES = 64_000
"""So large that most parameters are smaller than a message; one that is larger is there up to four times."""
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "qwen3_moe", {}, {}),
    "tp2_ep2": (2, "qwen3_moe", {**TP, **EP, **SP}, {}),
    "pp2_tied": (2, "qwen3", PP, {}),
    "ep2_lora": (2, "qwen3_moe", EP, {"lora_rank": 2}),
    "ep2_files_stack_experts": (2, "qwen3_5_moe", EP, {}),
    "ep2_latent": (2, "deepseek_v3", EP, {}),
    "tp2_pp2_ep2": (4, "qwen3_moe", {**TP, **PP, **EP, **SP}, {}),
}


def send(seat: Seat, model: str, megatron: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """What this rank sends, in bfloat16, and what an export has of it."""
    backend = MegatronBackend(training_args(Path(model), megatron=megatron, **args), **seat.place)
    if backend.args.lora_rank:
        fill_b(backend)
    outgoing = backend.outgoing(torch.bfloat16)
    turns = outgoing.turns(LIMIT_BYTES)
    sent: list[tuple[str, torch.Tensor]] = []
    for turn in turns:
        got = [(name, tensor.clone()) for name, tensor in outgoing.tensors(turn)]
        assert [name for name, _ in got] == [s.name for s in turn.specs if turn.sender == seat.rank]
        for (_, tensor), spec in zip(got, turn.specs, strict=False):
            assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype
        sent += got
    peak = peak_bytes(backend, outgoing, seat.rank)
    exported = dict(backend.iter_hf_tensors(torch.bfloat16))
    same = all(torch.equal(tensor, exported[name]) for name, tensor in sent)
    told = {
        "same": same,
        "sent": [name for name, _ in sent],
        "all": list(exported),
        "senders": [turn.sender for turn in turns],
        "plan": [(turn.sender, [spec.name for spec in turn.specs]) for turn in turns],
        "largest": max(turn.num_bytes for turn in turns if len(turn.groups) > 1),
        "peak": peak,
        "group": max(group.num_bytes for turn in turns for group in turn.groups),
        "many": len(outgoing.turns(ROOM_BYTES)) > 2,
    }
    backend.close()
    return told


def write(path: Path, family: str, *, tied: bool) -> Path:
    if family == "qwen3_5_moe":
        return write_qwen_next(path, family)
    if family == "deepseek_v3":
        return write_family(path, family)
    return write_tiny_model(path, family, tied=tied)


def peak_bytes(backend: MegatronBackend, outgoing: TrainerWeights, rank: int) -> int:
    """Of all tensors that live beside the parameters, while each bucket is filled and the one before is on its way."""
    turns = outgoing.turns(ROOM_BYTES)
    buffers = Buffers(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    tracker = MemTracker()
    tracker.track_external(*backend.model.parameters)

    def total(kind: str) -> int:
        return int(tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"])

    with tracker:
        before = total("current")
        held = 0
        for turn in turns:
            if turn.sender == rank:
                if max(held, turn.num_bytes + outgoing.fill_bytes(turn)) > ROOM_BYTES:  # as the weight sync does
                    buffers.free()
                held = turn.num_bytes
            views = dict(buffers.next(turn.specs).tensors) if turn.sender == rank else {}
            for name, tensor in outgoing.tensors(turn):
                views[name].copy_(tensor)
    return total("peak") - before


@pytest.mark.parametrize("layout", quick(LAYOUTS, "ep2_lora"))
def test_every_tensor_is_sent_once_and_is_what_an_export_has(layout: str, tmp_path: Path, ranks: Ranks) -> None:
    world_size, family, megatron, args = LAYOUTS[layout]
    model = write(tmp_path / "model", family, tied="tied" in layout)
    told = ranks.run(send, world_size, str(model), megatron, args)
    assert all(own["same"] for own in told)
    assert all(own["plan"] == told[0]["plan"] for own in told), "all ranks know all turns"
    names = [name for own in told for name in own["sent"]]
    assert sorted(names) == sorted(told[0]["all"])
    stages = 2 if "pp2" in layout else 1
    assert len(set(told[0]["senders"])) == stages * (2 if "ep2" in layout else 1), "each stage, and those with experts"
    assert told[0]["largest"] <= LIMIT_BYTES
    alone = int((1 + PARAMETER_TIMES) * told[0]["group"]) + MESSAGE_TIMES * (ROOM_BYTES // MESSAGES)
    peak = max(own["peak"] for own in told)
    assert told[0]["many"] and 0 < peak <= max(2 * ROOM_BYTES, alone), "two buckets, or what one parameter takes"


def break_an_export(seat: Seat, model: str, megatron: dict[str, Any], broken: str) -> tuple[str, list[str], list[str]]:
    """What a rank raises when one parameter cannot be put together, what it sends, and what it would."""
    backend = MegatronBackend(training_args(Path(model), megatron=megatron), **seat.place)
    outgoing = backend.outgoing(torch.bfloat16)
    original, raised, sent = module.export, "", []

    def export(table: Any, name: str, shards: Any) -> Any:
        if name == broken:
            raise MemoryError("no room")
        return original(table, name, shards)

    module.export = export
    turns = outgoing.turns(ROOM_BYTES)
    try:
        for turn in turns:
            try:
                for name, _ in outgoing.tensors(turn):
                    sent.append(name)
            except WeightSyncError as error:
                raised += str(error)
    finally:
        module.export = original
    backend.close()
    return raised, sent, [spec.name for turn in turns for spec in turn.specs if turn.sender == seat.rank]


@pytest.mark.slow
def test_a_parameter_that_cannot_be_put_together_is_told_by_its_sender_once_all_of_its_turn_were_given(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Law: the ranks stay in the same collectives; what is wrong with one tensor is known after the turn."""
    _, family, megatron, _ = LAYOUTS["tp2_pp2_ep2"]
    model = write(tmp_path / "model", family, tied=False)
    broken = "decoder.layers.1.self_attention.linear_qkv.weight"
    told = ranks.run(break_an_export, 4, str(model), megatron, broken)
    raised = [error for error, _, _ in told if error]
    assert len(raised) == 1 and "gathering weights failed with MemoryError: no room" in raised[0]
    missing = {name for _, sent, own in told for name in set(own) - set(sent)}
    assert missing == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"}
