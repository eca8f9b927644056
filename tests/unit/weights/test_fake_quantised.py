"""Fake quantisation: a trainer's shard holds what engines will dequantise, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.errors import ConfigError
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.weights.hf_shards import load_shard
from slime.weights.quantised import formats
from slime.weights.quantised.formats import (
    BlockFp8,
    GroupedInt4,
    QuantisedFormat,
    fake_quantised,
    require_whole_blocks,
)

BASE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 96,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 256, "num_experts_per_tok": 1},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    },
}


def case(family: str, kind: str) -> tuple[FamilyTable, dict[str, torch.Tensor], QuantisedFormat]:
    table = table_for({"model_type": family, **BASE, **FAMILIES[family]})
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(table.shape_of(n), generator=generator) for n in table.hf_names}
    names = frozenset(filter(formats.quantises, table.hf_names))
    return table, state, BlockFp8(names, 128, 128) if kind == "fp8" else GroupedInt4(names, 32)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_is_the_shard_of_what_engines_dequantise(family: str, tp_size: int, kind: str) -> None:
    table, state, quantised = case(family, kind)
    whole = {n: quantised.fake(t) if n in quantised.names else t for n, t in state.items()}
    num_compared = 0
    for entry in table.entries:
        if not quantised.is_quantised(entry.hf):
            continue
        size = 1 if entry.expert is not None or entry.row.dim is None else tp_size
        require_whole_blocks(entry, size, quantised)
        for rank in range(size):
            of_plain, of_whole = (
                load_shard(table, entry.megatron, source.__getitem__, tp_rank=rank, tp_size=size)
                for source in (state, whole)
            )
            assert torch.equal(fake_quantised(of_plain, entry.row, size, quantised), of_whole), entry.megatron
            num_compared += not torch.equal(of_plain, of_whole)
    assert num_compared >= 8


def test_stacked_experts_are_quantised_one_by_one() -> None:
    table, state, quantised = case("qwen3_moe", "fp8")
    first = [e for e in table.entries if e.layer == 1 and e.expert is not None and len(e.hf) == 2]
    parts = [load_shard(table, e.megatron, state.__getitem__, tp_rank=0, tp_size=1) for e in first]
    together = fake_quantised(torch.stack(parts), first[0].row, 1, quantised)
    assert all(
        torch.equal(a, fake_quantised(b, first[0].row, 1, quantised)) for a, b in zip(together, parts, strict=True)
    )


def test_the_gradient_goes_to_the_weight_as_it_is() -> None:
    table, state, quantised = case("qwen3", "fp8")
    entry = next(e for e in table.entries if e.megatron.endswith("linear_proj.weight"))
    weight = state[entry.hf[0]].clone().requires_grad_()
    factor = torch.randn_like(weight)
    (fake_quantised(weight, entry.row, 1, quantised) * factor).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, factor)


@pytest.mark.parametrize("tp_size", [4, 8])
def test_a_block_on_two_ranks_is_refused(tp_size: int) -> None:
    """4 KV heads of 64 on 4 ranks: half a block each."""
    table, _, quantised = case("qwen3", "fp8")
    entry = next(e for e in table.entries if "linear_qkv" in e.megatron)
    with pytest.raises(ConfigError, match="depend on the layout"):
        require_whole_blocks(entry, tp_size, quantised)


def test_a_last_block_that_ends_early_is_kept_whole() -> None:
    """Where one rank has all of a weight nothing is cut."""
    table = table_for({"model_type": "qwen3", **BASE, "intermediate_size": 320})
    quantised = BlockFp8(frozenset(filter(formats.quantises, table.hf_names)), 128, 128)
    entry = next(e for e in table.entries if "mlp.linear_fc1" in e.megatron)
    require_whole_blocks(entry, 1, quantised)
    with pytest.raises(ConfigError):
        require_whole_blocks(entry, 2, quantised)
    weight = torch.randn(640, 256)
    want = torch.cat([quantised.fake(part) for part in weight.split(320)])
    assert torch.equal(fake_quantised(weight, entry.row, 1, quantised), want)
