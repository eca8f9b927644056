"""The learning algorithm: rewards, advantages, the policy loss, KL, entropy, aggregation; the critic, distillation from
a teacher, off-policy corrections, and experts that are chosen once.
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
    minimises_policy_loss,
)
from slime.settings.fields import Need, Passed, Rule, derived, is_not_zero, opt
from slime.settings.flags import COEFFICIENT, STEPS_OR_NONE
from slime.settings.groups.hooks import teacher_of_reward

if TYPE_CHECKING:
    from slime.settings.args import Args

# The learning algorithm: rewards, advantages, the policy loss, KL, entropy, aggregation.

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


# What the algorithm's settings cannot mean together.


def kl_is_in_one_place(args: Args) -> str | None:
    """In the reward or in the loss."""
    if args.kl_coef and args.kl_loss_coef:
        return (
            f"got kl_coef {args.kl_coef} with kl_loss_coef {args.kl_loss_coef}, which would hold the policy to the "
            "reference twice; give one of them"
        )
    return None


def aggregation_is_said_once(args: Args) -> str | None:
    """The public switch and the setting do not contradict each other."""
    if not args.calculate_per_token_loss or args.loss_aggregation == "token_mean":
        return None
    return f"got --calculate-per-token-loss with --loss-aggregation {args.loss_aggregation}; give one of them"


RULES: tuple[Rule, ...] = (
    kl_is_in_one_place,
    aggregation_is_said_once,
)

# The critic of an advantage estimator that has one (ppo): a value model on the trainer's own ranks.

_NEEDS = (ADVANTAGES, CRITIC)


def _initial(s: Any) -> str | None:
    return s.initial_weights if estimator_of(s).needs_critic else None


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """A second model of the policy's architecture with a scalar head; it has the same parallel layout."""

    critic_load: str | None = derived(_initial, "the critic starts from the policy's weights", needs=_NEEDS)
    """HF folder that the critic starts from. Default: that of the policy. Its value head starts at zero."""
    critic_lr: float = derived(lambda s: s.megatron["lr"], "lr", needs=_NEEDS, gt=0, le=100)
    """Learning rate of the critic. Default: --lr."""
    num_critic_only_steps: int = opt(0, needs=_NEEDS, asks=is_not_zero, within=STEPS_OR_NONE)
    """First steps that train the critic alone."""


# On-policy distillation: a teacher's log-probs as a term of the advantage.

_TEACHER = Need(lambda s: s.use_opd, "--use-opd")
_SERVER = Need(lambda s: s.opd_teacher_url is not None, "--opd-teacher-url")


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """The student samples, the teacher judges every token."""

    use_opd: bool = opt(False, needs=ADVANTAGES)
    """Subtract opd_kl_coef * (student - teacher log-prob) from every token's advantage."""
    opd_type: Literal["sglang", "megatron"] | None = opt(None, needs=(ADVANTAGES, _TEACHER))
    """Where the teacher's log-probs come from: sglang, the server --opd-teacher-url (or the generate function or sample
    hook that writes `sample.teacher_log_probs`); megatron, a forward pass of the trainer under --opd-teacher-load."""
    opd_teacher_url: str | None = derived(
        teacher_of_reward, "--rm-url, with the public reward function of distillation", needs=_TEACHER
    )
    """SGLang server or router of the teacher, which reads the student's token ids. Rewards are then optional."""
    opd_teacher_api_key: str | None = opt(None, secret=True, needs=_SERVER)
    """Bearer token that the server asks for."""
    opd_kl_coef: float = opt(1.0, needs=(ADVANTAGES, _TEACHER), within=COEFFICIENT)
    """Weight of the term."""
    opd_teacher_load: str | None = opt(None, needs=(ADVANTAGES, _TEACHER))
    """HF folder of the teacher, of the student's family and size."""


def distillation_has_a_teacher(args: Args) -> str | None:
    """The teacher is named, and only once."""
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


TEACHER_RULES: tuple[Rule, ...] = (distillation_has_a_teacher,)

# Corrections for tokens that another distribution sampled than the one that is trained.
#
# What acts is --off-policy-corrections. Where that is not given, the switches make the list; where it is given, it says
# what the switches are. So settings and run agree either way.

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio is compared: the token's own, the product over its sequence, or the geometric mean of it."""

CORRECTIONS = "slime.algorithms.off_policy:CORRECTIONS"
"""The registry of corrections, which stands above the settings."""

