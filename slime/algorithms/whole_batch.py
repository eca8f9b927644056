"""Whole-batch computations on the host: token weights of each optimizer step, advantages and returns.

Groups, denominators, whitening and recursions cannot depend on how the batch is split later: they are float64 values of
whole samples and of the whole batch, the same on every rank. Ranks divide the statistics of samples among themselves
(`Together`), and arrays [R] are computed when they are read, because a rank trains only some of the samples. The
formulas are in `advantages` and `aggregation`. This module adds what all of them share: the KL in the reward,
distillation, whitening, and users' functions (`--custom-advantage-function-path`, `--rollout-data-postprocess-path`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import Arrays, Computed, Estimate, RewardedBatch, Spread, where_trained
from slime.algorithms.advantages.grpo import hook_of_rewards
from slime.algorithms.advantages.returns import ALONE, Moments, Together, distilled, moments, whitened
from slime.algorithms.aggregation import Aggregation, Divided, divided, num_counted, tokens_per_execution
from slime.algorithms.kl import KLEstimator
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError, HookError
from slime.core.sample import NOT_SAMPLED
from slime.settings.args import for_hook
from slime.settings.conditions import computes_advantages, minimises_policy_loss
from slime.settings.hook_contracts import load_hook

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms import Algorithm
    from slime.settings import Args


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The batch as users' functions see it: a dict of lists with one entry per sample, with per-token CPU tensors.

    The functions set `advantages` in the dict and, with a critic, `returns`.
    """

    batch: TrainBatch
    masks: Arrays
    """[R] 1.0 where the token is trained."""
    log_probs: BatchLogProbs
    values: Arrays | None
    """[R] values of the critic; None without a critic."""
    kl: Arrays | None
    """[R] KL to the reference; None without --kl-coef."""
    scores: Callable[[], npt.NDArray[np.float64]]
    """Computes the rewards [S] as the estimator compares them."""

    def as_dict(self) -> dict[str, Any]:
        samples = self.batch.samples
        sampled = [s.rollout_log_probs for s in samples if s.rollout_log_probs is not None]
        return {
            "tokens": _tensors([s.tokens.astype(np.int64) for s in samples]),
            "total_lengths": [s.num_tokens for s in samples],
            "response_lengths": [s.response_length for s in samples],
            "rewards": self.scores().tolist(),
            "raw_reward": [s.reward for s in samples],
            "truncated": [int(s.truncated) for s in samples],
            "group_index": [s.group_index for s in samples],
            "index": [s.index for s in samples],
            "sample_indices": [s.index for s in samples],
            "rollout_ids": list(self.batch.executions),
            "rollout_log_probs": _tensors(sampled) if len(sampled) == len(samples) else None,
            "loss_masks": _tensors(self.masks),
            "log_probs": _tensors(self.log_probs.old),
            "ref_log_probs": _tensors(self.log_probs.ref),
            "teacher_log_probs": _tensors(self.log_probs.teacher),
            "token_rewards": _tensors(_all_token_rewards(samples)),
            "metadata": [copy.deepcopy(s.metadata) for s in samples],
            "values": _tensors(self.values),
            "kl": _tensors(self.kl),
        }

    def require_only_advantages(self, data: dict[str, Any], flag: str) -> None:
        """Raises `HookError` if the function changed what training does not read back from `data`."""
        own = self.as_dict()
        for name in ("tokens", "loss_masks", "log_probs", "ref_log_probs", "rollout_log_probs", "values"):
            if not _same(data.get(name), own[name]):
                raise HookError(
                    f"{flag} changed rollout_data[{name!r}], which training does not read back; change only advantages "
                    "and returns, and give tokens that must not be trained an advantage of 0 (docs/migration.md, row "
                    "--rollout-data-postprocess-path)"
                )

    def estimate_in(self, data: dict[str, Any], flag: str) -> Estimate:
        """Reads the advantages and, with a critic, the returns that the user function given by `flag` set in `data`."""
        advantages = _checked(data.get("advantages"), "advantages", self.masks, flag)
        return Estimate(
            advantages, None if self.values is None else _checked(data.get("returns"), "returns", self.masks, flag)
        )


