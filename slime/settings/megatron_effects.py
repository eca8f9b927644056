"""Flags of Megatron that this trainer accepts and that act on nothing in it, or only under a condition: which, and why.

The trainer builds Megatron's configuration objects from all settings, but not all of Megatron's modules: norm, core
attention, latent attention, the choice of experts, the vocabulary's log-probs and the outer loop are slime's own, and
nothing comes from Transformer Engine. What only the modules left out would read is listed here. What would make
another model or another optimizer of the run is refused instead, see `megatron_defaults.FIXED`.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.settings.fields import Need

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
    "heads for several tokens, which this release does not train": ("mtp_loss_scaling_factor", "mtp_standalone"),
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
    "--optimizer-cpu-offload, which the trainer does not do": (
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_torch_optimizer_for_cpu_offload",
    ),
    "--use-precision-aware-optimizer, which the trainer does not do": ("store_param_remainders",),
    "DeepEP, which the trainer runs without": (
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
        "moe_flex_dispatcher_backend",
    ),
    "grouped matrix products, which the trainer runs without": ("moe_use_legacy_grouped_gemm",),
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

NEEDS: Mapping[str, Need] = {
    "moe_router_load_balancing_type": Need(
        lambda s: bool(s.megatron["moe_aux_loss_coeff"]), "--moe-aux-loss-coeff above 0"
    ),
    **{name: Need(lambda s: False, text) for text, names in _ABSENT.items() for name in names},
}
"""Flag of Megatron, by field name -> the condition under which it acts; given without it, it is listed."""
