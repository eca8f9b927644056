"""Flags of public launch scripts that repeat the checkpoint, or what the trainer does in any case.

A flag that agrees is taken. One that contradicts the checkpoint is refused; one that acts on nothing here is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.hf_config import read_hf_config
from slime.settings.fields import Need, Rule, opt
from slime.settings.flags import COUNT, FRACTION, TOKENS
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC, SFT_ROLLOUT
from slime.settings.schema import has_output_norms

if TYPE_CHECKING:
    from slime.settings.args import Args

_SPECS = "slime_plugins.models."
"""Package of the layer specs that public scripts name."""
_SPEC_TYPES: Mapping[str, tuple[str, ...]] = {
    "glm5": ("glm_moe_dsa",),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "qwen3_vl": ("qwen3_vl_text",),
}
"""Module of a spec -> `model_type` of its models, where that is another word."""

_OWN_FUNCTION = Need(
    lambda s: s.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT, FULLY_ASYNC),
    "a --rollout-function-path of your own, which reads it",
)


def _without(text: str) -> Need:
    return Need(lambda s: False, text)


_PADDING = _without("a vocabulary that is padded; the trainer's is the checkpoint's")
_ROWS = _without("rows that are padded; a packed one is as long as its samples")
_UNREAD = _without("code that reads it; the public slime has none either")
_ALWAYS = "a choice: "


@dataclass(frozen=True, kw_only=True)
class LaunchScriptSettings:
    """What a public launch script says beside the settings above; docs/migration.md."""

    spec: tuple[str, ...] | None = None
    """Layer spec: module and function. That of the checkpoint's family is taken; layers of your own are a
    --model-family."""
    model_name: str | None = None
    """Name of the weight converter. That of the checkpoint's model_type is taken."""
    train_backend: str = opt("megatron", choices=("megatron",))
    """The trainer; there is one."""
    distributed_backend: str | None = opt(None, choices=("nccl", "gloo"))
    """Backend of the training ranks' collectives. Default: nccl on cuda, gloo on cpu; nothing else is taken."""
    rollout_data_transport: str = opt("object-store", choices=("object-store",))
    """How batches reach training ranks: by Ray's object store."""
    use_rotary_position_embeddings: bool = False
    """Positions are rotary, as in every family."""
    no_position_embedding: bool = False
    """No embedding of positions is added to that of words, as in every family."""
    use_rope_scaling: bool = False
    """Rotary scaling of Llama 3; config.json says it."""
    use_gated_attention: bool = False
    """Attention with a gate on its output; config.json says it."""
    post_self_attn_layernorm: bool = False
    """A norm on the output of attention; the family says it."""
    post_mlp_layernorm: bool = False
    """A norm on the output of the MLP; the family says it."""
    freeze_indexer: bool = False
    """Leave the indexer of sparse attention as it is, which the trainer does in any case."""
    make_vocab_size_divisible_by: int | None = opt(None, needs=_PADDING, within=TOKENS)
    """Padding of the vocabulary."""
    padded_vocab_size: int | None = opt(None, needs=_PADDING, within=TOKENS)
    """Size of the padded vocabulary."""
    data_pad_size_multiplier: int | None = opt(None, needs=_ROWS, within=TOKENS)
    """Padding of packed rows."""
    enable_experimental: bool = opt(False, needs=_without("Megatron-LM's launcher; its parts are enabled where needed"))
    """Experimental parts of Megatron."""
    allgather_cp: bool = opt(
        False, needs=_without(f"{_ALWAYS}keys and values are always gathered over context-parallel ranks")
    )
    """Layout of sequences over context-parallel ranks for sparse attention."""
    recompute_loss_function: bool = opt(
        False, needs=_without(f"{_ALWAYS}log-probs are computed again in the backward pass, chunk by chunk")
    )
    """Compute the loss again in the backward pass."""
    use_rollout_entropy: bool = opt(
        False, needs=_without(f"{_ALWAYS}train/entropy_loss is measured in the update, by the policy loss")
    )
    """Measure the entropy before the update."""
    loss_mask_type: str | None = opt(
        None,
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
        needs=_without(f"{_ALWAYS}the chat template itself says which tokens the model writes"),
    )
    """Rules by which fine-tuning finds the answers in a conversation."""
    log_multi_turn: bool = opt(False, needs=_without(f"{_ALWAYS}turns and tool calls are always logged"))
    """Log turns of multi-turn samples."""
    wandb_always_use_train_step: bool = opt(False, needs=_without(f"{_ALWAYS}a metric is logged under its own step"))
    """Log everything under the number of optimizer steps."""
    ref_micro_batch_size: int | None = opt(None, needs=_UNREAD, within=COUNT)
    """Samples per forward pass of the reference."""
    log_probs_max_tokens_per_gpu: int | None = opt(None, needs=_UNREAD, within=TOKENS)
    """Most tokens in a forward pass that only computes log-probs."""
    min_batch_collection_ratio: float | None = opt(None, needs=_UNREAD, within=FRACTION)
    """Part of a batch that has to be there."""
    http_proxy: str | None = opt(None, needs=_UNREAD)
    """Proxy of requests."""
    rollout_buffer_url: str | None = opt(None, needs=_OWN_FUNCTION)
    """Address of a rollout buffer: args.rollout_buffer_url of your rollout function."""
    rollout_task_type: str = opt("math", needs=_OWN_FUNCTION)
    """Kind of its tasks: args.rollout_task_type."""
    fetch_trajectory_retry_times: int = opt(-1, needs=_OWN_FUNCTION, ge=-1, le=1_000_000)
    """How often it asks again: args.fetch_trajectory_retry_times."""


