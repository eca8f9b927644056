"""Flags of public launch scripts that restate properties of the checkpoint or the trainer's fixed behaviour.

A flag that agrees with the checkpoint is accepted; one that contradicts it is refused. A flag that does nothing here is
listed as having no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.hf_config import read_hf_config
from slime.settings.fields import Need, Passed, Rule, opt
from slime.settings.flags import BOUND, COUNT, FRACTION, STEPS_OR_NONE, TOKENS, WHOLE
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC, SFT_ROLLOUT
from slime.settings.schema import has_output_norms

if TYPE_CHECKING:
    from slime.settings.args import Args

_SPECS = "slime_plugins.models."
"""The package of layer specs that public scripts name."""
_SPEC_TYPES: Mapping[str, tuple[str, ...]] = {
    "glm5": ("glm_moe_dsa",),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "qwen3_vl": ("qwen3_vl_text",),
}
"""Module of a layer spec -> `model_type`s of its models, for modules whose name is not the `model_type`."""

_OWN_FUNCTION = Need(
    lambda s: s.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT, FULLY_ASYNC),
    "a --rollout-function-path of your own that reads it",
)


def _never(text: str) -> Need:
    return Need(lambda s: False, text)


_PADDING = _never("a padded vocabulary; the trainer uses the checkpoint's")
_ROWS = _never("padded rows; a packed row is as long as its samples")
_CHECKED = _never("which changes nothing: every run checks itself (--mismatch-limit)")
_GRADIENTS = _never("which changes nothing: metrics.jsonl has the gradient norm of each step, train/grad_norm")
_UNREAD = _never("which is unused, even in the public slime")
_ONE_SET = _never("Megatron's checkpoints; a folder in Hugging Face format holds one set of weights")
_FORMAT = _never("Megatron's checkpoints; those of slime have one format")
_ATTENTION = _never("Megatron's own attention")
_TOKENIZER = _never("which changes nothing: the tokenizer comes from --hf-checkpoint")
_EVERY_STEP = _never("which changes nothing: every step is logged")
_DEEPGEMM = _never("DeepGEMM kernels in the trainer; the mismatch with the engine is measured in every step")


@dataclass(frozen=True, kw_only=True)
class LaunchScriptSettings:
    """Flags that only public launch scripts use; see docs/migration.md."""

    spec: tuple[str, ...] | None = None
    """Layer spec: module and function. Must match the checkpoint's family. For your own spec, use --model-family."""
    model_name: str | None = None
    """Name of the weight converter. Must match the checkpoint's model_type."""
    train_backend: str = opt("megatron", choices=("megatron",))
    """Training backend. The only choice is megatron."""
    distributed_backend: str | None = opt(None, choices=("nccl", "gloo"))
    """Backend for the training ranks' collectives. Must be the default: nccl on cuda, gloo on cpu."""
    rollout_data_transport: str = opt(
        "object-store",
        choices=("object-store", "nixl"),
        asks=lambda value: value == "nixl",
        needs=_never("which changes nothing: batches always travel through Ray's object store"),
    )
    """How batches reach training ranks."""
    use_rotary_position_embeddings: bool = False
    """Rotary position embeddings, which every family has."""
    no_position_embedding: bool = False
    """Do not add a position embedding to the word embedding. No family adds one."""
    use_rope_scaling: bool = False
    """Rotary scaling of Llama 3. Must agree with config.json."""
    use_gated_attention: bool = False
    """Gate on the attention output. Must agree with config.json."""
    post_self_attn_layernorm: bool = False
    """Norm on the attention output. Must agree with the model family."""
    post_mlp_layernorm: bool = False
    """Norm on the MLP output. Must agree with the model family."""
    freeze_indexer: bool = False
    """Do not train the indexer of sparse attention. The trainer never trains it."""
    make_vocab_size_divisible_by: int | None = opt(None, needs=_PADDING, within=TOKENS)
    """Padding of the vocabulary."""
    padded_vocab_size: int | None = opt(None, needs=_PADDING, within=TOKENS)
    """Size of the padded vocabulary."""
    data_pad_size_multiplier: int | None = opt(None, needs=_ROWS, within=TOKENS)
    """Padding of packed rows."""
    enable_experimental: bool = opt(
        False, needs=_never("Megatron-LM's launcher; experimental features are enabled where needed")
    )
    """Experimental features of Megatron."""
    allgather_cp: bool = opt(
        False,
        needs=_never("which changes nothing: context-parallel ranks gather keys and values, unless --cp-comm-type a2a"),
    )
    """Layout of sequences over context-parallel ranks for sparse attention."""
    recompute_loss_function: bool = opt(
        False, needs=_never("which changes nothing: the backward pass always recomputes log-probs, in chunks")
    )
    """Compute the loss again in the backward pass."""
    use_rollout_entropy: bool = opt(
        False, needs=_never("which changes nothing: the policy loss measures train/entropy_loss in the update")
    )
    """Measure the entropy in a forward pass before the update."""
    loss_mask_type: str | None = opt(
        None,
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
        needs=_never("which changes nothing: the chat template determines which tokens are trained"),
    )
    """How fine-tuning finds the assistant's answers in a conversation."""
    log_multi_turn: bool = opt(False, needs=_never("which changes nothing: turns and tool calls are always logged"))
    """Log the turns of multi-turn samples."""
    wandb_always_use_train_step: bool = opt(
        False, needs=_never("which changes nothing: each metric is logged under its own step")
    )
    """Use the optimizer step as the x axis of all metrics."""
    release_train: bool = opt(
        False,
        needs=_never(
            "which changes nothing: --offload-train, on with --colocate on a GPU, frees GPU memory for the engines, "
            "and the trainer's processes keep running"
        ),
    )
    """End the trainer's processes while engines generate."""
    ci_test: bool = opt(
        False,
        needs=Need(lambda s: s.ci_train_rollout_logprob_abs_diff_threshold is not None, _CHECKED.text),
    )
    """Check numbers as the public slime does in its tests."""
    ci_disable_kl_checker: bool = opt(False, needs=_CHECKED)
    """Do not check the KL to the reference in the first step."""
    ci_train_rollout_logprob_abs_diff_threshold: float | None = opt(
        None, needs=Need(lambda s: s.ci_test, "--ci-test"), within=BOUND
    )
    """With --ci-test, the default of --mismatch-limit."""
    ci_save_grad_norm: str | None = opt(None, needs=_GRADIENTS)
    """File to save the gradient norm of each step to."""
    ci_load_grad_norm: str | None = opt(None, needs=_GRADIENTS)
    """File with the gradient norm to compare each step with."""
    disable_rollout_global_dataset: bool = False
    """Do not read --prompt-data. Same as leaving it out."""
    recompute_activations: bool = False
    """Same as --recompute-granularity selective."""
    num_layers_per_virtual_pipeline_stage: int | None = opt(None, within=COUNT)
    """Layers per interleaved pipeline stage; determines --virtual-pipeline-model-parallel-size."""
    use_distributed_post: bool = opt(
        False, needs=_never("which changes nothing: --rollout-num-workers processes send the requests")
    )
    """Send requests from several hosts."""
    ref_ckpt_step: int | None = opt(None, needs=_ONE_SET, within=STEPS_OR_NONE)
    """Step of the reference's checkpoint."""
    opd_teacher_ckpt_step: int | None = opt(None, needs=_ONE_SET, within=STEPS_OR_NONE)
    """Step of the teacher's checkpoint."""
    ckpt_format: str | None = opt(None, needs=_FORMAT)
    """Format of Megatron's checkpoints."""
    dist_ckpt_format: str | None = opt(None, needs=_FORMAT)
    """Format of Megatron's sharded checkpoints."""
    use_dist_ckpt: bool = opt(False, needs=_FORMAT)
    """Save sharded checkpoints."""
    ckpt_fully_parallel_save: bool = opt(False, needs=_FORMAT)
    """Save a checkpoint from all data-parallel ranks."""
    no_save_rng: bool = opt(
        False, needs=_never("which changes nothing: states of generators are small; --no-save-optim also omits them")
    )
    """Do not save the states of random number generators."""
    use_flash_attn: bool = opt(False, needs=_ATTENTION)
    """Flash attention in Megatron."""
    use_mcore_models: bool = opt(False, needs=_never("which changes nothing: Megatron-core is the only trainer"))
    """Models of Megatron-core instead of the legacy ones."""
    tokenizer_type: str | None = opt(None, needs=_TOKENIZER)
    """Kind of tokenizer."""
    tokenizer_model: str | None = opt(None, needs=_TOKENIZER)
    """Folder of the tokenizer."""
    log_interval: int | None = opt(None, needs=_EVERY_STEP, within=COUNT)
    """Steps between log lines."""
    log_throughput: bool = opt(False, needs=_EVERY_STEP)
    """Log the throughput."""
    timing_log_level: int | None = opt(None, needs=_EVERY_STEP, ge=0, le=2)
    """Detail of logged timings."""
    megatron_deepgemm_forward_layers: tuple[int, ...] | None = opt(None, needs=_DEEPGEMM, within=WHOLE)
    """Dense layers whose forward pass uses DeepGEMM."""
    megatron_deepgemm_forward_modules: tuple[str, ...] | None = opt(None, needs=_DEEPGEMM)
    """Modules of these layers."""
    megatron_deepgemm_moe_forward_layers: tuple[int, ...] | None = opt(None, needs=_DEEPGEMM, within=WHOLE)
    """MoE layers whose forward pass uses DeepGEMM."""
    megatron_deepgemm_moe_forward_modules: tuple[str, ...] | None = opt(None, needs=_DEEPGEMM)
    """Modules of these layers."""
    ref_micro_batch_size: int | None = opt(None, needs=_UNREAD, within=COUNT)
    """Samples per forward pass of the reference model."""
    log_probs_max_tokens_per_gpu: int | None = opt(None, needs=_UNREAD, within=TOKENS)
    """Maximum tokens in a forward pass that only computes log-probs."""
    min_batch_collection_ratio: float | None = opt(None, needs=_UNREAD, within=FRACTION)
    """Fraction of a batch to wait for."""
    http_proxy: str | None = opt(None, needs=_UNREAD)
    """Proxy for requests."""
    rollout_buffer_url: str | None = opt(None, needs=_OWN_FUNCTION)
    """Address of a rollout buffer; your rollout function reads args.rollout_buffer_url."""
    rollout_task_type: str = opt("math", needs=_OWN_FUNCTION)
    """Task type in the rollout buffer; your rollout function reads args.rollout_task_type."""
    fetch_trajectory_retry_times: int = opt(-1, needs=_OWN_FUNCTION, ge=-1, le=1_000_000)
    """Retries of a request to the rollout buffer; your rollout function reads args.fetch_trajectory_retry_times."""