def custom_advantages(args: Args, view: RolloutView) -> Estimate:
    assert args.custom_advantage_function_path is not None, "the caller checked it"
    data = view.as_dict()
    load_hook(args.custom_advantage_function_path, "advantage")(for_hook(args), data)
    view.require_only_advantages(data, "--custom-advantage-function-path")
    return view.estimate_in(data, "--custom-advantage-function-path")


def postprocessed(args: Args, view: RolloutView, made: Estimate) -> Estimate:
    assert args.rollout_data_postprocess_path is not None, "the caller checked it"
    data = view.as_dict() | {"advantages": _tensors(made.advantages), "returns": _tensors(made.returns)}
    load_hook(args.rollout_data_postprocess_path, "data_postprocess")(for_hook(args), view.batch.rollout_id, data)
    view.require_only_advantages(data, "--rollout-data-postprocess-path")
    return view.estimate_in(data, "--rollout-data-postprocess-path")


def _all_token_rewards(samples: Sequence[TrainSample]) -> list[npt.NDArray[np.float64]] | None:
    """Returns the token rewards [R] of each sample; None if no sample has any."""
    if all(s.token_rewards is None for s in samples):
        return None
    own = ((s.token_rewards, s.response_length) for s in samples)
    return [np.zeros(num) if rewards is None else np.asarray(rewards, np.float64) for rewards, num in own]


def _tensors(arrays: Sequence[Any] | None) -> list[Tensor] | None:
    """Copies each array into a CPU tensor."""
    import torch

    return None if arrays is None else [torch.from_numpy(np.array(x)) for x in arrays]


def _same(found: Any, own: list[Tensor] | None) -> bool:
    """Returns whether the tensors of each sample are equal; NaN equals NaN. What is missing changes nothing."""
    if found is None or own is None:
        return True
    if not isinstance(found, (list, tuple)) or len(found) != len(own):
        return False
    pairs = zip(found, own, strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)


def _checked(values: Any, name: str, masks: Arrays, flag: str) -> Arrays:
    left = f"a list of {len(values)}" if isinstance(values, (list, tuple)) else type(values).__name__
    if not isinstance(values, (list, tuple)) or [len(v) for v in values] != [len(m) for m in masks]:
        raise HookError(
            f"{flag} must set rollout_data[{name!r}] to one value per response token of each sample, got {left}"
        )
    kept = where_trained([np.asarray(v, np.float64) for v in values], masks)
    if not all(np.isfinite(v).all() for v in kept):
        raise HookError(f"{flag} set rollout_data[{name!r}] to values that are not finite; return finite numbers")
    return kept


@dataclass(frozen=True, slots=True)
class BatchLogProbs:
    """Log-probs before the update, [R] for each sample of the whole batch, on every rank; None if not needed."""

    old: Arrays | None = None
    """Log-probs of the policy, under the distribution from which tokens were sampled."""
    ref: Arrays | None = None
    """Log-probs of the reference, under the full distribution."""
    teacher: Arrays | None = None
    """Log-probs of the teacher (on-policy distillation), under the full distribution."""
    old_full: Arrays | None = None
    """`old` under the full distribution; None unless tokens were sampled from a top-p set."""

    @property
    def student(self) -> Arrays | None:
        """Old log-probs of the policy under the full distribution, comparable to those of reference and teacher."""
        return self.old if self.old_full is None else self.old_full


