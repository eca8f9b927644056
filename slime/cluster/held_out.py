"""The held-out loss of a fine-tuning run: batches of the rollout side, measured by the trainer.

Consumes: the driver's `measure`. Produces: `eval/<dataset>-loss` and what it is a mean of. Waits for: the batches,
which are made once and stay in Ray's store, and the training ranks, each with a limit. Nobody wakes it.
"""

from __future__ import annotations

from typing import Any

import ray

from slime.cluster.actors import Actors
from slime.cluster.memory import MemoryHandOver
from slime.cluster.waiting import wait_for
from slime.settings import Args
from slime.settings.groups.evaluation import loss_datasets

LIMIT_S = 3600.0
"""Limit of reading and encoding the held-out data."""


class HeldOutLoss:
    """Measures nothing, and asks nobody, where no dataset is evaluated by its loss."""

    def __init__(self, args: Args, actors: Actors, *, memory: MemoryHandOver) -> None:
        self._actors, self._memory = actors, memory
        self._num_datasets = len(loss_datasets(args))
        self._batches: list[tuple[str, Any, dict[str, float]]] | None = None
        """Name, reference to the batch, and what is known of it."""

    def measure(self) -> dict[str, float]:
        """The mean loss of the trained tokens of each dataset, under the trainer's weights."""
        if not self._num_datasets:
            return {}
        if self._batches is None:
            self._batches = self._fetch()
        self._memory.to_trainer()
        metrics: dict[str, float] = {}
        for name, batch, facts in self._batches:
            found = self._actors.on_trainers("measure_loss", batch)[0]
            metrics |= {f"eval/{name}-{key}": value for key, value in {**found, **facts}.items()}
        return metrics

    def _fetch(self) -> list[tuple[str, Any, dict[str, float]]]:
        made = wait_for([self._actors.rollout.held_out.remote()], for_what="the held-out data", limit_s=LIMIT_S)[0]
        return [
            (
                one.name,
                ray.put(one.batch),
                {"num_prompts": float(len(one.batch.samples)), "num_unusable": float(one.num_unusable)},
            )
            for one in made
        ]
