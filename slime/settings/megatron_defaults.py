"""Where slime's default differs from Megatron's, and what the trainer fixes: value and reason, shown by --explain."""

from __future__ import annotations

from typing import Any

from slime.settings.fields import Need

FIXED: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "checkpoints and weight sync are built on it"),
    "optimizer": ("adam", "the distributed optimizer supports adam"),
    "optimizer_cpu_offload": (False, "checkpoints and sleeping do not reach its copies on the host"),
    "use_precision_aware_optimizer": (False, "checkpoints hold float32 master weights and moments"),
    "grad_reduce_in_fp32": (True, "sums of many micro-batches lose bits in bf16"),
    "average_in_collective": (False, "losses already carry the denominators of the whole step"),
    "hidden_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "attention_dropout": (0.0, "dropout makes trainer and engine disagree"),
    "transformer_impl": ("local", "runs without Transformer Engine, on CPU and GPU alike"),
    "normalization": ("RMSNorm", "all supported families use it"),
    "gradient_accumulation_fusion": (False, "needs Apex"),
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
    **dict.fromkeys(
        ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
        (False, "needs GPU kernels that the local layers lack"),
    ),
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
    "moe_enable_routing_replay": (False, "the router does not record its choices"),
    "moe_router_topk_limited_devices": (None, "groups of experts are the checkpoint's"),
    "moe_apply_probs_on_input": (False, "no supported family does"),
    "moe_latent_size": (None, "no supported family has it"),
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

SLIME_DEFAULTS: dict[str, tuple[Any, str]] = {
    "lr": (1e-6, "a usual learning rate of RL on a pretrained model"),
    "min_lr": (0.0, "Megatron's launch default"),
    "lr_decay_style": ("constant", "RL has no natural end to decay to"),
    "moe_token_dispatcher_type": ("alltoall", "it sends each token only to its experts"),
    "bf16": (True, "the training dtype unless --fp16 or --no-bf16"),
    **FIXED,
}

NEEDS: dict[str, Need] = {
    "moe_router_load_balancing_type": Need(lambda s: bool(s.megatron["moe_aux_loss_coeff"]), "--moe-aux-loss-coeff"),
}
"""Flags of Megatron that are accepted -> the condition under which they act; given without it, they are listed."""
