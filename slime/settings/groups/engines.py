"""Settings for the engines: servers, router, topology and speculative decoding, with rules for every group of engines.

Flags of SGLang and the router are --sglang-* and --router-*.

Prefix caches. A cached prefix is valid only for the weights that computed it (laws 1 and 2). With
`--pause-generation-mode abort` each weight sync flushes the cache. With `retract` and `in_place` the cache keys depend
on the weights (`slime.compat.sglang_version_prefixes`). Some caches of SGLang 0.5.16 ignore both. Stores outside the
engine's memory are keyed only by tokens, are shared by engines and runs, and survive a flush, so an engine whose
weights change cannot use one. Other caches are flushed but ignore this part of the key: the C++ tree, and streaming
sessions, which keep prefixes outside the tree. The hierarchical cache in host memory is not known to respect it.

Drafts. An engine's draft model is the checkpoint's own multi-token-prediction layer. If that layer is trained, every
weight sync sends and verifies it. A draft from a different folder would silently become stale, so it is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.core.processes import is_loopback
from slime.core.topology import PAIRED, EngineGroup, EngineLayout, ServedModel
from slime.settings.conditions import requests_continue, shares_gpus
from slime.settings.fields import Need, Passed, Rule, internal, is_not_zero, opt, refuse_if
from slime.settings.flags import COUNT, FRACTION, PORT, SECONDS, host_form, require_key
from slime.settings.schema import layout_problem_of, mtp_problem_of
from slime.settings.topology_yaml import layout_of_group, read_addresses, settings_of_group, topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

_ENGINES = Need(lambda s: not s.debug_train_only, "engines; --debug-train-only starts none")
_OWN_ROUTER = Need(
    lambda s: s.sglang_router_ip is None or s.sglang_config is not None,
    "a router that the run starts; --sglang-router-ip selects an existing one",
)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Limits of engines, and the router."""

    sglang_server_concurrency: int = opt(512, within=COUNT)
    """Maximum number of requests in flight per engine."""
    rollout_concurrency: str = opt("fixed", choices=("fixed", "adaptive"), needs=_ENGINES)
    """Requests in flight per engine. fixed: sglang_server_concurrency. adaptive: at most that many; the number follows
    what each engine reports. It rises while the engine has no queue and its KV cache has room, and falls if requests
    queue in the engine or lose their memory."""
    rollout_concurrency_max_kv_use: float = opt(
        0.9,
        within=FRACTION,
        needs=Need(lambda s: s.rollout_concurrency == "adaptive", "--rollout-concurrency adaptive"),
    )
    """Fraction of an engine's KV cache in use from which its number of requests does not rise."""
    engine_start_timeout_s: float = opt(600.0, within=SECONDS)
    """Seconds that a starting engine may go without a sign of life: no computation, no log output. Startup always fails
    after five times as long. On a busy machine the limits are longer (docs/fault_tolerance.md). Also limits every other
    wait during startup: for slots, hosts, rollout workers and training ranks."""
    request_timeout_s: float = opt(600.0, within=SECONDS)
    """Seconds that a generate request may go without progress: no new token, and not queued in an engine that makes
    progress with other requests. The total time of a response is not limited."""
    engine_wait_s: float = opt(900.0, within=SECONDS)
    """Seconds that requests wait while no engine can be reached, for example while the only engine restarts."""
    router_host: str = opt("127.0.0.1", form=host_form, needs=_OWN_ROUTER)
    """Address that the router listens on; engines have their own. Requests need --router-api-key (@FILE reads the key
    from a file) as the bearer token. Without that flag, the run generates a key, and this must be a loopback
    address."""
    router_port: int | None = opt(None, needs=_OWN_ROUTER, within=PORT)
    """Port of the router. Default: a free port. A router is started by `slime serve`, by any --router-* flag, and for
    user code, which may read the router's address. The run's own requests go directly to the engines."""
    sglang_router_ip: str | None = opt(None, form=host_form, needs=_ENGINES)
    """Host of an existing router that serves the policy; the run then does not start one for the policy. The router's
    key is --router-api-key. Default: when the run starts a router for the policy (--router-port), it sets this to the
    router's host."""
    sglang_router_port: int | None = opt(None, needs=_ENGINES, within=PORT)
    """Port of the router at --sglang-router-ip, with the same default."""
    sglang_model_routers: dict[str, tuple[str, int]] | None = internal()
    """Model -> host and port of its router. Set once the routers have started; None if there are none."""


