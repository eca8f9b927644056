"""Your own functions in the training step: advantages, a loss, importance weights, an aggregation.

    python train.py ... --custom-advantage-function-path examples.own_algorithm:best_of_group
    python train.py ... --rollout-data-postprocess-path examples.own_algorithm:at_most_three
    python train.py ... --loss-type custom_loss --custom-loss-function-path examples.own_algorithm:reinforce
    python train.py ... --loss-type custom_loss --custom-loss-function-path examples.own_algorithm:cross_entropy \
                        --custom-loss-logits
    python train.py ... --use-tis --custom-tis-function-path examples.own_algorithm:soft_weights
    python train.py ... --custom-pg-loss-reducer-function-path examples.own_algorithm:by_thousand_tokens

All of them run on every training rank. The first two get the whole batch, the others one micro-batch. A loss must use
the denominators of the step, as `sum_of_sample_mean` does. slime divides the sum of a reducer by the step's executions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def best_of_group(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets an advantage of 1 for the best responses to a prompt, and 0 for the others."""
    best: dict[int, float] = {}
    for group, reward in zip(rollout_data["group_index"], rollout_data["rewards"], strict=True):
        best[group] = max(reward, best.get(group, reward))
    rollout_data["advantages"] = [
        mask * float(reward == best[group])
        for group, reward, mask in zip(
            rollout_data["group_index"], rollout_data["rewards"], rollout_data["loss_masks"], strict=True
        )
    ]


def at_most_three(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Clamps the advantages of any estimator to ±3."""
    rollout_data["advantages"] = [advantage.clamp(-3.0, 3.0) for advantage in rollout_data["advantages"]]


def reinforce(
    args: Any, batch: dict[str, Any], log_probs: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss -A log p, without ratio or clip."""
    loss = sum_of_sample_mean(-batch["advantages"] * log_probs)
    return loss, {"mean_log_prob": sum_of_sample_mean(log_probs.detach())}


def cross_entropy(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of the responses at temperature 1, regardless of reward. `logits` [1, T, V] has the samples one after the
    other."""
    end, losses = 0, []
    samples = zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True)
    for tokens, total, response in samples:
        end += total
        predicting = logits[0, end - response - 1 : end - 1].float()
        losses.append(torch.nn.functional.cross_entropy(predicting, tokens[-response:], reduction="none"))
    loss = sum_of_sample_mean(torch.cat(losses))
    return loss, {"cross_entropy": loss.detach()}


def soft_weights(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """The weight 2 w / (1 + w): 1 if trainer and engine agree, at most 2."""
    log_ratio = torch.cat([a - b for a, b in zip(train_log_probs, rollout_log_probs, strict=True)])
    weight = 2 * torch.sigmoid(torch.where(torch.cat(list(loss_masks)) > 0, log_ratio, torch.zeros_like(log_ratio)))
    return pg_loss * weight, loss_masks, {"soft_weight": weight}


def by_thousand_tokens(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[Tensor], Tensor]:
    """Divides the sum over trained tokens by a constant."""
    mask = torch.cat(list(masks))
    return lambda token_loss: (token_loss * mask).sum() / 1000.0
