"""The contract of every kind of user hook: its parameters, and whether it may be async."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HookContract:
    """What slime calls a hook with."""

    flag: str
    """The setting that names the hook (field of `Args`)."""
    positional: tuple[str, ...]
    """Arguments passed by position, in order; users may name them otherwise."""
    keywords: tuple[str, ...] = ()
    """Arguments passed by keyword always: the hook must accept them."""
    optional_keywords: tuple[str, ...] = ()
    """Arguments passed by keyword only if the hook accepts them."""
    mode: Literal["sync", "async", "either"] = "sync"
    is_class: bool = False
    """The hook is a class; `methods` are called on its instance."""
    methods: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """The contract as a signature, for messages."""
        parts = [
            *self.positional,
            *(f"{k}=..." for k in self.keywords),
            *(f"[{k}=...]" for k in self.optional_keywords),
        ]
        how = {"sync": "def fn", "async": "async def fn", "either": "[async] def fn"}[self.mode]
        return (
            f"class({', '.join(parts)}) with {', '.join(self.methods)}"
            if self.is_class
            else f"{how}({', '.join(parts)})"
        )


CONTRACTS: dict[str, HookContract] = {
    "rollout": HookContract(
        "rollout_function_path", ("args", "rollout_id", "data_source"), keywords=("evaluation",), mode="either"
    ),
    "eval": HookContract(
        "eval_function_path", ("args", "rollout_id", "data_source"), keywords=("evaluation",), mode="either"
    ),
    "generate": HookContract(
        "custom_generate_function_path",
        ("args", "sample", "sampling_params"),
        optional_keywords=("evaluation",),
        mode="async",
    ),
    "sample_hook": HookContract(
        "rollout_sample_hook_path",
        ("args", "sample"),
        optional_keywords=("rollout_id", "evaluation"),
        mode="either",
    ),
    "custom_rm": HookContract("custom_rm_path", ("args", "sample"), mode="either"),
    "group_rm": HookContract("custom_rm_path", ("args", "samples"), mode="either"),
    "dynamic_filter": HookContract("dynamic_sampling_filter_path", ("args", "samples")),
    "buffer_filter": HookContract("buffer_filter_path", ("args", "rollout_id", "buffer", "num_samples")),
    "sample_filter": HookContract("rollout_sample_filter_path", ("args", "groups")),
    "all_samples": HookContract("rollout_all_samples_process_path", ("args", "all_groups", "data_source")),
    "reward_post_process": HookContract("custom_reward_post_process_path", ("args", "samples")),
    "convert_samples": HookContract("custom_convert_samples_to_train_data_path", ("args", "samples")),
    "advantage": HookContract("custom_advantage_function_path", ("args", "rollout_data")),
    "data_postprocess": HookContract("rollout_data_postprocess_path", ("args", "rollout_id", "rollout_data")),
    "loss": HookContract("custom_loss_function_path", ("args", "batch", "log_probs", "sum_of_sample_mean")),
    "tis": HookContract(
        "custom_tis_function_path",
        (),
        keywords=(
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    "pg_loss_reducer": HookContract(
        "custom_pg_loss_reducer_function_path",
        ("total_lengths", "response_lengths", "masks", "calculate_per_token_loss"),
    ),
    "megatron_init": HookContract("custom_megatron_init_path", ("args",)),
    "before_log_prob": HookContract("custom_megatron_before_log_prob_hook_path", ("args", "model", "store_prefix")),
    "before_train_step": HookContract(
        "custom_megatron_before_train_step_hook_path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    "post_write": HookContract("custom_update_weight_post_write_path", ("args", "version_dir", "rollout_engines")),
    "pre_read": HookContract("custom_pull_weights_pre_read_path", ("source_dir", "target_version")),
    "rollout_log": HookContract(
        "custom_rollout_log_function_path", ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    ),
    "eval_log": HookContract("custom_eval_rollout_log_function_path", ("rollout_id", "args", "data", "extra_metrics")),
    "data_source": HookContract(
        "data_source_path",
        ("args",),
        is_class=True,
        methods=("get_samples", "add_samples", "save", "load", "__len__"),
    ),
}
"""Kind -> contract."""
