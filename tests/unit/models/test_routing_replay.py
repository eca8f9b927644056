"""A router with a record takes its choice from it, and weighs the chosen experts by its own logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.models.common.mlp import RowRouting
from tests.unit.models.test_router import EXPERTS, TOKENS, TOPK, router, states

RECORD = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(-1)[:, :TOPK].to(torch.uint8)
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_whole": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
}


def replaying(kind: str, choices: RowRouting | None) -> Any:
    made = router(**KINDS[kind])
    made.set_layer_number(3)
    made.choices = choices
    return made


def plain(weight: torch.Tensor, chosen: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, EXPERTS] by the formula: scores of the chosen experts, divided by their sum or not."""
    logits = states().squeeze(1) @ weight.T
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    kept = scores * torch.zeros_like(scores).scatter(1, chosen.long(), 1.0)
    if kind != "softmax_whole":
        kept = kept / kept.sum(-1, keepdim=True)
    return kept * (1.5 if kind == "sigmoid" else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_the_record_and_the_gradient_the_formulas(kind: str) -> None:
    ours = replaying(kind, RowRouting({2: RECORD}))
    weights, chosen = ours(states())
    assert torch.equal(chosen, torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, RECORD.long(), True))
    weight = ours.weight.detach().clone().requires_grad_()
    want = plain(weight, RECORD, kind)
    torch.testing.assert_close(weights, want)
    upstream = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(6))
    (weights * upstream).sum().backward()
    (want * upstream).sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() > 0.1
    torch.testing.assert_close(ours.weight.grad, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_record_goes_its_own_way(kind: str) -> None:
    own_weights, own = replaying(kind, None)(states())
    holes = RECORD.clone()
    holes[::3] = 255
    counts = torch.zeros(2, dtype=torch.float64)
    weights, chosen = replaying(kind, RowRouting({2: holes}, counts=counts))(states())
    assert torch.equal(chosen[::3], own[::3]) and torch.equal(weights[::3], own_weights[::3])
    recorded = torch.ones(TOKENS, dtype=torch.bool)
    recorded[::3] = False
    differs = recorded & (chosen != own).any(-1)
    assert counts.tolist() == [int(recorded.sum()), int(differs.sum())] and differs.any()


@pytest.mark.parametrize(
    "choices",
    [RowRouting({}), RowRouting({1: RECORD}), RowRouting({2: RECORD}, replays=False)],
    ids=["nothing", "another layer", "compared only"],
)
def test_nothing_to_replay_changes_no_bit(choices: RowRouting) -> None:
    for own, got in zip(replaying("softmax", None)(states()), replaying("softmax", choices)(states()), strict=True):
        assert torch.equal(own, got)


def test_what_one_pass_keeps_the_next_replays() -> None:
    kept: dict[int, torch.Tensor] = {}
    _, first = replaying("softmax", RowRouting({}, keeps=kept))(states())
    moved = replaying("softmax", RowRouting(kept))
    with torch.no_grad():
        moved.weight.neg_()
    _, again = moved(states())
    assert torch.equal(first, again) and kept[2].dtype == torch.uint8


def test_a_record_of_other_tokens_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="in layer 2"):
        replaying("softmax", RowRouting({2: RECORD[1:]}))(states())
