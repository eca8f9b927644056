"""What users' functions of advantages are handed can be worked with as torch's own tensors are."""

from __future__ import annotations

import torch

from slime.algorithms.whole_batch import BatchLogProbs, RolloutView
from tests.support.training import random_batch


def test_tokens_can_index() -> None:
    """A batch holds ids in 32 bits; `gather`, `scatter_` and `one_hot` take 64."""
    batch = random_batch(vocab_size=50)
    view = RolloutView(batch, [s.loss_mask for s in batch.samples], BatchLogProbs(), None, None)
    for sample, tokens in zip(batch.samples, view.as_dict()["tokens"], strict=True):
        seen = torch.nn.functional.one_hot(tokens, 50).sum(0)
        assert torch.equal(seen.gather(0, tokens) > 0, torch.ones(sample.num_tokens, dtype=torch.bool))
        assert torch.zeros(50).scatter_(0, tokens, 1.0).sum() == len(set(sample.tokens.tolist()))