def spec_is_the_checkpoint_s(args: Args) -> str | None:
    if not args.spec:
        return None
    words = " ".join(args.spec)
    model_type = read_hf_config(args.hf_checkpoint).get("model_type")
    name = args.spec[0].removeprefix(_SPECS).split(".")[0]
    if args.spec[0].startswith(_SPECS) and model_type in _SPEC_TYPES.get(name, (name,)):
        return None
    if name.endswith("_vl"):
        return f"--spec {words} is a vision-language model, but layers come from the checkpoint; drop the flag"
    return (
        f"--spec {words} does not match the checkpoint's model_type {model_type}, which determines the layers. Drop "
        "the flag, or pass your own family with --model-family"
    )


def name_is_the_checkpoint_s(args: Args) -> str | None:
    if args.model_name is None:
        return None
    config = read_hf_config(args.hf_checkpoint)
    types = [str(config.get(key) or "") for key in ("model_type", "wrapper_type")]
    if _plain(args.model_name) in [_plain(one.removesuffix("_text")) for one in types]:
        return None
    return (
        f"--model-name {args.model_name} does not match the checkpoint, whose model_type {types[0]} determines how "
        "weights are converted; drop the flag"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def layers_are_the_checkpoint_s(args: Args) -> str | None:
    scaling = args.megatron["rope_scaling"] or {}
    norms = has_output_norms(args.hf_checkpoint)
    has: dict[str, Any] = {
        "use_rope_scaling": (scaling.get("rope_type") or scaling.get("type")) == "llama3",
        "use_gated_attention": args.megatron["attention_output_gate"],
        "post_self_attn_layernorm": norms,
        "post_mlp_layernorm": norms,
    }
    wrong = [f"--{name.replace('_', '-')}" for name, there in has.items() if getattr(args, name) and not there]
    return f"the checkpoint's model contradicts {' and '.join(wrong)}; drop the flag" if wrong else None


def backend_is_the_device_s(args: Args) -> str | None:
    wanted = "gloo" if args.device == "cpu" else "nccl"
    if args.distributed_backend in (None, wanted):
        return None
    return f"--distributed-backend {args.distributed_backend} does not work on {args.device}; drop it or use {wanted}"


def _stages_per_rank(s: Any) -> int | None:
    layers = s.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return None
    return max(1, s.megatron["num_layers"] // (s.megatron["pipeline_model_parallel_size"] or 1) // layers)


PASSED: tuple[Passed, ...] = (
    Passed(
        "megatron",
        "recompute_granularity",
        lambda s: "selective" if s.recompute_activations else None,
        "recompute_activations",
    ),
    Passed(
        "megatron",
        "virtual_pipeline_model_parallel_size",
        _stages_per_rank,
        "num_layers_per_virtual_pipeline_stage",
    ),
)
RULES: tuple[Rule, ...] = (
    spec_is_the_checkpoint_s,
    name_is_the_checkpoint_s,
    layers_are_the_checkpoint_s,
    backend_is_the_device_s,
)
