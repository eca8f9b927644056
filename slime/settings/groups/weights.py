"""How new weights reach the engines, also those that serve quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.hf_config import quantisation_of, read_hf_config
from slime.core.registry import load_object
from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.settings.fields import UNSET, Need, Rule, derived, opt
from slime.settings.flags import SECONDS

if TYPE_CHECKING:
    from slime.settings.args import Args

# How new weights reach the engines.

TRANSPORTS = "slime.weights.transports:TRANSPORTS"
"""The registry of transports, which stands above the settings."""


AGENTS = Need(
    lambda s: (
        s.update_weight_transport == "disk" and getattr(s, "update_weight_local_checkpoint_dir", None) is not None
    ),
    "--update-weight-transport disk and --update-weight-local-checkpoint-dir",
)
"""Agents beside engines bring weights to their hosts."""


def _separate(s: Any) -> bool:
    """Whether an engine may be where it cannot see the trainer's memory."""
    if s.rollout_external_engine_addrs:
        return True
    if s.device == "cuda":
        return policy_has_own_gpus(s)
    if s.colocate:
        return s.actor_num_nodes > 1 or (s.ray_address is not None and policy_has_own_gpus(s))
    return s.ray_address is not None


def _of_both_kinds(s: Any) -> bool:
    return bool(s.device == "cuda" and policy_shares_gpus(s) and policy_has_own_gpus(s))


def _transport(s: Any) -> str:
    if s.update_weight_mode == "delta":
        return "disk"
    if _of_both_kinds(s):
        return "mixed"
    return "distributed" if _separate(s) else "tensor"


def _why(s: Any) -> str:
    if s.update_weight_mode == "delta":
        return "deltas are files in a shared folder"
    if _of_both_kinds(s):
        return "some engines share GPUs with the trainer, others have their own"
    if not _separate(s):
        return "trainer and engines share memory"
    if s.rollout_external_engine_addrs:
        return "somebody else started the engines"
    return "trainer and engines have GPUs of their own" if s.device == "cuda" else "an engine may be on another host"


def _hands_memory_over(s: Any) -> bool:
    return bool(s.offload_train and s.offload_rollout and s.update_weight_transport in ("tensor", "mixed"))


def _one_name(value: Any) -> Any:
    """The first name of a registered transport; a path stays as it is."""
    if value == "auto":
        return UNSET
    known = load_object(TRANSPORTS)
    return known.get(value).name if value in known else value


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """Weight sync. Every sync is verified; there is no switch for that."""

    update_weight_transport: str = derived(
        _transport,
        _why,
        chosen_from=TRANSPORTS,
        canonical=_one_name,
    )
    """tensor: shared memory, on cuda only under --colocate; distributed (alias nccl): a process group, gloo or NCCL;
    disk: a shared folder; mixed: tensor for the engines on GPUs of training ranks, distributed for the others; or the
    import path of a transport of your own. auto, by where the engines of the policy are: mixed on cuda where
    there are both kinds, distributed on cuda where all have GPUs of their own and where one may be on another host,
    else tensor."""
    update_weight_mode: str = opt("full", choices=("full", "delta"))
    """full: every weight sync sends all weights. delta: what changed since the one before, as files of the disk
    transport, exact to the bit; the first of a start, and one in --update-weight-full-interval, is full."""
    update_weight_folder_only: bool = opt(False, needs=AGENTS)
    """Engines are paused, asked for their digests and let go on through the shared folder, too, by the agents beside
    them: for engines whose control routes the trainer does not reach."""
    check_weight_update_equal: bool = True
    """Every weight sync is verified, with or without this flag; it cannot be switched off."""
    update_weight_buffer_size: int = derived(
        lambda s: 2 * 1024**3 if s.device == "cuda" and _hands_memory_over(s) else None,
        "little else is on the GPU during a weight sync, and each bucket costs time",
        default=512 * 1024**2,
        ge=1,
        le=1024**4,
    )
    """Bytes per bucket."""
    weight_sync_timeout_s: float = opt(300.0, within=SECONDS)
    """Limit of each call to an engine in a weight sync, in seconds: to pause, to join, to take a bucket, to load."""


