"""Megatron's settings: which ones take effect in this trainer, under which conditions, and which ones slime fixes.

The trainer builds Megatron's config objects from all settings, but uses only some of Megatron's modules. slime has its
own norm, core attention, latent attention, expert routing, log-probs and outer loop, and does not use Transformer
Engine. `need_of` therefore applies one rule: a flag takes effect only if it is in `ACTING`, or if it is in `CONDITIONS`
and its condition holds. Any other flag that the user sets is listed when the run starts. Flags for a different model,
optimizer or layout are refused instead (`FIXED`, `UNSUPPORTED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.settings.fields import Need

ACTING = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "overlap_grad_reduce"),
        *("pad_buckets_for_high_nccl_busbw", "bf16", "fp16", "loss_scale", "fp32_residual_connection"),
        *("enable_autocast", "deterministic_mode", "disable_bf16_reduced_precision_matmul", "test_mode"),
        *("config_logger_dir", "lr", "lr_decay_style", "lr_warmup_fraction", "lr_warmup_iters", "decoupled_lr"),
        *("clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay", "weight_decay"),
        *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "optimizer_cpu_offload"),
        *("optimizer", "use_precision_aware_optimizer", "recompute_granularity", "fp8", "fp8_recipe"),
    }
)
"""Megatron flags that take effect in every run, or that a rule refuses where they cannot."""

_LISTED_THOUGH_FIXED = ("moe_enable_deepep", "transformer_impl")
"""Fixed settings that do not change what the trainer computes, so a different value is listed instead of refused."""

_ONLY_FASTER = frozenset(
    {
        *("overlap_param_gather", "overlap_param_gather_with_optimizer_step", "align_param_gather"),
        *("moe_router_fusion", "moe_shared_expert_overlap", "check_for_nan_in_grad", "persist_layer_norm"),
        *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    }
)
"""The same, with the reason in `FIXED`: they concern speed, or ask for a check that the trainer makes itself."""

_UNUSED = "a feature of Megatron that this trainer does not use"

_UNUSED_PARTS: Mapping[str, tuple[str, ...]] = {
    "Transformer Engine, which the trainer does not use": (
        *("attention_backend", "cpu_offloading_", "cross_entropy_fusion_impl", "tp_comm_", "transformer_impl"),
    ),
    "fp4 training, which this release does not support": ("fp4_",),
    "Transformer Engine's FP8; slime's has one scale per 128 entries of the tensor at hand": ("fp8_",),
    "Megatron's own attention; slime's computes its softmax in float32": ("attention_softmax_in_fp32",),
    "Megatron's own latent attention; slime's reads these from the checkpoint's config.json": (
        *("beta_", "mscale", "original_max_position_embeddings", "rope_type", "rotary_scaling_factor"),
    ),
    "Megatron's own cross entropy; slime computes log-probs itself": ("cross_entropy_loss_fusion",),
    "Megatron's inference; SGLang does the sampling": ("flash_decode", "inference_"),
    "random initial weights; slime loads a checkpoint": ("embedding_init_", "init_method_std", "init_model_"),
    "an optimizer other than Adam and Muon": ("adaptive_muon_", "sgd_"),
    "DeepEP, which the trainer does not use; it dispatches tokens by all-to-all": (
        *("moe_deepep_", "moe_enable_deepep", "moe_flex_", "moe_hybridep_"),
    ),
    "which changes nothing: --optimizer-cpu-offload always pins memory and overlaps its copies": (
        *("overlap_cpu_optimizer_", "pin_cpu_", "use_torch_optimizer_for_cpu_offload"),
    ),
    "which changes nothing: slime always uses its own kernels for grouped GEMM and token permutation": (
        *("moe_grouped_gemm", "moe_permute_fusion", "moe_use_legacy_grouped_gemm"),
    ),
    "which changes nothing: interleaved pipeline stages always overlap P2P communication, others never do": (
        "overlap_p2p_comm",
    ),
    "CUDA graphs of layers, which the trainer does not use": ("cuda_graph_",),
    "offloading of single activations, which the trainer does not use": (
        *("min_offloaded_tensor_size", "offload_modules"),
    ),
    "sequences of equal length; slime packs samples of any length": ("seq_length",),
}
"""A Megatron feature that the trainer does not use -> prefixes of the flags that only this feature reads.

