"""Block-scaled FP8: what is written comes back bit for bit, and a block's error has a bound."""

from __future__ import annotations

import pytest
import torch

from slime.core.errors import CheckpointError, ConfigError
from slime.weights.quantised.formats import BLOCK, E4M3_MAX, apart, block_of, dequantise, quantise, quantises

SHAPES = [(128, 128), (256, 384), (130, 70), (1, 1), (300, 129), (3, 140, 200)]


def _random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator) * 4  # entries over many powers of two
    return torch.randn(shape, generator=generator) * spread.exp()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [BLOCK, (64, 32), (7, 5)])
def test_what_is_written_comes_back_bit_for_bit(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    for seed in range(20):
        codes, scale = quantise(_random(shape, seed), block)
        assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert list(scale.shape) == [*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])]
        again, same = quantise(dequantise(codes, scale, block), block)
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(same, scale)


def test_codes_of_foreign_scales_are_kept() -> None:
    """Public files have scales of 24 bits; they move by less than 2^-19, the codes not at all."""
    weight = _random((512, 512))
    scale = weight.view(4, 128, 4, 128).abs().amax((1, 3)) / E4M3_MAX
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    again, moved = quantise(dequantise(codes, scale, BLOCK))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert ((moved / scale - 1).abs() <= 2.0**-19).all()


def test_the_error_of_a_block_is_half_a_step() -> None:
    weight = _random((256, 256))
    codes, scale = quantise(weight)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (dequantise(codes, scale, BLOCK) - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, wide / 1024) * (1 + 2.0**-18)).all()
    largest = weight.view(2, 128, 2, 128).abs().amax((1, 3))
    assert ((scale * E4M3_MAX / largest - 1) >= -1e-7).all() and ((scale * E4M3_MAX / largest - 1) < 2.0**-18).all()


def test_zeros_denormals_and_huge_entries_are_safe() -> None:
    zeros = quantise(torch.zeros(128, 256))
    assert not zeros[0].float().any() and zeros[1].eq(1).all()
    weight = torch.zeros(128, 256)
    weight[0, 0], weight[5, 200] = 1e-40, 3e38
    codes, scale = quantise(weight)
    assert codes.float().isfinite().all() and scale.isfinite().all()
    assert dequantise(codes, scale, BLOCK)[5, 200] == pytest.approx(3e38, rel=1e-5)
    for bad in (float("nan"), float("inf")):
        weight[1, 1] = bad
        with pytest.raises(CheckpointError, match="infinite or NaN"):
            quantise(weight)


def test_scales_that_do_not_fit_are_refused() -> None:
    codes, scale = quantise(_random((256, 256)))
    with pytest.raises(CheckpointError, match="weight_block_size"):
        dequantise(codes, scale, (64, 64))


def test_the_block_is_that_of_the_config() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert block_of(fp8) == (64, 32)
    for other in ({"quant_method": "fp8"}, {**fp8, "weight_block_size": [128]}):
        with pytest.raises(ConfigError, match="block scales"):
            block_of(other)


QUANTISED = [
    "model.layers.3.self_attn.q_a_proj.weight",
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.61.self_attn.o_proj.weight",
    "model.layers.3.self_attn.indexer.wq_b.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.3.mlp.experts.255.down_proj.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "model.layers.3.mlp.shared_expert.up_proj.weight",
    "model.layers.3.mlp.gate_up_proj.weight",
    "model.language_model.layers.3.linear_attn.in_proj_qkv.weight",
    "model.layers.3.linear_attn.in_proj_qkvz.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "model.layers.3.block_sparse_moe.experts.255.w2.weight",
]
KEPT = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.block_sparse_moe.gate.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    "model.layers.3.mlp.shared_expert_gate.weight",
    "model.layers.3.input_layernorm.weight",
    "model.layers.3.self_attn.q_a_layernorm.weight",
    "model.layers.3.self_attn.q_proj.bias",
    "model.layers.3.self_attn.indexer.weights_proj.weight",
    "model.layers.3.linear_attn.conv1d.weight",
    "model.layers.3.linear_attn.in_proj_ba.weight",
    "model.layers.61.eh_proj.weight",
    "model.visual.blocks.0.mlp.gate_proj.weight",
]


def test_the_tensors_of_the_public_files_are_quantised() -> None:
    assert all(map(quantises, QUANTISED)) and not any(map(quantises, KEPT))


def test_stacked_experts_come_apart() -> None:
    gate, up, down = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    prefix = "model.layers.7.mlp.experts."
    found = dict(apart(prefix + "gate_up_proj", torch.cat([gate, up], 1))) | dict(apart(prefix + "down_proj", down))
    assert all(map(quantises, found)) and len(found) == 9
    for name, stack in (("gate", gate), ("up", up), ("down", down)):
        assert all(torch.equal(found[f"{prefix}{i}.{name}_proj.weight"], stack[i]) for i in range(3))
    assert list(apart("model.norm.weight", up)) == [("model.norm.weight", up)]
