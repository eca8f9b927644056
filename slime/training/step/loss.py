"""Training objectives, one per kind of loss: what to compute for a micro-batch, and what to minimize.

Losses and metrics are sums of weight * value over tokens. The weights already include the denominators of the whole
step, so a step's loss and metrics are plain sums over micro-batches and ranks. `slime.algorithms` has the per-token
formulas; this module combines them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from slime.algorithms import Algorithm, samples_top_p_set
from slime.algorithms.advantages import CriticEstimator
from slime.algorithms.off_policy import OffPolicyTokens
from slime.algorithms.policy_loss import PolicyTokens, TokenLosses
from slime.algorithms.token_losses import negative_log_likelihood, unmasked
from slime.core.errors import HookError
from slime.settings import Args, for_hook
from slime.settings.conditions import fine_tunes
from slime.settings.hook_contracts import load_hook
from slime.training.model.log_probs import RowLogits, TokenScores
from slime.training.step.micro_batch import MicroBatch

Sums = dict[str, Tensor]
"""Metric name -> a micro-batch's contribution, a float64 scalar on the device."""


@dataclass(frozen=True, slots=True)
class LossParts:
    loss: Tensor
    """Scalar. Its sum over micro-batches and ranks is the loss of the step."""
    token_loss: Tensor
    """[R] detached, before weighting."""
    sums: Sums


class Evaluation(Protocol):
    """How to evaluate a model on the tokens of a micro-batch."""

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        """Returns the output of one model chunk. `trains` is True if a loss will be computed from it."""

    def results(self, output: Any) -> tuple[Tensor, ...]:
        """Returns the last chunk's results, each [R] float32. Any result comparable to the engines' comes last."""

    @property
    def num_results(self) -> int: ...


class Objective(Evaluation, Protocol):
    """What to compute for a model in a training step, and what to minimize."""

    @property
    def compares_with_engines(self) -> bool:
        """Whether the results are comparable with the engines' log-probs."""

    def loss(self, batch: MicroBatch, output: Any) -> LossParts:
        """Returns the loss for the last chunk's output. Raises `HookError` if a user's function breaks its contract."""


def nothing_of(objective: Objective, output: Any) -> Tensor:
    """Returns a zero loss whose backward pass covers all results of the model."""
    answers = [*objective.results(output), *(getattr(output, name, None) for name in ("draft_log_probs", "logits"))]
    return torch.stack([answer.sum() for answer in answers if answer is not None]).sum() * 0.0


