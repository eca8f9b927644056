"""The rules of the algorithm: what is sampled can be learned from, and every term of the loss does something."""

from __future__ import annotations

from slime.config.args import Args
from slime.config.rules import RULE_DEFAULT_ROLLOUT, Rule


def temperature_is_positive(args: Args) -> str | None:
    """Greedy samples have no log-prob to learn from."""
    if args.rollout_temperature > 0:
        return None
    return (f"got rollout_temperature {args.rollout_temperature}: greedy samples of a prompt are all equal and their "
            "log-probs divide by zero; give a value > 0 (--eval-temperature 0 is fine)")  # fmt: skip


def sampled_distribution_is_trained(args: Args) -> str | None:
    """The log-prob of a token is that of the distribution it was sampled from."""
    if args.loss_type == "sft_loss" or (args.rollout_top_p == 1.0 and args.rollout_top_k == -1):
        return None
    return (f"got rollout_top_p {args.rollout_top_p} and rollout_top_k {args.rollout_top_k}: tokens would be sampled "
            "from a cut distribution, while the trainer's log-probs are over the whole vocabulary; "
            "leave them at 1.0 and -1 (evaluation may use others)")  # fmt: skip


def kl_coef_is_applied(args: Args) -> str | None:
    """No estimator of this release puts the KL into the reward."""
    if args.kl_coef == 0:
        return None
    return (f"got kl_coef {args.kl_coef} with advantage_estimator {args.advantage_estimator}, which ignores it; "
            "use --use-kl-loss --kl-loss-coef")  # fmt: skip


def kl_loss_is_complete(args: Args) -> str | None:
    """The switch and its weight come together."""
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        return f"got kl_loss_coef {args.kl_loss_coef} without --use-kl-loss, so it would be ignored; add the switch"
    if args.ref_load and not args.use_kl_loss:
        return f"got ref_load {args.ref_load} without --use-kl-loss, so no reference is used; add the switch or drop it"
    return None


def kl_loss_has_a_gradient(args: Args) -> str | None:
    """k1 is the log-ratio itself: the expected gradient of it is zero, whatever the distance to the reference."""
    if not args.use_kl_loss or args.kl_loss_coef == 0 or args.kl_loss_type != "k1":
        return None
    return (f"got kl_loss_type k1 with kl_loss_coef {args.kl_loss_coef}: as a loss its expected gradient is zero, so "
            "nothing holds the policy to the reference; use low_var_kl, k2 or k3")  # fmt: skip


def advantages_can_differ_from_zero(args: Args) -> str | None:
    """A single reward less its mean is zero."""
    own_groups = args.rollout_function_path != RULE_DEFAULT_ROLLOUT or args.custom_convert_samples_to_train_data_path
    trains = args.num_rollout != 0 and args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    if args.n_samples_per_prompt != 1 or not trains or args.debug_rollout_only or own_groups:
        return None
    if not args.rewards_normalization:
        return None
    return ("got n_samples_per_prompt 1 with rewards_normalization: the group's mean is the reward itself, every "
            "advantage is zero and nothing is trained; raise --n-samples-per-prompt, or give "
            "--disable-rewards-normalization")  # fmt: skip


def reward_hook_replaces_normalization(args: Args) -> str | None:
    """What the hook returns is what is trained on."""
    if not args.custom_reward_post_process_path or not args.rewards_normalization:
        return None
    return ("got --custom-reward-post-process-path with --rewards-normalization, which would normalise what the hook "
            "returns once more; drop the switch and normalise in the hook")  # fmt: skip


def clip_is_sane(args: Args) -> str | None:
    """Bounds of the ratio."""
    if not 0 < args.eps_clip < 1 or args.eps_clip_high <= 0:
        return f"got eps_clip {args.eps_clip}, eps_clip_high {args.eps_clip_high}; give 0 < eps_clip < 1, high > 0"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        return f"got eps_clip_c {args.eps_clip_c}; the dual clip bound must be > 1 (arXiv:1912.09729)"
    return None


def corrections_are_compatible(args: Args) -> str | None:
    """With the engine's log-probs as old policy the correction weight is one."""
    if args.use_tis and args.use_rollout_logprobs:
        return "got --use-tis with --use-rollout-logprobs, which makes every weight 1; give one of them"
    if args.use_tis and not 0 <= args.tis_clip_low <= args.tis_clip:
        return f"got tis_clip_low {args.tis_clip_low} and tis_clip {args.tis_clip}; give 0 <= low <= high"
    return None


ALGORITHM_RULES: tuple[Rule, ...] = (
    temperature_is_positive,
    sampled_distribution_is_trained,
    kl_coef_is_applied,
    kl_loss_is_complete,
    kl_loss_has_a_gradient,
    advantages_can_differ_from_zero,
    reward_hook_replaces_normalization,
    clip_is_sane,
    corrections_are_compatible,
)
