"""Settings for the learning algorithm.

They cover advantages, policy loss, KL, entropy, aggregation, critic, distillation, off-policy corrections and routing
replay.

The run applies the corrections listed in `--off-policy-corrections`. If the user does not set the list, it is derived
from the switches. If the user sets it, the switches are derived from it, so the two always agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.registry import load_object
from slime.settings.conditions import (
    ADVANTAGES,
    CRITIC,
    ENGINE_LOG_PROBS,
    ESTIMATORS,
    KL,
    KL_LOSS,
    POLICY_LOSS,
    POLICY_TERM,
    SAMPLED_LOSS,
    computes_advantages,
    estimator_of,
    fine_tunes,
    has_policy_term,
    has_reference,
    instead_of_converted,
    instead_of_start,
    minimises_policy_loss,
    samples_all_tokens,
)
from slime.settings.fields import Need, Passed, Rule, derived, is_not_zero, opt, refuse_if
from slime.settings.flags import COEFFICIENT, STEPS_OR_NONE, url_form
from slime.settings.groups.hooks import teacher_of_reward

if TYPE_CHECKING:
    from slime.settings.args import Args

AGGREGATIONS = "slime.algorithms.aggregation:AGGREGATIONS"

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
    lambda s: has_reference(s) or s.initial_weights == s.ref_load,
    "--use-kl-loss or --kl-coef, because the trainer starts from --load, which is in Hugging Face format",
)
_MEASURABLE = Need(
    lambda s: s.kl_loss_coef != 0 or not minimises_policy_loss(s) or samples_all_tokens(s),
    "--kl-loss-coef above 0, or sampling from all tokens: with --rollout-top-p or --rollout-top-k, the KL to the "
    "reference cannot be measured",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Advantages, loss and KL; docs/algorithms.md has the formulas."""

    advantage_estimator: str = opt("grpo", chosen_from=ESTIMATORS, needs=ADVANTAGES, first="Algorithm")
    """Advantage estimator, or the import path of your own. gspo, cispo and sapo are grpo with the policy loss of that
    name; ppo trains a critic. A group consists of the samples with the same prompt id."""
    policy_loss: str = derived(
        lambda s: estimator_of(s).default_policy_loss,
        lambda s: f"advantage_estimator {s.advantage_estimator}",
        chosen_from="slime.algorithms.policy_loss:POLICY_LOSSES",
        needs=POLICY_TERM,
    )
    """How the policy update is bounded: clipped ratio per token or per sequence (arXiv:2507.18071), clipped weight
    (arXiv:2506.13585), soft gate (arXiv:2511.20347), or divergence (arXiv:2602.04879). Default: set by the
    estimator."""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """The loss. custom_loss calls --custom-loss-function-path."""
    train_unsampled_tokens: bool = opt(False, needs=SAMPLED_LOSS)
    """Also train tokens that no engine sampled, such as demonstrations that a rollout function returns. The trainer's
    log-probs stand for the missing ones. Default: such samples are refused one by one."""
    loss_aggregation: str = derived(
        lambda s: "token_mean" if s.calculate_per_token_loss else "sequence_mean",
        lambda s: "--calculate-per-token-loss" if s.calculate_per_token_loss else "mean over executions",
        chosen_from=AGGREGATIONS,
    )
    """How token losses are reduced to one number, with the denominators of the whole optimizer step. Default:
    sequence_mean, the mean of the executions' token means; token_mean with --calculate-per-token-loss."""
    calculate_per_token_loss: bool = False
    """Alias of --loss-aggregation token_mean (DAPO, arXiv:2503.14476)."""
    drop_masked_executions: bool = opt(False, needs=_COUNTS_EXECUTIONS)
    """Leave executions without a trained token out of the denominator. Default: they count, with a loss of zero."""
    log_ratio_limit: float = opt(20.0, needs=_RATIOS, ge=0, le=88)
    """Clamp log-ratios to +/- this value, and count how many are clamped. 0: off."""
    use_kl_loss: bool = opt(False, needs=(SAMPLED_LOSS, _MEASURABLE), first="Algorithm")
    """Add kl_loss_coef * KL(policy, reference) to the loss."""
    kl_loss_coef: float = opt(0.0, needs=(POLICY_LOSS, KL_LOSS), asks=is_not_zero, within=COEFFICIENT)
    """Weight of the KL loss."""
    kl_loss_type: str = opt("low_var_kl", chosen_from="slime.algorithms.kl:KL_ESTIMATORS", needs=KL)
    """KL estimator (http://joschu.net/blog/kl-approx.html) for the KL loss and --kl-coef; low_var_kl is clamped k3. As
    a loss, k1 needs --use-unbiased-kl, because its expected gradient is otherwise zero."""
    use_unbiased_kl: bool = opt(False, needs=(POLICY_LOSS, KL_LOSS))
    """Multiply the KL loss by the ratio to the sampling policy, so that its gradient is the KL's."""
    kl_coef: float = opt(0.0, needs=ADVANTAGES, asks=is_not_zero, within=COEFFICIENT)
    """Weight of the KL penalty in the reward, with any estimator."""
    entropy_coef: float = opt(0.0, needs=POLICY_LOSS, asks=is_not_zero, within=COEFFICIENT)
    """Weight of the entropy bonus."""
    compute_advantages_and_returns: bool = derived(
        lambda s: False if fine_tunes(s) else None,
        "--loss-type sft_loss learns from data, not from rewards",
        default=True,
        off_names=("--disable-compute-advantages-and-returns",),
        needs=SAMPLED_LOSS,
    )
    """Compute advantages from rewards. Off for supervised fine-tuning."""
    normalize_advantages: bool = derived(
        lambda s: estimator_of(s).whitens,
        lambda s: f"advantage_estimator {s.advantage_estimator}",
        needs=ADVANTAGES,
    )
    """Whiten advantages over all trained tokens of the rollout. Default: on for both reinforce_plus_plus estimators."""
    ref_load: str | None = derived(
        _reference, "a KL needs a reference: the initial weights", adjust=instead_of_start, needs=_READS_IT
    )
    """Hugging Face folder of the reference model. The trainer also starts from this model, unless --load has other
    weights. Default with a KL: the initial weights. If X_torch_dist is only a conversion of X, the run
    reads X instead, or --hf-checkpoint if X does not exist."""


RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.kl_coef and s.kl_loss_coef,
        "kl_coef {s.kl_coef} and kl_loss_coef {s.kl_loss_coef} would apply the KL twice; set only one of them",
    ),
    refuse_if(
        lambda s: s.calculate_per_token_loss and s.loss_aggregation != "token_mean",
        "--calculate-per-token-loss contradicts --loss-aggregation {s.loss_aggregation}; set only one of them",
    ),
)

# --- Critic

_NEEDS = (ADVANTAGES, CRITIC)


def _initial(s: Any) -> str | None:
    return s.initial_weights if estimator_of(s).needs_critic else None


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """PPO's value model. It runs on the training ranks, with the policy's architecture and layout and a scalar head."""

    critic_load: str | None = derived(
        _initial, "the critic starts from the policy's weights", adjust=instead_of_converted, needs=_NEEDS
    )
    """Hugging Face folder of the critic's initial weights. Default: the policy's. The value head starts at zero."""
    critic_lr: float = derived(lambda s: s.megatron["lr"], "lr", needs=_NEEDS, gt=0, le=100)
    """Learning rate of the critic. Default: --lr."""
    num_critic_only_steps: int = opt(0, needs=_NEEDS, asks=is_not_zero, within=STEPS_OR_NONE)
    """Number of initial steps that train only the critic."""


# --- On-policy distillation: a teacher's log-probs as a term of the advantage

_TEACHER = Need(lambda s: s.use_opd, "--use-opd")
_SERVER = Need(lambda s: s.opd_teacher_url is not None, "--opd-teacher-url")


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """On-policy distillation: the student samples, and the teacher scores every token."""

    use_opd: bool = opt(False, needs=ADVANTAGES)
    """Subtract opd_kl_coef * (student - teacher log-prob) from every token's advantage."""
    opd_type: Literal["sglang", "megatron"] | None = opt(None, needs=(ADVANTAGES, _TEACHER))
    """Source of the teacher's log-probs. sglang: the server at --opd-teacher-url, or your generate function or sample
    hook, which sets `sample.teacher_log_probs`. megatron: a forward pass of the trainer with --opd-teacher-load."""
    opd_teacher_url: str | None = derived(
        teacher_of_reward,
        "--rm-url, with the public slime's reward function for distillation",
        form=url_form,
        needs=_TEACHER,
    )
    """URL of the teacher's SGLang server or router, which receives the student's token ids. Makes rewards optional."""
    opd_teacher_api_key: str | None = opt(None, secret=True, needs=_SERVER)
    """Bearer token of the teacher's server."""
    opd_kl_coef: float = opt(1.0, needs=(ADVANTAGES, _TEACHER), within=COEFFICIENT)
    """Weight of the distillation term."""
    opd_teacher_load: str | None = opt(None, adjust=instead_of_converted, needs=(ADVANTAGES, _TEACHER))
    """Hugging Face folder of the teacher, which must have the student's family and size."""


