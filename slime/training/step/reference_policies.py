"""The reference, teacher and old policies, and their log-probs.

Their weights are in host memory and are swapped into the model for a forward pass (`offloaded_policies`). The old
policy has the weights that the engines served when they sampled a batch. Because `train_async.py` generates while it
trains, the old policy is one weight sync behind. The host keeps the weights of the last two syncs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.advantages import Arrays
from slime.core.sample import NOT_SAMPLED
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.training.state.offloaded_policies import HostPolicies
from slime.training.step.loss import LogProbs
from slime.training.step.micro_batch import PreparedBatch
from slime.training.step.optimizer import Trainable
from slime.training.step.train_step import StepContext, forward_batch

REFERENCE, TEACHER, SYNCED, BEFORE = "reference", "teacher", "published", "before"
"""Names in checkpoints. Engines serve the weights `SYNCED`; before the last weight sync, they served `BEFORE`."""
_PREFIX = {REFERENCE: "ref_", TEACHER: "teacher_"}
"""The prefixes that user hooks receive for reference and teacher."""


class OtherPolicies:
    """The policies that the settings require besides the trained one. Methods that compute log-probs are collective."""

    def __init__(self, args: Args, policy: Trainable) -> None:
        """Copies the policy's initial weights, and loads other checkpoints.

        Raises `ConfigError` or `CheckpointError` if a checkpoint is for a different model.
        """
        self._args, self._chunks, self._host = args, policy.ddps, HostPolicies(policy.model)
        self._synced_version = 0
        samples = not fine_tunes(args)
        needed: dict[str, tuple[str | None, str]] = {}
        if samples and (args.use_kl_loss or args.kl_coef):
            needed[REFERENCE] = (args.ref_load, "--ref-load")
        if samples and args.use_opd and args.opd_type == "megatron":
            needed[TEACHER] = (args.opd_teacher_load, "--opd-teacher-load")
        if args.keep_old_actor:
            needed |= dict.fromkeys((SYNCED, BEFORE), (None, ""))
        initial = Path(args.initial_weights).resolve()
        for name, (directory, flag) in needed.items():
            if directory is None or Path(directory).resolve() == initial:
                self._host.take(name)
            else:
                self._host.read(name, Path(directory), flag)

    def log_probs(self, name: str, context: StepContext, prepared: PreparedBatch) -> Arrays | None:
        """Returns each sample's log-probs [R] under `REFERENCE` or `TEACHER`, or None if there is no such policy.

        The log-probs ignore top-k and top-p.
        """
        if name not in self._host:
            return None
        with self._host.lent(name):
            evaluation = LogProbs(self._args, whole=True)
            return forward_batch(context, evaluation, self._chunks, prepared, whose=_PREFIX[name])[0]

    def old_log_probs(self, context: StepContext, prepared: PreparedBatch) -> tuple[Arrays, ...]:
        """Returns each token's log-probs (see `LogProbs`) under the old policy, which sampled it.

        The old policy is `SYNCED`, or `BEFORE` for earlier versions. For tokens that no engine sampled, either is used.
        """
        versions = [s.token_versions for s in prepared.batch.samples]
        newer = [v >= self._synced_version for v in versions]
        earlier = [(v != NOT_SAMPLED) & ~n for v, n in zip(versions, newer, strict=True)]
        wanted = [name for name, used in ((BEFORE, earlier), (SYNCED, newer)) if any(u.any() for u in used)]
        found = []
        for name in wanted or [SYNCED]:
            with self._host.lent(name):
                found.append(forward_batch(context, LogProbs(self._args), self._chunks, prepared))
        if len(found) < 2:
            return found[0]
        return tuple(
            tuple(np.where(e, old, new) for e, old, new in zip(earlier, olds, news, strict=True))
            for olds, news in zip(*found, strict=True)
        )

    def note_synced(self, version: int) -> None:
        """Records that the engines now serve the current policy as version `version`."""
        self._synced_version = version
        if self._args.keep_old_actor:
            self._host.shift(SYNCED, BEFORE)

    def note_trained(self, rollout_id: int) -> None:
        """Copies the policy to the reference every `--ref-update-interval` trained rollouts."""
        interval = self._args.ref_update_interval
        if interval and (rollout_id + 1) % interval == 0:
            self._host.take(REFERENCE)

    @property
    def lasting(self) -> dict[str, Mapping[str, Tensor]]:
        """Returns the policies that a checkpoint must include because a new run could not rebuild them.

        Loading fills the tensors in place.
        """
        names = (REFERENCE,) if self._args.ref_update_interval else ()
        return self._host.lasting((*names, *((SYNCED,) if self._args.keep_old_actor else ())))


def needs_old_pass(args: Args, algorithm: Algorithm, prepared: PreparedBatch) -> bool:
    """Returns whether the policy's log-probs before the update need a separate pass.

    If there is only one step, the training pass computes them, unless advantages or a loss over logits read them.
    """
    several = len(prepared.schedule.steps) > 1
    hooks = args.custom_advantage_function_path or args.rollout_data_postprocess_path or args.custom_loss_logits
    read = args.kl_coef or args.use_opd or hooks or algorithm.estimator.reads_log_probs
    return several or bool(read)
