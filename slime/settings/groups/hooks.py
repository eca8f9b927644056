"""User code in the loop, by import path. Every hook's signature is checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import opt


@dataclass(frozen=True, kw_only=True)
class HookArgs:
    """Import paths: `pkg.mod.fn`, `pkg.mod:fn` or `path/to/file.py:fn`."""

    rollout_function_path: str = "slime.rollout.loop.generate_rollout"
    """Generates one step: fn(args, rollout_id, data_source, evaluation=False)."""
    eval_function_path: str | None = None
    """Same signature, for evaluation. Default: the built-in evaluation."""
    custom_generate_function_path: str | None = None
    """One sample: async fn(args, sample, sampling_params[, evaluation]) -> Sample or list of samples."""
    rollout_sample_hook_path: tuple[str, ...] = opt((), append=True)
    """Sees or replaces each finished sample before its reward: [async] fn(args, sample[, rollout_id, evaluation]) ->
    Sample or None (keeps it). Repeatable: called in the order of the flags."""
    custom_rm_path: str | None = None
    """Grader: fn(args, sample, **kw), sync or async; with --group-rm it gets and returns a list."""
    dynamic_sampling_filter_path: str | None = None
    """Keep a finished group? fn(args, samples, **kw) -> bool or DynamicFilterOutput."""
    buffer_filter_path: str | None = None
    """Chooses buffered groups: fn(args, rollout_id, buffer, num_samples) -> groups."""
    rollout_sample_filter_path: str | None = None
    """Marks samples not to train on: fn(args, groups), sets sample.remove_sample."""
    rollout_all_samples_process_path: str | None = None
    """Sees everything generated in a step, dropped groups too: fn(args, all_groups, data_source)."""
    custom_reward_post_process_path: str | None = None
    """Rewards to train on, in place of group normalisation: fn(args, samples) -> (raw_rewards, rewards)."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Replaces the conversion of samples to training data: fn(args, samples)."""
    custom_advantage_function_path: str | None = None
    """Replaces the estimator: fn(args, rollout_data), sets rollout_data["advantages"] (and "returns")."""
    rollout_data_postprocess_path: str | None = None
    """Last word on the advantages: fn(args, rollout_id, rollout_data), changes rollout_data["advantages"] and
    ["returns"] in place."""
    custom_loss_function_path: str | None = None
    """With --loss-type custom_loss: fn(args, batch, log_probs, sum_of_sample_mean) -> (loss, metrics)."""
    custom_tis_function_path: str | None = None
    """Replaces the weights of --use-tis: fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
    total_lengths, response_lengths) -> (pg_loss, masks, metrics), called by keyword."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Replaces the aggregation of the policy loss: fn(total_lengths, response_lengths, masks,
    calculate_per_token_loss) -> fn(token loss) -> scalar; the scalars of micro-batches are added up."""
    custom_rollout_log_function_path: str | None = None
    """fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool; True replaces the default logging."""
    custom_eval_rollout_log_function_path: str | None = None
    """fn(rollout_id, args, data, extra_metrics) -> bool; True replaces the default logging."""
    custom_config_path: str | None = None
    """YAML file with any of these settings by name; the key `custom` holds free settings for hooks, as args.custom."""
