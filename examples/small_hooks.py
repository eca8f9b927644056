"""Minimal examples of hooks; each docstring names the hook's flag (`docs/customization.md`).

python train.py ... --rollout-sample-filter-path examples.small_hooks:drop_truncated
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from slime.core.batch import TrainSample
from slime.core.sample import Sample, Status
from slime.rollout.loop import generate_rollout
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

logger = logging.getLogger(__name__)


def team_reward(args: Any, samples: list[Sample]) -> list[float]:
    """`--custom-rm-path` with `--group-rm`: grades all samples of a prompt together; the shortest response wins."""
    shortest = min(len(s.response) for s in samples)
    return [float(len(s.response) == shortest) for s in samples]


def rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`--rollout-function-path` or `--eval-function-path`: wraps the built-in rollout."""
    output = generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    output.metrics["rollout/from_example"] = 1.0
    return output


def no_empty_answers(args: Any, sample: Sample, evaluation: bool = False) -> Sample | None:
    """`--rollout-sample-hook-path`: sees each finished sample before its reward; None keeps the sample."""
    if not sample.response.strip():
        sample.reward = 0.0  # so no grader is called
        sample.remove_sample = not evaluation
    return None


def newest_first(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """`--buffer-filter-path`: removes at most `num_samples` groups from `buffer` and returns them."""
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def drop_truncated(args: Any, groups: list[list[Sample]]) -> None:
    """`--rollout-sample-filter-path`: these samples are not trained, but count in their group's mean."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status is Status.TRUNCATED


def log_longest(args: Any, all_groups: list[list[Sample]], data_source: Any) -> None:
    """`--rollout-all-samples-process-path`: sees all finished groups, including those that the filter dropped."""
    longest = max((s for group in all_groups for s in group), key=lambda s: s.response_length)
    logger.info("the longest answer has %d tokens and reward %s", longest.response_length, longest.reward)


def clip_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: returns raw rewards, and the rewards to train on (without normalisation)."""
    raw = [s.get_reward_value(args.reward_key) or 0.0 for s in samples]  # none is unscored here
    return raw, [max(-1.0, min(1.0, r)) for r in raw]


def convert(args: Any, samples: list[Sample]) -> list[TrainSample]:
    """`--custom-convert-samples-to-train-data-path`: makes the training records."""
    rewards = [(s, s.get_reward_value(args.reward_key)) for s in samples]  # None: unscored, and not trained
    return [TrainSample.from_sample(s, reward=math.nan if r is None else r) for s, r in rewards]


def log_step(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
    """`--custom-rollout-log-function-path`: returns False to log the usual metrics as well."""
    logger.info("step %d: %d samples in %.1f s", rollout_id, len(samples), seconds)
    return False


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], metrics: dict[str, float]) -> bool:
    """`--custom-eval-rollout-log-function-path`: `data` is name -> {"rewards", "truncated", "samples"}."""
    logger.info("after step %d: %s", rollout_id, {name: len(d["rewards"]) for name, d in data.items()})
    return False


def log_version(args: Any, version_dir: str, rollout_engines: list[str]) -> None:
    """`--custom-update-weight-post-write-path`: a weight version is complete on disk; engines will load it."""
    size = sum(file.stat().st_size for file in Path(version_dir).iterdir())
    logger.info("%s has %d bytes for %d engines", version_dir, size, len(rollout_engines))


def log_read(source_dir: str, target_version: int) -> None:
    """`--custom-pull-weights-pre-read-path`: called on an engine's host, before its agent reads a weight version."""
    logger.info("version %d is about to be read from %s", target_version, source_dir)


class CountingSource:
    """`--data-source-path`: a source of prompts. Groups that are put back are issued again before new groups."""

    def __init__(self, args: Any) -> None:
        self.n_samples_per_prompt: int = args.n_samples_per_prompt
        self.next_number = 0
        self.returned: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns exactly `num_samples` groups; slime assigns the ids."""
        again, self.returned = self.returned[:num_samples], self.returned[num_samples:]
        return again + [self._new() for _ in range(num_samples - len(again))]

    def _new(self) -> list[Sample]:
        self.next_number += 1
        prompt, label = f"{self.next_number}+1=", str(self.next_number + 1)
        return [Sample(prompt=prompt, label=label) for _ in range(self.n_samples_per_prompt)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        """This source saves nothing. A source with state would save its state under the step number."""

    def load(self, rollout_id: int | None = None) -> None:
        """See `save`."""

    def __len__(self) -> int:
        return 10**9
