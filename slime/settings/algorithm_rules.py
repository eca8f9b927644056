"""The rules of the algorithm: what is sampled can be learned from, and every term of the loss does something."""

from __future__ import annotations

import math
import os

from slime.settings.args import Args
from slime.settings.effect_rules import EFFECT_RULES, reads_eps_clip, reads_eps_clip_high
from slime.settings.rules import RULE_DEFAULT_ROLLOUT, Rule, was_given


def temperature_is_positive(args: Args) -> str | None:
    """Greedy samples have no log-prob to learn from."""
    if args.rollout_temperature > 0:
        return None
    return (
        f"got rollout_temperature {args.rollout_temperature}: greedy samples of a prompt are all equal and their "
        "log-probs divide by zero; give a value > 0 (--eval-temperature 0 is fine)"
    )


def sampled_distribution_is_trained(args: Args) -> str | None:
    """The log-prob of a token is that of the distribution it was sampled from; engines report the whole one."""
    if not 0 < args.rollout_top_p <= 1 or (args.rollout_top_k < 1 and args.rollout_top_k != -1):
        return (
            f"got rollout_top_p {args.rollout_top_p} and rollout_top_k {args.rollout_top_k}; "
            "give 0 < top_p <= 1, and top_k >= 1 or -1 for all"
        )
    if args.loss_type == "sft_loss" or (args.rollout_top_p == 1.0 and args.rollout_top_k == -1):
        return None
    names = ("use_rollout_logprobs", "use_kl_loss", "custom_loss_function_path", "custom_advantage_function_path")
    wrong = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n)]
    if not wrong:
        return None
    return (
        f"got {', '.join(wrong)} with rollout_top_p {args.rollout_top_p} and rollout_top_k {args.rollout_top_k}: "
        "the trainer's log-probs are those of the cut distribution, the engine's and the reference's of the whole "
        "one; leave top-p and top-k out, or use --kl-coef for a reference"
    )


def engines_divide_by_the_temperature(args: Args) -> str | None:
    """An environment variable of SGLang takes the temperature out of its log-probs."""
    if args.rollout_temperature == 1.0 or args.debug_train_only:
        return None
    if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() not in ("1", "true", "yes", "y"):
        return None
    return (
        f"got SGLANG_RETURN_ORIGINAL_LOGPROB in the environment with rollout_temperature "
        f"{args.rollout_temperature}: engines would report log-probs at temperature 1, and the trainer those that "
        "tokens were sampled with; unset it"
    )


def kl_is_complete(args: Args) -> str | None:
    """Each switch has its weight, and the KL is in one place."""
    if args.kl_coef and args.kl_loss_coef:
        return (
            f"got kl_coef {args.kl_coef} with kl_loss_coef {args.kl_loss_coef}, which would hold the policy to the "
            "reference twice; give one of them"
        )
    return None


def kl_loss_has_a_gradient(args: Args) -> str | None:
    """k1 is the log-ratio itself: the expected gradient of it is zero, whatever the distance to the reference."""
    if not args.use_kl_loss or args.kl_loss_coef == 0 or args.kl_loss_type != "k1" or args.use_unbiased_kl:
        return None
    return (
        f"got kl_loss_type k1 with kl_loss_coef {args.kl_loss_coef}: as a loss its expected gradient is zero, so "
        "nothing holds the policy to the reference; use another, or add --use-unbiased-kl"
    )


def advantages_can_differ_from_zero(args: Args) -> str | None:
    """A single reward less its mean is zero."""
    own_groups = args.rollout_function_path != RULE_DEFAULT_ROLLOUT or args.custom_convert_samples_to_train_data_path
    trains = args.num_rollout != 0 and args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    if args.n_samples_per_prompt != 1 or not trains or args.debug_rollout_only or own_groups:
        return None
    if not args.rewards_normalization or args.advantage_estimator in ("ppo", "reinforce_plus_plus"):
        return None
    if args.use_opd or args.custom_advantage_function_path or args.rollout_data_postprocess_path:
        return None
    return (
        "got n_samples_per_prompt 1 with rewards_normalization: the group's mean is the reward itself, every "
        "advantage is zero and nothing is trained; raise --n-samples-per-prompt, or give "
        "--disable-rewards-normalization"
    )


def reward_hook_replaces_normalization(args: Args) -> str | None:
    """What the hook returns is what is trained on."""
    if not args.custom_reward_post_process_path or not args.rewards_normalization:
        return None
    return (
        "got --custom-reward-post-process-path with --rewards-normalization, which would normalise what the hook "
        "returns once more; drop the switch and normalise in the hook"
    )