_OWN_WEIGHTS = Need(
    lambda s: not (s.use_tis and s.custom_tis_function_path is not None),
    "slime's own weights; --custom-tis-function-path replaces them",
)
_CORRECTED = Need(
    lambda s: has_policy_term(s) or (s.get_mismatch_metrics and minimises_policy_loss(s)), POLICY_TERM.text
)
_LIST = "off_policy_corrections"


def asked_for(s: Any) -> tuple[str, ...]:
    """The corrections that the switches ask for, in the order in which they act."""
    found = [(entry.place, name) for name, entry in load_object(CORRECTIONS) if entry.asked_for(s)]
    return tuple(name for _, name in sorted(found))


def _listed(s: Any) -> list[Any]:
    """The entries that the settings name."""
    registry = load_object(CORRECTIONS)
    return [registry.get(name) for name in s.off_policy_corrections]


def _as_listed(switch: str) -> Callable[[Any], bool | None]:
    """Whether a given list has a correction of that switch; None without a list."""
    return lambda s: any(e.asked_by == switch for e in _listed(s)) if s.was_given(_LIST) else None


def _uses_tis(s: Any) -> bool | None:
    if s.was_given(_LIST):
        return _as_listed("use_tis")(s)
    corrected = s.use_rollout_logprobs or s.rejection_level or s.custom_loss_function_path
    return True if s.fully_async and not corrected and has_policy_term(s) else None


def _why_tis(s: Any) -> str:
    return _BY_LIST if s.was_given(_LIST) else "--fully-async trains on tokens of older weights"


_BY_LIST = "--off-policy-corrections"


@dataclass(frozen=True, kw_only=True)
class OffPolicySettings:
    """Weights and masks by w = p(trainer, before the update) / p(engine)."""

    use_rollout_logprobs: bool = opt(False, needs=ENGINE_LOG_PROBS)
    """The engine's log-probs are the old policy, instead of a forward pass of the trainer."""
    off_policy_corrections: tuple[str, ...] = derived(
        asked_for, "the switches", chosen_from=CORRECTIONS, needs=_CORRECTED
    )
    """What acts on the policy loss of tokens, in this order: names, or import paths of your own. Default: what
    --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm ask for."""
    use_tis: bool = derived(_uses_tis, _why_tis, default=False, needs=POLICY_TERM)
    """Multiply the policy loss by the importance weight w."""
    rejection_level: Level | None = opt(None, needs=POLICY_TERM)
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    use_opsm: bool = derived(_as_listed("use_opsm"), _BY_LIST, default=False, needs=POLICY_TERM)
    """Leave out sequences with a negative advantage that drifted by more than opsm_delta (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    get_mismatch_metrics: bool = derived(
        _as_listed("get_mismatch_metrics"), _BY_LIST, default=False, needs=(POLICY_LOSS, _OWN_WEIGHTS)
    )
    """Report the weights of --use-tis without applying them."""


def switches_and_list_agree(args: Args) -> str | None:
    """What the switches ask for is in a given list, once; what is switched off is not."""
    listed, words = _listed(args), " ".join(args.off_policy_corrections)
    twice = [name for name, entry in zip(args.off_policy_corrections, listed, strict=True) if listed.count(entry) > 1]
    if twice:
        return f"got --off-policy-corrections {words}, which would apply {twice[0]} twice; name it once"
    if not args.was_given(_LIST):
        return None
    acting = {entry.asked_by for entry in listed}
    registry = load_object(CORRECTIONS)
    left_out = [name for name in asked_for(args) if registry.get(name).asked_by not in acting]
    if left_out:
        name = left_out[0]
        return (
            f"got {_flag(registry.get(name).asked_by)} with --off-policy-corrections {words}, which does not name "
            f"{name}: it would not act; add {name} to the list, or drop the switch"
        )
    for entry in listed:
        if entry.asked_by and args.was_given(entry.asked_by) and not getattr(args, entry.asked_by):
            return (
                f"got {_flag(entry.asked_by, 'no-')} with --off-policy-corrections {words}, which names {entry.name}; "
                "take it from the list, or drop the switch"
            )
    return None


def _flag(setting: str, off: str = "") -> str:
    return f"--{off}{setting.replace('_', '-')}"


OFF_POLICY_RULES: tuple[Rule, ...] = (switches_and_list_agree,)

# Experts that are chosen once: by the engine that samples, or by the old policy's pass (arXiv:2510.11370).

RECORD = "enable_return_routed_experts"
"""SGLang's switch."""


