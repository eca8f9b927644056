"""SGLang servers and the router in front; their own flags are --sglang-* and --router-*."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.addresses import is_loopback
from slime.core.errors import ConfigError
from slime.core.layout import EngineLayout
from slime.core.topology import Worker
from slime.settings.engine_layout import layout_of_run
from slime.settings.families import layout_problem_of
from slime.settings.fields import Need, internal, opt
from slime.settings.group import Rule
from slime.settings.topology import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args


_ENGINES = Need(lambda s: not s.debug_train_only, "engines, which --debug-train-only starts none of")
_OWN_ROUTER = Need(
    lambda s: s.sglang_router_ip is None or s.sglang_config is not None,
    "a router that the run starts; --sglang-router-ip names one that runs already",
)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Limits of the inference side."""

    sglang_server_concurrency: int = opt(512, ge=1)
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = opt(600.0, gt=0)
    """Limit of one engine's start, in seconds."""
    request_timeout_s: float = opt(600.0, gt=0)
    """Seconds that a generate request may be without progress: without a new token, and not queueing in an engine that
    makes progress with others. The length of an answer has no limit in seconds."""
    engine_wait_s: float = opt(900.0, gt=0)
    """Seconds that requests wait while no engine can be reached, as when the only one is started again."""
    router_host: str = opt("127.0.0.1", needs=_OWN_ROUTER)
    """Address that the router listens on; it is not that of the engines. Requests carry --router-api-key as their
    bearer token; without one the run makes a key of its own, and others than loopback are refused."""
    router_port: int | None = opt(None, ge=1, le=65535, needs=_OWN_ROUTER)
    """Port of the router. Default: a free one."""
    sglang_router_ip: str | None = opt(None, needs=_ENGINES)
    """Host of a router that runs already, which then serves the policy in place of one that the run starts; its key is
    --router-api-key. Without it set when the policy's router has started."""
    sglang_router_port: int | None = opt(None, ge=1, le=65535, needs=_ENGINES)
    """Port of the router of --sglang-router-ip. Without it set when the policy's router has started."""
    sglang_model_routers: dict[str, tuple[str, int]] | None = internal()
    """By model, host and port of its router; set when they have started."""


UNVERIFIED: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "speculative_algorithm": (None,),
    "enable_eplb": (None, False),
    "init_expert_location": (None, "trivial"),
    "ep_num_redundant_experts": (None, 0),
    "elastic_ep_backend": (None, "none"),
    "moe_a2a_backend": (None, "none"),
    "moe_dp_size": (None, 1),
    "attn_cp_size": (None, 1),
    "enable_prefill_cp": (None, False),
    "enable_dp_attention_local_control_broadcast": (None, False),
    "disaggregation_mode": (None, "null"),
}
"""Settings of SGLang -> values under which its ranks hold what `slime.weights.holding` says, and report it."""


def engines_serve_what_tables_say(args: Args) -> str | None:
    """The trainer knows what each rank of an engine holds, unquantised, with experts in their order."""
    if args.debug_rollout_only or args.debug_train_only:
        return None
    for sglang, where in ((args.sglang, ""), *_of_policy(args)):
        odd = [name for name, plain in UNVERIFIED.items() if sglang.get(name) not in plain]
        if odd:
            return (
                f"got --sglang-{odd[0].replace('_', '-')} {sglang[odd[0]]}{where}: the engine would hold other "
                "tensors than the trainer verifies after each sync; leave it out"
            )
    return None


def _of_policy(args: Args) -> Iterator[tuple[dict[str, Any], str]]:
    """The settings of the policy's groups in `--sglang-config`, and how a message names each."""
    policy = topology_of(args).policy if args.sglang_config is not None else None
    for group in policy.groups if policy is not None else ():
        if group.worker is not Worker.PLACEHOLDER:
            yield {**args.sglang, **group.overrides}, f" for a group of the policy in {args.sglang_config}"


def groups_keep_what_pauses_need(args: Args) -> str | None:
    """Where requests go on under new weights, the prefixes of old ones are in no cache."""
    if args.pause_generation_mode == "abort":
        return None
    for sglang, where in _of_policy(args):
        for name in ("disable_radix_cache", "chunked_prefill_size"):
            if sglang.get(name) != args.sglang.get(name):
                return (
                    f"got {name} {sglang.get(name)}{where} with --pause-generation-mode {args.pause_generation_mode}, "
                    f"under which engines have {args.sglang.get(name)}; leave it out"
                )
        if int(sglang.get("pp_size") or 1) > 1:
            return (
                f"got --pause-generation-mode {args.pause_generation_mode} with pp_size {sglang['pp_size']}{where}: "
                "SGLang goes on serving in pipeline stages while weights change; use abort"
            )
    return None