def distillation_has_a_teacher(args: Args) -> str | None:
    if not args.use_opd:
        return None
    if args.opd_type is None:
        return "--use-opd needs --opd-type; set it to sglang (log-probs come with the samples) or megatron"
    if (args.opd_type == "megatron") != bool(args.opd_teacher_load):
        return (
            f"opd_type {args.opd_type} does not match opd_teacher_load {args.opd_teacher_load}: megatron needs the "
            "folder, and sglang does not use one; change one of the two"
        )
    if args.opd_teacher_url and args.opd_type != "sglang":
        return f"opd_teacher_url does not work with opd_type {args.opd_type}: set opd_type sglang, or drop the URL"
    return None


TEACHER_RULES: tuple[Rule, ...] = (distillation_has_a_teacher,)

# --- Off-policy corrections

Level = Literal["token", "sequence", "geometric"]
"""The ratio to compare with the bounds: the token's own, or its sequence's product or geometric mean."""

CORRECTIONS = "slime.algorithms.off_policy:CORRECTIONS"

_OWN_WEIGHTS = Need(
    lambda s: not (s.use_tis and s.custom_tis_function_path is not None),
    "slime's own importance weights; --custom-tis-function-path replaces them",
)
_CORRECTED = Need(
    lambda s: has_policy_term(s) or (s.get_mismatch_metrics and minimises_policy_loss(s)), POLICY_TERM.text
)
_LIST = "off_policy_corrections"


def asked_for(s: Any) -> tuple[str, ...]:
    """Returns the names of the corrections that the switches enable, in the order in which they are applied."""
    found = [(entry.place, name) for name, entry in load_object(CORRECTIONS) if entry.asked_for(s)]
    return tuple(name for _, name in sorted(found))


def _listed(s: Any) -> list[Any]:
    registry = load_object(CORRECTIONS)
    return [registry.get(name) for name in s.off_policy_corrections]


def _as_listed(switch: str) -> Callable[[Any], bool | None]:
    """Derives `switch` from the user's list: whether the list contains its correction; None without a list."""
    return lambda s: any(e.asked_by == switch for e in _listed(s)) if s.was_given(_LIST) else None


def _uses_tis(s: Any) -> bool | None:
    if s.was_given(_LIST):
        return _as_listed("use_tis")(s)
    corrected = s.use_rollout_logprobs or s.rejection_level or s.custom_loss_function_path
    return True if s.fully_async and not corrected and has_policy_term(s) else None


def _why_tis(s: Any) -> str:
    return _BY_LIST if s.was_given(_LIST) else "--fully-async trains tokens of older weights"


_BY_LIST = "--off-policy-corrections"


@dataclass(frozen=True, kw_only=True)
class OffPolicySettings:
    """Weights and masks of the loss, based on the ratio w = p(trainer, before the update) / p(engine)."""

    use_rollout_logprobs: bool = opt(False, needs=ENGINE_LOG_PROBS)
    """Use the engine's log-probs as old log-probs, instead of a forward pass of the trainer."""
    off_policy_corrections: tuple[str, ...] = derived(
        asked_for, "the switches", chosen_from=CORRECTIONS, needs=_CORRECTED
    )
    """Corrections to apply to the per-token policy loss, in this order: names, or import paths of your own. Default:
    those enabled by --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm."""
    use_tis: bool = derived(_uses_tis, _why_tis, default=False, needs=POLICY_TERM)
    """Multiply the policy loss by the importance weight w."""
    rejection_level: Level | None = opt(None, needs=POLICY_TERM)
    """Mask tokens (or whole sequences) whose w is out of bounds; independent of --use-tis."""
    use_opsm: bool = derived(_as_listed("use_opsm"), _BY_LIST, default=False, needs=POLICY_TERM)
    """Mask sequences with a negative advantage and a drift above opsm_delta (DeepSeek-V3.2, arXiv:2512.02556)."""
    get_mismatch_metrics: bool = derived(
        _as_listed("get_mismatch_metrics"), _BY_LIST, default=False, needs=(POLICY_LOSS, _OWN_WEIGHTS)
    )
    """Report the weights of --use-tis without applying them."""


def switches_and_list_agree(args: Args) -> str | None:
    """A list that the user sets must contain each correction at most once, and must not contradict a switch."""
    listed, words = _listed(args), " ".join(args.off_policy_corrections)
    twice = [name for name, entry in zip(args.off_policy_corrections, listed, strict=True) if listed.count(entry) > 1]
    if twice:
        return f"--off-policy-corrections {words} would apply {twice[0]} twice; list it once"
    if not args.was_given(_LIST):
        return None
    acting = {entry.asked_by for entry in listed}
    registry = load_object(CORRECTIONS)
    left_out = [name for name in asked_for(args) if registry.get(name).asked_by not in acting]
    if left_out:
        name = left_out[0]
        return (
            f"{_flag(registry.get(name).asked_by)} would have no effect, because --off-policy-corrections {words} "
            f"does not contain {name}; add {name} to the list, or drop the switch"
        )
    for entry in listed:
        if entry.asked_by and args.was_given(entry.asked_by) and not getattr(args, entry.asked_by):
            return (
                f"{_flag(entry.asked_by, 'no-')} contradicts --off-policy-corrections {words}, which contains "
                f"{entry.name}; remove {entry.name} from the list, or drop the switch"
            )
    return None


