"""Settings that name user code by import path. Signatures of user code are checked before the run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.conditions import ADVANTAGES, POLICY_TERM, fine_tunes
from slime.settings.fields import Adjusted, Need, Rule, derived, opt
from slime.settings.groups.weights import AGENTS as _AGENTS

if TYPE_CHECKING:
    from slime.settings.args import Args

DEFAULT_ROLLOUT = "slime.rollout.loop.generate_rollout"
"""The rollout function that samples step by step."""
SFT_ROLLOUT = "slime.rollout.sft.generate_rollout"
"""The rollout function of supervised fine-tuning: rows become samples, without engines."""
FULLY_ASYNC = "slime.rollout.fully_async.generate_rollout_fully_async"
"""The public slime's rollout function for `--fully-async`; a schedule with a permanent worker replaces it."""
_PUBLIC_PATHS = {
    "slime.rollout.sglang_rollout.generate_rollout": DEFAULT_ROLLOUT,
    "slime.rollout.sft_rollout.generate_rollout": SFT_ROLLOUT,
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": FULLY_ASYNC,
}
"""The public slime's name -> slime's name of a built-in rollout function."""
_DISTILS = "slime.rollout.on_policy_distillation.reward_func"
_AFTER_DISTILS = "slime.rollout.on_policy_distillation.post_process_rewards"
"""The public slime's functions for distillation from a served teacher."""
TEACHER_HOOK = "slime.rollout.workflows.teacher.judge"
"""The sample hook that sends samples to `--opd-teacher-url`."""

_SAMPLES = Need(
    lambda s: s.rollout_function_path != SFT_ROLLOUT,
    "a rollout that samples; fine-tuning takes its samples from the data",
)
_WEIGHTS = Need(lambda s: s.use_tis, "--use-tis")
_OWN_LOSS = Need(lambda s: s.custom_loss_function_path is not None, "--custom-loss-function-path")
_DISK = Need(lambda s: s.update_weight_transport == "disk", "--update-weight-transport disk")


def _one_spelling(path: Any) -> Any:
    dotted = str(path).replace(":", ".")
    dotted = _PUBLIC_PATHS.get(dotted, dotted)
    return dotted if dotted in _PUBLIC_PATHS.values() else path


def _own_worker(path: Any, s: Any) -> Adjusted | None:
    refused = s.was_given("fully_async") and not s.fully_async
    if path != FULLY_ASYNC or refused:
        return None
    return Adjusted(DEFAULT_ROLLOUT, f"{FULLY_ASYNC} implies --fully-async")


def _with_teacher(paths: Any, s: Any) -> Adjusted | None:
    if s.opd_teacher_url is None:
        return None
    others = tuple(path for path in paths if path != TEACHER_HOOK)
    return Adjusted((*others, TEACHER_HOOK), "--opd-teacher-url: the teacher scores each sample")


def teacher_of_reward(s: Any) -> str | None:
    """Returns the teacher's address if the run uses the public slime's reward function for distillation, else None."""
    url = s.given("rm_url")
    return None if url is None or s.given("custom_rm_path") != _DISTILS else str(url).removesuffix("/generate")


def _no_reward(path: Any, s: Any) -> Adjusted | None:
    if path not in (_DISTILS, _AFTER_DISTILS):
        return None
    return Adjusted(None, "a sample hook queries the teacher at --rm-url, see --opd-teacher-url")


