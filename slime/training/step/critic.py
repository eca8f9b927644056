"""The critic, for estimators that need one: a value model and its optimizer, sharded over ranks like the policy.

It starts from the weights of `--critic-load` and a zero value head, so its first values are zero.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from slime.algorithms import Algorithm
from slime.algorithms.advantages import Arrays, CriticEstimator
from slime.core.hf_config import read_hf_config
from slime.models import table_for
from slime.models.common.table import Row
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.settings.roles import critic_args
from slime.training.model.build import build_model
from slime.training.model.policy_model import ValueModel
from slime.training.model.trained import trained_names
from slime.training.state import hf_weights
from slime.training.state.sharded_model import ShardedModel
from slime.training.step.loss import ValueObjective
from slime.training.step.micro_batch import PreparedBatch
from slime.training.step.optimizer import Trainable, build_trainable
from slime.training.step.train_step import StepContext, forward_batch, train_on

_METRICS = {
    "train/grad_norm": "train/critic-grad_norm",
    "train/lr-pg_0": "train/critic-lr-pg_0",
    "train/skipped_updates": "train/critic-skipped_updates",
}
"""Metric of an optimizer step -> the critic's metric."""


class Critic:
    """The critic's model, which predicts values of response tokens and learns from returns. Methods are collective."""

    trainable: Trainable

    def __init__(self, args: Args, estimator: CriticEstimator, device: torch.device) -> None:
        """Builds the model and loads its weights. Raises `ConfigError` or `CheckpointError` as for the policy."""
        args = critic_args(args)
        assert args.critic_load is not None, "the settings derive critic_load"
        directory = Path(args.critic_load)
        hf_config = read_hf_config(args.critic_load)
        chunks = build_model(args, hf_config, device, kind=ValueModel)
        # The value head replaces the output layer, so the checkpoint's output layer is skipped, as if it were tied.
        table = table_for(hf_config)
        after = tuple(row for row in table.after if not row.megatron.startswith("output_layer."))
        table = dataclasses.replace(table, after=after, tied=True)
        shapes = {"value_head.weight": (1, table.sizes.hidden_size), "value_head.bias": (1,)}
        head = tuple(Row(name, (name,), (shape,), name) for name, shape in shapes.items())
        whole = dataclasses.replace(table, after=(*after, *head))
        model = ShardedModel.of(chunks, whole, trained_names(whole, None, None))
        hf_weights.load_weights(model.within(table), directory)
        self.trainable = build_trainable(chunks, model, args.megatron)
        self._objective = ValueObjective(estimator)

    @classmethod
    def of(cls, args: Args, algorithm: Algorithm, device: torch.device) -> Critic | None:
        if fine_tunes(args) or not isinstance(algorithm.estimator, CriticEstimator):
            return None
        return cls(args, algorithm.estimator, device)

    def values(self, context: StepContext, prepared: PreparedBatch) -> Arrays:
        """Returns every sample's values [R] under the current weights, on every rank."""
        return forward_batch(context, self._objective, self.trainable.ddps, prepared)[0]

    def train(self, context: StepContext, prepared: PreparedBatch, *, version: int) -> dict[str, float]:
        """Runs all optimizer steps for a batch that has returns. Raises `NumericsError` as for the policy."""
        metrics = train_on(context, self._objective, self.trainable, prepared, version=version)
        metrics.pop("train/num_updates")
        return {_METRICS.get(name, name): value for name, value in metrics.items()}
