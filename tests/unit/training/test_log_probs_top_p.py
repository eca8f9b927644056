"""Log-probs under top-k and top-p equal those of a brute-force top-p set, ties included, and are a distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.training.model.log_probs import VocabShard, score_tokens
from tests.support.marks import quick

CUTS = [(0.9, -1), (0.5, -1), (0.01, -1), (1.0, 5), (1.0, 1), (0.8, 5), (0.3, 40), (0.999999, -1), (1.0, 1000)]


def brute_force(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """bool [T, V]: the rule of SGLang's torch sampler, token by token in descending stable order."""
    kept = np.zeros(logits.shape, bool)
    for row, line in enumerate(logits.astype(np.float64)):
        p = np.exp((line - line.max()) / temperature)
        p /= p.sum()
        before = 0.0
        for place, token in enumerate(np.argsort(-line, kind="stable")):
            if (top_p < 1 and before > top_p) or (top_k > 0 and place >= top_k):
                break
            kept[row, token] = True
            before += p[token]
    return kept


def expected(logits: Tensor, kept: np.ndarray, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs with the target added to the kept set, and whether it had to be."""
    mask = torch.from_numpy(kept.copy())
    outside = ~mask.gather(1, targets.unsqueeze(1)).squeeze(1)
    mask.scatter_(1, targets.unsqueeze(1), True)
    log_p = torch.log_softmax((logits.double() / temperature).masked_fill(~mask, -float("inf")), dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), outside


@pytest.mark.parametrize("seed", quick(range(4), 0))
@pytest.mark.parametrize(("top_p", "top_k"), CUTS)
@pytest.mark.parametrize("kind", ["smooth", "ties", "negative ties"])
def test_kept_set_is_the_brute_force_one(kind: str, top_p: float, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, 97, generator=generator, dtype=torch.float64) * 2
    if kind != "smooth":
        logits = logits.round() - (40 if kind == "negative ties" else 0)
    targets = torch.randint(0, 97, (50,), generator=generator)
    weight, shard = torch.eye(97, dtype=torch.float64), VocabShard(0, 97, None)
    leaf = logits.clone().requires_grad_()
    options = {"temperature": 0.7, "top_p": top_p, "top_k": top_k, "with_entropy": True}
    scores = score_tokens(leaf, weight, targets, shard, chunk_tokens=16, **options)
    kept = brute_force(logits.numpy(), 0.7, top_p, top_k)
    reference = logits.clone().requires_grad_()
    log_probs, outside = expected(reference, kept, targets, 0.7)
    torch.testing.assert_close(scores.log_probs, log_probs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scores.outside, outside, rtol=0, atol=0)
    full = score_tokens(logits, weight, targets, shard, temperature=0.7, with_entropy=True)
    torch.testing.assert_close(scores.full_log_probs, full.log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.entropy, full.entropy, rtol=0, atol=1e-12)
    scores.log_probs.sum().backward()
    log_probs.sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, -1), (1.0, 7), (0.6, 20)])
def test_half_precision_logits_with_many_ties(dtype: torch.dtype, top_p: float, top_k: int) -> None:
    """Sums are float32 here: a token at the very edge may fall on the other side, 1 in 1,000 at most."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(400, 301, generator=generator) * 2).to(dtype)
    targets = torch.randint(0, 301, (400,), generator=generator)
    weight = torch.eye(301, dtype=dtype)
    scores = score_tokens(logits, weight, targets, VocabShard(0, 301, None), top_p=top_p, top_k=top_k)
    kept = brute_force(logits.double().numpy(), 1.0, top_p, top_k)
    log_probs, outside = expected(logits, kept, targets, 1.0)
    wrong = ((scores.log_probs - log_probs).abs() > 1e-5) | (scores.outside != outside)
    assert int(wrong.sum()) <= 0.001 * 400, f"{int(wrong.sum())} of 400 rows differ"


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 6), (0.8, 4)])
def test_mean_of_the_score_function_is_zero(top_p: float, top_k: int) -> None:
    """Over the tokens that can be sampled, sum of p * grad log p = 0 and sum of p = 1: a policy gradient without bias
    from the cut. With log-probs of the whole distribution the sum is far from zero."""
    logits = torch.randn(1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    tokens = torch.from_numpy(np.flatnonzero(brute_force(logits.numpy(), 1.0, top_p, top_k)[0]))
    weight, shard = torch.eye(12, dtype=torch.float64), VocabShard(0, 12, None)
    rows = logits.expand(len(tokens), -1).clone().requires_grad_()
    scores = score_tokens(rows, weight, tokens, shard, top_p=top_p, top_k=top_k)
    p = scores.log_probs.detach().exp()
    assert abs(float(p.sum()) - 1) < 1e-12
    (p * scores.log_probs).sum().backward()
    assert rows.grad is not None and float(rows.grad.sum(dim=0).abs().max()) < 1e-12
    whole = logits.expand(len(tokens), -1).clone().requires_grad_()
    (p * score_tokens(whole, weight, tokens, shard).log_probs).sum().backward()
    assert whole.grad is not None and float(whole.grad.sum(dim=0).abs().max()) > 1e-2


def test_equal_logits_keep_as_many_as_fit() -> None:
    """Ten equal tokens and top-p 0.25: masses before them are 0, 0.1, 0.2, 0.3; three are kept, the first three ids."""
    weight, shard = torch.eye(10, dtype=torch.float64), VocabShard(0, 10, None)
    targets = torch.arange(10)
    scores = score_tokens(torch.zeros(10, 10, dtype=torch.float64), weight, targets, shard, top_p=0.25)
    assert scores.outside.tolist() == [False] * 3 + [True] * 7
    torch.testing.assert_close(scores.log_probs.exp(), torch.tensor([1 / 3] * 3 + [1 / 4] * 7, dtype=torch.float64))