def spec_is_the_checkpoint_s(args: Args) -> str | None:
    """Layers are those of the checkpoint's family."""
    if not args.spec:
        return None
    words = " ".join(args.spec)
    config = read_hf_config(args.hf_checkpoint)
    name = args.spec[0].removeprefix(_SPECS).split(".")[0]
    if args.spec[0].startswith(_SPECS) and config.get("model_type") in _SPEC_TYPES.get(name, (name,)):
        return None
    if name.endswith("_vl"):
        return f"got --spec {words}, a model of images and text; layers are those of the checkpoint: drop the flag"
    return (
        f"got --spec {words} for a checkpoint of model_type {config.get('model_type')}, whose layers are those of its "
        "family; drop the flag, or give a family of your own with --model-family"
    )


def name_is_the_checkpoint_s(args: Args) -> str | None:
    """Weights are converted by the checkpoint's family."""
    if args.model_name is None:
        return None
    config = read_hf_config(args.hf_checkpoint)
    types = [str(config.get(key) or "") for key in ("model_type", "wrapper_type")]
    if _plain(args.model_name) in [_plain(one.removesuffix("_text")) for one in types]:
        return None
    return (
        f"got --model-name {args.model_name} for a checkpoint of model_type {types[0]}, by which its weights are "
        "converted; drop the flag"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def layers_are_the_checkpoint_s(args: Args) -> str | None:
    """Switches of layers say what the checkpoint says."""
    scaling = args.megatron["rope_scaling"] or {}
    norms = has_output_norms(args.hf_checkpoint)
    says: dict[str, Any] = {
        "use_rope_scaling": (scaling.get("rope_type") or scaling.get("type")) == "llama3",
        "use_gated_attention": args.megatron["attention_output_gate"],
        "post_self_attn_layernorm": norms,
        "post_mlp_layernorm": norms,
    }
    wrong = [f"--{name.replace('_', '-')}" for name, there in says.items() if getattr(args, name) and not there]
    if not wrong:
        return None
    return f"got {' and '.join(wrong)}, which the model of this checkpoint does not have; drop the flag"


def backend_is_the_device_s(args: Args) -> str | None:
    """Collectives run where tensors are."""
    wanted = "gloo" if args.device == "cpu" else "nccl"
    if args.distributed_backend in (None, wanted):
        return None
    return f"got --distributed-backend {args.distributed_backend} on {args.device}, which needs {wanted}; drop the flag"


RULES: tuple[Rule, ...] = (
    spec_is_the_checkpoint_s,
    name_is_the_checkpoint_s,
    layers_are_the_checkpoint_s,
    backend_is_the_device_s,
)