Other unused flags get the generic text `_UNUSED`.
"""


def _balances(s: Any) -> bool:
    """Returns whether experts are load-balanced, by sinkhorn or by an auxiliary loss with a nonzero coefficient."""
    return bool(s.megatron["moe_aux_loss_coeff"]) or "sinkhorn" in str(s.megatron["moe_router_load_balancing_type"])


def _is_on(name: str) -> Callable[[Any], bool]:
    return lambda s: bool(s.megatron[name])


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda s: (s.megatron[name] or 1) > 1


def _decays(s: Any) -> bool:
    return str(s.megatron["lr_decay_style"]) != "constant"


def _warms_up(s: Any) -> bool:
    return bool(s.megatron["lr_warmup_iters"] or s.megatron["lr_warmup_fraction"])


def _recomputes_modules(s: Any) -> bool:
    """Returns whether recompute is selective; `moe_layer_recompute` is Megatron's older name for experts."""
    return s.megatron["recompute_granularity"] == "selective" or bool(s.megatron["moe_layer_recompute"])


def _has_plain_stages(s: Any) -> bool:
    m = s.megatron
    return (m["pipeline_model_parallel_size"] or 1) > 1 and (m["virtual_pipeline_model_parallel_size"] or 1) == 1


CP_COMM_TYPES = ("all_gather", "a2a")
"""The values of `--cp-comm-type` that the trainer supports."""

_CONDITIONAL: Mapping[Need, str] = {
    Need(lambda s: s.enable_mtp_training, "--enable-mtp-training"): "mtp_num_layers mtp_loss_scaling_factor",
    Need(_balances, "--moe-aux-loss-coeff above 0"): "moe_router_load_balancing_type",
    Need(_is_on("num_moe_experts"), "an MoE checkpoint"): (
        "moe_ffn_hidden_size moe_layer_freq moe_layer_recompute moe_router_dtype moe_router_enable_expert_bias "
        "moe_router_group_topk moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk "
        "moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size"
    ),
    Need(
        lambda s: bool(s.megatron["num_moe_experts"]) and s.megatron["moe_token_dispatcher_type"] != "flex",
        "an MoE checkpoint; the value flex also needs DeepEP, which the trainer does not use: it dispatches by "
        "all-to-all",
    ): "moe_token_dispatcher_type",
    Need(_is_on("multi_latent_attention"), "a checkpoint with latent attention"): (
        "kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
    ),
    Need(_is_on("experimental_attention_variant"), "a checkpoint with linear-attention layers"): (
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_value_head_dim"
    ),
    Need(lambda s: s.megatron["recompute_granularity"] == "full", "--recompute-granularity full"): (
        "recompute_method recompute_num_layers distribute_saved_activations"
    ),
    Need(_recomputes_modules, "--recompute-granularity selective"): "recompute_modules",
    Need(_is_on("recompute_granularity"), "--recompute-granularity"): (
        "num_microbatches_with_partial_activation_checkpoints"
    ),
    Need(_decays, "learning-rate decay: --lr-decay-style other than constant"): "min_lr",
    Need(
        lambda s: _decays(s) or s.megatron["lr_warmup_fraction"] is not None,
        "a schedule of fixed length: --lr-decay-style other than constant, or --lr-warmup-fraction",
    ): "lr_decay_iters",
    Need(lambda s: s.megatron["lr_decay_style"] == "WSD", "--lr-decay-style WSD"): (
        "lr_wsd_decay_iters lr_wsd_decay_style"
    ),
    Need(_warms_up, "a warm-up: --lr-warmup-iters or --lr-warmup-fraction"): "lr_warmup_init",
    Need(
        lambda s: _decays(s) and s.megatron["decoupled_lr"] is not None,
        "--decoupled-lr, and --lr-decay-style other than constant",
    ): "decoupled_min_lr",
    Need(_is_on("qk_layernorm"), "a checkpoint with query and key norms"): "apply_wd_to_qk_layernorm",
    Need(lambda s: s.megatron["fp16"] and not s.megatron["loss_scale"], "--fp16, without --loss-scale"): (
        "hysteresis initial_loss_scale loss_scale_window min_loss_scale"
    ),
    Need(_above_one("tensor_model_parallel_size"), "--tensor-model-parallel-size above 1"): (
        "sequence_parallel clone_scatter_output_in_embedding"
    ),
    Need(_above_one("pipeline_model_parallel_size"), "--pipeline-model-parallel-size above 1"): (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split deallocate_pipeline_outputs "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "use_ring_exchange_p2p"
    ),
    Need(_has_plain_stages, "pipeline stages that are not interleaved"): "batch_p2p_comm batch_p2p_sync",
    Need(_above_one("virtual_pipeline_model_parallel_size"), "--virtual-pipeline-model-parallel-size above 1"): (
        "microbatch_group_size_per_vp_stage"
    ),
    Need(
        lambda s: (s.megatron["context_parallel_size"] or 1) > 1 and s.megatron["cp_comm_type"] in CP_COMM_TYPES,
        "--context-parallel-size above 1; with values other than a2a, keys and values are gathered (all_gather)",
    ): "cp_comm_type",
    Need(_is_on("overlap_grad_reduce"), "--overlap-grad-reduce"): "bucket_size",
    Need(lambda s: s.device != "cpu", "a GPU"): "gradient_accumulation_fusion",
    Need(_is_on("optimizer_cpu_offload"), "--optimizer-cpu-offload"): "optimizer_offload_fraction",
    Need(_is_on("use_precision_aware_optimizer"), "--use-precision-aware-optimizer"): (
        "exp_avg_dtype exp_avg_sq_dtype main_params_dtype"
    ),
    Need(lambda s: s.megatron["optimizer"] == "muon", "--optimizer muon"): (
        "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_nesterov "
        "muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov"
    ),
}
"""Condition -> flags that take effect only if it holds."""

