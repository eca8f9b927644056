"""The policies beside the policy: reference, teacher and old actor, as copies of its weights, and their log-probs.

The old actor is what the engines served when they sampled a batch. `train_async.py` generates while it trains, so that
is one weight sync behind: two copies, of the synced weights and of those before them. Each weight sync shifts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slime.core.sample import NOT_SAMPLED
from slime.models.common.table import FamilyTable
from slime.training.state.hf_weights import Holder
from slime.training.state.host_policies import HostPolicies
from slime.training.step.optimizer import Trainable
from slime.training.step.prepare import PreparedBatch
from slime.training.step.targets import Arrays
from slime.training.step.task import PolicyTask
from slime.training.step.train import StepContext, forward_signals

REFERENCE, TEACHER, SYNCED, BEFORE = "reference", "teacher", "published", "before"
"""What the policy is held to; what distils; what engines serve; what they served before that."""


class Copies:
    """The copies that the settings need. What computes log-probs is collective."""

    def __init__(
        self,
        args: Any,
        context: StepContext,
        trainable: Trainable,
        parameters: Mapping[str, Tensor],
        table: FamilyTable,
        holders: Mapping[str, Holder],
    ) -> None:
        """Takes the initial weights from the policy, which holds them, and reads other checkpoints.

        Raises `ConfigError` or `CheckpointError` for one that does not fit.
        """
        self._args, self._context, self._ddps = args, context, trainable.ddps
        adapters = holders.keys() - set(table.megatron_names)
        self._host = HostPolicies(parameters, adapters or holders.keys())
        self._synced_version = 0
        learns_from_samples = args.loss_type != "sft_loss"
        needed: dict[str, tuple[str | None, str]] = {}
        if learns_from_samples and (args.use_kl_loss or args.kl_coef):
            needed[REFERENCE] = (args.ref_load, "--ref-load")
        if learns_from_samples and args.use_opd and args.opd_type == "megatron":
            needed[TEACHER] = (args.opd_teacher_load, "--opd-teacher-load")
        if args.keep_old_actor:
            needed |= dict.fromkeys((SYNCED, BEFORE), (None, ""))
        initial = Path(args.hf_checkpoint).resolve()
        for name, (directory, flag) in needed.items():
            if directory is None or Path(directory).resolve() == initial:
                self._host.take(name)
            else:
                self._host.read(name, Path(directory), flag, table, holders)

    def log_probs(self, name: str, prepared: PreparedBatch) -> Arrays | None:
        """[R] of each sample under a copy, of the whole distribution; None if there is no such copy."""
        if name not in self._host:
            return None
        whole = dataclasses.replace(self._context, task=PolicyTask(self._args, whole=True))
        with self._host.lent(name):
            return forward_signals(whole, self._ddps, prepared)[0]

    def as_sampled(self, prepared: PreparedBatch) -> tuple[Arrays, ...]:
        """The policy's signals (`PolicyTask`), of each token under the weights that it was sampled with.

        Those are the published ones, or for earlier versions (of tokens that no engine sampled: whatever) the ones
        before them.
        """
        versions = [s.token_versions for s in prepared.batch.samples]
        newer = [v >= self._synced_version for v in versions]
        earlier = [(v != NOT_SAMPLED) & ~n for v, n in zip(versions, newer, strict=True)]
        wanted = [name for name, used in ((BEFORE, earlier), (SYNCED, newer)) if any(u.any() for u in used)]
        signals = []
        for name in wanted or [SYNCED]:
            with self._host.lent(name):
                signals.append(forward_signals(self._context, self._ddps, prepared))
        if len(signals) < 2:
            return signals[0]
        return tuple(
            tuple(np.where(e, old, new) for e, old, new in zip(earlier, olds, news, strict=True))
            for olds, news in zip(*signals, strict=True)
        )

    def note_synced(self, version: int) -> None:
        """Engines serve the policy as it is now, under this version."""
        self._synced_version = version
        if self._args.keep_old_actor:
            self._host.shift(SYNCED, BEFORE)

    def note_trained(self, rollout_id: int) -> None:
        """A rollout was trained; every `--ref-update-interval` of them the policy becomes the reference."""
        interval = self._args.ref_update_interval
        if interval and (rollout_id + 1) % interval == 0:
            self._host.take(REFERENCE)

    @property
    def lasting(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint holds: copies that a new run would make otherwise -> their tensors, filled in place."""
        names = (REFERENCE,) if self._args.ref_update_interval else ()
        return self._host.lasting((*names, *((SYNCED,) if self._args.keep_old_actor else ())))