def _flag(setting: str, off: str = "") -> str:
    return f"--{off}{setting.replace('_', '-')}"


OFF_POLICY_RULES: tuple[Rule, ...] = (switches_and_list_agree,)

# --- Routing replay: training reuses the experts that the engine or the old policy's pass chose (arXiv:2510.11370)

RECORD = "enable_return_routed_experts"
"""SGLang's switch for returning routed experts."""


def _has_old_pass(s: Any) -> bool:
    """Returns whether the trainer runs a forward pass of the policy before it trains on a batch (`MegatronBackend`)."""
    hooks = s.custom_advantage_function_path or s.rollout_data_postprocess_path or s.custom_loss_logits
    read = s.kl_coef or s.use_opd or hooks or estimator_of(s).reads_log_probs
    several = s.use_dynamic_global_batch_size or s.num_steps_per_rollout > 1
    return bool(several or read or s.keep_old_actor)


_OLD_PASS = Need(
    _has_old_pass,
    "a forward pass of the old policy: several optimizer steps per rollout, --keep-old-actor, or a setting that reads "
    "its log-probs",
)


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Routing of tokens to experts in the policy. Reference, teacher and critic always use their own routers."""

    use_rollout_routing_replay: bool = False
    """In every pass of the trained policy, send each token to the experts chosen by the engine. The trainer still
    computes the routing weights, and routes tokens without recorded experts itself. Sets
    --sglang-enable-return-routed-experts; that flag alone only compares the choices."""
    use_routing_replay: bool = opt(False, needs=_OLD_PASS)
    """In training passes, send each token to the experts chosen by the old policy's pass."""


def _replays(args: Args) -> str | None:
    flags = {
        "use_rollout_routing_replay": args.use_rollout_routing_replay,
        "use_routing_replay": args.use_routing_replay,
    }
    return next((f"--{name.replace('_', '-')}" for name, on in flags.items() if on), None)


def only_experts_are_routed(args: Args) -> str | None:
    flag = _replays(args) or (f"--sglang-{RECORD.replace('_', '-')}" if args.sglang.get(RECORD) else None)
    if flag is None or args.megatron["num_moe_experts"]:
        return None
    return f"{flag} has nothing to route, because the checkpoint is not an MoE model; drop the flag"


def engines_record(args: Args) -> str | None:
    if args.use_rollout_routing_replay and args.sglang.get(RECORD) is False:
        return f"--use-rollout-routing-replay contradicts --no-sglang-{RECORD.replace('_', '-')}; drop one of them"
    lost = {
        "enable_hierarchical_cache": "the KV cache loses its recorded experts when it is moved through host memory",
        "enable_two_batch_overlap": "both halves of a batch would overwrite each other's record",
    }
    if args.sglang.get(RECORD) and int(args.sglang.get("pp_size") or 1) > 1:
        return (
            f"sglang_pp_size {args.sglang['pp_size']} does not work with recording of routed experts: each stage "
            "records only its own layers, and only one stage responds; drop it"
        )
    for name, why in lost.items():
        if args.sglang.get(RECORD) and args.sglang.get(name):
            flag = f"--sglang-{name.replace('_', '-')}"
            return f"{flag} does not work with recording of routed experts: {why}; drop the flag"
    return None


def a_layer_runs_again_with_its_row(args: Args) -> str | None:
    m, flag = args.megatron, _replays(args)
    if flag is None:
        return None
    selective = m["recompute_granularity"] == "selective" and "moe" in (m["recompute_modules"] or ())
    if selective or m["moe_layer_recompute"]:
        return (
            f"{flag} does not work with selective recompute of experts, which cannot tell which row's choices to "
            "replay; use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    return None


ROUTING_RULES: tuple[Rule, ...] = (
    only_experts_are_routed,
    refuse_if(
        lambda s: s.use_rollout_routing_replay and fine_tunes(s),
        "--use-rollout-routing-replay does not work with loss_type sft_loss, where no engine samples; drop the flag",
    ),
    engines_record,
    a_layer_runs_again_with_its_row,
)
ROUTING_PASSED: tuple[Passed, ...] = (
    Passed("sglang", RECORD, lambda s: s.use_rollout_routing_replay or None, "--use-rollout-routing-replay"),
)
