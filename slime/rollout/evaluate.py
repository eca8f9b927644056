"""Evaluation: samples `n` responses to every held-out prompt, with separate sampling parameters.

All executions start together; the client limits the requests in flight. The first error cancels all other executions.

Invariants
1. Each sample gets a fresh copy of its dataset's sampling parameters.
2. All samples of an evaluation come from a single weight version. Mixed versions are an error and are never averaged.
3. Failed executions, and responses that no grader can score, are counted but do not affect the score. If more than
   `--eval-max-failed-fraction` of a dataset fails, the evaluation fails immediately. If grading fails, the response is
   graded again, up to `MAX_TRIES` times, but never resampled: replacing responses that graders fail on would inflate
   the score.
4. Executions that have not finished after a dataset's `eval_task_timeout` are cancelled and counted, and are neither
   failed nor scored. A dataset with fewer scored executions than its `min_eval_samples` has no score.
5. Fan-out siblings count as one execution: the mean and the pass rate use the mean of their rewards.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slime.buffer.groups import flatten, reset
from slime.core.errors import DataError, EngineError, HookError
from slime.core.sample import PromptRow, Sample, Status
from slime.rollout.context import RolloutContext, offer_to_threads
from slime.rollout.execute import GIVEN_UP, Execution, Outcome, all_or_first_error
from slime.rollout.filters import rewards_by_execution
from slime.rollout.guard import END_LIMIT_S, end_tasks, supervised
from slime.rollout.sample_metrics import empty_turn_metrics, pass_rates, sample_metrics, spread, turn_metrics
from slime.rollout.transcript import STRAYS, refuse_unsampled
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.user_functions import RolloutHooks, in_thread, load, reachable
from slime.rollout.workers.episodes import Episodes, LocalEpisodes
from slime.settings import Args
from slime.settings.eval_config import EvalDatasetConfig
from slime.settings.hook_contracts import is_async

logger = logging.getLogger(__name__)

MAX_TRIES = 3
NAMED_REASONS = 3


@dataclass(frozen=True, slots=True)
class EvalDataset:
    config: EvalDatasetConfig
    """Name, graders and sampling parameters."""
    rows: Sequence[PromptRow]


def make_samples(dataset: EvalDataset, first_index: int) -> list[Sample]:
    """Creates fresh samples, row by row. Their indices are negative to keep them out of the ledger."""
    config = dataset.config
    samples: list[Sample] = []
    for number, row in enumerate(dataset.rows):
        metadata = {**copy.deepcopy(dict(row.metadata)), **copy.deepcopy(config.metadata_overrides or {})}
        if config.rm_type is not None:
            metadata.setdefault("rm_type", config.rm_type)
        for _ in range(config.n_samples_per_eval_prompt):
            samples.append(
                Sample(
                    group_index=-1 - number,
                    index=-1 - first_index - len(samples),
                    prompt=copy.deepcopy(row.prompt),
                    tokens=list(row.prompt_tokens or ()),
                    images=list(row.images),
                    label=row.label,
                    metadata=copy.deepcopy(metadata),
                    generate_function_path=config.custom_generate_function_path,
                    custom_rm_path=config.custom_rm_path,
                )
            )
    return samples


@dataclass(slots=True)
class _FailedExecutions:
    """Tracks the executions of a dataset that failed in every attempt, and why."""

    name: str
    num_executions: int
    num_allowed: int
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        """Raises `EngineError` if too many have failed."""
        self.reasons.append(reason)
        if len(self.reasons) > self.num_allowed:
            named = "; ".join(dict.fromkeys(self.reasons[-NAMED_REASONS:]))
            raise EngineError(
                f"{len(self.reasons)} of {self.num_executions} samples of {self.name} failed in evaluation; at most "
                f"{self.num_allowed} may fail (--eval-max-failed-fraction); reasons: {named}"
            )


async def _evaluate_one(
    context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks, losses: _FailedExecutions
) -> list[Sample]:
    """Generates and scores one execution. Unscored and failed samples get no reward. Raises the error of
    `_FailedExecutions.add`.
    """
    episodes: Episodes = context.workers or LocalEpisodes(context.client)
    execution = Execution([sample], Outcome.ABORTED)
    for _ in range(MAX_TRIES):
        execution = await episodes.evaluate(context, sample, dataset, hooks)
        if execution.outcome is Outcome.FINISHED:
            context.progress.done += 1
            return execution.samples
        if execution.outcome in GIVEN_UP:
            break  # another attempt would have the same outcome
        if execution.outcome is Outcome.UNSCORED and len(execution.samples) > 1:
            break  # another attempt would resample the siblings
        sample = execution.samples[0]
    context.progress.done += 1
    left = execution.samples[0]
    if execution.outcome is Outcome.UNSCORED:
        left.unscored = execution.reason
        return [left]
    reason = f"{execution.outcome.value}: {execution.reason}"
    losses.add(reason)
    logger.warning("evaluation sample %s failed in every attempt: %s", sample.index, reason)
    failed = reset(left)
    failed.status, failed.failure = Status.FAILED, reason
    return [failed]


async def _evaluate_dataset(
    context: RolloutContext,
    samples: Sequence[Sample],
    dataset: EvalDatasetConfig,
    hooks: RolloutHooks,
    losses: _FailedExecutions,
) -> tuple[list[Sample], int]:
    """Evaluates a dataset until its `eval_task_timeout`, and cancels the executions that are still running then.

    Returns the samples of the others, and the number of cancelled executions. Raises the first error.
    """
    tasks = [asyncio.create_task(_evaluate_one(context, one, dataset, hooks, losses)) for one in samples]
    if not tasks:
        return [], 0
    try:
        done, late = await asyncio.wait(tasks, timeout=dataset.eval_task_timeout, return_when=asyncio.FIRST_EXCEPTION)
        finished = [one for task in tasks if task in done for one in task.result()]
    finally:
        await end_tasks(tasks, 2 * END_LIMIT_S)
    context.progress.done += len(late)
    return finished, len(late)


def dataset_metrics(
    dataset: EvalDataset, samples: Sequence[Sample], reward_key: str | None, num_late: int = 0
) -> dict[str, float]:
    """Returns `eval/<name>...` metrics, without a score if all samples failed or too few finished.

    `num_late`: executions that `eval_task_timeout` ended, in addition to `samples`.

    Raises `DataError` if no sample has a score although some did not fail.
    """
    name = f"eval/{dataset.config.name}"
    finished = [s for s in samples if s.get_reward_value(reward_key) is not None]
    rewards = rewards_by_execution(finished, reward_key)
    failed = [s for s in samples if s.status is Status.FAILED]
    num_ungradable = sum(bool(s.ungradable) for s in finished)
    counts = {  # every sample falls into one of the last five
        f"{name}-num_prompts": float(len(dataset.rows)),
        f"{name}-num_scored": float(len(finished) - num_ungradable),
        f"{name}-num_ungradable": float(num_ungradable),
        f"{name}-num_unscored": float(len(samples) - len(finished) - len(failed)),
        f"{name}-num_failed": float(len(failed)),
        f"{name}-num_late": float(num_late),
    }
    if failed and len(failed) == len(samples):
        logger.warning("%s has no score, because all of its samples failed; last reason: %s", name, failed[-1].failure)
        return counts
    if len(rewards) < (dataset.config.min_eval_samples or bool(num_late)):
        logger.warning(
            "%s has no score: only %d executions are scored, and min_eval_samples is %s; %d had not finished after "
            "eval_task_timeout",
            *(name, len(rewards), dataset.config.min_eval_samples or "not set", num_late),
        )
        return counts
    if not rewards:
        reason = next((s.unscored or s.failure for s in samples), "the dataset is empty")
        raise DataError(f"none of the {len(samples)} samples of {dataset.config.name} has a score: {reason}")
    metrics = {
        name: statistics.fmean(rewards),
        f"{name}-truncated_ratio": statistics.fmean(s.status is Status.TRUNCATED for s in finished),
        **counts,
        **spread(f"{name}/response_len", [s.effective_response_length for s in finished]),
        **turn_metrics(name, finished),
        **empty_turn_metrics(f"{name}/num_empty_turns", finished),
    }
    by_prompt: dict[int | None, list[Sample]] = {}
    for sample in finished:
        by_prompt.setdefault(sample.group_index, []).append(sample)
    rates = pass_rates(list(by_prompt.values()), reward_key, dataset.config.n_samples_per_eval_prompt)
    return metrics | {f"{name}-pass@{k}": rate for k, rate in rates.items()}


async def evaluate(context: RolloutContext, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluates all datasets concurrently.

    Raises `EngineError` if too many executions fail, or if samples come from several weight versions.
    """
    args, hooks = context.args, RolloutHooks.load(context.args)
    datasets = context.eval_datasets
    if not datasets:
        raise DataError("the evaluation has no data; set --eval-prompt-data NAME FILE or --eval-config")
    num_executions = sum(len(d.rows) * d.config.n_samples_per_eval_prompt for d in datasets)
    context.progress.begin("executions", num_executions)
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    first_index = 0
    work = []
    for dataset in datasets:
        samples = make_samples(dataset, first_index)
        first_index += len(samples)
        losses = _FailedExecutions(
            dataset.config.name, len(samples), math.ceil(args.eval_max_failed_fraction * len(samples))
        )
        work.append(_evaluate_dataset(context, samples, dataset.config, hooks, losses))
    results = await all_or_first_error(work)
    for dataset, (samples, num_late) in zip(datasets, results, strict=True):
        metrics |= dataset_metrics(dataset, samples, args.eval_reward_key, num_late)
        data[dataset.config.name] = {
            "rewards": [s.get_reward_value(args.eval_reward_key) for s in samples],
            "truncated": [s.status is Status.TRUNCATED for s in samples],
            "samples": samples,
        }
    versions = sorted({v for entry in data.values() for s in entry["samples"] for v in s.weight_versions})
    if len(versions) > 1:
        raise EngineError(
            f"the evaluation mixes the weight versions {versions}: weights changed during the evaluation, or an engine "
            "missed a sync; evaluate again, because a mixed score is meaningless"
        )
    if versions:
        metrics["eval/weight_version"] = float(versions[0])
    return RolloutFnEvalOutput(data, metrics)


