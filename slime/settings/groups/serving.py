"""SGLang servers and the router in front; their own flags are --sglang-* and --router-*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.core.processes import is_loopback
from slime.settings.fields import Need, internal, opt
from slime.settings.group import Rule
from slime.settings.ranges import COUNT, PORT, SECONDS

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

    sglang_server_concurrency: int = opt(512, within=COUNT)
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = opt(600.0, within=SECONDS)
    """Seconds that an engine that starts may be without a sign of life: without computing, and without a line in its
    log. Five times as long ends any start; more on a busy machine (docs/fleet.md). Also the limit of each other wait of
    the start: for slots, hosts, workers of the rollout and training ranks."""
    request_timeout_s: float = opt(600.0, within=SECONDS)
    """Seconds that a generate request may be without progress: without a new token, and not queueing in an engine that
    makes progress with others. The length of an answer has no limit in seconds."""
    engine_wait_s: float = opt(900.0, within=SECONDS)
    """Seconds that requests wait while no engine can be reached, as when the only one is started again."""
    router_host: str = opt("127.0.0.1", needs=_OWN_ROUTER)
    """Address that the router listens on; it is not that of the engines. Requests carry --router-api-key (@FILE reads
    it from a file) as their bearer token; without one the run makes a key of its own, and others than loopback are
    refused."""
    router_port: int | None = opt(None, needs=_OWN_ROUTER, within=PORT)
    """Port of the router. Default: a free one."""
    sglang_router_ip: str | None = opt(None, needs=_ENGINES)
    """Host of a router that runs already, which then serves the policy in place of one that the run starts; its key is
    --router-api-key. Without it set when the policy's router has started."""
    sglang_router_port: int | None = opt(None, needs=_ENGINES, within=PORT)
    """Port of the router of --sglang-router-ip. Without it set when the policy's router has started."""
    sglang_model_routers: dict[str, tuple[str, int]] | None = internal()
    """By model, host and port of its router; set when they have started."""


def strangers_need_a_key(args: Args) -> str | None:
    """Whoever reaches the router can use the engines, and add engines of his own."""
    if args.debug_train_only or args.router.get("api_key") or is_loopback(args.router_host):
        return None
    return (
        f"got router_host {args.router_host} without --router-api-key: everybody who reaches this host could use the "
        "engines; give a key (--router-api-key @FILE), or leave the router on loopback"
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


def keys_need_one_front_door(args: Args) -> str | None:
    """SGLang 0.5.16 asks for keys in one process of the server alone, and does not start with both."""
    num_workers = args.sglang.get("tokenizer_worker_num") or 1
    if num_workers == 1 or args.debug_train_only:
        return None
    return (
        f"got --sglang-tokenizer-worker-num {num_workers}, with which SGLang knows no keys, and engines always ask for "
        "one; leave it out"
    )


RULES: tuple[Rule, ...] = (
    strangers_need_a_key,
    an_existing_router_is_named_whole,
    one_key,
    keys_need_one_front_door,
)
