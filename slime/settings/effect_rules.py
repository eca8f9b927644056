"""What needs what: a setting that the user gave has to act on what the run does.

A setting may stand in several entries of `NEEDS`; all of them must hold, and the first that does not is told. A test
demands that every setting of the algorithm, the corrections, the teacher and the critic is here or always acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.settings.args import Args
from slime.settings.derive import BY_GROUP_STD, SFT_ROLLOUT
from slime.settings.rules import Rule, was_given

OFF_AT_ZERO = frozenset({"kl_coef", "kl_loss_coef", "entropy_coef", "num_critic_only_steps"})
"""Zero asks for nothing, so it is allowed anywhere; elsewhere only False and None are so."""
BOTH_WAYS = frozenset({"grpo_std_normalization", "rewards_normalization"})
"""Switches that ask for something on as well as off."""

RETURNS = ("ppo", "reinforce_plus_plus")
"""Estimators that sum token rewards instead of comparing within a group."""


@dataclass(frozen=True, slots=True)
class Need:
    """Settings that act under one condition only."""

    settings: str
    """Names, separated by spaces."""
    acts: Callable[[Args], bool]
    text: str
    """The condition in words, after "which needs"."""


def _is(setting: str, *values: str | bool) -> Callable[[Args], bool]:
    return lambda args: getattr(args, setting) in values


def _advantages(args: Args) -> bool:
    return args.loss_type != "sft_loss" and args.compute_advantages_and_returns


def _policy_term(args: Args) -> bool:
    return args.loss_type == "policy_loss" and args.compute_advantages_and_returns


def _kl(args: Args) -> bool:
    return bool(args.kl_coef) or (args.use_kl_loss and args.loss_type == "policy_loss")


def _renders(args: Args) -> bool:
    return args.apply_chat_template or args.loss_type == "sft_loss" or args.rollout_function_path == SFT_ROLLOUT


def _loads(args: Args) -> bool:
    return not args.origins.get("load", "default").startswith("default")  # dropped where it is --save and still empty


def _scaled(args: Args) -> bool:
    return args.advantage_estimator in BY_GROUP_STD and args.rewards_normalization


def _is_hook_of_weights(args: Args) -> bool:
    return args.use_tis and args.custom_tis_function_path is not None


def reads_eps_clip(args: Args) -> bool:
    """Whether the policy loss has a bound that is made from eps_clip."""
    low, high = (was_given(args, n) for n in ("cispo_clip_low", "cispo_clip_high"))
    from_eps_clip = not low or (not high and not was_given(args, "eps_clip_high"))
    return args.policy_loss in ("ppo_clip", "gspo") or (args.policy_loss == "cispo" and from_eps_clip)


def reads_eps_clip_high(args: Args) -> bool:
    """Whether the policy loss has a bound that is made from eps_clip_high."""
    own = args.policy_loss == "cispo" and not was_given(args, "cispo_clip_high")
    return args.policy_loss in ("ppo_clip", "gspo") or own


_ADVANTAGES = "advantages: loss_type policy_loss or custom_loss, without --disable-compute-advantages-and-returns"
_POLICY_TERM = "the policy loss: loss_type policy_loss, without --disable-compute-advantages-and-returns"
_OWN_BOUNDS = "policy_loss ppo_clip or gspo, or cispo without bounds of its own that replace it"

NEEDS: tuple[Need, ...] = (
    Need(
        "compute_advantages_and_returns use_kl_loss",
        _is("loss_type", "policy_loss", "custom_loss"),
        "loss_type policy_loss or custom_loss",
    ),
    Need(
        "entropy_coef kl_loss_coef use_unbiased_kl get_mismatch_metrics",
        _is("loss_type", "policy_loss"),
        "loss_type policy_loss",
    ),
    Need(
        "advantage_estimator kl_coef normalize_advantages rewards_normalization grpo_std_normalization "
        "advantage_scale advantage_epsilon gamma lambd observation_returns custom_advantage_function_path "
        "rollout_data_postprocess_path "
        "use_opd opd_type opd_kl_coef opd_teacher_load critic_load critic_lr num_critic_only_steps value_clip",
        _advantages,
        _ADVANTAGES,
    ),
    Need(
        "policy_loss off_policy_corrections eps_clip eps_clip_high eps_clip_c cispo_clip_low cispo_clip_high "
        "sapo_tau_positive sapo_tau_negative use_tis custom_tis_function_path rejection_level rejection_low "
        "rejection_high rejection_veto use_opsm opsm_delta custom_pg_loss_reducer_function_path",
        _policy_term,
        _POLICY_TERM,
    ),
    Need(
        "use_rollout_logprobs",
        lambda a: _policy_term(a) or (a.loss_type == "policy_loss" and a.use_kl_loss and a.use_unbiased_kl),
        f"{_POLICY_TERM}; or --use-unbiased-kl",
    ),
    Need(
        "log_ratio_limit",
        lambda a: a.loss_type == "policy_loss" or (_advantages(a) and bool(a.kl_coef)),
        "loss_type policy_loss, or --kl-coef with custom_loss",
    ),
    Need(
        "dynamic_sampling_filter_path rollout_sample_filter_path rollout_all_samples_process_path",
        lambda a: a.rollout_function_path != SFT_ROLLOUT,
        "a rollout that samples; fine-tuning reads its samples",
    ),
    # Advantages.
    Need(
        "rewards_normalization grpo_std_normalization advantage_scale advantage_epsilon gamma lambd "
        "observation_returns",
        lambda a: not a.custom_advantage_function_path,
        "an estimator; --custom-advantage-function-path replaces it",
    ),
    Need(
        "critic_load critic_lr num_critic_only_steps value_clip lambd",
        _is("advantage_estimator", "ppo"),
        "advantage_estimator ppo",
    ),
    Need(
        "gamma observation_returns",
        _is("advantage_estimator", *RETURNS),
        "advantage_estimator ppo or reinforce_plus_plus",
    ),
    Need(
        "rewards_normalization",
        lambda a: a.advantage_estimator not in RETURNS,
        "an estimator that compares within a group, not ppo or reinforce_plus_plus",
    ),
    Need(
        "grpo_std_normalization advantage_scale advantage_epsilon",
        _scaled,
        "advantage_estimator grpo, gspo, cispo or sapo, with rewards_normalization",
    ),
    Need("advantage_epsilon", lambda a: a.advantage_scale != "none", "advantage_scale group or batch"),
    Need("opd_type opd_kl_coef opd_teacher_load opd_teacher_url", _is("use_opd", True), "--use-opd"),
    Need("opd_teacher_api_key", lambda a: a.opd_teacher_url is not None, "--opd-teacher-url"),
    # The policy loss and its aggregation.
    Need("eps_clip", reads_eps_clip, _OWN_BOUNDS),
    Need("eps_clip_high", reads_eps_clip_high, _OWN_BOUNDS),
    Need("eps_clip_c", _is("policy_loss", "ppo_clip", "gspo"), "policy_loss ppo_clip or gspo"),
    Need("cispo_clip_low cispo_clip_high", _is("policy_loss", "cispo"), "policy_loss cispo"),
    Need("sapo_tau_positive sapo_tau_negative", _is("policy_loss", "sapo"), "policy_loss sapo"),
    Need("loss_constant_length", _is("loss_aggregation", "constant_length"), "loss_aggregation constant_length"),
    Need(
        "drop_masked_executions",
        lambda a: a.loss_aggregation != "token_mean",
        "a loss_aggregation that counts executions, which token_mean does not",
    ),
    # The reference.
    Need("use_unbiased_kl kl_loss_coef", _is("use_kl_loss", True), "--use-kl-loss"),
    Need("kl_loss_type", _kl, "--kl-coef, or --use-kl-loss with loss_type policy_loss"),
    Need("ref_load ref_update_interval", lambda a: a.use_kl_loss or bool(a.kl_coef), "--use-kl-loss or --kl-coef"),
    # Parameters and copies.
    Need("lora_alpha lora_target_modules", lambda a: a.lora_rank is not None, "--lora-rank"),
    Need(
        "keep_old_actor",
        lambda a: a.loss_type != "sft_loss" and not a.use_rollout_logprobs,
        "old log-probs of the trainer: loss_type policy_loss or custom_loss, without --use-rollout-logprobs",
    ),
    Need("keep_old_actor", _is("debug_train_only", False), "engines, to which weights are published"),
    # Corrections.
    Need("custom_tis_function_path", _is("use_tis", True), "--use-tis"),
    Need(
        "tis_clip tis_clip_low tis_mode tis_level",
        lambda a: (a.use_tis and _policy_term(a)) or (a.get_mismatch_metrics and a.loss_type == "policy_loss"),
        "--use-tis or --get-mismatch-metrics, with loss_type policy_loss",
    ),
    Need(
        "tis_clip tis_clip_low tis_mode tis_level get_mismatch_metrics",
        lambda a: not _is_hook_of_weights(a),
        "weights of slime's own; --custom-tis-function-path replaces them",
    ),
    Need("rejection_low rejection_high rejection_veto", lambda a: a.rejection_level is not None, "--rejection-level"),
    Need("opsm_delta", _is("use_opsm", True), "--use-opsm"),
    # Everything else.
    Need("max_groups_in_flight", _is("fully_async", True), "the worker of --fully-async"),
    Need(
        "pause_generation_mode",
        lambda a: a.fully_async or a.pause_generation_mode == "abort",
        "--fully-async: nothing else runs while weights are published",
    ),
    Need("max_tokens_per_gpu", _is("use_dynamic_batch_size", True), "--use-dynamic-batch-size"),
    Need("mask_offpolicy_in_partial_rollout", _is("partial_rollout", True), "--partial-rollout"),
    Need("apply_chat_template_kwargs", _renders, "--apply-chat-template"),
    Need("offload offload_train offload_rollout", _is("colocate", True), "--colocate: nobody else takes the memory"),
    Need("async_save no_save_optim save_keep_last save_retain_interval", lambda a: a.save is not None, "--save"),
    Need("save_retain_interval", lambda a: a.save_keep_last is not None, "--save-keep-last: all are kept anyway"),
    Need("no_load_optim no_load_rng finetune", _loads, "--load"),
    Need("ckpt_step", lambda a: a.load is not None, "--load of a folder with checkpoints"),
)
"""In the order in which a setting's conditions are looked at."""