def objective_of(args: Args, algorithm: Algorithm) -> Objective:
    match args.loss_type:
        case "policy_loss":
            return PolicyObjective(args, algorithm=algorithm)
        case "custom_loss":
            return CustomObjective(args)
        case "sft_loss":
            return SupervisedObjective(args)
        case _ as never:
            assert_never(never)


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs under the sampling distribution, plus entropy if a loss needs it.

    The sampling distribution includes temperature, top-k and top-p, except in fine-tuning. Engines report log-probs
    with temperature but without top-k and top-p. If tokens were sampled with top-k or top-p, a second result therefore
    leaves them out.
    """

    args: Args
    whole: bool = False
    """Whether to ignore top-k and top-p, as for a reference or teacher."""

    @property
    def with_entropy(self) -> bool:
        """Whether the loss reports or uses the entropy."""
        return False

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        args, samples = self.args, not fine_tunes(self.args)
        with_entropy = trains and self.with_entropy
        return chunk(
            batch.tokens,
            batch.position_ids,
            batch.packed,
            batch.asked_positions,
            batch.asked_tokens,
            batch.answers,
            draft=trains and args.enable_mtp_training,
            temperature=float(args.rollout_temperature) if samples else 1.0,
            with_entropy=with_entropy,
            entropy_grad=with_entropy and bool(args.entropy_coef),
            chunk_tokens=int(args.log_probs_chunk_size),
            top_p=float(args.rollout_top_p) if samples and not self.whole else 1.0,
            top_k=int(args.rollout_top_k) if samples and not self.whole else -1,
        )

    @property
    def num_results(self) -> int:
        return 2 if samples_top_p_set(self.args) and not self.whole else 1

    def results(self, output: Any) -> tuple[Tensor, ...]:
        return (output.log_probs, output.full_log_probs)[: self.num_results]


class SupervisedObjective(LogProbs):
    """Fine-tuning: the negative log-prob of each trained token."""

    compares_with_engines = False

    def loss(self, batch: MicroBatch, output: TokenScores) -> LossParts:
        token_loss = negative_log_likelihood(output.log_probs, batch.mask)
        return LossParts(weighted(token_loss, batch), token_loss.detach(), {"loss": weighted_sum(token_loss, batch)})


class CustomObjective(LogProbs):
    """The loss of `--custom-loss-function-path`.

    The function receives the batch as a dict, the log-probs (or logits, with `--custom-loss-logits`), and a reducer.
    """

    compares_with_engines = False

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        args = self.args
        if not args.custom_loss_logits:
            return super().evaluate(chunk, batch, trains=trains)
        asked = (batch.asked_positions, batch.asked_tokens, batch.answers)
        row = (batch.tokens, batch.position_ids, batch.packed)
        return chunk(*row, *asked, with_logits=True, chunk_tokens=int(args.log_probs_chunk_size))

    def results(self, output: Any) -> tuple[Tensor, ...]:
        return (output.log_probs,)

    @property
    def num_results(self) -> int:
        return 1

    def loss(self, batch: MicroBatch, output: TokenScores | RowLogits) -> LossParts:
        args, log_probs, flag = self.args, output.log_probs, "--custom-loss-function-path"
        assert args.custom_loss_function_path is not None, "--loss-type custom_loss requires a function"
        if isinstance(output, RowLogits) and not batch.positions:
            nothing = output.logits.sum() * 0.0  # even a row without samples needs a backward pass
            return LossParts(nothing, log_probs, {})
        data = {f.name: getattr(batch, f.name) for f in fields(batch)}
        data.update(loss_masks=list(batch.mask.split(batch.lengths)), response_lengths=list(batch.lengths))
        answer, source = log_probs, log_probs
        if isinstance(output, RowLogits):
            answer, source = output.logits.unsqueeze(0), output.logits
            whole = batch.tokens[: sum(batch.total_lengths)]
            data.update(total_lengths=list(batch.total_lengths), unconcat_tokens=list(whole.split(batch.total_lengths)))
            data.update(_by_sample(batch))

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            return weighted(unmasked(values, batch.mask), batch)

        loss, metrics = load_hook(args.custom_loss_function_path, "loss")(
            for_hook(args), data, answer, sum_of_sample_mean
        )
        loss = _scalar(loss, batch, source, flag)
        if not isinstance(metrics, dict) or not all(isinstance(v, Tensor) and v.numel() == 1 for v in metrics.values()):
            raise HookError(f"{flag}: the metrics must be a dict of scalar tensors, got {metrics!r:.200}")
        device = log_probs.device
        sums = {name: value.detach().to(device, torch.float64).reshape(()) for name, value in metrics.items()}
        sums["loss"] = loss.detach().double()
        # If the user's loss is not finite, it cannot be attributed to a token, so every token gets the loss.
        return LossParts(loss, loss.detach().expand_as(log_probs), sums)


def _by_sample(batch: MicroBatch) -> dict[str, list[Tensor] | None]:
    """Returns the fields [R] that a loss over logits reads, as lists with one tensor per sample, in the names of
    public losses too. None if they are not computed.
    """
    found = {
        "advantages": batch.advantages,
        "returns": batch.returns,
        "rollout_log_probs": batch.rollout_log_probs,
        "log_probs": batch.old_log_probs,
        "old_log_probs": batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "values": batch.old_values,
        "old_values": batch.old_values,
    }
    return {name: None if x is None else list(x.split(batch.lengths)) for name, x in found.items()}


@dataclass(frozen=True, slots=True)
class PolicyObjective(LogProbs):
    """The policy loss after corrections, plus entropy and KL to the reference."""

    algorithm: Algorithm = field(kw_only=True)

    compares_with_engines = True

    @property
    def with_entropy(self) -> bool:
        return True

    def loss(self, batch: MicroBatch, output: TokenScores) -> LossParts:
        args, algorithm, log_probs = self.args, self.algorithm, output.log_probs
        recomputed = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        old = batch.rollout_log_probs if args.use_rollout_logprobs else recomputed
        made = policy_losses(args, algorithm, batch, log_probs, old)
        # Engines report log-probs without top-k and top-p, so compare them with log-probs of the same kind.
        whole = recomputed
        if samples_top_p_set(args):
            whole = output.full_log_probs if batch.old_full_log_probs is None else batch.old_full_log_probs
        policy_loss, sums = _corrected(args, algorithm, batch, made.loss, log_probs.detach(), old, whole)
        sums |= _diagnostics(batch, made, log_probs)
        if samples_top_p_set(args):
            sums["top_p_outside"] = token_mean(output.outside.to(log_probs.dtype), batch)
        sums["pg_loss"] = weighted_sum(policy_loss, batch)
        extra = torch.zeros_like(policy_loss)
        if output.entropy is not None:
            sums["entropy_loss"] = token_mean(output.entropy, batch)
            if args.entropy_coef:
                extra = extra - args.entropy_coef * unmasked(output.entropy, batch.mask)
        if args.use_kl_loss:
            assert batch.ref_log_probs is not None, "the KL loss requires reference log-probs"
            kl = algorithm.kl.estimate(
                log_probs,
                batch.ref_log_probs,
                batch.mask,
                old_log_probs=old if args.use_unbiased_kl else None,
                log_ratio_limit=float(args.log_ratio_limit),
            )
            extra = extra + args.kl_loss_coef * kl
            sums["ref_log_probs"] = token_mean(batch.ref_log_probs, batch)
            sums["kl_loss"] = weighted_sum(kl, batch)
        token_loss = policy_loss + extra
        sums["loss"] = weighted_sum(token_loss, batch)
        if not args.custom_pg_loss_reducer_function_path:
            return LossParts(weighted(token_loss, batch), token_loss.detach(), sums)
        reduced = _reduced(args, algorithm, batch, policy_loss)
        loss = reduced + weighted(extra, batch)
        sums.update(loss=loss.detach().double(), pg_loss=reduced.detach().double())
        return LossParts(loss, token_loss.detach(), sums)


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's objective: predicts the expected return before each response token."""

    estimator: CriticEstimator
    compares_with_engines = False
    num_results = 1

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        return chunk(batch.tokens, batch.position_ids, batch.packed, batch.asked_positions, batch.answers)

    def results(self, output: Any) -> tuple[Tensor, ...]:
        return (output,)

    def loss(self, batch: MicroBatch, output: Tensor) -> LossParts:
        """Returns the value loss of the values `output` [R]."""
        assert batch.old_values is not None and batch.returns is not None, "the critic requires old values and returns"
        loss, clipped = self.estimator.value_loss(output, batch.old_values, batch.returns, batch.mask)
        sums = {
            "critic-value_loss": weighted_sum(loss, batch),
            "critic-value_clipfrac": token_mean(clipped, batch),
            "critic-values": token_mean(output, batch),
        }
        return LossParts(weighted(loss, batch), loss.detach(), sums)