def strangers_need_a_key(args: Args) -> str | None:
    """A router outside loopback needs a key. Without one, anyone could use the engines and add servers."""
    if args.debug_train_only or args.router.get("api_key") or is_loopback(args.router_host):
        return None
    return (
        f"router_host {args.router_host} needs --router-api-key: anyone who can reach this host could use the "
        "engines; set a key (--router-api-key @FILE), or keep the router on loopback"
    )


def an_existing_router_is_named_whole(args: Args) -> str | None:
    ip, port = args.sglang_router_ip, args.sglang_router_port
    if (ip is None) != (port is None):
        given, missing = ("ip", "port") if port is None else ("port", "ip")
        return f"--sglang-router-{given} needs --sglang-router-{missing}; set both"
    if ip is None or args.router.get("api_key"):
        return None
    return (
        "--sglang-router-ip needs --router-api-key: a router without a key lets anyone add servers, which then get "
        "requests with the engines' key; start the router with --api-key KEY, and set the same key here"
    )


def one_key(args: Args) -> str | None:
    """Router and engines need the same key, because the router forwards each request's key to the engines."""
    keys = {args.router.get("api_key"), args.sglang.get("api_key")} - {None}
    if len(keys) < 2:
        return None
    return "--router-api-key differs from --sglang-api-key, but requests use one key for both; set only one of them"


def keys_need_one_front_door(args: Args) -> str | None:
    """SGLang 0.5.16 checks keys in a single process, so it does not support several tokenizer processes with a key."""
    num_workers = args.sglang.get("tokenizer_worker_num") or 1
    if num_workers == 1 or args.debug_train_only:
        return None
    return (
        f"--sglang-tokenizer-worker-num {num_workers} is not supported: SGLang cannot check keys with several "
        "tokenizer processes, and slime's engines always need a key; drop it"
    )


RULES: tuple[Rule, ...] = (
    strangers_need_a_key,
    an_existing_router_is_named_whole,
    one_key,
    keys_need_one_front_door,
)

# --- Rules for every group of engines. Without `--sglang-config`, flags define one group. With it, messages include the
# group's location in the file. External engines report their own layout (`slime.fleet.fitting`).

UNVERIFIED: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "enable_eplb": (None, False),
    "init_expert_location": (None, "trivial"),
    "ep_num_redundant_experts": (None, 0),
    "elastic_ep_backend": (None, "none"),
    "moe_a2a_backend": (None, "none"),  # with deepep, each rank holds the full shared experts
    "moe_dp_size": (None, 1),
    "attn_cp_size": (None, 1),
    "enable_prefill_cp": (None, False),
    "enable_dp_attention_local_control_broadcast": (None, False),
}
"""SGLang setting -> values for which ranks hold and report the tensors that `slime.weights.holding` expects."""


@dataclass(frozen=True, slots=True)
class _Engines:
    """A group of running engines, with its settings."""

    model: ServedModel
    group: EngineGroup
    sglang: Mapping[str, Any]
    """ServerArgs by field name: the run's, with the group's overrides."""

    def told(self, problem: str) -> str:
        """Returns the problem, preceded by the group's location in the file."""
        return f"{self.group.place}: {problem}" if self.group.place else problem


def _engines(args: Args) -> Iterator[_Engines]:
    """Yields all groups that run engines. Skips sizes below 1, which the range check reports."""
    for model in topology_of(args).models:
        for group in model.groups:
            if group.runs and group.num_gpus_per_engine > 0:
                yield _Engines(model, group, settings_of_group(args, group))


def synced_engines(args: Args) -> Iterator[_Engines]:
    """Returns the groups that get weights from the trainer."""
    return (engines for engines in _engines(args) if engines.model.trained and not args.debug_rollout_only)


