"""The learning algorithm: rewards, advantages, the policy loss, KL, entropy, aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.core.registry import load_object
from slime.settings.conditions import (
    ADVANTAGES,
    ESTIMATORS,
    KL,
    KL_LOSS,
    POLICY_LOSS,
    POLICY_TERM,
    SAMPLED_LOSS,
    computes_advantages,
    estimator_of,
    fine_tunes,
    has_reference,
    minimises_policy_loss,
)
from slime.settings.fields import Need, derived, is_not_zero, opt
from slime.settings.ranges import COEFFICIENT

AGGREGATIONS = "slime.algorithms.aggregation:AGGREGATIONS"
"""The registry of loss aggregations, which stands above the settings."""

_COUNTS_EXECUTIONS = Need(
    lambda s: load_object(AGGREGATIONS).get(s.loss_aggregation).counts_executions,
    "a loss_aggregation that counts executions, which token_mean does not",
)
_RATIOS = Need(
    lambda s: minimises_policy_loss(s) or (computes_advantages(s) and bool(s.kl_coef)),
    "loss_type policy_loss, or --kl-coef with custom_loss",
)


def _reference(s: Any) -> str | None:
    return s.initial_weights if s.use_kl_loss or s.kl_coef else None


_READS_IT = Need(
    lambda s: has_reference(s) or s.initial_weights == s.given("ref_load"),
    "--use-kl-loss or --kl-coef beside a --load in Hugging Face format, from which the trainer starts",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """From rewards to the gradient; docs/algorithms.md has the formulas."""

    advantage_estimator: str = opt("grpo", chosen_from=ESTIMATORS, needs=ADVANTAGES)
    """How rewards become advantages; groups are the samples of one prompt id, never a position. gspo, cispo and
    sapo are grpo with the policy loss of that name; ppo trains a critic. Or the import path of one of your own."""
    policy_loss: str = derived(
        lambda s: estimator_of(s).default_policy_loss,
        lambda s: f"advantage_estimator {s.advantage_estimator}",
        chosen_from="slime.algorithms.policy:POLICY_LOSSES",
        needs=POLICY_TERM,
    )
    """What bounds the update: the clipped ratio of tokens, of sequences (arXiv:2507.18071), a clipped weight
    (arXiv:2506.13585), or a soft gate (arXiv:2511.20347). Default: that of the estimator."""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """What is minimised; custom_loss is that of --custom-loss-function-path."""
    loss_aggregation: str = derived(
        lambda s: "token_mean" if s.calculate_per_token_loss else "sequence_mean",
        lambda s: "--calculate-per-token-loss" if s.calculate_per_token_loss else "mean over executions",
        chosen_from=AGGREGATIONS,
    )
    """From token losses to one number; denominators are those of the whole optimizer step. Default: sequence_mean, the
    mean over executions of their token means, or token_mean with --calculate-per-token-loss."""
    calculate_per_token_loss: bool = False
    """The public name of --loss-aggregation token_mean (DAPO, arXiv:2503.14476)."""
    drop_masked_executions: bool = opt(False, needs=_COUNTS_EXECUTIONS)
    """Executions without a trained token leave the denominator. Default: they stay, with a loss of zero."""
    log_ratio_limit: float = opt(20.0, needs=_RATIOS, ge=0, le=88)
    """Log-ratios are clamped to +- this, and the clamped ones counted; 0 switches it off."""
    use_kl_loss: bool = opt(False, needs=SAMPLED_LOSS)
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: float = opt(0.0, needs=(POLICY_LOSS, KL_LOSS), asks=is_not_zero, within=COEFFICIENT)
    """Weight of the KL loss."""
    kl_loss_type: str = opt("low_var_kl", chosen_from="slime.algorithms.kl:KL_ESTIMATORS", needs=KL)
    """KL estimator (http://joschu.net/blog/kl-approx.html), of the loss and of --kl-coef; low_var_kl is k3 clamped. As
    a loss, k1 needs --use-unbiased-kl: without it its expected gradient is zero."""
    use_unbiased_kl: bool = opt(False, needs=(POLICY_LOSS, KL_LOSS))
    """Multiply the KL loss by the ratio to the sampling policy, so that its gradient is that of the KL."""
    kl_coef: float = opt(0.0, needs=ADVANTAGES, asks=is_not_zero, within=COEFFICIENT)
    """Weight of the KL to the reference in the reward; every estimator applies it."""
    entropy_coef: float = opt(0.0, needs=POLICY_LOSS, asks=is_not_zero, within=COEFFICIENT)
    """Weight of the entropy bonus."""
    compute_advantages_and_returns: bool = derived(
        lambda s: False if fine_tunes(s) else None,
        "--loss-type sft_loss learns from the data, not from rewards",
        default=True,
        off_names=("--disable-compute-advantages-and-returns",),
        needs=SAMPLED_LOSS,
    )
    """Off for supervised fine-tuning."""
    normalize_advantages: bool = derived(
        lambda s: estimator_of(s).whitens,
        lambda s: f"advantage_estimator {s.advantage_estimator}",
        needs=ADVANTAGES,
    )
    """Whiten advantages over all trained tokens of the rollout. Default: on for the two reinforce_plus_plus."""
    ref_load: str | None = derived(_reference, "a KL needs a reference: the initial weights", needs=_READS_IT)
    """Hugging Face folder of the reference model, from which the trainer starts, too, unless --load says something
    else. Default with a KL: the initial weights."""