def policy_losses(args: Args, algorithm: Algorithm, batch: MicroBatch, log_probs: Tensor, old: Tensor) -> TokenLosses:
    return algorithm.policy_loss.token_losses(
        PolicyTokens(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=batch.advantages,
            mask=batch.mask,
            sequences=batch.sequences,
            log_ratio_limit=float(args.log_ratio_limit),
        )
    )


def _corrected(
    args: Args,
    algorithm: Algorithm,
    batch: MicroBatch,
    policy_loss: Tensor,
    log_probs: Tensor,
    old: Tensor,
    whole: Tensor,
) -> tuple[Tensor, Sums]:
    """Returns the policy loss [R] after all corrections, and metrics. Tokens that no engine sampled have weight 1.

    log_probs [R]: current, detached. old [R]: from the old policy. whole [R]: from the trainer before the update,
    without top-k and top-p, like those from engines.
    """
    tokens = OffPolicyTokens(
        log_probs=log_probs,
        old_log_probs=old,
        trainer_log_probs=whole,
        rollout_log_probs=batch.rollout_log_probs,
        sampled=batch.sampled,
        mask=batch.mask,
        advantages=batch.advantages,
        sequences=batch.sequences,
        lengths=batch.lengths,
        total_lengths=batch.total_lengths,
        log_ratio_limit=float(args.log_ratio_limit),
        args=args,
    )
    sums: Sums = {}
    for correction in algorithm.corrections:
        policy_loss, metrics = correction.apply(policy_loss, tokens)
        for name, value in metrics.items():
            sums[name] = value.double().sum() if name.endswith("_clamped") else token_mean(value, batch)
    return policy_loss, sums


def _diagnostics(batch: MicroBatch, made: TokenLosses, log_probs: Tensor) -> Sums:
    return {
        "log_ratio_clamped": made.ratio_limited.double().sum(),
        "pg_clipfrac": token_mean(made.clipped, batch),
        "ppo_kl": token_mean(made.old_minus_new, batch),
        "ois": token_mean((-made.old_minus_new).exp(), batch),
        "log_probs": token_mean(log_probs, batch),
        "rollout_log_probs": token_mean(batch.rollout_log_probs * batch.sampled, batch),
    }