def _laid_out(args: Args, all_engines: Iterator[_Engines]) -> Iterator[tuple[_Engines, EngineLayout]]:
    """Yields each group with its layout. Skips invalid layouts, which `engines_have_a_layout` reports."""
    for engines in all_engines:
        try:
            layout = layout_of_group(args, engines.model, engines.group)
        except ConfigError:
            continue
        yield engines, layout


def engines_have_a_layout(args: Args) -> str | None:
    for engines in _engines(args):
        try:
            layout_of_group(args, engines.model, engines.group)
        except ConfigError as error:
            return engines.told(str(error))
    return None


def engines_divide_heads(args: Args) -> str | None:
    """SGLang shards heads over the ranks that share attention. On a GPU it replicates KV heads if there are too few."""
    for engines, layout in _laid_out(args, _engines(args)):
        ranks, (heads, kv_heads) = layout.attention_tp_size, _heads(args, engines.model)
        if heads % ranks:
            return engines.told(
                f"the {ranks} ranks of an engine that share attention ({layout}) do not divide the {heads} attention "
                "heads; choose a different number of GPUs per engine"
            )
        if kv_heads and args.device == "cuda" and kv_heads % ranks and ranks % kv_heads:
            return engines.told(
                f"an engine has {ranks} ranks that share attention ({layout}) and {kv_heads} KV heads, but neither "
                "number divides the other; choose a different number of GPUs per engine"
            )
    return None


def _heads(args: Args, model: ServedModel) -> tuple[int, int]:
    """Returns the numbers of attention heads and KV heads; 0 if the checkpoint does not define them."""
    if model.path == args.hf_checkpoint:
        return int(args.megatron["num_attention_heads"]), int(args.megatron["num_query_groups"] or 0)
    if not (Path(model.path) / "config.json").is_file():  # `models_are_folders` reports the problem
        return 0, 0
    config = read_hf_config(model.path)
    return int(config.get("num_attention_heads") or 0), int(config.get("num_key_value_heads") or 0)


def engines_divide_the_model(args: Args) -> str | None:
    for engines, layout in _laid_out(args, synced_engines(args)):
        if problem := layout_problem_of(engines.model.path, layout):
            return engines.told(
                f"engines of {layout} cannot hold this checkpoint: {problem}; choose a different layout"
            )
    return None


def engines_serve_what_tables_say(args: Args) -> str | None:
    for engines in synced_engines(args):
        odd = [name for name, plain in UNVERIFIED.items() if engines.sglang.get(name) not in plain]
        if odd:
            return engines.told(
                f"--sglang-{odd[0].replace('_', '-')} {engines.sglang[odd[0]]} is not supported: the engine would not "
                "hold the tensors that the trainer verifies after each sync; drop it"
            )
    return None


def engines_need_a_gpu(args: Args) -> str | None:
    """On a CPU, SGLang starts with expert parallelism or DP attention but fails at the first request."""
    for engines, layout in _laid_out(args, _engines(args)):
        if args.device == "cpu" and max(layout.ep_size, layout.dp_size) > 1:
            name = "ep_size" if layout.ep_size > 1 else "dp_size"
            return engines.told(
                f"sglang_{name} {getattr(layout, name)} does not work on a CPU, where SGLang's kernels support "
                "neither expert parallelism nor DP attention; drop it"
            )
    return None


def engines_pause(args: Args) -> str | None:
    """If requests continue with new weights, chunked prefill and pipeline stages are not supported."""
    mode = args.pause_generation_mode
    if not requests_continue(args):
        return None
    for engines in _engines(args):
        if not engines.model.trained:
            continue
        name = "chunked_prefill_size"
        if engines.sglang.get(name) != args.sglang.get(name):
            return engines.told(
                f"{name} is {engines.sglang.get(name)}, but --pause-generation-mode {mode} needs "
                f"{args.sglang.get(name)}; drop it"
            )
        if int(engines.sglang.get("pp_size") or 1) > 1:
            return engines.told(
                f"--pause-generation-mode {mode} does not work with sglang_pp_size {engines.sglang['pp_size']}: "
                "SGLang's pipeline stages do not pause while weights change; use abort"
            )
    return None