def deltas_are_files(args: Args) -> str | None:
    """Only the disk transport knows the version before."""
    if args.update_weight_mode != "delta" or args.update_weight_transport == "disk":
        return None
    return (
        f"got --update-weight-mode delta with --update-weight-transport {args.update_weight_transport}: deltas are "
        "files in a shared folder; use disk, or leave the transport out"
    )


def every_sync_is_verified(args: Args) -> str | None:
    """The public flag asks for what always happens."""
    if args.check_weight_update_equal:
        return None
    return "got --no-check-weight-update-equal: every weight sync is verified, there is no other kind; leave it out"


def agents_are_on_one_host(args: Args) -> str | None:
    """An engine on several hosts would need a copy on each."""
    on_a_host = args.num_gpus_per_node or args.rollout_num_gpus_per_engine
    wide = args.rollout_num_gpus_per_engine > on_a_host
    if getattr(args, "update_weight_local_checkpoint_dir", None) is None or not wide:
        return None
    return (
        f"got --update-weight-local-checkpoint-dir with engines of {args.rollout_num_gpus_per_engine} GPUs, which are "
        "on several hosts: the agent beside the first one would have no copy on the others; use "
        "--update-weight-transport distributed"
    )


RULES: tuple[Rule, ...] = (deltas_are_files, every_sync_is_verified, agents_are_on_one_host)

# Engines that serve quantised weights, and what the trainer computes with beside them.

NOT_LOADED = frozenset({("fp8", "llama")})
"""(quantisation, model) whose scales SGLang looks for under another name, and leaves undefined."""


def _is_quantised(s: Any) -> bool:
    return s.hf_checkpoint is not None and quantisation_of(read_hf_config(s.hf_checkpoint)) is not None


_QUANTISED = Need(_is_quantised, "a quantised --hf-checkpoint (quantization_config in its config.json)")


@dataclass(frozen=True, kw_only=True)
class QuantisedSettings:
    """--hf-checkpoint says whether engines serve quantised weights, and in which format; see docs/quantised.md."""

    trainer_weights: Literal["plain", "fake-quantised"] = opt("plain", asks=lambda v: v != "plain", needs=_QUANTISED)
    """What the trainer's linear layers compute with. plain: its weights in the training dtype. fake-quantised: what
    engines will make of them, quantised and dequantised in each forward pass (QAT); gradients go to the weights as they
    are."""


def engines_take_quantised_weights(args: Args) -> str | None:
    """Engines serve --hf-checkpoint in its own format, which needs kernels of a GPU and loaders that know it."""
    config = read_hf_config(args.hf_checkpoint)
    found = quantisation_of(config)
    if args.debug_train_only or found is None:
        return None
    method, family = found.get("quant_method"), config.get("model_type")
    plain = "do: slime convert IN OUT --to bf16, and give OUT"
    if args.device == "cpu":
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, which is quantised ({method}), on a CPU, for which SGLang has no "
            f"such kernels; {plain}"
        )
    if args.sglang["dtype"] != "bfloat16":
        return (
            f"got sglang_dtype {args.sglang['dtype']} with hf_checkpoint {args.hf_checkpoint}, which is quantised "
            f"({method}): engines then compute in bfloat16; give --sglang-dtype bfloat16"
        )
    if (method, family) in NOT_LOADED:
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, a {family} in {method}, of which SGLang 0.5.16 does not load the "
            f"scales; {plain}"
        )
    if args.rollout_external_engine_addrs:
        return (
            f"got hf_checkpoint {args.hf_checkpoint}, which is quantised ({method}), with engines that run already, "
            f"which do not report codes and scales; let slime start them, or {plain}"
        )
    return None


def fake_quantised_weights_are_trained(args: Args) -> str | None:
    """Adapters are added behind a layer: engines quantise the sum."""
    if args.trainer_weights == "plain" or args.lora_rank is None:
        return None
    return (
        f"got --trainer-weights {args.trainer_weights} with --lora-rank {args.lora_rank}: engines quantise weights "
        "with their adapters in them, the trainer adds these behind; leave one of them out"
    )


QUANTISED_RULES: tuple[Rule, ...] = (engines_take_quantised_weights, fake_quantised_weights_are_trained)