CONDITIONS: Mapping[str, Need] = {name: need for need, names in _CONDITIONAL.items() for name in names.split()}


def need_of(name: str) -> Need | None:
    """Returns a flag's condition; None if the flag always takes effect, or is refused where it cannot."""
    if name in CONDITIONS:
        return CONDITIONS[name]
    if name in _ONLY_FASTER:
        reason = FIXED[name][1]
        needs = reason.removeprefix("needs ")
        return Need(lambda s: False, needs if needs != reason else f"which changes nothing: {reason}")
    fixed = name in FIXED or name in UNSUPPORTED
    if name in ACTING or (fixed and name not in _LISTED_THOUGH_FIXED):
        return None
    text = next((text for text, starts in _UNUSED_PARTS.items() if name.startswith(starts)), _UNUSED)
    return Need(lambda s: False, text)


RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "shared_experts")
"""The values of `--recompute-modules` that the trainer's layers support."""

# Settings that slime fixes, and its own defaults: name -> (value, reason). --explain shows the reason.

FIXED: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "checkpoints and weight sync are built on it"),
    "grad_reduce_in_fp32": (True, "sums of many micro-batches lose precision in bf16"),
    "average_in_collective": (False, "losses are already divided by the denominators of the whole step"),
    "hidden_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "attention_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "transformer_impl": ("local", "runs without Transformer Engine, on CPU and GPU alike"),
    "normalization": ("RMSNorm", "all supported families use it"),
    "masked_softmax_fusion": (False, "slime has its own packed attention"),
    "apply_rope_fusion": (False, "needs Transformer Engine"),
    "persist_layer_norm": (False, "slime has its own norm"),
    "bias_activation_fusion": (False, "needs a GPU kernel that Megatron's local layers do not have"),
    "bias_dropout_fusion": (False, "there is no dropout"),
    "perform_initialization": (False, "weights come from the checkpoint"),
    "use_cpu_initialization": (False, "weights come from the checkpoint"),
    "overlap_param_gather": (False, "the weight sync reads weights between steps"),
    "overlap_param_gather_with_optimizer_step": (False, "the weight sync reads weights between steps"),
    "align_param_gather": (False, "there are no overlapped gathers"),
    "expert_tensor_parallel_size": (1, "experts are not split over ranks"),
    "variable_seq_lengths": (False, "set by the trainer for pipeline stages"),
    "num_distributed_optimizer_instances": (1, "checkpoints hold one shard per data-parallel rank"),
    "check_for_nan_in_grad": (False, "the trainer checks every gradient itself, on all ranks at once"),
    "check_for_large_grads": (False, "the trainer checks every gradient itself, on all ranks at once"),
    "reduce_scatter_with_fp32_accumulation": (False, "gradients are float32 already"),
    "delay_wgrad_compute": (False, "needs Transformer Engine"),
    "fp8_wgrad": (False, "scales that tokens share would make weight gradients depend on how samples are packed"),
    "fp8_param_gather": (False, "weights are not fp8"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights are not fp8"),
    "keep_fp8_transpose_cache": (False, "weights are not fp8"),
    "moe_router_fusion": (False, "needs GPU kernels that Megatron's local layers do not have"),
    "moe_shared_expert_overlap": (False, "needs Transformer Engine"),
    "moe_enable_deepep": (False, "needs DeepEP"),
    **dict.fromkeys(
        ("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor"),
        (None, "it would make a token's gradient depend on the other tokens of its micro-batch"),
    ),
    "moe_aux_loss_coeff": (0.0, "it would make a token's gradient depend on the other tokens of its micro-batch"),
    "moe_router_load_balancing_type": ("none", "there is no load-balancing loss"),
    "moe_router_bias_update_rate": (0.0, "the bias comes from the checkpoint, as in the engines"),
    "moe_router_force_load_balancing": (False, "it routes tokens at random"),
    "moe_enable_routing_replay": (
        False,
        "slime's router has --use-routing-replay and --use-rollout-routing-replay",
    ),
    "moe_router_topk_limited_devices": (None, "expert groups come from the checkpoint"),
    "moe_apply_probs_on_input": (False, "no supported family does this"),
    "moe_latent_size": (None, "no supported family has it"),
    "moe_pad_expert_input_to_capacity": (False, "experts have no capacity; no token is dropped"),
    "overlap_moe_expert_parallel_comm": (False, "the trainer runs Megatron's plain and interleaved schedules"),
    "hybrid_context_parallel": (False, "the trainer splits every row over all context-parallel ranks"),
    "defer_embedding_wgrad_compute": (False, "slime computes the log-probs and needs this gradient immediately"),
    "softmax_type": ("vanilla", "no supported family has attention sinks"),
    "softmax_scale": (None, "attention is scaled as in the checkpoint and in the engines"),
    "window_size": (None, "no supported family uses a sliding window"),
    "window_attn_skip_freq": (None, "no supported family uses a sliding window"),
    "no_rope_freq": (None, "every layer of a supported family has its own rotary embedding, or none"),
    "mrope_section": (None, "text has one position per token"),
    "qk_l2_norm": (False, "norms of queries and keys come from the checkpoint"),
    "qk_clip": (False, "the trainer does not clip queries and keys after a step"),
    "apply_query_key_layer_scaling": (False, "attention is scaled as in the checkpoint and in the engines"),
    "apply_residual_connection_post_layernorm": (False, "all supported families are pre-norm"),
    "activation_func_clamp_value": (None, "the activation comes from the checkpoint"),
    "glu_linear_offset": (0.0, "the activation comes from the checkpoint"),
    "use_fused_weighted_squared_relu": (False, "the activation comes from the checkpoint"),
    "heterogeneous_block_specs": (False, "the checkpoint's family defines the layers"),
    "fused_single_qkv_rope": (False, "needs Transformer Engine"),
    "use_te_activation_func": (False, "needs Transformer Engine"),
    "use_kitchen": (False, "needs a package that the trainer does not use"),
    "use_kitchen_attention": (False, "needs a package that the trainer does not use"),
    "nccl_ub": (False, "registered buffers cannot be offloaded"),
    "disable_symmetric_registration": (False, "only used with nccl_ub"),
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_custom_fsdp", "fsdp_double_buffer", "fsdp_manual_registration"),
        (False, "the trainer shards with the distributed optimizer, not with FSDP"),
    ),
    "data_parallel_sharding_strategy": ("no_shard", "a setting of FSDP"),
    "outer_dp_sharding_strategy": ("no_shard", "a setting of FSDP"),
    "gradient_reduce_div_fusion": (True, "a setting of FSDP"),
    "preserve_fp32_weights": (True, "a setting of FSDP"),
    "suggested_communication_unit_size": (None, "a setting of FSDP"),
}
"""Settings whose value the trainer fixes, with the reason. A flag with a different value is refused."""

