"""Settings for the weight sync, and for engines that serve quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.hf_config import quantisation_of, read_hf_config
from slime.core.registry import load_object
from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.settings.fields import UNSET, Adjusted, Need, Rule, derived, opt, refuse_if
from slime.settings.flags import SECONDS

if TYPE_CHECKING:
    from slime.settings.args import Args

TRANSPORTS = "slime.weights.transports:TRANSPORTS"

AGENTS = Need(
    lambda s: (
        s.update_weight_transport == "disk" and getattr(s, "update_weight_local_checkpoint_dir", None) is not None
    ),
    "--update-weight-transport disk and --update-weight-local-checkpoint-dir",
)
"""The condition under which agents on the engines' hosts copy weights to local disks."""


def _separate(s: Any) -> bool:
    """Returns whether some engine may be unable to access the trainer's memory."""
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
        return "some engines share GPUs with the trainer, others do not"
    if not _separate(s):
        return "trainer and engines share memory"
    if s.rollout_external_engine_addrs:
        return "the run did not start the engines"
    return "trainer and engines have separate GPUs" if s.device == "cuda" else "an engine may be on a different host"


def _hands_memory_over(s: Any) -> bool:
    return bool(s.offload_train and s.offload_rollout and s.update_weight_transport in ("tensor", "mixed"))


def _one_name(value: Any) -> Any:
    """Replaces an alias of a transport with its name. Keeps import paths and nccl; `auto` counts as not set."""
    if value == "auto":
        return UNSET
    known = load_object(TRANSPORTS)
    return known.get(value).name if value in known and value != _NCCL else value


_NCCL = "nccl"
"""The public slime's name for all transports but the disk: NCCL, or shared memory on shared GPUs."""


def _of_nccl(value: Any, s: Any) -> Adjusted | None:
    if value != _NCCL:
        return None
    if s.device == "cuda" and policy_shares_gpus(s):
        return Adjusted("mixed" if policy_has_own_gpus(s) else "tensor", "nccl, but some engines share GPUs with it")
    return Adjusted("distributed", "nccl")


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """The weight sync. Every sync is verified; verification cannot be disabled."""

    update_weight_transport: str = derived(
        _transport, _why, chosen_from=TRANSPORTS, canonical=_one_name, adjust=_of_nccl
    )
    """How weights are sent. tensor: shared memory, on cuda only with --colocate. distributed: a process group, gloo or
    NCCL. disk: a shared folder. mixed: tensor for engines on GPUs of training ranks, distributed for the others. nccl:
    distributed, but tensor or mixed for engines that share GPUs with the trainer. Or the import path of your own
    transport. auto (default): mixed on cuda if only some engines of the policy share GPUs with the trainer; distributed
    if none do, or if an engine may be on a different host; else tensor."""
    update_weight_mode: str = opt("full", choices=("full", "delta"))
    """full: every weight sync sends all weights. delta: a sync sends only the bit-exact changes since the last one, as
    files of the disk transport; the first sync of a launch and one in every --update-weight-full-interval are full."""
    update_weight_folder_only: bool = opt(False, needs=AGENTS)
    """Agents also pause and resume the engines and report digests through the shared folder. For engines whose control
    routes the trainer cannot reach."""
    check_weight_update_equal: bool = True
    """Every weight sync is verified, with or without this flag."""
    update_weight_buffer_size: int = derived(
        lambda s: 2 * 1024**3 if s.device == "cuda" and _hands_memory_over(s) else None,
        "the GPU is mostly free during a weight sync, and each bucket adds overhead",
        default=512 * 1024**2,
        ge=1,
        le=1024**4,
    )
    """Bytes per bucket."""
    weight_sync_timeout_s: float = opt(300.0, within=SECONDS)
    """Time limit of each engine call during a weight sync (pause, join, receive a bucket, load), in seconds."""


def agents_are_on_one_host(args: Args) -> str | None:
    on_a_host = args.num_gpus_per_node or args.rollout_num_gpus_per_engine
    wide = args.rollout_num_gpus_per_engine > on_a_host
    if getattr(args, "update_weight_local_checkpoint_dir", None) is None or not wide:
        return None
    return (
        "--update-weight-local-checkpoint-dir does not work with engines that span several hosts "
        f"(rollout_num_gpus_per_engine {args.rollout_num_gpus_per_engine}), because an engine's agent copies weights "
        "to only one host; use --update-weight-transport distributed"
    )


RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.update_weight_mode == "delta" and s.update_weight_transport != "disk",
        "--update-weight-mode delta does not work with --update-weight-transport {s.update_weight_transport}: deltas "
        "are files in a shared folder; use disk, or drop the transport",
    ),
    refuse_if(
        lambda s: not s.check_weight_update_equal,
        "--no-check-weight-update-equal is not supported, because every weight sync is verified; drop it",
    ),
    agents_are_on_one_host,
)

# --- Quantised engines

NOT_LOADED = frozenset({("fp8", "llama")})
"""(quantisation, model_type) pairs whose scales SGLang leaves uninitialised, because it looks up the wrong name."""


def _is_quantised(s: Any) -> bool:
    return s.hf_checkpoint is not None and quantisation_of(read_hf_config(s.hf_checkpoint)) is not None


_QUANTISED = Need(_is_quantised, "a quantised --hf-checkpoint (quantization_config in its config.json)")


@dataclass(frozen=True, kw_only=True)
class QuantisedSettings:
    """Trainer settings for quantised engines. --hf-checkpoint defines the format; see docs/quantised_engines.md."""

    trainer_weights: Literal["plain", "fake-quantised"] = opt("plain", asks=lambda v: v != "plain", needs=_QUANTISED)
    """Weights of the trainer's linear layers in the forward pass. plain: in the training dtype. fake-quantised:
    quantised and dequantised as in the engines (QAT), with a straight-through gradient."""


def engines_take_quantised_weights(args: Args) -> str | None:
    """Quantised engines serve weights in the format of --hf-checkpoint, which requires GPU kernels and a loader."""
    config = read_hf_config(args.hf_checkpoint)
    found = quantisation_of(config)
    if args.debug_train_only or found is None:
        return None
    method, family = found.get("quant_method"), config.get("model_type")
    plain = "run `slime convert IN OUT --to bf16`, and use OUT"
    if args.device == "cpu":
        return (
            f"hf_checkpoint {args.hf_checkpoint} is quantised ({method}), but SGLang has no kernels for it on a CPU; "
            f"{plain}"
        )
    if args.sglang["dtype"] != "bfloat16":
        return (
            f"sglang_dtype {args.sglang['dtype']} does not work with hf_checkpoint {args.hf_checkpoint}, which is "
            f"quantised ({method}), so engines compute in bfloat16; set --sglang-dtype bfloat16"
        )
    if (method, family) in NOT_LOADED:
        return (
            f"hf_checkpoint {args.hf_checkpoint} is a {family} model in {method}, whose scales SGLang 0.5.16 does not "
            f"load; {plain}"
        )
    if args.rollout_external_engine_addrs:
        return (
            f"hf_checkpoint {args.hf_checkpoint} is quantised ({method}), but external engines do not report "
            f"codes and scales; let slime start them, or {plain}"
        )
    return None


QUANTISED_RULES: tuple[Rule, ...] = (
    engines_take_quantised_weights,
    refuse_if(
        lambda s: s.trainer_weights != "plain" and s.lora_rank is not None,
        "--trainer-weights {s.trainer_weights} does not work with --lora-rank {s.lora_rank}: engines quantise weights "
        "with merged adapters, but the trainer adds adapters after the layer; drop one of them",
    ),
)
