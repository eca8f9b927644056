"""What engines that work in pairs, one reading prompts and one sampling, ask of the other settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.core.topology import PAIRED, EngineGroup, ServedModel
from slime.settings.conditions import shares_gpus
from slime.settings.engine_layout import settings_of_group
from slime.settings.group import Rule
from slime.settings.topology import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args


def prefill_engines_are_some_of_all(args: Args) -> str | None:
    """They are taken from the engines of one group, and leave some that sample."""
    if args.prefill_num_servers is None or args.debug_train_only:
        return None
    got = f"got --prefill-num-servers {args.prefill_num_servers}"
    if args.sglang_config is not None:
        return f"{got} with --sglang-config, which says by worker_type which engines read prompts; drop one of the two"
    if args.rollout_external_engine_addrs:
        return f"{got} with --rollout-external-engine-addrs, and the run starts no engine; drop one of the two"
    engines = args.rollout_num_gpus // max(1, args.rollout_num_gpus_per_engine)
    if args.prefill_num_servers < engines:
        return None
    return (
        f"{got} of {engines} engine{'s' * (engines != 1)}, which leaves none that samples; lower it, or give a larger "
        "--rollout-num-gpus"
    )


def pairs_work(args: Args) -> str | None:
    """Nothing is asked of pairs that SGLang does for single engines alone, or that nobody has tried."""
    if args.debug_train_only or prefill_engines_are_some_of_all(args) is not None:
        return None
    for model in topology_of(args).models:
        if model.in_pairs and (found := next(_against_pairs(args, model), None)) is not None:
            setting, why = found
            return f"got {setting} with prefill and decode engines for model {model.name}: {why}"
    return None


def _against_pairs(args: Args, model: ServedModel) -> Iterator[tuple[str, str]]:
    if model.trained and args.pause_generation_mode != "abort":
        yield (
            f"--pause-generation-mode {args.pause_generation_mode}",
            "keys and values that one engine read under old weights could reach another one that has new ones, and the "
            "version of such a token would be wrong; use abort",
        )
    if args.offload_rollout and shares_gpus(args, model):
        yield (
            "--offload-rollout (which --colocate means on a GPU)",
            "their memory is registered with the network for good, and cannot be lent; give them GPUs of their own",
        )
    if args.sglang_router_ip is not None and topology_of(args).main == model:
        yield "--sglang-router-ip", "a router that runs already sends a request to one engine; leave it out"
    for group in model.groups:
        if group.worker in PAIRED:
            yield from _against_group(args, group)


def _against_group(args: Args, group: EngineGroup) -> Iterator[tuple[str, str]]:
    sglang = settings_of_group(args, group)
    for name, what in (("pp_size", "pipeline stages"), ("dp_size", "DP attention")):
        if int(sglang.get(name) or 1) > 1:
            yield f"{name} {sglang[name]}", f"that pairs divide into {what} alike is not verified; leave it out"
    if sglang.get("enable_return_routed_experts"):
        yield (
            "enable_return_routed_experts (which --use-rollout-routing-replay means)",
            "the experts of the prompt stay with the engine that read it; leave it out",
        )
    if sglang.get("disaggregation_transfer_backend") == "fake":
        yield "disaggregation_transfer_backend fake", "nothing would be handed over; use mooncake"


RULES: tuple[Rule, ...] = (prefill_engines_are_some_of_all, pairs_work)