_SAME_KERNELS: Mapping[str, tuple[Any, ...]] = {
    "attention_backend": (None, "triton"),
    "decode_attention_backend": (None, "triton"),
    "prefill_attention_backend": (None, "triton"),
    "kv_cache_dtype": (None, "auto"),
    "moe_runner_backend": (None, "auto", "triton"),
    "moe_a2a_backend": (None, "none"),
    "quantization": (None,),
    "speculative_algorithm": (None,),
    "enable_fp32_lm_head": (None, False),
    "enable_torch_compile": (None, False),
    "enable_lora": (None, False),
    "rl_on_policy_target": (None,),
}
"""SGLang setting -> values with which an engine can match the trainer bit for bit."""


def engines_can_be_true_on_policy(args: Args) -> str | None:
    if not args.true_on_policy:
        return None
    for engines, layout in _laid_out(args, synced_engines(args)):
        if layout.num_ranks > 1:
            return engines.told(
                f"--true-on-policy needs engines of one GPU, but these are {layout}; drop one of the two"
            )
        dtype = str(engines.sglang.get("dtype"))
        dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
        if dtype != args.megatron["params_dtype"]:
            return engines.told(f"--true-on-policy needs engines of dtype {args.megatron['params_dtype']}, not {dtype}")
        for name, same in _SAME_KERNELS.items():
            if args.device == "cuda" and engines.sglang.get(name) not in same:
                flag = f"--sglang-{name.replace('_', '-')} {engines.sglang[name]}"
                return engines.told(f"--true-on-policy does not work with {flag}; drop one of the two")
    return None


ENGINE_RULES: tuple[Rule, ...] = (
    engines_have_a_layout,
    engines_divide_heads,
    engines_divide_the_model,
    engines_serve_what_tables_say,
    engines_need_a_gpu,
    engines_pause,
    engines_can_be_true_on_policy,
)

# --- Pairs of engines: a prefill engine processes prompts, a decode engine samples


def prefill_engines_are_some_of_all(args: Args) -> str | None:
    """--prefill-num-servers takes engines from the single group, and must leave some for decode."""
    if args.prefill_num_servers is None or args.debug_train_only:
        return None
    flag = f"--prefill-num-servers {args.prefill_num_servers}"
    if args.sglang_config is not None:
        return (
            f"{flag} does not work with --sglang-config, whose worker_type selects the prefill engines; drop one of "
            "the two"
        )
    if args.rollout_external_engine_addrs:
        return (
            f"{flag} does not work with --rollout-external-engine-addrs, because the run does not start those "
            "engines; drop one of the two"
        )
    engines = args.rollout_num_gpus // max(1, args.rollout_num_gpus_per_engine)
    if args.prefill_num_servers < engines:
        return None
    return (
        f"{flag} leaves no engine for decode, because the run has {engines} engine{'s' * (engines != 1)}; lower it, "
        "or raise --rollout-num-gpus"
    )


def pairs_work(args: Args) -> str | None:
    """Refuses settings that SGLang does not support with pairs, or that are untested with them."""
    if args.debug_train_only or prefill_engines_are_some_of_all(args) is not None:
        return None
    for model in topology_of(args).models:
        if model.in_pairs and (found := next(_against_pairs(args, model), None)) is not None:
            setting, why = found
            return f"{setting} does not work with prefill and decode engines of model {model.name}: {why}"
    return None


def _against_pairs(args: Args, model: ServedModel) -> Iterator[tuple[str, str]]:
    if model.trained and requests_continue(args):
        yield (
            f"--pause-generation-mode {args.pause_generation_mode}",
            "a KV cache of old weights could reach an engine with new weights, and tokens would get the wrong version; "
            "use abort",
        )
    if args.rollout_concurrency == "adaptive":
        yield (
            "--rollout-concurrency adaptive",
            "a queue at one engine of a pair can be due to the other, so it does not say which limit to lower; drop it",
        )
    if args.offload_rollout and shares_gpus(args, model):
        yield (
            "--offload-rollout (implied by --colocate on a GPU)",
            "their memory stays registered with the network and cannot be released; use separate GPUs for them",
        )
    if args.sglang_router_ip is not None and topology_of(args).main == model:
        yield "--sglang-router-ip", "an existing router sends each request to one engine; drop it"
    for group in model.groups:
        if group.worker in PAIRED:
            yield from _against_group(args, group)