def _has_old_pass(s: Any) -> bool:
    """Whether the trainer evaluates the policy before it trains on a batch (`MegatronBackend`)."""
    hooks = s.custom_advantage_function_path or s.rollout_data_postprocess_path
    read = s.kl_coef or s.use_opd or hooks or estimator_of(s).reads_log_probs
    several = s.use_dynamic_global_batch_size or s.num_steps_per_rollout > 1
    return bool(several or read or s.keep_old_actor)


_OLD_PASS = Need(
    _has_old_pass,
    "a pass of the old policy: several optimizer steps per rollout, --keep-old-actor, or what reads its log-probs",
)


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """Which experts the trained policy's tokens go to. Reference, teacher and critic always route by themselves."""

    use_rollout_routing_replay: bool = False
    """The trainer sends each token to the experts that the engine chose for it, in every pass of the trained policy;
    what they weigh stays its own. Tokens without a record go where the trainer would send them. Engines are started
    with --sglang-enable-return-routed-experts; with that flag alone the choices are compared only."""
    use_routing_replay: bool = opt(False, needs=_OLD_PASS)
    """Trained passes send each token to the experts that the pass of the old policy chose."""


def _replays(args: Args) -> str | None:
    flags = {
        "use_rollout_routing_replay": args.use_rollout_routing_replay,
        "use_routing_replay": args.use_routing_replay,
    }
    return next((f"--{name.replace('_', '-')}" for name, on in flags.items() if on), None)


def only_experts_are_routed(args: Args) -> str | None:
    """A dense model has no choice to make."""
    flag = _replays(args) or (f"--sglang-{RECORD.replace('_', '-')}" if args.sglang.get(RECORD) else None)
    if flag is None or args.megatron["num_moe_experts"]:
        return None
    return f"got {flag} for a checkpoint without experts, whose tokens all go one way; drop the flag"


def something_was_sampled(args: Args) -> str | None:
    """Texts that are learned as they are were routed by nobody."""
    if args.use_rollout_routing_replay and fine_tunes(args):
        return "got --use-rollout-routing-replay with loss_type sft_loss, for which no engine samples; drop the flag"
    return None


def engines_record(args: Args) -> str | None:
    """Engines return what they chose, unless that is switched off, or they lose it."""
    if args.use_rollout_routing_replay and args.sglang.get(RECORD) is False:
        return f"got --use-rollout-routing-replay with --no-sglang-{RECORD.replace('_', '-')}; drop one of them"
    lost = {
        "enable_hierarchical_cache": "keys and values that come back from the host have lost their record",
        "enable_two_batch_overlap": "both halves of a batch would be recorded in one place",
    }
    if args.sglang.get(RECORD) and int(args.sglang.get("pp_size") or 1) > 1:
        return (
            f"got sglang_pp_size {args.sglang['pp_size']} with routed experts, because each stage of an engine records "
            "the layers that it has, and one of them answers; leave it out"
        )
    for name, why in lost.items():
        if args.sglang.get(RECORD) and args.sglang.get(name):
            return f"got --sglang-{name.replace('_', '-')} with routed experts, because {why}; drop the flag"
    return None


def a_layer_runs_again_with_its_row(args: Args) -> str | None:
    """A router learns from its layer which row it routes."""
    m, flag = args.megatron, _replays(args)
    if flag is None:
        return None
    selective = m["recompute_granularity"] == "selective" and "moe" in (m["recompute_modules"] or ())
    if selective or m["moe_layer_recompute"]:
        return (
            f"got {flag} with a selective recompute of experts, which runs them again without the row that they are "
            "of; use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    if m["enable_cuda_graph"] or m["external_cuda_graph"] or m["cuda_graph_impl"] != "none":
        return f"got {flag} with CUDA graphs of layers, which would replay the choices of one row for all; drop them"
    return None


ROUTING_RULES: tuple[Rule, ...] = (
    only_experts_are_routed,
    something_was_sampled,
    engines_record,
    a_layer_runs_again_with_its_row,
)
ROUTING_PASSED: tuple[Passed, ...] = (
    Passed("sglang", RECORD, lambda s: s.use_rollout_routing_replay or None, "--use-rollout-routing-replay"),
)
