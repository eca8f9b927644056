"""A loss that is written over logits: what it gets, and that its gradient is that of the loss over log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.training.step.loss import CustomObjective
from slime.training.step.micro_batch import to_device
from slime.training.step.train_step import rehearse_step
from tests.support.marks import quick
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

SUPERVISED: dict[str, Any] = {"loss_type": "sft_loss"}
OVER_LOGITS: dict[str, Any] = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "examples.own_algorithm:cross_entropy",
    "custom_loss_logits": True,
}


def require_same_gradients(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Up to rounding: the two sum float32 in other orders."""
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        tolerance = 1e-5 * float(gradient.abs().max()) + 1e-9
        assert torch.allclose(got[name], gradient, rtol=1e-4, atol=tolerance), name


@pytest.mark.parametrize("tied", quick([False, True], True), ids=["untied", "tied"])
def test_cross_entropy_over_logits_is_the_supervised_loss(
    tied: bool, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: the public form of a loss gives the loss and the gradient of ours, masks and denominators included."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=tied)
    found = {}
    for name, settings in (("ours", SUPERVISED), ("public", OVER_LOGITS)):
        backend = make_backend(model, **settings)
        found[name] = backend.gradients(random_batch()), backend.train(random_batch())
    (want, ours), (got, public) = found["ours"], found["public"]
    require_same_gradients(got, want)
    assert public["train/loss"] == pytest.approx(ours["train/loss"], rel=1e-6) == public["train/cross_entropy"]
    assert public["train/grad_norm"] == pytest.approx(ours["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", quick(["tp2", "sp2", "pp2", "dp2"], "tp2"))
def test_shards_of_the_vocabulary_are_gathered(layout: str, tmp_path: Path, ranks: Ranks) -> None:
    """Law 3: over two tensor-parallel ranks, stages and replicas the gradient is that of one rank. The vocabulary does
    not divide."""
    model = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=131)
    tensor = {"tensor_model_parallel_size": 2}
    layouts: dict[str, dict[str, Any]] = {
        "one": {"world_size": 1, "megatron": {}},
        "tp2": {"world_size": 2, "megatron": tensor},
        "sp2": {"world_size": 2, "megatron": {**tensor, "sequence_parallel": True}},
        "pp2": {"world_size": 2, "megatron": {"pipeline_model_parallel_size": 2}},
        "dp2": {"world_size": 2, "megatron": {}},
    }
    defaults = {"checkpoint": str(model), "scenarios": {"loss": {}}, "provoke": False, "args": OVER_LOGITS}
    tried = {name: layouts[name] for name in ("one", layout)}
    outcomes: dict[str, Outcome] = run_layouts(ranks, tmp_path, tried, defaults=defaults)
    require_same_gradients(outcomes[layout].gradients["loss"], outcomes["one"].gradients["loss"])


def test_a_row_without_samples_and_a_rehearsal_leave_no_gradient(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    """Both go backward through the model, because other ranks wait for it, and add nothing."""
    backend = make_backend(tiny_qwen3, **OVER_LOGITS)
    objective, prepared = CustomObjective(backend.args), backend.with_advantages(random_batch())
    (chunk,) = backend._trainable.ddps
    empty = to_device(prepared, (), backend.device)
    parts = objective.loss(empty, objective.evaluate(chunk, empty, trains=True))
    parts.loss.backward()
    assert parts.sums == {} and float(parts.loss) == 0.0
    gradients = [parameter.main_grad for parameter in chunk.parameters()]
    assert not any(bool(gradient.any()) for gradient in gradients)
    rehearse_step(backend._context, objective, backend._trainable, prepared)
    assert not any(bool(gradient.any()) for gradient in gradients)


def detached(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Any]]:
    """A loss that forgets its gradient, and says what it was given."""
    num_tokens = batch["tokens"].numel()
    assert logits.shape == (1, num_tokens, 128) and logits.requires_grad
    assert [len(tokens) for tokens in batch["unconcat_tokens"]] == batch["total_lengths"]
    return logits.detach().mean(), {}


def test_a_loss_without_a_gradient_is_an_error(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    own = {**OVER_LOGITS, "custom_loss_function_path": f"{__file__}:detached"}
    with pytest.raises(Exception, match="the loss has no gradient for trained tokens"):
        make_backend(tiny_qwen3, **own).train(random_batch())


def policy_gradient(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Any]]:
    """PPO as losses of the public slime write it: lists with one tensor per sample, joined or walked together."""
    end, new = 0, []
    fields = (batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], batch["advantages"])
    for tokens, total, response, advantages in zip(*fields, strict=True):
        end += total
        scores = torch.log_softmax(logits[0, end - response - 1 : end - 1].float() / args.rollout_temperature, -1)
        new.append(scores.gather(-1, tokens[-response:, None])[:, 0])
        assert len(advantages) == response
    ratio = torch.exp(torch.cat(new) - torch.cat(batch["log_probs"], dim=0))
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"], dim=0) * ratio)
    return loss, {"mine": loss.detach()}


def test_a_policy_loss_of_the_public_form_is_the_policy_loss(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: fields of the batch are lists with one tensor per sample, as public losses read them, old log-probs too."""
    own = {**OVER_LOGITS, "custom_loss_function_path": f"{__file__}:policy_gradient"}
    found = []
    for settings in ({}, own):
        backend = make_backend(tiny_qwen3, **settings)
        found.append((backend.gradients(random_batch()), backend.train(random_batch())))
    (want, ours), (got, public) = found
    require_same_gradients(got, want)
    assert public["train/mine"] == pytest.approx(ours["train/pg_loss"], abs=1e-6)