@dataclass(frozen=True, kw_only=True)
class HookSettings:
    """Import paths: `pkg.mod.fn`, `pkg.mod:fn` or `path/to/file.py:fn`. --help hooks shows every signature."""

    rollout_function_path: str = derived(
        lambda s: SFT_ROLLOUT if fine_tunes(s) else None,
        "--loss-type sft_loss learns from data, not from rewards",
        default=DEFAULT_ROLLOUT,
        canonical=_one_spelling,
        adjust=_own_worker,
    )
    """Generates the samples of a step: fn(args, rollout_id, data_source, evaluation=False)."""
    eval_function_path: str | None = None
    """Runs an evaluation, with the same signature. Default: the built-in evaluation."""
    custom_generate_function_path: str | None = None
    """Generates one sample: async fn(args, sample, sampling_params[, evaluation]) -> Sample or list of samples."""
    rollout_sample_hook_path: tuple[str, ...] = opt((), append=True, adjust=_with_teacher)
    """Called with each finished sample before grading, and can replace it: [async] fn(args, sample[, rollout_id,
    evaluation]) -> Sample, or None to keep it. Repeatable; called in the order of the flags."""
    custom_rm_path: str | None = opt(None, adjust=_no_reward, first="Reward")
    """Grader: [async] fn(args, sample, **kw). With --group-rm, it receives and returns a list."""
    dynamic_sampling_filter_path: str | None = opt(None, needs=_SAMPLES)
    """Decides whether to keep a finished group: fn(args, samples, **kw) -> bool or DynamicFilterOutput."""
    buffer_filter_path: str | None = None
    """Selects groups from the buffer: fn(args, rollout_id, buffer, num_samples) -> groups."""
    rollout_sample_filter_path: str | None = opt(None, needs=_SAMPLES)
    """Excludes samples from training by setting sample.remove_sample: fn(args, groups)."""
    rollout_all_samples_process_path: str | None = opt(None, needs=_SAMPLES)
    """Called with everything generated in a step, including dropped groups: fn(args, all_groups, data_source)."""
    custom_reward_post_process_path: str | None = opt(None, adjust=_no_reward)
    """Computes rewards to train on, instead of group normalisation: fn(args, samples) -> (raw_rewards, rewards)."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Replaces the conversion of samples to training data: fn(args, samples)."""
    custom_advantage_function_path: str | None = opt(None, needs=ADVANTAGES)
    """Replaces the estimator and sets rollout_data["advantages"] (and "returns"): fn(args, rollout_data)."""
    rollout_data_postprocess_path: str | None = opt(None, needs=ADVANTAGES)
    """Changes rollout_data["advantages"] and ["returns"] in place before training: fn(args, rollout_id, rollout_data).
    """
    custom_loss_function_path: str | None = None
    """Loss with --loss-type custom_loss: fn(args, batch, log_probs, sum_of_sample_mean) -> (loss, metrics)."""
    custom_loss_logits: bool = opt(False, needs=_OWN_LOSS)
    """Pass the custom loss the logits [1, T, V] of each micro-batch's row, including prompts, instead of log-probs.
    Logits and gradient take 2 x T x V numbers of the model's dtype per rank, so keep --max-tokens-per-gpu small."""
    custom_tis_function_path: str | None = opt(None, needs=(POLICY_TERM, _WEIGHTS))
    """Replaces the weights of --use-tis: fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
    total_lengths, response_lengths) -> (pg_loss, masks, metrics), called by keyword."""
    custom_pg_loss_reducer_function_path: str | None = opt(None, needs=POLICY_TERM)
    """Replaces the aggregation of the policy loss: fn(total_lengths, response_lengths, masks, calculate_per_token_loss)
    -> fn(token loss) -> scalar. The scalars of all micro-batches are summed."""
    custom_megatron_init_path: str | None = None
    """Called on each training rank after it joins its process groups and before the model is built: fn(args)."""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """Called on each training rank before a forward pass without gradients: fn(args, model, store_prefix). The prefix
    is empty for policy and critic, else ref_ or teacher_."""
    custom_megatron_before_train_step_hook_path: str | None = None
    """Called on each training rank before an optimizer step: fn(args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)."""
    custom_rollout_log_function_path: str | None = None
    """Logs a rollout: fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool; True skips the
    default logging."""
    custom_update_weight_post_write_path: str | None = opt(None, needs=_DISK)
    """Called on training rank 0 when a weight version is complete on disk, before engines load it: fn(args,
    version_dir, rollout_engines), with the engines' addresses."""
    custom_pull_weights_pre_read_path: str | None = opt(
        None, names=("--sglang-custom-pull-weights-pre-read-hook",), needs=_AGENTS
    )
    """Called by each engine's agent before it reads a weight version: fn(source_dir, target_version)."""
    custom_eval_rollout_log_function_path: str | None = None
    """Logs an evaluation: fn(rollout_id, args, data, extra_metrics) -> bool; True skips the default logging."""


def logits_are_of_whole_samples(args: Args) -> str | None:
    cases = (
        ((args.megatron["context_parallel_size"] or 1) > 1, "--context-parallel-size, whose ranks hold shards of rows"),
        (args.use_prefix_sharing, "--use-prefix-sharing, whose rows contain a shared prefix only once"),
        (args.enable_mtp_training, "--enable-mtp-training, whose loss needs log-probs"),
    )
    others = [text for holds, text in cases if holds]
    if not args.custom_loss_logits or not others:
        return None
    return f"--custom-loss-logits does not work with {others[0]}; drop one of them, or compute the loss from log-probs"


RULES: tuple[Rule, ...] = (logits_are_of_whole_samples,)
