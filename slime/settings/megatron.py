"""Megatron's settings in this trainer: which flags are accepted and act on nothing, or only under a condition, and
where slime's defaults differ or are fixed, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime.settings.fields import Need

# Flags of Megatron that this trainer accepts and that act on nothing in it, or only under a condition: which, and why.
#
# The trainer builds Megatron's configuration objects from all settings, but not all of Megatron's modules: norm, core
# attention, latent attention, the choice of experts, the vocabulary's log-probs and the outer loop are slime's own, and
# nothing comes from Transformer Engine. What only the modules left out would read is listed here. What would make
# another model or another optimizer of the run is refused instead, see `megatron_defaults.FIXED`.

_ABSENT: Mapping[str, tuple[str, ...]] = {
    "Transformer Engine, which the trainer runs without": (
        "tp_comm_overlap",
        "tp_comm_bulk_wgrad",
        "tp_comm_bulk_dgrad",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_disable_fc1",
        "tp_comm_split_ag",
        "tp_comm_split_rs",
        "tp_comm_atomic_ag",
        "tp_comm_atomic_rs",
        "tp_comm_bootstrap_backend",
        "disable_parameter_transpose_cache",
        "use_te_rng_tracker",
        "cross_entropy_fusion_impl",
        "attention_backend",
        "batch_invariant_mode",
        "transformer_impl",
    ),
    "fp8 or fp4 training, which this release does not do": (
        "fp8_recipe",
        "fp8_param",
        "fp8_quantizer_factory",
        "fp8_margin",
        "fp8_interval",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_wgrad",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention",
        "fp4_recipe",
        "fp4_param",
        "fp4_quantizer_factory",
        "tp_only_amax_red",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "activation_func_fp8_input_store",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
    ),
    "Megatron's own attention; slime's packed one computes its softmax in float32": ("attention_softmax_in_fp32",),
    "Megatron's own attention; slime's packed one gathers keys and values over context-parallel ranks": (
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
    ),
    "Megatron's own norm; slime's keeps its input alone": ("memory_efficient_layer_norm",),
    "Megatron's own latent attention; slime's takes it from the checkpoint's config.json": (
        "rope_type",
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "cache_mla_latents",
    ),
    "Megatron's own sparse attention; slime's indexer is the checkpoint's": (
        "dsa_indexer_n_heads",
        "dsa_indexer_head_dim",
        "dsa_indexer_topk",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_use_sparse_loss",
    ),
    "Megatron's own cross entropy; slime computes log-probs itself": ("cross_entropy_loss_fusion",),
    "inference by Megatron; SGLang samples": (
        "flash_decode",
        "inference_rng_tracker",
        "inference_sampling_seed",
        "inference_fuse_tp_communication",
        "use_inference_optimized_layers",
        "mlp_chunks_for_prefill",
        "symmetric_ar_type",
    ),
    "layers of Mamba, which no supported family has": (
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mamba_state_dim",
        "use_mamba_mem_eff_path",
        "is_hybrid_model",
    ),
    "Megatron's own multi-token prediction; slime's stands with the output layer": ("mtp_standalone",),
    "weights that are drawn; here they come from the checkpoint": (
        "init_method_std",
        "embedding_init_method_std",
        "init_model_with_meta_device",
    ),
    "another optimizer than Adam": (
        "sgd_momentum",
        "muon_extra_scale_factor",
        "muon_fp32_matmul_prec",
        "muon_momentum",
        "muon_num_ns_steps",
        "muon_scale_mode",
        "muon_split_qkv",
        "muon_tp_mode",
        "muon_use_nesterov",
    ),
    "a choice: --optimizer-cpu-offload overlaps its copies, which are pinned, always": (
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_torch_optimizer_for_cpu_offload",
    ),
    "master weights that Transformer Engine keeps as remainders": ("store_param_remainders",),
    "DeepEP, which the trainer runs without; tokens go to their experts by all-to-all": (
        "moe_enable_deepep",
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
        "moe_flex_dispatcher_backend",
    ),
    "offloading of activations by Transformer Engine, which the trainer runs without": (
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_num_layers",
        "cpu_offloading_weights",
    ),
    "--defer-embedding-wgrad-compute, which the trainer does not do": ("wgrad_deferral_limit",),
    "--overlap-moe-expert-parallel-comm, which the trainer does not do": ("ep_overlap_early_attn_memory_release",),
    "--use-kitchen-attention, which the trainer does not do": ("kitchen_attention_backend",),
    "a choice: interleaved pipeline stages overlap their exchanges always, others never": (
        "overlap_p2p_comm",
        "overlap_p2p_comm_warmup_flush",
    ),
    "a choice: slime multiplies experts by groups, and orders their rows, by its own kernels wherever a GPU has them": (
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_use_legacy_grouped_gemm",
    ),
    "a capacity of experts; here no token is dropped": ("moe_token_drop_policy", "moe_token_dropping"),
    "Megatron-LM's own training loop, its metrics and its launcher": (
        "log_num_zeros_in_grad",
        "log_max_attention_logit",
        "moe_per_layer_logging",
        "barrier_with_L1_time",
        "qk_clip_alpha",
        "qk_clip_threshold",
        "pipeline_model_parallel_comm_backend",
    ),
    "Megatron's distributed checkpoints; slime writes its own": ("hetereogenous_dist_checkpoint",),
    "rows of one length; packed ones are as long as their samples": ("seq_length",),
    "nothing: Megatron itself no longer reads it": ("async_tensor_model_parallel_allreduce", "moe_extended_tp"),
}
"""What would have to be there -> the flags that it would read."""


def _balances(s: Any) -> bool:
    """A loss needs a coefficient; sinkhorn is another choice of experts."""
    return bool(s.megatron["moe_aux_loss_coeff"]) or "sinkhorn" in str(s.megatron["moe_router_load_balancing_type"])


def _is_on(name: str) -> Callable[[Any], bool]:
    """Whether a setting of Megatron is neither absent, off nor zero."""
    return lambda s: bool(s.megatron[name])


def _above_one(name: str) -> Callable[[Any], bool]:
    """Whether a number of ranks is more than one."""
    return lambda s: (s.megatron[name] or 1) > 1


def _decays(s: Any) -> bool:
    return str(s.megatron["lr_decay_style"]) != "constant"


def _warms_up(s: Any) -> bool:
    return bool(s.megatron["lr_warmup_iters"] or s.megatron["lr_warmup_fraction"])


def _recomputes_modules(s: Any) -> bool:
    """The older flag of experts means the selective one."""
    return s.megatron["recompute_granularity"] == "selective" or bool(s.megatron["moe_layer_recompute"])


def _stages_wait_for_each_other(s: Any) -> bool:
    m = s.megatron
    return (m["pipeline_model_parallel_size"] or 1) > 1 and (m["virtual_pipeline_model_parallel_size"] or 1) == 1


def _draws_graphs(s: Any) -> bool:
    m = s.megatron
    return bool(m["enable_cuda_graph"] or m["external_cuda_graph"] or m["cuda_graph_impl"] != "none")


_CONDITIONAL: tuple[tuple[Need, tuple[str, ...]], ...] = (
    (Need(lambda s: s.enable_mtp_training, "--enable-mtp-training"), ("mtp_num_layers", "mtp_loss_scaling_factor")),
    (Need(_balances, "--moe-aux-loss-coeff above 0"), ("moe_router_load_balancing_type",)),
    (
        Need(_is_on("num_moe_experts"), "a checkpoint with experts"),
        (
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_layer_recompute",
            "moe_router_dtype",
            "moe_router_enable_expert_bias",
            "moe_router_group_topk",
            "moe_router_num_groups",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_topk",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_gate",
            "moe_shared_expert_intermediate_size",
        ),
    ),
    (
        Need(
            lambda s: bool(s.megatron["num_moe_experts"]) and s.megatron["moe_token_dispatcher_type"] != "flex",
            "a checkpoint with experts and, as flex, DeepEP, which the trainer runs without: tokens go by all-to-all",
        ),
        ("moe_token_dispatcher_type",),
    ),
    (
        Need(_is_on("multi_latent_attention"), "a checkpoint with latent attention"),
        ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    (
        Need(_is_on("experimental_attention_variant"), "a checkpoint with layers of linear attention"),
        (
            "linear_attention_freq",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_value_head_dim",
        ),
    ),
    (
        Need(lambda s: s.megatron["recompute_granularity"] == "full", "--recompute-granularity full"),
        ("recompute_method", "recompute_num_layers", "distribute_saved_activations"),
    ),
    (
        Need(_recomputes_modules, "--recompute-granularity selective"),
        ("recompute_modules",),
    ),
    (
        Need(_is_on("recompute_granularity"), "--recompute-granularity"),
        ("num_microbatches_with_partial_activation_checkpoints",),
    ),
    (Need(_decays, "a rate that decays: --lr-decay-style other than constant"), ("min_lr",)),
    (
        Need(
            lambda s: _decays(s) or s.megatron["lr_warmup_fraction"] is not None,
            "a schedule whose length matters: --lr-decay-style other than constant, or --lr-warmup-fraction",
        ),
        ("lr_decay_iters",),
    ),
    (
        Need(lambda s: s.megatron["lr_decay_style"] == "WSD", "--lr-decay-style WSD"),
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
    ),
    (Need(_warms_up, "a warm-up: --lr-warmup-iters or --lr-warmup-fraction"), ("lr_warmup_init",)),
    (
        Need(
            lambda s: _decays(s) and s.megatron["decoupled_lr"] is not None,
            "--decoupled-lr, and --lr-decay-style other than constant",
        ),
        ("decoupled_min_lr",),
    ),
    (Need(_is_on("qk_layernorm"), "a checkpoint with norms of queries and keys"), ("apply_wd_to_qk_layernorm",)),
    (
        Need(lambda s: s.megatron["fp16"] and not s.megatron["loss_scale"], "--fp16, without --loss-scale"),
        ("hysteresis", "initial_loss_scale", "loss_scale_window", "min_loss_scale"),
    ),
    (
        Need(_above_one("tensor_model_parallel_size"), "--tensor-model-parallel-size above 1"),
        ("sequence_parallel", "clone_scatter_output_in_embedding"),
    ),
    (
        Need(_above_one("pipeline_model_parallel_size"), "--pipeline-model-parallel-size above 1"),
        (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "deallocate_pipeline_outputs",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_model_parallel_layout",
            "use_ring_exchange_p2p",
        ),
    ),
    (
        Need(_stages_wait_for_each_other, "pipeline stages that are not interleaved"),
        ("batch_p2p_comm", "batch_p2p_sync"),
    ),
    (
        Need(_above_one("virtual_pipeline_model_parallel_size"), "--virtual-pipeline-model-parallel-size above 1"),
        ("microbatch_group_size_per_vp_stage",),
    ),
    (Need(_is_on("overlap_grad_reduce"), "--overlap-grad-reduce"), ("bucket_size",)),
    (Need(lambda s: s.device != "cpu", "a GPU"), ("gradient_accumulation_fusion",)),
    (Need(_is_on("optimizer_cpu_offload"), "--optimizer-cpu-offload"), ("optimizer_offload_fraction",)),
    (
        Need(_is_on("use_precision_aware_optimizer"), "--use-precision-aware-optimizer"),
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"),
    ),
    (
        Need(_is_on("fine_grained_activation_offloading"), "--fine-grained-activation-offloading"),
        ("min_offloaded_tensor_size", "offload_modules"),
    ),
    (
        Need(_draws_graphs, "--cuda-graph-impl"),
        (
            "cuda_graph_retain_backward_graph",
            "cuda_graph_scope",
            "cuda_graph_use_single_mempool",
            "cuda_graph_warmup_steps",
        ),
    ),
)
"""A condition -> the flags that act only under it."""

NEEDS: Mapping[str, Need] = {
    **{name: need for need, names in _CONDITIONAL for name in names},
    **{name: Need(lambda s: False, text) for text, names in _ABSENT.items() for name in names},
}
"""Flag of Megatron, by field name -> the condition under which it acts; given without it, it is listed."""

# Where slime's default differs from Megatron's, and what the trainer fixes: value and reason, shown by --explain.

FIXED: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "checkpoints and weight sync are built on it"),
    "optimizer": ("adam", "the distributed optimizer supports adam"),
    "grad_reduce_in_fp32": (True, "sums of many micro-batches lose bits in bf16"),
    "average_in_collective": (False, "losses already carry the denominators of the whole step"),
    "hidden_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "attention_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "transformer_impl": ("local", "runs without Transformer Engine, on CPU and GPU alike"),
    "normalization": ("RMSNorm", "all supported families use it"),
    "masked_softmax_fusion": (False, "attention is slime's own packed one"),
    "apply_rope_fusion": (False, "needs Transformer Engine"),
    "persist_layer_norm": (False, "the norm is slime's own"),
    "bias_activation_fusion": (False, "needs a GPU kernel that the local layers lack"),
    "bias_dropout_fusion": (False, "there is no dropout"),
    "perform_initialization": (False, "weights come from the checkpoint"),
    "use_cpu_initialization": (False, "weights come from the checkpoint"),
    "overlap_param_gather": (False, "the weight sync reads weights between steps"),
    "overlap_param_gather_with_optimizer_step": (False, "the weight sync reads weights between steps"),
    "align_param_gather": (False, "there are no overlapped gathers"),
    "expert_tensor_parallel_size": (1, "each expert is whole on the ranks that have it"),
    "variable_seq_lengths": (False, "set by the trainer for pipeline stages"),
    "num_distributed_optimizer_instances": (1, "checkpoints hold one shard per data-parallel rank"),
    "check_for_nan_in_grad": (False, "the trainer checks every gradient itself, on all ranks at once"),
    "check_for_large_grads": (False, "the trainer checks every gradient itself, on all ranks at once"),
    "reduce_scatter_with_fp32_accumulation": (False, "gradients are float32 already"),
    "delay_wgrad_compute": (False, "needs Transformer Engine"),
    "fp8_param_gather": (False, "weights are not fp8"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights are not fp8"),
    "keep_fp8_transpose_cache": (False, "weights are not fp8"),
    "moe_router_fusion": (False, "needs GPU kernels that the local layers lack"),
    "moe_shared_expert_overlap": (False, "needs Transformer Engine"),
    "moe_enable_deepep": (False, "needs DeepEP"),
    **dict.fromkeys(
        ("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor"),
        (None, "it makes a token's gradient depend on the other tokens of its micro-batch"),
    ),
    "moe_aux_loss_coeff": (0.0, "it makes a token's gradient depend on the other tokens of its micro-batch"),
    "moe_router_load_balancing_type": ("none", "there is no loss that balances"),
    "moe_router_bias_update_rate": (0.0, "the bias is the checkpoint's, and the engines'"),
    "moe_router_force_load_balancing": (False, "it routes at random"),
    "moe_enable_routing_replay": (
        False,
        "slime's router replays by --use-routing-replay and --use-rollout-routing-replay",
    ),
    "moe_router_topk_limited_devices": (None, "groups of experts are the checkpoint's"),
    "moe_apply_probs_on_input": (False, "no supported family does"),
    "moe_latent_size": (None, "no supported family has it"),
    "moe_pad_expert_input_to_capacity": (False, "experts have no capacity; no token is dropped"),
    "overlap_moe_expert_parallel_comm": (False, "the trainer runs Megatron's plain and interleaved schedules"),
    "hybrid_context_parallel": (False, "the trainer splits every row over all context-parallel ranks"),
    "defer_embedding_wgrad_compute": (False, "log-probs are slime's own, and need the gradient at once"),
    "softmax_type": ("vanilla", "no supported family has attention sinks"),
    "softmax_scale": (None, "attention is scaled as in the checkpoint, and the engines"),
    "window_size": (None, "no supported family slides a window"),
    "window_attn_skip_freq": (None, "no supported family slides a window"),
    "no_rope_freq": (None, "every layer of a supported family has its own rotary embedding, or none"),
    "mrope_section": (None, "text has one position per token"),
    "qk_l2_norm": (False, "norms of queries and keys are the checkpoint's"),
    "qk_clip": (False, "nothing clips queries and keys after a step"),
    "apply_query_key_layer_scaling": (False, "attention is scaled as in the checkpoint, and the engines"),
    "apply_residual_connection_post_layernorm": (False, "all supported families are pre-norm"),
    "activation_func_clamp_value": (None, "the activation is the checkpoint's"),
    "glu_linear_offset": (0.0, "the activation is the checkpoint's"),
    "use_fused_weighted_squared_relu": (False, "the activation is the checkpoint's"),
    "heterogeneous_block_specs": (False, "layers are those of the checkpoint's family"),
    "fused_single_qkv_rope": (False, "needs Transformer Engine"),
    "use_te_activation_func": (False, "needs Transformer Engine"),
    "use_kitchen": (False, "needs a package that the trainer runs without"),
    "use_kitchen_attention": (False, "needs a package that the trainer runs without"),
    "nccl_ub": (False, "registered buffers cannot be offloaded"),
    "disable_symmetric_registration": (False, "goes with nccl_ub"),
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_custom_fsdp", "fsdp_double_buffer", "fsdp_manual_registration"),
        (False, "the trainer shards by the distributed optimizer, not by FSDP"),
    ),
    "data_parallel_sharding_strategy": ("no_shard", "a setting of FSDP"),
    "outer_dp_sharding_strategy": ("no_shard", "a setting of FSDP"),
    "gradient_reduce_div_fusion": (True, "a setting of FSDP"),
    "preserve_fp32_weights": (True, "a setting of FSDP"),
    "suggested_communication_unit_size": (None, "a setting of FSDP"),
}
"""What the trainer of this release cannot do otherwise. A flag that says so is refused; the trainer reads it here."""

UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "main_grads_dtype": ("float32", "sums of many micro-batches lose bits in bf16"),
    **dict.fromkeys(("fp8", "fp4"), (None, "this release does not train it")),
    "cpu_offloading": (False, "needs Transformer Engine"),
}
"""As `FIXED`, of settings that the trainer leaves to Megatron's default."""

SLIME_DEFAULTS: dict[str, tuple[Any, str]] = {
    "lr": (1e-6, "a usual learning rate of RL on a pretrained model"),
    "min_lr": (0.0, "Megatron's launch default"),
    "lr_decay_style": ("constant", "RL has no natural end to decay to"),
    "moe_token_dispatcher_type": ("alltoall", "it sends each token only to its experts"),
    "bf16": (True, "the training dtype unless --fp16 or --no-bf16"),
    "optimizer_offload_fraction": (1.0, "Megatron's launch default"),
    "mtp_loss_scaling_factor": (0.2, "what scripts of RL expect that leave it out"),
    "gradient_accumulation_fusion": (True, "a GPU adds weight gradients in float32 inside the product; no Apex"),
    **FIXED,
}