@dataclass(frozen=True, slots=True)
class AdvantagesAndReturns:
    """Float64 arrays [R] per sample, zero where masked. They may be computed when they are read."""

    advantages: Arrays
    returns: Arrays | None
    """The returns that the critic is trained to predict; None without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The loss weights of a sample's response tokens: mask / divisor. Only ranks that train the sample read them."""

    mask: npt.NDArray[Any]
    """[R]"""
    divisor: float
    """0: all weights are zero."""

    def array(self) -> npt.NDArray[np.float32]:
        """Returns the weights [R]."""
        return np.asarray(divided(self.mask, self.divisor), np.float32)


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The loss weights and denominators of one optimizer step."""

    weights: Mapping[int, TokenWeights]
    """Position of each scored sample -> loss weights of its response tokens."""
    token_share: float
    """1 / trained tokens of the step. Diagnostics are token means, whatever the aggregation."""
    unit: float
    """1 / executions of the step, or 1 / trained tokens, depending on the aggregation. Scales the sum of a user's
    reducer.
    """


def check_samples(samples: Sequence[TrainSample], args: Args, algorithm: Algorithm) -> None:
    """Raises `DataError` if a sample lacks log-probs or a finite reward that the policy loss needs."""
    if not minimises_policy_loss(args):
        return
    for s in samples:
        if math.isinf(s.reward):
            raise DataError(f"the reward of sample {s.index} in group {s.group_index} must be finite, got {s.reward}")
        if s.token_rewards is not None and not (
            len(s.token_rewards) == s.response_length and np.isfinite(s.token_rewards).all()
        ):
            raise DataError(
                f"the token_rewards of sample {s.index} in group {s.group_index} must be {s.response_length} finite "
                f"numbers, one per response token; got {len(s.token_rewards)}"
            )
    if not (args.use_rollout_logprobs or algorithm.needs_rollout_log_probs):
        return
    for s in samples:
        if s.rollout_log_probs is None:
            lacks = s.mask_totals.num_trained > 0
        elif args.use_rollout_logprobs and s.token_versions.min(initial=0) <= NOT_SAMPLED:
            lacks = bool(((s.loss_mask > 0) & (s.token_versions == NOT_SAMPLED)).any())
        else:  # corrections skip such tokens
            lacks = False
        if lacks:
            raise DataError(
                f"sample {s.index} has trained tokens without rollout log-probs, because no engine sampled them, but "
                "--use-rollout-logprobs and the off-policy corrections need them"
            )


def step_weights(
    batch: TrainBatch, positions: Sequence[int], aggregation: Aggregation, *, count_masked: bool
) -> StepWeights:
    """Computes the weights of a step with the samples at `positions`. `count_masked`: see `Aggregation.token_weights`.

    Unscored executions do not count. Without scored samples, there are no weights.
    """
    samples, numbers = batch.samples, batch.executions
    members = [p for p in positions if samples[p].is_scored]
    if not members:
        return StepWeights({}, token_share=0.0, unit=0.0)
    masks, executions = [samples[p].loss_mask for p in members], [numbers[p] for p in members]
    totals = [samples[p].mask_totals.total for p in members]
    if isinstance(aggregation, Divided) and type(aggregation).token_weights is Divided.token_weights:
        divisors = aggregation.divisors(totals, executions, count_masked=count_masked)
    else:
        masks = [np.asarray(w) for w in aggregation.token_weights(masks, executions, count_masked=count_masked)]
        divisors = [1.0] * len(masks)
    num_trained = sum(samples[p].mask_totals.num_trained for p in members)
    counted = num_trained
    if aggregation.counts_executions:
        counted = num_counted(tokens_per_execution(totals, executions), count_masked)
    return StepWeights(
        weights={p: TokenWeights(m, divisor) for p, m, divisor in zip(members, masks, divisors, strict=True)},
        token_share=float(np.float32(1.0 / num_trained)) if num_trained else 0.0,
        unit=1.0 / max(1, counted),
    )


def advantages_and_returns(
    batch: TrainBatch,
    args: Args,
    algorithm: Algorithm,
    log_probs: BatchLogProbs,
    values: Arrays | None,
    together: Together = ALONE,
) -> AdvantagesAndReturns:
    """Computes advantages and returns with the estimator or users' functions. `values` [R] are from the critic before
    its update. Collective over `together`.

    Raises `HookError` if a function violates its contract, `DataError` if a sample lacks the teacher's log-probs.
    """
    masks = tuple(s.loss_mask for s in batch.samples)
    nums = np.asarray([s.mask_totals.num_trained for s in batch.samples], np.int64)
    if not computes_advantages(args):
        zeros = Spread(np.zeros(len(masks)), masks)
        return AdvantagesAndReturns(zeros, zeros if values is not None else None)
    kl = _kl_to_reference(masks, args, algorithm.kl, log_probs) if args.kl_coef else None
    rewarded = _rewarded(batch, args, log_probs, values, kl)
    view = RolloutView(batch, masks, log_probs, values, kl, lambda: algorithm.estimator.scores(rewarded))
    if args.custom_advantage_function_path:
        made = custom_advantages(args, view)
    else:
        made = algorithm.estimator.estimate(rewarded)
    advantages = made.advantages
    if args.use_opd:
        teacher = _teacher(batch.samples, args, log_probs)
        assert log_probs.student is not None and teacher is not None, "distillation needs both log-probs"
        advantages = _distilled(advantages, log_probs.student, teacher, masks, args.opd_kl_coef)
    others = {"train/kl_in_reward": kl, "train/returns": made.returns}
    beside = {name: x for name, x in others.items() if x is not None}
    found, totals = moments(advantages, masks, nums, beside=list(beside.values()), together=together)
    if args.normalize_advantages:
        advantages, found = whitened(advantages, masks, found)
    if args.rollout_data_postprocess_path:
        made = postprocessed(args, view, Estimate(advantages, made.returns))
        advantages = made.advantages
        if made.returns is not None:
            beside["train/returns"] = made.returns
        found, totals = moments(advantages, masks, nums, beside=list(beside.values()))
    means = [math.fsum(row.tolist()) / max(1, found.num_tokens) for row in totals]
    metrics = dict(zip(beside, means, strict=True))
    return AdvantagesAndReturns(advantages, made.returns, metrics | _of_advantages(found))


def _masks_from_cache(samples: Sequence[TrainSample]) -> Arrays:
    """Returns the masks. Those of only ones are views of one array, so each sample's is not read from memory again."""
    whole = [s.mask_totals.is_binary and s.mask_totals.num_trained == s.response_length for s in samples]
    ones = np.ones(max((s.response_length for s in samples), default=0), np.float32)
    return tuple(ones[: s.response_length] if w else s.loss_mask for s, w in zip(samples, whole, strict=True))