def engine_has_a_layout(args: Args) -> str | None:
    """Its GPUs divide into pipeline stages, DP groups and groups of experts."""
    if args.debug_train_only or args.rollout_num_gpus_per_engine < 1:
        return None
    try:
        layout_of_run(args)
    except ConfigError as error:
        return str(error)
    return None


def engine_divides_heads(args: Args) -> str | None:
    """SGLang shards heads over the ranks that share attention; on a GPU, fewer KV heads than these are replicated."""
    layout = _layout(args)
    if layout is None:
        return None
    ranks, heads, kv_heads = layout.attention_tp_size, *(args.megatron[name] for name in _HEADS)
    if heads % ranks:
        return (
            f"got engines whose attention {ranks} ranks share ({layout}), which does not divide the {heads} attention "
            "heads; choose a divisor for --rollout-num-gpus-per-engine"
        )
    if kv_heads and args.device == "cuda" and kv_heads % ranks and ranks % kv_heads:
        return (
            f"got engines whose attention {ranks} ranks share ({layout}) for {kv_heads} KV heads, where neither number "
            "divides the other; choose another --rollout-num-gpus-per-engine"
        )
    return None


def engine_holds_the_model(args: Args) -> str | None:
    """SGLang's models differ in what they can be divided by."""
    layout = _layout(args)
    if layout is None or args.debug_rollout_only:
        return None
    problem = layout_problem_of(str(args.hf_checkpoint), layout)
    return f"got engines of {layout} for this checkpoint: {problem}; choose another layout" if problem else None


def groups_need_a_gpu(args: Args) -> str | None:
    """On a CPU SGLang loads experts apart and DP attention, and fails at the first request."""
    layout = _layout(args)
    if layout is None or args.device == "cuda" or layout.ep_size == layout.dp_size == 1:
        return None
    name = "ep_size" if layout.ep_size > 1 else "dp_size"
    return (
        f"got sglang_{name} {getattr(layout, name)} on a CPU, where SGLang's plain kernels know neither experts of "
        "other ranks nor DP attention; leave it out there"
    )


def stages_abort(args: Args) -> str | None:
    """SGLang's loop of pipeline stages takes no notice of a pause that keeps requests."""
    layout = _layout(args)
    if layout is None or layout.pp_size == 1 or args.pause_generation_mode == "abort":
        return None
    return (
        f"got --pause-generation-mode {args.pause_generation_mode} with --sglang-pp-size {layout.pp_size}: SGLang goes "
        "on serving in pipeline stages while weights change; use abort"
    )


_HEADS = ("num_attention_heads", "num_query_groups")


def _layout(args: Args) -> EngineLayout | None:
    """Of the engines of the run; None where there are none, or where `engine_has_a_layout` complains."""
    if args.debug_train_only or engine_has_a_layout(args) is not None or args.rollout_num_gpus_per_engine < 1:
        return None
    return layout_of_run(args)


def strangers_need_a_key(args: Args) -> str | None:
    """Whoever reaches the router can use the engines, and add engines of his own."""
    if args.debug_train_only or args.router.get("api_key") or is_loopback(args.router_host):
        return None
    return (
        f"got router_host {args.router_host} without --router-api-key: everybody who reaches this host could use the "
        "engines; give a key, or leave the router on loopback"
    )


def an_existing_router_is_named_whole(args: Args) -> str | None:
    """Host, port and key say where it is and let the run add its engines."""
    ip, port = args.sglang_router_ip, args.sglang_router_port
    if (ip is None) != (port is None):
        given, missing = ("ip", "port") if port is None else ("port", "ip")
        return f"got --sglang-router-{given} alone; give --sglang-router-{missing}, too"
    if ip is None or args.router.get("api_key"):
        return None
    return (
        "got --sglang-router-ip without --router-api-key: a router that asks for no key lets anybody add servers, "
        "which are then sent the requests with the engines' key; start it with --api-key KEY, and give that here, too"
    )


def one_key(args: Args) -> str | None:
    """The router hands the key of a request on to the engines."""
    keys = {args.router.get("api_key"), args.sglang.get("api_key")} - {None}
    if len(keys) < 2:
        return None
    return "got a --router-api-key and another --sglang-api-key: requests carry one key for both; give one of them"


RULES: tuple[Rule, ...] = (
    engine_has_a_layout,
    engine_divides_heads,
    engine_holds_the_model,
    engines_serve_what_tables_say,
    groups_keep_what_pauses_need,
    groups_need_a_gpu,
    stages_abort,
    strangers_need_a_key,
    an_existing_router_is_named_whole,
    one_key,
)
