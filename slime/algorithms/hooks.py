"""Users' functions on advantages: `--custom-advantage-function-path` and `--rollout-data-postprocess-path`.

They see the batch as a dict of lists with one entry per sample, CPU tensors for what is per token, and set
`advantages` (and, with a critic, `returns`) in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.algorithms.advantages import Arrays, Estimate, where_trained
from slime.core.batch import TrainBatch
from slime.core.errors import HookError
from slime.settings.hooks import load_hook

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.batch import BatchLogProbs
    from slime.settings import Args


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What the functions see of a batch; per sample, arrays [R]."""

    batch: TrainBatch
    masks: Arrays
    """Trained tokens."""
    log_probs: BatchLogProbs
    values: Arrays | None
    """The critic's; None without one."""
    kl: Arrays | None
    """To the reference; None without --kl-coef."""

    def as_dict(self) -> dict[str, Any]:
        """A copy, which a function may change."""
        samples = self.batch.samples
        return {
            "tokens": _tensors([s.tokens.astype(np.int64) for s in samples]),
            "total_lengths": [s.num_tokens for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "rewards": [s.reward for s in samples],
            "group_index": [s.group_index for s in samples],
            "index": [s.index for s in samples],
            "loss_masks": _tensors(self.masks),
            "log_probs": _tensors(self.log_probs.old),
            "ref_log_probs": _tensors(self.log_probs.ref),
            "teacher_log_probs": _tensors(self.log_probs.teacher),
            "values": _tensors(self.values),
            "kl": _tensors(self.kl),
        }

    def estimate_in(self, data: dict[str, Any], flag: str) -> Estimate:
        """Advantages and, with a critic, returns that the function of `flag` left in `data`."""
        advantages = _checked(data.get("advantages"), "advantages", self.masks, flag)
        return Estimate(
            advantages, None if self.values is None else _checked(data.get("returns"), "returns", self.masks, flag)
        )


def custom_advantages(args: Args, view: RolloutView) -> Estimate:
    """The advantages of `--custom-advantage-function-path`. Raises `HookError` if it breaks its contract."""
    assert args.custom_advantage_function_path is not None, "the caller has looked"
    data = view.as_dict()
    load_hook(args.custom_advantage_function_path, "advantage")(args, data)
    return view.estimate_in(data, "--custom-advantage-function-path")


def postprocessed(args: Args, view: RolloutView, made: Estimate) -> Estimate:
    """What `--rollout-data-postprocess-path` makes of advantages and returns. Raises `HookError` likewise."""
    assert args.rollout_data_postprocess_path is not None, "the caller has looked"
    data = view.as_dict() | {"advantages": _tensors(made.advantages), "returns": _tensors(made.returns)}
    load_hook(args.rollout_data_postprocess_path, "data_postprocess")(args, view.batch.rollout_id, data)
    return view.estimate_in(data, "--rollout-data-postprocess-path")


def _tensors(arrays: Sequence[Any] | None) -> list[Tensor] | None:
    """Copies, one CPU tensor per sample."""
    import torch

    return None if arrays is None else [torch.from_numpy(np.array(x)) for x in arrays]


def _checked(values: Any, name: str, masks: Arrays, flag: str) -> Arrays:
    got = f"a list of {len(values)}" if isinstance(values, (list, tuple)) else type(values).__name__
    if not isinstance(values, (list, tuple)) or [len(v) for v in values] != [len(m) for m in masks]:
        raise HookError(
            f"{flag}: got {got} in rollout_data[{name!r}]; it sets one value per response token of each sample"
        )
    kept = where_trained([np.asarray(v, np.float64) for v in values], masks)
    if not all(np.isfinite(v).all() for v in kept):
        raise HookError(f"{flag}: got a non-finite number in rollout_data[{name!r}]")
    return kept
