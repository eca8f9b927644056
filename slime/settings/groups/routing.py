"""Experts that are chosen once: by the engine that samples, or by the old policy's pass (arXiv:2510.11370)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.conditions import estimator_of, fine_tunes
from slime.settings.fields import Need, opt
from slime.settings.group import Passed, Rule

if TYPE_CHECKING:
    from slime.settings.args import Args

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


RULES: tuple[Rule, ...] = (
    only_experts_are_routed,
    something_was_sampled,
    engines_record,
    a_layer_runs_again_with_its_row,
)
PASSED: tuple[Passed, ...] = (
    Passed("sglang", RECORD, lambda s: s.use_rollout_routing_replay or None, "--use-rollout-routing-replay"),
)
