"""The learning algorithm: rewards, advantages, the policy loss, KL, entropy, aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.settings.conditions import (
    ADVANTAGES,
    GROUP_REWARDS,
    KL,
    KL_LOSS,
    OWN_ADVANTAGES,
    POLICY_LOSS,
    POLICY_TERM,
    PPO,
    REFERENCE,
    SAMPLED_LOSS,
    SCALED,
    SCALED_BY_GROUP,
    TOKEN_REWARDS,
    computes_advantages,
)
from slime.settings.fields import Need, always, derived, is_not_zero, opt

Estimator = Literal[
    "grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]


def reads_eps_clip(s: Any) -> bool:
    """Whether the policy loss has a bound that is made from eps_clip."""
    low, high = (s.was_given(name) for name in ("cispo_clip_low", "cispo_clip_high"))
    from_eps_clip = not low or (not high and not s.was_given("eps_clip_high"))
    return s.policy_loss in ("ppo_clip", "gspo") or (s.policy_loss == "cispo" and from_eps_clip)


def reads_eps_clip_high(s: Any) -> bool:
    """Whether the policy loss has a bound that is made from eps_clip_high."""
    own = s.policy_loss == "cispo" and not s.was_given("cispo_clip_high")
    return s.policy_loss in ("ppo_clip", "gspo") or own


_BOUNDS = "policy_loss ppo_clip or gspo, or cispo without bounds of its own that replace it"
_EPS_CLIP = (POLICY_TERM, Need(reads_eps_clip, _BOUNDS))
_EPS_CLIP_HIGH = (POLICY_TERM, Need(reads_eps_clip_high, _BOUNDS))
_RATIO = (POLICY_TERM, Need(lambda s: s.policy_loss in ("ppo_clip", "gspo"), "policy_loss ppo_clip or gspo"))
_CISPO = (POLICY_TERM, Need(lambda s: s.policy_loss == "cispo", "policy_loss cispo"))
_SAPO = (POLICY_TERM, Need(lambda s: s.policy_loss == "sapo", "policy_loss sapo"))
_CONSTANT = Need(lambda s: s.loss_aggregation == "constant_length", "loss_aggregation constant_length")
_COUNTS_EXECUTIONS = Need(
    lambda s: s.loss_aggregation != "token_mean", "a loss_aggregation that counts executions, which token_mean does not"
)
_RATIOS = Need(
    lambda s: s.loss_type == "policy_loss" or (computes_advantages(s) and bool(s.kl_coef)),
    "loss_type policy_loss, or --kl-coef with custom_loss",
)
_DEVIATION = Need(lambda s: s.advantage_scale != "none", "advantage_scale group or batch")
_ESTIMATOR = (ADVANTAGES, OWN_ADVANTAGES)


def _policy_loss(s: Any) -> str:
    estimator: str = s.advantage_estimator
    return estimator if estimator in ("gspo", "cispo", "sapo") else "ppo_clip"


def _without_deviation(s: Any) -> bool | None:
    single = s.n_samples_per_prompt == 1 and s.advantage_estimator in SCALED_BY_GROUP
    return False if single else None


def _reference(s: Any) -> str | None:
    return s.hf_checkpoint if s.use_kl_loss or s.kl_coef else None


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """From rewards to the gradient; docs/algorithms.md has the formulas."""

    advantage_estimator: Estimator = opt("grpo", needs=ADVANTAGES)
    """How rewards become advantages; groups are the samples of one prompt id, never a position. gspo, cispo and
    sapo are grpo with the policy loss of that name; ppo trains a critic."""
    policy_loss: Literal["ppo_clip", "gspo", "cispo", "sapo"] = derived(
        _policy_loss, lambda s: f"advantage_estimator {s.advantage_estimator}", needs=POLICY_TERM
    )
    """What bounds the update: the clipped ratio of tokens, of sequences (arXiv:2507.18071), a clipped weight
    (arXiv:2506.13585), or a soft gate (arXiv:2511.20347). Default: that of the estimator."""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """What is minimised; custom_loss is that of --custom-loss-function-path."""
    loss_aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant_length"] = derived(
        lambda s: "token_mean" if s.calculate_per_token_loss else "sequence_mean",
        lambda s: "--calculate-per-token-loss" if s.calculate_per_token_loss else "mean over executions",
    )
    """From token losses to one number; denominators are those of the whole optimizer step. Default: sequence_mean, the
    mean over executions of their token means, or token_mean with --calculate-per-token-loss."""
    loss_constant_length: int = derived(
        lambda s: s.rollout_max_response_len, "rollout_max_response_len", gt=0, needs=_CONSTANT
    )
    """Divisor of every execution with constant_length (Dr. GRPO, arXiv:2503.20783). Default:
    --rollout-max-response-len."""
    calculate_per_token_loss: bool = False
    """The public name of --loss-aggregation token_mean (DAPO, arXiv:2503.14476)."""
    drop_masked_executions: bool = opt(False, needs=_COUNTS_EXECUTIONS)
    """Executions without a trained token leave the denominator. Default: they stay, with a loss of zero."""
    eps_clip: float = opt(0.2, gt=0, le=1, needs=_EPS_CLIP)
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347)."""
    eps_clip_high: float = derived(lambda s: s.eps_clip, "eps_clip", gt=0, needs=_EPS_CLIP_HIGH)
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""
    eps_clip_c: float | None = opt(None, gt=1, needs=_RATIO)
    """Dual clip bound for negative advantages, > 1 (arXiv:1912.09729)."""
    cispo_clip_low: float = derived(lambda s: 1.0 - s.eps_clip, "1 - eps_clip", ge=0, needs=_CISPO)
    """Lower bound of the CISPO weight itself; 0 is none. Default: 1 - eps_clip."""
    cispo_clip_high: float = derived(lambda s: 1.0 + s.eps_clip_high, "1 + eps_clip_high", ge=0, needs=_CISPO)
    """Upper bound of the CISPO weight itself. Default: 1 + eps_clip_high."""
    sapo_tau_positive: float = opt(1.0, gt=0, needs=_SAPO)
    """Steepness of SAPO's gate for advantages > 0."""
    sapo_tau_negative: float = opt(1.05, gt=0, needs=_SAPO)
    """Steepness of SAPO's gate for the others."""
    log_ratio_limit: float = opt(20.0, ge=0, needs=_RATIOS)
    """Log-ratios are clamped to +- this and counted; 0 is no clamp."""
    use_kl_loss: bool = opt(False, needs=SAMPLED_LOSS)
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: float = opt(0.0, ge=0, needs=(POLICY_LOSS, KL_LOSS), asks=is_not_zero)
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = opt("low_var_kl", needs=KL)
    """KL estimator (http://joschu.net/blog/kl-approx.html), of the loss and of --kl-coef; low_var_kl is k3 clamped. As
    a loss, k1 needs --use-unbiased-kl: without it its expected gradient is zero."""
    use_unbiased_kl: bool = opt(False, needs=(POLICY_LOSS, KL_LOSS))
    """Multiply the KL loss by the ratio to the sampling policy, so that its gradient is that of the KL."""
    kl_coef: float = opt(0.0, ge=0, needs=ADVANTAGES, asks=is_not_zero)
    """Weight of the KL to the reference in the reward; every estimator applies it."""
    entropy_coef: float = opt(0.0, ge=0, needs=POLICY_LOSS, asks=is_not_zero)
    """Weight of the entropy bonus."""
    compute_advantages_and_returns: bool = derived(
        lambda s: False if s.loss_type == "sft_loss" else None,
        "--loss-type sft_loss learns from the data, not from rewards",
        default=True,
        off_names=("--disable-compute-advantages-and-returns",),
        needs=SAMPLED_LOSS,
    )
    """Off for supervised fine-tuning."""
    normalize_advantages: bool = derived(
        lambda s: s.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        lambda s: f"advantage_estimator {s.advantage_estimator}",
        needs=ADVANTAGES,
    )
    """Whiten advantages over all trained tokens of the rollout. Default: on for the two reinforce_plus_plus."""
    grpo_std_normalization: bool = derived(
        _without_deviation,
        "a group of one sample has no standard deviation",
        default=True,
        off_names=("--disable-grpo-std-normalization",),
        needs=(*_ESTIMATOR, SCALED),
        asks=always,
    )
    """Divide group rewards by their standard deviation (off: Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Literal["group", "batch", "none"] = derived(
        lambda s: "group" if s.grpo_std_normalization else "none",
        lambda s: f"grpo_std_normalization {s.grpo_std_normalization}",
        needs=(*_ESTIMATOR, SCALED),
    )
    """Whose standard deviation divides the rewards of grpo, gspo, cispo and sapo. Default: group, or none with
    --disable-grpo-std-normalization."""
    advantage_epsilon: float = opt(1e-6, ge=0, needs=(*_ESTIMATOR, SCALED, _DEVIATION))
    """Added to that standard deviation."""
    rewards_normalization: bool = derived(
        lambda s: False if s.custom_reward_post_process_path else None,
        "--custom-reward-post-process-path returns the rewards to train on",
        default=True,
        off_names=("--disable-rewards-normalization",),
        needs=(*_ESTIMATOR, GROUP_REWARDS),
        asks=always,
    )
    """Subtract the group's mean reward. Off with --custom-reward-post-process-path, whose rewards are trained as they
    are."""
    gamma: float = opt(1.0, ge=0, le=1, needs=(*_ESTIMATOR, TOKEN_REWARDS))
    """Discount of later tokens' rewards (ppo, reinforce_plus_plus)."""
    lambd: float = opt(1.0, ge=0, le=1, needs=(*_ESTIMATOR, PPO))
    """Lambda of generalized advantage estimation (ppo, arXiv:1506.02438)."""
    observation_returns: Literal["skip", "through", "reset"] = opt("skip", needs=(*_ESTIMATOR, TOKEN_REWARDS))
    """What tokens that the policy did not write (tool results) do to returns: they are skipped, count as time steps, or
    end the discounted sum (reinforce_plus_plus only)."""
    ref_load: str | None = derived(_reference, "a KL needs a reference: the initial weights", needs=REFERENCE)
    """HF folder of the reference model. Default with a KL: the initial weights."""
