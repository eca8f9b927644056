"""Attention with sinks and windows, and the experts' activation of gpt-oss, are what transformers computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

from slime.models.common.packed_attention import PackedSequences
from slime.models.gpt_oss import layers
from slime.models.gpt_oss.layers import clamped_swiglu

HEADS, GROUPS, SIZE = 4, 2, 8


def core(window: int | None) -> Any:
    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        cp_comm_type=None,
        use_cpu_initialization=True,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    attention = layers.SinkAttention(config, 1, None, "self", window=window)
    torch.nn.init.uniform_(attention.sinks, -2.0, 2.0)
    return attention


def reference(attention: Any, query: Tensor, key: Tensor, value: Tensor, behind: int) -> Tensor:
    """Of one sequence, of whose queries `behind` have been left out."""
    places, keys = torch.arange(behind, key.size(0)).unsqueeze(1), torch.arange(key.size(0))
    seen = keys <= places
    if attention.window is not None:
        seen &= places - keys < attention.window
    mask = torch.zeros(seen.shape).masked_fill(~seen, -float("inf"))
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=attention.sinks, training=False)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out, _ = eager_attention_forward(module, q, k, v, mask, scaling=SIZE**-0.5)
    return out.squeeze(0)


@pytest.mark.parametrize("at_once", [1, 3, 1024])
@pytest.mark.parametrize("window", [None, 1, 4, 64])
def test_a_row_attends_as_each_of_its_sequences_in_transformers(
    window: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "QUERIES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    attention, queries, keys = core(window), (7, 1, 5), (7, 1, 9)
    rows = [(sum(queries), HEADS), (sum(keys), GROUPS), (sum(keys), GROUPS)]
    inputs = [torch.randn(*row, SIZE, generator=generator).requires_grad_() for row in rows]
    packed = PackedSequences(query_lengths=queries, key_lengths=keys)
    got = attention(*inputs, packed_seq_params=packed)
    parts = zip(*(x.split(n) for x, n in zip(inputs, (queries, keys, keys), strict=True)), strict=True)
    want = torch.cat([reference(attention, *part, part[1].size(0) - part[0].size(0)) for part in parts]).flatten(1)
    assert torch.allclose(got, want, atol=1e-6)
    leaves = [*inputs, attention.sinks]
    weights = torch.randn(got.shape, generator=generator)
    for a, b in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (got, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_gates_and_values_are_clamped_as_in_transformers() -> None:
    config = GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1)
    experts: Any = GptOssExperts(config)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 8
    assert (x.abs() > experts.limit).any()
    assert torch.allclose(clamped_swiglu(x), experts._apply_gate(x), atol=1e-6)