def _against_group(args: Args, group: EngineGroup) -> Iterator[tuple[str, str]]:
    sglang = settings_of_group(args, group)
    for name, what in (("pp_size", "pipeline stages"), ("dp_size", "DP attention")):
        if int(sglang.get(name) or 1) > 1:
            yield f"{name} {sglang[name]}", f"pairs with {what} are not tested; drop it"
    if sglang.get("enable_return_routed_experts"):
        yield (
            "enable_return_routed_experts (implied by --use-rollout-routing-replay)",
            "the prompt's routed experts stay on the prefill engine; drop it",
        )
    if sglang.get("disaggregation_transfer_backend") == "fake":
        yield "disaggregation_transfer_backend fake", "no KV cache would be transferred; use mooncake"


PAIR_RULES: tuple[Rule, ...] = (prefill_engines_are_some_of_all, pairs_work)

# --- Prefix caches

STORES: Mapping[str, str] = {
    "hicache_storage_backend": "the hierarchical cache's store",
    "enable_lmcache": "the LMCache store",
    "enable_flexkv": "the FlexKV store",
    "radix_cache_backend": "the plugin's cache",
}
"""SGLang setting -> the cache that it switches on, which survives a flush."""
UNDIVIDED: Mapping[str, str] = {
    "enable_hierarchical_cache": "the cache in host memory",
    "enable_streaming_session": "the streaming session's cache",
}
"""SGLang setting -> the cache that it switches on, which a flush empties but whose keys ignore the weights."""
CPP_TREE_ENV = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
"""The environment variable that selects SGLang's C++ prefix tree."""
_OFF = (None, False, "")


def kept_prefixes(sglang: Mapping[str, Any], *, divided: bool) -> Iterator[str]:
    """Yields a message for each engine setting that would keep prefixes of old weights.

    `sglang` holds ServerArgs by field name; `divided` is whether requests continue through weight syncs.
    """
    for name, what in STORES.items():
        if sglang.get(name) not in _OFF:
            yield (
                f"{_flag(name, sglang[name])} would serve prefixes of old weights under new ones: {what} is keyed "
                "only by tokens and survives a flush; drop it"
            )
    for name, what in UNDIVIDED.items():
        if divided and sglang.get(name) not in _OFF:
            yield (
                f"{_flag(name, sglang[name])} would serve prefixes of old weights under new ones: {what} is not keyed "
                "by weights, and cannot be flushed while requests continue through a weight sync; drop it, or use "
                "--pause-generation-mode abort"
            )


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def engines_forget_old_weights(args: Args) -> str | None:
    """A prefix computed with old weights must never be used with new ones."""
    divided = requests_continue(args)
    for engines in synced_engines(args):
        for problem in kept_prefixes(engines.sglang, divided=divided):
            return engines.told(f"--sglang-{problem.removeprefix('--')}")
        tree = os.environ.get(CPP_TREE_ENV, "")
        if divided and tree.lower() in ("true", "1", "yes", "y") and not engines.sglang.get("disable_radix_cache"):
            return engines.told(
                f"{CPP_TREE_ENV}={tree} in the environment does not work with --pause-generation-mode "
                f"{args.pause_generation_mode}: SGLang's C++ tree ignores the key that separates prefixes of old and "
                "new weights; unset the variable, or use --pause-generation-mode abort"
            )
    return None


PREFIX_CACHE_RULES: tuple[Rule, ...] = (engines_forget_old_weights,)

# --- Topologies of several models or groups