# ---- user functions for whole steps: `--rollout-function-path` and `--eval-function-path` ---------------------------


async def rollout_by_function(context: RolloutContext, rollout_id: int, source: object) -> RolloutFnTrainOutput:
    """Calls the user's rollout function and adds sample metrics. Raises `HookError` if the result is invalid."""
    path = context.args.rollout_function_path
    with STRAYS.kept():
        output = await _call(path, "rollout", context, rollout_id, source, evaluation=False)
        if isinstance(output, list):
            output = RolloutFnTrainOutput(output)
        if not hasattr(output, "samples"):
            told = f"{path} returned {type(output).__name__}"
            raise HookError(f"{told}; a rollout function must return RolloutFnTrainOutput")
        groups = [flatten(group) for group in output.samples]
        _finish([sample for group in groups for sample in group])
        refused = refuse_unsampled(context.args, rollout_id, groups)
    metrics = {**sample_metrics(context.args, groups), **refused}
    return RolloutFnTrainOutput(groups, {**metrics, **(output.metrics or {})})


def _finish(samples: Sequence[Sample]) -> None:
    """Marks what a rollout function returned with a response and a reward as complete, even if it left the status."""
    for sample in samples:
        if sample.status is Status.PENDING and sample.response_length > 0 and sample.reward is not None:
            sample.status = Status.COMPLETED