def clip_is_sane(args: Args) -> str | None:
    """Bounds of the ratio, where the policy loss reads them."""
    if reads_eps_clip(args) and not 0 < args.eps_clip <= 1:
        return f"got eps_clip {args.eps_clip}; give 0 < eps_clip <= 1: the lower bound of the ratio is 1 - eps_clip"
    if reads_eps_clip_high(args) and not args.eps_clip_high > 0:
        return f"got eps_clip_high {args.eps_clip_high}; give a value > 0: the upper bound is 1 + eps_clip_high"
    if args.eps_clip_c is not None and not args.eps_clip_c > 1:
        return f"got eps_clip_c {args.eps_clip_c}; the dual clip bound must be > 1 (arXiv:1912.09729)"
    return None


def bounds_are_sane(args: Args) -> str | None:
    """Intervals of weights have a low and a high end; coefficients are numbers that do not turn a term around."""
    pairs = [("tis_clip_low", "tis_clip"), ("rejection_low", "rejection_high")]
    if was_given(args, "cispo_clip_low") or was_given(args, "cispo_clip_high"):  # made from eps_clip: see above
        pairs.append(("cispo_clip_low", "cispo_clip_high"))
    wrong = [
        f"{a} {getattr(args, a)} and {b} {getattr(args, b)}"
        for a, b in pairs
        if not 0 <= getattr(args, a) <= getattr(args, b)
    ]
    wrong += [
        f"{n} {getattr(args, n)}"
        for n in ("sapo_tau_positive", "sapo_tau_negative", "value_clip", "critic_lr", "loss_constant_length")
        if not 0 < getattr(args, n) < math.inf
    ]
    wrong += [
        f"{n} {getattr(args, n)}"
        for n in (
            "log_ratio_limit",
            "opsm_delta",
            "num_critic_only_steps",
            "advantage_epsilon",
            "entropy_coef",
            "kl_coef",
            "kl_loss_coef",
            "opd_kl_coef",
            "rejection_veto",
        )
        if getattr(args, n) is not None and not 0 <= getattr(args, n) < math.inf
    ]
    wrong += [f"{n} {getattr(args, n)}" for n in ("gamma", "lambd") if not 0 <= getattr(args, n) <= 1]
    return f"got {', '.join(wrong)}, which is out of range (finite, 0 <= low <= high; see --help)" if wrong else None


def corrections_are_compatible(args: Args) -> str | None:
    """With the engine's log-probs as old policy every correction weight is one."""
    corrects = args.use_tis or args.rejection_level or args.get_mismatch_metrics
    if corrects and args.use_rollout_logprobs:
        return (
            "got --use-rollout-logprobs with --use-tis, --rejection-level or --get-mismatch-metrics, which compare "
            "them with the trainer's; give one of them"
        )
    return None


def aggregation_is_said_once(args: Args) -> str | None:
    """The public switch and the setting do not contradict each other."""
    if not args.calculate_per_token_loss or args.loss_aggregation == "token_mean":
        return None
    return f"got --calculate-per-token-loss with --loss-aggregation {args.loss_aggregation}; give one of them"


def custom_loss_has_a_function(args: Args) -> str | None:
    """The loss type and the hook come together."""
    if (args.loss_type == "custom_loss") == bool(args.custom_loss_function_path):
        return None
    return "got one of --loss-type custom_loss and --custom-loss-function-path without the other; give both or none"


def distillation_has_a_teacher(args: Args) -> str | None:
    """Who the teacher is must be said, once."""
    if not args.use_opd:
        return None
    if args.opd_type is None:
        return "got --use-opd without --opd-type; say sglang (log-probs come with the samples) or megatron"
    if (args.opd_type == "megatron") != bool(args.opd_teacher_load):
        return (
            f"got opd_type {args.opd_type} with opd_teacher_load {args.opd_teacher_load}; the folder goes with "
            "megatron, and only with it"
        )
    if args.opd_teacher_url and (args.opd_type != "sglang" or args.rollout_temperature != 1.0):
        return (
            f"got opd_teacher_url with opd_type {args.opd_type}, rollout_temperature {args.rollout_temperature}; "
            "it goes with sglang, whose log-probs of given tokens are those at temperature 1"
        )
    return None


def observations_have_a_meaning(args: Args) -> str | None:
    """GAE bootstraps over observations or through them; there is no reset."""
    if args.advantage_estimator == "ppo" and args.observation_returns == "reset":
        return "got observation_returns reset with ppo; give skip or through"
    return None


ALGORITHM_RULES: tuple[Rule, ...] = (
    temperature_is_positive,
    sampled_distribution_is_trained,
    engines_divide_by_the_temperature,
    kl_is_complete,
    kl_loss_has_a_gradient,
    advantages_can_differ_from_zero,
    reward_hook_replaces_normalization,
    clip_is_sane,
    bounds_are_sane,
    corrections_are_compatible,
    aggregation_is_said_once,
    custom_loss_has_a_function,
    distillation_has_a_teacher,
    observations_have_a_meaning,
    *EFFECT_RULES,
)