def _reduced(args: Args, algorithm: Algorithm, batch: MicroBatch, policy_loss: Tensor) -> Tensor:
    """Reduces the policy loss with `--custom-pg-loss-reducer-function-path`, scaled by the number of executions."""
    flag, masks = "--custom-pg-loss-reducer-function-path", list(batch.mask.split(batch.lengths))
    assert args.custom_pg_loss_reducer_function_path is not None, "the caller checks this"
    build = load_hook(args.custom_pg_loss_reducer_function_path, "pg_loss_reducer")
    counts_tokens = not algorithm.aggregation.counts_executions
    reduce = build(list(batch.total_lengths), list(batch.lengths), masks, counts_tokens)
    return _scalar(reduce(policy_loss), batch, policy_loss, flag) * batch.unit


def _scalar(value: Any, batch: MicroBatch, source: Tensor, flag: str) -> Tensor:
    """Checks a user's loss. Even a dummy micro-batch needs a backward pass, because other ranks wait in collectives."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise HookError(f"{flag}: the loss must be a tensor with one element, got {type(value).__name__}")
    if source.requires_grad and not value.requires_grad and bool((batch.mask > 0).any()):
        raise HookError(
            f"{flag}: the loss has no gradient for trained tokens; compute the loss from the function's arguments"
        )
    value = value.to(source.device).reshape(())
    return value if value.requires_grad else value + source.sum() * 0.0


def weighted(values: Tensor, batch: MicroBatch) -> Tensor:
    """Returns the differentiable weighted sum over tokens. Masked values must already be 0, because 0 * NaN is NaN."""
    return (values * batch.weights).sum()


def weighted_sum(values: Tensor, batch: MicroBatch) -> Tensor:
    """Returns the weighted sum over tokens as a detached float64 metric. Masked positions are ignored."""
    return (unmasked(values.detach(), batch.mask).double() * batch.weights).sum()


def token_mean(values: Tensor, batch: MicroBatch) -> Tensor:
    """Returns a micro-batch's contribution to the mean over the step's trained tokens, as a detached float64 metric."""
    return (unmasked(values.detach(), batch.mask).double() * batch.token_share).sum()


def trained_objective(args: Args, algorithm: Algorithm) -> Objective:
    """Returns the policy's objective, including multi-token prediction if it is trained."""
    policy = objective_of(args, algorithm)
    if not args.enable_mtp_training:
        return policy
    return WithDraft(policy, float(args.megatron["mtp_loss_scaling_factor"]))


@dataclass(frozen=True, slots=True)
class WithDraft:
    """A policy objective that also trains multi-token prediction.

    A trained token at index t of its sample is predicted a second time, from the hidden state at t - 2 and the token at
    t - 1. Its negative log-prob, at temperature 1, is averaged over the step's trained tokens and scaled by
    `--mtp-loss-scaling-factor`. The policy loss's mask applies. A token at index 1 cannot be predicted this way
    and does not count.
    """

    policy: Objective
    """The policy's objective, whose `evaluate` requests `draft_log_probs`."""
    scaling_factor: float

    @property
    def compares_with_engines(self) -> bool:
        return self.policy.compares_with_engines

    @property
    def num_results(self) -> int:
        return self.policy.num_results

    def evaluate(self, chunk: Any, batch: MicroBatch, *, trains: bool) -> Any:
        return self.policy.evaluate(chunk, batch, trains=trains)

    def results(self, output: Any) -> tuple[Tensor, ...]:
        return self.policy.results(output)

    def loss(self, batch: MicroBatch, output: TokenScores) -> LossParts:
        """Adds the scaled loss of multi-token prediction. The metric `loss` covers only the policy's loss."""
        parts = self.policy.loss(batch, output)
        assert output.draft_log_probs is not None, "the model did not run multi-token prediction"
        foreseen = batch.mask * (batch.position_ids.index_select(0, batch.predicting) > 0)
        token_loss = unmasked(-output.draft_log_probs, foreseen)
        loss = parts.loss + self.scaling_factor * batch.token_share * token_loss.sum()
        sums = {**parts.sums, "mtp_loss": token_loss.detach().double().sum() * batch.token_share}
        return LossParts(loss, parts.token_loss + token_loss.detach(), sums)