async def evaluate_by_function(context: RolloutContext, rollout_id: int, source: object) -> RolloutFnEvalOutput:
    """Calls the user's evaluation function. Raises `HookError` if the result is invalid."""
    path = context.args.eval_function_path
    assert path is not None, "--eval-function-path is not set"
    output = await _call(path, "eval", context, rollout_id, source, evaluation=True)
    data = output if isinstance(output, dict) else getattr(output, "data", None)
    if not isinstance(data, dict) or not all(isinstance(one, dict) and "rewards" in one for one in data.values()):
        raise HookError(
            f"{path} returned {type(output).__name__}; an evaluation function must return a RolloutFnEvalOutput, or "
            'its data: {dataset: {"rewards": [...], "truncated": [...], "samples": [...]}}'
        )
    metrics = {f"eval/{name}": statistics.fmean(one["rewards"]) for name, one in data.items() if one["rewards"]}
    own = None if isinstance(output, dict) else output.metrics
    return RolloutFnEvalOutput(data, {**metrics, **(own or {})})


async def _call(
    path: str, kind: str, context: RolloutContext, rollout_id: int, source: object, *, evaluation: bool
) -> Any:
    function = load(path, kind)
    assert function is not None, f"{path} is not a function"
    call = function if is_async(function) else partial(in_thread, function)

    async def offering(own: Args) -> Any:
        if not evaluation:
            offer_to_threads()
        return await call(own, rollout_id, source, evaluation=evaluation)

    limit_s = context.args.execution_timeout_s  # any execution's progress counts
    with reachable(context.args) as own:
        return await supervised(offering(own), what=path, limit_s=limit_s)
