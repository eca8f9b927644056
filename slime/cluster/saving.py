"""Checkpointing on the driver. Ranks and Data Buffer write files; `Saver` commits checkpoints and prunes old ones.

    save, at a step     waits for the previous save and creates a folder; the Data Buffer writes its state, and ranks
                        take snapshots (`--async-save`)
    in the background   ranks write, each in a thread during training; then manifest, rename, `latest`, retention
    poll, every step    reports errors and timings of the background save

Without `--async-save`, the driver also waits for the background part. Every wait has a timeout.

Invariants
1. All files of a checkpoint come from the same point in time: training continues only after ranks and Data Buffer have
   copied or written their state.
2. Retention never removes the checkpoint that `latest` points to or the one that this run was resumed from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.cluster.engine_tracker import Actors
from slime.cluster.waiting import wait_for
from slime.core.errors import SAVE_FLAG, CheckpointError, ConfigError
from slime.observability.spans import span
from slime.observability.tracker import Tracker
from slime.settings import Args
from slime.training.state import checkpoint
from slime.training.state.checkpoint import BackgroundSave, Facts

logger = logging.getLogger(__name__)

_COMPARED = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "num_rollout")
_OF_OPTIMIZER = ("lr", "lr_warmup_iters", "lr_decay_style", "weight_decay")
_OF_DECAY = ("min_lr", "lr_decay_iters")


def compared_settings(args: Args) -> dict[str, Any]:
    """Returns the schedule settings that a resumed run compares with its checkpoint's."""
    names = _OF_OPTIMIZER if args.megatron["lr_decay_style"] == "constant" else (*_OF_OPTIMIZER, *_OF_DECAY)
    return {name: args.megatron[name] for name in names} | {name: getattr(args, name) for name in _COMPARED}


def changed_settings(args: Args, before: Mapping[str, Any], step: int) -> tuple[int, str] | None:
    """Returns (log level, message): which settings differ from the checkpoint's, and what applies from `step` on.

    `before`: the settings of the checkpoint; {} if it was written without them. Returns None if nothing changed. A new
    `num_rollout` alone is the usual way to continue, so it is not a warning.
    """
    now = compared_settings(args)
    names = [name for name in now if name in before and before[name] != now[name]]
    if not names:
        return None
    changed = ", ".join(f"{name} {before[name]} -> {now[name]}" for name in names)
    level = logging.INFO if names == ["num_rollout"] else logging.WARNING
    kept = "weights and data position come from the checkpoint, and moments and schedule start over (--no-load-optim)"
    if not args.no_load_optim:
        kept = "weights, moments, data position and the position in the learning-rate schedule come from the checkpoint"
    return level, f"changed since the checkpoint: {changed}; the new values apply from step {step} on, while {kept}"


