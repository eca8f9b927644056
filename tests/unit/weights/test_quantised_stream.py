"""What a quantised engine is sent, and what is expected of it: names, order, layouts, and every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.errors import CheckpointError, ConfigError, WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.models import table_for
from slime.serving.payloads import digest
from slime.weights.quantised import formats as fp8
from slime.weights.quantised import sending
from slime.weights.quantised.formats import BlockFp8, ChannelFp8, GroupedInt4, QuantisedFormat, engine_table, format_of
from slime.weights.quantised.sending import quantised_outgoing
from slime.weights.receivers import Receiver
from slime.weights.send_plan import Turn
from slime.weights.sync import sync_weights
from slime.weights.transports import TRANSPORTS
from tests.support.marks import quick
from tests.support.quantised import FP8, float_quantized, int4
from tests.support.weights import FakeEngine, FakeWire, TamperingChannel, Whole, engine_tensors, transport_context

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


def model(kind: str) -> tuple[Any, dict[str, torch.Tensor], QuantisedFormat]:
    table = table_for(CONFIG)
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(table.shape_of(n), generator=generator).bfloat16() for n in table.hf_names}
    names = frozenset(filter(fp8.quantises, table.hf_names))
    formats = {"fp8": BlockFp8(names, 128, 128), "channels": ChannelFp8(names), "int4": GroupedInt4(names, 32)}
    return table, state, formats[kind]


@pytest.mark.parametrize("kind", ["fp8", "channels", "int4"])
def test_parts_are_those_of_each_weight_by_itself_in_the_order_of_the_table(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, state, quantised = model(kind)
    want: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name in quantised.names:
            want |= dict(zip(quantised.parts_of(name), quantised.quantise(tensor), strict=True))
        else:
            want[name] = tensor
    for run_bytes in (1, 3 * 256 * 256 * 2, sending.RUN_BYTES):
        monkeypatch.setattr(sending, "RUN_BYTES", run_bytes)
        reused = torch.empty(0)

        def fleeting() -> Any:
            """Tensors that are gone when the next one is asked for."""
            nonlocal reused
            for name, tensor in state.items():
                reused.fill_(torch.nan)
                reused = tensor.clone()
                yield name, reused

        got = {n: t.clone() for n, t in sending.quantised_stream(fleeting(), quantised)}
        assert list(got) == list(want)
        assert all(torch.equal(got[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)
    assert set(want) == set(engine_table(table, quantised).hf_names)


def sync(kind: str, layout: EngineLayout, tamper: Any = None) -> tuple[FakeEngine, Any]:
    table, state, quantised = model(kind)
    outgoing = quantised_outgoing(Whole(table, state.items()), quantised)
    wire = FakeWire()
    engine = FakeEngine("http://engine", outgoing.table, wire, layout)
    context = transport_context(table=outgoing.table, serialize=wire.serialize)
    channel = TRANSPORTS.build("tensor", None).open(context)
    sync_weights(
        outgoing,
        receivers=[Receiver(engine)],
        channel=channel if tamper is None else TamperingChannel(channel, tamper),
        digest=digest,
        version=1,
        buffer_bytes=1 << 18,
    )
    return engine, outgoing.table


@pytest.mark.parametrize("kind", ["fp8", "channels", "int4"])
@pytest.mark.parametrize("layout", [ONE_RANK, EngineLayout(tp_size=2), EngineLayout(tp_size=2, ep_size=2)], ids=str)
def test_every_part_arrives_and_is_verified_on_each_rank(kind: str, layout: EngineLayout) -> None:
    engine, table = sync(kind, layout)
    assert set(engine.loaded) == set(table.hf_names) and engine.log[-1] == "resume"
    for rank in layout.ranks():
        held = dict(engine_tensors(table, engine.loaded, layout=layout, rank=rank, on_cpu=True))
        assert sum("scale" in name for name in held) == 2 * 4, "two of attention, two of experts, in two layers"


@pytest.mark.parametrize("kind", quick(["fp8", "channels", "int4"], "int4"))
def test_one_flipped_bit_of_any_part_is_refused_by_name(kind: str) -> None:
    table, _, quantised = model(kind)
    generator = torch.Generator().manual_seed(1)
    names = engine_table(table, quantised).hf_names
    for _ in range(12):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        bit = int(torch.randint(1 << 30, (), generator=generator))

        def flip(tensor_name: str, tensor: torch.Tensor, name: str = name, bit: int = bit) -> torch.Tensor:
            if tensor_name == name:
                flat = tensor.view(-1).view(torch.uint8)
                flat[bit // 8 % len(flat)] ^= 1 << bit % 8
            return tensor

        with pytest.raises(WeightSyncError) as caught:
            sync(kind, ONE_RANK, flip)
        assert name.rpartition(".layers.")[2].partition(".")[0] in str(caught.value)


def test_a_format_is_found_from_config_and_names(tmp_path: Path) -> None:
    found = format_of(
        {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, ["a.weight", "a.weight_scale_inv", "b.weight"]
    )
    assert found == BlockFp8(frozenset({"a.weight"}), 128, 128, powers_of_two=True)
    inner = {"text_config": {"quantization_config": int4(64, [])}}
    assert format_of(inner, ["a.weight_packed", "a.weight_scale", "b.weight"]) == GroupedInt4(
        frozenset({"a.weight"}), 64
    )
    rows = {"quantization_config": float_quantized([])}
    assert format_of(rows, ["a.weight", "a.weight_scale"]) == ChannelFp8(frozenset({"a.weight"}))
    assert format_of({}, ["a.weight"]) is None
    odd = json.loads(json.dumps(int4(64, [])))
    odd["config_groups"]["group_0"]["weights"]["symmetric"] = False
    for config in ({"quant_method": "awq"}, {"quant_method": "compressed-tensors", "format": "float-quantized"}, odd):
        with pytest.raises(ConfigError, match="slime reads"):
            format_of({"quantization_config": config}, [])


def test_weights_that_engines_fuse_are_quantised_alike() -> None:
    table, _, quantised = model("fp8")
    some = BlockFp8(frozenset(n for n in quantised.names if "k_proj" not in n), 128, 128)
    with pytest.raises(ConfigError, match="quantise both or neither"):
        engine_table(table, some)
    narrow = table_for({**CONFIG, "head_dim": 64, "num_key_value_heads": 1, "num_attention_heads": 2})
    with pytest.raises(ConfigError, match="multiples of the block size"):
        engine_table(narrow, BlockFp8(quantised.names, 128, 128))


def test_a_weight_that_cannot_be_quantised_is_told_when_all_of_its_turn_were_taken() -> None:
    """Law: ranks that give their parts of a turn never wait for one that has found something wrong."""
    table, state, quantised = model("fp8")
    bad = next(name for name in table.hf_names if name in quantised.names)
    state[bad][0, 0] = float("nan")
    taken: list[str] = []

    class Watched(Whole):
        def tensors(self, turn: Turn) -> Any:
            for name, tensor in super().tensors(turn):
                taken.append(name)
                yield name, tensor

    outgoing = quantised_outgoing(Watched(table, state.items()), quantised)
    (turn,) = outgoing.turns(1 << 30)
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        list(outgoing.tensors(turn))
    assert sorted(taken) == sorted(state)
