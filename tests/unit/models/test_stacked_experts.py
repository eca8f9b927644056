"""Stacked experts on a CPU are Megatron's sequential ones bit for bit: values and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slime.compat import megatron_cpu, megatron_moe
from slime.models.common.mlp import StackedExperts

HIDDEN, FEATURES = 32, 24


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Megatron's linear layers ask for a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _both(num_experts: int, dtype: torch.dtype) -> tuple[StackedExperts, Any]:
    megatron_cpu.activate("cpu")
    megatron_moe.activate()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=FEATURES,
        ffn_hidden_size=2 * FEATURES,
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    groups = ProcessGroupCollection()
    groups.ep = groups.expt_tp = groups.expt_dp = dist.group.WORLD
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    theirs = SequentialMLP(num_experts, config, parts, pg_collection=groups)
    ours = StackedExperts(num_experts, config, pg_collection=groups)
    generator = torch.Generator().manual_seed(4)
    for name in ("linear_fc1", "linear_fc2"):
        stack = getattr(ours, name).weight
        with torch.no_grad():
            stack.copy_(torch.randn(stack.shape, generator=generator) / 5)
            for expert, weight in zip(theirs.local_experts, stack, strict=True):
                getattr(expert, name).weight.copy_(weight)
    return ours, theirs


@pytest.mark.parametrize("sizes", [(4, 1, 0, 9), (0, 0, 0, 1), (30,), (0, 0), (7, 2, 2, 64, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_sequential_experts(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = _both(len(sizes), dtype)
    generator = torch.Generator().manual_seed(5)
    counts = torch.tensor(sizes)
    rows = torch.randn(sum(sizes), HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(sum(sizes), generator=generator)
    above = torch.randn(rows.shape, generator=generator).to(dtype)
    results = []
    for experts in (ours, theirs):
        leaves = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out, bias = experts(leaves[0], counts, leaves[1])
        assert bias is None and out.dtype == dtype
        out.backward(above)
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for name, got, want in zip(("rows", "gradient", "weights"), *results, strict=True):
        assert torch.equal(got, want), name
    for name in ("linear_fc1", "linear_fc2"):
        want = torch.stack([getattr(expert, name).weight.grad for expert in theirs.local_experts])
        assert torch.equal(getattr(ours, name).weight.grad, want), name
