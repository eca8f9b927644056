"""The learning algorithm: rewards, advantages, the policy loss, KL, entropy, aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import derived, opt

Estimator = Literal[
    "grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]


@dataclass(frozen=True, kw_only=True)
class AlgorithmArgs:
    """From rewards to the gradient; docs/algorithms.md has the formulas."""

    advantage_estimator: Estimator = "grpo"
    """How rewards become advantages; groups are the samples of one prompt id, never a position. gspo, cispo and
    sapo are grpo with the policy loss of that name; ppo trains a critic."""
    policy_loss: Literal["ppo_clip", "gspo", "cispo", "sapo"] = derived()
    """What bounds the update: the clipped ratio of tokens, of sequences (arXiv:2507.18071), a clipped weight
    (arXiv:2506.13585), or a soft gate (arXiv:2511.20347). Default: that of the estimator."""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """What is minimised; custom_loss is that of --custom-loss-function-path."""
    loss_aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant_length"] = derived()
    """From token losses to one number; denominators are those of the whole optimizer step. Default: sequence_mean, the
    mean over executions of their token means, or token_mean with --calculate-per-token-loss."""
    loss_constant_length: int = derived()
    """Divisor of every execution with constant_length (Dr. GRPO, arXiv:2503.20783). Default:
    --rollout-max-response-len."""
    calculate_per_token_loss: bool = False
    """The public name of --loss-aggregation token_mean (DAPO, arXiv:2503.14476)."""
    drop_masked_executions: bool = False
    """Executions without a trained token leave the denominator. Default: they stay, with a loss of zero."""
    eps_clip: float = 0.2
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347)."""
    eps_clip_high: float = derived()
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""
    eps_clip_c: float | None = None
    """Dual clip bound for negative advantages, > 1 (arXiv:1912.09729)."""
    cispo_clip_low: float = derived()
    """Lower bound of the CISPO weight itself; 0 is none. Default: 1 - eps_clip."""
    cispo_clip_high: float = derived()
    """Upper bound of the CISPO weight itself. Default: 1 + eps_clip_high."""
    sapo_tau_positive: float = 1.0
    """Steepness of SAPO's gate for advantages > 0."""
    sapo_tau_negative: float = 1.05
    """Steepness of SAPO's gate for the others."""
    log_ratio_limit: float = 20.0
    """Log-ratios are clamped to +- this and counted; 0 is no clamp."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: float = 0.0
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator (http://joschu.net/blog/kl-approx.html), of the loss and of --kl-coef; low_var_kl is k3 clamped. As
    a loss, k1 needs --use-unbiased-kl: without it its expected gradient is zero."""
    use_unbiased_kl: bool = False
    """Multiply the KL loss by the ratio to the sampling policy, so that its gradient is that of the KL."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the reward; every estimator applies it."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    compute_advantages_and_returns: bool = opt(True, off_names=("--disable-compute-advantages-and-returns",))
    """Off for supervised fine-tuning."""
    normalize_advantages: bool = derived()
    """Whiten advantages over all trained tokens of the rollout. Default: on for the two reinforce_plus_plus."""
    grpo_std_normalization: bool = opt(True, off_names=("--disable-grpo-std-normalization",))
    """Divide group rewards by their standard deviation (off: Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Literal["group", "batch", "none"] = derived()
    """Whose standard deviation divides the rewards of grpo, gspo, cispo and sapo. Default: group, or none with
    --disable-grpo-std-normalization."""
    advantage_epsilon: float = 1e-6
    """Added to that standard deviation."""
    rewards_normalization: bool = opt(True, off_names=("--disable-rewards-normalization",))
    """Subtract the group's mean reward. Off with --custom-reward-post-process-path, whose rewards are trained as they
    are."""
    gamma: float = 1.0
    """Discount of later tokens' rewards (ppo, reinforce_plus_plus)."""
    lambd: float = 1.0
    """Lambda of generalized advantage estimation (ppo, arXiv:1506.02438)."""
    observation_returns: Literal["skip", "through", "reset"] = "skip"
    """What tokens that the policy did not write (tool results) do to returns: they are skipped, count as time steps, or
    end the discounted sum (reinforce_plus_plus only)."""
    ref_load: str | None = None
    """HF folder of the reference model. Default with a KL: the initial weights."""