_GRAPHS = "a CUDA graph replays rows of one length, and the trainer packs rows of any length"

UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "main_grads_dtype": ("float32", "sums of many micro-batches lose precision in bf16"),
    "fp4": (None, "not supported in this release"),
    "cpu_offloading": (False, "needs Transformer Engine"),
    "enable_cuda_graph": (False, _GRAPHS),
    "external_cuda_graph": (False, _GRAPHS),
    "cuda_graph_impl": ("none", _GRAPHS),
    "fine_grained_activation_offloading": (
        False,
        "the trainer's layers do not offload single activations; --recompute-granularity saves their memory",
    ),
}
"""The same as `FIXED`, for settings that the trainer leaves at Megatron's default."""

SLIME_DEFAULTS: dict[str, tuple[Any, str]] = {
    "lr": (1e-6, "a typical RL learning rate for a pretrained model"),
    "min_lr": (0.0, "Megatron's launch default"),
    "lr_decay_style": ("constant", "RL training has no natural end"),
    "moe_token_dispatcher_type": ("alltoall", "it sends each token only to its experts"),
    "bf16": (True, "the training dtype, unless --fp16 or --no-bf16 is set"),
    "optimizer_offload_fraction": (1.0, "Megatron's launch default"),
    "muon_tp_mode": ("duplicated", "the update of a matrix does not depend on the number of ranks"),
    "mtp_loss_scaling_factor": (0.2, "RL scripts that omit the flag expect this value"),
    "gradient_accumulation_fusion": (True, "GPU kernels accumulate weight gradients in float32, without Apex"),
    **FIXED,
}

