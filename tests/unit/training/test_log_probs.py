"""Chunked log-probs, entropy and values equal the plain formulas, with gradients, whatever the chunk size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.model import log_probs as module
from slime.training.model.log_probs import VocabShard, score_tokens, token_log_probs, token_values
from tests.support.marks import quick

VOCAB, PADDED, HIDDEN, TOKENS = 131, 136, 16, 37
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-6}
SHARD = VocabShard(0, VOCAB, None)


def data(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight with poisoned padding, targets, gradients of log-probs and of entropy."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(PADDED, HIDDEN, generator=generator) / 4).to(dtype)
    weight[VOCAB:] = float("nan")
    weight[VOCAB + 1] = float("inf")
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    grads = torch.randn(2, TOKENS, generator=generator).double()
    return hidden, weight, targets, grads[0], grads[1]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """transformers-style: logits in the dtype of the model, then log_softmax; in float64 from there on."""
    log_p = torch.log_softmax((hidden @ weight.t()).double() / temperature, dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 1024, 0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    dtype: torch.dtype, temperature: float, chunk_tokens: int, entropy_grad: bool
) -> None:
    hidden, weight, targets, grad, grad_entropy = data(dtype)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    log_probs, entropy = token_log_probs(
        hidden,
        weight,
        targets,
        SHARD,
        temperature=temperature,
        with_entropy=True,
        entropy_grad=entropy_grad,
        chunk_tokens=chunk_tokens,
    )
    assert entropy is not None and log_probs.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert entropy.requires_grad == entropy_grad
    loss = (log_probs * grad).sum() + ((entropy * grad_entropy).sum() if entropy_grad else 0)
    got = torch.autograd.grad(loss, inputs)

    valid = weight[:VOCAB].detach().requires_grad_()
    expected_log_probs, expected_entropy = plain(hidden, valid, targets, temperature)
    loss = (expected_log_probs * grad).sum() + ((expected_entropy * grad_entropy).sum() if entropy_grad else 0)
    expected = torch.autograd.grad(loss, [hidden, valid])

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(log_probs.double(), expected_log_probs.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=tolerance, atol=tolerance)
    # Gradients in half precision are rounded once, and once more per chunk.
    limits = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 5 * tolerance, "atol": 5 * tolerance}
    torch.testing.assert_close(got[0], expected[0], **limits)
    torch.testing.assert_close(got[1][:VOCAB], expected[1], **limits)
    assert not got[1][VOCAB:].any(), "padded rows have no gradient"


@pytest.mark.parametrize("options", quick([{}, {"top_p": 0.7}, {"top_k": 4}], {"top_p": 0.7}), ids=str)
def test_gradients_equal_finite_differences(options: dict[str, float]) -> None:
    hidden, weight, targets, _, _ = data(torch.float64)
    small, shard = weight[:9, :4].clone().requires_grad_(), VocabShard(0, 9, None)

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(
            hidden, weight, targets[:3] % 9, shard, temperature=0.7, with_entropy=True, entropy_grad=True, **options
        )

    assert torch.autograd.gradcheck(scores, (hidden[:3, :4].clone().requires_grad_(), small), eps=1e-7, atol=1e-6)


def test_small_work_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _, _ = data(torch.float32)
    options = {"with_entropy": True, "top_p": 0.8}
    whole = score_tokens(hidden, weight, targets, SHARD, **options)
    monkeypatch.setattr(module, "WORK_BYTES", {"cpu": 3 * 4 * VOCAB, "cuda": 1})
    cut = score_tokens(hidden, weight, targets, SHARD, **options)
    for name in ("log_probs", "entropy", "full_log_probs", "outside"):
        torch.testing.assert_close(getattr(whole, name), getattr(cut, name), rtol=0, atol=1e-6)


def test_large_logits_keep_their_digits() -> None:
    """A shift of all logits by 1e4 costs float32 three digits of the logits, and nothing more."""
    hidden = torch.tensor([[1.0, 1e4]])
    weight = torch.stack([torch.arange(8.0), torch.ones(8)], dim=1)
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([3]), VocabShard(0, 8, None), with_entropy=True)
    log_p = torch.log_softmax(torch.arange(8.0).double(), dim=0)
    assert entropy is not None
    assert abs(float(log_probs) - float(log_p[3])) < 1e-6
    assert abs(float(entropy) + float((log_p.exp() * log_p).sum())) < 1e-6


def test_no_tokens_and_frozen_inputs() -> None:
    hidden, weight, targets, _, _ = data(torch.float32)
    weight.requires_grad_()
    log_probs, _ = token_log_probs(hidden[:0], weight, targets[:0], SHARD)
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and weight.grad is not None and not weight.grad.any()
    frozen = weight.detach()
    log_probs, _ = token_log_probs(hidden.requires_grad_(), frozen, targets, SHARD)
    log_probs.sum().backward()
    assert hidden.grad is not None and frozen.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    hidden, weight, _, _, _ = data(dtype)
    head, bias = weight[:1].requires_grad_(), torch.ones(1, dtype=dtype)
    values = token_values(hidden, head, bias)
    assert values.shape == (TOKENS,) and values.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(values.double(), hidden.double() @ head[0].double() + 1, rtol=1e-6, atol=1e-6)
    values.sum().backward()
    assert head.grad is not None and head.grad.shape == (1, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 0])
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_of_the_weight_can_go_straight_into_its_sum(
    dtype: torch.dtype, chunk_tokens: int, tied: bool
) -> None:
    """Then autograd gets one that nobody reads, or none where the embedding delivers one to the same parameter."""
    hidden, weight, targets, grad, _ = data(dtype)
    exact = (
        torch.autograd.grad(
            (plain(hidden, valid := weight[:VOCAB].float().requires_grad_(), targets, 1.0)[0] * grad).sum(), valid
        )[0]
        if dtype == torch.float32
        else None
    )
    gradients = []
    for into_main_grad in (False, True):
        trained: Any = torch.nn.Parameter(weight.clone())
        trained.main_grad, trained.grad_added_to_main_grad = torch.full(weight.shape, 0.5), False
        if tied:
            trained.zero_out_wgrad = True
        scores = score_tokens(hidden, trained, targets, SHARD, chunk_tokens=chunk_tokens, into_main_grad=into_main_grad)
        (scores.log_probs * grad).sum().backward()
        if not into_main_grad:
            assert not trained.grad_added_to_main_grad and bool((trained.main_grad == 0.5).all())
            gradients.append(trained.grad.float())
            continue
        assert trained.grad_added_to_main_grad and (trained.grad is None) == tied
        assert bool((trained.main_grad[VOCAB:] == 0.5).all()), "padding has no gradient"
        gradients.append(trained.main_grad - 0.5)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(gradients[1], gradients[0], rtol=limit, atol=limit)
    if exact is not None:
        torch.testing.assert_close(gradients[1][:VOCAB], exact, rtol=1e-5, atol=1e-6)