class Saver:
    def __init__(self, args: Args, actors: Actors, tracker: Tracker) -> None:
        self._args, self._actors, self._tracker = args, actors, tracker
        self._background, self._limit_s = BackgroundSave(), args.save_timeout_s
        self._resumed_from: list[Path] = []

    def restore(self) -> int | None:
        """Loads the latest checkpoint in `--load`, or the one selected by `--ckpt-step`.

        Returns its step, or None without `--load`. With `--finetune`, only loads the weights.
        """
        if not self._args.load:
            return None
        found = checkpoint.find(Path(self._args.load), self._args.ckpt_step)
        if found is None:
            raise ConfigError(
                f"--load {self._args.load} contains no committed checkpoint; drop the flag to start from "
                "--hf-checkpoint"
            )
        with span("load"):
            found = self._verified(found)
            self._resumed_from.append(found.path)
            self._actors.on_trainers("load", str(found.path), limit_s=self._limit_s, flag=SAVE_FLAG)
            if not self._args.finetune:
                what = "the Data Buffer to load"
                self._actors.on_rollout("load", str(found.path), for_what=what, limit_s=self._limit_s, flag=SAVE_FLAG)
        self._tell_resumed(found)
        self._keep_other_branch(found)
        return found.rollout_id

    def _verified(self, found: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
        """Verifies the files of a checkpoint. Returns it, or the newest good one if the run continues by itself.

        It does with --load on the --save folder, and without --ckpt-step.
        Raises `CheckpointError` if it is damaged and there is no other one to continue from.
        """
        try:
            if not self._actors.trainers:
                checkpoint.verify(found.path)
            self._actors.on_trainers("verify", str(found.path), limit_s=self._limit_s, flag=SAVE_FLAG)
            return found
        except CheckpointError as error:
            root = found.path.parent
            continues = self._args.save is not None and Path(self._args.save).resolve() == root.resolve()
            good = checkpoint.undamaged(root, found.path) if continues and self._args.ckpt_step is None else None
            if good is None:
                raise
            logger.error("%s. The run continues from %s instead", error, good.path.name)
            return good

    def _keep_other_branch(self, found: checkpoint.Checkpoint) -> None:
        """Protects later checkpoints in the --save folder from retention, because another run wrote them."""
        root = found.path.parent
        if self._args.save is None or Path(self._args.save).resolve() != root.resolve():
            return
        kept = checkpoint.set_aside(root, after=-1 if self._args.finetune else found.rollout_id)
        if kept and self._args.save_keep_last is not None:
            logger.info("--save-keep-last does not remove %s in %s, saved by another run", ", ".join(kept), root)

    def _tell_resumed(self, found: checkpoint.Checkpoint) -> None:
        if self._args.finetune:
            logger.info("loaded only the weights from %s (--finetune)", found.path)
            return
        following, num_rollout = found.rollout_id + 1, self._args.num_rollout
        of_all = "" if num_rollout is None else f" ({following + 1}/{num_rollout})"
        over = num_rollout is not None and following >= num_rollout
        go_on = "no steps remain" if over else f"the next step is {following}{of_all}"
        logger.info("resumed from %s in %s; %s", found.path.name, found.path.parent, go_on)
        if over and num_rollout:
            logger.warning("this run trains nothing, because num_rollout is only %d; raise --num-rollout", num_rollout)
        elif told := changed_settings(self._args, checkpoint.settings_of(found.path), following):
            logger.log(*told)

    def save(self, rollout_id: int) -> None:
        """Writes a checkpoint, in the background with `--async-save`. Raises the previous save's error, if any."""
        assert self._args.save is not None, f"cannot save step {rollout_id} without --save"
        with span("save_wait"):
            self._tell(self._background.finish(limit_s=self._limit_s))
        start_s = time.perf_counter()
        parts = checkpoint.begin(Path(self._args.save), rollout_id)
        now = [self._actors.rollout.save.remote(str(parts))]
        if self._args.async_save:
            now += [trainer.take_snapshot.remote() for trainer in self._actors.trainers]
        wait_for(now, for_what=f"the state of step {rollout_id} to be copied", limit_s=self._limit_s, flag=SAVE_FLAG)
        self._background.start(
            lambda: self._write(parts, rollout_id, start_s), what=f"the checkpoint of step {rollout_id}"
        )
        if not self._args.async_save:
            self.finish()

    def poll(self) -> None:
        """Logs the metrics of a finished background save or raises its error. Does not block."""
        self._tell(self._background.poll())

    def finish(self, limit_s: float | None = None) -> None:
        """Waits for the background save, if any. Raises its error, or `DeadlineExceeded`."""
        self._tell(self._background.finish(limit_s=self._limit_s if limit_s is None else limit_s))

    def _write(self, parts: Path, rollout_id: int, start_s: float) -> Facts:
        """Waits for the ranks, commits the checkpoint and removes old ones. Runs in the background."""
        written = self._actors.on_trainers("write_parts", str(parts), limit_s=self._limit_s, flag=SAVE_FLAG)
        seals = {name: seal for part in written for name, seal in part.items()}
        path = checkpoint.commit(parts, rollout_id, seals, settings=compared_settings(self._args))
        checkpoint.prune(
            path.parent,
            keep_last=self._args.save_keep_last,
            retain_interval=self._args.save_retain_interval,
            keep=self._resumed_from,
        )
        return {
            "perf/save_total_time": time.perf_counter() - start_s,
            "perf/save_bytes": float(sum(seal["bytes"] for seal in seals.values())),
        }

    def _tell(self, facts: Facts) -> None:
        if facts:
            self._tracker.add(facts)