# What --help says about Megatron's flags: Megatron's schema declares them, so slime has no field for them.

FIRST: Mapping[str, str] = {"lr": "Learning rate", "tensor_model_parallel_size": "Placement"}
"""Flag on the first page of --help -> its heading there, like a field's `first`."""

DOCS: Mapping[str, str] = {
    "lr": "Learning rate, after the warm-up.",
    "tensor_model_parallel_size": "Training GPUs that share the tensors of each layer (tensor parallelism).",
    "optimizer": "adam: AdamW for all parameters. muon: Muon for the matrices of the layers, AdamW for the others.",
    "fp8": (
        "Linear layers of attention and MLPs multiply in FP8, in the forward pass and for the gradients of their "
        "inputs. Requires e4m3, --fp8-recipe blockwise and a Hopper GPU with DeepGEMM."
    ),
    "fp8_recipe": "With --fp8-format: blockwise is one scale per 128 entries of an input, or 128 x 128 of a weight.",
}
"""Flag -> help text that replaces Megatron's."""

OF_CHECKPOINT = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("group_query_attention", "vocab_size", "max_position_embeddings", "position_embedding_type", "rope_scaling"),
        *("rotary_base", "rotary_interleaved", "rotary_percent", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("add_bias_linear", "add_qkv_bias", "attention_output_gate", "gated_linear_unit", "qk_layernorm"),
        *("untie_embeddings_and_output_weights", "experimental_attention_variant", "multi_latent_attention"),
        *("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "linear_attention_freq"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_value_head_dim", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_dtype"),
        *("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_num_groups", "moe_router_pre_softmax"),
        *("moe_router_score_function", "moe_router_topk", "moe_router_topk_scaling_factor", "moe_shared_expert_gate"),
        *("moe_shared_expert_intermediate_size",),
    }
)
"""Flags whose value a model family reads from the checkpoint's config.json."""