def _distilled(advantages: Arrays, student: Arrays, teacher: Arrays, masks: Arrays, coef: float) -> Computed:
    return Computed(len(masks), lambda p: distilled(advantages[p], student[p], teacher[p], masks[p], coef))


def _rewarded(
    batch: TrainBatch, args: Args, log_probs: BatchLogProbs, values: Arrays | None, kl: Arrays | None
) -> RewardedBatch:
    own = tuple(s.token_rewards for s in batch.samples)
    return RewardedBatch(
        rewards=np.asarray([s.reward for s in batch.samples], np.float64),
        groups=np.asarray([s.group_index for s in batch.samples], np.int64),
        executions=np.asarray(batch.executions, np.int64),
        masks=_masks_from_cache(batch.samples),
        log_probs=log_probs.student,
        ref_log_probs=log_probs.ref,
        kl=kl,
        kl_coef=float(args.kl_coef),
        token_rewards=own if any(rewards is not None for rewards in own) else None,
        token_versions=tuple(s.token_versions for s in batch.samples),
        rewards_are_final=hook_of_rewards(args) is not None,
        values=values,
    )


def _of_advantages(found: Moments) -> dict[str, float]:
    """Returns the metrics of the trained tokens' advantages; without trained tokens, only the mean."""
    mean = {"train/advantages": found.mean}
    if not found.num_tokens:
        return mean
    return mean | {
        "train/advantages_std": math.sqrt(found.variation / found.num_tokens),
        "train/advantages_min": float(found.least.min()),
        "train/advantages_max": float(found.largest.max()),
    }


def _kl_to_reference(masks: Arrays, args: Args, estimator: KLEstimator, log_probs: BatchLogProbs) -> Arrays:
    import torch

    assert log_probs.student is not None and log_probs.ref is not None, "a KL in the reward needs both log-probs"
    out = []
    for old, ref, mask in zip(log_probs.student, log_probs.ref, masks, strict=True):
        policy, reference, keep = (torch.from_numpy(np.asarray(x, np.float64)) for x in (old, ref, mask))
        kl = estimator.estimate(policy, reference, keep, log_ratio_limit=float(args.log_ratio_limit))
        out.append(kl.numpy())
    return tuple(out)


def _teacher(samples: Sequence[TrainSample], args: Args, log_probs: BatchLogProbs) -> Arrays | None:
    match args.opd_type:
        case "megatron":
            return log_probs.teacher
        case "sglang":
            return _teacher_of_samples(samples)
        case None:
            raise AssertionError("--use-opd requires --opd-type")
        case _ as never:
            assert_never(never)


def _teacher_of_samples(samples: Sequence[TrainSample]) -> Arrays:
    out = []
    for s in samples:
        if s.teacher_log_probs is None:
            raise DataError(
                f"sample {s.index} in group {s.group_index} has no teacher_log_probs, but --opd-type sglang needs one "
                "per response token; set them in the generate function or the reward hook"
            )
        out.append(s.teacher_log_probs)
    return tuple(out)
