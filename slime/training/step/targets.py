"""Advantages and returns of the whole batch, from rewards and from what forward passes said about its tokens.

Host arithmetic in float64 on all samples, the same on every rank: groups, whitening and recursions cannot depend on
how the batch is cut. The formulas live in `algorithms.advantages`; here they are chosen and put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slime.algorithms.advantages.distillation import distilled
from slime.algorithms.advantages.gae import generalized_advantages
from slime.algorithms.advantages.groups import group_advantages, leave_one_out
from slime.algorithms.advantages.returns import discounted_returns, spread_advantage, token_rewards
from slime.algorithms.advantages.whitening import whiten
from slime.algorithms.kl import kl_estimate
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError, HookError
from slime.settings.hooks import load_hook

Arrays = tuple[npt.NDArray[Any], ...]
"""One array [R] per sample of the batch."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Per-token results of forward passes before the update, whole on every rank; None where not needed."""

    old: Arrays | None = None
    """Log-probs under the policy before the update."""
    ref: Arrays | None = None
    """Log-probs under the reference, of the whole distribution."""
    teacher: Arrays | None = None
    """Log-probs under the teacher of on-policy distillation, of the whole distribution."""
    values: Arrays | None = None
    """The critic's values before its update."""
    old_full: Arrays | None = None
    """As `old`, of the whole distribution, where sampling was cut by top-k or top-p."""

    @property
    def student(self) -> Arrays | None:
        """What reference and teacher are compared with: old log-probs of the whole distribution."""
        return self.old if self.old_full is None else self.old_full


@dataclass(frozen=True, slots=True)
class Targets:
    """What the update aims at, per sample [R]; zero where masked."""

    advantages: Arrays
    returns: Arrays | None
    """The critic's targets; None without a critic."""
    metrics: dict[str, float]


def compute_targets(batch: TrainBatch, masks: Arrays, args: Any, signals: Signals) -> Targets:
    """Advantages of `--advantage-estimator`, or of the user's functions. `masks`: trained tokens of each sample [R].

    Raises `HookError` if a function breaks its contract, `DataError` if a needed teacher is missing.
    """
    zeros = tuple(np.zeros(len(m), np.float64) for m in masks)
    if args.loss_type == "sft_loss" or not args.compute_advantages_and_returns:
        return Targets(zeros, zeros if signals.values is not None else None, {})
    kl = _kl_to_reference(masks, args, signals) if args.kl_coef else None
    if args.custom_advantage_function_path:
        advantages, returns = _of_hook(batch, masks, args, signals, kl)
    else:
        advantages, returns = _of_estimator(batch.samples, masks, args, signals, kl)
    if args.use_opd:
        teacher = signals.teacher if args.opd_type == "megatron" else _teacher_of_samples(batch.samples)
        assert signals.student is not None and teacher is not None, "distillation needs both log-probs"
        parts = zip(advantages, signals.student, teacher, masks, strict=True)
        advantages = tuple(distilled(a, old, t, m, args.opd_kl_coef) for a, old, t, m in parts)
    if args.normalize_advantages:
        advantages = tuple(whiten(list(advantages), list(masks)))
    if args.rollout_data_postprocess_path:
        data = _rollout_data(batch, masks, signals, kl)
        data |= {"advantages": _tensors(advantages), "returns": _tensors(returns)}
        load_hook(args.rollout_data_postprocess_path, "data_postprocess")(args, batch.rollout_id, data)
        advantages, returns = _of_data(data, masks, signals, "--rollout-data-postprocess-path")
    named = {"train/kl_in_reward": kl, "train/advantages": advantages, "train/returns": returns}
    return Targets(advantages, returns, {name: _mean(x, masks) for name, x in named.items() if x is not None})


def _mean(values: Arrays, masks: Arrays) -> float:
    """Over all trained tokens; values are zero elsewhere."""
    return float(sum(v.sum() for v in values)) / max(1.0, float(sum((m > 0).sum() for m in masks)))


def _of_estimator(
    samples: Sequence[TrainSample], masks: Arrays, args: Any, signals: Signals, kl: Arrays | None
) -> tuple[Arrays, Arrays | None]:
    estimator = args.advantage_estimator
    coef = float(args.kl_coef)
    penalties = kl if kl is not None else (None,) * len(samples)
    if estimator in ("ppo", "reinforce_plus_plus"):
        rewards = [
            token_rewards(0.0 if np.isnan(s.reward) else s.reward, m, k, coef)
            for s, m, k in zip(samples, masks, penalties, strict=True)
        ]
        if estimator == "reinforce_plus_plus":
            returns = [
                discounted_returns(r, m, args.gamma, args.observation_returns)
                for r, m in zip(rewards, masks, strict=True)
            ]
            return _masked(returns, masks), None
        assert signals.values is not None, "ppo needs the critic's values"
        pairs = [
            generalized_advantages(r, v, m, args.gamma, args.lambd, args.observation_returns)
            for r, v, m in zip(rewards, signals.values, masks, strict=True)
        ]
        return _masked([a for a, _ in pairs], masks), _masked([r for _, r in pairs], masks)
    parts = zip(_scores(samples, args), masks, penalties, strict=True)
    return tuple(spread_advantage(score, mask, penalty, coef) for score, mask, penalty in parts), None