def _asks(args: Args, name: str) -> bool:
    """Whether the user gave a setting, and not to switch it off."""
    value = getattr(args, name)
    is_off = value is None or value is False or (name in OFF_AT_ZERO and value == 0)
    return was_given(args, name) and (name in BOTH_WAYS or not is_off)


def settings_have_an_effect(args: Args) -> str | None:
    """What the user gave is read by what the user chose."""
    idle: dict[str, str] = {}
    for need in NEEDS:
        names = [n for n in need.settings.split() if n not in idle and _asks(args, n)]
        if names and not need.acts(args):
            idle |= {name: f"{name} {getattr(args, name)}, which needs {need.text}" for name in names}
    return f"got {'; '.join(idle.values())}: it would be ignored; drop it or change the other" if idle else None


def something_is_trained(args: Args) -> str | None:
    """Without advantages the policy loss is zero; only a KL loss or an entropy bonus is left."""
    trains = args.num_rollout != 0 and args.loss_type == "policy_loss" and not args.debug_rollout_only
    if not trains or args.compute_advantages_and_returns or args.entropy_coef:
        return None
    if args.use_kl_loss and args.kl_loss_coef:
        return None
    return (
        "got --disable-compute-advantages-and-returns with loss_type policy_loss: all advantages would be zero, "
        "and nothing trained; drop it, or give --use-kl-loss --kl-loss-coef or --entropy-coef"
    )


def deviation_is_said_once(args: Args) -> str | None:
    """Two settings say whether group rewards are divided."""
    both = was_given(args, "grpo_std_normalization") and was_given(args, "advantage_scale")
    if not both or args.grpo_std_normalization == (args.advantage_scale != "none"):
        return None
    return (
        f"got grpo_std_normalization {args.grpo_std_normalization} with advantage_scale {args.advantage_scale}, "
        "which says the contrary; give one of them"
    )


EFFECT_RULES: tuple[Rule, ...] = (settings_have_an_effect, something_is_trained, deviation_is_said_once)
