"""The router chooses and weighs experts as `transformers` does: softmax and sigmoid scores, bias, groups, scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from slime.compat import megatron_cpu, megatron_moe
from slime.models.common.mlp import ExactRouter

EXPERTS, HIDDEN, TOKENS = 16, 32, 200
TOPK = 4


def router(dtype: torch.dtype = torch.float32, **settings: Any) -> ExactRouter:
    megatron_cpu.activate("cpu")
    megatron_moe.activate()
    config = TransformerConfig(
        **{"moe_router_topk": TOPK, **settings},
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        add_bias_linear=False,
        params_dtype=dtype,
        perform_initialization=False,
    )
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = None
    made = ExactRouter(config, pg_collection=groups)
    with torch.no_grad():
        made.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) / 4)
    return made


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def dense(indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(TOKENS, EXPERTS, dtype=weights.dtype).scatter(1, indices, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
def test_softmax_scores(norm: bool, dtype: torch.dtype) -> None:
    ours = router(dtype, moe_router_pre_softmax=not norm)
    config = transformers.Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, num_experts_per_tok=TOPK, norm_topk_prob=norm
    )
    theirs = Qwen3MoeTopKRouter(config).to(dtype)
    theirs.weight.data.copy_(ours.weight.data)
    x = states(dtype)
    probs, routing_map = ours(x)
    _, weights, indices = theirs(x.squeeze(1))
    assert probs.dtype == dtype and torch.equal(probs, dense(indices, weights))
    assert torch.equal(routing_map, dense(indices, torch.ones_like(weights)).bool())


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("family", [Glm4MoeMoE, DeepseekV3MoE])
def test_sigmoid_scores_with_bias_and_groups(family: Any, norm: bool, groups: int, kept: int) -> None:
    """Megatron's own would count topk / kept experts of a group, and would divide by the sum whatever is said."""
    sizes: dict[str, Any] = {
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "num_experts_per_tok": TOPK,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": norm,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 8,
    }
    if family is Glm4MoeMoE:
        theirs = Glm4MoeMoE(transformers.Glm4MoeConfig(**sizes)).to(torch.bfloat16)
    else:
        theirs = DeepseekV3MoE(transformers.DeepseekV3Config(**sizes)).to(torch.bfloat16)
    ours = router(
        torch.bfloat16,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=not norm,
        moe_router_topk_scaling_factor=2.5,
        moe_router_num_groups=groups,
        moe_router_group_topk=kept,
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
    )
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)) / 4
    ours.expert_bias.copy_(bias)
    theirs.gate.weight.data.copy_(ours.weight.data)
    theirs.gate.e_score_correction_bias = bias
    x = states(torch.bfloat16)
    probs, routing_map = ours(x)
    if hasattr(theirs, "route_tokens_to_experts"):  # transformers 5.12
        indices, weights = theirs.route_tokens_to_experts(theirs.gate(x))
    else:
        _, weights, indices = theirs.gate(x)
    assert torch.equal(routing_map, dense(indices, torch.ones_like(weights)).bool())
    torch.testing.assert_close(probs, dense(indices, weights), rtol=1e-6, atol=0)  # sums in another order
    if norm and groups == 1:
        torch.testing.assert_close(probs.sum(-1), torch.full((TOKENS,), 2.5))


def test_the_gradient_is_that_of_the_chosen_weights() -> None:
    ours = router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")
    ours.expert_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    before, x = ours.expert_bias.clone(), states()
    probs, routing_map = ours(x)
    (probs.square().sum()).backward()
    weight = ours.weight.detach().requires_grad_()
    scores = (x.squeeze(1) @ weight.T).sigmoid().masked_fill(~routing_map, 0.0)
    (scores / scores.sum(-1, keepdim=True)).square().sum().backward()
    assert weight.grad is not None and ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, weight.grad)
    assert torch.equal(ours.expert_bias, before) and not ours.local_tokens_per_expert.any(), "the bias is not trained"
