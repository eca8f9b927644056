"""Qwen3-Next and Qwen3.5: both orders of the files make one Megatron parameter, and SGLang's tensors are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.core.topology import EngineLayout, EngineRank
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests
from slime.weights.hf_shards import load_shard
from tests.support.qwen_next import EXPERTS, LINEAR
from tests.support.weights import engine_tensors

KEYS, VALUES, DIM_K, DIM_V = 2, 6, 8, 12
NEXT = {**LINEAR, **EXPERTS, "model_type": "qwen3_next"}
MOE = {**LINEAR, **EXPERTS, "model_type": "qwen3_5_moe_text", "wrapper_type": "qwen3_5_moe", "_stacked_experts": True}
MIXER = "linear_attn."


def _state(table: FamilyTable) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(table.shape_of(name), generator=generator) + 0.1 for name in table.hf_names}


def _resident(table: FamilyTable, state: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    return dict(engine_tensors(table, state, layout=EngineLayout(tp_size=size), rank=EngineRank(0, rank), on_cpu=False))


def _part(x: Tensor, rank: int, size: int) -> Tensor:
    return x.chunk(size)[rank]


def test_both_families_make_the_same_parameter() -> None:
    """The same weights, laid out per key head in one file and by kind in the other."""
    per_head, by_kind = table_for(NEXT), table_for({**MOE, "_stacked_experts": False})
    state = _state(by_kind)
    prefix = "model.language_model.layers.0." + MIXER
    qkv, z, b, a = (state[f"{prefix}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a"))
    q, k, v = qkv.split([KEYS * DIM_K, KEYS * DIM_K, VALUES * DIM_V])
    grouped = {
        "qkvz": torch.cat([torch.cat([_part(x, head, KEYS) for x in (q, k, v, z)]) for head in range(KEYS)]),
        "ba": torch.cat([torch.cat([_part(x, head, KEYS) for x in (b, a)]) for head in range(KEYS)]),
    }
    other = {f"model.layers.0.{MIXER}in_proj_{part}.weight": x for part, x in grouped.items()}
    name = "decoder.layers.0.self_attention.in_proj.weight"
    for rank in range(2):
        one = load_shard(per_head, name, other.__getitem__, tp_rank=rank, tp_size=2)
        two = load_shard(by_kind, name, state.__getitem__, tp_rank=rank, tp_size=2)
        want = torch.cat([_part(x, rank, KEYS) for x in (q, k, v, z, b, a)])  # one key head per rank
        assert torch.equal(one, want) and torch.equal(two, want), f"rank {rank}"


@pytest.mark.parametrize(("config", "prefix"), [(NEXT, "model."), (MOE, "model.language_model.")])
@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_rank_holds_what_sglang_stacks(config: dict[str, Any], prefix: str, size: int) -> None:
    table = table_for(config)
    state = _state(table)

    def hf(layer: int, name: str) -> Tensor:
        return state[f"{prefix}layers.{layer}.{name}"]

    for rank in range(size):
        got = _resident(table, state, rank, size)

        def cut(*parts: Tensor, rank: int = rank) -> Tensor:
            return torch.cat([_part(x, rank, size) for x in parts])

        if config is NEXT:
            in_projs = {part: cut(hf(0, f"{MIXER}in_proj_{part}.weight")) for part in ("qkvz", "ba")}
        else:
            qkv, z, b, a = (hf(0, f"{MIXER}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
            q, k, v = qkv.split([KEYS * DIM_K, KEYS * DIM_K, VALUES * DIM_V])
            in_projs = {"qkvz": cut(q, k, v, z), "ba": cut(b, a)}
        conv = hf(0, f"{MIXER}conv1d.weight").split([KEYS * DIM_K, KEYS * DIM_K, VALUES * DIM_V])
        want = {
            **{f"{MIXER}in_proj_{part}.weight": x for part, x in in_projs.items()},
            f"{MIXER}conv1d.weight": cut(*conv),
            f"{MIXER}A_log": cut(hf(0, f"{MIXER}A_log")),
            f"{MIXER}dt_bias": cut(hf(0, f"{MIXER}dt_bias")),
            f"{MIXER}norm.weight": hf(0, f"{MIXER}norm.weight"),
            f"{MIXER}out_proj.weight": hf(0, f"{MIXER}out_proj.weight").chunk(size, 1)[rank],
        }
        for name, tensor in want.items():
            assert torch.equal(got[f"model.layers.0.{name}"], tensor), f"{name} on rank {rank} of {size}"
        qkv_proj = cut(*(hf(1, f"self_attn.{part}_proj.weight") for part in "qkv"))
        assert torch.equal(got["model.layers.1.qkv_proj.weight"], qkv_proj), "SGLang keeps attention in the layer"
        assert "model.layers.1.mlp.shared_expert.gate_up_proj.weight" in got, "the shared expert is apart"


def test_stacked_experts_are_those_of_single_files() -> None:
    stacked, single = table_for(MOE), table_for({**MOE, "_stacked_experts": False})
    state = _state(single)
    both = dict(state)
    for layer in range(4):
        mlp = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state[f"{mlp}{e}.{part}_proj.weight"] for e in range(4)]) for part in ("gate", "up", "down")
        )
        both |= {f"{mlp}gate_up_proj": torch.cat([gate, up], 1), f"{mlp}down_proj": down}
    for name in stacked.megatron_names:
        one, two = (load_shard(table, name, both.__getitem__, tp_rank=0, tp_size=1) for table in (stacked, single))
        assert torch.equal(one, two), name
    one, two = (_resident(table, both, 1, 2) for table in (stacked, single))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("config", [NEXT, MOE])
def test_every_resident_tensor_gets_a_digest_while_tensors_stream(config: dict[str, Any]) -> None:
    table = table_for(config)
    expected = ExpectedDigests(table, [EngineLayout(tp_size=n) for n in (1, 2)], digest)
    for name, tensor in _state(table).items():
        expected.add(name, tensor.bfloat16())
    derived = {e.plus_one for e in table.entries if e.plus_one}
    assert "model.norm.gemma_weight" in derived and not any("linear_attn" in name for name in derived)
    for ranks in expected.finish().values():
        assert all(digests.keys() == table.resident.keys() | derived for digests in ranks.values())
    assert table.carries("mtp.layers.0.mlp.gate.weight") and table.carries("model.visual.pos_embed.weight")
    assert table.carries("visual.pos_embed.weight"), "SGLang's name of the vision tower"


@pytest.mark.parametrize(("config", "parts"), [(NEXT, 2), (MOE, 1)])
def test_with_dp_attention_the_embedding_is_that_of_a_group_or_whole(config: dict[str, Any], parts: int) -> None:
    table = table_for(config)
    state, layout = _state(table), EngineLayout(tp_size=4, dp_size=2)
    name = next(name for name in table.hf_names if name.endswith("embed_tokens.weight"))
    for rank in layout.ranks():
        held = dict(engine_tensors(table, state, layout=layout, rank=rank, on_cpu=False))
        want = _part(state[name], rank.tp_rank % parts, parts)
        assert torch.equal(next(x for n, x in held.items() if n.endswith("embed_tokens.weight")), want), rank