def _masked(values: Sequence[npt.NDArray[Any]], masks: Arrays) -> Arrays:
    """Zero at masked positions, where a return that counts observations is a number, too."""
    return tuple(np.where(m > 0, v, 0.0) for v, m in zip(values, masks, strict=True))


def _scores(samples: Sequence[TrainSample], args: Any) -> npt.NDArray[np.float64]:
    """One advantage per sample [S], before KL and teacher."""
    rewards, groups = [s.reward for s in samples], [s.group_index for s in samples]
    executions = [s.index for s in samples]
    if not args.rewards_normalization:
        return np.nan_to_num(np.asarray(rewards, np.float64), nan=0.0)
    if args.advantage_estimator == "rloo":
        return leave_one_out(rewards, groups, executions)
    scale = "none" if args.advantage_estimator == "reinforce_plus_plus_baseline" else args.advantage_scale
    return group_advantages(rewards, groups, executions, scale=scale, epsilon=args.advantage_epsilon)


def _kl_to_reference(masks: Arrays, args: Any, signals: Signals) -> Arrays:
    assert signals.student is not None and signals.ref is not None, "a KL in the reward needs both log-probs"
    out = []
    for old, ref, mask in zip(signals.student, signals.ref, masks, strict=True):
        policy, reference, keep = (torch.from_numpy(np.asarray(x, np.float64)) for x in (old, ref, mask))
        out.append(
            kl_estimate(policy, reference, keep, args.kl_loss_type, log_ratio_limit=float(args.log_ratio_limit)).numpy()
        )
    return tuple(out)


def _teacher_of_samples(samples: Sequence[TrainSample]) -> Arrays:
    out = []
    for s in samples:
        if s.teacher_log_probs is None:
            raise DataError(
                f"sample {s.index} of group {s.group_index}: got no teacher_log_probs, because neither generate "
                "function nor reward hook wrote them; --opd-type sglang needs one per response token"
            )
        out.append(s.teacher_log_probs)
    return tuple(out)


def _of_hook(
    batch: TrainBatch, masks: Arrays, args: Any, signals: Signals, kl: Arrays | None
) -> tuple[Arrays, Arrays | None]:
    """Calls `--custom-advantage-function-path`."""
    data = _rollout_data(batch, masks, signals, kl)
    load_hook(args.custom_advantage_function_path, "advantage")(args, data)
    return _of_data(data, masks, signals, "--custom-advantage-function-path")


def _tensors(arrays: Sequence[Any] | None) -> list[torch.Tensor] | None:
    """Copies, one CPU tensor per sample."""
    return None if arrays is None else [torch.from_numpy(np.array(x)) for x in arrays]


def _rollout_data(batch: TrainBatch, masks: Arrays, signals: Signals, kl: Arrays | None) -> dict[str, Any]:
    """What hooks see of the batch: a list with one entry per sample under each name."""
    samples = batch.samples
    return {
        "tokens": _tensors([s.tokens for s in samples]),
        "total_lengths": [s.num_tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
        "group_index": [s.group_index for s in samples],
        "index": [s.index for s in samples],
        "loss_masks": _tensors(masks),
        "log_probs": _tensors(signals.old),
        "ref_log_probs": _tensors(signals.ref),
        "teacher_log_probs": _tensors(signals.teacher),
        "values": _tensors(signals.values),
        "kl": _tensors(kl),
    }


def _of_data(data: dict[str, Any], masks: Arrays, signals: Signals, flag: str) -> tuple[Arrays, Arrays | None]:
    """Advantages and, with a critic, returns that the hook of `flag` left in `data`."""
    advantages = _checked(data.get("advantages"), "advantages", masks, flag)
    return advantages, None if signals.values is None else _checked(data.get("returns"), "returns", masks, flag)


def _checked(values: Any, name: str, masks: Arrays, flag: str) -> Arrays:
    got = f"a list of {len(values)}" if isinstance(values, (list, tuple)) else type(values).__name__
    if not isinstance(values, (list, tuple)) or [len(v) for v in values] != [len(m) for m in masks]:
        raise HookError(
            f"{flag}: got {got} in rollout_data[{name!r}]; it sets one value per response token of each sample"
        )
    kept = _masked([np.asarray(v, np.float64) for v in values], masks)
    if not all(np.isfinite(v).all() for v in kept):
        raise HookError(f"{flag}: got a non-finite number in rollout_data[{name!r}]")
    return kept
