"""Users' functions around the passes of the trainer: `--custom-megatron-...-path`.

They run on every rank and must do the same on all: whatever they change of the model is changed by all of them, or the
ranks of a model no longer fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.settings import Args
from slime.settings.hooks import load_hook
from slime.training.step.optimizer import Trainable


@dataclass(frozen=True, slots=True)
class OwnCode:
    """What the settings name; None where they name nothing."""

    args: Args
    log_prob_hook: Callable[..., Any] | None
    train_step_hook: Callable[..., Any] | None

    @classmethod
    def of(cls, args: Args) -> OwnCode:
        """Raises `HookError` for a path at which nothing fits."""
        before_log_prob = args.custom_megatron_before_log_prob_hook_path
        before_step = args.custom_megatron_before_train_step_hook_path
        return cls(
            args,
            None if before_log_prob is None else load_hook(before_log_prob, "before_log_prob"),
            None if before_step is None else load_hook(before_step, "before_train_step"),
        )

    def before_log_prob(self, chunks: Sequence[Any], prefix: str) -> None:
        """Before a pass without gradients. `prefix`: whose weights it has: none, `ref_` or `teacher_`."""
        if self.log_prob_hook is not None:
            self.log_prob_hook(self.args, list(chunks), prefix)

    def before_train_step(self, rollout_id: int, step: int, trainable: Trainable) -> None:
        """Before the passes of an optimizer step, when gradients are zero."""
        if self.train_step_hook is not None:
            model = list(trainable.ddps)
            self.train_step_hook(self.args, rollout_id, step, model, trainable.optimizer, trainable.scheduler)


def after_init(args: Args) -> None:
    """When this rank has joined its process groups, before there is a model. Raises `HookError` as above."""
    if args.custom_megatron_init_path is not None:
        load_hook(args.custom_megatron_init_path, "megatron_init")(args)