@dataclass(frozen=True, kw_only=True)
class TopologySettings:
    """Models and groups of engines (docs/serving_topology.md)."""

    sglang_config: str | None = opt(None, needs=_ENGINES)
    """YAML file of models (the policy and frozen models) and of the engine groups that serve each model. Hooks find a
    model by name: `current().models["judge"]`."""
    prefill_num_servers: int | None = opt(None, needs=_ENGINES, within=COUNT)
    """Number of prefill engines, which process prompts and pass the KV cache to the other engines, which sample."""
    rollout_external_engine_addrs: tuple[str, ...] = opt((), asks=is_not_zero, needs=_ENGINES)
    """HOST:PORT of existing SGLang servers that serve the policy; the run does not start engines. Or @FILE, a file with
    one address per line, which the run reads again when it changes, so engines can join and leave. The servers' key is
    --sglang-api-key or the environment variable SLIME_ENGINE_API_KEY. If weight updates have a separate key, it is
    --sglang-admin-api-key or SLIME_ENGINE_ADMIN_API_KEY."""


def topology_adds_up(args: Args) -> str | None:
    if args.sglang_config is None or args.debug_train_only:
        return None
    total = topology_of(args).num_gpus
    if total == args.rollout_num_gpus:
        return None
    return (
        f"rollout_num_gpus is {args.rollout_num_gpus}, but the groups in {args.sglang_config} have {total} GPUs; drop "
        "--rollout-num-gpus, or make the two equal"
    )


def models_are_folders(args: Args) -> str | None:
    if args.sglang_config is None:
        return None
    others = [model for model in topology_of(args).models if model.path != args.hf_checkpoint]
    absent = next((model for model in others if not (Path(model.path) / "config.json").is_file()), None)
    if absent is None:
        return None
    return (
        f"{args.sglang_config}: the model_path {absent.path} of model {absent.name} has no config.json; pass a "
        "Hugging Face folder"
    )


def external_engines_have_addresses(args: Args) -> str | None:
    """Checks only the form of the addresses; parsing a command line contacts no engine."""
    try:
        read_addresses(args.rollout_external_engine_addrs)
    except ConfigError as error:
        return str(error)
    return None


def external_engines_are_the_fleet(args: Args) -> str | None:
    if not args.rollout_external_engine_addrs:
        return None
    for flag, why in _against_external_engines(args):
        return f"--rollout-external-engine-addrs does not work with {flag}: {why}"
    return None


def _against_external_engines(args: Args) -> Iterator[tuple[str, str]]:
    if args.colocate:
        yield "--colocate", "external engines do not release memory; drop one of the two"
    if args.sglang_config is not None:
        yield "--sglang-config", "the file describes engines to start, but the run starts none; drop one of the two"
    if args.update_weight_transport == "tensor" and not args.debug_rollout_only:
        yield (
            "--update-weight-transport tensor",
            "an external server may not have access to shared memory of the trainer's host; use distributed, or disk "
            "with a folder that the engines can read",
        )


ENGINE_KEY_ENV, ADMIN_KEY_ENV = "SLIME_ENGINE_API_KEY", "SLIME_ENGINE_ADMIN_API_KEY"
"""Environment variables for the engines' keys. Other users of the host cannot read them, unlike a command line."""


def _of_environment(name: str) -> Callable[[Any], str | None]:
    def key(s: Any) -> str | None:
        found = os.environ.get(name) if s.rollout_external_engine_addrs else None
        if found:
            require_key(found, name)
        return found or None

    return key


TOPOLOGY_PASSED: tuple[Passed, ...] = (
    Passed("sglang", "api_key", _of_environment(ENGINE_KEY_ENV), ENGINE_KEY_ENV),
    Passed("sglang", "admin_api_key", _of_environment(ADMIN_KEY_ENV), ADMIN_KEY_ENV),
)

TOPOLOGY_RULES: tuple[Rule, ...] = (
    topology_adds_up,
    models_are_folders,
    external_engines_have_addresses,
    external_engines_are_the_fleet,
)

# --- Multi-token prediction and speculative decoding

