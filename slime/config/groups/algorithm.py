"""The learning algorithm: advantages, loss, KL, corrections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.fields import derived, opt


@dataclass(frozen=True, kw_only=True)
class AlgorithmArgs:
    """From rewards to the gradient."""

    advantage_estimator: Literal["grpo", "reinforce_plus_plus_baseline"] = "grpo"
    """How rewards become advantages; always over the samples of one prompt id, never by position."""
    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """What is minimised."""
    eps_clip: float = 0.2
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347)."""
    eps_clip_high: float = derived()
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""
    eps_clip_c: float | None = None
    """Dual clip bound for negative advantages, > 1 (arXiv:1912.09729)."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: float = 0.0
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator (http://joschu.net/blog/kl-approx.html); low_var_kl is k3 clamped. k1 is for watching only
    (--kl-loss-coef 0): as a loss its expected gradient is zero."""
    kl_coef: float = 0.0
    """KL in the reward; only estimators that apply it accept it."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    compute_advantages_and_returns: bool = opt(True, off_names=("--disable-compute-advantages-and-returns",))
    """Off for supervised fine-tuning."""
    normalize_advantages: bool = False
    """Whiten advantages over all trained tokens of the step."""
    grpo_std_normalization: bool = opt(True, off_names=("--disable-grpo-std-normalization",))
    """Divide group rewards by their standard deviation (off: Dr. GRPO, arXiv:2503.20783)."""
    rewards_normalization: bool = opt(True, off_names=("--disable-rewards-normalization",))
    """Subtract the group's mean reward. Off with --custom-reward-post-process-path, whose rewards are trained as they
    are."""
    calculate_per_token_loss: bool = False
    """Average the loss over tokens of the step instead of over executions."""
    use_rollout_logprobs: bool = False
    """The engine's log-probs are the old policy, instead of a forward pass of the trainer."""
    use_tis: bool = False
    """Truncated importance sampling between engine and trainer."""
    tis_clip: float = 2.0
    """Upper bound of its weight."""
    tis_clip_low: float = 0.0
    """Lower bound of its weight."""
    ref_load: str | None = None
    """HF folder of the reference model. Default with a KL: the initial weights."""