ALGORITHM = "speculative_algorithm"
"""SGLang's setting that enables drafts."""
_EXPERTS = "enable_return_routed_experts"
PLAIN_DRAFT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    ALGORITHM: ((None, "EAGLE", "NEXTN"), "the draft must be a multi-token-prediction layer; use NEXTN"),
    "speculative_draft_model_path": ((None,), "the draft is the checkpoint's own layer, which is synced; drop it"),
    "speculative_draft_model_quantization": ((None, "unquant"), "a draft is only verified unquantised; drop it"),
    "speculative_token_map": ((None,), "the draft would have only part of the output layer; drop it"),
    **dict.fromkeys(
        ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        ((None, 1.0), "tokens would no longer be sampled from the policy; drop it"),
    ),
    "enable_multi_layer_eagle": ((None, False), "only one draft layer is synced; drop it"),
    _EXPERTS: ((None, False), "routed experts with a draft are not tested; drop it"),
}
"""SGLang setting -> its allowed values with a draft, and the reason."""


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """Training of the multi-token-prediction layer. With --sglang-speculative-... flags, engines use it as a draft."""

    enable_mtp_training: bool = False
    """Also train the checkpoint's multi-token-prediction layer. The policy's gradients do not change, because hidden
    states, embedding and output layer are detached for this layer's loss, which is scaled by --mtp-loss-scaling-factor.
    Without the flag, the layer keeps the checkpoint's weights."""


def mtp_can_be_trained(args: Args) -> str | None:
    if not args.enable_mtp_training:
        return None
    wrong = "--enable-mtp-training does not work with"
    if (problem := mtp_problem_of(args.hf_checkpoint)) is not None:
        return f"{wrong} this checkpoint: {problem}; drop the flag"
    if args.use_prefix_sharing:
        return f"{wrong} --use-prefix-sharing, where a token can have several successors; drop one of them"
    if args.lora_rank:
        return f"{wrong} --lora-rank, which trains only adapters; drop one of them"
    return None


def drafts_are_synced(args: Args) -> str | None:
    """A draft must be a layer that the trainer syncs, and tokens must still be sampled from the policy."""
    for engines in synced_engines(args):
        if engines.sglang.get(ALGORITHM) is None:
            continue
        found = next(_against(args, engines.sglang), None)
        if found is not None:
            return engines.told(f"{found[0]} does not work with speculative decoding: {found[1]}")
    return None


def _against(args: Args, sglang: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, (allowed, why) in PLAIN_DRAFT.items():
        given = sglang.get(name)
        if name == "speculative_draft_model_path" and given == args.hf_checkpoint:
            continue
        if (str(given).upper() if name == ALGORITHM else given) not in allowed:
            flag = "--use-rollout-routing-replay" if name == _EXPERTS else f"--sglang-{name.replace('_', '-')} {given}"
            yield flag, why
    if args.device == "cpu":
        yield "--device cpu", "SGLang's drafts need GPU kernels; drop --sglang-speculative-..."
    if int(sglang.get("pp_size") or 1) > 1:
        yield f"sglang_pp_size {sglang['pp_size']}", "SGLang's drafts do not support pipeline stages; drop it"
    if requests_continue(args):
        yield (
            f"--pause-generation-mode {args.pause_generation_mode}",
            "engines do not report a version per token for several tokens of one pass; use abort",
        )
    if (problem := mtp_problem_of(args.hf_checkpoint)) is not None:
        yield "this checkpoint", f"{problem}; drop --sglang-speculative-..."


def _keeps_draft(s: Any) -> bool | None:
    """Keeps an untrained draft in host memory, because a release would lose it and no weight sync resends it."""
    serves_one = s.given(f"sglang.{ALGORITHM}") is not None
    return True if serves_one and s.offload_rollout and not s.enable_mtp_training else None


SPECULATION_RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.megatron["mtp_num_layers"] not in (None, 1),
        "mtp_num_layers is {s.megatron[mtp_num_layers]}, but only one multi-token-prediction layer is trained and "
        "served; drop it",
    ),
    mtp_can_be_trained,
    drafts_are_synced,
)
SPECULATION_PASSED: tuple[Passed, ...] = (
    Passed("sglang", "enable_draft_weights_cpu_backup", _keeps_draft, "an untrained draft is not sent again"),
)
